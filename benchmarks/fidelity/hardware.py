"""Fidelity by card: errors of the dynamics by band of utilisation, on every card with measured runs.

    python -m benchmarks.fidelity.hardware           writes results/hardware_fidelity.json and .md
    python -m benchmarks.fidelity.hardware --json    prints the JSON and writes nothing
    python -m benchmarks.fidelity.hardware --margins writes ops/data/margins.json, the reference's errors for plans
    python -m benchmarks.fidelity.hardware --rules   prints how many measured latencies the bounds of plans cover
    python -m benchmarks.fidelity.hardware --tp      fits a host time of tensor parallelism, tests it on other cards
    python -m benchmarks.fidelity.hardware --widths  prints what widths of the output lengths do to TTFT under load

Two sources: loads that AccelMark served on an A100-80GB and an A100-40GB (see benchmarks/fidelity/hardware_runs.py),
and ``silicon_sample.csv`` of aiconfigurator-core (extra ``hardware``), closed loops on an H100, H200 and B200. All
measured rows that a shipped table can play are compared; the others are counted by reason.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.fidelity.accelmark import TIER_OF_PRECISION, accelmark_comparisons
from benchmarks.fidelity.fluid import ORDER, QUANTITY
from benchmarks.fidelity.hardware_runs import SYSTEM_40GB, SYSTEMS_80GB, hardware_comparisons, width_errors
from benchmarks.fidelity.open_suite import LATENCIES, REFUSED, quantity_of
from benchmarks.fidelity.open_suite import runs as open_runs
from benchmarks.fidelity.silicon import ClosedLoop, closed_loops, played, referenced
from benchmarks.report import store, table
from inferencegym.files import write_text
from ops.margins import BANDS as LOAD_BANDS
from ops.margins import CARDS, MARGINS_PATH, SATURATED
from ops.objectives import QUANTITIES
from simulator.hardware.catalogue import table_path
from simulator.hardware.tables import load_tables

BANDS = ("light", "knee", "saturated", "overload")
BAND_OF_LOAD = {
    "interactive": "light",
    "sustained": "light",
    "online 5/s": "light",
    "online 10/s": "knee",
    "online 25/s": "knee",
    "online 50/s": "saturated",
    "offline": "saturated",
    "online 100/s": "overload",
    "burst": "overload",
}
"""A replica answers about 10 requests/s of this load, and with 256 slots admits 25/s for the length of a run."""
SERVED_LOADS = {
    "light": "1 or 8 clients, 5 requests/s",
    "knee": "10 and 25 requests/s",
    "saturated": "50 requests/s, offline",
    "overload": "100 requests/s, burst",
}
CLOSED_LOOPS = {"light": "up to 8 clients", "knee": "9 to 64 clients", SATURATED: "more than 64 clients"}
"""What the bands are in the two tables."""
RULES = {
    "all by card": QUANTITIES,
    "TTFT by card, others by machine": ("ttft",),
    "all by machine (in force)": (),
}
"""Rules for the 90% bounds of plans, in the order they were tried, with the quantities whose bounds are by card."""
LEAST_FIGURES = 10
"""Fewest figures of a band whose quantiles are used."""
HOST_MS = np.arange(-1.0, 1.01, 0.01)
"""Host times of tensor parallelism that are tried."""
GOALS = {"TPOT": 0.10, "throughput": 0.08, "makespan": 0.06}
TTFT_GOALS = {"TTFT p50": 0.25, "TTFT p99": 0.25}
"""Goals for engines whose host overhead is known."""

Ratios = dict[str, dict[tuple[str, str], dict[str, list[float]]]]


@dataclass(frozen=True, slots=True)
class Point:
    """A measured figure of one run and its simulated value."""

    card: str
    group: str
    band: str
    quantity: str
    measured: float
    simulated: float

    def error(self) -> float:
        """Relative error, signed."""
        return self.simulated / self.measured - 1.0


def accelmark_points() -> list[Point]:
    """Every figure of the served loads on both A100s."""
    found = []
    for c in hardware_comparisons((*SYSTEMS_80GB, SYSTEM_40GB)):
        # the quiet windows of the burst run are a light load
        band = "light" if c.metric.startswith("steady") else BAND_OF_LOAD[c.scenario]
        found.append(Point(c.card, c.group, band, QUANTITY[c.metric], c.measured, c.predicted))
    return found


def silicon_points(loops: Iterable[ClosedLoop]) -> list[Point]:
    """Every figure of the closed loops that a shipped table can play."""
    found = []
    for loop, figures in played(loops):
        for quantity, (measured, simulated) in figures.items():
            found.append(Point(loop.card, loop.group, loop.band, quantity, measured, simulated))
    return found


def errors(points: Sequence[Point], quantity: str) -> dict[str, float] | None:
    """Median and 90th percentile of the absolute error, bias and number of points; None without points."""
    error = np.array([p.error() for p in points if p.quantity == quantity])
    if not len(error):
        return None
    size = np.abs(error)
    return {
        "median": float(np.median(size)),
        "p90": float(np.quantile(size, 0.9)),
        "bias": float(error.mean()),
        "points": len(error),
    }


def grid(points: Sequence[Point], keys: Sequence[tuple[str, ...]]) -> list[dict[str, Any]]:
    """Errors of all quantities by (card, group, band); empty text in a key means any value."""
    rows = []
    for card, group, band in keys:
        mine = [p for p in points if p.card == card and group in ("", p.group) and band in ("", p.band)]
        rows.append({"card": card, "group": group, "band": band, **{q: errors(mine, q) for q in ORDER}})
    return rows


def summary(accelmark: Sequence[Point], silicon: Sequence[Point], left_out: Counter[str]) -> dict[str, Any]:
    """Contents of the report."""
    held_out = [p for p in accelmark if "held out" in p.group]
    cards = list(dict.fromkeys(p.card for p in accelmark))
    silicon_cards = list(dict.fromkeys(p.card for p in silicon))
    groups = list(dict.fromkeys((p.card, p.group) for p in accelmark))
    silicon_groups = sorted(dict.fromkeys((p.card, p.group) for p in silicon))
    return {
        "accelmark_by_band": grid(held_out, [(card, "", band) for card in cards for band in BANDS]),
        "accelmark_by_group": grid(accelmark, [(card, group, "") for card, group in groups]),
        "accelmark_by_card": grid(held_out, [(card, "", "") for card in cards]),
        "silicon_by_band": grid(silicon, [(card, "", band) for card in silicon_cards for band in BANDS]),
        "silicon_by_group": grid(silicon, [(card, group, "") for card, group in silicon_groups]),
        "silicon_by_card": grid(silicon, [(card, "", "") for card in silicon_cards]),
        "silicon_vllm_by_card": grid(
            [p for p in silicon if ", vllm" in p.group], [(card, "", "") for card in silicon_cards]
        ),
        "silicon_left_out": dict(left_out.most_common()),
        "points": [asdict(p) for p in accelmark],
    }


def markdown(found: dict[str, Any]) -> str:
    """The report as Markdown."""
    parts = [
        "<!-- written by benchmarks/fidelity/hardware.py; do not edit -->",
        "Each cell: median / 90th percentile of the absolute relative error, the bias (mean error), and the number of "
        "points. Steps of 0.25 s.",
        "**Served loads (AccelMark, Llama-3-8B), held-out rows by load**",
        _table(_named(found["accelmark_by_band"], SERVED_LOADS), ("card", "load")),
        _goals(found["accelmark_by_card"], GOALS | TTFT_GOALS),
        "**Closed loops on other cards (`silicon_sample.csv`), by load; only the bits of the KV cache are fitted**",
        _table(_named(found["silicon_by_band"], CLOSED_LOOPS), ("card", "load")),
        "Medians of the rows of vLLM, whose kernels the shipped tables have:",
        _goals(found["silicon_vllm_by_card"], GOALS),
        "Medians of all rows, TensorRT-LLM and SGLang included:",
        _goals(found["silicon_by_card"], GOALS),
        "<!-- details -->",
        "**The served loads by engine version and precision, calibration rows included**",
        _table(found["accelmark_by_group"], ("card", "group")),
        "**The closed loops by model and engine**",
        _table(found["silicon_by_group"], ("card", "group")),
        "Rows of that file that are not compared: "
        + "; ".join(f"{n:,} {why}" for why, n in found["silicon_left_out"].items())
        + ".",
    ]
    return "\n\n".join(parts) + "\n"


def _named(rows: Sequence[dict[str, Any]], loads: Mapping[str, str]) -> list[dict[str, Any]]:
    """Rows with the load that their band is."""
    return [{**row, "load": loads[row["band"]]} for row in rows if row["band"] in loads]


def _table(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> str:
    quantities = [q for q in ORDER if any(row[q] for row in rows)]
    shown = [row for row in rows if any(row[q] for q in quantities)]
    cells = [[*(row[n] for n in names), *(_cell(row[q]) for q in quantities)] for row in shown]
    return "\n".join(table((*names, *quantities), cells))


def _cell(e: dict[str, float] | None) -> str:
    if e is None:
        return ""
    return f"{100 * e['median']:.1f}% / {100 * e['p90']:.1f}%, {e['bias']:+.0%} ({e['points']:.0f})"


def _goals(rows: Sequence[dict[str, Any]], goals: dict[str, float]) -> str:
    """Goals that the medians of each card reach."""
    lines = []
    for row in rows:
        said = []
        for quantity, goal in goals.items():
            if row[quantity] is not None:
                median = row[quantity]["median"]
                verdict = "reached" if median <= goal else "MISSED"
                said.append(f"{quantity} {100 * median:.1f}% (goal {100 * goal:.0f}%: {verdict})")
        lines.append(f"- *{row['card']}*: " + "; ".join(said) + ".")
    return "\n".join(lines)


def tensor_parallel_time() -> str:
    """TPOT of vLLM at up to 8 clients, where host time shows best, and what a host time of tensor parallelism changes.

    It is this many milliseconds for each card beyond the first, or for each doubling, fitted to the H100's loops (least
    squares of the logarithm of simulated / measured); errors are those of all cards' loops with several cards.
    """
    loops = [loop for loop in closed_loops()[0] if loop.engine == "vllm"]
    tpot = {loop: figures["TPOT"] for loop, figures in played(loops) if loop.band == "light"}
    width = {loop: load_tables(table_path(loop.table)).cards_per_replica for loop in tpot}
    parallel = [loop for loop in tpot if width[loop] > 1]
    before = [
        (card, n, len(mine), f"{np.median([m - s for m, s in mine]):+.2f}", *_error_cells(mine))
        for (card, n) in sorted({(loop.card, width[loop]) for loop in tpot})
        for mine in [[tpot[loop] for loop in tpot if (loop.card, width[loop]) == (card, n)]]
    ]
    after = []
    growths: dict[str, Callable[[float], float]] = {"each further card": lambda n: n - 1.0, "each doubling": np.log2}
    for name, growth in growths.items():
        fitted = [(*tpot[loop], growth(width[loop])) for loop in parallel if loop.card == "h100"]
        best = min(HOST_MS, key=lambda ms: sum(np.log((s + ms * x) / m) ** 2 for m, s, x in fitted))
        for card in sorted({loop.card for loop in parallel}):
            mine = [
                (m, s + best * growth(width[loop])) for loop in parallel if loop.card == card for m, s in [tpot[loop]]
            ]
            after.append((name, f"{best:+.2f}", card, len(mine), *_error_cells(mine)))
    lines = table(("card", "cards per replica", "loops", "measured - simulated, ms", "median error", "bias"), before)
    lines += ["", *table(("host time for", "ms", "card", "loops", "median error", "bias"), after)]
    return "\n".join(lines)


def _error_cells(pairs: Sequence[tuple[float, float]]) -> tuple[str, str]:
    """Median of the absolute error, and bias, of (measured, simulated) pairs."""
    errors = np.array([simulated / measured - 1.0 for measured, simulated in pairs])
    return f"{np.median(np.abs(errors)):.1%}", f"{errors.mean():+.1%}"


def print_widths() -> None:
    """Print log errors of TTFT under load by width of the output lengths, for the systems to which it was fitted."""
    for system in (SYSTEMS_80GB[0], SYSTEM_40GB):
        rows = []
        for width in np.arange(1.0, 2.01, 0.1):
            found = width_errors(system, float(width))
            rows.append({"width": round(width, 1), **{" ".join(key): round(error, 3) for key, error in found.items()}})
        print(f"{system.card}, vLLM {system.version}\n{pd.DataFrame(rows).to_string(index=False)}\n")


def measured_ratios() -> Ratios:
    """Measured latency / latency in the reference: by quantity, machine (source and card) and band of load.

    The runs are AccelMark's (TTFT and TPOT), the *fit* runs of the open suite and, for TPOT only, the closed loops of
    ``silicon_sample.csv``: TTFT among many clients depends on the spread of the lengths, which that file omits. Where a
    source gives no end-to-end latency, its TPOT counts for it, of which long answers mostly consist.
    """
    ratios: Ratios = {quantity: {} for quantity in QUANTITIES}

    def add(quantity: str, source: str, card: str, band: str, ratio: float) -> None:
        ratios[quantity].setdefault((source, card), {}).setdefault(band, []).append(ratio)

    for version, precision in (("0.20.1", "BF16"), *(("0.7.3", tier) for tier in TIER_OF_PRECISION)):
        for c in accelmark_comparisons(version, precision):
            quantity = c.metric.removeprefix("burst_")[:4]
            if quantity in ratios:
                band = BAND_OF_LOAD[c.scenario].replace("overload", SATURATED)
                add(quantity, "AccelMark", "a100", band, c.measured / c.predicted)
    for run in open_runs():
        if run.split == "fit":
            for name in LATENCIES:
                if name in run.measured and run.band != REFUSED:
                    ratio = run.measured[name] / run.simulated[name]
                    add(quantity_of(name), run.source, CARDS[run.card], run.band, ratio)
    for loop, tpot_ms in referenced(loop for loop in closed_loops()[0] if loop.engine == "vllm"):
        add("tpot", "aiconfigurator", loop.card, loop.band, loop.tpot_ms / tpot_ms)
    ratios["e2e"] = ratios["tpot"] | ratios["e2e"]
    return ratios


def of_cards(machines: Mapping[tuple[str, str], Mapping[str, Sequence[float]]]) -> dict[str, dict[str, list[float]]]:
    """Ratios by card and band, all machines with a card together."""
    cards: dict[str, dict[str, list[float]]] = {}
    for (_, card), bands in machines.items():
        for band, values in bands.items():
            cards.setdefault(card, {}).setdefault(band, []).extend(values)
    return cards


def write_margins() -> None:
    """Write the ratios that the verdicts of plans allow for: medians by card, 90% bounds by machine, and band."""
    found = {}
    for quantity, machines in measured_ratios().items():
        named = {f"{source}'s {card}": bands for (source, card), bands in machines.items()}
        found[quantity] = {
            "medians": {card: _by_band(bands, "p50", np.median) for card, bands in of_cards(machines).items()},
            "bounds": {name: _by_band(bands, "p90", bound_90) for name, bands in named.items()},
        }
    text = json.dumps({"ratio": "measured / simulated", "quantities": found}, indent=1)
    write_text(MARGINS_PATH, text + "\n")
    print(text)


def rules() -> str:
    """Measured latencies within the 90% bounds, by split of the open suite, under each of :data:`RULES`."""
    ratios, played = measured_ratios(), [run for run in open_runs() if run.band != REFUSED]
    splits = list(dict.fromkeys(run.split for run in played))
    rows = []
    for rule, by_card in RULES.items():
        hits: dict[str, list[bool]] = {split: [] for split in splits}
        for quantity, machines in ratios.items():
            cards = {card: _by_band(bands, "p90", bound_90) for card, bands in of_cards(machines).items()}
            largest = [_by_band(bands, "p90", bound_90) for bands in machines.values()]
            for run in played:
                own = cards.get(CARDS[run.card])
                candidates = largest if quantity not in by_card else [own] if own else list(cards.values())
                bound = max(1.0, *(bands[run.band]["p90"] for bands in candidates))
                hits[run.split] += [
                    run.measured[name] <= bound * run.simulated[name]
                    for name in LATENCIES
                    if quantity_of(name) == quantity and name in run.measured
                ]
        rows.append((rule, *(f"{sum(hits[s])} of {len(hits[s])}" for s in splits)))
    return "\n".join(table(("bounds", *splits), rows))


def _by_band(bands: Mapping[str, list[float]], name: str, statistic: Callable[[list[float]], Any]) -> dict[str, Any]:
    """A statistic of each band's figures, or of those of all bands where it has too few."""
    found = {}
    for band in (*LOAD_BANDS, SATURATED):
        values = bands.get(band, [])
        if len(values) < LEAST_FIGURES:
            values = [each for more in bands.values() for each in more]
        found[band] = {name: round(float(statistic(values)), 3), "points": len(values)}
    return found


