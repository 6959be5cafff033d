"""OpenEnv's protocol: /ws, /mcp, /metadata, /schema, /list_environments and the Task API, for every mounted family.

The wire format is that of OpenEnv 0.9 and 0.10, whose clients and validator the tests run; OpenEnv itself is not needed
to serve. An episode played over a WebSocket is a session like any other, with its ``episode_id`` as session id: it is
recorded step by step, GET /state and POST /grader know it, and after a lost connection
``reset(episode_id=..., resume=True)`` continues it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Final
from urllib.parse import parse_qs

from pydantic import BaseModel, ConfigDict
from starlette.routing import BaseRoute, WebSocketRoute
from starlette.types import Message as AsgiMessage
from starlette.types import Receive, Scope, Send

from env.family import TRAIN, Family, outcome
from inferencegym.error_text import write_error
from inferencegym.errors import (
    MISSING,
    InferenceGymError,
    InvalidActionError,
    InvalidConfigError,
    NotResetError,
    StepConflictError,
)
from inferencegym.messages import Message
from inferencegym.tasks import TaskId
from server.api.mcp import PARSE_ERROR, SERVER_ERROR, McpTools, rpc_error
from server.api.openenv_http import Index, InfoRoutes
from server.context import Context
from server.net.errors import InvalidJsonError, InvalidRequestError
from server.net.json_io import SMALL, parse_object, to_json
from server.net.limits import sender_of
from server.net.slots import NoSlotError, Slot, Slots
from server.net.websocket import PROTOCOL
from server.schemas import EpisodeChoice, Seed, StepNumber, read_request
from server.sessions.manager import LiveSession, StepResult
from server.sessions.session import new_session_id

log = logging.getLogger(__name__)

GAVE_WAY: Final[Mapping[str, Any]] = {
    "type": "websocket.close",
    # "Try again later" in IANA's registry of WebSocket close codes.
    "code": 1013,
    # A reason holds at most 123 bytes.
    "reason": "idle, and others wait: connect again, reset(episode_id=..., resume=True) continues",
}
"""Closes an idle connection whose slot another connection needs."""

NEXT: Final[Mapping[str, str]] = {
    "not_reset": "reset() starts one, and reset(episode_id=..., resume=True) continues an earlier one",
    "episode_done": "reset() starts the next one; POST /grader with its episode_id as session_id scores this one",
    "unknown_session": "reset() without resume starts an episode",
    "other_release": "reset() without resume starts an episode",
    "unknown_task": "the Task API and GET /tasks list the tasks",
    "step_conflict": "reset(episode_id=..., resume=True) continues the episode, reset() starts another",
    "rate_limited": "wait, then send it again",
    "store": "send it again in a moment; nothing was changed",
    "capacity": "try again in a moment",
    "table": "try again in a moment; the server's log has the cause",
    "invalid_json": "send one JSON object as text",
    "internal": "report it with the time; a step may be sent again with its number",
}
"""What to do after an error, with the method names of OpenEnv's clients."""
_NEXT_OTHERWISE: Final = "correct it and send it again; nothing was changed"


def openenv_routes(context: Context) -> list[BaseRoute]:
    """OpenEnv's routes for every mounted family.

    They come after all others: ``{env_name}`` of the Task API stands for any first part of a path.
    """
    routes: list[BaseRoute] = []
    for mount in context.mounts:
        tools = McpTools(context, mount.family)
        slots = Slots(context.settings.max_concurrent_envs, context.settings.envs_per_client())
        routes += [
            WebSocketRoute(f"{mount.prefix}/ws", PlayEndpoint(context, mount.family, slots, tools)),
            WebSocketRoute(f"{mount.prefix}/mcp", McpEndpoint(context, mount.family, slots, tools)),
            *InfoRoutes(context, mount, tools).routes(),
        ]
    return routes


# ---------------------------------------------------------------- frames


FRAMES: Final[Mapping[str, bool]] = {"step": True, "reset": False, "state": False, "close": False, "mcp": True}
"""Types of frames, and whether they need ``data``.

``step`` plays one step with the action in ``data``, where ``metadata`` may be too (:class:`StepMetadata`); ``reset``
starts an episode or continues one, as :class:`ResetArguments` say; ``mcp`` is a request of JSON-RPC; ``state`` asks for
the state of the episode; ``close`` ends the connection, and the episode stays in its session.
"""


