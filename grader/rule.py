"""A kind of grade as one record, and a grade as a sum of the steps' contributions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from grader.episode import Episode, FloatArray, Scored
from inferencegym.grade_keys import GradeKeys
from inferencegym.tasks import Calibration, TaskSpec

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
"""Quantities of a step that contribute to a grade: metrics, and values derived from them.

``memory_loss`` in [0, 1] is how far the peak of the GPU memory lies beyond the task's limit, in units of its slope;
``action_variance`` in [0, 1] is that of :func:`grader.kinds.four_term.action_variance`. Neither is a sum over steps: a
step contributes the increase of their value, times the number of steps.
``gpu_cost`` is the price of the step's GPUs (:func:`grader.kinds.autoscaling.gpu_cost`), ``replica_changes`` the
replicas that its action added or removed, times the number of steps.
"""
OF_EPISODE: Final = frozenset({"cost_per_1k", "memory_loss", "action_variance"})
"""Quantities that count against the whole episode; of the others a grade has the mean over the seconds."""


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
    lowest: FloatArray
    """Lower bounds (P,) to which the grade cuts its parts; the upper one is 1."""


def step_shares(
    lowest: Mapping[str, float] | None = None, **parts: tuple[float, float, dict[str, float]]
) -> StepShares:
    """Make shares from one (weight, constant, factors by quantity) for each part; ``lowest`` where that is not 0."""
    factors = np.zeros((len(parts), len(QUANTITIES)))
    for p, (_, _, by_name) in enumerate(parts.values()):
        for name, factor in by_name.items():
            factors[p, QUANTITIES.index(name)] = factor
    weights = np.array([weight for weight, _, _ in parts.values()])
    constants = np.array([constant for _, constant, _ in parts.values()])
    return StepShares(tuple(parts), weights, constants, factors, np.array([(lowest or {}).get(p, 0.0) for p in parts]))


@dataclass(frozen=True, slots=True)
class GradeRule:
    """One kind of grade. Its functions get the task, whose ``grade`` holds the keys, and the task's calibration."""

    keys: type[GradeKeys]
    """Keys of the task file and their bounds."""
    score: Callable[[TaskSpec, Calibration, Episode], Scored]
    """Scores (...,) of episodes (..., T) and the parts of each. Raises MalformedLogError where a metric is missing."""
    shares: Callable[[TaskSpec, Calibration, int], StepShares]
    """Contribution of one step to the score of an episode of this many steps, for the reward "grade"."""
    report: Callable[[TaskSpec, Calibration, Episode, Mapping[str, float]], tuple[dict[str, float], str]]
    """Measured quantities behind the parts of one episode (T,), and a sentence of feedback."""
    words: Callable[[TaskSpec, Calibration | None], str]
    """The formula with the task's numbers, for GET /tasks; every part is cut to [0, 1]. Without a calibration it names
    the constants."""


def unit(x: FloatArray) -> FloatArray:
    """Cut to [0, 1]."""
    return np.clip(x, 0.0, 1.0)
