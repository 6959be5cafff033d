"""Server application: ``create_app(settings)``, the module attribute ``app`` (built on first use) and ``main()``."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging.config
import os
import resource
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from env.families import FAMILIES
from inferencegym.errors import InferenceGymError, InvalidConfigError
from inferencegym.installation import INTERPRETED, interpreted_modules
from inferencegym.tasks import table_index
from server.api.openapi import install_openapi
from server.api.route import Steps
from server.api.routes import http_routes
from server.context import Context
from server.metrics import Metrics, background
from server.middleware import Cors, Guard, RequestLog, proxies_of
from server.net.buffers import BoundedBuffers
from server.net.cpu import CpuBudget
from server.net.jobs import Jobs
from server.net.limits import Limits
from server.net.logs import logging_config
from server.net.problems import install_problem_handlers
from server.openenv import openenv_routes
from server.sessions.manager import SessionManager
from server.sessions.sqlite import MemoryStore, SqliteStore
from server.sessions.store import SessionStore
from server.settings import Settings, load_settings, service_links
from simulator.hardware.tables import tables_of

if TYPE_CHECKING:
    app: FastAPI

log = logging.getLogger(__name__)

SWITCH_INTERVAL_S: Final = 0.0005
"""Interval (s) at which computing threads yield the interpreter to the event loop: a tenth of Python's."""
DESCRIPTION = """Control an LLM serving fleet: POST /reset, POST /step with five knobs each second, POST /grader.

Errors are `{"detail": {"message", "code", "field", "allowed", "next"}}`."""

METRICS_DIR: Final = "INFERENCEGYM_METRICS_DIR"
"""Variable that tells workers the directory through which they add up their metrics."""
MAX_WEBSOCKET_BYTES: Final = 65_536
"""Longest WebSocket message; an action or the arguments of a reset take a hundredth of it."""


def create_app(settings: Settings | None = None) -> FastAPI:
    """Build the whole server; nothing is opened or loaded before its lifespan starts."""
    settings = settings or load_settings()
    sessions = SessionManager(make_store(settings), FAMILIES, settings)
    jobs = Jobs()
    metrics = Metrics(sessions, jobs, settings.max_sessions, os.environ.get(METRICS_DIR))
    limits, cpu = Limits(settings), CpuBudget(settings.cpu_seconds_per_minute)
    context = Context(settings, sessions, limits, cpu, metrics, time.monotonic(), jobs)
    app = FastAPI(
        title="InferenceGym",
        # Version of the HTTP interface: OpenEnv's validator derives its profile from it.
        version="1.0.0",
        description=DESCRIPTION,
        redirect_slashes=False,
        # Instead there is server.api.docs_page.
        docs_url=None,
        redoc_url=None,
        # RequestLog counts and logs requests; FastAPI would check at each request whether anything listens.
        telemetry={"tracing": False, "metrics": False, "logs": False},
        lifespan=partial(_lifespan, context),
    )
    app.state.context = context
    app.router.lifespan = _briefly(app.router.lifespan)  # type: ignore[assignment]
    app.router.routes[:0] = http_routes(context)
    app.router.routes.extend(openenv_routes(context))
    install_problem_handlers(app)
    install_openapi(app)
    metrics.paths.update(route.path for route in app.routes if hasattr(route, "path"))
    inner = app.build_middleware_stack

    def around() -> Any:
        """Our middleware around FastAPI's own, which steps do not pass then; the last is run first."""
        served: Any = Guard(BoundedBuffers(Steps(inner(), app.routes), settings), limits, cpu)
        if settings.cors != "off":
            served = Cors(served, ["GET", "POST"] if settings.cors == "all" else ["GET"])
        served = RequestLog(served, settings, metrics)
        return ProxyHeadersMiddleware(served, proxies_of(settings)) if settings.trusted_proxies else served

    app.build_middleware_stack = around  # type: ignore[method-assign]
    return app


def make_store(settings: Settings) -> SessionStore:
    """The session store that the settings name; not opened yet."""
    scheme = settings.store_url.split("://", 1)[0]
    if scheme in ("redis", "rediss"):
        # Imported here: only servers that share their sessions through Redis install its client.
        from server.sessions.redis import RedisStore

        return RedisStore(settings)
    return MemoryStore(settings) if scheme == "memory" else SqliteStore(settings)


