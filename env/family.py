"""Environment families: one record of everything that other rooms need to know of one.

A family is a kind of environment (serving fleets, the traffic controller). Its :class:`Family` record is all that the
server, OpenEnv, Gymnasium, grading, verification, the leaderboard and the command line know of it, so a new family is a
folder in ``env/`` with its record and one line in :mod:`inferencegym.families`.

An episode is its :class:`EpisodeRecord`: family, task, seed, configuration and the actions played. :func:`replay` plays
a record and gives the same episode to the last bit, so the record is what is stored, sent between processes and
verified.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from pydantic import BaseModel

from inferencegym import __version__
from inferencegym.errors import DataFormatError, InvalidActionError
from inferencegym.installation import install_hint
from inferencegym.messages import Message, read
from inferencegym.tasks import TaskId

try:
    import orjson
except ModuleNotFoundError as error:  # an installation that is a client alone
    raise ModuleNotFoundError(install_hint(error) or str(error), name=error.name) from error

RECORD_VERSION: Final = 3
"""Form of a stored record. 1 kept the names of an action's fields, 2 no id of the reset."""

Entry = Mapping[str, Any]
"""One step of an episode log: timestep, action, reward, metrics."""
Grade = dict[str, Any]
"""``score`` in [0, 1], ``breakdown``, ``feedback`` and more."""
Action = bytes
"""One action of a record: the values of the action's fields as a JSON array. Without the fields' names it takes a fifth
of the room, in memory and in a store."""


class EpisodeEnv(Protocol):
    """One episode being played; see :class:`env.inference_env.InferenceEnv` for the words."""

    seed: int
    session_id: str
    actions: list[dict[str, Any]]

    @property
    def episode_log(self) -> list[dict[str, Any]]:
        """The steps played so far, as graders read them."""
        ...

    @property
    def task_id(self) -> TaskId:
        """Id of the task."""
        ...

    @property
    def episode_length(self) -> int:
        """Steps of a whole episode."""
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

    def observation(self) -> Any:
        """The current observation."""
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
class TaskEntry:
    """A task as lists show it: id, name for Gymnasium, whether it replays recorded traffic, and its description."""

    task_id: TaskId
    gym_id: str
    description: Mapping[str, Any]
    recorded: bool = False


Policy = Callable[[Any], Any]
"""From an observation to the next action; made anew for each episode."""


@dataclass(frozen=True, slots=True)
class GymFaces:
    """Gymnasium environments of a family, as entry points that take ``task_id``; ``vector`` may be missing."""

    scalar: str
    vector: str | None = None


@dataclass(frozen=True, slots=True)
class GymCodec:
    """Arrays for :class:`inferencegym.gym.EpisodeGymEnv`: spaces, and how observations and actions are converted."""

    action_space: Callable[[], Any]
    observation_space: Callable[[], Any]
    encode: Callable[[Any], Any]
    """Observation of the environment -> element of the observation space."""
    decode: Callable[[Any], Any]
    """Element of the action space -> action of the environment."""


