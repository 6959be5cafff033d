"""Served loads on real engines, played in the discrete-event reference: errors by split, card, model and regime.

    python -m benchmarks.fidelity.open_suite            writes results/open_fidelity.json and .md, and the two files of
                                                        `inferencegym fidelity` in ops/data/
    python -m benchmarks.fidelity.open_suite --requests prints the requests of every run as CSV
    python -m benchmarks.fidelity.open_suite --server   fits the times of the API server to :data:`SERVER_LOADS`
    python -m benchmarks.fidelity.open_suite --knee     prints what the errors of TTFT p50 at the knee look like

``data/README.md`` has sources and licences. Runs are split by card and model (:data:`SPLITS`): the errors of the *fit*
runs go into the verdicts of plans (``benchmarks.fidelity.hardware --margins``), the others test these verdicts. Every
run is played with the engine profile of the shipped tables, as a plan plays it, but for asynchronous scheduling where
its vLLM is older than that default, and for the slower memory of :data:`A100_40GB`. Needs the extra ``hardware``.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd

from benchmarks.report import store, table
from inferencegym.files import write_text
from ops.capacity import gap_statistics
from ops.fidelity import FIGURES_PATH, QUANTITIES, RUNS_PATH
from ops.margins import band_of, ratio
from simulator.events.fleet import Fleet
from simulator.events.requests import IntArray, Outcome, Requests
from simulator.events.simulation import Simulation
from simulator.hardware.aiconfigurator import AiconfiguratorSource, Deployment, kernels
from simulator.hardware.kernel_times import KernelModel
from simulator.hardware.memory import kv_pool_gb
from simulator.hardware.operators import Chunk
from simulator.hardware.profiles import engine, hardware
from simulator.hardware.tables import FloatArray

DATA: Final = Path(__file__).with_name("data")
A100_40GB: Final = "a100-40gb"
"""A card without tables: it is played with those of the 80 GB card, and reads its weights more slowly."""
SPLITS: Final = {
    ("a100_sxm", "llama-3.1-70b"): "fit",
    ("h100_sxm", "llama-3.1-70b"): "fit",
    ("h100_sxm", "qwen3-8b"): "fit",
    ("h100_sxm", "gpt-oss-120b"): "fit",
    ("h100_sxm", "gpt-oss-20b"): "validation",
    ("a100_sxm", "llama-3.1-8b"): "validation",
    ("h100_sxm", "llama-3.1-8b"): "validation",
    ("h100_sxm", "qwen3-32b"): "held out",
    ("a100_sxm", "qwen3-32b"): "held out",
    (A100_40GB, "llama-3.1-70b"): "held out",
    ("h200_sxm", "llama-3.1-8b"): "held out",
}
SERVED: Final = {A100_40GB: "llama-3.3-70b"}
"""The model that a card served, where it was played as another one of the same shape."""
SERVER_LOADS: Final = ("64 clients, short", "128 clients, short")
"""Loads of our H200 to which ``request_ms`` and ``token_ms`` were fitted: those that keep its API server busiest."""
SERVER_SPLIT: Final = "server fit"
REFUSED: Final = "refused"
"""Band of a run whose requests are longer than the simulated KV pool: it has no simulated figures."""
LATENCIES: Final = QUANTITIES[:-1]
"""Each source states some of them: those of single requests have no inter-token latency, the others no end-to-end."""
BUDGETS: Final = {"a100_sxm": (256, 2048), A100_40GB: (256, 2048), "h100_sxm": (1024, 8192), "h200_sxm": (256, 2048)}
"""Sequences, and tokens of an iteration: vLLM's defaults on A100 and H100, and what the H200 was started with."""
LLM_D_8B_TOKENS: Final = 8192
"""Tokens of an iteration in llm-d's runs of the 8B model: then vLLM's default on the 80 GB A100 too."""
REPORTED_GB: Final = {"a100_sxm": 85.1, A100_40GB: 42.5, "h100_sxm": 85.1, "h200_sxm": 150.8}
"""Memory that the driver reports, of which vLLM takes its share."""
ENGINES: Final = {
    ("llm-d-benchmark", "llama-3.1-70b"): ("vLLM of May 2025", 2, 0.95),
    ("llm-d-benchmark", "llama-3.1-8b"): ("vLLM of May 2025", 1, 0.9),
    ("GPUStack", "qwen3-8b"): ("vLLM 0.11.0", 1, 0.9),
    ("GPUStack", "qwen3-32b"): ("vLLM 0.11.0", 1, 0.9),
    ("GPUStack", "gpt-oss-20b"): ("vLLM 0.11.0", 1, 0.9),
    ("GPUStack", "gpt-oss-120b"): ("vLLM 0.10.2", 1, 0.9),
    ("llm-k8s", "llama-3.1-70b"): ("vLLM 0.8.3", 8, 0.9),
    ("InferenceGym", "llama-3.1-8b"): ("vLLM 0.32.0", 1, 0.92),
}
"""Engine, cards per replica, and the share of their memory that the engine took, by source and model."""
LENGTH_SPREAD: Final = 0.2
"""Half width of the lengths of a closed loop whose source states only their mean."""


