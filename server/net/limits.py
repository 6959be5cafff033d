"""Limits on requests: API key, origin, rate, size; and the identity of the client behind proxies."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import ipaddress
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Final

from starlette.types import Scope

from inferencegym.errors import short_repr
from server.net.errors import (
    BodyTooLargeError,
    ForeignOriginError,
    HeadTooLargeError,
    RateLimitedError,
    UnauthorizedError,
    UnknownHostError,
)
from server.net.json_io import RawHeaders
from server.settings import Settings

OPEN_PATHS: Final = frozenset({"/health"})
"""Paths for probes, which need no API key and are answered under any host name."""
MAX_HEAD_BYTES: Final = 65_536
"""Most bytes of path, query and headers of a request; uvicorn with httptools does not limit them."""
IPV6_CLIENT_BITS: Final = 64
"""Prefix length of IPv6 networks that count as one client: the smallest network that a host is given."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Limits:
    """Checks of a request before it is handled: host, API key, origin, declared size and rate."""

    def __init__(self, settings: Settings, prefixes: Sequence[str], callers: Callers) -> None:
        key = settings.api_key
        self._key = None if key is None else key.get_secret_value().encode()
        self._callers = callers
        self._hosts = frozenset(host for host in settings.allowed_hosts if not host.startswith("*"))
        self._host_endings = tuple(host.removeprefix("*") for host in settings.allowed_hosts if host.startswith("*"))
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
            "/plan": settings.shadows_per_minute,
        }
        # One limit for a path under all its prefixes, because an environment may be served at two of them.
        self._limits = {
            prefix + path: limit
            for path, limit in ((path, RateLimit(n)) for path, n in per_minute.items() if n)
            for prefix in prefixes
        }

    def check(self, scope: Scope) -> None:
        """Raise the error of the first check that a request fails."""
        path = scope["path"]
        if (self._hosts or self._host_endings) and path not in OPEN_PATHS:
            self._check_host(scope["headers"])
        if self._key is not None and path not in OPEN_PATHS:
            self._check_key(scope, self._key)
        found = dict(scope["headers"])
        if not self._all_origins and not _only_reads(scope) and _is_foreign(found):
            raise ForeignOriginError("pages of other origins may not play on this server")
        length = found.get(b"content-length", b"")
        if length.isdigit() and int(length) > self._largest:
            raise BodyTooLargeError(f"the body is longer than {self._largest:,} bytes")
        head_bytes = len(scope.get("raw_path", b"")) + len(scope["query_string"])
        head_bytes += sum(map(len, chain.from_iterable(scope["headers"])))
        if head_bytes > MAX_HEAD_BYTES:
            raise HeadTooLargeError(f"path and headers are longer than {MAX_HEAD_BYTES:,} bytes")
        # Last, and only for the path's own method, so that refused requests do not count. Any page may send a GET in a
        # visitor's name.
        if scope["type"] == "http" and scope["method"] == ("GET" if path.endswith("/baseline") else "POST"):
            self.take(path, scope)

    def take(self, path: str, scope: Scope, n: int = 1) -> None:
        """Count a request for ``path``, or a WebSocket's for the same, ``n`` times. Raises RateLimitedError."""
        limit = self._limits.get(path)
        if limit is not None:
            limit.take(self._callers.client(scope), n)

    def _check_host(self, headers: RawHeaders) -> None:
        """Refuse unknown host names: a page may resolve its own name to this server (DNS rebinding)."""
        named = [_host_name(value) for name, value in headers if name == b"host"]
        if not named or not all(name in self._hosts or name.endswith(self._host_endings) for name in named):
            raise UnknownHostError(f"this server does not answer to {short_repr(named[-1] if named else '')}")

    def _check_key(self, scope: Scope, key: bytes) -> None:
        for name, value in scope["headers"]:
            if name == b"x-api-key":
                sent = value
            elif name == b"authorization" and value[:7].lower() == b"bearer ":
                sent = value[7:].strip()
            elif name == b"authorization" and value[:6].lower() == b"basic ":
                sent = _password(value[6:])
            else:
                continue
            # Both are hashed first, so that the time of the comparison does not depend on the key's length either.
            if hmac.compare_digest(hashlib.sha256(sent).digest(), hashlib.sha256(key).digest()):
                return
        raise UnauthorizedError("this server requires an API key, and it is missing or wrong")


def _password(credentials: bytes) -> bytes:
    """The password of HTTP's basic scheme, which a browser asks its visitor for; empty if it cannot be read."""
    try:
        return base64.b64decode(credentials.strip(), validate=True).partition(b":")[2]
    except binascii.Error:
        return b""


