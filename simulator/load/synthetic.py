"""Synthetic load: Poisson arrivals with bursts or a daily pattern, lengths from a task's classes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist
from typing import Final

import numpy as np
from numpy.typing import NDArray

from inferencegym.errors import InvalidConfigError
from inferencegym.seeds import check_seed, generators
from inferencegym.spaces.forecast import forecast_rps
from inferencegym.tasks import Day, LengthDist, RandomLoad, TaskSpec
from simulator.hardware.tables import FloatArray, ServingTables
from simulator.load.source import (
    NOISE_STREAM,
    EpisodeRequests,
    Workload,
    class_stats,
    listed_work_ms,
    noise_factors,
    phases,
)

POOL_SIZE: Final = 1 << 16
POOL_SEED: Final = 20_240_418

_ARRIVALS_STREAM: Final = 0
_PROMPTS_STREAM: Final = 1
_REQUESTS_STREAM: Final = 3
_DAY_STREAM: Final = 4
_SURGE_STREAM: Final = 5
_LOAD_STREAM: Final = 6
DEVIATION_S: Final = 60.0
"""Time (s) in which a day's deviation from its forecast decays by a factor of e. Chosen: a tenth of an episode that
represents a day, so that a morning busier than forecast stays busier for hours."""


class SyntheticLoad:
    """Poisson arrivals with bursts or a daily pattern; prompts from each class's distribution.

    Prompts come from a pool of 65,536 per class, drawn once from a fixed seed. An episode reads the pool from a random
    offset on, so a reset needs two look-ups per step instead of thousands of draws.
    """

    def __init__(self, task: TaskSpec, tables: ServingTables) -> None:
        active = [i for i, c in enumerate(task.classes) if c.share > 0 or c.burst_share > 0]
        classes = [task.classes[i] for i in active]
        self._rate = task.arrival_rate_rps
        self._burst = task.burst
        self._task = task
        self._share = np.array([c.share for c in classes])
        self._burst_share = np.array([c.burst_share for c in classes])
        pools = [_prompt_pool(c.prompt, i) for i, c in zip(active, classes, strict=True)]
        works = [listed_work_ms(p, tables) for p in pools]
        # Running sums of prompt tokens and of the work at each tier lie side by side, so that one look-up reads all
        # four.
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

    def draw(self, seeds: Sequence[int], n_steps: int) -> Workload:
        """The workloads of L episodes, one per seed; only the random numbers are drawn seed by seed."""
        checked = [check_seed(seed) for seed in seeds]
        rate, phase = self._rates(n_steps)
        counts = np.empty((len(checked), *rate.shape), dtype=np.int64)
        ends = np.empty((len(checked), n_steps + 1, rate.shape[1]), dtype=np.int64)
        z = np.empty((len(checked), n_steps, 2))
        phases_each = np.broadcast_to(phase, (len(checked), n_steps))
        # NumPy draws the same numbers faster with a scalar rate than with an array of equal rates.
        lam = rate.item(0) if (rate == rate[0, 0]).all() else rate
        days = None
        if self._task.day is not None:
            days, surging = self._days(checked, n_steps, self._task.day)
            phases_each = phases(surging)
        elif self._task.random_load is not None:
            days, surging = self._random(checked, n_steps, self._task.random_load)
            phases_each = phases(surging)
        streams = generators(checked, (_ARRIVALS_STREAM, _PROMPTS_STREAM, NOISE_STREAM))
        for i, (arrivals, prompts, noise) in enumerate(streams):
            counts[i] = arrivals.poisson(lam if days is None else rate * days[i], size=rate.shape)
            ends[i, 0] = [prompts.integers(POOL_SIZE) for _ in range(rate.shape[1])]
            noise.standard_normal(out=z[i])
        np.cumsum(counts, axis=1, out=ends[:, 1:])
        ends[:, 1:] += ends[:, :1]
        sums = np.empty((*counts.shape, 4))
        for c in range(rate.shape[1]):
            at = _pooled(self._sums[c], ends[:, :, c].ravel()).reshape(len(checked), n_steps + 1, 4)
            np.subtract(at[:, 1:], at[:, :-1], out=sums[:, :, c])
        return Workload(counts.astype(np.float64), sums[..., 0], sums[..., 1:], noise_factors(z), phases_each)

    def requests(self, seed: int, n_steps: int) -> EpisodeRequests:
        """Individual requests with the prompts of :meth:`draw`; arrivals are uniform within each second."""
        counts = self.draw([seed], n_steps).arrivals[0].astype(np.int64)
        steps = np.arange(n_steps)
        prompts, rng = next(iter(generators([check_seed(seed)], (_PROMPTS_STREAM, _REQUESTS_STREAM))))
        each = []
        for c, (sums, outputs) in enumerate(zip(self._sums, self.stats.output_cdf_tokens, strict=True)):
            n = int(counts[:, c].sum())
            pool = np.diff(sums[:, 0])
            stretch = pool[(prompts.integers(POOL_SIZE) + np.arange(n)) % POOL_SIZE]
            arrival_s = np.repeat(steps, counts[:, c]) + rng.random(n)
            each.append((arrival_s, stretch, rng.choice(outputs, n), np.full(n, c), np.zeros(n)))
        return EpisodeRequests.sorted_by_arrival(*(np.concatenate(column) for column in zip(*each, strict=True)))

    def _days(self, seeds: Sequence[int], n_steps: int, day: Day) -> tuple[FloatArray, NDArray[np.bool_]]:
        """Factors on the mean rate (L, T, 1), surges (L, T); a longer day begins with the shorter one."""
        forecast = forecast_rps(self._task, np.arange(n_steps, dtype=np.float64)) / self._rate
        factors, surging = np.empty((len(seeds), n_steps)), np.zeros((len(seeds), n_steps), dtype=bool)
        for i, (errors, surges) in enumerate(generators(seeds, (_DAY_STREAM, _SURGE_STREAM))):
            surging[i] = self._surging(surges, n_steps, day.surges, day.surge_duration_steps)
            strays = _strays(errors, n_steps, day.forecast_error)
            factors[i] = forecast * strays * np.where(surging[i], day.surge_multiplier, 1.0)
        return factors[..., None], surging

    def _random(self, seeds: Sequence[int], n_steps: int, load: RandomLoad) -> tuple[FloatArray, NDArray[np.bool_]]:
        """Factors on each class's rate (L, T, C) and whether a surge is on (L, T), as :class:`RandomLoad` has them."""
        seconds, n_classes = np.arange(n_steps), len(self._share)
        factors = np.empty((len(seeds), n_steps, n_classes))
        surging = np.zeros((len(seeds), n_steps), dtype=bool)
        for i, (drawn, errors, surges) in enumerate(generators(seeds, (_LOAD_STREAM, _DAY_STREAM, _SURGE_STREAM))):
            level, wave_s, multiplier = (
                float(np.exp(drawn.uniform(*np.log(bounds))))
                for bounds in (load.level, load.wave_s, load.surge_multiplier)
            )
            wave, deviation, n_surges, surge_s = (
                drawn.uniform(*bounds) for bounds in (load.wave, load.deviation, load.surges, load.surge_s)
            )
            waves = np.exp(wave * np.sin(2.0 * np.pi * (seconds / wave_s + drawn.random())))
            surging[i] = self._surging(surges, n_steps, n_surges, round(surge_s))
            total = level * waves * _strays(errors, n_steps, deviation) * np.where(surging[i], multiplier, 1.0)
            # Steady and in surges, (2, C): factors on the task's shares that keep their sum at 1.
            least, most = (math.log(bound) for bound in load.class_factor)
            of_classes = np.exp(drawn.uniform(least, most, size=(2, n_classes)))
            of_classes /= (of_classes * self._share).sum(axis=1, keepdims=True)
            factors[i] = total[:, None] * of_classes[surging[i].astype(np.int64)]
        return factors, surging

    def _surging(self, rng: np.random.Generator, n_steps: int, surges: float, duration_steps: int) -> NDArray[np.bool_]:
        """Whether a surge is on, (T,), if an episode of the task's length has so many on average."""
        on = np.zeros(n_steps, dtype=bool)
        for begin in np.flatnonzero(rng.random(n_steps) < surges / self._task.episode_length):
            on[begin : begin + duration_steps] = True
        return on

    @lru_cache(maxsize=16)  # noqa: B019 - a task's few episode lengths
    def _rates(self, n_steps: int) -> tuple[FloatArray, NDArray[np.int64]]:
        steps = np.arange(n_steps)
        burst = np.array([self._burst is not None and self._burst.active(int(t)) for t in steps], dtype=bool)
        rate = self._rate * np.broadcast_to(self._share, (n_steps, len(self._share))).copy()
        if self._burst is not None:
            rate[burst] = self._burst.rate_rps * self._burst_share
        return rate, phases(burst)


