"""PPO: the Stable-Baselines3 adapter, training with its files, resuming, and policies as plain arrays."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from agents.episodes import run_episodes
from agents.integrations.sb3 import SB3VecEnv
from agents.policies.constant import ConstantAgent
from agents.policies.ppo import PolicyFile, PpoAgent, central, forward, make_ppo, shipped_policy
from agents.policies.switching_policy import ActionsAgent
from agents.ppo_demo import (
    ACTION,
    OBSERVATION,
    ConstantSearch,
    OnLevels,
    PpoSettings,
    demonstrate,
    imitate,
    rise,
    train,
)
from agents.registry import make_agent
from env.batch import ServingBatch
from env.vector_env import VectorInferenceEnv
from inferencegym.cli.main import main
from inferencegym.errors import DataFormatError, InvalidConfigError
from inferencegym.models import QuantTier, ServeAction
from inferencegym.spaces.formats import LEVELS, ObservationCodec, action_codec
from inferencegym.tasks import get_calibration, get_task, list_tasks
from tests.servers import RunningServer

QUICK = PpoSettings(n_envs=4, n_steps=50, batch_size=50, n_epochs=2)


def vector(task_id: int = 1, n: int = 4, length: int | None = None, action: str = ACTION) -> VectorInferenceEnv:
    return VectorInferenceEnv(
        n,
        task_id,
        config=None if length is None else {"episode_length": length},
        observation=OBSERVATION,
        action=action,
        autoreset_mode="SameStep",
    )


def test_the_adapter_gives_what_the_vector_environment_gives() -> None:
    envs, plain = SB3VecEnv(vector(3, length=5, action="box")), vector(3, length=5, action="box")
    envs.seed(7)
    np.testing.assert_array_equal(envs.reset(), plain.reset(seed=7)[0])
    rng = np.random.default_rng(0)
    total = np.zeros(4)
    for k in range(10):
        actions = rng.uniform(-1, 1, (4, 5)).astype(np.float32)
        seen, reward, done, infos = envs.step(actions)
        expected, rewards, ended, _, info = plain.step(actions)
        total += rewards
        np.testing.assert_array_equal(seen, expected)
        np.testing.assert_allclose(reward, rewards, rtol=1e-6)
        assert done.tolist() == ended.tolist() == [k in (4, 9)] * 4
        if k in (4, 9):
            np.testing.assert_array_equal(infos[2]["terminal_observation"], info["final_obs"][2])
            assert infos[2]["episode"] == {"r": pytest.approx(total[2]), "l": 5}
            assert infos[2]["TimeLimit.truncated"] is False
            total[:] = 0.0


def test_the_adapter_refuses_a_mode_that_stable_baselines_cannot_use() -> None:
    with pytest.raises(InvalidConfigError) as refused:
        SB3VecEnv(VectorInferenceEnv(2, 1))
    assert refused.value.field == "autoreset_mode"


def test_training_leaves_its_files_and_resuming_goes_on_from_the_newest_checkpoint(tmp_path: Path) -> None:
    first = train(vector(), tmp_path, steps=1_600, seed=1, settings=QUICK, progress=False, checkpoint_every=800)
    assert first.model.num_timesteps == 1_600
    for name in ("policy.npz", "model.zip", "curve.png", "settings.json", "episodes.csv", "tensorboard/PPO_0"):
        assert (tmp_path / name).exists(), name
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["ppo_1600_steps.zip", "ppo_800_steps.zip"]
    (tmp_path / "checkpoints" / "ppo_1600_steps.zip").unlink()
    second = train(vector(), tmp_path, steps=2_400, seed=1, settings=QUICK, progress=False, resume=True)
    assert second.model.num_timesteps == 2_400
    with (tmp_path / "episodes.csv").open(newline="") as lines:
        steps = [int(row["step"]) for row in csv.DictReader(lines)]
    # Four episodes of 200 steps end together; those after the checkpoint at 800 were played again.
    assert steps == [800] * 4 + [1_600] * 4 + [2_400] * 4
    assert [step for step, _ in second.episodes] == steps
    assert not (tmp_path / "tensorboard" / "PPO_1").exists()


def test_resuming_where_nothing_was_trained_says_so(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigError, match="checkpoints"):
        train(vector(), tmp_path, steps=100, settings=QUICK, progress=False, resume=True)


def test_training_twice_with_one_seed_gives_the_same_policy(tmp_path: Path) -> None:
    one, two = (
        train(vector(), tmp_path / name, steps=400, seed=3, settings=QUICK, progress=False) for name in ("a", "b")
    )
    for (w, b), (v, c) in zip(one.policy.layers, two.policy.layers, strict=True):
        np.testing.assert_array_equal(w, v)
        np.testing.assert_array_equal(b, c)
    assert one.episodes == two.episodes


def test_the_exported_policy_plays_what_the_trained_model_plays(tmp_path: Path) -> None:
    trained = train(vector(3), tmp_path, steps=800, settings=QUICK, progress=False)
    task = get_task(3)
    batch = ServingBatch(task, 6)
    batch.reset(range(6))
    rng = np.random.default_rng(0)
    for _ in range(20):
        batch.step(rng.uniform(0.1, 60.0, (6, 5)))
    agent = PpoAgent(PolicyFile.load(tmp_path / "policy.npz"), task)
    codec = ObservationCodec(task, task.config(), get_calibration(3), OBSERVATION)
    seen = codec.encode(batch.observation)
    with torch.no_grad():
        parts = trained.model.policy.get_distribution(torch.as_tensor(seen)).distribution
    wanted = [central(part.logits.double().numpy(), knob) for part, knob in zip(parts, LEVELS, strict=True)]
    np.testing.assert_array_equal(agent.act(batch.observation), action_codec(ACTION).decode(np.stack(wanted, axis=1)))


def test_a_row_gets_the_same_knobs_alone_and_in_any_batch() -> None:
    rng = np.random.default_rng(1)
    layers = [(rng.normal(size=(14, 64)), rng.normal(size=64)), (rng.normal(size=(64, 5)), rng.normal(size=5))]
    x = rng.normal(size=(257, 14))
    together = forward(layers, x)
    for row in (0, 100, 256):
        np.testing.assert_array_equal(together[row], forward(layers, x[row : row + 1])[0])
    np.testing.assert_allclose(together, np.tanh(x @ layers[0][0] + layers[0][1]) @ layers[1][0] + layers[1][1])


def test_amounts_take_the_median_level_and_kinds_the_likeliest() -> None:
    logits = np.log(np.array([[0.1, 0.15, 0.2, 0.15, 0.4], [0.6, 0.1, 0.1, 0.1, 0.1]]))
    assert central(logits, "batch_size").tolist() == [3, 0]
    assert central(logits, "kv_budget").tolist() == [3, 0]
    assert central(logits, "spec_length").tolist() == [4, 0]


def test_a_box_policy_is_cut_to_the_box() -> None:
    policy = PolicyFile([(np.zeros((14, 5)), np.array([9.0, -9.0, 0.0, 9.0, 9.0]))], "normalised", "box")
    task = get_task(3)
    knobs = PpoAgent(policy, task).act(ServingBatch(task, 2).reset([1, 2]))
    np.testing.assert_allclose(knobs, [[1.0, 0.0, 512**0.5, 1.0, 2.0]] * 2)


def test_the_search_for_a_constant_finds_what_batches_and_counts_its_steps() -> None:
    task = get_task(1)
    search = ConstantSearch(task, task.config(), n=8, seed=0)
    assert search.steps == 24 * 100 + 16 * 200
    assert run_episodes(task, ActionsAgent(search.best(), 2), [3_000, 3_001]).scores().min() > 0.6


def test_a_teacher_is_imitated_in_the_levels_that_the_policy_can_choose() -> None:
    task = get_task(1)
    agent = OnLevels(ConstantAgent(ServeAction(0.974, 8, 500, True, QuantTier.INT4)), task)
    agent.reset(1)
    # Knobs that the task does not offer take its forced values; 0.974 and 500 the nearest levels.
    np.testing.assert_allclose(agent.act(np.zeros((1, 14))), [[0.95, 0.0, 512.0, 0.0, 0.0]])


def test_pretraining_fits_the_policy_to_demonstrations_and_leaves_room_for_other_levels(tmp_path: Path) -> None:
    task = get_task(3)
    model = train(vector(3), tmp_path, steps=200, settings=QUICK, progress=False).model
    knobs = np.array([[0.5, 4.0, 64.0, 1.0, 2.0]])
    demonstrations = demonstrate(task, task.config({"episode_length": 20}), [1, 2], ActionsAgent(knobs, 2))
    imitate(model, demonstrations, PpoSettings(passes=400), reward_scale=0.1)
    seen = torch.as_tensor(demonstrations.observations[5])
    with torch.no_grad():
        parts = model.policy.get_distribution(seen).distribution
    assert [int(part.probs.argmax(dim=1)[0]) for part in parts] == action_codec(ACTION).encode(knobs)[0].tolist()
    assert all(0.9 < float(part.probs.max()) < 0.99 for part in parts)


def test_files_that_are_not_policies_are_named(tmp_path: Path) -> None:
    (tmp_path / "text.npz").write_text("hello")
    np.savez(tmp_path / "other.npz", a=np.zeros(3))
    np.savez(tmp_path / "future.npz", header=np.array('{"version": 99}'))
    for name, named in (("text", "text.npz"), ("other", "other.npz"), ("future", "99"), ("nothing", "nothing.npz")):
        with pytest.raises(DataFormatError, match=named):
            PolicyFile.load(tmp_path / f"{name}.npz")


def test_the_rise_is_tested_on_the_first_and_the_last_steps() -> None:
    episodes = [(200 * k, float(k)) for k in range(1, 101)]
    test = rise(episodes)
    assert (test["first_mean"], test["last_mean"]) == (13.0, 88.0)
    assert test["p_value"] < 1e-9
    flat = [(200 * k, float(k % 2)) for k in range(1, 101)]
    assert rise(flat)["p_value"] > 0.3
    with pytest.raises(InvalidConfigError):
        rise([(200, 1.0)])


def test_the_command_trains_in_process_and_against_a_server(
    server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, more in (("local", []), ("remote", ["--url", server.url])):
        out = tmp_path / name
        assert main(["train", "--task", "1", "--steps", "400", "--envs", "2", "--out", str(out), "--quiet", *more]) == 0
    assert "ppo:" in capsys.readouterr().out
    # The same seeds and the same numbers: a server changes nothing but the time it takes.
    assert (tmp_path / "local" / "episodes.csv").read_text() == (tmp_path / "remote" / "episodes.csv").read_text()


def test_the_command_refuses_what_cannot_be_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--task", "nothing", "--out", str(tmp_path)]) == 2
    assert main(["train", "--steps", "0", "--out", str(tmp_path)]) == 2
    assert "--steps" in capsys.readouterr().err


@pytest.mark.slow
def test_fifty_thousand_steps_beat_the_heuristic_on_the_hard_task(tmp_path: Path) -> None:
    task = get_task(3)
    trained = train(vector(3, 16), tmp_path, steps=50_000, seed=1, progress=False)
    assert rise(trained.episodes)["p_value"] < 0.01
    seeds = range(3_000, 3_010)
    learned = run_episodes(task, PpoAgent(trained.policy, task), seeds).scores()
    heuristic = run_episodes(task, make_agent("heuristic", task), seeds).scores()
    assert learned.mean() > max(0.65, heuristic.mean())


# ---------------------------------------------------------------- what ships


def test_shipped_policies_load_without_torch() -> None:
    code = (
        "import sys; from agents.policies.ppo import make_ppo; from inferencegym.tasks import list_tasks; "
        "[make_ppo(task) for task in list_tasks()]; "
        "assert not {'torch', 'stable_baselines3', 'gymnasium'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])


@pytest.mark.parametrize("task_id", [task.task_id for task in list_tasks()])
def test_shipped_policies_beat_the_naive_agent(task_id: int) -> None:
    task = get_task(task_id)
    seeds = [3_000, 3_001, 3_002]
    assert task.expected_baseline is not None
    assert run_episodes(task, make_ppo(task), seeds).scores().min() > task.expected_baseline[1]


def test_a_task_without_a_shipped_policy_says_how_to_train_one() -> None:
    recorded = next(task for task in list_tasks(include_recorded=True) if task.recorded)
    with pytest.raises(InvalidConfigError, match="inferencegym train --task"):
        shipped_policy(recorded)
