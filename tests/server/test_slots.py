"""Slots of WebSocket connections, second by second: which connections get one, and which are closed to make room."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from server.net import slots
from server.net.slots import NoSlotError, Slot, Slots


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(slots, "time", SimpleNamespace(monotonic=clock.monotonic))
    return clock


class Connection:
    """A task that takes a slot and serves until its slot goes to another one."""

    def __init__(self, pool: Slots, client: str, clock: Clock) -> None:
        self.slot: Slot | None = None
        self.task = asyncio.create_task(self._serve(pool, client, clock))

    async def _serve(self, pool: Slots, client: str, clock: Clock) -> None:
        self.slot = pool.take(client)
        self.slot.played = clock.now
        await asyncio.Event().wait()

    async def begun(self) -> Slot:
        await asyncio.sleep(0)
        if self.task.done():
            self.task.result()
        assert self.slot is not None
        return self.slot


def play(scenario: Callable[[], object]) -> None:
    asyncio.run(scenario())  # type: ignore[arg-type]


@pytest.mark.parametrize(("has_episode", "seconds"), [(False, 10.0), (True, 60.0)])
def test_a_connection_gives_way_after_ten_seconds_or_a_minute_with_an_episode(
    clock: Clock, has_episode: bool, seconds: float
) -> None:
    async def scenario() -> None:
        pool = Slots(1, 1)
        idle = Connection(pool, "a", clock)
        slot = await idle.begun()
        slot.has_episode = has_episode
        clock.now += seconds - 0.001
        early = Connection(pool, "b", clock)
        with pytest.raises(NoSlotError) as refused:
            await early.begun()
        assert (refused.value.taken, refused.value.most, slot.gave_way) == (1, 1, False)
        assert "INFERENCEGYM_MAX_CONCURRENT_ENVS" in refused.value.next_step
        clock.now += 0.001
        await Connection(pool, "b", clock).begun()
        assert slot.gave_way
        with pytest.raises(asyncio.CancelledError):
            await idle.task

    play(scenario)


def test_those_without_an_episode_give_way_first_and_then_the_one_idle_the_longest(clock: Clock) -> None:
    async def scenario() -> None:
        pool = Slots(3, 3)
        taken = []
        for has_episode in (True, True, False):
            connection = Connection(pool, "a", clock)
            taken.append(await connection.begun())
            taken[-1].has_episode = has_episode
            clock.now += 1.0
        clock.now += 100.0
        gone = []
        for _ in range(3):
            newcomer = await Connection(pool, "b", clock).begun()
            newcomer.played = clock.now + 1000.0
            gone.append([slot.gave_way for slot in taken])
        assert gone == [[False, False, True], [True, False, True], [True, True, True]]

    play(scenario)


def test_a_client_has_its_own_limit_and_its_own_idle_connections_give_way(clock: Clock) -> None:
    async def scenario() -> None:
        pool = Slots(3, 2)
        other = await Connection(pool, "b", clock).begun()
        own = [await Connection(pool, "a", clock).begun() for _ in range(2)]
        with pytest.raises(NoSlotError) as refused:
            await Connection(pool, "a", clock).begun()
        assert (refused.value.taken, refused.value.most) == (2, 2)
        assert "INFERENCEGYM_CONCURRENT_ENVS_PER_CLIENT" in refused.value.next_step
        clock.now += 10.0
        await Connection(pool, "a", clock).begun()
        assert (other.gave_way, sum(slot.gave_way for slot in own)) == (False, 1)

    play(scenario)


def test_where_one_client_may_have_all_slots_the_limit_is_that_of_all(clock: Clock) -> None:
    async def scenario() -> None:
        pool = Slots(2, 2)
        first = await Connection(pool, "a", clock).begun()
        await Connection(pool, "a", clock).begun()
        with pytest.raises(NoSlotError) as refused:
            await Connection(pool, "a", clock).begun()
        assert "INFERENCEGYM_MAX_CONCURRENT_ENVS" in refused.value.next_step
        pool.give_back(first)
        await Connection(pool, "b", clock).begun()

    play(scenario)
