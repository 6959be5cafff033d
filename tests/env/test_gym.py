"""Gymnasium: registration, formats, autoreset modes, seeds, and the same episode through every interface."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import httpx
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import inferencegym.gym as ig
from env.autoreset import AutoresetBatch
from env.batch import ServingBatch
from env.inference_env import InferenceEnv
from env.traffic.tasks import list_traffic_tasks
from grader.grader import GraderModule
from inferencegym.errors import (
    EpisodeDoneError,
    InvalidActionError,
    InvalidConfigError,
    NotResetError,
    ServerUnavailableError,
    StepConflictError,
    UnknownSessionError,
)
from inferencegym.models import NAIVE_ACTION, SPEC_LENGTHS
from inferencegym.seeds import episode_seed
from inferencegym.spaces.actions import (
    ACTION_HIGH,
    ACTION_LOW,
    FORCED,
    action_mask,
    action_size,
    from_row,
    snap,
    to_row,
)
from inferencegym.spaces.forecast import forecast_rps
from inferencegym.spaces.formats import (
    FORECAST_AHEAD_S,
    LEVELS,
    ObservationCodec,
    action_codec,
    knob_levels,
    reward_format,
    schedule_features,
)
from inferencegym.tasks import TaskSpec, get_calibration, get_task, list_tasks
from inferencegym.traffic import STATE_FIELDS
from tests.servers import RunningServer, running_server

SERVING = [ig.registered_id(task.gym_id) for task in list_tasks(include_recorded=True)]
TRAFFIC = [ig.registered_id(task.gym_id) for task in list_traffic_tasks()]
RENDERED = [ig.registered_id(get_task(task_id).gym_id) for task_id in (1, 3, "autoscale")]
"""Tasks with two, with five and with six knobs to draw; a task looks the same in every format."""
SHORT = {"episode_length": 7}
OUTCOME = ("score", "breakdown", "feedback")


def test_every_task_has_a_versioned_id() -> None:
    named = {
        "InferenceGym/StaticUniform-v1",
        "InferenceGym/BurstyShareGPT-v1",
        "InferenceGym/AdversarialMultiTenant-v1",
    }
    named |= {"InferenceGym/TrafficEasy-v1", "InferenceGym/TrafficMedium-v1", "InferenceGym/TrafficHard-v1"}
    assert named <= set(SERVING + TRAFFIC) <= set(gymnasium.registry)


@pytest.mark.parametrize("task", list_tasks(include_recorded=True), ids=lambda task: str(task.task_id))
def test_the_second_version_of_an_id_differs_in_the_defaults_for_learners_alone(task: TaskSpec) -> None:
    scales = task.fleet.max_replicas is not None
    usual: dict[str, Any] = {"observation": "full", "action": "discrete", "reward": "grade", "hold": 20}
    if scales:
        usual |= {"action": "replicas", "hold": 5}
    second = gymnasium.make(ig.registered_id(task.gym_id, 2))
    first = gymnasium.make(ig.registered_id(task.gym_id), **usual)
    rows = gymnasium.make_vec(ig.registered_id(task.gym_id, 2), num_envs=2)
    seconds = second.unwrapped.config.episode_length if scales else 20
    assert second.observation_space == first.observation_space == rows.single_observation_space
    seen, _ = second.reset(seed=4)
    np.testing.assert_array_equal(seen, first.reset(seed=4)[0])
    rows.reset(seed=3)
    for _ in range(3):
        action = first.action_space.sample()
        (seen, reward, *_), (other, share, *_) = second.step(action), first.step(action)
        np.testing.assert_array_equal(seen, other)
        assert reward == pytest.approx(share / math.hypot(seconds, share), rel=1e-12)
        assert rows.step(np.stack([action, action]))[1][1] == reward


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=5), st.sampled_from(["scaled", "bounded"]))
def test_a_squashed_reward_is_bounded_and_keeps_the_order_of_rewards(rewards: list[float], reward: str) -> None:
    scale, kind = reward_format(reward)
    scaled = scale(np.sort(np.array(rewards)), get_task(3).config())
    assert kind == "grade"
    assert (np.abs(scaled) <= 1.0).all()
    assert (np.diff(scaled) >= 0.0).all()


def test_two_seconds_of_the_best_grade_are_a_hundredth_of_the_score_and_a_step_of_their_own() -> None:
    config = get_task(3).config({"hold": 2})
    assert reward_format("scaled")[0](np.array(2.0), config) == pytest.approx(0.01, rel=1e-4)
    assert reward_format("bounded")[0](np.array(2.0), config) == pytest.approx(math.sqrt(0.5))


def test_an_id_with_the_module_before_it_needs_no_import() -> None:
    code = (
        "import gymnasium; e = gymnasium.make('inferencegym.gym:InferenceGym/StaticUniform-v2'); "
        "e.reset(seed=0); e.step(e.action_space.sample())"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_the_remote_id_is_registered_by_the_client_alone() -> None:
    code = (
        "import gymnasium, sys; env = gymnasium.make('inferencegym.client.gym:InferenceGym/HTTP-v1', url='http://x'); "
        "env.close(); assert not {'env', 'simulator'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_a_task_of_a_users_file_is_registered(tmp_path: Path) -> None:
    source = Path(__file__).parents[2] / "simulator" / "data" / "workload_configs.json"
    entry = {**json.loads(source.read_text())["tasks"]["1"], "gym_id": "MyOwn"}
    (tmp_path / "mine.json").write_text(json.dumps({"tasks": {"mine": entry}}))
    code = "import gymnasium, inferencegym.gym; gymnasium.spec('InferenceGym/MyOwn-v1')"
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        cwd=Path(__file__).parents[2],
        env={"INFERENCEGYM_TASKS": str(tmp_path / "mine.json")},
    )


@pytest.mark.usefixtures("windows")
@pytest.mark.parametrize("env_id", SERVING)
@pytest.mark.parametrize("action", ["box", "discrete"])
@pytest.mark.parametrize("observation", ["raw", "normalised"])
def test_gymnasiums_checker_has_nothing_to_say_about_serving(env_id: str, action: str, observation: str) -> None:
    # Warnings are errors in these tests.
    env = gymnasium.make(env_id, action=action, observation=observation, config=SHORT)
    rendered = env_id in RENDERED and (action, observation) == ("box", "raw")
    check_env(env.unwrapped, skip_render_check=not rendered)
    env.close()


@pytest.mark.parametrize("env_id", TRAFFIC)
@pytest.mark.parametrize("observation", ["raw", "normalised"])
def test_gymnasiums_checker_has_nothing_to_say_about_traffic(env_id: str, observation: str) -> None:
    check_env(gymnasium.make(env_id, observation=observation).unwrapped)


@pytest.mark.parametrize("env_id", SERVING)
def test_observations_stay_within_their_bounds_for_a_whole_episode_of_random_play(env_id: str) -> None:
    for observation in ("raw", "normalised"):
        envs = gymnasium.make_vec(env_id, num_envs=3, observation=observation, action="discrete")
        envs.action_space.seed(1)
        envs.reset(seed=1)
        for _ in range(envs.unwrapped.config.episode_length + 2):
            seen, reward, *_ = envs.step(envs.action_space.sample())
            assert envs.observation_space.contains(seen)
            assert (np.abs(reward) <= 1.0).all()
        envs.close()


@pytest.mark.parametrize("env_id", TRAFFIC)
def test_traffic_observations_stay_within_their_bounds(env_id: str) -> None:
    for action in range(4):
        env = gymnasium.make(env_id)
        env.reset()
        over = False
        while not over:
            seen, _, terminated, truncated, info = env.step(action)
            assert env.observation_space.contains(seen)
            over = terminated or truncated
        assert terminated == bool(info["crashed"])
        assert 0.0 <= info["final_score"] <= 1.0


@pytest.mark.parametrize(("capacity", "highest_ms"), [(100, 50 * (1 + 2**3)), (400, 50 * (1 + 0.5**2))])
def test_the_highest_latency_of_traffic_is_that_of_its_peak_and_a_full_queue(capacity: int, highest_ms: float) -> None:
    # 200 requests per second at most; a queue of 500 costs half a millisecond each, rounding at most one.
    env = gymnasium.make(TRAFFIC[2], config={"server_capacity": capacity})
    high = dict(zip(STATE_FIELDS, env.observation_space.high, strict=True))
    assert (high["request_rate"], high["queue_length"]) == (200, 500)
    assert high["avg_latency"] == pytest.approx(highest_ms + 250 + 1)


def test_the_queue_of_a_traffic_server_is_scaled_by_what_it_holds_also_where_that_is_one_request() -> None:
    env = gymnasium.make(TRAFFIC[2], observation="normalised", config={"max_queue": 1})
    assert dict(zip(STATE_FIELDS, env.observation_space.high, strict=True))["queue_length"] == 1.0


# ---------------------------------------------------------------- formats


def test_a_normalised_state_of_the_traffic_controller_is_that_of_the_documentation() -> None:
    plain, scaled = (gymnasium.make(TRAFFIC[2], observation=kind) for kind in ("raw", "normalised"))
    for env in (plain, scaled):
        env.reset()
    for _ in range(16):
        seen, relative = (env.step(1)[0] for env in (plain, scaled))
    # CPU and memory as they are, 100 requests/s of capacity, a queue of 500, ten times 50 ms, 50 steps, crashed.
    assert relative == pytest.approx(seen / np.array([1.0, 1.0, 100.0, 500.0, 500.0, 50.0, 1.0]), rel=1e-6)
    assert seen[3] > 0
    assert relative.max() > 0


def test_the_values_of_the_discrete_format_are_those_of_the_documentation() -> None:
    kv_budget, spec_length, _, prefill_disagg, quant_tier, replicas = knob_levels(4)
    assert kv_budget == pytest.approx([0.05 * k for k in range(2, 21)])
    assert (list(prefill_disagg), list(quant_tier)) == ([0, 1], [0, 1, 2])
    assert (list(spec_length), list(replicas)) == ([0, 1, 2, 4, 8], [1, 2, 3, 4])
    assert len(knob_levels()) == 5


def test_the_batch_sizes_of_the_discrete_format_part_octaves_in_halves_and_above_32_in_quarters() -> None:
    actions = np.zeros((26, 5), dtype=np.int64)
    actions[:, 2] = np.arange(26)
    powers = {2**k for k in range(10)}
    halfway = {3 * 2**k for k in range(8)}
    quarters = {n * 2**k for n in (5, 7) for k in range(3, 7)}
    assert action_codec("discrete").decode(actions)[:, 2].tolist() == sorted(powers | halfway | quarters)


@given(knobs=arrays(np.float64, (4, 5), elements=st.floats(-1e3, 1e3)))
@example(knobs=np.full((4, 5), 0.55))  # the middle of kv_budget: 0 in the box, but for rounding
@settings(max_examples=50)
def test_what_a_format_can_say_survives_encoding_and_decoding(knobs: np.ndarray) -> None:
    everything = action_mask(list(LEVELS))
    allowed = snap(knobs, everything)
    for name in ("box", "natural", "discrete"):
        codec = action_codec(name)
        again = snap(codec.decode(codec.encode(allowed)), everything)
        np.testing.assert_array_equal(again[:, [1, 3, 4]], allowed[:, [1, 3, 4]])
        if name != "discrete":
            np.testing.assert_allclose(again, allowed, atol=1e-6)
        said = codec.encode(again)
        np.testing.assert_array_equal(snap(codec.decode(said), everything), again)


@given(
    actions=arrays(np.float64, (6, 5), elements=st.one_of(st.floats(), st.integers(-1, 9).map(float))),
    mask=arrays(np.bool_, (5,)),
)
def test_snapping_clamps_rounds_and_forces_as_numpy_does(actions: np.ndarray, mask: np.ndarray) -> None:
    expected = np.clip(np.where(mask & ~np.isnan(actions), actions, FORCED), ACTION_LOW, ACTION_HIGH)
    lengths = np.array(SPEC_LENGTHS)
    apart = np.abs(np.log1p(expected[:, 1, None]) - np.log1p(lengths))
    expected[:, 1] = lengths[apart.argmin(axis=1)]
    expected[:, 2:] = np.rint(expected[:, 2:])
    np.testing.assert_array_equal(snap(actions, mask), expected)


def test_actions_of_another_shape_are_refused_before_they_are_snapped() -> None:
    for shape in ((5,), (2, 4), (1, 2, 5)):
        with pytest.raises(InvalidActionError):
            snap(np.zeros(shape), action_mask(list(LEVELS)))


def test_an_action_of_another_shape_is_refused_in_the_words_of_one_environment() -> None:
    env = gymnasium.make("InferenceGym/AdversarialMultiTenant-v1").unwrapped
    env.reset(seed=1)
    with pytest.raises(InvalidActionError, match=r"action.shape=\(4,\) is not allowed: action.shape must be \(5,\)"):
        env.step(np.zeros(4))


def test_the_ends_and_the_middle_of_the_box_mean_what_the_documentation_says() -> None:
    knobs = action_codec("box").decode(np.array([[-1.0] * 5, [1.0] * 5, [0.0] * 5]))
    np.testing.assert_allclose(knobs[0], ACTION_LOW)
    np.testing.assert_allclose(knobs[1], ACTION_HIGH)
    np.testing.assert_allclose(knobs[2], [0.55, 2.0, 512**0.5, 1.0, 1.0])


@pytest.mark.parametrize("name", ["box", "natural"])
def test_an_action_of_nan_is_refused_and_plays_nothing(name: str) -> None:
    env = gymnasium.make("InferenceGym/AdversarialMultiTenant-v1", action=name)
    env.reset(seed=1)
    action = env.action_space.sample()
    action[2] = np.nan
    with pytest.raises(InvalidActionError, match=r"actions\[0, 2\]='NaN' is not allowed"):
        env.step(action)
    assert env.unwrapped.get_state()["actions"] == []


def test_a_masked_knob_takes_the_naive_default() -> None:
    np.testing.assert_array_equal(FORCED, to_row(NAIVE_ACTION))


def test_a_discrete_action_out_of_range_is_refused() -> None:
    for wrong in (np.array([[0, 0, 26, 0, 0]]), np.array([[-1, 0, 0, 0, 0]]), np.array([[0.5, 0, 0, 0, 0]])):
        with pytest.raises(InvalidActionError):
            action_codec("discrete").decode(wrong)
    for choice in (-1, 480, 0.5):
        with pytest.raises(InvalidActionError, match="an integer from 0 to below 480"):
            action_codec("settings").decode(np.array([choice]))


@pytest.mark.parametrize(("name", "offered"), [("AdversarialMultiTenant", 480), ("BurstyShareGPT", 80)])
def test_a_setting_is_every_combination_of_coarse_levels_of_the_offered_knobs(name: str, offered: int) -> None:
    env = gymnasium.make(f"InferenceGym/{name}-v2", action="settings")
    assert env.action_space == gymnasium.spaces.Discrete(offered)
    task = env.unwrapped.task
    codec = action_codec("settings", active_actions=task.active_actions)
    choices = np.arange(offered)
    knobs = codec.decode(choices)
    assert len(np.unique(snap(knobs, action_mask(task.active_actions)), axis=0)) == offered
    np.testing.assert_array_equal(codec.encode(knobs), choices)
    # By hand: 0.9 KV, no draft tokens, batch 512; the last knob of the task changes first.
    best = knobs[codec.encode(np.array([[0.88, 0.0, 500.0, 0.0, 0.0]]))[0]]
    assert best[:3].tolist() == [0.9, 0.0, 512.0]
    env.reset(seed=1)
    env.step(offered - 1)
    assert env.unwrapped.agent_observation[0, 14:17].tolist() == [0.9, 4.0, 512.0]


@pytest.mark.parametrize("env_id", ["StaticUniform-v2", "TrafficEasy-v1", "RolloutMix-v1", "HTTP-v1"])
def test_a_misspelt_argument_is_refused_with_the_one_that_was_meant(env_id: str) -> None:
    for make in (gymnasium.make, partial(gymnasium.make_vec, num_envs=2)):
        with pytest.raises(InvalidConfigError, match="did you mean config") as refused:
            make(f"InferenceGym/{env_id}", configs={})
        assert refused.value.field == "configs"
        assert "The arguments are " in str(refused.value)
        assert ", config, " in f"{refused.value}, "


@pytest.mark.parametrize("env_id", ["StaticUniform-v2", "TrafficEasy-v1", "RolloutMix-v1", "HTTP-v1"])
def test_an_unknown_option_of_a_reset_is_refused(env_id: str) -> None:
    settings = {"url": "http://127.0.0.1:1"} if env_id == "HTTP-v1" else {}
    env = gymnasium.make(f"InferenceGym/{env_id}", **settings)
    with pytest.raises(InvalidConfigError, match="settings are arguments of gymnasium"):
        env.reset(seed=1, options={"episode_length": 100})
    envs = gymnasium.make_vec(f"InferenceGym/{env_id}", num_envs=2, **settings)
    with pytest.raises(InvalidConfigError, match="did you mean reset_mask"):
        envs.reset(seed=1, options={"reset_masks": np.array([True, True])})


def test_unknown_formats_are_refused_with_those_there_are() -> None:
    with pytest.raises(InvalidConfigError) as refused:
        ig.InferenceGymEnv(1, action="boxes")
    assert refused.value.field == "action"
    assert "box, natural, discrete" in str(refused.value)
    with pytest.raises(InvalidConfigError, match=r"one of box, natural, discrete, settings$"):
        ig.InferenceGymEnv(1, action="replicas")
    with pytest.raises(InvalidConfigError) as refused:
        ig.InferenceGymEnv(1, observation="scaled")
    assert refused.value.field == "observation"
    assert "raw, normalised, scheduled" in str(refused.value)
    with pytest.raises(InvalidConfigError) as refused:
        ig.VectorInferenceEnv(0, 1)
    assert refused.value.field == "num_envs"


def test_raw_observations_are_those_of_the_environment_to_float32() -> None:
    task = get_task(3)
    batch = ServingBatch(task, 2)
    seen = ObservationCodec(task, task.config(), get_calibration(3), "raw").encode(batch.reset([1, 2]))
    assert seen.dtype == np.float32
    np.testing.assert_allclose(seen, batch.observation, rtol=1e-6)


def test_the_schedule_tells_of_the_flood_that_comes_the_one_that_is_on_and_the_one_that_was() -> None:
    task = get_task(3)
    assert task.burst is not None
    first, interval, lasts = task.burst.offset_steps, task.burst.interval_steps, task.burst.duration_steps
    features = schedule_features(task, 200)
    assert features.shape == (201, 3)
    np.testing.assert_allclose(features[0], [0.0, 1.0 - first / interval, 0.0], atol=1e-6)
    np.testing.assert_allclose(features[first], [1.0, 1.0, 1.0])
    np.testing.assert_allclose(
        features[first + lasts + 9], [0.0, (lasts + 9) / interval, 1.0 - 10 / interval], atol=1e-6
    )
    # Also where the episode ends within a flood, and just before one.
    np.testing.assert_allclose(schedule_features(task, first)[-2:, :2], [[0.0, 1.0 - 1 / interval], [1.0, 1.0]])
    assert not schedule_features(get_task(1), 50).any()
    envs = ig.VectorInferenceEnv(2, 3, observation="scheduled")
    seen, _ = envs.reset(seed=0)
    assert envs.observation_space.contains(seen)
    np.testing.assert_array_equal(seen[:, 14:], [features[0]] * 2)


def test_the_schedule_of_a_day_is_its_forecast_for_the_seconds_ahead() -> None:
    task = get_task("autoscale")
    n_steps = task.episode_length
    features = schedule_features(task, n_steps)
    assert features.shape == (n_steps + 1, len(FORECAST_AHEAD_S))
    day = forecast_rps(task, np.arange(2.0 * n_steps))
    for t in (0, 17, n_steps - 1, n_steps):
        ahead = [day[t + seconds] / day.max() for seconds in FORECAST_AHEAD_S]
        assert features[t] == pytest.approx(np.minimum(ahead, 1.0), rel=1e-6)


# ---------------------------------------------------------------- one episode, many faces


@pytest.mark.parametrize("task_id", [task.task_id for task in list_tasks(include_recorded=True)])
def test_a_row_of_the_vector_the_scalar_interface_and_inference_env_play_the_same_episode(task_id: Any) -> None:
    rng = np.random.default_rng(5)
    fleet = get_task(task_id).fleet
    codec = action_codec("box", fleet.max_replicas)
    envs = ig.VectorInferenceEnv(3, task_id, config=SHORT)
    one = ig.InferenceGymEnv(task_id, config=SHORT)
    core = InferenceEnv(task_id=task_id, config=SHORT)
    first, _ = envs.reset(seed=[11, 12, 13])
    np.testing.assert_array_equal(first[1], one.reset(seed=12)[0])
    core.reset(seed=12)
    for _ in range(SHORT["episode_length"]):
        actions = rng.uniform(-1, 1, (3, action_size(fleet))).astype(np.float32)
        seen, rewards, ended, _, _ = envs.step(actions)
        alone, reward, over, truncated, info = one.step(actions[1])
        knobs = snap(codec.decode(actions[1:2]), action_mask(one.task.active_actions), fleet)[0]
        _, core_reward, core_done, core_info = core.step(from_row(knobs))
        np.testing.assert_array_equal(seen[1], alone)
        assert (rewards[1], ended[1]) == (reward, over) == (core_reward, core_done)
        assert info["metrics"] == core_info["metrics"]
        assert info["action_applied"] == core_info["action_applied"]
        assert not truncated
    assert one.episode_log == core.episode_log
    assert GraderModule().score(task_id, one.episode_log) == GraderModule().score(task_id, core.episode_log)


# ---------------------------------------------------------------- the end of an episode


@pytest.mark.parametrize("env_id", SERVING + TRAFFIC)
def test_the_last_info_holds_the_grade_of_the_log_and_no_earlier_one_does(env_id: str) -> None:
    env = gymnasium.make(env_id)
    env.reset(seed=3)
    env.action_space.seed(3)
    over = False
    while not over:
        *_, terminated, truncated, info = env.step(env.action_space.sample())
        over = terminated or truncated
        assert over == all(name in info for name in OUTCOME) == any(name in info for name in OUTCOME)
    grade = env.unwrapped.grade()
    assert {name: info[name] for name in OUTCOME} == {name: grade[name] for name in OUTCOME}
    if env_id in SERVING:
        assert grade == GraderModule().score(env.unwrapped.task.task_id, env.unwrapped.episode_log)


def test_a_grade_can_be_asked_for_in_the_middle_of_an_episode() -> None:
    env = ig.InferenceGymEnv(3)
    with pytest.raises(NotResetError):
        env.grade()
    env.reset(seed=1)
    assert env.grade()["score"] == 0.0
    for _ in range(5):
        env.step(env.action_space.sample())
    assert env.grade() == GraderModule().score(3, env.episode_log)


@pytest.mark.parametrize("mode", list(AutoresetMode))
@pytest.mark.parametrize("task_id", [1, 2, 3])
def test_a_vector_tells_the_outcome_of_rows_that_end_as_gymnasiums_own_vector_does(
    task_id: int, mode: AutoresetMode
) -> None:
    """Row 1 is reset after three steps, so the rows end at different times."""
    name = ig.registered_id(get_task(task_id).gym_id)
    ours = gymnasium.make_vec(name, 2, config=SHORT, autoreset_mode=mode)
    theirs = gymnasium.make_vec(name, 2, "sync", config=SHORT, vector_kwargs={"autoreset_mode": mode})
    ours.action_space.seed(0)
    for envs in (ours, theirs):
        envs.reset(seed=5)
    ends = 0
    for t in range(3 * SHORT["episode_length"]):
        if t == 3:
            for envs in (ours, theirs):
                envs.reset(seed=[None, 77], options={"reset_mask": np.array([False, True])})
        actions = ours.action_space.sample()
        (*_, ended, _, told), (*_, expected) = ours.step(actions), theirs.step(actions)
        if ended.any():
            ends += 1
            final = mode is AutoresetMode.SAME_STEP
            assert_outcomes_alike(final_of(told) if final else told, final_of(expected) if final else expected)
            if mode is AutoresetMode.DISABLED:
                for envs in (ours, theirs):
                    envs.reset(options={"reset_mask": ended.copy()})
        else:
            assert not set(OUTCOME) & set(told)
    assert ends >= 4


# ---------------------------------------------------------------- seeds and restarts


def test_the_seeds_of_restarts_are_those_documented() -> None:
    envs = ig.VectorInferenceEnv(2, 1, config=SHORT, autoreset_mode="SameStep")
    envs.reset(seed=40)
    met = [envs.seeds.tolist()]
    for _ in range(2 * SHORT["episode_length"]):
        *_, ended, _, _ = envs.step(envs.action_space.sample())
        if ended.any():
            met.append(envs.seeds.tolist())
    assert met == [[episode_seed(first, k) for first in (40, 41)] for k in range(3)]
    assert met[0] == [40, 41]


def test_resets_without_a_seed_go_on_through_the_series_of_the_first() -> None:
    env = ig.InferenceGymEnv(1, config=SHORT)
    seeds = [env.reset(seed=9)[1]["seed"], env.reset()[1]["seed"], env.reset()[1]["seed"], env.reset(seed=9)[1]["seed"]]
    assert seeds == [9, episode_seed(9, 1), episode_seed(9, 2), 9]


def test_an_unseeded_environment_plays_seeds_of_its_own() -> None:
    first, second = (ig.InferenceGymEnv(1, config=SHORT).reset()[1]["seed"] for _ in range(2))
    assert first != second


def test_restart_seeds_are_never_small_numbers() -> None:
    assert min(episode_seed(first, k) for first in range(50) for k in range(1, 50)) > 10**12


def run_to_the_end(mode: AutoresetMode) -> list[Any]:
    envs = ig.VectorInferenceEnv(2, 3, config=SHORT, autoreset_mode=mode)
    envs.reset(seed=1)
    action = np.zeros((2, 5), dtype=np.float32)
    return [envs.step(action) for _ in range(SHORT["episode_length"] + 1)]


def test_next_step_mode_spends_one_step_on_the_restart() -> None:
    steps = run_to_the_end(AutoresetMode.NEXT_STEP)
    last, restart = steps[-2], steps[-1]
    assert last[2].all()
    assert (last[0][:, 12] == SHORT["episode_length"]).all()
    assert (restart[0][:, 12] == 0).all()
    assert (restart[1] == 0.0).all()
    assert not restart[2].any()


def test_same_step_mode_returns_the_new_episode_and_keeps_the_old_ones_last_observation() -> None:
    steps = run_to_the_end(AutoresetMode.SAME_STEP)
    last, following = steps[-2], steps[-1]
    assert last[2].all()
    assert (last[0][:, 12] == 0).all()
    assert last[4]["_final_obs"].all()
    assert (last[4]["final_obs"][:, 12] == SHORT["episode_length"]).all()
    assert last[4]["final_info"]["metrics"]["tokens_per_sec"].shape == (2,)
    assert (following[0][:, 12] == 1).all()


def test_modes_give_the_same_episodes() -> None:
    next_step, same_step = run_to_the_end(AutoresetMode.NEXT_STEP), run_to_the_end(AutoresetMode.SAME_STEP)
    for a, b in zip(next_step[:-1], same_step[:-1], strict=True):
        np.testing.assert_array_equal(a[1], b[1])
    np.testing.assert_array_equal(next_step[-1][0], same_step[-2][0])


def test_without_autoreset_a_step_after_the_end_is_refused_until_the_row_is_reset() -> None:
    envs = ig.VectorInferenceEnv(2, 1, config=SHORT, autoreset_mode="Disabled")
    envs.reset(seed=1)
    action = np.zeros((2, 5), dtype=np.float32)
    for _ in range(SHORT["episode_length"]):
        envs.step(action)
    with pytest.raises(EpisodeDoneError):
        envs.step(action)
    seen, _ = envs.reset(options={"reset_mask": np.array([True, True])})
    assert (seen[:, 12] == 0).all()
    envs.step(action)


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_rows_that_were_reset_apart_end_apart_and_equal_the_same_episodes_alone(mode: str) -> None:
    envs = ig.VectorInferenceEnv(3, 3, config=SHORT, autoreset_mode=mode)
    rng = np.random.default_rng(0)
    envs.reset(seed=[1, 2, 3])
    for _ in range(3):
        envs.step(np.zeros((3, 5), dtype=np.float32))
    envs.reset(seed=[None, 77, None], options={"reset_mask": np.array([False, True, False])})
    alone = ig.InferenceGymEnv(3, config=SHORT)
    alone.reset(seed=77)
    for k in range(SHORT["episode_length"]):
        actions = rng.uniform(-1, 1, (3, 5)).astype(np.float32)
        seen, rewards, ended, _, info = envs.step(actions)
        expected, reward, over, _, _ = alone.step(actions[1])
        last = info["final_obs"][1] if mode == "SameStep" and over else seen[1]
        np.testing.assert_array_equal(last, expected)
        assert (rewards[1], bool(ended[1])) == (reward, over)
        assert ended[0] == ended[2] == (k == 3)


def test_an_invalid_reset_mask_is_refused() -> None:
    envs = ig.VectorInferenceEnv(2, 1)
    with pytest.raises(NotResetError):
        envs.reset(options={"reset_mask": np.array([True, False])})
    envs.reset(seed=0)
    for wrong in ([True, False], np.array([True]), np.array([1, 0]), np.array([False, False])):
        with pytest.raises(InvalidConfigError) as refused:
            envs.reset(options={"reset_mask": wrong})
        assert refused.value.field == "reset_mask"


def test_misuse_of_the_batch_is_named() -> None:
    with pytest.raises(InvalidConfigError) as refused:
        ig.VectorInferenceEnv(2, 1, n_threads=0)
    assert refused.value.field == "n_threads"
    envs = ig.VectorInferenceEnv(2, 1, autoreset_mode="Disabled", action="natural")
    with pytest.raises(NotResetError):
        envs.step(np.tile(FORCED, (2, 1)))
    for seeds in ([1, 2, 3], [-1, 2]):
        with pytest.raises(InvalidConfigError) as refused:
            envs.reset(seed=seeds)
        assert refused.value.field == "seed"
    envs.reset(seed=0)
    with pytest.raises(InvalidActionError):
        envs.step(np.tile(FORCED, (3, 1)))
    rows = AutoresetBatch(ServingBatch(get_task(1), 1, get_task(1).config({"episode_length": 1})))
    rows.reset([1])
    rows.step(FORCED[None])
    with pytest.raises(EpisodeDoneError):
        rows.step(FORCED[None])


def test_vector_traffic_restarts_crashed_rows_alone() -> None:
    envs = gymnasium.make_vec("InferenceGym/TrafficEasy-v1", num_envs=2, vectorization_mode="vector_entry_point")
    envs.reset()
    crashed_at = None
    for k in range(12):
        seen, reward, terminated, truncated, info = envs.step(np.array([0, 3]))
        if terminated[0]:
            crashed_at = k
            assert not terminated[1]
            assert not truncated.any()
            assert info["_final_score"].tolist() == [True, False]
    assert crashed_at == 10
    assert (seen[0, 5], reward[0], seen[1, 5]) == (0, 0.0, 12)


def assert_told_alike(told: dict[str, Any], expected: dict[str, Any]) -> None:
    """Metrics and outcome of every row; Gymnasium's own vector environment has them side by side."""
    names = [name for name in expected if f"_{name}" in expected and not name.startswith("final_")]
    nobody = np.zeros(2, dtype=bool)
    assert (told.get("_metrics", nobody) == expected.get("_avg_latency", nobody)).all()
    for name in ("final_score", *OUTCOME):
        assert (told.get(f"_{name}", nobody) == expected.get(f"_{name}", nobody)).all()
    for name in names:
        if name not in OUTCOME:
            rows = expected[f"_{name}"]
            np.testing.assert_array_equal(told["metrics"][name][rows], expected[name][rows])
    if "final_score" in expected:
        rows = expected["_final_score"]
        np.testing.assert_array_equal(told["final_score"][rows], expected["final_score"][rows])
        assert_outcomes_alike(told, expected)


