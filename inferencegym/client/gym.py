"""Remote Gymnasium environments: serving tasks on a server, with the spaces, seeds and numbers of local ones.

:class:`HTTPGymEnv` plays one episode, which the server records step by step; :class:`HTTPVectorEnv` plays many at once
as arrays, which are not recorded. Requests carry their step's number: one whose answer was lost is sent again and
played once. Importing this module registers :data:`REMOTE_ID`;
``gymnasium.make("inferencegym.client.gym:InferenceGym/HTTP-v1", url=..., task_id=3)`` imports it too. No simulator is
needed.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from inferencegym import render
from inferencegym.client.batch import InferenceGymBatch
from inferencegym.client.http import InferenceGymHTTP
from inferencegym.errors import InvalidActionError, InvalidConfigError, StepConflictError, UnknownSessionError, refusal
from inferencegym.models import ServeObservation
from inferencegym.seeds import SeedSeries
from inferencegym.spaces.actions import action_mask, from_row, snap
from inferencegym.spaces.formats import ObservationCodec, action_codec_of, reward_format
from inferencegym.spaces.observations import first_fleet, fleet_array, to_array
from inferencegym.tasks import TaskId, get_calibration, get_task, with_settings
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

log = logging.getLogger(__name__)

REMOTE_ID: Final = registered_id("HTTP")
"""Gymnasium id of any serving task on a server: ``gymnasium.make(REMOTE_ID, url=..., task_id=3)``."""
REPLAY_STEPS: Final = 65_536
"""Most seconds per request, summed over the episodes, when lost episodes are replayed."""


class _RemoteTask:
    """Task and formats of a remote environment, which exchanges knobs and observations in their own units."""

    def __init__(self, task_id: TaskId, config: Mapping[str, Any], observation: str, action: str) -> None:
        self.task = get_task(task_id)
        self.config = self.task.config(config)
        self.overrides = config
        constants = get_calibration(self.task.task_id)
        self.actions = action_codec_of(action, self.task, constants)
        self.observations = ObservationCodec(self.task, self.config, constants, observation)
        self._mask = action_mask(self.task.active_actions)

    def knobs(self, actions: NDArray[Any], n_rows: int) -> FloatArray:
        """Decode a learner's actions into allowed knobs (B, 5)."""
        knobs = self.actions.decode(actions)
        if len(knobs) != n_rows:
            raise InvalidActionError("actions", knobs.shape, f"an array of shape ({n_rows}, {knobs.shape[1]})")
        return snap(knobs, self._mask, self.task.fleet)


