"""Gymnasium environments of the traffic controller: one episode, and a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from env.family import Grade, outcome
from env.traffic.env import TrafficBatch
from env.traffic.model import QUEUE_LATENCY_MS
from env.traffic.tasks import get_traffic_task, traffic_config
from env.vector import vector_outcome
from inferencegym.errors import refusal
from inferencegym.traffic import ACTION_NAMES, STATE_FIELDS
from inferencegym.vector_env import (
    ArrayVectorEnv,
    AutoresetVectorEnv,
    BoolArray,
    Float32Array,
    FloatArray,
    Info,
    refuse_options,
    refuses_unknown,
)


class VectorTrafficGymEnv(AutoresetVectorEnv, ArrayVectorEnv):
    """Vectorised environment: ``num_envs`` episodes of one traffic task; actions are indices of ``ACTION_NAMES``.

    A crash is ``terminated``; the end of the steps, with the server still up, is ``truncated``. The tasks have no
    randomness, so a seed changes nothing. Observations are the seven fields of the state, ``"raw"`` or ``"normalised"``
    (rate by capacity, queue by its limit, latency by ten times the base, step by the episode's length). ``info`` holds
    ``metrics`` (name -> (B,)) where ``info["_metrics"]`` is set (a row that has just been started has none),
    ``final_score`` where ``info["_final_score"]`` is set, and ``score``, ``breakdown`` and ``feedback`` of the grade
    where ``info["_score"]`` is set.
    """

    @refuses_unknown
    def __init__(
        self,
        num_envs: int = 1,
        task_id: str = "task_easy",
        *,
        config: Mapping[str, Any] | None = None,
        observation: str = "raw",
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        max_episode_steps: int | None = None,
    ) -> None:
        if num_envs < 1:
            raise refusal("num_envs", num_envs, "at least 1")
        if observation not in ("raw", "normalised"):
            raise refusal("observation", observation, "one of raw, normalised")
        task = get_traffic_task(task_id)
        self.batch = TrafficBatch(task, num_envs, traffic_config(config, task.config))
        self.task = task
        self._scale = _scales(self.batch) if observation == "normalised" else np.ones(len(STATE_FIELDS))
        high = (_upper_bounds(self.batch) / self._scale).astype(np.float32)
        space = spaces.Box(np.zeros_like(high), high, dtype=np.float32)
        self._metrics: dict[str, Any] = {}
        super().__init__(num_envs, space, spaces.Discrete(len(ACTION_NAMES)), autoreset_mode, max_episode_steps)
        self._measured = ~self._everywhere

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Float32Array, Info]:
        """Start all episodes, or those of ``options["reset_mask"]`` (B,); ``info`` has no metrics yet."""
        return super().reset(seed=seed, options=options)[0], {}

    def _start(self, seeds: Sequence[int | None] | None, rows: BoolArray | None) -> None:
        self.batch.reset(rows)
        self._measured = self._measured & ~(self._everywhere if rows is None else rows)

    def _step_rows(self, actions: NDArray[Any], rows: BoolArray | None) -> FloatArray:
        result = self.batch.step(actions)  # ended rows stay as they are
        self._metrics = result.metrics
        self._measured = self._everywhere if rows is None else rows
        return result.reward.astype(np.float64)

    def _ended(self) -> tuple[BoolArray, BoolArray]:
        done, crashed = self.batch.done, self.batch.server.crashed
        return done & crashed, done & ~crashed

    def _observe(self) -> Float32Array:
        return (self.batch.observation() / self._scale).astype(np.float32)

    def _info(self) -> Info:
        if not self._measured.any():
            return {}
        ended = self.batch.done.copy()
        info = {
            "metrics": dict(self._metrics),
            "_metrics": self._measured,
            "final_score": self.batch.final_score(),
            "_final_score": ended,
        }
        if ended.any():
            info |= vector_outcome(ended, [self.batch.grade(int(row)) for row in np.flatnonzero(ended)])
        return info


class TrafficGymEnv(gymnasium.Env[Float32Array, int]):
    """Gymnasium environment of one traffic episode: a :class:`VectorTrafficGymEnv` with one row.

    ``info`` holds the metrics by name; the last one of an episode has ``final_score`` and what :meth:`grade` gives.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - Gymnasium's own declaration

    @refuses_unknown
    def __init__(
        self, task_id: str = "task_easy", *, config: Mapping[str, Any] | None = None, observation: str = "raw"
    ) -> None:
        self._rows = VectorTrafficGymEnv(
            1, task_id, config=config, observation=observation, autoreset_mode=AutoresetMode.DISABLED
        )
        self.task = self._rows.task
        self.observation_space = self._rows.single_observation_space
        self.action_space = self._rows.single_action_space

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Float32Array, dict[str, Any]]:
        """Start an episode; there are no ``options``."""
        super().reset(seed=seed)
        refuse_options(options)
        observation, _ = self._rows.reset()
        return observation[0], {}

    def step(self, action: int) -> tuple[Float32Array, float, bool, bool, dict[str, Any]]:
        """Take one step of one second; ``action`` is an index of ``ACTION_NAMES``."""
        observation, reward, terminated, truncated, info = self._rows.step(np.array([action]))
        one: dict[str, Any] = {name: values[0].item() for name, values in info["metrics"].items()}
        if terminated[0] or truncated[0]:
            one |= {"final_score": float(info["final_score"][0]), **outcome(self.grade())}
        return observation[0], float(reward[0]), bool(terminated[0]), bool(truncated[0]), one

    def grade(self) -> Grade:
        """Grade of the episode as if it ended now: ``score``, ``breakdown`` and ``feedback``."""
        return self._rows.batch.grade(0)


def _upper_bounds(batch: TrafficBatch) -> FloatArray:
    """Upper bounds of the state's fields for every step of this task and configuration."""
    rate = float(batch.incoming.max())
    load = rate / batch.config.server_capacity
    latency = batch.config.base_latency * (1.0 + max(load**2, load**3)) + QUEUE_LATENCY_MS * batch.config.max_queue
    high = {
        "cpu_usage": 1.0,
        "memory_usage": 1.0,
        "request_rate": rate,
        "queue_length": batch.config.max_queue,
        "avg_latency": latency + 1.0,  # latencies are rounded to a hundredth
        "step": batch.task.episode_length,
        "crashed": 1.0,
    }
    return np.array([high[name] for name in STATE_FIELDS], dtype=np.float64)


def _scales(batch: TrafficBatch) -> FloatArray:
    scale = {
        "request_rate": batch.config.server_capacity,
        "queue_length": max(1, batch.config.max_queue),
        "avg_latency": 10.0 * batch.config.base_latency,
        "step": batch.task.episode_length,
    }
    return np.array([scale.get(name, 1.0) for name in STATE_FIELDS], dtype=np.float64)
