"""Controllers of agent sessions on a real engine, one of them learned in the simulator of that engine.

    python -m benchmarks.live.rollouts_policies             writes results/rollouts_policies.json and .md

vLLM for CPU serves a small random model (`scripts/install_engine.sh` installs the engine, --venv says where). Its table
is measured with `inferencegym measure`, and the simulator on that table chooses the best constant cap and trains PPO,
both on training draws of ENGINE_TASK (extra `rl`). Then every controller plays the same workloads, drawn anew, through
:class:`inferencegym.session_gate.SessionGate`, in an order drawn for each workload. The prefix cache is emptied before
every run. Tokens are the engine's own counts, and seconds are compared within a workload only: the machine is shared.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np

from agents.evaluate import interval
from agents.policies.rollouts import RolloutPolicy
from agents.rollouts_ppo import train
from agents.seeds import TRAINING_SEEDS, VALIDATION_SEEDS, held_out_seeds
from benchmarks.live.rollouts_engine import (
    SLOTS,
    TOKEN_BUDGET,
    answer,
    counted,
    serving,
    words,
)
from benchmarks.report import store, table
from env.rollouts.agents import CAPS, make_controller, play_row, scores
from env.rollouts.env import draw_row
from env.rollouts.tasks import RolloutConfig, RolloutTask, TaskFile, WorkloadEntry
from inferencegym.rollouts import MAX_SESSIONS, Seen
from live.driver import EngineApi
from live.engines.random_model import ModelShape
from live.measure import MeasureSettings, measure_engine
from live.session_gate import SessionGate
from simulator.events.requests import Sessions
from simulator.hardware.tables import TABLE_ENV, FloatArray
from simulator.offline.table import build_table

SHAPE: Final = ModelShape(
    n_layers=6, hidden=512, intermediate=1536, n_heads=8, n_kv_heads=2, vocabulary=4096, max_positions=4096
)
ENGINE_TASK: Final = RolloutTask(
    "engine",
    TaskFile(
        name="Sessions on the engine measured here",
        gym_id="none",
        difficulty="hard",
        description="Lengths, turns and tools from ranges that suit a pool of 5,120 tokens.",
        episode_length=600,
        workloads=(
            WorkloadEntry(
                sessions=20,
                turns=(4, 12),
                first_tokens=(60, 600),
                new_tokens=(30, 180),
                answer_tokens=(8, 32),
                tool_s=(0.2, 1.0),
                pool_sessions=(1e6, 1e6),  # as much as the engine has
            ),
        ),
    ),
)
RULES: Final = ("kv_target", "budget", "fit")
Controller = Callable[[Seen], float]
Make = Callable[[], Controller]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Controllers of agent sessions on vLLM for CPU on this machine.")
    parser.add_argument("--venv", type=Path, default=Path(".venv-engine"), help="where the engine is installed")
    parser.add_argument("--workloads", type=int, default=5, help="workloads drawn anew (default 5)")
    parser.add_argument("--steps", type=int, default=200_000, help="steps that PPO learns from (default 200,000)")
    parser.add_argument("--measure-seconds", type=float, default=120.0, help="load of the measurement (default 120)")
    parser.add_argument("--table", type=Path, help="the engine's table, if `inferencegym measure` has made it already")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        result = compare(options, Path(folder))
    print(text := markdown(result))
    store("rollouts_policies", result, text)


def compare(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure the engine, choose and train in its simulator, then play."""
    with serving(options.venv, folder, SHAPE) as (api, log_file):
        table = options.table or measured_table(api, folder / "engine.parquet", options.measure_seconds)
        os.environ[TABLE_ENV] = str(table)
        controllers, validation = prepared(folder / "policy.npz", options.steps)
        runs = []
        for seed in held_out_seeds(options.workloads):
            for name in random.Random(seed).sample(list(controllers), len(controllers)):
                runs.append(played(api, log_file, seed, name, controllers[name]))
                print(json.dumps(runs[-1]), flush=True)
        version = api.get_json("/version")["version"]
    return {
        "engine": version,
        "workloads": options.workloads,
        "steps": options.steps,
        "validation": validation,
        "runs": runs,
    }


def measured_table(api: EngineApi, path: Path, seconds: float) -> Path:
    """The engine's table, as `inferencegym measure` makes it."""
    settings = MeasureSettings(
        seconds,
        most_clients=SLOTS // 2,
        max_num_seqs=SLOTS,
        max_batched_tokens=TOKEN_BUDGET,
        kv_bytes_per_token=float(SHAPE.kv_bytes_per_token(4)),
    )
    measured = measure_engine(api, settings)
    print(f"measured: {measured.fit.times}, held-out error {measured.fit.median_error:.0%} at the median", flush=True)
    return build_table(path, measured.source("measured"), measured.profile("measured"), saturated=False)


def prepared(policy: Path, steps: int) -> tuple[dict[str, Make], dict[str, float]]:
    """Controllers by name, and their scores on the simulator's validation draws.

    The constants are the best cap of the training draws, and twice that.
    """
    constants = {cap: scores(constant(cap), TRAINING_SEEDS, ENGINE_TASK).mean() for cap in CAPS}
    best = max(constants, key=lambda cap: float(constants[cap]))
    train(ENGINE_TASK, steps, 0, policy, VALIDATION_SEEDS)
    controllers: dict[str, Make] = {f"constant {cap}": constant(cap) for cap in (best, 2 * best)}
    controllers |= {name: partial(make_controller, name) for name in RULES}
    controllers |= {"PPO": partial(RolloutPolicy, policy), "no cap": constant(MAX_SESSIONS)}
    validation = {name: scores(make, VALIDATION_SEEDS, ENGINE_TASK).mean() for name, make in controllers.items()}
    print(json.dumps(validation), flush=True)
    return controllers, {name: round(float(value), 3) for name, value in validation.items()}


