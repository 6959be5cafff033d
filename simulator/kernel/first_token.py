"""Time from admission to first token, from stationary queueing formulas: a step is too long to resolve it."""

from __future__ import annotations

from inferencegym import plain_cython as cython

if not cython.compiled:  # compiled, these names are declared in step.pxd
    from math import erfc, exp, log, sqrt

    from simulator.kernel.numerics import EPS, SQRT_HALF, normal_tail
    from simulator.kernel.operators import fixed_prefill_ms
    from simulator.kernel.prefill import MIN_BACKLOG
    from simulator.kernel.queues import queued_requests
    from simulator.kernel.records import Knobs, Metrics, Params, Scratch, State

MAX_UTILISATION = 0.95
"""Largest utilisation by prompts in 1 / (1 - utilisation). Chosen: beyond it, prompts wait in the fluid queue."""
SLOT_DEVIATION = 0.7
"""Standard deviation of requests in flight near the slot limit, relative to that without a limit. Measured: fitted to
the discrete-event reference, two loads at the slot limit."""
STEP_GROWTH = 0.45
"""Mean over a step of a reflected random walk from 0, per standard deviation gained in the step. Brownian motion gives
(2/3) * sqrt(2/pi) = 0.53. Measured: lowered to fit the discrete-event reference on long prompts."""
MIN_WAIT_PROBABILITY = 0.05
"""Smallest P(wait > 0) in the variance of a wait, which is divided by it. Chosen: one wait in twenty."""
MIN_NO_SLOT_PROBABILITY = 1e-3
"""P(no slot) below which waits for a slot are left out. Chosen: a tenth of what a p99 shows."""
MAX_SLOT_WAIT_STEPS = 2.0
"""Longest mean wait for a slot, in steps. Chosen: longer waits are those of the fluid queue."""
MIN_KV_OCCUPANCY = 1e-3
"""KV occupancy above which the pool can limit requests in flight; extrapolating a nearly idle fleet says nothing."""
NORMAL_PEAK = 0.3989422804014327
"""Density of the standard normal distribution at 0: 1 / sqrt(2 pi)."""
NORMAL_P99 = 2.326
"""99% quantile of the standard normal distribution."""


def estimate_first_tokens(p: Params, knobs: Knobs, s: State, x: Scratch, m: Metrics, b: int) -> None:
    """Estimate the distribution of the time from admission to first token, class by class."""
    backlog = queued_requests(p, s, b)
    measure_engine(p, x, m, b)
    measure_prefill_queue(p, s, x, b, backlog)
    measure_slots(p, knobs, s, x, m, b, backlog)
    ahead = 0.0
    for c in range(p.n_classes):
        chunks = x.heads.prompt_tokens[c] / p.token_budget
        service = 1.0 + x.prompts.decode_share_ms * chunks / x.prefill.prompt_ms[c]
        up_to = min(ahead + s.prefill_load[b, c] * service, MAX_UTILISATION)
        # If any class is admitted, classes without admissions have no TTFT; a step without any reports what they would
        # get.
        if x.batch.admitted[c] > 0.0 or m.admitted[b] <= 0.0:
            wait_ms = wait_for_prompts(x, chunks, ahead, up_to)
            estimate_first_token(p, s, x, b, c, chunks, wait_ms, backlog)
        ahead = up_to


def measure_engine(p: Params, x: Scratch, m: Metrics, b: int) -> None:
    """State of a replica when a prompt arrives: P(busy), and the decode time in each of its iterations."""
    seen = x.fleet.staying_share * m.running_requests[b] / x.fleet.up
    if p.closed_clients > 0.0:
        seen *= 1.0 - 1.0 / p.closed_clients  # a client does not wait behind its own request
    # The number in flight is nearly Poisson (M/G/infinity), so a replica is idle with probability exp(-mean).
    x.prompts.p_busy = 1.0 - exp(-seen)
    x.prompts.decode_share_ms = 0.0
    if not p.prefill_first:
        x.prompts.decode_share_ms = (1.0 - x.fleet.disagg_share) * x.prompts.p_busy * x.pace.iteration_ms


