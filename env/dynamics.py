"""Dynamics of a batch of episodes: the fluid model, the discrete-event reference, or a real engine.

:class:`env.batch.ServingBatch` is given one of them and uses only the interface :class:`Dynamics`. A metric that a
dynamics does not provide is absent from logs and infos; no other model substitutes for it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from inferencegym.models import NAIVE_ACTION
from simulator.hardware.tables import FloatArray
from simulator.kernel.arrays import KNOBS, METRICS, STATE, allocate
from simulator.kernel.serving import ServingFleet, ServingParams, ServingState
from simulator.load.source import CLASS_WINDOW_STEPS, EMA_WEIGHT, PROMPT_WINDOW_STEPS, LoadSource, Workload

DRAWN_TOGETHER: Final = 64
"""Episodes whose workloads are drawn together: enough to share overhead, few enough to stay in cache."""
OBSERVED_STATE: Final = (
    "time",
    "cost_so_far",
    "rate_ema",
    "prompt_window_requests",
    "prompt_window_tokens",
    "class_window",
    "rollout_share",
    "replicas_ready",
    "replicas_draining",
)
"""State that observations show: clock, cost, statistics of the offered load, restarts, replicas."""


class Dynamics(Protocol):
    """B fleets of one task that serve a second at a time; a row is the fleet of one episode.

    Knobs are the writable arrays ``kv_budget``, ``batch_size``, ``replicas`` (float) and ``spec_index``, ``disagg``,
    ``tier`` (int), all (B,). ``metric`` has the metrics that it provides, by name, (B,) each; ``metrics`` (M, B) are
    all of :data:`simulator.kernel.arrays.METRICS` in order, 0 for missing ones. ``state.rows`` has what
    :data:`OBSERVED_STATE` names. ``arrivals`` (L, T, C) requests, ``phase`` (L, T) and ``noise`` (L, T, 2) are those of
    the offered loads.
    """

    params: ServingParams
    state: ServingState
    metrics: FloatArray
    metric: Mapping[str, FloatArray]
    kv_budget: FloatArray
    batch_size: FloatArray
    replicas: FloatArray
    spec_index: NDArray[np.int64]
    disagg: NDArray[np.int64]
    tier: NDArray[np.int64]
    arrivals: FloatArray
    phase: NDArray[np.int64]
    noise: FloatArray

    def draw(self, loads: Sequence[int], seeds: Sequence[int]) -> None:
        """Draw the requests of these seeds for these loads."""
        ...

    def reset_rows(self, rows: Iterable[int]) -> None:
        """Empty these fleets: nothing queued, nothing running, time 0."""
        ...

    def idle(self) -> Mapping[str, float]:
        """Metrics before the first second, with the default knobs; missing ones are 0."""
        ...

    def step(self, lo: int = 0, hi: int | None = None) -> None:
        """Serve one second in rows ``lo`` (included) to ``hi`` (excluded)."""
        ...


DynamicsFactory = Callable[[LoadSource, ServingParams, int, int, int, int], Dynamics]
"""Makes the dynamics of a batch from: load source, parameters, rows B, seconds T, loads L (row b has load b % L), and
admissions that each row records."""


class FluidFleet(ServingFleet):
    """The fluid model; see :class:`simulator.kernel.serving.ServingFleet`."""

    def __init__(
        self, source: LoadSource, params: ServingParams, n_rows: int, n_steps: int, n_loads: int, record: int = 0
    ) -> None:
        super().__init__(params, n_rows, n_steps, n_loads, record)
        self._source = source

    def draw(self, loads: Sequence[int], seeds: Sequence[int]) -> None:
        """Draw the loads of these seeds."""
        for at in range(0, len(seeds), DRAWN_TOGETHER):
            some = slice(at, at + DRAWN_TOGETHER)
            self.set_load(loads[some], self._source.draw(seeds[some], self.n_steps))

    def idle(self) -> Mapping[str, float]:
        """Latencies of a request alone, and the memory of the default knobs."""
        return idle_metrics(self.params)


class RequestFleet:
    """Base of dynamics that follow single requests: knobs, clock, and statistics of the offered load.

    A subclass names the metrics that it gives in ``given`` and plays a row's second in :meth:`serve`.
    """

    given: Sequence[str]

    def __init__(
        self, source: LoadSource, params: ServingParams, n_rows: int, n_steps: int, n_loads: int, record: int = 0
    ) -> None:
        self.source, self.params, self.n_rows, self.n_steps, self.n_loads = source, params, n_rows, n_steps, n_loads
        sizes = {"B": n_rows, "L": n_loads, "C": params.n_classes, "T": n_steps}
        knobs = allocate(KNOBS, sizes)
        self.kv_budget, self.batch_size, self.replicas = (
            knobs[name] for name in ("kv_budget", "batch_size", "replicas")
        )
        self.spec_index, self.disagg, self.tier = (knobs[name] for name in ("spec", "disagg", "tier"))
        self.kv_budget[:], self.batch_size[:] = NAIVE_ACTION.kv_budget, NAIVE_ACTION.batch_size
        self.replicas[:] = params.n_replicas
        self.state = ServingState(allocate({name: STATE[name] for name in OBSERVED_STATE}, sizes))
        self.metrics = np.zeros((len(METRICS), n_rows))
        self.metric: Mapping[str, FloatArray] = {
            name: self.metrics[i] for i, name in enumerate(METRICS) if name in self.given
        }
        self.seeds = np.zeros(n_loads, dtype=np.int64)
        self.arrivals = np.zeros((n_loads, n_steps, params.n_classes))
        self.noise = np.ones((n_loads, n_steps, 2))
        self.phase = np.zeros((n_loads, n_steps), dtype=np.int64)
        self._prompt_tokens = np.zeros((n_loads, n_steps, params.n_classes))

    def draw(self, loads: Sequence[int], seeds: Sequence[int]) -> None:
        """Draw the loads of these seeds."""
        for load, seed in zip(loads, seeds, strict=True):
            drawn: Workload = self.source.draw([seed], self.n_steps).episode(0)
            self.seeds[load] = seed
            self.arrivals[load], self.phase[load] = drawn.arrivals, drawn.phase
            self.noise[load], self._prompt_tokens[load] = drawn.noise, drawn.prompt_tokens

    def reset_rows(self, rows: Iterable[int]) -> None:
        """Start these rows anew."""
        self.state.start(rows, self.params)

    def idle(self) -> Mapping[str, float]:
        """No metrics: an engine has none before the first second."""
        return {}

    def step(self, lo: int = 0, hi: int | None = None) -> None:
        """Serve one second in rows ``lo`` to ``hi``."""
        rows = range(lo, self.n_rows if hi is None else hi)
        for row, metrics in zip(rows, self.serve(rows), strict=True):
            for name, value in metrics.items():
                self.metric[name][row] = value
            self.state.rows["cost_so_far"][row] += metrics["cost_per_1k"]
            self._offer(row)
            self.state.rows["time"][row] += 1

    @abstractmethod
    def serve(self, rows: range) -> Sequence[Mapping[str, float]]:
        """Metrics of the next second of each of these rows: all those in ``given``."""

    def _offer(self, row: int) -> None:
        """Statistics of the load that was offered by the end of the row's present second."""
        load, rows = row % self.n_loads, self.state.rows
        now = int(rows["time"][row]) + 1
        arrivals = self.arrivals[load]
        recent = slice(max(0, now - PROMPT_WINDOW_STEPS), now)
        rows["rate_ema"][row] += EMA_WEIGHT * (arrivals[now - 1].sum() - rows["rate_ema"][row])
        rows["prompt_window_requests"][row] = arrivals[recent].sum()
        rows["prompt_window_tokens"][row] = self._prompt_tokens[load, recent].sum()
        rows["class_window"][row] = arrivals[max(0, now - CLASS_WINDOW_STEPS) : now].sum(axis=0)


