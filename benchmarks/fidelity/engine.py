"""Simulator against a real engine: vLLM for CPU with a small random model, on this machine.

    python -m benchmarks.fidelity.engine            writes results/engine_fidelity.json and .md

`scripts/install_engine.sh` installs the engine (--venv says where). It is measured first (`inferencegym measure`), then
plays loads of fixed and mixed lengths, Poisson and in bursts, with large and small KV pools and batches, with drafts
and without; knobs change while it runs. The discrete-event reference plays every load with the measured times and the
recorded send times. Counts are compared directly. Latencies are compared in units of the load's own time per token,
because a shared machine is at times several times slower. It takes about ten minutes on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.report import store, table
from inferencegym.files import write_text
from live.driver import EngineApi, EngineRequest, play_open
from live.engines.random_model import ModelShape, serve_random_model
from live.measure import MeasureSettings, measure_engine, timed_requests
from live.metrics import MetricsPage
from simulator.events.fleet import Fleet
from simulator.events.requests import Requests
from simulator.events.simulation import serve
from simulator.hardware.engine_times import EngineTimes
from simulator.hardware.measured import FloatArray
from simulator.offline.engine_fit import MeasuredEngine, TimedRequests

SLOTS, KV_BLOCKS, DRAFTS, TOKEN_BUDGET = 32, 257, 4, 2048
COUNTERS: Final = {
    "iterations": "vllm:iteration_tokens_total_count",
    "preemptions": "vllm:num_preemptions_total",
    "tokens": "vllm:generation_tokens_total",
}
COUNTS: Final = ("iterations", "most_begun", "preemptions", "most_waiting", "tokens")
RATIOS: Final = ("tpot_ms", "ttft_p50", "makespan")


@dataclass(frozen=True, slots=True)
class Load:
    """Requests and the knobs under which they are served; ``rate`` 0: all at once, in ``bursts`` 8 s apart."""

    name: str
    n: int
    prompt: tuple[int, int]
    output: tuple[int, int]
    rate: float = 0.0
    bursts: int = 1
    batch_size: int = SLOTS
    kv_budget: float = 1.0
    drafts: int = 0

    def requests(self, seed: int) -> list[EngineRequest]:
        """Lengths are uniform between their two bounds."""
        rng = np.random.default_rng(seed)
        due = (
            np.cumsum(rng.exponential(1.0 / self.rate, self.n)) if self.rate else np.arange(self.n) % self.bursts * 8.0
        )
        prompts, outputs = (rng.integers(low, high + 1, self.n) for low, high in (self.prompt, self.output))
        columns = zip(np.sort(due), prompts, outputs, strict=True)
        return [EngineRequest(float(at), int(p), int(o)) for at, p, o in columns]


LOADS: Final = (
    Load("burst, fixed lengths", 32, (128, 128), (64, 64)),
    Load("burst, mixed lengths", 48, (16, 256), (16, 96)),
    Load("Poisson 1.5/s, fixed", 40, (128, 128), (48, 48), rate=1.5),
    Load("Poisson 3/s, mixed", 60, (16, 256), (16, 64), rate=3.0),
    Load("three bursts, mixed", 48, (16, 256), (16, 48), bursts=3),
    Load("burst, batch 8", 32, (128, 128), (32, 32), batch_size=8),
    Load("Poisson 3/s, batch 4", 40, (64, 128), (16, 64), rate=3.0, batch_size=4),
    Load("burst, pool of 26 blocks", 32, (120, 120), (64, 64), kv_budget=0.1),
    Load("burst, 26 blocks, prompts of a block", 32, (128, 128), (64, 64), kv_budget=0.1),
    Load("burst, mixed, 38 blocks", 40, (100, 250), (32, 96), kv_budget=0.15),
    Load("Poisson 3/s, mixed, 26 blocks", 48, (100, 250), (32, 96), rate=3.0, kv_budget=0.1),
)
DRAFTING: Final = (
    Load("drafting off, burst", 24, (64, 64), (64, 64)),
    Load("4 drafts, burst", 24, (64, 64), (64, 64), drafts=4),
    Load("2 drafts, burst", 24, (64, 64), (64, 64), drafts=2),
    Load("drafting off, Poisson 1.5/s, mixed", 30, (16, 256), (16, 64), rate=1.5),
    Load("4 drafts, Poisson 1.5/s, mixed", 30, (16, 256), (16, 64), rate=1.5, drafts=4),
    Load("drafting off, mixed, 26 blocks", 24, (100, 250), (32, 96), kv_budget=0.1),
    Load("4 drafts, mixed, 26 blocks", 24, (100, 250), (32, 96), kv_budget=0.1, drafts=4),
    # loads of the first start whose preemptions may differ, to see whether asynchronous scheduling is the cause
    replace(LOADS[7], name="synchronous: burst, pool of 26 blocks"),
    replace(LOADS[8], name="synchronous: burst, 26 blocks, prompts of a block"),
    replace(LOADS[9], name="synchronous: burst, mixed, 38 blocks"),
)

PROBE: Final = Load("pace", 8, (32, 32), (64, 64))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="The simulator against vLLM for CPU on this machine.")
    parser.add_argument("--venv", type=Path, default=Path(".venv-engine"), help="where the engine is installed")
    parser.add_argument("--seconds", type=float, default=120.0, help="length of the measuring load (default 120)")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        result = compare(options.venv, Path(folder), options.seconds)
    print(text := markdown(result))
    store("engine_fidelity", result, text)


def compare(venv: Path, folder: Path, seconds: float) -> dict[str, Any]:
    """Measure the engine, then play all loads on it and in the reference."""
    shape = ModelShape()
    options = ("--max-num-batched-tokens", str(TOKEN_BUDGET))
    limits: dict[str, Any] = {"max_num_seqs": SLOTS, "kv_blocks": KV_BLOCKS, "shape": shape, "options": options}
    settings = MeasureSettings(
        seconds=seconds,
        most_clients=SLOTS // 2,
        max_num_seqs=SLOTS,
        max_batched_tokens=TOKEN_BUDGET,
        kv_bytes_per_token=shape.kv_bytes_per_token(),
    )
    with serve_random_model(venv, folder / "plain", **limits) as server:
        api = EngineApi(server.url).check()
        measured = measure_engine(api, settings)
        print(measured.fit.times, measured.fit.median_error, flush=True)
        measured_at = round(os.getloadavg()[0], 1)
        rows = [played(api, server.control_file, load, measured, seed) for seed, load in enumerate(LOADS)]
    with serve_random_model(venv, folder / "drafts", drafts=DRAFTS, **limits) as server:
        api = EngineApi(server.url).check()
        rows += [played(api, server.control_file, load, measured, seed) for seed, load in enumerate(DRAFTING)]
    return {
        "cpus": os.cpu_count(),
        "measured_at": measured_at,
        "played_at": round(os.getloadavg()[2], 1),
        "times": asdict(measured.fit.times),
        "held_out_median": measured.fit.median_error,
        "rows": rows,
    }


def played(api: EngineApi, control: Path, load: Load, measured: MeasuredEngine, seed: int) -> dict[str, Any]:
    """Play one load on the engine and in the reference, with the machine's speed measured before and after it."""
    slower = [slowdown(api, control, measured)]
    set_knobs(api, control, load)
    before = api.metrics()
    phase = timed_requests(load.name, play_open(api, load.requests(seed)))
    time.sleep(0.5)  # wait for the last iteration's statistics
    after = api.metrics()
    state = json.loads(Path(f"{control}.state").read_text(encoding="utf-8"))
    if state["problem"] or state["in_force"]["kv_budget"] != load.kv_budget:
        raise SystemExit(f"{load.name}: the engine did not take its knobs: {state}")
    slower.append(slowdown(api, control, measured))
    risen = {name: after.total(series) - before.total(series) for name, series in COUNTERS.items()}
    acceptance = accepted(before, after, risen["tokens"], load.drafts)
    pool_blocks = state["kv_blocks"] - round((1.0 - load.kv_budget) * state["kv_blocks"])
    row = {
        "load": asdict(load),
        "pool_blocks": pool_blocks,
        "acceptance": acceptance,
        "slowdown": [round(each, 3) for each in slower],
        "engine": {**risen, **seen(phase)},
        "simulator": reference(phase, load, measured, pool_blocks, acceptance, float(np.mean(slower))),
    }
    print(json.dumps(row), flush=True)
    return row


