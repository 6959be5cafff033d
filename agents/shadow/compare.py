"""Shadow mode: each policy on a recorded log and equal GPUs, compared with constant settings.

The log is replayed once from its first second, the same for every policy; nothing is drawn. Requests enter as recorded,
the fleet is simulated: docs/fidelity.md says how far that is from hardware. Two constants are the baselines, the user's
own and the best of a sweep. A policy may use the GPUs as so many replicas, or, where it puts prefill on GPUs of its
own, as half as many replicas with twice the GPUs each; it gets what serves it better.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from agents.policies.constant import ConstantAgent
from agents.protocol import Agent
from agents.registry import make_agent
from agents.search.trace_task import DEFAULT_SLO_MS, fleet_for, log_summary
from agents.shadow.constants import NEUTRAL, grid, screen
from agents.shadow.prices import Prices
from agents.shadow.replay import DRAIN_S, PolicyOutcome, Run, play_policy, thinned
from agents.shadow.scaling import Autoscaled, autoscaled
from inferencegym.errors import DataFormatError, refusal
from inferencegym.models import NAIVE_ACTION, ServeAction
from inferencegym.task_registry import MAX_EPISODE_LENGTH
from inferencegym.tasks import Calibration, TaskSpec, parse_task
from simulator.catalogue import table_name
from simulator.hardware.profiles import fleet_changes
from simulator.recorded import save_trace
from simulator.requests import RequestLog
from simulator.tables import ServingTables, tables_of

MAX_SPAN_S: Final = MAX_EPISODE_LENGTH - DRAIN_S
FIXED: Final = "fixed"
"""Name of the user's own configuration in a report."""
CONSTANT: Final = "best_constant"
"""Name of the best constant setting that a sweep found."""
STATED_ERROR: Final = 0.04
"""Difference in shares of requests that the simulator may be wrong about: the largest difference of an agent's grade
from the discrete-event reference (docs/fidelity.md, "Policies")."""
FINALISTS: Final = 4
"""Constants of a sweep that are played with all latencies recorded."""


@dataclass(frozen=True, slots=True)
class ShadowReport:
    """Outcomes on one log and the same GPUs: the user's own configuration, the best constant, then the policies.

    ``autoscaling`` is what autoscalers do to the best constant, with its replicas as the most. ``gpu_hour`` is the
    price of a GPU's hour in ``currency``, None where no price was given.
    """

    log: dict[str, Any]
    n_gpus: int
    slo_ms: float
    table_sha256: str
    hardware: str
    fixed_action: dict[str, Any]
    outcomes: list[PolicyOutcome]
    arrivals_per_s: list[float] = field(repr=False)
    autoscaling: list[Autoscaled] = field(repr=False)
    gpu_hour: float | None = None
    currency: str = ""

    def best(self) -> PolicyOutcome:
        """The recommended policy.

        One that misses fewer requests than the best constant does by more than :data:`STATED_ERROR`; else that constant
        if it is so much better than the user's own; else the user's own.
        """
        fixed, constant, *policies = self.outcomes
        adaptive = min(policies, key=lambda o: o.slo_miss_share, default=constant)
        if self.gain(adaptive, constant) > STATED_ERROR and self.gain(adaptive, fixed) > STATED_ERROR:
            return adaptive
        return constant if self.gain(constant, fixed) > STATED_ERROR else fixed

    @staticmethod
    def gain(outcome: PolicyOutcome, baseline: PolicyOutcome) -> float:
        """Share of the requests that ``outcome`` serves in time and ``baseline`` does not."""
        return baseline.slo_miss_share - outcome.slo_miss_share

    def cost(self, outcome: PolicyOutcome) -> float | None:
        """What the GPUs of an outcome cost, in the currency of the prices; None without a price."""
        return None if self.gpu_hour is None else outcome.gpu_seconds / 3600.0 * self.gpu_hour

    def to_dict(self) -> dict[str, Any]:
        """JSON form; ``best`` names the policy of :meth:`best`."""
        gains = {o.policy: self.gain(o, self.outcomes[1]) for o in self.outcomes}
        costs = {o.policy: self.cost(o) for o in self.outcomes}
        return {
            **asdict(self),
            "best": self.best().policy,
            "stated_error": STATED_ERROR,
            "gain_over_best_constant": gains,
            "cost": costs,
        }


