"""WebSocket peers that send and never read, on a real server: their memory cost, and how they are closed."""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any, Final
from unittest.mock import Mock

import pytest
from uvicorn import Config
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.uri import parse_uri

from benchmarks.speed.load import memory_mb
from server.net.websocket import PIECE_BYTES, BoundedWebSocket
from tests.servers import PATIENCE_S, RunningServer, running_server, until

PEERS: Final = 8
MOST_MB_PER_PEER: Final = 5.0
"""Memory that a peer may cost; most of it is 64 KB of message in the smallest fragments."""
NOISE_MB: Final = 5.0
"""Memory by which a server grows in its first moments anyway."""
SENT_MB_PER_PEER: Final = 16.0


def frame(opcode: Opcode, data: bytes = b"", fin: bool = True) -> bytes:
    return Frame(opcode, data, fin).serialize(mask=True)


PINGS = frame(Opcode.PING, b"x" * 125) * 4_000
"""Half a megabyte."""
FAST_PINGS: Final = (
    "import functools, uvicorn; "
    "uvicorn.Config = functools.partial(uvicorn.Config, ws_ping_interval=1.0, ws_ping_timeout=1.0)"
)
STATE = frame(Opcode.TEXT, b'{"type": "state"}')
FLOODS: Final = {
    "answers": frame(Opcode.TEXT, b"0") * 50_000,
    "pongs": PINGS + STATE,
    "only pongs": PINGS,
    "empty fragments": frame(Opcode.TEXT, b"{", fin=False) + frame(Opcode.CONT, fin=False) * 2_700_000,
    "tiny fragments": frame(Opcode.TEXT, b"{", fin=False) + frame(Opcode.CONT, b"aa", fin=False) * 2_000_000,
    "closed": (PINGS + STATE) * 8 + frame(Opcode.CLOSE, b"\x03\xe8"),
}


@contextmanager
def peers(server: RunningServer, count: int = PEERS) -> Iterator[list[socket.socket]]:
    """Open WebSockets with small receive buffers, from which nothing more is read."""
    with ExitStack() as held:
        found = []
        for _ in range(count):
            peer = held.enter_context(socket.socket())
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            peer.settimeout(PATIENCE_S)
            peer.connect(("127.0.0.1", server.port))
            client = ClientProtocol(parse_uri("ws://127.0.0.1/ws"))
            client.send_request(client.connect())
            peer.sendall(b"".join(client.data_to_send()))
            assert peer.recv(4_096).startswith(b"HTTP/1.1 101")
            peer.setblocking(False)
            found.append(peer)
        yield found


def flood(senders: Sequence[socket.socket], *kinds: str) -> None:
    """Send data of each kind, by one peer after another, over and over as long as any is taken, up to 16 MB each."""
    sent = dict.fromkeys(senders, 0)
    floods = {sender: memoryview(FLOODS[kind]) for sender, kind in zip(senders, cycle(kinds), strict=False)}
    while sent and (writable := select.select([], list(sent), [], 3.0)[1]):
        for sender in writable:
            data = floods[sender]
            try:
                sent[sender] += sender.send(data[sent[sender] % len(data) :])
            except BlockingIOError:
                continue
            except ConnectionError:
                sent.pop(sender)
                continue
            if sent[sender] > SENT_MB_PER_PEER * 1e6:
                sent.pop(sender)


@pytest.mark.parametrize(
    "kind", ["answers", *(pytest.param(kind, marks=pytest.mark.slow) for kind in FLOODS if kind != "answers")]
)
def test_peers_that_never_read_cost_little_memory_and_hold_nobody_up(tmp_path: Path, kind: str) -> None:
    with running_server(tmp_path, store_url="memory://") as server:
        assert server.process is not None
        server.post("/reset")
        # A socket sends so many fragments in a second that several only wait for each other.
        count = 1 if "fragments" in kind else PEERS
        before = memory_mb(server.process.pid, "VmRSS")
        with peers(server, count) as senders:
            flood(senders, kind)
            assert memory_mb(server.process.pid, "VmRSS") - before < MOST_MB_PER_PEER * count + NOISE_MB
            assert server.post("/reset")["session_id"]
            server.stop()
        said = server.log.read_text()
        assert ("Traceback" in said, "shutdown exceeded" in said) == (False, False)


