"""Play a request log on a fleet: the log as an episode, policies played on it, and constant settings screened on it.

The log is played once from its first second, the same for every policy. The discrete-event reference plays policies,
request by request; the fluid model only screens settings. docs/fidelity.md states how far that is from hardware.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any, Final, TypeVar

import numpy as np

from agents.policies.capacity import CapacityPlanner, Setting
from agents.protocol import Agent, FloatArray, knobs_of
from env.batch import ServingBatch
from env.dynamics import DynamicsFactory
from env.reference import ReferenceFleet
from env.threads import CORES
from grader.kinds.autoscaling import gpu_cost
from inferencegym.errors import DataFormatError
from inferencegym.models import ACTION_FIELDS, PRIORITY_CLASSES, QUANTILES, SPEC_LENGTHS, QuantTier, Router, ServeAction
from inferencegym.spaces.actions import action_size, to_row
from inferencegym.task_registry import MAX_EPISODE_LENGTH
from inferencegym.tasks import Calibration, Fleet, LengthDist, RequestClass, RewardWeights, TaskSpec
from ops.objectives import STATISTICS, WINDOW_S
from simulator.coverage import LEVELS, level_name
from simulator.events.requests import IntArray
from simulator.events.simulation import GAP_MS
from simulator.hardware import catalogue
from simulator.hardware.catalogue import table_name
from simulator.hardware.kernel_times import ATTENTION_BATCHES, KernelModel
from simulator.hardware.profiles import fleet_changes
from simulator.hardware.sources import operators_of
from simulator.hardware.tables import ServingTables, load_tables, tables_of
from simulator.load.prefix import reuse_curve
from simulator.load.requests import RequestLog
from simulator.whatif import request_statistics, weighted_quantile
from simulator.workload import load_source

Item = TypeVar("Item")
Result = TypeVar("Result")

HEADROOM: Final = 1.2
"""Planned capacity of the default fleet, at the default precision (FP16), relative to the log's mean load."""
DEFAULT_SLO_MS: Final = 500.0
NOISE_DEVIATIONS: Final = 2.0
"""Standard errors by which the shares of two policies must differ for one of them to be recommended."""
DRAIN_S: Final = 60
"""Seconds after the last arrival in which waiting and running requests may still be served."""
MAX_SPAN_S: Final = MAX_EPISODE_LENGTH - DRAIN_S
HOUR_S: Final = 3_600
TIMELINE_POINTS: Final = 600
_SIGNALS: Final = ("queue_requests", "running_requests", "ttft_p50_ms", "ttft_p99_ms", "tokens_per_sec", "kv_occupancy")
_TOLERANCE: Final = 1e-6
"""Rounding error allowed in the number of GPUs in use."""
AT_ONCE: Final = min(2, CORES)
"""Most plays at a time: each more takes 110 MB for a log of 200,000 requests."""
GRID: Final[dict[str, tuple[float, ...]]] = {
    "kv_budget": (0.9, 1.0),
    "spec_length": (0, 2, 4),
    "batch_size": (16, 32, 64, 128, 256, 512),
}
"""Values that are tried in all combinations and in each precision, with prefill on the replicas or on separate GPUs."""
LEAST_FITTING: Final = 0.1
"""Smallest share of requests that an engine takes by their length, below which nothing is planned."""
LEAST_REQUESTS: Final = 25
"""Fewest requests of a log on which anything is recommended."""
NEUTRAL: Final = Calibration(0.0, 1.0, 1.0, 1.0)
"""Placeholder calibration for constant settings, which do not look at observations."""


# ---------------------------------------------------------------- the log as an episode


