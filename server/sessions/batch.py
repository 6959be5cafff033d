"""Batch sessions: N episodes of one task that step together, K steps per request.

They live in the memory of one process: recording an action as :mod:`server.sessions.manager` does would take longer
than playing it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from env.batch import ServingBatch
from env.serving.family import tables
from inferencegym.batch_format import BatchPlayed, BatchSteps
from inferencegym.errors import EpisodeDoneError, InvalidActionError, StepConflictError, UnknownSessionError, short_repr
from inferencegym.models import ACTION_FIELDS, REPLICAS
from inferencegym.seeds import episode_seeds
from inferencegym.spaces.actions import ACTION_SIZE, action_size
from inferencegym.spaces.observations import OBSERVATION_SIZE
from inferencegym.tasks import EpisodeConfig, TaskSpec
from server.net.cpu import Work
from server.net.errors import RateLimitedError
from server.sessions.session import Session, new_session_id
from server.settings import Settings
from simulator.hardware.tables import tables_of

T = TypeVar("T")

IDLE_S: Final = 600.0
"""Seconds without a step after which a session is closed when room is needed for a new one."""
CLIENT_SHARE: Final = 0.75
"""Share of the sessions, and of their row steps, that one client may have."""
INLINE_SECONDS: Final = 256
"""Requests that play fewer seconds than this (a fraction of a millisecond) are played on the event loop."""
ACTIONS: Final = (*ACTION_FIELDS, REPLICAS.name)
"""Numbers of an action by name; the last one only in autoscaling tasks."""


@dataclass(slots=True)
class BatchSession(Session):
    """N episodes that step together."""

    batch: ServingBatch
    client: str
    seeds: list[int] = field(default_factory=list)
    autoreset: bool = False
    fleet: bool = False
    """Whether observations hold the numbers of the fleets."""
    taken: int = 0
    episodes: int = 0
    last: tuple[BatchSteps, BatchPlayed] | None = None
    """The latest request that was played, and its answer."""

    @property
    def row_steps(self) -> int:
        """Episodes times their length, a measure of the session's memory."""
        return self.batch.n_rows * self.batch.config.episode_length

    @property
    def steps_left(self) -> int:
        """Steps until the running episodes end."""
        return int(self.batch.steps_left[0])

    def seconds(self, n_steps: int) -> int:
        """Most seconds, summed over episodes, that this number of steps plays: a measure of their cost."""
        return n_steps * self.batch.n_rows * self.batch.hold

    def plays(self, task: TaskSpec, config: EpisodeConfig, n_rows: int) -> bool:
        """Whether the session can be restarted with this task, configuration and number of episodes."""
        return self.batch.task is task and self.batch.config == config and self.batch.n_rows == n_rows

    @property
    def width(self) -> int:
        """Numbers of an observation."""
        return OBSERVATION_SIZE + self.batch.fleet_numbers.shape[1] * self.fleet

    def observation(self) -> NDArray[np.float64]:
        """The current observations (N, width)."""
        return self.batch.full_observation() if self.fleet else self.batch.observation

    def start(self, seeds: list[int], autoreset: bool, fleet: bool) -> None:
        """Start one episode per seed."""
        self.seeds, self.autoreset, self.fleet = seeds, autoreset, fleet
        self.taken = self.episodes = 0
        self.last = None
        self.batch.reset(seeds)

    def play(self, steps: BatchSteps) -> BatchPlayed:
        """Play the steps; if they repeat the latest request, return its answer again."""
        n_steps, most = steps.n_steps if len(steps.actions) != 1 else 1, action_size(self.batch.task.fleet)
        shape = (n_steps, self.batch.n_rows, most)
        if steps.actions.shape not in (shape, (*shape[:2], ACTION_SIZE)):
            raise InvalidActionError("actions", steps.actions.shape, f"an array of shape {shape} or {(1, *shape[1:])}")
        if steps.number is not None and steps.number != self.taken + 1:
            return self._again(steps)
        if not np.isfinite(steps.actions).all():
            step, row, knob = np.argwhere(~np.isfinite(steps.actions))[0].tolist()
            raise InvalidActionError(f"actions[{step}][{row}].{ACTIONS[knob]}", "NaN or infinity", "a number")
        seeds = self.seeds if self.autoreset else None
        if seeds is None and steps.n_steps > self.steps_left:
            raise EpisodeDoneError(
                f"{steps.n_steps} steps are more than the {self.steps_left} remaining ones; nothing was played"
            )
        played = self._played(steps, seeds)
        self.last = (steps, played)
        return played

    def _played(self, steps: BatchSteps, seeds: list[int] | None) -> BatchPlayed:
        """Play the steps; when the episodes end, start those of ``seeds``, unless it is None."""
        n, kind = steps.n_steps, steps.actions.dtype
        observations = np.empty((1 if steps.last else n, self.batch.n_rows, self.width), dtype=kind)
        rewards = np.empty((n, self.batch.n_rows), dtype=kind)
        done = np.zeros(n, dtype=np.bool_)
        at = 0
        while at < n:
            upto = min(n, at + self.steps_left)
            actions = np.asarray(steps.actions[at:upto] if len(steps.actions) == n else steps.actions, dtype=np.float64)
            if len(actions) != upto - at:
                actions = np.broadcast_to(actions, (upto - at, *actions.shape[1:]))
            seen = observations if steps.last else observations[at:upto]
            self.batch.step_many(actions, seen, rewards[at:upto])
            at = upto
            if self.steps_left == 0:
                done[at - 1] = True
                self.episodes += 1
                if seeds is not None:
                    self.batch.reset(episode_seeds(seeds, self.episodes))
                    seen[-1] = self.observation()
        number, self.taken = self.taken + 1, self.taken + n
        return BatchPlayed(number, observations, rewards, done, self.episodes, self.steps_left)

    def _again(self, steps: BatchSteps) -> BatchPlayed:
        if self.last is not None and self.last[1].number == steps.number:
            last = self.last[0]
            alike = (last.n_steps, last.last, last.actions.dtype) == (steps.n_steps, steps.last, steps.actions.dtype)
            # Bit for bit, so that the second request is a repetition of the first.
            if alike and last.actions.tobytes() == steps.actions.tobytes():
                return self.last[1]
            raise StepConflictError(f"step {steps.number} and those after it were taken with other actions")
        raise StepConflictError(
            f"step {steps.number} cannot be taken: {self.taken} steps were taken, so the next is {self.taken + 1}, "
            "and only the latest request is answered again"
        )


