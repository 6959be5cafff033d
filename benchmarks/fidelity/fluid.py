"""Fidelity report: errors of the simulator against real hardware, layer by layer, failures included.

    python -m benchmarks.fidelity.fluid              writes results/fidelity.json, results/fidelity.md and two figures
    python -m benchmarks.fidelity.fluid --json       prints the JSON and writes nothing

Three comparisons: the operator model with measured static batches, the serving dynamics with the discrete-event
reference on the same requests, and the serving dynamics with served loads on a real A100-80GB. Errors are relative,
(simulated - reference) / reference: the median and the 90th percentile of their absolute values, and their mean (bias).
The dynamics are compared in the environment's steps of one second and in the finer ones of ``simulator.whatif``.
It takes about a minute. The figures need matplotlib (extra ``report``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.fidelity.accelmark import accelmark_comparisons
from benchmarks.fidelity.compare import METRICS, Case, Seen, all_cases, dynamics, reference
from benchmarks.fidelity.hardware_runs import HardwareComparison, hardware_comparisons
from benchmarks.fidelity.static_batches import argonne_errors
from benchmarks.report import FIGURES, store, table
from simulator.coverage import LEVELS, coverage
from simulator.hardware.tables import load_tables
from simulator.whatif import STEP_S

# The sources' names of metrics -> quantities of the report.
QUANTITY = {
    "ttft_ms_p50": "TTFT p50",
    "ttft_ms_p90": "TTFT p90",
    "ttft_ms_p99": "TTFT p99",
    "steady_ttft_ms_p50": "TTFT p50",
    "steady_ttft_ms_p99": "TTFT p99",
    "burst_ttft_ms_p50": "TTFT p50",
    "burst_ttft_ms_p99": "TTFT p99",
    "tpot_ms_p50": "TPOT",
    "out_tok_s": "throughput",
    "elapsed_s": "makespan",
    "ttft_p50_ms": "TTFT p50",
    "ttft_p99_ms": "TTFT p99",
    "tpot_ms": "TPOT",
    "throughput_tok_s": "throughput",
    "makespan_s": "makespan",
}
ORDER = ("TTFT p50", "TTFT p90", "TTFT p99", "TPOT", "throughput", "makespan")
TARGETS = {
    "hardware": {"TTFT p50": 0.15, "TTFT p99": 0.15, "TPOT": 0.07, "throughput": 0.03, "makespan": 0.05},
    "reference": {"TTFT p50": 0.10, "TTFT p99": 0.10, "throughput": 0.05},
}
# Errors that other simulators state about themselves, on their own hardware and loads; not measured here.
CLAIMS = (
    (
        "BLIS",
        "",
        "",
        "end to end 6.7% (median)",
        "[pull request](https://github.com/inference-sim/inference-sim/pull/1525)",
    ),
    (
        "Vidur",
        "",
        "",
        "latency under 9% across the range",
        "[abstract](https://www.microsoft.com/en-us/research/publication/"
        "vidur-a-large-scale-simulation-framework-for-llm-inference/)",
    ),
    (
        "AISimulate",
        "76.1% (mean)",
        "30.1% (mean)",
        "",
        "[pull request](https://github.com/ai-dynamo/aisimulate/pull/216), second-hand",
    ),
)
HELD_OUT = "0.20.1 BF16, held out"
ALL_LOADS = "all loads"
ENVIRONMENT = "Environment (1 s steps)"
STEPS = {ENVIRONMENT: 1.0, f"Fluid model ({STEP_S:g} s steps)": STEP_S}


@dataclass(frozen=True, slots=True)
class Point:
    """One quantity of one load: reference or measured value, and simulated value."""

    group: str
    name: str
    quantity: str
    reference: float
    simulated: float

    def error(self) -> float:
        """Relative error, signed."""
        return self.simulated / self.reference - 1.0


@dataclass(frozen=True, slots=True)
class Errors:
    """Relative errors of some points."""

    group: str
    quantity: str
    points: int
    median: float
    p90: float
    bias: float


def main() -> None:
    served = [(case, reference(case)) for case in all_cases()]
    layers = {
        name: (reference_points(served, step_s), hardware_points(hardware_comparisons(step_s=step_s)))
        for name, step_s in STEPS.items()
    }
    result = summary(layers)
    print(text := markdown(result))
    store("fidelity", result, text)
    draw_scatter(*layers[ENVIRONMENT], FIGURES / "fidelity.png")
    draw_coverage(FIGURES / "coverage.png")


def reference_points(served: Iterable[tuple[Case, Seen]], step_s: float) -> list[Point]:
    """Every case served by the dynamics, compared with the reference."""
    return [point for case, seen in served for point in _case_points(case, seen, dynamics(case, step_s))]


def _case_points(case: Case, expected: Seen, found: Seen) -> list[Point]:
    points = [
        Point(case.group, case.name, QUANTITY[metric], getattr(expected, metric), getattr(found, metric))
        for metric in METRICS
    ]
    for name in (name for name in expected.classes if name in found.classes):  # always in the same order
        for quantity, a, b in zip(("TTFT p50", "TTFT p99"), expected.classes[name], found.classes[name], strict=True):
            points.append(Point(f"{case.group}, by class", f"{case.name}, {name}", quantity, a, b))
    return points


def hardware_points(comparisons: Iterable[HardwareComparison]) -> list[Point]:
    """Every measured quantity of the hardware runs."""
    return [
        Point(c.group, f"{c.version} {c.suite} {c.precision} {c.scenario}", QUANTITY[c.metric], c.measured, c.predicted)
        for c in comparisons
    ]


def reference_itself() -> list[Point]:
    """The discrete-event reference against the same hardware: the best that the dynamics can be expected to reach."""
    return [
        Point(f"{version} {precision}", c.scenario, QUANTITY[c.metric], c.measured, c.predicted)
        for version, precision in (("0.20.1", "BF16"), ("0.7.3", "BF16"), ("0.7.3", "W8A8"), ("0.7.3", "W4A16"))
        for c in accelmark_comparisons(version, precision)
        if c.metric in QUANTITY
    ]


def errors(points: Sequence[Point]) -> list[Errors]:
    """Errors by group and quantity, in a fixed order."""
    found = []
    for group in dict.fromkeys(p.group for p in points):
        for quantity in ORDER:
            error = np.array([p.error() for p in points if (p.group, p.quantity) == (group, quantity)])
            if len(error):
                size = np.abs(error)
                bias = float(error.mean())
                found.append(
                    Errors(group, quantity, len(error), float(np.median(size)), float(np.quantile(size, 0.9)), bias)
                )
    return found


def summary(layers: dict[str, tuple[list[Point], list[Point]]]) -> dict[str, Any]:
    """Contents of the report, for JSON."""
    return {
        "operators": [asdict(e) for e in argonne_errors()],
        "dynamics": {name: _layer(*points) for name, points in layers.items()},
        "reference_itself": [asdict(e) for e in errors(reference_itself())],
        "targets": TARGETS,
        "coverage": coverage(load_tables()),
    }


def _layer(cases: Sequence[Point], runs: Sequence[Point]) -> dict[str, Any]:
    pooled = [replace(p, group=ALL_LOADS) for p in cases if not p.group.endswith("by class")]
    return {
        "hardware": [asdict(e) for e in errors(runs)],
        "reference": [asdict(e) for e in errors([*pooled, *cases])],
        "hardware_points": [{**asdict(p), "error": p.error()} for p in runs],
        "reference_points": [{**asdict(p), "error": p.error()} for p in cases],
    }


# ---------------------------------------------------------------- report


def markdown(result: dict[str, Any]) -> str:
    """The report as Markdown, as the documentation includes it."""
    parts = [
        "<!-- written by benchmarks/fidelity/fluid.py; do not edit -->",
        "Each cell: median / 90th percentile of the absolute relative error, the bias (mean error), and the number of "
        "points.",
    ]
    layers: dict[str, list[str]] = {}
    for name, layer in result["dynamics"].items():
        layers[name] = [
            f"**{name}: against a real A100-80GB** (AccelMark: vLLM 0.20.1 and 0.7.3, Llama-3-8B, ShareGPT prompts)",
            _grid(layer["hardware"]),
            _verdict(layer["hardware"], HELD_OUT, TARGETS["hardware"]),
            f"**{name}: against the discrete-event reference** (the same requests and kernel timings)",
            _grid(layer["reference"]),
            _verdict(layer["reference"], ALL_LOADS, TARGETS["reference"]),
        ]
    parts += [
        *layers.pop(ENVIRONMENT),
        "**Errors that other simulators state** (on their own hardware, models and loads, with their own measure: "
        "the rows cannot be ranked)",
        _other_simulators(result["dynamics"]),
        "<!-- details -->",
        "**The discrete-event reference against that hardware** (rows that its profiles were fitted to included)",
        _grid(result["reference_itself"]),
        "**Kernel model against measured static batches** (LLM-Inference-Bench, A100-40GB; latency of the batch)",
        _operators(result["operators"]),
        *chain.from_iterable(layers.values()),
        "**Coverage of the table's cells**",
        _table(
            ("precision", *LEVELS),
            [(tier, *(_percent(shares[name]) for name in LEVELS)) for tier, shares in result["coverage"].items()],
        ),
        f"**The twenty largest errors against hardware** ({ENVIRONMENT})",
        _worst(result["dynamics"][ENVIRONMENT]["hardware_points"]),
        f"**The twenty largest errors against the reference** ({ENVIRONMENT})",
        _worst(result["dynamics"][ENVIRONMENT]["reference_points"]),
    ]
    return "\n\n".join(parts) + "\n"


def _other_simulators(layers: dict[str, Any]) -> str:
    rows: list[Sequence[str]] = []
    for name, layer in layers.items():
        median = {
            e["quantity"]: f"{_percent(e['median'])} ({e['points']})"
            for e in layer["hardware"]
            if e["group"] == HELD_OUT
        }
        rows.append(
            (
                f"InferenceGym, {HELD_OUT}; {name}; medians (points)",
                f"p50 {median['TTFT p50']}, p99 {median['TTFT p99']}",
                median["TPOT"],
                f"makespan {median['makespan']}, throughput {median['throughput']}",
                "this report",
            )
        )
    return _table(("simulator", "TTFT", "TPOT", "other", "source"), [*rows, *CLAIMS])


def _grid(rows: Sequence[dict[str, Any]]) -> str:
    """Table with a row per group and a column per quantity."""
    groups = list(dict.fromkeys(e["group"] for e in rows))
    quantities = [q for q in ORDER if any(e["quantity"] == q for e in rows)]
    cells = {(e["group"], e["quantity"]): e for e in rows}

    def cell(group: str, quantity: str) -> str:
        e = cells.get((group, quantity))
        return "" if e is None else f"{_percent(e['median'])} / {_percent(e['p90'])}, {e['bias']:+.0%} ({e['points']})"

    return _table(("(points)", *quantities), [(g, *(cell(g, q) for q in quantities)) for g in groups])


def _verdict(rows: Sequence[dict[str, Any]], group: str, targets: dict[str, float]) -> str:
    said = []
    for e in rows:
        if e["group"] == group and e["quantity"] in targets:
            goal = targets[e["quantity"]]
            reached = "reached" if e["median"] <= goal else "MISSED"
            said.append(f"{e['quantity']} {_percent(e['median'])} (goal {_percent(goal)}: {reached})")
    return f"Medians of *{group}*: " + "; ".join(said) + "."


def _operators(rows: Sequence[dict[str, Any]]) -> str:
    body = [
        (e["group"], e["rows"], *(_percent(e[k]) for k in ("median", "p90", "worst")), f"{e['bias']:+.1%}")
        for e in rows
    ]
    return _table(("rows", "number", "median", "p90", "worst", "bias"), body)


def _worst(points: Sequence[dict[str, Any]]) -> str:
    largest = sorted(points, key=lambda p: -abs(math.log(max(p["simulated"], 1e-9) / p["reference"])))[:20]
    body = [
        (p["name"], p["quantity"], f"{p['reference']:.4g}", f"{p['simulated']:.4g}", f"{p['error']:+.0%}")
        for p in largest
    ]
    return _table(("load", "quantity", "reference", "simulated", "error"), body)


def _table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    return "\n".join(table(heads, rows))


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"


# ---------------------------------------------------------------- figures


def draw_scatter(cases: Sequence[Point], runs: Sequence[Point], path: Path) -> None:
    """Scatter plot of simulated against reference values of every load, hardware in front."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(2, 3, figsize=(12.0, 7.6), constrained_layout=True)
    groups = list(dict.fromkeys(p.group for p in runs))
    for axes, quantity in zip(panels.flat, ORDER, strict=True):
        _scatter(axes, "discrete-event reference", [p for p in cases if p.quantity == quantity], "0.75", 9.0)
        for i, group in enumerate(groups):
            chosen = [p for p in runs if (p.group, p.quantity) == (group, quantity)]
            _scatter(axes, group, chosen, f"C{i}", 26.0)
        shown = [v for p in (*cases, *runs) if p.quantity == quantity for v in (p.reference, p.simulated)]
        ends = np.array([min(shown) * 0.8, max(shown) * 1.25])
        axes.plot(ends, ends, color="black", linewidth=0.8)
        axes.fill_between(ends, ends / 1.15, ends * 1.15, color="black", alpha=0.08, linewidth=0)
        axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, title=quantity)
    panels[1, 0].set(xlabel="measured, or served iteration by iteration", ylabel="simulated")
    panels[0, 0].legend(fontsize=7, loc="upper left")
    figure.suptitle("Serving dynamics: every load, with a band of 15% (ms, tokens/s, s)")
    figure.savefig(path, dpi=100)


