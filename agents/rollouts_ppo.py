"""PPO for agent sessions: a network trained from scratch on drawn workloads.

    python -m agents.rollouts_ppo            trains on rollout-mix with Stable-Baselines3 and writes the policy
    python -m agents.rollouts_ppo --help     another number of steps, another seed, another file

A step pays the pace of the answers, as a share of that of the engine with an unlimited pool, less one for the time that
passes: the sum over an episode is the time by which the sessions took longer. Training draws workloads from seeds that
no evaluation uses; of the policies on the way the one that scores highest on the validation seeds is kept.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from agents.policies.rollouts import HOLD_S, N_FEATURES, POLICY_FILE, SHARES, Features, RolloutPolicy
from env.rollouts.agents import scores
from env.rollouts.env import RolloutRow, draw_row
from env.rollouts.tasks import RolloutConfig, RolloutTask, get_rollout_task
from inferencegym.rollouts import Fit
from inferencegym.seeds import SeedSeries
from inferencegym.vector_env import AutoresetVectorEnv, BoolArray, Float32Array, FloatArray, Info

N_ENVS: Final = 64
REWARD_SCALE: Final = 0.02
"""Returns of order one: gradients are clipped by a norm in which the value function's would drown the policy's."""


class EpisodeRows(AutoresetVectorEnv):
    """Base of environments to learn in, whose ``_rows`` are episodes in Python; ``_seen`` (B, F) is what they show."""

    _rows: Sequence[Any]
    _seen: Float32Array

    def _ended(self) -> tuple[BoolArray, BoolArray]:
        done = np.array([row.done for row in self._rows])
        return done, np.zeros_like(done)

    def _observe(self) -> Float32Array:
        return self._seen.copy()

    def _info(self) -> Info:
        return {}


class LearningEnv(EpisodeRows):
    """``num_envs`` episodes of a task as PPO sees them; a step holds a decision for :data:`HOLD_S`."""

    def __init__(self, num_envs: int, task: RolloutTask) -> None:
        space = spaces.Box(-np.inf, np.inf, (N_FEATURES,), np.float32)
        self._task, self._config = task, RolloutConfig()
        self._series = SeedSeries(num_envs)
        self._rows: list[RolloutRow] = [None] * num_envs  # type: ignore[list-item]  # until the first reset
        self._features = [Features() for _ in range(num_envs)]
        self._fits = [Fit() for _ in range(num_envs)]
        self._seen = np.zeros((num_envs, N_FEATURES), np.float32)
        super().__init__(num_envs, space, spaces.Discrete(len(SHARES)), AutoresetMode.SAME_STEP)

    def _start(self, seeds: Sequence[int | None] | None, rows: BoolArray | None) -> None:
        for row, seed in zip(*self._series.next(seeds, rows), strict=True):
            self._rows[row] = draw_row(self._task, seed, self._config)
            self._features[row], self._fits[row] = Features(), Fit()
            self._note(row)

    def _note(self, row: int) -> None:
        self._seen[row] = self._features[row](self._rows[row].seen, self._fits[row].share)

    def _step_rows(self, actions: NDArray[Any], rows: BoolArray | None) -> FloatArray:
        reward = np.zeros(self.num_envs)
        for row, choice in enumerate(actions):
            episode = self._rows[row]
            state, fit = episode.run.state, self._fits[row]
            before, began_s = state.written_tokens, episode.time_s
            fit.share = SHARES[choice]
            for _ in range(HOLD_S):
                if not episode.done:
                    episode.advance(fit(episode.observation()))
            self._note(row)
            pace = (state.written_tokens - before) / episode.ideal_tokens_per_s
            reward[row] = REWARD_SCALE * (pace - (episode.time_s - began_s))
        return reward


def train(
    task: RolloutTask, steps: int, seed: int, path: Path, validation: Sequence[int], checks: int = 8
) -> list[float]:
    """Train a policy and keep the one that scores highest on the validation seeds; returns their scores on the way."""
    model = make_ppo(
        LearningEnv(N_ENVS, task),
        seed,
        learning_rate=lambda left: 5e-5 + 4e-4 * left,
        batch_size=2048,
        n_epochs=4,
        gamma=0.97,
        gae_lambda=0.95,
        ent_coef=0.004,
    )
    return keep_best(
        model, steps, checks, path, lambda file: float(scores(partial(RolloutPolicy, file), validation, task).mean())
    )


def make_ppo(rows: EpisodeRows, seed: int, **settings: Any) -> Any:
    """Stable-Baselines3's PPO on these episodes, on one thread, with two layers of 64 units each."""
    import torch
    from stable_baselines3 import PPO

    from agents.integrations.sb3 import SB3VecEnv

    torch.set_num_threads(1)
    envs, layers = SB3VecEnv(rows), {"net_arch": {"pi": [64, 64], "vf": [64, 64]}}
    model = PPO("MlpPolicy", envs, n_steps=128, seed=seed, policy_kwargs=layers, device="cpu", **settings)
    envs.seed_rows([10**9 + 10**6 * seed + row for row in range(rows.num_envs)])
    return model


def keep_best(model: Any, steps: int, checks: int, path: Path, value: Callable[[Path], float]) -> list[float]:
    """Train a Stable-Baselines3 model in ``checks`` parts and keep its best network in ``path``.

    Returns the ``value`` of the network's file after each part.
    """
    curve: list[float] = []
    candidate = path.with_suffix(".candidate.npz")
    for check in range(checks):
        model.learn(steps // checks, reset_num_timesteps=check == 0)
        save_network(model, candidate)
        curve.append(value(candidate))
        if curve[-1] == max(curve):
            candidate.replace(path)
        else:
            candidate.unlink()
        print(f"{model.num_timesteps} steps, validation {curve[-1]:.3f}", flush=True)
    return curve


def save_network(model: Any, path: Path) -> None:
    """Write the layers of the policy of a Stable-Baselines3 model, for evaluation with numpy."""
    network = model.policy
    linear = [network.mlp_extractor.policy_net[0], network.mlp_extractor.policy_net[2], network.action_net]
    arrays = {f"w{i}": layer.weight.detach().numpy().T for i, layer in enumerate(linear)}
    arrays |= {f"b{i}": layer.bias.detach().numpy() for i, layer in enumerate(linear)}
    np.savez_compressed(path, **arrays)


if __name__ == "__main__":
    from agents.seeds import VALIDATION_SEEDS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400_000, help="steps (default 400,000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=POLICY_FILE)
    args = parser.parse_args()
    began = time.perf_counter()
    found = train(get_rollout_task("rollout-mix"), args.steps, args.seed, args.out, VALIDATION_SEEDS)
    print(json.dumps({"seconds": round(time.perf_counter() - began), "validation": found}))
