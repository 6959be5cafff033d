"""Tasks that scale: replicas load, serve, drain and are paid; logs, replays, formats and the reference agree."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from numpy.typing import NDArray

from agents.policies.autoscalers import ReplicaPlan
from env.batch import ServingBatch
from env.dynamics import FluidFleet
from env.gym import InferenceGymEnv
from env.inference_env import InferenceEnv
from env.reference import ReferenceFleet
from env.serving.family import FAMILY
from env.vector import VectorInferenceEnv
from env.verify import verify_log
from grader.kinds.autoscaling import gpu_cost
from inferencegym.batch_format import BatchSteps, decode_request, encode_request
from inferencegym.errors import ForgedLogError, InvalidActionError, InvalidConfigError
from inferencegym.models import OBSERVATION_FIELDS, PHASES, SCALING_FIELDS, ServeAction
from inferencegym.spaces.actions import from_row, snap
from inferencegym.spaces.forecast import forecast_rps
from inferencegym.spaces.formats import ObservationCodec, action_codec, schedule_features
from inferencegym.tasks import DATA_DIR, SCALING_TASKS, get_calibration, get_task, list_tasks, parse_task

SCALING = [t.task_id for t in list_tasks(include_recorded=True) if t.fleet.max_replicas is not None]
FIXED = [t.task_id for t in list_tasks(include_recorded=True) if t.fleet.max_replicas is None]
KNOBS_SERVED = {"kv_budget": 0.9, "batch_size": 256, "spec_length": 1, "quant_tier": 1}
KNOBS = [0.9, 2.0, 128.0, 0.0, 1.0]


def batch_of(task_id: Any, seeds: list[int], steps: int | None = None) -> ServingBatch:
    task = get_task(task_id)
    batch = ServingBatch(task, len(seeds), None if steps is None else task.config({"episode_length": steps}))
    batch.reset(seeds)
    return batch


def rows(n: float, count: int = 1) -> NDArray[np.float64]:
    return np.tile([*KNOBS, n], (count, 1))


def paid(batch: ServingBatch) -> NDArray[np.float64]:
    replicas: NDArray[np.float64] = (
        gpu_cost(batch.metric["tokens_per_sec"], batch.metric["cost_per_1k"]) / batch.calibration.price
    )
    return replicas


def load_s(batch: ServingBatch) -> float:
    return float(batch.fleet.params.constants["start_s"][1])


@pytest.mark.parametrize("task_id", SCALING)
def test_a_new_replica_serves_once_its_weights_are_loaded_and_is_paid_from_the_start(task_id: Any) -> None:
    batch = batch_of(task_id, [1], 40)
    first, most = batch.task.fleet.n_replicas, batch.task.fleet.max_replicas
    up = []
    for _ in range(30):
        batch.step(rows(float(most or 0)))
        assert paid(batch)[0] == pytest.approx(most)
        up.append(float(batch.fleet.state.rows["replicas_up"][0]))
    assert up[0] == first
    assert up[-1] == most
    # What is missing until they serve is the time that each of them loads.
    assert sum((most or 0) - each for each in up) == pytest.approx(((most or 0) - first) * load_s(batch))


@pytest.mark.parametrize("task_id", SCALING)
def test_a_removed_replica_is_paid_until_its_last_request_has_ended(task_id: Any) -> None:
    batch = batch_of(task_id, [1], 200)
    for _ in range(30):
        batch.step(rows(6.0))
    fleet = []
    for _ in range(150):
        batch.step(rows(3.0))
        fleet.append(float(paid(batch)[0]))
    assert 3.0 < fleet[0] <= 6.0
    assert all(after <= before + 1e-9 for before, after in pairwise(fleet))
    assert fleet[-1] == pytest.approx(3.0)


@pytest.mark.parametrize("task_id", SCALING)
def test_requests_are_conserved_while_replicas_come_and_go(task_id: Any) -> None:
    batch = batch_of(task_id, [1, 2, 3, 4])
    rng, state = np.random.default_rng(0), batch.fleet.state.rows
    totals = {name: np.zeros(4) for name in ("admitted", "completed", "rejected")}
    for t in range(150):
        knobs = rows(1.0, 4)
        knobs[:, 5] = rng.integers(1, (batch.task.fleet.max_replicas or 1) + 1, 4)
        knobs[:, 4] = t // 50 % 2
        batch.step(knobs)
        for name, total in totals.items():
            total += batch.metric[name]
        held = state["in_flight"].sum(axis=1) + state["preempted"].sum(axis=1)
        arrived = batch.fleet.arrivals[:, : t + 1].sum(axis=(1, 2))
        waiting = state["queue"].sum(axis=1)
        np.testing.assert_allclose(totals["admitted"], totals["completed"] + held, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(arrived, totals["admitted"] + waiting + totals["rejected"], rtol=1e-6, atol=1e-6)
        assert (state["draining_requests"] <= state["in_flight"].sum(axis=1) + 1e-9).all()
        assert (paid(batch) >= batch.fleet.replicas - 1e-6).all()


@pytest.mark.parametrize("task_id", SCALING)
def test_a_row_of_a_batch_is_the_scalar_episode_and_its_log_verifies(task_id: Any) -> None:
    rng = np.random.default_rng(5)
    task = get_task(task_id)
    length = 40
    batch = batch_of(task_id, [7, 8], length)
    env = InferenceEnv(task_id=task_id, seed=8, config={"episode_length": length})
    env.reset()
    for _ in range(length):
        knobs = snap(rng.uniform(0.0, 10.0, (2, 6)), batch.mask, task.fleet)
        knobs[:, 4] = 0
        batch.step(knobs)
        env.step(from_row(knobs[1]))
        np.testing.assert_array_equal(env.observation_row(fleet=True), batch.full_observation()[1])
    config = {"episode_length": length}
    verify_log(FAMILY, task_id, 8, config, env.episode_log)
    forged = [{**entry, "action": {**entry["action"], "replicas": 1}} for entry in env.episode_log]
    with pytest.raises(ForgedLogError):
        verify_log(FAMILY, task_id, 8, config, forged)


@pytest.mark.parametrize("task_id", SCALING)
def test_the_mean_reward_is_the_grade(task_id: Any) -> None:
    task = get_task(task_id)
    env = InferenceEnv(task_id=task_id, seed=3, reward="grade")
    env.reset()
    most = task.fleet.max_replicas or 1
    total = 0.0  # no part of the grade is cut to [0, 1], where the reward has no bounds
    for t in range(env.episode_length):
        total += env.step(ServeAction.from_dict({**KNOBS_SERVED, "replicas": most - (t > 200)}))[1]
    assert total / env.episode_length == pytest.approx(env.grade()["score"], abs=1e-6)


@pytest.mark.parametrize("task_id", FIXED)
def test_a_task_that_does_not_scale_has_five_knobs_and_ignores_the_sixth(task_id: Any) -> None:
    env = InferenceEnv(task_id=task_id, seed=1, config={"episode_length": 2})
    env.reset()
    env.step({"replicas": 3})
    assert "replicas" not in env.episode_log[0]["action"]
    assert not set(SCALING_FIELDS) & set(env.info()["fleet"])
    with pytest.raises(InvalidActionError, match="5"):
        batch_of(task_id, [1], 2).step(rows(1.0))


def test_info_tells_the_replicas_asked_for_from_those_in_service_and_those_that_drain() -> None:
    env = InferenceEnv(task_id="autoscale")
    env.reset(seed=1)
    batch = batch_of("autoscale", [1], 2)
    loading_s = math.ceil(float(batch.fleet.params.constants["start_s"][0]))  # FP16, the default
    seen = [env.step({"replicas": replicas})[3]["fleet"] for replicas in [5] * (loading_s + 2) + [2] * 60]
    shown = [tuple(fleet[name] for name in SCALING_FIELDS) for fleet in seen]
    assert tuple(SCALING_FIELDS) == ("replicas", "replicas_ready", "replicas_draining")
    assert set(shown[: loading_s - 1]) == {(5, 2, 0.0)}
    assert shown[loading_s + 1] == (5, 5, 0.0)
    assert shown[loading_s + 2] == (2, 2, 3.0)
    assert shown[-1] == (2, 2, 0.0)
    assert [fleet["seconds_since_change"] for fleet in seen[loading_s + 1 : loading_s + 4]] == [loading_s + 2, 1, 2]


def test_more_replicas_than_the_task_has_are_refused_and_none_leaves_the_fleet_as_it_starts() -> None:
    env = InferenceEnv(task_id="autoscale")
    env.reset()
    with pytest.raises(InvalidActionError, match="an integer from 1 to 6, the task"):
        env.step({"replicas": 11})
    env.step({})
    assert env.info()["fleet"]["replicas"] == env.task.fleet.n_replicas


@pytest.mark.parametrize("form", ["box", "natural", "discrete"])
def test_gymnasium_environments_have_a_sixth_knob_that_codecs_keep(form: str) -> None:
    one = InferenceGymEnv(task_id="autoscale", action=form, observation="full")
    many = VectorInferenceEnv(2, "autoscale", action=form, observation="full")
    one.reset(seed=1)
    many.reset(seed=1)
    knobs = rows(5.0, 2)
    actions = action_codec(form, many.task.fleet.max_replicas).encode(knobs)
    seen, *_ = many.step(actions)
    alone, *_ = one.step(actions[0])
    assert one.observation_space.contains(alone)
    assert seen.shape == (2, *one.observation_space.shape)  # type: ignore[misc]
    assert many.batch.fleet.replicas.tolist() == [5.0, 5.0]


@pytest.mark.parametrize("task_id", SCALING)
def test_an_action_of_replicas_alone_leaves_the_other_knobs_to_the_capacity_plan(task_id: Any) -> None:
    one, many = InferenceGymEnv(task_id, action="replicas"), VectorInferenceEnv(2, task_id, action="replicas")
    most = many.task.fleet.max_replicas
    assert one.action_space == many.single_action_space == spaces.Discrete(most)
    one.reset(seed=1)
    many.reset(seed=1)
    one.step(np.int64(1))
    many.step(np.array([most - 1, 1]))
    assert many.batch.fleet.replicas.tolist() == [most, 2.0]
    plan = from_row(np.append(ReplicaPlan.of(get_task(task_id)).plan.row(), 2.0))
    assert one.episode_log[0]["action"] == plan.to_dict()
    for wrong in (np.array([most, 0]), np.array([-1, 0]), np.array([0.5, 0.0]), np.array([[0, 0]])):
        with pytest.raises(InvalidActionError, match=f"an integer from 0 to below {most}"):
            many.step(wrong)


def test_the_forecast_is_right_on_average_and_wrong_in_an_episode() -> None:
    task = get_task("autoscale")
    batch = batch_of("autoscale", list(range(64)))
    arrived = batch.fleet.arrivals.sum(axis=2)
    forecast = forecast_rps(task, np.arange(task.episode_length, dtype=np.float64))
    assert task.day is not None
    surges = 1.0 + task.day.surges * task.day.surge_duration_steps / task.episode_length
    assert arrived.mean() == pytest.approx(forecast.mean() * surges, rel=0.05)
    errors = arrived[:, 400:500].mean(axis=1) / forecast[400:500].mean()
    assert errors.std() > 0.5 * task.day.forecast_error
    features = schedule_features(task, task.episode_length)
    np.testing.assert_allclose(features[:-15, 1], features[15:, 0], atol=1e-6)


def test_a_random_load_differs_from_seed_to_seed_within_its_ranges_and_is_not_announced() -> None:
    task = get_task("autoscale-mix")
    load = task.random_load
    assert load is not None
    batch = batch_of("autoscale-mix", list(range(64)))
    rates = batch.fleet.arrivals.sum(axis=2) / task.arrival_rate_rps
    low, high = load.level[0] * np.exp(-load.wave[1]), load.level[1] * np.exp(load.wave[1])
    assert low < np.median(rates, axis=1).min() < 0.4 < 1.0 < np.median(rates, axis=1).max() < high
    assert not schedule_features(task, task.episode_length).any()
    surging = batch.fleet.phase == PHASES.index("burst")
    assert len({tuple(np.flatnonzero(row)) for row in surging}) > 50  # at other times in every episode
    share = surging.mean() * task.episode_length / (np.mean(load.surges) * np.mean(load.surge_s))
    assert share == pytest.approx(1.0, abs=0.25)
    short = ServingBatch(task, 1, task.config({"episode_length": 100}))
    short.reset([7])
    np.testing.assert_array_equal(short.fleet.arrivals[0], batch.fleet.arrivals[7, :100])


def test_a_random_load_draws_the_shares_of_the_classes_for_every_seed_and_for_its_surges() -> None:
    task = get_task("fleet-mix")
    load = task.random_load
    assert load is not None
    batch = batch_of("fleet-mix", list(range(64)))
    surging = batch.fleet.phase == PHASES.index("burst")

    def shares(which: NDArray[np.bool_]) -> NDArray[np.float64]:
        counts = (batch.fleet.arrivals * which[..., None]).sum(axis=1)
        return counts / np.maximum(counts.sum(axis=1, keepdims=True), 1.0)

    steady, flooded = shares(~surging), shares(surging)
    assert (steady.min(axis=0) < 0.1).all()
    assert (steady.max(axis=0) > 0.7).all()
    both = surging.sum(axis=1) > 20
    assert np.abs(steady - flooded)[both].max(axis=1).mean() > 0.2
    # Only the shares differ from the same load without class_factor: the total has the same rates.
    alike = ServingBatch(replace(task, random_load=replace(load, class_factor=(1.0, 1.0))), 64)
    alike.reset(list(range(64)))
    totals = [each.fleet.arrivals.sum(axis=(1, 2)) for each in (alike, batch)]
    np.testing.assert_allclose(*totals, rtol=0.1)
    counts = alike.fleet.arrivals.sum(axis=(0, 1))
    np.testing.assert_allclose(counts / counts.sum(), [each.share for each in task.classes], atol=0.01)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"level": [2.0, 1.0]}, "random_load.level"),
        ({"level": [0.0, 1.0]}, "random_load.level"),
        ({"level": [0.5]}, "random_load.level"),
        ({"wave": [0.0, 1.0]}, "random_load.level"),
        ({"level": [0.5, 1.0], "surge_s": [0, 5]}, "random_load.surge_s"),
        ({"level": [0.5, 1.0], "class_factor": [0.0, 5.0]}, "random_load.class_factor"),
    ],
)
def test_a_range_that_is_none_is_refused_by_name(entry: dict[str, Any], words: str) -> None:
    raw = json.loads((DATA_DIR / SCALING_TASKS).read_text(encoding="utf-8"))["tasks"]["autoscale-mix"]
    with pytest.raises(InvalidConfigError, match=words):
        parse_task("mine", {**raw, "random_load": entry})


@pytest.mark.parametrize("task_id", ["autoscale", "autoscale-mix"])
def test_the_load_is_observed_in_units_of_the_mean_rate(task_id: str) -> None:
    task = get_task(task_id)
    codec = ObservationCodec(task, task.config(), get_calibration(task_id), "full")
    observation = np.ones((1, 24))
    rate, second = 90.0, 200
    observation[0, list(OBSERVATION_FIELDS).index("arrival_rate")] = rate
    observation[0, list(OBSERVATION_FIELDS).index("queue_depth")] = 45.0
    observation[0, list(OBSERVATION_FIELDS).index("timestep")] = second
    now, *ahead, queue = codec.encode(observation)[0, -5:].tolist()
    assert now == pytest.approx(rate / task.arrival_rate_rps)
    assert queue == pytest.approx(45.0 / (10.0 * task.arrival_rate_rps))
    forecast = forecast_rps(task, second + np.array([0.0, 8.0, 15.0, 30.0]))
    assert ahead == pytest.approx((now * forecast[1:] / forecast[0]).tolist(), rel=1e-5)


def test_binary_batches_carry_six_numbers() -> None:
    steps = BatchSteps("00" * 16, rows(4.0, 3)[None], 1, 1, False)
    np.testing.assert_array_equal(decode_request(encode_request(steps)).actions, steps.actions)


def test_the_reference_pays_and_serves_like_the_fluid_model() -> None:
    totals = []
    for dynamics in (FluidFleet, ReferenceFleet):
        task = get_task("autoscale")
        batch = ServingBatch(task, 1, task.config({"episode_length": 120}), dynamics=dynamics)
        batch.reset([3])
        found = np.zeros(2)
        for t in range(120):
            batch.step(rows(2.0 if t < 20 else 6.0 if t < 60 else 3.0))
            found += [paid(batch)[0], batch.metric["tokens_per_sec"][0]]
        totals.append(found)
    np.testing.assert_allclose(totals[0], totals[1], rtol=0.05)
