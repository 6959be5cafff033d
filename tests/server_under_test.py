"""A real server that a random history is played against: its store, what it was asked, and sockets to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import websockets.sync.client
from websockets.exceptions import ConnectionClosed

from inferencegym.error_text import read_error
from server.app import make_store
from server.settings import Settings
from tests.redis_server import RedisServer
from tests.reference import Episode, Kind
from tests.servers import START_TIMEOUT_S, RunningServer, position, running_server, until

LIVE: Final = 2
BATCHES: Final = 3
CONNECTIONS: Final = 3
"""Connections that requests take in turn: with several workers they reach different ones."""
DROPPED: Final = struct.pack("ii", 1, 0)
"""Value of SO_LINGER with which a closed socket sends no end of its stream but a reset."""


@dataclass
class Tally:
    """Requests to a server process since it started; its /metrics must show the same counts."""

    answers: Counter[tuple[str, int]] = field(default_factory=Counter)
    """By path and status."""
    counters: Counter[str] = field(default_factory=Counter)


@dataclass
class Subject:
    """The server under test, its store, and what it was asked."""

    server: RunningServer
    workers: int
    redis: RedisServer | None
    tally: Tally = field(default_factory=Tally)
    totals: Counter[str] = field(default_factory=Counter)
    """Since the first history, for the report."""
    clean: bool = True
    """Whether the last history ended normally; otherwise the next one begins with a new process."""
    log_read: int = 0

    def __post_init__(self) -> None:
        self.clients = [self._client() for _ in range(CONNECTIONS)]
        # Batch sessions are in the memory of one worker: they keep their connection.
        self.batch_client = self._client()
        self.store = make_store(Settings(store_url=self.server.settings["INFERENCEGYM_STORE_URL"]))
        self.runner = asyncio.Runner()

    def _client(self) -> httpx.Client:
        limits = httpx.Limits(max_connections=1, keepalive_expiry=None)
        return httpx.Client(base_url=self.server.url, timeout=60, limits=limits)

    def close(self) -> None:
        self.runner.run(self.store.close())
        self.runner.close()
        for client in (*self.clients, self.batch_client):
            client.close()

    def stored(self, episodes: list[Episode]) -> list[int | None]:
        """Steps that the store holds of each session, read past the server."""

        async def read() -> list[int | None]:
            found = [await position(self.store, episode.session_id) for episode in episodes]
            return [None if one is None else one[1] for one in found]

        return self.runner.run(read())

    def new_log(self) -> str:
        with self.server.log.open("rb") as log:
            log.seek(self.log_read)
            text = log.read()
        self.log_read += len(text)
        return text.decode(errors="replace")

    def restart(self, end: Callable[[], None]) -> None:
        end()
        self.tally = Tally()
        before = self.started()
        self.server.start()
        self.wait_for_all_workers(before)
        self.totals["restarts"] += 1

    def lose_a_worker(self, which: int) -> None:
        """Kill one worker, chosen by the remainder, and wait for the one that the supervisor starts in its place."""
        assert self.server.process is not None
        supervisor, before = self.server.process.pid, self.started()
        children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
        workers = [pid for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        assert len(workers) == self.workers
        os.kill(int(workers[which % self.workers]), signal.SIGKILL)
        self.wait_for_all_workers(before + 1 - self.workers)
        self.totals["workers lost"] += 1

    def wait_for_all_workers(self, before: int = 0) -> None:
        """One worker answers before the others are there, and one that then does not find its store ends them all."""
        until(lambda: self.started() >= before + self.workers, START_TIMEOUT_S)

    def started(self) -> int:
        """Worker processes that ever came up."""
        return self.server.log.read_text(errors="replace").count("Application startup complete")


@contextlib.contextmanager
def subject(directory: Path, workers: int = 1, redis: RedisServer | None = None) -> Iterator[Subject]:
    """A server under test whose limits no history reaches, but for those that it is to reach."""
    few = {"live_sessions": LIVE, "batch_sessions": BATCHES, "workers": workers}
    unlimited = {f"{name}_per_minute": 0 for name in ("resets", "cpu_seconds")}
    many = {"max_sessions": 10_000_000, "max_sessions_per_client": 10_000_000}
    url = f"sqlite://{directory}/sessions.db" if redis is None else redis.url
    named = {name: str(value) for name, value in {**few, **unlimited, **many, "store_url": url}.items()}
    with running_server(directory, **named) as server:
        under_test = Subject(server, workers, redis)
        try:
            under_test.wait_for_all_workers()
            yield under_test
        finally:
            under_test.close()


# ---------------------------------------------------------------- one WebSocket


@dataclass(eq=False)
class Socket:
    """A connection to ``/ws`` and the episode that it plays."""

    kind: Kind
    url: str
    connection: websockets.sync.client.ClientConnection | None = None
    episode: Episode | None = None
    reset: int = 0
    """Which reset of the episode it plays."""
    taken: int = 0
    """Step after which it plays on."""
    with_info: bool = False
    closing: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def ask(self, frame: str | bytes) -> dict[str, Any]:
        if self.connection is None:
            address = f"{self.url.replace('http', 'ws', 1)}{self.kind.prefix}/ws"
            connecting = websockets.sync.client.connect(address, proxy=None, compression=None, open_timeout=60)
            self.connection = self.closing.enter_context(connecting)
            self.episode = None
        self.connection.send(frame)
        return dict(json.loads(self.connection.recv(timeout=60)))

    def plays(self, episode: Episode, taken: int, with_info: bool) -> None:
        self.episode, self.reset, self.taken, self.with_info = episode, episode.resets, taken, with_info

    def close(self, how: str = "close") -> None:
        if self.connection is None:
            return
        connection, self.connection = self.connection, None
        # sending to a server that ended raises OSError
        with contextlib.suppress(ConnectionClosed, OSError):
            if how == "drop":  # like a client that crashes: no close frame
                connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, DROPPED)
                connection.socket.shutdown(socket.SHUT_RDWR)
            elif how == "frame":
                connection.send(json.dumps({"type": "close"}))
        self.closing.close()


def refused_with(frame: dict[str, Any]) -> str:
    """Our code in an error frame."""
    assert frame["type"] == "error", frame
    said = read_error(frame["data"]["message"])
    assert said is not None, frame
    return said[1]


def counted_by(text: str) -> Iterator[tuple[str, Any]]:
    """Counters of /metrics: each of ours by name, and answers by path and status."""
    from prometheus_client.parser import text_string_to_metric_families

    answers: dict[tuple[str, int], int] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "inferencegym_http_requests_total":
                answers[sample.labels["path"], int(sample.labels["status"])] = int(sample.value)
            elif family.type == "counter" and not sample.labels and sample.name.endswith("_total"):
                yield sample.name.removeprefix("inferencegym_").removesuffix("_total"), sample.value
    yield "answers", answers
