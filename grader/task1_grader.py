"""Throughput grading (easy task): mean throughput between that without batching and the best known."""

from __future__ import annotations

from typing import Any

import numpy as np

from grader.episode import Episode, Scored
from inferencegym.tasks import Calibration, TaskSpec


def grade_throughput(task: TaskSpec, calibration: Calibration, episode: Episode) -> dict[str, Any]:
    """Grade of one episode (T,): :func:`score_throughput` with the measured quantities and a sentence."""
    mean_tps = float(episode.tokens_per_sec.mean())
    score = float(score_throughput(task, calibration, episode)[0])
    return {
        "score": score,
        "breakdown": {"throughput": score},
        "detail": {
            "mean_tokens_per_sec": mean_tps,
            "floor_tokens_per_sec": calibration.floor_tps,
            "optimal_tokens_per_sec": calibration.optimal_tps,
        },
        "feedback": (
            f"{mean_tps:.0f} tokens/s on average: {100 * score:.0f} % of the way from no batching "
            f"({calibration.floor_tps:.0f}) to the best known ({calibration.optimal_tps:.0f})."
        ),
    }


def score_throughput(_: TaskSpec, calibration: Calibration, episode: Episode) -> Scored:
    """Score = (mean tokens/s - floor) / (optimal - floor), cut to [0, 1].

    The floor is the throughput with ``batch_size`` 1, the optimum what the solver reached; both are calibrated.
    Episodes are (..., T), scores (...,).
    """
    span = calibration.optimal_tps - calibration.floor_tps
    score = np.clip((episode.tokens_per_sec.mean(axis=-1) - calibration.floor_tps) / span, 0.0, 1.0)
    return score, {"throughput": score}
