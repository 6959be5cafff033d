"""One step of a serving fleet, row by row: the only implementation of the serving dynamics.

Plain Python that the build compiles to C (types in ``kernel.pxd``). A row is one fleet; rows never touch each other, so
a row of a batch equals the same episode alone, whatever the batch size or the number of threads.

The model is a fluid queue with an age structure, and stationary queueing formulas for waits shorter than a step:

- *Waiting.* Requests queue by class and step of arrival: highest class first, first come first served within a class.
  Waits are distances between the cumulative curves of arrivals and admissions.
- *In flight.* All running requests gain the same number of tokens in a step, the ``gain``; ``progress`` is its sum
  since the episode began. Requests admitted in step ``k`` are a cohort: ``density[c, k]`` per token of progress.
  With S the survival function of the class's output length and F its integral, those still running at progress ``y``
  are ``density * (F(y - progress[k]) - F(y - progress[k + 1]))``: exact for any distribution of lengths, nothing
  diffuses, and admitted == completed + in flight holds to rounding.
- *Pace.* The gain follows from the decode iteration of the mean batch, which follows from the gain: a fixed point,
  found by secants (:func:`solve`).
- *Preemption.* What the KV pool cannot hold leaves its cohort, lowest class and youngest first, waits, and comes back
  into the cohort that has written as much (:func:`preempt`, :func:`put_back`).
- *TTFT.* Wait in the queue, a fixed part, and a log-normal part with the mean and variance of prefill, the iteration
  under way, prompts ahead (M/G/1 with priorities) and a slot that is taken by chance (:func:`estimate_ttft`).

All functions share their arguments: ``p`` constants, ``load`` offered load, ``knobs`` action, ``s`` state, ``x``
scratch of the step, ``m`` metrics (shapes and units: :mod:`simulator.arrays`), and ``b`` the row, ``t`` the step,
``c`` a class (0 is served first). "Chosen" after a constant means that no measurement stands behind it.
"""

from __future__ import annotations

from typing import Any

import cython

if not cython.compiled:  # compiled, the same names are the C library's (see kernel.pxd)
    from math import erfc, exp, log, sqrt

# ---------------------------------------------------------------- constants: the numerical scheme

GAIN_RESIDUAL = 1e-4
"""Relative change of the gain by one more sweep below which the fixed point of a step is found. Chosen: metrics move
by less than their last digit that documents show."""
MAX_SWEEPS = 60
"""Sweeps of the fixed point at most. Measured on the registered tasks: 3 on average, 12 at most."""
MIN_FALL = 0.1
"""Least fall of the excess per unit of the gain's logarithm that a secant is trusted with. Chosen: one sweep's change
of the gain is stretched by 10 at most."""
FIRST_GUESS_TOKENS_PER_MS = 0.05
"""Pace from which the first step of an episode starts: 20 ms per token. Chosen; the sweeps forget it."""
MIN_GAIN_TOKENS = 1e-9
"""Tokens that a request gains in a step at least: a fleet that is down stands still without a division by 0."""
EPS_REQUESTS = 1e-9
"""Requests below which an amount counts as zero: rounding errors of a step's arrivals or of free room."""
EPS_FLOW = 1e-12
"""Requests below which a walk along the queue has nothing left to take; far below :data:`EPS_REQUESTS`."""
EPS = 1e-9
"""Least divisor of a rate, a mean or a share, whatever its unit."""
EPS_WEIGHT = 1e-6
"""Requests added to each class's weight in a mean over what waits: with none, every class counts the same."""
MIN_REPLICAS_UP = 1e-6
"""Replicas in service below which the fleet is down."""
MIN_DRAINING = 1e-3
"""Expected replicas that still drain below which the last request of the removed ones has ended. Chosen."""
EPS_SHARE = 1e-12
"""Share of the replicas whose restart is rounding: the rollout is complete."""
STEP_SMOOTHING = 0.5
"""Weight of the newest step in what one step hands to the next step's fixed point. Chosen: the mean of two steps
alternates less than the last one alone."""

# ---------------------------------------------------------------- constants: engine and fleet

MAX_PREFILLING_SHARE = 0.5
"""Most of the slots that requests without a first token can hold. Chosen: the estimate comes from the step before."""
MIN_PREFILL_SHARE = 0.25
"""Least share of an iteration's token budget left to prompts. Chosen: 512 requests with drafts exceed the budget."""
MAX_CHURN_PROMPTS = 8.0
"""Most prompts recomputed for one admission into a full KV pool. Chosen: bounds answers far longer than prompts."""
CHURNED_OUTPUT_TOKENS = 100.0
"""Output tokens of a request by the time it is preempted. Measured on the discrete-event reference, two loads."""
NO_SLO_MS = 1e12
"""Objectives above this are none; :func:`simulator.load.class_stats` lists infinity as 1e15."""

# ---------------------------------------------------------------- constants: waits within a step

MAX_UTILISATION = 0.95
"""Largest utilisation by prompts in 1 / (1 - utilisation). Chosen: what exceeds it, the fluid queue holds."""
SLOT_DEVIATION = 0.7
"""Standard deviation of requests in flight near the bound on slots, per that without a bound. Measured: fitted to the
discrete-event reference, two loads at the slot limit."""
STEP_GROWTH = 0.45
"""Mean over a step of a reflected random walk from 0, per standard deviation gained in the step. Brownian motion gives
(2/3) * sqrt(2/pi) = 0.53. Measured: lowered to fit the discrete-event reference on long prompts."""
MIN_WAIT_PROBABILITY = 0.05
"""Least P(wait > 0) in the variance of a wait, where its inverse counts. Chosen: one wait in twenty."""
MIN_NO_SLOT_PROBABILITY = 1e-3
"""P(no slot) below which nobody waits for one. Chosen: a tenth of what a p99 shows."""
MAX_SLOT_WAIT_STEPS = 2.0
"""Longest mean wait for a slot taken by chance, in steps. Chosen: longer ones are the fluid queue's."""
MIN_KV_OCCUPANCY = 1e-3
"""KV occupancy from which the pool can bound requests in flight: an idle fleet has room for 1,000 times nothing."""
MIN_BACKLOG = 1e-6
"""Waiting requests from which iterations are full of prompts."""
SAME_WAIT = 1e-6
"""Relative difference of the longest and the shortest TTFT of a step below which they are the same."""

# ---------------------------------------------------------------- constants: mathematics

LN_2 = 0.6931471805599453
SQRT_2 = 1.4142135623730951
SQRT_HALF = 0.7071067811865476
NORMAL_PEAK = 0.3989422804014327
"""Density of the standard normal distribution at 0: 1 / sqrt(2 pi)."""
NORMAL_P99 = 2.326
"""99 % quantile of the standard normal distribution."""


class Views:
    """Arrays and numbers by attribute; every attribute that ``kernel.pxd`` declares must be given."""

    def __init__(self, values: Any) -> None:
        # Compiled code does not check: an array that was never given would be read at address 0.
        missing = {name for name in dir(self) if not name.startswith("_")} - set(values)
        if missing:
            raise TypeError(f"{type(self).__name__} lacks {sorted(missing)}: give every attribute of kernel.pxd")
        for name, value in values.items():
            setattr(self, name, value)


class Params(Views):
    """Constants of a fleet: ``ServingParams.constants``."""


class Load(Views):
    """The offered load, :data:`simulator.arrays.LOAD`."""


class Knobs(Views):
    """The action, :data:`simulator.arrays.KNOBS`."""


class State(Views):
    """State that one step leaves to the next: :data:`simulator.arrays.STATE`."""


class Scratch(Views):
    """Scratch arrays of the step of one row: :data:`simulator.arrays.SCRATCH`."""


class Metrics(Views):
    """Metrics of a step: :data:`simulator.arrays.METRICS`."""


class ServingKernel:
    """Steps rows of a fleet batch in place; the arrays are those of :class:`simulator.serving.ServingFleet`.

    Arrays are C-contiguous, float64 or int64 unless :mod:`simulator.arrays` says otherwise. ``new_scratch`` makes the
    arrays of a :class:`Scratch`: several threads may step rows of one kernel at once, each with a scratch of its own;
    ``idle`` holds those that no thread uses now.
    """

    def __init__(self, params: Any, load: Any, knobs: Any, state: Any, metrics: Any, new_scratch: Any) -> None:
        self.params = Params(params)
        self.load = Load(load)
        self.knobs = Knobs(knobs)
        self.state = State(state)
        self.metrics = Metrics(metrics)
        self.new_scratch = new_scratch
        self.idle: list[Scratch] = []

    def step(self, lo: int, hi: int) -> None:
        """Advance rows ``lo`` (included) to ``hi`` (excluded) by one step."""
        x = self._take_scratch()
        with cython.nogil:
            for b in range(lo, hi):
                step_row(self.params, self.load, self.knobs, self.state, x, self.metrics, b)
        self.idle.append(x)

    def _take_scratch(self) -> Scratch:
        try:
            return self.idle.pop()
        except IndexError:
            return Scratch(self.new_scratch())


def step_row(p: Params, load: Load, knobs: Knobs, s: State, x: Scratch, m: Metrics, b: int) -> None:
    """Advance one row by one step."""
    t = s.time[b]
    scale(p, knobs, s, x, b, t)
    roll_out(p, knobs, s, x, b, t)
    receive_arrivals(p, load, s, b, t)
    allocate_memory(p, knobs, s, x, m, b)
    preempt(p, s, x, b, t)
    measure_queue_heads(p, load, knobs, s, x, b, t)
    limit_prefill(p, load, knobs, s, x, b, t)
    gain = solve(p, knobs, s, x, m, b, t)
    commit(p, s, x, m, b, t, gain)
    measure_ttft(p, load, knobs, s, x, m, b, t)
    reject_overflow(p, s, m, b, t)
    report(p, load, knobs, s, x, m, b, t, gain)
    s.gain_tokens[b] = gain
    s.time[b] = t + 1


