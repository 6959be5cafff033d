"""uvicorn's HTTP protocol on httptools, with bounds for request heads and trailers, and answers in one write."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from server.net.buffers import ARRIVED_KEY

MAX_HEAD_BYTES: Final = 65_536
"""Most bytes of path, query and headers of a request; uvicorn with httptools does not limit them."""
MAX_INCOMPLETE_BYTES: Final = 524_288
"""Bytes that may arrive before a head, or a part of a body, is complete: the largest accepted head (64 KB) plus the
largest read from a socket (256 KB), with some margin. httptools joins the pieces of an endless header again and again.
"""
MAX_DROPPED_BYTES: Final = 33_554_432
MAX_DROPPING_S: Final = 10.0
"""Bytes and seconds of the rest of a refused body that are read before its connection is closed. A close with unread
bytes resets the connection, and a proxy or client that still sends would not get the answer.
"""
log = logging.getLogger(__name__)


class BoundedHttp(HttpToolsProtocol):
    """Refuses long heads, cuts off heads and trailers that never end, and drops trailers, which uvicorn would merge.

    Sends the head of an answer with the beginning of its body (:class:`OneWrite`).
    """

    incomplete_bytes: int = 0
    dropped_bytes: int = 0
    in_body: bool = False

    def data_received(self, data: bytes) -> None:
        self.incomplete_bytes += len(data)
        if self.incomplete_bytes <= MAX_INCOMPLETE_BYTES:
            super().data_received(data)
        elif not self.transport.is_closing():
            log.warning("a connection was cut off: the head or trailer of its request does not end")
            self.send_400_response("The head of the request is endless.")

    def on_message_begin(self) -> None:
        self.incomplete_bytes, self.dropped_bytes, self.in_body = 0, 0, False
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.in_body:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self.incomplete_bytes, self.in_body = 0, True
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MAX_HEAD_BYTES:
            raise ValueError("the head of the request is too long")  # uvicorn answers 400
        earlier = self.cycle
        super().on_headers_complete()
        # An upgrade has no cycle; nothing but a head is written for HEAD, and something before it for 100-continue.
        if self.cycle is not earlier and self.scope["method"] != "HEAD" and not self.expect_100_continue:
            self.cycle.transport = OneWrite(self.transport, self.close_after_body)

    def on_body(self, body: bytes) -> None:
        self.incomplete_bytes = 0
        if not self.parser.should_upgrade() and self.cycle.response_complete:
            self.dropped_bytes += len(body)
            if self.dropped_bytes > MAX_DROPPED_BYTES:
                self.transport.close()
        super().on_body(body)

    def on_message_complete(self) -> None:
        self.scope["state"][ARRIVED_KEY] = True
        super().on_message_complete()
        if not self.parser.should_upgrade() and self.cycle.response_complete and not self.cycle.keep_alive:
            self.transport.close()

    def close_after_body(self) -> None:
        """Close the connection when the rest of the request has arrived, or :data:`MAX_DROPPED_BYTES` of it."""
        if self.cycle.more_body:
            self.loop.call_later(MAX_DROPPING_S, self.transport.close)
        else:
            self.transport.close()


class OneWrite(asyncio.Transport):
    """Transport of one answer: keeps its head until uvicorn writes the first piece of the body, then sends both.

    Each write is a system call that may wake the client up, too early for it to get the body.
    """

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self._transport = transport
        self.close = close  # type: ignore[method-assign]
        self._head: bytes | None = None

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._head is None:
            self._head = bytes(data)
        else:
            self._transport.write(self._head + data)
            self._head = b""

    def is_closing(self) -> bool:
        return self._transport.is_closing()
