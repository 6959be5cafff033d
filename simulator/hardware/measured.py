"""Readers of the measured CSV files, with checksums that tie a table to the files it was built from."""

from __future__ import annotations

import csv
import hashlib
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from inferencegym.errors import InvalidConfigError
from simulator.hardware.profiles import profiles

FloatArray = NDArray[np.float64]

MEASURED_DIR = Path(__file__).resolve().parents[1] / "data" / "measured"


class GemmTimes(NamedTuple):
    """GEMM times of one data type: ``latency_ms[(n, k)]`` over the shared row counts ``m``."""

    m: FloatArray
    latency_ms: dict[tuple[int, int], FloatArray]


def rows(name: str) -> list[dict[str, str]]:
    """Return the rows of one measured CSV file as text, in file order."""
    with (MEASURED_DIR / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def columns(name: str) -> dict[str, FloatArray]:
    """Return the columns of a measured CSV file that holds numbers only, in file order."""
    table = rows(name)
    return {key: np.array([float(row[key]) for row in table]) for key in table[0]}


def gemm_times(name: str, dtype: str | None = None) -> GemmTimes:
    """GEMM times of a file, optionally of one ``gemm_dtype``; every (n, k) is measured at the same row counts."""
    cells: dict[tuple[int, int], dict[int, float]] = {}
    for row in rows(name):
        if dtype is None or row["gemm_dtype"] == dtype:
            cells.setdefault((int(row["n"]), int(row["k"])), {})[int(row["m"])] = float(row["latency"])
    m = sorted(next(iter(cells.values())))
    return GemmTimes(np.array(m, float), {shape: np.array([t[i] for i in m]) for shape, t in cells.items()})


def _acceptance_file() -> str:
    return str(profiles()["speculation"]["acceptance"])


@cache
def spec_acceptance(dataset: str = "sharegpt", method: str = "eagle") -> dict[int, tuple[float, ...]]:
    """P(draft position j is accepted), j = 1..k, for every measured number of draft tokens k.

    Positions are marginal probabilities: their sum plus one (the bonus token) is the mean number of tokens per verify
    step.
    """
    found = {
        int(row["k"]): tuple(float(row[f"p_acc_pos{j}"]) for j in range(1, int(row["k"]) + 1))
        for row in rows(_acceptance_file())
        if (row["dataset"], row["method"]) == (dataset, method)
    }
    if not found:
        raise InvalidConfigError(
            f"no acceptance was measured for dataset {dataset!r} with method {method!r}: choose from the columns "
            f"dataset and method of {_acceptance_file()}"
        )
    return found


def spec_tokens_per_step(dataset: str = "sharegpt", method: str = "eagle") -> dict[int, float]:
    """Mean tokens per verify step by number of draft tokens; 1.0 without drafting."""
    return {0: 1.0, **{k: 1.0 + sum(p) for k, p in spec_acceptance(dataset, method).items()}}


NOT_IN_TABLES: Final = ("accelmark_a100_40gb.csv",)
"""Files that only the fidelity report reads."""


def checksums() -> dict[str, str]:
    """SHA-256 of every measured CSV file as it lies on disk, by file name."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(MEASURED_DIR.glob("*.csv"))}


def recorded_checksums() -> dict[str, str]:
    """SHA-256 of every measured CSV file as recorded in ``SHA256SUMS``."""
    lines = (MEASURED_DIR / "SHA256SUMS").read_text(encoding="utf-8").splitlines()
    return {name: digest for digest, name in (line.split() for line in lines)}
