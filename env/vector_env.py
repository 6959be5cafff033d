"""Vectorised environments with Gymnasium's interface: one autoreset for every family, and the native serving batch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Final

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from env.autoreset import AutoresetBatch
from env.batch import ServingBatch
from env.spaces import ObservationCodec, action_codec
from inferencegym.errors import EpisodeDoneError, InvalidConfigError
from inferencegym.tasks import Calibration, TaskId, get_task
from simulator.arrays import METRICS
from simulator.tables import ServingTables

Float32Array = NDArray[np.float32]
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
Info = dict[str, Any]
Stepped = tuple[Float32Array, FloatArray, BoolArray, BoolArray, Info]


NAMESPACE: Final = "InferenceGym"
ENV_VERSION: Final = 1


def registered_id(gym_id: str) -> str:
    """The Gymnasium id of a task with this ``gym_id``; :mod:`inferencegym.gym` registers it."""
    return f"{NAMESPACE}/{gym_id}-v{ENV_VERSION}"


class AutoresetVectorEnv(gymnasium.vector.VectorEnv[Float32Array, NDArray[Any], NDArray[Any]]):
    """What a family fills in, and Gymnasium's three autoreset modes over it.

    ``NEXT_STEP`` (Gymnasium's default, which RLlib expects): the step after an end ignores that row's action and
    returns the next episode's first observation with reward 0. ``SAME_STEP`` (what Stable-Baselines3 does): the step
    that ends an episode returns the next one's first observation, and ``info["final_obs"]``, ``info["final_info"]``
    hold the last of the old, valid where ``info["_final_obs"]`` is set. ``DISABLED``: ended rows are restarted by
    ``reset(options={"reset_mask": mask})`` and by nothing else.
    """

    # Some versions of Gymnasium close what is garbage: an environment is open only once it is complete.
    closed = True

    def __init__(
        self,
        num_envs: int,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        autoreset_mode: AutoresetMode | str,
    ) -> None:
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        self.metadata = {"render_modes": [], "autoreset_mode": self.autoreset_mode}
        self.num_envs = num_envs
        self.single_observation_space = observation_space
        self.single_action_space = action_space
        self.observation_space = batch_space(observation_space, num_envs)
        self.action_space = batch_space(action_space, num_envs)
        self._everywhere: BoolArray = np.ones(num_envs, dtype=np.bool_)
        self._ended_before: BoolArray = np.zeros(num_envs, dtype=np.bool_)
        self.closed = False

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Float32Array, Info]:
        """Start all episodes, or those of ``options["reset_mask"]`` (B,).

        ``seed`` is one per row, or a number ``s`` for ``s, s + 1, ...``; None goes on to each row's next episode.
        """
        mask = _reset_mask(options, self.num_envs)
        seeds = [int(seed) + i for i in range(self.num_envs)] if isinstance(seed, (int, np.integer)) else seed
        self._start(seeds, mask)
        self._ended_before = np.zeros_like(self._ended_before) if mask is None else self._ended_before & ~mask
        return self._observe(), self._info()

    def step(self, actions: NDArray[Any]) -> Stepped:
        """Play one second in every row: observation, reward, terminated, truncated, info."""
        if self.autoreset_mode is AutoresetMode.NEXT_STEP:
            return self._restart_or_play(np.asarray(actions))
        if self._ended_before.any():
            row = int(np.argmax(self._ended_before))
            raise EpisodeDoneError(f'row {row}: the episode has ended; reset it with options={{"reset_mask": mask}}')
        reward = self._play(np.asarray(actions), None)
        terminated, truncated = self._ended()
        ended = terminated | truncated
        observation, info = self._observe(), self._info()
        if self.autoreset_mode is AutoresetMode.DISABLED:
            self._ended_before = ended
        elif ended.any():
            final = {"final_obs": observation, "_final_obs": ended, "final_info": info, "_final_info": ended}
            self._start(None, ended)
            observation, info = self._observe(), {**self._info(), **final}
        return observation, reward, terminated, truncated, info

    def _restart_or_play(self, actions: NDArray[Any]) -> Stepped:
        restart = self._ended_before
        if not restart.any():
            reward = self._play(actions, None)
        else:
            reward = np.where(restart, 0.0, 0.0 if restart.all() else self._play(actions, ~restart))
            self._start(None, restart)
        terminated, truncated = self._ended()
        self._ended_before = terminated | truncated
        return self._observe(), reward, terminated, truncated, self._info()

    # ------------------------------------------------------------ what a family fills in

    @abstractmethod
    def _start(self, seeds: Sequence[int | None] | None, rows: BoolArray | None) -> None:
        """Start episodes in all rows or those of the mask."""

    @abstractmethod
    def _play(self, actions: NDArray[Any], rows: BoolArray | None) -> FloatArray:
        """Play one second in all rows or those of the mask; a fresh array of rewards (B,)."""

    @abstractmethod
    def _ended(self) -> tuple[BoolArray, BoolArray]:
        """Fresh arrays (B,): rows whose episode is terminated, and truncated."""

    @abstractmethod
    def _observe(self) -> Float32Array:
        """A fresh array of observations."""

    @abstractmethod
    def _info(self) -> Info:
        """Fresh infos in Gymnasium's vector form."""


class VectorInferenceEnv(AutoresetVectorEnv):
    """``num_envs`` episodes of one serving task, stepping together in compiled code.

    Every row equals the scalar environment with the same seed and actions. Observation and action formats are those of
    :mod:`env.spaces`, autoreset modes those of :class:`AutoresetVectorEnv`, seeds of restarts
    :func:`env.autoreset.episode_seed`. An episode lasts a fixed number of steps, which is part of the task (its budget
    is an episode's, and the step is observed), so its end is ``terminated`` and nothing is ever truncated.

    ``info`` holds ``metrics`` (name -> (B,), see :data:`simulator.arrays.METRICS`) and ``seed`` (B,), the seed of each
    row's current episode.
    """

    def __init__(
        self,
        num_envs: int = 1,
        task_id: TaskId = 1,
        *,
        config: Mapping[str, Any] | None = None,
        observation: str = "raw",
        action: str = "box",
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        n_threads: int = 1,
        tables: ServingTables | None = None,
        calibration: Calibration | None = None,
    ) -> None:
        if num_envs < 1:
            raise InvalidConfigError(f"num_envs={num_envs!r} is not allowed: it must be at least 1")
        self.task = get_task(task_id)
        self.config = self.task.config(config)
        self.batch = ServingBatch(self.task, num_envs, self.config, tables, calibration)
        self._episodes = AutoresetBatch(self.batch, n_threads)
        self._actions = action_codec(action)
        self._observations = ObservationCodec(self.task, self.config, self.batch.calibration, observation)
        super().__init__(num_envs, self._observations.space, self._actions.space, autoreset_mode)

    @property
    def seeds(self) -> NDArray[np.int64]:
        """Seed of each row's current episode, (B,)."""
        return self._episodes.seeds.copy()

    def close_extras(self, **kwargs: Any) -> None:
        """Release the threads."""
        self._episodes.close()

    def _start(self, seeds: Sequence[int | None] | None, rows: BoolArray | None) -> None:
        self._episodes.reset(seeds, rows)

    def _play(self, actions: NDArray[Any], rows: BoolArray | None) -> FloatArray:
        self._episodes.step(self._actions.decode(actions), rows)
        return self.batch.reward.copy()

    def _ended(self) -> tuple[BoolArray, BoolArray]:
        return self.batch.done, np.zeros(self.num_envs, dtype=np.bool_)

    def _observe(self) -> Float32Array:
        return self._observations.encode(self.batch.observation)

    def _info(self) -> Info:
        metrics = dict(zip(METRICS, self.batch.fleet.metrics.copy(), strict=True))
        return {"metrics": metrics, "_metrics": self._everywhere, "seed": self.seeds, "_seed": self._everywhere}


def _reset_mask(options: Mapping[str, Any] | None, num_envs: int) -> BoolArray | None:
    mask = None if options is None else options.get("reset_mask")
    if mask is None:
        return None
    if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_ or mask.shape != (num_envs,) or not mask.any():
        raise InvalidConfigError(f"options['reset_mask'] must be a bool array of shape ({num_envs},) with a True in it")
    return mask
