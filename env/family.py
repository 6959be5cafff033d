"""Environment families: the record with everything that other packages need to know about a family.

A family is a kind of environment (serving fleets, the traffic controller). The server, OpenEnv, Gymnasium, grading,
verification, the leaderboard and the command line use nothing of it but its :class:`Family` record, so a new family is
a folder in ``env/`` with its record and one line in :mod:`env.families`.

An :class:`EpisodeRecord` (family, task, seed, configuration and the actions played) determines an episode:
:meth:`Family.replay` plays it again, bit for bit. Records are stored, sent between processes and verified.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final, Protocol

from pydantic import BaseModel

from inferencegym import __author__, __url__, __version__
from inferencegym.errors import DataFormatError, InvalidActionError, refusal
from inferencegym.installation import install_hint
from inferencegym.messages import Message, read
from inferencegym.tasks import TaskId

try:
    import orjson
except ModuleNotFoundError as error:  # a client-only installation
    raise ModuleNotFoundError(install_hint(error) or str(error), name=error.name) from error

TRAIN: Final = "train"
TEST: Final = "test"
"""OpenEnv's splits: the tasks of GET /tasks, and the others of GET /tasks?all=true, on recorded traffic and more."""

RECORD_VERSION: Final = 3
"""Version of the stored form of records. 1 kept the names of an action's fields, 2 had no id of the reset."""

Entry = Mapping[str, Any]
"""One step of an episode log: timestep, action, reward, metrics."""
Grade = dict[str, Any]
"""``score`` in [0, 1], ``breakdown``, ``feedback`` and more."""
Action = bytes
"""One action of a record: the values of the action's fields as a JSON array, a fifth of the size with the names."""


def outcome(grade: Grade) -> dict[str, Any]:
    """Part of a grade in the last step's info: ``score``, ``breakdown`` and ``feedback``."""
    return {name: grade[name] for name in ("score", "breakdown", "feedback")}


class EpisodeEnv(Protocol):
    """Environment of one running episode; :class:`env.inference_env.InferenceEnv` documents the methods."""

    seed: int
    session_id: str

    @property
    def actions(self) -> list[dict[str, Any]]:
        """Actions of the steps taken so far."""
        ...

    @property
    def last_reward(self) -> float:
        """Reward of the last step."""
        ...

    @property
    def episode_log(self) -> list[dict[str, Any]]:
        """Log so far, as graders accept it: an entry per step, or several if a step holds its action."""
        ...

    @property
    def n_entries(self) -> int:
        """Entries of the log so far."""
        ...

    @property
    def task_id(self) -> TaskId:
        """Id of the task."""
        ...

    @property
    def episode_length(self) -> int:
        """Log entries of a whole episode."""
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

    def check(self, action: Any) -> Any:
        """The action in the form of :meth:`play`. Raises InvalidActionError for one that this episode cannot play.

        Sessions check before they store a step, because every stored step must play.
        """
        ...

    def play(self, action: Any) -> tuple[Any, float, bool]:
        """Take one step with an action that :meth:`check` returned; return observation, reward and done."""
        ...

    def info(self) -> dict[str, Any]:
        """Details of the last step; after the end of the episode also :func:`outcome` of its grade."""
        ...

    def grade(self) -> Grade:
        """Grade of the steps played so far: that of :attr:`episode_log`."""
        ...

    def step(self, action: Any) -> tuple[Any, float, bool, dict[str, Any]]:
        """Take one step and return observation, reward, done and info."""
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


def state_of(episode: EpisodeEnv) -> dict[str, Any]:
    """Task, seed, configuration and actions so far, as JSON: what determines an episode."""
    config, actions = episode.config_dict(), list(episode.actions)
    return {"task_id": episode.task_id, "seed": episode.seed, "config": config, "actions": actions}


def check_state(state: object) -> None:
    """Raise :class:`InvalidConfigError` for a value that :func:`state_of` cannot have made."""
    if not isinstance(state, Mapping) or not {"task_id", "seed", "config", "actions"} <= state.keys():
        raise refusal("state", state, "what get_state() returned: task_id, seed, config and actions")


@dataclass(frozen=True, slots=True)
class TaskEntry:
    """A task in lists: id, Gymnasium name, whether it replays recorded traffic, and its description."""

    task_id: TaskId
    gym_id: str
    description: Mapping[str, Any]
    recorded: bool = False


Policy = Callable[[Any], Any]
"""Function from an observation to the next action; a new one is made for each episode."""


@dataclass(frozen=True, slots=True)
class GymFaces:
    """Gymnasium environments of a family, as entry points that take ``task_id``; ``vector`` may be missing."""

    scalar: str
    vector: str | None = None
    learner: Callable[[TaskId], Mapping[str, Any]] | None = None
    """Arguments of a task's second id, ``-v2``, with which a learner needs no tuning; tasks have none with None."""


