"""/step/batch: many episodes over one connection are the same episodes in every request format."""

from __future__ import annotations

import asyncio
import threading
import tracemalloc
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import pytest
from numpy.typing import NDArray
from starlette.testclient import TestClient

from env.batch import ServingBatch
from env.inference_env import InferenceEnv
from inferencegym.batch_format import (
    HOLD,
    MEDIA_TYPE,
    REQUEST,
    BatchSteps,
    decode_answer,
    decode_request,
    encode_request,
)
from inferencegym.client import InferenceGymBatch
from inferencegym.client.answers import ServerError
from inferencegym.errors import (
    EpisodeDoneError,
    InvalidActionError,
    UnknownSessionError,
)
from inferencegym.seeds import episode_seed
from inferencegym.spaces.actions import ACTION_HIGH, ACTION_LOW, from_row, snap
from inferencegym.spaces.observations import to_array
from inferencegym.tasks import get_task
from server.api.batch import in_blocks
from server.app import create_app
from server.net.json_io import LARGE_JSON_BYTES
from server.sessions.batch import BatchSession, BatchSessions
from server.settings import Settings
from tests.servers import RunningServer, running_server

BINARY = {"content-type": MEDIA_TYPE}


def random_actions(n_steps: int, n_rows: int, seed: int = 0) -> NDArray[np.float64]:
    return np.random.default_rng(seed).uniform(ACTION_LOW, ACTION_HIGH, (n_steps, n_rows, 5))


@pytest.fixture
def batch(server: RunningServer) -> Iterator[InferenceGymBatch]:
    with InferenceGymBatch(server.url) as client:
        yield client


@pytest.mark.parametrize("task_id", [1, 2, 3])
def test_each_row_is_the_single_episode_of_its_seed(batch: InferenceGymBatch, task_id: int) -> None:
    first = batch.reset(3, task_id, seed=7, config={"episode_length": 30})
    actions = random_actions(30, 3)
    played = batch.step_many(actions, float64=True)
    assert played.done.tolist() == [False] * 29 + [True]
    for row in range(3):
        env = InferenceEnv(task_id=task_id, seed=7 + row, config={"episode_length": 30})
        assert np.array_equal(to_array(env.reset()), first[row])
        knobs = snap(actions[:, row], np.ones(5, dtype=np.bool_))
        for k in range(30):
            observation, reward, done, _ = env.step(from_row(knobs[k]))
            assert np.array_equal(to_array(observation), played.observations[k, row])
            assert (reward, done) == (played.rewards[k, row], bool(played.done[k]))


def test_episodes_follow_one_another_with_autoreset(batch: InferenceGymBatch) -> None:
    batch.reset(2, 1, seed=9, config={"episode_length": 5}, autoreset=True)
    actions = random_actions(12, 2)
    played = batch.step_many(actions, float64=True)
    assert np.flatnonzero(played.done).tolist() == [4, 9]
    assert (played.episodes, played.steps_left) == (2, 3)
    alone = ServingBatch(get_task(1), 2, get_task(1).config({"episode_length": 5}))
    assert np.array_equal(played.observations[4], alone.reset([episode_seed(9, 1), episode_seed(10, 1)]))
    assert np.array_equal(played.observations[5], alone.step(actions[5]))


def test_a_request_sent_again_is_answered_again_and_played_once(server: RunningServer) -> None:
    session_id = server.post("/reset/batch", {"n": 2})["session_id"]
    body = {"session_id": session_id, "actions": random_actions(3, 2).tolist(), "step": 1}
    first = server.post("/step/batch", body)
    assert server.post("/step/batch", body) == first
    other = {**body, "actions": random_actions(3, 2, seed=1).tolist()}
    ahead = {**body, "step": 9}
    assert [server.client.post("/step/batch", json=one).status_code for one in (other, ahead)] == [409, 409]
    assert server.post("/step/batch", {**body, "step": None})["step"] == 4


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_is_refused_with_its_position_and_nothing_is_lost(batch: InferenceGymBatch, value: float) -> None:
    batch.reset(2, 1, seed=3)
    wrong = random_actions(2, 2)
    wrong[1, 0, 2] = value
    with pytest.raises(InvalidActionError) as refused:
        batch.step_many(wrong)
    assert refused.value.field == "actions[1][0].batch_size"
    assert batch.step_many(random_actions(2, 2)).number == 1


def test_steps_beyond_the_end_are_refused_and_nothing_is_lost(batch: InferenceGymBatch) -> None:
    batch.reset(1, 1, config={"episode_length": 5})
    with pytest.raises(EpisodeDoneError, match="the 5 remaining"):
        batch.step_many(random_actions(6, 1))
    assert batch.step_many(random_actions(5, 1)).steps_left == 0
    with pytest.raises(EpisodeDoneError):
        batch.step(random_actions(1, 1)[0])


