"""A fleet of identical replicas behind one queue, B independent fleets (rows) at once.

``ServingParams`` holds what never changes, ``ServingState`` what one second changes, and
:class:`simulator.kernel.ServingKernel` the dynamics. :class:`ServingFleet` ties the three together: write the
knobs, call :meth:`ServingFleet.step`, read the metrics.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from inferencegym.models import SPEC_LENGTHS, MetricsSnapshot
from inferencegym.tasks import TaskSpec
from simulator.kernel import ServingKernel
from simulator.tables import FloatArray, ServingTables
from simulator.workload import (
    CLASS_WINDOW_STEPS,
    EMA_WEIGHT,
    PROMPT_WINDOW_STEPS,
    REFERENCE_BATCH,
    REUSE_LOG2_FIRST,
    ClassStats,
    Workload,
    interp_log,
    traffic_of,
)

IntArray = NDArray[np.int64]

GRID_CELLS: Final = 512
"""Cells of the survival integral between position 0 and the longest output."""
MAX_SEGMENTS: Final = 48
"""Pieces of one step's wait distribution that are kept apart; further ones are folded into the last."""

METRICS: Final = (
    "ttft_p50_ms",
    "ttft_p99_ms",
    "tpot_ms",
    "tokens_per_sec",
    "gpu_memory_gb",
    "cost_per_1k",
    "spec_accept_rate",
    "eviction_events",
    "slo_violations",
    "oom",
    "violation_share",
    "queue_requests",
    "running_requests",
    "kv_occupancy",
    "admitted",
    "completed",
    "rejected",
)
"""Rows of :attr:`ServingFleet.metrics`, in order; the first ten are those of ``MetricsSnapshot``."""


@dataclass(frozen=True, slots=True)
class EngineParams:
    """How the modelled engine behaves; the source of each value is in ENVIRONMENT.md, "Serving dynamics"."""

    disagg_limit: float = 0.98
    """Most of a prefill GPU's time that prefill may take."""
    recompute_factor: float = 1.5
    """Extra prefill work per unit of overcommitted KV cache (preempted requests are recomputed)."""
    churn_factor: float = 0.9
    """Output tokens recomputed per output token of a request that is admitted into a full KV pool."""
    load_weight: float = 0.3
    """Weight of the newest step in the prefill load that decides how long prompts queue within a step."""
    kv_fill: float = 1.0
    """Share of the KV pool up to which new requests are admitted."""
    block_slack_tokens: float = 8.0
    """KV tokens that a request holds beyond its context: half a block of 16."""
    handoff_ms_per_token: float = 131_072 / 25e9 * 1e3
    """KV transfer from a prefill GPU over a 25 GB/s link."""
    jitter: float = 0.05
    """Log standard deviation of TTFT beside queueing and prompt length."""
    eviction_rate: float = 1.0
    """Preemptions per second and overcommitted request."""