def assert_outcomes_alike(told: dict[str, Any], expected: dict[str, Any]) -> None:
    """Score, breakdown and feedback of the rows for which Gymnasium's own vector environment has them."""
    rows = expected["_score"]
    assert rows.any()
    np.testing.assert_array_equal(told["_score"], rows)
    for name in ("score", "feedback"):
        assert told[name][rows].tolist() == expected[name][rows].tolist()
    parts = {name for name in expected["breakdown"] if not name.startswith("_")}
    assert set(told["breakdown"]) == parts
    for name in parts:
        np.testing.assert_array_equal(told["breakdown"][name][rows], expected["breakdown"][name][rows])


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_vector_traffic_tells_of_every_row_what_gymnasiums_own_vector_tells(mode: AutoresetMode) -> None:
    """Row 0 crashes repeatedly, and row 1 once in the step in which row 0 is reset."""
    name = "InferenceGym/TrafficHard-v1"
    ours = gymnasium.make_vec(name, 2, vectorization_mode="vector_entry_point", autoreset_mode=mode)
    theirs = gymnasium.make_vec(name, 2, vectorization_mode="sync", vector_kwargs={"autoreset_mode": mode})
    assert ours.reset(seed=0)[1] == theirs.reset(seed=0)[1] == {}
    crashes = np.zeros(2, dtype=int)
    for t in range(60):
        actions = np.array([0, 3 if t < 12 else 0])
        (*_, ended, _, told), (*_, expected) = ours.step(actions), theirs.step(actions)
        assert_told_alike(told, expected)
        crashes += ended
        if mode is AutoresetMode.SAME_STEP and ended.any():
            assert_told_alike(final_of(told), final_of(expected))
        if mode is AutoresetMode.DISABLED and ended.any():
            for envs in (ours, theirs):
                assert envs.reset(options={"reset_mask": ended.copy()})[1] == {}
    assert (crashes >= 2).all()


