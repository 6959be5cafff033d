"""``inferencegym plan``: which GPUs, how many and which settings serve a request log within objectives."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inferencegym.cli.import_trace import add_log_arguments, print_log, read_log

if TYPE_CHECKING:
    from agents.plan.search import PlanReport


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--trace", type=Path, required=True, help="request log (see docs/operators.md) or packed trace")
    add_log_arguments(parser)
    parser.add_argument(
        "--objective",
        action="append",
        required=True,
        metavar="ttft_p99=500",
        help="bound (ms) of ttft or tpot (p50, p90, p95, p99, mean); may be given several times",
    )
    parser.add_argument(
        "--share-met",
        type=float,
        metavar="S",
        help="share of requests whose first token must come within the objective (default: what its percentile says)",
    )
    parser.add_argument(
        "--hardware",
        action="append",
        metavar="NAME[,NAME]",
        help="tables or cards to plan with, see `inferencegym hardware` (default all, or none beside --table)",
    )
    parser.add_argument(
        "--table",
        action="append",
        type=Path,
        metavar="FILE",
        help="table of your own to plan with, as measure or import-bench write; may be given several times",
    )
    parser.add_argument(
        "--model", help="model to serve, as llama-3.1-8b; needed where the hardware has tables of several"
    )
    parser.add_argument(
        "--quant", action="append", metavar="NAME[,NAME]", help="only these precisions, as BF16,FP8 (default: all)"
    )
    parser.add_argument("--no-drafts", action="store_true", help="only settings without draft tokens")
    parser.add_argument(
        "--prices",
        type=Path,
        metavar="FILE",
        help='your prices: {"currency": "USD", "per_gpu_hour": {"a100-40gb": 1.5}} (default: none, plans count GPUs)',
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the plan with figures and engine settings")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw cost against the share of requests in time")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write all fleets tried (.csv, .parquet, .json)")
    parser.add_argument(
        "--export", choices=("vllm", "sglang", "helm"), help="print the first plan's settings for this engine"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Search and print the cheapest plans."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from agents.plan.report import engine_files, write_html, write_png
    from agents.plan.search import make_plan, registered_tables, tables_of_files
    from agents.shadow.prices import load_prices
    from inferencegym.cli.figures import check_table, write_table
    from inferencegym.errors import InvalidConfigError, short_repr
    from inferencegym.files import require_matplotlib, require_writable
    from simulator.objectives import parse_objective

    objectives = [parse_objective(text) for text in args.objective]
    if args.share_met is not None and not 0 < args.share_met < 1:
        raise InvalidConfigError(f"--share-met={short_repr(args.share_met)} is not allowed: it must be between 0 and 1")
    if args.out:
        check_table(args.out)
    if args.html or args.png:
        require_matplotlib()
    for path in filter(None, (args.html, args.png, args.out)):
        require_writable(path)
    prices = load_prices(args.prices) if args.prices else None
    hardware = names(args.hardware)
    tables = tables_of_files(args.table or ())
    if hardware is not None or not tables:
        tables |= registered_tables(None if hardware is None or "all" in hardware else hardware, args.model)
    imported = read_log(args.trace, args)
    if not args.json:
        print_log(args.trace, imported)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        line = bar.add_task("searching", total=1.0)
        report = make_plan(
            imported.log,
            objectives,
            tables,
            prices=prices,
            share_met=args.share_met,
            precisions=names(args.quant),
            drafts=not args.no_drafts,
            progress=lambda what, share: bar.update(line, completed=share, description=what),
        )
    if args.json:
        print(json.dumps({**report.to_dict(), "read": imported.describe()}))
    else:
        _print(report)
    if args.html:
        write_html(report, tables, args.html, f"Plan for {args.trace.name}")
    if args.png:
        write_png(report, args.png)
    if args.out:
        write_table(_frame(report), args.out)
    if args.export and report.plans:
        print(engine_files(report.plans[0], tables[report.plans[0].hardware], report)[args.export], end="")
    return 0 if report.plans else 1


def names(given: list[str] | None) -> list[str] | None:
    """Names of an option that may be given several times and has several at commas; None where it is not given."""
    return None if given is None else [name.strip() for text in given for name in text.split(",")]


def _frame(report: PlanReport) -> Any:
    """All fleets tried as a table, one a row."""
    import pandas as pd

    return pd.json_normalize(report.to_dict()["tried"])


def _print(report: PlanReport) -> None:
    from agents.plan.report import COLUMNS, growth_lines, notes, row_of
    from agents.shadow import scaling
    from inferencegym.cli.figures import print_table

    shown = [c for c in COLUMNS if report.currency or not c.startswith("cost")]
    names = [f"{c} {report.currency}" if c.startswith("cost") else c for c in shown]
    asked = f"{', '.join(report.objectives)}; {report.share_met:.1%} of the first tokens in time"
    print(f"model: {report.model}; objectives: {asked}")
    first = "cheapest plans" if report.currency else "fewest GPUs of each hardware"
    for title, plans in ((first, report.plans), ("cost against requests in time", report.front)):
        if plans:
            print(f"\n{title}")
            print_table(names, [[row_of(plan)[c] for c in shown] for plan in plans])
    if report.adaptive:
        print("\nadaptive policies on as many GPUs, and on fewer")
        rows = [[p.policy, p.n_gpus, "yes" if p.meets else "no", f"{p.share_in_time:.2%}"] for p in report.adaptive]
        print_table(["policy", "GPUs", "meets", "in time"], rows)
    if report.autoscaling:
        print("\nthe first plan's replicas, set by an autoscaler")
        print_table(list(scaling.COLUMNS), [scaling.row_of(each) for each in report.autoscaling])
    print()
    for line in (*growth_lines(report), *notes(report)):
        print(line)
    print(f"{len(report.tried)} fleets played with all latencies, in {report.wall_s:.1f} s")
