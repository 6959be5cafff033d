"""Actions, observations and metrics of the serving environment as dataclasses, with bounds, units and defaults.

Field names, types and order follow the published plan of InferenceGym. ``ACTION_FIELDS`` and ``OBSERVATION_FIELDS`` are
the only source of bounds, units and defaults: schemas, spaces, codecs and documents are derived from them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Final, Literal, get_args

import pydantic
from pydantic import BeforeValidator, WithJsonSchema

from inferencegym.errors import InvalidActionError
from inferencegym.messages import CHOICE, WHOLE, Allowed, Message, read


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
        if self.unit in ("requests", "replicas") and float(self.low).is_integer() and float(self.high).is_integer():
            return f"an integer from {self.low:g} to {self.high:g}"
        return f"a number from {self.low:g} to {self.high:g}"


SPEC_LENGTHS: Final = (0, 1, 2, 4, 8)
PRIORITY_CLASSES: Final = ("interactive", "batch", "best_effort")
PROMPT_BUCKET_EDGES: Final = (64, 128, 256, 512, 1024, 2048, 4096)
"""Edges, in tokens, between the buckets 0-7 of prompt lengths (as ``numpy.digitize`` counts them)."""
PHASES: Final = ("warmup", "steady", "burst", "cooldown")
Router = Literal["shared", "round-robin", "random", "least-loaded", "prefix-affinity"]
"""Replica that serves a request: the first with room, out of a shared queue; the next in turn; any, with equal chances;
the one with the fewest unanswered requests; the one that computed its prefix, unless it is overloaded (then the least
loaded)."""
ROUTERS: Final[tuple[Router, ...]] = get_args(Router)

QUANTILES: Final = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
"""Quantiles of a latency that reports give and objectives bound."""

ACTION_FIELDS: Final[dict[str, Field]] = {
    f.name: f
    for f in (
        Field("kv_budget", 0.1, 1.0, "share", "share of the free GPU memory reserved for the KV cache pool", 1.0),
        Field("spec_length", 0, 8, "tokens", "draft tokens per verification step, 0 = off", 0, SPEC_LENGTHS),
        Field("batch_size", 1, 512, "requests", "maximum number of running requests per replica", 32),
        Field("prefill_disagg", 0, 1, "flag", "prefill on separate GPUs, which add to the cost", 0, (0, 1)),
        Field("quant_tier", 0, 2, "tier", "precision: 0 FP16, 1 INT8, 2 INT4", 0, (0, 1, 2)),
    )
}
"""The five knobs in the order of :class:`ServeAction`; defaults are the action of the agent ``naive`` (fixed-32)."""

OBSERVATION_FIELDS: Final[dict[str, Field]] = {
    f.name: f
    for f in (
        Field("queue_depth", 0, 512, "requests", "requests waiting in the queue"),
        Field("mean_prompt_len", 32, 8192, "tokens", "mean prompt length of the last ten seconds' arrivals"),
        Field("arrival_rate", 0, 1000, "requests/s", "arrivals, exponential moving average over ten seconds"),
        Field("kv_cache_occupancy", 0, 1, "share", "share of the KV pool in use"),
        Field("ttft_p50", 0, 5000, "ms", "median time to first token of the last second's admissions"),
        Field("tpot_p50", 0, 500, "ms", "median time per output token"),
        Field("slo_violation_rate", 0, 1, "share", "share of the last second's requests that missed their SLO"),
        Field("gpu_memory_used_gb", 0, 320, "GB", "memory in use on one card of a replica (decimal GB)"),
        Field("spec_accept_rate", 0, 1, "share", "accepted draft tokens / drafted tokens"),
        Field("priority_interactive", 0, 1, "share", "interactive share of the last 50 seconds' arrivals"),
        Field("priority_batch", 0, 1, "share", "batch share of the last 50 seconds' arrivals"),
        Field("priority_best_effort", 0, 1, "share", "best-effort share of the last 50 seconds' arrivals"),
        Field("timestep", 0, math.inf, "s", "seconds played in this episode"),
        Field("cost_so_far", 0, math.inf, "cost units", "cumulative cost of this episode"),
    )
}
"""The 14 numbers of the flat observation, in order; ``priority_distribution`` is spread over three of them."""

MAX_REPLICAS: Final = 4096
REPLICAS: Final = Field(
    "replicas",
    1,
    MAX_REPLICAS,
    "replicas",
    "requested number of replicas, in autoscaling tasks; the initial number if left out of the first step",
)
"""The sixth knob. Only tasks with ``max_replicas`` offer it, and their actions may have a sixth number."""

FLEET_FIELDS: Final[dict[str, Field]] = {
    **ACTION_FIELDS,
    "restarting_share": Field(
        "restarting_share", 0, 1, "share", "replicas that must still restart for the precision and prefill in force"
    ),
    "seconds_since_change": Field(
        "seconds_since_change", 0, math.inf, "s", "since the last change of a knob, or since the episode began"
    ),
}
"""Fleet part of an observation, in order: knobs in force, running restarts, seconds since a change."""


SCALING_FIELDS: Final[dict[str, Field]] = {
    f.name: f
    for f in (
        Field("replicas", 1, MAX_REPLICAS, "replicas", "requested replicas: those in service and those that load"),
        Field("replicas_ready", 1, MAX_REPLICAS, "replicas", "replicas in service"),
        Field("replicas_draining", 0, math.inf, "replicas", "expected number of removed replicas that still serve"),
    )
}
"""Additional fleet fields of autoscaling tasks, after :data:`FLEET_FIELDS`, in order."""


@dataclass
class ServeAction:
    """Action: the knobs, applied to every replica of the fleet for one step of one second.

    Five knobs; ``replicas`` is the sixth of tasks that scale, None elsewhere.
    """

    kv_budget: float
    spec_length: int
    batch_size: int
    prefill_disagg: bool
    quant_tier: QuantTier
    replicas: int | None = None

    def validate(self) -> bool:
        """Return True, or raise :class:`InvalidActionError` naming the field, its value and its range."""
        if self._is_plain():
            return True  # the fast path of almost every action; all others are checked field by field
        if not isinstance(self.quant_tier, QuantTier):
            raise InvalidActionError("quant_tier", self.quant_tier, "a QuantTier: FP16, INT8 or INT4")
        if not isinstance(self.prefill_disagg, bool):
            raise InvalidActionError("prefill_disagg", self.prefill_disagg, "true or false")
        ServeAction.from_dict(vars(self))
        return True

    def _is_plain(self) -> bool:
        kv, spec, batch = self.kv_budget, self.spec_length, self.batch_size
        # Dataclasses do not check types, so these may be anything.
        flag: object = self.prefill_disagg
        tier: object = self.quant_tier
        replicas = self.replicas
        return (
            type(flag) is bool
            and type(tier) is QuantTier
            and type(kv) is float
            and ACTION_FIELDS["kv_budget"].low <= kv <= ACTION_FIELDS["kv_budget"].high
            and type(spec) is int
            and spec in SPEC_LENGTHS
            and type(batch) is int
            and ACTION_FIELDS["batch_size"].low <= batch <= ACTION_FIELDS["batch_size"].high
            and (replicas is None or (type(replicas) is int and REPLICAS.low <= replicas <= REPLICAS.high))
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON form: ``quant_tier`` is its number 0-2; ``replicas`` only where the action has it."""
        knobs: dict[str, Any] = {
            "kv_budget": self.kv_budget,
            "spec_length": self.spec_length,
            "batch_size": self.batch_size,
            "prefill_disagg": self.prefill_disagg,
            "quant_tier": self.quant_tier.value,
        }
        if self.replicas is not None:
            knobs["replicas"] = self.replicas
        return knobs

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ServeAction:
        """Read the JSON form; missing fields take the defaults.

        ``quant_tier`` may be a :class:`QuantTier`, 0-2 or a name; ``prefill_disagg`` a bool or 0/1. Raises
        :class:`InvalidActionError` on an unknown key, a wrong type, a non-finite number or a value out of range.
        """
        return cls.from_message(read(ServeActionMessage, data, InvalidActionError, whole="action"))

    @classmethod
    def from_message(cls, knobs: ServeActionMessage) -> ServeAction:
        """The action of a message whose knobs have been checked."""
        tier = QuantTier(knobs.quant_tier)
        return cls(knobs.kv_budget, knobs.spec_length, knobs.batch_size, knobs.prefill_disagg, tier, knobs.replicas)


