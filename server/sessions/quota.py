"""Quota of unfinished episodes per client in the store, so that no client can fill it.

Several processes count separately, so together they may exceed the limit a little.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from server.net.errors import RateLimitedError
from server.sessions.store import IDLE_S, SessionStore, client_of

RETRY_AFTER_S: Final = 60.0
MAX_CLIENTS: Final = 10_000


class UnfinishedQuota:
    """Limit of unfinished episodes per client; at the limit a client's idle episodes are removed for new ones."""

    def __init__(self, store: SessionStore, limit: int) -> None:
        self._store = store
        self._limit = limit
        self._room: OrderedDict[str, int] = OrderedDict()

    async def take(self, caller: str) -> None:
        """Count one more episode. Raises RateLimitedError if the client is at the limit and has no idle episode."""
        client = client_of(caller)
        if not client:
            return  # a session that no request asked for
        room = self._room.pop(client, 0) or await self._counted(client)
        self._room[client] = room - 1
        if len(self._room) > MAX_CLIENTS:
            self._room.popitem(last=False)

    async def _counted(self, client: str) -> int:
        left = await self._store.make_room(client, self._limit, IDLE_S)
        if left < self._limit:
            return min(self._limit - left, max(1, self._limit // 10))
        raise RateLimitedError(
            f"{self._limit:,} unfinished episodes of yours are kept, as many as one client may have, and all of them "
            f"were played in the last {IDLE_S / 60:g} minutes: finish one, or restart one by its id",
            RETRY_AFTER_S,
        )
