"""OpenEnv's clients of both environments, with reconnection: a dropped socket loses no step (extra ``openenv``).

An episode belongs to a session on the server and not to the socket. After a loss these clients open another socket,
resume the episode and send the unanswered step again under its number; the server plays it once.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Mapping
from typing import Any, Final

from inferencegym.client.answers import error_of
from inferencegym.client.openenv_types import (
    InferenceGymAction,
    InferenceGymObservation,
    InferenceGymState,
    TrafficControllerAction,
    TrafficControllerObservation,
    TrafficControllerState,
    without_gradio,
)
from inferencegym.error_text import read_error
from inferencegym.errors import CapacityError, NotResetError, ServerUnavailableError
from inferencegym.models import ServeAction
from inferencegym.traffic import TrafficAction, parse_action

with without_gradio():
    from openenv.core.client_types import StepResult
    from openenv.core.env_client import EnvClient
    from websockets.exceptions import ConnectionClosed

_LOST: Final = (ConnectionClosed, TimeoutError, OSError)
"""Errors of a dropped, silent or unreachable server; OpenEnv's own ConnectionError is an OSError."""
FIRST_PAUSE_S: Final = 0.05
LONGEST_PAUSE_S: Final = 2.0


class EpisodeClient(EnvClient):  # type: ignore[misc]
    """Base of both clients: sessions, numbered steps, reconnection and the errors of local use.

    ``reset`` takes ``task_id``, ``seed``, ``config``, ``episode_id`` (a random one is made if it is left out),
    ``info=True`` (every observation carries POST /step's info) and ``resume=True`` (go on with ``episode_id``). Errors
    are those of local use, from :mod:`inferencegym.errors`. All other arguments are those of OpenEnv's ``EnvClient``.
    """

    reconnect_s: float = 60.0
    """Seconds of trying to connect again after a lost socket; 0 makes the first loss an error.

    A server that has not noticed the loss still counts the lost socket, so a full server is tried again as well.
    """

    _ws: Any
    """OpenEnv's socket; None before the first call and after it was given up."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._episode_id: str | None = None
        self._taken = 0
        self._info = False

    @property
    def episode_id(self) -> str | None:
        """Id of the episode, which is the session id for GET /state and POST /grader; None before the first reset."""
        return self._episode_id

    # ------------------------------------------------------------ frames

    async def _reset_async(self, **kwargs: Any) -> Any:
        wanted = {"episode_id": secrets.token_hex(16), **kwargs}
        payload = await self._persistent({"type": "reset", "data": wanted}, resume=False)
        result = self._parse_result(payload)
        self._episode_id, self._info = wanted["episode_id"], bool(kwargs.get("info", False))
        self._taken = self._steps_of(result.observation)
        return result

    async def _step_async(self, action: Any, **kwargs: Any) -> Any:
        data = self._step_payload(action)
        result = self._parse_result(await self._persistent({"type": "step", "data": data}, resume=True))
        self._taken = self._steps_of(result.observation)
        return result

    async def _state_async(self) -> Any:
        payload = await self._persistent({"type": "state"}, resume=True)
        if payload.get("episode_id") is None and self._episode_id is not None:
            # A new socket, which has not been told of the episode yet.
            await self._resume()
            payload = await self._persistent({"type": "state"}, resume=True)
        return self._parse_state(payload)

    async def _persistent(self, message: dict[str, Any], resume: bool) -> dict[str, Any]:
        """Send a message and return its reply's data, connecting again as often as :attr:`reconnect_s` allows."""
        lost: Exception | None = None
        # OpenEnv's client opens a new socket by itself when it finds the old one closed.
        may_be_lost = resume or self._ws is not None
        pause_s, deadline = FIRST_PAUSE_S, math.inf
        while time.monotonic() < deadline:
            if lost is not None:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            try:
                if lost is not None and resume and self._episode_id is not None:
                    await self._resume()
                    message = self._numbered(message)
                return await self._data(message)
            except NotResetError as error:
                # A new socket, which has not been told of the episode yet.
                if self._episode_id is None or not resume or isinstance(lost, NotResetError):
                    raise
                lost = error
            except CapacityError as error:
                # Refused with the socket, which is then gone, and not by a store that is full of sessions.
                refused = self._ws is None
                if self._episode_id is None or not refused or (lost is None and not may_be_lost):
                    raise
                lost = error
            except _LOST as error:
                if self._episode_id is None:
                    raise ServerUnavailableError(
                        f"{self._ws_url} cannot be reached ({error!r}): is a server there?"
                    ) from error
                lost = error
            deadline = min(deadline, time.monotonic() + self.reconnect_s)
        kind = CapacityError if isinstance(lost, CapacityError) else ServerUnavailableError
        raise kind(
            f"the connection to {self._ws_url} was lost, and {self.reconnect_s:g} s of new attempts failed ({lost!r}); "
            f"the server keeps the episode: reset(episode_id={self._episode_id!r}, resume=True) continues it"
        ) from lost

    async def _resume(self) -> None:
        await self._data(
            {"type": "reset", "data": {"episode_id": self._episode_id, "resume": True, "info": self._info}}
        )

    async def _data(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            reply = await self._send_and_receive(message)
        except RuntimeError as error:
            if _is_full(error):
                # The server closes it, but this may be noticed only in the middle of the next call.
                socket, self._ws = self._ws, None
                await socket.close()
            raise _ours(error) from error
        return dict(reply.get("data", {}))

    def _numbered(self, message: dict[str, Any]) -> dict[str, Any]:
        if message["type"] != "step":
            return message
        return {"type": "step", "data": {**message["data"], "metadata": {"step": self._taken + 1}}}

    def _steps_of(self, observation: Any) -> int:
        raise TypeError(f"{type(self).__name__} does not define _steps_of")


def _ours(error: RuntimeError) -> Exception:
    """The exception of local use for an error frame, which OpenEnv raises as RuntimeError whatever its cause."""
    found = read_error(str(error))
    if found is not None:
        message, code = found
        status = 422 if str(error).endswith("(code: VALIDATION_ERROR)") else 400
        return error_of(code, message.removeprefix("Server error: "), status)
    if _is_full(error):
        return CapacityError(f"{error}; close a client, or raise INFERENCEGYM_MAX_CONCURRENT_ENVS on the server")
    return error


def _is_full(error: RuntimeError) -> bool:
    """Whether the server refused the socket because it holds as many as it may."""
    return str(error).endswith("(code: CAPACITY_REACHED)")


class InferenceGymEnv(EpisodeClient):
    """The serving fleet over a WebSocket.

    >>> async with InferenceGymEnv(base_url="http://localhost:7860") as env:  # doctest: +SKIP
    ...     result = await env.reset(task_id=1, seed=7)
    ...     result = await env.step(InferenceGymAction(batch_size=128))

    Without an event loop: ``with InferenceGymEnv(base_url=...).sync() as env``. An action may also be a ``ServeAction``
    or a mapping.
    """

    def _step_payload(self, action: InferenceGymAction | ServeAction | Mapping[str, Any]) -> dict[str, Any]:
        if isinstance(action, ServeAction):
            return ServeAction.from_dict(action.to_dict()).to_dict()
        if isinstance(action, InferenceGymAction):
            return dict(action.model_dump() if action.metadata else action.model_dump(exclude={"metadata"}))
        return ServeAction.from_dict(dict(action)).to_dict()

    def _parse_result(self, payload: dict[str, Any]) -> Any:
        reward, done = payload.get("reward"), bool(payload.get("done", False))
        seen = InferenceGymObservation.model_validate({**payload["observation"], "reward": reward, "done": done})
        return StepResult(observation=seen, reward=reward, done=done)

    def _parse_state(self, payload: dict[str, Any]) -> InferenceGymState:
        return InferenceGymState(**payload)

    def _steps_of(self, observation: InferenceGymObservation) -> int:
        return observation.timestep


class TrafficControllerEnv(EpisodeClient):
    """The traffic controller over a WebSocket: ``base_url`` is the server's address with ``/traffic`` at its end.

    An action may also be a :class:`~inferencegym.traffic.TrafficAction`, its name or a mapping.
    """

    def _step_payload(
        self, action: TrafficControllerAction | TrafficAction | str | Mapping[str, Any]
    ) -> dict[str, Any]:
        if isinstance(action, TrafficControllerAction):
            return dict(action.model_dump() if action.metadata else action.model_dump(exclude={"metadata"}))
        return {"action": parse_action(action).value}

    def _parse_result(self, payload: dict[str, Any]) -> Any:
        reward, done = payload.get("reward"), bool(payload.get("done", False))
        seen = TrafficControllerObservation.model_validate({**payload["observation"], "reward": reward, "done": done})
        return StepResult(observation=seen, reward=reward, done=done)

    def _parse_state(self, payload: dict[str, Any]) -> TrafficControllerState:
        return TrafficControllerState(**payload)

    def _steps_of(self, observation: TrafficControllerObservation) -> int:
        return observation.step