LOAD_FACTORS: Final = tuple(round(0.7 + 0.05 * i, 2) for i in range(13))
PROMPT_MS: Final = (0.0, 1.0, 2.0, 4.0)
"""Times that iterations with prompt tokens might take in addition."""


@dataclass(frozen=True, slots=True)
class Run:
    """A measured run, its figures and those of the reference by quantity, its band of load, and what was played.

    With ``clients`` the requests are a closed loop: each client sends the next one when it has its answer.
    """

    source: str
    card: str
    model: str
    load: str
    band: str
    measured: dict[str, float]
    simulated: dict[str, float]
    fleet: Fleet
    requests: Requests
    clients: int | None = None

    @property
    def split(self) -> str:
        """What the run is used for."""
        return SERVER_SPLIT if self.load in SERVER_LOADS else SPLITS[self.card, self.model]

    def errors(self) -> dict[str, float]:
        """Relative errors, positive where the simulation is larger."""
        return {name: self.simulated[name] / self.measured[name] - 1.0 for name in self.measured}

    def allowed_ms(self, name: str) -> float:
        """The simulated latency times the 90% bound of plans."""
        return self.simulated[name] * ratio(quantity_of(name), self.card, self.band).p90


def quantity_of(name: str) -> str:
    """Quantity of one of :data:`LATENCIES`, as objectives name it."""
    return name.split()[0].lower()


def runs() -> Iterator[Run]:
    """All runs of all sources."""
    yield from _llm_d()
    yield from _llm_d_8b()
    yield from _gpustack()
    yield from _llm_k8s()
    yield from _own()


def _llm_d(load_factor: float = 1.0) -> Iterator[Run]:
    """Llama-3.1-70B on two cards per replica, request by request, as the requests were sent or this much faster."""
    source, model = "llm-d-benchmark", "llama-3.1-70b"
    frame = pd.read_csv(DATA / "llm_d_llama_70b.csv")
    for (card, replicas, load, qps), rows in frame.groupby(["card", "replicas", "load", "qps"], sort=False):
        fleet = _fleet(source, card, model, "BF16", int(replicas))
        requests = _requests(rows, rows["arrival_s"].to_numpy() / load_factor)
        name = f"{load}, {qps:g}/s on {replicas} replica{'s' if replicas > 1 else ''}"
        yield _run(source, card, model, name, _measured(rows), fleet, requests)


