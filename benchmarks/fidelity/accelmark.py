"""Served loads measured by AccelMark on one A100-80GB, and the discrete-event engine's predictions for them.

The runs send ShareGPT prompts (their lengths are known, plus 11 template tokens) to vLLM: one at a time
(``interactive``), eight in a closed loop (``sustained``), 100 at once (``offline``), 300 Poisson arrivals at a rate
(``online``), and 30 s at a burst rate (``burst``). Quantities that the source does not record are inferred from the
runs themselves and stated here:

* Output lengths: capped at 512 tokens, with the mean that the sustained run shows (output tokens per answered
  request). Before the cap they are log-normal; their width is fitted to TTFT: ``OUTPUT_LOG_SIGMA``.
* Slots: ``BATCH_SIZE`` of the engine version; see there.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq, minimize
from scipy.special import ndtri

from simulator.events.fleet import Fleet
from simulator.events.requests import FloatArray, IntArray, Outcome, Requests
from simulator.events.simulation import serve, serve_closed
from simulator.hardware import measured
from simulator.hardware.measured_model import MeasuredModel, MeasuredSource, operator_model
from simulator.hardware.memory import kv_capacity_tokens
from simulator.hardware.operators import OperatorModel
from simulator.hardware.profiles import EngineProfile, engine, hardware

CARD = "a100-80gb"
# The server of vLLM 0.7.3 shares a process with its engine and is far slower than the engine alone.
ENGINE_OF_VERSION = {"0.20.1": "vllm_v1", "0.7.3": "vllm_v0_served"}
OFFLINE_ENGINE_OF_VERSION = {"0.20.1": "vllm_v1", "0.7.3": "vllm_v0"}
TIER_OF_PRECISION = {"BF16": "FP16", "W8A8": "INT8", "W4A16": "INT4"}
# Inferred number of concurrent sequences. With 128, every TTFT quantile under overload is close to the runs of vLLM
# 0.20.1; with 256, none is. The runs of 0.7.3 reach TPOTs that need its default of 256.
BATCH_SIZE = {"0.20.1": 128, "0.7.3": 256}
TEMPLATE_TOKENS = 11
OUTPUT_CAP = 512
# Fitted: 0.20.1 to the median TTFT at 100 requests/s, 0.7.3 to its p99 at 25 and 100 requests/s on the A100-40GB
# (``hardware.py --widths``). Both versions should write the same answers. With the narrower width, p90 and p99 of
# 0.20.1 stay the same, and only the medians, which also depend on the inferred number of slots, become too long.
OUTPUT_LOG_SIGMA = {"0.20.1": 2.0, "0.7.3": 1.3}
ONLINE_REQUESTS = 300
OFFLINE_REQUESTS = 100
SEEDS = range(5)


@dataclass(frozen=True, slots=True)
class ServedComparison:
    """One measured metric of one run and its prediction, in the unit of the metric's name."""

    version: str
    precision: str
    scenario: str
    metric: str
    measured: float
    predicted: float

    def relative_error(self) -> float:
        """Signed relative error: positive when the prediction is larger."""
        return self.predicted / self.measured - 1.0


def accelmark_comparisons(version: str = "0.20.1", precision: str = "BF16") -> list[ServedComparison]:
    """Every metric of the runs with standard prompts of one engine version in one precision, measured and predicted.

    Predictions are means over seeds, which determine arrivals and the order of lengths. The vLLM 0.20.1 runs in W8A8
    and W4A16 ran without CUDA graphs, which the engine profile assumes: their predictions are too fast.
    """
    tier, runs = TIER_OF_PRECISION[precision], _runs(version, precision)
    served = operator_model(CARD, tier, ENGINE_OF_VERSION[version])
    offline = operator_model(CARD, tier, OFFLINE_ENGINE_OF_VERSION[version])
    return [
        *_compare([row for row in runs if row["scenario"] != "offline"], served, version, precision),
        *_compare([row for row in runs if row["scenario"] == "offline"], offline, version, precision),
    ]


def fit_engine(version: str, gemm_scale: float | None = None) -> EngineProfile:
    """Engine profile of a version, with overheads (and the GEMM scale unless given) fitted to its served runs.

    Least squares of log errors in the decoding speed of suite A in BF16: every TPOT median and the sustained
    throughput, no TTFT. GEMM scale and step overhead have nearly the same effect, so fitting both is ill-conditioned.
    """
    base = engine(ENGINE_OF_VERSION[version])
    runs = [row for row in _runs(version, "BF16") if row["suite"] == "suite_A" and row["scenario"] != "offline"]

    def profile(x: FloatArray) -> EngineProfile:
        scale = gemm_scale if gemm_scale is not None else abs(float(x[2]))
        return dataclasses.replace(
            base, step_overhead_ms=abs(float(x[0])), sequence_overhead_ms=abs(float(x[1])), gemm_scale=scale
        )

    def misfit(x: FloatArray) -> float:
        model = MeasuredModel(hardware(CARD), "FP16", profile(x))
        found = _compare(runs, model, version, "BF16", seeds=range(2))
        rates = [c for c in found if c.metric in {"tpot_ms_p50", "out_tok_s"}]
        return float(sum(math.log(c.predicted / c.measured) ** 2 for c in rates))

    start = np.array([base.step_overhead_ms + 0.5, base.sequence_overhead_ms + 0.01, base.gemm_scale])
    size = 2 if gemm_scale is not None else 3
    options = {"xatol": 1e-3, "fatol": 1e-6, "maxiter": 150}
    return profile(minimize(misfit, start[:size], method="Nelder-Mead", options=options).x)