def constant(cap: int) -> Make:
    return partial(make_controller, f"constant:{cap}")


def played(api: EngineApi, log_file: Path, seed: int, name: str, make: Make) -> dict[str, Any]:
    """A workload under a controller on the engine, and in the simulator of its table."""
    row = draw_row(ENGINE_TASK, seed, RolloutConfig())
    drawn, most = turns_of(row.workload.sessions), row.workload.kv_pool_tokens
    sessions = [turns for turns in drawn if max(prompt + out for prompt, out, _ in turns) <= most]
    mean_cap, counts = counted(api, log_file, lambda: play(api, sessions, make()))
    play_row(row, make())
    state = row.run.state
    return {
        "seed": seed,
        "controller": name,
        "mean_cap": round(mean_cap, 1),
        **counts,
        "simulated_tokens": int(state.prefilled_tokens + state.decoded_tokens),
        "simulated_s": round(row.totals()["elapsed_s"], 1),
    }


def turns_of(sessions: Sessions) -> list[list[tuple[int, int, float]]]:
    """Each session's turns: tokens of the prompt, tokens of the answer, seconds of the tool."""
    turns = sessions.turns
    columns = (turns.prompt_tokens.tolist(), turns.output_tokens.tolist(), sessions.tool_s.tolist())
    rows = list(zip(*columns, strict=True))
    return [rows[first:after] for first, after in pairwise(sessions.first_turn.tolist())]


async def play(api: EngineApi, sessions: Sequence[Sequence[tuple[int, int, float]]], policy: Controller) -> float:
    """All sessions through the gate; returns the mean cap in force."""
    with tempfile.TemporaryDirectory() as folder:
        audit = Path(folder) / "audit"
        gate = SessionGate(api.url, policy, bounds=(1, MAX_SESSIONS), audit=audit)
        async with gate, api.client() as client, asyncio.TaskGroup() as group:
            for number, turns in enumerate(sessions):
                group.create_task(converse(api, client, gate, number, turns))
        decided = [json.loads(line) for line in audit.read_text().splitlines()]
    return float(np.mean([min(line["cap"], len(sessions)) for line in decided]))


async def converse(
    api: EngineApi, client: Any, gate: SessionGate, number: int, turns: Sequence[tuple[int, int, float]]
) -> None:
    """One session through the gate."""
    rng, context = random.Random(number), list[int]()
    async with gate.session(str(number)):
        for turn, (prompt_tokens, answer_tokens, tool_s) in enumerate(turns):
            context += words(rng, prompt_tokens - len(context))
            async with gate.turn(prompt_tokens) as session:
                context += await answer(api, client, context, answer_tokens)
                session.report(prompt_tokens, answer_tokens)
            if turn < len(turns) - 1:
                await asyncio.sleep(tool_s)


def markdown(result: Mapping[str, Any]) -> str:
    """The document's part: each controller compared with the best constant, paired by workload."""
    found = by_controller(result["runs"])
    constants = [name for name in found if name.startswith("constant")]
    # The best constant, chosen on these runs, which favours it.
    best = min(constants, key=lambda name: float(np.log(found[name]["seconds"]).mean()))
    lines = [
        "<!-- written by benchmarks/live/rollouts_policies.py; do not edit -->",
        "",
        f"vLLM {result['engine']}, {result['workloads']} new workloads; PPO learned from {result['steps']:,} "
        f"steps. Differences are from {best}, the best constant, chosen on these runs, which favours it, with 95% "
        "intervals over the workloads.",
        "",
    ]
    rows = []
    for name in sorted(found, key=lambda name: float(np.log(found[name]["seconds"]).mean())):
        columns = found[name]
        compared = [
            "" if name == best else less(columns[key], found[best][key]) for key in ("seconds", "computed_tokens")
        ]
        rate, simulated = (
            float((columns[key] / columns["generated_tokens"]).mean())
            for key in ("computed_tokens", "simulated_tokens")
        )
        hits = float((columns["hit_tokens"] / columns["queried_tokens"]).mean())
        cells = [*compared, f"{rate:.1f} ({simulated:.1f})", f"{hits:.2f}", f"{columns['preemptions'].sum():.0f}"]
        cells += [f"{columns['mean_cap'].mean():.1f}", f"{result['validation'][name]:.3f}"]
        rows.append((name, *cells))
    heads = (
        "policy", "time", "tokens computed", "tokens computed for each written one (simulator)", "in the cache",
        "preemptions", "mean cap", "score in the simulator",
    )  # fmt: skip
    return "\n".join([*lines, *table(heads, rows)]) + "\n"


def by_controller(runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, FloatArray]]:
    """Columns of each controller's runs, in the order of the workloads."""
    names = dict.fromkeys(run["controller"] for run in runs)
    kept = {
        name: sorted((run for run in runs if run["controller"] == name), key=lambda run: run["seed"]) for name in names
    }
    keys = [key for key in runs[0] if key not in ("seed", "controller")]
    return {name: {key: np.array([float(run[key]) for run in rows]) for key in keys} for name, rows in kept.items()}


def less(ours: FloatArray, theirs: FloatArray) -> str:
    """How much less or more, as a geometric mean over pairs with its 95% interval."""
    if len(ours) < 2:
        return f"{float((ours / theirs)[0]) - 1.0:+.0%}"
    found = interval(np.log(ours / theirs))
    mean, low, high = (float(np.expm1(each)) for each in (found.mean, found.low, found.high))
    return f"{mean:+.0%} [{low:+.0%}, {high:+.0%}]"


if __name__ == "__main__":
    main()
