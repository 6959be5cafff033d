"""Plans: the fewest GPUs that meet objectives, the front of cost and requests in time, growth, adaptive policies."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from cli.main import main
from inferencegym.errors import DataFormatError, InvalidConfigError
from inferencegym.models import ServeAction
from inferencegym.tasks import table_index
from ops.capacity import least_for_90
from ops.export import EXPORTS, constant_drafts, engine_files
from ops.fidelity import model_ratios
from ops.log.reader import import_log
from ops.margins import LIKELY, NOT, WITH_90, ratio
from ops.objectives import parse_objective
from ops.plan import Plan, PlanReport, busiest, make_plan, monotone, pareto, registered_tables, smallest_fleet
from ops.prices import Prices, read_prices
from ops.report import cautions, notes, plan_figure, plan_report
from ops.shadow import shadow
from server.api.web import PAGE_DIR
from simulator.hardware.catalogue import cards_named, models, table_path, tables_named
from simulator.hardware.tables import load_tables
from simulator.load.recorded import save_trace
from simulator.load.requests import RequestLog
from tests.known_engine import table_file
from tests.ops.test_shadow import flood
from tests.servers import RunningServer

EXAMPLE = PAGE_DIR / "data" / "azure-conversation.csv"
A100 = ["a100-40gb", "a100-80gb"]
OBJECTIVES = [parse_objective("ttft_p99=500"), parse_objective("tpot_p50=50")]
LENIENT = [parse_objective("ttft_p99=2000"), parse_objective("tpot_p50=60")]
PRICES = Prices("USD", {"a100-40gb": 1.2, "a100-80gb": 1.8})


def log() -> RequestLog:
    return flood(90, 10, 60)


@pytest.fixture(scope="module")
def report() -> PlanReport:
    return make_plan(log(), OBJECTIVES, registered_tables(A100), prices=PRICES, precisions=["FP16"])


def share_of(plan: Plan, requests: RequestLog, n_gpus: int) -> float:
    """Share of requests in time with a plan's setting and error, from a shadow run."""
    assert plan.action is not None
    played = shadow(requests, [], fixed=ServeAction.from_dict(plan.action), n_gpus=n_gpus)
    return played.outcomes[0].share_in_time(plan.errors["ttft"].p50)


def test_a_plan_meets_its_objectives_with_the_errors_of_measured_runs(report: PlanReport) -> None:
    assert [plan.hardware for plan in report.plans] == ["a100-40gb", "a100-80gb"]
    for plan in report.tried:
        ttft, tpot = plan.figures["ttft_p99_ms"] / 500, plan.figures["tpot_p50_ms"] / 50
        own = model_ratios(report.model, plan.card, plan.band)
        errors = {name: ratio(name, plan.card, plan.band).at_least(own.get(name)) for name in ("ttft", "tpot")}
        assert plan.errors == errors
        assert plan.margin == pytest.approx(min(1 - ttft * errors["ttft"].p50, 1 - tpot * errors["tpot"].p50))
        at_90 = max(ttft * errors["ttft"].p90, tpot * errors["tpot"].p90)
        assert plan.verdict == (NOT if not plan.meets else WITH_90 if at_90 <= 1 else LIKELY)
    for plan in report.plans:
        assert plan.meets
        assert plan.margin >= 0
        assert plan.share_in_time >= 0.99
        assert plan.precision == "FP16"


def test_a_plan_is_what_shadow_plays_and_one_gpu_less_is_not_enough(report: PlanReport) -> None:
    plan = report.plans[0]
    assert plan.share_in_time == pytest.approx(share_of(plan, log(), plan.n_gpus))
    fewer = [p for p in report.tried if p.hardware == plan.hardware and p.n_gpus < plan.n_gpus]
    assert max(p.n_gpus for p in fewer) == plan.n_gpus - 1
    assert not any(p.meets for p in fewer)


def test_costs_are_gpus_times_price(report: PlanReport) -> None:
    for plan in report.plans:
        price = PRICES.per_gpu_hour[plan.hardware]
        assert plan.cost_per_hour == pytest.approx(plan.n_gpus * price)
        # GPUs for an hour write 3600 * tokens_per_s tokens.
        hours = plan.n_gpus / (3600 * plan.tokens_per_s) * 1e6
        assert plan.gpu_hours_per_million_tokens == pytest.approx(hours)
        assert plan.cost_per_million_tokens == pytest.approx(hours * price)
    costs = [plan.cost_per_hour for plan in report.plans]
    assert costs == sorted(costs, key=float)


def test_without_prices_nothing_costs_money() -> None:
    plans = make_plan(flood(30), OBJECTIVES, registered_tables(["a100-40gb"])).plans
    assert [(p.cost_per_hour, p.cost_per_million_tokens) for p in plans] == [(None, None)]


def test_a_handful_of_requests_is_no_ground_for_a_plan(report: PlanReport) -> None:
    rows = "".join(f"{second},200,50\n" for second in range(24))
    log = import_log("few.csv", content="arrival_s,prompt_tokens,output_tokens\n" + rows).log
    few = make_plan(log, OBJECTIVES, registered_tables(["a100-40gb"]))
    assert not few.tried  # nothing was played
    said = "No recommendation: the log has 24 requests. Use a log of at least 25."
    assert few.to_dict()["undecided"] == plan_report(few).lead == said
    assert not plan_report(few).tables
    assert report.to_dict()["undecided"] is None


