"""The shared queue: arrivals, assignment of requests to replicas, and refusals by a full queue."""

from __future__ import annotations

from inferencegym import plain_cython as cython

if not cython.compiled:  # compiled, these names are declared in loop.pxd
    from simulator.events.blocks import fits, full_blocks, in_flight, load_of, prompt_blocks
    from simulator.events.heap import ARRIVAL, TURN_REFUSED, WAKE, schedule
    from simulator.events.lines import (
        ASSIGNED,
        PREEMPTED,
        PREFILLING,
        append,
        insert_after,
        insert_by_class,
        is_behind,
        line_of,
        remove,
    )
    from simulator.events.records import Run


def arrive(s: Run, request: int) -> None:
    """Queue an arriving request, or refuse it."""
    s.arrival_ms[request] = s.now_ms
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
    """Requests that wait in the shared queue or are to start next."""
    n = s.waiting
    for r in range(s.n_replicas):
        n += s.line_count[line_of(s, r, ASSIGNED)]
    return n


def dispatch(s: Run) -> None:
    """Assign waiting requests to replicas that have room for them, least loaded first."""
    while s.waiting > 0:
        queue = 0
        while s.line_count[queue] == 0:
            queue += 1
        request = s.line_first[queue]
        r = least_loaded_with_room(s, request)
        if r < 0:
            return
        remove(s, queue, request)
        s.waiting -= 1
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
    if s.down[r] or s.draining[r] or s.leaving[r]:
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
        promised_tokens += s.length[other]
        promised_blocks += prompt_blocks(s, other)
        other = s.after[other]
    if slots >= s.batch_size:
        return False
    # Requests that the next iteration cannot take stay in the shared queue, for whichever replica is free first.
    if promised_tokens >= s.token_budget[s.model[r]]:
        return False
    if s.reserve:
        return s.reserved_blocks[r] + full_blocks(s, request) <= s.pool_blocks[r]
    return fits(s, r, request, promised_blocks)


def precedes(s: Run, request: int, preempted: int) -> bool:
    """Whether a request that has not run may start before a preempted one runs again."""
    return s.priority[request] < s.priority[preempted]


def prefill_tokens(s: Run, r: int) -> int:
    """Prompt tokens in prefill that remain for iterations after the current one."""
    tokens = -s.chunk_sum[r]
    request = s.line_first[line_of(s, r, PREFILLING)]
    while request >= 0:
        tokens += s.need[request] - s.done[request]
        request = s.after[request]
    return tokens


def rouse(s: Run, r: int) -> None:
    """Wake a replica that is idle."""
    if not s.down[r] and (s.idle[r] or (s.disaggregated[r] and s.prefill_idle[r])):
        schedule(s, 0.0, WAKE, 0, r)


def refuse_youngest(s: Run) -> None:
    """Refuse the youngest request of the lowest class among all that have not started."""
    chosen = -1
    holder = -1
    for i in range(s.n_classes + s.n_replicas):
        r = i - s.n_classes
        line = i if r < 0 else line_of(s, r, ASSIGNED)
        last = s.line_last[line]
        # Requests that a restart put back into the queue have started and are never refused; they are at the front.
        if last >= 0 and s.start_ms[last] != s.start_ms[last] and (chosen < 0 or is_behind(s, last, chosen)):
            chosen = last
            holder = r
    if chosen < 0:
        return
    if holder < 0:
        remove(s, s.priority[chosen], chosen)
        s.waiting -= 1
    else:
        remove(s, line_of(s, holder, ASSIGNED), chosen)
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
        schedule(s, s.client_ms, ARRIVAL, s.next_request, 0)
        s.next_request += 1


def give_back(s: Run, r: int) -> None:
    """Return requests that are assigned to a replica but have not started to the shared queue."""
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
