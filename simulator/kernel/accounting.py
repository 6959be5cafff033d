"""Metrics of a step: request counts, SLO violations, cost, accepted drafts."""

from __future__ import annotations

from inferencegym import plain_cython as cython

if not cython.compiled:  # compiled, these names are declared in step.pxd
    from simulator.kernel.numerics import EPS_REQUESTS
    from simulator.kernel.operators import tokens_per_verify
    from simulator.kernel.queues import queued_requests
    from simulator.kernel.records import Knobs, Load, Metrics, Params, Scratch, State


def report(
    p: Params, load: Load, knobs: Knobs, s: State, x: Scratch, m: Metrics, b: int, t: int, missed: float, judged: float
) -> None:
    """Report the metrics that remain once requests are counted and TTFT is measured."""
    m.queue_requests[b] = queued_requests(p, s, b)
    report_pace(p, load, knobs, s, x, m, b, t)
    report_violations(p, knobs, m, b, missed, judged)
    report_cost(p, s, x, m, b)


def report_flows(p: Params, s: State, x: Scratch, m: Metrics, b: int) -> None:
    """Requests admitted, completed and running, before the admissions enter the state."""
    admitted = 0.0
    completed = 0.0
    running = 0.0
    for c in range(p.n_classes):
        n = x.batch.admitted[c]
        admitted += n
        completed += s.in_flight[b, c] + n - x.batch.end_requests[c]
        running += 0.5 * (s.in_flight[b, c] + x.batch.end_requests[c])
    m.admitted[b] = admitted
    m.completed[b] = completed
    m.running_requests[b] = running


def report_pace(p: Params, load: Load, knobs: Knobs, s: State, x: Scratch, m: Metrics, b: int, t: int) -> None:
    """Time per output token, and accepted drafts."""
    m.tpot_ms[b] = min(p.dt_ms / s.gain_tokens[b], p.max_tpot_steps * p.dt_ms) * load.noise[load.index[b], t, 1]
    spec = knobs.spec[b]
    m.spec_accept_rate[b] = 0.0
    if spec > 0:
        m.spec_accept_rate[b] = (tokens_per_verify(p, knobs, s, x, b) - 1.0) / p.spec_length[spec]


def report_violations(p: Params, knobs: Knobs, m: Metrics, b: int, missed: float, judged: float) -> None:
    """SLO violations: requests that ``missed`` their objective, of those ``judged`` by it, and rejected requests.

    Counts below ``EPS_REQUESTS`` are the tail of a distribution and are reported as 0.
    """
    missed += m.rejected[b]
    judged += m.rejected[b]
    if missed < EPS_REQUESTS:
        missed = 0.0
    share = min(1.0, missed / judged) if judged > EPS_REQUESTS else 0.0
    if m.oom[b] > 0.0:
        # Count at least one batch, so that running out of memory always costs something.
        batch = knobs.batch_size[b]
        missed = max(p.oom_penalty * missed, batch)
        share = min(1.0, max(p.oom_penalty * share, batch / max(judged, batch)))
    m.slo_violations[b] = missed
    m.violation_share[b] = share


def report_cost(p: Params, s: State, x: Scratch, m: Metrics, b: int) -> None:
    """Cost of 1,000 tokens: price of all paid GPUs, divided by the tokens that they wrote."""
    gpus = x.fleet.paid_replicas * (1.0 + x.fleet.disagg_share)
    cost = p.price * gpus / max(m.tokens_per_sec[b] / 1000.0, p.min_billed_ktokens_per_s)
    m.cost_per_1k[b] = cost
    s.cost_so_far[b] += cost
