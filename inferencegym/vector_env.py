"""Base of all vectorised Gymnasium environments, local and remote: autoreset modes, and registration of ids."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, Final, ParamSpec

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from inferencegym.errors import EpisodeDoneError, InvalidConfigError, did_you_mean, refusal

Float32Array = NDArray[np.float32]
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
Info = dict[str, Any]
ArrayVectorEnv = gymnasium.vector.VectorEnv[Float32Array, NDArray[Any], NDArray[Any]]
"""Gymnasium's vector environment with arrays."""
Stepped = tuple[Float32Array, FloatArray, BoolArray, BoolArray, Info]

P = ParamSpec("P")

NAMESPACE: Final = "InferenceGym"
ENV_VERSION: Final = 1


def registered_id(gym_id: str, version: int = ENV_VERSION) -> str:
    """Gymnasium id of a task with this ``gym_id``, such as ``InferenceGym/StaticUniform-v1``."""
    return f"{NAMESPACE}/{gym_id}-v{version}"


def register(env_id: str, scalar: str, vector: str | None, **kwargs: Any) -> None:
    """Register entry points (``module:Class``) for ``make`` and ``make_vec``; does nothing if the id is registered."""
    if env_id not in gymnasium.registry:
        gymnasium.register(id=env_id, entry_point=scalar, vector_entry_point=vector, kwargs=kwargs)


def refuses_unknown(init: Callable[P, None]) -> Callable[P, None]:
    """Decorate ``__init__``: an unknown argument raises :class:`InvalidConfigError` with those that there are."""
    known = [*inspect.signature(init).parameters][1:]

    @wraps(init)
    def checked(*args: P.args, **kwargs: P.kwargs) -> None:
        for name in kwargs.keys() - set(known):
            told = did_you_mean(name, known, f"the arguments are {', '.join(known)}")
            raise InvalidConfigError(f"unknown argument {name}: {told}", name)
        init(*args, **kwargs)

    return checked


def refuse_options(options: Mapping[str, Any] | None, *known: str) -> None:
    """Raise :class:`InvalidConfigError` for an option of ``reset`` that is not among ``known``."""
    for name in (options or {}).keys() - set(known):
        taken = f"reset takes {', '.join(known) or 'no options'}; a task's settings are arguments of gymnasium.make"
        told = did_you_mean(name, known, taken)
        raise InvalidConfigError(f"unknown option {name} of reset: {told}", str(name))


