"""Oracle agent declared in openenv.yaml: plays its tasks with the best policy that the solver found.

    python scripts/openenv_oracle.py [--split train] [--seed 10000] [--url http://localhost:7860]

Prints one JSON object per task: the mean reward and the score of the oracle, and of fixed-32 (``naive``) on the
same traffic. Plays in process, or with ``--url`` on a server, from observations received over HTTP.
Exits with 1 if fixed-32 scores as high as the oracle on any task.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from agents.protocol import Agent
from agents.registry import make_agent
from agents.seeds import HELD_OUT_SEEDS
from env.inference_env import InferenceEnv
from grader.grader import GraderModule
from inferencegym.client.http import InferenceGymHTTP
from inferencegym.spaces.actions import action_mask, from_row, snap
from inferencegym.spaces.observations import to_array
from inferencegym.tasks import TaskSpec, list_tasks

ORACLE, DEFAULTS = "best_adaptive", "naive"
Play = Callable[[TaskSpec, str, int], dict[str, float]]


def main() -> int:
    """Play the split's tasks; returns 1 unless the oracle beats the naive baseline on each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--split", choices=["train", "test"], default="train", help="as in the Task API")
    parser.add_argument("--seed", type=int, default=HELD_OUT_SEEDS[0], help="one that no policy was fitted on")
    parser.add_argument("--url", help="play on this server")
    args = parser.parse_args()
    play = play_here if args.url is None else play_on(args.url)
    worse = 0
    for task in list_tasks(include_recorded=True):
        if task.recorded is not (args.split == "test"):
            continue
        oracle, defaults = play(task, ORACLE, args.seed), play(task, DEFAULTS, args.seed)
        worse += defaults["score"] >= oracle["score"]
        print(json.dumps({"task_id": task.task_id, "seed": args.seed, "oracle": oracle, "defaults": defaults}))
    return int(worse > 0)


def play_here(task: TaskSpec, agent: str, seed: int) -> dict[str, float]:
    """Play one episode in this process."""
    env = InferenceEnv(task_id=task.task_id, seed=seed)
    rewards = _play(env, make_agent(agent, task), task)
    return {
        "mean_reward": float(np.mean(rewards)),
        "score": GraderModule().score(task.task_id, env.episode_log)["score"],
    }


def play_on(url: str) -> Play:
    """Function that plays episodes on a server."""

    def play(task: TaskSpec, agent: str, seed: int) -> dict[str, float]:
        with InferenceGymHTTP(url) as env:
            rewards = _play(env, make_agent(agent, task), task, seed=seed, task_id=task.task_id)
            return {"mean_reward": float(np.mean(rewards)), "score": env.grade()["score"]}

    return play


def _play(env: Any, agent: Agent, task: TaskSpec, **reset: Any) -> list[float]:
    observation, done, rewards = env.reset(**reset), False, []
    mask = action_mask(task.active_actions)
    agent.reset(1)
    while not done:
        row = snap(agent.act(to_array(observation)[None]), mask)[0]
        observation, reward, done, _info = env.step(from_row(row))
        rewards.append(reward)
    return rewards


if __name__ == "__main__":
    sys.exit(main())
