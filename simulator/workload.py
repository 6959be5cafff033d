"""Offered load: arrivals, prompt lengths, bursts and class mix of an episode, all drawn at reset.

Randomness of an episode comes from ``numpy.random.default_rng([seed, stream])``; a step has none. So every policy meets
the same traffic, and a longer episode starts with the shorter one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from inferencegym.errors import InvalidConfigError
from inferencegym.models import PHASES, PRIORITY_CLASSES, PROMPT_BUCKET_EDGES, ServeAction, WorkloadState
from inferencegym.seeds import check_seed, generators
from inferencegym.tasks import LengthDist, TaskId, TaskSpec, get_task
from simulator.tables import FloatArray, ServingTables, load_tables

NOISE_STD: Final = 0.05
"""Relative standard deviation of the jitter on TTFT and TPOT."""
POOL_SIZE: Final = 1 << 16
POOL_SEED: Final = 20_240_418
WARMUP_STEPS: Final = 10
COOLDOWN_STEPS: Final = 10
CLASS_WINDOW_STEPS: Final = 50
PROMPT_WINDOW_STEPS: Final = 10
REFERENCE_BATCH: Final = 32
"""Running requests for which prefill work is listed; the dynamics scale it to the batch at hand."""

REUSE_LOG2_FIRST: Final = 10.0
"""Logarithm of the smallest cache size at which reuse is listed; sizes double from there."""

_ARRIVALS, _PROMPTS, _NOISE = range(3)


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """The offered load of one episode of T steps and C classes (only classes that occur).

    ``arrivals`` (T, C) requests, ``prompt_tokens`` (T, C) their summed prompts, ``prefill_work_ms`` (T, C, 3) their
    summed prefill work per precision tier, ``noise`` (T, 2) factors on TTFT and TPOT, ``phase`` (T,) index into
    ``PHASES``. ``saved_work_ms`` (T, C, 3) is the part of that work that repeats prefixes seen before; None where
    nothing does.
    """

    arrivals: FloatArray
    prompt_tokens: FloatArray
    prefill_work_ms: FloatArray
    noise: FloatArray
    phase: NDArray[np.int64]
    saved_work_ms: FloatArray | None = None

    @property
    def n_steps(self) -> int:
        """Steps of the episode."""
        return len(self.arrivals)


@dataclass(frozen=True, slots=True, eq=False)
class ClassStats:
    """What the dynamics need to know of each occurring class beforehand; arrays are (C,) or (C, ...).

    ``prompt_mean`` tokens, ``work_mean_ms`` (C, 3) mean listed prefill work, ``work_cv2`` squared coefficient of
    variation of that work, ``output_cdf_tokens`` (C, Q) output lengths at evenly spaced quantiles. ``reuse_hit`` (K,)
    is the share of the tokens of repeated prefixes that a KV cache of ``2 ** (REUSE_LOG2_FIRST + i)`` tokens still
    holds; None where prompts share nothing.
    """

    names: tuple[str, ...]
    shares: FloatArray
    slo_ms: FloatArray
    complexity_penalty: FloatArray
    prompt_mean: FloatArray
    work_mean_ms: FloatArray
    work_cv2: FloatArray
    output_cdf_tokens: FloatArray
    reuse_hit: FloatArray | None = None


class Traffic(Protocol):
    """A source of workloads; the same seed gives the same workload."""

    stats: ClassStats
    nominal_rate_rps: float

    def draw(self, seed: int, n_steps: int) -> Workload:
        """The workload of an episode."""
        ...

    def draw_many(self, seeds: Sequence[int], n_steps: int) -> Workload:
        """The workloads of several episodes, their arrays stacked along a new first axis; the same numbers."""
        ...


def stacked(loads: Sequence[Workload]) -> Workload:
    """Workloads of one traffic as one, stacked along a new first axis."""
    saved = None
    if any(load.saved_work_ms is not None for load in loads):
        nothing = np.zeros_like(loads[0].prefill_work_ms)
        saved = np.stack([nothing if load.saved_work_ms is None else load.saved_work_ms for load in loads])
    return Workload(
        np.stack([load.arrivals for load in loads]),
        np.stack([load.prompt_tokens for load in loads]),
        np.stack([load.prefill_work_ms for load in loads]),
        np.stack([load.noise for load in loads]),
        np.stack([load.phase for load in loads]),
        saved,
    )


# ---------------------------------------------------------------- synthetic traffic


class SyntheticTraffic:
    """Poisson arrivals with bursts; prompts from a class's distribution.

    Prompts come from a pool of 65,536 per class, drawn once from a fixed seed: an episode takes a stretch of it from a
    random offset on, so a reset needs two look-ups per step instead of thousands of draws.
    """

    def __init__(self, task: TaskSpec, tables: ServingTables) -> None:
        active = [i for i, c in enumerate(task.classes) if c.share > 0 or c.burst_share > 0]
        classes = [task.classes[i] for i in active]
        self._rate = task.arrival_rate_rps
        self._burst = task.burst
        self._share = np.array([c.share for c in classes])
        self._burst_share = np.array([c.burst_share for c in classes])
        pools = [_prompt_pool(c.prompt, i) for i, c in zip(active, classes, strict=True)]
        works = [listed_work_ms(p, tables) for p in pools]
        # Running sums of prompt tokens and of the work at each tier, side by side: one look-up finds all four.
        self._sums = [_running_sum(np.column_stack([p, w])) for p, w in zip(pools, works, strict=True)]
        self.nominal_rate_rps = task.arrival_rate_rps
        self.stats = class_stats(
            names=[c.name for c in classes],
            shares=self._share,
            slo_ms=[c.slo_ms for c in classes],
            complexity_penalty=[c.complexity_penalty for c in classes],
            prompts=pools,
            works=works,
            outputs=[length_quantiles(c.output) for c in classes],
        )

    def draw(self, seed: int, n_steps: int) -> Workload:
        """The workload of an episode."""
        seed = check_seed(seed)
        rate, phase = self._rates(n_steps)
        counts = np.random.default_rng([seed, _ARRIVALS]).poisson(rate)
        offsets = np.random.default_rng([seed, _PROMPTS]).integers(POOL_SIZE, size=(rate.shape[1],))
        sums = np.empty((n_steps, rate.shape[1], 4))
        ends = np.empty((n_steps + 1, rate.shape[1]), dtype=np.int64)
        ends[0] = offsets
        ends[1:] = offsets + counts.cumsum(axis=0)
        for c in range(rate.shape[1]):
            at = _pooled(self._sums[c], ends[:, c])
            np.subtract(at[1:], at[:-1], out=sums[:, c])
        return Workload(counts.astype(np.float64), sums[..., 0], sums[..., 1:], draw_noise(seed, n_steps), phase)

    def draw_many(self, seeds: Sequence[int], n_steps: int) -> Workload:
        """The workloads of several episodes; only the random numbers themselves are drawn one by one."""
        rate, phase = self._rates(n_steps)
        counts = np.empty((len(seeds), *rate.shape), dtype=np.int64)
        ends = np.empty((len(seeds), n_steps + 1, rate.shape[1]), dtype=np.int64)
        z = np.empty((len(seeds), n_steps, 2))
        checked = [check_seed(seed) for seed in seeds]
        # NumPy draws the same numbers sooner when it need not look the rate up for each.
        lam = rate.item(0) if (rate == rate[0, 0]).all() else rate
        for i, (arrivals, prompts, noise) in enumerate(generators(checked, (_ARRIVALS, _PROMPTS, _NOISE))):
            counts[i] = arrivals.poisson(lam, size=rate.shape)
            ends[i, 0] = [prompts.integers(POOL_SIZE) for _ in range(rate.shape[1])]
            noise.standard_normal(out=z[i])
        np.cumsum(counts, axis=1, out=ends[:, 1:])
        ends[:, 1:] += ends[:, :1]
        sums = np.empty((*counts.shape, 4))
        for c in range(rate.shape[1]):
            at = _pooled(self._sums[c], ends[:, :, c].ravel()).reshape(len(seeds), n_steps + 1, 4)
            np.subtract(at[:, 1:], at[:, :-1], out=sums[:, :, c])
        phases_each = np.broadcast_to(phase, (len(seeds), n_steps))
        return Workload(counts.astype(np.float64), sums[..., 0], sums[..., 1:], _noise_factors(z), phases_each)

    @lru_cache(maxsize=16)  # noqa: B019 - a task's few episode lengths
    def _rates(self, n_steps: int) -> tuple[FloatArray, NDArray[np.int64]]:
        steps = np.arange(n_steps)
        burst = np.array([self._burst is not None and self._burst.active(int(t)) for t in steps], dtype=bool)
        rate = self._rate * np.broadcast_to(self._share, (n_steps, len(self._share))).copy()
        if self._burst is not None:
            rate[burst] = self._burst.rate_rps * self._burst_share
        return rate, phases(burst)


def draw_noise(seed: int, n_steps: int) -> FloatArray:
    """Factors (T, 2) on TTFT and TPOT: Gaussian around 1, 5 %, cut at four standard deviations."""
    z = np.random.default_rng([seed, _NOISE]).standard_normal((n_steps, 2))
    return _noise_factors(z)


def _noise_factors(z: FloatArray) -> FloatArray:
    return 1.0 + NOISE_STD * np.clip(z, -4.0, 4.0)


def phases(burst: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Phase index per step: warm-up first, burst while a flood is on, cooldown for ten steps after it, else steady."""
    steps = np.arange(len(burst))
    last_burst = np.maximum.accumulate(np.where(burst, steps, -COOLDOWN_STEPS - 1))
    phase = np.where(steps < WARMUP_STEPS, PHASES.index("warmup"), PHASES.index("steady"))
    phase = np.where(steps - last_burst <= COOLDOWN_STEPS, PHASES.index("cooldown"), phase)
    return np.where(burst, PHASES.index("burst"), phase).astype(np.int64)


