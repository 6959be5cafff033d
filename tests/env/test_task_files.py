"""Files of serving tasks: what they may contain, and that every mistake is refused with file, task and key."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from env.serving.family import describe_task
from grader.kinds import RULES
from inferencegym.errors import InvalidConfigError
from inferencegym.grade_keys import Grade
from inferencegym.models import ACTION_FIELDS
from inferencegym.task_files import Knob
from inferencegym.tasks import (
    CALIBRATION_FILE,
    DATA_DIR,
    HARDWARE_CALIBRATION_FILE,
    TASKS_ENV,
    AcceptanceStage,
    Burst,
    Calibration,
    Fleet,
    TaskSpec,
    fingerprint,
    get_calibration,
    get_task,
    list_tasks,
    load_task_file,
)

ROOT = Path(__file__).resolve().parents[2]

LOGNORMAL = {"prompt_len_dist": "lognormal", "prompt_len_mu": 5, "prompt_len_sigma": 1}
OFTEN = {"burst_interval_steps": 40, "burst_duration_steps": 10, "burst_multiplier": 4}
IN_TURN = {"burst_period_steps": 30, "arrival_rate_burst": 20}
DAY = {"relative_rates": [1, 2]}
SCALES = {"kind": "autoscaling", "weights": [0.5, 0.3, 0.2], "missed_share_limit": 0.1, "changes_limit": 20}
AUTOSCALING = {"grade": {**SCALES, "least_replicas": 2}}
CONSTANTS = {"floor_tps": 1, "optimal_tps": 2, "max_throughput_tps": 3, "price": 0.1}

ODD_VALUES: list[Any] = [
    None, True, False, 0, 1, -5, 0.5, 10**400, float("nan"), float("inf"), float("-inf"),
    "", "a", "x\0y", "\ud800", [], {}, [None], ["a"], [[]], [1], [1, 2], [0, 0, 0], [1, 0, 0], ["short"] * 3,
    [float("nan")] * 3, [float("nan"), 0, 1], {"kind": None}, {"kind": []}, {"kind": "throughput", "x": 1}, {"a": 1},
]  # fmt: skip


def entry(**changes: Any) -> dict[str, Any]:
    return {
        "name": "Mine",
        "arrival_rate_rps": 6,
        "prompt_len_dist": "uniform",
        "output_mean_tokens": 180,
        "slo_target_ms": 400,
        **changes,
    }


def four_term(*weights: Any) -> dict[str, Any]:
    return {"grade": {"kind": "four_term", "weights": list(weights)}}


def write(folder: Path, tasks: Any) -> Path:
    path = folder / "mine.json"
    path.write_text(json.dumps({"tasks": tasks}), encoding="utf-8")
    return path


def load(folder: Path, **changes: Any) -> TaskSpec:
    (task,) = load_task_file(write(folder, {"mine": entry(**changes)}))
    return task


def refusal_of(path: Path) -> str:
    """The error for a file; empty if the file is accepted."""
    try:
        load_task_file(path)
    except InvalidConfigError as error:
        return str(error)
    return ""


# ---------------------------------------------------------------- what is accepted


@pytest.mark.parametrize("given", [180, [180], [180, 180, 180]])
def test_the_mean_output_is_a_number_bare_or_in_a_list_or_one_per_class(tmp_path: Path, given: Any) -> None:
    assert load(tmp_path, output_mean_tokens=given).classes == load(tmp_path, output_mean_tokens=180.0).classes


def test_five_keys_are_all_that_a_task_must_have(tmp_path: Path) -> None:
    task = load(tmp_path)
    assert (task.fleet.n_replicas, task.burst, task.gym_id) == (1, None, "Mine")


def test_a_hidden_task_is_listed_only_with_all_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TASKS_ENV, str(write(tmp_path, {"mine": entry(hidden=True), "other": entry(gym_id="Other")})))
    assert {"mine", "other"} & {task.task_id for task in list_tasks()} == {"other"}
    assert {"mine", "other"} <= {task.task_id for task in list_tasks(include_recorded=True)}


def test_a_users_task_that_scales_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TASKS_ENV, str(write(tmp_path, {"mine": entry(max_replicas=4)})))
    assert {"mine", "autoscale"} & {task.task_id for task in list_tasks()} == {"mine"}


@pytest.mark.parametrize(("gap", "static"), [(None, None), (-0.001, True), (0.0199, True), (0.02, False)])
def test_a_task_is_static_if_adapting_gains_less_than_two_hundredths(
    tmp_path: Path, gap: float | None, static: bool | None
) -> None:
    task = load(tmp_path, adaptive_gap=gap)
    assert task.static is static
    assert (describe_task(task)["adaptive_gap"], describe_task(task)["static"]) == (gap, static)
    assert task.heading == "task mine" + (" (static)" if static else "")


@pytest.mark.parametrize("missing", list(entry()))
def test_a_task_without_one_of_the_five_keys_is_refused(tmp_path: Path, missing: str) -> None:
    raw = entry()
    del raw[missing]
    with pytest.raises(InvalidConfigError, match=rf"mine\.json: task 'mine': {missing} is missing: it must be "):
        load_task_file(write(tmp_path, {"mine": raw}))


def test_acceptance_of_drafts_is_given_for_all_classes_or_for_each_from_a_step_on(tmp_path: Path) -> None:
    stages = [{"rate": 0.8}, {"from_step": 12, "rate": [0.3, 0.5, 0.6]}]
    (task,) = load_task_file(write(tmp_path, {"mine": entry(draft_acceptance=stages)}))
    assert task.draft_acceptance == (AcceptanceStage(0, (0.8, 0.8, 0.8)), AcceptanceStage(12, (0.3, 0.5, 0.6)))
    for wrong, named in (
        ([{"from_step": 1, "rate": 0.8}], "from_step rises, from 0"),
        ([{"rate": 0.8}, {"from_step": 5, "rate": 0.3}, {"from_step": 5, "rate": 0.4}], "from_step rises, from 0"),
        ([{"rate": 1.2}], "from 0 to 1"),
        ([{"rate": [0.1, 0.2]}], "1 or 3"),
        ([], "draft_acceptance"),
    ):
        with pytest.raises(InvalidConfigError, match=named):
            load_task_file(write(tmp_path, {"mine": entry(draft_acceptance=wrong)}))


def test_the_kinds_of_grades_that_a_task_may_name_are_those_of_the_grader() -> None:
    by_kind = {get_args(keys.model_fields["kind"].annotation)[0]: keys for keys in get_args(get_args(Grade)[0])}
    assert by_kind == {kind: rule.keys for kind, rule in RULES.items()}


def test_the_knobs_that_a_task_may_offer_are_those_of_an_action() -> None:
    assert get_args(Knob) == tuple(ACTION_FIELDS)


def test_constants_measured_beside_a_file_come_before_those_of_its_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TASKS_ENV, str(write(tmp_path, {"mine": entry(calibration=CONSTANTS)})))
    assert get_calibration("mine") == Calibration(1, 2, 3, 0.1)
    measured = {"floor_tps": 10, "optimal_tps": 20, "max_throughput_tps": 30, "price": 0.5}
    (tmp_path / "mine.calibration.json").write_text(json.dumps({"tasks": {"mine": measured}}), encoding="utf-8")
    assert get_calibration("mine") == Calibration(10, 20, 30, 0.5)


def test_the_shipped_constants_were_measured_for_the_shipped_tasks() -> None:
    for file in (CALIBRATION_FILE, HARDWARE_CALIBRATION_FILE):
        entries = json.loads(file.read_text(encoding="utf-8"))["tasks"]
        assert {key: entry["fingerprint"] for key, entry in entries.items()} == {
            key: fingerprint(get_task(key)) for key in entries
        }


@pytest.mark.parametrize("where", ["beside the file", "in the entry"])
def test_constants_of_a_task_that_has_changed_since_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    measured = {**CONSTANTS, "fingerprint": fingerprint(load(tmp_path))}

    def define(name: str, **changes: Any) -> None:
        inside = {"calibration": measured} if where == "in the entry" else {}
        path = tmp_path / name
        path.write_text(json.dumps({"tasks": {"mine": entry(**inside, **changes)}}), encoding="utf-8")
        if not inside:
            beside = json.dumps({"tasks": {"mine": measured}})
            path.with_suffix(".calibration.json").write_text(beside, encoding="utf-8")
        monkeypatch.setenv(TASKS_ENV, str(path))

    define("worded.json", description="Another text.", adaptive_gap=0.1)
    assert get_calibration("mine") == Calibration(1, 2, 3, 0.1)
    for i, change in enumerate(({"n_replicas": 2}, {"slo_target_ms": 301}, {"cost_budget_episode": 6})):
        define(f"changed-{i}.json", **change)
        with pytest.raises(InvalidConfigError) as refused:
            get_calibration("mine")
        assert str(refused.value) == (
            "task 'mine' has changed since it was calibrated: run `inferencegym calibrate --task mine`"
        )


def test_the_fingerprint_of_a_task_with_a_trace_is_that_of_its_requests(tmp_path: Path) -> None:
    task = get_task("azure-conv")
    moved = tmp_path / "moved.npz"
    moved.write_bytes(Path(str(task.trace)).read_bytes())
    assert fingerprint(replace(task, trace=str(moved))) == fingerprint(task)
    other = str(get_task("azure-code").trace)
    assert fingerprint(replace(task, trace=other)) != fingerprint(task)


def test_a_grade_of_throughput_needs_an_optimum_above_its_floor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the best and the worst agent would both score 1.0."""
    equal = {**CONSTANTS, "floor_tps": 2}
    monkeypatch.setenv(
        TASKS_ENV, str(write(tmp_path, {"mine": entry(calibration=equal, grade={"kind": "throughput"})}))
    )
    with pytest.raises(InvalidConfigError, match=r"optimal_tps=2.0 is not allowed: it must be above floor_tps"):
        get_calibration("mine")


