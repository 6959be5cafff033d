"""JSON forms of the serving fleet as pydantic models and schemas: observation, metrics, traffic, log entry."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, get_type_hints

from pydantic import BaseModel, Field, create_model

from grader.episode import GRADED_METRICS, UNREPORTED
from inferencegym.messages import plain_schema
from inferencegym.models import (
    FLEET_FIELDS,
    OBSERVATION_FIELDS,
    PRIORITY_CLASSES,
    SCALING_FIELDS,
    MetricsSnapshot,
    ServeActionMessage,
    bounds,
)
from simulator.kernel.arrays import OVER_SECONDS

_SEEN: Final = OBSERVATION_FIELDS
_Share = Annotated[float, Field(ge=0, le=1)]


class ObservationMessage(BaseModel):
    """The twelve fields of an observation."""

    queue_depth: Annotated[float, bounds(_SEEN["queue_depth"])]
    mean_prompt_len: Annotated[float, bounds(_SEEN["mean_prompt_len"])]
    arrival_rate: Annotated[float, bounds(_SEEN["arrival_rate"])]
    kv_cache_occupancy: Annotated[float, bounds(_SEEN["kv_cache_occupancy"])]
    ttft_p50: Annotated[float, bounds(_SEEN["ttft_p50"])]
    tpot_p50: Annotated[float, bounds(_SEEN["tpot_p50"])]
    slo_violation_rate: Annotated[float, bounds(_SEEN["slo_violation_rate"])]
    gpu_memory_used_gb: Annotated[float, bounds(_SEEN["gpu_memory_used_gb"])]
    spec_accept_rate: Annotated[float, bounds(_SEEN["spec_accept_rate"])]
    priority_distribution: Annotated[
        list[_Share],
        Field(
            min_length=len(PRIORITY_CLASSES),
            max_length=len(PRIORITY_CLASSES),
            description="shares of the last 50 seconds' arrivals: interactive, batch, best effort",
        ),
    ]
    timestep: Annotated[int, bounds(_SEEN["timestep"])]
    cost_so_far: Annotated[float, bounds(_SEEN["cost_so_far"])]


_REPORTED: Final[dict[str, Any]] = {
    name: (kind, ...) for name, kind in get_type_hints(MetricsSnapshot, include_extras=True).items()
}
_TOGETHER: Final = "of a step of several seconds: " + "; ".join(
    f"{how} of {', '.join(names)}"
    for how in ("mean", "sum", "max", "last")
    if (names := [name for name in _REPORTED if OVER_SECONDS[name] == how])
)
MetricsMessage: Final = create_model("MetricsMessage", __doc__="Metrics of one step of the fleet.", **_REPORTED)
"""Fields of :class:`inferencegym.models.MetricsSnapshot`, all of which an answer holds."""


class WorkloadMessage(BaseModel):
    """The traffic of one step."""

    arrival_rate: Annotated[
        float, Field(description="arrivals, exponential moving average over ten seconds (requests/s)")
    ]
    mean_prompt_len: Annotated[
        float, Field(description="mean prompt length of the last ten seconds' arrivals (tokens)")
    ]
    prompt_len_bucket: Annotated[int, Field(description="bucket of that length: 0 below 64 tokens, 7 from 4,096 on")]
    queue_depth: Annotated[int, Field(description="requests waiting in the queue (requests)")]
    priority_distribution: Annotated[
        list[float], Field(description="shares of the last 50 seconds' arrivals: interactive, batch, best effort")
    ]
    is_burst: Annotated[bool, Field(description="whether the second is in a flood")]
    phase: Annotated[
        Literal["warmup", "steady", "burst", "cooldown"],
        Field(description="the first 10 s, a flood, the 10 s after one, or none of these"),
    ]


class FleetMessage(BaseModel):
    """Knobs in force after a step, and for how long; the last three only in autoscaling tasks."""

    kv_budget: Annotated[float, bounds(FLEET_FIELDS["kv_budget"])]
    spec_length: Annotated[int, bounds(FLEET_FIELDS["spec_length"])]
    batch_size: Annotated[int, bounds(FLEET_FIELDS["batch_size"])]
    prefill_disagg: bool
    quant_tier: Annotated[int, bounds(FLEET_FIELDS["quant_tier"])]
    restarting_share: Annotated[float, bounds(FLEET_FIELDS["restarting_share"])]
    seconds_since_change: Annotated[int, bounds(FLEET_FIELDS["seconds_since_change"])]
    restarting_replicas: Annotated[int, Field(ge=0, description="replicas that must still restart (replicas)")]
    replicas: Annotated[int | None, bounds(SCALING_FIELDS["replicas"])] = None
    replicas_ready: Annotated[int | None, bounds(SCALING_FIELDS["replicas_ready"])] = None
    replicas_draining: Annotated[float | None, bounds(SCALING_FIELDS["replicas_draining"])] = None


class GradeSoFarMessage(BaseModel):
    """Grade of the seconds so far, as POST /grader gives it."""

    score: _Share
    breakdown: Annotated[dict[str, float], Field(description="parts of the grade")]


class ClassMessage(BaseModel):
    """One class of requests: its queue after the step, and its misses in all seconds of the step."""

    queue_requests: Annotated[float, Field(ge=0, description="requests waiting in the queue (requests)")]
    slo_violations: Annotated[
        float,
        Field(ge=0, description="requests beyond their objective or rejected (requests); out of memory adds none"),
    ]


StepInfoMessage: Final = create_model(
    "StepInfoMessage",
    __doc__="Details of a step: its metrics, its traffic, the action with the task's masks applied, the fleet and the "
    "grade so far. The last three fields only at the end of the episode.",
    timestep=(int, Field(description="seconds played in this episode")),
    seconds=(int, Field(ge=1, description="seconds that this step played")),
    metrics=(MetricsMessage, Field(description=_TOGETHER)),
    workload=WorkloadMessage,
    action_applied=dict[str, Any],
    fleet=FleetMessage,
    grade_so_far=GradeSoFarMessage,
    by_class=(dict[str, ClassMessage], Field({}, description="by class of requests; only the fluid model gives it")),
    score=(_Share, 0.0),
    breakdown=(dict[str, float], {}),
    feedback=(str, ""),
)


def step_info_schema() -> dict[str, Any]:
    """JSON schema of a step's info."""
    return plain_schema(StepInfoMessage)


def log_entry_schema() -> dict[str, Any]:
    """JSON schema of a step of a log or an answer of POST /step: the fields that grading reads.

    Verification needs every field of the step.
    """
    measured = {name: {"type": "number", "minimum": 0, "maximum": high} for name, high in GRADED_METRICS.items()}
    metrics = {
        "type": "object",
        "required": [name for name in measured if name != UNREPORTED],
        "properties": measured,
        "description": "metrics of the step; see /info",
    }
    action = {**plain_schema(ServeActionMessage), "description": "the action as applied"}
    entry = {
        "type": "object",
        "required": ["action", "metrics"],
        "properties": {
            # Scores do not depend on these two; verification checks them.
            "timestep": {"description": "number of the second, from 1"},
            "action": action,
            "reward": {"description": "reward of the step"},
            "metrics": metrics,
        },
    }
    info = {
        "type": "object",
        "required": ["metrics", "action_applied"],
        "properties": {"metrics": metrics, "action_applied": action},
    }
    # An object that also has metrics is read as an entry.
    answer = {"type": "object", "required": ["info"], "properties": {"info": info, "metrics": {"not": {}}}}
    return {"anyOf": [entry, answer]}
