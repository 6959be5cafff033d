"""Pace of a step: the tokens that a running request gains. It determines the admissions and depends on them."""

from __future__ import annotations

from inferencegym import plain_cython as cython

if not cython.compiled:  # compiled, these names are declared in step.pxd
    from math import exp, log

    from simulator.kernel.admission import MIN_REPLICAS_UP, admit, mean_batch
    from simulator.kernel.cohorts import find_survivors
    from simulator.kernel.numerics import EPS
    from simulator.kernel.operators import decode_iteration_ms, keep_cells, tokens_per_verify
    from simulator.kernel.records import Knobs, Metrics, Params, Scratch, State

GAIN_RESIDUAL = 1e-4
"""Relative change of the gain in a sweep below which the fixed point has converged. Chosen: metrics then change by less
than the last digit that documents show."""
MAX_SWEEPS = 60
"""Most sweeps of the fixed point. Measured on the registered tasks: 3 on average, 12 at most."""
MIN_FALL = 0.1
"""Smallest fall of the excess per unit of log gain for which a secant step is used. Chosen: it stretches one sweep's
change of the gain by at most 10."""
FIRST_GUESS_TOKENS_PER_MS = 0.05
"""Initial guess for the first step of an episode: 20 ms per token. Chosen; the result does not depend on it."""
MIN_GAIN_TOKENS = 1e-9
"""Smallest gain of a request in a step (tokens), which avoids a division by 0 when the fleet is down."""


def solve(p: Params, knobs: Knobs, s: State, x: Scratch, m: Metrics, b: int, t: int) -> float:
    """Tokens that a running request gains in this step: the fixed point of :func:`next_gain`.

    If prefill fills the step, a larger gain admits more requests, whose prefill makes the resulting gain much smaller;
    plain substitution would oscillate between two values. So the secant method finds the root of log(next_gain(g)) -
    log(g), which falls as g grows. The last gain tried is returned, because ``x.batch`` and ``x.pace`` were computed
    with it; no state has changed.
    """
    gain = s.gain_tokens[b] if t > 0 else FIRST_GUESS_TOKENS_PER_MS * p.dt_ms
    at = log(gain)
    excess = log(next_gain(p, knobs, s, x, m, b, t, gain)) - at
    step = excess
    sweeps = 1
    while abs(excess) > GAIN_RESIDUAL and sweeps < MAX_SWEEPS:
        last_excess = excess
        at += step
        gain = exp(at)
        excess = log(next_gain(p, knobs, s, x, m, b, t, gain)) - at
        sweeps += 1
        fall = (last_excess - excess) / step
        step = excess / fall if fall > MIN_FALL else excess
    return gain


def next_gain(p: Params, knobs: Knobs, s: State, x: Scratch, m: Metrics, b: int, t: int, gain: float) -> float:
    """Gain that results from the admissions and the mean batch at a gain of ``gain`` tokens."""
    find_survivors(p, s, x, b, t, gain)
    admit(p, knobs, s, x, b, gain)
    in_flight, tokens = mean_batch(p, s, x, b)
    # Cap at the table's largest batch: while every replica restarts, the division would be by nearly 0.
    batch = min(in_flight / x.fleet.up, p.batch_points[p.n_batch_points - 1])
    context = max(tokens / max(in_flight, EPS), 1.0)
    # If contexts outgrow the pool within the step, requests take turns; the next step preempts some.
    resident = max(min(batch, x.memory.kv_pool_tokens / (context + mean_block_slack(p, s, x, b))), EPS)
    x.pace.resident = resident
    x.pace.context_tokens = context
    x.pace.iteration_ms = decode_iteration_ms(p, knobs, s, x, b, max(resident, 1.0), context)
    x.pace.prefill_share = min(x.room.prefill_ms / (x.fleet.up * p.dt_ms), x.prefill.limit)
    if s.replicas_up[b] < MIN_REPLICAS_UP:
        return MIN_GAIN_TOKENS
    tpot = tpot_ms(p, knobs, s, x, b)
    if batch > resident:
        tpot *= batch / resident
    if m.oom[b] > 0.0:
        tpot *= p.oom_slowdown
    return max(p.dt_ms / tpot, MIN_GAIN_TOKENS)


def tpot_ms(p: Params, knobs: Knobs, s: State, x: Scratch, b: int) -> float:
    """Time per output token of a running request: its decode iterations, and the prefill between them."""
    stolen_share = x.pace.prefill_share * (1.0 - x.fleet.disagg_share)
    return x.pace.iteration_ms / tokens_per_verify(p, knobs, s, x, b) / (1.0 - stolen_share)


def mean_block_slack(p: Params, s: State, x: Scratch, b: int) -> float:
    """KV tokens that a request holds beyond its context, averaged over running classes."""
    tokens = 0.0
    requests = 0.0
    for c in range(p.n_classes):
        weight = s.in_flight[b, c] + x.batch.admitted[c] + EPS
        tokens += weight * p.block_slack_tokens[c]
        requests += weight
    return tokens / requests


def keep_pace(p: Params, s: State, x: Scratch, b: int, gain: float) -> None:
    """Store the parts of the solution that the next step starts from and that reports show."""
    s.gain_tokens[b] = gain
    s.prefill_share[b] = x.pace.prefill_share
    s.resident[b] = x.pace.resident
    s.context_tokens[b] = x.pace.context_tokens
    keep_cells(p, s, b, max(x.pace.resident, 1.0), x.pace.context_tokens)
    for c in range(p.n_classes):
        prefill_share = min(1.0, x.batch.admitted[c] * x.prefill.prompt_ms[c] / (x.fleet.up * p.dt_ms))
        s.prefill_load[b, c] += p.load_weight * (prefill_share - s.prefill_load[b, c])
