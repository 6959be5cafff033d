"""The load generator against a server that speaks the OpenAI API's streams."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from inferencegym.errors import RemoteError, ServerUnavailableError
from live.driver import EngineApi, EngineRequest, OpenLoop, play_closed, play_open
from live.metrics import read_page
from tests.servers import free_port

TOKEN_S = 0.02


class _Handler(BaseHTTPRequestHandler):
    """Writes a token every 20 ms, two at once after the first; refuses prompts of 13 tokens."""

    bodies: list[dict[str, Any]]
    running = 0
    peak = 0
    lock = threading.Lock()

    def do_GET(self) -> None:
        self.answer(200, json.dumps({"data": [{"id": "m", "max_model_len": 64}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        kind = type(self)
        with kind.lock:
            kind.bodies.append(body)
            kind.running += 1
            kind.peak = max(kind.peak, kind.running)
        try:
            if len(body["prompt"]) == 13:
                self.answer(400, b'{"error": {"message": "thirteen"}}')
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            written = 0
            while written < body["max_tokens"]:
                time.sleep(TOKEN_S)
                written = min(body["max_tokens"], written + (2 if written else 1))
                event = {"choices": [{"text": "x"}], "usage": {"completion_tokens": written}}
                self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            self.wfile.write(b"data: [DONE]\n\n")
        except (BrokenPipeError, ConnectionResetError):
            pass
        finally:
            with kind.lock:
                kind.running -= 1

    def answer(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def engine() -> Iterator[tuple[str, type[_Handler]]]:
    kind = type("Handler", (_Handler,), {"bodies": [], "running": 0, "peak": 0})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", kind
    server.shutdown()
    thread.join()
    server.server_close()


def test_requests_are_sent_when_due_and_timed_token_by_token(engine: tuple[str, type[_Handler]]) -> None:
    url, server = engine
    api = EngineApi(url).check()
    assert (api.model, api.max_model_len) == ("m", 64)
    late, early = play_open(api, [EngineRequest(0.3, 7, 5), EngineRequest(0.1, 3, 1)])
    assert (early.tokens, late.tokens, early.error, late.error) == (1, 5, "", "")
    assert early.sent_s is not None
    assert late.sent_s is not None
    assert early.sent_s >= 0.1
    assert late.sent_s >= 0.3
    assert early.ttft_ms() >= 1e3 * TOKEN_S  # type: ignore[operator]
    assert early.tpot_ms() is None
    # Four tokens after the first one came in two messages: half of the time between messages each.
    assert late.tpot_ms() >= 0.9 * 1e3 * TOKEN_S / 2  # type: ignore[operator]
    assert [tokens for _, tokens in late.tokens_at] == [1, 3, 5]
    first, second = server.bodies
    assert [len(first["prompt"]), len(second["prompt"])] == [3, 7]
    assert first["max_tokens"] == first["min_tokens"] == 1


def test_a_refused_request_says_what_the_engine_said_and_the_others_go_on(engine: tuple[str, type[_Handler]]) -> None:
    refused, served = play_open(EngineApi(engine[0]).check(), [EngineRequest(0, 13, 2), EngineRequest(0, 5, 2)])
    assert "400" in refused.error
    assert "thirteen" in refused.error
    assert not refused.completed
    assert served.completed


def test_clients_of_a_closed_loop_send_the_next_request_when_the_last_has_ended(
    engine: tuple[str, type[_Handler]],
) -> None:
    timings = play_closed(EngineApi(engine[0]).check(), [EngineRequest(0, 4, 3)] * 9, 3)
    assert len(timings) == 9
    assert all(timing.completed for timing in timings)
    assert engine[1].peak == 3


def test_leaving_an_open_loop_cancels_what_runs(engine: tuple[str, type[_Handler]]) -> None:
    with OpenLoop(EngineApi(engine[0]).check(), [EngineRequest(0, 4, 3), EngineRequest(0, 4, 10_000)]) as load:
        while not load.timings[0].completed:
            time.sleep(0.01)
    done, cancelled = load.timings
    assert done.error == ""
    assert cancelled.error == "cancelled"
    assert 0 < cancelled.tokens < 10_000


def test_a_request_tells_its_class_where_the_engine_serves_by_priority() -> None:
    request = EngineRequest(0.0, 4, 2, class_index=2)
    plain, by_class = (EngineApi("http://localhost", priorities=told).body(request) for told in (False, True))
    assert "priority" not in plain
    assert by_class["priority"] == 2


def test_an_address_without_an_engine_is_named() -> None:
    with pytest.raises(ServerUnavailableError, match="is the engine running"):
        EngineApi(f"http://127.0.0.1:{free_port()}").check()


def test_another_model_than_the_one_served_is_refused(engine: tuple[str, type[_Handler]]) -> None:
    with pytest.raises(RemoteError, match="it serves m"):
        EngineApi(engine[0], model="n").check()


def test_a_metrics_page_is_summed_over_processes_and_a_missing_series_is_named() -> None:
    page = read_page('# TYPE a gauge\na{engine="0"} 3\na{engine="1"} 4.5\n# TYPE c_info gauge\nc_info{block="16"} 1\n')
    assert page.total("a") == 7.5
    assert page.highest("a") == 4.5
    assert page.labels("c_info") == {"block": "16"}
    with pytest.raises(RemoteError, match="no series b"):
        page.total("b")
    with pytest.raises(RemoteError, match="not in Prometheus"):
        read_page("a b c\n")
