"""The client works without simulator, server or OpenEnv installed, and gives the same numbers as local use."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from env.inference_env import InferenceEnv
from env.vector import VectorInferenceEnv
from tests.servers import ROOT, RunningServer

ROOMS = ("simulator", "env", "grader", "agents", "ops", "server", "cli")
LIBRARIES = ("openenv", "scipy", "pyarrow", "pandas", "fastapi", "starlette", "uvicorn", "orjson", "websockets", "rich")
ONLY_THE_CLIENT = f"""
import sys

class NotInstalled:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in {(*ROOMS, *LIBRARIES)!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, NotInstalled)
"""
CONFIG: dict[str, Any] = {"episode_length": 6}


def said_by_a_client_alone(program: str, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-c", ONLY_THE_CLIENT + program, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=check)


def printed(server: RunningServer, program: str) -> Any:
    return json.loads(said_by_a_client_alone(program, server.url).stdout)


@pytest.fixture
def local_rewards() -> list[float]:
    env = InferenceEnv(task_id=3, seed=5, config=CONFIG)
    env.reset()
    return [env.step({"batch_size": 40 + 10 * i, "quant_tier": i % 3})[1] for i in range(6)]


def test_the_http_clients_play_an_episode(server: RunningServer, local_rewards: list[float]) -> None:
    played = printed(
        server,
        """
import asyncio, json
from inferencegym.client import AsyncInferenceGymHTTP, InferenceGymHTTP

ACTIONS = [{"batch_size": 40 + 10 * i, "quant_tier": i % 3} for i in range(6)]

async def play():
    async with AsyncInferenceGymHTTP(sys.argv[1]) as client:
        await client.reset(seed=5, task_id=3, config={"episode_length": 6})
        return [(await client.step(action))[1] for action in ACTIONS]

with InferenceGymHTTP(sys.argv[1]) as client:
    client.reset(seed=5, task_id=3, config={"episode_length": 6})
    rewards = [client.step(action)[1] for action in ACTIONS]
    steps = client.grade()["steps"]
print(json.dumps([rewards, asyncio.run(play()), steps]))
""",
    )
    assert played == [local_rewards, local_rewards, 6]


def test_the_batch_client_plays_episodes(server: RunningServer) -> None:
    rewards = printed(
        server,
        """
import json
import numpy as np
from inferencegym.client import InferenceGymBatch

with InferenceGymBatch(sys.argv[1]) as client:
    client.reset(2, 3, seed=5, config={"episode_length": 6})
    played = client.step_many(np.tile([1.0, 0, 64, 0, 1], (1, 2, 1)), 6, float64=True)
print(json.dumps(played.rewards.tolist()))
""",
    )
    envs = VectorInferenceEnv(2, 3, config=CONFIG, action="natural")
    envs.reset(seed=5)
    assert rewards == [envs.step(np.tile([1.0, 0, 64, 0, 1], (2, 1)))[1].tolist() for _ in range(6)]
    envs.close()


def test_remote_gymnasium_environments_play_episodes(server: RunningServer) -> None:
    one, many = printed(
        server,
        """
import json
import gymnasium
from inferencegym.client.gym import REMOTE_ID

options = dict(url=sys.argv[1], task_id=3, config={"episode_length": 6}, observation="scheduled", action="discrete")
env = gymnasium.make(REMOTE_ID, **options)
envs = gymnasium.make_vec(REMOTE_ID, num_envs=3, **options)
for each in (env, envs):
    each.action_space.seed(1)

def play(each):
    rows = [[each.reset(seed=5)[0].tolist()]]
    for _ in range(6):
        observation, reward, *_ = each.step(each.action_space.sample())
        rows.append([observation.tolist(), reward.tolist() if hasattr(reward, "tolist") else reward])
    each.close()
    return rows

print(json.dumps([play(env), play(envs)]))
""",
    )
    for rows, n_envs in ((one, 1), (many, 3)):
        envs = VectorInferenceEnv(n_envs, 3, config=CONFIG, observation="scheduled", action="discrete")
        space = envs.action_space if n_envs > 1 else envs.single_action_space
        space.seed(1)
        expected = [[envs.reset(seed=5)[0].tolist()]]
        for _ in range(6):
            observation, reward, *_ = envs.step(np.reshape(space.sample(), (n_envs, -1)))
            expected.append([observation.tolist(), reward.tolist()])
        envs.close()
        assert rows == (expected if n_envs > 1 else [[value[0] for value in row] for row in expected])


@pytest.mark.parametrize("name", ["InferenceGymEnv", "TrafficControllerEnv", "InferenceGymAction"])
def test_without_openenv_its_client_names_the_extra_to_install(name: str) -> None:
    refused = said_by_a_client_alone(f"from inferencegym.client import {name}", check=False)
    assert refused.returncode == 1
    last = refused.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: OpenEnv cannot be imported")
    assert last.endswith("in a clone: pip install -e '.[openenv]'")


def test_an_unknown_name_is_refused_with_the_names_there_are() -> None:
    refused = said_by_a_client_alone("from inferencegym import client; client.Nothing", check=False)
    assert "has no attribute 'Nothing'; it offers AsyncInferenceGymHTTP," in refused.stderr


def test_importing_the_package_imports_none_of_its_clients() -> None:
    program = (
        "import inferencegym.client; heavy = ('httpx', 'numpy', 'gymnasium', 'pydantic'); "
        "print([name for name in heavy if name in sys.modules])"
    )
    assert said_by_a_client_alone(program).stdout.strip() == "[]"
