"""Stores under faults: locked, full, damaged, gone or restarting; clear errors, no hang, automatic recovery."""

from __future__ import annotations

import asyncio
import fcntl
import multiprocessing
import os
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from redis.asyncio import BlockingConnectionPool

from env.families import FAMILIES, SERVING
from env.family import EpisodeRecord
from inferencegym.errors import StoreError, UnknownSessionError
from server.sessions.manager import SessionManager
from server.sessions.redis import MAX_CONNECTIONS, RedisStore
from server.sessions.sqlite import PAGE_BYTES, SqliteStore
from server.sessions.store import clock_s
from server.settings import Settings
from tests.redis_server import RedisServer
from tests.servers import ROOT, position

START = EpisodeRecord(SERVING, 1, 7, {"episode_length": 200})
STEP_BYTES = 4_400
"""Of the log, for one step: two pages, rarely three."""


@asynccontextmanager
async def sqlite_store(path: Path, **settings: Any) -> AsyncIterator[SqliteStore]:
    store = SqliteStore(Settings(store_url=f"sqlite://{path}", **settings))
    await store.open()
    try:
        yield store
    finally:
        await store.close()


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.kill()


def file_of(path: Path) -> Path:
    return path / "sessions.db"


@pytest.mark.parametrize("at_once", [False, True])
def test_an_action_is_appended_only_where_exactly_that_many_are_stored(tmp_path: Path, at_once: bool) -> None:
    async def scenario() -> None:
        async with sqlite_store(file_of(tmp_path)) as store:

            async def append(*wanted: Any) -> bool:
                return store.append_at_once(*wanted) if at_once else await store.append(*wanted)

            token = await store.put("a", START, "me")
            results = [await append("a", token, index, b"{}") for index in (1, 0, 0, 2, 1, -1, 2)]
            assert results == [False, True, False, False, True, False, True]
            assert await append("a", str(int(token) + 1), 3, b"{}") is False
            assert await append("b", token, 3, b"{}") is False
            assert await position(store, "a") == (token, 3)
            again = await store.put("a", START, "me")
            assert again != token
            assert await append("a", token, 0, b"{}") is False, "a restart ends the earlier episode"
            assert await position(store, "a") == (again, 0)

    asyncio.run(scenario())


def test_steps_that_share_a_snapshot_see_what_another_process_writes_meanwhile(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with sqlite_store(file_of(tmp_path)) as mine, sqlite_store(file_of(tmp_path)) as other:
            token = await mine.put("a", START, "me")
            assert mine.append_at_once("a", token, 0, b"{}")
            assert other.append_at_once("a", token, 1, b"{}")
            assert await position(mine, "a") == (token, 2)
            assert mine.append_at_once("a", token, 2, b"{}")
            assert await other.append("a", token, 3, b"{}")
            assert not mine.append_at_once("a", token, 3, b"{}"), "its snapshot has three steps"
            assert not await mine.append("a", token, 3, b"{}")
            assert mine.append_at_once("a", token, 4, b"{}")
            assert await other.append("a", token, 5, b"{}")
            assert mine.append_at_once("a", token, 6, b"{}"), "beside another writer each step opens its own"

    asyncio.run(scenario())


def test_a_shared_snapshot_holds_up_a_checkpoint_only_for_a_moment(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with asyncio.timeout(60), sqlite_store(file_of(tmp_path)) as store:
            token = await store.put("a", START, "me")
            assert store.append_at_once("a", token, 0, b"{}")
            with closing(sqlite3.connect(file_of(tmp_path), timeout=0)) as checkpoint:

                def is_held_up() -> bool:
                    return bool(checkpoint.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0])

                assert is_held_up()
                while is_held_up():
                    await asyncio.sleep(0.001)

    asyncio.run(scenario())


@pytest.mark.parametrize("durability", ["full", "process", "none"])
def test_each_durability_sets_what_sqlite_syncs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durability: str
) -> None:
    connect = sqlite3.connect
    opened: list[sqlite3.Connection] = []

    def kept(*wanted: Any, **more: Any) -> sqlite3.Connection:
        opened.append(connect(*wanted, **more))
        return opened[-1]

    monkeypatch.setattr(sqlite3, "connect", kept)

    async def scenario() -> int:
        async with sqlite_store(file_of(tmp_path), durability=durability):
            assert opened[0].execute("PRAGMA journal_mode").fetchone()[0] == "wal"
            return int(opened[0].execute("PRAGMA synchronous").fetchone()[0])

    assert asyncio.run(scenario()) == {"full": 2, "process": 1, "none": 0}[durability]


