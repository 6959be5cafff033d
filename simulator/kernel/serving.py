"""A fleet of identical replicas behind one queue, B independent fleets (rows) at once.

:class:`ServingParams` holds the constants of an episode, :class:`ServingState` the state that steps change, and
:class:`simulator.kernel.step.ServingKernel` the dynamics. :class:`ServingFleet` ties the three together: write the
knobs, call :meth:`ServingFleet.step`, read the metrics.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from inferencegym.models import NAIVE_ACTION, PRIORITY_CLASSES
from inferencegym.tasks import AcceptanceStage, TaskSpec
from simulator.hardware.tables import FloatArray, ServingTables
from simulator.kernel.arrays import KNOBS, LOAD, METRICS, STATE, allocate
from simulator.kernel.class_tables import block_tables, gini, length_integrals, prefill_ratios
from simulator.kernel.step import Params, Scratch, ServingKernel
from simulator.load.source import (
    CLASS_WINDOW_STEPS,
    EMA_WEIGHT,
    PROMPT_WINDOW_STEPS,
    REUSE_LOG2_FIRST,
    ClassStats,
    Workload,
)
from simulator.workload import load_source

IntArray = NDArray[np.int64]

GRID_CELLS: Final = 512
"""Cells of the survival integrals between position 0 and the longest output. Chosen: 2 tokens wide for 1,000 tokens."""
MAX_PIECES: Final = 48
"""Most pieces of one step's waits; further ones are merged into the last. Chosen: there is a piece for each step of
arrival and class, and a step's admissions seldom need more."""
MEASURED_ACCEPT_RATE: Final = 0.65
"""Base acceptance rate that corresponds to the measured tokens per verification step. Specification, medium task."""


@dataclass(frozen=True, slots=True)
class EngineParams:
    """Behaviour of the modelled engine apart from its operator times.

    It behaves like vLLM with ``--scheduling-policy priority``: the request of the lowest class that was admitted last
    is preempted first. A replica that restarts drops its requests at once, and other replicas recompute them.
    """

    disagg_limit: float = 0.98
    """Largest share of a prefill GPU's time that prefill may take. Chosen: the GPU does nothing else."""
    churn_factor: float = 0.65
    """Output tokens recomputed per output token of a request that is admitted into a full KV pool. Measured: fitted to
    the discrete-event reference on constant pools of 0.2 to 0.8 of tasks 1 and 2."""
    load_weight: float = 0.3
    """Weight of the newest step in the prefill load that decides how long prompts queue. Chosen: about 3 s of memory in
    steps of 1 s."""
    block_slack_tokens: float = 8.0
    """KV tokens that a request holds beyond its context: half a block of 16 (vLLM's default block_size).

    Measured engines have their own block size (:func:`simulator.kernel.class_tables.block_tables`).
    """
    link_bytes_per_s: float = 25e9
    """Link over which a prefill GPU sends the KV cache to its replica: one port of 200 Gbit/s."""
    jitter: float = 0.05
    """Standard deviation of TTFT apart from queueing and prompts, relative to its mean. Chosen: timers, scheduling."""


@dataclass(frozen=True, slots=True)
class MetricConventions:
    """Conventions of metrics that do not follow from the engine; the discrete-event reference uses the same."""

    oom_slowdown: float = 2.0
    """Factor on TPOT out of memory. Specification: throughput halves."""
    oom_penalty: float = 5.0
    """Factor on SLO violations out of memory. Specification."""
    max_tpot_steps: float = 10.0
    """Largest TPOT reported, in steps. Chosen: a fleet that is down has no TPOT, and observations must be finite."""
    min_billed_ktokens_per_s: float = 0.05
    """Smallest throughput (ktokens/s) in the cost per token. Chosen: keeps the cost of an idle fleet finite."""


CONVENTIONS: Final = MetricConventions()


