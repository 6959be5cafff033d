"""Registry of agents by name: ``naive``, ``random:7``, ``constant:{"batch_size": 256}``, ``best_adaptive:FOLDER``, ...

A new agent is one line: ``register("mine", lambda task, _: MyAgent(task), "What it does.")``. The command line also
takes one of the user's own, ``package.module:Class`` (:func:`load_own_agents`); servers do not. Agents of other
installed packages (:mod:`inferencegym.plugins`) are registered at the end; servers offer them as well.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Final

from agents.policies.autoscalers import HpaAgent, KpaAgent, PlannerAgent, ReplicaPlan, ScheduledAgent
from agents.policies.constant import ConstantAgent, NaiveAgent, RandomAgent
from agents.policies.heuristic import HeuristicAgent
from agents.policies.hill_climb import HillClimbAgent
from agents.policies.ppo import make_ppo
from agents.policies.stored import policy_dir, policy_path, read_autoscaler, read_constant_policy, read_switching_policy
from agents.policies.switching_policy import ModeAgent
from agents.policies.vllm_defaults import VllmDefaultsAgent
from agents.protocol import Agent, AgentFactory, blamed
from inferencegym.errors import InvalidConfigError, did_you_mean
from inferencegym.messages import parse_json
from inferencegym.models import ServeAction
from inferencegym.plugins import plugins
from inferencegym.tasks import TaskSpec
from simulator.hardware.tables import ServingTables, tables_of


@dataclass(frozen=True, slots=True)
class RegisteredAgent:
    """A registered agent."""

    factory: AgentFactory
    description: str
    """One sentence. Servers offer the agents that have one: /play, /policies, /shadow and the page."""
    stored: bool
    """True if its policy was searched or trained for one task, so that a log of requests alone has none."""


AGENTS: Final[dict[str, RegisteredAgent]] = {}
"""Registered agents by name."""


def register(name: str, factory: AgentFactory, description: str = "", *, stored: bool = False) -> None:
    """Register an agent under a name; the parameters are the fields of :class:`RegisteredAgent`.

    Agents without a description stay with the command line and the library: they need an argument, or tell a server's
    visitors nothing that another agent does not.
    """
    AGENTS[name] = RegisteredAgent(factory, description, stored)


@dataclass(frozen=True, slots=True)
class OnTable:
    """Factory of an agent that plans with a lookup table: the one that is played, by default the task's."""

    make: Callable[[TaskSpec, ServingTables], Agent]

    def __call__(self, task: TaskSpec, argument: str, tables: ServingTables | None = None) -> Agent:
        return self.make(task, tables or tables_of(task.hardware))


def make_agent(spec: str, task: TaskSpec, tables: ServingTables | None = None) -> Agent:
    """The agent ``name`` or ``name:argument`` for a task, which is played on ``tables`` (default: its own).

    Raises :class:`InvalidConfigError` for a name that is not registered or an argument that the agent cannot read, and
    :class:`InvalidActionError` for a constant action out of range.
    """
    name, _, argument = spec.partition(":")
    if name not in AGENTS:
        advice = did_you_mean(name, AGENTS, f"the agents are {', '.join(AGENTS)}")
        raise InvalidConfigError(f"agent {spec!r} is unknown: {advice}")
    factory = AGENTS[name].factory
    return factory(task, argument, tables) if isinstance(factory, OnTable) else factory(task, argument)


def load_own_agents(specs: Iterable[str]) -> None:
    """Import and register the classes among these agents that are written ``package.module:Class``.

    Modules are looked for in the working directory, too. A class is called with the task, or with nothing if it takes
    nothing; what it makes has the methods of :class:`agents.protocol.Agent`. Raises :class:`InvalidConfigError` if
    there is no such module or class, or the module fails when it is imported.
    """
    for spec in specs:
        module_name, _, class_name = spec.partition(":")
        if not class_name and (trained := Path(spec) / "policy.npz").is_file():
            raise InvalidConfigError(f"agent {spec!r} is unknown: for the policy trained there name ppo:{trained}")
        if module_name in AGENTS or not class_name:
            continue  # a registered one, or an unknown name, which make_agent refuses
        module = _module(spec, module_name)
        _class_of(module, class_name, spec)
        register(module_name, partial(_own, module))


