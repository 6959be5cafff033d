"""Every interface for language models hands over the same briefing, which names only what that interface has."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from contextlib import closing
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from starlette.testclient import TestClient

from agents.briefing import Interface, serving_briefing
from agents.integrations.inspect_ai import model_solver
from agents.integrations.llm import CALL_OR_TEXT, TOOL_NAME
from agents.integrations.nemo_gym.rows import ARGUMENTS, rows
from agents.integrations.openenv_harness import CALLS, TOOL
from agents.integrations.text_episode import TEXT
from agents.integrations.trl import TOOLS, FleetTools
from env.serving.family import RULES, describe_task
from inferencegym.tasks import get_task
from scripts import episode_tokens
from server.api.mcp import PLAYER
from tests import verifiers_standin
from tests.checkout import ROOT
from tests.server.test_mcp import NAMES
from tests.servers import RunningServer

HELD = {"hold": 20, "reward": "grade"}
EVERY_SECOND = {"hold": 1, "reward": "grade"}


def check(
    briefing: str, interface: Interface, config: dict[str, Any], tools: set[str], answer: str, task_id: Any = 3
) -> None:
    """``briefing`` begins with the builder's text, and its names are knobs, tools, and keys of ``answer``."""
    task = get_task(task_id)
    built = serving_briefing(describe_task(task), RULES, interface, config)
    assert briefing.startswith(built)
    named = set(re.findall(r"`([^`]+)`", built))
    knobs = {*task.active_actions, *(["replicas"] if task.fleet.max_replicas else [])}
    keys = set(re.findall(r"[\"'](\w+)[\"']:", answer))
    assert named <= knobs | tools | keys
    assert tools | knobs <= named
    assert not re.search(r"GET /|POST /|\binfo\.|config\.", built)


@pytest.mark.parametrize(("reward", "told"), [("grade", "the mean"), ("score", "sum to it")])
def test_the_briefing_tells_how_the_rewards_of_an_episode_give_its_score(reward: str, told: str) -> None:
    text = serving_briefing(describe_task(get_task(3)), RULES, TEXT, {"reward": reward})
    (line,) = (line for line in text.splitlines() if line.startswith("Rewarded each second:"))
    assert told in line
    assert "score" in line


def test_the_briefing_tells_goal_objectives_floods_restarts_first_knobs_and_how_many_steps_are_left() -> None:
    text = serving_briefing(describe_task(get_task(3)), RULES, TEXT, HELD)
    for told in (
        "0.4 * mean tokens/s / 2",
        "interactive (20% of the requests): 200 ms",
        "The first flood comes after 30 seconds and lasts 15; there is one every 120.",
        "restart_s is 0.2 s, load_gb_per_s 20 GB/s",
        "an integer from 1 to 512 (requests); it starts at 32",
        "10 answers are left.",
    ):
        assert told in text
    assert "max_replicas" not in text


@pytest.mark.parametrize(
    ("name", "interface", "config", "tools"),
    [
        ("`inferencegym llm`", CALL_OR_TEXT, {**HELD, "hold": 10}, {TOOL_NAME}),
        ("OpenEnv's harness", CALLS, HELD, {TOOL.name}),
        ("MCP (`run(20)`)", PLAYER, {}, set(NAMES)),
    ],
)
def test_a_play_begins_with_it(
    server: RunningServer, name: str, interface: Interface, config: dict[str, Any], tools: set[str]
) -> None:
    _, play = episode_tokens.INTERFACES[name]
    with closing(play(server.url)) as texts:
        first, answer = next(texts), next(texts)
    check(json.loads(first)["briefing"] if interface is PLAYER else first, interface, config, tools, answer)


@pytest.mark.parametrize("task_id", [1, 3, "autoscale"])
def test_trls_tools_return_it(server: RunningServer, task_id: Any) -> None:
    tools = FleetTools(server.url)
    briefing = tools.reset(task_id, seed=7)
    public = {name for name in ("set_knobs", "run", "observe") if callable(getattr(tools, name, None))}
    check(briefing, TOOLS, EVERY_SECOND, public, tools.run(20), task_id)


def test_rows_of_nemo_gym_hold_it(server: RunningServer, gym: Any) -> None:
    row = next(rows(server.url, [3], [7]))
    (message,) = row["responses_create_params"]["input"]
    client = TestClient(gym)
    client.post("/seed_session", json=row)
    played = client.post("/run", json={"seconds": 20}).json()["result"]
    check(message["content"], TOOLS, EVERY_SECOND, set(ARGUMENTS), played)


def test_skyrl_begins_with_it(server: RunningServer, skyrl: ModuleType) -> None:
    env = skyrl.FleetEnv(extras={"base_url": server.url, "task_id": 3, "seed": 7})
    (message,), _ = env.init([])
    check(message["content"], TEXT, HELD, set(), env.step("{}")["observations"][0]["content"])
    env.close()


def test_verifiers_begins_with_it(server: RunningServer, fleet: ModuleType) -> None:
    agent = verifiers_standin.Agent("{}", max_turns=2)
    task = next(iter(fleet.FleetTaskset(fleet.FleetTasksetConfig(base_url=server.url, tasks=[3], seeds=[7]))))
    asyncio.run(fleet.FleetEnv(fleet.FleetEnvConfig()).run(task, SimpleNamespace(operator=agent)))
    check(agent.heard[0], TEXT, HELD, set(), agent.heard[1])


def test_inspect_begins_with_it(server: RunningServer) -> None:
    async def generate(state: Any) -> Any:
        state.output = SimpleNamespace(completion="{}")
        return state

    sample = SimpleNamespace(metadata={"task_id": 3, "seed": 7}, messages=[], output=None)
    asyncio.run(model_solver(server.url, str, seconds_per_answer=20)(sample, generate))
    check(sample.messages[0], TEXT, HELD, set(), sample.messages[1])


def test_the_tokens_of_an_episode_are_those_that_the_document_states(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Up to one in a hundred: processors differ in last digits, which change the length of a text."""
    monkeypatch.setattr(sys, "argv", ["episode_tokens", "--url", server.url])
    episode_tokens.main()
    stated = (ROOT / "docs" / "language-models.md").read_text(encoding="utf-8")
    for row in capsys.readouterr().out.splitlines()[2:]:
        _, name, *measured, _ = (cell.strip() for cell in row.split("|"))
        found = re.search(rf"^\| {re.escape(name)} \|(.*)\|$", stated, re.MULTILINE)
        assert found is not None, name
        numbers = [int(cell.replace(",", "")) for cell in found[1].split("|")]
        assert numbers == pytest.approx([int(cell.replace(",", "")) for cell in measured], rel=0.01)
