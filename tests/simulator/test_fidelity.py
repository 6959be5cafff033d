"""The serving dynamics against the discrete-event reference and real hardware, and their support by measurements."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.fidelity import fluid
from benchmarks.fidelity.accelmark import OUTPUT_LOG_SIGMA
from benchmarks.fidelity.compare import Case, act, dynamics, poisson_cases, reference
from benchmarks.fidelity.hardware_runs import (
    SYSTEM_40GB,
    SYSTEMS_80GB,
    HardwareComparison,
    burst_arrivals,
    hardware_comparisons,
    operator_tables,
    width_errors,
)
from benchmarks.fidelity.silicon import closed_loops, played
from env.batch import ServingBatch
from env.inference_env import InferenceEnv
from inferencegym.tasks import get_task
from simulator.coverage import LEVELS, coverage, support_map
from simulator.events.fleet import Fleet
from simulator.events.requests import Requests
from simulator.events.simulation import serve
from simulator.hardware import measured
from simulator.hardware.measured_model import operator_model
from simulator.hardware.profiles import engine
from simulator.hardware.tables import load_tables
from simulator.load.requests import RequestLog
from simulator.whatif import STEP_S, serve_requests, steady_requests, ttft_samples

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
FAST_CASES = ("80gb qps10 b256", "40gb qps15 b64", "qps30 tails x2", "qps2 long x2 disagg", "qps15 kv0.3", "qps6 spec2")


@pytest.fixture(scope="module")
def published() -> dict[str, dict[str, list[dict[str, float]]]]:
    text = (BENCHMARKS / "results" / "fidelity.json").read_text(encoding="utf-8")
    found: dict[str, dict[str, list[dict[str, float]]]] = json.loads(text)
    return found


@pytest.fixture(scope="module")
def held_out() -> list[HardwareComparison]:
    return [c for c in hardware_comparisons(SYSTEMS_80GB[:1]) if c.group == "0.20.1 BF16, held out"]


# ---------------------------------------------------------------- against the reference


@pytest.mark.parametrize("name", FAST_CASES)
def test_the_dynamics_follow_the_reference_iteration_by_iteration(name: str) -> None:
    case = next(case for case in poisson_cases() if case.name == name)
    seen, found = reference(case), dynamics(case, step_s=1.0)
    assert found.ttft_p50_ms == pytest.approx(seen.ttft_p50_ms, rel=0.15)
    assert found.ttft_p99_ms == pytest.approx(seen.ttft_p99_ms, rel=0.30)
    assert found.tpot_ms == pytest.approx(seen.tpot_ms, rel=0.05)
    assert found.throughput_tok_s == pytest.approx(seen.throughput_tok_s, rel=0.03)
    assert found.makespan_s == pytest.approx(seen.makespan_s, rel=0.03)


PREFILL_FIRST = dataclasses.replace(engine("vllm_v0"), sequence_overhead_ms=0.0, output_delay=0.5)


@pytest.mark.parametrize("qps", [3, 8, 20])
def test_prompts_in_iterations_of_their_own_take_as_long_as_in_the_reference(qps: float) -> None:
    log = steady_requests(qps, 400, 247, 350, 0.55, 0.9)
    fleet = Fleet(operator_model("a100-80gb", "FP16", PREFILL_FIRST), 256, 400_000)
    prompts, outputs = log.prompt_tokens.astype(np.int64), log.output_tokens.astype(np.int64)
    seen = serve(fleet, Requests(log.arrival_s, prompts, outputs, log.class_index))
    found = serve_requests(act(256), log, operator_tables("a100-80gb", PREFILL_FIRST)).report()
    assert found.ttft_p50_ms == pytest.approx(float(np.median(seen.ttft_ms())), rel=0.15)
    assert found.ttft_p99_ms == pytest.approx(float(np.quantile(seen.ttft_ms(), 0.99)), rel=0.30)
    assert found.tpot_p50_ms == pytest.approx(float(np.median(seen.tpot_ms())), rel=0.06)
    assert found.makespan_s == pytest.approx(seen.makespan_s(), rel=0.03)


def test_a_row_of_prompts_first_equals_the_same_episode_alone() -> None:
    tables = operator_tables("a100-40gb", PREFILL_FIRST)
    task, seeds = get_task(3), [5, 6, 7]
    knobs = np.array([[1.0, 2, 64, 0, 0], [0.5, 0, 256, 1, 1], [0.9, 0, 128, 0, 2]])
    together = ServingBatch(task, 3, tables=tables)
    together.reset(seeds)
    alone = [ServingBatch(task, 1, tables=tables) for _ in seeds]
    for row, seed in zip(alone, seeds, strict=True):
        row.reset([seed])
    for _ in range(80):
        together.step(knobs)
        for i, row in enumerate(alone):
            row.step(knobs[i : i + 1])
            assert np.array_equal(row.fleet.metrics[:, 0], together.fleet.metrics[:, i])
    assert np.isfinite(together.fleet.metrics).all()


def three_classes() -> RequestLog:
    """Fifteen seconds of 60 chats, 60 batch jobs and 10 long documents a second."""
    rng = np.random.default_rng(5)
    prompts = [rng.uniform(32, 128, 900), rng.uniform(32, 128, 900), rng.uniform(4096, 8192, 150)]
    outputs = [rng.uniform(1, 200, 900), rng.uniform(1, 600, 900), rng.uniform(1, 200, 150)]
    index = np.repeat([0, 1, 2], [900, 900, 150])
    order = rng.permutation(len(index))
    arrival_s = np.sort(rng.uniform(0, 15, len(index)))
    return RequestLog(
        arrival_s, np.rint(np.concatenate(prompts)[order]), np.ceil(np.concatenate(outputs)[order]), index[order]
    )


def test_a_flood_of_three_classes_is_refused_and_served_like_the_reference() -> None:
    log = three_classes()
    case = Case("flood", "tasks", log, act(64), replicas=4, queue_limit=256)
    seen, found = reference(case), dynamics(case, step_s=1.0)
    assert found.rejected == pytest.approx(seen.rejected, rel=0.10)
    assert found.throughput_tok_s == pytest.approx(seen.throughput_tok_s, rel=0.10)
    assert found.tpot_ms == pytest.approx(seen.tpot_ms, rel=0.10)
    # the highest class overtakes the flood: the lower ones wait many times as long
    for classes in (seen.classes, found.classes):
        assert classes["interactive"][1] * 5 < classes["batch"][1]


def test_a_pool_too_small_for_the_load_costs_recomputation() -> None:
    log = steady_requests(3, 150, 500, 600, 0.55)
    small, large = (Case("kv", "kv", log, act(256, kv)) for kv in (0.1, 0.9))
    assert dynamics(small).preemptions == pytest.approx(reference(small).preemptions, rel=0.25)
    assert dynamics(small).preemptions > 100
    assert dynamics(large).preemptions == reference(large).preemptions == 0.0


def test_one_request_alone_takes_its_prefill_and_its_tokens() -> None:
    tables = load_tables()
    log = RequestLog(np.zeros(1), np.array([128.0]), np.array([400.0]), np.zeros(1, dtype=np.int64))
    found = serve_requests(act(8), log, tables).report()
    context = 128 + 400 / 2
    token_ms = float(np.interp(context, tables.axes["prompt_len_bucket"], tables.iteration_ms[0, 0, 0]))
    alone_ms = float(tables.prefill_ms[0, 1])
    assert found.tpot_p50_ms == pytest.approx(token_ms, rel=0.02)
    assert found.ttft_p50_ms == pytest.approx(tables.meta["tau_ms"] + alone_ms, rel=0.35)
    # A step admits its arrivals evenly: a single request starts in the middle of it.
    half_step_ms = 0.5 * STEP_S * 1000
    assert found.makespan_s * 1000 == pytest.approx(half_step_ms + alone_ms + 399 * token_ms, rel=0.01)


def test_long_prompts_that_clump_wait_for_each_other_only_once() -> None:
    """Two 6,000-token prompts a second use a third of two replicas: waiting stays within a few prefill times."""
    log = steady_requests(2, 200, 6000, 300, 0.55)
    found = serve_requests(act(128), log, load_tables(), n_replicas=2).report()
    prefill_ms = float(np.interp(6000, load_tables().axes["prompt_len_bucket"], load_tables().prefill_ms[0]))
    assert prefill_ms < found.ttft_p50_ms < 1.5 * prefill_ms
    assert found.ttft_p99_ms < 4 * prefill_ms


@pytest.mark.parametrize("n_requests", [1, 50, 300])
@pytest.mark.parametrize("clients", [1, 64, 300, 512, 10_000])
def test_no_first_token_of_a_closed_loop_takes_longer_than_its_run(clients: int, n_requests: int) -> None:
    log = steady_requests(10, n_requests, 247, 350, 0.55)
    served = serve_requests(act(128), log, load_tables(), closed_clients=clients)
    ttft_ms, weight = ttft_samples(served.record)
    assert weight.sum() == pytest.approx(n_requests, abs=0.5)
    assert ttft_ms[weight > 1e-6].max() <= 1000 * served.makespan_s()


def test_clients_beyond_the_number_of_requests_have_nothing_to_send() -> None:
    log = steady_requests(10, 300, 247, 350, 0.55)
    enough, more = (serve_requests(act(128), log, load_tables(), closed_clients=n).report() for n in (300, 10_000))
    assert more.ttft_p99_ms == pytest.approx(enough.ttft_p99_ms, rel=0.01)
    assert more.makespan_s == pytest.approx(enough.makespan_s, rel=0.01)


@pytest.mark.parametrize(("clients", "n_requests"), [(64, 384), (64, 50), (200, 300), (512, 300)])
def test_clients_of_a_closed_loop_wait_like_those_of_the_reference(clients: int, n_requests: int) -> None:
    log = steady_requests(10, n_requests, 247, 350, 0.55)
    case = Case("closed", "closed", log, act(128), closed_clients=clients)
    seen, found = reference(case), dynamics(case)
    assert found.ttft_p50_ms == pytest.approx(seen.ttft_p50_ms, rel=0.15)
    assert found.ttft_p99_ms == pytest.approx(seen.ttft_p99_ms, rel=0.15)


def test_every_class_of_a_closed_loop_waits_from_its_own_sending() -> None:
    both = three_classes()
    kept = both.class_index != 1  # a class between them without requests, which does not count
    log = RequestLog(both.arrival_s[kept], both.prompt_tokens[kept], both.output_tokens[kept], both.class_index[kept])
    served = serve_requests(act(64), log, load_tables(), n_replicas=4, closed_clients=4 * 64)
    sent = np.bincount(log.class_index)
    for c, n in enumerate(sent[sent > 0]):
        assert served.record[served.record[:, 0] == c, 1].sum() == pytest.approx(n, abs=0.5)
    assert (served.record[:, 2:4] >= 0.0).all()
    ttft_ms, weight = ttft_samples(served.record)
    assert ttft_ms[weight > 1e-6].max() <= 1000 * served.makespan_s()


# ---------------------------------------------------------------- against hardware


def test_the_arrivals_of_the_measured_runs_are_reproduced_to_the_request() -> None:
    row = next(r for r in measured.rows("accelmark_a100_80gb.csv") if r["scenario"] == "burst")
    quiet, burst = burst_arrivals(row)
    assert sum(map(len, quiet)) == int(float(row["n_steady"]))
    assert sum(map(len, burst)) == int(float(row["n_burst"]))


@pytest.mark.parametrize(
    ("metrics", "goal"),
    [
        (("out_tok_s",), 0.03),
        (("elapsed_s",), 0.05),
        (("tpot_ms_p50",), 0.07),
        (("ttft_ms_p50", "steady_ttft_ms_p50", "burst_ttft_ms_p50"), 0.15),
        (("ttft_ms_p99", "steady_ttft_ms_p99", "burst_ttft_ms_p99"), 0.15),
    ],
)
def test_held_out_runs_on_a_real_a100_are_within_the_goal(
    held_out: list[HardwareComparison], metrics: tuple[str, ...], goal: float
) -> None:
    sizes = [abs(c.relative_error()) for c in held_out if c.metric in metrics]
    assert len(sizes) >= 2
    assert np.median(sizes) <= goal


def test_rows_that_fitted_a_profile_are_told_apart(held_out: list[HardwareComparison]) -> None:
    assert {c.suite for c in held_out if c.scenario != "burst"} == {"suite_C"}
    assert all(c.precision == "BF16" for c in held_out)


def test_any_engine_profile_has_tables_without_a_rebuild() -> None:
    built, shipped = operator_tables("a100-40gb", "a100_40"), load_tables()
    assert np.allclose(built.decode_ms, shipped.decode_ms)
    assert np.allclose(built.prefill_saturated_ms, shipped.prefill_saturated_ms)
    assert np.allclose(built.iteration_ms, shipped.iteration_ms)


@pytest.fixture(scope="module")
def held_out_40gb() -> list[HardwareComparison]:
    return [c for c in hardware_comparisons((SYSTEM_40GB,)) if c.group.endswith("held out")]


@pytest.mark.parametrize(
    ("metrics", "precisions", "goal"),
    [
        (("out_tok_s",), ("BF16", "W8A8", "W4A16"), 0.08),
        (("elapsed_s",), ("BF16", "W8A8", "W4A16"), 0.06),
        (("tpot_ms_p50",), ("BF16", "W8A8", "W4A16"), 0.10),
        (("ttft_ms_p50", "steady_ttft_ms_p50", "burst_ttft_ms_p50"), ("BF16", "W8A8", "W4A16"), 0.25),
        (("ttft_ms_p99", "steady_ttft_ms_p99", "burst_ttft_ms_p99"), ("BF16", "W8A8", "W4A16"), 0.25),
    ],
)
def test_an_engine_that_prefills_first_is_followed_on_a_real_a100_40gb(
    held_out_40gb: list[HardwareComparison], metrics: tuple[str, ...], precisions: tuple[str, ...], goal: float
) -> None:
    sizes = [abs(c.relative_error()) for c in held_out_40gb if c.metric in metrics and c.precision in precisions]
    assert len(sizes) >= 4
    assert np.median(sizes) <= goal


def test_the_width_of_the_output_lengths_is_the_one_that_fits_best() -> None:
    found = {width: width_errors(SYSTEM_40GB, width) for width in (1.2, OUTPUT_LOG_SIGMA["0.7.3"], 1.4)}
    misfit = {
        width: sum(errors[rate, "ttft_ms_p99"] ** 2 for rate in ("25.0", "100.0")) for width, errors in found.items()
    }
    assert min(misfit, key=misfit.__getitem__) == 1.3
    assert misfit[1.3] < 0.01


def test_closed_loops_on_an_h100_take_as_long_as_they_were_measured_to() -> None:
    loops, left_out = closed_loops()
    mine = [x for x in loops if x.card == "h100" and x.engine == "vllm" and x.model.startswith("llama-3.1-70b")]
    assert len(mine) >= 20
    assert len(loops) + sum(left_out.values()) == 5221
    errors = [abs(figures["TPOT"][1] / figures["TPOT"][0] - 1.0) for _, figures in played(mine)]
    assert np.median(errors) <= 0.10


def test_closed_loops_on_a_b200_show_a_kv_cache_in_8_bits_and_agree() -> None:
    mine = [x for x in closed_loops()[0] if x.card == "b200" and x.engine == "vllm"]
    found = list(played(mine))
    assert {loop.model: loop.kv_cache_dtype for loop, _ in found} == {
        "llama-3.1-70b FP8": "fp8",
        "llama-3.1-70b NVFP4": "fp8",
        "gpt-oss-120b MXFP4 TP4": "bf16",  # its cache is never full, so its precision cannot be inferred
    }
    for quantity, goal in (("TPOT", 0.10), ("throughput", 0.08)):
        assert np.median([abs(figures[quantity][1] / figures[quantity][0] - 1.0) for _, figures in found]) <= goal


# ---------------------------------------------------------------- the published table


def test_the_published_numbers_are_what_the_command_measures(
    published: dict[str, dict[str, dict[str, list[dict[str, float]]]]],
) -> None:
    listed = {(p["name"], p["quantity"]): p for p in published["dynamics"][fluid.ENVIRONMENT]["hardware_points"]}
    found = fluid.hardware_points(hardware_comparisons(SYSTEMS_80GB[:1], step_s=1.0))
    assert len(found) > 60
    for point in found:
        if "burst" not in point.name:  # its quiet and its burst windows share a name
            assert point.simulated == pytest.approx(listed[point.name, point.quantity]["simulated"], rel=1e-6)


# ---------------------------------------------------------------- support


def test_a_configuration_is_as_well_supported_as_its_nearest_cell() -> None:
    level = support_map(load_tables()).level
    assert LEVELS[level(0, 0, 8.0, 128.0)] == "measured"
    assert LEVELS[level(0, 0, 9.0, 128.0)] == "interpolated"
    assert LEVELS[level(1, 0, 8.0, 128.0)] == "interpolated"  # quantised times are measured ratios
    assert LEVELS[level(0, 2, 8.0, 128.0)] == "modelled"  # the draft model's cost is composed
    assert LEVELS[level(0, 0, 512.0, 8192.0)] == "extrapolated"
    assert LEVELS[level(0, 0, 600.0, 128.0)] == LEVELS[level(0, 0, 1.0, 20_000.0)] == "extrapolated"


def test_coverage_shares_add_up_for_every_precision() -> None:
    for shares in coverage(load_tables()).values():
        assert sum(shares.values()) == pytest.approx(1.0)
        assert set(shares) == set(LEVELS)


def test_every_step_and_every_what_if_say_how_well_they_are_supported() -> None:
    env = InferenceEnv(task_id=3, seed=1)
    env.reset()
    knobs = {"kv_budget": 0.9, "batch_size": 64, "prefill_disagg": False, "quant_tier": "FP16"}
    assert env.step({**knobs, "spec_length": 0})[3]["support"] in ("measured", "interpolated")
    assert env.step({**knobs, "spec_length": 4})[3]["support"] == "modelled"
    found = serve_requests(act(64, spec_length=2), steady_requests(4, 60, 200, 100), load_tables()).report()
    assert found.support["modelled"] == pytest.approx(1.0)


def test_the_distributions_behind_a_what_if_belong_to_its_requests() -> None:
    log = steady_requests(5, 120, 200, 150, 0.5)
    served = serve_requests(act(64), log, load_tables())
    assert len(served.finish_s) == len(log.arrival_s)
    assert (served.finish_s > log.arrival_s).all()
    assert served.makespan_s() == served.finish_s.max()
    assert ttft_samples(served.record)[1].sum() == pytest.approx(120.0, abs=1e-6)
