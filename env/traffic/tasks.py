"""Traffic tasks as data: settings of the server model, incoming rates, grade.

A task is one entry of ``tasks.json`` or of a user's file of the same form (setting ``INFERENCEGYM_TRAFFIC_TASKS``:
paths separated by ``:``). Nothing else in the code names a task.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, Self

import pydantic
from pydantic import model_validator

from inferencegym.errors import UnknownTaskError, refusal, short_repr
from inferencegym.messages import WHOLE, FieldError, Message, read
from inferencegym.models import Field, bounds
from inferencegym.task_registry import (
    MAX_EPISODE_LENGTH,
    gym_id_of,
    load_entries,
    read_entry,
    task_registry,
)

DATA_FILE: Final = Path(__file__).with_name("tasks.json")
TASKS_ENV: Final = "INFERENCEGYM_TRAFFIC_TASKS"
DEFAULT_TASK_ID: Final = "task_easy"


class UnknownTrafficTaskError(UnknownTaskError):
    """No traffic task has this id; the message lists those that exist. (HTTP 400, as this family's document says)"""

    http_status: ClassVar[int] = 400


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
        Field("server_capacity", 1, 1e6, "requests/s", "capacity of the server", 100.0),
        Field("base_latency", 0.1, 60_000, "ms", "response time without load", 50.0),
        Field("crash_load_ratio", 0.1, 1000, "share of capacity", "the server crashes beyond this load", 1.3),
        Field("max_queue", 1, 100_000, "requests", "maximum queue length; requests beyond it are lost", 500),
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
    given_settings = read(TrafficConfigOverrides, given, refusal, at="config")
    return replace(base, **given_settings.model_dump(exclude_none=True))


# ---------------------------------------------------------------- tasks


@dataclass(frozen=True, slots=True)
class RateSegment:
    """Segment from ``start_step`` (included) to ``end_step`` (excluded) with its own incoming rate (requests/s).

    The rate is ``rps`` at ``start_step`` and changes linearly towards ``end_rps``, which it would reach at
    ``end_step``. Without ``end_rps`` it is constant.
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
    """Incoming requests/s at every step: ``base_rps`` outside the segments; defined for all steps >= 0."""

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
    """How episodes of a task are scored: a rule of :mod:`env.traffic.score` and its numbers."""

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
    """A segment of a task file, with its own incoming rate: see :class:`RateSegment`."""

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
