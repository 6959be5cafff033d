"""Grade of autoscaling: objectives met, GPU cost and churn of the replicas."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from grader.episode import Episode, FloatArray, Scored
from grader.rule import GradeRule, StepShares, step_shares, unit
from inferencegym.grade_keys import Autoscaling
from inferencegym.tasks import Calibration, TaskSpec
from simulator.hardware.tables import tables_of
from simulator.kernel.serving import CONVENTIONS


def score(task: TaskSpec, calibration: Calibration, episode: Episode) -> Scored:
    """Score = w_S*S + w_G*G + w_A*A with the task's weights, S in [-1, 1], G and A in [0, 1].

    S = 1 - missed requests / (``missed_share_limit`` of the task's mean load), G = (``max_replicas`` - mean replicas
    paid) / (``max_replicas`` - ``least_replicas``), where a prefill GPU counts as a replica's, A = 1 - replicas added
    and removed per episode / ``changes_limit``.
    """
    missed_limit, changes_limit = _limits(task)
    least, most = _replica_range(task)
    changes = replica_changes(task, episode.replicas) * task.episode_length / episode.replicas.shape[-1]
    parts = {
        # Also below 0: otherwise a fleet that serves nobody would score for its few GPUs.
        "slo": np.clip(1.0 - episode.slo_violations.mean(axis=-1) / missed_limit, -1.0, 1.0),
        "gpus": unit((most - _replicas_paid(task, calibration, episode).mean(axis=-1)) / (most - least)),
        "churn": unit(1.0 - changes / changes_limit),
    }
    w_s, w_g, w_a = (float(w) for w in task.grade["weights"])
    return w_s * parts["slo"] + w_g * parts["gpus"] + w_a * parts["churn"], parts


def shares(task: TaskSpec, calibration: Calibration, n_steps: int) -> StepShares:
    """Shares of one step in the score of an episode of ``n_steps``."""
    missed_limit, changes_limit = _limits(task)
    least, most = _replica_range(task)
    w_s, w_g, w_a = (float(w) for w in task.grade["weights"])
    per_episode = task.episode_length / n_steps
    return step_shares(
        {"slo": -1.0},
        slo=(w_s, 1.0, {"slo_violations": -1.0 / missed_limit}),
        gpus=(w_g, most / (most - least), {"gpu_cost": -1.0 / (_replica_price(task, calibration) * (most - least))}),
        churn=(w_a, 1.0, {"replica_changes": -per_episode / changes_limit}),
    )


def report(
    task: TaskSpec, calibration: Calibration, episode: Episode, parts: Mapping[str, float]
) -> tuple[dict[str, float], str]:
    """Misses, replicas paid and replicas changed, and the part with most to gain."""
    detail = {
        "mean_slo_violations": float(episode.slo_violations.mean()),
        "missed_share_of_nominal_load": float(episode.slo_violations.mean() / task.arrival_rate_rps),
        "mean_replicas_paid": float(_replicas_paid(task, calibration, episode).mean()),
        "replica_changes": float(replica_changes(task, episode.replicas)),
    }
    paid, changed = detail["mean_replicas_paid"], detail["replica_changes"]
    terms = {
        "few violations": (parts["slo"], "requests waited for replicas: request them before the load rises"),
        "few replicas": (parts["gpus"], f"{paid:.1f} were paid on average: remove replicas with little load"),
        "few changes": (parts["churn"], f"{changed:.0f} replicas were added or removed: keep them for a while"),
    }
    worst = min(terms, key=lambda name: terms[name][0])
    listed = ", ".join(f"{name} {value:.2f}" for name, (value, _) in terms.items())
    return detail, f"{listed}. Most to gain: {worst} ({terms[worst][1]})."


def words(task: TaskSpec, _: Calibration | None) -> str:
    """The formula with the task's weights and limits."""
    objectives, gpus, churn = task.grade["weights"]
    missed, changes, most = task.grade["missed_share_limit"], task.grade["changes_limit"], task.fleet.max_replicas or 1
    return (
        f"{objectives:g} * (1 - mean slo_violations per second / {missed * task.arrival_rate_rps:g}) + {gpus:g} * "
        f"({most} - mean replicas paid) / {most - task.grade['least_replicas']:g} + "
        f"{churn:g} * (1 - replicas added and removed / {changes:g} in {task.episode_length} seconds)"
    )


RULE = GradeRule(Autoscaling, score, shares, report, words)


def gpu_cost(tokens_per_sec: FloatArray, cost_per_1k: FloatArray) -> FloatArray:
    """Price of the GPUs of each step: the cost of a thousand tokens times the billed thousands."""
    billed: FloatArray = cost_per_1k * np.maximum(tokens_per_sec / 1000.0, CONVENTIONS.min_billed_ktokens_per_s)
    return billed


def replica_changes(task: TaskSpec, replicas: FloatArray) -> FloatArray:
    """Replicas that the actions of an episode (..., T) added and removed, (...,), from the task's initial number on."""
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
    """Mean replicas paid at which the GPU part is 1 and 0."""
    assert task.fleet.max_replicas is not None
    return float(task.grade["least_replicas"]), float(task.fleet.max_replicas)
