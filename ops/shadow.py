"""Shadow mode: play each policy on a recorded log with the same GPUs, and compare it with constant settings.

The log is replayed once from its first second, the same for every policy. Requests enter as recorded, and the
discrete-event reference serves them one by one; docs/fidelity.md states how far that is from hardware. Two constants
are the baselines: the user's own setting and the best of a sweep. A policy uses all GPUs as replicas or, if it asks for
prefill on separate GPUs, half as many replicas with twice the GPUs each; the better of the two counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from agents.policies.constant import ConstantAgent
from agents.policies.vllm_defaults import vllm_defaults
from agents.protocol import Agent
from agents.registry import AGENTS, make_agent
from inferencegym.errors import DataFormatError, InvalidConfigError, refusal
from inferencegym.models import ServeAction
from inferencegym.tasks import Calibration, TaskSpec
from ops.capacity import (
    NEUTRAL,
    PolicyOutcome,
    Run,
    fitting,
    fleet_for,
    grid,
    impossible,
    largest_pool,
    log_summary,
    log_task,
    longest_request,
    noise,
    on_replicas,
    play_policy,
    refused,
    screen,
    thinned,
    too_little,
)
from ops.objectives import Objective
from ops.prices import Prices
from ops.scaling import Autoscaled, autoscaled
from simulator.hardware.tables import ServingTables, tables_of
from simulator.load.requests import RequestLog

TTFT: Final = Objective("ttft", "p99", 500.0)
"""Objective without another one, and the share of requests in time (those not refused for their length) to which a
fleet is sized."""
FIXED: Final = "fixed"
"""Name of the user's own configuration in a report."""
CONSTANT: Final = "best_constant"
"""Name of the best constant setting: of a sweep, or the user's own."""
OWN_PRECISION: Final = "best_own_precision"
"""Name of the best constant setting in the user's own precision, if the best of all has another one."""
FINALISTS: Final = 4
"""Number of constants of a sweep that the reference plays."""
MAX_GPUS: Final = 64
"""Most GPUs of a fleet sized to a log."""
LEAST_GAIN: Final = 1e-3
"""Share of the requests that one more replica has to bring in time while a fleet is sized."""
LEAST_SERVED: Final = 0.04
"""Smallest share of requests in time for which a policy is recommended."""


