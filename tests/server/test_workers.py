"""Worker processes of a server: the supervisor sees their deaths at once."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import uvicorn
from starlette.types import Receive, Scope, Send

from server.net.workers import Worker
from tests.servers import PATIENCE_S, until


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