@dataclass(frozen=True, slots=True)
class HttpShape:
    """Where a family's HTTP answers differ from the default; its published document may fix them."""

    observation_key: str = "observation"
    """Name of the observation in answers of /reset and /step."""
    reset_fields: tuple[str, ...] = ("episode_length", "config", "reward", "done")
    """What /reset returns beside session_id, task_id, seed and the observation."""
    state_has_observation: bool = True
    """Whether GET /state nests the observation; else its fields are among those of the state already."""
    session_is_optional: bool = False
    """Whether a step without session_id means the caller's latest episode (a cookie, else address and client id)."""
    health: Mapping[str, Any] | None = None
    """Fixed answer of GET /health under the family's prefix; None: the server's own."""
    manifest_type: str = "application/yaml"
    step_info: Mapping[str, Any] = field(default_factory=dict)
    """JSON schema of a step's info."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """An environment family, complete: what it plays, how actions are read, how episodes are graded."""

    name: str
    title: str
    description: str
    env_name: str
    """Name in OpenEnv's manifest and Task API."""
    make: Callable[[], EpisodeEnv]
    """A new environment, not yet reset."""
    action_model: type[Message]
    observation_model: type[BaseModel]
    config_model: type[BaseModel]
    log_entry_schema: Mapping[str, Any]
    """JSON schema of what graders read of one step."""
    tasks: Callable[[], Sequence[TaskEntry]]
    default_task: TaskId
    grade: Callable[[TaskId, Sequence[Entry]], Grade]
    constants: Callable[[TaskId], Mapping[str, Any]]
    """What a task's numbers depend on beside release and table, for the digest of :mod:`grader.verify`."""
    check_config: Callable[[TaskId, Mapping[str, Any] | None], object]
    """The task's configuration with these settings, equal where episodes are played alike. Raises UnknownTaskError or
    InvalidConfigError."""
    log_entries: Callable[[Any], Sequence[Entry]] = list
    """A log's steps as entries; answers of POST /step are read as well."""
    table_sha256: Callable[[], str | None] = lambda: None
    action_of: Callable[[Any], Any] = lambda message: message
    """The environment's action for a message of ``action_model``."""
    short_action: str | None = None
    """The one field of an action that may be sent bare."""
    policies: Mapping[str, str] = field(default_factory=dict)
    """Built-in policies that anybody may have played, with a description."""
    make_policy: Callable[[str, EpisodeEnv], Policy] | None = None
    """A policy by name for an episode. Raises InvalidConfigError where there is none of this name for the task."""
    compare: Callable[[TaskId, Sequence[str], Sequence[int]], dict[str, Any]] | None = None
    """Scores of agents for `inferencegym evaluate`; None: whole episodes of ``policies``, one by one."""
    gym: GymFaces | GymCodec | None = None
    http: HttpShape = HttpShape()
    info: Callable[[], Mapping[str, Any]] = dict
    """What GET /info says beside the schemas: formula of the reward, calibration, provenance of data."""
    reward_range: tuple[float | None, float | None] = (None, None)
    baseline: Callable[[], Mapping[str, Any]] | None = None
    manifest: Path | None = None

    @property
    def action_fields(self) -> tuple[str, ...]:
        """Names of an action's fields, in the order of a record's values."""
        return tuple(self.action_model.model_fields)

    def parse_action(self, action: object) -> tuple[Any, Action]:
        """An action as the environment takes it and as records keep it. Raises InvalidActionError."""
        if self.short_action is not None and not isinstance(action, Mapping):
            action = {self.short_action: action}
        message = read(self.action_model, action, InvalidActionError, whole="action")
        # Copied, because orjson's own bytes keep the 4 KB of its write buffer for as long as they live.
        return self.action_of(message), bytes(memoryview(orjson.dumps([*message.__dict__.values()])))

    def action_json(self, action: Action) -> dict[str, Any]:
        """An action of a record in its JSON form. Raises DataFormatError where it holds none of this family."""
        try:
            values = orjson.loads(action)
        except orjson.JSONDecodeError:
            values = None
        if not isinstance(values, list) or len(values) != len(self.action_fields):
            raise DataFormatError(f"{action[:200]!r} is not a JSON array of {', '.join(self.action_fields)}")
        return dict(zip(self.action_fields, values, strict=True))

    def is_own_config(self, task_id: TaskId, config: Mapping[str, Any] | None) -> bool:
        """Whether these settings change nothing of the task's own configuration, so that scores compare.

        Raises UnknownTaskError or InvalidConfigError.
        """
        return self.check_config(task_id, config) == self.check_config(task_id, None)

    def episode(
        self, task_id: TaskId, seed: int, config: Mapping[str, Any] | None, actions: Sequence[Mapping[str, Any]]
    ) -> EpisodeRecord:
        """The record of an episode with these actions, in their JSON form. Raises InvalidActionError."""
        played = [self.parse_action(action)[1] for action in actions]
        return EpisodeRecord(self.name, task_id, seed, config or {}, played)

    def replay(self, record: EpisodeRecord, session_id: str | None = None) -> EpisodeEnv:
        """Play a record again: the same episode, to the last bit.

        Raises InvalidActionError and EpisodeDoneError where its actions are not those of one episode.
        """
        env = self.make()
        env.reset(seed=record.seed, task_id=record.task_id, config=record.config, session_id=session_id)
        for action in record.actions:
            self.play(env, action)
        return env

    def play(self, env: EpisodeEnv, action: Action) -> None:
        """Play one action of a record."""
        env.play(self.parse_action(self.action_json(action))[0])


@dataclass(slots=True)
class EpisodeRecord:
    """Everything that an episode is, complete, so that later defaults cannot change it."""

    family: str
    task_id: TaskId
    seed: int
    config: Mapping[str, Any]
    actions: list[Action] = field(default_factory=list)
    release: str = __version__
    """Version of the package that plays it: another one may simulate differently."""
    version: int = RECORD_VERSION
    reset_id: str = field(default_factory=lambda: secrets.token_hex(8))
    """Tells two episodes apart that begin with the same; it stays the same when the record is written again."""

    def start_json(self) -> bytes:
        """The record without its actions."""
        return orjson.dumps({name: getattr(self, name) for name in self.__slots__ if name != "actions"})

    @classmethod
    def from_start(cls, text: bytes | str, actions: list[Action] | None = None) -> EpisodeRecord:
        """Read :meth:`start_json`. Raises DataFormatError where another form was written."""
        try:
            return cls(**orjson.loads(text), actions=actions or [])
        except (TypeError, orjson.JSONDecodeError) as error:
            raise DataFormatError(f"the start of an episode's record cannot be read: {error}") from error
