"""Endpoints of batch sessions (:mod:`server.sessions.batch`), which play many episodes per request."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Final

import numpy as np
import orjson
from numpy.typing import NDArray
from pydantic import ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from inferencegym import batch_format
from inferencegym.batch_format import (
    ANSWER,
    MEDIA_TYPE,
    BatchPlayed,
    BatchSteps,
    decode_request,
    encode_answer,
    flags_of,
)
from inferencegym.errors import InferenceGymError
from inferencegym.messages import WHOLE, Allowed, Message
from inferencegym.models import ACTION_FIELDS, FLEET_FIELDS
from inferencegym.spaces.actions import ACTION_SIZE
from inferencegym.spaces.observations import FLEET_SIZE, OBSERVATION_SIZE
from inferencegym.tasks import get_task, task_of
from server.api.route import Route, Routes
from server.context import Context, Mount
from server.net.buffers import reserve_answer
from server.net.cpu import charged
from server.net.errors import InvalidRequestError, SessionConflictError
from server.net.json_io import (
    LARGE_JSON_BYTES,
    MAX_BODY_BYTES,
    MAX_VALUES,
    SESSION_KEY,
    JsonBounds,
    JsonReply,
    on_json_thread,
    parse_object,
    read_body,
    reply,
    to_json,
)
from server.net.limits import sender_of
from server.schemas import (
    DEFAULT_SEED,
    Schema,
    Seed,
    SessionId,
    StepNumber,
    TaskName,
    closed,
    family_model,
    present,
    read_request,
)
from server.sessions.batch import ACTIONS, BatchSessions

MAX_ROWS: Final = 4_096
"""Episodes of one session."""
MAX_FIRST_SEED: Final = 2**62 - 1
"""Largest ``seed``, which leaves room for ``seed + 1``, ... of all rows; 2^62 itself is the same as a double."""
MAX_STEPS: Final = 262_144
"""Most seconds of one request, summed over episodes; the answer has 61 bytes for each with 4-byte numbers, or 89."""
MAX_JSON_STEPS: Final = 4_096
"""The same limit for JSON, whose answer has up to :data:`MAX_JSON_STEP_BYTES` for each."""
MAX_JSON_STEP_BYTES: Final = {OBSERVATION_SIZE: 400, OBSERVATION_SIZE + FLEET_SIZE: 600}
"""Bytes of one step in a JSON answer, by the length of an observation."""
BLOCK_NUMBERS: Final = 8_192
"""Numbers that are written as JSON at once, in a fifth of a millisecond."""
RESET_BOUNDS: Final = JsonBounds(values=MAX_ROWS + MAX_VALUES)
STEP_BOUNDS: Final = JsonBounds(
    values=MAX_JSON_STEPS * (len(ACTIONS) + 2) + MAX_VALUES, parts=MAX_JSON_STEPS * 2 + MAX_VALUES
)
"""Bounds of a JSON body: the numbers of an action, its own array and, with one episode, that of the step."""
MAX_BATCH_BYTES: Final = 2**24
"""Longest binary body: 64 bytes for each step, and its six numbers take 48."""


class InvalidBatchError(InferenceGymError, ValueError):
    """Bytes or arrays of /step/batch do not have the documented layout. (HTTP 422)"""

    code = "invalid_batch"
    http_status = 422

    def __init__(self, message: str, field: str | None = None) -> None:
        self.field = field
        super().__init__(message)


_SEEDS: Final = Allowed(f"an array of 1 to {MAX_ROWS} seeds")


def _numbered_or_listed(schema: Schema) -> None:
    """Schema of a :class:`BatchResetRequest`: ``n`` and ``seed``, or ``seeds``."""
    fields = schema["properties"]
    absent: Schema = {"type": "null"}
    listed = {**fields, "seeds": present(fields["seeds"]), "n": absent, "seed": absent}
    schema.clear()
    schema.update(type="object", oneOf=[closed([], {**fields, "seeds": absent}), closed(["seeds"], listed)])


class BatchResetRequest(Message):
    """Body of POST /reset/batch."""

    model_config = ConfigDict(json_schema_extra=_numbered_or_listed)

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


_Knobs = Annotated[list[float], Field(min_length=ACTION_SIZE, max_length=len(ACTIONS), fail_fast=True)]
_Rows = Annotated[list[_Knobs], Field(min_length=1, max_length=MAX_ROWS, fail_fast=True)]


class BatchStepRequest(Message):
    """Body of POST /step/batch as JSON."""

    session_id: Annotated[SessionId, Allowed("the session_id that POST /reset/batch returned")]
    actions: Annotated[list[_Rows], Field(min_length=1, fail_fast=True, description="[step][episode][knob]")]
    repeat: Annotated[
        Annotated[int, Field(ge=1, le=MAX_STEPS), WHOLE] | None,
        Field(description="repeat the actions of a single step for this many steps"),
    ] = None
    last: Annotated[bool, Field(description="only the last observations")] = False
    step: Annotated[
        StepNumber | None,
        Field(description="number of the first of these steps, from 1: makes sending them again safe"),
    ] = None


class BatchCloseRequest(Message):
    """Body of POST /close/batch."""

    session_id: Annotated[SessionId, Allowed("the session_id that POST /reset/batch returned")]


class BatchRoutes(Routes):
    """/reset/batch, /step/batch and /close/batch of the serving fleet at one prefix."""

    def __init__(self, context: Context, mount: Mount) -> None:
        super().__init__(context, mount)
        self._sessions = BatchSessions(context.settings)

    def routes(self) -> list[Route]:
        binary = {MEDIA_TYPE: {"schema": {"type": "string", "format": "binary", "description": LAYOUT}}}
        begun = (family_model(self._family, BatchResetRequest, self._family.default_task), None)
        return [
            self._step(
                "/step/batch",
                self.step,
                "Play many seconds of many episodes",
                description=LAYOUT,
                types={"body": BatchStepRequest},
                response_model=BatchStepAnswer,
                responses={200: {"content": binary}},
                openapi_extra={"requestBody": {"content": binary}},
                statuses=(400, 404, 409),
            ),
            self._post(
                "/reset/batch",
                self.reset,
                "Start many episodes at once",
                bounds=RESET_BOUNDS,
                types={"body": begun},
                response_model=BatchResetAnswer,
                statuses=(404, 409),
            ),
            self._post("/close/batch", self.close, "Close a batch session", statuses=(404,)),
        ]

    async def reset(self, request: Request, body: BatchResetRequest) -> Response:
        seeds = body.all_seeds()
        task = get_task(self._family.default_task if body.task_id is None else body.task_id)
        task = task_of(task, body.config)
        config = task.config(body.config)
        most = self._sessions.row_steps_per_client // config.episode_length
        if len(seeds) > most:
            raise InvalidRequestError("n", len(seeds), f"at most {most} with episodes of this length")
        session = None if body.session_id is None else self._sessions.get(body.session_id)
        if session is not None and not session.plays(task, config, len(seeds)):
            raise SessionConflictError("a session is restarted with its own task, config and n")
        client = sender_of(request.scope)
        async with charged() as work:
            if session is None:
                session = await self._sessions.open(client, task, config, len(seeds), work)
            request.scope[SESSION_KEY] = session.session_id
            # A refused restart changes nothing; an accepted one waits for running steps.
            start = partial(session.start, seeds, body.autoreset, body.fleet)
            await self._sessions.run(session, MAX_STEPS, partial(work.timed, start))
        return reply(
            {
                "session_id": session.session_id,
                "task_id": task.task_id,
                "n": len(seeds),
                "episode_length": config.episode_length,
                "config": config.to_dict(),
                "autoreset": body.autoreset,
                "observations": session.observation(),
            }
        )

    async def step(self, request: Request) -> Response:
        binary = (b"content-type", MEDIA_TYPE.encode()) in request.scope["headers"]
        most_bytes = MAX_BATCH_BYTES if binary else MAX_BODY_BYTES
        body = await read_body(request, most_bytes)
        if binary:
            steps = _binary_steps(body)
        elif len(body) > LARGE_JSON_BYTES:
            steps = await on_json_thread(_json_steps, body)
        else:
            steps = _json_steps(body)
        request.scope[SESSION_KEY] = steps.session_id
        session = self._sessions.get(steps.session_id)
        n_rows, n_seconds = session.batch.n_rows, session.seconds(steps.n_steps)
        if not binary:
            _check_size(steps.n_steps * n_rows, MAX_JSON_STEPS)
        _check_size(n_seconds, MAX_STEPS)
        reserve_answer(request.scope, _answer_bytes(steps, n_rows, session.width, binary))

        def answer() -> Response:
            played = session.play(steps)
            if binary:
                return ArraysReply(encode_answer(played, flags_of(steps)))
            return _json_answer(played)

        answered: Response = await self._sessions.run(session, n_seconds, answer)
        return answered

    async def close(self, body: BatchCloseRequest) -> BatchCloseAnswer:
        self._sessions.close(body.session_id)
        return BatchCloseAnswer(closed=True)


class ArraysReply(Response):
    """Answer in the binary format, whose parts are sent as they are."""

    media_type = MEDIA_TYPE

    def __init__(self, parts: Sequence[bytes | memoryview]) -> None:
        super().__init__(headers={"content-length": str(sum(map(len, parts)))})
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for part in self._parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def _binary_steps(body: bytes) -> BatchSteps:
    try:
        steps = decode_request(body)
    except ValueError as error:
        raise InvalidBatchError(str(error)) from error
    if not 1 <= steps.n_steps <= MAX_STEPS:
        raise InvalidBatchError(f"{steps.n_steps} steps: it must be 1 to {MAX_STEPS:,}")
    return steps


def _json_steps(text: bytes) -> BatchSteps:
    wanted = read_request(BatchStepRequest, parse_object(text, bounds=STEP_BOUNDS) if text else {})
    if (wanted.repeat or 1) > 1 and len(wanted.actions) != 1:
        raise InvalidRequestError("repeat", wanted.repeat, "left out when actions holds more than one step")
    try:
        actions = np.array(wanted.actions, dtype=np.float64)
    except ValueError as error:
        allowed = "an action for each episode in every step, all of five numbers or all of six"
        raise InvalidBatchError(f"actions must hold {allowed}", "actions") from error
    n_steps = max(wanted.repeat or 1, len(wanted.actions))
    return BatchSteps(wanted.session_id, actions, n_steps, wanted.step, wanted.last)


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


def _json_answer(played: BatchPlayed) -> JsonReply:
    return reply(
        {
            "step": played.number,
            "observations": orjson.Fragment(in_blocks(np.ascontiguousarray(played.observations))),
            "rewards": np.ascontiguousarray(played.rewards),
            "done": played.done,
            "episodes": played.episodes,
            "steps_left": played.steps_left,
        }
    )


def in_blocks(array: NDArray[Any]) -> bytes:
    """JSON of an array, written in blocks: between two of them the event loop gets the interpreter."""
    if array.size <= BLOCK_NUMBERS or array.ndim == 1:
        return to_json(array)
    if len(array) == 1:
        return b"[" + in_blocks(array[0]) + b"]"
    n = max(1, len(array) * BLOCK_NUMBERS // array.size)
    blocks = (in_blocks(array[at : at + n]) for at in range(0, len(array), n))
    return b"[" + b",".join(block[1:-1] for block in blocks) + b"]"


# ---------------------------------------------------------------- documents

LAYOUT: Final = f"""N episodes of a session from `/reset/batch` play K steps in one request.

As JSON: `actions[k][n]` are five numbers ({", ".join(ACTION_FIELDS)}; `replicas` as a sixth where the task scales);
`observations[k][n]` are 14 numbers in the order of GET /info (21 where the reset asked for the fleet's),
`rewards[k][n]`, `done[k]`. Numbers out of range are clamped and snapped to the nearest allowed value; NaN is refused.

A request with the number of its first step may be sent again: the latest one is answered again and played once.
Limits: N {MAX_ROWS:,}; N x K {MAX_STEPS:,} in binary and {MAX_JSON_STEPS:,} as JSON; sessions and their length by
INFERENCEGYM_BATCH_SESSIONS and _BATCH_ROW_STEPS. Errors are JSON.

The same with `Content-Type: {MEDIA_TYPE}`. {batch_format.__doc__}"""


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
