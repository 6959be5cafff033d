"""Limits on requests: API key, origin, rate, size; and the identity of the client."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import ipaddress
import re
import time
from collections import OrderedDict
from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from starlette.types import Scope

from inferencegym.errors import UnauthorizedError, short_repr
from server.net.errors import ForeignOriginError, RateLimitedError, UnknownHostError
from server.net.json_io import RawHeaders
from server.settings import Settings

OPEN_PATHS: Final = frozenset({"/health", "/metadata"})
"""Paths for probes, which need no API key and are answered under any host name."""
MAX_NAME_CHARS: Final = 64
"""Most that is kept of a client whose name is no address."""
IPV6_CLIENT_BITS: Final = 64
"""Prefix length of IPv6 networks that count as one client: the smallest network that a host is given."""


class Limits:
    """Checks of a request before it is handled: host, API key, origin, declared size and rate."""

    def __init__(self, settings: Settings) -> None:
        keys = [key.get_secret_value().encode() for key in settings.api_key or ()]
        self._keys = [hashlib.sha256(key).digest() for key in keys]
        names = "|".join(re.escape(host).replace(r"\*", "[^:]*") for host in settings.allowed_hosts)
        self._hosts = re.compile(f"({names})(:.*)?", re.IGNORECASE) if names else None
        self._all_origins = settings.cors == "all"
        self._resets = RateLimit(settings.resets_per_minute) if settings.resets_per_minute else None

    def check(self, scope: Scope) -> None:
        """Raise the error of the first check that a request fails."""
        path = scope["path"]
        if self._hosts is not None and path not in OPEN_PATHS:
            _check_host(scope["headers"], self._hosts)
        if self._keys and path not in OPEN_PATHS:
            self._check_key(scope["headers"])
        only_reads = scope["type"] == "http" and scope["method"] in ("GET", "HEAD", "OPTIONS")
        if not self._all_origins and not only_reads and _is_foreign(dict(scope["headers"])):
            raise ForeignOriginError("this server refuses requests from pages of other origins (INFERENCEGYM_CORS)")
        # Last, and only for the path's own method, so that refused requests do not count. Any page may send a GET in a
        # visitor's name.
        if scope["type"] == "http" and scope["method"] == "POST":
            self.take(path, scope)

    def take(self, path: str, scope: Scope) -> None:
        """Count a request, or a WebSocket's, if ``path`` is a reset of any environment. Raises RateLimitedError."""
        if self._resets is not None and path.endswith("/reset"):
            self._resets.take(sender_of(scope))

    def _check_key(self, headers: RawHeaders) -> None:
        for name, value in headers:
            if name == b"x-api-key":
                sent = value
            elif name == b"authorization" and value[:7].lower() == b"bearer ":
                sent = value[7:].strip()
            elif name == b"authorization" and value[:6].lower() == b"basic ":
                sent = _password(value[6:])
            else:
                continue
            # Digests are compared, so that the time does not depend on a key's length either.
            digest = hashlib.sha256(sent).digest()
            if any(hmac.compare_digest(digest, key) for key in self._keys):
                return
        raise UnauthorizedError("this server requires an API key, and it is missing or wrong")


def _password(credentials: bytes) -> bytes:
    """The password of HTTP's basic scheme, which a browser asks its visitor for; empty if it cannot be read."""
    try:
        return base64.b64decode(credentials.strip(), validate=True).partition(b":")[2]
    except binascii.Error:
        return b""


def _check_host(headers: RawHeaders, known: re.Pattern[str]) -> None:
    """Refuse unknown host names: a page may resolve its own name to this server (DNS rebinding)."""
    named = [value.decode("latin-1") for name, value in headers if name == b"host"]
    if not named or not all(map(known.fullmatch, named)):
        raise UnknownHostError(f"this server refuses the host name {short_repr(named[-1] if named else '')}")


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

    def take(self, client: str, wanted: int = 1) -> None:
        """Take so many tokens of a client. Raises RateLimitedError if fewer are left."""
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


def sender_of(scope: Scope) -> str:
    """The client for limits: its address, or the /64 network of an IPv6 address, which one host may own.

    Behind trusted proxies, uvicorn's middleware has put the address there that they forward.
    """
    return _client(scope["client"][0] if scope.get("client") else "")


def caller_of(scope: Scope) -> str:
    """Identity for the caller's most recent session: the client and, if sent, ``X-Client-Id``.

    Digests with a dot between them, so that the store has neither addresses nor values of arbitrary length. Several
    headers are one value with commas (RFC 9110, section 5.3).
    """
    sent = [value for name, value in scope["headers"] if name == b"x-client-id"]
    client = _digest(sender_of(scope).encode())
    return f"{client}.{_digest(b', '.join(sent))}" if sent else client


def _digest(value: bytes) -> str:
    return hashlib.sha256(value).hexdigest()[:32]


@lru_cache(256)  # a request asks for its client several times
def _client(address: str) -> str:
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address[:MAX_NAME_CHARS]
    # IPv4-mapped IPv6 (``::ffff:10.1.2.3``), as sockets on ``::`` show it, is IPv4.
    found = getattr(found, "ipv4_mapped", None) or found
    if found.version == 4:
        return str(found)
    return str(ipaddress.IPv6Network((int(found), IPV6_CLIENT_BITS), strict=False))
