"""Reward of a step and score of an episode of the traffic controller.

The environment puts the final score into its last ``info``, the grader computes it from a log, and the planner
maximises it: all use these formulas. They work on arrays, element by element.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from env.traffic.model import BoolArray, FloatArray, IntArray, TrafficParams, TrafficServer
from env.traffic.tasks import GradeSpec

CRASH_REWARD: Final = -10.0
LATENCY_FREE_MS: Final = 200.0
"""Latency up to which the reward has no penalty."""
LATENCY_SPAN_MS: Final = 800.0
LATENCY_WEIGHT: Final = 0.5
QUEUE_WEIGHT: Final = 0.3


def step_reward(params: TrafficParams, accept_share: FloatArray, server: TrafficServer) -> FloatArray:
    """Reward of one step, ``(B,)``.

    The share of requests admitted, minus half of the latency beyond 200 ms (in units of 800 ms), minus 0.3 of the
    queue's share of its limit; a crash always gives -10.
    """
    latency_excess = np.maximum(0.0, (server.latency_ms - LATENCY_FREE_MS) / LATENCY_SPAN_MS)
    queue_fill = server.queue_requests / params.max_queue_requests
    served = accept_share - LATENCY_WEIGHT * latency_excess - QUEUE_WEIGHT * queue_fill
    return np.where(server.crashed, CRASH_REWARD, served)


@dataclass(frozen=True, slots=True)
class EpisodeTotals:
    """Sums over the steps that B episodes have taken so far, each ``(B,)``; the step of a crash counts as taken."""

    steps: IntArray
    crashed: BoolArray
    latency_ms: FloatArray
    allowed: FloatArray
    incoming: FloatArray
    short_queue_steps: IntArray

    @classmethod
    def zeros(cls, n_rows: int) -> EpisodeTotals:
        """Totals of episodes that have not begun."""
        counts, sums = np.zeros(n_rows, dtype=np.int64), np.zeros(n_rows)
        return cls(counts, np.zeros(n_rows, dtype=np.bool_), sums, sums, sums, counts)

    def add(self, grade: GradeSpec, server: TrafficServer, allowed: FloatArray, incoming: FloatArray) -> EpisodeTotals:
        """Totals with one more step; arrays broadcast against each other."""
        return replace(
            self,
            steps=self.steps + 1,
            crashed=server.crashed,
            latency_ms=self.latency_ms + server.latency_ms,
            allowed=self.allowed + allowed,
            incoming=self.incoming + incoming,
            short_queue_steps=self.short_queue_steps + (server.queue_requests < short_queue_limit(grade)),
        )

    def rows(self, index: IntArray) -> EpisodeTotals:
        """The episodes at these positions."""
        return EpisodeTotals(*(getattr(self, name)[index] for name in self.__slots__))

    def survived_steps(self) -> IntArray:
        """Steps taken without a crash."""
        return self.steps - self.crashed

    def mean_latency_ms(self) -> FloatArray:
        """Mean over the steps taken; 0 before the first."""
        return self.latency_ms / np.maximum(self.steps, 1)

    def throughput(self) -> FloatArray:
        """Requests admitted / requests that arrived; 0 before the first."""
        return np.divide(self.allowed, self.incoming, out=np.zeros_like(self.allowed), where=self.incoming > 0)

    def short_queue_share(self) -> FloatArray:
        """Share of the steps taken that ended with a short queue; 0 before the first."""
        return self.short_queue_steps / np.maximum(self.steps, 1)


def short_queue_limit(grade: GradeSpec) -> float:
    """Queue length below which a step has a short queue; infinite if the grade does not use it."""
    return grade.params.get("short_queue_requests", np.inf)


def final_score(grade: GradeSpec, totals: EpisodeTotals, max_steps: int) -> FloatArray:
    """Scores in [0, 1] of B episodes of a task with ``max_steps`` steps.

    Every rule scales with the share of the episode that was survived, so an episode that ends early, by a crash or by
    the end of a log, never beats the same actions continued to the end without a crash.
    """
    return RULES[grade.kind].score(grade.params, totals, totals.survived_steps() / max_steps)


def _mean_latency_limit(params: Mapping[str, float], totals: EpisodeTotals, survived: FloatArray) -> FloatArray:
    """1 below the latency limit, ``score_above_limit`` at or above it, 0 after a crash."""
    reached = np.where(totals.mean_latency_ms() < params["limit_ms"], 1.0, params["score_above_limit"])
    return np.where(totals.crashed, 0.0, reached * survived)


def _survival_latency(params: Mapping[str, float], totals: EpisodeTotals, survived: FloatArray) -> FloatArray:
    """Share of the episode survived x a factor that falls linearly with the mean latency."""
    return survived * latency_factor(params, totals.mean_latency_ms())


def latency_factor(params: Mapping[str, float], mean_latency_ms: FloatArray) -> FloatArray:
    """1 up to ``full_score_ms``, ``floor_factor`` from ``floor_ms`` on, linear between."""
    way = (mean_latency_ms - params["full_score_ms"]) / (params["floor_ms"] - params["full_score_ms"])
    return 1.0 - (1.0 - params["floor_factor"]) * np.clip(way, 0.0, 1.0)


def _throughput_queue(params: Mapping[str, float], totals: EpisodeTotals, survived: FloatArray) -> FloatArray:
    """Weighted throughput and short-queue share; after a crash their product, reduced."""
    weight = params["throughput_weight"]
    throughput, short = totals.throughput(), totals.short_queue_share()
    whole = weight * throughput + (1.0 - weight) * short
    return np.where(totals.crashed, params["crash_factor"] * throughput * short, whole) * survived


@dataclass(frozen=True, slots=True)
class GradeRule:
    """A scoring rule, and the properties that a planner may rely on.

    The score depends on the totals through ``steps``, ``crashed``, the sum named by ``criterion`` (it never falls when
    that sum gets better) and, where ``counts_short_queues``, on ``short_queue_steps``.
    """

    score: Callable[[Mapping[str, float], EpisodeTotals, FloatArray], FloatArray]
    criterion: Callable[[EpisodeTotals], FloatArray]
    """The sum to maximise, ``(B,)``."""
    counts_short_queues: bool


RULES: Final[dict[str, GradeRule]] = {
    "mean_latency_limit": GradeRule(_mean_latency_limit, lambda totals: -totals.latency_ms, False),
    "survival_latency": GradeRule(_survival_latency, lambda totals: -totals.latency_ms, False),
    "throughput_queue": GradeRule(_throughput_queue, lambda totals: totals.allowed, True),
}
"""Kind of grade, as :class:`env.traffic.tasks.TrafficTaskEntry` allows them -> its rule."""
