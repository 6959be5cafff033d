"""Constants of cards, engines, model and memory as ``profiles.json`` states them."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from inferencegym.errors import InvalidConfigError, short_repr

PROFILES_PATH = Path(__file__).resolve().parents[1] / "data" / "profiles.json"


@dataclass(frozen=True, slots=True)
class Hardware:
    """One accelerator card. Memory in decimal GB.

    An engine sizes its KV pool to ``memory_budget_gb`` and runs out of memory beyond ``memory_limit_gb``; its share of
    memory in use is relative to the ``memory_reported_gb`` that the driver reports. ``engine`` names the profile that
    the card's table is built with.
    """

    name: str
    bandwidth_gb_s: float
    memory_budget_gb: float
    memory_limit_gb: float
    memory_reported_gb: float
    engine: str
    source: str


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """Engine profile: the overhead on top of its kernels, and its scheduling.

    An iteration costs ``step_overhead_ms + sequence_overhead_ms * sequences`` on top of the kernels; ``gemm_scale``
    corrects the GEMM library; ``ttft_offset_ms`` is the time that a client sees on top of the iterations (tokenising,
    transport). ``scheduler`` is ``chunked`` (decodes and up to ``max_batched_tokens`` in one iteration) or
    ``prefill_first`` (whole prompts in iterations of their own, before any decode). ``reserve_output`` admits a request
    only when the cache has room for its whole output, so nothing is ever preempted. ``output_delay`` is the part of the
    next iteration that passes before a first token is sent, where outputs are processed while that iteration runs.

    The rest is played by the discrete-event engine for :attr:`simulator.events.fleet.Fleet.server` only. With
    ``async_scheduling`` an iteration is scheduled when the one before it begins, so a request that arrives meanwhile
    waits for one iteration more (vLLM's ``EngineCore.step_with_batch_queue``, two batches in its queue). The API server
    is one process per replica: it spends ``request_ms`` on each request and its first token, part of
    ``ttft_offset_ms``, and ``token_ms`` on each later output. Requests that it reads at the same time take turns, as in
    an event loop; outputs come first, and those still unsent are merged with their successors (vLLM's
    ``RequestOutputCollector``).
    """

    name: str
    step_overhead_ms: float
    sequence_overhead_ms: float
    gemm_scale: float
    ttft_offset_ms: float
    scheduler: str
    max_batched_tokens: int
    reserve_output: bool
    source: str
    output_delay: float = 0.0
    async_scheduling: bool = False
    request_ms: float = 0.0
    token_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class FleetChanges:
    """Times that it takes to change a running fleet of an engine.

    A new replica serves ``start_s`` + weights / ``load_gb_per_s`` seconds after it was asked for. A replica that
    restarts for another precision or prefill placement is out of service for ``restart_s`` + weights /
    ``load_gb_per_s`` seconds.
    """

    name: str
    start_s: float
    restart_s: float
    load_gb_per_s: float
    source: str


@cache
def profiles() -> dict[str, Any]:
    """The constants of model, memory, cards and engines as the data file states them."""
    loaded: dict[str, Any] = json.loads(PROFILES_PATH.read_text(encoding="utf-8"))
    return loaded


def hardware(name: str | Hardware) -> Hardware:
    """Return the card of that name; a ``Hardware`` object is returned unchanged."""
    if isinstance(name, Hardware):
        return name
    return Hardware(name=name, **_entry("hardware", name))


def engine(name: str | EngineProfile) -> EngineProfile:
    """Return the engine profile of that name; an ``EngineProfile`` object is returned unchanged."""
    if isinstance(name, EngineProfile):
        return name
    return EngineProfile(name=name, **_entry("engines", name))


def fleet_changes() -> FleetChanges:
    """Return the times that it takes to change a fleet of vLLM."""
    return FleetChanges(name="vllm", **_entry("changes", "vllm"))


def engine_of_file(path: Path) -> EngineProfile:
    """Engine profile from a JSON file, whose fields override those of the profile that ``base`` names.

    Raises :class:`InvalidConfigError` naming what is wrong.
    """
    try:
        stated = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidConfigError(f"{path} is not a JSON file: {error}", "profile") from error
    if not isinstance(stated, dict):
        raise InvalidConfigError(f"{path} must hold one JSON object", "profile")
    base = engine(str(stated.pop("base", "vllm_v1_8k")))
    found = {"name": path.stem, "source": f"{path.name}, over {base.name}", **stated}
    for key, value in found.items():
        kind = EngineProfile.__annotations__.get(key)
        if kind is None:
            raise InvalidConfigError(f"{path}: {key!r} is no field of an engine profile", key)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        right = {"str": isinstance(value, str), "bool": isinstance(value, bool), "float": number, "int": number}[kind]
        if not right or (number and not (math.isfinite(value) and value >= (1 if kind == "int" else 0))):
            raise InvalidConfigError(f"{path}: {key}={short_repr(value)} is not allowed: a {kind}, not below 0", key)
    if found.get("scheduler", base.scheduler) not in ("chunked", "prefill_first"):
        raise InvalidConfigError(f"{path}: scheduler must be chunked or prefill_first", "scheduler")
    return replace(base, **found)


def _entry(kind: str, name: str) -> dict[str, Any]:
    table = profiles()[kind]
    if name not in table:
        raise InvalidConfigError(
            f"{kind}={name!r} is unknown: choose one of {', '.join(table)}, or add it to {PROFILES_PATH.name}", kind
        )
    entry: dict[str, Any] = table[name]
    return entry
