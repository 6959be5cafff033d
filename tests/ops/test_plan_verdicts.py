"""Verdicts of plans hold request by request: the discrete-event reference confirms each plan that meets objectives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from agents.policies.constant import ConstantAgent
from agents.registry import make_agent
from env.batch import ServingBatch
from env.reference import ReferenceFleet
from inferencegym.errors import InvalidConfigError
from inferencegym.models import OBSERVATION_FIELDS, QUANTILES, QuantTier, ServeAction
from inferencegym.spaces.actions import to_row
from ops import plan as planning
from ops.capacity import NEUTRAL, grid, log_task, on_replicas, play_constant, play_policy
from ops.export import engine_files
from ops.fidelity import model_ratios
from ops.margins import ratio
from ops.objectives import Objective, margin, parse_objective
from ops.plan import Plan, action_of, busiest, make_plan, registered_tables
from ops.report import answer, cautions, notes, plain, plan_report
from simulator.events.requests import Outcome
from simulator.hardware.catalogue import table_path
from simulator.hardware.sources import operators_of, with_fp8_kv
from simulator.hardware.tables import load_tables
from simulator.load.requests import RequestLog
from tests.known_engine import table_file

BURSTY = [parse_objective(text) for text in ("ttft_p50=150", "ttft_p99=1500", "tpot_p50=14")]


def gamma_log(cv: float, rate_rps: float, n: int, prompt_tokens: float = 1_000.0, seed: int = 0) -> RequestLog:
    """Requests with gamma-distributed gaps of this coefficient of variation, and log-normal lengths."""
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.gamma(1.0 / cv**2, cv**2 / rate_rps, n))
    prompts = np.rint(rng.lognormal(np.log(prompt_tokens), 0.7, n)) + 1
    outputs = np.rint(rng.lognormal(4.8, 0.6, n)) + 1
    return RequestLog(arrival - arrival[0], prompts, outputs, np.zeros(n, dtype=np.int64))


def served(log: RequestLog, plan: Plan, seed: int) -> Outcome:
    """The plan's fleet on the log in the reference; the seed draws which drafts are accepted."""
    assert plan.action is not None
    action = ServeAction.from_dict(plan.action)
    tables = load_tables(table_path(plan.hardware))
    task = on_replicas(log_task(log, tables), plan.n_replicas)
    prefill = plan.prefill_replicas if plan.is_uneven else None
    dynamics = partial(ReferenceFleet, server=True, prefill_replicas=prefill)
    batch = ServingBatch(task, 1, None, tables, NEUTRAL, dynamics=dynamics)
    batch.reset([seed])
    for _ in range(task.episode_length):
        batch.step(to_row(action)[None])
    assert isinstance(batch.fleet, ReferenceFleet)
    return batch.fleet.episode(0).outcome()


def holds(log: RequestLog, plan: Plan, objectives: Sequence[Objective], seed: int = 7) -> bool:
    """Whether all objectives hold in an independent play."""
    outcome = served(log, plan, seed)
    values = {"ttft": np.where(np.isnan(outcome.first_token_s), np.inf, outcome.ttft_ms()), "tpot": outcome.tpot_ms()}
    return all(np.nanquantile(values[o.quantity], QUANTILES[o.statistic]) <= o.limit_ms for o in objectives)


def test_every_plan_for_a_bursty_log_meets_its_objectives_request_by_request() -> None:
    log = gamma_log(3.0, 8.0, 2_000)
    tables = registered_tables(None, "llama-3.1-8b")
    found = make_plan(log, BURSTY, tables, policies=())
    assert {plan.hardware for plan in (*found.plans, *found.unmet)} == set(tables)
    assert found.plans
    for plan in found.plans:
        assert plan.meets
        assert holds(log, plan, BURSTY)


