"""``inferencegym import-bench``: build a lookup table of your own engine from benchmark results."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ops.bench_fit import BenchFit
    from ops.log.bench import BenchRun
    from simulator.offline.engine_fit import MeasuredEngine


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
    own = parser.add_argument_group(
        "fit the engine's own iteration times, from the time of every token (vllm bench serve --save-detailed)"
    )
    own.add_argument(
        "--kv-pool-tokens", type=int, help="tokens that the engine's KV pool holds; selects this kind of fit"
    )
    own.add_argument("--kv-bytes-per-token", type=float, help="bytes of KV cache per token on a card")
    own.add_argument("--block-tokens", type=int, default=16, help="tokens per KV block (default 16)")
    own.add_argument(
        "--max-batched-tokens", type=int, default=2048, help="maximum prompt tokens per iteration (default 2048)"
    )
    own.add_argument(
        "--weights-gb", type=float, default=0.0, help="GB of weights per card, for memory figures (default 0)"
    )
    parser.add_argument("--fit-only", action="store_true", help="print the fit and write no table")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="processes that build the table (default: all cores)"
    )
    parser.add_argument("--json", action="store_true", help="print the fit as JSON")


def run(args: argparse.Namespace) -> int:
    """Read all files, fit the engine profile, print its errors and build the table."""
    from cli.measure import print_table_use, report_engine
    from inferencegym.errors import InvalidConfigError
    from inferencegym.files import prepare_output
    from ops.bench_fit import Setup, fit_engine
    from ops.log.bench import read_runs
    from simulator.hardware.measured_model import MeasuredSource
    from simulator.offline.table import build_table

    if not args.fit_only:
        if args.out.exists() and not args.force:
            raise InvalidConfigError(
                f"{args.out} exists already: name another with --out, or overwrite it with --force"
            )
        prepare_output(args.out)
    runs = [run for path in args.files for run in read_runs(path)]  # read every file before fitting
    if args.kv_pool_tokens is not None:
        report_engine(_own_times(args, runs), args.name, None if args.fit_only else args.out, args.json)
        return 0
    setup = Setup(args.max_num_seqs, args.quant, args.replicas)
    fit = fit_engine(runs, args.hardware, args.profile, setup, args.hold_out, args.name)
    if args.json:
        print(json.dumps(fit.to_dict()))
    else:
        _print(fit)
    if not args.fit_only:
        notes = {"imported": fit.to_dict(), **fit.source.listed_operators()}
        # Cards of the measured files have all columns; those of the library's times are built in seconds without.
        full = isinstance(fit.source, MeasuredSource)
        path = build_table(
            args.out, fit.source, fit.engine, args.jobs, progress=not args.json, notes=notes, saturated=full
        )
        if not args.json:
            print_table_use(path)
    return 0


def _own_times(args: argparse.Namespace, runs: list[BenchRun]) -> MeasuredEngine:
    """The engine with its own iteration times; each run in turn is held out of a fit."""
    from inferencegym.errors import DataFormatError, InvalidConfigError
    from simulator.hardware.engine_times import EngineFacts
    from simulator.offline.engine_fit import measured_engine

    if args.hardware or args.profile or args.quant or args.replicas != 1:
        raise InvalidConfigError(
            "--kv-pool-tokens fits iteration times without a table to start from, of one engine: leave --hardware, "
            "--profile, --quant and --replicas out"
        )
    if args.kv_bytes_per_token is None:
        raise InvalidConfigError("--kv-pool-tokens also needs --kv-bytes-per-token", "kv_bytes_per_token")
    untimed = [run.name for run in runs if run.timed is None]
    if untimed:
        raise DataFormatError(
            f"{untimed[0]} has no time of each token: run `vllm bench serve` with --save-result --save-detailed"
        )
    timed = [run.timed for run in runs if run.timed is not None]
    longest = max(float((each.prompt_tokens + each.output_tokens).max()) for each in timed)
    facts = EngineFacts(
        model=args.name,
        block_tokens=args.block_tokens,
        pool_blocks=args.kv_pool_tokens // max(1, args.block_tokens),
        kv_bytes_per_token=args.kv_bytes_per_token,
        max_num_seqs=args.max_num_seqs,
        max_batched_tokens=args.max_batched_tokens,
        max_model_len=int(longest),
        weights_gb=args.weights_gb,
    )
    return measured_engine(facts, timed, [])


def _print(fit: BenchFit) -> None:
    from rich.console import Console
    from rich.table import Table

    e = fit.engine
    print(f"fitted to {len(fit.fitted)} runs, {len(fit.held_out)} held out: {', '.join(fit.held_out) or 'none'}")
    print(f"start: {fit.hardware}" + ("" if fit.kept else "; unchanged, because the fit predicts no better"))
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