def measure_prefill_queue(p: Params, s: State, x: Scratch, b: int, backlog: float) -> None:
    """Model the queue of prompts at a replica as M/G/1: utilisation and mean residual work W0 (ms).

    W0 = sum of lambda * E[S^2] / 2 = sum of utilisation * E[S] * (1 + cv^2) / 2 over the classes (Pollaczek-Khinchine),
    where S is the service time of a prompt, decodes in its iterations included.
    """
    residual_ms = 0.0
    residual_chunk_ms = 0.0
    load = 0.0
    utilisation = 0.0
    long_utilisation = 0.0
    for c in range(p.n_classes):
        chunks = x.heads.prompt_tokens[c] / p.token_budget
        # A prompt that fills iterations also waits for the decodes in each of them.
        prompt_ms = x.prefill.prompt_ms[c] + x.prompts.decode_share_ms * chunks
        share = s.prefill_load[b, c] * prompt_ms / x.prefill.prompt_ms[c]
        class_residual_ms = 0.5 * share * prompt_ms * (1.0 + p.work_cv2[c])
        residual_ms += class_residual_ms
        residual_chunk_ms += 0.5 * share * x.prefill.full_ms if prompt_ms > x.prefill.full_ms else class_residual_ms
        load += s.prefill_load[b, c]
        utilisation += share
        long_utilisation += share * min(1.0, chunks)
    x.prompts.residual_ms = residual_ms
    x.prompts.residual_chunk_ms = residual_chunk_ms
    x.prompts.load = load
    x.prompts.utilisation = min(utilisation, MAX_UTILISATION)
    x.prompts.cycle_ms = x.pace.iteration_ms / (1.0 - min(load, x.prefill.cap))
    # With a backlog every iteration is full of prompts, so a short prompt shares its iteration with others.
    x.prompts.packed_ms = x.prefill.full_ms * min(1.0, long_utilisation) if backlog > MIN_BACKLOG else 0.0
    # The fluid queue holds the backlog of whole steps; this is the backlog that can build up within one. The work that
    # arrives in a step has the variance lambda * E[S^2] * dt = 2 * W0 * dt.
    x.prompts.growth_ms = STEP_GROWTH * sqrt(2.0 * residual_ms * p.dt_ms) + EPS
    x.prompts.pooling = pooling(x.fleet.up, x.prompts.utilisation)


def pooling(up: float, utilisation: float) -> float:
    """Factor on W0 where a prompt waits only if every replica is busy with prompts: M/M/c by Sakasegawa (1977).

    His exponent is sqrt(2(c + 1)) - 1; here it is smaller by 1, because W0 already contains the utilisation once.
    """
    replicas = max(up, 1.0)
    return exp((sqrt(2.0 * (replicas + 1.0)) - 2.0) * log(max(utilisation, EPS))) / replicas


def measure_slots(p: Params, knobs: Knobs, s: State, x: Scratch, m: Metrics, b: int, backlog: float) -> None:
    """P(no free slot or cache) due to random fluctuation, and the mean wait for one (ms).

    Output lengths vary, so requests in flight vary around the fluid's mean. They are taken as normal, with the variance
    of M/G/infinity for given arrival times: the mean times the Gini coefficient of output lengths. The normal loss
    function gives the expected excess over the slots, and Little's law the wait.
    """
    running = 0.0
    variance = EPS
    admitted = EPS
    for c in range(p.n_classes):
        running += x.fleet.staying_share * s.in_flight[b, c]
        variance += x.fleet.staying_share * s.in_flight[b, c] * p.output_gini[c]
        admitted += x.batch.admitted[c]
    limit = x.fleet.up * knobs.batch_size[b]
    if m.kv_occupancy[b] > MIN_KV_OCCUPANCY:
        limit = min(limit, running / m.kv_occupancy[b])
    deviation = SLOT_DEVIATION * sqrt(max(variance, EPS))
    margin = (limit - running - backlog) / deviation
    x.prompts.p_no_slot = normal_tail(margin) if p.closed_clients <= 0.0 else 0.0
    x.prompts.slot_wait_ms = 0.0
    if x.prompts.p_no_slot > MIN_NO_SLOT_PROBABILITY:
        z = abs(margin)
        excess = NORMAL_PEAK * exp(-0.5 * z * z) - z * 0.5 * erfc(z * SQRT_HALF)
        # Divide by the flow: in a step without admissions the cap applies.
        x.prompts.slot_wait_ms = min(deviation * max(excess, 0.0) / admitted, MAX_SLOT_WAIT_STEPS) * p.dt_ms