@pytest.mark.parametrize(
    ("cv", "rate_rps", "prompt_tokens", "limits"),
    [
        (1.0, 4.0, 300.0, ("ttft_p99=500", "tpot_p50=40")),
        (1.0, 12.0, 2_000.0, ("ttft_p90=2000",)),
        (2.0, 10.0, 600.0, ("ttft_p50=200", "tpot_p90=40")),
        (3.0, 6.0, 1_500.0, ("ttft_p95=1500", "tpot_p50=30")),
        (5.0, 5.0, 500.0, ("ttft_p50=300", "ttft_p99=3000")),
    ],
)
def test_no_plan_meets_what_the_reference_refuses(
    cv: float, rate_rps: float, prompt_tokens: float, limits: Sequence[str]
) -> None:
    log = gamma_log(cv, rate_rps, 600, prompt_tokens, seed=int(10 * cv))
    objectives = [parse_objective(text) for text in limits]
    found = make_plan(log, objectives, registered_tables(["a100-80gb", "l40s-llama-3.1-8b"]), policies=())
    met = [plan for plan in found.tried if plan.meets]
    assert met
    for plan in met:
        assert holds(log, plan, objectives)
        outcome = served(log, plan, seed=0)
        assert plan.figures["ttft_p99_ms"] == pytest.approx(np.nanquantile(outcome.ttft_ms(), 0.99))
        assert plan.figures["tpot_p50_ms"] == pytest.approx(np.nanmedian(outcome.tpot_ms()))


def test_if_the_reference_refuses_the_best_screened_setting_the_next_one_is_played() -> None:
    objectives = [parse_objective(text) for text in ("ttft_p50=165", "ttft_p99=1500", "tpot_p50=14")]
    tables = registered_tables(["a100-80gb"])
    log = gamma_log(3.0, 8.0, 600)
    found = make_plan(log, objectives, tables, precisions=["INT8"], drafts=True, policies=())
    (plan,) = found.plans
    same_size = [p for p in found.tried if p.n_gpus == plan.n_gpus]
    assert not same_size[0].meets
    assert plan.margin == max(p.margin for p in same_size if p.meets)
    refused = [p for p in found.tried if p.n_gpus < plan.n_gpus]
    assert all(not p.meets for p in refused)


def test_a_long_log_is_searched_in_its_busiest_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    log = gamma_log(1.0, 5.0, 600, 300.0)
    monkeypatch.setattr(planning, "SEARCH_REQUESTS", 200)
    monkeypatch.setattr(planning, "PLAYED_REQUESTS", 400)
    found = make_plan(log, [parse_objective("ttft_p99=900")], registered_tables(["a100-80gb"]), policies=())
    assert found.searched_s == busiest(log, 900.0, 200).arrival_s[-1] < found.played_s
    assert found.played_s == busiest(log, 900.0, 400).arrival_s[-1] < log.arrival_s[-1]
    assert any(f"played on its busiest {found.played_s:,.0f} s" in note for note in notes(found))


def test_the_busiest_requests_are_those_with_the_most_tokens_per_second() -> None:
    arrival = np.array([0.0, 10.0, 20.0, 22.0, 24.0, 40.0])
    log = RequestLog(arrival, np.full(6, 99.0), np.ones(6), np.zeros(6, dtype=np.int64))
    assert busiest(log, 900.0, 3).arrival_s.tolist() == [0.0, 2.0, 4.0]
    assert busiest(log, 900.0, 6) is log


def test_gpus_are_paid_for_over_the_whole_log() -> None:
    """An hour of which half a minute is busy: three quarters of the tokens come in a hundredth of the time."""
    busy = gamma_log(1.0, 10.0, 300, 300.0)
    calm_s = np.linspace(60.0, 3600.0, 100)
    part = busy.part(slice(0, 100), 0.0)
    log = RequestLog(
        np.concatenate([busy.arrival_s, calm_s]),
        np.concatenate([busy.prompt_tokens, part.prompt_tokens]),
        np.concatenate([busy.output_tokens, part.output_tokens]),
        np.zeros(400, dtype=np.int64),
    )
    found = make_plan(log, [parse_objective("ttft_p99=900")], registered_tables(["a100-80gb"]), policies=())
    (plan,) = found.plans
    held_gpu_hours = plan.n_gpus * log.arrival_s[-1] / 3600.0
    assert plan.gpu_hours_per_million_tokens == pytest.approx(held_gpu_hours / (log.output_tokens.sum() / 1e6))


