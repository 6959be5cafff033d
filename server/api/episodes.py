"""HTTP endpoints of an environment family; its record has the shapes that differ (:class:`env.family.HttpShape`)."""

from __future__ import annotations

import asyncio
import time
from functools import cache, cached_property, partial
from typing import Annotated, Any, Final

from fastapi import Query
from pydantic import BaseModel
from pydantic.json_schema import SkipJsonSchema
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from agents.families import players_of
from env.families import SERVING
from env.family import Family, Grade
from inferencegym import __version__
from inferencegym.errors import StoreError, short_repr
from inferencegym.messages import Allowed, plain_schema
from server.api.grading import grade_log
from server.api.route import Route, Routes
from server.context import Context, Mount
from server.net.cpu import on_thread
from server.net.errors import SessionConflictError
from server.net.json_io import (
    MAX_BODY_BYTES,
    SESSION_KEY,
    SMALL_LOG_BYTES,
    JsonReply,
    gzipped,
    parse_body,
    read_body,
    reply,
    to_gzip,
    to_json,
)
from server.schemas import (
    DEFAULT_SEED,
    GradeAnswer,
    GradeRequest,
    HealthAnswer,
    ResetRequest,
    StepRequest,
    TasksAnswer,
    grade_request,
    read_request,
    reset_answer,
    reset_request,
    step_answer,
    step_request,
)
from server.sessions.manager import LiveSession

MAX_LOG_BYTES: Final = 12_582_912
"""Longest body of /grader: the longest episode's log, with some margin."""


LatestByDefault = Annotated[str | SkipJsonSchema[None], Query(description="without it, the caller's latest episode")]


class TasksQuery(BaseModel):
    """Query of GET /tasks."""

    all: Annotated[bool, Allowed("true or false")] = False


