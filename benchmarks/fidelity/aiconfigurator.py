"""aiconfigurator's estimates of the suite's closed loops: writes results/aiconfigurator.csv, a submission.

    python -m benchmarks.fidelity.aiconfigurator
    inferencegym fidelity score benchmarks/results/aiconfigurator.csv --common

Its estimator of mixed batches (``run_agg`` of aiconfigurator-core, on the timings of vLLM that our tables have too)
takes mean lengths and the number of clients, and gives one TTFT, time per token and throughput of the steady state.
These stand for the medians. An iteration takes the prompt tokens of all clients, or as many as the engine allows. It
does not estimate served loads, which have no clients. Needs the extra ``hardware``.
"""

from __future__ import annotations

import csv
import logging
from typing import Final

from benchmarks.report import RESULTS
from ops.fidelity import COLUMNS, published_runs
from simulator.hardware.catalogue import hardware_data

RESULT: Final = RESULTS / "aiconfigurator.csv"
QUANTITIES: Final = {"TTFT p50": "ttft", "TPOT p50": "tpot", "tokens/s": "tokens/s"}
"""Columns of its summary."""


def estimates() -> list[tuple[str, str, str]]:
    """Run, quantity and value of every closed loop."""
    from aiconfigurator_core.sdk.backends.factory import get_backend
    from aiconfigurator_core.sdk.config import ModelConfig, RuntimeConfig
    from aiconfigurator_core.sdk.models import get_model
    from aiconfigurator_core.sdk.perf_database import get_database_view

    logging.disable(logging.WARNING)
    paths, backend, found = hardware_data()["models"], get_backend("vllm"), []
    for name, run in published_runs().items():
        if run["clients"]:
            clients, tp = int(run["clients"]), int(run["cards_per_replica"])
            prompt, output = (round(float(run[f"mean_{part}_tokens"])) for part in ("prompt", "output"))
            database = get_database_view(run["card"], "vllm", "current", database_mode="SILICON")
            model = get_model(paths[run["model"]], ModelConfig(tp_size=tp, moe_tp_size=tp, moe_ep_size=1), "vllm")
            load = RuntimeConfig(batch_size=clients, isl=prompt, osl=output)
            tokens = min(int(run["max_num_batched_tokens"]), prompt * clients)
            summary = backend.run_agg(model, database, load, ctx_tokens=tokens).get_summary_df().iloc[0]
            found += [(name, quantity, f"{summary[column]:.6g}") for quantity, column in QUANTITIES.items()]
    return found


def main() -> None:
    with RESULT.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(estimates())
    print(RESULT)


if __name__ == "__main__":
    main()
