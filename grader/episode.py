"""An episode log as arrays, checked field by field."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from inferencegym.errors import InvalidActionError, MalformedLogError, short_repr
from inferencegym.models import ServeAction

FloatArray = NDArray[np.float64]
Scored = tuple[FloatArray, dict[str, FloatArray]]
"""Scores (...,) and the parts of each."""

MAX_METRIC: Final = 1e15
"""Upper bound of all metrics. Whole numbers up to here are exact as doubles, so all readers apply the same bound."""

GRADED_METRICS: Final[dict[str, float]] = {
    "ttft_p50_ms": MAX_METRIC,
    "tokens_per_sec": MAX_METRIC,
    "gpu_memory_gb": 1e6,
    "cost_per_1k": MAX_METRIC,
    "slo_violations": MAX_METRIC,
}
"""Metrics that grading needs, with their upper bounds; all are at least 0."""
UNREPORTED: Final = "gpu_memory_gb"
"""The graded metric that engines do not report: absent from their logs, and required by grades that use it."""

MAX_LOG_STEPS: Final = 10_000


@dataclass(frozen=True, slots=True, eq=False)
class Episode:
    """A checked log of T steps; every field is (T,), or (..., T) for several episodes."""

    ttft_p50_ms: FloatArray
    tokens_per_sec: FloatArray
    gpu_memory_gb: FloatArray
    cost_per_1k: FloatArray
    slo_violations: FloatArray
    batch_size: FloatArray
    kv_budget: FloatArray
    replicas: FloatArray
    """Replicas requested by each action; used only by grades of autoscaling tasks."""


def read_log(log: Sequence[Mapping[str, Any]]) -> Episode | None:
    """Check a log and turn it into arrays; None if it is empty.

    A log is a list of steps ``{"action": {...}, "metrics": {...}}`` (further keys are allowed); a step response of the
    server, ``{"observation", "reward", "done", "info": {"metrics", "action_applied"}}``, is read as well. Raises
    :class:`MalformedLogError` naming step and field.
    """
    if not isinstance(log, (list, tuple)):
        raise MalformedLogError("episode_log must be a list of steps")
    if len(log) > MAX_LOG_STEPS:
        raise MalformedLogError(f"episode_log has {len(log)} steps; at most {MAX_LOG_STEPS} are graded")
    if not log:
        return None
    rows = [_read_step(i, step) for i, step in enumerate(log)]
    columns = np.array(rows, dtype=np.float64).T
    return Episode(*columns)


def _read_step(i: int, step: object) -> list[float]:
    if not isinstance(step, Mapping):
        raise MalformedLogError(
            f"step {i}: must be an object with 'action' and 'metrics', not {type(step).__name__}", i
        )
    info = step.get("info")
    source: Mapping[str, Any] = step
    if "metrics" not in step and isinstance(info, Mapping):
        refuse_held(i, info)
        source = {"metrics": info.get("metrics"), "action": info.get("action_applied")}
    metrics, action = source.get("metrics"), source.get("action")
    if not isinstance(metrics, Mapping):
        raise MalformedLogError(f"step {i}: 'metrics' is missing or not an object", i, "metrics")
    if not isinstance(action, Mapping):
        raise MalformedLogError(f"step {i}: 'action' is missing or not an object", i, "action")
    try:
        parsed = ServeAction.from_dict(dict(action))
    except InvalidActionError as error:
        raise MalformedLogError(f"step {i}: action.{error}", i, f"action.{error.field}") from error
    values = [
        math.nan if name == UNREPORTED and name not in metrics else checked_metric(i, name, metrics.get(name), high)
        for name, high in GRADED_METRICS.items()
    ]
    return [*values, float(parsed.batch_size), parsed.kv_budget, float(parsed.replicas or 0)]


def empty_grade() -> dict[str, Any]:
    """Grade of an episode without a step."""
    return {"score": 0.0, "breakdown": {}, "feedback": "The log is empty: play the task, then grade its log."}


def checked_metric(i: int, name: str, value: object, high: float = MAX_METRIC, first: int = 0) -> float:
    """A metric of step ``i`` as a number from 0 to ``high``; raises :class:`MalformedLogError` naming both.

    ``first`` is the number of a log's first step.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= high:  # NaN is not
        raise MalformedLogError(
            f"step {i}: metrics.{name}={short_repr(value)} is not allowed: it must be a number from 0 to {high:g}",
            i - first,
            f"metrics.{name}",
        )
    return float(value)


def refuse_held(i: int, info: Mapping[str, Any]) -> None:
    """Raise :class:`MalformedLogError` for the ``info`` of a step of several seconds, which is not a log entry."""
    seconds = info.get("seconds", 1)
    if seconds != 1:
        raise MalformedLogError(
            f"step {i}: info.seconds={short_repr(seconds)} is not allowed: the answer to a step that held its action "
            "has no entry for each second; grade the session by its session_id, or a log of seconds",
            i,
            "info.seconds",
        )
