"""The verifiers environment on a real server: on a stand-in of its interface, and by verifiers itself where it is.

pip install -e '.[verifiers]' && pytest tests/agents/test_verifiers.py -m engine
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from benchmarks.learning.integration_plays import scripted_model
from inferencegym import __version__
from inferencegym.client.http import InferenceGymHTTP
from inferencegym.models import NAIVE_ACTION
from tests import verifiers_standin
from tests.servers import ROOT, RunningServer
from tests.trainers import VERIFIERS_FOLDER as FOLDER

KNOBS = {"batch_size": 256, "kv_budget": 0.8}
CONFIG = {"hold": 40, "episode_length": 160}
SEEDS = (7, 8)


def score_of(url: str, seed: int) -> float:
    """The score of the hard task with the knobs, played by hand."""
    with InferenceGymHTTP(url) as client:
        client.reset(seed=seed, task_id=3, config=CONFIG)
        done = False
        while not done:
            _, _, done, info = client.step({**NAIVE_ACTION.to_dict(), **KNOBS})
        return float(info["score"])


def played(fleet: ModuleType, url: str, agent: verifiers_standin.Agent) -> verifiers_standin.Trace:
    """What is recorded of the first row's episode."""
    config = fleet.FleetTasksetConfig(base_url=url, tasks=[3], seeds=list(SEEDS), **CONFIG)
    task = next(iter(fleet.FleetTaskset(config)))
    asyncio.run(fleet.FleetEnv(fleet.FleetEnvConfig()).run(task, SimpleNamespace(operator=agent)))
    return agent.trace


def test_rows_are_every_task_with_every_seed(fleet: ModuleType) -> None:
    config = fleet.FleetTasksetConfig(tasks=[3, "autoscale"], seeds=[0, 5], hold=4, episode_length=60)
    rows = [task.data.model_dump(exclude={"prompt", "name"}) for task in fleet.FleetTaskset(config)]
    assert [(row["task_id"], row["seed"]) for row in rows] == [(3, 0), (3, 5), ("autoscale", 0), ("autoscale", 5)]
    assert {json.dumps(row["config"]) for row in rows} == {'{"hold": 4, "episode_length": 60}'}
    with pytest.raises(ValueError, match="less than or equal to 60"):
        fleet.FleetTasksetConfig(hold=61)


def test_an_episode_is_paid_its_score_whatever_is_said_beside_the_knobs(
    server: RunningServer, fleet: ModuleType
) -> None:
    agent = verifiers_standin.Agent(f"More at once.\n{json.dumps(KNOBS)}", "as it is", "{}")
    trace = played(fleet, server.url, agent)
    assert "The goal is a high score" in agent.heard[0]
    assert agent.heard[2].startswith("Your last answer was not used")
    assert trace.rewards == {"grade": score_of(server.url, SEEDS[0])}
    assert trace.metrics == {"invalid_answers": 1.0, "finished": 1.0}


def test_the_model_has_no_tools_and_hence_needs_no_sandbox(fleet: ModuleType) -> None:
    operator = fleet.FleetEnvConfig().operator
    assert (operator.harness, operator.runtime) == ({"id": "null"}, {"type": "subprocess"})


def test_the_environments_own_wheel_has_the_module_that_verifiers_looks_for(tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / "source")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    subprocess.run([*build, str(tmp_path), str(tmp_path / "source")], check=True, cwd=tmp_path)
    (wheel,) = tmp_path.glob(f"inferencegym_fleet-{__version__}-*.whl")
    assert "inferencegym_fleet.py" in zipfile.ZipFile(wheel).namelist()


# ---------------------------------------------------------------- verifiers itself


def scripted(request: dict[str, Any]) -> dict[str, Any]:
    """A reply that sets the knobs in the first turn."""
    played = any(message["role"] == "assistant" for message in request["messages"])
    return {"content": "{}" if played else json.dumps(KNOBS)}


@pytest.mark.engine
def test_verifiers_own_command_plays_every_row(server: RunningServer, tmp_path: Path) -> None:
    pytest.importorskip("verifiers.v1")
    settings = {
        "--env.taskset.base-url": [server.url],
        "--env.taskset.tasks": ["3"],
        "--env.taskset.seeds": [str(seed) for seed in SEEDS],
        "--env.taskset.hold": [str(CONFIG["hold"])],
        "--env.taskset.episode-length": [str(CONFIG["episode_length"])],
        "--client.api-key-var": ["NO_KEY"],
        "--model": ["scripted"],
        "--output-dir": [str(tmp_path)],
    }
    arguments = [word for name, values in settings.items() for word in (name, *values)]
    command = Path(sys.executable).with_name("vf-eval")
    with scripted_model(scripted) as (url, _):
        subprocess.run(
            [command, "inferencegym-fleet", *arguments, "--client.base-url", url, "--no-push", "--no-rich"],
            check=True,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{FOLDER}"},
        )
    (stored,) = tmp_path.glob("*/traces.jsonl")
    traces = [json.loads(line)["traces"][0] for line in stored.read_text(encoding="utf-8").splitlines()]
    assert all(trace["ok"] for trace in traces)
    rewards = {trace["task"]["data"]["seed"]: trace["rewards"]["grade"]["score"] for trace in traces}
    assert rewards == {seed: score_of(server.url, seed) for seed in SEEDS}
