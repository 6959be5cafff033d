"""The traffic controller's paths, with the shapes of its published document: health, tasks, reset, step and state.

The document knows no session ids: a request means the caller's most recent episode. So that several clients can play at
once all the same, a session is found in this order: the ``session_id`` that the request names (``POST reset`` returns
it), the cookie that ``POST reset`` sets (browsers and HTTP libraries with sessions send it back by themselves), and the
last reset from the client's address and ``X-Client-Id``, remembered apart from other environments' sessions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

import inferencegym
from env.traffic.env import TrafficEnv
from grader.episode import MAX_METRIC
from grader.traffic_grader import SCORED, grade_traffic, traffic_log
from grader.verify import Replayed, verify_log
from inferencegym.tasks import TaskId
from inferencegym.traffic import (
    ACCEPT_SHARES,
    ACTION_NAMES,
    CONFIG_FIELDS,
    DEFAULT_TASK_ID,
    STATE_FIELDS,
    get_traffic_task,
    list_traffic_tasks,
    traffic_config,
)
from server import schemas
from server.api.serving import LARGE_LOG_ENTRIES, Context, documented, must_play
from server.families import TRAFFIC
from server.middleware import SESSION_KEY
from server.net.json_io import JsonRoute, read_object, reply
from server.schemas import GradeRequest, ResetRequest, Schema, nullable
from server.sessions.manager import Live

COOKIE: Final = "inferencegym_traffic"


class TrafficRoutes:
    """The traffic controller's HTTP interface under ``prefix``."""

    def __init__(self, context: Context, prefix: str = "/traffic") -> None:
        self._context = context
        self._settings = context.settings
        self._sessions = context.sessions
        self._prefix = prefix
        # Read now, so that a mistake in a user's task file stops the start and not the first request.
        self._tasks = list_traffic_tasks()

    def routes(self) -> list[JsonRoute]:
        """All of them, the most used first: routes are tried in order."""
        return [
            self._step_route(),
            self._reset_route(),
            self._state_route(),
            self._grader_route(),
            self._tasks_route(),
            self._health_route(),
            self._manifest_route(),
        ]

    # ------------------------------------------------------------ playing

    async def step(self, request: Request) -> Response:
        body = await self._body(request)
        if body.get("session_id") is None:
            body["session_id"] = await self._session_of(request)
        session_id, action, number = schemas.parse_step(body)
        request.scope[SESSION_KEY] = session_id
        outcome = await self._sessions.step(session_id, action, number, TRAFFIC)
        return reply(
            {"state": outcome.observation, "reward": outcome.reward, "done": outcome.done, "info": outcome.info()}
        )

    async def reset(self, request: Request) -> Response:
        body = await self._body(request)
        if body.get("task_id") is None:
            body["task_id"] = DEFAULT_TASK_ID
        wanted = ResetRequest.parse(body)
        live, first = await self._sessions.reset(
            TRAFFIC,
            task_id=wanted.task_id,
            seed=wanted.seed,
            config=wanted.config or {},
            caller=self._caller(request),
            session_id=wanted.session_id,
        )
        request.scope[SESSION_KEY] = live.session_id
        start = live.start
        answer = {
            "state": first,
            "task_id": start.task_id,
            "max_steps": get_traffic_task(start.task_id).episode_length,
            "config": start.config,
            "seed": start.seed,
            "session_id": live.session_id,
        }
        cookie = f"{COOKIE}={live.session_id}; Path={self._prefix or '/'}; HttpOnly; SameSite=Lax"
        return reply(answer, headers=[(b"set-cookie", cookie.encode())])

    async def state(self, request: Request) -> Response:
        named = request.query_params.get("session_id") or None
        live = await self._live(request, named or await self._session_of(request))
        state = live.env.state()
        if named is None:
            # Clients behind one address may share "the most recent session": its id, which lets its holder play, is not
            # for the others.
            del state["session_id"]
        return reply(state)

    # ------------------------------------------------------------ grading

    async def grade(self, request: Request) -> Response:
        body = await read_object(request, self._settings.max_log_bytes, self._settings.body_timeout_s)
        wanted = GradeRequest.parse(body)
        if wanted.session_id is None:
            long = wanted.verify or len(wanted.episode_log or ()) > LARGE_LOG_ENTRIES
            return reply(await asyncio.to_thread(_grade_log, wanted) if long else _grade_log(wanted))
        live = await self._live(request, wanted.session_id)
        must_play(live, wanted.task_id)
        task_id = str(live.start.task_id)
        # The log never left the server, so there is nothing to verify it against but itself.
        score = grade_traffic(task_id, live.env.episode_log)
        return reply({**score, "verified": True, "done": live.env.done, "steps": len(live.actions)})

    # ------------------------------------------------------------ telling

    async def health(self, _request: Request) -> Response:
        return reply({"status": "ok"})

    async def tasks(self, _request: Request) -> Response:
        return reply({"tasks": [task.summary() for task in self._tasks]})

    async def manifest(self, _request: Request) -> Response:
        return Response(self._manifest, media_type="text/plain")

    @cached_property
    def _manifest(self) -> bytes:
        return (Path(inferencegym.__file__).parent / "data" / "traffic_openenv.yaml").read_bytes()

    # ------------------------------------------------------------ who is meant

    async def _session_of(self, request: Request) -> str:
        """The session of a request that names none."""
        return request.cookies.get(COOKIE) or await self._sessions.latest(self._caller(request))

    async def _live(self, request: Request, session_id: str) -> Live:
        request.scope[SESSION_KEY] = session_id
        return await self._sessions.get(session_id, TRAFFIC)

    def _caller(self, request: Request) -> str:
        # A client that plays both environments has a most recent session in each.
        return f"{TRAFFIC}:{self._context.callers.caller(request.scope)}"

    async def _body(self, request: Request) -> dict[str, Any]:
        return await read_object(request, self._settings.max_body_bytes, self._settings.body_timeout_s)

    # ------------------------------------------------------------ routes with their schemas

    def _step_route(self) -> JsonRoute:
        return self._route(
            "POST",
            "/step",
            self.step,
            "Let through a share of the requests",
            documented(_step_answer_schema(), 400, 404, 409, 429, 503),
            request_schema=_step_schema(),
        )

    def _reset_route(self) -> JsonRoute:
        return self._route(
            "POST",
            "/reset",
            self.reset,
            "Start an episode",
            documented(_reset_answer_schema(), 400, 404, 429, 503),
            request_schema=_reset_schema(),
            body_required=False,
        )

    def _state_route(self) -> JsonRoute:
        named = {"name": "session_id", "in": "query", "required": False, "schema": {"type": "string"}}
        answers = documented(_state_schema(), 404, 503)
        return self._route("GET", "/state", self.state, "Where an episode stands", answers, parameters=[named])

    def _grader_route(self) -> JsonRoute:
        answers = documented({"type": "object"}, 400, 404, 409, 429, 503)
        schema = schemas.grade_schema(_task_id_schema(), _config_schema(), _log_entry_schema())
        return self._route("POST", "/grader", self.grade, "Score an episode", answers, request_schema=schema)

    def _tasks_route(self) -> JsonRoute:
        return self._route("GET", "/tasks", self.tasks, "What can be played", documented({"type": "object"}))

    def _health_route(self) -> JsonRoute:
        return self._route("GET", "/health", self.health, "Is the server ready?", documented({"type": "object"}))

    def _manifest_route(self) -> JsonRoute:
        text: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}
        return self._route("GET", "/openenv.yaml", self.manifest, "The OpenEnv manifest", text)

    def _route(
        self,
        method: str,
        path: str,
        endpoint: Callable[[Request], Awaitable[Response]],
        summary: str,
        answers: dict[int | str, dict[str, Any]],
        **kwargs: Any,
    ) -> JsonRoute:
        return JsonRoute(
            self._prefix + path,
            endpoint,
            method=method,
            summary=summary,
            tags=["traffic"],
            responses=answers,
            **kwargs,
        )


