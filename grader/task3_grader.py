"""Four-term grading (hard and recorded tasks): throughput, objectives met, cost and a steady hand."""

from __future__ import annotations

from typing import Any

import numpy as np

from grader.episode import Episode, FloatArray
from inferencegym.tasks import Calibration, TaskSpec


def grade_four_term(task: TaskSpec, calibration: Calibration, episode: Episode) -> dict[str, Any]:
    """Score = w_T*T + w_S*S + w_C*C + w_A*A with the task's weights (0.40, 0.30, 0.20, 0.10), each term in [0, 1].

    T = mean tokens/s / best known, S = 1 - mean(SLO violations per step) / 100, C = 1 - total cost / budget,
    A = 1 - action variance. ``detail.violating_step_share`` is the share of steps with any violation.
    """
    throughput = _unit(float(episode.tokens_per_sec.mean()) / calibration.optimal_tps)
    slo = _unit(1.0 - float(episode.slo_violations.mean()) / 100.0)
    total_cost = float(episode.cost_per_1k.sum())
    cost = _unit(1.0 - total_cost / task.cost_budget)
    stability = 1.0 - action_variance(episode.batch_size, episode.kv_budget)
    w_t, w_s, w_c, w_a = (float(w) for w in task.grade["weights"])
    return {
        "score": w_t * throughput + w_s * slo + w_c * cost + w_a * stability,
        "breakdown": {"throughput": throughput, "slo": slo, "cost": cost, "stability": stability},
        "detail": {
            "mean_tokens_per_sec": float(episode.tokens_per_sec.mean()),
            "mean_slo_violations": float(episode.slo_violations.mean()),
            "violating_step_share": float((episode.slo_violations > 0).mean()),
            "total_cost": total_cost,
            "cost_budget": task.cost_budget,
        },
        "feedback": _feedback(throughput, slo, cost, stability, total_cost, task.cost_budget),
    }


def action_variance(batch_size: FloatArray, kv_budget: FloatArray) -> float:
    """Thrashing in [0, 1]: spread of the changes of batch_size (per 512) and kv_budget between consecutive steps."""
    if len(batch_size) < 2:
        return 0.0
    spread = float(np.std(np.diff(batch_size))) / 512.0 + float(np.std(np.diff(kv_budget)))
    return min(1.0, spread / 0.5)


def _unit(x: float) -> float:
    return min(1.0, max(0.0, x))


def _feedback(throughput: float, slo: float, cost: float, stability: float, spent: float, budget: float) -> str:
    parts = {
        "throughput": (throughput, "raise batch_size or use a lower precision while the queue is long"),
        "objectives": (slo, "too many requests waited beyond their objective: admit more during floods"),
        "cost": (cost, f"{spent:.2f} of {budget:.2f} spent: GPUs that produce few tokens are dear"),
        "stability": (stability, "the knobs were changed wildly from step to step"),
    }
    worst = min(parts, key=lambda name: parts[name][0])
    terms = ", ".join(f"{name} {value:.2f}" for name, (value, _) in parts.items())
    return f"{terms}. Most to gain: {worst} ({parts[worst][1]})."
