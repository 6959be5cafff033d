"""Policies on a real engine, one of them learned in the simulator of that engine as it was measured.

    python -m benchmarks.live.policies --venv .venv-engine      vLLM for CPU with a random model; writes the results
    python -m benchmarks.live.policies --engine URL --control-file FILE      an engine of yours, printed only
    python -m benchmarks.live.policies --stand-in --seconds 20 --steps 20000    no engine: the discrete-event reference
    python -m benchmarks.live.policies --draw      the figure again, from the results

The engine is measured (``inferencegym measure``), and a task's traffic is scaled to its capacity. PPO then learns that
task in the simulator of the measured engine (extra ``rl``). Constant settings, the heuristic and the learned policy
play the same traffic, several times, in an order drawn anew in every repeat. Grades of one engine and run can be
compared with each other, and with no others: they are relative to the capacity just measured. With the defaults it
takes about half an hour.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from agents.episodes import run_episodes
from agents.evaluate import interval
from agents.registry import make_agent
from benchmarks.report import FIGURES, store, stored, table
from inferencegym.models import ServeObservation
from inferencegym.spaces.actions import action_mask, from_row, snap
from inferencegym.tasks import TASKS_ENV, Calibration, TaskSpec, get_calibration, get_task
from live.engines.choose import engine_at
from live.engines.engine import Engine, Orders
from live.engines.random_model import ModelShape, serve_random_model
from live.engines.sglang import SglangEngine
from live.engines.simulated import SimulatedEngine
from live.engines.vllm import VllmEngine
from live.env import EngineEnv
from live.measure import MeasureSettings, measure_engine
from live.scaling import (
    drafts_as_measured,
    engine_calibration,
    live_task,
    mean_lengths,
    measure_capacity,
    measure_draft_tokens,
    scaled_lengths,
    scaled_rates,
    write_task,
)
from simulator.hardware.tables import TABLE_ENV, FloatArray, tables_of
from simulator.offline.table import build_table

FIGURE = FIGURES / "live_episode.png"
CONSTANTS: Final = tuple(
    f'constant:{{"batch_size": {size}, "spec_length": {drafts}}}'
    for size, drafts in ((16, 0), (64, 0), (64, 2), (64, 8))
)
SLOTS, KV_BLOCKS, TOKEN_BUDGET, DRAFTS = 64, 97, 2048, 8
"""Of the engine that is started here: the pool holds fewer requests than there are slots, so both can be too many."""
LONGEST: Final = 1024
"""Most tokens of a request, prompt and output."""
FIRST_COME: Final = "live_first_come"
"""Name of the results of an engine that is told no priorities."""
TASK_ID: Final = "live"
FIRST_SEED: Final = 9000
DRAFT_BURST: Final = 32
SERIES: Final = ("queue_requests", "kv_occupancy", "tokens_per_sec", "ttft_p50_ms")


@dataclass
class Played:
    """What each repeat of an agent gave on the engine, and the first one second by second."""

    scores: list[float] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)
    ttft_ms: list[float] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    preemptions: list[float] = field(default_factory=list)
    series: dict[str, list[float]] = field(default_factory=dict)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parsed(arguments)
    if args.draw:
        draw(stored("live_policies"))
        return
    with tempfile.TemporaryDirectory() as name, running_engine(args, Path(name)) as engine:
        result = compare(engine, args, Path(name))
    print(markdown(result))
    if args.venv is not None:
        name = FIRST_COME if args.first_come else "live_policies"
        store(name, result, markdown(result))
        if not args.first_come:
            draw(result)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--venv", type=Path, help="start vLLM for CPU, which is installed there")
    which.add_argument("--engine", metavar="URL", help="an engine that runs")
    which.add_argument("--stand-in", action="store_true", help="no engine: the discrete-event reference")
    which.add_argument("--draw", action="store_true", help="the figure again, from the results")
    parser.add_argument("--control-file", type=Path)
    parser.add_argument("--backend", choices=("vllm", "sglang"), default="vllm")
    parser.add_argument(
        "--first-come", action="store_true", help=f"--venv serves first come first served; writes {FIRST_COME}.*"
    )
    parser.add_argument(
        "--priorities", action="store_true", help="--engine serves by priority: send it the class of each request"
    )
    parser.add_argument("--kv-bytes-per-token", type=float, help="where the engine does not state it")
    parser.add_argument("--task", default="3")
    parser.add_argument("--seconds", type=int, default=50, help="length of an episode (default 50)")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--measure-seconds", type=float, default=90.0, help="length of the measuring load (default 90)")
    parser.add_argument("--steps", type=int, default=100_000, help="training steps of the learned policy")
    return parser.parse_args(arguments)


@contextmanager
def running_engine(args: argparse.Namespace, folder: Path) -> Iterator[Engine]:
    """The engine that plays."""
    if args.stand_in:
        yield SimulatedEngine(tables_of(None), SLOTS)
    elif args.engine:
        yield engine_at(args.backend, args.engine, args.control_file, priorities=args.priorities)
    else:
        policy = "fcfs" if args.first_come else "priority"
        options = ("--max-num-batched-tokens", str(TOKEN_BUDGET), "--scheduling-policy", policy)
        limits: dict[str, Any] = {"max_num_seqs": SLOTS, "kv_blocks": KV_BLOCKS, "drafts": DRAFTS, "options": options}
        with serve_random_model(args.venv, folder, **limits) as server:
            yield engine_at("vllm", server.url, server.control_file, priorities=not args.first_come)


def measure(engine: Engine, args: argparse.Namespace, folder: Path, lengths: tuple[int, int]) -> dict[int, float]:
    """Measure the engine and make its table the default one; returns its tokens per iteration by draft length."""
    if not isinstance(engine, VllmEngine | SglangEngine):
        return {}  # the stand-in plays the default table already
    settings = MeasureSettings(args.measure_seconds, kv_bytes_per_token=args.kv_bytes_per_token)
    if args.venv is not None:
        settings = replace(
            settings,
            most_clients=SLOTS // 2,
            max_num_seqs=SLOTS,
            max_batched_tokens=TOKEN_BUDGET,
            kv_bytes_per_token=ModelShape().kv_bytes_per_token(),
        )
    drafting = "spec_length" in engine.limits()
    if drafting:
        engine.set(Orders({"spec_length": 0.0}))  # what iterations take is measured without
    measured = measure_engine(engine.api, settings)
    print(f"measured: {measured.fit.times}, held-out error {measured.fit.median_error:.0%} at the median", flush=True)
    tokens = measure_draft_tokens(engine, *lengths, DRAFT_BURST) if drafting else {}
    path = build_table(
        folder / "engine.parquet",
        measured.source("measured"),
        measured.profile("measured"),
        saturated=False,
        spec_tokens=tokens or None,
    )
    os.environ[TABLE_ENV] = str(path)
    return tokens


def compare(engine: Engine, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Scale the task, learn it, and play all policies on the engine and in its simulator."""
    # Rates and constants are those of an episode of this length.
    task = replace(get_task(args.task), episode_length=args.seconds)
    task = drafts_as_measured(live_task(scaled_lengths(task, LONGEST), engine))
    lengths = mean_lengths(task)
    draft_tokens = measure(engine, args, folder, lengths)
    capacity = measure_capacity(engine, *lengths)
    task = scaled_rates(task, capacity.peak_tps)
    path = write_task(folder / "live.json", TASK_ID, task, engine_calibration(task, capacity))
    os.environ[TASKS_ENV] = str(path)
    task, calibration = get_task(TASK_ID), get_calibration(TASK_ID)
    print(
        f"{engine.name}: {capacity.floor_tps:.0f} tokens/s one request at a time, {capacity.peak_tps:.0f} in batches; "
        f"{task.arrival_rate_rps:.2f} requests/s, knobs {', '.join(task.active_actions)}"
        f"; tokens per iteration by drafts {draft_tokens}",
        flush=True,
    )
    agents = {**{name: name for name in (*CONSTANTS, "heuristic")}, "learned": learned(folder, args.steps)}
    seeds = range(FIRST_SEED, FIRST_SEED + args.repeats)
    played = {name: Played() for name in agents}
    for seed in seeds:
        order = list(agents)
        random.Random(seed).shuffle(order)
        for name in order:
            play(engine, task, calibration, agents[name], seed, played[name])
            print(f"seed {seed} {name}: score {played[name].scores[-1]:.3f}", flush=True)
    simulated = {name: in_simulator(task, agents[name], seeds) for name in agents}
    return {
        "engine": engine.name,
        "task": args.task,
        "seconds": args.seconds,
        "repeats": args.repeats,
        "steps": args.steps,
        "cpus": os.cpu_count(),
        "load_average": [round(load, 1) for load in os.getloadavg()],
        "floor_tps": capacity.floor_tps,
        "peak_tps": capacity.peak_tps,
        "arrival_rate_rps": task.arrival_rate_rps,
        "knobs": list(task.active_actions),
        "draft_tokens": draft_tokens,
        "slo_ms": task.slo_target_ms,
        "agents": {name: {"engine": vars(played[name]), "simulator": simulated[name]} for name in agents},
    }


