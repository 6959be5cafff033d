"""Metrics of one second of a real engine, from its clients' measurements and its own metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from live.driver import RequestTiming
from live.engines.engine import Reading
from simulator.kernel.arrays import METRICS
from simulator.kernel.serving import CONVENTIONS


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """Memory of an engine in decimal GB, as it was started; engines do not report it."""

    weights_gb: float
    kv_pool_gb: float


@dataclass(frozen=True, slots=True)
class Judge:
    """Computes a second's metrics: objectives (ms) by class, price and GPUs of the engine, its memory."""

    slo_ms: Sequence[float]
    price: float
    n_gpus: int = 1
    memory: MemoryFacts | None = None

    def given(self, reading: Reading) -> tuple[str, ...]:
        """Names of the metrics that :meth:`second` returns for an engine with such a reading."""
        names = self.second((), reading, reading, 1.0, 1.0)
        return tuple(name for name in METRICS if name in names)

    def second(
        self, timings: Sequence[RequestTiming], before: Reading, after: Reading, end_s: float, kv_budget: float
    ) -> dict[str, float]:
        """Metrics of the second that ends at ``end_s``, by their names in :data:`simulator.kernel.arrays.METRICS`.

        Metrics that the engine does not report are absent, and so is ``oom``: an engine that runs out of memory exits.

        A request counts as late when its first token comes after its objective, and in every second at whose end it has
        waited longer than that. A failed request counts as late and as refused.
        """
        start_s = end_s - 1.0
        # Another thread writes the entries, so read each one only once.
        answered = [t for t in timings if t.first_token_s is not None and start_s < t.first_token_s <= end_s]
        waits = [
            (1e3 * (end_s - t.request.arrival_s), t.request.class_index)
            for t in timings
            if t.request.arrival_s <= end_s
            and (t.first_token_s is None or t.first_token_s > end_s)
            and (t.ended_s is None or t.ended_s > end_s)
        ]
        failed = sum(bool(t.error) and t.ended_s is not None and start_s < t.ended_s <= end_s for t in timings)
        ttft_ms = [(t.ttft_ms() or 0.0, t.request.class_index) for t in answered]
        overdue = sum(age > self.slo_ms[c] for age, c in waits)
        missed = sum(ms > self.slo_ms[c] for ms, c in ttft_ms) + overdue + failed
        judged = len(answered) + overdue + failed
        p50, p99 = np.quantile([ms for ms, _ in ttft_ms] or [max((age for age, _ in waits), default=0.0)], (0.5, 0.99))
        tokens, decode_s, decoded = written(timings, start_s, end_s)
        metrics = {
            "ttft_p50_ms": float(p50),
            "ttft_p99_ms": float(p99),
            "tpot_ms": min(1e3 * decode_s / decoded, 1e3 * CONVENTIONS.max_tpot_steps) if decoded else 0.0,
            "tokens_per_sec": float(tokens),
            "cost_per_1k": self.price * self.n_gpus / max(tokens / 1e3, CONVENTIONS.min_billed_ktokens_per_s),
            "slo_violations": float(missed),
            "violation_share": missed / judged if judged else 0.0,
            "queue_requests": after.queue_requests,
            "running_requests": after.running_requests,
            "kv_occupancy": min(1.0, after.kv_occupancy),
            "admitted": float(len(answered)),
            "completed": float(sum(t.completed and start_s < (t.ended_s or 0.0) <= end_s for t in timings)),
            "rejected": float(failed),
        }
        if self.memory is not None:
            metrics["gpu_memory_gb"] = self.memory.weights_gb + kv_budget * self.memory.kv_pool_gb
        if (evicted := _since(before.preemptions, after.preemptions)) is not None:
            metrics["eviction_events"] = evicted
        drafted = _since(before.drafted_tokens, after.drafted_tokens)
        accepted = _since(before.accepted_tokens, after.accepted_tokens)
        if drafted is not None and accepted is not None:
            metrics["spec_accept_rate"] = accepted / drafted if drafted else 0.0
        return metrics


def written(timings: Sequence[RequestTiming], start_s: float, end_s: float) -> tuple[int, float, int]:
    """Tokens received in a window; of those after each request's first, their total time (s) and number."""
    tokens, decode_s, decoded = 0, 0.0, 0
    for timing in timings:
        last_at, last = None, 0
        for at, so_far in list(timing.tokens_at):
            if start_s < at <= end_s:
                tokens += so_far - last
                if last_at is not None:
                    decode_s += at - last_at
                    decoded += so_far - last
            last_at, last = at, so_far
    return tokens, decode_s, decoded


def _since(before: float | None, after: float | None) -> float | None:
    """Growth of a counter; None if the engine has no such counter."""
    return None if before is None or after is None else max(0.0, after - before)