@dataclass(frozen=True, eq=False)
class ServingParams:
    """Everything about a fleet that does not change during an episode."""

    tables: ServingTables
    stats: ClassStats
    nominal_rate_rps: float
    n_replicas: int
    queue_limit: float
    base_accept_rate: float
    restart_s: float
    load_gb_per_s: float
    price: float = 1.0
    step_s: float = 1.0
    closed_clients: int = 0
    """Clients of a closed loop; 0: requests arrive as the workload says. A closed loop's waits are counted from the
    start of the run: :func:`simulator.whatif.serve_requests` knows when each request was sent."""
    engine: EngineParams = EngineParams()

    @property
    def n_classes(self) -> int:
        """Classes that occur."""
        return len(self.stats.names)

    @cached_property
    def constants(self) -> dict[str, Any]:
        """Scalars and tables for the kernel, made once."""
        return {**self._scalars(), **_class_tables(self), **self._lookup()}

    def _scalars(self) -> dict[str, float]:
        meta, engine = self.tables.meta, self.engine
        memory = meta["memory_gb"]
        longest = float(self.stats.output_cdf_tokens.max()) + 1.0
        return {
            "n_classes": self.n_classes,
            "grid_cells": GRID_CELLS,
            "grid_inv": GRID_CELLS / longest,
            "max_segments": MAX_SEGMENTS,
            "class_window_steps": CLASS_WINDOW_STEPS,
            "prompt_window_steps": PROMPT_WINDOW_STEPS,
            "ema_weight": EMA_WEIGHT,
            "n_replicas": float(self.n_replicas),
            "dt_s": self.step_s,
            "dt_ms": 1000.0 * self.step_s,
            "queue_limit": float(self.queue_limit),
            "closed_clients": float(self.closed_clients),
            "price": self.price,
            "memory_gb": float(meta["memory_budget_gb"]),
            "memory_limit_gb": float(meta["memory_limit_gb"]),
            "activation_gb": float(memory["activations_gb"]),
            "workspace_gb": float(memory["workspace_gb"]),
            "sequence_gb": float(memory["per_sequence_gb"]),
            "draft_gb": float(memory["speculation_gb"]),
            "kv_bytes_per_token": float(meta["kv_bytes_per_token"]),
            "tau_ms": float(meta["tau_ms"]),
            "chunk_tokens": float(meta["max_batched_tokens"]),
            "disagg_limit": engine.disagg_limit,
            "recompute_factor": engine.recompute_factor,
            "churn_factor": engine.churn_factor,
            "load_weight": engine.load_weight,
            "kv_fill": engine.kv_fill,
            "block_slack": engine.block_slack_tokens,
            "handoff_ms_per_token": engine.handoff_ms_per_token,
            "jitter": engine.jitter,
            "eviction_rate": engine.eviction_rate,
            "reuse_log2_first": REUSE_LOG2_FIRST,
        }

    def _lookup(self) -> dict[str, Any]:
        tables = self.tables
        weights = tables.weights_gb
        return {
            "n_batch_points": len(tables.axes["batch_size"]),
            "n_iteration_points": len(tables.iteration_batches),
            "iteration_points": tables.iteration_batches,
            "n_context_points": len(tables.axes["prompt_len_bucket"]),
            "batch_points": tables.axes["batch_size"].copy(),
            "context_points": tables.axes["prompt_len_bucket"].copy(),
            "decode_ms": tables.iteration_ms,
            "weights_gb": weights,
            "reload_s": self.restart_s + weights / self.load_gb_per_s,
            "spec_tokens": tables.spec_tokens,
            "spec_length": tables.axes["spec_length"].copy(),
        }


def _class_tables(params: ServingParams) -> dict[str, Any]:
    """Per-class tables: objectives, prefill ratios, survival of output lengths; the traffic's prefix reuse."""
    stats, tables = params.stats, params.tables
    longest = stats.output_cdf_tokens.max(axis=1)
    cell = (longest.max() + 1.0) / GRID_CELLS
    alone, apart, marginal, saturated = prefill_ratios(stats, tables)
    return {
        "slo_ms": stats.slo_ms,
        "mean_prompt": stats.prompt_mean,
        "mean_work_ms": stats.work_mean_ms,
        "work_cv2": stats.work_cv2,
        "reuse_points": 0 if stats.reuse_hit is None else len(stats.reuse_hit),
        "reuse_hit": np.zeros(1) if stats.reuse_hit is None else stats.reuse_hit,
        "output_gini": gini(stats.output_cdf_tokens),
        # Acceptance was measured at a base rate of 0.65; a task's rate scales the accepted tokens.
        "accept_scale": params.base_accept_rate / 0.65 * (1.0 - stats.complexity_penalty),
        "length_int": length_integrals(stats.output_cdf_tokens, GRID_CELLS).reshape(len(longest), -1),
        # Beyond the cell that holds a class's longest output its integrals are constant.
        "longest_output": longest + cell,
        "alone_ratio": alone,
        "apart_ratio": apart,
        "marginal_ratio": marginal,
        "saturated_ratio": saturated,
    }


def length_integrals(quantile_tokens: FloatArray, cells: int) -> FloatArray:
    """Integrals of the output length's survival function S on a grid up to the longest output; (C, cells + 1, 4).

    ``quantile_tokens`` (C, Q) holds quantiles of the lengths. The last axis is the integral of S(y) from 0 to x, that
    of y*S(y), and the slopes per cell of both, in this order; the last cell's slopes are 0.
    """
    x = np.linspace(0.0, float(quantile_tokens.max()) + 1.0, cells + 1)
    table = np.zeros((len(quantile_tokens), cells + 1, 4))
    for c, lengths in enumerate(quantile_tokens):
        # The integral of S from 0 to x is E[min(L, x)], and that of y*S(y) is E[min(L, x)**2] / 2: exact for quantiles.
        capped = np.minimum(lengths[None, :], x[:, None])
        table[c, :, 0] = capped.mean(axis=1)
        table[c, :, 1] = 0.5 * (capped**2).mean(axis=1)
        table[c, :-1, 2:] = np.diff(table[c, :, :2], axis=0)
    return table


