"""An episode log as arrays, checked field by field."""

from __future__ import annotations

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
"""More than anything measures. Whole numbers up to here are doubles, so that all readers draw the same line."""

GRADED_METRICS: Final[dict[str, float]] = {
    "ttft_p50_ms": MAX_METRIC,
    "tokens_per_sec": MAX_METRIC,
    "gpu_memory_gb": 1e6,
    "cost_per_1k": MAX_METRIC,
    "slo_violations": MAX_METRIC,
}
"""Metrics that grading needs, with their upper bounds; all are at least 0."""

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
    values = [checked_metric(i, name, metrics.get(name), high) for name, high in GRADED_METRICS.items()]
    return [*values, float(parsed.batch_size), parsed.kv_budget]


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
