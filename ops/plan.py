"""Search for the cheapest fleet that meets objectives on a request log.

For every card it finds the smallest number of GPUs on which some setting likely meets all objectives, with the errors
of measured runs as margin (:mod:`ops.margins`), and the smallest that meets them with 90% certainty. Hundreds of
constant settings are rows of one batch in the fluid model (:func:`ops.capacity.screen`), which only ranks them. The
best ones are then played request by request in the discrete-event reference, whose figures decide and are reported. If
the log is long, only its busiest part is searched, and the result is played on all of it. The report adds what adaptive
policies do on as many GPUs and on fewer, and how many GPUs more traffic needs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np

from agents.protocol import FloatArray
from agents.registry import make_agent
from agents.search.solver import Progress, silent
from inferencegym.errors import DataFormatError, InvalidConfigError, short_repr
from inferencegym.models import QuantTier, Router, ServeAction
from inferencegym.tasks import TaskSpec, table_index
from ops.capacity import (
    GRID,
    MAX_SPAN_S,
    NEUTRAL,
    PolicyOutcome,
    fitting,
    fleet_for,
    grid,
    impossible,
    least_for_90,
    log_summary,
    log_task,
    longest_request,
    most_running,
    noise,
    on_replicas,
    play_constant,
    play_policy,
    refused,
    screen,
    share_within,
    side_by_side,
    too_little,
)
from ops.fidelity import model_ratios
from ops.margins import LIKELY, LOADS, NOT, WITH_90, Ratio, band_of, ratio
from ops.objectives import ALWAYS, Objective, margin
from ops.played import check_router
from ops.prices import Prices
from ops.scaling import Autoscaled, autoscaled
from simulator.hardware.catalogue import table_path, tables_named, tables_of_log, usual_name
from simulator.hardware.engine_times import TIER
from simulator.hardware.sources import engine_of, reported_gb, with_fp8_kv
from simulator.hardware.tables import ServingTables, load_tables
from simulator.load.requests import RequestLog
from simulator.workload import load_source

SEARCH_S: Final = 900.0
SEARCH_REQUESTS: Final = 20_000
"""Longest busiest part of a log that is searched: seconds and requests. The plan is played on all of the log."""
PLAYED_REQUESTS: Final = 200_000
"""Most requests of a log that a plan is played on; of a longer log, its busiest part."""
FINALISTS: Final = 3
"""Kinds of settings (drafts, prefill placement) of each precision that the reference plays, each with two batch sizes
at most: the one that the fluid model ranks first, and the largest."""
ALONE: Final = 64
ALONE_TOKENS: Final = 16.0
"""Requests that are played one at a time to find the least latency of any fleet, and their most output tokens."""
MAX_GPUS: Final = 256
LEAST_GAIN: Final = 0.01
"""Share of the requests that doubling a fleet has to bring in time for the search to go on in any case."""
ADAPTIVE: Final = ("heuristic", "hill_climb")
"""Policies that need only the observation; they are compared with the plan's constant setting."""
GROWTH: Final = (1.5, 2.0)


def registered_tables(hardware: Sequence[str] | None = None, model: str | None = None) -> dict[str, ServingTables]:
    """Load the tables that :func:`simulator.hardware.catalogue.tables_named` selects, by name."""
    return _loaded(tables_named(hardware, model))


def tables_for(
    hardware: Sequence[str] | None, model: str | None, log_model: Callable[[], str | None]
) -> tuple[dict[str, ServingTables], str | None]:
    """Load the tables that :func:`simulator.hardware.catalogue.tables_of_log` selects, and return its model, too."""
    names, model = tables_of_log(hardware, model, log_model)
    return _loaded(names), model


def _loaded(names: Sequence[str]) -> dict[str, ServingTables]:
    return {name: load_tables(table_path(name)) for name in names}


def tables_of_files(paths: Sequence[Path]) -> dict[str, ServingTables]:
    """Load the user's own table files, by file name without suffix."""
    if twice := {path.stem for path in paths if [each.stem for each in paths].count(path.stem) > 1}:
        raise InvalidConfigError(f"two tables have the same name ({', '.join(sorted(twice))}): rename a file", "table")
    return {path.stem: load_tables(path) for path in paths}


@dataclass(frozen=True, slots=True)
class Plan:
    """A fleet on a log: its make-up, its performance, its cost.

    ``margin`` is the smallest distance of a figure from its limit, as a share of the limit, with the figure multiplied
    by the median of measured / simulated latency (``errors`` by quantity, in the ``band`` of load of this plan).
    ``meets`` says whether margin, share of requests in time and number of replicas are sufficient and the fleet never
    ran out of memory. Where objectives are judged by window, ``windows_met`` is the share of the windows that hold, and
    ``margin`` the one that the required share of the windows keep; otherwise ``windows_met`` is None.
    ``verdict`` is ``"likely"`` then, or ``"meets with 90%"`` if figures times the 90% bound are within the limits
    too and the log has enough requests (:func:`ops.capacity.least_for_90`); otherwise ``"not"``. ``figures`` are as
    simulated, ``share_in_time`` counts with TTFT times the median; requests longer than the KV pool, which an engine
    refuses, are not in time. ``hardware`` is the table's name, ``card`` the name of its GPUs. Each replica has
    ``tensor_parallel`` GPUs, and so has each of ``prefill_replicas``, which only prefill (0: replicas prefill
    themselves). ``tokens_per_s`` and ``gpu_hours_per_million_tokens`` count output tokens over the whole log, during
    which the GPUs are held. Costs are None without prices. ``server_busy`` is the share of the played time in
    which a replica's API server sends output tokens.
    """

    hardware: str
    card: str
    n_gpus: int
    n_replicas: int
    prefill_replicas: int
    tensor_parallel: int
    policy: str
    precision: str
    kv_cache_fp8: bool
    action: dict[str, Any] | None
    meets: bool
    verdict: str
    margin: float
    band: str
    errors: dict[str, Ratio]
    share_in_time: float
    windows_met: float | None
    figures: dict[str, float]
    tokens_per_s: float
    gpu_hours_per_million_tokens: float
    cost_per_hour: float | None
    cost_per_million_tokens: float | None
    support: dict[str, float]
    memory_gb: float
    server_busy: float

    @property
    def cost(self) -> float:
        """Cost per hour, or the number of GPUs without prices."""
        return self.n_gpus if self.cost_per_hour is None else self.cost_per_hour

    @property
    def is_uneven(self) -> bool:
        """Whether another number of replicas prefill than decode."""
        return self.prefill_replicas not in (0, self.n_replicas)