def final_of(info: dict[str, Any]) -> dict[str, Any]:
    """Info about the rows that ended, and only about them."""
    rows, final = info["_final_info"], info["final_info"]
    return {name: value & rows if name.startswith("_") else value for name, value in final.items()}


def test_traffic_that_runs_out_of_steps_is_truncated() -> None:
    env = gymnasium.make("InferenceGym/TrafficEasy-v1")
    env.reset()
    ends = [env.step(3)[2:4] for _ in range(30)]
    assert ends[-1] == (False, True)
    assert set(ends[:-1]) == {(False, False)}


# ---------------------------------------------------------------- on a server


def test_an_episode_on_a_server_is_the_same_to_the_last_bit(server: RunningServer) -> None:
    formats: dict[str, Any] = {"config": SHORT, "action": "discrete", "reward": "scaled"}
    remote = gymnasium.make(ig.REMOTE_ID, url=server.url, task_id=3, **formats).unwrapped
    local = ig.InferenceGymEnv(3, **formats)
    remote.action_space.seed(2)
    np.testing.assert_array_equal(remote.reset(seed=6)[0], local.reset(seed=6)[0])
    for _ in range(SHORT["episode_length"]):
        action = remote.action_space.sample()
        there, here = remote.step(action), local.step(action)
        np.testing.assert_array_equal(there[0], here[0])
        assert there[1:4] == here[1:4]
        assert there[4]["metrics"] == here[4]["metrics"]
    graded = server.post("/grader", {"session_id": remote.session_id})
    assert graded["score"] == GraderModule().score(3, local.episode_log)["score"]
    remote.close()


