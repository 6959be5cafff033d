"""Contract of ``InferenceEnv``: what reset, step and state promise."""

from __future__ import annotations

import math
from dataclasses import asdict, fields

import numpy as np
import pytest

from env.inference_env import InferenceEnv
from inferencegym.errors import (
    EpisodeDoneError,
    InvalidActionError,
    InvalidConfigError,
    NotResetError,
    UnknownTaskError,
)
from inferencegym.models import NAIVE_ACTION, OBSERVATION_FIELDS, QuantTier, ServeAction, ServeObservation
from inferencegym.tasks import get_task, list_tasks
from simulator.trace_sim import TraceSimulator

TASKS = [t.task_id for t in list_tasks(include_recorded=True)]


def play(env: InferenceEnv, action: ServeAction = NAIVE_ACTION, steps: int | None = None) -> list[float]:
    rewards = []
    done = False
    while not done and (steps is None or len(rewards) < steps):
        _, reward, done, _ = env.step(action)
        rewards.append(reward)
    return rewards


@pytest.mark.parametrize("task_id", TASKS)
def test_an_episode_has_200_steps_and_rewards_between_minus_one_and_one(task_id: int) -> None:
    env = InferenceEnv(task_id=task_id)
    env.reset(seed=1)
    rewards = play(env)
    assert len(rewards) == 200
    assert all(-1.0 <= r <= 1.0 for r in rewards)
    with pytest.raises(EpisodeDoneError):
        env.step(NAIVE_ACTION)


@pytest.mark.parametrize("task_id", TASKS)
def test_a_thousand_random_steps_keep_every_number_finite_and_in_range(task_id: int) -> None:
    env = InferenceEnv(task_id=task_id, config={"episode_length": 1000})
    env.reset(seed=2)
    rng = np.random.default_rng(0)
    for _ in range(1000):
        action = ServeAction(
            float(rng.uniform(0.1, 1)),
            int(rng.choice([0, 1, 2, 4, 8])),
            int(rng.integers(1, 513)),
            bool(rng.integers(2)),
            QuantTier(int(rng.integers(3))),
        )
        observation, reward, _, info = env.step(action)
        assert -1.0 <= reward <= 1.0
        assert all(math.isfinite(v) for v in info["metrics"].values())
        flat = [v for f in asdict(observation).values() for v in (f if isinstance(f, list) else [f])]
        for value, field in zip(flat, OBSERVATION_FIELDS.values(), strict=True):
            assert field.low <= value <= field.high, field.name
    assert env.done


def test_floods_come_on_time_in_a_long_episode() -> None:
    env = InferenceEnv(task_id=3, config={"episode_length": 1000})
    env.reset(seed=0)
    phases = [env.step(NAIVE_ACTION)[3]["workload"]["phase"] for _ in range(1000)]
    on = np.array([p == "burst" for p in phases])
    starts = np.flatnonzero(on[1:] & ~on[:-1]) + 1
    assert (np.diff(starts) == 120).all()
    assert on.sum() == sum(min(15, 1000 - start) for start in starts)  # the episode may end within a flood


def test_observation_has_the_twelve_fields_of_the_plan() -> None:
    observation = InferenceEnv(task_id=1).reset()
    assert [f.name for f in fields(ServeObservation)] == list(asdict(observation))
    assert len(asdict(observation)) == 12
    assert len(observation.priority_distribution) == 3


def test_every_reset_gets_its_own_session_id() -> None:
    env = InferenceEnv(task_id=1)
    ids = set()
    for _ in range(5):
        env.reset()
        ids.add(env.session_id)
    assert len(ids) == 5


def test_both_constructor_forms_play_the_same_episode() -> None:
    simulator = TraceSimulator()
    a, b = InferenceEnv(simulator, 2, 7), InferenceEnv(task_id=2, seed=7)
    assert a.reset() == b.reset()
    assert play(a, steps=20) == play(b, steps=20)


def test_reset_may_change_the_task_and_the_seed() -> None:
    env = InferenceEnv()
    env.reset(task_id=3, seed=5)
    assert (env.state()["task_id"], env.state()["seed"]) == (3, 5)
    other = InferenceEnv(task_id=3, seed=5)
    other.reset()
    assert play(env, steps=10) == play(other, steps=10)


def test_seed_zero_is_not_the_default_seed() -> None:
    env = InferenceEnv(task_id=1, seed=42)
    env.reset(seed=0)
    assert env.seed == 0


def test_a_step_before_reset_is_refused() -> None:
    env = InferenceEnv()
    for too_early in (lambda: env.step(NAIVE_ACTION), env.observation, env.workload, env.info):
        with pytest.raises(NotResetError):
            too_early()


@pytest.mark.parametrize(
    ("action", "allowed"),
    [
        ({"batch_size": 0}, "1 to 512"),
        ({"batch_size": 513}, "1 to 512"),
        ({"batch_size": 1.5}, "integer"),
        ({"kv_budget": float("nan")}, "0.1 to 1"),
        ({"kv_budget": 0.0999}, "0.1 to 1"),
        ({"kv_budget": 1.001}, "0.1 to 1"),
        ({"kv_budget": "1"}, "number"),
        ({"spec_length": 3}, "0, 1, 2, 4, 8"),
        ({"quant_tier": "FP8"}, "FP16"),
        ({"prefill_disagg": "yes"}, "true or false"),
        ({"batch": 4}, "left out"),
        ({"batch_size": True}, "integer"),
    ],
)
def test_a_refused_action_names_its_field_and_changes_nothing(action: dict[str, object], allowed: str) -> None:
    env = InferenceEnv(task_id=3)
    env.reset()
    before = env.state()
    with pytest.raises(InvalidActionError) as refused:
        env.step(action)
    assert refused.value.field == next(iter(action))
    assert allowed in refused.value.allowed
    assert env.state() == before


