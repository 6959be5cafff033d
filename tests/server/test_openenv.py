"""OpenEnv's protocol: answers to valid and invalid frames, and checks by OpenEnv's own tools."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError
from starlette.testclient import TestClient
from websockets.asyncio.client import ClientConnection, connect
from websockets.asyncio.server import ServerConnection, serve

from env.inference_env import InferenceEnv
from inferencegym.client import (
    InferenceGymAction,
    InferenceGymEnv,
    InferenceGymObservation,
    ServerUnavailableError,
    TrafficControllerEnv,
)
from inferencegym.client.openenv import EpisodeClient
from inferencegym.client.openenv_types import (
    TrafficControllerAction,
    TrafficControllerObservation,
    without_gradio,
)
from inferencegym.error_text import read_error, write_error
from inferencegym.errors import CapacityError, InvalidActionError, InvalidConfigError, NotResetError, UnknownTaskError
from inferencegym.models import ACTION_FIELDS, OBSERVATION_FIELDS, REPLICAS
from inferencegym.traffic import ACTION_NAMES, STATE_FIELDS
from server.app import create_app
from server.sessions.manager import SessionManager
from server.settings import load_settings
from tests.servers import PATIENCE_S, PATIENT, ROOT, RunningServer, reset_when_there_is_room, running_server

with without_gradio():
    from openenv.core import GenericEnvClient
    from openenv.core.env_server.types import EnvironmentMetadata


@pytest.fixture(scope="module")
def one_slot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("one"), max_concurrent_envs="1", store_url="memory://") as server:
        yield server


Ask = Callable[[Any], Awaitable[dict[str, Any]]]


def talk(
    server: RunningServer, conversation: Callable[[Ask, ClientConnection], Awaitable[None]], path: str = "/ws"
) -> None:
    """Hold a conversation over one bare socket; every frame gets exactly one answer."""

    async def run() -> None:
        async with connect(server.url.replace("http", "ws", 1) + path, proxy=None, open_timeout=PATIENCE_S) as socket:

            async def ask(frame: Any) -> dict[str, Any]:
                await socket.send(frame if isinstance(frame, (str, bytes)) else json.dumps(frame))
                return dict(json.loads(await asyncio.wait_for(socket.recv(), PATIENCE_S)))

            await conversation(ask, socket)

    asyncio.run(run())


def reset(**data: Any) -> dict[str, Any]:
    return {"type": "reset", "data": data}


def step(**data: Any) -> dict[str, Any]:
    return {"type": "step", "data": data}


def refused_with(answer: dict[str, Any], code: str) -> bool:
    said = read_error(answer["data"].get("message", ""))
    return answer["type"] == "error" and said is not None and said[1] == code


# ---------------------------------------------------------------- types


def test_actions_and_observations_have_the_fields_of_the_shared_vocabulary() -> None:
    assert list(InferenceGymAction.model_fields)[1:] == [*ACTION_FIELDS, REPLICAS.name]
    spread = [name for name in OBSERVATION_FIELDS if not name.startswith("priority_")]
    own = [name for name in InferenceGymObservation.model_fields if name not in ("done", "reward", "metadata", "info")]
    assert [name for name in own if name != "priority_distribution"] == spread
    own = [n for n in TrafficControllerObservation.model_fields if n not in ("done", "reward", "metadata", "info")]
    assert own == list(STATE_FIELDS)


def test_schemas_carry_the_bounds_of_the_shared_vocabulary(server: RunningServer) -> None:
    published = server.get("/schema")
    for name, field in OBSERVATION_FIELDS.items():
        if not name.startswith("priority_"):
            schema = published["observation"]["properties"][name]
            assert schema["minimum"] == field.low
            assert schema.get("maximum", math.inf) == field.high
    knobs = published["action"]["properties"]
    assert knobs["spec_length"]["enum"] == list(ACTION_FIELDS["spec_length"].choices or ())
    assert (knobs["batch_size"]["minimum"], knobs["batch_size"]["maximum"]) == (1, 512)
    assert server.get("/traffic/schema")["action"]["properties"]["action"]["enum"] == list(ACTION_NAMES)


@pytest.mark.parametrize(
    ("field", "value"),
    [("kv_budget", 0.05), ("spec_length", 3), ("batch_size", 1.5), ("prefill_disagg", "yes"), ("quant_tier", "FP8")],
)
def test_an_action_out_of_bounds_is_refused_before_it_is_sent(field: str, value: object) -> None:
    with pytest.raises(ValidationError, match=field):
        InferenceGymAction(**{field: value})


def test_a_traffic_action_outside_the_four_is_refused() -> None:
    with pytest.raises(ValidationError, match="allow_all"):
        TrafficControllerAction(action="allow_some")


def test_an_error_text_keeps_message_and_code() -> None:
    assert read_error("Server error: " + write_error("no [such] thing", "x_y", "go on")) == (
        "Server error: no [such] thing; go on",
        "x_y",
    )
    assert read_error("something else") is None


# ---------------------------------------------------------------- frames


def test_a_step_before_a_reset_is_refused_and_says_what_to_do(server: RunningServer) -> None:
    async def conversation(ask: Ask, _: ClientConnection) -> None:
        answer = await ask(step(batch_size=32))
        assert refused_with(answer, "not_reset")
        assert "resume=True" in answer["data"]["message"]
        assert (await ask({"type": "state"}))["data"]["step_count"] == 0
        assert (await ask(reset()))["type"] == "observation"

    talk(server, conversation)


MALFORMED: dict[str, Any] = {
    "text": '"hello"',
    "array": "[]",
    "number": "1",
    "broken": '{"type": "reset"',
    "empty": "",
    "bytes": b"\x00\x01",
    "nan": '{"type": "reset", "data": {"seed": NaN}}',
    "infinity": '{"type": "step", "data": {"kv_budget": 1e999}}',
    "lone_surrogate": '{"type": "\\ud800"}',
    "deep": '{"a":' * 5000 + "1" + "}" * 5000,
    "repeated_key": '{"type": "reset", "type": "state"}',
    "no_type": "{}",
    "list_type": '{"type": ["reset"]}',
    "unknown_type": '{"type": "destroy"}',
    "extra_key": '{"type": "reset", "extra": 1}',
    "data_no_object": '{"type": "step", "data": 5}',
    "data_missing": '{"type": "step"}',
    "old_form": '{"type": "step", "data": {"action": {"batch_size": 1}}}',
    "mcp_nonsense": '{"type": "mcp", "data": {"method": 5}}',
}


@pytest.mark.parametrize("name", MALFORMED)
@pytest.mark.parametrize("path", ["/ws", "/traffic/ws"])
def test_a_malformed_frame_is_answered_and_the_episode_goes_on(server: RunningServer, name: str, path: str) -> None:
    async def conversation(ask: Ask, _: ClientConnection) -> None:
        action = {"action": "throttle_40"} if "traffic" in path else {"batch_size": 64}
        await ask(reset(seed=3))
        await ask(step(**action))
        answer = await ask(MALFORMED[name])
        assert answer["type"] == "error" or answer["data"]["error"]["code"] < 0
        assert (await ask({"type": "state"}))["data"]["step_count"] == 1
        assert (await ask(step(**action)))["type"] == "observation"
        assert (await ask({"type": "state"}))["data"]["step_count"] == 2

    talk(server, conversation, path)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({"seed": "7"}, "invalid_request"),
        ({"seed": 1.5}, "invalid_request"),
        ({"seed": True}, "invalid_request"),
        ({"seed": -1}, "invalid_request"),
        ({"seed": 2**70}, "invalid_request"),
        ({"task_id": 99}, "unknown_task"),
        ({"task_id": [1]}, "invalid_request"),
        ({"config": {"alpha": 2}}, "invalid_config"),
        ({"config": {"colour": 1}}, "invalid_config"),
        ({"config": [1]}, "invalid_request"),
        ({"episode_id": 5}, "invalid_request"),
        ({"episode_id": "no spaces, please"}, "invalid_request"),
        ({"self": 1}, "invalid_request"),
        ({"difficulty": "hard"}, "invalid_request"),
        ({"split": "holdout"}, "invalid_config"),
        ({"split": "train", "index": 99}, "invalid_config"),
        ({"index": 0, "task_id": 1}, "invalid_request"),
        ({"resume": True}, "invalid_request"),
        ({"resume": True, "episode_id": "x", "seed": 1}, "invalid_request"),
        ({"resume": True, "episode_id": "nobody-played-this"}, "unknown_session"),
        ({"resume": "yes", "episode_id": "x"}, "invalid_request"),
    ],
)
def test_a_wrong_reset_argument_is_refused_and_the_episode_goes_on(
    server: RunningServer, arguments: dict[str, Any], code: str
) -> None:
    async def conversation(ask: Ask, _: ClientConnection) -> None:
        await ask(reset(task_id=2, seed=3))
        await ask(step(batch_size=64))
        answer = await ask(reset(**arguments))
        assert refused_with(answer, code), answer
        state = (await ask({"type": "state"}))["data"]
        assert (state["task_id"], state["step_count"]) == (2, 1)
        assert (await ask(step(batch_size=64)))["data"]["observation"]["timestep"] == 2

    talk(server, conversation)


def test_what_a_reset_is_given_is_honoured(server: RunningServer) -> None:
    async def conversation(ask: Ask, _: ClientConnection) -> None:
        config = {"episode_length": 2, "alpha": 0.5}
        await ask(reset(task_id=3, seed=11, episode_id="my-episode.1", config=config))
        state = (await ask({"type": "state"}))["data"]
        assert (state["task_id"], state["seed"], state["episode_id"]) == (3, 11, "my-episode.1")
        assert state["config"]["alpha"] == 0.5
        assert [(await ask(step()))["data"]["done"] for _ in range(2)] == [False, True]
        assert refused_with(await ask(step()), "episode_done")
        assert (await ask({"type": "state"}))["data"]["step_count"] == 2
        await ask(reset(split="train", index=1, info=True))
        assert (await ask({"type": "state"}))["data"]["task_id"] == 2
        info = (await ask(step()))["data"]["observation"]["info"]
        assert {"metrics", "workload", "action_applied"} <= info.keys()

    talk(server, conversation)


def test_a_refused_action_changes_nothing_and_names_the_field(server: RunningServer) -> None:
    async def conversation(ask: Ask, _: ClientConnection) -> None:
        await ask(reset(seed=1))
        for knobs in ({"batch_size": 0}, {"batch_size": "64"}, {"colour": 1}, {"spec_length": 3}):
            answer = await ask(step(**knobs))
            assert (answer["type"], answer["data"]["code"]) == ("error", "VALIDATION_ERROR")
            assert answer["data"]["errors"][0]["loc"] == list(knobs)
        assert (await ask({"type": "state"}))["data"]["step_count"] == 0

    talk(server, conversation)


def test_a_numbered_step_is_played_once(server: RunningServer) -> None:
    async def conversation(ask: Ask, _: ClientConnection) -> None:
        await ask(reset(seed=5))
        first = await ask(step(batch_size=64, metadata={"step": 1}))
        assert await ask(step(batch_size=64, metadata={"step": 1})) == first
        assert refused_with(await ask(step(batch_size=65, metadata={"step": 1})), "step_conflict")
        assert refused_with(await ask(step(metadata={"step": 3})), "step_conflict")
        assert refused_with(await ask(step(metadata={"step": 0})), "invalid_request")
        assert refused_with(await ask(step(metadata=[1])), "invalid_request")
        assert (await ask({"type": "state"}))["data"]["step_count"] == 1
        assert (await ask(step(batch_size=64)))["data"]["observation"]["timestep"] == 2

    talk(server, conversation)


def test_a_step_with_metadata_is_answered_as_one_without(server: RunningServer) -> None:
    async def play(metadata: Callable[[int], dict[str, Any]], info: bool) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = []

        async with connect(server.url.replace("http", "ws", 1) + "/ws", proxy=None, open_timeout=PATIENCE_S) as socket:
            await socket.send(json.dumps(reset(task_id=3, seed=9, info=info)))
            await socket.recv()
            for number in range(1, 30):
                await socket.send(json.dumps(step(batch_size=10 * number, quant_tier="INT8", **metadata(number))))
                answers.append(json.loads(await socket.recv()))
        return answers

    for info in (False, True):
        plain = asyncio.run(play(lambda _: {}, info))
        assert plain == asyncio.run(play(lambda number: {"metadata": {"step": number, "note": "mine"}}, info))
        assert plain == asyncio.run(play(lambda _: {"metadata": {}}, info))
        assert ("info" in plain[0]["data"]["observation"]) == info


@pytest.mark.parametrize("later", [{"task_id": 2, "seed": 2}, {"task_id": 1, "seed": 1}], ids=["other", "equal"])
def test_two_connections_with_one_episode_id_do_not_mix_their_episodes(
    server: RunningServer, later: dict[str, Any]
) -> None:
    async def conversation(ask: Ask, _: ClientConnection) -> None:
        await ask(reset(task_id=1, seed=1, episode_id="shared"))
        await ask(step(batch_size=64))
        async with GenericEnvClient(base_url=server.url, **PATIENT) as other:
            await other.reset(**later, episode_id="shared")
            for number in (1, 2):
                # With its own number, the earlier connection's step would fit after the other's first.
                for refused in (step(batch_size=500), step(batch_size=500, metadata={"step": number})):
                    answer = await ask(refused)
                    assert refused_with(answer, "step_conflict")
                    assert "was reset by another request" in answer["data"]["message"]
                assert refused_with(await ask({"type": "state"}), "step_conflict")
                assert (await other.step({"batch_size": 64})).observation["timestep"] == number
        assert (await ask(reset(task_id=1, seed=1)))["type"] == "observation"
        assert (await ask(step(batch_size=64)))["data"]["observation"]["timestep"] == 1

    talk(server, conversation)


def test_a_connection_sees_what_another_process_did_to_its_episode(tmp_path: Path) -> None:
    log = tmp_path / "other"
    log.mkdir()
    store = f"sqlite://{tmp_path}/shared.db"
    with running_server(tmp_path, store_url=store) as one, running_server(log, store_url=store) as two:

        async def conversation(ask: Ask, _: ClientConnection) -> None:
            await ask(reset(task_id=1, seed=5, episode_id="e"))
            for _ in range(3):
                two.post("/step", {"session_id": "e"})
            assert (await ask({"type": "state"}))["data"]["step_count"] == 3
            two.post("/reset", {"session_id": "e", "task_id": 3, "seed": 9})
            assert refused_with(await ask(step(batch_size=500)), "step_conflict")
            assert refused_with(await ask({"type": "state"}), "step_conflict")
            assert two.get("/state", session_id="e")["step_count"] == 0
            assert (await ask(reset(episode_id="e", resume=True)))["type"] == "observation"
            assert (await ask(step(batch_size=64)))["data"]["observation"]["timestep"] == 1
            assert two.get("/state", session_id="e")["step_count"] == 1

        talk(one, conversation)


# ---------------------------------------------------------------- lost connections


class Relay:
    """A way to a server on which a test loses connections and answers.

    After :meth:`lose_the_first` and :meth:`end_the_first` the server does not notice the loss until the socket numbered
    ``noticed_at`` is opened.
    """

    def __init__(self, server: RunningServer, noticed_at: float = math.inf) -> None:
        self.answers_lost = 0
        self._port = server.port
        self._noticed_at = noticed_at
        self._ends: list[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = []
        self._from_clients: list[asyncio.Task[None]] = []
        self._kept: asyncio.StreamWriter | None = None
        self._answers_to_lose = 0

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        """The address for clients."""
        listener = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        finally:
            self.abort()
            listener.close()
            await listener.wait_closed()

    def end(self) -> None:
        """Close every connection in order, on both sides."""
        for end in chain(*self._ends):
            end.close()

    def abort(self) -> None:
        """Break every connection, on both sides."""
        for end in chain(*self._ends):
            end.transport.abort()

    def lose_the_first(self) -> None:
        """Break the first connection on the client's side only."""
        client, self._kept = self._ends[0]
        client.transport.abort()

    async def end_the_first(self) -> None:
        """End the first connection on the client's side only, and wait until the client has closed its own."""
        client, self._kept = self._ends[0]
        client.write_eof()
        await asyncio.wait_for(self._from_clients[0], PATIENCE_S)

    def lose_the_next_answer(self) -> None:
        """Break the connection instead of passing the server's next answer on."""
        self._answers_to_lose = 1

    async def _carry(self, from_client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection("127.0.0.1", self._port)
        self._ends.append((to_client, to_server))
        if len(self._ends) == self._noticed_at:
            self._ends[0][1].transport.abort()
        self._from_clients.append(asyncio.create_task(self._copy(from_client, to_server)))
        await asyncio.gather(self._from_clients[-1], self._copy(from_server, to_client))

    async def _copy(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        is_answer = any(target is to_client for to_client, _ in self._ends)
        with contextlib.suppress(ConnectionError):
            while piece := await source.read(65_536):
                if is_answer and self._answers_to_lose > 0:
                    self._answers_to_lose -= 1
                    self.answers_lost += 1
                    self.abort()
                target.write(piece)
        if target is not self._kept:
            target.close()


def test_a_stock_client_that_lost_its_socket_is_told_how_to_go_on(server: RunningServer) -> None:
    async def run() -> None:
        async with GenericEnvClient(base_url=server.url, **PATIENT) as env:
            await env.reset(seed=4, episode_id="lost-and-found")
            await env.step({"batch_size": 64})
            await env.disconnect()
            with pytest.raises(RuntimeError, match="resume=True"):
                await env.step({"batch_size": 64})
            resumed = await env.reset(episode_id="lost-and-found", resume=True)
            assert resumed.observation["timestep"] == 1
            assert (await env.step({"batch_size": 64})).observation["timestep"] == 2

    asyncio.run(run())


def test_our_client_goes_on_by_itself_when_its_socket_is_lost(server: RunningServer) -> None:
    async def run() -> None:
        way = Relay(server)
        async with (
            way.listening() as url,
            InferenceGymEnv(base_url=url, **PATIENT) as env,
            InferenceGymEnv(base_url=server.url, **PATIENT) as undisturbed,
        ):
            await env.reset(seed=4, task_id=2)
            await undisturbed.reset(seed=4, task_id=2)
            for number in range(1, 13):
                if number % 3 == 0:
                    way.end()
                if number % 4 == 0:
                    way.abort()
                if number % 5 == 0:
                    await env.disconnect()
                action = InferenceGymAction(batch_size=20 * number)
                assert await env.step(action) == await undisturbed.step(action)
            way.end()
            assert (await env.state()).step_count == 12

    asyncio.run(run())


def test_an_episode_goes_on_in_whichever_worker_a_new_socket_reaches(tmp_path: Path) -> None:
    with running_server(tmp_path, workers="2") as server:

        async def run() -> None:
            local = InferenceEnv(task_id=2, seed=4)
            local.reset()
            async with InferenceGymEnv(base_url=server.url, **PATIENT) as env:
                await env.reset(seed=4, task_id=2)
                for number in range(1, 9):
                    _, reward, _, _ = local.step({"batch_size": 10 * number})
                    assert (await env.step({"batch_size": 10 * number})).reward == reward
                    assert server.get("/state", session_id=env.episode_id)["step_count"] == number
                    await env.disconnect()
                assert (await env.state()).step_count == 8

        asyncio.run(run())


@pytest.mark.parametrize(
    ("client", "path", "action"),
    [
        (InferenceGymEnv, "", {"batch_size": 64}),
        (InferenceGymEnv, "", InferenceGymAction(batch_size=64, quant_tier="INT8")),
        (TrafficControllerEnv, "/traffic", "throttle_40"),
    ],
    ids=["mapping", "action", "traffic"],
)
def test_a_step_whose_answer_was_lost_is_not_played_twice(
    server: RunningServer, client: type[EpisodeClient], path: str, action: Any
) -> None:
    """The client asks for the answer again under the step's number."""

    async def run() -> None:
        way = Relay(server)
        async with (
            way.listening() as url,
            client(base_url=url + path, **PATIENT) as env,
            client(base_url=server.url + path, **PATIENT) as undisturbed,
        ):
            await env.reset(seed=4)
            await undisturbed.reset(seed=4)
            way.lose_the_next_answer()
            assert await env.step(action) == await undisturbed.step(action)
            assert way.answers_lost == 1
            assert (await env.state()).step_count == 1

    asyncio.run(run())


def with_sync(url: str) -> Iterator[Any]:
    with InferenceGymEnv(base_url=url, **PATIENT).sync() as env:
        yield env


def with_the_client_itself(url: str) -> Iterator[Any]:
    with InferenceGymEnv(base_url=url, **PATIENT) as env:
        yield env


def without_with(url: str) -> Iterator[Any]:
    env = InferenceGymEnv(base_url=url, **PATIENT)
    yield env
    env.close()


def after_an_asynchronous_start(url: str) -> Iterator[Any]:
    env = InferenceGymEnv(base_url=url, **PATIENT)
    asyncio.run(reset_and_leave(env))
    yield env
    env.close()


async def reset_and_leave(env: InferenceGymEnv) -> None:
    await env.reset(seed=1)
    await env.disconnect()


def second_session(url: str) -> Iterator[Any]:
    with InferenceGymEnv(base_url=url, **PATIENT).sync() as first:
        yield first.new_session()


@pytest.mark.parametrize(
    ("opened", "in_notebook"),
    [
        (with_sync, False),
        (with_sync, True),
        (with_the_client_itself, False),
        (with_the_client_itself, True),
        (second_session, False),
        (second_session, True),
        # In a notebook these two are asynchronous.
        (without_with, False),
        (after_an_asynchronous_start, False),
    ],
)
def test_a_synchronous_client_goes_on_by_itself_when_its_socket_is_lost(
    server: RunningServer, opened: Callable[[str], Iterator[Any]], in_notebook: bool
) -> None:
    """In a notebook the calls come from within a running event loop."""

    def play(url: str, lose: Callable[[], None]) -> None:
        local = InferenceEnv(task_id=2, seed=4)
        local.reset()
        with contextlib.contextmanager(opened)(url) as env:
            env.reset(seed=4, task_id=2)
            for number in range(1, 5):
                if number % 2 == 0:
                    lose()
                _, reward, _, _ = local.step({"batch_size": 10 * number})
                assert env.step({"batch_size": 10 * number}).reward == reward
            lose()
            state = env.state()
            assert (state.step_count, state.episode_id) == (4, env.episode_id)

    async def notebook(url: str, lose: Callable[[], None]) -> None:
        play(url, lose)

    async def run() -> None:
        way = Relay(server)
        loop = asyncio.get_running_loop()

        async def abort() -> None:
            way.abort()

        def lose() -> None:
            asyncio.run_coroutine_threadsafe(abort(), loop).result()

        async with way.listening() as url:
            if in_notebook:
                await asyncio.to_thread(lambda: asyncio.run(notebook(url, lose)))
            else:
                await asyncio.to_thread(play, url, lose)

    asyncio.run(run())


def test_a_second_session_of_a_client_goes_on_by_itself_and_is_closed_with_it(server: RunningServer) -> None:
    async def run() -> None:
        way = Relay(server)
        async with way.listening() as url, InferenceGymEnv(base_url=url, message_timeout_s=30.0) as first:
            second = await first.new_session()
            await first.reset(seed=1)
            await second.reset(seed=2)
            way.abort()
            for env, steps in ((first, 1), (second, 1), (second, 2)):
                assert (await env.step({})).observation.timestep == steps
            assert first.episode_id != second.episode_id

    asyncio.run(run())


class Started:
    """A provider whose container is a server that runs already."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.images: list[str] = []

    def start_container(self, image: str) -> str:
        self.images.append(image)
        return self.url

    def wait_for_ready(self, _base_url: str) -> None:
        return

    def stop_container(self) -> None:
        self.images.append("stopped")


def test_a_client_of_a_container_is_awaited_or_synchronous_and_stops_it(server: RunningServer) -> None:
    async def run() -> None:
        provider = Started(server.url)
        env = await InferenceGymEnv.from_docker_image("image", provider=provider)
        await env.reset(seed=1)
        await env.disconnect()
        assert (await env.step({})).observation.timestep == 1
        await env.close()
        assert provider.images == ["image", "stopped"]

    asyncio.run(run())
    provider = Started(server.url)
    with InferenceGymEnv.from_docker_image("image", provider=provider).sync() as env:
        env.reset(seed=1)
        env.disconnect()
        assert env.step({}).observation.timestep == 1
    assert provider.images == ["image", "stopped"]


@pytest.mark.parametrize("face", [lambda env: env, lambda env: env.sync()], ids=["itself", "sync"])
def test_synchronous_calls_have_the_errors_of_local_use(
    server: RunningServer, face: Callable[[InferenceGymEnv], Any]
) -> None:
    env = face(InferenceGymEnv(base_url=server.url, **PATIENT))
    with pytest.raises(NotResetError):
        env.step({})
    with pytest.raises(UnknownTaskError):
        env.reset(task_id=99)
    with pytest.raises(InvalidActionError) as refused:
        env.step({"batch_size": 6400})
    assert refused.value.field == "batch_size"
    env.close()
    with socket.create_server(("127.0.0.1", 0)) as unused:
        nobody = f"http://127.0.0.1:{unused.getsockname()[1]}"
    alone = InferenceGymEnv(base_url=nobody, **PATIENT)
    alone.retry_s = 0
    with pytest.raises(ServerUnavailableError):
        face(alone).reset()


def test_a_server_that_is_not_there_or_lost_is_reported_when_the_time_is_up(tmp_path: Path) -> None:
    with running_server(tmp_path, store_url="memory://") as server:

        async def run() -> None:
            async with InferenceGymEnv(base_url=server.url, **PATIENT) as env:
                await env.reset(episode_id="kept")
                server.kill()
                env.retry_s = 0.2
                with pytest.raises(ServerUnavailableError, match=r"reset\(episode_id='kept', resume=True\)"):
                    await env.step({})
            alone = InferenceGymEnv(base_url=server.url, **PATIENT)
            alone.retry_s = 0.2
            with pytest.raises(ServerUnavailableError, match=r"over 0\.2 s"):
                await alone.connect()

        asyncio.run(run())


def test_errors_of_the_websocket_client_are_those_of_local_use(server: RunningServer) -> None:
    async def run() -> None:
        async with InferenceGymEnv(base_url=server.url, **PATIENT) as env:
            with pytest.raises(NotResetError):
                await env.step({"batch_size": 64})
            with pytest.raises(InvalidActionError) as refused:
                await env.step({"batch_size": 6400})
            assert refused.value.field == "batch_size"
            with pytest.raises(InvalidConfigError, match="seed"):
                await env.reset(seed=-1)
            with pytest.raises(InvalidConfigError, match=r"tusk_id.*task_id"):
                await env.reset(tusk_id=1)
            with pytest.raises(UnknownTaskError):
                await env.reset(task_id=99)
            await env.reset()
            assert (await env.step({})).observation.timestep == 1

    asyncio.run(run())


# ---------------------------------------------------------------- capacity


@pytest.mark.parametrize("client_knows", [False, True])
@pytest.mark.parametrize("call", ["step", "reset", "state"])
def test_a_client_outwaits_the_slot_of_its_own_lost_socket(
    one_slot: RunningServer, call: str, client_knows: bool
) -> None:
    way = Relay(one_slot, noticed_at=4)

    async def run() -> None:
        async with way.listening() as url, InferenceGymEnv(base_url=url, **PATIENT) as env:
            await reset_when_there_is_room(env, seed=4)
            await env.step({"batch_size": 64})
            if client_knows:
                await way.end_the_first()
            else:
                way.lose_the_first()
            if call == "step":
                assert (await env.step({"batch_size": 64})).observation.timestep == 2
            elif call == "reset":
                assert (await env.reset(seed=5)).observation.timestep == 0
            else:
                assert (await env.state()).step_count == 1

    asyncio.run(run())


def test_a_server_that_stays_full_is_given_up_after_a_while_and_the_episode_named(one_slot: RunningServer) -> None:
    way = Relay(one_slot)

    async def run() -> None:
        async with way.listening() as url, InferenceGymEnv(base_url=url, **PATIENT) as env:
            await reset_when_there_is_room(env, episode_id="kept")
            way.lose_the_first()
            env.retry_s = 5.0
            with pytest.raises(CapacityError, match=r"MAX_CONCURRENT_ENVS.*reset\(episode_id='kept', resume=True\)"):
                await env.step({})

    asyncio.run(run())


def test_a_client_that_has_left_is_refused_by_a_full_server_at_once(one_slot: RunningServer) -> None:
    async def run() -> None:
        async with (
            InferenceGymEnv(base_url=one_slot.url, **PATIENT) as left,
            InferenceGymEnv(base_url=one_slot.url, **PATIENT) as other,
        ):
            await reset_when_there_is_room(left)
            await left.disconnect()
            await reset_when_there_is_room(other)
            left.retry_s = math.inf
            with pytest.raises(CapacityError, match="MAX_CONCURRENT_ENVS"):
                await left.reset()

    asyncio.run(run())


def test_every_refusal_of_a_full_server_is_a_capacity_error_however_late_it_closes_the_socket() -> None:
    refused = []

    async def refuse(socket: ServerConnection) -> None:
        refused.append(await socket.recv())
        await socket.send(json.dumps({"type": "error", "data": {"message": "full", "code": "CAPACITY_REACHED"}}))
        # Closed in the middle of the next call, if that comes over this socket.
        await socket.recv()

    async def run() -> None:
        async with serve(refuse, "127.0.0.1", 0) as listener:
            env = InferenceGymEnv(base_url=f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}", **PATIENT)
            for attempt in range(1, 4):
                with pytest.raises(CapacityError):
                    await env.reset()
                assert len(refused) == attempt

    asyncio.run(run())


def test_a_frame_that_the_server_fails_on_is_answered_and_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    app = create_app(load_settings(store_url="memory://"))
    with TestClient(app) as client, client.websocket_connect("/ws") as player:
        player.send_json(reset())
        player.receive_json()
        with monkeypatch.context() as patched:
            patched.setattr(SessionManager, "step", fail)
            player.send_json(step())
            assert refused_with(player.receive_json(), "internal")
        player.send_json(step())
        assert player.receive_json()["type"] == "observation"
    assert "ZeroDivisionError" in caplog.text


def test_a_close_frame_ends_the_connection_and_keeps_the_episode(server: RunningServer) -> None:
    async def conversation(ask: Ask, socket: ClientConnection) -> None:
        await ask(reset(episode_id="kept-after-close"))
        await ask(step())
        await socket.send('{"type": "close"}')
        await socket.wait_closed()
        assert socket.close_code == 1000
        assert server.get("/state", session_id="kept-after-close")["step_count"] == 1

    talk(server, conversation)


# ---------------------------------------------------------------- the other routes


def test_the_task_api_lists_what_the_manifest_declares(server: RunningServer) -> None:
    declared = yaml.safe_load((ROOT / "openenv.yaml").read_text(encoding="utf-8"))
    names = [split["name"] for split in server.client.get("/inference_gym/splits").json()]
    for name, count in declared["validation"]["capabilities"]["declared_task_count"].items():
        assert name in names
        assert server.post("/inference_gym/num_tasks", {"split": name}) == {"num_tasks": count}
        tasks = server.post("/inference_gym/tasks", {"split": name})["tasks"]
        assert len(tasks) == count
        assert [(task["split"], task["index"]) for task in tasks] == [(name, i) for i in range(count)]
        listed = {task["id"]: task for task in server.get("/tasks", all=True)["tasks"]}
        # RFC 013: a number, higher for harder tasks.
        assert [task["difficulty"] for task in tasks] == [listed[task["id"]]["measured_difficulty"] for task in tasks]
        assert [task["level"] for task in tasks] == [listed[task["id"]]["difficulty"] for task in tasks]
        assert server.post("/inference_gym/task", {"split": name, "index": count - 1})["task"] == tasks[-1]
        assert server.post("/inference_gym/task_range", {"split": name, "start": 1})["tasks"] == tasks[1:]
        for index in (count, -1):
            answer = server.client.post("/inference_gym/task", json={"split": name, "index": index})
            assert answer.status_code == 400
    assert server.client.get("/other/splits").status_code == 404
    unmeasured = server.post("/traffic/traffic_controller/tasks", {"split": "train"})["tasks"]
    assert [(task["level"], "difficulty" in task) for task in unmeasured] == [
        ("easy", False),
        ("medium", False),
        ("hard", False),
    ]


@pytest.mark.parametrize("prefix", ["", "/traffic", "/rollouts"])
def test_every_environment_plays_an_episode_to_its_end_with_info(server: RunningServer, prefix: str) -> None:
    action = {"": {"batch_size": 64}, "/traffic": {"action": "throttle_40"}, "/rollouts": {"max_sessions": 8}}[prefix]
    length = {} if prefix == "/traffic" else {"config": {"episode_length": 20}}

    async def conversation(ask: Ask, _: ClientConnection) -> None:
        last = await ask(reset(seed=1, info=True, **length))
        while not last["data"]["done"]:
            last = await ask({"type": "step", "data": action})
            assert last["type"] == "observation", last
        data = last["data"]
        assert data["observation"]["metadata"] == data["metadata"]
        assert data["observation"]["info"]
        assert 0.0 <= data["metadata"]["score"] <= 1.0

    talk(server, conversation, f"{prefix}/ws")


def test_metadata_and_mcp_answer_for_both_environments(server: RunningServer) -> None:
    for prefix, title in (("", "InferenceGym"), ("/traffic", "Traffic controller")):
        told = EnvironmentMetadata.model_validate(server.get(f"{prefix}/metadata"))
        assert [name for name, value in told.model_dump().items() if not value] == []
        assert told.name == title
        assert told.readme_content is not None
        assert told.readme_content.startswith(f"# {title}\n")
        assert server.post(f"{prefix}/mcp", {})["jsonrpc"] == "2.0"


def test_the_traffic_environment_can_stand_at_the_root(tmp_path: Path) -> None:
    with running_server(tmp_path, env="traffic", store_url="memory://") as server:

        async def run() -> None:
            for base, client, action in (
                (server.url, TrafficControllerEnv, "allow_all"),
                (server.url + "/traffic", TrafficControllerEnv, "allow_all"),
                (server.url + "/serving", InferenceGymEnv, {"batch_size": 64}),
            ):
                async with client(base_url=base, **PATIENT) as env:
                    await env.reset(seed=1)
                    await env.step(action)
                    assert (await env.state()).step_count == 1

        asyncio.run(run())


# ---------------------------------------------------------------- OpenEnv's own tools


def test_openenvs_discovery_finds_client_action_and_observation(server: RunningServer, tmp_path: Path) -> None:
    program = """
import sys
from inferencegym.client.openenv_types import without_gradio
with without_gradio():
    from openenv import AutoAction, AutoEnv
with AutoEnv.from_env("inference_gym", base_url=sys.argv[1]).sync() as env:
    action = AutoAction.from_env("inference_gym")(batch_size=64)
    env.reset(seed=1)
    print(type(action).__name__, type(env.step(action).observation).__name__, type(env.state()).__name__)
"""
    command = [sys.executable, "-c", program, server.url]
    # A cache of its own: OpenEnv's may have been written before this package was installed.
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert said.stdout.split()[-3:] == ["InferenceGymAction", "InferenceGymObservation", "InferenceGymState"]
