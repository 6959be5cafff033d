"""HTTP as uvicorn speaks it, with limits on heads, and a short way for requests that can be answered where they arrive.

Uvicorn waits for a request's head for ever and keeps all of it, so clients that send it byte by byte could hold every
file descriptor of the server, and endless heads all of its memory. (Bodies are the business of
:func:`server.wire.read_body`.) It also sends an answer in two pieces; here they leave together.

And it starts a task for every request, whose way through the application takes longer than a step of the simulator. So
an application may leave a function in the state of its lifespan that is asked first, and answers those requests that
have nothing to wait for; all others go the usual way.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from server.settings import load_settings

log = logging.getLogger(__name__)

ANSWER_AT_ONCE: Final = "inferencegym.answer_at_once"
"""Key of the lifespan's state under which an application leaves the function that is asked first."""

Answer = tuple[int, list[tuple[bytes, bytes]], bytes]
"""Status, headers (one of them ``content-length``) and body."""
AnswerAtOnce = Callable[[Mapping[str, Any], bytes], Answer | None]
"""From the scope of a request and its body to the answer, or to None, with nothing changed."""

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
    """Closes a connection whose request head does not arrive in time or does not end; asks :data:`ANSWER_AT_ONCE`.

    A head that comes in one piece sets no timer.
    """

    _head_pending = True
    _head_bytes = 0
    _timer: asyncio.TimerHandle | None = None
    _reading = False
    _held: tuple[RequestResponseCycle, Any] | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        self._reading = True
        super().data_received(data)
        self._reading = False
        if self._held is not None:
            self._begin(*self._held)
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

    # ------------------------------------------------------------ answers at once

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        # Uvicorn calls this when a head is complete. The body is mostly in the same piece: it is waited for until all
        # of the piece is read. (If some version of uvicorn starts its tasks elsewhere, all requests go the usual way.)
        if self._reading:
            self._held = cycle, app
        else:
            super()._start_asgi_task(cycle, app)

    def _begin(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._held = None
        answer = self._answer(cycle) if app is self.app and self._is_ready(cycle) else None
        if answer is None:
            super()._start_asgi_task(cycle, app)
            return
        status, headers, body = answer
        lines = [b"%b: %b\r\n" % header for header in (*self.server_state.default_headers, *headers)]
        self.transport.write(b"".join((STATUS_LINE[status], *lines, b"\r\n", body)))
        cycle.response_started = cycle.response_complete = True
        self.on_response_complete()

    def _is_ready(self, cycle: RequestResponseCycle) -> bool:
        """Whether a request has arrived as a whole, and its answer can leave."""
        return (
            not cycle.more_body
            and not cycle.waiting_for_100_continue
            and cycle.keep_alive
            and not self.flow.write_paused
            and not self.transport.is_closing()
        )

    def _answer(self, cycle: RequestResponseCycle) -> Answer | None:
        answer: AnswerAtOnce | None = self.app_state.get(ANSWER_AT_ONCE)
        try:
            return None if answer is None else answer(cycle.scope, bytes(cycle.body))
        except Exception:
            log.exception("a request could not be answered at once; it goes the usual way, which reports what it meets")
            return None

    # ------------------------------------------------------------ heads

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
