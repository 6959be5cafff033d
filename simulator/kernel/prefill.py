"""Prefill together with the batch that runs when a step begins: time of a prompt, and limit on prefill time."""

from __future__ import annotations

from inferencegym import plain_cython as cython

if not cython.compiled:  # compiled, these names are declared in step.pxd
    from math import exp

    from simulator.kernel.cohorts import requests_in_flight
    from simulator.kernel.memory import MAX_CHURN_PROMPTS
    from simulator.kernel.numerics import EPS
    from simulator.kernel.operators import (
        EPS_WEIGHT,
        cell,
        decode_iteration_ms,
        fixed_prefill_ms,
        prefill_ms_per_token,
        prefill_ratio,
        prompt_tokens_per_iteration,
    )
    from simulator.kernel.records import Knobs, Load, Params, Scratch, State

MIN_BACKLOG = 1e-6
"""Number of waiting requests above which iterations are full of prompts."""


def limit_prefill(p: Params, load: Load, knobs: Knobs, s: State, x: Scratch, b: int, t: int) -> None:
    """Compute the limit on prefill time and the time of a prompt, with the batch that runs when the step begins."""
    in_flight = requests_in_flight(p, s, b)
    kv_tokens = 0.0
    for c in range(p.n_classes):
        kv_tokens += s.prompts_in_flight[b, c] + s.positions_in_flight[b, c]
    batch = min(x.fleet.staying_share * in_flight / x.fleet.up, p.batch_points[p.n_batch_points - 1])
    decoding = max(batch, 1.0)
    iteration_ms = decode_iteration_ms(p, knobs, s, x, b, decoding, max(kv_tokens / max(in_flight, EPS), 1.0))
    # Share of the time that prefill takes in an iteration full of prompts; the decodes take the rest.
    x.prefill.full_ms = prompt_tokens_per_iteration(p, knobs, b, batch) * prefill_ms_per_token(p, s, x, b)
    x.prefill.cap = p.disagg_limit if p.prefill_first else x.prefill.full_ms / (x.prefill.full_ms + iteration_ms)
    x.prefill.limit = x.prefill.cap + (p.disagg_limit - x.prefill.cap) * x.fleet.disagg_share
    crowding = expected_share(p, load, s, x, b, t)
    if p.prefill_first:
        decode_ms = (1.0 - exp(-batch)) * iteration_ms
        crowding, x.prefill.prompts_ms, x.prefill.prompts_work_share = own_iteration(p, s, x, b, crowding, decode_ms)
    i = cell(p.batch_points, p.n_batch_points, decoding, 0)
    for c in range(p.n_classes):
        fused = prefill_ratio(p, c, s.tier_new[b], i, decoding, crowding)
        dedicated = p.dedicated_ratio[c, s.tier_new[b]]
        x.prefill.ratio[c] = (1.0 - x.fleet.disagg_share) * fused + x.fleet.disagg_share * dedicated
        x.prefill.prompt_ms[c] = x.heads.work_ms[c] * x.prefill.ratio[c]
        # An admission into a full pool causes recomputation of a mean output, counted in prompts of this class.
        mean_output = p.block_growth[c] * p.length_integrals[c, 4 * p.grid_cells]
        x.prefill.churn_prompts[c] = min(mean_output / x.heads.prompt_tokens[c], MAX_CHURN_PROMPTS)


def expected_share(p: Params, load: Load, s: State, x: Scratch, b: int, t: int) -> float:
    """Share of the time that prefill is expected to take in this step.

    With a backlog, admissions continue at the rate of the last step; otherwise all arrivals are admitted.
    """
    w = load.index[b]
    backlog = 0.0
    arrived_ms = 0.0
    for c in range(p.n_classes):
        backlog += s.queue[b, c] - load.arrivals[w, t, c]
        arrived_ms += load.arrivals[w, t, c] * x.heads.work_ms[c]
    if backlog > MIN_BACKLOG:
        return s.prefill_share[b]
    return min(arrived_ms / (x.fleet.up * p.dt_ms), x.prefill.limit)


def own_iteration(
    p: Params, s: State, x: Scratch, b: int, share: float, decode_ms: float
) -> tuple[float, float, float]:
    """A prefill-only iteration of n prompts: 1 - 1/n, its time (ms), and the share of it that grows with n.

    An engine that prefills first takes into one iteration the prompts that arrived during the last one, which was a
    decode iteration or a prefill of F + n * work. If ``share`` is the arrivals per ms times the work of a prompt, then
    n = share / work * (decode + F) / (1 - share).
    """
    work_ms = 0.0
    fixed_ms = 0.0
    tokens = 0.0
    requests = 0.0
    for c in range(p.n_classes):
        weight = s.queue[b, c] + EPS_WEIGHT
        work_ms += weight * x.heads.work_ms[c] * p.saturated_ratio[c, s.tier_new[b], 0]
        fixed_ms += weight * fixed_prefill_ms(p, s, b, c)
        tokens += weight * x.heads.prompt_tokens[c]
        requests += weight
    work_ms /= requests
    fixed_ms /= requests
    came = share / work_ms * (decode_ms + fixed_ms) / (1.0 - min(share, p.disagg_limit))
    n = max(1.0, min(came, p.token_budget * requests / tokens))
    prompts_ms = fixed_ms + n * work_ms
    return 1.0 - 1.0 / n, prompts_ms, n * work_ms / prompts_ms
