"""Server of the traffic controller: one queue, one capacity, a crash beyond a load ratio.

State, parameters and dynamics are apart, and the dynamics work on arrays: B servers at once, each element on its own,
so that a row of a batch equals the same episode alone, bit for bit. There is no randomness: the incoming rates follow
from the task and its scale.

The model, per step of one second, for ``allowed`` requests/s let through::

    load     = allowed / capacity
    queue'   = floor(queue + max(0, allowed - capacity) - 0.3 * max(0, capacity - allowed)), within [0, max_queue]
    latency  = base * (1 + load^2)   up to capacity,   base * (1 + load^3) above it,   + 0.5 ms per queued request
    cpu      = min(1, 0.3 + 0.6 * load),   memory = min(1, 0.2 + 0.4 * load)
    crashed  = load > crash_load_ratio
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from env.traffic.tasks import TrafficConfig, TrafficPattern
from inferencegym.traffic import ACCEPT_SHARES

SHARES: Final = np.array(list(ACCEPT_SHARES.values()))
"""Shares admitted, in the order of the action indices."""

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

DRAIN_SHARE = 0.3
"""Share of the spare capacity that drains the queue."""
QUEUE_LATENCY_MS = 0.5
"""Latency (ms) that each queued request adds."""
# Measurements have the resolution of a monitoring page. Reward, score and log are computed from these rounded values,
# so that a client can recompute the same numbers from the responses.
USAGE_PARTS = 1e4
LATENCY_PARTS_PER_MS = 1e2
# Rates are known to a millionth: 67 requests/s throttled to 70% are 46.9 and not 46.89999999999999, and a whole
# request is never lost to binary rounding when the queue is counted.
RATE_PARTS_PER_RPS = 1e6


@dataclass(frozen=True, slots=True)
class TrafficParams:
    """Constants of one episode; nothing here changes while it runs."""

    server_capacity_rps: float
    base_latency_ms: float
    crash_load_ratio: float
    max_queue_requests: int

    @classmethod
    def from_config(cls, config: TrafficConfig) -> TrafficParams:
        """The settings of the server itself (``traffic_scale`` belongs to the traffic)."""
        return cls(config.server_capacity, config.base_latency, config.crash_load_ratio, config.max_queue)

    def load_ratio(self, allowed_rps: FloatArray) -> FloatArray:
        """Share of capacity in use; above 1 the queue grows. Any shape."""
        return allowed_rps / self.server_capacity_rps


@dataclass(frozen=True, slots=True)
class TrafficServer:
    """Measurements of B servers after a step; every field ``(B,)``.

    The next step depends only on ``queue_requests``.
    """

    queue_requests: IntArray
    latency_ms: FloatArray
    cpu_share: FloatArray
    memory_share: FloatArray
    crashed: BoolArray


def incoming_rates(pattern: TrafficPattern, n_steps: int, traffic_scale: float) -> FloatArray:
    """Incoming requests/s of steps 0 to ``n_steps``, ``(n_steps + 1,)``.

    The last entry is the rate after the episode's last step, which its last observation shows.
    """
    rates = np.array([pattern.rate(step) for step in range(n_steps + 1)], dtype=np.float64)
    return _rounded(rates * traffic_scale, RATE_PARTS_PER_RPS)


def allowed_rates(incoming_rps: FloatArray, accept_share: FloatArray) -> FloatArray:
    """Requests/s admitted; shapes broadcast."""
    return _rounded(incoming_rps * accept_share, RATE_PARTS_PER_RPS)


def initial(params: TrafficParams, incoming_rps: FloatArray) -> TrafficServer:
    """The servers before the first step: the first incoming rate ``(B,)``, and an empty queue."""
    return _measure(
        params,
        params.load_ratio(incoming_rps),
        queue=np.zeros(incoming_rps.shape, dtype=np.int64),
        crashed=np.zeros(incoming_rps.shape, dtype=np.bool_),
    )


def step(params: TrafficParams, queue_requests: IntArray, allowed_rps: FloatArray) -> TrafficServer:
    """Serve one second of ``allowed_rps`` on top of ``queue_requests``; both ``(B,)``.

    Monotone: a longer queue before the step never gives a shorter queue or a lower latency after it. A crash depends
    on the load alone.
    """
    load = params.load_ratio(allowed_rps)
    spare = params.server_capacity_rps - allowed_rps
    growth = np.where(spare < 0, -spare, -DRAIN_SHARE * spare)
    counted = np.floor(queue_requests + growth)
    queue = np.minimum(np.maximum(counted, 0.0), params.max_queue_requests).astype(np.int64)
    return _measure(params, load, queue, crashed=load > params.crash_load_ratio)


def _measure(params: TrafficParams, load: FloatArray, queue: IntArray, crashed: BoolArray) -> TrafficServer:
    slowdown = 1.0 + np.where(load <= 1.0, load * load, load * load * load)
    return TrafficServer(
        queue_requests=queue,
        latency_ms=_rounded(params.base_latency_ms * slowdown + QUEUE_LATENCY_MS * queue, LATENCY_PARTS_PER_MS),
        cpu_share=_rounded(np.minimum(1.0, 0.3 + 0.6 * load), USAGE_PARTS),
        memory_share=_rounded(np.minimum(1.0, 0.2 + 0.4 * load), USAGE_PARTS),
        crashed=crashed,
    )


def _rounded(values: FloatArray, parts: float) -> FloatArray:
    """The nearest multiple of 1 / ``parts``."""
    return np.rint(values * parts) / parts
