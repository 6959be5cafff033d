"""Replicas: adding and removing them, and restarting them for another precision or prefill placement."""

from __future__ import annotations

from inferencegym import plain_cython as cython

if not cython.compiled:  # compiled, these names are declared in step.pxd
    from math import exp

    from simulator.kernel.cohorts import requests_in_flight
    from simulator.kernel.numerics import EPS, EPS_REQUESTS
    from simulator.kernel.records import Knobs, Params, Scratch, State

MIN_DRAINING = 1e-3
"""Expected number of draining replicas below which their last request counts as finished. Chosen."""
EPS_SHARE = 1e-12
"""Share of replicas left to restart below which the rollout is complete; smaller shares are rounding errors."""


def scale(p: Params, knobs: Knobs, s: State, x: Scratch, b: int, t: int) -> None:
    """Add and remove replicas: new ones load their weights first, removed ones finish their requests.

    A replica is paid for from the moment it is requested until its last request has finished.
    """
    x.fleet.staying_share = 1.0
    x.fleet.paid_replicas = s.replicas_ready[b]
    if not p.scales:
        return
    start_s = p.start_s[knobs.tier[b]]
    put_into_service(p, s, b, t, start_s)
    asked = knobs.replicas[b]
    more = asked - s.replicas_ready[b] - loading_replicas(s, b, t)
    if more > 0.0:
        s.loading[b, t] = more
    elif more < 0.0:
        remove_replicas(p, s, b, t, -more)
    if still_draining(s, b) < MIN_DRAINING or requests_in_flight(p, s, b) < EPS_REQUESTS:
        s.replicas_draining[b] = 0.0
        s.draining_requests[b] = 0.0
    x.fleet.staying_share = staying_share(p, s, b)
    x.fleet.paid_replicas = asked + still_draining(s, b)


def put_into_service(p: Params, s: State, b: int, t: int, start_s: float) -> None:
    """Put replicas whose weights have loaded into service."""
    for k in range(s.first_loading[b], t):
        n = s.loading[b, k]
        if (t - k) * p.dt_s >= start_s:
            # They run the current configuration, so the unfinished part of a rollout becomes a smaller share.
            left = (1.0 - s.rollout_share[b]) * s.replicas_ready[b] / (s.replicas_ready[b] + n)
            s.rollout_share[b] = 1.0 - left
            s.replicas_ready[b] += n
            s.loading[b, k] = 0.0
            s.first_loading[b] = k + 1


def loading_replicas(s: State, b: int, t: int) -> float:
    """Replicas that were requested in earlier steps and still load their weights."""
    loading = 0.0
    for k in range(s.first_loading[b], t):
        loading += s.loading[b, k]
    return loading


def joining_replicas(p: Params, knobs: Knobs, s: State, b: int, t: int) -> float:
    """Replicas that finish loading within the step and serve for the rest of it, mean over the step."""
    if not p.scales:
        return 0.0
    start_s = p.start_s[knobs.tier[b]]
    joining = 0.0
    for k in range(s.first_loading[b], t + 1):
        joining += s.loading[b, k] * max(0.0, min(1.0, t + 1 - k - start_s / p.dt_s))
    return joining


def remove_replicas(p: Params, s: State, b: int, t: int, n: float) -> None:
    """Remove ``n`` replicas: the youngest that still load, then those that a rollout has not reached, then others.

    A removed replica in service keeps its requests in flight: an equal share of every class and age.
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
    staying = max(0.0, requests_in_flight(p, s, b) - s.draining_requests[b])
    s.replicas_draining[b] = still_draining(s, b) + n
    s.draining_requests[b] += staying * n / ready
    outdated = max(0.0, (1.0 - s.rollout_share[b]) * ready - n)
    s.rollout_share[b] = 1.0 - outdated / (ready - n)
    s.replicas_ready[b] = ready - n


def still_draining(s: State, b: int) -> float:
    """Expected number of removed replicas that still serve; each holds a Poisson number of requests (M/G/infinity)."""
    n = s.replicas_draining[b]
    return n * (1.0 - exp(-s.draining_requests[b] / n)) if n > 0.0 else 0.0


def staying_share(p: Params, s: State, b: int) -> float:
    """Share of the requests in flight that are not on removed replicas."""
    return 1.0 - min(1.0, s.draining_requests[b] / max(requests_in_flight(p, s, b), EPS))


def keep_draining(p: Params, s: State, x: Scratch, b: int) -> None:
    """After the step, removed replicas keep their share of the survivors and have received no new requests."""
    if x.fleet.staying_share >= 1.0:
        return
    survivors = 0.0
    for c in range(p.n_classes):
        survivors += x.cohorts.survivors[c, 0]
    s.draining_requests[b] = (1.0 - x.fleet.staying_share) * survivors
    x.fleet.staying_share = staying_share(p, s, b)


def roll_out(p: Params, knobs: Knobs, s: State, x: Scratch, b: int, t: int) -> None:
    """Restart replicas one at a time when precision or prefill placement changes."""
    if t == 0:
        s.tier_new[b] = knobs.tier[b]
        s.tier_old[b] = knobs.tier[b]
        s.disagg_new[b] = knobs.disagg[b]
        s.disagg_old[b] = knobs.disagg[b]
        s.rollout_share[b] = 1.0
    elif knobs.tier[b] != s.tier_new[b] or knobs.disagg[b] != s.disagg_new[b]:
        start_rollout(s, b, knobs.tier[b], knobs.disagg[b])
    ready = s.replicas_ready[b]
    joining = joining_replicas(p, knobs, s, b, t)
    up = ready + joining
    new = 1.0
    part = 0.0
    if s.rollout_share[b] < 1.0:
        fleet_s = ready * p.reload_s[s.tier_new[b]]
        part = min(1.0 - s.rollout_share[b], p.dt_s / fleet_s)
        # one replica is down while this part of the rollout takes place
        up = ready - part * fleet_s / p.dt_s + joining
        new = s.rollout_share[b] + 0.5 * part
        s.rollout_share[b] += part
        if s.rollout_share[b] > 1.0 - EPS_SHARE:
            s.rollout_share[b] = 1.0
    s.replicas_up[b] = up
    x.fleet.up = max(up, EPS)
    x.fleet.restarted_share = part
    x.fleet.new_share = new
    x.fleet.disagg_share = new * s.disagg_new[b] + (1.0 - new) * s.disagg_old[b]


def start_rollout(s: State, b: int, tier: int, disagg: int) -> None:
    """Start a rollout to another configuration, from the one that most replicas run now."""
    done = s.rollout_share[b]
    if done < 1.0 and tier == s.tier_old[b] and disagg == s.disagg_old[b]:
        # Going back to the old configuration: the replicas not yet restarted already run it.
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
