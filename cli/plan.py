"""``inferencegym plan``: what serves a request log within objectives, and how many agent sessions an engine carries."""

from __future__ import annotations

import argparse
import json
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cli.import_trace import add_log_arguments, log_lines, print_log, read_log
from cli.tables import add_drafts_argument, add_kv_cache_argument, add_objective_argument
from inferencegym.models import ROUTERS

if TYPE_CHECKING:
    from ops.plan import PlanReport


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--trace", type=Path, help="request log (see docs/operators.md) or packed trace")
    asked.add_argument(
        "--sessions",
        type=Path,
        metavar="LOG",
        help="log of agent sessions instead: find how many sessions one engine carries at once (docs/rollouts.md)",
    )
    parser.add_argument(
        "--kv-pool-tokens", type=int, metavar="N", help="with --sessions: the engine's KV pool (default: the card's)"
    )
    add_log_arguments(parser)
    add_objective_argument(parser)
    parser.add_argument(
        "--share-met",
        type=float,
        metavar="S",
        help="share of requests whose first token must be in time (default: 0.99 for ttft_p99, and so on)",
    )
    parser.add_argument(
        "--windows-met",
        type=float,
        metavar="S",
        help="judge objectives in each five minutes of the log: the share of these windows in which they must hold, 1 "
        "for all (default: judge the whole log)",
    )
    parser.add_argument(
        "--hardware",
        action="append",
        metavar="NAME[,NAME]",
        help="tables or cards to plan with, see `inferencegym hardware` (default all, or none with --table)",
    )
    parser.add_argument(
        "--table",
        action="append",
        type=Path,
        metavar="FILE",
        help="your own table, written by measure or import-bench; may be given several times",
    )
    parser.add_argument(
        "--model", help="model to serve, such as llama-3.1-8b (default: the log's, or the only one of the hardware)"
    )
    parser.add_argument(
        "--quant", action="append", metavar="NAME[,NAME]", help="only these precisions, as BF16,FP8 (default: all)"
    )
    add_drafts_argument(parser)
    parser.add_argument(
        "--no-disagg", action="store_true", help="search no settings with prefill on GPUs of its own (default: do)"
    )
    add_kv_cache_argument(parser)
    parser.add_argument(
        "--replicas-min",
        type=int,
        default=1,
        metavar="N",
        help="minimum number of replicas; with 2, one may fail (default 1)",
    )
    parser.add_argument(
        "--router",
        choices=ROUTERS,
        default="shared",
        help="how requests reach replicas: a shared queue, or a router with a queue per replica (default %(default)s)",
    )
    parser.add_argument(
        "--prices",
        type=Path,
        metavar="FILE",
        help='your prices: {"currency": "USD", "per_gpu_hour": {"a100-40gb": 1.5}} (default: none, sort by GPUs)',
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the plan with figures and engine settings")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw cost against latency")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write all fleets tried (.csv, .parquet, .json)")
    parser.add_argument(
        "--export",
        choices=("vllm", "sglang", "helm"),
        help="write the recommended fleet's settings as a configuration file of this engine",
    )
    parser.add_argument("--export-file", type=Path, help="file to export to (default: plan-ENGINE.yaml; - prints it)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Search and print the cheapest plans."""
    from cli.figures import check_table, export_path, print_report, progress_line, write_export, write_table
    from inferencegym.errors import InvalidConfigError, short_repr
    from inferencegym.files import require_matplotlib, require_writable
    from ops.export import chosen_file, engine_files
    from ops.objectives import parse_objective
    from ops.plan import MAX_GPUS, make_plan, tables_for, tables_of_files
    from ops.prices import load_prices
    from ops.report import plan_figure, plan_report, write_page, write_picture
    from simulator.hardware.catalogue import precisions_named

    if args.sessions:
        return _plan_sessions(args)
    if not args.objective:
        raise InvalidConfigError("--objective is missing: give one, for example --objective ttft_p99=500")
    objectives = [parse_objective(text) for text in args.objective]
    if args.share_met is not None and not 0 < args.share_met < 1:
        raise InvalidConfigError(f"--share-met={short_repr(args.share_met)} is not allowed: it must be between 0 and 1")
    if args.windows_met is not None and not 0 < args.windows_met <= 1:
        raise InvalidConfigError(
            f"--windows-met={short_repr(args.windows_met)} is not allowed: it must be above 0 and at most 1"
        )
    if not 1 <= args.replicas_min <= MAX_GPUS:
        raise InvalidConfigError(
            f"--replicas-min={args.replicas_min} is not allowed: it must be from 1 to {MAX_GPUS}", "replicas_min"
        )
    if args.out:
        check_table(args.out)
    if args.html or args.png:
        require_matplotlib()
    export_file = export_path(args, "plan")
    for path in filter(None, (args.html, args.png, args.out, export_file)):
        require_writable(path)
    hardware = names(args.hardware)
    tables = tables_of_files(args.table or ())
    prices = load_prices(args.prices, [str(t.meta["hardware"]) for t in tables.values()]) if args.prices else None
    log = cache(lambda: read_log(args.trace, args))
    if hardware is not None or not tables:
        hardware = None if hardware is None or "all" in hardware else hardware
        chosen, args.model = tables_for(hardware, args.model, lambda: log().model)
        tables |= chosen
    imported = log()
    if not args.json:
        print_log(args.trace, imported)
    with progress_line("searching") as progress:
        report = make_plan(
            imported.log,
            objectives,
            tables,
            prices=prices,
            share_met=args.share_met,
            windows_met=args.windows_met,
            precisions=names(args.quant) or precisions_named(args.model),
            drafts=args.drafts,
            disagg=not args.no_disagg,
            kv_cache_fp8=args.kv_cache_dtype == "fp8",
            replicas_min=args.replicas_min,
            router=args.router,
            progress=progress,
        )
    fleet = report.recommended
    files = {} if fleet is None else engine_files(fleet, tables[fleet.hardware], report, args.model or imported.model)
    if args.json:
        print(json.dumps({**report.to_dict(), "read": imported.describe()}))
    else:
        print_report(plan_report(report))
    if args.html:
        caption = (
            "All fleets tried, each with its number of GPUs: cost against the latencies that the objectives (dashed) "
            "bound, times the median error of measured runs; the lines reach to the 90% bound. Filled: meets all."
        )
        figures = {caption: plan_figure(report)}
        title, read = f"Plan for {args.trace.name}", log_lines(args.trace, imported)
        write_page(args.html, title, read, plan_report(report), figures, files)
    if args.png:
        write_picture(args.png, plan_figure(report))
    if args.out:
        write_table(_frame(report), args.out)
    if args.export and fleet is not None:
        write_export(export_file, chosen_file(files, args.export))
    elif args.export:
        why = report.undecided or "no fleet tried meets the objectives."
        print(f"wrote no settings for {args.export}: {why}", file=sys.stderr)
    return 0 if report.plans else 1


def _plan_sessions(args: argparse.Namespace) -> int:
    """How many sessions each of the tables carries."""
    from ops.plan import registered_tables, tables_of_files
    from ops.sessions import plan_sessions, plans_json, read_sessions, sessions_table

    sessions, notes = read_sessions(args.sessions)
    tables = tables_of_files(args.table or ())
    if args.hardware or not tables:
        tables |= registered_tables(names(args.hardware) or ["a100-80gb"], args.model)
    found = {name: plan_sessions(sessions, table, args.kv_pool_tokens) for name, table in tables.items()}
    if args.json:
        print(json.dumps({name: plans_json(plans) for name, plans in found.items()}))
        return 0
    print(
        f"{args.sessions}: {len(sessions)} sessions of {len(sessions.tool_s)} turns" + "".join(f"; {n}" for n in notes)
    )
    for name, plans in found.items():
        print(f"\n{name}\n{sessions_table(plans)}")
    return 0


def names(given: list[str] | None) -> list[str] | None:
    """Names of an option that may be repeated and separates names by commas; None if it is not given."""
    return None if given is None else [name.strip() for text in given for name in text.split(",")]


def _frame(report: PlanReport) -> Any:
    """All fleets tried as a table, one a row."""
    import pandas as pd

    return pd.json_normalize(report.to_dict()["tried"])
