"""uvicorn's HTTP protocol as the server extends it, without a socket."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.responses import PlainTextResponse
from uvicorn import Config
from uvicorn.server import ServerState

from server.net.http_protocol import BoundedHttp


class Wire(asyncio.Transport):
    """A connection that keeps what is written, write by write."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.writes.append(bytes(data))

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


def writes(request: bytes, answer: str = "the body") -> list[bytes]:
    """What is written for a request to an application that always gives this answer."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await PlainTextResponse(answer)(scope, receive, send)

    async def connection() -> list[bytes]:
        protocol, wire = BoundedHttp(Config(app, log_config=None), state := ServerState(), {}), Wire()
        protocol.connection_made(wire)
        protocol.data_received(request)
        while state.tasks:
            await asyncio.sleep(0)
        if protocol.timeout_keep_alive_task is not None:
            protocol.timeout_keep_alive_task.cancel()
        return wire.writes

    return asyncio.run(connection())


@pytest.mark.parametrize("answer", ["the body", ""])
def test_an_answer_is_one_write(answer: str) -> None:
    (whole,) = writes(b"GET / HTTP/1.1\r\nhost: here\r\n\r\n", answer)
    assert whole.startswith(b"HTTP/1.1 200 OK\r\n")
    assert whole.endswith(b"\r\n\r\n" + answer.encode())


def test_an_answer_to_head_is_sent() -> None:
    (head,) = writes(b"HEAD / HTTP/1.1\r\nhost: here\r\n\r\n")
    assert head.endswith(b"\r\n\r\n")


def test_a_client_that_waits_for_100_continue_is_told_so_at_once() -> None:
    first, *_ = writes(b"POST / HTTP/1.1\r\nhost: here\r\nexpect: 100-continue\r\ncontent-length: 1\r\n\r\n1")
    assert first == b"HTTP/1.1 100 Continue\r\n\r\n"


def test_answers_to_pipelined_requests_follow_each_other() -> None:
    request = b"GET / HTTP/1.1\r\nhost: here\r\n\r\n"
    assert [one.count(b"the body") for one in writes(request * 3)] == [1, 1, 1]
