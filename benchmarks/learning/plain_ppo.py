"""Stable-Baselines3's PPO without tuning on both versions of a task's Gymnasium id, for as many simulated seconds.

    python -m benchmarks.learning.plain_ppo                                        tasks 2, 3 and autoscale, a seed each
    python -m benchmarks.learning.plain_ppo --task 3 --seeds 5 --seconds 1000000

Trains ``PPO("MlpPolicy", gymnasium.make(id))`` on one environment in one thread, and prints the mean score over the
held-out seeds after each run (the policy's most likely actions) beside the rule-based heuristic's. A step of ``-v2``
plays several seconds, so it takes fewer decisions in the same simulated time.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray
from stable_baselines3 import PPO

import inferencegym.gym  # noqa: F401 - registers the environments
from agents.evaluate import evaluate, interval
from agents.seeds import HELD_OUT_SEEDS
from inferencegym.tasks import get_task
from inferencegym.vector_env import registered_id


def train(env_id: str, seed: int, seconds: int) -> PPO:
    """PPO with Stable-Baselines3's defaults, trained for so many simulated seconds."""
    env = gymnasium.make(env_id)
    model = PPO("MlpPolicy", env, seed=seed, device="cpu")
    model.learn(seconds // env.get_wrapper_attr("config").hold)
    return model


def held_out_scores(model: PPO, env_id: str) -> NDArray[np.float64]:
    """Scores of whole episodes, one per held-out seed."""
    mode = AutoresetMode.DISABLED
    envs: Any = gymnasium.make_vec(env_id, num_envs=len(HELD_OUT_SEEDS), autoreset_mode=mode)
    seen, info = envs.reset(seed=list(HELD_OUT_SEEDS))
    while "score" not in info:
        seen, _, _, _, info = envs.step(model.predict(seen, deterministic=True)[0])
    scores: NDArray[np.float64] = info["score"]
    return scores


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--task", action="append", help="task id, repeatable (default: 2, 3 and autoscale)")
    parser.add_argument("--version", type=int, action="append", choices=(1, 2), help="of the id (default: both)")
    parser.add_argument("--seeds", type=int, default=1, help="training seeds per id, from 0 (default 1)")
    parser.add_argument("--seconds", type=int, default=200_000, help="simulated seconds of a run (default 200000)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("| task | id | training seed | decisions | score | 95 % interval | heuristic | wall time, s |")
    print("|---|---|---|---|---|---|---|---|")
    for task in map(get_task, args.task or ["2", "3", "autoscale"]):
        heuristic = evaluate("heuristic", task).scores.mean()
        for env_id in (registered_id(task.gym_id, version) for version in args.version or (1, 2)):
            for seed in range(args.seeds):
                start = time.perf_counter()
                model = train(env_id, seed, args.seconds)
                wall_s = time.perf_counter() - start
                score = interval(held_out_scores(model, env_id))
                numbers = f"{score.mean:.3f} | [{score.low:.3f}, {score.high:.3f}] | {heuristic:.3f} | {wall_s:.0f}"
                print(f"| {task.task_id} | `{env_id}` | {seed} | {model.num_timesteps:,} | {numbers} |", flush=True)


if __name__ == "__main__":
    main()
