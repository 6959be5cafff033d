"""Batch endpoints for remote learners: /reset/batch, /step/batch and /close/batch play many episodes per request.

A batch session has N episodes of one task that step together, K steps per request. Unlike single sessions it is kept in
the memory of the process that started it and is not recorded step by step: recording an action would take longer than
playing it. After a restart of the server its steps are answered with 404; the same seeds and actions give the same
episodes again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from typing import Annotated, Any, Final

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from env.batch import ServingBatch
from env.family import Family
from env.serving.family import tables
from inferencegym.batch_format import (
    ANSWER,
    HOLD,
    LAST,
    MEDIA_TYPE,
    BatchPlayed,
    BatchSteps,
    decode_request,
    encode_answer,
    flags_of,
)
from inferencegym.errors import (
    EpisodeDoneError,
    InferenceGymError,
    InvalidActionError,
    StepConflictError,
    UnknownSessionError,
    short_repr,
)
from inferencegym.messages import WHOLE, Allowed, Message, plain_schema
from inferencegym.models import ACTION_FIELDS, FLEET_FIELDS, REPLICAS
from inferencegym.seeds import episode_seeds
from inferencegym.spaces.actions import ACTION_SIZE, action_size
from inferencegym.spaces.observations import FLEET_SIZE, OBSERVATION_SIZE
from inferencegym.tasks import EpisodeConfig, TaskSpec, get_task
from server.context import Context, Mount
from server.net.buffers import reserve_answer
from server.net.errors import InvalidRequestError, RateLimitedError, SessionConflictError
from server.net.json_io import (
    LARGE_JSON_BYTES,
    MAX_VALUES,
    SESSION_KEY,
    JsonBounds,
    JsonRoute,
    on_json_thread,
    parse_object,
    read_body,
    read_object,
    reply,
)
from server.net.problems import documented
from server.schemas import (
    DEFAULT_SEED,
    Schema,
    Seed,
    SessionId,
    StepNumber,
    TaskName,
    closed,
    nullable,
    present,
    read_request,
    task_id_schema,
)
from server.sessions.manager import new_session_id
from server.settings import Settings

MAX_ROWS: Final = 4_096
"""Episodes of one session."""
MAX_FIRST_SEED: Final = 2**62 - 1
"""Largest ``seed``, which leaves room for ``seed + 1``, ... of all rows; 2^62 itself is the same as a double."""
MAX_STEPS: Final = 262_144
"""Seconds of one request, all episodes together; the answer has 61 bytes for each with 4-byte numbers, or 89."""
MAX_JSON_STEPS: Final = 16_384
"""The same as JSON, whose answer has up to :data:`MAX_JSON_STEP_BYTES` for each."""
MAX_JSON_STEP_BYTES: Final = {OBSERVATION_SIZE: 400, OBSERVATION_SIZE + FLEET_SIZE: 600}
"""By the numbers of an observation."""
IDLE_S: Final = 600.0
"""Seconds without a step after which a session is closed when room is needed for a new one."""
MAX_WAITING: Final = 4
"""Requests that may wait for one session at once."""
INLINE_SECONDS: Final = 256
"""Requests that play fewer seconds than this (a fraction of a millisecond) are played on the event loop."""
ACTIONS: Final = (*ACTION_FIELDS, REPLICAS.name)
"""Numbers of an action by name; the last one only of tasks that scale."""
RESET_BOUNDS: Final = JsonBounds(values=MAX_ROWS + MAX_VALUES)
STEP_BOUNDS: Final = JsonBounds(
    values=MAX_JSON_STEPS * (len(ACTIONS) + 2) + MAX_VALUES, arrays=MAX_JSON_STEPS * 2 + MAX_VALUES
)
"""Bounds of a JSON body: the numbers of an action, its own array and, with one episode, that of the step."""
MAX_JSON_BODY_BYTES: Final = 2**22
"""Longest JSON body: 256 bytes for each step, and all digits of its five numbers take half of that."""


class InvalidBatchError(InferenceGymError, ValueError):
    """Bytes or arrays of /step/batch do not have the documented layout. (HTTP 422)"""

    code = "invalid_batch"
    http_status = 422

    def __init__(self, message: str, field: str | None = None) -> None:
        self.field = field
        super().__init__(message)


@dataclass(slots=True)
class BatchSession:
    """Batch session: N episodes that step together."""

    session_id: str
    batch: ServingBatch
    seeds: list[int] = field(default_factory=list)
    autoreset: bool = False
    fleet: bool = False
    """Whether observations hold the numbers of the fleets."""
    taken: int = 0
    episodes: int = 0
    waiting: int = 0
    touched: float = 0.0
    last: tuple[BatchSteps, BatchPlayed] | None = None
    """The latest request that was played, and its answer."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def row_steps(self) -> int:
        """Episodes times their length, a measure of the session's memory."""
        return self.batch.n_rows * self.batch.config.episode_length

    @property
    def steps_left(self) -> int:
        """Steps until the running episodes end."""
        return int(self.batch.steps_left[0])

    def seconds(self, n_steps: int) -> int:
        """Most seconds that so many steps of all episodes play, which is what they cost."""
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
        """Play the steps; if they are the latest ones sent again, return their answer once more."""
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
                f"{steps.n_steps} steps are more than the {self.steps_left} that are left; nothing was played"
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
            if _same_steps(self.last[0], steps):
                return self.last[1]
            raise StepConflictError(f"step {steps.number} and those after it were taken with other actions")
        raise StepConflictError(
            f"step {steps.number} cannot be taken: {self.taken} steps were taken, so the next is {self.taken + 1}, "
            "and only the latest request is answered again"
        )


