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
LISTED = 3


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
    if s.prefill_kind[m] == LISTED:
        return by_list_ms(s, m, r, n_chunks)
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


def by_list_ms(s: Run, m: int, r: int, n_chunks: int) -> float:
    """Sum over the different chunks of an iteration; equal ones share one launch."""
    time = 0.0
    for i in range(n_chunks):
        alike = 0
        first = True
        for j in range(n_chunks):
            if are_alike(s, r, i, j):
                alike += 1
                first = first and j >= i
        if first:
            prefix = s.done[s.chunk_request[r, i]] + s.shared_tokens
            time += listed_ms(s, m, s.chunk_tokens[r, i], prefix, alike)
    return time


def are_alike(s: Run, r: int, i: int, j: int) -> bool:
    """Whether two chunks have as many tokens, after as many others."""
    same = s.chunk_tokens[r, i] == s.chunk_tokens[r, j]
    return same and s.done[s.chunk_request[r, i]] == s.done[s.chunk_request[r, j]]


def listed_ms(s: Run, m: int, tokens: int, prefix: int, alike: int) -> float:
    """Attention of equal chunks, as :meth:`~simulator.hardware.kernel_times.ListedKernels.prefill_attention` has it."""
    i = 1
    while i < s.listed_tokens.shape[0] - 1 and s.listed_tokens[i] < tokens:
        i += 1
    j = 1
    while j < s.listed_prefixes.shape[0] - 1 and s.listed_prefixes[j] < prefix:
        j += 1
    k = 1
    while k < s.listed_batches.shape[0] - 1 and s.listed_batches[k] < alike:
        k += 1
    of_tokens = 1.0 * (tokens - s.listed_tokens[i - 1]) / (s.listed_tokens[i] - s.listed_tokens[i - 1])
    of_prefix = 1.0 * (prefix - s.listed_prefixes[j - 1]) / (s.listed_prefixes[j] - s.listed_prefixes[j - 1])
    of_batch = 1.0 * (alike - s.listed_batches[k - 1]) / (s.listed_batches[k] - s.listed_batches[k - 1])
    low = at_prefix_ms(s, m, i, j, k - 1, of_tokens, of_prefix)
    return low + of_batch * (at_prefix_ms(s, m, i, j, k, of_tokens, of_prefix) - low)


def at_prefix_ms(s: Run, m: int, i: int, j: int, k: int, of_tokens: float, of_prefix: float) -> float:
    """Interpolate between two prefixes, at node ``k`` of the batches."""
    low = at_tokens_ms(s, m, i, j - 1, k, of_tokens)
    return low + of_prefix * (at_tokens_ms(s, m, i, j, k, of_tokens) - low)


def at_tokens_ms(s: Run, m: int, i: int, j: int, k: int, of_tokens: float) -> float:
    """Interpolate between two numbers of tokens, at nodes of the others."""
    low = s.listed_ms[m, i - 1, j, k]
    return low + of_tokens * (s.listed_ms[m, i, j, k] - low)
