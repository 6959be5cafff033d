"""Stable-Baselines3 adapter over the vector environments, without a copy of an environment per row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv

from inferencegym.errors import InvalidConfigError
from inferencegym.vector_env import AutoresetVectorEnv

Indices = int | Iterable[int] | None


class SB3VecEnv(VecEnv):
    """A vector environment in ``SAME_STEP`` mode as a Stable-Baselines3 ``VecEnv``.

    Episode statistics come with each ending (``infos[i]["episode"]`` with return ``r`` and length ``l``), so no
    ``VecMonitor`` is needed, and with it the ``score``, ``breakdown`` and ``feedback`` of its grade, where the episodes
    are played in this process. Restarts follow :func:`inferencegym.seeds.episode_seed`; ``seed(s)`` sets the first
    ones.
    """

    def __init__(self, envs: AutoresetVectorEnv) -> None:
        if envs.autoreset_mode is not AutoresetMode.SAME_STEP:
            raise InvalidConfigError(
                "autoreset_mode must be SAME_STEP: Stable-Baselines3 restarts in the step that ends",
                "autoreset_mode",
            )
        self.envs = envs
        self._actions: NDArray[Any] = np.empty(0)
        self._returns = np.zeros(envs.num_envs)
        self._lengths = np.zeros(envs.num_envs, dtype=np.int64)
        self._first_seeds: list[int | None] | None = None
        super().__init__(envs.num_envs, envs.single_observation_space, envs.single_action_space)

    def seed_rows(self, seeds: Sequence[int | None]) -> None:
        """First seed of every row, from the next reset on."""
        self._first_seeds = list(seeds)

    def seed(self, seed: int | None = None) -> Sequence[int | None]:
        """Seeds ``seed``, ``seed + 1``, ... for the rows, random ones without it, from the next reset on."""
        drawn: Sequence[int | None] = super().seed(seed)
        self.seed_rows(drawn)
        return drawn

    def reset(self) -> NDArray[np.float32]:
        observation, _ = self.envs.reset(seed=self._first_seeds)
        self._first_seeds = None
        self._returns[:] = 0.0
        self._lengths[:] = 0
        return observation

    def step_async(self, actions: NDArray[Any]) -> None:
        self._actions = actions

    def step_wait(self) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.bool_], list[dict[str, Any]]]:
        observation, reward, terminated, truncated, info = self.envs.step(self._actions)
        done = terminated | truncated
        self._returns += reward
        self._lengths += 1
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        for row in np.flatnonzero(done):
            infos[row] = {
                "terminal_observation": info["final_obs"][row],
                "TimeLimit.truncated": bool(truncated[row]),
                "episode": {"r": float(self._returns[row]), "l": int(self._lengths[row])},
                **_outcome(info["final_info"], int(row)),
            }
        self._returns[done] = 0.0
        self._lengths[done] = 0
        return observation, reward.astype(np.float32), done, infos

    def close(self) -> None:
        self.envs.close()

    def get_attr(self, attr_name: str, indices: Indices = None) -> list[Any]:
        return [getattr(self.envs, attr_name)] * self._count(indices)

    def set_attr(self, attr_name: str, value: Any, indices: Indices = None) -> None:
        setattr(self.envs, attr_name, value)

    def env_method(self, method_name: str, *args: Any, indices: Indices = None, **kwargs: Any) -> list[Any]:
        return [getattr(self.envs, method_name)(*args, **kwargs)] * self._count(indices)

    def env_is_wrapped(self, wrapper_class: type[Any], indices: Indices = None) -> list[bool]:
        return [False] * self._count(indices)

    def _count(self, indices: Indices) -> int:
        if indices is None:
            return int(self.num_envs)
        return 1 if isinstance(indices, int) else len(list(indices))


def _outcome(final: dict[str, Any], row: int) -> dict[str, Any]:
    """Score, breakdown and feedback of one row's ended episode; empty where they are not told (remote batches)."""
    if "score" not in final:
        return {}
    breakdown = {name: float(part[row]) for name, part in final["breakdown"].items()}
    return {"score": float(final["score"][row]), "breakdown": breakdown, "feedback": final["feedback"][row]}
