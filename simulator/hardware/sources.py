"""Sources of operator times by the metadata of the table that was built from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from simulator.hardware.engine_times import engine_source
from simulator.hardware.measured_model import MeasuredSource
from simulator.hardware.operators import Source
from simulator.hardware.profiles import EngineProfile, engine, hardware


def source_of(meta: Mapping[str, Any]) -> Source:
    """The source that a table with this metadata was built from."""
    if "measured_engine" in meta:
        return engine_source(meta["measured_engine"])
    built_from = meta.get("aiconfigurator")
    if built_from is None:
        return MeasuredSource(str(meta["hardware"]))
    # Only who rebuilds or calibrates has the library of 82 MB.
    from simulator.hardware.aiconfigurator import AiconfiguratorSource, Deployment

    return AiconfiguratorSource(Deployment(**built_from["deployment"]))


def engine_of(meta: Mapping[str, Any]) -> EngineProfile:
    """The engine profile that a table with this metadata was built with."""
    stated = meta.get("profile")
    return engine(str(meta["engine"])) if stated is None else EngineProfile(**stated)


def reported_gb(meta: Mapping[str, Any]) -> float:
    """Memory that the driver of a table's card states; cards without a data sheet here are out of memory just there."""
    if "aiconfigurator" in meta or "measured_engine" in meta:
        return float(meta["memory_limit_gb"])
    return hardware(str(meta["hardware"])).memory_reported_gb
