"""Admissions in a step of a given gain, and the mean batch that results: one sweep of the fixed point."""

from __future__ import annotations

from inferencegym import plain_cython as cython

if not cython.compiled:  # compiled, these names are declared in step.pxd
    from simulator.kernel.cohorts import staying_of_admissions
    from simulator.kernel.numerics import EPS, EPS_FLOW, EPS_REQUESTS
    from simulator.kernel.records import Knobs, Params, Scratch, State

MIN_REPLICAS_UP = 1e-6
"""Replicas in service below which the fleet is down."""
MAX_PREFILLING_SHARE = 0.5
"""Largest share of the slots that requests without a first token can hold. Chosen: it is estimated a step late."""


def admit(p: Params, knobs: Knobs, s: State, x: Scratch, b: int, gain: float) -> None:
    """Admit by class, highest first, into free slots, prefill time and KV cache.

    Within a class, running requests keep their place, preempted ones come next, then new ones. Lower classes give way
    in the KV pool, so a class only competes with itself and with higher classes. Requests on removed replicas do not
    count against the slots and KV pool of the remaining ones.
    """
    slots = open_slots(p, knobs, s, x, b)
    kv_pool = x.fleet.up * x.memory.kv_pool_tokens
    x.room.running = 0.0
    for c in range(p.n_classes):
        x.room.running += x.fleet.staying_share * x.cohorts.survivors[c, 0]
    x.room.kv_tokens = 0.0
    x.room.budget_ms = x.prefill.limit * x.fleet.up * p.dt_ms
    x.room.prefill_ms = 0.0
    x.room.blocked = False
    for c in range(p.n_classes):
        hold_survivors(p, s, x, b, c)
        resume(p, s, x, b, c, slots, kv_pool)
        admit_class(p, s, x, b, c, gain, slots, kv_pool)


def open_slots(p: Params, knobs: Knobs, s: State, x: Scratch, b: int) -> float:
    """Slots of the fleet for decoding requests: total slots less those of requests in prefill."""
    slots = x.fleet.up * knobs.batch_size[b]
    slots -= min(s.prefilling[b], MAX_PREFILLING_SHARE * slots)
    return min(slots, p.closed_clients) if p.closed_clients > 0.0 else slots


def hold_survivors(p: Params, s: State, x: Scratch, b: int, c: int) -> None:
    """Let survivors of a class keep their slots and their KV cache."""
    requests = x.cohorts.survivors[c, 0]
    positions = x.cohorts.survivors[c, 1]
    x.batch.end_requests[c] = requests
    x.batch.end_positions[c] = positions
    x.batch.end_prompts[c] = surviving_prompts(s, x, b, c)
    held = x.batch.end_prompts[c] + positions + p.block_slack_tokens[c] * requests
    x.room.kv_tokens += x.fleet.staying_share * held


def surviving_prompts(s: State, x: Scratch, b: int, c: int) -> float:
    """Prompt tokens of a class's survivors."""
    keep = x.cohorts.survivors[c, 0] / s.in_flight[b, c] if s.in_flight[b, c] > EPS_FLOW else 0.0
    return s.prompts_in_flight[b, c] * keep


def resume(p: Params, s: State, x: Scratch, b: int, c: int, slots: float, kv_pool: float) -> None:
    """Resume preempted requests of a class: their prompts and outputs so far are recomputed."""
    x.batch.resumed[c] = 0.0
    if s.preempted[b, c] <= EPS_REQUESTS:
        return
    tokens = preempted_context(s, b, c)
    each_ms = tokens * x.heads.work_ms[c] / x.heads.prompt_tokens[c] * x.prefill.ratio[c]
    each_kv = tokens + p.block_slack_tokens[c]
    n = min(
        max(0.0, slots - x.room.running),
        x.room.budget_ms / max(each_ms, EPS),
        max(0.0, kv_pool - x.room.kv_tokens) / each_kv,
    )
    x.room.blocked = x.room.blocked or n < s.preempted[b, c]
    n = min(n, s.preempted[b, c]) if n > EPS_REQUESTS else 0.0
    x.batch.resumed[c] = n
    x.room.running += n
    x.room.kv_tokens += n * each_kv
    x.room.budget_ms -= n * each_ms
    x.room.prefill_ms += n * each_ms


