"""Agent sessions: consecutive turns, a cap on sessions in flight, and a prefix cache of their contexts.

A session is a series of turns: a prompt with the whole conversation so far, an answer, and the time that a tool takes.
Its turns are consecutive requests. A session in flight may send its next turn; one that is not in flight is paused.
When the cap falls, sessions between turns are paused, the latest started first; paused sessions resume, the oldest
first, before new ones start.

The cache works like vLLM's: it holds whole blocks and evicts free blocks in the order in which they were freed, a
request's last blocks first. A request that leaves its replica, answered or preempted, frees all of its blocks at once,
so the eviction order is a list of sessions, with each session's last blocks first. Empty blocks are taken before all
others. Sessions are served by a single replica.
"""

from __future__ import annotations

from inferencegym import plain_cython as cython

if not cython.compiled:  # compiled, these names are declared in loop.pxd
    from simulator.events.blocks import ahead_tokens, decode_blocks, most_decode_blocks, prefill_blocks
    from simulator.events.dispatch import arrive
    from simulator.events.heap import TOOL_END, schedule
    from simulator.events.records import Run

IN_ENGINE = 1
"""The engine is processing its turn."""
TOOL = 2
"""Its tool is running."""
READY = 3
"""Its next turn is ready to be sent; a paused session waits."""
OVER = 4
"""Finished, or refused because a turn does not fit into the pool."""


# The cap -----------------------------------------------------------------------------------------------------------


def arrive_session(s: Run, g: int) -> None:
    """Take in a session that has arrived."""
    s.arrived[g] = 1
    s.n_arrived += 1
    if s.gated[g]:
        admit_sessions(s)
    else:
        start_session(s, g)


def apply_cap(s: Run) -> None:
    """Pause sessions beyond the cap, or let more in."""
    while s.in_flight > s.max_sessions:
        g = youngest_between_turns(s)
        if g < 0:
            return  # all are in the engine: the first one to be answered is paused
        s.flying[g] = 0
        s.in_flight -= 1
        s.n_paused += 1
    admit_sessions(s)


def youngest_between_turns(s: Run) -> int:
    """The session that started last, of those in flight between two turns; -1 if no session is."""
    best = -1
    for g in range(s.n_sessions):
        if s.flying[g] and s.gated[g] and s.phase[g] != IN_ENGINE and (best < 0 or s.started[g] > s.started[best]):
            best = g
    return best


def admit_sessions(s: Run) -> None:
    """Admit sessions up to the cap: paused ones first, the oldest first, then new ones in order of arrival."""
    while s.in_flight < s.max_sessions:
        g = oldest_paused(s) if s.n_paused > 0 else -1
        if g >= 0:
            s.n_paused -= 1
            fly(s, g)
            continue
        while s.next_session < s.n_sessions and (s.started[s.next_session] > 0 or s.gated[s.next_session] == 0):
            s.next_session += 1
        if s.next_session == s.n_sessions or s.arrived[s.next_session] == 0:
            return
        start_session(s, s.next_session)


def oldest_paused(s: Run) -> int:
    """Paused session that started first."""
    best = -1
    for g in range(s.n_sessions):
        paused = s.started[g] > 0 and s.flying[g] == 0 and s.phase[g] != OVER
        if paused and (best < 0 or s.started[g] < s.started[best]):
            best = g
    return best


def start_session(s: Run, g: int) -> None:
    """Send the first turn of a session."""
    s.n_begun += 1
    s.started[g] = s.n_begun
    s.phase[g] = READY
    fly(s, g)


def fly(s: Run, g: int) -> None:
    """Put a session in flight; if its next turn is ready, send it."""
    s.flying[g] = 1
    s.in_flight += s.gated[g]
    if s.phase[g] == READY:
        send_turn(s, g)


def send_turn(s: Run, g: int) -> None:
    """Send a session's turn to the engine."""
    s.phase[g] = IN_ENGINE
    s.context[g] = s.prompt[s.turn[g]]
    arrive(s, s.turn[g])


def end_tool(s: Run, g: int) -> None:
    """Note that a session's tool has ended; the wait for its next turn counts from now."""
    s.wanted_ms[s.turn[g]] = s.now_ms
    s.phase[g] = READY
    if s.flying[g]:
        send_turn(s, g)


