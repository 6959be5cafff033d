"""Fit an engine's iteration times to the times at which clients received their tokens.

A decoding request receives one token per iteration, so the time from its first to its last token is the sum of that
many iterations. The other requests' times show what else those iterations did: how many sequences decoded, how long
their contexts were, which prompts were completed. That gives one linear equation per request in the coefficients of
:class:`~simulator.hardware.engine_times.EngineTimes`. Each request that was alone on the engine adds an equation for
its first token; its intercept is the round trip between client and engine. Non-negative least squares on relative
errors solves them; requests that a busy machine delayed weigh less (Huber).

The fit uses only times that clients see, so it also accepts benchmark files with the times of every request. Each phase
of the load in turn is held out and predicted by a fit to all others. This held-out error is the one reported. A fit is
refused if this error is large or if the load cannot separate the terms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import numpy as np
from scipy.optimize import nnls

from inferencegym.errors import DataFormatError
from simulator.events.fleet import Fleet
from simulator.events.requests import Requests
from simulator.events.simulation import serve, serve_closed
from simulator.hardware.engine_times import (
    TIER,
    EngineFacts,
    EngineSource,
    EngineTimes,
    attended_pairs,
    engine_profile,
)
from simulator.hardware.operators import OperatorModel
from simulator.hardware.profiles import EngineProfile
from simulator.hardware.tables import FloatArray

MOST_ERROR: Final = 0.35
"""Largest median error of held-out phases; fits beyond it are refused."""
LEAST_TOKENS: Final = 8
"""Fewest output tokens with which a request's duration says something about an iteration."""
LEAST_SPANS: Final = 12
"""Fewest requests that a fit needs."""
LEAST_PHASES: Final = 3
"""Fewest phases of load that a fit needs: each is predicted from the others."""
LEAST_STREAMED: Final = 0.01
"""Share of a request's time between its tokens below which the tokens are taken to have come all at once."""
LEAST_RANGE: Final = 2.0
"""Smallest ratio of the largest to the smallest batch (and prompt) with which their effects can be separated."""
KNOTS: Final[tuple[tuple[float, ...], ...]] = ((0.0,), (0.0, 16.0), (0.0, 64.0), (0.0, 256.0), (0.0, 16.0, 64.0, 256.0))
"""Candidate row counts at which the time per row may change; later candidates must be clearly better."""
CLEARLY: Final = 0.9
"""A later candidate is taken if its held-out error is below this share of the best so far."""
_HUBER: Final = 0.1
_ROUNDS: Final = 8
_TERMS: Final = ("step", "sequence", "context", "attention", "offset")


@dataclass(frozen=True, slots=True, eq=False)
class TimedRequests:
    """Answered requests of one phase of a load as their client saw them, arrays (N,): seconds of one clock, tokens.

    ``clients`` > 0: a closed loop, in which each client sends its next request when its last is answered. ``token_s``
    holds the time of each output token of each request; without it, tokens are assumed to be evenly spaced.
    """

    name: str
    sent_s: FloatArray
    first_token_s: FloatArray
    finish_s: FloatArray
    prompt_tokens: FloatArray
    output_tokens: FloatArray
    clients: int = 0
    token_s: Sequence[FloatArray] = ()

    def __post_init__(self) -> None:
        columns = (self.sent_s, self.first_token_s, self.finish_s, self.prompt_tokens, self.output_tokens)
        n = len(self.sent_s)
        if n < 1 or any(column.shape != (n,) or not np.isfinite(column).all() for column in columns):
            raise DataFormatError(f"{self.name}: times and tokens must be {n} finite numbers each, at least one")
        if (self.first_token_s < self.sent_s).any() or (self.finish_s < self.first_token_s).any():
            raise DataFormatError(f"{self.name}: a request must be sent, get its first token and finish in this order")
        if self.prompt_tokens.min() < 1 or self.output_tokens.min() < 1:
            raise DataFormatError(f"{self.name}: prompt and output tokens must be at least 1")
        if len(self.token_s) and [len(each) for each in self.token_s] != self.output_tokens.tolist():
            raise DataFormatError(f"{self.name}: token_s must have as many times as each request has output tokens")

    def tokens_of(self, i: int) -> FloatArray:
        """Times of a request's output tokens, s."""
        if len(self.token_s):
            return self.token_s[i]
        return np.linspace(float(self.first_token_s[i]), float(self.finish_s[i]), int(self.output_tokens[i]))

    def ttft_ms(self) -> FloatArray:
        """Time to first token, ms."""
        return (self.first_token_s - self.sent_s) * 1e3

    def tpot_ms(self) -> FloatArray:
        """Mean time per output token after the first, ms, of requests with at least two tokens."""
        many = self.output_tokens > 1
        return (self.finish_s - self.first_token_s)[many] * 1e3 / (self.output_tokens[many] - 1)

    def streamed_share(self) -> float:
        """Median share of a request's time that lies between its tokens; 1 if no request has enough tokens."""
        long = self.output_tokens >= LEAST_TOKENS
        share = (self.finish_s - self.first_token_s)[long] / np.maximum(self.finish_s - self.sent_s, 1e-9)[long]
        return float(np.median(share)) if len(share) else 1.0

    def figures(self) -> dict[str, float]:
        """Figures by which loads are compared, by name."""
        tpot = self.tpot_ms()
        span_s = float(self.finish_s.max() - self.sent_s.min())
        return {
            "ttft_p50_ms": float(np.median(self.ttft_ms())),
            "ttft_p99_ms": float(np.quantile(self.ttft_ms(), 0.99)),
            "tpot_p50_ms": float(np.median(tpot)) if len(tpot) else math.nan,
            "output_tokens_per_s": float(self.output_tokens.sum()) / span_s,
        }


