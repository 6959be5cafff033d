"""MCP tools of an environment family: begin, observe, set_knobs, run and grade, as JSON-RPC over HTTP or WebSockets.

The id of an MCP session is the id of the episode's session, so any worker can answer. OpenEnv's client names it in
``params.session_id`` and shares it with ``/ws?session_id=...``; MCP's clients name it in the header Mcp-Session-Id.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field
from starlette.types import Scope

from agents.briefing import Interface, serving_briefing
from env.families import SERVING
from env.family import Family, outcome
from env.log import over_steps
from env.serving.family import RULES, describe_task
from inferencegym import __version__
from inferencegym.errors import (
    MISSING,
    EpisodeDoneError,
    InferenceGymError,
    InvalidActionError,
    InvalidConfigError,
    UnknownSessionError,
    UnknownTaskError,
    short_repr,
)
from inferencegym.messages import WHOLE, Allowed, Message, plain_schema
from inferencegym.tasks import get_task
from server import schemas
from server.context import Context
from server.net.cpu import on_thread
from server.net.errors import InvalidRequestError
from server.net.json_io import to_json
from server.schemas import EpisodeChoice, read_request
from server.sessions.manager import LiveSession, StepResult
from server.sessions.session import new_session_id

SESSION_HEADER: Final = b"mcp-session-id"
PARSE_ERROR: Final = -32700
_INVALID_REQUEST: Final = -32600
_METHOD_NOT_FOUND: Final = -32601
_INVALID_PARAMS: Final = -32602
SERVER_ERROR: Final = -32000
MAX_RPC_ID_CHARS: Final = 200
PROTOCOL_VERSIONS: Final = ("2025-06-18", "2025-03-26", "2024-11-05")
"""Revisions of MCP that a client may request, the newest first; the tools are the same in all of them."""
MAX_RUN_S: Final = 60
INSTRUCTIONS: Final = (
    "begin starts an episode (without it, the first tool starts one of the default task). set_knobs sets knobs and "
    "plays one step with them; run plays on with the knobs as they are; observe costs no time; grade gives the score."
)

PLAYER: Final = Interface(
    "`set_knobs` sets knobs and plays one step; `run` plays on for up to 60 seconds with the knobs as they are; "
    "`observe` looks and `grade` gives the score so far, both take no time; `begin` starts the next episode. {steps} "
    "steps are left.",
    ("seconds", "reward", "done", "action_applied", "fleet", "by_class", "grade_so_far"),
)


class JsonRpcRequest(BaseModel):
    """A request of JSON-RPC 2.0."""

    model_config = ConfigDict(strict=True)

    jsonrpc: Literal["2.0"]
    method: str
    params: dict[str, Any] | list[Any] = Field(default_factory=dict)
    # It is sent back.
    id: Annotated[str, Field(max_length=MAX_RPC_ID_CHARS)] | int | None = None


class RunArguments(Message):
    """Arguments of ``run``."""

    seconds: Annotated[int, Field(ge=1, le=MAX_RUN_S, description="how long to play on (s)"), WHOLE]


class NoArguments(Message):
    """Arguments of a tool that takes none."""


class ToolCall(BaseModel):
    """Parameters of ``tools/call``."""

    # MCP's clients add `_meta`, OpenEnv's `session_id`.
    model_config = ConfigDict(strict=True, extra="ignore")

    name: str
    arguments: Annotated[dict[str, Any] | None, Allowed("an object with the arguments of the tool")] = None


def rpc_error(code: int, message: str, request_id: str | int | None = None) -> dict[str, Any]:
    """An error of JSON-RPC 2.0."""
    return {"jsonrpc": "2.0", "error": {"code": code, "message": message}, "id": request_id}


Call = Callable[[dict[str, Any], str, Scope], Awaitable[dict[str, Any]]]


class McpTools:
    """The tools of one family."""

    def __init__(self, context: Context, family: Family) -> None:
        self._context = context
        self._sessions = context.sessions
        self._family = family
        began = plain_schema(schemas.reset_request(family))
        del began["properties"]["session_id"]
        acted = {**plain_schema(family.action_model), "description": schemas.LEFT_OUT}
        self._tools: Mapping[str, tuple[Call, str, dict[str, Any]]] = {
            "begin": (self._begin, "Start an episode. Where the environment has one, returns a briefing.", began),
            "observe": (self._observe, "Look at the environment; no time passes.", plain_schema(NoArguments)),
            "set_knobs": (
                self._act,
                "Set knobs and play one step with them. Returns reward, observation, what is in force, and where the "
                "environment has them the step's metrics and the grade so far.",
                acted,
            ),
            "run": (
                self._run,
                "Play on for some seconds with the knobs as they are. Returns what set_knobs returns, over all seconds "
                "played (a held action is played to its end): the sum of the rewards, and the last observation.",
                plain_schema(RunArguments),
            ),
            "grade": (self._grade, "Score of the steps so far, in [0, 1], with its parts.", plain_schema(NoArguments)),
        }
        self._listed = [
            {"name": name, "description": told, "inputSchema": schema}
            for name, (_, told, schema) in self._tools.items()
        ]

    async def answer(self, request: Mapping[str, Any], session_id: str | None, scope: Scope) -> dict[str, Any] | None:
        """Answer of a JSON-RPC request in a session; None for a notification."""
        try:
            wanted = read_request(JsonRpcRequest, request)
        except InvalidRequestError as error:
            return rpc_error(_INVALID_REQUEST, str(error))
        if wanted.method.startswith("notifications/"):
            return None
        params = wanted.params if isinstance(wanted.params, dict) else {}
        try:
            result = await self._result(wanted.method, params, session_id, scope)
        except InferenceGymError as error:
            bad = isinstance(error, (InvalidActionError, InvalidConfigError, UnknownTaskError))
            return rpc_error(_INVALID_PARAMS if bad else SERVER_ERROR, _told(error), wanted.id)
        if result is None:
            said = f"there is no method {short_repr(wanted.method)}: play with tools/list and tools/call, or over /ws"
            return rpc_error(_METHOD_NOT_FOUND, said, wanted.id)
        return {"jsonrpc": "2.0", "id": wanted.id, "result": result}

    async def _result(
        self, method: str, params: dict[str, Any], session_id: str | None, scope: Scope
    ) -> dict[str, Any] | None:
        if method == "initialize":
            asked = params.get("protocolVersion")
            return {
                "protocolVersion": asked if asked in PROTOCOL_VERSIONS else PROTOCOL_VERSIONS[0],
                "capabilities": {"tools": {"listChanged": False}},
                "serverInfo": {"name": self._family.title, "version": __version__},
                "instructions": INSTRUCTIONS,
            }
        if method == "ping":
            return {}
        if method == "tools/list":
            return {"tools": self._listed}
        if method == "tools/call":
            return await self._call(params, session_id, scope)
        named = params.get("session_id")
        if method == "openenv/session/create":
            return {"session_id": session_id or new_session_id()}
        if method == "openenv/session/close" and isinstance(named, str):
            # There is nothing to release: the episode is a session like any other, and expires like one.
            return {"session_id": named, "closed": True}
        return None

    async def _call(self, params: dict[str, Any], session_id: str | None, scope: Scope) -> dict[str, Any]:
        wanted = read_request(ToolCall, params, "params")
        if wanted.name not in self._tools:
            raise InvalidRequestError("params.name", wanted.name, "one of " + ", ".join(self._tools))
        named = params.get("session_id")
        session = named if isinstance(named, str) else session_id
        if session is None:
            allowed = "what openenv/session/create returned; clients of MCP send it as Mcp-Session-Id"
            raise InvalidRequestError("params.session_id", MISSING, allowed)
        try:
            found = await self._tools[wanted.name][0](wanted.arguments or {}, session, scope)
        except InferenceGymError as error:
            if isinstance(named, str):
                raise  # OpenEnv's client knows errors of JSON-RPC only
            return {"content": [{"type": "text", "text": _told(error)}], "isError": True}
        text = {"type": "text", "text": to_json(found).decode()}
        # `data` is where OpenEnv's client looks.
        return {"content": [text], "structuredContent": found, "data": found, "isError": False}

    # ------------------------------------------------------------ the tools

    async def _begin(self, arguments: dict[str, Any], session_id: str, scope: Scope) -> dict[str, Any]:
        wanted = read_request(EpisodeChoice, arguments, "arguments")
        # Counts against the same limit as POST /reset.
        self._context.limits.take("/reset", scope)
        live, _ = await self._sessions.reset(
            self._family.name,
            task_id=self._family.default_task if wanted.task_id is None else wanted.task_id,
            seed=schemas.DEFAULT_SEED if wanted.seed is None else wanted.seed,
            config=wanted.config or {},
            caller=self._context.caller(self._family, scope),
            session_id=session_id,
            create=True,
        )
        return {**_seen(live), **self._briefing(live)}

    def _briefing(self, live: LiveSession) -> dict[str, str]:
        if self._family.name != SERVING:
            return {}
        task = describe_task(get_task(live.env.task_id))
        return {"briefing": serving_briefing(task, RULES, PLAYER, live.env.config_dict())}

    async def _observe(self, arguments: dict[str, Any], session_id: str, scope: Scope) -> dict[str, Any]:
        read_request(NoArguments, arguments, "arguments")
        return _seen(await self._episode(session_id, scope))

    async def _act(self, arguments: dict[str, Any], session_id: str, scope: Scope) -> dict[str, Any]:
        await self._episode(session_id, scope, arguments)
        result = await self._sessions.step(session_id, arguments, family=self._family.name)
        return _stepped(result, [result.info()], result.reward)

    async def _run(self, arguments: dict[str, Any], session_id: str, scope: Scope) -> dict[str, Any]:
        seconds = read_request(RunArguments, arguments, "arguments").seconds
        live = await self._episode(session_id, scope)
        if live.env.done:
            raise EpisodeDoneError(f"the episode ended after {len(live.actions)} steps")
        action = self._family.action_json(live.actions[-1]) if live.actions else {}
        started, played, reward, done = live.env.n_entries, 0, 0.0, False
        infos: list[dict[str, Any]] = []
        while not done:
            result = await self._sessions.step(session_id, action, family=self._family.name)
            infos.append(result.info())
            reward += result.reward
            played = result.env.n_entries - started
            done = result.done or played >= seconds
        return {"seconds_played": played, **_stepped(result, infos, reward)}

    async def _grade(self, arguments: dict[str, Any], session_id: str, scope: Scope) -> dict[str, Any]:
        read_request(NoArguments, arguments, "arguments")
        live = await self._episode(session_id, scope)
        async with live.lock:
            graded = await on_thread(live.env.grade)
            return {**graded, "done": live.env.done, "steps": live.env.n_entries}

    async def _episode(self, session_id: str, scope: Scope, action: Mapping[str, Any] | None = None) -> LiveSession:
        """The session's episode; a session without one starts the default task, if that can play ``action``."""
        try:
            return await self._sessions.get(session_id, self._family.name)
        except UnknownSessionError:
            if action is not None:
                env = self._family.make()
                env.reset(task_id=self._family.default_task)
                env.check(self._family.parse_action(action)[0])
            await self._begin({}, session_id, scope)
            return await self._sessions.get(session_id, self._family.name)


def _seen(live: LiveSession) -> dict[str, Any]:
    env = live.env
    about = {"session_id": live.session_id, "task_id": env.task_id, "seed": env.seed, "config": env.config_dict()}
    length = {"steps_played": len(live.actions), "episode_length": env.episode_length}
    return {**about, **length, "observation": env.observation_dict(), "done": env.done}


def _stepped(result: StepResult, infos: list[dict[str, Any]], reward: float) -> dict[str, Any]:
    info = infos[-1]
    told: dict[str, Any] = {name: info[name] for name in ("action_applied", "fleet") if name in info}
    if "grade_so_far" in info:
        told |= over_steps(infos)
    ended = outcome(info) if result.done else {}
    return {"observation": result.env.observation_dict(), "reward": reward, "done": result.done, **told, **ended}


def _told(error: InferenceGymError) -> str:
    ended = "; begin starts the next one, grade scores this one" if isinstance(error, EpisodeDoneError) else ""
    return f"{error}{ended}"
