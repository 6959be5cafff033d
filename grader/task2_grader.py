"""Latency and memory grading (medium task): half for a low time to first token, half for staying within memory."""

from __future__ import annotations

from typing import Any

from grader.episode import Episode
from inferencegym.tasks import Calibration, TaskSpec


def grade_latency_memory(task: TaskSpec, calibration: Calibration, episode: Episode) -> dict[str, Any]:
    """Score = 0.5 * (1 - mean TTFT p50 / target) + 0.5 * memory, each part cut to [0, 1].

    Memory is 1 while the peak stays under the limit and falls linearly to 0 over ``memory_slope_gb`` beyond it.
    """
    target_ms = float(task.grade["ttft_target_ms"])
    limit_gb = float(task.grade["memory_limit_gb"])
    slope_gb = float(task.grade["memory_slope_gb"])
    mean_ttft_ms = float(episode.ttft_p50_ms.mean())
    peak_gb = float(episode.gpu_memory_gb.max())
    ttft = min(1.0, max(0.0, 1.0 - mean_ttft_ms / target_ms))
    memory = 1.0 if peak_gb < limit_gb else min(1.0, max(0.0, 1.0 - (peak_gb - limit_gb) / slope_gb))
    return {
        "score": 0.5 * ttft + 0.5 * memory,
        "breakdown": {"ttft": ttft, "memory": memory},
        "detail": {"mean_ttft_p50_ms": mean_ttft_ms, "peak_gpu_memory_gb": peak_gb},
        "feedback": (
            f"TTFT score {ttft:.2f} (mean {mean_ttft_ms:.0f} ms against {target_ms:.0f} ms), "
            f"memory score {memory:.2f} (peak {peak_gb:.1f} GB against {limit_gb:.0f} GB)."
        ),
    }
