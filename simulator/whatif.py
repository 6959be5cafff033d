"""Any load under a fixed action in the fluid model, with statistics over requests."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from inferencegym.errors import InvalidConfigError, short_repr
from inferencegym.models import ACTION_FIELDS, QUANTILES, ServeAction
from inferencegym.seeds import MAX_SEED
from inferencegym.spaces.actions import to_row
from inferencegym.spaces.knobs import KnobKernel
from simulator.coverage import LEVELS, fleet_support
from simulator.hardware.tables import FloatArray, ServingTables
from simulator.kernel.serving import EngineParams, ServingFleet, ServingParams
from simulator.load.recorded import RecordedLoad
from simulator.load.requests import MAX_REQUESTS, RequestLog

MAX_STEPS: Final = 200_000
MAX_MEAN_TOKENS: Final = 10_000_000
MAX_CV: Final = 100
STEP_S: Final = 0.25
"""Step of a what-if (s), finer than the environment's: short loads are mostly their first and last seconds."""
_WAIT_POINTS: Final = 15
_TOLERANCE: Final = 1e-6
"""Tolerance in requests: far above the rounding errors of sums, far below one request."""
_ADMISSIONS_AT_ONCE: Final = 4_000
"""Recorded admissions whose TTFT values are in memory at a time: 285 values of each."""
_BIN_SHIFT: Final = 42
"""Bits that values of one bin do not share: a bin is 0.1% wide."""
# Quantiles between which the log-normal part of a TTFT is one value; they are denser towards the tail, for p99.
_SPREAD_EDGES: Final = np.concatenate([np.linspace(0.0, 0.9, 13), [0.95, 0.975, 0.985, 0.99, 0.995, 0.998, 1.0]])


def steady_requests(
    qps: float,
    n_requests: int | None,
    prompt_tokens: float,
    output_tokens: float,
    output_cv: float = 0.0,
    prompt_cv: float = 0.0,
    window_s: float | None = None,
    seed: int = 0,
) -> RequestLog:
    """Poisson arrivals at ``qps``; log-normal lengths of these means and coefficients of variation.

    ``window_s`` keeps only arrivals before that second; without ``n_requests`` only the window bounds their number.
    """
    if n_requests is None and window_s is None:
        raise InvalidConfigError("give a number of requests or a window: one of them must bound the load")
    if not qps > 0:
        raise InvalidConfigError(f"qps={qps!r} is not allowed: it must be above 0")
    if window_s is not None and not 0 < window_s < np.inf:
        raise InvalidConfigError(f"a window of {window_s!r} s is not allowed: it must be above 0 and finite")
    expected = n_requests if n_requests is not None else qps * float(window_s or 0.0)
    if expected > MAX_REQUESTS:
        raise InvalidConfigError(f"{short_repr(expected)} requests are not allowed: at most {MAX_REQUESTS:,}")
    if not 0 <= seed <= MAX_SEED:
        raise InvalidConfigError(f"seed={seed!r} is not allowed: it must be from 0 to {MAX_SEED}")
    rng = np.random.default_rng([seed, 0])
    count = n_requests if n_requests is not None else int(2 * expected + 100)
    arrival = np.cumsum(rng.exponential(1.0 / qps, count))
    if window_s is not None:
        arrival = arrival[arrival < window_s]
    n = len(arrival)
    return RequestLog(
        arrival_s=arrival,
        prompt_tokens=_lengths(rng, prompt_tokens, prompt_cv, n),
        output_tokens=_lengths(rng, output_tokens, output_cv, n),
        class_index=np.zeros(n, dtype=np.int64),
    )


def _lengths(rng: np.random.Generator, mean: float, cv: float, n: int) -> FloatArray:
    if not 1 <= mean <= MAX_MEAN_TOKENS or not 0 <= cv <= MAX_CV:
        raise InvalidConfigError(
            f"a length of mean {mean!r} and cv {cv!r} is not allowed: mean from 1 to {MAX_MEAN_TOKENS:,}, cv from 0 to "
            f"{MAX_CV}"
        )
    sigma2 = float(np.log1p(cv * cv))
    drawn = rng.lognormal(np.log(mean) - 0.5 * sigma2, np.sqrt(sigma2), n) if cv > 0 else np.full(n, float(mean))
    return np.maximum(1.0, np.rint(drawn))


