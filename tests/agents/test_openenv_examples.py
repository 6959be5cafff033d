"""The examples for trainers and evaluators of language models, played without a model."""

from __future__ import annotations

import asyncio
import inspect
import json
import pickle
import re
import typing
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

from agents.integrations.inspect_ai import model_solver
from agents.integrations.trl import FleetTools, fleet_tools_at
from env.inference_env import InferenceEnv
from inferencegym.errors import EpisodeDoneError, InvalidActionError
from inferencegym.models import ACTION_FIELDS
from tests.servers import RunningServer

KNOBS = {"kv_budget": 0.9, "spec_length": 2, "batch_size": 128, "prefill_disagg": False, "quant_tier": 1}


def tools_of(environment: FleetTools) -> dict[str, Any]:
    """As TRL collects them: every public method but reset and get_reward."""
    members = inspect.getmembers(environment, predicate=inspect.ismethod)
    return {
        name: method for name, method in members if not name.startswith("_") and name not in ("reset", "get_reward")
    }


def test_every_tool_is_described_and_typed_as_a_trainer_wants_it() -> None:
    tools = tools_of(FleetTools())
    assert sorted(tools) == ["observe", "run", "set_knobs"]
    for name, tool in tools.items():
        hints = typing.get_type_hints(tool)
        documented = re.findall(r"(?m)^ {8,}(\w+): ", (inspect.getdoc(tool) or "").replace("\n    ", "\n        "))
        parameters = list(inspect.signature(tool).parameters)
        assert hints["return"] is str, name
        assert [parameter for parameter in parameters if parameter not in hints] == []
        assert documented == parameters, name
    assert list(inspect.signature(FleetTools().set_knobs).parameters) == [*ACTION_FIELDS, "replicas"]


def test_tools_play_the_episode_that_local_use_plays(server: RunningServer) -> None:
    tools = fleet_tools_at(server.url)()
    told = tools.reset(task_id=3, seed=5, episode_length=12, prompt="a column of the data set")
    assert all(name in told for name in ACTION_FIELDS)
    for said in ("out of memory above 40 GB", "lasts 12 seconds", "interactive (20% of the requests): 200 ms", "0.4 *"):
        assert said in told
    local = InferenceEnv(task_id=3, seed=5, config={"episode_length": 12, "reward": "grade"})
    local.reset()
    tools.set_knobs(**{**KNOBS, "batch_size": 7})
    tools.set_knobs(batch_size=KNOBS["batch_size"])
    for seconds in (5, 10, 12):
        text = tools.run(5)
        while len(local.episode_log) < seconds:
            local.step(KNOBS)
        assert f'"timestep": {seconds}' in text
        assert f'"timestep": {seconds}' in tools.observe()
    assert tools.done
    assert "over" in text
    assert tools.get_reward() == local.grade()["score"]
    with pytest.raises(EpisodeDoneError):
        tools.run(1)
    tools.reset(task_id=1, seed=5)
    assert (tools.done, tools.score) == (False, None)


def test_the_reward_of_a_whole_rollout_with_held_knobs_is_its_score(server: RunningServer) -> None:
    tools = fleet_tools_at(server.url)()
    tools.reset(task_id=1, seed=5, episode_length=30, hold=5)
    tools.set_knobs(batch_size=256, kv_budget=0.8)
    tools.run(7)
    assert '"timestep": 10' in tools.observe()
    tools.run(20)
    assert tools.done
    local = InferenceEnv(task_id=1, seed=5, config={"episode_length": 30})
    local.reset()
    while not local.done:
        local.step({"batch_size": 256, "kv_budget": 0.8})
    assert tools.get_reward() == pytest.approx(local.grade()["score"])


def test_a_factory_survives_pickling(server: RunningServer) -> None:
    tools = pickle.loads(pickle.dumps(fleet_tools_at(server.url)))()
    assert "Task 2" in tools.reset(task_id=2)


def test_a_tool_that_is_used_wrongly_tells_the_model_what_is_allowed(server: RunningServer) -> None:
    tools = fleet_tools_at(server.url)()
    with pytest.raises(RuntimeError):
        tools.observe()
    tools.reset()
    with pytest.raises(InvalidActionError) as refused:
        tools.set_knobs(**{**KNOBS, "batch_size": 1000})
    assert (refused.value.field, refused.value.allowed) == ("batch_size", "an integer from 1 to 512")
    with pytest.raises(InvalidActionError) as refused:
        tools.run(0)
    assert refused.value.field == "seconds"
    assert '"timestep": 1' in tools.run(1)


def test_sixty_four_rollouts_on_thirty_two_threads_do_not_meet(server: RunningServer) -> None:
    factory = fleet_tools_at(server.url)

    def rollout(seed: int) -> float:
        tools = factory()
        tools.reset(task_id=2, seed=seed, episode_length=5)
        tools.set_knobs(**KNOBS)
        tools.run(5)
        return tools.get_reward()

    with ThreadPoolExecutor(32) as pool:
        scores = list(pool.map(rollout, range(64)))
    for seed, score in enumerate(scores):
        local = InferenceEnv(task_id=2, seed=seed, config={"episode_length": 5, "reward": "grade"})
        local.reset()
        for _ in range(5):
            local.step(KNOBS)
        assert score == local.grade()["score"]


@dataclass
class Output:
    """As Inspect's ModelOutput."""

    completion: str


@dataclass
class Sample:
    """As Inspect's TaskState."""

    metadata: dict[str, Any]
    messages: list[str] = field(default_factory=list)
    output: Output = field(default_factory=lambda: Output(""))


def test_a_solver_plays_what_the_model_answers_and_reports_the_grade(server: RunningServer) -> None:
    answers = iter(
        [
            'I choose {"batch_size": 128, "quant_tier": "INT8"}.',
            "no idea",
            '{"batch_size": 100000}',
            json.dumps({"spec_length": 2}),
        ]
    )

    async def generate(state: Sample) -> Sample:
        state.output = Output(next(answers))
        return state

    sample = Sample({"task_id": 3, "seed": 5, "config": {"episode_length": 19}})
    solved = asyncio.run(model_solver(server.url, str, 5)(sample, generate))
    local = InferenceEnv(task_id=3, seed=5, config={"episode_length": 19})
    local.reset()
    first = {"batch_size": 128, "quant_tier": 1}
    for second in range(19):
        local.step(first if second < 15 else {**first, "spec_length": 2})
    assert solved.metadata["score"] == local.grade()["score"]
    assert solved.metadata["invalid_answers"] == 2
    assert len(solved.messages) == 4
    assert "no JSON object" in solved.messages[2]
    assert "batch_size must be" in solved.messages[3]
    graded = server.post("/grader", {"session_id": solved.metadata["session_id"]})
    assert (graded["score"], graded["done"]) == (solved.metadata["score"], True)
