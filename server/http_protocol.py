"""HTTP as uvicorn speaks it, with limits on what is no body, and a short way for requests answered where they arrive.

Uvicorn waits for a request's head for ever and keeps all of it, so clients that send it byte by byte could hold every
file descriptor of the server, and endless heads all of its memory. So could the fields after a chunked body, and what
goes on arriving of a request that has its answer. (Bodies are the business of
:func:`server.net.json_io.read_body`.) It also
sends an answer in two pieces; here they leave together.

And it starts a task for every request, whose way through the application takes longer than a step of the simulator. So
an application may leave functions in the state of its lifespan that are asked first, and answer those requests that
have nothing to wait for; all others go the usual way.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from server.settings import load_settings

log = logging.getLogger(__name__)

ANSWER_AT_ONCE: Final = "inferencegym.answer_at_once"
"""Key of the lifespan's state under which an application leaves the functions that are asked first, by path."""

Answer = tuple[int, list[tuple[bytes, bytes]], bytes]
"""Status, headers (one of them ``content-length``) and body."""
AnswerAtOnce = Callable[[Mapping[str, Any], bytes], Answer | None]
"""From the scope of a POST request and its body to the answer, or to None or an exception, with nothing changed."""

BODY_FOLLOWS_S: Final = 0.005
"""Many clients send head and body one after the other. A body that takes longer is waited for in the usual way."""

MAX_HEAD_BYTES: Final = 65_536
"""Most bytes of a head, and most that may follow each other after it without one byte of a body among them."""
MAX_REST_BYTES: Final = 1_048_576
"""Most bytes of a request that are read, and dropped, after its answer. Many clients send all of a request before they
read, and one whose connection is closed meanwhile may never see its answer."""
_INTERIM: Final = b"HTTP/1.1 100 "
_TOO_LARGE: Final = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: text/plain\r\ncontent-length: %d\r\n"
    b"connection: close\r\n\r\n%s"
)

_NOWHERE: Final[deque[tuple[bytes, bytes]]] = deque(maxlen=0)


@lru_cache(maxsize=1)
def head_timeout_s() -> float:
    """Longest wait for a head: the same as for a body.

    From the environment, because uvicorn gives a protocol no settings of the application; :func:`server.app.main` and
    its workers build the application from the same environment.
    """
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
    """Closes connections on which what is no body does not arrive in time or does not end; asks :data:`ANSWER_AT_ONCE`.

    A head that comes in one piece sets no timer.
    """

    _head_pending = True
    _idle_bytes = 0
    _last: RequestResponseCycle | None = None
    _timer: asyncio.TimerHandle | None = None
    _reading = False
    _held: tuple[RequestResponseCycle, Any] | None = None
    _body_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        self._idle_bytes += len(data)
        self._reading = True
        super().data_received(data)
        self._reading = False
        if self._held is not None:
            self._answer_held()
        answered = self._is_answered()
        if self._idle_bytes > (MAX_REST_BYTES if answered else MAX_HEAD_BYTES):
            self._refuse()
        # Uvicorn's own timer is one for silence: it is set with an answer, and gone once anything arrives.
        elif self._timer is None and (self._head_pending or (answered and self.timeout_keep_alive_task is None)):
            self._wait_for_head()

    def on_message_begin(self) -> None:
        self._head_pending = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head_pending = False
        self._idle_bytes = 0
        self._stop_waiting()
        before = self.cycle
        super().on_headers_complete()
        # A request for another protocol has no answer of its own, and what follows it is that protocol's business.
        if self.cycle is before:
            self._last = None
            return
        self._last = self.cycle
        # Fields that follow a chunked body would join the head's, which the application has read and believes.
        self.headers = _NOWHERE  # type: ignore[assignment]
        # An answer to HEAD has no body to wait for.
        if self.scope["method"] != "HEAD":
            self.cycle.transport = OneWrite(self.transport)  # type: ignore[assignment]

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        if not self._is_answered():
            self._idle_bytes = 0

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._idle_bytes = 0

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)
        if self._held is not None:
            self._start_held()

    # ------------------------------------------------------------ answers at once

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        # Uvicorn calls this when a head is complete; the body may be in the same piece, which is being read. (If some
        # version of uvicorn starts its tasks elsewhere, all requests go the usual way.)
        if self._reading and self._function(cycle) is not None and app is self.app:
            self._held = cycle, app
        else:
            super()._start_asgi_task(cycle, app)

    def _function(self, cycle: RequestResponseCycle) -> AnswerAtOnce | None:
        functions: Mapping[str, AnswerAtOnce] = self.app_state.get(ANSWER_AT_ONCE, {})
        return functions.get(cycle.scope["path"]) if cycle.scope["method"] == "POST" else None

    def _answer_held(self) -> None:
        assert self._held is not None
        cycle, _ = self._held
        if cycle.more_body and not cycle.waiting_for_100_continue and not self.transport.is_closing():
            if self._body_timer is None:
                self._body_timer = self.loop.call_later(BODY_FOLLOWS_S, self._start_held)
            return
        answer = self._answer(cycle) if self._is_ready(cycle) else None
        if answer is None:
            self._start_held()
            return
        self._release()
        status, headers, body = answer
        lines = [b"%b: %b\r\n" % header for header in (*self.server_state.default_headers, *headers)]
        self.transport.write(b"".join((STATUS_LINE[status], *lines, b"\r\n", body)))
        cycle.response_started = cycle.response_complete = True
        self.on_response_complete()

    def _start_held(self) -> None:
        super()._start_asgi_task(*self._release())

    def _release(self) -> tuple[RequestResponseCycle, Any]:
        assert self._held is not None
        held, self._held = self._held, None
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None
        return held

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
        function = self._function(cycle)
        assert function is not None
        try:
            return function(cycle.scope, bytes(cycle.body))
        except Exception:
            # It has changed nothing, so the application may be asked; that reports what it meets.
            log.exception("a request could not be answered at once; it goes the usual way, which reports what it meets")
            return None

    # ------------------------------------------------------------ heads, and what follows bodies and answers

    def _is_answered(self) -> bool:
        """Whether the last request has its answer, and no head of another one has begun."""
        return not self._head_pending and self._last is not None and self._last.response_complete

    def _wait_for_head(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(head_timeout_s(), self._give_up)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self) -> None:
        if not self.transport.is_closing():
            if self._head_pending:
                said = b"the head of a request may have %d bytes" % MAX_HEAD_BYTES
                self.transport.write(_TOO_LARGE % (len(said), said))
            self.transport.close()

    def _give_up(self) -> None:
        self._timer = None
        if not self.transport.is_closing():
            self.transport.close()