def _same_steps(one: BatchSteps, other: BatchSteps) -> bool:
    """Whether two requests are equal bit for bit, so that the second is a repetition of the first."""
    alike = (one.n_steps, one.last, one.actions.dtype) == (other.n_steps, other.last, other.actions.dtype)
    return alike and one.actions.tobytes() == other.actions.tobytes()


class BatchSessions:
    """The batch sessions of this process, within its limits."""

    def __init__(self, settings: Settings) -> None:
        self._most = settings.batch_sessions
        self._most_row_steps = settings.batch_row_steps
        self._sessions: dict[str, BatchSession] = {}
        # The kernels of one batch use all cores already; more than two threads would only wait for each other.
        self._threads: ThreadPoolExecutor | None = None

    def get(self, session_id: str) -> BatchSession:
        """Raises UnknownSessionError."""
        session = self._sessions.get(session_id)
        if session is None:
            raise UnknownSessionError(
                f"there is no batch session {short_repr(session_id)}: it never was, was closed, made room after "
                f"{IDLE_S:g} s without a step, or ended with the server's process"
            )
        return session

    def open(self, task: TaskSpec, config: EpisodeConfig, n_rows: int) -> BatchSession:
        """A new session, not yet started. Raises RateLimitedError when there is no room."""
        self._make_room(n_rows * config.episode_length)
        batch = ServingBatch(task, n_rows, config, tables())
        session = BatchSession(new_session_id(), batch, touched=time.monotonic())
        self._sessions[session.session_id] = session
        return session

    def close(self, session_id: str) -> None:
        """Forget a session. Raises UnknownSessionError."""
        del self._sessions[self.get(session_id).session_id]

    async def run(self, session: BatchSession, n_seconds: int, work: Any) -> Any:
        """Run ``work()`` with exclusive access to the session, on a thread if it takes long."""
        if session.waiting >= MAX_WAITING:
            raise RateLimitedError(f"{session.waiting} requests already wait for this session", retry_after_s=1)
        session.waiting += 1
        try:
            async with session.lock:
                session.touched = time.monotonic()
                if n_seconds <= INLINE_SECONDS:
                    return work()
                if self._threads is None:
                    self._threads = ThreadPoolExecutor(2, thread_name_prefix="batch-session")
                return await asyncio.wrap_future(self._threads.submit(work))
        finally:
            session.waiting -= 1

    def _make_room(self, wanted: int) -> None:
        idle = sorted((s for s in self._sessions.values() if not s.waiting), key=lambda s: s.touched)
        for session in idle:
            if self._fits(wanted):
                return
            left = session.touched + IDLE_S - time.monotonic()
            if left > 0:
                raise RateLimitedError("all batch sessions of this server are in use", retry_after_s=left)
            del self._sessions[session.session_id]
        if not self._fits(wanted):
            raise RateLimitedError("all batch sessions of this server are in use", retry_after_s=IDLE_S)

    def _fits(self, wanted: int) -> bool:
        held = sum(session.row_steps for session in self._sessions.values())
        return len(self._sessions) < self._most and held + wanted <= self._most_row_steps


