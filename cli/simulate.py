"""``inferencegym simulate``: one configuration under a steady, bursty or recorded load, or under many rates."""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cli.import_trace import add_log_arguments, print_log, read_log
from cli.tables import add_kv_cache_argument, add_objective_argument, add_table_arguments, chosen_tables
from inferencegym.models import ROUTERS

if TYPE_CHECKING:
    from ops.objectives import Objective
    from ops.played import PlayedLoad
    from simulator.hardware.tables import ServingTables
    from simulator.load.requests import RequestLog

LATENCIES: Final = {
    "ttft": "to the first token (TTFT)",
    "tpot": "per output token (TPOT)",
    "itl": "between tokens (ITL)",
    "e2e": "of the request (E2E)",
}
SWEEP_POINTS: Final = 12
DRAWN_S: Final = 300.0
"""Seconds of requests that are drawn for a rate, unless --requests or --burst-s is given."""
LEAST_DRAWN: Final = 300
STEADY: Final = 10.0
"""Fewest requests of a run, for each that is in the fleet at a time, whose figures are those of a steady state."""
DRAWN: Final = {
    "qps": 10.0,
    "prompt_tokens": 247.0,
    "prompt_cv": 0.0,
    "output_tokens": 350.0,
    "output_cv": 0.55,
    "seed": 0,
    "requests": None,
    "burst_s": None,
}
"""Options of the load that is drawn, and their defaults; a recorded one does without."""
CURVE: Final = (
    *("qps", "output_tokens_per_s", "completed_per_s", "ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms"),
    *("peak_kv_occupancy", "preemptions", "rejected"),
)
"""Columns of a sweep's printed table; files and JSON have all figures."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    fleet = parser.add_argument_group("fleet")
    fleet.add_argument(
        "--gpus",
        type=int,
        default=1,
        help="number of replicas; a table says how many cards each has (default %(default)s)",
    )
    fleet.add_argument(
        "--batch-size",
        type=int,
        default=256,
        help="maximum number of running requests per replica (default %(default)s)",
    )
    fleet.add_argument(
        "--kv-budget", type=float, default=0.95, help="share of free memory for the KV pool (default %(default)s)"
    )
    fleet.add_argument(
        "--spec-length", type=int, default=0, help="draft tokens per verification: 0, 1, 2, 4, 8 (default %(default)s)"
    )
    fleet.add_argument("--quant", help="precision, one of the table's (default: the model name's, or its first)")
    fleet.add_argument(
        "--disagg",
        action="store_true",
        help="give every replica a second GPU for prefill (default: prefill on the decoding GPUs)",
    )
    fleet.add_argument(
        "--prefill-replicas",
        type=int,
        metavar="N",
        help="add N replicas that only prefill, for all the others",
    )
    fleet.add_argument(
        "--router",
        choices=ROUTERS,
        default="shared",
        help="how requests reach replicas: a shared queue, or a router with a queue per replica (default %(default)s)",
    )
    add_table_arguments(fleet)
    add_kv_cache_argument(fleet)
    load = parser.add_argument_group("load")
    load.add_argument(
        "--qps", type=float, help=f"mean requests per second, Poisson arrivals (default {DRAWN['qps']:g})"
    )
    load.add_argument(
        "--requests",
        type=int,
        help=f"number of requests (default: those of {DRAWN_S:g} s, at least {LEAST_DRAWN} and {STEADY:g} for each "
        "client of --closed; with --burst-s, as many as arrive in it)",
    )
    load.add_argument("--prompt-tokens", type=float, help=f"mean prompt length (default {DRAWN['prompt_tokens']:g})")
    load.add_argument(
        "--prompt-cv",
        type=float,
        help=f"coefficient of variation of prompt lengths, log-normal (default {DRAWN['prompt_cv']:g})",
    )
    load.add_argument("--output-tokens", type=float, help=f"mean output length (default {DRAWN['output_tokens']:g})")
    load.add_argument(
        "--output-cv",
        type=float,
        help=f"coefficient of variation of output lengths, log-normal (default {DRAWN['output_cv']:g})",
    )
    load.add_argument("--burst-s", type=float, help="requests arrive only in the first BURST_S seconds")
    load.add_argument(
        "--closed",
        type=int,
        metavar="N",
        help="closed loop: N clients, each with one request at a time (default: open loop, at the rate of --qps)",
    )
    load.add_argument("--trace", type=Path, help="request log (see docs/operators.md) instead of drawn requests")
    load.add_argument("--seed", type=int, help=f"seed of the drawn requests (default {DRAWN['seed']})")
    add_log_arguments(parser)
    out = parser.add_argument_group("output")
    out.add_argument(
        "--sweep",
        metavar="qps=LOW:HIGH[:N]",
        help=f"latency against throughput at N rates (default {SWEEP_POINTS}) from LOW to HIGH, each for "
        f"{DRAWN_S:g} s; a log (--trace) is played faster or slower",
    )
    add_objective_argument(out)
    out.add_argument("--per-request", type=Path, metavar="FILE", help="write every request (.csv, .parquet, .json)")
    out.add_argument("--out", type=Path, metavar="FILE", help="write the sweep's table (.csv, .parquet, .json)")
    out.add_argument("--png", type=Path, metavar="FILE", help="draw the sweep (needs matplotlib: extra report)")
    out.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Simulate the load and print latencies, throughput and memory."""
    from ops.objectives import parse_objective
    from simulator.hardware.catalogue import usual_name

    _check(args)
    objectives = [parse_objective(text) for text in args.objective]
    read = cache(lambda: None if args.trace is None else read_log(args.trace, args))
    tables = chosen_tables(args, args.kv_cache_dtype, lambda: log.model if (log := read()) else None)
    imported = read()
    if imported is not None and not args.json:
        print_log(args.trace, imported)
    played = (
        f"{usual_name(str(tables.meta['model']))} on {tables.meta['hardware']}, replicas: {args.gpus}; latencies as "
        "simulated (`plan` corrects them by measurements)"
    )
    serve = _server(args, None if imported is None else imported.log, tables)
    if args.sweep is not None:
        return _sweep(args, objectives, serve, played)
    served = serve(None)
    result = served.figures()
    _warn_if_unsteady(args, result)
    verdicts = _verdicts(objectives, result)
    if args.per_request is not None:
        _write_requests(served, args.per_request)
    if args.json:
        print(json.dumps({**result, **({"objectives": verdicts} if verdicts else {})}))
        return 0
    print(played)
    if served.refused:
        print(served.refused)
    _print(result)
    for objective in objectives:
        print(f"{objective.label} <= {objective.limit_ms:g} ms: {'met' if verdicts[str(objective)] else 'missed'}")
    return 0


