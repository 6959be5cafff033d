"""Errors of the step model and of the shipped table against measured runs on real A100s.

The measured runs are static batches of LLM-Inference-Bench (Argonne) on A100-40GB cards: the time from sending
``batch`` equal prompts at once to the last of ``batch * output_len`` tokens. Six of vLLM's rows were used to fit the
two overheads of the ``vllm_v0`` profile; the others are held out. TensorRT-LLM's rows are compared with the kernels
alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow.parquet as pq

from simulator.events.fleet import Fleet
from simulator.events.requests import Requests
from simulator.events.simulation import serve
from simulator.hardware import measured
from simulator.hardware.measured_model import MeasuredModel, operator_model
from simulator.hardware.operators import OperatorModel
from simulator.hardware.profiles import EngineProfile, engine, hardware, profiles

CARD = "a100-40gb"
TABLE_PATH = Path(__file__).resolve().parents[2] / "simulator" / "data" / "traces_llama3_8b.parquet"
# The engines of these runs took 0.9 of the card's reported 42.5 GB.
ENGINE_MEMORY_GB = 0.9 * 42.51
ENGINE_OF_FRAMEWORK = {"vLLM": "vllm_v0", "TensorRT-LLM": "nofit"}
CALIBRATION_BATCHES = (1, 16, 64)
CALIBRATION_LENGTHS = (128, 1024)
MAIN_SOURCE = "Plots/All_results.csv"


class StaticBatch(NamedTuple):
    """One measured static batch."""

    framework: str
    batch: int
    input_tokens: int
    output_tokens: int
    latency_s: float

    def is_calibration(self) -> bool:
        """Whether this row was used to fit the overheads of its framework's profile."""
        equal = self.input_tokens == self.output_tokens and self.input_tokens in CALIBRATION_LENGTHS
        return self.framework == "vLLM" and equal and self.batch in CALIBRATION_BATCHES

    def fits_cache(self) -> bool:
        """Whether all sequences of the batch fit into the KV cache at their full length."""
        return self.batch * (self.input_tokens + self.output_tokens) <= _pool_tokens()


@dataclass(frozen=True, slots=True)
class Comparison:
    """A measured batch latency and its prediction, s."""

    row: StaticBatch
    predicted_s: float

    def relative_error(self) -> float:
        """Signed relative error: positive when the prediction is too slow."""
        return self.predicted_s / self.row.latency_s - 1.0


@dataclass(frozen=True, slots=True)
class ErrorSummary:
    """Relative errors of a group: median, p90 and worst of their absolute values; ``bias`` is their mean."""

    group: str
    rows: int
    median: float
    p90: float
    worst: float
    bias: float


def argonne_rows() -> list[StaticBatch]:
    """The single-GPU A100 rows of Llama-3-8B in FP16 for vLLM and TensorRT-LLM, each configuration once."""
    return [
        StaticBatch(
            row["Framework"], int(row["batch"]), int(row["input_len"]), int(row["output_len"]), float(row["latency_s"])
        )
        for row in measured.rows("argonne_llama3_8b_e2e.csv")
        if row["Hardware"] == "Nvidia A100 GPU"
        and row["n_gpu"] == "1"
        and row["Model"] == "meta-llama/Meta-Llama-3-8B"
        and row["Framework"] in ENGINE_OF_FRAMEWORK
        and row["source"] == MAIN_SOURCE
    ]


def argonne_comparisons() -> list[Comparison]:
    """Predict every measured batch with the discrete-event engine under its framework's profile."""
    return [
        Comparison(row, batch_latency_s(operator_model(CARD, "FP16", ENGINE_OF_FRAMEWORK[row.framework]), row))
        for row in argonne_rows()
    ]


def argonne_errors() -> list[ErrorSummary]:
    """Errors of the step model for calibration rows, held-out rows, and rows whose batch does not fit the cache."""
    return _by_group(argonne_comparisons())


def table_vs_argonne() -> list[ErrorSummary]:
    """Errors of batch latencies composed from the committed table's ``decode_ms`` and ``prefill_saturated_ms``.

    Only rows that fit the cache are used, because the composition has no preemption. The table holds the times of its
    own engine profile, so part of the error is the difference between that engine and the measured one.
    """
    table = _TableSteps(TABLE_PATH)
    rows = [row for row in argonne_rows() if row.fits_cache()]
    return _by_group([Comparison(row, table.batch_latency_s(row)) for row in rows])