@dataclass(frozen=True, slots=True)
class WhatIf:
    """Result of a what-if question.

    TTFT and TPOT are per request, in ms. ``makespan_s`` is the time until the last request is served. ``support`` is
    the share of busy steps whose operator times are measured, interpolated, modelled or extrapolated; ``classes`` has
    the TTFT of each priority class that occurs.
    """

    n_requests: int
    completed: float
    rejected: float
    ttft_p50_ms: float
    ttft_p90_ms: float
    ttft_p95_ms: float
    ttft_p99_ms: float
    ttft_mean_ms: float
    tpot_p50_ms: float
    tpot_p90_ms: float
    tpot_p95_ms: float
    tpot_p99_ms: float
    tpot_mean_ms: float
    output_tokens_per_s: float
    makespan_s: float
    peak_kv_occupancy: float
    preemptions: float
    gpu_memory_gb: float
    oom: bool
    gpu_seconds: float
    support: dict[str, float]
    classes: dict[str, dict[str, float]]

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return asdict(self)


def serve_requests(
    action: ServeAction,
    requests: RequestLog,
    tables: ServingTables,
    n_replicas: int = 1,
    closed_clients: int = 0,
    queue_limit: float = 1e12,
    base_accept_rate: float = 0.65,
    step_s: float = STEP_S,
) -> Served:
    """Serve every request under one fixed action; the result's ``report()`` has the per-request latencies.

    With ``closed_clients`` N > 0, arrivals are ignored: N clients start at once, and each sends the next request of the
    log when its last one is answered, until the log ends.
    """
    action.validate()
    tables.refuse_tier(action.quant_tier.value)
    if closed_clients:
        requests = replace(requests, arrival_s=np.zeros_like(requests.arrival_s))
    source = RecordedLoad(requests, tables, once=True, step_s=step_s)
    params = replace(
        unchanging_fleet(source, tables, n_replicas),
        queue_limit=queue_limit,
        base_accept_rate=base_accept_rate,
        step_s=step_s,
        closed_clients=closed_clients,
        engine=_per_step(EngineParams(), step_s),
    )
    # From here on ``class_index`` counts only the classes that occur, as the fleet does.
    return _serve(params, action, source, replace(requests, class_index=source.class_index))


def unchanging_fleet(source: RecordedLoad, tables: ServingTables, n_replicas: int) -> ServingParams:
    """A fleet that never restarts, with an unlimited queue."""
    return ServingParams(
        tables=tables,
        stats=source.stats,
        nominal_rate_rps=source.nominal_rate_rps,
        n_replicas=n_replicas,
        queue_limit=1e12,
        base_accept_rate=0.65,
        restart_s=0.0,
        load_gb_per_s=1.0,
    )


def _per_step(engine: EngineParams, step_s: float) -> EngineParams:
    """The engine with its smoothing weight converted from seconds to steps."""
    return replace(engine, load_weight=1.0 - (1.0 - engine.load_weight) ** step_s)


def _serve(params: ServingParams, action: ServeAction, source: RecordedLoad, requests: RequestLog) -> Served:
    last = int(requests.arrival_s[-1] / params.step_s) + 1
    n_steps = last + int(300 / params.step_s)
    while True:
        fleet = ServingFleet(params, 1, n_steps, record=4 * n_steps + len(requests.arrival_s))
        fleet.set_load([0], source.draw([0], n_steps))
        KnobKernel([True] * len(ACTION_FIELDS), fleet).write(to_row(action)[None], 0, 1)
        trace = _run(fleet, last)
        if trace is not None or n_steps >= MAX_STEPS:
            break
        n_steps = min(MAX_STEPS, 4 * n_steps)
    if trace is None:
        raise InvalidConfigError(f"the load is not served within {n_steps} steps: give it more GPUs or fewer requests")
    metrics, levels = trace
    return Served(fleet, metrics, levels, requests)


