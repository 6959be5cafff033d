"""Session manager: live environments in memory over a store of episode records.

The store's record determines an episode; an environment is only its latest state. A step is first appended to the
record, on the condition that no other request has changed it, and then applied to the environment. So an environment
can be dropped at any time, and a process that is behind reads and replays the missing actions. This gives eviction
without loss, recovery after a crash, any number of processes, and retries that return the same answer.

Everything here runs on one event loop. A session's requests take turns under its lock; different sessions never wait
for each other.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Final, TypeVar

import orjson

from env.family import RECORD_VERSION, Action, EpisodeEnv, EpisodeRecord, Family
from inferencegym import __version__
from inferencegym.errors import (
    DataFormatError,
    EpisodeDoneError,
    InferenceGymError,
    InvalidActionError,
    OtherReleaseError,
    StepConflictError,
    StoreError,
    UnknownSessionError,
    short_repr,
)
from inferencegym.tasks import TaskId
from server.net.cpu import on_thread
from server.net.errors import InvalidRequestError
from server.net.jobs import Elsewhere, JobRefusedError
from server.sessions.quota import UnfinishedQuota
from server.sessions.session import Session, new_session_id
from server.sessions.store import SessionStore, StoredEpisode
from server.settings import Settings

T = TypeVar("T")

log = logging.getLogger(__name__)

SHORT_S: Final = 50
"""Replays of no more simulated seconds than this run on the event loop: they take a millisecond."""
LONG_S: Final = 300
"""Replays of more simulated seconds than this are charged, and longer episodes start on a thread: either takes some
milliseconds.
"""
COUNTERS: Final[Mapping[str, str]] = {
    "resets": "Episodes started",
    "steps": "Steps played",
    "repeated_answers": "Steps sent again and answered as before",
    "conflicts": "Steps refused because another action was accepted for them",
    "replays": "Environments rebuilt from their records",
    "replayed_steps": "Steps played again to rebuild environments",
    "evictions": "Environments dropped from memory to make room; their records stay",
    "store_errors": "Requests and maintenance work that the session store failed to serve",
}
"""What :class:`SessionManager` counts."""
WITHOUT_ACTIONS: Final = 2**31 - 1
"""Index of the first action to read when only a record's start is needed: larger than any."""
MAX_ATTEMPTS: Final = 50
MAINTENANCE_EVERY_S: Final = 10.0
LOOK_AT_STORE_EVERY_S: Final = 1.0
_SESSION_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}\Z")


@dataclass(slots=True)
class StepResult:
    """Result of one step; ``number`` counts from 1."""

    number: int
    observation: Any
    reward: float
    done: bool
    env: EpisodeEnv = field(compare=False, repr=False)
    known_info: dict[str, Any] | None = field(default=None, compare=False, repr=False)
    """The info of a step that another process has played again."""

    def info(self) -> dict[str, Any]:
        """Details of the step; must be read before the environment takes its next step."""
        if self.known_info is not None:
            return self.known_info
        if len(self.env.actions) != self.number:
            raise RuntimeError(f"the info of step {self.number} is gone: {len(self.env.actions)} steps were played")
        return self.env.info()


def last_result(env: EpisodeEnv) -> StepResult | None:
    """Result of an environment's last step; None before the first."""
    taken = len(env.actions)
    if taken == 0:
        return None
    return StepResult(taken, env.observation(), env.last_reward, env.done, env)


@dataclass(slots=True)
class LiveSession(Session):
    """A session whose environment is in memory; ``record`` is its stored record."""

    family: Family
    record: EpisodeRecord
    token: str
    caller: str
    env: EpisodeEnv
    last: StepResult | None = None
    _parsed: tuple[Action, Mapping[str, Any]] = (b"", {})
    """The action that was parsed last, usually that of the last step, and its values."""

    @property
    def actions(self) -> list[Action]:
        """Actions taken so far."""
        return self.record.actions

    def parse_action(self, action: Any, at: int) -> tuple[Any, Action]:
        """An action for the step after ``at`` steps, complete, in the forms of the environment and of the record.

        Raises InvalidActionError, also for actions that the episode cannot play, because a stored step must play.
        """
        kept, values = self._parsed
        if at and kept is not self.actions[at - 1]:
            values = self.family.action_json(self.actions[at - 1])
        parsed, kept, values = self.family.parse_action(action, values if at else None)
        self._parsed = (kept, values)
        return self.env.check(parsed), kept


