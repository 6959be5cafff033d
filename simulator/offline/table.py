"""Build the lookup table: every configuration of the action grid, at every prompt length, on one card.

There are two kinds of columns. The operator columns (``decode_ms``, ``prefill_ms``, ``prefill_marginal_ms``,
``prefill_saturated_ms``) are step times that the serving dynamics compose. The saturated columns (``ttft_*``,
``tpot_ms``, ``tps``, ``cost_per_1k``) come from the discrete-event engine: ``batch_size`` clients in a closed loop on
one replica, prompts of the bucket's length, log-normal outputs of 128 tokens. They describe an engine that always has
``batch_size`` requests.

* ``batch_size``: largest number of concurrent requests
* ``kv_budget``: share of the free memory given to the KV cache
* ``spec_length``: draft tokens per verify step, 0 = off
* ``quant_tier``: index of the precision among those of the source (the keys of ``weights_gb`` in the metadata)
* ``prompt_len_bucket``: index into ``PROMPT_TOKENS``
* ``ttft_p50_ms``, ``ttft_p99_ms``: time to first token, the engine's TTFT offset included
* ``tpot_ms``: median over requests of the time per output token
* ``tps``: output tokens per second
* ``gpu_mem_gb``: weights, activations, sequences, draft model and KV pool, decimal GB; out of memory above the card's
  limit
* ``cost_per_1k``: GPUs / (tps / 1000), at a price of 1 per GPU and second
* ``decode_ms``: one decode iteration with ``batch_size`` sequences at a context of the bucket's length, drafting and
  verification included; independent of the KV budget
* ``prefill_ms``: a prompt alone on an idle engine
* ``prefill_marginal_ms``: time that one prompt adds to the iterations of a decoding batch of ``batch_size``
* ``prefill_saturated_ms``: time that each prompt adds when such prompts fill the engine's token budget
* ``kv_capacity_tokens``: tokens that the KV pool holds
* ``support``: how well measurements cover the operator times, 0 measured, 1 interpolated, 2 modelled, 3 extrapolated

``support`` is :meth:`simulator.hardware.operators.Source.support` at the row's batch, prompt and draft length. A row
whose pool cannot hold a single request of this workload is simulated with a pool that holds exactly one, so that it
serves one request at a time, and is marked 3. The table of the 40 GB card has no such row.
"""

from __future__ import annotations

import json
import math
import multiprocessing
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from scipy.special import ndtri

from inferencegym.files import atomic_write, prepare_output
from simulator.events.fleet import BLOCK_TOKENS, Fleet
from simulator.events.requests import IntArray, Outcome
from simulator.events.simulation import serve_closed
from simulator.hardware import measured
from simulator.hardware.memory import gpu_memory_gb, kv_capacity_tokens
from simulator.hardware.operators import EXTRAPOLATED, OperatorModel, Source
from simulator.hardware.profiles import EngineProfile, profiles

BUILDER_VERSION = 2
METADATA_KEY = b"inferencegym"

BATCH_SIZES = (1, 4, 8, 16, 32, 64, 128, 256, 512)
KV_BUDGETS = (0.1, 0.25, 0.5, 0.75, 1.0)
SPEC_LENGTHS = (0, 1, 2, 4, 8)
PROMPT_TOKENS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
# Batch sizes at which the metadata lists decode iterations: GEMM times jump where another tile of rows starts.
ITERATION_BATCHES = (
    *(1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 68, 72, 80, 96, 112),
    *(128, 136, 160, 192, 224, 256, 288, 320, 384, 448, 512),
)
OUTPUT_TOKENS = 128
OUTPUT_LOG_SIGMA = 0.6
LONGEST_OUTPUT = 4 * OUTPUT_TOKENS

COLUMNS = {
    "batch_size": pa.int64(),
    "kv_budget": pa.float64(),
    "spec_length": pa.int64(),
    "quant_tier": pa.int64(),
    "prompt_len_bucket": pa.int64(),
    "ttft_p50_ms": pa.float64(),
    "ttft_p99_ms": pa.float64(),
    "tpot_ms": pa.float64(),
    "tps": pa.float64(),
    "gpu_mem_gb": pa.float64(),
    "cost_per_1k": pa.float64(),
    "decode_ms": pa.float64(),
    "prefill_ms": pa.float64(),
    "prefill_marginal_ms": pa.float64(),
    "prefill_saturated_ms": pa.float64(),
    "kv_capacity_tokens": pa.int64(),
    "support": pa.int64(),
}
KEY_COLUMNS = ("batch_size", "kv_budget", "spec_length", "quant_tier", "prompt_len_bucket")

Row = dict[str, float]


class Slice(NamedTuple):
    """Part of the table that one process computes: all batch sizes and KV budgets for one value of the other keys."""

    source: Source
    engine: EngineProfile
    tier: str
    prompt_bucket: int
    spec_length: int
    saturated: bool = True


class Saturated(NamedTuple):
    """Steady state of a saturated replica."""

    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_ms: float
    tps: float


