"""Upgrade requests to WebSockets under uvicorn: those that it would leave open are answered and closed."""

from __future__ import annotations

import asyncio
from typing import Any, Final, cast

from uvicorn.config import Config
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.server import ServerProtocol

_BAD_REQUEST: Final = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\ncontent-length: 41\r\nconnection: close\r\n\r\n"
    b"This is no request to open a WebSocket.\r\n"
)


class CheckedUpgrade(asyncio.Protocol):
    """Hands a connection over to uvicorn's WebSocket protocol, if its upgrade request can be read.

    That protocol sends no answer where the library `websockets` refuses to read a request: one with a body, chunked,
    with more than 128 header fields or a line beyond 8 KB. The connection would stay open for ever, and at shutdown it
    would raise and take the requests in flight with it.
    """

    def __init__(self, config: Config, server_state: ServerState, app_state: dict[str, Any]) -> None:
        self._protocol = WebSocketsSansIOProtocol(config, server_state, app_state)
        self._handed_over = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """The head of the request, which uvicorn's HTTP protocol sends as a whole, and whatever comes right after."""
        if not self._handed_over:
            if self._transport.is_closing():
                return
            reader = ServerProtocol()
            reader.receive_data(data)
            if reader.handshake_exc is not None:
                self._transport.write(b"".join(reader.data_to_send()) or _BAD_REQUEST)
                self._transport.close()
                return
            self._handed_over = True
            # After uvicorn has set this protocol, and before the application does anything.
            asyncio.get_running_loop().call_soon(self._transport.set_protocol, self._protocol)
            self._protocol.connection_made(self._transport)
        self._protocol.data_received(data)
