"""``GraderModule``: scores as pure functions of an episode log and the task's calibration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from grader.episode import Episode, FloatArray, Scored, read_log
from grader.kinds import RULES
from inferencegym.tasks import Calibration, TaskId, TaskSpec, get_calibration, get_task

Grade = dict[str, Any]


class GraderModule:
    """Stateless grader: the same log always gives the same score."""

    def score(
        self, task_id: TaskId, episode_log: Sequence[Mapping[str, Any]], calibration: Calibration | None = None
    ) -> Grade:
        """Grade an episode log: ``{"score", "breakdown", "detail", "feedback"}``.

        ``score`` is a float in [0, 1], ``breakdown`` one float per component, ``detail`` the measured quantities behind
        them, ``feedback`` a sentence. An incomplete log is graded on its steps, and ``feedback`` reports the missing
        ones. An empty log scores 0. Raises :class:`UnknownTaskError`, and :class:`MalformedLogError` naming the invalid
        step and field.
        """
        task = get_task(task_id)
        return grade_episode(task, calibration or get_calibration(task.task_id), read_log(episode_log))


def grade_episode(task: TaskSpec, calibration: Calibration, episode: Episode | None) -> Grade:
    """Grade an episode (T,), as :meth:`GraderModule.score` does; None is an empty one."""
    if episode is None:
        return {"score": 0.0, "breakdown": {}, "detail": {}, "feedback": "Empty episode log: nothing was played."}
    return _grade(task, calibration, episode, RULES[task.grade["kind"]].score(task, calibration, episode))


def grade_episodes(task: TaskSpec, calibration: Calibration, episodes: Episode) -> list[Grade]:
    """Grade N episodes (N, T) at once, each as :func:`grade_episode` does."""
    scores, parts = RULES[task.grade["kind"]].score(task, calibration, episodes)
    columns = [getattr(episodes, name) for name in Episode.__slots__]
    grades = []
    for i, score in enumerate(scores):
        scored = score, {name: part[i] for name, part in parts.items()}
        grades.append(_grade(task, calibration, Episode(*(column[i] for column in columns)), scored))
    return grades


def _grade(task: TaskSpec, calibration: Calibration, episode: Episode, scored: Scored) -> Grade:
    breakdown = {name: float(part) for name, part in scored[1].items()}
    detail, feedback = RULES[task.grade["kind"]].report(task, calibration, episode, breakdown)
    steps = len(episode.tokens_per_sec)
    if steps < task.episode_length:
        feedback += f" These are {steps} of the task's {task.episode_length} steps: compare whole episodes only."
    return {"score": float(final(scored[0])), "breakdown": breakdown, "detail": detail, "feedback": feedback}


def final(score: FloatArray) -> FloatArray:
    """Published scores: clipped to [0, 1], NaN as 0."""
    return np.clip(np.nan_to_num(score), 0.0, 1.0)