@pytest.mark.parametrize("apart", [False, True])
def test_a_constant_played_without_a_timeline_has_the_same_outcome(apart: bool) -> None:
    log, tables = gamma_log(2.0, 6.0, 300), load_tables()
    task = on_replicas(log_task(log, tables), 2)
    action = ServeAction(0.9, 2, 64, apart, QuantTier.INT8)
    whole = play_policy("constant", ConstantAgent(action), task, tables, NEUTRAL).outcome
    assert play_constant(action, task, tables) == replace(whole, timeline={})


def test_an_end_to_end_objective_is_judged_on_every_request_from_arrival_to_last_token() -> None:
    log, tables = gamma_log(1.0, 4.0, 300, 300.0), registered_tables(["a100-80gb"])
    (plan,) = make_plan(log, [parse_objective("e2e_p99=20000")], tables, policies=()).plans
    outcome = served(log, plan, seed=0)
    seen_ms = 1e3 * (outcome.finish_s - outcome.arrival_s) + outcome.ttft_offset_ms + outcome.output_delay_ms
    assert plan.figures["e2e_p99_ms"] == pytest.approx(np.quantile(seen_ms, 0.99))
    error = plan.errors["e2e"]
    assert error.own
    assert plan.margin == pytest.approx(1.0 - plan.figures["e2e_p99_ms"] * error.p50 / 20_000)
    fastest_ms = float(seen_ms.min())
    # All tokens after the first one come a gap after another; with one prompt in ten iterations few gaps are long.
    decoding_ms = 1e3 * (outcome.finish_s - outcome.first_token_s).sum() / (outcome.output_tokens - 1).sum()
    assert plan.figures["itl_mean_ms"] == pytest.approx(decoding_ms, rel=0.006)
    assert plan.figures["itl_p50_ms"] < plan.figures["tpot_p50_ms"] < plan.figures["itl_p99_ms"]
    missed = make_plan(log, [parse_objective(f"e2e_p50={fastest_ms / 2:.0f}")], tables, policies=())
    assert not missed.plans


def test_objectives_by_window_ask_for_a_share_of_the_windows_and_may_include_the_worst() -> None:
    """Three calm windows of five minutes, then one with ten times the requests."""
    calm_s, busy_s = np.arange(0.0, 900.0, 1.0), np.arange(900.0, 1_100.0, 0.02)
    n = len(calm_s) + len(busy_s)
    log = RequestLog(np.append(calm_s, busy_s), np.full(n, 500.0), np.full(n, 100.0), np.zeros(n, dtype=np.int64))
    tables, asked = registered_tables(["a100-80gb"]), [parse_objective("ttft_p99=400")]
    found = {share: make_plan(log, asked, tables, windows_met=share, policies=()) for share in (0.75, 1.0)}
    most, worst = (found[share].plans[0] for share in (0.75, 1.0))
    assert (most.windows_met, worst.windows_met) == (0.75, 1.0)
    assert most.n_gpus < worst.n_gpus
    (whole,) = make_plan(log, asked, tables, policies=()).plans
    assert whole.windows_met is None
    outcome = play_constant(
        ServeAction.from_dict(most.action or {}),
        on_replicas(log_task(log, tables["a100-80gb"], 400.0), most.n_replicas),
        tables["a100-80gb"],
    )
    assert len(outcome.windows) == 4
    limit_ms = 400 / most.errors["ttft"].p50
    assert [window["ttft_p99_ms"] <= limit_ms for window in outcome.windows] == [True, True, True, False]
    assert most.margin == pytest.approx(1 - max(w["ttft_p99_ms"] for w in outcome.windows[:3]) / limit_ms)
    assert "in 75% of the windows of 5 minutes" in plan_report(found[0.75]).lead


