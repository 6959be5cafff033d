"""The NeMo Gym resources server on a real server: on a stand-in of its interface, and by Gym's own class.

The second runs in the Python 3.12 that has nemo-gym:

    NEMO_GYM_PYTHON=.../bin/python python -m pytest tests/agents/test_nemo_gym.py -m engine
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from starlette.testclient import TestClient

from agents.integrations.nemo_gym.rows import rows
from inferencegym.client.http import InferenceGymHTTP
from inferencegym.models import NAIVE_ACTION
from tests.servers import ROOT, RunningServer
from tests.trainers import NEMO_GYM_APP

SEED = 7
KNOBS = {"batch_size": 96}
RESPONSE = {
    "id": "1",
    "created_at": 0,
    "model": "scripted",
    "object": "response",
    "output": [],
    "parallel_tool_calls": False,
    "tool_choice": "auto",
    "tools": [],
}


def score_of(url: str) -> float:
    """The score of task 1 with the knobs, played by hand."""
    with InferenceGymHTTP(url) as client:
        client.reset(seed=SEED, task_id=1)
        done = False
        while not done:
            _, _, done, info = client.step({**NAIVE_ACTION.to_dict(), **KNOBS})
        return float(info["score"])


@pytest.fixture
def row(server: RunningServer) -> dict[str, Any]:
    return next(rows(server.url, [1], [SEED]))


def test_a_row_briefs_the_model_and_describes_the_tools(row: dict[str, Any]) -> None:
    asked = row["responses_create_params"]
    assert (row["task_id"], row["seed"]) == (1, SEED)
    assert "The goal is a high score" in asked["input"][0]["content"]
    assert [tool["name"] for tool in asked["tools"]] == ["set_knobs", "run", "observe"]
    assert asked["tools"][1]["parameters"]["properties"]["seconds"]["maximum"] == 60


def test_rows_are_written_one_a_line_by_a_command(server: RunningServer, row: dict[str, Any]) -> None:
    command = [sys.executable, "-m", "agents.integrations.nemo_gym.rows", "--url", server.url, "--seeds", str(SEED)]
    written = subprocess.run([*command, "--tasks", "1", "autoscale"], check=True, cwd=ROOT, capture_output=True)
    first, second = map(json.loads, written.stdout.splitlines())
    assert (first, second["task_id"]) == (row, "autoscale")


def test_an_episode_by_tools_is_paid_its_score(server: RunningServer, gym: Any, row: dict[str, Any]) -> None:
    client = TestClient(gym)
    assert client.post("/seed_session", json=row).json() == {}
    assert '"batch_size": 96' in client.post("/set_knobs", json=KNOBS).json()["result"]
    assert '"timestep": 0' in client.post("/observe").json()["result"]
    told = [client.post("/run", json={"seconds": 50}).json()["result"] for _ in range(4)]
    assert [text.endswith("The episode is over.") for text in told] == [False, False, False, True]
    paid = client.post("/verify", json={**row, "response": RESPONSE}).json()
    assert (paid["reward"], paid["finished"], paid["seed"]) == (pytest.approx(score_of(server.url)), True, SEED)
    assert "no episode" in client.post("/run", json={"seconds": 1}).json()["error"]


def test_a_call_that_is_refused_is_told_and_no_time_passes(gym: Any, row: dict[str, Any]) -> None:
    client = TestClient(gym)
    client.post("/seed_session", json=row)
    assert (
        "batch_size: Input should be less than or equal to 512"
        in client.post("/set_knobs", json={"batch_size": 9999}).json()["error"]
    )
    assert "size: Extra inputs" in client.post("/set_knobs", json={"size": 1}).json()["error"]
    assert "seconds" in client.post("/run", json={"seconds": 61}).json()["error"]
    assert '"timestep": 0' in client.post("/observe").json()["result"]


def test_sessions_do_not_meet_and_one_left_early_is_paid_for_carrying_on(gym: Any, row: dict[str, Any]) -> None:
    one, other, stranger = (TestClient(gym) for _ in range(3))
    for client in (one, other):
        client.post("/seed_session", json=row)
    one.post("/run", json={"seconds": 50})
    assert '"timestep": 0' in other.post("/observe").json()["result"]
    first, second, third = (
        client.post("/verify", json={**row, "response": RESPONSE}).json() for client in (one, other, stranger)
    )
    naive = second["reward"]  # both carry on with the knobs of the start
    assert 0.0 < naive < 1.0
    assert (first["reward"], first["finished"], third["reward"]) == (naive, False, 0.0)


def test_the_configuration_joins_the_server_to_gyms_agent() -> None:
    folder = ROOT / "agents" / "integrations" / "nemo_gym"
    config = yaml.safe_load((folder / "configs" / "inferencegym.yaml").read_text(encoding="utf-8"))
    (name, agent_name) = config
    resources = config[name]["resources_servers"]["inferencegym"]
    assert (folder / resources["entrypoint"]).exists()
    agent = config[agent_name]["responses_api_agents"]["simple_agent"]
    assert agent["resources_server"] == {"type": "resources_servers", "name": name}


# ---------------------------------------------------------------- Gym's own class

BY_GYM = f"""
import json, sys
from unittest.mock import MagicMock
from fastapi.testclient import TestClient
from nemo_gym.base_resources_server import BaseRunRequest
from nemo_gym.server_utils import ServerClient
from {NEMO_GYM_APP} import FleetConfig, FleetResourcesServer

url, row = sys.argv[1], json.loads(sys.argv[2])
BaseRunRequest.model_validate(row)
config = FleetConfig(host="", port=1, entrypoint="app.py", name="fleet", base_url=url)
server = FleetResourcesServer(config=config, server_client=MagicMock(spec=ServerClient))
client = TestClient(server.setup_webserver())
client.post("/seed_session", json=row)
client.post("/set_knobs", json={KNOBS!r})
for _ in range(4):
    client.post("/run", json={{"seconds": 50}})
paid = client.post("/verify", json={{**row, "response": {RESPONSE!r}}}).json()
print(json.dumps([paid["reward"], paid["finished"]]))
"""


@pytest.mark.engine
def test_gyms_own_server_class_pays_the_same(server: RunningServer, row: dict[str, Any]) -> None:
    python = os.environ.get("NEMO_GYM_PYTHON")
    if python is None:
        pytest.skip("NEMO_GYM_PYTHON names no Python with nemo-gym")
    told = subprocess.run(
        [Path(python), "-c", BY_GYM, server.url, json.dumps(row)],
        check=True,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert json.loads(told.stdout.splitlines()[-1]) == [pytest.approx(score_of(server.url)), True]