def learned(folder: Path, steps: int) -> str:
    """Name of a policy that PPO learns on the scaled task in the simulator."""
    from agents.ppo_demo import PpoSettings, local_envs, train

    settings = PpoSettings(schedule_steps=steps)
    out = folder / "learned"
    train(lambda hold: local_envs(TASK_ID, settings, hold), out, steps=steps, settings=settings, progress=False)
    return f"ppo:{out / 'policy.npz'}"


def play(engine: Engine, task: TaskSpec, calibration: Calibration, agent_name: str, seed: int, into: Played) -> None:
    """Play an episode on the engine."""
    agent = make_agent(agent_name, task)
    agent.reset(1)
    mask = action_mask(task.active_actions)
    with EngineEnv(engine, task, calibration, seed=seed) as env:
        env.reset()
        info: dict[str, Any] = {}
        seen: list[ServeObservation] = []
        while not env.done:
            row = env.observation_row(fleet=True)[None].copy()
            observation, *_, info = env.step(from_row(snap(agent.act(row), mask)[0]))
            seen.append(observation)
        slo_ms = [each.slo_ms for each in task.classes]
        due = [t for t in env.timings if t.request.arrival_s < task.episode_length]
        late = sum((ms := t.ttft_ms()) is None or ms > slo_ms[t.request.class_index] for t in due)
        seconds = [entry["metrics"] for entry in env.episode_log]
        into.scores.append(info["score"])
        into.tokens_per_s.append(float(np.mean([each["tokens_per_sec"] for each in seconds])))
        into.preemptions.append(sum(each["eviction_events"] for each in seconds))
        into.ttft_ms += [round(ms, 1) for t in due if (ms := t.ttft_ms()) is not None]
        into.late.append(late / max(len(due), 1))
        if not into.series:
            arrived = np.bincount([int(t.request.arrival_s) for t in due], minlength=len(seconds))
            into.series = {
                "arrivals": arrived.tolist(),
                "queue_requests": [each.queue_depth for each in seen],
                "kv_occupancy": [round(each.kv_cache_occupancy, 3) for each in seen],
                **{name: [round(each[name], 1) for each in seconds] for name in ("tokens_per_sec", "ttft_p50_ms")},
                **{knob: [entry["action"][knob] for entry in env.episode_log] for knob in task.active_actions},
            }


