"""RLlib's PPO on the native vector environment: ``python -m agents.integrations.rllib --task 3 --iterations 5``.

RLlib is given the registered Gymnasium id ``-v2``, whose spaces and rewards suit a learner as it is; with
``vector_entry_point`` as its vectorisation mode each of its runners steps one compiled batch. Needs the extras ``ray``
and ``rl``.
"""

from __future__ import annotations

import argparse
import logging
from typing import Any

from inferencegym.tasks import TaskId, get_task
from inferencegym.vector_env import registered_id

log = logging.getLogger(__name__)


def rllib_config(task_id: TaskId, n_env_runners: int = 0, n_envs: int = 16, seed: int = 0, **env_config: Any) -> Any:
    """A ``PPOConfig`` for a task with RLlib's own settings of training; change it, then ``build_algo()``.

    ``env_config`` are arguments of the environment that differ from those of ``-v2``, such as ``hold=10``.
    """
    from ray.rllib.algorithms import ppo

    # Ray's own types are incomplete, and absent where it is not installed.
    rllib: Any = ppo
    # The module before the id is imported wherever RLlib makes the environment, also on other machines.
    env_id = "inferencegym.gym:" + registered_id(get_task(task_id).gym_id, version=2)
    return (
        rllib.PPOConfig()
        .environment(env_id, env_config=env_config)
        .env_runners(
            num_env_runners=n_env_runners,
            num_envs_per_env_runner=n_envs,
            gym_env_vectorize_mode="vector_entry_point",
            rollout_fragment_length="auto",
        )
        .debugging(seed=seed)
    )


def train(task_id: TaskId, iterations: int, n_env_runners: int = 0) -> list[float]:
    """Mean episode return after each iteration."""
    config = rllib_config(task_id, n_env_runners)
    config.training(gamma=0.95, lr=1e-3, train_batch_size_per_learner=3_200, minibatch_size=400, num_epochs=10)
    algorithm = config.build_algo()
    returns = []
    for i in range(iterations):
        result = algorithm.train()
        returns.append(float(result["env_runners"]["episode_return_mean"]))
        log.info("iteration %d: mean return %.2f", i + 1, returns[-1])
    algorithm.stop()
    return returns


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="RLlib's PPO on a serving task.")
    parser.add_argument("--task", default="3")
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--runners", type=int, default=0, help="remote runners (default 0: in this process)")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    train(args.task, args.iterations, args.runners)


if __name__ == "__main__":
    main()