_SEEDS: Final = Allowed(f"an array of 1 to {MAX_ROWS} seeds")


class BatchResetRequest(Message):
    """Body of POST /reset/batch."""

    task_id: TaskName | None = None
    n: Annotated[Annotated[int, Field(ge=1, le=MAX_ROWS), WHOLE] | None, Field(description="episodes")] = None
    seed: Annotated[
        Annotated[int, Field(ge=0, lt=MAX_FIRST_SEED + 1), WHOLE] | None,
        Field(description="rows play seed, seed + 1, ..."),
    ] = None
    seeds: Annotated[list[Seed], Field(min_length=1, max_length=MAX_ROWS, fail_fast=True), _SEEDS] | None = None
    config: dict[str, Any] | None = None
    autoreset: Annotated[
        bool,
        Field(
            description="when the episodes end, start the next ones; the last step then shows their first "
            "observations. The k-th restart of a row plays a seed derived from its first seed and k"
        ),
    ] = False
    fleet: Annotated[
        bool, Field(description=f"add the fleet's numbers to every observation: {', '.join(FLEET_FIELDS)}")
    ] = False
    session_id: Annotated[
        SessionId | None, Field(description="restart this session; task, config and n must be its own")
    ] = None

    def all_seeds(self) -> list[int]:
        """One seed per episode: those of ``seeds``, or ``seed``, ``seed + 1``, ... for ``n`` episodes."""
        if self.seeds is None:
            first = DEFAULT_SEED if self.seed is None else self.seed
            return list(range(first, first + (self.n or 1)))
        for name, other in (("n", self.n), ("seed", self.seed)):
            if other is not None:
                raise InvalidRequestError(name, other, "left out when seeds is given")
        return self.seeds


class BatchStepRequest(Message):
    """Body of POST /step/batch as JSON."""

    session_id: Annotated[SessionId, Allowed("the session_id that POST /reset/batch returned")]
    actions: Annotated[
        # Read as arrays below: a model of every number would take longer than playing them.
        list[Any], Field(min_length=1), Allowed(f"an array [step][episode][{len(ACTION_FIELDS)} numbers]")
    ]
    repeat: Annotated[
        Annotated[int, Field(ge=1, le=MAX_STEPS), WHOLE] | None,
        Field(description="hold actions of one step for so many steps"),
    ] = None
    last: Annotated[bool, Field(description="only the last observations")] = False
    step: Annotated[
        StepNumber | None,
        Field(description="number of the first of these steps, from 1: makes sending them again safe"),
    ] = None


class BatchCloseRequest(Message):
    """Body of POST /close/batch."""

    session_id: Annotated[SessionId, Allowed("the session_id that POST /reset/batch returned")]