def _scatter(axes: Any, label: str, points: Sequence[Point], colour: str, size: float) -> None:
    x, y = [p.reference for p in points], [p.simulated for p in points]
    axes.scatter(x, y, s=size, color=colour, label=label, alpha=0.8, linewidths=0)


def draw_coverage(path: Path) -> None:
    """Heat maps of the support of the table's cells by batch size and prompt length, per precision and draft length."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.colors import ListedColormap

    tables = load_tables()
    cells = tables.columns["support"][:, :, -1]
    colours = ListedColormap(["#1a7f37", "#8fd19e", "#f2cc60", "#d1242f"])
    batches, prompts = (tables.axes[name].astype(int) for name in ("batch_size", "prompt_len_bucket"))
    figure, panels = pyplot.subplots(2, 3, figsize=(12.0, 6.4), constrained_layout=True, sharex=True, sharey=True)
    names: Callable[[int], str] = tables.tiers.__getitem__
    for row, spec in enumerate((0, 3)):
        for tier in range(3):
            axes = panels[row, tier]
            image = axes.imshow(cells[tier, spec], cmap=colours, vmin=-0.5, vmax=3.5, origin="lower", aspect="auto")
            axes.set_xticks(range(len(prompts)), prompts, fontsize=7)
            axes.set_yticks(range(len(batches)), batches, fontsize=7)
            axes.set_title(f"{names(tier)}, {int(tables.axes['spec_length'][spec])} draft tokens", fontsize=9)
    panels[1, 1].set_xlabel("prompt, context (tokens)")
    panels[0, 0].set_ylabel("running requests")
    bar = figure.colorbar(image, ax=panels, ticks=range(4), shrink=0.6)
    bar.ax.set_yticklabels(LEVELS)
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main()
