"""PPO: the Stable-Baselines3 adapter, training with its files, resuming, and policies as plain arrays."""

from __future__ import annotations

import csv
import math
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from agents.episodes import run_episodes
from agents.evaluate import evaluate, gym_scores, paired
from agents.integrations.sb3 import SB3VecEnv
from agents.policies.autoscalers import ReplicaPlan
from agents.policies.constant import ConstantAgent
from agents.policies.ppo import PolicyFile, PpoAgent, central, forward, make_ppo, shipped_policy
from agents.policies.switching_policy import ActionsAgent
from agents.ppo_demo import (
    ACTION,
    OBSERVATION,
    ConstantSearch,
    MakeEnvs,
    OnLevels,
    PpoSettings,
    ScaledRewards,
    Stage,
    demonstrate,
    export,
    imitate,
    local_envs,
    rise,
    settings_for,
    soften,
    train,
)
from agents.ppo_demo import main as demonstration
from agents.seeds import HELD_OUT_SEEDS, VALIDATION_SEEDS
from benchmarks import report
from benchmarks.learning import curves, plain_learners
from cli.main import main
from env.batch import ServingBatch
from env.gym import InferenceGymEnv
from env.vector import VectorInferenceEnv
from inferencegym.errors import DataFormatError, InvalidConfigError
from inferencegym.models import OBSERVATION_FIELDS, QuantTier, ServeAction
from inferencegym.spaces.formats import LEVELS, ObservationCodec, action_codec
from inferencegym.tasks import get_calibration, get_task, list_tasks
from tests.servers import RunningServer

QUICK = PpoSettings(
    n_envs=4, stages=(Stage(10, 0.25, 0.01), Stage(5, 0.75, 0.0)), rollout_steps=200, n_minibatches=4, n_epochs=2
)
SCRATCH = replace(QUICK, from_scratch=True)


def make_envs(task_id: int = 1) -> MakeEnvs:
    return partial(local_envs, task_id, QUICK)


def vector(task_id: int = 1, n: int = 4, length: int | None = None, action: str = ACTION) -> VectorInferenceEnv:
    return VectorInferenceEnv(
        n,
        task_id,
        config=None if length is None else {"episode_length": length},
        observation=OBSERVATION,
        action=action,
        autoreset_mode="SameStep",
    )


def test_a_training_report_that_stops_keeps_the_stored_runs_and_those_it_has_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(report.RESULTS, tmp_path / "results")
    before = report.stored("learning")["tasks"]
    like = before["1"]["runs"][0]

    def one_run(job: curves.Job) -> dict[str, Any]:
        if job.seed == 6:
            raise InvalidConfigError("stopped")
        return {**like, "seed": job.seed}

    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(curves, "FIGURES", tmp_path)
    monkeypatch.setattr(curves, "one_run", one_run)
    monkeypatch.setattr(curves, "ProcessPoolExecutor", ThreadPoolExecutor)  # a process would have to import one_run
    options = "--add --task 1 --seeds 7 --plan-seeds 0 --warm-seeds 0 --long-task none"
    monkeypatch.setattr(sys, "argv", ["curves", *options.split()])
    with pytest.raises(InvalidConfigError, match="stopped"):
        curves.main()
    after = report.stored("learning")["tasks"]
    scratch = [run for run in after["1"]["runs"] if run["kind"] == curves.SCRATCH]
    assert scratch == [*before["1"]["runs"][:5], {**like, "seed": 5}]
    assert {task: after[task] for task in after if task != "1"} == {
        task: before[task] for task in before if task != "1"
    }


def test_ppo_without_tuning_keeps_the_run_so_far_and_does_not_repeat_a_complete_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain_learners, "NAME", str(tmp_path / "runs"))
    (tmp_path / "runs.json").write_text("{}", encoding="utf-8")
    monkeypatch.setattr(plain_learners, "N_SCORES", 2)
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)  # restored after the test
    monkeypatch.setattr(sys, "argv", ["plain_learners", "--task", "1", "--steps", "2000"])
    so_far: list[int] = []

    def keep_run(*run: Any) -> None:
        kept(*run)
        so_far.append(report.stored(str(tmp_path / "runs"))["1"]["runs"][0]["steps"])

    kept = plain_learners.keep_run
    monkeypatch.setattr(plain_learners, "keep_run", keep_run)
    plain_learners.main()
    plain_learners.main()  # nothing is left to do
    assert so_far == [1000, 2000, 2048]
    [run] = report.stored(str(tmp_path / "runs"))["1"]["runs"]
    assert [step for step, _ in run["curve"]] == so_far
    assert run["curve"][-1][1] == pytest.approx(np.mean(run["scores"]))


