"""Calibration of a task: floor, best and peak throughput, and the price of tokens.

A step costs ``price`` x GPUs / thousand tokens per second: what 1,000 tokens cost on the GPUs that made them.

Nothing in the calibration file is typed by hand: ``inferencegym calibrate`` measures all of it with the solver, and
stores the policies that it found where agents look for them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from agents.episodes import run_episodes
from agents.policies.autoscalers import ReplicaPlan
from agents.policies.constant import NAIVE_ROW, NaiveAgent
from agents.policies.stored import policy_dir, policy_path
from agents.policies.switching_policy import ModeAgent, ModeParams
from agents.protocol import FloatArray
from agents.search.autoscaler_search import AutoscalerSearch
from agents.search.random_search import random_search
from agents.search.solver import QUICK, Budget, Progress, Solver, constant_policy, score, silent, throughput
from agents.seeds import CALIBRATION_SEEDS
from inferencegym.errors import DataFormatError, InvalidConfigError
from inferencegym.files import atomic_write, prepare_output
from inferencegym.spaces.actions import from_row
from inferencegym.task_registry import load_entries
from inferencegym.tasks import UNCALIBRATED, Calibration, TaskSpec, fingerprint
from simulator.hardware.tables import tables_of

SOLVED: Final = ("best_static", "best_adaptive", "random_search")
"""Policies that calibrating a task stores."""


@dataclass(frozen=True, slots=True, eq=False)
class Solved:
    """Result of calibrating a task: its constants with their provenance, and the policies found."""

    calibration: Calibration
    provenance: dict[str, Any]
    best_static: dict[str, Any]
    best_adaptive: dict[str, Any]
    random_search: dict[str, Any]

    def entry(self) -> dict[str, Any]:
        """The task's entry in the calibration file."""
        c = self.calibration
        constants = {
            "floor_tps": c.floor_tps,
            "optimal_tps": c.optimal_tps,
            "max_throughput_tps": c.max_throughput_tps,
            "price": c.price,
            **({} if c.replica_knobs is None else {"replica_knobs": list(c.replica_knobs)}),
        }
        return {**constants, **self.provenance}


def calibrate(task: TaskSpec, budget: Budget | None = None, progress: Progress = silent) -> Solved:
    """Measure a task's constants and solve it.

    1. price: the naive agent spends exactly the task's cost budget, on average over the calibration seeds;
    2. floor: mean throughput with ``batch_size`` 1, all else naive;
    3. optimum: the highest mean throughput over the calibration seeds that any policy of the solver reached, whether it
       was after throughput or after the grade;
    4. MAX_THROUGHPUT: the highest throughput of a single second among those policies.
    """
    began = time.perf_counter()
    budget = budget or Budget()
    price = measure_price(task)
    floor, _ = measure_throughput_of(task, batch_one(), price)

    neutral = Calibration(floor, floor + 1.0, 1.0, price)
    # A throughput can be had by constant actions almost entirely: a short search for the adaptive remainder.
    fast_budget = replace(budget, gates_kept=1, generations=min(6, budget.generations), finalists=1)
    told = stage(progress, "throughput", 0.0, 0.25)
    fast_solver = Solver(task, neutral, objective=throughput, budget=fast_budget, progress=told)
    fastest, _ = fast_solver.best_static()
    fastest_policy, _ = fast_solver.best_adaptive(fastest)
    optimum, peak = _highest(task, price, [fastest, fastest_policy])

    # The grade needs the optimum, and the search for the grade may find a higher one: measure again with it.
    guess = Calibration(floor, optimum, peak, price)
    told = stage(progress, "grade", 0.25, 0.95)
    solver = Solver(task, guess, objective=score, budget=budget, progress=told)
    static, static_value = solver.best_static()
    adaptive, adaptive_value = solver.best_adaptive(static)
    optimum, peak = _highest(task, price, [fastest, fastest_policy, static, adaptive])

    calibration = Calibration(floor, optimum, peak, price)
    provenance = {
        "fingerprint": fingerprint(task),
        "table_sha256": tables_of(task.hardware).sha256,
        "calibration_seeds": [CALIBRATION_SEEDS.start, CALIBRATION_SEEDS.stop],
        "training_seeds": [min(budget.seeds), max(budget.seeds) + 1],
        "validation_seeds": [min(budget.validation), max(budget.validation) + 1],
        "fastest_action": from_row(fastest).to_dict(),
        "seconds": round(time.perf_counter() - began, 1),
    }
    found = {"task": str(task.task_id), "table_sha256": tables_of(task.hardware).sha256}
    return Solved(
        calibration,
        provenance,
        {"kind": "constant", "action": from_row(static).to_dict(), "training_score": static_value, **found},
        {**adaptive.to_dict(), "validation_score": adaptive_value, **found},
        search_at_random(task, calibration, progress),
    )


def constants_alone(task: TaskSpec) -> Solved:
    """Measure a task's constants by constant actions alone, in the fluid model: seconds, and no policy is searched.

    The optimum is the highest throughput of a constant action. For a task on a table other than its own.
    """
    began = time.perf_counter()
    budget = replace(QUICK, finalists=1)
    price = measure_price(task)
    floor, _ = measure_throughput_of(task, batch_one(), price)
    solver = Solver(task, Calibration(floor, floor + 1.0, 1.0, price), objective=throughput, budget=budget)
    fastest, _ = solver.best_static()
    optimum, peak = _highest(task, price, [fastest])
    found = {"task": str(task.task_id), "table_sha256": tables_of(task.hardware).sha256}
    provenance = {
        "fingerprint": fingerprint(task),
        "table_sha256": found["table_sha256"],
        "calibration_seeds": [CALIBRATION_SEEDS.start, CALIBRATION_SEEDS.stop],
        "fastest_action": from_row(fastest).to_dict(),
        "seconds": round(time.perf_counter() - began, 1),
    }
    action = {"kind": "constant", "action": from_row(fastest).to_dict(), **found}
    return Solved(Calibration(floor, optimum, peak, price), provenance, action, {}, {})


