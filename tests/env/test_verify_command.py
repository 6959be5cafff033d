"""``inferencegym verify``: logs in files are replayed, and changes in them are named."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from cli.main import main
from env.episode_files import constants_sha256, saved, simulator
from env.families import FAMILIES
from env.inference_env import InferenceEnv
from env.traffic.env import TrafficEnv
from env.traffic.tasks import list_traffic_tasks
from inferencegym.errors import InvalidConfigError
from inferencegym.tasks import list_tasks
from tests.desk import Desk

Log = dict[str, Any]
LENGTH = 30


@pytest.fixture(scope="module")
def honest() -> Log:
    env = InferenceEnv()
    env.reset(seed=11, task_id=3, config={"episode_length": LENGTH})
    for step in range(LENGTH):
        env.step({"batch_size": 16 + step, "quant_tier": step % 3, "spec_length": (0, 2, 8)[step % 3]})
    log = {"task": 3, "seed": 11, "config": {"episode_length": LENGTH}, "steps": env.episode_log}
    return dict(json.loads(json.dumps(log)))


def write(path: Path, text: str | Log) -> str:
    path.write_text(text if isinstance(text, str) else json.dumps(text), encoding="utf-8")
    return str(path)


def test_an_honest_log_is_verified_and_its_score_printed(
    tmp_path: Path, honest: Log, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", write(tmp_path / "log.json", honest)]) == 0
    assert f"task 3, seed 11: verified, {LENGTH} steps, score 0." in capsys.readouterr().out


def test_a_log_may_claim_the_score_that_its_steps_have(
    tmp_path: Path, honest: Log, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", write(tmp_path / "log.json", honest), "--json"]) == 0
    score = json.loads(capsys.readouterr().out)["score"]
    assert 0.0 < score < 1.0
    assert main(["verify", write(tmp_path / "log.json", {**honest, "score": score})]) == 0
    assert main(["verify", write(tmp_path / "log.json", {**honest, "score": score * (1 + 2e-6)})]) == 1


def test_a_log_may_claim_the_highest_score_and_none_above(tmp_path: Path) -> None:
    env = TrafficEnv("task_easy")
    env.reset(config={"server_capacity": 1000.0})
    while not env.done:
        env.step("allow_all")
    assert main(["verify", write(tmp_path / "log.json", {**saved(env), "score": 1.0})]) == 0
    assert main(["verify", write(tmp_path / "log.json", {**saved(env), "score": 1})]) == 0
    assert main(["verify", write(tmp_path / "log.json", {**saved(env), "score": 1.0 + 1e-13})]) == 1


@pytest.mark.parametrize("name", ["AdversarialMultiTenant-v2", "AutoscaledChat-v2", "RolloutMix-v1"])
def test_a_gymnasium_episode_is_saved_in_its_wrappers_and_verified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    env = gymnasium.make(f"inferencegym.gym:InferenceGym/{name}")
    env.action_space.seed(1)
    env.reset(seed=1)
    info: Log = {}
    while "score" not in info:
        info = env.step(env.action_space.sample())[4]
    assert main(["verify", write(tmp_path / "log.json", {**saved(env), "score": info["score"]})]) == 0
    assert saved(env) == saved(env.unwrapped)
    assert main(["verify", write(tmp_path / "state.json", env.unwrapped.get_state())]) == 2
    assert "steps is missing: this is a state of get_state()" in capsys.readouterr().err


def test_what_plays_no_episode_of_its_own_cannot_be_saved() -> None:
    with pytest.raises(InvalidConfigError, match=r"env=.*must be an InferenceEnv, or a Gymnasium environment"):
        saved(gymnasium.make_vec("inferencegym.gym:InferenceGym/StaticUniform-v2", num_envs=2))


def test_a_log_may_claim_the_lowest_score(tmp_path: Path) -> None:
    env = InferenceEnv()
    env.reset(seed=1, task_id=1, config={"episode_length": 10})
    for _ in range(10):
        env.step({"batch_size": 1})
    log = {"task": 1, "seed": 1, "config": {"episode_length": 10}, "steps": env.episode_log}
    for claimed, status in ((0, 0), (0.0, 0), (-0.0001, 1), (0.0001, 1)):
        assert main(["verify", write(tmp_path / "log.json", {**log, "score": claimed})]) == status


@pytest.mark.parametrize("capacity", [100.0, 90.0])
def test_the_verdict_says_whether_the_configuration_is_the_tasks_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], capacity: float
) -> None:
    env = TrafficEnv("task_easy")
    env.reset(config={"server_capacity": capacity})
    while not env.done:
        env.step("throttle_40")
    path = write(tmp_path / "log.json", saved(env))
    assert main(["verify", path, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["own_config"] is (capacity == 100.0)
    assert main(["verify", path]) == 0
    assert ("not in the task's own configuration" in capsys.readouterr().out) is (capacity != 100.0)


def test_the_score_is_the_replays_where_a_log_claims_a_digit_more(
    tmp_path: Path, honest: Log, capsys: pytest.CaptureFixture[str]
) -> None:
    claimed = copy.deepcopy(honest)
    for entry in claimed["steps"]:
        entry["metrics"]["tokens_per_sec"] *= 1 + 9e-7
    scores = []
    for log in (honest, claimed):
        assert main(["verify", write(tmp_path / "log.json", log), "--json"]) == 0
        scores.append(json.loads(capsys.readouterr().out)["score"])
    assert scores[0] == scores[1]


def bad_reward(log: Log) -> None:
    log["steps"][0]["reward"] += 2e-6


def bad_metric(log: Log) -> None:
    log["steps"][7]["metrics"]["tokens_per_sec"] *= 1 + 2e-6


def bad_length(log: Log) -> None:
    del log["steps"][-1]


def bad_score(log: Log) -> None:
    log["score"] = 0.999


@pytest.mark.parametrize(
    ("forge", "step", "field"),
    [
        (bad_reward, 0, "reward"),
        (bad_metric, 7, "metrics.tokens_per_sec"),
        (bad_length, LENGTH - 1, None),
        (bad_score, None, "score"),
    ],
)
def test_a_forged_log_ends_in_status_1_with_step_and_field(
    tmp_path: Path,
    honest: Log,
    capsys: pytest.CaptureFixture[str],
    forge: Callable[[Log], None],
    step: int | None,
    field: str | None,
) -> None:
    forged = copy.deepcopy(honest)
    forge(forged)
    path = write(tmp_path / "log.json", forged)
    assert main(["verify", "--json", path]) == 1
    verdict = json.loads(capsys.readouterr().out)
    assert verdict["verified"] is False
    assert verdict["step"] == step
    assert verdict["field"] is None if field is None else verdict["field"].startswith(field)
    # The log may be genuine but from another calibration, so it is not called forged.
    assert main(["verify", path]) == 1
    assert "NOT VERIFIED" in (out := capsys.readouterr().out)
    assert "forged, or was played on other constants" in out
    named = {**forged, **asdict(simulator(FAMILIES["serving"], forged["task"]))}
    assert main(["verify", write(tmp_path / "named.json", named)]) == 1
    assert "FORGED" in capsys.readouterr().out


# ---------------------------------------------------------------- played on another simulator


def test_a_log_of_another_calibration_is_called_that_and_not_forged(
    tmp_path: Path, desk: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "log.json", desk.log)
    assert main(["verify", path]) == 0
    for name, value in (("price", 0.05), ("max_throughput_tps", 900.0), ("optimal_tps", 500.0), ("floor_tps", 10.0)):
        desk.calibrate("desk", **{name: value})
        capsys.readouterr()
        assert main(["verify", path]) == 2
        assert f"{path}: played on other constants of the task: on release" in capsys.readouterr().err
    desk.calibrate("desk")
    assert main(["verify", path]) == 0


def test_calibrating_a_task_leaves_the_logs_of_others_alone(tmp_path: Path, desk: Desk) -> None:
    path = write(tmp_path / "log.json", desk.log)
    desk.calibrate("other", price=0.05, optimal_tps=500.0)
    assert main(["verify", path]) == 0


def test_how_constants_were_measured_and_what_a_task_is_called_change_no_digest(desk: Desk) -> None:
    before = constants_sha256(FAMILIES["serving"], "desk")
    desk.calibrate("desk", seconds=12.5, table_sha256="1" * 64)
    assert constants_sha256(FAMILIES["serving"], "desk") == before
    desk.define(description="Another text", name="Another name", difficulty="hard")
    assert constants_sha256(FAMILIES["serving"], "desk") == before


@pytest.mark.parametrize("change", [{"arrival_rate_rps": 7}, {"cost_budget_episode": 6}, {"slo_target_ms": 301}])
def test_a_digest_changes_with_what_a_task_is(desk: Desk, change: Log) -> None:
    before = constants_sha256(FAMILIES["serving"], "desk")
    desk.define(**change)
    assert constants_sha256(FAMILIES["serving"], "desk") != before


def test_tasks_that_differ_have_digests_that_do() -> None:
    serving = {constants_sha256(FAMILIES["serving"], task.task_id) for task in list_tasks(include_recorded=True)}
    traffic = {constants_sha256(FAMILIES["traffic"], task.task_id) for task in list_traffic_tasks()}
    assert len(serving | traffic) == len(list_tasks(include_recorded=True)) + len(list_traffic_tasks())


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ({"release": "0.0.1"}, "played on another release: on release 0.0.1"),
        ({"table_sha256": "0" * 64}, "played on another table: on"),
        ({"table_sha256": None}, "played on another table: on"),
        ({"release": 5}, "release=5 is not allowed"),
        ({"constants_sha256": 5}, "constants_sha256=5 is not allowed"),
    ],
)
def test_a_log_names_its_simulator_rightly_or_ends_in_status_2(
    tmp_path: Path, desk: Desk, capsys: pytest.CaptureFixture[str], damage: Log, said: str
) -> None:
    assert main(["verify", write(tmp_path / "log.json", {**desk.log, **damage})]) == 2
    assert said in capsys.readouterr().err


def test_a_log_names_its_simulator_in_whole_or_not_at_all(
    tmp_path: Path, desk: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    log = {key: value for key, value in desk.log.items() if key != "table_sha256"}
    assert main(["verify", write(tmp_path / "log.json", log)]) == 2
    assert "table_sha256 is missing" in capsys.readouterr().err


def test_a_saved_traffic_log_names_release_and_task_and_no_table(tmp_path: Path) -> None:
    env = TrafficEnv("task_medium")
    env.reset()
    while not env.done:
        env.step("throttle_40")
    log = saved(env)
    assert log["table_sha256"] is None
    assert main(["verify", write(tmp_path / "log.json", log)]) == 0
    assert main(["verify", write(tmp_path / "log.json", {**log, "constants_sha256": "0" * 64})]) == 2


def test_a_saved_log_of_a_task_on_other_hardware_is_verified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    env = InferenceEnv()
    env.reset(seed=11, task_id=3, config={"hardware": "h100-llama-3.1-8b"})
    while not env.done:
        env.step({})
    assert main(["verify", write(tmp_path / "log.json", saved(env)), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["own_config"] is False


# ---------------------------------------------------------------- files


@pytest.mark.parametrize("field", ["reward", "timestep"])
def test_a_number_that_no_float_holds_ends_in_status_2_with_step_and_field(
    tmp_path: Path, honest: Log, capsys: pytest.CaptureFixture[str], field: str
) -> None:
    log = copy.deepcopy(honest)
    log["steps"][3][field] = 10**400
    assert main(["verify", write(tmp_path / "log.json", log)]) == 2
    assert f"step 3: {field}=1000" in capsys.readouterr().err


@pytest.mark.parametrize("score", [10**400, -1, 1.5, 0.5])
def test_a_score_that_is_not_that_of_the_steps_is_forged(
    tmp_path: Path, honest: Log, capsys: pytest.CaptureFixture[str], score: float
) -> None:
    assert main(["verify", write(tmp_path / "log.json", {**honest, "score": score})]) == 1
    assert "score is " in capsys.readouterr().out


def test_json_lines_hold_an_episode_per_line_or_a_step_per_line(
    tmp_path: Path, honest: Log, capsys: pytest.CaptureFixture[str]
) -> None:
    header = {key: value for key, value in honest.items() if key != "steps"}
    lines = [honest, honest, header, *honest["steps"]]
    path = write(tmp_path / "log.jsonl", "\n".join(map(json.dumps, lines)) + "\n")
    assert main(["verify", path]) == 0
    out = capsys.readouterr().out
    assert out.count(f"verified, {LENGTH} steps") == 3
    assert "log.jsonl:3: task 3" in out


def test_a_bare_list_of_steps_is_verified_with_task_and_seed_given(tmp_path: Path, honest: Log) -> None:
    path = write(tmp_path / "steps.json", json.dumps(honest["steps"], indent=1))
    config = json.dumps(honest["config"])
    assert main(["verify", path, "--task", "3", "--seed", "11", "--config", config]) == 0
    assert main(["verify", path, "--task", "3", "--seed", "12", "--config", config]) == 1
    assert main(["verify", path]) == 2


def test_the_body_of_a_grading_request_is_a_log(tmp_path: Path, honest: Log) -> None:
    body = {"task_id": 3, "episode_log": honest["steps"], "seed": 11, "config": honest["config"], "verify": True}
    assert main(["verify", write(tmp_path / "body.json", body)]) == 0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "5",
        '{"task": 3}',
        '{"task": 3, "seed": "11", "steps": []}',
        '{"task": 99, "seed": 1, "steps": []}',
        '{"task": 3, "seed": 1, "seed": 2, "steps": []}',
        '{"task": 3, "seed": 1, "score": NaN, "steps": []}',
        '{"task": 3, "seed": 1, "family": "chess", "steps": []}',
        '{"task": 3, "seed": 1, "steps": [5]}',
        "[" * 100_000,
        '{"task": 3, "seed": ' + "1" * 5_000 + ', "steps": []}',
    ],
)
def test_what_is_no_log_ends_in_status_2_with_a_line_that_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    assert main(["verify", write(tmp_path / "log.json", text)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("inferencegym verify: ")
    assert said.count("\n") == 1


def test_a_file_that_cannot_be_read_ends_in_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(tmp_path / "nowhere.json")]) == 2
    (tmp_path / "latin.json").write_bytes(b'{"task": "\xe9"}')
    assert main(["verify", str(tmp_path / "latin.json")]) == 2
    assert "cannot be read" in capsys.readouterr().err
