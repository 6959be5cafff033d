"""Interface of session stores: durable maps from session id to episode record.

One rule is all the concurrency control between requests, processes and machines: action ``n`` is appended only where
exactly ``n`` actions are stored, for the same start of the session.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final, Protocol

from env.family import Action, EpisodeRecord
from inferencegym.errors import DataFormatError, StoreError

ROOM_CHUNK: Final = 20
"""Sessions removed at once, so that a client at its limit is not counted at every reset."""
IDLE_S: Final = 600.0
"""Seconds without a step after which an unfinished episode may make room for others."""
_STARTED_S: Final = time.monotonic()
_CLOCK_AT_ZERO_S: Final = time.time() - _STARTED_S


def clock_s() -> float:
    """Seconds since 1970, for the age of stored episodes.

    The machine's clock is read once, when the process starts, so that a later change of the clock neither ends an
    episode nor makes an older one the latest.
    """
    return _CLOCK_AT_ZERO_S + time.monotonic()


def expired_s(ttl_s: float) -> float:
    """When episodes must have been used last to be forgotten now, on :func:`clock_s`.

    None before the process has run for that long itself: a clock that was wrong when it started ends no episode.
    """
    return clock_s() - ttl_s if time.monotonic() - _STARTED_S >= ttl_s else 0.0


@dataclass(slots=True)
class StoredEpisode:
    """A record as read, with the actions from the requested index on."""

    token: str
    """Changes with every restart of the session, so that a step never lands in another episode."""
    record: EpisodeRecord


def stored_episode(token: str, start: bytes | str, actions: list[Action]) -> StoredEpisode:
    """A record in its stored form. Raises StoreError if its start cannot be read."""
    try:
        return StoredEpisode(token, EpisodeRecord.from_start(start, actions))
    except DataFormatError as error:
        raise StoreError(f"the session store holds an episode that cannot be read: {error}") from error


class SessionStore(Protocol):
    """A durable map from session id to episode record.

    Methods are called on one event loop and never block it for long; each is applied wholly or not at all. All raise
    :class:`~inferencegym.errors.StoreError` when the store cannot answer within its timeout; the next call tries again.
    """

    name: str
    stored: int
    """Sessions in the store when this process last counted them."""

    async def open(self) -> None:
        """Connect, and create what is missing. A store on another machine may be down: its operations then fail."""

    async def close(self) -> None:
        """Release everything; nothing acknowledged is lost."""

    async def put(self, session_id: str, record: EpisodeRecord, caller: str, replace: bool = True) -> str:
        """Store the session's (next) episode with its actions, replacing an earlier one, and return its token.

        With ``replace`` False an earlier one stays, and the token is empty.
        Raises :class:`~inferencegym.errors.CapacityError` when the store is full of unfinished sessions.
        """

    async def get(self, session_id: str, first: int = 0) -> StoredEpisode | None:
        """The session's episode with its actions from index ``first`` on, or None if there is none."""

    async def append(self, session_id: str, token: str, index: int, action: Action) -> bool:
        """Store action number ``index``; False, and nothing changed, unless ``token`` has exactly ``index`` actions."""

    def append_at_once(self, session_id: str, token: str, index: int, action: Action) -> bool:
        """As :meth:`append`, without waiting; False, and nothing changed, if append is needed.

        A store on another machine always returns False.
        """

    async def touch(self, session_id: str, token: str, finished: bool) -> None:
        """Note that the session is in use, or that its episode has ended (it may then make room for others)."""

    async def make_room(self, client: str, limit: int, idle_s: float) -> int:
        """Return how many unfinished sessions a client has; if they are ``limit`` or more, forget some of them first.

        The longest idle go first; those used in the last ``idle_s`` seconds stay.
        """

    async def latest(self, caller: str) -> str | None:
        """The session that this caller reset last, or None."""

    async def purge(self) -> int:
        """Forget expired sessions, and above the limit the oldest finished ones; return how many went.

        If that is not enough, some idle unfinished ones go, first those of the clients that have the most.
        """

    async def reopened(self) -> int:
        """How often the store has reopened its file, in which sessions in memory may then be missing."""

    def size_bytes(self) -> int:
        """Bytes on this machine's disk."""

    async def ping(self) -> str | None:
        """Write something, and return what was found damaged and set aside, in words; None: nothing."""


def client_of(caller: str) -> str:
    """The part of a caller's identity for its address: ``client`` of :meth:`SessionStore.make_room`."""
    return caller.partition(".")[0]