def test_an_fp8_kv_cache_holds_twice_as_many_tokens_with_the_times_measured_with_it_and_the_report_says_so() -> None:
    log, objectives = gamma_log(1.0, 12.0, 300, 4_000.0), [parse_objective("ttft_p99=20000")]
    tables = registered_tables(["l40s-llama-3.1-8b"])
    table = tables["l40s-llama-3.1-8b"]
    halved = with_fp8_kv(table)
    assert halved.kv_pool_tokens(0, 1.0, False) == pytest.approx(2 * table.kv_pool_tokens(0, 1.0, False), abs=1)
    assert with_fp8_kv(halved) is halved
    found = {fp8: make_plan(log, objectives, tables, kv_cache_fp8=fp8, policies=()) for fp8 in (False, True)}
    assert "attention takes the times measured with such a cache" in " ".join(notes(found[True]))
    assert found[True].plans[0].n_gpus < found[False].plans[0].n_gpus
    task = on_replicas(log_task(log, halved), 10)
    setting = ServeAction(0.9, 0, 512, False, QuantTier(0))
    wide, narrow = (play_constant(setting, task, each).figures["tpot_p50_ms"] for each in (table, halved))
    assert narrow < 0.98 * wide
    assert "16-bit timings" not in " ".join(notes(found[True]))
    assert "KV cache is in FP8" not in " ".join(notes(found[False]))
    config = engine_files(found[True].plans[0], halved, found[True])
    assert "\nkv-cache-dtype: fp8\n" in config["vllm"]
    assert "\nkv-cache-dtype: fp8_e4m3\n" in config["sglang"]
    assert "kv-cache-dtype" not in engine_files(found[False].plans[0], table, found[False])["vllm"]


def test_the_heuristic_plans_with_the_table_that_is_played() -> None:
    table = registered_tables(["l40s-llama-3.1-8b"])["l40s-llama-3.1-8b"]
    task = log_task(gamma_log(1.0, 2.0, 200, 6_000.0), table)
    slots = []
    for played in (table, with_fp8_kv(table)):
        agent = make_agent("heuristic", task, played)
        agent.reset(1)
        slots.append(agent.act(np.zeros((1, len(OBSERVATION_FIELDS))))[0, 2])
    assert slots[1] > 1.5 * slots[0]


def test_a_card_that_nothing_was_measured_on_with_an_fp8_kv_cache_keeps_its_times_and_the_report_says_so() -> None:
    log, objectives = gamma_log(1.0, 2.0, 100), [parse_objective("ttft_p99=20000")]
    tables = registered_tables(["a100-qwen3-8b"])
    table = tables["a100-qwen3-8b"]
    halved = with_fp8_kv(table)
    assert halved.kv_pool_tokens(0, 1.0, False) == pytest.approx(2 * table.kv_pool_tokens(0, 1.0, False), abs=1)
    (wide,), (narrow,) = operators_of(table), operators_of(halved)
    assert narrow.kv_bytes_per_token == wide.kv_bytes_per_token / 2
    assert narrow.step_ms(64, 4_000) == wide.step_ms(64, 4_000)
    assert (halved.iteration_ms == table.iteration_ms).all()
    report = make_plan(log, objectives, tables, kv_cache_fp8=True, policies=())
    assert "a100-qwen3-8b: attention with an FP8 KV cache is computed with 16-bit timings" in " ".join(notes(report))


def test_the_kv_cache_of_a_measured_engine_stays_what_it_was(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigError, match="measure again"):
        with_fp8_kv(load_tables(table_file(tmp_path / "mine.parquet")))


