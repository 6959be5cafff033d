"""Compare the serving dynamics with the discrete-event reference on the same requests, knobs and operator times.

A :class:`Case` is one load on one fleet under one action. :func:`reference` serves it iteration by iteration,
:func:`dynamics` with the environment's own second-by-second dynamics; both return :class:`Seen`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from inferencegym.models import PRIORITY_CLASSES, QuantTier, ServeAction
from inferencegym.tasks import TaskSpec, list_tasks
from simulator.events.fleet import Fleet
from simulator.events.requests import Requests
from simulator.events.simulation import serve, serve_closed
from simulator.hardware import measured
from simulator.hardware.catalogue import table_path
from simulator.hardware.measured_model import MeasuredSource, operator_model
from simulator.hardware.memory import kv_capacity_tokens
from simulator.hardware.profiles import profiles
from simulator.hardware.tables import load_tables
from simulator.load.recorded import load_trace
from simulator.load.requests import RequestLog
from simulator.load.synthetic import length_quantiles
from simulator.whatif import STEP_S, serve_requests, steady_requests
from simulator.workload import load_source

# engine profile and table of each card
SYSTEMS = {
    "40gb": ("a100-40gb", "a100_40", table_path("a100-40gb")),
    "80gb": ("a100-80gb", "vllm_v1", table_path("a100-80gb")),
}
METRICS = ("ttft_p50_ms", "ttft_p99_ms", "tpot_ms", "throughput_tok_s", "makespan_s")
TASK_SECONDS = 60
TASK_SEED = 1000


@dataclass(frozen=True, slots=True)
class Seen:
    """Metrics as measured by a client of the fleet.

    TPOT is the median over requests, throughput is output tokens over makespan."""

    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_ms: float
    throughput_tok_s: float
    makespan_s: float
    preemptions: float = 0.0
    rejected: float = 0.0
    classes: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """TTFT p50 and p99 (ms) of each class, if there are several."""


@dataclass(frozen=True, eq=False)
class Case:
    """One load on one fleet under one action."""

    name: str
    group: str
    requests: RequestLog = field(repr=False)
    action: ServeAction
    replicas: int = 1
    system: str = "40gb"
    queue_limit: int | None = None
    base_accept_rate: float = 0.65
    closed_clients: int = 0


def act(
    batch_size: int = 128, kv_budget: float = 1.0, spec_length: int = 0, disagg: bool = False, tier: str = "FP16"
) -> ServeAction:
    """Action with the given knobs."""
    return ServeAction(kv_budget, spec_length, batch_size, disagg, QuantTier[tier])


def reference(case: Case, seed: int = 0) -> Seen:
    """Serve a case iteration by iteration."""
    card, engine, _ = SYSTEMS[case.system]
    action, log = case.action, case.requests
    tier, k = action.quant_tier.name, action.spec_length
    speculation = profiles()["speculation"]
    marginal = measured.spec_acceptance(speculation["dataset"], speculation["method"]).get(k, ())
    fleet = Fleet(
        operator_model(card, tier, engine),
        action.batch_size,
        kv_capacity_tokens(MeasuredSource(card), tier, action.kv_budget, k),
        replicas=case.replicas,
        draft_tokens=k,
        acceptance=[p * case.base_accept_rate / 0.65 for p in marginal],
        disaggregated=action.prefill_disagg,
        queue_limit=case.queue_limit,
    )
    prompts, outputs = log.prompt_tokens.astype(np.int64), log.output_tokens.astype(np.int64)
    if case.closed_clients:
        out = serve_closed(fleet, prompts, outputs, case.closed_clients, seed)
    else:
        out = serve(fleet, Requests(log.arrival_s, prompts, outputs, log.class_index), seed)
    ttft = out.ttft_ms()
    served = float(outputs[~out.rejected].sum())
    present = np.unique(log.class_index)
    classes = {}
    for c in present if len(present) > 1 else ():
        mine = ttft[log.class_index == c]
        if np.isfinite(mine).any():
            classes[PRIORITY_CLASSES[c]] = (float(np.nanmedian(mine)), float(np.nanquantile(mine, 0.99)))
    return Seen(
        float(np.nanmedian(ttft)),
        float(np.nanquantile(ttft, 0.99)),
        float(np.nanmedian(out.tpot_ms())),
        served / out.makespan_s(),
        out.makespan_s(),
        float(out.preemptions.sum()),
        float(out.rejected.sum()),
        classes,
    )


def dynamics(case: Case, step_s: float = STEP_S) -> Seen:
    """Serve a case with the serving dynamics in steps of ``step_s`` seconds."""
    out = serve_requests(
        case.action,
        case.requests,
        load_tables(SYSTEMS[case.system][2]),
        n_replicas=case.replicas,
        closed_clients=case.closed_clients,
        queue_limit=1e12 if case.queue_limit is None else float(case.queue_limit),
        base_accept_rate=case.base_accept_rate,
        step_s=step_s,
    ).report()
    return Seen(
        out.ttft_p50_ms,
        out.ttft_p99_ms,
        out.tpot_p50_ms,
        out.output_tokens_per_s,
        out.makespan_s,
        out.preemptions,
        out.rejected,
        {c: (v["ttft_p50_ms"], v["ttft_p99_ms"]) for c, v in out.classes.items()} if len(out.classes) > 1 else {},
    )


# ---------------------------------------------------------------- loads


def task_requests(task: TaskSpec, seed: int, n_steps: int, start_step: int = 0) -> RequestLog:
    """Individual requests of a task's traffic: each second's arrivals spread over that second, with random lengths."""
    source = load_source(task, load_tables())
    rng = np.random.default_rng([seed, 9])
    counts = source.draw([seed], start_step + n_steps).arrivals[0, start_step:].astype(np.int64)
    steps, classes = np.nonzero(counts)
    arrival, prompt, output, index = [], [], [], []
    active = [c for c in task.classes if c.share > 0 or c.burst_share > 0]
    for t, c in zip(steps, classes, strict=True):
        n = counts[t, c]
        arrival.append(t + rng.random(n))
        prompt.append(rng.choice(length_quantiles(active[c].prompt, 4096), n))
        output.append(rng.choice(source.stats.output_cdf_tokens[c], n))
        index.append(np.full(n, c))
    order = np.argsort(np.concatenate(arrival))
    return RequestLog(
        np.concatenate(arrival)[order],
        np.maximum(1.0, np.rint(np.concatenate(prompt)[order])),
        np.maximum(1.0, np.rint(np.concatenate(output)[order])),
        np.concatenate(index)[order].astype(np.int64),
    )


def task_cases() -> Iterator[Case]:
    """A minute of every task's traffic that contains its first flood, under several constant actions."""
    actions = {
        "b32": act(32),
        "b64 kv.5": act(64, 0.5),
        "b128": act(128),
        "b256": act(256, 0.95),
        "b128 kv.25": act(128, 0.25),
        "b64 spec2": act(64, 1.0, 2),
        "b32 spec4": act(32, 1.0, 4),
        "b128 disagg": act(128, disagg=True),
        "b128 int8": act(128, tier="INT8"),
        "b256 int4": act(256, 0.95, tier="INT4"),
        "b128 int8 disagg": act(128, disagg=True, tier="INT8"),
    }
    for task in list_tasks():
        start = 30 if task.burst is None else max(0, task.burst.offset_steps - 15)
        log = task_requests(task, TASK_SEED, TASK_SECONDS, start)
        for label, action in actions.items():
            yield Case(
                f"task {task.task_id} {label}",
                "tasks",
                log,
                action,
                task.fleet.n_replicas,
                queue_limit=task.fleet.queue_limit,
                base_accept_rate=task.fleet.base_accept_rate,
            )