def _run(fleet: ServingFleet, last_arrival_step: int) -> tuple[FloatArray, NDArray[np.int8]] | None:
    """Step until everything is served: metrics (T, M) and the support of every step; None if the steps run out."""
    kept, levels = np.empty((fleet.n_steps, len(fleet.metrics))), np.empty(fleet.n_steps, dtype=np.int8)
    state, metrics = fleet.state.rows, fleet.metrics[:, 0]
    for t in range(fleet.n_steps):
        fleet.step()
        kept[t] = metrics
        levels[t] = fleet_support(fleet)
        if t + 1 >= last_arrival_step and float(state["queue"].sum() + state["in_flight"].sum()) < 0.5:
            return kept[: t + 1], levels[: t + 1]
    return None


class Served:
    """A load that has been served: distributions over requests and metrics of every step."""

    def __init__(
        self, fleet: ServingFleet, metrics: FloatArray, levels: NDArray[np.int8], requests: RequestLog
    ) -> None:
        self._fleet, self._levels, self._requests = fleet, levels, requests
        self.metric: Mapping[str, FloatArray] = {name: metrics[:, i] for i, name in enumerate(fleet.metric)}
        record = fleet.record[0, : int(fleet.state.rows["n_recorded"][0])]
        if fleet.params.closed_clients:
            record = self._since_sent(record)
        self.record = record
        self.finish_s, self.tpot_ms = self._completions()

    def report(self) -> WhatIf:
        """Statistics of the load."""
        metric, requests, fleet = self.metric, self._requests, self._fleet
        rejected = float(metric["rejected"].sum())
        served = 1.0 - rejected / len(requests.arrival_s)
        ttft = ttft_statistics(self.record)
        makespan = self.makespan_s()
        cards = fleet.params.tables.cards_per_replica * fleet.params.n_replicas
        return WhatIf(
            n_requests=len(requests.arrival_s),
            completed=float(metric["completed"].sum()),
            rejected=rejected,
            **{f"ttft_{name}_ms": value for name, value in ttft.items()},
            **request_statistics("tpot", self.tpot_ms),
            output_tokens_per_s=float(requests.output_tokens.sum()) * served / makespan,
            makespan_s=makespan,
            peak_kv_occupancy=float(metric["kv_occupancy"].max()),
            preemptions=float(metric["eviction_events"].sum()),
            gpu_memory_gb=float(metric["gpu_memory_gb"].max()),
            oom=bool(metric["oom"].max() > 0),
            gpu_seconds=makespan * cards * (2.0 if fleet.disagg[0] else 1.0),
            support=self.support(),
            classes=self.classes(ttft),
        )

    def makespan_s(self) -> float:
        """Seconds from the start until the last request is served.

        Without refusals, every request is followed to its own end. If some are refused, the fluid model does not say
        which ones; then the run ends when half a request is left.
        """
        if float(self.metric["rejected"].sum()) < 0.5:
            return float(np.nanmax(self.finish_s))
        done = np.cumsum(self.metric["completed"])
        goal = float(done[-1]) - 0.5
        t = int(np.searchsorted(done, goal))
        before = float(done[t - 1]) if t > 0 else 0.0
        return (t + (goal - before) / max(float(done[t]) - before, 1e-12)) * self._fleet.params.step_s

    def support(self) -> dict[str, float]:
        """Share of the steps with running requests at each support level."""
        busy = self.metric["running_requests"] > 1e-6
        levels = self._levels[busy] if busy.any() else self._levels
        return {name: float((levels == level).mean()) for level, name in enumerate(LEVELS)}

    def classes(self, ttft: Mapping[str, float]) -> dict[str, dict[str, float]]:
        """TTFT and requests served, by class; ``ttft`` are the statistics of all of them."""
        found = {}
        for c, name in enumerate(self._fleet.params.stats.names):
            mine = self.record[self.record[:, 0] == c]
            if len(mine):
                of_class = ttft if len(mine) == len(self.record) else ttft_statistics(mine)
                found[name] = {
                    "served": float(mine[:, 1].sum()),
                    "ttft_p50_ms": of_class["p50"],
                    "ttft_p99_ms": of_class["p99"],
                }
        return found

    def _since_sent(self, record: FloatArray) -> FloatArray:
        """Record of a closed loop, with waits counted from when a client sends instead of from the start of the run.

        With N clients, the k-th answer triggers request N + k, so no wait is longer than the run so far.
        """
        params, class_index = self._fleet.params, self._requests.class_index
        answered = np.concatenate([[0.0], np.maximum.accumulate(np.cumsum(self.metric["completed"]))])
        clock_ms = np.arange(len(answered)) * params.step_s * 1000.0
        found = []
        for c in np.unique(class_index):
            at_start, of_log = record[record[:, 0] == c], np.flatnonzero(class_index == c)
            admitted = np.concatenate([[0.0], np.cumsum(at_start[:, 1])])
            # Requests of all classes in the log before the ends of each piece, then without the first N.
            position = np.interp(admitted, np.arange(len(of_log) + 1), np.append(of_log, of_log[-1] + 1))
            after = position - params.closed_clients
            first = np.clip(-after[:-1] / np.maximum(np.diff(after), 1e-12), 0.0, 1.0)
            later = at_start.copy()
            at_start[:, 3] = later[:, 2] = at_start[:, 2] + first * (at_start[:, 3] - at_start[:, 2])
            at_start[:, 1] *= first
            later[:, 1] *= 1.0 - first
            # Just inside the piece: while no request is answered the curve is flat, and its end has no definite time.
            for column, goal in ((2, np.maximum(after[:-1], 0.0) + _TOLERANCE), (3, after[1:] - _TOLERANCE)):
                # An answer also takes prefill time, which the fluid model leaves out: there, requests decode from
                # admission on.
                sent_ms = np.interp(goal, answered, clock_ms) + later[:, 4] + later[:, 5]
                later[:, column] = np.maximum(later[:, column] - sent_ms, 0.0)
            found += [at_start[first > 0.0], later[first < 1.0]]
        return np.concatenate(found)

    def _completions(self) -> tuple[FloatArray, FloatArray]:
        """Completion time (s) and time per token (ms) of each request, (N,); NaN for those never admitted.

        Requests of a class are admitted in order; from then on each gains as many tokens as every running request.
        """
        rows, params, requests = self._fleet.state.rows, self._fleet.params, self._requests
        n = len(self._levels)
        progress = rows["progress"][0, : n + 1]
        clock: FloatArray = np.arange(n + 1, dtype=np.float64) * params.step_s
        finish, tpot = np.full((2, len(requests.arrival_s)), np.nan)
        for c in range(params.n_classes):
            mine = np.flatnonzero(requests.class_index == c)
            admitted = np.concatenate([[0.0], np.cumsum(rows["density"][0, c, :n] * np.diff(progress))])
            rank = np.arange(len(mine)) + 0.5
            mine, rank = mine[rank < admitted[-1]], rank[rank < admitted[-1]]
            if not len(mine):
                continue
            # Cumulative admissions never fall. Where they are flat the earliest instant counts, hence the tolerance.
            start = np.interp(rank - _TOLERANCE, admitted, progress)
            end = start + requests.output_tokens[mine] - 1.0
            began, ended = _at(start, progress, clock), _at(end, progress, clock)
            record = self.record[self.record[:, 0] == c]
            prefill_s = float(((record[:, 4] + record[:, 5]) * record[:, 1]).sum() / record[:, 1].sum()) / 1000.0
            finish[mine] = ended + prefill_s
            tokens = np.where(end > start, end - start, np.nan)
            tpot[mine] = 1000.0 * (ended - began) / tokens
        return finish, tpot