def _llm_d_8b() -> Iterator[Run]:
    """Llama-3.1-8B on one card per replica, long prompts of one length; each repeat draws arrivals and replicas anew.

    A Kubernetes service picks a replica at random for each connection, and this client opens one per request.
    """
    source, model = "llm-d-benchmark", "llama-3.1-8b"
    for repeat, row in enumerate(pd.read_csv(DATA / "llm_d_llama_8b.csv").to_dict("records")):
        n, replicas, shape = int(row["requests"]), int(row["replicas"]), row["burstiness"]
        gaps = np.random.default_rng(repeat).gamma(shape, 1.0 / (row["qps"] * shape), n)
        lengths = [np.full(n, int(row[name])) for name in ("prompt_tokens", "output_tokens")]
        fleet = _fleet(source, row["card"], model, "BF16", replicas, max_batched_tokens=LLM_D_8B_TOKENS)
        fleet = replace(fleet, router="random")
        requests = Requests(gaps.cumsum() - gaps[0], *lengths)
        name = f"{row['prompt_tokens']} + {row['output_tokens']} tokens, {row['qps']:g}/s on {replicas} replicas"
        yield _run(source, row["card"], model, name, _stated(row), fleet, requests, seed=repeat)


def _gpustack() -> Iterator[Run]:
    """vLLM's defaults on one card: closed loops, and floods of requests of one length that are all sent at once."""
    for row in pd.read_csv(DATA / "gpustack.csv").to_dict("records"):
        source = "GPUStack"
        fleet = _fleet(source, row["card"], row["model"], row["precision"], 1)
        n = int(row["requests"])
        if np.isnan(row["clients"]):
            lengths = [np.full(n, int(row[name])) for name in ("prompt_tokens", "output_tokens")]
            clients, load = None, f"{n} at once, {row['prompt_tokens']:g} + {row['output_tokens']:g} tokens"
        else:
            rng, clients = np.random.default_rng(0), int(row["clients"])
            spread = rng.uniform(1.0 - LENGTH_SPREAD, 1.0 + LENGTH_SPREAD, (2, n))
            lengths = [
                np.maximum(2, np.rint(row[name] * factor)).astype(np.int64)
                for name, factor in zip(("prompt_tokens", "output_tokens"), spread, strict=True)
            ]
            load = f"{clients} client{'s' if clients > 1 else ''}"
        yield _run(
            source, row["card"], row["model"], load, _stated(row), fleet, Requests(np.zeros(n), *lengths), clients
        )


def _llm_k8s() -> Iterator[Run]:
    """Llama-3.3-70B, of Llama-3.1-70B's shape, on eight cards: the later loads repeat the prompts of the first one."""
    source, card, model, tier = "llm-k8s", A100_40GB, "llama-3.1-70b", "BF16"
    overhead_ms = engine("vllm_v1_8k").step_overhead_ms + _slower_weights_ms(model, tier, ENGINES[source, model][1])
    fleet = _fleet(source, card, model, tier, 1, step_overhead_ms=overhead_ms)
    for qps, rows in pd.read_csv(DATA / "llm_k8s_llama_70b.csv").groupby("qps", sort=False):
        cached = rows["cached_tokens"].to_numpy()
        requests = replace(_requests(rows, rows["arrival_s"].to_numpy()), reused_tokens=cached)
        load = f"{len(rows)} at once" if np.isinf(qps) else f"sharegpt, {qps:g}/s"
        name = f"{load}, prompts cached" if cached.any() else load
        yield _run(source, card, model, name, _measured(rows), fleet, requests)


def _slower_weights_ms(model: str, tier: str, tp: int) -> float:
    """How much longer (ms) the 40 GB card takes to read a model's weights than the 80 GB card, once per iteration."""
    source = _source(A100_40GB, model, tier, tp)
    seconds = [source.weights_gb[tier] / hardware(name).bandwidth_gb_s for name in (A100_40GB, "a100-80gb")]
    return 1e3 * (seconds[0] - seconds[1])


def _own(**changes: float) -> Iterator[Run]:
    """Closed loops and open loads of Llama-3.1-8B's shape on one H200, request by request; changes of the profile."""
    source, card, model = "InferenceGym", "h200_sxm", "llama-3.1-8b"
    fleet = _fleet(source, card, model, "BF16", 1, async_scheduling=True, **changes)
    frame = pd.read_csv(DATA / "vllm_h200_llama_8b.csv")
    if changes:
        frame = frame[frame["load"].isin(SERVER_LOADS)]
    for load, rows in frame.groupby("load", sort=False):
        closed = rows["clients"].notna().all()
        sent_s = np.zeros(len(rows)) if closed else rows["arrival_s"].to_numpy()
        clients = int(rows["clients"].iloc[0]) if closed else None
        yield _run(source, card, model, str(load), _measured(rows), fleet, _requests(rows, sent_s), clients)


