"""Throughput grading (easy task): mean throughput between that without batching and the best known."""

from __future__ import annotations

from typing import Any

import numpy as np

from grader.episode import Episode, Scored
from grader.shares import StepShares, step_shares
from inferencegym.tasks import Calibration, TaskSpec


def grade_throughput(_: TaskSpec, calibration: Calibration, episode: Episode, scored: Scored) -> dict[str, Any]:
    """Grade of one episode (T,): what :func:`score_throughput` gives, with the measured quantities and a sentence."""
    mean_tps = float(episode.tokens_per_sec.mean())
    score = float(scored[0])
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


def shares_throughput(_: TaskSpec, calibration: Calibration, n_steps: int) -> StepShares:
    """Shares of one step in :func:`score_throughput` of an episode, whatever its length."""
    span = calibration.optimal_tps - calibration.floor_tps
    return step_shares(throughput=(1.0, -calibration.floor_tps / span, {"tokens_per_sec": 1.0 / span}))
