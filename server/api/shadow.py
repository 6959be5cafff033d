"""POST /shadow: comparison of built-in policies on a visitor's request log, with engine settings to try.

The log is not kept after the report. One report is made at a time, on a thread.
"""

from __future__ import annotations

import asyncio
import math
import re
import tempfile
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from env.family import Family
from env.serving.family import tables
from inferencegym.errors import DataFormatError, short_text
from inferencegym.messages import WHOLE, Allowed, Message, plain_schema
from inferencegym.models import NAIVE_ACTION, ServeAction
from inferencegym.tasks import get_task
from server.api.policies import available, compressed, gzipped
from server.context import Context, Mount
from server.net.errors import InvalidRequestError
from server.net.json_io import JsonBounds, JsonRoute, read_object
from server.net.problems import documented
from server.schemas import Schema, TaskName, nullable, read_request, task_id_schema

DEFAULT_POLICIES: Final = ("heuristic", "hill_climb")
STORED_POLICIES: Final = frozenset({"ppo", "best_static", "best_adaptive"})
"""Found for one task each, so that the request must say which; the others need nothing but the log."""
MAX_LOG_BRACKETS: Final = 200_000
"""Arrays and objects of a log, at most: Python's parser holds up all other requests while it reads them. A log of 4 MB
with two in each request has at most some 90,000."""
BOUNDS: Final = JsonBounds(text_bytes=None)
"""Bounds of a body: the log is one text."""
MAX_REPLICAS: Final = 64
MAX_SLO_MS: Final = 600_000.0
SUFFIXES: Final = (".csv", ".json", ".jsonl")
_LOG_TEXT: Final = Allowed("the text of a request log")
_SUFFIX: Final = Allowed("a file name that ends with " + ", ".join(SUFFIXES))
_FILE_NAME: Final = r"[^./]\.([cC][sS][vV]|[jJ][sS][oO][nN][lL]?)$"
_SOMETHING: Final = "[!-~]"
"""Every log has a printable character; what counts as white space differs between Python and JSON Schema."""
_OPTION: Final = re.compile(r"--([a-z]+(?:-[a-z]+)*)")


_Seconds = Annotated[float, Field(ge=0, le=1e9)]
_PolicyName = Literal["naive", "random", "hill_climb", "heuristic", "ppo", "best_static", "best_adaptive"]


class ShadowRequest(Message):
    """Body of POST /shadow."""

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
    policies: Annotated[list[_PolicyName], Field(min_length=1, json_schema_extra={"uniqueItems": True})] | None = None
    fixed: Annotated[
        dict[str, Any] | None, Field(description="the setting to compare with; missing knobs: the plan's baseline")
    ] = None
    task_id: Annotated[TaskName | None, Field(description="lends its fleet, objectives and stored policies")] = None
    replicas: Annotated[
        Annotated[int, Field(ge=1, le=MAX_REPLICAS), WHOLE] | None, Field(description="GPUs of the fleet")
    ] = None
    slo_ms: Annotated[Annotated[float, Field(ge=1, le=MAX_SLO_MS)] | None, Field(description="objective of TTFT")] = (
        None
    )
    from_s: Annotated[_Seconds | None, Field(description="second of the log to begin at")] = None
    to_s: Annotated[_Seconds | None, Field(description="second of the log to end before")] = None

    @property
    def file_name(self) -> str:
        """Name of the log's file, without folders."""
        return Path(self.name or "log.csv").name

    @property
    def asked(self) -> list[str]:
        """Names of policies. Raises InvalidRequestError where one is named twice."""
        names: list[str] = [*(DEFAULT_POLICIES if self.policies is None else self.policies)]
        if len(set(names)) != len(names):
            raise InvalidRequestError("policies", names, "names that differ from each other")
        return names


class ShadowRoutes:
    """/shadow of the serving fleet at one prefix."""

    def __init__(self, context: Context, mount: Mount) -> None:
        self._settings = context.settings
        self._family = mount.family
        self._prefix = mount.prefix
        self._one = asyncio.Semaphore(1)

    def routes(self) -> list[JsonRoute]:
        return [
            JsonRoute(
                self._prefix + "/shadow",
                self.shadow,
                method="POST",
                summary="Compare policies on your request log",
                tags=[self._family.name],
                request_schema=self._request_schema(),
                responses=documented(plain_schema(ShadowAnswer), 429, 503),
            )
        ]

    async def shadow(self, request: Request) -> Response:
        body = await read_object(request, self._settings.max_trace_bytes, self._settings.body_timeout_s, BOUNDS)
        wanted = read_request(ShadowRequest, body)
        if wanted.log.count("[") + wanted.log.count("{") > MAX_LOG_BRACKETS:
            raise InvalidRequestError("log", wanted.log, f"text with at most {MAX_LOG_BRACKETS:,} brackets [ and {{")
        async with self._one:
            answer = await asyncio.to_thread(compressed, lambda: shadow_answer(self._family, wanted))
        return gzipped(request, answer)

    def _request_schema(self) -> Schema:
        schema = plain_schema(ShadowRequest)
        schema["properties"]["fixed"] = nullable(plain_schema(self._family.action_model))
        schema["properties"]["task_id"] = nullable(task_id_schema(self._family))
        return schema


def shadow_answer(family: Family, wanted: ShadowRequest) -> dict[str, Any]:
    """The report as JSON with ``export``: settings in vLLM's terms per policy; runs on a thread."""
    from agents.shadow.compare import shadow
    from agents.shadow.export import vllm_config
    from simulator.offline.importers import import_log

    policies = _playable_policies(family, wanted)
    fixed = NAIVE_ACTION if wanted.fixed is None else ServeAction.from_dict(wanted.fixed)
    end_s = math.inf if wanted.to_s is None else wanted.to_s
    table = tables()
    with tempfile.TemporaryDirectory(prefix="inferencegym-log-") as folder:
        path = Path(folder) / f"log{Path(wanted.file_name).suffix.lower()}"
        path.write_text(wanted.log, encoding="utf-8")
        try:
            report = shadow(
                import_log(path, start_s=wanted.from_s or 0.0, end_s=end_s).log,
                policies,
                fixed=fixed,
                n_replicas=wanted.replicas,
                slo_ms=wanted.slo_ms,
                task=None if wanted.task_id is None else get_task(wanted.task_id),
                tables=table,
            )
        except DataFormatError as error:
            # Messages name the visitor's file, and this request's fields instead of the command's options.
            text = _OPTION.sub(lambda found: found[1].replace("-", "_"), str(error))
            text = text.replace(str(path), short_text(wanted.file_name))
            raise DataFormatError(text, error.line, error.field) from error
    export = {outcome.policy: vllm_config(report, table, outcome.policy) for outcome in report.outcomes}
    return {**report.to_dict(), "export": export}


def _playable_policies(family: Family, wanted: ShadowRequest) -> list[str]:
    if wanted.task_id is None:
        possible = [name for name in family.policies if name not in STORED_POLICIES]
        more = ", unless task_id names the task whose stored policy is meant"
    else:
        possible, more = available(family, wanted.task_id)[1], f" for task {wanted.task_id!r}"
    for name in wanted.asked:
        if name not in possible:
            raise InvalidRequestError("policies", name, f"one of {', '.join(possible)}{more}")
    return wanted.asked


class ShadowAnswer(BaseModel):
    """Answer of POST /shadow: the report, and settings in vLLM's terms for each policy."""

    log: dict[str, Any]
    n_replicas: int
    slo_ms: float
    outcomes: list[dict[str, Any]]
    best: str
    export: dict[str, str]
