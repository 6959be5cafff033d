"""The rollouts environment: episodes, grades of logs, HTTP, Gymnasium, and that control pays."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

import inferencegym.gym  # noqa: F401 - registers the ids
from agents.evaluate import gym_scores
from agents.families import compare_policies, run_policy
from agents.seeds import held_out_seeds
from env.families import FAMILIES, family_of
from env.rollouts.agents import POLICIES, make_controller, scores
from env.rollouts.env import RolloutEnv
from env.rollouts.tasks import RolloutConfig, draw_workload, get_rollout_task, rollout_tasks
from env.verify import verify_log
from inferencegym.errors import (
    EpisodeDoneError,
    InvalidActionError,
    InvalidConfigError,
    MalformedLogError,
    NotResetError,
    UnknownTaskError,
)
from inferencegym.rollouts import MAX_SESSIONS, OBSERVATION_FIELDS
from server.app import create_app
from server.settings import Settings

FAMILY = FAMILIES["rollouts"]
TASKS = list(rollout_tasks())
SHORT = {"episode_length": 40}
CAP = st.integers(1, MAX_SESSIONS)


def played(task_id: str, seed: int, caps: list[int], config: dict[str, Any] | None = None) -> RolloutEnv:
    env = RolloutEnv()
    env.reset(seed=seed, task_id=task_id, config=config)
    while not env.done:
        env.play(caps[env.n_entries % len(caps)])
    return env


@pytest.mark.parametrize("task_id", TASKS)
@settings(deadline=None, max_examples=8)
@given(seed=st.integers(0, 2**32), caps=st.lists(CAP, min_size=1, max_size=5))
def test_the_log_alone_has_the_grade_and_rewards_add_up_to_it(task_id: str, seed: int, caps: list[int]) -> None:
    env = played(task_id, seed, caps, SHORT)
    grade = env.grade()
    assert FAMILY.grade(task_id, env.episode_log) == grade
    assert sum(entry["reward"] for entry in env.episode_log) == pytest.approx(grade["score"], abs=1e-9)
    assert 0.0 <= grade["score"] <= 1.0
    again = FAMILY.replay(FAMILY.episode(task_id, seed, SHORT, env.actions))
    assert again.episode_log == env.episode_log


@pytest.mark.parametrize("task_id", TASKS)
def test_observations_are_those_of_the_schema_and_within_bounds(task_id: str) -> None:
    env = RolloutEnv()
    seen = env.reset(seed=3, task_id=task_id)
    while not env.done and env.n_entries < 200:
        assert list(seen) == list(OBSERVATION_FIELDS)
        for name, field in OBSERVATION_FIELDS.items():
            assert field.low <= seen[name] <= field.high, name
        FAMILY.observation_model.model_validate(seen)
        assert seen["sessions_in_flight"] <= max(seen["max_sessions"], seen["running_requests"])
        seen, _, _ = env.play(12)


def test_stopping_early_never_pays_more_than_playing_on() -> None:
    env = played("rollout-batch", 5, [12])
    whole = env.grade()["score"]
    for n in (1, 50, 200, len(env.episode_log) - 1):
        assert FAMILY.grade("rollout-batch", env.episode_log[:n])["score"] < whole


@pytest.mark.parametrize("bad", [0, MAX_SESSIONS + 1, 2.5, "4", True, None, {"cap": 3}])
def test_a_cap_out_of_range_is_refused_and_nothing_is_lost(bad: object) -> None:
    env = RolloutEnv()
    env.reset(seed=1)
    env.play(4)
    with pytest.raises(InvalidActionError):
        env.play(bad)
    assert env.n_entries == 1


def test_errors_of_the_episode_protocol() -> None:
    env = RolloutEnv()
    with pytest.raises(NotResetError):
        env.play(3)
    with pytest.raises(UnknownTaskError, match="rollout-mix"):
        env.reset(task_id="rollout-nothing")
    with pytest.raises(InvalidConfigError, match="episode_length"):
        env.reset(config={"episode_length": 0})
    env.reset(config={"episode_length": 1})
    env.play(3)
    with pytest.raises(EpisodeDoneError):
        env.play(3)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"timestep": 7}, "timestep"),
        ({"action": {"max_sessions": 0}}, "max_sessions"),
        ({"metrics": {}}, "elapsed_s"),
        ({"metrics": None}, "object"),
    ],
)
def test_a_log_that_is_no_log_is_refused(change: dict[str, Any], named: str) -> None:
    log = played("rollout-batch", 1, [4], {"episode_length": 2}).episode_log
    with pytest.raises(MalformedLogError, match=named):
        FAMILY.grade("rollout-batch", [log[0], log[1] | change])


def test_a_seed_decides_the_workload_and_ranges_bound_it() -> None:
    task = get_rollout_task("rollout-mix")
    ranges = task.entry.workloads[0]
    for seed in range(20):
        workload = draw_workload(task, seed, RolloutConfig())
        same = draw_workload(task, seed, RolloutConfig())
        assert np.array_equal(workload.sessions.turns.prompt_tokens, same.sessions.turns.prompt_tokens)
        assert workload.hardware in ranges.hardware
        n_turns = np.diff(workload.sessions.first_turn)
        assert ranges.turns[0] / 2 - 1 <= n_turns.min() <= n_turns.max() <= 1.5 * ranges.turns[1] + 1
    other = draw_workload(task, 21, RolloutConfig(kv_pool_tokens=50_000))
    assert other.kv_pool_tokens == 50_000


def test_it_is_played_graded_and_verified_over_http() -> None:
    with TestClient(create_app(Settings(store_url="memory://", access_log="off"))) as client:
        start = {"task_id": "rollout-batch", "seed": 9, "config": {"episode_length": 5}}
        session_id = client.post("/rollouts/reset", json=start).json()["session_id"]
        answers = [
            client.post("/rollouts/step", json={"session_id": session_id, "action": {"max_sessions": cap}}).json()
            for cap in (4, 8, 8, 8, 12)
        ]
        assert answers[-1]["done"]
        assert answers[-1]["observation"]["max_sessions"] == 12
        graded = client.post("/rollouts/grader", json={"session_id": session_id}).json()
        assert graded["score"] == pytest.approx(answers[-1]["info"]["score"])
        refused = client.post("/rollouts/step", json={"session_id": session_id, "action": {"max_sessions": 0}})
        assert refused.status_code == 422
        played = client.post("/rollouts/play", json={"agent": "fit", "task_id": "rollout-shift", "seed": 1})
        assert played.status_code == 200, played.text


def test_a_log_is_verified_by_replay() -> None:
    env = played("rollout-batch", 4, [6, 12], SHORT)
    assert verify_log(FAMILY, "rollout-batch", 4, SHORT, env.episode_log).grade() == env.grade()


@pytest.mark.filterwarnings("ignore:.*maximum value is infinity")
def test_gymnasium_accepts_the_environment_and_its_vector_form_plays_the_same() -> None:
    env = gymnasium.make("InferenceGym/RolloutBatch-v1", config=SHORT)
    check_env(env.unwrapped, skip_render_check=True)
    rows = gymnasium.make_vec("InferenceGym/RolloutBatch-v1", num_envs=3, config=SHORT)
    seen, _ = rows.reset(seed=[5, 6, 7])
    for row, seed in enumerate((5, 6, 7)):
        assert np.array_equal(seen[row], env.reset(seed=seed)[0])
    env.reset(seed=7)
    for _ in range(40):
        seen, reward, terminated, _, info = rows.step(np.array([3, 6, 9]))
        alone, alone_reward, *_ = env.step(9)
        assert alone[1] == 10
        assert np.array_equal(seen[2], alone)
        assert reward[2] == alone_reward
    assert terminated.all()
    assert info["score"][2] == env.unwrapped.grade()["score"]


def test_stable_baselines3_trains_on_it_and_its_model_is_scored() -> None:
    ppo, env_id = pytest.importorskip("stable_baselines3").PPO, "InferenceGym/RolloutBatch-v1"
    from agents.integrations.sb3 import SB3VecEnv

    rows = SB3VecEnv(gymnasium.make_vec(env_id, num_envs=2, config=SHORT, autoreset_mode="SameStep"))
    for envs in (gymnasium.make(env_id, config=SHORT), rows):
        model = ppo("MlpPolicy", envs, n_steps=64, seed=0, device="cpu").learn(128)
        assert model.num_timesteps == 128
    values = gym_scores(env_id, lambda seen: model.predict(seen, deterministic=True)[0], range(2), config=SHORT)
    assert ((values > 0.0) & (values <= 1.0)).all()


def test_gym_scores_are_those_of_episodes_that_end_at_different_times() -> None:
    seeds = range(10_000, 10_003)
    capped = gym_scores("InferenceGym/RolloutMix-v1", lambda seen: np.full(len(seen), 11), seeds)
    alone = scores(partial(make_controller, "constant:12"), seeds, get_rollout_task("rollout-mix"))
    assert capped == pytest.approx(alone, abs=1e-12)


@pytest.mark.parametrize("name", [*POLICIES, "ppo", "constant:7"])
def test_every_policy_plays_a_whole_episode(name: str) -> None:
    if name == "oracle_constant":
        env, *_ = run_policy(FAMILY, name, "rollout-mix", 3, {"episode_length": 100})
    else:
        env, *_ = run_policy(FAMILY, name, "rollout-shift", 3)
    assert env.done
    assert 0.0 < env.grade()["score"] < 1.0


def test_an_unknown_policy_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(InvalidConfigError, match="fit"):
        make_controller("fits")
    with pytest.raises(InvalidConfigError, match="constant:N"):
        make_controller("constant:0")


def test_evaluate_compares_policies_of_the_family() -> None:
    assert family_of("rollout-batch") is FAMILY
    compared = compare_policies(FAMILY, "rollout-batch", ["fit", "no_cap"], range(2))
    fit, no_cap = (agent["score"]["mean"] for agent in compared["agents"])
    assert fit > no_cap + 0.2


# ---------------------------------------------------------------- control pays

CONSTANTS = (7, 8, 10, 12, 16)


@pytest.fixture(scope="module")
def mix() -> dict[str, Any]:
    """Scores on 40 held-out workloads of rollout-mix."""
    names = ["no_cap", "aimd", "kv_target", "fit", *(f"constant:{cap}" for cap in CONSTANTS)]
    return {
        name: scores(lambda name=name: make_controller(name), held_out_seeds(40), get_rollout_task("rollout-mix"))
        for name in names
    }


def test_on_drawn_workloads_control_beats_every_constant(mix: dict[str, Any]) -> None:
    best_constant = max(mix[f"constant:{cap}"].mean() for cap in CONSTANTS)
    assert mix["fit"].mean() >= best_constant + 0.15
    assert mix["fit"].mean() >= mix["no_cap"].mean() + 0.2


def test_the_order_of_policies_is_the_same_in_both_halves_of_the_seeds(mix: dict[str, Any]) -> None:
    named = ["no_cap", "aimd", "constant:10", "kv_target", "fit"]
    halves = [sorted(named, key=lambda name: mix[name][half].mean()) for half in (slice(0, 20), slice(20, 40))]
    assert halves[0] == halves[1]


def test_a_pool_that_cannot_hold_the_system_prompt_refuses_every_session() -> None:
    env = RolloutEnv()
    env.reset(seed=1, config={"kv_pool_tokens": 16})
    seen, _, done = env.play(8)
    assert done
    assert seen["sessions_refused"] == 96
    assert env.grade()["score"] == 0.0
