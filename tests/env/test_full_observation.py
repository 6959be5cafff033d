"""Observations "full", and ``info.fleet``: the knobs in force, running restarts, seconds since a change."""

from __future__ import annotations

import math
from typing import Any

import gymnasium
import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import inferencegym.gym as ig
from env.batch import ServingBatch
from env.inference_env import InferenceEnv
from inferencegym.client import InferenceGymBatch
from inferencegym.models import FLEET_FIELDS, NAIVE_ACTION
from inferencegym.spaces.actions import from_row, snap
from inferencegym.spaces.observations import FIRST_FLEET, OBSERVATION_SIZE, fleet_array, normalise_fleet
from inferencegym.tasks import get_task
from server.api.openapi import inlined_paths
from tests.env.test_grade_reward import random_knobs
from tests.servers import RunningServer

NAIVE = NAIVE_ACTION.to_dict()
SHORT = {"episode_length": 12}


def steps_of(env: InferenceEnv, *actions: dict[str, Any]) -> list[dict[str, Any]]:
    return [env.step({**NAIVE, **action})[3]["fleet"] for action in actions]


# ---------------------------------------------------------------- numbers by hand


def test_seconds_are_counted_from_the_last_change_of_any_knob() -> None:
    env = InferenceEnv(task_id=3)
    env.reset(seed=1)
    fleets = steps_of(env, {}, {}, {"batch_size": 64}, {"batch_size": 64}, {"kv_budget": 0.5}, {})
    assert [fleet["seconds_since_change"] for fleet in fleets] == [1, 2, 1, 2, 1, 1]
    assert [fleet["batch_size"] for fleet in fleets] == [32, 32, 64, 64, 32, 32]
    still = {"restarting_share": 0.0, "restarting_replicas": 0}
    assert fleets[4] == {**NAIVE, "kv_budget": 0.5, **still, "seconds_since_change": 1}


def test_a_change_of_precision_restarts_one_replica_after_the_other() -> None:
    """Six replicas that each take 0.2 s and their weights' loading at 20 GB/s."""
    env = InferenceEnv(task_id=3)
    env.reset(seed=1)
    fleets = steps_of(env, {}, *[{"quant_tier": 1}] * 8)
    weights_gb = ServingBatch(get_task(3), 1).fleet.params.tables.weights_gb[1]
    rollout_s = 6 * (0.2 + weights_gb / 20.0)
    expected = [0.0] + [max(0.0, 1.0 - k / rollout_s) for k in range(1, 9)]
    assert [fleet["restarting_share"] for fleet in fleets] == pytest.approx(expected, abs=1e-9)
    assert expected[2] > 0.0 == expected[8]
    assert [fleet["restarting_replicas"] for fleet in fleets] == [math.ceil(6 * share) for share in expected]


def test_knobs_that_a_task_does_not_offer_are_in_force_with_their_defaults() -> None:
    env = InferenceEnv(task_id=1)
    env.reset(seed=1)
    assert steps_of(env, {"quant_tier": 2, "kv_budget": 0.4})[0]["quant_tier"] == 0


def test_the_fleets_numbers_are_scaled_to_shares() -> None:
    numbers = np.array([0.3, 8, 512, 1, 2, 0.25, 200.0])
    assert normalise_fleet(numbers, 200).tolist() == pytest.approx([0.3, 1, 1, 1, 1, 0.25, 1])
    assert normalise_fleet(FIRST_FLEET, 200).tolist() == pytest.approx([1, 0, np.log(32) / np.log(512), 0, 0, 0, 0])


def test_the_fleets_numbers_survive_their_json_form() -> None:
    env = InferenceEnv(task_id=3, seed=1)
    env.reset()
    fleet = env.step({"kv_budget": 0.4, "quant_tier": 2})[3]["fleet"]
    assert list(fleet) == [*FLEET_FIELDS, "restarting_replicas"]
    assert fleet_array(fleet).tolist() == env.observation_row(fleet=True)[OBSERVATION_SIZE:].tolist()


# ---------------------------------------------------------------- the same on every path


@pytest.mark.parametrize("task_id", [1, 3])
@given(seed=st.integers(0, 1000))
@settings(max_examples=5)
def test_a_row_of_full_observations_is_that_of_the_episode_alone(task_id: int, seed: int) -> None:
    rows = ig.VectorInferenceEnv(
        3, task_id, config=SHORT, observation="full", action="natural", autoreset_mode="SameStep"
    )
    plain = ig.VectorInferenceEnv(
        3, task_id, config=SHORT, observation="scheduled", action="natural", autoreset_mode="SameStep"
    )
    first, _ = rows.reset(seed=[seed, 5, 6])
    plain.reset(seed=[seed, 5, 6])
    assert rows.observation_space.shape == first.shape == (3, 24)
    alone = InferenceEnv(task_id=task_id, config=SHORT)
    alone.reset(seed=seed)
    rng = np.random.default_rng(seed)
    numbers = FIRST_FLEET
    settings_of_three_seconds = np.repeat(random_knobs(rng, 8, 3).astype(np.float32), 3, axis=0)
    assert len(settings_of_three_seconds) == 2 * SHORT["episode_length"]
    for knobs in settings_of_three_seconds:
        np.testing.assert_array_equal(first[0, 17:], normalise_fleet(numbers, SHORT["episode_length"]))
        first, _, terminated, _, info = rows.step(knobs)
        np.testing.assert_array_equal(first[:, :17], plain.step(knobs)[0])
        assert rows.observation_space.contains(first)
        alone.step(from_row(snap(knobs.astype(np.float64), rows.batch.mask)[0]))
        numbers = fleet_array(alone.info()["fleet"])
        if terminated[0]:
            last = normalise_fleet(numbers, SHORT["episode_length"])
            np.testing.assert_array_equal(info["final_obs"][0, 17:], last)
            alone.reset(seed=int(rows.seeds[0]))
            numbers = FIRST_FLEET


