"""Rank correlation of return and grade over policies from bad to good: does the reward point where the grade does?

The policies are a ladder of competence: the best adaptive policy that in a share of all five-second stretches takes
other actions instead (the naive defaults, or a constant action drawn at random), the share going from none to all,
constant actions at growing distances from the best one, and every agent that ships for the task. Most rungs have a
small share: a grade that asks for a mean TTFT below a target is cut to 0 by a few bad stretches, and below that all
policies tie, though the reward still tells them apart. Constants drawn over the whole range are reported apart for the
same reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from agents.episodes import run_episodes
from agents.evaluate import agents_for, spearman
from agents.policies.constant import NAIVE_ROW
from agents.policies.switching_policy import ActionsAgent
from agents.protocol import Agent, FloatArray
from agents.registry import make_agent
from agents.seeds import HELD_OUT_SEEDS
from inferencegym.models import SPEC_LENGTHS
from inferencegym.spaces.actions import ACTION_HIGH, ACTION_LOW, action_mask, snap
from inferencegym.tasks import TaskSpec

RUNGS: Final = 24
"""Policies of each kind on the ladder."""
N_CONSTANTS: Final = 60
"""Constant actions that are drawn over the whole range."""
SHIPPED: Final = ("random", "naive", "hill_climb", "heuristic", "ppo", "best_static", "best_adaptive")
STRETCH_STEPS: Final = 5
SEEDS: Final[Sequence[int]] = HELD_OUT_SEEDS[:10]


class DilutedAgent:
    """N copies of an agent; copy i takes ``others[i]`` instead during a share ``shares[i]`` of the stretches."""

    def __init__(self, agent: Agent, others: FloatArray, shares: FloatArray, rows_each: int, seed: int = 0) -> None:
        self._agent = agent
        self._others = np.repeat(others, rows_each, axis=0)
        self._shares = np.repeat(shares, rows_each)
        self._seed = seed

    def reset(self, n_rows: int) -> None:
        self._agent.reset(n_rows)
        self._rng = np.random.default_rng([self._seed, 7])
        self._step = 0

    def act(self, observation: FloatArray) -> FloatArray:
        if self._step % STRETCH_STEPS == 0:
            self._instead = self._rng.random(len(observation)) < self._shares
        self._step += 1
        return np.where(self._instead[:, None], self._others, self._agent.act(observation))


def random_settings(n: int, task: TaskSpec, seed: int = 0) -> FloatArray:
    """Constant actions (n, 5) drawn over all live knobs (``batch_size`` on a logarithmic scale).

    (n, 6) with any number of replicas where the task scales.
    """
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
    if task.fleet.max_replicas is not None:
        drawn = np.column_stack([drawn, rng.integers(1, task.fleet.max_replicas + 1, n)])
    return snap(drawn, action_mask(task.active_actions), task.fleet)


def settings_around(centre: FloatArray, n: int, task: TaskSpec) -> FloatArray:
    """Constant actions (n, 5) at growing distances from one (5,)."""
    rng = np.random.default_rng([0, 6])
    reach = np.linspace(0.05, 1.0, n)
    moved = np.tile(centre, (n, 1))
    moved[:, 0] += 0.4 * reach * rng.standard_normal(n)
    moved[:, 2] *= np.exp(1.5 * reach * rng.standard_normal(n))
    elsewhere = random_settings(n, task)
    for knob in (1, 3, 4):
        moved[:, knob] = np.where(rng.random(n) < 0.5 * reach, elsewhere[:, knob], moved[:, knob])
    return snap(np.clip(moved, ACTION_LOW, ACTION_HIGH), action_mask(task.active_actions))


def ladder_of_policies(task: TaskSpec) -> tuple[FloatArray, FloatArray]:
    """Mean return and mean grade (n,) of the ladder of competence."""
    shares = np.linspace(0.0, 1.0, RUNGS) ** 4
    adaptive = make_agent("best_adaptive", task)
    static = make_agent("best_static", task)
    static.reset(1)
    centre = static.act(np.zeros((1, 14)))[0]
    n = len(SEEDS)
    agents: list[tuple[Agent, int]] = [
        (DilutedAgent(adaptive, np.tile(NAIVE_ROW, (RUNGS, 1)), shares, n), RUNGS),
        (DilutedAgent(adaptive, random_settings(RUNGS, task), shares, n, seed=1), RUNGS),
        (ActionsAgent(settings_around(centre, RUNGS, task), n), RUNGS),
        *[(make_agent(name, task), 1) for name in agents_for(task, ["all"]) if name in SHIPPED],
    ]
    returns, grades = [], []
    for agent, copies in agents:
        results = run_episodes(task, agent, SEEDS, n_rows=copies * n)
        returns.append(results.returns.reshape(copies, n).mean(axis=1))
        grades.append(results.scores().reshape(copies, n).mean(axis=1))
    return np.concatenate(returns), np.concatenate(grades)


def reward_grade_correlation(task: TaskSpec) -> float:
    """Spearman's rank correlation of mean return and mean grade over the ladder of competence."""
    return spearman(*ladder_of_policies(task))


def correlation_over_constants(task: TaskSpec) -> float:
    """Spearman's rank correlation of mean return and mean grade over constant actions drawn at random."""
    n = len(SEEDS)
    results = run_episodes(task, ActionsAgent(random_settings(N_CONSTANTS, task), n), SEEDS, n_rows=N_CONSTANTS * n)
    returns, grades = (x.reshape(N_CONSTANTS, n).mean(axis=1) for x in (results.returns, results.scores()))
    return spearman(returns, grades)
