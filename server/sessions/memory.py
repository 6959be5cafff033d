"""Session store in the memory of one process, for tests and temporary servers."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from dataclasses import dataclass, replace

from env.family import Action, EpisodeRecord
from inferencegym.errors import CapacityError
from server.sessions.store import IDLE_S, ROOM_CHUNK, StoredEpisode, client_of
from server.settings import Settings


@dataclass(slots=True)
class _Row:
    token: str
    record: EpisodeRecord
    caller: str
    touched: float
    finished: bool = False


class MemoryStore:
    """Session store in a dictionary, ordered by reset; lost with the process."""

    name = "memory"

    def __init__(self, settings: Settings) -> None:
        self._ttl_s = settings.session_ttl_s
        self._limit = settings.max_sessions
        self._rows: dict[str, _Row] = {}

    async def open(self) -> None:
        return

    async def close(self) -> None:
        self._rows.clear()

    async def put(self, session_id: str, record: EpisodeRecord, caller: str) -> str:
        if session_id not in self._rows and len(self._rows) >= self._limit:
            await self.purge()
            if len(self._rows) >= self._limit:
                raise CapacityError(f"the store has reached its limit of {self._limit:,} unfinished sessions")
        self._rows.pop(session_id, None)
        row = _Row(secrets.token_hex(8), replace(record, actions=list(record.actions)), caller, time.monotonic())
        self._rows[session_id] = row
        return row.token

    async def restore(self, session_id: str, record: EpisodeRecord, caller: str) -> str | None:
        return await self.put(session_id, record, caller) if self._row(session_id) is None else None

    async def get(self, session_id: str, first: int = 0) -> StoredEpisode | None:
        row = self._row(session_id)
        if row is None:
            return None
        return StoredEpisode(row.token, replace(row.record, actions=row.record.actions[first:]))

    async def position(self, session_id: str) -> tuple[str, int] | None:
        row = self._row(session_id)
        return None if row is None else (row.token, len(row.record.actions))

    async def append(self, session_id: str, token: str, index: int, action: Action) -> bool:
        return self._append(session_id, token, index, action)

    def append_at_once(self, session_id: str, token: str, index: int, action: Action) -> bool:
        return self._append(session_id, token, index, action)

    def _append(self, session_id: str, token: str, index: int, action: Action) -> bool:
        row = self._rows.get(session_id)
        if row is None or row.token != token or len(row.record.actions) != index:
            return False
        row.record.actions.append(action)
        return True

    async def touch(self, session_id: str, token: str, finished: bool) -> None:
        row = self._rows.get(session_id)
        if row is not None and row.token == token:
            row.touched = time.monotonic()
            row.finished = row.finished or finished

    async def make_room(self, client: str, limit: int, idle_s: float) -> int:
        now = time.monotonic()
        mine = {
            sid: row.touched
            for sid, row in self._rows.items()
            if client_of(row.caller) == client and not row.finished and row.touched > now - self._ttl_s
        }
        if len(mine) < limit:
            return len(mine)
        idle = sorted((touched, sid) for sid, touched in mine.items() if touched <= now - idle_s)
        gone = idle[: len(mine) - limit + ROOM_CHUNK]
        for _, session_id in gone:
            del self._rows[session_id]
        return len(mine) - len(gone)

    async def latest(self, caller: str) -> str | None:
        found = (sid for sid in reversed(self._rows) if self._rows[sid].caller == caller)
        return next((sid for sid in found if self._row(sid) is not None), None)

    async def purge(self) -> int:
        before = len(self._rows)
        oldest = time.monotonic() - self._ttl_s
        self._rows = {sid: row for sid, row in self._rows.items() if row.touched > oldest}
        excess = len(self._rows) - self._limit + 1
        if excess > 0:
            finished = sorted((row.touched, sid) for sid, row in self._rows.items() if row.finished)
            for _, session_id in finished[:excess]:
                del self._rows[session_id]
        if len(self._rows) >= self._limit:
            idle_since = time.monotonic() - IDLE_S
            held = Counter(client_of(row.caller) for row in self._rows.values())
            idle = [sid for sid, row in self._rows.items() if row.touched <= idle_since]
            idle.sort(key=lambda sid: (-held[client_of(self._rows[sid].caller)], self._rows[sid].touched))
            for session_id in idle[:ROOM_CHUNK]:
                del self._rows[session_id]
        return before - len(self._rows)

    async def reopened(self) -> int:
        return 0

    async def damage(self) -> str | None:
        return None

    async def ping(self) -> None:
        return

    def _row(self, session_id: str) -> _Row | None:
        row = self._rows.get(session_id)
        expired = row is not None and row.touched <= time.monotonic() - self._ttl_s
        return None if expired else row
