"""Stable-Baselines3's PPO without tuning on the Gymnasium ids that end in ``-v2``.

    python -m benchmarks.learning.plain_ppo                        task 3, a training seed, a million steps
    python -m benchmarks.learning.plain_ppo --task 2 --seeds 5     those of five training seeds that are not stored

Trains ``PPO("MlpPolicy", env)`` in one thread, on one environment or ``--envs`` (rows of a native batch, which steps
faster than what ``gymnasium.make`` gives). With n of them PPO updates once in n times as many steps. Each run is
scored on the held-out seeds (the policy's most likely actions) forty times as it trains, which chooses nothing: its
score is that of the last policy. Results so far go to ``benchmarks/results/plain_ppo.json`` and ``.md`` each time. A
run that is stored with as many steps is not trained again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import cache, partial
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback

import inferencegym.gym  # noqa: F401 - registers the environments
from agents.evaluate import compare, gym_scores, interval, paired
from agents.integrations.sb3 import SB3VecEnv
from agents.seeds import HELD_OUT_SEEDS
from benchmarks.policies.autoscalers import spread
from benchmarks.policies.tasks import timetables
from inferencegym.tasks import get_task
from inferencegym.vector_env import registered_id

RESULTS: Final = Path(__file__).resolve().parents[1] / "results" / "plain_ppo.json"
N_SCORES: Final = 40
RIVALS: Final = ("heuristic", "best_static", "best_adaptive")


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
        scores = gym_scores(self._env_id, lambda seen: self.model.predict(seen, deterministic=True)[0])
        self._curve.append((self.num_timesteps, float(scores.mean())))
        print(f"{self._env_id}: {scores.mean():.3f} after {self.num_timesteps:,} steps", flush=True)
        self._keep(
            {
                "n_envs": self.model.n_envs,
                "seed": self.model.seed,
                "steps": self.num_timesteps,
                "wall_s": time.perf_counter() - self._started,
                "scores": scores.tolist(),
                "score": interval(scores).to_dict(),
                "curve": self._curve,
            }
        )


def train(task_id: str, n_envs: int, seed: int, steps: int, keep: Callable[[dict[str, Any]], None]) -> None:
    """Train once; ``keep`` gets the run so far, with its scores, :data:`N_SCORES` times and at the end."""
    env_id = registered_id(get_task(task_id).gym_id, version=2)
    envs: Any = gymnasium.make_vec(env_id, num_envs=n_envs, autoreset_mode=AutoresetMode.SAME_STEP)
    model = PPO("MlpPolicy", SB3VecEnv(envs), seed=seed, device="cpu")
    model.learn(steps, callback=Scores(env_id, steps // N_SCORES, keep))


@cache
def rivals(task_id: str) -> dict[str, list[float]]:
    """Scores of :data:`RIVALS` on the held-out seeds."""
    return {e["agent"]: e["scores"] for e in compare(get_task(task_id), list(RIVALS), HELD_OUT_SEEDS)["agents"]}


def store(task_id: str, run: dict[str, Any]) -> None:
    """Write results and tables with a run of a task, which replaces the stored one of its training seed."""
    results = stored()
    runs = [*(each for each in results.get(task_id, {"runs": []})["runs"] if key(each) != key(run)), run]
    results = dict(sorted({**results, task_id: {"rivals": rivals(task_id), "runs": sorted(runs, key=key)}}.items()))
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    RESULTS.with_suffix(".md").write_text(report(results), encoding="utf-8")


def key(run: dict[str, Any]) -> tuple[int, int]:
    """Number of environments and training seed, which identify a run of a task."""
    return run["n_envs"], run["seed"]


def stored() -> dict[str, Any]:
    """The results so far."""
    results: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    return results


def report(results: dict[str, Any]) -> str:
    """The tables as Markdown."""
    lines = [
        "`python -m benchmarks.learning.plain_ppo`: scores on 30 held-out seeds with 95% intervals. Differences are",
        "those of the mean of the runs, paired by held-out seed. The best timetable observes nothing.",
        "",
        "| task | environments | runs | mean | lowest to highest run | best timetable | over "
        + " | over ".join(RIVALS)
        + " |",
        "|" + "---|" * (6 + len(RIVALS)),
    ]
    blind = timetables()
    for task_id, result in results.items():
        for n_envs, group in groupby(result["runs"], key=lambda run: int(run["n_envs"])):
            scores = np.array([run["scores"] for run in group])  # (training seeds, held-out seeds)
            means, mean_of_runs = scores.mean(axis=1), scores.mean(axis=0)
            over = [paired(mean_of_runs, np.array(result["rivals"][name])).to_dict() for name in RIVALS]
            lines.append(
                f"| {task_id} | {n_envs} | {len(means)} | {means.mean():.3f} | {means.min():.3f} to {means.max():.3f} "
                f"| {blind[task_id]['mean']:.3f} | {' | '.join(spread(each, '+') for each in over)} |"
            )
    lines += [
        "",
        "| task | environments | training seed | steps | score | 95% interval | highest on the way | seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for task_id, result in results.items():
        for run in result["runs"]:
            score = run["score"]
            at, highest = max(run["curve"], key=lambda point: float(point[1]))
            lines.append(
                f"| {task_id} | {run['n_envs']} | {run['seed']} | {run['steps']:,} | {score['mean']:.3f} "
                f"| [{score['ci95_low']:.3f}, {score['ci95_high']:.3f}] | {highest:.3f} after {at:,} "
                f"| {run['wall_s']:.0f} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--task", action="append", help="task id, repeatable (default: 3)")
    parser.add_argument("--envs", type=int, default=1, help="environments of a run (default 1)")
    parser.add_argument("--seeds", type=int, default=1, help="training seeds per task, from 0 (default 1)")
    parser.add_argument("--steps", type=int, default=1_000_000, help="steps of a run (default 1000000)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    # Checks of every distribution's arguments: a large part of the time, and without influence on the numbers.
    torch.distributions.Distribution.set_default_validate_args(False)
    for task_id in args.task or ["3"]:
        done = {key(run): run["steps"] for run in stored().get(task_id, {"runs": []})["runs"]}
        for seed in range(args.seeds):
            if done.get((args.envs, seed), 0) < args.steps:
                train(task_id, args.envs, seed, args.steps, partial(store, task_id))
    print(report(stored()))


if __name__ == "__main__":
    main()