def _compare(
    runs: list[dict[str, str]], model: OperatorModel, version: str, precision: str, seeds: Iterable[int] = SEEDS
) -> list[ServedComparison]:
    found = []
    for row in runs:
        predicted = [_figures(row, _outcome(row, model, version, precision, seed)) for seed in seeds]
        for metric in predicted[0]:
            seen = float(row[metric])
            mean = float(np.mean([figures[metric] for figures in predicted]))
            found.append(ServedComparison(version, precision, _name(row), metric, seen, mean))
    return found


def output_lengths(n: int, seed: int, mean: float, log_sigma: float) -> IntArray:
    """Output lengths (tokens) of ``n`` requests with this mean after the cap, shuffled by the seed.

    ``log_sigma`` is the standard deviation of their logarithm before the cap.
    """
    quantiles = np.random.default_rng(seed).permutation((np.arange(n) + 0.5) / n)

    def lengths(log_median: float) -> FloatArray:
        capped: FloatArray = np.clip(np.exp(log_median + log_sigma * ndtri(quantiles)), 1.0, OUTPUT_CAP)
        return capped

    log_median = brentq(lambda x: lengths(x).mean() - mean, 0.0, 20.0)
    rounded: IntArray = np.rint(lengths(log_median)).astype(np.int64)
    return rounded


def _runs(version: str, precision: str) -> list[dict[str, str]]:
    """Rows of a version and precision, one for each scenario and rate, with standard prompts and no draft model."""
    chosen: dict[str, dict[str, str]] = {}
    for row in measured.rows("accelmark_a100_80gb.csv"):
        known = row["scenario"] in {"interactive", "sustained", "offline", "online", "burst"}
        if known and row["version"].startswith(version) and row["precision"] == precision and row["suite"] != "suite_D":
            chosen.setdefault(_name(row), row)
    return list(chosen.values())


def _name(row: dict[str, str]) -> str:
    return f"{row['scenario']} {float(row['target_qps']):g}/s" if row["target_qps"] else row["scenario"]


def _mean_output(version: str, precision: str) -> float:
    """Output tokens per answered request of the sustained run."""
    row = next(row for row in _runs(version, precision) if row["scenario"] == "sustained")
    return float(row["out_tok_s"]) * 60.0 / float(row["req_per_min"])


def _outcome(row: dict[str, str], model: OperatorModel, version: str, precision: str, seed: int) -> Outcome:
    fleet = Fleet(model, BATCH_SIZE[version], kv_capacity_tokens(MeasuredSource(CARD), model.tier, 1.0, 0))
    known = (
        np.array([int(r["prompt"]) for r in measured.rows("sharegpt_prompt_lengths_accelmark.csv")]) + TEMPLATE_TOKENS
    )
    rng = np.random.default_rng([seed, 1])
    scenario, mean, log_sigma = row["scenario"], _mean_output(version, precision), OUTPUT_LOG_SIGMA[version]
    if scenario in {"interactive", "sustained"}:
        clients = int(float(row["concurrency"]))
        n = 50 * clients
        return serve_closed(fleet, np.resize(known, n), output_lengths(n, seed, mean, log_sigma), clients)
    if scenario == "offline":
        n, arrival_s = OFFLINE_REQUESTS, np.zeros(OFFLINE_REQUESTS)
    elif scenario == "online":
        n = ONLINE_REQUESTS
        arrival_s = np.cumsum(rng.exponential(1.0 / float(row["target_qps"]), n))
    else:
        rate, duration_s = float(row["burst_peak_qps"]), float(row["burst_duration_s"])
        n = math.floor(rate * duration_s)
        arrival_s = np.sort(rng.uniform(0.0, duration_s, n))
    return serve(fleet, Requests(arrival_s, np.resize(known, n), output_lengths(n, seed, mean, log_sigma)))


def _figures(row: dict[str, str], outcome: Outcome) -> dict[str, float]:
    """The metrics that the row states, computed from a simulated outcome."""
    ttft, tpot = outcome.ttft_ms(), outcome.tpot_ms()
    scenario = row["scenario"]
    if scenario == "offline":
        return {"out_tok_s": float(outcome.output_tokens.sum()) / outcome.makespan_s()}
    if scenario == "burst":
        p50, p99 = np.quantile(ttft, [0.5, 0.99])
        return {"burst_ttft_ms_p50": float(p50), "burst_ttft_ms_p99": float(p99)}
    if scenario == "sustained":
        # from after the common start until the last request is sent
        steady = outcome.arrival_s > outcome.first_token_s.min() + 5.0
        rate = outcome.tokens_per_s(5.0, float(outcome.arrival_s.max()))
        return {"out_tok_s": rate, "ttft_ms_p50": float(np.median(ttft[steady]))}
    values = {f"ttft_ms_p{q}": float(np.quantile(ttft, q / 100)) for q in (50, 90, 99)}
    values |= {f"tpot_ms_p{q}": float(np.nanquantile(tpot, q / 100)) for q in (50, 90)}
    if scenario == "online":
        values["elapsed_s"] = outcome.makespan_s()
    return values
