"""Bounds on memory that requests hold: bodies being received and reserved answers, per client and in all.

Requests and answers pass here in pieces, so that uvicorn's flow control works for large answers too: if it got a whole
answer at once, it would keep all that the client has not read. The kernel closes connections whose client reads nothing
(TCP_USER_TIMEOUT, see :mod:`server.app`); bodies and answers slower than ``transfer_timeout_s`` are aborted here.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Final

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.net.errors import BodyTimeoutError, OverloadedError, RateLimitedError
from server.net.limits import sender_of
from server.settings import Settings

PIECE_BYTES: Final = 65_536
"""Largest piece of an answer, about as much as uvicorn buffers for a client that does not read. Requests and answers up
to this size are not counted, so steps have no extra cost.
"""
LEAST_PER_CLIENT_BYTES: Final = 67_108_864
"""Bytes that the requests of one client may hold in any case: room for the largest body and its answer."""

RETRY_AFTER_S: Final = 1.0
_HELD_KEY: Final = "inferencegym.held"
ARRIVED_KEY: Final = "inferencegym.arrived"
"""Key of the ASGI scope's state, set when the whole request has arrived."""


class BoundedBuffers:
    """ASGI middleware that counts the bytes which each request holds, and paces its answer."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self.app = app
        self._most = settings.max_buffered_bytes
        self._most_per_client = max(LEAST_PER_CLIENT_BYTES, self._most // 4)
        self._timeout_s = settings.transfer_timeout_s
        self._bytes: Counter[str] = Counter()
        """Bytes held by the requests of each client."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        held = scope[_HELD_KEY] = Held(self, scope)
        until_s = asyncio.get_running_loop().time() + self._timeout_s
        arrived = scope.get("state", {}).get(ARRIVED_KEY, False)

        async def receive_counted() -> Message:
            """Raises BodyTimeoutError if the client does not send its body in time."""
            nonlocal arrived
            try:
                # A time limit costs more than receiving a body that is there.
                async with nullcontext() if arrived else asyncio.timeout_at(until_s):
                    message = await receive()
            except TimeoutError as error:
                raise BodyTimeoutError(f"the body did not arrive within {self._timeout_s:g} s") from error
            size, arrived = len(message.get("body", b"")), not message.get("more_body", False)
            if held.body or size > PIECE_BYTES or not arrived:
                held.hold(held.body + size, held.answer)
            return message

        async def send_in_pieces(message: Message) -> None:
            """Raises ClientDisconnect if the client does not read a large answer in time."""
            if held.body and message["type"] == "http.response.start":
                held.hold(0, held.answer)
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

        try:
            await self.app(scope, receive_counted, send_in_pieces)
        finally:
            held.hold(0, 0)

    def count(self, client: str, n_bytes: int) -> None:
        """Count bytes that a client's request holds, or fewer of them. Raises RateLimitedError or OverloadedError."""
        if n_bytes > self._most_per_client - self._bytes[client]:
            most = f"{self._most_per_client:,}"
            said = f"requests of one client may hold {most} bytes at once, bodies and answers together"
            raise RateLimitedError(said, RETRY_AFTER_S)
        if n_bytes > self._most - self._bytes.total():
            raise OverloadedError(f"requests already hold {self._most:,} bytes, the limit of the server")
        self._bytes[client] += n_bytes
        self._bytes += Counter()  # forgets clients that hold nothing


@dataclass(slots=True)
class Held:
    """Bytes that a request holds of its body and of its answer."""

    buffers: BoundedBuffers
    scope: Scope
    body: int = 0
    answer: int = 0

    def hold(self, body: int, answer: int) -> None:
        """Hold so many bytes instead. Raises RateLimitedError or OverloadedError if they are too many."""
        if more := body + answer - self.body - self.answer:
            self.buffers.count(sender_of(self.scope), more)
        self.body, self.answer = body, answer


def reserve_answer(scope: Scope, n_bytes: int) -> None:
    """Count an answer of this size before it is made, so that a refused request changes nothing.

    Raises RateLimitedError or OverloadedError.
    """
    held: Held = scope[_HELD_KEY]
    if n_bytes > PIECE_BYTES:
        held.hold(held.body, n_bytes)
