"""Four-term grading (hard and recorded tasks): throughput, objectives met, cost and stability of the knobs."""

from __future__ import annotations

from typing import Any

import numpy as np

from grader.episode import Episode, FloatArray, Scored
from grader.shares import StepShares, step_shares
from inferencegym.tasks import Calibration, TaskSpec


def grade_four_term(task: TaskSpec, _: Calibration, episode: Episode, scored: Scored) -> dict[str, Any]:
    """Grade of one episode (T,): what :func:`score_four_term` gives, with the measured quantities and a sentence.

    ``detail.violating_step_share`` is the share of steps with any violation.
    """
    score, parts = scored
    breakdown = {name: float(part) for name, part in parts.items()}
    total_cost = float(episode.cost_per_1k.sum())
    return {
        "score": float(score),
        "breakdown": breakdown,
        "detail": {
            "mean_tokens_per_sec": float(episode.tokens_per_sec.mean()),
            "mean_slo_violations": float(episode.slo_violations.mean()),
            "violating_step_share": float((episode.slo_violations > 0).mean()),
            "total_cost": total_cost,
            "cost_budget": task.cost_budget,
        },
        "feedback": _feedback(**breakdown, spent=total_cost, budget=task.cost_budget),
    }


def score_four_term(task: TaskSpec, calibration: Calibration, episode: Episode) -> Scored:
    """Score = w_T*T + w_S*S + w_C*C + w_A*A with the task's weights (0.40, 0.30, 0.20, 0.10), each term in [0, 1].

    T = mean tokens/s / best known, S = 1 - mean(SLO violations per step) / 100, C = 1 - total cost / budget,
    A = 1 - action variance. Episodes are (..., T), scores (...,).
    """
    parts = {
        "throughput": _unit(episode.tokens_per_sec.mean(axis=-1) / calibration.optimal_tps),
        "slo": _unit(1.0 - episode.slo_violations.mean(axis=-1) / 100.0),
        "cost": _unit(1.0 - episode.cost_per_1k.sum(axis=-1) / task.cost_budget),
        "stability": 1.0 - action_variance(episode.batch_size, episode.kv_budget),
    }
    w_t, w_s, w_c, w_a = (float(w) for w in task.grade["weights"])
    score = w_t * parts["throughput"] + w_s * parts["slo"] + w_c * parts["cost"] + w_a * parts["stability"]
    return score, parts


def shares_four_term(task: TaskSpec, calibration: Calibration, n_steps: int) -> StepShares:
    """Shares of one step in :func:`score_four_term` of an episode of ``n_steps``."""
    w_t, w_s, w_c, w_a = (float(w) for w in task.grade["weights"])
    return step_shares(
        throughput=(w_t, 0.0, {"tokens_per_sec": 1.0 / calibration.optimal_tps}),
        slo=(w_s, 1.0, {"slo_violations": -0.01}),
        cost=(w_c, 1.0, {"cost_per_1k": -n_steps / task.cost_budget}),
        stability=(w_a, 1.0, {"action_variance": -1.0}),
    )


def action_variance(batch_size: FloatArray, kv_budget: FloatArray) -> FloatArray:
    """Thrashing in [0, 1], (...,): spread of the changes of batch_size (per 512) and kv_budget, each (..., T)."""
    if batch_size.shape[-1] < 2:
        return np.zeros(batch_size.shape[:-1])
    spread = np.std(np.diff(batch_size), axis=-1) / 512.0 + np.std(np.diff(kv_budget), axis=-1)
    return _unit(spread / 0.5)


def _unit(x: FloatArray) -> FloatArray:
    return np.clip(x, 0.0, 1.0)


def _feedback(*, throughput: float, slo: float, cost: float, stability: float, spent: float, budget: float) -> str:
    parts = {
        "throughput": (throughput, "raise batch_size or use a lower precision while the queue is long"),
        "objectives": (slo, "too many requests waited beyond their objective: admit more during floods"),
        "cost": (cost, f"{spent:.2f} of {budget:.2f} spent: GPUs that produce few tokens are expensive"),
        "stability": (stability, "the knobs were changed wildly from step to step"),
    }
    worst = min(parts, key=lambda name: parts[name][0])
    terms = ", ".join(f"{name} {value:.2f}" for name, (value, _) in parts.items())
    return f"{terms}. Most to gain: {worst} ({parts[worst][1]})."