def test_requests_that_all_arrive_at_once_are_no_ground_for_a_plan() -> None:
    n = 300
    log = RequestLog(np.zeros(n), np.full(n, 200.0), np.full(n, 50.0), np.zeros(n, dtype=np.int64))
    at_once = make_plan(log, OBJECTIVES, registered_tables(["a100-40gb"]))
    assert not at_once.tried
    said = "No recommendation: all 300 requests of the log arrive within one second"
    assert plan_report(at_once).lead.startswith(said)
    compared = shadow(log, [], n_gpus=1).undecided()
    assert compared is not None
    assert compared.startswith(said)


def test_a_percentile_is_90_certain_only_with_enough_requests_behind_it() -> None:
    # 0.99 ** 229 > 0.1 > 0.99 ** 230: of 230 requests, one is probably among the slowest 1%.
    assert [least_for_90(share) for share in (0.0, 0.9, 0.95, 0.99, 0.999)] == [25, 25, 45, 230, 2302]
    asked = [parse_objective("ttft_p99=5000")]
    rows = [f"{second},200,50\n" for second in range(230)]
    found = {}
    for n in (229, 230):
        log = import_log("few.csv", content="arrival_s,prompt_tokens,output_tokens\n" + "".join(rows[:n])).log
        found[n] = make_plan(log, asked, registered_tables(["a100-40gb"]), policies=())
    assert [len(each.certain) for each in found.values()] == [0, 1]
    assert found[229].plans[0].verdict == LIKELY
    assert plan_report(found[229]).lead.endswith("the p99 that takes at least 230 requests, and the log has 229.")


def test_nothing_tried_beats_a_point_of_the_front(report: PlanReport) -> None:
    for point in report.front:
        for other in report.tried:
            assert point.cost_per_hour is not None
            assert other.cost_per_hour is not None
            assert not (other.cost_per_hour < point.cost_per_hour and other.share_in_time > point.share_in_time)
    shares = [point.share_in_time for point in report.front]
    assert shares == sorted(shares)
    assert pareto([]) == []


def test_the_chart_shows_every_fleet_beside_the_objectives_with_axes_that_name_their_units(report: PlanReport) -> None:
    panels = plan_figure(report).axes
    assert [panel.get_ylabel() for panel in panels] == ["TTFT p99, ms", "TPOT p50, ms"]
    assert panels[-1].get_xlabel() == f"{report.currency} per million output tokens"
    bounded = (("ttft", "ttft_p99_ms", 500), ("tpot", "tpot_p50_ms", 50))
    for panel, (quantity, figure, limit_ms) in zip(panels, bounded, strict=True):
        points = [tuple(dots.get_offsets()[0]) for dots in panel.collections]
        assert points == [
            pytest.approx((plan.cost_per_million_tokens, plan.figures[figure] * plan.errors[quantity].p50))
            for plan in report.tried
        ]
        assert [text.get_text() for text in panel.texts] == [str(plan.n_gpus) for plan in report.tried]
        assert panel.lines[-1].get_ydata() == [limit_ms, limit_ms]
        filled = [len(dots.get_facecolor()) > 0 for dots in panel.collections]
        assert filled == [plan.meets for plan in report.tried]


def test_more_traffic_needs_more_gpus(report: PlanReport) -> None:
    plan = report.recommended
    assert plan is not None
    assert [row["traffic"] for row in report.growth] == [1.5, 2.0]
    needed = [plan.n_gpus, *(row["gpus_needed"] for row in report.growth)]
    assert needed == sorted(needed)
    assert needed[2] > needed[0]
    # Twice the traffic on as many GPUs, by hand.
    fast = replace(log(), arrival_s=log().arrival_s / 2)
    assert report.growth[1]["share_in_time"] == pytest.approx(share_of(plan, fast, plan.n_gpus))


def test_an_answer_never_says_that_more_traffic_needs_fewer_gpus(report: PlanReport) -> None:
    rows = [
        {"traffic": factor, "n_gpus": 4, "meets": needed == 4, "gpus_needed": needed}
        for factor, needed in ((1.5, 6), (2.0, 4), (3.0, None), (4.0, 8))
    ]
    growth = monotone(rows)
    assert [row["gpus_needed"] for row in growth] == [6, 6, None, None]
    said = cautions(replace(report, growth=growth[:2]))[0]
    assert said.startswith("1.5 or 2 times the traffic takes 6 GPUs with these settings")


def test_a_fleet_that_meets_with_90_is_found_beyond_twice_the_likely_one() -> None:
    asked = [parse_objective("ttft_p99=1000"), parse_objective("tpot_p50=25")]
    found = make_plan(import_log(EXAMPLE).log, asked, registered_tables(["a100-40gb"], "llama-3.1-8b"), policies=())
    (likely,), (certain,) = found.plans, found.certain
    assert 2 * likely.n_gpus < certain.n_gpus <= 4 * likely.n_gpus
    assert not [plan for plan in found.tried if plan.verdict == certain.verdict and plan.n_gpus < certain.n_gpus]


def test_a_certain_fleet_is_found_however_many_more_gpus_it_takes() -> None:
    asked = [parse_objective("ttft_p99=300"), parse_objective("tpot_p50=30")]
    found = make_plan(import_log(EXAMPLE).log, asked, registered_tables(["h100"], "llama-3.1-8b"), policies=())
    assert ([plan.n_gpus for plan in found.plans], [plan.n_gpus for plan in found.certain]) == ([1], [10])