def wait_for_prompts(x: Scratch, chunks: float, ahead: float, up_to: float) -> float:
    """Mean wait (ms) of a prompt for the prompts ahead of it: M/G/1 with non-preemptive priorities (Cobham).

    W0 / ((1 - ahead) * (1 - up_to)), where ``ahead`` is the utilisation by higher classes and ``up_to`` includes this
    one. A short prompt waits for at most one chunk of a long prompt ahead. The excess a over W0 is limited to the
    backlog g that can build up within a step: a * g / (a + g).
    """
    short = max(0.0, 1.0 - chunks)
    residual = short * x.prompts.residual_chunk_ms + (1.0 - short) * x.prompts.pooling * x.prompts.residual_ms
    beyond = residual * (1.0 / ((1.0 - ahead) * (1.0 - up_to)) - 1.0)
    return residual + beyond * x.prompts.growth_ms / (x.prompts.growth_ms + beyond)


def estimate_first_token(
    p: Params, s: State, x: Scratch, b: int, c: int, chunks: float, queueing: float, backlog: float
) -> None:
    """A class's time from admission to first token: a fixed part, and a log-normal part from mean and variance."""
    short = max(0.0, 1.0 - chunks)
    iterations = max(1.0, chunks)
    fixed = fixed_part_ms(p, x, c, iterations)
    service = service_ms(p, s, x, b, c, iterations)
    service_cv2 = p.work_cv2[c]
    if p.prefill_first:
        # The mean work of n heads already contains 1/n of their variance; with n = 1 it is the prompt's own work.
        service_cv2 *= 1.0 - 1.0 / max(x.batch.admitted[c] + s.queue[b, c], 1.0)
        residual, residual_variance = wait_for_own_iteration(p, x, c, service, backlog)
        queueing *= x.fleet.disagg_share
    else:
        residual, residual_variance = wait_for_iteration(x, short)
    slot_wait = x.prompts.slot_wait_ms
    mean = service + residual + queueing + slot_wait
    variance = (
        service * service * service_cv2
        + residual_variance
        # Prompts of one class are nearly equal, and M/D/1 halves the variance of the wait: long prompts count half.
        + wait_variance(queueing, x.prompts.utilisation) * (0.5 + 0.5 * short)
        + wait_variance(slot_wait, x.prompts.p_no_slot)
        + p.jitter * p.jitter * (fixed + mean) * (fixed + mean)
    )
    # Moments of a log-normal distribution: sigma^2 = ln(1 + variance / mean^2), median = mean * exp(-sigma^2 / 2).
    sigma2 = log(1.0 + variance / (mean * mean))
    x.first_token.fixed_ms[c] = fixed
    x.first_token.sigma[c] = sqrt(sigma2)
    x.first_token.median_ms[c] = mean * exp(-0.5 * sigma2)
    x.first_token.p50_ms[c] = fixed + x.first_token.median_ms[c]
    x.first_token.p99_ms[c] = fixed + x.first_token.median_ms[c] * exp(NORMAL_P99 * x.first_token.sigma[c])