@dataclass(frozen=True, slots=True)
class ShadowReport:
    """Outcomes on one log with the same GPUs: the user's own configuration, the best constant, then the policies.

    If the best constant has another precision than the user's, the best one in theirs comes next, before the policies.
    ``autoscaling`` is the best constant under autoscalers, with its replicas as the maximum. ``gpu_hour`` is the price
    of a GPU-hour in ``currency``; None if no price was given. ``refused`` says how many requests are too long for any
    setting; it is empty if none is. ``short`` says that no constant setting serves enough of the others in time on
    these GPUs, and how many GPUs would do; it is empty if one does. A request is in time if its first token comes
    within ``slo_ms``; the first of the ``objectives`` says so, the others are only checked (:meth:`misses`).
    ``late_allowed`` is the share of late requests with which it is still met, with those that are too long.
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
    objectives: tuple[Objective, ...] = (TTFT,)
    gpu_hour: float | None = None
    currency: str = ""
    refused: str = ""
    short: str = ""
    late_allowed: float = 1 - TTFT.share

    def best(self) -> PolicyOutcome:
        """The recommended policy.

        The best adaptive policy, if it clearly beats both constants; else the best constant, if it clearly beats the
        user's own configuration, in their precision if no other is clearly better; else the user's own. Another
        precision changes the model's answers: it counts only if nothing in the user's own meets the objectives.
        """
        fixed, constant, *others = self.outcomes
        own = [o for o in others if o.policy == OWN_PRECISION]
        adaptive = [o for o in others if o.policy != OWN_PRECISION]
        if any(self.meets(o) for o in self.outcomes if not self.other_tiers(o)):
            adaptive = [o for o in adaptive if not self.other_tiers(o)]
            constant = next(o for o in (constant, *own, fixed) if not self.other_tiers(o))
        best = min(adaptive, key=_missed, default=constant)
        if self.clear(best, constant) and self.clear(best, fixed):
            return best
        return next((o for o in (*own, constant) if self.clear(o, fixed) and not self.clear(constant, o)), fixed)

    def meets(self, outcome: PolicyOutcome) -> bool:
        """Whether ``outcome`` meets the objectives by its simulated figures."""
        others = self.objectives[1:]  # the first says which requests are late
        missed = any(outcome.figures[o.figure] > o.limit_ms for o in others)
        return outcome.slo_miss_share <= self.late_allowed and not missed

    def other_tiers(self, outcome: PolicyOutcome) -> list[int]:
        """Precisions that an outcome uses besides that of the user's own setting."""
        return sorted({int(tier) for tier in outcome.timeline["quant_tier"]} - {self.fixed_action["quant_tier"]})

    def clear(self, outcome: PolicyOutcome, baseline: PolicyOutcome) -> bool:
        """Whether ``outcome`` has more requests in time than ``baseline``, beyond chance (:func:`noise`)."""
        return self.gain(outcome, baseline) > self.noise(outcome, baseline)

    def noise(self, outcome: PolicyOutcome, baseline: PolicyOutcome) -> float:
        """Half the 95% interval of :meth:`gain`."""
        return noise(outcome.slo_miss_share, baseline.slo_miss_share, self.log["requests"])

    def misses(self, outcome: PolicyOutcome) -> list[str]:
        """Objectives that ``outcome`` misses by its simulated figures, with these, as in ``TPOT p50 62 ms (of 50)``."""
        return [
            f"{o.label} {outcome.figures[o.figure]:,.0f} ms (of {o.limit_ms:g})"
            for o in self.objectives
            if outcome.figures[o.figure] > o.limit_ms
        ]

    def undecided(self) -> str | None:
        """Why no policy is recommended: too few requests, or nobody serves them. None if one is."""
        if little := too_little(self.log):
            return little
        if self.best().slo_miss_share >= 1 - LEAST_SERVED:
            return (
                f"No recommendation: on {self.n_gpus} x {self.hardware} no policy serves more than {LEAST_SERVED:.0%} "
                f"of the requests within {self.slo_ms:g} ms. Choose more GPUs or a longer objective."
            )
        return None

    @staticmethod
    def gain(outcome: PolicyOutcome, baseline: PolicyOutcome) -> float:
        """Share of requests in time of ``outcome``, minus that of ``baseline``."""
        return baseline.slo_miss_share - outcome.slo_miss_share

    def cost(self, outcome: PolicyOutcome) -> float | None:
        """Cost of the GPUs of an outcome, in the currency of the prices; None without a price."""
        return None if self.gpu_hour is None else outcome.gpu_seconds / 3600.0 * self.gpu_hour

    def to_dict(self) -> dict[str, Any]:
        """JSON form; ``best`` names the policy of :meth:`best`, ``undecided`` says why it is not recommended."""
        gains = {o.policy: self.gain(o, self.outcomes[1]) for o in self.outcomes}
        costs = {o.policy: self.cost(o) for o in self.outcomes}
        told = asdict(self)
        for outcome in told["outcomes"]:
            del outcome["lateness"]
        return {
            **told,
            "objectives": list(map(str, self.objectives)),
            "best": self.best().policy,
            "undecided": self.undecided(),
            "gain_over_best_constant": gains,
            "cost": costs,
        }


