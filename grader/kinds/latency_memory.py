"""Grade of latency and memory: half for a low time to first token, half for a low memory peak."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from grader.episode import Episode, FloatArray, Scored
from grader.rule import GradeRule, StepShares, step_shares, unit
from inferencegym.errors import MalformedLogError
from inferencegym.grade_keys import LatencyMemory
from inferencegym.tasks import Calibration, TaskSpec


def score(task: TaskSpec, _: Calibration, episode: Episode) -> Scored:
    """Score = 0.5 * (1 - mean TTFT p50 / target) + 0.5 * memory, each part cut to [0, 1].

    Memory is 1 while the peak stays under the limit and falls linearly to 0 over ``memory_slope_gb`` beyond it.
    """
    target_ms = float(task.grade["ttft_target_ms"])
    ttft = unit(1.0 - episode.ttft_p50_ms.mean(axis=-1) / target_ms)
    memory = memory_part(task, episode)
    return 0.5 * ttft + 0.5 * memory, {"ttft": ttft, "memory": memory}


def memory_part(task: TaskSpec, episode: Episode) -> FloatArray:
    """1 while the peak stays under ``memory_limit_gb``, 0 from ``memory_slope_gb`` beyond it on, (...,)."""
    if np.isnan(episode.gpu_memory_gb).any():
        raise MalformedLogError(f"task {task.task_id!r} grades gpu_memory_gb, which is missing in the log")
    beyond_gb = episode.gpu_memory_gb.max(axis=-1) - float(task.grade["memory_limit_gb"])
    return unit(1.0 - beyond_gb / float(task.grade["memory_slope_gb"]))


def shares(task: TaskSpec, _: Calibration, n_steps: int) -> StepShares:
    """Shares of one step in the score, whatever the episode's length."""
    return step_shares(
        ttft=(0.5, 1.0, {"ttft_p50_ms": -1.0 / float(task.grade["ttft_target_ms"])}),
        memory=(0.5, 1.0, {"memory_loss": -1.0}),
    )


def report(
    task: TaskSpec, _: Calibration, episode: Episode, parts: Mapping[str, float]
) -> tuple[dict[str, float], str]:
    """Mean TTFT and peak memory against the target and the limit."""
    target_ms, limit_gb = float(task.grade["ttft_target_ms"]), float(task.grade["memory_limit_gb"])
    mean_ttft_ms, peak_gb = float(episode.ttft_p50_ms.mean()), float(episode.gpu_memory_gb.max())
    return {"mean_ttft_p50_ms": mean_ttft_ms, "peak_gpu_memory_gb": peak_gb}, (
        f"TTFT score {parts['ttft']:.2f} (mean {mean_ttft_ms:.0f} ms against {target_ms:.0f} ms), "
        f"memory score {parts['memory']:.2f} (peak {peak_gb:.1f} GB against {limit_gb:.0f} GB)."
    )


def words(task: TaskSpec, _: Calibration | None) -> str:
    """The formula with the task's target and limit."""
    return (
        f"0.5 * (1 - mean of ttft_p50_ms / {task.grade['ttft_target_ms']:g}) + 0.5 * memory, where {memory_words(task)}"
    )


def memory_words(task: TaskSpec) -> str:
    """What memory scores, with the task's limit."""
    limit_gb, slope_gb = task.grade["memory_limit_gb"], task.grade["memory_slope_gb"]
    return f"memory is 1 up to a peak of gpu_memory_gb of {limit_gb:g} and 0 from {limit_gb + slope_gb:g} on"


RULE = GradeRule(LatencyMemory, score, shares, report, words)
