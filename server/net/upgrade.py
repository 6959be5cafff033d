"""Upgrade requests to WebSockets: answers and closes those that uvicorn would leave open."""

from __future__ import annotations

import asyncio
from typing import Any, Final, cast

from uvicorn.config import Config
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.server import ServerProtocol

from server.net.bounded_transport import CLOSE_TIMEOUT_S, BoundedTransport

_BAD_REQUEST: Final = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\ncontent-length: 41\r\nconnection: close\r\n\r\n"
    b"This is no request to open a WebSocket.\r\n"
)


class CheckedUpgrade(asyncio.Protocol):
    """Hands a connection over to uvicorn's WebSocket protocol, if its upgrade request can be read.

    That protocol does not answer requests that the library `websockets` refuses to parse: with a body, chunked, with
    more than 128 header fields or a line beyond 8 KB. The connection would stay open for ever, and at shutdown it would
    raise and abort the requests in flight. Nor does the protocol limit pending data:
    :class:`~server.net.bounded_transport.BoundedTransport` does.
    """

    def __init__(self, config: Config, server_state: ServerState, app_state: dict[str, Any]) -> None:
        self._protocol = WebSocketsSansIOProtocol(config, server_state, app_state)
        self._handed_over = False
        grace_s = config.timeout_graceful_shutdown
        # At shutdown a peer that does not read is dropped before uvicorn aborts all requests in flight.
        self._close_timeout_s = CLOSE_TIMEOUT_S if grace_s is None else min(CLOSE_TIMEOUT_S, grace_s / 2)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = BoundedTransport(cast("asyncio.Transport", transport), self._protocol, self._close_timeout_s)

    def data_received(self, data: bytes) -> None:
        """The head of the request, which uvicorn's HTTP protocol sends as a whole, and then what the peer sends."""
        if self._handed_over:
            self._transport.received(data)
        elif not self._transport.is_closing():
            reader = ServerProtocol()
            reader.receive_data(data)
            if reader.handshake_exc is not None:
                self._transport.write(b"".join(reader.data_to_send()) or _BAD_REQUEST)
                self._transport.close()
                return
            self._handed_over = True
            self._protocol.connection_made(self._transport)
            self._protocol.data_received(data)

    def eof_received(self) -> None:
        # After this, asyncio would close the connection itself and wait for ever until the peer reads.
        self._transport.close()

    def pause_writing(self) -> None:
        self._transport.peer_is_slow(True)
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()
        self._transport.peer_is_slow(False)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport.lost()
        if self._handed_over:
            self._protocol.connection_lost(exc)
