"""Processor time of the load generator, which the latencies that it measures include.

    python -m benchmarks.live.client_time    prints it by number of clients (half a minute)

A process streams outputs as vLLM does, to all clients every :data:`ITERATION_S`, at hardly any cost of its own. The
generator (:func:`live.driver.play_closed`) is one process that reads all streams.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import time
from multiprocessing.connection import Connection
from typing import Final

import numpy as np

from live.driver import EngineApi, EngineRequest, play_closed

ITERATION_S: Final = 0.03
"""Long enough for the generator to keep up with the largest number of clients on a slow machine."""
CLIENTS: Final = (8, 16, 32, 64)
ROUNDS: Final = 4
OUTPUT_TOKENS: Final = (32, 96)
_HEAD: Final = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class _Stream(asyncio.Protocol):
    """A connection that answers each completion request with one event per iteration."""

    def __init__(self, streams: set[_Stream]) -> None:
        self._streams, self._received = streams, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        if found and len(body) >= int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0]):
            self._left, self._sent, self._received = int(json.loads(body)["max_tokens"]), 0, b""
            self._streams.add(self)

    def send(self) -> None:
        """Send the next token."""
        self._sent += 1
        event = {
            "id": "cmpl-0123456789abcdef0123456789abcdef",
            "object": "text_completion",
            "created": 0,
            "model": "model",
            "choices": [{"index": 0, "text": " word", "logprobs": None, "finish_reason": None, "stop_reason": None}],
            "usage": {"prompt_tokens": 32, "total_tokens": 32 + self._sent, "completion_tokens": self._sent},
        }
        last = self._sent == self._left
        text = b"data: " + json.dumps(event).encode() + b"\n\n" + (b"data: [DONE]\n\n" if last else b"")
        chunk = b"%x\r\n%s\r\n" % (len(text), text) + (b"0\r\n\r\n" if last else b"")
        self._transport.write((_HEAD if self._sent == 1 else b"") + chunk)
        if last:
            self._streams.remove(self)


def _serve(port: Connection) -> None:
    asyncio.run(_iterate(port))


async def _iterate(port: Connection) -> None:
    streams: set[_Stream] = set()
    server = await asyncio.get_running_loop().create_server(lambda: _Stream(streams), "127.0.0.1", 0)
    port.send(server.sockets[0].getsockname()[1])
    while True:
        began = time.monotonic()
        for stream in tuple(streams):
            stream.send()
        await asyncio.sleep(max(0.0, began + ITERATION_S - time.monotonic()))


def main() -> None:
    here, there = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=_serve, args=(there,), daemon=True)
    server.start()
    api = EngineApi(f"http://127.0.0.1:{here.recv()}", model="model")
    rng = np.random.default_rng(0)
    print(
        "| clients | tokens/s | processor time per token, ms | tokens/s at which it fills a core |\n|---|---|---|---|"
    )
    for clients in CLIENTS:
        outputs = rng.integers(*OUTPUT_TOKENS, ROUNDS * clients, endpoint=True)
        began, used = time.monotonic(), time.process_time()
        played = play_closed(api, [EngineRequest(0.0, 32, int(n)) for n in outputs], clients)
        seconds, used = time.monotonic() - began, time.process_time() - used
        assert all(each.completed for each in played)
        each_ms = 1e3 * used / outputs.sum()
        print(f"| {clients} | {outputs.sum() / seconds:,.0f} | {each_ms:.2f} | {1e3 / each_ms:,.0f} |", flush=True)
    server.terminate()


if __name__ == "__main__":
    main()
