"""The root paths: /health /tasks /reset /step /state /grader /baseline /info and /openenv.yaml."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

import inferencegym
from grader.grader import GraderModule
from grader.verify import verify_log
from inferencegym import __version__
from inferencegym.errors import InvalidConfigError, StoreError
from inferencegym.tasks import TaskId, get_calibration, get_task, list_tasks
from server import schemas
from server.api.baseline import Baseline
from server.families import SERVING, replay_serving, served_tables
from server.middleware import SESSION_KEY, Callers
from server.net.errors import InvalidRequestError, SessionConflictError
from server.net.json_io import JsonReply, JsonRoute, object_of, read_object, reply
from server.net.metrics import Metrics
from server.schemas import GradeRequest, ResetRequest
from server.sessions.manager import Live, Outcome, SessionManager
from server.settings import Settings
from simulator.coverage import coverage

LARGE_LOG_ENTRIES: Final = 300
"""Longer logs are graded on a thread."""


@dataclass(slots=True)
class Context:
    """What the routes of one server share."""

    settings: Settings
    sessions: SessionManager
    callers: Callers
    baseline: Baseline
    metrics: Metrics
    started: float


class RootRoutes:
    """InferenceGym's own HTTP interface under ``prefix``."""

    def __init__(self, context: Context, prefix: str = "") -> None:
        self._context = context
        self._prefix = prefix
        self._settings = context.settings
        self._sessions = context.sessions
        self._grader = GraderModule()

    def routes(self) -> list[JsonRoute]:
        """The most used first: routes are tried in order."""
        step_errors = (400, 404, 409, 429, 503)
        session_id = {"name": "session_id", "in": "query", "required": False, "schema": {"type": "string"}}
        all_tasks = {"name": "all", "in": "query", "required": False, "schema": {"type": "boolean", "default": False}}
        return [
            JsonRoute(
                self._prefix + "/step",
                self.step,
                method="POST",
                summary="Play one second",
                request_schema=schemas.step_schema(),
                responses=documented(schemas.step_answer_schema(), *step_errors),
            ),
            JsonRoute(
                self._prefix + "/reset",
                self.reset,
                method="POST",
                summary="Start an episode",
                request_schema=schemas.reset_schema(),
                body_required=False,
                responses=documented(schemas.reset_answer_schema(), 404, 429, 503),
            ),
            JsonRoute(
                self._prefix + "/state",
                self.state,
                method="GET",
                summary="Where an episode stands",
                parameters=[session_id],
                responses=documented({"type": "object"}, 404, 503),
            ),
            JsonRoute(
                self._prefix + "/grader",
                self.grade,
                method="POST",
                summary="Score an episode",
                request_schema=schemas.grade_schema(),
                responses=documented({"type": "object"}, 404, 409, 429, 503),
            ),
            JsonRoute(
                self._prefix + "/health",
                self.health,
                method="GET",
                summary="Is the server ready?",
                responses=documented({"type": "object"}, 503),
            ),
            JsonRoute(
                self._prefix + "/tasks",
                self.tasks,
                method="GET",
                summary="What can be played",
                parameters=[all_tasks],
                responses=documented({"type": "object"}),
            ),
            JsonRoute(
                self._prefix + "/baseline",
                self.baseline,
                method="GET",
                summary="What an engine's defaults score",
                responses=documented({"type": "object"}, 429, 503),
            ),
            JsonRoute(
                self._prefix + "/info",
                self.info,
                method="GET",
                summary="Schemas, reward, calibration and provenance",
                responses=documented({"type": "object"}, 503),
            ),
            JsonRoute(
                self._prefix + "/metrics",
                self.metrics,
                method="GET",
                summary="What the server counts, for Prometheus",
                responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
            ),
            JsonRoute(
                self._prefix + "/openenv.yaml",
                self.manifest,
                method="GET",
                summary="The OpenEnv manifest",
                responses={200: {"content": {"application/yaml": {"schema": {"type": "object"}}}}},
            ),
        ]

    # ------------------------------------------------------------ playing

    async def step(self, request: Request) -> Response:
        session_id, action, number = schemas.parse_step(await self._body(request))
        request.scope[SESSION_KEY] = session_id
        return _stepped(await self._sessions.step(session_id, action, number, SERVING))

    def step_at_once(self, scope: Scope, body: bytes) -> JsonReply | None:
        """As :meth:`step` where nothing has to be waited for; else None, and nothing changed."""
        session_id, action, number = schemas.parse_step(object_of(scope, body, self._settings.max_body_bytes))
        scope[SESSION_KEY] = session_id
        outcome = self._sessions.step_at_once(session_id, action, number, SERVING)
        return None if outcome is None else _stepped(outcome)

    async def reset(self, request: Request) -> Response:
        wanted = ResetRequest.parse(await self._body(request))
        live, observation = await self._sessions.reset(
            SERVING,
            task_id=wanted.task_id,
            seed=wanted.seed,
            config=wanted.config or {},
            caller=self._context.callers.caller(request.scope),
            session_id=wanted.session_id,
        )
        request.scope[SESSION_KEY] = live.session_id
        start = live.start
        return reply(
            {
                "session_id": live.session_id,
                "task_id": start.task_id,
                "seed": start.seed,
                "observation": observation,
                "episode_length": start.config["episode_length"],
                "config": start.config,
                "reward": None,
                "done": False,
            }
        )

    async def state(self, request: Request) -> Response:
        named = request.query_params.get("session_id") or None
        session_id = named or await self._sessions.latest(self._context.callers.caller(request.scope))
        request.scope[SESSION_KEY] = session_id
        env = (await self._sessions.get(session_id, SERVING)).env
        state = {**env.state(), "observation": env.observation_dict()}
        if named is None:
            # Clients behind one address share "the most recent session": its id, which lets its holder play, is not
            # for the others.
            state = {key: value for key, value in state.items() if key != "session_id"}
        return reply(state)

    # ------------------------------------------------------------ grading

    async def grade(self, request: Request) -> Response:
        body = await read_object(request, self._settings.max_log_bytes, self._settings.body_timeout_s)
        wanted = GradeRequest.parse(body)
        if wanted.session_id is not None:
            request.scope[SESSION_KEY] = wanted.session_id
            return reply(await self._grade_session(wanted.session_id, wanted.task_id))
        assert wanted.episode_log is not None
        if len(wanted.episode_log) > LARGE_LOG_ENTRIES or wanted.verify:
            return reply(await asyncio.to_thread(self._grade_log, wanted))
        return reply(self._grade_log(wanted))

    def _grade_log(self, wanted: GradeRequest) -> dict[str, Any]:
        assert wanted.episode_log is not None
        assert wanted.task_id is not None
        get_task(wanted.task_id).config(wanted.config)
        verified = wanted.verify and len(wanted.episode_log) > 0
        if verified:
            assert wanted.seed is not None
            verify_log(wanted.task_id, wanted.seed, wanted.config, wanted.episode_log, replay_serving)
        return {**self._grader.score(wanted.task_id, wanted.episode_log), "verified": verified}

    async def _grade_session(self, session_id: str, task_id: TaskId | None) -> dict[str, Any]:
        live = await self._sessions.get(session_id, SERVING)
        must_play(live, task_id)
        # The log never left the server, so there is nothing to verify it against but itself.
        played, done = list(live.env.episode_log), live.env.done
        if len(played) > LARGE_LOG_ENTRIES:
            score = await asyncio.to_thread(self._grader.score, live.start.task_id, played)
        else:
            score = self._grader.score(live.start.task_id, played)
        return {**score, "verified": True, "done": done, "steps": len(played)}

    # ------------------------------------------------------------ telling

    async def health(self, _request: Request) -> Response:
        answer = {
            "status": self._settings.health_status,
            "active_sessions": len(self._sessions),
            "uptime_s": round(time.monotonic() - self._context.started, 3),
            "version": __version__,
            "store": self._sessions.store.name,
            # It is in memory before the first request is taken.
            "table_sha256": served_tables().sha256,
        }
        try:
            await self._sessions.store.ping()
        except StoreError as error:
            return reply({**answer, "status": "degraded", "store_error": str(error)}, 503, [(b"retry-after", b"1")])
        return reply(answer)

    async def metrics(self, request: Request) -> Response:
        body, content_type = self._context.metrics.exposition(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type, "cache-control": "no-store"})

    async def tasks(self, request: Request) -> Response:
        value = request.query_params.get("all", "false").lower()
        if value not in ("true", "false", "1", "0"):
            raise InvalidRequestError("all", value, "true or false")
        listed = list_tasks(include_recorded=value in ("true", "1"))
        return reply({"tasks": [schemas.task_description(task) for task in listed]})

    async def baseline(self, _request: Request) -> Response:
        return JsonReply(await self._context.baseline.get())

    async def info(self, _request: Request) -> Response:
        return reply(self._info)

    async def manifest(self, _request: Request) -> Response:
        return Response(self._manifest, media_type="application/yaml")

    @cached_property
    def _info(self) -> dict[str, Any]:
        return {
            "name": "InferenceGym",
            "version": __version__,
            "action": schemas.action_schema(),
            "observation": schemas.observation_schema(),
            "metrics": schemas.metrics_schema(),
            "workload": schemas.workload_schema(),
            "config": schemas.config_schema(),
            "log_entry": schemas.log_entry_schema(),
            "reward": {
                "formula": "alpha*throughput - beta*latency - gamma*slo_violations - delta*cost, every term in [0, 1]",
                "range": [-1.0, 1.0],
                "weights": {str(task.task_id): asdict(task.reward) for task in list_tasks(include_recorded=True)},
            },
            "calibration": {str(t.task_id): _calibration(t.task_id) for t in list_tasks(include_recorded=True)},
            # The times themselves stay in the file: here is where they come from and how well they are supported.
            "data": {name: value for name, value in served_tables().meta.items() if not name.startswith("iteration_")},
            "coverage": coverage(served_tables()),
            "limits": {
                "max_body_bytes": self._settings.max_body_bytes,
                "max_log_bytes": self._settings.max_log_bytes,
                "session_ttl_s": self._settings.session_ttl_s,
            },
        }

    @cached_property
    def _manifest(self) -> bytes:
        package = Path(inferencegym.__file__).parent
        places = (package.parent / "openenv.yaml", package / "openenv.yaml")
        return next(place for place in places if place.exists()).read_bytes()

    async def _body(self, request: Request) -> dict[str, Any]:
        return await read_object(request, self._settings.max_body_bytes, self._settings.body_timeout_s)