def _prompt_pool(dist: LengthDist, class_index: int) -> FloatArray:
    rng = np.random.default_rng([POOL_SEED, class_index])
    if dist.kind == "uniform":
        drawn = rng.uniform(dist.low, dist.high, POOL_SIZE)
    elif dist.kind == "lognormal":
        drawn = rng.lognormal(dist.mu, dist.sigma, POOL_SIZE)
    else:
        raise InvalidConfigError(f"prompt distribution {dist.kind!r} needs a recorded trace")
    return np.clip(np.rint(drawn), dist.low, dist.high)


def _running_sum(values: FloatArray) -> FloatArray:
    return np.concatenate([np.zeros((1, values.shape[1])), np.cumsum(values, axis=0)])


def _pooled(sums: FloatArray, index: NDArray[np.int64]) -> FloatArray:
    """Running sums (N, k) of an endlessly repeated pool at these positions (N,)."""
    n = len(sums) - 1
    found: FloatArray = sums[index % n]
    again = np.flatnonzero(index >= n)
    found[again] += (index[again] // n)[:, None] * sums[-1]
    return found


def length_quantiles(dist: LengthDist, points: int = 2048) -> FloatArray:
    """Lengths at ``points`` evenly spaced quantiles (mid-points), clamped to the distribution's bounds."""
    from statistics import NormalDist

    q = (np.arange(points) + 0.5) / points
    if dist.kind == "uniform":
        return dist.low + q * (dist.high - dist.low)
    if dist.kind == "lognormal":
        standard = NormalDist()
        z = np.array([standard.inv_cdf(float(p)) for p in q])
        return np.clip(np.exp(dist.mu + dist.sigma * z), dist.low, dist.high)
    raise InvalidConfigError(f"length distribution {dist.kind!r} needs a recorded trace")


# ---------------------------------------------------------------- shared by all sources


def class_stats(
    names: Sequence[str],
    shares: Sequence[float] | FloatArray,
    slo_ms: Sequence[float],
    complexity_penalty: Sequence[float],
    prompts: Sequence[FloatArray],
    works: Sequence[FloatArray],
    outputs: Sequence[FloatArray],
) -> ClassStats:
    """Summaries of each class from samples of its prompts (tokens), listed work (ms, (N, 3)) and output quantiles."""
    return ClassStats(
        names=tuple(names),
        shares=np.asarray(shares, dtype=np.float64),
        slo_ms=np.array([min(s, 1e15) for s in slo_ms]),
        complexity_penalty=np.asarray(complexity_penalty, dtype=np.float64),
        prompt_mean=np.array([p.mean() for p in prompts]),
        work_mean_ms=np.stack([w.mean(axis=0) for w in works]),
        work_cv2=np.array([float((w[:, 0].std() / w[:, 0].mean()) ** 2) for w in works]),
        output_cdf_tokens=np.stack(list(outputs)),
    )


def listed_work_ms(prompt_tokens: FloatArray, tables: ServingTables) -> FloatArray:
    """Prefill work (N, 3) in ms of prompts (N,) at each precision tier, prompts filling the engine's token budget."""
    batch = int(np.argmin(np.abs(tables.axes["batch_size"] - REFERENCE_BATCH)))
    listed = tables.prefill_saturated_ms[:, batch]
    points = tables.axes["prompt_len_bucket"]
    return np.stack([interp_log(prompt_tokens, points, listed[tier]) for tier in range(len(listed))], axis=-1)


def saved_work_ms(prompt_tokens: FloatArray, reused_tokens: FloatArray, tables: ServingTables) -> FloatArray:
    """Prefill work (N, 3) in ms that prompts (N,) do not need when their first ``reused_tokens`` are in the cache.

    What is left still attends to the prefix, so the saving is the work of the prefix alone. One token is always
    computed.
    """
    reused = np.minimum(reused_tokens, prompt_tokens - 1.0)
    return np.where(reused[:, None] > 0.0, listed_work_ms(reused, tables), 0.0)


def interp_log(x: FloatArray, points: FloatArray, values: FloatArray) -> FloatArray:
    """Linear on the logarithms of both axes; the outermost slopes continue beyond the grid."""
    lx, lp, lv = np.log(np.maximum(x, 1.0)), np.log(points), np.log(values)
    i = np.clip(np.searchsorted(lp, lx) - 1, 0, len(lp) - 2)
    slope = (lv[i + 1] - lv[i]) / (lp[i + 1] - lp[i])
    result: FloatArray = np.exp(lv[i] + slope * (lx - lp[i]))
    return result


def bin_requests(
    arrival_s: FloatArray,
    prompt_tokens: FloatArray,
    class_index: NDArray[np.int64],
    n_classes: int,
    tables: ServingTables,
    n_steps: int,
    step_s: float = 1.0,
    noise: FloatArray | None = None,
    reused_tokens: FloatArray | None = None,
) -> Workload:
    """Gather individual requests into steps; requests beyond ``n_steps`` are left out.

    ``reused_tokens`` are the leading tokens of each prompt that an earlier request had in common.
    """
    step = np.floor(arrival_s / step_s).astype(np.int64)
    inside = (step >= 0) & (step < n_steps)
    cell = (step * n_classes + class_index)[inside]
    size = n_steps * n_classes
    work = listed_work_ms(prompt_tokens, tables)[inside]

    def gather(weights: FloatArray) -> FloatArray:
        summed: FloatArray = np.bincount(cell, weights=weights, minlength=size).astype(np.float64)
        return summed.reshape(n_steps, n_classes)

    saved = None
    if reused_tokens is not None and (reused_tokens > 0).any():
        saved_each = saved_work_ms(prompt_tokens, reused_tokens, tables)[inside]
        saved = np.stack([gather(saved_each[:, q]) for q in range(3)], axis=-1)
    return Workload(
        arrivals=gather(np.ones(len(cell))),
        prompt_tokens=gather(prompt_tokens[inside]),
        prefill_work_ms=np.stack([gather(work[:, q]) for q in range(3)], axis=-1),
        noise=np.ones((n_steps, 2)) if noise is None else noise,
        phase=phases(np.zeros(n_steps, dtype=bool)),
        saved_work_ms=saved,
    )


@lru_cache(maxsize=64)
def traffic_of(task: TaskSpec, tables: ServingTables) -> Traffic:
    """The traffic source of a task on a table, built once."""
    if task.trace is not None:
        from simulator.recorded import RecordedTraffic  # it builds on this module

        return RecordedTraffic(task, tables)
    return SyntheticTraffic(task, tables)


# ---------------------------------------------------------------- the generator alone


class LoadStatistics:
    """Rolling statistics of the offered load that an agent is shown: rate, prompts, class shares.

    The serving dynamics keep the same statistics per row; a test holds the two together.
    """

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic

    def at(self, load: Workload, step: int) -> tuple[float, float, list[float]]:
        """Arrival rate (requests/s, 10-step EMA), mean prompt (tokens, 10 steps), shares (3 classes, 50 steps)."""
        stats = self._traffic.stats
        rate = self._traffic.nominal_rate_rps
        for total in load.arrivals[: step + 1].sum(axis=1):
            rate += EMA_WEIGHT * (float(total) - rate)
        recent = slice(max(0, step + 1 - PROMPT_WINDOW_STEPS), step + 1)
        count = float(load.arrivals[recent].sum())
        nominal = float(stats.prompt_mean @ (stats.shares / stats.shares.sum()))
        prompt = float(load.prompt_tokens[recent].sum()) / count if count > 0 else nominal
        window = load.arrivals[max(0, step + 1 - CLASS_WINDOW_STEPS) : step + 1].sum(axis=0)
        return rate, prompt, class_shares(stats, window)


EMA_WEIGHT: Final = 2.0 / 11.0
"""Weight of the newest second in the 10-step exponential moving average of the arrival rate."""


def class_shares(stats: ClassStats, counts: FloatArray) -> list[float]:
    """Shares of the three priority classes given the occurring classes' request counts; nominal shares if none came."""
    weights = counts if counts.sum() > 0 else stats.shares
    total = float(weights.sum())
    by_name = {name: float(w) / total for name, w in zip(stats.names, weights, strict=True)}
    return [by_name.get(name, 0.0) for name in PRIORITY_CLASSES]


def prompt_bucket(prompt_tokens: float) -> int:
    """Bucket 0-7 of a prompt length, the lookup table's key."""
    return bisect_right(PROMPT_BUCKET_EDGES, prompt_tokens)


class WorkloadGenerator:
    """A task's traffic, second by second, outside the environment.

    The queue kept here is the plan's simple one (each step serves at most ``batch_size`` requests), for looking at
    traffic on its own; in an episode the serving dynamics own the queue.
    """

    def __init__(self, task_id: TaskId, seed: int = 42) -> None:
        self._task = get_task(task_id)
        self._traffic = traffic_of(self._task, load_tables())
        self._statistics = LoadStatistics(self._traffic)
        self._seed = check_seed(seed)
        self._horizon = self._task.episode_length
        self._load = self._traffic.draw(self._seed, self._horizon)
        self._step = 0
        self._queue = 0

    def reset(self) -> WorkloadState:
        """Back to the first second of the same traffic."""
        self._step = 0
        self._queue = int(self._load.arrivals[0].sum())
        return self._state()

    def step(self, action: ServeAction) -> WorkloadState:
        """Serve up to ``batch_size`` waiting requests, then take the next second's arrivals."""
        self._queue -= min(action.batch_size, self._queue)
        self._step += 1
        if self._step >= self._horizon:  # a longer episode starts with the shorter one
            self._horizon *= 2
            self._load = self._traffic.draw(self._seed, self._horizon)
        self._queue += int(self._load.arrivals[self._step].sum())
        return self._state()

    def is_burst_active(self) -> bool:
        """Whether a flood is on in the current second."""
        return bool(self._load.phase[self._step] == PHASES.index("burst"))

    def _state(self) -> WorkloadState:
        rate, prompt, shares = self._statistics.at(self._load, self._step)
        return WorkloadState(
            arrival_rate=rate,
            mean_prompt_len=prompt,
            prompt_len_bucket=prompt_bucket(prompt),
            queue_depth=self._queue,
            priority_distribution=shares,
            is_burst=self.is_burst_active(),
            phase=PHASES[self._load.phase[self._step]],
        )
