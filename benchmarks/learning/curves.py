"""Training report: PPO with five seeds and both rewards, learning curves, scores, and policies to ship.

    python -m benchmarks.learning.curves             everything
    python -m benchmarks.learning.curves --ship      and copy the chosen policies to agents/data/policies
    python -m benchmarks.learning.curves --add       only runs that the stored results lack
    python -m benchmarks.learning.curves --task autoscale-mix --steps 2400000 --plan-seeds 0 --warm-seeds 0 --add

Every run is scored on the held-out seeds as it trains, but these choose nothing: validation seeds choose the policy
that a run keeps, and the run to ship. Runs are trained in parallel, one per core. Results go to
``benchmarks/results/learning.json`` and ``.md``, curves to ``benchmarks/figures/learning.png`` after every run, and
each run's own files below ``--out``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from agents.evaluate import bracketed, bracketed_score, compare, evaluate, interval, paired
from agents.policies.ppo import PpoAgent
from agents.policies.stored import POLICY_DIR
from agents.ppo_demo import local_envs, rise, settings_for, train
from agents.seeds import HELD_OUT_SEEDS
from benchmarks.policies.tasks import timetables
from benchmarks.report import FIGURES, spread, store, stored, table
from env.threads import CORES
from inferencegym.tasks import TaskSpec, get_task

SCRATCH, PLAN, WARM, LONG = "from scratch", "from scratch, the formula's reward", "warm-started", "from scratch, longer"
"""Kinds of runs; unless stated otherwise, the reward is the grade."""
RIVALS = ["random", "naive", "vllm_defaults", "random_search", "heuristic", "best_static", "best_adaptive"]
SCALING_RIVALS = ["naive", "vllm_defaults", "random_search", "best_static", "hpa", "kpa", "planner", "best_adaptive"]
LEVELS = ("best_static", "heuristic", "hpa", "planner", "best_adaptive")
"""Rivals that are drawn as levels, and compared with the mean of the runs."""


def rivals_of(task: TaskSpec) -> list[str]:
    """Agents that PPO is compared with on a task."""
    return RIVALS if task.fleet.max_replicas is None else SCALING_RIVALS


@dataclass(frozen=True, slots=True)
class Job:
    """A training run."""

    task_id: str
    kind: str
    seed: int
    steps: int
    out: Path

    @property
    def key(self) -> tuple[str, str, int]:
        """Key that identifies the run."""
        return self.task_id, self.kind, self.seed


def one_run(job: Job) -> dict[str, Any]:
    """Train once; returns wall time, the scores during training, and those of the policy that is kept."""
    task = get_task(job.task_id)
    reward = "plan" if job.kind == PLAN else "grade"
    settings = settings_for(task, from_scratch=job.kind != WARM, reward=reward)
    started = time.perf_counter()
    make_envs = partial(local_envs, task.task_id, settings)
    trained = train(make_envs, job.out, steps=job.steps, seed=job.seed, settings=settings, progress=False)
    wall_s = time.perf_counter() - started
    held_out = evaluate(PpoAgent(trained.policy, task), task, HELD_OUT_SEEDS, "ppo")
    return {
        "kind": job.kind,
        "seed": job.seed,
        "steps": int(trained.model.num_timesteps),
        "wall_s": wall_s,
        "rise": rise(trained.episodes),
        "scores": held_out.scores.tolist(),
        "score": interval(held_out.scores).to_dict(),
        "breakdown": {name: float(part.mean()) for name, part in held_out.breakdown.items()},
        "validation_score": float(trained.policy.trained["validation_score"]),
        "curve": [(each.step, each.held_out) for each in trained.scores],
    }


def chosen_of(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The run from scratch that the validation seeds chose."""
    return max((run for run in runs if run["kind"] == SCRATCH), key=lambda run: float(run["validation_score"]))


