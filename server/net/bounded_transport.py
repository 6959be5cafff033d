"""Bounded transport of one WebSocket: limits on what a peer makes the server hold in memory, and for how long."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final

log = logging.getLogger(__name__)

PIECE_BYTES: Final = 1_024
"""How much of what was read the protocol gets at a time. One read brings up to 256 KB, which hold 40,000 empty frames;
uvicorn would parse them at one go, while all clients wait, and keep a message of 300 bytes for each."""
MAX_BYTES_WITHOUT_MESSAGE: Final = 1_048_576
"""Bytes that may arrive before a message is complete. Empty fragments count as nothing in the length of a message, and
are kept until it ends. Of a client's usual pings this is 24 days' worth."""
CLOSE_TIMEOUT_S: Final = 5.0
"""How long a connection that was closed may take to deliver what was written before."""


class BoundedTransport(asyncio.Transport):
    """Stands between the transport of a connection and uvicorn's WebSocket protocol.

    - The protocol gets what was read in pieces, and none while it pauses reading.
    - Nothing is read while more is written than the peer takes: its pings would add their pongs.
    - A peer that sends :data:`MAX_BYTES_WITHOUT_MESSAGE` and no message is cut off.
    - What the peer has not taken :data:`CLOSE_TIMEOUT_S` after the end is thrown away; asyncio would keep it, and the
      connection, for ever.

    A peer that takes nothing answers no ping either, so uvicorn's keepalive ends its connection.
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

    # ------------------------------------------------------------ what the protocol calls

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """As the transport says."""
        return self._transport.get_extra_info(name, default)

    def is_closing(self) -> bool:
        """Whether it was closed."""
        return self._transport.is_closing()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send, or hold what the peer does not take yet."""
        self._transport.write(data)

    def pause_reading(self) -> None:
        """Give the protocol nothing more; it calls this when a message is complete."""
        self._without_message = 0
        self._protocol_pauses = True
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Give the protocol what arrives again."""
        self._protocol_pauses = False
        self._go_on()

    def close(self) -> None:
        """End the connection when all is sent, or after a while."""
        if not self._transport.is_closing():
            self._transport.close()
            self._end = self._loop.call_later(self._close_timeout_s, self._transport.abort)

    def abort(self) -> None:
        """End the connection at once."""
        self._transport.abort()

    # ------------------------------------------------------------ what the connection tells

    def received(self, data: bytes) -> None:
        """Take what was read."""
        self._unread += data
        if not self._turn_is_due:
            self._turn()

    def peer_is_slow(self, slow: bool) -> None:
        """Note whether more is written than the peer takes."""
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
        """Give the protocol the next piece."""
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
        """Read on, after what is still unread. Other connections have their turn between two pieces."""
        if self._protocol_pauses or self._peer_is_slow:
            return
        if not self._unread:
            self._transport.resume_reading()
        elif not self._turn_is_due:
            self._turn_is_due = True
            self._transport.pause_reading()
            self._loop.call_soon(self._turn)
