"""Server processes for tests: started as an operator starts them, used over sockets, and killed where a test asks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import httpx
import pytest

from inferencegym.errors import CapacityError

if TYPE_CHECKING:
    from inferencegym.client.openenv import EpisodeClient
    from server.sessions.store import SessionStore

ROOT = Path(__file__).resolve().parents[1]
START_TIMEOUT_S = 60
PATIENCE_S = 120
"""How long a test waits for a socket or a message: long enough on a busy machine."""
PATIENT: Final = {"connect_timeout_s": PATIENCE_S, "message_timeout_s": PATIENCE_S}
"""Arguments of OpenEnv's clients, whose default of 10 s for a handshake is too short on a busy machine."""

N_TEST_PROCESSES = 16


def free_port() -> int:
    """Port that stays free until it is used, and while a server that was killed is down.

    It is below the kernel's ephemeral ports (above 32,767), and other processes of pytest-xdist choose other ones.
    """
    here = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % N_TEST_PROCESSES
    ports = range(15_000 + here, 32_000, N_TEST_PROCESSES)
    # A generator of its own, since a test may have seeded the global one.
    for port in random.SystemRandom().sample(ports, 50):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("50 ports were tried, and all of them are in use")


def until(true: Callable[[], bool], limit_s: float = PATIENCE_S) -> None:
    """Wait until ``true()`` holds."""
    deadline = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < deadline, f"not within {limit_s:g} s"
        time.sleep(0.02)


async def reset_when_there_is_room(env: EpisodeClient, **arguments: Any) -> None:
    """Reset as soon as a server that was full has a place."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            await env.reset(**arguments)
            return
        except CapacityError:
            assert time.monotonic() < deadline, "nobody made room"
            await asyncio.sleep(0.02)


def wait_for_health(url: str, process: subprocess.Popen[bytes], limit_s: float = START_TIMEOUT_S) -> None:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        assert process.poll() is None, "the server ended before it answered"
        try:
            if httpx.get(f"{url}/health", timeout=1.0).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.05)
    raise AssertionError(f"no healthy answer from {url} within {limit_s} s")


@dataclass
class RunningServer:
    """A server process (with all its workers) and an HTTP client for it."""

    settings: dict[str, str]
    log: Path
    port: int = field(default_factory=free_port)
    before: str = ""
    """Python statements that run first: they shorten waits of hours for a test."""
    process: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = httpx.Client(base_url=self.url, timeout=30)

    def start(self, health: int = 200) -> RunningServer:
        """Start it and wait until /health answers with this status."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith("INFERENCEGYM_")}
        environment = {**clean, **self.settings, "INFERENCEGYM_PORT": str(self.port), "INFERENCEGYM_HOST": "127.0.0.1"}
        program = ["-c", f"{self.before}; from server.app import main; main()"] if self.before else ["-m", "server.app"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, *program],
                cwd=ROOT,
                env=environment,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            with contextlib.suppress(httpx.TransportError):
                if self.client.get("/health").status_code == health:
                    return self
            time.sleep(0.05)
        self.kill()
        pytest.fail(f"the server did not start:\n{self.log.read_text()[-4000:]}")

    def kill(self) -> None:
        """Kill the server and its workers like a crash: no signal handler runs."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Stop the server like an operator; fails the test unless it shuts down in order by itself."""
        # A process that ends on a signal says so in its status; with several workers the parent ends with 0.
        assert self._end(signal.SIGTERM) in (0, -signal.SIGTERM)
        assert "Application shutdown complete" in self.log.read_text()

    def _end(self, number: signal.Signals) -> int:
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            if number is signal.SIGKILL:
                os.killpg(self.process.pid, number)
            else:
                self.process.send_signal(number)
        return self.process.wait(timeout=30)

    def post(self, path: str, body: Any = None) -> dict[str, Any]:
        """POST and return the JSON answer; any status but 200 fails the test and shows the answer."""
        answer = self.client.post(path, json=body)
        assert answer.status_code == 200, f"{path} {body}: {answer.status_code} {answer.text}"
        return dict(answer.json())

    def get(self, path: str, **params: Any) -> dict[str, Any]:
        answer = self.client.get(path, params=params)
        assert answer.status_code == 200, f"{path} {params}: {answer.status_code} {answer.text}"
        return dict(answer.json())


async def position(store: SessionStore, session_id: str) -> tuple[str, int] | None:
    """Token and number of stored actions of a session; None for one that the store does not have."""
    stored = await store.get(session_id)
    return None if stored is None else (stored.token, len(stored.record.actions))


@contextlib.contextmanager
def running_server(directory: Path, *, before: str = "", health: int = 200, **settings: str) -> Iterator[RunningServer]:
    """Context with a server that keeps its sessions in ``directory`` and is stopped at the end."""
    named = {f"INFERENCEGYM_{name.upper()}": value for name, value in settings.items()}
    server = RunningServer({"INFERENCEGYM_DATA_DIR": str(directory), **named}, directory / "server.log", before=before)
    try:
        yield server.start(health)
    finally:
        server.client.close()
        if server.process is not None and server.process.poll() is None:
            server.kill()
