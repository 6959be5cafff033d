"""Agent sessions on a real engine: vLLM for CPU with a small random model, counted by the engine itself.

    python -m benchmarks.live.rollouts_engine             writes results/rollouts_engine.json and .md

`scripts/install_engine.sh` installs the engine (--venv says where). A session is a loop of turns: new prompt tokens, an
answer of so many tokens, a tool. Its prompt is all that came before, the answers' own token ids included, and the new
tokens; some workloads begin every session with the same system prompt. At most ``cap`` sessions are in flight, each
from its first turn to its last. Lengths and tool times are drawn from a seed and lie in the results, so that a
simulator can play the same sessions. The prefix cache is emptied before every run, and runs are played in random order.

Counts do not depend on the machine's pace, but for the order in which turns come back from their tools; repeats show
how much that is. ``computed_tokens`` is what the engine's iterations computed by its own log, with what preempted
requests computed again: its counters leave that out. ``engine_s`` adds up the times that the engine measured from a
turn's arrival to its last token, and ``client_ms`` is what a turn took besides, without its tool.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final, TypeVar

import httpx

from benchmarks.report import store, table
from live.driver import EngineApi
from live.engines.random_model import ModelShape, serve_random_model

Result = TypeVar("Result")

SHAPE: Final = ModelShape(
    n_layers=2, hidden=256, intermediate=768, n_heads=4, n_kv_heads=2, vocabulary=4096, max_positions=2048
)
BLOCK_TOKENS, POOL_BLOCKS, TOKEN_BUDGET, SLOTS = 32, 160, 512, 32
OPTIONS: Final = (
    "--block-size", str(BLOCK_TOKENS), "--max-num-batched-tokens", str(TOKEN_BUDGET), "--dtype", "float32",
    "--enable-prefix-caching", "--enable-logging-iteration-details",
    # The scheduler as it comes, without the knobs of live/engines/vllm_plugin.
    "--scheduling-policy", "fcfs", "--scheduler-cls", "vllm.v1.core.sched.scheduler.Scheduler",
)  # fmt: skip
COUNTERS: Final = {
    "prompt_tokens": "vllm:prompt_tokens_total",
    "queried_tokens": "vllm:prefix_cache_queries_total",
    "hit_tokens": "vllm:prefix_cache_hits_total",
    "generated_tokens": "vllm:generation_tokens_total",
    "preemptions": "vllm:num_preemptions_total",
}
ENGINE_TIME: Final = ("vllm:request_queue_time_seconds_sum", "vllm:request_inference_time_seconds_sum")
ITERATION: Final = re.compile(
    r"Iteration\(\d+\): \d+ context requests, (\d+) context tokens, \d+ generation requests, "
    r"(\d+) generation tokens, iteration elapsed time: ([\d.]+) ms"
)
WORD_IDS: Final = (300, SHAPE.vocabulary - 1)


@dataclass(frozen=True, slots=True)
class Workload:
    """How sessions are drawn: counts uniform between two bounds, tool times exponential with a mean (0: no tools)."""

    name: str
    sessions: int
    turns: tuple[int, int]
    new_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    tool_s: float
    caps: tuple[int, ...]
    shared_tokens: int = 0
    seed: int = 0

    def draw(self) -> list[dict[str, Any]]:
        """Sessions, each with its turns as columns; the tool of the last turn takes no time."""
        rng = random.Random(self.seed)
        sessions = []
        for number in range(self.sessions):
            turns = range(rng.randint(*self.turns))
            tools = [round(rng.expovariate(1.0 / self.tool_s), 3) if self.tool_s else 0.0 for _ in turns]
            sessions.append({
                "id": number,
                "new_tokens": [rng.randint(*self.new_tokens) for _ in turns],
                "output_tokens": [rng.randint(*self.output_tokens) for _ in turns],
                "tool_s": [*tools[:-1], 0.0],
            })  # fmt: skip
        return sessions


WORKLOADS: Final = (
    Workload("tools", 24, (4, 8), (60, 260), (8, 24), 0.4, (2, 4, 6, 8, 12, 24)),
    Workload("shared prompt", 24, (3, 7), (60, 200), (8, 24), 0.4, (2, 4, 8, 12, 24), shared_tokens=600, seed=1),
    Workload("long answers, no tools", 20, (6, 10), (20, 90), (24, 80), 0.0, (2, 4, 8, 12, 20), seed=2),
)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Agent sessions on vLLM for CPU on this machine.")
    parser.add_argument("--venv", type=Path, default=Path(".venv-engine"), help="where the engine is installed")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each workload and cap (default 3)")
    options = parser.parse_args(arguments)
    cells = [(work, cap) for work in WORKLOADS for cap in work.caps]
    plan = [cell for repeat in range(options.repeats) for cell in random.Random(repeat).sample(cells, len(cells))]
    with tempfile.TemporaryDirectory() as folder:
        result = played(options.venv, Path(folder), plan)
    print(text := markdown(result))
    store("rollouts_engine", result, text)


def played(venv: Path, folder: Path, plan: Sequence[tuple[Workload, int]]) -> dict[str, Any]:
    """Every workload and cap of the plan, in this order, on one start of the engine."""
    with serving(venv, folder, SHAPE) as (api, log_file):
        warm = Workload("warm up", 2, (2, 2), (200, 600), (8, 8), 0.0, (2,), seed=9)
        run(api, log_file, warm, 2)
        runs = [run(api, log_file, work, cap) for work, cap in plan]
        cache = api.metrics().labels("vllm:cache_config_info")
        engine = {
            "version": api.get_json("/version")["version"],
            "options": OPTIONS,
            "model": asdict(SHAPE),
            "block_tokens": int(cache["block_size"]),
            "pool_blocks": int(cache["num_gpu_blocks"]) - 1,
            "token_budget": TOKEN_BUDGET,
            "max_num_seqs": SLOTS,
            "cpus": os.cpu_count(),
        }
    works = {work.name: {**asdict(work), "sessions": work.draw()} for work, _ in plan}
    return {"engine": engine, "workloads": [works[name] for name in sorted(works)], "runs": runs}


@contextmanager
def serving(venv: Path, folder: Path, shape: ModelShape) -> Iterator[tuple[EngineApi, Path]]:
    """The engine, started here: its API and its log."""
    with serve_random_model(
        venv,
        folder,
        shape=shape,
        max_num_seqs=SLOTS,
        max_model_len=shape.max_positions,
        kv_blocks=POOL_BLOCKS + 1,  # one is vLLM's null block
        options=OPTIONS,
        environment={"VLLM_SERVER_DEV_MODE": "1"},  # offers /reset_prefix_cache
    ) as server:
        yield EngineApi(server.url).check(), server.log_file


def run(api: EngineApi, log_file: Path, work: Workload, cap: int) -> dict[str, Any]:
    """One run from an empty cache, in the engine's own numbers."""
    in_flight_s, counts = counted(api, log_file, lambda: play(api, work, cap))
    sessions = work.draw()
    turns, tools_s = (sum(f(session["tool_s"]) for session in sessions) for f in (len, sum))
    client_ms = round(1e3 * (in_flight_s - counts["engine_s"] - tools_s) / turns, 1)
    row = {"workload": work.name, "cap": cap, **counts, "client_ms": client_ms}
    print(json.dumps(row), flush=True)
    return row


