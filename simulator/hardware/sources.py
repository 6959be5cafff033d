"""Sources of operator times, found by the metadata of a table that was built from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from inferencegym.errors import TableError
from simulator.hardware.engine_times import engine_source
from simulator.hardware.kernel_times import listed_models, stated_models
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
    """Operator models of a table by precision, from the operators listed for it if there are any.

    Raises :class:`TableError` if the table's metadata lists what cannot be operator times, or needs a library that is
    not installed.
    """
    profile, bytes_per_token = engine_of(tables.meta), float(tables.meta["kv_bytes_per_token"])
    found = listed_models(tables.sha256, tables.tiers, profile, bytes_per_token)
    return _own_operators(tables) if found is None else found


@lru_cache(maxsize=64)
def _own_operators(tables: ServingTables) -> tuple[OperatorModel, ...]:
    """Operator models of a table that does not ship."""
    meta, profile = tables.meta, engine_of(tables.meta)
    if "operators" in meta:
        try:
            return stated_models(meta["operators"], tables.tiers, profile, float(meta["kv_bytes_per_token"]))
        except (AttributeError, TypeError, ValueError) as error:
            raise TableError(f"{tables.path}: {error}; rebuild it with `inferencegym build-table`") from error
    try:
        source = source_of(meta)
    except ModuleNotFoundError as error:
        raise TableError(
            f"{tables.path} was built by an earlier release and lists no operators: build it again with `inferencegym "
            "build-table`, which also needs the extra 'hardware', or install that here"
        ) from error
    return tuple(source.operators(tier, profile) for tier in tables.tiers)


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
