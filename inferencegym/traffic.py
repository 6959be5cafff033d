"""Vocabulary of the traffic controller for its clients: the four actions and the fields of the state.

The controller protects one server: each second it chooses the share of incoming requests to admit. Names follow the
published HTTP document of that environment. The environment itself is in :mod:`env.traffic`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import Enum
from typing import Annotated, Final, Literal

import pydantic

from inferencegym.errors import InvalidActionError
from inferencegym.messages import Message, read
from inferencegym.models import Field
from inferencegym.task_registry import MAX_EPISODE_LENGTH


class TrafficAction(Enum):
    """Action of the traffic controller: the share of the incoming requests to admit for one step."""

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
        """Index of the action, for vector environments and learners."""
        return ACTION_NAMES.index(self.value)


ACCEPT_SHARES: Final[dict[str, float]] = {
    "allow_all": 1.0,
    "throttle_70": 0.7,
    "throttle_40": 0.4,
    "drop_aggressive": 0.2,
}
"""Action name -> share of the incoming requests admitted, from the most permissive to the strictest."""

ACTION_NAMES: Final = tuple(ACCEPT_SHARES)


class TrafficActionMessage(Message):
    """JSON form of an action."""

    action: Annotated[
        Literal["allow_all", "throttle_70", "throttle_40", "drop_aggressive"],
        pydantic.Field(description="share of the incoming requests to admit"),
    ]


def parse_action(value: object) -> TrafficAction:
    """Read ``{"action": name}``, a name or a :class:`TrafficAction`; raises :class:`InvalidActionError`."""
    if isinstance(value, TrafficAction):
        return value
    given = value if isinstance(value, Mapping) else {"action": value}
    return TrafficAction(read(TrafficActionMessage, given, InvalidActionError).action)


# ---------------------------------------------------------------- observation

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
"""The seven fields of the state, in the order of the flat observation."""