@dataclass(frozen=True, slots=True)
class PlanReport:
    """Answer to "which GPUs, how many, which settings".

    ``plans`` has the smallest fleet of each hardware that likely meets the objectives, the cheapest first, ``certain``
    the smallest that meets with 90%, if one was found. ``tried`` are all fleets that the reference played; ``front``
    is their :func:`pareto` front. ``growth`` says how the :attr:`recommended` fleet performs under more traffic, and
    how many GPUs its settings then need for the same verdict. ``adaptive`` has policies on as many GPUs as the first
    plan and on fewer. On the fewest GPUs that suffice for a policy, it serves the share ``adapting_gain`` more of the
    requests in time than the best constant there, of which chance may explain ``adapting_noise``. ``autoscaling`` is
    the first plan under autoscalers, with its replicas as the maximum. ``left_out`` are tables that were not searched,
    with the reason; ``requests_for_90`` is how many requests a log needs for 90% certainty of its highest percentile;
    ``windows_met`` is the share of five-minute windows in which the objectives must hold, None if they
    must hold over the whole log; ``unmet`` the largest fleet that was tried on each hardware where none met the
    objectives; ``warnings`` the catalogue's warnings about the tables of plans; ``refused`` how many requests are too
    long to be served, by table.
    """

    log: dict[str, Any]
    objectives: list[str]
    share_met: float
    requests_for_90: int
    windows_met: float | None
    plans: list[Plan]
    certain: list[Plan]
    front: list[Plan]
    growth: list[dict[str, Any]]
    adaptive: list[Plan]
    adapting_saves_gpus: int
    adapting_gain: float
    adapting_noise: float
    autoscaling: list[Autoscaled]
    currency: str
    prices_from: str
    played_s: float
    searched_s: float
    wall_s: float
    router: str
    model: str
    left_out: dict[str, str]
    unmet: list[Plan]
    warnings: dict[str, list[str]]
    refused: dict[str, str]
    tried: list[Plan] = field(repr=False)

    @property
    def recommended(self) -> Plan | None:
        """The fleet to rent: the cheapest that meets with 90%, else the first plan, else None."""
        return next(iter([*self.certain, *self.plans]), None)

    @property
    def undecided(self) -> str | None:
        """Why the log is too short for a plan; None if it is not."""
        return too_little(self.log)

    def to_dict(self) -> dict[str, Any]:
        """JSON form, with ``recommended``; ``undecided`` says why no plan is recommended, and is None if one is."""
        recommended = None if self.recommended is None else asdict(self.recommended)
        return {**asdict(self), "recommended": recommended, "undecided": self.undecided}


