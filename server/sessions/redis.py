"""Session store in Redis, shared by servers on several machines.

Three keys per session: a hash with its start, a list with its actions, and an entry in the indexes by age. Operations
that must be atomic are Lua scripts.
"""

from __future__ import annotations

import itertools
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar

import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import RedisError

from env.family import Action, EpisodeRecord
from inferencegym import __version__
from inferencegym.errors import CapacityError, StoreError
from server.sessions.store import IDLE_S, ROOM_CHUNK, StoredEpisode, client_of, clock_s, expired_s, stored_episode
from server.settings import Settings

log = logging.getLogger(__name__)

T = TypeVar("T")

PREFIX: Final = "inferencegym:"
BY_AGE: Final = PREFIX + "sessions"
FINISHED: Final = PREFIX + "finished"
PURGE_CHUNK: Final = 200
MAX_CONNECTIONS: Final = 64

# KEYS: hash, list, by-age index, finished index, caller's latest, its client's unfinished.
# ARGV: token, start, ttl, now, limit, id, whether an earlier episode is replaced, actions...
_PUT: Final = """
local known = redis.call('EXISTS', KEYS[1]) == 1
if known and ARGV[7] == '0' then return 'known' end
if not known and redis.call('ZCARD', KEYS[3]) >= tonumber(ARGV[5]) then return 'full' end
-- First, because a full Redis refuses a script's first write only, and only one that adds something.
redis.call('ZADD', KEYS[3], ARGV[4], ARGV[6])
local before = redis.call('HMGET', KEYS[1], 'unfinished', 'latest')
if before[1] then redis.call('ZREM', before[1], ARGV[6]) end
if before[2] and redis.call('GET', before[2]) == ARGV[6] then redis.call('DEL', before[2]) end
redis.call('DEL', KEYS[1], KEYS[2])
redis.call('HSET', KEYS[1], 'token', ARGV[1], 'start', ARGV[2], 'unfinished', KEYS[6], 'latest', KEYS[5])
for i = 8, #ARGV do redis.call('RPUSH', KEYS[2], ARGV[i]) end
redis.call('EXPIRE', KEYS[1], ARGV[3])
redis.call('EXPIRE', KEYS[2], ARGV[3])
redis.call('ZREM', KEYS[4], ARGV[6])
redis.call('SET', KEYS[5], ARGV[6], 'EX', ARGV[3])
redis.call('ZADD', KEYS[6], ARGV[4], ARGV[6])
redis.call('EXPIRE', KEYS[6], ARGV[3])
return 'stored'
"""
# KEYS: hash, list.  ARGV: token, index, action, ttl, number of this append
_APPEND: Final = """
local head = redis.call('HMGET', KEYS[1], 'token', 'append')
if head[1] ~= ARGV[1] then return 0 end
if head[2] == ARGV[5] then return 1 end
if redis.call('LLEN', KEYS[2]) ~= tonumber(ARGV[2]) then return 0 end
redis.call('RPUSH', KEYS[2], ARGV[3])
redis.call('HSET', KEYS[1], 'append', ARGV[5])
redis.call('EXPIRE', KEYS[1], ARGV[4])
redis.call('EXPIRE', KEYS[2], ARGV[4])
return 1
"""
# KEYS: hash, list.  ARGV: first
_GET: Final = """
local head = redis.call('HMGET', KEYS[1], 'token', 'start')
if not head[1] then return nil end
return {head[1], head[2], redis.call('LRANGE', KEYS[2], ARGV[1], -1)}
"""
# KEYS: hash, by-age index, finished index.  ARGV: token, now, id, finished, ttl
_TOUCH: Final = """
local head = redis.call('HMGET', KEYS[1], 'token', 'unfinished')
if head[1] ~= ARGV[1] then return 0 end
redis.call('ZADD', KEYS[2], ARGV[2], ARGV[3])
if ARGV[4] == '1' then
  redis.call('ZADD', KEYS[3], ARGV[2], ARGV[3])
  if head[2] then
    redis.call('ZREM', head[2], ARGV[3])
    -- A process that has not seen the end may still call it unfinished: there is no way back.
    redis.call('HDEL', KEYS[1], 'unfinished')
  end
elseif head[2] then
  redis.call('ZADD', head[2], ARGV[2], ARGV[3])
  redis.call('EXPIRE', head[2], ARGV[5])
end
return 1
"""
# KEYS: by-age index, finished index, then hash and list of each session.  ARGV: ids
_FORGET: Final = """
for i, id in ipairs(ARGV) do
  local head, actions = KEYS[2 * i + 1], KEYS[2 * i + 2]
  local its = redis.call('HMGET', head, 'unfinished', 'latest')
  if its[1] then redis.call('ZREM', its[1], id) end
  if its[2] and redis.call('GET', its[2]) == id then redis.call('DEL', its[2]) end
  redis.call('DEL', head, actions)
  redis.call('ZREM', KEYS[1], id)
  redis.call('ZREM', KEYS[2], id)
end
return 1
"""


