"""Rows of a NeMo Gym data set: the briefing of an episode, its tools, and which episode it is.

    python -m agents.integrations.nemo_gym.rows --url http://localhost:7860 --tasks 1 3 --seeds 0 1 > rows.jsonl

Task and seed fix the traffic and hence the first state, which a row tells the model.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from agents.integrations.trl import MAX_SECONDS, FleetTools
from inferencegym.client.http import DEFAULT_URL
from inferencegym.messages import plain_schema
from inferencegym.models import ServeActionMessage


class RunSeconds(BaseModel):
    """Arguments of the tool ``run``."""

    model_config = ConfigDict(extra="forbid")

    seconds: int = Field(ge=1, le=MAX_SECONDS)


class Nothing(BaseModel):
    """Arguments of the tool ``observe``."""

    model_config = ConfigDict(extra="forbid")


ARGUMENTS: dict[str, type[BaseModel]] = {"set_knobs": ServeActionMessage, "run": RunSeconds, "observe": Nothing}
"""The tools, by name, and what they take."""


def tool(name: str) -> dict[str, Any]:
    """A tool as OpenAI's Responses interface describes it."""
    summary = str(getattr(FleetTools, name).__doc__).split("\n", 1)[0]
    schema = plain_schema(ARGUMENTS[name])
    return {"type": "function", "name": name, "description": summary, "parameters": schema, "strict": False}


def rows(url: str, tasks: Sequence[int | str], seeds: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Every task with every seed."""
    fleet = FleetTools(url)
    for task_id, seed in product(tasks, seeds):
        prompt = [{"role": "user", "content": fleet.reset(task_id, seed)}]
        asked = {"input": prompt, "tools": [tool(name) for name in ARGUMENTS], "parallel_tool_calls": False}
        yield {"responses_create_params": asked, "task_id": task_id, "seed": seed}


def main() -> None:
    """Write rows to the standard output."""
    parser = argparse.ArgumentParser(description="Rows for NeMo Gym, one JSON object a line")
    parser.add_argument("--url", default=DEFAULT_URL)
    parser.add_argument("--tasks", nargs="+", default=["1"], metavar="ID")
    parser.add_argument("--seeds", nargs="+", default=[0], type=int)
    chosen = parser.parse_args()
    tasks = [int(name) if name.isdecimal() else name for name in chosen.tasks]
    for row in rows(chosen.url, tasks, chosen.seeds):
        sys.stdout.write(f"{json.dumps(row)}\n")


if __name__ == "__main__":
    main()
