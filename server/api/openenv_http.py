"""HTTP endpoints of OpenEnv's protocol: /metadata, /schema, /mcp, /list_environments and the Task API of a family."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any

from fastapi import Path
from pydantic import BaseModel, ConfigDict, Field, create_model
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from inferencegym.errors import short_repr
from inferencegym.messages import WHOLE, Message, plain_schema
from server.api.mcp import PARSE_ERROR, SESSION_HEADER, McpTools, rpc_error
from server.api.route import Route, Routes
from server.context import Context, Mount
from server.net.errors import InvalidJsonError
from server.net.json_io import parse_body, read_body, reply
from server.sessions.session import new_session_id

# Any index is accepted here, so that the error can list the valid ones.
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


class Split(BaseModel):
    """A split that has tasks."""

    name: str
    type: str


class StateMessage(BaseModel):
    """State of an episode; a family adds its own fields."""

    model_config = ConfigDict(extra="allow")

    episode_id: str | None = None
    step_count: int = Field(0, ge=0)
    task_id: int | str | None = None
    seed: int | None = None
    cumulative_reward: float | None = None
    done: bool | None = None


class InfoRoutes(Routes):
    """OpenEnv's HTTP endpoints with information on one family."""

    def __init__(self, context: Context, mount: Mount, tools: McpTools) -> None:
        super().__init__(context, mount)
        self._tag = f"{mount.family.name}: OpenEnv"
        self._tools = tools

    def routes(self) -> list[Route]:
        """Routes of these endpoints; those of the Task API last, because ``{env_name}`` matches any text."""
        named = {"env_name": Annotated[str, Path(examples=[self._family.env_name])]}
        of_tasks: dict[str, Any] = {"types": named, "statuses": (400, 404)}
        rpc: dict[str, Any] = {"method": "POST", "response_model": dict[str, Any]}
        return [
            self._route("/metadata", self.metadata, "Name, description, version, author, readme"),
            self._route("/schema", self.schema, "Schemas of action, observation and state"),
            self._route("/mcp", self.mcp, "MCP tools: JSON-RPC, as MCP and OpenEnv have it", **rpc),
            self._route("/list_environments", self.environments, "Names for the Task API"),
            self._route("/{env_name}/splits", self.splits, "Splits that have tasks", **of_tasks),
            self._post("/{env_name}/tasks", self.tasks, "Tasks of a split", **of_tasks),
            self._post("/{env_name}/num_tasks", self.num_tasks, "Number of tasks", **of_tasks),
            self._post("/{env_name}/task", self.task, "One task of a split", **of_tasks),
            self._post("/{env_name}/task_range", self.task_range, "Some tasks", **of_tasks),
        ]

    async def metadata(self) -> dict[str, Any]:
        return self._family.metadata()

    async def schema(self) -> dict[str, Any]:
        return self._schemas

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
        body = await read_body(request)
        try:
            sent = await parse_body(body)
        except InvalidJsonError as error:
            return reply(rpc_error(PARSE_ERROR, str(error)))
        session_id = request.headers.get(SESSION_HEADER.decode())
        answer = await self._tools.answer(sent, session_id, request.scope)
        if answer is None:
            return Response(status_code=202)
        begun = [(SESSION_HEADER, new_session_id().encode())] if sent.get("method") == "initialize" else []
        return reply(answer, headers=begun)

    async def environments(self) -> list[str]:
        return [self._family.env_name]

    async def splits(self, env_name: str) -> list[Split]:
        self._check_name(env_name)
        return [Split(name=name, type=name) for name in self._family.splits()]

    async def tasks(self, env_name: str, body: SplitRequest) -> dict[str, Any]:
        self._check_name(env_name)
        return {"tasks": self._family.specs(body.split), "env_name": self._family.env_name}

    async def num_tasks(self, env_name: str, body: SplitRequest) -> dict[str, int]:
        self._check_name(env_name)
        return {"num_tasks": len(self._family.specs(body.split))}

    async def task(self, env_name: str, body: TaskRequest) -> dict[str, Any]:
        self._check_name(env_name)
        tasks = self._family.specs(body.split)
        if not 0 <= body.index < len(tasks):
            raise HTTPException(400, f"index {body.index} names no task: {short_repr(body.split)} has {len(tasks)}")
        return {"task": tasks[body.index]}

    async def task_range(self, env_name: str, body: TaskRangeRequest) -> dict[str, Any]:
        self._check_name(env_name)
        return {"tasks": self._family.specs(body.split)[body.start : body.stop]}

    def _check_name(self, name: str) -> None:
        """OpenEnv's clients may send the name in capitals."""
        if name.lower() != self._family.env_name.lower():
            raise HTTPException(404, f"no environment {short_repr(name)} is served here, but {self._family.env_name!r}")
