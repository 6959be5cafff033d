"""Changes of the fleet: add and remove replicas, and restart them one by one with another configuration."""

from __future__ import annotations

from inferencegym import plain_cython as cython

if not cython.compiled:  # compiled, these names are declared in loop.pxd
    from simulator.events.blocks import full_blocks, load_of
    from simulator.events.dispatch import dispatch, give_back, requeue, rouse
    from simulator.events.heap import LOADED, RESTARTED, schedule
    from simulator.events.lines import (
        FLIGHT,
        PREEMPTED,
        PREFILLING,
        TRANSIT,
        insert_by_arrival,
        insert_by_class,
        line_of,
        remove,
    )
    from simulator.events.records import Run

JOIN_TOLERANCE_MS = 1e-6
"""A replica may join this much early, because its time is a sum of rounded numbers."""


def add_replica(s: Run) -> int:
    """Add a replica with the fleet's configuration, in service; returns its number."""
    r = s.n_replicas
    s.n_replicas += 1
    s.n_there += 1
    s.n_up += 1
    configure(s, r)
    return r


def set_down(s: Run, r: int, down: int) -> None:
    """Take a replica out of service (1) or put it into service (0)."""
    s.n_up += s.down[r] - down
    s.down[r] = down


def configure(s: Run, r: int) -> None:
    """Give a replica the fleet's configuration."""
    s.model[r] = s.fleet_model
    s.n_prefill_gpus += s.fleet_disaggregated - s.disaggregated[r]
    s.disaggregated[r] = s.fleet_disaggregated
    s.pool_blocks[r] = s.fleet_pool_blocks


def is_current(s: Run, r: int) -> bool:
    """Whether a replica needs no restart."""
    return s.model[r] == s.fleet_model and s.disaggregated[r] == s.fleet_disaggregated


def is_loading(s: Run, r: int) -> bool:
    """Whether a replica is new and not yet up."""
    return s.loading_since_ms[r] >= 0.0


def scale(s: Run, replicas: int) -> None:
    """Request new replicas, or remove some."""
    there = 0
    for r in range(s.n_replicas):
        if is_loading(s, r):  # another precision takes another time to load
            schedule_join(s, r)
        if not (s.leaving[r] or s.gone[r]):
            there += 1
    while there < replicas:
        r = add_replica(s)
        set_down(s, r, 1)
        s.loading_since_ms[r] = s.now_ms
        schedule_join(s, r)
        there += 1
    while there > replicas:
        remove_replica(s, first_to_go(s))
        there -= 1


def first_to_go(s: Run) -> int:
    """The replica that is removed first."""
    best = -1
    for r in range(s.n_replicas):
        if not (s.leaving[r] or s.gone[r]) and (best < 0 or goes_before(s, r, best)):
            best = r
    return best


def goes_before(s: Run, one: int, other: int) -> bool:
    """Order of removal: loading replicas (youngest first), outdated ones, those in service, then the least loaded."""
    if is_loading(s, one) != is_loading(s, other):
        return is_loading(s, one)
    if is_loading(s, one) and s.loading_since_ms[one] != s.loading_since_ms[other]:
        return s.loading_since_ms[one] > s.loading_since_ms[other]
    if is_current(s, one) != is_current(s, other):
        return is_current(s, other)
    if s.down[one] != s.down[other]:
        return s.down[other] > 0
    return load_of(s, one) < load_of(s, other)


def remove_replica(s: Run, r: int) -> None:
    """Send a replica no more requests, and let it leave once it is empty."""
    give_back(s, r)
    s.leaving[r] = 1
    if load_of(s, r) == 0:
        leave(s, r)


def leave(s: Run, r: int) -> None:
    """Take an empty replica out of the fleet."""
    s.gone[r] = 1
    s.n_there -= 1
    s.n_prefill_gpus -= s.disaggregated[r]
    set_down(s, r, 1)
    s.loading_since_ms[r] = -1.0
    s.starts[r] += 1
    clear(s, r)


def schedule_join(s: Run, r: int) -> None:
    """Schedule when a loading replica enters service."""
    due_ms = s.loading_since_ms[r] + s.load_ms
    schedule(s, max(0.0, due_ms - s.now_ms), LOADED, 0, r)


