"""Rule-based agent: plan capacity from the table, then react to floods.

- Calm: of the settings whose planned capacity leaves a margin over the usual load, one without GPUs for prefill alone
  if there is one (they double the fleet), and of those the one with the most capacity.
- Flood: the setting with the most capacity for the flood's mix of requests.
- Reserve: what has no objective may fill the KV pool only as far as the requests of an announced flood leave it. The
  pool then grows gradually into a flood, as its requests do, and shrinks as gradually after it.
- A flood is on while the arrival rate is well above normal or the queue is long, and for a few seconds after; with a
  reserve a long queue is no sign of one, because it is where work without an objective waits.
- Precision and prefill placement restart replicas one by one. They are changed only where the roll-out is short
  compared with a flood, and for an announced flood early enough to be done when it comes.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from agents.policies.capacity import CapacityPlanner, Plan, Setting
from agents.policies.hill_climb import COLUMN
from agents.protocol import FloatArray
from inferencegym.models import SPEC_LENGTHS
from inferencegym.tasks import TaskSpec
from simulator.hardware.tables import ServingTables, tables_of
from simulator.workload import load_source

CALM_MARGIN: Final = 1.1
"""Planned capacity of the calm setting over the usual load."""
FLOOD_RATE: Final = 1.5
"""Arrival rate, relative to the usual, from which a flood is on."""
LONG_QUEUE: Final = 24.0
"""Waiting requests from which a flood is on, whatever the rate."""
HOLD_STEPS: Final = 5
"""Seconds that the flood setting stays on after the last sign of a flood."""
RESERVE_HOLD_STEPS: Final = 30
"""The same with a reserve: until most of what the flood left running is done, it needs the pool."""
RESERVE_RAMP: Final = 0.08
"""Share of the way to the other KV pool that a step goes, with a reserve."""


class HeuristicAgent:
    """Agent with two planned settings and a rule that switches between them; see the module's text."""

    def __init__(self, task: TaskSpec, tables: ServingTables | None = None) -> None:
        tables = tables or tables_of(task.hardware)
        stats = load_source(task, tables).stats
        live = [c for c in task.classes if c.share > 0 or c.burst_share > 0]
        named = len(live) == len(stats.names)
        usual = np.array([c.share for c in live]) if named else stats.shares
        flood = np.array([c.burst_share for c in live]) if named else stats.shares
        promised = np.array([c.slo_ms < np.inf for c in live]) if named else np.ones(len(stats.names), dtype=bool)
        self._burst = task.burst
        self._usual_rps = task.arrival_rate_rps
        self._flood = self._plan_flood(task, CapacityPlanner(task, tables, flood))
        self._calm = self._plan_calm(task, CapacityPlanner(task, tables, usual))
        # The batch stays as the flood needs it: spare slots cost nothing in calm, and swinging them does.
        self._calm = replace(self._calm, kv_budget=self._flood.kv_budget, batch_size=self._flood.batch_size)
        self._reserve = task.burst is not None and bool((flood * promised).any()) and not promised.all()
        if task.burst is not None and self._reserve:
            taken = CapacityPlanner(task, tables, flood * promised).pool_share(self._flood, task.burst)
            self._calm = replace(self._calm, kv_budget=max(0.1, self._flood.kv_budget - taken))
        self._rollout_s = _rollout_s(task, tables, self._calm.setting, self._flood.setting)
        if task.burst is None or self._rollout_s > 0.5 * task.burst.duration_steps:
            # Too slow to follow a flood: keep precision and placement, change only what needs no restart.
            self._calm = self._flood
            self._rollout_s = 0.0

    def reset(self, n_rows: int) -> None:
        self._hold = np.zeros(n_rows)
        self._kv_budget: FloatArray | None = None

    def act(self, observation: FloatArray) -> FloatArray:
        rate = observation[:, COLUMN["arrival_rate"]]
        alarm = (rate > FLOOD_RATE * self._usual_rps) | self._announced(observation)
        if not self._reserve:
            alarm |= observation[:, COLUMN["queue_depth"]] > LONG_QUEUE
        hold = RESERVE_HOLD_STEPS if self._reserve else HOLD_STEPS
        self._hold = np.where(alarm, hold, np.maximum(self._hold - 1.0, 0.0))
        actions = np.where(self._hold[:, None] > 0, self._flood.row(), self._calm.row())
        if self._reserve:
            wanted = actions[:, 0]
            before = wanted if self._kv_budget is None else self._kv_budget
            self._kv_budget = actions[:, 0] = before + RESERVE_RAMP * (wanted - before)
        return actions

    def _announced(self, observation: FloatArray) -> NDArray[np.bool_]:
        """Whether an announced flood begins within the time that the roll-out takes."""
        timestep = observation[:, COLUMN["timestep"]]
        if self._burst is None or self._rollout_s == 0.0:
            return np.zeros(len(timestep), dtype=bool)
        ahead = (self._burst.offset_steps - timestep) % self._burst.interval_steps
        due: NDArray[np.bool_] = ahead <= np.ceil(self._rollout_s)
        return due

    @staticmethod
    def _plan_flood(task: TaskSpec, planner: CapacityPlanner) -> Plan:
        plans = [planner.plan(s) for s in settings(task)]
        return max(plans, key=lambda p: p.capacity_rps)

    @staticmethod
    def _plan_calm(task: TaskSpec, planner: CapacityPlanner) -> Plan:
        plans = [planner.plan(s) for s in settings(task)]
        enough = [p for p in plans if p.capacity_rps >= CALM_MARGIN * task.arrival_rate_rps]
        if not enough:
            return max(plans, key=lambda p: p.capacity_rps)
        return max(enough, key=lambda p: (not p.setting.disagg, p.capacity_rps))


def settings(task: TaskSpec) -> list[Setting]:
    """Every combination of the discrete knobs that a task offers."""
    active = task.active_actions
    tiers = (0, 1, 2) if "quant_tier" in active else (0,)
    specs = SPEC_LENGTHS if "spec_length" in active else (0,)
    disaggs = (False, True) if "prefill_disagg" in active else (False,)
    return [Setting(*combination) for combination in itertools.product(tiers, specs, disaggs)]


def _rollout_s(task: TaskSpec, tables: ServingTables, old: Setting, new: Setting) -> float:
    """Seconds until the last replica has restarted."""
    if (old.tier, old.disagg) == (new.tier, new.disagg):
        return 0.0
    fleet = task.fleet
    return fleet.n_replicas * (fleet.restart_s + float(tables.weights_gb[new.tier]) / fleet.load_gb_per_s)
