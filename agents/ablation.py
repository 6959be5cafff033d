"""What each knob is worth: the best adaptive policy that may not touch it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from agents.evaluate import evaluate, paired
from agents.modes import ModeAgent, ModeParams
from agents.protocol import FloatArray
from agents.seeds import HELD_OUT_SEEDS
from agents.solver import Budget, Solver
from env.action import FORCED, snap, to_row
from inferencegym.models import ACTION_FIELDS, ServeAction
from inferencegym.tasks import TaskSpec, get_calibration

KNOBS: Final = tuple(ACTION_FIELDS)


def ablate(
    task: TaskSpec,
    adaptive: ModeParams,
    static: ServeAction,
    budget: Budget | None = None,
    seeds: Sequence[int] = HELD_OUT_SEEDS,
) -> list[dict[str, Any]]:
    """Freeze each live knob in turn, search again, and report what that costs on the seeds.

    A knob is frozen at every value that it takes in the best constant action or in a mode of the adaptive policy; each
    is searched anew and the one that is best on the validation seeds counts. ``cost`` is the paired difference of the
    free policy to the frozen one, ``cost_of_default`` that to the policy with the knob left at the engine's default.
    """
    free = evaluate(ModeAgent(adaptive, task), task, seeds)
    results = []
    for i, knob in enumerate(KNOBS):
        if knob not in task.active_actions:
            continue
        default = float(FORCED[i])
        values = candidate_values(adaptive, to_row(static), i)
        frozen = {v: _search(task, adaptive, knob, v, budget) for v in {*values, default}}
        value, policy, _ = max((frozen[v] for v in values), key=lambda found: found[2])
        played = evaluate(ModeAgent(policy, task), task, seeds)
        _, left_alone, _ = frozen[default]
        unused = evaluate(ModeAgent(left_alone, task), task, seeds)
        results.append(
            {
                "knob": knob,
                "frozen_at": value,
                "score": float(played.scores.mean()),
                "cost": paired(free.scores, played.scores).to_dict(),
                "default": default,
                "cost_of_default": paired(free.scores, unused.scores).to_dict(),
            }
        )
    return results


def _search(
    task: TaskSpec, start: ModeParams, knob: str, value: float, budget: Budget | None
) -> tuple[float, ModeParams, float]:
    solver = Solver(task, get_calibration(task.task_id), budget=budget, frozen={knob: value})
    policy, worth = solver.refine(start)
    return value, policy, worth


def candidate_values(adaptive: ModeParams, static: FloatArray, knob: int) -> list[float]:
    """Values of a knob in the best constant action and in the modes of a policy, each once."""
    rows = snap(np.vstack([static[None], adaptive.settings[0]]), np.ones(len(KNOBS), dtype=bool))
    return sorted({round(float(v), 3) for v in rows[:, knob]})
