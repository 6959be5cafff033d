"""Long work: a client pays for its processor time, and long logs are graded in another process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from env.families import FAMILIES
from env.inference_env import InferenceEnv
from inferencegym.errors import InferenceGymError
from ops.worker import error_parts
from server.api.grading import grade_log, respond
from server.app import create_app
from server.net.cpu import CpuBudget, Work
from server.net.jobs import Elsewhere
from server.net.json_io import SMALL_LOG_BYTES
from server.schemas import GradeAnswer, grade_request, read_request
from server.settings import Settings
from tests.servers import RunningServer, running_server, until

WORK_S = 10.0
"""Processor time that a piece of work takes by the clock of these tests."""
SETTINGS = Settings(store_url="memory://", access_log="off", trusted_proxies="127.0.0.1", cpu_seconds_per_minute=30)
FEW = {"n": 2, "config": {"episode_length": 10}}
LONG = {"task_id": 1, "seed": 3, "config": {"episode_length": 400}}


class Clock:
    """Time of day and processor time that pass only as a test lets them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1_000.0
        self.cpu_s = 0.0
        monkeypatch.setattr("server.net.limits.time.monotonic", lambda: self.now_s)
        monkeypatch.setattr("server.net.cpu.time.thread_time", self.thread_time)
        answer = Elsewhere.answer

        async def in_work_s(elsewhere: Elsewhere, what: str, body: bytes, work: Work) -> bytes:
            text = await answer(elsewhere, what, body, work)
            work.cpu_s = WORK_S
            return text

        monkeypatch.setattr(Elsewhere, "answer", in_work_s)

    def thread_time(self) -> float:
        self.cpu_s += WORK_S
        return self.cpu_s


@pytest.fixture
def client() -> Iterator[TestClient]:
    with TestClient(create_app(SETTINGS), client=("127.0.0.1", 1)) as client:
        yield client


def sent_by(address: str) -> dict[str, str]:
    return {"X-Forwarded-For": address}


def test_a_client_that_has_used_up_its_time_waits_until_it_has_some_again(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)

    def reset(address: str = "192.0.2.1") -> Any:
        return client.post("/reset/batch", json={**FEW, "session_id": session}, headers=sent_by(address))

    session = None
    # Making the session and starting its episodes are two pieces of work.
    session = reset().json()["session_id"]
    assert [reset().status_code for _ in range(2)] == [200, 200]
    refused = reset()
    assert (refused.status_code, refused.json()["detail"]["code"]) == (429, "rate_limited")
    assert "at most 30 s of processor time a minute" in refused.json()["detail"]["message"]
    assert refused.headers["retry-after"] == "20"  # 10 s are owed, and 30 s a minute come back
    assert reset("192.0.2.2").status_code == 200, "another client"
    clock.now_s += 19
    assert reset().status_code == 429
    clock.now_s += 1
    assert reset().status_code == 200


def test_plays_and_grades_are_refused_to_a_client_without_time_and_steps_are_not(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    Clock(monkeypatch)
    session = client.post("/reset").json()["session_id"]
    step = client.post("/step", json={"session_id": session}).json()
    log = {"task_id": 1, "episode_log": [step]}

    def begin(path: str, body: dict[str, Any], address: str) -> int:
        return client.post(path, json=body, headers=sent_by(address)).status_code

    for path, body, address in (
        ("/play", {"agent": "naive"}, "192.0.2.1"),
        ("/grader", {"session_id": session}, "192.0.2.2"),
        ("/grader", log, "192.0.2.3"),
    ):
        assert [begin(path, body, address) for _ in range(5)] == [*[200] * 4, 429]
        assert begin("/step", {"session_id": session}, address) == 200


@pytest.mark.parametrize("prefix", ["", "/rollouts"])
def test_old_steps_are_refused_to_a_client_without_time_and_new_steps_are_not(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, prefix: str
) -> None:
    Clock(monkeypatch)
    session = client.post(f"{prefix}/reset", json={"seed": 3}).json()["session_id"]
    action = {"max_sessions": 8} if prefix else {"batch_size": 64}

    def step(number: int, address: str = "192.0.2.1") -> Any:
        body = {"session_id": session, "step": number, "action": action}
        return client.post(f"{prefix}/step", json=body, headers=sent_by(address))

    answers = [step(number).json() for number in range(1, 61)]
    assert [step(51).json() for _ in range(4)] == [answers[50]] * 4
    assert step(52).status_code == 429
    assert step(50).json() == answers[49], "a short replay is not charged"
    assert step(60).json() == answers[59], "nor is the last step"
    assert step(61).status_code == 200
    assert step(52, "192.0.2.2").json() == answers[51], "another client"
    assert step(52).status_code == 429


def test_a_websocket_pays_with_the_time_of_its_client(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch)
    with client.websocket_connect("/ws", headers=sent_by("192.0.2.1")) as socket:

        def ask(kind: str, data: dict[str, Any]) -> dict[str, Any]:
            socket.send_json({"type": kind, "data": data})
            return dict(socket.receive_json())

        ask("reset", {**LONG, "info": True})
        answers = [ask("step", {}) for _ in range(60)]
        for _ in range(4):
            assert ask("step", {"metadata": {"step": 51}}) == answers[50]
        refused = ask("step", {"metadata": {"step": 51}})
        assert "rate_limited" in refused["data"]["message"]
        assert ask("step", {"metadata": {"step": 60}}) == answers[59]


def test_work_of_one_client_takes_turns_and_that_of_two_does_not() -> None:
    budget = CpuBudget(30)
    running: list[str] = []
    most: dict[str, int] = {}

    async def work(address: str) -> None:
        async with budget.work_for({"client": (address, 1), "headers": []}):
            running.append(address)
            most[address] = max(most.get(address, 0), running.count(address))
            most["all"] = max(most.get("all", 0), len(running))
            for _ in range(3):
                await asyncio.sleep(0)
            running.remove(address)

    async def together() -> None:
        await asyncio.gather(*(work(address) for address in ("192.0.2.1", "192.0.2.2") * 3))

    asyncio.run(together())
    assert most == {"192.0.2.1": 1, "192.0.2.2": 1, "all": 2}


def test_no_limit_counts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch)
    with TestClient(create_app(SETTINGS.model_copy(update={"cpu_seconds_per_minute": 0}))) as client:
        assert {client.post("/reset/batch", json=FEW).status_code for _ in range(6)} == {200}


