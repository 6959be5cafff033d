"""Sources of operator times, found by the metadata of a table that was built from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final

import numpy as np

from inferencegym.errors import InvalidConfigError, TableError
from simulator.hardware.engine_times import engine_source
from simulator.hardware.kernel_times import listed_models, lists_fp8_kv, stated_models
from simulator.hardware.measured_model import MeasuredSource
from simulator.hardware.operators import OperatorModel, Source
from simulator.hardware.profiles import EngineProfile, engine, hardware, profiles
from simulator.hardware.tables import MAX_TIERS, ServingTables

TIMES: Final = ("decode_ms", "prefill_ms", "prefill_marginal_ms", "prefill_saturated_ms")
"""Columns of a table that operator models give."""


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
    narrow = tables.kv_cache_fp8 and lists_fp8_kv(tables.sha256)
    found = listed_models(tables.sha256, tables.tiers, profile, bytes_per_token, narrow)
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


def with_fp8_kv(tables: ServingTables) -> ServingTables:
    """A table with its KV cache in FP8, which holds twice as many tokens; itself if it has one.

    Its times are those of attention with such a cache where the catalogue lists them, else those of a 16-bit cache, and
    a warning in the metadata says so. Support stays that of a 16-bit cache. Raises :class:`InvalidConfigError` for a
    measured engine, whose cache is part of the measurement.
    """
    if tables.kv_cache_fp8:
        return tables
    meta = tables.meta
    if "measured_engine" in meta:
        raise InvalidConfigError(
            f"kv_cache_dtype=fp8 is not allowed for {meta['hardware']}: its times and pool are those of an engine; "
            "start that with --kv-cache-dtype fp8 and measure again",
            "kv_cache_dtype",
        )
    columns = {**tables.columns, "kv_capacity_tokens": 2 * tables.columns["kv_capacity_tokens"]}
    meta = {**meta, "kv_cache_dtype": "fp8", "kv_bytes_per_token": meta["kv_bytes_per_token"] / 2}
    narrow = replace(tables, columns=columns, meta=meta)
    if lists_fp8_kv(tables.sha256):
        return with_times_of(operators_of(narrow), narrow)
    warning = "attention with an FP8 KV cache is computed with 16-bit timings: this table has no others"
    return replace(narrow, meta={**meta, "warnings": [*meta.get("warnings", ()), warning]})


def with_times_of(models: Sequence[OperatorModel], tables: ServingTables) -> ServingTables:
    """The table with the times of these operator models, one a precision, in place of its own."""
    of_tier = [models[min(tier, len(models) - 1)] for tier in range(MAX_TIERS)]
    drafts, batches, prompts = (
        [int(point) for point in tables.axes[name]] for name in ("spec_length", "batch_size", "prompt_len_bucket")
    )
    columns = {name: np.empty_like(tables.columns[name]) for name in TIMES}
    for at in np.ndindex(MAX_TIERS, len(drafts), len(batches), len(prompts)):
        model, k, n, prompt = of_tier[at[0]], drafts[at[1]], batches[at[2]], prompts[at[3]]
        cell = (*at[:2], slice(None), *at[2:])
        columns["decode_ms"][cell] = model.decode_ms(n, prompt, k)
        columns["prefill_ms"][cell] = model.prefill_ms(prompt)
        columns["prefill_marginal_ms"][cell] = model.prefill_marginal_ms(prompt, n, prompt, k)
        columns["prefill_saturated_ms"][cell] = model.prefill_saturated_ms(prompt, n, prompt, k)
    iterations = [
        [[[m.decode_ms(int(n), x, k) for x in prompts] for n in tables.iteration_batches] for k in drafts]
        for m in models
    ]
    return replace(tables, columns={**tables.columns, **columns}, meta={**tables.meta, "iteration_ms": iterations})


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
