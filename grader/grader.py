"""``GraderModule``: scores as pure functions of an episode log and the task's calibration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from grader.episode import Episode, FloatArray, Scored, read_log
from grader.task1_grader import grade_throughput, score_throughput
from grader.task2_grader import grade_latency_memory, score_latency_memory
from grader.task3_grader import grade_four_term, score_four_term
from inferencegym.tasks import Calibration, TaskId, TaskSpec, get_calibration, get_task

Grade = dict[str, Any]
GradeFunction = Callable[[TaskSpec, Calibration, Episode], Grade]
ScoreFunction = Callable[[TaskSpec, Calibration, Episode], Scored]

GRADES: Final[Mapping[str, GradeFunction]] = {
    "throughput": grade_throughput,
    "latency_memory": grade_latency_memory,
    "four_term": grade_four_term,
}
"""Grading rules by the ``grade.kind`` of a task's data."""

SCORES: Final[Mapping[str, ScoreFunction]] = {
    "throughput": score_throughput,
    "latency_memory": score_latency_memory,
    "four_term": score_four_term,
}
"""The numbers alone of the same rules, for many episodes at once."""


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
        episode = read_log(episode_log)
        if episode is None:
            return {"score": 0.0, "breakdown": {}, "detail": {}, "feedback": "Empty episode log: nothing was played."}
        grade = GRADES[task.grade["kind"]](task, calibration or get_calibration(task.task_id), episode)
        grade["score"] = float(unit(grade["score"]))
        if len(episode_log) < task.episode_length:
            grade["feedback"] += (
                f" These are {len(episode_log)} of the task's {task.episode_length} steps: compare whole episodes only."
            )
        return grade


def unit(x: float | FloatArray) -> FloatArray:
    """Clip ``x`` to [0, 1]; NaN becomes 0."""
    return np.clip(np.nan_to_num(x), 0.0, 1.0)