def in_simulator(task: TaskSpec, agent_name: str, seeds: Sequence[int]) -> dict[str, Any]:
    """The same episodes in the environment on the measured table."""
    results = run_episodes(task, make_agent(agent_name, task), seeds, keep=SERIES)
    return {
        "scores": results.scores().tolist(),
        "series": {name: np.round(results.metrics[name][:, 0], 2).tolist() for name in SERIES},
    }


# ---------------------------------------------------------------- what comes out


HEADS: Final = (
    "policy",
    "score",
    "more than the best constant",
    "in the simulator",
    "tokens/s",
    "TTFT p50 ms",
    "p99 ms",
    "late",
    "preempted",
)


def markdown(result: Mapping[str, Any]) -> str:
    """The document's part."""
    scores = {name: np.array(each["engine"]["scores"]) for name, each in result["agents"].items()}
    best = max((name for name in scores if name.startswith("constant")), key=lambda n: scores[n].mean())
    drafted = ", ".join(f"{tokens:.2f} with {length}" for length, tokens in result["draft_tokens"].items())
    lines = [
        "<!-- written by benchmarks/live/policies.py; do not edit -->",
        "",
        f"{result['engine']} on {result['cpus']} cores at a load average of {result['load_average'][-1]}: "
        f"{result['floor_tps']:.0f} tokens/s one request at a time, {result['peak_tps']:.0f} in batches. "
        f"Task {result['task']} scaled to {result['arrival_rate_rps']:.2f} requests/s outside its surges, "
        f"{result['repeats']} episodes of {result['seconds']} s for each policy, 95% intervals over them; the best "
        "constant was chosen on these episodes, which favours it; knobs: "
        f"{', '.join(result['knobs'])}; {result['steps']} training steps."
        + (f" Tokens that an iteration writes for a sequence, by draft length: {drafted}." if drafted else ""),
        "",
    ]
    rows = []
    for name, each in result["agents"].items():
        real, simulated = each["engine"], float(np.mean(each["simulator"]["scores"]))
        gap = "" if name == best else ranged(scores[name] - scores[best], "+")
        p50, p99 = np.quantile(real["ttft_ms"], (0.5, 0.99)) if real["ttft_ms"] else (np.nan, np.nan)
        tokens, late, preempted = (float(np.mean(real[key])) for key in ("tokens_per_s", "late", "preemptions"))
        figures = (f"{simulated:.3f}", f"{tokens:.0f}", f"{p50:.0f}", f"{p99:.0f}", f"{late:.1%}", f"{preempted:.0f}")
        rows.append((name, ranged(scores[name]), gap, *figures))
    return "\n".join([*lines, *table(HEADS, rows)]) + "\n"