# ---------------------------------------------------------------- before the step is served


def scale(p: Params, knobs: Knobs, s: State, x: Scratch, b: int, t: int) -> None:
    """Add and remove replicas: new ones load their weights first, removed ones serve what they have to its end.

    All of them are paid: from the moment they are asked for, and until their last request has ended.
    """
    x.joining = 0.0
    x.staying_share = 1.0
    x.paid_replicas = s.replicas_ready[b]
    if not p.scales:
        return
    start_s = p.start_s[knobs.tier[b]]
    loading = come_up(p, s, b, t, start_s)
    asked = knobs.replicas[b]
    more = asked - s.replicas_ready[b] - loading
    if more > 0.0:
        s.loading[b, t] = more
    elif more < 0.0:
        remove_replicas(p, s, b, t, -more)
    for k in range(s.first_loading[b], t + 1):
        # Those whose weights arrive within the step serve for the rest of it.
        x.joining += s.loading[b, k] * max(0.0, min(1.0, t + 1 - k - start_s / p.dt_s))
    x.paid_replicas = asked + drain(p, s, x, b)


def come_up(p: Params, s: State, b: int, t: int, start_s: float) -> float:
    """Put replicas into service whose weights have been loaded; returns those that still load."""
    loading = 0.0
    for k in range(s.first_loading[b], t):
        n = s.loading[b, k]
        if (t - k) * p.dt_s >= start_s:
            # They run the configuration in force, so what is left of a rollout becomes a smaller share.
            left = (1.0 - s.rollout_share[b]) * s.replicas_ready[b] / (s.replicas_ready[b] + n)
            s.rollout_share[b] = 1.0 - left
            s.replicas_ready[b] += n
            s.loading[b, k] = 0.0
            s.first_loading[b] = k + 1
        else:
            loading += n
    return loading


def remove_replicas(p: Params, s: State, b: int, t: int, n: float) -> None:
    """Take ``n`` replicas away: the youngest that still load, then those that a rollout has not reached, then others.

    What a replica in service has in flight stays with it: a share of all requests, alike in class and age.
    """
    k = t - 1
    while k >= s.first_loading[b] and n > 0.0:
        cancelled = min(n, s.loading[b, k])
        s.loading[b, k] -= cancelled
        n -= cancelled
        k -= 1
    if n <= 0.0:
        return
    ready = s.replicas_ready[b]
    in_flight = 0.0
    for c in range(p.n_classes):
        in_flight += s.in_flight[b, c]
    staying = max(0.0, in_flight - s.draining_requests[b])
    s.replicas_draining[b] = still_draining(s, b) + n
    s.draining_requests[b] += staying * n / ready
    outdated = max(0.0, (1.0 - s.rollout_share[b]) * ready - n)
    s.rollout_share[b] = 1.0 - outdated / (ready - n)
    s.replicas_ready[b] = ready - n


def still_draining(s: State, b: int) -> float:
    """Expected number of removed replicas that still serve: a Poisson number of requests is on each (M/G/infinity)."""
    n = s.replicas_draining[b]
    return n * (1.0 - exp(-s.draining_requests[b] / n)) if n > 0.0 else 0.0


def drain(p: Params, s: State, x: Scratch, b: int) -> float:
    """Removed replicas that still serve; writes which share of the requests in flight is on the others."""
    serving = still_draining(s, b)
    in_flight = 0.0
    for c in range(p.n_classes):
        in_flight += s.in_flight[b, c]
    if serving < MIN_DRAINING or in_flight < EPS_REQUESTS:
        s.replicas_draining[b] = 0.0
        s.draining_requests[b] = 0.0
        return 0.0
    x.staying_share = 1.0 - min(1.0, s.draining_requests[b] / in_flight)
    return serving


def roll_out(p: Params, knobs: Knobs, s: State, x: Scratch, b: int, t: int) -> None:
    """Restart replicas one at a time when precision or prefill placement changes."""
    tier = knobs.tier[b]
    disagg = knobs.disagg[b]
    ready = s.replicas_ready[b]
    x.restarted_share = 0.0
    s.replicas_up[b] = ready + x.joining
    x.new_share = 1.0
    if t == 0:
        s.tier_new[b] = tier
        s.tier_old[b] = tier
        s.disagg_new[b] = disagg
        s.disagg_old[b] = disagg
        s.rollout_share[b] = 1.0
    elif tier != s.tier_new[b] or disagg != s.disagg_new[b]:
        start_rollout(s, b, tier, disagg)
    if s.rollout_share[b] < 1.0:
        fleet_s = ready * p.reload_s[tier]
        part = min(1.0 - s.rollout_share[b], p.dt_s / fleet_s)
        x.restarted_share = part
        # One replica is down for the time that this part of the rollout takes.
        s.replicas_up[b] = ready - part * fleet_s / p.dt_s + x.joining
        x.new_share = s.rollout_share[b] + 0.5 * part
        s.rollout_share[b] += part
        if s.rollout_share[b] > 1.0 - EPS_SHARE:
            s.rollout_share[b] = 1.0
    x.up = max(s.replicas_up[b], EPS)


def start_rollout(s: State, b: int, tier: int, disagg: int) -> None:
    """Aim at another configuration; what most replicas run now is where the fleet comes from."""
    done = s.rollout_share[b]
    if done < 1.0 and tier == s.tier_old[b] and disagg == s.disagg_old[b]:
        # Back to where it came from: the replicas not yet restarted are already there.
        s.tier_old[b] = s.tier_new[b]
        s.disagg_old[b] = s.disagg_new[b]
        s.rollout_share[b] = 1.0 - done
    else:
        if done >= 0.5:
            s.tier_old[b] = s.tier_new[b]
            s.disagg_old[b] = s.disagg_new[b]
        s.rollout_share[b] = 0.0
    s.tier_new[b] = tier
    s.disagg_new[b] = disagg


def receive_arrivals(p: Params, load: Load, s: State, b: int, t: int) -> None:
    """Arrivals join their class queues; rolling statistics of the offered load."""
    w = load.index[b]
    requests = 0.0
    tokens = 0.0
    for c in range(p.n_classes):
        arrived = load.arrivals[w, t, c]
        s.waiting[b, c, t] = arrived
        s.queue[b, c] += arrived
        s.class_window[b, c] += arrived
        if t >= p.class_window_steps:
            s.class_window[b, c] -= load.arrivals[w, t - p.class_window_steps, c]
        requests += arrived
        tokens += load.prompt_tokens[w, t, c]
        if t >= p.prompt_window_steps:
            tokens -= load.prompt_tokens[w, t - p.prompt_window_steps, c]
            s.prompt_window_requests[b] -= load.arrivals[w, t - p.prompt_window_steps, c]
    s.prompt_window_requests[b] += requests
    s.prompt_window_tokens[b] += tokens
    s.rate_ema[b] += p.ema_weight * (requests / p.dt_s - s.rate_ema[b])


def allocate_memory(p: Params, knobs: Knobs, s: State, x: Scratch, m: Metrics, b: int) -> None:
    """GPU memory and KV pool of a replica, where prefill runs, and what the cache still holds of prefixes."""
    new = x.new_share
    draft_gb = p.draft_gb if knobs.spec[b] > 0 else 0.0
    weights_gb = p.weights_gb[s.tier_new[b]]
    if new < 1.0:
        weights_gb = max(weights_gb, p.weights_gb[s.tier_old[b]])
    # Engines allocate the pool at their start: kv_budget is a share of what is free then.
    pool_gb = knobs.kv_budget[b] * (p.memory_gb - weights_gb - p.activation_gb - p.workspace_gb - draft_gb)
    x.kv_pool_tokens = pool_gb * 1e9 / p.kv_bytes_per_token
    used_gb = weights_gb + p.activation_gb + p.sequence_gb * knobs.batch_size[b] + draft_gb + pool_gb
    m.oom[b] = 1.0 if used_gb > p.memory_limit_gb else 0.0
    m.gpu_memory_gb[b] = min(used_gb, p.memory_limit_gb)
    x.disagg_share = new * s.disagg_new[b] + (1.0 - new) * s.disagg_old[b]
    if p.reuse_points > 0:
        pool_tokens = x.up * x.kv_pool_tokens
        x.prefix_hit = prefix_hit_share(p, min(s.cached_tokens[b], pool_tokens))


def prefix_hit_share(p: Params, cached_tokens: float) -> float:
    """Share of repeated prefix tokens that a cache of the ``cached_tokens`` used last still holds (LRU curve)."""
    y = log(max(cached_tokens, 1.0)) / LN_2 - p.reuse_log2_first
    if y <= 0.0:
        return p.reuse_hit[0] * exp(LN_2 * y)
    i = cython.cast(cython.Py_ssize_t, y)
    if i >= p.reuse_points - 1:
        return p.reuse_hit[p.reuse_points - 1]
    return p.reuse_hit[i] + (y - i) * (p.reuse_hit[i + 1] - p.reuse_hit[i])