def test_where_512_requests_at_a_time_are_too_few_a_plan_goes_to_1024_and_says_that_it_extrapolates() -> None:
    rng, n = np.random.default_rng(0), 1_600
    arrival_s = np.cumsum(rng.exponential(1 / 40, n))
    outputs = np.rint(rng.lognormal(np.log(300.0), 0.3, n)) + 1
    log = RequestLog(arrival_s - arrival_s[0], np.full(n, 60.0), outputs, np.zeros(n, dtype=np.int64))
    tables, objectives = registered_tables(["h200-qwen3-32b"]), [parse_objective("ttft_p99=2000")]
    found = make_plan(log, objectives, tables, policies=())
    (plan,) = found.plans
    assert (plan.n_gpus, action_of(plan).batch_size) == (1, 1_024)
    assert plan.support["extrapolated"] > 0.1
    assert "beyond the lookup tables" in " ".join(notes(found))
    assert "\nmax-num-seqs: 1024\n" in engine_files(plan, tables[plan.hardware], found)["vllm"]
    task = on_replicas(log_task(log, tables[plan.hardware], 2_000.0), 1)
    smaller = play_constant(replace(action_of(plan), batch_size=512), task, tables[plan.hardware])
    assert smaller.figures["ttft_p99_ms"] > 2_000
    # The times of this table are not listed: the bound of the knob holds.
    others = make_plan(log, objectives, registered_tables(["a100-80gb"]), policies=())
    assert max(action_of(each).batch_size for each in others.tried) <= 512


def test_a_plan_whose_api_servers_are_the_bottleneck_says_so() -> None:
    """25 requests/s of 600 tokens on a replica are 15,000 tokens/s, of .06 ms each: 90% of the server's time."""
    arrival, n = np.arange(2500) / 25.0, 2500
    log = RequestLog(arrival, np.full(n, 32.0), np.full(n, 600.0), np.zeros(n, dtype=np.int64))
    found = make_plan(log, [parse_objective("ttft_p99=5000")], registered_tables(["h200-llama-3.1-8b"]), policies=())
    (plan,) = found.plans
    assert plan.n_replicas == 1
    assert plan.server_busy == pytest.approx(0.9, rel=0.02)
    assert any("The API server, not the GPU, bounds" in note for note in notes(found))
    calm = replace(found, plans=[replace(plan, server_busy=0.5)])
    assert not any("The API server" in note for note in notes(calm))


def test_no_setting_meets_the_objectives_on_fewer_gpus_than_the_plan_has() -> None:
    """Short prompts and long answers keep batches full: the fluid model ranks a batch first that is too small."""
    rng = np.random.default_rng(0)
    n = 2450
    arrival = np.cumsum(rng.exponential(1 / 24.5, n))
    log = RequestLog(arrival - arrival[0], np.full(n, 32.0), np.full(n, 600.0), np.zeros(n, dtype=np.int64))
    objectives = [parse_objective("ttft_p99=1000"), parse_objective("tpot_p50=53")]
    tables = registered_tables(["h100-qwen3-32b"])
    found = make_plan(log, objectives, tables, precisions=["FP8"])
    (plan,), (table,) = found.plans, tables.values()
    task = on_replicas(log_task(log, table), plan.n_replicas - 1)
    for setting in grid(prefill_apart=False, tiers=[table.tier_index("FP8")], drafts=False):
        factors = {quantity: error.p50 for quantity, error in plan.errors.items()}
        assert margin(objectives, play_constant(setting, task, table).figures, factors) < 0
    assert found.adapting_saves_gpus == 0


def test_a_verdict_takes_the_larger_ratio_of_runs_of_its_model_on_its_card() -> None:
    log, asked = gamma_log(1.0, 4.0, 400), [parse_objective("tpot_p50=60")]
    fleet = {"h100-qwen3-32b": load_tables(table_path("h100-qwen3-32b"))}
    (plan,) = make_plan(log, asked, fleet, precisions=["bf16"], policies=()).plans
    measured, n = model_ratios("qwen3-32b", "h100_sxm", plan.band)["tpot"]
    error = plan.errors["tpot"]
    assert measured > 1.5 > ratio("tpot", "h100_sxm", plan.band).p50
    assert (error.p50, error.of_model) == (measured, n)
    assert error.p90 >= measured
    assert plan.margin == pytest.approx(1 - plan.figures["tpot_p50_ms"] * measured / 60)