@dataclass(frozen=True, eq=False)
class ServingParams:
    """Constants of a fleet during an episode."""

    tables: ServingTables
    stats: ClassStats
    nominal_rate_rps: float
    n_replicas: int
    queue_limit: float
    base_accept_rate: float
    restart_s: float
    load_gb_per_s: float
    start_s: float = 0.0
    """Seconds that a new replica needs in addition to loading its weights."""
    max_replicas: int | None = None
    """Most replicas that an action may request; None: there are always ``n_replicas``."""
    price: float = 1.0
    step_s: float = 1.0
    acceptance: tuple[AcceptanceStage, ...] = ()
    """The task's own acceptance of drafts, which replaces the measured one; its rates are those of the classes that
    occur."""
    closed_clients: int = 0
    """Clients of a closed loop; 0: requests arrive as the workload says. A closed loop's waits are counted from the
    start of the run: :func:`simulator.whatif.serve_requests` knows when each request was sent."""
    engine: EngineParams = EngineParams()

    @property
    def n_classes(self) -> int:
        """Classes that occur."""
        return len(self.stats.names)

    def acceptance_of(self, arrival_s: FloatArray, class_index: IntArray) -> FloatArray | None:
        """The task's own acceptance (N,) of requests by arrival and class; None if drafts are accepted as measured."""
        if not self.acceptance:
            return None
        first_s = self.step_s * np.array([stage.from_step for stage in self.acceptance])
        stage = np.searchsorted(first_s, arrival_s, side="right") - 1
        rates: FloatArray = np.array([stage.rates for stage in self.acceptance])
        return rates[stage, class_index]

    @cached_property
    def constants(self) -> dict[str, Any]:
        """Numbers and tables of the kernel's ``Params``, computed once."""
        memory = {**self._memory(), **self._blocks()}
        return {**self._fleet(), **memory, **self._engine(), **self._operators(), **_class_tables(self)}

    def _fleet(self) -> dict[str, float]:
        return {
            "n_classes": self.n_classes,
            "max_pieces": MAX_PIECES,
            "class_window_steps": CLASS_WINDOW_STEPS,
            "prompt_window_steps": PROMPT_WINDOW_STEPS,
            "ema_weight": EMA_WEIGHT,
            "scales": int(self.max_replicas is not None),
            "dt_s": self.step_s,
            "dt_ms": 1000.0 * self.step_s,
            "queue_limit": float(self.queue_limit),
            "closed_clients": float(self.closed_clients),
            "price": self.price * self.tables.cards_per_replica,
        }

    def _memory(self) -> dict[str, Any]:
        meta, weights_gb = self.tables.meta, self.tables.weights_gb
        memory = meta["memory_gb"]
        return {
            "memory_gb": float(meta["memory_budget_gb"]),
            "memory_limit_gb": float(meta["memory_limit_gb"]),
            "weights_gb": weights_gb,
            "activation_gb": float(memory["activations_gb"]),
            "workspace_gb": float(memory["workspace_gb"]),
            "sequence_gb": float(memory["per_sequence_gb"]),
            "draft_gb": float(memory["speculation_gb"]),
            "kv_bytes_per_token": float(meta["kv_bytes_per_token"]),
            "reload_s": self.restart_s + weights_gb / self.load_gb_per_s,
            "start_s": self.start_s + weights_gb / self.load_gb_per_s,
        }

    def _blocks(self) -> dict[str, Any]:
        """Block space of requests: half a block each, or computed from a measured engine's block size."""
        block_tokens = self.tables.block_tokens
        if block_tokens is None:
            slack_tokens, growth = np.full(self.n_classes, self.engine.block_slack_tokens), np.ones(self.n_classes)
        else:
            slack_tokens, growth = block_tables(self.stats, block_tokens)
        return {
            "block_slack_tokens": slack_tokens,
            "block_growth": growth,
            "occupancy_in_blocks": block_tokens is not None,
        }

    def _engine(self) -> dict[str, float | bool]:
        meta, engine = self.tables.meta, self.engine
        return {
            "ttft_offset_ms": float(meta["tau_ms"]),
            "prefill_first": meta["scheduler"] == "prefill_first",
            # Tables of engines that send outputs at once do not have it.
            "output_delay": float(meta.get("output_delay", 0.0)),
            "token_budget": float(meta["max_batched_tokens"]),
            "disagg_limit": engine.disagg_limit,
            "churn_factor": engine.churn_factor,
            "load_weight": engine.load_weight,
            "handoff_ms_per_token": float(meta["kv_bytes_per_token"]) / engine.link_bytes_per_s * 1e3,
            "jitter": engine.jitter,
            **asdict(CONVENTIONS),
        }

    def _operators(self) -> dict[str, Any]:
        tables = self.tables
        return {
            "n_batch_points": len(tables.axes["batch_size"]),
            "n_iteration_points": len(tables.iteration_batches),
            "n_context_points": len(tables.axes["prompt_len_bucket"]),
            "batch_points": tables.axes["batch_size"].copy(),
            "iteration_points": tables.iteration_batches,
            "context_points": tables.axes["prompt_len_bucket"].copy(),
            "decode_ms": tables.iteration_ms,
            "spec_tokens": tables.spec_tokens,
            "spec_length": tables.axes["spec_length"].copy(),
            "acceptance_stages": len(self.acceptance),
            "acceptance_from": np.array([stage.from_step for stage in self.acceptance], dtype=np.int64),
            "acceptance": np.array([stage.rates for stage in self.acceptance]).reshape(-1, self.n_classes),
        }


