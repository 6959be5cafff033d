"""Agents, the solver, calibration and evaluation: the machinery, on small searches."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from numpy.typing import NDArray

from agents.baseline import BASELINE_ACTION, BASELINES, run_all_baselines, run_baseline
from agents.episodes import run_episodes
from agents.evaluate import agents_for, compare, evaluate, interval, paired, ranks, spearman
from agents.policies.constant import NaiveAgent
from agents.policies.stored import policy_path
from agents.policies.switching_policy import FEATURES, ActionsAgent, ModeAgent, ModeParams, features
from agents.registry import AGENTS, make_agent
from agents.search.ablation import ablate
from agents.search.calibration import CalibrationFiles, Solved, calibrate, measure_price
from agents.search.random_search import SEEDS, STEPS
from agents.search.reward_grade_agreement import random_settings
from agents.search.solver import (
    COARSE,
    Budget,
    Solver,
    constant_policies,
    constant_policy,
    neighbours,
    threshold_gate,
    throughput,
    window_gate,
)
from agents.seeds import CALIBRATION_SEEDS, HELD_OUT_SEEDS, TRAINING_SEEDS, VALIDATION_SEEDS, held_out_seeds
from cli.main import main
from env.inference_env import InferenceEnv
from grader.grader import GraderModule
from inferencegym.errors import DataFormatError, InvalidActionError, InvalidConfigError
from inferencegym.models import OBSERVATION_FIELDS, QuantTier, ServeAction
from inferencegym.tasks import UNCALIBRATED, get_calibration, get_task, list_tasks
from tests.desk import Desk

TINY = Budget(
    finalists=2,
    reference_seeds=(1,),
    grid={k: v[::2] for k, v in COARSE.items()},
    coarse={
        "kv_budget": (0.3, 0.9),
        "spec_length": (0, 1),
        "batch_size": (32, 256),
        "prefill_disagg": (0, 1),
        "quant_tier": (0, 1),
    },
    stages=(
        {"kv_budget": (0.5,), "spec_length": (0,), "batch_size": (16, 448), "prefill_disagg": (0,), "quant_tier": (1,)},
        {"kv_budget": (0.9,), "spec_length": (0,), "batch_size": (448,), "prefill_disagg": (0, 1), "quant_tier": (1,)},
    ),
    seeds=TRAINING_SEEDS[:2],
    quick_seeds=TRAINING_SEEDS[:1],
    validation=VALIDATION_SEEDS[:2],
    gates_kept=1,
    population=16,
    generations=2,
)

TASK_IDS = [task.task_id for task in list_tasks()]
AUTOSCALERS = ("hpa", "kpa", "scheduled", "planner")  # tests/agents/test_autoscalers.py plays them
AGENT_NAMES = [name for name in AGENTS if name not in ("constant", "ppo", *AUTOSCALERS)] + [
    'constant:{"batch_size": 200, "kv_budget": 0.8}'
]


# ---------------------------------------------------------------- agents


@pytest.mark.parametrize("task_id", TASK_IDS)
@pytest.mark.parametrize("name", AGENT_NAMES)
def test_a_row_plays_the_same_whatever_the_batch(name: str, task_id: int) -> None:
    task = get_task(task_id)
    together = run_episodes(task, make_agent(name, task), [11, 12, 13], config=task.config({"episode_length": 90}))
    alone = run_episodes(task, make_agent(name, task), [11], config=task.config({"episode_length": 90}))
    assert_array_equal(together.actions[:, 0], alone.actions[:, 0])
    assert together.returns[0] == alone.returns[0]


@pytest.mark.parametrize("name", AGENT_NAMES)
def test_an_agent_plays_a_second_episode_like_the_first(name: str) -> None:
    task = get_task(3)
    agent = make_agent(name, task)
    first = run_episodes(task, agent, [5, 6])
    assert_array_equal(run_episodes(task, agent, [5, 6]).actions, first.actions)


@pytest.mark.parametrize("task_id", TASK_IDS)
def test_batched_scores_equal_those_of_the_graded_episode_log(task_id: int) -> None:
    task = get_task(task_id)
    played = run_episodes(task, make_agent("random", task), [7])
    env = InferenceEnv(task_id=task_id, seed=7)
    env.reset()
    for kv, spec, batch, disagg, tier in played.actions[:, 0].tolist():
        env.step(
            {
                "kv_budget": kv,
                "spec_length": int(spec),
                "batch_size": int(batch),
                "prefill_disagg": bool(disagg),
                "quant_tier": int(tier),
            }
        )
    grade = GraderModule().score(task_id, env.episode_log)
    assert_allclose(played.scores()[0], grade["score"], rtol=1e-12)
    assert_allclose(played.returns[0], sum(step["reward"] for step in env.episode_log), rtol=1e-12)
    assert {k: float(v[0]) for k, v in played.breakdown().items()} == pytest.approx(grade["breakdown"], rel=1e-12)


def test_rows_on_several_threads_equal_rows_on_one() -> None:
    task = get_task(3)
    actions = np.array([[0.3 + 0.05 * i, 1, 64, 0, 1] for i in range(8)])
    many = run_episodes(
        task, ActionsAgent(actions, 80), range(80), n_rows=640, config=task.config({"episode_length": 40})
    )
    few = run_episodes(task, ActionsAgent(actions[:1], 80), range(80), config=task.config({"episode_length": 40}))
    assert_array_equal(many.returns[:80], few.returns)


def test_the_naive_agent_always_plays_the_default_knobs() -> None:
    played = run_episodes(get_task(3), NaiveAgent(), [1])
    assert_array_equal(played.actions[:, 0], np.tile([1.0, 0, 32, 0, 0], (200, 1)))


def test_vllms_defaults_take_nine_tenths_of_the_card_with_256_slots() -> None:
    """An A100 of 40 GB reports 42.5 GB; weights 16.06, activations 2.15, 256 slots of 1.5 MB, the rest is KV pool."""
    played = run_episodes(get_task(3), make_agent("vllm_defaults", get_task(3)), [1])
    pool_gb = 40.0 - 16.06 - 2.15 - 0.25
    expected = (0.9 * 42.5 - 16.06 - 2.15 - 256 * 0.0015) / pool_gb
    assert_allclose(played.actions[:, 0], np.tile([expected, 0, 256, 0, 0], (200, 1)), rtol=1e-12)
    assert expected == pytest.approx(0.9126, abs=1e-4)


@pytest.mark.parametrize("task_id", [task.task_id for task in list_tasks(include_recorded=True)])
def test_the_random_search_that_is_stored_is_the_best_of_as_many_episodes_as_a_learner_plays(task_id: Any) -> None:
    task = get_task(task_id)
    n_actions = STEPS // (task.episode_length * len(SEEDS))
    assert n_actions * len(SEEDS) * task.episode_length <= 50_000
    actions = random_settings(n_actions, task)
    results = run_episodes(task, ActionsAgent(actions, len(SEEDS)), SEEDS, n_rows=n_actions * len(SEEDS))
    best = results.scores().reshape(n_actions, -1).mean(axis=1).argmax()
    stored = run_episodes(task, make_agent("random_search", task), [1]).actions[0, 0]
    assert_array_equal(stored, actions[best])


def test_the_random_agent_reaches_every_choice_of_every_knob() -> None:
    drawn = run_episodes(get_task(3), make_agent("random:3", get_task(3)), range(4)).actions.reshape(-1, 5)
    assert set(drawn[:, 1]) == {0, 1, 2, 4, 8}
    assert set(drawn[:, 3]) == {0, 1}
    assert set(drawn[:, 4]) == {0, 1, 2}
    assert drawn[:, 0].min() < 0.15
    assert drawn[:, 0].max() > 0.95
    assert drawn[:, 2].min() <= 2
    assert drawn[:, 2].max() > 450


@pytest.mark.parametrize(
    ("spec", "remedy"),
    [
        ("nobody", "naive, vllm_defaults"),
        ("constant:{", "constant:'{\"batch_size\": 256}'"),
        ("constant:", "constant:'{\"batch_size\": 256}'"),
        ("random:x", "random:7"),
    ],
)
def test_an_agent_that_cannot_be_made_is_refused_with_the_remedy(spec: str, remedy: str) -> None:
    with pytest.raises(InvalidConfigError, match=re.escape(remedy)):
        make_agent(spec, get_task(1))


def test_a_constant_action_out_of_range_is_refused() -> None:
    with pytest.raises(InvalidActionError) as refused:
        make_agent('constant:{"batch_size": 1000}', get_task(1))
    assert refused.value.field == "batch_size"


def test_the_heuristic_keeps_room_for_a_flood_from_work_without_an_objective() -> None:
    task = get_task(3)
    agent = make_agent("heuristic", task)
    agent.reset(1)
    calm = agent.act(observations(arrival_rate=[30.0], timestep=[0.0], queue_depth=[400.0]))[0, 0]
    flooded = [agent.act(observations(arrival_rate=[300.0], timestep=[45.0]))[0, 0] for _ in range(40)]
    after = agent.act(observations(arrival_rate=[30.0], timestep=[85.0]))[0, 0]
    assert calm < 0.5
    assert np.all(np.diff(flooded) > 0)
    assert max(np.diff(flooded)) < 0.05
    assert flooded[-1] > 0.85
    assert after > 0.85  # held until most requests of the flood have finished


def test_the_heuristic_prefers_fewer_gpus_in_calm_and_capacity_in_floods() -> None:
    from agents.policies.capacity import CapacityPlanner, Setting
    from simulator.hardware.tables import load_tables

    planner = CapacityPlanner(get_task(3), load_tables(), np.array([0.2, 0.5, 0.3]))
    beside = planner.plan(Setting(1, 0, False))
    apart = planner.plan(Setting(1, 0, True))
    assert apart.capacity_rps > beside.capacity_rps
    assert 0.1 <= beside.kv_budget <= 1.0
    assert 1 <= beside.batch_size <= 512


# ---------------------------------------------------------------- baseline


def test_the_baseline_gives_the_same_numbers_every_time_in_the_documented_shape() -> None:
    first = run_all_baselines()
    assert run_all_baselines() == first
    assert set(first["scores"]) == set(first["breakdown"]) >= {"task1", "task2", "task3"}
    assert first["expected_range"] == {"task1": [0.30, 0.40], "task2": [0.22, 0.32], "task3": [0.18, 0.28]}
    assert first["action_config"] == BASELINE_ACTION.to_dict()
    others = first["baselines"]
    assert set(others) == set(BASELINES) == {"naive", "vllm_defaults", "random_search"}
    assert others["naive"]["scores"] == first["scores"]
    for name, column in others.items():
        for task in list_tasks():
            expected = evaluate(name, task, [0, 1]).scores[0]
            assert column["scores"][f"task{task.task_id}"] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("task_id", TASK_IDS)
def test_the_baseline_lies_in_its_expected_range(task_id: int) -> None:
    low, high = get_task(task_id).expected_baseline or (0.0, 1.0)
    assert low <= run_baseline(task_id)["score"] <= high


# ---------------------------------------------------------------- mode policies


def two_modes(gate: np.ndarray[Any, Any], stay: float = 0.0) -> ModeParams:
    settings = np.array([[[0.5, 0, 32, 0, 0], [0.9, 1, 256, 1, 1]]])
    gates = np.zeros((1, 2, len(FEATURES)))
    gates[0, 1] = gate
    return ModeParams(settings, gates, np.array([stay]))


def observations(**columns: list[float]) -> np.ndarray[Any, Any]:
    names = list(OBSERVATION_FIELDS)
    out = np.zeros((len(next(iter(columns.values()))), len(names)))
    for name, values in columns.items():
        out[:, names.index(name)] = values
    return out


def test_a_threshold_gate_switches_where_it_says() -> None:
    level = math.log1p(100) / math.log1p(1000)
    agent = ModeAgent(two_modes(threshold_gate("arrival_rate", level)), get_task(3))
    agent.reset(2)
    assert agent.act(observations(arrival_rate=[99.0, 101.0]))[:, 2].tolist() == [32, 256]


def test_hysteresis_holds_a_mode_until_the_other_is_clearly_better() -> None:
    level = math.log1p(100) / math.log1p(1000)
    agent = ModeAgent(two_modes(threshold_gate("arrival_rate", level), stay=0.5), get_task(3))
    agent.reset(1)
    played = [agent.act(observations(arrival_rate=[rate]))[0, 2] for rate in (50.0, 110.0, 200.0, 90.0, 50.0)]
    assert played == [32, 32, 256, 256, 32]


def test_batch_and_pool_ramp_to_a_new_mode_while_the_other_knobs_jump() -> None:
    level = math.log1p(100) / math.log1p(1000)
    params = replace(two_modes(threshold_gate("arrival_rate", level)), ramp=np.array([0.25]))
    agent = ModeAgent(params, get_task(3))
    agent.reset(1)
    played = np.array([agent.act(observations(arrival_rate=[rate]))[0] for rate in (50.0, 200.0, 200.0)])
    assert played[:, 2].tolist() == [32, 32 + 0.25 * 224, 88 + 0.25 * 168]
    assert played[:, 0] == pytest.approx([0.5, 0.6, 0.675])
    assert played[:, 1].tolist() == [0, 1, 1]


def test_a_window_gate_is_on_for_exactly_its_steps_of_every_flood_period() -> None:
    task = get_task(3)
    assert task.burst is not None
    agent = ModeAgent(two_modes(window_gate(-3, 10, task.burst.interval_steps)), task)
    steps = np.arange(2 * task.burst.interval_steps)
    agent.reset(len(steps))
    on = agent.act(observations(timestep=steps.tolist()))[:, 2] == 256
    since = (steps - task.burst.offset_steps + 3) % task.burst.interval_steps
    assert_array_equal(on, since < 13)


def test_a_mode_policy_survives_its_file() -> None:
    params = two_modes(window_gate(-3, 10, 120), stay=0.25)
    back = ModeParams.from_dict(json.loads(json.dumps(params.to_dict())))
    assert_array_equal(back.settings, params.settings)
    assert_array_equal(back.gate, params.gate)
    assert_array_equal(back.stay, params.stay)
    ramped = replace(params, ramp=np.array([0.125]))
    assert ModeParams.from_dict(ramped.to_dict()).ramp.tolist() == [0.125]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"kind": "constant"}, "kind"),
        ({"stays": 1}, "stays"),
        ({"stay": "x"}, "stay"),
        ({"modes": []}, "modes"),
        ({"modes": [{"knobs": {}, "gate": {}}]}, "modes[0].knobs.kv_budget"),
        ({"modes": [{"knobs": {}, "gate": {"queue_depht": 1}}]}, "modes[0].gate.queue_depht"),
        ({"modes": [{"knobs": {"volts": 1}, "gate": {}}]}, "modes[0].knobs.volts"),
        ({"modes": [{"knobs": {}, "gate": {"one": "x"}}]}, "modes[0].gate.one"),
        ({"modes": [{"knobs": {}, "gates": {}}]}, "modes[0].gates"),
    ],
)
def test_a_stored_policy_with_a_mistake_is_refused_with_file_and_field(
    tmp_path: Path, change: dict[str, Any], field: str
) -> None:
    path = tmp_path / "best_adaptive-task-1.json"
    path.write_text(json.dumps({**two_modes(window_gate(-3, 10, 120)).to_dict(), **change}))
    with pytest.raises(InvalidConfigError, match=re.escape(f"{tmp_path.name}/{path.name}")) as refused:
        make_agent(f"best_adaptive:{tmp_path}", get_task(1))
    assert refused.value.field == field


def test_the_phase_points_forward_when_a_flood_begins() -> None:
    task = get_task(3)
    assert task.burst is not None
    phi = features(observations(timestep=[float(task.burst.offset_steps)]), task)[0]
    assert phi[FEATURES.index("phase_cos")] == pytest.approx(1.0)
    assert phi[FEATURES.index("phase_sin")] == pytest.approx(0.0)
    steady = features(observations(timestep=[37.0]), get_task(1))[0]
    assert steady[FEATURES.index("phase_cos")] == 0.0


# ---------------------------------------------------------------- solver


def test_policies_side_by_side_earn_what_each_earns_alone() -> None:
    task = get_task(3)
    solver = Solver(task, get_calibration(3), budget=TINY)
    settings = solver.grid(TINY.coarse)[::7]
    values = solver.values_of_actions(settings, [1, 2, 3])
    for i in (0, len(settings) - 1):
        alone = run_episodes(task, ActionsAgent(settings[i : i + 1], 3), [1, 2, 3]).scores().mean()
        assert values[i] == pytest.approx(alone, rel=1e-12)


def test_a_race_gives_its_finalists_the_value_of_a_full_game_and_drops_the_others() -> None:
    task = get_task(3)
    solver = Solver(task, get_calibration(3), budget=replace(TINY, quick_seeds=[1], seeds=[1, 2]))
    actions = np.array([[0.9, 0, batch, 0, 1] for batch in (1.0, 32.0, 128.0, 512.0)])
    params = constant_policies(actions)
    values = solver.race(params, 2)
    left = np.flatnonzero(np.isfinite(values))
    first = solver.values_of_policies(params, [1])
    assert sorted(left) == sorted(np.argsort(-first)[:2])
    assert_allclose(values[left], solver.values_of_policies(params, [1, 2])[left], rtol=1e-12)


def test_the_static_sweep_beats_every_action_of_its_grid() -> None:
    task = get_task(1)
    solver = Solver(task, get_calibration(1), objective=throughput, budget=TINY)
    action, value = solver.best_static()
    assert value >= solver.values_of_actions(solver.grid(TINY.grid), TINY.seeds).max() - 1e-9
    assert value == pytest.approx(solver.values_of_actions(action[None], TINY.seeds)[0], rel=1e-12)


def test_the_adaptive_search_never_ends_below_the_constant_action_it_starts_from() -> None:
    task = replace(get_task(3), episode_length=50)  # the first flood, in a quarter of the time
    solver = Solver(task, get_calibration(3), budget=TINY)
    static = np.array([0.9, 0, 64, 0, 1])
    policy, value = solver.best_adaptive(static)
    before = solver.values_of_policies(constant_policy(static), TINY.validation)[0]
    assert value >= before
    assert value == pytest.approx(solver.values_of_policies(policy, TINY.validation)[0], rel=1e-12)


def test_a_frozen_knob_stays_frozen_in_every_mode() -> None:
    task = replace(get_task(3), episode_length=50)  # the first flood, in a quarter of the time
    solver = Solver(task, get_calibration(3), budget=TINY, frozen={"batch_size": 100.0, "quant_tier": 1.0})
    level = math.log1p(100) / math.log1p(1000)
    policy, _ = solver.refine(two_modes(threshold_gate("arrival_rate", level)))
    assert set(policy.settings[0, :, 2]) == {100.0}
    assert set(policy.settings[0, :, 4]) == {1.0}


def test_starts_have_settings_for_calm_flood_and_the_seconds_before_it_and_move_only_what_may_move() -> None:
    task = get_task(3)
    starts = Solver(task, get_calibration(3), budget=TINY, frozen={"quant_tier": 1.0}).staged_starts()
    assert len(starts) == 2
    before, flood = 25, 35  # the flood comes in second 30
    observation = np.zeros((1, 21))
    for start in starts:
        seen = []
        for second in (10, before, flood):
            agent = ModeAgent(start, task)
            agent.reset(1)
            observation[0, list(OBSERVATION_FIELDS).index("timestep")] = second
            agent.act(observation)
            seen.append(int(agent.mode[0]))
        assert seen == [0, 2, 1]
    assert all(set(start.settings[0, :, 4]) == {1.0} for start in starts)
    assert Solver(get_task(1), get_calibration(1), budget=TINY).staged_starts() == []


def test_no_policy_that_may_not_move_a_knob_beats_the_free_one_on_the_seeds_it_was_chosen_on() -> None:
    task = replace(get_task(1), episode_length=40)
    # A poor policy of the free search: searches with a frozen knob find better ones, which the free search may use too.
    poor = constant_policy(np.array([0.5, 0, 8, 0, 0]))
    rows = ablate(task, poor, ServeAction(0.9, 0, 64, False, QuantTier.FP16), TINY, seeds=TINY.validation)
    assert [row["knob"] for row in rows] == ["kv_budget", "batch_size"]
    for row in rows:
        assert row["cost"]["mean"] >= 0.0
        assert row["cost_of_default"]["mean"] >= row["cost"]["mean"]
        free = row["score"] + row["cost"]["mean"]
        assert free == pytest.approx(rows[0]["score"] + rows[0]["cost"]["mean"])
    assert rows[0]["frozen_at"] in (0.5, 0.9)


def test_knobs_that_a_task_does_not_offer_are_not_searched() -> None:
    grid = Solver(get_task(1), get_calibration(1)).grid(COARSE)
    assert len(grid) == len(COARSE["kv_budget"]) * len(COARSE["batch_size"])
    assert {tuple(row) for row in grid[:, [1, 3, 4]].tolist()} == {(0.0, 0.0, 0.0)}


def test_neighbours_are_other_choices_or_nearby_values_within_bounds() -> None:
    assert neighbours("spec_length", 2.0, 1.0) == [0.0, 1.0, 4.0, 8.0]
    assert neighbours("batch_size", 400.0, 1.0)[-1] == 512
    assert min(neighbours("kv_budget", 0.12, 1.0)) == 0.1


# ---------------------------------------------------------------- calibration


def test_calibration_measures_what_it_claims(tmp_path: Path) -> None:
    task = replace(get_task(2), episode_length=30)
    solved = calibrate(task, TINY)
    c = solved.calibration
    naive = run_episodes(task, NaiveAgent(), CALIBRATION_SEEDS, calibration=c)
    assert naive.metrics["cost_per_1k"].sum(axis=0).mean() == pytest.approx(task.cost_budget, rel=1e-12)
    assert 0 < c.floor_tps < float(naive.metrics["tokens_per_sec"].mean()) < c.optimal_tps <= c.max_throughput_tps
    one = run_episodes(task, ActionsAgent(np.array([[1.0, 0, 1, 0, 0]]), 16), CALIBRATION_SEEDS, calibration=c)
    assert c.floor_tps == pytest.approx(float(one.metrics["tokens_per_sec"].mean()), rel=1e-12)
    assert len(solved.provenance["table_sha256"]) == 64

    file = tmp_path / "calibration.json"
    file.write_text('{"tasks": {"other": {"floor_tps": 1.0}}}')
    CalibrationFiles.of(task, file, tmp_path / "policies").store(solved)
    written = json.loads(file.read_text())["tasks"]
    assert set(written) == {"other", "2"}
    assert written["2"]["price"] == c.price
    stored = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
    policies = {f"policies/{name}-task-2.json" for name in ("best_static", "best_adaptive", "random_search")}
    assert stored == {"calibration.json", *policies}


def test_the_price_does_not_depend_on_the_calibration_in_use() -> None:
    task = get_task(2)
    expected = task.cost_budget / float(
        run_episodes(task, NaiveAgent(), CALIBRATION_SEEDS, calibration=UNCALIBRATED)
        .metrics["cost_per_1k"]
        .sum(axis=0)
        .mean()
    )
    assert measure_price(task) == pytest.approx(expected, rel=1e-12)


def test_the_policies_of_ones_own_task_lie_beside_it_and_are_played_by_name(
    tmp_path: Path, desk: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    task = get_task("desk")
    evaluated = ["evaluate", "--task", "desk", "--seeds", "2", "--agent"]
    assert main([*evaluated, "best_adaptive"]) == 2
    assert "tasks-1.policies/best_adaptive-task-desk.json: no stored policy (No such file" in capsys.readouterr().err
    solved = calibrate(task, TINY)
    CalibrationFiles.of(task, policies=tmp_path / "elsewhere").store(solved)
    assert main([*evaluated, "best_adaptive"]) == 2
    assert main([*evaluated, f"best_adaptive:{tmp_path / 'elsewhere'}"]) == 0
    CalibrationFiles.of(task).store(solved)
    capsys.readouterr()
    assert main([*evaluated, "all"]) == 0
    out = capsys.readouterr().out
    assert "best_static" in out
    assert "best_adaptive" in out


@pytest.mark.parametrize("place", ["--out", "--policies"])
def test_a_path_that_cannot_be_written_is_named_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    def never(*_: object) -> None:
        pytest.fail("it was measured first")

    monkeypatch.setattr("agents.search.calibration.calibrate", never)
    (tmp_path / "file").touch()
    others = {"--out": tmp_path / "c.json", "--policies": tmp_path / "p", place: tmp_path / "file" / "within"}
    arguments = [str(part) for pair in others.items() for part in pair]
    assert main(["calibrate", "--task", "1", "--quick", *arguments]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert f"{tmp_path / 'file'}" in line
    assert "cannot be written (" in line
    assert not (tmp_path / "c.json").exists()


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"tasks": 5}'])
def test_a_file_that_is_not_a_calibration_file_is_not_overwritten(tmp_path: Path, text: str) -> None:
    file = tmp_path / "c.json"
    file.write_text(text)
    with pytest.raises(DataFormatError, match=r"c\.json"):
        CalibrationFiles.of(get_task(1), file, tmp_path / "p").check()


def test_constants_and_policies_change_together_or_not_at_all(desk: Desk) -> None:
    files = CalibrationFiles.of(get_task("desk"))
    before = files.constants.read_bytes()
    # The last of the four files cannot be written.
    solved = Solved(UNCALIBRATED, {}, {"kind": "constant"}, {"kind": "modes"}, {"kind": object()})
    with pytest.raises(TypeError):
        files.store(solved)
    assert files.constants.read_bytes() == before
    assert list(files.policies.iterdir()) == []
    assert {p for p in files.constants.parent.iterdir() if p.is_file()} == {desk.path, files.constants}


@pytest.mark.slow
def test_the_calibrate_command_writes_where_it_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (Path("simulator/data/calibration.json")).read_bytes()
    places = ["--out", str(tmp_path / "c.json"), "--policies", str(tmp_path / "p")]
    assert main(["calibrate", "--task", "1", "--quick", "--json", *places]) == 0
    printed = json.loads(capsys.readouterr().out)["tasks"]["1"]
    assert json.loads((tmp_path / "c.json").read_text())["tasks"]["1"] == printed
    stored = json.loads(policy_path("best_static", 1, tmp_path / "p").read_text())
    assert stored["action"]["batch_size"] > 32
    assert (Path("simulator/data/calibration.json")).read_bytes() == before


# ---------------------------------------------------------------- statistics and the command


def test_seed_ranges_do_not_overlap() -> None:
    ranges = [CALIBRATION_SEEDS, TRAINING_SEEDS, VALIDATION_SEEDS, HELD_OUT_SEEDS]
    assert len(set().union(*ranges)) == sum(len(r) for r in ranges)
    assert list(held_out_seeds(30)) == list(HELD_OUT_SEEDS)


def test_the_interval_is_students_t_by_hand() -> None:
    # mean 2, standard deviation 1, n = 3: half width 4.3027 / sqrt(3)
    got = interval(np.array([1.0, 2.0, 3.0]))
    assert (got.mean, got.low, got.high) == pytest.approx((2.0, 2.0 - 2.48414, 2.0 + 2.48414), abs=1e-4)


def test_paired_differences_cancel_the_seeds_luck() -> None:
    luck = np.array([0.1, 0.5, 0.9])
    got = paired(luck + 0.2, luck)
    assert (got.low, got.mean, got.high) == pytest.approx((0.2, 0.2, 0.2))


def test_rank_correlation_by_hand() -> None:
    assert ranks(np.array([10.0, 30.0, 10.0, 20.0])).tolist() == [1.5, 4.0, 1.5, 3.0]
    assert spearman(np.array([1.0, 2.0, 3.0]), np.array([1.0, 8.0, 27.0])) == pytest.approx(1.0)
    assert spearman(np.array([1.0, 2.0, 3.0]), np.array([3.0, 2.0, 1.0])) == pytest.approx(-1.0)


def test_comparison_names_the_best_known_and_every_regret_is_against_it() -> None:
    result = compare(get_task(1), ["naive", "heuristic"], range(10_000, 10_004))
    by_name = {entry["agent"]: entry for entry in result["agents"]}
    best = result["best_known"]["mean"]
    for entry in by_name.values():
        assert entry["regret"]["mean"] == pytest.approx(best - entry["score"]["mean"])
        assert len(entry["scores"]) == 4
    assert by_name["naive"]["over_naive"]["mean"] == 0.0


def test_all_stands_for_every_agent_that_can_play() -> None:
    names = agents_for(get_task(3), ["all"])
    expected = {"random", "naive", "vllm_defaults", "random_search", "heuristic", "hill_climb"}
    assert expected | {"best_static", "best_adaptive"} <= set(names)
    assert "constant" not in names


def test_the_evaluate_command_prints_json_with_every_seed(capsys: pytest.CaptureFixture[str]) -> None:
    agents = ["--agent", "naive", "--agent", 'constant:{"batch_size": 256}']
    assert main(["evaluate", "--task", "3", *agents, "--seeds", "3", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)["results"][0]
    assert result["seeds"] == [10_000, 10_001, 10_002]
    assert [entry["agent"] for entry in result["agents"]] == ["naive", 'constant:{"batch_size": 256}']
    expected = evaluate("naive", get_task(3), [10_000, 10_001, 10_002]).scores.tolist()
    assert result["agents"][0]["scores"] == expected


def test_a_folder_that_training_wrote_is_answered_with_the_name_of_its_policy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "policy.npz").touch()
    assert main(["evaluate", "--task", "1", "--agent", str(tmp_path)]) == 2
    assert f"is unknown: for the policy trained there name ppo:{tmp_path / 'policy.npz'}" in capsys.readouterr().err


def test_the_evaluate_command_prints_a_table_and_refuses_unknown_agents(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "--task", "1", "--agent", "vllm_defaults", "--seeds", "2"]) == 0
    printed = capsys.readouterr().out
    assert "regret: score of vllm_defaults minus the agent's; vllm_defaults is the best known on these seeds" in printed
    assert "0.999 [0.988, 1.000]" in printed  # no score is above 1; the interval of Student's t ends at 1.010
    assert main(["evaluate", "--task", "1", "--agent", "nobody"]) == 2
    assert "agent 'nobody' is unknown: the agents are naive, " in capsys.readouterr().err
    assert main(["evaluate", "--task", "1", "--agent", "heuristic_"]) == 2
    assert "agent 'heuristic_' is unknown: did you mean heuristic? The agents are naive, " in capsys.readouterr().err
    assert main(["evaluate", "--task", "autoscal"]) == 2
    refused = capsys.readouterr().err
    assert "'autoscal' is not a task: did you mean autoscale? Valid ids are " in refused
    assert refused.endswith(". INFERENCEGYM_TASKS=FILE adds tasks of your own\n")


def test_differences_to_a_named_agent_are_paired_and_mark_ties(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["evaluate", "--task", "autoscale", "--agent", "hpa", "--against", "best_adaptive", "--seeds", "10"]
    assert main([*command, "--json"]) == 0
    hpa = json.loads(capsys.readouterr().out)["results"][0]["agents"][0]
    seeds = range(10_000, 10_010)
    hpa_scores, searched = (evaluate(name, "autoscale", seeds).scores for name in ("hpa", "best_adaptive"))
    assert hpa["minus_against"] == {"agent": "best_adaptive", **paired(hpa_scores.tolist(), searched).to_dict()}
    assert main(command) == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    low, high = (hpa["minus_against"][end] for end in ("ci95_low", "ci95_high"))
    assert low < 0.0 < high
    assert f"{hpa['minus_against']['mean']:.3f} [{low:.3f}, {high:.3f}] ~" in rows["hpa"]
    assert rows["best_adaptive"].count("0.000 [0.000, 0.000]") == 1
    assert main(["evaluate", "--task", "task_easy", "--agent", "random", "--against", "random"]) == 2
    assert "--against needs scores by seed" in capsys.readouterr().err


def test_an_interval_needs_two_values() -> None:
    assert interval([0.2, 0.4]) == interval(np.array([0.2, 0.4]))
    with pytest.raises(InvalidConfigError, match="two seeds or more"):
        interval([0.2])


OWN = """
import numpy as np

