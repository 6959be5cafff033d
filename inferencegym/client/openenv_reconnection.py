"""Reconnection of OpenEnv's clients: an episode continues after a lost socket, and no step is played twice.

The rules are written once for asynchronous and synchronous use: the methods of :class:`Episode` are generators that
yield the calls of OpenEnv's client to make, and :func:`make_calls` makes them.
"""

from __future__ import annotations

import asyncio
import inspect
import secrets
import time
from collections.abc import Awaitable, Callable, Generator, Mapping
from typing import Any, Final, Protocol

import httpx
from websockets.exceptions import ConnectionClosed, InvalidStatus

from inferencegym.client.answers import error_of, json_of
from inferencegym.client.retries import RETRIED_STATUSES, Attempts
from inferencegym.error_text import read_error
from inferencegym.errors import CapacityError, InferenceGymError, NotResetError, StoreError

_LOST: Final = (ConnectionClosed, TimeoutError, OSError)
"""Errors of a dropped, silent or unreachable server; OpenEnv's own ConnectionError is an OSError."""

Calls = Generator[Callable[[], Any] | float, Any, Any]
"""Yields calls of OpenEnv's client and pauses in seconds; receives each call's result, or has its error raised."""


class Player(Protocol):
    """Interface that reconnection needs from the client of an episode."""

    retry_s: float

    @property
    def base_url(self) -> str | None:
        """Address of the server."""

    def numbered(self, action: Any, number: int) -> Any:
        """The action with the step's number, under which the server plays it once however often it is sent."""


class Episode:
    """Episode of one client, with the data needed to continue it over another socket.

    ``plain`` is OpenEnv's own client, asynchronous or synchronous: its ``reset``, ``step``, ``state`` and
    ``disconnect`` are called; the first three open a socket where there is none.
    """

    def __init__(self, player: Player) -> None:
        self.id: str | None = None
        """Id of the episode; None before the first reset."""
        self.has_socket = False
        """True if a socket is open, as far as the client knows; False before the first call and after a loss."""
        self._player = player
        self._taken = 0
        self._info = False

    def reset(self, plain: Any, arguments: Mapping[str, Any]) -> Calls:
        """Calls that start an episode, or continue the one in the arguments."""
        wanted = {"episode_id": secrets.token_hex(16), **arguments}

        def send(_again: bool) -> Calls:
            result = yield lambda: plain.reset(**wanted)
            # Only the state of a continued episode has its number of steps.
            taken = (yield plain.state).step_count if wanted.get("resume") else 0
            return result, taken

        result, self._taken = yield from self._until_answered(plain, send, resume=False)
        self.id, self._info = wanted["episode_id"], bool(wanted.get("info", False))
        return result

    def step(self, plain: Any, action: Any, arguments: Mapping[str, Any]) -> Calls:
        """Calls that take one step; a step repeated after a loss has its number."""

        def send(again: bool) -> Calls:
            sent = self._player.numbered(action, self._taken + 1) if again else action
            return (yield lambda: plain.step(sent, **arguments))

        result = yield from self._until_answered(plain, send, resume=True)
        self._taken += 1
        return result

    def state(self, plain: Any) -> Calls:
        """Calls that ask for the episode's state."""

        def send(_again: bool) -> Calls:
            state = yield plain.state
            if state.episode_id is None and self.id is not None:
                raise NotResetError(f"the server has not resumed episode {self.id} on this socket yet")
            return state

        return (yield from self._until_answered(plain, send, resume=True))

    def connect(self, plain: Any, connect: Callable[[], Any]) -> Calls:
        """Calls that open the socket with OpenEnv's ``connect``."""

        def send(_again: bool) -> Calls:
            return (yield connect)

        return (yield from self._until_answered(plain, send, resume=False))

    def _until_answered(self, plain: Any, send: Callable[[bool], Calls], resume: bool) -> Calls:
        """Send a request, and repeat it (flag True) for up to ``retry_s``."""
        lost: Exception | None = None
        # A socket that was open may have been lost unnoticed; OpenEnv's client then opens another by itself.
        may_be_lost = resume or self.has_socket
        attempts = Attempts(self._player.base_url, self._player.retry_s)
        while True:
            try:
                if lost is not None and resume and self.id is not None:
                    yield from self._with_local_errors(plain, self._resume(plain))
                return (yield from self._with_local_errors(plain, send(lost is not None)))
            except NotResetError as error:
                # A new socket, which is not connected to the episode yet.
                if self.id is None or not resume or isinstance(lost, NotResetError):
                    raise
                lost = error
            except CapacityError as error:
                # The server refused the socket, and closed it; a full store of sessions does not close it.
                if self.id is None or self.has_socket or (lost is None and not may_be_lost):
                    raise
                lost = error
            except StoreError as error:
                lost = error
            except _LOST as error:
                _raise_refusal(error, self._player.base_url)
                # A provider that cannot start its container has no address.
                if self._player.base_url is None:
                    raise
                lost = error
            pause_s = attempts.pause_s(repr(lost))
            if pause_s is None:
                raise self._given_up(attempts, lost) from lost
            yield pause_s

    def _given_up(self, attempts: Attempts, lost: Exception) -> InferenceGymError:
        kept = f"the server keeps the episode: reset(episode_id={self.id!r}, resume=True) continues it"
        error = attempts.given_up(repr(lost), "" if self.id is None else kept)
        return type(lost)(str(error)) if isinstance(lost, InferenceGymError) else error

    def _resume(self, plain: Any) -> Calls:
        return (yield lambda: plain.reset(episode_id=self.id, resume=True, info=self._info))

    def _with_local_errors(self, plain: Any, calls: Calls) -> Calls:
        """Make the calls; an error frame raises the exception of local use."""
        try:
            answer = yield from calls
        except RuntimeError as error:
            self.has_socket = not _is_full(error)
            if _is_full(error):
                # The server closes it, but the client may notice only during the next call.
                yield plain.disconnect
            ours = _ours(error)
            if ours is None:
                raise
            raise ours from error
        self.has_socket = True
        return answer


