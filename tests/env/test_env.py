"""Contract of ``InferenceEnv``: what reset, step and state promise."""

from __future__ import annotations

import importlib.util
import json
import math
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from env import inference_env, log
from env.batch import ServingBatch
from env.inference_env import InferenceEnv
from env.serving.family import describe_task
from inferencegym.errors import (
    EpisodeDoneError,
    InvalidActionError,
    InvalidConfigError,
    NotResetError,
    UnknownTaskError,
)
from inferencegym.models import (
    NAIVE_ACTION,
    OBSERVATION_FIELDS,
    PRIORITY_CLASSES,
    QuantTier,
    ServeAction,
)
from inferencegym.tasks import Calibration, TaskId, get_task, list_tasks
from simulator.hardware.tables import load_tables
from simulator.trace_sim import TraceSimulator
from simulator.workload import load_source

TASKS = [t.task_id for t in list_tasks(include_recorded=True)]


def play(env: InferenceEnv, action: ServeAction = NAIVE_ACTION, steps: int | None = None) -> list[float]:
    rewards = []
    done = False
    while not done and (steps is None or len(rewards) < steps):
        _, reward, done, _ = env.step(action)
        rewards.append(reward)
    return rewards


@pytest.mark.parametrize("task_id", TASKS)
def test_an_episode_has_the_tasks_steps_and_rewards_between_minus_one_and_one(task_id: int) -> None:
    env = InferenceEnv(task_id=task_id)
    env.reset(seed=1)
    rewards = play(env)
    assert len(rewards) == env.task.episode_length
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


@pytest.mark.parametrize("task_id", TASKS)
def test_nothing_that_is_shown_is_a_millionth_of_a_millionth(task_id: int) -> None:
    # Tails of distributions: a queue that is nearly served leaves 4.9e-23 of a late request.
    env = InferenceEnv(task_id=task_id)
    env.reset(seed=1)
    while not env.done:
        observation, _, _, info = env.step({"batch_size": 256, "kv_budget": 0.9})
        flat = [v for f in asdict(observation).values() for v in (f if isinstance(f, list) else [f])]
        assert [v for v in (*flat, *info["metrics"].values()) if 0.0 < abs(v) < 1e-12] == []


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
        ({"batch": 4}, "did you mean batch_size?"),
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


def test_what_the_table_or_the_task_lacks_is_refused_and_changes_nothing() -> None:
    for env, action, allowed in (
        (InferenceEnv(task_id=3, config={"hardware": "a100-qwen3-8b"}), {"quant_tier": 1}, "0 (BF16)"),
        (InferenceEnv(task_id="autoscale"), {"replicas": 7}, "from 1 to 6"),
    ):
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
    # values at the limit are accepted
    InferenceEnv(task_id=1, config={"alpha": 1.0, "beta": 0.5, "gamma": 0.25, "delta": 0.25, "episode_length": 1})


def test_an_unknown_task_is_refused_and_the_ids_that_there_are_named() -> None:
    with pytest.raises(UnknownTaskError, match=r"1, 2, 3, .* INFERENCEGYM_TASKS=FILE"):
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


RANDOM = np.random.default_rng(11)
PLAYED = [
    {
        "kv_budget": float(RANDOM.uniform(0.1, 1)),
        "spec_length": int(RANDOM.choice([0, 1, 2, 4, 8])),
        "batch_size": int(RANDOM.integers(1, 513)),
        "prefill_disagg": bool(RANDOM.integers(2)),
        "quant_tier": int(RANDOM.integers(3)),
    }
    for _ in range(80)
]
CAPPED = Calibration(floor_tps=1.0, optimal_tps=2.0, max_throughput_tps=400.0, price=0.7)


