"""Options that choose a lookup table, for the commands that play on one."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simulator.hardware.tables import ServingTables


def add_table_arguments(parser: Any) -> None:
    """Add the alternatives ``--hardware`` and ``--table`` to a parser or a group of its options."""
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument(
        "--hardware", help="table or card, see `inferencegym hardware` (default: the model's first, or a100-40gb)"
    )
    chosen.add_argument("--table", type=Path, help="your own table, written by measure or import-bench")
    parser.add_argument("--model", help="model, such as llama-3.1-8b (default: the log's, or the card's only one)")


def add_objective_argument(parser: Any, effect: str = "") -> None:
    """Add ``--objective`` to a parser or a group of its options; ``effect`` ends its help."""
    parser.add_argument(
        "--objective",
        action="append",
        default=[],
        metavar="ttft_p99=500",
        help="bound (ms) of ttft, tpot, itl or e2e (p50, p90, p95, p99, mean); may be given several times" + effect,
    )


def add_drafts_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--drafts`` to a command that searches settings."""
    parser.add_argument(
        "--drafts", action="store_true", help="also try settings with draft tokens, which need a draft model"
    )


def add_kv_cache_argument(parser: Any) -> None:
    """Add ``--kv-cache-dtype`` to a parser or a group of its options."""
    parser.add_argument(
        "--kv-cache-dtype",
        choices=("auto", "fp8"),
        default="auto",
        help="precision of the KV cache; fp8 holds twice as many tokens and has attention times of its own, except on "
        "the A100 (default: that of the table)",
    )


def chosen_tables(
    args: argparse.Namespace, kv_cache_dtype: str = "auto", log_model: Callable[[], str | None] = lambda: None
) -> ServingTables:
    """The table that was chosen, or the default, with this KV cache.

    Where the options leave several models, that of the log counts, and becomes ``args.model``. Of several tables of the
    hardware and the model the first is taken, and a line says so. Raises :class:`InvalidConfigError` if there is none.
    """
    from inferencegym.errors import InvalidConfigError, short_text
    from inferencegym.tasks import table_index
    from simulator.hardware.catalogue import table_path, tables_of_log
    from simulator.hardware.sources import with_fp8_kv
    from simulator.hardware.tables import load_tables

    if args.model and args.table:
        raise InvalidConfigError("--model does not go with --table, which is of one model: leave it out", "model")
    if args.hardware and "," in args.hardware:
        raise InvalidConfigError(
            f"--hardware={short_text(args.hardware)} is not allowed: this command plays on one table", "hardware"
        )
    path, hardware = args.table, [args.hardware] if args.hardware else None
    if path is None:
        try:
            found, args.model = tables_of_log(hardware, args.model, log_model)
        except InvalidConfigError:
            if hardware or args.model:
                raise
            found = tuple(table_index())[:1]
            if named := log_model():
                print(f"no table of the log's model {short_text(named)}: playing on {found[0]}", file=sys.stderr)
        path = table_path(found[0])
        if found[1:]:
            print(f"playing on {found[0]}; --hardware takes {', '.join(found[1:])} too", file=sys.stderr)
    tables = load_tables(path)
    return with_fp8_kv(tables) if kv_cache_dtype == "fp8" else tables