def test_certainty_that_no_number_of_gpus_reaches_is_not_searched_for() -> None:
    asked = [parse_objective("ttft_p99=500"), parse_objective("tpot_p50=50")]
    found = make_plan(import_log(EXAMPLE).log, asked, registered_tables(["l40s"], "llama-3.1-8b"), policies=())
    assert found.certain == []
    assert max(plan.n_gpus for plan in found.tried) <= 4
    assert plan_report(found).lead.endswith("or test that fleet under your load before you rely on it.")


def test_adaptive_policies_keep_to_the_precision_and_to_the_gpus(report: PlanReport) -> None:
    assert {plan.policy for plan in report.adaptive} == {"heuristic", "hill_climb"}
    assert all(plan.n_gpus <= report.plans[0].n_gpus for plan in report.adaptive)
    saved = max((report.plans[0].n_gpus - p.n_gpus for p in report.adaptive if p.meets), default=0)
    assert report.adapting_saves_gpus == saved
    best = max(p.share_in_time for p in report.adaptive if p.n_gpus == report.plans[0].n_gpus - saved)
    constants = [p.share_in_time for p in report.tried if p.n_gpus == report.plans[0].n_gpus - saved]
    assert report.adapting_gain == (pytest.approx(best - max(constants), abs=0.02) if saved else 0.0)


def test_a_saving_that_chance_may_explain_is_said_to_be_none_to_count_on(report: PlanReport) -> None:
    known = replace(report, adapting_saves_gpus=1, adapting_noise=0.02)
    small, large = (replace(known, adapting_gain=gain) for gain in (0.01, 0.2))
    assert any("do not count on it" in note for note in notes(small))
    assert not any("do not count on it" in note for note in notes(large))


def test_other_precisions_leave_adaptive_policies_nothing_to_keep_to() -> None:
    assert make_plan(flood(30), OBJECTIVES, registered_tables(["a100-40gb"]), precisions=["INT8"]).adaptive == []


def test_the_highest_precision_that_is_enough_is_taken() -> None:
    calm = flood(60, 1.0, 1.0)
    assert make_plan(calm, OBJECTIVES, registered_tables(["a100-40gb"])).plans[0].precision == "FP16"
    tight = [parse_objective("ttft_p99=500"), parse_objective("tpot_p50=9")]
    asked = {"precisions": ["FP16", "INT8"], "drafts": True}
    (plan,) = make_plan(calm, tight, registered_tables(["a100-40gb"]), **asked).plans
    assert plan.figures["tpot_p50_ms"] < 9


def test_objectives_that_no_fleet_meets_have_no_plan() -> None:
    tables = registered_tables(["a100-40gb"])
    unmet = make_plan(flood(20), [parse_objective("tpot_p50=15")], tables, precisions=["FP16"])
    assert unmet.plans == unmet.certain == []
    assert unmet.recommended is None
    assert unmet.tried
    assert unmet.growth == []


def test_an_objective_that_a_lone_request_misses_is_refused_with_the_best_that_is_possible() -> None:
    tables = registered_tables(["a100-40gb", "b200_sxm"], "llama-3.1-8b")
    for limits in ("ttft_p99=1",), ("tpot_p50=1", "ttft_p99=500"), ("e2e_p99=10",):
        with pytest.raises(InvalidConfigError, match=r"<= \d+ ms is impossible: .* \(b200_sxm, \w+\)\. ") as refused:
            make_plan(flood(20), [parse_objective(text) for text in limits], tables)
        assert refused.value.field == "objective"
        assert str(refused.value).count("impossible") == 1
    # No fleet that is played, calm as it may be, is faster than what is named.
    calm = flood(240, 0.2, 0.2)
    with pytest.raises(InvalidConfigError, match="impossible") as refused:
        make_plan(calm, [parse_objective("tpot_p50=1")], tables)
    least = float(re.findall(r"already ([\d.]+) ms", str(refused.value))[0])
    played = make_plan(calm, [parse_objective("tpot_p50=60")], tables, policies=()).tried
    assert 0.5 * min(plan.figures["tpot_p50_ms"] for plan in played) <= least
    assert least <= min(plan.figures["tpot_p50_ms"] * plan.errors["tpot"].p50 for plan in played)


def test_fleets_are_sized_to_the_requests_that_some_table_takes_and_the_others_are_told() -> None:
    requests = log()
    prompts = requests.prompt_tokens.copy()
    prompts[::50] = 1_000_000
    too_long = (len(prompts) + 49) // 50
    found = make_plan(replace(requests, prompt_tokens=prompts), LENIENT, registered_tables(A100[:1]), policies=())
    assert found.plans[0].share_in_time > 1 - too_long / len(prompts)
    (line,) = plan_report(found).refused
    assert line.startswith(f"{A100[0]}: {too_long} of {len(prompts):,} requests")
    assert "are left out of the plan: they are longer than the model's context, 131,072 tokens" in line


