"""Scores of the traffic controller's agents against the exact optimum.

    python benchmarks/traffic.py           a table
    python benchmarks/traffic.py --json    the same as JSON

The traffic has no randomness, so every agent but ``random`` has one number per task; ``random`` is the mean over its
seeds with a 95 % confidence interval (Student's t). The optimum is that of :mod:`agents.traffic_planner`: no sequence
of actions earns more, so regret = optimum - earned.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from typing import Any

from agents.traffic import TRAFFIC_AGENTS, evaluate_traffic
from agents.traffic_planner import plan_traffic
from inferencegym.traffic import TrafficTask, get_traffic_task, list_traffic_tasks
from simulator.traffic import FloatArray

SEEDS = range(1000, 1100)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Scores of the traffic controller's agents against the exact optimum.")
    parser.add_argument("--task", action="append", help="task id; may be given several times (default: all)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    tasks = [get_traffic_task(task_id) for task_id in options.task] if options.task else list_traffic_tasks()
    results = [measure(task) for task in tasks]
    print(json.dumps(results, indent=2) if options.json else "\n\n".join(map(table, results)))


def measure(task: TrafficTask) -> dict[str, Any]:
    """Optimum of score and return, and what each agent earned of them."""
    optimum = {
        "final_score": plan_traffic(task).final_score,
        "return": plan_traffic(task, objective="return").cumulative_reward,
    }
    agents = []
    for name, make in TRAFFIC_AGENTS.items():
        outcome = evaluate_traffic(make(), task, SEEDS if name == "random" else (0,))
        score, earned = interval(outcome.final_score), interval(outcome.cumulative_reward)
        agents.append(
            {
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
        )
    return {"task": task.task_id, "optimum": optimum, "agents": agents}


def interval(values: FloatArray) -> tuple[float, float]:
    """Mean and half width of its 95 % confidence interval; 0 for a single value, which is exact."""
    if len(values) < 2:
        return float(values[0]), 0.0
    from scipy.stats import t

    half = t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / math.sqrt(len(values))
    return float(values.mean()), float(half)


def table(result: dict[str, Any]) -> str:
    optimum = result["optimum"]
    lines = [
        f"{result['task']}: optimum of final_score {optimum['final_score']:.4f}, of the return {optimum['return']:.4f}",
        f"{'agent':<16}{'steps':>7}{'final_score':>19}{'regret':>9}{'return':>19}{'regret':>10}",
    ]
    for row in result["agents"]:
        score = number(row["final_score"], row["final_score_ci95"])
        earned = number(row["return"], row["return_ci95"])
        lines.append(
            f"{row['agent']:<16}{row['steps']:>7.1f}{score:>19}{row['score_regret']:>9.4f}"
            f"{earned:>19}{row['return_regret']:>10.4f}"
        )
    return "\n".join(lines)


def number(mean: float, half_width: float) -> str:
    return f"{mean:.4f} +- {half_width:.4f}" if half_width else f"{mean:.4f}"


if __name__ == "__main__":
    main()
