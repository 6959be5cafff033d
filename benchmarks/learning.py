"""Training report: PPO on every task with five seeds, learning curves, held-out scores, and the policies to ship.

    python benchmarks/learning.py             everything (15 runs of 50,000 steps and a long one)
    python benchmarks/learning.py --ship      and copy the chosen policies to agents/policies

A run's score is measured on the held-out seeds; the run to ship is chosen on the validation seeds, so that the shipped
policy's held-out score is not biased by the choice. Results go to ``benchmarks/results/learning.json`` and ``.md``,
curves to ``benchmarks/figures/learning.png``, each run's own files below ``--out``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from agents.evaluate import compare, evaluate, interval, paired
from agents.policies.ppo import PpoAgent
from agents.policies.stored import POLICY_DIR
from agents.ppo_demo import ACTION, OBSERVATION, PpoSettings, rise, train
from agents.seeds import HELD_OUT_SEEDS, VALIDATION_SEEDS
from env.vector_env import VectorInferenceEnv
from inferencegym.tasks import TaskId, TaskSpec, get_task

ROOT = Path(__file__).resolve().parents[1]
RIVALS = ["random", "naive", "heuristic", "best_static", "best_adaptive"]


def one_run(task: TaskSpec, seed: int, steps: int, out: Path) -> dict[str, Any]:
    """Train once; returns wall time, learning curve, improvement and scores."""
    settings = PpoSettings()
    envs = VectorInferenceEnv(
        settings.n_envs, task.task_id, observation=OBSERVATION, action=ACTION, autoreset_mode="SameStep"
    )
    started = time.perf_counter()
    trained = train(envs, out, steps=steps, seed=seed, settings=settings, progress=False)
    wall_s = time.perf_counter() - started
    envs.close()
    agent = PpoAgent(trained.policy, task)
    held_out = evaluate(agent, task, HELD_OUT_SEEDS, "ppo")
    return {
        "seed": seed,
        "steps": int(trained.model.num_timesteps),
        "wall_s": wall_s,
        "rise": rise(trained.episodes),
        "scores": held_out.scores.tolist(),
        "score": interval(held_out.scores).to_dict(),
        "breakdown": {name: float(part.mean()) for name, part in held_out.breakdown.items()},
        "validation_score": float(evaluate(agent, task, VALIDATION_SEEDS, "ppo").scores.mean()),
        "curve": _mean_by_end(trained.episodes),
    }


def _mean_by_end(episodes: list[tuple[int, float]]) -> list[tuple[int, float]]:
    steps, returns = np.array(episodes).T
    return [(int(end), float(returns[steps == end].mean())) for end in np.unique(steps)]


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
    """Plot the mean return of the episodes that ended together, one line per training seed."""
    figure = Figure(figsize=(5 * len(results), 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = np.atleast_1d(figure.subplots(1, len(results)))
    for axis, (task_id, result) in zip(axes, results.items(), strict=True):
        for run in result["runs"]:
            axis.plot(*np.array(run["curve"]).T, marker=".", label=f"seed {run['seed']}")
        axis.set(
            title=get_task(task_id).name,
            xlabel="environment steps",
            ylabel="mean return of the episodes that ended together",
        )
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.savefig(path, dpi=120)


def report(results: dict[str, Any]) -> str:
    """The tables as Markdown."""
    lines = [
        "Written by `python benchmarks/learning.py`. Scores are means over 30 held-out seeds with 95 % intervals; the",
        "PPO row is the shipped policy, chosen on other seeds. PPO counts the steps of its start (constant settings,",
        "the heuristic) among its own.",
        "",
        "| task | agent | score | 95 % interval | PPO over it, paired |",
        "|---|---|---|---|---|",
    ]
    for task_id, result in results.items():
        shipped = result["table"]["shipped"]
        rows = {**result["table"]["rivals"], f"PPO, {shipped['steps']:,} steps": shipped["score"]}
        for name, i in sorted(rows.items(), key=lambda row: float(row[1]["mean"])):
            over = result["table"]["shipped_over"].get(name)
            gap = "" if over is None else f"{over['mean']:+.3f} [{over['ci95_low']:+.3f}, {over['ci95_high']:+.3f}]"
            lines.append(
                f"| {task_id} | {name} | {i['mean']:.3f} | [{i['ci95_low']:.3f}, {i['ci95_high']:.3f}] | {gap} |"
            )
    lines += [
        "",
        "| task | training seed | steps | score | return, first 5k steps | last 5k | p (Mann-Whitney) | seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for task_id, result in results.items():
        for run in [*result["runs"], *([result["long"]] if "long" in result else [])]:
            rising = run["rise"]
            lines.append(
                f"| {task_id} | {run['seed']} | {run['steps']:,} | {run['score']['mean']:.3f} "
                f"| {rising['first_mean']:.2f} | {rising['last_mean']:.2f} | {rising['p_value']:.0e} "
                f"| {run['wall_s']:.0f} |"
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
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=50_000)
    parser.add_argument("--long-task", default="3", help="task of the long run")
    parser.add_argument("--long-steps", type=int, default=300_000, help="0 for none")
    parser.add_argument("--ship", action="store_true", help="copy the chosen policies to agents/policies")
    args = parser.parse_args()
    task_ids: list[TaskId] = args.task or ["1", "2", "3"]
    results: dict[str, Any] = {}
    for task_id in map(str, task_ids):
        task = get_task(task_id)
        runs = [one_run(task, seed, args.steps, args.out / f"task{task_id}-seed{seed}") for seed in range(args.seeds)]
        candidates = list(runs)
        entry: dict[str, Any] = {"runs": runs}
        if args.long_steps and task_id == args.long_task:
            entry["long"] = one_run(task, 0, args.long_steps, args.out / f"task{task_id}-long")
            print(f"task {task_id}: {args.long_steps} steps score {entry['long']['score']}")
            candidates.append(entry["long"])
        chosen = max(candidates, key=lambda run: float(run["validation_score"]))
        entry["table"] = table(task, runs, chosen)
        results[task_id] = entry
        if args.ship:
            run = "long" if chosen is entry.get("long") else f"seed{chosen['seed']}"
            shutil.copy(args.out / f"task{task_id}-{run}" / "policy.npz", POLICY_DIR / f"ppo_task{task_id}.npz")
    directory = ROOT / "benchmarks"
    before = json.loads((directory / "results" / "learning.json").read_text())["tasks"] if args.task else {}
    results = dict(sorted({**before, **results}.items()))
    told: dict[str, Any] = {"cpu_count": os.cpu_count(), "settings": asdict(PpoSettings()), "tasks": results}
    text = report(results)
    (directory / "results" / "learning.json").write_text(json.dumps(told, indent=1) + "\n")
    (directory / "results" / "learning.md").write_text(text)
    curves(results, directory / "figures" / "learning.png")
    print(text)


if __name__ == "__main__":
    main()