class BatchRoutes:
    """/reset/batch, /step/batch and /close/batch of the serving fleet at one prefix."""

    def __init__(self, context: Context, mount: Mount) -> None:
        self._settings = context.settings
        self._family = mount.family
        self._prefix = mount.prefix
        self._sessions = BatchSessions(context.settings)

    def routes(self) -> list[JsonRoute]:
        binary = {MEDIA_TYPE: {"schema": {"type": "string", "format": "binary", "description": LAYOUT}}}
        answer = documented(plain_schema(BatchStepAnswer), 400, 404, 409, 429)
        answer[200]["content"] |= binary
        step = JsonRoute(
            self._prefix + "/step/batch",
            self.step,
            method="POST",
            summary="Play many seconds of many episodes",
            description=LAYOUT,
            tags=[self._family.name],
            request_schema=_step_schema(),
            responses=answer,
        )
        assert step.openapi_extra is not None
        step.openapi_extra["requestBody"]["content"] |= binary
        return [
            step,
            JsonRoute(
                self._prefix + "/reset/batch",
                self.reset,
                method="POST",
                summary="Start many episodes at once",
                tags=[self._family.name],
                request_schema=_reset_schema(self._family),
                body_required=False,
                responses=documented(plain_schema(BatchResetAnswer), 404, 409, 429, 503),
            ),
            JsonRoute(
                self._prefix + "/close/batch",
                self.close,
                method="POST",
                summary="Close a batch session",
                tags=[self._family.name],
                request_schema=plain_schema(BatchCloseRequest),
                responses=documented(plain_schema(BatchCloseAnswer), 404),
            ),
        ]

    async def reset(self, request: Request) -> Response:
        most_bytes, timeout_s = self._settings.max_body_bytes, self._settings.body_timeout_s
        wanted = read_request(BatchResetRequest, await read_object(request, most_bytes, timeout_s, RESET_BOUNDS))
        seeds = wanted.all_seeds()
        task = get_task(self._family.default_task if wanted.task_id is None else wanted.task_id)
        config = task.config(wanted.config)
        most = self._settings.batch_row_steps // config.episode_length
        if len(seeds) > most:
            raise InvalidRequestError("n", len(seeds), f"at most {most} with episodes of this length")
        session = None if wanted.session_id is None else self._sessions.get(wanted.session_id)
        if session is None:
            session = self._sessions.open(task, config, len(seeds))
        elif not session.plays(task, config, len(seeds)):
            raise SessionConflictError("a session is restarted with its own task, config and n")
        request.scope[SESSION_KEY] = session.session_id
        # A refused restart changes nothing; an accepted one waits for the steps that are being played.
        await self._sessions.run(session, MAX_STEPS, lambda: session.start(seeds, wanted.autoreset, wanted.fleet))
        return reply(
            {
                "session_id": session.session_id,
                "task_id": task.task_id,
                "n": len(seeds),
                "episode_length": config.episode_length,
                "config": config.to_dict(),
                "autoreset": wanted.autoreset,
                "observations": session.observation(),
            }
        )

    async def step(self, request: Request) -> Response:
        media_type = MEDIA_TYPE.encode()
        binary = (b"content-type", media_type) in request.scope["headers"]
        most_bytes, bounds = self._settings.max_batch_bytes, None
        if not binary:
            most_bytes, bounds = min(most_bytes, MAX_JSON_BODY_BYTES), STEP_BOUNDS
        body = await read_body(request, most_bytes, self._settings.body_timeout_s, bounds, also=media_type)

        def find(session_id: str) -> BatchSession:
            request.scope[SESSION_KEY] = session_id
            return self._sessions.get(session_id)

        if binary:
            session, steps = _binary_steps(body, find)
        elif len(body) > LARGE_JSON_BYTES:
            session, steps = await on_json_thread(_json_steps, body, find)
        else:
            session, steps = _json_steps(body, find)

        n_rows = session.batch.n_rows
        reserve_answer(request.scope, _answer_bytes(steps, n_rows, session.width, binary))

        def answer() -> Response:
            played = session.play(steps)
            if binary:
                return Response(encode_answer(played, flags_of(steps)), media_type=MEDIA_TYPE)
            return reply(_as_json(played))

        answered: Response = await self._sessions.run(session, session.seconds(steps.n_steps), answer)
        return answered

    async def close(self, request: Request) -> Response:
        body = await read_object(request, self._settings.max_body_bytes, self._settings.body_timeout_s)
        self._sessions.close(read_request(BatchCloseRequest, body).session_id)
        return reply({"closed": True})


