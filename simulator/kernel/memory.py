"""GPU memory of a replica, its KV pool, and preemption of requests that do not fit into the pool."""

from __future__ import annotations

from inferencegym import plain_cython as cython

if not cython.compiled:  # compiled, these names are declared in step.pxd
    from math import exp, log

    from simulator.kernel.cohorts import locate_edges, measure_cohort
    from simulator.kernel.numerics import EPS_REQUESTS, LN_2
    from simulator.kernel.records import Knobs, Metrics, Params, Scratch, State

MAX_CHURN_PROMPTS = 8.0
"""Most prompts recomputed per admission into a full KV pool. Chosen: a bound for answers far longer than prompts."""
CHURNED_OUTPUT_TOKENS = 100.0
"""Output tokens of a request by the time it is preempted. Measured on the discrete-event reference, two loads."""


def allocate_memory(p: Params, knobs: Knobs, s: State, x: Scratch, m: Metrics, b: int) -> None:
    """Divide the GPU memory of a replica: weights, activations, drafts, KV pool."""
    draft_gb = p.draft_gb if knobs.spec[b] > 0 else 0.0
    weights_gb = p.weights_gb[s.tier_new[b]]
    if x.fleet.new_share < 1.0:
        weights_gb = max(weights_gb, p.weights_gb[s.tier_old[b]])
    # Engines allocate the pool at startup: kv_budget is a share of the memory that is free then.
    pool_gb = knobs.kv_budget[b] * (p.memory_gb - weights_gb - p.activation_gb - p.workspace_gb - draft_gb)
    x.memory.kv_pool_tokens = pool_gb * 1e9 / p.kv_bytes_per_token
    used_gb = weights_gb + p.activation_gb + p.sequence_gb * knobs.batch_size[b] + draft_gb + pool_gb
    m.oom[b] = 1.0 if used_gb > p.memory_limit_gb else 0.0
    m.gpu_memory_gb[b] = min(used_gb, p.memory_limit_gb)


def prefix_hit_share(p: Params, s: State, x: Scratch, b: int) -> float:
    """Hit rate of repeated prefix tokens: the LRU reuse curve at the number of tokens in the pools."""
    if p.reuse_points == 0:
        return 0.0
    cached_tokens = min(s.cached_tokens[b], x.fleet.up * x.memory.kv_pool_tokens)
    y = log(max(cached_tokens, 1.0)) / LN_2 - p.reuse_log2_first
    if y <= 0.0:
        return p.reuse_hit[0] * exp(LN_2 * y)
    i = cython.cast(cython.Py_ssize_t, y)
    if i >= p.reuse_points - 1:
        return p.reuse_hit[p.reuse_points - 1]
    return p.reuse_hit[i] + (y - i) * (p.reuse_hit[i + 1] - p.reuse_hit[i])


def preempt(p: Params, s: State, x: Scratch, b: int, t: int) -> float:
    """Preempt requests in flight: those of restarting replicas, and the latest ones that exceed the KV pool.

    As in vLLM with ``--scheduling-policy priority``, the lowest class is preempted first, and within a class the
    request admitted last. A preempted request resumes when there is room; its prompt and outputs so far are recomputed.
    Returns the number of preempted requests.
    """
    preempted = 0.0
    if x.fleet.restarted_share > 0.0:
        # One replica is already down when the next one restarts, so the others hold more than their share.
        ready = s.replicas_ready[b]
        preempted += interrupt(p, s, b, min(1.0, x.fleet.restarted_share * ready / max(ready - 1.0, 1.0)))
    excess = -x.fleet.up * x.memory.kv_pool_tokens
    for c in range(p.n_classes):
        # Requests on removed replicas are in those replicas' own pools.
        excess += x.fleet.staying_share * (
            s.prompts_in_flight[b, c] + s.positions_in_flight[b, c] + p.block_slack_tokens[c] * s.in_flight[b, c]
        )
    if excess <= EPS_REQUESTS:
        return preempted
    locate_edges(p, s, x, b, t, 0.0)
    for c in range(p.n_classes - 1, -1, -1):
        k = t - 1
        while k >= s.first_running[b, c] and excess > EPS_REQUESTS and s.in_flight[b, c] > EPS_REQUESTS:
            requests, tokens = take_out(p, s, x, b, c, k, t, excess)
            preempted += requests
            excess -= tokens
            k -= 1
    return preempted


def interrupt(p: Params, s: State, b: int, share: float) -> float:
    """Preempt a share of everything in flight; returns the number of requests."""
    stay = 1.0 - share
    preempted = 0.0
    for c in range(p.n_classes):
        preempted += share * s.in_flight[b, c]
        s.preempted[b, c] += share * s.in_flight[b, c]
        s.preempted_prompts[b, c] += share * s.prompts_in_flight[b, c]
        s.preempted_positions[b, c] += share * s.positions_in_flight[b, c]
        s.in_flight[b, c] *= stay
        s.prompts_in_flight[b, c] *= stay
        s.positions_in_flight[b, c] *= stay
        s.written_tokens[b, c] *= stay
        for k in range(s.first_running[b, c], s.time[b]):
            s.density[b, c, k] *= stay
    return preempted


