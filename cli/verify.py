"""``inferencegym verify``: check episode logs by replay."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

EPILOG = """A log is JSON, {"task": 3, "seed": 11, "config": {...}, "steps": [...]}, as POST /grader accepts it; a file
holds one, an array of them, or one per line (JSON Lines). Every step is replayed and every number compared, floats
within a relative 1e-6, integers and booleans exactly; the score printed is that of the replay. A log may name the
simulator that played it (release, table_sha256, constants_sha256). Exit status: 0 if all logs are verified; 1 if one is
forged (its first differing step and field are named), or differs and does not name its simulator; 2 if one cannot be
read, or names another simulator."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.epilog = EPILOG
    parser.add_argument("logs", metavar="LOG", nargs="+", type=Path, help="file with one or more episodes")
    parser.add_argument("--task", help="task of logs that do not name it")
    parser.add_argument("--seed", type=int, help="seed of logs that do not name it")
    parser.add_argument("--config", type=_json, help="configuration (JSON) of logs that do not name it")
    parser.add_argument("--json", action="store_true", help="print one JSON object per episode")


def _json(text: str) -> Any:
    from inferencegym.messages import parse_json

    return parse_json(text, argparse.ArgumentTypeError)


def run(args: argparse.Namespace) -> int:
    """Verify every episode and print the results."""
    from env.episode_files import read_episodes, verify_episode
    from inferencegym.errors import ForgedLogError

    given = {"task": args.task, "seed": args.seed, "config": args.config}
    defaults = {name: value for name, value in given.items() if value is not None}
    forged = 0
    for path in args.logs:
        for episode in read_episodes(path, defaults):
            about: dict[str, Any] = {"log": episode.place, "task": episode.task_id, "seed": episode.seed}
            try:
                grade = verify_episode(episode)
            except ForgedLogError as error:
                forged += 1
                verdict = {"verified": False, "step": error.step, "field": error.field, "message": str(error)}
                text = f"{'FORGED' if episode.names_constants else 'NOT VERIFIED'}: {error}"
            else:
                steps, score, own = len(episode.steps), grade["score"], episode.own_config
                verdict = {"verified": True, "steps": steps, "score": score, "own_config": own}
                text = f"verified, {steps} steps, score {score:.6f}"
                text += "" if own else ", not in the task's own configuration"
            if args.json:
                print(json.dumps({**about, **verdict}))
            else:
                print(f"{episode.place}: task {episode.task_id}, seed {episode.seed}: {text}")
    return 1 if forged else 0