def shadow(
    log: RequestLog,
    agents: Sequence[str | Agent],
    *,
    fixed: ServeAction | Mapping[str, Any] | None = None,
    n_gpus: int | None = None,
    objectives: Sequence[Objective] = (),
    task: TaskSpec | None = None,
    tables: ServingTables | None = None,
    prices: Prices | None = None,
    drafts: bool = False,
) -> ShadowReport:
    """Replay a log under a fixed configuration, under the best constant of a sweep and under each agent.

    ``agents`` are registered names (``heuristic``, ``constant:{...}``) or agents. ``task`` gives fleet, objectives and
    stored policies of a task made from similar traffic; without it the fleet is sized to the log unless ``n_gpus`` is
    given: the fewest GPUs on which a constant serves enough of the requests in time, or those for the mean load if no
    number of GPUs does. Of the ``objectives`` (default :data:`TTFT`) that on a percentile of TTFT decides: its limit
    says which requests are in time, in all classes, its percentile how many are enough. ``fixed`` is the user's own
    setting, as an action or as some of its knobs; knobs left out are vLLM's defaults. Without ``drafts``, which need a
    draft model, the sweep and the policies draft no tokens; ``fixed`` and constants among the agents keep theirs.
    Raises :class:`DataFormatError` if the log lasts longer than an episode may, and any error of making an agent.
    """
    deciding = _deciding(objectives)
    enough = deciding.share if deciding else TTFT.share
    tables = tables or tables_of(None if task is None else task.hardware)
    if not isinstance(fixed, ServeAction):
        fixed = ServeAction.from_dict({**vllm_defaults(tables).to_dict(), **(fixed or {})})
    fixed.validate()
    tables.refuse_tier(fixed.quant_tier.value)
    if n_gpus is None and (hopeless := impossible(log, tables)):
        raise DataFormatError(hopeless)
    as_task = log_task(log, tables, deciding.limit_ms if deciding else None, task)
    fit = fitting(log, tables)
    # Fleets are sized, and settings screened, without requests that an engine refuses at once.
    screened = as_task if fit is log else replace(as_task, log=fit)
    tokens, pool_tokens = log.prompt_tokens + log.output_tokens, largest_pool(tables)
    too_long = float((tokens > longest_request(tables, pool_tokens)[0]).mean())
    more_help = True
    if n_gpus is None:
        units = as_task.fleet.n_replicas
        if task is None:
            if screened is not as_task:
                units = fleet_for(screened, tables)
            found = _fewest_replicas(screened, tables, units, drafts, enough)
            units, more_help = found or units, found is not None
        n_gpus = units * (2 if fixed.prefill_disagg else 1) * tables.cards_per_replica
    _check_gpus(n_gpus, fixed, tables.cards_per_replica)
    gpus = Field(as_task, tables, n_gpus, drafts, fit)
    own = gpus.constant(fixed)
    best = gpus.best_constants(own, fixed)
    scaling = gpus.autoscaled(*best[CONSTANT])
    # Take price and peak from the fixed configuration, so that observations of learned policies are scaled as in
    # training.
    scaled = Calibration(0.0, own.best_tps, own.best_tps, as_task.cost_budget / max(own.cost, 1e-9))
    outcomes = [
        replace(own.outcome, policy=FIXED, action=fixed.to_dict()),
        *(replace(run.outcome, policy=name, action=action.to_dict()) for name, (run, action) in best.items()),
        *(gpus.policy(_name(agent), agent, scaled).outcome for agent in agents),
    ]
    hardware = str(tables.meta["hardware"])
    short, late_allowed = "", too_long + 1 - enough
    if outcomes[1].slo_miss_share > late_allowed:
        least = n_gpus // tables.cards_per_replica + 1
        found = _fewest_replicas(screened, tables, least, drafts, enough) if more_help else None
        more = (
            "more GPUs would not help" if found is None else f"about {found * tables.cards_per_replica} GPUs would do"
        )
        which = " that are not refused" if too_long else ""
        within = f"within {as_task.slo_target_ms:g} ms on {n_gpus} x {hardware}"
        short = (
            f"Even with the best constant setting, fewer than {enough:.0%} of the requests{which} get their first "
            f"token {within}: {more}"
        )
    return ShadowReport(
        log=log_summary(log),
        n_gpus=n_gpus,
        slo_ms=as_task.slo_target_ms,
        table_sha256=tables.sha256,
        hardware=hardware,
        fixed_action=fixed.to_dict(),
        outcomes=outcomes,
        arrivals_per_s=thinned(own.arrivals).tolist(),
        autoscaling=scaling,
        objectives=(
            deciding or replace(TTFT, limit_ms=as_task.slo_target_ms),
            *(objective for objective in objectives if objective is not deciding),
        ),
        gpu_hour=None if prices is None else prices.gpu_hour(hardware),
        currency="" if prices is None else prices.currency,
        refused=refused(tokens, tables, pool_tokens),
        short=short,
        late_allowed=late_allowed,
    )


def _deciding(objectives: Sequence[Objective]) -> Objective | None:
    """The objective on a percentile of TTFT; None without objectives."""
    found = [one for one in objectives if one.quantity == "ttft" and one.share]
    if len(found) == 1 or not objectives:
        return found[0] if found else None
    raise InvalidConfigError(
        f"objectives {', '.join(map(str, objectives))} have {'more than one' if found else 'no'} percentile of TTFT, "
        "by which requests are in time or late: give one, as in --objective ttft_p99=500",
        "objective",
    )


