"""Adaptive policies beat constants on every task: tested on held-out seeds with the committed calibration and policies.

Each claim is tested with a paired 95% interval over the 30 held-out seeds. `benchmarks/policies/tasks.py` has the
figures.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from agents.episodes import run_episodes
from agents.evaluate import Evaluation, evaluate, evaluation_of, paired, spearman
from agents.policies.stored import policy_path, read_constant_policy, read_switching_policy
from agents.policies.switching_policy import ActionsAgent, ModeAgent
from agents.protocol import Agent, FloatArray
from agents.search.reward_grade_agreement import N_CONSTANTS, SEEDS, random_settings, reward_grade_correlation
from agents.seeds import CONFIRMATION_SEEDS, HELD_OUT_SEEDS
from inferencegym.models import ACTION_FIELDS
from inferencegym.spaces.actions import to_row
from inferencegym.tasks import CALIBRATION_FILE, HARDWARE_CALIBRATION_FILE, get_calibration, get_task, list_tasks
from simulator.hardware.tables import load_tables

TaskId = int | str
TASK_IDS = [*(task.task_id for task in list_tasks()), "sharegpt-served"]
HARDWARE_IDS = [task.task_id for task in list_tasks(include_recorded=True) if task.hardware is not None]
"""The tasks on other cards."""
HEADROOM: list[tuple[TaskId, float]] = [(2, 0.015), (3, 0.05), ("h100-chat-8b", 0.008), ("b200-gpt-oss-120b", 0.001)]
"""Smallest mean gain of the best adaptive policy over the best constant action."""


@lru_cache(maxsize=64)
def held_out(agent: str, task_id: TaskId) -> Evaluation:
    return evaluate(agent, get_task(task_id))


def slowly(task_ids: list[TaskId]) -> list[Any]:
    """Parameters whose tests run with the slow ones."""
    return [pytest.param(task_id, marks=pytest.mark.slow) for task_id in task_ids]


# ---------------------------------------------------------------- calibration is of this table


def test_the_calibration_was_measured_on_the_table_that_ships() -> None:
    entries = json.loads(CALIBRATION_FILE.read_text())["tasks"]
    assert set(entries) >= {str(task_id) for task_id in TASK_IDS}
    for key in TASK_IDS:
        assert entries[str(key)]["table_sha256"] == load_tables().sha256


@pytest.mark.parametrize("task_id", [*TASK_IDS, *HARDWARE_IDS])
def test_no_agent_is_much_faster_than_the_calibrated_optimum(task_id: TaskId) -> None:
    for agent in ("heuristic", "best_static", "best_adaptive"):
        tps = run_episodes(get_task(task_id), _agent(agent, task_id), HELD_OUT_SEEDS[:10]).metrics["tokens_per_sec"]
        assert tps.mean() < 1.02 * get_calibration(task_id).optimal_tps
        assert tps.max() < 1.25 * get_calibration(task_id).max_throughput_tps


# ---------------------------------------------------------------- scores


@pytest.mark.parametrize("task_id", TASK_IDS)
def test_the_naive_agent_scores_in_its_range_on_held_out_seeds(task_id: TaskId) -> None:
    low, high = get_task(task_id).expected_baseline or (0.0, 1.0)
    assert low <= held_out("naive", task_id).scores.mean() <= high


@pytest.mark.parametrize("task_id", HARDWARE_IDS)
def test_the_naive_agent_leaves_most_of_the_grade_to_be_won_on_other_hardware(task_id: TaskId) -> None:
    assert 0.15 <= held_out("naive", task_id).scores.mean() <= 0.40
    assert paired(held_out("best_static", task_id).scores, held_out("naive", task_id).scores).low >= 0.2


@pytest.mark.parametrize("task_id", HARDWARE_IDS)
def test_the_stored_policies_are_of_the_task_as_it_is(task_id: TaskId) -> None:
    """If this fails, run inferencegym calibrate --quick --task ID: a policy found with other knobs scores lower."""
    for name in ("best_static", "best_adaptive"):
        stored = json.loads(policy_path(name, task_id).read_text(encoding="utf-8"))
        told = stored["training_score" if name == "best_static" else "validation_score"]
        assert held_out(name, task_id).scores.mean() == pytest.approx(told, abs=0.03)
    constants = json.loads(HARDWARE_CALIBRATION_FILE.read_text(encoding="utf-8"))["tasks"][str(task_id)]
    for knob in set(constants["fastest_action"]) - set(get_task(task_id).active_actions):
        assert constants["fastest_action"][knob] == ACTION_FIELDS[knob].default


@pytest.mark.parametrize("task_id", HARDWARE_IDS)
def test_the_policies_of_a_search_are_worth_no_less_than_the_heuristic_on_other_hardware(task_id: TaskId) -> None:
    static, adaptive = held_out("best_static", task_id).scores, held_out("best_adaptive", task_id).scores
    assert paired(static, held_out("heuristic", task_id).scores).low > -0.005
    # The searches for h200-70b and l40s-chat-8b found nothing better than a constant action.
    assert paired(adaptive, static).low >= 0.0


@pytest.mark.parametrize(("task_id", "least"), HEADROOM)
def test_adapting_beats_the_best_constant_action_on_seeds_that_nothing_was_chosen_by(
    task_id: TaskId, least: float
) -> None:
    task = get_task(task_id)
    adaptive, static = (evaluate(name, task, CONFIRMATION_SEEDS).scores for name in ("best_adaptive", "best_static"))
    gain = paired(adaptive, static)
    assert gain.mean >= least
    assert gain.low > 0.0


@pytest.mark.parametrize("other", ["random", "naive", "hill_climb"])
@pytest.mark.parametrize("task_id", [*TASK_IDS, *HARDWARE_IDS])
def test_the_heuristic_beats_agents_that_do_not_plan(task_id: TaskId, other: str) -> None:
    assert paired(held_out("heuristic", task_id).scores, held_out(other, task_id).scores).low > 0.0


@pytest.mark.parametrize(("task_id", "least"), HEADROOM)
def test_adapting_beats_the_best_constant_action(task_id: TaskId, least: float) -> None:
    gain = paired(held_out("best_adaptive", task_id).scores, held_out("best_static", task_id).scores)
    assert gain.mean >= least
    assert gain.low > 0.0


def test_no_constant_action_comes_close_to_adapting_on_the_hard_task() -> None:
    task = get_task(3)
    static = read_constant_policy(policy_path("best_static", 3))
    near = np.tile(to_row(static), (40, 1))
    rng = np.random.default_rng(1)
    near[:, 0] = np.clip(near[:, 0] + rng.normal(0.0, 0.15, 40), 0.1, 1.0)
    near[:, 2] = np.clip(near[:, 2] * np.exp(rng.normal(0.0, 0.5, 40)), 1, 512)
    actions = np.vstack([near, random_settings(160, task, seed=9)])
    seeds = HELD_OUT_SEEDS[:6]
    played = run_episodes(task, ActionsAgent(actions, len(seeds)), seeds, n_rows=len(actions) * len(seeds))
    best = played.scores().reshape(-1, len(seeds)).mean(axis=1).max()
    assert best <= held_out("best_adaptive", 3).scores[: len(seeds)].mean() - 0.03


def cost_of_freezing(knob: str, value: float) -> float:
    """Lower end of the paired interval of the score that the best adaptive policy loses if one knob is frozen."""
    task = get_task(3)
    free = read_switching_policy(policy_path("best_adaptive", 3))
    settings = free.settings.copy()
    settings[..., list(ACTION_FIELDS).index(knob)] = value
    frozen = evaluate(ModeAgent(free.with_settings(settings), task), task)
    return paired(held_out("best_adaptive", 3).scores, frozen.scores).low


@pytest.mark.parametrize("knob", list(ACTION_FIELDS))
def test_leaving_any_knob_at_its_default_costs_on_the_hard_task(knob: str) -> None:
    """`benchmarks/policies/tasks.py` says how much, with the rest of the policy searched anew for every frozen knob."""
    assert cost_of_freezing(knob, ACTION_FIELDS[knob].default) > 0.0


@pytest.mark.parametrize("knob", ["kv_budget", "spec_length", "prefill_disagg"])
def test_pool_speculation_and_prefill_placement_have_to_follow_the_load_on_the_hard_task(knob: str) -> None:
    index = list(ACTION_FIELDS).index(knob)
    static = to_row(read_constant_policy(policy_path("best_static", 3)))
    assert cost_of_freezing(knob, float(static[index])) > 0.0


@pytest.mark.parametrize("task_id", [*TASK_IDS, *slowly(HARDWARE_IDS)])
def test_rewards_point_the_same_way_as_grades(task_id: TaskId) -> None:
    assert reward_grade_correlation(get_task(task_id)) >= 0.88


def test_random_constants_of_the_medium_task_tie_in_grade() -> None:
    """Random policies tie so often that no reward can rank them as the grade does; hence the ladder above."""
    task, n = get_task(2), len(SEEDS)
    results = run_episodes(task, ActionsAgent(random_settings(N_CONSTANTS, task), n), SEEDS, n_rows=N_CONSTANTS * n)
    grades = results.scores().reshape(N_CONSTANTS, n).mean(axis=1)
    assert (grades == 0.5).sum() > 2 * N_CONSTANTS / 3
    # The best possible ranking without ties: the grade's ranking with its ties broken.
    best = spearman(np.argsort(np.argsort(grades, kind="stable")).astype(np.float64), grades)
    assert best < 0.8


# ---------------------------------------------------------------- adversarial policies


class Thrash:
    """Largest and smallest batch and KV pool in turn, each second."""

    def reset(self, n_rows: int) -> None:
        self.step = 0

    def act(self, observation: FloatArray) -> FloatArray:
        self.step += 1
        extreme = [1.0, 0, 512, 0, 1] if self.step % 2 else [0.1, 0, 1, 0, 1]
        return np.tile(np.array(extreme, dtype=float), (len(observation), 1))


class FlipPrecision:
    """Another precision every second, so that some replica always restarts."""

    def reset(self, n_rows: int) -> None:
        self.step = 0

    def act(self, observation: FloatArray) -> FloatArray:
        self.step += 1
        return np.tile(np.array([0.9, 0, 128, 0, self.step % 3], dtype=float), (len(observation), 1))


def constant(*knobs: float) -> Agent:
    return ActionsAgent(np.array([knobs]), len(HELD_OUT_SEEDS))


ADVERSARIES = {
    "thrashing batch and KV pool": Thrash(),
    "always out of memory": constant(1.0, 0, 512, 0, 0),
    "one request at a time, so that the queue overflows and nearly all is refused": constant(0.1, 0, 1, 0, 0),
    "leaving the queue to overflow behind a tiny KV pool": constant(0.1, 8, 8, 0, 0),
    "toggling precision each second": FlipPrecision(),
}


@pytest.mark.parametrize("name", list(ADVERSARIES))
@pytest.mark.parametrize("task_id", [*TASK_IDS, *slowly(HARDWARE_IDS)])
def test_abusing_the_score_does_not_pay(task_id: TaskId, name: str) -> None:
    task = get_task(task_id)
    abuse = evaluation_of(name, run_episodes(task, ADVERSARIES[name], HELD_OUT_SEEDS))
    heuristic = held_out("heuristic", task_id)
    if name.startswith("toggling") and "quant_tier" not in task.active_actions:
        # The knob is not live there, so this is a constant action that a constant agent may well play.
        assert np.ptp(run_episodes(task, ADVERSARIES[name], HELD_OUT_SEEDS[:2]).actions[..., 4]) == 0.0
        return
    assert paired(heuristic.scores, abuse.scores).low > 0.0
    assert paired(heuristic.returns, abuse.returns).low > 0.0


def _agent(name: str, task_id: TaskId) -> Agent:
    from agents.registry import make_agent

    return make_agent(name, get_task(task_id))
