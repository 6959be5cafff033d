"""``inferencegym calibrate``: measure floor, optimum, peak throughput and price of tasks with the solver."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agents.search.solver import Progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--task", action="append", help="task id; may be given several times (default: all tasks)")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="coarse sweep and short search: a tenth of the time (tasks that scale: no shorter)",
    )
    parser.add_argument("--out", type=Path, help="calibration file to update (default: the one the task reads)")
    parser.add_argument(
        "--policies",
        type=Path,
        metavar="FOLDER",
        help="folder for the policies found, which best_static:FOLDER, best_adaptive:FOLDER and random_search:FOLDER "
        "read (default: the one that they read without :FOLDER; for your own task, next to the task file)",
    )
    parser.add_argument("--json", action="store_true", help="print the entries as JSON")


def run(args: argparse.Namespace) -> int:
    """Calibrate the tasks and write their constants and policies."""
    from agents.search.calibration import CalibrationFiles, calibrate, calibrate_scaling
    from agents.search.solver import QUICK, Budget
    from cli.figures import progress_line
    from env.families import serving_task
    from inferencegym.tasks import list_tasks

    tasks = [serving_task(t) for t in args.task] if args.task else list_tasks(include_recorded=True)
    files = [CalibrationFiles.of(task, args.out, args.policies) for task in tasks]
    for each in files:
        each.check()
    entries = {}
    with progress_line("calibrating") as line:
        for task, each in zip(tasks, files, strict=True):
            report = _report(f"task {task.task_id}", line)
            if task.fleet.max_replicas is None:
                solved = calibrate(task, QUICK if args.quick else Budget(), report)
            else:
                solved = calibrate_scaling(task, report)
            # Written task by task: an interrupted run keeps what it has finished.
            each.store(solved)
            entries[str(task.task_id)] = solved.entry()
    if args.json:
        print(json.dumps({"tasks": entries}, indent=2))
    else:
        written = {str(each.task.task_id): each for each in files}
        for key, entry in entries.items():
            print(
                f"task {key}: floor {entry['floor_tps']:.0f}, optimum {entry['optimal_tps']:.0f}, peak "
                f"{entry['max_throughput_tps']:.0f} tokens/s on the calibration seeds, price {entry['price']:.5g} "
                f"({entry['seconds']:.0f} s)\n"
                f"wrote {written[key].constants} and policies to {written[key].policies}"
            )
    return 0


def _report(task: str, line: Progress) -> Progress:
    """Progress of one task: on the terminal's ``line``; elsewhere printed on stderr for every tenth of the work."""
    printed = -1.0

    def report(what: str, share: float | None) -> None:
        nonlocal printed
        line(f"{task}: {what}", share)
        if share is not None and share >= printed + 0.1 and not sys.stderr.isatty():
            printed = share
            print(f"{task}, {share:.0%} done: {what}", file=sys.stderr, flush=True)

    return report