def batch_latency_s(model: OperatorModel, row: StaticBatch) -> float:
    """Predicted latency of a static batch: all requests arrive at once on an idle engine."""
    requests = Requests(
        np.zeros(row.batch), np.full(row.batch, row.input_tokens), np.full(row.batch, row.output_tokens)
    )
    return serve(Fleet(model, row.batch, _pool_tokens()), requests).makespan_s()


def fit_overheads() -> tuple[float, float]:
    """Least-squares step and sequence overhead (ms) of the vLLM profile on the calibration rows, in relative error.

    A batch that starts at once runs the same iterations however long they take, so its latency is linear in both
    overheads.
    """
    rows = [row for row in argonne_rows() if row.is_calibration()]
    profile = engine("vllm_v0")

    def latency(step_ms: float, sequence_ms: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        changed = dataclasses.replace(profile, step_overhead_ms=step_ms, sequence_overhead_ms=sequence_ms)
        return np.array([batch_latency_s(_model(changed), row) for row in rows])

    seen = np.array([row.latency_s for row in rows])
    base = latency(0.0, 0.0)
    slopes = np.stack([latency(1.0, 0.0) - base, latency(0.0, 1.0) - base], axis=1)
    overheads, *_ = np.linalg.lstsq(slopes / seen[:, None], (seen - base) / seen, rcond=None)
    return float(overheads[0]), float(overheads[1])


def summarise(group: str, comparisons: Sequence[Comparison]) -> ErrorSummary:
    """Error figures of some comparisons."""
    error = np.array([c.relative_error() for c in comparisons])
    size = np.abs(error)
    return ErrorSummary(
        group, len(error), float(np.median(size)), float(np.quantile(size, 0.9)), float(size.max()), float(error.mean())
    )


def _by_group(comparisons: Sequence[Comparison]) -> list[ErrorSummary]:
    groups: dict[str, Callable[[StaticBatch], bool]] = {
        "vLLM, calibration": lambda row: row.is_calibration(),
        "vLLM, held out": lambda row: row.framework == "vLLM" and not row.is_calibration(),
        "vLLM, held out, fits the cache": lambda row: (
            row.framework == "vLLM" and not row.is_calibration() and row.fits_cache()
        ),
        "TensorRT-LLM, nothing fitted": lambda row: row.framework == "TensorRT-LLM",
        "TensorRT-LLM, fits the cache": lambda row: row.framework == "TensorRT-LLM" and row.fits_cache(),
    }
    chosen = {name: [c for c in comparisons if belongs(c.row)] for name, belongs in groups.items()}
    return [summarise(name, some) for name, some in chosen.items() if some]


def _pool_tokens() -> int:
    pool_gb = ENGINE_MEMORY_GB - profiles()["model"]["weights_gb"]["FP16"] - profiles()["memory"]["activations_gb"]
    return int(pool_gb * 1e9 / profiles()["model"]["kv_bytes_per_token"])


def _model(profile: EngineProfile) -> OperatorModel:
    return MeasuredModel(hardware(CARD), "FP16", profile)


class _TableSteps:
    """Step times of a lookup table (FP16, no drafting, whole KV budget), log-log over batch and context."""

    def __init__(self, path: Path) -> None:
        from simulator.offline.table import PROMPT_TOKENS

        table = pq.read_table(path).to_pydict()
        column = {name: np.array(values) for name, values in table.items()}
        chosen = (column["quant_tier"] == 0) & (column["spec_length"] == 0) & (column["kv_budget"] == 1.0)
        self.batch = np.unique(column["batch_size"])
        self.length = np.array(PROMPT_TOKENS)
        order = np.lexsort((column["prompt_len_bucket"][chosen], column["batch_size"][chosen]))
        shape = (len(self.batch), len(self.length))
        self.decode = column["decode_ms"][chosen][order].reshape(shape)
        self.prefill = column["prefill_saturated_ms"][chosen][order].reshape(shape)

    def batch_latency_s(self, row: StaticBatch) -> float:
        """All prompts one after another, then one decode iteration per output token at a growing context."""
        contexts = row.input_tokens + 1.0 + np.arange(row.output_tokens - 1)
        decode = sum(self._at(self.decode, row.batch, context) for context in contexts)
        # The prompts of a static batch do not overlap with decoding, so use the batch-1 column.
        return (row.batch * self._at(self.prefill, 1, row.input_tokens) + float(decode)) / 1e3

    def _at(self, values: np.ndarray[tuple[int, int], np.dtype[np.float64]], batch: float, length: float) -> float:
        along = [np.interp(np.log2(length), np.log2(self.length), np.log(line)) for line in values]
        return float(np.exp(np.interp(np.log2(batch), np.log2(self.batch), along)))
