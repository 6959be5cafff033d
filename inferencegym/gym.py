"""Gymnasium environments of both families; importing this module registers their ids.

    import gymnasium, inferencegym.gym
    env = gymnasium.make("InferenceGym/AdversarialMultiTenant-v1", action="discrete")
    envs = gymnasium.make_vec("InferenceGym/AdversarialMultiTenant-v1", num_envs=64)

One id per task: ``InferenceGym/<gym_id>-v1``, tasks of user files included. With ``inferencegym.gym:`` before it, an id
makes Gymnasium import this module itself (worker processes of RLlib need that). ``make_vec`` steps the native batch.
See :mod:`inferencegym.spaces.formats` for the formats of observations and actions, :mod:`inferencegym.vector_env` for
the autoreset modes and :mod:`inferencegym.seeds` for seeds. ``HTTPGymEnv`` and ``HTTPVectorEnv`` (from
:mod:`inferencegym.client.gym`) play the same episodes on a server; their id is :data:`REMOTE_ID`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from env.family import Family, GymCodec, GymFaces, TaskEntry
from env.inference_env import REWARD_TERMS, metrics_dict
from env.traffic.env import TrafficBatch
from env.vector_env import VectorInferenceEnv
from inferencegym.client.gym import REMOTE_ID, HTTPGymEnv, HTTPVectorEnv
from inferencegym.errors import InvalidConfigError, refusal
from inferencegym.families import FAMILIES
from inferencegym.models import SPEC_LENGTHS
from inferencegym.seeds import SeedSeries, episode_seed
from inferencegym.tasks import Calibration, TaskId
from inferencegym.traffic import ACTION_NAMES, STATE_FIELDS, get_traffic_task, traffic_config
from inferencegym.vector_env import (
    AutoresetVectorEnv,
    BoolArray,
    Float32Array,
    FloatArray,
    Info,
    register,
    registered_id,
)
from simulator.tables import ServingTables
from simulator.traffic import QUEUE_LATENCY_MS


class InferenceGymEnv(gymnasium.Env[Float32Array, NDArray[Any]]):
    """Gymnasium environment of one serving episode: a :class:`env.vector_env.VectorInferenceEnv` with one row.

    ``info`` holds ``timestep``, ``metrics``, ``action_applied`` and ``reward_terms`` as ``InferenceEnv`` gives them,
    and ``seed``. ``reset(seed=s)`` starts the episode of seed ``s``; later resets without a seed start those of
    ``episode_seed(s, 1)``, ``episode_seed(s, 2)`` and so on. The end is ``terminated``: the episode's length is part of
    the task.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - Gymnasium's own declaration

    def __init__(
        self,
        task_id: TaskId = 1,
        *,
        config: Mapping[str, Any] | None = None,
        observation: str = "raw",
        action: str = "box",
        tables: ServingTables | None = None,
        calibration: Calibration | None = None,
    ) -> None:
        self._rows = VectorInferenceEnv(
            1,
            task_id,
            config=config,
            observation=observation,
            action=action,
            autoreset_mode=AutoresetMode.DISABLED,
            tables=tables,
            calibration=calibration,
        )
        self.task = self._rows.task
        self.config = self._rows.config
        self.observation_space = self._rows.single_observation_space
        self.action_space = self._rows.single_action_space
        self._log: list[dict[str, Any]] = []

    @property
    def episode_log(self) -> list[dict[str, Any]]:
        """Steps of the episode so far, as graders and ``POST /grader`` accept them."""
        return self._log

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Float32Array, dict[str, Any]]:
        """Start an episode."""
        super().reset(seed=seed)
        self._log = []
        observation, _ = self._rows.reset(seed=[seed])
        return observation[0], {"timestep": 0, "seed": int(self._rows.seeds[0])}

    def step(self, action: NDArray[Any]) -> tuple[Float32Array, float, bool, bool, dict[str, Any]]:
        """Take one step of one second."""
        observation, reward, ended, _, _ = self._rows.step(np.asarray(action)[None])
        batch = self._rows.batch
        info = {
            "timestep": len(self._log) + 1,
            "metrics": metrics_dict(batch.fleet.snapshot()),
            "action_applied": self._knobs(),
            "reward_terms": dict(zip(REWARD_TERMS, batch.reward_terms[:, 0].tolist(), strict=True)),
            "seed": int(batch.seeds[0]),
        }
        value = float(reward[0])
        self._log.append(
            {
                "timestep": info["timestep"],
                "action": info["action_applied"],
                "reward": value,
                "metrics": info["metrics"],
            }
        )
        return observation[0], value, bool(ended[0]), False, info

    def close(self) -> None:
        """Release the batch and its threads."""
        self._rows.close()

    def _knobs(self) -> dict[str, Any]:
        """Knobs that the fleet uses, in JSON form."""
        fleet = self._rows.batch.fleet
        return {
            "kv_budget": float(fleet.kv_budget[0]),
            "spec_length": SPEC_LENGTHS[fleet.spec_index[0]],
            "batch_size": int(fleet.batch_size[0]),
            "prefill_disagg": bool(fleet.disagg[0]),
            "quant_tier": int(fleet.tier[0]),
        }


# ---------------------------------------------------------------- the traffic controller


