"""Speed benchmark: environments, clients and server compared with their peers, in one run of about three minutes.

    python -m benchmarks.speed.interfaces [--seconds 1.5] [--rounds 3]

Vector and single environments against EnvPool's and Gymnasium's CartPole (whose step is six lines of arithmetic; ours
simulates a serving fleet), many steps per request against a stock OpenEnv echo server, the cost of durability, and the
cost of a step late in an episode and among many sessions. The loads take turns; results are medians of the rounds. Bars
are ratios to a peer of the same run (:data:`BARS`). EnvPool is in the extra `bench` (`make peers`); without it its row
is left out. `benchmarks.speed.openenv_server` compares single connections, memory and start with the stock server.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import importlib.util
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np

from benchmarks.report import machine, store, table
from benchmarks.speed.openenv_server import (
    SERVE_ECHO,
    Figures,
    Load,
    Target,
    _play,
    http_steps,
    measure,
    running,
)
from env.autoreset import AutoresetBatch
from env.batch import ServingBatch
from env.inference_env import InferenceEnv
from env.vector import VectorInferenceEnv
from inferencegym.client import InferenceGymBatch
from inferencegym.client.gym import HTTPVectorEnv
from inferencegym.models import NAIVE_ACTION
from inferencegym.spaces.actions import ACTION_HIGH, ACTION_LOW
from inferencegym.tasks import get_task

ROWS = 1_024
FEW_ROWS = 16
STEPS_A_REQUEST = 64
LONG_EPISODE = 5_000

SCALAR_PEER = "CartPole-v1"
SCALAR_GYMNASIUM = "ours, task 1, gymnasium.make"
VECTOR_PEER = "Gymnasium CartPole-v1, vectorised"
VECTOR_INTERFACE = "ours, task 1, Gymnasium's interface with info"

ENVPOOL = "EnvPool CartPole-v1"
OURS, STOCK = "InferenceGym", "stock OpenEnv echo"


class Bar(NamedTuple):
    """An interface, the peer that it is compared with, and the required ratio of the two."""

    interface: str
    peer: str
    ratio: float


BARS: dict[str, Bar] = {
    "scalar": Bar("`InferenceEnv`", "CartPole, `gymnasium.make`", 0.4),
    "gymnasium": Bar("`gymnasium.make`", "CartPole, `gymnasium.make`", 0.3),
    "batch": Bar(f"`ServingBatch`, {ROWS:,} rows", "CartPole, EnvPool", 1.5),
    "vector": Bar(f"`gymnasium.make_vec`, {ROWS:,} rows", "CartPole, EnvPool", 1.5),
    "few": Bar(f"`HTTPVectorEnv`, {FEW_ROWS} rows", "echo, 8 WebSocket clients", 2.0),
    "many": Bar(f"`HTTPVectorEnv`, {ROWS:,} rows", "echo, 8 WebSocket clients", 50.0),
    "arrays": Bar(f"`/step/batch`, {ROWS:,} rows x {STEPS_A_REQUEST} steps", "echo, 8 WebSocket clients", 100.0),
}
"""Least ratio of each interface. Echo is OpenEnv's stock server; CartPole's step is six lines of arithmetic."""

# ---------------------------------------------------------------- in process


def vector_ours(task_id: int) -> Callable[[float], float]:
    batch = ServingBatch(get_task(task_id), ROWS)
    episodes = AutoresetBatch(batch)
    episodes.reset(list(range(ROWS)))
    actions = constant_actions(ROWS)

    def load(seconds: float) -> float:
        def step() -> None:
            if batch.done.all():
                episodes.reset()
            episodes.step(actions)

        return rate(step, seconds, ROWS)

    return load


def vector_gymnasium_interface(task_id: int) -> Callable[[float], float]:
    envs = VectorInferenceEnv(ROWS, task_id, action="natural", n_threads=os.cpu_count() or 1)
    envs.reset(seed=0)
    actions = constant_actions(ROWS)
    return lambda seconds: rate(lambda: envs.step(actions), seconds, ROWS)


def played_together(task_id: int) -> Callable[[float], float]:
    batch = ServingBatch(get_task(task_id), ROWS)
    observations, rewards = np.empty((STEPS_A_REQUEST, ROWS, 14)), np.empty((STEPS_A_REQUEST, ROWS))
    actions = np.repeat(constant_actions(ROWS)[None], STEPS_A_REQUEST, axis=0)
    seeds = np.arange(ROWS)

    def load(seconds: float) -> float:
        def step() -> None:
            if batch.seeds[0] < 0 or batch.time[0] + STEPS_A_REQUEST > batch.config.episode_length:
                batch.reset(seeds)
            batch.step_many(actions, observations, rewards)

        return rate(step, seconds, ROWS * STEPS_A_REQUEST)

    return load


def vector_gymnasium() -> Callable[[float], float]:
    envs = gymnasium.make_vec("CartPole-v1", num_envs=ROWS, vectorization_mode="vector_entry_point")
    envs.reset(seed=0)
    actions = np.zeros(ROWS, dtype=np.int64)
    return lambda seconds: rate(lambda: envs.step(actions), seconds, ROWS)


def vector_envpool() -> Callable[[float], float]:
    import envpool

    envs = envpool.make("CartPole-v1", env_type="gymnasium", num_envs=ROWS, num_threads=os.cpu_count())
    envs.reset()
    actions = np.zeros(ROWS, dtype=np.int32)
    return lambda seconds: rate(lambda: envs.step(actions), seconds, ROWS)


def scalar_ours() -> Callable[[float], float]:
    env = InferenceEnv(task_id=1)
    action = NAIVE_ACTION
    env.reset(seed=0)

    def step() -> None:
        _, _, done, _ = env.step(action)
        if done:
            env.reset()

    return lambda seconds: rate(step, seconds, 1)


def scalar_gymnasium_interface() -> Callable[[float], float]:
    env = gymnasium.make("inferencegym.gym:InferenceGym/StaticUniform-v1")
    env.reset(seed=0)
    action = np.zeros(5, dtype=np.float32)

    def step() -> None:
        _, _, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            env.reset()

    return lambda seconds: rate(step, seconds, 1)


def scalar_cartpole() -> Callable[[float], float]:
    env = gymnasium.make("CartPole-v1")
    env.reset(seed=0)
    turn = [0]

    def step() -> None:
        turn[0] ^= 1
        _, _, terminated, truncated, _ = env.step(turn[0])
        if terminated or truncated:
            env.reset()

    return lambda seconds: rate(step, seconds, 1)


def constant_actions(rows: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """One action per row, spread evenly over the action space."""
    return np.random.default_rng(0).uniform(ACTION_LOW, ACTION_HIGH, (rows, len(ACTION_LOW)))


def rate(step: Callable[[], Any], seconds: float, steps: int) -> float:
    """Steps per second of calls that play ``steps`` each."""
    calls, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        for _ in range(10 if steps < 10_000 else 1):
            step()
            calls += 1
    return calls * steps / (time.perf_counter() - began)


def in_turns(loads: Mapping[str, Callable[[float], float]], seconds: float, rounds: int) -> dict[str, float]:
    """Median of the rounds for each load; the loads take turns."""
    for load in loads.values():
        load(0.1)
    found: dict[str, list[float]] = {name: [] for name in loads}
    for _ in range(rounds):
        for name, load in loads.items():
            found[name].append(load(seconds))
    return {name: statistics.median(each) for name, each in found.items()}


# ---------------------------------------------------------------- over the network


def _http_client(target: Target, seconds: float) -> int:
    return http_steps(target, seconds)


def _websocket_clients(target: Target, seconds: float) -> int:
    async def together() -> int:
        until = time.perf_counter() + seconds
        return sum(await asyncio.gather(*(_play(target, until) for _ in range(4))))

    return asyncio.run(together())


def _one_websocket(target: Target, seconds: float) -> int:
    return asyncio.run(_play(target, time.perf_counter() + seconds))


def network_loads(pool: ProcessPoolExecutor) -> dict[str, Load]:
    """Loads whose clients run in separate processes: one process with eight clients would measure the client."""

    def spread(client: Load, processes: int) -> Load:
        def load(target: Target, seconds: float) -> int:
            # The handle of the server process cannot be pickled, and clients do not need it.
            alone = replace(target, process=None)  # type: ignore[arg-type]
            return sum(job.result() for job in [pool.submit(client, alone, seconds) for _ in range(processes)])

        return load

    return {
        "1 HTTP connection": spread(_http_client, 1),
        "8 HTTP connections": spread(_http_client, 8),
        "1 WebSocket client": spread(_one_websocket, 1),
        "8 WebSocket clients": spread(_websocket_clients, 2),
    }


@contextlib.contextmanager
def our_server(name: str = "InferenceGym", **settings: str) -> Iterator[Target]:
    environment = {"HOST": "127.0.0.1", "RESETS_PER_MINUTE": "0", **settings}
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as data:
        named = {f"INFERENCEGYM_{key}": value for key, value in {"DATA_DIR": data, **environment}.items()}
        command = [sys.executable, "-m", "server.app"]
        with running(name, command, {"batch_size": 64}, {"task_id": 1, "seed": 1}, **named) as target:
            yield target


def batched(target: Target) -> Callable[[float], float]:
    client = InferenceGymBatch(target.url)
    client.reset(ROWS, 1, seed=0, autoreset=True)
    actions = np.repeat(constant_actions(ROWS)[None], STEPS_A_REQUEST, axis=0).astype(np.float32)
    return lambda seconds: rate(lambda: client.step_many(actions), seconds, ROWS * STEPS_A_REQUEST)


def remote_vector(target: Target, rows: int) -> Callable[[float], float]:
    envs = HTTPVectorEnv(target.url, rows, 1, action="natural")
    envs.reset(seed=0)
    actions = constant_actions(rows)
    return lambda seconds: rate(lambda: envs.step(actions), seconds, rows)


def over_the_network(pool: ProcessPoolExecutor, seconds: float, rounds: int) -> dict[str, Any]:
    echo = [sys.executable, "-m", "benchmarks.speed.openenv_server", SERVE_ECHO, "{port}", "plain"]
    with our_server() as ours, running(STOCK, echo, {"message": "hello"}, {}) as stock:
        rates, costs = measure([ours, stock], seconds, rounds, loads=network_loads(pool))
        client = statistics.median(client_cost(ours, seconds) for _ in range(rounds))
        arrays = {"batched": batched(ours)}
        arrays |= {f"remote vector, {rows:,} rows": remote_vector(ours, rows) for rows in (FEW_ROWS, ROWS)}
        together = in_turns(arrays, seconds, rounds)
        loaded = ours.resident_mib()
    return {
        "rates": rates,
        "costs": costs,
        "client_us": client,
        "arrays": together,
        "rss_after_mib": loaded,
    }


def client_cost(target: Target, seconds: float) -> float:
    """Processor microseconds per step of OpenEnv's client itself, with four clients in this process."""
    began = time.process_time()
    steps = _websocket_clients(target, seconds)
    return (time.process_time() - began) / steps * 1e6


