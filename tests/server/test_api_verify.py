"""Verified grades: a log is replayed, and any change in it is refused with step and field."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
from starlette.testclient import TestClient

from env.inference_env import InferenceEnv
from env.traffic.env import TrafficEnv
from server.app import create_app
from server.settings import Settings

Log = list[dict[str, Any]]
LENGTH = 40
CONFIG = {"episode_length": LENGTH}


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with TestClient(create_app(Settings(store_url="memory://", access_log="off"))) as running:
        yield running


@pytest.fixture(scope="module")
def honest() -> Log:
    env = InferenceEnv()
    env.reset(seed=11, task_id=3, config=CONFIG)
    for step in range(LENGTH):
        env.step({"batch_size": 16 + step, "quant_tier": step % 3, "spec_length": (0, 2, 8)[step % 3]})
    return list(json.loads(json.dumps(env.episode_log)))


def grade(client: TestClient, log: Log, **changes: Any) -> Any:
    body = {"task_id": 3, "episode_log": log, "seed": 11, "config": CONFIG, "verify": True, **changes}
    return client.post("/grader", json=body)


def test_an_honest_log_is_verified_and_scores_as_without_verification(client: TestClient, honest: Log) -> None:
    verified = grade(client, honest).json()
    plain = grade(client, honest, verify=False).json()
    assert verified["verified"] is True
    assert plain["verified"] is False
    assert {**plain, "verified": True} == verified


def test_digits_lost_on_the_way_are_no_forgery(client: TestClient, honest: Log) -> None:
    rounded = json.loads(json.dumps(honest), parse_float=lambda text: float(f"{float(text):.12g}"))
    assert grade(client, rounded).json()["verified"] is True


def stretched(value: Any) -> Any:
    """All floats increased by less than the rounding tolerance for text."""
    if isinstance(value, dict):
        return {name: stretched(part) for name, part in value.items()}
    return value * (1 + 9e-10) if isinstance(value, float) else value


def test_a_score_within_the_tolerance_of_digits_is_the_replays_and_not_the_claimed_one(
    client: TestClient, honest: Log
) -> None:
    claimed = [{**entry, "metrics": stretched(entry["metrics"])} for entry in honest]
    true = grade(client, honest).json()["score"]
    assert grade(client, claimed, verify=False).json()["score"] != true
    assert grade(client, claimed).json()["score"] == true


def traffic_log_of(task_id: str, seed: int, action: str, **config: float) -> Log:
    env = TrafficEnv(task_id)
    env.reset(seed=seed, config=config)
    while not env.done:
        env.step(action)
    return list(json.loads(json.dumps(env.episode_log)))


def traffic_grade(client: TestClient, task_id: str, seed: int, log: Log, **more: Any) -> Any:
    body = {"task_id": task_id, "episode_log": log, "seed": seed, "verify": True, **more}
    return client.post("/traffic/grader", json=body)


def test_a_latency_just_below_a_threshold_scores_what_the_replay_scores(client: TestClient) -> None:
    config = {"server_capacity": 1e6, "base_latency": 300}
    log = traffic_log_of("task_easy", 0, "allow_all", **config)
    for entry in log:
        entry["metrics"]["avg_latency"] *= 1 - 9e-10
    scores = [
        traffic_grade(client, "task_easy", 0, log, config=config, verify=verify).json()["score"]
        for verify in (False, True)
    ]
    assert scores == [1.0, 0.5]


def test_a_queue_just_below_the_limit_that_counts_is_no_lost_digit(client: TestClient) -> None:
    """A queue of 100 is not short, but one of 99.99999991 would be: counts are compared exactly."""
    claimed = traffic_log_of("task_hard", 3, "throttle_70")
    step = next(i for i, entry in enumerate(claimed) if entry["metrics"]["queue_length"] > 0)
    claimed[step]["metrics"]["queue_length"] *= 1 - 9e-10
    detail = traffic_grade(client, "task_hard", 3, claimed).json()["detail"]
    assert (detail["code"], detail["field"]) == ("forged_log", "metrics.queue_length")


def test_the_answer_says_whether_the_configuration_is_the_tasks_own(client: TestClient, honest: Log) -> None:
    assert grade(client, honest).json()["own_config"] is False
    easy = {"server_capacity": 1e6, "base_latency": 300}
    log = traffic_log_of("task_easy", 0, "allow_all", **easy)
    verified = traffic_grade(client, "task_easy", 0, log, config=easy).json()
    assert (verified["verified"], verified["own_config"]) == (True, False)
    for config in ({}, None, {"server_capacity": 100}):
        own = traffic_grade(client, "task_easy", 0, traffic_log_of("task_easy", 0, "allow_all"), config=config).json()
        assert (own["verified"], own["own_config"]) == (True, True)
    assert traffic_grade(client, "task_easy", 0, log, config=easy, verify=False).json()["own_config"] is False


@pytest.mark.parametrize(("config", "own"), [({}, True), ({"episode_length": 200}, True), (CONFIG, False)])
def test_a_sessions_grade_says_whether_the_configuration_is_the_tasks_own(
    client: TestClient, config: dict[str, Any], own: bool
) -> None:
    session_id = client.post("/reset", json={"task_id": 3, "config": config}).json()["session_id"]
    graded = client.post("/grader", json={"session_id": session_id}).json()
    assert (graded["verified"], graded["own_config"]) == (True, own)


HARDWARE: Final = "h100-llama-3.1-8b"


@pytest.mark.parametrize(
    "start",
    [{"task_id": 3, "config": {"hardware": HARDWARE}}, {"task_id": f"3@{HARDWARE}"}],
)
def test_a_score_on_other_hardware_does_not_compare_however_it_was_played(
    client: TestClient, start: dict[str, Any]
) -> None:
    session_id = client.post("/reset", json={**start, "seed": 11}).json()["session_id"]
    log = [client.post("/step", json={"session_id": session_id}).json() for _ in range(200)]
    by_session = client.post("/grader", json={"session_id": session_id}).json()
    by_log = client.post("/grader", json={**start, "seed": 11, "episode_log": log, "verify": True}).json()
    assert (by_session["verified"], by_session["own_config"]) == (True, False)
    assert by_log == {name: by_session[name] for name in by_log}


def test_a_batch_plays_on_the_hardware_of_its_configuration(client: TestClient) -> None:
    start = {"task_id": 3, "seed": 11, "config": {"hardware": HARDWARE}}
    batch = client.post("/reset/batch", json={**start, "n": 1}).json()
    assert batch["task_id"] == f"3@{HARDWARE}"
    stepped = client.post("/step/batch", json={"session_id": batch["session_id"], "actions": [[[32, 1, 0, 0, 0]]]})
    assert stepped.status_code == 200, stepped.text
    own = client.post("/reset/batch", json={"task_id": 3, "seed": 11, "n": 1}).json()
    alone = client.post("/step/batch", json={"session_id": own["session_id"], "actions": [[[32, 1, 0, 0, 0]]]})
    assert stepped.json()["rewards"] != alone.json()["rewards"]


def set_metric(log: Log) -> None:
    log[7]["metrics"]["tokens_per_sec"] *= 1.001


def set_reward(log: Log) -> None:
    log[0]["reward"] += 1e-6


def set_action(log: Log) -> None:
    log[20]["action"]["batch_size"] += 1


def add_metric(log: Log) -> None:
    log[3]["metrics"]["bonus"] = 1.0


def drop_metric(log: Log) -> None:
    del log[3]["metrics"]["ttft_p99_ms"]


def set_timestep(log: Log) -> None:
    log[5]["timestep"] = 99


def swap(log: Log) -> None:
    log[1], log[2] = log[2], log[1]


def flip(log: Log) -> None:
    log[9]["metrics"]["oom"] = not log[9]["metrics"]["oom"]


def as_number(log: Log) -> None:
    log[9]["metrics"]["oom"] = int(log[9]["metrics"]["oom"])


def as_truth(log: Log) -> None:
    assert log[0]["timestep"] == 1
    log[0]["timestep"] = True


def as_truth_in_an_action(log: Log) -> None:
    assert log[4]["action"]["quant_tier"] == 1
    log[4]["action"]["quant_tier"] = True


def stretch_a_count(log: Log) -> None:
    log[8]["action"]["batch_size"] *= 1 + 1e-12


def stretch_a_timestep(log: Log) -> None:
    log[8]["timestep"] *= 1 + 9e-10


@pytest.mark.parametrize(
    ("forge", "step", "field"),
    [
        (set_metric, 7, "metrics.tokens_per_sec"),
        (set_reward, 0, "reward"),
        (set_action, 20, "reward"),
        (add_metric, 3, "metrics.bonus"),
        (drop_metric, 3, "metrics.ttft_p99_ms"),
        (set_timestep, 5, "timestep"),
        (swap, 1, "timestep"),
        (flip, 9, "metrics.oom"),
        (as_number, 9, "metrics.oom"),
        (as_truth, 0, "timestep"),
        (stretch_a_timestep, 8, "timestep"),
    ],
)
def test_a_forged_log_is_refused_with_step_and_field(
    client: TestClient, honest: Log, forge: Callable[[Log], None], step: int, field: str
) -> None:
    forged = copy.deepcopy(honest)
    forge(forged)
    answer = grade(client, forged)
    assert answer.status_code == 422
    detail = answer.json()["detail"]
    assert (detail["code"], detail["step"], detail["field"]) == ("forged_log", step, field)
    assert grade(client, forged, verify=False).status_code in (200, 422)


@pytest.mark.parametrize("forge", [as_truth_in_an_action, stretch_a_count])
def test_an_action_that_is_spelled_as_another_kind_of_number_is_refused(
    client: TestClient, honest: Log, forge: Callable[[Log], None]
) -> None:
    forged = copy.deepcopy(honest)
    forge(forged)
    assert grade(client, forged).json()["detail"]["code"] == "forged_log"


def test_whole_floats_may_lose_their_point_on_the_way_through_json(client: TestClient, honest: Log) -> None:
    def as_javascript_writes(text: str) -> float | int:
        return int(float(text)) if float(text).is_integer() else float(text)

    assert honest[0]["action"]["kv_budget"] == 1.0
    log = json.loads(json.dumps(honest), parse_float=as_javascript_writes)
    assert type(log[0]["action"]["kv_budget"]) is int
    assert grade(client, log).json()["verified"] is True


@pytest.mark.parametrize("change", [{"seed": 12}, {"task_id": 2}, {"config": {"episode_length": LENGTH, "alpha": 0.9}}])
def test_a_log_of_another_seed_task_or_config_is_refused(
    client: TestClient, honest: Log, change: dict[str, Any]
) -> None:
    detail = grade(client, honest, **change).json()["detail"]
    assert (detail["code"], detail["step"]) == ("forged_log", 0)


def test_a_log_that_is_too_short_or_too_long_is_refused(client: TestClient, honest: Log) -> None:
    short = grade(client, honest[:-1]).json()["detail"]
    assert short["code"] == "forged_log"
    assert f"ends at step {LENGTH - 1} of {LENGTH}" in short["message"]
    long = grade(client, [*honest, honest[-1]]).json()["detail"]
    assert long["code"] == "forged_log"
    assert f"{LENGTH} steps" in long["message"]


@pytest.mark.parametrize("entry", [5, {}, {"action": {}}, {"timestep": 0, "action": 1, "reward": 0, "metrics": {}}])
def test_an_entry_without_the_form_of_a_log_is_malformed(client: TestClient, entry: Any) -> None:
    detail = grade(client, [entry]).json()["detail"]
    assert (detail["code"], detail["step"]) == ("malformed_log", 0)


def test_an_impossible_action_is_refused(client: TestClient, honest: Log) -> None:
    forged = copy.deepcopy(honest)
    forged[2]["action"]["batch_size"] = 100_000
    detail = grade(client, forged).json()["detail"]
    assert detail["code"] == "forged_log"
    assert "batch_size" in detail["message"]
