"""The HTTP client: same results and errors as locally, and no step played twice whatever the network loses."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from env.inference_env import InferenceEnv
from inferencegym.client import (
    AsyncInferenceGymHTTP,
    HTTPVectorEnv,
    InferenceGymAction,
    InferenceGymBatch,
    InferenceGymEnv,
    InferenceGymHTTP,
    ServerError,
    ServerUnavailableError,
)
from inferencegym.errors import (
    EpisodeDoneError,
    ForgedLogError,
    InferenceGymError,
    InvalidActionError,
    InvalidConfigError,
    MalformedLogError,
    NotResetError,
    StepConflictError,
    StoreError,
    UnauthorizedError,
    UnknownSessionError,
    UnknownTaskError,
)
from inferencegym.models import QuantTier, ServeAction
from tests.redis_server import RedisServer
from tests.servers import PATIENT, ROOT, RunningServer, running_server

ACTION = ServeAction(kv_budget=0.9, spec_length=2, batch_size=96, prefill_disagg=False, quant_tier=QuantTier.INT8)


@pytest.fixture
def client(server: RunningServer) -> Iterator[InferenceGymHTTP]:
    with InferenceGymHTTP(server.url) as opened:
        yield opened


class Unreliable(httpx.HTTPTransport):
    """Transport that loses requests or answers on demand."""

    def __init__(self, fate: Callable[[int, httpx.Request], str]) -> None:
        super().__init__()
        self.fate = fate
        self.sent = 0

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.sent += 1
        fate = self.fate(self.sent, request)
        if fate == "lost":
            raise httpx.ConnectError("nobody there", request=request)
        answer = super().handle_request(request)
        if fate == "unanswered":
            answer.read()
            raise httpx.ReadTimeout("no answer", request=request)
        if fate == "busy":
            answer.read()
            return httpx.Response(503, headers={"retry-after": "0"}, json={"detail": {"code": "store", "message": ""}})
        return answer


# ---------------------------------------------------------------- the same results


@pytest.mark.parametrize("task_id", [1, 2, 3])
def test_an_episode_over_http_returns_what_local_use_returns(client: InferenceGymHTTP, task_id: int) -> None:
    local = InferenceEnv(task_id=task_id)
    config = {"episode_length": 12, "alpha": 0.5}
    assert client.reset(seed=8, task_id=task_id, config=config) == local.reset(seed=8, config=config)
    for number in range(12):
        action = {"batch_size": 20 + 10 * number, "quant_tier": number % 3}
        assert client.step(action) == local.step(action)
    state = local.state()
    told = client.state()
    assert {key: told[key] for key in state if key != "session_id"} == {
        k: v for k, v in state.items() if k != "session_id"
    }
    assert client.grade()["steps"] == 12


def test_the_asynchronous_client_returns_the_same(server: RunningServer) -> None:
    async def play() -> list[Any]:
        async with AsyncInferenceGymHTTP(server.url) as client:
            played: list[Any] = [await client.reset(seed=8, task_id=2)]
            played += [await client.step(ACTION) for _ in range(5)]
            assert (await client.state())["step_count"] == 5
            assert 0 <= (await client.grade())["score"] <= 1
            assert len((await client.get("/tasks"))["tasks"]) == 3
            again = AsyncInferenceGymHTTP(server.url)
            assert client.session_id is not None
            assert await again.resume(client.session_id) == played[-1][0]
            await again.close()
            return played

    local = InferenceEnv(task_id=2)
    assert asyncio.run(play()) == [local.reset(seed=8), *(local.step(ACTION) for _ in range(5))]


def test_a_log_is_graded_and_verified_remotely(client: InferenceGymHTTP) -> None:
    local = InferenceEnv(task_id=1, seed=3, config={"episode_length": 5})
    local.reset()
    for _ in range(5):
        local.step(ACTION)
    log = local.episode_log
    arguments: dict[str, Any] = {"task_id": 1, "episode_log": log, "seed": 3, "config": {"episode_length": 5}}
    assert client.grade(**arguments, verify=True)["verified"] is True
    forged = [*log[:-1], {**log[-1], "reward": 1.0}]
    with pytest.raises(ForgedLogError):
        client.grade(**{**arguments, "episode_log": forged}, verify=True)
    with pytest.raises(MalformedLogError):
        client.grade(task_id=1, episode_log=[{"timestep": 1}])


# ---------------------------------------------------------------- the same errors


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda env: env.step({"batch_size": 64}), NotResetError),
        (lambda env: (env.reset(), env.step({"batch_size": 0})), InvalidActionError),
        (lambda env: (env.reset(), env.step({"colour": 1})), InvalidActionError),
        (lambda env: (env.reset(), env.step({"quant_tier": "FP8"})), InvalidActionError),
        (lambda env: (env.reset(), env.step(ServeAction(2.0, 0, 32, False, QuantTier.FP16))), InvalidActionError),
        (lambda env: env.reset(task_id=99), UnknownTaskError),
        (lambda env: env.reset(seed=-1), InvalidConfigError),
        (lambda env: env.reset(config={"alpha": 2}), InvalidConfigError),
        (lambda env: env.reset(config={"colour": 2}), InvalidConfigError),
        (lambda env: (env.reset(config={"episode_length": 1}), env.step({}), env.step({})), EpisodeDoneError),
    ],
)
def test_a_mistake_raises_the_same_error_as_in_process(
    client: InferenceGymHTTP, call: Callable[[Any], Any], error: type[InferenceGymError]
) -> None:
    with pytest.raises(error) as local:
        call(InferenceEnv())
    with pytest.raises(error) as remote:
        call(client)
    assert type(remote.value) is type(local.value) or issubclass(type(remote.value), type(local.value))
    assert getattr(remote.value, "field", None) == getattr(local.value, "field", None)


def test_an_error_says_what_to_do_next(client: InferenceGymHTTP) -> None:
    with pytest.raises(UnknownSessionError, match="POST /reset"):
        client.resume("0" * 32)
    with pytest.raises(NotResetError, match=r"reset\(\)"):
        client.state()


def test_a_step_that_another_client_took_is_a_conflict_and_not_a_silent_jump(
    server: RunningServer, client: InferenceGymHTTP
) -> None:
    client.reset(seed=1)
    assert client.session_id is not None
    with InferenceGymHTTP(server.url) as other:
        other.resume(client.session_id)
        other.step({"batch_size": 7})
    with pytest.raises(StepConflictError):
        client.step({"batch_size": 64})
    client.resume(client.session_id)
    assert client.step({"batch_size": 64})[0].timestep == 2


def test_a_server_of_another_kind_is_reported_as_such(tmp_path: Path) -> None:
    pages = {
        "/health": httpx.Response(200, text="<html>"),
        "/info": httpx.Response(418, json={"detail": "teapot"}),
        "/tasks": httpx.Response(429, json={"detail": {"code": "rate_limited", "message": "slow", "next": "wait"}}),
    }
    transport = httpx.MockTransport(lambda request: pages[request.url.path])
    with InferenceGymHTTP("http://somewhere", transport=transport, retry_s=0) as client:
        with pytest.raises(ServerUnavailableError, match="/health"):
            client.get("/health")
        with pytest.raises(ServerError) as other:
            client.get("/info")
        assert (other.value.code, other.value.status) == ("http_error", 418)
        with pytest.raises(ServerError, match=r"slow.*wait") as error:
            client.get("/tasks")
        assert (error.value.code, error.value.status) == ("rate_limited", 429)


# ---------------------------------------------------------------- what is lost on the way


@pytest.mark.parametrize("fate", ["lost", "unanswered", "busy"])
def test_steps_are_played_once_over_a_connection_that_fails_every_other_time(server: RunningServer, fate: str) -> None:
    local = InferenceEnv(task_id=3, seed=6)
    transport = Unreliable(lambda sent, _: fate if sent % 2 else "fine")
    with InferenceGymHTTP(server.url, transport=transport) as client:
        assert client.reset(seed=6, task_id=3) == local.reset()
        for number in range(6):
            action = {"batch_size": 30 + number}
            assert client.step(action) == local.step(action)
        assert client.state()["step_count"] == 6
    assert transport.sent == 2 * 8


def test_a_server_that_never_answers_is_reported_with_what_to_do(server: RunningServer) -> None:
    transport = Unreliable(lambda sent, _: "lost" if sent > 1 else "fine")
    with InferenceGymHTTP(server.url, transport=transport, retry_s=0.5) as client:
        client.reset()
        with pytest.raises(ServerUnavailableError, match=r"[3-5] attempts over 0\.5 s.*resume\(session_id\)"):
            client.step({})
        transport.fate = lambda *_: "fine"
        assert client.step({})[0].timestep == 1


def test_a_refusal_is_not_sent_again(server: RunningServer) -> None:
    transport = Unreliable(lambda *_: "fine")
    with InferenceGymHTTP(server.url, transport=transport) as client:
        client.reset()
        with pytest.raises(InvalidActionError):
            client.step({"batch_size": -1})
    assert transport.sent == 2


# ---------------------------------------------------------------- restarts


RESTART_S = 6.0
"""Seconds without a server: more than the pause of the documents' unit (RestartSec=5)."""


