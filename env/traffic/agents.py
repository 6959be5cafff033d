"""Agents for the traffic controller: constant, random, a rule relative to capacity, and the optimal plan.

An agent decides for B episodes at once: ``act`` takes observations ``(B, 7)`` in the order of
:data:`inferencegym.traffic.STATE_FIELDS` and returns action indices ``(B,)`` of
:data:`inferencegym.traffic.ACTION_NAMES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np

from env.family import EpisodeEnv, Policy
from env.traffic.env import TrafficBatch
from env.traffic.model import DRAIN_SHARE, SHARES, FloatArray, IntArray
from env.traffic.planner import Objective, plan_traffic
from env.traffic.tasks import TrafficConfig, TrafficTask, get_traffic_task, traffic_config
from inferencegym.errors import InvalidConfigError, refusal
from inferencegym.traffic import ACTION_NAMES, STATE_FIELDS

_COLUMN: Final = {name: i for i, name in enumerate(STATE_FIELDS)}


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
    """Agent that admits as many requests as the server can handle, given the upcoming rate and the queue.

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
        allowed = observation[:, _COLUMN["request_rate"], None] * SHARES
        beyond = allowed - config.server_capacity
        queue = observation[:, _COLUMN["queue_length"], None] + np.where(beyond > 0, beyond, DRAIN_SHARE * beyond)
        fits = (allowed <= config.crash_load_ratio * config.server_capacity) & (
            (beyond <= 0) | (queue <= self.queue_budget * config.max_queue)
        )
        strictest = len(ACTION_NAMES) - 1
        return np.where(fits.any(axis=1), fits.argmax(axis=1), strictest)


class PlannerTraffic:
    """Agent that follows the optimal plan of :mod:`env.traffic.planner` from the first step."""

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

POLICIES: Final[Mapping[str, str]] = {
    "allow_all": "Lets everything through.",
    "throttle_70": "Always lets 70% through.",
    "throttle_40": "Always lets 40% through.",
    "drop_aggressive": "Always lets 20% through.",
    "random": "Every action drawn anew each second.",
    "adaptive": "Admits as many requests as the server can handle.",
    "planner": "The optimal sequence of actions, planned from the first step.",
}
"""Agents that a server offers, by name, each with a description."""


def agent_called(name: str) -> TrafficAgent:
    """A new agent of this name. Raises InvalidConfigError listing the names."""
    if name not in TRAFFIC_AGENTS:
        raise InvalidConfigError(f"agent {name!r} does not play traffic tasks: one of {', '.join(TRAFFIC_AGENTS)}")
    return TRAFFIC_AGENTS[name]()


def make_policy(name: str, env: EpisodeEnv) -> Policy:
    """An agent for one episode. Raises InvalidConfigError for an unknown name."""
    agent = agent_called(name)
    agent.reset(get_traffic_task(env.task_id), traffic_config(env.config_dict()), [env.seed])

    def act(state: Any) -> str:
        flat = np.array([[float(getattr(state, field)) for field in STATE_FIELDS]])
        return ACTION_NAMES[int(agent.act(flat)[0])]

    return act


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
