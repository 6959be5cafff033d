"""``inferencegym build-table``: build the lookup table from the measured operator times."""

from __future__ import annotations

import argparse
import os
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--out", type=Path, help="file to write (default: the shipped table of this card)")
    parser.add_argument("--hardware", default="a100-40gb", choices=("a100-40gb", "a100-80gb"))
    parser.add_argument("--engine", help="engine profile (default: a100_40 on 40 GB, vllm_v1 on 80 GB)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: all cores)")


def run(args: argparse.Namespace) -> int:
    """Build and write the table."""
    from simulator.offline.table import build_table
    from simulator.tables import DEFAULT_TABLE, TABLE_80GB

    large = args.hardware == "a100-80gb"
    engine = args.engine or ("vllm_v1" if large else "a100_40")
    out = args.out or (TABLE_80GB if large else DEFAULT_TABLE)
    path = build_table(out, hardware=args.hardware, engine=engine, jobs=args.jobs, progress=True)
    print(f"{path}: {path.stat().st_size} bytes")
    return 0
