"""Leaderboard that anybody can verify by replay: a file of episodes, each with the actions that reached its score.

The file is JSON Lines, UTF-8, one episode per line::

    {"format": 1, "family": "serving", "task": 3, "agent": "heuristic", "seed": 10000, "score": 0.71,
     "release": "1.0.0", "table_sha256": "57...", "constants_sha256": "3b...",
     "actions": [{"kv_budget": 1.0, ...}, ...]}

``family`` and ``task`` say what was played, in the task's own configuration; ``agent`` is a name of the submitter's
choice; ``actions`` are those of a whole episode in order; ``release``, ``table_sha256`` (null where a family has no
table) and ``constants_sha256`` (the task's definition and calibration; older lines lack it) name the simulator that
made the score. The replay of the actions from the seed must give the score again (within 1e-9, since text may lose
digits), or the line is refused; the score of the replay counts. Agents are ranked by their mean score over a task's
held-out seeds; one that lacks some of these seeds is listed without a rank.

A replay proves that these actions reach this score. It does not prove how they were chosen: they may be the result of a
search on the published seeds. Ask for the agent, and run it on your own seeds.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from env.family import Family
from env.verify import RELATIVE_TOLERANCE, replayed_score
from inferencegym.errors import DataFormatError, ForgedLogError
from inferencegym.tasks import TaskId

FORMAT: Final = 1
MAX_NAME: Final = 64
IDENTITY: Final = ("release", "table_sha256", "constants_sha256")
"""Keys by which a line or a log names the simulator that gave its numbers."""


@dataclass(frozen=True, slots=True)
class Simulator:
    """Identity of a simulator for one task: release of this package, and digests of the lookup table and of the task.

    ``table_sha256`` is None where the family has no table, ``constants_sha256`` (the task's definition and its measured
    constants) where a file does not name it.
    """

    release: str
    table_sha256: str | None
    constants_sha256: str | None = None

    def __str__(self) -> str:
        table, constants = _short(self.table_sha256), _short(self.constants_sha256)
        return f"release {self.release} with table {table} and constants {constants}"

    def must_be(self, here: Simulator) -> None:
        """Raise :class:`DataFormatError` if the simulator ``here`` cannot verify numbers of this one."""
        unnamed = self.constants_sha256 is None
        differ = {
            "another release": self.release != here.release,
            "another table": self.table_sha256 != here.table_sha256,
            "other constants of the task": not unnamed and self.constants_sha256 != here.constants_sha256,
        }
        if any(differ.values()):
            raise DataFormatError(
                f"played on {' and '.join(name for name, does in differ.items() if does)}: on {self}; this is {here}: "
                "check it with its own, or play it again"
            )


UNNAMED: Final = (
    "it is forged, or was played on other constants (a calibration changes them), which it does not name: check it "
    "where it was played, or play it again"
)
"""Message if a replay differs and the log does not name its constants, so the cause is unknown."""


@dataclass(frozen=True, slots=True)
class Submission:
    """One line of a leaderboard file; see the module's text."""

    family: str
    task_id: TaskId
    agent: str
    seed: int
    score: float
    simulator: Simulator
    actions: Sequence[Mapping[str, Any]]

    def to_json(self) -> str:
        """Encode as a line of the file, without the newline."""
        return json.dumps(
            {
                "format": FORMAT,
                "family": self.family,
                "task": self.task_id,
                "agent": self.agent,
                "seed": self.seed,
                "score": self.score,
                "release": self.simulator.release,
                "table_sha256": self.simulator.table_sha256,
                "constants_sha256": self.simulator.constants_sha256,
                "actions": list(self.actions),
            },
            separators=(",", ":"),
            allow_nan=False,
        )

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Submission:
        """Check a line's object; raises :class:`DataFormatError` naming the invalid key."""
        known = {"format", "family", "task", "agent", "seed", "score", *IDENTITY, "actions"}
        for key in sorted((known ^ set(data)) - {"constants_sha256"}):
            raise DataFormatError(f"{key} is missing" if key in known else f"{key} is not a key of a submission")
        if data["format"] != FORMAT:
            raise DataFormatError(f"format={data['format']!r} is not allowed: this release reads {FORMAT}")
        task = data["task"]
        if isinstance(task, bool) or not isinstance(task, (int, str)):
            raise DataFormatError(f"task={task!r} is not allowed: it must be a task id")
        return cls(
            family=_text(data, "family"),
            task_id=task,
            agent=checked_name(_text(data, "agent")),
            seed=_seed(data),
            score=_unit(data, "score"),
            simulator=read_simulator(data),
            actions=_actions(data),
        )

    @property
    def key(self) -> tuple[str, str, str, int]:
        """Key that must be unique in a file: family, task, agent, seed."""
        return self.family, str(self.task_id), self.agent, self.seed


