"""Policies that play for visitors: /policies and /play of both environments."""

from __future__ import annotations

import gzip
import json
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from starlette.testclient import TestClient

from agents.families import serving_policies
from agents.registry import AGENTS, RegisteredAgent
from env.families import FAMILIES
from env.traffic.agents import POLICIES as TRAFFIC_POLICIES
from inferencegym.tasks import list_tasks
from server.api.policies import played
from server.app import create_app
from server.settings import Settings
from tests.servers import RunningServer

TASKS = [task.task_id for task in list_tasks()]
FIRST_STEPS = 20


def rows(columns: dict[str, list[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


@pytest.mark.parametrize("task_id", TASKS)
def test_a_played_episode_is_what_its_actions_give_over_the_api(server: RunningServer, task_id: int) -> None:
    played = server.post("/play", {"task_id": task_id, "seed": 9, "agent": "heuristic"})
    begun = server.post("/reset", {"task_id": task_id, "seed": 9})
    seen, measured, actions = (rows(played[name]) for name in ("observation", "metrics", "action"))
    assert len(seen) == played["steps"] + 1 == begun["episode_length"] + 1
    assert seen[0] == begun["observation"]
    for step, action in enumerate(actions[:FIRST_STEPS]):
        answer = server.post("/step", {"session_id": begun["session_id"], "action": action})
        assert answer["observation"] == seen[step + 1]
        assert answer["info"]["metrics"] == measured[step]
        assert answer["reward"] == played["reward"][step]
        assert answer["info"]["workload"]["phase"] == played["phase"][step]


@pytest.mark.parametrize("agent", ["naive", "heuristic", "best_static", "best_adaptive"])
def test_the_log_of_a_played_episode_is_verified_with_the_same_score(server: RunningServer, agent: str) -> None:
    played = server.post("/play", {"task_id": 2, "seed": 3, "agent": agent, "log": True})
    body = {"task_id": 2, "seed": 3, "episode_log": played["episode_log"], "verify": True}
    grade = server.post("/grader", body)
    assert grade["verified"] is True
    assert (grade["score"], grade["breakdown"]) == (played["score"], played["breakdown"])


def test_an_episode_is_the_same_whenever_it_is_asked_for(server: RunningServer) -> None:
    body = {"task_id": 3, "seed": 1, "agent": "random"}
    first, again = (server.post("/play", body) for _ in range(2))
    assert first == again
    assert server.post("/play", {**body, "seed": 2})["observation"] != first["observation"]


def test_an_answer_is_compressed_only_for_those_who_read_that(server: RunningServer) -> None:
    body = {"agent": "naive"}
    with httpx.stream("POST", server.url + "/play", json=body, headers={"accept-encoding": "gzip"}) as answer:
        assert answer.headers["content-encoding"] == "gzip"
        packed = b"".join(answer.iter_raw())
    plain = httpx.post(server.url + "/play", json=body, headers={"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers
    assert json.loads(gzip.decompress(packed)) == plain.json()
    assert len(packed) < len(plain.content) / 2


def test_a_brief_episode_has_the_scores_and_actions_of_the_whole_one(server: RunningServer) -> None:
    body = {"task_id": 3, "seed": 4, "agent": "heuristic"}
    whole, brief = server.post("/play", body), server.post("/play", {**body, "brief": True})
    assert whole.keys() - brief.keys() == {"observation", "metrics", "reward", "arrivals"}
    assert brief == {name: whole[name] for name in brief}
    assert len(brief["score_so_far"]) == brief["steps"]


def test_actions_come_before_those_of_the_policy(server: RunningServer) -> None:
    body = {"task_id": "rollout-batch", "seed": 42, "agent": "fit", "brief": True}
    alone, after = (server.post("/rollouts/play", {**body, "actions": actions}) for actions in ([], [96] * 30))
    assert after["action"]["max_sessions"][:30] == [96] * 30
    assert max(after["action"]["max_sessions"][30:]) < 96
    assert after["score"] < alone["score"]
    begun = server.post("/rollouts/reset", {"task_id": "rollout-batch", "seed": 42})
    done, answer = False, {}
    for cap in after["action"]["max_sessions"]:
        answer = server.post("/rollouts/step", {"session_id": begun["session_id"], "action": {"max_sessions": cap}})
        done = answer["done"]
    assert done
    assert answer["info"]["score"] == after["score"]
    # As in a session, fields that an action leaves out stay.
    actions = [{"batch_size": 64, "kv_budget": 0.5}, {"batch_size": 128}]
    settings = server.post("/play", {"agent": "naive", "actions": actions})["action"]
    assert (settings["kv_budget"][1], settings["batch_size"][1]) == (0.5, 128)


def test_settings_of_the_episode_count(server: RunningServer) -> None:
    played = server.post("/play", {"agent": "naive", "config": {"episode_length": 7}})
    assert (played["steps"], played["config"]["episode_length"]) == (7, 7)
    whole = server.post("/play", {"agent": "naive", "config": {"episode_length": None}})
    assert whole["steps"] == 200, "null is the task's own length"
    traffic = server.post("/traffic/play", {"agent": "allow_all", "config": {"max_queue": 9, "crash_load_ratio": 9}})
    assert max(traffic["observation"]["queue_length"]) == 9


@pytest.mark.parametrize("task_id", TASKS)
def test_every_listed_policy_plays(server: RunningServer, task_id: int) -> None:
    listed = server.get("/policies", task_id=task_id)["policies"]
    names = [policy["name"] for policy in listed]
    assert {"naive", "heuristic", "best_static", "best_adaptive"} <= set(names) <= set(serving_policies())
    for name in names:
        assert 0.0 <= server.post("/play", {"task_id": task_id, "agent": name})["score"] <= 1.0


@pytest.mark.parametrize("agent", sorted(TRAFFIC_POLICIES))
def test_a_played_traffic_episode_is_graded_and_verified_alike(server: RunningServer, agent: str) -> None:
    played = server.post("/traffic/play", {"task_id": "task_hard", "agent": agent, "log": True})
    body = {"task_id": "task_hard", "seed": played["seed"], "episode_log": played["episode_log"], "verify": True}
    grade = server.post("/traffic/grader", body)
    assert (grade["score"], grade["verified"]) == (played["score"], True)
    assert len(played["observation"]["queue_length"]) == played["steps"] + 1


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/play", {}, "agent"),
        ("/play", {"agent": "constant:{}"}, "agent"),
        ("/play", {"agent": "naive", "session_id": "x"}, "session_id"),
        ("/play", {"agent": "naive", "log": 1}, "log"),
        ("/play", {"agent": "naive", "seed": -1}, "seed"),
        ("/play", {"agent": "naive", "actions": {}}, "actions"),
        ("/rollouts/play", {"agent": "fit", "actions": [8, 0]}, "max_sessions"),
        ("/traffic/play", {"agent": "heuristic"}, "agent"),
        ("/traffic/play", {"agent": "planner", "config": 9}, "config"),
    ],
)
def test_a_request_to_play_with_a_mistake_is_refused_by_name(
    server: RunningServer, path: str, body: dict[str, Any], named: str
) -> None:
    answer = server.client.post(path, json=body)
    assert (answer.status_code, answer.json()["detail"]["field"]) == (422, named)


def test_a_task_that_is_not_there_is_refused_with_those_that_are(server: RunningServer) -> None:
    assert server.client.post("/play", json={"agent": "naive", "task_id": 99}).status_code == 422
    assert server.client.get("/policies", params={"task_id": "99"}).status_code == 422
    assert server.client.post("/play", json={"agent": "naive", "config": {"delta": 9}}).status_code == 422
    assert server.client.post("/traffic/play", json={"agent": "planner", "task_id": "x"}).status_code == 400


def test_an_episode_that_was_played_is_not_played_again() -> None:
    family, asked = FAMILIES["serving"], ("naive", 1, 5, (("episode_length", 7),))
    played.cache_clear()
    assert played(family, *asked) is played(family, *asked)
    assert json.loads(gzip.decompress(played(family, *asked)[0]))["steps"] == 7
    assert played.cache_info().misses == 1


def test_an_agent_that_raises_is_named_in_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fails:
        def reset(self, n_rows: int) -> None: ...

        def act(self, observation: NDArray[np.float64]) -> NDArray[np.float64]:
            raise ValueError("no forecast")

    monkeypatch.setitem(AGENTS, "fails", RegisteredAgent(lambda *_: Fails(), "Fails.", stored=False))
    with TestClient(create_app(Settings(store_url="memory://", access_log="off"))) as client:
        answer = client.post("/play", json={"agent": "fails"})
    assert (answer.status_code, answer.json()["detail"]["code"]) == (500, "agent")
    assert "agent Fails failed in act()" in answer.json()["detail"]["message"]
    assert "no forecast" in answer.json()["detail"]["message"]
