"""Grade of throughput: mean tokens per second on a scale from no batching to the best known."""

from __future__ import annotations

from collections.abc import Mapping

from grader.episode import Episode, Scored
from grader.rule import GradeRule, StepShares, step_shares, unit
from inferencegym.grade_keys import Throughput
from inferencegym.tasks import Calibration, TaskSpec


def score(_: TaskSpec, calibration: Calibration, episode: Episode) -> Scored:
    """Score = (mean tokens/s - floor) / (optimal - floor), cut to [0, 1].

    The floor is the throughput with ``batch_size`` 1, the optimum the best of the solver; both are calibrated.
    """
    span = calibration.optimal_tps - calibration.floor_tps
    throughput = unit((episode.tokens_per_sec.mean(axis=-1) - calibration.floor_tps) / span)
    return throughput, {"throughput": throughput}


def shares(_: TaskSpec, calibration: Calibration, n_steps: int) -> StepShares:
    """Shares of one step in the score, whatever the episode's length."""
    span = calibration.optimal_tps - calibration.floor_tps
    return step_shares(throughput=(1.0, -calibration.floor_tps / span, {"tokens_per_sec": 1.0 / span}))


def report(
    _: TaskSpec, calibration: Calibration, episode: Episode, parts: Mapping[str, float]
) -> tuple[dict[str, float], str]:
    """Mean throughput, and its position between the two constants."""
    mean_tps = float(episode.tokens_per_sec.mean())
    detail = {
        "mean_tokens_per_sec": mean_tps,
        "floor_tokens_per_sec": calibration.floor_tps,
        "optimal_tokens_per_sec": calibration.optimal_tps,
    }
    return detail, (
        f"{mean_tps:.0f} tokens/s on average: {100 * parts['throughput']:.0f}% of the way from no batching "
        f"({calibration.floor_tps:.0f}) to the best known ({calibration.optimal_tps:.0f})."
    )


def words(_: TaskSpec, calibration: Calibration | None) -> str:
    """The formula with the floor and the optimum."""
    if calibration is None:
        return "(mean tokens/s - floor_tps) / (optimal_tps - floor_tps)"
    floor, optimum = calibration.floor_tps, calibration.optimal_tps
    return f"(mean tokens/s - {floor:g}) / {optimum - floor:g}"


RULE = GradeRule(Throughput, score, shares, report, words)
