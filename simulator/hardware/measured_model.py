"""Operator times of one model from the measured CSV files that ``profiles.json`` names under ``measurements``.

All were taken on one reference card, one layer at a time:

* GEMMs of a layer: exact shapes up to 128 rows. From 512 rows on, times of another source, interpolated in n and k,
  because the first source is 13-20% too slow there; in between a blend, linear in the logarithm of rows. Quantised
  tiers multiply them by the measured ratio of quantised to bf16 kernels at the same number of rows.
* Norms, rotary embedding, activation, residual adds: exact shapes.
* Attention: sequences prefilled in one step share a launch, and the batched measurements give its cost.
* LM head: scaled to the model's vocabulary.

On another card with the same compute units the bandwidth-bound parts scale with memory bandwidth; a GEMM combines the
time to stream its weights with the time to compute, overlapping as much as its measured curve says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np

from simulator.hardware import measured
from simulator.hardware.measured import FloatArray
from simulator.hardware.operators import (
    EXTRAPOLATED,
    INTERPOLATED,
    MEASURED,
    MODELLED,
    Chunk,
    LoopTerms,
    OperatorModel,
    Source,
)
from simulator.hardware.profiles import EngineProfile, Hardware, engine, hardware, profiles

# GEMM measurements end at this many rows; beyond, curves grow in proportion.
MAX_ROWS = 32768
# Longest context whose prefill attention is measured, tokens.
MAX_PREFILL = 16384
LAUNCH_MS = 0.0115  # shortest measured attention kernel, one layer


class MeasuredSource(Source):
    """The measured model of ``profiles.json`` on one of its cards."""

    def __init__(self, card: str | Hardware) -> None:
        model = profiles()["model"]
        super().__init__(
            model=model["name"],
            card=hardware(card),
            tiers=tuple(model["weights_gb"]),
            weights_gb=model["weights_gb"],
            kv_bytes_per_token=model["kv_bytes_per_token"],
            memory_gb={name: value for name, value in profiles()["memory"].items() if name.endswith("_gb")},
        )

    def operators(self, tier: str, profile: EngineProfile) -> OperatorModel:
        """The operator model of a tier, built once per process."""
        return _model(self.card, self.check_tier(tier), profile)

    def with_bandwidth(self, scale: float) -> MeasuredSource:
        """The same model on a card with ``scale`` times the memory bandwidth."""
        return MeasuredSource(replace(self.card, bandwidth_gb_s=round(self.card.bandwidth_gb_s * scale, 1)))

    def support(self, tier: str, n_decode: int, prompt_tokens: int, draft_tokens: int) -> int:
        """Coverage at this batch, prompt and draft length; see :func:`support`."""
        return support(tier, n_decode, prompt_tokens, prompt_tokens, draft_tokens)

    def provenance(self, profile: EngineProfile) -> dict[str, Any]:
        """Checksums of the measured files that tables use."""
        return {"measured_sha256": {k: v for k, v in measured.checksums().items() if k not in measured.NOT_IN_TABLES}}


def operator_model(card: str | Hardware, tier: str, profile: str | EngineProfile) -> OperatorModel:
    """The operator model of a card, a precision tier and an engine profile; built once per process."""
    return MeasuredSource(card).operators(tier, engine(profile))


@cache
def _model(card: Hardware, tier: str, profile: EngineProfile) -> OperatorModel:
    return MeasuredModel(card, tier, profile)


@cache
def _files() -> dict[str, Any]:
    """Names of the measured files, and the measured shapes that stand for the model's."""
    found: dict[str, Any] = profiles()["measurements"]
    return found