def test_wrong_shapes_and_closed_sessions_are_errors_of_their_own(server: RunningServer) -> None:
    client = InferenceGymBatch(server.url)
    client.reset(2, 1)
    with pytest.raises(InvalidActionError, match="shape"):
        client.step_many(random_actions(2, 3))
    server.post("/close/batch", {"session_id": client.session_id})
    with pytest.raises(UnknownSessionError):
        client.step(random_actions(1, 2)[0])
    client.close()


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"n": 0}, "n"),
        ({"n": 4097}, "n"),
        ({"seeds": []}, "seeds"),
        ({"seeds": [1, None]}, "seeds[1]"),
        ({"seeds": [1, -1]}, "seeds[1]"),
        ({"seeds": [1], "n": 1}, "n"),
        ({"n": 4096, "config": {"episode_length": 5000}}, "n"),
        ({"autoreset": 1}, "autoreset"),
        ({"episodes": 3}, "episodes"),
    ],
)
def test_a_wrong_reset_names_its_field(server: RunningServer, body: dict[str, Any], field: str) -> None:
    answer = server.client.post("/reset/batch", json=body)
    assert (answer.status_code, answer.json()["detail"]["field"]) == (422, field)


@pytest.mark.parametrize(
    ("actions", "field"),
    [
        (None, "actions"),
        ({"a": 1}, "actions"),
        ([], "actions"),
        (["12345"], "actions[0]"),
        ([[]], "actions[0]"),
        ([[[1, 2, 3, 4, 5]], [[1, 2, 3, 4, 5]] * 2], "actions"),
        ([[[1, 2]]], "actions[0][0]"),
        ([["12345"]], "actions[0][0]"),
        ([[[1, 2, 3, 4, 5]], [[1]]], "actions[1][0]"),
        ([[[1, 2, 3, 4, "5"]]], "actions[0][0][4]"),
        ([[[1, 2, 3, 4, 5]], [[1, None, 3, 4, 5]]], "actions[1][0][1]"),
        ([[[True, 2, 3, 4, 5]]], "actions[0][0][0]"),
        ([[[1, 2, 3, 4, [5]]]], "actions[0][0][4]"),
    ],
)
def test_wrong_json_actions_are_refused_with_their_position(server: RunningServer, actions: Any, field: str) -> None:
    session_id = server.post("/reset/batch", {"n": 1})["session_id"]
    answer = server.client.post("/step/batch", json={"session_id": session_id, "actions": actions})
    assert (answer.status_code, answer.json()["detail"]["field"]) == (422, field)
    assert answer.json()["detail"]["message"].startswith(field)
    server.post("/close/batch", {"session_id": session_id})


def test_the_largest_first_seed_and_the_most_episodes_are_taken_and_one_more_is_refused(server: RunningServer) -> None:
    # docs/server.md: up to 4,096 episodes; seeds are below 2^63, and the first one leaves room for those of all rows.
    for field, most in (("seed", 2**62 - 1), ("n", 4096)):
        begun = server.post("/reset/batch", {"n": 1, "config": {"episode_length": 1}, field: most})
        server.post("/close/batch", {"session_id": begun["session_id"]})
        answer = server.client.post("/reset/batch", json={"n": 1, field: most + 1})
        assert (answer.status_code, answer.json()["detail"]["field"]) == (422, field)


@pytest.mark.parametrize(
    ("long", "short", "field"),
    [
        ("x" * LARGE_JSON_BYTES, "", "actions[0][0]"),
        (["x" * LARGE_JSON_BYTES, *[""] * 4], [""] * 5, "actions[0][0][0]"),
    ],
)
def test_texts_for_numbers_are_refused_in_no_more_memory_than_they_take(long: Any, short: Any, field: str) -> None:
    """In an array of texts every entry takes the space of the longest: these would take 800 MB and more."""
    with TestClient(create_app(Settings(store_url="memory://", access_log="off"))) as client:
        session_id = client.post("/reset/batch", json={"n": 3_000}).json()["session_id"]
        text = orjson.dumps({"session_id": session_id, "actions": [[long, *[short] * 2_999]]})
        tracemalloc.start()
        try:
            answer = client.post("/step/batch", content=text, headers={"Content-Type": "application/json"})
            most_bytes = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert (answer.status_code, answer.json()["detail"]["field"]) == (422, field)
    assert most_bytes < 10_000_000


