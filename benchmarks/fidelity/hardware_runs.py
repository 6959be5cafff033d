"""Compare the serving dynamics with served loads on a real A100-80GB (AccelMark), with the same requests.

AccelMark draws its arrivals from Python's generator with seed 42, one generator per scenario, with rates in ascending
order. This module makes the same draws, which reproduce the request counts that the runs report. Prompts are the
source's, in its order. Output lengths are not published; :func:`.accelmark.output_lengths` replaces them. Slots: the
served engine of vLLM 0.20.1 is created without a limit, so its default of 128 applies; that of 0.7.3 has 256, and the
offline engine 512.

Calibration: the engine profiles were fitted to the BF16 runs of suite A under either version (TPOT, throughput and the
interactive TTFT), and the width of the output lengths to their TTFT under load (:func:`width_errors`). All other runs
are held out. The quantised rows of vLLM 0.20.1 ran without CUDA graphs, which no profile models.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from benchmarks.fidelity.accelmark import (
    OUTPUT_LOG_SIGMA,
    TEMPLATE_TOKENS,
    TIER_OF_PRECISION,
    ServedComparison,
    output_lengths,
)
from inferencegym.models import QuantTier, ServeAction
from simulator.hardware import measured
from simulator.hardware.catalogue import table_path
from simulator.hardware.measured_model import MeasuredSource
from simulator.hardware.profiles import EngineProfile
from simulator.hardware.profiles import engine as engine_profile
from simulator.hardware.sources import with_times_of
from simulator.hardware.tables import AXES, VALUE_COLUMNS, FloatArray, ServingTables, load_tables
from simulator.load.requests import RequestLog
from simulator.offline.table import BATCH_SIZES, KV_BUDGETS, PROMPT_TOKENS, SPEC_LENGTHS, table_metadata
from simulator.whatif import STEP_S, Served, serve_requests, ttft_samples, weighted_quantile

ACCELMARK = {"a100-80gb": "accelmark_a100_80gb.csv", "a100-40gb": "accelmark_a100_40gb.csv"}
SEED = 42
RUNS = 3
SERVED_SLOTS = {"0.20.1": 128, "0.7.3": 256}
OFFLINE_SLOTS = 512
KV_BUDGETS_OF_CARDS = {"a100-80gb": 1.0, "a100-40gb": 0.93}
"""Share of the free memory in the KV pool; vLLM takes 0.9 of the 40 GB card, about 153,000 tokens."""
SCENARIOS = ("interactive", "sustained", "offline", "online", "burst")
INTERACTIVE_REQUESTS, SUSTAINED_REQUESTS, OFFLINE_REQUESTS, ONLINE_REQUESTS = 150, 400, 100, 300
# Requests that the source's load generator draws per window, as a multiple of the expected number.
DRAWN_PER_EXPECTED = 1.5


class System(NamedTuple):
    """A card and the version of vLLM on it."""

    card: str
    version: str


class Outputs(NamedTuple):
    """Output lengths of a run: mean (tokens), and standard deviation of their logarithm before the cap."""

    mean: float
    log_sigma: float


ENGINES = {
    System("a100-80gb", "0.20.1"): ("vllm_v1", "vllm_v1"),
    System("a100-80gb", "0.7.3"): ("vllm_v0_served", "vllm_v0"),
    System("a100-40gb", "0.7.3"): ("vllm_v0_served_40", "vllm_v0"),
}
"""Engine profiles of the systems, behind an HTTP server and offline."""
SYSTEMS_80GB = (System("a100-80gb", "0.20.1"), System("a100-80gb", "0.7.3"))
SYSTEM_40GB = System("a100-40gb", "0.7.3")


@dataclass(frozen=True, slots=True)
class HardwareComparison(ServedComparison):
    """One measured metric of one run on a card and its simulated value, in the metric's unit."""

    card: str
    suite: str

    @property
    def group(self) -> str:
        """Group of the row in reports: engine version, precision, and calibration or held out."""
        if self.version == "0.20.1" and self.precision != "BF16":
            return "0.20.1 quantised (eager)"
        if self.precision == "BF16" and self.suite == "suite_A" and self.scenario != "burst":
            return f"{self.version} BF16, calibration"
        return f"{self.version} {'BF16' if self.precision == 'BF16' else 'quantised'}, held out"


def hardware_comparisons(systems: Sequence[System] = SYSTEMS_80GB, step_s: float = STEP_S) -> list[HardwareComparison]:
    """Every run with standard prompts in a precision of the tables, failures included."""
    return [found for system in systems for row in _rows(system) for found in _compare(row, system, step_s)]