def test_every_client_outwaits_the_restart_of_a_crashed_server(tmp_path: Path) -> None:
    row = np.array([[0.9, 2, 96, 0, 1]] * 2, dtype=np.float32)

    async def first_reset() -> int:
        async with AsyncInferenceGymHTTP(server.url, retry_s=60.0) as client:
            return (await client.reset(seed=6)).timestep

    def first_socket() -> int:
        with InferenceGymEnv(base_url=server.url, **PATIENT).sync() as client:
            return int(client.reset(seed=6).observation.timestep)

    with (
        running_server(tmp_path) as server,
        InferenceGymHTTP(server.url) as http,
        InferenceGymEnv(base_url=server.url, **PATIENT).sync() as socket,
        closing(HTTPVectorEnv(server.url, 2, 1)) as batch,
        ThreadPoolExecutor(5) as threads,
    ):
        http.reset(seed=6)
        socket.reset(seed=6)
        batch.reset(seed=6)
        batch.step(row)
        server.kill()
        calls = (
            lambda: http.step(ACTION)[0].timestep,
            lambda: socket.step(ACTION).observation.timestep,
            lambda: len(batch.step(row)[1]),
            lambda: asyncio.run(first_reset()),
            first_socket,
        )
        answers = [threads.submit(call) for call in calls]
        time.sleep(RESTART_S)
        assert not any(answer.done() for answer in answers)
        server.start()
        assert [answer.result() for answer in answers] == [1, 1, 2, 0, 0]


