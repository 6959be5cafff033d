"""Speed of the discrete-event engine: ``python -m benchmarks.speed.events`` prints seconds, best of ``--repeats`` runs.

It plays a log of 10,000 requests on 8 replicas, and an episode of 200 s of task 3 in the reference with fixed knobs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

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


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    for name, work in ((f"{REQUESTS:,} requests, {REPLICAS} replicas", log_of_requests), ("task 3, 200 s", episode())):
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            amount = work()
            seconds.append(time.perf_counter() - start)
        print(f"{name}: {min(seconds):.4f} s ({amount:,.0f})")


if __name__ == "__main__":
    main()