def shadow(
    log: RequestLog,
    agents: Sequence[str | Agent],
    *,
    fixed: ServeAction = NAIVE_ACTION,
    n_gpus: int | None = None,
    slo_ms: float | None = None,
    task: TaskSpec | None = None,
    tables: ServingTables | None = None,
    prices: Prices | None = None,
) -> ShadowReport:
    """Replay a log under a fixed configuration, under the best constant of a sweep and under each agent.

    ``agents`` are registered names (``heuristic``, ``constant:{...}``) or agents. ``task`` lends fleet, objectives and
    stored policies of a task that was made of such traffic; without it the fleet is sized to the log unless ``n_gpus``
    says otherwise, and the objective is 500 ms for all classes. Raises :class:`DataFormatError` if the log lasts longer
    than an episode may, and whatever making an agent raises.
    """
    fixed.validate()
    tables = tables or tables_of(None if task is None else task.hardware)
    tables.refuse_tier(fixed.quant_tier.value)
    with log_task(log, slo_ms, task, tables) as as_task:
        if n_gpus is None:
            n_gpus = as_task.fleet.n_replicas * (2 if fixed.prefill_disagg else 1) * tables.cards_per_replica
        _check_gpus(n_gpus, fixed, tables.cards_per_replica)
        gpus = Field(as_task, tables, n_gpus)
        constant, action = gpus.best_constant()
        scaling = gpus.autoscaled(constant, action)
        runs = [gpus.constant(FIXED, fixed), constant]
        # Prices and peaks as the fixed configuration sets them: what learned policies see is scaled as in training.
        best_tps = runs[0].best_tps
        scaled = Calibration(0.0, best_tps, best_tps, as_task.cost_budget / max(runs[0].cost, 1e-9))
        runs += [gpus.policy(_name(agent), agent, scaled) for agent in agents]
    outcomes = [run.outcome for run in runs]
    outcomes[0] = replace(outcomes[0], action=fixed.to_dict())
    outcomes[1] = replace(outcomes[1], action=action.to_dict())
    hardware = str(tables.meta["hardware"])
    return ShadowReport(
        log=log_summary(log),
        n_gpus=n_gpus,
        slo_ms=as_task.slo_target_ms,
        table_sha256=tables.sha256,
        hardware=hardware,
        fixed_action=fixed.to_dict(),
        outcomes=outcomes,
        arrivals_per_s=thinned(runs[0].arrivals).tolist(),
        autoscaling=scaling,
        gpu_hour=None if prices is None else prices.gpu_hour(hardware),
        currency="" if prices is None else prices.currency,
    )


@contextmanager
def log_task(
    log: RequestLog, slo_ms: float | None, like: TaskSpec | None = None, tables: ServingTables | None = None
) -> Iterator[TaskSpec]:
    """The whole log as a task of one episode, with a fleet sized to it; the task holds within the block."""
    span_s = math.ceil(float(log.arrival_s[-1]) + 1e-9)
    if span_s > MAX_SPAN_S:
        raise DataFormatError(
            f"the log lasts {span_s} s and a replay {MAX_SPAN_S} s at most: choose a part of it (--from-s, --to-s)"
        )
    with tempfile.TemporaryDirectory(prefix="inferencegym-shadow-") as folder:
        trace = save_trace(Path(folder) / "log.npz", log, {"once": True})
        yield _task(log, trace, span_s + DRAIN_S, slo_ms, like, tables)


def on_replicas(task: TaskSpec, n_replicas: int) -> TaskSpec:
    """The task with another number of replicas."""
    return replace(task, fleet=replace(task.fleet, n_replicas=n_replicas))


def _check_gpus(n_gpus: int, fixed: ServeAction, cards_per_replica: int) -> None:
    each = cards_per_replica * (2 if fixed.prefill_disagg else 1)
    if n_gpus < 1 or n_gpus % each:
        why = " with prefill_disagg, which takes as many GPUs again" if fixed.prefill_disagg else ""
        raise refusal("n_gpus", n_gpus, f"a multiple of {each}, the GPUs of a replica{why}")


