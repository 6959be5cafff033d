"""Session stores in SQLite: one file, shared by all server processes of a machine, or the memory of one process.

Write-ahead log, one row per step. A step is one statement that commits by itself (about 12 µs): the row goes into the
log file before the answer leaves, so a killed process loses nothing that it acknowledged. Checkpoints run on a thread
of their own, so that their fsync does not hold up the event loop; in the mode ``full`` every commit syncs as well.

Another process or a person may replace or remove the file while it is open here (a damaged one is set aside). Writes to
the open file would then be lost to other processes, so every operation first compares the path with the open file
(under continuous steps, once a second). If they differ, the store opens the new file and counts this
(:meth:`SqliteStore.reopened`), so that the sessions in memory are stored again.

A damaged file is found when it is opened, once a minute, and where SQLite meets the damage; it is set aside whole. What
SQLite cannot see, other bytes in a row, the checksum of each row shows when it is read: then that session is set aside.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import random
import secrets
import sqlite3
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, TypeVar

from env.family import Action, EpisodeRecord
from inferencegym import __version__
from inferencegym.errors import CapacityError, StoreError
from server.sessions.store import IDLE_S, ROOM_CHUNK, StoredEpisode, clock_s, expired_s, stored_episode
from server.settings import Settings

T = TypeVar("T")
log = logging.getLogger(__name__)

SCHEMA_VERSION: Final = 3
PAGE_BYTES: Final = 2048
"""A step writes one or two whole pages to the log; smaller pages would be split more often than they save."""
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS sessions (
    token INTEGER PRIMARY KEY,      -- random: one start of one session, never used again
    id TEXT NOT NULL UNIQUE,
    start TEXT NOT NULL,            -- JSON of EpisodeRecord, without actions
    sum INTEGER NOT NULL,
    caller TEXT NOT NULL,
    created REAL NOT NULL,
    touched REAL NOT NULL,
    finished INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX IF NOT EXISTS sessions_by_caller ON sessions (caller, created);
CREATE INDEX IF NOT EXISTS sessions_by_age ON sessions (touched);
CREATE TABLE IF NOT EXISTS steps (
    token INTEGER NOT NULL,
    n INTEGER NOT NULL,
    action TEXT NOT NULL,           -- JSON array
    sum INTEGER NOT NULL,
    PRIMARY KEY (token, n)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS pings (count INTEGER NOT NULL);
INSERT INTO pings VALUES (0);
"""
# A caller's latest session is the last stored, even where an earlier server's clock was ahead of this one's.
_PUT: Final = """
INSERT INTO sessions SELECT ?1, ?2, ?3, ?4, ?5, max(?6, coalesce(max(created) + 1e-3, 0)), ?6, 0
FROM sessions WHERE caller = ?5
"""
# Adds nothing unless the session is there and has just the steps before this one: NULL is then refused. A SELECT from
# the table that it is inserted into would be copied first, which takes as long as the rest of the statement.
_APPEND: Final = """
INSERT OR IGNORE INTO steps VALUES (
    (SELECT token FROM sessions WHERE token = ?1 AND id = ?5),
    (SELECT ?2 WHERE (SELECT max(n) FROM steps WHERE token = ?1) IS nullif(?2 - 1, -1)),
    ?3, ?4
)
"""
# A caller is its client, or that with a dot and more behind it.
_IDLE: Final = """
SELECT id FROM (
    SELECT id, touched, count(*) OVER (PARTITION BY substr(caller, 1, instr(caller || '.', '.') - 1)) AS held
    FROM sessions WHERE NOT finished
) WHERE touched <= ? ORDER BY held DESC, touched LIMIT ?
"""

_SYNCHRONOUS: Final = {"full": "FULL", "process": "NORMAL", "none": "OFF"}
_BUSY: Final = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})
_DAMAGED: Final = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
CHECKPOINT_EVERY_S: Final = 1.0
CHECK_EVERY_S: Final = 60.0
"""Seconds between checks of the whole file for damage: a quarter of a second of a thread for a million steps."""
DAMAGED: Final = "damaged"
"""Caller of the sessions that were set aside."""
REUSE_LOG_FROM_BYTES: Final = 64 * 1024 * 1024
"""Size from which the log is begun again, for which all writers wait: two fsyncs, 10 to 100 ms. Busy servers write as
much in two to ten seconds.
"""
LARGE_LOG_BYTES: Final = 256 * 1024 * 1024
"""Size from which the log is cut as well: a long read kept it from being begun again."""
LOOK_EVERY_S: Final = 1.0
"""Seconds between checks whether the path still leads to the open file, under continuous steps."""
SNAPSHOT_S: Final = 0.005
"""Seconds for which consecutive steps share one snapshot of the file, which saves each four of its six file locks. A
checkpoint that begins the log again waits for the end.
"""
NO_SNAPSHOT_S: Final = 1.0
"""Seconds without a shared snapshot after another process has written: a step from an outdated one is refused."""
PURGE_CHUNK: Final = 20
"""Sessions deleted per transaction: about 4,000 rows, a few milliseconds."""