def replay_traffic(
    task_id: TaskId, seed: int, config: Mapping[str, Any] | None, actions: Sequence[Mapping[str, Any]]
) -> Replayed:
    """Play a traffic episode again: the ``replay`` of :func:`grader.verify.verify_log`."""
    env = TrafficEnv()
    env.reset(seed=seed, task_id=str(task_id), config=config or {})
    for action in actions:
        env.step(action)
    return Replayed(env.episode_log, env.done, env.task.episode_length)


def _grade_log(wanted: GradeRequest) -> dict[str, Any]:
    assert wanted.task_id is not None
    assert wanted.episode_log is not None
    task_id, log = str(wanted.task_id), traffic_log(wanted.episode_log)
    traffic_config(wanted.config, get_traffic_task(task_id).config)
    verified = wanted.verify and len(log) > 0
    if verified:
        assert wanted.seed is not None
        verify_log(task_id, wanted.seed, wanted.config, log, replay_traffic)
    return {**grade_traffic(task_id, log), "verified": verified}


# ---------------------------------------------------------------- schemas


def _state_schema() -> Schema:
    properties = {name: schemas.field_schema(field) for name, field in STATE_FIELDS.items()}
    properties["crashed"] = {"type": "boolean", "description": STATE_FIELDS["crashed"].description}
    return {"type": "object", "properties": properties, "required": list(properties)}