Find = Callable[[str], BatchSession]


def _binary_steps(body: bytes, find: Find) -> tuple[BatchSession, BatchSteps]:
    try:
        steps = decode_request(body)
    except ValueError as error:
        raise InvalidBatchError(str(error)) from error
    if not 1 <= steps.n_steps <= MAX_STEPS:
        raise InvalidBatchError(f"{steps.n_steps} steps: it must be 1 to {MAX_STEPS:,}")
    session = find(steps.session_id)
    _check_size(session.seconds(steps.n_steps), MAX_STEPS)
    return session, steps


def _json_steps(text: bytes, find: Find) -> tuple[BatchSession, BatchSteps]:
    wanted = read_request(BatchStepRequest, parse_object(text) if text else {})
    if (wanted.repeat or 1) > 1 and len(wanted.actions) != 1:
        raise InvalidRequestError("repeat", wanted.repeat, "left out when actions holds more than one step")
    session = find(wanted.session_id)
    n_steps, n_rows = max(wanted.repeat or 1, len(wanted.actions)), session.batch.n_rows
    _check_size(n_steps * n_rows, MAX_JSON_STEPS)
    _check_size(session.seconds(n_steps), MAX_STEPS)
    actions = _array(wanted.actions, n_rows)
    return session, BatchSteps(wanted.session_id, actions, n_steps, wanted.step, wanted.last)


def _answer_bytes(steps: BatchSteps, n_rows: int, width: int, binary: bool) -> int:
    """Upper bound of the answer's size in bytes."""
    row_steps = steps.n_steps * n_rows
    if not binary:
        return row_steps * MAX_JSON_STEP_BYTES[width]
    shown = n_rows if steps.last else row_steps
    return (shown * width + row_steps) * steps.actions.dtype.itemsize + steps.n_steps + ANSWER.size


def _check_size(row_steps: int, most: int) -> None:
    if row_steps > most:
        raise InvalidRequestError("actions", f"{row_steps:,} seconds", f"at most {most:,} of all episodes together")


def _array(steps: list[Any], n_rows: int) -> NDArray[np.float64]:
    """``actions`` as an array (K, N, 5 or 6). Raises InvalidBatchError or InvalidRequestError naming the first."""
    rows = _joined(steps, n_rows, "one action per episode", _place)
    # Tasks that scale have a sixth number; all rows have as many as the first.
    names = ACTIONS if isinstance(rows[0], list) and len(rows[0]) == len(ACTIONS) else ACTIONS[:ACTION_SIZE]
    numbers = _joined(rows, len(names), ", ".join(names), lambda row: _place(*divmod(row, n_rows)))
    # NumPy would read true, null and many texts as numbers, and makes all texts of an array as long as the longest.
    if not {*map(type, numbers)} <= {int, float}:
        at = next(i for i, number in enumerate(numbers) if type(number) not in (int, float))
        row, knob = divmod(at, len(names))
        raise InvalidRequestError(f"{_place(*divmod(row, n_rows))}.{ACTIONS[knob]}", numbers[at], "a number")
    return np.array(numbers, dtype=np.float64).reshape(len(steps), n_rows, len(names))


def _joined(arrays: list[Any], size: int, meaning: str, place: Callable[[int], str]) -> list[Any]:
    """Concatenate the arrays. Raises InvalidBatchError naming the first that is not an array of this size."""
    if {*map(type, arrays)} != {list} or {*map(len, arrays)} != {size}:
        at, wrong = next((i, one) for i, one in enumerate(arrays) if type(one) is not list or len(one) != size)
        found = f"an array of {len(wrong)}" if isinstance(wrong, list) else "no array"
        raise InvalidBatchError(f"{place(at)} is {found}: it must be an array of {size} ({meaning})", place(at))
    return [*chain.from_iterable(arrays)]


