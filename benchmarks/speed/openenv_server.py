"""Benchmark: steps per second of this server and of a stock OpenEnv echo server, measured in turns in one run.

    python -m benchmarks.speed.openenv_server [--seconds 3] [--rounds 3]

The stock server's step returns what it was sent; ours simulates a serving fleet and records the step in its store. Both
servers run in separate processes; this process is the client. The stock server runs in two variants: as installed by
`pip install openenv` (asyncio, h11, compressed frames), and on uvloop and httptools.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.report import ROOT, machine, store, table
from inferencegym.client.openenv_types import without_gradio

with without_gradio():
    from openenv.core import GenericEnvClient

SERVE_ECHO = "--serve-echo"
RATIO_BARS = {"1 HTTP connection": 1.5, "1 WebSocket client": 1.2, "8 WebSocket clients": 1.6}
"""Required ratio of our steps per second to the stock server's."""
IDLE_BAR_MIB = 110.0
FIRST_HEALTH_BAR_S = 1.2


@dataclass(frozen=True)
class Target:
    """A server to measure, and the messages to send it."""

    name: str
    url: str
    process: subprocess.Popen[bytes]
    ready_after_s: float
    action: dict[str, Any]
    reset: dict[str, Any]

    def resident_mib(self) -> float:
        """Resident memory of the server process."""
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="utf-8")
        return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))) / 1024

    def cpu_s(self) -> float:
        """Processor time of the server so far, seconds."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# ---------------------------------------------------------------- load


async def _play(target: Target, until: float) -> int:
    steps = 0
    async with GenericEnvClient(base_url=target.url) as env:
        await env.reset(**target.reset)
        while time.perf_counter() < until:
            result = await env.step(target.action)
            steps += 1
            if result.done:
                await env.reset(**target.reset)
    return steps


def websocket(clients: int) -> Callable[[Target, float], int]:
    """Steps played by several OpenEnv clients in one process."""

    def load(target: Target, seconds: float) -> int:
        async def together() -> int:
            until = time.perf_counter() + seconds
            return sum(await asyncio.gather(*(_play(target, until) for _ in range(clients))))

        return asyncio.run(together())

    return load


def http_steps(target: Target, seconds: float) -> int:
    """Steps played over one keep-alive connection."""
    host = target.url.removeprefix("http://")
    connection = http.client.HTTPConnection(host)

    def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        text = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{target.name} {path}: {answer.status} {text!r}")
        return dict(json.loads(text))

    def start() -> dict[str, Any]:
        session = post("/reset", target.reset).get("session_id")
        return {"action": target.action, **({"session_id": session} if session else {})}

    body, steps, until = start(), 0, time.perf_counter() + seconds
    while time.perf_counter() < until:
        done = post("/step", body)["done"]
        steps += 1
        if done:
            body = start()
    connection.close()
    return steps


Load = Callable[[Target, float], int]
"""Function that plays for a number of seconds and returns the number of steps."""


def on_one_processor(load: Load) -> Load:
    """The load with client and server on the same processor, where one of them always waits for the other.

    On two, a virtual machine has to wake a processor for each message, which takes as long as the step, or three times
    as long in one run and not in the next.
    """

    def pinned(target: Target, seconds: float) -> int:
        allowed = os.sched_getaffinity(0)
        try:
            for pid in (0, target.process.pid):
                os.sched_setaffinity(pid, {min(allowed)})
            return load(target, seconds)
        finally:
            for pid in (0, target.process.pid):
                os.sched_setaffinity(pid, allowed)

    return pinned


LOADS: dict[str, Load] = {
    "1 HTTP connection": on_one_processor(http_steps),
    "1 WebSocket client": on_one_processor(websocket(1)),
    "8 WebSocket clients": websocket(8),
}


# ---------------------------------------------------------------- servers


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running(
    name: str, command: list[str], action: dict[str, Any], reset: dict[str, Any], **environment: str
) -> Iterator[Target]:
    """Start a server, measure the time to its first /health, and stop it at the end.

    Servers keep the modules that they compile, whatever the environment says, so only their first start compiles them.
    """
    port = free_port()
    started = time.perf_counter()
    process = subprocess.Popen(
        [part.format(port=port) for part in command],
        cwd=ROOT,
        env=os.environ | {"INFERENCEGYM_PORT": str(port), "PYTHONDONTWRITEBYTECODE": ""} | environment,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=1):
                break
            if process.poll() is not None or time.perf_counter() - started > 60:
                raise RuntimeError(f"{name} did not start: {command}")
            time.sleep(0.01)
        yield Target(name, url, process, time.perf_counter() - started, action, reset)
    finally:
        process.terminate()
        process.wait(20)


def serve_echo(port: int, fast: bool) -> None:
    """Serve OpenEnv's own application with an environment that does nothing."""
    import uvicorn
    from openenv.core.env_server.http_server import create_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    class EchoAction(Action):  # type: ignore[misc]
        message: str

    class EchoObservation(Observation):  # type: ignore[misc]
        message: str = ""

    class Echo(Environment):  # type: ignore[misc]
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> EchoObservation:
            return EchoObservation()

        def step(self, action: EchoAction, timeout_s: float | None = None, **_: Any) -> EchoObservation:
            return EchoObservation(message=action.message, reward=0.0)

        @property
        def state(self) -> State:
            return State()

    app = create_app(Echo, EchoAction, EchoObservation, env_name="echo", max_concurrent_envs=64)
    kinds = {"loop": "uvloop", "http": "httptools"} if fast else {"loop": "asyncio", "http": "h11"}
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning", **kinds)  # type: ignore[arg-type]


# ---------------------------------------------------------------- comparison


