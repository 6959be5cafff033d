"""Event loop of the discrete-event engine: plain Python that the build compiles to C, with the modules it imports."""

from __future__ import annotations

from inferencegym import plain_cython as cython

if not cython.compiled:  # compiled, these names are declared in loop.pxd
    from simulator.events.blocks import cached_tokens, decode_blocks, in_flight, prefill_blocks
    from simulator.events.dispatch import arrive, dispatch, end_reading, rouse
    from simulator.events.heap import (
        ARRIVAL,
        HANDED_OVER,
        ITERATION_END,
        KIND_BITS,
        PREFILL_END,
        READ,
        RESTARTED,
        SESSION_ARRIVAL,
        TOOL_END,
        TURN_REFUSED,
        WAKE,
        drop_first,
        push,
        push_arrival,
    )
    from simulator.events.iteration import end_iteration, end_prefill, hand_over, wake
    from simulator.events.records import Run
    from simulator.events.rollout import add_replica, come_up, join_if_loaded, roll_out, scale
    from simulator.events.sessions import apply_cap, arrive_session, end_tool, note_sessions, refuse_session


class Loop:
    """Event loop, which changes the arrays of a run in place."""

    run: Run

    def __init__(self, run: Run) -> None:
        self.run = run

    def begin(self, replicas: int) -> None:
        """Begin with this many replicas, in service and empty."""
        with cython.nogil:
            for _ in range(replicas):
                add_replica(self.run)

    def submit(self, first: int, n: int) -> None:
        """Schedule the arrivals of ``n`` requests, which ``after`` links in order of time; ``first`` is the first.

        The heap holds one of them at a time, so that it stays small.
        """
        with cython.nogil:
            self.run.sequence += n
            push_arrival(self.run, first)

    def advance(self, end_ms: float) -> None:
        """Process the events before ``end_ms``."""
        with cython.nogil:
            while self.run.n_events > 0 and self.run.event_ms[0] < end_ms:
                process_next(self.run)

    def pass_time(self, until_ms: float) -> None:
        """Advance the clock without an event."""
        with cython.nogil:
            count_gpus(self.run, until_ms)

    def reconfigure(self, replicas: int) -> None:
        """From now on, serve with the configuration in the run's numbers and this many replicas."""
        with cython.nogil:
            scale(self.run, replicas)
            roll_out(self.run)
            dispatch(self.run)
            for r in range(self.run.n_replicas):
                rouse(self.run, r)

    def begin_sessions(self) -> None:
        """Schedule the arrivals of the sessions; those beyond the cap wait."""
        with cython.nogil:
            self.run.first_freed = -1
            self.run.last_freed = -1
            for g in range(self.run.n_sessions):
                push(self.run, self.run.due_ms[self.run.turn[g]], SESSION_ARRIVAL, g, 0)

    def play(self, max_sessions: int, end_ms: float) -> None:
        """Process events under this cap until ``end_ms`` or until all sessions are over."""
        s = self.run
        with cython.nogil:
            s.max_sessions = max_sessions
            apply_cap(s)
            while s.n_events > 0 and s.event_ms[0] < end_ms and s.n_over + s.n_refused_sessions < s.n_sessions:
                process_next(s)
            if s.n_over + s.n_refused_sessions < s.n_sessions:
                count_gpus(s, end_ms)
            note_sessions(s)

    def cached_tokens(self, r: int) -> int:
        """Tokens in the cache of a replica."""
        return cached_tokens(self.run, r)

    def running(self) -> int:
        """Requests that hold a slot of any replica."""
        n = 0
        for r in range(self.run.n_replicas):
            n += in_flight(self.run, r)
        return n

    def decoding(self) -> tuple[float, float]:
        """Decoding requests of a replica and their context (tokens), means over the replicas that have any."""
        s = self.run
        n = 0
        busy = 0
        tokens = 0
        for r in range(s.n_replicas):
            n += s.n[r]
            busy += s.n[r] > 0
            tokens += s.token_sum[r]
        return 1.0 * n / max(1, busy), 1.0 * tokens / max(1, n)

    def held_blocks(self, r: int) -> int:
        """Blocks in use on a replica."""
        return decode_blocks(self.run, r, 0) + prefill_blocks(self.run, r)


def process_next(s: Run) -> None:
    """Process the earliest event."""
    kind = s.event_order[0] >> KIND_BITS
    request = s.event_request[0]
    r = s.event_replica[0]
    starts = s.event_starts[0]
    count_gpus(s, s.event_ms[0])
    drop_first(s)
    if kind == ARRIVAL:
        if s.after[request] >= 0:
            push_arrival(s, s.after[request])
        arrive(s, request)
    elif kind == READ:
        end_reading(s)
    elif starts != s.starts[r]:
        return
    elif kind == ITERATION_END:
        end_iteration(s, r)
    elif kind == PREFILL_END:
        end_prefill(s, r)
    elif kind == HANDED_OVER:
        hand_over(s, r, request)
    elif kind == RESTARTED:
        come_up(s, r)
    elif kind == WAKE:
        wake(s, r)
    elif kind == SESSION_ARRIVAL:
        arrive_session(s, request)
    elif kind == TOOL_END:
        end_tool(s, request)
    elif kind == TURN_REFUSED:
        refuse_session(s, request)
    else:
        join_if_loaded(s, r)


def count_gpus(s: Run, until_ms: float) -> None:
    """Advance the clock and count the GPU time of every replica and prefill GPU that is present."""
    prefill_gpus = s.prefill_replicas if s.prefill_replicas > 0 else s.n_prefill_gpus
    s.prefill_gpu_ms += (until_ms - s.now_ms) * prefill_gpus
    s.replica_ms += (until_ms - s.now_ms) * s.n_there
    s.now_ms = until_ms
