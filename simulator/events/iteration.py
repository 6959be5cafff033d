"""Iterations of a replica: starts, preemptions, and the tokens written."""

from __future__ import annotations

from inferencegym import plain_cython as cython

if not cython.compiled:  # compiled, these names are declared in loop.pxd
    from math import log

    from simulator.events.blocks import (
        end_of_fed,
        end_of_prefillers,
        first_of,
        fits,
        full_blocks,
        has_idle_prefiller,
        in_flight,
        is_over_full,
        load_of,
        note_peak,
        prompt_blocks,
    )
    from simulator.events.dispatch import dispatch, precedes, send_next, send_outputs, unsent_ms
    from simulator.events.heap import HANDED_OVER, ITERATION_END, PREFILL_END, WAKE, schedule
    from simulator.events.lines import (
        ASSIGNED,
        LINES_OF_REPLICA,
        PREEMPTED,
        PREFILLING,
        TRANSIT,
        append,
        insert_before_class,
        is_behind,
        line_of,
        remove,
    )
    from simulator.events.records import Run
    from simulator.events.rollout import leave, roll_out
    from simulator.events.routing import found_tokens, uncached_tokens
    from simulator.events.sessions import end_turn, free_context, reuse_context, take_free_blocks
    from simulator.events.times import iteration_ms

RANDOM_A = 2147483563
RANDOM_B = 2147483399
LEAST_GAP_MS = 0.01
GAPS_PER_E = 100
"""Gaps between outputs are counted in this many bins for each factor of e, from the least one on."""


def begin_iteration(s: Run, r: int) -> None:
    """Begin the next iteration of a replica, if it has anything to do."""
    preempted = make_room(s, r)
    if s.n_sessions > 0:
        take_free_blocks(s, r)
    n_chunks = 0
    if not s.disaggregated[r]:
        take_chunks(s, r, not (preempted and s.vllm_refill))
        n_chunks = s.n_chunks[r]
    s.decoding[r] = s.n[r] > 0 and (s.chunked > 0 or n_chunks == 0)
    s.idle[r] = n_chunks == 0 and s.decoding[r] == 0
    if s.idle[r]:
        if s.leaving[r] and load_of(s, r) == 0:
            leave(s, r)
        elif s.draining[r] and load_of(s, r) == 0:
            roll_out(s)
        return
    n = s.n[r] if s.decoding[r] else 0
    s.drafts[r] = s.draft_tokens
    for c in range(s.n_classes):
        for j in range(s.draft_tokens):
            s.chance[r, c, j] = s.fleet_chance[c, j]
    s.iteration_ms[r] = iteration_ms(s, r, n, 1.0 * s.token_sum[r] / n if n > 0 else 0.0, n_chunks)
    send_first_tokens(s, r)
    schedule(s, s.iteration_ms[r], ITERATION_END, 0, r)


def send_first_tokens(s: Run, r: int) -> None:
    """Send the first tokens of the last iteration, with their delay into this one."""
    request = s.unsent_first[r]
    while request >= 0:
        s.output_delay_ms[request] = s.output_delay[s.model[r]] * s.iteration_ms[r] + unsent_ms(s)
        request = s.unsent_after[request]
    s.unsent_first[r] = -1


def end_iteration(s: Run, r: int) -> None:
    """Write the tokens of an iteration and begin the next."""
    if s.decoding[r]:
        count_gaps(s, r)
        send_outputs(s, s.n[r])
        advance(s, r)
        s.n_decoded[r] = s.n[r]
    note_peak(s, r)
    if not s.disaggregated[r]:
        complete(s, r)
    dispatch(s)
    begin_idle_prefills(s, r)  # slots or cache may have become free
    begin_iteration(s, r)


def wake(s: Run, r: int) -> None:
    """Begin an iteration of a replica that runs none."""
    dispatch(s)  # a one-token answer frees a slot without an iteration
    begin_idle_prefills(s, r)
    if s.idle[r]:
        begin_iteration(s, r)


# Preemption --------------------------------------------------------------------------------------------------------


def make_room(s: Run, r: int) -> bool:
    """Preempt sequences until the others have room for their next tokens; returns whether any was preempted."""
    some = False
    if s.reserve:
        return some
    while s.n[r] + s.line_count[line_of(s, r, PREFILLING)] > 1 and is_over_full(s, r):
        victim = preempt(s, r)
        if victim < 0:
            return some
        some = True
        if s.session[victim] >= 0:
            free_context(s, s.session[victim], computed_tokens(s, victim))
        s.preemptions[victim] += 1
        s.n_preempted += 1
        insert_before_class(s, line_of(s, r, PREEMPTED), victim)
    return some