def main() -> int:
    """Print the table and write it to a file; returns 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3.0, help="length of one measurement")
    parser.add_argument("--rounds", type=int, default=3, help="measurements per server and load; the median is shown")
    parser.add_argument(SERVE_ECHO, nargs=2, metavar=("PORT", "KIND"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve_echo:
        serve_echo(int(args.serve_echo[0]), args.serve_echo[1] == "fast")
        return 0
    echo = [sys.executable, "-m", "benchmarks.speed.openenv_server", SERVE_ECHO, "{port}"]
    message, action = {"message": "hello"}, {"batch_size": 64}
    with tempfile.TemporaryDirectory() as data, contextlib.ExitStack() as stack:
        servers = [
            partial(
                running,
                "InferenceGym",
                [sys.executable, "-m", "server.app"],
                action,
                {"task_id": 1, "seed": 1},
                INFERENCEGYM_DATA_DIR=data,
                INFERENCEGYM_HOST="127.0.0.1",
                INFERENCEGYM_RESETS_PER_MINUTE="0",
                # The stock server writes no line for a request here either.
                INFERENCEGYM_ACCESS_LOG="errors",
            ),
            partial(running, "stock echo", [*echo, "plain"], message, {}),
            partial(running, "stock echo, uvloop", [*echo, "fast"], message, {}),
        ]
        starts = start_times_s(servers, args.rounds)
        targets = [stack.enter_context(server()) for server in servers]
        memory = {target.name: target.resident_mib() for target in targets}
        rates, costs = measure(targets, args.seconds, args.rounds)
        report = {
            "machine": machine(),
            "idle_rss_mib": memory,
            "first_health_s": starts,
            "steps_per_s": rates,
            "cpu_us_per_step": costs,
        }
    print(text := markdown(report))
    store("openenv", report, text)
    return int(any(not row.reached for row in compared(report)))


def start_times_s(servers: Sequence[Callable[[], AbstractContextManager[Target]]], rounds: int) -> dict[str, float]:
    """Median seconds until each server's first /health; the servers start in turns, one at a time."""
    times: dict[str, list[float]] = {}
    for _ in range(rounds):
        for server in servers:
            with server() as target:
                times.setdefault(target.name, []).append(target.ready_after_s)
    return {name: statistics.median(each) for name, each in times.items()}


Figures = dict[str, dict[str, float]]
"""Load -> server -> figure."""


def measure(
    targets: list[Target], seconds: float, rounds: int, loads: Mapping[str, Load] = LOADS
) -> tuple[Figures, Figures]:
    """Median steps per second, and median processor time of the server per step in microseconds.

    The servers take turns, so that a noisy minute affects them all; processor time hardly depends on noise.
    """
    for target in targets:
        for load in loads.values():
            load(target, 0.2)
    rates: dict[str, dict[str, list[float]]] = {name: {t.name: [] for t in targets} for name in loads}
    costs: dict[str, dict[str, list[float]]] = {name: {t.name: [] for t in targets} for name in loads}
    for _ in range(rounds):
        for name, load in loads.items():
            for target in targets:
                started, used = time.perf_counter(), target.cpu_s()
                steps = load(target, seconds)
                rates[name][target.name].append(steps / (time.perf_counter() - started))
                costs[name][target.name].append((target.cpu_s() - used) / steps * 1e6)
    return _medians(rates), _medians(costs)


def _medians(figures: dict[str, dict[str, list[float]]]) -> Figures:
    return {name: {server: statistics.median(each) for server, each in by.items()} for name, by in figures.items()}


class Row(NamedTuple):
    """One figure of all servers, ours first, and the bar that ours must reach."""

    title: str
    figures: dict[str, float]
    form: str
    bar: str = ""
    reached: bool = True

    def ratio(self) -> float:
        """Our figure divided by the stock server's."""
        ours, stock, *_ = self.figures.values()
        return ours / stock


def compared(report: dict[str, Any]) -> list[Row]:
    """Rows of the table: steps per second, processor time, memory and start."""
    rows = []
    for load, by in report["steps_per_s"].items():
        bar = RATIO_BARS[load]
        row = Row(f"{load}, steps/s", by, ",.0f", f">= {bar:g} x stock")
        rows.append(row._replace(reached=row.ratio() >= bar))
    rows += [Row(f"{load}, CPU us/step", by, ",.0f") for load, by in report["cpu_us_per_step"].items()]
    for title, key, form, most in (
        ("idle memory, MiB", "idle_rss_mib", ".0f", IDLE_BAR_MIB),
        ("first /health, s", "first_health_s", ".2f", FIRST_HEALTH_BAR_S),
    ):
        ours = next(iter(report[key].values()))
        rows.append(Row(title, report[key], form, f"<= {most:g}", ours <= most))
    return rows


def markdown(report: dict[str, Any]) -> str:
    """The table for the documents."""
    of = report["machine"]
    lines = [
        "<!-- written by benchmarks/speed/openenv_server.py; do not edit -->",
        "",
        f"`python -m benchmarks.speed.openenv_server`: one run, all servers in turns, medians. {of['cpus']} "
        f"processors, Python {of['python']}, load {of['load']:.1f} at the time: "
        "read the ratios, not the rates.",
        "",
    ]
    rows = []
    for row in compared(report):
        cells = [format(figure, row.form) for figure in row.figures.values()]
        verdict = "" if not row.bar else "reached" if row.reached else "**missed**"
        rows.append((row.title, *cells, f"{row.ratio():.2f}", row.bar, verdict))
    return "\n".join([*lines, *table(("", *report["idle_rss_mib"], "ours : stock", "goal", ""), rows)]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