def request_statistics(quantity: str, values: FloatArray, without: float = math.nan) -> dict[str, float]:
    """Quantiles and mean (ms) over the requests that have a value; ``without`` if none has."""
    known = values[np.isfinite(values)]
    known = known if len(known) else np.array([without])
    quantiles = np.quantile(known, list(QUANTILES.values())).tolist()
    found = {f"{quantity}_{name}_ms": value for name, value in zip(QUANTILES, quantiles, strict=True)}
    return {**found, f"{quantity}_mean_ms": float(known.mean())}


def _at(x: FloatArray, progress: FloatArray, clock: FloatArray) -> FloatArray:
    """Time at which the fleet reaches a progress; after the run, at the pace of its last step."""
    pace = (clock[-1] - clock[-2]) / max(float(progress[-1] - progress[-2]), 1e-12)
    reached: FloatArray = np.interp(x, progress, clock) + np.maximum(0.0, x - progress[-1]) * pace
    return reached


def ttft_samples(record: FloatArray) -> tuple[FloatArray, FloatArray]:
    """TTFT values (ms) and weights of recorded admissions: uniform waits, a fixed part and a log-normal part."""
    from scipy.special import ndtri

    q = (np.arange(_WAIT_POINTS) + 0.5) / _WAIT_POINTS
    z, share = ndtri(0.5 * (_SPREAD_EDGES[1:] + _SPREAD_EDGES[:-1])), np.diff(_SPREAD_EDGES)
    _, weight, lo, hi, shift, rest, spread = record.T
    waits = np.maximum(0.0, lo[:, None] + (hi - lo)[:, None] * q[None, :])
    bases = shift[:, None] + rest[:, None] * np.exp(spread[:, None] * z[None, :])
    values = waits[:, :, None] + bases[:, None, :]
    weights = np.broadcast_to((weight / _WAIT_POINTS)[:, None, None] * share, values.shape)
    return values.ravel(), weights.ravel()


