"""Episode files: reading, verification by replay, saving. The commands ``verify`` and ``leaderboard`` use it.

An episode is a JSON object, in the form of POST /grader's body::

    {"task": 3, "seed": 11, "config": {...}, "steps": [{"timestep", "action", "reward", "metrics"}, ...],
     "release": "1.0.0", "table_sha256": "57...", "constants_sha256": "3b..."}

``task_id`` and ``episode_log`` are accepted for ``task`` and ``steps``, and answers of POST /step as steps. ``config``
may be left out (then it is the task's own), and so may ``family`` (then it follows from the task). A ``score`` is
checked if given. The last three keys identify the simulator that made the numbers. A log may leave them out, but then a
log from another table or calibration cannot be distinguished from a forged one. :func:`saved` writes all of them. A
``.json`` file holds one episode or an array of them; JSON Lines hold an episode per line, or the object without
``steps`` on one line and each of its steps on a line of its own.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from env.families import family_of
from env.family import Entry, EpisodeEnv, Family, Grade
from env.leaderboard import IDENTITY, UNNAMED, Simulator, read_simulator
from env.verify import RELATIVE_TOLERANCE, verify_log
from inferencegym import __version__
from inferencegym.errors import DataFormatError, ForgedLogError, refusal, short_repr
from inferencegym.messages import parse_json
from inferencegym.tasks import TaskId

MAX_FILE_BYTES: Final = 1 << 30


@dataclass(slots=True)
class EpisodeLog:
    """One episode as read from a file; ``place`` says where, for messages."""

    place: str
    family: Family
    task_id: TaskId
    seed: int
    config: Mapping[str, Any] | None
    steps: list[Any] = field(default_factory=list)
    score: float | None = None
    simulator: Simulator | None = None
    """The simulator that played it; None if the file does not name it."""

    @property
    def names_constants(self) -> bool:
        """Whether the file names its constants, so that a difference proves a forgery."""
        return self.simulator is not None and self.simulator.constants_sha256 is not None

    @property
    def own_config(self) -> bool:
        """Whether it was played in the task's own configuration, so that its score compares with others."""
        return self.family.is_own_config(self.task_id, self.config)

    def entries(self) -> Sequence[Entry]:
        """The steps as graders read them."""
        return self.family.log_entries(self.steps)


def verify_episode(log: EpisodeLog) -> Grade:
    """Replay an episode and return its grade.

    Raises :class:`ForgedLogError` naming the first step and field that differ from the replay, or the score,
    :class:`MalformedLogError` where the steps do not have the form of a log, and :class:`DataFormatError` where the
    file names another simulator than this one, which cannot check its numbers.
    """
    if log.simulator is not None:
        try:
            log.simulator.must_be(simulator(log.family, log.task_id))
        except DataFormatError as error:
            raise DataFormatError(f"{log.place}: {error}") from error
    try:
        return _verified(log)
    except ForgedLogError as error:
        if log.names_constants:
            raise
        raise ForgedLogError(f"{error}: {UNNAMED}", error.step, error.field) from error


def _verified(log: EpisodeLog) -> Grade:
    replayed = verify_log(log.family, log.task_id, log.seed, log.config, log.entries())
    grade = log.family.grade(replayed.task_id, replayed.episode_log)
    claimed = log.score
    # Compared with the bounds first: JSON's integers may be too large for a float.
    if claimed is not None and not (
        0 <= claimed <= 1 and math.isclose(claimed, grade["score"], rel_tol=RELATIVE_TOLERANCE, abs_tol=1e-12)
    ):
        raise ForgedLogError(
            f"score is {short_repr(claimed)} in the file, and {grade['score']!r} for these steps", field="score"
        )
    return grade


def simulator(family: Family, task_id: TaskId) -> Simulator:
    """Identity of the simulator that plays a task's episodes here: release, and digests of table and constants."""
    return Simulator(__version__, family.table_sha256(), constants_sha256(family, task_id))


def constants_sha256(family: Family, task_id: TaskId) -> str:
    """Digest of a task's definition and measured constants, on which its numbers depend besides release and table.

    Other tasks, and how the constants were measured, do not change it. Raises :class:`UnknownTaskError`, and
    :class:`InvalidConfigError` for a task that is not calibrated.
    """
    played = {name: _canonical(value) for name, value in family.constants(task_id).items()}
    return hashlib.sha256(json.dumps(played, sort_keys=True).encode()).hexdigest()


