"""``inferencegym verify``: is a log what its episode really gave?"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

EPILOG = """A log is JSON, {"task": 3, "seed": 11, "config": {...}, "steps": [...]}, as POST /grader takes it; a file
holds one, an array of them, or one per line (JSON Lines). Every step is played again and every number compared to
1e-9 of it. A log may name what it was played on (release, table_sha256, constants_sha256). Exit status: 0 all verified,
1 one is forged (its first differing step and field are named) or, if it names nothing, was played elsewhere, 2 one
cannot be read or judged here."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.epilog = EPILOG
    parser.add_argument("logs", metavar="LOG", nargs="+", type=Path, help="file with one episode or more")
    parser.add_argument("--task", help="task of a log that names none")
    parser.add_argument("--seed", type=int, help="seed of a log that names none")
    parser.add_argument("--config", type=_json, help="settings (JSON) of a log that names none")
    parser.add_argument("--json", action="store_true", help="print one JSON object per episode")


def _json(text: str) -> Any:
    from inferencegym.messages import parse_json

    return parse_json(text, argparse.ArgumentTypeError)


def run(args: argparse.Namespace) -> int:
    """Verify every episode and print the verdicts."""
    from inferencegym.errors import ForgedLogError
    from inferencegym.verification import read_episodes, verify_episode

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
                verdict = {"verified": True, "steps": len(episode.steps), "score": grade["score"]}
                text = f"verified, {len(episode.steps)} steps, score {grade['score']:.6f}"
            if args.json:
                print(json.dumps({**about, **verdict}))
            else:
                print(f"{episode.place}: task {episode.task_id}, seed {episode.seed}: {text}")
    return 1 if forged else 0