def _class_tables(params: ServingParams) -> dict[str, Any]:
    """Per-class tables: objectives, prefill ratios, survival of output lengths; the traffic's prefix reuse."""
    stats = params.stats
    longest = stats.output_cdf_tokens.max(axis=1)
    cells_per_token = GRID_CELLS / (float(longest.max()) + 1.0)
    ratios = prefill_ratios(stats, params.tables)
    return {
        "slo_ms": stats.slo_ms,
        "mean_prompt_tokens": stats.prompt_mean,
        "mean_work_ms": stats.work_mean_ms,
        "work_cv2": stats.work_cv2,
        "alone_ratio": ratios.alone,
        "dedicated_ratio": ratios.dedicated,
        "fused_ratio": ratios.fused,
        "saturated_ratio": ratios.saturated,
        "accept_scale": params.base_accept_rate / MEASURED_ACCEPT_RATE * (1.0 - stats.complexity_penalty),
        "grid_cells": GRID_CELLS,
        "cells_per_token": cells_per_token,
        "length_integrals": length_integrals(stats.output_cdf_tokens, GRID_CELLS).reshape(len(longest), -1),
        # A class's integrals are constant beyond the cell that holds its longest output.
        "longest_output": longest + (longest.max() + 1.0) / GRID_CELLS,
        "output_gini": gini(stats.output_cdf_tokens),
        "reuse_log2_first": REUSE_LOG2_FIRST,
        "reuse_points": 0 if stats.reuse_hit is None else len(stats.reuse_hit),
        "reuse_hit": np.zeros(1) if stats.reuse_hit is None else stats.reuse_hit,
    }


@lru_cache(maxsize=64)
def params_of(task: TaskSpec, tables: ServingTables, price: float) -> ServingParams:
    """The fleet of a task on a table."""
    source = load_source(task, tables)
    return ServingParams(
        tables=tables,
        stats=source.stats,
        nominal_rate_rps=source.nominal_rate_rps,
        n_replicas=task.fleet.n_replicas,
        queue_limit=task.fleet.queue_limit,
        base_accept_rate=task.fleet.base_accept_rate,
        restart_s=task.fleet.restart_s,
        load_gb_per_s=task.fleet.load_gb_per_s,
        start_s=task.fleet.start_s,
        max_replicas=task.fleet.max_replicas,
        price=price,
        acceptance=tuple(_of_classes(stage, source.stats.names) for stage in task.draft_acceptance),
    )


def _of_classes(stage: AcceptanceStage, names: Sequence[str]) -> AcceptanceStage:
    return replace(stage, rates=tuple(stage.rates[PRIORITY_CLASSES.index(name)] for name in names))


@lru_cache(maxsize=64)
def _kernel_params(params: ServingParams, record: int) -> Params:
    """The kernel's constants, which all fleets with these parameters share."""
    return Params({**params.constants, "record_rows": record})


@lru_cache(maxsize=16)
def _idle_scratch(n_classes: int, n_steps: int) -> list[Scratch]:
    """Scratch of the kernels with so many classes and steps."""
    return []


# ---------------------------------------------------------------- state and steps