def test_one_client_cannot_take_all_batch_sessions() -> None:
    few = {"batch_sessions": 4, "batch_row_steps": 8_000}
    with TestClient(create_app(SETTINGS.model_copy(update=few)), client=("127.0.0.1", 1)) as client:

        def reset(address: str, n: int) -> int:
            body = {"n": n, "config": {"episode_length": 10}}
            return client.post("/reset/batch", json=body, headers=sent_by(address)).status_code

        assert reset("192.0.2.1", 601) == 422, "more than three quarters of the row steps"
        assert [reset("192.0.2.1", n) for n in (599, 2, 1)] == [200, 429, 200]
        assert reset("192.0.2.2", 200) == 200
        assert [reset("192.0.2.3", 1) for _ in range(2)] == [429, 429], "all row steps are taken"


# ---------------------------------------------------------------- the process that grades


@pytest.fixture(scope="module")
def log() -> list[dict[str, Any]]:
    env = InferenceEnv()
    env.reset(seed=3, task_id=3, config={"episode_length": 100})
    for _ in range(100):
        env.step({"batch_size": 64})
    return [dict(entry) for entry in env.episode_log]


def body_of(log: list[dict[str, Any]], **more: Any) -> bytes:
    body = json.dumps(
        {"task_id": 3, "episode_log": log, "seed": 3, "config": {"episode_length": 100}, "verify": True, **more}
    ).encode()
    assert len(body) > SMALL_LOG_BYTES
    return body


def test_a_long_log_is_graded_in_another_process_with_the_same_answer(
    client: TestClient, log: list[dict[str, Any]]
) -> None:
    forged = [*log[:-1], {**log[-1], "reward": 9.0}]
    for body in (body_of(log), body_of(log, verify=False), body_of(forged), body_of(log, seed="x"), body_of(log)[1:]):
        answer = client.post("/grader", content=body)
        try:
            wanted = read_request(grade_request(FAMILIES["serving"]), json.loads(body))
            expected: dict[str, Any] = GradeAnswer(**grade_log(FAMILIES["serving"], wanted)).model_dump(
                exclude_unset=True
            )
            assert (answer.status_code, answer.json()) == (200, expected)
        except json.JSONDecodeError:
            assert answer.json()["detail"]["code"] == "invalid_json"
        except InferenceGymError as error:
            parts = error_parts(error)
            assert answer.status_code == parts.pop("http_status")
            assert {name: answer.json()["detail"][name] for name in parts} == parts


def test_a_long_body_without_a_log_is_refused() -> None:
    status, answer = respond("grade", FAMILIES["serving"], b'{"session_id": "x"' + b" " * SMALL_LOG_BYTES + b"}")
    assert (status, json.loads(answer)["code"]) == (1, "invalid_request")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    with running_server(tmp_path) as server:
        yield server


def graders_of(server: RunningServer) -> list[int]:
    """Processes that grade for a server."""
    assert server.process is not None
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            command = (entry / "cmdline").read_bytes()
            if entry.name.isdigit() and command.endswith(b"\0server.api.grading\0%d\0" % server.process.pid):
                found.append(int(entry.name))
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")
def test_one_process_grades_until_it_ends_and_it_ends_with_the_server(
    server: RunningServer, log: list[dict[str, Any]]
) -> None:
    def grade() -> int:
        return server.client.post("/grader", content=body_of(log)).status_code

    assert graders_of(server) == []
    assert [grade(), grade()] == [200, 200]
    (first,) = graders_of(server)
    os.kill(first, signal.SIGKILL)
    until(lambda: not graders_of(server))
    # The server may not have noticed yet.
    deadline = time.monotonic() + 60
    while grade() != 200:
        assert time.monotonic() < deadline
    (second,) = graders_of(server)
    assert second != first
    server.kill()
    until(lambda: not graders_of(server))
