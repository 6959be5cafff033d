"""Longest wait of one client's steps while another client sends large bodies, beside the same client undisturbed.

    python -m benchmarks.large_bodies                 every shape, three runs each
    python -m benchmarks.large_bodies --only key      shapes whose name contains "key"

Starts a server of its own. The client that steps, the one that sends and the server are three processes, so on fewer
than three idle cores a part of each wait is the scheduler's. Prints, for each shape, milliseconds that the steps took
in the worst case and in 99 of 100 cases, undisturbed and beside the body; processor time of the one call that reads the
body, which depends less on what else the machine does; and the statuses of the answers.
"""

from __future__ import annotations

import argparse
import gc
import http.client
import json
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Final

import orjson

from benchmarks.load import loopback, own_server

RUNS: Final = 3
BODIES_PER_RUN: Final = 3
UNDISTURBED_S: Final = 2.0
PAUSE_S: Final = 0.001
"""Between two steps, so that the client leaves the processor to the others."""
MEBIBYTE: Final = 2**20


class Client:
    """A keep-alive HTTP connection."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)

    def post(self, path: str, body: Any) -> tuple[int | str, bytes]:
        """Status and body of the answer; the status is "reset" where the connection ended before one could be read."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        refused = False
        try:
            # What is refused may be answered, and the connection closed, before all of it was sent.
            try:
                self._connection.request("POST", path, data, {"Content-Type": "application/json"})
            except (BrokenPipeError, ConnectionResetError):
                refused = True
            answer = self._connection.getresponse()
            seen: tuple[int | str, bytes] = answer.status, answer.read()
        except (BrokenPipeError, ConnectionResetError):
            refused, seen = True, ("reset", b"")
        if refused:
            self._connection.close()
        return seen

    def value(self, path: str, body: Any) -> Any:
        status, answer = self.post(path, body)
        if status != 200:
            raise SystemExit(f"{path}: {status} {answer[:300]!r}")
        return json.loads(answer)