def make_plan(
    log: RequestLog,
    objectives: Sequence[Objective],
    tables: Mapping[str, ServingTables],
    *,
    prices: Prices | None = None,
    share_met: float | None = None,
    windows_met: float | None = None,
    precisions: Sequence[str] | None = None,
    drafts: bool = False,
    disagg: bool = True,
    kv_cache_fp8: bool = False,
    replicas_min: int = 1,
    router: Router = "shared",
    policies: Sequence[str] = ADAPTIVE,
    progress: Progress = silent,
) -> PlanReport:
    """Search fleets of all these tables, which must be of one model.

    ``share_met`` is the share of requests whose first token must come within the objective (default: that of the
    strictest percentile), ``windows_met`` the share of five-minute windows that must meet the objectives, each judged
    like a log (default: the log is judged as a whole), ``precisions`` names the precisions that may be used (default:
    all of a table), ``drafts`` says whether settings may draft tokens, which needs a draft model, ``disagg`` whether
    they may prefill on GPUs of their own, and ``kv_cache_fp8`` that the KV cache is in FP8. Plans have at least
    ``replicas_min`` replicas, of which ``router`` chooses one for each request. Tables with none of the precisions and
    cards without a price are left out. Raises :class:`InvalidConfigError` if no objective is given or no table is left.
    """
    started = time.perf_counter()
    if not objectives:
        raise InvalidConfigError("give at least one objective, as in ttft_p99=500", "objective")
    check_router(router, log)
    precisions = None if precisions is None else [_precision(name, tables) for name in precisions]
    if kv_cache_fp8:
        tables = {name: with_fp8_kv(table) for name, table in tables.items()}
    tables, left_out = _usable(tables, prices, precisions)
    tables, hopeless = _able(log, tables, precisions)
    whole, log = log, _servable(log, tables, precisions)
    summary = log_summary(whole)
    first_token = [o for o in objectives if o.quantity == "ttft"]
    strictest = max(first_token, key=lambda o: o.share, default=None)
    required = max(share_met or 0.0, strictest.share if strictest else 0.0)
    requests_for_90 = least_for_90(max(required, *(o.share for o in objectives)))
    played, searched = busiest(log, MAX_SPAN_S, PLAYED_REQUESTS), busiest(log, SEARCH_S, SEARCH_REQUESTS)
    tokens_per_s = float(log.output_tokens.sum()) / max(1.0, float(log.arrival_s[-1]))
    limit_ms = strictest.limit_ms if strictest else None
    request_tokens = np.sort(played.prompt_tokens + played.output_tokens)
    shares = dict.fromkeys(tables, 0.0)

    def tell(name: str, share: float) -> None:
        shares[name] = share
        progress(f"searching {name}", sum(shares.values()) / (len(tables) + 1))

    def card_of(name: str) -> _Card:
        table = tables[name]
        return _Card(
            name,
            table,
            log_task(searched, table, limit_ms),
            log_task(played, table, limit_ms),
            request_tokens,
            whole,
            tokens_per_s,
            objectives,
            required,
            requests_for_90,
            windows_met,
            prices,
            precisions,
            drafts,
            disagg,
            replicas_min,
            router,
        )

    def search(card: _Card) -> None:
        card.search(partial(tell, card.name))
        tell(card.name, 1.0)

    searches = [] if too_little(summary) else side_by_side(card_of, tables)
    if searches and windows_met is None:
        alone = side_by_side(lambda card: card.alone(log), searches)
        _check_possible(objectives, [*chain(*alone)])
        for card, plans in zip(searches, alone, strict=True):
            card.too_slow = bool(_missed(objectives, plans))
            card.never_certain = bool(_missed(objectives, plans, "p90"))
    side_by_side(search, searches)
    found = sorted((c for c in searches if c.best is not None), key=lambda card: card.price(card.best))
    side_by_side(_Card.search_certain, found)
    certain = sorted((c for c in found if c.certain is not None), key=lambda card: card.price(card.certain))
    growth: list[dict[str, Any]] = []
    adaptive: list[Plan] = []
    saved, gain, chance = 0, 0.0, 0.0
    scaling: list[Autoscaled] = []
    if found:
        progress("adaptive policies and growth", len(tables) / (len(tables) + 1))
        first, chosen = found[0], (certain or found)[0]
        adaptive, saved, gain, chance = first.adaptive(policies)
        scaling = first.autoscaled()
        growth = monotone(side_by_side(lambda factor: chosen.under(factor, searched.faster(factor)), GROWTH))
    tried = [plan for card in searches for plan in card.tried]
    progress("done", 1.0)
    return PlanReport(
        log=summary,
        objectives=[str(o) for o in objectives],
        share_met=required,
        requests_for_90=requests_for_90,
        windows_met=windows_met,
        plans=[card.best for card in found if card.best is not None],
        certain=[card.certain for card in certain if card.certain is not None],
        front=pareto(tried),
        growth=growth,
        adaptive=adaptive,
        adapting_saves_gpus=saved,
        adapting_gain=gain,
        adapting_noise=chance,
        autoscaling=scaling,
        currency="" if prices is None else prices.currency,
        prices_from="" if prices is None else prices.source,
        played_s=float(played.arrival_s[-1]),
        searched_s=float(searched.arrival_s[-1]),
        wall_s=time.perf_counter() - started,
        router=router,
        model=usual_name(str(next(iter(tables.values())).meta["model"])),
        left_out=left_out,
        unmet=[card.largest for card in searches if card.best is None],
        warnings={card.name: warnings for card in searches if (warnings := card.warnings)},
        refused=hopeless | {card.name: text for card in searches if (text := card.refused)},
        tried=tried,
    )


def _precision(name: str, tables: Mapping[str, ServingTables]) -> str:
    """A precision of the catalogue or of these tables, whatever its case."""
    listed: list[str] = [tier for entry in table_index().values() for tier in entry["tiers"]]
    known = list(dict.fromkeys([*listed, *(tier for table in tables.values() for tier in table.tiers)]))
    found = next((tier for tier in known if tier.lower() == name.lower()), None)
    if found is None:
        raise InvalidConfigError(f"quant={short_repr(name)} is not allowed: it must be of {', '.join(known)}", "quant")
    return found


def _usable(
    tables: Mapping[str, ServingTables], prices: Prices | None, precisions: Sequence[str] | None
) -> tuple[dict[str, ServingTables], dict[str, str]]:
    """Tables that have a price and one of the precisions, and why the others are left out."""
    left_out: dict[str, str] = {}
    for name, table in tables.items():
        card = str(table.meta["hardware"])
        if prices is not None and prices.find(card) is None:
            left_out[name] = f"no price for {card}"
        elif precisions is not None and not set(precisions) & set(table.tiers):
            left_out[name] = f"it has {', '.join(table.tiers)}"
    kept = {name: table for name, table in tables.items() if name not in left_out}
    if not kept:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        unpriced = all(reason.startswith("no price") for reason in left_out.values())
        raise InvalidConfigError(f"no hardware is left to plan with ({reasons})", "prices" if unpriced else "quant")
    return kept, left_out


