"""``inferencegym quality``: what a task, or any running OpenEnv environment, rewards, in numbers."""

from __future__ import annotations

import argparse
import json
from typing import Any

from cli import seed_count
from inferencegym.errors import InvalidConfigError, refusal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("task", nargs="*", help="task ids, or all")
    parser.add_argument("--episodes", type=seed_count(2), default=10, help="held-out episodes per policy (default 10)")
    parser.add_argument(
        "--generations", type=int, default=20, help="generations of the searches for timetables (default 20)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON: a list of reports, with --url one report")
    served = parser.add_argument_group("instead of tasks, any running OpenEnv environment")
    served.add_argument("--url", help="address of its server; the report is made from outside, by playing it")
    served.add_argument(
        "--reset",
        type=_json_object,
        action="append",
        help="JSON object with arguments of a reset; several are levels, which are compared (default: {})",
    )
    served.add_argument(
        "--action",
        type=_json_object,
        action="append",
        help="JSON object: an action to play beside those sampled from the server's schema; may be repeated",
    )
    served.add_argument("--candidates", type=int, default=20, help="actions to sample (default 20)")
    served.add_argument("--steps", type=int, default=200, help="most steps of an episode (default 200)")


def run(args: argparse.Namespace) -> int:
    """Print the reports of the tasks, or that of the server."""
    if bool(args.task) == (args.url is not None):
        raise InvalidConfigError("name tasks, or a server with --url, and not both")
    for name, least in (("generations", 1), ("candidates", 0 if args.action else 1), ("steps", 1)):
        if getattr(args, name) < least:
            raise refusal(f"--{name}", getattr(args, name), f"at least {least}")
    return _of_tasks(args) if args.url is None else _of_server(args)


def _of_tasks(args: argparse.Namespace) -> int:
    from agents.quality import quality, text
    from env.families import serving_task
    from inferencegym.tasks import list_tasks

    tasks = list_tasks(include_recorded=True) if args.task == ["all"] else [serving_task(task) for task in args.task]
    reports = []
    for task in tasks:
        reports.append(quality(task, args.episodes, args.generations))
        if not args.json:
            print(text(reports[-1]), flush=True)
    if args.json:
        print(json.dumps(reports, indent=1))
    return 0


def _of_server(args: argparse.Namespace) -> int:
    from agents.integrations.openenv_quality import quality, text

    resets = args.reset or [{}]
    if any("seed" in reset for reset in resets):
        raise InvalidConfigError("--reset must name no seed: every episode has its own")
    report = quality(args.url, resets, args.action or [], args.episodes, args.candidates, args.steps)
    print(json.dumps(report, indent=1) if args.json else text(report))
    return 0


def _json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return found
