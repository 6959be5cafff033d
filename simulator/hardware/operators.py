"""Time of one engine iteration, composed from measured operator times.

A Llama-3-8B iteration that decodes for B sequences (k draft tokens verified for each) and prefills some chunks takes::

    T = layers * [G(m) + E(m) + A_dec(B, context) + A_pre(chunks)] + H(rows) + o0 + o1 * sequences

with m = B * (k + 1) + prefill tokens. Every term is a measured curve (``simulator/data/measured``), taken on an
A100-80GB:

* G, the four GEMMs of a layer: Vidur's exact shapes up to 128 rows; aiconfigurator's (bilinear in n and k) from 512
  rows, because Vidur's are 13-20 % slow there; a blend in log m between. INT8 (SmoothQuant W8A8) and INT4 (W4A16)
  multiply G by the ratio of TensorRT-LLM's kernels to its bf16 kernels at the same m.
* E, norms, rotary embedding, activation, residual adds: Vidur.
* A_dec and A_pre, attention: aiconfigurator. Sequences prefilled in one step share a launch: the batched measurements
  give the cost.
* H, the LM head: aiconfigurator, scaled to Llama-3's vocabulary.
* o0, o1 and the GEMM scale: the engine profile (``simulator/data/profiles.json``).

On another card with the same compute units the bandwidth-bound parts scale with memory bandwidth; a GEMM combines the
time to stream its weights with the time to compute, overlapping as much as its measured curve says. Times are
milliseconds for the whole model throughout.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from inferencegym.errors import InvalidConfigError
from simulator.hardware import measured
from simulator.hardware.measured import FloatArray

PROFILES_PATH = Path(__file__).resolve().parents[1] / "data" / "profiles.json"
REFERENCE_HARDWARE = "a100-80gb"  # every operator was measured on this card
TIERS = ("FP16", "INT8", "INT4")
QUANT_DTYPES = {"INT8": "sq", "INT4": "int4_wo"}

# Beyond this many rows curves continue in proportion; the measurements of G and E end here.
MAX_ROWS = 32768
# Longest context whose prefill attention is measured, tokens.
MAX_PREFILL = 16384
LAUNCH_MS = 0.0115  # shortest attention kernel measured, one layer


class Chunk(NamedTuple):
    """Prompt tokens that one iteration prefills for one sequence, after ``prefix`` tokens it already holds."""

    tokens: int
    prefix: int = 0


@dataclass(frozen=True, slots=True)
class Hardware:
    """One accelerator card. Memory in decimal GB.

    An engine sizes its KV pool to ``memory_budget_gb`` and runs out of memory beyond ``memory_limit_gb``; it takes its
    share of memory in use from the ``memory_reported_gb`` that the driver states. ``engine`` names the profile that the
    card's table is built with.
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
    """Engine profile: the overhead beside its kernels, and how it schedules.

    An iteration costs ``step_overhead_ms + sequence_overhead_ms * sequences`` on top of the kernels; ``gemm_scale``
    corrects the GEMM library; ``ttft_offset_ms`` is what a client sees beyond the iterations (tokenising, transport).
    ``scheduler`` is ``chunked`` (decodes and up to ``max_batched_tokens`` in one iteration) or ``prefill_first``
    (whole prompts in iterations of their own, before any decode). ``reserve_output`` admits a request only when the
    cache has room for its whole output, so nothing is ever preempted.
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


@cache
def profiles() -> dict[str, Any]:
    """The constants of model, memory, cards and engines as the data file states them."""
    loaded: dict[str, Any] = json.loads(PROFILES_PATH.read_text(encoding="utf-8"))
    return loaded


def hardware(name: str | Hardware) -> Hardware:
    """Return the card of that name; a card of one's own is returned as it is."""
    if isinstance(name, Hardware):
        return name
    return Hardware(name=name, **_entry("hardware", name))


def engine(name: str | EngineProfile) -> EngineProfile:
    """Return the engine profile of that name; a profile of one's own is returned as it is."""
    if isinstance(name, EngineProfile):
        return name
    return EngineProfile(name=name, **_entry("engines", name))


def weights_gb(tier: str) -> float:
    """Decimal GB that the weights of a precision tier take."""
    table = profiles()["model"]["weights_gb"]
    if tier not in table:
        raise InvalidConfigError(f"tier={tier!r} is unknown: choose one of {', '.join(table)}", "tier")
    return float(table[tier])