class SqliteStore:
    """Session store in a SQLite file, the default; safe for all processes of a machine, not on network file systems."""

    name = "sqlite"

    def __init__(self, settings: Settings, path: Path | None = None) -> None:
        self.path = path or settings.sqlite_path()
        self._synchronous = _SYNCHRONOUS[settings.durability]
        self._timeout_s = settings.store_timeout_s
        self._ttl_s = settings.session_ttl_s
        self._limit = settings.max_sessions
        self._connection: sqlite3.Connection | None = None
        self._file: tuple[int, int] | None = None
        """Device and inode of the open file."""
        self._look_at_s = 0.0
        self._snapshot: sqlite3.Cursor | None = None
        """A read that is left unfinished; as long as it is, steps need no snapshot of their own."""
        self._snapshot_from_s = 0.0
        self._reopened = 0
        self._down = False
        self.stored = 0
        self._checkpoints: threading.Thread | None = None
        self._closed = threading.Event()
        self._asking: asyncio.Task[None] | None = None
        """Task that waits for the end of a lock."""

    # ------------------------------------------------------------ life

    async def open(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"the directory of the session store cannot be made: {error}") from error
        _set_aside_if_damaged(self.path)
        # What another release began nobody can play on here: it makes room as finished episodes do.
        sql = "UPDATE sessions SET finished = 1 WHERE NOT finished AND instr(start, ?) = 0"
        await self._run(lambda c: c.execute(sql, (f'"release":"{__version__}"',)))
        log.info("sessions are kept in %s", self.path)
        self._closed.clear()
        self._checkpoints = threading.Thread(target=self._keep_up, name="sqlite-checkpoints", daemon=True)
        self._checkpoints.start()

    async def close(self) -> None:
        if self._checkpoints is not None:
            self._closed.set()
            self._checkpoints.join(timeout=5)
            self._checkpoints = None
        if self._asking is not None:
            self._asking.cancel()
            self._asking = None
        self._disconnect()

    async def reopened(self) -> int:
        return await self._run(lambda _: self._reopened)

    def size_bytes(self) -> int:
        # The log, and damaged files that were set aside, fill the disk as well.
        return sum(file.stat().st_size for file in self.path.parent.glob(f"{self.path.name}*"))

    async def ping(self) -> str | None:
        # A full disk shows only when something is written.
        await self._run(lambda c: c.execute("UPDATE pings SET count = count + 1"))
        aside = sorted(one.name for one in self.path.parent.glob(f"{self.path.name}.damaged-*-????"))
        sql = "SELECT count(*) FROM sessions WHERE caller = ?"
        sessions = await self._run(lambda c: c.execute(sql, (DAMAGED,)).fetchone()[0])
        found = [*aside, *([f"{sessions:,} sessions"] if sessions else [])]
        return "damaged and set aside: " + ", ".join(found) if found else None

    # ------------------------------------------------------------ records

    async def put(self, session_id: str, record: EpisodeRecord, caller: str, replace: bool = True) -> str:
        if self.stored >= self._limit:
            await self.purge()
        token = secrets.randbits(62)
        start_json = record.start_json()
        rows = [_step_row(token, n, action) for n, action in enumerate(record.actions)]
        now = clock_s()
        here_sql = "SELECT 1 FROM sessions WHERE id = ? AND touched > ?"

        def write(connection: sqlite3.Connection) -> bool | None:
            with _transaction(connection):
                if not replace and connection.execute(here_sql, (session_id, self._oldest())).fetchone():
                    return None
                known = _forget(connection, [session_id])
                if not known and self.stored >= self._limit:
                    raise CapacityError(f"the store has reached its limit of {self._limit:,} unfinished sessions")
                row = (token, session_id, start_json.decode(), _sum(token, session_id, start_json), caller, now)
                connection.execute(_PUT, row)
                connection.executemany("INSERT INTO steps VALUES (?, ?, ?, ?)", rows)
            return bool(known)

        replaced = await self._run(write)
        if replaced is None:
            return ""
        self.stored += not replaced
        return str(token)

    async def get(self, session_id: str, first: int = 0) -> StoredEpisode | None:
        def read(connection: sqlite3.Connection) -> StoredEpisode | None:
            # One statement sees one state: a restart between two reads cannot mix two episodes.
            rows = connection.execute(
                # As blobs: what is no UTF-8 any more is damage, too.
                "SELECT s.token, CAST(s.start AS BLOB), s.sum, t.n, CAST(t.action AS BLOB), t.sum FROM sessions s"
                " LEFT JOIN steps t ON t.token = s.token AND t.n >= ? WHERE s.id = ? AND s.touched > ? ORDER BY t.n",
                (first, session_id, self._oldest()),
            ).fetchall()
            if not rows:
                return None
            token, start_json, start_sum = rows[0][:3]
            steps = [row[3:] for row in rows if row[3] is not None]
            whole = [(n, action, _sum(token, n, action)) for n, (_, action, _) in enumerate(steps, first)]
            if start_sum != _sum(token, session_id, start_json) or steps != whole:
                log.error("the record of session %s is damaged: it was set aside", session_id[:8])
                sql = "UPDATE sessions SET id = token, caller = ?, finished = 1 WHERE token = ?"
                connection.execute(sql, (DAMAGED, token))
                return None
            return stored_episode(str(token), start_json, [action for _, action, _ in steps])

        return await self._run(read)

    async def append(self, session_id: str, token: str, index: int, action: Action) -> bool:
        row = (*_step_row(int(token), index, action), session_id)
        return await self._run(lambda c: c.execute(_APPEND, row).rowcount == 1)

    def append_at_once(self, session_id: str, token: str, index: int, action: Action) -> bool:
        now = time.monotonic()
        if self._connection is None or (now >= self._look_at_s and not self._in_place()):
            return False
        try:
            if self._snapshot is None and now >= self._snapshot_from_s:
                self._snapshot = self._connection.execute("SELECT count FROM pings")
                asyncio.get_running_loop().call_later(SNAPSHOT_S, self._end_snapshot)
            row = (*_step_row(int(token), index, action), session_id)
            return self._connection.execute(_APPEND, row).rowcount == 1
        except sqlite3.Error as error:
            # Another process is writing, or there is a fault: append handles both.
            if getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_BUSY_SNAPSHOT:
                self._snapshot_from_s = now + NO_SNAPSHOT_S
            return False

    def _end_snapshot(self) -> None:
        if self._snapshot is not None:
            self._snapshot.close()
            self._snapshot = None

    async def touch(self, session_id: str, token: str, finished: bool) -> None:
        row = (clock_s(), finished, int(token), session_id)
        sql = "UPDATE sessions SET touched = ?, finished = max(finished, ?) WHERE token = ? AND id = ?"
        await self._run(lambda c: c.execute(sql, row))

    async def make_room(self, client: str, limit: int, idle_s: float) -> int:
        # All identities of the client: its digest, alone or with a dot and more behind it ("/" is what follows a dot).
        mine = "caller >= ?1 AND caller < ?1 || '/' AND NOT finished AND touched > ?2"
        count_sql = f"SELECT count(*) FROM sessions WHERE {mine}"
        idle_sql = f"SELECT id FROM sessions WHERE {mine} AND touched <= ?3 ORDER BY touched LIMIT ?4"

        def forget_idle(connection: sqlite3.Connection) -> int:
            with _transaction(connection):
                row = (client, self._oldest(), clock_s() - idle_s, count - limit + ROOM_CHUNK)
                return _forget(connection, [found[0] for found in connection.execute(idle_sql, row)])

        count: int = await self._run(lambda c: c.execute(count_sql, (client, self._oldest())).fetchone()[0])
        if count < limit:
            return count
        gone = await self._run(forget_idle)
        self.stored -= gone
        return count - gone

    async def latest(self, caller: str) -> str | None:
        sql = "SELECT id FROM sessions WHERE caller = ? AND touched > ? ORDER BY created DESC LIMIT 1"
        row = await self._run(lambda c: c.execute(sql, (caller, self._oldest())).fetchone())
        return None if row is None else str(row[0])

    async def purge(self) -> int:
        gone = count = await self._run(self._purge_chunk)
        while count >= PURGE_CHUNK:
            await asyncio.sleep(0)
            gone += (count := await self._run(self._purge_chunk))
        return gone

    def _purge_chunk(self, connection: sqlite3.Connection) -> int:
        with _transaction(connection):
            stored = connection.execute("SELECT count(*) FROM sessions").fetchone()[0]
            sql = "SELECT id FROM sessions WHERE touched <= ? LIMIT ?"
            ids = [row[0] for row in connection.execute(sql, (self._oldest(), PURGE_CHUNK))]
            excess = min(PURGE_CHUNK - len(ids), stored - len(ids) - self._limit + 1)
            if excess > 0:
                sql = "SELECT id FROM sessions WHERE finished AND touched > ? ORDER BY touched LIMIT ?"
                ids += [row[0] for row in connection.execute(sql, (self._oldest(), excess))]
            if stored - len(ids) >= self._limit:
                ids += [row[0] for row in connection.execute(_IDLE, (clock_s() - IDLE_S, ROOM_CHUNK))]
            _forget(connection, ids)
        self.stored = stored - len(ids)
        return len(ids)

    def _oldest(self) -> float:
        return expired_s(self._ttl_s)

    # ------------------------------------------------------------ faults

    async def _run(self, operation: Callable[[sqlite3.Connection], T]) -> T:
        """Carry ``operation`` out; wait for other processes' locks without holding up the event loop."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                answer = operation(self._connected())
                if self._down:
                    log.warning("the session store %s can be used again", self.path)
                self._down = False
                return answer
            except (sqlite3.Error, BlockingIOError) as error:
                self._check(error)
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise StoreError(f"the session store stayed locked for {self._timeout_s:g} s") from error
            # One task polls for all: hundreds would take the processor from the process that has the lock.
            if self._asking is None or self._asking.done():
                self._asking = asyncio.create_task(self._ask())
            await asyncio.wait([self._asking], timeout=left_s)

    async def _ask(self) -> None:
        """Return when nobody else has the lock, after a fault that the next operation will meet, or in time."""
        until = time.monotonic() + self._timeout_s
        pause = 0.0005
        while time.monotonic() < until:
            # Jitter, so that several waiting processes do not ask in step.
            await asyncio.sleep(pause * (0.5 + random.random()))
            pause = min(2 * pause, 0.05)
            try:
                with _transaction(self._connected()):
                    return
            except BlockingIOError:
                continue
            except (sqlite3.Error, StoreError) as error:
                if getattr(error, "sqlite_errorcode", 0) & 0xFF not in _BUSY:
                    return

    def _check(self, error: sqlite3.Error | BlockingIOError) -> None:
        """Return if the operation is worth another attempt; raise StoreError if not. Leaves no transaction open."""
        if isinstance(error, BlockingIOError):
            return  # a damaged file is just being set aside
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in _BUSY:
            return
        self._disconnect()
        if code in _DAMAGED:
            _set_aside_if_damaged(self.path)
            return
        if not self._down:
            log.error("the session store %s cannot be used: %s", self.path, error)
        self._down = True
        raise StoreError(f"the session store cannot be used now: {error}") from error

    def _connected(self) -> sqlite3.Connection:
        self._end_snapshot()
        if self._connection is not None and not self._in_place():
            log.error("the session store %s was replaced or removed while it was open: it is opened anew", self.path)
            self._disconnect()
        if self._connection is None:
            connection, file = self._connect()
            self._reopened += self._file is not None
            self._connection, self._file = connection, file
            self.stored = self._connection.execute("SELECT count(*) FROM sessions").fetchone()[0]
        return self._connection

    def _in_place(self) -> bool:
        """Whether the path leads to the open file."""
        self._look_at_s = time.monotonic() + LOOK_EVERY_S
        try:
            return _identity(self.path) == self._file
        except OSError:
            return False

    def _connect(self) -> tuple[sqlite3.Connection, tuple[int, int]]:
        """Open the file, and make what it lacks.

        Raises BlockingIOError while another process sets a damaged file aside.
        """
        try:
            # Otherwise the log of the file created here could be set aside with the damaged one.
            with _file_lock(self.path, fcntl.LOCK_SH | fcntl.LOCK_NB):
                connection = self._open_file()
                return connection, _identity(self.path)
        except BlockingIOError:
            raise
        except OSError as error:
            raise StoreError(f"the session store cannot be used now: {error}") from error

    def _open_file(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, timeout=0, isolation_level=None, check_same_thread=False)
        try:
            # Before the first write, which fixes the page size.
            connection.execute(f"PRAGMA page_size={PAGE_BYTES}")
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute(f"PRAGMA synchronous={self._synchronous}")
            connection.execute("PRAGMA wal_autocheckpoint=0")
            found = connection.execute("PRAGMA user_version").fetchone()[0]
            if found not in (0, SCHEMA_VERSION):
                raise StoreError(
                    f"{self.path} was written by another release (layout {found}, this one is {SCHEMA_VERSION}): "
                    "move it away, or name another file in INFERENCEGYM_STORE_URL"
                )
            if found == 0:
                with _transaction(connection):
                    for statement in _SCHEMA.split(";\n"):
                        connection.execute(statement)
                    connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
        except BaseException:
            connection.close()
            raise
        return connection

    def _disconnect(self) -> None:
        self._end_snapshot()
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(sqlite3.Error):
                connection.close()

    # ------------------------------------------------------------ the thread of checkpoints

    def _keep_up(self) -> None:
        """Move the log into the database file every second, so that it stays small; look for damage. Ends on close."""
        checked = time.monotonic()
        while not self._closed.wait(CHECKPOINT_EVERY_S):
            # After a failure here (a lock, a full disk) the log only grows; the next request meets and reports it.
            with contextlib.suppress(sqlite3.Error, OSError, StoreError):
                if time.monotonic() - checked >= CHECK_EVERY_S:
                    checked = time.monotonic()
                    _set_aside_if_damaged(self.path)
                self._checkpoint()

    def _checkpoint(self) -> None:
        log_file = self.path.with_name(self.path.name + "-wal")
        if not log_file.exists() or log_file.stat().st_size == 0:
            return
        # The file is not created if it is missing: another process may just be renaming it and its log.
        uri = self.path.absolute().as_uri() + "?mode=rw"
        with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=1, isolation_level=None)) as connection:
            # A passive checkpoint does not wait and moves what is there. What is written meanwhile keeps the log
            # from being used from its start again, which costs less than letting it grow; so the rest, which is little
            # now, is moved while writers wait for a moment.
            pages = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()[1]
            if pages * PAGE_BYTES > REUSE_LOG_FROM_BYTES:
                mode = "TRUNCATE" if log_file.stat().st_size > LARGE_LOG_BYTES else "RESTART"
                connection.execute(f"PRAGMA wal_checkpoint({mode})")


class MemoryStore(SqliteStore):
    """The same tables in the memory of one process, for tests and temporary servers; lost when it is closed."""

    name = "memory"

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings, Path(":memory:"))

    async def open(self) -> None:
        self._connected()

    def _in_place(self) -> bool:
        return True

    def _connect(self) -> tuple[sqlite3.Connection, tuple[int, int]]:
        return self._open_file(), (0, 0)


def _forget(connection: sqlite3.Connection, session_ids: Sequence[str]) -> int:
    tokens = []
    for session_id in session_ids:
        tokens += connection.execute("SELECT token FROM sessions WHERE id = ?", (session_id,)).fetchall()
    connection.executemany("DELETE FROM steps WHERE token = ?", tokens)
    connection.executemany("DELETE FROM sessions WHERE token = ?", tokens)
    return len(tokens)


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        # SQLite has rolled back by itself after some errors (a full disk is one).
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


@contextlib.contextmanager
def _file_lock(path: Path, mode: int) -> Iterator[None]:
    with path.with_name(path.name + ".lock").open("w") as lock:
        fcntl.flock(lock, mode)
        yield


def _identity(path: Path) -> tuple[int, int]:
    # An inode's number is not given again while the file is open, so equal numbers mean the same file.
    found = os.stat(path)  # noqa: PTH116 - half the time of Path.stat
    return found.st_dev, found.st_ino


def _sum(*values: object) -> int:
    return zlib.crc32(repr(values).encode())


def _step_row(token: int, n: int, action: Action) -> tuple[int, int, str, int]:
    return token, n, action.decode(), _sum(token, n, action)


def _set_aside_if_damaged(path: Path) -> None:
    """Rename a damaged file, so that every server opens a new one; the old one is kept for inspection."""
    if not _is_damaged(path):
        return
    aside = path.with_name(f"{path.name}.damaged-{time.strftime('%Y%m%dT%H%M%S')}-{secrets.token_hex(2)}")
    try:
        with _file_lock(path, fcntl.LOCK_EX):
            if not _is_damaged(path):
                return  # another process has replaced it already
            path.rename(aside)
            for suffix in ("-wal", "-shm"):
                companion = path.with_name(path.name + suffix)
                if companion.exists():
                    companion.rename(aside.with_name(aside.name + suffix))
    except OSError as error:
        raise StoreError(f"the session store is damaged and cannot be set aside: {error}") from error
    log.error("the session store %s was damaged; it was set aside as %s", path, aside)


def _is_damaged(path: Path) -> bool:
    if not path.exists():
        return False
    try:
        with contextlib.closing(sqlite3.connect(path, timeout=5)) as connection:
            return str(connection.execute("PRAGMA integrity_check(1)").fetchone()[0]) != "ok"
    except sqlite3.DatabaseError as error:
        return getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGED
