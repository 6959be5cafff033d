"""Agents for the traffic controller: constant, random, a rule relative to capacity, and the optimal plan.

An agent decides for B episodes at once: ``act`` takes observations ``(B, 7)`` in the order of
:data:`inferencegym.traffic.STATE_FIELDS` and returns action indices ``(B,)`` of
:data:`inferencegym.traffic.ACTION_NAMES`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from agents.policies.traffic_planner import Objective, plan_traffic
from env.traffic.env import TrafficBatch
from inferencegym.errors import refusal
from inferencegym.traffic import ACCEPT_SHARES, ACTION_NAMES, STATE_FIELDS, TrafficConfig, TrafficTask
from simulator.traffic import DRAIN_SHARE, FloatArray, IntArray

_COLUMN: Final = {name: i for i, name in enumerate(STATE_FIELDS)}
_SHARES: Final = np.array(list(ACCEPT_SHARES.values()))


class TrafficAgent(Protocol):
    """Protocol of agents for the traffic controller."""

    def reset(self, task: TrafficTask, config: TrafficConfig, seeds: Sequence[int]) -> None:
        """Start new episodes, one for each seed; agents may know the task and the server's settings."""
        ...

    def act(self, observation: FloatArray) -> IntArray:
        """Action indices ``(B,)`` for observations ``(B, 7)``."""
        ...


class ConstantTraffic:
    """Agent that takes the same action at every step."""

    def __init__(self, action: str) -> None:
        if action not in ACTION_NAMES:
            raise refusal("action", action, f"one of {', '.join(ACTION_NAMES)}")
        self.index = ACTION_NAMES.index(action)

    def reset(self, task: TrafficTask, config: TrafficConfig, seeds: Sequence[int]) -> None:
        """Do nothing: the agent has no state."""

    def act(self, observation: FloatArray) -> IntArray:
        return np.full(len(observation), self.index, dtype=np.int64)


class RandomTraffic:
    """Agent that takes every action with equal probability; each episode draws from the generator of its own seed."""

    def reset(self, task: TrafficTask, config: TrafficConfig, seeds: Sequence[int]) -> None:
        drawn = [np.random.default_rng(seed).integers(len(ACTION_NAMES), size=task.episode_length) for seed in seeds]
        self.actions: IntArray = np.array(drawn, dtype=np.int64)

    def act(self, observation: FloatArray) -> IntArray:
        # Beyond the end of an episode the last action is repeated without effect.
        taken = np.minimum(observation[:, _COLUMN["step"]].astype(np.int64), self.actions.shape[1] - 1)
        chosen: IntArray = self.actions[np.arange(len(taken)), taken]
        return chosen


class AdaptiveTraffic:
    """Agent that lets through as much as the server can handle, given the upcoming rate and the queue.

    The most permissive action is taken whose load stays within the crash ratio and whose queue after the step stays
    within ``queue_budget`` of the queue's limit; if none does, the strictest. Everything is relative to the configured
    server, so the rule needs no change when the server does.
    """

    def __init__(self, queue_budget: float = 0.15) -> None:
        if not 0.0 <= queue_budget <= 1.0:
            raise refusal("queue_budget", queue_budget, "a number from 0 to 1")
        self.queue_budget = queue_budget

    def reset(self, task: TrafficTask, config: TrafficConfig, seeds: Sequence[int]) -> None:
        self.config = config

    def act(self, observation: FloatArray) -> IntArray:
        config = self.config
        allowed = observation[:, _COLUMN["request_rate"], None] * _SHARES
        beyond = allowed - config.server_capacity
        queue = observation[:, _COLUMN["queue_length"], None] + np.where(beyond > 0, beyond, DRAIN_SHARE * beyond)
        fits = (allowed <= config.crash_load_ratio * config.server_capacity) & (
            (beyond <= 0) | (queue <= self.queue_budget * config.max_queue)
        )
        strictest = len(ACTION_NAMES) - 1
        return np.where(fits.any(axis=1), fits.argmax(axis=1), strictest)


class PlannerTraffic:
    """Agent that follows the optimal plan of :mod:`agents.policies.traffic_planner` from the first step."""

    def __init__(self, objective: Objective = "score") -> None:
        self.objective = objective

    def reset(self, task: TrafficTask, config: TrafficConfig, seeds: Sequence[int]) -> None:
        plan = plan_traffic(task, config, self.objective)
        self.actions: IntArray = np.array([ACTION_NAMES.index(name) for name in plan.actions], dtype=np.int64)

    def act(self, observation: FloatArray) -> IntArray:
        taken = observation[:, _COLUMN["step"]].astype(np.int64)
        chosen: IntArray = self.actions[np.minimum(taken, len(self.actions) - 1)]
        return chosen


TRAFFIC_AGENTS: Final[dict[str, Callable[[], TrafficAgent]]] = {
    **{name: lambda name=name: ConstantTraffic(name) for name in ACTION_NAMES},  # type: ignore[misc]
    "random": RandomTraffic,
    "adaptive": AdaptiveTraffic,
    "planner": PlannerTraffic,
    "planner_return": lambda: PlannerTraffic("return"),
}
"""Agent name -> factory."""


@dataclass(frozen=True, slots=True)
class TrafficOutcome:
    """Results of an agent, one entry per episode ``(B,)``."""

    final_score: FloatArray
    cumulative_reward: FloatArray
    steps: IntArray


def evaluate_traffic(agent: TrafficAgent, task: TrafficTask, seeds: Sequence[int] = (42,)) -> TrafficOutcome:
    """Run one episode per seed to its end. Only random agents differ between seeds: the traffic does not."""
    batch = TrafficBatch(task, len(seeds))
    agent.reset(task, batch.config, seeds)
    observation, reward = batch.observation(), np.zeros(len(seeds))
    while not batch.done.all():
        result = batch.step(agent.act(observation))
        observation = result.observation
        reward += result.reward
    return TrafficOutcome(batch.final_score(), reward, batch.totals.steps)
