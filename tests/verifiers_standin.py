"""verifiers' interface of environments, as verifiers 0.4.0 has it (github.com/PrimeIntellect-ai/verifiers, docs/v1).

It pins versions (mcp, openai) that this package's tests cannot have beside it. Its loader takes a module by a name
without dots whose ``__all__`` has one subclass of ``Taskset`` and one of ``Env``; it iterates the first, and awaits
``run(task, agents)`` of the second, whose agents have the names of the configuration's fields. An agent's
``interaction(task)`` is a conversation in which the environment is the user.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict

DataT, TaskT, ConfigT = TypeVar("DataT"), TypeVar("TaskT"), TypeVar("ConfigT")


class TaskData(BaseModel):
    model_config = ConfigDict(frozen=True)

    name: str | None = None
    prompt: str | None = None


class Task(Generic[DataT]):
    def __init__(self, data: DataT, config: Any = None) -> None:
        self.data, self.config = data, config


class TasksetConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")

    id: str = ""
    task: dict[str, Any] = {}


class Taskset(Generic[TaskT, ConfigT]):
    def __init__(self, config: ConfigT) -> None:
        self.config = config

    def load(self) -> Iterator[TaskT]:
        raise NotImplementedError

    def __iter__(self) -> Iterator[TaskT]:
        return iter(self.load())


class AgentConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")

    harness: dict[str, str] | None = None
    runtime: dict[str, str] = {"type": "prime"}


class EnvConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Env(Generic[ConfigT]):
    def __init__(self, config: ConfigT) -> None:
        self.config = config


@dataclass
class Segment:
    """The model's answer to one turn; a terminated one has none."""

    last_reply: str = ""
    terminated: bool = False


@dataclass
class Trace:
    """What is recorded of an agent's run."""

    rewards: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

    def record_reward(self, name: str, value: float) -> None:
        self.rewards[name] = float(value)

    def record_metrics(self, values: Mapping[str, float]) -> None:
        self.metrics.update({name: float(value) for name, value in values.items()})


class Agent:
    """An agent that answers from a list, again with the last, and stops at its limit of turns."""

    def __init__(self, *replies: str, max_turns: int = 1000) -> None:
        self.replies, self.max_turns = replies, max_turns
        self.heard: list[str] = []
        self.trace = Trace()

    @contextlib.asynccontextmanager
    async def interaction(self, task: Task[Any]) -> AsyncIterator[Agent]:
        assert task.data.prompt is None, "a task with a prompt speaks first"
        yield self

    async def turn(self, message: str) -> Segment:
        if len(self.heard) == self.max_turns:
            return Segment(terminated=True)
        self.heard.append(message)
        return Segment(self.replies[min(len(self.heard), len(self.replies)) - 1])


def modules() -> dict[str, types.ModuleType]:
    """Modules for ``sys.modules``."""
    package, v1 = types.ModuleType("verifiers"), types.ModuleType("verifiers.v1")
    for one in (TaskData, Task, TasksetConfig, Taskset, AgentConfig, EnvConfig, Env):
        setattr(v1, one.__name__, one)
    package.v1 = v1  # type: ignore[attr-defined]
    return {"verifiers": package, "verifiers.v1": v1}