def test_every_client_outwaits_the_restart_of_its_servers_redis(tmp_path: Path) -> None:
    redis = RedisServer(tmp_path)
    redis.start()
    try:
        with (
            running_server(tmp_path, store_url=redis.url, store_timeout_s="0.5") as server,
            InferenceGymHTTP(server.url) as http,
            InferenceGymEnv(base_url=server.url, **PATIENT).sync() as socket,
        ):
            http.reset(seed=6)
            socket.reset(seed=6)
            for number, client in enumerate([http, socket, socket, http]):
                redis.kill()
                timer = threading.Timer(1.5, redis.start)
                timer.start()
                if number == 2:
                    socket.reset(seed=6)
                else:
                    client.step(ACTION)
                timer.join()
            assert http.state()["step_count"] == 2
            assert socket.state().step_count == 0
            redis.kill()
            socket.async_client.retry_s = 0.1
            with pytest.raises(StoreError, match=r"over 0\.1 s"):
                socket.step(ACTION)
    finally:
        redis.kill()


def test_a_proxy_whose_server_stays_down_is_told_from_a_server_of_another_kind() -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(502, text="<html>"))
    with (
        InferenceGymHTTP("http://somewhere", transport=transport, retry_s=0.2) as client,
        pytest.raises(ServerUnavailableError, match=r"over 0\.2 s.*HTTP 502.*resume\(session_id\)"),
    ):
        client.reset()