def test_two_workers_end_in_order_with_peers_that_never_read(tmp_path: Path) -> None:
    with running_server(tmp_path, workers="2") as server:
        with peers(server, PEERS + 1) as senders:
            flood(senders, "answers", "pongs", "closed")
            server.stop()
        said = server.log.read_text()
        assert ("Traceback" in said, "shutdown exceeded" in said) == (False, False)


def test_a_peer_that_never_reads_is_disconnected_after_a_while(tmp_path: Path) -> None:
    with (
        running_server(tmp_path, before=FAST_PINGS) as server,
        peers(server, PEERS + 1) as senders,
    ):
        flood(senders, "answers", "pongs", "closed")
        until(lambda: "inferencegym_websockets 0.0" in server.client.get("/metrics").text)
        server.stop()


class Wire(asyncio.Transport):
    """A connection that reads and delivers everything."""

    def is_closing(self) -> bool:
        return False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def __init__(self) -> None:
        super().__init__()
        self.reads = True
        self.pauses = 0

    def pause_reading(self) -> None:
        self.reads = False
        self.pauses += 1

    def resume_reading(self) -> None:
        self.reads = True


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What uvicorn's protocol gets; a piece with "message" in it completes one."""
    found: list[bytes] = []

    def received(protocol: WebSocketsSansIOProtocol, data: bytes) -> None:
        found.append(data)
        if b"message" in data:
            protocol.queue.put_nowait({"type": "websocket.receive", "bytes": data})

    monkeypatch.setattr(WebSocketsSansIOProtocol, "data_received", received)
    return found


def upgraded(wire: Wire) -> BoundedWebSocket:
    """A connection after the upgrade."""
    protocol = BoundedWebSocket(Config(Mock(), log_config=None), ServerState(), {})
    protocol.connection_made(wire)
    protocol.handshake_initiated = True
    return protocol


def test_what_was_read_is_passed_on_in_pieces_and_others_have_their_turn_between_two(pieces: list[bytes]) -> None:
    read = bytes(range(256)) * 16

    async def connection() -> list[int]:
        protocol = upgraded(Wire())
        given = []
        for part in (read[:3000], read[3000:]):  # the second read comes before the first one's next turn
            protocol.data_received(part)
            given.append(len(pieces))
        while sum(map(len, pieces)) < len(read):
            await asyncio.sleep(0)
            given.append(len(pieces))
        return given

    assert asyncio.run(connection()) == [1, 1, 2, 3, 4]
    assert [len(piece) for piece in pieces] == [PIECE_BYTES] * 4
    assert b"".join(pieces) == read


@pytest.mark.usefixtures("pieces")
def test_a_client_that_waits_for_each_answer_is_never_paused() -> None:
    wire = Wire()

    async def connection() -> None:
        protocol = upgraded(wire)
        for _ in range(10):
            protocol.data_received(b"a message")
            await protocol.receive()

    asyncio.run(connection())
    assert wire.pauses == 0


@pytest.mark.parametrize("sent", [[b"a message"] * 2, [b"a message" + bytes(PIECE_BYTES)]])
def test_a_client_that_sends_more_while_a_message_waits_is_paused_until_it_is_taken(
    pieces: list[bytes], sent: list[bytes]
) -> None:
    wire = Wire()

    async def connection() -> list[bool]:
        protocol = upgraded(wire)
        for part in sent:
            protocol.data_received(part)
        found = [wire.reads]
        await protocol.receive()
        while sum(map(len, pieces)) < sum(map(len, sent)):
            await asyncio.sleep(0)
        if not protocol.queue.empty():
            await protocol.receive()
        return [*found, wire.reads]

    assert asyncio.run(connection()) == [False, True]


def test_the_answer_to_a_close_is_read_although_the_application_takes_no_more(pieces: list[bytes]) -> None:
    """Otherwise each client that the server closes waits until the server's time for that is over."""

    async def connection() -> None:
        protocol = upgraded(Wire())
        # What uvicorn does when the application closes.
        protocol.queue.put_nowait({"type": "websocket.disconnect", "code": 1000, "reason": ""})
        protocol.close_sent = True
        protocol.data_received(b"the answer")

    asyncio.run(connection())
    assert pieces == [b"the answer"]
