"""Write what the page's tab Fidelity shows: every measured figure beside its prediction, errors, and coverage.

    python scripts/fidelity_data.py [--check]

The server carries the file and computes nothing. ``--check`` writes nothing and fails if the file is out of date.
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

from simulator.build.accelmark import TIER_OF_PRECISION, ServedComparison, accelmark_comparisons
from simulator.build.validate import ErrorSummary, argonne_comparisons, argonne_errors, table_vs_argonne
from simulator.coverage import LEVELS, coverage
from simulator.tables import load_tables

PLACE: Final = Path(__file__).resolve().parents[1] / "server" / "web" / "data" / "fidelity.json"
DIGITS: Final = 5
TOLERANCE: Final = 1e-3
"""Between machines the last digits of a prediction may differ; a stale file differs by more."""

SERVED: Final = (("0.20.1", "BF16"), ("0.7.3", "BF16"), ("0.20.1", "W8A8"), ("0.20.1", "W4A16"))
FITTED: Final = ("tpot_ms_p50", "out_tok_s")
"""Metrics of the BF16 runs from which the engine's overheads were fitted; all others are predictions."""
WITHOUT_GRAPHS: Final = ("W8A8", "W4A16")
"""These runs went without CUDA graphs, which the engine profile does not model."""

METRIC_NAMES: Final = {
    "ttft_ms_p50": "TTFT, median",
    "ttft_ms_p90": "TTFT, 90th percentile",
    "ttft_ms_p99": "TTFT, 99th percentile",
    "tpot_ms_p50": "TPOT, median",
    "tpot_ms_p90": "TPOT, 90th percentile",
    "out_tok_s": "Throughput",
    "elapsed_s": "Time to finish",
    "burst_ttft_ms_p50": "TTFT in a burst, median",
    "burst_ttft_ms_p99": "TTFT in a burst, 99th percentile",
}


def fidelity() -> dict[str, Any]:
    """Everything the tab shows, as JSON."""
    tables = load_tables()
    served = [comparison for version, precision in SERVED for comparison in accelmark_comparisons(version, precision)]
    return {
        "model": tables.meta["model"],
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


def _served(c: ServedComparison) -> dict[str, Any]:
    return {
        "engine": f"vLLM {c.version}",
        "precision": c.precision,
        "scenario": c.scenario,
        "metric": METRIC_NAMES[c.metric],
        "fitted": _was_fitted(c),
        "measured": _rounded(c.measured),
        "predicted": _rounded(c.predicted),
    }


def _was_fitted(c: ServedComparison) -> bool:
    return c.precision not in WITHOUT_GRAPHS and c.metric in FITTED


def _served_errors(served: Sequence[ServedComparison]) -> list[dict[str, Any]]:
    groups: dict[tuple[str, str, str], list[float]] = {}
    for c in served:
        groups.setdefault((f"vLLM {c.version}", c.precision, c.metric), []).append(abs(c.relative_error()))
    return [
        {
            "engine": engine,
            "precision": precision,
            "metric": METRIC_NAMES[metric],
            "fitted": precision not in WITHOUT_GRAPHS and metric in FITTED,
            "cuda_graphs": precision not in WITHOUT_GRAPHS,
            "figures": len(errors),
            "median": _rounded(float(np.median(errors))),
            "worst": _rounded(max(errors)),
        }
        for (engine, precision, metric), errors in groups.items()
    ]


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def differences(old: Any, new: Any, path: str = "") -> list[str]:
    """Where two such files differ by more than the tolerance."""
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


def main() -> int:
    parser = argparse.ArgumentParser(description="Write, or check, the data of the page's tab Fidelity.")
    parser.add_argument("--check", action="store_true", help="fail if the file is out of date")
    if parser.parse_args().check:
        found = differences(json.loads(PLACE.read_text(encoding="utf-8")), json.loads(json.dumps(fidelity())))
        for difference in found[:10]:
            print(difference)
        return 1 if found else 0
    PLACE.parent.mkdir(parents=True, exist_ok=True)
    PLACE.write_text(json.dumps(fidelity(), separators=(",", ":")) + "\n", encoding="utf-8")
    print(f"{PLACE.name}: {PLACE.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
