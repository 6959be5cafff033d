"""POST /shadow: what policies of ours would have done on a visitor's request log, and the engine settings to try.

The log is read, played and forgotten; nothing of it is kept. One report is made at a time, on a thread.
"""

from __future__ import annotations

import asyncio
import math
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from inferencegym.errors import DataFormatError
from inferencegym.models import NAIVE_ACTION, ServeAction
from inferencegym.tasks import TaskId, get_task
from server import schemas
from server.api.policies import PLAYABLE, available, compressed, gzipped
from server.api.serving import Context, documented
from server.families import served_tables
from server.net.errors import InvalidRequestError
from server.net.json_io import JsonRoute, read_object
from server.schemas import Schema

DEFAULT_POLICIES: Final = ("heuristic", "hill_climb")
STORED_POLICIES: Final = frozenset({"ppo", "best_static", "best_adaptive"})
"""Found for one task each, so that the request must say which; the others need nothing but the log."""
MAX_REPLICAS: Final = 64
MAX_SLO_MS: Final = 600_000.0
SUFFIXES: Final = (".csv", ".json", ".jsonl")
_SOMETHING: Final = "[!-~]"
"""Every log has a printable character; what counts as white space differs between Python and JSON Schema."""
_OPTION: Final = re.compile(r"--([a-z]+(?:-[a-z]+)*)")


@dataclass(frozen=True, slots=True)
class ShadowRequest:
    """Body of POST /shadow."""

    log: str
    name: str
    policies: list[str]
    fixed: ServeAction
    task_id: TaskId | None
    replicas: int | None
    slo_ms: float | None
    from_s: float
    to_s: float

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> ShadowRequest:
        known = ("log", "name", "policies", "fixed", "task_id", "replicas", "slo_ms", "from_s", "to_s")
        for key in body:
            if key not in known:
                raise InvalidRequestError(key, body[key], "left out: the fields are " + ", ".join(known))
        log, name = body.get("log"), body.get("name")
        if not isinstance(log, str) or not re.search(_SOMETHING, log):
            raise InvalidRequestError("log", log, "the text of a request log")
        if name is None:
            name = "log.csv"
        if not isinstance(name, str) or Path(name).suffix.lower() not in SUFFIXES:
            raise InvalidRequestError("name", name, "a file name that ends with " + ", ".join(SUFFIXES))
        task_id = body.get("task_id")
        if task_id is not None and (isinstance(task_id, bool) or not isinstance(task_id, (int, str))):
            raise InvalidRequestError("task_id", task_id, "a number or a name from GET /tasks?all=true, or left out")
        fixed, to_s = body.get("fixed"), _number("to_s", body.get("to_s"), 0.0, 1e9)
        return cls(
            log=log,
            name=Path(name).name,
            policies=_policies(body.get("policies")),
            fixed=NAIVE_ACTION if fixed is None else ServeAction.from_dict(fixed),
            task_id=task_id,
            replicas=_replicas(body.get("replicas")),
            slo_ms=_number("slo_ms", body.get("slo_ms"), 1.0, MAX_SLO_MS),
            from_s=_number("from_s", body.get("from_s"), 0.0, 1e9) or 0.0,
            to_s=math.inf if to_s is None else to_s,
        )


class ShadowRoutes:
    """The endpoint with its limits."""

    def __init__(self, context: Context, prefix: str = "") -> None:
        self._settings = context.settings
        self._prefix = prefix
        self._one = asyncio.Semaphore(1)

    def routes(self) -> list[JsonRoute]:
        return [
            JsonRoute(
                self._prefix + "/shadow",
                self.shadow,
                method="POST",
                summary="What policies would have done on your request log",
                request_schema=_request_schema(),
                responses=documented(_answer_schema(), 429, 503),
            )
        ]

    async def shadow(self, request: Request) -> Response:
        body = await read_object(request, self._settings.max_trace_bytes, self._settings.body_timeout_s)
        wanted = ShadowRequest.parse(body)
        async with self._one:
            answer = await asyncio.to_thread(compressed, lambda: shadow_answer(wanted))
        return gzipped(request, answer)


