"""JSON forms of the traffic controller as pydantic models and schemas: state, step info, log entry."""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import BaseModel, Field

from env.traffic.grader import HIGHEST, SCORED
from inferencegym.messages import plain_schema
from inferencegym.models import bounds
from inferencegym.traffic import ACCEPT_SHARES, STATE_FIELDS, TrafficActionMessage

_STATE: Final = STATE_FIELDS
_Share = Annotated[float, Field(ge=0, le=1)]


class StateMessage(BaseModel):
    """The seven fields of the state."""

    cpu_usage: Annotated[float, bounds(_STATE["cpu_usage"])]
    memory_usage: Annotated[float, bounds(_STATE["memory_usage"])]
    request_rate: Annotated[float, bounds(_STATE["request_rate"])]
    queue_length: Annotated[int, bounds(_STATE["queue_length"])]
    avg_latency: Annotated[float, bounds(_STATE["avg_latency"])]
    step: Annotated[int, bounds(_STATE["step"])]
    crashed: Annotated[bool, Field(description=_STATE["crashed"].description)]


class StepInfoMessage(BaseModel):
    """Details of a step; the last five fields only at the end of the episode."""

    incoming_requests: float
    allowed_requests: float
    accept_rate: float
    crashed: bool
    episode_step: int
    max_steps: int
    server_capacity: float
    final_score: _Share = 0.0
    episode_done: bool = False
    score: _Share = 0.0
    breakdown: dict[str, float] = {}
    feedback: str = ""


def step_info_schema() -> dict[str, Any]:
    """JSON schema of a step's info."""
    return plain_schema(StepInfoMessage)


def log_entry_schema() -> dict[str, Any]:
    """JSON schema of a step of a log or an answer of step; the order of steps cannot be expressed in it."""
    step = {"type": "integer", "minimum": 1}
    scored: dict[str, Any] = {
        name: {"type": "boolean"} if name == "crashed" else {"type": "number", "minimum": 0, "maximum": HIGHEST[name]}
        for name in SCORED
    }
    in_state = {name: scored[name] for name in scored if name in STATE_FIELDS}
    in_info = {name: scored[name] for name in scored if name not in STATE_FIELDS}
    in_info |= {"accept_rate": {"enum": list(ACCEPT_SHARES.values())}, "episode_step": step}
    action = plain_schema(TrafficActionMessage)
    entry = {
        "timestep": step,
        "action": {"anyOf": [action["properties"]["action"], action]},
        "reward": {"description": "compared with the replay when the log is verified"},
        "metrics": {"type": "object", "properties": scored, "required": list(scored)},
    }
    answer = {
        "state": {"type": "object", "properties": in_state, "required": list(in_state)},
        "info": {"type": "object", "properties": in_info, "required": list(in_info)},
        "metrics": {"not": {}},
    }
    return {
        "anyOf": [
            {"type": "object", "properties": entry, "required": ["timestep", "action", "metrics"]},
            # An object that also has metrics is read as an entry.
            {"type": "object", "properties": answer, "required": ["state", "info"]},
        ]
    }
