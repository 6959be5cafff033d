"""The discrete-event engine against served loads on a real A100-80GB, and the workload that represents them."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.fidelity.accelmark import OUTPUT_CAP, ServedComparison, accelmark_comparisons, output_lengths


@pytest.fixture(scope="module")
def bf16() -> list[ServedComparison]:
    return accelmark_comparisons("0.20.1", "BF16")


def median_error(comparisons: list[ServedComparison], *metrics: str) -> float:
    return float(np.median([abs(c.relative_error()) for c in comparisons if c.metric in metrics]))


def test_every_scenario_with_standard_prompts_is_compared(bf16: list[ServedComparison]) -> None:
    rates = {f"online {rate}/s" for rate in (5, 10, 25, 50, 100)}
    assert {c.scenario for c in bf16} == {"interactive", "sustained", "offline", "burst", *rates}
    assert all(np.isfinite([c.measured, c.predicted]).all() and c.measured > 0 for c in bf16)


def test_throughput_tpot_and_makespan_are_within_their_stated_error(bf16: list[ServedComparison]) -> None:
    assert median_error(bf16, "out_tok_s") < 0.04
    assert median_error(bf16, "tpot_ms_p50") < 0.04
    assert median_error(bf16, "elapsed_s") < 0.03


def test_ttft_is_within_its_stated_error_even_under_overload(bf16: list[ServedComparison]) -> None:
    assert median_error(bf16, "ttft_ms_p50", "burst_ttft_ms_p50") < 0.15
    assert median_error(bf16, "ttft_ms_p90", "ttft_ms_p99", "burst_ttft_ms_p99") < 0.12


def test_int8_was_fitted_to_nothing_and_still_serves_at_the_measured_rate() -> None:
    """W8A8 under vLLM 0.7.3: the tier's ratio comes from kernels, the server's overheads from the BF16 runs."""
    assert median_error(accelmark_comparisons("0.7.3", "W8A8"), "tpot_ms_p50", "elapsed_s") < 0.10


def test_output_lengths_have_the_mean_of_the_run_and_its_cap() -> None:
    lengths = output_lengths(1000, 3, 345.7, 1.3)
    assert lengths.mean() == pytest.approx(345.7, abs=1.0)
    assert lengths.max() == OUTPUT_CAP
    assert not np.array_equal(lengths, output_lengths(1000, 4, 345.7, 1.3))
