"""Steps that hold their action for several seconds: ``hold`` of an episode's configuration."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, get_type_hints

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import inferencegym.gym as ig
from agents.episodes import run_episodes
from agents.policies.switching_policy import ActionsAgent
from cli.main import main
from env.batch import ServingBatch
from env.episode_files import saved
from env.families import FAMILIES
from env.inference_env import InferenceEnv
from env.log import over_steps
from env.verify import verify_log
from grader.grader import GraderModule
from inferencegym.client import InferenceGymBatch, InferenceGymEnv
from inferencegym.errors import EpisodeDoneError, ForgedLogError, InvalidConfigError, MalformedLogError
from inferencegym.models import NAIVE_ACTION, MetricsSnapshot, ServeAction
from inferencegym.spaces.actions import from_row, snap
from inferencegym.tasks import get_task, list_tasks
from simulator.kernel.arrays import METRICS, OVER_SECONDS
from tests.env.test_grade_reward import random_knobs
from tests.servers import PATIENT, RunningServer

TASKS = [task.task_id for task in list_tasks(include_recorded=True)]
SERVING = FAMILIES["serving"]
FREE = np.ones(5, dtype=np.bool_)
SHORT = {"episode_length": 17, "hold": 5}
"""Four steps: of 5, 5, 5 and 2 seconds."""


def random_actions(seed: int, n: int) -> list[ServeAction]:
    return [from_row(row) for row in snap(random_knobs(np.random.default_rng(seed), n), FREE)]


def played(task_id: Any, seed: int, config: dict[str, Any], actions: list[ServeAction]) -> InferenceEnv:
    env = InferenceEnv(task_id=task_id, config=config)
    env.reset(seed=seed)
    for action in actions:
        env.step(action)
    return env


# ---------------------------------------------------------------- the law


@pytest.mark.parametrize("task_id", TASKS)
@given(
    seed=st.integers(0, 2**31),
    hold=st.integers(1, 60),
    length=st.integers(1, 70),
    pay=st.sampled_from(["plan", "grade", "score"]),
)
@settings(max_examples=8)
def test_a_held_step_is_as_many_single_steps_with_the_same_action(
    task_id: Any, seed: int, hold: int, length: int, pay: str
) -> None:
    config = {"episode_length": length, "reward": pay}
    held, single = (InferenceEnv(task_id=task_id, config={**config, "hold": h}) for h in (hold, 1))
    assert held.reset(seed=seed) == single.reset(seed=seed)
    for action in random_actions(seed, -(-length // hold)):
        observation, reward, done, info = held.step(action)
        rewards, terms, metrics = [], [], []
        for _ in range(info["seconds"]):
            last = single.step(action)
            rewards.append(last[1])
            terms.append(last[3]["reward_terms"])
            metrics.append(last[3]["metrics"])
        assert (observation, done) == (last[0], last[2])
        assert reward == pytest.approx(sum(rewards), rel=1e-12, abs=1e-12)
        summed = {name: sum(each[name] for each in terms) for name in terms[0]}
        assert info["reward_terms"] == pytest.approx(summed, rel=1e-9, abs=1e-9)
        for name in ("workload", "fleet", "timestep", "action_applied"):
            assert info[name] == last[3][name]
        assert info["metrics"]["slo_violations"] == sum(each["slo_violations"] for each in metrics)
        assert info["metrics"]["cost_per_1k"] == pytest.approx(sum(each["cost_per_1k"] for each in metrics))
        assert info["metrics"]["tokens_per_sec"] == pytest.approx(fmean(each["tokens_per_sec"] for each in metrics))
        assert info["metrics"]["ttft_p50_ms"] == pytest.approx(fmean(each["ttft_p50_ms"] for each in metrics))
        for name in ("ttft_p99_ms", "gpu_memory_gb", "oom"):
            assert info["metrics"][name] == max(each[name] for each in metrics)
    assert held.episode_log == single.episode_log
    assert held.done
    assert held.grade() == single.grade()
    assert len(held.actions) == -(-length // hold) == held.state()["step_count"]


@given(task_id=st.sampled_from([1, 2, 3]), seed=st.integers(0, 99), hold=st.integers(1, 20))
@settings(max_examples=25, deadline=None)
def test_a_held_step_gives_by_class_and_in_metrics_what_its_seconds_give(task_id: int, seed: int, hold: int) -> None:
    config = {"episode_length": 50}
    held, single = (InferenceEnv(task_id=task_id, seed=seed, hold=each, config=config) for each in (hold, 1))
    held.reset()
    single.reset()
    for action in random_actions(seed, -(-50 // hold)):
        _, _, _, info = held.step(action)
        seconds = [single.step(info["action_applied"])[3] for _ in range(info["seconds"])]
        together = over_steps(seconds)
        assert together["grade_so_far"] == info["grade_so_far"]
        assert together["metrics"] == pytest.approx(info["metrics"], rel=1e-12)
        for name, of_class in info["by_class"].items():
            assert of_class == pytest.approx(together["by_class"][name], abs=1e-4)
        missed = sum(of_class["slo_violations"] for of_class in info["by_class"].values())
        if not info["metrics"]["oom"]:  # which multiplies the violations of the metrics
            assert missed == pytest.approx(info["metrics"]["slo_violations"], abs=0.5 * info["seconds"] + 1e-4)
        waiting = sum(of_class["queue_requests"] for of_class in info["by_class"].values())
        assert min(512, waiting) == pytest.approx(info["workload"]["queue_depth"], abs=1.0)


def test_the_queue_by_class_is_not_cut_to_the_bound_of_the_observation() -> None:
    task = replace(get_task(1), fleet=replace(get_task(1).fleet, queue_limit=5_000), arrival_rate_rps=1_500.0)
    env = InferenceEnv(hold=5)
    env.task, env.config = task, task.config({"hold": 5})
    env.reset(seed=1)
    _, _, _, info = env.step({"batch_size": 1})
    assert info["workload"]["queue_depth"] == 512
    assert info["by_class"]["batch"]["queue_requests"] == pytest.approx(5_000)


def test_infos_of_steps_are_put_together_by_their_seconds() -> None:
    """Three seconds at 10 tokens/s and one at 30 are a mean of 15; costs add up, and the grade is the latest."""
    metrics = {"tokens_per_sec": 10.0, "cost_per_1k": 1.0}
    infos = [
        {"seconds": 3, "metrics": metrics, "grade_so_far": {"score": 0.5}},
        {"seconds": 1, "metrics": {**metrics, "tokens_per_sec": 30.0}, "grade_so_far": {"score": 0.6}},
    ]
    expected = {"tokens_per_sec": 15.0, "cost_per_1k": 2.0}
    assert over_steps(infos) == {"seconds": 4, "metrics": expected, "grade_so_far": {"score": 0.6}}


def test_the_last_step_is_as_long_as_the_episode_still_is() -> None:
    env = InferenceEnv(task_id=3, config=SHORT)
    env.reset(seed=1)
    infos = [env.step(NAIVE_ACTION)[3] for _ in range(4)]
    assert [info["seconds"] for info in infos] == [5, 5, 5, 2]
    assert [info["timestep"] for info in infos] == [5, 10, 15, 17]
    assert [entry["timestep"] for entry in env.episode_log] == list(range(1, 18))
    with pytest.raises(EpisodeDoneError):
        env.step(NAIVE_ACTION)


def test_every_metric_says_how_its_seconds_make_one_number() -> None:
    assert set(OVER_SECONDS) == set(METRICS)
    assert set(get_type_hints(MetricsSnapshot)) <= set(OVER_SECONDS)


@pytest.mark.parametrize("hold", [0, 61, 2.5, "5", True])
def test_a_hold_is_a_whole_number_of_seconds_from_1_to_60(hold: Any) -> None:
    with pytest.raises(InvalidConfigError) as refused:
        InferenceEnv(task_id=1, config={"hold": hold})
    assert refused.value.field == "config.hold"
    InferenceEnv(task_id=1, hold=60)


# ---------------------------------------------------------------- rows, arrays and threads


@pytest.mark.parametrize("mode", list(AutoresetMode))
@pytest.mark.parametrize("task_id", [2, 3])
def test_rows_hold_as_the_same_episodes_alone(task_id: int, mode: AutoresetMode) -> None:
    """Through two episodes, one row of which is restarted in between where it may be."""
    rows = ig.VectorInferenceEnv(3, task_id, config=SHORT, action="natural", autoreset_mode=mode, n_threads=2)
    seen, _ = rows.reset(seed=[5, 6, 7])
    alone = [InferenceEnv(task_id=task_id, config=SHORT) for _ in range(3)]
    first = [env.reset(seed=seed) for env, seed in zip(alone, (5, 6, 7), strict=True)]
    np.testing.assert_array_equal(seen[:, 12], [o.timestep for o in first])
    scored = 0
    for step, knobs in enumerate(random_knobs(np.random.default_rng(1), 14, 3).astype(np.float32)):
        over = np.array([env.done for env in alone])
        if mode is AutoresetMode.DISABLED and (over.any() or step == 2):
            mask = over if over.any() else np.array([False, True, False])
            rows.reset(options={"reset_mask": mask})
            for row in np.flatnonzero(mask):
                alone[row].reset(seed=int(rows.seeds[row]))
            over[:] = False
        _, rewards, terminated, _, info = rows.step(knobs)
        final = info.get("final_info", info)
        for row, env in enumerate(alone):
            if over[row]:  # only where the next step restarts
                assert rewards[row] == 0.0
                env.reset(seed=int(rows.seeds[row]))
                continue
            _, reward, done, told = env.step(
                from_row(snap(knobs[row : row + 1].astype(np.float64), rows.batch.mask)[0])
            )
            assert (rewards[row], terminated[row]) == (pytest.approx(reward, rel=1e-12), done)
            for name in ("ttft_p50_ms", "ttft_p99_ms", "cost_per_1k", "gpu_memory_gb"):
                assert final["metrics"][name][row] == pytest.approx(told["metrics"][name], rel=1e-12)
            if done:
                assert (final["score"][row], final["feedback"][row]) == (told["score"], told["feedback"])
                scored += 1
                if mode is AutoresetMode.SAME_STEP:
                    env.reset(seed=int(rows.seeds[row]))
    assert scored >= 5


def test_many_held_steps_on_several_threads_are_single_held_steps() -> None:
    task = get_task(3)
    config = task.config({"episode_length": 20, "hold": 3, "reward": "grade"})
    once, many = (ServingBatch(task, 200, config, n_threads=n) for n in (1, 3))
    actions = random_knobs(np.random.default_rng(3), 7, 200)
    once.reset(range(200))
    many.reset(range(200))
    rewards, seen = np.empty((7, 200)), np.empty((7, 200, 21))
    many.step_many(actions, seen, rewards)
    for k, knobs in enumerate(actions):
        once.step(knobs)
        np.testing.assert_array_equal(once.reward, rewards[k])
        np.testing.assert_array_equal(once.full_observation(), seen[k])
    for name, values in once.step_metrics().items():
        np.testing.assert_array_equal(values, many.step_metrics()[name])
    assert set(many.seconds) == {2}
    with pytest.raises(EpisodeDoneError):
        many.step_many(actions[:1], seen[:1], rewards[:1])


@pytest.mark.parametrize("name", list(METRICS))
def test_a_metric_of_a_held_step_follows_from_its_seconds(name: str) -> None:
    task = get_task(3)
    held, single = (ServingBatch(task, 3, task.config({"hold": hold})) for hold in (7, 1))
    held.reset([1, 2, 3])
    single.reset([1, 2, 3])
    for knobs in random_knobs(np.random.default_rng(5), 6, 3):
        held.step(knobs)
        seconds: list[NDArray[np.float64]] = []
        for _ in range(7):
            single.step(knobs)
            seconds.append(single.metric[name].copy())
        of = {"mean": np.mean, "sum": np.sum, "max": np.max, "last": lambda x, axis: x[-1]}[OVER_SECONDS[name]]
        np.testing.assert_allclose(held.step_metrics()[name], of(np.array(seconds), axis=0), rtol=1e-12)


def test_episodes_of_an_agent_are_scored_by_their_seconds() -> None:
    task = get_task(3)
    agent = ActionsAgent(random_knobs(np.random.default_rng(2), 2), 1)
    results = [run_episodes(task, agent, [4], n_rows=2, config=task.config({"hold": hold})) for hold in (1, 30)]
    np.testing.assert_array_equal(results[0].scores(), results[1].scores())
    np.testing.assert_allclose(results[0].returns, results[1].returns)


# ---------------------------------------------------------------- records, logs and boards


def test_a_replayed_record_of_held_steps_is_the_same_episode() -> None:
    env = played(3, 9, {**SHORT, "reward": "grade"}, random_actions(4, 3))
    again = SERVING.replay(SERVING.episode(3, 9, env.config_dict(), env.actions))
    assert again.episode_log == env.episode_log
    assert (again.info(), again.last_reward) == (env.info(), env.last_reward)


def test_a_log_of_held_steps_is_verified_second_by_second() -> None:
    env = played(3, 9, SHORT, random_actions(4, 4))
    log = json.loads(json.dumps(env.episode_log))
    assert verify_log(SERVING, 3, 9, env.config_dict(), log).episode_log == env.episode_log
    # The same seconds also form an episode without hold.
    assert verify_log(SERVING, 3, 9, {"episode_length": 17}, log).episode_log == env.episode_log
    changed = [*log[:7], {**log[7], "action": {**log[7]["action"], "batch_size": 511}}, *log[8:]]
    for forged, step in ((changed, 7), (log[:16], 16), (log[:11], 11), ([*log, log[-1]], 17)):
        with pytest.raises(ForgedLogError) as refused:
            verify_log(SERVING, 3, 9, env.config_dict(), forged)
        assert refused.value.step == step


def test_answers_of_held_steps_are_no_log(server: RunningServer) -> None:
    session = server.post("/reset", {"task_id": 3, "seed": 9, "config": SHORT})["session_id"]
    answers = [server.post("/step", {"session_id": session}) for _ in range(4)]
    with pytest.raises(MalformedLogError) as refused:
        GraderModule().score(3, answers)
    assert (refused.value.step, refused.value.field) == (0, "info.seconds")
    for verify in (True, False):
        body = {"task_id": 3, "episode_log": answers, "seed": 9, "config": SHORT, "verify": verify}
        answer = server.client.post("/grader", json=body)
        assert (answer.status_code, answer.json()["detail"]["code"]) == (422, "malformed_log")


def test_a_board_takes_held_episodes(tmp_path: Path) -> None:
    """Their seconds are those of an episode in the task's own configuration."""
    env = played(1, 10_000, {"hold": 50, "reward": "grade"}, random_actions(3, 4))
    log, board = tmp_path / "held.json", tmp_path / "board.jsonl"
    log.write_text(json.dumps(saved(env)))
    assert main(["leaderboard", "add", str(board), str(log), "--agent", "holder"]) == 0
    line = json.loads(board.read_text())
    assert (line["score"], len(line["actions"])) == (env.grade()["score"], 200)
    assert main(["leaderboard", "check", str(board)]) == 0