class Frame(Message):
    """What a client sends."""

    type: str
    data: dict[str, Any] | None = None


class ResetArguments(EpisodeChoice):
    """Arguments of a reset."""

    seed: Seed | None = None
    episode_id: str | None = None
    split: str | None = None
    index: Index | None = None
    resume: bool | None = None
    info: bool | None = None

    def check(self) -> None:
        """Raise InvalidRequestError if arguments contradict each other."""
        if self.resume and self.episode_id is None:
            raise InvalidRequestError("episode_id", None, "the id of the episode to resume")
        by_split = self.split is not None or self.index is not None
        if self.resume and (by_split or any(one is not None for one in (self.task_id, self.seed, self.config))):
            raise InvalidRequestError("resume", True, "without a task, seed and config: the episode has its own")
        if by_split and self.task_id is not None:
            raise InvalidRequestError("task_id", self.task_id, "left out when split and index are given")

    def chosen_task(self, family: Family) -> TaskId | None:
        """Id of the requested task; None for the family's first. Raises InvalidConfigError."""
        if self.split is None and self.index is None:
            return self.task_id
        return family.task_at(self.split or TRAIN, self.index or 0).task_id


class StepMetadata(BaseModel):
    """Metadata of an action: ``step`` is its number, with which a repeated action is played once."""

    # OpenEnv's clients may put anything there.
    model_config = ConfigDict(extra="ignore", strict=True)

    step: StepNumber | None = None


class UnknownFrameError(InvalidRequestError):
    """A frame has an unknown ``type``."""


def read_object_frame(message: AsgiMessage) -> dict[str, Any]:
    """The JSON object of a message. Raises InvalidJsonError or BodyTooLargeError."""
    text = message.get("text")
    if text is None:
        raise InvalidJsonError("the frame must be text, not bytes")
    return parse_object(text.encode(), "frame", SMALL)


def read_frame(message: AsgiMessage) -> Frame:
    """A client's frame. Raises UnknownFrameError, or as :func:`read_object_frame` and :func:`read_request`."""
    sent = read_object_frame(message)
    if (kind := sent.get("type")) not in tuple(FRAMES):
        raise UnknownFrameError("type", kind, "one of " + ", ".join(FRAMES))
    frame = read_request(Frame, sent)
    if FRAMES[frame.type] and frame.data is None:
        raise InvalidRequestError("data", MISSING, "an object")
    return frame


# ---------------------------------------------------------------- answers


def _encode(kind: str, data: Mapping[str, Any]) -> str:
    """Encode a frame that the server sends."""
    return to_json({"type": kind, "data": data}).decode()


def _error_frame(said: str, code: str, next_step: str, wire_code: str = "EXECUTION_ERROR", **more: Any) -> str:
    """An error with this package's ``code`` in its message and OpenEnv's ``wire_code`` beside it."""
    return _encode("error", {"message": write_error(said, code, next_step), "code": wire_code, **more})


def _refused(error: InferenceGymError) -> str:
    field = getattr(error, "field", None)
    at = {} if field is None else {"errors": [{"type": error.code, "loc": str(field).split("."), "msg": str(error)}]}
    return _error_frame(str(error), error.code, NEXT.get(error.code, _NEXT_OTHERWISE), _wire_code(error), **at)


def _wire_code(error: InferenceGymError) -> str:
    if isinstance(error, InvalidJsonError):
        return "INVALID_JSON"
    if isinstance(error, UnknownFrameError):
        return "UNKNOWN_TYPE"
    return "VALIDATION_ERROR" if isinstance(error, (InvalidActionError, InvalidConfigError)) else "EXECUTION_ERROR"


# ---------------------------------------------------------------- playing