def durability(seconds: float, rounds: int) -> Figures:
    """Steps per second and the server's processor time per step over one connection, by durability setting."""
    kinds = {
        "memory:// (lost with the process)": {"STORE_URL": "memory://"},
        "none": {"DURABILITY": "none"},
        "process (default)": {"DURABILITY": "process"},
        "full (fsync per step)": {"DURABILITY": "full"},
    }
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(our_server(name, **kind)) for name, kind in kinds.items()]
        rates, costs = measure(servers, seconds, rounds, loads={"1 HTTP connection": http_steps})
    return {
        name: {"rate": rates["1 HTTP connection"][name], "cost": costs["1 HTTP connection"][name]} for name in kinds
    }


# ---------------------------------------------------------------- cost by step number and number of sessions


def by_episode_length() -> dict[str, float]:
    """Processor microseconds per step and row in parts of one long episode, 64 rows."""
    task = get_task(2)
    batch = ServingBatch(task, 64, task.config({"episode_length": LONG_EPISODE}))
    batch.reset(np.arange(64))
    # One action throughout, so that the cost of a step is not mixed with the effects of different actions.
    actions = np.tile([1.0, 0.0, 64.0, 0.0, 0.0], (64, 1))
    found = {}
    for upto in (250, 500, 1_000, 2_000, LONG_EPISODE):
        began, first = time.process_time(), int(batch.time[0])
        while batch.time[0] < upto:
            batch.step(actions)
        found[f"steps {first} to {upto}"] = (time.process_time() - began) / (64 * (upto - first)) * 1e6
    return found