@pytest.mark.parametrize(
    ("env_id", "more", "played"),
    [
        ("InferenceGym/AutoscaledChat-v2", {}, "InferenceGym/AutoscaledChat-v2"),
        ("InferenceGym/BurstyShareGPT-v2", {"action": "settings"}, "Settings-v0"),
    ],
)
def test_cleanrls_program_is_run_with_its_options_and_its_agent_is_scored(
    tmp_path: Path, env_id: str, more: dict[str, Any], played: str
) -> None:
    program = tmp_path / "ppo.py"
    program.write_text(
        "import sys, torch\n"
        "from pathlib import Path\n"
        "if __name__ == '__main__':\n"
        "    Path('events').touch()\n"
        "    class agent:\n"
        "        actor = staticmethod(lambda seen: torch.tensor([[0.0, 0.1, 2.0, 1.9, -1.0]] * len(seen)))\n"
        "    global_step = 7\n"
        f"    Path({str(tmp_path / 'argv')!r}).write_text(' '.join(sys.argv))\n",
        encoding="utf-8",
    )
    runs: list[dict[str, Any]] = []
    before = list(sys.argv), Path.cwd()
    plain_learners.run_cleanrl(program, ["--num-steps", "9"], env_id, 4, 3, 1000, runs.append, **more)
    assert (list(sys.argv), Path.cwd()) == before
    assert not Path("events").exists()
    assert (tmp_path / "argv").read_text(encoding="utf-8") == (
        f"{program} --env-id {played} --num-envs 4 --seed 3 --total-timesteps 1000 --no-cuda --num-steps 9"
    )
    assert gymnasium.spec(played).kwargs == {**gymnasium.spec(env_id).kwargs, **more}
    three = gym_scores(env_id, lambda seen: np.full(len(seen), 2), **more)  # the likeliest of the logits
    assert runs[0]["scores"] == three.tolist()
    assert runs[0]["curve"] == [(7, pytest.approx(three.mean()))]
    with pytest.raises(InvalidConfigError, match="sha256 d8dfbb7a"):
        plain_learners.checked(program)


@pytest.mark.slow
def test_rllib_learns_with_its_own_defaults_and_its_likeliest_actions_are_scored() -> None:
    runs: list[dict[str, Any]] = []
    plain_learners.train_rllib("InferenceGym/StaticUniform-v2", 4, 3, 4000, runs.append)
    assert [run["steps"] for run in runs] == [4000]
    assert len(runs[0]["scores"]) == len(HELD_OUT_SEEDS)
    assert runs[0]["curve"] == [(4000, pytest.approx(np.mean(runs[0]["scores"])))]


def test_the_adapter_tells_the_grade_of_every_ended_episode() -> None:
    envs = SB3VecEnv(vector(3, n=2, length=5))
    alone = InferenceGymEnv(3, config={"episode_length": 5}, observation=OBSERVATION, action=ACTION)
    envs.seed_rows([7, 8])
    envs.reset()
    rng = np.random.default_rng(0)
    played = rng.integers(0, 2, (5, 2, 5))
    for actions in played:
        *_, infos = envs.step(actions)
    for row, seed in enumerate((7, 8)):
        alone.reset(seed=seed)
        for actions in played:
            *_, last = alone.step(actions[row])
        told = {name: infos[row][name] for name in ("score", "breakdown", "feedback")}
        assert told == {name: last[name] for name in told}


