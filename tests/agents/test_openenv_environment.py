"""OpenEnv environments in process: OpenEnv's own server, client and rubrics on them, and equality with local use."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest
import uvicorn

from agents.integrations.openenv_environment import (
    FamilyEnvironment,
    InferenceGymEnvironment,
    TrafficControllerEnvironment,
)
from env.inference_env import InferenceEnv
from env.traffic.env import TrafficEnv
from grader.grader import GraderModule
from inferencegym.client.openenv_types import (
    InferenceGymAction,
    InferenceGymObservation,
    TrafficControllerAction,
    without_gradio,
)
from inferencegym.errors import (
    EpisodeDoneError,
    InferenceGymError,
    InvalidActionError,
    InvalidConfigError,
    NotResetError,
)
from inferencegym.models import QuantTier
from tests.servers import free_port

with without_gradio():
    from openenv.core import GenericEnvClient, create_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import EnvironmentMetadata

SHORT = {"episode_length": 5}
KNOBS = ({"batch_size": 128, "quant_tier": 1}, {"kv_budget": 0.7}, {}, {"spec_length": 4}, {"batch_size": 16})


def played(environment: FamilyEnvironment, config: dict[str, Any] | None = None) -> list[Any]:
    environment.reset(seed=7, task_id=3, config=config or SHORT)
    return [environment.step(InferenceGymAction(**knobs)) for knobs in KNOBS]


def test_an_episode_is_that_of_local_use_and_knobs_left_out_stay() -> None:
    environment, local = InferenceGymEnvironment(), InferenceEnv()
    local.reset(seed=7, task_id=3, config=SHORT)
    in_force: dict[str, Any] = {}
    for knobs, seen in zip(KNOBS, played(environment), strict=True):
        in_force |= knobs
        observation, reward, done, info = local.step(in_force)
        assert (seen.reward, seen.done) == (reward, done)
        for name, value in asdict(observation).items():
            assert getattr(seen, name) == value, name
    assert seen.metadata == {name: info[name] for name in ("score", "breakdown", "feedback")}


def test_both_are_made_without_arguments_and_say_who_they_are() -> None:
    for kind, name in ((InferenceGymEnvironment, "InferenceGym"), (TrafficControllerEnvironment, "Traffic controller")):
        environment = kind()
        assert isinstance(environment, Environment)
        assert environment.state.step_count == 0
        told = environment.get_metadata()
        assert isinstance(told, EnvironmentMetadata)
        assert (told.name, told.author) == (name, "InferenceGym contributors")
        assert environment.reset(seed=1).reward is None
        environment.close()


def test_the_rubric_is_the_grade_and_its_children_are_the_parts() -> None:
    environment = InferenceGymEnvironment()
    called: list[tuple[Any, Any, float]] = []
    environment.rubric.register_forward_hook(lambda _, action, seen, score: called.append((action, seen, score)))
    observations = played(environment)
    parts = {name: part.last_score for name, part in environment.rubric.named_rubrics()}
    local = InferenceEnv()
    local.reset(seed=7, task_id=3, config=SHORT)
    in_force: dict[str, Any] = {}
    for knobs, (action, seen, score) in zip(KNOBS, called, strict=True):
        in_force |= knobs
        local.step(in_force)
        grade = GraderModule().score(3, local.episode_log)
        assert (action.model_dump(exclude_unset=True), score) == (knobs, grade["score"])
        assert seen is observations.pop(0)
    assert parts == grade["breakdown"]
    assert environment.rubric.get_rubric("slo").last_score == grade["breakdown"]["slo"]
    environment.reset(seed=8, task_id=1, config=SHORT)
    assert environment.rubric.last_score is None
    assert {part.last_score for part in environment.rubric.children()} == {None}
    environment.step(InferenceGymAction())
    shown = {name for name, part in environment.rubric.named_rubrics() if part.last_score is not None}
    assert shown == {"throughput"}  # of the four parts of task 3, the one that task 1 has


def test_rewards_of_the_grade_have_the_score_as_their_mean() -> None:
    environment = InferenceGymEnvironment()
    rewards = [seen.reward for seen in played(environment, {**SHORT, "reward": "grade"})]
    assert sum(rewards) / len(rewards) == pytest.approx(environment.rubric.last_score)


def test_a_refused_call_changes_nothing() -> None:
    environment = InferenceGymEnvironment()
    with pytest.raises(NotResetError):
        environment.step(InferenceGymAction())
    environment.reset(seed=7, task_id=3, config=SHORT, episode_id="mine")
    first = environment.step(InferenceGymAction(batch_size=128))
    refused: list[tuple[type[InferenceGymError], Any]] = [
        (InvalidActionError, lambda: environment.step({"batch_size": 100_000})),
        (InvalidActionError, lambda: environment.step({"batch": 1})),
        (InvalidConfigError, lambda: environment.reset(split="train", index=99)),
        (InvalidConfigError, lambda: environment.reset(split="validation")),
        (InvalidConfigError, lambda: environment.reset(task_id=1, split="train")),
        (InvalidConfigError, lambda: environment.reset(task_id=1, config={"episode_lenght": 5})),
    ]
    for error, call in refused:
        with pytest.raises(error):
            call()
    assert (environment.state.step_count, environment.state.episode_id, environment.state.task_id) == (1, "mine", 3)
    local = InferenceEnv()
    local.reset(seed=7, task_id=3, config=SHORT)
    assert local.step({"batch_size": 128})[1] == first.reward
    # The knobs in force are still those of the step that was played.
    assert environment.step(InferenceGymAction()).reward == local.step({"batch_size": 128})[1]
    for _ in range(3):
        last = environment.step(InferenceGymAction())
    assert last.done
    with pytest.raises(EpisodeDoneError):
        environment.step(InferenceGymAction())


def test_observations_carry_info_where_the_reset_asks_for_it() -> None:
    environment = InferenceGymEnvironment()
    assert environment.reset(seed=7, task_id=3, config=SHORT, info=True).info is None
    seen = environment.step(InferenceGymAction(quant_tier="INT8"))
    assert seen.info["action_applied"]["quant_tier"] == QuantTier.INT8.value
    environment.reset(seed=7, task_id=3, config=SHORT)
    assert environment.step(InferenceGymAction()).info is None


def test_a_transform_is_applied_to_what_a_step_shows() -> None:
    environment = InferenceGymEnvironment()
    environment.transform = lambda seen: seen.model_copy(update={"queue_depth": -1.0})
    environment.reset(seed=7, task_id=3, config=SHORT)
    assert environment.step(InferenceGymAction()).queue_depth == -1.0


def test_tasks_are_those_of_the_task_api_and_a_reset_takes_their_place() -> None:
    environment = InferenceGymEnvironment()
    assert environment.list_splits() == ["train", "test"]
    train = environment.list_tasks("train")
    assert [task["id"] for task in train] == [1, 2, 3]
    assert environment.list_tasks("other") == []
    assert environment.num_tasks("train") == 3
    assert environment.get_task("train", 1) == train[1]
    assert environment.get_task_range("train", 1) == train[1:]
    with pytest.raises(IndexError, match="has 3"):
        environment.get_task("train", 3)
    environment.reset(split="train", index=1)
    assert environment.state.task_id == 2
    recorded = environment.list_tasks("test")
    environment.reset(split="test")
    assert environment.state.task_id == recorded[0]["id"]


def test_the_traffic_controller_plays_as_in_local_use() -> None:
    environment, local = TrafficControllerEnvironment(), TrafficEnv("task_hard")
    environment.reset(task_id="task_hard")
    local.reset()
    for _ in range(local.episode_length):
        seen = environment.step(TrafficControllerAction(action="throttle_70"))
        state, reward, done, info = local.step("throttle_70")
        assert (seen.reward, seen.done, seen.queue_length) == (reward, done, state.queue_length)
        if done:
            break
    assert seen.metadata["score"] == info["score"] == environment.rubric.last_score


@pytest.fixture
def stock() -> Iterator[str]:
    """Address of OpenEnv's own server with the environment class."""
    app = create_app(
        InferenceGymEnvironment,
        InferenceGymAction,
        InferenceGymObservation,
        env_name="inference_gym",
        max_concurrent_envs=4,
    )
    port = free_port()
    running = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning"))
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    while not running.started:
        assert thread.is_alive()
        thread.join(0.02)
    yield f"http://127.0.0.1:{port}"
    running.handle_exit(signal.SIGTERM, None)
    thread.join(10)


def test_openenvs_own_server_serves_the_class_to_openenvs_own_client(stock: str) -> None:
    expected = [(seen.reward, seen.done) for seen in played(InferenceGymEnvironment())]

    async def play() -> list[tuple[Any, bool]]:
        async with GenericEnvClient(base_url=stock) as client:
            await client.reset(seed=7, task_id=3, config=SHORT)
            results = [await client.step(knobs) for knobs in KNOBS]
            assert (await client.state())["step_count"] == len(KNOBS)
            return [(one.reward, one.done) for one in results]

    assert asyncio.run(play()) == expected
