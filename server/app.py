"""Server application: ``create_app(settings)``, the module attribute ``app`` (built on first use) and ``main()``."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from fastapi import FastAPI

from env.families import FAMILIES
from inferencegym.errors import InvalidConfigError
from inferencegym.installation import INTERPRETED, interpreted_modules
from inferencegym.tasks import table_index
from server.api.openapi import install_openapi
from server.api.route import Steps, without_pydantic_1
from server.api.routes import http_routes
from server.context import Context, prefixes
from server.middleware import Cors, Guard, RequestLog, cors_options
from server.net.background import background
from server.net.buffers import BoundedBuffers
from server.net.cpu import CpuBudget
from server.net.limits import Callers, Limits
from server.net.logs import LineLog, logging_config
from server.net.metrics import Metrics
from server.net.problems import install_problem_handlers
from server.openenv import openenv_routes
from server.sessions.manager import SessionManager
from server.sessions.store import SessionStore
from server.sessions.stores import make_store
from server.settings import Settings, load_settings
from simulator.hardware.tables import tables_of

if TYPE_CHECKING:
    app: FastAPI

log = logging.getLogger(__name__)

SWITCH_INTERVAL_S: Final = 0.0005
"""Interval (s) at which computing threads (policies, replays, large bodies) yield the interpreter: a tenth of Python's.
The event loop, and with it every client's step, waits for this long each time it becomes ready beside them."""
DESCRIPTION = """Control an LLM serving fleet: POST /reset, POST /step with five knobs each second, POST /grader.

Errors are `{"detail": {"message", "code", "field", "allowed", "next"}}`."""

MAX_WEBSOCKET_BYTES: Final = 65_536
"""Longest WebSocket message. An action or the arguments of a reset take a hundredth of it; long logs go to POST
/grader.
"""
PING_S: Final = 20.0
"""Seconds between pings of a WebSocket, which is closed if it does not answer for as long. This ends connections whose
peer does not read, or has disappeared. OpenEnv's clients do the same.
"""


def create_app(settings: Settings | None = None) -> FastAPI:
    """Build the whole server; nothing is opened or loaded before its lifespan starts."""
    settings = settings or load_settings()
    sessions = SessionManager(make_store(settings), FAMILIES, settings)
    metrics = Metrics(sessions, settings.shared_metrics_dir())
    callers = Callers(settings)
    limits = Limits(settings, prefixes(FAMILIES), callers)
    cpu = CpuBudget(settings.cpu_seconds_per_minute, callers)
    context = Context(settings, sessions, callers, limits, cpu, metrics, time.monotonic())
    lines = LineLog()
    app = FastAPI(
        title="InferenceGym",
        # Version of the HTTP interface: OpenEnv's validator derives its profile from it.
        version="1.0.0",
        description=DESCRIPTION,
        redirect_slashes=False,
        # Ours needs no network: server.api.docs_page.
        docs_url=None,
        redoc_url=None,
        # RequestLog counts and logs requests; FastAPI would check at each request whether anything listens.
        telemetry={"tracing": False, "metrics": False, "logs": False},
        lifespan=partial(_lifespan, context, lines),
    )
    app.state.context = context
    with without_pydantic_1():
        app.router.routes[:0] = http_routes(context)
        app.router.routes.extend(openenv_routes(context))
    install_problem_handlers(app)
    install_openapi(app)
    metrics.know(route.path for route in app.routes if hasattr(route, "path"))
    # Added last, run first.
    app.add_middleware(Steps, routes=app.routes)
    app.add_middleware(BoundedBuffers, settings=settings, callers=callers)
    app.add_middleware(Guard, limits=limits, cpu=cpu)
    if settings.cors != "off":
        app.add_middleware(Cors, **cors_options(settings))
    app.add_middleware(RequestLog, settings=settings, log=lines, metrics=metrics)
    return app


@asynccontextmanager
async def _lifespan(context: Context, lines: LineLog, _app: FastAPI) -> AsyncIterator[None]:
    if interpreted_modules():
        log.warning(INTERPRETED)
    await asyncio.to_thread(_load_all_tables)
    # All imports are done and stay in memory. Freezing them keeps full garbage collections, which delay all clients,
    # from examining them. Collecting before would find some 300 objects.
    gc.freeze()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    async with _store_open(context.sessions.store), background(context.sessions.maintain()), context.metrics.shared():
        try:
            yield
        finally:
            await context.sessions.elsewhere.close()
            lines.flush()


def _load_all_tables() -> None:
    """Read the tables before the first request, so that no reset has to while all clients wait."""
    for hardware in (None, *table_index()):
        tables_of(hardware)


@asynccontextmanager
async def _store_open(store: SessionStore) -> AsyncIterator[None]:
    await store.open()
    try:
        yield
    finally:
        await store.close()


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
    from server.net.workers import Workers

    try:
        settings = load_settings()
        served = create_app(settings)
    except InvalidConfigError as error:
        sys.exit(f"The server was not started. {error}")
    if settings.host in ("0.0.0.0", "::") and not settings.api_key:
        log.warning(
            "whoever reaches port %d of this machine can play: INFERENCEGYM_API_KEY asks for a key, and "
            "INFERENCEGYM_HOST=127.0.0.1 serves this machine alone",
            settings.port,
        )
    config = uvicorn.Config(
        # Several workers are started by name: each builds its own app from the same environment.
        served if settings.workers == 1 else "server.app:app",
        workers=settings.workers,
        loop="uvloop",
        http=BoundedHttp,
        ws=BoundedWebSocket,
        # Frames are small and local; compressing them costs more than sending them.
        ws_per_message_deflate=False,
        ws_max_size=min(settings.max_body_bytes, MAX_WEBSOCKET_BYTES),
        ws_ping_interval=PING_S,
        ws_ping_timeout=PING_S,
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
    _allow_many_connections()
    sockets = [_listen(settings, port) for port in sorted({settings.port, settings.also_port} - {0})]
    server = uvicorn.Server(config)
    if settings.workers > 1:
        with _metrics_directory(settings):
            Workers(config, sockets=sockets).run()
    else:
        with contextlib.suppress(KeyboardInterrupt):  # which uvicorn raises after it has ended well
            server.run(sockets=sockets)
    if not server.started and settings.workers == 1:
        sys.exit(3)


@contextlib.contextmanager
def _metrics_directory(settings: Settings) -> Iterator[None]:
    """Make a temporary directory for the workers' metrics, unless the operator has set one."""
    if settings.metrics_dir is not None:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="inferencegym-metrics-") as directory:
        os.environ["INFERENCEGYM_METRICS_DIR"] = directory
        yield


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
        milliseconds = round(1000 * settings.answer_timeout_s)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
    try:
        listener.bind((host, port))
    except OSError as error:
        sys.exit(f"The server was not started. Port {port} of {host} cannot be used: {error.strerror}")
    listener.listen(2048)
    listener.set_inheritable(True)
    return listener


if __name__ == "__main__":
    main()
