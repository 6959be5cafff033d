"""Action, observation and state types of both environments for OpenEnv (extra ``openenv``).

Names, bounds, units and defaults come from :mod:`inferencegym.models` and :mod:`inferencegym.traffic`; an action is
checked by the same functions that check it in process.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Final, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from inferencegym import models, traffic
from inferencegym.errors import InvalidActionError


@contextmanager
def without_gradio() -> Iterator[None]:
    """Context in which OpenEnv is imported without Gradio, its demonstration page: two seconds and 80 MB less.

    OpenEnv works without it. The name is blocked in ``sys.modules`` until the context ends.
    """
    if "gradio" in sys.modules:
        yield
        return
    sys.modules["gradio"] = None  # type: ignore[assignment]  # the documented way to make an import fail
    try:
        yield
    finally:
        sys.modules.pop("gradio", None)


try:
    with without_gradio():
        from openenv.core.env_server.types import Action, Observation, State
except ImportError as error:
    raise ImportError(
        f"OpenEnv cannot be imported ({error}); its client and types are an extra: "
        "pip install 'openenv-inferencegym[openenv]'",
        name=error.name,
    ) from error

ENV_NAME: Final = "inference_gym"
"""Name of the serving environment in OpenEnv's manifest and Task API; OpenEnv derives class names from it."""
TRAFFIC_ENV_NAME: Final = "traffic_controller"

V = TypeVar("V")

# ---------------------------------------------------------------- annotations made from the tables of fields


def _checked(check: Callable[[Any], V]) -> BeforeValidator:
    """Validate with the leaf's own check; its message becomes pydantic's."""

    def validate(value: Any) -> V:
        try:
            return check(value)
        except InvalidActionError as error:
            # A plain ValueError would travel in the error's context, which no server can send as JSON.
            raise PydanticCustomError(error.code, "{message}", {"message": str(error)}) from error

    return BeforeValidator(validate)


def _described(field: models.Field) -> dict[str, Any]:
    return {"description": f"{field.description} ({field.unit})"}


def _seen(field: models.Field) -> Any:
    """Bounds in the schema only: observations come from the simulator, and checking them again would cost time."""
    schema: dict[str, Any] = {"minimum": field.low}
    if math.isfinite(field.high):
        schema["maximum"] = field.high
    return Field(json_schema_extra=schema, **_described(field))


_SEEN: Final = models.OBSERVATION_FIELDS
_STATE: Final = traffic.STATE_FIELDS

# ---------------------------------------------------------------- serving fleet


class InferenceGymAction(models.ServeActionMessage, Action):  # type: ignore[misc]
    """The five knobs; what is left out takes the naive baseline's value.

    ``quant_tier`` is 0, 1, 2 or "FP16", "INT8", "INT4". ``metadata["step"]`` may number the step, counting from 1: sent
    again, the same step with the same knobs gives the same answer and is not played twice.
    """


class InferenceGymObservation(Observation):  # type: ignore[misc]
    """The twelve fields of an observation, and ``info`` if the reset asked for it."""

    # An older client goes on with a newer server.
    model_config = ConfigDict(extra="ignore")

    queue_depth: Annotated[float, _seen(_SEEN["queue_depth"])]
    mean_prompt_len: Annotated[float, _seen(_SEEN["mean_prompt_len"])]
    arrival_rate: Annotated[float, _seen(_SEEN["arrival_rate"])]
    kv_cache_occupancy: Annotated[float, _seen(_SEEN["kv_cache_occupancy"])]
    ttft_p50: Annotated[float, _seen(_SEEN["ttft_p50"])]
    tpot_p50: Annotated[float, _seen(_SEEN["tpot_p50"])]
    slo_violation_rate: Annotated[float, _seen(_SEEN["slo_violation_rate"])]
    gpu_memory_used_gb: Annotated[float, _seen(_SEEN["gpu_memory_used_gb"])]
    spec_accept_rate: Annotated[float, _seen(_SEEN["spec_accept_rate"])]
    priority_distribution: Annotated[
        list[float],
        Field(description="shares of the last 50 steps' arrivals: " + ", ".join(models.PRIORITY_CLASSES)),
    ]
    timestep: Annotated[int, _seen(_SEEN["timestep"])]
    cost_so_far: Annotated[float, _seen(_SEEN["cost_so_far"])]
    info: Annotated[
        dict[str, Any] | None,
        Field(description="metrics, workload, action_applied and more, as POST /step gives them"),
    ] = None


class InferenceGymState(State):  # type: ignore[misc]
    """State of an episode; before the first reset everything but ``step_count`` is None."""

    task_id: int | str | None = None
    seed: int | None = None
    episode_length: int | None = None
    cumulative_reward: float | None = None
    cost_so_far: float | None = None
    done: bool | None = None
    workload_phase: str | None = None
    config: dict[str, Any] | None = None


# ---------------------------------------------------------------- traffic controller


class TrafficControllerAction(Action):  # type: ignore[misc]
    """The share of the incoming requests to let through. ``metadata["step"]`` as in :class:`InferenceGymAction`."""

    action: Annotated[
        str,
        _checked(lambda value: traffic.parse_action(value).value),
        WithJsonSchema({"type": "string", "enum": list(traffic.ACTION_NAMES), "description": "share let through"}),
    ]


class TrafficControllerObservation(Observation):  # type: ignore[misc]
    """The seven fields of the state, and ``info`` if the reset asked for it."""

    model_config = ConfigDict(extra="ignore")

    cpu_usage: Annotated[float, _seen(_STATE["cpu_usage"])]
    memory_usage: Annotated[float, _seen(_STATE["memory_usage"])]
    request_rate: Annotated[float, _seen(_STATE["request_rate"])]
    queue_length: Annotated[int, _seen(_STATE["queue_length"])]
    avg_latency: Annotated[float, _seen(_STATE["avg_latency"])]
    step: Annotated[int, _seen(_STATE["step"])]
    crashed: Annotated[bool, Field(description=_STATE["crashed"].description)]
    info: Annotated[
        dict[str, Any] | None,
        Field(description="incoming_requests, allowed_requests and more; final_score at the end"),
    ] = None


class TrafficControllerState(State):  # type: ignore[misc]
    """State of an episode; before the first reset everything but ``step_count`` is None."""

    task_id: str | None = None
    seed: int | None = None
    max_steps: int | None = None
    cumulative_reward: float | None = None
    done: bool | None = None
    workload_phase: str | None = None
