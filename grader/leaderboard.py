"""A leaderboard that anybody can check: a file of episodes, each with the actions that reached its score.

The file is JSON Lines, UTF-8, one episode per line::

    {"format": 1, "family": "serving", "task": 3, "agent": "heuristic", "seed": 10000, "score": 0.71,
     "release": "1.0.0", "table_sha256": "57...", "actions": [{"kv_budget": 1.0, ...}, ...]}

``family`` and ``task`` say what was played, in the task's own configuration; ``agent`` is a name of the submitter's
choice; ``actions`` are those of a whole episode in order; ``release`` and ``table_sha256`` name the simulator that gave
the score (null where a family has no table). Replaying the actions from the seed gives the score again, to the last
digit, or the line is refused. Agents are ranked by their mean score over a task's held-out seeds; one that lacks some
of these seeds is listed without a rank.

What a replay proves is that these actions reach this score. It cannot prove how they were chosen: on published seeds
they may have been searched for. Ask for the agent, and run it on seeds of your own.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from grader.verify import RELATIVE_TOLERANCE, Entry, Replay
from inferencegym.errors import DataFormatError, EpisodeDoneError, ForgedLogError, InvalidActionError
from inferencegym.tasks import TaskId

FORMAT: Final = 1
MAX_NAME: Final = 64

Score = Callable[[TaskId, Sequence[Entry]], float]
"""The score of a log: a family's grader."""


@dataclass(frozen=True, slots=True)
class Simulator:
    """What plays the episodes: release of this package and digest of the lookup table (None: the family has none)."""

    release: str
    table_sha256: str | None


@dataclass(frozen=True, slots=True)
class Submission:
    """One line of the file; see the module's text."""

    family: str
    task_id: TaskId
    agent: str
    seed: int
    score: float
    simulator: Simulator
    actions: Sequence[Mapping[str, Any]]

    def to_json(self) -> str:
        """The line, without its end."""
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
                "actions": list(self.actions),
            },
            separators=(",", ":"),
            allow_nan=False,
        )

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Submission:
        """Read a line's object; raises :class:`DataFormatError` naming the key at fault."""
        known = {"format", "family", "task", "agent", "seed", "score", "release", "table_sha256", "actions"}
        for key in sorted(known ^ set(data)):
            raise DataFormatError(f"{key} is missing" if key in known else f"{key} is not a key of a submission")
        if data["format"] != FORMAT:
            raise DataFormatError(f"format={data['format']!r} is not allowed: this release reads {FORMAT}")
        task, table = data["task"], data["table_sha256"]
        if isinstance(task, bool) or not isinstance(task, (int, str)):
            raise DataFormatError(f"task={task!r} is not allowed: it must be a task id")
        if table is not None and not isinstance(table, str):
            raise DataFormatError(f"table_sha256={table!r} is not allowed: it must be a digest or null")
        return cls(
            family=_text(data, "family"),
            task_id=task,
            agent=checked_name(_text(data, "agent")),
            seed=_seed(data),
            score=_unit(data, "score"),
            simulator=Simulator(_text(data, "release"), table),
            actions=_actions(data),
        )

    @property
    def key(self) -> tuple[str, str, str, int]:
        """What no two lines may share."""
        return self.family, str(self.task_id), self.agent, self.seed


def checked_name(name: str) -> str:
    """An agent's name: printable, short, without space around it. Raises :class:`DataFormatError`."""
    if not name or len(name) > MAX_NAME or not name.isprintable() or name != name.strip():
        raise DataFormatError(f"agent={name[:80]!r} is not allowed: 1 to {MAX_NAME} printable characters")
    return name


def replayed_score(
    task_id: TaskId, seed: int, actions: Sequence[Mapping[str, Any]], replay: Replay, score: Score
) -> float:
    """Score of a whole episode in the task's own configuration, by playing it.

    Raises :class:`ForgedLogError` if the actions are not those of one whole episode.
    """
    try:
        replayed = replay(task_id, seed, None, actions)
    except EpisodeDoneError as error:
        raise ForgedLogError(f"there are more actions than the episode has steps: {error}") from error
    except InvalidActionError as error:
        raise ForgedLogError(f"an action is none that the environment takes: {error}") from error
    if not replayed.done:
        raise ForgedLogError(
            f"the actions end at step {len(actions)} of {replayed.episode_length}: only whole episodes count",
            step=len(actions),
        )
    return score(task_id, replayed.log)


def check_submission(submission: Submission, simulator: Simulator, replay: Replay, score: Score) -> None:
    """Return if replaying the actions gives the score.

    Raises :class:`ForgedLogError` if it gives another, and :class:`DataFormatError` if another release or table was
    played, which this one cannot judge.
    """
    if submission.simulator != simulator:
        theirs, ours = submission.simulator, simulator
        raise DataFormatError(
            f"played on release {theirs.release} with table {_short(theirs.table_sha256)}; this is release "
            f"{ours.release} with table {_short(ours.table_sha256)}: check it with its own, or play it again"
        )
    true = replayed_score(submission.task_id, submission.seed, submission.actions, replay, score)
    if not math.isclose(submission.score, true, rel_tol=RELATIVE_TOLERANCE, abs_tol=RELATIVE_TOLERANCE):
        raise ForgedLogError(
            f"score is {submission.score!r} in the file, and {true!r} when the actions are replayed", field="score"
        )


@dataclass(frozen=True, slots=True)
class Standing:
    """One agent on one task: mean and standard deviation of its scores over the seeds that count.

    ``rank`` is None for an agent that lacks ``missing`` of the seeds.
    """

    rank: int | None
    agent: str
    mean: float
    sd: float
    n_seeds: int
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
    # Complete ones first, then by score; names decide the order of equals, so that it does not depend on the file's.
    rows.sort(key=lambda row: (row[3] > 0, -row[0], row[1]))
    standings: list[Standing] = []
    for place, (mean, agent, by_seed, missing) in enumerate(rows, 1):
        tied = standings and standings[-1].mean == mean
        position = None if missing else (standings[-1].rank if tied else place)
        sd = statistics.stdev(by_seed.values()) if len(by_seed) > 1 else 0.0
        standings.append(Standing(position, agent, mean, sd, len(by_seed), missing))
    return standings


def _text(data: Mapping[str, Any], key: str) -> str:
    value = data[key]
    if not isinstance(value, str):
        raise DataFormatError(f"{key}={value!r} is not allowed: it must be a text")
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