def _requests(rows: pd.DataFrame, sent_s: FloatArray) -> Requests:
    """The requests of a run, sent at these times."""
    return Requests(sent_s, rows["prompt_tokens"].to_numpy(), rows["output_tokens"].to_numpy())


def _measured(rows: pd.DataFrame) -> dict[str, float]:
    """Figures of a run that was recorded request by request."""
    outputs, ttft, tpot = (rows[name].to_numpy() for name in ("output_tokens", "ttft_ms", "tpot_ms"))
    e2e = ttft + np.nan_to_num(tpot) * (outputs - 1)
    return {**_figures(ttft, tpot, e2e), "tokens/s": float(outputs.sum() / (rows["arrival_s"] + e2e / 1e3).max())}


def _stated(row: Mapping[str, Any]) -> dict[str, float]:
    """Figures of a run of which only these are published."""
    return {
        "TTFT p50": float(row["ttft_p50_ms"]),
        "TTFT p99": float(row["ttft_p99_ms"]),
        "TPOT p50": float(row["tpot_p50_ms"]),
        "ITL p50": float(row["itl_p50_ms"]),
        "ITL p99": float(row["itl_p99_ms"]),
        "tokens/s": float(row["output_tokens_per_s"]),
    }


def _figures(ttft_ms: FloatArray, tpot_ms: FloatArray, e2e_ms: FloatArray) -> dict[str, float]:
    """Quantiles over the requests that were served."""
    return {
        "TTFT p50": float(np.nanmedian(ttft_ms)),
        "TTFT p99": float(np.nanquantile(ttft_ms, 0.99)),
        "TPOT p50": float(np.nanmedian(tpot_ms)),
        "E2E p50": float(np.nanmedian(e2e_ms)),
        "E2E p99": float(np.nanquantile(e2e_ms, 0.99)),
    }


def _run(
    source: str,
    card: str,
    model: str,
    load: str,
    measured: dict[str, float],
    fleet: Fleet,
    requests: Requests,
    clients: int | None = None,
    seed: int = 0,
) -> Run:
    """Play a run; of the simulated figures those that were measured count."""
    simulation = Simulation(fleet, requests, seed, clients)
    if requests.reused_tokens is not None:
        simulation.state.prefix_hit = 1.0
    played = (fleet, requests, clients)
    outcome = simulation.run()
    if outcome.rejected.all():
        return Run(source, card, model, load, REFUSED, measured, dict.fromkeys(measured, np.nan), *played)
    gaps: IntArray = simulation.arrays["gaps"]
    itl = gap_statistics(gaps)
    simulated = {
        **_figures(outcome.ttft_ms(), outcome.tpot_ms(), outcome.e2e_ms()),
        "ITL p50": itl["itl_p50_ms"],
        "ITL p99": itl["itl_p99_ms"],
        "tokens/s": float(outcome.output_tokens.sum() / outcome.makespan_s()),
    }
    band = band_of(_at_once(outcome) / fleet.replicas)
    return Run(source, card, model, load, band, measured, {name: simulated[name] for name in measured}, *played)


def _at_once(outcome: Outcome) -> float:
    """Requests that the fleet decodes at a time, averaged over its requests."""
    start, end = outcome.first_token_s, outcome.finish_s
    shared = np.minimum(end[:, None], end) - np.maximum(start[:, None], start)
    length = np.maximum(end - start, 1e-9)
    return float((np.clip(shared, 0.0, None).sum(axis=1) / length).mean())


@cache
def _source(card: str, model: str, tier: str, tp: int) -> AiconfiguratorSource:
    system = "a100_sxm" if card == A100_40GB else card
    return AiconfiguratorSource(Deployment(system, model, "vllm", tp, (tier,)))


