"""A spread of policies from bad to good, and whether what they earn agrees with how they are graded."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agents.evaluate import spearman
from agents.modes import ActionsAgent
from agents.play import play
from agents.protocol import Agent, FloatArray
from agents.registry import make_agent
from agents.seeds import HELD_OUT_SEEDS
from env.action import action_mask, snap
from inferencegym.models import SPEC_LENGTHS
from inferencegym.tasks import TaskSpec

CONSTANTS: int = 60
SEEDS: Sequence[int] = HELD_OUT_SEEDS[:10]


def random_settings(n: int, task: TaskSpec, seed: int = 0) -> FloatArray:
    """Constant actions (n, 5) drawn over all live knobs (``batch_size`` on a logarithmic scale)."""
    rng = np.random.default_rng([seed, 5])
    drawn = np.column_stack(
        [
            rng.uniform(0.1, 1.0, n),
            rng.choice(SPEC_LENGTHS, n),
            2.0 ** rng.uniform(0.0, 9.0, n),
            rng.integers(2, size=n),
            rng.integers(3, size=n),
        ]
    )
    return snap(drawn, action_mask(task.active_actions))


def spread_of_policies(task: TaskSpec, seeds: Sequence[int] = SEEDS) -> tuple[FloatArray, FloatArray]:
    """Mean return and mean grade (n,) of random constant actions and of every agent that needs no training."""
    constants = random_settings(CONSTANTS, task)
    played = play(task, ActionsAgent(constants, len(seeds)), seeds, n_rows=len(constants) * len(seeds))
    returns = played.returns.reshape(-1, len(seeds)).mean(axis=1).tolist()
    grades = played.scores().reshape(-1, len(seeds)).mean(axis=1).tolist()
    agents: list[Agent] = [
        make_agent(name, task)
        for name in ("random:1", "random:2", "naive", "hill_climb", "heuristic", "best_static", "best_adaptive")
    ]
    for agent in agents:
        one = play(task, agent, seeds)
        returns.append(float(one.returns.mean()))
        grades.append(float(one.scores().mean()))
    return np.array(returns), np.array(grades)


def reward_grade_correlation(task: TaskSpec, seeds: Sequence[int] = SEEDS) -> float:
    """Spearman's rank correlation of mean return and mean grade over the spread."""
    return spearman(*spread_of_policies(task, seeds))
