"""``inferencegym build-table``: build the lookup table of a card, or of any deployment with measured operator times."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simulator.hardware.operators import Source
    from simulator.hardware.profiles import EngineProfile


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--out", type=Path, help="file to write (default: NAME.parquet, or the shipped table's file)")
    parser.add_argument("--hardware", help="card of profiles.json, from its measured CSV files (default a100-40gb)")
    parser.add_argument("--system", help="system of `inferencegym hardware --systems` instead, for example h100_sxm")
    parser.add_argument("--model", help="with --system: model, for example llama-3.1-70b")
    parser.add_argument("--tp", type=int, default=1, help="with --system: cards per replica (default 1)")
    parser.add_argument("--engine", default="vllm", help="with --system: engine of the kernels (default vllm)")
    parser.add_argument(
        "--tiers", help="with --system: precisions, most precise first (default: all that are measured)"
    )
    parser.add_argument(
        "--kv-cache-dtype", default="bf16", help="with --system: precision of the KV cache, bf16 or fp8"
    )
    parser.add_argument(
        "--profile", help="host overheads: a profile of profiles.json, or a JSON file with the fields of one"
    )
    parser.add_argument(
        "--saturated", action="store_true", help="with --system: add the columns of a saturated engine (takes minutes)"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: all cores)")


def run(args: argparse.Namespace) -> int:
    """Build and write the table."""
    from inferencegym.errors import InvalidConfigError
    from simulator.offline.table import build_table

    if bool(args.system) != bool(args.model) or (args.system and args.hardware):
        raise InvalidConfigError("give --hardware CARD, or --system and --model")
    began = time.perf_counter()
    source, out = _deployment(args) if args.system else _card(args)
    profile = _profile(args.profile or source.card.engine)
    # Operators alone take seconds, less than starting processes.
    saturated = args.saturated or not args.system
    jobs, notes = args.jobs if saturated else 1, source.listed_operators()
    path = build_table(out, source, profile, jobs, progress=saturated, notes=notes, saturated=saturated)
    print(f"{path}: {path.stat().st_size} bytes, {', '.join(source.tiers)}, {time.perf_counter() - began:.1f} s")
    for warning in source.provenance(profile).get("warnings", []):
        print(f"warning: {warning}")
    return 0


def _card(args: argparse.Namespace) -> tuple[Source, Path]:
    from inferencegym.tasks import table_index
    from simulator.hardware.catalogue import table_path
    from simulator.hardware.measured_model import MeasuredSource
    from simulator.hardware.profiles import hardware

    card = hardware(args.hardware or next(iter(table_index())))
    shipped = table_path(card.name) if card.name in table_index() else Path(f"{card.name}.parquet")
    return MeasuredSource(card), args.out or shipped


def _deployment(args: argparse.Namespace) -> tuple[Source, Path]:
    from simulator.hardware.aiconfigurator import AiconfiguratorSource, Deployment

    tiers = tuple(args.tiers.split(",")) if args.tiers else None
    source = AiconfiguratorSource(Deployment(args.system, args.model, args.engine, args.tp, tiers, args.kv_cache_dtype))
    name = f"{args.system}-{args.model}" + (f"-tp{args.tp}" if args.tp > 1 else "")
    name += f"-{args.kv_cache_dtype}-kv" if args.kv_cache_dtype != "bf16" else ""
    return source, args.out or Path(f"{name}.parquet")


def _profile(wanted: str) -> EngineProfile:
    from simulator.hardware.profiles import engine, engine_of_file

    return engine_of_file(Path(wanted)) if wanted.endswith(".json") else engine(wanted)
