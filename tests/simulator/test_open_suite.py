"""The open fidelity suite: every run has a split and is played as it was served."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("aiconfigurator_core", reason="the extra `hardware` is not installed")

from benchmarks.fidelity import open_suite
from benchmarks.fidelity.hardware import bound_90
from benchmarks.fidelity.open_suite import (
    DATA,
    QUANTITIES,
    REFUSED,
    SERVER_SPLIT,
    SPLITS,
    Run,
    covered,
    identified,
    markdown,
    requests_csv,
    runs,
    submission_files,
    summary,
)
from benchmarks.report import RESULTS
from ops.fidelity import FIGURES_PATH, RUNS_PATH
from ops.margins import ratio
from simulator.events.requests import Outcome


@pytest.fixture(scope="module")
def played() -> list[Run]:
    return list(runs())


def test_every_run_is_played_and_has_a_split(played: list[Run]) -> None:
    by_request = ("llm_d_llama_70b.csv", "llm_k8s_llama_70b.csv", "vllm_h200_llama_8b.csv")
    llm_d, llm_k8s, own = (pd.read_csv(DATA / name) for name in by_request)
    loads = llm_d.groupby(["card", "replicas", "load", "qps"]).ngroups
    loads += sum(len(pd.read_csv(DATA / name)) for name in ("gpustack.csv", "llm_d_llama_8b.csv"))
    assert len(played) == loads + llm_k8s["qps"].nunique() + own["load"].nunique()
    assert {(run.card, run.model) for run in played} == set(SPLITS)
    assert {run.split for run in played} == {*SPLITS.values(), SERVER_SPLIT}


def test_the_written_results_are_those_of_the_runs(played: list[Run]) -> None:
    written = (RESULTS / "open_fidelity.md").read_text(encoding="utf-8")
    assert written == markdown(summary(played))
    assert tuple(path.read_text(encoding="utf-8") for path in (RUNS_PATH, FIGURES_PATH)) == submission_files(played)


def test_the_requests_of_every_run_are_those_that_were_played(played: list[Run]) -> None:
    rows = pd.read_csv(StringIO(requests_csv(played)))
    names = identified(played)
    assert len(names) == len(played)
    assert rows.groupby("run").size().to_dict() == {name: len(run.requests.arrival_s) for name, run in names.items()}
    # Four clients send their requests when they have an answer; the others are sent at stated times.
    assert rows[rows["run"] == "gpustack-h100-sxm-qwen3-8b-4-clients"]["sent_s"].isna().all()
    assert rows[rows["run"].str.startswith("llm-d")]["sent_s"].notna().all()


def test_a_run_longer_than_the_pool_has_no_simulated_figures(played: list[Run]) -> None:
    refused = [run for run in played if run.band == REFUSED]
    assert {run.model for run in refused} == {"qwen3-32b"}
    assert all(np.isnan(list(run.simulated.values())).all() for run in refused)


def test_a_measured_request_ends_after_its_first_token_and_the_gaps_to_its_last() -> None:
    columns = {"arrival_s": [0.0, 1.0], "output_tokens": [3, 11], "ttft_ms": [100.0, 200.0], "tpot_ms": [10.0, 80.0]}
    found = open_suite._measured(pd.DataFrame(columns))  # noqa: SLF001
    assert found["E2E p50"] == (120.0 + 1_000.0) / 2
    assert found["tokens/s"] == 14 / 2.0


def test_arrivals_drawn_again_give_the_published_figures(played: list[Run]) -> None:
    # Median TTFT, median TPOT (ms) and output tokens/s as llm-k8s's benchmark_results.md states them.
    published = ((56.3722, 24.5413, 208.177), (49.5001, 27.3485, 673.918), (58.1, 31.6757, 1354.37))
    found = [run.measured for run in played if run.source == "llm-k8s"]
    for measured, (ttft, tpot, rate) in zip(found, (*published, (349.846, 36.9731, 1780.36)), strict=True):
        assert (measured["TTFT p50"], measured["TPOT p50"]) == pytest.approx((ttft, tpot), abs=0.01)
        assert measured["tokens/s"] == pytest.approx(rate, rel=0.005)


def test_whole_prompts_of_the_8b_runs_delay_the_tokens_of_others(played: list[Run]) -> None:
    # At 312 TFLOPS an A100 takes this long for an iteration of 8,192 tokens, two operations per parameter and token.
    least_ms = 2 * 8.03e9 * 8_192 / 312e12 * 1e3
    runs = [run for run in played if (run.card, run.model) == ("a100_sxm", "llama-3.1-8b")]
    assert len(runs) == 3
    for run in runs:
        assert run.measured["ITL p99"] > run.simulated["ITL p99"] > least_ms


def test_no_ttft_of_the_runs_that_changed_the_rule_is_beyond_the_bound(played: list[Run]) -> None:
    runs = [run for run in played if run.model == "llama-3.1-8b" and run.split == "validation"]
    assert len(runs) == 9
    assert all(covered(run)[name] for run in runs for name in ("TTFT p50", "TTFT p99"))
    assert any(run.measured["TTFT p99"] > 2 * run.simulated["TTFT p99"] for run in runs if run.card == "a100_sxm")


def test_the_40_gb_card_reads_a_models_weights_more_slowly() -> None:
    # 70.6e9 parameters of two bytes on eight cards: 17.64 GB at 1555 and at 2039 GB/s.
    by_hand_ms = 17.64e3 / 1555 - 17.64e3 / 2039
    assert open_suite._slower_weights_ms("llama-3.1-70b", "BF16", 8) == pytest.approx(by_hand_ms, rel=0.01)  # noqa: SLF001


def test_requests_at_once_count_those_that_a_request_decodes_beside() -> None:
    # The first two decode side by side throughout, the third alone.
    first, last = np.array([0.0, 0.0, 5.0]), np.array([2.0, 2.0, 6.0])
    outcome = Outcome(first, first, last, np.full(3, 9), np.zeros(3, bool), np.zeros(3, int), 1, 1.0, 1, 0.0)
    assert open_suite._at_once(outcome) == pytest.approx((2 + 2 + 1) / 3)  # noqa: SLF001


def test_a_latency_is_covered_up_to_the_ratio_that_plans_allow_for(played: list[Run]) -> None:
    simulated = dict.fromkeys(QUANTITIES, 100.0)
    ttft, tpot = (100.0 * ratio(quantity, "a100_sxm", "light").p90 for quantity in ("ttft", "tpot"))
    measured = {"TTFT p50": ttft - 0.1, "TTFT p99": ttft + 0.1, "TPOT p50": tpot - 0.1, "tokens/s": 1.0}
    run = replace(played[0], card="a100_sxm", band="light", measured=measured, simulated=simulated)
    assert covered(run) == {"TTFT p50": True, "TTFT p99": False, "TPOT p50": True}


def test_a_further_value_stays_below_the_bound_in_nine_of_ten_cases() -> None:
    # Of n + 1 values in random order the last one has each rank equally often: 18 of 20, 44 of 48 are below.
    assert bound_90([float(i) for i in range(19, 0, -1)]) == 18.0
    assert bound_90([float(i) for i in range(1, 48)]) == 44.0
    # Nine values are the fewest that suffice.
    assert bound_90([float(i) for i in range(1, 10)]) == 9.0
    assert bound_90([3.0, 1.0, 2.0]) == 3.0


def test_the_knee_shows_the_same_figures_without_additional_time(played: list[Run]) -> None:
    (run,) = [run for run in played if run.load == "64 clients, short"]
    (_, (first, later, tpot)), *_ = open_suite._by_wave(0.0)  # noqa: SLF001
    assert tpot == (run.measured["TPOT p50"], pytest.approx(run.simulated["TPOT p50"]))
    # Half of the requests are first ones.
    assert later[1] < run.simulated["TTFT p50"] < first[1]
    slower = next(open_suite._by_wave(4.0))[1]  # noqa: SLF001
    assert slower[2][1] > tpot[1] + 0.5
