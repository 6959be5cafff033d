"""Every interface for language models gives the same reward: the score, with the last knobs kept after an early end."""

from __future__ import annotations

import asyncio
import json
from types import ModuleType, SimpleNamespace
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from agents.integrations.inspect_ai import model_solver
from agents.integrations.openenv_harness import FleetSessionFactory
from agents.integrations.trl import fleet_tools_at
from env.inference_env import InferenceEnv
from inferencegym.client.openenv_types import without_gradio
from inferencegym.models import SPEC_LENGTHS
from tests import verifiers_standin
from tests.servers import RunningServer

with without_gradio():
    from openenv.core.harness import HarnessRunLimits, MCPHarnessAdapter, ModelStepResult
    from openenv.core.llm_client import LLMResponse, ToolCall

HOLD, TURNS = 20, 4
CONFIG = {"hold": HOLD, "episode_length": HOLD * TURNS}
KNOBS = st.fixed_dictionaries(
    {},
    optional={
        "batch_size": st.integers(1, 512),
        "kv_budget": st.sampled_from([0.1, 0.5, 1.0]),
        "spec_length": st.sampled_from(SPEC_LENGTHS),
        "quant_tier": st.integers(0, 2),
        "prefill_disagg": st.booleans(),
    },
)
Play = list[dict[str, Any]]


def score_by_hand(task_id: int, seed: int, play: Play) -> float:
    """The score of the episode if the last knobs are kept to the end."""
    env = InferenceEnv(task_id=task_id, seed=seed, config=CONFIG)
    env.reset()
    for turn in range(TURNS):
        env.step(play[turn] if turn < len(play) else {})
    return float(env.grade()["score"])


def by_tools(url: str, task_id: int, seed: int, play: Play) -> float:
    tools = fleet_tools_at(url)()
    tools.reset(task_id, seed, CONFIG["episode_length"], HOLD)
    for knobs in play:
        tools.set_knobs(**knobs)
        tools.run(HOLD)
    return tools.get_reward()


def by_harness(url: str, task_id: int, seed: int, play: Play) -> float:
    turns = iter(play)

    def model(*_: Any) -> ModelStepResult:
        call = ToolCall(id="1", name="set_knobs", args=next(turns))
        return ModelStepResult(response=LLMResponse(content="", tool_calls=[call]))

    session = FleetSessionFactory(url, **CONFIG).create(task_id, seed=seed)
    MCPHarnessAdapter().run_white_box(model, session, HarnessRunLimits(max_turns=len(play)))
    paid = float(session.verify([]).env_reward)
    session.close()
    return paid


def by_skyrl(module: ModuleType, url: str, task_id: int, seed: int, play: Play) -> float:
    row = {"base_url": url, "task_id": task_id, "seed": seed, "config": CONFIG, "max_turns": len(play)}
    env = module.FleetEnv(extras=row)
    env.init([])
    paid = sum(env.step(json.dumps(knobs))["reward"] for knobs in play)
    env.close()
    return float(paid)


def by_verifiers(module: ModuleType, url: str, task_id: int, seed: int, play: Play) -> float:
    agent = verifiers_standin.Agent(*map(json.dumps, play), max_turns=len(play))
    config = module.FleetTasksetConfig(base_url=url, tasks=[task_id], seeds=[seed], **CONFIG)
    task = next(iter(module.FleetTaskset(config)))
    asyncio.run(module.FleetEnv(module.FleetEnvConfig()).run(task, SimpleNamespace(operator=agent)))
    return agent.trace.rewards["grade"]


def by_nemo_gym(app: Any, task_id: int, seed: int, play: Play) -> float:
    client = TestClient(app)
    row = {"task_id": task_id, "seed": seed, "episode_length": CONFIG["episode_length"], "responses_create_params": {}}
    client.post("/seed_session", json=row)
    for knobs in play:
        client.post("/set_knobs", json=knobs)
        client.post("/run", json={"seconds": HOLD})
    return float(client.post("/verify", json={**row, "response": {}}).json()["reward"])


def by_inspect(url: str, task_id: int, seed: int, play: Play) -> float:
    turns = iter([*play, *({} for _ in range(TURNS))])

    async def generate(state: Any) -> Any:
        state.output = SimpleNamespace(completion=json.dumps(next(turns)))
        return state

    sample = SimpleNamespace(metadata={"task_id": task_id, "seed": seed, "config": CONFIG}, messages=[], output=None)
    return float(asyncio.run(model_solver(url, str)(sample, generate)).metadata["score"])


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(task_id=st.sampled_from([1, 2, 3]), seed=st.integers(0, 99), play=st.lists(KNOBS, min_size=1, max_size=TURNS))
def test_a_play_is_paid_its_score_and_one_left_early_that_of_carrying_on(
    server: RunningServer, skyrl: ModuleType, fleet: ModuleType, gym: Any, task_id: int, seed: int, play: Play
) -> None:
    expected = score_by_hand(task_id, seed, play)
    assert {
        "TRL": by_tools(server.url, task_id, seed, play),
        "OpenEnv's harness": by_harness(server.url, task_id, seed, play),
        "SkyRL": by_skyrl(skyrl, server.url, task_id, seed, play),
        "verifiers": by_verifiers(fleet, server.url, task_id, seed, play),
        "NeMo Gym": by_nemo_gym(gym, task_id, seed, play),
        "Inspect": by_inspect(server.url, task_id, seed, play),
    } == dict.fromkeys(("TRL", "OpenEnv's harness", "SkyRL", "verifiers", "NeMo Gym", "Inspect"), expected)
