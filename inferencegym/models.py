"""Actions, observations and metrics of the serving environment as dataclasses, with bounds, units and defaults.

Field names, types and order follow the published plan of InferenceGym. ``ACTION_FIELDS`` and ``OBSERVATION_FIELDS`` are
the only place of bounds, units and defaults: schemas, spaces, codecs and documents are derived from them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from inferencegym.errors import InvalidActionError


class QuantTier(Enum):
    """Precision of weights and matrix products: FP16, INT8 (W8A8) or INT4 (W4A16)."""

    FP16 = 0
    INT8 = 1
    INT4 = 2


@dataclass(frozen=True, slots=True)
class Field:
    """One number of an action or observation: bounds (both included), unit, default and meaning."""

    name: str
    low: float
    high: float
    unit: str
    description: str
    default: float = 0.0
    choices: tuple[int, ...] | None = None

    def allowed(self) -> str:
        """The range in words, for error messages and documents."""
        if self.choices is not None:
            return "one of " + ", ".join(str(c) for c in self.choices)
        if self.unit == "requests" and float(self.low).is_integer() and float(self.high).is_integer():
            return f"an integer from {self.low:g} to {self.high:g}"
        return f"a number from {self.low:g} to {self.high:g}"


SPEC_LENGTHS: Final = (0, 1, 2, 4, 8)
PRIORITY_CLASSES: Final = ("interactive", "batch", "best_effort")
PROMPT_BUCKET_EDGES: Final = (64, 128, 256, 512, 1024, 2048, 4096)
"""Edges, in tokens, between the buckets 0-7 of prompt lengths (as ``numpy.digitize`` counts them)."""
PHASES: Final = ("warmup", "steady", "burst", "cooldown")

ACTION_FIELDS: Final[dict[str, Field]] = {
    f.name: f
    for f in (
        Field("kv_budget", 0.1, 1.0, "share", "share of the free GPU memory given to the KV cache pool", 1.0),
        Field("spec_length", 0, 8, "tokens", "draft tokens per verification step, 0 = off", 0, SPEC_LENGTHS),
        Field("batch_size", 1, 512, "requests", "most requests that run at once on one replica", 32),
        Field("prefill_disagg", 0, 1, "flag", "prefill on GPUs of its own (they are paid for)", 0, (0, 1)),
        Field("quant_tier", 0, 2, "tier", "precision: 0 FP16, 1 INT8, 2 INT4", 0, (0, 1, 2)),
    )
}
"""The five knobs in the order of :class:`ServeAction`; defaults are those of the naive baseline."""
_KV_LOW, _KV_HIGH = ACTION_FIELDS["kv_budget"].low, ACTION_FIELDS["kv_budget"].high
_BATCH_LOW, _BATCH_HIGH = ACTION_FIELDS["batch_size"].low, ACTION_FIELDS["batch_size"].high
_TIERS: Final = tuple(QuantTier)

OBSERVATION_FIELDS: Final[dict[str, Field]] = {
    f.name: f
    for f in (
        Field("queue_depth", 0, 512, "requests", "requests waiting in the queue"),
        Field("mean_prompt_len", 32, 8192, "tokens", "mean prompt length of the last ten seconds' arrivals"),
        Field("arrival_rate", 0, 1000, "requests/s", "arrivals, exponential moving average over ten steps"),
        Field("kv_cache_occupancy", 0, 1, "share", "share of the KV pool in use"),
        Field("ttft_p50", 0, 5000, "ms", "median time to first token of the step's admissions"),
        Field("tpot_p50", 0, 500, "ms", "median time per output token"),
        Field("slo_violation_rate", 0, 1, "share", "share of the step's requests that missed their SLO"),
        Field("gpu_memory_used_gb", 0, 80, "GB", "memory in use on one replica (decimal GB)"),
        Field("spec_accept_rate", 0, 1, "share", "accepted draft tokens / drafted tokens"),
        Field("priority_interactive", 0, 1, "share", "interactive share of the last 50 steps' arrivals"),
        Field("priority_batch", 0, 1, "share", "batch share of the last 50 steps' arrivals"),
        Field("priority_best_effort", 0, 1, "share", "best-effort share of the last 50 steps' arrivals"),
        Field("timestep", 0, math.inf, "steps", "steps taken in this episode"),
        Field("cost_so_far", 0, math.inf, "cost units", "cumulative cost of this episode"),
    )
}
"""The 14 numbers of the flat observation, in order; ``priority_distribution`` is spread over three of them."""


@dataclass
class ServeAction:
    """Action: the five knobs, applied to every replica of the fleet for one step of one second."""

    kv_budget: float
    spec_length: int
    batch_size: int
    prefill_disagg: bool
    quant_tier: QuantTier

    def validate(self) -> bool:
        """Return True, or raise :class:`InvalidActionError` naming the field, its value and its range."""
        # Almost every action is right and of the plain types; any other is looked at field by field.
        plain = _is_plain(self.kv_budget, self.spec_length, self.batch_size, self.prefill_disagg)
        if plain and isinstance(self.quant_tier, QuantTier):
            return True
        for name in ("kv_budget", "spec_length", "batch_size"):
            check_action_number(name, getattr(self, name))
        if not isinstance(self.prefill_disagg, bool):
            raise InvalidActionError("prefill_disagg", self.prefill_disagg, "true or false")
        if not isinstance(self.quant_tier, QuantTier):
            raise InvalidActionError("quant_tier", self.quant_tier, "a QuantTier: FP16, INT8 or INT4")
        return True

    def to_dict(self) -> dict[str, Any]:
        """JSON form: ``quant_tier`` is its number 0-2."""
        return {
            "kv_budget": self.kv_budget,
            "spec_length": self.spec_length,
            "batch_size": self.batch_size,
            "prefill_disagg": self.prefill_disagg,
            "quant_tier": self.quant_tier.value,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ServeAction:
        """Read the JSON form; missing fields take the naive defaults.

        ``quant_tier`` may be a :class:`QuantTier`, 0-2 or a name; ``prefill_disagg`` a bool or 0/1. Raises
        :class:`InvalidActionError` on an unknown key, a wrong type, a non-finite number or a value out of range.
        """
        if not isinstance(data, dict):
            raise InvalidActionError("action", data, "an object with the fields " + ", ".join(ACTION_FIELDS))
        # As in validate: almost every action is right and of the plain types.
        knobs = _DEFAULTS | data
        if len(knobs) == len(_DEFAULTS):
            kv_budget, spec_length, batch_size, prefill_disagg, tier = knobs.values()
            if (
                type(tier) is int
                and 0 <= tier < len(_TIERS)
                and _is_plain(kv_budget, spec_length, batch_size, prefill_disagg)
            ):
                return cls(kv_budget, spec_length, batch_size, prefill_disagg, _TIERS[tier])
        for key in data:
            if key not in ACTION_FIELDS:
                raise InvalidActionError(str(key), data[key], "left out: the fields are " + ", ".join(ACTION_FIELDS))
        return cls(
            kv_budget=float(check_action_number("kv_budget", data.get("kv_budget", 1.0))),
            spec_length=int(check_action_number("spec_length", data.get("spec_length", 0))),
            batch_size=int(check_action_number("batch_size", data.get("batch_size", 32))),
            prefill_disagg=_parse_flag(data.get("prefill_disagg", False)),
            quant_tier=parse_quant_tier(data.get("quant_tier", 0)),
        )


def _is_plain(kv_budget: object, spec_length: object, batch_size: object, prefill_disagg: object) -> bool:
    """Whether these knobs are allowed, and exactly of the types that :class:`ServeAction` names."""
    return (
        type(kv_budget) is float
        and _KV_LOW <= kv_budget <= _KV_HIGH
        and type(spec_length) is int
        and spec_length in SPEC_LENGTHS
        and type(batch_size) is int
        and _BATCH_LOW <= batch_size <= _BATCH_HIGH
        and type(prefill_disagg) is bool
    )


def check_action_number(name: str, value: object) -> float:
    """Return ``value`` if it is a number allowed for the numeric action field ``name``; raise otherwise."""
    field = ACTION_FIELDS[name]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidActionError(name, value, field.allowed())
    if not field.low <= value <= field.high:  # False for NaN, so NaN is refused here too
        raise InvalidActionError(name, value, field.allowed())
    if name != "kv_budget" and value != int(value):
        raise InvalidActionError(name, value, field.allowed())
    if field.choices is not None and int(value) not in field.choices:
        raise InvalidActionError(name, value, field.allowed())
    return value


def parse_quant_tier(value: object) -> QuantTier:
    """Accept a :class:`QuantTier`, its number (0-2) or its name; raise :class:`InvalidActionError` otherwise."""
    if isinstance(value, QuantTier):
        return value
    if isinstance(value, str) and value in QuantTier.__members__:
        return QuantTier[value]
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value in (0, 1, 2):
        return QuantTier(int(value))
    raise InvalidActionError("quant_tier", value, '0, 1, 2 or "FP16", "INT8", "INT4"')


def _parse_flag(value: object) -> bool:
    if isinstance(value, (bool, int, float)) and value in (0, 1):
        return bool(value)
    raise InvalidActionError("prefill_disagg", value, "true or false")


NAIVE_ACTION: Final = ServeAction(
    kv_budget=1.0, spec_length=0, batch_size=32, prefill_disagg=False, quant_tier=QuantTier.FP16
)
"""An engine's defaults, left alone: what the baseline plays and what missing fields of an action mean."""
_DEFAULTS: Final = NAIVE_ACTION.to_dict()


