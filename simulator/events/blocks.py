"""KV cache of a replica in blocks: blocks that requests hold, need and may take."""

from __future__ import annotations

from inferencegym import plain_cython as cython

if not cython.compiled:  # compiled, these names are declared in loop.pxd
    from simulator.events.lines import ASSIGNED, PREEMPTED, PREFILLING, TRANSIT, line_of
    from simulator.events.records import Run


def blocks(s: Run, tokens: int) -> int:
    """Number of blocks that hold ``tokens`` tokens of one sequence."""
    return (tokens + s.block_tokens - 1) // s.block_tokens


def full_blocks(s: Run, request: int) -> int:
    """Blocks of a request at its full length."""
    return blocks(s, s.goal[request] + s.draft_tokens + 1)


def prompt_blocks(s: Run, request: int) -> int:
    """Blocks that a request needs to start or to be recomputed."""
    return blocks(s, s.length[request] + s.spare_tokens)


def prefill_blocks(s: Run, r: int) -> int:
    """Blocks held by prompts in prefill or on the link."""
    held = s.transit_blocks[r]
    request = s.line_first[line_of(s, r, PREFILLING)]
    while request >= 0:
        held += s.held_blocks[request]
        request = s.after[request]
    return held


def first_of(s: Run, i: int) -> int:
    """First prefill GPU of a replica, or first replica of a prefill GPU: its own, unless all share them."""
    return 0 if s.prefill_replicas > 0 else i


def end_of_prefillers(s: Run, r: int) -> int:
    """Index after the last prefill GPU of a replica."""
    return s.prefill_replicas if s.prefill_replicas > 0 else r + 1


def end_of_fed(s: Run, p: int) -> int:
    """Index after the last replica of a prefill GPU."""
    return s.n_replicas if s.prefill_replicas > 0 else p + 1


def has_idle_prefiller(s: Run, r: int) -> bool:
    """Whether a prefill GPU of a replica runs no iteration."""
    n = 0
    for p in range(first_of(s, r), end_of_prefillers(s, r)):
        n += s.prefill_idle[p]
    return n > 0


def decode_blocks(s: Run, r: int, growth: int) -> int:
    """Blocks that the decoding sequences need if each grows by ``growth`` tokens."""
    held = 0
    more = growth + s.block_tokens - 1
    if s.block_shift >= 0:  # a division takes most of the time of a fleet whose pools are full
        for i in range(s.n[r]):
            held += (s.seq_tokens[r, i] + more) >> s.block_shift
        return held
    for i in range(s.n[r]):
        held += (s.seq_tokens[r, i] + more) // s.block_tokens
    return held


def most_decode_blocks(s: Run, r: int, growth: int) -> int:
    """Upper bound of :func:`decode_blocks`; it saves the exact count while the cache is far from full."""
    return (s.token_sum[r] + s.n[r] * (growth + s.block_tokens)) // s.block_tokens + 1


def ahead_tokens(s: Run) -> int:
    """Cache (tokens) that a sequence needs beyond its current tokens."""
    return s.draft_tokens + s.spare_tokens


def is_over_full(s: Run, r: int) -> bool:
    """Whether the sequences of a replica lack blocks for their next tokens."""
    if most_decode_blocks(s, r, ahead_tokens(s)) + prefill_blocks(s, r) <= s.pool_blocks[r]:
        return False
    return decode_blocks(s, r, ahead_tokens(s)) + prefill_blocks(s, r) > s.pool_blocks[r]


def fits(s: Run, r: int, request: int, promised_blocks: int) -> bool:
    """Whether the cache has blocks for this prompt in addition to resident and promised ones."""
    need = prompt_blocks(s, request) + prefill_blocks(s, r) + promised_blocks
    if need + most_decode_blocks(s, r, ahead_tokens(s)) <= s.pool_blocks[r]:
        return True
    return need + decode_blocks(s, r, ahead_tokens(s)) <= s.pool_blocks[r]


def cached_tokens(s: Run, r: int) -> int:
    """Tokens in the cache of a replica."""
    tokens = s.token_sum[r] + s.transit_tokens[r]
    request = s.line_first[line_of(s, r, PREFILLING)]
    while request >= 0:
        tokens += s.done[request]
        request = s.after[request]
    return tokens


def reusable_tokens(s: Run, request: int) -> int:
    """Cached tokens of a session's prompt, all but one at most; negative: to be computed in addition to the prompt."""
    if s.queried_tokens == 0:
        return -s.shared_tokens  # the very first turn computes the shared prompt
    return min(s.free_blocks[s.session[request]], (s.length[request] - 1) // s.block_tokens) * s.block_tokens


def note_peak(s: Run, r: int) -> None:
    """Update the peak number of cached tokens."""
    s.peak_tokens = max(s.peak_tokens, cached_tokens(s, r))


def in_flight(s: Run, r: int) -> int:
    """Requests that hold a slot."""
    return s.n[r] + s.line_count[line_of(s, r, PREFILLING)] + s.line_count[line_of(s, r, TRANSIT)]


def load_of(s: Run, r: int) -> int:
    """Requests that the replica is responsible for: in flight, preempted, or assigned to start next."""
    return in_flight(s, r) + s.line_count[line_of(s, r, PREEMPTED)] + s.line_count[line_of(s, r, ASSIGNED)]
