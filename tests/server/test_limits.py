"""Limits of a real server: requests and memory of one client, and host names that it accepts."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import websockets.sync.client
from starlette.testclient import TestClient

from inferencegym.errors import InvalidConfigError
from server.app import create_app
from server.settings import Settings, load_settings
from tests.servers import PATIENCE_S, RunningServer, running_server

ONE_NETWORK = ("2001:db8:0:7::1", "2001:db8:0:7:ffff::2", "2001:0DB8:0:0007:8::3")
"""Addresses that one host with a /64 network can take."""
ONE_IPV4 = ("192.0.2.9", "::ffff:192.0.2.9", "::FFFF:c000:0209")
UPGRADE = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
}


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Behind a proxy on this machine, which says who sent a request."""
    limits = {"resets_per_minute": "3", "trusted_proxies": "127.0.0.1"}
    with running_server(tmp_path_factory.mktemp("counted"), **limits) as server:
        yield server


def reset_status(server: RunningServer, client: str, path: str = "/reset") -> int:
    return server.client.post(path, headers={"X-Forwarded-For": client}).status_code


def websocket_resets(server: RunningServer, client: str, path: str, n: int) -> list[str]:
    """Types of the frames that answer so many resets of one client."""
    url, headers = f"ws://127.0.0.1:{server.port}{path}", {"X-Forwarded-For": client}
    with websockets.sync.client.connect(url, proxy=None, additional_headers=headers, open_timeout=PATIENCE_S) as socket:
        answers: list[dict[str, Any]] = []
        for _ in range(n):
            socket.send(json.dumps({"type": "reset", "data": {}}))
            answers.append(json.loads(socket.recv(timeout=PATIENCE_S)))
    assert all("rate_limited" in answer["data"]["message"] for answer in answers if answer["type"] == "error")
    return [answer["type"] for answer in answers]


def test_resets_of_one_client_are_counted_together_over_http_and_websockets(counted: RunningServer) -> None:
    assert [reset_status(counted, "192.0.2.1") for _ in range(2)] == [200, 200]
    assert websocket_resets(counted, "192.0.2.1", "/traffic/ws", 2) == ["observation", "error"]
    assert reset_status(counted, "192.0.2.1", "/traffic/reset") == 429
    assert websocket_resets(counted, "192.0.2.2", "/ws", 4) == [*["observation"] * 3, "error"]
    assert reset_status(counted, "192.0.2.2") == 429


@pytest.mark.parametrize("addresses", [ONE_NETWORK, ONE_IPV4])
def test_a_client_has_one_allowance_whichever_of_its_addresses_it_uses(
    counted: RunningServer, addresses: Sequence[str]
) -> None:
    assert [reset_status(counted, address) for address in addresses] == [200, 200, 200]
    assert {reset_status(counted, address) for address in addresses} == {429}
    assert websocket_resets(counted, addresses[0], "/ws", 1) == ["error"]
    assert reset_status(counted, "2001:db8:0:8::1") == 200, "another network"


def test_the_unfinished_episodes_of_a_network_are_counted_together(tmp_path: Path) -> None:
    with running_server(tmp_path, max_sessions_per_client="3", trusted_proxies="127.0.0.1") as server:
        assert [reset_status(server, address) for address in (*ONE_NETWORK, ONE_NETWORK[0])] == [200, 200, 200, 429]
        assert reset_status(server, "2001:db8:0:8::1") == 200


