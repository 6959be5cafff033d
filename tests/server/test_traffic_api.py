"""The traffic controller over a real socket: its document's session, isolated clients, recovery and grading."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from env.traffic.env import TrafficEnv
from env.traffic.tasks import list_traffic_tasks
from inferencegym.traffic import ACTION_NAMES
from tests.programs import program
from tests.servers import RunningServer, running_server

PLAN = ["allow_all", "throttle_70", "throttle_40", "drop_aggressive", "throttle_40"]


def client_of(server: RunningServer) -> httpx.Client:
    """A client as any HTTP library makes one: it keeps cookies, and knows nothing of sessions."""
    return httpx.Client(base_url=f"{server.url}/traffic", timeout=30)


def expected(task_id: str, actions: list[str], **config: float) -> TrafficEnv:
    """The same episode played in this process."""
    env = TrafficEnv(task_id, config=config)
    env.reset()
    for action in actions:
        env.step(action)
    return env


def played(client: httpx.Client, actions: list[str], **extra: Any) -> list[dict[str, Any]]:
    answers = []
    for action in actions:
        answer = client.post("/step", json={"action": action, **extra})
        assert answer.status_code == 200, answer.text
        answers.append(answer.json())
    return answers


@pytest.fixture(scope="module")
def traffic_at_root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("traffic"), env="traffic") as running:
        yield running


# ---------------------------------------------------------------- the document


def curl(url: str, body: Any = None) -> tuple[int, Any]:
    """Requests as in the document: no session id, no cookie, a new connection for every request."""
    command = [program("curl"), "-sS", "-w", "\n%{http_code}", url]
    if body is not None:
        command += ["-X", "POST", "-H", "Content-Type: application/json", "-d", json.dumps(body)]
    text, status = subprocess.run(command, capture_output=True, text=True, check=True).stdout.rsplit("\n", 1)
    return int(status), json.loads(text)


def check_document_session(base: str) -> None:
    status, listed = curl(f"{base}/tasks")
    assert status == 200
    assert [(t["id"], t["episode_length"], t["difficulty"]) for t in listed["tasks"]][:3] == [
        ("task_easy", 30, "easy"),
        ("task_medium", 40, "medium"),
        ("task_hard", 50, "hard"),
    ]
    assert listed["tasks"][0]["description"].startswith("Single traffic spike")

    status, begun = curl(
        f"{base}/reset", {"task_id": "task_easy", "config": {"server_capacity": 100.0, "crash_load_ratio": 1.3}}
    )
    first = {
        "cpu_usage": 0.54,
        "memory_usage": 0.36,
        "request_rate": 40.0,
        "queue_length": 0,
        "avg_latency": 58.0,
        "step": 0,
        "crashed": False,
    }
    assert (status, begun["state"], begun["task_id"], begun["max_steps"]) == (200, first, "task_easy", 30)
    assert begun["config"] == {
        "server_capacity": 100.0,
        "base_latency": 50.0,
        "crash_load_ratio": 1.3,
        "max_queue": 500,
        "traffic_scale": 1.0,
    }

    status, answer = curl(f"{base}/step", {"action": "throttle_70"})
    assert (status, set(answer)) == (200, {"state", "reward", "done", "info"})
    assert set(answer["state"]) == set(first)
    assert answer["info"] == {
        "incoming_requests": 40.0,
        "allowed_requests": 28.0,
        "accept_rate": 0.7,
        "crashed": False,
        "episode_step": 1,
        "max_steps": 30,
        "server_capacity": 100.0,
    }
    status, seen = curl(f"{base}/state")
    assert status == 200
    assert answer["state"].items() <= seen.items()

    for _ in range(28):
        _, answer = curl(f"{base}/step", {"action": "throttle_40"})
        assert answer["done"] is False
        assert not {"final_score", "episode_done"} & set(answer["info"])
    _, last = curl(f"{base}/step", {"action": "throttle_40"})
    assert (last["done"], last["info"]["final_score"], last["info"]["episode_done"]) == (True, 1.0, True)
    status, refused = curl(f"{base}/step", {"action": "throttle_40"})
    assert (status, refused["detail"]["code"]) == (400, "episode_done")

    status, refused = curl(f"{base}/reset", {"task_id": "task_imaginary"})
    assert status == 400
    assert all(task_id in refused["detail"]["message"] for task_id in ("task_easy", "task_medium", "task_hard"))


def test_the_documents_session_works_word_for_word(server: RunningServer) -> None:
    assert curl(f"{server.url}/traffic/health") == (200, {"status": "ok"})
    check_document_session(f"{server.url}/traffic")


def test_the_documents_session_works_at_the_root_by_setting(traffic_at_root: RunningServer) -> None:
    check_document_session(traffic_at_root.url)


def test_at_the_root_by_setting_both_environments_keep_their_own_prefix(traffic_at_root: RunningServer) -> None:
    assert traffic_at_root.get("/health")["status"] == "healthy"
    assert traffic_at_root.get("/traffic/health") == {"status": "ok"}
    begun = traffic_at_root.post("/serving/reset", {"task_id": 1})
    stepped = traffic_at_root.post("/serving/step", {"session_id": begun["session_id"], "action": {}})
    assert stepped["info"]["timestep"] == 1


@pytest.mark.parametrize("body", [None, {}, {"task_id": None, "config": None, "seed": None}])
def test_a_reset_without_arguments_starts_the_easy_task(server: RunningServer, body: Any) -> None:
    begun = server.post("/traffic/reset", body)
    assert (begun["task_id"], begun["max_steps"], begun["seed"]) == ("task_easy", 30, 42)


def test_the_manifest_is_plain_text_and_its_reward_range_holds(server: RunningServer) -> None:
    answer = server.client.get("/traffic/openenv.yaml")
    assert answer.headers["content-type"].startswith("text/plain")
    manifest = yaml.safe_load(answer.text)
    low, high = manifest["validation"]["reward"]["range"]
    assert manifest["validation"]["capabilities"]["declared_task_count"]["train"] == len(list_traffic_tasks())
    for task in list_traffic_tasks():
        for action in ACTION_NAMES:
            env = TrafficEnv(task.task_id)
            env.reset()
            while not env.done:
                assert low <= env.step(action)[1] <= high


# ---------------------------------------------------------------- several clients, no session ids


def test_interleaved_clients_without_session_ids_play_their_own_episodes(server: RunningServer) -> None:
    tasks = ["task_easy", "task_medium", "task_hard", "task_easy"]
    capacities = [100.0, 120.0, 140.0, 250.0]
    clients = [client_of(server) for _ in tasks]
    for client, task_id, capacity in zip(clients, tasks, capacities, strict=True):
        client.post("/reset", json={"task_id": task_id, "config": {"server_capacity": capacity}}).raise_for_status()
    for n in range(10):  # the first spike would crash those who let everything through
        for i, (client, task_id, capacity) in enumerate(zip(clients, tasks, capacities, strict=True)):
            plan = [PLAN[(i + k) % len(PLAN)] for k in range(n + 1)]
            state = played(client, plan[-1:])[0]["state"]
            env = expected(task_id, plan, server_capacity=capacity)
            assert state == env.observation_dict()
            seen = client.get("/state").json()
            assert {k: v for k, v in env.state().items() if k != "session_id"} == seen
    for client in clients:
        client.close()


def test_clients_without_cookies_are_told_apart_by_the_id_they_send(server: RunningServer) -> None:
    def call(name: str, path: str, body: Any) -> dict[str, Any]:
        headers = {"X-Client-Id": name}
        return dict(httpx.post(f"{server.url}/traffic{path}", json=body, headers=headers).raise_for_status().json())

    call("one", "/reset", {"task_id": "task_easy"})
    call("two", "/reset", {"task_id": "task_hard"})
    assert call("one", "/step", {"action": "throttle_70"})["info"]["max_steps"] == 30
    assert call("two", "/step", {"action": "throttle_70"})["info"]["max_steps"] == 50


def test_a_named_session_is_meant_whatever_was_reset_last(server: RunningServer) -> None:
    with client_of(server) as client:
        first = client.post("/reset", json={"task_id": "task_easy"}).json()["session_id"]
        second = client.post("/reset", json={"task_id": "task_hard"}).json()["session_id"]
        assert first != second
        assert played(client, ["throttle_40"], session_id=first)[0]["info"]["max_steps"] == 30
        assert played(client, ["throttle_40"])[0]["info"]["max_steps"] == 50
        assert client.get("/state", params={"session_id": first}).json()["task_id"] == "task_easy"
        again = client.post("/reset", json={"task_id": "task_medium", "session_id": first}).json()
        assert (again["session_id"], again["max_steps"]) == (first, 40)


def test_a_client_that_never_reset_is_told_to(server: RunningServer) -> None:
    answer = httpx.post(
        f"{server.url}/traffic/step", json={"action": "allow_all"}, headers={"X-Client-Id": "never seen"}
    )
    assert (answer.status_code, answer.json()["detail"]["code"]) == (404, "unknown_session")
    assert "reset" in answer.json()["detail"]["next"]


# ---------------------------------------------------------------- a user's own tasks


OWN_TASK = {
    "name": "Mine",
    "episode_length": 3,
    "pattern": {"base_rps": 25},
    "grade": {"kind": "mean_latency_limit", "limit_ms": 100, "score_above_limit": 0.5},
}


def test_a_task_of_a_users_file_is_listed_and_played(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"tasks": {"task_mine": OWN_TASK}}), encoding="utf-8")
    with running_server(tmp_path, traffic_tasks=str(path)) as server, client_of(server) as client:
        assert [t["id"] for t in server.get("/traffic/tasks")["tasks"]][-1] == "task_mine"
        begun = client.post("/reset", json={"task_id": "task_mine"}).json()
        assert (begun["state"]["request_rate"], begun["max_steps"]) == (25.0, 3)
        assert played(client, ["allow_all"] * 3)[-1]["info"]["final_score"] == 1.0


# ---------------------------------------------------------------- bad requests

TASK_IDS = ("task_easy", "task_medium", "task_hard")
ACTIONS = ("allow_all", "throttle_70", "throttle_40", "drop_aggressive")


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "field", "shown"),
    [
        ("/reset", {"task_id": 7}, 400, "unknown_task", None, TASK_IDS),
        ("/reset", {"task_id": ""}, 400, "unknown_task", None, TASK_IDS),
        (
            "/reset",
            {"config": {"server_capacity": 0}},
            422,
            "invalid_config",
            "config.server_capacity",
            ("=0 ", "1 to"),
        ),
        ("/reset", {"config": {"max_queue": 1.5}}, 422, "invalid_config", "config.max_queue", ("=1.5 ",)),
        (
            "/reset",
            {"config": {"colour": 1}},
            422,
            "invalid_config",
            "config.colour",
            ("server_capacity, base_latency",),
        ),
        ("/reset", {"config": []}, 422, "invalid_request", "config", ()),
        ("/reset", {"colour": 1}, 422, "invalid_request", "colour", ()),
        ("/reset", {"session_id": "nobody-knows-it"}, 404, "unknown_session", None, ("nobody-knows-it",)),
        ("/step", {}, 422, "invalid_action", "action", ACTIONS),
        ("/step", {"action": "panic"}, 422, "invalid_action", "action", ACTIONS),
        ("/step", {"action": 0}, 422, "invalid_action", "action", ACTIONS),
        ("/step", {"action": "allow_all", "colour": 1}, 422, "invalid_request", "colour", ()),
        ("/step", {"action": "allow_all", "step": 0}, 422, "invalid_request", "step", ("=0 ",)),
        ("/step", {"action": "allow_all", "session_id": ""}, 422, "invalid_request", "session_id", ()),
    ],
)
def test_a_bad_request_is_refused_with_what_is_allowed_and_the_episode_goes_on(
    server: RunningServer, path: str, body: Any, status: int, code: str, field: str | None, shown: tuple[str, ...]
) -> None:
    with client_of(server) as client:
        client.post("/reset", json={}).raise_for_status()
        played(client, ["throttle_70"])
        before = client.get("/state").json()
        answer = client.post(path, json=body)
        detail = answer.json()["detail"]
        assert (answer.status_code, detail["code"], detail.get("field")) == (status, code, field)
        assert all(text in detail["message"] for text in shown), detail
        assert client.get("/state").json() == before


@pytest.mark.parametrize(
    ("cookie", "status"),
    [("inferencegym_traffic=gone", 404), ("other=1", 200), ("=;; {", 200), ("inferencegym_traffic=", 200)],
)
def test_only_a_cookie_of_its_own_decides_whose_episode_is_meant(
    server: RunningServer, cookie: str, status: int
) -> None:
    httpx.post(f"{server.url}/traffic/reset", headers={"X-Client-Id": cookie}).raise_for_status()
    headers = {"Cookie": cookie, "X-Client-Id": cookie}
    answer = httpx.post(f"{server.url}/traffic/step", json={"action": "allow_all"}, headers=headers)
    assert answer.status_code == status


def test_the_cookie_is_read_beside_malformed_ones(server: RunningServer) -> None:
    session_id = server.post("/traffic/reset", {"task_id": "task_hard"})["session_id"]
    headers = {"Cookie": f'odd={{"a": [1]}}; inferencegym_traffic={session_id}', "X-Client-Id": "nobody"}
    assert httpx.get(f"{server.url}/traffic/state", headers=headers).json()["task_id"] == "task_hard"


# ---------------------------------------------------------------- grading


def test_without_a_session_the_callers_latest_episode_is_graded(server: RunningServer) -> None:
    with client_of(server) as client, client_of(server) as other:
        client.post("/reset", json={"task_id": "task_hard"})
        other.post("/reset", json={"task_id": "task_easy"})
        last = played(client, ["throttle_40"] * 50)[-1]
        graded = client.post("/grader", json={}).json()
        assert (graded["score"], graded["steps"]) == (last["info"]["final_score"], 50)
        assert other.post("/grader", json={"task_id": "task_hard"}).status_code == 409
        refused = client.post("/grader", json={"config": {"server_capacity": -1}})
        assert (refused.status_code, refused.json()["detail"]["field"]) == (422, "config.server_capacity")


def test_answers_of_step_are_a_log_that_can_be_graded_and_verified(server: RunningServer) -> None:
    with client_of(server) as client:
        begun = client.post("/reset", json={"task_id": "task_medium", "config": {"server_capacity": 90}}).json()
        answers = played(client, ["throttle_40", "throttle_70"] * 20)
        request = {
            "task_id": "task_medium",
            "episode_log": answers,
            "seed": begun["seed"],
            "config": begun["config"],
            "verify": True,
        }
        graded = client.post("/grader", json=request).json()
        assert (graded["score"], graded["verified"]) == (answers[-1]["info"]["final_score"], True)

        answers[3]["state"]["avg_latency"] -= 1.0
        forged = client.post("/grader", json=request)
    detail = forged.json()["detail"]
    assert (detail["code"], detail["step"], detail["field"]) == ("forged_log", 3, "metrics.avg_latency")


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"task_id": "task_easy", "episode_log": [1]}, 422, "malformed_log"),
        ({"task_id": "task_nope", "episode_log": []}, 400, "unknown_task"),
        ({"session_id": "nobody-knows-it"}, 404, "unknown_session"),
        ({"task_id": "task_easy", "episode_log": [], "config": {"delta": 0}}, 422, "invalid_config"),
        ({"task_id": "task_easy", "episode_log": [{"state": {}, "info": {"accept_rate": 0.5}}]}, 422, "malformed_log"),
    ],
)
def test_a_log_that_cannot_be_graded_is_refused(server: RunningServer, body: Any, status: int, code: str) -> None:
    answer = server.client.post("/traffic/grader", json=body)
    assert (answer.status_code, answer.json()["detail"]["code"]) == (status, code)


def validated(url: str) -> dict[str, str]:
    """Verdict of every criterion of ``openenv validate --url``."""
    printed = subprocess.run(
        [Path(sys.executable).with_name("openenv"), "validate", "--url", url],
        capture_output=True,
        text=True,
        check=False,
    )
    return dict(reversed(found) for found in re.findall(r"(PASS|FAIL)\s+(\w+)", printed.stdout))


def test_openenvs_validator_objects_to_nothing_but_the_documents_word_for_health(server: RunningServer) -> None:
    verdicts = validated(f"{server.url}/traffic")
    assert len(verdicts) == 6
    assert [name for name, verdict in verdicts.items() if verdict == "FAIL"] == ["health_endpoint"]


def test_openenvs_validator_passes_the_controller_at_the_root(traffic_at_root: RunningServer) -> None:
    assert set(validated(traffic_at_root.url).values()) == {"PASS"}