@cache
def _fleet(source_name: str, card: str, model: str, tier: str, replicas: int, **changes: float) -> Fleet:
    """vLLM's defaults on this card, with the KV pool that its memory has room for; changes of the engine profile."""
    _, tp, memory_share = ENGINES[source_name, model]
    source = _source(card, model, tier, tp)
    slots, tokens = BUDGETS[card]
    pool_gb = kv_pool_gb(source.memory_gb, memory_share * REPORTED_GB[card], source.weights_gb[tier], 1.0, drafts=False)
    profile = replace(engine("vllm_v1_8k"), **({"max_batched_tokens": tokens, "async_scheduling": False} | changes))
    pool_tokens = int(pool_gb * 1e9 / source.kv_bytes_per_token)
    return Fleet(source.operators(tier, profile), slots, pool_tokens, replicas=replicas, server=True)


def fit_server() -> tuple[float, float]:
    """Times (ms) of the API server per request and per output that fit the logarithms of :data:`SERVER_LOADS` best."""
    grid = [(request / 10, token / 100) for request in range(10, 31) for token in range(11)]
    return min(grid, key=lambda times: _server_misfit(*times))


def _server_misfit(request_ms: float, token_ms: float) -> float:
    """Sum of the squared logarithms of simulated / measured over all quantities of these loads."""
    return sum(
        np.log1p(error) ** 2 for r in _own(request_ms=request_ms, token_ms=token_ms) for error in r.errors().values()
    )


def knee() -> str:
    """TTFT p50 at the knee, of runs that test no verdict.

    The load factor is the one at which the simulation of a *fit* run has the measured TTFT p50. In a closed loop all
    first requests come at once, so :data:`SERVER_LOADS` are split into these and the later ones; an iteration with
    prompt tokens takes 0 ms or more in addition, which the TTFT offset is less.
    """
    name = "TTFT p50"
    at = {factor: {(r.card, r.load): r.simulated[name] for r in _llm_d(factor)} for factor in LOAD_FACTORS}
    runs = []
    for r in _llm_d():
        if r.band == "knee":
            distance = {f: abs(np.log(found[r.card, r.load] / r.measured[name])) for f, found in at.items()}
            best = min(distance, key=distance.__getitem__)
            runs.append((r.card, r.load, _text(r.measured[name]), _text(r.simulated[name]), f"{best:g}"))
    waves = [
        (load, f"{prompt_ms:g}", *(" / ".join(map(_text, f)) for f in figures))
        for prompt_ms in PROMPT_MS
        for load, figures in _by_wave(prompt_ms)
    ]
    lines = table(("card", "load", "measured", "simulated", "load factor with the measured"), runs)
    lines += ["", *table(("load", "ms in addition", "first TTFT p50", "later TTFT p50", "TPOT p50"), waves)]
    return "\n".join(lines)


class _SlowerPrompts(KernelModel):
    """Iterations with prompt tokens take ``prompt_ms`` longer."""

    prompt_ms = 0.0

    def prefill_attention_ms(self, chunks: Sequence[Chunk]) -> float:
        return float(super().prefill_attention_ms(chunks)) + self.prompt_ms


def _by_wave(prompt_ms: float) -> Iterator[tuple[str, list[tuple[float, float]]]]:
    """Of :data:`SERVER_LOADS`, (measured, simulated) TTFT p50 of first and of later requests, and TPOT p50."""
    card, model, tier = "h200_sxm", "llama-3.1-8b", "BF16"
    fleet = _fleet("InferenceGym", card, model, tier, 1, async_scheduling=True)
    profile = replace(fleet.model.profile, ttft_offset_ms=fleet.model.profile.ttft_offset_ms - prompt_ms)
    slower = _SlowerPrompts(tier, profile, kernels(Deployment(card, model), tier))
    slower.prompt_ms = prompt_ms
    frame = pd.read_csv(DATA / "vllm_h200_llama_8b.csv")
    for load in SERVER_LOADS:
        rows = frame[frame["load"] == load]
        n = int(rows["clients"].iloc[0])
        outcome = Simulation(replace(fleet, model=slower), _requests(rows, np.zeros(len(rows))), clients=n).run()
        ttft, tpot = (rows["ttft_ms"].to_numpy(), outcome.ttft_ms()), (rows["tpot_ms"].to_numpy(), outcome.tpot_ms())
        parts = [[each[:n] for each in ttft], [each[n:] for each in ttft], tpot]
        yield load, [(float(np.median(measured)), float(np.median(simulated))) for measured, simulated in parts]


