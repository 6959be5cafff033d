"""The traffic environment: the published document's examples, the episode protocol, and scalar against batch."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from env.episode_files import verify_log
from env.family import EpisodeRecord
from env.traffic.env import TrafficBatch, TrafficEnv
from env.traffic.family import FAMILY
from env.traffic.grader import grade_traffic
from env.traffic.tasks import CONFIG_FIELDS, get_traffic_task, list_traffic_tasks
from grader.episode import MAX_METRIC
from inferencegym.errors import (
    EpisodeDoneError,
    InvalidActionError,
    InvalidConfigError,
    MalformedLogError,
    NotResetError,
    UnknownTaskError,
)
from inferencegym.traffic import ACTION_NAMES, STATE_FIELDS, TrafficAction

TASK_IDS = [task.task_id for task in list_traffic_tasks()]
ACTION = st.sampled_from(ACTION_NAMES)


def play(env: TrafficEnv, actions: list[str]) -> dict[str, Any]:
    """Step through the actions, repeating them if necessary; returns the last info."""
    i = 0
    info: dict[str, Any] = {}
    while not env.done:
        info = env.step(actions[i % len(actions)])[3]
        i += 1
    return info


def started(task_id: str = "task_easy", **config: float) -> TrafficEnv:
    env = TrafficEnv(task_id, config=config)
    env.reset()
    return env


# ---------------------------------------------------------------- the document's examples


def test_request_rate_announces_the_spike_one_step_ahead() -> None:
    env = started()
    seen = [env.step("drop_aggressive")[0].request_rate for _ in range(15)]
    assert seen == [40.0] * 9 + [160.0] * 5 + [40.0]


def test_the_rate_that_was_announced_is_the_one_that_comes() -> None:
    env = started("task_hard")
    announced = env.observation().request_rate
    while not env.done:
        state, _, _, info = env.step("drop_aggressive")
        assert info["incoming_requests"] == announced
        announced = state.request_rate


def test_a_crash_ends_the_episode_with_minus_ten() -> None:
    env = started()
    for _ in range(10):
        env.step("allow_all")
    state, reward, done, info = env.step("allow_all")
    assert (state.crashed, reward, done, info["final_score"]) == (True, -10.0, True, 0.0)


def test_an_unknown_task_is_answered_with_the_ids_that_exist() -> None:
    with pytest.raises(UnknownTaskError, match="task_easy, task_medium, task_hard") as caught:
        TrafficEnv("task_nightmare")
    assert caught.value.http_status == 400


# ---------------------------------------------------------------- misuse


def test_a_step_before_the_first_reset_is_refused() -> None:
    with pytest.raises(NotResetError):
        TrafficEnv().step("allow_all")


def test_a_step_after_the_end_is_refused_and_changes_nothing() -> None:
    env = started()
    play(env, ["throttle_40"])
    before = env.state()
    with pytest.raises(EpisodeDoneError):
        env.step("throttle_40")
    assert env.state() == before


@pytest.mark.parametrize(
    "action", ["allow", "", None, 1, {}, {"action": None}, {"action": "allow_all", "rate": 1}, ["allow_all"]]
)
def test_a_wrong_action_is_refused_with_the_four_names_and_no_step_is_taken(action: Any) -> None:
    env = started()
    with pytest.raises(InvalidActionError) as refused:
        env.step(action)
    # an unknown field is refused with a list of the known ones
    field, named = ("rate", ["action"]) if isinstance(action, dict) and "rate" in action else ("action", ACTION_NAMES)
    assert refused.value.field == field
    assert all(name in str(refused.value) for name in named)
    assert env.state()["step_count"] == 0


@pytest.mark.parametrize("name", CONFIG_FIELDS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1, 10**12, True, "100", [100]])
def test_a_setting_out_of_range_is_refused_with_field_value_and_range(name: str, value: Any) -> None:
    with pytest.raises(InvalidConfigError) as caught:
        TrafficEnv().reset(config={name: value})
    assert caught.value.field == f"config.{name}"
    assert f"{CONFIG_FIELDS[name].low:g}" in str(caught.value)


def test_a_refused_reset_leaves_the_running_episode_alone() -> None:
    env = started()
    env.step("throttle_70")
    before = env.state()
    for wrong in ({"task_id": "nope"}, {"config": {"max_queue": 0}}, {"task_id": "task_hard", "seed": -1}):
        with pytest.raises((UnknownTaskError, InvalidConfigError)):
            env.reset(**wrong)
        assert env.state() == before


@pytest.mark.parametrize("seed", [-1, 1.5, True, 2**63])
def test_a_wrong_seed_is_refused(seed: Any) -> None:
    with pytest.raises(InvalidConfigError) as refused:
        TrafficEnv().reset(seed=seed)
    assert refused.value.field == "seed"


# ---------------------------------------------------------------- settings


def test_a_setting_left_out_or_null_keeps_its_default() -> None:
    env = started(server_capacity=200.0)
    assert env.config_dict() == {
        "server_capacity": 200.0,
        "base_latency": 50.0,
        "crash_load_ratio": 1.3,
        "max_queue": 500,
        "traffic_scale": 1.0,
    }
    env.reset(config={"server_capacity": None})
    assert env.config_dict()["server_capacity"] == 100.0


def test_twice_the_capacity_survives_what_crashes_the_default_server() -> None:
    assert play(started(server_capacity=200.0), ["allow_all"])["final_score"] == 1.0
    assert play(started(), ["allow_all"])["final_score"] == 0.0


def test_a_reset_without_settings_keeps_those_of_the_episode_before() -> None:
    env = started(traffic_scale=0.5)
    assert env.reset().request_rate == 20.0
    assert env.reset(config={}).request_rate == 40.0


# ---------------------------------------------------------------- the episode protocol


@pytest.mark.parametrize("task_id", TASK_IDS)
@settings(max_examples=20)
@given(actions=st.lists(ACTION, min_size=1, max_size=50), capacity=st.floats(20, 400), scale=st.floats(0.1, 4))
def test_task_seed_settings_and_actions_are_the_whole_episode(
    task_id: str, actions: list[str], capacity: float, scale: float
) -> None:
    env = TrafficEnv(task_id, seed=7, config={"server_capacity": capacity, "traffic_scale": scale})
    env.reset()
    play(env, actions)
    record = json.loads(json.dumps([env.task_id, env.seed, env.config_dict(), env.actions]))

    again = TrafficEnv(record[0])
    again.reset(seed=record[1], config=record[2], session_id=env.session_id)
    for action in record[3]:
        again.step(action)
    assert again.episode_log == env.episode_log
    assert again.state() == env.state()


def test_a_stored_record_is_replayed_to_the_same_episode() -> None:
    env = started("task_hard", server_capacity=130.0)
    play(env, ["throttle_70", "throttle_40"])
    record = FAMILY.episode(env.task_id, env.seed, env.config_dict(), env.actions)
    again = FAMILY.replay(EpisodeRecord.from_start(record.start_json(), record.actions))
    assert again.episode_log == env.episode_log
    assert again.state() | {"session_id": env.session_id} == env.state()


@pytest.mark.parametrize("task_id", TASK_IDS)
@settings(max_examples=20)
@given(actions=st.lists(ACTION, min_size=1, max_size=50))
def test_the_log_alone_gives_the_final_score_again(task_id: str, actions: list[str]) -> None:
    env = started(task_id)
    info = play(env, actions)
    assert grade_traffic(task_id, json.loads(json.dumps(env.episode_log)))["score"] == info["final_score"]


def test_no_seed_changes_an_episode() -> None:
    logs = []
    for seed in (0, 1, 2**63 - 1):
        env = TrafficEnv("task_medium")
        env.reset(seed=seed)
        play(env, ["throttle_70", "throttle_40"])
        logs.append(env.episode_log)
        assert env.state()["seed"] == seed
    assert logs[0] == logs[1] == logs[2]


def test_another_task_starts_with_its_own_settings() -> None:
    env = started(traffic_scale=0.5)
    assert env.reset(task_id="task_medium").request_rate == 50.0


def test_every_reset_has_a_session_id_of_its_own_unless_one_is_given() -> None:
    env = TrafficEnv()
    env.reset()
    first = env.session_id
    env.reset()
    assert first
    assert env.session_id not in ("", first)
    env.reset(session_id="mine")
    assert env.session_id == "mine"


def test_the_state_says_where_the_episode_stands() -> None:
    env = started()
    _, reward, _, _ = env.step(TrafficAction.THROTTLE_70)
    state = env.state()
    assert state.items() >= env.observation_dict().items()
    expected = {"task_id": "task_easy", "seed": 42, "step_count": 1, "cumulative_reward": reward, "done": False}
    assert state.items() >= expected.items()
    assert state["workload_phase"] == "steady"


# ---------------------------------------------------------------- batch


@pytest.mark.parametrize("task_id", TASK_IDS)
@settings(max_examples=15)
@given(plans=st.lists(st.lists(st.integers(0, 3), min_size=50, max_size=50), min_size=2, max_size=5))
def test_a_row_of_a_batch_is_the_episode_played_alone(task_id: str, plans: list[list[int]]) -> None:
    task = next(t for t in list_traffic_tasks() if t.task_id == task_id)
    together = TrafficBatch(task, len(plans))
    alone = [TrafficBatch(task, 1) for _ in plans]
    for t in range(task.episode_length):
        result = together.step(np.array([plan[t] for plan in plans]))
        singles = [batch.step(np.array([plan[t]])) for batch, plan in zip(alone, plans, strict=True)]
        for row, single in enumerate(singles):
            assert result.observation[row].tolist() == single.observation[0].tolist()
            assert (result.reward[row], result.done[row]) == (single.reward[0], single.done[0])
    assert together.final_score().tolist() == [float(batch.final_score()[0]) for batch in alone]


def test_observations_keep_the_order_and_bounds_of_the_published_fields() -> None:
    batch = TrafficBatch(next(iter(list_traffic_tasks())), 3)
    row = batch.observation()[0]
    assert dict(zip(STATE_FIELDS, row.tolist(), strict=True)) == TrafficEnv().reset().to_dict()
    for value, field in zip(row, STATE_FIELDS.values(), strict=True):
        assert field.low <= value <= field.high


@pytest.mark.parametrize("actions", [[0, 0], [0, 0, 4], [0, 0, -1], [0.0, 1.0, 2.0], 0])
def test_wrong_actions_of_a_batch_are_refused(actions: Any) -> None:
    with pytest.raises(InvalidActionError):
        TrafficBatch(next(iter(list_traffic_tasks())), 3).step(actions)


def test_a_row_whose_episode_is_over_stays_as_it_is_until_it_is_reset() -> None:
    batch = TrafficBatch(get_traffic_task("task_easy"), 2)
    first = batch.observation()
    cautious, careless = ACTION_NAMES.index("throttle_40"), ACTION_NAMES.index("allow_all")
    for _ in range(11):
        result = batch.step(np.array([cautious, careless]))
    assert (result.reward.tolist(), result.done.tolist()) == ([0.4, -10.0], [False, True])
    crashed, score = result.observation[1].tolist(), batch.final_score()[1]
    result = batch.step(np.array([cautious, cautious]))
    assert (result.observation[1].tolist(), result.reward[1], batch.final_score()[1]) == (crashed, 0.0, score)

    observation = batch.reset(rows=np.array([False, True]))
    assert observation[1].tolist() == first[1].tolist()
    assert observation[0, list(STATE_FIELDS).index("step")] == 12
    assert batch.done.tolist() == [False, False]


# ---------------------------------------------------------------- grading logs


def finished_log(task_id: str = "task_easy") -> list[dict[str, Any]]:
    env = started(task_id)
    play(env, ["throttle_40"])
    log: list[dict[str, Any]] = json.loads(json.dumps(env.episode_log))
    return log


def test_an_empty_log_scores_nothing_and_says_so() -> None:
    result = grade_traffic("task_hard", [])
    assert result["score"] == 0.0
    assert "empty" in result["feedback"]


@pytest.mark.parametrize("task_id", TASK_IDS)
def test_a_log_cut_short_scores_less_than_the_whole(task_id: str) -> None:
    log = finished_log(task_id)
    assert grade_traffic(task_id, log[:5])["score"] < grade_traffic(task_id, log)["score"]


def test_the_breakdown_shows_what_the_score_is_made_of() -> None:
    result = grade_traffic("task_hard", finished_log("task_hard"))
    parts = result["breakdown"]
    assert result["score"] == pytest.approx(0.7 * parts["throughput"] + 0.3 * parts["short_queue_share"])
    assert "All 50 steps survived" in result["feedback"]


@pytest.mark.parametrize(
    "change",
    [
        {"timestep": 3},
        {"timestep": None},
        {"timestep": True},
        {"action": {"action": "wait"}},
        {"metrics": None},
        {"metrics.avg_latency": math.nan},
        {"metrics.avg_latency": "58"},
        {"metrics.avg_latency": 10**400},
        {"metrics.avg_latency": 10**5000},
        {"metrics.incoming_requests": 1e308},
        {"metrics.queue_length": -1},
        {"metrics.allowed_requests": 41.0},
        {"metrics.crashed": 0},
    ],
)
@pytest.mark.parametrize("at", [0, 3])
def test_a_damaged_log_is_refused_with_step_and_field(at: int, change: dict[str, Any]) -> None:
    log = finished_log()
    ((field, value),) = change.items()
    target = log[at]["metrics"] if field.startswith("metrics.") else log[at]
    target[field.removeprefix("metrics.")] = value
    with pytest.raises(MalformedLogError) as refused:
        grade_traffic("task_easy", log)
    assert (refused.value.step, refused.value.field) == (at, field)


def test_no_step_follows_a_crash() -> None:
    log = finished_log()
    log[3]["metrics"]["crashed"] = True
    with pytest.raises(MalformedLogError) as refused:
        grade_traffic("task_easy", log)
    assert refused.value.step == 4
    assert "crashed" in grade_traffic("task_easy", log[:4])["feedback"]


def answers(task_id: str) -> list[dict[str, Any]]:
    """An episode's log as JSON, as assembled by a client that keeps its answers."""
    env, kept = started(task_id), []
    while not env.done:
        state, reward, done, info = env.step(ACTION_NAMES[len(kept) % len(ACTION_NAMES)])
        kept.append({"state": state.to_dict(), "reward": reward, "done": done, "info": info})
    copy: list[dict[str, Any]] = json.loads(json.dumps(kept))
    return copy


