"""Offered load of an episode: arrivals, prompt lengths and prefill work by second and class.

Everything is drawn at reset and nothing during a step, so every policy meets the same requests, and a longer episode
starts with the shorter one. The load sources (:class:`LoadSource`) are :mod:`simulator.load.synthetic` and
:mod:`simulator.load.recorded`; :func:`simulator.workload.load_source` chooses the source of a task.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from inferencegym.models import PHASES
from simulator.hardware.tables import FloatArray, ServingTables

NOISE_STD: Final = 0.05
"""Relative standard deviation of the jitter on TTFT and TPOT."""
NOISE_STREAM: Final = 2
"""Random stream of an episode's seed (``default_rng([seed, stream])``) from which every source draws the jitter."""
WARMUP_STEPS: Final = 10
COOLDOWN_STEPS: Final = 10
CLASS_WINDOW_STEPS: Final = 50
PROMPT_WINDOW_STEPS: Final = 10
EMA_WEIGHT: Final = 2.0 / 11.0
"""Weight of the newest second in the 10-step exponential moving average of the arrival rate."""
REFERENCE_BATCH: Final = 32
"""Batch size for which prefill work is listed; the dynamics scale it to the actual batch."""
PROMPT_QUANTILES: Final = (np.arange(32) + 0.5) / 32
REUSE_LOG2_FIRST: Final = 10.0
"""Logarithm (base 2) of the smallest cache size at which reuse is listed; sizes double from there."""


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """The offered load of one episode of T steps and C classes (only classes that occur), or of L episodes.

    ``arrivals`` (T, C) requests, ``prompt_tokens`` (T, C) their summed prompts, ``prefill_work_ms`` (T, C, 3) their
    summed prefill work per precision tier, ``noise`` (T, 2) factors on TTFT and TPOT, ``phase`` (T,) index into
    ``PHASES``. ``saved_work_ms`` (T, C, 3) is the part of that work that repeats earlier prefixes; None if no prefixes
    repeat. With L episodes every array has the episode as its first axis.
    """

    arrivals: FloatArray
    prompt_tokens: FloatArray
    prefill_work_ms: FloatArray
    noise: FloatArray
    phase: NDArray[np.int64]
    saved_work_ms: FloatArray | None = None

    def episode(self, index: int) -> Workload:
        """The load of one of the L episodes alone."""
        saved = None if self.saved_work_ms is None else self.saved_work_ms[index]
        return Workload(
            self.arrivals[index],
            self.prompt_tokens[index],
            self.prefill_work_ms[index],
            self.noise[index],
            self.phase[index],
            saved,
        )


@dataclass(frozen=True, slots=True, eq=False)
class ClassStats:
    """Statistics of each occurring class that the dynamics need in advance; arrays are (C,) or (C, ...).

    ``prompt_mean`` tokens, ``work_mean_ms`` (C, 3) mean listed prefill work, ``work_cv2`` squared coefficient of
    variation of that work, ``prompt_quantile_tokens`` (C, P) and ``output_cdf_tokens`` (C, Q) lengths at evenly spaced
    quantiles. ``reuse_hit`` (K,) is the hit rate of repeated prefix tokens in a KV cache of
    ``2 ** (REUSE_LOG2_FIRST + i)`` tokens; None if no prefixes repeat.
    """

    names: tuple[str, ...]
    shares: FloatArray
    slo_ms: FloatArray
    complexity_penalty: FloatArray
    prompt_mean: FloatArray
    work_mean_ms: FloatArray
    work_cv2: FloatArray
    prompt_quantile_tokens: FloatArray
    output_cdf_tokens: FloatArray
    reuse_hit: FloatArray | None = None


@dataclass(frozen=True, slots=True, eq=False)
class EpisodeRequests:
    """Individual requests of an episode, arrays (N,): arrival (s, ascending), lengths (tokens), class (0 first served).

    ``class_index`` counts only the classes that occur, as the columns of :class:`Workload` do. ``reused_tokens`` are
    the leading prompt tokens shared with an earlier request; ``follows`` as in
    :class:`simulator.events.requests.Requests`.
    """

    arrival_s: FloatArray
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    class_index: NDArray[np.int64]
    reused_tokens: NDArray[np.int64]
    follows: NDArray[np.int64] | None = None

    @classmethod
    def sorted_by_arrival(
        cls,
        arrival_s: FloatArray,
        prompt_tokens: FloatArray,
        output_tokens: FloatArray,
        class_index: NDArray[np.int64],
        reused_tokens: FloatArray,
    ) -> EpisodeRequests:
        """Requests sorted by arrival; lengths are rounded to whole tokens, at least 1."""
        order = np.argsort(arrival_s, kind="stable")
        prompt, output = (np.maximum(1, np.rint(x[order])).astype(np.int64) for x in (prompt_tokens, output_tokens))
        reused = np.rint(reused_tokens[order]).astype(np.int64)
        return cls(arrival_s[order], prompt, output, class_index[order], reused)


