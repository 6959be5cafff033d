"""Many sessions at once on one server: all are answered, none are mixed up, and memory stays bounded."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from benchmarks.speed.load import Report, action, allow_many_connections, episode, load, memory_mb
from env.inference_env import InferenceEnv
from tests.servers import RunningServer, running_server

MOST_MB = 512
SOAK_S = 600


@pytest.fixture
def quiet_server(tmp_path: Path) -> Iterator[RunningServer]:
    allow_many_connections()
    with running_server(tmp_path, access_log="errors", concurrent_envs_per_client="64") as server:
        yield server


def expected_rewards(seed: int, steps: int) -> list[float]:
    env = InferenceEnv()
    env.reset(**episode(seed, steps))
    return [env.step(action(seed, step))[1] for step in range(1, steps + 1)]


def peak_mb(server: RunningServer) -> float:
    assert server.process is not None
    return memory_mb(server.process.pid)


def check(report: Report, sessions: int, sockets: int, steps: int) -> None:
    assert report.refused() == 0, report.statuses
    assert report.statuses == {"200": sessions * (steps + 2), "observation": sockets * (steps + 1)}
    played = list(report.rewards.items())
    for (_, seed), rewards in played[:: max(1, len(played) // 20)]:
        assert rewards == expected_rewards(seed, steps)


def test_hundreds_of_sessions_at_once_are_all_answered_with_their_own_episode(quiet_server: RunningServer) -> None:
    report = asyncio.run(load(quiet_server.url, sessions=200, steps=4, sockets=16, seconds=60))
    check(report, 200, 16, 4)
    assert peak_mb(quiet_server) < MOST_MB
    quiet_server.stop()


@pytest.mark.slow
def test_a_thousand_sessions_and_64_websockets_fit_into_512_mb(quiet_server: RunningServer) -> None:
    report = asyncio.run(load(quiet_server.url, sessions=1_000, steps=10, sockets=64, seconds=240))
    check(report, 1_000, 64, 10)
    assert peak_mb(quiet_server) < MOST_MB
    counted = quiet_server.client.get("/metrics").text
    assert "inferencegym_replays_total 0.0" in counted, "sessions in play were dropped from memory"
    quiet_server.stop()


@pytest.mark.soak
def test_ten_minutes_of_load_leak_nothing(quiet_server: RunningServer) -> None:
    assert quiet_server.process is not None
    pid = quiet_server.process.pid
    deadline = time.monotonic() + SOAK_S
    resident, files, requests, seed = [], [], 0, 0
    while time.monotonic() < deadline:
        report = asyncio.run(load(quiet_server.url, 150, 20, 16, seconds=120, first_seed=seed))
        check(report, 150, 16, 20)
        seed += 150
        requests += sum(report.statuses.values())
        time.sleep(1)
        assert httpx.get(f"{quiet_server.url}/health").status_code == 200
        resident.append(memory_mb(pid, "VmRSS"))
        files.append(len(list(Path(f"/proc/{pid}/fd").iterdir())))
    print(  # noqa: T201
        f"{requests:,} requests in {SOAK_S} s, none refused; memory {resident[0]:.0f} MB after the first round, "
        f"{resident[len(resident) // 2]:.0f} MB halfway, {resident[-1]:.0f} MB at the end; "
        f"open files at most {max(files)}"
    )
    assert max(resident) < MOST_MB
    # Memory is full of sessions by then; what grows after it is a leak.
    half = resident[len(resident) // 2 :]
    assert half[-1] - half[0] < 30
    assert files[-1] <= files[0] + 5
    quiet_server.stop()
