"""Compare agent sessions in the simulator with vLLM running a model, and with vLLM's scheduler alone.

    python -m benchmarks.fidelity.rollouts     writes results/rollouts_fidelity.md

It plays the sessions of results/rollouts_engine.json (`benchmarks/live/rollouts_engine.py` recorded them) under the
same caps, on the same pool, blocks and token budget. For the engine, each run is played at the engine's pace: its times
per iteration and per token, slowed down until turns take as long as on the engine. Round trips to the client are drawn
DRAWS times around their mean, because the order in which turns return decides which contexts are evicted. Against the
scheduler (`benchmarks/fidelity/rollouts_scheduler.py`), the clock is the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from benchmarks.report import RESULTS, stored
from inferencegym.files import write_text
from simulator.events.fleet import Fleet
from simulator.events.requests import Requests, Sessions
from simulator.events.simulation import SessionRun
from simulator.hardware.engine_times import EngineFacts, EngineModel, EngineTimes, engine_profile

DRAWS: Final = 8
Row = Mapping[str, Any]


def main() -> None:
    text = markdown(against_engine(), against_scheduler())
    print(text)
    write_text(RESULTS / "rollouts_fidelity.md", text)


def against_engine() -> list[tuple[Row, dict[str, float]]]:
    """Runs of the engine, each with the simulator's run at the same pace."""
    recorded = stored("rollouts_engine")
    works = {work["name"]: work for work in recorded["workloads"]}
    return [(row, at_the_pace_of(row, recorded["engine"], works[row["workload"]])) for row in recorded["runs"]]


def against_scheduler() -> list[tuple[Row, dict[str, float]]]:
    """Runs of vLLM's scheduler, each with the simulator's run on the same clock."""
    recorded, scheduler = stored("rollouts_engine"), stored("rollouts_scheduler")
    works = {work["name"]: work for work in recorded["workloads"]}
    clock = scheduler["clock"]
    return [
        (
            row,
            play(recorded["engine"], works[row["workload"]], row["cap"], clock["step_ms"], clock["token_ms"],
                 clock["client_ms"]),
        )
        for row in scheduler["runs"]
    ]  # fmt: skip


def at_the_pace_of(row: Row, engine: Row, work: Row) -> dict[str, float]:
    """Mean counts at the slowdown with which turns take as long as on the engine; a bisection finds it."""
    low, high = 0.5, 16.0
    for _ in range(12):
        slow = (low * high) ** 0.5
        found = play(engine, work, row["cap"], slow * row["step_ms"], slow * row["token_ms"], row["client_ms"])
        low, high = (slow, high) if found["engine_s"] < row["engine_s"] else (low, slow)
    draws = [
        play(engine, work, row["cap"], slow * row["step_ms"], slow * row["token_ms"], row["client_ms"], seed)
        for seed in range(DRAWS)
    ]
    return {key: float(np.mean([draw[key] for draw in draws])) for key in draws[0]}


def play(
    engine: Row, work: Row, cap: int, step_ms: float, token_ms: float, client_ms: float, seed: int | None = None
) -> dict[str, float]:
    """Counts of a run in the simulator; an iteration takes ``step_ms`` plus ``token_ms`` per computed token.

    With a seed, round trips to the client are exponential with mean ``client_ms``.
    """
    sessions = sessions_of(work, engine["block_tokens"], client_ms, seed)
    facts = EngineFacts("random", engine["block_tokens"], engine["pool_blocks"], 1.0, engine["max_num_seqs"],
                        engine["token_budget"], engine["model"]["max_positions"])  # fmt: skip
    times = EngineTimes(step_ms, (0.0,), (token_ms,), 0.0, 0.0, 0.0, engine["max_num_seqs"], 1, 1)
    model = EngineModel(times, facts.kv_bytes_per_token, "served", engine_profile("vllm", facts, 0.0, "recorded"))
    run = SessionRun(Fleet(model, engine["max_num_seqs"], facts.pool_tokens(), **facts.fleet_rules()), sessions)
    run.play(cap, np.inf)
    state, arrays = run.state, run.simulation.arrays
    return {
        "prompt_tokens": int(state.queried_tokens),
        "hit_tokens": int(state.hit_tokens),
        "computed_tokens": int(state.prefilled_tokens + state.decoded_tokens),
        "preemptions": int(state.n_preempted),
        "iterations": int(state.iterations),
        "engine_s": float((arrays["finish_ms"] - arrays["arrival_ms"]).sum()) / 1e3,
    }


def sessions_of(work: Row, block_tokens: int, client_ms: float, seed: int | None) -> Sessions:
    """The workload's sessions, a microsecond apart; the round trip to the client is part of the tool time.

    Whole blocks of the system prompt are shared, and each session computes the rest itself.
    """
    shared = work["shared_tokens"] // block_tokens * block_tokens
    first, prompts, outputs, tools_s, arrivals_s = [0], [], [], [], []
    for session in work["sessions"]:
        context = work["shared_tokens"] - shared
        columns = (session[name] for name in ("new_tokens", "output_tokens", "tool_s"))
        for new, output, tool_s in zip(*columns, strict=True):
            prompts.append(context + new)
            context += new + output
            outputs.append(output)
            tools_s.append(tool_s)
            arrivals_s.append(1e-6 * session["id"])
        first.append(len(prompts))
    n = len(prompts)
    ways_s = client_ms / 1e3 * (np.ones(n) if seed is None else np.random.default_rng(seed).exponential(size=n))
    turns = Requests(np.array(arrivals_s), np.array(prompts), np.array(outputs))
    return Sessions(turns, np.array(first), np.array(tools_s) + ways_s, np.ones(len(first) - 1, bool), shared)


def markdown(engine: Sequence[tuple[Row, Row]], scheduler: Sequence[tuple[Row, Row]]) -> str:
    """The report as Markdown: vLLM / simulator, with means over repeats of the engine."""
    lines = [
        "<!-- written by benchmarks/fidelity/rollouts.py; do not edit -->",
        "",
        "| workload | cap | tokens computed | off | repeats off | in the cache | preemptions "
        "| scheduler: tokens computed | off | in the cache | preemptions |",
        "|" + "---|" * 11,
    ]
    for row, exact in scheduler:
        cell = [pair for pair in engine if (pair[0]["workload"], pair[0]["cap"]) == (row["workload"], row["cap"])]
        real, simulated = ({key: np.mean([pair[i][key] for pair in cell]) for key in exact} for i in (0, 1))
        repeats = [pair[0]["computed_tokens"] / real["computed_tokens"] - 1.0 for pair in cell]
        columns = compared(real, simulated), compared(row, exact)
        columns[0].insert(2, f"{min(repeats):+.1%} to {max(repeats):+.1%}")
        lines.append(f"| {row['workload']} | {row['cap']} | {' | '.join((*columns[0], *columns[1]))} |")
    return "\n".join(lines) + "\n"


def compared(real: Row, simulated: Row) -> list[str]:
    """Computed tokens and their error, prefix hit rate, preemptions."""
    off = simulated["computed_tokens"] / real["computed_tokens"] - 1.0
    shares = [each["hit_tokens"] / each["prompt_tokens"] for each in (real, simulated)]
    return [
        f"{real['computed_tokens']:,.0f} / {simulated['computed_tokens']:,.0f}",
        f"{off:+.1%}",
        f"{shares[0]:.3f} / {shares[1]:.3f}",
        f"{real['preemptions']:.0f} / {simulated['preemptions']:.0f}",
    ]


if __name__ == "__main__":
    main()
