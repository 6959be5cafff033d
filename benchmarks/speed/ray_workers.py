"""Benchmark: rollouts on one Ray actor, on several, and in process, measured in turns in one run.

    python -m benchmarks.speed.ray_workers [--actors 1 2 4] [--seconds 3] [--rounds 3]

It reports steps per second and the processor time of a step in all processes together (this one, the actors, Ray's
own), which shows Ray's cost even if other work disturbs the clock. Every actor owns 64 episodes of task 3,
played by the naive agent: the cheapest agent, so that Ray's share of the cost is largest. Fragments are sent whole to
this process, as to a learner. Needs Ray (`make dev`, the extra `ray`); without it the script prints a message and
measures nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from agents.integrations.ray_workers import MIN_FRAGMENT_STEPS, RolloutWorker, Workers
from benchmarks.report import machine, store, table
from benchmarks.speed.interfaces import number

TASK: Final = 3
AGENT: Final = "naive"
ROWS: Final = 64
FRAGMENTS: Final = (MIN_FRAGMENT_STEPS, 12_800)
"""Smallest number of steps of a fragment: the fewest that are worth a message, and the default of rollouts."""


Load = Callable[[float], tuple[float, float]]
"""Function that plays for a number of seconds and returns steps per second and processor microseconds per step."""


def in_process(min_steps: int) -> Load:
    worker = RolloutWorker(TASK, AGENT, ROWS)
    return lambda seconds: timed(lambda: worker.rollout(min_steps).steps, seconds)


def actors(n: int, min_steps: int) -> Load:
    fragments = Workers(n).fragments(TASK, AGENT, sys.maxsize, n_rows=ROWS, min_steps=min_steps)

    def load(seconds: float) -> tuple[float, float]:
        # Skip fragments that were played during other loads' turns; the clock starts when all actors play again.
        for _ in range(2 * n):
            next(fragments)
        return timed(lambda: next(fragments)[1].steps, seconds)

    return load


def timed(play: Callable[[], int], seconds: float) -> tuple[float, float]:
    steps, cpu_s, began = 0, processor_s(), time.perf_counter()
    while time.perf_counter() - began < seconds:
        steps += play()
    return steps / (time.perf_counter() - began), (processor_s() - cpu_s) / steps * 1e6


def processor_s() -> float:
    """Processor time of this process and of its running children."""
    parents, used = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                fields = (entry / "stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
                parents[int(entry.name)], used[int(entry.name)] = int(fields[1]), int(fields[11]) + int(fields[12])
    ours = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= more
    return sum(used[pid] for pid in ours) / os.sysconf("SC_CLK_TCK")


def measured(counts: Sequence[int], seconds: float, rounds: int) -> dict[str, Any]:
    report: dict[str, Any] = {
        "machine": machine(),
        "found": {},
    }
    for min_steps in FRAGMENTS:
        with Workers(sum(counts)):
            loads: dict[str, Load] = {"in process": in_process(min_steps)}
            loads |= {_name(n): actors(n, min_steps) for n in counts}
            report["found"][str(min_steps)] = in_turns(loads, seconds, rounds)
    return report


def in_turns(loads: Mapping[str, Load], seconds: float, rounds: int) -> dict[str, dict[str, float]]:
    """Medians over the rounds; the loads take turns."""
    for load in loads.values():
        load(0.1)
    played = [{name: load(seconds) for name, load in loads.items()} for _ in range(rounds)]
    rates, costs = ({name: statistics.median(turn[name][i] for turn in played) for name in loads} for i in (0, 1))
    return {name: {"rate": rates[name], "cpu_us": costs[name]} for name in loads}


def markdown(report: Mapping[str, Any]) -> str:
    of = report["machine"]
    lines = [
        "<!-- written by benchmarks/speed/ray_workers.py; do not edit -->",
        "",
        f"`python -m benchmarks.speed.ray_workers`: {of['cpus']} processors, Python {of['python']}, load "
        f"{of['load']:.1f} at the time; medians, all contenders in turns. Task {TASK}, {ROWS} episodes per actor.",
        "",
    ]
    rows = []
    for min_steps, found in report["found"].items():
        alone, one = found["in process"]["rate"], found[_name(1)]["rate"]
        for name, each in found.items():
            rate = each["rate"]
            figures = (number(rate), f"{rate / one:.2f}", f"{rate / alone:.2f}", f"{each['cpu_us']:.2f}")
            rows.append((f"{int(min_steps):,} steps", name, *figures))
    heads = ("fragments of", "runs on", "steps/s", "times one actor", "times in process", "CPU, us/step")
    return "\n".join([*lines, *table(heads, rows)]) + "\n"


def _name(n: int) -> str:
    return f"{n} actor" + "s" * (n > 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--actors", type=int, nargs="+", default=[1, 2, 4], help="numbers of actors; 1 must be there")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of one measurement")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each; the median is kept")
    options = parser.parse_args()
    if 1 not in options.actors:
        parser.error("--actors must include 1, with which all others are compared")
    if not importlib.util.find_spec("ray"):
        print("Ray is not installed, nothing is measured: run `make dev`, or install the extra 'ray'")
        return
    report = measured(options.actors, options.seconds, options.rounds)
    print(text := markdown(report))
    store("ray", report, text)


if __name__ == "__main__":
    main()