def _tier(value: object) -> object:
    """The number of a tier given as member or name; anything else is left to pydantic, which checks it."""
    if isinstance(value, QuantTier):
        return value.value
    if isinstance(value, str) and value in QuantTier.__members__:
        return QuantTier[value].value
    return value


def _flag(value: object) -> object:
    """A JSON flag: true, false, 1 or 0."""
    return bool(value) if isinstance(value, (int, float)) and value in (0, 1) else value


def bounds(field: Field) -> Any:
    """A field of the tables below as pydantic's field: bounds, meaning and unit."""
    high = field.high if math.isfinite(field.high) else None
    return pydantic.Field(ge=field.low, le=high, description=f"{field.description} ({field.unit})")


def _described(field: Field) -> Any:
    return pydantic.Field(description=f"{field.description} ({field.unit})")


NAIVE_ACTION: Final = ServeAction(
    kv_budget=1.0, spec_length=0, batch_size=32, prefill_disagg=False, quant_tier=QuantTier.FP16
)
"""Default knob values: the agent ``naive`` (fixed-32) plays them, and missing fields of an action take them."""


class ServeActionMessage(Message):
    """JSON form of an action: five knobs; those left out of a step stay as they are, the first starts from defaults.

    ``replicas`` is the sixth of tasks that scale; others ignore it.
    """

    kv_budget: Annotated[float, bounds(ACTION_FIELDS["kv_budget"])] = NAIVE_ACTION.kv_budget
    spec_length: Annotated[Literal[0, 1, 2, 4, 8], CHOICE, _described(ACTION_FIELDS["spec_length"])] = 0
    batch_size: Annotated[int, bounds(ACTION_FIELDS["batch_size"]), WHOLE] = NAIVE_ACTION.batch_size
    prefill_disagg: Annotated[
        bool,
        BeforeValidator(_flag),
        WithJsonSchema({"anyOf": [{"type": "boolean"}, {"type": "integer", "enum": [0, 1]}]}),
        _described(ACTION_FIELDS["prefill_disagg"]),
        Allowed("true or false"),
    ] = NAIVE_ACTION.prefill_disagg
    quant_tier: Annotated[
        Literal[0, 1, 2],
        CHOICE,
        BeforeValidator(_tier),
        WithJsonSchema(
            {
                "anyOf": [
                    {"type": "integer", "enum": [tier.value for tier in QuantTier]},
                    {"type": "string", "enum": [tier.name for tier in QuantTier]},
                ]
            }
        ),
        _described(ACTION_FIELDS["quant_tier"]),
        Allowed('0, 1, 2 or "FP16", "INT8", "INT4"'),
    ] = 0
    replicas: Annotated[int | None, bounds(REPLICAS), WHOLE] = None


