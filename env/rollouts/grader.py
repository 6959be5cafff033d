"""Grade of a rollout episode from its log alone.

Sessions that wait for the cap are graded by speed: the time that the same sessions take on the same engine with an
unlimited KV pool and no cap, divided by the time taken, times the share of their answers that was written. That engine
computes nothing twice and lets nothing wait. A log that stops before all sessions are over is graded as if the rest of
the episode's time had passed. Where interactive sessions share the engine, the grade is the mean of that speed and of
the share of interactive turns that had their first token within the objective.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from env.rollouts.tasks import get_rollout_task
from grader.episode import checked_metric, empty_grade
from inferencegym.errors import InvalidActionError, MalformedLogError, short_repr
from inferencegym.rollouts import parse_action
from inferencegym.tasks import TaskId

SCORED: Final = (
    "elapsed_s",
    "horizon_s",
    "sessions_left",
    "batch_tokens",
    "ideal_tokens_per_s",
    "turns_judged",
    "turns_within",
    "turns_overdue",
)
"""Metrics of a log entry that the grade reads: totals since the start, of which the last entry counts."""


def score_parts(interactive: bool, metrics: Mapping[str, float]) -> dict[str, float]:
    """The parts of a score, which is their mean; ``interactive``: users share the engine."""
    elapsed_s, horizon_s = metrics["elapsed_s"], metrics["horizon_s"]
    spent_s = elapsed_s if metrics["sessions_left"] == 0 else max(elapsed_s, horizon_s)
    ideal = metrics["ideal_tokens_per_s"] * spent_s
    speed = min(1.0, metrics["batch_tokens"] / ideal) if ideal > 0 else 0.0
    if not interactive:
        return {"speed": speed}
    judged = metrics["turns_judged"] + metrics["turns_overdue"]
    within = metrics["turns_within"] / judged if judged > 0 else 1.0
    within = min(1.0, within) * (elapsed_s / spent_s if spent_s > 0 else 0.0)
    return {"speed": speed, "within_objective": within}


def mean_score(parts: Mapping[str, float]) -> float:
    """The score of these parts."""
    return sum(parts.values()) / len(parts)


def grade_metrics(interactive: bool, metrics: Mapping[str, float]) -> dict[str, Any]:
    """The grade of an episode whose last metrics these are."""
    parts = score_parts(interactive, metrics)
    text = f"The batch was written at {parts['speed']:.1%} of the pace of the same engine with an unlimited KV pool."
    if interactive:
        text += f" {parts['within_objective']:.1%} of the interactive turns had their first token within the objective."
    return {"score": mean_score(parts), "breakdown": parts, "feedback": text}


def grade_rollout(task_id: TaskId, entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Score an episode: ``score`` in [0, 1], ``breakdown`` and ``feedback``. An empty log scores 0.

    Raises UnknownTaskError, or MalformedLogError naming step and field.
    """
    task = get_rollout_task(task_id)
    if not entries:
        return empty_grade()
    metrics: dict[str, float] = {}
    for i, entry in enumerate(entries, 1):
        metrics = _checked(i, entry)
    return grade_metrics(task.entry.interactive is not None, metrics)


def _checked(i: int, entry: object) -> dict[str, float]:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("metrics"), Mapping):
        raise MalformedLogError(f"step {i}: must be an object with timestep, action, reward and metrics", i - 1)
    timestep = entry.get("timestep")
    if timestep != i or isinstance(timestep, bool):
        raise MalformedLogError(
            f"step {i}: timestep={short_repr(timestep)} is not allowed: steps count from 1", i - 1, "timestep"
        )
    try:
        parse_action(entry.get("action"))
    except InvalidActionError as error:
        raise MalformedLogError(f"step {i}: {error}", i - 1, error.field) from error
    return {name: checked_metric(i, name, entry["metrics"].get(name), first=1) for name in SCORED}