def _host_name(value: bytes) -> str:
    """The Host header without its port; an IPv6 address keeps its brackets."""
    host = value.decode("latin-1").lower()
    return host.partition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0]


def _only_reads(scope: Scope) -> bool:
    return scope["type"] == "http" and scope["method"] in ("GET", "HEAD", "OPTIONS")


def _is_foreign(found: Mapping[bytes, bytes]) -> bool:
    """Whether a page of another origin sent this. CORS alone would not stop it: browsers send some without preflight.

    Pages cannot set these headers; browsers do. Programs send none of them.
    """
    if b"sec-fetch-site" in found:
        return found[b"sec-fetch-site"] not in (b"same-origin", b"none")
    if b"origin" not in found:
        return False
    # A proxy may have replaced the host name that the browser used.
    ours = [found[name].lower() for name in (b"host", b"x-forwarded-host") if name in found]
    return found[b"origin"].partition(b"://")[2].lower() not in ours


class RateLimit:
    """Token bucket per client: up to a minute's requests at once, refilled evenly."""

    MAX_CLIENTS: Final = 10_000

    def __init__(
        self, per_minute: int, said: str = "at most {most:g} of these requests a minute come from one client"
    ) -> None:
        self._said = said.format(most=per_minute)
        self._capacity = float(per_minute)
        self._per_second = per_minute / 60.0
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, client: str, n: int = 1) -> None:
        """Take ``n`` tokens of a client, at most a full bucket. Raises RateLimitedError if fewer are left."""
        wanted = min(float(n), self._capacity)
        tokens = self.charge(client, 0)
        if tokens < wanted:
            raise RateLimitedError(self._said, (wanted - tokens) / self._per_second)
        self.charge(client, wanted)

    def charge(self, client: str, n: float) -> float:
        """Take ``n`` tokens of a client, who may be left with fewer than none; returns how many are left."""
        now = time.monotonic()
        tokens, then = self._buckets.pop(client, (self._capacity, now))
        tokens = min(self._capacity, tokens + (now - then) * self._per_second) - n
        self._buckets[client] = (tokens, now)
        if len(self._buckets) > self.MAX_CLIENTS:
            self._buckets.popitem(last=False)
        return tokens


class Callers:
    """Identifies the sender of a request: its address, taken from proxies' headers only if the operator trusts them."""

    def __init__(self, settings: Settings) -> None:
        self._trusted = settings.trusted_proxies

    def address(self, scope: Scope) -> str:
        """Address of the client: the socket's peer, or the last untrusted hop that trusted proxies report."""
        client = scope.get("client")
        sent = client[0] if client else ""
        peer = _address(sent)
        if not self._is_trusted(peer):
            return str(peer or sent)
        hops: list[str] = []
        for name, value in scope["headers"]:
            if name == b"x-forwarded-for":
                hops += [hop.strip() for hop in value.decode("latin-1").split(",")]
        for hop in reversed(hops):
            further = _address(hop)
            if further is None:
                break  # do not trust a proxy that forwards something other than an address
            peer = further
            if not self._is_trusted(peer):
                break
        return str(peer)

    def client(self, scope: Scope) -> str:
        """The client for limits: the address, or the /64 network of an IPv6 address, which one host may own."""
        address = self.address(scope)
        if not isinstance(found := _address(address), ipaddress.IPv6Address):
            return address
        return str(ipaddress.IPv6Network((int(found), IPV6_CLIENT_BITS), strict=False))

    def caller(self, scope: Scope) -> str:
        """Identity for the caller's most recent session: the client and, if sent, ``X-Client-Id``.

        Digests with a dot between them, so that the store has neither addresses nor values of arbitrary length. Several
        headers are one value with commas (RFC 9110, section 5.3).
        """
        sent = [value for name, value in scope["headers"] if name == b"x-client-id"]
        client = _digest(self.client(scope).encode())
        return f"{client}.{_digest(b', '.join(sent))}" if sent else client

    def _is_trusted(self, address: Address | None) -> bool:
        return address is not None and any(address in network for network in self._trusted)


def _digest(value: bytes) -> str:
    return hashlib.sha256(value).hexdigest()[:32]


@lru_cache(256)  # a request asks for its client's address several times
def _address(text: str) -> Address | None:
    """An address; IPv4-mapped IPv6 (``::ffff:10.1.2.3``, as sockets on ``::`` show it) as IPv4. None: no address."""
    try:
        found = ipaddress.ip_address(text)
    except ValueError:
        return None
    return getattr(found, "ipv4_mapped", None) or found
