"""ASGI middleware: request ids, access log, limits, CORS.

All of it is plain ASGI. Starlette's BaseHTTPMiddleware starts a task and two streams per request, which would halve the
steps per second.
"""

from __future__ import annotations

import itertools
import re
import secrets
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Final

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inferencegym.errors import InferenceGymError, short_text
from server.metrics import Metrics
from server.net.cpu import PAYER, CpuBudget
from server.net.json_io import SESSION_KEY
from server.net.limits import Limits
from server.net.logs import traceback_text, write_line
from server.net.problems import failure_reply, problem_reply
from server.settings import Settings

CLIENT_WENT_AWAY: Final = 499
"""Status in log and metrics of a request whose client disconnected before the answer."""
LOGGED_ID_CHARS: Final = 8
"""Anyone who knows a session id can play it, so the log shows only its beginning."""
LOGGED_PATH_CHARS: Final = 200

_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._-]{1,64}\Z")
_NOSNIFF: Final = (b"x-content-type-options", b"nosniff")


class RequestLog:
    """ASGI middleware that gives every request an id, counts it and logs it, and lets no browser guess its type."""

    def __init__(self, app: ASGIApp, settings: Settings, metrics: Metrics) -> None:
        self.app = app
        self._metrics = metrics
        self._mode = settings.access_log
        self._prefix = secrets.token_hex(4).encode()
        self._numbers = itertools.count(1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._not_http(scope, receive, send)
            return
        request_id = self._request_id(scope)
        started = time.perf_counter()
        status: int | None = None

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), _NOSNIFF, (b"x-request-id", request_id)]
            await send(message)

        try:
            await self.app(scope, receive, send_with_headers)
        except ClientDisconnect:
            status = CLIENT_WENT_AWAY
        except Exception:
            if status is None:  # FastAPI has answered for its routes, not for a step or for our own middleware
                await (await failure_reply())(scope, receive, send_with_headers)
            raise
        finally:
            took_s, status = time.perf_counter() - started, status or 500
            self._metrics.count(scope["path"], status, took_s)
            if self._mode == "all" or (self._mode == "errors" and status >= 400):
                self._write(scope, "request", request_id, status, took_s)

    def _request_id(self, scope: Scope) -> bytes:
        """The id that the client chose, or a new one."""
        sent: bytes = dict(scope["headers"]).get(b"x-request-id", b"")
        return sent if _REQUEST_ID.match(sent) else b"%s-%x" % (self._prefix, next(self._numbers))

    async def _not_http(self, scope: Scope, receive: Receive, send: Send) -> None:
        opened = int(scope["type"] == "websocket")
        self._metrics.websockets += opened
        started, is_logged = time.perf_counter(), opened and self._mode == "all"
        if is_logged:
            self._write(scope, "websocket_open", request_id := self._request_id(scope), None, 0.0)
        try:
            await self.app(scope, receive, send)
        finally:
            self._metrics.websockets -= opened
            if is_logged:
                self._write(scope, "websocket_close", request_id, None, time.perf_counter() - started)

    def _write(self, scope: Scope, event: str, request_id: bytes, status: int | None, took_s: float) -> None:
        session = scope.get(SESSION_KEY)
        client = scope.get("client")
        error = sys.exc_info()[1]
        cause = {} if error is None else {"traceback": traceback_text(error)}
        write_line(
            {
                "time": time.time(),
                "level": "error" if status and status >= 500 else "info",
                "event": event,
                "request_id": request_id.decode(),
                "session": session[:LOGGED_ID_CHARS] if session else None,
                "method": scope.get("method", "GET"),
                "path": short_text(scope["path"], LOGGED_PATH_CHARS),
                "status": status,
                "ms": round(1000 * took_s, 3),
                "client": client[0] if client else None,
                **cause,
            }
        )


class Guard:
    """ASGI middleware that refuses requests beyond the :class:`Limits`, and says whose long work they cause."""

    def __init__(self, app: ASGIApp, limits: Limits, cpu: CpuBudget) -> None:
        self.app = app
        self._limits = limits
        self._cpu = cpu

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        try:
            self._limits.check(scope)
        except InferenceGymError as error:
            await problem_reply(error, scope["path"])(scope, receive, send)
            return
        PAYER.set(partial(self._cpu.work_for, scope))
        await self.app(scope, receive, send)


class Cors(CORSMiddleware):
    """Starlette's CORS middleware, skipped for requests without Origin, as programs send them; without credentials."""

    def __init__(self, app: ASGIApp, methods: Sequence[str]) -> None:
        super().__init__(
            app,
            allow_origins=["*"],
            allow_methods=methods,
            allow_headers=["content-type", "authorization", "x-api-key", "x-client-id", "x-request-id"],
            expose_headers=["x-request-id", "retry-after"],
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and b"origin" in dict(scope["headers"]):
            await super().__call__(scope, receive, send)
        else:
            await self.app(scope, receive, send)


def proxies_of(settings: Settings) -> list[str]:
    """Trusted proxies, in IPv6 as well: a socket for both kinds of addresses shows IPv4 as ``::ffff:10.1.2.3``."""
    v4 = [network for network in settings.trusted_proxies if network.version == 4]
    mapped = [f"::ffff:{network.network_address}/{96 + network.prefixlen}" for network in v4]
    return [*map(str, settings.trusted_proxies), *mapped]