def log_task(
    log: RequestLog, tables: ServingTables, slo_ms: float | None = None, like: TaskSpec | None = None
) -> TaskSpec:
    """Task that plays the whole log as one episode; everything but the load is as in ``like``, if given.

    Without it the fleet is sized to the log, and the objective is 500 ms. Restarts take as long as vLLM's. Raises
    :class:`DataFormatError` if the log lasts longer than an episode may.
    """
    span_s = math.ceil(float(log.arrival_s[-1]) + 1e-9)
    if span_s > MAX_SPAN_S:
        from_s = _busiest_hour(log.arrival_s)
        raise DataFormatError(
            f"the log lasts {span_s:,} s, but a replay at most {MAX_SPAN_S:,} s: choose a part of it (--from-s, "
            f"--to-s), such as its busiest hour, from second {from_s} to {from_s + HOUR_S}"
        )
    task = replace(
        _own_task() if like is None else like,
        log=log,
        trace=None,
        burst=None,
        recorded=True,
        arrival_rate_rps=max(0.01, log_summary(log)["rate_rps"]),
        episode_length=span_s + DRAIN_S,
        hardware=table_name(tables.sha256),
    )
    if slo_ms is not None:
        task = replace(task, slo_target_ms=slo_ms, classes=tuple(replace(c, slo_ms=slo_ms) for c in task.classes))
    return on_replicas(task, fleet_for(task, tables)) if like is None else task


def _busiest_hour(arrival_s: FloatArray) -> int:
    """Second at which the hour with the most arrivals begins, a multiple of a minute; ``arrival_s`` ascends."""
    begins = np.arange(0, arrival_s[-1], 60.0)
    return int(begins[np.argmax(np.searchsorted(arrival_s, begins + HOUR_S) - np.searchsorted(arrival_s, begins))])


def _own_task() -> TaskSpec:
    """Defaults for what a log does not state: all knobs, one objective for all classes, vLLM's restart times."""
    changes, length = fleet_changes(), LengthDist("trace")
    return TaskSpec(
        task_id="log",
        name="Log",
        gym_id="Log",
        difficulty="recorded",
        description="Requests of a log.",
        active_actions=tuple(ACTION_FIELDS),
        classes=tuple(
            RequestClass(name, float(i == 0), float(i == 0), DEFAULT_SLO_MS, length, length)
            for i, name in enumerate(PRIORITY_CLASSES)
        ),
        arrival_rate_rps=1.0,
        burst=None,
        slo_target_ms=DEFAULT_SLO_MS,
        fleet=Fleet(start_s=changes.start_s, restart_s=changes.restart_s, load_gb_per_s=changes.load_gb_per_s),
        reward=RewardWeights(),
        grade={},
    )


def on_replicas(task: TaskSpec, n_replicas: int) -> TaskSpec:
    """The task with another number of replicas."""
    return replace(task, fleet=replace(task.fleet, n_replicas=n_replicas))


def fleet_for(task: TaskSpec, tables: ServingTables | None = None) -> int:
    """Number of replicas that serve a task's mean load at the default precision (FP16) with some headroom."""
    tables = tables or tables_of(task.hardware)
    source = load_source(task, tables)
    plan = CapacityPlanner(task, tables, source.stats.shares).plan(Setting(tier=0, spec_length=0, disagg=False))
    each = plan.capacity_rps / task.fleet.n_replicas
    return max(1, math.ceil(HEADROOM * source.nominal_rate_rps / each))


def log_summary(log: RequestLog) -> dict[str, Any]:
    """Summary of a log: size, rate, lengths, burstiness, and the share of repeated prompt tokens."""
    prompts, outputs = np.quantile(log.prompt_tokens, (0.5, 0.99)), np.quantile(log.output_tokens, (0.5, 0.99))
    span_s = max(1.0, float(log.arrival_s[-1]))
    per_second = np.bincount(log.arrival_s.astype(np.int64))
    return {
        "requests": len(log.arrival_s),
        "span_s": span_s,
        "rate_rps": len(log.arrival_s) / span_s,
        "peak_rps": int(per_second.max()),
        "index_of_dispersion": float(per_second.var() / per_second.mean()),
        "prompt_tokens_p50": float(prompts[0]),
        "prompt_tokens_p99": float(prompts[1]),
        "output_tokens_p50": float(outputs[0]),
        "output_tokens_p99": float(outputs[1]),
        "reused_share": float(log.reused_tokens.sum() / log.prompt_tokens.sum()),
        "reuse_measured": reuse_curve(log) is not None and len(log.reuse_hit) > 0,
    }


def longest_request(tables: ServingTables, pool_tokens: int) -> tuple[int, str]:
    """Most tokens of a request that an engine with this KV pool takes, and what bounds them."""
    context = catalogue.context_tokens(str(tables.meta["model"]))
    if context is not None and context < pool_tokens:
        return context, "the model's context"
    return pool_tokens, "the KV pool"


