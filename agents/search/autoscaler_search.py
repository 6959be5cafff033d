"""Search of policies for tasks that scale: the best constant number of replicas, and a tuned planning autoscaler.

The constant is the best of a grid of settings and replicas. The autoscaler is a
:class:`agents.policies.autoscalers.PlannerAgent` with the constant's five knobs or the capacity plan's, whose
parameters a cross-entropy search fits. Fitted on :data:`agents.seeds.TRAINING_SEEDS`; the last ones are chosen among on
:data:`agents.seeds.VALIDATION_SEEDS`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

import numpy as np

from agents.episodes import run_episodes
from agents.policies.autoscalers import PLANNER, PlannerAgent, PlannerParams, ReplicaPlan
from agents.policies.switching_policy import ActionsAgent
from agents.protocol import Agent, FloatArray
from agents.search.solver import Progress, silent
from agents.seeds import TRAINING_SEEDS, VALIDATION_SEEDS
from inferencegym.spaces.actions import action_mask, snap
from inferencegym.tasks import Calibration, TaskSpec

GRID: Final = {
    "kv_budget": (0.6, 0.8, 0.95),
    "spec_length": (0, 1, 2, 4),
    "batch_size": (64, 128, 192, 256, 384, 512),
    "prefill_disagg": (0, 1),
    "quant_tier": (0, 1, 2),
}
SCREENING_SEEDS: Final = TRAINING_SEEDS[:4]
FINALISTS: Final = 20
CANDIDATES: Final = 120
GENERATIONS: Final = 12
KEPT: Final = 15


class AutoscalerSearch:
    """Searches on one task, with the constants that its grade needs."""

    def __init__(self, task: TaskSpec, calibration: Calibration, progress: Progress = silent) -> None:
        self.task = task
        self.calibration = calibration
        self._progress = progress
        self._best = -np.inf

    def best_constant(self) -> tuple[FloatArray, float]:
        """The best constant action (6,) and its mean grade on the training seeds."""
        replicas = range(1, (self.task.fleet.max_replicas or 1) + 1)
        grid = np.array([*itertools.product(*GRID.values(), replicas)], dtype=np.float64)
        actions = np.unique(snap(grid, action_mask(self.task.active_actions), self.task.fleet), axis=0)
        near = actions[np.argsort(-self._values_of_actions(actions, SCREENING_SEEDS))[:FINALISTS]]
        values = self._values_of_actions(near, TRAINING_SEEDS)
        best = int(values.argmax())
        return near[best], float(values[best])

    def best_autoscaler(self, constant: FloatArray) -> tuple[FloatArray, PlannerParams, float]:
        """Five knobs (5,), parameters and mean grade on the validation seeds of the best autoscaler found."""
        found = []
        for i, knobs in enumerate((constant[:5], ReplicaPlan.of(self.task).plan.row())):
            for params in self._fitted(knobs, 0.5 * i):
                agent = PlannerAgent(self.task, [params], knobs)
                found.append((knobs, params, float(self._grades(agent, VALIDATION_SEEDS).mean())))
        return max(found, key=lambda one: one[2])

    def _fitted(self, knobs: FloatArray, done: float) -> list[PlannerParams]:
        """The planner's own parameters and the best of a cross-entropy search; ``done`` is the share before it."""
        names = list(PlannerParams.model_fields)
        bounds = [PlannerParams.model_json_schema()["properties"][name] for name in names]
        low, high = (np.array([each[key] for each in bounds]) for key in ("minimum", "maximum"))
        rng = np.random.default_rng(0)
        mean = np.array([getattr(PLANNER, name) for name in names])
        spread = 0.25 * (high - low)
        tried: list[tuple[float, PlannerParams]] = []
        for generation in range(GENERATIONS):
            drawn = np.clip(mean + spread * rng.standard_normal((CANDIDATES, len(names))), low, high)
            drawn[0] = mean
            params = [PlannerParams(**dict(zip(names, row, strict=True))) for row in drawn.tolist()]
            agent = PlannerAgent(self.task, params, knobs)
            n = len(TRAINING_SEEDS)
            values = self._grades(agent, TRAINING_SEEDS, CANDIDATES * n).reshape(CANDIDATES, n).mean(axis=1)
            best = np.argsort(-values)[:KEPT]
            tried.append((float(values[best[0]]), params[int(best[0])]))
            self._best = max(self._best, tried[-1][0])
            said = f"autoscalers, best {self._best:.4g} in training"
            self._progress(said, done + 0.5 * (generation + 1) / GENERATIONS)
            mean = drawn[best].mean(axis=0)
            spread = drawn[best].std(axis=0) + 0.02 * (high - low) * (1.0 - generation / GENERATIONS)
        return [PLANNER, *(params for _, params in sorted(tried, key=lambda one: -one[0])[:4])]

    def _values_of_actions(self, actions: FloatArray, seeds: Sequence[int]) -> FloatArray:
        agent = ActionsAgent(actions, len(seeds))
        values: FloatArray = self._grades(agent, seeds, len(actions) * len(seeds)).reshape(-1, len(seeds)).mean(axis=1)
        return values

    def _grades(self, agent: Agent, seeds: Sequence[int], n_rows: int | None = None) -> FloatArray:
        played = run_episodes(self.task, agent, seeds, n_rows=n_rows, calibration=self.calibration)
        return played.scores(self.calibration)