def wait_variance(mean: float, probability: float) -> float:
    """Variance of a wait that is 0 with probability 1 - q and exponential otherwise: (2 / q - 1) * mean^2."""
    return mean * mean * (2.0 / max(probability, MIN_WAIT_PROBABILITY) - 1.0)


def fixed_part_ms(p: Params, x: Scratch, c: int, iterations: float) -> float:
    """Part of the time to first token that is the same for every request of a class (ms)."""
    fixed = (
        p.ttft_offset_ms
        + x.prompts.decode_share_ms * iterations
        + x.fleet.disagg_share * x.heads.prompt_tokens[c] * p.handoff_ms_per_token
    )
    if p.output_delay > 0.0:
        load = min(x.prompts.load, p.disagg_limit)
        next_ms = x.prompts.cycle_ms
        if p.prefill_first:
            next_ms = load * x.prefill.prompts_ms + (1.0 - load) * x.pace.iteration_ms
        fixed += p.output_delay * next_ms
    return fixed


def wait_for_iteration(x: Scratch, short: float) -> tuple[float, float]:
    """Mean (ms) and variance of a prompt's wait for its iteration if prefill is fused with decodes.

    It is half the iteration under way, plus other prompts' prefill in the next one, plus iterations full of prompts;
    the wait is uniform between 0 and twice its mean. ``short`` is the part of an iteration that the prompt leaves to
    others.
    """
    colocated = 1.0 - x.fleet.disagg_share
    residual = (
        colocated * x.prompts.p_busy * x.prompts.cycle_ms * (0.5 + x.prompts.load * short) + x.prompts.packed_ms * short
    )
    return residual, residual * residual / 3.0


def wait_for_own_iteration(p: Params, x: Scratch, c: int, service: float, backlog: float) -> tuple[float, float]:
    """Mean (ms) and variance of a prompt's wait for its iteration if prefill has separate iterations.

    First the iteration under way (decode or prefill) ends, on average after half its time. All prompts that arrive
    meanwhile are computed together with this one. With a backlog the fluid queue holds the prompts ahead of it, and the
    prompts behind it take half of its iteration.
    """
    colocated = 1.0 - x.fleet.disagg_share
    load = min(x.prompts.load, p.disagg_limit)
    prompts_ms = x.prefill.prompts_ms
    if backlog > MIN_BACKLOG:
        # If slots or cache limit admission, hardly any prompts follow; then prefill takes little of the time.
        return colocated * load * 0.5 * prompts_ms, colocated * load * prompts_ms * prompts_ms / 12.0
    decode_share = (1.0 - load) * x.prompts.p_busy
    half = 0.5 * (decode_share * x.pace.iteration_ms + load * prompts_ms)
    square = (decode_share * x.pace.iteration_ms * x.pace.iteration_ms + load * prompts_ms * prompts_ms) / 3.0
    others = 2.0 * half * load * x.prefill.prompts_work_share
    variance = square - half * half + others * service * (1.0 + p.work_cv2[c])
    return colocated * (half + others), colocated * variance


def service_ms(p: Params, s: State, x: Scratch, b: int, c: int, iterations: float) -> float:
    """Prefill time of a class's prompt (ms), without decodes: averaged over idle, busy and disaggregated replicas."""
    disagg = x.fleet.disagg_share
    busy = x.prompts.p_busy
    alone = x.heads.work_ms[c] * p.alone_ratio[c, s.tier_new[b]]
    if p.prefill_first:
        full = x.heads.work_ms[c] * p.saturated_ratio[c, s.tier_new[b], 0]
        return (1.0 - disagg) * (full + fixed_prefill_ms(p, s, b, c)) + disagg * alone
    fused = max(x.prefill.prompt_ms[c], alone - x.pace.iteration_ms * iterations)
    return (1.0 - disagg) * ((1.0 - busy) * alone + busy * fused) + disagg * alone