@dataclass(frozen=True, slots=True)
class PhaseError:
    """Errors on one phase of a fit to all others: in the time between tokens, and in the TTFT of requests alone."""

    phase: str
    spans: int
    median: float
    p90: float
    bias: float


@dataclass(frozen=True, slots=True)
class ReplayError:
    """Relative errors of the simulator when it plays a phase's requests."""

    phase: str
    requests: int
    errors: dict[str, float]
    """Errors by the names of :meth:`TimedRequests.figures`."""


@dataclass(frozen=True, slots=True)
class EngineFit:
    """Fitted iteration times, the round trip to the client, and how well held-out phases were predicted."""

    times: EngineTimes
    ttft_offset_ms: float
    median_error: float
    p90_error: float
    phases: list[PhaseError]
    spans: int
    warnings: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return asdict(self)


@dataclass(frozen=True, slots=True, eq=False)
class _Equation:
    """One measured duration: the rows of its iterations, and the sums of their work."""

    phase: int
    duration_ms: float
    rows: FloatArray
    """Rows of each iteration."""
    sampled: float
    context: float
    pairs: float
    offsets: float

    def features(self, knots: Sequence[float]) -> list[float]:
        """Factors of the coefficients, in the order of ``_TERMS``, then the ramps."""
        ends = (*knots[1:], math.inf)
        ramps = [float(np.clip(self.rows - low, 0.0, high - low).sum()) for low, high in zip(knots, ends, strict=True)]
        return [float(len(self.rows)), self.sampled, self.context, self.pairs, self.offsets, *ramps]

    def batch(self) -> float:
        """Mean number of tokens sampled per iteration."""
        return self.sampled / len(self.rows)


def fit_engine_times(phases: Sequence[TimedRequests], max_batched_tokens: int) -> EngineFit:
    """Fit iteration times to the phases of a load.

    Raises :class:`DataFormatError` with the reason if the load cannot separate the terms, or if the fit does not
    predict the phases held out of it.
    """
    equations = [e for i, phase in enumerate(phases) for e in _equations(i, phase, max_batched_tokens)]
    _check_load(phases, equations)
    chosen, errors = _choose_knots(equations)
    median, p90 = _quantiles(errors)
    if median > MOST_ERROR:
        raise DataFormatError(
            f"held-out phases are predicted {median:.0%} off at the median, where {MOST_ERROR:.0%} is the "
            "most: the engine's time does not follow from its batch, contexts and prompts. Was something else running "
            "there, did it preempt, draft tokens or reuse prompts, or are there several engines behind the address?"
        )
    solution = _solve(equations, chosen)
    if solution[0] + solution[5:].sum() <= 0.0:
        raise DataFormatError(
            "the fit gives iterations of 0 ms: does the engine send each token as soon as it is written?"
        )
    return EngineFit(
        times=_times(solution, chosen, phases, equations),
        ttft_offset_ms=round(float(solution[_TERMS.index("offset")]), 3),
        median_error=round(median, 4),
        p90_error=round(p90, 4),
        phases=[
            PhaseError(
                phase=phase.name,
                spans=len(mine),
                median=round(float(np.median(np.abs(mine))), 4),
                p90=round(float(np.quantile(np.abs(mine), 0.9)), 4),
                bias=round(float(np.mean(mine)), 4),
            )
            for i, phase in enumerate(phases)
            if len(mine := np.array([x for e, x in zip(equations, errors, strict=True) if e.phase == i]))
        ],
        spans=len(equations),
        warnings=_drift(phases),
    )


