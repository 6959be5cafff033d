"""OpenEnv's own protocol beside our HTTP interface: /ws, /mcp, /metadata, /schema and the Task API.

The routes are OpenEnv's, from its server class, registered on an application of their own and moved here one by one:
its stateless /reset, /step and /state would otherwise stand where ours are. An episode played over a WebSocket is a
session like any other, named by its ``episode_id``: it is recorded step by step, GET /state and POST /grader see it,
and after a dropped connection ``reset(episode_id=..., resume=True)`` goes on with it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import orjson
from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from env.inference_env import observation_dict
from inferencegym import __version__
from inferencegym.client.openenv_types import (
    ENV_NAME,
    TRAFFIC_ENV_NAME,
    InferenceGymAction,
    InferenceGymObservation,
    InferenceGymState,
    TrafficControllerAction,
    TrafficControllerObservation,
    TrafficControllerState,
    without_gradio,
)
from inferencegym.error_text import write_error
from inferencegym.errors import InferenceGymError, NotResetError, StepConflictError
from inferencegym.tasks import list_tasks
from inferencegym.traffic import list_traffic_tasks
from server.api.serving import Context, documented_errors
from server.families import SERVING, TRAFFIC
from server.middleware import Callers, RateLimit
from server.net.errors import InvalidJsonError, InvalidRequestError
from server.net.json_io import WholeBody, parse_object
from server.openenv_late import PATHS, TASK_API, places
from server.schemas import task_description
from server.sessions.manager import Live, Outcome
from server.websocket_protocol import ANSWER_AT_ONCE

with without_gradio():
    from openenv.core.env_server.exceptions import EnvironmentFactoryError
    from openenv.core.env_server.http_server import HTTPEnvServer
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import ConcurrencyConfig, EnvironmentMetadata, ServerMode, WSErrorCode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

log = logging.getLogger(__name__)

IDLE_SLOT_S: Final = 900.0
"""A connection silent for so long no longer counts against the limit; it may speak again, because its episode is not
kept here but in its session."""

REPORT_EVERY_S: Final = 60.0

TRAIN: Final = "train"
RECORDED: Final = "test"
"""The Task API's splits: the tasks of GET /tasks, and those that replay recorded traffic."""

_RESET_FIELDS: Final = ("seed", "episode_id", "task_id", "config", "split", "index", "resume", "info")
_KEPT_PATHS: Final = frozenset({*PATHS, *TASK_API})

NEXT: Final[Mapping[str, str]] = {
    "not_reset": "reset() starts one, and reset(episode_id=..., resume=True) goes on with one played before",
    "episode_done": "reset() starts the next one; POST /grader with its episode_id as session_id scores this one",
    "unknown_session": "reset() without resume starts an episode",
    "unknown_task": "the Task API and GET /tasks list the tasks",
    "step_conflict": "reset(episode_id=..., resume=True) goes on where the episode is, reset() starts another",
    "rate_limited": "wait, then send it again",
    "store": "send it again in a moment; nothing was changed",
    "capacity": "try again in a moment",
    "table": "try again in a moment; the server's log has the cause",
}
"""What to do after an error, in the words of OpenEnv's clients."""
_NEXT_OTHERWISE: Final = "correct it and send it again; nothing was changed"


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
    callers: str = ""
    """What precedes a caller's identity where this family's HTTP paths look up the caller's most recent session."""


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
        "Control an LLM serving fleet under live traffic: KV budget, speculative length, batch size, prefill "
        "disaggregation and precision, once a second.",
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
        callers=f"{TRAFFIC}:",
    ),
}


def add_openenv(app: FastAPI, context: Context) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    """Add OpenEnv's routes for every family, each under its prefix; returns what is to run around the server's life."""
    theirs = []
    for name, prefix in places(context):
        scratch = _openenv_server(OPENENV_FAMILIES[name], context, prefix)
        theirs.append(scratch)
        paths = {prefix + path for path in _KEPT_PATHS}
        kept = [route for route in scratch.router.routes if getattr(route, "path", None) in paths]
        for route in kept:
            if "POST" in (getattr(route, "methods", None) or ()):
                route.app = WholeBody(route.app, context.settings.max_body_bytes, context.settings.body_timeout_s)  # type: ignore[attr-defined]
        # Before a mount of the same prefix, which would answer for everything below it; at the root, after our own.
        at = 0 if prefix else len(app.router.routes)
        app.router.routes[at:at] = kept

    @asynccontextmanager
    async def running(_app: FastAPI) -> AsyncIterator[None]:
        for scratch in theirs:
            for start in scratch.router.on_startup:
                await start()
        try:
            yield
        finally:
            for scratch in theirs:
                for stop in scratch.router.on_shutdown:
                    await stop()

    return running