def _warn_if_unsteady(args: argparse.Namespace, result: dict[str, Any]) -> None:
    """Warn if too few requests were drawn for a steady state."""
    e2e_s = result["e2e_mean_ms"] / 1e3
    needed = STEADY * (args.closed or args.qps * e2e_s)
    if args.trace is None and args.burst_s is None and result["n_requests"] < needed:
        print(
            f"warning: a request takes {e2e_s:.3g} s, so these {result['n_requests']:,} requests reach no steady "
            f"state: give --requests {math.ceil(needed / 100) * 100} or more (if those reach none either, the load is "
            "more than the fleet serves)",
            file=sys.stderr,
        )


def _print(result: dict[str, Any]) -> None:
    """The figures of a load in words and tables."""
    from cli.figures import print_table
    from ops.report import levels, plain

    said = {name: plain(value) for name, value in result.items()}
    print(
        f"{said['completed']} of {said['n_requests']} requests answered, {said['rejected']} refused, in "
        f"{said['makespan_s']} s: {said['output_tokens_per_s']} output tokens/s"
    )
    statistics = ("mean", "p50", "p90", "p95", "p99")
    rows = [[name, *(said[f"{key}_{each}_ms"] for each in statistics)] for key, name in LATENCIES.items()]
    print_table(["latency (ms)", *statistics], rows)
    if len(result["classes"]) > 1:
        print_table(
            ["class", "answered", "TTFT p50 ms", "p99 ms"],
            [[name, *each.values()] for name, each in result["classes"].items()],
        )
    print(f"KV pool at most {result['peak_kv_occupancy']:.1%} full, preemptions: {said['preemptions']}")
    memory = "more than there is (out of memory)" if result["oom"] else f"{said['gpu_memory_gb']} GB"
    print(f"memory used on a GPU: {memory}; GPU-seconds: {said['gpu_seconds']}")
    print(f"timings of the busy seconds: {levels(result['support'])}")


