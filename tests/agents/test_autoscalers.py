"""Autoscalers: they follow the load, keep to their windows, and beat the best constant fleet on held-out seeds."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agents.episodes import run_episodes
from agents.evaluate import Evaluation, evaluate, paired
from agents.policies.autoscalers import Autoscaler, HpaAgent, KpaAgent, PlannerAgent, ReplicaPlan, ScheduledAgent
from agents.policies.stored import policy_path, read_autoscaler
from agents.policies.switching_policy import ActionsAgent
from agents.protocol import FloatArray
from agents.registry import make_agent
from agents.search.timetable import Timetables, TimetableSearch
from agents.seeds import CONFIRMATION_SEEDS
from benchmarks.policies.tasks import timetables
from inferencegym.errors import InvalidConfigError
from inferencegym.models import FLEET_FIELDS, OBSERVATION_FIELDS, SCALING_FIELDS
from inferencegym.spaces.forecast import forecast_rps
from inferencegym.tasks import TaskSpec, get_task, list_tasks

ROOT = Path(__file__).resolve().parents[2]

NAMES = (*OBSERVATION_FIELDS, *FLEET_FIELDS, *SCALING_FIELDS)
SCALING = [task.task_id for task in list_tasks(include_recorded=True) if task.fleet.max_replicas is not None]
BY_METRICS = (HpaAgent, KpaAgent, PlannerAgent)


def row(agent: Autoscaler, second: int, rate: float, queue: float = 0.0, ready: float | None = None) -> FloatArray:
    """One observation (1, 24) of a fleet."""
    seen = dict.fromkeys(NAMES, 0.0)
    asked = float(agent.asked[0])
    seen |= {"timestep": second, "arrival_rate": rate, "queue_depth": queue, "tpot_p50": 30.0}
    seen |= {"replicas": asked, "replicas_ready": asked if ready is None else ready}
    return np.array([[seen[name] for name in NAMES]])


def replicas_of(agent: Autoscaler, loads: list[float]) -> list[float]:
    """Replicas requested in each second of a load (requests/s)."""
    agent.reset(1)
    return [float(agent.act(row(agent, second, load))[0, 5]) for second, load in enumerate(loads)]


@pytest.mark.parametrize("kind", BY_METRICS)
@pytest.mark.parametrize("task_id", SCALING)
def test_more_load_brings_replicas_and_less_takes_them_away(task_id: Any, kind: type[Autoscaler]) -> None:
    agent = kind(get_task(task_id))
    most, capacity = agent.task.fleet.max_replicas or 1, agent.replica.capacity_rps
    asked = replicas_of(agent, [capacity * 0.2] * 150 + [capacity * most] * 150 + [capacity * 0.2] * 400)
    assert asked[140] == 1
    assert asked[290] == most
    assert asked[-1] == 1


@pytest.mark.parametrize("kind", BY_METRICS)
def test_a_queue_alone_brings_replicas(kind: type[Autoscaler]) -> None:
    agent = kind(get_task("autoscale"))
    agent.reset(1)
    asked = [float(agent.act(row(agent, second, 10.0, queue=1500.0))[0, 5]) for second in range(60)]
    assert asked[-1] > agent.task.fleet.n_replicas


def test_hpa_keeps_what_it_wanted_within_its_stabilisation_window() -> None:
    agent = HpaAgent(get_task("autoscale"), compression=1.0)
    capacity = agent.replica.capacity_rps
    asked = replicas_of(agent, [capacity * 2.0] * 30 + [1.0] * 400)
    high = asked[29]
    assert high > 1
    assert asked[15 + 284] == high  # the last high recommendation was at second 15, and counts for 300 seconds
    assert asked[-1] == 1


def test_hpa_grows_by_four_or_to_twice_as_many_at_a_time() -> None:
    agent = HpaAgent(get_task("autoscale-azure"), compression=1.0)
    agent.reset(1)
    agent.asked[:] = 1.0
    asked = float(agent.act(row(agent, 0, 1e4, ready=1.0))[0, 5])
    assert asked == 5


def test_kpa_does_not_shrink_in_a_panic() -> None:
    agent = KpaAgent(get_task("autoscale"))
    agent.reset(1)
    for second in range(6):
        agent.act(row(agent, second, 10.0, queue=2000.0))
    panicked = float(agent.asked[0])
    after = [float(agent.act(row(agent, 6 + i, 1.0))[0, 5]) for i in range(50)]
    assert min(after) >= panicked > agent.task.fleet.n_replicas


def test_the_scheduled_autoscaler_has_replicas_up_when_the_forecast_needs_them() -> None:
    task = get_task("autoscale")
    agent = ScheduledAgent(task, target=0.6)
    asked = np.array(replicas_of(agent, [0.0] * task.episode_length))
    ahead = int(np.ceil(ReplicaPlan.of(task).start_s))
    needed = np.ceil(forecast_rps(task, np.arange(task.episode_length)) / (0.6 * agent.replica.capacity_rps))
    most = task.fleet.max_replicas or 1
    assert (asked[: -2 * ahead] >= np.minimum(needed, most)[ahead:-ahead]).all()


@pytest.mark.parametrize("name", ["hpa", "kpa", "planner", "best_adaptive"])
def test_rows_do_not_depend_on_each_other(name: str) -> None:
    task = get_task("autoscale-azure")
    seeds = [5, 6, 7]
    together = run_episodes(task, make_agent(name, task), seeds).actions
    for i, seed in enumerate(seeds):
        np.testing.assert_array_equal(run_episodes(task, make_agent(name, task), [seed]).actions[:, 0], together[:, i])


@pytest.mark.parametrize("name", ["hpa", "kpa", "scheduled", "planner", "best_adaptive"])
def test_an_autoscaler_plays_a_second_episode_like_the_first(name: str) -> None:
    task = get_task("autoscale")
    agent = make_agent(name, task)
    first = run_episodes(task, agent, [5, 6])
    np.testing.assert_array_equal(run_episodes(task, agent, [5, 6]).actions, first.actions)


def test_tasks_of_a_fixed_fleet_and_tasks_without_a_forecast_are_refused() -> None:
    with pytest.raises(InvalidConfigError, match="fixed number of replicas"):
        make_agent("hpa", get_task(1))
    with pytest.raises(InvalidConfigError, match="no forecast"):
        make_agent("scheduled", get_task("autoscale-azure"))


def test_a_stored_autoscaler_with_a_parameter_out_of_range_is_refused(tmp_path: Path) -> None:
    stored = json.loads(policy_path("best_adaptive", "autoscale").read_text(encoding="utf-8"))
    stored["params"]["hold_s"] = 0
    path = tmp_path / "best_adaptive-task-autoscale.json"
    path.write_text(json.dumps(stored), encoding="utf-8")
    with pytest.raises(InvalidConfigError, match="hold_s"):
        read_autoscaler(path)


# ---------------------------------------------------------------- worth playing


@lru_cache(maxsize=32)
def held_out(agent: str, task_id: Any) -> Evaluation:
    return evaluate(agent, get_task(task_id))


def scaling_task(task_id: Any) -> TaskSpec:
    return get_task(task_id)


@pytest.mark.parametrize("task_id", SCALING)
def test_the_naive_agent_scores_in_its_range(task_id: Any) -> None:
    low, high = scaling_task(task_id).expected_baseline or (1.0, 0.0)
    assert low <= held_out("naive", task_id).scores.mean() <= high


@pytest.mark.parametrize("task_id", SCALING)
def test_scaling_beats_the_best_constant_fleet_by_a_tenth(task_id: Any) -> None:
    for seeds in (None, CONFIRMATION_SEEDS):
        if seeds is None:
            adaptive, static = (held_out(name, task_id) for name in ("best_adaptive", "best_static"))
        else:
            adaptive, static = (evaluate(n, scaling_task(task_id), seeds) for n in ("best_adaptive", "best_static"))
        gain = paired(adaptive.scores, static.scores)
        assert gain.mean >= 0.10
        assert gain.low > 0.05


@pytest.mark.parametrize("task_id", SCALING)
def test_an_autoscaler_that_nobody_tuned_beats_the_best_constant_fleet(task_id: Any) -> None:
    # The planner divides the rate by the capacity for the mean mix, which is another one in every episode of fleet-mix.
    untuned = "hpa" if task_id == "fleet-mix" else "planner"
    assert paired(held_out(untuned, task_id).scores, held_out("best_static", task_id).scores).low > 0.0


def test_requests_per_second_do_not_tell_the_replicas_where_the_mix_is_drawn() -> None:
    tuned, planned = held_out("best_adaptive", "fleet-mix"), held_out("planner", "fleet-mix")
    assert tuned.scores.mean() > held_out("best_static", "fleet-mix").scores.mean() + 0.15
    assert paired(tuned.scores, planned.scores).low > 0.0


def test_on_a_drawn_load_every_autoscaler_is_far_above_the_best_constant() -> None:
    constant = held_out("best_static", "autoscale-mix")
    for name in ("hpa", "planner", "best_adaptive", "ppo"):
        found = held_out(name, "autoscale-mix")
        assert found.scores.mean() > constant.scores.mean() + 0.15, name
        assert paired(found.scores, constant.scores).low > 0.05, name


def test_on_a_drawn_mix_the_order_of_the_agents_does_not_depend_on_the_seeds() -> None:
    order = ("best_adaptive", "hpa", "planner", "best_static")
    scores = np.array([evaluate(name, get_task("fleet-mix"), range(10_000, 10_300)).scores for name in order])
    for half in (scores[:, :150], scores[:, 150:], scores[:, ::2], scores[:, 1::2]):
        assert (np.diff(half.mean(axis=1)) < -0.02).all()


@pytest.mark.parametrize("task_id", ["autoscale-mix", "fleet-mix"])
def test_on_a_drawn_load_the_best_timetable_is_far_below_the_searched_policy(task_id: str) -> None:
    searched = held_out("best_adaptive", task_id).scores.mean()
    assert timetables()[task_id]["mean"] < searched - 0.1


def test_a_timetable_is_searched_on_its_seeds_and_plays_what_was_found() -> None:
    task = replace(get_task("autoscale-mix"), episode_length=60)
    start = np.array([0.9, 1.0, 256.0, 0.0, 1.0, 8.0])
    starts = np.tile([[0.9, 1.0, 256.0, 0.0, 1.0, 1.0], start], (60, 1, 1)).swapaxes(0, 1)
    timetable, score = TimetableSearch(task, [3, 4], children=16, seed=1).best(starts, generations=6)
    again, _ = TimetableSearch(task, [3, 4], children=16, seed=1).best(starts[:, :1], generations=6)
    np.testing.assert_array_equal(timetable, again)
    assert timetable.shape == (60, 6)
    played = run_episodes(task, Timetables(np.stack([timetable, timetable])), [3, 4])
    assert float(played.scores().mean()) == pytest.approx(score)
    assert score > float(run_episodes(task, ActionsAgent(start[None], 2), [3, 4]).scores().mean())
    assert (timetable[:, 3:5] == timetable[0, 3:5]).all()  # no restarts in the middle