def test_an_action_of_openenv_is_played_over_http_too(client: InferenceGymHTTP) -> None:
    local = InferenceEnv()
    client.reset(seed=3)
    local.reset(seed=3)
    assert client.step(InferenceGymAction(batch_size=96)) == local.step({"batch_size": 96})


def test_a_program_that_ends_with_an_open_environment_prints_nothing(server: RunningServer) -> None:
    made = f"env = HTTPVectorEnv({server.url!r}, 2); env.reset(seed=0)"
    program = f"from inferencegym.gym import HTTPVectorEnv; {made}; env.again = env"  # as wrappers and trainers refer
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert ended.stderr == ""


def test_a_client_id_is_sent_by_every_client(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers.get("x-client-id"))
        return httpx.Response(200, json={})

    transport = httpx.MockTransport(answer)
    for client_id in ("mine", None):
        monkeypatch.setenv("INFERENCEGYM_CLIENT_ID", "ours")
        InferenceGymHTTP("http://somewhere", client_id=client_id, transport=transport).get("/info")
        asyncio.run(AsyncInferenceGymHTTP("http://somewhere", client_id=client_id, transport=transport).get("/info"))
        with pytest.raises(KeyError):
            InferenceGymBatch("http://somewhere", client_id=client_id, transport=transport).reset()
    assert seen == ["mine"] * 3 + ["ours"] * 3
    with InferenceGymEnv(base_url=server.url, **PATIENT).sync() as socket:
        socket.reset(episode_id="an-episode-of-ours", task_id=3)
    with InferenceGymHTTP(server.url) as client:
        assert client.get("/state")["task_id"] == 3


def test_an_api_key_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_server(tmp_path, api_key="a-long-secret", store_url="memory://") as server:
        with InferenceGymHTTP(server.url, api_key="a-long-secret") as client:
            client.reset()
        with InferenceGymHTTP(server.url) as client, pytest.raises(UnauthorizedError, match="set INFERENCEGYM_API_KEY"):
            client.reset()
        with (
            pytest.raises(UnauthorizedError, match="set INFERENCEGYM_API_KEY"),
            InferenceGymEnv(base_url=server.url).sync(),
        ):
            pass
        monkeypatch.setenv("INFERENCEGYM_API_KEY", "a-long-secret,the-old-one")
        with InferenceGymHTTP(server.url) as client, InferenceGymEnv(base_url=server.url).sync() as env:
            assert client.reset().slo_violation_rate == env.reset().observation.slo_violation_rate == 0
        with InferenceGymHTTP(server.url, api_key="wrong") as client, pytest.raises(UnauthorizedError):
            client.reset()


def test_the_http_client_needs_neither_the_simulator_nor_openenv() -> None:
    program = (
        "import sys; from inferencegym.client import InferenceGymHTTP; "
        "heavy = ('numpy', 'gymnasium', 'openenv', 'simulator', 'env', 'server'); "
        "print([name for name in heavy if name in sys.modules])"
    )
    said = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"


def test_openenvs_client_needs_neither_the_simulator_nor_the_server() -> None:
    program = (
        "import sys; from inferencegym.client import InferenceGymEnv; "
        "print([n for n in ('simulator', 'env', 'server', 'grader', 'gradio', 'openai') if n in sys.modules])"
    )
    said = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"
