"""Autoscalers on the tasks that scale: scores with intervals, and the value of the knobs and of the forecast.

    python -m benchmarks.policies.autoscalers                    writes results/autoscalers.json, .md and a figure
    python -m benchmarks.policies.autoscalers --reference 30     plays more episodes in the discrete-event reference
    python -m benchmarks.policies.autoscalers --task fleet-mix   plays this task, and keeps the other results

Every agent plays the same 30 held-out seeds; differences from the best constant action are paired. The table also has
scores in the discrete-event reference, on fewer seeds, and the score of the best timetable that another report found
(``python -m benchmarks.policies.ceilings``, or ``inferencegym quality``). The forecast is varied by playing the same
task with other values of ``forecast_error``; with 0 only the surges are unknown.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import numpy as np

from agents.episodes import EpisodeResults, run_episodes
from agents.evaluate import Evaluation, evaluate, evaluation_of, interval, paired
from agents.policies.ppo import has_shipped_policy
from agents.protocol import Agent, FloatArray
from agents.registry import make_agent
from agents.seeds import HELD_OUT_SEEDS
from benchmarks.policies.tasks import timetables
from benchmarks.report import FIGURES, spread, store, stored, table
from env.batch import ServingBatch
from env.reference import ReferenceFleet
from inferencegym.models import ACTION_FIELDS
from inferencegym.tasks import TaskSpec, get_calibration, list_tasks

AGENTS = ("naive", "best_static", "hpa", "kpa", "scheduled", "planner", "best_adaptive")
COMBINED = (("naive", "best_adaptive"), ("heuristic", "best_static"), ("heuristic", "best_adaptive"))
"""Agents whose five knobs are combined with the replicas of another agent."""
ERRORS = (0.0, 0.2, 0.4)
DRAWN = {"best_static": "best constant", "hpa": "HPA", "best_adaptive": "tuned planner"}
EPISODE_SEED = HELD_OUT_SEEDS[0]


def scaling_tasks() -> list[TaskSpec]:
    """Shipped tasks whose actions set the number of replicas."""
    return [task for task in list_tasks(include_recorded=True) if task.fleet.max_replicas is not None]


class Combined:
    """Agent with the five knobs of one agent and the replicas of another."""

    def __init__(self, knobs: Agent, replicas: Agent) -> None:
        self._knobs, self._replicas = knobs, replicas

    def reset(self, n_rows: int) -> None:
        self._knobs.reset(n_rows)
        self._replicas.reset(n_rows)

    def act(self, observation: FloatArray) -> FloatArray:
        knobs, replicas = self._knobs.act(observation), self._replicas.act(observation)
        return np.column_stack([knobs[:, : len(ACTION_FIELDS)], replicas[:, len(ACTION_FIELDS)]])


def agents_of(task: TaskSpec) -> dict[str, Agent]:
    """Agents for a task by name, with combinations that show the value of knobs and replicas separately."""
    chosen = {name: make_agent(name, task) for name in AGENTS if name != "scheduled" or task.day is not None}
    if has_shipped_policy(task):
        chosen["ppo"] = make_agent("ppo", task)
    # Separate prefill GPUs double the cost of every replica, which the heuristic ignores, so it may not use them.
    together = replace(task, active_actions=tuple(k for k in task.active_actions if k != "prefill_disagg"))
    for knobs, replicas in COMBINED:
        chosen[f"{knobs}, replicas of {replicas}"] = Combined(make_agent(knobs, together), make_agent(replicas, task))
    return chosen


def on_task(task: TaskSpec, n_reference: int) -> dict[str, Any]:
    """Scores of all agents on a task."""
    agents = agents_of(task)
    fluid = {name: evaluate(agent, task, name=name) for name, agent in agents.items()}
    rows = []
    for name, found in fluid.items():
        played = run_episodes(task, agents[name], HELD_OUT_SEEDS[:n_reference], dynamics=ReferenceFleet)
        rows.append(
            {
                "agent": name,
                "score": interval(found.scores).to_dict(),
                "over_constant": paired(found.scores, fluid["best_static"].scores).to_dict(),
                "breakdown": {part: float(values.mean()) for part, values in found.breakdown.items()},
                "replicas": mean_replicas(task, agents[name]),
                "reference": float(evaluation_of(name, played).scores.mean()),
                "fluid_on_the_same": float(found.scores[:n_reference].mean()),
            }
        )
        print(f"{task.task_id}: {name} {rows[-1]['score']['mean']:.3f}, reference {rows[-1]['reference']:.3f}")
    return {"task": str(task.task_id), "reference_seeds": n_reference, "agents": rows}


def mean_replicas(task: TaskSpec, agent: Agent) -> float:
    """Mean number of requested replicas over the held-out seeds."""
    return float(run_episodes(task, agent, HELD_OUT_SEEDS).actions[..., 5].mean())


def forecast_errors(task: TaskSpec) -> list[dict[str, Any]]:
    """Mean scores of the agents on days with another standard deviation from the forecast."""
    assert task.day is not None
    rows = []
    for error in ERRORS:
        other = replace(task, day=replace(task.day, forecast_error=error))
        calibration = get_calibration(task.task_id)
        scores: dict[str, Evaluation] = {}
        for name, agent in agents_of(task).items():
            played = run_episodes(other, agent, HELD_OUT_SEEDS, calibration=calibration)
            scores[name] = evaluation_of(name, played)
        rows.append({"forecast_error": error, "scores": {n: interval(e.scores).to_dict() for n, e in scores.items()}})
    return rows


def markdown(found: dict[str, Any]) -> str:
    """The tables."""
    lines = ["<!-- written by benchmarks/policies/autoscalers.py; do not edit -->"]
    blind = timetables()
    for one in found["tasks"]:
        lines += [
            f"`{one['task']}`, {len(HELD_OUT_SEEDS)} held-out seeds, 95% intervals; reference: mean of "
            f"{one['reference_seeds']} of them, and the fluid model's on the same:",
            "",
        ]
        rows = []
        for row in one["agents"]:
            score, gain, parts = row["score"], row["over_constant"], row["breakdown"]
            cells = [f"{parts[name]:.2f}" for name in ("slo", "gpus", "churn")]
            cells += [f"{row['replicas']:.1f}", f"{row['reference']:.3f} / {row['fluid_on_the_same']:.3f}"]
            rows.append((row["agent"], spread(score), spread(gain, "+"), *cells))
        heads = ("policy", "score", "over the best constant", "objectives", "GPUs", "churn", "replicas")
        lines += table((*heads, "reference / fluid"), rows)
        lines += [f"| best timetable (by the clock) | {spread(blind[one['task']])} |" + " |" * 6, ""]
    errors = found["forecast_errors"]
    names = list(errors[0]["scores"])
    lines += [
        "Days that stray from the forecast by another standard deviation (`autoscale` has 0.2):",
        "",
        *table(
            ("forecast error", *names),
            [(f"{row['forecast_error']:g}", *(f"{row['scores'][n]['mean']:.3f}" for n in names)) for row in errors],
        ),
    ]
    return "\n".join(lines) + "\n"


def draw(task: TaskSpec) -> None:
    """Load, replicas, time to first token and cost of one episode under three agents."""
    import matplotlib.pyplot as plt

    played: dict[str, EpisodeResults] = {
        name: run_episodes(task, make_agent(name, task), [EPISODE_SEED]) for name in DRAWN
    }
    seconds = np.arange(task.episode_length)
    figure, axes = plt.subplots(4, 1, figsize=(9, 9), sharex=True, layout="constrained")
    load = ServingBatch(task, 1)
    load.reset([EPISODE_SEED])
    axes[0].plot(seconds, load.fleet.arrivals[0].sum(axis=1), color="0.4", linewidth=0.8)
    axes[0].set_ylabel("requests/s")
    for name, results in played.items():
        label = f"{DRAWN[name]} ({results.scores()[0]:.2f})"
        axes[1].step(seconds, results.actions[:, 0, 5], where="post", label=label)
        axes[2].plot(seconds, results.metrics["ttft_p50_ms"][:, 0], linewidth=0.8)
        spent = results.metrics["cost_per_1k"][:, 0] * results.metrics["tokens_per_sec"][:, 0] / 1000.0
        axes[3].plot(seconds, np.cumsum(spent))
    axes[1].set_ylabel("replicas asked for")
    axes[1].legend(loc="upper left", fontsize="small")
    axes[2].axhline(task.classes[0].slo_ms, color="0.4", linestyle="--")
    axes[2].set_yscale("log")
    axes[2].set_ylabel("TTFT p50 (ms)")
    axes[3].set_ylabel("GPUs paid (cost units)")
    axes[3].set_xlabel("second of the episode")
    figure.savefig(FIGURES / "autoscaling.png", dpi=110)


def main() -> None:
    """Play, write the tables, draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", type=int, default=5, help="episodes played in the discrete-event reference")
    parser.add_argument("--figure", action="store_true", help="draw the figure alone")
    tasks = scaling_tasks()
    ids = [str(task.task_id) for task in tasks]
    parser.add_argument("--task", action="append", choices=ids, help="id of a task to play, repeatable (default: all)")
    args = parser.parse_args()
    with_forecast = next(task for task in tasks if task.day is not None)
    if args.figure:
        draw(with_forecast)
        return
    found = stored("autoscalers") if args.task else {"tasks": [], "forecast_errors": forecast_errors(with_forecast)}
    entries = {one["task"]: one for one in found["tasks"]}
    for task in tasks:
        if str(task.task_id) in (args.task or ids):
            entries[str(task.task_id)] = on_task(task, args.reference)
    found["tasks"] = list(entries.values())
    store("autoscalers", found, markdown(found))
    draw(with_forecast)


if __name__ == "__main__":
    main()
