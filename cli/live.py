"""``inferencegym live``: a policy that observes or controls a running engine."""

from __future__ import annotations

import argparse
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from cli.tables import add_table_arguments, chosen_tables
from inferencegym.errors import InferenceGymError, InvalidConfigError

if TYPE_CHECKING:
    from live.observer import Advice, Adviser, Bounds, Controller

EXAMPLE = "write --bound batch_size=8:64"
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    commands = parser.add_subparsers(dest="what", required=True, metavar="observe|control")
    observe = commands.add_parser("observe", help="print what a policy would set; changes nothing")
    control = commands.add_parser("control", help="set the policy's knobs, within bounds that you give")
    for each in (observe, control):
        _add_common(each)
    control.add_argument(
        "--bound", action="append", metavar="KNOB=LOW:HIGH", help="allowed range of a knob; other knobs are never set"
    )
    control.add_argument(
        "--step",
        type=float,
        default=0.25,
        help="largest change of a knob per second, as a share of its range (default 0.25)",
    )
    control.add_argument(
        "--dead-man",
        type=float,
        default=10.0,
        metavar="S",
        help="return to your setting after this many seconds without metrics or orders (default 10)",
    )
    control.add_argument(
        "--missed",
        type=float,
        default=30.0,
        metavar="S",
        help="return to your setting when most requests have been late for this many seconds (default 30)",
    )
    control.add_argument(
        "--audit",
        type=Path,
        default=Path("live-audit.jsonl"),
        help="log with a line per second (default live-audit.jsonl)",
    )
    control.add_argument("--dry-run", action="store_true", help="log what would be set, and set nothing")


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engine", required=True, metavar="URL", help="address of the engine's OpenAI API")
    parser.add_argument(
        "--backend", default="vllm", help="type of the engine: vllm (default), sglang or one that a package adds"
    )
    parser.add_argument(
        "--control-file", type=Path, help="vLLM only: control file of its scheduler class (docs/live.md)"
    )
    parser.add_argument(
        "--agent",
        default="heuristic",
        help="policy, as in evaluate: heuristic (default), ppo:FILE, constant:{...}, ...",
    )
    parser.add_argument("--task", default="3", help="task with the policy's objectives, classes and knobs (default 3)")
    parser.add_argument(
        "--replicas",
        type=int,
        default=1,
        metavar="N",
        help="number of engines that share the traffic, this one included (default 1)",
    )
    add_table_arguments(parser)
    parser.add_argument("--port", type=int, help="serve the policy's settings for Prometheus on this port")
    parser.add_argument("--seconds", type=float, help="end after this many seconds (default: run until Ctrl-C)")


def run(args: argparse.Namespace) -> int:
    """Observe or control until the time is over, Ctrl-C, SIGTERM or SIGHUP."""
    from agents.registry import load_own_agents, make_agent
    from inferencegym.tasks import get_task
    from live.engines.choose import engine_at
    from live.observer import Adviser
    from live.publish import AdvicePage

    bounds = _bounds(args.bound or [], args.step) if args.what == "control" else None
    load_own_agents([args.agent])
    task = get_task(args.task)
    engine = engine_at(args.backend, args.engine, args.control_file)
    tables = chosen_tables(args) if args.table or args.hardware or args.model else None
    adviser = Adviser(engine, task, make_agent(args.agent, task), tables, args.replicas)
    with ExitStack() as stack:
        stack.enter_context(_stops())
        page = stack.enter_context(AdvicePage(args.port)) if args.port is not None else None
        if page is not None:
            print(f"serving the advice on http://127.0.0.1:{page.port}/metrics", flush=True)
        controller = None
        if bounds is not None:
            from live.observer import Controller

            controller = Controller(engine, adviser, bounds, args.audit, args.dead_man, args.missed, args.dry_run)
            print(f"your setting: {_knobs(controller.own)}; every second is a line of {args.audit}", flush=True)
        end = None if args.seconds is None else time.monotonic() + args.seconds
        try:
            while (end is None or time.monotonic() < end) and not (controller and controller.stopped):
                advice = _second(adviser, controller)
                if advice is not None:
                    _print(advice)
                    if page is not None:
                        page.show(advice)
                time.sleep(1.0 - time.time() % 1.0)
        except KeyboardInterrupt:
            pass
        finally:
            _ignore_stops()
            if controller is not None and not controller.stopped:
                controller.give_back("the controller was stopped")
    if controller is not None:
        print(f"back to your setting: {controller.stopped}", flush=True)
    return 0


@contextmanager
def _stops() -> Iterator[None]:
    """Turn the first signal that ends a command into KeyboardInterrupt, and ignore further ones."""

    def stop(*_: object) -> None:
        _ignore_stops()
        raise KeyboardInterrupt

    before = {sign: signal.signal(sign, stop) for sign in STOPS if signal.getsignal(sign) != signal.SIG_IGN}
    try:
        yield
    finally:
        for sign, handler in before.items():
            signal.signal(sign, handler)


def _ignore_stops() -> None:
    # Nothing may cut short what gives the engine back.
    for sign in STOPS:
        signal.signal(sign, signal.SIG_IGN)


def _second(adviser: Adviser, controller: Controller | None) -> Advice | None:
    if controller is not None:
        return controller.second()
    try:
        return adviser.advise(time.time())
    except InferenceGymError as error:
        print(f"no metrics: {error}", flush=True)
        return None


def _bounds(texts: list[str], step: float) -> Bounds:
    from live.observer import Bounds

    ranges = {}
    for text in texts:
        name, _, values = text.partition("=")
        low, _, high = values.partition(":")
        try:
            ranges[name] = (float(low), float(high))
        except ValueError as error:
            raise InvalidConfigError(f"--bound {text} is not a range: {EXAMPLE}") from error
    if not ranges:
        raise InvalidConfigError(f"control sets only the knobs that you name: {EXAMPLE}")
    return Bounds(ranges, step)


def _print(advice: Advice) -> None:
    stamp = time.strftime("%H:%M:%S", time.localtime(advice.time_s))
    expected = ", ".join(f"{name} {value:.0f}" for name, value in advice.expected.items())
    told = f"; expected {expected}" if expected else ""
    knobs = {name: value for name, value in advice.wanted.items() if name != "replicas"}
    scaled = ""
    if "replicas" in advice.wanted:
        scaled = f"; would have replicas {advice.wanted['replicas']:g} (of {advice.in_force['replicas']:g} now)"
    print(f"{stamp} {advice.why()} | would set {_knobs(knobs)}{scaled}{told}", flush=True)


def _knobs(knobs: object) -> str:
    assert hasattr(knobs, "items")
    return ", ".join(f"{name} {value:g}" for name, value in knobs.items())