def preempt(p: Params, s: State, x: Scratch, b: int, t: int) -> None:
    """Take the KV cache from requests in flight: of replicas that restart, and of the last ones beyond the pool.

    As in vLLM with ``--scheduling-policy priority``: the lowest class loses first, within a class the request admitted
    last. A preempted request comes back when there is room, and its prompt and outputs so far are computed again.
    """
    x.preempted = 0.0
    if x.restarted_share > 0.0:
        # One replica is down already while the next one restarts, so the others hold more than their share.
        ready = s.replicas_ready[b]
        interrupt(p, s, x, b, min(1.0, x.restarted_share * ready / max(ready - 1.0, 1.0)))
    excess = -x.up * x.kv_pool_tokens
    for c in range(p.n_classes):
        # Requests on replicas that drain have the pools of these.
        excess += x.staying_share * (
            s.prompts_in_flight[b, c] + s.positions_in_flight[b, c] + p.block_slack_tokens[c] * s.in_flight[b, c]
        )
    if excess <= EPS_REQUESTS:
        return
    locate_edges(p, s, x, b, t, 0.0)
    c = p.n_classes - 1
    while c >= 0 and excess > EPS_REQUESTS:
        k = t - 1
        while k >= s.first_running[b, c] and excess > EPS_REQUESTS and s.in_flight[b, c] > EPS_REQUESTS:
            measure_cohort(p, s, x, b, c, k, t, s.progress[b, t])
            requests = s.density[b, c, k] * x.cohort_requests
            prompt_tokens = s.prompts_in_flight[b, c] / s.in_flight[b, c]
            tokens = requests * (prompt_tokens + p.block_slack_tokens[c]) + s.density[b, c, k] * x.cohort_positions
            if requests > EPS_REQUESTS:
                share = min(1.0, excess / tokens)
                take_out(p, s, x, b, c, k, share)
                excess -= share * tokens
            k -= 1
        c -= 1


def interrupt(p: Params, s: State, x: Scratch, b: int, share: float) -> None:
    """Preempt a share of everything in flight."""
    stay = 1.0 - share
    for c in range(p.n_classes):
        x.preempted += share * s.in_flight[b, c]
        s.preempted[b, c] += share * s.in_flight[b, c]
        s.preempted_prompts[b, c] += share * s.prompts_in_flight[b, c]
        s.preempted_positions[b, c] += share * s.positions_in_flight[b, c]
        s.in_flight[b, c] *= stay
        s.prompts_in_flight[b, c] *= stay
        s.positions_in_flight[b, c] *= stay
        s.written_tokens[b, c] *= stay
        for k in range(s.first_running[b, c], s.time[b]):
            s.density[b, c, k] *= stay


def measure_cohort(p: Params, s: State, x: Scratch, b: int, c: int, k: int, end: int, progress: float) -> None:
    """What still runs of the cohort admitted in step ``k``, per unit of its density, at the edge ``end`` of a step.

    Edges must be located there. Requests, their outputs so far, and tokens written by these and by the ended ones.
    """
    at = x.edge_at[k]
    u = x.edge_part[k]
    x.cohort_requests = p.length_integrals[c, at] + u * p.length_integrals[c, at + 2]
    x.cohort_positions = p.length_integrals[c, at + 1] + u * p.length_integrals[c, at + 3]
    x.cohort_written = written_up_to(p, x, c, k, progress - s.progress[b, k])
    if k + 1 < end:
        at = x.edge_at[k + 1]
        u = x.edge_part[k + 1]
        x.cohort_requests -= p.length_integrals[c, at] + u * p.length_integrals[c, at + 2]
        x.cohort_positions -= p.length_integrals[c, at + 1] + u * p.length_integrals[c, at + 3]
        x.cohort_written -= written_up_to(p, x, c, k + 1, progress - s.progress[b, k + 1])
    x.cohort_written -= x.cohort_positions


def take_out(p: Params, s: State, x: Scratch, b: int, c: int, k: int, share: float) -> None:
    """Preempt a share of the cohort that :func:`measure_cohort` measured last."""
    density = share * s.density[b, c, k]
    requests = min(density * x.cohort_requests, s.in_flight[b, c])
    prompts = requests * s.prompts_in_flight[b, c] / s.in_flight[b, c]
    x.preempted += requests
    s.preempted[b, c] += requests
    s.preempted_prompts[b, c] += prompts
    s.preempted_positions[b, c] += density * x.cohort_positions
    s.density[b, c, k] -= density
    s.in_flight[b, c] -= requests
    s.prompts_in_flight[b, c] -= prompts
    s.positions_in_flight[b, c] -= min(density * x.cohort_positions, s.positions_in_flight[b, c])
    s.written_tokens[b, c] -= density * x.cohort_written


def put_back(p: Params, s: State, x: Scratch, b: int, c: int, t: int) -> None:
    """Let the resumed requests of a class run on, with the cohort that has written as many tokens as they have."""
    n = x.resumed[c]
    share = n / s.preempted[b, c]
    progress = s.progress[b, t + 1]
    position = s.preempted_positions[b, c] / s.preempted[b, c]
    k = s.first_running[b, c]
    while k < t and progress - s.progress[b, k + 1] > position:
        k += 1
    measure_cohort(p, s, x, b, c, k, t + 1, progress)
    while k < t and x.cohort_requests < EPS_REQUESTS:  # of the oldest ones hardly any request is left
        k += 1
        measure_cohort(p, s, x, b, c, k, t + 1, progress)
    density = n / x.cohort_requests
    s.density[b, c, k] += density
    s.in_flight[b, c] += n
    s.prompts_in_flight[b, c] += share * s.preempted_prompts[b, c]
    s.positions_in_flight[b, c] += density * x.cohort_positions
    s.written_tokens[b, c] += density * x.cohort_written
    s.preempted[b, c] *= 1.0 - share
    s.preempted_prompts[b, c] *= 1.0 - share
    s.preempted_positions[b, c] *= 1.0 - share


def measure_queue_heads(p: Params, load: Load, knobs: Knobs, s: State, x: Scratch, b: int, t: int) -> None:
    """Mean prompt and prefill work of the requests of each class that could be admitted in this step."""
    w = load.index[b]
    slots = s.replicas_up[b] * knobs.batch_size[b] + 1.0
    for c in range(p.n_classes):
        left = min(slots, s.queue[b, c])
        tokens = 0.0
        work_ms = 0.0
        taken = 0.0
        j = oldest_waiting(s, b, c, t)
        s.first_waiting[b, c] = j
        while j <= t and left > EPS_FLOW:
            n = min(s.waiting[b, c, j], left)
            if n > 0.0:
                part = n / load.arrivals[w, j, c]
                tokens += part * load.prompt_tokens[w, j, c]
                work_ms = add_listed_work(p, load, s, x, b, c, j, part, work_ms)
                taken += n
                left -= n
            j += 1
        if taken > 0.0:
            x.head_prompt_tokens[c] = tokens / taken
            x.head_work_ms[c] = work_ms / taken
        else:
            x.head_prompt_tokens[c] = p.mean_prompt_tokens[c]
            x.head_work_ms[c] = p.mean_work_ms[c, s.tier_new[b]]
        # What an admission into a full pool recomputes: a mean output, in prompts of this class.
        mean_output = p.block_growth[c] * p.length_integrals[c, 4 * p.grid_cells]
        x.churn_prompts[c] = min(mean_output / x.head_prompt_tokens[c], MAX_CHURN_PROMPTS)


def oldest_waiting(s: State, b: int, c: int, t: int) -> int:
    """The first step of arrival with requests that still wait, ``t`` if there is none before."""
    j = s.first_waiting[b, c]
    while j < t and s.waiting[b, c, j] <= EPS_REQUESTS:
        j += 1
    return j


def add_listed_work(
    p: Params, load: Load, s: State, x: Scratch, b: int, c: int, j: int, part: float, work_ms: float
) -> float:
    """``work_ms`` and the listed prefill work of a part of step ``j``'s arrivals, less what the prefix cache holds."""
    w = load.index[b]
    new = x.new_share
    arrived_ms = load.prefill_work_ms[w, j, c, s.tier_new[b]]
    if new < 1.0:
        arrived_ms = new * arrived_ms + (1.0 - new) * load.prefill_work_ms[w, j, c, s.tier_old[b]]
    work_ms += part * arrived_ms
    hit = x.prefix_hit if p.reuse_points > 0 else 0.0
    if hit > 0.0:
        work_ms -= (hit * part) * (
            new * load.saved_work_ms[w, j, c, s.tier_new[b]] + (1.0 - new) * load.saved_work_ms[w, j, c, s.tier_old[b]]
        )
    return work_ms


def limit_prefill(p: Params, load: Load, knobs: Knobs, s: State, x: Scratch, b: int, t: int) -> None:
    """How much of the time prefill may take, and what a prompt takes, in the batch with which the step begins."""
    w = load.index[b]
    in_flight = 0.0
    kv_tokens = 0.0
    backlog = 0.0
    arrived_ms = 0.0
    for c in range(p.n_classes):
        in_flight += s.in_flight[b, c]
        kv_tokens += s.prompts_in_flight[b, c] + s.positions_in_flight[b, c]
        backlog += s.queue[b, c] - load.arrivals[w, t, c]
        arrived_ms += load.arrivals[w, t, c] * x.head_work_ms[c]
    batch = min(x.staying_share * in_flight / x.up, p.batch_points[p.n_batch_points - 1])
    context = max(kv_tokens / max(in_flight, EPS), 1.0)
    decoding = max(batch, 1.0)
    iteration_ms = decode_iteration_ms(p, knobs, s, x, b, decoding, context)
    # In an iteration full of prompts, prefill takes this share of the time; the decodes keep theirs.
    x.full_ms = prompt_tokens_per_iteration(p, knobs, b, batch) * prefill_ms_per_token(p, s, x, b)
    x.prefill_cap = p.disagg_limit if p.prefill_first else x.full_ms / (x.full_ms + iteration_ms)
    x.prefill_limit = x.prefill_cap + (p.disagg_limit - x.prefill_cap) * x.disagg_share
    # Where requests wait, whatever lets them in lets in as many as before; else all that come are let in.
    share = s.prefill_share[b] if backlog > MIN_BACKLOG else min(arrived_ms / (x.up * p.dt_ms), x.prefill_limit)
    crowding = share
    if p.prefill_first:
        crowding = share_of_iteration(p, s, x, b, share, (1.0 - exp(-batch)) * iteration_ms)
    for c in range(p.n_classes):
        fused = prefill_ratio(p, s, b, c, s.tier_new[b], decoding, crowding)
        x.prefill_ratio[c] = (1.0 - x.disagg_share) * fused + x.disagg_share * p.dedicated_ratio[c, s.tier_new[b]]