class EpisodeRoutes(Routes):
    """The endpoints of one family at one prefix."""

    def __init__(self, context: Context, mount: Mount) -> None:
        super().__init__(context, mount)
        self._sessions = context.sessions
        self._cookie = f"inferencegym_{mount.family.name}"
        self._computing_baseline = asyncio.Lock()
        # Read at start, so that an error in a user's task file stops the start and not the first request.
        self._tasks = list(mount.family.tasks())

    def routes(self) -> list[Route]:
        family = self._family
        more: dict[str, Any] = {"response_model_exclude_unset": True}
        info = dict[str, Any]
        stepped = {"types": {"body": step_request(family)}, "response_model": step_answer(family), **more}
        started = {"types": {"body": (reset_request(family), None)}, "response_model": reset_answer(family), **more}
        # Without a body, the caller's latest episode is graded.
        grading = (grade_request(family), None) if family.http.session_is_optional else grade_request(family)
        graded = {"types": {"body": grading}, "statuses": (400, 404, 409, 410), **more}
        graded |= {"most_bytes": MAX_LOG_BYTES, "bounds": None, "elsewhere": self._grade_elsewhere}
        routes = [
            self._step("/step", self.step, "Play one second", statuses=(400, 404, 409, 410), **stepped),
            self._post("/reset", self.reset, "Start an episode", statuses=(400, 404), **started),
            self._route("/state", self.state, "State of an episode", statuses=(404, 410), **more),
            self._post("/grader", self.grade, "Score an episode", **graded),
            self._route("/health", self.health, "Health of the server", **more),
            self._route("/tasks", self.tasks, "List of tasks", response_model=TasksAnswer, **more),
            self._route("/info", self.info, "Schemas, reward, calibration and provenance", response_model=info, **more),
        ]
        if players_of(family).baseline is not None:
            routes.append(
                self._route("/baseline", self.baseline, "Scores of the baselines", response_model=info, **more)
            )
        if family.manifest is not None:
            yaml = {200: {"content": {family.http.manifest_type: {"schema": {"type": "object"}}}}}
            more |= {"response_class": Response, "responses": yaml}
            routes.append(self._route("/openenv.yaml", self.manifest, "The OpenEnv manifest", **more))
        return routes

    # ------------------------------------------------------------ playing

    async def step(self, request: Request) -> Response:
        body = await parse_body(await read_body(request))
        if self._family.http.session_is_optional and body.get("session_id") is None:
            body["session_id"] = await self._latest_of(request)
        wanted = read_request(StepRequest, body)
        request.scope[SESSION_KEY] = wanted.session_id
        result = await self._sessions.step(wanted.session_id, wanted.action, wanted.step, self._family.name)
        observation = {self._family.http.observation_key: result.observation}
        return reply({**observation, "reward": result.reward, "done": result.done, "info": result.info()})

    async def reset(self, request: Request, body: ResetRequest) -> Response:
        live, observation = await self._sessions.reset(
            self._family.name,
            task_id=self._family.default_task if body.task_id is None else body.task_id,
            seed=DEFAULT_SEED if body.seed is None else body.seed,
            config=body.config or {},
            caller=self._context.caller(self._family, request.scope),
            session_id=body.session_id,
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

    async def state(self, request: Request, session_id: LatestByDefault = None) -> dict[str, Any]:
        live = await self._live(request, session_id or await self._latest_of(request))
        state = live.env.state()
        if self._family.http.state_has_observation:
            state = {**state, "observation": live.env.observation_dict()}
        if not session_id:
            # Clients behind one address share the latest session, and anyone who knows its id can play it.
            del state["session_id"]
        return state

    # ------------------------------------------------------------ grading

    async def grade(self, request: Request, body: GradeRequest) -> GradeAnswer:
        session_id = body.session_id
        if body.grades_latest and session_id is None and body.episode_log is None:
            session_id = await self._latest_of(request)
        if session_id is not None:
            return GradeAnswer(**await self._grade_session(request, session_id, body))
        return GradeAnswer(**await on_thread(partial(grade_log, self._family, body)))

    async def _grade_elsewhere(self, body: bytes) -> bytes | None:
        """Answer to a body that is too long to be read here; None for others."""
        if len(body) <= SMALL_LOG_BYTES:
            return None
        return await self._context.sessions.elsewhere.run("grade", self._family.name, body)

    async def _grade_session(self, request: Request, session_id: str, wanted: GradeRequest) -> Grade:
        live = await self._live(request, session_id)
        # Under the lock, because another request could restart the session meanwhile.
        async with live.lock:
            played_id, task_id = live.record.task_id, wanted.task_id
            # The session's own configuration counts; one that is sent along has to be valid all the same.
            self._family.check_config(played_id, wanted.config)
            if task_id is not None and str(task_id) != str(played_id):
                said = f"session {session_id!r} plays task {played_id!r}, not {short_repr(task_id)}"
                raise SessionConflictError(said)
            graded = await on_thread(live.env.grade)
            own_config = self._family.is_own_config(played_id, live.record.config)
            about = {"done": live.env.done, "steps": live.env.n_entries}
            # The server recorded the log, so there is nothing to verify.
            return {**graded, "verified": True, "own_config": own_config, **about}

    # ------------------------------------------------------------ information

    async def health(self, response: Response) -> HealthAnswer:
        if self._prefix and self._family.http.health is not None:
            return HealthAnswer(**self._family.http.health)
        answer = HealthAnswer(
            status=self._settings.health_status,
            active_sessions=len(self._sessions),
            uptime_s=round(time.monotonic() - self._context.started, 3),
            version=__version__,
            store=self._sessions.store.name,
            table_sha256=self._sessions.families[SERVING].table_sha256(),
        )
        try:
            if damage := await self._sessions.ping():
                answer.store_damage = damage
        except StoreError as error:
            response.status_code = 503
            response.headers["retry-after"] = "1"
            return answer.model_copy(update={"status": "degraded", "store_error": str(error)})
        return answer

    async def tasks(self, request: Request, query: Annotated[TasksQuery, Query()]) -> Response:
        return await gzipped(request, self._listed[query.all])

    @cached_property
    def _listed(self) -> tuple[bytes, bytes]:
        """Answers of GET /tasks, gzipped: the tasks of everybody, and all."""
        every = [task.description for task in self._tasks]
        shown = [task.description for task in self._tasks if not task.recorded]
        hidden = len(every) - len(shown)
        more = f"GET {self._prefix}/tasks?all=true lists {hidden} more: recorded traffic, other cards, grades, replicas"
        return to_gzip({"tasks": shown, **({"more": more} if hidden else {})}), to_gzip({"tasks": every})

    async def baseline(self) -> Response:
        """Scores of the baseline, computed once: concurrent callers wait for the same result."""
        async with self._computing_baseline:
            return JsonReply(await asyncio.to_thread(_baseline_json, self._family))

    async def info(self, request: Request) -> Response:
        return await gzipped(request, self._info)

    async def manifest(self) -> Response:
        assert self._family.manifest is not None
        return FileResponse(self._family.manifest, media_type=self._family.http.manifest_type)

    @cached_property
    def _info(self) -> bytes:
        family = self._family
        info = {
            "name": family.title,
            "version": __version__,
            "action": plain_schema(family.action_model),
            "observation": plain_schema(family.observation_model),
            "config": plain_schema(family.config_model),
            "log_entry": family.log_entry_schema,
            **family.info(),
            "limits": {
                "max_body_bytes": MAX_BODY_BYTES,
                "max_log_bytes": MAX_LOG_BYTES,
                "session_ttl_s": self._settings.session_ttl_s,
            },
        }
        return to_gzip(info)

    # ------------------------------------------------------------ the session of a request

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


@cache
def _baseline_json(family: Family) -> bytes:
    baseline = players_of(family).baseline
    assert baseline is not None
    return to_json(baseline())