def _able(
    log: RequestLog, tables: Mapping[str, ServingTables], precisions: Sequence[str] | None
) -> tuple[dict[str, ServingTables], dict[str, str]]:
    """Tables on which enough requests of the log fit, and why nothing is planned on the others."""
    hopeless = {
        name: text for name, table in tables.items() if (text := impossible(log, table, _tiers(table, precisions)))
    }
    kept = {name: table for name, table in tables.items() if name not in hopeless}
    if not kept:
        by_text: dict[str, list[str]] = {}
        for name, text in hopeless.items():
            by_text.setdefault(text, []).append(name)
        raise DataFormatError("; ".join(f"{', '.join(names)}: {text}" for text, names in by_text.items()))
    return kept, hopeless


def _servable(log: RequestLog, tables: Mapping[str, ServingTables], precisions: Sequence[str] | None) -> RequestLog:
    """The requests that fit on one of the tables at least: no fleet could serve the others."""
    parts = [fitting(log, table, _tiers(table, precisions)) for table in tables.values()]
    return max(parts, key=lambda part: len(part.arrival_s))


def _tiers(table: ServingTables, precisions: Sequence[str] | None) -> list[int]:
    """Indices of the precisions that may be used."""
    return [i for i, tier in enumerate(table.tiers) if precisions is None or tier in precisions]


def busiest(log: RequestLog, seconds: float, requests: int) -> RequestLog:
    """The part with the most tokens per second, with times from its own start; all of a log within the limits.

    It has at most this many requests and seconds, and as many seconds as the number of requests allows.
    """
    n = len(log.arrival_s)
    if log.arrival_s[-1] < seconds and n <= requests:
        return log
    work = np.concatenate([[0.0], np.cumsum(log.prompt_tokens + log.output_tokens)])
    in_time = np.searchsorted(log.arrival_s, log.arrival_s + seconds - 1.0)
    ends = np.minimum(in_time, np.arange(n) + requests)
    length_s = np.where(ends < in_time, log.arrival_s[ends - 1] - log.arrival_s, seconds - 1.0)
    first = int(np.argmax((work[ends] - work[:-1]) / np.maximum(1.0, length_s)))
    return log.part(slice(first, int(ends[first])), log.arrival_s[first])


def one_at_a_time(log: RequestLog, spacing_s: float) -> RequestLog:
    """Requests of the log with equally spaced ranks of prompt length, each so long after the one before.

    They are played for the least latency of any fleet: of their prompts only what no earlier request has computed is
    left, and of their outputs the first tokens.
    """
    prompts = np.sort(np.maximum(1.0, log.prompt_tokens - log.reused_tokens))
    prompts = prompts[((np.arange(ALONE) + 0.5) / ALONE * len(prompts)).astype(int)]
    outputs = np.full(ALONE, min(ALONE_TOKENS, float(log.output_tokens.max())))
    return RequestLog(np.arange(ALONE) * np.float64(spacing_s), prompts, outputs, np.zeros(ALONE, dtype=np.int64))


def _least_ms(plan: Plan, objective: Objective, error: str = "p50") -> float:
    """Its latency times the error of measured runs (median or 90% bound) in the band of load where that is smallest."""
    errors = (getattr(ratio(objective.quantity, plan.card, band), error) for band in LOADS)
    return plan.figures[objective.figure] * float(min(errors))


def _missed(objectives: Sequence[Objective], alone: Sequence[Plan], error: str = "p50") -> list[tuple[Objective, Plan]]:
    """Objectives that are missed even by requests that are ``alone`` on a replica, with the fastest of these plans."""
    fastest = [(o, min(alone, key=partial(_least_ms, objective=o))) for o in objectives] if alone else []
    return [(o, plan) for o, plan in fastest if _least_ms(plan, o, error) > o.limit_ms]


def _check_possible(objectives: Sequence[Objective], alone: Sequence[Plan]) -> None:
    """Refuse objectives that no card here can meet, with the least latency that is possible."""
    wrong = [
        f"{o.label} <= {o.limit_ms:g} ms is impossible: with one request at a time it is already "
        f"{_least_ms(plan, o):,.1f} ms on the fastest card here ({plan.card}, {plan.precision})"
        for o, plan in _missed(objectives, alone)
    ]
    if wrong:
        raise InvalidConfigError(f"{'; '.join(wrong)}. Choose a longer limit, or other hardware", "objective")


def pareto(plans: Sequence[Plan]) -> list[Plan]:
    """Plans that no other plan beats in both cost and share of requests in time, cheapest first.

    Without prices the cost is the number of GPUs, and GPUs of different hardware are not compared.
    """
    front: dict[str, list[Plan]] = {}
    for plan in sorted(plans, key=lambda p: (p.cost, -p.share_in_time)):
        line = front.setdefault(plan.hardware if plan.cost_per_hour is None else "", [])
        if not line or plan.share_in_time > line[-1].share_in_time + 1e-9:
            line.append(plan)
    return [plan for line in front.values() for plan in line]