def _canonical(value: Any) -> Any:
    """Numbers with 12 digits: parts of a task are logarithms, whose last digit may differ between machines."""
    if isinstance(value, Mapping):
        return {str(name): _canonical(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_canonical(part) for part in value]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return f"{value:.12g}"
    return value


# ---------------------------------------------------------------- files


def saved(env: EpisodeEnv | Any) -> dict[str, Any]:
    """The episode so far as an object for an episode file, with everything that verification needs.

    ``env`` plays one episode in this process: an ``InferenceEnv``, or a Gymnasium environment, in wrappers or not.
    Raises :class:`InvalidConfigError` for any other.
    """
    episode: EpisodeEnv = getattr(getattr(env, "unwrapped", env), "episode", env)
    if not hasattr(episode, "config_dict"):
        raise refusal("env", env, "an InferenceEnv, or a Gymnasium environment of one serving or rollouts episode")
    family = family_of(episode.task_id)
    return {
        "family": family.name,
        "task": episode.task_id,
        "seed": episode.seed,
        "config": episode.config_dict(),
        **asdict(simulator(family, episode.task_id)),
        "steps": episode.episode_log,
    }


def read_episodes(path: Path, defaults: Mapping[str, Any] | None = None) -> list[EpisodeLog]:
    """All episodes of a file; ``defaults`` gives keys that the file leaves out.

    Raises :class:`DataFormatError` naming file, line and key.
    """
    episodes: list[EpisodeLog] = []
    for place, value in read_json(path):
        if isinstance(value, dict) and ("task" in value or "task_id" in value):
            episodes.append(_episode(place, value, defaults or {}))
        elif isinstance(value, dict) and episodes:
            episodes[-1].steps.append(value)
        elif isinstance(value, dict) and defaults:
            episodes.append(_episode(place, {"steps": [value]}, defaults))
        else:
            raise DataFormatError(
                f"{place}: an episode begins with task and seed; give --task and --seed if it has none"
            )
    if not episodes:
        raise DataFormatError(f"{path} holds no episode")
    return episodes


def read_json(path: Path) -> Iterator[tuple[str, Any]]:
    """Place and value of every line of a JSON Lines file, or of every element of a JSON file.

    Strict: UTF-8, no NaN, no repeated keys. Raises :class:`DataFormatError`.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise DataFormatError(f"{path} is larger than {MAX_FILE_BYTES:,} bytes")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataFormatError(f"{path} cannot be read: {error}") from error
    lines = [(i, line) for i, line in enumerate(text.splitlines(), 1) if line.strip()]
    # The first line of a JSON file is seldom a whole value; the first line of a JSON Lines file always is.
    if path.suffix == ".json" or len(lines) == 1 or (lines and not _is_json(lines[0][1])):
        value = _parse(str(path), text)
        # An array holds episodes, or the steps of one.
        yield from (
            ((f"{path}[{i}]", one) for i, one in enumerate(value)) if isinstance(value, list) else [(str(path), value)]
        )
        return
    for number, line in lines:
        yield f"{path}:{number}", _parse(f"{path}:{number}", line)


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _parse(place: str, text: str) -> Any:
    try:
        return parse_json(text, DataFormatError)
    except DataFormatError as error:
        raise DataFormatError(f"{place}: {error}") from error


def _episode(place: str, data: Mapping[str, Any], defaults: Mapping[str, Any]) -> EpisodeLog:
    def get(*names: str) -> Any:
        for source in (data, defaults):
            for name in names:
                if source.get(name) is not None:
                    return source[name]
        return None

    task, seed, config = get("task", "task_id"), get("seed"), get("config")
    steps, score, family = get("steps", "episode_log"), get("score"), get("family")
    if steps is None and "actions" in data:
        raise DataFormatError(
            f"{place}: steps is missing: this is a state of get_state(), which has no metrics to check; write "
            "inferencegym.verification.saved(env) to the file instead"
        )
    for name, value, kind, needed in (
        ("task", task, (int, str), True),
        ("seed", seed, int, True),
        ("config", config, dict, False),
        ("steps", steps, list, False),
        ("score", score, (int, float), False),
        ("family", family, str, False),
    ):
        if value is None and not needed:
            continue
        if value is None or isinstance(value, bool) or not isinstance(value, kind):
            raise DataFormatError(
                f"{place}: {name}={short_repr(value)} is not allowed: see `inferencegym verify --help`"
            )
    return EpisodeLog(place, family_of(task, family), task, seed, config, list(steps or []), score, _named(place, data))


def _named(place: str, data: Mapping[str, Any]) -> Simulator | None:
    """The simulator that a log names: with all three keys, or with none."""
    if not any(key in data for key in IDENTITY):
        return None
    for key in IDENTITY:
        if key not in data:
            raise DataFormatError(f"{place}: {key} is missing: a log names {', '.join(IDENTITY)}, or none of them")
    try:
        return read_simulator(data)
    except DataFormatError as error:
        raise DataFormatError(f"{place}: {error}") from error
