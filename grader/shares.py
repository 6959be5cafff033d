"""A grade as a sum over the steps of its episode: what a reward has to pay for its mean to be the grade."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from grader.episode import FloatArray

QUANTITIES: Final = (
    "tokens_per_sec",
    "ttft_p50_ms",
    "slo_violations",
    "cost_per_1k",
    "memory_loss",
    "action_variance",
    "gpu_cost",
    "replica_changes",
)
"""What a step adds to a grade: metrics of the step, and two losses in [0, 1] that are no sums over steps.

``memory_loss`` is how far the peak of the GPU memory lies beyond the task's limit, in units of its slope;
``action_variance`` that of :func:`grader.task3_grader.action_variance`. Of these two a step adds the growth of their
value up to that step, times the number of steps. ``gpu_cost`` is the price of the step's GPUs
(:func:`grader.autoscaling_grader.gpu_cost`), ``replica_changes`` the replicas that its action added or removed, times
the number of steps.
"""


@dataclass(frozen=True, slots=True, eq=False)
class StepShares:
    """Shares of a step in the P parts of a grade: part p of step t is ``constants[p] + factors[p] @ quantities[t]``.

    Its mean over the steps is part p of the episode's breakdown before that is cut to [0, 1]; ``weights`` (P,) add the
    parts to the grade. ``factors`` is (P, 8) in the order of :data:`QUANTITIES`.
    """

    parts: tuple[str, ...]
    weights: FloatArray
    constants: FloatArray
    factors: FloatArray


def step_shares(**parts: tuple[float, float, dict[str, float]]) -> StepShares:
    """Make shares from one (weight, constant, factors by quantity) for each part."""
    factors = np.zeros((len(parts), len(QUANTITIES)))
    for p, (_, _, by_name) in enumerate(parts.values()):
        for name, factor in by_name.items():
            factors[p, QUANTITIES.index(name)] = factor
    weights = np.array([weight for weight, _, _ in parts.values()])
    return StepShares(tuple(parts), weights, np.array([constant for _, constant, _ in parts.values()]), factors)
