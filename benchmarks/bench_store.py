"""Benchmark of the session stores: microseconds per appended step, best of interleaved rounds.

    python benchmarks/bench_store.py [--redis redis://127.0.0.1:6379/15] [--steps 2000]

50 sessions take turns, as under load. The last SQLite row is a layout that was rejected: one growing record per
session, rewritten at every step.
"""

from __future__ import annotations

import argparse
import asyncio
import sqlite3
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from env.family import EpisodeRecord
from server.sessions.store import SessionStore
from server.sessions.stores import make_store
from server.settings import Settings

SESSIONS, ROUNDS = 50, 3
ACTION = b"[0.8,2,64,false,1]"
START = EpisodeRecord("serving", 3, 7, {"episode_length": 200})

Round = Callable[[], Awaitable[float]]


async def store_round(settings: Settings, steps: int) -> Round:
    store: SessionStore = make_store(settings)
    await store.open()

    async def one() -> float:
        tokens = [await store.put(f"bench-{i}", START, "bench") for i in range(SESSIONS)]
        begun = time.perf_counter()
        for step in range(steps):
            session = step % SESSIONS
            assert await store.append(f"bench-{session}", tokens[session], step // SESSIONS, ACTION)
        return (time.perf_counter() - begun) / steps * 1e6

    return one


def record_round(path: Path, steps: int) -> Round:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=NORMAL")
    connection.execute("CREATE TABLE sessions (id INTEGER PRIMARY KEY, actions TEXT)")

    async def one() -> float:
        connection.execute("DELETE FROM sessions")
        connection.executemany("INSERT INTO sessions VALUES (?, '')", [(i,) for i in range(SESSIONS)])
        begun = time.perf_counter()
        for step in range(steps):
            connection.execute(
                "UPDATE sessions SET actions = actions || ? WHERE id = ?", (ACTION.decode() + ",", step % SESSIONS)
            )
        return (time.perf_counter() - begun) / steps * 1e6

    return one


async def run(steps: int, redis: str | None) -> None:
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as directory:
        rounds: dict[str, Round] = {"memory": await store_round(Settings(store_url="memory://"), steps)}
        for durability in ("process", "none", "full"):
            url = f"sqlite://{directory}/{durability}.db"
            rounds[f"sqlite, durability {durability}"] = await store_round(
                Settings(store_url=url, durability=durability), steps
            )
        rounds["sqlite, one record rewritten per step"] = record_round(Path(directory) / "record.db", steps)
        if redis is not None:
            rounds["redis"] = await store_round(Settings(store_url=redis), steps)
        best = dict.fromkeys(rounds, float("inf"))
        for _ in range(ROUNDS):
            for name, one in rounds.items():
                best[name] = min(best[name], await one())
        for name, microseconds in best.items():
            print(f"{name:40s} {microseconds:8.1f} us per step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5_000, help="steps per round (100 per session)")
    parser.add_argument("--redis", help="URL of a Redis server to include; this benchmark writes to it")
    options = parser.parse_args()
    asyncio.run(run(options.steps, options.redis))


if __name__ == "__main__":
    main()