def _check_load(phases: Sequence[TimedRequests], equations: Sequence[_Equation]) -> None:
    """Raise :class:`DataFormatError` if a load cannot separate the terms of an iteration."""
    reasons = []
    fitted = {e.phase for e in equations if not e.offsets}
    spans = sum(not e.offsets for e in equations)
    if spans < LEAST_SPANS:
        reasons.append(f"{spans} requests of {LEAST_TOKENS} output tokens or more, where {LEAST_SPANS} are the least")
    if len(fitted) < LEAST_PHASES:
        reasons.append(f"{len(fitted)} phases of load, where {LEAST_PHASES} are the least")
    if not any(e.offsets for e in equations):
        reasons.append("no request that was alone on the engine, whose first token shows the round trip")
    batches = [e.batch() for e in equations if not e.offsets]
    prompts = np.concatenate([phase.prompt_tokens for phase in phases]) if phases else np.ones(1)
    for what, values in (("sequences at once", batches), ("tokens in a prompt", prompts)):
        if len(values) and max(values) < LEAST_RANGE * min(values):
            reasons.append(
                f"only {min(values):.0f} to {max(values):.0f} {what}: the load must vary by a factor of 2 at least"
            )
    if any(p.streamed_share() < LEAST_STREAMED for p in phases):
        reasons.append("answers whose tokens all came at once: the engine, or a proxy before it, does not stream")
    if reasons:
        raise DataFormatError("the load does not show how long iterations take: it has " + "; ".join(reasons))


def _equations(index: int, phase: TimedRequests, max_batched_tokens: int) -> list[_Equation]:
    """Equations of one phase: requests that decoded for a while, and first tokens of requests that were alone."""
    tpot = phase.tpot_ms()
    # Tokens of one iteration arrive within a fraction of it; half of the shortest TPOT separates iterations.
    together_s = 0.5 * float(tpot.min()) / 1e3 if len(tpot) else 0.0
    prompts = _prompt_iterations(phase, together_s)
    found = []
    for i in range(len(phase.sent_s)):
        first, last = float(phase.first_token_s[i]), float(phase.finish_s[i])
        if phase.output_tokens[i] >= LEAST_TOKENS and last > first:
            span = _span(index, phase, i, prompts, together_s, max_batched_tokens)
            if span is not None:
                found.append(span)
        others = np.arange(len(phase.sent_s)) != i
        alone = not (others & (phase.sent_s < first) & (phase.finish_s > phase.sent_s[i])).any()
        if alone:
            found.append(_alone(index, phase, i, max_batched_tokens))
    return found


@dataclass(frozen=True, slots=True)
class _PromptIteration:
    """An iteration at whose end one or more prompts were complete."""

    end_s: float
    tokens: float
    pairs: float
    requests: int


def _prompt_iterations(phase: TimedRequests, together_s: float) -> list[_PromptIteration]:
    """Prompt iterations in order of time; first tokens that arrived together belong to one iteration."""
    found: list[_PromptIteration] = []
    for i in np.argsort(phase.first_token_s):
        end, tokens = float(phase.first_token_s[i]), float(phase.prompt_tokens[i])
        pairs = attended_pairs(tokens)
        if found and end - found[-1].end_s < together_s:
            before = found[-1]
            found[-1] = _PromptIteration(
                before.end_s, before.tokens + tokens, before.pairs + pairs, before.requests + 1
            )
        else:
            found.append(_PromptIteration(end, tokens, pairs, 1))
    return found


