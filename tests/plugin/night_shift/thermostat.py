"""Example of a third environment family, as an author would add it: one folder, and a line in each registry.

Heat a room through a night: choose the heater's level once a minute, keep the room near its set point, use little fuel.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Final

import numpy as np
from pydantic import BaseModel, Field

from inferencegym.errors import EpisodeDoneError, InvalidConfigError, MalformedLogError, NotResetError, UnknownTaskError
from inferencegym.families import Entry, EpisodeEnv, Family, Grade, GymCodec, Policy, TaskEntry, outcome
from inferencegym.messages import WHOLE, Message, read
from inferencegym.tasks import TaskId

SET_POINT_C: Final = 20.0
COMFORT_C: Final = 5.0
MAX_LEVEL: Final = 3
TASKS: Final = {"frosty-night": -10.0, "mild-night": 8.0}
"""Task id -> mean temperature outside."""


class HeaterAction(Message):
    """Action: the heater's level."""

    level: Annotated[int, Field(ge=0, le=MAX_LEVEL, description="of the heater"), WHOLE] = 0


class RoomMessage(BaseModel):
    """Observation of the thermostat."""

    inside_c: float
    outside_c: float
    minute: int


class NightConfig(Message):
    """Settings that a reset may override."""

    episode_length: Annotated[int, Field(ge=1, le=1_000), WHOLE] = 60


@dataclass(frozen=True)
class Room:
    """The observation."""

    inside_c: float
    outside_c: float
    minute: int


class ThermostatEnv:
    """One night."""

    def __init__(self) -> None:
        self.seed, self.session_id = 42, str(uuid.uuid4())
        self.actions: list[dict[str, Any]] = []
        self.episode_log: list[dict[str, Any]] = []
        self.task_id: TaskId = "frosty-night"
        self._config = NightConfig()
        self._outside: list[float] = []
        self._inside = SET_POINT_C

    @property
    def last_reward(self) -> float:
        return float(self.episode_log[-1]["reward"])

    @property
    def episode_length(self) -> int:
        return self._config.episode_length

    @property
    def done(self) -> bool:
        return len(self.actions) >= self.episode_length

    def reset(
        self,
        seed: int | None = None,
        task_id: Any = None,
        config: Mapping[str, Any] | None = None,
        session_id: str | None = None,
    ) -> Room:
        wanted = str(self.task_id if task_id is None else task_id)
        self._config = check_config(wanted, config)
        self.task_id, self.seed = wanted, self.seed if seed is None else seed
        self.session_id = session_id or str(uuid.uuid4())
        drawn = np.random.default_rng(self.seed).normal(TASKS[wanted], 2.0, self.episode_length + 1)
        self._outside, self._inside = drawn.tolist(), SET_POINT_C
        self.actions, self.episode_log = [], []
        return self.observation()

    @property
    def n_entries(self) -> int:
        return len(self.episode_log)

    def check(self, action: HeaterAction) -> HeaterAction:
        """Every heater level is allowed."""
        return action

    def play(self, action: HeaterAction) -> tuple[Room, float, bool]:
        if not self._outside:
            raise NotResetError("step before reset: call reset() first")
        if self.done:
            raise EpisodeDoneError(f"the night ended after {self.episode_length} minutes")
        outside = self._outside[len(self.actions)]
        self._inside += 0.05 * (outside - self._inside) + 0.8 * action.level
        metrics = {"inside_c": self._inside, "level": action.level}
        reward = max(0.0, 1.0 - abs(self._inside - SET_POINT_C) / COMFORT_C) - 0.1 * action.level
        self.actions.append({"level": action.level})
        self.episode_log.append(
            {"timestep": len(self.actions), "action": self.actions[-1], "reward": reward, "metrics": metrics}
        )
        return self.observation(), reward, self.done

    def step(self, action: Any) -> tuple[Room, float, bool, dict[str, Any]]:
        return *self.play(action), self.info()

    def info(self) -> dict[str, Any]:
        last = self.episode_log[-1]
        info = {"timestep": last["timestep"], "metrics": last["metrics"], "action_applied": last["action"]}
        return {**info, **outcome(self.grade())} if self.done else info

    def grade(self) -> Grade:
        return grade(self.task_id, self.episode_log)

    def observation(self) -> Room:
        return Room(self._inside, self._outside[len(self.actions)], len(self.actions))

    def observation_dict(self) -> dict[str, Any]:
        return asdict(self.observation())

    def config_dict(self) -> dict[str, Any]:
        return self._config.model_dump()

    def state(self) -> dict[str, Any]:
        taken = {"step_count": len(self.actions), "done": self.done}
        return {"session_id": self.session_id, "task_id": self.task_id, "seed": self.seed, **taken}


def check_config(task_id: TaskId, config: Mapping[str, Any] | None) -> NightConfig:
    if task_id not in TASKS:
        raise UnknownTaskError(f"task_id={task_id!r} is not a task: valid ids are {', '.join(TASKS)}")
    return read(NightConfig, dict(config or {}), refused, "config")


def refused(field: str, value: object, allowed: str) -> Exception:
    return InvalidConfigError(f"{field}={value!r} is not allowed: it must be {allowed}")


def grade(task_id: TaskId, entries: Sequence[Entry]) -> Grade:
    if not entries:
        return {"score": 0.0, "breakdown": {}, "feedback": "The log is empty."}
    try:
        inside = np.array([entry["metrics"]["inside_c"] for entry in entries], dtype=float)
    except (KeyError, TypeError, ValueError) as error:
        raise MalformedLogError(f"the log has no temperatures ({error!r})") from error
    comfort = float(np.clip(1.0 - np.abs(inside - SET_POINT_C) / COMFORT_C, 0.0, 1.0).mean())
    return {"score": comfort, "breakdown": {"comfort": comfort}, "feedback": f"{100 * comfort:.0f}% comfortable."}


POLICIES: Final = {"off": "Never heats.", "two_point": "Heats below the set point."}
"""Policies that a server offers, by name, each with a description."""


def make_policy(name: str, env: EpisodeEnv) -> Policy:
    if name == "off":
        return lambda room: HeaterAction(level=0)
    return lambda room: HeaterAction(level=2 if room.inside_c < SET_POINT_C else 0)


def spaces() -> Any:
    from gymnasium import spaces

    return spaces


FAMILY: Final = Family(
    name="thermostat",
    title="Thermostat",
    description="Heat a room through a night.",
    env_name="thermostat",
    make=ThermostatEnv,
    action_model=HeaterAction,
    observation_model=RoomMessage,
    config_model=NightConfig,
    log_entry_schema={"type": "object", "required": ["metrics"]},
    tasks=lambda: [
        TaskEntry(name, name.title().replace("-", ""), {"id": name, "outside_c": mean}) for name, mean in TASKS.items()
    ],
    default_task="frosty-night",
    grade=grade,
    constants=lambda task_id: {"outside_c": TASKS[str(task_id)]},
    check_config=check_config,
    gym=GymCodec(
        action_space=lambda: spaces().Discrete(MAX_LEVEL + 1),
        observation_space=lambda: spaces().Box(-100.0, 1_000.0, (3,), np.float32),
        encode=lambda room: np.array([room.inside_c, room.outside_c, room.minute], dtype=np.float32),
        decode=lambda action: HeaterAction(level=int(action)),
    ),
)