def _briefly(lifespan: ASGIApp) -> ASGIApp:
    """A lifespan that says in one line why a server did not start, where the cause is known and no traceback helps."""

    async def told(scope: Scope, receive: Receive, send: Send) -> None:
        async def brief(message: Message) -> None:
            cause = sys.exception()
            if message["type"] == "lifespan.startup.failed" and isinstance(cause, InferenceGymError):
                message = {**message, "message": f"The server was not started. {cause}"}
            await send(message)

        await lifespan(scope, receive, brief)

    return told


@asynccontextmanager
async def _lifespan(context: Context, _app: FastAPI) -> AsyncIterator[None]:
    if interpreted_modules():
        log.warning(INTERPRETED)
    tables_of()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    await context.sessions.store.open()
    try:
        async with (
            background(_load_all_tables()),
            background(context.sessions.maintain()),
            background(context.metrics.keep_sharing()),
        ):
            yield
    finally:
        await context.sessions.elsewhere.close()
        await context.sessions.store.close()


async def _load_all_tables() -> None:
    """Read the tables of other hardware, so that no reset has to while all clients wait."""
    for hardware in table_index():
        await asyncio.to_thread(tables_of, hardware)
    # All imports are done and stay in memory: full garbage collections, which delay all clients, skip them.
    gc.freeze()


def __getattr__(name: str) -> Any:
    """Build ``app`` on first use, so that importing this module starts nothing."""
    if name != "app":
        raise AttributeError(f"module 'server.app' has no attribute {name!r}")
    globals()["app"] = create_app()
    return globals()["app"]


def main() -> None:
    """Serve with the settings from the environment; the console script ``server``."""
    import uvicorn

    from server.net.http_protocol import BoundedHttp
    from server.net.websocket import BoundedWebSocket
    from server.net.workers import run_workers

    logging.config.dictConfig(logging_config())
    if links := service_links():
        log.info("Ignored variables that Kubernetes sets for services: %s.", ", ".join(links))
    try:
        settings = load_settings()
        served = create_app(settings)
        sockets = [_listen(settings, port) for port in sorted({settings.port, settings.also_port} - {0})]
    except InvalidConfigError as error:
        log.error("The server was not started. %s", error)
        sys.exit(1)
    config = uvicorn.Config(
        # Several workers are started by name: each builds its own app from the same environment.
        served if settings.workers == 1 else "server.app:app",
        workers=settings.workers,
        loop="uvloop",
        http=BoundedHttp,
        ws=BoundedWebSocket,
        # Frames are small and local; compressing them costs more than sending them.
        ws_per_message_deflate=False,
        ws_max_size=MAX_WEBSOCKET_BYTES,
        access_log=False,
        log_config=logging_config(),
        server_header=False,
        proxy_headers=False,
        lifespan="on",
        # Keeps the connection of a slow learner to the worker that has its batch session.
        timeout_keep_alive=75,
        timeout_graceful_shutdown=settings.shutdown_grace_s,
        # Uvicorn replaces a worker that does not respond for this long, and a worker that imports does not respond:
        # with the usual 5 s no worker would ever start on a slow or busy machine.
        timeout_worker_healthcheck=60,
    )
    if settings.host in ("0.0.0.0", "::") and not settings.api_key:
        log.warning(
            "whoever reaches port %d of this machine can play: INFERENCEGYM_API_KEY asks for a key, and "
            "INFERENCEGYM_HOST=127.0.0.1 serves this machine alone",
            settings.port,
        )
    _allow_many_connections()
    server = uvicorn.Server(config)
    if settings.workers > 1:
        with tempfile.TemporaryDirectory(prefix="inferencegym-metrics-") as os.environ[METRICS_DIR]:
            run_workers(config, sockets)
    else:
        with contextlib.suppress(KeyboardInterrupt):  # which uvicorn raises after it has ended well
            server.run(sockets=sockets)
    if not server.started and settings.workers == 1:
        sys.exit(3)


def _allow_many_connections() -> None:
    """Raise this process's limit on open files to the system's hard limit: every connection is one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Some systems refuse their own "unlimited" value; the limit then does not change.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _listen(settings: Settings, port: int) -> socket.socket:
    host = settings.host
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if sys.platform == "linux":
        # Connections inherit this: the kernel closes those whose client reads nothing for so long. Neither uvicorn nor
        # ASGI can do this.
        milliseconds = round(1000 * settings.transfer_timeout_s)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
    try:
        listener.bind((host, port))
    except OSError as error:
        raise InvalidConfigError(f"port {port} of {host} cannot be used: {error.strerror}", "port") from error
    listener.listen(2048)
    listener.set_inheritable(True)
    log.info("listening on %s, port %d", host, port)
    return listener


if __name__ == "__main__":
    main()
