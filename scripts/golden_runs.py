"""Golden runs of the discrete-event engine and of what-ifs, for regression tests: ``python -m scripts.golden_runs``.

``tests/golden/runs.json`` keeps three kinds of results: the times of every request of short loads in the discrete-event
engine, one load for each way of scheduling; the metrics of every second of short episodes under random actions,
including restarts and changes of the fleet; and the reports of what-ifs. ``tests/simulator/test_golden_runs.py`` plays
them again. Without ``--write`` the command prints the differences; with it the file is rewritten, for an intended
change that CHANGELOG.md mentions.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from env.batch import ServingBatch
from inferencegym.models import SPEC_LENGTHS, QuantTier, ServeAction
from inferencegym.tasks import TaskId, get_task
from scripts.golden_episodes import pack, rounded_row, row_differences, unpack
from simulator.events.episode import Knobs, ReferenceEpisode
from simulator.events.fleet import Fleet, RollingRestart
from simulator.events.requests import Requests
from simulator.events.simulation import serve, serve_closed
from simulator.hardware.measured import spec_acceptance
from simulator.hardware.measured_model import MeasuredModel
from simulator.hardware.profiles import engine, hardware
from simulator.hardware.tables import load_tables
from simulator.load.requests import RequestLog
from simulator.whatif import serve_requests
from simulator.workload import load_source

RUNS_FILE: Final = Path(__file__).resolve().parent.parent / "tests" / "golden" / "runs.json"

N_REQUESTS: Final = 90
SECONDS: Final = 48
DRAFTS: Final[dict[str, Any]] = {"draft_tokens": 4, "acceptance": spec_acceptance("sharegpt", "eagle")[4]}
LOADS: Final[dict[str, dict[str, Any]]] = {
    "chunked prompts": {},
    "a pool that preempts": {"kv_pool_tokens": 4_000},
    "a full queue": {"batch_size": 4, "queue_limit": 6},
    "drafts": DRAFTS,
    "drafts that classes take differently, two cards": {**DRAFTS, "acceptance_scale": (1.2, 1.0, 0.6), "replicas": 2},
    "prefill apart": {"disaggregated": True},
    "prefill apart, drafts and a pool that preempts": {**DRAFTS, "disaggregated": True, "kv_pool_tokens": 5_000},
    "large blocks, refilled as vLLM does": {
        "block_tokens": 64, "spare_tokens": 0, "kv_pool_tokens": 6_400, "vllm_refill": True,
        "occupancy_in_blocks": True,
    },
    "slow iterations": {"slowdown": 2.0},
    "whole prompts first": {"engine": "vllm_v0"},
    "whole prompts first, drafts": {**DRAFTS, "engine": "vllm_v0", "kv_pool_tokens": 5_000},
    "answers that are sent late": {"engine": "vllm_v0_served_40", "batch_size": 8},
    "room for whole answers": {"engine": "nofit", "kv_pool_tokens": 5_000},
    "eight clients": {"clients": 8},
    "four clients, drafts and a small pool": {**DRAFTS, "clients": 4, "kv_pool_tokens": 3_000},
}  # fmt: skip
"""Changes to the default fleet for each load; ``engine`` names a profile, ``clients`` makes a closed loop."""

WHOLE_FIRST: Final = {"meta": {"scheduler": "prefill_first"}}
CONSTANT: Final[dict[str, Any]] = {
    "kv_budget": 0.6, "spec_length": 2, "batch_size": 32, "prefill_disagg": False, "quant_tier": QuantTier.INT8,
}  # fmt: skip
WHATIFS: Final[dict[str, dict[str, Any]]] = {
    "what-if: one action": {},
    "what-if: a pool that preempts": {"action": {"kv_budget": 0.1, "batch_size": 256, "quant_tier": QuantTier.FP16}},
    "what-if: prefill apart, three replicas": {"action": {"prefill_disagg": True}, "n_replicas": 3},
    "what-if: a full queue": {"action": {"batch_size": 2}, "queue_limit": 10},
    "what-if: five clients, steps of a quarter second": {"closed_clients": 5, "step_s": 0.25},
    "what-if: whole prompts first": WHOLE_FIRST,
    "what-if: whole prompts first, few slots": {**WHOLE_FIRST, "action": {"batch_size": 4, "spec_length": 0}},
    "what-if: whole prompts first, prefill apart": {**WHOLE_FIRST, "action": {"prefill_disagg": True}},
}
"""Changes to the constant action, the table's metadata, or an argument of :func:`serve_requests`."""

EPISODES: Final[tuple[tuple[TaskId, int, RollingRestart, bool], ...]] = (
    (1, 21, "recompute", True),
    (2, 22, "drain", True),
    (2, 28, "recompute", True),
    (3, 23, "recompute", True),
    (3, 24, "drain", False),
    ("azure-conv", 25, "recompute", True),
    ("mooncake", 29, "drain", True),
    ("autoscale", 26, "recompute", True),
    ("autoscale", 27, "drain", True),
)
"""Task, seed, what a restart does with requests in flight, and whether classes have priorities."""


