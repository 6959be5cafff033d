"""Verification of episode logs by replay: the actions are played again and every number is compared.

Task, seed, configuration and actions determine an episode, so any log can be checked by playing its actions again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from env.family import EpisodeEnv, Family
from grader.episode import refuse_held
from inferencegym.errors import (
    EpisodeDoneError,
    ForgedLogError,
    InvalidActionError,
    MalformedLogError,
    short_repr,
    short_text,
)
from inferencegym.tasks import TaskId

RELATIVE_TOLERANCE: Final = 1e-6
"""Tolerance for a log from another processor, where the last bit of exp and log may differ; steps amplify this (1e-8
was seen). On one machine the replay is exact.
"""
ABSOLUTE_TOLERANCE: Final = 1e-9

Entry = Mapping[str, Any]
ENTRY_KEYS: Final = ("timestep", "action", "reward", "metrics")


def verify_log(
    family: Family, task_id: TaskId, seed: int, config: Mapping[str, Any] | None, episode_log: Sequence[Entry]
) -> EpisodeEnv:
    """Replay a log's actions and return the finished episode, if the log is the whole episode and all numbers agree.

    Raises :class:`ForgedLogError` naming the first step and field that differ, and :class:`MalformedLogError` if it
    does not have the form of a log at all.
    """
    entries = [_as_entry(step, entry) for step, entry in enumerate(episode_log)]
    replayed = replay_actions(family, task_id, seed, config, [entry["action"] for entry in entries])
    # The last step may have played more seconds than the log has, or fewer.
    for step, (claimed, true) in enumerate(zip(entries, replayed.episode_log, strict=False)):
        compare_entries(step, claimed, true)
    _must_be_whole(replayed, len(entries), "the log ends")
    return replayed


def replay_actions(
    family: Family, task_id: TaskId, seed: int, config: Mapping[str, Any] | None, actions: Sequence[Mapping[str, Any]]
) -> EpisodeEnv:
    """Play actions in their JSON form, one per log entry; for a held step, the first one.

    Raises :class:`ForgedLogError` if they are not those of one episode.
    """
    try:
        return family.replay(family.episode(task_id, seed, config, actions[:: family.hold(task_id, config)]))
    except EpisodeDoneError as error:
        raise ForgedLogError(f"there are more steps than the episode has: {error}") from error
    except InvalidActionError as error:
        raise ForgedLogError(f"an action is not allowed: {error}") from error


def replayed_score(family: Family, task_id: TaskId, seed: int, actions: Sequence[Mapping[str, Any]]) -> float:
    """Score of a whole episode in the task's own configuration, by playing its actions.

    Raises :class:`ForgedLogError` if the actions are not those of one whole episode.
    """
    replayed = replay_actions(family, task_id, seed, None, actions)
    _must_be_whole(replayed, len(actions), "the actions end")
    return float(family.grade(task_id, replayed.episode_log)["score"])


def _must_be_whole(episode: EpisodeEnv, entries: int, what_ends: str) -> None:
    played = len(episode.episode_log)
    if entries > played:
        raise ForgedLogError(f"there are more steps than the {played} that the episode has", step=played)
    if entries < played or not episode.done:
        raise ForgedLogError(
            f"{what_ends} at step {entries} of {episode.episode_length}: only a whole episode can be verified",
            step=entries,
        )


def _as_entry(step: int, entry: object) -> Entry:
    """Entry of a log from one step; answers of POST /step are accepted as well."""
    if not isinstance(entry, Mapping):
        raise MalformedLogError(f"step {step}: must be an object with {', '.join(ENTRY_KEYS)}", step)
    info = entry.get("info")
    measured = entry.get("measured", info.get("measured") if isinstance(info, Mapping) else None)
    if measured is not None:
        raise MalformedLogError(
            f"step {step}: it was measured on a real engine ({short_repr(measured)}), where no second comes twice: "
            "such a log is graded like any other, and cannot be replayed",
            step,
            "measured",
        )
    if "metrics" not in entry and isinstance(info, Mapping):
        refuse_held(step, info)
        entry = {
            "timestep": info.get("timestep"),
            "action": info.get("action_applied"),
            "reward": entry.get("reward"),
            "metrics": info.get("metrics"),
        }
    for key in ENTRY_KEYS:
        if key not in entry:
            raise MalformedLogError(f"step {step}: {key} is missing, and only whole entries can be verified", step, key)
    for key in ("action", "metrics"):
        if not isinstance(entry[key], Mapping):
            raise MalformedLogError(f"step {step}: {key} must be an object", step, key)
    return entry


def compare_entries(step: int, claimed: Entry, true: Entry) -> None:
    """Raise :class:`ForgedLogError` at the first field of one entry that differs from the replay."""
    _compare(step, "", claimed, true)


def _compare(step: int, path: str, claimed: Any, true: Any) -> None:
    if isinstance(true, Mapping):
        if not isinstance(claimed, Mapping):
            raise _forged(step, path, claimed, "an object")
        for key in true:
            _compare(step, f"{path}.{key}" if path else str(key), claimed.get(key), true[key])
        for key in claimed:
            if key not in true:
                name = short_text(str(key))
                raise _forged(step, f"{path}.{name}" if path else name, claimed[key], "absent")
    elif isinstance(true, (list, tuple)):
        if not isinstance(claimed, (list, tuple)) or len(claimed) != len(true):
            raise _forged(step, path, claimed, true)
        for index, value in enumerate(true):
            _compare(step, f"{path}[{index}]", claimed[index], value)
    else:
        try:
            same = _same(claimed, true)
        except OverflowError as error:
            raise MalformedLogError(
                f"step {step}: {path}={short_repr(claimed)} is not allowed: it is too large for a float", step, path
            ) from error
        if not same:
            raise _forged(step, path, claimed, true)


def _same(claimed: Any, true: Any) -> bool:
    if isinstance(true, (bool, str)) or true is None:
        return type(claimed) is type(true) and bool(claimed == true)
    if isinstance(claimed, bool) or not isinstance(claimed, (int, float)):
        return False
    close = math.isclose(claimed, true, rel_tol=RELATIVE_TOLERANCE, abs_tol=ABSOLUTE_TOLERANCE)
    # Counts lose no digits as text, and some thresholds of grades are counts.
    return close and (isinstance(true, float) or claimed == true)


def _forged(step: int, path: str, claimed: Any, true: Any) -> ForgedLogError:
    message = (
        f"step {step}: {path} is {short_repr(claimed)} in the log, and {short_repr(true)} when its actions are replayed"
    )
    return ForgedLogError(message, step, path)