class SlottedEndpoint(ABC):
    """ASGI application of a WebSocket that takes one of the family's slots for as long as it is open.

    :class:`~server.net.slots.Slots` limits connections, in total and per client, and closes idle ones if slots are
    needed.
    """

    def __init__(self, context: Context, family: Family, slots: Slots, tools: McpTools) -> None:
        self._context, self._family = context, family
        self._slots, self._tools = slots, tools

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Sending to a client that has disconnected raises OSError.
        with suppress(OSError):
            await receive()
            await send({"type": "websocket.accept"})
            try:
                slot = self._slots.take(sender_of(scope))
            except NoSlotError as error:
                await send({"type": "websocket.send", "text": self._no_slot(error)})
                await send({"type": "websocket.close", "code": 1000})
                return
            try:
                await self._serve(scope, receive, send, slot)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or not slot.gave_way:
                    raise
                task.uncancel()
                await send(dict(GAVE_WAY))
            finally:
                self._slots.give_back(slot)

    @abstractmethod
    def _no_slot(self, error: NoSlotError) -> str:
        """Refuse a client for which there is no slot."""

    @abstractmethod
    async def _serve(self, scope: Scope, receive: Receive, send: Send, slot: Slot) -> None:
        """Answer messages until the connection ends."""


class PlayEndpoint(SlottedEndpoint):
    """ASGI application of ``/ws``: any number of episodes per connection, one after the other."""

    def _no_slot(self, error: NoSlotError) -> str:
        counts = {"active_sessions": error.taken, "max_sessions": error.most}
        return _error_frame(str(error), error.code, error.next_step, "CAPACITY_REACHED", **counts)

    async def _serve(self, scope: Scope, receive: Receive, send: Send, slot: Slot) -> None:
        connection = Connection(self._context, self._family, self._tools, scope, slot)
        if (protocol := scope.get("state", {}).get(PROTOCOL)) is not None:
            protocol.at_once = connection.at_once
        while (message := await receive())["type"] == "websocket.receive":
            answer = await connection.answer(message)
            if answer is None:
                await send({"type": "websocket.close", "code": 1000})
                return
            await send({"type": "websocket.send", "text": answer})


