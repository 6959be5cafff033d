"""Sources of operator times, found by the metadata of a table that was built from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from simulator.hardware.engine_times import engine_source
from simulator.hardware.kernel_times import listed_models
from simulator.hardware.measured_model import MeasuredSource
from simulator.hardware.operators import OperatorModel, Source
from simulator.hardware.profiles import EngineProfile, engine, hardware, profiles
from simulator.hardware.tables import ServingTables


def source_of(meta: Mapping[str, Any]) -> Source:
    """The source that a table with this metadata was built from."""
    if "measured_engine" in meta:
        return engine_source(meta["measured_engine"])
    built_from = meta.get("aiconfigurator")
    if built_from is None:
        return MeasuredSource(str(meta["hardware"]))
    # Imported late: only those who rebuild or calibrate tables install this library of 82 MB.
    from simulator.hardware.aiconfigurator import AiconfiguratorSource, Deployment

    return AiconfiguratorSource(Deployment(**built_from["deployment"]))


def operators_of(tables: ServingTables) -> tuple[OperatorModel, ...]:
    """Operator models of a table by precision; those of shipped tables need no library."""
    profile = engine_of(tables.meta)
    found = listed_models(tables.sha256, tables.tiers, profile, float(tables.meta["kv_bytes_per_token"]))
    if found is None:
        source = source_of(tables.meta)
        found = tuple(source.operators(tier, profile) for tier in tables.tiers)
    return found


def fleet_rules_of(tables: ServingTables) -> Mapping[str, Any]:
    """Arguments of the discrete-event reference's ``Fleet`` that say how a table's engine allocates its KV cache."""
    return source_of(tables.meta).fleet_rules if "measured_engine" in tables.meta else {}


def engine_of(meta: Mapping[str, Any]) -> EngineProfile:
    """The engine profile that a table with this metadata was built with.

    Fields that were added since the table was built are those of the shipped profile of that name.
    """
    stated = meta.get("profile")
    if stated is None or stated["name"] in profiles()["engines"]:
        return replace(engine(str(meta["engine"])), **(stated or {}))
    return EngineProfile(**stated)


def reported_gb(meta: Mapping[str, Any]) -> float:
    """Memory (GB) that the driver reports for a table's card; without a data sheet, the out-of-memory limit."""
    if "aiconfigurator" in meta or "measured_engine" in meta:
        return float(meta["memory_limit_gb"])
    return hardware(str(meta["hardware"])).memory_reported_gb
