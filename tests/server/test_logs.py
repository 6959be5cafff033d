"""The server's log."""

from __future__ import annotations

import io
import json
import logging
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from websockets.sync.client import connect

from server.app import create_app
from server.net.logs import JsonFormatter
from server.settings import Settings
from tests.servers import ROOT, running_server


class Pipe(io.StringIO):
    """Keeps what was flushed, and fails as long as it is full."""

    flushed = ""
    is_full = False

    def flush(self) -> None:
        if self.is_full:
            raise OSError("no space")
        self.flushed = self.getvalue()


def test_a_line_is_out_at_once_and_one_that_cannot_be_written_fails_no_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipe = Pipe()
    monkeypatch.setattr(sys, "stderr", pipe)
    with TestClient(create_app(Settings(store_url="memory://", access_log="all"))) as client:

        def paths() -> list[str]:
            assert client.get("/metadata").status_code == 200
            # Python itself tells standard error of another library's log that is closed.
            return [json.loads(line)["path"] for line in pipe.flushed.splitlines() if line.startswith("{")]

        assert paths() == ["/metadata"]
        pipe.is_full = True
        assert paths() == ["/metadata"]
        pipe.is_full = False
        assert paths()[0] == "/metadata"


def test_a_request_is_logged_with_the_milliseconds_that_it_took(capfd: pytest.CaptureFixture[str]) -> None:
    with TestClient(create_app(Settings(store_url="memory://", access_log="all"))) as client:
        began = time.perf_counter()
        client.post("/play", json={"task_id": 1, "agent": "naive"})
        took_ms = 1000 * (time.perf_counter() - began)
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line.startswith("{")]
    [line] = [line for line in lines if line.get("path") == "/play"]
    assert 1.0 < line["ms"] <= took_ms
    assert (line["event"], line["level"], line["method"], line["status"]) == ("request", "info", "POST", 200)


@pytest.mark.parametrize("setting", [{"INFERENCEGYM_WORKERS": "0"}, {}], ids=["wrong setting", "port in use"])
def test_a_server_that_does_not_start_says_why_in_the_format_of_its_log(
    tmp_path: Path, setting: dict[str, str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        place = {"INFERENCEGYM_DATA_DIR": str(tmp_path), "INFERENCEGYM_HOST": "127.0.0.1", "INFERENCEGYM_PORT": port}
        done = subprocess.run(
            [sys.executable, "-m", "server.app"],
            cwd=ROOT,
            env={**os.environ, **place, **setting},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    (line,) = map(json.loads, done.stderr.splitlines())
    why = "INFERENCEGYM_WORKERS: '0' is not allowed" if setting else f"port {port} of 127.0.0.1 cannot be used: Address"
    assert line["level"] == "error"
    assert line["message"].startswith(f"The server was not started. {why}")


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


def test_a_socket_has_a_line_when_it_opens_and_one_when_it_closes(tmp_path: Path) -> None:
    for mode, events in (("all", ["websocket_open", "websocket_close"]), ("off", [])):
        folder = tmp_path / mode
        folder.mkdir()
        with running_server(folder, access_log=mode) as server:
            with connect(server.url.replace("http", "ws", 1) + "/ws") as socket_to:
                socket_to.send('{"type": "state"}')
                socket_to.recv()
            server.stop()
        lines = [json.loads(line) for line in server.log.read_text().splitlines()]
        about_it = [line for line in lines if "websocket" in str(line).lower() or "connection" in str(line)]
        assert [line.get("event") for line in about_it] == events
        assert {(line["path"], line["client"]) for line in about_it} <= {("/ws", "127.0.0.1")}