def join_if_loaded(s: Run, r: int) -> None:
    """Put a new replica into service with the current configuration, if its weights have loaded."""
    if not is_loading(s, r) or s.now_ms < s.loading_since_ms[r] + s.load_ms - JOIN_TOLERANCE_MS:
        return
    s.loading_since_ms[r] = -1.0
    configure(s, r)
    set_down(s, r, 0)
    dispatch(s)
    rouse(s, r)


def roll_out(s: Run) -> None:
    """Restart the next replica with an outdated precision or prefill placement, if none is restarting."""
    outdated = -1
    for r in range(s.n_replicas - 1, -1, -1):
        if is_in_service(s, r):
            if s.down[r]:
                return
            if not is_current(s, r):
                outdated = r
    for r in range(s.n_replicas):
        if is_in_service(s, r):
            s.draining[r] = 0
    if outdated < 0:
        return
    give_back(s, outdated)
    if s.drain and load_of(s, outdated) > 0:
        s.draining[outdated] = 1
    else:
        restart(s, outdated)


def is_in_service(s: Run, r: int) -> bool:
    """Whether a replica is meant to stay; it may be restarting."""
    return not (is_loading(s, r) or s.leaving[r] or s.gone[r])


def restart(s: Run, r: int) -> None:
    """Stop a replica that has no assigned requests; its requests in flight go to the others."""
    flight = line_of(s, r, FLIGHT)
    for i in range(s.n[r]):
        if i < s.n_decoded[r]:
            s.output_ms[s.seq_request[r, i]] = s.decoded_ms[r]
        s.length[s.seq_request[r, i]] = s.seq_tokens[r, i]
        insert_by_arrival(s, flight, s.seq_request[r, i])
    take_off(s, line_of(s, r, TRANSIT), flight)
    take_off(s, line_of(s, r, PREFILLING), flight)
    take_off(s, line_of(s, r, PREEMPTED), flight)
    clear(s, r)
    s.starts[r] += 1
    configure(s, r)
    set_down(s, r, 1)
    if least_loaded_up(s) < 0:
        requeue(s, flight)
    while s.line_count[flight] > 0:
        request = s.line_first[flight]
        remove(s, flight, request)
        put_back(s, least_loaded_up(s), request)
    for other in range(s.n_replicas):
        if not (s.down[other] or s.leaving[other]):
            rouse(s, other)
    schedule(s, s.restart_ms, RESTARTED, 0, r)


def take_off(s: Run, line: int, flight: int) -> None:
    """Move the requests of a line to the line ``flight``."""
    while s.line_count[line] > 0:
        request = s.line_first[line]
        remove(s, line, request)
        insert_by_arrival(s, flight, request)


def least_loaded_up(s: Run) -> int:
    """Least loaded replica that takes requests (the first of several), or -1."""
    best = -1
    for r in range(s.n_replicas):
        if not (s.down[r] or s.leaving[r]) and (best < 0 or load_of(s, r) < load_of(s, best)):
            best = r
    return best


def put_back(s: Run, r: int, request: int) -> None:
    """Give a replica a request to recompute that another one had in flight."""
    s.replica[request] = r
    insert_by_class(s, line_of(s, r, PREEMPTED), request)
    s.reserved_blocks[r] += full_blocks(s, request)


def come_up(s: Run, r: int) -> None:
    """Put a restarted replica back into service."""
    set_down(s, r, 0)
    roll_out(s)
    dispatch(s)
    rouse(s, r)


def clear(s: Run, r: int) -> None:
    """Reset a replica's state as after a start; its lines must be empty."""
    s.n[r] = 0
    s.n_decoded[r] = 0
    s.token_sum[r] = 0
    s.steps_to_finish[r] = 0
    s.reserved_blocks[r] = 0
    s.transit_blocks[r] = 0
    s.transit_tokens[r] = 0
    s.unsent_first[r] = -1
    s.n_chunks[r] = 0
    s.chunk_sum[r] = 0
    s.decoding[r] = 0
    s.idle[r] = 1
    s.prefill_idle[r] = 1
