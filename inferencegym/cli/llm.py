"""``inferencegym llm``: a language model plays an episode on a server."""

from __future__ import annotations

import argparse
import json
from contextlib import closing
from dataclasses import asdict

from agents.policies.llm import Game, LlmAgent, LlmSettings, ServingGame, TrafficGame


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options; the model's endpoint is set by INFERENCEGYM_LLM_URL, _KEY and _MODEL."""
    parser.add_argument("--server", default="http://localhost:7860", help="URL of the InferenceGym server")
    parser.add_argument("--family", choices=("serving", "traffic"), default="serving")
    parser.add_argument("--task", help="task id (default 1, or task_easy)")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--model", help="name of the model (default: INFERENCEGYM_LLM_MODEL)")
    parser.add_argument("--every", type=int, default=1, help="ask for an action every N steps and hold it in between")
    parser.add_argument("--no-tools", action="store_true", help="ask for JSON in the reply text instead of tool calls")
    parser.add_argument("--max-requests", type=int, default=400)
    parser.add_argument("--max-tokens", type=int, default=2_000_000)
    parser.add_argument(
        "--max-cost", type=float, default=float("inf"), help="stop at this cost, in the unit of the prices"
    )
    parser.add_argument("--input-price", type=float, default=0.0, help="price of a million prompt tokens")
    parser.add_argument("--output-price", type=float, default=0.0, help="price of a million reply tokens")


def run(args: argparse.Namespace) -> int:
    """Play and print the result as JSON, without its list of actions."""
    settings = LlmSettings.from_environment(
        model=args.model,
        tools="off" if args.no_tools else "auto",
        every=args.every,
        max_requests=args.max_requests,
        max_tokens=args.max_tokens,
        max_cost=args.max_cost,
        input_price=args.input_price,
        output_price=args.output_price,
    )
    game: Game
    if args.family == "traffic":
        game = TrafficGame(args.server, args.task or "task_easy")
    else:
        game = ServingGame(args.server, args.task or 1)
    with closing(LlmAgent(settings)) as agent, closing(game):
        result = agent.run_episode(game, args.seed)
    told = asdict(result)
    del told["actions"]
    print(json.dumps(told, indent=1))
    return 0