@pytest.mark.parametrize(
    ("task_id", "slo_ms", "weights"),
    [(1, 500.0, (0.4, 0.25, 0.25, 0.1)), (2, 300.0, (0.4, 0.25, 0.3, 0.1)), (3, 200.0, (0.4, 0.25, 0.15, 0.4))],
)
def test_the_reward_follows_from_the_metrics_as_the_document_says(
    task_id: int, slo_ms: float, weights: tuple[float, ...]
) -> None:
    env = InferenceEnv(task_id=task_id, calibration=CAPPED)
    env.reset(seed=5)
    seen: set[str] = set()
    for action in PLAYED:
        observation, reward, _, info = env.step(action)
        metrics, terms = info["metrics"], info["reward_terms"]
        latency = math.log(1 + metrics["ttft_p50_ms"] / slo_ms) / math.log(1 + 5000 / slo_ms)
        # The medium task grades memory: 36 GB are free, and 10 GB beyond them cost everything.
        beyond = max(0.0, metrics["gpu_memory_gb"] - 36) / 10 if task_id == 2 else 0.0
        expected = {
            "throughput": min(1.0, metrics["tokens_per_sec"] / 400),
            "latency": min(1.0, latency),
            "slo_violations": min(1.0, observation.slo_violation_rate + beyond),
            # A budget of 5 for 200 steps.
            "cost": metrics["cost_per_1k"] / (metrics["cost_per_1k"] + 5 / 200),
        }
        assert terms == {name: pytest.approx(value, rel=1e-9) for name, value in expected.items()}
        gain, *prices = [weight * expected[name] for weight, name in zip(weights, expected, strict=True)]
        assert reward == pytest.approx(gain - sum(prices), abs=1e-9)
        seen |= {name for name, value in terms.items() if value == 1.0}
    assert "throughput" in seen, "no step reaches the limit of throughput"


@pytest.mark.parametrize("task_id", [1, 2, 3])
def test_the_cost_of_a_step_is_that_of_its_gpus_per_thousand_tokens(task_id: int) -> None:
    env = InferenceEnv(task_id=task_id, calibration=CAPPED)
    env.reset(seed=6)
    spent = 0.0
    replicas = {1: 1, 2: 5, 3: 6}[task_id]
    for action in PLAYED[:5] + [{**NAIVE_ACTION.to_dict(), "prefill_disagg": False}] * 20:
        observation, _, _, info = env.step(action)
        metrics = info["metrics"]
        spent += metrics["cost_per_1k"]
        assert observation.cost_so_far == env.state()["cost_so_far"] == pytest.approx(spent)
        assert observation.timestep == info["timestep"]
    # No replica prefills apart any more.
    assert metrics["cost_per_1k"] == pytest.approx(0.7 * replicas / max(metrics["tokens_per_sec"] / 1000, 0.05))


@pytest.mark.parametrize("task_id", [1, 2, 3])
def test_the_observation_shows_the_metrics_within_its_bounds(task_id: int) -> None:
    env = InferenceEnv(task_id=task_id)
    env.reset(seed=7)
    for action in PLAYED:
        observation, _, _, info = env.step(action)
        metrics = info["metrics"]
        assert observation.ttft_p50 == min(metrics["ttft_p50_ms"], 5000.0)
        assert observation.tpot_p50 == min(metrics["tpot_ms"], 500.0)
        assert observation.gpu_memory_used_gb == metrics["gpu_memory_gb"]
        assert observation.spec_accept_rate == metrics["spec_accept_rate"]
        assert observation.queue_depth <= 512


def test_the_observation_averages_prompts_over_ten_seconds_and_classes_over_fifty() -> None:
    task = get_task(3)
    env = InferenceEnv(task_id=3)
    env.reset(seed=7)
    source = load_source(task, load_tables())
    load = source.draw([7], 80)
    arrivals, prompt_tokens = load.arrivals[0], load.prompt_tokens[0]
    place = [PRIORITY_CLASSES.index(name) for name in source.stats.names]
    rate = 0.0
    for t in range(80):
        observation, *_ = env.step(NAIVE_ACTION)
        prompts = prompt_tokens[max(0, t - 9) : t + 1].sum() / arrivals[max(0, t - 9) : t + 1].sum()
        assert observation.mean_prompt_len == pytest.approx(np.clip(prompts, 32, 8192))
        classes = arrivals[max(0, t - 49) : t + 1].sum(axis=0)
        shares = np.zeros(3)
        shares[place] = classes / classes.sum()
        assert observation.priority_distribution == pytest.approx(shares.tolist())
        # An average over ten steps, as in the document, has the weight 2 / (10 + 1).
        rate = arrivals[0].sum() if t == 0 else rate + 2 / 11 * (arrivals[t].sum() - rate)
        if t > 60:  # however it began
            assert observation.arrival_rate == pytest.approx(min(rate, 1000.0), rel=1e-3)
    assert env.arrivals() == arrivals[:80].sum(axis=1).tolist()


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