def test_the_demonstration_trains_and_scores_beside_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demonstration(["--task", "1", "--steps", "6400", "--out", str(tmp_path / "demo")])
    lines = capsys.readouterr().out.splitlines()[-4:]
    own = f"ppo:{tmp_path / 'demo' / 'policy.npz'}"
    assert {line.split("  ")[-1] for line in lines} == {own, "naive", "vllm_defaults", "heuristic"}
    score = evaluate(own, get_task(1)).scores.mean()
    assert next(line for line in lines if line.endswith(own)).startswith(f"{score:.3f} [")


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
    quiet = {"seed": 1, "settings": SCRATCH, "progress": False}
    first = train(make_envs(), tmp_path, steps=800, score_every=400, **quiet)
    assert first.model.num_timesteps == 800
    files = ("policy.npz", "model.zip", "curve.png", "settings.json", "episodes.csv", "scores.csv", "tensorboard/PPO_0")
    for name in files:
        assert (tmp_path / name).exists(), name
    checkpoints = tmp_path / "checkpoints"
    assert {path.name for path in checkpoints.iterdir()} == {f"ppo_{n}_steps.zip" for n in (0, 200, 600, 800)}
    (checkpoints / "ppo_800_steps.zip").unlink()
    second = train(make_envs(), tmp_path, steps=1_200, resume=True, **quiet)
    assert second.model.num_timesteps == 1_200
    with (tmp_path / "episodes.csv").open(newline="") as lines:
        steps = [int(row["step"]) for row in csv.DictReader(lines)]
    # Four episodes end together, of 20 decisions held for 10 s in the first quarter of a run and of 40 held for 5 s in
    # the rest. Steps after the checkpoint at 600 were played again.
    assert steps == [80] * 4 + [160] * 4 + [360] * 4 + [520] * 4 + [760] * 4 + [920] * 4 + [1_080] * 4
    assert [step for step, _ in second.episodes] == steps
    assert second.scores[-1].step == 1_200


def test_the_policy_that_is_kept_is_the_best_on_the_validation_seeds(tmp_path: Path) -> None:
    trained = train(make_envs(), tmp_path, steps=800, settings=SCRATCH, progress=False, score_every=200)
    best = max(trained.scores, key=lambda scored: scored.validation)
    kept = PolicyFile.load(tmp_path / "policy.npz")
    assert kept.trained["steps"] == best.step
    assert evaluate(PpoAgent(kept, get_task(1)), get_task(1), VALIDATION_SEEDS, "ppo").scores.mean() == best.validation
    assert evaluate(PpoAgent(kept, get_task(1)), get_task(1), HELD_OUT_SEEDS, "ppo").scores.mean() == best.held_out


def test_a_longer_run_goes_on_from_where_the_schedule_ends_and_keeps_what_was_best(tmp_path: Path) -> None:
    settings = replace(SCRATCH, schedule_steps=400)
    short, long = (
        train(make_envs(), tmp_path / str(n), steps=n, seed=2, settings=settings, progress=False, score_every=200)
        for n in (400, 800)
    )
    assert long.episodes[: len(short.episodes)] == short.episodes
    assert long.scores[:3] == short.scores[:3]
    assert long.policy.trained["validation_score"] >= max(scored.validation for scored in short.scores[:3])
    assert long.model.learning_rate(0.5) == pytest.approx(settings.final_learning_rate)
    assert long.scores[-1].step == 800


def test_resuming_where_nothing_was_trained_says_so(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigError, match="checkpoints"):
        train(make_envs(), tmp_path, steps=100, settings=QUICK, progress=False, resume=True)


def test_training_twice_with_one_seed_gives_the_same_policy(tmp_path: Path) -> None:
    one, two = (
        train(make_envs(), tmp_path / name, steps=400, seed=3, settings=SCRATCH, progress=False) for name in ("a", "b")
    )
    for (w, b), (v, c) in zip(one.policy.layers, two.policy.layers, strict=True):
        np.testing.assert_array_equal(w, v)
        np.testing.assert_array_equal(b, c)
    assert one.episodes == two.episodes


def test_the_exported_policy_plays_what_the_trained_model_plays(tmp_path: Path) -> None:
    trained = train(make_envs(3), tmp_path, steps=800, settings=SCRATCH, progress=False)
    policy = export(trained.model, {}, hold=1)
    task = get_task(3)
    batch = ServingBatch(task, 6)
    batch.reset(range(6))
    rng = np.random.default_rng(0)
    for _ in range(20):
        batch.step(rng.uniform(0.1, 60.0, (6, 5)))
    agent = PpoAgent(policy, task)
    agent.reset(6)
    codec = ObservationCodec(task, task.config(), get_calibration(3), OBSERVATION)
    seen = codec.encode(batch.full_observation())
    with torch.no_grad():
        parts = trained.model.policy.get_distribution(torch.as_tensor(seen)).distribution
    wanted = [central(part.logits.double().numpy(), knob) for part, knob in zip(parts, LEVELS, strict=True)]
    knobs = action_codec(ACTION).decode(np.stack(wanted, axis=1))
    np.testing.assert_array_equal(agent.act(batch.full_observation()), knobs)