@dataclass
class MetricsSnapshot:
    """Metrics of one step of the fleet. Times in milliseconds, memory in decimal GB per replica.

    TTFT is the time from a request's arrival to its first output token, queueing included; TPOT the mean time between
    two output tokens of a running request. ``cost_per_1k`` is normalised cost per 1,000 output tokens.
    """

    ttft_p50_ms: Annotated[
        float, pydantic.Field(description="median time from arrival to first output token, queueing included (ms)")
    ]
    ttft_p99_ms: Annotated[float, pydantic.Field(description="99th percentile of the same (ms)")]
    tpot_ms: Annotated[float, pydantic.Field(description="time per output token of a running request (ms)")]
    tokens_per_sec: Annotated[float, pydantic.Field(description="output tokens per second of the whole fleet")]
    gpu_memory_gb: Annotated[float, pydantic.Field(description="memory in use on one card of a replica (decimal GB)")]
    cost_per_1k: Annotated[float, pydantic.Field(description="normalised cost per 1,000 output tokens")]
    spec_accept_rate: Annotated[float, pydantic.Field(description="accepted draft tokens / drafted tokens")]
    eviction_events: Annotated[int, pydantic.Field(description="preempted requests (requests)")]
    slo_violations: Annotated[
        int,
        pydantic.Field(
            description="requests beyond their objective or rejected; more where memory runs out (requests)"
        ),
    ]
    oom: Annotated[bool, pydantic.Field(description="whether the configuration exceeds the memory")] = False


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