def counted(
    api: EngineApi, log_file: Path, play: Callable[[], Coroutine[Any, Any, Result]]
) -> tuple[Result, dict[str, Any]]:
    """Play from an empty cache; returns what ``play`` does, and the engine's own numbers."""
    httpx.post(f"{api.url}/reset_prefix_cache", timeout=60.0).raise_for_status()
    before, log_at = api.metrics(), log_file.stat().st_size
    started = time.monotonic()
    result = asyncio.run(play())
    seconds = time.monotonic() - started
    time.sleep(1.0)  # the last iteration's statistics
    after = api.metrics()
    iterations = logged_iterations(log_file.read_bytes()[log_at:].decode("utf-8", "replace"))
    engine_s = sum(after.total(series) - before.total(series) for series in ENGINE_TIME)
    return result, {
        **{name: int(after.total(series) - before.total(series)) for name, series in COUNTERS.items()},
        "computed_tokens": int(sum(tokens for tokens, _ in iterations)),
        "iterations": len(iterations),
        **pace(iterations),
        "engine_s": round(engine_s, 1),
        "seconds": round(seconds, 1),
    }


def logged_iterations(log: str) -> list[tuple[float, float]]:
    """Tokens that each iteration computed, and its ms, as the engine's log says."""
    return [(float(context) + float(generation), float(ms)) for context, generation, ms in ITERATION.findall(log)]


