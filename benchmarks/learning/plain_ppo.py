"""Stable-Baselines3's PPO without tuning on the Gymnasium ids that end in ``-v2``.

    python -m benchmarks.learning.plain_ppo                        task 3, a training seed, a million decisions
    python -m benchmarks.learning.plain_ppo --task 2 --seeds 5     those of five training seeds that are not stored

Trains ``PPO("MlpPolicy", envs)`` in one thread on four environments, as the examples of Stable-Baselines3 do, which
are rows of one native batch. Each run is scored on the held-out seeds (the policy's most likely actions) forty times
as it trains, which chooses nothing: its score is that of the last policy. Results so far go to
``benchmarks/results/plain_ppo.json`` and ``.md`` each time. A run that is stored with as many decisions is not trained
again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback

import inferencegym.gym  # noqa: F401 - registers the environments
from agents.evaluate import compare, interval, paired
from agents.integrations.sb3 import SB3VecEnv
from agents.seeds import HELD_OUT_SEEDS
from benchmarks.policies.autoscalers import spread
from inferencegym.tasks import get_task
from inferencegym.vector_env import registered_id

RESULTS: Final = Path(__file__).resolve().parents[1] / "results" / "plain_ppo.json"
N_ENVS: Final = 4
N_SCORES: Final = 40
RIVALS: Final = ("heuristic", "best_static", "best_adaptive")


def held_out_scores(model: PPO, env_id: str) -> NDArray[np.float64]:
    """Scores of whole episodes, one per held-out seed."""
    mode = AutoresetMode.DISABLED
    envs: Any = gymnasium.make_vec(env_id, num_envs=len(HELD_OUT_SEEDS), autoreset_mode=mode)
    seen, info = envs.reset(seed=list(HELD_OUT_SEEDS))
    while "score" not in info:
        seen, _, _, _, info = envs.step(model.predict(seen, deterministic=True)[0])
    scores: NDArray[np.float64] = info["score"]
    return scores


class Scores(BaseCallback):
    """Scores the policy on the held-out seeds as it trains, and gives the run so far to ``keep``."""

    def __init__(self, env_id: str, every: int, keep: Callable[[dict[str, Any]], None]) -> None:
        super().__init__()
        self._env_id, self._every, self._keep = env_id, every, keep
        self._curve: list[tuple[int, float]] = []

    def _on_training_start(self) -> None:
        self._started = time.perf_counter()

    def _on_step(self) -> bool:
        if self.num_timesteps >= self._every * (len(self._curve) + 1):
            self._score()
        return True

    def _on_training_end(self) -> None:
        self._score()

    def _score(self) -> None:
        scores = held_out_scores(self.model, self._env_id)
        self._curve.append((self.num_timesteps, float(scores.mean())))
        print(f"{self._env_id}: {scores.mean():.3f} after {self.num_timesteps:,} decisions", flush=True)
        self._keep(
            {
                "seed": self.model.seed,
                "steps": self.num_timesteps,
                "wall_s": time.perf_counter() - self._started,
                "scores": scores.tolist(),
                "score": interval(scores).to_dict(),
                "curve": self._curve,
            }
        )


def train(task_id: str, seed: int, steps: int, keep: Callable[[dict[str, Any]], None]) -> None:
    """Train once; ``keep`` gets the run so far, with its scores, :data:`N_SCORES` times and at the end."""
    env_id = registered_id(get_task(task_id).gym_id, version=2)
    envs: Any = gymnasium.make_vec(env_id, num_envs=N_ENVS, autoreset_mode=AutoresetMode.SAME_STEP)
    model = PPO("MlpPolicy", SB3VecEnv(envs), seed=seed, device="cpu")
    model.learn(steps, callback=Scores(env_id, steps // N_SCORES, keep))


@cache
def rivals(task_id: str) -> list[dict[str, Any]]:
    """Scores of :data:`RIVALS` on the held-out seeds."""
    agents: list[dict[str, Any]] = compare(get_task(task_id), list(RIVALS), HELD_OUT_SEEDS)["agents"]
    return agents


def summary(task_id: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Runs of a task, with paired differences of their mean from other agents on the same held-out seeds."""
    mean_of_runs = np.array([run["scores"] for run in runs]).mean(axis=0)
    return {
        "runs": sorted(runs, key=lambda run: int(run["seed"])),
        "rivals": {entry["agent"]: entry["score"] for entry in rivals(task_id)},
        "over": {e["agent"]: paired(mean_of_runs, np.array(e["scores"])).to_dict() for e in rivals(task_id)},
    }


def store(task_id: str, others: list[dict[str, Any]], run: dict[str, Any]) -> None:
    """Write results and tables with a run of a task beside its ``others``."""
    results = dict(sorted({**stored(), task_id: summary(task_id, [*others, run])}.items()))
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    RESULTS.with_suffix(".md").write_text(report(results), encoding="utf-8")


def stored() -> dict[str, Any]:
    """The results so far."""
    results: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    return results


def report(results: dict[str, Any]) -> str:
    """The tables as Markdown."""
    lines = [
        "`python -m benchmarks.learning.plain_ppo`: scores on 30 held-out seeds with 95 % intervals. Differences are",
        "those of the mean of the runs, paired by held-out seed.",
        "",
        "| task | runs | mean | lowest to highest run | over " + " | over ".join(RIVALS) + " |",
        "|" + "---|" * (4 + len(RIVALS)),
    ]
    for task_id, result in results.items():
        means = [run["score"]["mean"] for run in result["runs"]]
        cells = [spread(result["over"][rival], "+") for rival in RIVALS]
        lines.append(
            f"| {task_id} | {len(means)} | {np.mean(means):.3f} | {min(means):.3f} to {max(means):.3f} "
            f"| {' | '.join(cells)} |"
        )
    lines += [
        "",
        "| task | training seed | decisions | score | 95 % interval | highest score before | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for task_id, result in results.items():
        for run in result["runs"]:
            score = run["score"]
            at, highest = max(run["curve"], key=lambda point: float(point[1]))
            lines.append(
                f"| {task_id} | {run['seed']} | {run['steps']:,} | {score['mean']:.3f} "
                f"| [{score['ci95_low']:.3f}, {score['ci95_high']:.3f}] | {highest:.3f} after {at:,} "
                f"| {run['wall_s']:.0f} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--task", action="append", help="task id, repeatable (default: 3)")
    parser.add_argument("--seeds", type=int, default=1, help="training seeds per task, from 0 (default 1)")
    parser.add_argument("--steps", type=int, default=1_000_000, help="decisions of a run (default 1000000)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    # Checks of every distribution's arguments: a large part of the time, and without influence on the numbers.
    torch.distributions.Distribution.set_default_validate_args(False)
    for task_id in args.task or ["3"]:
        for seed in range(args.seeds):
            runs = stored().get(task_id, {"runs": []})["runs"]
            if not any(run["seed"] == seed and run["steps"] >= args.steps for run in runs):
                train(task_id, seed, args.steps, partial(store, task_id, [run for run in runs if run["seed"] != seed]))
    print(report(stored()))


if __name__ == "__main__":
    main()