@pytest.mark.usefixtures("windows")
def test_gymnasiums_checker_has_nothing_to_say_about_a_server(server: RunningServer) -> None:
    env = gymnasium.make(ig.REMOTE_ID, url=server.url, task_id=1, config=SHORT)
    check_env(env.unwrapped)
    env.close()


@pytest.mark.parametrize("task_id", [task.task_id for task in list_tasks(include_recorded=True)])
@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_many_episodes_on_a_server_are_the_same_as_in_process(server: RunningServer, task_id: Any, mode: str) -> None:
    formats = {"config": SHORT, "observation": "scheduled", "action": "discrete", "autoreset_mode": mode}
    formats["reward"] = "scaled" if mode == "SameStep" else "plan"
    remote = gymnasium.make_vec(ig.REMOTE_ID, num_envs=3, url=server.url, task_id=task_id, **formats)
    local = ig.VectorInferenceEnv(3, task_id, **formats)
    assert remote.single_observation_space == local.single_observation_space
    assert remote.single_action_space == local.single_action_space
    assert remote.metadata["autoreset_mode"] is local.metadata["autoreset_mode"]
    np.testing.assert_array_equal(remote.reset(seed=6)[0], local.reset(seed=6)[0])
    remote.action_space.seed(2)
    ends = 0
    for _ in range(2 * SHORT["episode_length"] + 3):
        actions = remote.action_space.sample()
        there, here = remote.step(actions), local.step(actions)
        for a, b in zip(there[:4], here[:4], strict=True):
            np.testing.assert_array_equal(a, b)
            assert a.dtype == b.dtype
        np.testing.assert_array_equal(there[4]["seed"], here[4]["seed"])
        assert ("final_obs" in there[4]) == ("final_obs" in here[4])
        if "final_obs" in here[4]:
            np.testing.assert_array_equal(there[4]["final_obs"], here[4]["final_obs"])
        ends += here[2].any()
    assert ends == 2
    remote.close()