def poisson_cases() -> Iterator[Case]:
    """Poisson arrivals from light load over the saturation knee into overload, short and long prompts."""
    for qps in (5, 10, 15, 20, 25, 50):
        log = steady_requests(qps, 400, 247, 350, 0.55, 0.9)
        yield Case(f"80gb qps{qps} b256", "poisson", log, act(256, 0.95), system="80gb")
    for qps in (5, 8, 10, 15):
        yield Case(f"40gb qps{qps} b64", "poisson", steady_requests(qps, 500, 247, 350, 0.55), act(64))
    for qps in (10, 20, 30):
        log = steady_requests(qps, 900, 422, 250, 0.55, 1.5)
        yield Case(f"qps{qps} tails x2", "poisson", log, act(128), 2)
    for qps in (1, 2, 3, 4):
        log = steady_requests(qps, 250, 6000, 300, 0.55, 0.2)
        yield Case(f"qps{qps} long x2", "poisson", log, act(128), 2)
        yield Case(f"qps{qps} long x2 disagg", "poisson", log, act(128, disagg=True), 2)
    log = steady_requests(15, 900, 500, 600, 0.55)
    for kv in (0.2, 0.3, 0.5):
        yield Case(f"qps15 kv{kv}", "poisson", log, act(256, kv))
    log = steady_requests(6, 400, 247, 350, 0.55)
    for k in (1, 2, 4):
        yield Case(f"qps6 spec{k}", "poisson", log, act(64, 1.0, k))
    for tier in ("INT8", "INT4"):
        yield Case(f"qps15 {tier}", "poisson", steady_requests(15, 600, 247, 350, 0.55), act(128, tier=tier))