def _place(*at: int) -> str:
    return "actions" + "".join(f"[{index}]" for index in at)


def _as_json(played: BatchPlayed) -> dict[str, Any]:
    return {
        "step": played.number,
        "observations": np.ascontiguousarray(played.observations),
        "rewards": np.ascontiguousarray(played.rewards),
        "done": played.done,
        "episodes": played.episodes,
        "steps_left": played.steps_left,
    }


# ---------------------------------------------------------------- schemas

LAYOUT: Final = f"""N episodes of a session from `/reset/batch` play K steps in one request.

As JSON: `actions[k][n]` are five numbers ({", ".join(ACTION_FIELDS)}; `replicas` as a sixth where
the task scales); `observations[k][n]` are 14 numbers in the order of
GET /info (21 where the reset asked for the fleet's), `rewards[k][n]`, `done[k]`. Numbers out of range are clamped and
snapped to the nearest allowed value; NaN is refused. The same with `Content-Type: {MEDIA_TYPE}`, everything
little-endian without padding:

request: `IGB1`, uint16 bytes per number (4 or 8), uint16 flags ({HOLD}: one action per episode held for all K steps,
{LAST}: only the last observations), uint32 K, uint32 N, uint64 number of the first step from 1 (0: the next), 16 bytes
session id; then actions (K or 1, N, 5).

answer: `IGB1`, uint16 bytes per number, uint16 flags, uint32 K, uint32 N, uint64 first step, uint32 observations per
episode, uint32 W = 14 or 21, uint32 episodes finished, uint32 steps left; then observations (K or 1, N, W), rewards
(K, N), and a byte per step, 1 where it ended the episodes.

A request with the number of its first step may be sent again: the latest one is answered again and played once.
Limits: N {MAX_ROWS:,}; N x K {MAX_STEPS:,} in binary and {MAX_JSON_STEPS:,} as JSON; body, sessions and their length by
INFERENCEGYM_MAX_BATCH_BYTES, _BATCH_SESSIONS and _BATCH_ROW_STEPS. Errors are JSON."""


def _reset_schema(family: Family) -> Schema:
    schema = plain_schema(BatchResetRequest)
    common: Schema = schema["properties"]
    common["task_id"] = {**nullable(task_id_schema(family)), "default": family.default_task}
    common["config"] = nullable(plain_schema(family.config_model))
    absent: Schema = {"type": "null"}
    seeds = present(common["seeds"])
    numbered, listed = {**common, "seeds": absent}, {**common, "seeds": seeds, "n": absent, "seed": absent}
    return {"type": "object", "oneOf": [closed((), numbered), closed(("seeds",), listed)]}


def _step_schema() -> Schema:
    schema = plain_schema(BatchStepRequest)
    five = {"type": "array", "items": {"type": "number"}, "minItems": ACTION_SIZE, "maxItems": len(ACTIONS)}
    rows = {"type": "array", "items": five, "minItems": 1, "maxItems": MAX_ROWS}
    actions = {"type": "array", "items": rows, "minItems": 1, "description": "[step][episode][knob]"}
    schema["properties"]["actions"] = actions
    return schema


class BatchStepAnswer(Message):
    """Answer of POST /step/batch as JSON."""

    step: int
    observations: list[list[list[float]]]
    rewards: list[list[float]]
    done: list[bool]
    episodes: int
    steps_left: int


class BatchResetAnswer(Message):
    """Answer of POST /reset/batch."""

    session_id: str
    task_id: int | str
    n: int
    episode_length: int
    config: dict[str, Any]
    autoreset: bool
    observations: list[list[float]]


class BatchCloseAnswer(Message):
    """Answer of POST /close/batch."""

    closed: bool