class _Card:
    """Search on one card.

    ``request_tokens`` are the sorted tokens of each request that is played, ``tokens_per_s`` the output tokens of the
    requests that some table serves, over the log's time; ``whole`` has the others too.
    """

    def __init__(
        self,
        name: str,
        tables: ServingTables,
        searched: TaskSpec,
        played: TaskSpec,
        request_tokens: FloatArray,
        whole: RequestLog,
        tokens_per_s: float,
        objectives: Sequence[Objective],
        required: float,
        requests_for_90: int,
        windows_met: float | None,
        prices: Prices | None,
        precisions: Sequence[str] | None,
        drafts: bool,
        disagg: bool,
        replicas_min: int,
        router: Router,
    ) -> None:
        self.name, self._tables, self._searched, self._played = name, tables, searched, played
        self._objectives, self._required = objectives, required
        self._enough = len(whole.arrival_s) >= requests_for_90
        self._drafts, self._disagg = drafts, disagg
        self._windows_met = windows_met
        self._request_tokens, self._tokens_per_s, self._replicas_min = request_tokens, tokens_per_s, replicas_min
        self._all_tokens = whole.prompt_tokens + whole.output_tokens
        self._router: Router = router
        self._card, self._model = str(tables.meta["hardware"]), usual_name(str(tables.meta["model"]))
        self._gpu_hour = None if prices is None else prices.gpu_hour(self._card)
        self._cards_each = tables.cards_per_replica
        self._token_ms = engine_of(tables.meta).token_ms
        self._most = MAX_GPUS // self._cards_each
        self._tiers = _tiers(tables, precisions)
        assert isinstance(searched.log, RequestLog)
        fit = fitting(searched.log, tables, self._tiers)
        # Without requests that an engine refuses at once: the fluid model would serve them.
        self._fitting = searched if fit is searched.log else replace(searched, log=fit)
        self._fit_share = len(fit.arrival_s) / len(searched.log.arrival_s)
        self._known: dict[int, list[Plan]] = {}
        self._on_all: dict[int, Plan] = {}
        # Even with one request at a time, so that more GPUs do not help.
        self.too_slow = self.never_certain = False
        self._safer: list[Plan] = []
        self.best: Plan | None = None
        self.certain: Plan | None = None

    def price(self, plan: Plan | None) -> tuple[float, float, float]:
        """Sort key of a plan on this card: its cost, then the card's memory, then its margin, the largest first."""
        assert plan is not None
        return plan.cost, reported_gb(self._tables.meta), -plan.margin

    def alone(self, log: RequestLog) -> list[Plan]:
        """A replica on the requests of :func:`one_at_a_time`, in each precision and with each number of drafts."""
        longest = log_task(one_at_a_time(log, 0.0).part(slice(ALONE - 1, None), 0.0), self._tables)
        drafts = [int(spec) for spec in GRID["spec_length"]] if self._drafts else [0]
        actions = [ServeAction(0.9, spec, 16, False, QuantTier(tier)) for tier in self._tiers for spec in drafts]
        found = []
        for action in actions:
            each_s = self._play(longest, 1, action).figures["e2e_mean_ms"] / 1e3
            if each_s * ALONE < MAX_SPAN_S:
                task = log_task(one_at_a_time(log, each_s), self._tables)
                found.append(self._plan("constant", self._play(task, 1, action), action))
        return found

    def search(self, progress: Callable[[float], None]) -> None:
        """Find the smallest number of GPUs on which a setting meets the objectives on all of the log."""
        guess = max(1, fleet_for(self._fitting, self._tables))
        steps = 0

        def best_on(units: int) -> Plan:
            nonlocal steps
            steps += 1
            progress(min(0.95, steps / 10))
            return self._best(units)

        most = max(guess, self._replicas_min) if self.too_slow else self._most
        least = smallest_fleet(best_on, guess, most, self._required, self._replicas_min)
        if least is None:
            if not self._all_searched:  # The whole log is calmer than its busiest part.
                tried = max(self._known)
                least = smallest_fleet(self._whole, tried, tried, self._required)
                self.best = None if least is None else self._whole(least)
            return
        shown = {1, least // 2, least + 1} - {0}  # what smaller and larger fleets achieve
        for units in shown:
            best_on(units)
        if self._all_searched:
            self.best = best_on(least)
            return
        # The whole log is calmer than its busiest part, so fewer GPUs may do; rarely it needs more.
        for units in range(least - 1, 0, -1):
            whole = self._whole(units)
            if not whole.meets:
                break
            self.best = whole
        if self.best is None and (more := smallest_fleet(self._whole, least, self._most, self._required, least)):
            self.best = self._whole(more)
        for units in shown:
            self._whole(units)

    def _whole(self, units: int) -> Plan:
        """The best setting of the busiest part, played on all of the log."""
        if units not in self._on_all:
            best = self._best(units)
            action = action_of(best)
            outcome = self._play(self._played, units, action, best.prefill_replicas)
            self._on_all[units] = self._plan("constant", outcome, action)
        return self._on_all[units]

    @property
    def _all_searched(self) -> bool:
        return self._played.episode_length == self._searched.episode_length

    @property
    def tried(self) -> list[Plan]:
        """Fleets played on all of the log: the finalists or, for a long log, the best of each number of GPUs."""
        known = chain(*self._known.values()) if self._all_searched else self._on_all.values()
        return [*known, *self._safer]

    @property
    def largest(self) -> Plan:
        """The best setting on the largest fleet that was played."""
        units = max(self._known)
        return self._best(units) if self._all_searched else self._whole(units)

    def _best(self, units: int) -> Plan:
        """Best setting with the GPUs of ``units`` replicas, on the busiest part of the log.

        Finalists are played until one meets the objectives, those of the highest precision first, because lower ones
        change the model's answers; then those with another batch size only, which may leave more margin.
        """
        if units not in self._known:
            played = self._known[units] = []
            finalists = self._finalists(units)
            for action, prefill in chain(((each, 0) for each in finalists), self._uneven(finalists, units)):
                played.append(self._plan("constant", self._play(self._searched, units, action, prefill), action))
                if played[-1].meets:
                    same = replace(action, kv_budget=0.0, batch_size=0)
                    rest = [
                        each
                        for each in finalists[len(played) :]
                        if replace(each, kv_budget=0.0, batch_size=0) == same
                        and each.batch_size <= GRID["batch_size"][-1]
                    ]
                    played += [self._plan("constant", self._play(self._searched, units, s), s) for s in rest]
                    break
        return max(self._known[units], key=_merit)

    def _finalists(self, units: int) -> list[ServeAction]:
        ranked: list[tuple[float, float, ServeAction]] = []
        for apart in (False, True)[: 1 + self._disagg]:
            if apart and units % 2:
                continue
            settings = grid(apart, self._tiers, self._drafts)
            task = on_replicas(self._fitting, units // 2 if apart else units)
            screened = screen(task, self._tables, settings)
            slow = np.zeros(len(settings))
            error = ratio("tpot", self._card, "knee").p50
            for o in self._objectives:
                if o.quantity in ("tpot", "itl"):
                    slow = np.maximum(slow, screened.tpot(o.statistic) * error / o.limit_ms)
                elif o.quantity == "e2e":
                    # Most of it is decoding; the first token has its own share of requests in time.
                    slow = np.maximum(slow, screened.tpot("mean") * error * self._tokens_at(o) / o.limit_ms)
            over = np.maximum(0.0, slow - 1.0)
            of_all = 1.0 - (1.0 - screened.missed) * self._fit_share if self._fit_share < 1.0 else screened.missed
            missed = np.maximum(of_all, [self._too_long(setting) for setting in settings])
            # Of settings that are rated equal the largest batch size comes first: it serves the most if traffic grows.
            rows = zip(over.tolist(), missed.tolist(), settings, strict=True)
            ranked += [(o + max(0.0, m - (1.0 - self._required)), m, s) for o, m, s in rows]
        ranked.sort(key=lambda r: (*r[:2], r[2].kv_budget, r[2].spec_length, -r[2].batch_size))
        found, most, last = [], most_running(self._tables), GRID["batch_size"][-1]
        for tier in self._tiers:
            # Batch bounds that are never reached and pools that are never full make no difference.
            distinct: dict[tuple[int, bool], ServeAction] = {}
            largest: dict[tuple[int, bool], ServeAction] = {}
            of_tier = [(excess, setting) for excess, *_, setting in ranked if setting.quant_tier.value == tier]
            for _, setting in of_tier:
                kind = setting.spec_length, setting.prefill_disagg
                distinct.setdefault(kind, setting)
                if setting.batch_size == last:
                    largest.setdefault(kind, setting)
            kinds = list(distinct)[:FINALISTS]
            found += [distinct[kind] for kind in kinds]
            # The fluid model may rank a bound first that is too tight for the reference.
            found += [largest[kind] for kind in kinds if largest[kind] != distinct[kind]]
            # The grid ends where the fluid model's tables end; the reference may play batches that still fit the pool.
            excess, best = of_tier[0]
            fit = min(most, self._pool_tokens(best) / self._request_tokens.mean())
            if fit > last and (excess > 0.0 or best.batch_size == last):
                found.append(replace(best, batch_size=most))
        return found

    def _uneven(self, finalists: Sequence[ServeAction], units: int) -> Iterator[tuple[ServeAction, int]]:
        """The best setting of each precision with as many prefill replicas as the prompts keep busy, and with more."""
        if not self._disagg:
            return
        source = load_source(self._fitting, self._tables)
        stats = source.stats
        for tier in self._tiers:
            work_s = float(stats.shares @ stats.work_mean_ms[:, tier]) / float(stats.shares.sum()) / 1e3
            busy = math.ceil(source.nominal_rate_rps * work_s)
            action = next(each for each in finalists if each.quant_tier.value == tier)
            for prefill in (busy, busy + 1 + busy // 5):
                if 0 < prefill < units and 2 * prefill != units:
                    yield replace(action, prefill_disagg=True), prefill

    def _tokens_at(self, objective: Objective) -> float:
        """The objective's statistic of the output tokens of a request."""
        assert isinstance(self._searched.log, RequestLog)
        outputs = self._searched.log.output_tokens
        return float(np.quantile(outputs, objective.share) if objective.share else outputs.mean())

    def _pool_tokens(self, action: ServeAction) -> int:
        """Tokens that the KV pool of a replica holds."""
        return self._tables.kv_pool_tokens(action.quant_tier.value, action.kv_budget, action.spec_length > 0)

    def _too_long(self, action: ServeAction) -> float:
        """Share of requests that are longer than an engine takes."""
        most, _ = longest_request(self._tables, self._pool_tokens(action))
        served = np.searchsorted(self._request_tokens, most, side="right")
        return (len(self._request_tokens) - int(served)) / len(self._request_tokens)

    @property
    def warnings(self) -> list[str]:
        """What a reader must know of the table, if it has a plan."""
        return list(self._tables.meta.get("warnings", ())) if self.best is not None else []

    @property
    def refused(self) -> str:
        """How many requests the shown setting refuses because of their length."""
        action = action_of(self.best or self.largest)
        left_out = "count as late" if self._too_long(action) else "are left out of the plan"
        return refused(self._all_tokens, self._tables, self._pool_tokens(action), left_out)

    def autoscaled(self) -> list[Autoscaled]:
        """The best plan under autoscalers, with its replicas as the maximum."""
        assert self.best is not None
        if self.best.is_uneven:
            return []
        return autoscaled(
            *(on_replicas(self._played, self.best.n_replicas), self._tables, action_of(self.best)),
            in_time=self.best.share_in_time,
            ttft_ratio=lambda o: self._errors(o)["ttft"].p50,
            meets=lambda o: self._plan(o.policy, o, None).meets,
            router=self._router,
        )

    def _play(self, task: TaskSpec, units: int, action: ServeAction, prefill: int = 0) -> PolicyOutcome:
        """Play a setting on the GPUs of ``units`` replicas, of which ``prefill`` only prefill (0: half, if apart)."""
        if action.prefill_disagg and not prefill:
            prefill = units // 2
        task = on_replicas(task, units - prefill)
        shared = None if prefill in (0, units - prefill) else prefill
        return play_constant(action, task, self._tables, self._router, shared)

    def _plan(self, policy: str, outcome: PolicyOutcome, action: ServeAction | None) -> Plan:
        errors = self._errors(outcome)
        left, holding = self._judged(outcome, {quantity: error.p50 for quantity, error in errors.items()})
        _, at_90 = self._judged(outcome, {quantity: error.p90 for quantity, error in errors.items()})
        least = 1.0 if self._windows_met is None else self._windows_met
        meets = holding >= least and outcome.oom_seconds == 0 and outcome.n_replicas >= self._replicas_min
        n_gpus = outcome.n_gpus
        offered = outcome.completed + outcome.rejected + outcome.unserved
        tokens_per_s = self._tokens_per_s * outcome.completed / offered
        gpu_hours = n_gpus / 3600.0 / max(tokens_per_s, 1e-9) * 1e6
        price = self._gpu_hour
        return Plan(
            hardware=self.name,
            card=self._card,
            n_gpus=n_gpus,
            n_replicas=outcome.n_replicas,
            prefill_replicas=n_gpus // self._cards_each - outcome.n_replicas if action and action.prefill_disagg else 0,
            tensor_parallel=self._cards_each,
            policy=policy,
            precision="" if action is None else self._tables.tiers[action.quant_tier.value],
            kv_cache_fp8=self._tables.kv_cache_fp8,
            action=None if action is None else action.to_dict(),
            meets=meets,
            verdict=NOT if not meets else WITH_90 if at_90 >= least and self._enough else LIKELY,
            margin=left,
            band=band_of(outcome.requests_per_replica),
            errors=errors,
            share_in_time=outcome.share_in_time(errors["ttft"].p50),
            windows_met=None if self._windows_met is None else holding,
            figures=outcome.figures,
            tokens_per_s=tokens_per_s,
            gpu_hours_per_million_tokens=gpu_hours,
            cost_per_hour=None if price is None else n_gpus * price,
            cost_per_million_tokens=None if price is None else gpu_hours * price,
            support=outcome.support,
            memory_gb=outcome.peak_memory_gb,
            server_busy=outcome.tokens_per_s / outcome.n_replicas * self._token_ms / 1e3,
        )

    def _errors(self, outcome: PolicyOutcome) -> dict[str, Ratio]:
        """Errors of measured runs at the load of an outcome, by quantity."""
        band = band_of(outcome.requests_per_replica)
        quantities = dict.fromkeys([*ALWAYS, *(o.quantity for o in self._objectives)])
        own = {} if TIER in self._tables.tiers else model_ratios(self._model, self._card, band)
        return {quantity: ratio(quantity, self._card, band).at_least(own.get(quantity)) for quantity in quantities}

    def _judged(self, outcome: PolicyOutcome, factors: Mapping[str, float]) -> tuple[float, float]:
        """Margin and share of the windows that hold, with latencies times ``factors``; the whole log is one window."""
        by_window = self._windows_met is not None
        windows = outcome.windows if by_window else [outcome.figures]
        lateness = outcome.lateness if by_window else [np.concatenate(outcome.lateness)]
        margins = [margin(self._objectives, window, factors) for window in windows]
        shares = [share_within(late, factors["ttft"]) for late in lateness]
        held = [left >= 0.0 and share >= self._required for left, share in zip(margins, shares, strict=True)]
        kept = math.ceil((self._windows_met or 1.0) * len(windows) - 1e-9)
        return sorted(margins, reverse=True)[kept - 1], sum(held) / len(windows)

    def search_certain(self) -> None:
        """Find the smallest fleet that meets with 90%, from the best plan's size on.

        Played are the best plan's setting and the best ones of the other precisions.
        """
        assert self.best is not None
        if self.best.verdict == WITH_90:
            self.certain = self.best
        if self.certain or self.best.is_uneven or not self._enough:
            return
        best, units = action_of(self.best), self.best.n_gpus // self._cards_each
        actions = {best.quant_tier: best}
        for each in self._finalists(units):
            actions.setdefault(each.quant_tier, each)
        known, surest = self.tried, dict[int, Plan]()

        def play(n: int) -> Plan:
            for action in actions.values():
                there = [p for p in known if p.n_gpus == n * self._cards_each and p.action == action.to_dict()]
                if not there:
                    there = [self._plan("constant", self._play(self._played, n, action), action)]
                    self._safer += there
                surest[n] = there[0]
                if surest[n].verdict == WITH_90:
                    break
            return replace(surest[n], meets=surest[n].verdict == WITH_90)

        if self.never_certain:
            play(min(2 * units, self._most))  # the answer names the fleet that comes nearest
            return
        least = smallest_fleet(play, units, self._most, self._required, units)
        self.certain = None if least is None else surest[least]

    def adaptive(self, policies: Sequence[str]) -> tuple[list[Plan], int, float, float]:
        """Policies with prefill on the replicas, on the best plan's GPUs and on fewer.

        Also returns how many GPUs they save, how much larger a share of the requests they then serve in time than the
        best constant does, and how much of that chance may explain. If only the first precision is allowed, policies
        stay with it; under any other restriction of precisions, no policy is played.
        """
        assert self.best is not None
        held = {"prefill_disagg"} if len(self._tiers) == self._tables.n_tiers else {"prefill_disagg", "quant_tier"}
        held |= set() if self._drafts else {"spec_length"}
        if "quant_tier" in held and self._tiers != [0]:
            return [], 0, 0.0, 0.0
        knobs = tuple(k for k in self._played.active_actions if k not in held)
        units = self.best.n_gpus // self._cards_each

        def fewer_and_fewer(name: str) -> list[Plan]:
            """The policy on as many GPUs and on fewer, until it no longer meets the objectives."""
            plans: list[Plan] = []
            for n in range(units, 0, -1):
                task = replace(on_replicas(self._played, n), active_actions=knobs)
                agent = make_agent(name, task, self._tables)
                outcome = play_policy(name, agent, task, self._tables, NEUTRAL, self._router).outcome
                plans.append(self._plan(name, outcome, None))
                if not plans[-1].meets:
                    break
            return plans

        found = [plan for plans in side_by_side(fewer_and_fewer, policies) for plan in plans]
        saved = max((units - plan.n_gpus // self._cards_each for plan in found if plan.meets), default=0)
        if not saved:
            return found, 0, 0.0, 0.0
        fewer = units - saved
        constant = self._best(fewer) if self._all_searched else self._whole(fewer)
        best = max(p.share_in_time for p in found if p.n_gpus == fewer * self._cards_each)
        chance = noise(1.0 - best, 1.0 - constant.share_in_time, len(self._request_tokens))
        return found, saved * self._cards_each, best - constant.share_in_time, chance

    def under(self, factor: float, log: RequestLog) -> dict[str, Any]:
        """The plan to rent under ``factor`` times the traffic: its figures, and how many GPUs its settings then need.

        It is the certain one, of which the same verdict is asked, else the best.
        """
        chosen, sure = self.certain or self.best, self.certain is not None
        assert chosen is not None
        action = action_of(chosen)
        units = chosen.n_gpus // self._cards_each
        uneven, apart = chosen.is_uneven, chosen.prefill_replicas
        step = 2 if action.prefill_disagg and not uneven else 1
        task = log_task(log, self._tables, self._searched.slo_target_ms)
        played: dict[int, Plan] = {}

        def at(n: int) -> Plan:
            if n not in played:
                # The same share of prefill replicas.
                prefill = min(n - 1, max(1, round(n * apart / units))) if uneven else 0
                plan = self._plan("constant", self._play(task, n, action, prefill), action)
                played[n] = replace(plan, meets=plan.verdict == WITH_90) if sure else plan
            return played[n]

        now = at(units)
        guess, now_on = max(1, round(units * factor / step)), units // step
        least: int | None = now_on
        if not now.meets:
            most = self._most // step
            least = (
                smallest_fleet(lambda n: at(n * step), guess, most, self._required, now_on + 1)
                if now_on < most
                else None
            )
        return {
            "traffic": factor,
            "n_gpus": chosen.n_gpus,
            "meets": now.meets,
            "share_in_time": now.share_in_time,
            "figures": now.figures,
            "gpus_needed": None if least is None else least * step * self._cards_each,
        }


def monotone(growth: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of growth, the least traffic first, in which more traffic never needs fewer GPUs.

    A single play of each may say so: arrivals that are closer together meet other batches.
    """
    most, found = 0.0, []
    for row in growth:
        needed = row["gpus_needed"]
        most = max(most, math.inf if needed is None else needed)
        found.append({**row, "gpus_needed": None if math.isinf(most) else int(most)})
    return found


def _merit(plan: Plan) -> tuple[bool, float, float]:
    return plan.meets, plan.margin if plan.meets else plan.share_in_time, plan.margin


def action_of(plan: Plan) -> ServeAction:
    """The plan's setting; its batch bound may exceed the knob's."""
    assert plan.action is not None
    return ServeAction(**{**plan.action, "quant_tier": QuantTier(plan.action["quant_tier"])})


def smallest_fleet(play: Callable[[int], Plan], guess: int, most: int, required: float, least: int = 1) -> int | None:
    """Smallest number from ``least`` to ``most`` with a plan that meets the objectives.

    The search doubles and halves from a guess. None if ``most`` does not suffice, or if doubling brings less than
    :data:`LEAST_GAIN` of the requests in time and as much again would leave margin or ``required`` share missed.
    """
    low, high = least - 1, min(max(guess, least), most)
    plan = play(high)
    while not plan.meets:
        if high >= most:
            return None
        before, low, high = plan, high, min(2 * high, most)
        plan = play(high)
        more, wider = plan.share_in_time - before.share_in_time, plan.margin - before.margin
        short = plan.share_in_time + more < required or plan.margin + wider < 0.0
        if more < LEAST_GAIN and short and not plan.meets:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        if play(middle).meets:
            high = middle
        else:
            low = middle
    return high
