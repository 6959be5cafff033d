"""``inferencegym shadow``: compare policies on a request log."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from inferencegym.cli.import_trace import add_log_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--trace", type=Path, required=True, help="request log, or a packed trace (.npz)")
    add_log_arguments(parser)
    parser.add_argument(
        "--agent", default="heuristic", help="policies, separated by commas; constant:{...} may contain commas"
    )
    parser.add_argument(
        "--baseline", default="{}", metavar="JSON", help="the fixed configuration to compare with; other knobs as naive"
    )
    parser.add_argument("--task", help="take fleet, objectives and stored policies from this task")
    parser.add_argument("--replicas", type=int, help="GPUs of the fleet (default: the task's, or sized to the log)")
    parser.add_argument("--slo-ms", type=float, help="objective for the time to first token (default 500)")
    parser.add_argument("--table", type=Path, help="another lookup table, for example from import-bench")
    parser.add_argument("--html", type=Path, help="write a report with figures (extra: report)")
    parser.add_argument("--export", choices=("vllm",), help="write the best policy's settings as a vLLM configuration")
    parser.add_argument("--export-policy", metavar="NAME", help="export this policy instead of the best")
    parser.add_argument("--export-file", type=Path, help="file to export to (default: shadow-vllm.yaml; - prints it)")
    parser.add_argument("--draft-model", default="YOUR-EAGLE-HEAD", help="draft model named in the export")
    parser.add_argument("--json", action="store_true", help="print the whole report as JSON")


def run(args: argparse.Namespace) -> int:
    """Replay the log under every policy."""
    from agents.shadow.compare import shadow
    from agents.shadow.export import vllm_config
    from agents.shadow.report import check_figures, write_html
    from inferencegym.files import require_writable, write_text
    from inferencegym.models import ServeAction
    from inferencegym.tasks import get_task
    from simulator.tables import load_tables

    export_file = None if str(args.export_file) == "-" else args.export_file or Path("shadow-vllm.yaml")
    if args.html:
        check_figures()
        require_writable(args.html)
    if args.export and export_file:
        require_writable(export_file)
    tables = load_tables(args.table)
    report = shadow(
        _log(args),
        agent_names(args.agent),
        fixed=ServeAction.from_dict(_object(args.baseline)),
        n_replicas=args.replicas,
        slo_ms=args.slo_ms,
        task=get_task(args.task) if args.task else None,
        tables=tables,
    )
    if args.json:
        print(json.dumps(report.to_dict()))
    else:
        _print(report)
    if args.html:
        print(f"wrote {write_html(report, tables, args.html, args.trace.name)}", flush=True)
    if args.export:
        text = vllm_config(report, tables, args.export_policy, args.draft_model)
        if export_file:
            print(f"wrote {write_text(export_file, text)}")
        else:
            print(text, end="")
    return 0


def agent_names(text: str) -> list[str]:
    """Split a list of agent names at commas, except at those within braces."""
    names, depth, start = [], 0, 0
    for i, letter in enumerate(text + ","):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            names.append(text[start:i].strip())
            start = i + 1
    return [name for name in names if name]


def _log(args: argparse.Namespace) -> Any:
    if args.trace.suffix == ".npz":
        from simulator.offline.importers import cut_log
        from simulator.recorded import load_trace

        return cut_log(load_trace(str(args.trace))[0], args.from_s, args.to_s, str(args.trace), args.limit)
    from simulator.offline.importers import import_log

    return import_log(
        args.trace, args.format, limit=args.limit, start_s=args.from_s, end_s=args.to_s, run=args.run_index
    ).log


def _object(text: str) -> dict[str, Any]:
    from inferencegym.errors import InvalidConfigError
    from inferencegym.messages import parse_json

    try:
        value = parse_json(text, InvalidConfigError)
    except InvalidConfigError as error:
        raise InvalidConfigError(f"--baseline: {error}; write --baseline '{{\"batch_size\": 256}}'") from error
    if not isinstance(value, dict):
        raise InvalidConfigError("--baseline must be a JSON object of knobs, as in '{\"batch_size\": 256}'")
    return value


def _print(report: Any) -> None:
    from rich.console import Console
    from rich.table import Table

    log = report.log
    print(
        f"{log['requests']} requests in {log['span_s']:.0f} s on {report.n_replicas} x {report.hardware}, "
        f"objective {report.slo_ms:g} ms"
    )
    table = Table(box=None, header_style="bold")
    for i, name in enumerate(
        (
            "policy",
            "SLO misses",
            "goodput/s",
            "TTFT p50",
            "p90",
            "p99 ms",
            "TPOT ms",
            "tok/s",
            "GPU s/1k",
            "cost",
            "restarts",
        )
    ):
        table.add_column(name, justify="left" if i == 0 else "right")
    best = report.best().policy
    for o in report.outcomes:
        table.add_row(
            o.policy + (" *" if o.policy == best else ""),
            f"{o.slo_miss_share:.1%}",
            f"{o.goodput_rps:.2f}",
            f"{o.ttft_p50_ms:.0f}",
            f"{o.ttft_p90_ms:.0f}",
            f"{o.ttft_p99_ms:.0f}",
            f"{o.tpot_mean_ms:.1f}",
            f"{o.tokens_per_s:.0f}",
            f"{o.gpu_s_per_1k_tokens:.2f}",
            f"{o.cost:.2f}",
            str(o.restarts),
        )
    Console(width=160, soft_wrap=True).print(table)
    print("* best: fewest requests beyond the objective, then the cheapest. 'fixed' is --baseline.")
