"""What every session in memory has: an id, and requests that take turns."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from server.net.errors import RateLimitedError

MAX_WAITING: Final = 32
"""Requests that may wait for one session at once."""


def new_session_id() -> str:
    """New random session id of 128 bits: knowing the id allows playing the session, so it must not be guessable."""
    return secrets.token_hex(16)


@dataclass(slots=True)
class Session:
    """A session in memory."""

    session_id: str
    lock: asyncio.Lock = field(default_factory=asyncio.Lock, kw_only=True)
    waiting: int = field(default=0, kw_only=True)
    """Requests that have their turn or wait for it."""
    touched: float = field(default_factory=time.monotonic, kw_only=True)
    """When its use was last noted, by :func:`time.monotonic`."""

    @property
    def in_use(self) -> bool:
        """Whether a request uses it or waits for it; then it must not be dropped."""
        return self.waiting > 0 or self.lock.locked()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Context of a request's turn. Raises RateLimitedError where too many requests wait for theirs already."""
        if self.waiting >= MAX_WAITING:
            raise RateLimitedError(f"{self.waiting} requests already wait for this session", retry_after_s=1)
        self.waiting += 1
        try:
            async with self.lock:
                yield
        finally:
            self.waiting -= 1