def fitting(log: RequestLog, tables: ServingTables, tiers: Sequence[int] | None = None) -> RequestLog:
    """Requests that fit the largest KV pool of a replica and the model's context; the log itself if all do, or none.

    Fleets are sized to them, because engines refuse the others at once. ``tiers`` are the precisions that may be used
    (default: all).
    """
    fits = log.prompt_tokens + log.output_tokens <= longest_request(tables, largest_pool(tables, tiers))[0]
    return log if fits.all() or not fits.any() else log.part(fits, 0.0)


def largest_pool(tables: ServingTables, tiers: Sequence[int] | None = None) -> int:
    """Tokens that the KV pool of a replica holds in the precision that leaves most room."""
    return max(tables.kv_pool_tokens(tier, 1.0, False) for tier in (range(tables.n_tiers) if tiers is None else tiers))


def impossible(log: RequestLog, tables: ServingTables, tiers: Sequence[int] | None = None) -> str:
    """Why nothing can be planned on a log, and what would do: nearly no request fits; empty if enough do."""
    lengths = log.prompt_tokens + log.output_tokens
    pool_tokens = largest_pool(tables, tiers)
    most, bound = longest_request(tables, pool_tokens)
    if (lengths <= most).mean() >= LEAST_FITTING:
        return ""
    needed = int(lengths.max())
    told = (
        f"{refused(lengths, tables, pool_tokens)}; the longest needs {needed:,}. No number of GPUs "
        "changes that, so nothing is planned"
    )
    if bound == "the KV pool" and (catalogue.context_tokens(str(tables.meta["model"])) or math.inf) >= needed:
        model = catalogue.usual_name(str(tables.meta["model"]))
        known = {name: load_tables(catalogue.table_path(name)) for name in catalogue.tables_named(None, model)}
        larger = [name for name, table in known.items() if largest_pool(table) >= needed]
        return f"{told}: take another precision or table, with a larger pool ({', '.join(larger) or 'none known'})"
    names = [name for name in catalogue.models() if (catalogue.context_tokens(name) or 0) >= needed]
    return (
        f"{told}: take a model with a longer context ({', '.join(names) or 'none of the catalogue has so long a one'})"
    )


def refused(
    request_tokens: FloatArray, tables: ServingTables, pool_tokens: int, outcome: str = "count as refused"
) -> str:
    """How many requests, by their lengths (tokens), are too long to be served at all; empty if none is."""
    most, bound = longest_request(tables, pool_tokens)
    n, of = int((request_tokens > most).sum()), len(request_tokens)
    if not n:
        return ""
    return f"{n:,} of {of:,} requests ({n / of:.1%}) {outcome}: they are longer than {bound}, {most:,} tokens"