class VectorTrafficGymEnv(AutoresetVectorEnv):
    """Vectorised environment: ``num_envs`` episodes of one traffic task; actions are indices of ``ACTION_NAMES``.

    A crash is ``terminated``; the end of the steps, with the server still up, is ``truncated``. The tasks have no
    randomness, so a seed changes nothing. Observations are the seven fields of the state, ``"raw"`` or ``"normalised"``
    (rate by capacity, queue by its limit, latency by ten times the base, step by the episode's length). ``info`` holds
    ``metrics`` (name -> (B,)) where ``info["_metrics"]`` is set (a row that has just been started has none) and, where
    ``info["_final_score"]`` is set, ``final_score``.
    """

    def __init__(
        self,
        num_envs: int = 1,
        task_id: str = "task_easy",
        *,
        config: Mapping[str, Any] | None = None,
        observation: str = "raw",
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
    ) -> None:
        if num_envs < 1:
            raise refusal("num_envs", num_envs, "at least 1")
        if observation not in ("raw", "normalised"):
            raise refusal("observation", observation, "one of raw, normalised")
        task = get_traffic_task(task_id)
        self.batch = TrafficBatch(task, num_envs, traffic_config(config, task.config))
        self.task = task
        self._scale = _traffic_scale(self.batch) if observation == "normalised" else np.ones(len(STATE_FIELDS))
        high = (_traffic_high(self.batch) / self._scale).astype(np.float32)
        space = spaces.Box(np.zeros_like(high), high, dtype=np.float32)
        self._metrics: dict[str, Any] = {}
        super().__init__(num_envs, space, spaces.Discrete(len(ACTION_NAMES)), autoreset_mode)
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
        return {
            "metrics": dict(self._metrics),
            "_metrics": self._measured,
            "final_score": self.batch.final_score(),
            "_final_score": self.batch.done.copy(),
        }


class TrafficGymEnv(gymnasium.Env[Float32Array, int]):
    """Gymnasium environment of one traffic episode: a :class:`VectorTrafficGymEnv` with one row."""

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - Gymnasium's own declaration

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
        """Start an episode."""
        super().reset(seed=seed)
        observation, _ = self._rows.reset()
        return observation[0], {}

    def step(self, action: int) -> tuple[Float32Array, float, bool, bool, dict[str, Any]]:
        """Take one step of one second; ``action`` is an index of ``ACTION_NAMES``."""
        observation, reward, terminated, truncated, info = self._rows.step(np.array([action]))
        one: dict[str, Any] = {name: values[0].item() for name, values in info["metrics"].items()}
        if terminated[0] or truncated[0]:
            one["final_score"] = float(info["final_score"][0])
        return observation[0], float(reward[0]), bool(terminated[0]), bool(truncated[0]), one


def _traffic_high(batch: TrafficBatch) -> FloatArray:
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


def _traffic_scale(batch: TrafficBatch) -> FloatArray:
    scale = {
        "request_rate": batch.config.server_capacity,
        "queue_length": max(1, batch.config.max_queue),
        "avg_latency": 10.0 * batch.config.base_latency,
        "step": batch.task.episode_length,
    }
    return np.array([scale.get(name, 1.0) for name in STATE_FIELDS], dtype=np.float64)


# ---------------------------------------------------------------- any family


class EpisodeGymEnv(gymnasium.Env[Any, Any]):
    """Gymnasium environment of one episode of any family whose record has a :class:`env.family.GymCodec`.

    ``info`` is the family's own, with ``seed`` added; resets without a seed take the next
    :func:`inferencegym.seeds.episode_seed`. The end is ``terminated``: the episode's length is part of the task.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - Gymnasium's own declaration

    def __init__(self, family: str, task_id: TaskId, *, config: Mapping[str, Any] | None = None) -> None:
        codec = FAMILIES[family].gym
        if not isinstance(codec, GymCodec):
            raise InvalidConfigError(
                f"family {family!r} has its own Gymnasium environments: make one by its id, InferenceGym/<gym_id>-v1"
            )
        FAMILIES[family].check_config(task_id, config)
        self._codec = codec
        self._task_id, self._config = task_id, config
        self._episode = FAMILIES[family].make()
        self._series = SeedSeries(1)
        self.action_space, self.observation_space = codec.action_space(), codec.observation_space()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode."""
        super().reset(seed=seed)
        _, [playing] = self._series.next([seed])
        first = self._episode.reset(seed=playing, task_id=self._task_id, config=self._config)
        return self._codec.encode(first), {"seed": playing}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take one step."""
        observation, reward, done, info = self._episode.step(self._codec.decode(action))
        return self._codec.encode(observation), reward, done, False, {**info, "seed": self._episode.seed}

    @property
    def episode_log(self) -> list[dict[str, Any]]:
        """Steps of the episode so far, as graders and ``POST /grader`` accept them."""
        return self._episode.episode_log


# ---------------------------------------------------------------- registration


def register_envs() -> None:
    """Register one id per task of every family; ids that are registered stay as they are."""
    for family in FAMILIES.values():
        for task in family.tasks():
            _register_task(family, task)


def _register_task(family: Family, task: TaskEntry) -> None:
    env_id = registered_id(task.gym_id)
    if isinstance(family.gym, GymFaces):
        register(env_id, family.gym.scalar, family.gym.vector, task_id=task.task_id)
    elif family.gym is not None:
        register(env_id, "inferencegym.gym:EpisodeGymEnv", None, family=family.name, task_id=task.task_id)


register_envs()

__all__ = [
    "REMOTE_ID",
    "EpisodeGymEnv",
    "HTTPGymEnv",
    "HTTPVectorEnv",
    "InferenceGymEnv",
    "TrafficGymEnv",
    "VectorInferenceEnv",
    "VectorTrafficGymEnv",
    "episode_seed",
    "register_envs",
    "registered_id",
]
