"""A measured engine with known iteration times, and its tables."""

from __future__ import annotations

from pathlib import Path

from simulator.hardware.engine_times import EngineFacts, EngineSource, EngineTimes, engine_profile
from simulator.hardware.operators import OperatorModel
from simulator.hardware.tables import ServingTables, load_tables
from simulator.offline.table import build_table

TIMES = EngineTimes(12.0, (0.0,), (0.6,), 0.25, 0.002, 0.0002, 16, 700, 600)
FACTS = EngineFacts("some-model", 16, 2000, 8192.0, 64, 2048, 1024, weights_gb=0.5, memory_share=0.9)
WAY_MS = 5.0


def known(times: EngineTimes = TIMES) -> OperatorModel:
    """Iteration times of the engine."""
    source = EngineSource("known", times, FACTS)
    return source.operators("served", engine_profile("known", FACTS, WAY_MS, "a test"))


def table_file(path: Path, facts: EngineFacts = FACTS) -> Path:
    """Write the engine's table, as ``inferencegym measure`` does."""
    source, profile = EngineSource(path.stem, TIMES, facts), engine_profile(path.stem, facts, WAY_MS, "a test")
    return build_table(path, source, profile, saturated=False)


def engine_tables(folder: Path, facts: EngineFacts = FACTS) -> ServingTables:
    """The engine's table with these facts."""
    return load_tables(table_file(folder / "known.parquet", facts))
