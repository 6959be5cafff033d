"""Autoscalers: agents that set the number of replicas, as Kubernetes, Knative and capacity planners do.

All of them keep five knobs as the capacity planner sets them (:class:`agents.policies.capacity.CapacityPlanner`: the
setting with the most capacity without GPUs for prefill alone) and move the sixth.

- ``hpa``: the Horizontal Pod Autoscaler of Kubernetes: desired = ready * metric / target for two metrics, of which the
  larger counts, a tolerance of 10%, limits to growth, and the highest wish of the stabilisation window on the way down
  (https://kubernetes.io/docs/tasks/run-application/horizontal-pod-autoscale/).
- ``kpa``: Knative's autoscaler: concurrency over a stable window, and over a tenth of it in a panic, in which the fleet
  never shrinks (https://knative.dev/docs/serving/autoscaling/kpa-specific/).
- ``scheduled``: as many as the task's forecast needs, a while ahead; it looks at no metric.
- ``planner``: capacity from the lookup table, the load of the next seconds from the forecast (where the task has none,
  from the trend), and what the queue needs, as workload-variant autoscalers plan.

Tasks that scale compress the time that a replica takes to start about eightfold (docs/autoscaling.md), so the windows
of Kubernetes are their defaults divided by :data:`COMPRESSION`. Knative's are their defaults: they average over
requests, which run as long as real ones.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import numpy as np
from pydantic import Field

from agents.policies.capacity import CapacityPlanner, Plan
from agents.policies.heuristic import settings
from agents.protocol import FloatArray
from inferencegym.errors import InvalidConfigError
from inferencegym.messages import Message
from inferencegym.models import FLEET_FIELDS, OBSERVATION_FIELDS, SCALING_FIELDS, ServeAction
from inferencegym.spaces.actions import to_row
from inferencegym.spaces.forecast import forecast_rps
from inferencegym.tasks import TaskSpec
from simulator.hardware.tables import ServingTables, tables_of
from simulator.workload import load_source

COMPRESSION: Final = 8.0
"""How much faster replicas start in the tasks than real ones: windows of seconds are divided by it."""
_NAMES: Final = (*OBSERVATION_FIELDS, *FLEET_FIELDS, *SCALING_FIELDS)


Seen = Mapping[str, FloatArray]
"""Observation by name of the field, (B,) each."""
_SLOWER: Final = 0.3
"""Weight of the last second in the slow mean of the load, relative to the fast one: their difference is its trend."""


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    """Five knobs of a replica, the load that it takes with them, and what starting one takes.

    ``capacity_rps`` is in requests/s, ``slots`` the requests that run at once at that load, ``start_s`` in seconds.
    """

    plan: Plan
    capacity_rps: float
    slots: float
    output_tokens: float
    start_s: float

    @classmethod
    def of(cls, task: TaskSpec, tables: ServingTables | None = None) -> ReplicaPlan:
        """Plan a replica of a task that scales; raises :class:`InvalidConfigError` for others."""
        if task.fleet.max_replicas is None:
            raise InvalidConfigError(
                f"task {task.task_id!r} has a fixed number of replicas, which this policy would set: choose a task "
                "that scales, such as autoscale or fleet-mix, or another policy"
            )
        tables = tables or tables_of(task.hardware)
        stats = load_source(task, tables).stats
        planner = CapacityPlanner(task, tables, stats.shares)
        plan = max(
            (planner.plan(each) for each in settings(task) if not each.disagg), key=lambda each: each.capacity_rps
        )
        return cls.with_plan(task, tables, plan, plan.capacity_rps / task.fleet.n_replicas)

    @classmethod
    def with_plan(cls, task: TaskSpec, tables: ServingTables, plan: Plan, capacity_rps: float) -> ReplicaPlan:
        """A replica with these knobs, which takes ``capacity_rps``."""
        stats = load_source(task, tables).stats
        output = float(stats.output_cdf_tokens.mean(axis=1) @ stats.shares)
        start_s = task.fleet.start_s + float(tables.weights_gb[plan.setting.tier]) / task.fleet.load_gb_per_s
        # A plan has twice the slots that its load fills (CapacityPlanner).
        return cls(plan, capacity_rps, 0.5 * plan.batch_size, output, start_s)


class Autoscaler(ABC):
    """Agent that keeps a plan's knobs and asks for the replicas of :meth:`wanted`."""

    def __init__(self, task: TaskSpec, replica: ReplicaPlan | None = None) -> None:
        self.task = task
        self.replica = replica or ReplicaPlan.of(task)
        self._most = float(task.fleet.max_replicas or 1)
        self._knobs = self.replica.plan.row()

    def reset(self, n_rows: int) -> None:
        """Start new episodes."""
        self.second = 0
        self.asked = np.full(n_rows, float(self.task.fleet.n_replicas))

    def act(self, observation: FloatArray) -> FloatArray:
        """Six knobs (B, 6) for observations (B, 24)."""
        seen = {name: observation[:, i] for i, name in enumerate(_NAMES)}
        self.second = int(seen["timestep"][0])
        self.asked = np.clip(np.ceil(self.wanted(seen) - 1e-6), 1.0, self._most)
        knobs = np.broadcast_to(self._knobs, (len(observation), len(self._knobs)))
        return np.column_stack([knobs, self.asked])

    @abstractmethod
    def wanted(self, seen: Seen) -> FloatArray:
        """Replicas (B,) that it would like to have, before they are rounded up and clamped."""