def test_an_answer_in_another_format_is_no_answer() -> None:
    for body in (
        b"",
        b"IGB1",
        b"XXXX" + bytes(200),
        b'{"detail": "an error of a proxy, longer than the head of an answer is"}',
    ):
        with pytest.raises(ValueError, match="not in the binary format of POST /step/batch"):
            decode_answer(body)


def test_damaged_binary_bodies_are_refused(server: RunningServer) -> None:
    session_id = server.post("/reset/batch", {"n": 2})["session_id"]
    good = encode_request(BatchSteps(session_id, random_actions(2, 2), 2))
    damaged = [b"", good[:30], b"XXXX" + good[4:], good[:-1], good + b"\0", good[:4] + b"\x05" + good[5:]]
    damaged += [good[:6] + b"\x80" + good[7:], REQUEST.pack(b"IGB1", 8, 0, 0, 2, 0, bytes.fromhex(session_id))]
    for body in damaged:
        answer = server.client.post("/step/batch", content=body, headers=BINARY)
        assert (answer.status_code, answer.json()["detail"]["code"]) == (422, "invalid_batch")
    assert decode_answer(server.client.post("/step/batch", content=good, headers=BINARY).content).number == 1


def test_more_steps_than_one_request_takes_are_refused(server: RunningServer) -> None:
    session_id = server.post("/reset/batch", {"n": 64, "autoreset": True})["session_id"]
    body = {"session_id": session_id, "actions": random_actions(1, 64).tolist(), "repeat": 257, "last": True}
    assert server.client.post("/step/batch", json=body).status_code == 422
    held = encode_request(BatchSteps(session_id, random_actions(1, 64), 4097))
    assert server.client.post("/step/batch", content=held, headers=BINARY).status_code == 422
    assert server.post("/step/batch", {**body, "repeat": 4})["step"] == 1


def test_sessions_are_limited_and_room_is_made_by_closing(tmp_path: Path) -> None:
    with running_server(tmp_path, batch_sessions="2", batch_row_steps="13334") as server:
        first, _ = (server.post("/reset/batch")["session_id"] for _ in range(2))
        refused = server.client.post("/reset/batch")
        assert (refused.status_code, int(refused.headers["retry-after"]) > 500) == (429, True)
        server.post("/close/batch", {"session_id": first})
        assert server.client.post("/reset/batch", json={"n": 51}).status_code == 422
        assert server.client.post("/reset/batch", json={"n": 50}).status_code == 429  # with the other one too much
        assert server.post("/reset/batch", {"n": 49})["n"] == 49
        with InferenceGymBatch(server.url, retry_s=0) as third, pytest.raises(ServerError) as limited:
            third.reset(1)
        assert (limited.value.code, limited.value.status) == ("rate_limited", 429)


def test_a_session_restarts_in_its_place_only_with_its_own_shape(server: RunningServer) -> None:
    begun = server.post("/reset/batch", {"n": 2, "seed": 4})
    body = {"session_id": begun["session_id"], "n": 2, "seed": 4}
    server.post("/step/batch", {"session_id": begun["session_id"], "actions": random_actions(1, 2).tolist()})
    assert server.post("/reset/batch", body) == begun
    answer = server.client.post("/reset/batch", json={**body, "n": 3})
    assert (answer.status_code, answer.json()["detail"]["code"]) == (409, "session_conflict")


def test_steps_of_the_episodes_before_a_restart_are_not_answered_again(server: RunningServer) -> None:
    begun = server.post("/reset/batch", {"n": 2, "seed": 4})
    steps = {"session_id": begun["session_id"], "actions": random_actions(1, 2).tolist()}
    server.post("/step/batch", {**steps, "step": 1})
    second = server.post("/step/batch", {**steps, "step": 2})
    assert server.post("/step/batch", {**steps, "step": 2}) == second
    server.post("/reset/batch", {"session_id": begun["session_id"], "n": 2, "seed": 4})
    answer = server.client.post("/step/batch", json={**steps, "step": 2})
    assert (answer.status_code, answer.json()["detail"]["code"]) == (409, "step_conflict")


