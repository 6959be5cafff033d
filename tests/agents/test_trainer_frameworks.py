"""Frameworks that train language models play episodes of a real server: OpenEnv's harness by its own code, SkyRL."""

from __future__ import annotations

import json
from types import ModuleType
from typing import Any

import pytest

from agents.integrations.openenv_harness import FleetSessionFactory
from agents.integrations.text_episode import TextEpisode, parse_answer
from inferencegym.client.http import InferenceGymHTTP
from inferencegym.client.openenv_types import without_gradio
from inferencegym.errors import InvalidConfigError
from inferencegym.models import NAIVE_ACTION
from tests import skyrl_standin
from tests.servers import RunningServer

with without_gradio():
    from openenv.core.harness import HarnessRunLimits, MCPHarnessAdapter, ModelStepResult
    from openenv.core.llm_client import LLMResponse, ToolCall

SEED = 7
KNOBS = {"batch_size": 256, "kv_budget": 0.8}


def score_of(url: str, **changes: Any) -> float:
    """The score of an episode with one action, played by hand."""
    with InferenceGymHTTP(url) as client:
        client.reset(seed=SEED, task_id=1, config={"hold": 20, "reward": "grade"})
        done = False
        while not done:
            _, _, done, info = client.step({**NAIVE_ACTION.to_dict(), **KNOBS, **changes})
        return float(info["score"])


class Model:
    """A model that calls the tool with given arguments, one after the other, then again with the last."""

    def __init__(self, *calls: dict[str, Any]) -> None:
        self.calls = list(calls)
        self.turns = 0
        self.tools: list[str] = []

    def __call__(self, _messages: list[Any], tools: list[Any], _sampling: dict[str, Any]) -> ModelStepResult:
        arguments = self.calls[min(self.turns, len(self.calls) - 1)]
        self.turns += 1
        self.tools = [tool.name for tool in tools]
        call = ToolCall(id=str(self.turns), name="set_knobs", args=arguments)
        return ModelStepResult(response=LLMResponse(content="", tool_calls=[call]))


# ---------------------------------------------------------------- OpenEnv's harness


def test_openenvs_harness_plays_a_whole_episode_and_is_paid_its_score(server: RunningServer) -> None:
    session = FleetSessionFactory(server.url).create({"task_id": 1}, seed=SEED)
    model = Model(KNOBS)
    rollout = MCPHarnessAdapter().run_white_box(model, session, HarnessRunLimits(max_turns=60))
    told = session.verify(rollout.messages)
    session.close()
    assert (rollout.done, model.turns, model.tools) == (True, 10, ["set_knobs"])  # 200 seconds, 20 a step
    assert told.metrics == {"steps": 10, "score": score_of(server.url)}
    assert (told.env_reward, told.done) == (told.metrics["score"], True)


def test_a_refused_call_is_told_to_the_model_and_no_time_passes(server: RunningServer) -> None:
    session = FleetSessionFactory(server.url, episode_length=40).create(1, seed=SEED)
    rollout = MCPHarnessAdapter().run_white_box(Model({"batch_size": 9999}, KNOBS), session, HarnessRunLimits())
    session.close()
    first, *others = rollout.tool_trace
    assert first.result.error is not None
    assert "from 1 to 512" in first.result.error
    assert [entry.result.data["observation"]["timestep"] for entry in others] == [20, 40]


def test_the_first_message_is_the_briefing_of_the_task(server: RunningServer) -> None:
    session = FleetSessionFactory(server.url, hold=8).create({"task_id": "autoscale", "config": {"hold": 4}}, seed=SEED)
    (message,) = session.initial_messages()
    session.close()
    assert "step is 4 of them" in message["content"]
    assert "requested number of replicas; an integer from 1 to 6" in message["content"]
    with pytest.raises(InvalidConfigError, match="unknown"):
        FleetSessionFactory(server.url).create("no-such-task")


# ---------------------------------------------------------------- texts, as SkyRL has them


def test_skyrl_plays_an_episode_by_texts_and_its_rewards_add_up_to_the_score(
    server: RunningServer, skyrl: ModuleType
) -> None:
    row = {"task_id": 1, "seed": SEED, "config": {"hold": 20}, "data_source": "another column"}
    env = skyrl.FleetEnv(env_config={"base_url": server.url}, extras=row)
    messages, _ = env.init([{"role": "system", "content": "Answer with JSON."}])
    assert [message["role"] for message in messages] == ["system", "user"]
    assert "The goal is a high score" in messages[1]["content"]
    outputs = [env.step(f"More slots.\n{json.dumps(KNOBS)}")]
    while not outputs[-1]["done"]:
        outputs.append(env.step("{}"))
    for output in outputs:
        assert {name: type(value) for name, value in output.items()} == skyrl_standin.OUTPUT
    assert (env.turns, outputs[-1]["observations"]) == (10, [])
    assert env.get_metrics() == {"invalid_answers": 0, "score": score_of(server.url)}
    assert [output["reward"] for output in outputs] == [0.0] * 9 + [env.get_metrics()["score"]]
    env.close()


def test_skyrl_ends_at_the_turns_that_a_row_allows_and_starts_anew(server: RunningServer, skyrl: ModuleType) -> None:
    env = skyrl.FleetEnv(extras={"base_url": server.url, "task_id": 1, "seed": SEED, "max_turns": 2})
    with pytest.raises(RuntimeError, match="init first"):
        env.step("{}")
    env.init([])
    assert [env.step("no JSON")["done"] for _ in range(2)] == [False, True]
    assert env.get_metrics()["invalid_answers"] == 2
    env.init([])
    assert (env.turns, env.get_metrics()) == (0, {"invalid_answers": 0})
    env.close()


def test_an_answer_that_is_no_action_is_told_and_the_fleet_runs_on(server: RunningServer) -> None:
    episode = TextEpisode(server.url, 1, SEED, {"hold": 5})
    shown = episode.answer('{"batch_size": 9999}')
    assert "batch_size must be an integer from 1 to 512" in shown
    assert '"timestep": 5' in shown
    assert '"batch_size": 32' in shown
    shown = episode.answer('{"batch_size": 64} and then')
    assert '"batch_size": 64' in shown
    assert episode.invalid_answers == 1
    episode.close()


@pytest.mark.parametrize("text", ["", "nothing", "{", '{"a": 1}', "[1]", '{"batch_size": "many"}'])
def test_no_answer_changes_knobs_unless_it_is_an_action(text: str) -> None:
    knobs = NAIVE_ACTION.to_dict()
    assert parse_answer(text, knobs)[0] == knobs
    assert parse_answer(text, knobs)[1].startswith("Your last answer was not used")