def ranged(values: FloatArray, sign: str = "") -> str:
    """Mean and interval; the mean alone of a single value."""
    if len(values) < 2:
        return f"{values.mean():{sign}.3f}"
    x = interval(values)
    return f"{x.mean:{sign}.3f} [{x.low:{sign}.3f}, {x.high:{sign}.3f}]"


def draw(result: Mapping[str, Any]) -> None:
    """One episode of the learned policy: the load, the knobs, and what engine and simulator made of them."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    agent = result["agents"]["learned"]
    real, simulated = agent["engine"]["series"], agent["simulator"]["series"]
    figure, axes = plt.subplots(5, 1, figsize=(9, 8.5), sharex=True, layout="constrained")
    axes[0].step(range(len(real["arrivals"])), real["arrivals"], where="post", color="#444444")
    axes[0].set_ylabel("arrivals/s")
    for name, most in {knob: max(*real[knob], 1) for knob in result["knobs"]}.items():
        share = np.array(real[name]) / most
        axes[1].step(range(len(share)), share, where="post", label=f"{name} / {most:g}")
    axes[1].set_ylabel("knobs")
    axes[1].set_ylim(-0.05, 1.05)
    axes[1].legend(fontsize=7)
    for axis, name, label in (
        (axes[2], "queue_requests", "waiting"),
        (axes[3], "kv_occupancy", "KV cache in use"),
        (axes[4], "ttft_p50_ms", "TTFT p50, ms"),
    ):
        axis.plot(real[name], color="#1f4e79", label=f"the engine ({result['engine']})")
        axis.plot(simulated[name], color="#b0b0b0", label="the simulator of it, measured before")
        axis.set_ylabel(label)
    axes[4].set_yscale("symlog", linthresh=10)
    axes[4].axhline(
        result["slo_ms"], color="#b22222", linestyle="--", linewidth=1, label="objective of the first class"
    )
    axes[4].set_xlabel("second of the episode")
    axes[2].legend(fontsize=7)
    axes[4].legend(fontsize=7)
    figure.suptitle(
        f"Task {result['task']}, seed {FIRST_SEED}: an episode of the learned policy on the engine", fontsize=10
    )
    figure.savefig(FIGURE, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()
