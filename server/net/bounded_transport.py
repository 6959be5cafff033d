"""Bounded transport of one WebSocket: limits on what a peer makes the server hold in memory, and for how long."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final

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


class BoundedTransport(asyncio.Transport):
    """Layer between the transport of a connection and uvicorn's WebSocket protocol.

    - The protocol gets data in pieces, and none while it pauses reading.
    - Nothing is read while the peer does not read its answers: its pings would add more pongs.
    - A peer that sends :data:`MAX_BYTES_WITHOUT_MESSAGE` without a complete message is disconnected.
    - Data that the peer has not read :data:`CLOSE_TIMEOUT_S` after the end is discarded; asyncio would keep it, and the
      connection, for ever.

    A peer that does not read does not answer pings either, so uvicorn's keepalive ends its connection.
    """

    def __init__(self, transport: asyncio.Transport, protocol: asyncio.Protocol, close_timeout_s: float) -> None:
        super().__init__()
        self._transport = transport
        self._protocol = protocol
        self._close_timeout_s = close_timeout_s
        self._loop = asyncio.get_running_loop()
        self._unread = bytearray()
        self._without_message = 0
        self._protocol_pauses = False
        self._peer_is_slow = False
        self._turn_is_due = False
        self._end: asyncio.TimerHandle | None = None

    # ------------------------------------------------------------ called by the protocol

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Extra information of the transport."""
        return self._transport.get_extra_info(name, default)

    def is_closing(self) -> bool:
        """Whether the connection is closing."""
        return self._transport.is_closing()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send, or buffer data that the peer does not read yet."""
        self._transport.write(data)

    def pause_reading(self) -> None:
        """Stop passing data to the protocol, which calls this when a message is complete."""
        self._without_message = 0
        self._protocol_pauses = True
        # A client that waits for its answer sends nothing that would have to wait: see received.
        if self._unread:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Pass data to the protocol again."""
        self._protocol_pauses = False
        self._go_on()

    def close(self) -> None:
        """Close the connection when all data is sent, or after :data:`CLOSE_TIMEOUT_S`."""
        if not self._transport.is_closing():
            self._transport.close()
            self._end = self._loop.call_later(self._close_timeout_s, self._transport.abort)

    def abort(self) -> None:
        """End the connection at once."""
        self._transport.abort()

    # ------------------------------------------------------------ called by the connection

    def received(self, data: bytes) -> None:
        """Accept received data."""
        self._unread += data
        if self._protocol_pauses:
            self._transport.pause_reading()
        elif not self._turn_is_due:
            self._turn()

    def peer_is_slow(self, slow: bool) -> None:
        """Note whether the write buffer is full."""
        self._peer_is_slow = slow
        if slow:
            self._transport.pause_reading()
        else:
            self._go_on()

    def lost(self) -> None:
        """Note that the connection has ended."""
        self._unread.clear()
        if self._end is not None:
            self._end.cancel()

    # ------------------------------------------------------------ reading

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
