"""The server: ``create_app(settings)``, the module attribute ``app`` (built when first asked for) and ``main()``."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from starlette.routing import BaseRoute

from inferencegym.errors import InvalidConfigError
from server.api.baseline import Baseline
from server.api.batch import BatchRoutes
from server.api.openapi import install_openapi, openapi_route
from server.api.policies import PolicyRoutes, TrafficPolicyRoutes
from server.api.serving import Context, RootRoutes
from server.api.shadow import ShadowRoutes
from server.api.traffic import TrafficRoutes
from server.api.web import web_routes
from server.families import FAMILIES, SERVING, served_tables
from server.http_protocol import ANSWER_AT_ONCE
from server.middleware import AtOnce, Callers, Cors, Guard, Limits, RequestLog, Requests, Shortcut, cors_options
from server.net.json_io import JsonRoute
from server.net.logs import LineLog, logging_config
from server.net.metrics import Metrics
from server.net.problems import install_problem_handlers
from server.openenv_late import LateOpenEnv
from server.sessions.manager import SessionManager
from server.sessions.store import make_store
from server.settings import Settings, load_settings

if TYPE_CHECKING:
    app: FastAPI

log = logging.getLogger(__name__)

LifespanHook = Callable[[FastAPI], AbstractAsyncContextManager[None]]
"""What a part of the server does around its life; entered in order at start, left in reverse."""

DESCRIPTION = """Control an LLM serving fleet: POST /reset, POST /step with five knobs each second, POST /grader.

