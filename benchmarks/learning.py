"""Training report: PPO from scratch with five seeds and both rewards, learning curves, scores, and policies to ship.

    python benchmarks/learning.py             everything
    python benchmarks/learning.py --ship      and copy the chosen policies to agents/data/policies

Every run is scored on the way on the held-out seeds, which nothing is chosen by: within a run the validation seeds
choose the policy that is kept, and they choose the run to ship. Runs go on side by side, one for each core. Results go
to ``benchmarks/results/learning.json`` and ``.md``, curves to ``benchmarks/figures/learning.png``, each run's own files
below ``--out``.
"""

from __future__ import annotations

import argparse
import json
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

from agents.evaluate import compare, evaluate, interval, paired
from agents.policies.ppo import PpoAgent
from agents.policies.stored import POLICY_DIR
from agents.ppo_demo import PpoSettings, local_envs, rise, train
from agents.seeds import HELD_OUT_SEEDS
from env.threads import CORES
from inferencegym.tasks import TaskSpec, get_task

ROOT = Path(__file__).resolve().parents[1]
REWARDS = ("grade", "plan")
RIVALS = ["random", "naive", "vllm_defaults", "random_search", "heuristic", "best_static", "best_adaptive"]


@dataclass(frozen=True, slots=True)
class Job:
    """A training run."""

    task_id: str
    reward: str
    seed: int
    steps: int
    out: Path


def one_run(job: Job) -> dict[str, Any]:
    """Train once; returns wall time, the scores on the way, and those of the policy that is kept."""
    task, settings = get_task(job.task_id), PpoSettings(from_scratch=True, reward=job.reward)
    started = time.perf_counter()
    make_envs = partial(local_envs, task.task_id, settings)
    trained = train(make_envs, job.out, steps=job.steps, seed=job.seed, settings=settings, progress=False)
    wall_s = time.perf_counter() - started
    held_out = evaluate(PpoAgent(trained.policy, task), task, HELD_OUT_SEEDS, "ppo")
    return {
        "reward": job.reward,
        "seed": job.seed,
        "steps": int(trained.model.num_timesteps),
        "wall_s": wall_s,
        "rise": rise(trained.episodes),
        "scores": held_out.scores.tolist(),
        "score": interval(held_out.scores).to_dict(),
        "breakdown": {name: float(part.mean()) for name, part in held_out.breakdown.items()},
        "validation_score": float(trained.policy.trained["validation_score"]),
        "curve": [(each.step, each.held_out) for each in trained.scores],
        "policy": str(job.out / "policy.npz"),
    }