def covered(run: Run) -> dict[str, bool]:
    """Whether each measured latency is at most the simulated one times the 90% bound of plans."""
    return {name: run.measured[name] <= run.allowed_ms(name) for name in LATENCIES if name in run.measured}


def summary(played: Sequence[Run]) -> dict[str, Any]:
    """Errors by split, card, model and band, the share of latencies that verdicts cover by split, and every run."""
    by_key: dict[tuple[str, str, str, str], list[Run]] = {}
    for run in (r for r in played if r.band != REFUSED):
        for key in ((run.split, run.card, run.model, run.band), (run.split, "all", "all", "all")):
            by_key.setdefault(key, []).append(run)
    groups = []
    for (split, card, model, band), mine in sorted(by_key.items()):
        errors = {q: np.array([r.errors()[q] for r in mine if q in r.measured]) for q in QUANTITIES}
        found = {name: _errors(values) for name, values in errors.items() if len(values)}
        groups.append({"split": split, "card": card, "model": model, "band": band, "runs": len(mine), **found})
    shares = {}
    for split in (*dict.fromkeys(SPLITS.values()), SERVER_SPLIT):
        hits = [covered(r) for r in played if r.split == split and r.band != REFUSED]
        of_names = {name: [hit[name] for hit in hits if name in hit] for name in LATENCIES}
        shares[split] = {name: {"covered": sum(each), "figures": len(each)} for name, each in of_names.items()}
    each = [
        {"split": r.split, "source": r.source, "card": r.card, "model": r.model, "load": r.load, "band": r.band}
        | {name: [value, None if r.band == REFUSED else r.simulated[name]] for name, value in r.measured.items()}
        for r in played
    ]
    return {"groups": groups, "covered": shares, "runs": each}


def _errors(values: FloatArray) -> dict[str, float]:
    return {"median": float(np.median(np.abs(values))), "bias": float(values.mean())}


def markdown(found: dict[str, Any]) -> str:
    """The report as Markdown."""
    rows, runs = (
        [{**row, "model": SERVED.get(row["card"], row["model"])} for row in found[part]] for part in ("groups", "runs")
    )
    head = ("split", "card", "model", "band", "runs")
    tested: list[list[Any]] = []
    fitted: list[list[Any]] = []
    for row in rows:
        cells = [f"{100 * row[q]['median']:.0f}%, {100 * row[q]['bias']:+.0f}%" if q in row else "" for q in QUANTITIES]
        part = fitted if row["split"] in ("fit", SERVER_SPLIT) else tested
        part.append([*(row[name] for name in head), *cells])
    within = []
    for split, counts in found["covered"].items():
        total = {part: sum(count[part] for count in counts.values()) for part in ("covered", "figures")}
        cells = [
            f"{count['covered']} of {count['figures']}" if count["figures"] else ""
            for count in (*counts.values(), total)
        ]
        within.append([split, *cells])
    described = ("split", "card", "model", "load")
    each = [
        [*(row[name] for name in described), *(" / ".join(map(_text, row[q])) if q in row else "" for q in QUANTITIES)]
        for row in runs
    ]
    return "\n".join(
        [
            "<!-- written by benchmarks/fidelity/open_suite.py; do not edit -->",
            "Median of the absolute error, and bias (mean error, positive where the simulation is larger). Bands count "
            "the requests that a replica decodes at a time: *light* up to 8, *knee* 9 to 64, *saturated* more.",
            "",
            *table((*head, *QUANTITIES), tested),
            "",
            "Measured latencies within the simulated one times the 90% bound of plans:",
            "",
            *table(("split", *LATENCIES, "all"), within),
            "",
            "<!-- details -->",
            "",
            "The same errors of the runs that the bounds and the times of the API server were fitted to:",
            "",
            *table((*head, *QUANTITIES), fitted),
            "",
            "Every run, measured / simulated (ms, tokens/s):",
            "",
            *table((*described, *QUANTITIES), each),
            "",
        ]
    )


