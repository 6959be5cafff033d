"""A third environment family needs one folder and a line in each registry; everything else follows from its record."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env
from starlette.testclient import TestClient

from agents.families import PLAYERS, Players
from cli.main import main
from env.episode_files import saved
from env.families import FAMILIES
from env.gym import register_envs
from server.api.openapi import inlined_paths
from server.app import create_app
from server.settings import Settings
from tests.plugin.night_shift.thermostat import FAMILY, POLICIES, make_policy

NIGHT = {"task_id": "frosty-night", "seed": 7, "config": {"episode_length": 6}}
LEVELS = [2, 1, 0, 3, 1, 1]


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, FAMILY.name, FAMILY)
    monkeypatch.setitem(PLAYERS, FAMILY.name, Players(lambda: POLICIES, make_policy))


@pytest.fixture
def client() -> Iterator[TestClient]:
    with TestClient(create_app(Settings(store_url="memory://", access_log="off"))) as running:
        yield running


def played(client: TestClient) -> tuple[str, list[dict[str, Any]]]:
    session_id = client.post("/thermostat/reset", json=NIGHT).json()["session_id"]
    answers = []
    for level in LEVELS:
        answer = client.post("/thermostat/step", json={"session_id": session_id, "action": {"level": level}})
        assert answer.status_code == 200, answer.text
        answers.append(answer.json())
    return session_id, answers


def test_it_is_played_over_http_with_strict_messages(client: TestClient) -> None:
    session_id, answers = played(client)
    assert [answer["done"] for answer in answers] == [False] * 5 + [True]
    assert client.get("/thermostat/state", params={"session_id": session_id}).json()["step_count"] == 6
    assert client.get("/thermostat/tasks").json()["tasks"][0] == {"id": "frosty-night", "outside_c": -10.0}
    wrong = client.post("/thermostat/step", json={"session_id": session_id, "action": {"leval": 1}})
    assert wrong.status_code == 422
    assert "did you mean level?" in wrong.json()["detail"]["message"]
    document = client.get("/thermostat/openapi.json").json()
    assert "level" in json.dumps(inlined_paths(document)["/step"])
    assert client.post("/step", json={"session_id": session_id}).status_code == 404, "another family's session"


def test_its_episodes_are_graded_and_verified_by_replay(client: TestClient) -> None:
    session_id, answers = played(client)
    graded = client.post("/thermostat/grader", json={"session_id": session_id}).json()
    assert [answer["info"].get("score") for answer in answers] == [None] * 5 + [graded["score"]]
    body = {**NIGHT, "episode_log": [entry_of(answer) for answer in answers], "verify": True}
    assert client.post("/thermostat/grader", json=body).json()["score"] == graded["score"] > 0
    body["episode_log"][3]["metrics"]["inside_c"] += 0.1
    forged = client.post("/thermostat/grader", json=body)
    assert (forged.status_code, forged.json()["detail"]["step"]) == (422, 3)


def entry_of(answer: dict[str, Any]) -> dict[str, Any]:
    info = answer["info"]
    entry = {"timestep": info["timestep"], "action": info["action_applied"], "metrics": info["metrics"]}
    return {**entry, "reward": answer["reward"]}


def test_its_policies_play_for_visitors(client: TestClient) -> None:
    names = [policy["name"] for policy in client.get("/thermostat/policies").json()["policies"]]
    scores = [client.post("/thermostat/play", json={"agent": name}).json()["score"] for name in names]
    assert names == ["off", "two_point"]
    assert scores[0] < scores[1]


def test_openenvs_protocol_serves_it(client: TestClient) -> None:
    splits = client.get("/thermostat/thermostat/splits").json()
    assert [split["name"] for split in splits] == ["train"]
    assert "inside_c" in json.dumps(client.get("/thermostat/schema").json()["observation"])
    _, answers = played(client)
    with client.websocket_connect("/thermostat/ws") as socket:
        socket.send_json({"type": "reset", "data": NIGHT})
        assert socket.receive_json()["data"]["observation"]["minute"] == 0
        for level, answer in zip(LEVELS, answers, strict=True):
            socket.send_json({"type": "step", "data": {"level": level}})
            frame = socket.receive_json()["data"]
            assert (frame["reward"], frame["done"]) == (answer["reward"], answer["done"])


def test_it_is_a_gymnasium_environment() -> None:
    register_envs()
    made = gymnasium.make("InferenceGym/FrostyNight-v1", config={"episode_length": 6})
    check_env(made.unwrapped, skip_render_check=True)
    made.reset(seed=7)
    rewards = [made.step(level)[1] for level in LEVELS]
    env = FAMILY.make()
    env.reset(**NIGHT)
    assert rewards == [env.step(FAMILY.parse_action({"level": level})[0])[1] for level in LEVELS]


def test_it_can_stand_at_the_root() -> None:
    with TestClient(create_app(Settings(env="thermostat", store_url="memory://", access_log="off"))) as client:
        assert client.post("/reset").json()["task_id"] == "frosty-night"
        assert client.post("/serving/reset").json()["task_id"] == 1
        assert client.get("/health").json()["status"] == "healthy"


def test_the_commands_evaluate_verify_and_rank_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "--task", "mild-night", "--seeds", "3"]) == 0
    assert "two_point" in capsys.readouterr().out
    env = FAMILY.make()
    env.reset(seed=3)
    while not env.done:
        env.step(FAMILY.parse_action({"level": 1})[0])
    log = tmp_path / "log.json"
    log.write_text(json.dumps(saved(env)))
    assert main(["verify", str(log)]) == 0
    board = tmp_path / "board.jsonl"
    assert main(["leaderboard", "add", str(board), "--play", "two_point", "--task", "mild-night", "--seeds", "2"]) == 0
    assert main(["leaderboard", "check", str(board), "--seeds", "2"]) == 0
    assert "two_point" in capsys.readouterr().out


def test_a_family_without_policies_is_served_without_their_endpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(PLAYERS, FAMILY.name)
    with TestClient(create_app(Settings(store_url="memory://", access_log="off"))) as client:
        assert client.get("/thermostat/policies").status_code == 404
        assert client.post("/thermostat/play", json={}).status_code == 404
        played(client)
