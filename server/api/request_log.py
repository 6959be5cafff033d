"""Request logs that visitors send: the fields that the endpoints on logs share."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field

from inferencegym.messages import Allowed, Message
from server.net.json_io import JsonBounds

BOUNDS: Final = JsonBounds(text_bytes=None)
"""Bounds of a body: the log is one text."""
SUFFIXES: Final = (".csv", ".json", ".jsonl")
_LOG_TEXT: Final = Allowed("the text of a request log")
_SUFFIX: Final = Allowed("a file name that ends with " + ", ".join(SUFFIXES))
_FILE_NAME: Final = r"[^./]\.([cC][sS][vV]|[jJ][sS][oO][nN][lL]?)$"
_COLUMNS: Final = (
    "^(arrival|prompt|output|class|reused|status|blocks)=[^=,]+"
    "(,(arrival|prompt|output|class|reused|status|blocks)=[^=,]+)*$"
)
_SOMETHING: Final = "[!-~]"
"""Every log has a printable character; what counts as white space differs between Python and JSON Schema."""


_Seconds = Annotated[float, Field(ge=0, le=1e9)]


class LogRequest(Message):
    """A request log in the body of a request."""

    log: Annotated[
        str, Field(pattern=_SOMETHING, description="text of the log, in a format of import-trace"), _LOG_TEXT
    ]
    name: (
        Annotated[
            str,
            Field(pattern=_FILE_NAME, description="name of its file: what it ends with tells CSV from JSON"),
            _SUFFIX,
        ]
        | None
    ) = "log.csv"
    columns: Annotated[
        Annotated[str, Field(max_length=1000, pattern=_COLUMNS)] | None,
        Field(description="columns of no usual name, as in arrival=ts:ms,prompt=tokens_in,output=tokens_out"),
    ] = None
    from_s: Annotated[_Seconds | None, Field(description="second of the log to begin at")] = None
    to_s: Annotated[_Seconds | None, Field(description="second of the log to end before")] = None
