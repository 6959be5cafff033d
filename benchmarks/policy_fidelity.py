"""Do policies that the fluid model scores high score high in the discrete-event reference, which follows every request?

    python benchmarks/policy_fidelity.py               every agent on every task: results/policy_fidelity.json and .md
    python benchmarks/policy_fidelity.py --task 1      one task; the others keep their results

Every agent plays whole episodes second by second in both, with the same seeds: the same arrivals, prompts and operator
times. In the reference it sees what the reference did. Canaries are policies that exploit an error of the fluid model.
The figure needs the extra `report` (matplotlib).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from agents.episodes import EpisodeResults, run_episodes
from agents.evaluate import agents_for
from agents.protocol import Agent, FloatArray
from agents.registry import make_agent
from agents.seeds import HELD_OUT_SEEDS
from env.reference import ReferenceBatch
from inferencegym.tasks import TaskSpec, list_tasks
from simulator.offline.reference_episode import Policies
from simulator.tables import load_tables
from simulator.workload import load_source

HERE = Path(__file__).resolve().parent
CONVENTIONS: Final[Mapping[str, Policies]] = {
    "fcfs": Policies(),
    "priority": Policies("priority"),
    "priority, drain": Policies("priority", "drain"),
}
"""Conventions of the reference; tasks with one class are played under the first."""
KV_DIP: Final = 0.1
DIP_EVERY_S: Final = 10


class DippingAgent:
    """Canary: an agent whose KV budget falls to 0.1 for one second in ten."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._step = 0

    def reset(self, n_rows: int) -> None:
        """Start new episodes."""
        self._agent.reset(n_rows)
        self._step = 0

    def act(self, observation: FloatArray) -> FloatArray:
        """The agent's knobs, or those with the small pool."""
        knobs = np.array(self._agent.act(observation))
        if self._step % DIP_EVERY_S == DIP_EVERY_S - 1:
            knobs[:, 0] = KV_DIP
        self._step += 1
        return knobs


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--task", action="append", help="task id, repeatable (default: all)")
    parser.add_argument("--seeds", type=int, default=5, help="held-out seeds (default 5)")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "policy_fidelity.json")
    parser.add_argument("--no-figure", action="store_true", help="numbers only")
    options = parser.parse_args(arguments)
    known = json.loads(options.out.read_text())["tasks"] if options.task and options.out.exists() else {}
    for task in list_tasks(include_recorded=True):
        if not options.task or str(task.task_id) in options.task:
            known[str(task.task_id)] = measure(task, HELD_OUT_SEEDS[: options.seeds])
            options.out.write_text(json.dumps({"tasks": known}, indent=1) + "\n")
    text = markdown(known)
    options.out.with_suffix(".md").write_text(text)
    print(text)
    if not options.no_figure:
        draw(known, HERE / "figures" / "policy_fidelity.png")


def measure(task: TaskSpec, seeds: Sequence[int]) -> dict[str, Any]:
    """Grades and their parts of every agent on a task, in the fluid model and in the reference."""
    began = time.perf_counter()
    names = CONVENTIONS if len(load_source(task, load_tables()).stats.names) > 1 else ["fcfs"]
    agents = {name: partial(make_agent, name, task) for name in agents_for(task, ["all"])}
    agents["heuristic, KV dips"] = lambda: DippingAgent(make_agent("heuristic", task))
    rows = {}
    for label, make in agents.items():
        rows[label] = {"fluid": told(run_episodes(task, make(), seeds))}
        for name in names:
            play = partial(ReferenceBatch, policies=CONVENTIONS[name])
            rows[label][name] = told(run_episodes(task, make(), seeds, batch_type=play))
        print(f"task {task.task_id}, {label}: " + ", ".join(f"{k} {v['score']:.3f}" for k, v in rows[label].items()))
    return {"seeds": list(seeds), "agents": rows, "seconds": round(time.perf_counter() - began)}


def told(results: EpisodeResults) -> dict[str, Any]:
    """Mean grade and mean parts of it."""
    parts = {name: round(float(part.mean()), 4) for name, part in results.breakdown().items()}
    return {"score": round(float(results.scores().mean()), 4), "parts": parts}


def markdown(tasks: Mapping[str, Any]) -> str:
    """The tables of the document."""
    lines = ["<!-- written by benchmarks/policy_fidelity.py; do not edit -->"]
    for task_id, result in tasks.items():
        columns = list(next(iter(result["agents"].values())))
        lines += [
            "",
            f"**Task {task_id}**: mean grade over {len(result['seeds'])} held-out seeds.",
            "",
            "| agent | " + " | ".join("fluid model" if c == "fluid" else f"reference, {c}" for c in columns) + " |",
            "|---|" + "---|" * len(columns),
        ]
        for name, row in result["agents"].items():
            cells = [f"{row[c]['score']:.3f}" for c in columns]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def draw(tasks: Mapping[str, Any], path: Path) -> None:
    """Grades in the reference over grades in the fluid model, a panel for each convention."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(CONVENTIONS), figsize=(13.0, 4.6), sharey=True, constrained_layout=True)
    for axes, convention in zip(panels, CONVENTIONS, strict=True):
        for i, (task_id, result) in enumerate(tasks.items()):
            points = [
                (row["fluid"]["score"], row.get(convention, row["fcfs"])["score"]) for row in result["agents"].values()
            ]
            axes.scatter(*zip(*points, strict=True), color=f"C{i}", label=f"task {task_id}", s=24, linewidths=0)
        axes.plot((0, 1), (0, 1), color="black", linewidth=0.8)
        axes.set(title=f"reference: {convention}", xlabel="grade in the fluid model", xlim=(0, 1), ylim=(0, 1))
    panels[0].set_ylabel("grade in the reference")
    panels[0].legend(fontsize=8)
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main()
