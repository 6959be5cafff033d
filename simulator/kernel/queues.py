"""Requests waiting for admission, by class and step of arrival."""

from __future__ import annotations

from inferencegym import plain_cython as cython

if not cython.compiled:  # compiled, these names are declared in step.pxd
    from simulator.kernel.memory import prefix_hit_share
    from simulator.kernel.numerics import EPS_FLOW, EPS_REQUESTS
    from simulator.kernel.records import Knobs, Load, Metrics, Params, Scratch, State


def receive_arrivals(p: Params, load: Load, s: State, b: int, t: int) -> None:
    """Add arrivals to the queues of their classes, and update the rolling statistics of the offered load."""
    w = load.index[b]
    requests = 0.0
    tokens = 0.0
    for c in range(p.n_classes):
        arrived = load.arrivals[w, t, c]
        s.waiting[b, c, t] = arrived
        s.queue[b, c] += arrived
        s.first_waiting[b, c] = oldest_waiting(s, b, c, t)
        s.class_window[b, c] += arrived
        if t >= p.class_window_steps:
            s.class_window[b, c] -= load.arrivals[w, t - p.class_window_steps, c]
        requests += arrived
        tokens += load.prompt_tokens[w, t, c]
        if t >= p.prompt_window_steps:
            tokens -= load.prompt_tokens[w, t - p.prompt_window_steps, c]
            s.prompt_window_requests[b] -= load.arrivals[w, t - p.prompt_window_steps, c]
    s.prompt_window_requests[b] += requests
    s.prompt_window_tokens[b] += tokens
    s.rate_ema[b] += p.ema_weight * (requests / p.dt_s - s.rate_ema[b])


def oldest_waiting(s: State, b: int, c: int, t: int) -> int:
    """First step of arrival with requests that still wait, or ``t``."""
    j = s.first_waiting[b, c]
    while j < t and s.waiting[b, c, j] <= EPS_REQUESTS:
        j += 1
    return j


def queued_requests(p: Params, s: State, b: int) -> float:
    """Waiting requests of all classes."""
    total = 0.0
    for c in range(p.n_classes):
        total += s.queue[b, c]
    return total


def measure_heads(p: Params, load: Load, knobs: Knobs, s: State, x: Scratch, b: int, t: int) -> None:
    """Mean prompt and prefill work of those requests of each class that could be admitted in this step."""
    w = load.index[b]
    hit = prefix_hit_share(p, s, x, b)
    slots = s.replicas_up[b] * knobs.batch_size[b] + 1.0
    for c in range(p.n_classes):
        left = min(slots, s.queue[b, c])
        tokens = 0.0
        work_ms = 0.0
        taken = 0.0
        j = s.first_waiting[b, c]
        while j <= t and left > EPS_FLOW:
            n = min(s.waiting[b, c, j], left)
            if n > 0.0:
                part = n / load.arrivals[w, j, c]
                tokens += part * load.prompt_tokens[w, j, c]
                work_ms = with_listed_work(load, s, x, b, c, j, part, hit, work_ms)
                taken += n
                left -= n
            j += 1
        if taken > 0.0:
            x.heads.prompt_tokens[c] = tokens / taken
            x.heads.work_ms[c] = work_ms / taken
        else:
            x.heads.prompt_tokens[c] = p.mean_prompt_tokens[c]
            x.heads.work_ms[c] = p.mean_work_ms[c, s.tier_new[b]]


def with_listed_work(
    load: Load, s: State, x: Scratch, b: int, c: int, j: int, part: float, hit: float, work_ms: float
) -> float:
    """``work_ms`` plus the listed prefill work of a part of step ``j``'s arrivals, less cached prefixes."""
    w = load.index[b]
    new = x.fleet.new_share
    arrived_ms = load.prefill_work_ms[w, j, c, s.tier_new[b]]
    if new < 1.0:
        arrived_ms = new * arrived_ms + (1.0 - new) * load.prefill_work_ms[w, j, c, s.tier_old[b]]
    work_ms += part * arrived_ms
    if hit > 0.0:
        work_ms -= (hit * part) * (
            new * load.saved_work_ms[w, j, c, s.tier_new[b]] + (1.0 - new) * load.saved_work_ms[w, j, c, s.tier_old[b]]
        )
    return work_ms


def leave_queues(p: Params, s: State, x: Scratch, b: int) -> None:
    """Subtract the admitted requests from the queues' totals."""
    for c in range(p.n_classes):
        s.queue[b, c] -= x.batch.admitted[c]
        if s.queue[b, c] < EPS_REQUESTS:
            s.queue[b, c] = 0.0


def reject_overflow(p: Params, s: State, m: Metrics, b: int, t: int) -> None:
    """Refuse requests beyond the queue limit: lowest class first, newest first."""
    over = queued_requests(p, s, b) - p.queue_limit
    m.rejected[b] = max(over, 0.0)
    c = p.n_classes - 1
    while over > EPS_REQUESTS and c >= 0:
        drop = min(over, s.queue[b, c])
        s.queue[b, c] -= drop
        s.missed_so_far[b, c] += drop
        over -= drop
        j = t
        while drop > EPS_FLOW and j >= 0:
            n = min(s.waiting[b, c, j], drop)
            s.waiting[b, c, j] -= n
            drop -= n
            j -= 1
        c -= 1