def test_knobs_that_a_task_does_not_offer_are_forced_and_shown() -> None:
    env = InferenceEnv(task_id=1)
    env.reset()
    _, _, _, info = env.step(
        {"batch_size": 64, "kv_budget": 0.5, "spec_length": 8, "prefill_disagg": True, "quant_tier": "INT4"}
    )
    assert info["action_applied"] == {
        "kv_budget": 0.5,
        "spec_length": 0,
        "batch_size": 64,
        "prefill_disagg": False,
        "quant_tier": 0,
    }


def test_missing_fields_take_the_naive_defaults() -> None:
    env = InferenceEnv(task_id=3)
    env.reset()
    _, _, _, info = env.step({})
    assert info["action_applied"] == NAIVE_ACTION.to_dict()


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"alpha": 1.5}, "config.alpha"),
        ({"alpha": -0.1}, "config.alpha"),
        ({"episode_length": 0}, "config.episode_length"),
        ({"episode_length": 10.5}, "config.episode_length"),
        ({"omega": 1}, "config.omega"),
        ({"beta": float("inf")}, "config.beta"),
        ({"beta": 0.5, "gamma": 0.3, "delta": 0.3}, "config"),
    ],
)
def test_a_wrong_configuration_is_refused_by_its_field(config: dict[str, float], field: str) -> None:
    with pytest.raises(InvalidConfigError) as refused:
        InferenceEnv(task_id=1, config=config)
    assert refused.value.field == field
    # What is at the limit is taken.
    InferenceEnv(task_id=1, config={"alpha": 1.0, "beta": 0.5, "gamma": 0.25, "delta": 0.25, "episode_length": 1})


def test_an_unknown_task_is_refused_and_the_ids_that_there_are_named() -> None:
    with pytest.raises(UnknownTaskError, match="1, 2, 3"):
        InferenceEnv(task_id=9)


def test_the_configuration_changes_the_reward_and_not_the_physics() -> None:
    a, b = InferenceEnv(task_id=2), InferenceEnv(task_id=2, config={"alpha": 0.0})
    a.reset(seed=1)
    b.reset(seed=1)
    _, reward_a, _, info_a = a.step(NAIVE_ACTION)
    _, reward_b, _, info_b = b.step(NAIVE_ACTION)
    assert info_a["metrics"] == info_b["metrics"]
    assert reward_a - reward_b == pytest.approx(0.4 * info_a["reward_terms"]["throughput"])


def test_the_reward_is_the_weighted_sum_of_its_terms() -> None:
    env = InferenceEnv(task_id=3)
    env.reset(seed=3)
    for _ in range(30):
        _, reward, _, info = env.step(NAIVE_ACTION)
        t = info["reward_terms"]
        expected = 0.40 * t["throughput"] - 0.25 * t["latency"] - 0.15 * t["slo_violations"] - 0.40 * t["cost"]
        assert reward == pytest.approx(expected, abs=1e-12)
        assert all(0.0 <= v <= 1.0 for v in t.values())


def test_state_counts_steps_and_sums_rewards() -> None:
    env = InferenceEnv(task_id=1)
    env.reset()
    rewards = play(env, steps=7)
    state = env.state()
    assert state["step_count"] == 7
    assert state["cumulative_reward"] == pytest.approx(sum(rewards))
    assert state["done"] is False
    assert state["workload_phase"] == "warmup"


def test_a_restart_forgets_steps_rewards_and_cost() -> None:
    env = InferenceEnv(task_id=1, config={"episode_length": 4})
    assert (env.state()["cumulative_reward"], env.state()["cost_so_far"], env.done) == (0.0, 0.0, False)
    env.reset(seed=1)
    first = env.state()
    play(env)
    assert env.state()["cost_so_far"] > 0.0
    env.reset(seed=1)
    assert env.episode_log == env.actions == []
    again = env.state()
    assert {**again, "session_id": ""} == {**first, "session_id": ""}
    assert (again["step_count"], again["cumulative_reward"], again["cost_so_far"], again["done"]) == (
        0,
        0.0,
        0.0,
        False,
    )


def test_the_phase_of_each_second_is_that_of_its_own_arrivals() -> None:
    # ENVIRONMENT.md: task 3 floods for 15 s every 120 s; warm-up is the first 10 s, cooldown the 10 s after a flood.
    burst = get_task(3).burst
    assert burst is not None
    assert (burst.interval_steps, burst.duration_steps) == (120, 15)
    env = InferenceEnv(task_id=3)
    env.reset(seed=0)
    assert env.state()["workload_phase"] == "warmup"
    phases = []
    for _ in range(200):
        info = env.step(NAIVE_ACTION)[3]
        assert info["workload"]["phase"] == env.state()["workload_phase"] == env.workload().phase
        assert info["workload"]["is_burst"] == (info["workload"]["phase"] == "burst")
        phases.append(info["workload"]["phase"])
    starts = range(burst.offset_steps, 200, 120)
    expected = ["warmup"] * 10 + ["steady"] * 190
    for start in starts:
        expected[start : start + 25] = (["burst"] * 15 + ["cooldown"] * 10)[: 200 - start]
    assert phases == expected


def test_a_longer_episode_starts_with_the_shorter_one() -> None:
    short = InferenceEnv(task_id=3, config={"episode_length": 50})
    long = InferenceEnv(task_id=3, config={"episode_length": 400})
    short.reset(seed=8)
    long.reset(seed=8)
    assert play(short) == play(long, steps=50)
