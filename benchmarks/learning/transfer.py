"""Transfer experiment: policies trained on one card, and a policy trained on all cards, graded on every card.

    python -m benchmarks.learning.transfer                       trains and writes results/transfer.json and transfer.md
    python -m benchmarks.learning.transfer --steps 600000        as long as the policies that ship

Every run trains PPO from scratch on task 3 with one table of the catalogue (``3@CARD``), or with all of them at once, a
quarter of the environments each. Within a run, validation seeds of its own cards choose the policy that is kept; all
grades are on held-out seeds. Each card's grade has its own constants, so rows compare policies on one card, not cards
with each other. The table also has scores of agents that learn nothing.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from agents.evaluate import evaluate
from agents.policies.ppo import PpoAgent
from agents.ppo_demo import OBSERVATION, PpoSettings, local_envs, train
from agents.seeds import HELD_OUT_SEEDS
from benchmarks.report import store, table
from env.vector import VectorInferenceEnv
from inferencegym.tasks import AT, TaskSpec, get_task
from inferencegym.vector_env import AutoresetVectorEnv, BoolArray, Float32Array, FloatArray, Info
from simulator.hardware.catalogue import table_path

CARDS = ("a100-40gb", "l40s-llama-3.1-8b", "h100-llama-3.1-8b", "b200-llama-3.1-8b")
ALL = "all four"
TASK = "3"
RIVALS = ("naive", "heuristic")


class MixedEnvs(AutoresetVectorEnv):
    """Vector environments of several tasks as one, with their rows one after another; the parts do not autoreset."""

    def __init__(self, parts: Sequence[VectorInferenceEnv]) -> None:
        first = parts[0]
        rows = sum(part.num_envs for part in parts)
        # Bounds differ in the highest cost, which depends on a card's price; learners do not scale by them.
        super().__init__(rows, first.single_observation_space, first.single_action_space, AutoresetMode.SAME_STEP)
        self.parts, self.task, self.config = parts, first.task, first.config
        self._at = np.cumsum([part.num_envs for part in parts])[:-1]
        self._seen: list[Float32Array] = []
        self._flags: list[tuple[BoolArray, BoolArray]] = []

    def _start(self, seeds: Sequence[int | None] | None, rows: BoolArray | None) -> None:
        if rows is None:
            firsts = [0, *self._at]
            own = [
                None if seeds is None else list(seeds)[i : i + p.num_envs]
                for i, p in zip(firsts, self.parts, strict=True)
            ]
            self._seen = [part.reset(seed=each)[0] for part, each in zip(self.parts, own, strict=True)]
            return
        for i, mask in enumerate(np.split(rows, self._at)):
            if mask.any():
                self._seen[i] = self.parts[i].reset(options={"reset_mask": mask})[0]

    def _step_rows(self, actions: NDArray[Any], rows: BoolArray | None) -> FloatArray:
        assert rows is None, "all rows step together"
        moves = np.split(actions, self._at)
        steps = [part.step(move) for part, move in zip(self.parts, moves, strict=True)]
        self._seen, self._flags = [step[0] for step in steps], [step[2:4] for step in steps]
        return np.concatenate([step[1] for step in steps])

    def _ended(self) -> tuple[BoolArray, BoolArray]:
        terminated, truncated = zip(*self._flags, strict=True)
        return np.concatenate(terminated), np.concatenate(truncated)

    def _observe(self) -> Float32Array:
        return np.concatenate(self._seen)

    def _info(self) -> Info:
        return {}


def task_on(card: str) -> TaskSpec:
    """Task 3 on a card's table."""
    return get_task(TASK if card == CARDS[0] else f"{TASK}{AT}{card}")


def mixed_envs(tasks: Sequence[TaskSpec], settings: PpoSettings, hold: int) -> MixedEnvs:
    """Environments of several tasks, the same number for each; a row keeps its task."""
    return MixedEnvs(
        [
            VectorInferenceEnv(
                settings.n_envs // len(tasks),
                task.task_id,
                reward=settings.reward,
                hold=hold,
                observation=OBSERVATION,
                action=settings.action,
                autoreset_mode=AutoresetMode.DISABLED,
            )
            for task in tasks
        ]
    )


def one_run(source: str, seed: int, steps: int, out: Path) -> dict[str, Any]:
    """Train on one card or on all; returns the mean score on every card."""
    settings = PpoSettings(from_scratch=True)
    tasks = [task_on(card) for card in (CARDS if source == ALL else (source,))]
    make = partial(mixed_envs, tasks, settings) if source == ALL else partial(local_envs, tasks[0].task_id, settings)
    began = time.perf_counter()
    trained = train(make, out, steps=steps, seed=seed, settings=settings, progress=False, score_on=tasks)
    seconds = time.perf_counter() - began
    grades = {
        card: float(evaluate(PpoAgent(trained.policy, task_on(card)), task_on(card), HELD_OUT_SEEDS).scores.mean())
        for card in CARDS
    }
    return {"trained_on": source, "seed": seed, "seconds": round(seconds, 1), "grades": grades}


def rival_grades() -> list[dict[str, Any]]:
    """Grades of agents that are not trained."""
    return [
        {
            "trained_on": name,
            "grades": {c: float(evaluate(name, task_on(c), HELD_OUT_SEEDS).scores.mean()) for c in CARDS},
        }
        for name in RIVALS
    ]


def markdown(found: dict[str, Any]) -> str:
    """The table."""
    seeds = sorted({run["seed"] for run in found["runs"]})
    lines = [
        "<!-- written by benchmarks/learning/transfer.py; do not edit -->",
        f"PPO from scratch, {found['steps']:,} steps, {len(seeds)} training seeds; mean score on task {TASK} over "
        f"{len(HELD_OUT_SEEDS)} held-out seeds, and in brackets the range over the training seeds.",
        "",
    ]
    rows = []
    for source in (*CARDS, ALL):
        runs = [run["grades"] for run in found["runs"] if run["trained_on"] == source]
        cells = []
        for card in CARDS:
            grades = [run[card] for run in runs]
            cells.append(f"{np.mean(grades):.3f} ({min(grades):.3f}-{max(grades):.3f})")
        rows.append((source, *cells))
    for rival in found["rivals"]:
        scores = (f"{rival['grades'][card]:.3f}" for card in CARDS)
        rows.append((f"*{rival['trained_on']}, learns nothing*", *scores))
    return "\n".join([*lines, *table(("trained on", *(f"score on {card}" for card in CARDS)), rows)]) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=80_000, help="steps of a run (default 80000)")
    parser.add_argument("--seeds", type=int, default=2, help="training seeds (default 2)")
    parser.add_argument("--out", type=Path, default=Path("runs/transfer"), help="folder of the runs")
    options = parser.parse_args(arguments)
    for card in CARDS:
        table_path(card)
    runs = []
    for seed in range(options.seeds):
        for source in (*CARDS, ALL):
            runs.append(one_run(source, seed, options.steps, options.out / f"{source.replace(' ', '-')}-{seed}"))
            print(json.dumps(runs[-1]), flush=True)
    found = {"steps": options.steps, "runs": runs, "rivals": rival_grades()}
    print(text := markdown(found))
    store("transfer", found, text)


if __name__ == "__main__":
    main()
