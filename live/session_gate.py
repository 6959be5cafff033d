"""A gate for agent or rollout loops: a policy limits the number of sessions in flight on a running engine.

:class:`SessionGate` needs httpx and numpy alone, no simulator. It builds the observation of the environment
``rollouts`` (:data:`inferencegym.rollouts.OBSERVATION_FIELDS`) from the engine's ``/metrics`` and from the token counts
that the loop reports, so policies trained there can be used here.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

import httpx

from agents.policies.rollouts import POLICY_FILE, RolloutPolicy
from inferencegym.errors import InvalidConfigError, RemoteError, refusal
from inferencegym.rollouts import FIRST_CAP, MAX_SESSIONS, Fit, Seen
from live.metrics import MetricsPage, read_page

Controller = Callable[[Seen], float]

COUNTS: Final = ("prefix_queried_tokens", "prefix_hit_tokens", "generated_tokens", "preemptions")
"""Fields of the observation that are an engine's counters; the observation has what they grew by in a second."""
SERIES: Final = {
    "running_requests": ("vllm:num_requests_running", "sglang:num_running_reqs"),
    "waiting_requests": ("vllm:num_requests_waiting", "sglang:num_queue_reqs"),
    "kv_usage": ("vllm:kv_cache_usage_perc", "sglang:token_usage"),
    "prefix_queried_tokens": ("vllm:prefix_cache_queries_total", "sglang:prompt_tokens_total"),
    "prefix_hit_tokens": ("vllm:prefix_cache_hits_total", "sglang:cached_tokens_total"),
    "generated_tokens": ("vllm:generation_tokens_total", "sglang:generation_tokens_total"),
    "preemptions": ("vllm:num_preemptions_total", "sglang:num_retracted_requests_total"),
}
"""Names of an engine's series (vLLM, SGLang) by field of the observation.

SGLang counts the tokens of a prompt, and those found in the cache, when the request is finished.
"""


def read_engine(page: MetricsPage, kv_pool_tokens: int | None = None) -> dict[str, float]:
    """The engine's part of the observation; :data:`COUNTS` since its start.

    A counter appears on SGLang's page with its first event and is 0 until then. Raises RemoteError for a page of
    another engine, for a missing gauge, and where the engine does not state its KV pool and none is given.
    """
    sglang = any(name.startswith("sglang:") for name in page.samples)
    seen = {"kv_pool_tokens": float(kv_pool_tokens or _pool_tokens(page)), **dict.fromkeys(COUNTS, 0.0)}
    for name, series in SERIES.items():
        if not sglang or name not in COUNTS or series[1] in page.samples:
            seen[name] = page.highest(series[sglang]) if name == "kv_usage" else page.total(series[sglang])
    return seen


def _pool_tokens(page: MetricsPage) -> float:
    if "sglang:max_total_num_tokens" in page.samples:
        return page.total("sglang:max_total_num_tokens")
    pool = 0.0
    for labels, _ in page.samples.get("vllm:cache_config_info", ()):
        sizes = [labels.get(key, "None") for key in ("effective_attention_block_size", "block_size")]
        size = next((int(text) for text in sizes if text.isdigit()), 0)
        blocks = labels.get("num_gpu_blocks", "")
        # One of vLLM's blocks is a placeholder and holds nothing.
        pool += size * (int(blocks) - 1) if blocks.isdigit() else 0
    if pool <= 0:
        raise RemoteError("the engine's metrics do not state its KV pool: give kv_pool_tokens")
    return pool


@dataclass(eq=False)
class Session:
    """A session of the caller's loop. Its context is the prompt and completion of its last turn, in tokens."""

    name: str
    context_tokens: int = 0
    paused: bool = False
    in_turn: bool = False
    may_go: asyncio.Event = field(default_factory=asyncio.Event)

    def report(self, prompt_tokens: int, completion_tokens: int = 0) -> None:
        """Report the tokens of a turn; the prompt counts whole, including tokens found in the cache."""
        self.context_tokens = prompt_tokens + completion_tokens


_CURRENT: ContextVar[Session] = ContextVar("session")


