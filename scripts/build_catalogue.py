"""Build the catalogue's lookup tables and their index: ``python -m scripts.build_catalogue [NAME ...]``.

Without names it rebuilds all tables of ``simulator/data/hardware.json``. ``--index`` builds none, but describes the
existing ones and packs their columns. ``--operators`` only packs the operators of all tables, from which the
discrete-event reference plays them (a minute). ``--constants`` only measures the listed tasks on all tables (minutes);
run it after a change of such a task or of a table. The A100 tables of ``simulator/data/profiles.json`` are described
but never built, because calibrations belong to them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from inferencegym.errors import InvalidConfigError
from inferencegym.files import atomic_write
from inferencegym.tasks import (
    AT,
    DATA_DIR,
    HARDWARE_CALIBRATION_FILE,
    TABLE_INDEX_FILE,
    get_task,
    list_tasks,
    table_index,
)
from simulator.coverage import coverage
from simulator.hardware.catalogue import hardware_data
from simulator.hardware.kernel_times import KernelTimes, write_operators
from simulator.hardware.tables import load_tables, write_archive

MEASURED_TABLES = {"a100-40gb": "traces_llama3_8b.parquet", "a100-80gb": "traces_llama3_8b_a100_80gb.parquet"}


def files() -> dict[str, str]:
    """File of each table by name, the default table first."""
    return MEASURED_TABLES | {name: f"tables/{name}.parquet" for name in hardware_data()["tables"]}


def build(names: list[str]) -> None:
    """Build the named tables of the catalogue."""
    from simulator.hardware.aiconfigurator import AiconfiguratorSource, Deployment
    from simulator.hardware.profiles import engine
    from simulator.offline.table import build_table

    for name in names:
        source = AiconfiguratorSource(Deployment(**hardware_data()["tables"][name]))
        profile, path = engine(source.card.engine), DATA_DIR / files()[name]
        build_table(path, source, profile, saturated=False)
        print(f"{path.name}: {path.stat().st_size} bytes")


def described(file: str) -> dict[str, Any]:
    """Entry of the index for one table."""
    tables = load_tables(DATA_DIR / file)
    meta = tables.meta
    return {
        "file": file,
        "sha256": tables.sha256,
        "model": meta["model"],
        "card": meta["hardware"],
        "cards_per_replica": tables.cards_per_replica,
        "engine": meta.get("aiconfigurator", {}).get("deployment", {}).get("engine", "vllm"),
        "tiers": list(tables.tiers),
        "memory_limit_gb": meta["memory_limit_gb"],
        "profile": meta["engine"],
        "saturated": "tps" in tables.columns,
        "coverage": {tier: shares for tier, shares in coverage(tables).items() if tier != "all"},
        "time_shares": meta.get("time_shares", {}),
        "warnings": meta.get("warnings", []),
    }


def write_index() -> None:
    """Describe all existing tables, and pack their columns."""
    entries = {name: described(file) for name, file in files().items() if (DATA_DIR / file).exists()}
    with atomic_write(TABLE_INDEX_FILE) as temporary:
        temporary.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    write_archive(DATA_DIR / entry["file"] for entry in entries.values())


def pack_operators() -> None:
    """Pack the operators of all tables of the catalogue."""
    from simulator.hardware.aiconfigurator import Deployment, kernels

    def with_fp8_kv(bare: Deployment, tiers: Sequence[str]) -> list[KernelTimes]:
        try:
            return [kernels(replace(bare, kv_cache_dtype="fp8"), tier) for tier in tiers]
        except InvalidConfigError as error:
            print(error)
            return []

    def of_tables() -> Iterator[tuple[str, list[KernelTimes], list[KernelTimes]]]:
        for name, stated in hardware_data()["tables"].items():
            tables = load_tables(DATA_DIR / files()[name])
            bare = replace(Deployment(**stated), tiers=None)
            yield tables.sha256, [kernels(bare, tier) for tier in tables.tiers], with_fp8_kv(bare, tables.tiers)
            print(name, flush=True)

    write_operators(of_tables())


def measure_constants() -> None:
    """Measure floor, best constant throughput, peak and price of the listed tasks on every table except the default."""
    from agents.search.calibration import constants_alone

    stored = json.loads(HARDWARE_CALIBRATION_FILE.read_text(encoding="utf-8"))["tasks"]
    kept = {task_id: entry for task_id, entry in stored.items() if AT not in task_id}
    for name in list(table_index())[1:]:
        for task in list_tasks():
            on_table = get_task(f"{task.task_id}{AT}{name}")
            kept[str(on_table.task_id)] = constants_alone(on_table).entry()
        print(name, flush=True)
    with atomic_write(HARDWARE_CALIBRATION_FILE) as temporary:
        temporary.write_text(json.dumps({"tasks": kept}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="tables to build (default: all)")
    parser.add_argument("--index", action="store_true", help="describe the existing tables and build none")
    parser.add_argument("--constants", action="store_true", help="measure the listed tasks on all tables, build none")
    parser.add_argument("--operators", action="store_true", help="pack the operators of all tables and build none")
    args = parser.parse_args()
    if args.constants:
        measure_constants()
    elif args.operators:
        pack_operators()
    else:
        if not args.index:
            build(args.names or list(hardware_data()["tables"]))
            pack_operators()
        write_index()
