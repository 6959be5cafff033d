"""Request logs in requests: shared code of the endpoints /plan and /shadow, which keep no log after their answer."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from inferencegym.errors import InferenceGymError
from inferencegym.messages import WHOLE, Allowed, Message
from ops.log.names import check_table, file_name
from ops.worker import request_parts
from server.api.route import Endpoint, Route, Routes
from server.net.jobs import JobRefusedError, unless_client_leaves
from server.net.json_io import gzipped
from server.net.limits import sender_of

MAX_LOG_BYTES: Final = 4_194_304
"""Longest body."""
SUFFIXES: Final = (".csv", ".json", ".jsonl")
_LOG_TEXT: Final = Allowed("the text of a request log")
_FILE_NAME: Final = r"[^./]\.([cC][sS][vV]|[jJ][sS][oO][nN][lL]?)$"
# A name is not only white space, which Python defines more widely than JSON Schema's regular expressions.
_QUANTITY: Final = "(arrival|prompt|output|class|priority|reused|status|blocks|session|id|model|duration)"
_COLUMN: Final = rf"{_QUANTITY}=[^=,]*[^=,\s\x85\x1c-\x1f][^=,]*"
_COLUMNS: Final = f"^{_COLUMN}(,{_COLUMN})*$"
_FILTER: Final = r"^[^=]*[^=\s\x85\x1c-\x1f][^=]*=.*$"
_SOMETHING: Final = "[!-~]"
"""Every log has a printable character; Python and JSON Schema define white space differently."""

_Seconds = Annotated[float, Field(ge=0, le=1e9)]


class LogRequest(Message):
    """A request log in the body of a request."""

    log: Annotated[
        str, Field(pattern=_SOMETHING, description="text of the log, in a format of import-trace"), _LOG_TEXT
    ]
    name: (
        Annotated[
            str,
            Field(pattern=_FILE_NAME, description="name of its file, whose suffix distinguishes CSV from JSON"),
            Allowed("a file name that ends with " + ", ".join(SUFFIXES)),
        ]
        | None
    ) = "log.csv"
    columns: Annotated[
        Annotated[str, Field(max_length=1000, pattern=_COLUMNS)] | None,
        Field(description="columns with unusual names, such as arrival=ts:ms,prompt=tokens_in,output=tokens_out"),
        Allowed("pairs of a quantity and its column, such as arrival=ts:ms,prompt=tokens_in"),
    ] = None
    filter: Annotated[
        Annotated[str, Field(max_length=1000, pattern=_FILTER)] | None,
        Field(
            description="only requests with one of these values in a column, such as model=llama or model=llama,qwen"
        ),
        Allowed("a column and the values to keep, such as model=llama-3.1-8b"),
    ] = None
    failed: Annotated[
        Literal["count", "skip"] | None,
        Field(description="failed requests count as demand, with the median output, or are left out (default count)"),
    ] = None
    drop_duplicates: Annotated[
        bool | None, Field(description="of requests with the same id, only the first counts (default false)")
    ] = None
    skip_bad: Annotated[
        Annotated[int, Field(ge=0, le=10_000), WHOLE] | None,
        Field(description="number of rows that cannot be read and may be left out (default 0)"),
    ] = None
    limit: Annotated[
        Annotated[int, Field(ge=1, le=2_000_000), WHOLE] | None,
        Field(description="only the first requests of the file"),
    ] = None
    from_s: Annotated[_Seconds | None, Field(description="first second of the log to use")] = None
    to_s: Annotated[_Seconds | None, Field(description="second of the log at which to stop (not included)")] = None
    drafts: Annotated[
        bool | None, Field(description="whether settings may draft tokens, with a draft model (default false)")
    ] = None
    kv_cache_dtype: Annotated[
        Literal["auto", "fp8"] | None, Field(description="precision of the KV cache; by default that of the table")
    ] = None

    def check(self) -> None:
        """Refuse at once what needs no job."""
        check_table(file_name(self.name), self.log, self.columns, self.filter)


class LogRoutes(Routes):
    """Endpoints for request logs at one prefix; the work is a job in a separate process."""

    def _log(self, path: str, endpoint: Endpoint, summary: str, answer: type[BaseModel], **more: Any) -> Route:
        return self._post(path, endpoint, summary, most_bytes=MAX_LOG_BYTES, response_model=answer, **more)

    async def _answer(self, request: Request, job: str, wanted: LogRequest, **more: Any) -> Response:
        try:
            # A job takes seconds to start.
            await asyncio.to_thread(wanted.check)
        except InferenceGymError as error:
            raise JobRefusedError(request_parts(error)) from error
        client = sender_of(request.scope)
        work = self._context.jobs.run(client, job, {**wanted.model_dump(exclude_none=True), **more})
        return await gzipped(request, await unless_client_leaves(request, work))