def _stepped(outcome: Outcome) -> JsonReply:
    return reply(
        {
            "observation": outcome.observation,
            "reward": outcome.reward,
            "done": outcome.done,
            "info": outcome.info(),
        }
    )


def must_play(live: Live, task_id: TaskId | None) -> None:
    """Raise SessionConflictError if a task is named and the session plays another one."""
    played = live.start.task_id
    if task_id is not None and str(task_id) != str(played):
        raise SessionConflictError(f"session {live.session_id!r} plays task {played!r}, not {task_id!r}")


def _calibration(task_id: TaskId) -> dict[str, float] | None:
    try:
        return asdict(get_calibration(task_id))
    except InvalidConfigError:
        return None  # a user's own task that was not calibrated yet


_STATUS_TEXTS: Final = {
    400: "The request cannot be answered as things stand (the episode is over, for one)",
    401: "The API key is missing or wrong",
    403: "A page of another origin wants to do more than read",
    404: "There is no such session, or no such environment",
    408: "The body did not arrive in time",
    409: "Another action was already accepted for this step, or the session plays another task",
    413: "The body is too large",
    415: "The body is not JSON",
    422: "A field is missing, unknown or out of range",
    429: "Too many requests; see Retry-After",
    503: "The store or the table cannot be used now; see Retry-After",
}


def documented(schema: Mapping[str, Any], *statuses: int) -> dict[int | str, dict[str, Any]]:
    """The answer 200, the errors of these statuses, and those that any path with a body may give."""
    ok = {"description": "OK", "content": {"application/json": {"schema": dict(schema)}}}
    return {200: ok, **documented_errors(401, 403, 408, 413, 415, 422, *statuses)}


def documented_errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Errors by status, all in the one form."""
    content = {"application/json": {"schema": schemas.detail_schema()}}
    return {status: {"description": _STATUS_TEXTS[status], "content": content} for status in sorted({*statuses})}
