"""Traffic controller: its four actions, its state, the settings of its server model, and its tasks as data.

A controller stands before one server and decides each second which share of the incoming requests it lets through.
Field names follow the published HTTP document of that environment. The tables below are the only source of their
bounds, units and defaults; a task is one entry of ``simulator/data/traffic_tasks.json`` or of a user's file of the same
form (setting ``INFERENCEGYM_TRAFFIC_TASKS``: paths separated by ``:``). Nothing else in the code names a task.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from enum import Enum
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, Self

import pydantic
from pydantic import model_validator

from inferencegym.errors import InvalidActionError, UnknownTaskError, refusal, short_repr
from inferencegym.installation import room_folder
from inferencegym.messages import WHOLE, FieldError, Message, read
from inferencegym.models import Field, bounds
from inferencegym.task_registry import (
    MAX_EPISODE_LENGTH,
    gym_id_of,
    load_entries,
    read_entry,
    task_registry,
)

DATA_FILE: Final = room_folder("simulator") / "data" / "traffic_tasks.json"
TASKS_ENV: Final = "INFERENCEGYM_TRAFFIC_TASKS"
DEFAULT_TASK_ID: Final = "task_easy"


class UnknownTrafficTaskError(UnknownTaskError):
    """No traffic task has this id; the message lists those that exist. (HTTP 400, as this family's document says)"""

    http_status: ClassVar[int] = 400


class TrafficAction(Enum):
    """Action of the traffic controller: the share of the incoming requests to let through for one step."""

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
        """Position among the actions: the integer that vector environments and learners use."""
        return ACTION_NAMES.index(self.value)


ACCEPT_SHARES: Final[dict[str, float]] = {
    "allow_all": 1.0,
    "throttle_70": 0.7,
    "throttle_40": 0.4,
    "drop_aggressive": 0.2,
}
"""Action name -> share of the incoming requests let through, from the most permissive to the strictest."""

ACTION_NAMES: Final = tuple(ACCEPT_SHARES)


class TrafficActionMessage(Message):
    """JSON form of an action."""

    action: Annotated[
        Literal["allow_all", "throttle_70", "throttle_40", "drop_aggressive"],
        pydantic.Field(description="share of the incoming requests that is let through"),
    ]


def parse_action(value: object) -> TrafficAction:
    """Read ``{"action": name}``, a name or a :class:`TrafficAction`; raises :class:`InvalidActionError`."""
    if isinstance(value, TrafficAction):
        return value
    given = value if isinstance(value, Mapping) else {"action": value}
    return TrafficAction(read(TrafficActionMessage, given, InvalidActionError).action)


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
    """Observation of the traffic controller; bounds and units in :data:`STATE_FIELDS`.

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
    """The server model of one episode, which a reset may override. Bounds and units in :data:`CONFIG_FIELDS`."""

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


class TrafficConfigOverrides(Message):
    """Settings of the server model; those left out, or null, are the task's own."""

    server_capacity: Annotated[float | None, bounds(CONFIG_FIELDS["server_capacity"])] = None
    base_latency: Annotated[float | None, bounds(CONFIG_FIELDS["base_latency"])] = None
    crash_load_ratio: Annotated[float | None, bounds(CONFIG_FIELDS["crash_load_ratio"])] = None
    max_queue: Annotated[int | None, bounds(CONFIG_FIELDS["max_queue"]), WHOLE] = None
    traffic_scale: Annotated[float | None, bounds(CONFIG_FIELDS["traffic_scale"])] = None


def traffic_config(
    overrides: Mapping[str, Any] | TrafficConfigOverrides | None, base: TrafficConfig | None = None
) -> TrafficConfig:
    """``base`` with ``overrides`` applied; a value of None leaves the setting alone.

    Raises :class:`InvalidConfigError` naming the setting, its value and what is allowed.
    """
    base = base or TrafficConfig()
    if overrides is None:
        return base
    given = dict(overrides) if isinstance(overrides, Mapping) else overrides
    wanted = read(TrafficConfigOverrides, given, refusal, at="config")
    return replace(base, **wanted.model_dump(exclude_none=True))


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
        raise UnknownTrafficTaskError(
            f"task_id={short_repr(task_id)} is not a task: valid ids are {', '.join(registry)}"
        )
    return registry[task_id]


def list_traffic_tasks() -> list[TrafficTask]:
    """All traffic tasks, in the order of their files."""
    return list(_registry(os.environ.get(TASKS_ENV, "")).values())


@lru_cache(maxsize=8)
def _registry(user_files: str) -> dict[str, TrafficTask]:
    return task_registry([DATA_FILE, *(Path(p) for p in user_files.split(os.pathsep) if p)], load_traffic_tasks)


# ---------------------------------------------------------------- reading task files

_Rps = Annotated[float, pydantic.Field(ge=0.1, le=1e6)]
_Ms = Annotated[float, pydantic.Field(ge=0, le=1e9)]
_Share = Annotated[float, pydantic.Field(ge=0, le=1)]
_EpisodeLength = Annotated[int, pydantic.Field(ge=1, le=MAX_EPISODE_LENGTH), WHOLE]


class SegmentEntry(Message):
    """A stretch of steps with its own incoming rate, as a task file has it: see :class:`RateSegment`."""

    start_step: Annotated[int, pydantic.Field(ge=0, le=MAX_EPISODE_LENGTH - 1), WHOLE]
    end_step: _EpisodeLength
    rps: _Rps
    end_rps: _Rps | None = None

    @model_validator(mode="after")
    def _has_steps(self) -> Self:
        if self.start_step >= self.end_step:
            raise FieldError("start_step", self.start_step, f"below end_step, which is {self.end_step}")
        return self


class PatternEntry(Message):
    """Incoming rate of a task, as its file has it."""

    base_rps: _Rps
    segments: list[SegmentEntry] = pydantic.Field([])

    @model_validator(mode="after")
    def _gives_each_step_one_rate(self) -> Self:
        in_order = sorted(enumerate(self.segments), key=lambda numbered: numbered[1].start_step)
        for (_, earlier), (i, later) in pairwise(in_order):
            if later.start_step < earlier.end_step:
                raise FieldError(
                    f"segments[{i}].start_step",
                    later.start_step,
                    f"at least {earlier.end_step}, where the segment from step {earlier.start_step} ends: each step "
                    "has one rate",
                )
        return self


class MeanLatencyLimit(Message):
    """Grade: 1 below a limit of the mean latency, ``score_above_limit`` at or above it."""

    kind: Literal["mean_latency_limit"]
    limit_ms: _Ms
    score_above_limit: _Share


class SurvivalLatency(Message):
    """Grade: share of steps survived, times a factor of the mean latency.

    The factor is 1 up to ``full_score_ms`` and ``floor_factor`` from ``floor_ms`` on.
    """

    kind: Literal["survival_latency"]
    full_score_ms: _Ms
    floor_ms: _Ms
    floor_factor: _Share

    @model_validator(mode="after")
    def _falls(self) -> Self:
        if self.full_score_ms >= self.floor_ms:
            raise FieldError("full_score_ms", self.full_score_ms, f"below floor_ms, which is {self.floor_ms:g}")
        return self


class ThroughputQueue(Message):
    """Grade: weighted throughput and share of steps with fewer than ``short_queue_requests`` waiting.

    A crash leaves ``crash_factor`` of their product.
    """

    kind: Literal["throughput_queue"]
    throughput_weight: _Share
    short_queue_requests: Annotated[float, pydantic.Field(ge=1, le=1e6)]
    crash_factor: _Share


class TrafficTaskEntry(Message):
    """One task of the traffic family, as its file has it."""

    name: str
    gym_id: str | None = None
    difficulty: str = "custom"
    description: str = ""
    episode_length: _EpisodeLength
    pattern: PatternEntry
    grade: Annotated[MeanLatencyLimit | SurvivalLatency | ThroughputQueue, pydantic.Field(discriminator="kind")]
    config: TrafficConfigOverrides | None = None


def load_traffic_tasks(path: str | Path) -> list[TrafficTask]:
    """Read a task file; raises :class:`InvalidConfigError` naming file, task and key."""
    return list(load_entries(Path(path), "task file", parse_traffic_task).values())


def parse_traffic_task(task_id: str, raw: object) -> TrafficTask:
    """Build a task from one JSON entry; raises :class:`InvalidConfigError` naming the key at fault."""
    entry = read_entry(TrafficTaskEntry, raw)
    return TrafficTask(
        task_id=task_id,
        name=entry.name,
        gym_id=gym_id_of(task_id, entry.gym_id),
        difficulty=entry.difficulty,
        description=entry.description,
        episode_length=entry.episode_length,
        pattern=_pattern(entry.pattern),
        grade=GradeSpec(entry.grade.kind, entry.grade.model_dump(exclude={"kind"})),
        config=traffic_config(entry.config),
    )


def _pattern(entry: PatternEntry) -> TrafficPattern:
    segments = sorted(entry.segments, key=lambda segment: segment.start_step)
    return TrafficPattern(
        entry.base_rps,
        tuple(
            RateSegment(s.start_step, s.end_step, s.rps, s.rps if s.end_rps is None else s.end_rps) for s in segments
        ),
    )