class MeasuredModel(OperatorModel):
    """Iteration times from the measured files, on one card."""

    def __init__(self, card: Hardware, tier: str, profile: EngineProfile) -> None:
        MeasuredSource(card).check_tier(tier)
        model = profiles()["model"]
        super().__init__(tier, profile, int(model["layers"]), float(model["kv_bytes_per_token"]))
        self.card = card
        self._bandwidth_ratio = hardware(_files()["card"]).bandwidth_gb_s / card.bandwidth_gb_s

    def linear_ms(self, rows: int) -> float:
        """GEMMs and elementwise operators of all layers, and the embedding, for ``rows`` tokens."""
        if rows <= MAX_ROWS:
            return self._linear[rows]
        return self._linear[MAX_ROWS] * rows / MAX_ROWS

    def prefill_attention_ms(self, chunks: Sequence[Chunk]) -> float:
        """Causal attention of all layers for chunks that are prefilled together.

        Sequences share a launch. Its cost is that of the longest chunk alone, or the sum of the per-sequence costs
        measured in large batches, whichever is larger.
        """
        alone, batched = _prefill_attention()
        longest = max(_after_prefix(alone, chunk) for chunk in chunks)
        together = sum(_after_prefix(batched, chunk) for chunk in chunks)
        return self.layers * max(longest, together, LAUNCH_MS)

    def loop_terms(self) -> LoopTerms:
        """Prefill attention as its measured curves."""
        return LoopTerms("curves", self.layers, LAUNCH_MS, *_prefill_curves())

    def head_ms(self, rows: int) -> float:
        """LM head for ``rows`` tokens whose next token is sampled."""
        if rows <= 0:
            return 0.0
        return self._head[rows] if rows < len(self._head) else self._head[-1] * rows / (len(self._head) - 1)

    @cached_property
    def _linear(self) -> list[float]:
        rows = np.arange(1, MAX_ROWS + 1, dtype=float)
        curves = _linear_curves()
        gemm = np.interp(rows, curves.rows, curves.gemm)
        if self.tier in _files()["quantised_dtypes"]:
            ratio = _quant_ratio(_files()["quantised_dtypes"][self.tier])
            gemm = gemm * np.interp(np.log2(rows), np.log2(ratio.rows), ratio.value)
        # One row only streams the weights. More rows never take less time, except where quantised kernels jump.
        gemm = _slower_memory(np.maximum.accumulate(gemm), gemm[0], self._bandwidth_ratio)
        elementwise = np.interp(rows, curves.rows, curves.elementwise)
        elementwise = elementwise[0] + (elementwise - elementwise[0]) * self._bandwidth_ratio
        embedding = np.interp(rows, curves.rows, curves.embedding)
        total = self.layers * (gemm * self.profile.gemm_scale + elementwise) + embedding
        return [0.0, *total.tolist()]

    @cached_property
    def _head(self) -> list[float]:
        data = measured.columns(_files()["lm_head"])
        scale = float(profiles()["model"]["vocabulary"]) / float(_files()["lm_head_vocabulary"])
        rows = np.arange(1, int(data["m"][-1]) + 1, dtype=float)
        time = np.interp(rows, data["m"], np.maximum.accumulate(data["latency"])) * scale
        return [0.0, *np.maximum(time, time[0] * self._bandwidth_ratio).tolist()]

    def attention_row(self, n_decode: int) -> list[float]:
        """Decode attention over the context nodes for one batch size, all layers, on this card."""
        grid = _decode_attention()
        if n_decode >= grid.batch[-1]:
            time = grid.latency[-1] * (n_decode / grid.batch[-1])
        else:
            time = np.array([np.interp(n_decode, grid.batch, column) for column in grid.latency.T])
        floor = grid.latency[0, 0]  # one sequence with hardly any context: just the launch
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
    data = measured.columns(_files()["linear"])
    order = np.argsort(data["num_tokens"])
    rows = data["num_tokens"][order]

    def total(*names: str) -> FloatArray:
        # More rows never take less time; the medians jitter by microseconds.
        return np.maximum.accumulate(np.sum([data[name][order] for name in names], axis=0))

    exact = total("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj")
    other = measured.gemm_times(_files()["gemm"])
    ratio = np.interp(rows, other.m, _layer_gemm(other, "gemm_shapes") / np.interp(other.m, rows, exact))
    weight = np.clip((np.log2(rows) - 7.0) / 2.0, 0.0, 1.0)
    return _LinearCurves(
        rows=rows,
        gemm=np.maximum.accumulate(exact * ratio**weight),
        elementwise=total("input_layernorm", "attn_rope", "post_attention_layernorm", "mlp_act", "add"),
        embedding=total("emb"),
    )


