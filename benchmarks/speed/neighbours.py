"""Benchmark: latency of a quiet client's steps while another client sends the most expensive requests.

    python -m benchmarks.speed.neighbours [--seconds 5] [--rounds 5]

Starts a server of its own with default settings. The quiet client, at 127.0.0.1, plays a step every ten milliseconds;
the heavy one, at 127.0.0.2 and in a process of its own, repeats one request as fast as it is answered and waits where
the server tells it to (`Retry-After`). The quiet client is measured in turns, alone and next to each
kind of request; the table has medians over the rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any, Final

import numpy as np

from benchmarks.report import machine, store, table
from benchmarks.speed.load import address_of, own_server
from inferencegym.batch_format import MEDIA_TYPE, BatchSteps, encode_request

QUIET, HEAVY = "127.0.0.1", "127.0.0.2"
EVERY_S: Final = 0.01
"""Time from the start of one step of the quiet client to that of the next."""
BAR: Final = 3.0
"""Highest allowed ratio of the quiet client's p99 to its p99 alone."""
ALONE: Final = "alone"
ACTION: Final = [1.0, 0, 64, 0, 0]
LONGEST: Final = {"task_id": 3, "seed": 1, "config": {"episode_length": 5_000}}
Send = Callable[[], int]
"""Sends one request and returns the status of its answer; waits first if the server told it to."""


@dataclass(frozen=True)
class Measured:
    """Times of the quiet client's steps in one measurement, and what became of the heavy client's requests."""

    p50_ms: float
    p99_ms: float
    requests: int
    refused: int


class Client:
    """A keep-alive connection of one client."""

    def __init__(self, address: tuple[str, int], source: str) -> None:
        self._connection = http.client.HTTPConnection(*address, source_address=(source, 0))
        self.wait_s = 0.0
        self.batch_session: str | None = None

    def send(self, path: str, body: bytes, media_type: str = "application/json") -> tuple[int, bytes]:
        """Status and body of the answer; ``wait_s`` is then the time that the server asks to wait."""
        self._connection.request("POST", path, body, {"content-type": media_type})
        answer = self._connection.getresponse()
        self.wait_s = float(answer.headers.get("retry-after", 0))
        return answer.status, answer.read()

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The JSON answer; any status but 200 is an error."""
        status, text = self.send(path, json.dumps(body).encode())
        if status != 200:
            raise RuntimeError(f"{path}: {status} {text[:500]!r}")
        return dict(json.loads(text))


# ---------------------------------------------------------------- the heavy client


class LongEpisode:
    """An episode of 5,000 seconds that the heavy client has played, and the server's answers."""

    def __init__(self, client: Client) -> None:
        self.session_id = client.post("/reset", LONGEST)["session_id"]
        body = {"session_id": self.session_id, "action": {"batch_size": 64}}
        self.answers = [client.post("/step", body) for _ in range(5_000)]


def batch_reset(client: Client, _: LongEpisode) -> Send:
    """Starts as many episodes of 5,000 seconds as one client may, again and again."""
    body = {**LONGEST, "n": 150}
    body["session_id"] = batch_session(client, body)
    return repeated(client, "/reset/batch", json.dumps(body).encode())


def batch_step(client: Client, _: LongEpisode) -> Send:
    """Plays 64 seconds of 4,096 episodes, the most of one request."""
    actions = np.tile(np.array(ACTION, dtype=np.float32), (64, 4_096, 1))
    body = encode_request(BatchSteps(many_episodes(client), actions, 64))
    return repeated(client, "/step/batch", body, MEDIA_TYPE)


def batch_step_json(client: Client, _: LongEpisode) -> Send:
    """Plays a second of 4,096 episodes, the most of one request in JSON."""
    body = {"session_id": many_episodes(client), "actions": [[ACTION] * 4_096]}
    return repeated(client, "/step/batch", json.dumps(body).encode())


def many_episodes(client: Client) -> str:
    """Id of a batch session of 4,096 short episodes."""
    return batch_session(client, {"task_id": 3, "n": 4_096, "config": {"episode_length": 64}, "autoreset": True})


def batch_session(client: Client, body: Mapping[str, Any]) -> str:
    """Id of a new batch session, which the client closes at the end."""
    client.batch_session = client.post("/reset/batch", body)["session_id"]
    return client.batch_session


def old_step(client: Client, episode: LongEpisode) -> Send:
    """Repeats the last step but one, which the server answers by playing the episode again."""
    body = {"session_id": episode.session_id, "action": {"batch_size": 64}, "step": len(episode.answers) - 1}
    return repeated(client, "/step", json.dumps(body).encode())


def shorter_old_step(client: Client, _: LongEpisode) -> Send:
    """The same of an episode of which 300 seconds were played: the longest replay that is not charged."""
    body = {"session_id": client.post("/reset", LONGEST)["session_id"], "action": {"batch_size": 64}}
    for _step in range(300):
        client.post("/step", body)
    return repeated(client, "/step", json.dumps({**body, "step": 299}).encode())


def reset(client: Client, _: LongEpisode) -> Send:
    """Starts an episode of 5,000 seconds again and again."""
    body = {**LONGEST, "session_id": client.post("/reset", LONGEST)["session_id"]}
    return repeated(client, "/reset", json.dumps(body).encode())


def grade(client: Client, episode: LongEpisode) -> Send:
    """Grades the answers as a log."""
    return repeated(client, "/grader", json.dumps({"task_id": 3, "episode_log": episode.answers}).encode())