@dataclass(frozen=True, slots=True)
class GymCodec:
    """Arrays for :class:`env.gym.EpisodeGymEnv`: spaces, and how observations and actions are converted."""

    action_space: Callable[[], Any]
    observation_space: Callable[[], Any]
    encode: Callable[[Any], Any]
    """Observation of the environment -> element of the observation space."""
    decode: Callable[[Any], Any]
    """Element of the action space -> action of the environment."""


@dataclass(frozen=True, slots=True)
class HttpShape:
    """Differences of a family's HTTP answers from the default, where its published document fixes them."""

    observation_key: str = "observation"
    """Name of the observation in answers of /reset and /step."""
    reset_fields: tuple[str, ...] = ("episode_length", "config", "reward", "done")
    """Further fields in answers of /reset, besides session_id, task_id, seed and the observation."""
    state_has_observation: bool = True
    """Whether GET /state nests the observation; otherwise its fields are fields of the state."""
    session_is_optional: bool = False
    """Whether a step without session_id plays the caller's latest episode (by cookie, else address and client id)."""
    health: Mapping[str, Any] | None = None
    """Fixed answer of GET /health under the family's prefix; None: the server's own."""
    manifest_type: str = "application/yaml"
    step_info: Mapping[str, Any] = field(default_factory=dict)
    """JSON schema of a step's info."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Family:
    """Record of an environment family: its environment, messages, tasks, grade, policies and descriptions."""

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
    """JSON schema of the fields of a step that graders read."""
    tasks: Callable[[], Sequence[TaskEntry]]
    default_task: TaskId
    grade: Callable[[TaskId, Sequence[Entry]], Grade]
    constants: Callable[[TaskId], Mapping[str, Any]]
    """Everything on which a task's numbers depend, besides release and table, for the digest of :mod:`env.verify`.
    """
    check_config: Callable[[TaskId, Mapping[str, Any] | None], object]
    """The task's configuration with these settings, equal where scores can be compared. Raises UnknownTaskError or
    InvalidConfigError."""
    hold: Callable[[TaskId, Mapping[str, Any] | None], int] = lambda task_id, config: 1
    """Most log entries of one step under a configuration: the seconds for which it holds its action."""
    played_id: Callable[[TaskId, Mapping[str, Any] | None], TaskId] = lambda task_id, _config: task_id
    """Id of the task that a reset with these settings plays, where settings may choose another."""
    listed_id: Callable[[TaskId], TaskId] = lambda task_id: task_id
    """Id of the listed task of which a played task is a variant: scores are comparable only with that task's."""
    log_entries: Callable[[Any], Sequence[Entry]] = list
    """Steps of a log as entries; answers of POST /step are accepted as well."""
    table_sha256: Callable[[], str | None] = lambda: None
    action_of: Callable[[Any], Any] = lambda message: message
    """Converts a message of ``action_model`` into the environment's action."""
    short_action: str | None = None
    """Field of an action whose bare value is accepted as an action."""
    arrivals: Callable[[Any], Sequence[float]] | None = None
    """Requests that arrived in each second of an episode; None if its metrics or observations have them."""
    score_so_far: Callable[[Any], float] | None = None
    """Score of the seconds that an episode has played; None if only whole episodes have one."""
    gym: GymFaces | GymCodec | None = None
    http: HttpShape = HttpShape()
    info: Callable[[], Mapping[str, Any]] = dict
    """Fields of GET /info besides the schemas: formula of the reward, calibration, provenance of data."""
    reward_range: tuple[float | None, float | None] = (None, None)
    manifest: Path | None = None
    about: Path | None = None
    """Introduction in Markdown: the environment, and how to play it on a server."""

    def metadata(self) -> dict[str, Any]:
        """Description of an environment for OpenEnv, with the fields of its ``EnvironmentMetadata``."""
        return {
            "name": self.title,
            "description": self.description,
            "readme_content": None if self.about is None else self.about.read_text(encoding="utf-8"),
            "version": __version__,
            "author": __author__,
            "documentation_url": __url__,
        }

    def splits(self) -> dict[str, list[TaskEntry]]:
        """Tasks by :data:`TRAIN` and :data:`TEST`; a split without tasks is left out."""
        found: dict[str, list[TaskEntry]] = {TRAIN: [], TEST: []}
        for task in self.tasks():
            found[TEST if task.recorded else TRAIN].append(task)
        return {split: tasks for split, tasks in found.items() if tasks}

    def specs(self, split: str) -> list[dict[str, Any]]:
        """Tasks of a split for OpenEnv's Task API; an unknown split has none.

        With the keys of OpenEnv's RFC 013: ``split``, ``index`` and ``difficulty``, a number, higher for harder tasks.
        That is ``measured_difficulty``, left out where nothing was measured; the word of GET /tasks is ``level`` here.
        """
        specs = [
            {**task.description, "split": split, "index": i} for i, task in enumerate(self.splits().get(split, []))
        ]
        for spec in specs:
            if isinstance(spec.get("difficulty"), str):
                spec["level"] = spec.pop("difficulty")
            if (measured := spec.get("measured_difficulty")) is not None:
                spec["difficulty"] = measured
        return specs

    def task_at(self, split: str, index: int) -> TaskEntry:
        """The task at a place of a split, counted from 0. Raises InvalidConfigError."""
        found = self.splits()
        if split not in found:
            raise refusal("split", split, "one of " + ", ".join(found))
        if not 0 <= index < len(found[split]):
            raise refusal("index", index, f"an integer from 0 to {len(found[split]) - 1}")
        return found[split][index]

    @property
    def action_fields(self) -> tuple[str, ...]:
        """Names of an action's fields, in the order of a record's values."""
        return _fields(self.action_model)

    def parse_action(
        self, action: object, before: Mapping[str, Any] | None = None
    ) -> tuple[Any, Action, Mapping[str, Any]]:
        """Check an action; returns it in the forms of the environment and of records, and its values by field.

        Optional fields that it leaves out keep their values from ``before``, the values of the previous step's action.
        In the first step they have their defaults. Raises InvalidActionError.
        """
        if self.short_action is not None and not isinstance(action, Mapping):
            action = {self.short_action: action}
        message = read(self.action_model, action, InvalidActionError, whole="action")
        values = message.__dict__
        given = message.model_fields_set
        if before is not None and len(given) < len(values):
            # Checked in the step before, so only the given values are checked here.
            values.update({name: value for name, value in before.items() if name not in given})
        # Copied, because orjson's own bytes keep the 4 KB of its write buffer for as long as they live.
        return self.action_of(message), bytes(memoryview(orjson.dumps([*values.values()]))), values

    def action_json(self, action: Action) -> dict[str, Any]:
        """JSON form of a record's action. Raises DataFormatError if it is not an action of this family."""
        try:
            values = orjson.loads(action)
        except orjson.JSONDecodeError:
            values = None
        names = self.action_fields
        if not isinstance(values, list) or len(values) != len(names):
            raise DataFormatError(f"{action[:200]!r} is not a JSON array of {', '.join(names)}")
        return dict(zip(names, values, strict=True))

    def is_own_config(self, task_id: TaskId, config: Mapping[str, Any] | None) -> bool:
        """Whether a listed task is played in its own configuration, so that scores can be compared.

        False for every variant, whether the task's id or a setting selects it. Raises UnknownTaskError or
        InvalidConfigError.
        """
        return self.check_config(task_id, config) == self.check_config(self.listed_id(task_id), None)

    def episode(
        self, task_id: TaskId, seed: int, config: Mapping[str, Any] | None, actions: Sequence[Mapping[str, Any]]
    ) -> EpisodeRecord:
        """Make the record of an episode with these actions, one per step, given in JSON form.

        Raises InvalidActionError.
        """
        played: list[Action] = []
        before = None
        for action in actions:
            _, kept, before = self.parse_action(action, before)
            played.append(kept)
        return EpisodeRecord(self.name, task_id, seed, config or {}, played)

    def replay(self, record: EpisodeRecord, session_id: str | None = None) -> EpisodeEnv:
        """Play a record again, bit for bit.

        Raises InvalidActionError or EpisodeDoneError if its actions are not valid for one episode.
        """
        env = self.make()
        env.reset(seed=record.seed, task_id=record.task_id, config=record.config, session_id=session_id)
        for action in record.actions:
            self.play(env, action)
        return env

    def play(self, env: EpisodeEnv, action: Action) -> None:
        """Play one action of a record."""
        env.play(env.check(self.parse_action(self.action_json(action))[0]))


