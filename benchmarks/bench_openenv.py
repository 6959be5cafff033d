"""Benchmark: steps per second of this server and of a stock OpenEnv echo server, measured alternately in one run.

    python benchmarks/bench_openenv.py [--seconds 3] [--rounds 3] [--json FILE]

The stock server's step returns what it was sent; ours simulates a serving fleet and records the step in its store. Both
servers run in processes of their own, this process is the client. The stock server runs twice: as `pip install openenv`
leaves it (asyncio, h11, compressed frames), and on uvloop and httptools.
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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inferencegym.client.openenv_types import without_gradio

with without_gradio():
    from openenv.core import GenericEnvClient

ROOT = Path(__file__).resolve().parents[1]
SERVE_ECHO = "--serve-echo"
BARS = {"1 WebSocket client": 1.2, "8 WebSocket clients": 1.6, "1 HTTP connection": 1.5}


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
    """Load of several OpenEnv clients in one process."""

    def load(target: Target, seconds: float) -> int:
        async def together() -> int:
            until = time.perf_counter() + seconds
            return sum(await asyncio.gather(*(_play(target, until) for _ in range(clients))))

        return asyncio.run(together())

    return load


def http_steps(target: Target, seconds: float) -> int:
    """Load of one keep-alive connection."""
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

LOADS: dict[str, Load] = {
    "1 WebSocket client": websocket(1),
    "8 WebSocket clients": websocket(8),
    "1 HTTP connection": http_steps,
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
    """Start a server, measure how long it takes to its first /health, and stop it at the end."""
    port = free_port()
    started = time.perf_counter()
    process = subprocess.Popen(
        [part.format(port=port) for part in command],
        cwd=ROOT,
        env=os.environ | {"INFERENCEGYM_PORT": str(port)} | environment,
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
    """Run the comparison and print it; returns 1 if a ratio is below its goal."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3.0, help="length of one measurement")
    parser.add_argument("--rounds", type=int, default=3, help="measurements per server and load; the median is shown")
    parser.add_argument(
        "--wait", type=float, default=0.0, help="longest wait for an idle machine before each measurement, in seconds"
    )
    parser.add_argument("--json", type=Path, help="JSON file for the results")
    parser.add_argument(SERVE_ECHO, nargs=2, metavar=("PORT", "KIND"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve_echo:
        serve_echo(int(args.serve_echo[0]), args.serve_echo[1] == "fast")
        return 0
    echo = [sys.executable, __file__, SERVE_ECHO, "{port}"]
    message, action = {"message": "hello"}, {"batch_size": 64}
    with tempfile.TemporaryDirectory() as data, contextlib.ExitStack() as stack:
        ours = stack.enter_context(
            running(
                "InferenceGym",
                [sys.executable, "-m", "server.app"],
                action,
                {"task_id": 1, "seed": 1},
                INFERENCEGYM_DATA_DIR=data,
                INFERENCEGYM_HOST="127.0.0.1",
                INFERENCEGYM_RESETS_PER_MINUTE="0",
            )
        )
        stock = stack.enter_context(running("stock echo", [*echo, "plain"], message, {}))
        fast = stack.enter_context(running("stock echo, uvloop", [*echo, "fast"], message, {}))
        targets = [ours, stock, fast]
        memory = {target.name: target.resident_mib() for target in targets}
        rates, costs = measure(targets, args.seconds, args.rounds, args.wait)
        report = {
            "cpus": os.cpu_count(),
            "idle_rss_mib": memory,
            "first_health_s": {target.name: target.ready_after_s for target in targets},
            "steps_per_s": rates,
            "cpu_us_per_step": costs,
        }
    return show(report, args.json)


Figures = dict[str, dict[str, float]]
"""Load -> server -> figure."""


def measure(
    targets: list[Target], seconds: float, rounds: int, wait_s: float = 0.0, loads: Mapping[str, Load] = LOADS
) -> tuple[Figures, Figures]:
    """Median steps per second, and median processor time of the server per step in microseconds.

    The servers take turns, so that a noisy minute hits them all; processor time hardly depends on the noise.
    """
    for target in targets:
        for load in loads.values():
            load(target, 0.2)
    rates: dict[str, dict[str, list[float]]] = {name: {t.name: [] for t in targets} for name in loads}
    costs: dict[str, dict[str, list[float]]] = {name: {t.name: [] for t in targets} for name in loads}
    for _ in range(rounds):
        for name, load in loads.items():
            for target in targets:
                wait_for_quiet(wait_s)
                started, used = time.perf_counter(), target.cpu_s()
                steps = load(target, seconds)
                rates[name][target.name].append(steps / (time.perf_counter() - started))
                costs[name][target.name].append((target.cpu_s() - used) / steps * 1e6)
    return _medians(rates), _medians(costs)


def wait_for_quiet(limit_s: float) -> None:
    """Return when all processes together used less than a fifth of one processor for half a second, or at the limit."""
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        before = busy_s()
        time.sleep(0.5)
        if busy_s() - before < 0.1:
            return


def busy_s() -> float:
    """Processor time of all processes of this machine so far, seconds."""
    fields = [int(word) for word in Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def _medians(figures: dict[str, dict[str, list[float]]]) -> Figures:
    return {name: {server: statistics.median(each) for server, each in by.items()} for name, by in figures.items()}


def show(report: dict[str, Any], path: Path | None) -> int:
    """Print the report; returns 1 if a ratio of steps per second is below its goal."""
    names = list(report["idle_rss_mib"])
    ours, stock = names[0], names[1]
    print(f"{'':34}" + "".join(f"{name:>20}" for name in names) + f"{'ours : stock':>14}")

    def row(title: str, by: dict[str, float], form: str, ratio: float) -> None:
        print(f"{title:34}" + "".join(f"{by[name]:20{form}}" for name in names) + f"{ratio:13.2f}x")

    ratios = {}
    for load, by in report["steps_per_s"].items():
        ratios[load] = by[ours] / by[stock]
        row(f"{load}, steps/s", by, ",.0f", ratios[load])
    for load, by in report["cpu_us_per_step"].items():
        row(f"{load}, CPU µs/step", by, ",.0f", by[ours] / by[stock])
    for title, key, form in (
        ("idle memory, MiB", "idle_rss_mib", ".0f"),
        ("first /health, s", "first_health_s", ".2f"),
    ):
        row(title, report[key], form, report[key][ours] / report[key][stock])
    if path is not None:
        path.write_text(json.dumps(report | {"ratios": ratios}, indent=1) + "\n", encoding="utf-8")
    missed = [f"{load}: {ratio:.2f}x, bar {BARS[load]}x" for load, ratio in ratios.items() if ratio < BARS[load]]
    print("Every ratio reaches its bar." if not missed else "Below the bar: " + "; ".join(missed))
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
