"""WebSockets: uvicorn's protocol, with limits on what a peer makes the server hold in memory, and for how long."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

from uvicorn.config import Config
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState

log = logging.getLogger(__name__)

PIECE_BYTES: Final = 1_024
"""Bytes passed to uvicorn at a time; one read may have 40,000 empty frames, and uvicorn keeps 300 bytes of each."""
MAX_BYTES_WITHOUT_MESSAGE: Final = 1_048_576
"""Bytes that may arrive before a message is complete, empty fragments included; usual pings take 24 days for them."""
CLOSE_TIMEOUT_S: Final = 5.0
"""Seconds in which a closed connection may still deliver pending data."""
PROTOCOL: Final = "inferencegym.websocket"
"""Key of the scope's state under which an application finds its connection's :class:`BoundedWebSocket`."""
_BAD_REQUEST: Final = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\ncontent-length: 41\r\nconnection: close\r\n\r\n"
    b"This is no request to open a WebSocket.\r\n"
)


class BoundedWebSocket(WebSocketsSansIOProtocol):
    """uvicorn's WebSocket protocol, which gets data in pieces, and none while a message waits for the application.

    - While the application waits for a message, a text goes to its function ``at_once``, if it has set one. An answer
      without the queue of events and another turn of the loop takes a tenth less processor time for a step.
    - Upgrade requests that the library `websockets` refuses to parse (with a body, chunked, with more than 128 header
      fields or a line beyond 8 KB) are answered and closed. uvicorn would leave them open for ever.
    - Nothing is read while the peer does not read its answers: its pings would add more pongs.
    - A peer that sends :data:`MAX_BYTES_WITHOUT_MESSAGE` without a complete message is disconnected.
    - Data that the peer has not read :data:`CLOSE_TIMEOUT_S` after the end is discarded.

    A peer that does not read does not answer pings either, so uvicorn's keepalive ends its connection.
    """

    def __init__(self, config: Config, server_state: ServerState, app_state: dict[str, Any]) -> None:
        super().__init__(config, server_state, {**app_state, PROTOCOL: self})
        # RequestLog has a line for them: uvicorn's own are left out with those of requests.
        self.logger = self.conn.logger = logging.getLogger("uvicorn.websocket")
        grace_s = config.timeout_graceful_shutdown
        # At shutdown a peer that does not read is dropped before uvicorn aborts all requests in flight.
        self._close_timeout_s = CLOSE_TIMEOUT_S if grace_s is None else min(CLOSE_TIMEOUT_S, grace_s / 2)
        self._unread = bytearray()
        self._without_message = 0
        self._turn_is_due = False
        self._end: asyncio.TimerHandle | None = None
        self._app_waits = False
        self.at_once: Callable[[bytes], str | None] | None = None
        """Answers a text without waiting, or leaves it to the application (None). Raises nothing."""

    # ------------------------------------------------------------ called by asyncio and uvicorn

    def data_received(self, data: bytes) -> None:
        """The head of the request, which uvicorn's HTTP protocol sends as a whole, and then what the peer sends."""
        if self.handshake_initiated:
            self._unread += data
            if not self._turn_is_due:
                self._turn()
            return
        super().data_received(data)
        if self.conn.handshake_exc is not None:
            self.transport.write(_BAD_REQUEST)
            self.transport.close()
            self._end_in_time()

    def eof_received(self) -> None:
        self._end_in_time()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._go_on()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._go_on()

    async def receive(self) -> Any:
        """The next message for the application, which makes room for others."""
        self._app_waits = True
        try:
            message = await super().receive()
        finally:
            self._app_waits = False
        self._go_on()
        return message

    def send_receive_event_to_app(self) -> None:
        self._without_message = 0
        is_free = self._app_waits and self.queue.empty() and self.writable.is_set()
        if self.at_once is not None and is_free and self.curr_msg_data_type == "text":
            answer = self.at_once(b"".join(self.frames))
            if answer is not None:
                self.frames = []
                self.conn.send_text(answer.encode())
                self.transport.write(b"".join(self.conn.data_to_send()))
                return
        super().send_receive_event_to_app()

    def keepalive_timeout(self) -> None:
        super().keepalive_timeout()
        self.transport.abort()

    def shutdown(self) -> None:
        super().shutdown()
        self._end_in_time()

    def on_task_complete(self, task: asyncio.Task[None]) -> None:
        super().on_task_complete(task)
        self._end_in_time()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._end is not None:
            self._end.cancel()

    # ------------------------------------------------------------ reading

    def _turn(self) -> None:
        """Pass the next piece to uvicorn, unless a message waits or the peer does not read."""
        self._turn_is_due = False
        if self._unread and self._takes_more() and self.writable.is_set() and not self.transport.is_closing():
            piece = bytes(self._unread[:PIECE_BYTES])
            del self._unread[:PIECE_BYTES]
            self._without_message += len(piece)
            if self._without_message > MAX_BYTES_WITHOUT_MESSAGE:
                log.warning("a WebSocket was cut off: it sent %s bytes and no message", self._without_message)
                self.transport.abort()
                return
            # So uvicorn does not pause the connection itself, which it would do for every message.
            self.read_paused = True
            super().data_received(piece)
        self._go_on()

    def _takes_more(self) -> bool:
        """Whether no message waits; after the application has closed, the peer's answer to that must be read."""
        return self.close_sent or self.queue.empty()

    def _go_on(self) -> None:
        """Continue reading, after the pending data. Other connections get a turn between two pieces."""
        if self.transport.is_closing():
            self._unread.clear()
            self._end_in_time()
        elif not self.writable.is_set() or (self._unread and not self._takes_more()):
            # A client that waits for its answer sends nothing that would have to wait, and is not paused.
            self.transport.pause_reading()
        elif not self._unread:
            self.transport.resume_reading()
        elif not self._turn_is_due:
            self._turn_is_due = True
            self.transport.pause_reading()
            self.loop.call_soon(self._turn)

    def _end_in_time(self) -> None:
        """Discard what the peer does not read soon; asyncio would keep it, and the connection, for ever."""
        if self._end is None:
            self._end = self.loop.call_later(self._close_timeout_s, self.transport.abort)
