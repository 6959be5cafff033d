"""``inferencegym sweep``: evaluate many agents on many tasks and seeds in parallel."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from agents.evaluate import agents_for, interval
from agents.integrations.ray_workers import Job, evaluate_jobs, sweep_table
from agents.registry import load_own_agents
from agents.seeds import held_out_seeds
from cli import seed_count
from env.families import serving_task
from inferencegym.files import require_writable, write_text
from inferencegym.tasks import list_tasks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--task", action="append", help="task id; may be given several times (default: all)")
    parser.add_argument(
        "--agent", action="append", help="policy as in evaluate; may be given several times (default: all)"
    )
    parser.add_argument("--seeds", type=seed_count(2), default=30, help="number of held-out seeds (default: 30)")
    parser.add_argument("--workers", type=int, default=1, help="processes; more than one needs Ray (default: 1)")
    parser.add_argument("--ray", metavar="ADDRESS", help="address of a Ray cluster (default: Ray on this machine)")
    parser.add_argument("--out", type=Path, help="JSON file for the per-seed scores")


def run(args: argparse.Namespace) -> int:
    """Evaluate and print one line per agent and task."""
    if args.out:
        require_writable(args.out)
    tasks = [serving_task(t) for t in args.task] if args.task else list_tasks(include_recorded=True)
    seeds = tuple(held_out_seeds(args.seeds))
    load_own_agents(args.agent or [])
    jobs = [Job(task.task_id, name, seeds) for task in tasks for name in agents_for(task, args.agent or ["all"])]
    started = time.perf_counter()
    evaluations = evaluate_jobs(jobs, args.workers, args.ray)
    wall_s = time.perf_counter() - started
    print(f"{'task':<14}{'agent':<20}{'score':>8}  95% CI")
    for e in evaluations:
        i = interval(e.scores).within(0.0, 1.0)
        print(f"{e.task.task_id!s:<14}{e.agent:<20}{i.mean:>8.3f}  [{i.low:.3f}, {i.high:.3f}]")
    print(f"{len(jobs)} jobs of {len(seeds)} episodes on {args.workers} workers in {wall_s:.1f} s")
    if args.out:
        write_text(args.out, json.dumps({"seeds": list(seeds), "results": sweep_table(evaluations)}, indent=1) + "\n")
    return 0
