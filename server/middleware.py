"""What stands between the socket and the routes: request ids, headers, the log, the API key and rate limits.

All of it is plain ASGI. Starlette's BaseHTTPMiddleware starts a task and two streams per request, which would halve the
steps per second.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import itertools
import re
import secrets
import sys
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Final

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inferencegym.errors import InferenceGymError
from server.families import PREFIXES
from server.http_protocol import Answer
from server.net.errors import BodyTooLargeError, ForeignOriginError, RateLimitedError, UnauthorizedError
from server.net.json_io import REQUEST_ID_KEY, JsonReply, RawHeaders
from server.net.logs import LineLog
from server.net.metrics import Metrics
from server.net.problems import failure_reply, problem_reply
from server.settings import Settings

CLIENT_WENT_AWAY: Final = 499
"""Status under which a request is logged and counted that nobody waited for; no answer carries it."""
SESSION_KEY: Final = "inferencegym.session"
"""Key of the ASGI scope under which a route leaves the session id for the log."""
OPEN_PATHS: Final = frozenset({"/health"})
LOGGED_ID_CHARS: Final = 8
"""A session id is what lets its holder play, so the log shows only its beginning: enough to follow one session."""

RouteAtOnce = Callable[[Scope, bytes], JsonReply | None]
"""From a request and its body to the answer, or to None, with nothing changed."""

_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._-]{1,64}\Z")


class Requests:
    """What every request gets, whichever way it is answered: an id, the security headers, a count and a log line."""

    def __init__(self, settings: Settings, log: LineLog, metrics: Metrics) -> None:
        self._log = log
        self._metrics = metrics
        self._mode = settings.access_log
        self._prefix = secrets.token_hex(4)
        self._numbers = itertools.count(1)
        self._headers = (
            (b"x-content-type-options", b"nosniff"),
            (b"referrer-policy", b"no-referrer"),
            # Not X-Frame-Options: the page is shown in a frame on its Space.
            (b"content-security-policy", f"frame-ancestors {settings.frame_ancestors}".encode()),
        )

    def request_id(self, scope: Scope) -> bytes:
        """The id that the client chose, or a new one."""
        for name, value in scope["headers"]:
            if name == b"x-request-id" and _REQUEST_ID.match(value):
                return bytes(value)
        return b"%s-%x" % (self._prefix.encode(), next(self._numbers))

    def headers(self, given: RawHeaders, request_id: bytes) -> list[tuple[bytes, bytes]]:
        """The headers of an answer: those given and those that all have."""
        has_policy = any(name == b"content-security-policy" for name, _ in given)
        return [*given, *self._headers[: 2 if has_policy else 3], (b"x-request-id", request_id)]

    def answered(
        self, scope: Scope, request_id: bytes, status: int, took_s: float, error: BaseException | None = None
    ) -> None:
        """Count a request and write it to the log."""
        self._metrics.count(scope["path"], status, took_s)
        if self._mode == "all" or (self._mode == "errors" and status >= 400):
            self._write(scope, request_id, status, took_s, error)

    def opened(self, websockets: int) -> None:
        """Count WebSockets that were opened, or with a minus closed."""
        self._metrics.websockets += websockets

    def _write(self, scope: Scope, request_id: bytes, status: int, took_s: float, error: BaseException | None) -> None:
        session = scope.get(SESSION_KEY)
        client = scope.get("client")
        cause = {} if error is None else {"traceback": "".join(traceback.format_exception(error))}
        self._log.write(
            {
                "time": time.time(),
                "level": "info" if status < 500 else "error",
                "event": "request",
                "request_id": request_id.decode(),
                "session": session[:LOGGED_ID_CHARS] if session else None,
                "method": scope["method"],
                "path": scope["path"],
                "status": status,
                "ms": round(1000 * took_s, 3),
                "client": client[0] if client else None,
                **cause,
            }
        )


class RequestLog:
    """Gives every request what all get (:class:`Requests`)."""

    def __init__(self, app: ASGIApp, requests: Requests) -> None:
        self.app = app
        self._requests = requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._not_http(scope, receive, send)
            return
        request_id = self._requests.request_id(scope)
        scope[REQUEST_ID_KEY] = request_id
        started = time.perf_counter()
        status = 500

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = self._requests.headers(message.get("headers", ()), request_id)
            await send(message)

        try:
            await self.app(scope, receive, send_with_headers)
        except ClientDisconnect:
            status = CLIENT_WENT_AWAY
        finally:
            self._requests.answered(scope, request_id, status, time.perf_counter() - started, sys.exc_info()[1])

    async def _not_http(self, scope: Scope, receive: Receive, send: Send) -> None:
        opened = int(scope["type"] == "websocket")
        self._requests.opened(opened)
        try:
            await self.app(scope, receive, send)
        finally:
            self._requests.opened(-opened)


class Limits:
    """What requests must satisfy before anything is done for them."""

    def __init__(self, settings: Settings) -> None:
        key = settings.api_key
        self._key = None if key is None else key.get_secret_value().encode()
        self._callers = Callers(settings)
        self._all_origins = settings.cors == "all"
        self._largest = max(
            settings.max_body_bytes, settings.max_log_bytes, settings.max_trace_bytes, settings.max_batch_bytes
        )
        per_minute = {
            "/reset": settings.resets_per_minute,
            "/reset/batch": settings.batch_resets_per_minute,
            "/grader": settings.grades_per_minute,
            "/baseline": settings.baselines_per_minute,
            "/play": settings.plays_per_minute,
            "/shadow": settings.shadows_per_minute,
        }
        # One allowance for a path under all its prefixes: an environment may be served at two of them.
        self._limits = {
            prefix + path: limit
            for path, limit in ((path, RateLimit(n)) for path, n in per_minute.items() if n)
            for prefix in PREFIXES
        }

    def check(self, scope: Scope) -> None:
        """Refuse what has no API key, comes from a foreign page, is too much at once, or longer than any path takes."""
        path = scope["path"]
        if self._key is not None and path not in OPEN_PATHS:
            self._check_key(scope, self._key)
        if not self._all_origins and not _only_reads(scope) and _is_foreign(scope["headers"]):
            raise ForeignOriginError("pages of other origins may not play here")
        limit = self._limits.get(path)
        if limit is not None:
            limit.take(self._callers.address(scope))
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit() and int(value) > self._largest:
                raise BodyTooLargeError(f"the body is longer than {self._largest:,} bytes")

    def _check_key(self, scope: Scope, key: bytes) -> None:
        for name, value in scope["headers"]:
            if name == b"x-api-key":
                sent = value
            elif name == b"authorization" and value[:7].lower() == b"bearer ":
                sent = value[7:].strip()
            else:
                continue
            # Both are hashed first, so that not even the length of the key shows in the time this takes.
            if hmac.compare_digest(hashlib.sha256(sent).digest(), hashlib.sha256(key).digest()):
                return
        raise UnauthorizedError("this server wants an API key, and the one sent is missing or wrong")


def _only_reads(scope: Scope) -> bool:
    return scope["type"] == "http" and scope["method"] in ("GET", "HEAD", "OPTIONS")


def _is_foreign(headers: RawHeaders) -> bool:
    """Whether a page of another origin sent this. CORS alone would not stop it: browsers do not always ask before.

    A browser lets no page set these headers. Programs send none of them.
    """
    found = dict(headers)
    if b"sec-fetch-site" in found:
        return found[b"sec-fetch-site"] not in (b"same-origin", b"none")
    if b"origin" not in found:
        return False
    # A proxy before us may have put its own name for us in the place of the one that the browser used.
    ours = [found[name].lower() for name in (b"host", b"x-forwarded-host") if name in found]
    return found[b"origin"].partition(b"://")[2].lower() not in ours


class Guard:
    """Refuses requests beyond the :class:`Limits`."""

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self.app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        try:
            self._limits.check(scope)
        except InferenceGymError as error:
            if scope["type"] == "http":
                await problem_reply(error, scope["path"])(scope, receive, send)
            else:
                await send({"type": "websocket.close", "code": 1008, "reason": str(error)})
            return
        await self.app(scope, receive, send)


class Shortcut:
    """Takes the most used requests straight to their routes.

    FastAPI's way there (telemetry, two exit stacks, every route's pattern in turn) takes longer than a step of the
    simulator. The routes are the same ones that FastAPI documents and would find.
    """

    def __init__(self, app: ASGIApp, posts: Mapping[str, ASGIApp]) -> None:
        self.app = app
        self._posts = posts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._posts.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if route is None:
            await self.app(scope, receive, send)
            return
        try:
            await route(scope, receive, send)
        except InferenceGymError as error:
            await problem_reply(error, scope["path"])(scope, receive, send)


class AtOnce:
    """A route's short way: answers requests that have nothing to wait for, before the application is asked.

    What is refused gets no answer here, and nothing is changed: errors are the application's to report, and so are
    requests from pages, whose answers may need other headers. A failure of the server's own is reported here. Its step
    may be stored already, and the application, asked again, would take the next one.
    """

    def __init__(self, requests: Requests, limits: Limits, route: RouteAtOnce) -> None:
        self._requests = requests
        self._limits = limits
        self._route = route

    def __call__(self, scope: Scope, body: bytes) -> Answer | None:
        """Status, headers and body of the answer to a request, or None."""
        if any(name == b"origin" for name, _ in scope["headers"]):
            return None
        started = time.perf_counter()
        failure = None
        try:
            self._limits.check(scope)
            answer = self._route(scope, body)
        except InferenceGymError:
            return None
        except Exception as error:  # noqa: BLE001 - whatever it is, it is reported and logged below
            answer, failure = failure_reply(), error
        if answer is None:
            return None
        request_id = self._requests.request_id(scope)
        self._requests.answered(scope, request_id, answer.status_code, time.perf_counter() - started, failure)
        return answer.status_code, self._requests.headers(answer.raw_headers, request_id), answer.body


class RateLimit:
    """A bucket of tokens per client: a minute's worth at once, refilled evenly."""

    MAX_CLIENTS: Final = 10_000

    def __init__(self, per_minute: int) -> None:
        self._capacity = float(per_minute)
        self._per_second = per_minute / 60.0
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, client: str) -> None:
        """Use one token of this client's. Raises RateLimitedError when there is none."""
        now = time.monotonic()
        tokens, then = self._buckets.pop(client, (self._capacity, now))
        tokens = min(self._capacity, tokens + (now - then) * self._per_second)
        allowed = tokens >= 1.0
        self._buckets[client] = (tokens - allowed, now)
        if len(self._buckets) > self.MAX_CLIENTS:
            self._buckets.popitem(last=False)
        if not allowed:
            wait = (1.0 - tokens) / self._per_second
            raise RateLimitedError(f"this path takes {self._capacity:g} requests a minute from one client", wait)


