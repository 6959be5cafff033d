"""Agents of the traffic controller, and the planner against all possible sequences of actions."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from env.traffic.agents import (
    TRAFFIC_AGENTS,
    AdaptiveTraffic,
    ConstantTraffic,
    PlannerTraffic,
    RandomTraffic,
    evaluate_traffic,
)
from env.traffic.env import TrafficBatch
from env.traffic.planner import plan_traffic, run_actions
from env.traffic.report import compare_traffic
from env.traffic.tasks import (
    RateSegment,
    TrafficConfig,
    TrafficPattern,
    TrafficTask,
    get_traffic_task,
    list_traffic_tasks,
)
from inferencegym.errors import InvalidConfigError
from inferencegym.traffic import ACTION_NAMES

TASKS = list_traffic_tasks()
SHORT = 5


def shortened(task: TrafficTask, rates: list[float]) -> TrafficTask:
    """The task's grade on an episode with these rates."""
    segments = tuple(RateSegment(i, i + 1, rate, rate) for i, rate in enumerate(rates))
    return replace(task, episode_length=len(rates), pattern=TrafficPattern(40.0, segments))


def every_play(task: TrafficTask, config: TrafficConfig) -> tuple[np.ndarray, np.ndarray]:
    """Final score and cumulative reward of all sequences of actions, played side by side."""
    plays = np.array(list(product(range(len(ACTION_NAMES)), repeat=task.episode_length)))
    batch = TrafficBatch(task, len(plays), config)
    reward = np.zeros(len(plays))
    for t in range(task.episode_length):
        reward += batch.step(plays[:, t]).reward
    return batch.final_score(), reward


@pytest.mark.parametrize("task", TASKS, ids=lambda t: t.task_id)
@settings(max_examples=30)
@given(
    rates=st.lists(st.floats(20, 400), min_size=SHORT, max_size=SHORT),
    capacity=st.floats(30, 200),
    crash=st.floats(0.5, 4),
    max_queue=st.integers(5, 400),
    base_latency=st.sampled_from([5.0, 50.0, 150.0, 400.0]),
)
def test_no_sequence_of_actions_beats_the_plan(
    task: TrafficTask, rates: list[float], capacity: float, crash: float, max_queue: int, base_latency: float
) -> None:
    short = shortened(task, rates)
    config = TrafficConfig(capacity, base_latency, crash, max_queue)
    scores, rewards = every_play(short, config)
    assert plan_traffic(short, config).final_score == scores.max()
    assert plan_traffic(short, config, "return").cumulative_reward == rewards.max()


@pytest.mark.parametrize("task", TASKS, ids=lambda t: t.task_id)
def test_a_plan_earns_in_the_environment_what_it_says(task: TrafficTask) -> None:
    for objective in ("score", "return"):
        plan = plan_traffic(task, objective=objective)
        outcome = evaluate_traffic(PlannerTraffic(objective), task)
        assert plan == run_actions(task, plan.actions)
        assert (outcome.final_score[0], outcome.cumulative_reward[0]) == (plan.final_score, plan.cumulative_reward)


@pytest.mark.parametrize("task", TASKS, ids=lambda t: t.task_id)
def test_no_agent_beats_the_planner(task: TrafficTask) -> None:
    best_score = plan_traffic(task).final_score
    best_reward = plan_traffic(task, objective="return").cumulative_reward
    for make in TRAFFIC_AGENTS.values():
        outcome = evaluate_traffic(make(), task, seeds=range(30))
        assert outcome.final_score.max() <= best_score
        assert outcome.cumulative_reward.max() <= best_reward


def test_the_planner_crashes_on_purpose_where_survival_costs_more_than_it_earns() -> None:
    # Five steps at 4.4 times the capacity are ahead even for the strictest action: surviving them halves the score.
    # At step 11 a crash at 4.6 times the capacity is on offer; ten of sixteen steps at a low latency are worth more.
    task = shortened(get_traffic_task("task_medium"), [10.0] * 10 + [460.0] + [2200.0] * 5)
    config = TrafficConfig(base_latency=25.0, crash_load_ratio=4.5)
    plan = plan_traffic(task, config)
    survival = run_actions(task, ("drop_aggressive",) * 16, config)
    assert survival.final_score == 0.5
    assert (len(plan.actions), plan.actions[-1]) == (11, "allow_all")
    assert plan.final_score > 0.55


def test_where_every_action_crashes_the_plan_is_one_step_long() -> None:
    plan = plan_traffic(get_traffic_task("task_hard"), TrafficConfig(server_capacity=5.0))
    assert len(plan.actions) == 1
    assert plan.cumulative_reward == -10.0


def test_on_the_hard_task_the_planner_beats_the_adaptive_rule_and_the_rule_every_constant() -> None:
    task = get_traffic_task("task_hard")
    constants = [evaluate_traffic(ConstantTraffic(name), task).final_score[0] for name in ACTION_NAMES]
    adaptive = evaluate_traffic(AdaptiveTraffic(), task).final_score[0]
    assert max(constants) + 0.05 < adaptive < plan_traffic(task).final_score


@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_the_adaptive_rule_plays_a_server_of_another_size_in_the_same_way(factor: float) -> None:
    task = get_traffic_task("task_hard")
    scaled = TrafficConfig(server_capacity=100.0 * factor, traffic_scale=factor, max_queue=round(500 * factor))
    actions = []
    for config in (task.config, scaled):
        batch, agent = TrafficBatch(task, 1, config), AdaptiveTraffic(queue_budget=0.0)
        agent.reset(task, config, [0])
        observation, taken = batch.observation(), []
        while not batch.done.all():
            taken.append(agent.act(observation)[0])
            observation = batch.step(np.array(taken[-1:])).observation
        actions.append(taken)
    assert actions[0] == actions[1]


def test_the_adaptive_rule_drops_most_when_nothing_fits() -> None:
    task = get_traffic_task("task_hard")
    agent = AdaptiveTraffic()
    agent.reset(task, TrafficConfig(server_capacity=5.0), [0])
    assert ACTION_NAMES[agent.act(TrafficBatch(task, 1).observation())[0]] == "drop_aggressive"


def test_random_play_depends_on_the_seed_of_its_episode_alone() -> None:
    task = get_traffic_task("task_hard")
    together = evaluate_traffic(RandomTraffic(), task, seeds=[3, 4, 5])
    alone = [evaluate_traffic(RandomTraffic(), task, seeds=[seed]) for seed in (3, 4, 5)]
    assert together.cumulative_reward.tolist() == [o.cumulative_reward[0] for o in alone]
    assert len(set(together.cumulative_reward.tolist())) == 3


@pytest.mark.parametrize("budget", [-0.1, 1.1, float("nan")])
def test_a_queue_budget_outside_its_range_is_refused(budget: float) -> None:
    with pytest.raises(InvalidConfigError) as refused:
        AdaptiveTraffic(budget)
    assert refused.value.field == "queue_budget"


def test_a_constant_of_an_unknown_action_is_refused_with_the_names() -> None:
    with pytest.raises(InvalidConfigError) as refused:
        ConstantTraffic("throttle_55")
    assert refused.value.field == "action"
    assert all(name in str(refused.value) for name in ACTION_NAMES)


def test_the_table_of_scores_shows_every_agent_and_no_negative_regret() -> None:
    results = [compare_traffic(task.task_id) for task in TASKS]
    for result in results:
        assert [row["agent"] for row in result["agents"]] == list(TRAFFIC_AGENTS)
        assert min(min(row["score_regret"], row["return_regret"]) for row in result["agents"]) == 0.0
