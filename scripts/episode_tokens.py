"""Tokens that a language model reads in an episode of task 3, by interface: ``python -m scripts.episode_tokens``.

It plays on the server at ``--url`` with the defaults of each interface and counts a token for every four characters, an
estimate: tokenizers differ. ``once`` counts every text once, ``prompts`` a whole conversation that is sent again with
every turn (of ``inferencegym llm`` the briefing and the latest turns).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from typing import Any, Final

from agents.integrations.inspect_ai import SECONDS_PER_ANSWER
from agents.integrations.llm import HISTORY, ServingText
from agents.integrations.text_episode import HOLD_S, TextEpisode
from agents.integrations.trl import FleetTools
from inferencegym.client.http import DEFAULT_URL
from inferencegym.client.retries import Server

TASK_ID: Final = 3
CHARACTERS: Final = 4


def _by_texts(episode: TextEpisode) -> Generator[str, None, None]:
    with closing(episode):
        yield episode.briefing
        while not episode.done:
            yield episode.answer("{}")


def _by_tools(url: str) -> Generator[str, None, None]:
    tools = FleetTools(url)
    yield tools.reset(TASK_ID, seed=0)
    while not tools.done:
        yield tools.run(HOLD_S)


def _by_harness(url: str) -> Generator[str, None, None]:
    from agents.integrations.openenv_harness import FleetSessionFactory

    with closing(FleetSessionFactory(url).create(TASK_ID, seed=0)) as session:
        yield session.initial_messages()[0]["content"]
        done = False
        while not done:
            result = session.call_tool("set_knobs", {})
            done = result.done
            yield json.dumps(result.data)


def _by_mcp(url: str) -> Generator[str, None, None]:
    session_id = ""

    def call(name: str, **arguments: Any) -> dict[str, Any]:
        params = {"name": name, "arguments": arguments, "session_id": session_id}
        result = client.post("/mcp", {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params})["result"]
        return dict(result["structuredContent"])

    with closing(Server(url)) as client:
        created = {"jsonrpc": "2.0", "id": 1, "method": "openenv/session/create"}
        session_id = client.post("/mcp", created)["result"]["session_id"]
        told = call("begin", task_id=TASK_ID, seed=0)
        yield json.dumps(told)
        while not told["done"]:
            told = call("run", seconds=HOLD_S)
            yield json.dumps(told)


INTERFACES: Final[dict[str, tuple[int, Callable[[str], Generator[str, None, None]]]]] = {
    "`inferencegym llm`": (HISTORY, lambda url: _by_texts(ServingText(url, TASK_ID, 0))),
    "Inspect": (10**6, lambda url: _by_texts(TextEpisode(url, TASK_ID, 0, {"hold": SECONDS_PER_ANSWER}))),
    "SkyRL, verifiers": (10**6, lambda url: _by_texts(TextEpisode(url, TASK_ID, 0))),
    "TRL, NeMo Gym (`run(20)`)": (10**6, _by_tools),
    "OpenEnv's harness": (10**6, _by_harness),
    "MCP (`run(20)`)": (10**6, _by_mcp),
}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", default=DEFAULT_URL)
    url = parser.parse_args().url
    print("| interface | turns | briefing | once | prompts |\n|---|---|---|---|---|")
    for name, (history, play) in INTERFACES.items():
        # The last text, that the episode is over, gets no answer.
        *texts, last = play(url)
        once = sum(map(tokens, (*texts, last)))
        print(f"| {name} | {len(texts)} | {tokens(texts[0]):,} | {once:,} | {prompt_tokens(texts, history):,} |")


def tokens(text: str) -> int:
    """Estimate for a text."""
    return len(text) // CHARACTERS


def prompt_tokens(texts: Sequence[str], history: int) -> int:
    """Tokens of all prompts, if each of the texts is answered and the first and the latest ones are sent every time."""
    briefing, *seen = map(tokens, texts)
    return sum(briefing + sum(seen[max(0, turn - history) : turn]) for turn in range(len(texts)))


if __name__ == "__main__":
    main()
