"""Per-class tables for the kernel: output lengths, KV blocks, and prefill time relative to the listed work."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from simulator.hardware.tables import MAX_TIERS, FloatArray, ServingTables
from simulator.load.source import REFERENCE_BATCH, ClassStats, interp_log

_LENGTH_POINTS = 32
"""Number of outputs, and of positions in each, over which :func:`block_tables` averages."""


def length_integrals(quantile_tokens: FloatArray, cells: int) -> FloatArray:
    """Integrals of the survival function S of output lengths on a grid up to the longest output; (C, cells + 1, 4).

    ``quantile_tokens`` (C, Q) holds quantiles of the lengths. The last axis holds the integral of S(y) from 0 to x, the
    integral of y*S(y), and their slopes per cell; the last cell's slopes are 0.
    """
    x = np.linspace(0.0, float(quantile_tokens.max()) + 1.0, cells + 1)
    table = np.zeros((len(quantile_tokens), cells + 1, 4))
    for c, lengths in enumerate(quantile_tokens):
        # The integral of S from 0 to x is E[min(L, x)], and that of y*S(y) is E[min(L, x)**2] / 2: exact for quantiles.
        capped = np.minimum(lengths[None, :], x[:, None])
        table[c, :, 0] = capped.mean(axis=1)
        table[c, :, 1] = 0.5 * (capped**2).mean(axis=1)
        table[c, :-1, 2:] = np.diff(table[c, :, :2], axis=0)
    return table


def gini(quantile_tokens: FloatArray) -> FloatArray:
    """Gini coefficients of output lengths, (C,) from (C, Q) evenly spaced quantiles.

    With given arrival times, the variance of the number in flight is this share of its mean: a request of age x is
    still running with probability S(x), and the integral of S(1 - S) is the mean length times the Gini coefficient.
    """
    n = quantile_tokens.shape[1]
    rank = (2.0 * np.arange(n) + 1.0 - n) / n
    coefficients: FloatArray = (np.sort(quantile_tokens, axis=1) * rank).mean(axis=1) / quantile_tokens.mean(axis=1)
    return coefficients


class BlockTables(NamedTuple):
    """KV block space that requests of a class hold beyond their tokens; arrays are (C,).

    ``slack_tokens`` is the mean unused part of a running request's last block: half a block if contexts span many
    blocks, more if one block holds a whole request. ``growth`` is the block space that outputs add to that of prompts,
    relative to the outputs' tokens: 0 if they stay within their prompt's last block.
    """

    slack_tokens: FloatArray
    growth: FloatArray


def block_tables(stats: ClassStats, block_tokens: int) -> BlockTables:
    """Block tables of these classes for this block size, averaged over all positions of the outputs."""
    slack_tokens, growth = np.empty((2, len(stats.names)))
    along = (np.arange(_LENGTH_POINTS) + 0.5) / _LENGTH_POINTS
    for c in range(len(stats.names)):
        outputs = np.quantile(stats.output_cdf_tokens[c], along)
        prompts = stats.prompt_quantile_tokens[c][:, None]
        context = prompts[:, :, None] + outputs[:, None] * along
        slack = _whole_blocks(context, block_tokens) - context
        # A request with a long output counts more, because it runs for longer.
        slack_tokens[c] = np.average(slack.mean(axis=(0, 2)), weights=outputs)
        added = _whole_blocks(prompts + outputs, block_tokens) - _whole_blocks(prompts, block_tokens)
        growth[c] = added.mean() / outputs.mean()
    return BlockTables(slack_tokens, growth)


def _whole_blocks(tokens: FloatArray, block_tokens: int) -> FloatArray:
    """Tokens rounded up to whole blocks."""
    whole: FloatArray = np.ceil(tokens / block_tokens) * block_tokens
    return whole


class PrefillRatios(NamedTuple):
    """Prefill time of a class's mean prompt relative to its listed work, by precision tier.

    ``alone`` (C, 3): on an idle replica. ``dedicated`` (C, 3): on a busy GPU that only prefills. ``fused`` (C, 3, batch
    points): a single prompt in a running batch. ``saturated``, of the same shape: in iterations full of such prompts.
    """

    alone: FloatArray
    dedicated: FloatArray
    fused: FloatArray
    saturated: FloatArray


def prefill_ratios(stats: ClassStats, tables: ServingTables) -> PrefillRatios:
    """The prefill ratios of these classes on this table."""
    points = tables.axes["prompt_len_bucket"]
    n_classes, n_tiers, n_batch = len(stats.names), MAX_TIERS, len(tables.axes["batch_size"])
    reference = int(np.argmin(np.abs(tables.axes["batch_size"] - REFERENCE_BATCH)))
    alone, dedicated = np.empty((2, n_classes, n_tiers))
    token_budget = float(tables.meta["max_batched_tokens"])
    fused, saturated = np.empty((2, n_classes, n_tiers, n_batch))
    for c, prompt in enumerate(stats.prompt_mean):
        at = np.array([prompt])
        for tier in range(n_tiers):
            listed = interp_log(at, points, tables.prefill_saturated_ms[tier, reference])[0]
            alone[c, tier] = interp_log(at, points, tables.prefill_ms[tier])[0] / listed
            # Each iteration streams the weights once, like a decode iteration of one request.
            streaming = float(tables.decode_ms[tier, 0, 0, 0]) * prompt / token_budget
            dedicated[c, tier] = (interp_log(at, points, tables.prefill_saturated_ms[tier, 0])[0] + streaming) / listed
            for b in range(n_batch):
                fused[c, tier, b] = interp_log(at, points, tables.prefill_marginal_ms[tier, b])[0] / listed
                saturated[c, tier, b] = interp_log(at, points, tables.prefill_saturated_ms[tier, b])[0] / listed
    return PrefillRatios(alone, dedicated, fused, saturated)