def shapes(client: Client) -> dict[str, tuple[str, bytes]]:
    """Bodies by name, with the path that each is sent to: the largest legitimate ones and the worst that are known."""
    play = {"agent": "heuristic", "task_id": 1, "config": {"episode_length": 5000}, "log": True}
    log = client.value("/play", play)["episode_log"]
    session = client.value("/reset", {"config": {"episode_length": 10}})["session_id"]
    answer = client.value("/step", {"session_id": session})
    one = client.value("/reset/batch", {"n": 1, "autoreset": True})["session_id"]
    many = client.value("/reset/batch", {"n": 4096, "autoreset": True})["session_id"]
    action = [0.123456789, 0, 32, 0, 0]
    csv = "arrival_s,prompt_tokens,output_tokens\n" + "".join(
        f"{i / 100:.2f},{i % 999},{i % 99}\n" for i in range(200_000)
    )
    jsonl = "".join(
        json.dumps({"timestamp": i * 20, "input_length": i % 999, "output_length": 9}) + "\n" for i in range(50_000)
    )
    filler = 8 * MEBIBYTE - 1000

    def grader(entries: bytes) -> tuple[str, bytes]:
        return "/grader", b'{"task_id":1,"episode_log":[' + entries + b"]}"

    def text(value: Any) -> bytes:
        return json.dumps(value).encode()

    return {
        "whole log": ("/grader", text({"task_id": 1, "episode_log": log})),
        "whole log, verified": (
            "/grader",
            text({"task_id": 1, "episode_log": log, "seed": 42, "config": play["config"], "verify": True}),
        ),
        "log of /step answers": ("/grader", text({"task_id": 1, "episode_log": [answer] * 5000})),
        "text of 8 MiB": grader(b'"' + b"x" * filler + b'"'),
        "escapes of 8 MiB": grader(b'"' + b"\\n" * (filler // 2) + b'"'),
        "two-byte letters of 8 MiB": grader(b'"' + "é".encode() * (filler // 2) + b'"'),
        "key of 8 MiB": grader(b'{"' + b"x" * filler + b'":1}'),
        "colons in 8 MiB of text": grader(b'"' + b":" * filler + b'"'),
        "spaces of 8 MiB": grader(b" " * filler),
        "25 objects of 11,900 keys": grader(b",".join([text({f"k{i}": 1 for i in range(11_900)})] * 25)),
        "300,000 different keys": grader(text({f"k{i}": 1 for i in range(300_000)})),
        "300,000 floats": grader(b",".join([b"0.12345678901234567890123"] * 300_000)),
        "300,000 short texts": grader(b",".join(b'"%d"' % (i % 10_000) for i in range(300_000))),
        "62,000 nested arrays": grader(b",".join([b"[[[[[]]]]]"] * 12_390)),
        "150,000 empty objects": grader(b",".join([b"{}"] * 150_000)),
        "shadow, 200,000 lines": (
            "/shadow",
            text({"log": csv[: 4 * MEBIBYTE - 10_000].rsplit("\n", 1)[0], "policies": ["naive"]}),
        ),
        "shadow, JSON lines": ("/shadow", text({"log": jsonl, "name": "log.jsonl", "policies": ["naive"]})),
        "batch, 16,384 x 1": ("/step/batch", text({"session_id": one, "actions": [[action]] * 16_384})),
        "batch, 4 x 4,096": ("/step/batch", text({"session_id": many, "actions": [[action] * 4096] * 4})),
    }


def send(port: int, path: str, body: bytes, results: Connection) -> None:
    """The client that sends one body a few times; runs in a process of its own."""
    client, statuses = Client(port), Counter[int | str]()
    for _ in range(BODIES_PER_RUN):
        time.sleep(0.2)
        statuses[client.post(path, body)[0]] += 1
    results.send(dict(statuses))


def step_until(client: Client, done: Callable[[], bool]) -> list[float]:
    """Seconds that each step of one client took until ``done()``."""
    took, session = [], None
    while not done():
        if session is None:
            session, left = client.value("/reset", {"config": {"episode_length": 5000}})["session_id"], 5000
        began = time.perf_counter()
        client.value("/step", {"session_id": session})
        took.append(time.perf_counter() - began)
        left -= 1
        session = session if left else None
        time.sleep(PAUSE_S)
    return took


def in_words(took: list[float]) -> str:
    ordered = sorted(took)
    return f"{1000 * ordered[-1]:6.1f} {1000 * ordered[int(0.99 * len(ordered))]:6.1f}"


def run(port: int, client: Client, name: str, path: str, body: bytes) -> None:
    """Measure one shape and print its row."""
    until = time.perf_counter() + UNDISTURBED_S
    undisturbed = step_until(client, lambda: time.perf_counter() > until)
    results, theirs = multiprocessing.Pipe()
    sender = multiprocessing.Process(target=send, args=(port, path, body, theirs))
    sender.start()
    beside = step_until(client, results.poll)
    sender.join()
    size = len(body) / MEBIBYTE
    row = f"{name:<30} {size:5.1f} MiB {in_words(undisturbed)} {in_words(beside)} {1000 * reading_s(body):6.1f}"
    print(f"{row}  {results.recv()}", flush=True)


def reading_s(body: bytes) -> float:
    """Processor time of the one call that reads a body and lets nobody else run meanwhile."""
    gc.disable()  # as the server does for long texts
    began = time.thread_time()
    orjson.loads(body)
    took_s = time.thread_time() - began
    gc.enable()
    return took_s


def main() -> None:
    parser = argparse.ArgumentParser(description="Waits of one client's steps beside large bodies of another.")
    parser.add_argument("--only", default="", help="shapes whose name contains this")
    parser.add_argument("--runs", type=int, default=RUNS, help=f"runs of each shape (default: {RUNS})")
    args = parser.parse_args()
    unlimited = {f"{name}_PER_MINUTE": 0 for name in ("RESETS", "BATCH_RESETS", "GRADES", "PLAYS", "SHADOWS")}
    with own_server(1, **unlimited) as (url, _):
        port = loopback(url)[1]
        client = Client(port)
        print(f"{'steps in ms: worst and p99':<40} undisturbed        beside   read  answers")
        for name, (path, body) in shapes(client).items():
            for _ in range(args.runs if args.only in name else 0):
                run(port, client, name, path, body)


if __name__ == "__main__":
    main()
