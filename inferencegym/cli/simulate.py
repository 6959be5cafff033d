"""``inferencegym simulate``: simulate one configuration under a steady, bursty or recorded load."""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--gpus", type=int, default=1, help="replicas, one GPU each (default 1)")
    parser.add_argument(
        "--batch-size", type=int, default=256, help="most requests that run at once on a replica (default 256)"
    )
    parser.add_argument(
        "--kv-budget", type=float, default=0.95, help="share of free memory for the KV pool (default 0.95)"
    )
    parser.add_argument("--spec-length", type=int, default=0, help="draft tokens per verification: 0, 1, 2, 4, 8")
    parser.add_argument("--quant", default="FP16", choices=("FP16", "INT8", "INT4"))
    parser.add_argument("--disagg", action="store_true", help="prefill on separate GPUs")
    parser.add_argument("--memory-gb", type=int, default=40, choices=(40, 80), help="A100 with 40 or 80 GB")
    parser.add_argument("--table", type=Path, help="lookup table to use instead, for example from import-bench")
    parser.add_argument(
        "--qps", type=float, default=10.0, help="mean requests per second, Poisson arrivals (default 10)"
    )
    parser.add_argument("--requests", type=int, help="number of requests (default 300, or as many as fit --burst-s)")
    parser.add_argument("--prompt-tokens", type=float, default=247.0, help="mean prompt length")
    parser.add_argument("--prompt-cv", type=float, default=0.0, help="its coefficient of variation (log-normal)")
    parser.add_argument("--output-tokens", type=float, default=350.0, help="mean output length")
    parser.add_argument("--output-cv", type=float, default=0.55, help="its coefficient of variation (log-normal)")
    parser.add_argument("--burst-s", type=float, help="requests arrive only in the first BURST_S seconds")
    parser.add_argument(
        "--closed", type=int, default=0, metavar="N", help="closed loop: N clients with one request each at a time"
    )
    parser.add_argument(
        "--trace", type=Path, help="request log (see `inferencegym import-trace`) instead of drawn requests"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Simulate the load and print latencies, throughput and memory."""
    from inferencegym.errors import InvalidConfigError, short_repr
    from inferencegym.models import ServeAction
    from simulator.offline.importers import import_log
    from simulator.requests import MAX_REQUESTS
    from simulator.tables import load_tables, shipped_table
    from simulator.whatif import serve_requests, steady_requests

    action = ServeAction.from_dict(
        {
            "kv_budget": args.kv_budget,
            "spec_length": args.spec_length,
            "batch_size": args.batch_size,
            "prefill_disagg": args.disagg,
            "quant_tier": args.quant,
        }
    )
    for name, low, high in (("gpus", 1, 4096), ("closed", 0, MAX_REQUESTS)):
        value = getattr(args, name)
        if not low <= value <= high:
            raise InvalidConfigError(f"--{name}={short_repr(value)} is not allowed: it must be from {low} to {high}")
    if args.requests is not None and args.requests < 1:
        raise InvalidConfigError(f"--requests={short_repr(args.requests)} is not allowed: it must be at least 1")
    n_requests = args.requests if args.requests is not None or args.burst_s is not None else 300
    tables = load_tables(args.table or (shipped_table("a100-80gb") if args.memory_gb == 80 else None))
    if args.trace is not None:
        requests = import_log(args.trace).log
    else:
        requests = steady_requests(
            args.qps,
            n_requests,
            args.prompt_tokens,
            args.output_tokens,
            args.output_cv,
            args.prompt_cv,
            args.burst_s,
            args.seed,
        )
    served = serve_requests(action, requests, tables, n_replicas=args.gpus, closed_clients=args.closed)
    result = served.report().to_dict()
    if args.json:
        print(json.dumps(result))
    else:
        width = max(map(len, result))
        for name, value in result.items():
            print(f"{name:{width}}  {value:.4g}" if isinstance(value, float) else f"{name:{width}}  {value}")
    return 0