def test_a_task_without_constants_and_an_unknown_one_have_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TASKS_ENV, str(write(tmp_path, {"mine": entry()})))
    for task_id in ("mine", "nobodys"):
        with pytest.raises(InvalidConfigError):
            get_calibration(task_id)


def test_floods_come_in_turn_or_often_as_their_keys_say(tmp_path: Path) -> None:
    # 30 s at 6/s, then 30 s at 20/s, and so on: a flood every 60 s, the first from second 30.
    in_turn = load(tmp_path, **IN_TURN).burst
    assert in_turn == Burst(rate_rps=20, interval_steps=60, duration_steps=30, offset_steps=30)
    # Four times 6/s for 10 s in every 40 s.
    often = load(tmp_path, **OFTEN, burst_offset_steps=5).burst
    assert often == Burst(rate_rps=24, interval_steps=40, duration_steps=10, offset_steps=5)
    # By default, the first flood is at the end of the first interval.
    first = load(tmp_path, **OFTEN).burst
    assert first is not None
    assert first.offset_steps == 30
    assert load(tmp_path, **OFTEN, burst_enabled=False).burst is None


def test_prompts_are_as_their_kind_says_whatever_other_keys_say(tmp_path: Path) -> None:
    uniform = load(tmp_path, prompt_len_min=10, prompt_len_max=20, prompt_len_mu=5, prompt_len_sigma=1)
    lognormal = load(tmp_path, **LOGNORMAL, prompt_len_min=10, prompt_len_max=20)
    assert [(c.prompt.kind, c.prompt.low, c.prompt.high) for c in uniform.classes] == [("uniform", 10, 20)] * 3
    assert [(c.prompt.kind, c.prompt.mu, c.prompt.sigma) for c in lognormal.classes] == [("lognormal", 5, 1)] * 3
    assert load(tmp_path, expected_baseline=[0.2, 0.4]).expected_baseline == (0.2, 0.4)


