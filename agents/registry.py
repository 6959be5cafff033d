"""Registry of agents by name: ``naive``, ``random:7``, ``constant:{"batch_size": 256}``, ``best_adaptive:FOLDER``, ...

A new agent is one line: ``register("ppo", PpoAgent.for_task)``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from agents.baseline import NaiveAgent
from agents.policies.constant import ConstantAgent, RandomAgent
from agents.policies.heuristic import HeuristicAgent
from agents.policies.hill_climb import HillClimbAgent
from agents.policies.ppo import make_ppo
from agents.policies.stored import policy_dir, policy_path, read_constant_policy, read_switching_policy
from agents.policies.switching_policy import ModeAgent
from agents.protocol import Agent, AgentFactory
from inferencegym.errors import InvalidConfigError
from inferencegym.messages import parse_json
from inferencegym.models import ServeAction
from inferencegym.tasks import TaskSpec

AGENTS: Final[dict[str, AgentFactory]] = {}
"""Name of each agent -> factory."""


def register(name: str, factory: AgentFactory) -> None:
    """Register an agent under a name."""
    AGENTS[name] = factory


def make_agent(spec: str, task: TaskSpec) -> Agent:
    """The agent ``name`` or ``name:argument`` for a task.

    Raises :class:`InvalidConfigError` for a name that is not registered or an argument that the agent cannot read, and
    :class:`InvalidActionError` for a constant action out of range.
    """
    name, _, argument = spec.partition(":")
    if name not in AGENTS:
        raise InvalidConfigError(f"agent {spec!r} is unknown: one of {', '.join(AGENTS)}")
    return AGENTS[name](task, argument)


def _naive(task: TaskSpec, argument: str) -> Agent:
    return NaiveAgent()


def _constant(task: TaskSpec, argument: str) -> Agent:
    try:
        data = parse_json(argument, InvalidConfigError)
    except InvalidConfigError as error:
        raise InvalidConfigError(f"constant:{argument}: {error}; write constant:'{{\"batch_size\": 256}}'") from error
    return ConstantAgent(ServeAction.from_dict(data))


def _random(task: TaskSpec, argument: str) -> Agent:
    if argument and not argument.isdigit():
        raise InvalidConfigError(f"random:{argument}: the seed must be a whole number, as in random:7")
    return RandomAgent(int(argument or 0))


def _best_static(task: TaskSpec, argument: str) -> Agent:
    return ConstantAgent(read_constant_policy(_path("best_static", task, argument)))


def _best_adaptive(task: TaskSpec, argument: str) -> Agent:
    return ModeAgent(read_switching_policy(_path("best_adaptive", task, argument)), task)


def _path(name: str, task: TaskSpec, folder: str) -> Path:
    return policy_path(name, task.task_id, Path(folder) if folder else policy_dir(task))


def _heuristic(task: TaskSpec, argument: str) -> Agent:
    return HeuristicAgent(task)


def _hill_climb(task: TaskSpec, argument: str) -> Agent:
    return HillClimbAgent(task)


def _ppo(task: TaskSpec, argument: str) -> Agent:
    return make_ppo(task, argument)


register("random", _random)
register("naive", _naive)
register("constant", _constant)
register("hill_climb", _hill_climb)
register("heuristic", _heuristic)
register("best_static", _best_static)
register("best_adaptive", _best_adaptive)
register("ppo", _ppo)
