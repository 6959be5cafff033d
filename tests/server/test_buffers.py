"""Memory held by requests, byte by byte: bodies and answers against the bounds per client and in total."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message, Receive, Scope, Send

from server.net.buffers import PIECE_BYTES, BoundedBuffers
from server.net.errors import OverloadedError, RateLimitedError
from server.settings import Settings

CLIENT, ALL = 1 << 26, 5 << 25  # the least that one client may hold, and room for two and a half
SETTINGS = Settings(max_buffered_bytes=ALL)


def test_a_client_and_all_of_them_may_hold_exactly_their_bound() -> None:
    buffers = BoundedBuffers(Exchange(0).app, SETTINGS)
    buffers.count("a", CLIENT - 1)
    buffers.count("a", 1)
    with pytest.raises(RateLimitedError):
        buffers.count("a", 1)
    buffers.count("b", CLIENT)
    buffers.count("c", ALL - 2 * CLIENT)
    with pytest.raises(OverloadedError):
        buffers.count("c", 1)
    buffers.count("b", -1)
    buffers.count("c", 1)
    buffers.count("a", -CLIENT)
    buffers.count("a", CLIENT)
    with pytest.raises(OverloadedError):
        buffers.count("d", 1)


def test_one_client_may_hold_a_quarter_of_a_large_bound() -> None:
    buffers = BoundedBuffers(Exchange(0).app, Settings(max_buffered_bytes=8 * CLIENT))
    buffers.count("a", 2 * CLIENT)
    with pytest.raises(RateLimitedError):
        buffers.count("a", 1)
    buffers.count("b", 1)


class Exchange:
    """One request to an app that reads its body and then answers with a given number of bytes."""

    def __init__(self, answer_bytes: int, body: tuple[int, ...] = (0,)) -> None:
        self.answer_bytes = answer_bytes
        self.body = [b"x" * size for size in body]
        self.sent: list[Message] = []
        self.failed = False

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            while (await receive())["more_body"]:
                pass
        except (RateLimitedError, OverloadedError):
            self.failed = True
            raise
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"y" * self.answer_bytes})

    async def receive(self) -> Message:
        piece = self.body.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(self.body)}

    async def send(self, message: Message) -> None:
        self.sent.append(message)

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def answer(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


def play(exchange: Exchange, bound: BoundedBuffers | None = None, path: str = "/step") -> BoundedBuffers:
    bound = bound or BoundedBuffers(exchange.app, SETTINGS)
    bound.app = exchange.app
    scope = {"type": "http", "path": path, "client": ("9.9.9.9", 1), "headers": []}
    asyncio.run(bound(scope, exchange.receive, exchange.send))
    return bound


def test_an_answer_is_sent_in_pieces_and_a_small_one_whole() -> None:
    for size, pieces in ((PIECE_BYTES, 1), (PIECE_BYTES + 1, 3), (3 * PIECE_BYTES, 4)):
        exchange = Exchange(size)
        play(exchange)
        assert (exchange.status, len(exchange.answer)) == (200, size)
        assert [message["type"] for message in exchange.sent] == [
            "http.response.start", *["http.response.body"] * pieces,
        ]  # fmt: skip
        assert [m.get("more_body", False) for m in exchange.sent[1:]] == [True] * (pieces - 1) + [False]


def test_an_answer_takes_the_room_of_the_body_before_it() -> None:
    exchange = Exchange(40_000_000, (40_000_000,))
    play(exchange)
    assert (exchange.status, len(exchange.answer)) == (200, 40_000_000)


def test_a_body_is_counted_over_all_its_pieces() -> None:
    whole = Exchange(0, (CLIENT - 10, 10))
    bound = play(whole)
    assert whole.status == 200
    more = Exchange(0, (CLIENT - 10, 10, 1))
    with pytest.raises(RateLimitedError):
        play(more, bound)
    assert more.failed
    # A body that arrives in one small piece is not counted, whatever else is held.
    play(Exchange(0, (PIECE_BYTES,)), bound)
    again = Exchange(0, (CLIENT - 10, 10))
    play(again, bound)
    assert again.status == 200