def _openenv_server(family: OpenEnvFamily, context: Context, prefix: str) -> FastAPI:
    """An application with all of OpenEnv's routes for one family, below ``prefix``."""
    resets = RateLimit(context.settings.resets_per_minute) if context.settings.resets_per_minute else None
    limit = ConcurrencyConfig(max_concurrent_envs=context.settings.max_concurrent_envs, session_timeout=IDLE_SLOT_S)
    server = SocketServer(
        partial(SessionEnvironment, family, context, resets),
        family.action_cls,
        family.observation_cls,
        env_name=family.env_name,
        state_cls=family.state_cls,
        concurrency_config=limit,
    )
    scratch = FastAPI(responses=documented_errors(400, 401, 403, 404, 408, 413, 422))
    scratch.router.prefix = prefix
    # The mode "production" would leave out their reset, step and state, but imports OpenEnv's model clients.
    server.register_routes(scratch, mode=ServerMode.SIMULATION)
    for route in scratch.router.routes:
        if getattr(route, "path", None) == f"{prefix}/ws":
            route.app = Frames(route.app, context.callers)  # type: ignore[attr-defined]
    return scratch


class SocketServer(HTTPEnvServer):  # type: ignore[misc]
    """OpenEnv's server class, whose places are for WebSockets that play."""

    async def _create_session(self) -> tuple[str, Environment]:
        # /mcp would take one, too, for nothing: a few requests without a connection could keep all players out.
        if _connection.get(None) is None:
            why = "this environment has no MCP tools: play over /ws, or with POST /reset and POST /step"
            raise EnvironmentFactoryError("mcp", why)
        return await super()._create_session()  # type: ignore[no-any-return]


