"""Routers: the replica in whose own queue an arriving request waits, where replicas do not share one queue."""

from __future__ import annotations

from inferencegym import plain_cython as cython

if not cython.compiled:  # compiled, these names are declared in loop.pxd
    from simulator.events.blocks import load_of, reusable_tokens
    from simulator.events.lines import ROUTED, insert_by_arrival, line_of, remove
    from simulator.events.records import Run

# Indices of inferencegym.models.ROUTERS.
SHARED = 0
ROUND_ROBIN = 1
RANDOM = 2
PREFIX_AFFINITY = 4
# Thresholds of SGLang's router: https://github.com/lightseekorg/smg/blob/main/docs/getting-started/load-balancing.md
OVERLOAD_REQUESTS = 64
OVERLOAD_RATIO = 1.5


def route(s: Run) -> None:
    """Move the shared queue into the replicas' own queues; it keeps its requests while no replica is in service."""
    for queue in range(s.n_classes):
        while s.line_count[queue] > 0:
            request = s.line_first[queue]
            r = chosen_replica(s, request)
            if r < 0:
                return
            remove(s, queue, request)
            insert_by_arrival(s, line_of(s, r, ROUTED), request)
            s.replica[request] = r


def chosen_replica(s: Run, request: int) -> int:
    """Replica to which the router sends a request; -1 if none is in service."""
    if s.router == ROUND_ROBIN:
        return next_in_turn(s)
    if s.router == RANDOM:
        return drawn_replica(s, request)
    least = least_outstanding(s)
    if s.router == PREFIX_AFFINITY and least >= 0 and s.follows[request] >= 0:
        r = s.replica[s.follows[request]]
        if r >= 0 and takes_requests(s, r) and not is_overloaded(s, r, least):
            return r
    return least


def next_in_turn(s: Run) -> int:
    """Next replica in service, or -1."""
    for _ in range(s.n_replicas):
        r = s.next_replica % s.n_replicas
        s.next_replica = r + 1
        if takes_requests(s, r):
            return r
    return -1


def drawn_replica(s: Run, request: int) -> int:
    """Replica in service that the request's lot falls on, or -1."""
    left = cython.cast(cython.Py_ssize_t, s.lot[request] * n_in_service(s))
    for r in range(s.n_replicas):
        if takes_requests(s, r):
            if left == 0:
                return r
            left -= 1
    return -1


def n_in_service(s: Run) -> int:
    """Replicas that take requests."""
    n = 0
    for r in range(s.n_replicas):
        if takes_requests(s, r):
            n += 1
    return n


def least_outstanding(s: Run) -> int:
    """Replica in service with the fewest unanswered requests (the first of several), or -1."""
    best = -1
    for r in range(s.n_replicas):
        if takes_requests(s, r) and (best < 0 or outstanding(s, r) < outstanding(s, best)):
            best = r
    return best


def outstanding(s: Run, r: int) -> int:
    """Unanswered requests of a replica, its own queue included."""
    return load_of(s, r) + s.line_count[line_of(s, r, ROUTED)]


def is_overloaded(s: Run, r: int, least: int) -> bool:
    """Whether a replica has so many more requests than the least loaded that a prefix is not worth the wait."""
    lead = outstanding(s, r) - outstanding(s, least)
    return lead > OVERLOAD_REQUESTS and outstanding(s, r) > OVERLOAD_RATIO * outstanding(s, least)


def takes_requests(s: Run, r: int) -> bool:
    """Whether a replica is in service and will stay."""
    return not (s.down[r] or s.draining[r] or s.leaving[r])


def repeated_tokens(s: Run, r: int, request: int) -> int:
    """Leading tokens of a prompt that the replica has computed before: all that repeat, if replicas share a queue."""
    tokens = s.reused[request]
    if s.router == SHARED:
        return tokens
    # Each earlier request shares less. The first has in common only what many do, which every replica holds.
    other = s.follows[request]
    while other >= 0 and s.replica[other] != r:
        tokens = min(tokens, s.reused[other])
        other = s.follows[other]
    return tokens


def uncached_tokens(s: Run, r: int, request: int) -> int:
    """Tokens that the replica computes if it starts a request now: vLLM's token budget counts no others."""
    return s.length[request] - found_tokens(s, r, request)


def found_tokens(s: Run, r: int, request: int) -> int:
    """Tokens of a prompt that the replica finds in its cache; at least one is computed."""
    if s.session[request] >= 0:
        return reusable_tokens(s, request)
    if s.start_ms[request] == s.start_ms[request]:
        return 0  # recomputed after a preemption or a restart
    hit = cython.cast(cython.Py_ssize_t, s.prefix_hit * repeated_tokens(s, r, request))
    return min(hit, s.length[request] - 1)