# Pydantic takes longer to look its fields up than to check an action.
@cache
def _fields(model: type[BaseModel]) -> tuple[str, ...]:
    return tuple(model.model_fields)


@dataclass(slots=True)
class EpisodeRecord:
    """Everything that determines an episode, without defaults, so that later changes of defaults cannot change it."""

    family: str
    task_id: TaskId
    seed: int
    config: Mapping[str, Any]
    actions: list[Action] = field(default_factory=list)
    release: str = __version__
    """Version of the package that plays the episode: another version may simulate differently."""
    version: int = RECORD_VERSION
    reset_id: str = field(default_factory=lambda: secrets.token_hex(8))
    """Id of the reset: tells episodes with the same start apart, and does not change when a record is rewritten."""

    def start_json(self) -> bytes:
        """The record without its actions."""
        return orjson.dumps({name: getattr(self, name) for name in self.__slots__ if name != "actions"})

    @classmethod
    def from_start(cls, text: bytes | str, actions: list[Action] | None = None) -> EpisodeRecord:
        """Decode :meth:`start_json`. Raises DataFormatError if the text has another form."""
        try:
            return cls(**orjson.loads(text), actions=actions or [])
        except (TypeError, orjson.JSONDecodeError) as error:
            raise DataFormatError(f"the start of an episode's record cannot be read: {error}") from error
