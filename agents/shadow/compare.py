"""Shadow mode: each policy on a recorded log, compared with a fixed configuration.

The log is replayed once from its first second, the same for every policy; nothing is drawn. Requests enter as recorded,
the fleet is simulated: docs/fidelity.md says how far that is from hardware.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from agents.policies.constant import ConstantAgent
from agents.protocol import Agent, FloatArray
from agents.registry import make_agent
from agents.search.trace_task import DEFAULT_SLO_MS, fleet_for, log_summary
from env.batch import ServingBatch
from inferencegym.errors import DataFormatError, refusal
from inferencegym.models import ACTION_FIELDS, NAIVE_ACTION, ServeAction
from inferencegym.spaces.actions import snap
from inferencegym.task_registry import MAX_EPISODE_LENGTH
from inferencegym.tasks import Calibration, TaskSpec, parse_task
from simulator.coverage import LEVELS, fleet_support
from simulator.recorded import save_trace
from simulator.requests import RequestLog
from simulator.tables import ServingTables, load_tables
from simulator.whatif import ttft_samples

DRAIN_S: Final = 60
"""Seconds after the last arrival in which what is left may be served."""
MAX_SPAN_S: Final = MAX_EPISODE_LENGTH - DRAIN_S
FIXED: Final = "fixed"
"""Name of the fixed configuration in a report."""
TIMELINE_POINTS: Final = 600
_SIGNALS: Final = ("queue_requests", "running_requests", "ttft_p50_ms", "ttft_p99_ms", "tokens_per_sec", "kv_occupancy")
_BIN_EDGES: Final = np.exp(np.linspace(0.0, math.log(1e7), 4001))
"""Edges (ms) of the histogram that TTFT percentiles are read from: 0.4 % apart."""
_RECORDS_AT_ONCE: Final = 400
PIECES_PER_STEP: Final = 6
"""Pieces of the wait distribution per step: each of three classes ends a second's arrivals and starts on the next."""


@dataclass(frozen=True, slots=True)
class PolicyOutcome:
    """Outcome of one policy on a log.

    Latencies in ms per request (TTFT) and per token (TPOT, weighted by tokens). ``slo_miss_share`` counts requests that
    missed their objective, were refused or were not served by the end; ``goodput_rps`` is the rest per second of the
    log. ``cost`` is the sum of cost per 1,000 tokens over the seconds, in units in which the fixed configuration
    spends 5. ``timeline`` holds signals and knobs at ``t_s``, thinned to a few hundred points; ``support`` the share of
    seconds by how well measurements cover them.
    """

    policy: str
    slo_miss_share: float
    goodput_rps: float
    ttft_p50_ms: float
    ttft_p90_ms: float
    ttft_p99_ms: float
    tpot_mean_ms: float
    tokens_per_s: float
    completed: float
    rejected: float
    unserved: float
    gpu_seconds: float
    gpu_s_per_1k_tokens: float
    cost: float
    restarts: int
    oom_seconds: int
    preemptions: float
    peak_memory_gb: float
    slo_miss_by_class: dict[str, float]
    support: dict[str, float]
    timeline: dict[str, list[float]] = field(repr=False)


@dataclass(frozen=True, slots=True)
class ShadowReport:
    """Outcomes of all policies on one log, the fixed configuration first."""

    log: dict[str, Any]
    n_replicas: int
    slo_ms: float
    table_sha256: str
    hardware: str
    fixed_action: dict[str, Any]
    outcomes: list[PolicyOutcome]
    arrivals_per_s: list[float] = field(repr=False)

    def best(self) -> PolicyOutcome:
        """Fewest requests beyond the objective; among those within a tenth of a percent, the cheapest."""
        fewest = min(o.slo_miss_share for o in self.outcomes)
        return min((o for o in self.outcomes if o.slo_miss_share <= fewest + 1e-3), key=lambda o: o.gpu_s_per_1k_tokens)

    def to_dict(self) -> dict[str, Any]:
        """JSON form; ``best`` names the policy of :meth:`best`."""
        return {**asdict(self), "best": self.best().policy}