def bound_90(values: Sequence[float]) -> float:
    """Smallest of the values that a further one like them stays below with a probability of at least 90%.

    It is the k-th smallest of n with k = ceil(0.9 (n + 1)), as in split conformal prediction; an interpolated quantile
    is too small for few values. With fewer than 9 no value is large enough, and it is the largest.
    """
    ordered, k = sorted(values), -(-9 * (len(values) + 1) // 10)
    return float(ordered[min(k, len(ordered)) - 1])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Errors of the dynamics by card and band of utilisation.")
    parser.add_argument(
        "--widths", action="store_true", help="print the errors by width of the output lengths, write nothing"
    )
    parser.add_argument("--margins", action="store_true", help="write the reference's errors for plans, nothing else")
    parser.add_argument("--rules", action="store_true", help="print what rules for the bounds cover, write nothing")
    parser.add_argument("--tp", action="store_true", help="fit a host time of tensor parallelism, write nothing")
    options = parser.parse_args(arguments)
    if options.tp:
        print(tensor_parallel_time())
        return
    if options.rules:
        print(rules())
        return
    if options.margins:
        write_margins()
        return
    if options.widths:
        print_widths()
        return
    loops, left_out = closed_loops()
    found = summary(accelmark_points(), silicon_points(loops), left_out)
    print(text := markdown(found))
    store("hardware_fidelity", found, text)


if __name__ == "__main__":
    main()
