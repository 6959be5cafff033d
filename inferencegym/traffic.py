"""The traffic controller's vocabulary: its four actions, what it sees, its settings, and its tasks as data.

A controller stands before one server and decides each second which share of the incoming requests it lets through.
Field names follow the published HTTP document of that environment. The tables below are the only home of bounds, units
and defaults; a task is one entry of ``simulator/data/traffic_tasks.json`` or of a user's file of the same form (setting
``INFERENCEGYM_TRAFFIC_TASKS``: paths separated by ``:``). Nothing else in the code names a task.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Final

from inferencegym.errors import InvalidActionError, InvalidConfigError, UnknownTaskError
from inferencegym.models import Field

DATA_FILE: Final = Path(__file__).resolve().parent.parent / "simulator" / "data" / "traffic_tasks.json"
TASKS_ENV: Final = "INFERENCEGYM_TRAFFIC_TASKS"
DEFAULT_TASK_ID: Final = "task_easy"
MAX_EPISODE_LENGTH: Final = 5_000
MAX_RPS: Final = 1e6
MIN_RPS: Final = 0.1


class UnknownTrafficTaskError(UnknownTaskError):
    """No traffic task has this id; the message lists those that exist. (HTTP 400, as this family's document says)"""

    http_status: ClassVar[int] = 400


class TrafficAction(Enum):
    """Which share of the incoming requests is let through for one step."""

    ALLOW_ALL = "allow_all"
    THROTTLE_70 = "throttle_70"
    THROTTLE_40 = "throttle_40"
    DROP_AGGRESSIVE = "drop_aggressive"

    @property
    def accept_share(self) -> float:
        """Allowed requests / incoming requests."""
        return ACCEPT_SHARES[self.value]

    @property
    def index(self) -> int:
        """Position among the actions: the integer that vector faces and learners use."""
        return ACTION_NAMES.index(self.value)


ACCEPT_SHARES: Final[dict[str, float]] = {
    "allow_all": 1.0,
    "throttle_70": 0.7,
    "throttle_40": 0.4,
    "drop_aggressive": 0.2,
}
"""Action name -> share of the incoming requests let through, from the most permissive to the strictest."""

ACTION_NAMES: Final = tuple(ACCEPT_SHARES)


def parse_action(value: object) -> TrafficAction:
    """Read ``{"action": name}``, a name or a :class:`TrafficAction`; raises :class:`InvalidActionError`."""
    if isinstance(value, TrafficAction):
        return value
    if isinstance(value, Mapping):
        for key in value:
            if key != "action":
                raise InvalidActionError(str(key), value[key], "left out: the only field is action")
        if "action" not in value:
            raise InvalidActionError("action", None, _one_of(ACTION_NAMES))
        return parse_action(value["action"])
    if isinstance(value, str) and value in ACCEPT_SHARES:
        return TrafficAction(value)
    raise InvalidActionError("action", value, _one_of(ACTION_NAMES))


# ---------------------------------------------------------------- what the controller sees

STATE_FIELDS: Final[dict[str, Field]] = {
    f.name: f
    for f in (
        Field("cpu_usage", 0, 1, "share", "CPU in use during the step"),
        Field("memory_usage", 0, 1, "share", "memory in use during the step"),
        Field("request_rate", 0, math.inf, "requests/s", "incoming rate of the step that comes next"),
        Field("queue_length", 0, 100_000, "requests", "requests waiting at the end of the step"),
        Field("avg_latency", 0, math.inf, "ms", "mean response time of the step"),
        Field("step", 0, MAX_EPISODE_LENGTH, "steps", "steps taken in this episode"),
        Field("crashed", 0, 1, "flag", "whether the server has crashed"),
    )
}
"""The seven fields of the state, in the order of :class:`TrafficState` and of the flat observation."""


@dataclass(frozen=True, slots=True)
class TrafficState:
    """What the controller sees; bounds and units in :data:`STATE_FIELDS`.

    Everything but ``request_rate`` describes the step just taken. ``request_rate`` is the rate that the next action
    will meet, so that a controller can act before a spike and not after it.
    """

    cpu_usage: float
    memory_usage: float
    request_rate: float
    queue_length: int
    avg_latency: float
    step: int
    crashed: bool

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return asdict(self)


# ---------------------------------------------------------------- settings of the server model


@dataclass(frozen=True, slots=True)
class TrafficConfig:
    """The server model of one episode; what a reset may override. Bounds and units in :data:`CONFIG_FIELDS`."""

    server_capacity: float = 100.0
    base_latency: float = 50.0
    crash_load_ratio: float = 1.3
    max_queue: int = 500
    traffic_scale: float = 1.0

    def to_dict(self) -> dict[str, Any]:
        """JSON form, with the keys that a reset accepts."""
        return asdict(self)


CONFIG_FIELDS: Final[dict[str, Field]] = {
    f.name: f
    for f in (
        Field("server_capacity", 1, 1e6, "requests/s", "what the server can handle", 100.0),
        Field("base_latency", 0.1, 60_000, "ms", "response time without load", 50.0),
        Field("crash_load_ratio", 0.1, 1000, "share of capacity", "the server crashes beyond this load", 1.3),
        Field("max_queue", 1, 100_000, "requests", "most requests that can wait; the rest is lost", 500),
        Field("traffic_scale", 0.01, 100, "factor", "multiplies the task's incoming rates", 1.0),
    )
}


def traffic_config(overrides: Mapping[str, Any] | None, base: TrafficConfig | None = None) -> TrafficConfig:
    """``base`` with ``overrides`` applied; a value of None leaves the setting alone.

    Raises :class:`InvalidConfigError` naming the field, its value and its range.
    """
    values = (base or TrafficConfig()).to_dict()
    if overrides is not None and not isinstance(overrides, Mapping):
        raise InvalidConfigError(f"config={overrides!r} is not allowed: it must be an object")
    for key, value in (overrides or {}).items():
        if key not in CONFIG_FIELDS:
            raise InvalidConfigError(f"config.{key} is not a setting: allowed are {', '.join(CONFIG_FIELDS)}")
        if value is not None:
            values[key] = _config_number(key, value)
    return TrafficConfig(**values)


def _config_number(key: str, value: object) -> float | int:
    field = CONFIG_FIELDS[key]
    if not _is_number(value) or not field.low <= value <= field.high:  # type: ignore[operator]
        raise InvalidConfigError(f"config.{key}={value!r} is not allowed: it must be {field.allowed()} ({field.unit})")
    number = float(value)  # type: ignore[arg-type]
    if key != "max_queue":
        return number
    if number != int(number):
        raise InvalidConfigError(f"config.{key}={value!r} is not allowed: it must be {field.allowed()}")
    return int(number)


# ---------------------------------------------------------------- tasks


@dataclass(frozen=True, slots=True)
class RateSegment:
    """A stretch of steps, ``start_step`` included and ``end_step`` not, with its own incoming rate (requests/s).

    The rate is ``rps`` at ``start_step`` and goes in a straight line towards ``end_rps``, which it would reach at
    ``end_step``. Without ``end_rps`` it stays where it is.
    """

    start_step: int
    end_step: int
    rps: float
    end_rps: float

    def rate(self, step: int) -> float:
        """The incoming rate at a step of the segment."""
        return self.rps + (self.end_rps - self.rps) * (step - self.start_step) / (self.end_step - self.start_step)


@dataclass(frozen=True, slots=True)
class TrafficPattern:
    """Incoming requests/s at every step: ``base_rps``, but for the segments; defined for all steps >= 0."""

    base_rps: float
    segments: tuple[RateSegment, ...] = ()

    def rate(self, step: int) -> float:
        """The incoming rate at a step, before ``traffic_scale``."""
        for segment in self.segments:
            if segment.start_step <= step < segment.end_step:
                return segment.rate(step)
        return self.base_rps

    def phase(self, step: int) -> str:
        """``ramp`` or ``burst`` within a segment with a changing or a constant rate, ``steady`` elsewhere."""
        for segment in self.segments:
            if segment.start_step <= step < segment.end_step:
                return "burst" if segment.rps == segment.end_rps else "ramp"
        return "steady"


@dataclass(frozen=True, slots=True)
class GradeSpec:
    """How episodes of a task are scored: a rule of :mod:`simulator.traffic_score` and its numbers."""

    kind: str
    params: Mapping[str, float]


GRADE_PARAMS: Final[dict[str, dict[str, Field]]] = {
    "mean_latency_limit": {
        "limit_ms": Field("limit_ms", 0, 1e9, "ms", "mean latency below which the score is 1"),
        "score_above_limit": Field("score_above_limit", 0, 1, "share", "score at or above the limit"),
    },
    "survival_latency": {
        "full_score_ms": Field("full_score_ms", 0, 1e9, "ms", "mean latency up to which nothing is taken off"),
        "floor_ms": Field("floor_ms", 0, 1e9, "ms", "mean latency from which only floor_factor is left"),
        "floor_factor": Field("floor_factor", 0, 1, "share", "the latency factor's lowest value"),
    },
    "throughput_queue": {
        "throughput_weight": Field("throughput_weight", 0, 1, "share", "weight of throughput; the queue has the rest"),
        "short_queue_requests": Field("short_queue_requests", 1, 1e6, "requests", "a queue below this counts as short"),
        "crash_factor": Field("crash_factor", 0, 1, "share", "what a crash leaves of throughput x queue share"),
    },
}
"""Kind of grade -> its parameters, all of them required."""


@dataclass(frozen=True, slots=True)
class TrafficTask:
    """One task of the traffic family, complete."""

    task_id: str
    name: str
    gym_id: str
    difficulty: str
    description: str
    episode_length: int
    pattern: TrafficPattern
    grade: GradeSpec
    config: TrafficConfig

    def summary(self) -> dict[str, Any]:
        """The entry of this task in ``GET /tasks``."""
        return {
            "id": self.task_id,
            "description": self.description,
            "episode_length": self.episode_length,
            "difficulty": self.difficulty,
        }


def get_traffic_task(task_id: object) -> TrafficTask:
    """The task with this id; raises :class:`UnknownTrafficTaskError` listing the valid ids."""
    registry = _registry(os.environ.get(TASKS_ENV, ""))
    if not isinstance(task_id, str) or task_id not in registry:
        raise UnknownTrafficTaskError(f"task_id={task_id!r} is not a task: valid ids are {', '.join(registry)}")
    return registry[task_id]


def list_traffic_tasks() -> list[TrafficTask]:
    """All traffic tasks, in the order of their files."""
    return list(_registry(os.environ.get(TASKS_ENV, "")).values())


@lru_cache(maxsize=8)
def _registry(user_files: str) -> dict[str, TrafficTask]:
    registry: dict[str, TrafficTask] = {}
    for path in [DATA_FILE, *(Path(p) for p in user_files.split(os.pathsep) if p)]:
        for task in load_traffic_tasks(path):
            if task.task_id in registry:
                raise InvalidConfigError(f"{path}: task id {task.task_id!r} is already taken; choose another")
            registry[task.task_id] = task
    return registry


# ---------------------------------------------------------------- reading task files

_REQUIRED: Final = object()

_TASK_KEYS: Final[dict[str, Any]] = {
    "name": _REQUIRED,
    "gym_id": None,
    "difficulty": "custom",
    "description": "",
    "episode_length": _REQUIRED,
    "pattern": _REQUIRED,
    "grade": _REQUIRED,
    "config": None,
}
_PATTERN_KEYS: Final[dict[str, Any]] = {"base_rps": _REQUIRED, "segments": ()}
_SEGMENT_KEYS: Final[dict[str, Any]] = {
    "start_step": _REQUIRED,
    "end_step": _REQUIRED,
    "rps": _REQUIRED,
    "end_rps": None,
}


def load_traffic_tasks(path: str | Path) -> list[TrafficTask]:
    """Read a task file; raises :class:`InvalidConfigError` naming file, task and key."""
    path = Path(path)
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["tasks"].items()
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise InvalidConfigError(
            f"{path}: not a task file ({error!r}); it holds an object with the key 'tasks'"
        ) from error
    tasks = []
    for task_id, entry in entries:
        try:
            tasks.append(parse_traffic_task(task_id, entry))
        except InvalidConfigError as error:
            raise InvalidConfigError(f"{path}: task {task_id!r}: {error}") from error
    return tasks


def parse_traffic_task(task_id: str, entry: Mapping[str, Any]) -> TrafficTask:
    """Build a task from one JSON entry; raises :class:`InvalidConfigError` naming the key at fault."""
    values = _with_defaults("task", entry, _TASK_KEYS)
    for key in ("name", "difficulty", "description"):
        if not isinstance(values[key], str):
            raise InvalidConfigError(f"{key}={values[key]!r} is not allowed: it must be text")
    return TrafficTask(
        task_id=task_id,
        name=values["name"],
        gym_id=str(values["gym_id"] or "".join(word.capitalize() for word in task_id.replace("_", "-").split("-"))),
        difficulty=values["difficulty"],
        description=values["description"],
        episode_length=_integer(values, "episode_length", 1, MAX_EPISODE_LENGTH),
        pattern=_parse_pattern(values["pattern"]),
        grade=_parse_grade(values["grade"]),
        config=traffic_config(values["config"]),
    )


def _parse_pattern(raw: object) -> TrafficPattern:
    values = _with_defaults("pattern", raw, _PATTERN_KEYS)
    if not isinstance(values["segments"], (list, tuple)):
        raise InvalidConfigError(f"segments={values['segments']!r} is not allowed: it must be a list")
    segments = sorted((_parse_segment(s) for s in values["segments"]), key=lambda s: s.start_step)
    for earlier, later in pairwise(segments):
        if later.start_step < earlier.end_step:
            raise InvalidConfigError(
                f"segments: the one from step {later.start_step} starts before the one from step {earlier.start_step} "
                f"ends at {earlier.end_step}; give each step one rate"
            )
    return TrafficPattern(_number(values, "base_rps", MIN_RPS, MAX_RPS), tuple(segments))


def _parse_segment(raw: object) -> RateSegment:
    values = _with_defaults("segment", raw, _SEGMENT_KEYS)
    start = _integer(values, "start_step", 0, MAX_EPISODE_LENGTH - 1)
    end = _integer(values, "end_step", start + 1, MAX_EPISODE_LENGTH)
    rps = _number(values, "rps", MIN_RPS, MAX_RPS)
    return RateSegment(
        start, end, rps, rps if values["end_rps"] is None else _number(values, "end_rps", MIN_RPS, MAX_RPS)
    )


def _parse_grade(raw: object) -> GradeSpec:
    if not isinstance(raw, Mapping) or raw.get("kind") not in GRADE_PARAMS:
        raise InvalidConfigError(f"grade={raw!r} is not allowed: its kind must be {_one_of(tuple(GRADE_PARAMS))}")
    fields = GRADE_PARAMS[raw["kind"]]
    values = _with_defaults("grade", {k: v for k, v in raw.items() if k != "kind"}, dict.fromkeys(fields, _REQUIRED))
    params = {name: _number(values, name, field.low, field.high) for name, field in fields.items()}
    if "floor_ms" in params and params["floor_ms"] <= params["full_score_ms"]:
        raise InvalidConfigError("floor_ms must be greater than full_score_ms")
    return GradeSpec(raw["kind"], params)


def _with_defaults(what: str, raw: object, keys: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(raw, Mapping):
        raise InvalidConfigError(f"{what}={raw!r} is not allowed: it must be an object with the keys {', '.join(keys)}")
    for key in raw:
        if key not in keys:
            raise InvalidConfigError(f"{what}: unknown key {key!r}; allowed are {', '.join(keys)}")
    values = {**keys, **raw}
    for key, value in values.items():
        if value is _REQUIRED:
            raise InvalidConfigError(f"{what}: missing key {key!r}")
    return values


def _integer(values: Mapping[str, Any], key: str, low: int, high: int) -> int:
    number = _number(values, key, low, high)
    if number != int(number):
        raise InvalidConfigError(f"{key}={values[key]!r} is not allowed: it must be an integer from {low} to {high}")
    return int(number)


def _number(values: Mapping[str, Any], key: str, low: float, high: float) -> float:
    value = values[key]
    if not _is_number(value) or not low <= value <= high:
        raise InvalidConfigError(f"{key}={value!r} is not allowed: it must be a number from {low:g} to {high:g}")
    return float(value)


def _is_number(value: object) -> bool:
    """A real number; comparing with bounds then refuses NaN and infinity."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _one_of(names: tuple[str, ...]) -> str:
    return "one of " + ", ".join(names)
