"""Redis server process for tests, with an append-only file, so that acknowledged writes survive a kill."""

from __future__ import annotations

import contextlib
import subprocess
import time
from pathlib import Path

import redis

from tests.programs import program
from tests.servers import START_TIMEOUT_S, free_port


class RedisServer:
    """Redis server that can be killed and started again on the same port and data."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.directory), "--save", ""]
        durable = ["--appendonly", "yes", "--appendfsync", "everysec"]
        self.process = subprocess.Popen([program("redis-server"), *options, *durable], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            with contextlib.suppress(redis.RedisError), self.client() as client:
                client.ping()
                return
            time.sleep(0.02)
        raise AssertionError("redis-server did not start")

    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port)

    def empty(self) -> None:
        with self.client() as client:
            client.flushall()

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()