def table(task: TaskSpec, runs: list[dict[str, Any]], chosen: dict[str, Any]) -> dict[str, Any]:
    """Scores of PPO over its training seeds, and paired differences to other agents on the same held-out seeds."""
    rivals = compare(task, RIVALS, HELD_OUT_SEEDS)
    per_seed = np.array([run["scores"] for run in runs])  # (training seeds, held-out seeds)
    mean_of_runs = per_seed.mean(axis=0)
    entries = {entry["agent"]: entry for entry in rivals["agents"]}
    return {
        "rivals": {name: entry["score"] for name, entry in entries.items()},
        "ppo_by_training_seed": interval(per_seed.mean(axis=1)).to_dict(),
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
    """Plot the scores on held-out seeds over decisions, one line per run, beside the levels of other agents."""
    figure = Figure(figsize=(6.2 * len(results), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = np.atleast_1d(figure.subplots(1, len(results)))
    for axis, (task_id, result) in zip(axes, results.items(), strict=True):
        for colour, reward in zip(("C0", "C1"), REWARDS, strict=True):
            runs = [run for run in result["runs"] if run["reward"] == reward]
            for i, run in enumerate(runs):
                label = f'PPO, reward "{reward}", {len(runs)} seeds' if i == 0 else None
                axis.plot(*np.array(run["curve"]).T, color=colour, alpha=0.8, linewidth=1.2, label=label)
        for style, rival in zip((":", "--", "-."), ("heuristic", "best_static", "best_adaptive"), strict=True):
            axis.axhline(result["table"]["rivals"][rival]["mean"], color="black", linestyle=style, label=rival)
        axis.set(title=get_task(task_id).name, xlabel="decisions", ylabel="mean score, held-out seeds")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8, loc="lower right")
    figure.savefig(path, dpi=120)


def report(results: dict[str, Any]) -> str:
    """The tables as Markdown."""
    lines = [
        "Written by `python benchmarks/learning.py`. Scores are means over 30 held-out seeds with 95 % intervals; the",
        "PPO row is the shipped policy, from scratch, chosen on other seeds.",
        "",
        "| task | agent | score | 95 % interval | PPO over it, paired |",
        "|---|---|---|---|---|",
    ]
    for task_id, result in results.items():
        shipped = result["table"]["shipped"]
        rows = {**result["table"]["rivals"], f"PPO, from scratch, {shipped['steps']:,} steps": shipped["score"]}
        for name, i in sorted(rows.items(), key=lambda row: float(row[1]["mean"])):
            over = result["table"]["shipped_over"].get(name)
            gap = "" if over is None else f"{over['mean']:+.3f} [{over['ci95_low']:+.3f}, {over['ci95_high']:+.3f}]"
            lines.append(
                f"| {task_id} | {name} | {i['mean']:.3f} | [{i['ci95_low']:.3f}, {i['ci95_high']:.3f}] | {gap} |"
            )
    lines += [
        "",
        "Every run; a step is a decision, and the score is that of the policy that the validation seeds chose.",
        "",
        "| task | reward | training seed | steps | score | score at the end | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for task_id, result in results.items():
        for run in [*result["runs"], *([result["long"]] if "long" in result else [])]:
            lines.append(
                f"| {task_id} | {run['reward']} | {run['seed']} | {run['steps']:,} | {run['score']['mean']:.3f} "
                f"| {run['curve'][-1][1]:.3f} | {run['wall_s']:.0f} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="PPO on every task and seed, scored on held-out traffic.")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "learning", help="files of the runs")
    parser.add_argument(
        "--task",
        action="append",
        help="task id, repeatable; others keep their results (default: all)",
    )
    parser.add_argument("--seeds", type=int, default=5, help='runs with reward "grade" (default 5)')
    parser.add_argument("--plan-seeds", type=int, default=5, help='runs with reward "plan" (default 5)')
    parser.add_argument("--steps", type=int, default=600_000, help="decisions of a run (default 600000)")
    parser.add_argument("--long-task", default="3", help="task of a run of three times the steps (default 3)")
    parser.add_argument("--ship", action="store_true", help="copy the chosen policies to agents/data/policies")
    args = parser.parse_args()
    task_ids: list[str] = args.task or ["1", "2", "3"]
    n_runs = {"grade": args.seeds, "plan": args.plan_seeds}
    jobs = [
        Job(task_id, reward, seed, args.steps, args.out / f"task{task_id}-{reward}-{seed}")
        for task_id in task_ids
        for reward in REWARDS
        for seed in range(n_runs[reward])
    ]
    # The long run first: it would otherwise go on alone at the end.
    if args.long_task in task_ids:
        jobs.insert(0, Job(args.long_task, "grade", 0, 3 * args.steps, args.out / f"task{args.long_task}-long"))
    with ProcessPoolExecutor(CORES) as pool:
        done = dict(zip(jobs, pool.map(one_run, jobs), strict=True))
    results: dict[str, Any] = {}
    for task_id in task_ids:
        task = get_task(task_id)
        runs = [run for job, run in done.items() if job.task_id == task_id and job.steps == args.steps]
        paid = [run for run in runs if run["reward"] == "grade"]
        chosen = max(paid, key=lambda run: float(run["validation_score"]))
        entry: dict[str, Any] = {"runs": runs, "table": table(task, paid, chosen)}
        for job, run in done.items():
            if job.task_id == task_id and job.steps > args.steps:
                entry["long"] = run
        results[task_id] = entry
        if args.ship:
            shutil.copy(chosen["policy"], POLICY_DIR / f"ppo_task{task_id}.npz")
    directory = ROOT / "benchmarks"
    before = json.loads((directory / "results" / "learning.json").read_text())["tasks"] if args.task else {}
    results = dict(sorted({**before, **results}.items()))
    told: dict[str, Any] = {
        "cpu_count": os.cpu_count(),
        "settings": asdict(PpoSettings(from_scratch=True)),
        "tasks": results,
    }
    text = report(results)
    (directory / "results" / "learning.json").write_text(json.dumps(told, indent=1) + "\n")
    (directory / "results" / "learning.md").write_text(text)
    curves(results, directory / "figures" / "learning.png")
    print(text)


if __name__ == "__main__":
    main()