def make_controller(policy: str | Path | Controller) -> Controller:
    """Make the policy of a gate. Raises InvalidConfigError for an unknown name, or a file that holds no policy."""
    if callable(policy):
        return policy
    if policy == "fit":
        return Fit()
    path = POLICY_FILE if policy == "ppo" else Path(policy)
    if path.suffix != ".npz" or not path.is_file():
        raise InvalidConfigError(
            f"policy={str(policy)!r} is not allowed: it must be fit, ppo, an .npz that agents.rollouts_ppo wrote, or a "
            "function from an observation by name to a cap",
            "policy",
        )
    return RolloutPolicy(path)


class SessionGate:
    """Bounds the sessions in flight on an engine by a cap that ``policy`` sets once a second; an async context manager.

    The loop wraps a session in :meth:`session` and each request of it in :meth:`turn`, and reports its tokens. If the
    cap falls, the gate pauses the most recently started session that is between turns. Paused sessions come back, the
    oldest first, before new ones start. A turn under way is never interrupted.

    ``bounds`` are the lowest and highest cap. If the engine gives no metrics for ``patience_s``, the lower bound
    applies until they are back. ``shared_tokens`` is the length of a system prompt that all sessions share, because the
    cache holds it once. ``kv_pool_tokens`` is for engines that do not report their pool. ``audit`` is a file that gets
    a JSON line per decision. An exception of the policy ends the decisions; the next session or turn raises it.

    Raises InvalidConfigError for bad bounds and unknown policies.
    """

    def __init__(
        self,
        engine_url: str,
        policy: str | Path | Controller = "fit",
        *,
        bounds: tuple[int, int],
        patience_s: float = 5.0,
        shared_tokens: int = 0,
        kv_pool_tokens: int | None = None,
        audit: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.low, self.high = bounds
        if not (1 <= self.low <= self.high <= MAX_SESSIONS and set(map(type, bounds)) == {int}):
            raise refusal("bounds", bounds, f"two whole numbers, the lower one first, from 1 to {MAX_SESSIONS}")
        self._policy = make_controller(policy)
        self._url = engine_url.rstrip("/").removesuffix("/v1") + "/metrics"
        self._patience_s, self._shared, self._pool = patience_s, shared_tokens, kv_pool_tokens
        self._audit, self._clock = audit, clock
        self._started_s = self._metrics_s = clock()
        self._before: dict[str, float] | None = None
        self._client = httpx.AsyncClient(timeout=httpx.Timeout(2.0))
        self._task: asyncio.Task[None] | None = None
        self._started: list[Session] = []
        self._waiting: list[Session] = []
        self.cap = self._bounded(FIRST_CAP)
        self.fallback = False  # the lower bound is in force because the engine gives no metrics
        self.finished = self.pauses = self.decisions = 0

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        await self._client.aclose()

    @asynccontextmanager
    async def session(self, name: str) -> AsyncIterator[Session]:
        """A session from its first turn to its last; entered when it may start."""
        session = Session(name)
        self._waiting.append(session)
        self._settle()
        token = _CURRENT.set(session)
        try:
            await self._passed(session)
            yield session
        finally:
            _CURRENT.reset(token)
            self.finished += session in self._started
            (self._started if session in self._started else self._waiting).remove(session)
            self._settle()

    @asynccontextmanager
    async def turn(self, prompt_tokens: int | None = None) -> AsyncIterator[Session]:
        """One request of the surrounding session; waits while it is paused. Raises LookupError outside a session.

        ``prompt_tokens`` tells the prompt's length at once, where it is known before the answer.
        """
        session = _CURRENT.get()
        await self._passed(session)
        session.in_turn = True
        if prompt_tokens is not None:
            session.report(prompt_tokens)
        try:
            yield session
        finally:
            session.in_turn = False
            self._settle()

    def metrics(self) -> str:
        """The gate's own metrics in Prometheus' text format."""
        age_s = self._clock() - self._metrics_s
        gauges = {"cap": self.cap, "fallback": int(self.fallback), "metrics_age_seconds": round(age_s, 3)}
        gauges |= {f"sessions_{state}": n for state, n in self._counts().items()}
        counts = {"finished_total": self.finished, "pauses_total": self.pauses, "decisions_total": self.decisions}
        return "".join(
            f"# TYPE inferencegym_gate_{name} {kind}\ninferencegym_gate_{name} {value}\n"
            for kind, values in (("gauge", gauges), ("counter", counts))
            for name, value in values.items()
        )

    async def second(self) -> None:
        """Read the engine and decide once; the gate does so itself each second while it is entered."""
        now_s = self._clock()
        try:
            answer = await self._client.get(self._url)
            answer.raise_for_status()
            reading = read_engine(read_page(answer.text), self._pool)
        except (httpx.HTTPError, RemoteError) as error:
            self._before = None
            silent_s = now_s - self._metrics_s
            self.fallback = silent_s >= self._patience_s
            cap, kept = (self.low, "fallback to the lower bound") if self.fallback else (self.cap, "the cap stays")
            self._decide(cap, f"no metrics for {silent_s:.1f} s, {kept}: {error}", {})
            return
        self.fallback, self._metrics_s = False, now_s
        before, self._before = self._before or reading, reading
        # Counters of an engine that was restarted begin anew.
        grown = {name: max(0.0, reading[name] - before[name]) for name in COUNTS}
        seen = self._observation({**reading, **grown}, now_s)
        if self._started and not seen["context_mean_tokens"]:
            self._decide(self.cap, "no turn has been reported, the cap stays", seen)
        else:
            self._decide(self._policy(seen), "policy", seen)

    def _observation(self, engine: Mapping[str, float], now_s: float) -> dict[str, float]:
        """All fields; a session that has not reported yet counts as the mean of those that have."""
        counts = self._counts()
        flying, pool = counts["in_flight"], engine["kv_pool_tokens"]
        known = [s.context_tokens for s in self._started if s.context_tokens and not s.paused]
        mean = sum(known) / len(known) if known else 0.0
        return {
            "time_s": now_s - self._started_s,
            "max_sessions": float(self.cap),
            **{f"sessions_{name}": float(n) for name, n in counts.items()},
            "sessions_finished": float(self.finished),
            "sessions_refused": 0.0,
            "interactive_in_flight": 0.0,
            **engine,
            "computed_tokens": max(0.0, engine["prefix_queried_tokens"] - engine["prefix_hit_tokens"]),
            "context_mean_tokens": mean,
            "context_max_tokens": float(max(known, default=0)),
            "context_share": max(0.0, flying * mean - max(0, flying - 1) * self._shared) / pool,
        }

    def _decide(self, wanted: float, reason: str, seen: Seen) -> None:
        self.cap = self._bounded(wanted)
        self.decisions += 1
        self._settle()
        if self._audit is not None:
            line = {"time": time.time(), "cap": self.cap, "wanted": float(wanted), "reason": reason}
            with self._audit.open("a", encoding="utf-8") as log:
                log.write(json.dumps({**line, "observation": seen}) + "\n")

    def _bounded(self, cap: float) -> int:
        return min(max(round(cap), self.low), self.high)

    def _counts(self) -> dict[str, int]:
        paused = sum(s.paused for s in self._started)
        return {"in_flight": len(self._started) - paused, "paused": paused, "waiting": len(self._waiting)}

    def _settle(self) -> None:
        """Pause, resume and start sessions until the cap is met; ``_started`` is in the order of their starts."""
        room = self.cap - self._counts()["in_flight"]
        for session in reversed(self._started):
            if room < 0 and not session.paused and not session.in_turn:
                session.paused = True
                session.may_go.clear()
                self.pauses += 1
                room += 1
        for session in [s for s in self._started if s.paused][: max(0, room)]:
            session.paused = False
            session.may_go.set()
            room -= 1
        for session in self._waiting[: max(0, room)]:
            self._waiting.remove(session)
            self._started.append(session)
            session.may_go.set()

    async def _passed(self, session: Session) -> None:
        while True:
            if self._task is not None and self._task.done():
                self._task.result()
            if session.may_go.is_set():
                return
            await session.may_go.wait()  # it may be paused again before this task runs

    async def _run(self) -> None:
        while True:
            await self.second()
            await asyncio.sleep(1.0)
