"""Three players of `inferencegym llm`, as transcripts: a script that calls the tool, one that thinks first, SmolLM2.

    python -m benchmarks.learning.transcripts --url http://localhost:7860 --smollm2 http://localhost:8000/v1

writes results/transcripts/*.md. The server of SmolLM2 is the one of docs/language-models.md; without --smollm2 the
scripts play alone. They double the batch size as long as more tokens/s are written. All play the first task.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Callable, Sequence
from typing import Any, Final

from agents.integrations.llm import TOOL_NAME
from benchmarks.learning.integration_plays import scripted_model
from benchmarks.report import RESULTS
from cli.main import main as inferencegym
from inferencegym.client.http import DEFAULT_URL
from inferencegym.models import ACTION_FIELDS, NAIVE_ACTION

FOLDER: Final = RESULTS / "transcripts"
START: Final = NAIVE_ACTION.batch_size


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--url", default=DEFAULT_URL, help="the server (default %(default)s)")
    parser.add_argument("--smollm2", metavar="URL", help="an OpenAI-compatible endpoint that serves smollm2")
    options = parser.parse_args(arguments)
    players: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {"scripted": calling, "thinking": thinking}
    for name, player in players.items():
        with scripted_model(player) as (model_url, _):
            play(name, options.url, model_url, "--every", "20")
    if options.smollm2:
        greedy = ("--no-tools", "--every", "40", "--max-tokens", "128", "--temperature", "0")
        play("smollm2", options.url, options.smollm2, *greedy)


def play(name: str, url: str, model_url: str, *options: str) -> None:
    """One episode of the model at an endpoint."""
    os.environ["INFERENCEGYM_LLM_URL"] = model_url
    command = ["llm", "--server", url, "--task", "1", "--model", name, "--transcript", str(FOLDER / f"{name}.md")]
    if inferencegym([*command, *options]):
        raise SystemExit(f"{name} did not play to the end")


def calling(request: dict[str, Any]) -> dict[str, Any]:
    """Call of the tool."""
    paces, size = climbed(request["messages"])
    function = {"name": TOOL_NAME, "arguments": json.dumps({"batch_size": size})}
    return {"content": None, "tool_calls": [{"id": f"call-{len(paces)}", "type": "function", "function": function}]}


def thinking(request: dict[str, Any]) -> dict[str, Any]:
    """Text that begins with a thinking block."""
    paces, size = climbed(request["messages"])
    told = ", ".join(f"{pace:.0f} with {tried}" for tried, pace in paces.items()) or "nothing yet"
    why = "I have seen no faster size." if size in paces else "I try twice the fastest."
    return {"content": f"<think>\nTokens/s so far: {told}. {why}\n</think>\n{json.dumps({'batch_size': size})}"}


def climbed(messages: Sequence[dict[str, Any]]) -> tuple[dict[int, float], int]:
    """Tokens/s of the batch sizes in a conversation, and the next size: twice the fastest, or it if that was tried."""
    paces = {}
    for message in messages:
        told = message.get("content") or ""
        size = re.search(r'^Knobs: .*"batch_size": (\d+)', told, re.MULTILINE)
        pace = re.search(r'"tokens_per_sec": ([\d.]+)', told)
        if size and pace:
            paces[int(size[1])] = float(pace[1])
    fastest = max(paces, key=paces.__getitem__, default=START)
    return paces, fastest if 2 * fastest in paces else min(2 * fastest, ACTION_FIELDS["batch_size"].high)


if __name__ == "__main__":
    main()