# ---------------------------------------------------------------- servers


def test_a_server_holds_over_every_interface(server: RunningServer) -> None:
    config = {**SHORT, "reward": "grade"}
    env = InferenceEnv(task_id=3, config=config)
    env.reset(seed=3)
    begun = server.post("/reset", {"task_id": 3, "seed": 3, "config": config})
    assert begun["config"] == config
    assert begun["episode_length"] == 17
    formats = {
        "action": "natural",
        "config": {"episode_length": 17},
        "hold": 5,
        "reward": "grade",
        "observation": "full",
    }
    scalar = gymnasium.make(ig.REMOTE_ID, url=server.url, task_id=3, **formats)
    remote = gymnasium.make_vec(ig.REMOTE_ID, num_envs=1, url=server.url, task_id=3, **formats)
    local = gymnasium.make("InferenceGym/AdversarialMultiTenant-v1", **formats)
    for one in (scalar, remote, local):
        one.reset(seed=3)
    knobs = random_knobs(np.random.default_rng(8), 4).astype(np.float32)
    actions = [from_row(row) for row in snap(knobs.astype(np.float64), FREE)]
    session, rewards = begun["session_id"], []
    for number, (row, action) in enumerate(zip(knobs, actions, strict=True), 1):
        observation, reward, done, info = env.step(action)
        sent = {"session_id": session, "action": action.to_dict(), "step": number}
        answer = server.post("/step", sent)
        assert (answer["reward"], answer["done"]) == (reward, done)
        assert answer["info"] == json.loads(json.dumps(info))
        assert answer["observation"] == env.observation_dict()
        assert server.post("/step", sent) == answer
        here, paid, *_ = local.step(row)
        assert paid == reward
        for there in (scalar.step(row), tuple(x[0] for x in remote.step(row[None])[:2])):
            np.testing.assert_array_equal(there[0], here)
            assert there[1] == reward
        rewards.append(reward)
    assert observation.timestep == 17
    scalar.close()
    remote.close()
    state = server.get("/state", session_id=session)
    assert (state["step_count"], state["done"]) == (4, True)
    graded = server.post("/grader", {"session_id": session})
    assert (graded["score"], graded["steps"], graded["done"]) == (env.grade()["score"], 17, True)

    async def over_a_websocket() -> list[float]:
        async with InferenceGymEnv(base_url=server.url, **PATIENT) as client:
            await client.reset(task_id=3, seed=3, config=config)
            rewards = [(await client.step(action)).reward for action in actions[:2]]
            await client.reset(episode_id=client.episode_id, resume=True)
            await client.disconnect()
            return rewards + [(await client.step(action)).reward for action in actions[2:]]

    assert asyncio.run(over_a_websocket()) == rewards


