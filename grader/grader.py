"""``GraderModule``: scores as pure functions of an episode log and the task's calibration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from grader.autoscaling_grader import grade_autoscaling, score_autoscaling, shares_autoscaling
from grader.episode import Episode, FloatArray, Scored, read_log
from grader.shares import StepShares
from grader.task1_grader import grade_throughput, score_throughput, shares_throughput
from grader.task2_grader import grade_latency_memory, score_latency_memory, shares_latency_memory
from grader.task3_grader import grade_four_term, score_four_term, shares_four_term
from inferencegym.tasks import Calibration, TaskId, TaskSpec, get_calibration, get_task

Grade = dict[str, Any]
GradeFunction = Callable[[TaskSpec, Calibration, Episode, Scored], Grade]
ScoreFunction = Callable[[TaskSpec, Calibration, Episode], Scored]
ShareFunction = Callable[[TaskSpec, Calibration, int], StepShares]

GRADES: Final[Mapping[str, GradeFunction]] = {
    "throughput": grade_throughput,
    "latency_memory": grade_latency_memory,
    "four_term": grade_four_term,
    "autoscaling": grade_autoscaling,
}
"""Whole grades by the ``grade.kind`` of a task's data, from the numbers of :data:`SCORES`."""

SCORES: Final[Mapping[str, ScoreFunction]] = {
    "throughput": score_throughput,
    "latency_memory": score_latency_memory,
    "four_term": score_four_term,
    "autoscaling": score_autoscaling,
}
"""The numbers alone of the grading rules, for one episode or many at once."""

SHARES: Final[Mapping[str, ShareFunction]] = {
    "throughput": shares_throughput,
    "latency_memory": shares_latency_memory,
    "four_term": shares_four_term,
    "autoscaling": shares_autoscaling,
}
"""What one step of an episode with so many steps adds to the score of the same rules."""


class GraderModule:
    """Stateless grader: the same log always gives the same score."""

    def score(
        self, task_id: TaskId, episode_log: Sequence[Mapping[str, Any]], calibration: Calibration | None = None
    ) -> Grade:
        """Grade an episode log: ``{"score", "breakdown", "detail", "feedback"}``.

        ``score`` is a float in [0, 1], ``breakdown`` one float per component, ``detail`` the measured quantities behind
        them, ``feedback`` a sentence. An incomplete log is graded on its steps, and ``feedback`` says that some are
        missing. An empty log scores 0. Raises :class:`UnknownTaskError`, and :class:`MalformedLogError` naming the
        invalid step and field.
        """
        task = get_task(task_id)
        return grade_episode(task, calibration or get_calibration(task.task_id), read_log(episode_log))


def grade_episode(task: TaskSpec, calibration: Calibration, episode: Episode | None) -> Grade:
    """Grade an episode (T,), as :meth:`GraderModule.score` does; None is an empty one."""
    if episode is None:
        return {"score": 0.0, "breakdown": {}, "detail": {}, "feedback": "Empty episode log: nothing was played."}
    return _grade(task, calibration, episode, SCORES[task.grade["kind"]](task, calibration, episode))


def grade_episodes(task: TaskSpec, calibration: Calibration, episodes: Episode) -> list[Grade]:
    """Grade N episodes (N, T) at once, each as :func:`grade_episode` does."""
    scores, parts = SCORES[task.grade["kind"]](task, calibration, episodes)
    columns = [getattr(episodes, name) for name in Episode.__slots__]
    grades = []
    for i, score in enumerate(scores):
        scored = score, {name: part[i] for name, part in parts.items()}
        grades.append(_grade(task, calibration, Episode(*(column[i] for column in columns)), scored))
    return grades


def _grade(task: TaskSpec, calibration: Calibration, episode: Episode, scored: Scored) -> Grade:
    grade = GRADES[task.grade["kind"]](task, calibration, episode, scored)
    grade["score"] = float(unit(grade["score"]))
    steps = len(episode.tokens_per_sec)
    if steps < task.episode_length:
        grade["feedback"] += (
            f" These are {steps} of the task's {task.episode_length} steps: compare whole episodes only."
        )
    return grade


def unit(x: float | FloatArray) -> FloatArray:
    """Clip ``x`` to [0, 1]; NaN becomes 0."""
    return np.clip(np.nan_to_num(x), 0.0, 1.0)