def test_rows_on_threads_and_many_steps_at_once_see_the_same_fleets() -> None:
    task = get_task(3)
    once, many = ServingBatch(task, 200, n_threads=1), ServingBatch(task, 200, n_threads=3)
    actions = random_knobs(np.random.default_rng(3), 6, 200)[[0, 0, 1, 2, 2, 2]]
    once.reset(range(200))
    many.reset(range(200))
    seen, last = np.empty((6, 200, 21)), np.empty((1, 200, 21))
    many.step_many(actions[:3], seen[:3], np.empty((3, 200)))
    many.step_many(actions[3:], last, np.empty((3, 200)))
    for k, knobs in enumerate(actions):
        once.step(knobs)
        if k < 3:
            np.testing.assert_array_equal(once.full_observation(), seen[k])
    np.testing.assert_array_equal(once.full_observation(), last[0])
    assert set(once.fleet_numbers[:, 6]) == {3.0}


def test_a_server_shows_full_observations_to_remote_environments(server: RunningServer) -> None:
    formats = {"config": SHORT, "observation": "full", "action": "discrete"}
    local = ig.VectorInferenceEnv(2, 3, **formats)
    remote = ig.HTTPVectorEnv(server.url, 2, 3, **formats)
    scalar = gymnasium.make(ig.REMOTE_ID, url=server.url, task_id=3, **formats)
    assert remote.observation_space == local.observation_space
    assert scalar.observation_space == local.single_observation_space
    here, there, alone = local.reset(seed=[4, 9])[0], remote.reset(seed=[4, 9])[0], scalar.reset(seed=4)[0]
    local.action_space.seed(1)
    for k in range(SHORT["episode_length"] + 3):
        np.testing.assert_array_equal(here, there)
        if k <= SHORT["episode_length"]:
            np.testing.assert_array_equal(here[0], alone)
        actions = local.action_space.sample()
        if k < SHORT["episode_length"]:
            alone = scalar.step(actions[0])[0]
        here, there = local.step(actions)[0], remote.step(actions)[0]
    remote.close()
    scalar.close()


def test_lost_full_observations_are_replayed(server: RunningServer) -> None:
    formats = {"config": SHORT, "observation": "full", "action": "natural"}
    local, remote = ig.VectorInferenceEnv(2, 3, **formats), ig.HTTPVectorEnv(server.url, 2, 3, **formats)
    local.reset(seed=1)
    remote.reset(seed=1)
    for k, knobs in enumerate(random_knobs(np.random.default_rng(2), 6, 2).astype(np.float32)):
        if k == 4:
            server.post("/close/batch", {"session_id": remote.session_id})
        np.testing.assert_array_equal(local.step(knobs)[0], remote.step(knobs)[0])
    remote.close()


def test_a_batch_session_shows_fleets_where_its_reset_asked_for_them(server: RunningServer) -> None:
    knobs = random_knobs(np.random.default_rng(7), 4, 3)
    batch = ServingBatch(get_task(3), 3)
    batch.reset([5, 6, 7])
    with InferenceGymBatch(server.url) as client:
        first = client.reset(3, 3, seed=5, fleet=True)
        np.testing.assert_array_equal(first, batch.full_observation())
        played = client.step_many(knobs[:2], float64=True)
        for k in range(2):
            batch.step(knobs[k])
            np.testing.assert_array_equal(played.observations[k], batch.full_observation())
        batch.step(knobs[2])
        body = {"session_id": client.session_id, "actions": knobs[2:3].tolist()}
        answer = server.post("/step/batch", body)
        np.testing.assert_array_equal(answer["observations"][0], batch.full_observation())
        assert client.reset(3, 3, seed=5).shape == (3, 14)
        assert client.step(knobs[0]).observations.shape == (1, 3, 14)


def test_the_openapi_document_describes_the_fleet(server: RunningServer) -> None:
    paths = inlined_paths(httpx.get(f"{server.url}/openapi.json", timeout=60).json())
    answer = paths["/step"]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
    fleet = answer["properties"]["info"]["properties"]["fleet"]
    assert fleet["required"] == [*FLEET_FIELDS, "restarting_replicas"]
    assert (fleet["properties"]["restarting_share"]["maximum"], fleet["properties"]["batch_size"]["maximum"]) == (
        1,
        512,
    )