def _text(value: float | None) -> str:
    return REFUSED if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def identified(played: Sequence[Run]) -> dict[str, Run]:
    """The runs by their id; repeats of a load are numbered."""
    found: dict[str, Run] = {}
    for run in played:
        parts = (run.source, run.card, SERVED.get(run.card, run.model), run.load)
        name = re.sub(r"[^a-z0-9.]+", "-", " ".join(parts).lower()).strip("-")
        copies = sum(each == name or each.startswith(f"{name}-run-") for each in found)
        found[f"{name}-run-{copies + 1}" if copies else name] = run
    return found


def submission_files(played: Sequence[Run]) -> tuple[str, str]:
    """What ``inferencegym fidelity`` reads, as CSV: descriptions of the runs, and their figures."""
    descriptions, figures = [], []
    for name, run in identified(played).items():
        fleet, requests = run.fleet, run.requests
        version, tensor_parallel, memory_share = ENGINES[run.source, run.model]
        descriptions.append(
            {
                "run": name,
                "split": run.split,
                "source": run.source,
                "engine": version,
                "card": run.card,
                "model": SERVED.get(run.card, run.model),
                "precision": fleet.model.tier,
                "cards_per_replica": tensor_parallel,
                "memory_share": memory_share,
                "replicas": fleet.replicas,
                "router": fleet.router,
                "max_num_seqs": fleet.batch_size,
                "max_num_batched_tokens": fleet.model.profile.max_batched_tokens,
                "clients": run.clients,
                "requests": len(requests.arrival_s),
                "sent_over_s": round(float(requests.arrival_s.max()), 3),
                "mean_prompt_tokens": round(float(requests.prompt_tokens.mean()), 1),
                "mean_output_tokens": round(float(requests.output_tokens.mean()), 1),
                "mean_cached_tokens": 0.0 if requests.reused_tokens is None else requests.reused_tokens.mean().round(1),
                "band": run.band,
            }
        )
        figures += [
            {"run": name, "quantity": q, "measured": f"{value:.6g}", "simulated": run.simulated[q]}
            for q, value in run.measured.items()
        ]
    frames = (pd.DataFrame(descriptions).astype({"clients": "Int64"}), pd.DataFrame(figures))
    return frames[0].to_csv(index=False), frames[1].to_csv(index=False, float_format="%.6g")


def requests_csv(played: Sequence[Run]) -> str:
    """The requests of every run as CSV: lengths, and the time of sending unless clients of a closed loop send them."""
    frames = []
    for name, run in identified(played).items():
        sent, reused = run.requests.arrival_s, run.requests.reused_tokens
        columns = {
            "run": name,
            "sent_s": sent if run.clients is None else None,
            "prompt_tokens": run.requests.prompt_tokens,
            "cached_tokens": 0 if reused is None else reused,
            "output_tokens": run.requests.output_tokens,
        }
        frames.append(pd.DataFrame(columns, index=range(len(sent))))
    return str(pd.concat(frames).to_csv(index=False, float_format="%.4f"))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Errors of the reference on published runs, by split and regime.")
    parser.add_argument("--server", action="store_true", help="fit the API server's times, write nothing")
    parser.add_argument("--knee", action="store_true", help="print errors of TTFT p50 at the knee, write nothing")
    parser.add_argument("--requests", action="store_true", help="print the requests of every run, write nothing")
    options = parser.parse_args(arguments)
    if options.knee:
        print(knee())
        return
    if options.server:
        print("request_ms={:.1f}, token_ms={:.2f}".format(*fit_server()))
        return
    played = list(runs())
    if options.requests:
        print(requests_csv(played), end="")
        return
    found = summary(played)
    for path, content in zip((RUNS_PATH, FIGURES_PATH), submission_files(played), strict=True):
        write_text(path, content)
    print(text := markdown(found))
    store("open_fidelity", found, text)


if __name__ == "__main__":
    main()
