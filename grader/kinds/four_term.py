"""Grade of four terms: throughput, objectives met, cost and stability of the knobs."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from grader.episode import Episode, FloatArray, Scored
from grader.rule import GradeRule, StepShares, step_shares, unit
from inferencegym.grade_keys import FourTerm
from inferencegym.tasks import Calibration, TaskSpec


def score(task: TaskSpec, calibration: Calibration, episode: Episode) -> Scored:
    """Score = w_T*T + w_S*S + w_C*C + w_A*A with the task's weights, each term in [0, 1].

    T = mean tokens/s / best known, S = 1 - mean(SLO violations per step) / 100, C = 1 - total cost / budget,
    A = 1 - action variance.
    """
    parts = {
        "throughput": unit(episode.tokens_per_sec.mean(axis=-1) / calibration.optimal_tps),
        "slo": unit(1.0 - episode.slo_violations.mean(axis=-1) / 100.0),
        "cost": unit(1.0 - episode.cost_per_1k.sum(axis=-1) / task.cost_budget),
        "stability": 1.0 - action_variance(episode.batch_size, episode.kv_budget),
    }
    w_t, w_s, w_c, w_a = (float(w) for w in task.grade["weights"])
    total = w_t * parts["throughput"] + w_s * parts["slo"] + w_c * parts["cost"] + w_a * parts["stability"]
    return total, parts


def shares(task: TaskSpec, calibration: Calibration, n_steps: int) -> StepShares:
    """Shares of one step in the score of an episode of ``n_steps``."""
    w_t, w_s, w_c, w_a = (float(w) for w in task.grade["weights"])
    return step_shares(
        throughput=(w_t, 0.0, {"tokens_per_sec": 1.0 / calibration.optimal_tps}),
        slo=(w_s, 1.0, {"slo_violations": -0.01}),
        cost=(w_c, 1.0, {"cost_per_1k": -n_steps / task.cost_budget}),
        stability=(w_a, 1.0, {"action_variance": -1.0}),
    )


def action_variance(batch_size: FloatArray, kv_budget: FloatArray) -> FloatArray:
    """Thrashing in [0, 1], (...,): std of the changes of batch_size / 512 and kv_budget, each (..., T)."""
    if batch_size.shape[-1] < 2:
        return np.zeros(batch_size.shape[:-1])
    spread = np.std(np.diff(batch_size), axis=-1) / 512.0 + np.std(np.diff(kv_budget), axis=-1)
    return unit(spread / 0.5)


def report(
    task: TaskSpec, _: Calibration, episode: Episode, parts: Mapping[str, float]
) -> tuple[dict[str, float], str]:
    """Means and total cost, and the term with most to gain; ``violating_step_share``: steps with any violation."""
    spent = float(episode.cost_per_1k.sum())
    detail = {
        "mean_tokens_per_sec": float(episode.tokens_per_sec.mean()),
        "mean_slo_violations": float(episode.slo_violations.mean()),
        "violating_step_share": float((episode.slo_violations > 0).mean()),
        "total_cost": spent,
        "cost_budget": task.cost_budget,
    }
    terms = {
        "throughput": (parts["throughput"], "raise batch_size or use a lower precision while the queue is long"),
        "few violations": (
            parts["slo"],
            "too many requests waited beyond their objective: admit more of a flood (batch_size, kv_budget)",
        ),
        "low cost": (
            parts["cost"],
            f"{100 * spent / task.cost_budget:.0f}% of the budget spent: GPUs that produce few tokens are expensive",
        ),
        "stability": (parts["stability"], "the knobs were changed wildly from step to step"),
    }
    worst = min(terms, key=lambda name: terms[name][0])
    listed = ", ".join(f"{name} {value:.2f}" for name, (value, _) in terms.items())
    return detail, f"{listed}. Most to gain: {worst} ({terms[worst][1]})."


def words(task: TaskSpec, calibration: Calibration | None) -> str:
    """The formula with the task's weights and budget."""
    throughput, objectives, cost, stability = task.grade["weights"]
    best = "optimal_tps" if calibration is None else f"{calibration.optimal_tps:g}"
    return (
        f"{throughput:g} * mean tokens/s / {best} + {objectives:g} * (1 - mean slo_violations per second / 100) + "
        f"{cost:g} * (1 - sum of cost_per_1k / {task.cost_budget:g}) + "
        f"{stability:g} * stability, which is 1 where batch_size and kv_budget never move"
    )


RULE = GradeRule(FourTerm, score, shares, report, words)
