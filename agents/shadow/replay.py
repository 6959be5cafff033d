"""Replay of one policy on a task made of a log: what it does to every request, and what it uses."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from agents.protocol import Agent, FloatArray
from env.batch import ServingBatch
from grader.autoscaling_grader import gpu_cost
from inferencegym.models import ACTION_FIELDS
from inferencegym.spaces.actions import action_size, snap
from inferencegym.tasks import Calibration, TaskSpec
from simulator.coverage import LEVELS, fleet_support
from simulator.objectives import QUANTILES
from simulator.tables import ServingTables
from simulator.whatif import ttft_samples, weighted_quantile

DRAIN_S: Final = 60
"""Seconds after the last arrival in which what is left may be served."""
TIMELINE_POINTS: Final = 600
_SIGNALS: Final = ("queue_requests", "running_requests", "ttft_p50_ms", "ttft_p99_ms", "tokens_per_sec", "kv_occupancy")
_BIN_EDGES: Final = np.exp(np.linspace(0.0, math.log(1e7), 4001))
"""Edges (ms) of the histogram that TTFT percentiles are read from: 0.4 % apart."""
_RECORDS_AT_ONCE: Final = 400
_TOLERANCE: Final = 1e-6
"""GPUs that a rounding error may add to those in use."""
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
    """Play one policy on the whole log, with the time to first token of every request recorded."""
    n_steps = task.episode_length
    batch = ServingBatch(task, 1, None, tables, calibration, record=PIECES_PER_STEP * n_steps)
    batch.reset([0])
    agent.reset(1)
    metrics = {m: np.zeros(n_steps) for m in batch.metric}
    actions = np.zeros((n_steps, action_size(task.fleet)))
    levels = dict.fromkeys(LEVELS, 0)
    asked_apart = False
    for t in range(n_steps):
        wanted = agent.act(batch.full_observation())
        asked_apart |= bool(wanted[0, 3] > 0.5)
        applied = snap(wanted, batch.mask, task.fleet)
        applied[:, 4] = np.minimum(applied[:, 4], tables.n_tiers - 1)  # a table may have fewer than the knob
        actions[t] = applied[0]
        batch.step(applied)
        for m, column in metrics.items():
            column[t] = batch.metric[m][0]
        levels[fleet_support(batch.fleet)] += 1
    arrivals = batch.fleet.arrivals[0].sum(axis=1)
    gpus = gpu_cost(metrics["tokens_per_sec"], metrics["cost_per_1k"]) / calibration.price
    outcome = _outcome(name, batch, metrics, actions, gpus, levels)
    best_tps = float(metrics["tokens_per_sec"].max())
    return Run(outcome, arrivals, best_tps, float(metrics["cost_per_1k"].sum()), asked_apart)


def _outcome(
    name: str,
    batch: ServingBatch,
    metrics: dict[str, FloatArray],
    actions: FloatArray,
    gpus: FloatArray,
    levels: dict[str, int],
) -> PolicyOutcome:
    """Statistics of an episode; ``gpus`` are those in use in each second (T,)."""
    fleet, task = batch.fleet, batch.task
    arrived = fleet.arrivals[0].sum(axis=0)
    record = fleet.record[0, : int(fleet.state.rows["n_recorded"][0])]
    slo_ms = fleet.params.stats.slo_ms
    histogram, in_time = _latencies(record, slo_ms)
    tokens = float(metrics["tokens_per_sec"].sum())
    gpu_seconds = float(gpus.sum())
    span_s = max(1.0, float(len(metrics["admitted"]) - DRAIN_S))
    missed = 1.0 - in_time / np.maximum(arrived, 1e-9)
    running = np.maximum(metrics["running_requests"], 1e-9)
    restarts = np.any(np.diff(actions[:, 3:5], axis=0) != 0, axis=1)
    return PolicyOutcome(
        policy=name,
        n_gpus=math.ceil(float(gpus.max()) - _TOLERANCE),
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
    line = {name: thinned(metrics[name]).round(4).tolist() for name in _SIGNALS if not name.startswith("ttft")}
    for name in ("ttft_p50_ms", "ttft_p99_ms"):
        # Of the requests that came: a second without any says nothing about latency.
        total = thinned(metrics[name] * (admitted > 1e-6))
        count = thinned((admitted > 1e-6).astype(np.float64))
        line[name] = _held(np.where(count > 0.0, total / np.maximum(count, 1e-12), np.nan)).round(4).tolist()
    for knob, column in zip((*ACTION_FIELDS, "replicas"), actions.T, strict=False):
        line[knob] = column[::every].round(4).tolist()
    return {"t_s": [float(t) for t in range(0, len(actions), every)], **line}


def _held(values: FloatArray) -> FloatArray:
    """The values with gaps (NaN) filled by the last one before them, 0 at the start."""
    last = np.maximum.accumulate(np.where(np.isnan(values), -1, np.arange(len(values))))
    return np.where(last >= 0, values[np.maximum(last, 0)], 0.0)


def _stride(n: int) -> int:
    return max(1, math.ceil(n / TIMELINE_POINTS))


def thinned(values: FloatArray) -> FloatArray:
    """Means over equal stretches, at most :data:`TIMELINE_POINTS` of them."""
    every = _stride(len(values))
    starts = np.arange(0, len(values), every)
    means: FloatArray = np.add.reduceat(values, starts) / np.diff(np.append(starts, len(values)))
    return means