def read_simulator(data: Mapping[str, Any]) -> Simulator:
    """The simulator that a line or a log names; raises :class:`DataFormatError` naming the key at fault."""
    return Simulator(_text(data, "release"), _digest(data, "table_sha256"), _digest(data, "constants_sha256"))


def checked_name(name: str) -> str:
    """An agent's name: printable, short, without space around it. Raises :class:`DataFormatError`."""
    if not name or len(name) > MAX_NAME or not name.isprintable() or name != name.strip():
        raise DataFormatError(f"agent={name[:80]!r} is not allowed: 1 to {MAX_NAME} printable characters")
    return name


def replay_submission(submission: Submission, simulator: Simulator, family: Family) -> Submission:
    """Replay a submission; returns it with the replayed score, which equals the claimed one except for lost digits.

    Raises :class:`ForgedLogError` if the scores differ, and :class:`DataFormatError` if it was played on another
    release, table or calibration, which this one cannot check.
    """
    submission.simulator.must_be(simulator)
    true = replayed_score(family, submission.task_id, submission.seed, submission.actions)
    if not math.isclose(submission.score, true, rel_tol=RELATIVE_TOLERANCE, abs_tol=RELATIVE_TOLERANCE):
        why = f": {UNNAMED}" if submission.simulator.constants_sha256 is None else ""
        raise ForgedLogError(
            f"score is {submission.score!r} in the file, and {true!r} when the actions are replayed{why}", field="score"
        )
    return replace(submission, score=true)


@dataclass(frozen=True, slots=True)
class Standing:
    """One agent on one task: its ``scores`` on the seeds that count, in their order, and their mean.

    ``rank`` is None for an agent that lacks ``missing`` of the seeds.
    """

    rank: int | None
    agent: str
    mean: float
    scores: tuple[float, ...]
    missing: int


def rank(submissions: Iterable[Submission], seeds: Sequence[int]) -> list[Standing]:
    """Standings of one task's submissions, the best first; agents with equal means share a rank."""
    wanted = set(seeds)
    scores: dict[str, dict[int, float]] = {}
    for one in submissions:
        if one.seed in wanted:
            scores.setdefault(one.agent, {})[one.seed] = one.score
    rows = [
        (statistics.fmean(by_seed.values()), agent, by_seed, len(wanted) - len(by_seed))
        for agent, by_seed in scores.items()
    ]
    # Agents with all seeds first, then by score; equal scores are ordered by name, not by their order in the file.
    rows.sort(key=lambda row: (row[3] > 0, -row[0], row[1]))
    standings: list[Standing] = []
    for place, (mean, agent, by_seed, missing) in enumerate(rows, 1):
        tied = standings and standings[-1].mean == mean
        position = None if missing else (standings[-1].rank if tied else place)
        ordered = tuple(by_seed[seed] for seed in seeds if seed in by_seed)
        standings.append(Standing(position, agent, mean, ordered, missing))
    return standings


def _text(data: Mapping[str, Any], key: str) -> str:
    value = data.get(key)
    if not isinstance(value, str):
        raise DataFormatError(f"{key}={value!r} is not allowed: it must be a text")
    return value


def _digest(data: Mapping[str, Any], key: str) -> str | None:
    value = data.get(key)
    if value is not None and not isinstance(value, str):
        raise DataFormatError(f"{key}={value!r} is not allowed: it must be a digest or null")
    return value


def _seed(data: Mapping[str, Any]) -> int:
    value = data["seed"]
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise DataFormatError(f"seed={value!r} is not allowed: it must be an integer from 0 to 2^63 - 1")
    return value


def _unit(data: Mapping[str, Any], key: str) -> float:
    value = data[key]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise DataFormatError(f"{key}={value!r} is not allowed: it must be a number from 0 to 1")
    return float(value)


def _actions(data: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    value = data["actions"]
    if not isinstance(value, list) or not all(isinstance(action, dict) for action in value):
        raise DataFormatError("actions must be an array of objects")
    return value


def _short(digest: str | None) -> str:
    return "none" if digest is None else digest[:12]