def weighted_quantile(values: FloatArray, weights: FloatArray, q: float) -> float:
    """The value below which a share ``q`` of the weight lies."""
    order = np.argsort(values)
    total = np.cumsum(weights[order])
    return float(values[order][min(int(np.searchsorted(total, q * total[-1])), len(values) - 1)])


def ttft_statistics(record: FloatArray) -> dict[str, float]:
    """Quantiles and mean (ms) of the TTFT of recorded admissions."""
    parts = np.split(record, range(_ADMISSIONS_AT_ONCE, len(record), _ADMISSIONS_AT_ONCE))
    if len(parts) == 1:
        values, weights = ttft_samples(record)
        quantiles = [weighted_quantile(values, weights, q) for q in QUANTILES.values()]
        mean = float((values * weights).sum() / weights.sum())
    else:
        quantiles, mean = _quantiles_of_parts(parts, list(QUANTILES.values()))
    return {**dict(zip(QUANTILES, quantiles, strict=True)), "mean": mean}


def _quantiles_of_parts(parts: Sequence[FloatArray], shares: Sequence[float]) -> tuple[list[float], float]:
    """:func:`weighted_quantile` of the TTFT of all parts, which are too large to sort together, and the mean."""
    counted, total_ms = np.zeros(1 << 63 - _BIN_SHIFT), 0.0
    for part in parts:
        values, weights = ttft_samples(part)
        counts = np.bincount(_bins(values), weights)
        counted[: len(counts)] += counts
        total_ms += float(values @ weights)
    below = np.concatenate([[0.0], np.cumsum(counted)])
    bins = np.searchsorted(below[1:], np.asarray(shares) * below[-1])
    # A second pass sorts only the values of the bins that hold a quantile.
    kept: list[list[FloatArray]] = [[] for _ in shares]
    for part in parts:
        values, weights = ttft_samples(part)
        of = _bins(values)
        for inside, chosen in zip(kept, bins, strict=True):
            here = of == chosen
            inside.append(np.stack((values[here], weights[here])))
    found = []
    for inside, chosen, q in zip(kept, bins, shares, strict=True):
        values, weights = np.concatenate(inside, axis=1)
        found.append(weighted_quantile(values, weights, (q * below[-1] - below[chosen]) / weights.sum()))
    return found, total_ms / float(below[-1])


def _bins(values: FloatArray) -> NDArray[np.int64]:
    """Bins of equal relative width: the bits of floats of one sign are ordered as the floats are."""
    bins: NDArray[np.int64] = values.view(np.int64) >> _BIN_SHIFT
    return bins