@dataclass(eq=False)
class ServingState:
    """State arrays by name, row first: everything that a step changes (:data:`simulator.kernel.arrays.STATE`)."""

    rows: dict[str, NDArray[Any]]

    def start(self, rows: Iterable[int], params: ServingParams) -> None:
        """Empty these fleets: nothing queued, nothing running, time 0."""
        # A slice takes half the time of an index.
        index = slice(rows.start, rows.stop, rows.step) if isinstance(rows, range) else np.fromiter(rows, np.int64)
        for name, array in self.rows.items():
            if name != "record":  # its entries from n_recorded on are never read
                array[index] = 0
        self.rows["rollout_share"][index] = 1.0
        self.rows["replicas_ready"][index] = params.n_replicas
        self.rows["rate_ema"][index] = params.nominal_rate_rps


class ServingFleet:
    """B fleets stepping together.

    Knobs are the writable arrays ``kv_budget``, ``batch_size`` (float) and ``spec_index``, ``disagg``, ``tier`` (int),
    all (B,). Results are the rows of ``metrics`` (len(METRICS), B), also by name in ``metric``. Each row records its
    first ``record`` admissions in ``record`` (B, R, 7). All arrays are documented in :mod:`simulator.kernel.arrays`.
    """

    def __init__(
        self, params: ServingParams, n_rows: int, n_steps: int, n_loads: int | None = None, record: int = 0
    ) -> None:
        self.params = params
        self.n_rows = n_rows
        self.n_steps = n_steps
        sizes = {
            "B": n_rows,
            "L": n_rows if n_loads is None else n_loads,
            "C": params.n_classes,
            "T": n_steps,
            "E": n_steps + 1,
            "K": MAX_PIECES,
            "R": max(record, 1),
        }
        self._load = allocate(LOAD, sizes)
        self._load["index"][:] = np.arange(n_rows) % sizes["L"]
        if params.stats.reuse_hit is None:
            self._load["saved_work_ms"] = np.zeros((1, 1, 1, 1))  # the kernel does not read it
        self.arrivals: FloatArray = self._load["arrivals"]
        self.noise: FloatArray = self._load["noise"]
        self.noise[:] = 1.0
        self.phase = np.zeros((sizes["L"], n_steps), dtype=np.int64)
        knobs = allocate(KNOBS, sizes)
        self.kv_budget: FloatArray = knobs["kv_budget"]
        self.batch_size: FloatArray = knobs["batch_size"]
        self.spec_index: IntArray = knobs["spec"]
        self.kv_budget[:] = NAIVE_ACTION.kv_budget
        self.batch_size[:] = NAIVE_ACTION.batch_size
        self.disagg: IntArray = knobs["disagg"]
        self.tier: IntArray = knobs["tier"]
        self.replicas: FloatArray = knobs["replicas"]
        self.replicas[:] = params.n_replicas
        self.state = ServingState(allocate(STATE, sizes))
        self.record: FloatArray = self.state.rows["record"]
        self.metrics = np.zeros((len(METRICS), n_rows))
        self.metric: Mapping[str, FloatArray] = {name: self.metrics[i] for i, name in enumerate(METRICS)}
        self.reset_rows(range(n_rows))
        constants, idle = _kernel_params(params, record), _idle_scratch(sizes["C"], n_steps)
        self._kernel = ServingKernel(constants, self._load, knobs, self.state.rows, self.metric, sizes, idle)

    def set_load(self, index: int | Sequence[int], load: Workload) -> None:
        """Set load ``index`` to a workload (at least ``n_steps`` long), or several loads to a stacked workload."""
        n = self.n_steps
        self.arrivals[index] = load.arrivals[..., :n, :]
        self._load["prompt_tokens"][index] = load.prompt_tokens[..., :n, :]
        self._load["prefill_work_ms"][index] = load.prefill_work_ms[..., :n, :, :]
        if self.params.stats.reuse_hit is not None:
            saved = 0.0 if load.saved_work_ms is None else load.saved_work_ms[..., :n, :, :]
            self._load["saved_work_ms"][index] = saved
        self.noise[index] = load.noise[..., :n, :]
        self.phase[index] = load.phase[..., :n]

    def reset_rows(self, rows: Iterable[int]) -> None:
        """Empty these fleets: nothing queued, nothing running, time 0."""
        self.state.start(rows, self.params)

    def step(self, lo: int = 0, hi: int | None = None) -> None:
        """Serve one step in rows ``lo`` to ``hi``; every row must have steps left."""
        self._kernel.step(lo, self.n_rows if hi is None else hi)