def _entry(kind: str, name: str) -> dict[str, Any]:
    table = profiles()[kind]
    if name not in table:
        raise InvalidConfigError(
            f"{kind}={name!r} is unknown: choose one of {', '.join(table)}, or add it to {PROFILES_PATH.name}", kind
        )
    entry: dict[str, Any] = table[name]
    return entry


@cache
def operator_model(hardware_name: str | Hardware, tier: str, engine_name: str | EngineProfile) -> OperatorModel:
    """The step model of a card, a precision tier and an engine profile; built once per process."""
    return OperatorModel(hardware(hardware_name), tier, engine(engine_name))


class OperatorModel:
    """Iteration times of Llama-3-8B on one card, in one precision tier, under one engine profile."""

    def __init__(self, card: Hardware, tier: str, profile: EngineProfile) -> None:
        weights_gb(tier)  # refuses an unknown tier
        self.card = card
        self.tier = tier
        self.profile = profile
        model = profiles()["model"]
        self.layers = int(model["layers"])
        self.kv_bytes_per_token = int(model["kv_bytes_per_token"])
        self._draft_overhead_ms = float(profiles()["speculation"]["draft_step_overhead_ms"])
        self._bandwidth_ratio = hardware(REFERENCE_HARDWARE).bandwidth_gb_s / card.bandwidth_gb_s
        self._attention_rows: dict[int, list[float]] = {}

    # One iteration -------------------------------------------------------------------------------------------------

    def step_ms(
        self,
        n_decode: int,
        context_tokens: float,
        chunks: Sequence[Chunk] = (),
        draft_tokens: int = 0,
        n_first: int | None = None,
    ) -> float:
        """One iteration: ``n_decode`` sequences at a mean context of ``context_tokens``, fused with prefill ``chunks``.

        ``n_first`` chunks (all of them unless told) end their prompt and need the LM head. Drafting is included.
        """
        rows = n_decode * (draft_tokens + 1)
        head_rows = rows + (len(chunks) if n_first is None else n_first)
        time = self.linear_ms(rows + sum(chunk.tokens for chunk in chunks)) + self.head_ms(head_rows)
        if n_decode:
            time += self.decode_attention_ms(n_decode, context_tokens) + self.draft_ms(
                n_decode, context_tokens, draft_tokens
            )
        if chunks:
            time += self.prefill_attention_ms(chunks)
        return time + self.profile.step_overhead_ms + self.profile.sequence_overhead_ms * (n_decode + len(chunks))

    def decode_ms(self, n_decode: int, context_tokens: float, draft_tokens: int = 0) -> float:
        """One decode iteration of ``n_decode`` resident sequences: drafting, verification, one token each or more."""
        return self.step_ms(n_decode, context_tokens, (), draft_tokens)

    def prefill_ms(self, prompt_tokens: int) -> float:
        """A prompt alone on an idle engine, from the first chunk to its first token."""
        return sum(
            self.step_ms(0, 0.0, (chunk,), n_first=last)
            for chunk, last in self._split(prompt_tokens, self.chunk_budget(0))
        )

    def prefill_marginal_ms(
        self, prompt_tokens: int, n_decode: int, context_tokens: float, draft_tokens: int = 0
    ) -> float:
        """Time that one prompt, coming alone, adds to the iterations of a decoding batch.

        Short prompts hide behind the weight streaming of the decode batch; see ``prefill_saturated_ms`` for a crowd.
        """
        if self.profile.scheduler == "prefill_first":
            return self.prefill_ms(prompt_tokens)
        alone = self.step_ms(n_decode, context_tokens, (), draft_tokens)
        pieces = self._split(prompt_tokens, self.chunk_budget(n_decode * (draft_tokens + 1)))
        return sum(
            self.step_ms(n_decode, context_tokens, (chunk,), draft_tokens, last) - alone for chunk, last in pieces
        )

    def prefill_saturated_ms(
        self, prompt_tokens: int, n_decode: int, context_tokens: float, draft_tokens: int = 0
    ) -> float:
        """Time that one prompt adds per iteration when prompts like it fill the engine's whole token budget."""
        budget = self.chunk_budget(n_decode * (draft_tokens + 1) if self.profile.scheduler == "chunked" else 0)
        if prompt_tokens >= budget:
            return self.prefill_marginal_ms(prompt_tokens, n_decode, context_tokens, draft_tokens)
        crowd = budget // prompt_tokens
        together = [Chunk(prompt_tokens)] * crowd
        if self.profile.scheduler == "prefill_first":
            return self.step_ms(0, 0.0, together) / crowd
        extra = self.step_ms(n_decode, context_tokens, together, draft_tokens) - self.step_ms(
            n_decode, context_tokens, (), draft_tokens
        )
        return extra / crowd

    def chunk_budget(self, decode_rows: int) -> int:
        """Prompt tokens that fit into an iteration beside ``decode_rows`` rows of decoding.

        Never below a quarter of the engine's budget: an engine that decodes more rows than its budget is deployed
        with a larger one, else it would never prefill again.
        """
        budget = self.profile.max_batched_tokens
        return max(budget - decode_rows, budget // 4)

    def _split(self, prompt_tokens: int, budget: int) -> list[tuple[Chunk, int]]:
        """Chunks of a prompt, each with the number of first tokens (0 or 1) that it yields."""
        if self.profile.scheduler == "prefill_first":
            return [(Chunk(prompt_tokens), 1)]
        starts = range(0, prompt_tokens, budget)
        return [(Chunk(min(budget, prompt_tokens - s), s), int(s + budget >= prompt_tokens)) for s in starts]

    # Its terms -----------------------------------------------------------------------------------------------------

    def linear_ms(self, rows: int) -> float:
        """GEMMs and elementwise operators of all layers, and the embedding, for ``rows`` tokens."""
        if rows <= MAX_ROWS:
            return self._linear[rows]
        return self._linear[MAX_ROWS] * rows / MAX_ROWS

    def decode_attention_ms(self, n_decode: int, context_tokens: float) -> float:
        """Attention of all layers for ``n_decode`` sequences at a mean context of ``context_tokens``."""
        row = self._attention_rows.get(n_decode)
        if row is None:
            row = self._attention_rows[n_decode] = self._attention_row(n_decode)
        context = max(context_tokens, 2.0)
        # Nodes lie at 2, 4, 8, ...: the bit length finds the segment.
        j = min(int(context).bit_length() - 2, len(row) - 2)
        start = 2 << j
        return row[j] + (row[j + 1] - row[j]) * (context - start) / start

    def prefill_attention_ms(self, chunks: Sequence[Chunk]) -> float:
        """Causal attention of all layers for chunks that are prefilled together.

        Sequences share a launch: the cost is that of the longest one alone, or the sum of per-sequence costs as
        measured in large batches, whichever is more.
        """
        alone, batched = _prefill_attention()
        longest = max(_after_prefix(alone, chunk) for chunk in chunks)
        together = sum(_after_prefix(batched, chunk) for chunk in chunks)
        return self.layers * max(longest, together, LAUNCH_MS)

    def head_ms(self, rows: int) -> float:
        """LM head for ``rows`` tokens whose next token is sampled."""
        if rows <= 0:
            return 0.0
        return self._head[rows] if rows < len(self._head) else self._head[-1] * rows / (len(self._head) - 1)

    def draft_ms(self, n_decode: int, context_tokens: float, draft_tokens: int) -> float:
        """An EAGLE head drafting ``draft_tokens`` one after the other: one decoder layer and one LM head each."""
        if draft_tokens == 0:
            return 0.0
        layer = (self.linear_ms(n_decode) + self.decode_attention_ms(n_decode, context_tokens)) / self.layers
        return draft_tokens * (layer + self.head_ms(n_decode) + self._draft_overhead_ms)

    @cached_property
    def _linear(self) -> list[float]:
        rows = np.arange(1, MAX_ROWS + 1, dtype=float)
        curves = _linear_curves()
        gemm = np.interp(rows, curves.rows, curves.gemm)
        if self.tier != "FP16":
            ratio = _quant_ratio(QUANT_DTYPES[self.tier])
            gemm = gemm * np.interp(np.log2(rows), np.log2(ratio.rows), ratio.value)
        # One row is nothing but streaming the weights. More rows never take less time, quantised kernels' jumps aside.
        gemm = _slower_memory(np.maximum.accumulate(gemm), gemm[0], self._bandwidth_ratio)
        elementwise = np.interp(rows, curves.rows, curves.elementwise)
        elementwise = elementwise[0] + (elementwise - elementwise[0]) * self._bandwidth_ratio
        embedding = np.interp(rows, curves.rows, curves.embedding)
        total = self.layers * (gemm * self.profile.gemm_scale + elementwise) + embedding
        return [0.0, *total.tolist()]

    @cached_property
    def _head(self) -> list[float]:
        data = measured.columns("aic_a100_lm_head.csv")
        scale = float(profiles()["model"]["vocabulary"]) / 65536.0
        rows = np.arange(1, int(data["m"][-1]) + 1, dtype=float)
        time = np.interp(rows, data["m"], np.maximum.accumulate(data["latency"])) * scale
        return [0.0, *np.maximum(time, time[0] * self._bandwidth_ratio).tolist()]

    def _attention_row(self, n_decode: int) -> list[float]:
        """Decode attention over the context nodes for one batch size, all layers, on this card."""
        grid = _decode_attention()
        if n_decode >= grid.batch[-1]:
            time = grid.latency[-1] * (n_decode / grid.batch[-1])
        else:
            time = np.array([np.interp(n_decode, grid.batch, column) for column in grid.latency.T])
        floor = grid.latency[0, 0]  # one sequence with hardly any context: the launch
        scaled = floor + np.maximum(time - floor, 0.0) * self._bandwidth_ratio
        return [float(t) * self.layers for t in scaled]


# Measured curves, one layer on the reference card ------------------------------------------------------------------


class _LinearCurves(NamedTuple):
    rows: FloatArray
    gemm: FloatArray
    elementwise: FloatArray
    embedding: FloatArray


class _Ratio(NamedTuple):
    rows: FloatArray
    value: FloatArray


class _DecodeAttention(NamedTuple):
    batch: FloatArray
    context: FloatArray
    latency: FloatArray
    measured: FloatArray


@cache
def _linear_curves() -> _LinearCurves:
    data = measured.columns("vidur_a100_llama3_8b_mlp.csv")
    order = np.argsort(data["num_tokens"])
    rows = data["num_tokens"][order]

    def total(*names: str) -> FloatArray:
        # More rows never take less time; the medians jitter by microseconds.
        return np.maximum.accumulate(np.sum([data[name][order] for name in names], axis=0))

    exact = total("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj")
    other = measured.gemm_times("aic_a100_gemm_bf16_vllm.csv")
    ratio = np.interp(rows, other.m, _layer_gemm(other, qkv=(6144,)) / np.interp(other.m, rows, exact))
    weight = np.clip((np.log2(rows) - 7.0) / 2.0, 0.0, 1.0)
    return _LinearCurves(
        rows=rows,
        gemm=np.maximum.accumulate(exact * ratio**weight),
        elementwise=total("input_layernorm", "attn_rope", "post_attention_layernorm", "mlp_act", "add"),
        embedding=total("emb"),
    )


def _layer_gemm(times: measured.GemmTimes, qkv: tuple[int, ...]) -> FloatArray:
    """The four GEMMs of a layer over the measured row counts, from shapes around Llama-3-8B's.

    QKV is 4096 -> 6144 (the mean of ``qkv`` widths), gate and up 4096 -> 28672 between 16384 and 65536, down 14336 ->
    4096 between 12288 and 16384.
    """
    at = times.latency_ms
    qkv_ms = np.mean([at[width, 4096] for width in qkv], axis=0)
    gate_up = at[16384, 4096] + (at[65536, 4096] - at[16384, 4096]) * (28672 - 16384) / (65536 - 16384)
    down = (at[4096, 12288] + at[4096, 16384]) / 2.0
    total: FloatArray = qkv_ms + at[4096, 4096] + gate_up + down
    return total


def _slower_memory(gemm: FloatArray, streaming: float, ratio: float) -> FloatArray:
    """GEMM times on a card whose memory is ``ratio`` times slower and whose compute units are the same.

    Memory and compute overlap in part: time^p = streaming^p + compute^p, with p from the measured curve itself.
    """
    p = _overlap_exponent()
    slower: FloatArray = (gemm**p + (ratio**p - 1.0) * streaming**p) ** (1.0 / p)
    return slower


@cache
def _overlap_exponent() -> float:
    """The p that best explains the measured GEMM curve up to 512 rows as streaming^p + (rate * rows)^p, to two digits.

    ``rate`` is the time per row at 2,048 rows, where compute is all. Full overlap would be infinite, none 1.
    """
    curves = _linear_curves()
    rows = 2.0 ** np.arange(1, 10)
    compute = np.interp(2048.0, curves.rows, curves.gemm) / 2048.0 * rows
    seen = np.log(np.interp(rows, curves.rows, curves.gemm))
    candidates = np.arange(100, 801) / 100.0
    misfit = [np.sum((np.log(curves.gemm[0] ** p + compute**p) / p - seen) ** 2) for p in candidates]
    return float(candidates[int(np.argmin(misfit))])


@cache
def _quant_ratio(dtype: str) -> _Ratio:
    name = "aic_a100_gemm_quant_trtllm.csv"
    base, quantised = measured.gemm_times(name, "bfloat16"), measured.gemm_times(name, dtype)
    # 6144 is not measured for every type; 5120 and 7168 are.
    return _Ratio(quantised.m, _layer_gemm(quantised, qkv=(5120, 7168)) / _layer_gemm(base, qkv=(5120, 7168)))


@cache
def _decode_attention() -> _DecodeAttention:
    data = measured.columns("aic_a100_attn_generation.csv")
    batch, context = np.unique(data["batch_size"]), np.unique(data["step"]) + 1.0
    latency = np.full((len(batch), len(context)), np.nan)
    latency[np.searchsorted(batch, data["batch_size"]), np.searchsorted(context, data["step"] + 1.0)] = data["latency"]
    is_measured = np.isfinite(latency).astype(float)
    for j in range(2, len(context)):
        # Caches beyond 80 GB could not be measured. The time is affine in context, and nodes double.
        beyond = latency[:, j - 1] + 2.0 * (latency[:, j - 1] - latency[:, j - 2])
        latency[:, j] = np.where(np.isnan(latency[:, j]), beyond, latency[:, j])
    # Neither more sequences nor a longer context takes less time; the measurements jitter by a microsecond.
    for axis in (0, 1):
        latency = np.maximum.accumulate(latency, axis=axis)
    return _DecodeAttention(batch, context, latency, is_measured)


@cache
def _prefill_attention() -> tuple[list[float], list[float]]:
    """Causal attention over 0..MAX_PREFILL tokens: of one sequence alone, and per sequence of a large batch."""
    data = measured.columns("aic_a100_attn_context.csv")
    lengths = np.unique(data["isl"])
    alone = np.array([data["latency"][(data["isl"] == n) & (data["batch_size"] == 1)][0] for n in lengths])
    per_sequence = data["latency"] / data["batch_size"]
    batched = np.array([per_sequence[data["isl"] == n].min() for n in lengths])
    tokens = np.arange(MAX_PREFILL + 1, dtype=float)

    def dense(values: FloatArray) -> list[float]:
        curve = np.interp(
            tokens, np.concatenate(([0.0], lengths)), np.concatenate(([0.0], np.maximum.accumulate(values)))
        )
        return [float(value) for value in curve]

    return dense(alone), dense(batched)


def _after_prefix(curve: list[float], chunk: Chunk) -> float:
    """Attention of a chunk behind its prefix: the whole so far less the prefix alone (causality)."""
    end = chunk.prefix + chunk.tokens
    return _at(curve, end) - (_at(curve, chunk.prefix) if chunk.prefix else 0.0)


def _at(curve: list[float], tokens: int) -> float:
    if tokens <= MAX_PREFILL:
        return curve[tokens]
    return curve[MAX_PREFILL] * (tokens / MAX_PREFILL) ** 2


# How well the measurements cover a query ---------------------------------------------------------------------------

MEASURED, INTERPOLATED, MODELLED, EXTRAPOLATED = range(4)


def support(tier: str, n_decode: int, context_tokens: int, prompt_tokens: int, draft_tokens: int) -> int:
    """Coverage by measurements of the operator times behind one decode batch and one prompt.

    0 measured: every kernel was timed at exactly this shape. 1 interpolated: between measured shapes or row counts,
    or a measured ratio of quantised to bf16 kernels on neighbouring shapes. 2 modelled: rests on the draft model's
    cost, which is composed and not measured. 3 extrapolated: beyond the measured range of some kernel. The transfer
    from the measured 80 GB card to another applies to every answer alike and is not counted.
    """
    grid, rows = _decode_attention(), n_decode * (draft_tokens + 1)
    i = np.searchsorted(grid.batch, n_decode)
    j = np.searchsorted(grid.context, context_tokens)
    if i == len(grid.batch) or j == len(grid.context) or not grid.measured[i, j]:
        return EXTRAPOLATED
    if max(rows, prompt_tokens) > min(MAX_ROWS, MAX_PREFILL) or rows > 8192:
        return EXTRAPOLATED
    if draft_tokens:
        return MODELLED
    on_grid = grid.batch[i] == n_decode and grid.context[j] == context_tokens
    exact_gemm = (
        tier == "FP16" and max(rows, prompt_tokens) <= 128 and {rows, prompt_tokens} <= set(_linear_curves().rows)
    )
    return MEASURED if on_grid and exact_gemm else INTERPOLATED
