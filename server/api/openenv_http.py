"""HTTP endpoints of OpenEnv's protocol: /metadata, /schema, /mcp, /list_environments and the Task API of a family."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, create_model
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from inferencegym.errors import short_repr
from inferencegym.messages import WHOLE, Message, plain_schema
from server.api.mcp import PARSE_ERROR, SESSION_HEADER, McpTools, rpc_error
from server.context import Context, Mount
from server.net.errors import InvalidJsonError
from server.net.json_io import SMALL, JsonRoute, parse_object, read_body, read_object, reply
from server.net.problems import documented
from server.schemas import read_request
from server.sessions.manager import new_session_id

M = TypeVar("M", bound=Message)
# Any index of a list may be asked for, so that it can be said which are there.
Index = Annotated[int, Field(ge=-(2**31), lt=2**31), WHOLE]


class SplitRequest(Message):
    """Names a split of the Task API: ``train`` or ``test``."""

    split: str


class TaskRequest(SplitRequest):
    """Names one task of a split, counting from 0."""

    index: Index


class TaskRangeRequest(SplitRequest):
    """Names the tasks from ``start`` up to ``stop`` of a split, as a Python slice."""

    start: Index | None = None
    stop: Index | None = None


class StateMessage(BaseModel):
    """State of an episode; a family adds its own fields."""

    model_config = ConfigDict(extra="allow")

    episode_id: str | None = None
    step_count: int = Field(0, ge=0)
    task_id: int | str | None = None
    seed: int | None = None
    cumulative_reward: float | None = None
    done: bool | None = None


class InfoRoutes:
    """OpenEnv's HTTP endpoints with information on one family."""

    def __init__(self, context: Context, mount: Mount, tools: McpTools) -> None:
        self._tools = tools
        self._settings = context.settings
        self._family = mount.family
        self._prefix = mount.prefix

    def routes(self) -> list[JsonRoute]:
        """Routes of these endpoints; those of the Task API last, because ``{env_name}`` matches any text."""
        any_object: dict[str, Any] = {"type": "object"}
        listed = {"type": "array", "items": any_object}
        names = {"type": "array", "items": {"type": "string"}}
        return [
            self._route("GET", "/metadata", self.metadata, "Name, description, version, author, readme", any_object),
            self._route("GET", "/schema", self.schema, "Schemas of action, observation and state", any_object),
            self._route("POST", "/mcp", self.mcp, "MCP tools: JSON-RPC, as MCP and OpenEnv have it", any_object),
            self._route("GET", "/list_environments", self.environments, "Names for the Task API", names),
            self._task_route("GET", "splits", self.splits, "Splits that have tasks", listed),
            self._task_route("POST", "tasks", self.tasks, "Tasks of a split", any_object, SplitRequest),
            self._task_route("POST", "num_tasks", self.num_tasks, "Number of tasks", any_object, SplitRequest),
            self._task_route("POST", "task", self.task, "One task of a split", any_object, TaskRequest),
            self._task_route("POST", "task_range", self.task_range, "Some tasks", any_object, TaskRangeRequest),
        ]

    def _route(
        self,
        method: str,
        path: str,
        endpoint: Callable[[Request], Awaitable[Response]],
        summary: str,
        answer: Mapping[str, Any],
        request_schema: Mapping[str, Any] | None = None,
        statuses: Sequence[int] = (),
        **more: Any,
    ) -> JsonRoute:
        return JsonRoute(
            self._prefix + path,
            endpoint,
            method=method,
            summary=summary,
            tags=[f"{self._family.name}: OpenEnv"],
            request_schema=request_schema,
            responses=documented(answer, *statuses),
            **more,
        )

    def _task_route(
        self,
        method: str,
        name: str,
        endpoint: Callable[[Request], Awaitable[Response]],
        summary: str,
        answer: Mapping[str, Any],
        request: type[Message] | None = None,
    ) -> JsonRoute:
        env_name = {"name": "env_name", "in": "path", "required": True, "schema": {"type": "string"}}
        env_name["example"] = self._family.env_name
        schema = None if request is None else plain_schema(request)
        path = f"/{{env_name}}/{name}"
        return self._route(method, path, endpoint, summary, answer, schema, (400, 404), parameters=[env_name])

    async def metadata(self, _request: Request) -> Response:
        return reply(self._metadata)

    async def schema(self, _request: Request) -> Response:
        return reply(self._schemas)

    @cached_property
    def _metadata(self) -> dict[str, Any]:
        return self._family.metadata()

    @cached_property
    def _schemas(self) -> dict[str, Any]:
        family = self._family
        action = create_model(
            "Action",
            __base__=family.action_model,
            metadata=(dict[str, Any], Field({}, description="step: number of the step, from 1")),
        )
        observation = create_model(
            "Observation",
            __base__=family.observation_model,
            reward=(float | None, Field(None, description="of the step; null after a reset")),
            done=(bool, Field(False, description="whether the episode is over")),
            info=(dict[str, Any] | None, Field(None, description="more about the step, where the reset asked for it")),
        )
        seen = plain_schema(observation)
        state = plain_schema(StateMessage)
        return {"action": plain_schema(action), "observation": seen, "reset_observation": seen, "state": state}

    async def mcp(self, request: Request) -> Response:
        body = await read_body(request, self._settings.max_body_bytes, self._settings.body_timeout_s, SMALL)
        try:
            sent = parse_object(body)
        except InvalidJsonError as error:
            return reply(rpc_error(PARSE_ERROR, str(error)))
        session_id = request.headers.get(SESSION_HEADER.decode())
        answer = await self._tools.answer(sent, session_id, request.scope)
        if answer is None:
            return Response(status_code=202)
        begun = [(SESSION_HEADER, new_session_id().encode())] if sent.get("method") == "initialize" else []
        return reply(answer, headers=begun)

    async def environments(self, _request: Request) -> Response:
        return reply([self._family.env_name])

    async def splits(self, request: Request) -> Response:
        self._check_name(request)
        return reply([{"name": name, "type": name} for name in self._family.splits()])

    async def tasks(self, request: Request) -> Response:
        wanted = await self._read(request, SplitRequest)
        return reply({"tasks": self._described(wanted.split), "env_name": self._family.env_name})

    async def num_tasks(self, request: Request) -> Response:
        wanted = await self._read(request, SplitRequest)
        return reply({"num_tasks": len(self._described(wanted.split))})

    async def task(self, request: Request) -> Response:
        wanted = await self._read(request, TaskRequest)
        tasks = self._described(wanted.split)
        if not 0 <= wanted.index < len(tasks):
            raise HTTPException(400, f"index {wanted.index} names no task: {short_repr(wanted.split)} has {len(tasks)}")
        return reply({"task": tasks[wanted.index]})

    async def task_range(self, request: Request) -> Response:
        wanted = await self._read(request, TaskRangeRequest)
        return reply({"tasks": self._described(wanted.split)[wanted.start : wanted.stop]})

    def _described(self, split: str) -> list[Mapping[str, Any]]:
        """All tasks of a split; an unknown split has none."""
        return [task.description for task in self._family.splits().get(split, [])]

    async def _read(self, request: Request, model: type[M]) -> M:
        self._check_name(request)
        body = await read_object(request, self._settings.max_body_bytes, self._settings.body_timeout_s)
        return read_request(model, body)

    def _check_name(self, request: Request) -> None:
        """OpenEnv's clients may write the name with capitals."""
        name = request.path_params["env_name"]
        if name.lower() != self._family.env_name.lower():
            raise HTTPException(404, f"no environment {short_repr(name)} is served here, but {self._family.env_name!r}")
