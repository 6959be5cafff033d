"""Time to first token of a step's admissions: waits in the queue, and the time from admission to first token.

Waits are distances between the cumulative curves of arrivals and admissions. A step's admissions are kept as pieces
with uniform waits; its TTFT quantiles are those of wait + time after admission over the pieces.
"""

from __future__ import annotations

from inferencegym import plain_cython as cython

if not cython.compiled:  # compiled, these names are declared in step.pxd
    from simulator.kernel.first_token import estimate_first_tokens
    from simulator.kernel.numerics import EPS_FLOW, EPS_REQUESTS, lognormal_tail
    from simulator.kernel.records import Knobs, Load, Metrics, Params, Scratch, State

NO_SLO_MS = 1e12
"""Objectives above this count as no objective; :func:`simulator.load.source.class_stats` lists infinity as 1e15."""
STEP_SMOOTHING = 0.5
"""Weight of the newest step in a value that the next step's fixed point starts from. Chosen: the mean of two steps
oscillates less than the last step alone."""
SAME_WAIT = 1e-6
"""Relative difference of the longest and shortest TTFT of a step below which they count as equal."""


def measure_ttft(
    p: Params, load: Load, knobs: Knobs, s: State, x: Scratch, m: Metrics, b: int, t: int
) -> tuple[float, float]:
    """Measure TTFT of the step; returns the requests that missed their objective, and those judged by it."""
    missed = 0.0
    judged = 0.0
    prefilling = 0.0
    x.pieces.n = 0
    estimate_first_tokens(p, knobs, s, x, m, b)
    for c in range(p.n_classes):
        late = take_from_queue(p, load, s, x, b, t, c)
        missed += late
        judged += x.batch.admitted[c]
        # Little's law gives the requests between admission and first token.
        prefilling += x.batch.admitted[c] * (x.first_token.p50_ms[c] - p.ttft_offset_ms) / p.dt_ms
        overdue = overdue_in_queue(p, s, b, t, c)
        missed += overdue
        s.missed_so_far[b, c] += late + overdue
        judged += overdue
    s.prefilling[b] += STEP_SMOOTHING * (prefilling - s.prefilling[b])
    p50_ms = ttft_quantile(x, 0.50, 0) if x.pieces.n > 0 else head_of_line_ms(p, s, x, b, t, 0)
    p99_ms = max(ttft_quantile(x, 0.99, 1), p50_ms) if x.pieces.n > 0 else head_of_line_ms(p, s, x, b, t, 1)
    w = load.index[b]
    m.ttft_p50_ms[b] = p50_ms * load.noise[w, t, 0]
    m.ttft_p99_ms[b] = p99_ms * load.noise[w, t, 0]
    return missed, judged


def take_from_queue(p: Params, load: Load, s: State, x: Scratch, b: int, t: int, c: int) -> float:
    """Take the admitted requests from the head of the queue, with waits as uniform pieces; returns SLO misses."""
    admitted = x.batch.admitted[c]
    if admitted <= 0.0:
        return 0.0
    left = admitted
    taken = 0.0
    missed = 0.0
    j = s.first_waiting[b, c]
    while j <= t and left > EPS_FLOW:
        have = s.waiting[b, c, j]
        n = min(have, left)
        if n > 0.0:
            first, last = waits_ms(p, load, s, x, b, t, c, j, n, taken)
            missed += n * slo_miss_share(p, x, c, min(first, last), max(first, last))
            record_admissions(p, s, x, b, c, n, min(first, last), max(first, last))
            keep_piece(p, x, c, n, min(first, last), max(first, last))
            s.waiting[b, c, j] = have - n
            taken += n
            left -= n
        if left > EPS_FLOW or s.waiting[b, c, j] <= EPS_REQUESTS:
            j += 1
    s.first_waiting[b, c] = min(j, t + 1)
    return missed


def waits_ms(
    p: Params, load: Load, s: State, x: Scratch, b: int, t: int, c: int, j: int, n: float, taken: float
) -> tuple[float, float]:
    """Waits (ms) of the first and the last of ``n`` requests that arrived in step ``j``, after ``taken`` admissions.

    Requests arrived evenly over step ``j``; the last of them still wait. If the queue is not empty afterwards,
    admissions are spread over the whole step; otherwise over the part of it in which the queue was not empty.
    """
    admitted = x.batch.admitted[c]
    room = admitted if s.queue[b, c] > 0.0 else max(x.batch.admissible[c], admitted)
    have = s.waiting[b, c, j]
    arrived = load.arrivals[load.index[b], j, c]
    first_came = (j + 1 - have / arrived) * p.dt_ms
    last_came = (j + 1 - (have - n) / arrived) * p.dt_ms
    first = (t + taken / room) * p.dt_ms - first_came
    last = (t + (taken + n) / room) * p.dt_ms - last_came
    if p.closed_clients > 0.0:
        # Count from the start of the run; simulator.whatif knows when each request was sent.
        first += first_came
        last += last_came
        if t == 0:  # the first clients find the fleet idle and wait only for each other's prompts
            last = min(last, admitted * x.prefill.prompt_ms[c] / x.fleet.up)
    return first, last


def keep_piece(p: Params, x: Scratch, c: int, n: float, shortest: float, longest: float) -> None:
    """Keep ``n`` admissions whose waits are uniform from ``shortest`` to ``longest`` (ms; below 0 = none)."""
    k = x.pieces.n
    if k >= p.max_pieces:
        # Merge further pieces into the last one.
        k = p.max_pieces - 1
        x.pieces.requests[k] += n
        x.pieces.wait_ms[k, 0] = min(x.pieces.wait_ms[k, 0], shortest)
        x.pieces.wait_ms[k, 1] = max(x.pieces.wait_ms[k, 1], longest)
        return
    x.pieces.requests[k] = n
    x.pieces.wait_ms[k, 0] = shortest
    x.pieces.wait_ms[k, 1] = longest
    x.pieces.after_ms[k, 0] = x.first_token.p50_ms[c]
    x.pieces.after_ms[k, 1] = x.first_token.p99_ms[c]
    x.pieces.n = k + 1