def gini(quantile_tokens: FloatArray) -> FloatArray:
    """Gini coefficients of output lengths, (C,) from (C, Q) evenly spaced quantiles.

    Given when requests came, the number in flight has this share of its mean as variance: a request of age x is still
    there with probability S(x), and the integral of S(1 - S) is the mean times the Gini coefficient.
    """
    n = quantile_tokens.shape[1]
    rank = (2.0 * np.arange(n) + 1.0 - n) / n
    spread: FloatArray = (np.sort(quantile_tokens, axis=1) * rank).mean(axis=1) / quantile_tokens.mean(axis=1)
    return spread


def prefill_ratios(stats: ClassStats, tables: ServingTables) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """Prefill time of a class's mean prompt relative to its listed work.

    Returns (C, 3) for a prompt alone on an idle engine, (C, 3) for prompts that fill the iterations of a GPU which does
    nothing else, (C, 3, batch points) for one prompt fused into a running batch, and the same for iterations full of
    such prompts.
    """
    points = tables.axes["prompt_len_bucket"]
    n_classes, n_tiers, n_batch = len(stats.names), 3, len(tables.axes["batch_size"])
    reference = int(np.argmin(np.abs(tables.axes["batch_size"] - REFERENCE_BATCH)))
    alone, apart = np.empty((2, n_classes, n_tiers))
    chunk_tokens = float(tables.meta["max_batched_tokens"])
    marginal, saturated = np.empty((2, n_classes, n_tiers, n_batch))
    for c, prompt in enumerate(stats.prompt_mean):
        at = np.array([prompt])
        for tier in range(n_tiers):
            listed = interp_log(at, points, tables.prefill_saturated_ms[tier, reference])[0]
            alone[c, tier] = interp_log(at, points, tables.prefill_ms[tier])[0] / listed
            # Each iteration streams the weights once, as a decode of one request does.
            streaming = float(tables.decode_ms[tier, 0, 0, 0]) * prompt / chunk_tokens
            apart[c, tier] = (interp_log(at, points, tables.prefill_saturated_ms[tier, 0])[0] + streaming) / listed
            for b in range(n_batch):
                marginal[c, tier, b] = interp_log(at, points, tables.prefill_marginal_ms[tier, b])[0] / listed
                saturated[c, tier, b] = interp_log(at, points, tables.prefill_saturated_ms[tier, b])[0] / listed
    return alone, apart, marginal, saturated


@lru_cache(maxsize=64)
def params_of(task: TaskSpec, tables: ServingTables, price: float) -> ServingParams:
    """The fleet of a task on a table."""
    traffic = traffic_of(task, tables)
    return ServingParams(
        tables=tables,
        stats=traffic.stats,
        nominal_rate_rps=traffic.nominal_rate_rps,
        n_replicas=task.fleet.n_replicas,
        queue_limit=task.fleet.queue_limit,
        base_accept_rate=task.fleet.base_accept_rate,
        restart_s=task.fleet.restart_s,
        load_gb_per_s=task.fleet.load_gb_per_s,
        price=price,
    )


# ---------------------------------------------------------------- state

_ROW_INT: Final = ("time", "tier_to", "tier_from", "disagg_to", "disagg_from", "n_recorded")
_ROW_FLOAT: Final = (
    "converted",
    "last_gain",
    "recompute_ms",
    "overcommit",
    "prefill_load",
    "prefill_cap",
    "kv_pressure",
    "prefilling",
    "prompt_window_requests",
    "prompt_window_tokens",
    "rate_ema",
    "cost_so_far",
    "cached_tokens",
)
_CLASS_FLOAT: Final = (
    "queue",
    "in_flight",
    "prompt_in_flight",
    "position_in_flight",
    "written_tokens",
    "class_window",
    "work_ratio",
    "class_load",
)
_SCRATCH_ROW: Final = (
    "share_to",
    "restarted",
    "up",
    "next_gain",
    "iteration_ms",
    "resident",
    "kv_context",
    "prefill_apart",
    "kv_bound",
    "kv_pool_tokens",
    "late_requests",
    "judged_requests",
    "prefix_hit",
)
_SCRATCH_CLASS: Final = (
    "queue_before",
    "admit",
    "room",
    "after",
    "after_pos",
    "after_prompt",
    "head_prompt",
    "head_work_ms",
    "churned_prompts",
    "each_ms",
    "shift_ms",
    "rest_ms",
    "spread",
    "base_ms",
    "base_p99_ms",
)