def by_sessions() -> dict[str, float]:
    """Processor microseconds of the server per step, by number of sessions that take turns on one connection."""
    found = {}
    with our_server() as target:
        connection = http.client.HTTPConnection(target.url.removeprefix("http://"))

        def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
            connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
            return dict(json.loads(connection.getresponse().read()))

        sessions: list[str] = []
        for count in (1, 10, 100, 1_000):
            sessions += [post("/reset", target.reset)["session_id"] for _ in range(count - len(sessions))]
            steps = max(2_000, count)
            began = target.cpu_s()
            for step in range(steps):
                session = sessions[step % count]
                if post("/step", {"session_id": session, "action": target.action}).get("done", True):
                    post("/reset", {**target.reset, "session_id": session})
            found[f"{count} sessions"] = (target.cpu_s() - began) / steps * 1e6
    return found


# ---------------------------------------------------------------- report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.5, help="length of one measurement")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each; the median is kept")
    options = parser.parse_args()
    report = everything(options.seconds, options.rounds)
    print(text := markdown(report))
    store("performance", report, text)


def everything(seconds: float, rounds: int) -> dict[str, Any]:
    """Results of all parts, and how long they took."""
    began = time.perf_counter()
    # Fork client processes before any thread exists; they start at once, with all modules imported.
    with ProcessPoolExecutor(8, mp_context=multiprocessing.get_context("fork")) as pool:
        list(pool.map(abs, range(64)))
        report = measured(pool, seconds, rounds)
    return {**report, "seconds": round(time.perf_counter() - began)}