def _raise_refusal(error: Exception, url: str | None) -> None:
    """Raise the server's own error where it refused the handshake for good, as without its API key."""
    refused = error.__cause__
    if isinstance(refused, InvalidStatus) and refused.response.status_code not in RETRIED_STATUSES:
        answer = refused.response
        # OpenEnv's client raises a ConnectionError from it, whose text has only the status.
        json_of(httpx.Response(answer.status_code, content=bytes(answer.body), request=httpx.Request("GET", url or "")))


def make_calls(calls: Calls) -> Any:
    """Result of the calls, or a coroutine of it where OpenEnv's client answers with something to await.

    OpenEnv decides at every call, by where it comes from and how the client was used before, whether it blocks.
    """
    try:
        wanted = next(calls)
        while True:
            if isinstance(wanted, float):
                time.sleep(wanted)
                wanted = calls.send(None)
                continue
            try:
                answer = wanted()
            except (RuntimeError, *_LOST) as error:
                wanted = calls.throw(error)
                continue
            if inspect.isawaitable(answer):
                return _make_calls_later(calls, answer)
            wanted = calls.send(answer)
    except StopIteration as end:
        return end.value


async def _make_calls_later(calls: Calls, awaited: Awaitable[Any]) -> Any:
    try:
        while True:
            try:
                answer = await awaited
            except (RuntimeError, *_LOST) as error:
                wanted = calls.throw(error)
            else:
                wanted = calls.send(answer)
            awaited = asyncio.sleep(wanted) if isinstance(wanted, float) else wanted()
    except StopIteration as end:
        return end.value


def _ours(error: RuntimeError) -> Exception | None:
    """The exception of local use for an error frame, which OpenEnv raises as RuntimeError whatever its cause."""
    found = read_error(str(error))
    if found is not None:
        message, code = found
        status = 422 if str(error).endswith("(code: VALIDATION_ERROR)") else 400
        return error_of(code, message.removeprefix("Server error: "), status)
    if _is_full(error):
        return CapacityError(f"{error}; close a client, or raise INFERENCEGYM_MAX_CONCURRENT_ENVS on the server")
    return None


def _is_full(error: RuntimeError) -> bool:
    """Whether the server refused the socket because it has reached its limit of sockets."""
    return str(error).endswith("(code: CAPACITY_REACHED)")