def slowdown(api: EngineApi, control: Path, measured: MeasuredEngine) -> float:
    """Factor by which the machine is now slower than during the measurement, because of other load."""
    set_knobs(api, control, PROBE)
    phase = timed_requests(PROBE.name, play_open(api, PROBE.requests(0)))
    expected = reference(phase, PROBE, measured, measured.facts.pool_blocks, ())
    return seen(phase)["tpot_ms"] / expected["tpot_ms"]


def set_knobs(api: EngineApi, control: Path, load: Load) -> None:
    """Write the knobs, and send a request so that the idle engine reads them while its blocks are free."""
    knobs = {"batch_size": load.batch_size, "kv_budget": load.kv_budget, "spec_length": load.drafts}
    write_text(control, json.dumps({"set": knobs}))
    time.sleep(0.2)
    play_open(api, [EngineRequest(0.0, 16, 4)])


def accepted(before: MetricsPage, after: MetricsPage, tokens: float, drafts: int) -> list[float]:
    """Share of iterations in which each draft position was accepted, from the engine's counters."""
    if not drafts:
        return []
    series = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    by_position = [
        {labels["position"]: value for labels, value in page.samples.get(series, [])} for page in (before, after)
    ]
    risen = [by_position[1].get(str(j), 0.0) - by_position[0].get(str(j), 0.0) for j in range(drafts)]
    iterations = tokens - sum(risen)
    return [round(count / iterations, 4) for count in risen]