@given(st.lists(st.sampled_from(["box", "nan", "beyond", "reset"]), min_size=1, max_size=12))
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_is_sent_and_whenever_it_is_reset_the_server_plays_the_same(
    server: RunningServer, calls: list[str]
) -> None:
    remote = ig.HTTPVectorEnv(server.url, 2, 3, config=SHORT)
    local = ig.VectorInferenceEnv(2, 3, config=SHORT)
    rng = np.random.default_rng(len(calls))
    np.testing.assert_array_equal(remote.reset(seed=[4, 9])[0], local.reset(seed=[4, 9])[0])
    ended = False
    for call in calls:
        actions = rng.uniform(-1, 1, (2, 5)) * {"beyond": 5.0, "nan": np.nan}.get(call, 1.0)
        if call == "reset":
            there, here, ended = remote.reset(), local.reset(), False
            np.testing.assert_array_equal(remote.seeds, local.seeds)
        elif call == "nan" and not ended:
            for envs in (remote, local):
                with pytest.raises(InvalidActionError):
                    envs.step(actions)
            continue
        else:  # the step after the end restarts both episodes, whatever the actions are
            there, here = remote.step(actions)[:4], local.step(actions)[:4]
            np.testing.assert_array_equal(there[1], here[1])
            ended = bool(here[2].all())
        np.testing.assert_array_equal(there[0], here[0])
    remote.close()


