"""The short ways on the wire: frames and requests answered where they arrive, answers that leave in one piece."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import Any, cast

import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from uvicorn.server import ServerState
from websockets.frames import Frame, Opcode
from websockets.protocol import CLIENT, OPEN, Protocol

from server import http_protocol
from server.http_protocol import Answer, OneWrite, PatientProtocol
from server.websocket_protocol import ANSWER_AT_ONCE, EagerProtocol, text_frame, whole_text

MAX_BYTES = 100_000


class Wire:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        self.written.append(bytes(data))

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def pause_reading(self) -> None:
        return

    def resume_reading(self) -> None:
        return


# ---------------------------------------------------------------- WebSocket

Asgi = dict[str, Any]


async def echo(scope: Asgi, receive: Callable[[], Awaitable[Asgi]], send: Callable[[Asgi], Awaitable[None]]) -> None:
    """Answers every text: those that begin with ! at once, the others when they come round."""
    if scope["type"] != "websocket":
        return
    scope["extensions"][ANSWER_AT_ONCE]["with"](lambda text: b"at once " + text if text.startswith(b"!") else None)
    await receive()
    await send({"type": "websocket.accept"})
    while (message := await receive())["type"] == "websocket.receive":
        await asyncio.sleep(0)
        await send({"type": "websocket.send", "text": "in turn " + message["text"]})


async def connected() -> tuple[EagerProtocol, Wire]:
    config = uvicorn.Config(echo, log_config=None, lifespan="off", ws_max_size=MAX_BYTES, ws_per_message_deflate=False)
    config.load()
    protocol, wire = EagerProtocol(config, ServerState(), {}), Wire()
    protocol.connection_made(cast("asyncio.Transport", wire))
    key = base64.b64encode(bytes(16)).decode()
    protocol.data_received(
        f"GET /ws HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: {key}\r\n"
        "Sec-WebSocket-Version: 13\r\n\r\n".encode()
    )
    await settled()
    assert b" 101 " in wire.written.pop(0)
    return protocol, wire


async def settled() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


def sent(text: str, fin: bool = True, opcode: Opcode = Opcode.TEXT) -> bytes:
    return Frame(opcode, text.encode(), fin).serialize(mask=True)


def texts(written: list[bytes]) -> list[str]:
    client = Protocol(CLIENT, state=OPEN, max_size=None)
    client.receive_data(b"".join(written))
    return [bytes(frame.data).decode() for frame in cast("list[Frame]", client.events_received())]


def test_a_frame_that_can_be_answered_at_once_waits_for_no_turn_of_the_event_loop() -> None:
    async def scenario() -> None:
        await answers_at_once_and_in_order(*await connected(), sent, texts)

    asyncio.run(scenario())


async def answers_at_once_and_in_order(
    protocol: asyncio.Protocol, wire: Wire, sent: Callable[[str], bytes], answers: Callable[[list[bytes]], list[str]]
) -> None:
    """What begins with ! is answered before ``data_received`` returns, unless something before it still waits."""
    for _ in range(3):
        protocol.data_received(sent("!now"))
        assert answers(wire.written) == ["at once !now"]
        wire.written.clear()
    protocol.data_received(sent("later"))
    assert wire.written == []
    protocol.data_received(sent("!and now"))
    assert wire.written == [], "an answer does not overtake the one before it"
    await settled()
    assert answers(wire.written) == ["in turn later", "in turn !and now"]
    wire.written.clear()
    protocol.data_received(sent("!again"))
    assert answers(wire.written) == ["at once !again"]


def test_a_frame_is_not_answered_while_the_client_does_not_take_what_was_sent() -> None:
    async def scenario() -> None:
        protocol, wire = await connected()
        protocol.pause_writing()
        protocol.data_received(sent("!now"))
        await settled()
        assert wire.written == []
        protocol.resume_writing()
        await settled()
        assert texts(wire.written) == ["in turn !now"]

    asyncio.run(scenario())


@given(
    messages=st.lists(
        st.tuples(st.sampled_from(["", "!"]), st.text(max_size=3), st.sampled_from([1, 60, 200]), st.booleans()),
        max_size=6,
    ),
    cuts=st.lists(st.integers(0, 3_000), max_size=8),
    waits=st.booleans(),
)
def test_however_frames_are_cut_on_their_way_all_are_answered_in_their_order(
    messages: list[tuple[str, str, int, bool]], cuts: list[int], waits: bool
) -> None:
    """Frames in pieces, several in one piece, messages of several frames: every one gets the answer to its text."""

    async def scenario() -> None:
        protocol, wire = await connected()
        said = [first + text * times for first, text, times, _ in messages]
        stream = b"".join(
            sent(text[:1], fin=False) + sent(text[1:], opcode=Opcode.CONT) if in_two else sent(text)
            for text, (*_, in_two) in zip(said, messages, strict=True)
        )
        ends = [0, *sorted({min(cut, len(stream)) for cut in cuts}), len(stream)]
        for begin, end in pairwise(ends):
            if begin < end:
                protocol.data_received(stream[begin:end])
            if waits:
                await settled()
        await settled()
        answered = [text.removeprefix("at once ").removeprefix("in turn ") for text in texts(wire.written)]
        assert answered == said

    asyncio.run(scenario())


@given(st.text(max_size=400), st.sampled_from([1, 400]), st.integers(0, 20))
def test_a_whole_text_is_read_as_the_library_reads_it_and_nothing_else_is(text: str, times: int, off: int) -> None:
    data = (text * times).encode()
    frame = Frame(Opcode.TEXT, data).serialize(mask=True)
    assert whole_text(frame, MAX_BYTES) == (data if len(data) < 65_536 else None)
    assert whole_text(frame, len(data) - 1) is None
    assert whole_text(frame + b"\x81", MAX_BYTES) is None
    assert whole_text(frame[: len(frame) - 1 - off], MAX_BYTES) is None
    assert whole_text(Frame(Opcode.TEXT, data).serialize(mask=False), MAX_BYTES) is None
    assert whole_text(Frame(Opcode.TEXT, data, fin=False).serialize(mask=True), MAX_BYTES) is None
    assert whole_text(bytes([frame[0] | 0x40]) + frame[1:], MAX_BYTES) is None, "a bit that an extension would set"
    assert whole_text(Frame(Opcode.BINARY, data).serialize(mask=True), MAX_BYTES) is None


def test_a_frame_whose_length_says_64_bits_is_left_to_the_library() -> None:
    # 2 + 4 + 127 bytes, as a frame of 127 bytes would have if its length fitted into seven bits.
    assert whole_text(b"\x81\xff" + bytes(4 + 127), MAX_BYTES) is None


@given(st.sampled_from([0, 1, 125, 126, 127, 65_535, 65_536]), st.binary(min_size=1, max_size=1))
def test_an_answer_is_framed_as_the_library_frames_it(length: int, byte: bytes) -> None:
    assert text_frame(byte * length) == Frame(Opcode.TEXT, byte * length).serialize(mask=False)


# ---------------------------------------------------------------- HTTP

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 4\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


def written(*parts: bytes, close: bool = False) -> list[bytes]:
    wire = Wire()
    answer = OneWrite(cast("asyncio.Transport", wire))
    for part in parts:
        answer.write(part)
    if close:
        answer.close()
        assert wire.closed
        assert answer.is_closing()
    return wire.written


def test_an_answer_leaves_in_one_piece() -> None:
    assert written(HEAD, b"body") == [HEAD + b"body"]
    assert written(HEAD, b"bo", b"dy") == [HEAD + b"bo", b"dy"]
    assert written(HEAD) == [], "the body is on its way"


def test_what_has_no_length_or_is_no_answer_yet_leaves_at_once() -> None:
    assert written(CHUNKED) == [CHUNKED]
    assert written(CHUNKED, b"\r\ncontent-length: 4\r\n", b"x") == [CHUNKED, b"\r\ncontent-length: 4\r\n", b"x"]
    assert written(CONTINUE, HEAD, b"body") == [CONTINUE, HEAD + b"body"]


def test_a_head_whose_body_never_came_leaves_before_the_connection_closes() -> None:
    assert written(HEAD, close=True) == [HEAD]
    assert written(HEAD, b"body", close=True) == [HEAD + b"body"]


async def in_turn(scope: Asgi, receive: Callable[[], Awaitable[Asgi]], send: Callable[[Asgi], Awaitable[None]]) -> None:
    """Answers every request with its body, when it comes round."""
    body = b""
    while (message := await receive())["type"] == "http.request":
        body += message["body"]
        if not message["more_body"]:
            break
    await asyncio.sleep(0)
    said = b"in turn " + body
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(said))]})
    await send({"type": "http.response.body", "body": said})


def at_once(scope: Any, body: bytes) -> Answer | None:
    """Answers bodies that begin with !, and fails on those that begin with ?."""
    if body.startswith(b"?"):
        raise ZeroDivisionError
    said = b"at once " + body
    return (200, [(b"content-length", b"%d" % len(said))], said) if body.startswith(b"!") else None


async def http_connected(**functions: http_protocol.AnswerAtOnce) -> tuple[PatientProtocol, Wire]:
    config = uvicorn.Config(in_turn, log_config=None, lifespan="off", access_log=False)
    config.load()
    state = {http_protocol.ANSWER_AT_ONCE: {f"/{name}": function for name, function in functions.items()}}
    protocol = PatientProtocol(config, ServerState(), state if functions else {})
    wire = Wire()
    protocol.connection_made(cast("asyncio.Transport", wire))
    return protocol, wire


def request(body: str, path: str = "/step", method: str = "POST", head: str = "") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nhost: a\r\n{head}content-length: {len(body)}\r\n\r\n{body}".encode()


def bodies(written: list[bytes]) -> list[str]:
    """Of answers that all have a length."""
    found, rest = [], b"".join(written)
    while rest:
        head, _, rest = rest.partition(b"\r\n\r\n")
        length = int(head.rpartition(b"content-length: ")[2].split(b"\r\n")[0])
        found.append(rest[:length].decode())
        rest = rest[length:]
    return found


def test_a_request_that_can_be_answered_at_once_waits_for_no_turn_of_the_event_loop() -> None:
    async def scenario() -> None:
        await answers_at_once_and_in_order(*await http_connected(step=at_once), request, bodies)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "other",
    [
        request("!now", path="/steps"),
        request("!now", method="PUT"),
        request("!now", head="connection: close\r\n"),
        request("!now", head="expect: 100-continue\r\n"),
    ],
)
def test_other_requests_go_the_usual_way(other: bytes) -> None:
    async def scenario() -> None:
        protocol, wire = await http_connected(step=at_once)
        protocol.data_received(other)
        assert wire.written == []
        await settled()
        assert b"".join(wire.written).endswith(b"in turn !now")

    asyncio.run(scenario())


def test_an_application_that_leaves_no_function_answers_every_request_itself() -> None:
    async def scenario() -> None:
        protocol, wire = await http_connected()
        protocol.data_received(request("!now"))
        await settled()
        assert bodies(wire.written) == ["in turn !now"]

    asyncio.run(scenario())


def test_a_request_that_fails_at_once_goes_the_usual_way(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        protocol, wire = await http_connected(step=at_once)
        protocol.data_received(request("?"))
        await settled()
        assert bodies(wire.written) == ["in turn ?"]

    asyncio.run(scenario())
    assert "ZeroDivisionError" in caplog.text


def test_a_request_is_not_answered_at_once_while_the_client_does_not_take_what_was_sent() -> None:
    async def scenario() -> None:
        protocol, wire = await http_connected(step=at_once)
        protocol.pause_writing()
        protocol.data_received(request("!now"))
        await settled()
        assert wire.written == []
        protocol.resume_writing()
        await settled()
        assert bodies(wire.written) == ["in turn !now"]

    asyncio.run(scenario())


def test_a_body_that_follows_its_head_is_waited_for_and_a_late_one_is_the_applications_business(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        protocol, wire = await http_connected(step=at_once)
        whole = request("!now")
        monkeypatch.setattr(http_protocol, "BODY_FOLLOWS_S", 60.0)
        protocol.data_received(whole[:-4])
        await settled()
        protocol.data_received(whole[-4:])
        assert bodies(wire.written) == ["at once !now"]
        wire.written.clear()
        # Over at the next turn of the loop.
        monkeypatch.setattr(http_protocol, "BODY_FOLLOWS_S", 0.0)
        protocol.data_received(whole[:-4])
        await settled()
        assert len(protocol.tasks) == 1, "the application waits for the body"
        protocol.data_received(whole[-4:])
        await settled()
        assert bodies(wire.written) == ["in turn !now"]

    asyncio.run(scenario())


def test_a_request_that_takes_long_to_answer_is_not_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "head_timeout_s", lambda: 0.02)
    ready = asyncio.Event()

    async def slow(scope: Asgi, receive: Any, send: Any) -> None:
        await ready.wait()
        await in_turn(scope, receive, send)

    async def scenario() -> None:
        protocol, wire = await http_connected()
        protocol.app = slow
        protocol.data_received(request("now"))
        await asyncio.sleep(0.2)
        assert not wire.closed
        ready.set()
        await settled()
        assert bodies(wire.written) == ["in turn now"]

    asyncio.run(scenario())


def test_fields_that_follow_a_chunked_body_do_not_join_those_of_the_head() -> None:
    seen: list[list[tuple[bytes, bytes]]] = []

    async def noting(scope: Asgi, receive: Any, send: Any) -> None:
        await in_turn(scope, receive, send)
        seen.append(scope["headers"])

    async def scenario() -> None:
        protocol, wire = await http_connected()
        protocol.app = noting
        head = b"POST /step HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"
        protocol.data_received(head + b"3\r\nnow\r\n0\r\nx-api-key: late\r\n\r\n" + request("next"))
        await settled()
        assert bodies(wire.written) == ["in turn now", "in turn next"]

    asyncio.run(scenario())
    assert seen == [[(b"transfer-encoding", b"chunked")], [(b"host", b"a"), (b"content-length", b"4")]]


def test_a_body_in_small_chunks_is_taken_though_its_frames_are_longer_than_a_head_may_be() -> None:
    async def scenario() -> None:
        protocol, wire = await http_connected()
        protocol.data_received(b"POST /step HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(3):
            protocol.data_received(b"1\r\nx\r\n" * 10_000)
            await settled()
        protocol.data_received(b"0\r\n\r\n")
        await settled()
        assert bodies(wire.written) == ["in turn " + "x" * 30_000]

    asyncio.run(scenario())


def test_the_application_hears_of_a_client_that_went_away_before_its_body_came() -> None:
    async def scenario() -> None:
        protocol, wire = await http_connected(step=at_once)
        protocol.data_received(request("!now")[:-4])
        protocol.connection_lost(None)
        assert len(protocol.tasks) == 1
        await settled()
        assert not protocol.tasks
        assert wire.written == []

    asyncio.run(scenario())


@given(
    said=st.lists(st.tuples(st.sampled_from(["", "!", "?"]), st.sampled_from(["", "a", "b" * 300])), max_size=5),
    cuts=st.lists(st.integers(0, 1_500), max_size=8),
    waits=st.booleans(),
)
def test_however_requests_are_cut_on_their_way_all_are_answered_in_their_order(
    said: list[tuple[str, str]], cuts: list[int], waits: bool
) -> None:
    async def scenario() -> None:
        protocol, wire = await http_connected(step=at_once)
        texts = [first + rest for first, rest in said]
        stream = b"".join(map(request, texts))
        ends = [0, *sorted({min(cut, len(stream)) for cut in cuts}), len(stream)]
        for begin, end in pairwise(ends):
            if begin < end:
                protocol.data_received(stream[begin:end])
            if waits:
                await settled()
        await settled()
        answered = [text.removeprefix("at once ").removeprefix("in turn ") for text in bodies(wire.written)]
        assert answered == texts
        protocol.connection_lost(None)

    asyncio.run(scenario())