def _module(spec: str, name: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # as `python -m` has it
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise InvalidConfigError(f"agent {spec!r}: {name} needs a module that is missing: {error.name}") from error
        raise InvalidConfigError(
            f"agent {spec!r} is unknown: it is not one of {', '.join(AGENTS)}, and there is no module {error.name!r}; "
            "name an agent of your own package.module:Class, in the folder that holds the package or with it installed"
        ) from error
    except Exception as error:  # whatever a user's module does when it is imported
        raise InvalidConfigError(f"agent {spec!r}: importing {name} failed: {error!r}") from error


def _class_of(module: ModuleType, name: str, spec: str) -> type[Agent]:
    found = getattr(module, name, None)
    if not isinstance(found, type) or not _is_agent(found):
        there = [each for each, value in vars(module).items() if isinstance(value, type) and _is_agent(value)]
        what = f"{module.__name__} has no {name}" if found is None else f"{name} is no agent"
        raise InvalidConfigError(
            f"agent {spec!r}: {what}; an agent is a class with the methods reset(n_rows) and act(observation), and "
            f"{module.__name__} has {', '.join(there) or 'none'}"
        )
    return found


def _is_agent(value: type) -> bool:
    return all(callable(getattr(value, method, None)) for method in ("reset", "act"))


def _own(module: ModuleType, task: TaskSpec, class_name: str) -> Agent:
    return _made(_class_of(module, class_name, f"{module.__name__}:{class_name}"), task)


def _made(agent: type[Agent], task: TaskSpec, _: str = "") -> Agent:
    with blamed(agent.__name__, "__init__()"):
        takes_task = bool(inspect.signature(agent).parameters)
        return agent(task) if takes_task else agent()  # type: ignore[call-arg]


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


def _random_search(task: TaskSpec, argument: str) -> Agent:
    return ConstantAgent(read_constant_policy(_path("random_search", task, argument)))


def _best_adaptive(task: TaskSpec, argument: str) -> Agent:
    if task.fleet.max_replicas is not None:
        return read_autoscaler(_path("best_adaptive", task, argument)).agent(task)
    return ModeAgent(read_switching_policy(_path("best_adaptive", task, argument)), task)


def _autoscaler(agent: type[HpaAgent | KpaAgent | ScheduledAgent | PlannerAgent]) -> OnTable:
    return OnTable(lambda task, tables: agent(task, replica=ReplicaPlan.of(task, tables)))


def _path(name: str, task: TaskSpec, folder: str) -> Path:
    return policy_path(name, task.task_id, Path(folder) if folder else policy_dir(task))


register(
    "naive",
    lambda *_: NaiveAgent(),
    "Fixed-32, not an engine's defaults: batch size 32, FP16, the entire KV pool, never changed.",
)
register(
    "vllm_defaults",
    OnTable(lambda _, tables: VllmDefaultsAgent(tables)),
    "What vLLM does by default on an A100: 256 slots, 90% of the memory, FP16, never changed.",
)
register(
    "random_search",
    _random_search,
    "The best of as many random constant settings as a learner's 50,000 steps pay for.",
    stored=True,
)
register("random", _random, "Every knob drawn anew each second.")
register("constant", _constant)
register(
    "hill_climb",
    lambda task, _: HillClimbAgent(task),
    "Changes one knob at a time and keeps changes that helped; uses no model.",
)
register(
    "heuristic",
    OnTable(HeuristicAgent),
    "Rules an operator would write: capacity planning, and a second setting for surges.",
)
register("hpa", _autoscaler(HpaAgent), "Kubernetes' Horizontal Pod Autoscaler: replicas by load and queue.")
register("kpa", _autoscaler(KpaAgent), "Knative's autoscaler: replicas by concurrency, with a panic mode.")
register("scheduled", _autoscaler(ScheduledAgent))
register(
    "planner",
    _autoscaler(PlannerAgent),
    "Replicas for the forecast load and the queue, as capacity planners do.",
)
register("ppo", make_ppo, "A small neural network, trained with PPO (reinforcement learning).", stored=True)
register("best_static", _best_static, "The best constant setting that a search found for the task.", stored=True)
register(
    "best_adaptive",
    _best_adaptive,
    "Searched policy: rules with numbers that a search found for the task.",
    stored=True,
)

for _plugin in plugins("agents"):
    _class = _plugin.load(type)
    if not _is_agent(_class):
        raise _plugin.error("is a class without the methods reset(n_rows) and act(observation)")
    if _plugin.name in AGENTS:
        raise _plugin.error(f"has the name of another agent; the names of agents are {', '.join(AGENTS)}")
    register(_plugin.name, partial(_made, _class), (_class.__doc__ or "An agent of a plugin.").strip().splitlines()[0])
