"""Lines of requests: the shared queue of each class, and the lines of each replica. A request is in at most one.

Lines are doubly linked through ``before`` and ``after``, so joining, leaving and taking the last take constant time.
"""

from __future__ import annotations

from inferencegym import plain_cython as cython

if not cython.compiled:  # compiled, these names are declared in loop.pxd
    from simulator.events.records import Run

ROUTED = 0
"""The replica's own queue: requests that a router sent to it and that it has no room for yet."""
ASSIGNED = 1
"""Requests that will start with the next iteration."""
PREEMPTED = 2
"""Requests that lost their KV cache and will be recomputed."""
PREFILLING = 3
"""Requests in prefill."""
TRANSIT = 4
"""Requests prefilled on another GPU, with their cache on the link."""
FLIGHT = 5
"""Requests taken off a restarting replica, until they are reassigned."""
LINES_OF_REPLICA = 6


def line_of(s: Run, r: int, kind: int) -> int:
    """Index of a line of a replica; the first ``n_classes`` lines are the shared queue."""
    return s.n_classes + LINES_OF_REPLICA * r + kind


def insert_after(s: Run, line: int, place: int, request: int) -> None:
    """Insert a request after ``place``; -1 inserts it at the front."""
    follower = s.line_first[line] if place < 0 else s.after[place]
    s.before[request] = place
    s.after[request] = follower
    if place < 0:
        s.line_first[line] = request
    else:
        s.after[place] = request
    if follower < 0:
        s.line_last[line] = request
    else:
        s.before[follower] = request
    s.line_count[line] += 1


def append(s: Run, line: int, request: int) -> None:
    """Append a request to a line."""
    insert_after(s, line, s.line_last[line], request)


def remove(s: Run, line: int, request: int) -> None:
    """Remove a request from its line."""
    before = s.before[request]
    after = s.after[request]
    if before < 0:
        s.line_first[line] = after
    else:
        s.after[before] = after
    if after < 0:
        s.line_last[line] = before
    else:
        s.before[after] = before
    s.line_count[line] -= 1


def insert_by_class(s: Run, line: int, request: int) -> None:
    """Insert a request after all requests of its own and of higher classes."""
    place = s.line_last[line]
    while place >= 0 and s.priority[place] > s.priority[request]:
        place = s.before[place]
    insert_after(s, line, place, request)


def insert_before_class(s: Run, line: int, request: int) -> None:
    """Insert a request before all requests of its own and of lower classes."""
    place = s.line_last[line]
    while place >= 0 and s.priority[place] >= s.priority[request]:
        place = s.before[place]
    insert_after(s, line, place, request)


def insert_by_arrival(s: Run, line: int, request: int) -> None:
    """Insert a request by class, and within its class by arrival."""
    place = s.line_last[line]
    while place >= 0 and is_behind(s, place, request):
        place = s.before[place]
    insert_after(s, line, place, request)


def is_behind(s: Run, one: int, other: int) -> bool:
    """Whether ``one`` has a lower class than ``other``, or the same class and arrived later."""
    if s.priority[one] != s.priority[other]:
        return s.priority[one] > s.priority[other]
    return s.arrival_ms[one] > s.arrival_ms[other]
