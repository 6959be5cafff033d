"""``inferencegym import-bench``: build a lookup table of your own engine from benchmark results."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simulator.offline.bench_import import BenchFit


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("files", nargs="+", type=Path, help="results of vllm bench serve, GuideLLM or AIPerf")
    parser.add_argument(
        "--out", type=Path, default=Path("my-engine.parquet"), help="table to write (default my-engine.parquet)"
    )
    parser.add_argument(
        "--hardware",
        help="table of the catalogue or card of profiles.json to start from (default: the nearest table)",
    )
    parser.add_argument("--profile", help="engine profile to start from (default: that of the table)")
    parser.add_argument("--name", default="imported", help="name of the fitted profile")
    parser.add_argument(
        "--max-num-seqs", type=int, default=256, help="max_num_seqs of the benchmarked engine (default 256)"
    )
    parser.add_argument("--quant", help="precision in the benchmark (default: the table's first)")
    parser.add_argument("--force", action="store_true", help="overwrite the table if there is one")
    parser.add_argument(
        "--replicas", type=int, default=1, help="number of engines behind the benchmarked address (default 1)"
    )
    parser.add_argument(
        "--hold-out",
        type=float,
        default=0.25,
        help="share of the runs kept out of the fit to measure its error (default 0.25)",
    )
    parser.add_argument("--fit-only", action="store_true", help="print the fit and write no table")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="processes that build the table (default: all cores)"
    )
    parser.add_argument("--json", action="store_true", help="print the fit as JSON")


def run(args: argparse.Namespace) -> int:
    """Read all files, fit the engine profile, print its errors and build the table."""
    from inferencegym.errors import InvalidConfigError
    from inferencegym.files import prepare_output
    from simulator.hardware.measured_model import MeasuredSource
    from simulator.offline.bench_files import read_runs
    from simulator.offline.bench_import import Setup, fit_engine
    from simulator.offline.table import build_table

    if not args.fit_only:
        if args.out.exists() and not args.force:
            raise InvalidConfigError(
                f"{args.out} exists already: name another with --out, or overwrite it with --force"
            )
        prepare_output(args.out)
    runs = [run for path in args.files for run in read_runs(path)]  # every file is read before anything is fitted
    setup = Setup(args.max_num_seqs, args.quant, args.replicas)
    fit = fit_engine(runs, args.hardware, args.profile, setup, args.hold_out, args.name)
    if args.json:
        print(json.dumps(fit.to_dict()))
    else:
        _print(fit)
    if not args.fit_only:
        notes = {"imported": fit.to_dict()}
        # Cards of the measured files have all columns; those of the library's times are built in seconds without.
        full = isinstance(fit.source, MeasuredSource)
        path = build_table(
            args.out, fit.source, fit.engine, args.jobs, progress=not args.json, notes=notes, saturated=full
        )
        if not args.json:
            print(f"wrote {path}; use it with --table {path} or INFERENCEGYM_TABLE={path}")
            print("tasks must be calibrated again on a new table: inferencegym calibrate --out FILE")
    return 0


def _print(fit: BenchFit) -> None:
    from rich.console import Console
    from rich.table import Table

    e = fit.engine
    print(f"fitted to {len(fit.fitted)} runs, {len(fit.held_out)} held out: {', '.join(fit.held_out) or 'none'}")
    print(f"start: {fit.hardware}" + ("" if fit.kept else "; kept as it is, the fit predicts no better"))
    print(f"  overhead {e.step_overhead_ms:.3f} ms per iteration, {e.sequence_overhead_ms:.4f} ms per sequence")
    print(f"  GEMM scale {e.gemm_scale:.3f}, bandwidth scale {fit.bandwidth_scale:.3f}")
    print(f"  TTFT offset {e.ttft_offset_ms:.1f} ms")
    table = Table(box=None, header_style="bold")
    for i, name in enumerate(("runs", "metric", "n", "median error before", "after", "worst before", "after")):
        table.add_column(name, justify="left" if i < 2 else "right")
    for error in fit.errors:
        table.add_row(
            error.group,
            error.metric,
            str(error.runs),
            f"{error.before_median:.1%}",
            f"{error.after_median:.1%}",
            f"{error.before_worst:.1%}",
            f"{error.after_worst:.1%}",
        )
    Console(width=120).print(table)
    if not fit.held_out:
        print("no run was held out, so these errors are too low: give at least two runs, better six or more")
