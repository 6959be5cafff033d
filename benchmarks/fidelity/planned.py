"""Measure, plan, serve, compare: what `inferencegym plan` promises of a measured engine, and what that engine does.

    python -m benchmarks.fidelity.planned           writes results/planned_engine.json and .md

The engine is vLLM for CPU with a small random model on this machine (scripts/install_engine.sh). It is measured, and
plans are made from its table for three logs: Poisson arrivals, more of them, and bursts. A plan of N engines behind a
round-robin router is checked by one engine that gets each Nth request, with the plan's batch size and all of the KV
pool; so is the largest fleet that the plan rejected. A short burst before and after each log says how much slower the
machine was meanwhile than during the measurement. About fifteen minutes on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.fidelity.engine import KV_BLOCKS, TOKEN_BUDGET, Load, set_knobs, slowdown
from benchmarks.report import store, table
from inferencegym.models import QUANTILES
from live.driver import EngineApi, EngineRequest, play_open
from live.engines.random_model import ModelShape, serve_random_model
from live.measure import MeasureSettings, measure_engine, timed_requests
from ops.objectives import Objective, margin, parse_objective
from ops.plan import Plan, make_plan, tables_of_files
from simulator.load.requests import RequestLog
from simulator.offline.engine_fit import MeasuredEngine
from simulator.offline.table import build_table

SLOTS: Final = 512
"""Most running requests of the engine: as many as the largest batch of a plan."""
CLIENTS: Final = 48
SHOWN: Final = {
    "ttft_p50_ms": "TTFT p50",
    "ttft_p90_ms": "TTFT p90",
    "ttft_p99_ms": "TTFT p99",
    "tpot_p50_ms": "TPOT p50",
}


@dataclass(frozen=True, slots=True)
class Asked:
    """A log to plan for: gamma arrivals of this rate (requests/s) and coefficient of variation, and objectives."""

    name: str
    rate: float
    cv: float
    objectives: tuple[str, ...]
    requests: int = 150

    def log(self, seed: int) -> RequestLog:
        """Prompts of some 100 tokens and answers of some 40, log-normal."""
        rng = np.random.default_rng(seed)
        shape = self.cv**-2
        prompt, output = (
            np.clip(np.rint(rng.lognormal(np.log(median), 0.5, self.requests)), 8, most).astype(float)
            for median, most in ((100.0, 400), (40.0, 160))
        )
        gaps = rng.gamma(shape, 1.0 / (self.rate * shape), self.requests)
        return RequestLog(np.cumsum(gaps) - gaps[0], prompt, output, np.zeros(self.requests, dtype=np.int64))


LOGS: Final = (
    Asked("Poisson", 2.0, 1.0, ("ttft_p99=1500", "tpot_p50=60")),
    Asked("Poisson, faster", 5.0, 1.0, ("ttft_p99=1500", "tpot_p50=60")),
    Asked("bursts", 2.0, 3.0, ("ttft_p90=1500", "tpot_p50=80")),
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Plans against vLLM for CPU on this machine.")
    parser.add_argument("--venv", type=Path, default=Path(".venv-engine"), help="where the engine is installed")
    parser.add_argument("--seconds", type=float, default=120.0, help="length of the measuring load (default 120)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = compare(options.venv, Path(folder), options.seconds)
    print(text := markdown(result))
    store("planned_engine", result, text)


def compare(venv: Path, folder: Path, seconds: float) -> dict[str, Any]:
    """Measure the engine, plan on its table, and serve what was planned."""
    shape = ModelShape()
    settings = MeasureSettings(
        seconds=seconds,
        most_clients=CLIENTS,
        max_num_seqs=SLOTS,
        max_batched_tokens=TOKEN_BUDGET,
        kv_bytes_per_token=shape.kv_bytes_per_token(),
    )
    started = serve_random_model(
        venv,
        folder,
        max_num_seqs=SLOTS,
        kv_blocks=KV_BLOCKS,
        shape=shape,
        options=("--max-num-batched-tokens", str(TOKEN_BUDGET)),
    )
    with started as server:
        api = EngineApi(server.url).check()
        measured = measure_engine(api, settings)
        path = folder / "measured.parquet"
        source, profile = measured.source("measured"), measured.profile("measured")
        build_table(path, source, profile, saturated=False)
        rows: list[dict[str, Any]] = []
        for seed, asked in enumerate(LOGS):
            rows += checked(api, server.control_file, path, measured, asked, seed)
    return {"cpus": os.cpu_count(), "load_average": round(os.getloadavg()[2], 1), "rows": rows}


def checked(
    api: EngineApi, control: Path, table: Path, measured: MeasuredEngine, asked: Asked, seed: int
) -> list[dict[str, Any]]:
    """Plan for one log, and serve it with the plan's fleet and with the largest rejected one."""
    log, objectives = asked.log(seed), [parse_objective(text) for text in asked.objectives]
    report = make_plan(log, objectives, tables_of_files([table]), router="round-robin", policies=())
    fewer = [plan for plan in report.tried if not plan.meets]
    largest = sorted(fewer, key=lambda plan: (plan.n_replicas, plan.margin))[-1:]
    return [served(api, control, measured, asked, log, objectives, plan) for plan in (*report.plans, *largest)]


