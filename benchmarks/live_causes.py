"""Why a simulator that counts tokens of cache and serves by class misleads about an engine that does neither.

    python benchmarks/live_causes.py       half a minute; writes results/live_causes.md

The episodes that policies played on vLLM for CPU (``live_policies.py --first-come``: first come first served, blocks of
128 tokens) are played again in the discrete-event reference, on the iteration times that ``engine_fidelity.py``
measured: by class or first come first served, in the engine's blocks or in tokens. No engine is needed.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from agents.episodes import run_episodes
from agents.registry import make_agent
from benchmarks.live_policies import BLOCK_TOKENS, FIRST_COME, FIRST_SEED, RESULTS, TASK_ID, engine_before
from env.reference import ReferenceBatch
from inferencegym.files import write_text
from inferencegym.tasks import get_task

AGENTS: Final = (
    'constant:{"batch_size": 16, "spec_length": 0}',
    'constant:{"batch_size": 64, "spec_length": 0}',
    'constant:{"batch_size": 64, "kv_budget": 0.3}',
    'constant:{"batch_size": 64, "kv_budget": 0.15}',
    "heuristic",
)
WAYS: Final = {
    "first come, blocks": (False, BLOCK_TOKENS),
    "first come, tokens": (False, 1),
    "by class, blocks": (True, BLOCK_TOKENS),
    "by class, tokens": (True, 1),
}


def main() -> None:
    seen = json.loads((RESULTS / f"{FIRST_COME}.json").read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        grades = {
            way: played(Path(folder), by_class, block_tokens, seen) for way, (by_class, block_tokens) in WAYS.items()
        }
    print(text := markdown(grades, seen))
    write_text(RESULTS / "live_causes.md", text)


def played(folder: Path, by_class: bool, block_tokens: int, seen: Mapping[str, Any]) -> dict[str, Sequence[float]]:
    """Grades of all agents in the reference, on the traffic that the engine had."""
    knobs = [name for name in seen["knobs"] if name != "spec_length"]  # the reference accepts drafts of another kind
    engine_before(folder, {**seen, "knobs": knobs}, block_tokens)
    task, seeds = get_task(TASK_ID), range(FIRST_SEED, FIRST_SEED + seen["repeats"])
    batch = partial(ReferenceBatch, by_class=by_class)
    return {name: run_episodes(task, make_agent(name, task), seeds, batch_type=batch).scores() for name in AGENTS}


def markdown(grades: Mapping[str, Mapping[str, Sequence[float]]], seen: Mapping[str, Any]) -> str:
    """The document's part."""
    lines = [
        "<!-- written by benchmarks/live_causes.py; do not edit -->",
        "",
        f"| policy, without drafts | vLLM: first come, blocks of {BLOCK_TOKENS} | {' | '.join(grades)} |",
        "|---" * (2 + len(grades)) + "|",
    ]
    for name in AGENTS:
        real = seen["agents"].get(name, {"engine": {"scores": []}})["engine"]["scores"]
        told = f"{np.mean(real):.3f}" if real else ""
        lines.append(f"| {' | '.join((name, told, *(f'{np.mean(way[name]):.3f}' for way in grades.values())))} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
