"""What-if questions: generated loads, and figures that can be computed by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from inferencegym.errors import InvalidConfigError
from inferencegym.models import QuantTier, ServeAction
from simulator.hardware.tables import load_tables
from simulator.load.recorded import RecordedLoad
from simulator.load.requests import MAX_REQUESTS, RequestLog
from simulator.whatif import (
    WhatIf,
    serve_requests,
    steady_requests,
    ttft_samples,
    ttft_statistics,
    weighted_quantile,
)

ACTION = ServeAction(1.0, 0, 8, False, QuantTier.FP16)


def load(n: int = 20, output_tokens: float = 50.0) -> RequestLog:
    """``n`` equal requests, one a second."""
    lengths = np.ones(n)
    return RequestLog(np.arange(n, dtype=np.float64), 100.0 * lengths, output_tokens * lengths, np.zeros(n, np.int64))


def asked(action: ServeAction = ACTION, **options: Any) -> WhatIf:
    return serve_requests(action, options.pop("requests", load()), load_tables(), **options).report()


def test_every_request_is_served_and_counted_once() -> None:
    answer = asked()
    assert (answer.n_requests, answer.rejected, answer.oom) == (20, 0.0, False)
    assert answer.completed == pytest.approx(20.0, abs=0.5)
    assert sum(one["served"] for one in answer.classes.values()) == pytest.approx(20.0)
    assert sum(answer.support.values()) == pytest.approx(1.0)
    # The last request arrives at 19 s and writes 50 tokens, each at least as slow as the table's fastest step.
    fastest_s = float(load_tables().decode_ms[0, 0].min()) / 1000.0
    assert 19.0 + 49 * fastest_s < answer.makespan_s < 20.0
    assert answer.output_tokens_per_s == pytest.approx(20 * 50 / answer.makespan_s)


def test_every_gpu_is_paid_until_the_last_answer_also_those_that_prefill_apart() -> None:
    together = asked(n_replicas=3)
    assert together.gpu_seconds == pytest.approx(3 * together.makespan_s)
    apart = asked(replace(ACTION, prefill_disagg=True), n_replicas=3)
    assert apart.gpu_seconds == pytest.approx(6 * apart.makespan_s)


@pytest.mark.parametrize("once", [True, False])
def test_requests_of_a_log_are_those_of_its_steps_whatever_their_length(once: bool) -> None:
    source = RecordedLoad(replace(load(), arrival_s=np.arange(20) * 0.4), load_tables(), once=once, step_s=0.25)
    drawn, requests = source.draw([5], 40), source.requests(5, 40)
    assert (
        drawn.arrivals[0, :, 0].tolist() == np.bincount((requests.arrival_s / 0.25).astype(int), minlength=40).tolist()
    )


def test_a_longer_answer_takes_its_tokens_longer() -> None:
    one, two = (asked(requests=load(1, tokens)) for tokens in (100.0, 200.0))
    assert one.tpot_p50_ms == pytest.approx(two.tpot_p50_ms, rel=0.02)
    assert two.makespan_s - one.makespan_s == pytest.approx(100 * two.tpot_p50_ms / 1000.0, rel=0.02)
    assert one.ttft_p50_ms == pytest.approx(two.ttft_p50_ms)


def test_what_a_short_queue_cannot_hold_is_refused() -> None:
    flood = replace(load(400, 200.0), arrival_s=np.zeros(400))
    answer = asked(requests=flood, queue_limit=10.0)
    assert answer.rejected > 300
    assert answer.completed == pytest.approx(400 - answer.rejected, abs=1.0)


def test_generated_loads_have_the_rate_and_the_lengths_that_were_asked_for() -> None:
    made = steady_requests(8.0, 40_000, 500.0, 120.0, output_cv=0.5, prompt_cv=2.0, seed=3)
    assert len(made.arrival_s) == 40_000
    gaps = np.diff(made.arrival_s)
    # Exponential gaps: mean and standard deviation are both 1/rate.
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.03)
    assert gaps.std() == pytest.approx(1 / 8, rel=0.03)
    for lengths, mean, cv in ((made.prompt_tokens, 500.0, 2.0), (made.output_tokens, 120.0, 0.5)):
        assert lengths.min() >= 1.0
        assert np.array_equal(lengths, np.rint(lengths))
        assert lengths.mean() == pytest.approx(mean, rel=0.05)
        assert lengths.std() / lengths.mean() == pytest.approx(cv, rel=0.1)
    equal = steady_requests(8.0, 5, 500.0, 120.0)
    assert (equal.prompt_tokens == 500).all()
    assert (equal.output_tokens == 120).all()
    assert (equal.class_index == 0).all()


def test_a_window_ends_the_load() -> None:
    by_window = steady_requests(50.0, None, 100.0, 10.0, window_s=40.0)
    assert by_window.arrival_s.max() < 40.0
    # 2,000 expected, standard deviation 45.
    assert len(by_window.arrival_s) == pytest.approx(2000, abs=225)
    by_both = steady_requests(50.0, 100, 100.0, 10.0, window_s=40.0)
    assert len(by_both.arrival_s) == 100
    assert len(steady_requests(50.0, 100, 100.0, 10.0, window_s=1.0).arrival_s) < 100


@pytest.mark.parametrize(
    "wrong",
    [
        {"n_requests": None},
        {"qps": 0.0},
        {"qps": float("nan")},
        {"window_s": 0.0},
        {"window_s": float("inf")},
        {"n_requests": MAX_REQUESTS + 1},
        {"seed": -1},
        {"seed": 2**63},
        {"prompt_tokens": 0.5},
        {"output_tokens": 10_000_001.0},
        {"prompt_cv": -0.1},
        {"output_cv": 100.5},
    ],
)
def test_an_impossible_load_is_refused(wrong: dict[str, Any]) -> None:
    asked_for = {"qps": 1.0, "n_requests": 5, "prompt_tokens": 100.0, "output_tokens": 10.0}
    with pytest.raises(InvalidConfigError):
        steady_requests(**{**asked_for, **wrong})
    at_the_limits = steady_requests(1.0, 5, 1.0, 1.0, output_cv=100.0, prompt_cv=0.0, seed=2**63 - 1)
    assert len(at_the_limits.arrival_s) == 5


def test_a_weighted_quantile_by_hand() -> None:
    # In order: 1 (weight 1), 2 (weight 2), 3 (weight 1), so half of the weight is reached within 2.
    values, weights = np.array([3.0, 1.0, 2.0]), np.array([1.0, 1.0, 2.0])
    assert [weighted_quantile(values, weights, q) for q in (0.0, 0.2, 0.5, 0.74, 0.76, 1.0)] == [1, 1, 2, 2, 3, 3]


def test_statistics_of_a_long_record_are_those_of_all_its_values_sorted_at_once() -> None:
    rng = np.random.default_rng(0)
    wait_ms = rng.normal(0.0, 200.0, (4_500, 2))  # more admissions than are taken at once
    after = rng.uniform((1.0, 0.0, 0.0), (30.0, 80.0, 0.8), (4_500, 3))
    record = np.column_stack([np.zeros(4_500), rng.uniform(0.1, 3.0, 4_500), np.sort(wait_ms), after])
    values, weights = ttft_samples(record)
    found = ttft_statistics(record)
    for name, q in {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}.items():
        assert found[name] == weighted_quantile(values, weights, q)
    assert found["mean"] == pytest.approx(float(np.average(values, weights=weights)))