def _span(
    index: int,
    phase: TimedRequests,
    i: int,
    prompts: Sequence[_PromptIteration],
    together_s: float,
    max_batched_tokens: int,
) -> _Equation | None:
    """Equation of one request between its first and last token; None if its iterations cannot be told."""
    ends = phase.tokens_of(i)[1:]
    first, last = float(phase.first_token_s[i]), float(ends[-1])
    inside = [p for p in prompts if first + together_s < p.end_s < last + together_s]
    # If prompts exceed the token budget, clients cannot see how the engine split them into iterations.
    if any(p.tokens > max_batched_tokens for p in inside):
        return None
    # Sequences and contexts of each iteration: a sequence takes part from its second token to its last.
    at = ends - together_s
    decoding = (phase.first_token_s[:, None] < at) & (phase.finish_s[:, None] > at)
    length = np.maximum(phase.finish_s - phase.first_token_s, 1e-9)[:, None]
    written = (at - phase.first_token_s[:, None]) / length * (phase.output_tokens[:, None] - 1.0)
    context = np.where(decoding, phase.prompt_tokens[:, None] + written, 0.0).sum()
    rows = decoding.sum(axis=0).astype(np.float64)
    sampled = float(rows.sum())
    for p in inside:
        rows[int(np.argmin(np.abs(ends - p.end_s)))] += p.tokens
        sampled += p.requests
    return _Equation(
        phase=index,
        duration_ms=(last - first) * 1e3,
        rows=rows,
        sampled=sampled,
        context=float(context),
        pairs=sum(p.pairs for p in inside),
        offsets=0.0,
    )


def _alone(index: int, phase: TimedRequests, i: int, max_batched_tokens: int) -> _Equation:
    """Equation of the first token of a request that was alone on the engine."""
    prompt = float(phase.prompt_tokens[i])
    chunks = math.ceil(prompt / max_batched_tokens)
    last = prompt - (chunks - 1) * max_batched_tokens
    return _Equation(
        phase=index,
        duration_ms=max(float(phase.first_token_s[i] - phase.sent_s[i]) * 1e3, 1e-6),
        rows=np.array([*[float(max_batched_tokens)] * (chunks - 1), last]),
        sampled=1.0,
        context=0.0,
        pairs=attended_pairs(prompt),
        offsets=1.0,
    )


def _choose_knots(equations: Sequence[_Equation]) -> tuple[tuple[float, ...], list[float]]:
    """Knots that predict held-out phases best, and the signed error of every equation with them."""
    most_rows = max(float(e.rows.max()) for e in equations)
    best: tuple[tuple[float, ...], list[float]] | None = None
    least = math.inf
    for knots in KNOTS:
        if knots[-1] >= most_rows / 2.0:
            continue
        errors = _held_out(equations, knots)
        median = _quantiles(errors)[0]
        if best is None or median < CLEARLY * least:
            best, least = (knots, errors), median
    assert best is not None  # an iteration has at least one row, so the first candidate is always tried
    return best


def _held_out(equations: Sequence[_Equation], knots: Sequence[float]) -> list[float]:
    """Relative error of every equation when its own phase is left out of the fit."""
    errors = np.zeros(len(equations))
    for phase in sorted({e.phase for e in equations}):
        rest = [e for e in equations if e.phase != phase]
        solution = _solve(rest, knots)
        for i, each in enumerate(equations):
            if each.phase == phase:
                errors[i] = float(np.dot(each.features(knots), solution)) / each.duration_ms - 1.0
    return [float(e) for e in errors]


def _quantiles(errors: Sequence[float]) -> tuple[float, float]:
    """Median and 90th percentile of the absolute errors."""
    return float(np.median(np.abs(errors))), float(np.quantile(np.abs(errors), 0.9))


def _solve(equations: Sequence[_Equation], knots: Sequence[float]) -> FloatArray:
    """Non-negative coefficients with the least squared relative errors; every phase has the same weight."""
    features = np.array([e.features(knots) for e in equations])
    duration = np.array([e.duration_ms for e in equations])
    group = np.array([2 * e.phase + (e.offsets > 0) for e in equations])
    share = 1.0 / np.sqrt(np.unique(group, return_counts=True)[1])
    base = share[np.searchsorted(np.unique(group), group)] / duration
    scale = np.abs(features * base[:, None]).max(axis=0)
    scale[scale == 0.0] = 1.0
    weight = np.ones(len(equations))
    solution = np.zeros(features.shape[1])
    for _ in range(_ROUNDS):
        solution = nnls(features * (base * weight)[:, None] / scale, duration * base * weight)[0] / scale
        misfit = np.abs(features @ solution / duration - 1.0)
        weight = np.sqrt(np.minimum(1.0, _HUBER / np.maximum(misfit, 1e-12)))
    return solution