def operator_tables(card: str, engine: str | EngineProfile) -> ServingTables:
    """A table in memory with only the operator columns, which is enough for the dynamics under any engine profile."""
    source, profile = MeasuredSource(card), engine_profile(engine)
    points: dict[str, Sequence[float]] = {
        "quant_tier": range(len(source.tiers)),
        "spec_length": SPEC_LENGTHS,
        "kv_budget": KV_BUDGETS,
        "batch_size": BATCH_SIZES,
        "prompt_len_bucket": PROMPT_TOKENS,
    }
    axes = {name: np.array(points[name], dtype=np.float64) for name in AXES}
    columns = {name: np.zeros([len(axes[axis]) for axis in AXES]) for name in VALUE_COLUMNS}
    tables = ServingTables(f"{card}, {profile.name}", "", axes, columns, table_metadata(source, profile))
    return with_times_of([source.operators(tier, profile) for tier in source.tiers], tables)


@cache
def _tables(system: System, offline: bool) -> ServingTables:
    if system == SYSTEMS_80GB[0]:
        return load_tables(table_path(system.card))
    return operator_tables(system.card, ENGINES[system][offline])


def _rows(system: System) -> list[dict[str, str]]:
    """First row of each suite, precision, scenario and rate; repetitions are left out."""
    chosen: dict[tuple[str, ...], dict[str, str]] = {}
    for row in measured.rows(ACCELMARK[system.card]):
        key = (row["suite"], row["precision"], row["scenario"], row["target_qps"])
        standard = row["scenario"] in SCENARIOS and row["suite"] != "suite_D" and row["precision"] in TIER_OF_PRECISION
        if standard and row["version"].startswith(system.version):
            chosen.setdefault(key, row)
    return list(chosen.values())


def _compare(row: dict[str, str], system: System, step_s: float) -> Iterator[HardwareComparison]:
    name = f"{row['scenario']} {float(row['target_qps']):g}/s" if row["target_qps"] else row["scenario"]
    for metric, predicted in _figures(row, system, step_s, _outputs(row, system)).items():
        seen = float(row[metric])
        yield HardwareComparison(
            system.version, row["precision"], name, metric, seen, float(predicted), system.card, row["suite"]
        )


def width_errors(system: System, log_sigma: float) -> dict[tuple[str, str], float]:
    """Log errors of TTFT by requests/s and metric with output lengths of this width, for suite A in BF16 under load."""
    found = {}
    for row in _rows(system):
        if (row["suite"], row["precision"]) == ("suite_A", "BF16") and row["target_qps"] in ("25.0", "100.0"):
            figures = _figures(row, system, STEP_S, _outputs(row, system)._replace(log_sigma=log_sigma))
            for metric in ("ttft_ms_p50", "ttft_ms_p90", "ttft_ms_p99"):
                found[row["target_qps"], metric] = math.log(figures[metric] / float(row[metric]))
    return found


