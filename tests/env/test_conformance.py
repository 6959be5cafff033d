"""One episode, four ways to play it: in process, over HTTP, and over a WebSocket with OpenEnv's client, async and sync.

OpenEnv's validator never plays an episode, so this does: every registered task, to its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from env.inference_env import InferenceEnv
from env.traffic.env import TrafficEnv
from env.traffic.tasks import list_traffic_tasks
from inferencegym.client import InferenceGymEnv, TrafficControllerEnv
from inferencegym.client.openenv_types import without_gradio
from inferencegym.models import ACTION_FIELDS, SPEC_LENGTHS
from inferencegym.tasks import list_tasks
from inferencegym.traffic import ACTION_NAMES
from tests.servers import PATIENT, RunningServer, running_server

with without_gradio():
    from openenv.core import GenericEnvClient

SEED = 20_26
LENGTH = 50
"""Steps of a serving episode here: the first flood begins in second 30."""
Played = list[tuple[dict[str, Any], float | None, bool]]
"""Observation, reward and done of the reset and of every step."""

SERVING_TASKS = [task.task_id for task in list_tasks(include_recorded=True)]
TRAFFIC_TASKS = [task.task_id for task in list_traffic_tasks()]


def episode(task_id: int | str) -> dict[str, Any]:
    """Arguments of a reset."""
    chosen = {"task_id": task_id, "seed": SEED}
    return chosen if task_id in TRAFFIC_TASKS else chosen | {"config": {"episode_length": LENGTH}}


def serving_actions(task_id: int | str) -> list[dict[str, Any]]:
    """Knobs all over their ranges, the same in every run."""
    draw = np.random.default_rng([SEED, len(str(task_id))])
    batch = ACTION_FIELDS["batch_size"]
    return [
        {
            "kv_budget": float(draw.uniform(0.3, 1.0)),
            "spec_length": int(draw.choice(SPEC_LENGTHS)),
            "batch_size": int(draw.integers(int(batch.low), int(batch.high), endpoint=True)),
            "prefill_disagg": bool(draw.integers(2)),
            "quant_tier": int(draw.integers(3)),
        }
        for _ in range(LENGTH)
    ]


def traffic_actions(task_id: str) -> list[dict[str, Any]]:
    """Actions that keep the server alive for the most part, so that the episode is long."""
    task = next(task for task in list_traffic_tasks() if task.task_id == task_id)
    names = [
        ACTION_NAMES[2] if task.pattern.rate(step) > 100 else ACTION_NAMES[1] for step in range(task.episode_length)
    ]
    return [{"action": name} for name in names]


def in_process(task_id: int | str, actions: Sequence[Mapping[str, Any]]) -> Played:
    env: Any = TrafficEnv() if task_id in TRAFFIC_TASKS else InferenceEnv()
    env.reset(**episode(task_id))
    played: Played = [(env.observation_dict(), None, False)]
    for action in actions:
        _, reward, done, _ = env.step(action)
        played.append((env.observation_dict(), reward, done))
        if done:
            break
    return played


def over_http(server: RunningServer, prefix: str, task_id: int | str, actions: Sequence[Mapping[str, Any]]) -> Played:
    key = "state" if prefix else "observation"
    first = server.post(f"{prefix}/reset", episode(task_id))
    played: Played = [(first[key], None, False)]
    for action in actions:
        sent = action["action"] if prefix else action
        step = server.post(f"{prefix}/step", {"session_id": first["session_id"], "action": sent})
        played.append((step[key], step["reward"], step["done"]))
        if step["done"]:
            break
    return played


def client_for(server: RunningServer, prefix: str) -> InferenceGymEnv | TrafficControllerEnv:
    return (
        TrafficControllerEnv(base_url=server.url + prefix, **PATIENT)
        if prefix
        else InferenceGymEnv(base_url=server.url, **PATIENT)
    )


def seen(result: Any) -> tuple[dict[str, Any], float | None, bool]:
    return result.observation.model_dump(exclude={"reward", "done", "metadata", "info"}), result.reward, result.done


def over_websocket(server: RunningServer, prefix: str, task_id: int | str, actions: Sequence[Any]) -> Played:
    async def play() -> Played:
        async with client_for(server, prefix) as env:
            played = [seen(await env.reset(**episode(task_id)))]
            for action in actions:
                played.append(seen(await env.step(action)))
                if played[-1][2]:
                    break
            state = await env.state()
            assert (state.step_count, state.task_id, state.seed) == (len(played) - 1, task_id, SEED)
            assert state.episode_id == env.episode_id
            return played

    return asyncio.run(play())


def over_websocket_sync(server: RunningServer, prefix: str, task_id: int | str, actions: Sequence[Any]) -> Played:
    with client_for(server, prefix).sync() as env:
        played = [seen(env.reset(**episode(task_id)))]
        for action in actions:
            played.append(seen(env.step(action)))
            if played[-1][2]:
                break
        return played


@pytest.mark.parametrize("task_id", SERVING_TASKS)
def test_every_serving_task_is_the_same_episode_however_it_is_played(server: RunningServer, task_id: int | str) -> None:
    actions = serving_actions(task_id)
    expected = in_process(task_id, actions)
    assert [done for _, _, done in expected] == [False] * len(actions) + [True]
    assert over_http(server, "", task_id, actions) == expected
    assert over_websocket(server, "", task_id, actions) == expected
    assert over_websocket_sync(server, "", task_id, actions) == expected


@pytest.mark.parametrize("task_id", TRAFFIC_TASKS)
def test_every_traffic_task_is_the_same_episode_however_it_is_played(server: RunningServer, task_id: str) -> None:
    actions = traffic_actions(task_id)
    expected = in_process(task_id, actions)
    assert expected[-1][2]
    assert over_http(server, "/traffic", task_id, actions) == expected
    assert over_websocket(server, "/traffic", task_id, actions) == expected
    assert over_websocket_sync(server, "/traffic", task_id, actions) == expected


@pytest.mark.parametrize(("prefix", "task_id"), [("", 1), ("", 2), ("", 3), ("/traffic", "task_hard")])
def test_the_last_step_of_an_episode_brings_its_grade_however_it_is_played(
    server: RunningServer, prefix: str, task_id: int | str
) -> None:
    actions = traffic_actions(str(task_id)) if prefix else serving_actions(task_id)
    env: Any = TrafficEnv() if prefix else InferenceEnv()
    env.reset(**episode(task_id))
    infos = [env.step(action)[3] for action in actions]
    first = server.post(f"{prefix}/reset", episode(task_id))
    body = {"session_id": first["session_id"]}
    answers = [server.post(f"{prefix}/step", {**body, "action": action}) for action in actions]
    graded = server.post(f"{prefix}/grader", body)
    expected = {name: graded[name] for name in ("score", "breakdown", "feedback")}
    assert [info.items() >= expected.items() for info in infos] == [False] * (len(actions) - 1) + [True]
    assert answers[-1]["info"].items() >= expected.items()
    assert not any(set(answer["info"]) & set(expected) for answer in answers[:-1])
    assert env.grade().items() >= expected.items()

    async def last_metadata(env: Any) -> tuple[Any, Any]:
        async with env:
            await env.reset(**episode(task_id))
            results = [await env.step(action) for action in actions]
            return results[-2], results[-1]

    before, last = asyncio.run(last_metadata(client_for(server, prefix)))
    assert (before.observation.metadata, last.observation.metadata) == ({}, expected)
    before, last = asyncio.run(last_metadata(GenericEnvClient(base_url=server.url + prefix, **PATIENT)))
    assert (before.metadata, last.metadata, last.observation["metadata"]) == (None, expected, expected)


def test_sixty_four_websocket_episodes_at_once_stay_apart(tmp_path: Path) -> None:
    """Each has its own seed; every one equals the same seed played alone in process."""
    actions = serving_actions(2)[:25]

    async def play(server: RunningServer, seed: int) -> list[tuple[dict[str, Any], float | None, bool]]:
        async with InferenceGymEnv(base_url=server.url, **PATIENT) as env:
            played = [seen(await env.reset(task_id=2, seed=seed))]
            played += [seen(await env.step(action)) for action in actions]
            return played

    async def together(server: RunningServer) -> list[Played]:
        return await asyncio.gather(*(play(server, seed) for seed in range(64)))

    with running_server(tmp_path) as server:  # as it starts by default
        episodes = asyncio.run(together(server))
    for seed, played in enumerate(episodes):
        env = InferenceEnv(task_id=2, seed=seed)
        env.reset()
        assert played[0][0] == env.observation_dict()
        for action, (observation, reward, _) in zip(actions, played[1:], strict=True):
            _, expected, _, _ = env.step(action)
            assert (observation, reward) == (env.observation_dict(), expected)
