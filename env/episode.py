"""What sessions, stores, replay and grading know of an episode, whatever its family.

An episode is its record: family, task, seed, configuration and the actions played. Replaying the record gives the same
episode to the last bit, so the record is what is stored, sent between workers and verified.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from inferencegym.errors import InvalidConfigError
from inferencegym.tasks import TaskId

RECORD_VERSION: Final = 1


class EpisodeEnv(Protocol):
    """One episode being played; see :class:`env.inference_env.InferenceEnv` for the words."""

    seed: int
    session_id: str
    actions: list[dict[str, Any]]

    @property
    def family(self) -> str:
        """Name of the environment family."""
        ...

    @property
    def episode_log(self) -> list[dict[str, Any]]:
        """The steps played so far, as graders read them."""
        ...

    @property
    def task_id(self) -> TaskId:
        """Id of the task."""
        ...

    @property
    def done(self) -> bool:
        """Whether the episode has ended."""
        ...

    def reset(
        self,
        seed: int | None = None,
        task_id: Any = None,
        config: Mapping[str, Any] | None = None,
        session_id: str | None = None,
    ) -> Any:
        """Start an episode."""
        ...

    def play(self, action: Any) -> tuple[Any, float, bool]:
        """Play one step and return observation, reward and done."""
        ...

    def info(self) -> dict[str, Any]:
        """More about the last step."""
        ...

    def step(self, action: Any) -> tuple[Any, float, bool, dict[str, Any]]:
        """Play one step, with its info."""
        ...

    def observation_dict(self) -> dict[str, Any]:
        """The current observation as JSON."""
        ...

    def config_dict(self) -> dict[str, Any]:
        """The configuration as JSON."""
        ...

    def state(self) -> dict[str, Any]:
        """Metadata as JSON."""
        ...


@dataclass(frozen=True, slots=True)
class EpisodeRecord:
    """Everything an episode is; JSON in and out."""

    family: str
    task_id: TaskId
    seed: int
    config: Mapping[str, Any]
    actions: list[dict[str, Any]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """JSON form, versioned."""
        return {
            "version": RECORD_VERSION,
            "family": self.family,
            "task_id": self.task_id,
            "seed": self.seed,
            "config": dict(self.config),
            "actions": self.actions,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> EpisodeRecord:
        """Read the JSON form; raises :class:`InvalidConfigError` on another version or a missing key."""
        if data.get("version") != RECORD_VERSION:
            raise InvalidConfigError(f"record version {data.get('version')!r} is not {RECORD_VERSION}")
        try:
            return cls(data["family"], data["task_id"], data["seed"], data["config"], list(data["actions"]))
        except KeyError as error:
            raise InvalidConfigError(f"record lacks the key {error.args[0]!r}") from error


@dataclass(frozen=True, slots=True)
class Family:
    """An environment family: its name and how to make an episode of it (not yet reset)."""

    name: str
    make: Callable[..., EpisodeEnv]


def record_of(env: EpisodeEnv) -> EpisodeRecord:
    """The record of an episode as played so far."""
    return EpisodeRecord(env.family, env.task_id, env.seed, env.config_dict(), list(env.actions))
