"""What feedback is worth on a task: the best constant, the best timetable, policies, and timetables with foresight.

    python -m benchmarks.policies.ceilings --task 3 --task autoscale-mix      other tasks keep their results

The timetable sets actions by the clock and observes nothing. It is searched on the training seeds, as the constant and
the searched policy are, from what the policies do there: from the median of their actions in every second. A timetable
with foresight is searched on the very episode that it plays, from all that the policies did in it, on a few of the
held-out seeds: a lower bound of what perfect foresight gives, called ceiling in the results. All others are means over
30 held-out seeds, with 95% intervals of the differences from the constant, paired by seed, and over those few.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np

from agents.episodes import run_episodes
from agents.evaluate import interval, paired
from agents.policies.ppo import has_shipped_policy
from agents.registry import make_agent
from agents.search.timetable import Timetables, TimetableSearch
from agents.seeds import HELD_OUT_SEEDS, TRAINING_SEEDS
from benchmarks.report import spread, store, stored, table
from inferencegym.tasks import TaskSpec, get_task

TASKS = ("2", "3", "autoscale", "autoscale-mix")
CHILDREN = 64
CLAIRVOYANT_CHILDREN = 192


def agents_of(task: TaskSpec) -> dict[str, str]:
    """Policies that observe, by the name that the table gives them."""
    found = {"heuristic": "heuristic", "searched policy": "best_adaptive"}
    if task.fleet.max_replicas is not None:
        found = {"HPA": "hpa", "planner": "planner", "searched policy": "best_adaptive"}
    return {**found, "PPO": "ppo"} if has_shipped_policy(task) else found


def on_task(task: TaskSpec, generations: int, n_clairvoyant: int) -> dict[str, Any]:
    """Scores on a task; the ceiling is that of the first held-out seeds."""
    agents = {"best constant": "best_static", **agents_of(task)}
    taught = [run_episodes(task, make_agent(name, task), TRAINING_SEEDS).actions for name in agents.values()]
    medians = np.median(taught, axis=2)  # (agents, T, k)
    timetable, trained = TimetableSearch(task, TRAINING_SEEDS, CHILDREN).best(medians, generations)
    played = {label: run_episodes(task, make_agent(name, task), HELD_OUT_SEEDS) for label, name in agents.items()}
    rows = np.tile(timetable, (len(HELD_OUT_SEEDS), 1, 1))
    played["best timetable"] = run_episodes(task, Timetables(rows), HELD_OUT_SEEDS)
    scores = {label: results.scores() for label, results in played.items()}
    base = scores["best constant"]
    ceilings = [
        TimetableSearch(task, [seed], CLAIRVOYANT_CHILDREN).best(
            np.stack([results.actions[:, i] for results in played.values()]), generations
        )[1]
        for i, seed in enumerate(HELD_OUT_SEEDS[:n_clairvoyant])
    ]
    found = {
        "task": str(task.task_id),
        "generations": generations,
        "timetable_on_training_seeds": trained,
        "scores": {
            label: {
                "score": interval(values).to_dict(),
                "over_constant": paired(values, base).to_dict(),
                "on_the_ceiling_seeds": float(values[:n_clairvoyant].mean()),
            }
            for label, values in scores.items()
        },
        "ceiling": {"seeds": n_clairvoyant, "mean": float(np.mean(ceilings))},
    }
    print(section(found))
    return found


def section(found: dict[str, Any]) -> str:
    """Markdown of a task's scores on all seeds and on the few. The last column runs from the constant to foresight."""
    ceiling = found["ceiling"]
    few, every = f"first {ceiling['seeds']} seeds", f"{len(HELD_OUT_SEEDS)} seeds"
    lines = [
        f"Task `{found['task']}`, {found['generations']} generations of each search:",
        "",
    ]
    rows = []
    base = found["scores"]["best constant"]["on_the_ceiling_seeds"]
    for label, row in found["scores"].items():
        score, over = row["score"], row["over_constant"]
        seen = row["on_the_ceiling_seeds"]
        share = (seen - base) / (ceiling["mean"] - base)
        difference = "" if label == "best constant" else spread(over, "+")
        rows.append((label, spread(score), difference, f"{seen:.3f}", f"{share:.2f}"))
    rows.append(("best timetable found with foresight", "", "", f"{ceiling['mean']:.3f}", "1.00"))
    heads = (f"score, {every}", f"over the best constant, {every}", f"score, {few}")
    return "\n".join([*lines, *table(("policy", *heads, f"share of foresight's gain, {few}"), rows)]) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Search, play, write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", action="append", help=f"task id; may be given several times (default: {TASKS})")
    parser.add_argument("--generations", type=int, default=150, help="generations of every search")
    parser.add_argument("--clairvoyant", type=int, default=5, help="held-out seeds whose ceiling is searched")
    options = parser.parse_args(arguments)
    tasks = [get_task(task) for task in options.task or TASKS]
    entries = {each["task"]: each for each in stored("ceilings")}
    entries |= {str(task.task_id): on_task(task, options.generations, options.clairvoyant) for task in tasks}
    found = [entries[task_id] for task_id in sorted(entries)]
    store("ceilings", found, markdown(found))


def markdown(found: Sequence[dict[str, Any]]) -> str:
    """The document's part."""
    head = "<!-- written by benchmarks/policies/ceilings.py; do not edit -->\n\n"
    return head + "\n".join(map(section, found))


if __name__ == "__main__":
    main()