def pace(iterations: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Medians: ms of an iteration that computes few tokens, and ms of each token where it computes many."""
    step_ms = median(ms for tokens, ms in iterations if tokens <= SLOTS)
    token_ms = median((ms - step_ms) / tokens for tokens, ms in iterations if tokens > 2 * SLOTS)
    return {"step_ms": round(step_ms, 2), "token_ms": round(token_ms, 4)}


async def play(api: EngineApi, work: Workload, cap: int) -> float:
    """All sessions in order, each as soon as it finds a place; returns the seconds that they held places, added up."""
    places = asyncio.Semaphore(cap)
    shared = words(random.Random(work.seed), work.shared_tokens)
    async with api.client() as client, asyncio.TaskGroup() as group:
        sessions = [group.create_task(converse(api, client, places, each, shared)) for each in work.draw()]
    return sum(session.result() for session in sessions)


async def converse(
    api: EngineApi, client: httpx.AsyncClient, places: asyncio.Semaphore, session: Mapping[str, Any], shared: list[int]
) -> float:
    """One session, which holds its place from its first turn to its last answer; returns for how many seconds."""
    rng = random.Random(session["id"])
    context = list(shared)
    async with places:
        started = time.monotonic()
        for new, output, tool_s in zip(
            *(session[name] for name in ("new_tokens", "output_tokens", "tool_s")), strict=True
        ):
            context += words(rng, new)
            context += await answer(api, client, context, output)
            await asyncio.sleep(tool_s)
        return time.monotonic() - started


async def answer(api: EngineApi, client: httpx.AsyncClient, prompt: Sequence[int], tokens: int) -> list[int]:
    """Token ids of an answer of so many tokens."""
    body = {"model": api.model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0,
            "return_token_ids": True}  # fmt: skip
    response = await client.post(f"{api.url}/v1/completions", json=body)
    response.raise_for_status()
    return list(response.json()["choices"][0]["token_ids"])


def words(rng: random.Random, n: int) -> list[int]:
    """Token ids of ordinary words."""
    return rng.choices(range(*WORD_IDS), k=n)


def markdown(result: Mapping[str, Any]) -> str:
    """The document's part; repeats of a cap as a range."""
    engine = result["engine"]
    lines = [
        "<!-- written by benchmarks/live/rollouts_engine.py; do not edit -->",
        "",
        f"vLLM {engine['version']}, a pool of {engine['pool_blocks']} blocks of {engine['block_tokens']} tokens, "
        f"{engine['token_budget']} tokens per iteration.",
        "",
    ]
    cells = []
    for name, cap in sorted({(row["workload"], row["cap"]) for row in result["runs"]}):
        rows = [row for row in result["runs"] if (row["workload"], row["cap"]) == (name, cap)]
        hits = [row["hit_tokens"] / row["queried_tokens"] for row in rows]
        columns = [
            span([row[key] for row in rows]) for key in ("computed_tokens", "preemptions", "iterations", "seconds")
        ]
        prompts = span([row["prompt_tokens"] for row in rows])
        cells.append((name, cap, prompts, span(hits, ".3f"), *columns))
    heads = (
        "workload",
        "cap",
        "prompt tokens",
        "in the cache",
        "tokens computed",
        "preemptions",
        "iterations",
        "seconds",
    )
    return "\n".join([*lines, *table(heads, cells)]) + "\n"


def span(values: Sequence[float], form: str = ",.0f") -> str:
    """Lowest and highest, or one number where they are the same."""
    low, high = (format(each, form) for each in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


if __name__ == "__main__":
    main()