def test_a_policy_keeps_its_knobs_for_as_long_as_it_was_taught_to() -> None:
    task = get_task(3)
    # The KV budget's level follows the second, so decisions differ.
    sizes = [len(levels) for levels in LEVELS.values()]
    weights, bias = np.zeros((24, sum(sizes))), np.zeros(sum(sizes))
    timestep = list(OBSERVATION_FIELDS).index("timestep")
    weights[timestep, : sizes[0]] = 1e4 * np.arange(sizes[0])
    bias[: sizes[0]] = -1e4 * 0.5 * (np.arange(sizes[0]) / sizes[0]) ** 2 * sizes[0]
    agent = PpoAgent(PolicyFile([(weights, bias)], "full", ACTION, hold=5), task)
    played = run_episodes(task, agent, [1, 2]).actions[..., 0]
    for t in range(0, 200, 5):
        assert (played[t : t + 5] == played[t]).all()
    assert len(np.unique(played[:, 0])) > 10


def test_a_policy_of_another_observation_or_library_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigError, match=r"reads 33 numbers and task autoscale-mix gives 32 .*another task"):
        PpoAgent(PolicyFile.load(shipped_policy(get_task("autoscale"))), get_task("autoscale-mix"))
    pytest.importorskip("stable_baselines3").PPO("MlpPolicy", InferenceGymEnv(1), device="cpu").save(
        tmp_path / "ppo.zip"
    )
    with pytest.raises(DataFormatError, match="gym_scores"):
        PolicyFile.load(tmp_path / "ppo.zip")


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
    agent = PpoAgent(policy, task)
    agent.reset(2)
    knobs = agent.act(ServingBatch(task, 2).reset([1, 2]))
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
    model = train(make_envs(3), tmp_path, steps=200, settings=SCRATCH, progress=False).model
    knobs = np.array([[0.5, 4.0, 64.0, 1.0, 2.0]])
    demonstrations = demonstrate(task, task.config({"episode_length": 20}), [1, 2], ActionsAgent(knobs, 2))
    imitate(model, replace(demonstrations, rewards=0.1 * demonstrations.rewards), PpoSettings(passes=400))
    seen = torch.as_tensor(demonstrations.observations[5])
    with torch.no_grad():
        parts = model.policy.get_distribution(seen).distribution
    assert [int(part.probs.argmax(dim=1)[0]) for part in parts] == action_codec(ACTION).encode(knobs)[0].tolist()
    assert all(0.9 < float(part.probs.max()) < 0.99 for part in parts)


def test_rewards_of_tasks_that_scale_are_compressed_below_a_bound_and_kept_above() -> None:
    raw, inner = (
        VectorInferenceEnv(2, "autoscale", reward="grade", action="natural", autoreset_mode="SameStep") for _ in "ab"
    )
    scaled = ScaledRewards(inner, 0.1, compressed_below=0.5)
    raw.reset(seed=[1, 2])
    scaled.seed_rows([1, 2])
    scaled.reset()
    # One replica with a single slot is overloaded; six with many slots are not.
    actions = np.array([[0.5, 0, 1, 0, 0, 1], [0.9, 0, 256, 0, 0, 6]])
    learned, paid = [], []
    for _ in range(300):
        learned.append(scaled.step(actions)[1])
        paid.append(raw.step(actions)[1])
    assert np.min(paid) < -50.0
    for got, reward in zip(np.ravel(learned).tolist(), np.ravel(paid).tolist(), strict=True):
        expected = reward if reward >= -0.5 else -0.5 * (1.0 + math.log(-reward / 0.5))
        assert got == pytest.approx(0.1 * expected, rel=1e-5)


def test_training_on_a_task_that_scales_gives_a_policy_with_six_knobs(tmp_path: Path) -> None:
    task = get_task("autoscale")
    settings = settings_for(task, n_envs=4, rollout_steps=200, from_scratch=True)
    trained = train(partial(local_envs, task.task_id, settings), tmp_path, steps=400, settings=settings, progress=False)
    agent = make_ppo(task, str(tmp_path / "policy.npz"))
    agent.reset(3)
    knobs = agent.act(np.ones((3, 24)))
    assert knobs.shape == (3, 6)
    planned = ReplicaPlan.of(task).plan.row()
    np.testing.assert_array_equal(knobs[:, 1:5], np.tile(planned[1:], (3, 1)))
    assert planned[0] - 0.05 < knobs[0, 0] <= planned[0]  # the next lower level: a larger pool would not fit
    assert 1.0 <= knobs[:, 5].min() <= knobs[:, 5].max() <= 6.0
    assert trained.scores[-1].validation >= 0.0