@pytest.mark.parametrize("task_id", TASKS)
def test_the_text_about_a_score_names_every_weight_of_it(task_id: int) -> None:
    task = get_task(task_id)
    text = describe_task(task)["score"]
    weights = task.grade.get("weights", (0.5, 0.5) if task.grade["kind"] == "latency_memory" else ())
    assert weights or text.startswith("(mean tokens/s - ")
    assert [weight for weight in weights if f"{weight:g} * " not in text] == []


def test_a_reset_names_as_many_seeds_as_rows() -> None:
    batch = ServingBatch(get_task(1), 2)
    for seeds, rows in (([1], None), ([1, 2, 3], None), ([1, 2], [0])):
        with pytest.raises(ValueError, match="argument"):
            batch.reset(seeds, rows)


@pytest.mark.parametrize("replicas", [0, -1, 4097, 2.5, True, "2"])
def test_a_number_of_replicas_that_no_fleet_has_is_refused(replicas: Any) -> None:
    assert ServeAction(1.0, 0, 32, False, QuantTier.FP16, 4096).validate()
    with pytest.raises(InvalidActionError) as refused:
        ServeAction(1.0, 0, 32, False, QuantTier.FP16, replicas).validate()
    assert refused.value.field == "replicas"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kv_budget", True), ("kv_budget", "1"), ("kv_budget", 1.1), ("kv_budget", 0.05), ("kv_budget", math.nan),
        ("spec_length", True), ("spec_length", 3), ("spec_length", "2"),
        ("batch_size", True), ("batch_size", 0), ("batch_size", 513), ("batch_size", 1.5), ("batch_size", None),
        ("prefill_disagg", 1), ("prefill_disagg", None), ("quant_tier", 0), ("quant_tier", "INT8"),
    ],
)  # fmt: skip
def test_a_knob_of_another_type_or_range_is_refused_by_name(field: str, value: Any) -> None:
    naive = {name: getattr(NAIVE_ACTION, name) for name in ("kv_budget", "spec_length", "batch_size")}
    knobs: dict[str, Any] = {**naive, "prefill_disagg": False, "quant_tier": QuantTier.FP16}
    assert ServeAction(**knobs).validate()
    with pytest.raises(InvalidActionError) as refused:
        ServeAction(**{**knobs, field: value}).validate()
    assert refused.value.field == field


def interpreted(module: ModuleType) -> ModuleType:
    """The source of a compiled module, not compiled."""
    spec = importlib.util.spec_from_file_location("interpreted_log", Path(str(module.__file__)).with_name("log.py"))
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


SCALING = next(task.task_id for task in list_tasks(include_recorded=True) if task.fleet.max_replicas is not None)


@pytest.mark.parametrize("task_id", [3, SCALING])
def test_compiled_and_interpreted_logs_are_equal(task_id: TaskId, monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    for log_type in (log.EpisodeLog, interpreted(log).EpisodeLog):
        monkeypatch.setattr(inference_env, "EpisodeLog", log_type)
        env = InferenceEnv(task_id=task_id, seed=4, config={"episode_length": 12, "hold": 5})
        env.reset()
        infos = [env.step({"batch_size": size, "quant_tier": 1})[3] for size in (64, 8, 128)]
        told.append(json.dumps([infos, env.episode_log, env.grade()]))
    assert told[0] == told[1]
    assert not str(log.__file__).endswith(".py"), "run `make build`: the log is not compiled"
