"""The traffic controller's vocabulary: its four actions, what it sees, its settings, and its tasks as data.

A controller stands before one server and decides each second which share of the incoming requests it lets through.
Field names follow the published HTTP document of that environment. The tables below are the only home of bounds, units
and defaults; a task is one entry of ``simulator/data/traffic_tasks.json`` or of a user's file of the same form (setting
``INFERENCEGYM_TRAFFIC_TASKS``: paths separated by ``:``). Nothing else in the code names a task.
"""

from __future__ import annotations

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
from inferencegym.installation import room_folder
from inferencegym.models import Field
from inferencegym.task_files import (
    TEXT,
    Key,
    Kinds,
    ListOf,
    Number,
    Object,
    check_order,
    gym_id_of,
    read_task_file,
    task_registry,
)

DATA_FILE: Final = room_folder("simulator") / "data" / "traffic_tasks.json"
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
            values[key] = _CONFIG_RULES[key].read(f"config.{key}", value)
    return TrafficConfig(**values)


_CONFIG_RULES: Final = {
    name: Number(field.low, field.high, whole=name == "max_queue", unit=field.unit)
    for name, field in CONFIG_FIELDS.items()
}


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
    return task_registry([DATA_FILE, *(Path(p) for p in user_files.split(os.pathsep) if p)], load_traffic_tasks)


# ---------------------------------------------------------------- reading task files

_RPS: Final = Number(MIN_RPS, MAX_RPS)
_EPISODE_LENGTH: Final = Number(1, MAX_EPISODE_LENGTH, whole=True)

_SEGMENT: Final = Object(
    {
        "start_step": Key(Number(0, MAX_EPISODE_LENGTH - 1, whole=True)),
        "end_step": Key(_EPISODE_LENGTH),
        "rps": Key(_RPS),
        "end_rps": Key(_RPS, None),
    }
)
_TASK: Final = Object(
    {
        "name": Key(TEXT),
        "gym_id": Key(TEXT, None),
        "difficulty": Key(TEXT, "custom"),
        "description": Key(TEXT, ""),
        "episode_length": Key(_EPISODE_LENGTH),
        "pattern": Key(Object({"base_rps": Key(_RPS), "segments": Key(ListOf(_SEGMENT), ())})),
        "grade": Key(
            Kinds(
                {
                    kind: Object({name: Key(Number(f.low, f.high)) for name, f in params.items()})
                    for kind, params in GRADE_PARAMS.items()
                }
            )
        ),
        "config": Key(Object({name: Key(rule, None) for name, rule in _CONFIG_RULES.items()}), None),
    }
)


def load_traffic_tasks(path: str | Path) -> list[TrafficTask]:
    """Read a task file; raises :class:`InvalidConfigError` naming file, task and key."""
    return read_task_file(Path(path), parse_traffic_task)


def parse_traffic_task(task_id: str, entry: object) -> TrafficTask:
    """Build a task from one JSON entry; raises :class:`InvalidConfigError` naming the key at fault."""
    values = _TASK.read("", entry)
    return TrafficTask(
        task_id=task_id,
        name=values["name"],
        gym_id=gym_id_of(task_id, values["gym_id"]),
        difficulty=values["difficulty"],
        description=values["description"],
        episode_length=values["episode_length"],
        pattern=TrafficPattern(values["pattern"]["base_rps"], _segments(values["pattern"]["segments"])),
        grade=_grade(values["grade"]),
        config=traffic_config(values["config"]),
    )


def _segments(raw: list[dict[str, Any]]) -> tuple[RateSegment, ...]:
    for i, segment in enumerate(raw):
        check_order(segment, "start_step", "end_step", where=f"pattern.segments[{i}].", strict=True)
    found = [RateSegment(**{**s, "end_rps": s["rps"] if s["end_rps"] is None else s["end_rps"]}) for s in raw]
    found.sort(key=lambda s: s.start_step)
    for earlier, later in pairwise(found):
        if later.start_step < earlier.end_step:
            raise InvalidConfigError(
                f"pattern.segments: the one from step {later.start_step} starts before the one from step "
                f"{earlier.start_step} ends at {earlier.end_step}; give each step one rate"
            )
    return tuple(found)


def _grade(values: dict[str, Any]) -> GradeSpec:
    kind, params = values["kind"], {name: value for name, value in values.items() if name != "kind"}
    if kind == "survival_latency":
        check_order(params, "full_score_ms", "floor_ms", where="grade.", strict=True)
    return GradeSpec(kind, params)


def _one_of(names: tuple[str, ...]) -> str:
    return "one of " + ", ".join(names)
