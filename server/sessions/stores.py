"""The session store that the settings name."""

from __future__ import annotations

from server.sessions.sqlite import MemoryStore, SqliteStore
from server.sessions.store import SessionStore
from server.settings import Settings


def make_store(settings: Settings) -> SessionStore:
    """The store that the settings name; not opened yet."""
    scheme = settings.store_url.split("://", 1)[0]
    if scheme in ("redis", "rediss"):
        # Imported here: only servers that share their sessions through Redis install its client.
        from server.sessions.redis import RedisStore

        return RedisStore(settings)
    return MemoryStore(settings) if scheme == "memory" else SqliteStore(settings)