def computed_tokens(s: Run, victim: int) -> int:
    """Tokens of a preempted request that were in the cache; its last written token was not."""
    return s.done[victim] if s.length[victim] == s.need[victim] else s.length[victim] - 1


def preempt(s: Run, r: int) -> int:
    """Preempt the last admitted request of the lowest class and return it; -1 if none can be preempted."""
    # A disaggregated prefill runs on another GPU and cannot be preempted.
    line = line_of(s, r, PREFILLING)
    last = -1 if s.disaggregated[r] else last_of_lowest_class(s, line)
    i = last_sequence_of_lowest_class(s, r)
    if last >= 0 and (i < 0 or s.priority[last] >= s.priority[s.seq_request[r, i]]):
        remove(s, line, last)
        return last
    if i < 0:
        return -1
    victim = s.seq_request[r, i]
    if i < s.n_decoded[r]:
        s.output_ms[victim] = s.decoded_ms[r]
        s.n_decoded[r] -= 1
    s.length[victim] = s.seq_tokens[r, i]
    s.seq_goal[r, i] = 0
    drop_finished(s, r, False)
    return victim


def last_of_lowest_class(s: Run, line: int) -> int:
    """Last request of the lowest class in a line; -1 if the line is empty."""
    best = s.line_last[line]
    request = best
    while request >= 0:
        if s.priority[request] > s.priority[best]:
            best = request
        request = s.before[request]
    return best


def last_sequence_of_lowest_class(s: Run, r: int) -> int:
    """Youngest decoding sequence of the lowest class, or -1."""
    best = s.n[r] - 1
    for i in range(s.n[r] - 2, -1, -1):
        if s.priority[s.seq_request[r, i]] > s.priority[s.seq_request[r, best]]:
            best = i
    return best


# Prompts -----------------------------------------------------------------------------------------------------------


