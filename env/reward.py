"""The reward of one step, by the plan's formula or as the step's share of the task's grade.

The plan's is R = alpha*T - beta*L - gamma*V - delta*C, every term in [0, 1]. T = tokens per second / MAX_THROUGHPUT,
L = log(1 + TTFT/SLO) / log(1 + 5000/SLO), V = share of the step's requests that missed their objective (plus, where the
task grades memory, the memory beyond its limit on the grade's scale) and C = cost of the step / (cost of the step +
budget per step). L grows with the logarithm because a linear one saturates in overload and then no longer changes with
the action; C is one half when the step spends just its share of the budget. With weights that sum to at most one on the
negative side, R lies in [-1, 1] without clipping.

The grade's is what :mod:`grader.rule` says that a step adds to the grade: its mean over a whole episode is the grade
before parts that are sums are cut to [0, 1]. It has no bounds. The same shares give the grade of the seconds so far,
and with it the reward "score": how far the step raises the share of the episode played times that grade. The rewards of
a whole episode sum to its score.

Plain Python that the build compiles to C (types in ``reward.pxd``).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from inferencegym import plain_cython as cython

if not cython.compiled:  # compiled, the same names are the C library's (see reward.pxd)
    from math import log1p, sqrt

    rint = round

TTFT_CEILING_MS = 5000.0
PLAN_TERMS = ("throughput", "latency", "slo_violations", "cost")
RUNNING = (
    "memory_loss",
    "action_variance",
    "batch_before",
    "batch_mean",
    "batch_squares",
    "kv_before",
    "kv_mean",
    "kv_squares",
    "replicas_before",
)
"""Arrays that :class:`GradeRewardKernel` keeps between steps: the two quantities of :mod:`grader.rule` that are no
sums, then for batch size and KV budget the last value, and mean and sum of squared deviations of the changes so far;
the replicas asked for last."""


class RewardKernel:
    """Kernel that writes the plan's rewards of rows of a fleet batch.

    ``reward`` (B,) and ``terms`` (4, B), in the order T, L, V, C, are written; the metric arrays (B,) are only read.
    """

    def __init__(self, constants: Any, arrays: Any) -> None:
        for name, value in constants.items():
            setattr(self, name, value)
        for name, value in arrays.items():
            setattr(self, name, value)
        self.latency_scale = 1.0 / log1p(TTFT_CEILING_MS / self.slo_ms)

    def compute(self, lo: int, hi: int) -> None:
        """Write the rewards of rows ``lo`` (included) to ``hi`` (excluded)."""
        with cython.nogil:
            for b in range(lo, hi):
                throughput = min(1.0, self.tokens_per_sec[b] / self.max_throughput_tps)
                latency = min(1.0, log1p(self.ttft_p50_ms[b] / self.slo_ms) * self.latency_scale)
                # Memory beyond a graded limit counts like an objective that every request missed; without this term
                # the reward would favour a KV pool that the grade penalises.
                beyond = max(0.0, self.gpu_memory_gb[b] - self.memory_limit_gb) / self.memory_slope_gb
                violations = min(1.0, self.violation_share[b] + beyond)
                cost = self.cost_per_1k[b] / (self.cost_per_1k[b] + self.budget_per_step)
                self.terms[0, b] = throughput
                self.terms[1, b] = latency
                self.terms[2, b] = violations
                self.terms[3, b] = cost
                self.reward[b] = (
                    self.alpha * throughput - self.beta * latency - self.gamma * violations - self.delta * cost
                )


class GradeRewardKernel:
    """Kernel that writes shares of the grade as rewards of rows of a fleet batch.

    ``terms`` (P, B) are the step's parts of the grade and ``reward`` (B,) their weighted sum; time, metrics and knobs
    (B,) are only read. ``weights`` and ``shares`` (P,) and ``factors`` (P, 8) are those of
    :class:`grader.rule.StepShares`, ``shares`` its constants.

    With ``pays_score`` rewards and terms are instead what the step adds to the score and to its parts, all of which are
    cut as the score is.

    The arrays of :data:`RUNNING` (B,) are what parts that are no sums need of the steps before, ``sums`` (8, B) the
    quantities of :data:`grader.rule.QUANTITIES`, summed over the steps so far; ``of_episode`` (8,) says of which the
    grade has the sum. The first step of an episode starts them anew, whatever was played in the row before.
    """

    def __init__(self, constants: Any, arrays: Any) -> None:
        for name, value in constants.items():
            setattr(self, name, value)
        for name, value in arrays.items():
            setattr(self, name, value)
        for name in RUNNING:
            setattr(self, name, np.zeros(len(arrays["reward"])))
        self.sums = np.zeros((self.factors.shape[1], len(arrays["reward"])))
        self.parts = np.zeros(self.weights.shape[0])
        self.earned = np.zeros((self.weights.shape[0] + 1, len(arrays["reward"])))

    def compute(self, lo: int, hi: int) -> None:
        """Write the rewards of rows ``lo`` (included) to ``hi`` (excluded)."""
        with cython.nogil:
            for b in range(lo, hi):
                self._compute_row(b)

    def _compute_row(self, b: int) -> None:
        first = self.time[b] == 1
        loss_before = 0.0 if first else self.memory_loss[b]
        variance_before = 0.0 if first else self.action_variance[b]
        beyond = (self.gpu_memory_gb[b] - self.memory_limit_gb) / self.memory_slope_gb
        self.memory_loss[b] = max(loss_before, min(max(0.0, beyond), 1.0))
        self._add_change(b, first)
        growth = self.n_steps * (self.memory_loss[b] - loss_before)
        variance_growth = self.n_steps * (self.action_variance[b] - variance_before)
        violations = rint(self.slo_violations[b])  # as logs have them
        gpu_cost = self.cost_per_1k[b] * max(self.tokens_per_sec[b] / 1000.0, self.min_billed_ktokens_per_s)
        before = self.start_replicas if first else self.replicas_before[b]
        changes = self.n_steps * abs(self.replicas[b] - before)
        self.replicas_before[b] = self.replicas[b]
        if first:
            for k in range(self.sums.shape[0]):
                self.sums[k, b] = 0.0
        self.sums[0, b] += self.tokens_per_sec[b]
        self.sums[1, b] += self.ttft_p50_ms[b]
        self.sums[2, b] += violations
        self.sums[3, b] += self.cost_per_1k[b]
        self.sums[4, b] += growth
        self.sums[5, b] += variance_growth
        self.sums[6, b] += gpu_cost
        self.sums[7, b] += changes
        if self.pays_score:
            self._pay_score(b, first)
            return
        total = 0.0
        for p in range(self.weights.shape[0]):
            share = (
                self.shares[p]
                + self.factors[p, 0] * self.tokens_per_sec[b]
                + self.factors[p, 1] * self.ttft_p50_ms[b]
                + self.factors[p, 2] * violations
                + self.factors[p, 3] * self.cost_per_1k[b]
                + self.factors[p, 4] * growth
                + self.factors[p, 5] * variance_growth
                + self.factors[p, 6] * gpu_cost
                + self.factors[p, 7] * changes
            )
            self.terms[p, b] = share
            total += self.weights[p] * share
        self.reward[b] = total

    def grade_so_far(self, b: int) -> float:
        """Grade of the seconds that row ``b`` has played, at least one; ``parts`` (P,) is overwritten with its parts.

        It equals :func:`grader.grader.grade_episode` of their log, up to rounding.
        """
        grade = 0.0
        for p in range(self.weights.shape[0]):
            self.parts[p] = self._part_so_far(p, b)
            grade += self.weights[p] * self.parts[p]
        return min(max(grade, 0.0), 1.0)

    def _part_so_far(self, p: int, b: int) -> float:
        part = self.shares[p]
        for k in range(self.sums.shape[0]):
            over = self.n_steps if self.of_episode[k] > 0.0 else self.time[b]
            part += self.factors[p, k] * self.sums[k, b] / over
        return min(max(part, self.lowest[p]), 1.0)

    def _pay_score(self, b: int, first: bool) -> None:
        """Write what the step adds to the score and its parts; ``earned`` (P + 1, B) keeps them, the score last."""
        n_parts = self.weights.shape[0]
        played, grade = self.time[b] / self.n_steps, 0.0
        for p in range(n_parts):
            part = self._part_so_far(p, b)
            grade += self.weights[p] * part
            self.terms[p, b] = played * part - (0.0 if first else self.earned[p, b])
            self.earned[p, b] = played * part
        grade = played * min(max(grade, 0.0), 1.0)
        self.reward[b] = grade - (0.0 if first else self.earned[n_parts, b])
        self.earned[n_parts, b] = grade

    def _add_change(self, b: int, first: bool) -> None:
        """Add the change of the knobs since the last step to the action variance (Welford's recurrence)."""
        if first:
            self.batch_mean[b] = self.batch_squares[b] = 0.0
            self.kv_mean[b] = self.kv_squares[b] = 0.0
            self.action_variance[b] = 0.0
        else:
            n = self.time[b] - 1.0
            change = self.batch_size[b] - self.batch_before[b]
            off = change - self.batch_mean[b]
            self.batch_mean[b] += off / n
            self.batch_squares[b] += off * (change - self.batch_mean[b])
            change = self.kv_budget[b] - self.kv_before[b]
            off = change - self.kv_mean[b]
            self.kv_mean[b] += off / n
            self.kv_squares[b] += off * (change - self.kv_mean[b])
            spread = sqrt(self.batch_squares[b] / n) / 512.0 + sqrt(self.kv_squares[b] / n)
            self.action_variance[b] = min(spread / 0.5, 1.0)
        self.batch_before[b] = self.batch_size[b]
        self.kv_before[b] = self.kv_budget[b]