def test_a_server_that_knows_its_names_answers_to_no_other(tmp_path: Path) -> None:
    with running_server(tmp_path, allowed_hosts="gym.example.com, *.example.org, [::1]") as server:

        def status(host: str, path: str = "/tasks") -> int:
            return server.client.get(path, headers={"Host": host}).status_code

        def handshake(host: str) -> int:
            """Status of the answer to a WebSocket's request."""
            with server.client.stream("GET", "/ws", headers={**UPGRADE, "Host": host}) as answer:
                return answer.status_code

        for host in ("gym.example.com", "GYM.example.com:7860", "a.b.example.org", "[::1]:7860"):
            assert (status(host), handshake(host)) == (200, 101), host
        for host in (
            "evil.example",
            "example.org",
            "anexample.org",
            "gym.example.com.evil.example",
            "127.0.0.1",
            "[::2]",
        ):
            assert (status(host), handshake(host)) == (403, 403), host
        for path in ("/health", "/metadata"):
            assert status("evil.example", path) == 200, "probes ask by address"
        refused = server.client.post("/reset", headers={"Host": "evil.example"}).json()["detail"]
        assert refused["code"] == "unknown_host"
        assert "INFERENCEGYM_ALLOWED_HOSTS" in refused["next"]


@pytest.mark.parametrize("wrong", ["http://a.example", "a.example:80", "*", "*example.com", "a..example", "::1"])
def test_a_host_that_could_never_be_asked_for_stops_the_start(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    monkeypatch.setenv("INFERENCEGYM_ALLOWED_HOSTS", f"a.example,{wrong}")
    with pytest.raises(InvalidConfigError) as refused:
        load_settings()
    assert refused.value.field == "INFERENCEGYM_ALLOWED_HOSTS"


def test_a_refused_request_uses_up_no_allowance(tmp_path: Path) -> None:
    with running_server(tmp_path, resets_per_minute="2") as server:
        for _ in range(4):  # as a page of another site may send them
            assert server.client.get("/reset", headers={"sec-fetch-site": "cross-site"}).status_code == 405
            assert server.client.post("/reset", headers={"sec-fetch-site": "cross-site"}).status_code == 403
            assert server.client.post("/reset", headers={"x-long": "x" * 70_000}).status_code == 400
        statuses = [server.client.post("/reset", json={"seed": "x"}).status_code for _ in range(3)]
    assert statuses == [422, 422, 429]


def test_a_thread_that_computes_holds_up_the_event_loop_for_less_than_pythons_own_5_ms() -> None:
    done = threading.Event()

    def compute() -> None:
        while not done.is_set():
            sum(range(1_000))

    async def waits() -> list[float]:
        found = []
        for _ in range(40):
            began = time.perf_counter()
            await asyncio.sleep(0.001)
            found.append(time.perf_counter() - began - 0.001)
        return found

    with TestClient(create_app(Settings(store_url="memory://", access_log="off"))) as client:
        thread = threading.Thread(target=compute)
        thread.start()
        try:
            assert client.portal is not None
            # The shortest waits: on a busy machine some are long for other reasons.
            assert sorted(client.portal.call(waits))[2] < 0.0045
        finally:
            done.set()
            thread.join()


@pytest.mark.parametrize("pieces", [1, 7])
def test_a_head_over_64_kib_is_refused_however_it_arrives(counted: RunningServer, pieces: int) -> None:
    def status(head: bytes) -> int:
        with socket.create_connection(("127.0.0.1", counted.port), timeout=20) as connection:
            size = len(head) // pieces + 1
            for at in range(0, len(head), size):
                connection.sendall(head[at : at + size])
                time.sleep(0.02)
            answer = http.client.HTTPResponse(connection)
            answer.begin()
            answer.read()
            return answer.status

    one = b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: %s\r\n\r\n"
    many = b"GET /health HTTP/1.1\r\nHost: x\r\n%s\r\n"
    path = b"GET /health?%s HTTP/1.1\r\nHost: x\r\n\r\n"
    for head, filling in ((one, b"a"), (many, b"X-Short: a\r\n"), (path, b"a")):
        assert status(head % (filling * (60_000 // len(filling)))) == 200
        # A name and its value count without the four bytes between and after them.
        assert status(head % (filling * (110_000 // len(filling)))) == 400
    both = b"GET /health?%s HTTP/1.1\r\nHost: x\r\nX-Long: %s\r\n\r\n"
    assert status(both % (b"a" * 30_000, b"a" * 30_000)) == 200
    assert status(both % (b"a" * 30_000, b"a" * 40_000)) == 400, "a query and headers count together"
