"""Time of an iteration: :meth:`simulator.hardware.operators.OperatorModel.step_ms` on looked-up terms.

Terms that depend only on the number of rows or sequences are computed by the model once and cached. Prefill attention
is evaluated here if the model has a form for it (:meth:`~simulator.hardware.operators.OperatorModel.loop_terms`);
otherwise the model is called each time. Sums and products are in the model's order, so that the numbers are
bit-identical. Integers are divided as ``1.0 * a / b``: compiled, ``a / b`` would drop the remainder.
"""

from __future__ import annotations

from inferencegym import plain_cython as cython

if not cython.compiled:  # compiled, these names are declared in loop.pxd
    from simulator.events.records import Run

ASKED = 0
CURVES = 1
PAIRS = 2


def iteration_ms(s: Run, r: int, n_decode: int, context: float, n_chunks: int) -> float:
    """Time of an iteration that decodes ``n_decode`` sequences at a mean context and prefills the replica's chunks."""
    m = s.model[r]
    rows = n_decode * (s.draft_tokens + 1)
    prompt_tokens = 0
    n_first = 0
    for i in range(n_chunks):
        request = s.chunk_request[r, i]
        prompt_tokens += s.chunk_tokens[r, i]
        if s.done[request] + s.chunk_tokens[r, i] == s.need[request]:
            n_first += 1
    time = linear_ms(s, m, rows + prompt_tokens) + head_ms(s, m, rows + n_first)
    if n_decode > 0:
        attention = attention_ms(s, m, n_decode, context + s.shared_tokens)
        time += attention + draft_ms(s, m, n_decode, attention)
    if n_chunks > 0:
        time += prefill_attention_ms(s, m, r, n_chunks)
    time = time + s.step_overhead_ms[m] + s.sequence_overhead_ms[m] * (n_decode + n_chunks)
    time *= s.slowdown
    s.iterations += 1
    s.busy_ms += time
    return time


def linear_ms(s: Run, m: int, rows: int) -> float:
    """All but attention and LM head for ``rows`` tokens."""
    last = s.linear_ms.shape[1] - 1
    cell = min(rows, last)  # the last cell is for all larger numbers, which the model computes each time
    if cell == last or s.linear_ms[m, cell] != s.linear_ms[m, cell]:
        with cython.gil:
            s.linear_ms[m, cell] = s.owner.models[m].linear_ms(rows)
    return s.linear_ms[m, cell]


def head_ms(s: Run, m: int, rows: int) -> float:
    """LM head for ``rows`` tokens."""
    last = s.head_ms.shape[1] - 1
    cell = min(rows, last)
    if cell == last or s.head_ms[m, cell] != s.head_ms[m, cell]:
        with cython.gil:
            s.head_ms[m, cell] = s.owner.models[m].head_ms(rows)
    return s.head_ms[m, cell]


def attention_ms(s: Run, m: int, n_decode: int, context: float) -> float:
    """Decode attention, linear between contexts of 2, 4, 8, ... tokens."""
    if s.attention_ms[m, n_decode, 0] != s.attention_ms[m, n_decode, 0]:
        with cython.gil:
            s.owner.add_attention(m, n_decode)
    context = max(context, 2.0)
    j = 0
    while j < s.n_contexts[m] - 2 and (4 << j) <= context:
        j += 1
    start = 2 << j
    low = s.attention_ms[m, n_decode, j]
    return low + (s.attention_ms[m, n_decode, j + 1] - low) * (context - start) / start


def draft_ms(s: Run, m: int, n_decode: int, attention: float) -> float:
    """Drafting, one position after the other."""
    if s.draft_tokens == 0:
        return 0.0
    if s.draft_layers[m] == 0:
        return s.draft_tokens * s.draft_overhead_ms[m]
    layer = (linear_ms(s, m, n_decode) + attention) / s.draft_layers[m]
    return s.draft_tokens * (layer + head_ms(s, m, n_decode) + s.draft_overhead_ms[m])


def prefill_attention_ms(s: Run, m: int, r: int, n_chunks: int) -> float:
    """Causal attention of the chunks of an iteration."""
    if s.prefill_kind[m] == CURVES:
        return by_curves_ms(s, m, r, n_chunks)
    if s.prefill_kind[m] == PAIRS:
        return by_pairs_ms(s, m, r, n_chunks)
    with cython.gil:
        s.asked_ms = s.owner.prefill_attention_ms(m, r, n_chunks)
    return s.asked_ms


def by_curves_ms(s: Run, m: int, r: int, n_chunks: int) -> float:
    """The longest chunk alone, or the sum of all chunks as in a large batch, whichever is larger."""
    longest = 0.0
    together = 0.0
    for i in range(n_chunks):
        prefix = s.done[s.chunk_request[r, i]] + s.shared_tokens
        end = prefix + s.chunk_tokens[r, i]
        alone = alone_ms(s, m, end)
        batched = batched_ms(s, m, end)
        if prefix > 0:
            alone -= alone_ms(s, m, prefix)
            batched -= batched_ms(s, m, prefix)
        longest = max(longest, alone)
        together += batched
    return s.prefill_scale[m] * max(longest, together, s.prefill_floor_ms[m])


def alone_ms(s: Run, m: int, tokens: int) -> float:
    """Attention of one prompt alone; quadratic beyond the curve."""
    last = s.prefill_alone_ms.shape[1] - 1
    if tokens <= last:
        return s.prefill_alone_ms[m, tokens]
    return s.prefill_alone_ms[m, last] * square(1.0 * tokens / last)


def batched_ms(s: Run, m: int, tokens: int) -> float:
    """Attention of one prompt of many; quadratic beyond the curve."""
    last = s.prefill_batched_ms.shape[1] - 1
    if tokens <= last:
        return s.prefill_batched_ms[m, tokens]
    return s.prefill_batched_ms[m, last] * square(1.0 * tokens / last)


def square(x: float) -> float:
    """X * x, which is rounded the same way everywhere."""
    return x * x


def by_pairs_ms(s: Run, m: int, r: int, n_chunks: int) -> float:
    """Prefill attention proportional to the causal token pairs of the chunks."""
    pairs = 0.0
    for i in range(n_chunks):
        tokens = s.chunk_tokens[r, i]
        pairs += tokens * (s.done[s.chunk_request[r, i]] + s.shared_tokens + tokens / 2.0)
    return s.prefill_scale[m] * pairs