def _times(
    solution: FloatArray, knots: Sequence[float], phases: Sequence[TimedRequests], equations: Sequence[_Equation]
) -> EngineTimes:
    step, sequence, context, attention, _ = (float(x) for x in solution[: len(_TERMS)])
    longest = max(float((p.prompt_tokens + p.output_tokens).max()) for p in phases)
    return EngineTimes(
        step_ms=step,
        knots=tuple(knots),
        ramp_ms=tuple(float(x) for x in solution[len(_TERMS) :]),
        sequence_ms=sequence,
        context_ms=context,
        attention_ms=attention,
        most_sequences=max(1, round(max(e.batch() for e in equations))),
        most_context=int(longest),
        most_prompt=int(max(float(p.prompt_tokens.max()) for p in phases)),
    )


def _drift(phases: Sequence[TimedRequests]) -> list[str]:
    """Repeated phases whose medians differ, which shows that the machine was busy with something else."""
    medians: dict[str, list[float]] = {}
    for phase in phases:
        if len(tpot := phase.tpot_ms()):
            medians.setdefault(phase.name, []).append(float(np.median(tpot)))
    return [
        f"{name}: {min(found):.3g} to {max(found):.3g} ms per token in {len(found)} repeats; the machine's load changed"
        for name, found in medians.items()
        if len(found) > 1 and max(found) > 1.15 * min(found)
    ]


def replay(phase: TimedRequests, model: OperatorModel, facts: EngineFacts) -> TimedRequests:
    """Serve the phase's requests in the discrete-event reference, in a closed loop if the phase was one."""
    begin = float(phase.sent_s.min())
    order = np.argsort(phase.sent_s, kind="stable")
    fleet = Fleet(
        model,
        batch_size=facts.max_num_seqs or len(order),
        kv_pool_tokens=facts.pool_tokens(),
        **facts.fleet_rules(),
    )
    prompt, output = (np.rint(x[order]).astype(np.int64) for x in (phase.prompt_tokens, phase.output_tokens))
    if phase.clients:
        served = serve_closed(fleet, prompt, output, phase.clients)
    else:
        served = serve(fleet, Requests(phase.sent_s[order] - begin, prompt, output))
    if served.rejected.any():
        raise DataFormatError(f"{phase.name}: {int(served.rejected.sum())} requests do not fit the stated KV pool")
    # A client sees every token, the last one included, later by the round trip.
    later = model.profile.ttft_offset_ms / 1e3
    return TimedRequests(
        phase.name,
        served.arrival_s,
        served.first_token_s + later,
        served.finish_s + later,
        phase.prompt_tokens[order],
        phase.output_tokens[order],
    )


def replay_error(phase: TimedRequests, model: OperatorModel, facts: EngineFacts) -> ReplayError:
    """Errors of the simulator on a phase."""
    simulated, seen = replay(phase, model, facts).figures(), phase.figures()
    errors = {name: round(simulated[name] / seen[name] - 1.0, 4) for name in seen if math.isfinite(seen[name])}
    return ReplayError(phase.name, len(phase.sent_s), errors)


@dataclass(frozen=True, slots=True)
class MeasuredEngine:
    """A measured engine: its facts, the fitted times, and how well the simulator reproduces each phase."""

    facts: EngineFacts
    fit: EngineFit
    phases: list[TimedRequests]
    """Phases that were fitted, then phases that the fit has not seen."""
    replays: list[ReplayError]
    notes: list[str]

    def source(self, name: str) -> EngineSource:
        """The engine as a source of operator times for the table builder."""
        return EngineSource(name, self.fit.times, self.facts)

    def profile(self, name: str) -> EngineProfile:
        """The engine's profile for the table builder."""
        return engine_profile(name, self.facts, self.fit.ttft_offset_ms, f"measured, {self.fit.spans} equations")

    def to_dict(self) -> dict[str, Any]:
        """JSON form without the requests; kept in the table."""
        replays = [asdict(error) for error in self.replays]
        return {"facts": asdict(self.facts), "fit": self.fit.to_dict(), "replays": replays, "notes": self.notes}


def measured_engine(
    facts: EngineFacts, fitted: Sequence[TimedRequests], unseen: Sequence[TimedRequests], notes: Sequence[str] = ()
) -> MeasuredEngine:
    """Fit to some phases, then replay them and unseen ones; raises as :func:`fit_engine_times` does."""
    fit = fit_engine_times(fitted, facts.max_batched_tokens)
    phases = [*fitted, *unseen]
    model = EngineSource("", fit.times, facts).operators(TIER, engine_profile("", facts, fit.ttft_offset_ms, ""))
    return MeasuredEngine(facts, fit, phases, [replay_error(phase, model, facts) for phase in phases], list(notes))