class BatchSessions:
    """The batch sessions of this process, within its limits."""

    def __init__(self, settings: Settings) -> None:
        self._most = settings.batch_sessions
        self._most_row_steps = settings.batch_row_steps
        self.row_steps_per_client = int(CLIENT_SHARE * settings.batch_row_steps)
        self._sessions: dict[str, BatchSession] = {}
        # The kernels of one batch already use all cores; more than two threads would only wait for each other.
        self._opening = asyncio.Lock()
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="batch-session")

    def get(self, session_id: str) -> BatchSession:
        """Raises UnknownSessionError."""
        session = self._sessions.get(session_id)
        if session is None:
            raise UnknownSessionError(
                f"there is no batch session {short_repr(session_id)}: it never existed, was closed, was removed after "
                f"{IDLE_S:g} s without a step, or ended with the server's process"
            )
        return session

    async def open(self, client: str, task: TaskSpec, config: EpisodeConfig, n_rows: int, work: Work) -> BatchSession:
        """A new session, not yet started, made as a part of ``work``. Raises RateLimitedError when there is no room."""
        # One after the other, so that each finds room for all sessions before it.
        async with self._opening:
            self._make_room(client, n_rows * config.episode_length)
            make = partial(ServingBatch, task, n_rows, config, tables_of(task.hardware, tables()))
            batch: ServingBatch = await self._on_thread(partial(work.timed, make))
            session = BatchSession(new_session_id(), batch, client)
            self._sessions[session.session_id] = session
            return session

    def close(self, session_id: str) -> None:
        """Forget a session. Raises UnknownSessionError."""
        del self._sessions[self.get(session_id).session_id]

    async def run(self, session: BatchSession, n_seconds: int, work: Callable[[], T]) -> T:
        """Run ``work()`` with exclusive access to the session, on a thread if it takes long."""
        async with session.turn():
            session.touched = time.monotonic()
            if n_seconds <= INLINE_SECONDS:
                return work()
            return await self._on_thread(work)

    async def _on_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _make_room(self, client: str, wanted: int) -> None:
        """Drop idle sessions until the client, and the server, have room for so many row steps."""
        most = ceil(CLIENT_SHARE * self._most)
        own = (
            f"one client may have {most} batch sessions and {self.row_steps_per_client:,} row steps, and all are in use"
        )
        self._drop_idle(lambda session: session.client == client, most, self.row_steps_per_client - wanted, own)
        whole = "all batch sessions of this server are in use"
        self._drop_idle(lambda _: True, self._most, self._most_row_steps - wanted, whole)

    def _drop_idle(self, counts: Callable[[BatchSession], bool], most: int, most_row_steps: int, said: str) -> None:
        """Drop idle sessions that count until fewer than ``most`` are left, with at most so many row steps."""
        while True:
            found = [session for session in self._sessions.values() if counts(session)]
            if len(found) < most and sum(session.row_steps for session in found) <= most_row_steps:
                return
            idle = min((s for s in found if not s.in_use), key=lambda s: s.touched, default=None)
            left_s = IDLE_S if idle is None else idle.touched + IDLE_S - time.monotonic()
            if idle is None or left_s > 0:
                raise RateLimitedError(said, retry_after_s=left_s)
            del self._sessions[idle.session_id]
