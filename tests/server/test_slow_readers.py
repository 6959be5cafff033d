"""Clients that send large bodies and read no answers: a real server bounds what it holds for them and cuts them off."""

from __future__ import annotations

import contextlib
import http.client
import json
import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from benchmarks.speed.load import memory_mb
from inferencegym.batch_format import MEDIA_TYPE, BatchSteps, decode_request, encode_request
from tests.servers import RunningServer, running_server, until

ROWS, STEPS = 64, 2_860
ANSWER_BYTES = 40 + STEPS * (ROWS * (14 + 1) * 8 + 1)
ROOM = 67_108_864
"""Room for three of these answers, and then for less than the longest answer as JSON."""
SHARE = ROOM // ANSWER_BYTES
"""Answers of this size that one client may have under way."""


@pytest.fixture
def bounded(tmp_path: Path) -> Iterator[RunningServer]:
    """Behind a proxy on this machine, which says who sent a request; patient, so that the test sees what is held."""
    limits = {"max_buffered_bytes": str(2 * ROOM), "transfer_timeout_s": "600"}
    with running_server(tmp_path, trusted_proxies="127.0.0.1", **limits) as running:
        yield running


def open_batch(server: RunningServer) -> bytes:
    """A request for the largest answer there is; the first of them is read here, the others are answered again."""
    reset = {"n": ROWS, "autoreset": True, "config": {"episode_length": 100}}
    session = server.post("/reset/batch", reset)["session_id"]
    body = encode_request(BatchSteps(session, np.ones((1, ROWS, 5)), STEPS, number=1))
    answer = server.client.post("/step/batch", content=body, headers={"Content-Type": MEDIA_TYPE})
    assert answer.status_code == 200
    assert len(answer.content) == ANSWER_BYTES
    return body


def dial(server: RunningServer, sent: bytes) -> socket.socket:
    """A connection whose client has a tiny receive buffer, with ``sent`` sent over it."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    connection.settimeout(60)
    connection.connect(("127.0.0.1", server.port))
    with contextlib.suppress(ConnectionError):
        connection.sendall(sent)
    return connection


def head(path: str, client: str, media_type: str, length: int) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"X-Forwarded-For: {client}", f"Content-Type: {media_type}"]
    return "\r\n".join([*lines, f"Content-Length: {length}", "", ""]).encode()


def answered(connections: list[socket.socket]) -> list[socket.socket]:
    """Connections on which an answer is waiting."""
    return select.select(connections, [], [], 0)[0]


def has_answers(connections: list[socket.socket], count: int) -> bool:
    """Whether so many of the connections have their answer."""
    return len(answered(connections)) >= count


def status_of(connection: socket.socket) -> int:
    """Status of an answer of which only the head is read."""
    answer = http.client.HTTPResponse(connection)
    answer.begin()
    return answer.status


def ask(server: RunningServer, body: bytes, client: str) -> int:
    """Status of an answer that is read to its end."""
    headers = {"Content-Type": MEDIA_TYPE, "X-Forwarded-For": client}
    return server.client.post("/step/batch", content=body, headers=headers).status_code


def play(server: RunningServer, steps: int = 20) -> None:
    """An episode's first steps, as any client would play them."""
    session = server.post("/reset")["session_id"]
    for _ in range(steps):
        server.post("/step", {"session_id": session, "action": {}})


def open_sockets(server: RunningServer) -> int:
    assert server.process is not None

    def is_socket(file: Path) -> bool:
        try:
            return str(file.readlink()).startswith("socket:")
        except FileNotFoundError:  # The server closed it after it was listed.
            return False

    return sum(map(is_socket, Path(f"/proc/{server.process.pid}/fd").iterdir()))


def test_unread_answers_are_bounded_per_client_and_in_all_and_hurt_no_other(bounded: RunningServer) -> None:
    assert bounded.process is not None
    body = open_batch(bounded)
    before = memory_mb(bounded.process.pid, "VmRSS")
    with ExitStack() as held:
        statuses = []
        for client in ("192.0.2.1", "192.0.2.2", "192.0.2.3"):
            for _ in range(SHARE + 2):
                sent = head("/step/batch", client, MEDIA_TYPE, len(body)) + body
                statuses.append(status_of(held.enter_context(dial(bounded, sent))))
            # small requests are not counted, even if other clients are stuck
            play(bounded)
        assert memory_mb(bounded.process.pid, "VmRSS") - before < 2 * SHARE * ANSWER_BYTES / 1e6 + 60
        assert statuses[:10] == [*[200] * SHARE, 429, 429] * 2, "each of them holds its share"
        assert statuses[10:] == [503] * 5, "all of them hold everything"
    until(lambda: ask(bounded, body, "192.0.2.3") == 200)


