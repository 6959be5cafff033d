"""Sessions: live environments in front of a store of episode records.

The record is the truth and an environment is only its latest state. A step is first appended to the record, on the
condition that nobody else has moved it, and then applied to the environment; so an environment can be dropped at any
moment, and a process that finds itself behind reads the actions it missed and replays them. That one mechanism gives
eviction without loss, recovery after a crash, any number of processes, and retries that return the same answer.

Everything here runs on one event loop. A session's requests take turns under its lock; different sessions never wait
for each other.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

import orjson

from env.episode import EpisodeEnv
from inferencegym import __version__
from inferencegym.errors import (
    EpisodeDoneError,
    InvalidActionError,
    StepConflictError,
    StoreError,
    UnknownSessionError,
)
from inferencegym.tasks import TaskId
from server.net.errors import InvalidRequestError, RateLimitedError
from server.sessions.quota import UnfinishedQuota
from server.sessions.store import RECORD_VERSION, Action, EpisodeStart, SessionStore, StoredEpisode
from server.settings import Settings

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger(__name__)

THREAD_FROM_ACTIONS: Final = 300
"""Replays longer than this (a few milliseconds) run on a thread."""
WITHOUT_ACTIONS: Final = 2**31 - 1
"""First action to be read of a record whose start is enough."""
MAX_ATTEMPTS: Final = 50
MAINTENANCE_EVERY_S: Final = 10.0
_SESSION_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}\Z")


@dataclass(frozen=True, slots=True)
class ServedFamily:
    """A kind of environment as it is served: how to make one, and how to read and keep its actions.

    ``parse_action`` returns an action as the environment takes it, and the values of its ``fields``, which every equal
    action has; it raises InvalidActionError.
    """

    name: str
    make: Callable[[], EpisodeEnv]
    parse_action: Callable[[Any], tuple[Any, Sequence[Any]]]
    fields: tuple[str, ...]

    def recorded(self, action: Action) -> dict[str, Any]:
        """An action of a record in its JSON form. Raises StoreError where the record holds none of this family."""
        try:
            values = orjson.loads(action)
        except orjson.JSONDecodeError:
            values = None
        if not isinstance(values, list) or len(values) != len(self.fields):
            raise _unreadable(action, f"not a JSON array of {', '.join(self.fields)}")
        return dict(zip(self.fields, values, strict=True))

    def play(self, env: EpisodeEnv, action: Action) -> tuple[Any, float, bool]:
        """Play a step of a record: observation, reward and done. Raises StoreError where it cannot be played."""
        try:
            return env.play(self.recorded(action))
        except InvalidActionError as error:  # the caller's own action is not to blame
            raise _unreadable(action, str(error)) from error


@dataclass(slots=True)
class Outcome:
    """What one step gave; ``number`` counts from 1."""

    number: int
    observation: Any
    reward: float
    done: bool
    env: EpisodeEnv = field(compare=False, repr=False)

    def info(self) -> dict[str, Any]:
        """More about the step, for whoever asks at once: the environment's next step takes it away."""
        if len(self.env.actions) != self.number:
            raise RuntimeError(f"the info of step {self.number} is gone: {len(self.env.actions)} steps were played")
        return self.env.info()


@dataclass(slots=True)
class Live:
    """A session whose environment is in memory."""

    session_id: str
    family: ServedFamily
    start: EpisodeStart
    token: str
    caller: str
    env: EpisodeEnv
    actions: list[Action] = field(default_factory=list)
    last: Outcome | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    waiting: int = 0
    touched: float = 0.0

    @property
    def in_use(self) -> bool:
        """Whether a request has it or waits for it: it is not to be dropped then."""
        return self.waiting > 0 or self.lock.locked()


@dataclass(slots=True)
class Counters:
    """What happened since the process started."""

    resets: int = 0
    steps: int = 0
    repeated_answers: int = 0
    conflicts: int = 0
    replays: int = 0
    replayed_steps: int = 0
    evictions: int = 0
    store_errors: int = 0


def new_session_id() -> str:
    """128 random bits: whoever knows the id may play the session, so it cannot be guessed."""
    return secrets.token_hex(16)


