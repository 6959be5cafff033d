"""Grading of the traffic controller's episodes from their logs alone, without simulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from env.traffic.score import EpisodeTotals, final_score, latency_factor, short_queue_limit
from env.traffic.tasks import TrafficTask, get_traffic_task
from grader.episode import MAX_METRIC, checked_metric, empty_grade
from inferencegym.errors import InvalidActionError, MalformedLogError, short_repr
from inferencegym.traffic import ACCEPT_SHARES, parse_action

_FROM_INFO: Final = ("incoming_requests", "allowed_requests", "accept_rate")
_FROM_STATE: Final = ("cpu_usage", "memory_usage", "queue_length", "avg_latency", "crashed")
METRICS: Final = (*_FROM_INFO, *_FROM_STATE)
"""Names of the metrics in a log entry."""
SCORED: Final = ("incoming_requests", "allowed_requests", "queue_length", "avg_latency", "crashed")
"""Parts of a score; all but ``crashed`` are numbers of at least 0."""
HIGHEST: Final = {**dict.fromkeys(SCORED, MAX_METRIC), "avg_latency": 1e18}
"""Upper bounds. The smallest server at a hundred times a task's rates takes 60,000 ms * (1 + 20,000^3) = 4.8e17 ms."""


def grade_traffic(task_id: str, episode_log: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Score an episode of a traffic task.

    ``episode_log`` is :attr:`env.traffic.env.TrafficEnv.episode_log`, or the answers of ``POST /step``. Returns
    ``score`` in [0, 1], the same number as the environment's ``final_score``, ``breakdown`` (its parts) and
    ``feedback`` (a sentence). An empty log scores 0; one that stops early counts the missing steps as not survived.
    Raises :class:`UnknownTrafficTaskError`, or :class:`MalformedLogError` naming step and field.
    """
    task = get_traffic_task(task_id)
    entries = traffic_log(episode_log)
    return grade_totals(task, _totals(task, entries)) if entries else empty_grade()


def grade_totals(task: TrafficTask, totals: EpisodeTotals) -> dict[str, Any]:
    """Grade of one episode from its sums (1,), as :func:`grade_traffic` gives it."""
    if not totals.steps[0]:
        return empty_grade()
    score = float(final_score(task.grade, totals, task.episode_length)[0])
    return {"score": score, "breakdown": _breakdown(task, totals), "feedback": _feedback(task, totals, score)}


def traffic_log(episode_log: object) -> list[Mapping[str, Any]]:
    """Entries of a log; answers of ``POST /step``, in order, are accepted as well.

    An answer names the action by ``info.accept_rate`` and holds every number of a log entry in ``state`` and ``info``.
    """
    if not isinstance(episode_log, Sequence) or isinstance(episode_log, (str, bytes)):
        raise MalformedLogError("episode_log must be a list of steps")
    return [_as_entry(i, entry) for i, entry in enumerate(episode_log, 1)]


def _malformed(i: int, what: str, field: str | None = None) -> MalformedLogError:
    """Error at step ``i``, counted from 1 as in the log; the error's ``step`` counts from 0."""
    return MalformedLogError(f"step {i}: {what}", i - 1, field)


def _as_entry(i: int, entry: object) -> Mapping[str, Any]:
    if not isinstance(entry, Mapping):
        raise _malformed(i, "must be an object with timestep, action, reward and metrics")
    state, info = entry.get("state"), entry.get("info")
    if "metrics" in entry or not isinstance(state, Mapping) or not isinstance(info, Mapping):
        return entry
    share = info.get("accept_rate")
    names = [name for name, value in ACCEPT_SHARES.items() if value == share]
    if not names:
        allowed = ", ".join(map(str, ACCEPT_SHARES.values()))
        raise _malformed(
            i, f"info.accept_rate={short_repr(share)} is not allowed: it must be one of {allowed}", "info.accept_rate"
        )
    return {
        "timestep": info.get("episode_step"),
        "action": {"action": names[0]},
        "reward": entry.get("reward"),
        "metrics": {name: (info if name in _FROM_INFO else state).get(name) for name in METRICS},
    }


def _totals(task: TrafficTask, episode_log: Sequence[Mapping[str, Any]]) -> EpisodeTotals:
    if len(episode_log) > task.episode_length:
        raise MalformedLogError(
            f"episode_log has {len(episode_log)} steps: an episode of {task.task_id} has at most {task.episode_length}"
        )
    limit = short_queue_limit(task.grade)
    latency = allowed = incoming = 0.0
    short_queue_steps, crashed = 0, False
    # Added up step by step like in the environment: another order could change the last digit.
    for i, entry in enumerate(episode_log, 1):
        if crashed:
            raise _malformed(i, f"the server crashed at step {i - 1}, so no step can follow")
        metrics = _checked_metrics(i, entry)
        latency += metrics["avg_latency"]
        allowed += metrics["allowed_requests"]
        incoming += metrics["incoming_requests"]
        short_queue_steps += metrics["queue_length"] < limit
        crashed = metrics["crashed"]
    return EpisodeTotals(
        steps=np.array([len(episode_log)]),
        crashed=np.array([crashed]),
        latency_ms=np.array([latency]),
        allowed=np.array([allowed]),
        incoming=np.array([incoming]),
        short_queue_steps=np.array([short_queue_steps]),
    )


def _checked_metrics(i: int, entry: Mapping[str, Any]) -> Mapping[str, Any]:
    if entry.get("timestep") != i or isinstance(entry["timestep"], bool):
        raise _malformed(
            i, f"timestep={short_repr(entry.get('timestep'))} is not allowed: steps count from 1", "timestep"
        )
    try:
        parse_action(entry.get("action"))
    except InvalidActionError as error:
        raise _malformed(i, str(error), error.field) from error
    metrics = entry.get("metrics")
    if not isinstance(metrics, Mapping):
        raise _malformed(i, "metrics must be an object", "metrics")
    for name in SCORED[:-1]:
        checked_metric(i, name, metrics.get(name), HIGHEST[name], first=1)
    if metrics["allowed_requests"] > metrics["incoming_requests"]:
        raise _malformed(
            i, "metrics.allowed_requests must not exceed metrics.incoming_requests", "metrics.allowed_requests"
        )
    if not isinstance(metrics.get("crashed"), bool):
        raise _malformed(
            i, f"metrics.crashed={short_repr(metrics.get('crashed'))} must be true or false", "metrics.crashed"
        )
    return metrics


def _breakdown(task: TrafficTask, totals: EpisodeTotals) -> dict[str, float]:
    parts = {
        "survived_share": float(totals.survived_steps()[0] / task.episode_length),
        "crashed": float(totals.crashed[0]),
        "mean_latency_ms": float(totals.mean_latency_ms()[0]),
        "throughput": float(totals.throughput()[0]),
    }
    if "floor_factor" in task.grade.params:
        parts["latency_factor"] = float(latency_factor(task.grade.params, totals.mean_latency_ms())[0])
    if "short_queue_requests" in task.grade.params:
        parts["short_queue_share"] = float(totals.short_queue_share()[0])
    return parts


def _feedback(task: TrafficTask, totals: EpisodeTotals, score: float) -> str:
    steps, length = int(totals.steps[0]), task.episode_length
    if totals.crashed[0]:
        ending = f"The server crashed at step {steps} of {length}: the request rate announces a spike, admit less then."
    elif steps < length:
        ending = f"The log stops after {steps} of {length} steps: the rest counts as not survived."
    else:
        ending = f"All {length} steps survived."
    return (
        f"{ending} Mean latency {float(totals.mean_latency_ms()[0]):.0f} ms, "
        f"{100 * float(totals.throughput()[0]):.0f}% of the requests served. Score {score:.3f}."
    )
