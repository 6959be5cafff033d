"""Tables of the request classes for the kernel: output lengths and prefill time relative to the listed work."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from simulator.load import REFERENCE_BATCH, ClassStats, interp_log
from simulator.tables import MAX_TIERS, FloatArray, ServingTables

_LENGTH_POINTS = 32
"""Outputs, and positions of each, over which :func:`block_tables` averages."""


def length_integrals(quantile_tokens: FloatArray, cells: int) -> FloatArray:
    """Integrals of the output length's survival function S on a grid up to the longest output; (C, cells + 1, 4).

    ``quantile_tokens`` (C, Q) holds quantiles of the lengths. The last axis is the integral of S(y) from 0 to x, that
    of y*S(y), and the slopes per cell of both, in this order; the last cell's slopes are 0.
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

    Given when requests came, the number in flight has this share of its mean as variance: a request of age x is still
    there with probability S(x), and the integral of S(1 - S) is the mean times the Gini coefficient.
    """
    n = quantile_tokens.shape[1]
    rank = (2.0 * np.arange(n) + 1.0 - n) / n
    coefficients: FloatArray = (np.sort(quantile_tokens, axis=1) * rank).mean(axis=1) / quantile_tokens.mean(axis=1)
    return coefficients


class BlockTables(NamedTuple):
    """What requests of a class hold of KV blocks beyond their tokens; arrays are (C,).

    ``slack_tokens`` are those of its last block that a request in flight does not use, on average: half a block where
    contexts are many blocks long, more where a block holds a whole request. ``growth`` is what outputs add to the
    blocks that prompts take, relative to the outputs' tokens: 0 where they stay within their prompt's block.
    """

    slack_tokens: FloatArray
    growth: FloatArray


def block_tables(stats: ClassStats, block_tokens: int) -> BlockTables:
    """The block tables of these classes at this size of a block; requests are seen at every position of outputs."""
    slack_tokens, growth = np.empty((2, len(stats.names)))
    along = (np.arange(_LENGTH_POINTS) + 0.5) / _LENGTH_POINTS
    for c in range(len(stats.names)):
        outputs = np.quantile(stats.output_cdf_tokens[c], along)
        prompts = stats.prompt_quantile_tokens[c][:, None]
        context = prompts[:, :, None] + outputs[:, None] * along
        slack = _whole_blocks(context, block_tokens) - context
        # A request with a long output is seen more often.
        slack_tokens[c] = np.average(slack.mean(axis=(0, 2)), weights=outputs)
        added = _whole_blocks(prompts + outputs, block_tokens) - _whole_blocks(prompts, block_tokens)
        growth[c] = added.mean() / outputs.mean()
    return BlockTables(slack_tokens, growth)


def _whole_blocks(tokens: FloatArray, block_tokens: int) -> FloatArray:
    """Tokens of the blocks that hold so many."""
    whole: FloatArray = np.ceil(tokens / block_tokens) * block_tokens
    return whole


class PrefillRatios(NamedTuple):
    """Prefill time of a class's mean prompt relative to its listed work, by precision tier.

    ``alone`` (C, 3) on an idle replica; ``dedicated`` (C, 3) on a GPU that does nothing else and is full of prompts;
    ``fused`` (C, 3, batch points) a single prompt in a running batch; ``saturated`` the same in iterations full of
    such prompts.
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
            # Each iteration streams the weights once, as a decode of one request does.
            streaming = float(tables.decode_ms[tier, 0, 0, 0]) * prompt / token_budget
            dedicated[c, tier] = (interp_log(at, points, tables.prefill_saturated_ms[tier, 0])[0] + streaming) / listed
            for b in range(n_batch):
                fused[c, tier, b] = interp_log(at, points, tables.prefill_marginal_ms[tier, b])[0] / listed
                saturated[c, tier, b] = interp_log(at, points, tables.prefill_saturated_ms[tier, b])[0] / listed
    return PrefillRatios(alone, dedicated, fused, saturated)
