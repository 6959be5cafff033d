"""Where episodes are kept: the record of one, and what every store promises.

An episode IS (family, task, seed, config, actions): its environment can be rebuilt from them at any time, so nothing
else is stored. A store is a list of records with one rule: action ``n`` is appended only where exactly ``n`` actions
are stored, for the same start of the session. That is all the concurrency control between requests, processes and
machines.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import orjson

from inferencegym import __version__
from inferencegym.errors import StoreError
from inferencegym.tasks import TaskId
from server.settings import Settings

RECORD_VERSION: Final = 3
"""Form of what is stored. 1 kept the names of an action's fields, 2 no id of the reset."""

ROOM_CHUNK: Final = 20
"""Sessions that make room at once, so that a client at its limit is not counted at every reset."""

Action = bytes
"""One action: the values that its family's ``parse_action`` returns, as a JSON array. Without the names of the fields
it takes a fifth of the room, in memory and in a store."""


@dataclass(frozen=True, slots=True)
class EpisodeStart:
    """What an episode begins with; complete, so that later defaults cannot change it."""

    family: str
    task_id: TaskId
    seed: int
    config: dict[str, Any]
    release: str = __version__
    """Version of the package that plays it: another one may simulate differently."""
    version: int = RECORD_VERSION
    reset_id: str = field(default_factory=lambda: secrets.token_hex(8))
    """Tells two episodes apart that begin with the same; it stays the same when the record is written again."""

    def to_json(self) -> bytes:
        return orjson.dumps(self)

    @classmethod
    def from_json(cls, text: bytes | str) -> EpisodeStart:
        """Raises StoreError where another form was written."""
        try:
            return cls(**orjson.loads(text))
        except (TypeError, orjson.JSONDecodeError) as error:
            raise StoreError(f"the session store holds an episode whose start cannot be read: {error}") from error


@dataclass(slots=True)
class StoredEpisode:
    """One record as read: ``actions`` are those from the index asked for on."""

    token: str
    """Changes with every restart of the session, so that a step never lands in another episode."""
    start: EpisodeStart
    actions: list[Action] = field(default_factory=list)


class SessionStore(Protocol):
    """A durable map from session id to episode record.

    Methods are called on one event loop and never block it for long; each is applied wholly or not at all. All raise
    :class:`~inferencegym.errors.StoreError` when the store cannot answer within its timeout; the next call tries again.
    """

    name: str

    async def open(self) -> None:
        """Connect, and create what is missing."""

    async def close(self) -> None:
        """Release everything; nothing acknowledged is lost."""

    async def put(self, session_id: str, start: EpisodeStart, caller: str, actions: Sequence[Action] = ()) -> str:
        """Start the session's (next) episode, replacing an earlier one, and return its token.

        Raises :class:`~inferencegym.errors.CapacityError` when the store is full of unfinished sessions.
        """

    async def get(self, session_id: str, first: int = 0) -> StoredEpisode | None:
        """The session's episode with its actions from index ``first`` on, or None if there is none."""

    async def position(self, session_id: str) -> tuple[str, int] | None:
        """Token and number of stored actions, or None."""

    async def append(self, session_id: str, token: str, index: int, action: Action) -> bool:
        """Store action number ``index``; False, and nothing changed, unless ``token`` has exactly ``index`` actions."""

    def append_at_once(self, session_id: str, token: str, index: int, action: Action) -> bool:
        """As :meth:`append`, where nothing has to be waited for; False, and nothing changed, asks for append instead.

        A store that is elsewhere always says False.
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
        """Forget expired sessions, and the oldest finished ones above the limit; return how many went."""

    async def ping(self) -> None:
        """Return if the store would take a write now; raise StoreError otherwise."""


def client_of(caller: str) -> str:
    """The part of a caller's identity that stands for its address: ``client`` of :meth:`SessionStore.make_room`."""
    return caller.partition(".")[0]


def make_store(settings: Settings) -> SessionStore:
    """The store that the settings name; not opened yet."""
    scheme = settings.store_url.split("://", 1)[0]
    if scheme in ("redis", "rediss"):
        # Imported here: only servers that share their sessions through Redis install its client.
        from server.sessions.redis import RedisStore

        return RedisStore(settings)
    if scheme == "memory":
        from server.sessions.memory import MemoryStore

        return MemoryStore(settings)
    from server.sessions.sqlite import SqliteStore

    return SqliteStore(settings)
