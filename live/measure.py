"""Load plan that reveals how long an engine's iterations take, played against the engine in a few minutes.

It plays closed loops of 1, 2, 4 ... clients, each with short and with long prompts, then the first loop again (to see
whether the machine has changed) and Poisson arrivals, which the fit never sees. :mod:`simulator.offline.engine_fit`
turns the arrival times of tokens into iteration times. The simulator then plays every phase, and its errors are
reported too.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Final, Self

import numpy as np

from inferencegym.errors import DataFormatError, InvalidConfigError, RemoteError, refusal
from live.driver import EngineApi, EngineRequest, RequestTiming, play_closed, play_open
from live.metrics import MetricsPage
from simulator.hardware.engine_times import EngineFacts
from simulator.hardware.tables import FloatArray
from simulator.offline.engine_fit import MeasuredEngine, TimedRequests, measured_engine

SHAPES: Final = {"short": (32, 64), "long": (256, 32)}
"""Mean prompts and outputs (tokens) of the loops; both vary by half in either direction."""
LEAST_ROUNDS, MOST_ROUNDS = 2, 12
"""Fewest and most requests per client in a loop."""
POISSON_SHARE: Final = 0.6
"""Rate of the Poisson phase, as a share of the highest throughput (requests/s) of a loop."""
WATCH_S: Final = 0.25
"""Time between two readings of the engine's metrics."""
BOUNDED_LOOKS, ROOMY = 3, 0.8
"""Readings with waiting requests, and used share of the pool below this, that show a bounded batch."""
ASSUMED_BATCHED_TOKENS: Final = 2048
"""Token budget of an iteration if the engine does not state it: vLLM's default on most devices."""


