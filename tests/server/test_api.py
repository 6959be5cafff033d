"""The HTTP interface over a real socket: whole episodes, shapes and defaults."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from typing import Any

import pytest

from inferencegym import __version__
from inferencegym.models import ACTION_FIELDS, REPLICAS, SPEC_LENGTHS, MetricsSnapshot, ServeObservation, WorkloadState
from inferencegym.tasks import list_tasks
from tests.servers import ROOT, RunningServer

TASKS = [task.task_id for task in list_tasks()]
NAIVE = {"kv_budget": 1.0, "spec_length": 0, "batch_size": 32, "prefill_disagg": False, "quant_tier": 0}


def random_action(rng: random.Random) -> dict[str, Any]:
    return {
        "kv_budget": round(rng.uniform(0.1, 1.0), 3),
        "spec_length": rng.choice(SPEC_LENGTHS),
        "batch_size": rng.randint(1, 512),
        "prefill_disagg": rng.random() < 0.5,
        "quant_tier": rng.choice(["FP16", "INT8", "INT4", 0, 1, 2]),
    }


def keys_of(cls: type) -> list[str]:
    return list(cls.__dataclass_fields__)  # type: ignore[attr-defined]


@pytest.mark.parametrize("task_id", TASKS)
def test_a_whole_episode_is_played_and_graded_over_http(server: RunningServer, task_id: int) -> None:
    rng = random.Random(task_id)
    begun = server.post("/reset", {"task_id": task_id, "seed": 7})
    session_id, length = begun["session_id"], begun["episode_length"]
    assert (begun["task_id"], begun["seed"], begun["reward"], begun["done"]) == (task_id, 7, None, False)
    assert begun["observation"]["timestep"] == 0
    log, total = [], 0.0
    for step in range(1, length + 1):
        answer = server.post("/step", {"session_id": session_id, "action": random_action(rng)})
        assert -1.0 <= answer["reward"] <= 1.0
        assert answer["done"] is (step == length)
        assert answer["observation"]["timestep"] == answer["info"]["timestep"] == step
        total += answer["reward"]
        info = answer["info"]
        log.append(
            {
                "timestep": step,
                "action": info["action_applied"],
                "reward": answer["reward"],
                "metrics": info["metrics"],
            }
        )
    state = server.get("/state", session_id=session_id)
    assert (state["step_count"], state["done"], state["task_id"], state["seed"]) == (length, True, task_id, 7)
    assert state["cumulative_reward"] == pytest.approx(total, abs=1e-9)
    by_session = server.post("/grader", {"session_id": session_id})
    by_log = server.post("/grader", {"task_id": task_id, "episode_log": log, "seed": 7, "verify": True})
    assert 0.0 <= by_session["score"] <= 1.0
    assert by_session["score"] == by_log["score"]
    assert by_session["breakdown"] == by_log["breakdown"]
    assert by_session["verified"] is by_log["verified"] is True
    assert by_log["feedback"]


def test_reset_without_a_body_starts_task_1_with_seed_42(server: RunningServer) -> None:
    answer = server.client.post("/reset")
    assert answer.status_code == 200
    begun = answer.json()
    assert (begun["task_id"], begun["seed"], begun["episode_length"]) == (1, 42, 200)
    assert set(begun["config"]) == {"alpha", "beta", "gamma", "delta", "episode_length", "reward", "hold"}
    assert begun == {**server.post("/reset", {"task_id": 1, "seed": 42}), "session_id": begun["session_id"]}


def test_fields_left_out_of_an_action_take_the_naive_defaults(server: RunningServer) -> None:
    sessions = [server.post("/reset", {"task_id": 3, "seed": 5})["session_id"] for _ in range(3)]
    bodies: list[dict[str, Any]] = [{"action": NAIVE}, {"action": {}}, {}]
    answers = [server.post("/step", {"session_id": s, **body}) for s, body in zip(sessions, bodies, strict=True)]
    assert answers[0] == answers[1] == answers[2]
    assert answers[0]["info"]["action_applied"] == NAIVE


def test_quant_tier_may_be_a_number_or_a_name(server: RunningServer) -> None:
    answers = []
    for tier in (2, "INT4", 2.0):
        session_id = server.post("/reset", {"task_id": 3})["session_id"]
        answers.append(server.post("/step", {"session_id": session_id, "action": {"quant_tier": tier}}))
    assert answers[0] == answers[1] == answers[2]
    assert answers[0]["info"]["action_applied"]["quant_tier"] == 2


def test_a_precision_that_the_hardware_lacks_is_refused_and_the_session_plays_on(server: RunningServer) -> None:
    session_id = server.post("/reset", {"task_id": 3, "config": {"hardware": "a100-qwen3-8b"}})["session_id"]
    for step in (1, 2):
        body = {"session_id": session_id, "step": step, "action": {"quant_tier": 1}}
        refused = server.client.post("/step", json=body)
        assert refused.status_code == 422, refused.text
        assert refused.json()["detail"]["code"] == "invalid_action"
        assert "BF16" in refused.json()["detail"]["allowed"]
        assert server.get("/state", session_id=session_id)["step_count"] == step - 1
        server.post("/step", {"session_id": session_id, "step": step, "action": {"quant_tier": 0}})


def test_more_replicas_than_the_task_has_are_refused_and_the_session_plays_on(server: RunningServer) -> None:
    session_id = server.post("/reset", {"task_id": "autoscale"})["session_id"]
    refused = server.client.post("/step", json={"session_id": session_id, "step": 1, "action": {"replicas": 7}})
    assert refused.status_code == 422, refused.text
    assert refused.json()["detail"]["field"] == "replicas"
    assert "from 1 to 6" in refused.json()["detail"]["allowed"]
    played = server.post("/step", {"session_id": session_id, "step": 1, "action": {"replicas": 3}})
    assert played["info"]["fleet"]["replicas"] == 3
    played = server.post("/step", {"session_id": session_id, "step": 2, "action": {}})
    assert played["info"]["action_applied"]["replicas"] == 3


def test_answers_have_the_documented_fields(server: RunningServer) -> None:
    begun = server.post("/reset", {"task_id": 2})
    answer = server.post("/step", {"session_id": begun["session_id"], "action": {}})
    assert list(begun["observation"]) == list(answer["observation"]) == keys_of(ServeObservation)
    assert len(answer["observation"]) == 12
    assert len(answer["observation"]["priority_distribution"]) == 3
    assert list(answer["info"]["metrics"]) == keys_of(MetricsSnapshot)
    assert list(answer["info"]["workload"]) == keys_of(WorkloadState)
    assert list(answer["info"]["action_applied"]) == list(ACTION_FIELDS)


def test_a_config_changes_weights_and_length(server: RunningServer) -> None:
    begun = server.post("/reset", {"task_id": 1, "config": {"alpha": 0.9, "episode_length": 3}})
    assert begun["config"]["alpha"] == 0.9
    assert begun["config"]["beta"] == server.post("/reset")["config"]["beta"]
    done = [server.post("/step", {"session_id": begun["session_id"]})["done"] for _ in range(3)]
    assert done == [False, False, True]


def test_state_without_a_session_means_the_callers_last_reset(server: RunningServer) -> None:
    headers = {"X-Client-Id": "someone"}
    server.client.post("/reset", json={"task_id": 2, "seed": 77}, headers=headers)
    server.client.post("/reset", json={"task_id": 3, "seed": 78})
    state = server.client.get("/state", headers=headers).json()
    assert (state["task_id"], state["seed"], state["step_count"]) == (2, 77, 0)
    assert "session_id" not in state, "whoever shares the address must not learn the id"
    nobody = server.client.get("/state", headers={"X-Client-Id": "never seen"})
    assert nobody.status_code == 404


def test_an_unknown_session_is_404_and_says_what_to_do(server: RunningServer) -> None:
    for answer in (
        server.client.post("/step", json={"session_id": "feed", "action": NAIVE}),
        server.client.get("/state", params={"session_id": "feed"}),
        server.client.post("/grader", json={"session_id": "feed"}),
    ):
        assert answer.status_code == 404
        detail = answer.json()["detail"]
        assert detail["code"] == "unknown_session"
        assert "POST /reset" in detail["next"]


def test_an_unknown_task_is_422_with_the_valid_ids(server: RunningServer) -> None:
    answer = server.client.post("/reset", json={"task_id": 99})
    assert answer.status_code == 422
    detail = answer.json()["detail"]
    assert detail["code"] == "unknown_task"
    assert all(repr(task_id) in detail["message"] for task_id in TASKS)


def test_a_step_answered_at_once_has_the_headers_that_it_has_in_turn(server: RunningServer) -> None:
    session_id = server.post("/reset", {"task_id": 1, "seed": 3})["session_id"]
    counted = 'inferencegym_http_requests_total{path="/step",status="200"}'

    def steps_counted() -> float:
        lines = server.client.get("/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(counted))

    before = steps_counted()
    body = {"session_id": session_id, "step": 1}
    # steps that were accepted earlier are answered in order
    first = server.client.post("/step", json=body, headers={"x-request-id": "mine"})
    again = server.client.post("/step", json=body, headers={"x-request-id": "mine"})
    assert first.content == again.content
    assert [(k, v) for k, v in first.headers.raw if k != b"date"] == [
        (k, v) for k, v in again.headers.raw if k != b"date"
    ]
    assert steps_counted() == before + 2


def test_tasks_lists_the_three_tasks(server: RunningServer) -> None:
    tasks = server.get("/tasks")["tasks"]
    assert [task["id"] for task in tasks] == [1, 2, 3]
    assert [task["difficulty"] for task in tasks] == ["easy", "medium", "hard"]
    assert [task["slo_target_ms"] for task in tasks] == [500, 300, 200]
    everything = server.get("/tasks", all="true")["tasks"]
    assert [task["id"] for task in everything][:3] == [1, 2, 3]
    assert len(everything) == len(list_tasks(include_recorded=True))


def test_health_manifest_and_info_tell_the_version(server: RunningServer) -> None:
    health = server.get("/health")
    assert health["status"] == "healthy"
    assert health["version"] == server.get("/info")["version"] == __version__
    assert health["active_sessions"] >= 0
    assert health["uptime_s"] > 0
    manifest = server.client.get("/openenv.yaml")
    assert manifest.text == (ROOT / "openenv.yaml").read_text(encoding="utf-8")
    assert manifest.headers["content-type"].startswith("application/yaml")


def test_info_describes_spaces_reward_calibration_and_data(server: RunningServer) -> None:
    info = server.get("/info")
    assert list(info["action"]["properties"]) == [*ACTION_FIELDS, REPLICAS.name]
    assert info["action"]["properties"]["kv_budget"]["minimum"] == 0.1
    assert info["action"]["properties"]["spec_length"]["enum"] == list(SPEC_LENGTHS)
    assert list(info["observation"]["properties"]) == keys_of(ServeObservation)
    assert set(info["reward"]["weights"]["1"]) == {"alpha", "beta", "gamma", "delta"}
    assert info["calibration"]["1"]["optimal_tps"] > info["calibration"]["1"]["floor_tps"] > 0
    assert info["data"]


def test_baseline_answers_with_the_same_scores_every_time(server: RunningServer) -> None:
    first, second = server.client.get("/baseline"), server.client.get("/baseline")
    assert first.content == second.content
    baseline = first.json()
    assert set(baseline) >= {"scores", "expected_range", "breakdown", "action_config"}
    for task_id in TASKS:
        seed = baseline["seed"]
        session_id = server.post("/reset", {"task_id": task_id, "seed": seed})["session_id"]
        while not server.post("/step", {"session_id": session_id, "action": baseline["action_config"]})["done"]:
            pass
        # the server's baseline score is the score of playing the baseline in this process
        assert server.post("/grader", {"session_id": session_id})["score"] == baseline["scores"][f"task{task_id}"]


def test_no_answer_holds_nan_or_infinity(server: RunningServer) -> None:
    session_id = server.post("/reset", {"task_id": 3, "seed": 1})["session_id"]
    rng = random.Random(0)

    def finite(value: Any) -> bool:
        if isinstance(value, dict):
            return all(finite(item) for item in value.values())
        if isinstance(value, list):
            return all(finite(item) for item in value)
        return value is not None and (not isinstance(value, float) or math.isfinite(value))

    for _ in range(100):
        assert finite(server.post("/step", {"session_id": session_id, "action": random_action(rng)}))


def test_the_idle_server_has_not_imported_what_it_does_not_need() -> None:
    heavy = ["aiconfigurator_core", "pandas", "pyarrow", "scipy", "torch", "gradio", "openai", "matplotlib", "redis"]
    heavy += ["openenv", "fastmcp", "anthropic"]
    script = f"""
import asyncio, sys
from server.app import create_app
from server.settings import Settings
app = create_app(Settings(store_url="memory://"))
async def start_and_stop():
    async with app.router.lifespan_context(app):
        pass
asyncio.run(start_and_stop())
import json
print(json.dumps([name for name in {heavy!r} if name in sys.modules]))
"""
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(run.stdout) == []


def test_no_request_reads_a_table_or_starts_a_process_for_it() -> None:
    script = """
import asyncio, json, sys
import numpy as np
import httpx
from inferencegym.tasks import table_index
from server.app import create_app
from server.settings import Settings

app = create_app(Settings(store_url="memory://"))
seen, hardware = [], list(table_index())[1:]
sys.addaudithook(lambda event, args: seen.append(event) if event == "subprocess.Popen" else None)

def refused(*args, **kwargs):
    raise AssertionError("a table was read")

async def play():
    async with app.router.lifespan_context(app):
        np.load = refused
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            answers = [await client.post("/reset", json={"config": {"hardware": name}}) for name in hardware]
    print(json.dumps([{answer.status_code for answer in answers} == {200}, seen, "pyarrow" in sys.modules]))

asyncio.run(play())
"""
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(run.stdout) == [True, [], False]
