"""Savings of autoscaling on a log: a constant setting whose number of replicas an autoscaler sets.

The fleet of a plan or a sweep is the largest: ``hpa`` and ``planner`` of :mod:`agents.policies.autoscalers` play the
log with its setting, in real time. A new replica starts as slowly as one of a real engine
(:class:`simulator.hardware.profiles.FleetChanges`), and is paid for meanwhile. Only the load of a replica is taken from
the log: in its busiest minute the whole fleet is in use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Final

import numpy as np

from agents.policies.autoscalers import Autoscaler, HpaAgent, PlannerAgent, PlannerParams, ReplicaPlan
from agents.policies.capacity import Plan, Setting
from inferencegym.models import Router, ServeAction
from inferencegym.tasks import TaskSpec
from ops.capacity import NEUTRAL, PolicyOutcome, play_policy, side_by_side
from simulator.hardware.tables import ServingTables
from simulator.workload import load_source

TARGETS: Final = (1.0, 0.8, 0.6)
"""Target loads of a replica, as shares of each replica's load in the busiest minute of the log."""
MAY_MISS: Final = 0.01
"""Largest additional share of late requests, if no objectives are given."""
WITHIN_MISSES: Final = f"with at most {MAY_MISS:.0%} more of the requests late"
LEAST_SAVED: Final = 0.01
"""Smallest share of GPU-hours that counts as a saving."""
SHORT_STARTS: Final = 20.0
"""Length that a log needs to show savings, in start times of a replica."""
PEAK_S: Final = 60
"""Seconds over which the peak load of a log is averaged."""
PLANNER: Final = PlannerParams(
    target=1.0, spare=0.0, smoothing=0.1, trust=1.0, horizon_s=60.0, drain_s=30.0, hold_s=120.0
)
"""Planner settings for real time, where starts take long; in the tasks a replica starts within seconds."""


@dataclass(frozen=True, slots=True)
class Autoscaled:
    """Result of an autoscaler on a constant setting and a log.

    ``target`` is the target load of a replica, as a share of its load in the busiest minute. ``saved_share`` is the
    share of GPU-seconds saved compared with ``max_replicas`` throughout, ``late_more`` the increase in the share of
    requests that miss their objective, ``meets`` whether the requirement still holds. ``replicas`` are the replicas
    requested at the seconds ``t_s``; a new one serves after ``start_s``. For a plan, ``share_in_time``, ``late_more``
    and ``ttft_p99_ms`` allow for the median error of measured runs; ``figures`` has all statistics that objectives
    bound (``ops.objectives``), as simulated.
    """

    policy: str
    target: float
    max_replicas: int
    mean_replicas: float
    start_s: float
    gpu_seconds: float
    saved_share: float
    share_in_time: float
    late_more: float
    meets: bool
    ttft_p99_ms: float
    figures: dict[str, float]
    t_s: list[float] = field(repr=False)
    replicas: list[float] = field(repr=False)


def autoscaled(
    task: TaskSpec,
    tables: ServingTables,
    action: ServeAction,
    in_time: float,
    ttft_ratio: Callable[[PolicyOutcome], float] = lambda outcome: 1.0,
    meets: Callable[[PolicyOutcome], bool] | None = None,
    router: Router = "shared",
) -> list[Autoscaled]:
    """Play autoscalers on a task made from a log; its replicas are the maximum.

    ``in_time`` is the share of requests in time under ``action`` with all replicas. ``ttft_ratio`` multiplies the
    simulated TTFT of an outcome. ``meets`` judges outcomes (default: at most the share :data:`MAY_MISS` of the requests
    is late in addition). With a single replica there is nothing to scale, and the list is empty.
    """
    most = task.fleet.n_replicas
    if most == 1:
        return []
    scaling = replace(task, fleet=replace(task.fleet, max_replicas=most))
    replica = _replica(task, tables, action)
    gpu_seconds = most * (1 + action.prefill_disagg) * tables.cards_per_replica * task.episode_length

    def played(named: tuple[str, float]) -> Autoscaled:
        name, target = named
        agent: Autoscaler = (
            HpaAgent(scaling, target, compression=1.0, replica=replica)
            if name == "hpa"
            else PlannerAgent(scaling, [PLANNER.model_copy(update={"target": target})], replica=replica)
        )
        outcome = play_policy(name, agent, scaling, tables, NEUTRAL, router).outcome
        error = ttft_ratio(outcome)
        share_in_time = outcome.share_in_time(error)
        late_more = in_time - share_in_time
        return Autoscaled(
            policy=name,
            target=target,
            max_replicas=most,
            mean_replicas=most * outcome.gpu_seconds / gpu_seconds,
            start_s=replica.start_s,
            gpu_seconds=outcome.gpu_seconds,
            saved_share=1.0 - outcome.gpu_seconds / gpu_seconds,
            share_in_time=share_in_time,
            late_more=late_more,
            meets=late_more <= MAY_MISS if meets is None else meets(outcome),
            ttft_p99_ms=outcome.ttft_p99_ms * error,
            figures=outcome.figures,
            t_s=outcome.timeline["t_s"],
            replicas=outcome.timeline["replicas"],
        )

    return side_by_side(played, product(("hpa", "planner"), TARGETS))


def _replica(task: TaskSpec, tables: ServingTables, action: ServeAction) -> ReplicaPlan:
    """A replica with the setting, whose capacity is its load (requests/s) in the busiest minute of the log."""
    setting = Setting(action.quant_tier.value, action.spec_length, action.prefill_disagg)
    arrivals = load_source(task, tables).draw([0], task.episode_length).arrivals[0].sum(axis=1)
    window_s = min(PEAK_S, len(arrivals))
    peak_rps = float(np.convolve(arrivals, np.ones(window_s), "valid").max()) / window_s
    plan = Plan(setting, action.kv_budget, action.batch_size, peak_rps)
    return ReplicaPlan.with_plan(task, tables, plan, peak_rps / task.fleet.n_replicas)


def scaling_note(found: Sequence[Autoscaled], span_s: float, within: str) -> str:
    """Summary of autoscaling on a log of ``span_s`` seconds; ``within`` names the condition that must still hold."""
    if not found:
        return "Autoscaling: a single replica cannot be scaled down."
    first = found[0]
    best = max((each for each in found if each.meets), key=lambda each: each.saved_share, default=None)
    lead = f"Autoscaling up to {first.max_replicas} replicas ({first.start_s:.0f} s to start one)"
    if best is None or best.saved_share < LEAST_SAVED:
        told = f"{lead} saves nothing {within}."
    else:
        told = (
            f"{lead} saves {best.saved_share:.0%} of the GPU-hours {within} ({best.policy}, target {best.target:.0%})."
        )
    if span_s < SHORT_STARTS * first.start_s:
        told += f" A log of {span_s:,.0f} s is short compared with a start: a whole day would show more."
    return told
