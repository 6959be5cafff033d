"""Load generator for a serving engine: sends requests through the OpenAI completions API and times each of them.

Prompts are random token ids, so no tokenizer is needed and no two prompts share a prefix. Every request writes exactly
the requested number of tokens. Times are seconds on one clock that starts with the load.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import ssl
import threading
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Final, Self

import httpx

from inferencegym.errors import RemoteError, ServerUnavailableError, refusal, short_text
from live.metrics import MetricsPage, read_page

TOKEN_IDS: Final = (100, 1100)
"""First and last token id of the prompts: ordinary words in every usual vocabulary."""
SILENCE_S: Final = 300.0
"""Longest time without a byte from the engine before a request counts as failed."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One request: when it is due (s after the start), its lengths (tokens) and its class (0 is served first).

    ``acceptance``, the probability that a draft is accepted if all before it are, is for engines that simulate it.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    class_index: int = 0
    acceptance: float | None = None


@dataclass(slots=True, eq=False)
class RequestTiming:
    """Times of a request so far, in seconds after the start; None for events that have not happened yet.

    ``tokens`` is the number of tokens received. ``error`` is empty unless the request failed or was cancelled.
    """

    request: EngineRequest
    sent_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    ended_s: float | None = None
    tokens: int = 0
    error: str = ""
    tokens_at: list[tuple[float, int]] = field(default_factory=list, repr=False)
    """Tokens received so far, by time: an engine may send several at once."""

    def receive(self, now_s: float, tokens: int) -> None:
        """Record the number of tokens received by now, if it has grown."""
        if tokens > self.tokens:
            if self.first_token_s is None:
                self.first_token_s = now_s
            self.last_token_s, self.tokens = now_s, tokens
            self.tokens_at.append((now_s, tokens))

    @property
    def completed(self) -> bool:
        """Whether all tokens have been received."""
        return self.ended_s is not None and not self.error

    def ttft_ms(self) -> float | None:
        """Time to first token (ms), counted from when the request was due."""
        return None if self.first_token_s is None else 1e3 * (self.first_token_s - self.request.arrival_s)

    def tpot_ms(self) -> float | None:
        """Mean time per output token after the first (ms); None until there is a second token."""
        if self.first_token_s is None or self.last_token_s is None:
            return None
        after = self.tokens - self.tokens_at[0][1]
        return 1e3 * (self.last_token_s - self.first_token_s) / after if after > 0 else None