def test_fleets_are_sized_to_the_requests_that_fit_and_nothing_is_planned_where_nearly_none_does() -> None:
    requests, tables = flood(20), registered_tables(["b200-qwen3-32b"])

    def with_long(share: float) -> RequestLog:
        prompts = requests.prompt_tokens.copy()
        prompts[: math.ceil(share * len(prompts))] = 100_000
        return replace(requests, prompt_tokens=prompts)

    half = make_plan(with_long(0.5), OBJECTIVES, tables, policies=())
    # Prompts of 100,000 tokens would take a fleet; engines refuse them, and what is left fits a GPU.
    assert half.plans[0].n_gpus == 1
    told = "longer than the model's context, 40,960 tokens; the longest needs 100,.*llama-3.1-8b"
    for refuse in (
        lambda log: make_plan(log, OBJECTIVES, tables),
        lambda log: shadow(log, [], tables=tables["b200-qwen3-32b"]),
    ):
        with pytest.raises(DataFormatError, match=told):
            refuse(with_long(0.95))


def test_a_log_that_fits_no_pool_names_the_tables_with_a_larger_one() -> None:
    requests, table = flood(20), registered_tables(["h100-qwen3-32b"])["h100-qwen3-32b"]
    long = replace(requests, prompt_tokens=np.full_like(requests.prompt_tokens, 35_000.0))
    # In BF16 one H100 holds 30,864 tokens; in FP8, and on two, it is several times as many.
    with pytest.raises(
        DataFormatError, match=r"longer than the KV pool, .*larger pool \(h100-qwen3-32b, h100-qwen3-32b-tp2, "
    ):
        make_plan(long, OBJECTIVES, {"mine": replace(table)}, precisions=["BF16"])