def preempted_context(s: State, b: int, c: int) -> float:
    """Mean context of a class's preempted requests: prompt and output so far (tokens)."""
    return (s.preempted_prompts[b, c] + s.preempted_positions[b, c]) / s.preempted[b, c]


def admit_class(p: Params, s: State, x: Scratch, b: int, c: int, gain: float, slots: float, kv_pool: float) -> None:
    """Admit new requests of a class, evenly over the step; the share ``stay`` of them still runs at its end."""
    stay, stay_pos = staying_of_admissions(p, c, gain)
    each_kv = (x.heads.prompt_tokens[c] + p.block_slack_tokens[c]) * stay + stay_pos
    room = max(0.0, slots - x.room.running) / stay
    fit = max(0.0, kv_pool - x.room.kv_tokens) / max(each_kv, EPS)
    x.batch.kv_bound[c] = kv_bound(s, x, b, c, room, fit)
    each_ms = admission_ms(p, x, c)
    room = min(min(room, fit), max(0.0, x.room.budget_ms) / max(each_ms, EPS))
    if x.room.blocked:  # new requests wait until preempted ones of this and higher classes have resumed
        room = 0.0
    if x.room.running + s.queue[b, c] <= 1.0 and s.replicas_up[b] > MIN_REPLICAS_UP:
        room = max(room, 1.0)  # an empty replica always takes one request, however long
    n = min(s.queue[b, c], room)
    if n <= EPS_REQUESTS:  # amounts that are only rounding errors of a budget, or of a fleet that is down
        n = 0.0
    x.batch.admissible[c] = max(room, n)
    x.batch.admitted[c] = n
    x.batch.end_requests[c] += n * stay
    x.batch.end_positions[c] += n * stay_pos
    x.batch.end_prompts[c] += n * stay * x.heads.prompt_tokens[c]
    x.room.running += n * stay
    x.room.kv_tokens += n * each_kv
    x.room.budget_ms -= n * each_ms
    x.room.prefill_ms += n * each_ms


def kv_bound(s: State, x: Scratch, b: int, c: int, room: float, fit: float) -> float:
    """How much the KV pool bounds admission (0 to 1), with slots for ``room`` requests and cache for ``fit``.

    An engine admits a request when its prompt fits into the free part of the pool, and preempts the youngest when the
    contexts of the others grow. So requests for which there is a slot but no cache are admitted and preempted again, at
    most ``churn_prompts`` of them per request that stays.
    """
    more = max(0.0, min(room, s.queue[b, c]) - fit)
    return min(1.0, more / max(fit * x.prefill.churn_prompts[c], EPS))


def admission_ms(p: Params, x: Scratch, c: int) -> float:
    """Prefill time of one admission (ms): its prompt and, in a full pool, recomputing the requests it displaces."""
    return x.prefill.prompt_ms[c] * (1.0 + p.churn_factor * x.batch.kv_bound[c] * x.prefill.churn_prompts[c])


def mean_batch(p: Params, s: State, x: Scratch, b: int) -> tuple[float, float]:
    """Requests in flight and their context tokens: means of the step's start and end, without removed replicas."""
    in_flight = 0.0
    tokens = 0.0
    for c in range(p.n_classes):
        if x.batch.resumed[c] > 0.0:
            in_flight += 0.5 * x.batch.resumed[c]
            tokens += 0.5 * x.batch.resumed[c] * preempted_context(s, b, c)
        elsewhere = 0.0
        elsewhere_tokens = 0.0
        if x.fleet.staying_share < 1.0:
            draining = 1.0 - x.fleet.staying_share
            elsewhere = draining * (s.in_flight[b, c] + x.cohorts.survivors[c, 0])
            prompts = s.prompts_in_flight[b, c] + surviving_prompts(s, x, b, c)
            elsewhere_tokens = draining * (prompts + s.positions_in_flight[b, c] + x.cohorts.survivors[c, 1])
        in_flight += 0.5 * (s.in_flight[b, c] + x.batch.end_requests[c] - elsewhere)
        prompts = s.prompts_in_flight[b, c] + x.batch.end_prompts[c]
        tokens += 0.5 * (prompts + s.positions_in_flight[b, c] + x.batch.end_positions[c] - elsewhere_tokens)
    return in_flight, tokens