def take_out(p: Params, s: State, x: Scratch, b: int, c: int, k: int, t: int, excess: float) -> tuple[float, float]:
    """Preempt as much of the cohort admitted in step ``k`` as frees ``excess`` KV tokens, or all of it.

    Returns the number of requests and the KV tokens that they held.
    """
    each_requests, each_positions, each_written = measure_cohort(p, s, x, b, c, k, t, s.progress[b, t])
    running = s.density[b, c, k] * each_requests
    if running <= EPS_REQUESTS:
        return 0.0, 0.0
    prompt_tokens = s.prompts_in_flight[b, c] / s.in_flight[b, c]
    tokens = running * (prompt_tokens + p.block_slack_tokens[c]) + s.density[b, c, k] * each_positions
    share = min(1.0, excess / tokens)
    density = share * s.density[b, c, k]
    requests = min(density * each_requests, s.in_flight[b, c])
    prompts = requests * s.prompts_in_flight[b, c] / s.in_flight[b, c]
    s.preempted[b, c] += requests
    s.preempted_prompts[b, c] += prompts
    s.preempted_positions[b, c] += density * each_positions
    s.density[b, c, k] -= density
    s.in_flight[b, c] -= requests
    s.prompts_in_flight[b, c] -= prompts
    s.positions_in_flight[b, c] -= min(density * each_positions, s.positions_in_flight[b, c])
    s.written_tokens[b, c] -= density * each_written
    return requests, share * tokens


def put_back(p: Params, s: State, x: Scratch, b: int, t: int) -> None:
    """Add resumed requests to the cohort of their class that has written as many tokens as they have."""
    for c in range(p.n_classes):
        if x.batch.resumed[c] > 0.0:
            put_back_class(p, s, x, b, c, t)


def put_back_class(p: Params, s: State, x: Scratch, b: int, c: int, t: int) -> None:
    """Add the resumed requests of one class to a running cohort."""
    n = x.batch.resumed[c]
    share = n / s.preempted[b, c]
    progress = s.progress[b, t + 1]
    position = s.preempted_positions[b, c] / s.preempted[b, c]
    k = s.first_running[b, c]
    while k < t and progress - s.progress[b, k + 1] > position:
        k += 1
    requests, positions, written = measure_cohort(p, s, x, b, c, k, t + 1, progress)
    while k < t and requests < EPS_REQUESTS:  # skip old cohorts with hardly any request left
        k += 1
        requests, positions, written = measure_cohort(p, s, x, b, c, k, t + 1, progress)
    density = n / requests
    s.density[b, c, k] += density
    s.in_flight[b, c] += n
    s.prompts_in_flight[b, c] += share * s.preempted_prompts[b, c]
    s.positions_in_flight[b, c] += density * positions
    s.written_tokens[b, c] += density * written
    s.preempted[b, c] *= 1.0 - share
    s.preempted_prompts[b, c] *= 1.0 - share
    s.preempted_positions[b, c] *= 1.0 - share


def kv_occupancy(p: Params, x: Scratch) -> float:
    """Share of the KV pools in use at the end of the step."""
    kv_tokens = 0.0
    for c in range(p.n_classes):
        kv_tokens += x.fleet.staying_share * (x.batch.end_prompts[c] + x.batch.end_positions[c])
        if p.occupancy_in_blocks:
            kv_tokens += x.fleet.staying_share * p.block_slack_tokens[c] * x.batch.end_requests[c]
    return min(1.0, kv_tokens / max(x.fleet.up * x.memory.kv_pool_tokens, 1.0))


def churned_requests(p: Params, x: Scratch) -> float:
    """Preemptions caused by admissions into a full pool; each victim recomputes its prompt and some of its output."""
    churned = 0.0
    for c in range(p.n_classes):
        mean_output = p.block_growth[c] * p.length_integrals[c, 4 * p.grid_cells]
        again = x.heads.prompt_tokens[c] + CHURNED_OUTPUT_TOKENS
        churned += x.batch.kv_bound[c] * x.batch.admitted[c] * min(mean_output / again, MAX_CHURN_PROMPTS)
    return churned


def cache_prefixes(p: Params, s: State, x: Scratch, b: int, written: float) -> None:
    """Count the tokens in the pools: freed blocks stay cached until others need them; a restart loses them."""
    if p.reuse_points == 0:
        return
    cached = s.cached_tokens[b] * (1.0 - x.fleet.restarted_share) + written
    for c in range(p.n_classes):
        cached += x.batch.admitted[c] * x.heads.prompt_tokens[c]
    s.cached_tokens[b] = min(cached, x.fleet.up * x.memory.kv_pool_tokens)
