"""Serving engine with known iteration times, for tests: continuous batching behind the OpenAI streaming API.

It has no model: each iteration takes the time that a given formula says and writes a token of every running sequence.
It implements only the parts of the API that a load generator uses: the model list, streamed completions of token ids,
and vLLM's metrics.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

Law = Callable[[int, int, list[int]], float]
"""Seconds of an iteration by its decoding sequences, the tokens of their contexts, and the prompts that it computes."""


@dataclass
class Served:
    """A request of :func:`serve_virtually`: when it was sent and when each of its tokens was written, s."""

    prompt: int
    goal: int
    sent_s: float
    token_s: list[float] = field(default_factory=list)


def serve_virtually(law: Law, lengths: list[tuple[int, int]], clients: int, way_s: float = 0.0) -> list[Served]:
    """A closed loop of requests (prompt, output) served by an engine with this law, without waiting for it.

    Half of ``way_s`` lies between a client and the engine in either direction; times are the engine's.
    """
    first, later = lengths[:clients], lengths[clients:]
    return _serve(law, [Served(*each, 0.0) for each in first], later, way_s)


def serve_arrivals_virtually(law: Law, arrivals: list[tuple[float, int, int]]) -> list[Served]:
    """Requests (s, prompt, output) that an engine with this law serves as they arrive, without waiting for it."""
    return _serve(law, [Served(prompt, output, at_s) for at_s, prompt, output in arrivals], [], 0.0)


def _serve(law: Law, waiting: list[Served], todo: list[tuple[int, int]], way_s: float) -> list[Served]:
    """Serve the waiting requests; a client whose request has ended sends the next one of ``todo``."""
    todo, finished = list(todo), []
    running: list[Served] = []
    now = 0.0
    while waiting or running:
        begun = [each for each in waiting if each.sent_s + way_s / 2 <= now]
        if not begun and not running:
            now = min(each.sent_s for each in waiting) + way_s / 2
            continue
        waiting = [each for each in waiting if each not in begun]
        context = sum(each.prompt + len(each.token_s) for each in running)
        now += law(len(running), context, [each.prompt for each in begun])
        running += begun
        for each in running:
            each.token_s.append(now)
        done = [each for each in running if len(each.token_s) == each.goal]
        running = [each for each in running if len(each.token_s) < each.goal]
        finished += done
        waiting += [Served(*todo.pop(0), now + way_s / 2) for _ in done if todo]
    return finished


@dataclass
class _Sequence:
    prompt: int
    goal: int
    written: int = 0
    news: asyncio.Queue[int] = field(default_factory=asyncio.Queue)


@dataclass
class StandIn:
    """The engine's state; ``counters`` are metrics that a test may raise."""

    law: Law
    max_num_seqs: int = 64
    token_budget: int = 2048
    block_tokens: int = 16
    blocks: int = 4097
    streams: bool = True
    counters: dict[str, float] = field(default_factory=dict)
    rising: str | None = None
    """Counter that every request raises, like those of an engine that preempts or drafts."""
    waiting: list[_Sequence] = field(default_factory=list)
    running: list[_Sequence] = field(default_factory=list)

    async def iterate(self) -> None:
        clock = asyncio.get_running_loop().time
        due = clock()
        while True:
            begun, prompt = [], 0
            room = self.max_num_seqs - len(self.running)
            while self.waiting and len(begun) < room and prompt + self.waiting[0].prompt <= self.token_budget:
                begun.append(self.waiting.pop(0))
                prompt += begun[-1].prompt
            if not begun and not self.running:
                await asyncio.sleep(0.0005)
                due = clock()
                continue
            decoding = list(self.running)
            self.running += begun
            context = sum(each.prompt + each.written for each in decoding)
            due += self.law(len(decoding), context, [each.prompt for each in begun])
            # Sleep until a deadline, so that delays of the machine do not add up.
            await asyncio.sleep(max(0.0, due - clock()))
            for each in self.running:
                each.written += 1
                each.news.put_nowait(each.written)
            self.running = [each for each in self.running if each.written < each.goal]

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                _, path, _ = line.decode().split()
                length = 0
                while header := (await reader.readline()).decode().strip().lower():
                    if header.startswith("content-length:"):
                        length = int(header.partition(":")[2])
                body = await reader.readexactly(length)
                if path == "/v1/completions":
                    await self.complete(json.loads(body), writer)
                elif path == "/v1/models":
                    reply(writer, json.dumps({"data": [{"id": "stand-in", "max_model_len": 1024}]}), "application/json")
                else:
                    reply(writer, self.metrics(), "text/plain")
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def complete(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        each = _Sequence(len(body["prompt"]), body["max_tokens"])
        if self.rising:
            self.counters[self.rising] = self.counters.get(self.rising, 0.0) + 1.0
        self.waiting.append(each)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        held = b""
        while True:
            written = await each.news.get()
            event = f"data: {json.dumps({'choices': [{'text': 'x'}], 'usage': {'completion_tokens': written}})}\n\n"
            held = held + event.encode() if not self.streams else event.encode()
            if self.streams or written == each.goal:
                writer.write(b"%x\r\n%s\r\n" % (len(held), held))
            if written == each.goal:
                break
        writer.write(b"0\r\n\r\n")

    def metrics(self) -> str:
        used = sum((each.prompt + each.written) / self.block_tokens for each in self.running) / self.blocks
        labels = f'block_size="{self.block_tokens}",num_gpu_blocks="{self.blocks}",gpu_memory_utilization="0.9"'
        lines = [
            "# TYPE vllm:cache_config_info gauge",
            f"vllm:cache_config_info{{{labels}}} 1.0",
            f"vllm:num_requests_running {len(self.running)}",
            f"vllm:num_requests_waiting {len(self.waiting)}",
            f"vllm:kv_cache_usage_perc {used}",
            *(f"{name} {value}" for name, value in self.counters.items()),
        ]
        return "\n".join(lines) + "\n"


def reply(writer: asyncio.StreamWriter, text: str, kind: str) -> None:
    content = text.encode()
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n" % (kind.encode(), len(content)))
    writer.write(content)


@contextmanager
def running_engine(engine: StandIn) -> Iterator[str]:
    """Run the engine on a free port in a separate thread; yields its address."""
    started = threading.Event()
    port = 0
    stop: Callable[[], None] = lambda: None  # noqa: E731

    async def serve() -> None:
        nonlocal port, stop
        loop, stopped = asyncio.get_running_loop(), asyncio.Event()
        stop = lambda: loop.call_soon_threadsafe(stopped.set)  # type: ignore[assignment,return-value]  # noqa: E731
        server = await asyncio.start_server(engine.answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        started.set()
        iterating = asyncio.create_task(engine.iterate())
        await stopped.wait()
        iterating.cancel()
        server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    started.wait()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        stop()
        thread.join()
