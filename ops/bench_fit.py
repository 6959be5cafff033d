"""Fit an engine profile to benchmark results, and judge it on runs that were held out.

Five numbers are fitted by least squares on log ratios of predicted to measured latencies and throughput: overhead per
iteration and per sequence, the GEMM scale, the scale of memory bandwidth, and the TTFT offset. The discrete-event
reference predicts each run with the operator model, as it plays plans, so the fit minimises the errors that users will
see. A weak pull towards the starting profile keeps numbers that the runs cannot separate where they were. Memory
bandwidth is fitted only if the source of operator times can be scaled with it.

The fit starts from the table with the nearest predictions, unless one is named. It is kept if it predicts the held-out
runs better than its start does. It is refused if it is still far off, or needs scales that no such card can have.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from scipy.optimize import least_squares

from inferencegym.errors import DataFormatError, InvalidConfigError, refusal, short_repr
from inferencegym.tasks import table_index
from ops.log.bench import METRICS, BenchRun
from simulator.events.fleet import Fleet
from simulator.events.requests import Requests
from simulator.events.simulation import Simulation
from simulator.hardware.catalogue import table_path
from simulator.hardware.measured_model import MeasuredSource
from simulator.hardware.memory import kv_pool_gb
from simulator.hardware.operators import OperatorModel, Source
from simulator.hardware.profiles import EngineProfile, engine
from simulator.hardware.sources import engine_of, operators_of, source_of
from simulator.hardware.tables import FloatArray, load_tables
from simulator.offline.table import table_metadata

WEIGHT: Final[Mapping[str, float]] = {
    "ttft_p50_ms": 1 / 0.15,
    "ttft_p99_ms": 1 / 0.5,
    "tpot_ms": 1 / 0.05,
    "output_tokens_per_s": 1 / 0.05,
}
"""Weight of each metric's log ratio: one over the error that is expected to remain after a fit."""
PRIOR_WEIGHT: Final = 0.3
MOST_ERROR: Final = 0.35
"""Largest median error of TPOT and throughput; beyond it the table does not describe the engine."""
SCALES: Final = (0.5, 2.0)
"""Range of GEMM and bandwidth scales that a card of the chosen kind can have; beyond it, the card is another one."""
NEAREST_RUNS: Final = 4
"""Number of runs by which the nearest table is chosen."""


@dataclass(frozen=True, slots=True)
class _Parameter:
    """A fitted number: its bounds, and the change that is penalised like ``PRIOR_WEIGHT`` of an expected error."""

    name: str
    low: float
    high: float
    scale: float


_PARAMETERS: Final = (
    _Parameter("step_overhead_ms", 0.0, 50.0, 3.0),
    _Parameter("sequence_overhead_ms", 0.0, 2.0, 0.05),
    _Parameter("log_gemm_scale", -math.log(5.0), math.log(5.0), 0.2),
    _Parameter("log_bandwidth_scale", -math.log(5.0), math.log(5.0), 0.1),
    _Parameter("ttft_offset_ms", 0.0, 500.0, 30.0),
)


@dataclass(frozen=True, slots=True)
class BenchError:
    """Relative errors of one metric over some runs, before (the starting profile) and after the fit."""

    metric: str
    group: str
    runs: int
    before_median: float
    after_median: float
    before_worst: float
    after_worst: float


@dataclass(frozen=True, slots=True)
class BenchFit:
    """A fitted engine, with its prediction errors on fitted and on held-out runs."""

    engine: EngineProfile
    source: Source
    hardware: str
    bandwidth_scale: float
    fitted: list[str]
    held_out: list[str]
    errors: list[BenchError]
    kept: bool
    """Whether the fit is used; if not, the starting profile is, because it predicts the held-out runs as well."""

    def to_dict(self) -> dict[str, Any]:
        """JSON form, stored in the table that is built from the fit."""
        stated = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "source"}
        found = {"engine": dataclasses.asdict(self.engine), "card": dataclasses.asdict(self.source.card)}
        return {**stated, **found, "errors": [dataclasses.asdict(error) for error in self.errors]}


