"""``inferencegym calibrate``: measure floor, optimum, peak throughput and price of tasks with the solver."""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--task", action="append", help="task id; may be given several times (default: all tasks)")
    parser.add_argument("--quick", action="store_true", help="coarse sweep and short search: a tenth of the time")
    parser.add_argument("--out", type=Path, help="calibration file to update (default: the one the task reads)")
    parser.add_argument(
        "--policies",
        type=Path,
        metavar="FOLDER",
        help="folder for the policies found, for the agents best_static:FOLDER, best_adaptive:FOLDER and "
        "random_search:FOLDER (default: the one that these agents read; for a task of your own it lies beside the task "
        "file)",
    )
    parser.add_argument("--json", action="store_true", help="print the entries as JSON")


def run(args: argparse.Namespace) -> int:
    """Calibrate the tasks and write their constants and policies."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from agents.search.calibration import CalibrationFiles, calibrate, calibrate_scaling
    from agents.search.solver import QUICK, Budget
    from inferencegym.tasks import get_task, list_tasks

    tasks = [get_task(t) for t in args.task] if args.task else list_tasks(include_recorded=True)
    files = [CalibrationFiles.of(task, args.out, args.policies) for task in tasks]
    for each in files:
        each.check()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    entries = {}
    with Progress(*columns, console=Console(stderr=True)) as bar:
        for task, each in zip(tasks, files, strict=True):
            line = bar.add_task(f"task {task.task_id}", total=1.0)

            def progress(what: str, share: float | None, line: object = line, name: object = task.task_id) -> None:
                bar.update(line, completed=share, description=f"task {name}: {what}")  # type: ignore[arg-type]

            if task.fleet.max_replicas is None:
                solved = calibrate(task, QUICK if args.quick else Budget(), progress)
            else:
                solved = calibrate_scaling(task)
            # Written task by task: an interrupted run keeps what it has finished.
            each.store(solved)
            entries[str(task.task_id)] = solved.entry()
    if args.json:
        print(json.dumps({"tasks": entries}, indent=2))
    else:
        for key, entry in entries.items():
            print(
                f"task {key}: floor {entry['floor_tps']:.0f}, optimum {entry['optimal_tps']:.0f}, peak "
                f"{entry['max_throughput_tps']:.0f} tokens/s, price {entry['price']:.5g} ({entry['seconds']:.0f} s)"
            )
    return 0