class Still:
    def __init__(self, task):
        self.row = [1.0, 0, 64 if task.task_id == 3 else 16, 0, 0]

    def reset(self, n_rows):
        pass

    def act(self, observation):
        return np.tile(self.row, (len(observation), 1))

class Plain:
    reset = act = lambda self, *_: None

class NoAgent:
    pass
"""


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a user's package; its modules are removed from the process afterwards."""
    (tmp_path / "my_lab").mkdir()
    (tmp_path / "my_lab" / "agents.py").write_text(OWN)
    (tmp_path / "my_lab" / "broken.py").write_text("1 / 0")
    (tmp_path / "my_lab" / "needy.py").write_text("import something_not_installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr("agents.registry.AGENTS", dict(AGENTS))
    for name in [name for name in sys.modules if name.split(".")[0] == "my_lab"]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


def test_evaluate_says_what_it_clamped(own_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = (own_folder / "my_lab" / "agents.py").read_text()
    (own_folder / "my_lab" / "flipper.py").write_text(own.replace("64 if task.task_id == 3 else 16", "4096"))
    assert main(["evaluate", "--task", "3", "--agent", "my_lab.flipper:Still", "--seeds", "2"]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    assert last == "my_lab.flipper:Still: batch_size clamped to 1 to 512 in 400 of 400 rows"


@pytest.mark.usefixtures("own_folder")
def test_an_agent_of_ones_own_is_evaluated_beside_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    own, twin = "my_lab.agents:Still", 'constant:{"batch_size": 64}'
    command = ["evaluate", "--task", "3", "--agent", own, "--agent", twin, "--seeds", "2", "--json"]
    assert main(command) == 0
    mine, theirs = json.loads(capsys.readouterr().out)["results"][0]["agents"]
    assert (mine["agent"], theirs["agent"]) == (own, twin)
    assert mine["scores"] == theirs["scores"]


@pytest.mark.usefixtures("own_folder")
def test_python_evaluates_an_agent_of_ones_own_by_the_name_that_the_command_takes() -> None:
    twin = evaluate('constant:{"batch_size": 64}', 3, range(2))
    assert evaluate("my_lab.agents:Still", 3, range(2)).scores.tolist() == twin.scores.tolist()


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("my_lab.agents:NoAgent", "NoAgent is no agent"),
        ("my_lab.agents:Nobody", "my_lab.agents has Still, Plain"),
        ("my_lab.elsewhere:Still", "my_lab.elsewhere"),
        ("nowhere:Still", "package.module:Class"),
        ("my_lab.broken:Still", "ZeroDivisionError"),
        ("my_lab.needy:Still", "something_not_installed"),
    ],
)
@pytest.mark.usefixtures("own_folder")
def test_an_agent_of_ones_own_that_cannot_be_had_is_refused_with_the_reason(
    capsys: pytest.CaptureFixture[str], spec: str, said: str
) -> None:
    assert main(["evaluate", "--task", "1", "--agent", spec, "--seeds", "2"]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda n: [[1.0, 0, 64, 0, 0]] * n, "'list' is not allowed"),
        (lambda n: np.array([1.0, 0, 64, 0, 0]), "(5,) is not allowed"),
        (lambda n: np.ones((n, 4)), "(2, 4) is not allowed"),
        (lambda n: np.ones((n, 6)), "(2, 6) is not allowed"),  # the task does not scale
        (lambda n: np.ones((1, 5)), "(1, 5) is not allowed"),
        (lambda n: np.full((n, 5), np.nan), "Mine.act(observation)[0, 0]='NaN' is not allowed"),
    ],
)
def test_an_agent_of_ones_own_that_answers_no_knobs_is_told_what_it_answered(
    answer: Callable[[int], Any], said: str
) -> None:
    class Mine:
        def reset(self, n_rows: int) -> None: ...

        def act(self, observation: NDArray[np.float64]) -> Any:
            return answer(len(observation))

    with pytest.raises(InvalidActionError) as refused:
        evaluate(Mine(), get_task(1), [1, 2])
    assert said in str(refused.value)


