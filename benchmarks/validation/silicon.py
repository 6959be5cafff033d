"""Closed loops that NVIDIA measured on other cards (``silicon_sample.csv``), and what the shipped tables say of them.

The file lies in the package aiconfigurator-core and is read there: its terms are unstated, so nothing of it is kept in
this repository but errors. A row is a closed loop of ``batch_size`` clients that send ``isl`` prompt tokens and read
``osl`` answer tokens, with the mean TTFT and TPOT. Its tokens per second are not listed: they follow from both, as each
client waits for its answer.
"""

from __future__ import annotations

import csv
import importlib.util
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from inferencegym.errors import InvalidConfigError
from inferencegym.installation import install_extra
from inferencegym.models import QuantTier, ServeAction
from inferencegym.tasks import table_index
from simulator.catalogue import table_path
from simulator.requests import RequestLog
from simulator.tables import load_tables
from simulator.whatif import serve_requests, weighted_quantile

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
WAVES: Final = 3
"""Requests of a client."""


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

    @property
    def band(self) -> str:
        """Band of utilisation by clients; a closed loop has no overload, its clients wait."""
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
    """The rows that a shipped table can play, and how many cannot be, by reason."""
    found, left_out = [], Counter[str]()
    with sample_path().open(newline="", encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            loop = _closed_loop(row)
            if isinstance(loop, str):
                left_out[loop] += 1
            else:
                found.append(loop)
    return found, left_out


def _closed_loop(row: dict[str, str]) -> ClosedLoop | str:
    """The row's loop, or why there is none."""
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


def played(loops: Iterable[ClosedLoop]) -> Iterator[tuple[ClosedLoop, dict[str, tuple[float, float]]]]:
    """Each loop with its figures, (measured, simulated) by quantity."""
    simulated: dict[Any, tuple[float, float]] = {}
    for loop in loops:
        key = (loop.table, loop.tier, loop.clients, loop.prompt_tokens, loop.output_tokens)
        if key not in simulated:
            simulated[key] = _play(loop)
        ttft, tpot = simulated[key]
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
    n = WAVES * loop.clients
    log = RequestLog(
        np.zeros(n),
        np.full(n, float(loop.prompt_tokens)),
        np.full(n, float(loop.output_tokens)),
        np.zeros(n, dtype=np.int64),
    )
    action = ServeAction(0.95, 0, max(loop.clients, 1), False, QuantTier(loop.tier))
    served = serve_requests(action, log, load_tables(table_path(loop.table)), closed_clients=loop.clients)
    return weighted_quantile(served.ttft_ms, served.ttft_weight, 0.5), float(np.nanmedian(served.tpot_ms))
