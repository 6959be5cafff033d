"""Grading of tasks that scale: objectives met, GPU cost and churn of the replicas."""

from __future__ import annotations

from typing import Any

import numpy as np

from grader.episode import Episode, FloatArray, Scored
from grader.shares import StepShares, step_shares
from inferencegym.tasks import Calibration, TaskSpec
from simulator.serving import CONVENTIONS
from simulator.tables import tables_of


def grade_autoscaling(task: TaskSpec, calibration: Calibration, episode: Episode, scored: Scored) -> dict[str, Any]:
    """Grade of one episode (T,): what :func:`score_autoscaling` gives, with the measured quantities and a sentence."""
    score, parts = scored
    breakdown = {name: float(part) for name, part in parts.items()}
    detail = {
        "mean_slo_violations": float(episode.slo_violations.mean()),
        "missed_share_of_nominal_load": float(episode.slo_violations.mean() / task.arrival_rate_rps),
        "mean_replicas_paid": float(_replicas_paid(task, calibration, episode).mean()),
        "replica_changes": float(replica_changes(task, episode.replicas)),
    }
    return {
        "score": float(score),
        "breakdown": breakdown,
        "detail": detail,
        "feedback": _feedback(breakdown, detail),
    }


def score_autoscaling(task: TaskSpec, calibration: Calibration, episode: Episode) -> Scored:
    """Score = w_S*S + w_G*G + w_A*A with the task's weights, S in [-1, 1], G and A in [0, 1].

    S = 1 - missed requests / (``missed_share_limit`` of the task's mean load), G = (``max_replicas`` - mean replicas
    paid) / (``max_replicas`` - ``least_replicas``), where a prefill GPU counts as a replica's, A = 1 - replicas added
    and removed per episode / ``changes_limit``. Episodes are (..., T), scores (...,).
    """
    missed_limit, changes_limit = _limits(task)
    least, most = _replica_range(task)
    changes = replica_changes(task, episode.replicas) * task.episode_length / episode.replicas.shape[-1]
    parts = {
        # Below 0 too: else a fleet that serves nobody would score what its idle GPUs save.
        "slo": np.clip(1.0 - episode.slo_violations.mean(axis=-1) / missed_limit, -1.0, 1.0),
        "gpus": _unit((most - _replicas_paid(task, calibration, episode).mean(axis=-1)) / (most - least)),
        "churn": _unit(1.0 - changes / changes_limit),
    }
    w_s, w_g, w_a = (float(w) for w in task.grade["weights"])
    return w_s * parts["slo"] + w_g * parts["gpus"] + w_a * parts["churn"], parts


def shares_autoscaling(task: TaskSpec, calibration: Calibration, n_steps: int) -> StepShares:
    """Shares of one step in :func:`score_autoscaling` of an episode of ``n_steps``."""
    missed_limit, changes_limit = _limits(task)
    least, most = _replica_range(task)
    w_s, w_g, w_a = (float(w) for w in task.grade["weights"])
    per_episode = task.episode_length / n_steps
    return step_shares(
        slo=(w_s, 1.0, {"slo_violations": -1.0 / missed_limit}),
        gpus=(w_g, most / (most - least), {"gpu_cost": -1.0 / (_replica_price(task, calibration) * (most - least))}),
        churn=(w_a, 1.0, {"replica_changes": -per_episode / changes_limit}),
    )


def gpu_cost(tokens_per_sec: FloatArray, cost_per_1k: FloatArray) -> FloatArray:
    """Price of the GPUs of each step: what a thousand tokens cost, times the thousands that are billed."""
    billed: FloatArray = cost_per_1k * np.maximum(tokens_per_sec / 1000.0, CONVENTIONS.min_billed_ktokens_per_s)
    return billed


def replica_changes(task: TaskSpec, replicas: FloatArray) -> FloatArray:
    """Replicas that the actions of an episode (..., T) added and removed, (...,); it starts with the task's own."""
    first = np.full((*replicas.shape[:-1], 1), float(task.fleet.n_replicas))
    changes: FloatArray = np.abs(np.diff(replicas, axis=-1, prepend=first)).sum(axis=-1)
    return changes


def _replicas_paid(task: TaskSpec, calibration: Calibration, episode: Episode) -> FloatArray:
    return gpu_cost(episode.tokens_per_sec, episode.cost_per_1k) / _replica_price(task, calibration)


def _replica_price(task: TaskSpec, calibration: Calibration) -> float:
    return calibration.price * tables_of(task.hardware).cards_per_replica


def _limits(task: TaskSpec) -> tuple[float, float]:
    """Misses per second at which no objective counts as met, and changes per episode at which churn is worst."""
    return float(task.grade["missed_share_limit"]) * task.arrival_rate_rps, float(task.grade["changes_limit"])


def _replica_range(task: TaskSpec) -> tuple[float, float]:
    """Mean replicas paid at which the GPUs' part is 1 and 0."""
    assert task.fleet.max_replicas is not None
    return float(task.grade["least_replicas"]), float(task.fleet.max_replicas)


def _unit(x: FloatArray) -> FloatArray:
    return np.clip(x, 0.0, 1.0)


def _feedback(breakdown: dict[str, float], detail: dict[str, float]) -> str:
    advice = {
        "slo": "requests waited for replicas: ask for them before the load is there, a new one has to load first",
        "gpus": f"{detail['mean_replicas_paid']:.1f} replicas were paid on average: remove what has little to do",
        "churn": f"{detail['replica_changes']:.0f} replicas were added or removed: keep them for a while",
    }
    worst = min(breakdown, key=lambda name: breakdown[name])
    terms = ", ".join(f"{name} {value:.2f}" for name, value in breakdown.items())
    return f"{terms}. Most to gain: {worst} ({advice[worst]})."