def side_by_side(work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Results of ``work`` on each item, in threads: a play holds the interpreter for a small part of its time."""
    with ThreadPoolExecutor(AT_ONCE) as threads:
        return list(threads.map(work, items))


# ---------------------------------------------------------------- hundreds of constant settings at once


def grid(prefill_apart: bool, tiers: Sequence[int], drafts: bool) -> list[ServeAction]:
    """All settings of :data:`GRID` in these precisions; without ``drafts``, only those that draft no tokens."""
    return [
        ServeAction(kv, int(spec), int(batch), prefill_apart, QuantTier(tier))
        for kv, spec, batch, tier in product(*GRID.values(), tiers)
        if drafts or not spec
    ]


@dataclass(frozen=True, slots=True)
class Screened:
    """Results of S settings on one load: share of requests missed, (S,); TPOT (ms) and tokens of each second, (T, S).

    A request is missed if it is later than its objective, refused, or still queued at the end. A setting that runs out
    of memory misses all of them.
    """

    missed: FloatArray
    tpot_ms: FloatArray
    tokens: FloatArray

    def tpot(self, statistic: str) -> FloatArray:
        """A statistic of TPOT over tokens for each setting, (S,) in ms."""
        if statistic == "mean":
            mean: FloatArray = (self.tpot_ms * self.tokens).sum(axis=0) / self.tokens.sum(axis=0)
            return mean
        q = QUANTILES[statistic]
        columns = zip(self.tpot_ms.T, self.tokens.T, strict=True)
        return np.array([weighted_quantile(tpot, tokens, q) for tpot, tokens in columns])


def screen(task: TaskSpec, tables: ServingTables, settings: Sequence[ServeAction]) -> Screened:
    """Play all settings as rows of one batch with the same requests."""
    batch = ServingBatch(task, len(settings), None, tables, NEUTRAL, n_loads=1)
    batch.reset([0])
    actions = np.array([to_row(setting) for setting in settings])
    missed, failed = np.zeros(len(settings)), np.zeros(len(settings), dtype=bool)
    tpot, tokens = np.zeros((2, task.episode_length, len(settings)))
    for t in range(task.episode_length):
        batch.step(actions)
        missed += batch.metric["slo_violations"]
        failed |= batch.metric["oom"] > 0
        tpot[t], tokens[t] = batch.metric["tpot_ms"], np.maximum(batch.metric["tokens_per_sec"], 1e-12)
    left = batch.fleet.state.rows["queue"].reshape(len(settings), -1).sum(axis=1)
    shares = np.minimum(1.0, (missed + left) / batch.fleet.arrivals[0].sum())
    return Screened(np.where(failed, 1.0, shares), tpot, tokens)


# ---------------------------------------------------------------- one policy, every request


@dataclass(frozen=True, slots=True)
class PolicyOutcome:
    """Outcome of one policy on a log.

    Latencies are in ms per request; TPOT is a request's mean time per token after the first. ``slo_miss_share`` counts
    requests that missed their objective, were refused or were not served by the end; ``goodput_rps`` counts the others
    per second of the log. ``n_gpus`` is the largest number of GPUs in use, with all cards of each replica,
    ``n_replicas`` the size of the fleet, ``gpu_seconds`` the GPU time used. ``requests_per_replica`` is how many
    requests a replica decodes at a time, averaged over its decoding requests, so that bursts count by their requests.
    ``figures`` has all statistics that objectives bound (``ops.objectives``), ``windows`` these of the requests that
    arrive in each five minutes, ``lateness`` their times to first token as shares of the objective (NaN if never
    answered), ``action`` the setting of a constant.
    ``timeline`` holds signals and knobs at ``t_s``, thinned to a few hundred points; ``support`` is the share of
    seconds at each level of support by measurements.
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
    requests_per_replica: float
    gpu_seconds: float
    gpu_s_per_1k_tokens: float
    restarts: int
    oom_seconds: int
    preemptions: float
    peak_memory_gb: float
    slo_miss_by_class: dict[str, float]
    support: dict[str, float]
    figures: dict[str, float]
    windows: list[dict[str, float]] = field(repr=False)
    lateness: list[FloatArray] = field(repr=False, compare=False)
    timeline: dict[str, list[float]] = field(repr=False)
    action: dict[str, Any] | None = None

    def share_in_time(self, ttft_ratio: float) -> float:
        """Share of requests whose first token is in time if TTFT is ``ttft_ratio`` times the simulated one."""
        return share_within(np.concatenate(self.lateness), ttft_ratio)


@dataclass(frozen=True, slots=True)
class Run:
    """Run of one policy.

    Its outcome, requests that arrived in each second, the highest throughput of a second, the cost per 1,000 tokens
    summed over seconds, and whether it ever asked for prefill on separate GPUs.
    """

    outcome: PolicyOutcome
    arrivals: FloatArray
    best_tps: float
    cost: float
    asked_apart: bool


def share_within(lateness: FloatArray, ttft_ratio: float) -> float:
    """Share of requests in time, by :attr:`PolicyOutcome.lateness`, with TTFT times ``ttft_ratio``."""
    return float((lateness * ttft_ratio <= 1.0).mean())


def noise(missed: float, other: float, requests: int) -> float:
    """Difference that chance may explain between two shares of this many requests."""
    return NOISE_DEVIATIONS * math.sqrt((missed * (1.0 - missed) + other * (1.0 - other)) / requests)


def too_little(log: Mapping[str, Any]) -> str | None:
    """Why nothing is recommended on a log with this summary (:func:`log_summary`); None if it suffices."""
    requests = log["requests"]
    if requests < LEAST_REQUESTS:
        counted = f"{requests:g} request{'' if requests == 1 else 's'}"
        return f"No recommendation: the log has {counted}. Use a log of at least {LEAST_REQUESTS}."
    if log["span_s"] <= 1.0:
        return (
            f"No recommendation: all {requests:,} requests of the log arrive within one second, so it does not show "
            "the load over time. Use a log with the arrival time of each request."
        )
    return None


def least_for_90(share: float) -> int:
    """Fewest requests with which this percentile (a share) can be known with 90% certainty.

    With fewer even the slowest request is faster than the percentile in more than 10% of such logs.
    """
    return max(LEAST_REQUESTS, math.ceil(math.log(0.1) / math.log(share)) if share else 0)


def most_running(tables: ServingTables) -> int:
    """Largest batch bound that the reference plays: that of the operator times, or of the knob if these list none."""
    listed = isinstance(operators_of(tables)[0], KernelModel)
    return ATTENTION_BATCHES[-1] if listed else int(ACTION_FIELDS["batch_size"].high)


def _batch(
    task: TaskSpec,
    tables: ServingTables,
    calibration: Calibration,
    router: Router,
    prefill_replicas: int | None = None,
) -> ServingBatch:
    """One episode in the reference, whose batch bound may exceed that of the fluid model."""
    batch = ServingBatch(task, 1, None, tables, calibration, dynamics=_reference(tables, router, prefill_replicas))
    batch.knobs.high[list(ACTION_FIELDS).index("batch_size")] = most_running(tables)
    batch.reset([0])
    return batch


def play_policy(
    name: str,
    agent: Agent,
    task: TaskSpec,
    tables: ServingTables,
    calibration: Calibration,
    router: Router = "shared",
) -> Run:
    """Play one policy on the whole log, request by request, in the discrete-event reference."""
    n_steps = task.episode_length
    batch = _batch(task, tables, calibration, router)
    agent.reset(1)
    fleet = batch.fleet
    assert isinstance(fleet, ReferenceFleet)
    metrics = {m: np.zeros(n_steps) for m in batch.metric}
    actions = np.full((n_steps, action_size(task.fleet)), float(task.fleet.n_replicas))
    decoding, gaps = np.zeros((n_steps, 2)), _no_gaps(n_steps)
    asked_apart = False
    for t in range(n_steps):
        wanted = knobs_of(agent, batch.full_observation())
        asked_apart |= bool(wanted[0, 3] > 0.5)
        applied = batch.snap(wanted)
        # Five numbers keep the initial replicas of an autoscaling task.
        actions[t, : applied.shape[1]] = applied[0]
        batch.step(applied)
        for m, column in metrics.items():
            column[t] = batch.metric[m][0]
        decoding[t], gaps[t // WINDOW_S] = fleet.episode(0).decoding(), fleet.episode(0).gaps()
    arrivals = fleet.arrivals[0].sum(axis=1)
    gpus = gpu_cost(metrics["tokens_per_sec"], metrics["cost_per_1k"]) / calibration.price
    outcome = _outcome(name, task, fleet, metrics, actions, gpus, decoding, gaps, _timeline(metrics, actions))
    best_tps = float(metrics["tokens_per_sec"].max())
    return Run(outcome, arrivals, best_tps, float(metrics["cost_per_1k"].sum()), asked_apart)


def play_constant(
    action: ServeAction,
    task: TaskSpec,
    tables: ServingTables,
    router: Router = "shared",
    prefill_replicas: int | None = None,
) -> PolicyOutcome:
    """Outcome of a constant setting as :func:`play_policy` has it, but without a timeline, in a tenth of the time.

    Where prefill is apart, all replicas share ``prefill_replicas``; without it, each has one.
    """
    n_steps = task.episode_length
    batch = _batch(task, tables, NEUTRAL, router, prefill_replicas)
    actions = batch.snap(to_row(action)[None])
    batch.write_knobs(actions)
    fleet = batch.fleet
    assert isinstance(fleet, ReferenceFleet)
    episode, knobs, used_gb = fleet.episode(0), fleet.knobs(0), fleet.used_gb(0)
    limit_gb = fleet.params.constants["memory_limit_gb"]
    decoding, gaps = np.zeros((n_steps, 2)), _no_gaps(n_steps)
    for t in range(n_steps):
        episode.pass_second(knobs, used_gb > limit_gb)
        decoding[t], gaps[t // WINDOW_S] = episode.decoding(), episode.gaps()
    metrics = {m: np.zeros(n_steps) for m in batch.metric}
    for m, total in episode.totals().items():
        metrics[m][-1] = total
    metrics["oom"][:], metrics["gpu_memory_gb"][:] = used_gb > limit_gb, min(used_gb, limit_gb)
    n_replicas = task.fleet.n_replicas
    apart = (prefill_replicas or n_replicas) if fleet.disagg[0] else 0
    gpus = np.full(n_steps, float(tables.cards_per_replica * (n_replicas + apart)))
    return _outcome("constant", task, fleet, metrics, np.repeat(actions, n_steps, axis=0), gpus, decoding, gaps, {})


def _no_gaps(n_steps: int) -> IntArray:
    """Gaps between outputs, counted by length until the end of each window, (windows, lengths)."""
    return np.zeros((math.ceil(n_steps / WINDOW_S), len(GAP_MS)), dtype=np.int64)


def _reference(tables: ServingTables, router: Router, prefill_replicas: int | None) -> DynamicsFactory:
    """The discrete-event reference for engines of these tables behind their API servers."""
    context_tokens = catalogue.context_tokens(str(tables.meta["model"]))
    return partial(
        ReferenceFleet,
        context_tokens=context_tokens,
        router=router,
        prefill_replicas=prefill_replicas,
        server=True,
    )


def levels_of(tables: ServingTables, actions: FloatArray, decoding: FloatArray) -> dict[str, float]:
    """Share of seconds at each level of support, by the operator times at their ends."""
    found = dict.fromkeys(LEVELS, 0)
    for action, (requests, context_tokens) in zip(actions, decoding.tolist(), strict=True):
        level = level_name(tables, int(action[4]), SPEC_LENGTHS.index(int(action[1])), requests, context_tokens)
        found[level] += 1
    return {level: n / len(actions) for level, n in found.items()}


def _outcome(
    name: str,
    task: TaskSpec,
    fleet: ReferenceFleet,
    metrics: dict[str, FloatArray],
    actions: FloatArray,
    gpus: FloatArray,
    decoding: FloatArray,
    gaps: IntArray,
    timeline: dict[str, list[float]],
) -> PolicyOutcome:
    """Statistics of an episode.

    ``gpus`` (T,) is the number of GPUs in use in each second; ``decoding`` (T, 2) has the decoding requests of a busy
    replica at its end, and their context; ``gaps`` has those between outputs until the end of each window.
    """
    stats, episode = fleet.params.stats, fleet.episode(0)
    requests, class_index = episode.outcome(), episode.class_index
    values = {"ttft": requests.ttft_ms(), "tpot": requests.tpot_ms(), "e2e": requests.e2e_ms()}
    figures = _figures(values, gaps[-1])
    n_requests = len(class_index)
    window, gaps_in = requests.arrival_s // WINDOW_S, np.diff(gaps, axis=0, prepend=0)
    inside = {int(each): window == each for each in np.unique(window)}
    # A request that was never answered has no TTFT and is not in time.
    lateness = values["ttft"] / stats.slo_ms[class_index]
    in_time = lateness <= 1.0
    tokens = float(metrics["tokens_per_sec"].sum())
    gpu_seconds = float(gpus.sum())
    span_s = max(1.0, float(len(metrics["admitted"]) - DRAIN_S))
    restarts = np.any(np.diff(actions[:, 3:5], axis=0) != 0, axis=1)
    completed, rejected = (float(metrics[m].sum()) for m in ("completed", "rejected"))
    return PolicyOutcome(
        policy=name,
        n_gpus=math.ceil(float(gpus.max()) - _TOLERANCE),
        n_replicas=task.fleet.n_replicas,
        slo_miss_share=1.0 - float(in_time.mean()),
        goodput_rps=float(in_time.sum() / span_s),
        ttft_p50_ms=figures["ttft_p50_ms"],
        ttft_p90_ms=figures["ttft_p90_ms"],
        ttft_p99_ms=figures["ttft_p99_ms"],
        tpot_mean_ms=figures["tpot_mean_ms"],
        tokens_per_s=tokens / span_s,
        completed=completed,
        rejected=rejected,
        unserved=n_requests - completed - rejected,
        requests_per_replica=float((decoding[:, 0] ** 2).sum() / max(decoding[:, 0].sum(), 1e-12)),
        gpu_seconds=gpu_seconds,
        gpu_s_per_1k_tokens=1000.0 * gpu_seconds / max(tokens, 1e-9),
        restarts=int(restarts.sum()),
        oom_seconds=int((metrics["oom"] > 0).sum()),
        preemptions=float(metrics["eviction_events"].sum()),
        peak_memory_gb=float(metrics["gpu_memory_gb"].max()),
        slo_miss_by_class={c: 1.0 - float(in_time[class_index == i].mean()) for i, c in enumerate(stats.names)},
        figures=figures,
        windows=[_figures({k: v[part] for k, v in values.items()}, gaps_in[each]) for each, part in inside.items()],
        lateness=[lateness[part] for part in inside.values()],
        support=levels_of(fleet.params.tables, actions, decoding),
        timeline=timeline,
    )


def _figures(values: Mapping[str, FloatArray], gaps: IntArray) -> dict[str, float]:
    """Statistics over requests: of TTFT over those answered, of the others over those that ended; 0 without any.

    ``gaps`` (lengths,) counts gaps between outputs of all requests.
    """
    found: dict[str, float] = {}
    for quantity, of_requests in values.items():
        found |= request_statistics(quantity, of_requests, without=0.0)
    return {**found, **gap_statistics(gaps, without=0.0)}


def gap_statistics(gaps: IntArray, without: float = math.nan) -> dict[str, float]:
    """Quantiles and mean of the inter-token latency (ms). ``gaps`` counts gaps by length; no gaps give ``without``."""
    counted = np.cumsum(gaps)
    if not counted[-1]:
        return dict.fromkeys((f"itl_{name}_ms" for name in STATISTICS), without)
    found = {
        f"itl_{name}_ms": float(GAP_MS[np.searchsorted(counted, q * counted[-1])]) for name, q in QUANTILES.items()
    }
    return {**found, "itl_mean_ms": float(gaps @ GAP_MS) / int(counted[-1])}


def _timeline(metrics: dict[str, FloatArray], actions: FloatArray) -> dict[str, list[float]]:
    every = _stride(len(actions))
    admitted = metrics["admitted"]
    line = {name: thinned(metrics[name]).round(4).tolist() for name in _SIGNALS if not name.startswith("ttft")}
    for name in ("ttft_p50_ms", "ttft_p99_ms"):
        # Only seconds with admissions count: a second without any says nothing about latency.
        total = thinned(metrics[name] * (admitted > 1e-6))
        count = thinned((admitted > 1e-6).astype(np.float64))
        line[name] = _held(np.where(count > 0.0, total / np.maximum(count, 1e-12), np.nan)).round(4).tolist()
    for knob, column in zip((*ACTION_FIELDS, "replicas"), actions.T, strict=False):
        line[knob] = column[::every].round(4).tolist()
    return {"t_s": [float(t) for t in range(0, len(actions), every)], **line}


def _held(values: FloatArray) -> FloatArray:
    """The values, with gaps (NaN) filled by the last value before them, or 0 at the start."""
    last = np.maximum.accumulate(np.where(np.isnan(values), -1, np.arange(len(values))))
    return np.where(last >= 0, values[np.maximum(last, 0)], 0.0)


def _stride(n: int) -> int:
    return max(1, math.ceil(n / TIMELINE_POINTS))


def thinned(values: FloatArray) -> FloatArray:
    """Means over equal intervals, at most :data:`TIMELINE_POINTS` of them."""
    every = _stride(len(values))
    starts = np.arange(0, len(values), every)
    means: FloatArray = np.add.reduceat(values, starts) / np.diff(np.append(starts, len(values)))
    return means