def test_requests_longer_than_the_models_context_are_left_out_and_told_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    requests = log()
    prompts = requests.prompt_tokens.copy()
    prompts[::50] = 45_000
    too_long = (len(prompts) + 49) // 50
    path = tmp_path / "log.npz"
    save_trace(path, replace(requests, prompt_tokens=prompts), {})
    asked = ["plan", "--trace", str(path), "--hardware", "b200-qwen3-32b", "--objective", "ttft_p95=20000"]
    assert main([*asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    # The pool holds 360,000 tokens: only the context of 40,960 refuses them.
    assert max(plan["share_in_time"] for plan in found["tried"]) == 1.0
    told = (
        f"{too_long} of {len(prompts):,} requests ({too_long / len(prompts):.1%}) are left out of the plan: they are "
        "longer than the model's context, 40,960 tokens"
    )
    assert found["refused"] == {"b200-qwen3-32b": told}
    assert main(asked) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed.index(f"b200-qwen3-32b: {told}.") == 1 + next(
        i for i, t in enumerate(printed) if "to meet TTFT p95" in t
    )


def test_the_busiest_part_of_a_log_has_the_most_tokens() -> None:
    arrival = np.array([0.0, 1.0, 100.0, 101.0, 102.0, 300.0])
    work = np.array([5.0, 5.0, 50.0, 50.0, 50.0, 100.0])
    whole = RequestLog(arrival, work, np.ones(6), np.zeros(6, dtype=np.int64))
    part = busiest(whole, 10.0, 100)
    assert (part.arrival_s.tolist(), part.prompt_tokens.tolist()) == ([0.0, 1.0, 2.0], [50.0, 50.0, 50.0])
    assert busiest(whole, 301.0, 6) is whole


def test_a_long_log_is_searched_at_its_busiest_and_played_whole() -> None:
    rng = np.random.default_rng(3)
    arrival = np.sort(np.concatenate([rng.random(1500) * 1500, 700 + rng.random(1500) * 60]))
    n = len(arrival)
    long = RequestLog(arrival - arrival[0], np.full(n, 300.0), np.full(n, 60.0), np.zeros(n, dtype=np.int64))
    found = make_plan(long, OBJECTIVES, registered_tables(["a100-40gb"]), precisions=["FP16"])
    assert found.searched_s < 900 < found.played_s
    plan = found.plans[0]
    assert plan.share_in_time == pytest.approx(share_of(plan, long, plan.n_gpus))


def test_the_share_in_time_allows_for_the_same_error_as_the_latencies() -> None:
    asked = [parse_objective("ttft_p99=250")]
    found = make_plan(import_log(EXAMPLE).log, asked, registered_tables(["a100-40gb"], "llama-3.1-8b"), policies=())
    hidden = [
        p for p in found.tried if p.figures["ttft_p99_ms"] <= 250 < p.figures["ttft_p99_ms"] * p.errors["ttft"].p50
    ]
    assert hidden
    assert all(plan.share_in_time < 0.99 for plan in hidden)


def test_wrong_input_is_refused() -> None:
    for asked, wrong in (
        (lambda: registered_tables(["h9000"]), "hardware"),
        (lambda: registered_tables(None, "gpt-9"), "model"),
        (lambda: registered_tables(["h100_sxm"]), "model"),
        (lambda: registered_tables(["l40s"], "qwen3-32b"), "model"),
        (lambda: make_plan(flood(20), [], registered_tables(A100)), "objective"),
        (lambda: make_plan(flood(20), OBJECTIVES, registered_tables(A100), precisions=["FP3"]), "quant"),
        (lambda: make_plan(flood(20), OBJECTIVES, registered_tables(A100), prices=Prices("USD", {})), "prices"),
    ):
        with pytest.raises(InvalidConfigError) as refused:
            asked()
        assert refused.value.field == wrong


def test_a_models_usual_spellings_are_one_model() -> None:
    llama = tables_named(None, "llama-3.1-8b")
    assert len({table_index()[name]["card"] for name in llama}) == len(llama) == 7
    for spelling in ("Llama-3-8B-Instruct", "meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Meta-Llama-3-8B"):
        assert tables_named(None, spelling) == llama
    assert tables_named(None, "openai/gpt-oss-120b") == tables_named(None, "gpt-oss-120b") != ()
    assert tables_named(None, "llama-3.3-70b") == tables_named(None, "llama-3.1-70b")


def test_hardware_is_named_by_table_or_by_card() -> None:
    cards = tables_named(["h200_sxm"], "llama-3.1-70b")
    assert cards == ("h200-llama-3.1-70b", "h200-llama-3.1-70b-tp2", "h200-llama-3.1-70b-tp4")
    assert tables_named(["h200-llama-3.1-70b-tp2", "a100-40gb"], "llama-3.1-70b") == ("h200-llama-3.1-70b-tp2",)
    assert tables_named(["a100-40gb"]) == ("a100-40gb",)
    every = {name for model in models() for name in tables_named(None, model)}
    assert every == set(table_index())


@pytest.fixture(scope="module")
def large() -> PlanReport:
    """A model that needs several cards a replica, with precisions of its own."""
    prices = Prices("USD", {"h200_sxm": 3.0, "h100_sxm": 2.0})
    return make_plan(flood(40), LENIENT, registered_tables(None, "llama-3.1-70b"), prices=prices, drafts=True)


def test_gpus_are_replicas_times_their_cards_and_as_many_again_for_prefill_apart(large: PlanReport) -> None:
    names = {plan.hardware for plan in large.tried}
    assert names == set(tables_named(["h100_sxm", "h200_sxm"], "llama-3.1-70b"))
    for plan in large.tried:
        entry = table_index()[plan.hardware]
        assert plan.action is not None
        assert (plan.card, plan.tensor_parallel) == (entry["card"], entry["cards_per_replica"])
        assert plan.n_gpus == plan.n_replicas * plan.tensor_parallel * (2 if plan.action["prefill_disagg"] else 1)
        assert plan.precision == entry["tiers"][plan.action["quant_tier"]]
        price = {"h200_sxm": 3.0, "h100_sxm": 2.0}[plan.card]
        assert plan.cost_per_hour == pytest.approx(plan.n_gpus * price)
    assert {plan.tensor_parallel for plan in large.tried} == {1, 2, 4}


def test_cards_without_a_price_are_left_out_and_named(large: PlanReport) -> None:
    assert large.left_out == {
        "b200-llama-3.1-70b": "no price for b200_sxm",
        "a100-llama-3.1-70b-tp4": "no price for a100_sxm",
    }
    assert any("b200-llama-3.1-70b (no price for b200_sxm)" in note for note in notes(large))


def test_a_plan_for_several_cards_is_exported_with_them(large: PlanReport) -> None:
    for plan in large.plans:
        files = engine_files(plan, load_tables(table_path(plan.hardware)), large)
        sized = plan.tensor_parallel > 1
        assert (f"tensor-parallel-size: {plan.tensor_parallel}" in files["vllm"]) == sized
        assert (f"tp-size: {plan.tensor_parallel}" in files["sglang"]) == sized


def test_tables_without_the_precision_are_left_out_and_what_the_catalogue_warns_of_is_told() -> None:
    tables = registered_tables(["b200_sxm", "h100_sxm"], "llama-3.1-8b")
    found = make_plan(flood(20), LENIENT, tables, precisions=["NVFP4"], policies=[])
    assert {plan.precision for plan in found.tried} == {"NVFP4"}
    assert found.left_out == {"h100-llama-3.1-8b": "it has BF16, FP8"}
    (warning,) = table_index()["b200-llama-3.1-8b"]["warnings"]
    assert f"b200-llama-3.1-8b: {warning}." in notes(found)
    assert found.plans[0].support["modelled"] == 1
    assert any(
        line.startswith("In 100% of the seconds a part of the kernel timings is modelled") for line in cautions(found)
    )
    assert any("NVFP4 changes the model's answers" in line for line in cautions(found))
    published = replace(found, plans=[replace(found.plans[0], precision="MXFP4")], certain=[])
    assert not any("changes the model's answers" in line for line in cautions(published))


def test_hardware_on_which_nothing_is_fast_enough_is_named() -> None:
    tables = registered_tables(["a100-40gb", "b200_sxm"], "llama-3.1-8b")
    found = make_plan(flood(20), [parse_objective("tpot_p50=3")], tables, policies=[])
    assert [(plan.hardware, plan.meets) for plan in found.unmet] == [("a100-40gb", False)]
    assert [plan.hardware for plan in found.plans] == ["b200-llama-3.1-8b"]
    # Even a lone request is too slow there: no larger fleet is played.
    assert len({plan.n_gpus for plan in found.tried if plan.hardware == "a100-40gb"}) == 1
    assert any("a100-40gb" in note and "meets the objectives" in note for note in notes(found))


def test_the_search_ends_where_more_gpus_hardly_help() -> None:
    """On an A100 a token takes 14 ms if a request is alone: 15 ms cannot be had by more cards where others run too."""
    tables = registered_tables(["a100-40gb"])
    found = make_plan(flood(60), [parse_objective("tpot_p50=15")], tables, precisions=["FP16"], policies=[])
    alone = make_plan(flood(60, 0.2, 0.2), [parse_objective("tpot_p50=15")], tables, precisions=["FP16"], policies=[])
    assert (found.plans, alone.plans) == ([], [])
    (most,) = found.unmet
    assert most.n_gpus <= 8
    assert any(f"({most.n_gpus} GPU" in note for note in notes(found))


@pytest.mark.parametrize(
    ("plans", "least"),
    [
        ({4: (0.5, -0.9), 8: (0.9, -0.5), 16: (1.0, 0.1), 12: (1.0, 0.02), 10: (0.98, -0.1), 11: (1.0, 0.0)}, 11),
        ({4: (0.990, -0.6), 8: (0.995, -0.2), 16: (0.997, -0.12)}, None),  # -12% and 8 points more
        ({4: (0.1, -9.0), 8: (0.2, -9.1), 16: (0.205, -9.1)}, None),
        ({4: (1.0, -0.2), 8: (1.0, 0.0), 6: (1.0, -0.1), 7: (1.0, -0.05)}, 8),
        ({4: (1.0, 0.5), 2: (0.9, 0.2), 3: (1.0, 0.3)}, 3),
    ],
)
def test_doubling_ends_where_as_much_again_would_not_do(
    report: PlanReport, plans: dict[int, tuple[float, float]], least: int | None
) -> None:
    played = []

    def play(n: int) -> Plan:
        played.append(n)
        share, margin = plans[n]
        return replace(report.plans[0], share_in_time=share, margin=margin, meets=share >= 0.99 and margin >= 0)

    assert smallest_fleet(play, 4, 64, 0.99) == least
    assert played == list(plans)


def test_settings_draft_only_if_asked() -> None:
    tables = registered_tables(["h100_sxm"], "llama-3.1-8b")
    # An objective for which drafts are worth trying.
    fast = [LENIENT[0], parse_objective("tpot_p50=6")]
    found = make_plan(flood(20), fast, tables, drafts=True, policies=[])
    without = make_plan(flood(20), fast, tables, policies=[])
    drafting = [plan for plan in found.tried if plan.action and plan.action["spec_length"]]
    assert {plan.action and plan.action["spec_length"] for plan in without.tried} == {0}
    assert any("EAGLE" in note for note in notes(replace(found, plans=drafting[:1])))
    assert not any("EAGLE" in note for note in notes(without))


def test_a_single_replica_is_warned_of_and_two_may_be_asked_for() -> None:
    tables = registered_tables(["h100"], "llama-3.1-8b")
    alone = make_plan(flood(60, 1, 1), LENIENT, tables, policies=[])
    assert [plan.n_replicas for plan in alone.plans] == [1]
    assert any("A single replica (h100-llama-3.1-8b) serves nothing" in note for note in notes(alone))
    safe = make_plan(flood(60, 1, 1), LENIENT, tables, policies=[], replicas_min=2)
    assert [plan.n_replicas for plan in safe.plans] == [2]
    assert not any("A single replica" in note for note in notes(safe))


def test_verdicts_are_those_of_the_router_that_is_named() -> None:
    tables = registered_tables(["h100"], "llama-3.1-8b")
    bursts = flood(120, 60, 3)
    shared, routed = (
        make_plan(bursts, LENIENT, tables, policies=[], replicas_min=2, router=router)
        for router in ("shared", "round-robin")
    )
    one, other = (next(plan for plan in each.tried if plan.n_replicas == 2).figures for each in (shared, routed))
    assert one["ttft_p99_ms"] != other["ttft_p99_ms"]
    assert any("share one queue" in note for note in notes(shared))
    assert any("routed round-robin" in note for note in notes(routed))


def long_prompts(rate_rps: float) -> RequestLog:
    """A minute of long prompts with short answers."""
    rng, n = np.random.default_rng(1), int(60 * rate_rps)
    return RequestLog(
        np.cumsum(rng.exponential(1 / rate_rps, n)),
        rng.integers(3000, 6000, n).astype(float),
        rng.integers(100, 300, n).astype(float),
        np.zeros(n, dtype=np.int64),
    )


def test_other_numbers_of_replicas_may_prefill_than_decode() -> None:
    objectives = [parse_objective("ttft_p90=800"), parse_objective("tpot_p99=13.2")]
    tables = registered_tables(["a100-80gb"], "llama-3.1-8b")
    report = make_plan(long_prompts(7), objectives, tables, precisions=["INT8"], policies=[])
    (plan,) = report.plans
    assert (plan.prefill_replicas, plan.n_replicas, plan.n_gpus) == (2, 4, 6)
    assert plan.action is not None
    assert plan.action["prefill_disagg"]
    assert "2 prefill : 4 decode" in str(plan_report(report).tables)
    assert "Start 4 instances for decode and 2 for prefill" in engine_files(plan, tables["a100-80gb"], report)["vllm"]
    assert report.autoscaling == []
    assert any("Autoscaling is not simulated" in note for note in notes(report))
    # Twice the traffic takes about as many more of both.
    assert report.growth[1]["gpus_needed"] in range(9, 14)
    # Prefill on the replicas themselves takes more.
    (own,) = make_plan(long_prompts(7), objectives, tables, precisions=["INT8"], policies=[], disagg=False).plans
    assert own.n_gpus > 6
    assert own.prefill_replicas == 0
    # Seven times the traffic takes at most seven times the GPUs.
    (large,) = make_plan(long_prompts(49), objectives, tables, precisions=["INT8"], policies=[]).plans
    assert 6 < large.n_gpus < 42
    assert large.is_uneven


def test_cards_and_prices_have_their_short_names() -> None:
    assert tables_named(["h100"], "llama-3.1-8b") == tables_named(["h100_sxm"], "llama-3.1-8b")
    assert tables_named(["a100"], "llama-3.1-8b") == ("a100-40gb", "a100-80gb")
    assert tables_named(["rtx-pro-6000"], "qwen3-32b") == ("rtx-pro-6000-qwen3-32b",)
    for spelling in ("H100", "H100-SXM", "h100_sxm5-80gb", "NVIDIA H100 80GB HBM3", "nvidia-h100-80gb", "H100-80G"):
        assert cards_named(spelling) == ("h100_sxm",), spelling
    assert tables_named(["NVIDIA A100-SXM4-80GB"], "llama-3.1-8b") == ("a100-80gb",)
    assert tables_named(["A100-40G"]) == ("a100-40gb",)
    assert cards_named("NVIDIA RTX PRO 6000 Blackwell Server Edition") == ("rtx_pro_6000_server",)
    # Other cards are not taken for these.
    for other in ("H100 PCIe", "H100 NVL", "A10", "H200 80GB", "GB200", "GPU"):
        assert cards_named(other) == (), other
    with pytest.raises(InvalidConfigError, match=r"hardware='H100 PCIe' is not in the catalogue: did you mean h100\?"):
        tables_named(["H100 PCIe"])
    with pytest.raises(InvalidConfigError, match=r"the price of h100 is given twice"):
        read_prices({"currency": "USD", "per_gpu_hour": {"h100": 2.5, "H100-SXM": 2.0}})
    assert read_prices({"currency": "USD", "per_gpu_hour": {"H100 SXM5": 2.5}}).gpu_hour("h100_sxm") == 2.5
    prices = Prices("USD", {"h100": 2.5, "a100": 1.0, "a100-80gb": 1.5})
    assert [prices.gpu_hour(card) for card in ("h100_sxm", "a100-40gb", "a100-80gb")] == [2.5, 1.0, 1.5]
    with pytest.raises(InvalidConfigError, match="no price for 'b200_sxm'"):
        prices.gpu_hour("b200_sxm")


def test_without_prices_gpus_of_different_hardware_are_not_compared(report: PlanReport) -> None:
    plan = report.plans[0]
    here = [replace(plan, n_gpus=n, share_in_time=share, cost_per_hour=None) for n, share in ((1, 0.5), (2, 0.9))]
    there = [replace(p, hardware="b200-llama-3.1-8b", share_in_time=p.share_in_time + 0.05) for p in here]
    assert sorted(pareto([*here, *there]), key=id) == sorted([*here, *there], key=id)
    priced = [replace(p, cost_per_hour=cost) for p, cost in zip([*here, *there], (1.0, 2.0, 1.0, 4.0), strict=True)]
    assert pareto(priced) == [priced[2], priced[1], priced[3]]


def test_the_plans_settings_are_exported(report: PlanReport) -> None:
    plan = report.plans[0]
    assert plan.action is not None
    files = engine_files(plan, load_tables(), report)
    assert f"max-num-seqs: {plan.action['batch_size']}" in files["vllm"]
    assert f"max-running-requests: {plan.action['batch_size']}" in files["sglang"]


def test_without_a_plan_the_export_says_that_it_wrote_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "few.csv"
    log.write_text("arrival_s,prompt_tokens,output_tokens\n0,200,50\n")
    options = ["plan", "--trace", str(log), "--objective", "ttft_p99=500", "--hardware", "a100-40gb"]
    assert main([*options, "--export", "vllm", "--export-file", str(tmp_path / "mine.yaml")]) == 1
    assert not (tmp_path / "mine.yaml").exists()
    assert "wrote no settings for vllm: No recommendation: the log has 1 request" in capsys.readouterr().err


def test_the_plans_drafts_are_exported_as_they_were_played(large: PlanReport) -> None:
    (plan,) = [p for p in large.tried if p.action and p.action["spec_length"] and p.tensor_parallel == 2][:1]
    assert plan.action is not None
    drafts, slots = plan.action["spec_length"], plan.action["batch_size"]
    assert constant_drafts(drafts, slots) == [(1, slots, drafts, "policy")]
    said = engine_files(plan, load_tables(table_path(plan.hardware)), large)["vllm"]
    assert f'"num_speculative_tokens": {drafts}' in said
    assert "per_batch_size" not in said


def test_the_command_prints_and_writes_its_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prices.json").write_text(json.dumps({"currency": "EUR", "per_gpu_hour": dict(PRICES.per_gpu_hour)}))
    outputs = [tmp_path / name for name in ("plan.html", "front.png", "tried.csv")]
    options = ["plan", "--trace", str(EXAMPLE), "--to-s", "60", "--objective", "ttft_p99=500", "--export", "vllm"]
    options += ["--export-file", str(tmp_path / "mine.yaml"), "--model", "meta-llama/Llama-3.1-8B"]
    options += [
        "--hardware",
        ",".join(A100),
        "--prices",
        str(tmp_path / "prices.json"),
        "--html",
        str(outputs[0]),
        "--png",
        str(outputs[1]),
    ]
    assert main([*options, "--out", str(outputs[2])]) == 0
    said = capsys.readouterr().out
    assert "EUR/h" in said
    assert "2 times the traffic" in said
    assert "max-num-seqs:" not in said
    exported = (tmp_path / "mine.yaml").read_text()
    assert "max-num-seqs:" in exported
    assert "vllm serve YOUR-INT8-CHECKPOINT-OF-Llama-3.1-8B --config mine.yaml" in exported
    assert "# Put your checkpoint (a repository or a path) in the place of YOUR-INT8-CHECKPOINT-OF-" in exported
    assert outputs[1].read_bytes().startswith(b"\x89PNG")
    assert {"hardware", "n_gpus", "share_in_time", "figures.ttft_p99_ms"} <= set(pd.read_csv(outputs[2]).columns)
    page = outputs[0].read_text()
    assert "prompt from prompt_tokens" in page
    assert page.count("<svg") == 1
    assert "<script" not in page
    command = [*options[:5], "--hardware", "a100-40gb", "--quant", "FP16", "--objective"]
    assert main([*command, "tpot_p50=15", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["plans"] == []
    assert main([*command, "tpot_p50=1"]) == 2
    assert "TPOT p50 <= 1 ms is impossible" in capsys.readouterr().err


def test_a_measured_engine_is_planned_with_by_its_table_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A prompt token takes 0.6 ms, so one replica is not enough but several are, and no card is searched."""
    table = table_file(tmp_path / "mine.parquet")
    command = ["plan", "--trace", str(EXAMPLE), "--to-s", "40", "--table", str(table), "--objective", "ttft_p99=9000"]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {plan["hardware"] for plan in found["tried"]} == {"mine"}
    assert found["model"] == "some-model"
    (plan,) = found["plans"]
    assert plan["n_gpus"] > 1
    assert plan["precision"] == "served"
    assert main([*command, "--hardware", "a100-40gb", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {plan["hardware"] for plan in found["plans"]} == {"mine", "a100-40gb"}
    assert main([*command, "--export", "vllm", "--export-file", "-"]) == 0
    exported = capsys.readouterr().out
    assert "max-num-seqs:" in exported
    assert "dtype" not in exported
    assert "quantization" not in exported
    assert main([*command[:-3], str(table), "--table", str(table), "--objective", "ttft_p99=9000"]) == 2
    assert "rename" in capsys.readouterr().err
    assert main([*command[:-3], str(tmp_path / "none.parquet"), "--objective", "ttft_p99=9000"]) == 2
    assert "none.parquet" in capsys.readouterr().err


def test_a_plan_over_http_is_that_of_the_library(server: RunningServer) -> None:
    prices = {"currency": "USD", "per_gpu_hour": dict(PRICES.per_gpu_hour)}
    objectives = [*OBJECTIVES, parse_objective("e2e_p99=60000")]
    body = {"log": EXAMPLE.read_text(), "objectives": [*map(str, objectives)], "prices": prices, "to_s": 60}
    body |= {"hardware": ["A100-40G", "a100-80gb"], "windows_met": 1, "disagg": False}
    answer = server.post("/plan", body)
    log = import_log(EXAMPLE, end_s=60).log
    report = make_plan(log, objectives, registered_tables(A100), prices=PRICES, windows_met=1.0, disagg=False).to_dict()
    same = ("plans", "certain", "recommended", "front", "tried", "growth", "adaptive")
    assert {name: answer[name] for name in same} == {name: report[name] for name in same}
    assert set(answer["export"]) == set(answer["export_likely"]) == set(EXPORTS)


@pytest.mark.parametrize(
    ("change", "code", "field"),
    [
        ({"objectives": []}, "invalid_request", "objectives"),
        ({"objectives": ["fast"]}, "invalid_request", "objectives[0]"),
        ({"hardware": ["h9000"]}, "invalid_request", "hardware[0]"),
        ({"share_met": 2}, "invalid_request", "share_met"),
        ({"windows_met": 0}, "invalid_request", "windows_met"),
        ({"hardware": ["h100_sxm"]}, "invalid_config", "model"),
        ({"model": "gpt-9"}, "invalid_config", "model"),
        ({"precisions": ["FP3"]}, "invalid_request", "precisions[0]"),
        ({"prices": {"currency": "USD", "per_gpu_hour": {}}}, "invalid_config", "prices"),
        ({"log": "a,b\n1,2\n"}, "data_format", None),
    ],
)
def test_a_mistake_over_http_is_named(server: RunningServer, change: dict[str, Any], code: str, field: str) -> None:
    log = "arrival_s,prompt_tokens,output_tokens\n0,100,10\n1,100,10\n"
    body = {"log": log, "objectives": ["ttft_p99=500"], "hardware": ["a100-40gb"], **change}
    answer = server.client.post("/plan", json=body)
    detail = answer.json()["detail"]
    assert (answer.status_code, detail["code"], detail.get("field")) == (422, code, field)


def test_a_bound_that_is_not_allowed_is_refused_in_the_words_of_bounds(server: RunningServer) -> None:
    body = {"log": "arrival_s,prompt_tokens,output_tokens\n0,100,10\n", "objectives": ["tpot_p50=50", "ttft_p99=0"]}
    said = server.client.post("/plan", json=body).json()["detail"]
    assert said["field"] == "objectives[1]"
    assert said["allowed"] == "a bound in ms, from 1 to 999,999, on one of ttft, tpot, itl, e2e, such as ttft_p99=500"


def test_a_plan_is_a_row_of_plain_numbers(report: PlanReport) -> None:
    assert all(isinstance(plan, Plan) for plan in report.tried)
    json.dumps(report.to_dict(), allow_nan=False)