class HpaAgent(Autoscaler):
    """Kubernetes' Horizontal Pod Autoscaler on requests per second and waiting requests of a replica.

    Defaults of Kubernetes: every 15 s, tolerance 10%, at most twice as many or four more at a time, 300 s of
    stabilisation on the way down; ``target`` is the share of a replica's capacity, ``waiting`` the requests waiting for
    each (what Google's guide for LLMs on GKE takes as its metric).
    """

    def __init__(
        self,
        task: TaskSpec,
        target: float = 0.7,
        waiting: float = 8.0,
        compression: float = COMPRESSION,
        replica: ReplicaPlan | None = None,
    ) -> None:
        super().__init__(task, replica)
        self._target_rps = target * self.replica.capacity_rps
        self._waiting = waiting
        self._period_s = max(1, round(15.0 / compression))
        self._stabilisation_s = round(300.0 / compression)

    def reset(self, n_rows: int) -> None:
        super().reset(n_rows)
        self._wishes: deque[tuple[int, FloatArray]] = deque()

    def wanted(self, seen: Seen) -> FloatArray:
        if self.second % self._period_s:
            return self.asked
        ready = seen["replicas_ready"]
        ratio = np.maximum(
            seen["arrival_rate"] / (ready * self._target_rps), seen["queue_depth"] / (ready * self._waiting)
        )
        wish = np.where(np.abs(ratio - 1.0) <= 0.1, self.asked, np.ceil(ready * ratio - 1e-9))
        wish = np.minimum(wish, np.maximum(2.0 * self.asked, self.asked + 4.0))
        self._wishes.append((self.second, np.clip(wish, 1.0, self._most)))
        while self._wishes[0][0] <= self.second - self._stabilisation_s:
            self._wishes.popleft()
        highest: FloatArray = np.max([each for _, each in self._wishes], axis=0)
        wanted: FloatArray = np.maximum(wish, np.minimum(highest, self.asked))
        return wanted


class KpaAgent(Autoscaler):
    """Knative's pod autoscaler on concurrency: requests that wait or run, by Little's law.

    Defaults of Knative: a stable window of 60 s, a panic window of a tenth of it, panic at twice what is there,
    at most half as many at a time on the way down. ``target`` is the share of a replica's slots: a quarter, where
    Knative takes 70% of what a container can hold, since a replica that decodes for so many is slow.
    """

    def __init__(
        self,
        task: TaskSpec,
        target: float = 0.25,
        compression: float = 1.0,
        replica: ReplicaPlan | None = None,
    ) -> None:
        super().__init__(task, replica)
        self._target = target * self.replica.slots
        self._window = max(1, round(60.0 / compression))
        self._panic_window = max(1, round(6.0 / compression))

    def reset(self, n_rows: int) -> None:
        super().reset(n_rows)
        self._concurrency: deque[FloatArray] = deque(maxlen=self._window)
        self._panic_s = np.zeros(n_rows)

    def wanted(self, seen: Seen) -> FloatArray:
        running = seen["arrival_rate"] * self.replica.output_tokens * seen["tpot_p50"] / 1000.0
        self._concurrency.append(running + seen["queue_depth"])
        ready = seen["replicas_ready"]
        window = np.array(self._concurrency)
        stable = np.ceil(window.mean(axis=0) / self._target)
        now = np.ceil(window[-self._panic_window :].mean(axis=0) / self._target)
        self._panic_s = np.where(now >= 2.0 * ready, self._window, np.maximum(self._panic_s - 1.0, 0.0))
        calm = np.maximum(stable, np.floor(ready / 2.0))
        wanted: FloatArray = np.where(self._panic_s > 0, np.maximum(self.asked, now), calm)
        return wanted