def _figures(row: dict[str, str], system: System, step_s: float, outputs: Outputs) -> dict[str, float]:
    """The metrics that the row states, computed with the dynamics."""
    scenario = row["scenario"]
    if scenario == "offline":
        served = _serve(row, system, step_s, _log(np.zeros(OFFLINE_REQUESTS), outputs, 0), slots=OFFLINE_SLOTS)
        return {"out_tok_s": served.report().output_tokens_per_s, "elapsed_s": served.makespan_s()}
    if scenario == "burst":
        return _burst_figures(row, system, step_s, outputs)
    if scenario == "online":
        logs = [_log(at, outputs, run) for run, at in enumerate(online_arrivals(row, system))]
        runs = [_serve(row, system, step_s, log) for log in logs]
        return {
            **_ttft(runs, "ttft_ms_", (50, 90, 99)),
            "tpot_ms_p50": float(np.median(np.concatenate([run.tpot_ms for run in runs]))),
            "elapsed_s": float(np.median([run.makespan_s() for run in runs])),
        }
    clients = int(float(row["concurrency"]))
    n = INTERACTIVE_REQUESTS if scenario == "interactive" else SUSTAINED_REQUESTS
    served = _serve(row, system, step_s, _log(np.zeros(n), outputs, 0), clients=clients)
    if scenario == "interactive":
        return {
            **_ttft([served], "ttft_ms_", (50, 90, 99)),
            "tpot_ms_p50": float(np.median(served.tpot_ms)),
            "elapsed_s": served.makespan_s(),
        }
    # A sustained run measures neither the clients' common start nor the last requests.
    rate = served.metric["tokens_per_sec"]
    steady = rate[len(rate) // 10 : -len(rate) // 4]
    ttft, weight = ttft_samples(served.record[1:])
    return {"out_tok_s": float(steady.mean()), "ttft_ms_p50": weighted_quantile(ttft, weight, 0.5)}


def online_arrivals(row: dict[str, str], system: System) -> list[FloatArray]:
    """Arrival times (s) of the three runs at one rate; one generator serves the suite's rates in order."""
    suite, precision = row["suite"], row["precision"]
    rates = sorted(
        float(other["target_qps"])
        for other in _rows(system)
        if (other["suite"], other["precision"], other["scenario"]) == (suite, precision, "online")
    )
    generator = random.Random(SEED)
    for rate in rates:
        runs = [_poisson(generator, rate, ONLINE_REQUESTS) for _ in range(RUNS)]
        if rate == float(row["target_qps"]):
            return runs
    raise AssertionError("a row's own rate is among its suite's")


def burst_arrivals(row: dict[str, str]) -> tuple[list[FloatArray], list[FloatArray]]:
    """Arrival times (s) of the quiet and of the burst windows; each window starts on an empty engine."""
    generator = random.Random(SEED)
    quiet: list[FloatArray] = []
    burst: list[FloatArray] = []
    for _ in range(RUNS):
        for into, rate, length in (
            (quiet, row["burst_steady_qps"], row["burst_interval_s"]),
            (burst, row["burst_peak_qps"], row["burst_duration_s"]),
        ):
            expected = float(rate) * float(length)
            drawn = _poisson(generator, float(rate), int(expected * DRAWN_PER_EXPECTED))
            into.append(drawn[drawn < float(length)])
    return quiet, burst


def _poisson(generator: random.Random, rate: float, n: int) -> FloatArray:
    return np.array(list(itertools.accumulate(generator.expovariate(rate) for _ in range(n))))


def _burst_figures(row: dict[str, str], system: System, step_s: float, outputs: Outputs) -> dict[str, float]:
    figures: dict[str, float] = {}
    for name, windows in zip(("steady", "burst"), burst_arrivals(row), strict=True):
        runs = [_serve(row, system, step_s, _log(at, outputs, i)) for i, at in enumerate(windows)]
        figures |= _ttft(runs, f"{name}_ttft_ms_", (50, 99))
    return figures


def _ttft(runs: Sequence[Served], prefix: str, percentiles: Sequence[int]) -> dict[str, float]:
    ttft, weight = ttft_samples(np.concatenate([run.record for run in runs]))
    return {f"{prefix}p{q}": weighted_quantile(ttft, weight, q / 100) for q in percentiles}


def _serve(
    row: dict[str, str], system: System, step_s: float, log: RequestLog, clients: int = 0, slots: int = 0
) -> Served:
    tier = QuantTier[TIER_OF_PRECISION[row["precision"]]]
    action = ServeAction(KV_BUDGETS_OF_CARDS[system.card], 0, slots or SERVED_SLOTS[system.version], False, tier)
    tables = _tables(system, row["scenario"] == "offline")
    return serve_requests(action, log, tables, closed_clients=clients, step_s=step_s)


def _log(arrival_s: FloatArray, outputs: Outputs, seed: int) -> RequestLog:
    prompts = [float(row["prompt"]) + TEMPLATE_TOKENS for row in measured.rows("sharegpt_prompt_lengths_accelmark.csv")]
    n = len(arrival_s)
    # A window with more than the suite's 300 requests repeats them.
    return RequestLog(
        arrival_s,
        np.resize(prompts[:ONLINE_REQUESTS], n),
        output_lengths(n, seed, outputs.mean, outputs.log_sigma).astype(np.float64),
        np.zeros(n, dtype=np.int64),
    )


def _outputs(row: dict[str, str], system: System) -> Outputs:
    """Output lengths, with the mean of the same suite's sustained run (output tokens per answered request)."""
    run: dict[str, Any] = next(
        other
        for other in _rows(system)
        if other["scenario"] == "sustained" and (other["suite"], other["precision"]) == (row["suite"], row["precision"])
    )
    mean = float(run["out_tok_s"]) * 60.0 / float(run["req_per_min"])
    assert math.isfinite(mean)
    return Outputs(mean, OUTPUT_LOG_SIGMA[system.version])