def _counting_store_errors(
    method: Callable[Concatenate[SessionManager, P], Awaitable[T]],
) -> Callable[Concatenate[SessionManager, P], Awaitable[T]]:
    @wraps(method)
    async def counting(self: SessionManager, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await method(self, *args, **kwargs)
        except StoreError:
            self.counters.store_errors += 1
            raise

    return counting


class SessionManager:
    """Resets, steps and looks up sessions of all families."""

    def __init__(self, store: SessionStore, families: Mapping[str, ServedFamily], settings: Settings) -> None:
        self.store = store
        self.families = families
        self.counters = Counters()
        self._live: OrderedDict[str, Live] = OrderedDict()
        self._steps_held = 0
        self._max_live = settings.live_sessions
        self._max_steps_held = settings.live_steps
        self._max_waiting = settings.max_waiting_steps
        self._ttl_s = settings.session_ttl_s
        self._touch_every_s = min(60.0, settings.session_ttl_s / 10)
        self._quota = UnfinishedQuota(store, settings.max_sessions_per_client)
        self._upkeep: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        """Environments in memory."""
        return len(self._live)

    @property
    def steps_held(self) -> int:
        """Steps of all environments in memory."""
        return self._steps_held

    # ------------------------------------------------------------ what callers do

    @_counting_store_errors
    async def reset(
        self,
        family: str,
        *,
        task_id: TaskId | None = None,
        seed: int | None = None,
        config: Mapping[str, Any] | None = None,
        caller: str = "",
        session_id: str | None = None,
        create: bool = False,
    ) -> tuple[Live, Any]:
        """Start an episode and return its session and first observation.

        A ``session_id`` restarts that session; an unknown one is an UnknownSessionError unless ``create`` is set, and
        so is one of another family in any case.
        Whatever is wrong with the other arguments is raised by the environment; an earlier episode then goes on.
        """
        if session_id is None or not await self._may_restart(session_id, family, create):
            await self._quota.take(caller)
        chosen = self.families[family]
        env = chosen.make()
        session_id = session_id or new_session_id()
        first = env.reset(seed=seed, task_id=task_id, config=config, session_id=session_id)
        start = EpisodeStart(chosen.name, env.task_id, env.seed, env.config_dict())
        known = self._live.get(session_id)
        if known is None:
            token = await self.store.put(session_id, start, caller)
            live = Live(session_id, chosen, start, token, caller, env, touched=time.monotonic())
            self._keep(live)
        else:
            live = known
            self._live.move_to_end(session_id)
            async with live.lock:
                live.token = await self.store.put(session_id, start, caller)
                self._replace(live, chosen, start, env, [])
                live.caller = caller
        self.counters.resets += 1
        return live, first

    async def step(
        self,
        session_id: str,
        action: Any,
        number: int | None = None,
        family: str | None = None,
        reset_id: str | None = None,
    ) -> Outcome:
        """Take step ``number`` (counting from 1; None: the next one) and return what it gave.

        A step that was taken already with the same action gives the same outcome again; with another action it is a
        StepConflictError, and so is a number ahead of the episode. Where ``family`` is given, a session of another
        family is an UnknownSessionError. Where ``reset_id`` is given, a session that was reset since that reset is a
        StepConflictError.
        """
        live = self._live.get(session_id)
        if live is None:
            live = await self._loaded(session_id)
        else:
            self._live.move_to_end(session_id)
        if family is not None:
            must_be(live.family.name, family, session_id)
        outcome = self._step_at_once(live, action, number, reset_id)
        if outcome is not None:
            if self._touch_is_due(live):
                # Nobody else's step may come before this one's info is asked for.
                async with live.lock:
                    await self._touch_if_due(live)
            return outcome
        if live.waiting >= self._max_waiting:
            raise RateLimitedError(f"{live.waiting} requests already wait for this session", retry_after_s=1)
        live.waiting += 1
        try:
            async with live.lock:
                return await self._step(live, action, number, reset_id)
        except StoreError:
            self.counters.store_errors += 1
            raise
        finally:
            live.waiting -= 1

    def step_at_once(
        self,
        session_id: str,
        action: Any,
        number: int | None,
        family: str | None = None,
        reset_id: str | None = None,
    ) -> Outcome | None:
        """As :meth:`step` where nothing has to be waited for (almost always); else None, and nothing changed."""
        live = self._live.get(session_id)
        if live is None:
            return None
        self._live.move_to_end(session_id)
        if family is not None:
            must_be(live.family.name, family, session_id)
        outcome = self._step_at_once(live, action, number, reset_id)
        if outcome is not None and self._touch_is_due(live):
            self._soon(self._touch_if_due(live))
        return outcome

    @_counting_store_errors
    async def get(self, session_id: str, family: str | None = None) -> Live:
        """The session as it is now, whichever process stepped it last. Hold its ``lock`` while awaiting with it.

        Where ``family`` is given, a session of another family is an UnknownSessionError.
        """
        live = self._live.get(session_id)
        if live is None:
            live = await self._load(session_id)
        else:
            self._live.move_to_end(session_id)
            async with live.lock:
                if await self.store.position(session_id) != (live.token, len(live.actions)):
                    await self._refresh(live)
        if family is not None:
            must_be(live.family.name, family, session_id)
        return live

    @_counting_store_errors
    async def latest(self, caller: str) -> str:
        """Id of the session that this caller reset last. Raises UnknownSessionError."""
        session_id = await self.store.latest(caller)
        if session_id is None:
            raise UnknownSessionError("no session was started from here: name one with session_id")
        return session_id

    async def maintain(self) -> None:
        """Forget what has expired, now and then, until cancelled."""
        while True:
            await asyncio.sleep(MAINTENANCE_EVERY_S)
            self._drop_idle()
            try:
                await self.store.purge()
            except StoreError as error:
                self.counters.store_errors += 1
                log.warning("expired sessions could not be forgotten: %s", error)

    # ------------------------------------------------------------ one step

    def _step_at_once(self, live: Live, action: Any, number: int | None, reset_id: str | None) -> Outcome | None:
        taken = len(live.actions)
        if live.in_use or live.env.done or (number is not None and number != taken + 1):
            return None
        if reset_id is not None and reset_id != live.start.reset_id:
            return None
        parsed, wanted = _read_action(live.family, action)
        if not self.store.append_at_once(live.session_id, live.token, taken, wanted):
            return None
        return self._taken(live, parsed, wanted)

    async def _step(self, live: Live, action: Any, number: int | None, reset_id: str | None) -> Outcome:
        parsed, wanted = _read_action(live.family, action)
        for _ in range(MAX_ATTEMPTS):
            self._must_be_of(live, reset_id)
            if live.env.done or (number is not None and number != len(live.actions) + 1):
                # Before this is refused or answered from memory: has another process moved or restarted the session?
                await self._refresh(live)
                self._must_be_of(live, reset_id)
                if number is not None and number != len(live.actions) + 1:
                    return await self._answer_again(live, wanted, number)
                if live.env.done:
                    raise EpisodeDoneError(f"the episode ended after {len(live.actions)} steps")
            if await self.store.append(live.session_id, live.token, len(live.actions), wanted):
                outcome = self._taken(live, parsed, wanted)
                await self._touch_if_due(live)
                return outcome
            await self._refresh(live)
        self.counters.conflicts += 1
        raise StepConflictError("other requests keep stepping this session; give the step its number")

    def _must_be_of(self, live: Live, reset_id: str | None) -> None:
        if reset_id is not None and reset_id != live.start.reset_id:
            self.counters.conflicts += 1
            raise StepConflictError(f"session {live.session_id!r} was reset by another request")

    def _taken(self, live: Live, parsed: Any, wanted: Action) -> Outcome:
        self.counters.steps += 1
        return self._apply(live, parsed, wanted)

    def _apply(self, live: Live, parsed: Any, wanted: Action) -> Outcome:
        outcome = _took(live, wanted, *live.env.play(parsed))
        self._count_held(live, 1)
        return outcome

    async def _answer_again(self, live: Live, wanted: Action, number: int) -> Outcome:
        taken = len(live.actions)
        if number > taken + 1:
            self.counters.conflicts += 1
            raise StepConflictError(
                f"step {number} cannot be taken: {taken} steps were taken, so the next is {taken + 1}"
            )
        if live.actions[number - 1] != wanted:
            self.counters.conflicts += 1
            before = orjson.dumps(live.family.recorded(live.actions[number - 1])).decode()
            raise StepConflictError(f"step {number} was taken with another action: {before}")
        self.counters.repeated_answers += 1
        if number == taken and live.last is not None:
            return live.last
        _, last = await self._replay(live.family, live.start, live.session_id, live.actions[:number])
        assert last is not None
        return last

    def _touch_is_due(self, live: Live) -> bool:
        return live.env.done or time.monotonic() - live.touched >= self._touch_every_s

    async def _touch_if_due(self, live: Live) -> None:
        if not self._touch_is_due(live):
            return
        now = time.monotonic()
        try:
            await self.store.touch(live.session_id, live.token, live.env.done)
            live.touched = now
        except StoreError as error:
            # The step itself is stored and counts; only the note of its time is missing.
            self.counters.store_errors += 1
            log.warning("session %s could not be marked as in use: %s", live.session_id[:8], error)

    def _soon(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        # The event loop alone would let it be collected.
        self._upkeep.add(task)
        task.add_done_callback(self._upkeep.discard)

    # ------------------------------------------------------------ between memory and store

    @_counting_store_errors
    async def _loaded(self, session_id: str) -> Live:
        return await self._load(session_id)

    async def _load(self, session_id: str) -> Live:
        stored = await self.store.get(session_id) if _SESSION_ID.match(session_id) else None
        if stored is None:
            raise UnknownSessionError(f"there is no session {session_id[:128]!r}: it never was, or it has expired")
        family = self._family_of(stored.start)
        env, last = await self._replay(family, stored.start, session_id, stored.actions)
        live = Live(session_id, family, stored.start, stored.token, "", env, stored.actions, last)
        # Its next step is noted in the store at once: the last note may be almost as old as the session may get.
        live.touched = time.monotonic() - self._touch_every_s
        other = self._live.get(session_id)
        if other is not None:
            return other  # loaded by another request meanwhile
        self._keep(live)
        return live

    async def _refresh(self, live: Live) -> None:
        """Bring a live session to where its record is; needs the session's lock."""
        stored = await self.store.get(live.session_id, first=len(live.actions))
        if stored is None:
            # Forgotten while it was alive here (expired, made room, or the store was replaced). It is in use: it stays.
            live.token = await self.store.put(live.session_id, live.start, live.caller, live.actions)
        elif stored.token != live.token:
            await self._adopt(live, await self.store.get(live.session_id))
        elif stored.actions:
            await self._catch_up(live, stored.actions)
        else:
            await self._write_back(live)

    async def _adopt(self, live: Live, stored: StoredEpisode | None) -> None:
        if stored is None:
            raise StoreError("the session was being replaced; send the request again")
        family = self._family_of(stored.start)
        env, last = await self._replay(family, stored.start, live.session_id, stored.actions)
        live.token = stored.token
        self._replace(live, family, stored.start, env, stored.actions)
        live.last = last

    async def _catch_up(self, live: Live, missed: Sequence[Action]) -> None:
        def apply() -> None:
            for action in missed:
                _took(live, action, *live.family.play(live.env, action))

        before = len(live.actions)
        try:
            if len(missed) > THREAD_FROM_ACTIONS:
                await asyncio.to_thread(apply)
            else:
                apply()
        finally:
            self.counters.replayed_steps += len(live.actions) - before
            self._count_held(live, len(live.actions) - before)

    async def _write_back(self, live: Live) -> None:
        """Store again what a store has lost of an episode (a Redis replica that took over may lack the last steps)."""
        position = await self.store.position(live.session_id)
        if position is None or position[0] != live.token:
            return
        for index in range(position[1], len(live.actions)):
            await self.store.append(live.session_id, live.token, index, live.actions[index])

    async def _replay(
        self, family: ServedFamily, start: EpisodeStart, session_id: str, actions: Sequence[Action]
    ) -> tuple[EpisodeEnv, Outcome | None]:
        self.counters.replays += 1
        self.counters.replayed_steps += len(actions)
        if len(actions) > THREAD_FROM_ACTIONS:
            return await asyncio.to_thread(replay, family, start, session_id, actions)
        return replay(family, start, session_id, actions)

    def _family_of(self, start: EpisodeStart) -> ServedFamily:
        if start.version != RECORD_VERSION:
            raise UnknownSessionError(
                f"the session was stored in another form ({start.version}, this server's is {RECORD_VERSION}): reset it"
            )
        if start.release != __version__ or start.family not in self.families:
            raise UnknownSessionError(
                f"the session was started on release {start.release} and this server is {__version__}: "
                "its episode cannot go on unchanged"
            )
        return self.families[start.family]

    async def _may_restart(self, session_id: str, family: str, create: bool) -> bool:
        """Whether this session is there to be restarted; raises where it neither is nor may be made."""
        if not _SESSION_ID.match(session_id):
            raise InvalidRequestError("session_id", session_id, "1 to 128 letters, digits, dots, colons, - or _")
        live = self._live.get(session_id)
        if live is not None:
            must_be(live.family.name, family, session_id)
            return True
        stored = await self.store.get(session_id, first=WITHOUT_ACTIONS)
        if stored is not None:
            must_be(stored.start.family, family, session_id)
        elif not create:
            raise UnknownSessionError(
                f"there is no session {session_id!r} to restart: leave session_id out to start a new one"
            )
        return stored is not None

    # ------------------------------------------------------------ what is in memory

    def _keep(self, live: Live) -> None:
        earlier = self._live.get(live.session_id)
        if earlier is not None:
            self._drop(earlier)
        self._live[live.session_id] = live
        self._steps_held += len(live.actions)
        while len(self._live) > self._max_live or (self._steps_held > self._max_steps_held and len(self._live) > 1):
            victim = next((one for one in self._live.values() if not one.in_use and one is not live), None)
            if victim is None:
                return
            self._drop(victim)
            self.counters.evictions += 1

    def _replace(
        self, live: Live, family: ServedFamily, start: EpisodeStart, env: EpisodeEnv, actions: list[Action]
    ) -> None:
        self._count_held(live, len(actions) - len(live.actions))
        live.family, live.start, live.env, live.actions, live.last = family, start, env, actions, None

    def _count_held(self, live: Live, steps: int) -> None:
        # One that was dropped meanwhile took its steps with it.
        if self._live.get(live.session_id) is live:
            self._steps_held += steps

    def _drop(self, live: Live) -> None:
        del self._live[live.session_id]
        self._steps_held -= len(live.actions)

    def _drop_idle(self) -> None:
        oldest = time.monotonic() - self._ttl_s - 2 * self._touch_every_s
        for live in [one for one in self._live.values() if one.touched < oldest and not one.in_use]:
            self._drop(live)


def _took(live: Live, wanted: Action, observation: Any, reward: float, done: bool) -> Outcome:
    live.actions.append(wanted)
    live.last = Outcome(len(live.actions), observation, reward, done, live.env)
    return live.last


def _unreadable(action: Action, why: str) -> StoreError:
    return StoreError(f"the session store holds a step that cannot be read: {action[:200]!r} is {why}")


def _read_action(family: ServedFamily, action: Any) -> tuple[Any, Action]:
    parsed, values = family.parse_action(action)
    # Copied, because orjson's own bytes keep the 4 KB of its write buffer for as long as they live.
    return parsed, bytes(memoryview(orjson.dumps(values)))


def must_be(known: str, family: str, session_id: str) -> None:
    """Raise UnknownSessionError unless a session's family is this one: each environment knows its own sessions only."""
    if known != family:
        raise UnknownSessionError(f"session {session_id!r} is one of the {known} environment, not of the {family} one")


def replay(
    family: ServedFamily, start: EpisodeStart, session_id: str, actions: Sequence[Action]
) -> tuple[EpisodeEnv, Outcome | None]:
    """A fresh environment with ``actions`` played, and what the last of them gave: the same bits as the first time."""
    env = family.make()
    env.reset(seed=start.seed, task_id=start.task_id, config=start.config, session_id=session_id)
    last: Outcome | None = None
    for number, action in enumerate(actions, 1):
        last = Outcome(number, *family.play(env, action), env)
    return env, last
