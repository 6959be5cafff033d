"""The reward "grade": every step pays its share of the task's grade."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import inferencegym.gym as ig
from agents.registry import make_agent
from env import batch as env_batch
from env import reward as env_reward
from env.batch import ServingBatch
from env.families import FAMILIES
from env.inference_env import InferenceEnv
from grader.grader import GraderModule
from inferencegym.errors import InvalidConfigError
from inferencegym.models import SPEC_LENGTHS
from inferencegym.spaces.actions import from_row, snap
from inferencegym.tasks import get_task, list_tasks, with_settings

TASKS = [task.task_id for task in list_tasks(include_recorded=True)]
GRADE = {"reward": "grade"}
NAIVE = {"kv_budget": 1.0, "batch_size": 32, "spec_length": 0, "prefill_disagg": False, "quant_tier": 0}


def random_knobs(rng: np.random.Generator, *shape: int) -> NDArray[np.float64]:
    """Rows of knobs all over their ranges."""
    drawn = [rng.uniform(0.1, 1.0, shape), rng.choice(SPEC_LENGTHS, shape), rng.integers(1, 513, shape)]
    return np.stack([*drawn, rng.integers(2, size=shape), rng.integers(3, size=shape)], axis=-1).astype(np.float64)


def breakdown_and_means(env: InferenceEnv, actions: Any) -> tuple[dict[str, Any], dict[str, float], float]:
    """Grade of the episode with these actions, and the means of reward terms and rewards over its steps."""
    terms, rewards = [], []
    for action in actions:
        _, reward, _, info = env.step(action)
        terms.append(info["reward_terms"])
        rewards.append(reward)
    means = {name: float(np.mean([each[name] for each in terms])) for name in terms[0]}
    return GraderModule().score(env.task_id, env.episode_log), means, float(np.mean(rewards))


# ---------------------------------------------------------------- the law


@pytest.mark.parametrize("task_id", TASKS)
@given(seed=st.integers(0, 2**31), length=st.integers(1, 80), moves=st.sampled_from([0.0, 0.05, 1.0]))
@settings(max_examples=12)
def test_the_mean_reward_of_an_episode_is_its_grade_unless_a_part_is_cut(
    task_id: Any, seed: int, length: int, moves: float
) -> None:
    env = InferenceEnv(task_id=task_id, config={**GRADE, "episode_length": length})
    env.reset(seed=seed)
    rng = np.random.default_rng(seed)
    knobs = random_knobs(rng)
    played = []
    for _ in range(length):
        if rng.random() < moves:
            knobs = random_knobs(rng)
        played.append(from_row(snap(knobs[None], np.ones(5, dtype=np.bool_))[0]))
    grade, means, mean_reward = breakdown_and_means(env, played)
    assert set(means) == set(grade["breakdown"])
    below_zero = env.task.grade["kind"] in ("autoscaling", "objectives_memory")
    for name, mean in means.items():
        least = -1.0 if below_zero and name == "slo" else 0.0
        assert np.clip(mean, least, 1.0) == pytest.approx(grade["breakdown"][name], abs=1e-9)
    if all(0.0 <= mean <= 1.0 for mean in means.values()):
        assert mean_reward == pytest.approx(grade["score"], abs=1e-9)


@pytest.mark.parametrize(("task_id", "agent_name"), [(1, "naive"), (2, "heuristic"), (3, "heuristic")])
def test_the_mean_reward_of_a_whole_episode_of_which_nothing_is_cut_is_its_grade(task_id: int, agent_name: str) -> None:
    task = get_task(task_id)
    batch, agent = ServingBatch(task, 2, task.config(GRADE)), make_agent(agent_name, task)
    envs = [InferenceEnv(task_id=task_id) for _ in range(2)]
    seeds = [10_000, 10_001]
    for env, seed in zip(envs, seeds, strict=True):
        env.reset(seed=seed)
    observation, total = batch.reset(seeds), np.zeros(2)
    agent.reset(2)
    while not batch.done.any():
        knobs = snap(agent.act(observation), batch.mask)
        observation = batch.step(knobs)
        total += batch.reward
        for env, row in zip(envs, knobs, strict=True):
            env.step(from_row(row))
    scores = [GraderModule().score(task_id, env.episode_log)["score"] for env in envs]
    assert total / task.episode_length == pytest.approx(scores, abs=1e-9)


@given(
    task_id=st.sampled_from(TASKS),
    seed=st.integers(0, 2**31),
    length=st.integers(1, 60),
    hold=st.integers(1, 20),
    reward=st.sampled_from(["plan", "grade", "score"]),
)
@settings(max_examples=60, deadline=None)
def test_the_grade_so_far_is_the_grade_of_the_seconds_so_far_and_at_the_end_the_score(
    task_id: Any, seed: int, length: int, hold: int, reward: str
) -> None:
    env = InferenceEnv(task_id=task_id, reward=reward, hold=hold, config={"episode_length": length})
    rng = np.random.default_rng(seed)
    for episode in range(2):  # the second starts anew
        env.reset(seed=seed + episode)
        done = False
        while not done:
            _, _, done, info = env.step(from_row(snap(random_knobs(rng, 1), np.ones(5, dtype=np.bool_))[0]))
            grade = env.grade()
            assert info["grade_so_far"]["score"] == pytest.approx(grade["score"], abs=1e-9)
            assert info["grade_so_far"]["breakdown"] == pytest.approx(grade["breakdown"], abs=1e-9)
        assert info["grade_so_far"]["score"] == pytest.approx(info["score"], abs=1e-9)


@given(
    task_id=st.sampled_from(TASKS),
    seed=st.integers(0, 2**31),
    length=st.integers(1, 60),
    hold=st.integers(1, 20),
)
@settings(max_examples=60, deadline=None)
def test_rewards_of_the_score_sum_to_it_whatever_is_cut(task_id: Any, seed: int, length: int, hold: int) -> None:
    env = InferenceEnv(task_id=task_id, reward="score", hold=hold, config={"episode_length": length})
    rng = np.random.default_rng(seed)
    for episode in range(2):  # the second starts anew
        env.reset(seed=seed + episode)
        done, second, total, parts = False, 0, 0.0, dict[str, float]()
        while not done:
            _, reward, done, info = env.step(from_row(snap(random_knobs(rng, 1), np.ones(5, dtype=np.bool_))[0]))
            second, total = min(second + hold, length), total + reward
            parts = {name: parts.get(name, 0.0) + term for name, term in info["reward_terms"].items()}
            assert abs(reward) <= 1.0
            assert total == pytest.approx(info["grade_so_far"]["score"] * second / length, abs=1e-9)
        assert total == pytest.approx(info["score"], abs=1e-9)
        assert parts == pytest.approx(info["breakdown"], abs=1e-9)


# ---------------------------------------------------------------- numbers by hand


def test_a_peak_of_memory_takes_its_loss_off_in_the_step_that_reaches_it() -> None:
    """36 GB are free, and each GB beyond is a tenth of the part: a new peak pays for the whole episode at once."""
    env = InferenceEnv(task_id=2, reward="grade", config={"episode_length": 20})
    env.reset(seed=1)
    peak = 0.0
    for kv_budget in (0.1, 0.9, 0.8, 0.95, 1.0):
        _, _, _, info = env.step({**NAIVE, "kv_budget": kv_budget})
        before, peak = peak, max(peak, (info["metrics"]["gpu_memory_gb"] - 36) / 10, 0.0)
        assert info["reward_terms"]["memory"] == pytest.approx(1.0 - 20 * (peak - before), abs=1e-12)
    assert 0.0 < peak < 1.0


def test_stability_takes_off_what_each_change_adds_to_the_action_variance() -> None:
    """Changes of 256 and 0 slots have a spread of 128, a quarter of 512, which is half of the allowed 0.5."""
    env = InferenceEnv(task_id=3, config={**GRADE, "episode_length": 10})
    env.reset(seed=1)
    terms = [env.step({**NAIVE, "batch_size": batch})[3]["reward_terms"] for batch in (100, 356, 356, 356)]
    # Spread of 256, 0, 0: sqrt(256^2 / 3 - (256 / 3)^2) = 120.68; of that, 0.47138 of the allowed.
    expected = [1.0, 1.0, 1.0 - 10 * 0.5, 1.0 - 10 * (0.4714045 - 0.5)]
    assert [each["stability"] for each in terms] == pytest.approx(expected, abs=1e-6)


def test_a_second_of_the_hard_task_pays_its_tokens_violations_and_cost() -> None:
    env = InferenceEnv(task_id=3, config=GRADE)
    env.reset(seed=2)
    optimal = GraderModule().score(3, [env_step(env, NAIVE)])["breakdown"]["throughput"]
    _, reward, _, info = env.step(NAIVE)
    metrics, terms = info["metrics"], info["reward_terms"]
    tokens_at_the_best = env.episode_log[0]["metrics"]["tokens_per_sec"] / optimal
    expected = {
        "throughput": metrics["tokens_per_sec"] / tokens_at_the_best,
        "slo": 1 - metrics["slo_violations"] / 100,
        "cost": 1 - 200 * metrics["cost_per_1k"] / 5,
        "stability": 1.0,
    }
    assert terms == pytest.approx(expected, abs=1e-9)
    weighted = 0.4 * terms["throughput"] + 0.3 * terms["slo"] + 0.2 * terms["cost"] + 0.1 * terms["stability"]
    assert reward == pytest.approx(weighted, abs=1e-12)


def env_step(env: InferenceEnv, action: dict[str, Any]) -> dict[str, Any]:
    env.step(action)
    return env.episode_log[-1]


# ---------------------------------------------------------------- the same on every path


@pytest.mark.parametrize("task_id", [2, 3])
def test_rows_restarted_apart_pay_what_the_same_episodes_pay_alone(task_id: int) -> None:
    rows = ig.VectorInferenceEnv(3, task_id, reward="grade", action="natural", autoreset_mode="Disabled", n_threads=2)
    rows.reset(seed=[5, 6, 7])
    alone = [InferenceEnv(task_id=task_id, config=GRADE) for _ in range(3)]
    for env, seed in zip(alone, (5, 6, 7), strict=True):
        env.reset(seed=seed)
    rng = np.random.default_rng(task_id)
    for step in range(60):
        if step in (11, 30):
            row = step % 3
            rows.reset(seed=[50, 51, 52], options={"reset_mask": np.arange(3) == row})
            alone[row].reset(seed=50 + row)
        knobs = random_knobs(rng, 3).astype(np.float32)
        rewards = rows.step(knobs)[1]
        taken = snap(knobs.astype(np.float64), rows.batch.mask)
        assert rewards.tolist() == [env.step(from_row(row))[1] for env, row in zip(alone, taken, strict=True)]


def test_compiled_and_interpreted_shares_are_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Path(env_reward.__file__).with_name("reward.py")
    spec = importlib.util.spec_from_file_location("interpreted_reward", source)
    assert spec is not None
    assert spec.loader is not None
    interpreted = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(interpreted)
    task = get_task(3)
    compiled = ServingBatch(task, 2, task.config(GRADE))
    monkeypatch.setattr(env_batch, "GradeRewardKernel", interpreted.GradeRewardKernel)
    other = ServingBatch(task, 2, task.config(GRADE))
    compiled.reset([1, 2])
    other.reset([1, 2])
    for knobs in random_knobs(np.random.default_rng(5), 50, 2):
        compiled.step(knobs)
        other.step(knobs)
        np.testing.assert_allclose(compiled.reward, other.reward, rtol=1e-12)


# ---------------------------------------------------------------- the setting


def test_which_reward_is_paid_changes_nothing_but_the_reward() -> None:
    plan, grade = InferenceEnv(task_id=2), InferenceEnv(task_id=2, reward="grade")
    assert plan.config_dict()["reward"] == "plan"
    seen = [env.reset(seed=4) for env in (plan, grade)]
    for _ in range(5):
        assert seen[0] == seen[1]
        seen = [env.step(NAIVE)[0] for env in (plan, grade)]
    assert plan.episode_log[-1]["metrics"] == grade.episode_log[-1]["metrics"]
    assert FAMILIES["serving"].is_own_config(2, grade.config_dict())
    assert not FAMILIES["serving"].is_own_config(2, {**GRADE, "episode_length": 10})


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"reward": "scores"}, "config.reward"),
        ({"reward": 1}, "config.reward"),
        ({**GRADE, "beta": 0.2}, "config.beta"),
    ],
)
def test_an_unknown_reward_and_weights_of_the_grade_are_refused(config: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidConfigError) as refused:
        InferenceEnv(task_id=1, config=config)
    assert refused.value.field == field


def test_a_setting_is_given_as_argument_or_in_the_configuration_but_not_in_both() -> None:
    assert with_settings({"episode_length": 3}, reward=None) == {"episode_length": 3}
    assert with_settings({"reward": None}, reward="grade") == {"reward": "grade"}
    with pytest.raises(InvalidConfigError) as refused:
        ig.VectorInferenceEnv(1, 1, config={"reward": "plan"}, reward="grade")
    assert refused.value.field == "reward"
