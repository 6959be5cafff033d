"""What-if on a load outside any task: the same dynamics as the environment, asked about individual requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from inferencegym.errors import InvalidConfigError
from inferencegym.models import PRIORITY_CLASSES, ServeAction
from simulator.requests import RequestLog
from simulator.serving import SPEC_INDEX, EngineParams, ServingFleet, ServingParams
from simulator.tables import FloatArray, ServingTables
from simulator.workload import MAX_SEED, ClassStats, Workload, bin_requests, class_stats, listed_work_ms

MAX_STEPS: Final = 200_000
_OUTPUT_POINTS: Final = 2048
_WAIT_POINTS: Final = 15
# Quantiles between which the log-normal part of a TTFT is one value: finer towards the tail, where p99 is read.
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

    ``window_s`` keeps only arrivals before that second; without ``n_requests`` the window alone bounds their number.
    """
    if n_requests is None and window_s is None:
        raise InvalidConfigError("give a number of requests or a window: one of them must bound the load")
    if not qps > 0:
        raise InvalidConfigError(f"qps={qps!r} is not allowed: it must be above 0")
    if not 0 <= seed <= MAX_SEED:
        raise InvalidConfigError(f"seed={seed!r} is not allowed: it must be from 0 to {MAX_SEED}")
    rng = np.random.default_rng([seed, 0])
    count = n_requests if n_requests is not None else int(qps * float(window_s or 0.0) * 2 + 100)
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
    if not mean >= 1 or not cv >= 0:
        raise InvalidConfigError(f"a length of mean {mean!r} and cv {cv!r} is not allowed: mean >= 1, cv >= 0")
    sigma2 = float(np.log1p(cv * cv))
    drawn = rng.lognormal(np.log(mean) - 0.5 * sigma2, np.sqrt(sigma2), n) if cv > 0 else np.full(n, float(mean))
    return np.maximum(1.0, np.rint(drawn))


@dataclass(frozen=True, slots=True)
class WhatIf:
    """What a load would have met. Per-request TTFT and TPOT in ms; ``support`` tells how well data cover it."""

    n_requests: int
    completed: float
    rejected: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    ttft_mean_ms: float
    tpot_p50_ms: float
    output_tokens_per_s: float
    makespan_s: float
    peak_kv_occupancy: float
    preemptions: float
    gpu_memory_gb: float
    oom: bool
    gpu_seconds: float

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return asdict(self)


def run_requests(
    action: ServeAction,
    requests: RequestLog,
    tables: ServingTables,
    n_replicas: int = 1,
    closed_clients: int = 0,
    queue_limit: float = 1e12,
    base_accept_rate: float = 0.65,
    slo_ms: float = 1e15,
    engine: EngineParams | None = None,
    step_s: float = 1.0,
) -> WhatIf:
    """Serve every request under one fixed action and report per-request latencies.

    With ``closed_clients`` N > 0, arrivals are ignored: N requests are always in flight until all have been served.
    """
    action.validate()
    if closed_clients:
        start = np.zeros_like(requests.arrival_s)
        requests = RequestLog(start, requests.prompt_tokens, requests.output_tokens, requests.class_index)
    params = ServingParams(
        tables=tables,
        stats=log_stats(requests, tables, slo_ms),
        nominal_rate_rps=len(requests.arrival_s) / max(float(requests.arrival_s.max()), 1.0),
        n_replicas=n_replicas,
        queue_limit=queue_limit,
        base_accept_rate=base_accept_rate,
        restart_s=0.0,
        load_gb_per_s=1.0,
        step_s=step_s,
        closed_clients=closed_clients,
        engine=engine or EngineParams(),
    )
    return _play(params, action, requests)


def log_stats(requests: RequestLog, tables: ServingTables, slo_ms: float) -> ClassStats:
    """Class statistics of a request log; a class without requests borrows those of all."""
    n_classes = int(requests.class_index.max()) + 1
    members = [requests.class_index == c for c in range(n_classes)]
    members = [m if m.any() else np.ones_like(m) for m in members]
    q = (np.arange(_OUTPUT_POINTS) + 0.5) / _OUTPUT_POINTS
    return class_stats(
        names=PRIORITY_CLASSES[:n_classes],
        shares=[float((requests.class_index == c).mean()) for c in range(n_classes)],
        slo_ms=[slo_ms] * n_classes,
        complexity_penalty=[0.0] * n_classes,
        prompts=[requests.prompt_tokens[m] for m in members],
        works=[listed_work_ms(requests.prompt_tokens[m], tables) for m in members],
        outputs=[np.quantile(requests.output_tokens[m], q, method="inverted_cdf") for m in members],
    )


