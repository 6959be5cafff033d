"""Built-in policies of the environment families, by name: what POST /play, GET /policies and the page offer.

Those of the serving fleet are the described agents of :mod:`agents.registry`, which is imported on first use: a server
that plays none never loads them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from env.families import ROLLOUTS, SERVING, TRAFFIC
from env.family import EpisodeEnv, Family, Policy
from env.rollouts import agents as rollouts
from env.traffic import agents as traffic
from env.traffic.report import compare_traffic
from inferencegym.errors import InvalidConfigError
from inferencegym.plugins import plugins
from inferencegym.tasks import TaskId


@dataclass(frozen=True, slots=True)
class Players:
    """Policies of one family, as the server, the page and the command line offer them."""

    policies: Callable[[], Mapping[str, str]] = dict
    """Policies by name that any client may ask to be played, each with a description."""
    make: Callable[[str, EpisodeEnv], Policy] | None = None
    """Makes a policy by name for an episode. Raises InvalidConfigError if the task has none of this name."""
    stored: Callable[[], Collection[str]] = tuple
    """Names of the policies that were searched or trained for one task each."""
    compare: Callable[[TaskId, Sequence[str], Sequence[int]], dict[str, Any]] | None = None
    """Scores agents for `inferencegym evaluate`; None: whole episodes of ``policies`` are played one by one."""
    baseline: Callable[[], Mapping[str, Any]] | None = None
    """Scores of the reference agents, for GET /baseline; None: the family has no such endpoint."""


def serving_policies() -> Mapping[str, str]:
    """Descriptions of the agents that any client may ask for; others would read files or call models elsewhere."""
    from agents.registry import AGENTS

    return {name: agent.description for name, agent in AGENTS.items() if agent.description}


def stored_serving_policies() -> Collection[str]:
    """Names of the agents that need a policy that was found for their task."""
    from agents.registry import AGENTS

    return [name for name, agent in AGENTS.items() if agent.stored]


def make_serving_policy(spec: str, env: EpisodeEnv) -> Policy:
    """An agent of :mod:`agents.registry` (``naive``, ``random:7``, ...) for one serving episode."""
    from agents.protocol import knobs_of
    from agents.registry import make_agent
    from env.inference_env import InferenceEnv
    from inferencegym.tasks import get_task

    assert isinstance(env, InferenceEnv)
    agent = make_agent(spec, get_task(env.task_id))
    agent.reset(1)
    return lambda _: knobs_of(agent, env.observation_row(fleet=True)[None])


def run_policy(
    family: Family,
    name: str,
    task_id: TaskId,
    seed: int,
    config: Mapping[str, Any] | None = None,
    actions: Sequence[Any] = (),
) -> tuple[EpisodeEnv, list[dict[str, Any]], list[str], list[float]]:
    """Play a whole episode with a built-in policy, after the first ``actions`` if there are some.

    Returns the environment, its observations (one before the first step, then one after each), the phase of the traffic
    at each step, and the score of the seconds so far after each, where the family has it. Raises
    :class:`InvalidConfigError` where the policy cannot play the task.
    """
    players = players_of(family)
    if players.make is None:
        raise InvalidConfigError(f"agent {name!r} is unknown: the {family.name} environment has no built-in policies")
    env = family.make()
    observation = env.reset(seed=seed, task_id=task_id, config=config)
    act = players.make(name, env)
    seen, phases, scores = [env.observation_dict()], list[str](), list[float]()
    values: Mapping[str, Any] | None = None
    while not env.done:
        chosen = act(observation)
        if len(phases) < len(actions):
            parsed, _, values = family.parse_action(actions[len(phases)], values)
            chosen = env.check(parsed)
        observation, _, _ = env.play(chosen)
        seen.append(env.observation_dict())
        phases.append(str(env.state().get("workload_phase", "steady")))
        if family.score_so_far is not None:
            scores.append(family.score_so_far(env))
    return env, seen, phases, scores


# ---------------------------------------------------------------- comparisons for the command line


def compare_serving(task_id: TaskId, names: Sequence[str], seeds: Sequence[int]) -> dict[str, Any]:
    """Agents of a serving task on the same seeds: :func:`agents.evaluate.compare`."""
    from agents.evaluate import compare
    from inferencegym.tasks import get_task

    return compare(get_task(task_id), names, seeds)


def serving_baseline() -> Mapping[str, Any]:
    """Scores of the reference agents on tasks 1 to 3."""
    from agents.baseline import run_all_baselines

    return run_all_baselines()


def compare_policies(family: Family, task_id: TaskId, names: Sequence[str], seeds: Sequence[int]) -> dict[str, Any]:
    """Policies of any family on the same seeds, episode by episode: means with 95% intervals.

    Raises :class:`InvalidConfigError` for a policy that the family does not have.
    """
    from agents.evaluate import interval

    asked = list(players_of(family).policies()) if "all" in names else list(dict.fromkeys(names))
    if not asked:
        raise InvalidConfigError(f"nothing to evaluate: the {family.name} environment has no built-in policies")
    agents = []
    for name in asked:
        episodes = [run_policy(family, name, task_id, seed)[0] for seed in seeds]
        scores = np.array([family.grade(task_id, env.episode_log)["score"] for env in episodes])
        agents.append({"agent": name, "score": interval(scores).to_dict(), "scores": scores.tolist()})
    return {
        "task": task_id,
        "seeds": [int(seed) for seed in seeds],
        "interval": "95% Student t over seeds",
        "agents": agents,
    }


# ---------------------------------------------------------------- rollouts

ROLLOUT_POLICIES: Final[Mapping[str, str]] = {
    **rollouts.POLICIES,
    "ppo": "A small neural network, trained with PPO on drawn workloads.",
}
"""Policies of the rollouts environment, by name, each with a description."""


def make_rollout_policy(name: str, env: EpisodeEnv) -> Policy:
    """A controller for one episode. Raises InvalidConfigError for an unknown name."""
    if name == "ppo":
        from agents.policies.rollouts import RolloutPolicy

        return RolloutPolicy()
    return rollouts.make_policy(name, env)


# ---------------------------------------------------------------- registry

PLAYERS: Final[dict[str, Players]] = {
    SERVING: Players(serving_policies, make_serving_policy, stored_serving_policies, compare_serving, serving_baseline),
    TRAFFIC: Players(lambda: traffic.POLICIES, traffic.make_policy, compare=compare_traffic),
    ROLLOUTS: Players(lambda: ROLLOUT_POLICIES, make_rollout_policy),
}
"""Policies of the families by the family's name."""
for _plugin in plugins("players"):
    if _plugin.name in PLAYERS:
        raise _plugin.error("has the name of a family that has players")
    PLAYERS[_plugin.name] = _plugin.load(Players)


def players_of(family: Family) -> Players:
    """The policies of a family; none where it has no entry in :data:`PLAYERS`."""
    return PLAYERS.get(family.name, Players())
