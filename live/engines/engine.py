"""Interface of an engine that can be observed, loaded and set while it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, Self

from inferencegym.errors import InvalidActionError
from live.driver import ClosedLoop, EngineApi, EngineRequest, OpenLoop, RequestTiming

ACTION_KNOBS: Final = ("kv_budget", "spec_length", "batch_size")
"""Knobs of the environment's action that engines can change while they run. Some can also change ``prefill_tokens``,
the token budget of an iteration."""

Knobs = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Reading:
    """State that an engine reports.

    Queue, running requests and KV occupancy (share) are current values, the rest are counts since its start; None if
    the engine has no such number.
    """

    queue_requests: float
    running_requests: float
    kv_occupancy: float
    finished_requests: float | None = None
    prompt_tokens: float | None = None
    output_tokens: float | None = None
    preemptions: float | None = None
    drafted_tokens: float | None = None
    accepted_tokens: float | None = None
    iterations: float | None = None
    ttft_buckets: Mapping[float, float] | None = None
    """Requests by time to first token: cumulative counts by upper edge (s)."""
    tpot_buckets: Mapping[float, float] | None = None
    """The same of the time per output token."""


@dataclass(frozen=True, slots=True)
class Orders:
    """Setting for an engine, and the one it returns to when ``until`` (Unix seconds) passes without new orders.

    ``until`` of None keeps the setting. With ``until`` they are a controller's, and ``then`` is the user's setting:
    vLLM's control file refuses other controllers meanwhile.
    """

    knobs: Knobs
    until: float | None = None
    then: Knobs | None = None


class Load(Protocol):
    """Requests that are being sent to an engine."""

    @property
    def timings(self) -> Sequence[RequestTiming]:
        """Times of each request so far, in the order given."""
        ...

    def advance(self, to_s: float) -> None:
        """Return when this many seconds have passed since the start."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...


class Engine(Protocol):
    """A running engine."""

    name: str
    seconds_pass: bool
    """True if the engine runs in real time."""

    def limits(self) -> Mapping[str, tuple[float, float]]:
        """Smallest and largest value of every knob that can be changed while the engine runs."""
        ...

    def in_force(self) -> Knobs:
        """What those knobs are set to now."""
        ...

    def user_setting(self) -> Knobs:
        """Setting of those knobs without a controller, which may differ from the one in force while there is one."""
        ...

    def read(self) -> Reading:
        """Current state. Raises :class:`RemoteError` if the engine reports none."""
        ...

    def set(self, orders: Orders) -> None:
        """Change knobs; those that are not named keep the user's setting.

        Raises :class:`InvalidActionError` for a value outside limits, and :class:`InvalidConfigError` if another
        controller sets the engine.
        """
        ...

    def load(self, requests: Sequence[EngineRequest], clients: int | None = None) -> Load:
        """Send each request when it is due, counted from when the load is entered.

        With ``clients`` so many clients send them in order, each its next one when its last has ended (closed loop).
        """
        ...


class HttpEngine:
    """Base of engines that are loaded through the OpenAI API. Raises :class:`RemoteError` if none is there."""

    seconds_pass = True

    def __init__(self, api: EngineApi) -> None:
        self.api = api.check()

    def load(self, requests: Sequence[EngineRequest], clients: int | None = None) -> OpenLoop:
        return OpenLoop(self.api, requests) if clients is None else ClosedLoop(self.api, requests, clients)


def within(knobs: Knobs, limits: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """The knobs, if each can be changed and lies within its limits; raises :class:`InvalidActionError` otherwise."""
    for name, value in knobs.items():
        if name not in limits:
            raise InvalidActionError(name, value, f"left out: this engine changes {', '.join(limits)} while it runs")
        low, high = limits[name]
        if not low <= value <= high:
            raise InvalidActionError(name, value, f"from {low:g} to {high:g} on this engine, as it was started")
    return dict(knobs)