def stage(progress: Progress, name: str, first: float, last: float) -> Progress:
    """Progress of one search among several: it takes the work from the share ``first`` to the share ``last``."""

    def report(what: str, share: float | None) -> None:
        progress(f"{name}: {what}", None if share is None else first + (last - first) * share)

    return report


def calibrate_scaling(task: TaskSpec, progress: Progress = silent) -> Solved:
    """Measure the constants of a task that scales by constant actions, and search its policies."""
    began = time.perf_counter()
    progress("constants", 0.0)
    constants = constants_alone(task)
    calibration = replace(constants.calibration, replica_knobs=tuple(ReplicaPlan.of(task).plan.row().tolist()))
    search = AutoscalerSearch(task, calibration, stage(progress, "grade", 0.1, 0.95))
    static, static_value = search.best_constant()
    knobs, params, value = search.best_autoscaler(static)
    found = {"task": str(task.task_id), "table_sha256": tables_of(task.hardware).sha256}
    autoscaler = {
        "kind": "autoscaler",
        "knobs": from_row(knobs).to_dict(),
        "params": params.model_dump(),
        "validation_score": value,
        **found,
    }
    return replace(
        constants,
        calibration=calibration,
        best_static={
            "kind": "constant",
            "action": from_row(static).to_dict(),
            "training_score": static_value,
            **found,
        },
        best_adaptive=autoscaler,
        random_search=search_at_random(task, calibration, progress),
        provenance={**constants.provenance, "seconds": round(time.perf_counter() - began, 1)},
    )


def search_at_random(task: TaskSpec, calibration: Calibration, progress: Progress) -> dict[str, Any]:
    """What :func:`agents.search.random_search.random_search` finds, as it is stored."""
    progress("random search", 0.95)
    action, grade = random_search(task, calibration)
    found = {"task": str(task.task_id), "table_sha256": tables_of(task.hardware).sha256}
    return {"kind": "constant", "action": from_row(action).to_dict(), "training_score": grade, **found}


def batch_one() -> FloatArray:
    """The naive action with one request at a time."""
    action = NAIVE_ROW.copy()
    action[2] = 1.0
    return action


def measure_price(task: TaskSpec) -> float:
    """Cost units per GPU and thousand tokens per second at which the naive agent spends the whole budget."""
    results = run_episodes(task, NaiveAgent(), CALIBRATION_SEEDS, calibration=UNCALIBRATED)
    return float(task.cost_budget / results.metrics["cost_per_1k"].sum(axis=0).mean())


def measure_throughput_of(task: TaskSpec, policy: FloatArray | ModeParams, price: float) -> tuple[float, float]:
    """Mean tokens per second of an action (5,) or policy over the calibration seeds, and its fastest second."""
    calibration = Calibration(0.0, 1.0, 1.0, price)
    params = policy if isinstance(policy, ModeParams) else constant_policy(policy)
    results = run_episodes(task, ModeAgent(params, task), CALIBRATION_SEEDS, calibration=calibration)
    tps = results.metrics["tokens_per_sec"]
    return float(tps.mean()), float(tps.max())


def _highest(task: TaskSpec, price: float, tried: Sequence[FloatArray | ModeParams]) -> tuple[float, float]:
    measured = [measure_throughput_of(task, policy, price) for policy in tried]
    means, peaks = np.array(measured).T
    return float(means.max()), float(peaks.max())


# ---------------------------------------------------------------- files


@dataclass(frozen=True, slots=True)
class CalibrationFiles:
    """The files that calibrating a task changes."""

    task: TaskSpec
    constants: Path
    policies: Path

    @classmethod
    def of(cls, task: TaskSpec, constants: Path | None = None, policies: Path | None = None) -> CalibrationFiles:
        """The files that the task reads, unless others are named."""
        return cls(task, constants or Path(task.calibration_file), policies or policy_dir(task))

    def check(self) -> None:
        """Check that all can be written; raises :class:`DataFormatError` naming the one that cannot."""
        for path in (self.constants, *(self._policy(name) for name in SOLVED)):
            prepare_output(path)
        self._stored()

    def store(self, solved: Solved) -> None:
        """Put the constants and the policies in place together, when all are written; other tasks keep theirs."""
        self.check()
        entries = self._stored()
        entries["tasks"][str(self.task.task_id)] = solved.entry()
        found = {name: getattr(solved, name) for name in SOLVED}
        contents = {self.constants: entries, **{self._policy(name): policy for name, policy in found.items() if policy}}
        with ExitStack() as stack:
            # It is left in reverse order: the constants, which scores are made of, change last.
            for path, data in contents.items():
                stack.enter_context(atomic_write(path)).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")

    def _policy(self, name: str) -> Path:
        return policy_path(name, self.task.task_id, self.policies)

    def _stored(self) -> dict[str, Any]:
        """The calibration file as it is now."""
        if not self.constants.exists():
            return {"tasks": {}}
        try:
            return {"tasks": load_entries(self.constants, "calibration file", lambda _, entry: entry)}
        except InvalidConfigError as error:
            raise DataFormatError(f"{error}; name another with --out, or move it away") from error