def _layer_gemm(times: measured.GemmTimes, shapes: str) -> FloatArray:
    """GEMM times of a layer at the measured row counts, each interpolated between two measured shapes [n, k]."""
    total = np.zeros(len(times.m))
    for (low, high), share in _files()[shapes]:
        total += times.latency_ms[tuple(low)] * (1.0 - share) + times.latency_ms[tuple(high)] * share
    return total


def _slower_memory(gemm: FloatArray, streaming: float, ratio: float) -> FloatArray:
    """GEMM times on a card whose memory is ``ratio`` times slower and whose compute units are the same.

    Memory traffic and compute overlap in part: time^p = streaming^p + compute^p, with p from the measured curve itself.
    """
    p = _overlap_exponent()
    slower: FloatArray = (gemm**p + (ratio**p - 1.0) * streaming**p) ** (1.0 / p)
    return slower


@cache
def _overlap_exponent() -> float:
    """The p with which streaming^p + (rate * rows)^p best fits the measured GEMM curve up to 512 rows, to two decimals.

    ``rate`` is the time per row at 2,048 rows, where compute dominates. Full overlap would give infinity, no overlap 1.
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
    name, shapes = _files()["gemm_quantised"], "gemm_quantised_shapes"
    base, quantised = measured.gemm_times(name, "bfloat16"), measured.gemm_times(name, dtype)
    return _Ratio(quantised.m, _layer_gemm(quantised, shapes) / _layer_gemm(base, shapes))


@cache
def _decode_attention() -> _DecodeAttention:
    data = measured.columns(_files()["attention_decode"])
    batch, context = np.unique(data["batch_size"]), np.unique(data["step"]) + 1.0
    latency = np.full((len(batch), len(context)), np.nan)
    latency[np.searchsorted(batch, data["batch_size"]), np.searchsorted(context, data["step"] + 1.0)] = data["latency"]
    is_measured = np.isfinite(latency).astype(float)
    for j in range(2, len(context)):
        # KV caches above 80 GB could not be measured. Time is affine in the context, and nodes double.
        beyond = latency[:, j - 1] + 2.0 * (latency[:, j - 1] - latency[:, j - 2])
        latency[:, j] = np.where(np.isnan(latency[:, j]), beyond, latency[:, j])
    # Neither more sequences nor a longer context takes less time; the measurements jitter by a microsecond.
    for axis in (0, 1):
        latency = np.maximum.accumulate(latency, axis=axis)
    return _DecodeAttention(batch, context, latency, is_measured)


@cache
def _prefill_attention() -> tuple[list[float], list[float]]:
    """Causal attention over 0..MAX_PREFILL tokens: of one sequence alone, and per sequence of a large batch."""
    data = measured.columns(_files()["attention_prefill"])
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


@cache
def _prefill_curves() -> tuple[FloatArray, FloatArray]:
    """The curves of :func:`_prefill_attention` as arrays."""
    alone, batched = _prefill_attention()
    return np.array(alone), np.array(batched)


def _after_prefix(curve: list[float], chunk: Chunk) -> float:
    """Attention of a chunk after its prefix: by causality, that of prefix and chunk less that of the prefix alone."""
    end = chunk.prefix + chunk.tokens
    return _at(curve, end) - (_at(curve, chunk.prefix) if chunk.prefix else 0.0)


def _at(curve: list[float], tokens: int) -> float:
    if tokens <= MAX_PREFILL:
        return curve[tokens]
    share = tokens / MAX_PREFILL
    return curve[MAX_PREFILL] * (share * share)


def support(tier: str, n_decode: int, context_tokens: int, prompt_tokens: int, draft_tokens: int) -> int:
    """Coverage by measurements of the operator times behind one decode batch and one prompt.

    0 measured: every kernel was timed at exactly this shape. 1 interpolated: between measured shapes or row counts, or
    a measured ratio of quantised to bf16 kernels on neighbouring shapes. 2 modelled: depends on the draft model's cost,
    which is composed and not measured. 3 extrapolated: beyond the measured range of some kernel. The transfer from the
    measured 80 GB card to another one affects every answer and is not counted.
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
    quantised = tier in _files()["quantised_dtypes"]
    exact_gemm = max(rows, prompt_tokens) <= 128 and {rows, prompt_tokens} <= set(_linear_curves().rows)
    return MEASURED if on_grid and exact_gemm and not quantised else INTERPOLATED
