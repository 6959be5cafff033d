"""Keys of a task's ``grade`` by its kind, with their bounds. The rules behind them are those of :mod:`grader.kinds`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from inferencegym.errors import MISSING
from inferencegym.messages import Allowed, FieldError, Message
from inferencegym.models import MAX_REPLICAS

Share = Annotated[float, Field(ge=0, le=1)]
ObjectiveMs = Annotated[float, Field(ge=1, le=1e6)]
MemoryGb = Annotated[float, Field(ge=1, le=1000)]
MemorySlopeGb = Annotated[float, Field(ge=0.01, le=1000)]


def sum_to_one(shares: list[float]) -> list[float]:
    """Validator: refuses shares that do not sum to 1."""
    total = sum(shares)
    if abs(total - 1) > 1e-9:
        raise ValueError(f"an array of {len(shares)} shares from 0 to 1 that sum to 1: these sum to {total:g}")
    return shares


class GradeKeys(Message):
    """Base of the keys of a kind of grade."""

    kind: str

    def check_replicas(self, max_replicas: int | None) -> None:
        """Raise FieldError if a task of at most so many replicas (None: it does not scale) does not fit this grade."""


class Throughput(GradeKeys):
    """Grade: throughput, from 0 at the floor to 1 at the best known throughput."""

    kind: Literal["throughput"]


class LatencyMemory(GradeKeys):
    """Grade: TTFT against a target, and memory against a limit."""

    kind: Literal["latency_memory"]
    ttft_target_ms: ObjectiveMs
    memory_limit_gb: MemoryGb
    memory_slope_gb: MemorySlopeGb


class ObjectivesMemory(GradeKeys):
    """Grade: weighted objectives met, and memory against a limit."""

    kind: Literal["objectives_memory"]
    weights: Annotated[
        list[Share],
        Field(min_length=2, max_length=2),
        AfterValidator(sum_to_one),
        Allowed("an array of 2 shares that sum to 1"),
    ]
    missed_limit_rps: Annotated[float, Field(ge=0.01, le=1e4)]
    memory_limit_gb: MemoryGb
    memory_slope_gb: MemorySlopeGb


class FourTerm(GradeKeys):
    """Grade: weighted throughput, objectives, cost and stability."""

    kind: Literal["four_term"]
    weights: Annotated[
        list[Share],
        Field(min_length=4, max_length=4),
        AfterValidator(sum_to_one),
        Allowed("an array of 4 shares that sum to 1"),
    ]


class Autoscaling(GradeKeys):
    """Grade of autoscaling tasks: weighted objectives met, GPU cost and churn of replicas."""

    kind: Literal["autoscaling"]
    weights: Annotated[
        list[Share],
        Field(min_length=3, max_length=3),
        AfterValidator(sum_to_one),
        Allowed("an array of 3 shares that sum to 1"),
    ]
    missed_share_limit: Annotated[float, Field(ge=1e-4, le=1)]
    least_replicas: Annotated[float, Field(ge=1, le=MAX_REPLICAS)]
    changes_limit: Annotated[float, Field(ge=1, le=1e6)]

    def check_replicas(self, max_replicas: int | None) -> None:
        """Raise FieldError unless ``max_replicas`` is above ``least_replicas``."""
        if max_replicas is None:
            raise FieldError("max_replicas", MISSING, "the most replicas, which the autoscaling grade needs")
        if self.least_replicas >= max_replicas:
            raise FieldError("grade.least_replicas", self.least_replicas, "less than max_replicas")


Grade = Annotated[Throughput | LatencyMemory | ObjectivesMemory | FourTerm | Autoscaling, Field(discriminator="kind")]