@dataclass
class MetricsSnapshot:
    """Metrics of one step of the fleet. Times in milliseconds, memory in decimal GB per replica.

    TTFT is the time from a request's arrival to its first output token, queueing included; TPOT the mean time between
    two output tokens of a running request. ``cost_per_1k`` is normalised cost per 1,000 output tokens.
    """

    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_ms: float
    tokens_per_sec: float
    gpu_memory_gb: float
    cost_per_1k: float
    spec_accept_rate: float
    eviction_events: int
    slo_violations: int
    oom: bool = False


@dataclass
class ServeObservation:
    """Observation after a step: twelve fields; bounds and units in :data:`OBSERVATION_FIELDS`."""

    queue_depth: float
    mean_prompt_len: float
    arrival_rate: float
    kv_cache_occupancy: float
    ttft_p50: float
    tpot_p50: float
    slo_violation_rate: float
    gpu_memory_used_gb: float
    spec_accept_rate: float
    priority_distribution: list[float]
    timestep: int
    cost_so_far: float


@dataclass
class WorkloadState:
    """Traffic of one step: rate (requests/s), prompts (tokens), queue (requests), class shares and phase."""

    arrival_rate: float
    mean_prompt_len: float
    prompt_len_bucket: int
    queue_depth: int
    priority_distribution: list[float]
    is_burst: bool
    phase: str
