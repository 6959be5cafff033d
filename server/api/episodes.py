"""HTTP endpoints of an environment family: /step /reset /state /grader /health /tasks /baseline /info /openenv.yaml.

Every family is served by the same endpoints; where its published document asks for other shapes, its record says so
(:class:`env.family.HttpShape`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import cached_property
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from env.family import Grade
from grader.verify import verify_log
from inferencegym import __version__
from inferencegym.errors import StoreError, short_repr
from inferencegym.families import SERVING
from inferencegym.messages import plain_schema
from inferencegym.task_registry import MAX_EPISODE_LENGTH
from inferencegym.tasks import TaskId
from server import schemas
from server.context import Context, Mount
from server.net.errors import InvalidRequestError, SessionConflictError
from server.net.json_io import (
    MAX_VALUES,
    SESSION_KEY,
    JsonBounds,
    JsonReply,
    JsonRoute,
    read_object,
    reply,
    to_json,
)
from server.net.problems import documented
from server.schemas import GradeRequest, ResetRequest, StepRequest, read_request
from server.sessions.manager import LiveSession, StepResult

LARGE_LOG_ENTRIES: Final = 300
"""Longer logs are graded on a thread."""
LOG_BOUNDS: Final = JsonBounds(
    values=72 * MAX_EPISODE_LENGTH + MAX_VALUES,
    arrays=12 * MAX_EPISODE_LENGTH + MAX_VALUES,
    texts=2 * MAX_EPISODE_LENGTH + MAX_VALUES,
)
"""Bounds of a body of POST /grader. An answer of POST /step, which may stand for a log's entry, has some 55 values,
nine of them arrays and objects."""

Endpoint = Callable[[Request], Awaitable[Response]]


class EpisodeRoutes:
    """The endpoints of one family at one prefix."""

    def __init__(self, context: Context, mount: Mount) -> None:
        self._context = context
        self._family = mount.family
        self._prefix = mount.prefix
        self._settings = context.settings
        self._sessions = context.sessions
        self._baseline: asyncio.Task[bytes] | None = None
        # Read at start, so that an error in a user's task file stops the start and not the first request.
        self._tasks = list(mount.family.tasks())

    def routes(self) -> list[JsonRoute]:
        """Routes of these endpoints, the most used first, since they are tried in order."""
        family, any_object = self._family, {"type": "object"}
        session_id = {"name": "session_id", "in": "query", "required": False, "schema": {"type": "string"}}
        all_tasks = {"name": "all", "in": "query", "required": False, "schema": {"type": "boolean", "default": False}}
        yaml: dict[int | str, dict[str, Any]] = {200: {"content": {family.http.manifest_type: {"schema": any_object}}}}
        stepped, started = schemas.step_answer_schema(family), schemas.reset_answer_schema(family)
        graded = schemas.grade_answer_schema()
        routes = [
            self._post("/step", self.step, "Play one second", schemas.step_schema(family), stepped, 400, 409),
            self._post("/reset", self.reset, "Start an episode", schemas.reset_schema(family), started, 400),
            self._get("/state", self.state, "State of an episode", (404, 503), parameters=[session_id]),
            self._post("/grader", self.grade, "Score an episode", schemas.grade_schema(family), graded, 400, 409),
            self._get("/health", self.health, "Health of the server", (503,)),
            self._get("/tasks", self.tasks, "List of tasks", (), parameters=[all_tasks]),
            self._get("/info", self.info, "Schemas, reward, calibration and provenance", (503,)),
        ]
        if family.baseline is not None:
            routes.append(self._get("/baseline", self.baseline, "Scores of the baselines", (429, 503)))
        if family.manifest is not None:
            routes.append(self._route("GET", "/openenv.yaml", self.manifest, "The OpenEnv manifest", yaml))
        return routes

    def _post(
        self,
        path: str,
        endpoint: Endpoint,
        summary: str,
        request: schemas.Schema,
        answer: schemas.Schema,
        *statuses: int,
    ) -> JsonRoute:
        answers = documented(answer, 404, 429, 503, *statuses)
        required = bool(request.get("required")) or "oneOf" in request
        return self._route("POST", path, endpoint, summary, answers, request_schema=request, body_required=required)

    def _get(self, path: str, endpoint: Endpoint, summary: str, statuses: tuple[int, ...], **more: Any) -> JsonRoute:
        return self._route("GET", path, endpoint, summary, documented({"type": "object"}, *statuses), **more)

    def _route(
        self,
        method: str,
        path: str,
        endpoint: Endpoint,
        summary: str,
        answers: dict[int | str, dict[str, Any]],
        **more: Any,
    ) -> JsonRoute:
        tags = [self._family.name]
        return JsonRoute(
            self._prefix + path, endpoint, method=method, summary=summary, tags=tags, responses=answers, **more
        )

    # ------------------------------------------------------------ playing

    async def step(self, request: Request) -> Response:
        body = await self._body(request)
        if self._family.http.session_is_optional and body.get("session_id") is None:
            body["session_id"] = await self._latest_of(request)
        wanted = read_request(StepRequest, body)
        request.scope[SESSION_KEY] = wanted.session_id
        result = await self._sessions.step(wanted.session_id, wanted.action, wanted.step, self._family.name)
        return reply(self._step_answer(result))

    def _step_answer(self, result: StepResult) -> dict[str, Any]:
        return {
            self._family.http.observation_key: result.observation,
            "reward": result.reward,
            "done": result.done,
            "info": result.info(),
        }

    async def reset(self, request: Request) -> Response:
        wanted = read_request(ResetRequest, await self._body(request))
        live, observation = await self._sessions.reset(
            self._family.name,
            task_id=self._family.default_task if wanted.task_id is None else wanted.task_id,
            seed=schemas.DEFAULT_SEED if wanted.seed is None else wanted.seed,
            config=wanted.config or {},
            caller=self._context.caller(self._family, request.scope),
            session_id=wanted.session_id,
        )
        request.scope[SESSION_KEY] = live.session_id
        record, length = live.record, live.env.episode_length
        more = {
            "episode_length": length,
            "max_steps": length,
            "config": record.config,
            "reward": None,
            "done": False,
        }
        answer = {
            "session_id": live.session_id,
            "task_id": record.task_id,
            "seed": record.seed,
            self._family.http.observation_key: observation,
            **{name: more[name] for name in self._family.http.reset_fields},
        }
        return reply(answer, headers=self._cookie_header(live.session_id))

    async def state(self, request: Request) -> Response:
        named = request.query_params.get("session_id") or None
        live = await self._live(request, named or await self._latest_of(request))
        state = live.env.state()
        if self._family.http.state_has_observation:
            state = {**state, "observation": live.env.observation_dict()}
        if named is None:
            # Clients behind one address share "the most recent session", so its id, with which anyone can play it, is
            # left out.
            del state["session_id"]
        return reply(state)

    # ------------------------------------------------------------ grading

    async def grade(self, request: Request) -> Response:
        most_bytes, timeout_s = self._settings.max_log_bytes, self._settings.body_timeout_s
        body = await read_object(request, most_bytes, timeout_s, LOG_BOUNDS)
        wanted = read_request(GradeRequest, body)
        wanted.check()
        if wanted.session_id is not None:
            return reply(await self._grade_session(request, wanted.session_id, wanted.task_id))
        if len(wanted.episode_log or ()) > LARGE_LOG_ENTRIES or wanted.verify:
            return reply(await asyncio.to_thread(self._grade_log, wanted))
        return reply(self._grade_log(wanted))

    def _grade_log(self, wanted: GradeRequest) -> Grade:
        family, task_id = self._family, wanted.task_id
        assert wanted.episode_log is not None
        assert task_id is not None
        own_config = family.is_own_config(task_id, wanted.config)
        task_id = family.played_id(task_id, wanted.config)
        entries = family.log_entries(wanted.episode_log)
        if not wanted.verify or not entries:
            return {**family.grade(task_id, entries), "verified": False, "own_config": own_config}
        assert wanted.seed is not None
        replayed = verify_log(family, task_id, wanted.seed, wanted.config, entries)
        return {**family.grade(task_id, replayed.episode_log), "verified": True, "own_config": own_config}

    async def _grade_session(self, request: Request, session_id: str, task_id: TaskId | None) -> Grade:
        live = await self._live(request, session_id)
        # Read before grading: another request may restart the session while this one is graded on a thread.
        record = live.record
        played_id = record.task_id
        if task_id is not None and str(task_id) != str(played_id):
            raise SessionConflictError(f"session {session_id!r} plays task {played_id!r}, not {short_repr(task_id)}")
        # The log was recorded by the server, so there is nothing to verify.
        played, done = list(live.env.episode_log), live.env.done
        if len(played) > LARGE_LOG_ENTRIES:
            grade = await asyncio.to_thread(self._family.grade, played_id, played)
        else:
            grade = self._family.grade(played_id, played)
        own_config = self._family.is_own_config(played_id, record.config)
        return {**grade, "verified": True, "own_config": own_config, "done": done, "steps": len(played)}

    # ------------------------------------------------------------ information

    async def health(self, _request: Request) -> Response:
        if self._prefix and self._family.http.health is not None:
            return reply(self._family.http.health)
        answer = {
            "status": self._settings.health_status,
            "active_sessions": len(self._sessions),
            "uptime_s": round(time.monotonic() - self._context.started, 3),
            "version": __version__,
            "store": self._sessions.store.name,
            "table_sha256": self._sessions.families[SERVING].table_sha256(),
        }
        try:
            await self._sessions.ping()
        except StoreError as error:
            return reply({**answer, "status": "degraded", "store_error": str(error)}, 503, [(b"retry-after", b"1")])
        return reply(answer)

    async def tasks(self, request: Request) -> Response:
        value = request.query_params.get("all", "false").lower()
        if value not in ("true", "false", "1", "0"):
            raise InvalidRequestError("all", value, "true or false")
        recorded = value in ("true", "1")
        shown = [task.description for task in self._tasks if recorded or not task.recorded]
        hidden = len(self._tasks) - len(shown)
        more = f"GET {self._prefix}/tasks?all=true lists {hidden} more: recorded traffic, and other cards and models"
        return reply({"tasks": shown, **({"more": more} if hidden else {})})

    async def baseline(self, _request: Request) -> Response:
        """Scores of the baseline, computed once: callers that come meanwhile wait for the same result."""
        task = self._baseline
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._baseline = asyncio.create_task(asyncio.to_thread(self._baseline_json))
        # A client that goes away must not take the computation from the others.
        return JsonReply(await asyncio.shield(task))

    def _baseline_json(self) -> bytes:
        assert self._family.baseline is not None
        return to_json(self._family.baseline())

    async def info(self, _request: Request) -> Response:
        return reply(self._info)

    async def manifest(self, _request: Request) -> Response:
        return Response(self._manifest, media_type=self._family.http.manifest_type)

    @cached_property
    def _info(self) -> Mapping[str, Any]:
        family = self._family
        return {
            "name": family.title,
            "version": __version__,
            "action": plain_schema(family.action_model),
            "observation": plain_schema(family.observation_model),
            "config": plain_schema(family.config_model),
            "log_entry": family.log_entry_schema,
            **family.info(),
            "limits": {
                "max_body_bytes": self._settings.max_body_bytes,
                "max_log_bytes": self._settings.max_log_bytes,
                "session_ttl_s": self._settings.session_ttl_s,
            },
        }

    @cached_property
    def _manifest(self) -> bytes:
        assert self._family.manifest is not None
        return self._family.manifest.read_bytes()

    # ------------------------------------------------------------ the session of a request

    @property
    def _cookie(self) -> str:
        return f"inferencegym_{self._family.name}"

    def _cookie_header(self, session_id: str) -> list[tuple[bytes, bytes]]:
        """Set-Cookie header with which browsers and HTTP clients with cookies name their latest episode."""
        if not self._family.http.session_is_optional:
            return []
        cookie = f"{self._cookie}={session_id}; Path={self._prefix or '/'}; HttpOnly; SameSite=Lax"
        return [(b"set-cookie", cookie.encode())]

    async def _latest_of(self, request: Request) -> str:
        """Session id for a request without one: the cookie's, or else the session that this caller started last."""
        cookie = request.cookies.get(self._cookie) if self._family.http.session_is_optional else None
        return cookie or await self._sessions.latest(self._context.caller(self._family, request.scope))

    async def _live(self, request: Request, session_id: str) -> LiveSession:
        request.scope[SESSION_KEY] = session_id
        return await self._sessions.get(session_id, self._family.name)

    async def _body(self, request: Request) -> dict[str, Any]:
        return await read_object(request, self._settings.max_body_bytes, self._settings.body_timeout_s)
