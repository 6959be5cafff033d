"""Future events: a binary heap in arrays, ordered by time, then kind, then order of scheduling."""

from __future__ import annotations

from inferencegym import plain_cython as cython

if not cython.compiled:  # compiled, these names are declared in loop.pxd
    from simulator.events.records import Run

# Kinds of events, in the order in which simultaneous ones happen.
ARRIVAL = 0
HANDED_OVER = 1
ITERATION_END = 2
PREFILL_END = 3
WAKE = 4
RESTARTED = 5
LOADED = 6
SESSION_ARRIVAL = 7
TOOL_END = 8
TURN_REFUSED = 9
READ = 10
KIND_BITS = 48
"""Low bits of an event's order, which hold its sequence number; the kind is above them."""


def schedule(s: Run, delay_ms: float, kind: int, request: int, r: int) -> None:
    """Schedule an event of a replica after ``delay_ms``."""
    push(s, s.now_ms + delay_ms, kind, request, r)


def push(s: Run, at_ms: float, kind: int, request: int, r: int) -> None:
    """Schedule an event at ``at_ms``."""
    insert(s, at_ms, (kind << KIND_BITS) + s.sequence, request, r)
    s.sequence += 1


def push_arrival(s: Run, request: int) -> None:
    """Schedule the arrival of a submitted request when it is due; simultaneous ones come in the order of requests."""
    insert(s, s.due_ms[request], request, request, 0)


def insert(s: Run, at_ms: float, order: int, request: int, r: int) -> None:
    """Put an event into the heap."""
    if s.n_events == s.event_ms.shape[0]:
        with cython.gil:
            s.owner.add_events()
    i = s.n_events
    s.n_events += 1
    while i > 0:
        parent = (i - 1) >> 1
        if not is_earlier(s, at_ms, order, parent):
            break
        move(s, parent, i)
        i = parent
    s.event_ms[i] = at_ms
    s.event_order[i] = order
    s.event_request[i] = request
    s.event_replica[i] = r
    s.event_starts[i] = s.starts[r]


def drop_first(s: Run) -> None:
    """Remove the earliest event."""
    s.n_events -= 1
    last = s.n_events
    i = 0
    while 2 * i + 1 < last:
        child = 2 * i + 1
        if child + 1 < last and is_earlier(s, s.event_ms[child + 1], s.event_order[child + 1], child):
            child += 1
        if not is_earlier(s, s.event_ms[child], s.event_order[child], last):
            break
        move(s, child, i)
        i = child
    move(s, last, i)


def is_earlier(s: Run, at_ms: float, order: int, i: int) -> bool:
    """Whether an event comes before the one at position ``i``."""
    return at_ms < s.event_ms[i] or (at_ms == s.event_ms[i] and order < s.event_order[i])


def move(s: Run, source: int, target: int) -> None:
    """Copy an event to another position."""
    s.event_ms[target] = s.event_ms[source]
    s.event_order[target] = s.event_order[source]
    s.event_request[target] = s.event_request[source]
    s.event_replica[target] = s.event_replica[source]
    s.event_starts[target] = s.event_starts[source]