@dataclass(frozen=True, slots=True)
class Setup:
    """Benchmarked deployment: largest batch, precision, replicas behind the address."""

    max_num_seqs: int = 256
    tier: str | None = None
    """Precision; None: the first of the table."""
    replicas: int = 1

    def tier_of(self, tiers: Sequence[str]) -> str:
        """The benchmarked precision, by default the first of ``tiers``."""
        return tiers[0] if self.tier is None else self.tier

    def fleet(self, model: OperatorModel, meta: Mapping[str, Any]) -> Fleet:
        """The deployment with the largest KV pool that fits on the card with that many sequences."""
        memory, weights_gb = meta["memory_gb"], float(meta["weights_gb"][model.tier])
        budget_gb, limit_gb = float(meta["memory_budget_gb"]), float(meta["memory_limit_gb"])
        largest_gb = kv_pool_gb(memory, budget_gb, weights_gb, 1.0, drafts=False)
        fixed_gb = weights_gb + memory["activations_gb"] + memory["per_sequence_gb"] * self.max_num_seqs
        share = min(1.0, max(0.1, (limit_gb - fixed_gb - 0.01) / largest_gb))
        pool_tokens = int(share * largest_gb * 1e9 / float(meta["kv_bytes_per_token"]))
        return Fleet(model, self.max_num_seqs, pool_tokens, replicas=self.replicas, server=True)


def fit_engine(
    runs: Sequence[BenchRun],
    hardware_name: str | None = None,
    start: str | None = None,
    setup: Setup | None = None,
    hold_out: float = 0.25,
    name: str = "imported",
) -> BenchFit:
    """Fit a profile to most runs and judge it on the others.

    ``hardware_name`` is a table of the catalogue or a card of ``profiles.json`` (None: the nearest table); ``start`` is
    a profile (None: that of the table). In order of load, every ``1 / hold_out``-th run is held out, and at least one
    if there are two or more; 0 holds out none. Raises :class:`InvalidConfigError` on settings out of range,
    :class:`DataFormatError` if no run is left to fit or nothing fits.
    """
    setup = setup or Setup()
    if not 1 <= setup.max_num_seqs <= 4096 or not 1 <= setup.replicas <= 4096:
        raise InvalidConfigError(f"{setup} is not allowed: max_num_seqs and replicas 1 to 4096")
    if hold_out != 0.0 and not 0.001 <= hold_out <= 0.5:
        raise refusal("hold_out", hold_out, "0, or from 0.001 to 0.5")
    ordered = sorted(runs, key=BenchRun.load)
    held = set(_held_out(len(ordered), hold_out))
    fitting = [r for i, r in enumerate(ordered) if i not in held]
    testing = [r for i, r in enumerate(ordered) if i in held]
    if not fitting:
        raise DataFormatError("no run to fit to: give more result files")
    chosen = hardware_name or nearest_table(ordered, setup)
    source, profile = _starting(chosen, start)
    source.check_tier(setup.tier_of(source.tiers))
    model = _Predictor(source, profile, setup)
    begin = model.start()
    solution = _least_squares(model, fitting)
    judged = testing or fitting
    kept = _misfit(model, solution, judged) < _misfit(model, begin, judged)
    used = solution if kept else begin
    _refuse_misfit(chosen, model, used, judged)
    said = f"Fitted to {len(fitting)} runs, from {profile.name} on {chosen}." if kept else profile.source
    return BenchFit(
        engine=replace(model.profile(used), name=name, source=said),
        source=model.source(used),
        hardware=chosen,
        bandwidth_scale=float(math.exp(used[3])),
        fitted=[r.name for r in fitting],
        held_out=[r.name for r in testing],
        errors=[
            *_errors("held out", model, begin, solution, testing),
            *_errors("fitted", model, begin, solution, fitting),
        ],
        kept=kept,
    )