def test_outputs_are_lognormal_with_the_mean_and_the_variation_of_the_entry(tmp_path: Path) -> None:
    # With cv = 1, sigma^2 = ln 2, and the median is the mean over the square root of 2.
    dist = load(tmp_path, output_mean_tokens=180, output_cv=1).classes[0].output
    assert dist.sigma == pytest.approx(math.sqrt(math.log(2)))
    assert math.exp(dist.mu) == pytest.approx(180 / math.sqrt(2))


def test_every_default_of_a_task_is_the_documented_one(tmp_path: Path) -> None:
    task = load(tmp_path)
    for fleet in (task.fleet, Fleet()):
        assert (fleet.n_replicas, fleet.queue_limit, fleet.base_accept_rate, fleet.max_replicas) == (1, 512, 0.65, None)
        assert (fleet.restart_s, fleet.start_s, fleet.load_gb_per_s) == (2.0, 2.0, 4.0)
    assert (task.episode_length, task.cost_budget, task.trace_speed, task.recorded) == (200, 5.0, 1.0, False)
    assert task.classes[0].output.sigma == pytest.approx(math.sqrt(math.log(1 + 0.6**2)))
    assert [(c.prompt.low, c.prompt.high, c.output.high) for c in task.classes] == [(1.0, 8192.0, 2048.0)] * 3
    bimodal = load(tmp_path, prompt_len_dist="bimodal", class_prompt=["short", "long", "short"])
    assert [(c.prompt.low, c.prompt.high) for c in bimodal.classes] == [(32.0, 128.0), (4096.0, 8192.0), (32.0, 128.0)]
    assert (task.grade["kind"], task.grade["weights"]) == ("four_term", [0.4, 0.3, 0.2, 0.1])
    day = load(tmp_path, day=DAY).day
    assert day is not None
    assert (day.forecast_error, day.surges, day.surge_multiplier, day.surge_duration_steps) == (0.0, 0.0, 1.0, 1)


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        # Keys and text
        ({"colour": "red"}, "unknown field colour: the fields are name, "),
        ({"n_replica": 2}, "unknown field n_replica: did you mean n_replicas? The fields"),
        ({"grade": {"kind": "four_term", "weight": [1]}}, "unknown field grade.weight: did you mean weights?"),
        ({"reward": {"alfa": 1}}, "unknown field reward.alfa: did you mean alpha?"),
        ({"name": 3}, "name=3 is not allowed: it must be a text"),
        ({"gym_id": "Lunch Desk"}, "gym_id='Lunch Desk' is not allowed: it must be made of letters, digits"),
        ({"recorded": "false"}, "recorded='false' is not allowed: it must be true or false"),
        # Outputs
        ({"output_mean_tokens": ["a"]}, "output_mean_tokens[0]='a' is not allowed: it must be a number from 1 to"),
        ({"output_mean_tokens": [-5]}, "output_mean_tokens[0]=-5 is not allowed: it must be a number from 1 to"),
        ({"output_mean_tokens": 0}, "output_mean_tokens=0 is not allowed: it must be a number from 1 to"),
        ({"output_mean_tokens": True}, "output_mean_tokens=True is not allowed: it must be a number from 1 to"),
        ({"output_mean_tokens": None}, "output_mean_tokens=None is not allowed: it must be a number from 1 to"),
        ({"output_mean_tokens": [1, 2]}, "output_mean_tokens=[1, 2] is not allowed: it must be an array of 1 or 3 num"),
        ({"output_mean_tokens": 3000}, "output_mean_tokens=3000 is not allowed: it must be at most output_max_tokens"),
        # values that are not numbers
        ({"arrival_rate_rps": float("nan")}, "arrival_rate_rps=nan is not allowed: it must be a number from 0.01"),
        ({"slo_target_ms": float("inf")}, "slo_target_ms=inf is not allowed: it must be a number from 1 to"),
        ({"output_cv": float("nan")}, "output_cv=nan is not allowed: it must be a number from 0.01 to 5"),
        ({"complexity_penalty": [0, float("nan"), 0]}, "complexity_penalty[1]=nan is not allowed"),
        ({"priority_mix": [float("nan"), 0, 1]}, "priority_mix[0]=nan is not allowed"),
        # Objectives
        ({"slo_batch_ms": "x"}, "slo_batch_ms='x' is not allowed: it must be a number from 1 to"),
        ({"slo_interactive_ms": -200}, "slo_interactive_ms=-200 is not allowed: it must be a number from 1 to"),
        ({"slo_best_effort_ms": float("nan")}, "slo_best_effort_ms=nan is not allowed"),
        ({"slo_target_ms": -1}, "slo_target_ms=-1 is not allowed: it must be a number from 1 to"),
        # Classes
        ({"priority_mix": 1}, "priority_mix=1 is not allowed: it must be an array of 3 "),
        ({"priority_mix": None}, "priority_mix=None is not allowed: it must be an array of 3 "),
        ({"priority_mix": [1]}, "priority_mix=[1] is not allowed: it must be an array of 3 "),
        ({"priority_mix": [0.5, 0.2, 0.2]}, "priority_mix=[0.5, 0.2, 0.2] is not allowed: it must be an array of 3 sh"),
        ({"burst_priority_mix": [2, -1, 0]}, "burst_priority_mix[0]=2 is not allowed: it must be a number from 0 to 1"),
        ({"complexity_penalty": [0.1]}, "complexity_penalty=[0.1] is not allowed: it must be an array of 3, each a nu"),
        ({"complexity_penalty": 0.1}, "complexity_penalty=0.1 is not allowed: it must be an array of 3, each a number"),
        ({"class_prompt": ["short"]}, "class_prompt=['short'] is not allowed: it must be an array of 3, each one of s"),
        ({"class_prompt": ["short", "long", "tall"]}, "class_prompt[2]='tall' is not allowed: it must be one of short"),
        # Prompts
        ({"prompt_len_dist": "normal"}, "prompt_len_dist='normal' is not allowed: it must be one of uniform, lognorma"),
        ({"prompt_len_dist": ["uniform"]}, "prompt_len_dist=['uniform'] is not allowed: it must be one of uniform"),
        ({"prompt_len_dist": "trace"}, "trace is missing: it must be "),
        ({"prompt_len_min": 900, "prompt_len_max": 90}, "prompt_len_min=900 is not allowed: it must be at most"),
        ({**LOGNORMAL, "prompt_len_clamp_min": 9000}, "prompt_len_clamp_min=9000 is not allowed: it must be at most"),
        ({"short_prompt_min": 200}, "short_prompt_min=200 is not allowed: it must be at most short_prompt_max"),
        ({"long_prompt_max": 200}, "long_prompt_min=4096 is not allowed: it must be at most long_prompt_max"),
        ({**LOGNORMAL, "prompt_len_sigma": None}, "prompt_len_sigma is missing: it must be "),
        # Floods
        ({"burst_enabled": True}, "burst_enabled=True is not allowed: it must be given with all keys of one kind of"),
        ({"burst_multiplier": 4}, "burst_multiplier=4 is not allowed: it must be given with all keys of one kind of"),
        ({"burst_offset_steps": 4}, "burst_offset_steps=4 is not allowed: it must be given with all keys of one ki"),
        ({**OFTEN, **IN_TURN}, "burst_period_steps=30 is not allowed: it must be given with all keys of one kind of f"),
        ({**OFTEN, "burst_duration_steps": 41}, "burst_duration_steps=41 is not allowed: it must be at most burst_int"),
        ({**OFTEN, "burst_interval_steps": 9.5}, "burst_interval_steps=9.5 is not allowed: it must be an integer"),
        ({**IN_TURN, "burst_offset_steps": -1}, "burst_offset_steps=-1 is not allowed: it must be an integer from 0"),
        # several mistakes at once
        ({"prompt_len_dist": "uniform", **OFTEN, **IN_TURN, "burst_enabled": True}, "burst_period_steps=30 is not all"),
        # Fleet and rules
        ({"n_replicas": 2.5}, "n_replicas=2.5 is not allowed: it must be an integer from 1 to 4096"),
        ({"n_replicas": "2"}, "n_replicas='2' is not allowed: it must be an integer from 1 to 4096"),
        ({"active_actions": None}, "active_actions=None is not allowed: it must be an array of 1 to 5 different ones"),
        ({"active_actions": []}, "active_actions=[] is not allowed: it must be an array of 1 to 5 different ones"),
        ({"active_actions": "kv_budget"}, "active_actions='kv_budget' is not allowed: it must be an array of 1 to 5"),
        ({"active_actions": ["voltage"]}, "active_actions[0]='voltage' is not allowed: it must be one of kv_budget"),
        ({"active_actions": ["batch_size"] * 2}, "active_actions=['batch_size', 'batch_size'] is not allowed"),
        ({"episode_length": 0}, "episode_length=0 is not allowed: it must be an integer from 1 to 5000"),
        ({"expected_baseline": [0.2]}, "expected_baseline=[0.2] is not allowed: it must be an array of 2"),
        ({"expected_baseline": [0.4, 0.2]}, "expected_baseline=[0.4, 0.2] is not allowed: it must be the lowest"),
        # Reward
        ({"reward": 1}, "reward=1 is not allowed: it must be an object with the fields alpha, beta, gamma, delta"),
        ({"reward": {"omega": 1}}, "unknown field reward.omega: the fields are alpha, beta"),
        ({"reward": {"alpha": 2}}, "reward.alpha=2 is not allowed: it must be a number from 0 to 1"),
        ({"reward": {"gamma": 0.7}}, "reward: beta + gamma + delta must not exceed 1, so that rewards stay in"),
        # Grade
        ({"grade": None}, "grade=None is not allowed: it must be an object whose kind is one of autoscaling,"),
        ({"grade": {"kind": "four_terms"}}, "grade.kind='four_terms' is not allowed: it must be one of throughput"),
        ({"grade": {"kind": ["throughput"]}}, "grade.kind=['throughput'] is not allowed: it must be one of throughput"),
        ({"grade": {"kind": "four_term"}}, "grade.weights is missing: it must be an array of 4 shares"),
        ({"grade": {"kind": "throughput", "weights": [1]}}, "unknown field grade.weights: the fields are kind"),
        ({"grade": {"kind": "latency_memory"}}, "grade.ttft_target_ms is missing: it must be "),
        (four_term(0.4, 0.3, 0.3), "grade.weights=[0.4, 0.3, 0.3] is not allowed: it must be an array of 4"),
        ({"grade": {"kind": "objectives_memory"}}, "grade.weights is missing: it must be an array of 2 shares"),
        (four_term(0.4, 0.3, 0.2, 0.2), "grade.weights=[0.4, 0.3, 0.2, 0.2] is not allowed: it must be an array of 4"),
        (four_term(0.4, 0.3, 0.2, "0.1"), "grade.weights[3]='0.1' is not allowed: it must be a number from 0 to 1"),
        # Scaling
        (AUTOSCALING, "max_replicas is missing: it must be the most replicas, which the autoscaling grade needs"),
        ({**AUTOSCALING, "max_replicas": 2}, "grade.least_replicas=2 is not allowed: it must be less than max_"),
        ({"max_replicas": 3, "n_replicas": 4}, "n_replicas=4 is not allowed: it must be at most max_replicas"),
        ({"day": {"relative_rates": [1]}}, "day.relative_rates=[1] is not allowed: it must be an array of 2 to 96"),
        ({**LOGNORMAL, "day": DAY, "trace": "gone.npz"}, "day='given' is not allowed: it must be left out with"),
        ({"hardware": "nope"}, "hardware='nope' is not in the catalogue: choose one of a100-40gb, "),
        # Trace and constants
        ({"trace": "gone.npz"}, "trace='gone.npz' is not allowed: it must be a packed trace, as `inferencegym import-"),
        ({"trace": "mine.json"}, "trace='mine.json' is not allowed: it must be a packed trace, as `inferencegym impor"),
        ({"trace": 3}, "trace=3 is not allowed: it must be a text"),
        ({"calibration": 3}, "calibration=3 is not allowed: it must be an object with the fields floor_tps"),
        ({"calibration": {**CONSTANTS, "price": 0}}, "calibration.price=0 is not allowed: it must be a number from"),
        ({"calibration": {"floor_tps": 1}}, "calibration.optimal_tps is missing"),
    ],
)  # fmt: skip
def test_a_mistake_is_refused_with_file_task_key_value_and_what_is_allowed(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidConfigError) as refused:
        load(tmp_path, **changes)
    assert str(refused.value).startswith(f"{tmp_path / 'mine.json'}: task 'mine': {said}")