def share_of_iteration(p: Params, s: State, x: Scratch, b: int, share: float, decode_ms: float) -> float:
    """1 - 1/n, with n the prompts in one iteration of their own; notes how long it takes.

    An engine that computes prompts first takes into one iteration what came during the last: one of the decodes, or one
    of prompts, of F + n * work. With ``share`` the arrivals per ms times the work of a prompt, n = share / work *
    (decode + F) / (1 - share).
    """
    work_ms = 0.0
    fixed_ms = 0.0
    tokens = 0.0
    requests = 0.0
    for c in range(p.n_classes):
        weight = s.queue[b, c] + EPS_WEIGHT
        full = p.saturated_ratio[c, s.tier_new[b], 0]
        work_ms += weight * x.head_work_ms[c] * full
        fixed_ms += weight * fixed_prefill_ms(p, s, b, c)
        tokens += weight * x.head_prompt_tokens[c]
        requests += weight
    work_ms /= requests
    fixed_ms /= requests
    came = share / work_ms * (decode_ms + fixed_ms) / (1.0 - min(share, p.disagg_limit))
    n = max(1.0, min(came, p.token_budget * requests / tokens))
    x.prompts_ms = fixed_ms + n * work_ms
    x.prompts_work_share = n * work_ms / x.prompts_ms
    return 1.0 - 1.0 / n


# ---------------------------------------------------------------- fixed point of one step


def solve(p: Params, knobs: Knobs, s: State, x: Scratch, m: Metrics, b: int, t: int) -> float:
    """Tokens that a running request gains in this step: the fixed point of :func:`next_gain`.

    Where prefill fills the step, a larger gain lets more requests in, whose prefill makes the gain that follows much
    smaller: substitution alone would jump between two values for ever. So the excess log(next_gain(g)) - log(g), which
    falls as g grows, is brought to 0 by secants through the last two gains. What was solved last is consistent with the
    gain that it was given, so that gain is what happens.
    """
    gain = s.gain_tokens[b] if t > 0 else FIRST_GUESS_TOKENS_PER_MS * p.dt_ms
    at = log(gain)
    excess = log(next_gain(p, knobs, s, x, m, b, t, gain)) - at
    step = excess
    sweeps = 1
    while abs(excess) > GAIN_RESIDUAL and sweeps < MAX_SWEEPS:
        last_excess = excess
        at += step
        gain = exp(at)
        excess = log(next_gain(p, knobs, s, x, m, b, t, gain)) - at
        sweeps += 1
        fall = (last_excess - excess) / step
        step = excess / fall if fall > MIN_FALL else excess
    return gain


def next_gain(p: Params, knobs: Knobs, s: State, x: Scratch, m: Metrics, b: int, t: int, gain: float) -> float:
    """The gain that follows from the admissions and the batch at a gain of ``gain`` tokens."""
    find_survivors(p, s, x, b, t, gain)
    in_flight, kv_tokens = admit(p, knobs, s, x, b, gain)
    return tokens_gained(p, knobs, s, x, m, b, in_flight, kv_tokens)


def locate_edges(p: Params, s: State, x: Scratch, b: int, t: int, gain: float) -> None:
    """Where in ``length_integrals`` the edges of all cohorts lie after ``gain`` more tokens: cell and part of it.

    Progress never falls, so edges beyond the grid come first: without them the loop has no branch and is compiled to
    instructions that locate several edges at once.
    """
    first = s.first_running[b, 0]
    for c in range(1, p.n_classes):
        first = min(first, s.first_running[b, c])
    end = s.progress[b, t] + gain
    cells_per_token = p.cells_per_token
    while first <= t and (end - s.progress[b, first]) * cells_per_token >= p.grid_cells:
        x.edge_at[first] = 4 * p.grid_cells
        x.edge_part[first] = 0.0
        first += 1
    for k in range(first, t + 1):
        cells = (end - s.progress[b, k]) * cells_per_token
        i = cython.cast(cython.int, cells)
        x.edge_at[k] = 4 * i
        x.edge_part[k] = cells - i


def find_survivors(p: Params, s: State, x: Scratch, b: int, t: int, gain: float) -> None:
    """Requests in flight before this step that still run after ``gain`` more tokens, and their summed positions."""
    locate_edges(p, s, x, b, t, gain)
    for c in range(p.n_classes):
        find_class_survivors(p, s, x, b, t, c)


def find_class_survivors(p: Params, s: State, x: Scratch, b: int, t: int, c: int) -> None:
    """Survivors of one class.

    Classes share the edges of all cohorts and neighbouring cohorts share one, so each is located once and looked up
    once per class. Requests and positions lie side by side in ``length_integrals`` and ``survivors``, so that a
    compiler computes both at once: this loop is where most of a step's time goes.
    """
    requests = 0.0
    positions = 0.0
    k = s.first_running[b, c]
    at = x.edge_at[k]
    u = x.edge_part[k]
    older = p.length_integrals[c, at] + u * p.length_integrals[c, at + 2]
    older_pos = p.length_integrals[c, at + 1] + u * p.length_integrals[c, at + 3]
    while k < t:
        at = x.edge_at[k + 1]
        u = x.edge_part[k + 1]
        younger = p.length_integrals[c, at] + u * p.length_integrals[c, at + 2]
        younger_pos = p.length_integrals[c, at + 1] + u * p.length_integrals[c, at + 3]
        density = s.density[b, c, k]
        requests += density * (older - younger)
        positions += density * (older_pos - younger_pos)
        older = younger
        older_pos = younger_pos
        k += 1
    x.survivors[c, 0] = requests
    x.survivors[c, 1] = positions


def admit(p: Params, knobs: Knobs, s: State, x: Scratch, b: int, gain: float) -> tuple[float, float]:
    """Admit by class into free slots, prefill time and KV cache; returns requests in flight and their KV tokens.

    Both are means of the step's two ends, without what replicas that drain still serve: those take no room from the
    others and gain as many tokens. Admissions are spread over the step, so their positions at its end are uniform in
    0..``gain``, and the mean of S over these is the share that still runs, ``stay``.
    """
    kv_pool = x.up * x.kv_pool_tokens
    slots = open_slots(p, knobs, s, x, b)
    budget_ms = x.prefill_limit * x.up * p.dt_ms
    running = 0.0
    for c in range(p.n_classes):
        running += x.staying_share * x.survivors[c, 0]
    draining_share = 1.0 - x.staying_share
    cells = gain * p.cells_per_token
    i = cython.cast(cython.Py_ssize_t, cells) if cells < p.grid_cells else p.grid_cells
    at = 4 * i
    u = cells - i
    prefill_ms = 0.0
    in_flight = 0.0
    mean_tokens = 0.0
    kv_tokens = 0.0
    blocked = False
    for c in range(p.n_classes):
        keep = x.survivors[c, 0] / s.in_flight[b, c] if s.in_flight[b, c] > EPS_FLOW else 0.0
        x.end_prompts[c] = s.prompts_in_flight[b, c] * keep
        # Lower classes give way in the pool, so only what this one and higher ones hold counts.
        slack_tokens = p.block_slack_tokens[c]
        kv_tokens += x.staying_share * (x.end_prompts[c] + x.survivors[c, 1] + slack_tokens * x.survivors[c, 0])
        elsewhere = draining_share * (s.in_flight[b, c] + x.survivors[c, 0])
        elsewhere_tokens = draining_share * (
            s.prompts_in_flight[b, c] + x.end_prompts[c] + s.positions_in_flight[b, c] + x.survivors[c, 1]
        )
        x.resumed[c] = 0.0
        if s.preempted[b, c] > EPS_REQUESTS:
            tokens = (s.preempted_prompts[b, c] + s.preempted_positions[b, c]) / s.preempted[b, c]
            each_ms = tokens * x.head_work_ms[c] / x.head_prompt_tokens[c] * x.prefill_ratio[c]
            each_kv = tokens + slack_tokens
            n = min(max(0.0, slots - running), budget_ms / max(each_ms, EPS), max(0.0, kv_pool - kv_tokens) / each_kv)
            blocked = blocked or n < s.preempted[b, c]
            n = min(n, s.preempted[b, c]) if n > EPS_REQUESTS else 0.0
            x.resumed[c] = n
            running += n
            kv_tokens += n * each_kv
            budget_ms -= n * each_ms
            prefill_ms += n * each_ms
            in_flight += 0.5 * n
            mean_tokens += 0.5 * n * tokens
        stay = (p.length_integrals[c, at] + u * p.length_integrals[c, at + 2]) / gain
        stay_pos = (p.length_integrals[c, at + 1] + u * p.length_integrals[c, at + 3]) / gain
        each_kv = (x.head_prompt_tokens[c] + slack_tokens) * stay + stay_pos
        room = max(0.0, slots - running) / stay
        room = room_in_cache(s, x, b, c, room, max(0.0, kv_pool - kv_tokens) / max(each_kv, EPS))
        each_ms = admission_ms(p, x, c)
        room = min(room, max(0.0, budget_ms) / max(each_ms, EPS))
        if blocked:  # nobody new starts before those of its own and of higher classes run again
            room = 0.0
        if running + s.queue[b, c] <= 1.0 and s.replicas_up[b] > MIN_REPLICAS_UP:
            room = max(room, 1.0)  # an empty replica always takes one request, however long
        n = min(s.queue[b, c], room)
        if n <= EPS_REQUESTS:  # what rounding leaves of a budget, or of a fleet that is down, lets nobody in
            n = 0.0
        x.admissible[c] = max(room, n)
        x.admitted[c] = n
        running += n * stay
        kv_tokens += n * each_kv
        budget_ms -= n * each_ms
        prefill_ms += n * each_ms
        x.end_requests[c] = x.survivors[c, 0] + n * stay
        x.end_positions[c] = x.survivors[c, 1] + n * stay_pos
        x.end_prompts[c] += n * stay * x.head_prompt_tokens[c]
        in_flight += 0.5 * (s.in_flight[b, c] + x.end_requests[c] - elsewhere)
        mean_tokens += 0.5 * (
            s.prompts_in_flight[b, c]
            + x.end_prompts[c]
            + s.positions_in_flight[b, c]
            + x.end_positions[c]
            - elsewhere_tokens
        )
    x.prefill_ms = prefill_ms
    return in_flight, mean_tokens


