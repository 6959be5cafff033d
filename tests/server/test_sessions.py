"""Sessions lose nothing: eviction, restart, races and retries, over every kind of store."""

from __future__ import annotations

import asyncio
import random
import sqlite3
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import redis

from env.families import FAMILIES, SERVING, TRAFFIC
from env.family import EpisodeRecord
from env.inference_env import InferenceEnv
from env.traffic.tasks import list_traffic_tasks
from inferencegym import __version__
from inferencegym.errors import (
    CapacityError,
    EpisodeDoneError,
    InvalidActionError,
    OtherReleaseError,
    StepConflictError,
    StoreError,
    UnknownSessionError,
)
from inferencegym.tasks import list_tasks
from server.app import make_store
from server.net.errors import RateLimitedError
from server.sessions import quota
from server.sessions.manager import SHORT_S, SessionManager, StepResult
from server.sessions.store import SessionStore, StoredEpisode, stored_episode
from server.settings import Settings
from tests.redis_server import RedisServer
from tests.servers import position

EPISODES = [(SERVING, task.task_id) for task in list_tasks()] + [(TRAFFIC, t.task_id) for t in list_traffic_tasks()]


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.kill()


@pytest.fixture(params=["sqlite", "memory", "redis"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "redis":
        server: RedisServer = request.getfixturevalue("redis_server")
        server.empty()
        return server.url
    return f"sqlite://{tmp_path}/sessions.db" if request.param == "sqlite" else "memory://"


@pytest.fixture(params=["sqlite", "redis"])
def shared_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A store that two processes can share."""
    if request.param == "redis":
        server: RedisServer = request.getfixturevalue("redis_server")
        server.empty()
        return server.url
    return f"sqlite://{tmp_path}/sessions.db"


@asynccontextmanager
async def manager_on(url: str, **settings: Any) -> AsyncIterator[SessionManager]:
    chosen = Settings(store_url=url, **settings)
    store = make_store(chosen)
    await store.open()
    try:
        yield SessionManager(store, FAMILIES, chosen)
    finally:
        await store.close()


def action_of(family: str, rng: random.Random) -> dict[str, Any]:
    if family == TRAFFIC:
        return {"action": rng.choice(["allow_all", "throttle_70", "throttle_40", "drop_aggressive"])}
    return {"kv_budget": rng.uniform(0.1, 1.0), "batch_size": rng.randint(1, 512), "spec_length": rng.choice([0, 2, 8])}


def actions_of(family: str, count: int, seed: int = 0) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [action_of(family, rng) for _ in range(count)]


Told = tuple[StepResult, dict[str, Any]]


async def step(manager: SessionManager, session_id: str, action: Any, number: int | None = None) -> Told:
    """Take a step; its outcome, and the info that can be asked for until the next one."""
    outcome = await manager.step(session_id, action, number)
    return outcome, outcome.info()


async def undisturbed(family: str, task_id: Any, actions: list[dict[str, Any]]) -> list[Told]:
    async with manager_on("memory://") as manager:
        live, _ = await manager.reset(family, task_id=task_id, seed=5)
        return [await step(manager, live.session_id, action) for action in actions]


def test_an_evicted_environment_is_rebuilt_bit_for_bit(store_url: str) -> None:
    async def scenario() -> None:
        for family, task_id in EPISODES:
            actions = actions_of(family, 4)
            expected = await undisturbed(family, task_id, actions)
            async with manager_on(store_url, live_sessions=1) as manager:
                live, _ = await manager.reset(family, task_id=task_id, seed=5)
                outcomes = []
                for action in actions:
                    outcomes.append(await step(manager, live.session_id, action))
                    # Another session takes the only place in memory.
                    await manager.reset(family, task_id=task_id, seed=6)
                    assert len(manager) == 1
                assert outcomes == expected
                assert manager.counters.evictions >= 4

    asyncio.run(scenario())


def test_replays_and_the_starts_of_long_episodes_leave_the_event_loop_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_loop = list[bool]()
    loop_thread = threading.get_ident()
    reset = InferenceEnv.reset

    def noted(*args: Any, **more: Any) -> Any:
        on_loop.append(threading.get_ident() == loop_thread)
        return reset(*args, **more)

    monkeypatch.setattr(InferenceEnv, "reset", noted)

    async def scenario() -> None:
        async with manager_on("memory://", live_sessions=1) as manager:
            played, _ = await manager.reset(SERVING, seed=1)
            for _ in range(SHORT_S + 1):
                await manager.step(played.session_id, {})
            long, _ = await manager.reset(SERVING, seed=2, config={"episode_length": 2_000})
            await manager.get(played.session_id)
            await manager.get(long.session_id)

    asyncio.run(scenario())
    assert on_loop == [True, False, False, False]


def test_environments_stay_in_memory_up_to_the_limits() -> None:
    async def scenario() -> None:
        async with manager_on("memory://", live_sessions=2) as manager:
            for kept, evicted in ((1, 0), (2, 0), (2, 1)):
                await manager.reset(SERVING)
                assert (len(manager), manager.counters.evictions) == (kept, evicted)
        async with manager_on("memory://", live_steps=100) as manager:
            first, _ = await manager.reset(SERVING)
            for _ in range(100):
                await manager.step(first.session_id, {})
            second, _ = await manager.reset(SERVING)
            assert (len(manager), manager.steps_held, manager.counters.evictions) == (2, 100, 0)
            await manager.step(second.session_id, {})
            await manager.reset(SERVING)
            assert (len(manager), manager.steps_held, manager.counters.evictions) == (2, 1, 1)

    asyncio.run(scenario())


def test_two_processes_can_take_turns_on_one_session(shared_url: str) -> None:
    async def scenario() -> None:
        actions = actions_of(SERVING, 30)
        expected = await undisturbed(SERVING, 2, actions)
        async with manager_on(shared_url) as one, manager_on(shared_url) as two:
            live, _ = await one.reset(SERVING, task_id=2, seed=5)
            rng = random.Random(1)
            outcomes = [await step(rng.choice([one, two]), live.session_id, action) for action in actions]
            assert outcomes == expected
            for manager in (one, two):
                session = await manager.get(live.session_id)
                assert session.env.state()["step_count"] == 30
                assert session.env.state() == (await one.get(live.session_id)).env.state()

    asyncio.run(scenario())


def test_a_step_is_taken_at_once_only_where_nothing_has_to_be_waited_for(tmp_path: Path) -> None:
    async def scenario() -> None:
        actions = actions_of(SERVING, 4)
        expected = await undisturbed(SERVING, 2, actions)
        url = f"sqlite://{tmp_path}/sessions.db"
        async with manager_on(url) as one, manager_on(url) as two:
            live, _ = await one.reset(SERVING, task_id=2, seed=5, config={"episode_length": 4})
            sid = live.session_id
            assert two.try_step(sid, actions[0], 1) is None, "it is not in memory"
            assert one.try_step(sid, actions[0], 2) is None, "another step is next"
            outcomes = [one.try_step(sid, actions[0], 1)]
            assert one.try_step(sid, actions[0], 1) is None, "it was taken"
            async with live.lock:
                assert one.try_step(sid, actions[1], 2) is None, "another request is at it"
            outcomes.append(await two.step(sid, actions[1], 2))
            assert one.try_step(sid, actions[1], 2) is None, "another process took it"
            assert await one.step(sid, actions[1], 2) == outcomes[-1]
            with closing(sqlite3.connect(f"{tmp_path}/sessions.db", isolation_level=None)) as writer:
                writer.execute("BEGIN IMMEDIATE")
                assert one.try_step(sid, actions[2], 3) is None, "the store is being written"
                writer.execute("ROLLBACK")
            with pytest.raises(InvalidActionError):
                one.try_step(sid, {"batch_size": 0}, 3)
            outcomes += [one.try_step(sid, action, number) for number, action in enumerate(actions[2:], 3)]
            assert [outcome and (outcome.number, outcome.reward) for outcome in outcomes] == [
                (outcome.number, outcome.reward) for outcome, _ in expected
            ]
            assert one.try_step(sid, actions[3], 5) is None, "the episode is over"
            await asyncio.sleep(0)
            assert one.counters.steps == 3
            assert one.counters.store_errors == 0

    asyncio.run(scenario())


def test_a_restart_by_one_process_is_seen_by_the_other(shared_url: str) -> None:
    async def scenario() -> None:
        async with manager_on(shared_url) as one, manager_on(shared_url) as two:
            live, _ = await one.reset(SERVING, task_id=1, seed=1, config={"episode_length": 3})
            session_id = live.session_id
            for _ in range(3):
                await two.step(session_id, {})
            with pytest.raises(EpisodeDoneError):
                await two.step(session_id, {})
            await one.reset(SERVING, task_id=2, seed=8, session_id=session_id)
            # The other process still holds the finished episode; it must not answer from it.
            outcome = await two.step(session_id, {}, number=1)
            assert outcome.number == 1
            assert (await two.get(session_id)).record.task_id == 2
            assert outcome == await one.step(session_id, {}, number=1)

    asyncio.run(scenario())


def test_of_two_racing_actions_one_wins_and_the_other_gets_a_conflict(shared_url: str) -> None:
    async def scenario() -> None:
        async with manager_on(shared_url) as one, manager_on(shared_url) as two:
            live, _ = await one.reset(SERVING, task_id=3, seed=5)
            session_id = live.session_id
            for number in range(1, 21):
                results = await asyncio.gather(
                    one.step(session_id, {"batch_size": number}, number),
                    two.step(session_id, {"batch_size": number + 100}, number),
                    return_exceptions=True,
                )
                kinds = sorted(type(result).__name__ for result in results)
                assert kinds == ["StepConflictError", "StepResult"]
            assert (await one.get(session_id)).env.state()["step_count"] == 20
            assert (await one.store.get(session_id)) == (await two.store.get(session_id))

    asyncio.run(scenario())


def test_a_step_that_others_are_always_quicker_than_ends_as_a_conflict_and_is_counted() -> None:
    async def scenario() -> None:
        async def taken(*_: Any) -> bool:
            return False

        async with manager_on("memory://") as manager:
            live, _ = await manager.reset(SERVING, seed=5)
            manager.store.append = taken  # type: ignore[method-assign]
            manager.store.append_at_once = lambda *_: False  # type: ignore[method-assign]
            with pytest.raises(StepConflictError):
                await manager.step(live.session_id, {})
            assert (manager.counters.conflicts, manager.counters.steps) == (1, 0)

    asyncio.run(scenario())


def test_a_step_too_far_ahead_and_one_with_another_action_are_conflicts_and_are_counted() -> None:
    async def scenario() -> None:
        async with manager_on("memory://") as manager:
            live, _ = await manager.reset(SERVING, seed=5)
            await manager.step(live.session_id, {"batch_size": 8}, 1)
            for conflicts, (action, number) in enumerate((({}, 3), ({"batch_size": 16}, 1)), start=1):
                with pytest.raises(StepConflictError):
                    await manager.step(live.session_id, action, number)
                assert (manager.counters.conflicts, manager.counters.steps) == (conflicts, 1)

    asyncio.run(scenario())


def test_racing_requests_with_the_same_step_and_action_get_the_same_answer(shared_url: str) -> None:
    async def scenario() -> None:
        async with manager_on(shared_url) as one, manager_on(shared_url) as two:
            live, _ = await one.reset(SERVING, task_id=3, seed=5)
            for number in range(1, 11):
                answers = await asyncio.gather(
                    *(m.step(live.session_id, {"batch_size": number}, number) for m in (one, two, one, two))
                )
                assert all(answer == answers[0] for answer in answers)
            assert (await two.get(live.session_id)).env.state()["step_count"] == 10

    asyncio.run(scenario())


def test_unnumbered_steps_from_two_processes_all_count_exactly_once(shared_url: str) -> None:
    async def scenario() -> None:
        async with manager_on(shared_url) as one, manager_on(shared_url) as two:
            live, _ = await one.reset(SERVING, task_id=1, seed=5)
            answers = await asyncio.gather(*((one, two)[i % 2].step(live.session_id, {}) for i in range(40)))
            assert sorted(answer.number for answer in answers) == list(range(1, 41))

    asyncio.run(scenario())


def test_a_retry_of_any_earlier_step_gives_its_first_answer(store_url: str) -> None:
    async def scenario() -> None:
        actions = actions_of(SERVING, 15)
        async with manager_on(store_url) as manager:
            live, _ = await manager.reset(SERVING, task_id=3, seed=5)
            outcomes = [await step(manager, live.session_id, a, n) for n, a in enumerate(actions, 1)]
            again = [await step(manager, live.session_id, a, n) for n, a in enumerate(actions, 1)]
            assert again == outcomes
            with pytest.raises(StepConflictError, match="step 4 was taken with another action"):
                await manager.step(live.session_id, {"batch_size": 500}, 4)
            with pytest.raises(StepConflictError, match="the next is 16"):
                await manager.step(live.session_id, {}, 17)
            assert (await manager.get(live.session_id)).env.state()["step_count"] == 15

    asyncio.run(scenario())


def test_the_last_step_of_an_episode_can_be_retried_and_none_comes_after_it(store_url: str) -> None:
    async def scenario() -> None:
        async with manager_on(store_url) as manager:
            live, _ = await manager.reset(SERVING, task_id=1, seed=5, config={"episode_length": 2})
            await manager.step(live.session_id, {}, 1)
            last = await manager.step(live.session_id, {}, 2)
            assert last.done
            assert await manager.step(live.session_id, {}, 2) == last
            for number in (None, 3):
                with pytest.raises(EpisodeDoneError):
                    await manager.step(live.session_id, {}, number)

    asyncio.run(scenario())


def test_a_session_that_the_store_has_forgotten_lives_on_if_it_is_in_use(store_url: str) -> None:
    async def scenario() -> None:
        actions = actions_of(SERVING, 10)
        expected = await undisturbed(SERVING, 3, actions)
        async with manager_on(store_url) as manager:
            live, _ = await manager.reset(SERVING, task_id=3, seed=5, caller="me")
            outcomes = [await step(manager, live.session_id, action) for action in actions[:5]]
            await manager.store.make_room("me", 1, idle_s=0.0)
            assert await position(manager.store, live.session_id) is None
            outcomes += [await step(manager, live.session_id, action) for action in actions[5:]]
            assert outcomes == expected
            stored = await manager.store.get(live.session_id)
            assert stored is not None
            assert len(stored.record.actions) == 10

    asyncio.run(scenario())


def test_an_expired_session_is_unknown(store_url: str) -> None:
    async def scenario() -> None:
        async with manager_on(store_url, session_ttl_s=1, live_sessions=1) as manager:
            live, _ = await manager.reset(SERVING, task_id=3, seed=5, caller="me")
            await manager.reset(SERVING, task_id=3, seed=5)
            await asyncio.sleep(1.1)
            with pytest.raises(UnknownSessionError):
                await manager.step(live.session_id, {})
            with pytest.raises(UnknownSessionError):
                await manager.latest("me")

    asyncio.run(scenario())


def test_finished_episodes_make_room_and_unfinished_ones_do_not(store_url: str) -> None:
    async def scenario() -> None:
        async with manager_on(store_url, max_sessions=10) as manager:
            short = {"episode_length": 1}
            finished = [(await manager.reset(SERVING, seed=i, config=short))[0].session_id for i in range(5)]
            for session_id in finished:
                await manager.step(session_id, {})
                await asyncio.sleep(0)  # a task tells the store that the episode has ended
            running = [(await manager.reset(SERVING, seed=i))[0].session_id for i in range(10)]
            with pytest.raises(CapacityError):
                await manager.reset(SERVING, seed=99)
            assert all([await position(manager.store, one) for one in running])
            assert not any([await position(manager.store, one) for one in finished])
            # Restarting a session needs no room.
            await manager.reset(SERVING, seed=1, session_id=running[0])

    asyncio.run(scenario())


def test_in_a_full_store_idle_episodes_of_the_largest_holders_make_room_for_newcomers(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = f"server.sessions.{'redis' if store_url.startswith('redis') else 'sqlite'}"
    monkeypatch.setattr(f"{module}.ROOM_CHUNK", 2)

    async def scenario() -> None:
        async with manager_on(store_url, max_sessions=10) as manager:

            async def reset(caller: str) -> str:
                return (await manager.reset(SERVING, caller=caller))[0].session_id

            small = [await reset("small"), await reset("small.x")]
            large = [await reset("large" if n % 2 else f"large.{n}") for n in range(8)]
            with pytest.raises(CapacityError):
                await reset("new")
            monkeypatch.setattr(f"{module}.IDLE_S", 0.0)
            new = [await reset("new") for _ in range(3)]
            kept = [await position(manager.store, one) is not None for one in [*small, *large, *new]]
            assert kept == [True] * 2 + [False] * 4 + [True] * 4 + [True] * 3

    asyncio.run(scenario())


def test_all_that_is_too_much_is_forgotten_at_once_however_much_it_is(store_url: str) -> None:
    """More than the chunks in which stores forget; a store in memory never holds more than its limit."""
    count = {"sqlite": 90, "memory": 90, "redis": 450}[store_url.split(":")[0]]

    async def scenario() -> None:
        record = EpisodeRecord(SERVING, 1, 7, {})
        async with manager_on(store_url) as earlier, manager_on(store_url, max_sessions=11) as manager:
            store = manager.store
            shared = store.name != "memory"
            filled = earlier.store if shared else store
            for n in range(count):
                await filled.touch(f"s{n}", await filled.put(f"s{n}", record, "me"), True)
            assert await store.purge() == (count - 10 if shared else 1)
            left = [n for n in range(count) if await position(store, f"s{n}") is not None]
            assert left == list(range(count - 10, count)), "the oldest go"
            assert await store.purge() == 0

    asyncio.run(scenario())


def test_an_episode_that_has_ended_is_not_unfinished_again_where_a_process_has_not_seen_its_end(store_url: str) -> None:
    async def scenario() -> None:
        record = EpisodeRecord(SERVING, 1, 7, {})
        async with manager_on(store_url) as manager:
            store = manager.store
            token = await store.put("a", record, "me")
            assert await store.make_room("me", 10, 600) == 1
            for finished in (True, False):
                await store.touch("a", token, finished)
                assert await store.make_room("me", 10, 600) == 0
            # A restart is another episode.
            await store.put("a", record, "me")
            assert await store.make_room("me", 10, 600) == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("lost", [1, 3, 8])
def test_the_last_steps_that_a_store_has_lost_are_stored_again(shared_url: str, lost: int) -> None:
    """As when a replica without them takes over."""

    async def scenario() -> None:
        actions = actions_of(SERVING, 10)
        expected = await undisturbed(SERVING, 3, actions)
        async with manager_on(shared_url) as manager, manager_on(shared_url) as other:
            live, _ = await manager.reset(SERVING, task_id=3, seed=5)
            told = [await step(manager, live.session_id, action) for action in actions[:8]]
            store = manager.store
            if store.name == "sqlite":
                with closing(sqlite3.connect(shared_url.removeprefix("sqlite://"))) as file, file:
                    file.execute("DELETE FROM steps WHERE n >= ?", (8 - lost,))
            else:
                with redis.Redis.from_url(shared_url) as client:
                    stored_actions = f"inferencegym:actions:{live.session_id}"
                    assert client.llen(stored_actions) == 8
                    # A list that has lost all its entries is no key.
                    client.delete(stored_actions) if lost == 8 else client.ltrim(stored_actions, 0, 7 - lost)
            assert await position(store, live.session_id) == (live.token, 8 - lost)
            told.append(await step(manager, live.session_id, actions[8]))
            assert await position(store, live.session_id) == (live.token, 9)
            # another process, with nothing in memory, continues the same episode
            told.append(await step(other, live.session_id, actions[9], 10))
            assert told == expected
            stored = await store.get(live.session_id)
            assert stored is not None
            assert [live.family.action_json(one)["batch_size"] for one in stored.record.actions] == [
                action["batch_size"] for action in actions
            ]

    asyncio.run(scenario())


def test_a_client_has_room_for_so_many_unfinished_episodes_and_others_keep_theirs(store_url: str) -> None:
    async def scenario() -> None:
        async with manager_on(store_url, max_sessions_per_client=5) as manager:

            async def reset(caller: str, **wanted: Any) -> str:
                return (await manager.reset(SERVING, caller=caller, config={"episode_length": 2}, **wanted))[
                    0
                ].session_id

            others = [await reset("b"), await reset("ab"), await reset("b.x")]
            mine = [await reset("a" if i % 2 else f"a.{i}") for i in range(5)]
            for caller in ("a", "a.new"):
                with pytest.raises(RateLimitedError, match="5 unfinished episodes"):
                    await reset(caller)
            with pytest.raises(RateLimitedError):
                await reset("a", session_id="chosen", create=True)
            assert await reset("a", session_id=mine[0]) == mine[0], "a restart needs no room"
            assert await reset("b") not in mine
            for _ in range(2):
                await manager.step(mine[4], {})
            await asyncio.sleep(0)  # a task tells the store that the episode has ended
            mine.append(await reset("a"))
            with pytest.raises(RateLimitedError):
                await reset("a")
            assert all([await position(manager.store, one) for one in [*others, *mine]]), "nobody lost anything"

    asyncio.run(scenario())


def test_an_idle_episode_makes_room_for_its_own_client_only(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quota, "IDLE_S", 0.2)
    for store in ("sqlite", "redis"):
        monkeypatch.setattr(f"server.sessions.{store}.ROOM_CHUNK", 1)

    async def scenario() -> None:
        async with manager_on(store_url, max_sessions_per_client=3) as manager:

            async def reset(caller: str) -> str:
                return (await manager.reset(SERVING, caller=caller))[0].session_id

            other = await reset("b")
            mine = [await reset("a"), await reset("a.x")]
            await asyncio.sleep(0.3)
            mine += [await reset("a"), await reset("a")]
            kept = [await position(manager.store, one) is not None for one in mine]
            assert kept == [False, True, True, True], "the longest idle one went"
            assert await position(manager.store, other)

    asyncio.run(scenario())


@pytest.mark.parametrize(("kept", "taken_before_the_store_is_asked_again"), [(39, 1), (38, 2), (10, 4), (0, 4)])
def test_a_quota_asks_the_store_again_after_a_tenth_of_the_limit_or_when_there_may_be_no_room(
    kept: int, taken_before_the_store_is_asked_again: int
) -> None:
    asked: list[str] = []

    class Store:
        async def make_room(self, client: str, limit: int, idle_s: float) -> int:
            assert (limit, idle_s) == (40, 600.0)
            asked.append(client)
            return kept

    async def scenario() -> None:
        quota_of_a_process = quota.UnfinishedQuota(cast(SessionStore, Store()), 40)
        for _ in range(taken_before_the_store_is_asked_again):
            await quota_of_a_process.take("a")
        assert asked == ["a"]
        await quota_of_a_process.take("a.other")
        assert asked == ["a", "a"]

    asyncio.run(scenario())


def test_an_episode_that_made_room_while_it_was_in_use_goes_on(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quota, "IDLE_S", 0.0)

    async def scenario() -> None:
        actions = actions_of(SERVING, 4)
        expected = await undisturbed(SERVING, 2, actions)
        async with manager_on(store_url, max_sessions_per_client=1) as manager:
            live, _ = await manager.reset(SERVING, task_id=2, seed=5, caller="a")
            outcomes = [await step(manager, live.session_id, action) for action in actions[:2]]
            await asyncio.sleep(0.01)
            await manager.reset(SERVING, caller="a")
            assert await position(manager.store, live.session_id) is None
            outcomes += [await step(manager, live.session_id, action) for action in actions[2:]]
            assert outcomes == expected

    asyncio.run(scenario())


def test_too_many_requests_waiting_for_one_session_are_refused(
    shared_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.sessions.session.MAX_WAITING", 4)

    async def scenario() -> None:
        async with manager_on(shared_url) as manager:
            live, _ = await manager.reset(SERVING, seed=1)
            async with live.lock:
                waiting = [asyncio.create_task(manager.step(live.session_id, {})) for _ in range(4)]
                await asyncio.sleep(0)
                with pytest.raises(RateLimitedError):
                    await manager.step(live.session_id, {})
            assert sorted(o.number for o in await asyncio.gather(*waiting)) == [1, 2, 3, 4]

    asyncio.run(scenario())


def test_a_step_for_an_earlier_reset_is_refused_by_every_process(shared_url: str) -> None:
    async def scenario() -> None:
        async with manager_on(shared_url) as one, manager_on(shared_url) as two:
            live, _ = await one.reset(SERVING, task_id=1, seed=5)
            session_id, earlier = live.session_id, live.record.reset_id
            assert (await one.step(session_id, {}, 1, reset_id=earlier)).number == 1
            assert (await two.step(session_id, {}, 2, reset_id=earlier)).number == 2
            # The same arguments, in the other process: the first one's memory still holds the earlier episode.
            later = (await two.reset(SERVING, task_id=1, seed=5, session_id=session_id))[0].record.reset_id
            for manager in (one, two):
                assert manager.try_step(session_id, {}, 1, reset_id=earlier) is None
                with pytest.raises(StepConflictError, match="was reset"):
                    await manager.step(session_id, {}, 1, reset_id=earlier)
            assert (await one.step(session_id, {}, 1, reset_id=later)).number == 1

    asyncio.run(scenario())


def test_a_store_restores_only_what_it_lacks(store_url: str) -> None:
    async def scenario() -> None:
        record = EpisodeRecord(SERVING, 1, 7, {})
        async with manager_on(store_url) as manager:
            store = manager.store
            token = await store.put("a", record, "me")
            assert await store.append("a", token, 0, b"[1]")
            assert await store.put("a", record, "me", replace=False) == ""
            assert await position(store, "a") == (token, 1)
            restored = await store.put("b", record, "me", replace=False)
            assert restored
            assert await position(store, "b") == (restored, 0)

    asyncio.run(scenario())


def test_a_session_that_is_restarted_is_its_callers_latest_and_no_others(store_url: str) -> None:
    async def scenario() -> None:
        async with manager_on(store_url) as manager:
            store, latest = manager.store, []
            for session_id, caller in (("a", "me"), ("b", "me"), ("a", "you"), ("b", "me"), ("a", "me")):
                await store.put(session_id, EpisodeRecord(SERVING, 1, 7, {}), caller)
                latest.append((await store.latest("me"), await store.latest("you")))
            assert latest == [("a", None), ("b", None), ("b", "a"), ("b", "a"), ("a", None)]

    asyncio.run(scenario())


def test_an_episode_stays_the_same_when_its_record_is_written_again(store_url: str) -> None:
    async def scenario() -> None:
        async with manager_on(store_url) as manager:
            live, _ = await manager.reset(SERVING, seed=1)
            # As another process does that finds the record of an episode that it holds gone: the token is a new one.
            await manager.store.put(live.session_id, live.record, "")
            assert (await manager.step(live.session_id, {}, 1, reset_id=live.record.reset_id)).number == 1

    asyncio.run(scenario())


def test_a_session_is_not_restarted_by_the_other_environment(store_url: str) -> None:
    async def scenario() -> None:
        async with manager_on(store_url, live_sessions=1) as manager:
            live, _ = await manager.reset(TRAFFIC, task_id="task_easy", seed=1)
            await manager.step(live.session_id, {"action": "allow_all"})
            for in_memory in (True, False):
                assert (live.session_id in manager.in_memory) == in_memory
                for create in (True, False):
                    with pytest.raises(UnknownSessionError, match=f"{TRAFFIC}.*not of the {SERVING}"):
                        await manager.reset(SERVING, seed=1, session_id=live.session_id, create=create)
                await manager.reset(SERVING, seed=1)
            assert len((await manager.get(live.session_id, TRAFFIC)).actions) == 1

    asyncio.run(scenario())


def test_steps_in_memory_are_counted_right_when_sessions_leave_it_while_they_are_waited_for() -> None:
    async def scenario() -> None:
        async with manager_on("memory://", live_sessions=2) as manager:
            real = manager.store
            here = asyncio.Event()
            go_on = asyncio.Event()

            class Slow:
                """A store with slow answers, like a store on another machine."""

                def __getattr__(self, name: str) -> Any:
                    return getattr(real, name)

                async def put(self, *args: Any) -> str:
                    here.set()
                    await go_on.wait()
                    return await real.put(*args)

                async def get(self, *args: Any, **kwargs: Any) -> StoredEpisode | None:
                    here.set()
                    await go_on.wait()
                    return await real.get(*args, **kwargs)

            for method in ("reset", "get"):
                live, _ = await manager.reset(SERVING, seed=1)
                session_id = live.session_id
                for number in range(1, 21):
                    await manager.step(session_id, {}, number)
                if method == "get":  # another process went on
                    await real.append(session_id, live.token, 20, live.actions[0])
                here.clear()
                go_on.clear()
                manager.store = Slow()  # type: ignore[assignment]
                if method == "get":
                    waiting = asyncio.create_task(manager.get(session_id))
                else:
                    waiting = asyncio.create_task(manager.reset(SERVING, session_id=session_id))  # type: ignore[arg-type]
                await here.wait()
                manager.store = real
                for _ in range(3):
                    await manager.reset(SERVING)
                go_on.set()
                await waiting
                assert manager.steps_held == sum(len(one.actions) for one in manager.in_memory.values())

    asyncio.run(scenario())


def test_an_episode_of_another_release_is_not_continued(store_url: str) -> None:
    async def scenario() -> None:
        async with manager_on(store_url) as manager:
            live, _ = await manager.reset(SERVING, seed=1)
            old = EpisodeRecord(SERVING, 1, 1, live.record.config, release="0.0.1")
            await manager.store.put("older", old, "")
            with pytest.raises(OtherReleaseError, match=f"release 0.0.1 and this server is {__version__}"):
                await manager.step("older", {})
            assert await position(manager.store, "older") is not None

    asyncio.run(scenario())


def test_episodes_of_another_release_are_no_clients_unfinished_ones(
    shared_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        with monkeypatch.context() as earlier:
            for module in ("sqlite", "redis"):
                earlier.setattr(f"server.sessions.{module}.__version__", "0.0.1")
            async with manager_on(shared_url) as manager:
                for name in "abc":
                    old = EpisodeRecord(SERVING, 1, 1, {"episode_length": 200}, release="0.0.1")
                    await manager.store.put(name, old, "me")
                assert await manager.store.make_room("me", 10, 600) == 3
        async with manager_on(shared_url) as manager:
            assert await manager.store.make_room("me", 10, 600) == 0
            await manager.reset(SERVING, caller="me", session_id="a")
            assert (await manager.step("a", {})).number == 1
            assert await manager.store.make_room("me", 10, 600) == 1

    asyncio.run(scenario())


def test_an_episode_stored_in_another_form_is_not_continued(store_url: str) -> None:
    async def scenario() -> None:
        async with manager_on(store_url) as manager:
            live, _ = await manager.reset(SERVING, seed=1)
            old = EpisodeRecord(SERVING, 1, 1, live.record.config, [b'{"kv_budget":0.5}'], version=1)
            await manager.store.put("older", old, "")
            with pytest.raises(OtherReleaseError, match="another form"):
                await manager.step("older", {})
            assert await position(manager.store, "older") is not None

    asyncio.run(scenario())


UNREADABLE = [
    b'{"kv_budget":0.5,"spec_length":0,"batch_size":8,"prefill_disagg":0,"quant_tier":"FP16"}',
    b"[0.5,0,8]",
    b'[0.5,3,8,0,"FP16"]',
    b'["much",0,8,0,"FP16"]',
    b"null",
    b"[0.5,0",
]


@pytest.mark.parametrize("action", UNREADABLE)
def test_a_stored_step_that_cannot_be_read_is_the_stores_error(store_url: str, action: bytes) -> None:
    """It is not the caller's error, and no reason to delete or change the stored record."""

    async def scenario() -> None:
        async with manager_on(store_url) as manager:
            live, _ = await manager.reset(SERVING, seed=1)
            token = await manager.store.put("odd", replace(live.record, actions=[action]), "")
            for _ in range(2):
                with pytest.raises(StoreError, match="cannot be read"):
                    await manager.step("odd", {})
            assert await position(manager.store, "odd") == (token, 1)
            # Written by another process into an episode that is alive here.
            await step(manager, live.session_id, {})
            assert await manager.store.append(live.session_id, live.token, 1, action)
            with pytest.raises(StoreError, match="cannot be read"):
                await manager.step(live.session_id, {})
            assert len(live.actions) == live.env.state()["step_count"] == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("text", [b'{"family":"serving"}', b'{"later":1}', b"[]", b"{"])
def test_the_start_of_an_episode_that_cannot_be_read_is_the_stores_error(text: bytes) -> None:
    with pytest.raises(StoreError):
        stored_episode("1", text, [])


def test_a_store_that_fails_during_a_step_leaves_the_episode_as_it_was(store_url: str) -> None:
    async def scenario() -> None:
        actions = actions_of(SERVING, 6)
        expected = await undisturbed(SERVING, 3, actions)
        async with manager_on(store_url) as manager:
            live, _ = await manager.reset(SERVING, task_id=3, seed=5)
            outcomes = [await step(manager, live.session_id, action) for action in actions[:3]]
            working: Callable[..., Awaitable[bool]] = manager.store.append

            async def failing(*_: Any) -> bool:
                raise StoreError("out of order")

            async def stored_but_not_told(*args: Any) -> bool:
                await working(*args)
                raise StoreError("the answer was lost")

            for broken in (failing, stored_but_not_told):
                manager.store.append = broken  # type: ignore[method-assign]
                manager.store.append_at_once = lambda *_: False  # type: ignore[method-assign]
                with pytest.raises(StoreError):
                    await manager.step(live.session_id, actions[3], 4)
                manager.store.append = working  # type: ignore[method-assign]
            # Whether the step was stored or not, sending it again with its number takes it exactly once.
            outcomes += [await step(manager, live.session_id, a, n) for n, a in enumerate(actions[3:], 4)]
            assert outcomes == expected

    asyncio.run(scenario())
