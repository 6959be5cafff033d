"""The reward of one step: R = alpha*T - beta*L - gamma*V - delta*C, every term in [0, 1].

T = tokens per second / MAX_THROUGHPUT, L = log(1 + TTFT/SLO) / log(1 + 5000/SLO), V = share of the step's requests that
missed their objective (plus, where the task grades memory, the memory beyond its limit on the grade's scale) and C =
cost of the step / (cost of the step + budget per step). L grows with the logarithm because a linear one saturates in
overload and then no longer changes with the action; C is one half when the step spends just its share of the budget.
With weights that sum to at most one on the negative side, R lies in [-1, 1] without clipping.

Plain Python that the build compiles to C (types in ``reward.pxd``).
"""

from __future__ import annotations

from typing import Any

import cython

if not cython.compiled:  # compiled, the same name is the C library's (see reward.pxd)
    from math import log1p

TTFT_CEILING_MS = 5000.0


class RewardKernel:
    """Kernel that writes the rewards of rows of a fleet batch.

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
