"""Servers that are killed, and several processes behind one address: no acknowledged step is lost or played twice."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from env.inference_env import InferenceEnv
from tests.redis_server import RedisServer
from tests.servers import RunningServer, free_port, running_server, until

QUICK_KILLS, MANY_KILLS = 2, 30
PLAYER_PATIENCE_S = 600
"""How long a player tries: on a busy machine a server may be killed many times before it handles a request."""
N_PLAYERS = 4


@pytest.fixture(params=["sqlite", "redis"])
def store_settings(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, str]]:
    if request.param == "sqlite":
        yield {}
        return
    redis = RedisServer(tmp_path)
    redis.start()
    yield {"store_url": redis.url}
    redis.kill()


def action(player: int, step: int) -> dict[str, Any]:
    rng = random.Random(1000 * player + step)
    return {"batch_size": rng.randint(1, 512), "kv_budget": rng.uniform(0.1, 1.0), "quant_tier": rng.randint(0, 2)}


class Player:
    """Plays one episode whatever happens to the server: sends a step again, with its number, until it is answered."""

    def __init__(self, url: str, player: int, length: int) -> None:
        self.player, self.length = player, length
        self.client = httpx.Client(base_url=url, timeout=10)
        self.rewards: list[float] = []
        self.retries = 0
        self.session_id = self._post("/reset", self.reset_body(player, length))["session_id"]

    @staticmethod
    def reset_body(player: int, length: int) -> dict[str, Any]:
        return {"task_id": 3, "seed": player, "config": {"episode_length": length}}

    def play(self, stop: threading.Event) -> None:
        while len(self.rewards) < self.length and not stop.is_set():
            number = len(self.rewards) + 1
            body = {"session_id": self.session_id, "action": action(self.player, number), "step": number}
            self.rewards.append(self._post("/step", body)["reward"])
            time.sleep(0.005)

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        deadline = time.monotonic() + PLAYER_PATIENCE_S
        while True:
            with contextlib.suppress(httpx.TransportError):
                answer = self.client.post(path, json=body)
                if answer.status_code == 200:
                    return dict(answer.json())
                assert answer.status_code == 503, answer.text
            assert time.monotonic() < deadline, "the server did not come back"
            self.retries += 1
            time.sleep(0.02)


def expected_rewards(player: int, length: int, steps: int) -> list[float]:
    """Results of an undisturbed episode in this process."""
    env = InferenceEnv()
    env.reset(**Player.reset_body(player, length))
    return [env.step(action(player, number))[1] for number in range(1, steps + 1)]


def kill_under_load(directory: Path, settings: dict[str, str], kills: int) -> tuple[int, int]:
    """Kill and restart a server while players play; returns the numbers of steps and of repeated requests."""
    length = 5000
    stop = threading.Event()
    rng = random.Random(kills)
    with running_server(directory, **settings) as server:
        players = [Player(server.url, player, length) for player in range(N_PLAYERS)]
        with contextlib.ExitStack() as clients, ThreadPoolExecutor(N_PLAYERS) as pool:
            for player in players:
                clients.callback(player.client.close)
            playing = [pool.submit(player.play, stop) for player in players]
            for _ in range(kills):
                time.sleep(rng.uniform(0.05, 0.4))
                server.kill()
                server.start()
            time.sleep(0.2)
            stop.set()
            for one in playing:
                one.result(timeout=PLAYER_PATIENCE_S)
        for player in players:
            taken = len(player.rewards)
            assert server.get("/state", session_id=player.session_id)["step_count"] == taken
            assert player.rewards == expected_rewards(player.player, length, taken)
            # every earlier answer can still be fetched
            for number in {1, taken // 2, taken}:
                body = {"session_id": player.session_id, "action": action(player.player, number), "step": number}
                assert server.post("/step", body)["reward"] == player.rewards[number - 1]
        server.stop()
    return sum(len(player.rewards) for player in players), sum(player.retries for player in players)


def test_workers_start_while_redis_is_away_and_serve_when_it_comes(tmp_path: Path) -> None:
    redis = RedisServer(tmp_path)
    settings = {"store_url": redis.url, "store_timeout_s": "0.5", "workers": "2"}
    with running_server(tmp_path, health=503, **settings) as server:
        assert server.client.post("/reset", json={"task_id": 1}).status_code == 503
        redis.start()
        try:
            wait_until_healthy(server)
            session = server.post("/reset", {"task_id": 1, "seed": 3})["session_id"]
            assert server.post("/step", {"session_id": session})["done"] is False
        finally:
            redis.kill()


@pytest.mark.slow
def test_a_server_killed_under_load_loses_no_acknowledged_step(tmp_path: Path, store_settings: dict[str, str]) -> None:
    steps, retries = kill_under_load(tmp_path, store_settings, QUICK_KILLS)
    assert steps > 0
    assert retries > 0, "the kills did not hit anybody"


@pytest.mark.soak
def test_thirty_kills_lose_no_acknowledged_step(tmp_path: Path, store_settings: dict[str, str]) -> None:
    steps, retries = kill_under_load(tmp_path, store_settings, MANY_KILLS)
    print(f"{MANY_KILLS} kills, {steps} steps acknowledged, {retries} requests sent again, none lost")  # noqa: T201
    assert retries >= MANY_KILLS


@pytest.mark.slow
def test_two_servers_on_one_store_play_one_episode(tmp_path: Path, store_settings: dict[str, str]) -> None:
    first, second = tmp_path / "one", tmp_path / "two"
    first.mkdir()
    second.mkdir()
    settings = {"store_url": f"sqlite://{tmp_path}/shared.db", **store_settings}
    with running_server(first, **settings) as one, running_server(second, **settings) as two:
        session_id = one.post("/reset", Player.reset_body(9, 60))["session_id"]
        rng = random.Random(2)
        servers = [rng.choice([one, two]) for _ in range(60)]
        rewards = [
            server.post("/step", {"session_id": session_id, "action": action(9, number)})["reward"]
            for number, server in enumerate(servers, 1)
        ]
        assert rewards == expected_rewards(9, 60, 60)
        scores = [server.post("/grader", {"session_id": session_id}) for server in (one, two)]
        assert scores[0] == scores[1]
        assert scores[0]["done"] is True


class Stepper:
    """Plays one episode on one server and keeps the acknowledged answers."""

    def __init__(self, server: RunningServer, player: int) -> None:
        self.server, self.player, self.length = server, player, 5000
        self.session_id = server.post("/reset", Player.reset_body(player, self.length))["session_id"]
        self.rewards: list[float] = []

    def step(self) -> None:
        number = len(self.rewards) + 1
        body = {"session_id": self.session_id, "action": action(self.player, number), "step": number}
        self.rewards.append(self.server.post("/step", body)["reward"])

    def step_for(self, duration_s: float) -> None:
        end = time.monotonic() + duration_s
        while time.monotonic() < end:
            self.step()
            time.sleep(0.01)

    def check(self, server: RunningServer) -> None:
        """The server knows every acknowledged step, and the episode continues undisturbed."""
        assert server.get("/state", session_id=self.session_id)["step_count"] == len(self.rewards)
        self.server = server
        self.step()
        assert self.rewards == expected_rewards(self.player, self.length, len(self.rewards))


@contextlib.contextmanager
def two_on_one_file(directory: Path) -> Iterator[tuple[RunningServer, RunningServer]]:
    settings = {"store_url": f"sqlite://{directory}/sessions.db"}
    homes = [directory / name for name in ("one", "two")]
    for home in homes:
        home.mkdir()
    with running_server(homes[0], **settings) as one, running_server(homes[1], **settings) as two:
        yield one, two


SEEN_AND_STORED_S = 2.5
"""Longer than it takes to notice that a file was replaced, and to store the sessions in memory again."""


def healthy(server: RunningServer) -> bool:
    return server.client.get("/health").status_code == 200


def wait_until_healthy(server: RunningServer) -> None:
    until(lambda: healthy(server))


def test_a_file_removed_under_two_servers_costs_no_acknowledged_step(tmp_path: Path) -> None:
    with two_on_one_file(tmp_path) as (one, two):
        playing, resting = [Stepper(one, 1), Stepper(two, 2)], [Stepper(one, 3), Stepper(two, 4)]
        for stepper in (*playing, *resting):
            stepper.step_for(0.1)
        for file in tmp_path.glob("sessions.db*"):
            file.unlink()
        begun = time.monotonic()
        while time.monotonic() - begun < SEEN_AND_STORED_S:
            for stepper in playing:
                stepper.step_for(0.05)
        for server in (one, two):
            wait_until_healthy(server)
        for server in (one, two):
            server.kill()
        one.start()
        for stepper in (*playing, *resting):
            stepper.check(one)


def test_a_server_goes_on_in_the_file_that_another_one_put_in_the_place_of_a_damaged_one(tmp_path: Path) -> None:
    with two_on_one_file(tmp_path) as (one, two):
        playing, resting = Stepper(two, 1), Stepper(two, 2)
        for stepper in (playing, resting):
            stepper.step_for(0.2)
        one.kill()
        damaged = tmp_path / "damaged"
        damaged.write_bytes(b"this is not a database at all" * 400)
        damaged.replace(tmp_path / "sessions.db")
        (tmp_path / "sessions.db-wal").unlink()
        one.start()
        (aside,) = tmp_path.glob("sessions.db.damaged-*-????")
        assert httpx.get(f"{one.url}/health").json()["store_damage"] == f"damaged and set aside: {aside.name}"
        begun_on_one = Stepper(one, 3)
        begun_on_one.step_for(0.1)
        playing.step_for(SEEN_AND_STORED_S)
        wait_until_healthy(two)
        two.kill()
        for stepper in (playing, resting):
            stepper.check(one)
        two.start()
        begun_on_one.check(two)


def test_a_server_without_a_store_for_its_sessions_is_not_ready_and_loses_nothing(tmp_path: Path) -> None:
    with running_server(tmp_path, store_url=f"sqlite://{tmp_path}/sessions.db") as server:
        stepper = Stepper(server, 5)
        stepper.step_for(0.1)
        for file in tmp_path.glob("sessions.db*"):
            file.unlink()
        (tmp_path / "sessions.db").mkdir()
        answer = server.client.get("/health")
        assert (answer.status_code, answer.json()["status"]) == (503, "degraded")
        assert "cannot be used now" in answer.json()["store_error"]
        refused = server.client.post("/step", json={"session_id": stepper.session_id})
        assert refused.status_code == 503
        (tmp_path / "sessions.db").rmdir()
        wait_until_healthy(server)
        server.kill()
        server.start()
        stepper.check(server)


def test_a_second_port_serves_the_same_sessions(tmp_path: Path) -> None:
    port = free_port()
    with running_server(tmp_path, also_port=str(port)) as server:
        session_id = server.post("/reset")["session_id"]
        other = httpx.post(f"http://127.0.0.1:{port}/step", json={"session_id": session_id})
        assert other.status_code == 200
        assert server.get("/state", session_id=session_id)["step_count"] == 1


def test_a_request_in_flight_is_answered_before_the_server_stops(tmp_path: Path) -> None:
    with running_server(tmp_path) as server, ThreadPoolExecutor(1) as pool:
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as begun:
            body = b'{"seed": 5}'
            head = "POST /reset HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 11\r\n\r\n"
            begun.sendall(head.encode() + body[:4])
            assert server.get("/health")["status"] == "healthy"  # so the first bytes have been read
            stopping = pool.submit(server.stop)
            deadline = time.monotonic() + 30
            while "Shutting down" not in server.log.read_text():
                assert time.monotonic() < deadline
                time.sleep(0.02)
            begun.sendall(body[4:])
            with begun.makefile("rb") as stream:
                answer = stream.read().decode()  # the server closes the connection after it
            assert answer.startswith("HTTP/1.1 200 ")
            assert '"seed":5' in answer
        stopping.result(timeout=20)