def entry(task: TaskSpec, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Stored results of a task: its runs, and the table of those from scratch."""
    scratch = [run for run in runs if run["kind"] == SCRATCH]
    settings = asdict(settings_for(task, from_scratch=True))
    return {"settings": settings, "runs": runs, "table": comparison(task, scratch, chosen_of(runs))}


def comparison(task: TaskSpec, runs: list[dict[str, Any]], chosen: dict[str, Any]) -> dict[str, Any]:
    """Scores of PPO over its training seeds, and paired differences from other agents on the same held-out seeds."""
    rivals = compare(task, rivals_of(task), HELD_OUT_SEEDS)
    per_seed = np.array([run["scores"] for run in runs])  # (training seeds, held-out seeds)
    mean_of_runs = per_seed.mean(axis=0)
    entries = {entry["agent"]: entry for entry in rivals["agents"]}
    return {
        "rivals": {name: entry["score"] for name, entry in entries.items()},
        "ppo_by_training_seed": interval(per_seed.mean(axis=1)).to_dict() if len(runs) > 1 else None,
        "ppo_worst_seed": float(per_seed.mean(axis=1).min()),
        "shipped": {key: chosen[key] for key in ("seed", "steps", "score", "validation_score")},
        "mean_run_over": {
            name: paired(mean_of_runs, np.array(entry["scores"])).to_dict() for name, entry in entries.items()
        },
        "shipped_over": {
            name: paired(np.array(chosen["scores"]), np.array(entry["scores"])).to_dict()
            for name, entry in entries.items()
        },
    }


def curves(results: dict[str, Any], path: Path) -> None:
    """Plot the scores on held-out seeds over steps, one line per run, with the levels of other agents."""
    columns = len(results) if len(results) <= 3 else -(-len(results) // 2)
    rows = -(-len(results) // columns)
    figure = Figure(figsize=(6.2 * columns, 4.2 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = np.ravel(figure.subplots(rows, columns))
    for axis in axes[len(results) :]:
        axis.remove()
    for axis, (task_id, result) in zip(axes, results.items(), strict=False):
        for colour, kind in zip(("C0", "C1", "C2"), (SCRATCH, PLAN, WARM), strict=True):
            runs = [run for run in result["runs"] if run["kind"] == kind]
            for i, run in enumerate(runs):
                label = f"PPO, {kind}, {len(runs)} seed{'s' * (len(runs) > 1)}" if i == 0 else None
                axis.plot(*np.array(run["curve"]).T, color=colour, alpha=0.8, linewidth=1.2, label=label)
        levels = [rival for rival in LEVELS if rival in result["table"]["rivals"]]
        for style, rival in zip(("--", ":", "-.", (0, (8, 3, 1, 3, 1, 3))), levels, strict=False):
            axis.axhline(result["table"]["rivals"][rival]["mean"], color="black", linestyle=style, label=rival)
        task = get_task(task_id)
        axis.set(title=f"{task.heading}: {task.name}", xlabel="steps", ylabel="mean score, held-out seeds")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8, loc="lower right")
    figure.savefig(path, dpi=120)


def report(results: dict[str, Any]) -> str:
    """The tables as Markdown."""
    lines = [
        "Written by `python -m benchmarks.learning.curves`: PPO from scratch over its training seeds. Scores are means",
        "over 30 held-out seeds; differences are those of the mean of the runs, paired by held-out seed.",
        "",
    ]
    summaries = []
    for task_id, result in results.items():
        means = [run["score"]["mean"] for run in result["runs"] if run["kind"] == SCRATCH]
        over = result["table"]["mean_run_over"]
        cells = [spread(over[rival], "+") if rival in over else "" for rival in LEVELS]
        lowest_to_highest = f"{min(means):.3f} to {max(means):.3f}"
        summaries.append((task_id, len(means), f"{np.mean(means):.3f}", lowest_to_highest, *cells))
    heads = ("task", "runs", "mean", "lowest to highest run", *(f"over {rival}" for rival in LEVELS))
    lines += [
        *table(heads, summaries),
        "",
        "<!-- details -->",
        "",
        "All policies, with 95% intervals over the held-out seeds. Each PPO row is one training run, the one that the",
        "validation seeds chose. Those from scratch on tasks 1 to 3 are the shipped policies; on tasks that scale they",
        "are second runs, and the shipped policies are in `docs/autoscaling.md`; `autoscale-azure` has none.",
        "",
    ]
    agents = []
    blind = timetables()
    for task_id, result in results.items():
        shipped = result["table"]["shipped"]
        rows = {**result["table"]["rivals"], "best timetable": blind[task_id]}
        rows[f"PPO, from scratch, {shipped['steps']:,} steps"] = shipped["score"]
        warm = [run for run in result["runs"] if run["kind"] == WARM]
        if warm:
            best = max(warm, key=lambda run: float(run["validation_score"]))
            rows[f"PPO, warm-started, {best['steps']:,} steps"] = best["score"]
        for name, i in sorted(rows.items(), key=lambda row: float(row[1]["mean"])):
            over = result["table"]["shipped_over"].get(name)
            gap = "" if over is None else bracketed(over, "+")
            agents.append((task_id, name, *bracketed_score(i).split(" ", 1), gap))
    runs = [
        (task_id, run["kind"], run["seed"], f"{run['steps']:,}", f"{run['score']['mean']:.3f}",
         f"{run['curve'][-1][1]:.3f}", f"{run['wall_s']:.0f}")
        for task_id, result in results.items()
        for run in result["runs"]
    ]  # fmt: skip
    lines += table(("task", "agent", "score", "95% interval", "PPO over it, paired"), agents)
    lines += ["", "Every run; the score is that of the policy that the validation seeds chose.", ""]
    lines += table(("task", "PPO", "training seed", "steps", "score", "score at the end", "seconds"), runs)
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="PPO on every task and seed, scored on held-out traffic.")
    parser.add_argument("--out", type=Path, default=Path("build", "learning"), help="files of the runs")
    parser.add_argument(
        "--task",
        action="append",
        help="task id, repeatable; others keep their results (default: all)",
    )
    parser.add_argument("--seeds", type=int, default=5, help="runs from scratch (default 5)")
    parser.add_argument("--plan-seeds", type=int, default=5, help="runs with the formula's reward (default 5)")
    parser.add_argument("--warm-seeds", type=int, default=2, help="runs with a warm start (default 2)")
    parser.add_argument("--steps", type=int, default=600_000, help="steps of a run (default 600000)")
    parser.add_argument("--long-task", default="3", help="task of a run of three times the steps (default 3)")
    parser.add_argument("--ship", action="store_true", help="copy the chosen policies to agents/data/policies")
    parser.add_argument("--add", action="store_true", help="keep the stored runs and add those that are missing")
    args = parser.parse_args()
    if args.add and args.ship:
        parser.error("--ship needs the files of all runs: leave --add out")
    results = stored("learning")["tasks"]
    task_ids: list[str] = args.task or ["1", "2", "3"]
    n_runs = {SCRATCH: args.seeds, PLAN: args.plan_seeds, WARM: args.warm_seeds}
    jobs = [
        Job(task_id, kind, seed, args.steps, args.out / f"task{task_id}-{i}-{seed}")
        for task_id in task_ids
        for i, (kind, count) in enumerate(n_runs.items())
        for seed in range(count)
    ]
    # Start the long run first, so that it does not run alone at the end.
    if args.long_task in task_ids:
        jobs.insert(0, Job(args.long_task, LONG, 0, 3 * args.steps, args.out / f"task{args.long_task}-long"))
    done: dict[tuple[str, str, int], dict[str, Any]] = {}
    if args.add:
        done = {
            (task_id, run["kind"], run["seed"]): run
            for task_id in task_ids
            for run in results.get(task_id, {"runs": []})["runs"]
        }
    missing = [job for job in jobs if job.key not in done]
    with ProcessPoolExecutor(CORES) as pool:
        for job, run in zip(missing, pool.map(one_run, missing), strict=True):
            done[job.key] = run
            print(f"task {job.task_id}, {job.kind}, training seed {job.seed}: {run['score']['mean']:.3f}", flush=True)
            runs = [each for (of, _, _), each in sorted(done.items()) if of == job.task_id]
            # A table needs a run from scratch; what is stored after each run is not lost if a later one is stopped.
            if any(each["kind"] == SCRATCH for each in runs):
                results = dict(sorted({**results, job.task_id: entry(get_task(job.task_id), runs)}.items()))
                store("learning", {"cpu_count": os.cpu_count(), "tasks": results}, report(results))
                curves(results, FIGURES / "learning.png")
    if args.ship:
        for task_id in task_ids:
            key = task_id, SCRATCH, chosen_of(results[task_id]["runs"])["seed"]
            folder = next(job.out for job in jobs if job.key == key)
            shutil.copy(folder / "policy.npz", POLICY_DIR / f"ppo_task{task_id}.npz")
    print(report(results))


if __name__ == "__main__":
    main()
