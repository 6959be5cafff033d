"""WebSockets as uvicorn speaks them, with a short way for frames that can be answered where they arrive.

The usual way of a frame leads through a parser that can be interrupted at every byte, a queue, the event loop and some
twenty coroutines that wait for each other, and stops and starts the reading of the socket; that takes longer than a
step of the simulator. So an application may leave a function here that is asked first, and answers those frames that
have nothing to wait for. All others, and everything about the connection itself, go the usual way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import apply_mask  # type: ignore[attr-defined]  # compiled, where it can be
from websockets.http11 import Request
from websockets.protocol import OPEN
from websockets.streams import StreamReader

ANSWER_AT_ONCE: Final = "inferencegym.answer_at_once"
"""Extension of the ASGI scope: its ``"with"`` takes the function that is asked first."""

AnswerAtOnce = Callable[[bytes], bytes | None]
"""From the text of a frame to that of its answer, or to None, with nothing changed."""

_FINAL_TEXT: Final = 0x81
_MASKED: Final = 0x80
_LENGTH_IN_16_BITS: Final = 126
_LENGTH_IN_64_BITS: Final = 127
_MASK_BYTES: Final = 4


class EagerProtocol(WebSocketsSansIOProtocol):
    """Offers the extension :data:`ANSWER_AT_ONCE`."""

    _answer: AnswerAtOnce | None = None
    _app_listens = False
    _is_between_frames = False

    def data_received(self, data: bytes) -> None:
        if self._answer is not None and self._is_ready():
            text = whole_text(data, self.config.ws_max_size)
            answer = None if text is None else self._answer(text)
            if answer is not None:
                self.transport.write(text_frame(answer))
                return
        super().data_received(data)
        self._is_between_frames = is_between_frames(self.conn.parser)

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if self.response.status_code == 101:
            extensions: dict[str, Any] = self.scope["extensions"]
            extensions[ANSWER_AT_ONCE] = {"with": self._answer_with}

    async def receive(self) -> Any:
        self._app_listens = True
        try:
            return await super().receive()
        finally:
            self._app_listens = False

    def _answer_with(self, answer: AnswerAtOnce) -> None:
        self._answer = answer

    def _is_ready(self) -> bool:
        """Whether the next byte begins a message, all messages before are answered, and this one's answer can leave."""
        return (
            self._app_listens
            and self.queue.empty()
            and self._is_between_frames
            and self.conn.current_size is None
            and self.conn.state is OPEN
            and not self.close_sent
            and self.writable.is_set()
        )


def is_between_frames(parser: Any) -> bool:
    """Whether a connection's parser has taken all that arrived and waits for the first byte of a frame."""
    while (inner := parser.gi_yieldfrom) is not None:
        parser = inner
    return parser.gi_code is StreamReader.at_eof.__code__


def whole_text(data: bytes, max_bytes: int) -> bytes | None:
    """The text if ``data`` is exactly one short masked text frame, which is a whole message; else None."""
    if len(data) < 2 + _MASK_BYTES or data[0] != _FINAL_TEXT:
        return None
    length, head = data[1] - _MASKED, 2
    if length == _LENGTH_IN_16_BITS:
        length, head = int.from_bytes(data[2:4], "big"), 4
    elif not 0 <= length < _LENGTH_IN_16_BITS:
        return None
    if length > max_bytes or len(data) != head + _MASK_BYTES + length:
        return None
    return apply_mask(data[head + _MASK_BYTES :], data[head : head + _MASK_BYTES])


def text_frame(text: bytes) -> bytes:
    """A message of one text frame, as a server sends it."""
    length = len(text)
    if length < _LENGTH_IN_16_BITS:
        return b"%c%c%b" % (_FINAL_TEXT, length, text)
    if length < 65_536:
        return b"%c%c%b%b" % (_FINAL_TEXT, _LENGTH_IN_16_BITS, length.to_bytes(2, "big"), text)
    return b"%c%c%b%b" % (_FINAL_TEXT, _LENGTH_IN_64_BITS, length.to_bytes(8, "big"), text)