def record_admissions(
    p: Params, s: State, x: Scratch, b: int, c: int, n: float, shortest: float, longest: float
) -> None:
    """Append to the row's record of admissions while it has room (columns: ``record`` in ``STATE``)."""
    r = s.n_recorded[b]
    if r < p.record_rows:
        s.record[b, r, 0] = c
        s.record[b, r, 1] = n
        s.record[b, r, 2] = shortest
        s.record[b, r, 3] = longest
        s.record[b, r, 4] = x.first_token.fixed_ms[c]
        s.record[b, r, 5] = x.first_token.median_ms[c]
        s.record[b, r, 6] = x.first_token.sigma[c]
        s.n_recorded[b] = r + 1


def slo_miss_share(p: Params, x: Scratch, c: int, shortest: float, longest: float) -> float:
    """Share of requests beyond the objective if waits are uniform in this range (below 0 = none); Simpson's rule."""
    slo = p.slo_ms[c]
    if slo > NO_SLO_MS:
        return 0.0
    left = slo - x.first_token.fixed_ms[c]
    median = x.first_token.median_ms[c]
    sigma = x.first_token.sigma[c]
    shortest = max(shortest, 0.0)
    if longest <= shortest:
        return lognormal_tail(median, sigma, left - shortest)
    return (
        lognormal_tail(median, sigma, left - shortest)
        + 4.0 * lognormal_tail(median, sigma, left - 0.5 * (shortest + longest))
        + lognormal_tail(median, sigma, left - longest)
    ) / 6.0


def overdue_in_queue(p: Params, s: State, b: int, t: int, c: int) -> float:
    """Requests that still wait at the end of the step although their objective has already passed."""
    slo = p.slo_ms[c]
    if s.queue[b, c] <= 0.0 or slo > NO_SLO_MS:
        return 0.0
    in_time = 0.0
    steps_left = slo / p.dt_ms
    j = t
    while j >= 0 and steps_left > 0.0:
        in_time += s.waiting[b, c, j] * min(1.0, steps_left)
        steps_left -= 1.0
        j -= 1
    return max(0.0, s.queue[b, c] - in_time)


def ttft_quantile(x: Scratch, q: float, tail: int) -> float:
    """Weighted quantile of wait + time after admission (its median, or its p99 with ``tail`` 1) over the pieces.

    Between the ends of pieces, the weight below y is linear in y. Each end that is tried narrows the interval that
    holds the quantile, and most other ends then lie outside it.
    """
    n = x.pieces.n
    total = 0.0
    low = 1e300
    high = 0.0
    for k in range(n):
        after = x.pieces.after_ms[k, tail]
        total += x.pieces.requests[k]
        low = min(low, after + max(x.pieces.wait_ms[k, 0], 0.0))
        high = max(high, after + max(x.pieces.wait_ms[k, 1], 0.0))
    if high - low < SAME_WAIT * high:
        return high
    if n == 1:
        shortest = x.pieces.wait_ms[0, 0]
        wait = shortest + q * (x.pieces.wait_ms[0, 1] - shortest)
        return x.pieces.after_ms[0, tail] + max(wait, 0.0)
    goal = q * total
    under = weight_below(x, low, tail)
    if under >= goal:
        return low
    for k in range(n):
        for end in range(2):
            y = x.pieces.after_ms[k, tail] + max(x.pieces.wait_ms[k, end], 0.0)
            if low < y and y < high:
                below = weight_below(x, y, tail)
                if below >= goal:
                    high = y
                else:
                    low = y
                    under = below
    # A piece of zero width adds its weight in a jump, maybe at the upper end, so take the slope half-way.
    half = 0.5 * (high - low)
    rise = weight_below(x, low + half, tail) - under
    return min(high, low + half * ((goal - under) / rise)) if rise > 0.0 else high


def weight_below(x: Scratch, y: float, tail: int) -> float:
    """Requests of the step's pieces whose wait + time after admission is ``y`` at most."""
    below = 0.0
    for k in range(x.pieces.n):
        after = x.pieces.after_ms[k, tail]
        longest = x.pieces.wait_ms[k, 1]
        if y >= after + max(longest, 0.0):  # same sum as in `ttft_quantile`, so that ends match exactly
            below += x.pieces.requests[k]
        elif y >= after:
            shortest = x.pieces.wait_ms[k, 0]
            wait = y - after
            if shortest < wait and shortest < longest:
                below += x.pieces.requests[k] * (wait - shortest) / (longest - shortest)
    return below


def head_of_line_ms(p: Params, s: State, x: Scratch, b: int, t: int, tail: int) -> float:
    """TTFT of a step without admissions: the oldest request's wait so far, plus the time after admission.

    The time is the median, or with ``tail`` 1 the p99, of the highest class that waits.
    """
    age = 0.0
    after_ms = p.ttft_offset_ms
    for c in range(p.n_classes - 1, -1, -1):
        if c == 0 or s.queue[b, c] > 0.0:
            after_ms = x.first_token.p99_ms[c] if tail > 0 else x.first_token.p50_ms[c]
        j = s.first_waiting[b, c]
        while j <= t and s.waiting[b, c, j] <= EPS_REQUESTS:
            j += 1
        if s.queue[b, c] > 0.0 and j <= t:
            age = max(age, (t + 1 - j) * p.dt_ms)
    return age + after_ms