Errors are `{"detail": {"message", "code", "field", "allowed", "next"}}`."""


def create_app(settings: Settings | None = None) -> FastAPI:
    """Build the whole server; nothing is opened or loaded before its lifespan starts."""
    settings = settings or load_settings()
    store = make_store(settings)
    sessions = SessionManager(store, FAMILIES, settings)
    metrics = Metrics(sessions, settings.shared_metrics_dir())
    context = Context(settings, sessions, Callers(settings), Baseline(), metrics, time.monotonic())
    lines = LineLog()
    requests, limits = Requests(settings, lines, metrics), Limits(settings)
    hooks: list[LifespanHook] = [_tables_loaded, _store_open, _maintained, lambda _: metrics.shared()]
    hooks.append(lambda _: _flushed(lines))
    app = FastAPI(
        title="InferenceGym",
        # Version of the HTTP interface: OpenEnv's validator derives its profile from it.
        version="1.0.0",
        description=DESCRIPTION,
        redirect_slashes=False,
        # Requests are counted and logged by RequestLog; FastAPI would ask at each whether somebody listens to it.
        telemetry={"tracing": False, "metrics": False, "logs": False},
        lifespan=_lifespan(hooks),
    )
    app.state.context = context
    app.router.routes[:0] = _routes(context)
    openenv = LateOpenEnv(app, context)
    hooks.append(openenv.running)
    install_problem_handlers(app)
    install_openapi(app, openenv.load)
    metrics.know(route.path for route in app.routes if hasattr(route, "path"))
    # Added last, run first.
    app.add_middleware(
        Shortcut, posts={r.path: r.app for r in app.routes if isinstance(r, JsonRoute) and "POST" in (r.methods or ())}
    )
    app.add_middleware(Guard, limits=limits)
    if settings.cors != "off":
        app.add_middleware(Cors, **cors_options(settings))
    app.add_middleware(RequestLog, requests=requests)
    prefix = "" if settings.env == SERVING else "/serving"
    step = RootRoutes(context, prefix).step_at_once
    app.state.answer_at_once = {prefix + "/step": AtOnce(requests, limits, step)}
    return app


def _routes(context: Context) -> list[BaseRoute]:
    """Each environment under its prefix, and the one that the settings name at the root too."""
    traffic = [*TrafficRoutes(context).routes(), *TrafficPolicyRoutes(context).routes(), openapi_route("/traffic")]
    page = web_routes(context.settings)
    if context.settings.env == "serving":
        return [*_serving(context), *traffic, *page]
    serving = _serving(context, "/serving")
    # The process is asked for its health and metrics at the root, whichever environment is there.
    whole = [route for route in RootRoutes(context).routes() if route.path in ("/health", "/metrics")]
    at_root = [route for route in TrafficRoutes(context, prefix="").routes() if route.path != "/health"]
    at_root += TrafficPolicyRoutes(context, prefix="").routes()
    return [*at_root, *whole, *traffic, *serving, *page]


def _serving(context: Context, prefix: str = "") -> list[JsonRoute]:
    parts = (
        RootRoutes(context, prefix),
        BatchRoutes(context, prefix),
        PolicyRoutes(context, prefix),
        ShadowRoutes(context, prefix),
    )
    return [route for part in parts for route in part.routes()]


def _lifespan(hooks: list[LifespanHook]) -> Callable[[FastAPI], AbstractAsyncContextManager[dict[str, Any]]]:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[dict[str, Any]]:
        async with AsyncExitStack() as stack:
            for hook in hooks:
                await stack.enter_async_context(hook(app))
            # What is yielded here, the protocol of a connection finds in its state.
            yield {ANSWER_AT_ONCE: app.state.answer_at_once}

    return lifespan


@asynccontextmanager
async def _tables_loaded(_app: FastAPI) -> AsyncIterator[None]:
    await asyncio.to_thread(served_tables)
    yield


@asynccontextmanager
async def _store_open(app: FastAPI) -> AsyncIterator[None]:
    store = app.state.context.sessions.store
    await store.open()
    try:
        yield
    finally:
        await store.close()


@asynccontextmanager
async def _maintained(app: FastAPI) -> AsyncIterator[None]:
    task = asyncio.create_task(app.state.context.sessions.maintain())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@asynccontextmanager
async def _flushed(lines: LineLog) -> AsyncIterator[None]:
    try:
        yield
    finally:
        lines.flush()


def __getattr__(name: str) -> Any:
    """Build ``app`` on first use, so that importing this module starts nothing."""
    if name != "app":
        raise AttributeError(f"module 'server.app' has no attribute {name!r}")
    globals()["app"] = create_app()
    return globals()["app"]


def main() -> None:
    """Serve with the settings from the environment; the console script ``server``."""
    import uvicorn
    from uvicorn.supervisors import Multiprocess

    try:
        settings = load_settings()
        served = create_app(settings)
    except InvalidConfigError as error:
        sys.exit(f"The server was not started. {error}")
    config = uvicorn.Config(
        # Several workers are started by name: each builds its own app from the same environment.
        served if settings.workers == 1 else "server.app:app",
        workers=settings.workers,
        loop="uvloop",
        http="server.http_protocol:PatientProtocol",
        ws="server.websocket_protocol:EagerProtocol",
        # Frames are small and local; compressing them costs more than sending them.
        ws_per_message_deflate=False,
        ws_max_size=settings.max_body_bytes,
        access_log=False,
        log_config=logging_config(),
        server_header=False,
        proxy_headers=False,
        lifespan="on",
        # A learner that takes its time between two steps keeps its worker, which has its batch session.
        timeout_keep_alive=75,
        timeout_graceful_shutdown=settings.shutdown_grace_s,
        # Uvicorn replaces a worker that stays silent this long, and it is silent while it imports: with the usual 5 s
        # no worker would ever come up on a slow or busy machine.
        timeout_worker_healthcheck=60,
    )
    _allow_many_connections()
    sockets = [_listen(settings.host, port) for port in sorted({settings.port, settings.also_port} - {0})]
    server = uvicorn.Server(config)
    if settings.workers > 1:
        with _metrics_directory(settings):
            Multiprocess(config, sockets=sockets).run()
    else:
        server.run(sockets=sockets)
    if not server.started and settings.workers == 1:
        sys.exit(3)


@contextlib.contextmanager
def _metrics_directory(settings: Settings) -> Iterator[None]:
    """Give the workers a place for their metrics, unless the operator has."""
    if settings.metrics_dir is not None:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="inferencegym-metrics-") as directory:
        os.environ["INFERENCEGYM_METRICS_DIR"] = directory
        yield


def _allow_many_connections() -> None:
    """Raise the limit on open files as far as the system lets us: every connection is one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Some systems refuse the value that they call unlimited; the limit then stays as it was.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        sys.exit(f"The server was not started. Port {port} of {host} cannot be used: {error.strerror}")
    listener.listen(2048)
    listener.set_inheritable(True)
    return listener


if __name__ == "__main__":
    main()