def _strays(rng: np.random.Generator, n_steps: int, deviation: float) -> FloatArray:
    """A slow log-normal factor with mean 1, (T,); ``deviation`` is the standard deviation of its logarithm."""
    keep = float(np.exp(-1.0 / DEVIATION_S))
    z = rng.standard_normal(n_steps)
    z[1:] *= np.sqrt(1.0 - keep * keep)
    for t in range(1, n_steps):
        z[t] += keep * z[t - 1]
    factor: FloatArray = np.exp(deviation * z - 0.5 * deviation**2)
    return factor


def length_quantiles(dist: LengthDist, points: int = 2048) -> FloatArray:
    """Lengths at ``points`` evenly spaced quantiles (mid-points), clamped to the distribution's bounds."""
    q = (np.arange(points) + 0.5) / points
    if dist.kind == "uniform":
        return dist.low + q * (dist.high - dist.low)
    if dist.kind == "lognormal":
        standard = NormalDist()
        z = np.array([standard.inv_cdf(float(p)) for p in q])
        return np.clip(np.exp(dist.mu + dist.sigma * z), dist.low, dist.high)
    raise InvalidConfigError(f"length distribution {dist.kind!r} needs a recorded trace")


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
    """Running sums (N, k) at these positions (N,) of a pool that repeats endlessly."""
    n = len(sums) - 1
    found: FloatArray = sums[index % n]
    again = np.flatnonzero(index >= n)
    found[again] += (index[again] // n)[:, None] * sums[-1]
    return found