class SessionManager:
    """Resets, steps and looks up sessions of all families."""

    def __init__(self, store: SessionStore, families: Mapping[str, Family], settings: Settings) -> None:
        self.store = store
        self.families = families
        self.counters = SimpleNamespace(**dict.fromkeys(COUNTERS, 0))
        self.elsewhere = Elsewhere()
        self.in_memory: OrderedDict[str, LiveSession] = OrderedDict()
        """Sessions whose environment is in memory, the most recently used last."""
        self.steps_held = 0
        """Log entries of all environments in memory: one per step, or several where actions are held."""
        self._max_live = settings.live_sessions
        self._max_steps_held = settings.live_steps
        self._ttl_s = settings.session_ttl_s
        self._touch_every_s = min(60.0, settings.session_ttl_s / 10)
        self._touches: set[asyncio.Task[None]] = set()
        self._quota = UnfinishedQuota(store, settings.max_sessions_per_client)
        self._reopened = 0
        """Value of :meth:`SessionStore.reopened` when all sessions in memory were last known to be stored."""

    def __len__(self) -> int:
        """Environments in memory."""
        return len(self.in_memory)

    # ------------------------------------------------------------ public operations

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
    ) -> tuple[LiveSession, Any]:
        """Start an episode and return its session and first observation.

        A ``session_id`` restarts that session; an unknown one is an UnknownSessionError unless ``create`` is set, and
        so is one of another family in any case.
        The environment raises the errors of the other arguments; an earlier episode then continues.
        """
        with self._counting_store_errors():
            if session_id is None or not await self._may_restart(session_id, family, create):
                await self._quota.take(caller)
            chosen = self.families[family]
            env = chosen.make()
            session_id = session_id or new_session_id()
            start = partial(env.reset, seed=seed, task_id=task_id, config=config, session_id=session_id)
            first = await asyncio.to_thread(start) if _starts_long(config) else start()
            record = EpisodeRecord(chosen.name, env.task_id, env.seed, env.config_dict())
            live = self.in_memory.get(session_id)
            if live is None:
                token = await self.store.put(session_id, record, caller)
                live = LiveSession(session_id, chosen, record, token, caller, env)
                self._keep(live)
            else:
                self.in_memory.move_to_end(session_id)
                async with live.lock:
                    live.token = await self.store.put(session_id, record, caller)
                    self._replace(live, chosen, record, env)
                    live.caller = caller
            self.counters.resets += 1
            return live, first

    def try_step(
        self,
        session_id: str,
        action: Any,
        number: int | None = None,
        family: str | None = None,
        reset_id: str | None = None,
    ) -> StepResult | None:
        """Take step ``number`` (counting from 1; None: the next one) if this needs no waiting.

        Returns None, and changes nothing, if it has to wait (for another request, the store or a replay) or if the step
        is not simply the next one; :meth:`step`, which tries this first, then waits for it or raises the error.
        """
        live = self.in_memory.get(session_id)
        if live is None:
            return None
        self.in_memory.move_to_end(session_id)
        if live.in_use or live.env.done or number not in (None, len(live.actions) + 1):
            return None
        if family not in (None, live.family.name) or reset_id not in (None, live.record.reset_id):
            return None
        parsed, wanted = live.parse_action(action, len(live.actions))
        if not self.store.append_at_once(session_id, live.token, len(live.actions), wanted):
            return None
        result = self._take(live, parsed, wanted)
        if self._touch_is_due(live):
            # By a task: a step in between would replace the info of this one.
            touch = asyncio.create_task(self._touch(live))
            self._touches.add(touch)
            touch.add_done_callback(self._touches.discard)
        return result

    async def step(
        self,
        session_id: str,
        action: Any,
        number: int | None = None,
        family: str | None = None,
        reset_id: str | None = None,
    ) -> StepResult:
        """Take step ``number`` (counting from 1; None: the next one) and return its result.

        A step that was taken already with the same action gives the same result again; with another action it is a
        StepConflictError, and so is a number ahead of the episode. Where ``family`` is given, a session of another
        family is an UnknownSessionError. Where ``reset_id`` is given, a session that was reset since that reset is a
        StepConflictError.
        """
        try:
            live = self.in_memory.get(session_id) or await self._load(session_id)
            result = self.try_step(session_id, action, number, family, reset_id)
            if result is not None:
                return result
            if family is not None:
                must_be(live.family.name, family, session_id)
            async with live.turn():
                return await self._step(live, action, number, reset_id)
        except StoreError:
            self.counters.store_errors += 1
            raise

    async def get(self, session_id: str, family: str | None = None) -> LiveSession:
        """The session in its current state, whichever process stepped it last. Hold its ``lock`` across awaits.

        Where ``family`` is given, a session of another family is an UnknownSessionError.
        """
        with self._counting_store_errors():
            live = self.in_memory.get(session_id)
            if live is None:
                live = await self._load(session_id)
            else:
                self.in_memory.move_to_end(session_id)
                async with live.lock:
                    await self._refresh(live)
        if family is not None:
            must_be(live.family.name, family, session_id)
        return live

    async def latest(self, caller: str) -> str:
        """Id of the session that this caller reset last. Raises UnknownSessionError."""
        with self._counting_store_errors():
            session_id = await self.store.latest(caller)
        if session_id is None:
            raise UnknownSessionError("this caller has started no session: name one with session_id")
        return session_id

    async def ping(self) -> str | None:
        """:meth:`SessionStore.ping`; raises StoreError also while the store lacks sessions that are in memory."""
        damage = await self.store.ping()
        if self.in_memory and await self.store.reopened() != self._reopened:
            raise StoreError(
                f"the session store was opened anew: {len(self.in_memory):,} sessions in memory are being stored again"
            )
        return damage

    async def maintain(self) -> None:
        """Keep the store complete, and forget what has expired, until cancelled."""
        due = time.monotonic() + MAINTENANCE_EVERY_S
        while True:
            await asyncio.sleep(LOOK_AT_STORE_EVERY_S)
            try:
                await self.store_again()
                if time.monotonic() >= due:
                    due = time.monotonic() + MAINTENANCE_EVERY_S
                    self._drop_idle()
                    await self.store.purge()
            except StoreError as error:
                self.counters.store_errors += 1
                log.warning("maintenance of the session store failed: %s", error)

    async def store_again(self) -> None:
        """Store the sessions in memory again if the store was reopened, because a lost file took them away."""
        reopened = await self.store.reopened()
        if reopened == self._reopened:
            return
        for live in list(self.in_memory.values()):
            async with live.lock:
                if self.in_memory.get(live.session_id) is not live:
                    continue
                try:
                    await self._refresh(live)
                except InferenceGymError as error:
                    # If the store itself has failed, ping raises and all is tried again; else only this session failed.
                    await self.store.ping()
                    log.warning("session %s could not be stored again: %s", live.session_id[:8], error)
        self._reopened = reopened

    # ------------------------------------------------------------ one step

    async def _step(self, live: LiveSession, action: Any, number: int | None, reset_id: str | None) -> StepResult:
        live.family.parse_action(action)  # refused before all other checks
        for _ in range(MAX_ATTEMPTS):
            self._must_be_of(live, reset_id)
            if live.env.done or (number is not None and number != len(live.actions) + 1):
                # Before refusing it or answering from memory, check whether another process stepped or restarted the
                # session.
                await self._refresh(live)
                self._must_be_of(live, reset_id)
                if number is not None and number != len(live.actions) + 1:
                    return await self._answer_again(live, action, number)
                if live.env.done:
                    raise EpisodeDoneError(f"the episode ended after {len(live.actions)} steps")
            parsed, wanted = live.parse_action(action, len(live.actions))
            if await self.store.append(live.session_id, live.token, len(live.actions), wanted):
                result = self._take(live, parsed, wanted)
                if self._touch_is_due(live):
                    await self._touch(live)
                return result
            await self._refresh(live)
        self.counters.conflicts += 1
        raise StepConflictError("other requests keep stepping this session; give the step its number")

    def _must_be_of(self, live: LiveSession, reset_id: str | None) -> None:
        if reset_id is not None and reset_id != live.record.reset_id:
            self.counters.conflicts += 1
            raise StepConflictError(f"session {live.session_id!r} was reset by another request")

    def _take(self, live: LiveSession, parsed: Any, wanted: Action) -> StepResult:
        """Play a step that the store has."""
        self.counters.steps += 1
        before = live.env.n_entries
        observation, reward, done = live.env.play(parsed)
        live.actions.append(wanted)
        self._count_held(live, live.env.n_entries - before)
        live.last = StepResult(len(live.actions), observation, reward, done, live.env)
        return live.last

    async def _answer_again(self, live: LiveSession, action: Any, number: int) -> StepResult:
        taken = len(live.actions)
        if number > taken + 1:
            self.counters.conflicts += 1
            raise StepConflictError(
                f"step {number} cannot be taken: {taken} steps were taken, so the next is {taken + 1}"
            )
        if live.actions[number - 1] != live.parse_action(action, number - 1)[1]:
            self.counters.conflicts += 1
            before = orjson.dumps(live.family.action_json(live.actions[number - 1])).decode()
            raise StepConflictError(f"step {number} was taken with another action: {before}")
        self.counters.repeated_answers += 1
        if number == taken and live.last is not None:
            return live.last
        earlier = replace(live.record, actions=live.actions[:number])
        if _is_short(live.family, earlier, number):
            last = last_result(await self._replay(live.family, earlier, live.session_id))
            assert last is not None
            return last
        self.counters.replays += 1
        self.counters.replayed_steps += number
        body = b"\n".join([live.session_id.encode(), earlier.start_json(), *earlier.actions])
        try:
            answer = await self.elsewhere.run("last_step", live.family.name, body)
        except JobRefusedError as error:
            raise StoreError(f"step {number} cannot be played again: {error}") from error
        observation, reward, done, info = orjson.loads(answer)
        return StepResult(number, observation, reward, done, live.env, info)

    def _touch_is_due(self, live: LiveSession) -> bool:
        return live.env.done or time.monotonic() - live.touched >= self._touch_every_s

    async def _touch(self, live: LiveSession) -> None:
        now = time.monotonic()
        try:
            await self.store.touch(live.session_id, live.token, live.env.done)
            live.touched = now
        except StoreError as error:
            # The step itself is stored and counts; only its time is missing.
            self.counters.store_errors += 1
            log.warning("session %s could not be marked as in use: %s", live.session_id[:8], error)

    # ------------------------------------------------------------ between memory and store

    @contextmanager
    def _counting_store_errors(self) -> Iterator[None]:
        try:
            yield
        except StoreError:
            self.counters.store_errors += 1
            raise

    async def _load(self, session_id: str) -> LiveSession:
        stored = await self.store.get(session_id) if _SESSION_ID.match(session_id) else None
        if stored is None:
            raise UnknownSessionError(
                f"there is no session {short_repr(session_id)}: the id is wrong, the session has expired, or its "
                "record is damaged (see GET /health)"
            )
        family = self._family_of(stored.record)
        env = await self._replay(family, stored.record, session_id)
        live = LiveSession(session_id, family, stored.record, stored.token, "", env, last_result(env))
        # The store gets the time of its next step at once: the last one may be almost as old as a session may get.
        live.touched = time.monotonic() - self._touch_every_s
        other = self.in_memory.get(session_id)
        if other is not None:
            return other  # loaded by another request meanwhile
        self._keep(live)
        return live

    async def _refresh(self, live: LiveSession) -> None:
        """Bring a live session up to date with its record; needs the session's lock."""
        # With the last action that both should have.
        known = min(1, len(live.actions))
        stored = await self.store.get(live.session_id, first=len(live.actions) - known)
        if stored is None:
            # Removed from the store (expired, made room, or the store was replaced) while it is in use here: keep it.
            token = await self.store.put(live.session_id, live.record, live.caller, replace=False)
            if not token:  # another process that has it in memory was first
                await self._adopt(live, await self.store.get(live.session_id))
                return
            live.token = token
            if live.env.done:
                await self._touch(live)
        elif stored.token != live.token or len(stored.record.actions) < known:
            await self._adopt(live, await self.store.get(live.session_id))
        elif missed := stored.record.actions[known:]:
            await self._catch_up(live, missed)

    async def _adopt(self, live: LiveSession, stored: StoredEpisode | None) -> None:
        if stored is None:
            raise StoreError("the session was being replaced; send the request again")
        count = len(stored.record.actions)
        if stored.record.reset_id == live.record.reset_id and stored.record.actions == live.actions[:count]:
            # The same episode, stored again by a process with at most as many steps, or a Redis replica that took over
            # lacks the last ones.
            live.token = stored.token
            for index in range(count, len(live.actions)):
                await self.store.append(live.session_id, live.token, index, live.actions[index])
            return
        family = self._family_of(stored.record)
        env = await self._replay(family, stored.record, live.session_id)
        live.token = stored.token
        self._replace(live, family, stored.record, env)
        live.last = last_result(env)

    async def _catch_up(self, live: LiveSession, missed: Sequence[Action]) -> None:
        def apply() -> None:
            for action in missed:
                live.family.play(live.env, action)
                live.actions.append(action)

        before, entries = len(live.actions), live.env.n_entries
        try:
            await self._off_loop(live.family, live.record, len(missed), apply)
        finally:
            self.counters.replayed_steps += len(live.actions) - before
            self._count_held(live, live.env.n_entries - entries)
            live.last = last_result(live.env)

    async def _replay(self, family: Family, record: EpisodeRecord, session_id: str) -> EpisodeEnv:
        self.counters.replays += 1
        self.counters.replayed_steps += len(record.actions)
        replay = partial(family.replay, record, session_id)
        return await self._off_loop(family, record, len(record.actions), replay)

    async def _off_loop(self, family: Family, record: EpisodeRecord, n_actions: int, play: Callable[[], T]) -> T:
        """Result of playing so many stored actions of an episode, on a thread unless they are few; charged if many.

        Raises StoreError for an action that cannot be read: the caller's own action is not at fault.
        """
        try:
            if _is_short(family, record, n_actions):
                return play()
            is_long = n_actions * family.hold(record.task_id, record.config) > LONG_S
            return await (on_thread(play) if is_long else asyncio.to_thread(play))
        except (InvalidActionError, DataFormatError) as error:
            raise StoreError(f"the session store holds a step that cannot be read: {error}") from error

    def _family_of(self, record: EpisodeRecord) -> Family:
        if record.version != RECORD_VERSION:
            raise OtherReleaseError(
                f"the session was stored in another form ({record.version}, this server's is {RECORD_VERSION}): "
                "reset it"
            )
        if record.release != __version__ or record.family not in self.families:
            raise OtherReleaseError(
                f"the session was started on release {record.release} and this server is {__version__}: "
                "its episode cannot continue unchanged"
            )
        return self.families[record.family]

    async def _may_restart(self, session_id: str, family: str, create: bool) -> bool:
        """Whether the session exists, to be restarted; raises if it does not and must not be created."""
        if not _SESSION_ID.match(session_id):
            raise InvalidRequestError("session_id", session_id, "1 to 128 letters, digits, dots, colons, - or _")
        live = self.in_memory.get(session_id)
        if live is not None:
            must_be(live.family.name, family, session_id)
            return True
        stored = await self.store.get(session_id, first=WITHOUT_ACTIONS)
        if stored is not None:
            must_be(stored.record.family, family, session_id)
        elif not create:
            raise UnknownSessionError(
                f"there is no session {session_id!r} to restart: leave session_id out to start a new one"
            )
        return stored is not None

    # ------------------------------------------------------------ environments in memory

    def _keep(self, live: LiveSession) -> None:
        earlier = self.in_memory.get(live.session_id)
        if earlier is not None:
            self._drop(earlier)
        self.in_memory[live.session_id] = live
        self.steps_held += live.env.n_entries
        while len(self.in_memory) > self._max_live or (
            self.steps_held > self._max_steps_held and len(self.in_memory) > 1
        ):
            victim = next((one for one in self.in_memory.values() if not one.in_use and one is not live), None)
            if victim is None:
                return
            self._drop(victim)
            self.counters.evictions += 1

    def _replace(self, live: LiveSession, family: Family, record: EpisodeRecord, env: EpisodeEnv) -> None:
        self._count_held(live, env.n_entries - live.env.n_entries)
        live.family, live.record, live.env, live.last = family, record, env, None

    def _count_held(self, live: LiveSession, steps: int) -> None:
        # A session dropped meanwhile no longer counts.
        if self.in_memory.get(live.session_id) is live:
            self.steps_held += steps

    def _drop(self, live: LiveSession) -> None:
        del self.in_memory[live.session_id]
        self.steps_held -= live.env.n_entries

    def _drop_idle(self) -> None:
        oldest = time.monotonic() - self._ttl_s - 2 * self._touch_every_s
        for live in [one for one in self.in_memory.values() if one.touched < oldest and not one.in_use]:
            self._drop(live)


def must_be(known: str, family: str, session_id: str) -> None:
    """Raise UnknownSessionError unless a session's family is this one: each environment knows its own sessions only."""
    if known != family:
        raise UnknownSessionError(f"session {session_id!r} is one of the {known} environment, not of the {family} one")


def _is_short(family: Family, record: EpisodeRecord, n_actions: int) -> bool:
    """Whether so many actions of an episode may be played again on the event loop."""
    seconds = n_actions * family.hold(record.task_id, record.config)
    return seconds <= SHORT_S and not _starts_long(record.config)


def _starts_long(config: Mapping[str, Any] | None) -> bool:
    """Whether an episode with these settings, which are not yet checked, may take milliseconds to start."""
    length = (config or {}).get("episode_length")
    return isinstance(length, int) and length > LONG_S