def test_an_agent_of_ones_own_may_set_the_replicas_where_the_task_scales() -> None:
    class Mine:
        def reset(self, n_rows: int) -> None: ...

        def act(self, observation: NDArray[np.float64]) -> Any:
            return np.tile([0.9, 0, 256, 0, 0, 3], (len(observation), 1))

    actions = run_episodes(get_task("autoscale"), Mine(), [1]).actions
    assert (actions[..., 5] == 3).all()


@pytest.mark.usefixtures("own_folder")
def test_an_agent_of_ones_own_that_raises_is_named_with_its_method_and_line(
    own_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "class Made:\n    def __init__(self, task, more): ...\n    def reset(self, n_rows): ...\n"
    text += "    def act(self, observation): ...\nclass Acts(Made):\n    def __init__(self): ...\n"
    text += "    def act(self, observation):\n        return observation[:, 99]\n"
    (own_folder / "my_lab" / "fails.py").write_text(text, encoding="utf-8")
    assert main(["evaluate", "--task", "1", "--agent", "my_lab.fails:Acts", "--seeds", "2"]) == 2
    assert "agent Acts failed in act(), fails.py:8: IndexError(" in capsys.readouterr().err
    assert main(["evaluate", "--task", "1", "--agent", "my_lab.fails:Made", "--seeds", "2"]) == 2
    assert "agent Made failed in __init__(), " in capsys.readouterr().err


@pytest.mark.usefixtures("own_folder")
def test_a_server_imports_nobodys_own_agents() -> None:
    with pytest.raises(InvalidConfigError):
        make_agent("my_lab.agents:Still", get_task(1))
    assert "my_lab.agents" not in sys.modules