SHIPPED = json.loads((DATA_DIR / "workload_configs.json").read_text(encoding="utf-8"))["tasks"]


@pytest.mark.parametrize("key", sorted({key for task in SHIPPED.values() for key in task} | {"trace", "calibration"}))
def test_whatever_stands_at_a_key_is_taken_or_refused_by_name(tmp_path: Path, key: str) -> None:
    for raw in SHIPPED.values():
        for value in ODD_VALUES:
            path = write(tmp_path, {"mine": {**raw, key: value}})
            said = refusal_of(path)
            assert not said or said.startswith(f"{path}: task 'mine': "), value


@pytest.mark.parametrize("raw", ODD_VALUES)
def test_an_entry_that_is_not_a_task_is_refused_by_name(tmp_path: Path, raw: Any) -> None:
    with pytest.raises(InvalidConfigError, match=r"mine\.json: task '²': "):
        load_task_file(write(tmp_path, {"²": raw}))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "Expecting"),
        ("[]", "must be an object with the fields tasks"),
        ('{"task": {}}', r"unknown field task: did you mean tasks\?"),
        ("{}", "tasks is missing"),
        ('{"tasks": 3}', "tasks=3"),
        ('{"tasks": {"mine": {"name": "A"}, "mine": {"name": "B"}}}', "the key 'mine' is repeated in one object"),
    ],
)
def test_what_is_not_a_task_file_is_refused_by_name(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InvalidConfigError, match=rf"broken\.json: not a task file \(.*{why}.*'tasks'"):
        load_task_file(path)


