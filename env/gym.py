"""Gymnasium environments of both families; importing this module registers their ids.

    import gymnasium, inferencegym.gym
    env = gymnasium.make("InferenceGym/AdversarialMultiTenant-v1", action="discrete")
    envs = gymnasium.make_vec("InferenceGym/AdversarialMultiTenant-v1", num_envs=64)

One id per task: ``InferenceGym/<gym_id>-v1``, tasks of user files included. Serving tasks have a second one, ``-v2``,
with other defaults, for learners without tuning (:func:`env.serving.family.learner_defaults`). With
``inferencegym.gym:`` before it, an id makes Gymnasium import this module itself (worker processes of RLlib need that).
``make_vec`` steps the native batch. See :mod:`inferencegym.spaces.formats` for the formats of observations and actions,
:mod:`inferencegym.vector_env` for the autoreset modes and :mod:`inferencegym.seeds` for seeds. ``HTTPGymEnv`` and
``HTTPVectorEnv`` (:mod:`inferencegym.client.gym`) play the same episodes on a server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from env.families import FAMILIES
from env.family import EpisodeEnv, Family, Grade, GymCodec, GymFaces, TaskEntry, check_state, state_of
from env.inference_env import InferenceEnv
from env.vector import vector_outcome
from inferencegym import render
from inferencegym.errors import InvalidActionError, InvalidConfigError, refusal
from inferencegym.seeds import SeedSeries
from inferencegym.spaces.formats import ObservationCodec, action_codec_of, reward_format
from inferencegym.spaces.observations import OBSERVATION_SIZE
from inferencegym.tasks import Calibration, TaskId, get_calibration
from inferencegym.vector_env import (
    ArrayVectorEnv,
    AutoresetVectorEnv,
    BoolArray,
    Float32Array,
    FloatArray,
    Info,
    refuse_options,
    refuses_unknown,
    register,
    registered_id,
)
from simulator.hardware.tables import ServingTables


class InferenceGymEnv(gymnasium.Env[Float32Array, NDArray[Any]]):
    """Gymnasium environment of one serving episode: :class:`env.inference_env.InferenceEnv` with arrays.

    ``info`` is what ``InferenceEnv`` gives, the last one of an episode with its ``score``, ``breakdown`` and
    ``feedback``; ``cost``, the requests that missed their objective in the step; and ``seed``. ``reset(seed=s)`` starts
    the episode of seed ``s``; later resets without a seed start those of ``episode_seed(s, 1)``, ``episode_seed(s, 2)``
    and so on. The end is ``terminated``: the episode's length is part of the task. ``render()`` draws the episode so
    far (:mod:`inferencegym.render`).
    """

    metadata = render.METADATA

    @refuses_unknown
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
        self._reward, kind = reward_format(reward)
        self._episode = InferenceEnv(
            task_id=task_id, config=config, reward=kind, hold=hold, tables=tables, calibration=calibration
        )
        self.task, self.config = self._episode.task, self._episode.config
        constants = calibration or get_calibration(self.task.task_id)
        self._actions = action_codec_of(action, self.task, constants)
        self._observations = ObservationCodec(self.task, self.config, constants, observation)
        self._series = SeedSeries(1)
        self.observation_space = self._observations.space
        self.action_space = self._actions.space
        self.render_mode = render_mode
        self.metadata = render.metadata()
        self._picture = render.episode_picture(render_mode, self.task, self.config.episode_length)

    @property
    def episode(self) -> InferenceEnv:
        """The episode, for :func:`inferencegym.verification.saved`."""
        return self._episode

    @property
    def episode_log(self) -> list[dict[str, Any]]:
        """Seconds of the episode so far, as graders and ``POST /grader`` accept them."""
        return self._episode.episode_log

    @property
    def agent_observation(self) -> FloatArray:
        """What the agents of :mod:`agents.protocol` read, in any format: (1, 21), or (1, 24) where the task scales."""
        return self._episode.observation_row(fleet=True)[None]

    def grade(self) -> Grade:
        """Grade of the steps played so far: ``score``, ``breakdown``, ``detail`` and ``feedback``."""
        return self._episode.grade()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Float32Array, dict[str, Any]]:
        """Start an episode; there are no ``options``."""
        super().reset(seed=seed)
        refuse_options(options)
        _, [playing] = self._series.next([seed])
        self._episode.reset(playing)
        if self._picture is not None:
            self._picture.start(self._episode.observation_row())
        return self._observe(), {"timestep": 0, "seed": playing}

    def step(self, action: NDArray[Any]) -> tuple[Float32Array, float, bool, bool, dict[str, Any]]:
        """Take one step, of one second or ``hold``."""
        episode, chosen = self._episode, np.asarray(action)
        if chosen.shape != self.action_space.shape:
            raise InvalidActionError("action.shape", chosen.shape, str(self.action_space.shape))
        episode.advance(self._actions.decode(chosen[None]))
        if self._picture is not None:
            seen = episode.observation_row(fleet=True)
            self._picture.add(seen[:OBSERVATION_SIZE], seen[OBSERVATION_SIZE:])
        info = episode.info()
        info["cost"] = info["metrics"]["slo_violations"]
        info["seed"] = episode.seed
        reward = self._reward(np.array(episode.last_reward), self.config)
        return self._observe(), reward.item(), episode.done, False, info

    def get_state(self) -> dict[str, Any]:
        """The episode so far as JSON, for planning: :meth:`set_state` continues it, here or in another environment.

        Raises :class:`NotResetError` before the first reset.
        """
        return self._episode.get_state()

    def set_state(self, state: Mapping[str, Any]) -> Float32Array:
        """Continue the episode of :meth:`get_state`: play its steps again and return the observation.

        Raises :class:`InvalidConfigError` for a state of another task or configuration.
        """
        check_state(state)
        _refuse_another(state, self._episode)
        self._episode.set_state(state)
        if self._picture is not None:
            self._picture.start(self._episode.observation_row())
        return self._observe()

    def render(self) -> Any:
        """Picture of the episode so far, (height, width, 3) bytes with ``render_mode="rgb_array"``, else None."""
        return None if self._picture is None else self._picture.render()

    def close(self) -> None:
        """Close the window of ``render_mode="human"``."""
        if self._picture is not None:
            self._picture.close()

    def _observe(self) -> Float32Array:
        return self._observations.encode(self._episode.observation_row(self._observations.needs_fleet))


def _refuse_another(state: Mapping[str, Any], episode: EpisodeEnv) -> None:
    """Raise :class:`InvalidConfigError` for a state of another task or configuration than the episode's."""
    task_id, config = episode.task_id, episode.config_dict()
    if (state["task_id"], state["config"]) != (task_id, config):
        raise InvalidConfigError(
            f"the state is of task {state['task_id']!r} with {state['config']}; this environment plays task "
            f"{task_id!r} with {config}"
        )