class RedisStore:
    """Session store on a Redis server (5 or newer; not on a Redis cluster)."""

    name = "redis"

    def __init__(self, settings: Settings) -> None:
        self._ttl_s = settings.session_ttl_s
        self._limit = settings.max_sessions
        self.stored = 0
        self._process = secrets.token_hex(4)
        self._appends = itertools.count()
        self._down = False
        pool = redis.BlockingConnectionPool.from_url(
            settings.store_url,
            # If all connections are in use, a request waits for as long as for Redis itself.
            max_connections=MAX_CONNECTIONS,
            timeout=settings.store_timeout_s,
            socket_timeout=settings.store_timeout_s,
            socket_connect_timeout=settings.store_timeout_s,
            # More attempts cover a connection that the server closed while it was idle, and a short restart. A script
            # may then run twice: an append carries a number by which the second run knows itself.
            retry=Retry(ExponentialBackoff(cap=0.1, base=0.01), 2),
            health_check_interval=30,
        )
        # Its published types mix the synchronous and the asynchronous client, so they say little here.
        self._client: Any = redis.Redis.from_pool(pool)
        self._put = self._client.register_script(_PUT)
        self._append = self._client.register_script(_APPEND)
        self._get = self._client.register_script(_GET)
        self._touch = self._client.register_script(_TOUCH)
        self._forget = self._client.register_script(_FORGET)

    async def open(self) -> None:
        try:
            await self.ping()
        except StoreError as error:
            # Starting must not need Redis: a worker that is replaced while Redis is down would stop all others.
            log.warning("requests get 503 until the store answers: %s", error)

    async def close(self) -> None:
        await self._client.aclose()

    async def ping(self) -> str | None:
        await self._run(lambda: self._client.set(PREFIX + "ping", "1", ex=60))
        return None

    async def reopened(self) -> int:
        return 0

    def size_bytes(self) -> int:
        return 0

    async def put(self, session_id: str, record: EpisodeRecord, caller: str, replace: bool = True) -> str:
        token = secrets.token_hex(8)
        keys = [_head(session_id), _actions(session_id), BY_AGE, FINISHED, _latest(caller), _unfinished(caller)]
        now = clock_s()
        args: list[Any] = [token, record.start_json(), self._ttl_s, now, self._limit, session_id, int(replace)]
        args += record.actions
        answer = await self._run(lambda: self._put(keys, args))
        if answer == b"full":
            await self.purge()
            answer = await self._run(lambda: self._put(keys, args))
        if answer == b"full":
            raise CapacityError(f"the store has reached its limit of {self._limit:,} unfinished sessions")
        return token if answer == b"stored" else ""

    async def get(self, session_id: str, first: int = 0) -> StoredEpisode | None:
        found = await self._run(lambda: self._get([_head(session_id), _actions(session_id)], [first]))
        if found is None:
            return None
        token, start, actions = found
        return stored_episode(token.decode(), start, actions)

    async def append(self, session_id: str, token: str, index: int, action: Action) -> bool:
        keys = [_head(session_id), _actions(session_id)]
        args: list[Any] = [token, index, action, self._ttl_s, f"{self._process}-{next(self._appends)}"]
        return bool(await self._run(lambda: self._append(keys, args)))

    def append_at_once(self, session_id: str, token: str, index: int, action: Action) -> bool:
        return False

    async def touch(self, session_id: str, token: str, finished: bool) -> None:
        args: list[Any] = [token, clock_s(), session_id, int(finished), self._ttl_s]
        await self._run(lambda: self._touch([_head(session_id), BY_AGE, FINISHED], args))

    async def make_room(self, client: str, limit: int, idle_s: float) -> int:
        return await self._run(lambda: self._make_room(client, limit, idle_s))

    async def _make_room(self, client: str, limit: int, idle_s: float) -> int:
        mine, now = _unfinished(client), clock_s()
        await self._client.zremrangebyscore(mine, 0, now - self._ttl_s)
        count = int(await self._client.zcard(mine))
        if count < limit:
            return count
        most = count - limit + ROOM_CHUNK
        gone = await self._client.zrangebyscore(mine, 0, now - idle_s, start=0, num=most)
        await self._forget_all(gone)
        if gone:
            # Those whose hash has expired no longer name this index.
            await self._client.zrem(mine, *gone)
        return count - len(gone)

    async def latest(self, caller: str) -> str | None:
        found = await self._run(lambda: self._client.get(_latest(caller)))
        if found is None or not await self._run(lambda: self._client.exists(_head(found.decode()))):
            return None
        return str(found.decode())

    async def purge(self) -> int:
        """Redis forgets expired sessions by itself; the indexes are brought up to date here."""
        gone = count = await self._run(self._purge_chunk)
        while count >= PURGE_CHUNK:
            gone += (count := await self._run(self._purge_chunk))
        return gone

    async def _purge_chunk(self) -> int:
        # The index by age is written only now and then, so an old session may be in use: its key shows.
        oldest = expired_s(self._ttl_s)
        old = await self._client.zrangebyscore(BY_AGE, 0, oldest, start=0, num=PURGE_CHUNK)
        gone = [one for one in old if not await self._client.exists(_head(one.decode()))]
        stored = await self._client.zcard(BY_AGE)
        excess = min(PURGE_CHUNK - len(gone), stored - len(gone) - self._limit + 1)
        if excess > 0:
            gone += await self._client.zrange(FINISHED, 0, excess - 1)
        if stored - len(gone) >= self._limit:
            gone += await self._idle()
        await self._forget_all(gone)
        self.stored = stored - len(gone)
        return len(gone)

    async def _idle(self) -> list[bytes]:
        """Some of the longest idle sessions, first those of the clients that have the most."""
        idle = await self._client.zrangebyscore(BY_AGE, 0, clock_s() - IDLE_S, start=0, num=PURGE_CHUNK)
        holders = [await self._client.hget(_head(one.decode()), "unfinished") for one in idle]
        held = {holder: await self._client.zcard(holder) for holder in set(holders) if holder is not None}
        by_held = sorted(zip(idle, holders, strict=True), key=lambda one: -held.get(one[1], 0))
        return [one for one, _ in by_held[:ROOM_CHUNK]]

    async def _forget_all(self, gone: Sequence[bytes]) -> None:
        if gone:
            keys = [key(one.decode()) for one in gone for key in (_head, _actions)]
            await self._forget([BY_AGE, FINISHED, *keys], gone)

    async def _run(self, operation: Callable[[], Awaitable[T]]) -> T:
        try:
            answer = await operation()
        except (RedisError, OSError) as error:
            # Once per outage, and not in the answer, which anybody may read: the cause names the host of Redis.
            if not self._down:
                log.error("Redis cannot be used: %s: %s", type(error).__name__, error)
            self._down = True
            raise StoreError(f"the session store cannot be used now: {type(error).__name__}") from error
        if self._down:
            log.warning("Redis can be used again")
        self._down = False
        return answer


def _head(session_id: str) -> str:
    return f"{PREFIX}session:{session_id}"


def _actions(session_id: str) -> str:
    return f"{PREFIX}actions:{session_id}"


def _latest(caller: str) -> str:
    return f"{PREFIX}latest:{caller}"


def _unfinished(caller: str) -> str:
    # Counted by release: an episode of another release cannot be continued, so it is not unfinished.
    return f"{PREFIX}unfinished:{__version__}:{client_of(caller)}"
