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
from inferencegym.installation import install_extra


@contextmanager
def without_gradio() -> Iterator[None]:
    """Context in which importing OpenEnv does not import Gradio, its demo page: saves two seconds and 80 MB.

    OpenEnv works without Gradio. The name is blocked in ``sys.modules`` until the context ends.
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
        f"OpenEnv cannot be imported ({error}), which its client and types need: {install_extra('openenv')}",
        name=error.name,
    ) from error

V = TypeVar("V")

# ---------------------------------------------------------------- annotations made from the tables of fields


def _checked(check: Callable[[Any], V]) -> BeforeValidator:
    """Validator that calls ``check`` and hands its message to pydantic."""

    def validate(value: Any) -> V:
        try:
            return check(value)
        except InvalidActionError as error:
            # Pydantic would put a plain ValueError into the error's context, which cannot be sent as JSON.
            raise PydanticCustomError(error.code, "{message}", {"message": str(error)}) from error

    return BeforeValidator(validate)


def _described(field: models.Field) -> dict[str, Any]:
    return {"description": f"{field.description} ({field.unit})"}


def _unchecked(field: models.Field) -> Any:
    """Field with its bounds in the JSON schema only: observations from the simulator need no second check."""
    schema: dict[str, Any] = {"minimum": field.low}
    if math.isfinite(field.high):
        schema["maximum"] = field.high
    return Field(json_schema_extra=schema, **_described(field))


_OBSERVATION: Final = models.OBSERVATION_FIELDS
_STATE: Final = traffic.STATE_FIELDS

# ---------------------------------------------------------------- serving fleet


class InferenceGymAction(models.ServeActionMessage, Action):  # type: ignore[misc]
    """Action: the five knobs; a knob left out keeps its value, initially its default.

    ``quant_tier`` is 0, 1, 2 or "FP16", "INT8", "INT4". ``metadata["step"]`` may number the step, counting from 1: sent
    again, the same step with the same knobs gives the same answer and is not played twice.
    """


class InferenceGymObservation(Observation):  # type: ignore[misc]
    """Observation: twelve fields, and ``info`` if the reset asked for it."""

    # An older client ignores the new fields of a newer server.
    model_config = ConfigDict(extra="ignore")

    queue_depth: Annotated[float, _unchecked(_OBSERVATION["queue_depth"])]
    mean_prompt_len: Annotated[float, _unchecked(_OBSERVATION["mean_prompt_len"])]
    arrival_rate: Annotated[float, _unchecked(_OBSERVATION["arrival_rate"])]
    kv_cache_occupancy: Annotated[float, _unchecked(_OBSERVATION["kv_cache_occupancy"])]
    ttft_p50: Annotated[float, _unchecked(_OBSERVATION["ttft_p50"])]
    tpot_p50: Annotated[float, _unchecked(_OBSERVATION["tpot_p50"])]
    slo_violation_rate: Annotated[float, _unchecked(_OBSERVATION["slo_violation_rate"])]
    gpu_memory_used_gb: Annotated[float, _unchecked(_OBSERVATION["gpu_memory_used_gb"])]
    spec_accept_rate: Annotated[float, _unchecked(_OBSERVATION["spec_accept_rate"])]
    priority_distribution: Annotated[
        list[float],
        Field(description="shares of the last 50 seconds' arrivals: " + ", ".join(models.PRIORITY_CLASSES)),
    ]
    timestep: Annotated[int, _unchecked(_OBSERVATION["timestep"])]
    cost_so_far: Annotated[float, _unchecked(_OBSERVATION["cost_so_far"])]
    info: Annotated[
        dict[str, Any] | None,
        Field(description="metrics, workload, action_applied, fleet and more, as in the answer of POST /step"),
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
    """Action: the share of the incoming requests to let through. ``metadata`` as in :class:`InferenceGymAction`."""

    action: Annotated[
        str,
        _checked(lambda value: traffic.parse_action(value).value),
        WithJsonSchema({"type": "string", "enum": list(traffic.ACTION_NAMES), "description": "share let through"}),
    ]


class TrafficControllerObservation(Observation):  # type: ignore[misc]
    """Observation: the seven fields of the state, and ``info`` if the reset asked for it."""

    model_config = ConfigDict(extra="ignore")

    cpu_usage: Annotated[float, _unchecked(_STATE["cpu_usage"])]
    memory_usage: Annotated[float, _unchecked(_STATE["memory_usage"])]
    request_rate: Annotated[float, _unchecked(_STATE["request_rate"])]
    queue_length: Annotated[int, _unchecked(_STATE["queue_length"])]
    avg_latency: Annotated[float, _unchecked(_STATE["avg_latency"])]
    step: Annotated[int, _unchecked(_STATE["step"])]
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