def _play(params: ServingParams, action: ServeAction, requests: RequestLog) -> WhatIf:
    last = int(requests.arrival_s.max() / params.step_s) + 1
    n_steps = last + 300
    while True:
        fleet = _fleet(params, action, requests, n_steps)
        trace = _run(fleet, last)
        if trace is not None or n_steps >= MAX_STEPS:
            break
        n_steps = min(MAX_STEPS, 4 * n_steps)
    if trace is None:
        raise InvalidConfigError(
            f"the load is not served within {MAX_STEPS} steps: give it more GPUs or fewer requests"
        )
    return _report(fleet, trace, requests)


def _fleet(params: ServingParams, action: ServeAction, requests: RequestLog, n_steps: int) -> ServingFleet:
    load: Workload = bin_requests(
        requests.arrival_s,
        requests.prompt_tokens,
        requests.class_index,
        params.n_classes,
        params.tables,
        n_steps,
        params.step_s,
    )
    fleet = ServingFleet(params, 1, n_steps, record=4 * n_steps + len(requests.arrival_s))
    fleet.set_load(0, load)
    fleet.kv_budget[:] = action.kv_budget
    fleet.spec_index[:] = SPEC_INDEX[action.spec_length]
    fleet.batch_size[:] = action.batch_size
    fleet.disagg[:] = action.prefill_disagg
    fleet.tier[:] = action.quant_tier.value
    return fleet


def _run(fleet: ServingFleet, last_arrival_step: int) -> FloatArray | None:
    """Step until everything is served; metrics (T, M), or None if the steps ran out."""
    kept = []
    state = fleet.state.rows
    for t in range(fleet.n_steps):
        fleet.step()
        kept.append(fleet.metrics[:, 0].copy())
        left = float(state["queue"].sum() + state["in_flight"].sum())
        if t + 1 >= last_arrival_step and left < 0.5:
            return np.array(kept)
    return None


def _report(fleet: ServingFleet, trace: FloatArray, requests: RequestLog) -> WhatIf:
    params, rows = fleet.params, fleet.state.rows
    metric: Mapping[str, FloatArray] = {name: trace[:, i] for i, name in enumerate(fleet.metric)}
    makespan = _makespan(metric, requests, params.step_s)
    ttft, weight = ttft_samples(fleet.record[0, : int(rows["n_recorded"][0])])
    rejected = float(metric["rejected"].sum())
    served = 1.0 - rejected / len(requests.arrival_s)
    return WhatIf(
        n_requests=len(requests.arrival_s),
        completed=float(metric["completed"].sum()),
        rejected=rejected,
        ttft_p50_ms=weighted_quantile(ttft, weight, 0.5),
        ttft_p99_ms=weighted_quantile(ttft, weight, 0.99),
        ttft_mean_ms=float((ttft * weight).sum() / weight.sum()),
        tpot_p50_ms=_tpot(rows, len(trace), float(np.median(requests.output_tokens)), params.step_s),
        output_tokens_per_s=float(requests.output_tokens.sum()) * served / makespan,
        makespan_s=makespan,
        peak_kv_occupancy=float(metric["kv_occupancy"].max()),
        preemptions=float(metric["eviction_events"].sum()),
        gpu_memory_gb=float(metric["gpu_memory_gb"].max()),
        oom=bool(metric["oom"].max() > 0),
        gpu_seconds=makespan * params.n_replicas * (2.0 if fleet.disagg[0] else 1.0),
    )


def _makespan(metric: Mapping[str, FloatArray], requests: RequestLog, step_s: float) -> float:
    """When half a request is left: the fluid's counterpart of the last completion."""
    total = len(requests.arrival_s) - float(metric["rejected"].sum())
    done = np.cumsum(metric["completed"])
    goal = total - 0.5
    t = int(np.searchsorted(done, goal))
    if t >= len(done):
        return len(done) * step_s
    before = float(done[t - 1]) if t > 0 else 0.0
    return (t + (goal - before) / max(float(done[t]) - before, 1e-12)) * step_s


def _tpot(rows: Mapping[str, NDArray[Any]], n_steps: int, output_tokens: float, step_s: float) -> float:
    """Median over admissions of the time per token that a request of median length meets."""
    progress = rows["progress"][0, : n_steps + 1]
    admitted = rows["density"][0, :n_steps].sum(axis=1) * np.diff(progress)
    start = 0.5 * (progress[:-1] + progress[1:])
    # A request that outlives the run is judged by what it met until then.
    end = np.minimum(start + max(output_tokens - 1.0, 1.0), progress[-1])
    clock = np.arange(n_steps + 1) * step_s
    spent = np.interp(end, progress, clock) - np.interp(start, progress, clock)
    tokens = end - start
    valid = (admitted > 1e-9) & (tokens > 0)
    if not valid.any():
        return float("nan")
    return weighted_quantile(1000.0 * spent[valid] / tokens[valid], admitted[valid], 0.5)


def ttft_samples(record: FloatArray) -> tuple[FloatArray, FloatArray]:
    """TTFT values (ms) and weights of recorded admissions: uniform waits, a certain part and a log-normal one."""
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