class LoadSource(Protocol):
    """A source of workloads; a seed gives the same workload whether drawn alone or together with others."""

    stats: ClassStats
    nominal_rate_rps: float

    def draw(self, seeds: Sequence[int], n_steps: int) -> Workload:
        """The workloads of L episodes, one per seed; every array has the episode as its first axis.

        Raises :class:`InvalidConfigError` for a seed that :func:`check_seed` refuses.
        """
        ...

    def requests(self, seed: int, n_steps: int) -> EpisodeRequests:
        """Individual requests of an episode; summed by second and class they are the workload of :meth:`draw`."""
        ...


def noise_factors(z: FloatArray) -> FloatArray:
    """Factors on TTFT and TPOT from standard normal numbers: mean 1, deviation 5%, clipped at four deviations."""
    return 1.0 + NOISE_STD * np.clip(z, -4.0, 4.0)


def phases(burst: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Phase index per step (last axis): warm-up, burst while a flood is on, cooldown for ten steps after it, steady."""
    steps = np.arange(burst.shape[-1])
    last_burst = np.maximum.accumulate(np.where(burst, steps, -COOLDOWN_STEPS - 1), axis=-1)
    phase = np.where(steps < WARMUP_STEPS, PHASES.index("warmup"), PHASES.index("steady"))
    phase = np.where(steps - last_burst <= COOLDOWN_STEPS, PHASES.index("cooldown"), phase)
    return np.where(burst, PHASES.index("burst"), phase).astype(np.int64)


def class_stats(
    names: Sequence[str],
    shares: Sequence[float] | FloatArray,
    slo_ms: Sequence[float],
    complexity_penalty: Sequence[float],
    prompts: Sequence[FloatArray],
    works: Sequence[FloatArray],
    outputs: Sequence[FloatArray],
) -> ClassStats:
    """Statistics of each class from samples of its prompts (tokens), listed work (ms, (N, 3)) and output quantiles."""
    return ClassStats(
        names=tuple(names),
        shares=np.asarray(shares, dtype=np.float64),
        slo_ms=np.array([min(s, 1e15) for s in slo_ms], dtype=np.float64),
        complexity_penalty=np.asarray(complexity_penalty, dtype=np.float64),
        prompt_mean=np.array([p.mean() for p in prompts]),
        work_mean_ms=np.stack([w.mean(axis=0) for w in works]),
        work_cv2=np.array([float((w[:, 0].std() / w[:, 0].mean()) ** 2) for w in works]),
        prompt_quantile_tokens=np.stack([np.quantile(p, PROMPT_QUANTILES) for p in prompts]),
        output_cdf_tokens=np.stack(list(outputs)),
    )


def listed_work_ms(prompt_tokens: FloatArray, tables: ServingTables) -> FloatArray:
    """Prefill work (N, 3) in ms of prompts (N,) at each precision tier, when prompts fill the engine's token budget."""
    batch = int(np.argmin(np.abs(tables.axes["batch_size"] - REFERENCE_BATCH)))
    listed = tables.prefill_saturated_ms[:, batch]
    points = tables.axes["prompt_len_bucket"]
    return np.stack([interp_log(prompt_tokens, points, listed[tier]) for tier in range(len(listed))], axis=-1)


def saved_work_ms(prompt_tokens: FloatArray, reused_tokens: FloatArray, tables: ServingTables) -> FloatArray:
    """Prefill work (N, 3) in ms that prompts (N,) save if their first ``reused_tokens`` are in the cache.

    The rest of the prompt still attends to the prefix, so only the prefix's own work is saved. At least one token is
    always computed.
    """
    reused = np.minimum(reused_tokens, prompt_tokens - 1.0)
    return np.where(reused[:, None] > 0.0, listed_work_ms(reused, tables), 0.0)


def interp_log(x: FloatArray, points: FloatArray, values: FloatArray) -> FloatArray:
    """Interpolate linearly in the logarithms of both axes; beyond the grid the outermost slopes continue."""
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
    reused_tokens: FloatArray | None = None,
) -> Workload:
    """Sum individual requests by step; requests after ``n_steps`` are left out.

    ``reused_tokens`` are the leading tokens of each prompt that are shared with an earlier request.
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
        noise=np.ones((n_steps, 2)),
        phase=phases(np.zeros(n_steps, dtype=bool)),
        saved_work_ms=saved,
    )