def test_softening_mixes_the_network_with_a_random_one(tmp_path: Path) -> None:
    one, other = (
        train(make_envs(), tmp_path / name, steps=200, seed=seed, settings=SCRATCH, progress=False).model
        for seed, name in enumerate("ab")
    )
    before = {name: weights.clone() for name, weights in one.policy.state_dict().items()}
    soften(one, other, 0.3)
    for name, weights in one.policy.state_dict().items():
        torch.testing.assert_close(weights, 0.3 * before[name] + 0.7 * other.policy.state_dict()[name])
    assert any(not torch.equal(before[name], weights) for name, weights in one.policy.state_dict().items())


def test_a_pretrained_policy_is_scored_before_it_learns_and_what_learning_spoils_is_not_kept(tmp_path: Path) -> None:
    settings = replace(QUICK, passes=400, learning_rate=1.0, final_learning_rate=1.0)  # learns nothing sensible
    trained = train(make_envs(), tmp_path, steps=6_000, settings=settings, progress=False, score_every=3_000)
    start = trained.scores[0]
    assert 0 < start.step <= settings.start_share * 6_000
    assert trained.policy.trained["steps"] == start.step
    assert start.validation > 0.9
    assert min(scored.validation for scored in trained.scores) < start.validation - 0.1


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
        options = ["--steps", "6400", "--envs", "16", "--out", str(out), "--quiet"]
        assert main(["train", "--task", "1", *options, *more]) == 0
    assert "ppo:" in capsys.readouterr().out
    # Same seeds, same numbers: a server changes only the time it takes.
    assert (tmp_path / "local" / "episodes.csv").read_text() == (tmp_path / "remote" / "episodes.csv").read_text()
    for policy in (tmp_path / "local", tmp_path / "local" / "policy.npz"):
        assert main(["evaluate", "--task", "1", "--agent", f"ppo:{policy}", "--seeds", "2"]) == 0
    before = (tmp_path / "local" / "policy.npz").read_bytes()
    again = ["train", "--task", "1", "--seed", "1", "--steps", "6400", "--envs", "16", "--out", str(tmp_path / "local")]
    assert main([*again, "--quiet"]) == 2
    assert "holds a run already: continue it with --resume" in capsys.readouterr().err
    assert (tmp_path / "local" / "policy.npz").read_bytes() == before
    assert main([*again, "--quiet", "--force"]) == 0
    assert (tmp_path / "local" / "policy.npz").read_bytes() != before


def test_the_command_refuses_what_cannot_be_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--task", "rollout-mix", "--out", str(tmp_path)]) == 2
    refused = capsys.readouterr().err
    assert "rollout-mix is a task of the environment rollouts" in refused
    assert "InferenceGym/RolloutMix-v1" in refused
    assert "fleet-mix" not in refused
    for n_envs, least in (("64", "6400"), ("10000", "10000")):
        options = ["--task", "1", "--envs", n_envs, "--out", str(tmp_path / "short")]
        assert main(["train", *options, "--steps", str(int(least) - 1)]) == 2
        assert f"must be at least {least}, after which PPO" in capsys.readouterr().err
    assert main(["train", "--task", "nothing", "--out", str(tmp_path)]) == 2
    assert main(["train", "--envs", "0", "--out", str(tmp_path)]) == 2
    assert "--envs=0 is not allowed: it must be at least 1" in capsys.readouterr().err


@pytest.mark.slow
def test_learning_from_scratch_beats_the_heuristic_on_the_hard_task(tmp_path: Path) -> None:
    task, settings = get_task(3), PpoSettings(from_scratch=True)
    trained = train(
        partial(local_envs, 3, settings), tmp_path, steps=300_000, seed=1, settings=settings, progress=False
    )
    assert rise(trained.episodes)["p_value"] < 0.01
    learned = evaluate(PpoAgent(trained.policy, task), task, HELD_OUT_SEEDS, "ppo")
    assert paired(learned.scores, evaluate("heuristic", task).scores).low > 0.0


# ---------------------------------------------------------------- what ships


def test_shipped_policies_load_without_torch() -> None:
    code = (
        "import sys; from agents.policies.ppo import make_ppo; from inferencegym.tasks import list_tasks; "
        "[make_ppo(task) for task in list_tasks()]; "
        "assert not {'torch', 'stable_baselines3', 'gymnasium'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


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