class SessionEnvironment(Environment):  # type: ignore[misc]
    """One connection's view of an episode that the session manager plays."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, described: OpenEnvFamily, context: Context, resets: RateLimit | None) -> None:
        super().__init__()
        self._family = described
        self._sessions = context.sessions
        self._resets = resets
        self._live: Live | None = None
        self._reset_id = ""
        self._taken = 0
        self._with_info = False

    # ------------------------------------------------------------ playing

    async def reset_async(
        self, /, seed: Any = None, episode_id: Any = None, task_id: Any = None, config: Any = None, **others: Any
    ) -> ServedObservation:
        """Start an episode, or with ``resume=True`` go on with the one that ``episode_id`` names.

        ``task_id``, ``seed`` and ``config`` as in POST /reset; ``split`` and ``index`` choose a task of the Task API
        instead of ``task_id``; ``info=True`` adds POST /step's info to observations. Unknown arguments are refused.
        """
        with _Explained():
            connection = _connection.get(None)
            if connection is not None and self._resets is not None:
                self._resets.take(connection.address)
            given = {"seed": seed, "episode_id": episode_id, "task_id": task_id, "config": config, **others}
            wanted = ResetArguments.parse(given, self._family)
            if connection is not None:
                connection.environment = self
            if wanted.resume:
                return await self._resume(wanted)
            live, first = await self._sessions.reset(
                self._family.name,
                task_id=wanted.task_id,
                seed=wanted.seed,
                config=wanted.config or {},
                caller="" if connection is None else self._family.callers + connection.caller,
                session_id=wanted.episode_id,
                create=True,
            )
            self._attach(live, wanted, taken=0)
            return ServedObservation(self._family.observation_json(first), None, False)

    async def step_async(self, action: Any, timeout_s: float | None = None, **_: Any) -> ServedObservation:
        """Play one step of this connection's episode."""
        with _Explained():
            number = self._taken + 1
            if action.metadata:
                number = _step_number(action.metadata, number)
            knobs = {name: value for name, value in action.__dict__.items() if name != "metadata"}
            outcome = await self._sessions.step(self._session_id(), knobs, number, reset_id=self._reset_id)
            self._taken = max(self._taken, outcome.number)
            return self._served(outcome)

    async def step_json(self, knobs: dict[str, Any]) -> bytes:
        """The frame that answers a step with these knobs."""
        session_id, number = self._session_id(), self._taken + 1
        return self._frame(await self._sessions.step(session_id, knobs, number, reset_id=self._reset_id))

    def step_json_at_once(self, knobs: dict[str, Any]) -> bytes | None:
        """As :meth:`step_json` where nothing has to be waited for; else None, and nothing changed."""
        session_id, number = self._session_id(), self._taken + 1
        outcome = self._sessions.step_at_once(session_id, knobs, number, reset_id=self._reset_id)
        return None if outcome is None else self._frame(outcome)

    async def refresh(self) -> None:
        """Bring this connection's episode to where it is: another process may have played on. Changes nothing else."""
        if self._live is not None:
            self._live = await self._sessions.get(self._live.session_id)

    @property
    def state(self) -> Any:
        """Where this connection's episode stands, as it was last seen: :meth:`refresh` comes first."""
        if self._live is None:
            return self._family.state_cls()
        with _Explained():
            if self._live.start.reset_id != self._reset_id:
                raise StepConflictError(f"episode {self._live.session_id!r} was reset by another request")
            known = self._live.env.state()
            known["episode_id"] = known.pop("session_id")
            return self._family.state_cls(**known)

    def reset(self, /, seed: Any = None, episode_id: Any = None, **others: Any) -> ServedObservation:
        """As :meth:`reset_async`, for a caller without an event loop."""
        return asyncio.run(self.reset_async(seed=seed, episode_id=episode_id, **others))

    def step(self, action: Any, timeout_s: float | None = None, **others: Any) -> ServedObservation:
        """As :meth:`step_async`, for a caller without an event loop."""
        return asyncio.run(self.step_async(action, timeout_s=timeout_s, **others))

    def close(self) -> None:
        """Nothing is held here: the episode stays in its session, for the grader and for whoever resumes it."""

    async def _resume(self, wanted: ResetArguments) -> ServedObservation:
        assert wanted.episode_id is not None
        live = await self._sessions.get(wanted.episode_id, self._family.name)
        taken = len(live.actions)
        self._attach(live, wanted, taken)
        if live.last is None:
            return ServedObservation(live.env.observation_dict(), None, live.env.done)
        return self._served(live.last)

    def _attach(self, live: Live, wanted: ResetArguments, taken: int) -> None:
        self._live, self._reset_id, self._taken = live, live.start.reset_id, taken
        self._with_info = wanted.info

    def _session_id(self) -> str:
        if self._live is None:
            raise NotResetError("this connection plays no episode")
        return self._live.session_id

    def _seen(self, outcome: Outcome) -> dict[str, Any]:
        seen = self._family.observation_json(outcome.observation)
        if self._with_info:
            seen["info"] = outcome.info()
        return seen

    def _frame(self, outcome: Outcome) -> bytes:
        self._taken = outcome.number
        data = {"observation": self._seen(outcome), "reward": outcome.reward, "done": outcome.done}
        return orjson.dumps({"type": "observation", "data": data})

    def _served(self, outcome: Outcome) -> ServedObservation:
        return ServedObservation(self._seen(outcome), outcome.reward, outcome.done)

    # ------------------------------------------------------------ telling

    def get_metadata(self) -> EnvironmentMetadata:
        """Name, description and version for GET /metadata."""
        return EnvironmentMetadata(name=self._family.title, description=self._family.description, version=__version__)

    def list_splits(self) -> list[dict[str, str]]:
        """The splits that have tasks."""
        return [{"name": name, "type": name} for name, tasks in self._family.tasks().items() if tasks]

    def list_tasks(self, split: str) -> list[dict[str, Any]]:
        """All tasks of a split; an unknown split has none."""
        return self._family.tasks().get(split, [])

    def num_tasks(self, split: str) -> int:
        """How many tasks a split has."""
        return len(self.list_tasks(split))

    def get_task(self, split: str, index: int) -> dict[str, Any]:
        """One task. Raises IndexError, which OpenEnv answers with 400."""
        if index < 0:
            raise IndexError(index)
        return self.list_tasks(split)[index]

    def get_task_range(self, split: str, start: int | None = None, stop: int | None = None) -> list[dict[str, Any]]:
        """Tasks ``start`` to ``stop`` of a split, as a Python slice."""
        return self.list_tasks(split)[start:stop]


