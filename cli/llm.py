"""``inferencegym llm``: a language model plays episodes on a server."""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from cli import seed_count

if TYPE_CHECKING:
    from agents.integrations.llm import Episode, Turn


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options; the model's endpoint is set by INFERENCEGYM_LLM_URL, _KEY and _MODEL."""
    parser.add_argument("--server", default="http://localhost:7860", help="URL of the InferenceGym server")
    parser.add_argument(
        "--family", choices=("serving", "traffic"), default="serving", help="environment to play (default serving)"
    )
    parser.add_argument("--task", help="task id (default 1, or task_easy)")
    seeds = parser.add_mutually_exclusive_group()
    seeds.add_argument("--seed", type=int, default=42, help="seed of the episode (default 42)")
    seeds.add_argument("--seeds", type=seed_count(2), help="play this many held-out seeds, for a mean score")
    parser.add_argument("--model", help="name of the model (default: INFERENCEGYM_LLM_MODEL)")
    parser.add_argument("--every", type=int, help="seconds that an answer holds, at most 60 (default 10; traffic: 1)")
    parser.add_argument("--no-tools", action="store_true", help="ask for JSON in the reply text instead of tool calls")
    parser.add_argument(
        "--max-tokens", type=int, default=4096, help="maximum tokens per reply, thinking included (default %(default)s)"
    )
    parser.add_argument("--temperature", type=float, help="sampling temperature (default: the endpoint's own)")
    parser.add_argument(
        "--transcript", type=Path, metavar="FILE", help="write the conversation to this file, as Markdown"
    )


def run(args: argparse.Namespace) -> int:
    """Play and print score, answers and tokens as JSON; of several episodes the mean score, and sums."""
    from agents.integrations.llm import ChatModel, play
    from inferencegym.errors import refusal
    from inferencegym.files import prepare_output

    every = args.every if args.every is not None else 1 if args.family == "traffic" else 10
    for name, value in (("every", every), ("max_tokens", args.max_tokens)):
        if value < 1:
            raise refusal(name, value, "at least 1")
    if args.seeds:
        from agents.evaluate import interval
        from agents.seeds import held_out_seeds
    seeds = held_out_seeds(args.seeds) if args.seeds else [args.seed]
    if args.transcript is not None:
        prepare_output(args.transcript)
    model = ChatModel.from_environment(
        args.model, max_tokens=args.max_tokens, temperature=args.temperature, tools=not args.no_tools
    )
    scores: list[float] = []
    turns: list[Turn] = []
    invalid = 0
    # Written as it goes, so that an endpoint that fails loses nothing that was said before.
    transcript = (args.transcript or Path(os.devnull)).open("w", encoding="utf-8", buffering=1)
    with closing(model), transcript:
        for seed in seeds:
            with closing(_episode(args, seed, every)) as episode:
                transcript.write(f"# {model.name} plays seed {seed}\n\n{_quoted(episode.briefing)}\n")
                for number, turn in enumerate(play(model, episode), start=1):
                    turns.append(turn)
                    transcript.write(_told(number, turn))
                assert episode.score is not None
                scores.append(episode.score)
                invalid += episode.invalid_answers
            if args.seeds:
                print(f"seed {seed}: {scores[-1]:.3f}", file=sys.stderr, flush=True)
        result = {
            "model": model.name,
            "score": interval(scores).to_dict() if args.seeds else scores[0],
            "scores": dict(zip(seeds, scores, strict=True)),
            "answers": len(turns),
            "invalid_answers": invalid,
            "cut_off_answers": sum(turn.reply.cut_off for turn in turns),
            "prompt_tokens": sum(turn.reply.prompt_tokens for turn in turns),
            "completion_tokens": sum(turn.reply.completion_tokens for turn in turns),
            "used_tools": model.tools,
        }
        printed = json.dumps(result, indent=1)
        transcript.write(f"\n## Result\n\n{_quoted(printed)}")
    print(printed)
    if result["cut_off_answers"]:
        print(f"{result['cut_off_answers']} of {len(turns)} answers were cut off: raise --max-tokens", file=sys.stderr)
    return 0


def _episode(args: argparse.Namespace, seed: int, every: int) -> Episode:
    from agents.integrations.llm import ServingText, TrafficText

    if args.family == "traffic":
        return TrafficText(args.server, args.task or "task_easy", seed, every)
    return ServingText(args.server, args.task or 1, seed, every)


def _told(number: int, turn: Turn) -> str:
    """One turn in Markdown."""
    reply = turn.reply
    thoughts = f"Thought:\n\n{_quoted(reply.thoughts)}\n" if reply.thoughts else ""
    did = "Called the tool:" if reply.call_id else "Said:"
    return f"\n## Answer {number}\n\n{thoughts}{did}\n\n{_quoted(reply.answer)}\nSaw:\n\n{_quoted(turn.seen)}"


def _quoted(text: str) -> str:
    """The text as an indented block, in which nothing is markup."""
    return "".join(f"    {line}\n" for line in text.splitlines())