class Callers:
    """Who sent a request: the client's address, and through proxies only where the operator trusts them."""

    def __init__(self, settings: Settings) -> None:
        self._trusted = settings.trusted_proxies

    def address(self, scope: Scope) -> str:
        """Address of the client: the socket's peer, or the last untrusted hop that trusted proxies report."""
        client = scope.get("client")
        peer = _plain(client[0]) if client else ""
        if not self._trusted or not self._is_trusted(peer):
            return peer
        hops: list[str] = []
        for name, value in scope["headers"]:
            if name == b"x-forwarded-for":
                hops += [hop.strip() for hop in value.decode("latin-1").split(",")]
        for hop in reversed(hops):
            if not _is_address(hop):
                return peer  # a proxy that forwards what is no address is not to be believed
            peer = _plain(hop)
            if not self._is_trusted(peer):
                break
        return peer

    def caller(self, scope: Scope) -> str:
        """Identity under which the most recent session is remembered: the address and, if sent, ``X-Client-Id``.

        Digests, so that the store holds no addresses, with a dot between them.
        """
        parts = [self.address(scope).encode()]
        parts += [value for name, value in scope["headers"] if name == b"x-client-id"]
        return ".".join(hashlib.sha256(part).hexdigest()[:32] for part in parts)

    def _is_trusted(self, address: str) -> bool:
        if not _is_address(address):
            return False
        ip = ipaddress.ip_address(address)
        return any(ip in network for network in self._trusted)


def _plain(address: str) -> str:
    """An IPv4 address as such: a socket that listens on ``::`` shows it as ``::ffff:10.1.2.3``, in no IPv4 network."""
    if ":" not in address or not _is_address(address):
        return address
    return str(getattr(ipaddress.ip_address(address), "ipv4_mapped", None) or address)


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


class Cors(CORSMiddleware):
    """Starlette's CORS handling for requests that come from a page; programs send no Origin and need none of it."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and any(name == b"origin" for name, _ in scope["headers"]):
            await super().__call__(scope, receive, send)
        else:
            await self.app(scope, receive, send)


def cors_options(settings: Settings) -> Mapping[str, Any]:
    """Arguments of Starlette's CORS middleware: credentials are never allowed."""
    methods = ["GET", "POST"] if settings.cors == "all" else ["GET"]
    return {
        "allow_origins": ["*"],
        "allow_methods": methods,
        "allow_headers": ["content-type", "authorization", "x-api-key", "x-client-id", "x-request-id"],
        "expose_headers": ["x-request-id", "retry-after"],
        "allow_credentials": False,
        "max_age": 600,
    }