def open_slots(p: Params, knobs: Knobs, s: State, x: Scratch, b: int) -> float:
    """Slots of the fleet for requests that decode: those whose prompt is under way hold slots as well."""
    slots = x.up * knobs.batch_size[b]
    slots -= min(s.prefilling[b], MAX_PREFILLING_SHARE * slots)
    if p.closed_clients > 0.0:
        slots = min(slots, p.closed_clients)
    return slots


def room_in_cache(s: State, x: Scratch, b: int, c: int, room: float, fit: float) -> float:
    """Requests of a class for which there is room, of which ``fit`` fit into the KV pool; notes how that bounds them.

    An engine admits a request when its prompt fits into the free part of the pool, and preempts the youngest when the
    others grow: as many more come and go as wait for a slot that is free, ``churn_prompts`` for one that stays at most.
    """
    more = max(0.0, min(room, s.queue[b, c]) - fit)
    x.kv_bound[c] = min(1.0, more / max(fit * x.churn_prompts[c], EPS))
    return min(room, fit)


def admission_ms(p: Params, x: Scratch, c: int) -> float:
    """Prefill time of one admission (ms): its prompt, and what the pool recomputes for it; writes the first alone."""
    prompt_ms = x.head_work_ms[c] * x.prefill_ratio[c]
    x.prompt_ms[c] = prompt_ms
    # In a full pool an admission takes the cache of another request, which is recomputed.
    return prompt_ms * (1.0 + p.churn_factor * x.kv_bound[c] * x.churn_prompts[c])


def tokens_gained(
    p: Params, knobs: Knobs, s: State, x: Scratch, m: Metrics, b: int, in_flight: float, kv_tokens: float
) -> float:
    """Tokens that a request gains in a step, from the batch that shares a replica and the prefill beside it."""
    # While every replica restarts there are none to share the requests: the table's largest batch is the bound.
    batch = min(in_flight / x.up, p.batch_points[p.n_batch_points - 1])
    context = max(kv_tokens / max(in_flight, EPS), 1.0)
    # What grows beyond the pool within the step runs by turns; the next step preempts it.
    resident = max(min(batch, x.kv_pool_tokens / (context + mean_block_slack(p, s, x, b))), EPS)
    iteration_ms = decode_iteration_ms(p, knobs, s, x, b, max(resident, 1.0), context)
    s.prefill_share[b] = min(x.prefill_ms / (x.up * p.dt_ms), x.prefill_limit)
    stolen_share = s.prefill_share[b] * (1.0 - x.disagg_share)
    tpot = iteration_ms / tokens_per_verify(p, knobs, s, x, b) / (1.0 - stolen_share)
    if batch > resident:
        tpot *= batch / resident
    if m.oom[b] > 0.0:
        tpot *= p.oom_slowdown
    x.iteration_ms = iteration_ms
    s.resident[b] = resident
    s.context_tokens[b] = context
    if s.replicas_up[b] < MIN_REPLICAS_UP:
        return MIN_GAIN_TOKENS
    return max(p.dt_ms / tpot, MIN_GAIN_TOKENS)


def mean_block_slack(p: Params, s: State, x: Scratch, b: int) -> float:
    """KV tokens that a request holds beyond its context, of the classes as they run."""
    tokens = 0.0
    requests = 0.0
    for c in range(p.n_classes):
        weight = s.in_flight[b, c] + x.admitted[c] + EPS
        tokens += weight * p.block_slack_tokens[c]
        requests += weight
    return tokens / requests


def prompt_tokens_per_iteration(p: Params, knobs: Knobs, b: int, resident: float) -> float:
    """Prompt tokens that fit beside the decodes (a token and its drafts each) into an iteration's token budget.

    All of the budget where prompts have iterations of their own.
    """
    if p.prefill_first:
        return p.token_budget
    decode_tokens = resident * (1.0 + p.spec_length[knobs.spec[b]])
    return max(p.token_budget - decode_tokens, MIN_PREFILL_SHARE * p.token_budget)


def prefill_ms_per_token(p: Params, s: State, x: Scratch, b: int) -> float:
    """Prefill time per prompt token of what waits, in iterations full of it."""
    work_ms = 0.0
    tokens = 0.0
    for c in range(p.n_classes):
        weight = s.queue[b, c] + EPS_WEIGHT
        work_ms += weight * x.head_work_ms[c]
        tokens += weight * x.head_prompt_tokens[c]
    return work_ms / tokens


def tokens_per_verify(p: Params, knobs: Knobs, s: State, x: Scratch, b: int) -> float:
    """Tokens per verification step of speculative decoding, of the classes as they run; 1 without drafts."""
    spec = knobs.spec[b]
    if spec == 0:
        return 1.0
    rate = 0.0
    requests = 0.0
    for c in range(p.n_classes):
        weight = s.in_flight[b, c] + x.admitted[c] + EPS
        rate += weight * p.accept_scale[c]
        requests += weight
    return 1.0 + (p.spec_tokens[spec] - 1.0) * rate / requests


# ---------------------------------------------------------------- look-ups in the operator table


def decode_iteration_ms(
    p: Params, knobs: Knobs, s: State, x: Scratch, b: int, requests: float, context: float
) -> float:
    """Time of one decode iteration; during a rollout the mean of both precisions."""
    new = x.new_share
    iteration_ms = decode_ms(p, s, b, s.tier_new[b], knobs.spec[b], requests, context)
    if new < 1.0:
        old_ms = decode_ms(p, s, b, s.tier_old[b], knobs.spec[b], requests, context)
        iteration_ms = new * iteration_ms + (1.0 - new) * old_ms
    return iteration_ms


def decode_ms(p: Params, s: State, b: int, tier: int, spec: int, requests: float, context: float) -> float:
    """Time of one decode iteration: bilinear in requests and context, as GEMM rows and KV reads are.

    Searches begin where the last one of this row ended, which is mostly where they end.
    """
    i = s.iteration_cell[b]
    while i > 0 and requests < p.iteration_points[i]:
        i -= 1
    while i < p.n_iteration_points - 2 and requests >= p.iteration_points[i + 1]:
        i += 1
    s.iteration_cell[b] = i
    j = s.context_cell[b]
    while j > 0 and context < p.context_points[j]:
        j -= 1
    while j < p.n_context_points - 2 and context >= p.context_points[j + 1]:
        j += 1
    s.context_cell[b] = j
    u = (requests - p.iteration_points[i]) / (p.iteration_points[i + 1] - p.iteration_points[i])
    v = max((context - p.context_points[j]) / (p.context_points[j + 1] - p.context_points[j]), 0.0)
    return (1.0 - u) * ((1.0 - v) * p.decode_ms[tier, spec, i, j] + v * p.decode_ms[tier, spec, i, j + 1]) + u * (
        (1.0 - v) * p.decode_ms[tier, spec, i + 1, j] + v * p.decode_ms[tier, spec, i + 1, j + 1]
    )


def prefill_ratio(p: Params, s: State, b: int, c: int, tier: int, requests: float, prefill_share: float) -> float:
    """Prefill time of a request relative to its listed work, fused into a batch of ``requests``.

    A lone prompt rides on decode iterations that stream the weights anyway; the fuller the prefill, the closer its
    cost comes to that of iterations full of prompts.
    """
    i = s.batch_cell[b]
    while i > 0 and requests < p.batch_points[i]:
        i -= 1
    while i < p.n_batch_points - 2 and requests >= p.batch_points[i + 1]:
        i += 1
    s.batch_cell[b] = i
    u = (requests - p.batch_points[i]) / (p.batch_points[i + 1] - p.batch_points[i])
    lone = (1.0 - u) * p.fused_ratio[c, tier, i] + u * p.fused_ratio[c, tier, i + 1]
    full = (1.0 - u) * p.saturated_ratio[c, tier, i] + u * p.saturated_ratio[c, tier, i + 1]
    return lone + (full - lone) * prefill_share


# ---------------------------------------------------------------- bookkeeping


