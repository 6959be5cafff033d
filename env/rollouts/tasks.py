"""Rollout tasks as data: workloads of agent sessions, drawn from ranges by an episode's seed.

A task is one entry of ``tasks.json``. A range ``[low, high]`` is that of a workload's mean, which the seed draws
log-uniformly; equal bounds fix it. Sessions then vary about the mean: turns from half of it to one and a half,
lengths log-normally, tool times exponentially. ``pool_sessions`` is the KV pool divided by the mean conversation of a
session at work, so it says about how many sessions fit; the pool is no larger than the card allows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import pydantic

from inferencegym.errors import UnknownTaskError, refusal, short_repr
from inferencegym.messages import WHOLE, Message, read
from inferencegym.rollouts import MAX_SESSIONS
from inferencegym.task_registry import MAX_EPISODE_LENGTH, read_entry
from inferencegym.tasks import TaskId
from simulator.events.fleet import Fleet
from simulator.events.requests import FloatArray, Requests, Sessions
from simulator.hardware.table_model import table_model
from simulator.hardware.tables import tables_of

DATA_FILE: Final = Path(__file__).with_name("tasks.json")
DEFAULT_TASK_ID: Final = "rollout-batch"
WORKLOAD_STREAM: Final = 11
"""Stream of an episode's seed that draws its workload."""
MAX_RUNNING: Final = 256
"""Requests that the engine runs at once: vLLM's --max-num-seqs."""
LENGTH_SIGMA: Final = 0.6
"""Standard deviation of the logarithm of lengths about their workload's mean."""
ENGINE_RULES: Final[Mapping[str, Any]] = {"spare_tokens": 0, "vllm_refill": True, "occupancy_in_blocks": True}
"""How vLLM hands out its KV cache; arguments of :class:`simulator.events.fleet.Fleet`."""

Range = Annotated[tuple[float, float], pydantic.Field(strict=False, description="lowest and highest mean")]
_LIST = pydantic.Field(strict=False)  # a list of the file becomes a tuple


class SessionsEntry(Message):
    """Ranges of a kind of sessions."""

    sessions: Annotated[int, pydantic.Field(ge=1, le=MAX_SESSIONS)]
    turns: Range
    first_tokens: Range
    new_tokens: Range
    answer_tokens: Range
    tool_s: Range


class WorkloadEntry(SessionsEntry):
    """Sessions that wait for the cap; those of the first entry of a task say what serves them.

    Without ``hardware`` the default table does, as everywhere.
    """

    hardware: Annotated[tuple[str, ...], _LIST] = ()
    shared_tokens: Range = (1.0, 1.0)
    pool_sessions: Range = (1.0, 1.0)


class InteractiveEntry(SessionsEntry):
    """Sessions that do not wait: they arrive at ``per_s``, low and high in turn for ``wave_s`` each."""

    per_s: Range
    wave_s: Annotated[float, pydantic.Field(gt=0)]
    ttft_objective_ms: Annotated[float, pydantic.Field(gt=0)]


class TaskFile(Message):
    """One task, as the file has it."""

    name: str
    gym_id: str
    difficulty: str
    description: str
    episode_length: Annotated[int, pydantic.Field(ge=1, le=MAX_EPISODE_LENGTH)]
    workloads: Annotated[tuple[WorkloadEntry, ...], _LIST]
    interactive: InteractiveEntry | None = None


_Seconds = Annotated[int, pydantic.Field(ge=1, le=MAX_EPISODE_LENGTH, description="seconds at most"), WHOLE]
_Pool = Annotated[int, pydantic.Field(ge=16, le=10**9, description="KV pool of the engine, tokens"), WHOLE]


class RolloutConfig(Message):
    """Settings that a reset may override; those that are left out are the task's."""

    episode_length: _Seconds | None = None
    kv_pool_tokens: _Pool | None = None


@dataclass(frozen=True, slots=True)
class RolloutTask:
    """A task of agent sessions."""

    task_id: str
    entry: TaskFile

    def summary(self) -> dict[str, Any]:
        """What lists of tasks show."""
        entry = self.entry
        return {
            "task_id": self.task_id,
            "name": entry.name,
            "gym_id": entry.gym_id,
            "difficulty": entry.difficulty,
            "description": entry.description,
            "episode_length": entry.episode_length,
            "sessions": sum(each.sessions for each in entry.workloads),
        }


@lru_cache(maxsize=1)
def rollout_tasks() -> dict[str, RolloutTask]:
    """All tasks by id."""
    raw = json.loads(DATA_FILE.read_text(encoding="utf-8"))
    return {task_id: RolloutTask(task_id, read_entry(TaskFile, entry)) for task_id, entry in raw.items()}


def get_rollout_task(task_id: TaskId) -> RolloutTask:
    """The task of this id. Raises UnknownTaskError with those that there are."""
    found = rollout_tasks().get(str(task_id))
    if found is None:
        known = ", ".join(rollout_tasks())
        raise UnknownTaskError(f"task_id={short_repr(task_id)} is not a task: choose one of {known}")
    return found


def rollout_config(config: Mapping[str, Any] | RolloutConfig | None) -> RolloutConfig:
    """Check settings of a reset. Raises InvalidConfigError."""
    return config if isinstance(config, RolloutConfig) else read(RolloutConfig, config or {}, refusal)


