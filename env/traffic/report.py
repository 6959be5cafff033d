"""Scores of the traffic controller's agents against the exact optimum.

The traffic has no randomness, so every agent but ``random`` has one number per task; ``random`` is the mean over its
seeds with a 95% confidence interval (Student's t). The optimum is that of :mod:`env.traffic.planner`: no
sequence of actions earns more, so regret = optimum - earned.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from env.traffic.agents import TRAFFIC_AGENTS, TrafficAgent, agent_called, evaluate_traffic
from env.traffic.model import FloatArray
from env.traffic.planner import plan_traffic
from env.traffic.tasks import TrafficTask, get_traffic_task
from inferencegym.tasks import TaskId

SEEDS: Final = range(10_000, 10_100)  # held out, as `inferencegym evaluate --seeds 100` plays them


def compare_traffic(task_id: TaskId, names: Sequence[str] = ("all",), seeds: Sequence[int] = SEEDS) -> dict[str, Any]:
    """Optimum of score and return of a task, and the results of each named agent (``all``: every agent)."""
    task = get_traffic_task(task_id)
    asked = list(TRAFFIC_AGENTS) if "all" in names else list(dict.fromkeys(names))
    players = {name: agent_called(name) for name in asked}
    optimum = {
        "final_score": plan_traffic(task).final_score,
        "return": plan_traffic(task, objective="return").cumulative_reward,
    }
    agents = [_measure(name, agent, task, seeds, optimum) for name, agent in players.items()]
    return {"task": task.task_id, "optimum": optimum, "agents": agents}


def _measure(
    name: str, agent: TrafficAgent, task: TrafficTask, seeds: Sequence[int], optimum: dict[str, float]
) -> dict[str, Any]:
    outcome = evaluate_traffic(agent, task, seeds if name == "random" else (0,))
    score, earned = interval(outcome.final_score), interval(outcome.cumulative_reward)
    return {
        "agent": name,
        "episodes": len(outcome.steps),
        "steps": float(outcome.steps.mean()),
        "final_score": score[0],
        "final_score_ci95": score[1],
        "score_regret": optimum["final_score"] - score[0],
        "return": earned[0],
        "return_ci95": earned[1],
        "return_regret": optimum["return"] - earned[0],
    }


def interval(values: FloatArray) -> tuple[float, float]:
    """Mean and half width of its 95% confidence interval; 0 for a single value, which is exact."""
    if len(values) < 2:
        return float(values[0]), 0.0
    from scipy.stats import t

    half = t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / math.sqrt(len(values))
    return float(values.mean()), float(half)


def traffic_table(result: dict[str, Any]) -> str:
    """A comparison as text."""
    optimum = result["optimum"]
    lines = [
        f"{result['task']}: optimum of final_score {optimum['final_score']:.4f}, of the return {optimum['return']:.4f}",
        f"{'agent':<16}{'steps':>7}{'final_score':>19}{'regret':>9}{'return':>19}{'regret':>10}",
    ]
    for row in result["agents"]:
        score = _number(row["final_score"], row["final_score_ci95"])
        earned = _number(row["return"], row["return_ci95"])
        lines.append(
            f"{row['agent']:<16}{row['steps']:>7.1f}{score:>19}{row['score_regret']:>9.4f}"
            f"{earned:>19}{row['return_regret']:>10.4f}"
        )
    return "\n".join(lines)


def _number(mean: float, half_width: float) -> str:
    return f"{mean:.4f} +- {half_width:.4f}" if half_width else f"{mean:.4f}"