def test_a_request_without_room_for_its_answer_plays_nothing(bounded: RunningServer) -> None:
    body = open_batch(bounded)
    session = decode_request(body).session_id
    following = encode_request(BatchSteps(session, np.ones((1, ROWS, 5)), STEPS))
    with ExitStack() as held:
        for _ in range(SHARE):
            sent = head("/step/batch", "192.0.2.1", MEDIA_TYPE, len(body)) + body
            assert status_of(held.enter_context(dial(bounded, sent))) == 200
        assert ask(bounded, following, "192.0.2.1") == 429
        # As JSON the same rows take more bytes, and are counted before they are played too.
        as_json = {"session_id": session, "actions": np.ones((1, ROWS, 5)).tolist(), "repeat": 4_096 // ROWS}
        refused = bounded.client.post("/step/batch", json=as_json, headers={"X-Forwarded-For": "192.0.2.1"})
        assert refused.status_code == 429
    until(lambda: ask(bounded, body, "192.0.2.1") == 200)
    step = {"session_id": session, "actions": np.ones((1, ROWS, 5)).tolist()}
    assert bounded.post("/step/batch", step)["step"] == STEPS + 1


def test_answers_that_nobody_reads_are_cut_off(tmp_path: Path) -> None:
    with running_server(tmp_path, trusted_proxies="127.0.0.1", transfer_timeout_s="3") as server:
        body = open_batch(server)
        sockets = open_sockets(server)
        sent = head("/step/batch", "192.0.2.1", MEDIA_TYPE, len(body)) + body
        with dial(server, sent), dial(server, sent):
            until(lambda: open_sockets(server) >= sockets + 2)
            until(lambda: open_sockets(server) <= sockets)
            assert ask(server, body, "192.0.2.1") == 200, "what they held is free again"
        play(server)
        server.stop()
    log = server.log.read_text()
    assert "Traceback" not in log
    lines = [json.loads(line) for line in log.splitlines()]
    assert [line["status"] for line in lines if line.get("path") == "/step/batch"] == [200, 499, 499, 200]


def test_a_client_that_asks_for_many_small_answers_and_reads_none_is_cut_off(tmp_path: Path) -> None:
    with running_server(tmp_path, transfer_timeout_s="3", access_log="off") as server:
        sockets = open_sockets(server)
        # More than the kernel and the server keep of one connection.
        with dial(server, b"GET /info HTTP/1.1\r\nHost: x\r\n\r\n" * 2_000):
            until(lambda: open_sockets(server) > sockets)
            until(lambda: open_sockets(server) <= sockets)
        play(server)
        server.stop()


def test_bodies_that_never_end_are_bounded_per_client_and_in_all_and_hurt_no_other(bounded: RunningServer) -> None:
    assert bounded.process is not None
    play(bounded)
    before = memory_mb(bounded.process.pid, "VmRSS")
    length = 16_000_000
    # Two clients have four bodies each under way, which fill the room of all; which four, depends on their order.
    clients = (("192.0.2.1", [429] * 4), ("192.0.2.2", [429] * 4), ("192.0.2.3", [503] * 8))
    with ExitStack() as held:
        for client, expected in clients:
            sent = head("/step/batch", client, MEDIA_TYPE, length) + b" " * (length - 1)
            connections = [held.enter_context(dial(bounded, sent)) for _ in range(8)]
            until(partial(has_answers, connections, len(expected)))
            assert [status_of(connection) for connection in answered(connections)] == expected
            play(bounded)
        assert memory_mb(bounded.process.pid, "VmRSS") - before < 2 * ROOM / 1e6 + 60
    score = {"task_id": 1, "episode_log": []}
    until(lambda: bounded.client.post("/grader", json=score).status_code == 200)