def play_load(name: str) -> list[dict[str, Any]]:
    """Times (s) and preemptions of every request of one load, and the run's totals in a last row."""
    changes = {"batch_size": 24, "kv_pool_tokens": 60_000, **LOADS[name]}
    profile, clients = engine(changes.pop("engine", "a100_40")), changes.pop("clients", 0)
    fleet = Fleet(MeasuredModel(hardware("a100-40gb"), "INT8", profile), **changes)
    rng = np.random.default_rng(5)
    prompt = np.rint(rng.lognormal(5.5, 1.0, N_REQUESTS)).astype(np.int64) + 1
    output = np.rint(rng.lognormal(3.5, 0.8, N_REQUESTS)).astype(np.int64) + 1
    if clients:
        served = serve_closed(fleet, prompt, output, clients, seed=6)
    else:
        arrival_s = np.cumsum(rng.exponential(0.02, N_REQUESTS))
        priority = rng.integers(0, 3, N_REQUESTS)
        reused = np.minimum(prompt, rng.integers(0, 300, N_REQUESTS))
        served = serve(fleet, Requests(arrival_s, prompt, output, priority, reused), seed=6)
    times = dataclasses.asdict(served)
    each = {
        name: times[name].tolist() for name in ("arrival_s", "first_token_s", "finish_s", "rejected", "preemptions")
    }
    each |= {"ttft_ms": served.ttft_ms().tolist(), "tpot_ms": served.tpot_ms().tolist()}
    rows = [dict(zip(each, values, strict=True)) for values in zip(*each.values(), strict=True)]
    totals = {name: times[name] for name in ("iterations", "busy_ms", "peak_kv_tokens")}
    return [_known(row) for row in [*rows, {**totals, "tokens_per_s": served.tokens_per_s(0.2, 1.5)}]]


def _known(row: Mapping[str, Any]) -> dict[str, Any]:
    return rounded_row({name: value for name, value in row.items() if value == value})


def play_episode(task_id: TaskId, seed: int, rolling_restart: RollingRestart, by_class: bool) -> list[dict[str, Any]]:
    """Metrics of every second of one episode under random actions from the seed."""
    task = get_task(task_id)
    batch = ServingBatch(task, 1, task.config())
    source = load_source(task, batch.fleet.params.tables)
    episode = ReferenceEpisode(batch.fleet.params, source.requests(seed, SECONDS), seed, rolling_restart, by_class)
    rng = np.random.default_rng(seed)
    rows = []
    disagg, tier = False, 0
    while len(rows) < SECONDS:
        if rng.random() < 0.5:
            disagg, tier = bool(rng.random() < 0.35), int(rng.integers(3))
        scales = task.fleet.max_replicas is not None
        knobs = Knobs(
            kv_budget=round(float(rng.uniform(0.2, 1.0)), 3),
            spec_length=int(rng.choice(SPEC_LENGTHS)),
            batch_size=int(2 ** rng.integers(4, 10)),
            prefill_disagg=disagg,
            quant_tier=tier,
            replicas=int(rng.integers(1, task.fleet.max_replicas + 1)) if scales else task.fleet.n_replicas,
        )
        oom = bool(rng.random() < 0.15)
        rows += [_known(episode.play_second(knobs, oom)) for _ in range(int(rng.integers(1, 9)))]
    return rows


def play_whatif(name: str) -> list[dict[str, Any]]:
    """The report of one load on the fluid model, and those of its classes."""
    changes = {"action": {}, **WHATIFS[name]}
    action = ServeAction(**{**CONSTANT, **changes.pop("action")})
    tables = load_tables()
    tables = dataclasses.replace(tables, meta={**tables.meta, **changes.pop("meta", {})})
    rng = np.random.default_rng(8)
    log = RequestLog(
        arrival_s=np.cumsum(rng.exponential(0.02, N_REQUESTS)),
        prompt_tokens=np.rint(rng.lognormal(6.0, 1.0, N_REQUESTS)) + 1.0,
        output_tokens=np.rint(rng.lognormal(3.5, 0.8, N_REQUESTS)) + 1.0,
        class_index=rng.integers(0, 3, N_REQUESTS),
    )
    found = dataclasses.asdict(serve_requests(action, log, tables, **changes).report())
    flat = {name: value for name, value in found.items() if name not in ("classes", "support")}
    return [_known(row) for row in (flat, *found["classes"].values())]


def runs() -> dict[str, list[dict[str, Any]]]:
    """Rows of all runs with the current code, by name."""
    found = {name: play_load(name) for name in LOADS} | {name: play_whatif(name) for name in WHATIFS}
    return found | {name_of(*episode): play_episode(*episode) for episode in EPISODES}


def name_of(task_id: TaskId, seed: int, rolling_restart: RollingRestart, by_class: bool) -> str:
    """Name of an episode."""
    return f"task {task_id}, seed {seed}, {rolling_restart}{'' if by_class else ', first come first served'}"


def recorded() -> dict[str, list[dict[str, Any]]]:
    """The recorded rows, by name."""
    columns = json.loads(RUNS_FILE.read_text(encoding="utf-8"))
    return {name: unpack(each) for name, each in columns.items()}


def differences(expected: list[dict[str, Any]], got: list[dict[str, Any]]) -> Iterator[str]:
    """Differences of two runs, as text: row, field, recorded value and current value."""
    if len(expected) != len(got):
        yield f"{len(expected)} rows were recorded, {len(got)} are there"
    for number, (before, now) in enumerate(zip(expected, got, strict=False)):
        yield from row_differences(f"row {number}", before, now)


def main() -> int:
    """Compare or write; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the file anew")
    arguments = parser.parse_args()
    now = runs()
    if arguments.write:
        lines = [f"{json.dumps(name)}: {json.dumps(pack(rows))}" for name, rows in now.items()]
        RUNS_FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
        return 0
    before = recorded()
    found = [f"{name}: {one}" for name in now for one in differences(before.get(name, []), now[name])]
    print("\n".join(found) or "nothing changed")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
