"""``inferencegym fidelity``: score predictions of any simulator on measured runs."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from pathlib import Path

from inferencegym.errors import InvalidConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "what",
        choices=("score", "runs", "ours"),
        help="score: print errors; runs: print the runs, as CSV; ours: print our own predictions, as CSV",
    )
    parser.add_argument(
        "predictions", nargs="*", type=Path, help="CSV files with the columns run, quantity and value, to be scored"
    )
    parser.add_argument(
        "--by", default="split,card,band", help="group by split, source, card, model or band (default split,card,band)"
    )
    parser.add_argument("--common", action="store_true", help="count only the figures that every simulator predicts")
    parser.add_argument("--json", action="store_true", help="print the errors as JSON")


def run(args: argparse.Namespace) -> int:
    """Print errors, runs or predictions."""
    from dataclasses import asdict

    from ops import fidelity

    if args.what != "score" and args.predictions:
        raise InvalidConfigError(f"`fidelity {args.what}` takes no files: give them to `fidelity score`")
    if args.what == "runs":
        print(fidelity.RUNS_PATH.read_text(encoding="utf-8"), end="")
        return 0
    if args.what == "ours":
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(fidelity.COLUMNS)
        writer.writerows((*key, f"{value:g}") for key, value in fidelity.ours().items())
        return 0
    simulators = {fidelity.OURS: fidelity.ours()}
    for path in args.predictions:
        if path.stem in simulators:
            raise InvalidConfigError(f"{path}: another file is named {path.stem!r} too: rename one")
        if not path.is_file():
            raise InvalidConfigError(f"{path}: no such file")
        simulators[path.stem] = fidelity.read_predictions(path)
    by = [name for name in args.by.split(",") if name]
    found = fidelity.errors(simulators, by, args.common)
    print(json.dumps([asdict(each) for each in found], indent=1) if args.json else fidelity.text(found, by))
    return 0
