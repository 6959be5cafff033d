"""Load of many sessions at once on one server of this machine: over HTTP, each on its own connection, and WebSockets.

A session ends with its first answer other than 200 (503 if the machine is so busy that the store's file stays locked
for INFERENCEGYM_STORE_TIMEOUT_S). :func:`own_server` starts a server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import websockets

from benchmarks.report import ROOT


@dataclass
class Report:
    """Results of a load test as its clients saw them."""

    statuses: Counter[str] = field(default_factory=Counter)
    rewards: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    """Rewards of every session by kind and seed, for comparison with episodes played in process."""

    def refused(self) -> int:
        """Number of answers other than 200 (HTTP) or an observation (WebSocket)."""
        return sum(n for status, n in self.statuses.items() if status not in ("200", "observation"))


class Connection:
    """A minimal keep-alive HTTP/1.1 connection, so that the server is measured and not the client."""

    def __init__(self, host: str, port: int) -> None:
        self._address = (host, port)

    async def open(self) -> None:
        self._reader, self._writer = await asyncio.open_connection(*self._address)

    def close(self) -> None:
        self._writer.close()

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        data = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: load\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
        )
        self._writer.write(head.encode() + b"\r\n" + data)
        answer = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        length = next(
            int(line.split(":")[1]) for line in answer.split("\r\n") if line.lower().startswith("content-length")
        )
        return int(answer.split(" ", 2)[1]), json.loads(await self._reader.readexactly(length))


def action(seed: int, step: int) -> dict[str, Any]:
    """Action of the session with this seed at this step, deterministic so that the episode can be replayed."""
    rng = random.Random(1_000_003 * seed + step)
    return {"batch_size": rng.randint(1, 512), "kv_budget": round(rng.uniform(0.1, 1.0), 3)}


def episode(seed: int, steps: int) -> dict[str, Any]:
    """Reset body of an episode that this many steps finish, because a server limits unfinished episodes."""
    return {"task_id": 1 + seed % 3, "seed": seed, "config": {"episode_length": max(1, steps)}}


async def play_http(address: tuple[str, int], seed: int, steps: int, report: Report, start: asyncio.Barrier) -> None:
    connection = Connection(*address)
    await connection.open()
    try:
        await start.wait()
        status, started = await connection.post("/reset", episode(seed, steps))
        report.statuses[str(status)] += 1
        if status != 200:
            return
        rewards = report.rewards.setdefault(("http", seed), [])
        for step in range(1, steps + 1):
            body = {"session_id": started["session_id"], "action": action(seed, step), "step": step}
            status, answer = await connection.post("/step", body)
            report.statuses[str(status)] += 1
            if status != 200:
                return  # later steps would be out of order
            rewards.append(answer["reward"])
        status, _ = await connection.post("/grader", {"session_id": started["session_id"]})
        report.statuses[str(status)] += 1
    finally:
        connection.close()


async def play_websocket(url: str, seed: int, steps: int, report: Report, start: asyncio.Barrier) -> None:
    address = f"{url.replace('http', 'ws', 1)}/ws"
    async with websockets.connect(address, compression=None, proxy=None, open_timeout=60) as socket_:
        await start.wait()

        async def ask(frame: dict[str, Any]) -> dict[str, Any]:
            await socket_.send(json.dumps(frame))
            answer: dict[str, Any] = json.loads(await socket_.recv())
            report.statuses[str(answer["type"])] += 1
            return answer

        await ask({"type": "reset", "data": episode(seed, steps)})
        rewards = report.rewards.setdefault(("websocket", seed), [])
        for step in range(1, steps + 1):
            answer = await ask({"type": "step", "data": action(seed, step)})
            if answer["type"] != "observation":
                return
            rewards.append(answer["data"]["reward"])


async def load(url: str, sessions: int, steps: int, sockets: int, seconds: float, first_seed: int = 0) -> Report:
    """Play all sessions concurrently; they start together once all are connected."""
    report = Report()
    # All sessions connect first; the clock starts when they begin together.
    start = asyncio.Barrier(sessions + sockets + 1)
    async with asyncio.timeout(seconds), asyncio.TaskGroup() as group:
        for seed in range(first_seed, first_seed + sessions):
            group.create_task(play_http(address_of(url), seed, steps, report, start))
        for seed in range(first_seed, first_seed + sockets):
            group.create_task(play_websocket(url, seed, steps, report, start))
        await start.wait()
    return report


def address_of(url: str) -> tuple[str, int]:
    """Host and port of a URL."""
    parts = urlsplit(url)
    return str(parts.hostname), parts.port or 80


def allow_many_connections() -> None:
    """Raise this process's limit on open files to the system's hard limit."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def memory_mb(pid: int, what: str = "VmHWM") -> float:
    """Resident memory of a process, at its peak (VmHWM) or now (VmRSS), in MB of 1e6 bytes."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) * 1024 / 1e6 for line in status.splitlines() if line.startswith(what))


@contextlib.contextmanager
def own_server() -> Iterator[tuple[str, int]]:
    """URL and process id of a server of this clone, which keeps its sessions in a temporary directory."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        names = {"PORT": port, "HOST": "127.0.0.1", "DATA_DIR": directory, "ACCESS_LOG": "errors"}
        clean = {name: value for name, value in os.environ.items() if not name.startswith("INFERENCEGYM_")}
        environment = {**clean, **{f"INFERENCEGYM_{name}": str(value) for name, value in names.items()}}
        log = stack.enter_context(Path(directory, "server.log").open("wb"))
        server = subprocess.Popen([sys.executable, "-m", "server.app"], cwd=ROOT, env=environment, stderr=log)
        try:
            url = f"http://127.0.0.1:{port}"
            deadline = time.monotonic() + 30
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                        break
                if server.poll() is not None or time.monotonic() > deadline:
                    sys.exit("the server did not start: " + Path(directory, "server.log").read_text()[-2000:])
                time.sleep(0.1)
            yield url, server.pid
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(timeout=30)
