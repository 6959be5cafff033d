"""HTTP clients of one episode, with the methods, return values and errors of ``InferenceEnv``.

A step carries its number, so that sending it again after a lost answer is safe: the server plays it once and gives the
same answer again. Sessions outlive the connection, the client and the server's process:
:meth:`InferenceGymHTTP.resume` continues one. Needs httpx, but no simulator.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import httpx

from inferencegym.client.answers import json_of
from inferencegym.client.retries import Retries
from inferencegym.errors import NotResetError
from inferencegym.models import ServeAction, ServeObservation

DEFAULT_URL: Final = "http://localhost:7860"
RETRY_ADVICE: Final = "Nothing is lost: call the same method again, or resume(session_id) later"

Step = tuple[ServeObservation, float, bool, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class _Request:
    method: str
    path: str
    body: dict[str, Any] | None = None
    query: dict[str, str] | None = None


class _Episode:
    """State of a session as its client knows it; builds requests and decodes answers, and sends nothing itself."""

    def __init__(self) -> None:
        self.session_id: str | None = None
        self.steps = 0

    # ------------------------------------------------------------ requests

    def reset(
        self, seed: int | None, task_id: int | str | None, config: Mapping[str, Any] | None, session_id: str | None
    ) -> _Request:
        given = {"seed": seed, "task_id": task_id, "config": config, "session_id": session_id}
        body = {name: value for name, value in given.items() if value is not None}
        return _Request("POST", "/reset", body)

    def step(self, action: ServeAction | Mapping[str, Any]) -> _Request:
        if isinstance(action, ServeAction):
            action.validate()
            action = action.to_dict()
        # An action of OpenEnv has metadata for its own interface.
        dump = getattr(action, "model_dump", lambda **_: dict(action))
        knobs = dump(exclude={"metadata"}, exclude_unset=True)
        body = {"session_id": self.known_id(), "action": knobs, "step": self.steps + 1}
        return _Request("POST", "/step", body)

    def state(self, session_id: str | None = None) -> _Request:
        return _Request("GET", "/state", query={"session_id": session_id or self.known_id()})

    def grade(
        self,
        task_id: int | str | None,
        episode_log: Sequence[Mapping[str, Any]] | None,
        seed: int | None,
        config: Mapping[str, Any] | None,
        verify: bool,
    ) -> _Request:
        if episode_log is None:
            return _Request("POST", "/grader", {"session_id": self.known_id()})
        given = {"task_id": task_id, "seed": seed, "config": config, "verify": verify or None}
        body: dict[str, Any] = {"episode_log": list(episode_log)}
        body |= {name: value for name, value in given.items() if value is not None}
        return _Request("POST", "/grader", body)

    def known_id(self) -> str:
        if self.session_id is None:
            raise NotResetError("this client has no episode: call reset(), or resume(session_id) to continue one")
        return self.session_id

    # ------------------------------------------------------------ answers

    def was_reset(self, answer: Mapping[str, Any]) -> ServeObservation:
        self.session_id, self.steps = answer["session_id"], 0
        return ServeObservation(**answer["observation"])

    def was_stepped(self, answer: Mapping[str, Any]) -> Step:
        self.steps += 1
        return ServeObservation(**answer["observation"]), answer["reward"], answer["done"], answer["info"]

    def was_resumed(self, session_id: str, answer: Mapping[str, Any]) -> ServeObservation:
        self.session_id, self.steps = session_id, answer["step_count"]
        return ServeObservation(**answer["observation"])


class _Client:
    """Base of the blocking and the asyncio client."""

    def __init__(self, retry_s: float | None) -> None:
        self._episode = _Episode()
        self._retries = Retries(retry_s, RETRY_ADVICE)

    @property
    def session_id(self) -> str | None:
        """Id of the session, for :meth:`InferenceGymHTTP.resume` from anywhere; None before the first reset."""
        return self._episode.session_id


class InferenceGymHTTP(_Client):
    """One serving episode on a server, over HTTP.

    ``reset`` and ``step`` have the arguments, results and errors of ``InferenceEnv``. ``api_key`` defaults to the
    environment variable INFERENCEGYM_API_KEY, ``client_id`` to INFERENCEGYM_CLIENT_ID: a proxy can use it to spread
    clients at one address over servers. ``timeout_s`` limits one attempt. After a lost answer, a busy server or a
    restart the client tries again for ``retry_s`` (default: 60 s, but 1 s for a server that it never reached).
    """

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        *,
        api_key: str | None = None,
        timeout_s: float = 30.0,
        client_id: str | None = None,
        retry_s: float | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        super().__init__(retry_s)
        self._client = httpx.Client(
            base_url=base_url, timeout=timeout_s, transport=transport, headers=caller_headers(api_key, client_id)
        )

    def reset(
        self,
        seed: int | None = None,
        task_id: int | str | None = None,
        config: Mapping[str, Any] | None = None,
        session_id: str | None = None,
    ) -> ServeObservation:
        """Start an episode, in a new session or in the one that ``session_id`` names; returns its first observation."""
        return self._episode.was_reset(self._send(self._episode.reset(seed, task_id, config, session_id)))

    def step(self, action: ServeAction | Mapping[str, Any]) -> Step:
        """Take one step of one second and return observation, reward, done and info.

        The step is played once, however often it has to be sent.
        """
        return self._episode.was_stepped(self._send(self._episode.step(action)))

    def resume(self, session_id: str) -> ServeObservation:
        """Continue a session that another client, or this one before a crash, began; returns its observation."""
        return self._episode.was_resumed(session_id, self._send(self._episode.state(session_id)))

    def state(self) -> dict[str, Any]:
        """State of the episode, as GET /state returns it."""
        return self._send(self._episode.state())

    def grade(
        self,
        task_id: int | str | None = None,
        episode_log: Sequence[Mapping[str, Any]] | None = None,
        seed: int | None = None,
        config: Mapping[str, Any] | None = None,
        verify: bool = False,
    ) -> dict[str, Any]:
        """Grade this session's episode, or a log of ``task_id``; ``verify`` replays it from ``seed`` and ``config``."""
        return self._send(self._episode.grade(task_id, episode_log, seed, config, verify))

    def get(self, path: str) -> dict[str, Any]:
        """GET a path such as ``/tasks``, ``/info``, ``/baseline`` or ``/health``; returns the JSON answer."""
        return self._send(_Request("GET", path))

    def close(self) -> None:
        """Close the connection; the session stays on the server."""
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _send(self, request: _Request) -> dict[str, Any]:
        answer = self._retries.send(self._client, request.method, request.path, json=request.body, params=request.query)
        return json_of(answer)


