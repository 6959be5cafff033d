"""Native batch of serving episodes with Gymnasium's vector interface."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from env.autoreset import AutoresetBatch
from env.batch import ServingBatch
from inferencegym.errors import refusal
from inferencegym.spaces.formats import ObservationCodec, action_codec
from inferencegym.tasks import Calibration, TaskId, get_task
from inferencegym.vector_env import AutoresetVectorEnv, BoolArray, Float32Array, FloatArray, Info
from simulator.arrays import METRICS
from simulator.tables import ServingTables


class VectorInferenceEnv(AutoresetVectorEnv):
    """``num_envs`` episodes of one serving task, stepping together in compiled code.

    Every row equals the scalar environment with the same seed and actions. Observation and action formats are those of
    :mod:`inferencegym.spaces.formats`, autoreset modes those of :class:`AutoresetVectorEnv`, seeds of restarts
    :func:`inferencegym.seeds.episode_seed`. An episode lasts a fixed number of steps, which is part of the task (its
    budget is an episode's, and the step is observed), so its end is ``terminated`` and nothing is ever truncated.

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
            raise refusal("num_envs", num_envs, "at least 1")
        self.task = get_task(task_id)
        self.config = self.task.config(config)
        self.batch = ServingBatch(self.task, num_envs, self.config, tables, calibration, n_threads=n_threads)
        self._episodes = AutoresetBatch(self.batch)
        self._actions = action_codec(action)
        self._observations = ObservationCodec(self.task, self.config, self.batch.calibration, observation)
        super().__init__(num_envs, self._observations.space, self._actions.space, autoreset_mode)

    @property
    def seeds(self) -> NDArray[np.int64]:
        """Seed of each row's current episode, (B,)."""
        return self._episodes.seeds.copy()

    def _start(self, seeds: Sequence[int | None] | None, rows: BoolArray | None) -> None:
        self._episodes.reset(seeds, rows)

    def _step_rows(self, actions: NDArray[Any], rows: BoolArray | None) -> FloatArray:
        self._episodes.step(self._actions.decode(actions), rows)
        return self.batch.reward.copy()

    def _ended(self) -> tuple[BoolArray, BoolArray]:
        return self.batch.done, np.zeros(self.num_envs, dtype=np.bool_)

    def _observe(self) -> Float32Array:
        return self._observations.encode(self.batch.observation)

    def _info(self) -> Info:
        metrics = dict(zip(METRICS, self.batch.fleet.metrics.copy(), strict=True))
        return {"metrics": metrics, "_metrics": self._everywhere, "seed": self.seeds, "_seed": self._everywhere}
