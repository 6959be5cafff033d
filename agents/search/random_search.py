"""Random search: the constant action with the best grade of as many random ones as a learner's episodes pay for.

The baseline that tuners are compared with: where knobs of a serving engine are tuned by constant settings, random
search is hard to beat (published comparisons found Bayesian optimisation no better).
"""

from __future__ import annotations

from typing import Final

from agents.protocol import FloatArray
from agents.search.reward_grade_agreement import random_settings
from agents.search.solver import Solver
from agents.seeds import TRAINING_SEEDS
from inferencegym.tasks import Calibration, TaskSpec

STEPS: Final = 50_000
"""Steps that it may play: as many as `inferencegym train` takes unless told otherwise, 250 episodes of 200."""
SEEDS: Final = TRAINING_SEEDS[:4]
"""Each action plays these, so that a lucky load does not decide."""


def random_search(task: TaskSpec, calibration: Calibration, steps: int = STEPS) -> tuple[FloatArray, float]:
    """The best of as many random constant actions (5,) as ``steps`` of 1 s allow, and its grade on :data:`SEEDS`."""
    n_actions = max(1, steps // (task.episode_length * len(SEEDS)))
    actions = random_settings(n_actions, task)
    grades = Solver(task, calibration).values_of_actions(actions, SEEDS)
    best = int(grades.argmax())
    return actions[best], float(grades[best])