@pytest.mark.parametrize(
    ("tasks", "said"),
    [
        (
            {"1": entry()},
            r"mine\.json: task id 1 is already taken by .*workload_configs\.json; choose another, or leave",
        ),
        ({"mine": entry(gym_id="StaticUniform")}, "gym_id='StaticUniform' is already used by task '1'"),
        ({"lunch-desk": entry(), "lunch_desk": entry()}, "gym_id='LunchDesk' is already used by task 'lunch-desk'"),
    ],
)
def test_a_name_that_is_taken_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tasks: dict[str, Any], said: str
) -> None:
    monkeypatch.setenv(TASKS_ENV, str(write(tmp_path, tasks)))
    with pytest.raises(InvalidConfigError, match=said):
        list_tasks()


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_mistake_stops_the_start_of_the_server_with_one_line(tmp_path: Path, workers: str) -> None:
    path = write(tmp_path, {"mine": entry(output_mean_tokens=["a"])})
    started = subprocess.run(
        [sys.executable, "-m", "server.app"],
        cwd=ROOT,
        env={
            **os.environ,
            TASKS_ENV: str(path),
            "INFERENCEGYM_WORKERS": workers,
            "INFERENCEGYM_DATA_DIR": str(tmp_path),
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert started.returncode == 1
    (line,) = started.stderr.splitlines()
    said = json.loads(line)["message"]
    assert said.startswith(f"The server was not started. {path}: task 'mine': output_mean_tokens[0]='a' is not allowed")
