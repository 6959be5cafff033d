"""Write the page's static data: measured and predicted values for the Fidelity tab, and an example request log.

    python -m scripts.page_data [--check]

``--check`` writes nothing and fails if a file is out of date.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.fidelity.accelmark import TIER_OF_PRECISION
from benchmarks.fidelity.hardware_runs import HardwareComparison, hardware_comparisons
from benchmarks.fidelity.static_batches import ErrorSummary, argonne_comparisons, argonne_errors, table_vs_argonne
from inferencegym.tasks import get_task
from simulator.coverage import LEVELS, coverage
from simulator.hardware.catalogue import usual_name
from simulator.hardware.tables import load_tables
from simulator.load.recorded import load_trace

PLACE: Final = Path(__file__).resolve().parents[1] / "server" / "web" / "data"
FIDELITY: Final = PLACE / "fidelity.json"
EXAMPLE: Final = PLACE / "azure-conversation.csv"
EXAMPLE_TASK: Final = "azure-conv"
EXAMPLE_S: Final = 300.0
"""Seconds of the recorded trace that the example holds."""
DIGITS: Final = 5
TOLERANCE: Final = 1e-3
"""Relative tolerance: the last digits of a prediction differ between machines; a stale file differs by more."""

METRIC_NAMES: Final = {
    "ttft_ms_p50": "TTFT p50",
    "ttft_ms_p90": "TTFT p90",
    "ttft_ms_p99": "TTFT p99",
    "tpot_ms_p50": "TPOT p50",
    "tpot_ms_p90": "TPOT p90",
    "out_tok_s": "Throughput",
    "elapsed_s": "Duration",
    "steady_ttft_ms_p50": "TTFT pre-burst p50",
    "steady_ttft_ms_p99": "TTFT pre-burst p99",
    "burst_ttft_ms_p50": "TTFT burst p50",
    "burst_ttft_ms_p99": "TTFT burst p99",
}


def fidelity() -> dict[str, Any]:
    """Data of the Fidelity tab, as JSON."""
    tables = load_tables()
    served = hardware_comparisons()
    return {
        "model": usual_name(tables.meta["model"]),
        "hardware": tables.meta["hardware"],
        "table_sha256": tables.sha256,
        "batches": [_batch(comparison) for comparison in argonne_comparisons()],
        "batch_errors": [
            *(_summary(e, "step model") for e in argonne_errors()),
            *(_summary(e, "committed table") for e in table_vs_argonne()),
        ],
        "served": [_served(comparison) for comparison in served],
        "served_errors": _served_errors(served),
        "coverage": {
            "levels": list(LEVELS),
            "shares": coverage(tables),
            "quant_tier": list(TIER_OF_PRECISION.values()),
            "spec_length": tables.axes["spec_length"].astype(int).tolist(),
            "batch_size": tables.axes["batch_size"].astype(int).tolist(),
            "prompt_tokens": tables.axes["prompt_len_bucket"].astype(int).tolist(),
            # With the whole KV pool: [tier][draft length][batch][prompt].
            "cells": tables.columns["support"][:, :, -1].astype(int).tolist(),
        },
    }


def _batch(comparison: Any) -> dict[str, Any]:
    row = comparison.row
    return {
        "engine": row.framework,
        "fitted": row.is_calibration(),
        "batch": row.batch,
        "input_tokens": row.input_tokens,
        "output_tokens": row.output_tokens,
        "measured_s": _rounded(row.latency_s),
        "predicted_s": _rounded(comparison.predicted_s),
    }


def _summary(summary: ErrorSummary, predicted_by: str) -> dict[str, Any]:
    values = {name: _rounded(v) if isinstance(v, float) else v for name, v in asdict(summary).items()}
    return {**values, "predicted_by": predicted_by}


def _served(c: HardwareComparison) -> dict[str, Any]:
    return {
        "group": f"vLLM {c.group}",
        "precision": c.precision,
        "scenario": c.scenario,
        "metric": METRIC_NAMES[c.metric],
        "measured": _rounded(c.measured),
        "predicted": _rounded(c.predicted),
    }


def _served_errors(served: Sequence[HardwareComparison]) -> list[dict[str, Any]]:
    groups: dict[tuple[str, str], list[float]] = {}
    for c in served:
        groups.setdefault((f"vLLM {c.group}", c.metric), []).append(c.relative_error())
    return [
        {
            "group": group,
            "metric": METRIC_NAMES[metric],
            "figures": len(errors),
            "median": _rounded(float(np.median(np.abs(errors)))),
            "worst": _rounded(float(np.max(np.abs(errors)))),
            "bias": _rounded(float(np.mean(errors))),
        }
        for (group, metric), errors in groups.items()
    ]


def example_log() -> str:
    """The first minutes of a shipped trace as CSV."""
    task = get_task(EXAMPLE_TASK)
    assert task.trace is not None
    log = load_trace(task.trace)[0]
    first = log.arrival_s < EXAMPLE_S
    columns = zip(log.arrival_s[first], log.prompt_tokens[first], log.output_tokens[first], strict=True)
    lines = [f"{arrival:.3f},{prompt:.0f},{output:.0f}" for arrival, prompt, output in columns]
    return "\n".join(["arrival_s,prompt_tokens,output_tokens", *lines, ""])


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def differences(old: Any, new: Any, path: str = "") -> list[str]:
    """Differences between two data files beyond the tolerance, as text."""
    if isinstance(old, dict) and isinstance(new, dict) and old.keys() == new.keys():
        return [found for key in old for found in differences(old[key], new[key], f"{path}.{key}")]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [
            found for i, pair in enumerate(zip(old, new, strict=True)) for found in differences(*pair, f"{path}[{i}]")
        ]
    if isinstance(old, float) and isinstance(new, (int, float)):
        same = math.isclose(old, new, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    else:
        same = old == new
    return [] if same else [f"{path.lstrip('.')}: {old!r} in the file, {new!r} now"]


def stale() -> list[str]:
    """Differences between the files on disk and the current results."""
    found = differences(json.loads(FIDELITY.read_text(encoding="utf-8")), json.loads(json.dumps(fidelity())))
    if EXAMPLE.read_text(encoding="utf-8") != example_log():
        found.append(f"{EXAMPLE.name} is not the beginning of {EXAMPLE_TASK}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Write or check the static data of the web page.")
    parser.add_argument("--check", action="store_true", help="fail if a file is out of date")
    if parser.parse_args().check:
        found = stale()
        print("\n".join(found[:10]) or "up to date")
        return 1 if found else 0
    PLACE.mkdir(parents=True, exist_ok=True)
    FIDELITY.write_text(json.dumps(fidelity(), separators=(",", ":")) + "\n", encoding="utf-8")
    EXAMPLE.write_text(example_log(), encoding="utf-8")
    for file in (FIDELITY, EXAMPLE):
        print(f"{file.name}: {file.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
