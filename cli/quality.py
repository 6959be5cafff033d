"""``inferencegym quality``: what a task rewards, in numbers."""

from __future__ import annotations

import argparse
import json

from cli import seed_count
from inferencegym.errors import InvalidConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("task", nargs="+", help="task ids, or all")
    parser.add_argument("--episodes", type=seed_count(2), default=10, help="held-out episodes per policy (default 10)")
    parser.add_argument(
        "--generations", type=int, default=20, help="generations of the searches for timetables (default 20)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, a list of reports")


def run(args: argparse.Namespace) -> int:
    """Print the reports of the tasks."""
    from agents.quality import quality, text
    from inferencegym.tasks import get_task, list_tasks

    if args.generations < 1:
        raise InvalidConfigError("--generations must be at least 1")
    tasks = list_tasks(include_recorded=True) if args.task == ["all"] else [get_task(task) for task in args.task]
    reports = []
    for task in tasks:
        reports.append(quality(task, args.episodes, args.generations))
        if not args.json:
            print(text(reports[-1]), flush=True)
    if args.json:
        print(json.dumps(reports, indent=1))
    return 0