def commit(p: Params, s: State, x: Scratch, m: Metrics, b: int, t: int, gain: float) -> None:
    """Make the solution the state; the cohort that was admitted enters the fluid."""
    progress = s.progress[b, t] + gain
    s.progress[b, t + 1] = progress
    admitted = 0.0
    completed = 0.0
    running = 0.0
    written = 0.0
    for c in range(p.n_classes):
        n = x.admitted[c]
        s.density[b, c, t] = n / gain
        prefill_share = min(1.0, n * x.prompt_ms[c] / (x.up * p.dt_ms))
        s.prefill_load[b, c] += p.load_weight * (prefill_share - s.prefill_load[b, c])
        completed += s.in_flight[b, c] + n - x.end_requests[c]
        running += 0.5 * (s.in_flight[b, c] + x.end_requests[c])
        s.in_flight[b, c] = x.end_requests[c]
        s.prompts_in_flight[b, c] = x.end_prompts[c]
        s.positions_in_flight[b, c] = x.end_positions[c]
        s.queue[b, c] -= n
        if s.queue[b, c] < EPS_REQUESTS:
            s.queue[b, c] = 0.0
        admitted += n
        written += write_tokens(p, s, x, b, t, c, progress)
        if x.resumed[c] > 0.0:
            put_back(p, s, x, b, c, t)
        retire_cohorts(p, s, b, t, c, progress)
    m.admitted[b] = admitted
    m.completed[b] = completed
    m.running_requests[b] = running
    m.tokens_per_sec[b] = written / p.dt_s if written > EPS_REQUESTS else 0.0
    if x.staying_share < 1.0:
        keep_draining(p, s, x, b)
    measure_cache(p, s, x, m, b, written)


def keep_draining(p: Params, s: State, x: Scratch, b: int) -> None:
    """What replicas that drain still serve after the step: the share of survivors that was theirs, and nothing new."""
    survivors = 0.0
    in_flight = 0.0
    for c in range(p.n_classes):
        survivors += x.survivors[c, 0]
        in_flight += s.in_flight[b, c]
    s.draining_requests[b] = (1.0 - x.staying_share) * survivors
    x.staying_share = 1.0 - min(1.0, s.draining_requests[b] / max(in_flight, EPS))


def write_tokens(p: Params, s: State, x: Scratch, b: int, t: int, c: int, progress: float) -> float:
    """Tokens that a class's requests wrote in the step that ends at ``progress``: never more than their outputs.

    A request that could have gained y tokens has written the integral of S up to y, on average, because it may have
    ended before. Over the positions of a cohort, that sums to y times this integral less the one of y*S. (Requests in
    flight at both ends of a step would tell wrongly: many may come and go within it.)
    """
    total = 0.0
    before = 0.0
    for k in range(s.first_running[b, c], t + 1):
        density = s.density[b, c, k]
        # Up to this edge one cohort counts, beyond it the one before.
        total += (density - before) * written_up_to(p, x, c, k, progress - s.progress[b, k])
        before = density
    total -= x.end_positions[c]  # the integrals of y*S, summed in the same way
    written = total - s.written_tokens[b, c]
    s.written_tokens[b, c] = total
    return max(written, 0.0)


def written_up_to(p: Params, x: Scratch, c: int, k: int, y: float) -> float:
    """``y`` times the integral of S up to ``y``, where edge ``k`` is located, and the bend of the integral of y*S."""
    at = x.edge_at[k]
    u = x.edge_part[k]
    part = p.length_integrals[c, at + 2]
    # Within a cell S is even, so the integral of y*S, a line in the table, is a parabola.
    bend = 0.5 / p.cells_per_token * u * (1.0 - u) * part
    return y * (p.length_integrals[c, at] + u * part) + bend


def retire_cohorts(p: Params, s: State, b: int, t: int, c: int, progress: float) -> None:
    """Leave cohorts behind that have ended altogether; each of their requests wrote a mean output."""
    mean_output = p.length_integrals[c, 4 * p.grid_cells]
    k = s.first_running[b, c]
    while k < t and progress - s.progress[b, k + 1] > p.longest_output[c]:
        ended = s.density[b, c, k] * (s.progress[b, k + 1] - s.progress[b, k])
        s.written_tokens[b, c] -= ended * mean_output
        k += 1
    s.first_running[b, c] = k


def measure_cache(p: Params, s: State, x: Scratch, m: Metrics, b: int, written: float) -> None:
    """Occupancy of the KV pools, prefixes that they hold, preemptions, and how much they bound admission."""
    pool = x.up * x.kv_pool_tokens
    kv_tokens = 0.0
    churned = 0.0
    for c in range(p.n_classes):
        kv_tokens += x.staying_share * (x.end_prompts[c] + x.end_positions[c])
        if p.occupancy_in_blocks:
            kv_tokens += x.staying_share * p.block_slack_tokens[c] * x.end_requests[c]
        # A preempted request comes back with its prompt and some of its output.
        mean_output = p.block_growth[c] * p.length_integrals[c, 4 * p.grid_cells]
        again = x.head_prompt_tokens[c] + CHURNED_OUTPUT_TOKENS
        churned += x.kv_bound[c] * x.admitted[c] * min(mean_output / again, MAX_CHURN_PROMPTS)
    m.kv_occupancy[b] = min(1.0, kv_tokens / max(pool, 1.0))
    if p.reuse_points > 0:
        # Freed blocks keep their content until others need them; a replica that restarts forgets it.
        cached = s.cached_tokens[b] * (1.0 - x.restarted_share) + written
        for c in range(p.n_classes):
            cached += x.admitted[c] * x.head_prompt_tokens[c]
        s.cached_tokens[b] = min(cached, pool)
    m.eviction_events[b] = x.preempted + churned


# ---------------------------------------------------------------- time to the first token


def measure_ttft(p: Params, load: Load, knobs: Knobs, s: State, x: Scratch, m: Metrics, b: int, t: int) -> None:
    """TTFT of what was admitted: waits from the arrival and admission curves, then what follows admission."""
    missed = 0.0
    judged = 0.0
    prefilling = 0.0
    x.n_pieces = 0
    estimate_ttft(p, knobs, s, x, m, b)
    for c in range(p.n_classes):
        missed += take_from_queue(p, load, s, x, b, t, c)
        judged += x.admitted[c]
        # Little's law: requests between admission and first token.
        prefilling += x.admitted[c] * (x.first_token_p50_ms[c] - p.ttft_offset_ms) / p.dt_ms
        overdue = overdue_in_queue(p, s, b, t, c)
        missed += overdue
        judged += overdue
    s.prefilling[b] += STEP_SMOOTHING * (prefilling - s.prefilling[b])
    x.missed_requests = missed
    x.judged_requests = judged
    if x.n_pieces == 0:
        report_head_of_line(p, s, x, m, b, t)
    else:
        m.ttft_p50_ms[b] = ttft_quantile(x, 0.50, 0)
        m.ttft_p99_ms[b] = max(ttft_quantile(x, 0.99, 1), m.ttft_p50_ms[b])


def estimate_ttft(p: Params, knobs: Knobs, s: State, x: Scratch, m: Metrics, b: int) -> None:
    """Distribution of the time from admission to the first token, per class, from stationary queueing formulas."""
    seen = x.staying_share * m.running_requests[b] / x.up
    if p.closed_clients > 0.0:
        seen *= 1.0 - 1.0 / p.closed_clients  # a client does not wait behind its own request
    # The number in flight is nearly Poisson (M/G/infinity), so a replica is idle with probability exp(-mean).
    x.p_busy = 1.0 - exp(-seen)
    x.decode_share_ms = 0.0 if p.prefill_first else (1.0 - x.disagg_share) * x.p_busy * x.iteration_ms
    backlog = queued_requests(p, s, b)
    find_prefill_queue(p, s, x, b, backlog)
    find_slot_wait(p, knobs, s, x, m, b, backlog)
    ahead = 0.0
    for c in range(p.n_classes):
        chunks = x.head_prompt_tokens[c] / p.token_budget
        service = 1.0 + x.decode_share_ms * chunks / x.prompt_ms[c]
        up_to = min(ahead + s.prefill_load[b, c] * service, MAX_UTILISATION)
        # Where some are admitted, the others have no TTFT: only a step without admissions tells what they would get.
        if x.admitted[c] > 0.0 or m.admitted[b] <= 0.0:
            estimate_class_ttft(p, s, x, b, c, chunks, queueing_ms(x, chunks, ahead, up_to), backlog)
        ahead = up_to


def find_prefill_queue(p: Params, s: State, x: Scratch, b: int, backlog: float) -> None:
    """The queue of prompts at a replica as an M/G/1 queue: utilisation and mean residual work W0 (ms).

    W0 = sum of lambda * E[S^2] / 2 = sum of utilisation * E[S] * (1 + cv^2) / 2 over the classes (Pollaczek-Khinchine),
    S the service time of a prompt with the decodes of its iterations.
    """
    residual_ms = 0.0
    residual_chunk_ms = 0.0
    load = 0.0
    utilisation = 0.0
    long_utilisation = 0.0
    for c in range(p.n_classes):
        chunks = x.head_prompt_tokens[c] / p.token_budget
        # A prompt that fills iterations also waits for the decodes in each of them.
        service_ms = x.prompt_ms[c] + x.decode_share_ms * chunks
        share = s.prefill_load[b, c] * service_ms / x.prompt_ms[c]
        class_residual_ms = 0.5 * share * service_ms * (1.0 + p.work_cv2[c])
        residual_ms += class_residual_ms
        residual_chunk_ms += 0.5 * share * x.full_ms if service_ms > x.full_ms else class_residual_ms
        load += s.prefill_load[b, c]
        utilisation += share
        long_utilisation += share * min(1.0, chunks)
    x.residual_ms = residual_ms
    x.residual_chunk_ms = residual_chunk_ms
    x.load = load
    x.utilisation = min(utilisation, MAX_UTILISATION)
    x.cycle_ms = x.iteration_ms / (1.0 - min(load, x.prefill_cap))
    # With a backlog of prompts every iteration is full of them, that of a short prompt too.
    x.packed_ms = x.full_ms * min(1.0, long_utilisation) if backlog > MIN_BACKLOG else 0.0
    # Beyond a step the fluid queue holds the backlog: here it is what can build up within one. The work that comes in
    # a step has the variance lambda * E[S^2] * dt = 2 * W0 * dt.
    x.growth_ms = STEP_GROWTH * sqrt(2.0 * residual_ms * p.dt_ms) + EPS
    # A long prompt waits only if every replica is busy with prompts: M/M/c by Sakasegawa (1977), whose exponent
    # sqrt(2(c + 1)) - 1 loses the 1 that W0 has already.
    replicas = max(x.up, 1.0)
    x.pooling = exp((sqrt(2.0 * (replicas + 1.0)) - 2.0) * log(max(x.utilisation, EPS))) / replicas


