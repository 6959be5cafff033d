"""What autoscaling would save on a log: a constant setting whose replicas an autoscaler sets.

The fleet is the one that a plan or a sweep found, and may shrink: ``hpa`` and ``planner`` of
:mod:`agents.policies.autoscalers` play the log with its setting, in real time. A new replica takes as long as one of a
real engine (:class:`simulator.hardware.profiles.FleetChanges`), and is paid meanwhile. Nothing is fitted to the log but
the load of a replica: in the busiest minute of the log the whole fleet is in use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Final

import numpy as np

from agents.policies.autoscalers import Autoscaler, HpaAgent, PlannerAgent, PlannerParams, ReplicaPlan
from agents.policies.capacity import Plan, Setting
from agents.protocol import FloatArray
from agents.shadow.constants import NEUTRAL
from agents.shadow.replay import PolicyOutcome, Run, play_policy
from inferencegym.models import ServeAction
from inferencegym.tasks import TaskSpec
from simulator.tables import ServingTables

TARGETS: Final = (1.0, 0.8, 0.6)
"""Loads of a replica that the autoscalers aim at, as shares of what each takes in the busiest minute of the log."""
MAY_MISS: Final = 0.01
"""Share of the requests that may be late besides, where no objectives say what must hold."""
WITHIN_MISSES: Final = f"with at most {MAY_MISS:.0%} more of the requests late"
LEAST_SAVED: Final = 0.01
"""Share of the GPU-hours below which it saves nothing."""
SHORT_STARTS: Final = 20.0
"""Starts of a replica that a log must last to show what autoscaling saves."""
PEAK_S: Final = 60
"""Seconds over which the busiest load of a log is taken."""
PLANNER: Final = PlannerParams(
    target=1.0, spare=0.0, smoothing=0.1, trust=1.0, horizon_s=60.0, drain_s=30.0, hold_s=120.0
)
"""The planner as an operator would set it in real time, where the tasks' start a replica within seconds."""


@dataclass(frozen=True, slots=True)
class Autoscaled:
    """What an autoscaler does to a constant setting on a log.

    ``target`` is the load of a replica that it aims at, as a share of what each takes in the busiest minute.
    ``saved_share`` is the part of the GPU-seconds saved against ``max_replicas`` throughout, ``late_more`` the share of
    requests that miss their objective and did not then, ``meets`` whether what is asked for still holds. ``replicas``
    are those asked for at the seconds ``t_s``, and a new one serves after ``start_s``. ``figures`` has all statistics
    that objectives bound (``simulator.objectives``).
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
    figures: dict[str, float]
    t_s: list[float] = field(repr=False)
    replicas: list[float] = field(repr=False)


def autoscaled(
    task: TaskSpec,
    tables: ServingTables,
    action: ServeAction,
    constant: Run,
    meets: Callable[[PolicyOutcome], bool] | None = None,
) -> list[Autoscaled]:
    """Autoscalers on a task made of a log, whose replicas under a constant setting are the most that they may have.

    ``constant`` is the setting with all of them, played on the same task. ``meets`` judges outcomes (default: at most
    :data:`MAY_MISS` of the requests are late besides). A single replica has nothing to scale: there the list is empty.
    """
    most, before = task.fleet.n_replicas, constant.outcome
    if most == 1:
        return []
    scaling = replace(task, fleet=replace(task.fleet, max_replicas=most))
    replica = _replica(task, tables, action, constant.arrivals)
    found = []
    for name, target in product(("hpa", "planner"), TARGETS):
        agent: Autoscaler = (
            HpaAgent(scaling, target, compression=1.0, replica=replica)
            if name == "hpa"
            else PlannerAgent(scaling, [PLANNER.model_copy(update={"target": target})], replica=replica)
        )
        outcome = play_policy(name, agent, scaling, tables, NEUTRAL).outcome
        late_more = outcome.slo_miss_share - before.slo_miss_share
        found.append(
            Autoscaled(
                policy=name,
                target=target,
                max_replicas=most,
                mean_replicas=most * outcome.gpu_seconds / before.gpu_seconds,
                start_s=replica.start_s,
                gpu_seconds=outcome.gpu_seconds,
                saved_share=1.0 - outcome.gpu_seconds / before.gpu_seconds,
                share_in_time=1.0 - outcome.slo_miss_share,
                late_more=late_more,
                meets=late_more <= MAY_MISS if meets is None else meets(outcome),
                figures=outcome.figures,
                t_s=outcome.timeline["t_s"],
                replicas=outcome.timeline["replicas"],
            )
        )
    return found


def _replica(task: TaskSpec, tables: ServingTables, action: ServeAction, arrivals: FloatArray) -> ReplicaPlan:
    """A replica with the setting, and the load (requests/s) that each has in the busiest minute of the log."""
    setting = Setting(action.quant_tier.value, action.spec_length, action.prefill_disagg)
    window_s = min(PEAK_S, len(arrivals))
    peak_rps = float(np.convolve(arrivals, np.ones(window_s), "valid").max()) / window_s
    plan = Plan(setting, action.kv_budget, action.batch_size, peak_rps)
    return ReplicaPlan.with_plan(task, tables, plan, peak_rps / task.fleet.n_replicas)


def scaling_note(found: Sequence[Autoscaled], span_s: float, within: str) -> str:
    """What autoscaling saves on a log of ``span_s`` seconds; ``within`` says what must still hold."""
    if not found:
        return "Autoscaling: a single replica has nothing to scale."
    first = found[0]
    best = max((each for each in found if each.meets), key=lambda each: each.saved_share, default=None)
    lead = f"Autoscaling up to {first.max_replicas} replicas, of which a new one takes {first.start_s:.0f} s to start,"
    if best is None or best.saved_share < LEAST_SAVED:
        told = f"{lead} saves nothing {within}."
    else:
        told = (
            f"{lead} saves {best.saved_share:.0%} of the GPU-hours {within} ({best.policy}, target {best.target:.0%})."
        )
    if span_s < SHORT_STARTS * first.start_s:
        told += f" {span_s:,.0f} s are short beside a start: a day has more to save."
    return told


COLUMNS: Final = ("autoscaler", "target", "replicas", "GPU-hours", "saved", "in time", "more late", "TTFT p99", "meets")
"""Headings of a table of autoscalers."""


def row_of(each: Autoscaled) -> list[str]:
    """Cells of an autoscaler by :data:`COLUMNS`."""
    return [
        each.policy,
        f"{each.target:.0%}",
        f"{each.mean_replicas:.1f} of {each.max_replicas}",
        f"{each.gpu_seconds / 3600.0:.2f}",
        f"{each.saved_share:.0%}",
        f"{each.share_in_time:.2%}",
        f"{each.late_more:+.2%}",
        f"{each.figures['ttft_p99_ms']:,.0f}",
        "yes" if each.meets else "no",
    ]