def reference(
    phase: TimedRequests,
    load: Load,
    measured: MeasuredEngine,
    pool_blocks: int,
    acceptance: Sequence[float],
    slowdown: float = 1.0,
) -> dict[str, float]:
    """Play the same requests in the discrete-event reference."""
    facts, source = measured.facts, measured.source("measured")
    model = source.operators(source.tiers[0], measured.profile("measured"))
    fleet = Fleet(
        model,
        batch_size=load.batch_size,
        kv_pool_tokens=pool_blocks * facts.block_tokens,
        **facts.fleet_rules(),
        draft_tokens=load.drafts,
        acceptance=acceptance,
        slowdown=slowdown,
    )
    order = np.argsort(phase.sent_s, kind="stable")
    prompt, output = (np.rint(x[order]).astype(np.int64) for x in (phase.prompt_tokens, phase.output_tokens))
    served = serve(fleet, Requests(phase.sent_s[order] - phase.sent_s.min(), prompt, output))
    later = model.profile.ttft_offset_ms / 1e3
    simulated = TimedRequests(
        load.name, served.arrival_s, served.first_token_s + later, served.finish_s + later, prompt * 1.0, output * 1.0
    )
    counts = {
        "iterations": float(served.iterations),
        "preemptions": float(served.preemptions.sum()),
        "tokens": float(output.sum()),
    }
    return {**counts, **seen(simulated)}


def seen(phase: TimedRequests) -> dict[str, float]:
    """What clients see: most requests in progress, most waiting, and latencies in units of the time per token."""
    tpot_ms = float(np.median(phase.tpot_ms()))
    ttft = phase.ttft_ms() / tpot_ms
    return {
        "most_begun": most_at_once(phase.first_token_s, phase.finish_s),
        "most_waiting": most_at_once(phase.sent_s, phase.first_token_s),
        "tpot_ms": round(tpot_ms, 2),
        "ttft_p50": round(float(np.median(ttft)), 3),
        "ttft_p99": round(float(np.quantile(ttft, 0.99)), 3),
        "makespan": round(float(phase.finish_s.max() - phase.sent_s.min()) * 1e3 / tpot_ms, 3),
    }


def most_at_once(begin: FloatArray, end: FloatArray) -> int:
    """Largest number of overlapping intervals; an interval does not overlap with one that begins where it ends."""
    edges = sorted([(t, -1) for t in end] + [(t, 1) for t in begin])
    return int(max(np.cumsum([step for _, step in edges])))


def markdown(result: Mapping[str, Any]) -> str:
    """The report as Markdown."""
    times = EngineTimes.of_dict(result["times"])
    lines = [
        "<!-- written by benchmarks/fidelity/engine.py; do not edit -->",
        "",
        f"Measured at a load average of {result['measured_at']} on {result['cpus']} cores, and played at one of "
        f"{result['played_at']}: an iteration takes "
        f"{iteration_ms(times, 1):.0f} ms with one decoding sequence and {iteration_ms(times, SLOTS):.0f} with "
        f"{SLOTS}; phases held out are predicted {result['held_out_median']:.0%} off at the median.",
        "",
    ]
    rows = []
    for row in result["rows"]:
        real, simulated = row["engine"], row["simulator"]
        counts = [f"{real[name]:.0f} / {simulated[name]:.0f}" for name in COUNTS]
        ratios = [f"{simulated[name] / real[name] - 1.0:+.0%}" for name in RATIOS]
        rows.append((row["load"]["name"], *counts, *ratios))
    heads = ("load", *(COUNT_HEADS[name] for name in COUNTS), *(RATIO_HEADS[name] for name in RATIOS))
    return "\n".join([*lines, *table(heads, rows)]) + "\n"


def iteration_ms(times: EngineTimes, sequences: int) -> float:
    """Time of an iteration that decodes this many sequences, without the term of their contexts."""
    return times.step_ms + times.rows_ms(sequences) + times.sequence_ms * sequences


COUNT_HEADS: Final = {
    "iterations": "iterations",
    "most_begun": "most in progress",
    "preemptions": "preemptions",
    "most_waiting": "most waiting",
    "tokens": "output tokens",
}
RATIO_HEADS: Final = {"tpot_ms": "TPOT", "ttft_p50": "TTFT p50 in TPOT", "makespan": "makespan in TPOT"}

if __name__ == "__main__":
    main()
