"""HTTP as uvicorn speaks it, with limits on how long the head of a request may take, and how long it may be.

Uvicorn waits for a request's head for ever and keeps all of it, so clients that send it byte by byte could hold every
file descriptor of the server, and endless heads all of its memory. (Bodies are the business of
:func:`server.wire.read_body`.) It also sends an answer in two pieces; here they leave together.
"""

from __future__ import annotations

import asyncio
from functools import lru_cache
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from server.settings import load_settings

MAX_HEAD_BYTES: Final = 65_536
_INTERIM: Final = b"HTTP/1.1 100 "
_TOO_LARGE: Final = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: text/plain\r\ncontent-length: %d\r\n"
    b"connection: close\r\n\r\n%s"
)


@lru_cache(maxsize=1)
def head_timeout_s() -> float:
    """Longest wait for a head: the same as for a body."""
    return load_settings().body_timeout_s


class OneWrite:
    """Where one answer is written: a head that announces the length of a body waits for it, and leaves with it.

    Uvicorn writes head and body one by one, which are two system calls here and two awakenings of the client.
    """

    __slots__ = ("_begun", "_head", "_transport")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._head = b""
        self._begun = False

    def write(self, data: bytes) -> None:
        if not self._begun:
            if not self._head and b"\r\ncontent-length: " in data:
                self._head = data
                return
            self._begun = not data.startswith(_INTERIM)
            data = self._head + data
        self._transport.write(data)

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        if not self._begun:
            self._transport.write(self._head)
        self._transport.close()


class PatientProtocol(HttpToolsProtocol):
    """Closes a connection whose request head does not arrive in time or does not end.

    A head that comes in one piece sets no timer.
    """

    _head_pending = True
    _head_bytes = 0
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._head_pending:
            self._head_bytes = 0
            return
        self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse_head()
        elif self._timer is None:
            self._wait_for_head()

    def on_message_begin(self) -> None:
        self._head_pending = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head_pending = False
        self._stop_waiting()
        before = self.cycle
        super().on_headers_complete()
        # A request for another protocol has no answer of its own, and an answer to HEAD no body to wait for.
        if self.cycle is not before and self.scope["method"] != "HEAD":
            self.cycle.transport = OneWrite(self.transport)  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait_for_head(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(head_timeout_s(), self._give_up)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse_head(self) -> None:
        if not self.transport.is_closing():
            said = b"the head of a request may have %d bytes" % MAX_HEAD_BYTES
            self.transport.write(_TOO_LARGE % (len(said), said))
            self.transport.close()

    def _give_up(self) -> None:
        self._timer = None
        if not self.transport.is_closing():
            self.transport.close()
