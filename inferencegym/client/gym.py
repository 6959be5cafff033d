"""The serving tasks of a server as Gymnasium environments: same spaces, seeds and numbers as in process.

:class:`HTTPGymEnv` plays one session, which the server writes down step by step; :class:`HTTPVectorEnv` plays many
episodes at once in arrays, which it does not. Requests carry their step's number: one whose answer was lost is sent
again and played once.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from env.action import ACTION_SIZE, action_mask, from_row, snap
from env.autoreset import SeedSeries
from env.observation import OBSERVATION_SIZE, to_array
from env.spaces import ObservationCodec, action_codec
from env.vector_env import AutoresetVectorEnv, BoolArray, Float32Array, FloatArray, Info
from inferencegym.client.batch import InferenceGymBatch
from inferencegym.client.http import InferenceGymHTTP
from inferencegym.errors import InvalidActionError, InvalidConfigError, StepConflictError, UnknownSessionError
from inferencegym.tasks import TaskId, get_calibration, get_task

log = logging.getLogger(__name__)
STEPS_AGAIN: Final = 65_536
"""Steps of all episodes in one request when lost episodes are played again."""


class _RemoteTask:
    """A task as this machine knows it too, and its formats: a server is sent knobs and answers in natural units."""

    def __init__(self, task_id: TaskId, config: Mapping[str, Any] | None, observation: str, action: str) -> None:
        self.task = get_task(task_id)
        self.config = self.task.config(config)
        self.overrides = dict(config or {})
        self.actions = action_codec(action)
        self.observations = ObservationCodec(self.task, self.config, get_calibration(self.task.task_id), observation)
        self._mask = action_mask(self.task.active_actions)

    def knobs(self, actions: NDArray[Any], n_rows: int) -> FloatArray:
        """Allowed knobs (B, 5) of a learner's actions."""
        knobs = self.actions.decode(actions)
        if knobs.shape != (n_rows, ACTION_SIZE):
            raise InvalidActionError("actions", knobs.shape, f"an array of shape ({n_rows}, {ACTION_SIZE})")
        return snap(knobs, self._mask)


