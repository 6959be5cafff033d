"""``inferencegym build-table``: build the lookup table from the measured operator times."""

from __future__ import annotations

import argparse
import os
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--out", type=Path, help="file to write (default: the shipped table of this card)")
    parser.add_argument("--hardware", default="a100-40gb", help="card of profiles.json (default a100-40gb)")
    parser.add_argument("--engine", help="engine profile of profiles.json (default: the one that the card names)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: all cores)")


def run(args: argparse.Namespace) -> int:
    """Build and write the table."""
    from simulator.hardware.operators import hardware
    from simulator.offline.table import build_table
    from simulator.tables import shipped_table

    card = hardware(args.hardware)
    out = args.out or shipped_table(card.name)
    path = build_table(out, card, args.engine or card.engine, jobs=args.jobs, progress=True)
    print(f"{path}: {path.stat().st_size} bytes")
    return 0