def _check(args: argparse.Namespace) -> None:
    from cli.figures import check_table
    from inferencegym.errors import InvalidConfigError, short_repr
    from inferencegym.files import require_matplotlib, require_writable
    from simulator.load.requests import MAX_REQUESTS

    limits = (("gpus", 1, 4096), ("prefill_replicas", 1, 4096), ("closed", 1, MAX_REQUESTS))
    for name, low, high in limits:
        value = getattr(args, name)
        if value is not None and not low <= value <= high:
            option = f"--{name.replace('_', '-')}={short_repr(value)}"
            raise InvalidConfigError(f"{option} is not allowed: it must be from {low} to {high}")
    if args.requests is not None and args.requests < 1:
        raise InvalidConfigError(f"--requests={short_repr(args.requests)} is not allowed: it must be at least 1")
    _check_drawn(args)
    if args.sweep is None and (args.out or args.png):
        raise InvalidConfigError("--out and --png write a sweep: give --sweep qps=LOW:HIGH")
    if args.sweep is not None and (args.per_request or args.closed):
        raise InvalidConfigError("--sweep cannot be combined with --per-request or --closed")
    for path in filter(None, (args.per_request, args.out)):
        check_table(path)
        require_writable(path)
    if args.png:
        require_matplotlib()
        require_writable(args.png)


def _check_drawn(args: argparse.Namespace) -> None:
    """Refuse options of a drawn load that the load asked for would ignore; fill in the defaults of the others."""
    from inferencegym.errors import InvalidConfigError

    for name, default in DRAWN.items():
        option = f"--{name.replace('_', '-')}"
        if getattr(args, name) is None:
            setattr(args, name, default)
        elif args.trace is not None:
            instead = "; --sweep plays the log faster or slower" if name == "qps" else ""
            raise InvalidConfigError(f"{option} is for drawn requests, and --trace gives recorded ones{instead}", name)
        elif name == "qps" and (args.closed or args.sweep):
            other = "--closed" if args.closed else "--sweep"
            raise InvalidConfigError(f"--qps does not go with {other}, which sets the rate itself", name)


