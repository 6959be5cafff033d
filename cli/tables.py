"""Options that choose a lookup table, for the commands that play on one."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simulator.hardware.tables import ServingTables


def add_table_arguments(parser: Any) -> None:
    """Add the alternatives ``--hardware`` and ``--table`` to a parser or a group of its options."""
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument(
        "--hardware", help="table or card, see `inferencegym hardware` (default: the first of the model, or a100-40gb)"
    )
    chosen.add_argument("--table", type=Path, help="your own table, written by measure or import-bench")
    parser.add_argument("--model", help="model, such as llama-3.1-8b; required if the card has tables of several")


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


def chosen_tables(args: argparse.Namespace, kv_cache_dtype: str = "auto") -> ServingTables:
    """The table that was chosen, or the default, with this KV cache.

    Of several with the hardware and the model that were named, the first is taken, and a line says so.
    """
    from inferencegym.errors import InvalidConfigError
    from simulator.hardware.catalogue import table_path, tables_named
    from simulator.hardware.sources import with_fp8_kv
    from simulator.hardware.tables import load_tables

    path = args.table
    if args.model and path:
        raise InvalidConfigError("--model does not go with --table, which is of one model: leave it out", "model")
    if args.hardware or args.model:
        first, *others = tables_named([args.hardware] if args.hardware else None, args.model)
        path = table_path(first)
        if others:
            print(f"playing on {first}; --hardware takes {', '.join(others)} too", file=sys.stderr)
    tables = load_tables(path)
    return with_fp8_kv(tables) if kv_cache_dtype == "fp8" else tables