def _task_id_schema() -> Schema:
    return {"type": "string", "enum": [task.task_id for task in list_traffic_tasks()]}


def _config_schema() -> Schema:
    properties = {n: {**nullable(schemas.field_schema(f)), "default": f.default} for n, f in CONFIG_FIELDS.items()}
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
        "description": "the server model; what is left out is the task's own",
    }


def _log_entry_schema() -> Schema:
    """A log entry, or an answer of step; that their steps follow one another no schema can say."""
    number, step = {"type": "number", "minimum": 0, "maximum": MAX_METRIC}, {"type": "integer", "minimum": 1}
    scored: Schema = {name: {"type": "boolean"} if name == "crashed" else number for name in SCORED}
    in_state = {name: scored[name] for name in scored if name in STATE_FIELDS}
    in_info = {name: scored[name] for name in scored if name not in STATE_FIELDS}
    in_info |= {"accept_rate": {"enum": list(ACCEPT_SHARES.values())}, "episode_step": step}
    name = {"type": "string", "enum": list(ACTION_NAMES)}
    entry = {
        "timestep": step,
        "action": {"anyOf": [name, schemas.closed(("action",), {"action": name})]},
        "reward": {"description": "counts when the log is verified"},
        "metrics": {"type": "object", "properties": scored, "required": list(scored)},
    }
    answer = {
        "state": {"type": "object", "properties": in_state, "required": list(in_state)},
        "info": {"type": "object", "properties": in_info, "required": list(in_info)},
        "metrics": {"not": {}},
    }
    return {
        "anyOf": [
            {"type": "object", "properties": entry, "required": ["timestep", "action", "metrics"]},
            # With metrics beside them, it is read as an entry.
            {"type": "object", "properties": answer, "required": ["state", "info"]},
        ]
    }


def _reset_schema() -> Schema:
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "task_id": {
                **nullable(_task_id_schema()),
                "default": DEFAULT_TASK_ID,
            },
            "seed": {**nullable(schemas.SEED_SCHEMA), "description": "recorded; these tasks have no randomness"},
            "config": nullable(_config_schema()),
            "session_id": {**nullable(schemas.SESSION_ID_SCHEMA), "description": "restart this session"},
        },
    }


def _reset_answer_schema() -> Schema:
    properties = {
        "state": _state_schema(),
        "task_id": {"type": "string"},
        "max_steps": {"type": "integer"},
        "config": {"type": "object"},
        "seed": schemas.SEED_SCHEMA,
        "session_id": {"type": "string"},
    }
    return {"type": "object", "properties": properties, "required": list(properties)}


def _step_schema() -> Schema:
    number = {"type": "integer", "minimum": 1, "maximum": schemas.MAX_STEP}
    return {
        "type": "object",
        "additionalProperties": False,
        "required": ["action"],
        "properties": {
            "action": {"type": "string", "enum": list(ACTION_NAMES)},
            "session_id": {**nullable(schemas.SESSION_ID_SCHEMA), "description": "without it, the latest episode"},
            "step": {**nullable(number), "description": "number of this step, from 1: makes sending it again safe"},
        },
    }


def _step_answer_schema() -> Schema:
    number, whole, flag = {"type": "number"}, {"type": "integer"}, {"type": "boolean"}
    info = {
        "incoming_requests": number,
        "allowed_requests": number,
        "accept_rate": number,
        "crashed": flag,
        "episode_step": whole,
        "max_steps": whole,
        "server_capacity": number,
    }
    at_the_end = {"final_score": {"type": "number", "minimum": 0, "maximum": 1}, "episode_done": flag}
    properties = {
        "state": _state_schema(),
        "reward": {"type": "number", "maximum": 1},
        "done": flag,
        "info": {"type": "object", "properties": {**info, **at_the_end}, "required": list(info)},
    }
    return {"type": "object", "properties": properties, "required": list(properties)}