class HTTPVectorEnv(AutoresetVectorEnv, ArrayVectorEnv):
    """``num_envs`` episodes on a server at ``url``, one request a step (``POST /step/batch``).

    The numbers equal :class:`env.vector.VectorInferenceEnv` with the same arguments, seeds and actions, to the last
    bit. Bounds are read from the task on this machine, so it must know the task too. All rows are at the same step, so
    a ``reset_mask`` must set all of them. ``info`` has only ``seed`` (B,); metrics stay on the server.

    The server keeps these episodes in memory only. If it no longer has them (it was restarted, or they were not stepped
    for ten minutes), the running episodes are replayed from their seeds and actions, with a warning in the log, before
    the step. Raises :class:`StepConflictError` if the replay differs, as on a server of another version.
    """

    @refuses_unknown
    def __init__(
        self,
        url: str,
        num_envs: int = 1,
        task_id: TaskId = 1,
        *,
        config: Mapping[str, Any] | None = None,
        reward: str | None = None,
        hold: int | None = None,
        observation: str = "raw",
        action: str = "box",
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        max_episode_steps: int | None = None,
        api_key: str | None = None,
        timeout_s: float = 60.0,
        client_id: str | None = None,
        retry_s: float | None = None,
    ) -> None:
        if num_envs < 1:
            raise refusal("num_envs", num_envs, "at least 1")
        self._reward, kind = reward_format(reward)
        self._remote = _RemoteTask(task_id, with_settings(config, reward=kind, hold=hold), observation, action)
        self.task = self._remote.task
        self.config = self._remote.config
        self._client = InferenceGymBatch(
            url, api_key=api_key, timeout_s=timeout_s, client_id=client_id, retry_s=retry_s
        )
        self._url = url
        self._series = SeedSeries(num_envs)
        self._observation: FloatArray = np.zeros((num_envs, 0))
        self._played: list[FloatArray] = []
        self._done = False
        self.seeds: NDArray[np.int64] = np.full(num_envs, -1, dtype=np.int64)
        super().__init__(
            num_envs, self._remote.observations.space, self._remote.actions.space, autoreset_mode, max_episode_steps
        )

    @property
    def session_id(self) -> str | None:
        """Id of the batch session on the server; None before the first reset."""
        return self._client.session_id

    def close_extras(self, **kwargs: Any) -> None:
        """End the session on the server and close the connection."""
        # Gymnasium calls this when it deletes an open environment; an interpreter that ends cannot send any more.
        if not sys.is_finalizing():
            self._client.close()

    def _start(self, seeds: Sequence[int | None] | None, rows: BoolArray | None) -> None:
        if rows is not None and not rows.all():
            raise InvalidConfigError(
                "options['reset_mask'] must set all rows: all episodes of a remote batch are at the same step; "
                "for episodes that start at different times use one HTTPGymEnv each",
                "reset_mask",
            )
        # A reset that fails must not use up seeds.
        series = copy.deepcopy(self._series)
        _, playing = series.next(seeds, rows)
        self._observation = self._reset(playing)
        self._series, self._played, self._done = series, [], False
        self.seeds = np.array(playing, dtype=np.int64)

    def _reset(self, seeds: Sequence[int]) -> FloatArray:
        needs_fleet = self._remote.observations.needs_fleet
        return self._client.reset(
            task_id=self.task.task_id, seeds=seeds, config=self._remote.overrides, fleet=needs_fleet
        )

    def _step_rows(self, actions: NDArray[Any], rows: BoolArray | None) -> FloatArray:
        knobs = self._remote.knobs(actions, self.num_envs)
        try:
            played = self._client.step(knobs, float64=True)
        except UnknownSessionError:
            self._replay()
            played = self._client.step(knobs, float64=True)
        self._played.append(knobs)
        self._observation, self._done = played.observations[0], bool(played.done[0])
        return self._reward(np.asarray(played.rewards[0]), self.config)

    def _replay(self) -> None:
        """Replay the running episodes, which the server no longer has, up to the last step."""
        log.warning("%s no longer has the episodes: replaying %d steps", self._url, len(self._played))
        observation = self._reset(self.seeds.tolist())
        block = max(1, REPLAY_STEPS // (self.num_envs * self.config.hold))
        for at in range(0, len(self._played), block):
            actions = np.array(self._played[at : at + block])
            observation = self._client.step_many(actions, last=True, float64=True).observations[-1]
        if not np.array_equal(observation, self._observation):
            raise StepConflictError(
                f"{self._url} lost the episodes, and their replay differs: does it run another version or other task "
                "data now? reset() starts new ones"
            )

    def _ended(self) -> tuple[BoolArray, BoolArray]:
        return np.full(self.num_envs, self._done), np.zeros(self.num_envs, dtype=np.bool_)

    def _observe(self) -> Float32Array:
        return self._remote.observations.encode(self._observation)

    def _info(self) -> Info:
        return {"seed": self.seeds.copy(), "_seed": self._everywhere}


class HTTPGymEnv(gymnasium.Env[Float32Array, NDArray[Any]]):
    """One episode of a serving task on a server at ``url``; numbers equal :class:`env.gym.InferenceGymEnv`.

    ``info`` is the server's, with ``session_id`` and ``seed`` added; the last one of an episode has its ``score``,
    ``breakdown`` and ``feedback``. ``render()`` draws the episode so far, as the local environment does. The session
    outlives the server's process. Resets without a seed take the next :func:`inferencegym.seeds.episode_seed`.
    """

    metadata = render.METADATA

    @refuses_unknown
    def __init__(
        self,
        url: str,
        task_id: TaskId = 1,
        *,
        config: Mapping[str, Any] | None = None,
        reward: str | None = None,
        hold: int | None = None,
        observation: str = "raw",
        action: str = "box",
        api_key: str | None = None,
        timeout_s: float = 30.0,
        client_id: str | None = None,
        retry_s: float | None = None,
        render_mode: str | None = None,
    ) -> None:
        self._reward, kind = reward_format(reward)
        self._remote = _RemoteTask(task_id, with_settings(config, reward=kind, hold=hold), observation, action)
        self.task = self._remote.task
        self.config = self._remote.config
        self.observation_space = self._remote.observations.space
        self.action_space = self._remote.actions.space
        self.render_mode = render_mode
        self.metadata = render.metadata()
        self._picture = render.episode_picture(render_mode, self.task, self.config.episode_length)
        self._client = InferenceGymHTTP(url, api_key=api_key, timeout_s=timeout_s, client_id=client_id, retry_s=retry_s)
        self._series = SeedSeries(1)
        self._seed = -1

    @property
    def session_id(self) -> str | None:
        """Id of the session on the server; None before the first reset."""
        return self._client.session_id

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Float32Array, dict[str, Any]]:
        """Start an episode; there are no ``options``."""
        super().reset(seed=seed)
        refuse_options(options)
        series = copy.deepcopy(self._series)
        _, [playing] = series.next([seed])
        try:
            first = self._start(playing, self.session_id)
        except UnknownSessionError:
            # The server no longer has the session.
            first = self._start(playing, None)
        self._series, self._seed = series, playing
        return first, self._info_of({"timestep": 0})

    def step(self, action: NDArray[Any]) -> tuple[Float32Array, float, bool, bool, dict[str, Any]]:
        """Take one step, of one second or ``hold``."""
        knobs = self._remote.knobs(np.asarray(action)[None], 1)
        observation, unscaled, done, info = self._client.step(from_row(knobs[0]).to_dict())
        reward = self._reward(np.array(unscaled), self.config).item()
        if self._picture is not None:
            self._picture.add(to_array(observation), knobs[0])
        info = self._info_of({**info, "cost": info["metrics"]["slo_violations"]})
        return self._encoded(observation, fleet_array(info["fleet"])), reward, done, False, info

    def grade(self) -> dict[str, Any]:
        """Grade of the steps played so far, from the server."""
        return self._client.grade()

    def close(self) -> None:
        """Close the connection and the window of ``render_mode="human"``; the server keeps the session."""
        self._client.close()
        if self._picture is not None:
            self._picture.close()

    def render(self) -> Any:
        """Picture of the episode so far, (height, width, 3) bytes with ``render_mode="rgb_array"``, else None."""
        return None if self._picture is None else self._picture.render()

    def _start(self, seed: int, session_id: str | None) -> Float32Array:
        first = self._client.reset(seed, self.task.task_id, self._remote.overrides, session_id)
        if self._picture is not None:
            self._picture.start(to_array(first))
        return self._encoded(first, first_fleet(self.task.fleet))

    def _encoded(self, observation: ServeObservation, fleet: FloatArray) -> Float32Array:
        seen = np.concatenate([to_array(observation), fleet])
        return self._remote.observations.encode(seen)

    def _info_of(self, info: Mapping[str, Any]) -> dict[str, Any]:
        return {**info, "session_id": self.session_id, "seed": self._seed}


register(REMOTE_ID, f"{__name__}:HTTPGymEnv", f"{__name__}:HTTPVectorEnv")
