"""Malicious clients over real sockets: the server refuses them, loses nothing and serves the others."""

from __future__ import annotations

import contextlib
import hmac
import http.client
import json
import secrets
import select
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import websockets.exceptions
import websockets.sync.client
from starlette.testclient import TestClient

from env.inference_env import InferenceEnv
from server.app import create_app
from server.settings import Settings
from tests.servers import RunningServer, running_server

TIMEOUT_S = 0.7
MOST_BYTES = 64_000_000
"""More than any path takes, and than the sockets of both sides hold."""
BODY_PATHS = [
    "/reset",
    "/step",
    "/grader",
    "/step/batch",
    "/traffic/step",
    "/mcp",
    "/traffic/mcp",
    *(f"/inference_gym/{name}" for name in ("tasks", "num_tasks", "task", "task_range")),
    "/traffic/traffic_controller/task",
]


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    directory = tmp_path_factory.mktemp("strict")
    with running_server(directory, transfer_timeout_s=str(TIMEOUT_S), access_log="errors") as server:
        yield server


def connect(server: RunningServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=20)


def all_of(connection: socket.socket) -> bytes:
    """All bytes that the server sends until it closes the connection."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while chunk := connection.recv(65536):
            received += chunk
    return received


def one_answer(connection: socket.socket) -> tuple[int, bytes]:
    answer = http.client.HTTPResponse(connection)
    answer.begin()
    return answer.status, answer.read()


def post(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + body


def chunked(path: str) -> bytes:
    """The head of a request whose body comes in chunks."""
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", "Transfer-Encoding: chunked"]
    return "\r\n".join([*lines, "", ""]).encode()


# ---------------------------------------------------------------- slow and endless


def test_a_client_that_sends_all_of_a_body_that_is_too_long_gets_the_answer(strict: RunningServer) -> None:
    for n_bytes in (1_100_000, 12_000_000):
        with connect(strict) as connection:
            connection.sendall(post("/step", bytes(n_bytes)))
            received = b""
            while chunk := connection.recv(65536):  # a reset connection raises
                received += chunk
        assert received.startswith(b"HTTP/1.1 413 ")


def test_the_rest_of_a_refused_body_is_bounded(strict: RunningServer) -> None:
    sent = 0
    with connect(strict) as connection, contextlib.suppress(ConnectionError):
        connection.sendall(post("/step", b"", "X: y").replace(b"Content-Length: 0", b"Content-Length: 10000000000"))
        while sent < 500_000_000:
            connection.sendall(bytes(1_000_000))
            sent += 1_000_000
    assert 32_000_000 <= sent < 100_000_000
    with connect(strict) as connection:
        connection.sendall(post("/step", b"").replace(b"Content-Length: 0", b"Content-Length: 10000000000"))
        assert all_of(connection).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize(
    "begun",
    [
        b"GET / HTTP/1.1\r\nhost: localhost\r\nx-endless: ",
        b"GET /",
        b"POST /reset HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nx-endless: ",
    ],
    ids=["header", "path", "trailer"],
)
def test_a_head_or_trailer_that_never_ends_is_cut_off(strict: RunningServer, begun: bytes) -> None:
    sent = 0
    with connect(strict) as connection, contextlib.suppress(ConnectionError):
        connection.sendall(begun)
        while sent < MOST_BYTES:
            connection.sendall(b"x" * 65_536)
            sent += 65_536
    assert sent < MOST_BYTES


def test_a_head_of_the_largest_size_may_arrive_in_any_pieces(strict: RunningServer) -> None:
    head = b"GET /tasks HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nx-long: " + b"x" * 60_000
    with connect(strict) as connection:
        for at in range(0, len(head), 1_000):
            connection.sendall(head[at : at + 1_000])
        connection.sendall(b"\r\n\r\n")
        assert all_of(connection).startswith(b"HTTP/1.1 200 ")


def test_trailers_are_not_headers(strict: RunningServer) -> None:
    with connect(strict) as connection:
        connection.sendall(
            b"POST /reset HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nx-client-id: mine\r\n"
            b"content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        strict.get("/health")  # so that the rest comes when the request is being handled
        connection.sendall(b"2\r\n{}\r\n0\r\nx-client-id: others\r\n\r\n")
        assert all_of(connection).startswith(b"HTTP/1.1 200 ")
    assert strict.client.get("/state", headers={"x-client-id": "mine"}).status_code == 200
    assert strict.client.get("/state", headers={"x-client-id": "mine, others"}).status_code == 404


def test_a_connection_may_be_silent_between_two_requests_for_longer_than_a_head_may_take(strict: RunningServer) -> None:
    with connect(strict) as connection:
        connection.sendall(post("/reset", b"{}"))
        assert one_answer(connection)[0] == 200
        time.sleep(1.5 * TIMEOUT_S)
        connection.sendall(post("/reset", b"{}"))
        assert one_answer(connection)[0] == 200


def test_a_request_that_is_answered_before_its_end_does_not_cost_its_connection(strict: RunningServer) -> None:
    with connect(strict) as connection:
        connection.sendall(chunked("/nowhere"))
        assert one_answer(connection)[0] == 404
        connection.sendall(b"4\r\nlate\r\n0\r\n\r\n")
        time.sleep(0.05)
        connection.sendall(post("/reset", b"{}"))
        assert one_answer(connection)[0] == 200
        time.sleep(1.5 * TIMEOUT_S)
        connection.sendall(post("/reset", b"{}"))
        assert one_answer(connection)[0] == 200


def test_a_websocket_on_the_connection_of_an_answered_request_may_be_silent(strict: RunningServer) -> None:
    with connect(strict) as connection:
        connection.sendall(post("/reset", b"{}"))
        assert one_answer(connection)[0] == 200
        lines = ["GET /ws HTTP/1.1", "Host: x", "Upgrade: websocket", "Connection: Upgrade"]
        lines += ["Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA=="]
        connection.sendall("\r\n".join([*lines, "", ""]).encode())
        assert connection.recv(65536).startswith(b"HTTP/1.1 101 ")
        connection.settimeout(2 * TIMEOUT_S)
        with pytest.raises(TimeoutError):
            connection.recv(1)


@pytest.mark.parametrize("path", BODY_PATHS)
def test_a_chunked_body_over_the_limit_is_refused_while_it_arrives(strict: RunningServer, path: str) -> None:
    piece, sent, answered = b"10000\r\n" + b" " * 0x10000 + b"\r\n", 0, False
    with connect(strict) as connection:
        connection.sendall(chunked(path))
        with contextlib.suppress(ConnectionError):
            while sent < MOST_BYTES and not answered:
                connection.sendall(piece)
                sent += len(piece)
                answered = bool(select.select([connection], [], [], 0)[0])
        status, answer = one_answer(connection)
        assert (status, json.loads(answer)["detail"]["code"]) == (413, "body_too_large")
    assert strict.get("/health")["status"] == "healthy"


@pytest.mark.parametrize("path", BODY_PATHS)
def test_a_body_that_does_not_arrive_in_time_is_refused(strict: RunningServer, path: str) -> None:
    with connect(strict) as connection:
        connection.sendall(chunked(path) + b"1\r\n{\r\n")
        status, answer = one_answer(connection)
    assert (status, json.loads(answer)["detail"]["code"]) == (408, "body_timeout")


@pytest.mark.parametrize(
    ("path", "body", "key"),
    [
        ("/mcp", b'{"jsonrpc": "2.0", "method": "tools/list", "id": 1}', "jsonrpc"),
        ("/traffic/mcp", b'{"jsonrpc": "2.0", "method": "tools/list", "id": 1}', "jsonrpc"),
        ("/inference_gym/tasks", b'{"split": "train"}', "tasks"),
        ("/traffic/traffic_controller/task", b'{"split": "train", "index": 0}', "task"),
    ],
)
def test_openenvs_paths_take_bodies_in_pieces(strict: RunningServer, path: str, body: bytes, key: str) -> None:
    with connect(strict) as connection:
        connection.sendall(chunked(path))
        for piece in (body[:1], body[1:]):
            time.sleep(0.05)
            connection.sendall(b"%x\r\n%b\r\n" % (len(piece), piece))
        connection.sendall(b"0\r\n\r\n")
        status, answer = one_answer(connection)
    assert status == 200
    assert key in json.loads(answer)


# ---------------------------------------------------------------- malformed


@pytest.mark.parametrize(
    "sent",
    [
        b"\x00\x01\x02\x03\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # the beginning of a TLS handshake
        b"POST /reset HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /reset HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
        b"POST /reset HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nBad Header: 1\r\n\r\n",
    ],
)
def test_bytes_that_are_not_http_are_refused_and_the_connection_closed(strict: RunningServer, sent: bytes) -> None:
    with connect(strict) as connection:
        connection.sendall(sent)
        assert not all_of(connection).startswith(b"HTTP/1.1 2")
    assert strict.get("/health")["status"] == "healthy"


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 200_000,
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        b'{"session_id": "' + b"x" * 500_000 + b'"}',
        b'{"seed": ' + b"9" * 100_000 + b"}",
        b'{"seed": 1' + b"0" * 400 + b"}",
        b'{"config": {"alpha": 1e400}}',
        b'{"\\ud800": 1}',
        b'{"task_id": "\\u0000"}',
        b"\xef\xbb\xbf{}",
        "{}".encode("utf-16"),
        b'{"session_id": "\xff"}',
        b'{"seed": 1, "seed": 1}',
        b"{" + b",".join(b'"k%d": 1' % i for i in range(50_000)) + b"}",
    ],
)
@pytest.mark.parametrize("path", ["/reset", "/step", "/grader", "/traffic/reset", "/traffic/step", "/traffic/grader"])
def test_deep_huge_and_badly_encoded_json_is_refused_in_a_moment(strict: RunningServer, path: str, body: bytes) -> None:
    began = time.monotonic()
    answer = strict.client.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code in (400, 404, 413, 422)  # 400: the traffic controller's unknown task
    assert answer.json()["detail"]["next"]
    assert len(answer.content) < 2_000, "the answer repeats what was sent"
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    "path",
    [
        "/%00",
        "/web/../../../etc/passwd",
        "/web/%2e%2e/%2e%2e/etc/passwd",
        "/%ff%fe",
        "//etc/passwd",
        "/openenv.yaml/..",
    ],
)
def test_strange_paths_lead_nowhere(strict: RunningServer, path: str) -> None:
    with connect(strict) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        status = int(all_of(connection).split(b" ", 2)[1])
    assert status in (307, 404)


def test_unknown_methods_and_header_bytes_are_no_server_error(strict: RunningServer) -> None:
    for method in ("DELETE", "PUT", "TRACE", "PROPFIND"):
        assert strict.client.request(method, "/step").status_code in (400, 405)
    with connect(strict) as connection:
        connection.sendall(post("/reset", b"{}", "X-Client-Id: \xff\xfe".encode().decode("latin-1"), "Cookie: a=\x80"))
        assert one_answer(connection)[0] == 200


# ---------------------------------------------------------------- secrets


def test_session_ids_are_128_random_bits() -> None:
    with TestClient(create_app(Settings(store_url="memory://", access_log="off"))) as client:
        ids = [client.post("/reset").json()["session_id"] for _ in range(200)]
    assert len(set(ids)) == 200
    numbers = [int(one, 16) for one in ids]
    assert all(len(one) == 32 for one in ids)
    # Each of the 128 bits is set in about half of them: 200 fair coins give 55 to 145 heads all but surely.
    for bit in range(128):
        assert 55 < sum(number >> bit & 1 for number in numbers) < 145


def test_the_api_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[int, int]] = []

    def spy(sent: Any, key: Any) -> bool:
        compared.append((len(sent), len(key)))
        return secrets.compare_digest(sent, key)

    monkeypatch.setattr(hmac, "compare_digest", spy)
    with TestClient(create_app(Settings(store_url="memory://", access_log="off", api_key="correct horse"))) as client:
        for key in ("x", "correct hors", "correct horse battery staple", "y" * 10_000):
            assert client.get("/tasks", headers={"X-API-Key": key}).status_code == 401
        assert client.get("/metrics").status_code == 401
    assert compared == [(32, 32)] * 4, "digests of one length, whatever was sent"


# ---------------------------------------------------------------- limits under every prefix


def test_resets_are_limited_under_every_prefix() -> None:
    settings = Settings(store_url="memory://", access_log="off", env="traffic", resets_per_minute=2)
    with TestClient(create_app(settings)) as client:
        paths = ["/serving/reset", "/reset", "/traffic/reset", "/serving/reset"]
        assert [client.post(path).status_code for path in paths] == [200, 200, 429, 429]


# ---------------------------------------------------------------- what the log says


def logged(server: RunningServer) -> list[dict[str, Any]]:
    return [json.loads(line) for line in server.log.read_text().splitlines() if line.startswith("{")]


def test_a_client_that_goes_away_in_the_middle_of_its_body_leaves_one_quiet_line(tmp_path: Path) -> None:
    with running_server(tmp_path) as server:
        for _ in range(3):
            with connect(server) as connection:
                connection.sendall(post("/reset", b"{}", "X-Request-Id: gone")[:-1])
                time.sleep(0.05)
        server.post("/reset")
        counted = server.client.get("/metrics").text
        server.stop()
        lines = [line for line in logged(server) if line.get("request_id") == "gone"]
        assert [line["status"] for line in lines] == [499] * 3
        assert 'inferencegym_http_requests_total{path="/reset",status="499"} 3.0' in counted
        assert "Traceback" not in server.log.read_text()


def test_a_failure_of_ours_is_logged_with_its_cause_under_the_id_that_the_client_got(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    async def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("hidden")

    app = create_app(Settings(store_url="memory://"))
    with TestClient(app, raise_server_exceptions=False) as client:
        monkeypatch.setattr(app.state.context.sessions, "reset", broken)
        answer = client.post("/reset", headers={"X-Request-Id": "find-me"})
    assert (answer.status_code, answer.json()["detail"]["code"]) == (500, "internal")
    assert answer.headers["x-request-id"] == "find-me"
    assert "hidden" not in answer.text
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line.startswith("{")]
    [line] = [line for line in lines if line.get("request_id") == "find-me"]
    assert (line["level"], line["status"]) == ("error", 500)
    assert "ZeroDivisionError: hidden" in line["traceback"]


def test_a_step_that_fails_is_reported_and_taken_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A step is stored before it is played: sent again with its number, it is the same step and not the next one."""

    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("hidden")

    with TestClient(create_app(Settings(store_url="memory://")), raise_server_exceptions=False) as client:
        session_id = client.post("/reset", json={"task_id": 1, "seed": 1}).json()["session_id"]
        body = {"session_id": session_id, "action": {"batch_size": 64}}
        with monkeypatch.context() as patched:
            patched.setattr(InferenceEnv, "play", broken)
            answer = client.post("/step", json=body, headers={"x-request-id": "find-me"})
        assert (answer.status_code, answer.json()["detail"]["code"]) == (500, "internal")
        assert answer.headers["x-request-id"] == "find-me"
        assert "hidden" not in answer.text
        assert client.post("/step", json={**body, "step": 1}).status_code == 200
        assert client.get("/state", params={"session_id": session_id}).json()["step_count"] == 1
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line.startswith("{")]
    [line] = [line for line in lines if line.get("request_id") == "find-me"]
    assert (line["level"], line["status"]) == ("error", 500)
    assert "ZeroDivisionError: hidden" in line["traceback"]


def test_websockets_that_break_off_in_the_middle_of_an_episode_leave_no_error_in_the_log(tmp_path: Path) -> None:
    reset = json.dumps({"type": "reset", "data": {"task_id": 3, "seed": 1}})
    step = json.dumps({"type": "step", "data": {"batch_size": 64}})
    with running_server(tmp_path) as server:
        for frames in ([reset], [reset, step], [reset] * 20, [reset, *[step] * 50]):
            with websockets.sync.client.connect(
                f"ws://127.0.0.1:{server.port}/ws", proxy=None, close_timeout=0.2
            ) as client:
                for frame in frames:
                    client.send(frame)
                # Reset by the client: whatever the server still sends meets a closed port.
                client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.socket.shutdown(socket.SHUT_RD)
                client.socket.close()
        deadline = time.monotonic() + 20
        while "inferencegym_websockets 0.0" not in server.client.get("/metrics").text:
            assert time.monotonic() < deadline, "a broken connection still counts as open"
            time.sleep(0.1)
        server.stop()
        assert [line for line in logged(server) if line["level"] == "error"] == []