def shadow(
    log: RequestLog,
    agents: Sequence[str | Agent],
    *,
    fixed: ServeAction = NAIVE_ACTION,
    n_replicas: int | None = None,
    slo_ms: float | None = None,
    task: TaskSpec | None = None,
    tables: ServingTables | None = None,
) -> ShadowReport:
    """Replay a log under a fixed configuration and under each agent.

    ``agents`` are registered names (``heuristic``, ``constant:{...}``) or agents. ``task`` lends fleet, objectives and
    stored policies of a task that was made of such traffic; without it the fleet is sized to the log unless
    ``n_replicas`` says otherwise, and the objective is 500 ms for all classes. Raises :class:`DataFormatError` if the
    log lasts longer than an episode may, and whatever making an agent raises.
    """
    fixed.validate()
    span_s = math.ceil(float(log.arrival_s[-1]) + 1e-9)
    if span_s > MAX_SPAN_S:
        raise DataFormatError(
            f"the log lasts {span_s} s and a replay {MAX_SPAN_S} s at most: choose a part of it (--from-s, --to-s)"
        )
    tables = tables or load_tables()
    with tempfile.TemporaryDirectory(prefix="inferencegym-shadow-") as folder:
        trace = save_trace(Path(folder) / "log.npz", log, {"once": True})
        as_task = _task(log, trace, span_s + DRAIN_S, n_replicas, slo_ms, task)
        reference = _run_policy(FIXED, ConstantAgent(fixed), as_task, tables, _NEUTRAL)
        # Prices and peaks as the fixed configuration sets them: what learned policies see is scaled as in training.
        calibration = Calibration(
            0.0, reference.best_tps, reference.best_tps, as_task.cost_budget / reference.outcome.cost
        )
        players = [(FIXED, ConstantAgent(fixed)), *((_name(a), _agent(a, as_task)) for a in agents)]
        runs = [_run_policy(name, agent, as_task, tables, calibration) for name, agent in players]
    return ShadowReport(
        log=log_summary(log),
        n_replicas=as_task.fleet.n_replicas,
        slo_ms=as_task.slo_target_ms,
        table_sha256=tables.sha256,
        hardware=str(tables.meta["hardware"]),
        fixed_action=fixed.to_dict(),
        outcomes=[run.outcome for run in runs],
        arrivals_per_s=_thinned(runs[0].arrivals).tolist(),
    )


_NEUTRAL: Final = Calibration(0.0, 1.0, 1.0, 1.0)


def _task(
    log: RequestLog, trace: Path, n_steps: int, n_replicas: int | None, slo_ms: float | None, like: TaskSpec | None
) -> TaskSpec:
    """The log as a task."""
    entry: dict[str, Any] = {
        "name": "Shadow",
        "trace": trace.name,
        "slo_target_ms": DEFAULT_SLO_MS if slo_ms is None else slo_ms,
        "arrival_rate_rps": max(0.01, log_summary(log)["rate_rps"]),
        "n_replicas": 1 if n_replicas is None else n_replicas,
    }
    task = parse_task("shadow", entry, base=trace.parent)
    if like is not None:
        task = replace(like, trace=task.trace, arrival_rate_rps=task.arrival_rate_rps, burst=None, recorded=True)
        if slo_ms is not None:
            classes = tuple(replace(c, slo_ms=slo_ms) for c in task.classes)
            task = replace(task, slo_target_ms=slo_ms, classes=classes)
    elif n_replicas is None:
        n_replicas = fleet_for(task)
    if n_replicas is not None:
        if n_replicas < 1:
            raise refusal("n_replicas", n_replicas, "at least 1")
        task = replace(task, fleet=replace(task.fleet, n_replicas=n_replicas))
    return replace(task, episode_length=n_steps)


def _agent(agent: str | Agent, task: TaskSpec) -> Agent:
    return make_agent(agent, task) if isinstance(agent, str) else agent


def _name(agent: str | Agent) -> str:
    return agent if isinstance(agent, str) else type(agent).__name__


# ---------------------------------------------------------------- one policy


@dataclass(frozen=True, slots=True)
class _Run:
    """Run of one policy: the outcome, requests that arrived per second, and the highest throughput of a second."""

    outcome: PolicyOutcome
    arrivals: FloatArray
    best_tps: float


def _run_policy(name: str, agent: Agent, task: TaskSpec, tables: ServingTables, calibration: Calibration) -> _Run:
    n_steps = task.episode_length
    batch = ServingBatch(task, 1, None, tables, calibration, record=PIECES_PER_STEP * n_steps)
    observation = batch.reset([0])
    agent.reset(1)
    metrics = {m: np.zeros(n_steps) for m in batch.metric}
    actions = np.zeros((n_steps, len(ACTION_FIELDS)))
    levels = dict.fromkeys(LEVELS, 0)
    for t in range(n_steps):
        applied = snap(agent.act(observation), batch.mask)
        actions[t] = applied[0]
        observation = batch.step(applied)
        for m, column in metrics.items():
            column[t] = batch.metric[m][0]
        levels[fleet_support(batch.fleet)] += 1
    arrivals = batch.fleet.arrivals[0].sum(axis=1)
    outcome = _outcome(name, batch, metrics, actions, levels)
    return _Run(outcome, arrivals, float(metrics["tokens_per_sec"].max()))


