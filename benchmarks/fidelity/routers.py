"""How much a queue shared by all replicas flatters a fleet: loads under every router, in the discrete-event engine.

    python -m benchmarks.fidelity.routers     writes results/routers.md, in two minutes

Llama-3.1-8B in FP16 on 2, 4 and 8 H100s, each with the same load. Gaps between arrivals have a coefficient of variation
of 1 where they are calm (Poisson) and of 3 where they are bursty. Lengths are log-normal. In conversations every prompt
repeats the earlier turns, so that the router decides which of them a replica has in its cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import product
from typing import Final

import numpy as np

from benchmarks.report import RESULTS
from inferencegym.files import write_text
from inferencegym.models import ROUTERS, ServeAction
from ops.log.reader import with_blocks
from ops.played import PlayedLoad
from simulator.hardware.catalogue import table_path
from simulator.hardware.tables import FloatArray, load_tables
from simulator.load.prefix import BLOCK_TOKENS
from simulator.load.requests import RequestLog
from simulator.whatif import WhatIf

ACTION: Final = ServeAction.from_dict({"kv_budget": 0.9, "batch_size": 256})
REPLICAS: Final = (2, 4, 8)
SPAN_S: Final = 300.0
RATE_RPS: Final = 22.0
"""Requests per second of a replica, calm and bursty."""
CONVERSATIONS_RPS: Final = 0.5
"""New conversations per second of a replica."""
TURNS: Final = 8
PROMPT_TOKENS: Final = 1000.0
OUTPUT_TOKENS: Final = 200.0
READ_S: Final = 25.0
"""Mean time (s) from a turn to the next."""


def main() -> None:
    tables = load_tables(table_path("h100-llama-3.1-8b"))
    loads = {
        "calm": partial(single_requests, 1.0),
        "bursty": partial(single_requests, 3.0),
        "conversations": conversations,
    }
    found = {}
    for (name, load), replicas in product(loads.items(), REPLICAS):
        log = load(replicas)
        played = ROUTERS if len(log.follows) else ROUTERS[:-1]
        found[name, replicas] = {r: PlayedLoad(ACTION, log, tables, r, replicas).report() for r in played}
    text = markdown(found)
    print(text)
    write_text(RESULTS / "routers.md", text)


def single_requests(cv: float, replicas: int) -> RequestLog:
    """Requests that share no prefix."""
    rng = np.random.default_rng([replicas, 0])
    at = arrivals(RATE_RPS * replicas, cv, rng)
    n = len(at)
    return RequestLog(at, lengths(PROMPT_TOKENS, n, rng), lengths(OUTPUT_TOKENS, n, rng), np.zeros(n, dtype=np.int64))


def conversations(replicas: int) -> RequestLog:
    """Conversations of eight turns, without a common system prompt."""
    rng = np.random.default_rng([replicas, 1])
    turns: list[tuple[float, float, float, int]] = []
    for i, begin in enumerate(arrivals(CONVERSATIONS_RPS * replicas, 1.0, rng)):
        prompts, outputs = lengths(PROMPT_TOKENS, TURNS, rng), lengths(OUTPUT_TOKENS, TURNS, rng)
        context = np.cumsum(prompts + outputs)
        at = begin + np.concatenate([[0.0], np.cumsum(rng.exponential(READ_S, TURNS - 1))])
        turns += zip(at.tolist(), (context - outputs).tolist(), outputs.tolist(), [i] * TURNS, strict=True)
    turns.sort()
    at, prompt, output, conversation = (np.array(column) for column in zip(*turns, strict=True))
    blocks = [
        tuple((i, k) for k in range(int(tokens) // BLOCK_TOKENS))
        for i, tokens in zip(conversation.tolist(), prompt.tolist(), strict=True)
    ]
    return with_blocks(RequestLog(at, prompt, output, np.zeros(len(at), dtype=np.int64)), blocks)


def arrivals(rate_rps: float, cv: float, rng: np.random.Generator) -> FloatArray:
    """Arrivals (s) within the span, with gamma gaps of this coefficient of variation."""
    at: FloatArray = np.cumsum(rng.gamma(cv**-2, cv**2 / rate_rps, int(2 * rate_rps * SPAN_S) + 1000))
    return at[at < SPAN_S]


def lengths(mean: float, n: int, rng: np.random.Generator) -> FloatArray:
    """Log-normal lengths (tokens) with a coefficient of variation of 1."""
    drawn = rng.lognormal(np.log(mean) - 0.5 * np.log(2.0), np.sqrt(np.log(2.0)), n)
    return np.maximum(1.0, np.rint(drawn))


def markdown(found: Mapping[tuple[str, int], Mapping[str, WhatIf]]) -> str:
    """Table of TTFT: a row for each load and number of replicas, a column for each router."""
    lines = [
        "<!-- written by benchmarks/fidelity/routers.py; do not edit -->",
        "TTFT p50 / p99 in ms, in brackets p99 relative to the shared queue's:",
        "",
        f"| load | replicas | requests | {' | '.join(ROUTERS)} |",
        "|---|---|---|" + "---|" * len(ROUTERS),
    ]
    for (name, replicas), reports in found.items():
        shared = reports["shared"]
        cells = []
        for router in ROUTERS:
            if (report := reports.get(router)) is None:
                cells.append("")
                continue
            more = "" if report is shared else f" ({report.ttft_p99_ms / shared.ttft_p99_ms - 1.0:+.0%})"
            cells.append(f"{report.ttft_p50_ms:.0f} / {report.ttft_p99_ms:.0f}{more}")
        lines.append(f"| {name} | {replicas} | {shared.n_requests:,} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
