"""Speed of the discrete-event engine: ``python -m benchmarks.speed.events`` prints seconds, best of ``--repeats`` runs.

It plays a log of 10,000 requests on 8 replicas, and an episode of 200 s of task 3 in the reference with fixed knobs.
``--plan-rows 1000000`` runs ``inferencegym plan`` instead, on a log of so many rows in three hours, for one card and
for all tables of the model with two objectives, and prints wall time, processor time and peak memory.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from env.batch import ServingBatch
from inferencegym.tasks import get_task
from simulator.events.episode import Knobs, ReferenceEpisode
from simulator.events.fleet import Fleet
from simulator.events.requests import Requests
from simulator.events.simulation import serve
from simulator.hardware.measured_model import operator_model
from simulator.workload import load_source

REQUESTS, REPLICAS, SECONDS = 10_000, 8, 200


def log_of_requests() -> int:
    """Serve a log; returns the number of iterations."""
    rng = np.random.default_rng(1)
    requests = Requests(
        np.cumsum(rng.exponential(0.02, REQUESTS)),
        np.rint(rng.lognormal(6.0, 1.0, REQUESTS)).astype(np.int64) + 1,
        np.rint(rng.lognormal(5.0, 0.8, REQUESTS)).astype(np.int64) + 1,
        rng.integers(0, 3, REQUESTS),
    )
    return serve(Fleet(operator_model("a100-40gb", "INT8", "a100_40"), 64, 60_000, REPLICAS), requests).iterations


def episode() -> Callable[[], float]:
    """An episode whose requests have already been drawn; playing it returns the tokens written."""
    task = get_task(3)
    batch = ServingBatch(task, 1, task.config())
    params = batch.fleet.params
    requests = load_source(task, params.tables).requests(7, SECONDS)
    knobs = Knobs(0.9, 0, 128, False, 1, task.fleet.n_replicas)

    def play() -> float:
        playing = ReferenceEpisode(params, requests, 7)
        return sum(playing.play_second(knobs, False)["tokens_per_sec"] for _ in range(SECONDS))

    return play


def write_log(path: Path, rows: int) -> None:
    """Write a log of three hours with Poisson arrivals and log-normal lengths."""
    rng = np.random.default_rng(0)
    columns = {
        "arrival_s": np.cumsum(rng.exponential(10_800.0 / rows, rows)),
        "prompt_tokens": np.rint(rng.lognormal(6.0, 1.0, rows)) + 1,
        "output_tokens": np.rint(rng.lognormal(5.0, 0.8, rows)) + 1,
    }
    np.savetxt(path, np.stack(list(columns.values()), axis=1), "%.3f,%d,%d", header=",".join(columns), comments="")


def plan(log: Path, hardware: str, ttft_p99: int) -> tuple[float, float, float]:
    """Wall time (s), processor time (s) and peak memory (MB) of a plan with this objective (ms), in its own process."""
    objectives = ("--objective", f"ttft_p99={ttft_p99}", "--objective", "tpot_p50=50")
    command = (
        sys.executable,
        "-m",
        "inferencegym",
        "plan",
        "--trace",
        str(log),
        "--model",
        "llama-3.1-8b",
        *objectives,
    )
    start = time.perf_counter()
    process = subprocess.Popen([*command, "--hardware", hardware], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{command} failed")
    return time.perf_counter() - start, used.ru_utime + used.ru_stime, used.ru_maxrss / 1e3


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--plan-rows", type=int, metavar="N", help="time `plan` on a log of so many rows instead")
    args = parser.parse_args()
    if args.plan_rows:
        with TemporaryDirectory() as folder:
            log = Path(folder, "log.csv")
            write_log(log, args.plan_rows)
            for hardware, ttft_p99 in (("a100-80gb", 1000), ("all", 1000), ("all", 500)):
                wall_s, processor_s, peak_mb = plan(log, hardware, ttft_p99)
                measured = f"{wall_s:.1f} s, {processor_s:.1f} s of processor time, {peak_mb:,.0f} MB"
                print(f"plan, {hardware}, ttft_p99={ttft_p99}: {measured}")
        return
    for name, work in ((f"{REQUESTS:,} requests, {REPLICAS} replicas", log_of_requests), ("task 3, 200 s", episode())):
        seconds = []
        for _ in range(args.repeats):
            start = time.perf_counter()
            amount = work()
            seconds.append(time.perf_counter() - start)
        print(f"{name}: {min(seconds):.4f} s ({amount:,.0f})")


if __name__ == "__main__":
    main()
