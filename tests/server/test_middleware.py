"""Identifying callers, behind proxies and on sockets that accept IPv4 and IPv6."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from server.middleware import proxies_of
from server.net import limits
from server.net.errors import RateLimitedError
from server.net.limits import RateLimit, caller_of, sender_of
from server.settings import Settings


def address(peer: str, forwarded: str = "", trusted: str = "10.0.0.0/8") -> str:
    """The client that the server derives from a request from ``peer`` with this ``X-Forwarded-For``."""
    settings: dict[str, Any] = {"trusted_proxies": trusted}
    scope: Any = {"type": "http", "client": (peer, 1), "headers": []}
    if forwarded:
        scope["headers"].append((b"x-forwarded-for", forwarded.encode()))

    async def app(*_: Any) -> None:
        pass

    asyncio.run(ProxyHeadersMiddleware(app, proxies_of(Settings(**settings)))(scope, Mock(), Mock()))
    return sender_of(scope)


def caller(*client_ids: bytes) -> str:
    """The key under which a request with these ``X-Client-Id`` headers is counted."""
    return caller_of({"client": ("9.9.9.9", 1), "headers": [(b"x-client-id", value) for value in client_ids]})


def test_a_caller_takes_a_few_bytes_however_many_and_long_its_headers_are() -> None:
    sent = [(), (b"",), (b"me",), (b"",) * 4_000, (b"x" * 60_000,)]
    assert max(len(caller(*one)) for one in sent) <= 65, "two digests of 32 digits, and a dot"
    assert len({caller(*one) for one in sent}) == len(sent)
    assert {caller(*one).partition(".")[0] for one in sent} == {caller()}, "the address is the client"


def test_several_client_ids_are_one_value_with_commas_as_http_has_it() -> None:
    assert caller(b"a", b"b") == caller(b"a, b") != caller(b"b", b"a")


@pytest.mark.parametrize("peer", ["10.1.2.3", "::ffff:10.1.2.3", "::FFFF:0a01:0203"])
def test_a_trusted_proxy_is_believed_on_a_socket_for_both_kinds_of_addresses(peer: str) -> None:
    assert address(peer, "9.9.9.9, 8.8.8.8") == "8.8.8.8"
    assert address(peer, "::ffff:8.8.8.8, ::ffff:10.9.9.9") == "8.8.8.8"
    assert address(peer, "2001:db8::1") == "2001:db8::/64"
    assert address(peer) == "10.1.2.3"


def test_a_proxy_of_any_trusted_network_is_believed() -> None:
    for peer in ("10.1.2.3", "192.168.3.4"):
        assert address(peer, "9.9.9.9, 8.8.8.8, 192.168.7.7", "10.0.0.0/8, 192.168.0.0/16") == "8.8.8.8"
    assert address("172.16.0.1", "9.9.9.9", "10.0.0.0/8, 192.168.0.0/16") == "172.16.0.1"


@pytest.mark.parametrize("trusted", ["", "10.0.0.0/8"])
def test_an_ipv4_caller_has_one_address_whichever_socket_it_comes_through(trusted: str) -> None:
    assert address("::ffff:8.8.8.8", "9.9.9.9", trusted) == address("8.8.8.8", "9.9.9.9", trusted) == "8.8.8.8"
    assert address("2001:db8::1", "9.9.9.9", trusted) == "2001:db8::/64"


def test_a_peer_that_is_not_an_ip_address_is_kept_and_not_trusted() -> None:
    assert address("testclient", "9.9.9.9") == "testclient"
    assert address("10.1.2.3", "9.9.9.9, " + "x" * 60_000) == 64 * "x"


def test_a_rate_limit_gives_a_minutes_worth_at_once_and_no_more_after_any_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(limits, "time", SimpleNamespace(monotonic=lambda: now[0]))
    limit = RateLimit(30)  # one every two seconds

    def takes(count: int, client: str = "a") -> None:
        """This many requests in a row are accepted, and one more is refused."""
        for _ in range(count):
            limit.take(client)
        with pytest.raises(RateLimitedError) as refused:
            limit.take(client)
        assert 0.0 < refused.value.retry_after_s <= 2.0

    takes(30)
    takes(0)
    takes(30, "b")  # another client has its own allowance
    now[0] += 4.5
    takes(2)
    now[0] += 86_400.0
    takes(30)  # an idle client accumulates no allowance beyond one minute
