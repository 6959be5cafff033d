"""``inferencegym shadow``: compare policies on a request log."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cli.import_trace import add_log_arguments, log_lines, print_log, read_log
from cli.tables import (
    add_drafts_argument,
    add_kv_cache_argument,
    add_objective_argument,
    add_table_arguments,
    chosen_tables,
)

if TYPE_CHECKING:
    from simulator.hardware.tables import ServingTables


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
        help="policy to compare (default heuristic), constant:{...} included; several separated by commas or "
        "by several --agent",
    )
    parser.add_argument(
        "--baseline",
        default="{}",
        metavar="FILE|JSON",
        help="your own settings, named 'fixed' in the report: your file for `vllm serve --config` (.yaml), or knobs as "
        "JSON; what is left out is vLLM's default (default {})",
    )
    parser.add_argument("--task", help="take the number of GPUs, objectives and stored policies from this task")
    parser.add_argument(
        "--gpus", type=int, help="number of GPUs for every policy (default: the task's, or sized to the log)"
    )
    add_objective_argument(
        parser,
        "; the one of TTFT, a percentile, says which requests are in time, the others are only checked (default "
        "ttft_p99=500)",
    )
    parser.add_argument(
        "--prices",
        type=Path,
        metavar="FILE",
        help='prices for costs: {"currency": "USD", "per_gpu_hour": {"a100-40gb": 1.5}} (default: GPU-seconds only)',
    )
    add_table_arguments(parser)
    add_drafts_argument(parser)
    add_kv_cache_argument(parser)
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
    from cli.figures import export_path, print_report, write_export
    from inferencegym.errors import InvalidConfigError, short_repr
    from inferencegym.files import require_matplotlib, require_writable
    from inferencegym.tasks import get_task
    from ops.export import EXPORTS, knobs_of_vllm, settings_of
    from ops.objectives import parse_objective
    from ops.prices import load_prices
    from ops.report import shadow_figures, shadow_report, write_page
    from ops.shadow import CONSTANT, FIXED, OWN_PRECISION, shadow
    from simulator.hardware.catalogue import precision_named

    agents = agent_names(",".join(args.agent or ["heuristic"]))
    if args.export_policy is not None and args.export is None:
        raise InvalidConfigError("--export-policy names whose settings --export writes: give --export vllm")
    possible = FIXED, CONSTANT, OWN_PRECISION, *agents
    if args.export_policy not in (None, *possible):
        known = ", ".join(possible)
        raise InvalidConfigError(f"--export-policy={short_repr(args.export_policy)} is not compared: one of {known}")
    export_file = export_path(args, "shadow")
    if args.html:
        require_matplotlib()
        require_writable(args.html)
    if export_file:
        require_writable(export_file)
    task = get_task(args.task) if args.task else None
    if task and not (args.hardware or args.model or args.table):
        args.hardware = task.hardware
    log = cache(lambda: read_log(args.trace, args))
    config = _vllm_file(args.baseline)
    if config.get("kv-cache-dtype") in ("fp8", "fp8_e4m3"):
        args.kv_cache_dtype = "fp8"
        del config["kv-cache-dtype"]
    if not args.table:
        args.model = args.model or config.get("model")
    tables = chosen_tables(args, args.kv_cache_dtype, lambda: log().model)
    ignored: list[str] = []
    if config:
        fixed, ignored = knobs_of_vllm({**config, "model": args.model or ""}, tables)
    else:
        fixed = _baseline(args.baseline, tables, precision_named(args.model or ""))
    load_own_agents(agents)
    imported = log()
    if not args.json:
        print_log(args.trace, imported)
    report = shadow(
        imported.log,
        agents,
        fixed=fixed,
        n_gpus=args.gpus,
        objectives=[parse_objective(text) for text in args.objective],
        task=task,
        tables=tables,
        prices=load_prices(args.prices, [str(tables.meta["hardware"])]) if args.prices else None,
        drafts=args.drafts,
    )
    told = shadow_report(report, tables)
    if ignored:
        note = f"Options of {args.baseline} that are not simulated: {', '.join(ignored)}."
        told = replace(told, lines=[note, *told.lines])
    if args.json:
        print(json.dumps({**report.to_dict(), "read": imported.describe(), "baseline_ignored": ignored}))
    else:
        print_report(told)
    model = args.model or imported.model
    if args.html:
        figures = shadow_figures(report, tables.tiers)
        files = {"Recommendation for vLLM": EXPORTS["vllm"](settings_of(report, tables, model=model))}
        title, read = f"Shadow report: {args.trace.name}", log_lines(args.trace, imported)
        written = write_page(args.html, title, read, told, figures, files)
        print(f"wrote {written}", flush=True)
    if args.export:
        text = EXPORTS[args.export](settings_of(report, tables, args.export_policy, model), args.draft_model)
        write_export(export_file, text)
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


_VLLM_NAMES: Final = {
    "max_num_seqs": "did you mean batch_size?",
    "num_speculative_tokens": "did you mean spec_length?",
    "quantization": "did you mean quant_tier?",
    "dtype": "did you mean quant_tier?",
    "gpu_memory_utilization": "leave it out for vLLM's own default, or give kv_budget, which is not the share of the "
    "memory but of the KV pool that fits into it",
}
"""What to write instead of vLLM's names."""


def _vllm_file(text: str) -> dict[str, Any]:
    """Options of a vLLM configuration file; empty if the text is not the name of a YAML file."""
    from inferencegym.errors import InvalidConfigError, short_text
    from inferencegym.installation import install_extra

    if not text.endswith((".yaml", ".yml")):
        return {}
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise InvalidConfigError(f"--baseline {text} needs PyYAML: {install_extra('report')}") from error
    try:
        value = yaml.safe_load(Path(text).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidConfigError(f"--baseline {text} cannot be read: {short_text(str(error), 200)}") from error
    if not isinstance(value, dict) or not value:
        raise InvalidConfigError(f"--baseline {text} is no configuration of `vllm serve`: it needs lines NAME: VALUE")
    return {str(name).replace("_", "-"): option for name, option in value.items()}


def _baseline(text: str, tables: ServingTables, precision: str | None) -> dict[str, Any]:
    """The user's settings, by default in this precision; a precision may have its name in the table."""
    from inferencegym.errors import InvalidConfigError

    fixed = {**({"quant_tier": precision} if precision else {}), **_object(text)}
    for name in fixed:
        if (instead := _VLLM_NAMES.get(name.lower().replace("-", "_"))) is not None:
            raise InvalidConfigError(f"--baseline: unknown field {name}: {instead}")
    if isinstance(tier := fixed.get("quant_tier"), str):
        fixed["quant_tier"] = tables.tier_index(tier)
    return fixed


def _object(text: str) -> dict[str, Any]:
    from inferencegym.errors import InvalidConfigError
    from inferencegym.messages import parse_json

    try:
        value = parse_json(text, InvalidConfigError)
    except InvalidConfigError as error:
        raise InvalidConfigError(
            f"--baseline: {error}; write --baseline '{{\"batch_size\": 256}}', or name a .yaml file of vLLM"
        ) from error
    if not isinstance(value, dict):
        raise InvalidConfigError("--baseline must be a JSON object of knobs, as in '{\"batch_size\": 256}'")
    return value
