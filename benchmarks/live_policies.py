"""Policies on a real engine: the same traffic for each, several repeats, order drawn anew in every repeat.

    python benchmarks/live_policies.py --engine http://localhost:8000 --control-file /tmp/control.json

The engine's capacity is measured first and the task's traffic scaled to it. Without ``--engine`` the discrete-event
reference stands in for one. Grades of one engine and run can be compared with each other, and with no others: they are
relative to the capacity just measured.
"""

from __future__ import annotations

import argparse
import random
import statistics
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from agents.registry import load_own_agents, make_agent
from inferencegym.spaces.actions import action_mask, from_row, snap
from inferencegym.tasks import Calibration, TaskSpec, get_task
from live.engines.choose import engine_at
from live.engines.engine import Engine
from live.engines.simulated import SimulatedEngine
from live.env import EngineEnv
from live.scaling import engine_calibration, live_task, mean_lengths, measure_capacity, scaled_lengths, scaled_rates
from simulator.tables import tables_of

AGENTS = ("naive", 'constant:{"batch_size": 8}', 'constant:{"batch_size": 16}', "heuristic", "ppo")


@dataclass
class Played:
    """What each repeat of an agent gave."""

    scores: list[float] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)
    ttft_ms: list[float] = field(default_factory=list)
    late: list[float] = field(default_factory=list)

    def row(self, name: str) -> str:
        p50, p99 = np.quantile(self.ttft_ms, (0.5, 0.99)) if self.ttft_ms else (np.nan, np.nan)
        spread = statistics.stdev(self.scores) if len(self.scores) > 1 else 0.0
        score, tokens, late = (statistics.fmean(values) for values in (self.scores, self.tokens_per_s, self.late))
        return f"| {name} | {score:.3f} ± {spread:.3f} | {tokens:.0f} | {p50:.0f} | {p99:.0f} | {late:.1%} |"


def play(engine: Engine, task: TaskSpec, calibration: Calibration, agent_name: str, seed: int, into: Played) -> None:
    agent = make_agent(agent_name, task)
    agent.reset(1)
    mask = action_mask(task.active_actions)
    config = {"episode_length": task.episode_length}
    with EngineEnv(engine, task, calibration, seed=seed, config=config) as env:
        env.reset()
        info: dict[str, Any] = {}
        while not env.done:
            row = env.observation_row(fleet=True)[None].copy()
            *_, info = env.step(from_row(snap(agent.act(row), mask)[0]))
        answered = [ms for timing in env.timings if (ms := timing.ttft_ms()) is not None]
        slo_ms = [each.slo_ms for each in task.classes if each.share or each.burst_share]
        due = [t for t in env.timings if t.request.arrival_s < task.episode_length]
        late = sum((ms := t.ttft_ms()) is None or ms > slo_ms[t.request.class_index] for t in due)
        into.scores.append(info["score"])
        into.tokens_per_s.append(statistics.fmean(e["metrics"]["tokens_per_sec"] for e in env.episode_log))
        into.ttft_ms += answered
        into.late.append(late / max(len(due), 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--engine", metavar="URL")
    parser.add_argument("--control-file", type=Path)
    parser.add_argument("--backend", choices=("vllm", "sglang"), default="vllm")
    parser.add_argument("--task", default="3")
    parser.add_argument("--seconds", type=int, default=120, help="length of an episode")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--longest", type=int, default=512, help="most tokens of a request, prompt and output")
    parser.add_argument("--agents", nargs="+", default=list(AGENTS))
    args = parser.parse_args()
    load_own_agents(args.agents)
    engine: Engine = SimulatedEngine(tables_of(None), 32)
    if args.engine:
        engine = engine_at(args.backend, args.engine, args.control_file)
    task = live_task(scaled_lengths(get_task(args.task), args.longest), engine)
    capacity = measure_capacity(engine, *mean_lengths(task))
    task = scaled_rates(task, capacity.peak_tps)
    calibration = engine_calibration(task, capacity)
    print(f"{engine.name}: {capacity.floor_tps:.0f} tokens/s one request at a time, {capacity.peak_tps:.0f} in batches")
    print(f"task {task.task_id}: {task.arrival_rate_rps:.2f} requests/s, knobs {', '.join(task.active_actions)}")
    task = replace(task, episode_length=args.seconds)
    played = {name: Played() for name in args.agents}
    for repeat in range(args.repeats):
        order = list(args.agents)
        random.Random(repeat).shuffle(order)
        for name in order:
            play(engine, task, calibration, name, 9000 + repeat, played[name])
    print("| policy | grade, mean ± sd | tokens/s | TTFT p50 ms | p99 ms | late |\n|---|---|---|---|---|---|")
    for name, each in played.items():
        print(each.row(name))


if __name__ == "__main__":
    main()
