"""``inferencegym import-trace``: make a task of your own traffic from a request log."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ops.log.formats import NAMES

if TYPE_CHECKING:
    from ops.log.reader import Imported


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("file", type=Path, help="the request log")
    add_log_arguments(parser)
    parser.add_argument("--id", required=True, help="id of the new task, for example my-trace")
    parser.add_argument("--out", type=Path, default=Path(), help="folder for ID.npz and ID.json (default: here)")
    parser.add_argument("--replicas", type=int, help="GPUs of the fleet (default: sized to the log)")
    parser.add_argument("--slo-ms", type=float, help="objective for the time to first token (default 500)")
    parser.add_argument("--queue-limit", type=int, help="requests that may wait (default 512)")
    parser.add_argument("--hardware", help="table of the catalogue to play on, see `inferencegym hardware`")
    parser.add_argument("--episode-length", type=int, help="seconds of an episode (default 200)")
    parser.add_argument(
        "--calibrate",
        default="quick",
        choices=("quick", "full", "no"),
        help="how long to search when measuring the task",
    )
    parser.add_argument("--force", action="store_true", help="overwrite existing files of this id")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def add_log_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for reading a request log."""
    parser.add_argument(
        "--format", default="auto", choices=("auto", *NAMES), help="format of the log (default auto: detected)"
    )
    parser.add_argument(
        "--columns",
        metavar="QUANTITY=COLUMN,...",
        help="columns of a table that have no usual name, as in arrival=ts:ms,prompt=tokens_in,output=tokens_out; "
        "quantities: arrival (unit after a colon: s, ms, us, ns), prompt, output, class, priority, reused, status, "
        "blocks, session, id, model, duration (subtracted from an arrival that is the time of the end)",
    )
    parser.add_argument(
        "--run",
        dest="run_index",
        type=int,
        metavar="N",
        help="index of the benchmark in a report with several",
    )
    parser.add_argument(
        "--filter",
        action="append",
        default=[],
        metavar="COLUMN=VALUE[,VALUE]",
        help="only requests with one of these values in a column, as in model=llama-3.1-8b; of several "
        "--filter all must hold",
    )
    parser.add_argument(
        "--skip-bad",
        type=int,
        default=0,
        metavar="N",
        help="leave out up to N rows that cannot be read, and list them (default 0: refuse the first)",
    )
    parser.add_argument(
        "--failed",
        default="count",
        choices=("count", "skip"),
        help="failed requests count as demand, with the median output, or are left out (default count)",
    )
    parser.add_argument(
        "--drop-duplicates", action="store_true", help="of requests with the same id, only the first counts"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N requests of the file")
    parser.add_argument(
        "--from-s", type=float, default=0.0, metavar="S", help="leave out requests before second S of the log"
    )
    parser.add_argument("--to-s", type=float, default=math.inf, metavar="S", help="leave out requests from second S on")


def read_log(path: Path, args: argparse.Namespace) -> Imported:
    """The request log that the options of :func:`add_log_arguments` choose."""
    from ops.log.reader import import_log

    return import_log(
        path,
        args.format,
        columns=args.columns,
        limit=args.limit,
        start_s=args.from_s,
        end_s=args.to_s,
        run=args.run_index,
        skip_failed=args.failed == "skip",
        only=args.filter,
        skip_bad=args.skip_bad,
        drop_duplicates=args.drop_duplicates,
    )


def log_lines(path: Path, imported: Imported) -> list[str]:
    """How a log was read: the source of each quantity, what was left out, and a summary."""
    from ops.capacity import log_summary

    log = log_summary(imported.log)
    sources = "".join(f"; {quantity} from {name}" for quantity, name in imported.columns.items())
    left_out = "".join(f", {n:,} left out ({why})" for why, n in imported.skipped.items())
    lines = [
        f"{path.name}: {imported.format}{sources}",
        f"{log['requests']:,} requests in {log['span_s']:,.0f} s{left_out}",
        f"rate {log['rate_rps']:.2f}/s, peak {log['peak_rps']}/s, dispersion {log['index_of_dispersion']:.1f}",
        f"prompts p50 {log['prompt_tokens_p50']:,.0f} p99 {log['prompt_tokens_p99']:,.0f} tokens",
        f"outputs p50 {log['output_tokens_p50']:,.0f} p99 {log['output_tokens_p99']:,.0f} tokens",
    ]
    if imported.tick_s:
        lines.append(f"arrivals were recorded in steps of {imported.tick_s:g} s and are spread over these steps")
    lines += imported.notes
    if log["reused_share"]:
        how = "the log's own block ids" if log["reuse_measured"] else "Mooncake's published curve"
        lines.append(f"{log['reused_share']:.0%} of the prompt tokens repeat; prefix cache hit rates come from {how}")
    return lines


def print_log(path: Path, imported: Imported) -> None:
    """Print :func:`log_lines`."""
    first, second, *rest = log_lines(path, imported)
    print("\n".join((first, second, *(f"  {line}" for line in rest))))


def run(args: argparse.Namespace) -> int:
    """Import the log, calibrate the task and write both."""
    from agents.search.solver import QUICK, Budget
    from cli.figures import progress_line
    from inferencegym.files import make_folder
    from ops.capacity import largest_pool, log_summary, refused
    from ops.trace_task import check_id, write_trace_task
    from simulator.hardware.tables import tables_of

    check_id(args.id)  # before the calibration, which may take minutes
    imported = read_log(args.file, args)
    make_folder(args.out)
    tables, log = tables_of(args.hardware), imported.log
    lengths, outcome = log.prompt_tokens + log.output_tokens, "would be refused by an engine, but the task serves them"
    too_long = refused(lengths, tables, largest_pool(tables), outcome)
    if not args.json:
        print_log(args.file, imported)
        if too_long:
            print(f"  {too_long}")
    budget = {"quick": QUICK, "full": Budget(), "no": None}[args.calibrate]
    with progress_line("calibrating") as progress:
        written = write_trace_task(
            imported,
            args.id,
            args.out,
            settings=_settings(args),
            origin=args.file.name,
            budget=budget,
            force=args.force,
            progress=progress,
        )
    if args.json:
        summary = {**imported.describe(), **log_summary(log)}
        print(json.dumps({"log": summary, "too_long": too_long, **written.to_dict()}))
        return 0
    _print(written)
    return 0


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    given = {
        "n_replicas": args.replicas,
        "slo_target_ms": args.slo_ms,
        "queue_limit": args.queue_limit,
        "episode_length": args.episode_length,
        "hardware": args.hardware,
    }
    return {name: value for name, value in given.items() if value is not None}


def _print(written: Any) -> None:
    entry = written.entry
    print(f"fleet of {entry['n_replicas']}, objective {entry['slo_target_ms']:g} ms")
    if written.solved is not None:
        c, solved = written.solved.calibration, written.solved
        print(f"  floor {c.floor_tps:.0f}, best {c.optimal_tps:.0f} tokens/s, price {c.price:.4g}")
        print(f"  best constant action scores {solved.best_static['training_score']:.3f} (training seeds)")
    task_id = written.task_file.stem
    print(f"wrote {written.trace_file} and {written.task_file}; play it with")
    if written.solved is None:
        print(f"  INFERENCEGYM_TASKS={written.task_file} inferencegym calibrate --task {task_id}")
    print(f"  INFERENCEGYM_TASKS={written.task_file} inferencegym evaluate --task {task_id}")