def test_a_locked_database_is_waited_for_without_holding_up_other_work(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with sqlite_store(file_of(tmp_path)) as store:
            token = await store.put("a", START, "me")
            with closing(sqlite3.connect(file_of(tmp_path), isolation_level=None)) as other:
                other.execute("BEGIN IMMEDIATE")
                appending = asyncio.create_task(store.append("a", token, 0, b"{}"))
                ticks = 0
                while ticks < 20:
                    await asyncio.sleep(0.005)
                    ticks += 1
                assert not appending.done()
                other.execute("ROLLBACK")
                assert await appending is True

    asyncio.run(scenario())


def test_hundreds_that_wait_for_a_lock_leave_the_processor_to_others_and_all_go_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with sqlite_store(file_of(tmp_path)) as store:
            tokens = {f"s{i}": await store.put(f"s{i}", START, "me") for i in range(1_000)}
            with closing(sqlite3.connect(file_of(tmp_path), isolation_level=None)) as other:
                other.execute("BEGIN IMMEDIATE")
                waiting = [asyncio.create_task(store.append(name, token, 0, b"{}")) for name, token in tokens.items()]
                await asyncio.sleep(0.2)
                before_s = time.process_time()
                await asyncio.sleep(1)
                used_s = time.process_time() - before_s
                other.execute("ROLLBACK")
            assert await asyncio.gather(*waiting) == [True] * len(tokens)
            # it would be a third of a second if each waited separately
            assert used_s < 0.15, used_s

    asyncio.run(scenario())


def test_one_of_many_that_wait_for_a_lock_may_give_up(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with sqlite_store(file_of(tmp_path)) as store:
            tokens = [await store.put(name, START, "me") for name in "abc"]
            with closing(sqlite3.connect(file_of(tmp_path), isolation_level=None)) as other:
                other.execute("BEGIN IMMEDIATE")
                waiting = [
                    asyncio.create_task(store.append(name, token, 0, b"{}"))
                    for name, token in zip("abc", tokens, strict=True)
                ]
                await asyncio.sleep(0.05)
                waiting[0].cancel()
                await asyncio.sleep(0.05)
                other.execute("ROLLBACK")
            assert await asyncio.gather(*waiting[1:]) == [True, True]
            assert await position(store, "a") == (tokens[0], 0)

    asyncio.run(scenario())


def test_a_store_may_be_closed_while_a_lock_is_waited_for(tmp_path: Path) -> None:
    async def scenario() -> None:
        with closing(sqlite3.connect(file_of(tmp_path), isolation_level=None)) as other:
            async with sqlite_store(file_of(tmp_path)) as store:
                token = await store.put("a", START, "me")
                other.execute("BEGIN IMMEDIATE")
                waiting = asyncio.create_task(store.append("a", token, 0, b"{}"))
                await asyncio.sleep(0.05)
                waiting.cancel()
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(scenario())


def test_a_database_that_stays_locked_is_a_store_error_in_time_and_works_again_after(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with sqlite_store(file_of(tmp_path), store_timeout_s=0.2) as store:
            token = await store.put("a", START, "me")
            with closing(sqlite3.connect(file_of(tmp_path), isolation_level=None)) as other:
                other.execute("BEGIN IMMEDIATE")
                for operation in (store.append("a", token, 0, b"{}"), store.put("b", START, "me"), store.ping()):
                    begun = time.monotonic()
                    with pytest.raises(StoreError):
                        await operation
                    assert time.monotonic() - begun < 2
                assert await position(store, "a") == (token, 0), "reading goes on"
                other.execute("ROLLBACK")
            assert await store.append("a", token, 0, b"{}") is True
            assert await position(store, "b") is None

    asyncio.run(scenario())


def test_a_full_disk_is_a_store_error_and_nothing_is_half_stored(tmp_path: Path) -> None:
    """A limit on the size of files stands in for the disk: the same write fails, at the same place."""
    script = """
import asyncio, resource, signal, sys
from inferencegym.errors import StoreError
from env.families import FAMILIES, SERVING
from server.sessions.manager import SessionManager
from server.settings import Settings
from server.app import make_store
from tests.servers import position

async def main():
    settings = Settings(store_url="sqlite://" + sys.argv[1])
    store = make_store(settings)
    await store.open()
    manager = SessionManager(store, FAMILIES, settings)
    live, _ = await manager.reset(SERVING, seed=3, config={"episode_length": 5000})
    resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, resource.RLIM_INFINITY))
    taken = refused = 0
    # A refusal may be followed by success: moving the log into the database frees the log's room, when it comes to it.
    while refused < 3:
        try:
            await manager.step(live.session_id, {"batch_size": 1 + taken % 512}, taken + 1)
            taken, refused = taken + 1, 0
        except StoreError:
            try:
                await store.ping()
            except StoreError:
                refused += 1
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    # Room again: the episode goes on where it was.
    outcome = await manager.step(live.session_id, {"batch_size": 1 + taken % 512}, taken + 1)
    assert outcome.number == taken + 1, (outcome.number, taken)
    at = await position(store, live.session_id)
    assert at == (live.token, taken + 1), (at, taken)
    await store.ping()
    await store.close()
    print("steps before the disk was full:", taken)

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
asyncio.run(main())
"""
    command = [sys.executable, "-c", script, str(file_of(tmp_path))]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout.split(":")[1]) > 0
    # The log has the reason, not once per request: refused steps in a row are one outage.
    assert run.stderr.count("cannot be used") == run.stderr.count("can be used again") > 0


def test_what_has_expired_counts_towards_the_room_that_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 5 expired sessions and 20 finished ones, a limit of 11 leaves the 10 youngest, and a place for the next."""
    monkeypatch.setattr("server.sessions.store._STARTED_S", time.monotonic() - 2 * 86_400)

    async def scenario() -> None:
        async with sqlite_store(file_of(tmp_path)) as filling:
            for n in range(25):
                await filling.touch(f"s{n}", await filling.put(f"s{n}", START, "me"), True)
            with closing(sqlite3.connect(file_of(tmp_path))) as file, file:
                file.execute("UPDATE sessions SET touched = 1 WHERE id IN ('s0', 's1', 's2', 's3', 's4')")
        async with sqlite_store(file_of(tmp_path), max_sessions=11) as store:
            assert await store.purge() == 15
            left = [n for n in range(25) if await position(store, f"s{n}") is not None]
            assert left == list(range(15, 25))

    asyncio.run(scenario())


@pytest.mark.parametrize("damage", ["overwritten", "truncated", "not a database"])
def test_a_damaged_database_is_set_aside_and_live_sessions_are_stored_again(tmp_path: Path, damage: str) -> None:
    path = file_of(tmp_path)

    async def scenario() -> None:
        settings = Settings(store_url=f"sqlite://{path}")
        async with sqlite_store(path) as store:
            manager = SessionManager(store, FAMILIES, settings)
            live, _ = await manager.reset(SERVING, seed=3)
            for number in range(1, 6):
                await manager.step(live.session_id, {}, number)
            # The last connection that is closed moves the log into the file; the next operation opens it again.
            await store.close()
            content = path.read_bytes()
            if damage == "overwritten":
                path.write_bytes(content[:100] + b"\xaa" * (len(content) - 100))
            elif damage == "truncated":
                path.write_bytes(content[: len(content) // 2 + 17])
            else:
                path.write_bytes(b"this is not a database at all" * 400)
            outcome = await manager.step(live.session_id, {}, 6)
            assert outcome.number == 6
            assert await position(store, live.session_id) == (live.token, 6)
        assert len(list(tmp_path.glob("*.damaged-*"))) >= 1

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE steps SET action = '[0.5,1,32,0,0]' WHERE n = 1",
        "DELETE FROM steps WHERE n = 1",
        "UPDATE sessions SET start = replace(start, '200', '201') WHERE id = 'a'",
        "UPDATE sessions SET start = CAST(x'ff' AS TEXT) WHERE id = 'a'",
    ],
)
def test_a_session_whose_record_was_changed_on_disk_is_set_aside_alone(tmp_path: Path, sql: str) -> None:
    async def scenario() -> None:
        async with sqlite_store(file_of(tmp_path)) as store:
            token = await store.put("a", START, "me")
            await store.put("b", START, "me")
            for n in range(3):
                await store.append("a", token, n, b"[1.0,0,32,0,0]")
            assert await store.ping() is None
            with closing(sqlite3.connect(file_of(tmp_path))) as file, file:
                file.execute(sql)
            assert await store.get("a") is None
            assert await store.get("b") is not None
            assert await store.latest("me") == "b"
            assert await store.ping() == "damaged and set aside: 1 sessions"
            # a process that has the session in memory stores it again
            assert await store.put("a", START, "me", replace=False)

    asyncio.run(scenario())


def zero_a_page(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(PAGE_BYTES)
        file.write(bytes(PAGE_BYTES))


def test_a_damaged_file_is_found_when_it_is_opened(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with sqlite_store(file_of(tmp_path)) as store:
            await store.put("a", START, "me")
        zero_a_page(file_of(tmp_path))
        async with sqlite_store(file_of(tmp_path)) as store:
            damage = await store.ping()
            assert damage is not None
            assert damage.startswith("damaged and set aside: sessions.db.damaged-")
            assert "," not in damage
            assert await store.get("a") is None

    asyncio.run(scenario())


def test_a_file_that_is_damaged_while_it_is_open_is_found_before_its_memory_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is in memory is stored again; before, steps went on into the damaged file until a restart lost them."""
    path = file_of(tmp_path)
    monkeypatch.setattr("server.sessions.sqlite.CHECKPOINT_EVERY_S", 0.02)
    monkeypatch.setattr("server.sessions.sqlite.CHECK_EVERY_S", 0.02)

    async def scenario() -> None:
        async with sqlite_store(path) as store:
            manager = SessionManager(store, FAMILIES, Settings(store_url=f"sqlite://{path}"))
            live, _ = await manager.reset(SERVING, seed=3)
            await manager.step(live.session_id, {}, 1)
            async with asyncio.timeout(60):
                while path.stat().st_size < 4 * PAGE_BYTES:
                    await asyncio.sleep(0.02)
                with path.open("r+b", buffering=0) as file:
                    while not list(tmp_path.glob("sessions.db.damaged-*")):
                        # Again and again: a checkpoint may write the page anew.
                        os.pwrite(file.fileno(), bytes(PAGE_BYTES), PAGE_BYTES)
                        await asyncio.sleep(0.02)
            await manager.store_again()
            assert (await position(store, live.session_id) or ("", 0))[1] == 1

    asyncio.run(scenario())


def test_the_log_of_a_damaged_database_is_set_aside_with_it(tmp_path: Path) -> None:
    """Else the new file would begin with what is left of the old one, and nobody could look into both."""
    path, broken = file_of(tmp_path), b"neither is this a log of writes" * 400

    async def scenario() -> None:
        async with sqlite_store(path) as store:
            await store.put("a", START, "me")
            # Another process has the file open: the log stays when this one closes it.
            with closing(sqlite3.connect(path)) as other:
                assert other.execute("SELECT count(*) FROM sessions").fetchone() == (1,)
                await store.close()
                path.write_bytes(b"this is not a database at all" * 400)
                path.with_name("sessions.db-wal").write_bytes(broken)
                await store.open()
                await store.ping()
            (aside,) = tmp_path.glob("sessions.db.damaged-*-wal")
            assert aside.read_bytes() == broken
            assert aside.with_name(aside.name.removesuffix("-wal")).read_bytes().startswith(b"this is not a database")

    asyncio.run(scenario())


def test_a_session_that_another_client_restarted_comes_back_as_that_clients(tmp_path: Path) -> None:
    path = file_of(tmp_path)

    async def scenario() -> None:
        async with sqlite_store(path) as store:
            manager = SessionManager(store, FAMILIES, Settings(store_url=f"sqlite://{path}"))
            live, _ = await manager.reset(SERVING, seed=3, caller="first")
            await manager.reset(SERVING, seed=4, session_id=live.session_id, caller="second")
            await store.close()
            for file in tmp_path.glob("sessions.db*"):
                file.unlink()
            await manager.step(live.session_id, {}, 1)
            assert await manager.latest("second") == live.session_id
            with pytest.raises(UnknownSessionError):
                await manager.latest("first")

    asyncio.run(scenario())


def replace_file(path: Path, how: str) -> None:
    """Faults of an open file: removed, moved away, or replaced by another one."""
    if how == "removed":
        for file in path.parent.glob("sessions.db*"):
            file.unlink()
    elif how == "moved away":
        path.rename(path.with_name("elsewhere.db"))
    else:
        other = path.with_name("other")
        other.write_bytes(b"this is not a database at all" * 400)
        other.replace(path)
        # The log still holds what was written last, and the file would be made whole from it.
        path.with_name("sessions.db-wal").unlink()


REPLACED = ["removed", "moved away", "replaced by a damaged one"]


@pytest.mark.parametrize("how", REPLACED)
def test_a_file_replaced_while_it_is_open_is_seen_by_every_operation(tmp_path: Path, how: str) -> None:
    path = file_of(tmp_path)

    async def scenario() -> None:
        async with sqlite_store(path) as store:
            token = await store.put("a", START, "me")

            async def lost(operation: Callable[[], Awaitable[object]]) -> None:
                nonlocal token
                before = await store.reopened()
                replace_file(path, how)
                await operation()
                # The store was asked nothing since: it was the operation itself that opened the new file.
                with closing(sqlite3.connect(path)) as other:
                    assert other.execute("SELECT count(*) FROM sessions").fetchone() == (0,)
                assert await store.reopened() == before + 1
                assert await position(store, "a") is None
                token = await store.put("a", START, "me")

            await lost(lambda: store.append("a", token, 0, b"{}"))
            await lost(lambda: store.touch("a", token, True))
            await lost(lambda: store.get("a"))
            await lost(lambda: store.latest("me"))
            await lost(store.ping)
            await lost(store.purge)

    asyncio.run(scenario())


@pytest.mark.parametrize("how", REPLACED)
def test_steps_that_follow_each_other_go_on_in_the_new_file_within_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    path = file_of(tmp_path)
    now = [1000.0]
    clock = SimpleNamespace(time=time.time, strftime=time.strftime, monotonic=lambda: now[0])
    monkeypatch.setattr("server.sessions.sqlite.time", clock)

    async def scenario() -> None:
        async with sqlite_store(path) as store:
            token = await store.put("a", START, "me")
            assert store.append_at_once("a", token, 0, b"{}")
            replace_file(path, how)
            now[0] += 0.99
            assert store.append_at_once("a", token, 1, b"{}"), "a look at each step would cost more than it is worth"
            now[0] += 0.01
            assert not store.append_at_once("a", token, 2, b"{}")
            assert not await store.append("a", token, 2, b"{}")
            assert await position(store, "a") is None

    asyncio.run(scenario())


def test_a_file_is_not_opened_while_another_process_sets_a_damaged_one_aside(tmp_path: Path) -> None:
    """Else the log of the new file could be moved away with the damaged one."""

    async def scenario() -> None:
        async with sqlite_store(file_of(tmp_path), store_timeout_s=0.2) as store:
            replace_file(file_of(tmp_path), "removed")
            with (tmp_path / "sessions.db.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                with pytest.raises(StoreError):
                    await store.ping()
                assert not file_of(tmp_path).exists()
            await store.ping()
            assert file_of(tmp_path).exists()

    asyncio.run(scenario())


def test_a_path_that_leads_to_no_database_is_a_store_error_until_it_does(tmp_path: Path) -> None:
    path = file_of(tmp_path)

    async def scenario() -> None:
        async with sqlite_store(path) as store:
            token = await store.put("a", START, "me")
            replace_file(path, "removed")
            path.mkdir()
            for operation in (store.ping(), store.append("a", token, 0, b"{}"), store.reopened()):
                with pytest.raises(StoreError):
                    await operation
            path.rmdir()
            await store.ping()

    asyncio.run(scenario())


@pytest.mark.parametrize("how", REPLACED)
def test_all_sessions_in_memory_are_stored_again_in_a_new_file_and_until_then_the_store_is_not_ready(
    tmp_path: Path, how: str
) -> None:
    path = file_of(tmp_path)

    async def scenario() -> None:
        settings = Settings(store_url=f"sqlite://{path}")
        async with sqlite_store(path) as store:
            manager = SessionManager(store, FAMILIES, settings)
            await manager.ping()
            lives = []
            for seed in range(3):
                live, _ = await manager.reset(SERVING, seed=seed, config={"episode_length": 4}, caller="me")
                for number in range(1, 3 + seed):
                    await manager.step(live.session_id, {"batch_size": number}, number)
                lives.append(live)
            await manager.ping()
            replace_file(path, how)
            for _ in range(2):
                with pytest.raises(StoreError, match="3 sessions in memory"):
                    await manager.ping()
            await manager.store_again()
            await manager.ping()
            async with sqlite_store(path) as fresh:
                for live in lives:
                    assert (await position(fresh, live.session_id)) == (live.token, len(live.actions))
                    stored = await fresh.get(live.session_id)
                    assert stored is not None
                    assert stored.record == live.record
                assert [len(live.actions) for live in lives] == [2, 3, 4]
                assert await fresh.make_room("me", 10, 600) == 2, "the one that has ended is not unfinished again"
            # What is complete is not written again.
            tokens = [live.token for live in lives]
            await store.close()
            await manager.store_again()
            assert [live.token for live in lives] == tokens

    asyncio.run(scenario())


def test_of_two_processes_that_store_an_episode_again_the_one_behind_takes_nothing_away(tmp_path: Path) -> None:
    path = file_of(tmp_path)

    async def scenario() -> None:
        settings = Settings(store_url=f"sqlite://{path}")
        async with sqlite_store(path) as ahead, sqlite_store(path) as behind:
            first, second = SessionManager(ahead, FAMILIES, settings), SessionManager(behind, FAMILIES, settings)
            live, _ = await first.reset(SERVING, seed=1)
            for number in range(1, 4):
                await second.step(live.session_id, {"batch_size": number}, number)
            for number in range(4, 9):
                await first.step(live.session_id, {"batch_size": number}, number)
            replace_file(path, "removed")
            # The one with three steps is the first to notice, then the one with eight.
            await second.store_again()
            assert (await position(behind, live.session_id) or ("", 0))[1] == 3
            await first.store_again()
            assert await position(ahead, live.session_id) == (live.token, 8)
            outcome = await second.step(live.session_id, {"batch_size": 9}, 9)
            assert outcome.number == 9
            assert [b",%d," % number in action for number, action in enumerate(live.actions, 1)] == [True] * 8

    asyncio.run(scenario())


def test_the_directories_above_a_database_are_made(tmp_path: Path) -> None:
    path = tmp_path / "not" / "yet" / "sessions.db"

    async def scenario() -> None:
        for _ in range(2):
            async with sqlite_store(path):
                assert path.exists()

    asyncio.run(scenario())


def test_a_directory_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("a file where a directory should be")

    async def scenario() -> None:
        with pytest.raises(StoreError):
            async with sqlite_store(blocked / "sub" / "sessions.db"):
                pass

    asyncio.run(scenario())


def test_a_database_of_another_layout_is_refused_not_overwritten(tmp_path: Path) -> None:
    path = file_of(tmp_path)
    with closing(sqlite3.connect(path)) as other:
        other.execute("PRAGMA user_version=99")
        other.execute("CREATE TABLE theirs (x)")

    async def scenario() -> None:
        with pytest.raises(StoreError):
            async with sqlite_store(path):
                pass

    asyncio.run(scenario())
    with closing(sqlite3.connect(path)) as other:
        assert other.execute("SELECT count(*) FROM theirs").fetchone() == (0,)


@pytest.mark.parametrize(("reuse_from", "large"), [(1_000_000, 64_000_000), (1_000_000, 2_000_000)])
def test_the_log_file_stays_small_while_writers_never_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reuse_from: int, large: int
) -> None:
    """It is used from its start again, or cut where it has become large."""
    monkeypatch.setattr("server.sessions.sqlite.CHECKPOINT_EVERY_S", 0.05)
    monkeypatch.setattr("server.sessions.sqlite.REUSE_LOG_FROM_BYTES", reuse_from)
    monkeypatch.setattr("server.sessions.sqlite.LARGE_LOG_BYTES", large)

    written, rounds, connect = 0, [0], sqlite3.connect

    class OfOneRound(sqlite3.Connection):
        def close(self) -> None:
            super().close()
            rounds.append(written)

    def counted(*wanted: Any, **more: Any) -> sqlite3.Connection:
        if threading.current_thread().name == "sqlite-checkpoints":
            more["factory"] = OfOneRound
        return connect(*wanted, **more)

    monkeypatch.setattr(sqlite3, "connect", counted)

    def most_bytes() -> int:
        """What is written in two rounds, however long the disk takes for them, and what is too little to reset."""
        ends = [*rounds, written]
        return reuse_from + STEP_BYTES * max(later - end for end, later in zip(ends, ends[2:], strict=False))

    async def scenario() -> tuple[int, int]:
        nonlocal written
        largest = 0
        async with asyncio.timeout(120), sqlite_store(file_of(tmp_path)) as store:
            token = await store.put("a", START, "me")
            # A log that is never reset would be far beyond the limit.
            while len(rounds) < 5 or written * STEP_BYTES < 2.5 * most_bytes():
                for _ in range(20):
                    assert await store.append("a", token, written, b"{}" * 40)
                    written += 1
                largest = max(largest, (tmp_path / "sessions.db-wal").stat().st_size)
                await asyncio.sleep(0.002)
            return largest, most_bytes()

    largest, limit = asyncio.run(scenario())
    assert largest < limit


def _append_many(url: str, worker: int, count: int) -> None:
    async def scenario() -> None:
        settings = Settings(store_url=url)
        store = SqliteStore(settings)
        await store.open()
        token = await store.put(f"s{worker}", START, "me")
        for index in range(count):
            assert await store.append(f"s{worker}", token, index, b'{"batch_size":1}')
        await store.close()

    asyncio.run(scenario())


def test_processes_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    url = f"sqlite://{file_of(tmp_path)}"
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_append_many, args=(url, worker, 500)) for worker in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0

    async def scenario() -> None:
        async with sqlite_store(file_of(tmp_path)) as store:
            for worker in range(2):
                assert (await position(store, f"s{worker}") or ("", 0))[1] == 500

    asyncio.run(scenario())


# ---------------------------------------------------------------- Redis


def test_redis_killed_and_started_again_loses_no_step_and_needs_no_hands(redis_server: RedisServer) -> None:
    async def scenario() -> None:
        settings = Settings(store_url=redis_server.url, store_timeout_s=0.5)
        store = RedisStore(settings)
        await store.open()
        manager = SessionManager(store, FAMILIES, settings)
        live, _ = await manager.reset(SERVING, task_id=3, seed=4)
        outcomes = [await manager.step(live.session_id, {"batch_size": n}, n) for n in range(1, 6)]
        redis_server.kill()
        begun = time.monotonic()
        with pytest.raises(StoreError):
            await manager.step(live.session_id, {"batch_size": 6}, 6)
        with pytest.raises(StoreError):
            await store.ping()
        assert time.monotonic() - begun < 10
        redis_server.start()
        outcomes += [await manager.step(live.session_id, {"batch_size": n}, n) for n in range(6, 11)]
        assert [o.number for o in outcomes] == list(range(1, 11))
        assert (await position(store, live.session_id)) == (live.token, 10)
        # A second process, which has only what Redis kept, agrees.
        fresh = SessionManager(RedisStore(settings), FAMILIES, settings)
        assert [await fresh.step(live.session_id, {"batch_size": n}, n) for n in range(1, 11)] == outcomes
        await fresh.store.close()
        await store.close()

    asyncio.run(scenario())


def test_an_outage_of_redis_is_logged_once_and_answers_name_no_host(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async def play() -> list[str]:
        store = RedisStore(Settings(store_url=redis_server.url, store_timeout_s=0.5))
        await store.ping()
        redis_server.kill()
        said = []
        for _ in range(2):
            with pytest.raises(StoreError) as refused:
                await store.ping()
            said.append(str(refused.value))
        redis_server.start()
        await store.ping()
        await store.close()
        return said

    with caplog.at_level("WARNING", "server.sessions.redis"):
        answers = asyncio.run(play())
    assert answers == ["the session store cannot be used now: ConnectionError"] * 2
    first, second = caplog.messages
    assert first.startswith("Redis cannot be used: ConnectionError: ")
    assert second == "Redis can be used again"


def test_sessions_in_use_survive_a_redis_that_forgot_everything(redis_server: RedisServer) -> None:
    async def scenario() -> None:
        settings = Settings(store_url=redis_server.url)
        store = RedisStore(settings)
        manager = SessionManager(store, FAMILIES, settings)
        live, _ = await manager.reset(SERVING, seed=4)
        await manager.step(live.session_id, {}, 1)
        redis_server.empty()
        assert (await manager.step(live.session_id, {}, 2)).number == 2
        assert (await position(store, live.session_id)) == (live.token, 2)
        await store.close()

    asyncio.run(scenario())


def test_restarts_by_ever_other_callers_leave_no_more_keys_than_one(redis_server: RedisServer) -> None:
    async def scenario() -> None:
        store = RedisStore(Settings(store_url=redis_server.url))
        await store.put("a", START, "client.0")
        with redis_server.client() as client:
            before = int(client.dbsize())
            for n in range(1, 2001):
                # Every tenth of them from another address.
                await store.put("a", START, f"client{n // 10}.{n}")
            assert client.dbsize() == before
        assert await store.latest("client.0") is None
        assert await store.latest("client200.2000") == "a"
        assert await store.make_room("client199", 10, 600) == 0
        assert await store.make_room("client200", 10, 600) == 1
        await store.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("hours", [25, -2])
def test_a_machines_clock_that_is_set_while_the_server_runs_changes_no_age(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    async def scenario() -> None:
        async with sqlite_store(file_of(tmp_path)) as store:
            await store.put("a", START, "me")
            right = time.time
            monkeypatch.setattr(time, "time", lambda: right() + 3600 * hours)
            assert await store.purge() == 0
            await store.put("b", START, "me")
            assert await store.latest("me") == "b"
            assert await store.get("a") is not None

    asyncio.run(scenario())


@pytest.mark.parametrize("hours", [25, -2])
def test_a_clock_that_is_wrong_when_a_server_starts_ends_no_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    async def scenario() -> None:
        async with sqlite_store(file_of(tmp_path)) as store:
            await store.put("a", START, "me")
        monkeypatch.setattr("server.sessions.store._CLOCK_AT_ZERO_S", clock_s() - time.monotonic() + 3600 * hours)
        async with sqlite_store(file_of(tmp_path)) as store:
            assert await store.purge() == 0
            assert await store.get("a") is not None
            await store.put("b", START, "me")
            assert await store.latest("me") == "b"

    asyncio.run(scenario())


@pytest.mark.parametrize("by", ["room", "purge"])
def test_a_forgotten_session_leaves_no_key(redis_server: RedisServer, by: str) -> None:
    async def scenario() -> None:
        store = RedisStore(Settings(store_url=redis_server.url))
        with redis_server.client() as client:
            for n in range(20):
                token = await store.put(f"s{n}", START, f"client.{n}")
                assert await store.append(f"s{n}", token, 0, b"[]")
                if by == "purge":
                    await store.touch(f"s{n}", token, True)
            if by == "room":
                assert await store.make_room("client", 1, 0) == 0
            else:
                small = RedisStore(Settings(store_url=redis_server.url, max_sessions=1))
                assert await small.purge() == 20
                await small.close()
            assert client.keys() == []
        await store.close()

    asyncio.run(scenario())


def test_a_redis_that_hangs_is_a_store_error_in_time(redis_server: RedisServer) -> None:
    import signal

    async def scenario() -> None:
        store = RedisStore(Settings(store_url=redis_server.url, store_timeout_s=0.2))
        token = await store.put("a", START, "me")
        assert redis_server.process is not None
        redis_server.process.send_signal(signal.SIGSTOP)
        begun = time.monotonic()
        with pytest.raises(StoreError):
            await store.append("a", token, 0, b"{}")
        assert time.monotonic() - begun < 5
        redis_server.process.send_signal(signal.SIGCONT)
        # The append that timed out may have arrived or not; the next one knows.
        at = await position(store, "a")
        assert at is not None
        assert await store.append("a", token, at[1], b"{}") is True
        await store.close()

    asyncio.run(scenario())


def test_more_requests_than_connections_wait_for_their_turn(redis_server: RedisServer) -> None:
    async def scenario() -> None:
        settings = Settings(store_url=redis_server.url)
        store = RedisStore(settings)
        manager = SessionManager(store, FAMILIES, settings)
        pings = [store.ping() for _ in range(20)]
        started, *_ = await asyncio.gather(
            asyncio.gather(*(manager.reset(SERVING, seed=n) for n in range(200))), *pings
        )
        assert len({live.session_id for live, _ in started}) == 200
        with redis_server.client() as client:
            assert client.info("clients")["connected_clients"] <= MAX_CONNECTIONS + 1
        await store.close()

    asyncio.run(scenario())


def test_waiting_for_a_connection_ends_in_time(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.sessions.redis.MAX_CONNECTIONS", 1)
    made = BlockingConnectionPool.from_url
    pools: list[BlockingConnectionPool] = []

    def kept(*wanted: Any, **more: Any) -> BlockingConnectionPool:
        pools.append(made(*wanted, **more))
        return pools[-1]

    monkeypatch.setattr(BlockingConnectionPool, "from_url", kept)

    async def scenario() -> None:
        store = RedisStore(Settings(store_url=redis_server.url, store_timeout_s=0.2))
        await store.ping()
        held = await pools[0].get_connection()
        with pytest.raises(StoreError):
            await store.ping()
        await pools[0].release(held)
        await store.ping()
        await store.close()

    asyncio.run(scenario())


def test_checkpoints_end_with_the_store(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with sqlite_store(file_of(tmp_path)):
            assert any(thread.name == "sqlite-checkpoints" for thread in threading.enumerate())

    asyncio.run(scenario())
    assert not any(thread.name == "sqlite-checkpoints" for thread in threading.enumerate())
    assert file_of(tmp_path).stat().st_size > 0


def test_a_full_redis_refuses_a_reset_and_keeps_nothing_of_it(redis_server: RedisServer) -> None:
    async def run() -> None:
        store = RedisStore(Settings(store_url=redis_server.url))
        with redis_server.client() as client:
            client.config_set("maxmemory", 1000)
            with pytest.raises(StoreError):
                await store.put("a" * 32, START, "me")
            assert client.dbsize() == 0
            client.config_set("maxmemory", 0)
        assert await store.put("a" * 32, START, "me")
        await store.close()

    asyncio.run(run())