def _outcome(
    name: str, batch: ServingBatch, metrics: dict[str, FloatArray], actions: FloatArray, levels: dict[str, int]
) -> PolicyOutcome:
    fleet, task = batch.fleet, batch.task
    arrived = fleet.arrivals[0].sum(axis=0)
    record = fleet.record[0, : int(fleet.state.rows["n_recorded"][0])]
    slo_ms = fleet.params.stats.slo_ms
    histogram, in_time = _latencies(record, slo_ms)
    tokens = float(metrics["tokens_per_sec"].sum())
    gpu_seconds = task.fleet.n_replicas * float((1.0 + actions[:, 3]).sum())
    span_s = max(1.0, float(len(metrics["admitted"]) - DRAIN_S))
    missed = 1.0 - in_time / np.maximum(arrived, 1e-9)
    running = np.maximum(metrics["running_requests"], 1e-9)
    restarts = np.any(np.diff(actions[:, 3:5], axis=0) != 0, axis=1)
    return PolicyOutcome(
        policy=name,
        slo_miss_share=float(min(1.0, max(0.0, 1.0 - in_time.sum() / arrived.sum()))),
        goodput_rps=float(in_time.sum() / span_s),
        ttft_p50_ms=_quantile(histogram, 0.50),
        ttft_p90_ms=_quantile(histogram, 0.90),
        ttft_p99_ms=_quantile(histogram, 0.99),
        tpot_mean_ms=float((metrics["tpot_ms"] * metrics["tokens_per_sec"]).sum() / max(tokens, 1e-9)),
        tokens_per_s=tokens / span_s,
        completed=float(metrics["completed"].sum()),
        rejected=float(metrics["rejected"].sum()),
        unserved=float(fleet.state.rows["queue"][0].sum() + fleet.state.rows["in_flight"][0].sum()),
        gpu_seconds=gpu_seconds,
        gpu_s_per_1k_tokens=1000.0 * gpu_seconds / max(tokens, 1e-9),
        cost=float(metrics["cost_per_1k"].sum()),
        restarts=int(restarts.sum()),
        oom_seconds=int((metrics["oom"] > 0).sum()),
        preemptions=float(metrics["eviction_events"].sum()),
        peak_memory_gb=float(metrics["gpu_memory_gb"].max()),
        slo_miss_by_class={
            c: float(min(1.0, max(0.0, m))) for c, m in zip(fleet.params.stats.names, missed, strict=True)
        },
        support={level: n / len(running) for level, n in levels.items()},
        timeline=_timeline(metrics, actions),
    )


def _latencies(record: FloatArray, slo_ms: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Histogram of all TTFT over ``_BIN_EDGES``, and requests within their objective by class (C,)."""
    histogram = np.zeros(len(_BIN_EDGES) + 1)
    in_time = np.zeros(len(slo_ms))
    for c, limit in enumerate(slo_ms):
        mine = record[record[:, 0] == c]
        for start in range(0, len(mine), _RECORDS_AT_ONCE):
            values, weights = ttft_samples(mine[start : start + _RECORDS_AT_ONCE])
            at = np.searchsorted(_BIN_EDGES, values)
            histogram += np.bincount(at, weights=weights, minlength=len(histogram))
            in_time[c] += float(weights[values <= limit].sum())
    return histogram, in_time


def _quantile(histogram: FloatArray, q: float) -> float:
    """The latency (ms) below which a share ``q`` lies."""
    below = np.cumsum(histogram)
    if below[-1] <= 0.0:
        return 0.0
    return float(_BIN_EDGES[min(int(np.searchsorted(below, q * below[-1])), len(_BIN_EDGES) - 1)])


def _timeline(metrics: dict[str, FloatArray], actions: FloatArray) -> dict[str, list[float]]:
    every = _stride(len(actions))
    admitted = metrics["admitted"]
    line = {name: _thinned(metrics[name]).round(4).tolist() for name in _SIGNALS if not name.startswith("ttft")}
    for name in ("ttft_p50_ms", "ttft_p99_ms"):
        # Of the requests that came: a second without any says nothing about latency.
        total = _thinned(metrics[name] * (admitted > 1e-6))
        count = _thinned((admitted > 1e-6).astype(np.float64))
        line[name] = _held(np.where(count > 0.0, total / np.maximum(count, 1e-12), np.nan)).round(4).tolist()
    for i, knob in enumerate(ACTION_FIELDS):
        line[knob] = actions[::every, i].round(4).tolist()
    return {"t_s": [float(t) for t in range(0, len(actions), every)], **line}


def _held(values: FloatArray) -> FloatArray:
    """The values with gaps (NaN) filled by the last one before them, 0 at the start."""
    last = np.maximum.accumulate(np.where(np.isnan(values), -1, np.arange(len(values))))
    return np.where(last >= 0, values[np.maximum(last, 0)], 0.0)


def _stride(n: int) -> int:
    return max(1, math.ceil(n / TIMELINE_POINTS))


def _thinned(values: FloatArray) -> FloatArray:
    """Means over equal stretches, at most :data:`TIMELINE_POINTS` of them."""
    every = _stride(len(values))
    starts = np.arange(0, len(values), every)
    means: FloatArray = np.add.reduceat(values, starts) / np.diff(np.append(starts, len(values)))
    return means
