"""Grade of objectives and memory: requests served in time, and a low memory peak."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from grader.episode import Episode, Scored
from grader.kinds.latency_memory import memory_part, memory_words
from grader.rule import GradeRule, StepShares, step_shares
from inferencegym.grade_keys import ObjectivesMemory
from inferencegym.tasks import Calibration, TaskSpec


def score(task: TaskSpec, _: Calibration, episode: Episode) -> Scored:
    """Score = w_S*S + w_M*M with the task's weights, S in [-1, 1], M in [0, 1].

    S = 1 - mean missed requests per second / ``missed_limit_rps``, M = memory as in ``latency_memory``.
    """
    missed = episode.slo_violations.mean(axis=-1) / float(task.grade["missed_limit_rps"])
    parts = {
        # Also below 0: otherwise a pool that is small, because it serves nobody, would score for its memory.
        "slo": np.clip(1.0 - missed, -1.0, 1.0),
        "memory": memory_part(task, episode),
    }
    w_s, w_m = (float(w) for w in task.grade["weights"])
    return w_s * parts["slo"] + w_m * parts["memory"], parts


def shares(task: TaskSpec, _: Calibration, n_steps: int) -> StepShares:
    """Shares of one step in the score, whatever the episode's length."""
    w_s, w_m = (float(w) for w in task.grade["weights"])
    return step_shares(
        {"slo": -1.0},
        slo=(w_s, 1.0, {"slo_violations": -1.0 / float(task.grade["missed_limit_rps"])}),
        memory=(w_m, 1.0, {"memory_loss": -1.0}),
    )


def report(
    task: TaskSpec, _: Calibration, episode: Episode, parts: Mapping[str, float]
) -> tuple[dict[str, float], str]:
    """Missed requests and peak memory against their limits."""
    missed_rps, peak_gb = float(episode.slo_violations.mean()), float(episode.gpu_memory_gb.max())
    return {"mean_slo_violations": missed_rps, "peak_gpu_memory_gb": peak_gb}, (
        f"Objectives score {parts['slo']:.2f} ({missed_rps:.1f} requests/s missed against "
        f"{task.grade['missed_limit_rps']:g}), memory score {parts['memory']:.2f} (peak {peak_gb:.1f} GB against "
        f"{task.grade['memory_limit_gb']:.0f} GB)."
    )


def words(task: TaskSpec, _: Calibration | None) -> str:
    """The formula with the task's weights and limits."""
    objectives, memory = task.grade["weights"]
    return (
        f"{objectives:g} * (1 - mean slo_violations per second / {task.grade['missed_limit_rps']:g}) + {memory:g} * "
        f"memory, where {memory_words(task)}"
    )


RULE = GradeRule(ObjectivesMemory, score, shares, report, words)
