"""Shadow mode: each policy on a recorded log and equal GPUs, compared with constant settings.

The log is replayed once from its first second, the same for every policy; nothing is drawn. Requests enter as recorded,
the fleet is simulated: docs/fidelity.md says how far that is from hardware. Two constants are the baselines, the user's
own and the best of a sweep. A policy may use the GPUs as so many replicas, or, where it puts prefill on GPUs of its
own, as half as many replicas with twice the GPUs each; it gets what serves it better.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from agents.policies.constant import ConstantAgent
from agents.protocol import Agent, FloatArray
from agents.registry import make_agent
from agents.search.trace_task import DEFAULT_SLO_MS, fleet_for, log_summary
from agents.shadow.constants import NEUTRAL, grid, screen
from agents.shadow.prices import Prices
from env.batch import ServingBatch
from inferencegym.errors import DataFormatError, refusal
from inferencegym.models import ACTION_FIELDS, NAIVE_ACTION, ServeAction
from inferencegym.spaces.actions import snap
from inferencegym.task_registry import MAX_EPISODE_LENGTH
from inferencegym.tasks import Calibration, TaskSpec, parse_task
from simulator.catalogue import table_name
from simulator.coverage import LEVELS, fleet_support
from simulator.objectives import QUANTILES
from simulator.recorded import save_trace
from simulator.requests import RequestLog
from simulator.tables import ServingTables, tables_of
from simulator.whatif import ttft_samples, weighted_quantile

DRAIN_S: Final = 60
"""Seconds after the last arrival in which what is left may be served."""
MAX_SPAN_S: Final = MAX_EPISODE_LENGTH - DRAIN_S
FIXED: Final = "fixed"
"""Name of the user's own configuration in a report."""
CONSTANT: Final = "best_constant"
"""Name of the best constant setting that a sweep found."""
STATED_ERROR: Final = 0.04
"""Difference in shares of requests that the simulator may be wrong about: the largest difference of an agent's grade
from the discrete-event reference (docs/fidelity.md, "Policies")."""
FINALISTS: Final = 4
"""Constants of a sweep that are played with all latencies recorded."""
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
    log. ``n_gpus`` is the most GPUs in use, those of all cards of a replica; ``n_replicas`` how many replicas they
    were, ``gpu_seconds`` what was used of them. ``figures`` has all statistics that objectives bound
    (``simulator.objectives``), ``action`` the setting of a constant. ``timeline`` holds signals and knobs at ``t_s``,
    thinned to a few hundred points; ``support`` the share of seconds by how well measurements cover them.
    """

    policy: str
    n_gpus: int
    n_replicas: int
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
    restarts: int
    oom_seconds: int
    preemptions: float
    peak_memory_gb: float
    slo_miss_by_class: dict[str, float]
    support: dict[str, float]
    figures: dict[str, float]
    timeline: dict[str, list[float]] = field(repr=False)
    action: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ShadowReport:
    """Outcomes on one log and the same GPUs: the user's own configuration, the best constant, then the policies.

    ``gpu_hour`` is the price of a GPU's hour in ``currency``, None where no price was given.
    """

    log: dict[str, Any]
    n_gpus: int
    slo_ms: float
    table_sha256: str
    hardware: str
    fixed_action: dict[str, Any]
    outcomes: list[PolicyOutcome]
    arrivals_per_s: list[float] = field(repr=False)
    gpu_hour: float | None = None
    currency: str = ""

    def best(self) -> PolicyOutcome:
        """The recommended policy.

        One that misses fewer requests than the best constant does by more than :data:`STATED_ERROR`; else that constant
        if it is so much better than the user's own; else the user's own.
        """
        fixed, constant, *policies = self.outcomes
        adaptive = min(policies, key=lambda o: o.slo_miss_share, default=constant)
        if self.gain(adaptive, constant) > STATED_ERROR and self.gain(adaptive, fixed) > STATED_ERROR:
            return adaptive
        return constant if self.gain(constant, fixed) > STATED_ERROR else fixed

    @staticmethod
    def gain(outcome: PolicyOutcome, baseline: PolicyOutcome) -> float:
        """Share of the requests that ``outcome`` serves in time and ``baseline`` does not."""
        return baseline.slo_miss_share - outcome.slo_miss_share

    def cost(self, outcome: PolicyOutcome) -> float | None:
        """What the GPUs of an outcome cost, in the currency of the prices; None without a price."""
        return None if self.gpu_hour is None else outcome.gpu_seconds / 3600.0 * self.gpu_hour

    def to_dict(self) -> dict[str, Any]:
        """JSON form; ``best`` names the policy of :meth:`best`."""
        gains = {o.policy: self.gain(o, self.outcomes[1]) for o in self.outcomes}
        costs = {o.policy: self.cost(o) for o in self.outcomes}
        return {
            **asdict(self),
            "best": self.best().policy,
            "stated_error": STATED_ERROR,
            "gain_over_best_constant": gains,
            "cost": costs,
        }


def shadow(
    log: RequestLog,
    agents: Sequence[str | Agent],
    *,
    fixed: ServeAction = NAIVE_ACTION,
    n_gpus: int | None = None,
    slo_ms: float | None = None,
    task: TaskSpec | None = None,
    tables: ServingTables | None = None,
    prices: Prices | None = None,
) -> ShadowReport:
    """Replay a log under a fixed configuration, under the best constant of a sweep and under each agent.

    ``agents`` are registered names (``heuristic``, ``constant:{...}``) or agents. ``task`` lends fleet, objectives and
    stored policies of a task that was made of such traffic; without it the fleet is sized to the log unless ``n_gpus``
    says otherwise, and the objective is 500 ms for all classes. Raises :class:`DataFormatError` if the log lasts longer
    than an episode may, and whatever making an agent raises.
    """
    fixed.validate()
    tables = tables or tables_of(None if task is None else task.hardware)
    tables.refuse_tier(fixed.quant_tier.value)
    with log_task(log, slo_ms, task, tables) as as_task:
        if n_gpus is None:
            n_gpus = as_task.fleet.n_replicas * (2 if fixed.prefill_disagg else 1) * tables.cards_per_replica
        _check_gpus(n_gpus, fixed, tables.cards_per_replica)
        gpus = Field(as_task, tables, n_gpus)
        constant, action = gpus.best_constant()
        runs = [gpus.constant(FIXED, fixed), constant]
        # Prices and peaks as the fixed configuration sets them: what learned policies see is scaled as in training.
        best_tps = runs[0].best_tps
        scaled = Calibration(0.0, best_tps, best_tps, as_task.cost_budget / max(runs[0].cost, 1e-9))
        runs += [gpus.policy(_name(agent), agent, scaled) for agent in agents]
    outcomes = [run.outcome for run in runs]
    outcomes[0] = replace(outcomes[0], action=fixed.to_dict())
    outcomes[1] = replace(outcomes[1], action=action.to_dict())
    hardware = str(tables.meta["hardware"])
    return ShadowReport(
        log=log_summary(log),
        n_gpus=n_gpus,
        slo_ms=as_task.slo_target_ms,
        table_sha256=tables.sha256,
        hardware=hardware,
        fixed_action=fixed.to_dict(),
        outcomes=outcomes,
        arrivals_per_s=_thinned(runs[0].arrivals).tolist(),
        gpu_hour=None if prices is None else prices.gpu_hour(hardware),
        currency="" if prices is None else prices.currency,
    )


@contextmanager
def log_task(
    log: RequestLog, slo_ms: float | None, like: TaskSpec | None = None, tables: ServingTables | None = None
) -> Iterator[TaskSpec]:
    """The whole log as a task of one episode, with a fleet sized to it; the task holds within the block."""
    span_s = math.ceil(float(log.arrival_s[-1]) + 1e-9)
    if span_s > MAX_SPAN_S:
        raise DataFormatError(
            f"the log lasts {span_s} s and a replay {MAX_SPAN_S} s at most: choose a part of it (--from-s, --to-s)"
        )
    with tempfile.TemporaryDirectory(prefix="inferencegym-shadow-") as folder:
        trace = save_trace(Path(folder) / "log.npz", log, {"once": True})
        yield _task(log, trace, span_s + DRAIN_S, slo_ms, like, tables)


def on_replicas(task: TaskSpec, n_replicas: int) -> TaskSpec:
    """The task with another number of replicas."""
    return replace(task, fleet=replace(task.fleet, n_replicas=n_replicas))


def _check_gpus(n_gpus: int, fixed: ServeAction, cards_per_replica: int) -> None:
    each = cards_per_replica * (2 if fixed.prefill_disagg else 1)
    if n_gpus < 1 or n_gpus % each:
        why = " with prefill_disagg, which takes as many GPUs again" if fixed.prefill_disagg else ""
        raise refusal("n_gpus", n_gpus, f"a multiple of {each}, the GPUs of a replica{why}")


class Field:
    """A log on a number of GPUs, on which policies are played."""

    def __init__(self, task: TaskSpec, tables: ServingTables, n_gpus: int) -> None:
        self._tables = tables
        knobs = tuple(name for name in task.active_actions if name != "prefill_disagg")
        units = n_gpus // tables.cards_per_replica
        self._together = replace(on_replicas(task, units), active_actions=knobs)
        self._apart = on_replicas(task, units // 2) if units % 2 == 0 else None

    def constant(self, name: str, action: ServeAction) -> Run:
        """A constant setting."""
        task = self._apart if action.prefill_disagg else self._together
        assert task is not None
        return play_policy(name, ConstantAgent(action), task, self._tables, NEUTRAL)

    def best_constant(self) -> tuple[Run, ServeAction]:
        """The constant of a sweep that misses fewest requests; the finalists are played with their latencies."""
        found: list[tuple[float, ServeAction]] = []
        for task, apart in ((self._together, False), (self._apart, True)):
            if task is not None:
                settings = grid(apart, range(self._tables.n_tiers))
                shares = screen(task, self._tables, settings).missed
                found += zip(shares.tolist(), settings, strict=True)
        finalists = [action for _, action in sorted(found, key=lambda f: f[0])[:FINALISTS]]
        runs = [(self.constant(CONSTANT, action), action) for action in finalists]
        return min(runs, key=lambda r: (r[0].outcome.slo_miss_share, r[0].outcome.ttft_p99_ms))

    def policy(self, name: str, agent: str | Agent, calibration: Calibration) -> Run:
        """A policy with prefill together, and if it ever asks for it, with prefill apart on half as many replicas."""
        together = play_policy(name, _agent(agent, self._together), self._together, self._tables, calibration)
        if self._apart is None or not together.asked_apart:
            return together
        apart = play_policy(name, _agent(agent, self._apart), self._apart, self._tables, calibration)
        return min(together, apart, key=lambda run: run.outcome.slo_miss_share)


def _task(
    log: RequestLog,
    trace: Path,
    n_steps: int,
    slo_ms: float | None,
    like: TaskSpec | None,
    tables: ServingTables | None,
) -> TaskSpec:
    """The log as a task."""
    entry: dict[str, Any] = {
        "name": "Shadow",
        "trace": trace.name,
        "slo_target_ms": DEFAULT_SLO_MS if slo_ms is None else slo_ms,
        "arrival_rate_rps": max(0.01, log_summary(log)["rate_rps"]),
        "n_replicas": 1,
    }
    task = parse_task("shadow", entry, base=trace.parent)
    if like is not None:
        task = replace(like, trace=task.trace, arrival_rate_rps=task.arrival_rate_rps, burst=None, recorded=True)
        if slo_ms is not None:
            classes = tuple(replace(c, slo_ms=slo_ms) for c in task.classes)
            task = replace(task, slo_target_ms=slo_ms, classes=classes)
    else:
        task = on_replicas(task, fleet_for(task, tables))
    # Policies that plan do so on the table that they play on.
    return replace(task, episode_length=n_steps, hardware=None if tables is None else table_name(tables.sha256))


def _agent(agent: str | Agent, task: TaskSpec) -> Agent:
    return make_agent(agent, task) if isinstance(agent, str) else agent


def _name(agent: str | Agent) -> str:
    return agent if isinstance(agent, str) else type(agent).__name__


# ---------------------------------------------------------------- one policy


@dataclass(frozen=True, slots=True)
class Run:
    """Run of one policy.

    Its outcome, requests that arrived per second, the highest throughput of a second, the sum of the seconds' costs per
    1,000 tokens, and whether it ever asked for prefill on GPUs of its own.
    """

    outcome: PolicyOutcome
    arrivals: FloatArray
    best_tps: float
    cost: float
    asked_apart: bool


def play_policy(name: str, agent: Agent, task: TaskSpec, tables: ServingTables, calibration: Calibration) -> Run:
    n_steps = task.episode_length
    batch = ServingBatch(task, 1, None, tables, calibration, record=PIECES_PER_STEP * n_steps)
    batch.reset([0])
    agent.reset(1)
    metrics = {m: np.zeros(n_steps) for m in batch.metric}
    actions = np.zeros((n_steps, len(ACTION_FIELDS)))
    levels = dict.fromkeys(LEVELS, 0)
    asked_apart = False
    for t in range(n_steps):
        wanted = agent.act(batch.full_observation())
        asked_apart |= bool(wanted[0, 3] > 0.5)
        applied = snap(wanted, batch.mask)
        applied[:, 4] = np.minimum(applied[:, 4], tables.n_tiers - 1)  # a table may have fewer than the knob
        actions[t] = applied[0]
        batch.step(applied)
        for m, column in metrics.items():
            column[t] = batch.metric[m][0]
        levels[fleet_support(batch.fleet)] += 1
    arrivals = batch.fleet.arrivals[0].sum(axis=1)
    outcome = _outcome(name, batch, metrics, actions, levels)
    best_tps = float(metrics["tokens_per_sec"].max())
    return Run(outcome, arrivals, best_tps, float(metrics["cost_per_1k"].sum()), asked_apart)


def _outcome(
    name: str, batch: ServingBatch, metrics: dict[str, FloatArray], actions: FloatArray, levels: dict[str, int]
) -> PolicyOutcome:
    fleet, task = batch.fleet, batch.task
    arrived = fleet.arrivals[0].sum(axis=0)
    record = fleet.record[0, : int(fleet.state.rows["n_recorded"][0])]
    slo_ms = fleet.params.stats.slo_ms
    histogram, in_time = _latencies(record, slo_ms)
    tokens = float(metrics["tokens_per_sec"].sum())
    cards = task.fleet.n_replicas * batch.tables.cards_per_replica
    gpu_seconds = cards * float((1.0 + actions[:, 3]).sum())
    span_s = max(1.0, float(len(metrics["admitted"]) - DRAIN_S))
    missed = 1.0 - in_time / np.maximum(arrived, 1e-9)
    running = np.maximum(metrics["running_requests"], 1e-9)
    restarts = np.any(np.diff(actions[:, 3:5], axis=0) != 0, axis=1)
    return PolicyOutcome(
        policy=name,
        n_gpus=cards * (2 if (actions[:, 3] > 0.5).any() else 1),
        n_replicas=task.fleet.n_replicas,
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
        restarts=int(restarts.sum()),
        oom_seconds=int((metrics["oom"] > 0).sum()),
        preemptions=float(metrics["eviction_events"].sum()),
        peak_memory_gb=float(metrics["gpu_memory_gb"].max()),
        slo_miss_by_class={
            c: float(min(1.0, max(0.0, m))) for c, m in zip(fleet.params.stats.names, missed, strict=True)
        },
        figures=_figures(histogram, metrics),
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


def _figures(histogram: FloatArray, metrics: dict[str, FloatArray]) -> dict[str, float]:
    """Statistics of TTFT over requests and of TPOT over tokens, those of a second having one TPOT."""
    tpot, tokens = metrics["tpot_ms"], np.maximum(metrics["tokens_per_sec"], 1e-12)
    found = {f"ttft_{name}_ms": _quantile(histogram, q) for name, q in QUANTILES.items()}
    found |= {f"tpot_{name}_ms": weighted_quantile(tpot, tokens, q) for name, q in QUANTILES.items()}
    centres = np.append(_BIN_EDGES, _BIN_EDGES[-1])
    found["ttft_mean_ms"] = float(centres @ histogram / max(float(histogram.sum()), 1e-12))
    return {**found, "tpot_mean_ms": float((tpot * tokens).sum() / tokens.sum())}


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