@dataclass
class HeldPlay:
    """A server in this process whose first long play stops until it is released."""

    client: httpx.AsyncClient
    sessions: BatchSessions
    begun: threading.Event
    released: threading.Event

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = await self.client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def start(self, **body: Any) -> tuple[str, BatchSession]:
        session_id = (await self.post("/reset/batch", {"config": {"episode_length": 5}, **body}))["session_id"]
        return session_id, self.sessions.get(session_id)

    async def long_play(self, session_id: str, n_rows: int, n_steps: int) -> asyncio.Task[dict[str, Any]]:
        """Wait until the first episode is being played on a thread."""
        body = {"session_id": session_id, "actions": random_actions(n_steps, n_rows).tolist()}
        playing = asyncio.create_task(self.post("/step/batch", body))
        assert await asyncio.to_thread(self.begun.wait, 30)
        return playing

    async def until_waiting(self, session: BatchSession, count: int) -> None:
        async with asyncio.timeout(30):
            while session.waiting < count:
                await asyncio.sleep(0.005)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldPlay]:
    begun, released = threading.Event(), threading.Event()

    class Held(ServingBatch):
        def step_many(self, actions: NDArray[np.float64], *out: NDArray[Any]) -> None:
            assert len(actions) > 0, "a request of no steps never ends"
            begun.set()
            assert released.wait(30)
            super().step_many(actions, *out)

    monkeypatch.setattr("server.sessions.batch.ServingBatch", Held)
    settings = Settings(store_url="memory://", access_log="off")
    sessions = BatchSessions(settings)
    monkeypatch.setattr("server.api.batch.BatchSessions", lambda _: sessions)
    client = httpx.AsyncClient(transport=httpx.ASGITransport(create_app(settings)), base_url="http://test")
    yield HeldPlay(client, sessions, begun, released)
    released.set()


def run_in_time(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 60))


def test_a_restart_waits_for_the_steps_under_way_and_changes_none_of_them(held: HeldPlay) -> None:
    async def scenario() -> None:
        session_id, session = await held.start(n=2, seed=9, autoreset=True)
        playing = await held.long_play(session_id, n_rows=2, n_steps=203)
        restart = {"session_id": session_id, "n": 2, "seed": 30, "config": {"episode_length": 5}}
        restarting = asyncio.create_task(held.post("/reset/batch", restart))
        await held.until_waiting(session, 2)
        assert (session.seeds, session.autoreset) == ([9, 10], True)
        held.released.set()
        played, begun = await playing, await restarting
        assert (played["episodes"], played["steps_left"]) == (40, 2)
        assert (
            begun["observations"] == (await held.post("/reset/batch", {**restart, "session_id": None}))["observations"]
        )
        too_many = {"session_id": session_id, "actions": random_actions(6, 2).tolist()}
        assert (await held.client.post("/step/batch", json=too_many)).json()["detail"]["code"] == "episode_done"

    run_in_time(scenario())


def test_a_restart_that_is_refused_changes_nothing(held: HeldPlay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.sessions.session.MAX_WAITING", 4)

    async def scenario() -> None:
        session_id, session = await held.start(n=2, seed=9, autoreset=True)
        playing = await held.long_play(session_id, n_rows=2, n_steps=203)
        step = {"session_id": session_id, "actions": random_actions(1, 2).tolist()}
        waiting = [asyncio.create_task(held.post("/step/batch", step)) for _ in range(3)]
        await held.until_waiting(session, 4)
        restart = {"session_id": session_id, "n": 2, "seed": 30, "config": {"episode_length": 5}}
        assert (await held.client.post("/reset/batch", json=restart)).status_code == 429
        assert (session.seeds, session.autoreset) == ([9, 10], True)
        held.released.set()
        await asyncio.gather(playing, *waiting)
        assert (session.taken, session.episodes) == (206, 41)
        assert session.batch.seeds.tolist() == [episode_seed(9, 41), episode_seed(10, 41)]

    run_in_time(scenario())


def test_requests_survive_their_own_bytes() -> None:
    actions = random_actions(3, 2)
    for steps in (BatchSteps("0" * 32, actions, 3, 7), BatchSteps("f" * 32, actions[:1], 3, None, last=True)):
        again = decode_request(encode_request(steps))
        assert (again.session_id, again.n_steps, again.number, again.last) == (
            steps.session_id,
            3,
            steps.number,
            steps.last,
        )
        assert np.array_equal(again.actions, steps.actions)
    assert encode_request(BatchSteps("0" * 32, actions[:1], 3))[6] == HOLD
    with pytest.raises(ValueError, match="IGB1"):
        decode_request(b"\0" * 40)


@pytest.mark.parametrize("shape", [(1, 1, 14), (1, 4_096, 14), (4_096, 1, 14), (64, 64, 21), (3, 1_000, 14)])
def test_observations_written_in_blocks_are_the_same_json(shape: tuple[int, ...]) -> None:
    observations = np.random.default_rng(1).normal(size=shape)
    assert in_blocks(observations) == orjson.dumps(observations, option=orjson.OPT_SERIALIZE_NUMPY)
