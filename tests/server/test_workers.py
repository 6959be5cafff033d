"""Worker processes of a server: the supervisor sees their deaths at once."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import uvicorn
from starlette.types import Receive, Scope, Send

from server.net.workers import Worker
from tests.servers import PATIENCE_S, ROOT, free_port, running_server, until


async def nothing(_scope: Scope, _receive: Receive, _send: Send) -> None:
    """An application that receives no requests."""


def test_a_worker_that_is_killed_during_a_health_check_ends_the_check() -> None:
    """Otherwise the supervisor waits a minute before it replaces workers: if all were killed, every client hangs."""
    worker = Worker(uvicorn.Config(nothing, port=0, lifespan="off", log_config=None), [])
    worker.start()
    assert worker.pid is not None
    with ThreadPoolExecutor(1) as pool:
        assert worker.is_alive(timeout=PATIENCE_S)
        os.kill(worker.pid, signal.SIGSTOP)
        until(lambda: Path(f"/proc/{worker.pid}/stat").read_text().split()[2] == "T")
        check = pool.submit(worker.is_alive, PATIENCE_S + 60)
        os.kill(worker.pid, signal.SIGKILL)
        assert check.result(timeout=PATIENCE_S) is False
    worker.join()


def test_a_data_file_of_another_release_is_refused_in_one_line(tmp_path: Path) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / "sessions.db")) as file:
        file.execute("PRAGMA user_version=1")
    environment = {**os.environ, "INFERENCEGYM_DATA_DIR": str(tmp_path), "INFERENCEGYM_PORT": str(free_port())}
    command = [sys.executable, "-m", "server.app"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert "The server was not started. " in done.stderr
    assert "written by another release" in done.stderr
    assert "Traceback" not in done.stderr


def test_workers_end_with_a_supervisor_that_was_killed(tmp_path: Path) -> None:
    """Otherwise they keep the port, and the server cannot be started again."""
    with running_server(tmp_path, workers="2") as server:
        assert server.process is not None
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()

        def nobody_listens() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", server.port)) != 0

        until(nobody_listens)
        server.start()