class EngineApi:
    """The OpenAI API of one engine: which model it serves, and completions of token ids.

    :meth:`check` fetches ``model`` and ``max_model_len`` (tokens), and raises :class:`RemoteError` if there is no
    engine at the address. With ``priorities`` a request carries its class as the engine's priority; lower numbers are
    served first: vLLM uses it only under ``--scheduling-policy priority``, SGLang with
    ``--enable-priority-scheduling --schedule-low-priority-values-first``.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        priorities: bool = False,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise refusal("engine", url, f"an address with http:// or https://, such as http://{url}")
        self.url = url.rstrip("/")
        self.model = model
        self.max_model_len: int | None = None
        self._random = random.Random(0)
        self._priorities = priorities

    def check(self) -> Self:
        """Ask the engine which model it serves."""
        served = self.get_json("/v1/models").get("data") or [{}]
        chosen = next((entry for entry in served if self.model in (None, entry.get("id"))), None)
        if chosen is None or "id" not in chosen:
            names = ", ".join(str(entry.get("id")) for entry in served)
            raise RemoteError(f"{self.url} does not serve the model {self.model!r}: it serves {short_text(names)}")
        self.model = str(chosen["id"])
        longest = chosen.get("max_model_len")
        self.max_model_len = None if longest is None else int(longest)
        return self

    def get_text(self, path: str) -> str:
        """Answer to a GET request as text; raises :class:`RemoteError` without a successful answer."""
        return self._ask("GET", path).text

    def get_json(self, path: str) -> dict[str, Any]:
        """Answer to a GET request as a JSON object; raises :class:`RemoteError` if it is not one."""
        return _json_object(self._ask("GET", path))

    def post_json(self, path: str, body: dict[str, Any]) -> Any:
        """Answer to a POST request as JSON; raises :class:`RemoteError` if it is not JSON."""
        return _json(self._ask("POST", path, body))

    def metrics(self) -> MetricsPage:
        """The engine's metrics page; raises :class:`RemoteError` if there is none."""
        return read_page(self.get_text("/metrics"))

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        try:
            answer = httpx.request(method, self.url + path, json=body, timeout=10.0, verify=_tls())
        except httpx.HTTPError as error:
            raise ServerUnavailableError(
                f"no answer from {self.url}{path} ({error!r}): is the engine running, and is this its address?"
            ) from error
        if answer.is_error:
            told = short_text(answer.text, 300)
            raise RemoteError(f"{self.url}{path} answers {answer.status_code}: {told}", answer.status_code)
        return answer

    def body(self, request: EngineRequest) -> dict[str, Any]:
        """Body of the completion request."""
        low, high = TOKEN_IDS
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": self._random.choices(range(low, high + 1), k=request.prompt_tokens),
            "max_tokens": request.output_tokens,
            "min_tokens": request.output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        if self._priorities:
            body["priority"] = request.class_index
        if request.acceptance is not None:
            body["vllm_xargs"] = {"acceptance": request.acceptance}
        return body

    def client(self) -> httpx.AsyncClient:
        """HTTP client without a limit on concurrent requests."""
        return httpx.AsyncClient(
            timeout=httpx.Timeout(SILENCE_S, connect=30.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
        )

    async def complete(self, client: httpx.AsyncClient, timing: RequestTiming, started: float) -> None:
        """Send a request now and record its times; ``started`` is the clock's zero (``time.monotonic()``)."""
        timing.sent_s = time.monotonic() - started
        try:
            async with client.stream("POST", f"{self.url}/v1/completions", json=self.body(timing.request)) as answer:
                if answer.is_error:
                    await answer.aread()
                    timing.error = f"status {answer.status_code}: {short_text(answer.text, 300)}"
                else:
                    await _receive(answer, timing, started)
        except httpx.HTTPError as error:
            timing.error = repr(error)
        except asyncio.CancelledError:
            timing.error = "cancelled"
            raise
        finally:
            timing.ended_s = time.monotonic() - started


@cache
def _tls() -> ssl.SSLContext:
    """Certificates, read once: httpx would read them for every request, which takes tens of ms, for http:// too."""
    return httpx.create_ssl_context()


async def _receive(answer: httpx.Response, timing: RequestTiming, started: float) -> None:
    async for event in _events(answer):
        if "error" in event:
            timing.error = short_text(json.dumps(event["error"]), 300)
            return
        timing.receive(time.monotonic() - started, (event.get("usage") or {}).get("completion_tokens", 0))
    if timing.tokens != timing.request.output_tokens:
        timing.error = f"{timing.tokens} of {timing.request.output_tokens} tokens came"


async def _events(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """Server-sent events of an OpenAI stream, except the last one, ``[DONE]``."""
    async for line in answer.aiter_lines():
        if line.startswith("data:") and (data := line[5:].strip()) != "[DONE]":
            yield json.loads(data)


def _json(answer: httpx.Response) -> Any:
    try:
        return answer.json()
    except ValueError as error:
        raise RemoteError(f"the answer of {answer.url} is not JSON: {short_text(answer.text)!r}") from error


def _json_object(answer: httpx.Response) -> dict[str, Any]:
    found = _json(answer)
    if not isinstance(found, dict):
        raise RemoteError(f"the answer of {answer.url} is not a JSON object: {short_text(answer.text)!r}")
    return found


# ---------------------------------------------------------------- loads


class OpenLoop:
    """Sends each request when it is due, whatever the engine's state, from a separate thread; a context manager.

    ``timings`` has one entry per request, in the order given, and may be read at any time. Leaving the context cancels
    unfinished requests, and the engine drops them.
    """

    def __init__(self, api: EngineApi, requests: Sequence[EngineRequest]) -> None:
        self.timings = [RequestTiming(request) for request in requests]
        self._api = api
        self._started = math.nan
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._play()), name="load", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *error: object) -> None:
        if self._loop is not None and self._stop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def now_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started

    def advance(self, to_s: float) -> None:
        """Wait until this many seconds have passed since the start."""
        time.sleep(max(0.0, to_s - self.now_s()))

    def wait(self) -> list[RequestTiming]:
        """Wait until every request has ended."""
        self._thread.join()
        return self.timings

    async def _play(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        async with self._api.client() as client:
            self._started = time.monotonic()
            self._ready.set()
            sending = asyncio.create_task(self._send_all(client))
            stopped = asyncio.create_task(self._stop.wait())
            await asyncio.wait([sending, stopped], return_when=asyncio.FIRST_COMPLETED)
            for task in (sending, stopped):
                task.cancel()
            await asyncio.gather(sending, stopped, return_exceptions=True)

    async def _send_all(self, client: httpx.AsyncClient) -> None:
        async with asyncio.TaskGroup() as group:
            for timing in sorted(self.timings, key=lambda timing: timing.request.arrival_s):
                await asyncio.sleep(max(0.0, timing.request.arrival_s - self.now_s()))
                group.create_task(self._api.complete(client, timing, self._started))


class ClosedLoop(OpenLoop):
    """Sends requests in the order given from ``clients`` clients, each its next one when its last has ended.

    Given arrival times are ignored: a request is due when its client sends it, and 0 until then.
    """

    def __init__(self, api: EngineApi, requests: Sequence[EngineRequest], clients: int) -> None:
        super().__init__(api, [replace(request, arrival_s=0.0) for request in requests])
        self._clients = clients

    async def _send_all(self, client: httpx.AsyncClient) -> None:
        unsent = iter(self.timings)

        async def send_one_after_another() -> None:
            for timing in unsent:
                timing.request = replace(timing.request, arrival_s=self.now_s())
                await self._api.complete(client, timing, self._started)

        async with asyncio.TaskGroup() as group:
            for _ in range(self._clients):
                group.create_task(send_one_after_another())


def play_open(api: EngineApi, requests: Sequence[EngineRequest]) -> list[RequestTiming]:
    """Send each request when it is due; returns when all have ended."""
    with OpenLoop(api, requests) as load:
        return load.wait()


def play_closed(api: EngineApi, requests: Sequence[EngineRequest], clients: int) -> list[RequestTiming]:
    """Send requests from this many clients (:class:`ClosedLoop`); returns when all have ended."""
    with ClosedLoop(api, requests, clients) as load:
        return load.wait()
