"""Queues: arrivals, assignment of requests to replicas, and refusals by a full queue."""

from __future__ import annotations

from inferencegym import plain_cython as cython

if not cython.compiled:  # compiled, these names are declared in loop.pxd
    from simulator.events.blocks import (
        end_of_fed,
        end_of_prefillers,
        first_of,
        fits,
        full_blocks,
        has_idle_prefiller,
        in_flight,
        load_of,
        prompt_blocks,
    )
    from simulator.events.heap import ARRIVAL, READ, TURN_REFUSED, WAKE, schedule
    from simulator.events.lines import (
        ASSIGNED,
        PREEMPTED,
        PREFILLING,
        ROUTED,
        append,
        insert_after,
        insert_by_class,
        is_behind,
        line_of,
        remove,
    )
    from simulator.events.records import Run
    from simulator.events.routing import SHARED, route, takes_requests, uncached_tokens

READ_TOLERANCE_MS = 1e-6
"""A request may be read this much early, because its time is a sum of rounded numbers."""


def arrive(s: Run, request: int) -> None:
    """Let the API servers read an arriving request; if that takes no time, queue it at once."""
    s.arrival_ms[request] = s.now_ms
    if s.request_ms == 0.0:
        enqueue(s, request)
        return
    pass_reading(s)
    s.read_at_ms[request] = s.read_work_ms + s.request_ms
    s.after[request] = -1
    if s.n_reading > 0:
        s.after[s.read_last] = request
    else:
        s.read_first = request
    s.read_last = request
    s.n_reading += 1
    if s.n_reading == 1:
        schedule_read(s)


def end_reading(s: Run) -> None:
    """Queue the requests that have been read."""
    pass_reading(s)
    while s.n_reading > 0 and s.read_at_ms[s.read_first] <= s.read_work_ms + READ_TOLERANCE_MS:
        request = s.read_first
        s.read_first = s.after[request]
        s.n_reading -= 1
        enqueue(s, request)
    if s.n_reading > 0:
        schedule_read(s)


def schedule_read(s: Run) -> None:
    """Schedule the end of reading of the first request, which comes later if others arrive or outputs are sent."""
    work_ms = s.read_at_ms[s.read_first] - s.read_work_ms
    schedule(s, unsent_ms(s) + work_ms * max(1.0, 1.0 * s.n_reading / n_servers(s)), READ, 0, 0)


def pass_reading(s: Run) -> None:
    """Count the work of the API servers up to now: requests take turns, and none has more than one process."""
    if s.now_ms > s.read_until_ms:
        s.read_work_ms += (s.now_ms - s.read_until_ms) / max(1.0, 1.0 * s.n_reading / n_servers(s))
        s.read_until_ms = s.now_ms


def send_outputs(s: Run, n: int) -> None:
    """Let the API servers send outputs of an iteration; those still unsent are merged with their successors."""
    if s.token_ms > 0.0:
        pass_reading(s)
        all_ms = s.token_ms * n
        s.read_until_ms = min(s.read_until_ms + all_ms / n_servers(s), s.now_ms + all_ms)


def unsent_ms(s: Run) -> float:
    """Time until the API servers have sent all outputs so far."""
    return max(0.0, s.read_until_ms - s.now_ms)


def n_servers(s: Run) -> int:
    """API servers: one process per replica in service, at least one."""
    return max(1, s.n_up)


def enqueue(s: Run, request: int) -> None:
    """Queue a request, or refuse it."""
    s.queued_ms[request] = s.now_ms
    too_long = s.context_tokens >= 0 and s.goal[request] > s.context_tokens
    if too_long or full_blocks(s, request) > largest_pool_blocks(s):
        refuse(s, request)
        return
    append(s, s.priority[request], request)
    s.waiting += 1
    dispatch(s)
    if s.queue_limit >= 0 and not_started(s) > s.queue_limit:
        refuse_youngest(s)


def largest_pool_blocks(s: Run) -> int:
    """Blocks of the largest KV pool of any replica."""
    most = 0
    for r in range(s.n_replicas):
        most = max(most, s.pool_blocks[r])
    return most


def not_started(s: Run) -> int:
    """Requests that wait in a queue or are to start next."""
    n = s.waiting
    for r in range(s.n_replicas):
        n += s.line_count[line_of(s, r, ASSIGNED)]
    return n


def dispatch(s: Run) -> None:
    """Assign waiting requests to replicas that have room for them: from a shared queue to the least loaded first."""
    if s.router != SHARED and s.waiting > 0:
        route(s)
        for r in range(s.n_replicas):
            own = line_of(s, r, ROUTED)
            while s.line_count[own] > 0 and has_room(s, r, s.line_first[own]):
                assign(s, own, r)
        return
    while s.waiting > 0:
        queue = 0
        while s.line_count[queue] == 0:
            queue += 1
        request = s.line_first[queue]
        r = least_loaded_with_room(s, request)
        if r < 0:
            return
        assign(s, queue, r)


def assign(s: Run, queue: int, r: int) -> None:
    """Assign the first request of a queue to a replica, which will start it with its next iteration."""
    request = s.line_first[queue]
    remove(s, queue, request)
    s.waiting -= 1
    s.replica[request] = r
    insert_by_class(s, line_of(s, r, ASSIGNED), request)
    s.reserved_blocks[r] += full_blocks(s, request)
    rouse(s, r)


