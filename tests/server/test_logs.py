"""The server's log: lines wait a moment for others, and go out together."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import sys
import time
from collections.abc import Callable

import pytest
from starlette.testclient import TestClient

from server.app import create_app
from server.net.logs import FLUSH_EVERY_S, FLUSH_LINES, JsonFormatter, LineLog
from server.settings import Settings


class Pipe(io.StringIO):
    """Keeps what was flushed."""

    flushed = ""

    def flush(self) -> None:
        self.flushed = self.getvalue()


def after(write: Callable[[LineLog], None], seconds: float) -> list[int]:
    """Numbers of the lines that are out so long after they were written."""
    pipe = Pipe()

    async def scenario() -> None:
        write(LineLog(pipe))
        await asyncio.sleep(seconds)

    asyncio.run(scenario())
    return [json.loads(line)["n"] for line in pipe.flushed.splitlines()]


def lines(count: int) -> Callable[[LineLog], None]:
    def write(log: LineLog) -> None:
        for n in range(count):
            log.write({"n": n})

    return write


def test_a_line_is_out_within_its_time_without_another_one() -> None:
    assert after(lines(1), FLUSH_EVERY_S + 0.3) == [0]
    assert after(lines(3), 0.0) == []


def test_many_lines_are_out_at_once() -> None:
    assert FLUSH_LINES == 200
    assert after(lines(199), 0.0) == []
    assert after(lines(200), 0.0) == list(range(200))
    assert after(lines(201), 0.0) == list(range(200))


def test_lines_after_a_flush_go_out_in_their_turn() -> None:
    pipe = Pipe()

    async def scenario() -> None:
        log = LineLog(pipe)
        for n in range(2):
            log.write({"n": n})
            log.flush()
            log.flush()
        log.write({"n": 2})
        await asyncio.sleep(FLUSH_EVERY_S + 0.3)

    asyncio.run(scenario())
    assert [json.loads(line)["n"] for line in pipe.flushed.splitlines()] == [0, 1, 2]


def test_a_request_is_logged_with_the_milliseconds_that_it_took(capfd: pytest.CaptureFixture[str]) -> None:
    with TestClient(create_app(Settings(store_url="memory://", access_log="all"))) as client:
        began = time.perf_counter()
        client.post("/play", json={"task_id": 1, "agent": "naive"})
        took_ms = 1000 * (time.perf_counter() - began)
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line.startswith("{")]
    [line] = [line for line in lines if line.get("path") == "/play"]
    assert 1.0 < line["ms"] <= took_ms
    assert (line["event"], line["level"], line["method"], line["status"]) == ("request", "info", "POST", 200)


def test_a_record_is_one_line_of_json_with_its_traceback() -> None:
    try:
        raise ZeroDivisionError("by hand")
    except ZeroDivisionError:
        record = logging.LogRecord("a.b", logging.ERROR, "f.py", 1, "went %s", ("wrong",), sys.exc_info())
    line = json.loads(JsonFormatter().format(record))
    assert (line["level"], line["logger"], line["message"]) == ("error", "a.b", "went wrong")
    assert line["time"] == record.created
    assert "ZeroDivisionError: by hand" in line["traceback"]
    plain = json.loads(JsonFormatter().format(logging.LogRecord("a", logging.INFO, "f.py", 1, "fine", (), None)))
    assert set(plain) == {"time", "level", "logger", "message"}