class HTTPVectorEnv(AutoresetVectorEnv):
    """``num_envs`` episodes on a server at ``url``, all of them in one request a step (``POST /step/batch``).

    Row by row the numbers of :class:`env.vector_env.VectorInferenceEnv` with the same arguments, seeds and actions, to
    the last bit; for tasks that this machine knows too (their bounds are read here). Rows are in step with each other,
    so a ``reset_mask`` must set all of them. ``info`` holds ``seed`` (B,); metrics stay on the server.

    The server keeps these episodes in memory only. Where it no longer has them (it was started again, or they were not
    stepped for ten minutes), the running episodes are played again from their seeds and actions, with a warning in the
    log, and the step follows; :class:`StepConflictError` if they came out otherwise, as on a server of another version.
    """

    def __init__(
        self,
        url: str,
        num_envs: int = 1,
        task_id: TaskId = 1,
        *,
        config: Mapping[str, Any] | None = None,
        observation: str = "raw",
        action: str = "box",
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        api_key: str | None = None,
        timeout_s: float = 60.0,
        retries: int = 5,
    ) -> None:
        if num_envs < 1:
            raise InvalidConfigError(f"num_envs={num_envs!r} is not allowed: it must be at least 1")
        self._remote = _RemoteTask(task_id, config, observation, action)
        self.task = self._remote.task
        self.config = self._remote.config
        self._client = InferenceGymBatch(url, api_key=api_key, timeout_s=timeout_s, retries=retries)
        self._url = url
        self._series = SeedSeries(num_envs)
        self._observation: FloatArray = np.zeros((num_envs, OBSERVATION_SIZE))
        self._played: list[FloatArray] = []
        self._done = False
        self.seeds: NDArray[np.int64] = np.full(num_envs, -1, dtype=np.int64)
        super().__init__(num_envs, self._remote.observations.space, self._remote.actions.space, autoreset_mode)

    @property
    def session_id(self) -> str | None:
        """The batch session on the server; None before the first reset."""
        return self._client.session_id

    def close_extras(self, **kwargs: Any) -> None:
        """End the session on the server and close the connection."""
        self._client.close()

    def _start(self, seeds: Sequence[int | None] | None, rows: BoolArray | None) -> None:
        if rows is not None and not rows.all():
            raise InvalidConfigError(
                "options['reset_mask'] must set all rows: episodes of a remote batch are in step with each other; "
                "episodes that start apart are played by HTTPGymEnv, one each"
            )
        # A reset that the server does not answer must not use up seeds.
        series = copy.deepcopy(self._series)
        _, playing = series.next(seeds, rows)
        self._observation = self._reset(playing)
        self._series, self._played, self._done = series, [], False
        self.seeds = np.array(playing, dtype=np.int64)

    def _reset(self, seeds: Sequence[int]) -> FloatArray:
        return self._client.reset(task_id=self.task.task_id, seeds=seeds, config=self._remote.overrides)

    def _step_rows(self, actions: NDArray[Any], rows: BoolArray | None) -> FloatArray:
        knobs = self._remote.knobs(actions, self.num_envs)
        try:
            played = self._client.step(knobs, float64=True)
        except UnknownSessionError:
            self._play_again()
            played = self._client.step(knobs, float64=True)
        self._played.append(knobs)
        self._observation, self._done = played.observations[0], bool(played.done[0])
        return np.array(played.rewards[0])

    def _play_again(self) -> None:
        """Bring episodes that the server no longer has to where they were."""
        log.warning("%s no longer has the episodes: playing %d steps of them again", self._url, len(self._played))
        observation = self._reset(self.seeds.tolist())
        block = max(1, STEPS_AGAIN // self.num_envs)
        for at in range(0, len(self._played), block):
            actions = np.array(self._played[at : at + block])
            observation = self._client.play(actions, last=True, float64=True).observations[-1]
        if not np.array_equal(observation, self._observation):
            raise StepConflictError(
                f"{self._url} lost the episodes and plays them otherwise than before: does it run another version or "
                "other task data now? reset() starts new ones"
            )

    def _ended(self) -> tuple[BoolArray, BoolArray]:
        return np.full(self.num_envs, self._done), np.zeros(self.num_envs, dtype=np.bool_)

    def _observe(self) -> Float32Array:
        return self._remote.observations.encode(self._observation)

    def _info(self) -> Info:
        return {"seed": self.seeds.copy(), "_seed": self._everywhere}


class HTTPGymEnv(gymnasium.Env[Float32Array, NDArray[Any]]):
    """One episode at a time of a serving task on a server at ``url``; equals :class:`inferencegym.gym.InferenceGymEnv`.

    ``info`` is the server's, with ``session_id`` and ``seed``: ``POST /grader`` scores the session under that id. The
    session outlives the server's process. Seeds of resets are those of :func:`env.autoreset.episode_seed`.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - Gymnasium's own declaration

    def __init__(
        self,
        url: str,
        task_id: TaskId = 1,
        *,
        config: Mapping[str, Any] | None = None,
        observation: str = "raw",
        action: str = "box",
        api_key: str | None = None,
        timeout_s: float = 30.0,
        retries: int = 5,
    ) -> None:
        self._remote = _RemoteTask(task_id, config, observation, action)
        self.task = self._remote.task
        self.config = self._remote.config
        self.observation_space = self._remote.observations.space
        self.action_space = self._remote.actions.space
        self._client = InferenceGymHTTP(url, api_key=api_key, timeout_s=timeout_s, retries=retries)
        self._series = SeedSeries(1)
        self._seed = -1

    @property
    def session_id(self) -> str | None:
        """The session on the server; None before the first reset."""
        return self._client.session_id

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Float32Array, dict[str, Any]]:
        """Start an episode."""
        super().reset(seed=seed)
        series = copy.deepcopy(self._series)
        _, [playing] = series.next([seed])
        try:
            first = self._start(playing, self.session_id)
        except UnknownSessionError:
            # The server has forgotten the session since its last step.
            first = self._start(playing, None)
        self._series, self._seed = series, playing
        return first, self._named({"timestep": 0})

    def step(self, action: NDArray[Any]) -> tuple[Float32Array, float, bool, bool, dict[str, Any]]:
        """Play one second."""
        knobs = self._remote.knobs(np.asarray(action)[None], 1)
        observation, reward, done, info = self._client.step(from_row(knobs[0]).to_dict())
        return self._seen(to_array(observation)), reward, done, False, self._named(info)

    def close(self) -> None:
        """Close the connection; the server keeps the session."""
        self._client.close()

    def _start(self, seed: int, session_id: str | None) -> Float32Array:
        return self._seen(to_array(self._client.reset(seed, self.task.task_id, self._remote.overrides, session_id)))

    def _seen(self, observation: FloatArray) -> Float32Array:
        seen: Float32Array = self._remote.observations.encode(observation[None])[0]
        return seen

    def _named(self, info: Mapping[str, Any]) -> dict[str, Any]:
        return {**info, "session_id": self.session_id, "seed": self._seed}