@dataclass(eq=False)
class ServingState:
    """What a step changes, for B rows, C classes and T steps.

    ``rows`` maps a name to an array whose first axis is the row:

    - ``time`` steps taken; ``tier_to/from``, ``disagg_to/from`` and ``converted`` (share of replicas restarted so far)
      describe a rollout; ``age_head``, ``wait_head`` (B, C) are the oldest cohorts still running or waiting.
    - ``queue``, ``in_flight`` (B, C) requests; ``prompt_in_flight``, ``position_in_flight`` (B, C) their prompt and
      output tokens so far; ``written_tokens`` (B, C) what the cohorts from ``age_head`` on have written, their ended
      requests included; ``waiting`` (B, C, T) requests still waiting by second of arrival.
    - ``progress`` (B, T + 1) tokens that a request gained since the start; ``density`` (B, C, T) requests admitted per
      token of progress.
    - ``last_gain`` tokens per request in the last step, ``recompute_ms`` prefill owed to restarted replicas,
      ``overcommit`` share of requests beyond the KV pool, ``kv_pressure`` how much the pool bounded admission lately,
      ``prefill_cap`` share of time that prefill may take, ``prefilling`` requests that hold a slot and await their
      first token, ``class_load`` (B, C) smoothed prefill load, rolling statistics of the load, ``cost_so_far``.
    - ``cached_tokens`` written to the KV pools and neither overwritten nor lost in a restart; counted only for traffic
      that repeats prefixes.
    """

    rows: dict[str, NDArray[Any]]

    @classmethod
    def allocate(cls, n_rows: int, n_classes: int, n_steps: int) -> ServingState:
        """Zeroed state."""
        rows: dict[str, NDArray[Any]] = {name: np.zeros(n_rows, dtype=np.int64) for name in _ROW_INT}
        rows |= {name: np.zeros(n_rows) for name in _ROW_FLOAT}
        rows |= {name: np.zeros((n_rows, n_classes)) for name in _CLASS_FLOAT}
        rows["wait_head"] = np.zeros((n_rows, n_classes), dtype=np.int64)
        rows["waiting"] = np.zeros((n_rows, n_classes, n_steps))
        rows["age_head"] = np.zeros((n_rows, n_classes), dtype=np.int64)
        rows["density"] = np.zeros((n_rows, n_classes, n_steps))
        rows["progress"] = np.zeros((n_rows, n_steps + 1))
        return cls(rows)

    def copy_from(self, other: ServingState) -> None:
        """Overwrite this state with another of the same shape."""
        for name, array in self.rows.items():
            array[...] = other.rows[name]

    def copy(self) -> ServingState:
        """An independent copy."""
        return ServingState({name: array.copy() for name, array in self.rows.items()})


