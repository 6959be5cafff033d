"""The load generator against a server that speaks the OpenAI API's streams."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from inferencegym.errors import RemoteError, ServerUnavailableError
from live.driver import EngineApi, EngineRequest, OpenLoop, play_closed, play_open
from live.metrics import read_page
from tests.live_stand_ins import Answer, StandIn
from tests.servers import free_port

TOKEN_S = 0.02


class Writer:
    """Writes a token every 20 ms, two at once after the first; refuses prompts of 13 tokens."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.running = self.peak = 0
        self._lock = threading.Lock()

    def answer(self, _path: str, body: dict[str, Any]) -> Answer:
        self.bodies.append(body)
        return (400, {"error": {"message": "thirteen"}}) if len(body["prompt"]) == 13 else (200, self.stream(body))

    def stream(self, body: dict[str, Any]) -> Iterator[bytes]:
        with self._lock:
            self.running += 1
            self.peak = max(self.peak, self.running)
        written = 0
        while written < body["max_tokens"]:
            time.sleep(TOKEN_S)
            written = min(body["max_tokens"], written + (2 if written else 1))
            event = {"choices": [{"text": "x"}], "usage": {"completion_tokens": written}}
            yield f"data: {json.dumps(event)}\n\n".encode()
        with self._lock:
            self.running -= 1
        yield b"data: [DONE]\n\n"


@pytest.fixture
def engine() -> Iterator[tuple[str, Writer]]:
    writer = Writer()
    with StandIn({}, writer.answer) as server:
        yield server.url, writer


def test_requests_are_sent_when_due_and_timed_token_by_token(engine: tuple[str, Writer]) -> None:
    url, server = engine
    api = EngineApi(url).check()
    assert (api.model, api.max_model_len) == ("m", 1024)
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


def test_a_refused_request_says_what_the_engine_said_and_the_others_go_on(engine: tuple[str, Writer]) -> None:
    refused, served = play_open(EngineApi(engine[0]).check(), [EngineRequest(0, 13, 2), EngineRequest(0, 5, 2)])
    assert "400" in refused.error
    assert "thirteen" in refused.error
    assert not refused.completed
    assert served.completed


def test_clients_of_a_closed_loop_send_the_next_request_when_the_last_has_ended(
    engine: tuple[str, Writer],
) -> None:
    timings = play_closed(EngineApi(engine[0]).check(), [EngineRequest(0, 4, 3)] * 9, 3)
    assert len(timings) == 9
    assert all(timing.completed for timing in timings)
    assert engine[1].peak == 3


def test_leaving_an_open_loop_cancels_what_runs(engine: tuple[str, Writer]) -> None:
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


def test_another_model_than_the_one_served_is_refused(engine: tuple[str, Writer]) -> None:
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