def take_chunks(s: Run, r: int, starting: bool) -> None:
    """Fill the next iteration with prompt tokens: prompts in prefill first, then new ones, up to the token budget."""
    decode_rows = s.n[r] * (s.draft_tokens + 1) if s.chunked and not s.disaggregated[r] else 0
    most = s.token_budget[s.model[r]]
    budget = max(most - decode_rows, most // 4)
    n = 0
    total = 0
    for fed in range(first_of(s, r), end_of_fed(s, r)):
        request = s.line_first[line_of(s, fed, PREFILLING)]
        while request >= 0 and budget > 0:
            if s.prefiller[request] == r:
                tokens = min(budget, s.need[request] - s.done[request])
                s.chunk_request[r, n] = request
                s.chunk_tokens[r, n] = tokens
                n += 1
                total += tokens
                budget -= tokens
            request = s.after[request]
    # Scheduled when the last iteration began, one that would otherwise be empty excepted: who came since then waits.
    is_ahead = s.async_scheduling > 0 and (n > 0 or (s.n[r] > 0 and not s.disaggregated[r]))
    latest_ms = s.begun_ms[r] if is_ahead else s.now_ms
    s.begun_ms[r] = s.now_ms
    # A prefill GPU of many replicas may find more short prompts than the slots of one, for which there is room.
    while budget > 0 and starting and n < s.chunk_tokens.shape[1]:
        if s.vllm_refill:
            dispatch(s)
        line = first_head_line(s, r)
        if line < 0 or s.queued_ms[s.line_first[line]] > latest_ms:
            break
        fed = (line - s.n_classes) // LINES_OF_REPLICA
        # Whole prompts only: a prompt longer than the budget runs alone.
        if not s.chunked and n > 0 and uncached_tokens(s, fed, s.line_first[line]) > budget:
            break
        request = start_prefill(s, fed, line)
        s.prefiller[request] = r
        tokens = s.need[request] - s.done[request]
        if s.chunked:
            tokens = min(budget, tokens)
        s.chunk_request[r, n] = request
        s.chunk_tokens[r, n] = tokens
        n += 1
        total += tokens
        budget -= tokens
    s.n_chunks[r] = n
    s.chunk_sum[r] = total


def first_head_line(s: Run, r: int) -> int:
    """Line whose first request a replica or prefill GPU should start next; -1 if it may start none."""
    best = -1
    for fed in range(first_of(s, r), end_of_fed(s, r)):
        line = head_line(s, fed)
        if line >= 0 and (best < 0 or is_behind(s, s.line_first[best], s.line_first[line])):
            best = line
    return best


def head_line(s: Run, r: int) -> int:
    """Line whose first request this replica should start next; -1 if it may start none."""
    line = next_line(s, r)
    if s.line_count[line] == 0 or in_flight(s, r) >= s.batch_size:
        return -1
    # A request that does not fit beside others may run alone: the pool may have shrunk since it started.
    if s.reserve or in_flight(s, r) == 0 or fits(s, r, s.line_first[line], 0):
        return line
    return -1


def next_line(s: Run, r: int) -> int:
    """Line of the replica's next request: preempted ones come first, except that a higher class may pass them."""
    assigned = line_of(s, r, ASSIGNED)
    preempted = line_of(s, r, PREEMPTED)
    if s.line_count[preempted] == 0:
        return assigned
    if s.line_count[assigned] > 0 and precedes(s, s.line_first[assigned], s.line_first[preempted]):
        return assigned
    return preempted


def start_prefill(s: Run, r: int, line: int) -> int:
    """Start the first request of a line; returns it."""
    request = s.line_first[line]
    remove(s, line, request)
    s.need[request] = s.length[request]
    s.done[request] = found_tokens(s, r, request)
    s.held_blocks[request] = prompt_blocks(s, request)
    if s.start_ms[request] != s.start_ms[request]:
        s.start_ms[request] = s.now_ms
        s.n_started += 1
    if s.session[request] >= 0:
        reuse_context(s, request)
    append(s, line_of(s, r, PREFILLING), request)
    if s.session[request] >= 0:
        take_free_blocks(s, r)  # the next request's look-up sees only the blocks that remain
    return request


def book_chunks(s: Run, r: int) -> None:
    """Record the prefilled tokens of an iteration."""
    for i in range(s.n_chunks[r]):
        s.done[s.chunk_request[r, i]] += s.chunk_tokens[r, i]
    s.prefilled_tokens += s.chunk_sum[r]
    s.chunk_sum[r] = 0


def complete(s: Run, r: int) -> None:
    """Record prefilled tokens; complete prompts yield their first token."""
    book_chunks(s, r)
    for i in range(s.n_chunks[r]):
        request = s.chunk_request[r, i]
        if s.done[request] == s.need[request]:
            remove(s, line_of(s, r, PREFILLING), request)
            write_first_token(s, r, request, s.need[request])
    s.n_chunks[r] = 0


def write_first_token(s: Run, r: int, request: int, tokens: int) -> None:
    """Write the first token of a prompt (or recomputation) that is now in the cache; it joins the decode batch."""
    s.written_tokens += 1
    if s.first_ms[request] != s.first_ms[request]:
        s.first_ms[request] = s.now_ms
        s.unsent_after[request] = s.unsent_first[r]
        s.unsent_first[r] = request
    else:
        count_gap(s, s.now_ms - s.output_ms[request], 1)
    s.output_ms[request] = s.now_ms
    if tokens + 1 >= s.goal[request]:
        finish(s, r, request)
    else:
        join(s, r, request, tokens + 1)


def join(s: Run, r: int, request: int, tokens: int) -> None:
    """Add a sequence to the decode batch."""
    i = s.n[r]
    s.seq_request[r, i] = request
    s.seq_tokens[r, i] = tokens
    s.seq_goal[r, i] = s.goal[request]
    s.n[r] = i + 1
    s.token_sum[r] += tokens
    left = s.goal[request] - tokens
    s.steps_to_finish[r] = left if i == 0 else min(s.steps_to_finish[r], left)


# Decoding ----------------------------------------------------------------------------------------------------------


def advance(s: Run, r: int) -> None:
    """Write the tokens of every decoding sequence and remove the finished ones."""
    n = s.n[r]
    s.decode_ms += s.iteration_ms[r] * n
    if s.drafts[r] > 0:
        accept_drafts(s, r)
        drop_finished(s, r, True)
        return
    for i in range(n):
        s.seq_tokens[r, i] += 1
    s.token_sum[r] += n
    s.written_tokens += n
    s.decoded_tokens += n
    s.steps_to_finish[r] -= 1
    if s.steps_to_finish[r] <= 0:
        drop_finished(s, r, True)


def count_gaps(s: Run, r: int) -> None:
    """Count the time since the last output of every decoding sequence; those that decoded last time come first."""
    count_gap(s, s.now_ms - s.decoded_ms[r], s.n_decoded[r])
    for i in range(s.n_decoded[r], s.n[r]):
        count_gap(s, s.now_ms - s.output_ms[s.seq_request[r, i]], 1)
    s.decoded_ms[r] = s.now_ms


def count_gap(s: Run, gap_ms: float, n: int) -> None:
    """Count ``n`` gaps between outputs of requests."""
    i = cython.cast(cython.Py_ssize_t, GAPS_PER_E * log(max(gap_ms, LEAST_GAP_MS) / LEAST_GAP_MS))
    s.gaps[min(i, s.gaps.shape[0] - 1)] += n


def accept_drafts(s: Run, r: int) -> None:
    """Write one token of every sequence, and its drafts up to the first that is rejected."""
    for i in range(s.n[r]):
        accepted = 0
        while accepted < s.drafts[r] and draw(s) < chance_of(s, r, s.seq_request[r, i], accepted):
            accepted += 1
        tokens = min(s.seq_tokens[r, i] + 1 + accepted, s.seq_goal[r, i])
        s.drafted_tokens += s.drafts[r]
        s.accepted_tokens += accepted
        s.decoded_tokens += 1 + accepted
        s.written_tokens += tokens - s.seq_tokens[r, i]
        s.seq_tokens[r, i] = tokens


def chance_of(s: Run, r: int, request: int, position: int) -> float:
    """Probability that the draft at this position is accepted if all before it are."""
    if s.acceptance[request] >= 0.0:
        return s.acceptance[request]
    return s.chance[r, s.priority[request], position]


def draw(s: Run) -> float:
    """Random number between 0 and 1 from L'Ecuyer's combined generator (1988), whose products fit in 64 bits."""
    s.random_a = 40014 * s.random_a % RANDOM_A
    s.random_b = 40692 * s.random_b % RANDOM_B
    z = s.random_a - s.random_b
    if z < 1:
        z += RANDOM_A - 1
    return 1.0 * z / RANDOM_A


def drop_finished(s: Run, r: int, written: bool) -> None:
    """Remove sequences that reached their goal from the batch; without ``written`` they are preempted, not finished."""
    kept = 0
    token_sum = 0
    least = 0
    for i in range(s.n[r]):
        request = s.seq_request[r, i]
        tokens = s.seq_tokens[r, i]
        left = s.seq_goal[r, i] - tokens
        if left <= 0:
            if written:
                finish(s, r, request)
            continue
        s.seq_request[r, kept] = request
        s.seq_tokens[r, kept] = tokens
        s.seq_goal[r, kept] = tokens + left
        token_sum += tokens
        least = left if kept == 0 else min(least, left)
        kept += 1
    s.n[r] = kept
    s.token_sum[r] = token_sum
    s.steps_to_finish[r] = least


def finish(s: Run, r: int, request: int) -> None:
    """Record that a request is answered."""
    s.finish_ms[request] = s.now_ms
    s.n_finished += 1
    s.reserved_blocks[r] -= full_blocks(s, request)
    if s.session[request] >= 0:
        end_turn(s, request)
    send_next(s)


# Disaggregated prefill ---------------------------------------------------------------------------------------------


def begin_idle_prefills(s: Run, r: int) -> None:
    """Begin an iteration of each prefill GPU of a replica that runs none."""
    if s.disaggregated[r]:
        for p in range(first_of(s, r), end_of_prefillers(s, r)):
            if s.prefill_idle[p]:
                begin_prefill(s, p)


def begin_prefill(s: Run, r: int) -> None:
    """Begin the next iteration of a prefill GPU."""
    take_chunks(s, r, True)
    s.prefill_idle[r] = s.n_chunks[r] == 0
    if s.n_chunks[r] > 0:
        schedule(s, iteration_ms(s, r, 0, 0.0, s.n_chunks[r]), PREFILL_END, 0, r)


def end_prefill(s: Run, p: int) -> None:
    """Send the caches of complete prompts over the link and begin the next iteration."""
    book_chunks(s, p)
    for i in range(s.n_chunks[p]):
        request = s.chunk_request[p, i]
        r = s.replica[request]
        if s.done[request] == s.need[request]:
            remove(s, line_of(s, r, PREFILLING), request)
            append(s, line_of(s, r, TRANSIT), request)
            s.transit_blocks[r] += s.held_blocks[request]
            s.transit_tokens[r] += s.need[request]
            link_ms = s.need[request] * s.kv_bytes_per_token / s.link_bytes_per_ms
            schedule(s, link_ms, HANDED_OVER, request, r)
    s.n_chunks[p] = 0
    dispatch(s)
    begin_prefill(s, p)


def hand_over(s: Run, r: int, request: int) -> None:
    """Take over the cache of a prompt, which has arrived over the link."""
    tokens = s.length[request]
    remove(s, line_of(s, r, TRANSIT), request)
    s.transit_blocks[r] -= prompt_blocks(s, request)
    s.transit_tokens[r] -= tokens
    write_first_token(s, r, request, tokens)
    note_peak(s, r)
    if s.idle[r] or has_idle_prefiller(s, r):
        schedule(s, 0.0, WAKE, 0, r)
