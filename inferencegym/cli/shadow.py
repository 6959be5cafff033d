"""``inferencegym shadow``: compare policies on a request log."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inferencegym.cli.import_trace import add_log_arguments, print_log, read_log
from inferencegym.cli.tables import add_table_arguments, chosen_tables

if TYPE_CHECKING:
    from agents.shadow.compare import ShadowReport


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "--trace", type=Path, required=True, help="request log (table, JSON, parquet, .gz) or packed trace (.npz)"
    )
    add_log_arguments(parser)
    parser.add_argument(
        "--agent",
        action="append",
        metavar="NAME",
        help="policy to compare (default heuristic); several at commas or by several --agent; constant:{...} is one",
    )
    parser.add_argument(
        "--baseline",
        default="{}",
        metavar="JSON",
        help="your own configuration, 'fixed' in the report; knobs left out are those of the agent naive (default {})",
    )
    parser.add_argument("--task", help="take the number of GPUs, objectives and stored policies from this task")
    parser.add_argument(
        "--gpus", type=int, help="GPUs that every policy has (default: the task's, or sized to the log)"
    )
    parser.add_argument("--slo-ms", type=float, help="objective for the time to first token (default 500)")
    parser.add_argument(
        "--prices",
        type=Path,
        metavar="FILE",
        help='prices for costs: {"currency": "USD", "per_gpu_hour": {"a100-40gb": 1.5}} (default: GPU-seconds only)',
    )
    add_table_arguments(parser)
    parser.add_argument("--html", type=Path, help="write a report with figures (extra: report)")
    parser.add_argument(
        "--export", choices=("vllm", "sglang", "helm"), help="write the settings as a configuration file of this engine"
    )
    parser.add_argument("--export-policy", metavar="NAME", help="export this policy instead of the recommended one")
    parser.add_argument("--export-file", type=Path, help="file to export to (default: shadow-ENGINE.yaml; - prints it)")
    parser.add_argument("--draft-model", default="YOUR-EAGLE-HEAD", help="draft model named in the export")
    parser.add_argument("--json", action="store_true", help="print the whole report as JSON")


def run(args: argparse.Namespace) -> int:
    """Replay the log under every policy."""
    from agents.registry import load_own_agents
    from agents.shadow.compare import shadow
    from agents.shadow.export import EXPORTS, settings_of
    from agents.shadow.prices import load_prices
    from agents.shadow.report import write_html
    from inferencegym.files import require_matplotlib, require_writable, write_text
    from inferencegym.models import ServeAction
    from inferencegym.tasks import get_task

    export_file = None if str(args.export_file) == "-" else args.export_file or Path(f"shadow-{args.export}.yaml")
    if args.html:
        require_matplotlib()
        require_writable(args.html)
    if args.export and export_file:
        require_writable(export_file)
    tables = chosen_tables(args)
    agents = agent_names(",".join(args.agent or ["heuristic"]))
    load_own_agents(agents)
    imported = read_log(args.trace, args)
    if not args.json:
        print_log(args.trace, imported)
    report = shadow(
        imported.log,
        agents,
        fixed=ServeAction.from_dict(_object(args.baseline)),
        n_gpus=args.gpus,
        slo_ms=args.slo_ms,
        task=get_task(args.task) if args.task else None,
        tables=tables,
        prices=load_prices(args.prices) if args.prices else None,
    )
    if args.json:
        print(json.dumps({**report.to_dict(), "read": imported.describe()}))
    else:
        _print(report)
    if args.html:
        print(f"wrote {write_html(report, tables, args.html, args.trace.name)}", flush=True)
    if args.export:
        text = EXPORTS[args.export](settings_of(report, tables, args.export_policy), args.draft_model)
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


def _print(report: ShadowReport) -> None:
    from agents.shadow import scaling
    from agents.shadow.report import verdict
    from inferencegym.cli.figures import print_table

    print(f"{report.n_gpus} x {report.hardware} for every policy, objective {report.slo_ms:g} ms")
    columns = ["policy", "GPUs", "replicas", "SLO misses", "goodput/s", "TTFT p50", "p90", "p99 ms", "TPOT ms", "tok/s"]
    columns += ["GPU-s", *([f"cost {report.currency}"] if report.currency else []), "GPU-s/1k", "restarts"]
    best = report.best()
    rows = []
    for o in report.outcomes:
        cost = report.cost(o)
        latencies = [o.ttft_p50_ms, o.ttft_p90_ms, o.ttft_p99_ms, o.tpot_mean_ms]
        row = [o.policy + (" *" if o is best else ""), o.n_gpus, o.n_replicas, f"{o.slo_miss_share:.1%}", o.goodput_rps]
        row += [*latencies, o.tokens_per_s, o.gpu_seconds, *([] if cost is None else [cost])]
        rows.append([*row, o.gpu_s_per_1k_tokens, o.restarts])
    print_table(columns, rows)
    if report.autoscaling:
        print("best_constant with an autoscaler")
        print_table(list(scaling.COLUMNS), [scaling.row_of(each) for each in report.autoscaling])
    print(f"fixed: {json.dumps(report.fixed_action)}")
    print(f"best_constant: {json.dumps(report.outcomes[1].action)}")
    print(f"* {verdict(report)}")
    print(scaling.scaling_note(report.autoscaling, report.log["span_s"], scaling.WITHIN_MISSES))