@pytest.mark.parametrize("task_id", TASK_IDS)
def test_answers_of_steps_score_what_the_log_of_the_episode_scores(task_id: str) -> None:
    env = started(task_id)
    play(env, list(ACTION_NAMES))
    assert grade_traffic(task_id, answers(task_id)) == grade_traffic(task_id, env.episode_log)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"info": {"accept_rate": 0.5, "episode_step": 3}}, "info.accept_rate"),
        ({"state": [1, 2]}, "timestep"),
        ({"info": None}, "timestep"),
        ({"state": {}}, "metrics.queue_length"),
    ],
)
def test_a_damaged_answer_is_refused_with_step_and_field(change: dict[str, Any], field: str) -> None:
    kept = answers("task_easy")
    kept[2] |= change
    with pytest.raises(MalformedLogError) as refused:
        grade_traffic("task_easy", kept)
    assert (refused.value.step, refused.value.field) == (2, field)


@pytest.mark.parametrize("task_id", TASK_IDS)
def test_an_episode_of_the_most_extreme_configuration_can_be_graded_and_verified(task_id: str) -> None:
    config = {"server_capacity": 1, "base_latency": 60_000, "crash_load_ratio": 1000, "traffic_scale": 100}
    env = started(task_id, **config)
    play(env, ["allow_all"])
    assert env.episode_log[-1]["metrics"]["avg_latency"] > 1e15
    entries = json.loads(json.dumps(env.episode_log))
    assert verify_log(FAMILY, task_id, 0, config, entries).episode_log == env.episode_log
    assert 0.0 <= grade_traffic(task_id, entries)["score"] <= 1.0


@pytest.mark.parametrize("task_id", ["task_easy", "task_medium", "task_hard"])
def test_the_largest_metrics_still_give_a_score(task_id: str) -> None:
    log = finished_log(task_id)
    for entry in log:
        entry["metrics"] |= dict.fromkeys(("incoming_requests", "allowed_requests", "avg_latency"), MAX_METRIC)
    result = grade_traffic(task_id, log)
    assert 0.0 <= result["score"] <= 1.0
    assert all(map(math.isfinite, result["breakdown"].values()))


def test_a_log_longer_than_the_episode_is_refused() -> None:
    log = finished_log()
    with pytest.raises(MalformedLogError) as refused:
        grade_traffic("task_easy", [*log, log[-1]])
    assert refused.value.step is None


@pytest.mark.parametrize("log", ["text", {"steps": []}, 7])
def test_what_is_not_a_list_of_steps_is_refused(log: Any) -> None:
    with pytest.raises(MalformedLogError) as refused:
        grade_traffic("task_easy", log)
    assert refused.value.step is None