def served(
    api: EngineApi,
    control: Path,
    measured: MeasuredEngine,
    asked: Asked,
    log: RequestLog,
    objectives: list[Objective],
    plan: Plan,
) -> dict[str, Any]:
    """Serve the first engine's share of the log with the plan's batch size."""
    assert plan.action is not None
    slower = [slowdown(api, control, measured)]
    set_knobs(api, control, Load(asked.name, 0, (0, 0), (0, 0), batch_size=plan.action["batch_size"]))
    share = slice(0, None, plan.n_replicas)
    columns = (log.arrival_s[share], log.prompt_tokens[share], log.output_tokens[share])
    requests = [EngineRequest(float(at), int(p), int(o)) for at, p, o in zip(*columns, strict=True)]
    phase = timed_requests(asked.name, play_open(api, requests))
    slower.append(slowdown(api, control, measured))
    figures = {
        f"{name}_{quantile}_ms": float(np.quantile(values, share))
        for name, values in (("ttft", phase.ttft_ms()), ("tpot", phase.tpot_ms()))
        for quantile, share in QUANTILES.items()
    }
    row = {
        "log": asked.name,
        "objectives": asked.objectives,
        "engines": plan.n_replicas,
        "batch_size": plan.action["batch_size"],
        "verdict": plan.verdict,
        "slowdown": [round(each, 2) for each in slower],
        "plan": {name: round(plan.figures[name], 1) for name in SHOWN},
        "engine": {name: round(figures[name], 1) for name in SHOWN},
        "margin": round(margin(objectives, figures), 3),
    }
    print(json.dumps(row), flush=True)
    return row


def markdown(result: Mapping[str, Any]) -> str:
    """Table of the document."""
    lines = [
        "<!-- written by benchmarks/fidelity/planned.py; do not edit -->",
        "",
        f"On {result['cpus']} cores, with a load average of {result['load_average']} over the last quarter of an hour. "
        "Latencies are plan / engine, in ms.",
        "",
    ]
    rows = []
    for row in result["rows"]:
        held = "meets" if row["margin"] >= 0 else "misses"
        both = [f"{row['plan'][name]:.0f} / {row['engine'][name]:.0f}" for name in SHOWN]
        slower = f"{min(row['slowdown']):.2f} to {max(row['slowdown']):.2f}"
        rows.append((row["log"], ", ".join(row["objectives"]), row["engines"], row["verdict"], held, *both, slower))
    heads = ("log", "objectives", "engines", "verdict", "on the engine", *SHOWN.values(), "machine slower by")
    return "\n".join([*lines, *table(heads, rows)]) + "\n"


if __name__ == "__main__":
    main()
