"""Errors of any simulator on the measured runs of the open fidelity suite.

``ops/data/fidelity_runs.csv`` describes the runs and ``ops/data/fidelity_figures.csv`` has their measured figures with
those of the discrete-event reference (``python -m benchmarks.fidelity.open_suite`` writes both). A submission is a CSV
with the columns ``run``, ``quantity`` and ``value``: latencies in ms, ``tokens/s`` in output tokens per second.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean, median
from typing import Final

from inferencegym.errors import InvalidConfigError
from ops.margins import CARDS

RUNS_PATH: Final = Path(__file__).with_name("data") / "fidelity_runs.csv"
FIGURES_PATH: Final = Path(__file__).with_name("data") / "fidelity_figures.csv"
QUANTITIES: Final = ("TTFT p50", "TTFT p99", "TPOT p50", "E2E p50", "E2E p99", "ITL p50", "ITL p99", "tokens/s")
"""Each run states some of them."""
GROUPS: Final = ("split", "source", "card", "model", "band")
COLUMNS: Final = ("run", "quantity", "value")
OURS: Final = "inferencegym"

Figures = dict[tuple[str, str], float]
"""Values by run and quantity."""


@dataclass(frozen=True, slots=True)
class Errors:
    """Errors of one simulator on the runs of a group: ``predicted`` of its ``stated`` figures have a value.

    ``by_quantity`` has the median of the absolute relative error and the bias (mean error, positive where the simulator
    is larger).
    """

    simulator: str
    group: tuple[str, ...]
    predicted: int
    stated: int
    by_quantity: dict[str, tuple[float, float]]


def published_runs() -> dict[str, dict[str, str]]:
    """Description of each run, by its id."""
    return {row["run"]: row for row in _rows(RUNS_PATH)}


def measured() -> Figures:
    """The measured figures."""
    return {(row["run"], row["quantity"]): float(row["measured"]) for row in _rows(FIGURES_PATH)}


def ours() -> Figures:
    """The figures of the discrete-event reference; it refuses runs whose requests exceed its KV pool."""
    return {(row["run"], row["quantity"]): float(row["simulated"]) for row in _rows(FIGURES_PATH) if row["simulated"]}


def read_predictions(path: Path) -> Figures:
    """The figures of a submission.

    Raises:
        InvalidConfigError: a column is missing, a run or quantity is not measured, named twice, or not above 0.
    """
    stated, found = measured(), Figures()
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        if missing := set(COLUMNS) - set(reader.fieldnames or ()):
            raise InvalidConfigError(
                f"{path} lacks the columns {', '.join(sorted(missing))}: it must have {', '.join(COLUMNS)}"
            )
        for row in reader:
            where, key = f"{path}, line {reader.line_num}", (row["run"], row["quantity"])
            if key not in stated:
                raise InvalidConfigError(
                    f"{where}: no {key[1]!r} was measured for run {key[0]!r}; see `inferencegym fidelity runs`"
                )
            if key in found:
                raise InvalidConfigError(f"{where}: {key[1]} of {key[0]} is given twice")
            try:
                found[key] = float(row["value"])
            except (TypeError, ValueError):
                found[key] = math.nan
            if not 0.0 < found[key] < math.inf:
                raise InvalidConfigError(f"{where}: value={row['value']!r} is not a number above 0")
    if not found:
        raise InvalidConfigError(f"{path} has no predictions")
    return found


def errors(simulators: Mapping[str, Figures], by: Sequence[str], common: bool = False) -> list[Errors]:
    """Errors of each simulator on the runs, grouped by columns of :data:`GROUPS`.

    With ``common`` only the figures that all simulators predict count. Groups without predictions are left out.

    Raises:
        InvalidConfigError: ``by`` names another column.
    """
    if unknown := set(by) - set(GROUPS):
        raise InvalidConfigError(
            f"cannot group by {', '.join(sorted(unknown))}: choose among {', '.join(GROUPS)}", "by"
        )
    truth, runs = measured(), published_runs()
    counted = {key for key in truth if not common or all(key in each for each in simulators.values())}
    grouped: dict[tuple[str, ...], list[tuple[str, str]]] = {}
    for key in truth:
        if key in counted:
            grouped.setdefault(tuple(runs[key[0]][name] for name in by), []).append(key)
    found = []
    for group, keys in sorted(grouped.items()):
        for name, figures in simulators.items():
            relative: dict[str, list[float]] = {}
            for key in keys:
                if key in figures:
                    relative.setdefault(key[1], []).append(figures[key] / truth[key] - 1.0)
            if relative:
                by_quantity = {q: (median(map(abs, each)), fmean(each)) for q, each in relative.items()}
                found.append(Errors(name, group, sum(map(len, relative.values())), len(keys), by_quantity))
    return found


@cache
def model_ratios(model: str, card: str, band: str) -> dict[str, tuple[float, int]]:
    """Median of measured / simulated latency over the runs of this model on this card, and how many figures it is of.

    ``card`` is that of a table, ``band`` the band of load; keys are the quantities of objectives (``ttft``, ...).
    """
    asked = model, CARDS.get(card, card), band
    truth, runs, found = measured(), published_runs(), dict[str, list[float]]()
    for (run, quantity), simulated in ours().items():
        row = runs[run]
        if (row["model"], CARDS.get(row["card"], row["card"]), row["band"]) == asked:
            found.setdefault(quantity.split()[0].lower(), []).append(truth[run, quantity] / simulated)
    return {quantity: (median(ratios), len(ratios)) for quantity, ratios in found.items()}


def text(found: Sequence[Errors], by: Sequence[str]) -> str:
    """The errors as a Markdown table: median of the absolute error and bias."""
    names = [q for q in QUANTITIES if any(q in each.by_quantity for each in found)]
    lines = ["| " + " | ".join((*by, "simulator", "figures", *names)) + " |", "|---" * (len(by) + 2 + len(names)) + "|"]
    for each in found:
        told = {q: f"{100 * size:.0f}%, {100 * bias:+.0f}%" for q, (size, bias) in each.by_quantity.items()}
        cells = [told.get(q, "") for q in names]
        counts = f"{each.predicted} of {each.stated}"
        lines.append("| " + " | ".join((*each.group, each.simulator, counts, *cells)) + " |")
    return "\n".join(lines)


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
