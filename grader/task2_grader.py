"""Latency and memory grading (medium task): half for a low time to first token, half for staying within memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from grader.episode import Episode, Scored
from grader.shares import StepShares, step_shares
from inferencegym.tasks import Calibration, TaskSpec


def grade_latency_memory(task: TaskSpec, _: Calibration, episode: Episode, scored: Scored) -> dict[str, Any]:
    """Grade of one episode (T,): what :func:`score_latency_memory` gives, with the measurements and a sentence."""
    score, parts = scored
    ttft, memory = float(parts["ttft"]), float(parts["memory"])
    target_ms, limit_gb = float(task.grade["ttft_target_ms"]), float(task.grade["memory_limit_gb"])
    mean_ttft_ms, peak_gb = float(episode.ttft_p50_ms.mean()), float(episode.gpu_memory_gb.max())
    return {
        "score": float(score),
        "breakdown": {"ttft": ttft, "memory": memory},
        "detail": {"mean_ttft_p50_ms": mean_ttft_ms, "peak_gpu_memory_gb": peak_gb},
        "feedback": (
            f"TTFT score {ttft:.2f} (mean {mean_ttft_ms:.0f} ms against {target_ms:.0f} ms), "
            f"memory score {memory:.2f} (peak {peak_gb:.1f} GB against {limit_gb:.0f} GB)."
        ),
    }


def score_latency_memory(task: TaskSpec, _: Calibration, episode: Episode) -> Scored:
    """Score = 0.5 * (1 - mean TTFT p50 / target) + 0.5 * memory, each part cut to [0, 1].

    Memory is 1 while the peak stays under the limit and falls linearly to 0 over ``memory_slope_gb`` beyond it.
    Episodes are (..., T), scores (...,).
    """
    target_ms = float(task.grade["ttft_target_ms"])
    limit_gb = float(task.grade["memory_limit_gb"])
    slope_gb = float(task.grade["memory_slope_gb"])
    ttft = np.clip(1.0 - episode.ttft_p50_ms.mean(axis=-1) / target_ms, 0.0, 1.0)
    memory = np.clip(1.0 - (episode.gpu_memory_gb.max(axis=-1) - limit_gb) / slope_gb, 0.0, 1.0)
    return 0.5 * ttft + 0.5 * memory, {"ttft": ttft, "memory": memory}


def shares_latency_memory(task: TaskSpec, _: Calibration, n_steps: int) -> StepShares:
    """Shares of one step in :func:`score_latency_memory` of an episode, whatever its length."""
    return step_shares(
        ttft=(0.5, 1.0, {"ttft_p50_ms": -1.0 / float(task.grade["ttft_target_ms"])}),
        memory=(0.5, 1.0, {"memory_loss": -1.0}),
    )