def _fewest_replicas(task: TaskSpec, tables: ServingTables, least: int, drafts: bool, enough: float) -> int | None:
    """Fewest replicas, from ``least``, on which a constant serves ``enough`` (a share) of the requests in time.

    Told by the fluid model, as it screens settings. None if one more replica no longer helps, or at :data:`MAX_GPUS`.
    """
    before, settings = math.inf, grid(False, range(tables.n_tiers), drafts)
    for units in range(least, MAX_GPUS // tables.cards_per_replica + 1):
        missed = float(screen(on_replicas(task, units), tables, settings).missed.min())
        if missed <= 1 - enough:
            return units
        if missed > before - LEAST_GAIN:
            return None
        before = missed
    return None


def _check_gpus(n_gpus: int, fixed: ServeAction, cards_per_replica: int) -> None:
    each = cards_per_replica * (2 if fixed.prefill_disagg else 1)
    if n_gpus < 1 or n_gpus % each:
        why = " with prefill_disagg, which takes as many GPUs again" if fixed.prefill_disagg else ""
        raise refusal("n_gpus", n_gpus, f"a multiple of {each}, the GPUs of a replica{why}")


class Field:
    """A log and a number of GPUs, on which policies are played."""

    def __init__(self, task: TaskSpec, tables: ServingTables, n_gpus: int, drafts: bool, fit: RequestLog) -> None:
        """``fit`` are the requests of the log that are short enough to be served."""
        self._tables, self._drafts, self._fit = tables, drafts, fit
        units = n_gpus // tables.cards_per_replica
        self._together = _without(on_replicas(task, units), "prefill_disagg")
        self._apart = on_replicas(task, units // 2) if units % 2 == 0 else None

    def constant(self, action: ServeAction) -> Run:
        """Play a constant setting."""
        return play_policy(CONSTANT, ConstantAgent(action), self._task(action), self._tables, NEUTRAL)

    def autoscaled(self, constant: Run, action: ServeAction) -> list[Autoscaled]:
        """Play a constant setting under autoscalers."""
        return autoscaled(self._task(action), self._tables, action, 1.0 - constant.outcome.slo_miss_share)

    def _task(self, action: ServeAction) -> TaskSpec:
        task = self._apart if action.prefill_disagg else self._together
        assert task is not None
        return task

    def best_constants(self, own: Run, fixed: ServeAction) -> dict[str, tuple[Run, ServeAction]]:
        """Constant settings that miss the fewest requests: of all, and of those in the precision of the user's own.

        The user's own setting, which was played, competes with the finalists of a sweep. The second is left out if it
        is the first.
        """
        found: list[tuple[float, ServeAction]] = []
        for task, apart in ((self._together, False), (self._apart, True)):
            if task is not None:
                settings = grid(apart, range(self._tables.n_tiers), self._drafts)
                shares = screen(replace(task, log=self._fit), self._tables, settings).missed
                found += zip(shares.tolist(), settings, strict=True)
        ranked = [action for _, action in sorted(found, key=lambda f: f[0])]
        in_own = [action for action in ranked if action.quant_tier == fixed.quant_tier]
        finalists = [action for action in ranked if action in ranked[:FINALISTS] or action in in_own[:FINALISTS]]
        runs = [*((self.constant(action), action) for action in finalists), (own, fixed)]
        runs.sort(key=lambda r: (r[0].outcome.slo_miss_share, r[0].outcome.ttft_p99_ms))
        best = next(run for run in runs if run[1].quant_tier == fixed.quant_tier)
        return {CONSTANT: best} if best is runs[0] else {CONSTANT: runs[0], OWN_PRECISION: best}

    def policy(self, name: str, agent: str | Agent, calibration: Calibration) -> Run:
        """Play a policy with prefill on the replicas and, if it ever asks, on separate GPUs; returns the better run."""
        together = self._played(name, agent, self._together, calibration)
        if self._apart is None or not together.asked_apart:
            return together
        apart = self._played(name, agent, self._apart, calibration)
        return min(together, apart, key=lambda run: run.outcome.slo_miss_share)

    def _played(self, name: str, agent: str | Agent, task: TaskSpec, calibration: Calibration) -> Run:
        held = task if self._drafts else _without(task, "spec_length")
        try:
            made = make_agent(agent, held, self._tables) if isinstance(agent, str) else agent
        except InvalidConfigError as error:
            name = str(agent).partition(":")[0]
            if name in AGENTS and AGENTS[name].stored:
                error.add_note("a stored policy belongs to a task: name it with --task")
            elif task.fleet.max_replicas is None and name in ("hpa", "kpa", "scheduled", "planner"):
                error.add_note("hpa and planner are compared without being named")
            raise
        # The user chose all knobs of a constant.
        return play_policy(name, made, task if isinstance(made, ConstantAgent) else held, self._tables, calibration)


def _without(task: TaskSpec, knob: str) -> TaskSpec:
    """The task without one of its knobs, which then keeps its default."""
    return replace(task, active_actions=tuple(name for name in task.active_actions if name != knob))


def _missed(outcome: PolicyOutcome) -> float:
    return outcome.slo_miss_share


def _name(agent: str | Agent) -> str:
    return agent if isinstance(agent, str) else type(agent).__name__