def measured(pool: ProcessPoolExecutor, seconds: float, rounds: int) -> dict[str, Any]:
    network = over_the_network(pool, seconds, rounds)
    vectors = {f"ours, task {task_id}": vector_ours(task_id) for task_id in (1, 2, 3)}
    vectors[VECTOR_INTERFACE] = vector_gymnasium_interface(1)
    vectors["ours, task 1, 64 steps played together"] = played_together(1)
    if importlib.util.find_spec("envpool"):
        vectors[ENVPOOL] = vector_envpool()
    else:
        print("EnvPool is not installed, its row is left out: run `make peers`, or install the extra 'bench'")
    vectors[VECTOR_PEER] = vector_gymnasium()
    scalars = {
        "ours, task 1": scalar_ours(),
        SCALAR_GYMNASIUM: scalar_gymnasium_interface(),
        SCALAR_PEER: scalar_cartpole(),
    }
    return {
        "machine": machine(),
        "vector": in_turns(vectors, seconds, rounds),
        "scalar": in_turns(scalars, seconds, rounds),
        "network": network,
        "durability": durability(min(seconds, 1.0), rounds),
        "episode_length": by_episode_length(),
        "sessions": by_sessions(),
    }


def beside_peers(report: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Our figure and the peer's for each entry of :data:`BARS` that this run measured."""
    network, rates = report["network"], report["network"]["rates"]
    vector, scalar, arrays = report["vector"], report["scalar"], network["arrays"]
    cartpole, pool = scalar[SCALAR_PEER], vector.get(ENVPOOL)
    echo = rates["8 WebSocket clients"][STOCK]
    pairs = {
        "scalar": (scalar["ours, task 1"], cartpole),
        "gymnasium": (scalar[SCALAR_GYMNASIUM], cartpole),
        "batch": (vector["ours, task 1"], pool),
        "vector": (vector[VECTOR_INTERFACE], pool),
        "few": (arrays[f"remote vector, {FEW_ROWS:,} rows"], echo),
        "many": (arrays[f"remote vector, {ROWS:,} rows"], echo),
        "arrays": (arrays["batched"], echo),
    }
    return {name: (ours, peer) for name, (ours, peer) in pairs.items() if peer is not None}


def markdown(report: Mapping[str, Any]) -> str:
    of = report["machine"]
    rows = []
    for name, (ours, peer) in beside_peers(report).items():
        bar, ratio = BARS[name], ours / peer
        cells = [bar.interface, number(ours), bar.peer, number(peer), f"{ratio:.3g}"]
        rows.append((*cells, f">= {bar.ratio:g}", _word(ratio >= bar.ratio)))
    durability = [(name, number(f["rate"]), f"{f['cost']:.0f}") for name, f in report["durability"].items()]
    late = [(name, f"{cost:.2f}") for name, cost in report["episode_length"].items()]
    sessions = [(name, f"{cost:.0f}") for name, cost in report["sessions"].items()]
    network = []
    for load, by in report["network"]["rates"].items():
        ours, stock = by.values()
        cost = report["network"]["costs"][load][OURS]
        network.append((load, number(ours), number(stock), f"{ours / stock:.2f}", f"{cost:.0f}"))
    lines = [
        "<!-- written by benchmarks/speed/interfaces.py; do not edit -->",
        "",
        f"`make bench`, or `python -m benchmarks.speed.interfaces` alone. {of['cpus']} processors, Python "
        f"{of['python']}, load {of['load']:.1f} at the time; medians, all contenders in turns.",
        "",
        *table(("interface", "ours", "peer", "", "ratio", "goal", ""), rows),
        "",
        "### What durability costs",
        "",
        *table(("INFERENCEGYM_DURABILITY", "steps/s", "server CPU, us/step"), durability),
        "",
        "### Cost of a step late in an episode and among many sessions",
        "",
        *table(("in process, 64 rows of task 2", "CPU, us/step"), late),
        "",
        *table(("HTTP, taking turns", "server CPU, us/step"), sessions),
        "",
        "<!-- details -->",
        "",
        "### In process, steps per second",
        "",
        *_against("1,024 environments", report["vector"], ENVPOOL),
        *_against("one environment", report["scalar"], SCALAR_PEER),
        *paths(report),
        "### Over the network",
        "",
        *table(("load", "ours", "stock OpenEnv echo", "ratio", "server CPU, us/step"), network),
        "",
        shared_processors(report["network"], of["cpus"]),
    ]
    return "\n".join(lines)


def paths(report: Mapping[str, Any]) -> list[str]:
    """Table of the ways to step task 1 and Gymnasium's CartPole, with one and with 1,024 environments."""
    network = report["network"]
    found = {"one environment in process": report["scalar"]["ours, task 1"]}
    found |= {name: by[OURS] for name, by in network["rates"].items()}
    found[f"vector environment in process, {ROWS:,} rows"] = report["vector"][VECTOR_INTERFACE]
    found[f"`HTTPVectorEnv`, {FEW_ROWS} rows"] = network["arrays"][f"remote vector, {FEW_ROWS:,} rows"]
    found[f"`HTTPVectorEnv`, {ROWS:,} rows"] = network["arrays"][f"remote vector, {ROWS:,} rows"]
    found[f"`/step/batch`, {ROWS:,} rows x {STEPS_A_REQUEST} steps a request"] = network["arrays"]["batched"]
    one, many = report["scalar"][SCALAR_PEER], report["vector"][VECTOR_PEER]
    rows = [(name, number(rate), f"{rate / one:.3g}", f"{rate / many:.3g}") for name, rate in found.items()]
    lines = table(("path", "steps/s", "to one CartPole", f"to {ROWS:,} CartPoles, vectorised"), rows)
    itself = f"| CartPole itself | | {number(one)} steps/s | {number(many)} steps/s |"
    return ["### Each path compared with Gymnasium's CartPole", "", *lines, itself, ""]


def shared_processors(network: Mapping[str, Any], cpus: int) -> str:
    """Sentence on the processor time that clients and server share on this machine."""
    load = "8 WebSocket clients"
    client, server = network["client_us"], network["costs"][load][OURS]
    return (
        f"Clients and servers share the {cpus} processors. OpenEnv's client itself takes {client:.0f} us per step, so "
        f"with a server that takes {server:.0f} us no more than {number(cpus * 1e6 / (client + server))} steps/s are "
        "possible here."
    )


def _against(title: str, figures: Mapping[str, float], against: str) -> list[str]:
    base = figures.get(against)
    rows = [(name, number(each), "" if base is None else f"{each / base:.2f}") for name, each in figures.items()]
    return [*table((title, "steps/s", f"against {against}"), rows), ""]


def _word(good: bool) -> str:
    return "reached" if good else "**missed**"


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:g}" if value == int(value) else f"{value:.2f}"


if __name__ == "__main__":
    main()