def test_a_batch_session_holds_and_counts_steps(server: RunningServer) -> None:
    task, knobs = get_task(3), random_knobs(np.random.default_rng(7), 9, 2)
    batch = ServingBatch(task, 2, task.config(SHORT))
    batch.reset([5, 6])
    with InferenceGymBatch(server.url) as client:
        client.reset(2, 3, seed=5, config=SHORT, autoreset=True)
        answer = client.step_many(knobs[:6], float64=True)
        for k in range(4):
            batch.step(knobs[k])
            np.testing.assert_array_equal(answer.rewards[k], batch.reward)
            if k < 3:
                np.testing.assert_array_equal(answer.observations[k], batch.observation)
        assert answer.done.tolist() == [False, False, False, True, False, False]
        assert (answer.number, answer.episodes, answer.steps_left) == (1, 1, 2)
        body = {"session_id": client.session_id, "actions": knobs[6:7].tolist(), "repeat": 2, "step": 7}
        told = server.post("/step/batch", body)
        assert (told["step"], told["done"], told["steps_left"]) == (7, [False, True], 4)


def test_what_one_request_may_play_is_counted_in_seconds(server: RunningServer) -> None:
    with InferenceGymBatch(server.url) as client:
        client.reset(4096, 1, seed=1, config={"episode_length": 60, "hold": 60})
        played = client.step(np.tile([1.0, 0, 32, 0, 0], (4096, 1)))
        assert played.rewards.shape == (1, 4096)
        client.reset(2400, 1, seed=1, config={"episode_length": 200, "hold": 60})
        many = np.tile([1.0, 0, 32, 0, 0], (2, 2400, 1))
        with pytest.raises(Exception, match="seconds") as refused:
            client.step_many(many)
        assert refused.value.field == "actions"  # type: ignore[attr-defined]


def test_built_in_policies_are_not_held(server: RunningServer) -> None:
    answer = server.client.post("/play", json={"agent": "naive", "task_id": 1, "config": {"hold": 5}})
    assert (answer.status_code, answer.json()["detail"]["field"]) == (422, "config.hold")
    assert server.post("/play", {"agent": "naive", "task_id": 1, "config": {"hold": 1}})["steps"] == 200


def test_traffic_has_neither_hold_nor_another_reward(server: RunningServer) -> None:
    for config in ({"hold": 5}, {"reward": "grade"}):
        answer = server.client.post("/traffic/reset", json={"config": config})
        assert answer.status_code == 422
        assert answer.json()["detail"]["field"] == f"config.{next(iter(config))}"