def find_slot_wait(p: Params, knobs: Knobs, s: State, x: Scratch, m: Metrics, b: int, backlog: float) -> None:
    """P(no free slot or cache) by chance, and the mean wait for one (ms).

    Output lengths vary, so requests in flight vary around the fluid's mean: normal, with the variance of M/G/infinity
    given when requests came, which is the mean times the Gini coefficient of output lengths. The normal loss function
    gives the expected excess over the slots, Little's law the wait.
    """
    running = 0.0
    variance = EPS
    admitted = EPS
    for c in range(p.n_classes):
        running += x.staying_share * s.in_flight[b, c]
        variance += x.staying_share * s.in_flight[b, c] * p.output_gini[c]
        admitted += x.admitted[c]
    most = x.up * knobs.batch_size[b]
    if m.kv_occupancy[b] > MIN_KV_OCCUPANCY:
        most = min(most, running / m.kv_occupancy[b])
    deviation = SLOT_DEVIATION * sqrt(max(variance, EPS))
    margin = (most - running - backlog) / deviation
    x.p_no_slot = normal_tail(margin) if p.closed_clients <= 0.0 else 0.0
    x.slot_wait_ms = 0.0
    if x.p_no_slot > MIN_NO_SLOT_PROBABILITY:
        z = abs(margin)
        excess = NORMAL_PEAK * exp(-0.5 * z * z) - z * 0.5 * erfc(z * SQRT_HALF)
        # Over what leaves: in a step without departures the fluid queue says enough.
        x.slot_wait_ms = min(deviation * max(excess, 0.0) / admitted, MAX_SLOT_WAIT_STEPS) * p.dt_ms


def queueing_ms(x: Scratch, chunks: float, ahead: float, up_to: float) -> float:
    """Mean wait (ms) of a prompt for prompts ahead of it: non-preemptive priority M/G/1 (Cobham).

    W0 / ((1 - ahead) * (1 - up_to)), with ``ahead`` the utilisation by higher classes and ``up_to`` with this one. Of
    a long prompt ahead, a short one meets one chunk at most. What exceeds W0 is limited to what can build up within a
    step: a * g / (a + g).
    """
    short = max(0.0, 1.0 - chunks)
    residual = short * x.residual_chunk_ms + (1.0 - short) * x.pooling * x.residual_ms
    beyond = residual * (1.0 / ((1.0 - ahead) * (1.0 - up_to)) - 1.0)
    return residual + beyond * x.growth_ms / (x.growth_ms + beyond)


def estimate_class_ttft(
    p: Params, s: State, x: Scratch, b: int, c: int, chunks: float, queueing: float, backlog: float
) -> None:
    """A class's time from admission to first token: a fixed part, and a log-normal one by its mean and variance."""
    disagg = x.disagg_share
    short = max(0.0, 1.0 - chunks)
    iterations = max(1.0, chunks)
    fixed = (
        p.ttft_offset_ms + x.decode_share_ms * iterations + disagg * x.head_prompt_tokens[c] * p.handoff_ms_per_token
    )
    if p.output_delay > 0.0:
        load = min(x.load, p.disagg_limit)
        next_ms = load * x.prompts_ms + (1.0 - load) * x.iteration_ms if p.prefill_first else x.cycle_ms
        fixed += p.output_delay * next_ms
    service = service_ms(p, s, x, b, c, iterations)
    # Half the iteration under way, what others bring into the next one, and iterations full of prompts.
    residual = (1.0 - disagg) * x.p_busy * x.cycle_ms * (0.5 + x.load * short) + x.packed_ms * short
    residual_variance = residual * residual / 3.0  # uniform between 0 and twice its mean
    service_cv2 = p.work_cv2[c]
    if p.prefill_first:
        # The mean work of n heads already has 1/n of their variance: alone in a short step it is a prompt's own work.
        service_cv2 *= 1.0 - 1.0 / max(x.admitted[c] + s.queue[b, c], 1.0)
        residual, residual_variance = wait_for_own_iteration(p, x, c, service, backlog)
        queueing *= disagg
    slot_wait = x.slot_wait_ms
    mean = service + residual + queueing + slot_wait
    variance = (
        service * service * service_cv2
        + residual_variance
        # A wait with P(wait > 0) = q, exponential where there is one, has the variance (2 / q - 1) * mean^2. Prompts of
        # one class are nearly equal, and M/D/1 has half the wait's variance: long prompts (short = 0) count half.
        + queueing * queueing * (2.0 / max(x.utilisation, MIN_WAIT_PROBABILITY) - 1.0) * (0.5 + 0.5 * short)
        + slot_wait * slot_wait * (2.0 / max(x.p_no_slot, MIN_WAIT_PROBABILITY) - 1.0)
        + p.jitter * p.jitter * (fixed + mean) * (fixed + mean)
    )
    # Moments of a log-normal distribution: sigma^2 = ln(1 + variance / mean^2), median = mean * exp(-sigma^2 / 2).
    sigma2 = log(1.0 + variance / (mean * mean))
    x.fixed_ms[c] = fixed
    x.sigma[c] = sqrt(sigma2)
    x.median_ms[c] = mean * exp(-0.5 * sigma2)
    x.first_token_p50_ms[c] = fixed + x.median_ms[c]
    x.first_token_p99_ms[c] = fixed + x.median_ms[c] * exp(NORMAL_P99 * x.sigma[c])


def fixed_prefill_ms(p: Params, s: State, b: int, c: int) -> float:
    """Part of an iteration of prompts alone that does not grow with them (ms): streamed weights, the engine's work."""
    tier = s.tier_new[b]
    return p.mean_work_ms[c, tier] * max(0.0, p.alone_ratio[c, tier] - p.saturated_ratio[c, tier, 0])


def wait_for_own_iteration(p: Params, x: Scratch, c: int, service: float, backlog: float) -> tuple[float, float]:
    """Mean (ms) and variance of what a prompt waits where prompts have iterations of their own.

    The iteration under way ends first, half of it on average: one of decodes, or one of prompts. All prompts that come
    meanwhile are computed together with this one. With a backlog the fluid queue holds what is ahead of a prompt, and
    what follows it in its iteration is half of that.
    """
    colocated = 1.0 - x.disagg_share
    load = min(x.load, p.disagg_limit)
    if backlog > MIN_BACKLOG:
        # Where slots or cache bound admission prompts hardly follow: then little of the time is prefill.
        return colocated * load * 0.5 * x.prompts_ms, colocated * load * x.prompts_ms * x.prompts_ms / 12.0
    decode_share = (1.0 - load) * x.p_busy
    half = 0.5 * (decode_share * x.iteration_ms + load * x.prompts_ms)
    square = (decode_share * x.iteration_ms * x.iteration_ms + load * x.prompts_ms * x.prompts_ms) / 3.0
    others = 2.0 * half * load * x.prompts_work_share
    variance = square - half * half + others * service * (1.0 + p.work_cv2[c])
    return colocated * (half + others), colocated * variance


def service_ms(p: Params, s: State, x: Scratch, b: int, c: int, iterations: float) -> float:
    """Prefill time of a class's prompt (ms) without the decodes of its iterations: on an idle replica, fused, apart."""
    disagg = x.disagg_share
    busy = x.p_busy
    alone = x.head_work_ms[c] * p.alone_ratio[c, s.tier_new[b]]
    if p.prefill_first:
        full = x.head_work_ms[c] * p.saturated_ratio[c, s.tier_new[b], 0]
        return (1.0 - disagg) * (full + fixed_prefill_ms(p, s, b, c)) + disagg * alone
    fused = max(x.prompt_ms[c], alone - x.iteration_ms * iterations)
    return (1.0 - disagg) * ((1.0 - busy) * alone + busy * fused) + disagg * alone


def take_from_queue(p: Params, load: Load, s: State, x: Scratch, b: int, t: int, c: int) -> float:
    """Take what was admitted from the head of the queue, its waits as uniform pieces; returns SLO misses."""
    admitted = x.admitted[c]
    if admitted <= 0.0:
        return 0.0
    w = load.index[b]
    room = x.admissible[c]
    if s.queue[b, c] > 0.0:
        room = admitted  # something was left behind: admissions were spread over the whole step
    room = max(room, admitted)
    left = admitted
    taken = 0.0
    missed = 0.0
    j = s.first_waiting[b, c]
    while j <= t and left > EPS_FLOW:
        have = s.waiting[b, c, j]
        n = min(have, left)
        if n > 0.0:
            arrived = load.arrivals[w, j, c]
            # Of a cohort that arrived evenly over its step, the last `have` are still here.
            first_came = (j + 1 - have / arrived) * p.dt_ms
            last_came = (j + 1 - (have - n) / arrived) * p.dt_ms
            first = (t + taken / room) * p.dt_ms - first_came
            last = (t + (taken + n) / room) * p.dt_ms - last_came
            if p.closed_clients > 0.0:
                # Counted from the start of the run: when each request was sent, simulator.whatif knows.
                first += first_came
                last += last_came
                if t == 0:  # the first clients find the fleet idle and wait for each other's prompts alone
                    last = min(last, admitted * x.prompt_ms[c] / x.up)
            missed += n * slo_miss_share(p, x, c, min(first, last), max(first, last))
            keep_piece(p, s, x, b, c, n, min(first, last), max(first, last))
            s.waiting[b, c, j] = have - n
            taken += n
            left -= n
        if left > EPS_FLOW or s.waiting[b, c, j] <= EPS_REQUESTS:
            j += 1
    s.first_waiting[b, c] = min(j, t + 1)
    return missed