def verify(client: Client, episode: LongEpisode) -> Send:
    """Grades the answers as a log, to be verified."""
    body = {**LONGEST, "episode_log": episode.answers, "verify": True}
    return repeated(client, "/grader", json.dumps(body).encode())


def repeated(client: Client, path: str, body: bytes, media_type: str = "application/json") -> Send:
    """The same request again and again."""

    def send() -> int:
        time.sleep(client.wait_s)
        return client.send(path, body, media_type)[0]

    return send


KINDS: Final = {
    "/reset/batch, 150 x 5,000 s": batch_reset,
    "/step/batch, 262,144 s": batch_step,
    "/step/batch, 4,096 s as JSON": batch_step_json,
    "/step, old step of 5,000": old_step,
    "/step, old step of 300": shorter_old_step,
    "/reset, 5,000 s": reset,
    "/grader, 5,000 answers": grade,
    "/grader, 5,000 answers, verified": verify,
}


def play_heavy(address: tuple[str, int], orders: Connection) -> None:
    """Process of the heavy client: for each kind that it is told, sends its requests until told to stop.

    Answers with the statuses of the requests.
    """
    episode = LongEpisode(Client(address, HEAVY))
    orders.send(None)
    while (name := orders.recv()) is not None:
        client, statuses = Client(address, HEAVY), list[int]()
        send = None if name == ALONE else KINDS[name](client, episode)
        orders.send(None)
        while send is not None and not orders.poll():
            statuses.append(send())
        orders.recv()
        if client.batch_session is not None:
            client.post("/close/batch", {"session_id": client.batch_session})
        orders.send(statuses)


# ---------------------------------------------------------------- the quiet client


def step_times_ms(client: Client, seconds: float) -> list[float]:
    """Times of the quiet client's steps."""
    session = client.post("/reset", {**LONGEST, "seed": 2})["session_id"]
    body = json.dumps({"session_id": session, "action": {"batch_size": 64}}).encode()
    times, began = list[float](), time.perf_counter()
    until = began + seconds
    while began < until:
        status, _ = client.send("/step", body)
        now = time.perf_counter()
        if status != 200:
            raise RuntimeError(f"a step of the quiet client was answered with {status}")
        times.append(1000 * (now - began))
        time.sleep(max(0.0, EVERY_S - (now - began)))
        began = time.perf_counter()
    return times


def main() -> int:
    """Print the table and write it to a file; returns 1 if a ratio is above the bar."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=5.0, help="length of one measurement")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each kind")
    args = parser.parse_args()
    measured: dict[str, list[Measured]] = {name: [] for name in (ALONE, *KINDS)}
    with own_server() as (url, _), heavy_client(url) as heavy:
        quiet = Client(address_of(url), QUIET)
        step_times_ms(quiet, 1.0)
        for _ in range(args.rounds):
            for name, found in measured.items():
                heavy.send(name)
                heavy.recv()
                times = sorted(step_times_ms(quiet, args.seconds))
                heavy.send(ALONE)
                statuses = heavy.recv()
                p50_ms, p99_ms = statistics.median(times), times[int(0.99 * len(times))]
                found.append(Measured(p50_ms, p99_ms, len(statuses), statuses.count(429)))
    report = {
        "machine": machine(),
        "seconds": args.seconds,
        "measured": {name: [asdict(one) for one in found] for name, found in measured.items()},
    }
    text, worst = markdown(report)
    print(text)
    store("neighbours", report, text)
    return int(worst > BAR)


def markdown(report: Mapping[str, Any]) -> tuple[str, float]:
    """The table for the documents, and its highest ratio."""
    of, measured = report["machine"], report["measured"]
    lines = [
        "<!-- written by benchmarks/speed/neighbours.py; do not edit -->",
        "",
        f"`python -m benchmarks.speed.neighbours`: one run, kinds in turns, medians. {of['cpus']} processors, "
        f"Python {of['python']}, load {of['load']:.1f} at the end: read the ratios, not the times.",
        "",
    ]
    rows = []
    worst = 0.0
    for name, found in measured.items():
        pairs = zip(found, measured[ALONE], strict=True)
        ratio = statistics.median(one["p99_ms"] / alone["p99_ms"] for one, alone in pairs)
        worst = max(worst, ratio)
        rate = sum(one["requests"] for one in found) / len(found) / report["seconds"]
        p50_ms, p99_ms = (statistics.median(one[key] for one in found) for key in ("p50_ms", "p99_ms"))
        cells = [f"{rate:.1f}", str(sum(one["refused"] for one in found)), f"{p50_ms:.2f}", f"{p99_ms:.2f}"]
        verdict = "reached" if ratio <= BAR else "**missed**"
        if name == ALONE:
            name, cells[:2], verdict = "nothing", ["", ""], ""
        rows.append((name, *cells, f"{ratio:.1f}", verdict))
    heads = ("the heavy client sends", "requests/s", "refused", "quiet p50, ms", "quiet p99, ms", "p99 : alone")
    return "\n".join([*lines, *table((*heads, f"<= {BAR:g}"), rows)]) + "\n", worst


@contextlib.contextmanager
def heavy_client(url: str) -> Iterator[Connection]:
    """Orders for a heavy client, which has played its long episode."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=play_heavy, args=(address_of(url), there), daemon=True)
    process.start()
    try:
        here.recv()
        yield here
    finally:
        here.send(None)
        process.join()


if __name__ == "__main__":
    sys.exit(main())
