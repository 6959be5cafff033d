"""OpenEnv's own protocol beside our HTTP interface: /ws, /mcp, /metadata, /schema and the Task API.

The routes are OpenEnv's, from its server class, registered on an application of their own and moved here one by one: its
stateless /reset, /step and /state would otherwise stand where ours are. An episode played over a WebSocket is a session
like any other, named by its ``episode_id``: it is recorded step by step, GET /state and POST /grader see it, and after a
dropped connection ``reset(episode_id=..., resume=True)`` goes on with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import orjson
from fastapi import APIRouter, FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from env.inference_env import observation_dict
from inferencegym import __version__
from inferencegym.errors import InferenceGymError, NotResetError, StepConflictError
from inferencegym.openenv_types import (
    ENV_NAME,
    TRAFFIC_ENV_NAME,
    InferenceGymAction,
    InferenceGymObservation,
    InferenceGymState,
    TrafficControllerAction,
    TrafficControllerObservation,
    TrafficControllerState,
    without_gradio,
    write_error,
)
from inferencegym.tasks import list_tasks
from inferencegym.traffic import list_traffic_tasks
from server.families import SERVING, TRAFFIC
from server.middleware import RateLimit
from server.problems import next_step
from server.request_errors import InvalidJsonError, InvalidRequestError
from server.routes import Context
from server.schemas import task_description
from server.session_manager import Live, Outcome
from server.stores import EpisodeStart
from server.wire import parse_object

with without_gradio():
    from openenv.core.env_server.http_server import HTTPEnvServer
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import ConcurrencyConfig, EnvironmentMetadata, ServerMode, WSErrorCode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

log = logging.getLogger(__name__)

IDLE_SLOT_S: Final = 900.0
"""A connection silent for so long no longer counts against the limit; it may speak again, because its episode is not
kept here but in its session."""

TRAIN: Final = "train"
RECORDED: Final = "test"
"""The Task API's splits: the tasks of GET /tasks, and those that replay recorded traffic."""

_RESET_FIELDS: Final = ("seed", "episode_id", "task_id", "config", "split", "index", "resume", "info")
_TASK_API: Final = tuple(f"/{{env_name}}/{name}" for name in ("splits", "tasks", "num_tasks", "task", "task_range"))
_KEPT_PATHS: Final = frozenset({"/ws", "/mcp", "/metadata", "/schema", "/list_environments", *_TASK_API})

_caller: ContextVar[tuple[str, str]] = ContextVar("caller", default=("", ""))
"""Identity and address of the client whose frame is being answered."""


@dataclass(frozen=True, slots=True)
class OpenEnvFamily:
    """An environment family as OpenEnv sees it."""

    name: str
    env_name: str
    title: str
    description: str
    action_cls: type[Any]
    observation_cls: type[Any]
    state_cls: type[Any]
    observation_json: Callable[[Any], dict[str, Any]]
    tasks: Callable[[], dict[str, list[dict[str, Any]]]]
    """Split -> descriptions of its tasks, each with its ``id``."""


def _serving_tasks() -> dict[str, list[dict[str, Any]]]:
    splits: dict[str, list[dict[str, Any]]] = {TRAIN: [], RECORDED: []}
    for task in list_tasks(include_recorded=True):
        splits[RECORDED if task.recorded else TRAIN].append(task_description(task))
    return splits


OPENENV_FAMILIES: Final = {
    SERVING: OpenEnvFamily(
        SERVING,
        ENV_NAME,
        "InferenceGym",
        "Control an LLM serving fleet: KV budget, speculative length, batch size, prefill disaggregation and precision, "
        "once a second, under live traffic.",
        InferenceGymAction,
        InferenceGymObservation,
        InferenceGymState,
        observation_dict,
        _serving_tasks,
    ),
    TRAFFIC: OpenEnvFamily(
        TRAFFIC,
        TRAFFIC_ENV_NAME,
        "Traffic controller",
        "Stand before one server and decide each second which share of the incoming requests it lets through.",
        TrafficControllerAction,
        TrafficControllerObservation,
        TrafficControllerState,
        asdict,
        lambda: {TRAIN: [task.summary() for task in list_traffic_tasks()]},
    ),
}


def add_openenv(app: FastAPI, context: Context, family: str, prefix: str = "") -> AbstractAsyncContextManager[None]:
    """Put OpenEnv's routes for one family under ``prefix``; the result is to be entered for the life of the server."""
    described = OPENENV_FAMILIES[family]
    limit = ConcurrencyConfig(
        max_concurrent_envs=context.settings.max_concurrent_envs, session_timeout=IDLE_SLOT_S
    )
    server = HTTPEnvServer(
        partial(SessionEnvironment, described, context),
        described.action_cls,
        described.observation_cls,
        env_name=described.env_name,
        state_cls=described.state_cls,
        concurrency_config=limit,
    )
    theirs = FastAPI()
    # In the mode "production" OpenEnv leaves out its own reset, step and state, but imports its model clients.
    server.register_routes(theirs, mode=ServerMode.SIMULATION)
    kept = APIRouter()
    resets = RateLimit(context.settings.resets_per_minute) if context.settings.resets_per_minute else None
    for route in theirs.router.routes:
        if getattr(route, "path", None) not in _KEPT_PATHS:
            continue
        if route.path == "/ws":  # type: ignore[attr-defined]
            route.app = StrictFrames(route.app, context, resets)  # type: ignore[attr-defined]
        kept.routes.append(route)
    app.include_router(kept, prefix=prefix)

    @asynccontextmanager
    async def life() -> AsyncIterator[None]:
        for start in theirs.router.on_startup:
            await start()
        try:
            yield
        finally:
            for stop in theirs.router.on_shutdown:
                await stop()

    return life()
