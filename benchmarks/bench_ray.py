"""How rollouts scale from one Ray actor to several, beside the same worker in process, in turns within one run.

    python benchmarks/bench_ray.py [--actors 1 2 4] [--seconds 3] [--rounds 3] [--out benchmarks/results/ray]

Every actor owns 64 episodes of the hard task, played by the naive agent: the cheapest agent, so that what Ray costs
shows most. Fragments travel whole to this process, as a learner would take them. Needs Ray (`make ray`, the extra
`ray`); without it nothing is measured, and that is said.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from bench_speed import HERE, in_turns, number

from agents.rollout import MIN_FRAGMENT_STEPS, RolloutWorker, Workers

TASK: Final = 3
AGENT: Final = "naive"
ROWS: Final = 64
FRAGMENTS: Final = (MIN_FRAGMENT_STEPS, 12_800)
"""Least steps of a fragment: the fewest that are worth a message, and the default of a rollout."""


def in_process(min_steps: int) -> Callable[[float], float]:
    worker = RolloutWorker(TASK, AGENT, ROWS)

    def load(seconds: float) -> float:
        steps, began = 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            steps += worker.rollout(min_steps).steps
        return steps / (time.perf_counter() - began)

    return load


def actors(n: int, min_steps: int) -> Callable[[float], float]:
    fragments = Workers(n).fragments(TASK, AGENT, sys.maxsize, n_rows=ROWS, min_steps=min_steps)

    def load(seconds: float) -> float:
        # What was played while others had their turn lies ready; the clock starts when all actors play again.
        for _ in range(2 * n):
            next(fragments)
        steps, began = 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            steps += next(fragments)[1].steps
        return steps / (time.perf_counter() - began)

    return load


def measured(counts: Sequence[int], seconds: float, rounds: int) -> dict[str, Any]:
    report: dict[str, Any] = {
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version(), "load": os.getloadavg()[0]},
        "rates": {},
    }
    for min_steps in FRAGMENTS:
        with Workers(sum(counts)):
            loads = {"in process": in_process(min_steps)}
            loads |= {_name(n): actors(n, min_steps) for n in counts}
            report["rates"][str(min_steps)] = in_turns(loads, seconds, rounds)
    return report


def markdown(report: Mapping[str, Any]) -> str:
    machine = report["machine"]
    lines = [
        "<!-- written by benchmarks/bench_ray.py; do not edit -->",
        "",
        f"`python benchmarks/bench_ray.py`: {machine['cpus']} processors, Python {machine['python']}, load "
        f"{machine['load']:.1f} at the time; medians, all contenders in turns. Task {TASK}, {ROWS} episodes per actor.",
        "",
        "| rollouts, fragments of | | steps/s | to one actor | to in process |",
        "|---|---|---|---|---|",
    ]
    for min_steps, rates in report["rates"].items():
        alone, one = rates["in process"], rates[_name(1)]
        for name, found in rates.items():
            steps = f"{int(min_steps):,} steps or more"
            lines.append(f"| {steps} | {name} | {number(found)} | {found / one:.2f} | {found / alone:.2f} |")
    return "\n".join(lines) + "\n"


def _name(n: int) -> str:
    return f"{n} actor" + "s" * (n > 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--actors", type=int, nargs="+", default=[1, 2, 4], help="numbers of actors; 1 must be there")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of one measurement")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each; the median is kept")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "ray", help="without its ending")
    options = parser.parse_args()
    if 1 not in options.actors:
        parser.error("--actors must have 1 in it: all others are compared with it")
    if not importlib.util.find_spec("ray"):
        print("Ray is not installed, nothing is measured: run `make ray`, or install the extra 'ray'")
        return
    report = measured(options.actors, options.seconds, options.rounds)
    options.out.parent.mkdir(exist_ok=True)
    options.out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    text = markdown(report)
    options.out.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