# ---------------------------------------------------------------- any family


class EpisodeGymEnv(gymnasium.Env[Any, Any]):
    """Gymnasium environment of one episode of any family whose record has a :class:`env.family.GymCodec`.

    ``info`` is the family's own, with ``seed`` added; resets without a seed take the next
    :func:`inferencegym.seeds.episode_seed`. The end is ``terminated``: the episode's length is part of the task.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - Gymnasium's own declaration

    @refuses_unknown
    def __init__(self, family: str, task_id: TaskId, *, config: Mapping[str, Any] | None = None) -> None:
        codec = FAMILIES[family].gym
        if not isinstance(codec, GymCodec):
            raise InvalidConfigError(
                f"family {family!r} has its own Gymnasium environments: make one by its id, InferenceGym/<gym_id>-v1"
            )
        FAMILIES[family].check_config(task_id, config)
        self._family = family
        self._codec = codec
        self._task_id, self._config = task_id, config
        self._episode = FAMILIES[family].make()
        self._series = SeedSeries(1)
        self.action_space, self.observation_space = codec.action_space(), codec.observation_space()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode; there are no ``options``."""
        super().reset(seed=seed)
        refuse_options(options)
        _, [playing] = self._series.next([seed])
        first = self._episode.reset(seed=playing, task_id=self._task_id, config=self._config)
        return self._codec.encode(first), {"seed": playing}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take one step."""
        observation, reward, done = self.play(action)
        return observation, reward, done, False, {**self._episode.info(), "seed": self._episode.seed}

    def play(self, action: Any) -> tuple[Any, float, bool]:
        """Take one step; return observation, reward and done, without an info."""
        observation, reward, done = self._episode.play(self._codec.decode(action))
        return self._codec.encode(observation), reward, done

    def get_state(self) -> dict[str, Any]:
        """The episode so far as JSON, as :meth:`InferenceGymEnv.get_state` gives it."""
        self._episode.observation()  # raises NotResetError before the first reset
        return state_of(self._episode)

    def set_state(self, state: Mapping[str, Any]) -> Any:
        """Continue the episode of a state, as :meth:`InferenceGymEnv.set_state` does."""
        check_state(state)
        family = FAMILIES[self._family]
        episode = family.make()
        episode.reset(seed=state["seed"], task_id=self._task_id, config=self._config)
        _refuse_another(state, episode)
        for action in state["actions"]:
            episode.play(family.parse_action(action)[0])
        self._episode = episode
        return self._codec.encode(episode.observation())

    def grade(self) -> Grade:
        """Grade of the steps played so far: ``score``, ``breakdown`` and ``feedback``."""
        return self._episode.grade()

    @property
    def episode(self) -> EpisodeEnv:
        """The episode, for :func:`inferencegym.verification.saved`."""
        return self._episode

    @property
    def episode_log(self) -> list[dict[str, Any]]:
        """Steps of the episode so far, as graders and ``POST /grader`` accept them."""
        return self._episode.episode_log


class EpisodeVectorEnv(AutoresetVectorEnv, ArrayVectorEnv):
    """Vectorised form of :class:`EpisodeGymEnv`: ``num_envs`` episodes of one task.

    ``info`` has ``seed``, and where ``info["_score"]`` is set ``score``, ``breakdown`` and ``feedback`` of the grade.
    """

    @refuses_unknown
    def __init__(
        self,
        num_envs: int,
        family: str,
        task_id: TaskId,
        *,
        config: Mapping[str, Any] | None = None,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        max_episode_steps: int | None = None,
    ) -> None:
        if num_envs < 1:
            raise refusal("num_envs", num_envs, "at least 1")
        self._rows = [EpisodeGymEnv(family, task_id, config=config) for _ in range(num_envs)]
        self._series = SeedSeries(num_envs)
        first = self._rows[0]
        super().__init__(num_envs, first.observation_space, first.action_space, autoreset_mode, max_episode_steps)
        self._seen = np.zeros(self.observation_space.shape or (), np.float32)
        self._done: BoolArray = np.zeros(num_envs, dtype=np.bool_)
        self._seeds = np.zeros(num_envs, dtype=np.int64)

    def _start(self, seeds: Sequence[int | None] | None, rows: BoolArray | None) -> None:
        chosen = self._everywhere if rows is None else rows
        started, playing = self._series.next(seeds or [None] * self.num_envs, chosen)
        for row, seed in zip(started, playing, strict=True):
            self._seen[row] = self._rows[row].reset(seed=seed)[0]
            self._seeds[row] = seed
        self._done = self._done & ~chosen

    def _step_rows(self, actions: NDArray[Any], rows: BoolArray | None) -> FloatArray:
        reward, done = np.zeros(self.num_envs), self._done.copy()
        for row in np.flatnonzero(self._everywhere if rows is None else rows):
            self._seen[row], reward[row], done[row] = self._rows[row].play(actions[row])
        self._done = done
        return reward

    def _ended(self) -> tuple[BoolArray, BoolArray]:
        return self._done.copy(), np.zeros_like(self._done)

    def _observe(self) -> Float32Array:
        return self._seen.copy()

    def _info(self) -> Info:
        info: Info = {"seed": self._seeds.copy(), "_seed": self._everywhere}
        if self._done.any():
            ended = np.flatnonzero(self._done)
            info |= vector_outcome(self._done.copy(), [self._rows[row].grade() for row in ended])
        return info


# ---------------------------------------------------------------- registration


def register_envs() -> None:
    """Register the ids of every family's tasks; ids that are registered stay as they are."""
    for family in FAMILIES.values():
        for task in family.tasks():
            _register_task(family, task)


def _register_task(family: Family, task: TaskEntry) -> None:
    env_id = registered_id(task.gym_id)
    if isinstance(family.gym, GymFaces):
        register(env_id, family.gym.scalar, family.gym.vector, task_id=task.task_id)
        if family.gym.learner is not None:
            second = registered_id(task.gym_id, version=2)
            register(
                second, family.gym.scalar, family.gym.vector, task_id=task.task_id, **family.gym.learner(task.task_id)
            )
    elif family.gym is not None:
        register(env_id, "env.gym:EpisodeGymEnv", "env.gym:EpisodeVectorEnv", family=family.name, task_id=task.task_id)


register_envs()