def test_a_remote_batch_without_autoreset_is_restarted_as_a_whole(server: RunningServer) -> None:
    remote = ig.HTTPVectorEnv(server.url, 2, 1, config={"episode_length": 2}, autoreset_mode="Disabled")
    remote.reset(seed=1)
    action = np.zeros((2, 5), dtype=np.float32)
    for _ in range(2):
        ended = remote.step(action)[2]
    assert ended.all()
    with pytest.raises(EpisodeDoneError):
        remote.step(action)
    with pytest.raises(InvalidConfigError) as refused:
        remote.reset(options={"reset_mask": np.array([True, False])})
    assert refused.value.field == "reset_mask"
    remote.reset(options={"reset_mask": np.array([True, True])})
    assert remote.seeds.tolist() == [episode_seed(1, 1), episode_seed(2, 1)]
    remote.step(action)
    remote.close()


def test_rows_that_start_apart_are_sessions_of_their_own(server: RunningServer) -> None:
    config = {"episode_length": 3}
    remote = gymnasium.make_vec(
        ig.REMOTE_ID, num_envs=2, vectorization_mode="sync", url=server.url, task_id=1, config=config
    )
    remote.reset(seed=1)
    seen, *_, info = remote.step(np.zeros((2, 5), dtype=np.float32))
    local = ig.VectorInferenceEnv(2, 1, config=config)
    local.reset(seed=1)
    np.testing.assert_array_equal(seen, local.step(np.zeros((2, 5), dtype=np.float32))[0])
    assert len(set(info["session_id"])) == 2
    assert info["metrics"]["tokens_per_sec"].shape == (2,)
    remote.close()