def shadow_answer(wanted: ShadowRequest) -> dict[str, Any]:
    """The report as JSON with ``export``: settings in vLLM's terms per policy; runs on a thread."""
    from agents.shadow.compare import shadow
    from agents.shadow.export import vllm_config
    from simulator.offline.importers import import_log

    _check_policies(wanted)
    tables = served_tables()
    with tempfile.TemporaryDirectory(prefix="inferencegym-log-") as folder:
        path = Path(folder) / f"log{Path(wanted.name).suffix.lower()}"
        path.write_text(wanted.log, encoding="utf-8")
        try:
            report = shadow(
                import_log(path, start_s=wanted.from_s, end_s=wanted.to_s).log,
                wanted.policies,
                fixed=wanted.fixed,
                n_replicas=wanted.replicas,
                slo_ms=wanted.slo_ms,
                task=None if wanted.task_id is None else get_task(wanted.task_id),
                tables=tables,
            )
        except DataFormatError as error:
            # The visitor knows the file by its own name, and options of the command as fields of this request.
            text = _OPTION.sub(lambda found: found[1].replace("-", "_"), str(error))
            raise DataFormatError(text.replace(str(path), wanted.name)) from error
    export = {outcome.policy: vllm_config(report, tables, outcome.policy) for outcome in report.outcomes}
    return {**report.to_dict(), "export": export}


def _check_policies(wanted: ShadowRequest) -> None:
    if wanted.task_id is None:
        possible = [name for name in PLAYABLE if name not in STORED_POLICIES]
        more = ", unless task_id names the task whose stored policy is meant"
    else:
        possible, more = available(wanted.task_id), f" for task {wanted.task_id!r}"
    for name in wanted.policies:
        if name not in possible:
            raise InvalidRequestError("policies", name, f"one of {', '.join(possible)}{more}")


def _policies(value: object) -> list[str]:
    if value is None:
        return list(DEFAULT_POLICIES)
    names = ", ".join(PLAYABLE)
    if not isinstance(value, list) or not all(isinstance(name, str) and name in PLAYABLE for name in value):
        raise InvalidRequestError("policies", value, f"an array of {names}")
    if len(set(value)) != len(value) or not value:
        raise InvalidRequestError("policies", value, f"at least one of {names}, none of them twice")
    return [str(name) for name in value]


def _replicas(value: object) -> int | None:
    number = _number("replicas", value, 1, MAX_REPLICAS)
    if number is not None and number != int(number):
        raise InvalidRequestError("replicas", value, f"an integer from 1 to {MAX_REPLICAS}")
    return None if number is None else int(number)


def _number(name: str, value: object, low: float, high: float) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise InvalidRequestError(name, value, f"a number from {low:g} to {high:g}, or left out")
    return float(value)


def _request_schema() -> Schema:
    seconds = {"type": "number", "minimum": 0, "maximum": 1e9}
    properties: Schema = {
        "log": {"type": "string", "pattern": _SOMETHING, "description": "text of the log, in a format of import-trace"},
        "name": {
            "type": "string",
            "pattern": r"[^./]\.([cC][sS][vV]|[jJ][sS][oO][nN][lL]?)$",
            "default": "log.csv",
            "description": "name of its file: what it ends with tells CSV from JSON",
        },
        "policies": {
            "type": "array",
            "minItems": 1,
            "uniqueItems": True,
            "items": {"type": "string", "enum": list(PLAYABLE)},
            "default": list(DEFAULT_POLICIES),
        },
        "fixed": {**schemas.action_schema(), "description": "the setting to compare with; missing knobs: naive"},
        "task_id": {**schemas.task_id_schema(), "description": "lends its fleet, objectives and stored policies"},
        "replicas": {"type": "integer", "minimum": 1, "maximum": MAX_REPLICAS, "description": "GPUs of the fleet"},
        "slo_ms": {"type": "number", "minimum": 1, "maximum": MAX_SLO_MS, "description": "objective of TTFT"},
        "from_s": {**seconds, "description": "second of the log to begin at"},
        "to_s": {**seconds, "description": "second of the log to end before"},
    }
    return {"type": "object", "additionalProperties": False, "required": ["log"], "properties": properties}


def _answer_schema() -> Schema:
    return {
        "type": "object",
        "required": ["log", "n_replicas", "slo_ms", "outcomes", "best", "export"],
        "properties": {
            "log": {"type": "object"},
            "n_replicas": {"type": "integer"},
            "slo_ms": {"type": "number"},
            "outcomes": {"type": "array", "items": {"type": "object"}},
            "best": {"type": "string"},
            "export": {"type": "object", "additionalProperties": {"type": "string"}},
        },
    }
