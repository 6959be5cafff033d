"""Request logs that visitors send: what the endpoints on them share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Final, TypeVar

from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from inferencegym.messages import Allowed, Message, plain_schema
from server.api.policies import gzipped
from server.context import Context, Mount
from server.net.json_io import JsonBounds, JsonRoute, read_object
from server.net.problems import documented
from server.schemas import Schema, read_request

BOUNDS: Final = JsonBounds(text_bytes=None)
"""Bounds of a body: the log is one text."""
SUFFIXES: Final = (".csv", ".json", ".jsonl")
_LOG_TEXT: Final = Allowed("the text of a request log")
_SUFFIX: Final = Allowed("a file name that ends with " + ", ".join(SUFFIXES))
_FILE_NAME: Final = r"[^./]\.([cC][sS][vV]|[jJ][sS][oO][nN][lL]?)$"
# A name is more than white space, of which Python knows more than JSON Schema's regular expressions.
_COLUMN: Final = r"(arrival|prompt|output|class|reused|status|blocks)=[^=,]*[^=,\s\x85\x1c-\x1f][^=,]*"
_COLUMNS: Final = f"^{_COLUMN}(,{_COLUMN})*$"
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


L = TypeVar("L", bound=LogRequest)


class LogRoutes:
    """An endpoint on visitors' request logs at one prefix; the work is a job in a process of its own."""

    def __init__(self, context: Context, mount: Mount) -> None:
        self._settings = context.settings
        self._family = mount.family
        self._prefix = mount.prefix
        self._jobs = context.jobs

    def _route(
        self,
        path: str,
        endpoint: Callable[[Request], Awaitable[Response]],
        summary: str,
        request_schema: Schema,
        answer: type[BaseModel],
    ) -> JsonRoute:
        return JsonRoute(
            self._prefix + path,
            endpoint,
            method="POST",
            summary=summary,
            tags=[self._family.name],
            request_schema=request_schema,
            responses=documented(plain_schema(answer), 429, 503),
        )

    async def _read(self, request: Request, model: type[L]) -> L:
        body = await read_object(request, self._settings.max_trace_bytes, self._settings.body_timeout_s, BOUNDS)
        return read_request(model, body)

    async def _answer(self, request: Request, job: str, wanted: LogRequest, **more: Any) -> Response:
        return gzipped(request, await self._jobs.run(job, {**wanted.model_dump(exclude_none=True), **more}))
