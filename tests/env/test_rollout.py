"""Rollouts and evaluations, in process and on Ray with two workers of this machine."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from agents.evaluate import evaluate
from agents.integrations.ray_workers import Fragment, Job, RolloutWorker, Workers, evaluate_jobs
from cli.main import main
from env.vector import VectorInferenceEnv
from inferencegym.errors import InvalidConfigError
from inferencegym.seeds import episode_seed
from inferencegym.tasks import get_task

ROOT = Path(__file__).resolve().parents[2]


def test_a_fragment_holds_at_least_the_steps_asked_for_and_goes_on_where_the_last_ended() -> None:
    worker = RolloutWorker(1, "naive", n_rows=8)
    first, second = worker.rollout(1_000), worker.rollout(1_000)
    assert first.steps == 1_000
    assert first.observation.shape == (125, 8, 14)
    np.testing.assert_array_equal(first.last_observation, second.observation[0])
    assert [int(f.ended.sum()) for f in (first, second)] == [0, 8]


def test_a_fragment_is_what_the_vector_environment_plays() -> None:
    fragment = RolloutWorker(3, "naive", n_rows=2, seed=4, index=1).rollout(250)
    seeds = [episode_seed(episode_seed(4, 2), row) for row in (1, 2)]
    assert fragment.seeds.tolist() == seeds
    envs = VectorInferenceEnv(2, 3, action="natural", autoreset_mode="SameStep")
    seen, _ = envs.reset(seed=seeds)
    for t in range(125):
        np.testing.assert_array_equal(fragment.observation[t], seen)
        seen, reward, ended, _, _ = envs.step(fragment.knobs[t])
        np.testing.assert_array_equal(fragment.reward[t], reward.astype(np.float32))
        np.testing.assert_array_equal(fragment.ended[t], ended)


def test_workers_meet_different_traffic() -> None:
    seeds = [RolloutWorker(1, "naive", n_rows=4, seed=0, index=i).rollout(4).seeds for i in range(2)]
    assert not set(seeds[0].tolist()) & set(seeds[1].tolist())


def test_jobs_in_process_are_evaluations() -> None:
    jobs = [Job(1, "naive", (10_000, 10_001)), Job(3, "random:3", (10_000, 10_001))]
    for job, result in zip(jobs, evaluate_jobs(jobs), strict=True):
        np.testing.assert_array_equal(result.scores, evaluate(job.agent, get_task(job.task_id), job.seeds).scores)


def test_the_sweep_command_prints_a_line_for_each_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "sweep.json"
    arguments = ["--task", "1", "--agent", "naive", "--agent", "random", "--seeds", "3", "--out", str(out)]
    assert main(["sweep", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[1:3]] == ["naive", "random"]
    assert '"scores"' in out.read_text()


def test_more_workers_without_ray_are_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidConfigError) as refused:
        Workers(0)
    assert refused.value.field == "n_workers"
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InvalidConfigError, match="extra 'ray'"):
        evaluate_jobs([Job(1, "naive", (1, 2))], n_workers=2)


def test_the_benchmark_of_ray_leaves_itself_out_without_ray() -> None:
    code = (
        "import runpy, sys; sys.modules['ray'] = None; "
        "sys.argv = ['ray_workers.py']; "
        "runpy.run_module('benchmarks.speed.ray_workers', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "Ray is not installed, nothing is measured: run `make dev`" in done.stdout


@pytest.mark.slow
def test_ray_changes_nothing_but_who_plays() -> None:
    jobs = [Job(1, "naive", (1, 2)), Job(2, "random", (1, 2)), Job(3, "naive", (3, 4))]
    alone = evaluate_jobs(jobs)
    with Workers(2) as workers:
        for one, other in zip(alone, workers.evaluate(jobs), strict=True):
            np.testing.assert_array_equal(one.scores, other.scores)
        got: list[tuple[int, Fragment]] = list(workers.fragments(1, "naive", 5, n_rows=8, min_steps=1_000))
    assert len(got) == 5
    assert all(fragment.steps == 1_000 for _, fragment in got)
    mine = [RolloutWorker(1, "naive", n_rows=8, index=i) for i in range(2)]
    for index, fragment in got:
        np.testing.assert_array_equal(fragment.reward, mine[index].rollout(1_000).reward)


@pytest.mark.slow
def test_rllib_is_given_the_environment_for_learners() -> None:
    from agents.integrations.rllib import rllib_config

    config = rllib_config(3, hold=40)
    env: Any = gymnasium.make(config.env, **config.env_config)
    assert env.observation_space.shape == (24,)
    assert env.action_space == gymnasium.spaces.MultiDiscrete([19, 5, 26, 2, 3])
    env.reset(seed=1)
    assert [env.step(env.action_space.sample())[2] for _ in range(5)] == [False, False, False, False, True]


@pytest.mark.slow
def test_rllib_trains_on_the_registered_environment() -> None:
    command = [sys.executable, "-m", "agents.integrations.rllib", "--task", "1", "--iterations", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = re.search(r"iteration 1: mean return (\S+)", done.stderr)
    assert found is not None, done.stderr
    # The return is a sum of ten rewards, each from -1 to 1. NaN fails this comparison too.
    assert -10.0 < float(found[1]) < 10.0