def least_loaded_with_room(s: Run, request: int) -> int:
    """Least loaded replica that has room for a request (the first of several); -1 if none has."""
    best = -1
    least = 0
    for r in range(s.n_replicas):
        load = load_of(s, r)
        if (best < 0 or load < least) and has_room(s, r, request):
            best = r
            least = load
    return best


def has_room(s: Run, r: int, request: int) -> bool:
    """Whether a replica has a free slot, KV cache, and prompt tokens left in its next iteration."""
    if not takes_requests(s, r):
        return False
    preempted = s.line_first[line_of(s, r, PREEMPTED)]
    if preempted >= 0 and not precedes(s, request, preempted):
        return False
    # Assigned or preempted requests of lower classes start after this one, so they take no room from it.
    slots = in_flight(s, r)
    promised_tokens = prefill_tokens(s, r)
    promised_blocks = 0
    other = s.line_first[line_of(s, r, ASSIGNED)]
    while other >= 0 and s.priority[other] <= s.priority[request]:
        slots += 1
        promised_tokens += uncached_tokens(s, r, other)
        promised_blocks += prompt_blocks(s, other)
        other = s.after[other]
    if slots >= s.batch_size:
        return False
    # Requests that the next iteration cannot take stay in the shared queue, for whichever replica is free first.
    if promised_tokens >= s.token_budget[s.model[r]] * max(1, s.prefill_replicas):
        return False
    if s.reserve:
        return s.reserved_blocks[r] + full_blocks(s, request) <= s.pool_blocks[r]
    return fits(s, r, request, promised_blocks)


def precedes(s: Run, request: int, preempted: int) -> bool:
    """Whether a request that has not run may start before a preempted one runs again."""
    return s.priority[request] < s.priority[preempted]


def prefill_tokens(s: Run, r: int) -> int:
    """Prompt tokens that remain for iterations after the current one, of replicas that share prefill GPUs."""
    tokens = 0
    for p in range(first_of(s, r), end_of_prefillers(s, r)):
        tokens -= s.chunk_sum[p]
    for other in range(first_of(s, r), end_of_fed(s, r)):
        request = s.line_first[line_of(s, other, PREFILLING)]
        while request >= 0:
            tokens += s.need[request] - s.done[request]
            request = s.after[request]
        request = s.line_first[line_of(s, other, ASSIGNED)] if other != r else -1
        while request >= 0:
            tokens += uncached_tokens(s, other, request)
            request = s.after[request]
    return tokens


def rouse(s: Run, r: int) -> None:
    """Wake a replica that is idle."""
    if not s.down[r] and (s.idle[r] or (s.disaggregated[r] and has_idle_prefiller(s, r))):
        schedule(s, 0.0, WAKE, 0, r)


def refuse_youngest(s: Run) -> None:
    """Refuse the youngest request of the lowest class among all that have not started."""
    chosen = -1
    queue = -1
    holder = -1
    for i in range(s.n_classes + 2 * s.n_replicas):
        r = (i - s.n_classes) // 2
        assigned = i >= s.n_classes and (i - s.n_classes) % 2 == 1
        line = i if i < s.n_classes else line_of(s, r, ASSIGNED if assigned else ROUTED)
        last = s.line_last[line]
        # Requests that a restart put back into the queue have started and are never refused; they are at the front.
        if last >= 0 and s.start_ms[last] != s.start_ms[last] and (chosen < 0 or is_behind(s, last, chosen)):
            chosen = last
            queue = line
            holder = r if assigned else -1
    if chosen < 0:
        return
    remove(s, queue, chosen)
    if holder < 0:
        s.waiting -= 1
    else:
        s.reserved_blocks[holder] -= full_blocks(s, chosen)
    refuse(s, chosen)


def refuse(s: Run, request: int) -> None:
    """Refuse a request."""
    s.rejected[request] = 1
    s.n_rejected += 1
    if s.session[request] >= 0:
        schedule(s, 0.0, TURN_REFUSED, s.session[request], 0)
    send_next(s)


def send_next(s: Run) -> None:
    """In a closed loop, let the client that was just answered send its next request."""
    if s.next_request < s.last_request:
        schedule(s, s.client_ms + unsent_ms(s), ARRIVAL, s.next_request, 0)
        s.next_request += 1


def give_back(s: Run, r: int) -> None:
    """Return requests of a replica that have not started to the shared queue."""
    own = line_of(s, r, ROUTED)
    s.waiting -= s.line_count[own]
    requeue(s, own)
    line = line_of(s, r, ASSIGNED)
    request = s.line_first[line]
    while request >= 0:
        s.reserved_blocks[r] -= full_blocks(s, request)
        request = s.after[request]
    requeue(s, line)


def requeue(s: Run, line: int) -> None:
    """Move all requests of a line, in order, to the front of their class in the shared queue."""
    while s.line_count[line] > 0:
        request = s.line_last[line]
        remove(s, line, request)
        insert_after(s, s.priority[request], -1, request)
        s.waiting += 1
