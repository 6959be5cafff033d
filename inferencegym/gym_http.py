"""The serving tasks of a server as Gymnasium environments: same spaces, seeds and numbers as in process.

Steps carry their number, so one whose answer was lost is sent again without being played twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from env.action import action_mask, from_row, snap
from env.autoreset import SeedSeries
from env.observation import OBSERVATION_SIZE, to_array
from env.spaces import ObservationCodec, action_codec
from env.vector_env import AutoresetVectorEnv, BoolArray, Float32Array, FloatArray, Info
from inferencegym.errors import InvalidConfigError, UnknownSessionError
from inferencegym.http_client import InferenceGymHTTP
from inferencegym.tasks import TaskId, get_calibration, get_task


class HTTPVectorEnv(AutoresetVectorEnv):
    """``num_envs`` episodes on a server at ``url``, stepped over ``connections`` connections at once.

    As :class:`env.vector_env.VectorInferenceEnv`, for tasks that this machine knows too (their bounds are read here).
    ``info`` holds ``metrics`` under the names of ``MetricsSnapshot``, and ``seed``.
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
        timeout_s: float = 30.0,
        retries: int = 5,
        connections: int = 8,
    ) -> None:
        if num_envs < 1:
            raise InvalidConfigError(f"num_envs={num_envs!r} is not allowed: it must be at least 1")
        self.task = get_task(task_id)
        self.config = self.task.config(config)
        self._overrides = dict(config or {})
        calibration = get_calibration(self.task.task_id)
        self._pool = ThreadPoolExecutor(max(1, min(connections, num_envs)))
        self._clients = [
            InferenceGymHTTP(url, api_key=api_key, timeout_s=timeout_s, retries=retries) for _ in range(num_envs)
        ]
        self._series = SeedSeries(num_envs)
        self._actions = action_codec(action)
        self._mask = action_mask(self.task.active_actions)
        self._observations = ObservationCodec(self.task, self.config, calibration, observation)
        self._observation = np.zeros((num_envs, OBSERVATION_SIZE))
        self._reward = np.zeros(num_envs)
        self._done = np.zeros(num_envs, dtype=np.bool_)
        self.infos: list[dict[str, Any]] = [{} for _ in range(num_envs)]
        self.seeds = np.full(num_envs, -1, dtype=np.int64)
        super().__init__(num_envs, self._observations.space, self._actions.space, autoreset_mode)

    @property
    def session_ids(self) -> list[str | None]:
        """Sessions of the rows on the server."""
        return [client.session_id for client in self._clients]

    def close_extras(self, **kwargs: Any) -> None:
        """Close the connections; the server forgets its sessions by itself."""
        self._pool.shutdown()
        for client in self._clients:
            client.close()

    def _start(self, seeds: Sequence[int | None] | None, rows: BoolArray | None) -> None:
        chosen, playing = self._series.next(seeds, rows)
        started = list(self._pool.map(self._restart, chosen, playing))
        self._observation[chosen] = started
        self._done[chosen] = False
        self.seeds[chosen] = playing
        for row in chosen:
            self.infos[row] = {}

    def _restart(self, row: int, seed: int) -> FloatArray:
        client = self._clients[row]
        try:
            first = client.reset(seed, self.task.task_id, self._overrides, client.session_id)
        except UnknownSessionError:
            # The server has forgotten the session since its last step.
            first = client.reset(seed, self.task.task_id, self._overrides)
        return to_array(first)

    def _play(self, actions: NDArray[Any], rows: BoolArray | None) -> FloatArray:
        chosen = list(range(self.num_envs)) if rows is None else np.flatnonzero(rows).tolist()
        knobs = snap(self._actions.decode(actions), self._mask)
        wanted = [from_row(knobs[row]).to_dict() for row in chosen]
        played = self._pool.map(lambda row, action: self._clients[row].step(action), chosen, wanted)
        for row, (observation, reward, done, info) in zip(chosen, played, strict=True):
            self._observation[row], self._reward[row], self._done[row] = to_array(observation), reward, done
            self.infos[row] = info
        return self._reward.copy()

    def _ended(self) -> tuple[BoolArray, BoolArray]:
        return self._done.copy(), np.zeros_like(self._done)

    def _observe(self) -> Float32Array:
        return self._observations.encode(self._observation)

    def _info(self) -> Info:
        has = np.array(["metrics" in info for info in self.infos])
        names = next((list(info["metrics"]) for info in self.infos if info), [])
        metrics = {n: np.array([float(i["metrics"][n]) if i else 0.0 for i in self.infos]) for n in names}
        seeds = {"seed": self.seeds.copy(), "_seed": self._everywhere}
        return {**seeds, "metrics": metrics, "_metrics": has} if names else seeds


class HTTPGymEnv(gymnasium.Env[Float32Array, NDArray[Any]]):
    """One episode of a serving task on a server at ``url``; a row of :class:`HTTPVectorEnv`.

    ``info`` is the server's, with ``session_id`` and ``seed``: ``POST /grader`` scores the session under that id.
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
        self._rows = HTTPVectorEnv(
            url,
            1,
            task_id,
            config=config,
            observation=observation,
            action=action,
            autoreset_mode=AutoresetMode.DISABLED,
            api_key=api_key,
            timeout_s=timeout_s,
            retries=retries,
        )
        self.task = self._rows.task
        self.config = self._rows.config
        self.observation_space = self._rows.single_observation_space
        self.action_space = self._rows.single_action_space

    @property
    def session_id(self) -> str | None:
        """The session on the server."""
        return self._rows.session_ids[0]

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Float32Array, dict[str, Any]]:
        """Start an episode."""
        super().reset(seed=seed)
        observation, _ = self._rows.reset(seed=[seed])
        return observation[0], self._named({"timestep": 0})

    def step(self, action: NDArray[Any]) -> tuple[Float32Array, float, bool, bool, dict[str, Any]]:
        """Play one second."""
        observation, reward, ended, _, _ = self._rows.step(np.asarray(action)[None])
        return observation[0], float(reward[0]), bool(ended[0]), False, self._named(self._rows.infos[0])

    def close(self) -> None:
        """Close the connection."""
        self._rows.close()

    def _named(self, info: Mapping[str, Any]) -> dict[str, Any]:
        return {**info, "session_id": self.session_id, "seed": int(self._rows.seeds[0])}
