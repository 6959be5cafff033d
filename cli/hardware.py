"""``inferencegym hardware``: list the shipped tables, or the systems and models for further tables with coverage."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "--buildable", action="store_true", help="list what build-table can build: system x model x engine x TP"
    )
    parser.add_argument("--systems", action="store_true", help="list the names of systems, models and precisions")
    parser.add_argument("--system", action="append", help="with --buildable: only this system; may be repeated")
    parser.add_argument("--model", action="append", help="with --buildable: only this model; may be repeated")
    parser.add_argument("--engine", action="append", help="with --buildable: only this engine (default vllm)")
    parser.add_argument("--tp", type=int, action="append", help="with --buildable: cards per replica (default 1 2 4 8)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the catalogue."""
    from inferencegym.tasks import table_index
    from simulator.hardware.catalogue import hardware_data

    if args.systems:
        data = hardware_data()
        found = {key: data[key] for key in ("systems", "models", "tiers", "held_back")}
        print(json.dumps(found, indent=1))
        return 0
    rows = list(_buildable(args)) if args.buildable else [{"name": n, **e} for n, e in table_index().items()]
    if args.json:
        print(json.dumps(rows))
    else:
        _print(rows)
    return 0


def _buildable(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    from inferencegym.errors import InvalidConfigError
    from simulator.hardware.aiconfigurator import AiconfiguratorSource, Deployment
    from simulator.hardware.catalogue import hardware_data

    data = hardware_data()
    for system in args.system or data["systems"]:
        for model in args.model or data["models"]:
            for engine in args.engine or ("vllm",):
                for tp in args.tp or (1, 2, 4, 8):
                    wanted = {"card": system, "model": model, "engine": engine, "cards_per_replica": tp}
                    try:
                        source = AiconfiguratorSource(Deployment(system, model, engine, tp))
                    except InvalidConfigError as error:
                        yield {**wanted, "tiers": [], "refused": str(error)}
                        continue
                    yield {**wanted, "tiers": list(source.tiers), "time_shares": source.time_shares()}


def _print(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold")
    for name in ("table", "card", "model", "engine", "cards", "tier and part"):
        table.add_column(name)
    for name in ("measured", "interpolated", "modelled", "extrapolated"):
        table.add_column(name, justify="right")
    for row in rows:
        first = [row.get("name", ""), row["card"], row["model"], row["engine"], str(row["cards_per_replica"])]
        if "refused" in row:
            table.add_row(*first, row["refused"])
        # Tables of the measured CSV files state cells instead of time.
        for part, shares in (row.get("time_shares") or row.get("coverage", {})).items():
            table.add_row(*first, part, *(f"{share:.0%}" for share in shares.values()))
            first = [""] * 5
        for warning in row.get("warnings", []):
            table.add_row(*[""] * 5, f"warning: {warning}")
    Console(width=170).print(table)