class ScheduledAgent(Autoscaler):
    """Replicas by the clock: what the task's forecast needs, from the time that a replica takes to start."""

    def __init__(self, task: TaskSpec, target: float = 0.6, replica: ReplicaPlan | None = None) -> None:
        super().__init__(task, replica)
        if task.day is None:
            raise InvalidConfigError(f"task {task.task_id!r} has no forecast: scheduled needs one")
        self._target_rps = target * self.replica.capacity_rps

    def wanted(self, seen: Seen) -> FloatArray:
        ahead = np.arange(self.second, self.second + np.ceil(self.replica.start_s) + 1)
        return np.full(len(self.asked), forecast_rps(self.task, ahead).max() / self._target_rps)


class PlannerParams(Message):
    """Parameters of the planning autoscaler."""

    target: Annotated[float, Field(ge=0.3, le=2, description="share of a replica's planned capacity that is used")]
    spare: Annotated[float, Field(ge=-1, le=2, description="replicas in addition to those that the load needs")]
    smoothing: Annotated[float, Field(ge=0.02, le=1, description="weight of the last second in the mean of the load")]
    trust: Annotated[float, Field(ge=0, le=3, description="how much of the change ahead is believed")]
    horizon_s: Annotated[float, Field(ge=0, le=60, description="seconds ahead that the load is planned for")]
    drain_s: Annotated[float, Field(ge=1, le=120, description="seconds in which the queue is to be served")]
    hold_s: Annotated[float, Field(ge=1, le=120, description="seconds of a lower wish before a replica goes")]


PLANNER: Final = PlannerParams(
    target=0.8, spare=0.0, smoothing=0.3, trust=1.0, horizon_s=15.0, drain_s=10.0, hold_s=10.0
)
"""Defaults that an operator would start from; none was fitted."""


class PlannerAgent(Autoscaler):
    """Capacity from the lookup table, load of the next seconds from the forecast or the trend, and the queue.

    The load ahead is the smoothed load times what the forecast says of the coming change; where the task has no
    forecast, its trend goes on. A replica goes when fewer were enough for a while, one at a time. Row b has the params
    ``params[b // (B / P)]``.
    """

    def __init__(
        self,
        task: TaskSpec,
        params: Sequence[PlannerParams] = (PLANNER,),
        knobs: FloatArray | None = None,
        replica: ReplicaPlan | None = None,
    ) -> None:
        super().__init__(task, replica)
        self._params = params
        if knobs is not None:
            self._knobs = knobs

    def reset(self, n_rows: int) -> None:
        super().reset(n_rows)
        each = n_rows // len(self._params)
        self._by_name = {
            name: np.repeat([getattr(one, name) for one in self._params], each) for name in PlannerParams.model_fields
        }
        self._fast: FloatArray | None = None
        self._enough_s = np.zeros(n_rows)

    def wanted(self, seen: Seen) -> FloatArray:
        now, params = seen["arrival_rate"], self._by_name
        if self._fast is None:
            self._fast = self._slow = now
        self._fast = self._fast + params["smoothing"] * (now - self._fast)
        self._slow = self._slow + _SLOWER * params["smoothing"] * (now - self._slow)
        load = np.maximum(self._ahead(self._fast), 0.0) / params["target"] + seen["queue_depth"] / params["drain_s"]
        wish = np.clip(np.ceil(load / self.replica.capacity_rps + params["spare"] - 1e-9), 1.0, self._most)
        self._enough_s = np.where(wish < self.asked, self._enough_s + 1.0, 0.0)
        goes = self._enough_s >= params["hold_s"]
        self._enough_s = np.where(goes, 0.0, self._enough_s)
        wanted: FloatArray = np.where(goes, self.asked - 1.0, np.maximum(wish, self.asked))
        return wanted

    def _ahead(self, load: FloatArray) -> FloatArray:
        """The load (requests/s) to plan for."""
        params = self._by_name
        if self.task.day is None:
            lag_s = (1.0 / _SLOWER - 1.0) / params["smoothing"]  # of the slow mean behind the fast one
            trend: FloatArray = load + params["trust"] * params["horizon_s"] * (load - self._slow) / lag_s
            return trend
        seconds = self.second + np.array([[0.0], [0.5], [1.0]]) * params["horizon_s"]
        rates = forecast_rps(self.task, seconds)
        change: FloatArray = rates[1:].max(axis=0) / rates[0] - 1.0
        return load * (1.0 + params["trust"] * change)


class StoredAutoscaler(Message):
    """JSON form of a planning autoscaler: five knobs, its parameters, and how they were found."""

    kind: Literal["autoscaler"]
    knobs: dict[str, Any]
    params: PlannerParams
    validation_score: float | None = None
    task: str | None = None
    table_sha256: str | None = None

    def agent(self, task: TaskSpec) -> PlannerAgent:
        """The agent that was stored."""
        return PlannerAgent(task, [self.params], to_row(ServeAction.from_dict(self.knobs)))