def test_a_plan_begins_with_the_smallest_fleet_that_meets_with_90_and_then_names_the_one_that_is_likely_enough() -> (
    None
):
    fleet = {"h100-llama-3.1-8b": load_tables(table_path("h100-llama-3.1-8b"))}
    limits = [parse_objective("ttft_p99=500"), parse_objective("tpot_p50=15")]
    found = make_plan(gamma_log(1.0, 5.0, 400), limits, fleet, policies=())
    (plan,) = found.plans
    assert (plan.verdict, plan.n_gpus) == ("likely", 1)
    (safe,) = found.certain
    assert found.recommended == safe
    assert safe.verdict == "meets with 90%"
    assert safe.n_gpus == min(p.n_gpus for p in found.tried if p.verdict == "meets with 90%")
    first, line = answer(found)
    meets = "at least 90% certain to meet TTFT p99 <= 500 ms and TPOT p50 <= 15 ms with llama-3.1-8b."
    assert first.startswith(f"Rent {safe.n_gpus} x h100 ({safe.precision}, ")
    assert first.endswith(meets)
    assert line.startswith(f"Likely enough (50 to 90% certain): 1 x h100 ({plan.precision}, ")
    ((top, below),) = plan_report(found).tables.values()
    assert (top["verdict"], below["verdict"]) == ("meets with 90%", "likely")
    # Growth is asked for the same certainty.
    for row in found.growth:
        assert row["n_gpus"] == safe.n_gpus
        assert row["gpus_needed"] is None or row["gpus_needed"] >= safe.n_gpus
    # Without that fleet, the figure that misses at the 90% bound is named.
    unsafe = replace(found, tried=[p for p in found.tried if p.verdict != "meets with 90%"], certain=[])
    nearest = min(p.figures["ttft_p99_ms"] * p.errors["ttft"].p90 for p in unsafe.tried if p.meets)
    likely, line = answer(unsafe)
    assert likely.startswith("Rent 1 x h100 (")
    assert "likely (50 to 90% certain) to meet TTFT p99 <= 500 ms" in likely
    assert line.startswith(f"No fleet tried (up to {max(p.n_gpus for p in unsafe.tried)} GPUs) is 90% certain: ")
    assert f"TTFT p99 {nearest:,.0f} ms" in line
    _, line = answer(replace(unsafe, tried=[plan]))
    assert "this one comes nearest" in line
    assert "wider" not in line
    # The bound is widest at the knee, where more GPUs may bring a replica.
    errors = {"ttft": ratio("ttft", "h100_sxm", "knee"), "tpot": ratio("tpot", "h100_sxm", "knee")}
    _, line = answer(replace(unsafe, tried=[plan, replace(plan, n_gpus=2, errors=errors)]))
    assert "it is wider at the load of more GPUs" in line


def test_a_plan_that_bounds_no_first_token_shows_how_long_it_takes() -> None:
    log, tables = gamma_log(1.0, 20.0, 400), registered_tables(["l40s-llama-3.1-8b"])
    found = make_plan(log, [parse_objective("tpot_p99=60")], tables, policies=())
    plan = found.recommended
    assert plan is not None
    ((row, *_),) = plan_report(found).tables.values()
    wait_ms = plan.figures["ttft_p99_ms"] * plan.errors["ttft"].p50
    assert row["TTFT p99 ms"] == wait_ms
    assert "in time" not in row
    assert any(f"TTFT p99 of this plan is {plain(wait_ms)} ms" in line for line in cautions(found))
    bounded = replace(found, objectives=[*found.objectives, "e2e_p99=60000"])
    assert not any("No objective bounds" in line for line in cautions(bounded))


def test_a_row_whose_latency_is_within_the_limit_says_why_it_is_not_met() -> None:
    tables = registered_tables(["a100-40gb"])
    found = make_plan(gamma_log(3.0, 8.0, 400), [parse_objective("ttft_p50=500")], tables, share_met=0.99, policies=())
    row = next(p for p in found.tried if p.margin >= 0 and not p.meets)
    ((cells,),) = plan_report(replace(found, plans=[], certain=[], unmet=[row])).tables.values()
    assert cells["verdict"] == f"not: {1 - row.share_in_time:.2%} late or refused"
    assert 0.01 < 1 - row.share_in_time < 0.5