@dataclass(frozen=True, slots=True)
class ResetArguments:
    """What a reset frame may say. OpenEnv hands on whatever a client sent, so everything is checked here."""

    task_id: int | str | None
    seed: int | None
    config: Mapping[str, Any] | None
    episode_id: str | None
    resume: bool
    info: bool

    @classmethod
    def parse(cls, given: Mapping[str, Any], family: OpenEnvFamily) -> ResetArguments:
        """Raises InvalidRequestError; ranges of seed and config are the environment's to check."""
        for name in given:
            if name not in _RESET_FIELDS:
                raise InvalidRequestError(name, given[name], "left out: reset takes " + ", ".join(_RESET_FIELDS))
        seed = _optional(given, "seed", int, "an integer")
        episode_id = _optional(given, "episode_id", str, "a text")
        resume = bool(_optional(given, "resume", bool, "true or false"))
        task_id = _optional(given, "task_id", (int, str), "a number or a name from GET /tasks")
        if given.get("split") is not None or given.get("index") is not None:
            task_id = _task_of(given, task_id, family)
        config = _optional(given, "config", dict, "an object")
        if resume and episode_id is None:
            raise InvalidRequestError("episode_id", None, "the id of the episode to resume")
        if resume and not (task_id is None and seed is None and config is None):
            raise InvalidRequestError("resume", True, "without task_id, seed and config: the episode has its own")
        info = bool(_optional(given, "info", bool, "true or false"))
        return cls(task_id, seed, config, episode_id, resume, info)


def _optional(given: Mapping[str, Any], name: str, kinds: type | tuple[type, ...], allowed: str) -> Any:
    value = given.get(name)
    wants_bool = kinds is bool
    if value is not None and (not isinstance(value, kinds) or isinstance(value, bool) is not wants_bool):
        raise InvalidRequestError(name, value, allowed)
    return value


def _task_of(given: Mapping[str, Any], task_id: object, family: OpenEnvFamily) -> int | str:
    """The task that ``split`` and ``index`` name."""
    if task_id is not None:
        raise InvalidRequestError("task_id", task_id, "left out when split and index are given")
    split = _optional(given, "split", str, "a text") or TRAIN
    index = _optional(given, "index", int, "an integer") or 0
    tasks = {name: listed for name, listed in family.tasks().items() if listed}
    if split not in tasks:
        raise InvalidRequestError("split", split, "one of " + ", ".join(tasks))
    if not 0 <= index < len(tasks[split]):
        raise InvalidRequestError("index", index, f"an integer from 0 to {len(tasks[split]) - 1}")
    chosen: int | str = tasks[split][index]["id"]
    return chosen


def _step_number(metadata: Mapping[str, Any], following: int) -> int:
    number = metadata.get("step", following)
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise InvalidRequestError("metadata.step", number, "the number of the step, counting from 1")
    return number


class ServedObservation:
    """What OpenEnv's server reads of an observation; no model is built here only to be taken apart there."""

    __slots__ = ("_seen", "done", "metadata", "reward")

    def __init__(self, seen: dict[str, Any], reward: float | None, done: bool) -> None:
        self._seen = seen
        self.reward = reward
        self.done = done
        self.metadata: dict[str, Any] = {}

    def model_dump(self, **_: Any) -> dict[str, Any]:
        """The fields of the family's observation class, without reward and done."""
        return self._seen


class RefusedError(Exception):
    """An error of ours in the text that OpenEnv puts into its error frame."""


def _explained(error: InferenceGymError) -> str:
    return write_error(str(error), error.code, NEXT.get(error.code, _NEXT_OTHERWISE))


class _Explained:
    """Turns our errors into OpenEnv's text, and writes to the log what is no error of ours: OpenEnv does not."""

    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            return
        if isinstance(error, InferenceGymError):
            raise RefusedError(_explained(error)) from error
        if isinstance(error, Exception):
            log.error("a WebSocket frame could not be answered", exc_info=error)