class Connection:
    """A WebSocket connection and its episode."""

    def __init__(self, context: Context, family: Family, tools: McpTools, scope: Scope, slot: Slot) -> None:
        self._slot = slot
        self._tools = tools
        named = parse_qs(scope["query_string"].decode("latin-1")).get("session_id")
        # OpenEnv's MCP client plays one session over this connection and over POST /mcp.
        self._shared = named[-1] if named else None
        self._context = context
        self._sessions = context.sessions
        self._family = family
        self._scope = scope
        self._live: LiveSession | None = None
        # The episode of this reset: a later reset of the same session belongs to another client.
        self._reset_id = ""
        self._taken = 0
        self._with_info = False

    def at_once(self, text: bytes) -> str | None:
        """Answer the episode's next step, if it needs no waiting; :meth:`answer` answers, or refuses, all else."""
        if self._live is None or self._shared is not None:
            return None
        # It meets the same errors.
        with suppress(Exception):
            sent = parse_object(text, "frame", SMALL)
            data = sent["data"]
            if sent["type"] == "step" and len(sent) == 2 and not data.pop("metadata", None):
                result = self._sessions.try_step(self._live.session_id, data, self._taken + 1, reset_id=self._reset_id)
                if result is not None:
                    answer = self._stepped(result)
                    # Counted last: if this failed, answer() asks for the same step, which is not played again.
                    self._slot.played, self._taken = time.monotonic(), result.number
                    return answer
        return None

    async def answer(self, message: AsgiMessage) -> str | None:
        """Answer a frame with a frame, which may be an error; None ends the connection."""
        try:
            frame = read_frame(message)
            data = frame.data or {}
            if frame.type == "step":
                return await self._step(data)
            if frame.type == "reset":
                return await self._reset(data)
            if frame.type == "state":
                return await self._state()
            return await self._tool(data) if frame.type == "mcp" else None
        except InferenceGymError as error:
            return _refused(error)
        except Exception:
            # One frame must not end the connection; its client still waits for an answer.
            log.exception("a WebSocket frame could not be answered")
            said = "the server failed on this frame; the cause is in its log"
            return _error_frame(said, "internal", NEXT["internal"])

    async def _step(self, data: dict[str, Any]) -> str:
        self._slot.played = time.monotonic()
        metadata = data.pop("metadata", None)
        if self._live is None and self._shared is not None:
            self._plays(await self._sessions.get(self._shared, self._family.name))
        # A tool may have played steps meanwhile: then any next step is accepted.
        number = None if self._shared is not None else self._taken + 1
        if metadata:
            number = read_request(StepMetadata, metadata, "metadata").step or number
        if self._live is None:
            raise NotResetError("this connection has no episode")
        result = await self._sessions.step(self._live.session_id, data, number, reset_id=self._reset_id)
        self._taken = max(self._taken, result.number)
        return self._stepped(result)

    async def _reset(self, data: dict[str, Any]) -> str:
        self._slot.played = time.monotonic()
        # Counts against the same limit as POST /reset.
        self._context.limits.take("/reset", self._scope)
        wanted = read_request(ResetArguments, data)
        wanted.check()
        if wanted.resume:
            assert wanted.episode_id is not None
            live = await self._sessions.get(wanted.episode_id, self._family.name)
            first, last = live.env.observation(), live.last
        else:
            live, first = await self._sessions.reset(
                self._family.name,
                task_id=wanted.chosen_task(self._family),
                seed=wanted.seed,
                config=wanted.config or {},
                caller=self._context.caller(self._family, self._scope),
                session_id=wanted.episode_id or self._shared,
                create=True,
            )
            last = None
        self._plays(live)
        self._with_info = bool(wanted.info)
        if last is not None:
            return self._stepped(last)
        return _encode("observation", {"observation": first, "reward": None, "done": False})

    def _plays(self, live: LiveSession) -> None:
        """Switch the connection to this session's episode."""
        self._live, self._reset_id, self._taken = live, live.record.reset_id, len(live.actions)
        self._slot.has_episode = True

    async def _tool(self, request: dict[str, Any]) -> str:
        """The answer to a request of JSON-RPC, for the episode that the connection plays."""
        self._slot.played = time.monotonic()
        if self._live is None and self._shared is None:
            self._shared = new_session_id()
        session_id = self._shared if self._live is None else self._live.session_id
        return _encode("mcp", await self._tools.answer(request, session_id, self._scope) or {})

    async def _state(self) -> str:
        if self._live is None:
            return _encode("state", {"episode_id": None, "step_count": 0})
        # Another process may have played steps.
        live = await self._sessions.get(self._live.session_id)
        if live.record.reset_id != self._reset_id:
            raise StepConflictError(f"episode {live.session_id!r} was reset by another request")
        state = live.env.state()
        return _encode("state", {"episode_id": state.pop("session_id"), **state})

    def _stepped(self, result: StepResult) -> str:
        answer = {"observation": result.observation, "reward": result.reward, "done": result.done}
        if self._with_info or result.done:
            info = result.info()
            # OpenEnv has metadata in the observation, for typed clients, and beside it, for its generic one.
            metadata = {"metadata": outcome(info)} if result.done else {}
            more = {"info": info} if self._with_info else {}
            observation = result.observation
            fields = observation if isinstance(observation, dict) else asdict(observation)
            answer = {**answer, **metadata, "observation": {**fields, **metadata, **more}}
        return _encode("observation", answer)


class McpEndpoint(SlottedEndpoint):
    """ASGI application of ``/mcp`` for WebSockets: each message is a request of JSON-RPC, for one episode's session."""

    def _no_slot(self, error: NoSlotError) -> str:
        return to_json(rpc_error(SERVER_ERROR, f"{error}; {error.next_step}")).decode()

    async def _serve(self, scope: Scope, receive: Receive, send: Send, slot: Slot) -> None:
        session_id = new_session_id()
        slot.has_episode = True
        while (message := await receive())["type"] == "websocket.receive":
            slot.played = time.monotonic()
            answer = await self._answer(message, session_id, scope)
            if answer is not None:
                await send({"type": "websocket.send", "text": to_json(answer).decode()})

    async def _answer(self, message: AsgiMessage, session_id: str, scope: Scope) -> dict[str, Any] | None:
        try:
            request = read_object_frame(message)
        except InferenceGymError as error:
            return rpc_error(PARSE_ERROR, str(error))
        try:
            return await self._tools.answer(request, session_id, scope)
        except Exception:
            # One request must not end the connection; its client still waits for an answer.
            log.exception("a request for an MCP tool could not be answered")
            return rpc_error(SERVER_ERROR, "the server failed on this request; the cause is in its log")
