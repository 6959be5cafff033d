"""Scores checked by hand, and what a log must look like."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from env.batch import ServingBatch
from env.serving.family import describe_task
from env.verify import compare_entries
from grader.episode import GRADED_METRICS, MAX_LOG_STEPS, Episode, Scored, read_log
from grader.grader import GraderModule, grade_episode
from grader.kinds import RULES
from grader.kinds.four_term import action_variance
from grader.rule import GradeRule, step_shares
from inferencegym.errors import ForgedLogError, MalformedLogError, UnknownTaskError
from inferencegym.grade_keys import GradeKeys
from inferencegym.tasks import Calibration, TaskSpec, get_calibration, get_task, list_tasks

BY_HAND = Calibration(floor_tps=100.0, optimal_tps=1100.0, max_throughput_tps=1100.0, price=1.0)
TASKS = [t.task_id for t in list_tasks(include_recorded=True)]


def step(batch: int = 32, kv: float = 1.0, **metrics: float) -> dict[str, Any]:
    base = {
        "ttft_p50_ms": 100.0,
        "tokens_per_sec": 600.0,
        "gpu_memory_gb": 30.0,
        "cost_per_1k": 0.01,
        "slo_violations": 0,
    }
    return {"action": {"batch_size": batch, "kv_budget": kv}, "metrics": {**base, **metrics}}


def score(task_id: int | str, log: list[dict[str, Any]]) -> dict[str, Any]:
    return GraderModule().score(task_id, log, BY_HAND)


def test_throughput_halfway_between_floor_and_optimum_scores_one_half() -> None:
    assert score(1, [step(tokens_per_sec=500.0), step(tokens_per_sec=700.0)])["score"] == 0.5


def test_throughput_below_the_floor_scores_zero_and_above_the_optimum_one() -> None:
    assert score(1, [step(tokens_per_sec=50.0)])["score"] == 0.0
    assert score(1, [step(tokens_per_sec=5000.0)])["score"] == 1.0


def test_latency_and_memory_count_half_each() -> None:
    # mean TTFT 150 of 300 ms -> 0.5; peak 38 GB is 2 of 10 GB beyond 36 -> 0.8
    grade = score(2, [step(ttft_p50_ms=100.0, gpu_memory_gb=38.0), step(ttft_p50_ms=200.0)])
    assert grade["breakdown"] == {"ttft": 0.5, "memory": pytest.approx(0.8)}
    assert grade["score"] == pytest.approx(0.65)


def test_memory_below_the_limit_is_full_marks_and_the_peak_decides() -> None:
    assert score(2, [step(gpu_memory_gb=35.9)])["breakdown"]["memory"] == 1.0
    assert score(2, [step(gpu_memory_gb=20.0), step(gpu_memory_gb=46.0)])["breakdown"]["memory"] == 0.0


def test_missed_requests_and_memory_are_weighted_as_stated() -> None:
    # 10 of 25 requests/s missed -> 0.6; peak 38 GB is 2 of 10 GB beyond 36 -> 0.8
    grade = score("sharegpt-served", [step(slo_violations=5, gpu_memory_gb=38.0), step(slo_violations=15)])
    assert grade["breakdown"] == {"slo": pytest.approx(0.6), "memory": pytest.approx(0.8)}
    assert grade["score"] == pytest.approx(0.7 * 0.6 + 0.3 * 0.8)


def test_a_small_pool_that_misses_every_request_scores_nothing_for_its_memory() -> None:
    grade = score("sharegpt-served", [step(slo_violations=500, gpu_memory_gb=20.0)])
    assert grade["breakdown"] == {"slo": -1.0, "memory": 1.0}
    assert grade["score"] == 0.0


def test_the_four_terms_are_weighted_as_stated() -> None:
    # T = 550/1100, S = 1 - 20/100, C = 1 - 2.5/5, A = 1
    log = [step(tokens_per_sec=550.0, slo_violations=20, cost_per_1k=0.5)] * 5
    grade = score(3, log)
    assert grade["breakdown"] == {
        "throughput": 0.5,
        "slo": pytest.approx(0.8),
        "cost": pytest.approx(0.5),
        "stability": 1.0,
    }
    assert grade["score"] == pytest.approx(0.4 * 0.5 + 0.3 * 0.8 + 0.2 * 0.5 + 0.1)


def test_action_variance_by_hand() -> None:
    # batch changes +512, -512: std 512 -> 1.0 per 512; kv constant; 1.0 / 0.5 is cut to 1
    assert action_variance(np.array([0.0, 512.0, 0.0]), np.ones(3)) == 1.0
    # kv changes 0.1 and 0.0: std 0.05 -> 0.05 / 0.5
    assert action_variance(np.full(3, 8.0), np.array([0.5, 0.6, 0.6])) == pytest.approx(0.1)
    assert action_variance(np.array([8.0]), np.array([0.5])) == 0.0


@pytest.mark.parametrize("task_id", TASKS)
def test_the_largest_metrics_of_a_longest_log_still_give_numbers(task_id: int) -> None:
    grade = GraderModule().score(task_id, [step(**GRADED_METRICS)] * MAX_LOG_STEPS)
    assert 0.0 <= grade["score"] <= 1.0
    assert np.isfinite([*grade["breakdown"].values(), *grade["detail"].values()]).all()


def test_an_empty_log_scores_zero_and_says_so() -> None:
    grade = GraderModule().score(1, [])
    assert grade["score"] == 0.0
    assert "Empty" in grade["feedback"]


def test_an_unknown_task_is_refused() -> None:
    with pytest.raises(UnknownTaskError):
        GraderModule().score(77, [])


@pytest.mark.parametrize(
    ("log", "step", "field"),
    [
        ([step(), "x"], 1, None),
        ([{"action": {}}], 0, "metrics"),
        ([{"metrics": {}}], 0, "action"),
        ([step(), step(ttft_p50_ms=float("nan"))], 1, "metrics.ttft_p50_ms"),
        ([step(tokens_per_sec=-1.0)], 0, "metrics.tokens_per_sec"),
        ([step(cost_per_1k="free")], 0, "metrics.cost_per_1k"),  # type: ignore[arg-type]
        ([step(slo_violations=True)], 0, "metrics.slo_violations"),
        ([step(gpu_memory_gb=2e6)], 0, "metrics.gpu_memory_gb"),
        ([step(), step(cost_per_1k=1e308)], 1, "metrics.cost_per_1k"),
        ([step(tokens_per_sec=10**400)], 0, "metrics.tokens_per_sec"),
        ([step(tokens_per_sec=10**5000)], 0, "metrics.tokens_per_sec"),
        ([step(kv=10**5000)], 0, "action.kv_budget"),
        ([step(batch=0)], 0, "action.batch_size"),
        ([step()] * (MAX_LOG_STEPS + 1), None, None),
        ("log", None, None),
    ],
)
def test_a_malformed_log_names_step_and_field(log: Any, step: int | None, field: str | None) -> None:
    with pytest.raises(MalformedLogError) as refused:
        GraderModule().score(3, log)
    assert (refused.value.step, refused.value.field) == (step, field)


def test_the_largest_metrics_that_a_log_may_hold_are_taken_and_what_is_larger_is_refused() -> None:
    score(3, [step(tokens_per_sec=1e15, gpu_memory_gb=1e6)])
    for name, beyond in (("tokens_per_sec", 1.001e15), ("gpu_memory_gb", 1.001e6)):
        with pytest.raises(MalformedLogError) as refused:
            score(3, [step(**{name: beyond})])
        assert refused.value.field == f"metrics.{name}"


def test_the_feedback_names_the_part_with_most_to_gain_and_the_detail_what_was_measured() -> None:
    # T = 550/1100 = 0.5, S = 1 - 20/100 = 0.8, C = 1 - 0.5/5 = 0.9, A = 1: throughput has most to gain.
    log = [step(tokens_per_sec=550.0, slo_violations=40, cost_per_1k=0.5), step(tokens_per_sec=550.0, cost_per_1k=0.0)]
    grade = score(3, log)
    assert "Most to gain: throughput" in grade["feedback"]
    assert grade["detail"]["violating_step_share"] == 0.5
    assert grade["detail"]["mean_slo_violations"] == 20.0
    assert grade["detail"]["total_cost"] == 0.5


def test_step_responses_of_the_server_are_read_as_a_log() -> None:
    plain = step()
    response = {
        "observation": {},
        "reward": 0.1,
        "done": False,
        "info": {"metrics": plain["metrics"], "action_applied": plain["action"]},
    }
    assert score(3, [response] * 3) == score(3, [plain] * 3)


@settings(max_examples=60)
@given(
    task_id=st.sampled_from(TASKS),
    rows=st.lists(
        st.tuples(
            st.floats(0, 1e7),
            st.floats(0, 1e6),
            st.floats(0, 100),
            st.floats(0, 1e4),
            st.integers(0, 10**6),
            st.integers(1, 512),
        ),
        min_size=1,
        max_size=20,
    ),
)
def test_any_log_scores_between_zero_and_one_and_always_the_same(task_id: int, rows: list[tuple[Any, ...]]) -> None:
    log = [
        step(batch=b, ttft_p50_ms=t, tokens_per_sec=s, gpu_memory_gb=g, cost_per_1k=c, slo_violations=v)
        for t, s, g, c, v, b in rows
    ]
    grade = GraderModule().score(task_id, log)
    assert 0.0 <= grade["score"] <= 1.0
    least = -1.0 if get_task(task_id).grade["kind"] in ("autoscaling", "objectives_memory") else 0.0
    assert all(least <= v <= 1.0 for v in grade["breakdown"].values())
    assert isinstance(grade["feedback"], str)
    assert GraderModule().score(task_id, log) == grade


def test_a_log_of_some_steps_says_that_it_is_not_whole() -> None:
    for task_id in TASKS:
        steps = get_task(task_id).episode_length
        assert f"These are 30 of the task's {steps} steps" in score(task_id, [step()] * 30)["feedback"]
        assert "compare whole episodes" not in score(task_id, [step()] * steps)["feedback"]


@pytest.mark.parametrize(
    ("claimed", "field"),
    [
        ({"a": [1.0, 2.0]}, None),
        ({"a": [1.0]}, "a"),
        ({"a": [1.0, 2.0, 3.0]}, "a"),
        ({"a": 1.0}, "a"),
        ({"a": [1.0, 2.5]}, "a[1]"),
        ({}, "a"),
        ({"a": [1.0, 2.0], "b": 0}, "b"),
    ],
)
def test_a_list_in_a_log_differs_by_its_length_or_by_the_entry_that_differs(
    claimed: dict[str, Any], field: str | None
) -> None:
    true = {"a": [1.0, 2.0]}
    if field is None:
        compare_entries(4, claimed, true)
        return
    with pytest.raises(ForgedLogError) as refused:
        compare_entries(4, claimed, true)
    assert (refused.value.step, refused.value.field) == (4, field)


@pytest.mark.parametrize("claimed", [{"a": 1.0}, {"a": [("b", 1.0)]}, {"a": None}, {}])
def test_an_object_in_a_log_is_no_number_and_no_list(claimed: dict[str, Any]) -> None:
    with pytest.raises(ForgedLogError, match="an object") as refused:
        compare_entries(4, claimed, {"a": {"b": 1.0}})
    assert (refused.value.step, refused.value.field) == (4, "a")


# ---------------------------------------------------------------- a new kind of grade


def score_served(_: TaskSpec, __: Calibration, episode: Episode) -> Scored:
    served = 1.0 - episode.slo_violations.mean(axis=-1) / 50.0
    return served, {"served": served}


SERVED = GradeRule(
    keys=GradeKeys,
    score=score_served,
    shares=lambda task, calibration, n_steps: step_shares(served=(1.0, 1.0, {"slo_violations": -1.0 / 50.0})),
    report=lambda task, calibration, episode, parts: ({}, f"{parts['served']:.2f} served."),
    words=lambda task, calibration: "1 - mean slo_violations per second / 50",
)


def test_one_record_gives_a_kind_of_grade_its_score_reward_and_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cast("dict[str, GradeRule]", RULES), "served", SERVED)
    task = replace(get_task(3), grade={"kind": "served"}, episode_length=2)
    assert describe_task(task)["score"] == "1 - mean slo_violations per second / 50"
    episode = read_log([step(slo_violations=10), step(slo_violations=30)])
    graded = grade_episode(task, get_calibration(3), episode)
    assert graded == {"score": 0.6, "breakdown": {"served": 0.6}, "detail": {}, "feedback": "0.60 served."}
    batch = ServingBatch(task, 1, task.config({"reward": "grade"}))
    batch.reset([1])
    batch.step(np.array([[1.0, 0.0, 32.0, 0.0, 0.0]]))
    assert batch.reward[0] == pytest.approx(1.0 - round(batch.metric["slo_violations"][0]) / 50.0)