def nearest_table(runs: Sequence[BenchRun], setup: Setup) -> str:
    """Name of the shipped table that, without a fit, predicts a sample of the runs best."""
    some = list(runs)[:: max(1, len(runs) // NEAREST_RUNS)][:NEAREST_RUNS]
    misfit = {}
    for name, entry in table_index().items():
        if setup.tier is None or setup.tier in entry["tiers"]:
            tables = load_tables(table_path(name))
            fleet = setup.fleet(operators_of(tables)[tables.tier_index(setup.tier_of(tables.tiers))], tables.meta)
            try:
                ratios = [r for run in some for r in _ratios(_predicted(fleet, run), run)]
            except DataFormatError:
                continue  # its KV pool is smaller than a request that the engine served
            misfit[name] = math.fsum(abs(r) for r in ratios)
    if not misfit:
        raise InvalidConfigError(
            f"no table of the catalogue has precision {short_repr(setup.tier)} and a KV pool for all requests", "tier"
        )
    return min(misfit, key=misfit.__getitem__)


def _starting(name: str, start: str | None) -> tuple[Source, EngineProfile]:
    """Source and profile of a table of the catalogue, or of a card of ``profiles.json``."""
    if name not in table_index():
        source: Source = MeasuredSource(name)
        return source, engine(start or source.card.engine)
    meta = load_tables(table_path(name)).meta
    return source_of(meta), engine_of(meta) if start is None else engine(start)


def _ratios(predicted: Mapping[str, float], run: BenchRun) -> list[float]:
    """Weighted log ratios of prediction to measurement."""
    return [WEIGHT[metric] * math.log(value / run.measured[metric]) for metric, value in predicted.items()]


def _misfit(model: _Predictor, x: FloatArray, runs: Sequence[BenchRun]) -> float:
    """Mean of the absolute weighted log ratios over the runs."""
    return float(np.mean([abs(r) for run in runs for r in _ratios(model.predict(x, run), run)]))


def _refuse_misfit(name: str, model: _Predictor, x: FloatArray, runs: Sequence[BenchRun]) -> None:
    """Raise :class:`DataFormatError` with the evidence if the table does not describe the engine."""
    reasons = []
    for what, scale in (("GEMM scale", math.exp(x[2])), ("bandwidth scale", math.exp(x[3]))):
        if not SCALES[0] <= scale <= SCALES[1]:
            reasons.append(f"a {what} of {scale:.2g}, which must be from {SCALES[0]:g} to {SCALES[1]:g}")
    errors = [_relative(model, x, run) for run in runs]
    for metric in ("tpot_ms", "output_tokens_per_s"):
        found = [abs(e[metric]) for e in errors if metric in e]
        if found and np.median(found) > MOST_ERROR:
            reasons.append(f"a median error of {np.median(found):.0%} in {metric}, where {MOST_ERROR:.0%} is the most")
    if reasons:
        raise DataFormatError(
            f"the table {name} does not describe this engine: a fit needs {' and '.join(reasons)}; name the card and "
            "model that were measured with --hardware, build their table with `inferencegym build-table --system`, or "
            "fit the engine's own iteration times: --kv-pool-tokens, or `inferencegym measure`"
        )


def _held_out(n: int, share: float) -> list[int]:
    """Indices held out of ``n`` runs in order of load: evenly spaced, never the lightest run."""
    if share == 0.0 or n < 2:
        return []
    every = max(2, round(1.0 / share))
    return list(range(max(1, min(every // 2, n - 1)), n, every))


def _least_squares(model: _Predictor, runs: Sequence[BenchRun]) -> FloatArray:
    scale = np.array([p.scale for p in _PARAMETERS])
    start = model.start()
    low = np.array([p.low for p in _PARAMETERS])
    high = np.array([p.high for p in _PARAMETERS])

    def residuals(u: FloatArray) -> FloatArray:
        x = start + (u - 1.0) * scale
        parts = [
            WEIGHT[metric] * math.log(predicted / run.measured[metric])
            for run in runs
            for metric, predicted in model.predict(x, run).items()
        ]
        return np.array([*parts, *(PRIOR_WEIGHT * (u - 1.0))])

    # Parameters are in units of their scale, around 1, so that finite differences take steps of equal size. The steps
    # are wide because a figure jumps where two requests change their order.
    bounds = ((low - start) / scale + 1.0, (high - start) / scale + 1.0)
    inside = np.clip(np.ones(len(scale)), bounds[0] + 1e-6, bounds[1] - 1e-6)
    free = np.array([p.name != "log_bandwidth_scale" or model.fits_bandwidth for p in _PARAMETERS])

    def full(part: FloatArray) -> FloatArray:
        u = np.ones(len(scale))
        u[free] = part
        return u

    found = least_squares(
        lambda part: residuals(full(part)),
        inside[free],
        bounds=(bounds[0][free], bounds[1][free]),
        loss="soft_l1",
        diff_step=0.4,
        max_nfev=25,
    )
    solution: FloatArray = start + (full(found.x) - 1.0) * scale
    return solution


class _Predictor:
    """Predictions of the discrete-event reference for a run, given the numbers of a profile."""

    def __init__(self, source: Source, profile: EngineProfile, setup: Setup) -> None:
        self._source, self._profile, self._setup = source, profile, setup
        self._tier = setup.tier_of(source.tiers)
        self._meta = table_metadata(source, profile)
        self.fits_bandwidth = source.with_bandwidth(1.0) is not None
        self._fleet: tuple[bytes, Fleet] | None = None

    def start(self) -> FloatArray:
        """The starting profile's numbers."""
        p = self._profile
        return np.array([p.step_overhead_ms, p.sequence_overhead_ms, math.log(p.gemm_scale), 0.0, p.ttft_offset_ms])

    def profile(self, x: FloatArray) -> EngineProfile:
        """The engine profile of these numbers, rounded to the digits that the fit can resolve."""
        return replace(
            self._profile,
            step_overhead_ms=round(float(x[0]), 4),
            sequence_overhead_ms=round(float(x[1]), 5),
            gemm_scale=round(math.exp(float(x[2])), 4),
            ttft_offset_ms=round(float(x[4]), 3),
        )

    def source(self, x: FloatArray) -> Source:
        """The source with its card's bandwidth scaled."""
        return self._source.with_bandwidth(math.exp(float(x[3]))) or self._source

    def predict(self, x: FloatArray, run: BenchRun) -> dict[str, float]:
        """The metrics that the run states."""
        key = x.tobytes()
        if self._fleet is None or self._fleet[0] != key:
            model = self.source(x).operators(self._tier, self.profile(x))
            self._fleet = (key, self._setup.fleet(model, self._meta))
        return _predicted(self._fleet[1], run)


def _predicted(fleet: Fleet, run: BenchRun) -> dict[str, float]:
    """The fleet's metrics of a run, of those that the run states; raises DataFormatError if it refuses a request."""
    log = run.requests
    sent_s = np.zeros_like(log.arrival_s) if run.clients else log.arrival_s
    requests = Requests(sent_s, log.prompt_tokens.astype(np.int64), log.output_tokens.astype(np.int64))
    outcome = Simulation(fleet, requests, clients=run.clients or None).run()
    if outcome.rejected.any():
        longest = int((requests.prompt_tokens + requests.output_tokens).max())
        raise DataFormatError(
            f"{run.name} has a request of {longest:,} tokens, and the KV pool holds {fleet.kv_pool_tokens:,}"
        )
    ttft, tpot = outcome.ttft_ms(), outcome.tpot_ms()
    said = {
        "ttft_p50_ms": float(np.median(ttft)),
        "ttft_p99_ms": float(np.quantile(ttft, 0.99)),
        "tpot_ms": float(np.nanmedian(tpot)),
        "output_tokens_per_s": float(outcome.output_tokens.sum()) / outcome.makespan_s(),
    }
    return {name: max(said[name], 1e-6) for name in METRICS if name in run.measured}


def _errors(
    group: str, model: _Predictor, before: FloatArray, after: FloatArray, runs: Sequence[BenchRun]
) -> list[BenchError]:
    both = [[_relative(model, x, run) for run in runs] for x in (before, after)]
    found = []
    for metric in METRICS:
        old, new = ([abs(e[metric]) for e in errors if metric in e] for errors in both)
        if new:
            found.append(
                BenchError(
                    metric,
                    group,
                    len(new),
                    float(np.median(old)),
                    float(np.median(new)),
                    float(max(old)),
                    float(max(new)),
                )
            )
    return found


def _relative(model: _Predictor, x: FloatArray, run: BenchRun) -> dict[str, float]:
    return {metric: value / run.measured[metric] - 1.0 for metric, value in model.predict(x, run).items()}