SATURATED_COLUMNS = (*Saturated._fields, "cost_per_1k")


def build_table(
    out_path: Path | str,
    source: Source,
    engine: EngineProfile,
    jobs: int = 1,
    progress: bool = False,
    notes: Mapping[str, Any] | None = None,
    saturated: bool = True,
    spec_tokens: Mapping[int, float] | None = None,
) -> Path:
    """Compute all rows and write them as one plain parquet file; returns its path.

    ``jobs`` processes share the work; the content does not depend on their number. ``notes`` are kept in the file's
    metadata. Without ``saturated`` the columns of the saturated engine are left out: they take minutes, and episodes
    and what-ifs do not read them. ``spec_tokens`` are tokens per verification step by draft length, if they were
    measured on this engine. The file appears only once it is complete.
    """
    path = Path(out_path)
    prepare_output(path)  # refuse a path that cannot be written before minutes of work
    slices = [
        Slice(source, engine, t, p, k, saturated)
        for t in source.tiers
        for p in range(len(PROMPT_TOKENS))
        for k in SPEC_LENGTHS
    ]
    rows: list[Row] = []
    title = f"{source.card.name}, {engine.name}"
    with _pool(jobs) as compute:
        for part in _with_progress(compute(slices), len(slices), title, progress):
            rows.extend(part)
    rows.sort(key=lambda row: tuple(row[name] for name in KEY_COLUMNS))
    kept = [name for name in COLUMNS if saturated or name not in SATURATED_COLUMNS]
    schema = pa.schema([pa.field(name, COLUMNS[name], nullable=False) for name in kept])
    metadata = {**table_metadata(source, engine), **(notes or {})}
    if spec_tokens is not None:
        metadata["spec_tokens_per_step"] = {str(k): spec_tokens[k] for k in SPEC_LENGTHS}
    table = pa.Table.from_pylist(rows, schema=schema).replace_schema_metadata({METADATA_KEY: json.dumps(metadata)})
    with atomic_write(path) as temporary:
        pq.write_table(table, temporary, compression="snappy", row_group_size=len(rows))
    return path


def slice_rows(part: Slice) -> list[Row]:
    """All rows of one slice."""
    cache: dict[tuple[int, int], Saturated] = {}
    budgets = KV_BUDGETS if part.saturated else KV_BUDGETS[-1:]  # step times do not depend on the KV budget
    return [_row(part, batch, kv, cache) for batch in BATCH_SIZES for kv in budgets]


def table_row(part: Slice, batch_size: int, kv_budget: float) -> Row:
    """One row, computed alone."""
    return _row(part, batch_size, kv_budget, {})


def table_metadata(source: Source, profile: EngineProfile) -> dict[str, Any]:
    """Metadata of a table: its sources, and constants that its readers need in addition to the columns."""
    card = source.card
    speculation = profiles()["speculation"]
    tokens = measured.spec_tokens_per_step(speculation["dataset"], speculation["method"])
    return {
        "builder_version": BUILDER_VERSION,
        "model": source.model,
        "hardware": card.name,
        "memory_budget_gb": card.memory_budget_gb,
        "memory_limit_gb": card.memory_limit_gb,
        "engine": profile.name,
        "scheduler": profile.scheduler,
        "max_batched_tokens": profile.max_batched_tokens,
        "tau_ms": profile.ttft_offset_ms,
        **({"output_delay": profile.output_delay} if profile.output_delay else {}),
        "weights_gb": {tier: source.weights_gb[tier] for tier in source.tiers},
        "memory_gb": dict(source.memory_gb),
        "kv_bytes_per_token": source.kv_bytes_per_token,
        "prompt_tokens": list(PROMPT_TOKENS),
        "output_tokens": OUTPUT_TOKENS,
        "spec_tokens_per_step": {str(k): tokens[k] for k in SPEC_LENGTHS},
        "iteration_batches": list(ITERATION_BATCHES),
        "iteration_ms": _iteration_ms(source, profile),
        **source.provenance(profile),
    }


def _iteration_ms(source: Source, profile: EngineProfile) -> list[list[list[list[float]]]]:
    """Decode iterations by tier, spec length, batch (``ITERATION_BATCHES``) and context (``PROMPT_TOKENS``)."""
    models = [source.operators(tier, profile) for tier in source.tiers]
    return [
        [[[round(m.decode_ms(n, x, k), 5) for x in PROMPT_TOKENS] for n in ITERATION_BATCHES] for k in SPEC_LENGTHS]
        for m in models
    ]