class AutoresetVectorEnv(ArrayVectorEnv):
    """Base of vectorised environments: Gymnasium's three autoreset modes over five methods that a subclass defines.

    ``NEXT_STEP`` (Gymnasium's default, which RLlib expects): the step after an end ignores that row's action and
    returns the next episode's first observation with reward 0. ``SAME_STEP`` (as Stable-Baselines3): the step that ends
    an episode returns the next one's first observation, and ``info["final_obs"]``, ``info["final_info"]`` hold the last
    observation and info of the old one, valid where ``info["_final_obs"]`` is set. ``DISABLED``: ended rows are
    restarted only by ``reset(options={"reset_mask": mask})``.

    ``max_episode_steps`` truncates episodes after so many steps, as Gymnasium's ``TimeLimit`` does. Subclasses also
    name :data:`ArrayVectorEnv` as a base: skrl recognises environments by their direct bases.
    """

    # Some versions of Gymnasium close environments in __del__, so one whose __init__ failed must count as closed.
    closed = True

    def __init__(
        self,
        num_envs: int,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        autoreset_mode: AutoresetMode | str,
        max_episode_steps: int | None = None,
    ) -> None:
        if max_episode_steps is not None and max_episode_steps < 1:
            raise refusal("max_episode_steps", max_episode_steps, "at least 1, or None")
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        self.metadata = {"render_modes": [], "autoreset_mode": self.autoreset_mode}
        self.num_envs = num_envs
        self.single_observation_space = observation_space
        self.single_action_space = action_space
        self.observation_space = batch_space(observation_space, num_envs)
        self.action_space = batch_space(action_space, num_envs)
        self._everywhere: BoolArray = np.ones(num_envs, dtype=np.bool_)
        self._ended_before: BoolArray = np.zeros(num_envs, dtype=np.bool_)
        self._max_steps = max_episode_steps
        self._steps = np.zeros(num_envs, dtype=np.int64)
        self.closed = False

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Float32Array, Info]:
        """Start all episodes, or those of ``options["reset_mask"]`` (B,).

        ``seed`` is one per row, or a number ``s`` for ``s, s + 1, ...``; None continues each row's series of seeds.
        """
        mask = _reset_mask(options, self.num_envs)
        seeds = [int(seed) + i for i in range(self.num_envs)] if isinstance(seed, (int, np.integer)) else seed
        self._restart(seeds, mask)
        self._ended_before = np.zeros_like(self._ended_before) if mask is None else self._ended_before & ~mask
        return self._observe(), self._info()

    def step(self, actions: NDArray[Any]) -> Stepped:
        """Take one step in every row: observation, reward, terminated, truncated, info."""
        if self.autoreset_mode is AutoresetMode.NEXT_STEP:
            return self._restart_or_step(np.asarray(actions))
        if self._ended_before.any():
            row = int(np.argmax(self._ended_before))
            raise EpisodeDoneError(f'row {row}: the episode has ended; reset it with options={{"reset_mask": mask}}')
        reward = self._step_rows(np.asarray(actions), None)
        terminated, truncated = self._over(self._everywhere)
        ended = terminated | truncated
        observation, info = self._observe(), self._info()
        if self.autoreset_mode is AutoresetMode.DISABLED:
            self._ended_before = ended
        elif ended.any():
            final = {"final_obs": observation, "_final_obs": ended, "final_info": info, "_final_info": ended}
            self._restart(None, ended)
            observation, info = self._observe(), {**self._info(), **final}
        return observation, reward, terminated, truncated, info

    def _restart_or_step(self, actions: NDArray[Any]) -> Stepped:
        restart = self._ended_before
        if not restart.any():
            reward = self._step_rows(actions, None)
        else:
            reward = np.where(restart, 0.0, 0.0 if restart.all() else self._step_rows(actions, ~restart))
            self._restart(None, restart)
        terminated, truncated = self._over(~restart)
        self._ended_before = terminated | truncated
        return self._observe(), reward, terminated, truncated, self._info()

    def _restart(self, seeds: Sequence[int | None] | None, rows: BoolArray | None) -> None:
        self._start(seeds, rows)
        self._steps[self._everywhere if rows is None else rows] = 0

    def _over(self, stepped: BoolArray) -> tuple[BoolArray, BoolArray]:
        """Rows whose episode is terminated, and rows whose episode is truncated, also by ``max_episode_steps``."""
        self._steps += stepped
        terminated, truncated = self._ended()
        return terminated, truncated if self._max_steps is None else truncated | (self._steps >= self._max_steps)

    # ------------------------------------------------------------ defined by subclasses

    @abstractmethod
    def _start(self, seeds: Sequence[int | None] | None, rows: BoolArray | None) -> None:
        """Start episodes in all rows or those of the mask."""

    @abstractmethod
    def _step_rows(self, actions: NDArray[Any], rows: BoolArray | None) -> FloatArray:
        """Take one step in all rows or those of the mask; returns a new array of rewards (B,)."""

    @abstractmethod
    def _ended(self) -> tuple[BoolArray, BoolArray]:
        """New arrays (B,): rows whose episode is terminated, and rows whose episode is truncated."""

    @abstractmethod
    def _observe(self) -> Float32Array:
        """A new array of observations."""

    @abstractmethod
    def _info(self) -> Info:
        """New infos in Gymnasium's vector form."""


def _reset_mask(options: Mapping[str, Any] | None, num_envs: int) -> BoolArray | None:
    refuse_options(options, "reset_mask")
    mask = None if options is None else options.get("reset_mask")
    if mask is None:
        return None
    if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_ or mask.shape != (num_envs,) or not mask.any():
        raise InvalidConfigError(
            f"options['reset_mask'] must be a bool array of shape ({num_envs},) with a True in it", "reset_mask"
        )
    return mask