class Field:
    """A log on a number of GPUs, on which policies are played."""

    def __init__(self, task: TaskSpec, tables: ServingTables, n_gpus: int) -> None:
        self._tables = tables
        knobs = tuple(name for name in task.active_actions if name != "prefill_disagg")
        units = n_gpus // tables.cards_per_replica
        self._together = replace(on_replicas(task, units), active_actions=knobs)
        self._apart = on_replicas(task, units // 2) if units % 2 == 0 else None

    def constant(self, name: str, action: ServeAction) -> Run:
        """A constant setting."""
        return play_policy(name, ConstantAgent(action), self._task(action), self._tables, NEUTRAL)

    def autoscaled(self, constant: Run, action: ServeAction) -> list[Autoscaled]:
        """A constant setting under autoscalers."""
        return autoscaled(self._task(action), self._tables, action, constant)

    def _task(self, action: ServeAction) -> TaskSpec:
        task = self._apart if action.prefill_disagg else self._together
        assert task is not None
        return task

    def best_constant(self) -> tuple[Run, ServeAction]:
        """The constant of a sweep that misses fewest requests; the finalists are played with their latencies."""
        found: list[tuple[float, ServeAction]] = []
        for task, apart in ((self._together, False), (self._apart, True)):
            if task is not None:
                settings = grid(apart, range(self._tables.n_tiers))
                shares = screen(task, self._tables, settings).missed
                found += zip(shares.tolist(), settings, strict=True)
        finalists = [action for _, action in sorted(found, key=lambda f: f[0])[:FINALISTS]]
        runs = [(self.constant(CONSTANT, action), action) for action in finalists]
        return min(runs, key=lambda r: (r[0].outcome.slo_miss_share, r[0].outcome.ttft_p99_ms))

    def policy(self, name: str, agent: str | Agent, calibration: Calibration) -> Run:
        """A policy with prefill together, and if it ever asks for it, with prefill apart on half as many replicas."""
        together = play_policy(name, _agent(agent, self._together), self._together, self._tables, calibration)
        if self._apart is None or not together.asked_apart:
            return together
        apart = play_policy(name, _agent(agent, self._apart), self._apart, self._tables, calibration)
        return min(together, apart, key=lambda run: run.outcome.slo_miss_share)


def _task(
    log: RequestLog,
    trace: Path,
    n_steps: int,
    slo_ms: float | None,
    like: TaskSpec | None,
    tables: ServingTables | None,
) -> TaskSpec:
    """The log as a task; its fleet changes as slowly as one of vLLM does."""
    changes = fleet_changes()
    entry: dict[str, Any] = {
        "name": "Shadow",
        "trace": trace.name,
        "slo_target_ms": DEFAULT_SLO_MS if slo_ms is None else slo_ms,
        "arrival_rate_rps": max(0.01, log_summary(log)["rate_rps"]),
        "n_replicas": 1,
        "start_s": changes.start_s,
        "restart_s": changes.restart_s,
        "load_gb_per_s": changes.load_gb_per_s,
    }
    task = parse_task("shadow", entry, base=trace.parent)
    if like is not None:
        task = replace(like, trace=task.trace, arrival_rate_rps=task.arrival_rate_rps, burst=None, recorded=True)
        if slo_ms is not None:
            classes = tuple(replace(c, slo_ms=slo_ms) for c in task.classes)
            task = replace(task, slo_target_ms=slo_ms, classes=classes)
    else:
        task = on_replicas(task, fleet_for(task, tables))
    # Policies that plan do so on the table that they play on.
    return replace(task, episode_length=n_steps, hardware=None if tables is None else table_name(tables.sha256))


def _agent(agent: str | Agent, task: TaskSpec) -> Agent:
    return make_agent(agent, task) if isinstance(agent, str) else agent


def _name(agent: str | Agent) -> str:
    return agent if isinstance(agent, str) else type(agent).__name__
