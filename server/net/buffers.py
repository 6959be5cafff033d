"""Bounds on memory that requests hold: bodies being received and answers being sent, per client and in all.

Requests and answers pass here in pieces, so that uvicorn's flow control works for large answers too: if it got a whole
answer at once, it would keep all that the client has not read. The kernel closes connections whose client reads nothing
(TCP_USER_TIMEOUT, see :mod:`server.app`), and answers slower than ``answer_timeout_s`` are aborted here.
"""

from __future__ import annotations

import asyncio
from typing import Final

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inferencegym.errors import InferenceGymError
from server.net.errors import OverloadedError, RateLimitedError
from server.net.limits import Callers
from server.net.problems import problem_reply
from server.settings import Settings

PIECE_BYTES: Final = 65_536
"""Largest piece of an answer, about as much as uvicorn buffers for a client that does not read. Requests and answers up
to this size are not counted, so steps have no extra cost.
"""

RETRY_AFTER_S: Final = 1.0
_HELD_KEY: Final = "inferencegym.held"


class BufferBudget:
    """Limits on the bytes that requests hold in memory, per client and per process."""

    def __init__(self, settings: Settings) -> None:
        self._most = settings.max_buffered_bytes
        self._most_per_client = settings.max_buffered_bytes_per_client
        self._held: dict[str, int] = {}
        self._total = 0

    def take(self, client: str, n_bytes: int) -> None:
        """Raises RateLimitedError above the client's limit, OverloadedError above the process's limit."""
        held = self._held.get(client, 0) + n_bytes
        if held > self._most_per_client:
            said = (
                f"requests of one client may hold {self._most_per_client:,} bytes at once, bodies and answers together"
            )
            raise RateLimitedError(said, RETRY_AFTER_S)
        if self._total + n_bytes > self._most:
            raise OverloadedError(f"requests already hold {self._most:,} bytes, the limit of the server")
        self._held[client] = held
        self._total += n_bytes

    def give_back(self, client: str, n_bytes: int) -> None:
        """Release bytes."""
        self._total -= n_bytes
        self._held[client] -= n_bytes
        if not self._held[client]:
            del self._held[client]


class BoundedBuffers:
    """ASGI middleware that counts what each request holds against the :class:`BufferBudget`, and paces its answer."""

    def __init__(self, app: ASGIApp, settings: Settings, callers: Callers) -> None:
        self.app = app
        self._budget = BufferBudget(settings)
        self._callers = callers
        self._timeout_s = settings.answer_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        held = Held(self._budget, self._callers, scope)
        scope[_HELD_KEY] = held
        answer: Message | None = None

        async def receive_counted() -> Message:
            message = await receive()
            size = len(message.get("body", b""))
            if held.body or size > PIECE_BYTES or message.get("more_body", False):
                held.hold_body(size)
            return message

        async def send_paced(message: Message) -> None:
            nonlocal answer
            if message["type"] == "http.response.start":
                # Held back until it is clear that the body can be sent.
                answer = message
                held.release_body()
                return
            if len(message.get("body", b"")) > PIECE_BYTES:
                try:
                    held.hold_answer(len(message["body"]))
                except InferenceGymError as error:
                    refusal = problem_reply(error, scope["path"])
                    status, headers = refusal.status_code, refusal.raw_headers
                    answer = {"type": "http.response.start", "status": status, "headers": headers}
                    message = {"type": "http.response.body", "body": refusal.body}
            if answer is not None:
                start, answer = answer, None
                await send(start)
            await self._send_in_pieces(message, send)

        try:
            await self.app(scope, receive_counted, send_paced)
        finally:
            held.release()

    async def _send_in_pieces(self, message: Message, send: Send) -> None:
        """Raises ClientDisconnect if the client does not read a large answer in time."""
        body: bytes = message.get("body", b"")
        if len(body) <= PIECE_BYTES:
            await send(message)
            return
        try:
            async with asyncio.timeout(self._timeout_s):
                for at in range(0, len(body), PIECE_BYTES):
                    piece = body[at : at + PIECE_BYTES]
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                # Waits until nearly everything is read.
                await send({**message, "body": b""})
        except TimeoutError as error:
            raise ClientDisconnect from error


class Held:
    """Bytes of one request in the :class:`BufferBudget`: its body, then its answer."""

    __slots__ = ("_answer", "_budget", "_callers", "_client", "_scope", "body")

    def __init__(self, budget: BufferBudget, callers: Callers, scope: Scope) -> None:
        self._budget = budget
        self._callers = callers
        self._scope = scope
        self._client: str | None = None
        self._answer = 0
        self.body = 0

    def hold_body(self, n_bytes: int) -> None:
        """Count a piece of the body. Raises RateLimitedError or OverloadedError."""
        self._take(n_bytes)
        self.body += n_bytes

    def hold_answer(self, n_bytes: int) -> None:
        """Count an answer of this size, or its part beyond the reserved size. Raises as hold_body."""
        more = max(0, n_bytes - self._answer)
        self._take(more)
        self._answer += more

    def release_body(self) -> None:
        """The body is no longer needed."""
        if self.body:
            self._give_back(self.body)
            self.body = 0

    def release(self) -> None:
        """Release all bytes."""
        self.release_body()
        if self._answer:
            self._give_back(self._answer)
            self._answer = 0

    def _take(self, n_bytes: int) -> None:
        # Most requests hold no counted bytes, so their client is not looked up.
        if self._client is None:
            self._client = self._callers.client(self._scope)
        self._budget.take(self._client, n_bytes)

    def _give_back(self, n_bytes: int) -> None:
        assert self._client is not None
        self._budget.give_back(self._client, n_bytes)


def reserve_answer(scope: Scope, n_bytes: int) -> None:
    """Count an answer of this size before it is made, so that a refused request changes nothing.

    Raises RateLimitedError or OverloadedError.
    """
    held: Held = scope[_HELD_KEY]
    if n_bytes > PIECE_BYTES:
        held.hold_answer(n_bytes)