def _server(args: argparse.Namespace, log: RequestLog | None, tables: ServingTables) -> Any:
    """A function that serves the load at a rate (None: the rate of the options or the log)."""
    from cli.figures import progress_line
    from inferencegym.models import ServeAction
    from ops.played import PlayedLoad
    from simulator.hardware.catalogue import precision_named
    from simulator.load.requests import MAX_REQUESTS
    from simulator.whatif import steady_requests

    for warning in tables.meta.get("warnings", ()):
        print(f"warning: {warning}", file=sys.stderr)
    precision = args.quant or precision_named(args.model or "")
    knobs = {
        "kv_budget": args.kv_budget,
        "spec_length": args.spec_length,
        "prefill_disagg": args.disagg or args.prefill_replicas is not None,
        "quant_tier": tables.tier_index(precision) if precision else 0,
    }
    # The knob ends where the fluid model's tables do, a played batch need not.
    action = replace(ServeAction.from_dict(knobs), batch_size=args.batch_size)

    def requests_at(qps: float | None) -> RequestLog:
        if log is not None:
            rate = len(log.arrival_s) / max(float(log.arrival_s[-1]), 1.0)
            return log if qps is None else log.faster(qps / rate)
        n_requests, rate_rps = args.requests, args.qps if qps is None else qps
        if n_requests is None and args.burst_s is None:
            drawn = min(MAX_REQUESTS + 1, DRAWN_S * rate_rps)  # of a rate that is no number too, which is refused below
            n_requests = math.ceil(max(LEAST_DRAWN, drawn, STEADY * (args.closed or 0)))
        return steady_requests(
            rate_rps,
            n_requests,
            args.prompt_tokens,
            args.output_tokens,
            args.output_cv,
            args.prompt_cv,
            args.burst_s,
            args.seed,
        )

    def serve(qps: float | None) -> PlayedLoad:
        requests = requests_at(qps)
        what = "simulating" if qps is None else f"simulating {qps:.3g} requests/s"
        with progress_line(what) as progress:
            return PlayedLoad(
                *(action, requests, tables, args.router, args.gpus, args.prefill_replicas, args.closed or 0),
                progress=partial(progress, what),
            )

    return serve


def sweep_rates(text: str) -> list[float]:
    """Rates of ``qps=LOW:HIGH[:N]``, evenly spaced by ratio."""
    from inferencegym.errors import InvalidConfigError, short_repr

    name, _, span = text.partition("=")
    try:
        low, high, *count = (float(part) for part in span.split(":"))
        points = int(count[0]) if count else SWEEP_POINTS
        if name != "qps" or len(count) > 1 or not 0 < low < high <= 1e5 or not 2 <= points <= 200:
            raise ValueError
    except ValueError:
        raise InvalidConfigError(
            f"--sweep={short_repr(text)} is not allowed: it must be qps=LOW:HIGH or qps=LOW:HIGH:N with 0 < LOW < HIGH "
            "requests per second and 2 to 200 points, as in qps=1:50"
        ) from None
    return [low * (high / low) ** (i / (points - 1)) for i in range(points)]


def _sweep(args: argparse.Namespace, objectives: list[Objective], serve: Any, played: str) -> int:
    from cli.figures import print_table, write_table
    from ops.objectives import margin
    from ops.report import curve_figure, write_picture

    rows: list[dict[str, Any]] = []
    for qps in sweep_rates(args.sweep):
        result = serve(qps).figures()
        row = {"qps": round(qps, 4), "completed_per_s": result["completed"] / result["makespan_s"], **result}
        rows.append({**row, "objectives_met": margin(objectives, result) >= 0} if objectives else row)
    best = max((row["qps"] for row in rows if row.get("objectives_met")), default=None)
    if args.json:
        print(json.dumps({"sweep": rows, "objectives": args.objective, "highest_qps_within_objectives": best}))
    else:
        columns = (*CURVE, *(("objectives_met",) if objectives else ()))
        print(played)
        print_table(columns, [[row[name] for name in columns] for row in rows])
        if objectives:
            said = "no rate of this sweep" if best is None else f"{best:g} requests per second and less"
            print(f"within {', '.join(map(str, objectives))}: {said}")
    if args.out:
        import pandas as pd

        write_table(pd.json_normalize(rows), args.out)
    if args.png:
        write_picture(args.png, curve_figure(rows, "latency against throughput (simulated)"))
    return 0


def _verdicts(objectives: list[Objective], result: dict[str, Any]) -> dict[str, bool]:
    return {str(o): result[o.figure] <= o.limit_ms for o in objectives}


def _write_requests(served: PlayedLoad, path: Path) -> None:
    import pandas as pd

    from cli.figures import write_table

    write_table(pd.DataFrame(served.per_request()), path)