def output_lengths(n: int) -> IntArray:
    """``n`` log-normal output lengths (tokens, mean ``OUTPUT_TOKENS``); any run of them is representative.

    Quantiles follow the golden-ratio sequence instead of random draws, so there is nothing to seed, and neighbouring
    rows of the table differ only by their configuration.
    """
    quantiles = (0.5 + np.arange(n) * (math.sqrt(5.0) - 1.0) / 2.0) % 1.0
    log_mean = math.log(OUTPUT_TOKENS) - OUTPUT_LOG_SIGMA**2 / 2.0
    lengths = np.exp(log_mean + OUTPUT_LOG_SIGMA * ndtri(quantiles))
    rounded: IntArray = np.clip(np.rint(lengths), 1, LONGEST_OUTPUT).astype(np.int64)
    return rounded


def saturated(
    model: OperatorModel,
    batch_size: int,
    prompt_tokens: int,
    pool_tokens: int,
    spec_length: int,
    rules: Mapping[str, Any],
) -> Saturated:
    """Steady state of one replica with ``batch_size`` clients in a closed loop.

    ``rules`` are :attr:`Source.fleet_rules`.
    """
    # Clients beyond what the KV cache can hold only wait, so they need not be simulated: first come first served, each
    # of them lengthens every wait by the time between two departures (Little's law).
    clients = min(batch_size, pool_tokens // (prompt_tokens + 1) + 8)
    n = max(4 * clients, clients + 96)
    speculation = profiles()["speculation"]
    acceptance = measured.spec_acceptance(speculation["dataset"], speculation["method"])
    fleet = Fleet(
        model,
        clients,
        pool_tokens,
        draft_tokens=spec_length,
        acceptance=acceptance.get(spec_length, ()),
        **rules,
    )
    outcome = serve_closed(fleet, np.full(n, prompt_tokens), output_lengths(n), clients)
    return _steady_state(outcome, clients, batch_size - clients)


def _steady_state(outcome: Outcome, clients: int, more_clients: int) -> Saturated:
    # Measure from one generation of requests after the start to the last arrival: then all clients are busy and out of
    # step.
    start = float(np.sort(outcome.finish_s)[clients - 1])
    end = float(outcome.arrival_s.max())
    inside = (outcome.arrival_s >= start) & (outcome.arrival_s <= end)
    departures_per_s = float(((outcome.finish_s > start) & (outcome.finish_s <= end)).sum()) / (end - start)
    ttft_ms = outcome.ttft_ms()[inside] + more_clients / departures_per_s * 1e3
    p50, p99 = np.quantile(ttft_ms, [0.5, 0.99])
    tpot = np.nanmedian(outcome.tpot_ms()[inside])
    return Saturated(float(p50), float(p99), float(tpot), outcome.tokens_per_s(start, end))


def _row(part: Slice, batch_size: int, kv_budget: float, cache: dict[tuple[int, int], Saturated]) -> Row:
    source, model = part.source, part.source.operators(part.tier, part.engine)
    prompt, k = PROMPT_TOKENS[part.prompt_bucket], part.spec_length
    capacity = kv_capacity_tokens(source, part.tier, kv_budget, k)
    block_tokens = source.fleet_rules.get("block_tokens", BLOCK_TOKENS)
    largest_request = block_tokens * math.ceil((prompt + LONGEST_OUTPUT + k + 1) / block_tokens)
    row: Row = {
        "batch_size": batch_size,
        "kv_budget": kv_budget,
        "spec_length": k,
        "quant_tier": source.tiers.index(part.tier),
        "prompt_len_bucket": part.prompt_bucket,
        "gpu_mem_gb": gpu_memory_gb(source, part.tier, kv_budget, k, batch_size),
        "decode_ms": model.decode_ms(batch_size, prompt, k),
        "prefill_ms": model.prefill_ms(prompt),
        "prefill_marginal_ms": model.prefill_marginal_ms(prompt, batch_size, prompt, k),
        "prefill_saturated_ms": model.prefill_saturated_ms(prompt, batch_size, prompt, k),
        "kv_capacity_tokens": capacity,
        "support": (EXTRAPOLATED if capacity < largest_request else source.support(part.tier, batch_size, prompt, k)),
    }
    if not part.saturated:
        return row
    # A pool larger than all requests together changes nothing, so budgets with such pools share one simulation.
    pool = min(max(capacity, largest_request), batch_size * largest_request)
    if (batch_size, pool) not in cache:
        cache[batch_size, pool] = saturated(model, batch_size, prompt, pool, k, source.fleet_rules)
    steady = cache[batch_size, pool]
    row |= {**steady._asdict(), "cost_per_1k": 1000.0 * source.cards_per_replica / steady.tps}
    return {name: row[name] for name in COLUMNS}


@contextmanager
def _pool(jobs: int) -> Iterator[Any]:
    """A function that maps ``slice_rows`` over slices, in this process or over ``jobs`` of them."""
    if jobs <= 1:
        yield lambda slices: map(slice_rows, slices)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield lambda slices: pool.imap(slice_rows, slices)


def _with_progress(parts: Iterable[list[Row]], total: int, title: str, show: bool) -> Iterator[list[Row]]:
    if not show:
        yield from parts
        return
    from rich.progress import track  # only the command line shows a progress bar

    yield from track(parts, description=title, total=total)