@dataclass(frozen=True, slots=True)
class MeasureSettings:
    """Settings of a measurement, and facts about the engine (None: as the engine reports, or unknown).

    ``seconds`` is the approximate length of the whole load; ``most_clients`` the largest closed loop.
    """

    seconds: float = 180.0
    most_clients: int = 64
    max_num_seqs: int | None = None
    max_batched_tokens: int | None = None
    max_model_len: int | None = None
    block_tokens: int | None = None
    kv_pool_tokens: int | None = None
    kv_bytes_per_token: float | None = None
    weights_gb: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 5.0 <= self.seconds <= 3600.0:
            raise refusal("seconds", self.seconds, "5 to 3600")
        if not 2 <= self.most_clients <= 1024:
            raise refusal("most_clients", self.most_clients, "2 to 1024")
        for name in ("max_num_seqs", "max_batched_tokens", "max_model_len", "block_tokens", "kv_pool_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise refusal(name, value, "1 or more")
        if self.kv_bytes_per_token is not None and not 0.0 < self.kv_bytes_per_token < np.inf:
            raise refusal("kv_bytes_per_token", self.kv_bytes_per_token, "above 0")
        if not 0.0 <= self.weights_gb < np.inf:
            raise refusal("weights_gb", self.weights_gb, "0 or more")


Progress = Callable[[str, float], None]
"""Callback with the name of the phase that begins and the share of the load that is done."""


def measure_engine(api: EngineApi, settings: MeasureSettings, progress: Progress | None = None) -> MeasuredEngine:
    """Play the load plan and fit the engine's iteration times.

    Raises :class:`InvalidConfigError` if neither the engine nor the settings state a fact that is needed,
    :class:`RemoteError` if requests fail, :class:`DataFormatError` with the reason if the measurements do not support a
    fit.
    """
    report = progress or (lambda name, share: None)
    api.check()
    page = _page(api)
    notes: list[str] = []
    facts = engine_facts(api, page, settings, notes)
    plan = _Plan(api, facts, settings, page is not None)
    for name, share in plan.play():
        report(name, share)
    notes += plan.notes
    facts = replace(facts, max_num_seqs=plan.max_num_seqs)
    return measured_engine(facts, plan.loops, [plan.poisson], notes)


def engine_facts(api: EngineApi, page: MetricsPage | None, settings: MeasureSettings, notes: list[str]) -> EngineFacts:
    """Limits and KV pool from the settings, else from the engine; assumptions are added to ``notes``."""
    stated = {} if page is None else _cache_labels(page)

    def fact(name: str, told: float | None, label: Sequence[str], option: str) -> float:
        if told is not None:
            return told
        for key in label:
            if (text := stated.get(key, "None")) not in ("None", ""):
                return float(text)
        raise InvalidConfigError(f"the engine does not state {name}: give it with --{option}", name)

    sizes = ("effective_attention_block_size", "block_size")
    block = int(fact("block_tokens", settings.block_tokens, sizes, "block-tokens"))
    if settings.kv_pool_tokens is not None:
        blocks = settings.kv_pool_tokens // block
    else:
        # One of vLLM's blocks is a placeholder and holds nothing.
        blocks = int(fact("the KV pool", None, ("num_gpu_blocks",), "kv-pool-tokens")) - 1
    pool_bytes = stated.get("kv_cache_memory_bytes", "None")
    per_token = settings.kv_bytes_per_token
    # If the number of blocks was given, vLLM reports the bytes that it would have used, not those that it uses.
    own_pool = stated.get("num_gpu_blocks_override", "None") in ("None", "")
    if per_token is None and own_pool and pool_bytes not in ("None", ""):
        per_token = float(pool_bytes) / (block * (blocks + 1))
    if per_token is None:
        raise InvalidConfigError(
            "the engine does not state the bytes that its KV cache takes per token: give them with "
            "--kv-bytes-per-token; for most models 2 x layers x KV heads x head size x bytes of a number, by the "
            "number of cards that share them (Llama-3-8B in 16 bit on one card: 131072)",
            "kv_bytes_per_token",
        )
    longest = settings.max_model_len or api.max_model_len
    if longest is None:
        raise InvalidConfigError("the engine does not state its longest request: give --max-model-len", "max_model_len")
    if settings.max_batched_tokens is None:
        notes.append(
            f"{ASSUMED_BATCHED_TOKENS} prompt tokens per iteration are assumed: the engine does not state them; give "
            "its max_num_batched_tokens with --max-batched-tokens"
        )
    if not settings.weights_gb:
        notes.append("memory figures count the KV pool alone: give the weights on a card with --weights-gb")
    share = stated.get("gpu_memory_utilization", "None")
    return EngineFacts(
        model=str(api.model),
        block_tokens=block,
        pool_blocks=blocks,
        kv_bytes_per_token=float(per_token),
        max_num_seqs=settings.max_num_seqs,
        max_batched_tokens=settings.max_batched_tokens or ASSUMED_BATCHED_TOKENS,
        max_model_len=int(longest),
        weights_gb=settings.weights_gb,
        memory_share=float(share) if share not in ("None", "") else 1.0,
    )


def _cache_labels(page: MetricsPage) -> dict[str, str]:
    try:
        return page.labels("vllm:cache_config_info")
    except RemoteError:
        return {}


def _page(api: EngineApi) -> MetricsPage | None:
    """The metrics page; None if the engine has none, in which case the settings must state everything."""
    try:
        return api.metrics()
    except RemoteError:
        return None


class _Plan:
    """Phases of the load; their sizes follow from how fast the engine has answered so far."""

    def __init__(self, api: EngineApi, facts: EngineFacts, settings: MeasureSettings, has_metrics: bool) -> None:
        self._api, self._facts, self._settings = api, facts, settings
        self._has_metrics = has_metrics
        self._random = random.Random(settings.seed)
        self._tpot_s = 0.0
        self._best_rps = dict.fromkeys(SHAPES, 0.0)
        self.loops: list[TimedRequests] = []
        self.poisson: TimedRequests
        self.max_num_seqs = settings.max_num_seqs
        self.notes: list[str] = []

    def play(self) -> Iterator[tuple[str, float]]:
        """Play all phases; yields each phase's name and the share of the plan before it."""
        sizes = [1 << i for i in range(self._most_clients().bit_length())]
        steps = [(n, shape) for n in sizes for shape in SHAPES]
        phase_s = self._settings.seconds / (len(steps) + 3)
        yield "warm-up", 0.0
        # The first requests compile and allocate, so their times are not those of iterations.
        self._watched("warm-up", lambda: play_closed(self._api, self._requests("short", 4), 2))
        done, full = 0, False
        for n, shape in steps:
            yield _loop_name(n, shape), (done + 1) / (len(steps) + 3)
            done += 1
            if not full:
                self.loops.append(self._loop(n, shape, phase_s))
                full = self.max_num_seqs is not None and self.max_num_seqs < n
        if full:
            self.notes.append(f"at most {self.max_num_seqs} sequences run at once, as a loop of more clients showed")
        yield "again", (done + 1) / (len(steps) + 3)
        self.loops.append(self._loop(*steps[0], phase_s))
        yield "Poisson", (done + 2) / (len(steps) + 3)
        self.poisson = self._open(2.0 * phase_s)

    def _most_clients(self) -> int:
        """Largest loop: the least of the setting, the engine's limit, and what the KV pool holds without preemption."""
        longest = max(self._shape(shape)[0] * 3 // 2 + self._shape(shape)[1] * 3 // 2 for shape in SHAPES)
        room = self._facts.pool_blocks // (longest // self._facts.block_tokens + 1)
        bound = self._settings.max_num_seqs or self._settings.most_clients
        found = min(self._settings.most_clients, bound, room)
        if found < 4:
            raise DataFormatError(
                f"only {found} sequences of {longest} tokens fit into the engine at once: too few to measure the cost "
                "of another sequence. Start it with a larger KV pool or batch"
            )
        return found

    def _shape(self, shape: str) -> tuple[int, int]:
        """Prompt and output tokens, scaled down if necessary to the engine's longest request."""
        prompt, output = SHAPES[shape]
        shorter = min(1.0, self._facts.max_model_len / (2.0 * (prompt + output)))
        return max(4, int(prompt * shorter)), max(8, int(output * shorter))

    def _requests(self, shape: str, n: int) -> list[EngineRequest]:
        prompt, output = self._shape(shape)
        draw = self._random.randint
        return [
            EngineRequest(0.0, draw(prompt // 2, prompt * 3 // 2), draw(output // 2, output * 3 // 2)) for _ in range(n)
        ]

    def _loop(self, n: int, shape: str, phase_s: float) -> TimedRequests:
        output = self._shape(shape)[1]
        # A loop of twice the clients is at most twice as slow per token; guess 1.5 times the last loop's time.
        round_s = max(1e-3, output * self._tpot_s * 1.5)
        rounds = min(MOST_ROUNDS, max(LEAST_ROUNDS, round(phase_s / round_s))) if self._tpot_s else 4
        requests = self._requests(shape, rounds * n)
        phase = self._watched(_loop_name(n, shape), lambda: play_closed(self._api, requests, n), n)
        self._tpot_s = float(np.median(phase.tpot_ms())) / 1e3
        span_s = float(phase.finish_s.max() - phase.sent_s.min())
        self._best_rps[shape] = max(self._best_rps[shape], len(phase.sent_s) / span_s)
        return phase

    def _open(self, phase_s: float) -> TimedRequests:
        # Half of the requests are of each shape.
        rate = POISSON_SHARE * len(SHAPES) / sum(1.0 / rps for rps in self._best_rps.values())
        n = max(20, round(rate * phase_s))
        due = np.cumsum([self._random.expovariate(rate) for _ in range(n)])
        mixed = [r for shape in SHAPES for r in self._requests(shape, (n + 1) // 2)]
        self._random.shuffle(mixed)
        requests = [replace(r, arrival_s=float(at)) for r, at in zip(mixed, due, strict=False)]
        return self._watched("Poisson", lambda: play_open(self._api, requests))

    def _watched(self, name: str, load: Callable[[], list[RequestTiming]], clients: int = 0) -> TimedRequests:
        """Play a load; raises if a request failed, or the engine did something that iteration times do not explain."""
        if not self._has_metrics:
            timings = load()
        else:
            with _Watch(self._api) as watch:
                timings = load()
            watch.refuse(name)
            if self.max_num_seqs is None and clients:
                self.max_num_seqs = watch.batch_bound(clients)
        return timed_requests(name, timings, clients)


def _loop_name(n: int, shape: str) -> str:
    return f"{n} client{'s' if n > 1 else ''}, {shape}"


def timed_requests(name: str, timings: Sequence[RequestTiming], clients: int = 0) -> TimedRequests:
    """Requests of a load in the form of the fit; :class:`RemoteError` with the engine's message if one failed."""
    for timing in timings:
        if not timing.completed:
            raise RemoteError(f"{name}: a request failed: {timing.error or 'it was not sent'}")
    token_s = [_token_times(timing) for timing in timings]
    return TimedRequests(
        name,
        sent_s=np.array([t.sent_s for t in timings], dtype=np.float64),
        first_token_s=np.array([each[0] for each in token_s]),
        finish_s=np.array([each[-1] for each in token_s]),
        prompt_tokens=np.array([float(t.request.prompt_tokens) for t in timings]),
        # Tokens in the first message count as one, because only later tokens took measurable time.
        output_tokens=np.array([float(len(each)) for each in token_s]),
        clients=clients,
        token_s=token_s,
    )


def _token_times(timing: RequestTiming) -> FloatArray:
    """Time of each token from the first message on; tokens of one message are spread over the time since the last."""
    at, so_far = (np.array(column, dtype=np.float64) for column in zip(*timing.tokens_at, strict=True))
    return np.interp(np.arange(so_far[0], so_far[-1] + 1.0), so_far, at)


class _Watch:
    """Reads the engine's metrics while a load is played; a context manager."""

    COUNTERS: Final = {
        "vllm:num_preemptions_total": "it preempted sequences: its KV pool is too small for this load",
        "vllm:spec_decode_num_drafts_total": "it drafts tokens: start it without speculative decoding, or set 0 drafts",
        "vllm:prefix_cache_hits_total": "it reused prompts, which were random: is something else running on it?",
    }

    def __init__(self, api: EngineApi) -> None:
        self._api = api
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, name="watch-engine", daemon=True)
        self._before: dict[str, float] = {}
        self._seen: list[tuple[int, int, float]] = []  # running, waiting, share of the KV pool in use

    def __enter__(self) -> Self:
        self._before = self._counters()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def refuse(self, name: str) -> None:
        """Raise :class:`DataFormatError` if a counter rose whose events iteration times do not explain."""
        after = self._counters()
        for counter, reason in self.COUNTERS.items():
            if after.get(counter, 0.0) > self._before.get(counter, 0.0):
                raise DataFormatError(f"{name}: the engine's iterations cannot be told apart, because {reason}")

    def batch_bound(self, clients: int) -> int | None:
        """Largest batch, if it was below the number of clients while others waited in at least half of the readings."""
        most = max((running for running, _, _ in self._seen), default=0)
        bounded = sum(running == most and waiting > 0 and usage < ROOMY for running, waiting, usage in self._seen)
        often = bounded >= max(BOUNDED_LOOKS, len(self._seen) / 2)
        return most if 0 < most < clients and often else None

    def _counters(self) -> dict[str, float]:
        page = self._api.metrics()
        return {name: page.total(name) for name in self.COUNTERS if name in page.samples}

    def _look(self) -> None:
        while not self._stop.wait(WATCH_S):
            try:
                page = self._api.metrics()
                running, waiting = (int(page.total(f"vllm:num_requests_{name}")) for name in ("running", "waiting"))
                self._seen.append((running, waiting, page.highest("vllm:kv_cache_usage_perc")))
            except RemoteError:
                continue  # a busy engine answers late; wait for the next reading
