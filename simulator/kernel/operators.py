"""Times of iterations and prompts, looked up in the measured tables."""

from __future__ import annotations

from inferencegym import plain_cython as cython

if not cython.compiled:  # compiled, these names are declared in step.pxd
    from simulator.kernel.numerics import EPS
    from simulator.kernel.records import Knobs, Params, Points, Scratch, State

EPS_WEIGHT = 1e-6
"""Requests added to each class's weight in a mean over waiting requests: classes weigh the same if none wait."""
MIN_PREFILL_SHARE = 0.25
"""Smallest share of the token budget left for prompts. Chosen, because 512 requests with drafts exceed the budget."""


def decode_iteration_ms(
    p: Params, knobs: Knobs, s: State, x: Scratch, b: int, requests: float, context: float
) -> float:
    """Time of one decode iteration; during a rollout the mean of both precisions."""
    new = x.fleet.new_share
    i = cell(p.iteration_points, p.n_iteration_points, requests, s.iteration_cell[b])
    j = cell(p.context_points, p.n_context_points, context, s.context_cell[b])
    iteration_ms = decode_ms(p, s.tier_new[b], knobs.spec[b], i, j, requests, context)
    if new < 1.0:
        old_ms = decode_ms(p, s.tier_old[b], knobs.spec[b], i, j, requests, context)
        iteration_ms = new * iteration_ms + (1.0 - new) * old_ms
    return iteration_ms


def cell(points: Points, n_points: int, value: float, start: int) -> int:
    """Cell between two points that holds ``value``, clamped to the first or last cell; ``start`` is a guess."""
    i = start
    while i > 0 and value < points[i]:
        i -= 1
    while i < n_points - 2 and value >= points[i + 1]:
        i += 1
    return i


def decode_ms(p: Params, tier: int, spec: int, i: int, j: int, requests: float, context: float) -> float:
    """Time of one decode iteration in these cells: bilinear in requests (GEMM rows) and context (KV reads)."""
    u = (requests - p.iteration_points[i]) / (p.iteration_points[i + 1] - p.iteration_points[i])
    v = max((context - p.context_points[j]) / (p.context_points[j + 1] - p.context_points[j]), 0.0)
    return (1.0 - u) * ((1.0 - v) * p.decode_ms[tier, spec, i, j] + v * p.decode_ms[tier, spec, i, j + 1]) + u * (
        (1.0 - v) * p.decode_ms[tier, spec, i + 1, j] + v * p.decode_ms[tier, spec, i + 1, j + 1]
    )


def prefill_ratio(p: Params, c: int, tier: int, i: int, requests: float, prefill_share: float) -> float:
    """Prefill time of a request relative to its listed work, fused into a batch of ``requests`` in cell ``i``.

    A lone prompt shares iterations that stream the weights anyway; the more prompts there are, the closer its cost
    comes to that in iterations full of prompts.
    """
    u = (requests - p.batch_points[i]) / (p.batch_points[i + 1] - p.batch_points[i])
    lone = (1.0 - u) * p.fused_ratio[c, tier, i] + u * p.fused_ratio[c, tier, i + 1]
    full = (1.0 - u) * p.saturated_ratio[c, tier, i] + u * p.saturated_ratio[c, tier, i + 1]
    return lone + (full - lone) * prefill_share


def keep_cells(p: Params, s: State, b: int, requests: float, context: float) -> None:
    """Remember the cells of this step's look-ups; the next step's look-ups begin there."""
    s.iteration_cell[b] = cell(p.iteration_points, p.n_iteration_points, requests, s.iteration_cell[b])
    s.context_cell[b] = cell(p.context_points, p.n_context_points, context, s.context_cell[b])


def prompt_tokens_per_iteration(p: Params, knobs: Knobs, b: int, resident: float) -> float:
    """Prompt tokens that fit into an iteration's token budget beside the decodes (one token plus drafts each).

    If prompts have separate iterations, the whole budget.
    """
    if p.prefill_first:
        return p.token_budget
    decode_tokens = resident * (1.0 + p.spec_length[knobs.spec[b]])
    return max(p.token_budget - decode_tokens, MIN_PREFILL_SHARE * p.token_budget)


def prefill_ms_per_token(p: Params, s: State, x: Scratch, b: int) -> float:
    """Prefill time per prompt token of waiting requests, in iterations full of prompts."""
    work_ms = 0.0
    tokens = 0.0
    for c in range(p.n_classes):
        weight = s.queue[b, c] + EPS_WEIGHT
        work_ms += weight * x.heads.work_ms[c]
        tokens += weight * x.heads.prompt_tokens[c]
    return work_ms / tokens


def fixed_prefill_ms(p: Params, s: State, b: int, c: int) -> float:
    """Fixed part of a prefill-only iteration (ms), whatever its prompts: streaming the weights, engine overhead."""
    tier = s.tier_new[b]
    return p.mean_work_ms[c, tier] * max(0.0, p.alone_ratio[c, tier] - p.saturated_ratio[c, tier, 0])


def tokens_per_verify(p: Params, knobs: Knobs, s: State, x: Scratch, b: int) -> float:
    """Tokens per verification step of speculative decoding, averaged over running classes; 1 without drafts.

    A task's own acceptance is that of the current step, for all requests that run in it.
    """
    spec = knobs.spec[b]
    if spec == 0:
        return 1.0
    stage = acceptance_stage(p, s.time[b])
    rate = 0.0
    requests = 0.0
    for c in range(p.n_classes):
        weight = s.in_flight[b, c] + x.batch.admitted[c] + EPS
        if stage < 0:
            rate += weight * p.accept_scale[c]
        else:
            rate += weight * accepted_drafts(p.acceptance[stage, c], p.spec_length[spec])
        requests += weight
    if stage < 0:
        return 1.0 + (p.spec_tokens[spec] - 1.0) * rate / requests
    return 1.0 + rate / requests


def acceptance_stage(p: Params, t: int) -> int:
    """Stage of the task's own acceptance in a step; -1 if drafts are accepted as measured."""
    stage = p.acceptance_stages - 1
    while stage > 0 and p.acceptance_from[stage] > t:
        stage -= 1
    return stage


def accepted_drafts(acceptance: float, drafts: float) -> float:
    """Mean number of drafts accepted in a row, if each is accepted with this probability."""
    accepted = 0.0
    chance = acceptance
    for _ in range(int(drafts)):
        accepted += chance
        chance *= acceptance
    return accepted