class _Connection:
    """One WebSocket: who is at its other end, and the environment that answers it once it was reset.

    Steps of a running episode are answered here, without the four models that OpenEnv's handler builds for each. None
    (and nothing changed) leaves a frame to the handler; that it is refused is the handler's to say.
    """

    __slots__ = ("address", "caller", "environment", "reported")

    def __init__(self, caller: str, address: str) -> None:
        self.caller = caller
        self.address = address
        self.environment: SessionEnvironment | None = None
        self.reported = 0.0

    def answer_at_once(self, text: bytes) -> bytes | None:
        """The answer to a step that has nothing to wait for."""
        try:
            step = self._step(parse_object(text))
            return None if step is None else step[0].step_json_at_once(step[1])
        except InferenceGymError:
            return None

    async def answer(self, frame: dict[str, Any]) -> bytes | None:
        """The answer to a step."""
        step = self._step(frame)
        if step is None:
            # The handler notes when it last heard of a connection, and gives the slots of silent ones to others.
            self.reported = time.monotonic()
            return await self._before_state() if frame.get("type") == "state" else None
        try:
            return await step[0].step_json(step[1])
        except InferenceGymError:
            return None

    async def _before_state(self) -> bytes | None:
        """Look the episode up, which the handler cannot do: its environments answer at once. What is refused, if so."""
        if self.environment is not None:
            try:
                await self.environment.refresh()
            except InferenceGymError as error:
                return _error_frame(_explained(error), WSErrorCode.EXECUTION_ERROR)
        return None

    def _step(self, frame: dict[str, Any]) -> tuple[SessionEnvironment, dict[str, Any]] | None:
        """Who plays the step that ``frame`` asks for, and its knobs; None if it is to be looked at more closely."""
        if self.environment is None or frame.get("type") != "step" or len(frame) != 2:
            return None
        knobs = frame.get("data")
        if type(knobs) is not dict or "metadata" in knobs or time.monotonic() - self.reported > REPORT_EVERY_S:
            return None
        return self.environment, knobs


_connection: ContextVar[_Connection] = ContextVar("connection")
"""The connection whose frame is being answered."""


class Frames:
    """Stands between a WebSocket and OpenEnv's handler of it.

    Frames that are not one strict JSON object are answered here: OpenEnv's handler would end the connection over most
    of them. So are the steps of a running episode, and those that have nothing to wait for are answered even before
    they get here, if the socket's protocol can do that. Everything else, and every step that is refused, goes on to
    the handler.
    """

    def __init__(self, app: ASGIApp, callers: Callers) -> None:
        self._app = app
        self._callers = callers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = _Connection(self._callers.caller(scope), self._callers.address(scope))
        _connection.set(connection)
        if ANSWER_AT_ONCE in scope["extensions"]:
            scope["extensions"][ANSWER_AT_ONCE]["with"](connection.answer_at_once)
        gone = False

        async def send_if_there(message: Message) -> None:
            # The handler tries to tell a client that went away about the failure to answer it, and fails again; it
            # ends by itself when it next listens.
            nonlocal gone
            if not gone:
                try:
                    await send(message)
                except OSError:
                    gone = True

        async def for_the_handler() -> Message:
            while True:
                message = await receive()
                if message["type"] != "websocket.receive":
                    return message
                try:
                    answer = await connection.answer(_parsed(message))
                except InvalidJsonError as error:
                    answer = _malformed(error)
                if answer is None:
                    return message
                await send_if_there({"type": "websocket.send", "text": answer.decode()})

        await self._app(scope, for_the_handler, send_if_there)


def _parsed(message: Message) -> dict[str, Any]:
    text = message.get("text")
    if text is None:
        raise InvalidJsonError("the body must be text, not bytes")
    return parse_object(text.encode())


def _malformed(error: InvalidJsonError) -> bytes:
    """The error frame for what is no JSON object."""
    said = write_error(str(error).replace("the body", "the frame", 1), error.code, "send one JSON object as text")
    return _error_frame(said, WSErrorCode.INVALID_JSON)


def _error_frame(said: str, code: WSErrorCode) -> bytes:
    return orjson.dumps({"type": "error", "data": {"message": said, "code": code}})
