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
from typing import Any, Final

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from env.family import Family, Grade, GymCodec, GymFaces, TaskEntry, outcome
from env.inference_env import InferenceEnv
from env.traffic.env import TrafficBatch
from env.vector_env import VectorInferenceEnv, vector_outcome
from inferencegym import render
from inferencegym.client.gym import REMOTE_ID, HTTPGymEnv, HTTPVectorEnv
from inferencegym.errors import InvalidConfigError, refusal
from inferencegym.families import FAMILIES
from inferencegym.models import ACTION_FIELDS
from inferencegym.seeds import SeedSeries, episode_seed
from inferencegym.spaces.actions import action_mask, from_row, snap
from inferencegym.spaces.formats import ObservationCodec, action_codec
from inferencegym.tasks import Calibration, TaskId, get_calibration
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

_TIER: Final = list(ACTION_FIELDS).index("quant_tier")


class InferenceGymEnv(gymnasium.Env[Float32Array, NDArray[Any]]):
    """Gymnasium environment of one serving episode: :class:`env.inference_env.InferenceEnv` with arrays.

    ``info`` is what ``InferenceEnv`` gives, the last one of an episode with its ``score``, ``breakdown`` and
    ``feedback``, and ``seed``. ``reset(seed=s)`` starts the episode of seed ``s``; later resets without a seed start
    those of ``episode_seed(s, 1)``, ``episode_seed(s, 2)`` and so on. The end is ``terminated``: the episode's length
    is part of the task. ``render()`` draws the episode so far (:mod:`inferencegym.render`).
    """

    metadata = render.METADATA

    def __init__(
        self,
        task_id: TaskId = 1,
        *,
        config: Mapping[str, Any] | None = None,
        reward: str | None = None,
        hold: int | None = None,
        observation: str = "raw",
        action: str = "box",
        tables: ServingTables | None = None,
        calibration: Calibration | None = None,
        render_mode: str | None = None,
    ) -> None:
        self._episode = InferenceEnv(
            task_id=task_id, config=config, reward=reward, hold=hold, tables=tables, calibration=calibration
        )
        self.task, self.config = self._episode.task, self._episode.config
        self._mask = action_mask(self.task.active_actions)
        self._actions = action_codec(action, self.task.fleet.max_replicas)
        constants = calibration or get_calibration(self.task.task_id)
        self._observations = ObservationCodec(self.task, self.config, constants, observation)
        self._series = SeedSeries(1)
        self.observation_space = self._observations.space
        self.action_space = self._actions.space
        self.render_mode = render_mode
        self._picture = render.episode_picture(render_mode, self.task, self.config.episode_length)

    @property
    def episode_log(self) -> list[dict[str, Any]]:
        """Seconds of the episode so far, as graders and ``POST /grader`` accept them."""
        return self._episode.episode_log

    def grade(self) -> Grade:
        """Grade of the steps played so far: ``score``, ``breakdown``, ``detail`` and ``feedback``."""
        return self._episode.grade()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Float32Array, dict[str, Any]]:
        """Start an episode."""
        super().reset(seed=seed)
        _, [playing] = self._series.next([seed])
        self._episode.reset(playing)
        if self._picture is not None:
            self._picture.start(self._episode.observation_row())
        return self._observe(), {"timestep": 0, "seed": playing}

    def step(self, action: NDArray[Any]) -> tuple[Float32Array, float, bool, bool, dict[str, Any]]:
        """Take one step, of one second or ``hold``."""
        knobs = snap(self._actions.decode(np.asarray(action)[None]), self._mask, self.task.fleet)
        knobs[0, _TIER] = min(knobs[0, _TIER], self._episode.n_tiers - 1)  # a table may have fewer than the knob
        _, reward, done, info = self._episode.step(from_row(knobs[0]))
        if self._picture is not None:
            self._picture.add(self._episode.observation_row(), knobs[0])
        return self._observe(), reward, done, False, {**info, "seed": self._episode.seed}

    def render(self) -> Any:
        """Picture of the episode so far, (height, width, 3) bytes with ``render_mode="rgb_array"``, else None."""
        return None if self._picture is None else self._picture.render()

    def close(self) -> None:
        """Close the window of ``render_mode="human"``."""
        if self._picture is not None:
            self._picture.close()

    def _observe(self) -> Float32Array:
        encoded: Float32Array = self._observations.encode(
            self._episode.observation_row(self._observations.needs_fleet)[None]
        )[0]
        return encoded


# ---------------------------------------------------------------- the traffic controller


class VectorTrafficGymEnv(AutoresetVectorEnv):
    """Vectorised environment: ``num_envs`` episodes of one traffic task; actions are indices of ``ACTION_NAMES``.

    A crash is ``terminated``; the end of the steps, with the server still up, is ``truncated``. The tasks have no
    randomness, so a seed changes nothing. Observations are the seven fields of the state, ``"raw"`` or ``"normalised"``
    (rate by capacity, queue by its limit, latency by ten times the base, step by the episode's length). ``info`` holds
    ``metrics`` (name -> (B,)) where ``info["_metrics"]`` is set (a row that has just been started has none),
    ``final_score`` where ``info["_final_score"]`` is set, and ``score``, ``breakdown`` and ``feedback`` of the grade
    where ``info["_score"]`` is set.
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
            one |= {"final_score": float(info["final_score"][0]), **outcome(self.grade())}
        return observation[0], float(reward[0]), bool(terminated[0]), bool(truncated[0]), one

    def grade(self) -> Grade:
        """Grade of the episode as if it ended now: ``score``, ``breakdown`` and ``feedback``."""
        return self._rows.batch.grade(0)


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

    def grade(self) -> Grade:
        """Grade of the steps played so far: ``score``, ``breakdown`` and ``feedback``."""
        return self._episode.grade()

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
