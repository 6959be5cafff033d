"""Closed loops that NVIDIA measured on other cards (``silicon_sample.csv``), and predictions of the shipped tables.

The file is part of the package aiconfigurator-core and is read there: its licence terms are not stated, so this
repository keeps only the errors. A row is a closed loop of ``batch_size`` clients that send ``isl`` prompt tokens and
read ``osl`` answer tokens, with the mean TTFT and TPOT. Tokens per second are not compared, because they follow from
both: each client waits for its answer. The precision of the KV cache is not stated; :func:`kv_cache_dtypes` infers it.
"""

from __future__ import annotations

import csv
import importlib.util
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np

from inferencegym.errors import InvalidConfigError
from inferencegym.installation import install_extra
from inferencegym.models import QuantTier, ServeAction
from inferencegym.tasks import table_index
from simulator.events.fleet import Fleet
from simulator.events.simulation import serve_closed
from simulator.hardware.catalogue import table_path
from simulator.hardware.sources import operators_of, with_fp8_kv
from simulator.hardware.tables import ServingTables, load_tables
from simulator.load.requests import RequestLog
from simulator.whatif import serve_requests, ttft_statistics

MODELS: Final = {
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "llama-3.1-8b",
    "meta-llama/Llama-3.1-70B": "llama-3.1-70b",
    "Qwen/Qwen3-32B": "qwen3-32b",
    "nvidia/Qwen3-32B-NVFP4": "qwen3-32b",
    "openai/gpt-oss-120b": "gpt-oss-120b",
}
CARDS: Final = {"h100_sxm": "h100", "h200_sxm": "h200", "b200_sxm": "b200"}
TIERS: Final = {"bf16": "BF16", "fp8": "FP8", "fp4": "NVFP4", "nvfp4": "NVFP4", "": "BF16"}
MOST_CLIENTS: Final = 512
LENGTH_SPREAD = 0.2
"""Half width of the output lengths that the reference plays, as a share of the stated length."""
WAVES: Final = 3
"""Requests per client."""
KV_BUDGET: Final = 0.95
"""Share of the memory left by the weights that the engine gives to the KV pool."""


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """One measured closed loop on a shipped table."""

    table: str
    card: str
    model: str
    engine: str
    tier: int
    clients: int
    prompt_tokens: int
    output_tokens: int
    ttft_ms: float
    tpot_ms: float
    kv_cache_dtype: str = "bf16"

    @property
    def group(self) -> str:
        """Key that runs of one kind share."""
        return f"{self.model}, {self.engine}" + (", FP8 KV" if self.kv_cache_dtype == "fp8" else "")

    @property
    def tokens_in_flight(self) -> float:
        """Tokens of all clients' requests, half-way through their answers."""
        return self.clients * (self.prompt_tokens + 0.5 * self.output_tokens)

    @property
    def band(self) -> str:
        """Band of utilisation, from the number of clients; a closed loop is never overloaded: its clients wait."""
        if self.clients <= 8:
            return "light"
        return "knee" if self.clients <= 64 else "saturated"

    def tokens_per_s(self, ttft_ms: float, tpot_ms: float) -> float:
        """Output tokens per second of all clients at these latencies."""
        return 1000.0 * self.clients * self.output_tokens / (ttft_ms + (self.output_tokens - 1) * tpot_ms)


def sample_path() -> Path:
    """The file in the installed package; raises :class:`InvalidConfigError` without it."""
    spec = importlib.util.find_spec("aiconfigurator_core")
    if spec is None or spec.origin is None:
        raise InvalidConfigError(f"aiconfigurator-core is not installed: {install_extra('hardware')}")
    return Path(spec.origin).parent / "systems" / "silicon_sample.csv"


