"""Words of the rollouts environment that its clients need: the action, and the fields of the observation.

Agent sessions (a prompt, an answer, a tool call, a longer prompt, ...) share one engine and its prefix cache. The
controller decides each second how many of them may be in flight. The environment itself is in :mod:`env.rollouts`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Final

import pydantic

from inferencegym.errors import InvalidActionError
from inferencegym.messages import WHOLE, Message, read
from inferencegym.models import Field
from inferencegym.task_registry import MAX_EPISODE_LENGTH

MAX_SESSIONS: Final = 512
"""Largest cap, and most sessions of a task."""


class RolloutAction(Message):
    """Action of the rollouts environment: the cap on sessions in flight from now on."""

    max_sessions: Annotated[
        int, pydantic.Field(ge=1, le=MAX_SESSIONS, description="sessions that may be in flight; the others wait"), WHOLE
    ]


def parse_action(value: object) -> int:
    """Read ``{"max_sessions": n}`` or a bare number; raises :class:`InvalidActionError`."""
    if isinstance(value, RolloutAction):
        return value.max_sessions
    given = value if isinstance(value, Mapping) else {"max_sessions": value}
    return read(RolloutAction, given, InvalidActionError).max_sessions


_TOKENS: Final = 1e12

OBSERVATION_FIELDS: Final[dict[str, Field]] = {
    f.name: f
    for f in (
        Field("time_s", 0, MAX_EPISODE_LENGTH, "s", "time since the start"),
        Field("max_sessions", 1, MAX_SESSIONS, "sessions", "cap in force"),
        Field("sessions_in_flight", 0, MAX_SESSIONS, "sessions", "sessions in flight that count towards the cap"),
        Field("sessions_paused", 0, MAX_SESSIONS, "sessions", "started sessions that wait for the cap to rise"),
        Field("sessions_waiting", 0, MAX_SESSIONS, "sessions", "arrived sessions that have not started"),
        Field("sessions_finished", 0, MAX_SESSIONS, "sessions", "finished sessions"),
        Field("sessions_refused", 0, MAX_SESSIONS, "sessions", "sessions with a turn longer than the KV pool"),
        Field("interactive_in_flight", 0, MAX_SESSIONS, "sessions", "interactive sessions, which do not wait"),
        Field("running_requests", 0, MAX_SESSIONS, "requests", "requests that the engine computes"),
        Field("waiting_requests", 0, MAX_SESSIONS, "requests", "requests in the engine's queue"),
        Field("kv_usage", 0, 1, "share", "KV pool held by running requests"),
        Field("kv_pool_tokens", 0, _TOKENS, "tokens", "KV pool, the shared system prompt included"),
        Field("prefix_queried_tokens", 0, _TOKENS, "tokens", "prompt tokens of the requests that started in the step"),
        Field("prefix_hit_tokens", 0, _TOKENS, "tokens", "of these, found in the prefix cache"),
        Field("computed_tokens", 0, _TOKENS, "tokens", "prompt tokens computed in the step, recomputed ones included"),
        Field("generated_tokens", 0, _TOKENS, "tokens", "tokens written in the step"),
        Field("preemptions", 0, math.inf, "requests", "requests that lost their cache in the step"),
        Field("context_mean_tokens", 0, _TOKENS, "tokens", "mean conversation of the sessions in flight"),
        Field("context_max_tokens", 0, _TOKENS, "tokens", "longest conversation of the sessions in flight"),
        Field("context_share", 0, math.inf, "share", "all conversations in flight, divided by the KV pool"),
    )
}
"""What an engine's /metrics and a gateway know at the end of a step, in the order of the flat observation."""

Seen = Mapping[str, float]
"""An observation by name, which controllers read."""
FIRST_CAP: Final = 4
"""Cap with which rules start that know nothing yet."""


def bounded(cap: float) -> int:
    """The nearest cap that is allowed."""
    return max(1, min(MAX_SESSIONS, round(cap)))


class Fit:
    """Conversations in flight are kept below ``share`` of the KV pool.

    Above it, as many sessions are paused as have to be. Below it, the cap leaves room for ``ahead_s`` of the growth
    that the last seconds showed, and for new sessions of the mean length.
    """

    def __init__(self, share: float = 0.9, ahead_s: float = 2.0, gain: float = 0.5) -> None:
        self.share, self.ahead_s, self.gain = share, ahead_s, gain
        self.growth_tokens = 0.0

    def __call__(self, seen: Seen) -> int:
        flying = seen["sessions_in_flight"]
        if flying == 0:
            return FIRST_CAP
        new_tokens = seen["prefix_queried_tokens"] - seen["prefix_hit_tokens"] + seen["generated_tokens"]
        self.growth_tokens += 0.1 * (new_tokens - self.growth_tokens)
        pool = seen["kv_pool_tokens"]
        mean = max(1.0, seen["context_mean_tokens"])
        room = (self.share - seen["context_share"]) * pool
        if room < 0:
            return bounded(flying - math.ceil(-room / mean))
        room -= self.ahead_s * min(self.growth_tokens, 0.01 * pool)
        return bounded(flying + max(0, math.floor(self.gain * room / mean)))