def memory_gb(params: ServingParams, kv_budget: float, drafts: bool, batch_size: float, tier: int) -> float:
    """Memory that a card needs with these knobs (decimal GB), also above its limit."""
    p: Mapping[str, Any] = params.constants
    weights_gb, draft_gb = p["weights_gb"][tier], p["draft_gb"] if drafts else 0.0
    # Summed in the kernel's order, so that both agree to the last bit.
    pool_gb = kv_budget * (p["memory_gb"] - weights_gb - p["activation_gb"] - p["workspace_gb"] - draft_gb)
    return float(weights_gb + p["activation_gb"] + p["sequence_gb"] * batch_size + draft_gb + pool_gb)


def idle_metrics(params: ServingParams) -> dict[str, float]:
    """Latencies of one request at a time on an idle fleet with the default knobs, and the memory that it takes."""
    stats, constants = params.stats, params.constants
    share = stats.shares / stats.shares.sum()
    alone = float((stats.work_mean_ms[:, 0] * constants["alone_ratio"][:, 0]) @ share)
    return {
        "ttft_p50_ms": constants["ttft_offset_ms"] + alone,
        "ttft_p99_ms": constants["ttft_offset_ms"] + alone,
        "tpot_ms": float(params.tables.decode_ms[0, 0, 0, 0]),
        "gpu_memory_gb": memory_gb(params, NAIVE_ACTION.kv_budget, False, NAIVE_ACTION.batch_size, 0),
    }