def end_turn(s: Run, request: int) -> None:
    """Record that a turn is answered."""
    g = s.session[request]
    free_context(s, g, s.goal[request] - 1)  # the last token's KV entries are computed only with the next turn
    s.context[g] = s.goal[request]
    s.turn[g] += 1
    s.n_turns += 1
    if s.gated[g]:
        s.batch_tokens += s.goal[request] - s.prompt[request]
    else:
        s.n_judged += 1
        s.n_within += s.first_ms[request] + s.client_ms - s.wanted_ms[request] <= s.objective_ms
    if s.turn[g] == s.turns_end[g]:
        s.n_over += 1
        end_session(s, g)
        return
    s.phase[g] = TOOL
    schedule(s, s.tool_ms[request], TOOL_END, g, 0)
    if s.in_flight > s.max_sessions:
        apply_cap(s)


def end_session(s: Run, g: int) -> None:
    """End a session; the next one may start."""
    s.phase[g] = OVER
    s.flying[g] = 0
    s.in_flight -= s.gated[g]
    if s.gated[g]:
        admit_sessions(s)


def refuse_session(s: Run, g: int) -> None:
    """End a session of which a turn was refused."""
    s.n_refused_sessions += 1
    end_session(s, g)


def note_sessions(s: Run) -> None:
    """Update the contexts of sessions in flight, and the turns that are late now."""
    s.context_sum = 0
    s.context_max = 0
    s.n_overdue = 0
    s.free_flying = 0
    for g in range(s.n_sessions):
        if s.flying[g]:
            s.context_sum += s.context[g]
            s.context_max = max(s.context_max, s.context[g])
            if s.gated[g] == 0:
                s.free_flying += 1
                s.n_overdue += is_late(s, g)


def is_late(s: Run, g: int) -> bool:
    """Whether a session has waited for the first token of its turn longer than its objective."""
    request = s.turn[g]
    unanswered = s.phase[g] == IN_ENGINE and s.first_ms[request] != s.first_ms[request]
    return unanswered and s.now_ms - s.wanted_ms[request] > s.objective_ms


# Prefix cache ------------------------------------------------------------------------------------------------------


def free_context(s: Run, g: int, tokens: int) -> None:
    """Free the blocks of a context with ``tokens`` computed tokens; whole blocks stay cached until they are taken."""
    s.free_blocks[g] = max(0, tokens) // s.block_tokens
    s.listed_blocks += s.free_blocks[g]
    s.freed_before[g] = s.last_freed
    s.freed_after[g] = -1
    if s.last_freed < 0:
        s.first_freed = g
    else:
        s.freed_after[s.last_freed] = g
    s.last_freed = g
    s.is_freed[g] = 1


def reuse_context(s: Run, request: int) -> None:
    """Let a request hold its session's cached blocks, of which it reuses ``done`` tokens."""
    if s.preemptions[request] == 0:  # vLLM counts a request's look-up once
        s.queried_tokens += s.need[request] + s.shared_tokens
        s.hit_tokens += s.done[request] + s.shared_tokens
    forget_context(s, s.session[request])


def forget_context(s: Run, g: int) -> None:
    """Remove a session from the list of cached contexts."""
    if s.is_freed[g] == 0:
        return
    before = s.freed_before[g]
    after = s.freed_after[g]
    if before < 0:
        s.first_freed = after
    else:
        s.freed_after[before] = after
    if after < 0:
        s.last_freed = before
    else:
        s.freed_before[after] = before
    s.listed_blocks -= s.free_blocks[g]
    s.free_blocks[g] = 0
    s.is_freed[g] = 0


def take_free_blocks(s: Run, r: int) -> None:
    """Evict cached contexts whose blocks running requests need."""
    growth = ahead_tokens(s)
    prompts = prefill_blocks(s, r)
    if s.listed_blocks + prompts + most_decode_blocks(s, r, growth) <= s.pool_blocks[r]:
        return
    free = max(0, s.pool_blocks[r] - prompts - decode_blocks(s, r, growth))
    while s.listed_blocks > free:
        g = s.first_freed
        taken = min(s.free_blocks[g], s.listed_blocks - free)
        s.free_blocks[g] -= taken
        s.listed_blocks -= taken
        if s.free_blocks[g] == 0:
            forget_context(s, g)
