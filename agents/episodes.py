"""Whole episodes of an agent in one batch, and their grades: one row per seed, or candidate policies x seeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from agents.protocol import Agent, FloatArray, knobs_of
from env.batch import ServingBatch
from env.dynamics import DynamicsFactory, FluidFleet
from grader.episode import Episode, Scored
from grader.grader import final
from grader.kinds import RULES
from inferencegym.models import ACTION_FIELDS
from inferencegym.spaces.actions import ACTION_SIZE, action_size
from inferencegym.tasks import Calibration, EpisodeConfig, TaskSpec, get_calibration

GRADED: Final = ("ttft_p50_ms", "tokens_per_sec", "gpu_memory_gb", "cost_per_1k", "slo_violations")
"""Metrics of an episode that grading reads."""
LOWEST: Final = np.array([field.low for field in ACTION_FIELDS.values()])
HIGHEST: Final = np.array([field.high for field in ACTION_FIELDS.values()])


@dataclass(frozen=True, slots=True, eq=False)
class EpisodeResults:
    """Results of finished episodes, B rows of T steps.

    ``metrics[name]`` (T, B) for the names of :data:`GRADED` and others asked for, ``actions`` (T, B, 5) as
    applied, ``returns`` (B,) sums of rewards, ``seeds`` (L,): row b has ``seeds[b % L]``. ``outside`` counts, by knob,
    the rows of ``decisions`` in which the agent asked for a value outside its range, which was clamped.
    """

    task: TaskSpec
    seeds: tuple[int, ...]
    metrics: dict[str, FloatArray]
    actions: FloatArray
    returns: FloatArray
    outside: dict[str, int]
    decisions: int

    def scores(self, calibration: Calibration | None = None) -> FloatArray:
        """The grade of every row, (B,)."""
        score, _ = self._scored(calibration)
        return final(score)

    def breakdown(self) -> dict[str, FloatArray]:
        """Each component of the grade, (B,)."""
        _, parts = self._scored(None)
        return parts

    def _scored(self, calibration: Calibration | None) -> Scored:
        rule = RULES[str(self.task.grade["kind"])]
        return rule.score(self.task, calibration or get_calibration(self.task.task_id), self._episodes())

    def _episodes(self) -> Episode:
        """Input of the grader for all rows; each row is contiguous, so that it is summed as if it were alone."""
        columns = {name: np.ascontiguousarray(self.metrics[name].T) for name in GRADED}
        # Logs carry whole violations, see ServingFleet.snapshot.
        columns["slo_violations"] = np.rint(columns["slo_violations"])
        batch_size, kv_budget = (np.ascontiguousarray(self.actions[..., knob].T) for knob in (2, 0))
        sixth = self.actions[..., ACTION_SIZE:].T  # (1, B, T), or (0, B, T) where the task does not scale
        replicas = np.ascontiguousarray(sixth[0]) if len(sixth) else np.zeros_like(kv_budget)
        return Episode(**columns, batch_size=batch_size, kv_budget=kv_budget, replicas=replicas)


def run_episodes(
    task: TaskSpec,
    agent: Agent,
    seeds: Sequence[int],
    *,
    n_rows: int | None = None,
    calibration: Calibration | None = None,
    config: EpisodeConfig | None = None,
    keep: Sequence[str] = (),
    dynamics: DynamicsFactory = FluidFleet,
    after_step: Callable[[], None] = lambda: None,
) -> EpisodeResults:
    """Run whole episodes of an agent: one row per seed, or ``n_rows`` rows that share the seeds' workloads.

    ``keep`` names further metrics to record. ``dynamics`` serves the requests: the fluid model, or the discrete-event
    engine (:class:`env.reference.ReferenceFleet`). ``after_step`` is called after every step, to show progress.
    """
    batch = ServingBatch(
        task, n_rows or len(seeds), config, calibration=calibration, n_loads=len(seeds), dynamics=dynamics
    )
    length, hold = batch.config.episode_length, batch.hold
    metrics = {name: np.empty((length, batch.n_rows)) for name in (*GRADED, *keep)}
    actions = np.empty((length, batch.n_rows, action_size(task.fleet)))
    actions[..., ACTION_SIZE:] = task.fleet.n_replicas
    returns = np.zeros(batch.n_rows)
    outside = np.zeros(ACTION_SIZE, dtype=int)
    decisions = 0
    batch.reset(list(seeds))
    agent.reset(batch.n_rows)
    for t in range(0, length, hold):
        seconds = min(hold, length - t)
        asked = knobs_of(agent, batch.full_observation())
        outside += ((asked[:, :ACTION_SIZE] < LOWEST) | (asked[:, :ACTION_SIZE] > HIGHEST)).sum(axis=0)
        decisions += len(asked)
        taken = batch.snap(asked)
        # Agents that set five knobs leave the replicas as they are at the start.
        actions[t : t + seconds, :, : taken.shape[1]] = taken
        batch.step(actions[t])
        returns += batch.reward
        for name, column in metrics.items():
            column[t : t + seconds] = batch.second(name)[:seconds]
        after_step()
    clamped = {name: int(count) for name, count in zip(ACTION_FIELDS, outside, strict=True) if count}
    return EpisodeResults(task, tuple(int(s) for s in seeds), metrics, actions, returns, clamped, decisions)