def closed_loops() -> tuple[list[ClosedLoop], Counter[str]]:
    """Rows that a shipped table can play, and the number of other rows by reason."""
    found, left_out = [], Counter[str]()
    with sample_path().open(newline="", encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            loop = _closed_loop(row)
            if isinstance(loop, str):
                left_out[loop] += 1
            elif loop in found:
                left_out["listed twice"] += 1
            else:
                found.append(loop)
    return found, left_out


def _closed_loop(row: dict[str, str]) -> ClosedLoop | str:
    """The row's loop, or the reason why it cannot be played."""
    if row["mode"] != "agg":
        return "with prefill on cards of its own"
    if row["model_path"] not in MODELS:
        return "of models without a table"
    model, card = MODELS[row["model_path"]], CARDS.get(row["system"], "")
    width = int(float(row["tp_size"]))
    if float(row["attention_dp_size"] or 1.0) != 1.0 or float(row["moe_ep_size"] or 1.0) > 1.0:
        return "with attention or experts in parallel"
    table = f"{card}-{model}" + (f"-tp{width}" if width > 1 else "")
    if table not in table_index():
        return "on cards, or on numbers of cards, without a table"
    tiers = table_index()[table]["tiers"]
    named = row["gemm_quant_mode"] or row["precision"]
    tier = "MXFP4" if "MXFP4" in tiers else TIERS.get(named, named)
    if tier not in tiers:
        return "in a precision that the table lacks"
    clients = round(float(row["batch_size"]))
    if clients > MOST_CLIENTS:
        return f"of more than {MOST_CLIENTS} clients"
    ttft, tpot = row["silicon_ttft_ms"], row["silicon_tpot_ms"]
    if not ttft or not tpot or float(ttft) <= 0.0 or float(tpot) <= 0.0:
        return "without a TTFT or TPOT"
    return ClosedLoop(
        table,
        card,
        f"{model} {tier}" + (f" TP{width}" if width > 1 else ""),
        row["backend"],
        list(tiers).index(tier),
        clients,
        int(row["isl"]),
        int(row["osl"]),
        float(ttft),
        float(tpot),
    )


def kv_cache_dtypes(loops: Iterable[ClosedLoop]) -> dict[tuple[str, str, int], str]:
    """Precision of the KV cache by table, engine and tier, inferred from TTFT of runs that do not fit in 16 bits.

    If the requests of all clients do not fit into the pool, some wait for others to finish, and their TTFT grows a
    hundredfold; in 8 bits twice as many fit. The precision that explains these runs' TTFT better is taken (least
    squares of its logarithm). Without such runs, and for weights in 16 bits, the cache has 16 bits, which is the
    engines' default.
    """
    groups: dict[tuple[str, str, int], list[ClosedLoop]] = {}
    for loop in loops:
        groups.setdefault((loop.table, loop.engine, loop.tier), []).append(loop)
    found = {}
    for (table, engine, tier), own in groups.items():
        tables = _tables(table, "bf16")
        named, room = tables.tiers[tier], tables.kv_pool_tokens(tier, KV_BUDGET, False)
        crowded = [loop for loop in own if loop.tokens_in_flight > room]
        misfit = {
            dtype: sum(math.log(_play(replace(loop, kv_cache_dtype=dtype))[0] / loop.ttft_ms) ** 2 for loop in crowded)
            for dtype in ("bf16", "fp8" if named != "BF16" else "bf16")
        }
        found[table, engine, tier] = min(misfit, key=misfit.__getitem__)
    return found


def played(loops: Iterable[ClosedLoop]) -> Iterator[tuple[ClosedLoop, dict[str, tuple[float, float]]]]:
    """Each loop with its inferred KV cache, and its figures, (measured, simulated) by quantity."""
    loops = list(loops)
    dtypes = kv_cache_dtypes(loops)
    for stated in loops:
        loop = replace(stated, kv_cache_dtype=dtypes[stated.table, stated.engine, stated.tier])
        ttft, tpot = _play(loop)
        yield (
            loop,
            {
                "TTFT p50": (loop.ttft_ms, ttft),
                "TPOT": (loop.tpot_ms, tpot),
                "throughput": (loop.tokens_per_s(loop.ttft_ms, loop.tpot_ms), loop.tokens_per_s(ttft, tpot)),
            },
        )


def _play(loop: ClosedLoop) -> tuple[float, float]:
    """Median TTFT and TPOT (ms) in the dynamics."""
    return _served(
        loop.table, loop.kv_cache_dtype, loop.tier, loop.clients, float(loop.prompt_tokens), float(loop.output_tokens)
    )


@cache
def _served(
    table: str, kv_cache_dtype: str, tier: int, clients: int, prompt_tokens: float, output_tokens: float
) -> tuple[float, float]:
    n = WAVES * clients
    log = RequestLog(np.zeros(n), np.full(n, prompt_tokens), np.full(n, output_tokens), np.zeros(n, dtype=np.int64))
    action = ServeAction(KV_BUDGET, 0, max(clients, 1), False, QuantTier(tier))
    served = serve_requests(action, log, _tables(table, kv_cache_dtype), closed_clients=clients)
    return ttft_statistics(served.record)["p50"], float(np.nanmedian(served.tpot_ms))


def referenced(loops: Iterable[ClosedLoop]) -> Iterator[tuple[ClosedLoop, float]]:
    """Each loop with its inferred KV cache, and its TPOT (ms) in the discrete-event reference."""
    loops = list(loops)
    dtypes = kv_cache_dtypes(loops)
    for stated in loops:
        loop = replace(stated, kv_cache_dtype=dtypes[stated.table, stated.engine, stated.tier])
        tables = _tables(loop.table, loop.kv_cache_dtype)
        pool_tokens = tables.kv_pool_tokens(loop.tier, KV_BUDGET, False)
        fleet = Fleet(operators_of(tables)[loop.tier], loop.clients, pool_tokens)
        n = WAVES * loop.clients
        # Answers of one length would keep all clients in step for ever, which no real run is.
        spread = np.random.default_rng(0).uniform(1.0 - LENGTH_SPREAD, 1.0 + LENGTH_SPREAD, n)
        outputs = np.maximum(1, np.rint(loop.output_tokens * spread)).astype(np.int64)
        outcome = serve_closed(fleet, np.full(n, loop.prompt_tokens), outputs, loop.clients)
        later = slice(loop.clients, None)  # the first requests all start at once
        yield loop, float(np.nanmedian(outcome.tpot_ms()[later]))


@cache
def _tables(name: str, kv_cache_dtype: str) -> ServingTables:
    """A shipped table, with a KV cache of this precision."""
    shipped = load_tables(table_path(name))
    return with_fp8_kv(shipped) if kv_cache_dtype == "fp8" else shipped
