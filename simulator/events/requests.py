"""Requests to serve, and their outcome."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from inferencegym.errors import InvalidConfigError

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests to serve, all ``(n,)``: arrival (s), prompt and output length (tokens), class (0 is served first).

    ``reused_tokens`` are the leading prompt tokens shared with an earlier request. ``acceptance`` is the probability
    that a draft is accepted if all before it are; without it, the fleet's probabilities apply. ``follows`` is the index
    of the earlier request that a router keeps it with, or -1; without it, no request has one.
    """

    arrival_s: FloatArray
    prompt_tokens: IntArray
    output_tokens: IntArray
    priority: IntArray | None = None
    reused_tokens: IntArray | None = None
    acceptance: FloatArray | None = None
    follows: IntArray | None = None

    def __post_init__(self) -> None:
        n = len(self.arrival_s)
        if (
            not n
            == len(self.prompt_tokens)
            == len(self.output_tokens)
            == (n if self.priority is None else len(self.priority))
        ):
            raise InvalidConfigError(
                "arrival_s, prompt_tokens, output_tokens and priority must have one entry per request"
            )
        if n and (np.min(self.prompt_tokens) < 1 or np.min(self.output_tokens) < 1):
            raise InvalidConfigError("prompt_tokens and output_tokens must be at least 1")
        if self.acceptance is not None and (
            len(self.acceptance) != n or not all(0.0 <= each <= 1.0 for each in self.acceptance)
        ):
            raise InvalidConfigError("acceptance must have one probability, from 0 to 1, per request", "acceptance")


@dataclass(frozen=True, slots=True)
class Sessions:
    """Agent sessions; their turns are requests, one after another.

    ``turns`` are all turns, session by session: each prompt is the conversation so far, without the ``shared_tokens``
    of a system prompt that precedes all of them, and ``arrival_s`` is that of the session. ``first_turn`` ``(G + 1,)``
    is the index of each session's first turn, and of the end; sessions are in order of arrival. ``tool_s`` ``(n,)`` is
    the time between an answer and the next turn. Sessions that are not ``gated`` ``(G,)`` do not wait for the cap.
    """

    turns: Requests
    first_turn: IntArray
    tool_s: FloatArray
    gated: NDArray[np.bool_]
    shared_tokens: int = 0

    def __post_init__(self) -> None:
        if np.any(np.diff(self.first_turn) < 1) or self.first_turn[-1] != len(self.turns.arrival_s):
            raise InvalidConfigError("every session needs a turn, and every turn a session")
        if np.any(np.diff(self.turns.arrival_s) < 0):
            raise InvalidConfigError("sessions must be in order of arrival")

    def __len__(self) -> int:
        return len(self.first_turn) - 1

    def session(self) -> IntArray:
        """Session of each turn, (n,)."""
        return np.repeat(np.arange(len(self)), np.diff(self.first_turn))


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a run: every request in ``(n,)`` arrays in the order given, and totals of the fleet.

    Times are seconds from the start, NaN for refused requests and for events after the end of the run. ``rejected``
    marks requests refused by a full queue or too long for the whole cache. ``busy_ms`` is summed over GPUs;
    ``peak_kv_tokens`` is the largest number of tokens in any replica's cache.
    """

    arrival_s: FloatArray
    first_token_s: FloatArray
    finish_s: FloatArray
    output_tokens: IntArray
    rejected: NDArray[np.bool_]
    preemptions: IntArray
    iterations: int
    busy_ms: float
    peak_kv_tokens: int
    ttft_offset_ms: float
    output_delay_ms: FloatArray | float = 0.0

    def ttft_ms(self) -> FloatArray:
        """Time to first token as a client sees it, including the engine profile's offset and delay, ms."""
        return (self.first_token_s - self.arrival_s) * 1e3 + self.ttft_offset_ms + self.output_delay_ms

    def tpot_ms(self) -> FloatArray:
        """Mean time per output token after the first, ms; NaN for a single token."""
        gaps = np.where(self.output_tokens > 1, self.output_tokens - 1, np.nan)
        return (self.finish_s - self.first_token_s) * 1e3 / gaps

    def e2e_ms(self) -> FloatArray:
        """Time from arrival to the last token as a client sees it, ms; the last token is delayed like the first."""
        return self.ttft_ms() + (self.finish_s - self.first_token_s) * 1e3

    def makespan_s(self) -> float:
        """Time at which the last request finished, s."""
        return float(np.nanmax(self.finish_s)) if np.isfinite(self.finish_s).any() else 0.0

    def tokens_per_s(self, start_s: float = 0.0, end_s: float | None = None) -> float:
        """Output tokens per second within a window, if each request's tokens are evenly spaced from first to last."""
        end = self.makespan_s() if end_s is None else end_s
        served = np.isfinite(self.finish_s)
        first, last, tokens = self.first_token_s[served], self.finish_s[served], self.output_tokens[served]
        length = np.maximum(last - first, 1e-12)
        inside = np.clip(np.minimum(last, end) - np.maximum(first, start_s), 0.0, None) / length
        at_once = (last <= first) & (first >= start_s) & (first <= end)
        share = np.where(last > first, inside, at_once.astype(float))
        return float((share * tokens).sum() / (end - start_s))
