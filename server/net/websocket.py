"""WebSockets: uvicorn's protocol, with limits on what a peer makes the server hold in memory, and for how long."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final, cast

from uvicorn.config import Config
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.server import ServerProtocol

log = logging.getLogger(__name__)

PIECE_BYTES: Final = 1_024
"""Bytes passed to the protocol at a time. One read has up to 256 KB, enough for 40,000 empty frames; uvicorn would
parse them all while other clients wait, and keep a message of 300 bytes for each.
"""
MAX_BYTES_WITHOUT_MESSAGE: Final = 1_048_576
"""Bytes that may arrive before a message is complete. Empty fragments add nothing to the length of a message but are
kept until it ends. A client's usual pings reach this limit after 24 days.
"""
CLOSE_TIMEOUT_S: Final = 5.0
"""Seconds in which a closed connection may still deliver pending data."""
_BAD_REQUEST: Final = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\ncontent-length: 41\r\nconnection: close\r\n\r\n"
    b"This is no request to open a WebSocket.\r\n"
)


class BoundedWebSocket(asyncio.Protocol, asyncio.Transport):
    """Layer between a connection and uvicorn's WebSocket protocol: the protocol of one, the transport of the other.

    - Upgrade requests that the library `websockets` refuses to parse (with a body, chunked, with more than 128 header
      fields or a line beyond 8 KB) are answered and closed. uvicorn would leave them open for ever, and raise at
      shutdown.
    - The protocol gets data in pieces, and none while it pauses reading.
    - Nothing is read while the peer does not read its answers: its pings would add more pongs.
    - A peer that sends :data:`MAX_BYTES_WITHOUT_MESSAGE` without a complete message is disconnected.
    - Data that the peer has not read :data:`CLOSE_TIMEOUT_S` after the end is discarded; asyncio would keep it, and the
      connection, for ever.

    A peer that does not read does not answer pings either, so uvicorn's keepalive ends its connection.
    """

    def __init__(self, config: Config, server_state: ServerState, app_state: dict[str, Any]) -> None:
        super().__init__()
        self._protocol: asyncio.Protocol = WebSocketsSansIOProtocol(config, server_state, app_state)
        grace_s = config.timeout_graceful_shutdown
        # At shutdown a peer that does not read is dropped before uvicorn aborts all requests in flight.
        self._close_timeout_s = CLOSE_TIMEOUT_S if grace_s is None else min(CLOSE_TIMEOUT_S, grace_s / 2)
        self._loop = asyncio.get_running_loop()
        self._upgraded = False
        self._unread = bytearray()
        self._without_message = 0
        self._protocol_pauses = False
        self._peer_is_slow = False
        self._turn_is_due = False
        self._end: asyncio.TimerHandle | None = None

    # ------------------------------------------------------------ called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """The head of the request, which uvicorn's HTTP protocol sends as a whole, and then what the peer sends."""
        if not self._upgraded:
            self._upgrade(data)
            return
        self._unread += data
        if self._protocol_pauses:
            self._transport.pause_reading()
        elif not self._turn_is_due:
            self._turn()

    def eof_received(self) -> None:
        # After this, asyncio would close the connection itself and wait for ever until the peer reads.
        self.close()

    def pause_writing(self) -> None:
        self._peer_is_slow = True
        self._transport.pause_reading()
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()
        self._peer_is_slow = False
        self._go_on()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unread.clear()
        if self._end is not None:
            self._end.cancel()
        if self._upgraded:
            self._protocol.connection_lost(exc)

    # ------------------------------------------------------------ called by uvicorn's protocol

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._transport.write(data)

    def pause_reading(self) -> None:
        """Stop passing data to the protocol, which calls this when a message is complete."""
        self._without_message = 0
        self._protocol_pauses = True
        # A client that waits for its answer sends nothing that would have to wait: see data_received.
        if self._unread:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._protocol_pauses = False
        self._go_on()

    def close(self) -> None:
        """Close the connection when all data is sent, or after :data:`CLOSE_TIMEOUT_S`."""
        if not self._transport.is_closing():
            self._transport.close()
            self._end = self._loop.call_later(self._close_timeout_s, self._transport.abort)

    def abort(self) -> None:
        self._transport.abort()

    # ------------------------------------------------------------ reading

    def _upgrade(self, data: bytes) -> None:
        if self.is_closing():
            return
        reader = ServerProtocol()
        reader.receive_data(data)
        if reader.handshake_exc is not None:
            self.write(b"".join(reader.data_to_send()) or _BAD_REQUEST)
            self.close()
            return
        self._upgraded = True
        self._protocol.connection_made(self)
        self._protocol.data_received(data)

    def _turn(self) -> None:
        """Pass the next piece to the protocol."""
        self._turn_is_due = False
        if self._transport.is_closing():
            self._unread.clear()
        elif not (self._protocol_pauses or self._peer_is_slow):
            piece = bytes(self._unread[:PIECE_BYTES])
            del self._unread[:PIECE_BYTES]
            self._without_message += len(piece)
            if self._without_message > MAX_BYTES_WITHOUT_MESSAGE:
                log.warning("a WebSocket was cut off: it sent %s bytes and no message", self._without_message)
                self._transport.abort()
                return
            self._protocol.data_received(piece)
            self._go_on()

    def _go_on(self) -> None:
        """Continue reading, after the pending data. Other connections get a turn between two pieces."""
        if self._protocol_pauses or self._peer_is_slow:
            return
        if not self._unread:
            self._transport.resume_reading()
        elif not self._turn_is_due:
            self._turn_is_due = True
            self._transport.pause_reading()
            self._loop.call_soon(self._turn)