def keep_piece(p: Params, s: State, x: Scratch, b: int, c: int, n: float, shortest: float, longest: float) -> None:
    """Note ``n`` admissions whose waits are uniform from ``shortest`` to ``longest`` (ms; below 0 = none)."""
    record_admissions(p, s, x, b, c, n, shortest, longest)
    k = x.n_pieces
    if k >= p.max_pieces:
        # Many small cohorts at once: fold the rest into the last piece.
        k = p.max_pieces - 1
        x.piece_requests[k] += n
        x.piece_wait_ms[k, 0] = min(x.piece_wait_ms[k, 0], shortest)
        x.piece_wait_ms[k, 1] = max(x.piece_wait_ms[k, 1], longest)
        return
    x.piece_requests[k] = n
    x.piece_wait_ms[k, 0] = shortest
    x.piece_wait_ms[k, 1] = longest
    x.piece_after_ms[k, 0] = x.first_token_p50_ms[c]
    x.piece_after_ms[k, 1] = x.first_token_p99_ms[c]
    x.n_pieces = k + 1


def record_admissions(
    p: Params, s: State, x: Scratch, b: int, c: int, n: float, shortest: float, longest: float
) -> None:
    """Append to the row's record of admissions while it has room (columns: ``STATE`` in :mod:`simulator.arrays`)."""
    r = s.n_recorded[b]
    if r < p.record_rows:
        s.record[b, r, 0] = c
        s.record[b, r, 1] = n
        s.record[b, r, 2] = shortest
        s.record[b, r, 3] = longest
        s.record[b, r, 4] = x.fixed_ms[c]
        s.record[b, r, 5] = x.median_ms[c]
        s.record[b, r, 6] = x.sigma[c]
        s.n_recorded[b] = r + 1


def slo_miss_share(p: Params, x: Scratch, c: int, shortest: float, longest: float) -> float:
    """Share of requests beyond the objective whose wait is uniform in this range (below 0 = none); Simpson's rule."""
    slo = p.slo_ms[c]
    if slo > NO_SLO_MS:
        return 0.0
    left = slo - x.fixed_ms[c]
    median = x.median_ms[c]
    sigma = x.sigma[c]
    shortest = max(shortest, 0.0)
    if longest <= shortest:
        return lognormal_tail(median, sigma, left - shortest)
    return (
        lognormal_tail(median, sigma, left - shortest)
        + 4.0 * lognormal_tail(median, sigma, left - 0.5 * (shortest + longest))
        + lognormal_tail(median, sigma, left - longest)
    ) / 6.0


def overdue_in_queue(p: Params, s: State, b: int, t: int, c: int) -> float:
    """Requests that still wait at the end of the step although their objective has already passed."""
    slo = p.slo_ms[c]
    if s.queue[b, c] <= 0.0 or slo > NO_SLO_MS:
        return 0.0
    in_time = 0.0
    steps_left = slo / p.dt_ms
    j = t
    while j >= 0 and steps_left > 0.0:
        in_time += s.waiting[b, c, j] * min(1.0, steps_left)
        steps_left -= 1.0
        j -= 1
    return max(0.0, s.queue[b, c] - in_time)


def ttft_quantile(x: Scratch, q: float, tail: int) -> float:
    """Weighted quantile of wait + time after admission (its median, or its p99 with ``tail`` 1) over the pieces.

    The weight below y is a line between the ends of pieces. Each end that is tried moves one side of the stretch that
    holds the quantile, and most others are then outside.
    """
    n = x.n_pieces
    total = 0.0
    low = 1e300
    high = 0.0
    for k in range(n):
        after = x.piece_after_ms[k, tail]
        total += x.piece_requests[k]
        low = min(low, after + max(x.piece_wait_ms[k, 0], 0.0))
        high = max(high, after + max(x.piece_wait_ms[k, 1], 0.0))
    if high - low < SAME_WAIT * high:
        return high
    if n == 1:
        shortest = x.piece_wait_ms[0, 0]
        wait = shortest + q * (x.piece_wait_ms[0, 1] - shortest)
        return x.piece_after_ms[0, tail] + max(wait, 0.0)
    goal = q * total
    under = weight_below(x, low, tail)
    if under >= goal:
        return low
    for k in range(n):
        for end in range(2):
            y = x.piece_after_ms[k, tail] + max(x.piece_wait_ms[k, end], 0.0)
            if low < y and y < high:
                below = weight_below(x, y, tail)
                if below >= goal:
                    high = y
                else:
                    low = y
                    under = below
    # A piece without width adds its weight at once, maybe at the upper end: the line is measured half-way.
    half = 0.5 * (high - low)
    rise = weight_below(x, low + half, tail) - under
    return min(high, low + half * ((goal - under) / rise)) if rise > 0.0 else high


def weight_below(x: Scratch, y: float, tail: int) -> float:
    """Requests of the step's pieces whose wait + time after admission is ``y`` at most."""
    below = 0.0
    for k in range(x.n_pieces):
        after = x.piece_after_ms[k, tail]
        longest = x.piece_wait_ms[k, 1]
        if y >= after + max(longest, 0.0):  # the sum that `ttft_quantile` makes, so that an end is met exactly
            below += x.piece_requests[k]
        elif y >= after:
            shortest = x.piece_wait_ms[k, 0]
            wait = y - after
            if shortest < wait and shortest < longest:
                below += x.piece_requests[k] * (wait - shortest) / (longest - shortest)
    return below


def report_head_of_line(p: Params, s: State, x: Scratch, m: Metrics, b: int, t: int) -> None:
    """TTFT of a step without admissions: the wait so far of the queue's head, plus the time of a new request."""
    age = 0.0
    after_p50 = p.ttft_offset_ms
    after_p99 = p.ttft_offset_ms
    for c in range(p.n_classes - 1, -1, -1):
        if c == 0 or s.queue[b, c] > 0.0:
            after_p50 = x.first_token_p50_ms[c]
            after_p99 = x.first_token_p99_ms[c]
        j = s.first_waiting[b, c]
        while j <= t and s.waiting[b, c, j] <= EPS_REQUESTS:
            j += 1
        if s.queue[b, c] > 0.0 and j <= t:
            age = max(age, (t + 1 - j) * p.dt_ms)
    m.ttft_p50_ms[b] = age + after_p50
    m.ttft_p99_ms[b] = age + after_p99


# ---------------------------------------------------------------- after the step


def reject_overflow(p: Params, s: State, m: Metrics, b: int, t: int) -> None:
    """Refuse what the queue cannot hold: lowest class first, newest first."""
    over = queued_requests(p, s, b) - p.queue_limit
    m.rejected[b] = max(over, 0.0)
    c = p.n_classes - 1
    while over > EPS_REQUESTS and c >= 0:
        drop = min(over, s.queue[b, c])
        s.queue[b, c] -= drop
        over -= drop
        j = t
        while drop > EPS_FLOW and j >= 0:
            n = min(s.waiting[b, c, j], drop)
            s.waiting[b, c, j] -= n
            drop -= n
            j -= 1
        c -= 1


def queued_requests(p: Params, s: State, b: int) -> float:
    """Waiting requests of all classes."""
    total = 0.0
    for c in range(p.n_classes):
        total += s.queue[b, c]
    return total


def report(p: Params, load: Load, knobs: Knobs, s: State, x: Scratch, m: Metrics, b: int, t: int, gain: float) -> None:
    """Metrics that are left: noise on latencies, violations, cost, accepted drafts."""
    w = load.index[b]
    m.ttft_p50_ms[b] *= load.noise[w, t, 0]
    m.ttft_p99_ms[b] *= load.noise[w, t, 0]
    m.tpot_ms[b] = min(p.dt_ms / gain, p.max_tpot_steps * p.dt_ms) * load.noise[w, t, 1]
    missed = x.missed_requests + m.rejected[b]
    if missed < EPS_REQUESTS:
        missed = 0.0  # the far end of a distribution is nobody
    judged = x.judged_requests + m.rejected[b]
    share = min(1.0, missed / judged) if judged > EPS_REQUESTS else 0.0
    if m.oom[b] > 0.0:
        # At least a batch: running out of memory always costs, even if no request missed its objective.
        batch = knobs.batch_size[b]
        missed = max(p.oom_penalty * missed, batch)
        share = min(1.0, max(p.oom_penalty * share, batch / max(judged, batch)))
    m.slo_violations[b] = missed
    m.violation_share[b] = share
    m.queue_requests[b] = queued_requests(p, s, b)
    gpus = x.paid_replicas * (1.0 + x.disagg_share)
    cost = p.price * gpus / max(m.tokens_per_sec[b] / 1000.0, p.min_billed_ktokens_per_s)
    m.cost_per_1k[b] = cost
    s.cost_so_far[b] += cost
    spec = knobs.spec[b]
    m.spec_accept_rate[b] = 0.0
    if spec > 0:
        m.spec_accept_rate[b] = (tokens_per_verify(p, knobs, s, x, b) - 1.0) / p.spec_length[spec]


# ---------------------------------------------------------------- distributions


def normal_tail(z: float) -> float:
    """P(Z > z) of a standard normal Z."""
    return 0.5 * erfc(z * SQRT_HALF)


def lognormal_tail(median_ms: float, sigma: float, limit_ms: float) -> float:
    """P(Y > limit) of a log-normal Y with this median and standard deviation ``sigma`` of its logarithm."""
    if limit_ms <= 0.0:
        return 1.0
    return 0.5 * erfc(log(limit_ms / median_ms) / (sigma * SQRT_2))