def test_lost_answers_cost_a_remote_batch_neither_steps_nor_seeds(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = ig.HTTPVectorEnv(server.url, 2, 2, config=SHORT)
    local = ig.VectorInferenceEnv(2, 2, config=SHORT)
    send = httpx.Client.request
    lost = {"/step/batch": 0, "/reset/batch": 0}

    def lossy(self: httpx.Client, method: str, url: str, **options: Any) -> httpx.Response:
        answer = send(self, method, url, **options)
        lost[url] += 1
        if lost[url] % 2:
            raise httpx.ReadError("the answer was lost")
        return answer

    monkeypatch.setattr(httpx.Client, "request", lossy)
    remote.reset(seed=3)
    local.reset(seed=3)
    for _ in range(SHORT["episode_length"] + 2):
        action = np.zeros((2, 5), dtype=np.float32)
        there, here = remote.step(action), local.step(action)
        np.testing.assert_array_equal(there[0], here[0])
        np.testing.assert_array_equal(there[1], here[1])
        np.testing.assert_array_equal(remote.seeds, local.seeds)
    assert lost == {"/step/batch": 2 * (SHORT["episode_length"] + 1), "/reset/batch": 2 * 2}
    monkeypatch.undo()
    remote.close()


def test_episodes_that_a_killed_server_lost_are_played_again_and_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("inferencegym.client.gym.REPLAY_STEPS", 4)  # so that it takes two requests
    local = ig.VectorInferenceEnv(2, 3, config=SHORT)
    with running_server(tmp_path) as server:
        remote = ig.HTTPVectorEnv(server.url, 2, 3, config=SHORT)
        remote.action_space.seed(5)
        remote.reset(seed=8)
        local.reset(seed=8)
        for k in range(2 * SHORT["episode_length"]):
            if k == 3:
                server.kill()
                server.start()
            actions = remote.action_space.sample()
            there, here = remote.step(actions), local.step(actions)
            np.testing.assert_array_equal(there[0], here[0])
            np.testing.assert_array_equal(there[1], here[1])
        assert caplog.text.count("replaying 3 steps") == 1
        remote.close()


def test_a_remote_batch_goes_on_whichever_process_a_new_connection_reaches(
    server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = ig.VectorInferenceEnv(2, 3, config=SHORT)
    with running_server(tmp_path) as other:  # before requests are led elsewhere: it waits for its own first answer
        request = httpx.Client.request
        reached = server.url
        monkeypatch.setattr(
            httpx.Client, "request", lambda self, method, url, **more: request(self, method, f"{reached}{url}", **more)
        )
        remote = ig.HTTPVectorEnv(server.url, 2, 3, config=SHORT)
        remote.action_space.seed(5)
        remote.reset(seed=8)
        local.reset(seed=8)
        for k in range(2 * SHORT["episode_length"]):
            reached = (server.url, other.url, other.url)[k % 3]
            actions = remote.action_space.sample()
            there, here = remote.step(actions), local.step(actions)
            np.testing.assert_array_equal(there[0], here[0])
            np.testing.assert_array_equal(there[1], here[1])
        remote.close()


def test_a_server_that_plays_lost_episodes_otherwise_is_not_gone_on_with(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = httpx.Client.request

    def with_other_seeds(self: httpx.Client, method: str, url: str, **more: Any) -> httpx.Response:
        if url == "/reset/batch":
            more["json"] = {**more["json"], "seeds": [seed + 1 for seed in more["json"]["seeds"]]}
        return request(self, method, url, **more)

    remote = ig.HTTPVectorEnv(server.url, 2, 3, config=SHORT)
    action = np.zeros((2, 5), dtype=np.float32)
    first, _ = remote.reset(seed=8)
    remote.step(action)
    server.post("/close/batch", {"session_id": remote.session_id})
    with monkeypatch.context() as patched:
        patched.setattr(httpx.Client, "request", with_other_seeds)
        with pytest.raises(StepConflictError):
            remote.step(action)
    server.post("/close/batch", {"session_id": remote.session_id})
    np.testing.assert_array_equal(remote.reset(seed=8)[0], first)
    remote.close()


def test_mistakes_with_a_remote_batch_are_named(server: RunningServer) -> None:
    with pytest.raises(InvalidConfigError) as refused:
        ig.HTTPVectorEnv(server.url, 0, 1)
    assert refused.value.field == "num_envs"
    remote = ig.HTTPVectorEnv(server.url, 2, 1, config=SHORT)
    with pytest.raises(NotResetError):
        remote.step(np.zeros((2, 5), dtype=np.float32))
    remote.reset(seed=0)
    with pytest.raises(InvalidActionError):
        remote.step(np.zeros((3, 5), dtype=np.float32))
    remote.close()
    many = ig.HTTPVectorEnv(server.url, 5_000, 1)
    with pytest.raises(InvalidConfigError) as refused:
        many.reset(seed=0)
    assert refused.value.field == "seeds"
    many.close()
    nobody = ig.HTTPVectorEnv("http://127.0.0.1:9", 2, 1, retry_s=0)
    with pytest.raises(ServerUnavailableError):
        nobody.reset(seed=1)
    nobody.close()


def test_a_session_that_the_server_forgot_is_unknown_and_replaced_at_the_next_reset(tmp_path: Path) -> None:
    action = np.zeros(5, dtype=np.float32)
    with running_server(tmp_path, store_url="memory://") as server:
        remote = ig.HTTPGymEnv(server.url, 1, config=SHORT)
        _, begun = remote.reset(seed=1)
        server.kill()
        server.start()
        with pytest.raises(UnknownSessionError) as refused:
            remote.step(action)
        assert "POST /reset" in str(refused.value)
        assert remote.reset(seed=1)[1]["session_id"] != begun["session_id"]
        remote.step(action)
        remote.close()


def test_refusals_and_absence_of_a_server_are_told_in_its_words(server: RunningServer) -> None:
    remote = ig.HTTPGymEnv(server.url, 1, config=SHORT)
    with pytest.raises(NotResetError):
        remote.step(np.zeros(5, dtype=np.float32))
    remote.close()
    # By default, a server that was never reached is waited for as long as an address needs to be found wrong.
    nobody = ig.HTTPGymEnv("http://127.0.0.1:9", 1)
    said = r"^http://127\.0\.0\.1:9 gave no answer in \d attempts over 1 s.*retry_s=60 waits"
    with pytest.raises(ServerUnavailableError, match=said):
        nobody.reset(seed=1)
    nobody.close()
    without_scheme = ig.HTTPGymEnv("localhost:7860", 1)
    with pytest.raises(InvalidConfigError, match=r"must begin with http:// or https://"):
        without_scheme.reset(seed=1)
    without_scheme.close()


def test_a_first_version_is_made_of_its_spec_without_a_warning_that_it_is_out_of_date() -> None:
    name = "InferenceGym/StaticUniform-v1"
    told = []
    for made_of in (name, gymnasium.spec(name)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            gymnasium.make(made_of).close()
        told.append(any("is out of date" in str(each.message) for each in caught))
    assert told == [True, False]