class AsyncInferenceGymHTTP(_Client):
    """:class:`InferenceGymHTTP` for asyncio: its methods are coroutines."""

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        *,
        api_key: str | None = None,
        timeout_s: float = 30.0,
        client_id: str | None = None,
        retry_s: float | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        super().__init__(retry_s)
        self._client = httpx.AsyncClient(
            base_url=base_url, timeout=timeout_s, transport=transport, headers=caller_headers(api_key, client_id)
        )

    async def reset(
        self,
        seed: int | None = None,
        task_id: int | str | None = None,
        config: Mapping[str, Any] | None = None,
        session_id: str | None = None,
    ) -> ServeObservation:
        """As in :class:`InferenceGymHTTP`."""
        return self._episode.was_reset(await self._send(self._episode.reset(seed, task_id, config, session_id)))

    async def step(self, action: ServeAction | Mapping[str, Any]) -> Step:
        """As in :class:`InferenceGymHTTP`."""
        return self._episode.was_stepped(await self._send(self._episode.step(action)))

    async def resume(self, session_id: str) -> ServeObservation:
        """As in :class:`InferenceGymHTTP`."""
        return self._episode.was_resumed(session_id, await self._send(self._episode.state(session_id)))

    async def state(self) -> dict[str, Any]:
        """As in :class:`InferenceGymHTTP`."""
        return await self._send(self._episode.state())

    async def grade(
        self,
        task_id: int | str | None = None,
        episode_log: Sequence[Mapping[str, Any]] | None = None,
        seed: int | None = None,
        config: Mapping[str, Any] | None = None,
        verify: bool = False,
    ) -> dict[str, Any]:
        """As in :class:`InferenceGymHTTP`."""
        return await self._send(self._episode.grade(task_id, episode_log, seed, config, verify))

    async def get(self, path: str) -> dict[str, Any]:
        """As in :class:`InferenceGymHTTP`."""
        return await self._send(_Request("GET", path))

    async def close(self) -> None:
        """As in :class:`InferenceGymHTTP`."""
        await self._client.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def _send(self, request: _Request) -> dict[str, Any]:
        answer = await self._retries.send_async(
            self._client, request.method, request.path, json=request.body, params=request.query
        )
        return json_of(answer)


def caller_headers(api_key: str | None = None, client_id: str | None = None) -> dict[str, str]:
    """HTTP headers with an API key and a client's id.

    By default the key is the first one in INFERENCEGYM_API_KEY, and the id that in INFERENCEGYM_CLIENT_ID.
    """
    key = api_key or os.environ.get("INFERENCEGYM_API_KEY", "").partition(",")[0].strip()
    name = client_id or os.environ.get("INFERENCEGYM_CLIENT_ID", "")
    return {header: value for header, value in (("x-api-key", key), ("x-client-id", name)) if value}
