"""Built-in policies of the environment families, by name: what POST /play, GET /policies and the page offer.

Agents are imported when one is asked for: a server that nobody asks never loads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from agents.protocol import BASELINES
from env.family import EpisodeEnv, Family, Policy
from inferencegym.errors import InvalidConfigError
from inferencegym.models import ACTION_FIELDS, ServeAction
from inferencegym.tasks import TaskId

SERVING_POLICIES: Final[Mapping[str, str]] = {
    **BASELINES,
    "random": "Every knob drawn anew each second.",
    "hill_climb": "Changes one knob at a time and keeps changes that helped; uses no model.",
    "heuristic": "Rules an operator would write: capacity planning, and a second setting for floods.",
    "ppo": "A small network trained with PPO.",
    "best_static": "The best constant setting that a search found for the task.",
    "best_adaptive": "The best switching policy that a search found for the task.",
}
"""Policies that any client may ask a server to play; others would read files or call models elsewhere."""

TRAFFIC_POLICIES: Final[Mapping[str, str]] = {
    "allow_all": "Lets everything through.",
    "throttle_70": "Always lets 70 % through.",
    "throttle_40": "Always lets 40 % through.",
    "drop_aggressive": "Always lets 20 % through.",
    "random": "Every action drawn anew each second.",
    "adaptive": "Lets through as much as the server can handle.",
    "planner": "The optimal sequence of actions, planned from the first step.",
}


def make_serving_policy(spec: str, env: EpisodeEnv) -> Policy:
    """An agent of :mod:`agents.registry` (``naive``, ``random:7``, ...) for one serving episode."""
    from agents.registry import make_agent
    from env.inference_env import InferenceEnv
    from inferencegym.spaces.actions import action_mask, from_row, snap
    from inferencegym.tasks import get_task
    from simulator.tables import tables_of

    assert isinstance(env, InferenceEnv)
    task = get_task(env.task_id)
    agent, mask = make_agent(spec, task), action_mask(task.active_actions)
    tier = list(ACTION_FIELDS).index("quant_tier")
    agent.reset(1)
    last_tier = tables_of(task.hardware).n_tiers - 1

    def act(_: Any) -> ServeAction:
        knobs = snap(agent.act(env.observation_row(fleet=True)[None, :]), mask, task.fleet)[0]
        knobs[tier] = min(knobs[tier], last_tier)  # a table may have fewer precisions than the knob
        return from_row(knobs)

    return act


def make_traffic_policy(name: str, env: EpisodeEnv) -> Policy:
    """An agent of :mod:`agents.policies.traffic` for one traffic episode."""
    from agents.policies.traffic import TRAFFIC_AGENTS
    from inferencegym.traffic import ACTION_NAMES, STATE_FIELDS, get_traffic_task, traffic_config

    if name not in TRAFFIC_AGENTS:
        raise InvalidConfigError(f"agent {name!r} does not play traffic tasks: one of {', '.join(TRAFFIC_AGENTS)}")
    task = get_traffic_task(env.task_id)
    agent = TRAFFIC_AGENTS[name]()
    agent.reset(task, traffic_config(env.config_dict()), [env.seed])

    def act(observation: Any) -> str:
        flat = np.array([[float(getattr(observation, field)) for field in STATE_FIELDS]])
        return ACTION_NAMES[int(agent.act(flat)[0])]

    return act


def run_policy(
    family: Family, name: str, task_id: TaskId, seed: int, config: Mapping[str, Any] | None = None
) -> tuple[EpisodeEnv, list[dict[str, Any]], list[str]]:
    """Play a whole episode with a built-in policy.

    Returns the environment, its observations (one before the first step, then one after each) and the phase of the
    traffic at each step. Raises :class:`InvalidConfigError` where the policy cannot play the task.
    """
    if family.make_policy is None:
        raise InvalidConfigError(f"agent {name!r} is unknown: the {family.name} environment has no built-in policies")
    env = family.make()
    observation = env.reset(seed=seed, task_id=task_id, config=config)
    act = family.make_policy(name, env)
    seen, phases = [env.observation_dict()], list[str]()
    while not env.done:
        observation, _, _ = env.play(act(observation))
        seen.append(env.observation_dict())
        phases.append(str(env.state().get("workload_phase", "steady")))
    return env, seen, phases


# ---------------------------------------------------------------- comparisons for the command line


def compare_serving(task_id: TaskId, names: Sequence[str], seeds: Sequence[int]) -> dict[str, Any]:
    """Agents of a serving task on the same seeds: :func:`agents.evaluate.compare`."""
    from agents.evaluate import compare
    from inferencegym.tasks import get_task

    return compare(get_task(task_id), names, seeds)


def compare_traffic_agents(task_id: TaskId, names: Sequence[str], seeds: Sequence[int]) -> dict[str, Any]:
    """Agents of a traffic task against its optimum: :func:`agents.traffic_report.compare_traffic`."""
    from agents.traffic_report import compare_traffic
    from inferencegym.traffic import get_traffic_task

    return compare_traffic(get_traffic_task(task_id), names, seeds)


def compare_policies(family: Family, task_id: TaskId, names: Sequence[str], seeds: Sequence[int]) -> dict[str, Any]:
    """Policies of any family on the same seeds, episode by episode: means with 95 % intervals.

    Raises :class:`InvalidConfigError` for a policy that the family does not have.
    """
    from agents.evaluate import interval

    asked = list(family.policies) if "all" in names else list(dict.fromkeys(names))
    agents = []
    for name in asked:
        episodes = [run_policy(family, name, task_id, seed)[0] for seed in seeds]
        scores = np.array([family.grade(task_id, env.episode_log)["score"] for env in episodes])
        agents.append({"agent": name, "score": interval(scores).to_dict(), "scores": scores.tolist()})
    return {
        "task": task_id,
        "seeds": [int(seed) for seed in seeds],
        "interval": "95 % Student t over seeds",
        "agents": agents,
    }