class ServingFleet:
    """B fleets stepping together.

    Knobs are the writable arrays ``kv_budget``, ``batch_size`` (float) and ``spec_index``, ``disagg``, ``tier`` (int),
    all (B,). Results are the rows of ``metrics`` (len(METRICS), B), also by name in ``metric``.
    """

    def __init__(
        self, params: ServingParams, n_rows: int, n_steps: int, n_loads: int | None = None, record: int = 0
    ) -> None:
        self.params = params
        self.n_rows = n_rows
        self.n_steps = n_steps
        n_loads = n_rows if n_loads is None else n_loads
        c = params.n_classes
        self.state = ServingState.allocate(n_rows, c, n_steps)
        self.arrivals = np.zeros((n_loads, n_steps, c))
        self.prompt_tokens = np.zeros((n_loads, n_steps, c))
        self.prefill_work_ms = np.zeros((n_loads, n_steps, c, 3))
        # Without reuse the kernel never looks at it.
        self.saved_work_ms = np.zeros((n_loads, n_steps, c, 3) if params.stats.reuse_hit is not None else (1, 1, 1, 1))
        self.noise = np.ones((n_loads, n_steps, 2))
        self.phase = np.zeros((n_loads, n_steps), dtype=np.int64)
        self.load_index: IntArray = np.arange(n_rows, dtype=np.int64) % n_loads
        self.kv_budget = np.ones(n_rows)
        self.batch_size = np.full(n_rows, 32.0)
        self.spec_index = np.zeros(n_rows, dtype=np.int64)
        self.disagg = np.zeros(n_rows, dtype=np.int64)
        self.tier = np.zeros(n_rows, dtype=np.int64)
        self.metrics = np.zeros((len(METRICS), n_rows))
        self.metric: Mapping[str, FloatArray] = {name: self.metrics[i] for i, name in enumerate(METRICS)}
        self.record = np.zeros((n_rows, max(record, 1), 7))
        self.reset_rows(range(n_rows))
        self._kernel = ServingKernel({**params.constants, "record_rows": record}, self._arrays())

    def _arrays(self) -> dict[str, NDArray[Any]]:
        scratch: dict[str, NDArray[Any]] = {name: np.zeros(self.n_rows) for name in _SCRATCH_ROW}
        scratch |= {name: np.zeros((self.n_rows, self.params.n_classes)) for name in _SCRATCH_CLASS}
        scratch["survive"] = np.zeros((self.n_rows, self.params.n_classes, 2))
        scratch["edge_at"] = np.zeros((self.n_rows, self.n_steps + 1), dtype=np.intc)
        scratch["edge_part"] = np.zeros((self.n_rows, self.n_steps + 1))
        scratch["segments"] = np.zeros((self.n_rows, MAX_SEGMENTS, 5))
        for name in ("n_segments", "iteration_cell", "context_cell", "batch_cell"):
            scratch[name] = np.zeros(self.n_rows, dtype=np.int64)
        self.scratch = scratch
        return {
            **self.state.rows,
            **scratch,
            **self.metric,
            "arrivals": self.arrivals,
            "prompt_tokens": self.prompt_tokens,
            "prefill_work_ms": self.prefill_work_ms,
            "saved_work_ms": self.saved_work_ms,
            "noise": self.noise,
            "load_index": self.load_index,
            "kv_budget": self.kv_budget,
            "batch_size": self.batch_size,
            "spec": self.spec_index,
            "disagg": self.disagg,
            "tier": self.tier,
            "record": self.record,
        }

    def set_load(self, index: int | Sequence[int], load: Workload) -> None:
        """Give load ``index`` a workload (at least ``n_steps`` long), or several loads those of a stacked one."""
        n = self.n_steps
        self.arrivals[index] = load.arrivals[..., :n, :]
        self.prompt_tokens[index] = load.prompt_tokens[..., :n, :]
        self.prefill_work_ms[index] = load.prefill_work_ms[..., :n, :, :]
        if self.params.stats.reuse_hit is not None:
            self.saved_work_ms[index] = 0.0 if load.saved_work_ms is None else load.saved_work_ms[..., :n, :, :]
        self.noise[index] = load.noise[..., :n, :]
        self.phase[index] = load.phase[..., :n]

    def reset_rows(self, rows: Iterable[int]) -> None:
        """Empty these fleets: nothing queued, nothing running, time 0."""
        index = np.fromiter(rows, dtype=np.int64)
        for array in self.state.rows.values():
            array[index] = 0
        self.state.rows["converted"][index] = 1.0
        self.state.rows["rate_ema"][index] = self.params.nominal_rate_rps
        self.state.rows["work_ratio"][index] = 1.0
        self.state.rows["prefill_cap"][index] = 0.85

    def step(self, lo: int = 0, hi: int | None = None) -> None:
        """Serve one step in rows ``lo`` to ``hi``; every row must have steps left."""
        self._kernel.step(lo, self.n_rows if hi is None else hi)

    def snapshot(self, row: int = 0) -> MetricsSnapshot:
        """The last step's metrics of one row."""
        ttft_p50, ttft_p99, tpot, tps, memory, cost, accept, evicted, late, oom = self.metrics[:10, row].tolist()
        return MetricsSnapshot(
            ttft_p50, ttft_p99, tpot, tps, memory, cost, accept, round(evicted), round(late), oom > 0.0
        )


SPEC_INDEX: Final = {k: i for i, k in enumerate(SPEC_LENGTHS)}
