"""The command line: ``inferencegym COMMAND``.

Each command is a module of ``cli`` with ``add_arguments(parser)`` and ``run(args) -> int``, and a line of
:data:`COMMANDS`; it is imported only when it is called, so ``--help`` stays instant.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Sequence
from typing import Final, NoReturn

from inferencegym import __version__
from inferencegym.errors import InferenceGymError, did_you_mean
from inferencegym.installation import INTERPRETED, install_hint, interpreted_modules

COMMANDS: Final[dict[str, str]] = {
    "simulate": "simulate one configuration under a steady, bursty or recorded load",
    "evaluate": "score policies on held-out seeds with confidence intervals",
    "quality": "report what a task rewards, and how much control gains over constant settings",
    "calibrate": "measure the throughput and price constants of tasks",
    "train": "train a PPO policy",
    "llm": "let a language model play an episode on a server",
    "sweep": "evaluate policies and seeds on many workers",
    "verify": "replay episode logs and check every number",
    "leaderboard": "add scores to a leaderboard, or check it by replay",
    "import-bench": "turn benchmark results of your engine into a lookup table",
    "measure": "turn a short load on your engine into a lookup table",
    "import-trace": "turn a request log into a task",
    "plan": "find the GPUs and settings that serve a request log within objectives",
    "shadow": "compare policies on a request log",
    "fidelity": "score predictions of any simulator on measured runs",
    "live": "let a policy observe or control a running engine",
    "hardware": "list the lookup tables that ship, and those that can be built",
    "build-table": "build the lookup table of a card and model from measured kernel timings",
    "serve": "start the HTTP and WebSocket server",
}
"""Commands and their one-line help; a command's module has its name, with ``_`` for ``-``."""


_KINDS: Final = {"int": "whole number", "float": "number"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status.

    Errors of this package, and missing packages of an extra, end in one line on stderr and status 2.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    chosen = next((a for a in arguments if a in COMMANDS), None)
    try:
        args = _parsed(arguments, chosen)
        if interpreted_modules():
            print(INTERPRETED, file=sys.stderr)
        return int(args.run(args))
    except InferenceGymError as error:
        print(f"inferencegym {chosen}: {'; '.join([str(error), *getattr(error, '__notes__', ())])}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        hint = install_hint(error)
        if hint is None:
            raise
        print(f"inferencegym {chosen}: {hint}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        return 0


def _parsed(arguments: Sequence[str], chosen: str | None) -> argparse.Namespace:
    """The arguments as options; a misspelt command or option ends with the one that was probably meant."""
    parser, commands = _parser(chosen)
    first = next((a for a in arguments if not a.startswith("-")), None)
    if chosen is None and first is not None:
        parser.error(f"no command {first!r}: {did_you_mean(first, COMMANDS, 'commands are ' + ', '.join(COMMANDS))}")
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        command = commands[args.command]
        known = re.findall(r"--[a-z-]+", command.format_help())
        told = did_you_mean(unknown[0], known, f"see inferencegym {args.command} --help")
        command.error(f"unrecognized arguments: {' '.join(unknown)}; {told}")
    return args


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, like all others, without the list of options."""

    def error(self, message: str) -> NoReturn:
        """Print the error and exit with status 2; a misspelt choice with the one that was probably meant."""
        if wrong := re.fullmatch(r"(.* invalid choice: '(.*)') \(choose from (.*)\)", message):
            choices = wrong[3].replace("'", "")
            message = f"{wrong[1]}; {did_you_mean(wrong[2], choices.split(', '), f'choose from {choices}')}"
        if wrong := re.fullmatch(r"argument (\S+): invalid (int|float) value: (.*)", message):
            message = f"{wrong[1]}={wrong[3]} is not allowed: it must be a {_KINDS[wrong[2]]}"
        hint = "" if "--help" in message else f"; see {self.prog} --help"
        self.exit(2, f"{self.prog}: {message}{hint}\n")


def _parser(chosen: str | None) -> tuple[_Parser, dict[str, _Parser]]:
    """Parser of all commands, and those of each, of which the chosen one has its options."""
    parser = _Parser(prog="inferencegym", description="RL environment for LLM-inference control.")
    parser.add_argument("--version", action="version", version=__version__)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands = {}
    for name, line in COMMANDS.items():
        sub = commands[name] = subparsers.add_parser(name, help=line, description=line[0].upper() + line[1:] + ".")
        if name == chosen:
            module = importlib.import_module(f"{__package__}.{name.replace('-', '_')}")
            module.add_arguments(sub)
            sub.set_defaults(run=module.run)
    return parser, commands


if __name__ == "__main__":
    sys.exit(main())
