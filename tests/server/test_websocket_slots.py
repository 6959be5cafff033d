"""Slots of WebSocket connections on a real server: how many one client may have, and which idle one gives way."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from inferencegym.client import InferenceGymEnv
from inferencegym.error_text import read_error
from tests.servers import PATIENCE_S, PATIENT, RunningServer, reset_when_there_is_room, running_server

NOBODY_GIVES_WAY = "import server.net.slots as s; s.NEW_S = s.IDLE_S = 1e9"
ANYBODY_GIVES_WAY = "import server.net.slots as s; s.NEW_S = s.IDLE_S = 0.0"
NETWORK_OF_ONE = "2001:db8:0:7:{:x}::1"
"""Addresses in one /64 network."""


@pytest.fixture(scope="module")
def two_slots(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("two"), before=ANYBODY_GIVES_WAY, max_concurrent_envs="2") as server:
        yield server


@asynccontextmanager
async def connected(
    server: RunningServer, client: str | None = None, path: str = "/ws"
) -> AsyncIterator[ClientConnection]:
    """A bare socket; ``client`` is the address that a proxy reports."""
    headers = {"X-Forwarded-For": client} if client else {}
    url = server.url.replace("http", "ws", 1) + path
    async with connect(url, proxy=None, additional_headers=headers, open_timeout=PATIENCE_S) as socket:
        yield socket


async def received(socket: ClientConnection) -> dict[str, Any]:
    return dict(json.loads(await asyncio.wait_for(socket.recv(), PATIENCE_S)))


async def closed(socket: ClientConnection) -> int | None:
    """Code with which a socket was closed, as soon as it is."""
    await asyncio.wait_for(socket.wait_closed(), PATIENCE_S)
    return socket.close_code


async def ask(socket: ClientConnection, kind: str, **data: Any) -> dict[str, Any]:
    await socket.send(json.dumps({"type": kind} if kind == "state" else {"type": kind, "data": data}))
    return await received(socket)


async def refusal(socket: ClientConnection) -> dict[str, Any] | None:
    """The server's first message if it refuses a socket; None if it accepts it."""
    with contextlib.suppress(ConnectionClosed):
        await socket.send('{"type": "state"}')
    said = await received(socket)
    return said["data"] if said["type"] == "error" else None


def env_at(server: RunningServer) -> InferenceGymEnv:
    return InferenceGymEnv(base_url=server.url, **PATIENT)


@pytest.mark.parametrize(
    "address",
    [pytest.param("192.0.2.9", id="ipv4"), pytest.param(NETWORK_OF_ONE, id="ipv6", marks=pytest.mark.slow)],
)
def test_sockets_of_one_client_take_three_quarters_of_the_slots_and_others_play(tmp_path: Path, address: str) -> None:
    async def run(server: RunningServer) -> list[dict[str, Any]]:
        async with contextlib.AsyncExitStack() as held:
            refused = []
            for number in range(64):
                socket = await held.enter_async_context(connected(server, address.format(number)))
                if (said := await refusal(socket)) is not None:
                    refused.append(said)
            async with env_at(server) as other:
                await other.reset(seed=3)
                assert (await other.step({})).observation.timestep == 1
            return refused

    with running_server(
        tmp_path, before=NOBODY_GIVES_WAY, max_concurrent_envs="64", trusted_proxies="127.0.0.1"
    ) as server:
        refused = asyncio.run(run(server))
    assert len(refused) == 16
    for said in refused:
        assert (said["code"], said["active_sessions"], said["max_sessions"]) == ("CAPACITY_REACHED", 48, 48)
        text, code = read_error(said["message"]) or ("", "")
        assert (code, "INFERENCEGYM_CONCURRENT_ENVS_PER_CLIENT" in text) == ("capacity", True)


def test_sixty_four_idle_sockets_do_not_keep_a_client_out(tmp_path: Path) -> None:
    """All of them with the constants of production: a socket that nothing was said over gives way after ten seconds."""

    async def run(server: RunningServer) -> None:
        async with contextlib.AsyncExitStack() as held:
            for _ in range(64):
                await held.enter_async_context(connected(server))
            async with env_at(server) as player:
                await reset_when_there_is_room(player, seed=3)
                assert (await player.step({})).observation.timestep == 1

    with running_server(tmp_path, max_concurrent_envs="64", concurrent_envs_per_client="64") as server:
        asyncio.run(run(server))


def test_the_connection_idle_the_longest_gives_way_and_its_episode_goes_on(two_slots: RunningServer) -> None:
    async def run(server: RunningServer) -> None:
        async with connected(server) as idle, connected(server) as busy:
            await ask(busy, "reset")
            await ask(idle, "reset", episode_id="kept")
            await ask(idle, "step", batch_size=64)
            await ask(busy, "step")
            # asking for the state does not count as playing
            await ask(idle, "state")
            async with connected(server) as third:
                assert (await ask(third, "reset"))["type"] == "observation"
                assert (await closed(idle), "resume=True" in (idle.close_reason or "")) == (1013, True)
                await ask(busy, "step")
                async with connected(server) as again:
                    resumed = await ask(again, "reset", episode_id="kept", resume=True)
                    assert resumed["data"]["observation"]["timestep"] == 1
                    assert (await ask(again, "step"))["data"]["observation"]["timestep"] == 2
                    await closed(third)
                assert (await ask(busy, "step"))["data"]["observation"]["timestep"] == 3

    asyncio.run(run(two_slots))
    assert "Traceback" not in two_slots.log.read_text()


def test_our_client_goes_on_by_itself_after_it_gave_way(tmp_path: Path) -> None:
    async def run(server: RunningServer) -> None:
        async with env_at(server) as one, env_at(server) as two, env_at(server) as undisturbed:
            envs = (one, two)
            for env in envs:
                await env.reset(seed=4, task_id=2)
            for number in range(1, 6):
                # Two play at the single slot, each in its turn.
                results = [await env.step({"batch_size": 20 * number}) for env in envs]
                assert results[0] == results[1]
                assert results[0].observation.timestep == number
            await undisturbed.reset(seed=4, task_id=2)
            for number in range(1, 6):
                last = await undisturbed.step({"batch_size": 20 * number})
            assert last == results[0]

    with running_server(tmp_path, before=ANYBODY_GIVES_WAY, max_concurrent_envs="1") as server:
        asyncio.run(run(server))


@pytest.mark.parametrize(
    "say", [None, {"type": "state"}, {"type": "step", "data": {}}, {"type": "reset", "data": {"seed": -1}}]
)
def test_a_connection_without_an_episode_gives_way_before_one_that_is_idle_for_longer(
    two_slots: RunningServer, say: dict[str, Any] | None
) -> None:
    async def run(server: RunningServer) -> None:
        async with connected(server) as idle:
            await ask(idle, "reset")
            async with connected(server) as unused:
                if say:
                    await unused.send(json.dumps(say))
                    await received(unused)
                async with connected(server) as third:
                    assert (await ask(third, "reset"))["type"] == "observation"
                    assert await closed(unused) == 1013
                    assert (await ask(idle, "step"))["type"] == "observation"

    asyncio.run(run(two_slots))