# ---------------------------------------------------------------- workloads


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """What one episode serves: the engine, its sessions, and the facts that a log states.

    ``batch_tokens`` is what the sessions that wait for the cap will write.
    """

    hardware: str | None
    fleet: Fleet
    sessions: Sessions
    batch_tokens: int
    objective_ms: float = math.inf

    @property
    def kv_pool_tokens(self) -> int:
        """The KV pool."""
        return self.fleet.kv_pool_tokens

    @property
    def interactive(self) -> bool:
        """Whether interactive sessions share the engine."""
        return math.isfinite(self.objective_ms)

    def unlimited(self) -> Fleet:
        """The same engine with room for every conversation at once."""
        turns = self.sessions.turns
        longest = turns.prompt_tokens + turns.output_tokens + self.sessions.shared_tokens
        return replace(self.fleet, kv_pool_tokens=int(longest.sum()) + 4 * self.fleet.block_tokens * len(longest))


@dataclass(frozen=True, slots=True, eq=False)
class _Turns:
    """Turns of some sessions: prompt with the whole conversation, answer and tool time of each, (n,); turns (G,)."""

    turns: Any
    prompt_tokens: Any
    answer_tokens: Any
    tool_s: FloatArray


def draw_workload(task: RolloutTask, seed: int, config: RolloutConfig) -> Workload:
    """Draw the workload of an episode."""
    rng = np.random.default_rng([seed, WORKLOAD_STREAM])
    entry, first = task.entry, task.entry.workloads[0]
    cards = first.hardware or (None,)
    hardware = cards[int(rng.integers(len(cards)))]
    tables = tables_of(hardware)
    shared_tokens = round(_mean(rng, first.shared_tokens))
    pool_sessions = _mean(rng, first.pool_sessions)
    parts = [_draw_turns(rng, each) for each in entry.workloads]
    n_batch = sum(len(part.turns) for part in parts)
    conversation = float(np.mean(np.concatenate([part.prompt_tokens for part in parts])))
    capacity = int(tables.columns["kv_capacity_tokens"][0, 0, -1, 0, 0])
    pool = min(capacity, round(pool_sessions * conversation) + shared_tokens)
    arrival_s = np.zeros(n_batch)
    batch_tokens = int(sum(part.answer_tokens.sum() for part in parts))
    if entry.interactive is not None:
        users = entry.interactive
        parts.append(_draw_turns(rng, users))
        arrival_s = np.concatenate((arrival_s, _draw_arrivals(rng, users)))
    n_turns = np.concatenate([part.turns for part in parts])
    gated = np.arange(len(n_turns)) < n_batch
    requests = Requests(
        np.repeat(arrival_s, n_turns),
        np.concatenate([part.prompt_tokens for part in parts]),
        np.concatenate([part.answer_tokens for part in parts]),
        None if entry.interactive is None else np.repeat(gated, n_turns).astype(np.int64),
    )
    tool_s = np.concatenate([part.tool_s for part in parts])
    sessions = Sessions(requests, np.concatenate(([0], np.cumsum(n_turns))), tool_s, gated, shared_tokens)
    model = table_model(tables, tables.tiers[0])
    fleet = Fleet(model, MAX_RUNNING, config.kv_pool_tokens or pool, **ENGINE_RULES)
    objective_ms = math.inf if entry.interactive is None else entry.interactive.ttft_objective_ms
    return Workload(hardware, fleet, sessions, batch_tokens, objective_ms)


def _mean(rng: np.random.Generator, bounds: tuple[float, float]) -> float:
    """A workload's mean, log-uniform."""
    low, high = np.log(bounds)
    return float(np.exp(low + (high - low) * rng.random()))


def _draw_turns(rng: np.random.Generator, entry: SessionsEntry) -> _Turns:
    mean_turns = _mean(rng, entry.turns)
    n_turns = rng.integers(max(1, round(0.5 * mean_turns)), round(1.5 * mean_turns) + 1, entry.sessions)
    n = int(n_turns.sum())
    new = _lengths(rng, _mean(rng, entry.new_tokens), n)
    starts = np.concatenate(([0], np.cumsum(n_turns)[:-1]))
    new[starts] = _lengths(rng, _mean(rng, entry.first_tokens), entry.sessions)
    answers = _lengths(rng, _mean(rng, entry.answer_tokens), n)
    tool_s = rng.exponential(_mean(rng, entry.tool_s), n)
    # A prompt holds all earlier prompts and answers of its session.
    said = np.cumsum(new + answers)
    before = np.repeat(said[starts] - new[starts] - answers[starts], n_turns)
    return _Turns(n_turns, said - answers - before, answers, tool_s)


def _lengths(rng: np.random.Generator, mean: float, n: int) -> Any:
    drawn = rng.lognormal(math.log(mean) - LENGTH_SIGMA**2 / 2.0, LENGTH_SIGMA, n)
    return np.maximum(1, np.rint(drawn)).astype(np.int64)


def _draw_arrivals(rng: np.random.Generator, users: InteractiveEntry) -> FloatArray:
    """Arrivals at the low rate and the high one in turn, s; a Poisson process in stretched time."""
    low, high = users.per_s
    due = np.cumsum(rng.exponential(1.0, users.sessions))
    waves = 2 * math.ceil(due[-1] / ((low + high) * users.wave_s)) + 2
    expected = np.concatenate(([0.0], np.cumsum([users.wave_s * (high if i % 2 else low) for i in range(waves)])))
    return np.interp(due, expected, users.wave_s * np.arange(waves + 1))


def task_constants(task: RolloutTask) -> dict[str, Any]:
    """Everything except the seed that a task's episodes depend on."""
    entry = task.entry.model_dump(exclude={"name", "gym_id", "difficulty", "description"})
    hardware = task.entry.workloads[0].hardware
    return {**entry, "tables": {name: tables_of(name).sha256 for name in hardware}, "rules": dict(ENGINE_RULES)}


def config_json(config: RolloutConfig) -> dict[str, Any]:
    """The settings that differ from the task's."""
    return {name: value for name, value in config.model_dump().items() if value is not None}
