"""WebSockets of a real server on the wire: odd upgrade requests, messages in pieces, and the end of the server."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import connect
from websockets.client import ClientProtocol
from websockets.exceptions import ConnectionClosed
from websockets.frames import Frame, Opcode
from websockets.uri import parse_uri

from tests.servers import PATIENCE_S, RunningServer, running_server

HEAD = "GET {path} HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
KEY = f"Sec-WebSocket-Key: {base64.b64encode(bytes(16)).decode()}\r\nSec-WebSocket-Version: 13\r\n"

ODD_UPGRADES = {
    "body": HEAD + KEY + "Content-Length: 5\r\n\r\nhello",
    "body without key": HEAD + "Content-Length: 5\r\n\r\nhello",
    "body that never comes": HEAD + KEY + "Content-Length: 5\r\n\r\n",
    "chunked": HEAD + KEY + "Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    "300 headers": HEAD + KEY + "".join(f"X-{i}: a\r\n" for i in range(300)) + "\r\n",
    "header of 20 KB": HEAD + KEY + f"X-Long: {'b' * 20_000}\r\n\r\n",
    "query of 9 KB": HEAD.replace("{path}", "{path}?" + "q" * 9_000) + KEY + "\r\n",
    "no key": HEAD + "\r\n",
    "key of the wrong length": HEAD + "Sec-WebSocket-Key: AAAA\r\nSec-WebSocket-Version: 13\r\n\r\n",
    "old version": HEAD + KEY.replace("13", "8") + "\r\n",
    "post": HEAD.replace("GET", "POST") + KEY + "\r\n",
    "bytes in a header": HEAD + KEY + "X-Odd: \xe9\xff\r\n\r\n",
}


def dial(server: RunningServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S)


def test_odd_upgrade_requests_are_answered_and_do_not_keep_the_server_from_ending(tmp_path: Path) -> None:
    with running_server(tmp_path) as server, ExitStack() as held:
        for name, head in ODD_UPGRADES.items():
            for path in ("/ws", "/mcp", "/nowhere"):
                peer = held.enter_context(dial(server))
                peer.sendall(head.format(path=path).encode("latin-1"))
                assert peer.recv(65_536).startswith((b"HTTP/1.1 101", b"HTTP/1.1 4")), name
        assert server.post("/reset")["session_id"]
        server.stop()
        assert "Traceback" not in server.log.read_text()


@pytest.mark.parametrize("workers", ["1", "2"])
def test_the_server_ends_in_order_with_idle_and_busy_sockets_open(tmp_path: Path, workers: str) -> None:
    async def play(url: str, playing: asyncio.Event) -> int | None:
        """Step without a pause until the server closes the socket; the code that it closes it with."""
        async with connect(url, proxy=None, open_timeout=PATIENCE_S) as peer:
            try:
                while True:
                    await peer.send('{"type": "reset"}')
                    await peer.recv()
                    for _ in range(100):
                        await peer.send('{"type": "step", "data": {}}')
                        await peer.recv()
                        playing.set()
            except ConnectionClosed as closed:
                return closed.rcvd.code if closed.rcvd else None

    async def wait(url: str, frames: Sequence[str]) -> int | None:
        async with connect(url, proxy=None, open_timeout=PATIENCE_S) as peer:
            for frame in frames:
                await peer.send(frame)
                await peer.recv()
            await peer.wait_closed()
            return peer.close_code

    async def run(server: RunningServer) -> list[int | None]:
        url, playing = server.url.replace("http", "ws", 1) + "/ws", [asyncio.Event() for _ in range(3)]
        peers = [asyncio.create_task(play(url, event)) for event in playing]
        peers += [asyncio.create_task(wait(url, frames)) for frames in ([], ['{"type": "reset"}'])]
        await asyncio.gather(*(event.wait() for event in playing))
        await asyncio.to_thread(server.stop)
        return await asyncio.gather(*peers)

    with running_server(tmp_path, workers=workers) as server:
        assert set(asyncio.run(run(server))) == {1012}, "1012: the service restarts"
        assert "Traceback" not in server.log.read_text()


# ---------------------------------------------------------------- pieces


def pieces(stream: bytes, seed: int) -> Iterator[bytes]:
    """The stream cut at random places, often in the middle of a head or a frame."""
    cuts = sorted(random.Random(seed).sample(range(1, len(stream)), min(40, len(stream) - 1)))
    for begin, end in pairwise([0, *cuts, len(stream)]):
        yield stream[begin:end]


def send_in_pieces(peer: socket.socket, stream: bytes, seed: int) -> None:
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for piece in pieces(stream, seed):
        peer.sendall(piece)


@pytest.mark.parametrize("seed", range(5))
def test_requests_cut_in_pieces_are_answered_in_their_order(server: RunningServer, seed: int) -> None:
    session = server.post("/reset", {"seed": 1})["session_id"]
    bodies = [json.dumps({"session_id": session, "step": number}) for number in range(1, 11)]
    head = "POST /step HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n"
    with dial(server) as peer:
        send_in_pieces(peer, "".join(head.format(len(body)) + body for body in bodies).encode(), seed)
        answers = peer.makefile("rb")
        for number in range(1, 11):
            assert answers.readline().startswith(b"HTTP/1.1 200")
            fields = dict(line.split(b": ") for line in iter(lambda: answers.readline().rstrip(), b""))
            answer = json.loads(answers.read(int(fields[b"content-length"])))
            assert answer["observation"]["timestep"] == number


def receive(client: ClientProtocol, peer: socket.socket) -> None:
    data = peer.recv(65_536)
    assert data, "the server closed the connection without a word"
    client.receive_data(data)


def opened(peer: socket.socket) -> ClientProtocol:
    """A WebSocket connection whose bytes are sent and received by the test."""
    client = ClientProtocol(parse_uri("ws://127.0.0.1/ws"))
    client.send_request(client.connect())
    peer.sendall(b"".join(client.data_to_send()))
    while not client.events_received():
        receive(client, peer)
    assert client.handshake_exc is None
    return client


def texts(client: ClientProtocol, peer: socket.socket, count: int) -> list[dict[str, Any]]:
    """The next messages, in their order."""
    found: list[dict[str, Any]] = []
    while len(found) < count:
        receive(client, peer)
        found += [json.loads(bytes(f.data)) for f in client.events_received() if isinstance(f, Frame)]
    return found


@pytest.mark.parametrize("seed", range(5))
def test_frames_cut_in_pieces_are_answered_in_their_order(server: RunningServer, seed: int) -> None:
    """Frames in pieces, several in one piece, and messages of several frames."""
    with dial(server) as peer:
        client = opened(peer)
        client.send_text(b'{"type": "reset", "data": {"seed": 1}}')
        for number in range(1, 21):
            step = json.dumps({"type": "step", "data": {"batch_size": number}}).encode()
            if number % 3:
                client.send_text(step)
            else:
                client.send_text(step[:9], fin=False)
                client.send_continuation(step[9:], fin=True)
        send_in_pieces(peer, b"".join(client.data_to_send()), seed)
        answers = texts(client, peer, 21)
        assert [answer["data"]["observation"]["timestep"] for answer in answers] == list(range(21))


def test_an_episode_that_ended_over_a_websocket_leaves_room_for_the_next_one(tmp_path: Path) -> None:
    with running_server(tmp_path, max_sessions_per_client="1") as server, dial(server) as peer:
        client = opened(peer)
        frames = [
            b'{"type": "reset", "data": {"config": {"episode_length": 2}}}',
            *[b'{"type": "step", "data": {}}'] * 2,
        ]
        for frame in frames * 5:
            client.send_text(frame)
            peer.sendall(b"".join(client.data_to_send()))
            assert "observation" in texts(client, peer, 1)[0]["data"]


def end_of(client: ClientProtocol, peer: socket.socket) -> int | None:
    """The code with which the server closes the connection; None without a close frame."""
    while client.close_rcvd is None and (data := peer.recv(65_536)):
        client.receive_data(data)
    return client.close_rcvd.code if client.close_rcvd else None


def test_what_is_no_message_or_too_long_ends_its_connection_and_no_other(tmp_path: Path) -> None:
    with running_server(tmp_path, store_url="memory://") as server:
        with dial(server) as other:
            bystander = opened(other)
            for data, codes in (
                (Frame(Opcode.TEXT, b'{"type": "' + b"x" * 65_536 + b'"}').serialize(mask=True), {1009}),
                (Frame(Opcode.TEXT, b'{"type": "\xff"}').serialize(mask=True), {1007, None}),
                (Frame(Opcode.TEXT, b"{}").serialize(mask=False), {1002, None}),
                (b"\xff" * 64, {1002, None}),
            ):
                with dial(server) as peer:
                    client = opened(peer)
                    peer.sendall(data)
                    assert end_of(client, peer) in codes
                bystander.send_text(b'{"type": "state"}')
                other.sendall(b"".join(bystander.data_to_send()))
                assert texts(bystander, other, 1)[0]["type"] == "state"
        server.stop()
