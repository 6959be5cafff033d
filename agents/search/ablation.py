"""Ablation of knobs: the loss of score of the best adaptive policy that may not use one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from agents.evaluate import evaluate, paired
from agents.policies.switching_policy import ModeAgent, ModeParams
from agents.protocol import FloatArray
from agents.search.solver import Budget, Solver
from agents.seeds import HELD_OUT_SEEDS
from inferencegym.models import ACTION_FIELDS, ServeAction
from inferencegym.spaces.actions import FORCED, snap, to_row
from inferencegym.tasks import TaskSpec, get_calibration

KNOBS: Final = tuple(ACTION_FIELDS)


def ablate(
    task: TaskSpec,
    adaptive: ModeParams,
    static: ServeAction,
    budget: Budget | None = None,
    seeds: Sequence[int] = HELD_OUT_SEEDS,
) -> list[dict[str, Any]]:
    """Freeze each live knob in turn, search again, and report how much score that costs on the seeds.

    A knob is frozen at every value that it takes in the best constant action or in a mode of the adaptive policy; each
    gets a new search, and the one that is best on the validation seeds counts. The free policy, to which all are
    compared, is the best on these seeds of all that were found, with or without a frozen knob. ``cost`` is the paired
    difference of the free policy to the frozen one, ``cost_of_default`` that to the policy with the knob at its default
    value.
    """
    solver = Solver(task, get_calibration(task.task_id), budget=budget)
    found = [(adaptive, solver.validated(adaptive))]
    searched: dict[str, dict[float, tuple[ModeParams, float]]] = {}
    for i, knob in enumerate(KNOBS):
        if knob in task.active_actions:
            values = {*candidate_values(adaptive, to_row(static), i), float(FORCED[i])}
            searched[knob] = {value: _search(task, adaptive, knob, value, budget) for value in sorted(values)}
            found += searched[knob].values()
    free, _ = max(found, key=lambda each: each[1])

    def scores_of(policy: ModeParams) -> FloatArray:
        return evaluate(ModeAgent(policy, task), task, seeds).scores

    scores = scores_of(free)
    results = []
    for knob, by_value in searched.items():
        i = KNOBS.index(knob)
        default = float(FORCED[i])
        best = max(candidate_values(adaptive, to_row(static), i), key=lambda value: by_value[value][1])
        frozen = scores_of(by_value[best][0])
        results.append(
            {
                "knob": knob,
                "frozen_at": best,
                "score": float(frozen.mean()),
                "cost": paired(scores, frozen).to_dict(),
                "default": default,
                "cost_of_default": paired(scores, scores_of(by_value[default][0])).to_dict(),
            }
        )
    return results


def _search(
    task: TaskSpec, start: ModeParams, knob: str, value: float, budget: Budget | None
) -> tuple[ModeParams, float]:
    return Solver(task, get_calibration(task.task_id), budget=budget, frozen={knob: value}).refine(start)


def candidate_values(adaptive: ModeParams, static: FloatArray, knob: int) -> list[float]:
    """Values of a knob in the best constant action and in the modes of a policy, each once."""
    rows = snap(np.vstack([static[None], adaptive.settings[0]]), np.ones(len(KNOBS), dtype=bool))
    return sorted({round(float(v), 3) for v in rows[:, knob]})