def burst_cases() -> Iterator[Case]:
    """A quiet load with a flood of 15 s in the middle."""
    for base, peak, replicas in ((5, 40, 1), (10, 80, 2), (10, 200, 4)):
        parts = [(base, 0.0, 30.0), (peak, 30.0, 45.0), (base, 45.0, 90.0)]
        logs = [
            steady_requests(q, None, 247, 250, 0.55, 0.9, end - start, i) for i, (q, start, end) in enumerate(parts)
        ]
        arrival = np.concatenate([log.arrival_s + part[1] for log, part in zip(logs, parts, strict=True)])
        log = RequestLog(
            arrival,
            np.concatenate([x.prompt_tokens for x in logs]),
            np.concatenate([x.output_tokens for x in logs]),
            np.concatenate([x.class_index for x in logs]),
        )
        yield Case(f"burst {base}-{peak} x{replicas}", "burst", log, act(128), replicas)
        yield Case(f"burst {base}-{peak} x{replicas} disagg", "burst", log, act(128, disagg=True), replicas)
        yield Case(f"burst {base}-{peak} x{replicas} b32", "burst", log, act(32), replicas)


def recorded_cases() -> Iterator[Case]:
    """Two minutes of every shipped trace, from its tenth minute on, without prefix reuse."""
    for task in list_tasks(include_recorded=True):
        if task.trace is None:
            continue
        whole, _ = load_trace(task.trace)
        inside = (whole.arrival_s >= 600.0) & (whole.arrival_s < 720.0)
        log = RequestLog(
            whole.arrival_s[inside] - 600.0,
            whole.prompt_tokens[inside],
            whole.output_tokens[inside],
            np.zeros(int(inside.sum()), dtype=np.int64),
        )
        for label, action in {
            "b64": act(64),
            "b128": act(128),
            "b128 disagg": act(128, disagg=True),
            "b128 int8": act(128, tier="INT8"),
        }.items():
            yield Case(f"{task.task_id} {label}", "recorded", log, action, task.fleet.n_replicas)


def closed_cases() -> Iterator[Case]:
    """Closed loops: each client sends its next request when its last is answered."""
    for clients in (1, 8, 64):
        log = replace(
            steady_requests(1, max(60, 6 * clients), 247, 350, 0.55), arrival_s=np.zeros(max(60, 6 * clients))
        )
        yield Case(f"closed {clients}", "closed", log, act(128), closed_clients=clients)


def all_cases() -> Iterator[Case]:
    """Every case of the published comparison."""
    yield from task_cases()
    yield from poisson_cases()
    yield from burst_cases()
    yield from recorded_cases()
    yield from closed_cases()
