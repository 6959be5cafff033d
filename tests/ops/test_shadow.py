"""Shadow mode: every policy plays the same recorded log, the report adds up, exports use the engine's own options."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import yaml

from agents.policies.vllm_defaults import vllm_defaults
from agents.protocol import FloatArray
from cli.main import main
from cli.shadow import agent_names
from inferencegym.errors import DataFormatError, InvalidActionError, InvalidConfigError
from inferencegym.models import QuantTier, ServeAction
from inferencegym.tasks import get_task
from ops.capacity import DRAIN_S, PolicyOutcome, log_task, noise, on_replicas
from ops.export import draft_schedule, fastest_draft, settings_of, vllm_config
from ops.objectives import Objective, parse_objective
from ops.prices import load_prices, read_prices
from ops.report import shadow_figures, shadow_report, verdict, write_page
from ops.shadow import CONSTANT, FIXED, OWN_PRECISION, ShadowReport, shadow
from simulator.events.fleet import Fleet
from simulator.events.requests import Requests
from simulator.events.simulation import serve
from simulator.hardware.catalogue import table_path
from simulator.hardware.sources import operators_of
from simulator.hardware.tables import load_tables, tables_of
from simulator.load.requests import RequestLog
from simulator.workload import load_source


def flood(seconds: int = 120, calm: float = 2.0, busy: float = 14.0, classes: bool = False) -> RequestLog:
    """A quiet log with a flood in its middle third."""
    rng = np.random.default_rng(7)
    rates = np.where((np.arange(seconds) >= seconds // 3) & (np.arange(seconds) < 2 * seconds // 3), busy, calm)
    counts = rng.poisson(rates)
    counts[0] = max(1, counts[0])
    arrival = np.sort(np.repeat(np.arange(seconds), counts) + rng.random(counts.sum()))
    n = len(arrival)
    kinds = rng.integers(0, 2, n) if classes else np.zeros(n, dtype=np.int64)
    return RequestLog(
        arrival - arrival[0],
        np.rint(rng.lognormal(6.0, 0.6, n)) + 1,
        np.rint(rng.lognormal(4.8, 0.6, n)) + 1,
        kinds.astype(np.int64),
    )


def test_a_fleet_sized_to_a_log_serves_it_in_time_and_a_smaller_one_says_how_many_gpus_would() -> None:
    log = flood(busy=60.0)
    sized = shadow(log, [])
    assert sized.n_gpus > 1
    assert sized.outcomes[1].slo_miss_share <= 0.01
    assert sized.short == ""
    small = shadow(log, [], n_gpus=1)
    assert small.outcomes[1].slo_miss_share > 0.01
    assert small.short.startswith("Even with the best constant setting, fewer than 99% of the requests get their first")
    assert small.short.endswith(f"within 500 ms on 1 x a100-40gb: about {sized.n_gpus} GPUs would do")


def test_an_objective_that_no_number_of_gpus_meets_is_said_to_be_one() -> None:
    report = shadow(flood(), [], objectives=[Objective("ttft", "p99", 1.0)])
    assert report.short.endswith("more GPUs would not help")


def test_the_percentile_of_ttft_sizes_the_fleet_and_other_objectives_are_checked() -> None:
    log = flood(60, 8.0, 30.0)
    strict, lax = (shadow(log, [], objectives=[parse_objective(f"ttft_{p}=500")]) for p in ("p99", "p50"))
    assert lax.n_gpus < strict.n_gpus
    both = shadow(log, [], n_gpus=2, objectives=[parse_objective("tpot_p50=1"), parse_objective("ttft_p99=500")])
    assert (both.slo_ms, list(map(str, both.objectives))) == (500.0, ["ttft_p99=500", "tpot_p50=1"])
    best = both.best()
    pace = f"TPOT p50 {best.figures['tpot_p50_ms']:,.0f} ms (of 1)"
    assert pace in both.misses(best)
    assert pace in "".join(shadow_report(both, load_tables()).refused)


def test_a_log_that_is_too_long_is_refused_with_its_busiest_hour() -> None:
    arrival = np.concatenate([np.arange(0, 20_000, 10.0), np.arange(9_000, 10_000, 1.0)])
    log = RequestLog(
        np.sort(arrival), *(np.full(len(arrival), 100.0) for _ in range(2)), np.zeros(len(arrival), np.int64)
    )
    with pytest.raises(DataFormatError, match=r"its busiest hour, from second (\d+) to") as refused:
        log_task(log, tables_of(None))
    begin = int(str(refused.value).rpartition(" to ")[2]) - 3600
    assert 10_000 - 3600 <= begin <= 9_000


SMALL = ServeAction(1.0, 0, 16, False, QuantTier.FP16)


@pytest.fixture(scope="module")
def report() -> ShadowReport:
    return shadow(
        flood(),
        ["heuristic", 'constant:{"batch_size": 128, "spec_length": 2, "quant_tier": 1}'],
        fixed=SMALL,
        n_gpus=1,
    )


def of(report: ShadowReport, policy: str) -> PolicyOutcome:
    """The outcome of a policy."""
    return next(o for o in report.outcomes if o.policy == policy)


def test_the_best_constant_in_ones_own_precision_has_a_row_if_the_best_has_another(report: ShadowReport) -> None:
    tables = load_tables()
    best, own = of(report, CONSTANT).action, of(report, OWN_PRECISION).action
    assert best is not None
    assert own is not None
    assert (own["quant_tier"], best["quant_tier"] > 0) == (0, True)
    assert f"{OWN_PRECISION}: FP16, batch {own['batch_size']}, KV" in "\n".join(shadow_report(report, tables).lines)
    same = shadow(flood(), [], fixed=replace(SMALL, quant_tier=QuantTier(best["quant_tier"])), n_gpus=1)
    assert [o.policy for o in same.outcomes] == [FIXED, CONSTANT]
    assert same.outcomes[1].action == best
    assert of(report, OWN_PRECISION).slo_miss_share <= report.outcomes[0].slo_miss_share
    assert settings_of(report, tables, OWN_PRECISION).tier == "FP16"


def test_the_users_own_setting_may_be_the_best_constant() -> None:
    """In an overload settings of the sweep serve as few in time, and wait longer."""
    own = ServeAction(0.95, 0, 256, False, QuantTier.FP16)
    fixed, constant = shadow(flood(60, busy=40.0), [], fixed=own, n_gpus=1).outcomes
    assert constant.action == own.to_dict()
    assert replace(constant, policy=FIXED) == fixed


def test_nothing_drafts_tokens_unless_asked_except_constants_that_are_named() -> None:
    """One request at a time: there the sweep takes drafts if it may."""
    named, hard = 'constant:{"spec_length": 2}', [Objective("ttft", "p99", 100.0)]
    without, drafting = (
        shadow(flood(120, 2.0, 2.0), ["heuristic", named], n_gpus=1, objectives=hard, drafts=drafts)
        for drafts in (False, True)
    )
    spec = {o.policy: set(o.timeline["spec_length"]) for o in without.outcomes}
    assert spec == {FIXED: {0.0}, CONSTANT: {0.0}, OWN_PRECISION: {0.0}, "heuristic": {0.0}, named: {2.0}}
    assert max(of(drafting, "heuristic").timeline["spec_length"]) > 0
    assert settings_of(without, load_tables(), "heuristic").drafts == []


def test_every_policy_meets_the_same_requests_and_none_gets_lost(report: ShadowReport) -> None:
    arrived = report.log["requests"]
    for outcome in report.outcomes:
        assert outcome.completed + outcome.rejected + outcome.unserved == pytest.approx(arrived, abs=1e-6)
        assert 0.0 <= outcome.slo_miss_share <= 1.0
        assert outcome.ttft_p50_ms <= outcome.ttft_p90_ms <= outcome.ttft_p99_ms
        assert sum(outcome.support.values()) == pytest.approx(1.0)


def test_the_users_own_configuration_comes_first_and_then_the_best_constant(report: ShadowReport) -> None:
    assert [o.policy for o in report.outcomes][:4] == [FIXED, CONSTANT, OWN_PRECISION, "heuristic"]
    assert report.fixed_action == SMALL.to_dict()
    assert set(report.outcomes[0].timeline["batch_size"]) == {16.0}


def test_a_replay_is_the_same_every_time_and_does_not_depend_on_company(report: ShadowReport) -> None:
    alone = shadow(flood(), ["heuristic"], fixed=SMALL, n_gpus=1)
    assert of(alone, "heuristic") == of(report, "heuristic")


def test_percentiles_are_those_of_the_discrete_event_reference(report: ShadowReport) -> None:
    log, tables = flood(), load_tables()
    fleet = Fleet(operators_of(tables)[0], SMALL.batch_size, tables.kv_pool_tokens(0, 1.0, False), queue_limit=512)
    served = serve(fleet, Requests(log.arrival_s, log.prompt_tokens.astype(int), log.output_tokens.astype(int)))
    fixed = report.outcomes[0]
    assert fixed.rejected == served.rejected.sum()
    for name, q in (("p50", 0.5), ("p90", 0.9), ("p95", 0.95), ("p99", 0.99)):
        assert fixed.figures[f"ttft_{name}_ms"] == pytest.approx(np.nanquantile(served.ttft_ms(), q))
        assert fixed.figures[f"tpot_{name}_ms"] == pytest.approx(np.nanquantile(served.tpot_ms(), q))
    assert fixed.slo_miss_share == pytest.approx(1.0 - (served.ttft_ms() <= report.slo_ms).mean())


def test_more_slots_miss_fewer_objectives_in_a_flood() -> None:
    small, *_, large = shadow(flood(), ['constant:{"batch_size": 128}'], fixed=SMALL, n_gpus=1).outcomes
    assert large.slo_miss_share < 0.5 * small.slo_miss_share
    assert large.goodput_rps > small.goodput_rps


def test_every_policy_has_the_same_gpus_and_prefill_apart_takes_half_of_them() -> None:
    log = flood(30)
    apart = ServeAction(1.0, 0, 32, True, QuantTier.FP16)
    outcomes = shadow(log, ['constant:{"prefill_disagg": true}', "naive"], fixed=apart, n_gpus=4).outcomes
    seconds = int(np.ceil(log.arrival_s[-1] + 1e-9)) + DRAIN_S
    assert {o.gpu_seconds for o in outcomes} == {4.0 * seconds}
    assert {o.n_gpus for o in outcomes} == {4}
    assert (outcomes[0].n_replicas, outcomes[-1].n_replicas) == (2, 4)


def test_a_policy_that_may_not_spread_keeps_prefill_together() -> None:
    outcomes = shadow(flood(30), ['constant:{"prefill_disagg": true}'], n_gpus=1).outcomes
    assert set(outcomes[-1].timeline["prefill_disagg"]) == {0.0}
    assert outcomes[-1].n_gpus == 1
    with pytest.raises(InvalidConfigError) as refused:
        shadow(flood(30), [], fixed=ServeAction(1.0, 0, 32, True, QuantTier.FP16), n_gpus=1)
    assert refused.value.field == "n_gpus"


def test_the_best_constant_is_no_worse_than_any_constant_of_the_sweep(report: ShadowReport) -> None:
    best = report.outcomes[1]
    assert best.action is not None
    again = shadow(flood(), [f"constant:{json.dumps(best.action)}"], fixed=SMALL, n_gpus=1)
    assert again.outcomes[-1].slo_miss_share == best.slo_miss_share
    for tried in ('{"batch_size": 64, "kv_budget": 1.0, "quant_tier": 2}', '{"batch_size": 32, "quant_tier": 1}'):
        other = shadow(flood(), [f"constant:{tried}"], fixed=SMALL, n_gpus=1).outcomes[-1]
        assert best.slo_miss_share <= other.slo_miss_share + 1e-9


def test_only_a_gain_that_chance_does_not_explain_is_recommended(report: ShadowReport) -> None:
    # Two standard errors of a difference of 0.2 and 1.3% of the requests, by hand.
    assert noise(0.002, 0.013, 1000) == pytest.approx(2 * (0.001996e-3 + 0.012831e-3) ** 0.5)
    fixed, constant, own, policy, *_ = report.outcomes
    perfect, few, many = (replace(policy, slo_miss_share=share) for share in (0.0, 0.002, 0.013))
    asked = replace(report, log={**report.log, "requests": 1000})
    assert replace(asked, outcomes=[fixed, many, few]).best() is few
    assert replace(asked, outcomes=[many, few]).best() is few
    assert replace(asked, outcomes=[fixed, few, perfect]).best() is few
    assert replace(asked, outcomes=[few, perfect]).best() is few
    hundred = {**report.log, "requests": 100}
    assert replace(asked, log=hundred, outcomes=[many, few]).best() is many
    assert not report.clear(constant, constant)
    # In their own precision, if no other is clearly better.
    own_few, own_many = (replace(own, slo_miss_share=share) for share in (0.002, 0.013))
    assert replace(asked, outcomes=[replace(fixed, slo_miss_share=0.2), perfect, own_few]).best() is own_few
    assert replace(asked, outcomes=[replace(fixed, slo_miss_share=0.2), perfect, own_many]).best() is perfect


def test_the_recommendation_says_what_it_changes_how_sure_it_is_and_why_nothing_else_is_recommended(
    report: ShadowReport,
) -> None:
    tables = load_tables()
    asked = replace(report, log={**report.log, "requests": 1000})
    fixed, constant, own, *_ = report.outcomes
    assert constant.action is not None
    tier = tables.tiers[constant.action["quant_tier"]]
    bad, good = (replace(o, slo_miss_share=s) for o, s in ((fixed, 0.2), (constant, 0.0)))
    first, sure, kept = verdict(replace(asked, outcomes=[bad, good, replace(own, slo_miss_share=0.2)]), tables)
    changed = (
        r", batch \d+, KV [\d.]+ \(not FP16: this changes the model's answers\): 0\.0% of the requests get their first "
    )
    assert re.match(f"Set {tier}{changed}token after 500 ms, against 20\\.0% with your configuration\\.$", first)
    # Two standard errors of 0.2 of 1,000 requests: 2 * (0.2 * 0.8 / 1000) ** 0.5 = 2.5 points.
    assert sure == "The difference is real, not noise: 95% interval 17.5% to 22.5%."
    assert kept == "If FP16 must stay, keep your configuration: nothing is clearly better."
    level = [replace(fixed, slo_miss_share=0.02), replace(constant, slo_miss_share=0.018)]
    first, alternative = verdict(replace(asked, outcomes=level), tables)
    assert first.startswith("Keep your configuration (FP16, batch ")
    assert alternative.startswith(f"The alternative is the best constant ({tier}, batch ")
    assert "1.8% late, which may be noise (95% interval of the difference -1.0% to 1.4%)" in alternative
    assert alternative.endswith(f"; but {tier} changes the model's answers.")
    fine = [replace(fixed, slo_miss_share=0.0), replace(constant, slo_miss_share=0.0)]
    first, nothing = verdict(replace(asked, outcomes=fine), tables)
    assert first.endswith(": all requests get their first token within 500 ms.")
    assert nothing == "This meets the objective, and no setting tried has clearly fewer late."


def test_another_precision_is_recommended_only_if_none_in_ones_own_meets_the_objective(report: ShadowReport) -> None:
    tables = load_tables()
    asked = replace(report, log={**report.log, "requests": 100_000})
    fixed, constant, own, policy, *_ = report.outcomes
    tier = tables.tiers[constant.action["quant_tier"]] if constant.action else ""

    def late(outcome: PolicyOutcome, share: float) -> PolicyOutcome:
        return replace(outcome, slo_miss_share=share)

    best, spare = late(constant, 0.0), late(own, 0.005)
    assert replace(asked, outcomes=[late(fixed, 0.2), best, late(own, 0.011)]).best() is best
    assert replace(asked, outcomes=[late(fixed, 0.2), best, spare]).best() is spare
    adaptive = replace(late(policy, 0.001), timeline={**policy.timeline, "quant_tier": [1.0]})
    held = replace(adaptive, timeline={**policy.timeline, "quant_tier": [0.0]})
    assert replace(asked, outcomes=[late(fixed, 0.2), best, spare, adaptive]).best() is spare
    assert replace(asked, outcomes=[late(fixed, 0.2), best, spare, held]).best() is held
    kept = replace(asked, outcomes=[late(fixed, 0.009), best, late(own, 0.009)])
    first, gain = verdict(kept, tables)
    assert first.startswith("Keep your configuration (FP16, ")
    assert gain.startswith(f"The best constant ({tier}, batch ")
    answers = f"{tier} changes the model's answers, and FP16 meets the objective without that."
    assert gain.endswith(f") has 0.0% late, but {answers}")
    assert verdict(replace(kept, outcomes=[late(fixed, 0.2), best, spare]), tables)[-1] == gain
    # Another objective that is missed counts, too.
    strict = replace(asked, objectives=(*asked.objectives, Objective("tpot", "p50", 1e-3)))
    assert replace(strict, outcomes=[late(fixed, 0.2), best, spare]).best() is best


def test_nothing_is_recommended_where_nobody_serves_the_log_or_a_single_request_decides(report: ShadowReport) -> None:
    assert report.undecided() is None
    lost = [replace(o, slo_miss_share=0.96) for o in report.outcomes]
    assert "no policy serves more than 4%" in verdict(replace(report, outcomes=lost), load_tables())[0]
    few = replace(report, log={**report.log, "requests": 24})
    assert "Use a log of at least 25" in few.to_dict()["undecided"]
    assert replace(report, log={**report.log, "requests": 25}).undecided() is None


def test_costs_are_gpu_hours_times_the_users_price(tmp_path: Path) -> None:
    prices = {"currency": "EUR", "per_gpu_hour": {"a100-40gb": 3.6}, "source": "a quote", "date": "2025-01-01"}
    (tmp_path / "prices.json").write_text(json.dumps(prices))
    priced = shadow(flood(30), [], n_gpus=2, prices=load_prices(tmp_path / "prices.json"))
    # 3.6 an hour are 0.001 a second.
    assert priced.to_dict()["cost"][FIXED] == pytest.approx(0.001 * priced.outcomes[0].gpu_seconds)
    assert priced.currency == "EUR"
    with pytest.raises(InvalidConfigError) as refused:
        shadow(flood(30), [], n_gpus=1, prices=read_prices({"currency": "EUR", "per_gpu_hour": {"h100": 2}}))
    assert refused.value.field == "prices"
    for wrong in ({"currency": "EUR"}, {"currency": "EUR", "per_gpu_hour": {"x": -1}}, []):
        with pytest.raises(InvalidConfigError):
            read_prices(wrong)


def test_restarts_are_counted() -> None:
    class Flipper:
        """Changes precision once, at step 20."""

        def reset(self, n_rows: int) -> None:
            self._step = 0

        def act(self, observation: FloatArray) -> FloatArray:
            self._step += 1
            return np.array([[1.0, 0, 32, 0, 1.0 if self._step > 20 else 0.0]])

    outcomes = shadow(flood(30), [Flipper()], n_gpus=1).outcomes
    assert {o.policy: o.restarts for o in outcomes} == {FIXED: 0, CONSTANT: 0, OWN_PRECISION: 0, "Flipper": 1}


def test_classes_are_judged_by_the_objectives_of_a_task() -> None:
    task = get_task(3)
    outcome = shadow(flood(40, classes=True), [], task=task).outcomes[0]
    assert list(outcome.slo_miss_by_class) == ["interactive", "batch"]


def test_on_the_fleet_of_a_task_that_scales_settings_keep_its_replicas_and_autoscalers_do_not() -> None:
    task = get_task("autoscale")
    found = shadow(flood(40), ["hpa"], task=task)
    fixed, constant, *_, hpa = found.outcomes
    assert {*fixed.timeline["replicas"]} == {*constant.timeline["replicas"]} == {float(task.fleet.n_replicas)}
    assert min(hpa.timeline["replicas"]) < task.fleet.n_replicas
    assert hpa.gpu_seconds < fixed.gpu_seconds == found.n_gpus * (40 + DRAIN_S)


def test_a_log_is_the_load_source_of_fleets_of_any_size_and_is_played_once() -> None:
    log, tables = flood(30), load_tables()
    task = log_task(log, tables)
    source = load_source(task, tables)
    assert load_source(on_replicas(task, 7), tables) is source
    # Every second of the log from its first on, then silence, whatever the seed.
    drawn = source.draw([0, 9], task.episode_length)
    arrivals = np.bincount(log.arrival_s.astype(int), minlength=task.episode_length)
    assert drawn.arrivals.shape == (2, task.episode_length, 1)
    assert (drawn.arrivals[..., 0] == arrivals).all()
    assert arrivals[-DRAIN_S:].sum() == 0


def test_the_fleet_is_sized_to_the_log_unless_told() -> None:
    small, large = (shadow(flood(30, rate, rate), []).n_gpus for rate in (2.0, 60.0))
    assert small == 1
    assert large > 3


def test_wrong_input_is_refused() -> None:
    log = flood(30)
    for wrong in ("nobody", "random:x"):
        with pytest.raises(InvalidConfigError, match=wrong) as refused:
            shadow(log, [wrong], n_gpus=1)
        assert not hasattr(refused.value, "__notes__")
    with pytest.raises(InvalidConfigError, match="fixed number of replicas") as refused:
        shadow(log, ["hpa"], n_gpus=1)
    assert refused.value.__notes__ == ["hpa and planner are compared without being named"]
    with pytest.raises(InvalidConfigError, match="no PPO policy") as refused:
        shadow(log, ["ppo"], n_gpus=1)
    assert refused.value.__notes__ == ["a stored policy belongs to a task: name it with --task"]
    with pytest.raises(InvalidActionError) as refused:
        shadow(log, [], fixed=ServeAction(1.0, 0, 0, False, QuantTier.FP16))
    assert refused.value.field == "batch_size"
    for none in ("ttft_mean=500", "tpot_p50=50"):
        with pytest.raises(InvalidConfigError, match="have no percentile of TTFT"):
            shadow(log, [], objectives=[parse_objective(none)], n_gpus=1)
    with pytest.raises(InvalidConfigError, match="have more than one percentile of TTFT") as refused:
        shadow(log, [], objectives=[parse_objective("ttft_p99=500"), parse_objective("ttft_p50=50")], n_gpus=1)
    assert refused.value.field == "objective"
    with pytest.raises(InvalidConfigError) as refused:
        shadow(log, [], n_gpus=0)
    assert refused.value.field == "n_gpus"
    week = RequestLog(np.array([0.0, 6e5]), np.array([9.0, 9.0]), np.array([9.0, 9.0]), np.zeros(2, dtype=np.int64))
    with pytest.raises(DataFormatError):
        shadow(week, [], n_gpus=1)


def test_the_report_is_json(report: ShadowReport) -> None:
    again = json.loads(json.dumps(report.to_dict()))
    assert again["best"] == report.best().policy
    assert len(again["outcomes"][0]["timeline"]["t_s"]) == len(again["arrivals_per_s"]) <= 600


# ---------------------------------------------------------------- the engine's terms


def test_the_vllm_export_is_a_config_file_with_the_policys_settings(report: ShadowReport) -> None:
    policy = report.outcomes[-1].policy
    config = yaml.safe_load(vllm_config(settings_of(report, load_tables(), policy), draft_model="my/eagle"))
    assert config["max-num-seqs"] == 128
    assert config["quantization"] == "compressed-tensors"
    assert 0.9 < config["gpu-memory-utilization"] <= 0.98
    speculative = json.loads(config["speculative-config"])
    assert (speculative["method"], speculative["model"]) == ("eagle", "my/eagle")
    ranges = speculative["num_speculative_tokens_per_batch_size"]
    assert speculative["num_speculative_tokens"] == max(k for _, _, k in ranges)
    assert (ranges[0][0], ranges[-1][1]) == (1, 128)


def test_a_policy_without_drafting_exports_no_speculation(report: ShadowReport) -> None:
    config = yaml.safe_load(vllm_config(settings_of(report, load_tables(), FIXED)))
    assert config == {
        "max-num-seqs": 16,
        "gpu-memory-utilization": pytest.approx(0.94, abs=0.01),
        "max-num-batched-tokens": 2048,
        "max-model-len": "auto",
        "dtype": "float16",
    }


def test_the_draft_schedule_covers_every_batch_size_once_and_follows_the_policy() -> None:
    running = np.array([2.0] * 50 + [100.0] * 50)
    drafted = np.array([4.0] * 50 + [0.0] * 50)
    drafts = draft_schedule(drafted, running, load_tables(), 0, 512.0, max_num_seqs=200)
    assert (drafts[0][0], drafts[-1][1]) == (1, 200)
    assert all(before[1] + 1 == after[0] for before, after in itertools.pairwise(drafts))
    assert {n: next(k for low, high, k, _ in drafts if low <= n <= high) for n in (2, 100)} == {2: 4, 100: 0}
    assert {source for *_, source in drafts} == {"policy", "table"}


def test_drafting_that_pays_at_one_request_is_found_in_the_table() -> None:
    tables = load_tables()
    per_token = tables.decode_ms[0, :, 0, 3] / tables.spec_tokens
    assert fastest_draft(tables, 0, 1.0, 512.0) == int(tables.axes["spec_length"][per_token.argmin()])


def test_an_unknown_policy_cannot_be_exported(report: ShadowReport) -> None:
    with pytest.raises(InvalidConfigError, match="nobody"):
        settings_of(report, load_tables(), "nobody")


# ---------------------------------------------------------------- the page and the command


class Links(HTMLParser):
    """All addresses that a browser would fetch, and duplicate ids."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("src", "href", "xlink:href") and value and not value.startswith("#"):
                self.fetched.append(value)
            if name == "id" and value:
                self.ids.append(value)


def test_where_nothing_is_answered_a_report_states_no_latency_and_no_cost_per_token() -> None:
    log, tables = flood(20), load_tables()
    too_long = replace(log, prompt_tokens=np.full_like(log.prompt_tokens, 900_000.0))
    rows = shadow_report(shadow(too_long, [], n_gpus=1), tables).tables["what each policy would have done"]
    for name in ("TTFT p50", "p90", "p99 ms", "TPOT ms", "GPU-s/1k tokens"):
        assert [row[name] for row in rows] == [None, None], name
    answered = shadow_report(shadow(log, [], n_gpus=1), tables).tables["what each policy would have done"]
    assert all(row["GPU-s/1k tokens"] is not None for row in answered)


def test_a_report_names_settings_in_words_and_the_table_by_its_hardware() -> None:
    fixed = {"batch_size": 64, "quant_tier": "INT8", "kv_budget": 0.912345, "spec_length": 2, "prefill_disagg": True}
    report = shadow(flood(20), [], fixed=fixed, n_gpus=2)
    lines = shadow_report(report, load_tables()).lines
    assert lines[0] == "fixed: INT8, batch 64, 2 drafts, KV 0.912, separate prefill"
    assert lines[-2].startswith("Simulated: llama-3.1-8b on a100-40gb, table ")


def test_the_page_is_whole_by_itself(report: ShadowReport, tmp_path: Path) -> None:
    figures, files = shadow_figures(report, load_tables().tiers), {"vLLM": "a: 1 # <b>"}
    told, read = shadow_report(report, load_tables()), ["3 left out (<failed>)"]
    path = write_page(tmp_path / "r.html", 'my <log> & "more"', read, told, figures, files)
    page = path.read_text()
    links = Links()
    links.feed(page)
    assert links.fetched == []
    assert len(links.ids) == len(set(links.ids))
    assert "<script" not in page
    assert "my &lt;log&gt; &amp; &quot;more&quot;" in page
    assert page.count("<svg") == 2
    assert "<li>3 left out (&lt;failed&gt;)</li>" in page
    assert "<pre>a: 1 # &lt;b&gt;</pre>" in page
    for outcome in report.outcomes:
        assert outcome.policy.replace('"', "&quot;") in page


def test_the_command_writes_page_and_export_and_prints_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [
        f"{a:.3f},{int(p)},{int(o)}"
        for a, p, o in zip(
            *(getattr(flood(30), c).tolist() for c in ("arrival_s", "prompt_tokens", "output_tokens")), strict=True
        )
    ]
    (tmp_path / "log.csv").write_text("arrival_s,prompt_tokens,output_tokens\n" + "\n".join(rows) + "\n")
    options = ["--agent", 'heuristic,constant:{"batch_size": 64, "quant_tier": 1}', "--gpus", "1"]
    assert main(["shadow", "--trace", "log.csv", *options, "--html", "r.html", "--export", "vllm"]) == 0
    said = capsys.readouterr().out
    assert "heuristic" in said
    assert 'constant:{"batch_size": 64, "quant_tier": 1}' in said
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log.csv", "r.html", "shadow-vllm.yaml"]


def test_an_fp8_kv_cache_and_the_logs_model_are_in_the_report_and_in_the_export(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, file = tmp_path / "log.csv", tmp_path / "shadow.yaml"
    options = ["--gpus", "1", "--kv-cache-dtype", "fp8", "--export", "vllm", "--export-file", str(file)]
    for table, model, named in (
        ("l40s-llama-3.1-8b", "meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B-Instruct"),
        ("a100-qwen3-8b", "meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen3-8B"),
    ):
        rows = "".join(f"{0.5 * i},200,50,{model}\n" for i in range(40))
        log.write_text(f"arrival_s,prompt_tokens,output_tokens,model\n{rows}")
        assert main(["shadow", "--trace", str(log), "--agent", "naive", "--hardware", table, *options]) == 0
        said = capsys.readouterr().out
        assert "fixed: BF16, batch 256, FP8 KV" in said
        assert ("is computed with 16-bit timings" in said) == (table == "a100-qwen3-8b")
        exported = file.read_text()
        assert f"vllm serve {named} --config shadow.yaml" in exported
        assert ("# No checkpoint was named: Qwen/Qwen3-8B has the planned shape." in exported) == (named != model)
        assert "\nkv-cache-dtype: fp8\n" in exported


def test_a_task_has_its_hardware_and_a_models_name_its_precision(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "log.csv").write_text("arrival_s,prompt_tokens,output_tokens\n" + "0,200,50\n" * 30)
    command = ["shadow", "--trace", str(tmp_path / "log.csv"), "--agent", "naive", "--gpus", "1", "--json"]
    assert main([*command, "--task", "2@h100-llama-3.1-8b"]) == 0
    assert json.loads(capsys.readouterr().out)["hardware"] == "h100_sxm"
    assert main([*command, "--model", "llama-3.1-8b-FP8", "--hardware", "l40s"]) == 0
    assert json.loads(capsys.readouterr().out)["fixed_action"]["quant_tier"] == 1


def test_vllms_own_file_is_a_baseline_and_what_is_not_simulated_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "log.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,5,5\n1,5,5\n")
    file = tmp_path / "vllm.yaml"
    file.write_text("max_num_seqs: 64  # ours\nquantization: fp8\nkv-cache-dtype: fp8\nport: 8001\n")
    command = ["shadow", "--trace", str(tmp_path / "log.csv"), "--hardware", "h100-llama-3.1-8b", "--baseline"]
    assert main([*command, str(file), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["fixed_action"]["batch_size"], answer["fixed_action"]["quant_tier"]) == (64, 1)
    assert answer["baseline_ignored"] == ["port"]
    assert main([*command, str(file)]) == 0
    assert f"Options of {file} that are not simulated: port." in " ".join(capsys.readouterr().out.split())
    file.write_text("- 1\n")
    assert main([*command, str(file)]) == 2
    assert "is no" in capsys.readouterr().err
    assert main([*command, str(tmp_path / "missing.yml")]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_a_wrong_baseline_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,5,5\n")
    for text, message in (
        ("{", "not JSON"),
        ("[1]", "must be a JSON object"),
        ('{"batch": 3}', "unknown field batch: did you mean batch_size?"),
    ):
        assert main(["shadow", "--trace", str(tmp_path / "log.csv"), "--baseline", text, "--gpus", "1"]) == 2
        assert message in capsys.readouterr().err


def test_commas_within_braces_do_not_part_agent_names() -> None:
    assert agent_names('naive, constant:{"a": 1, "b": 2},ppo') == ["naive", 'constant:{"a": 1, "b": 2}', "ppo"]


def test_knobs_that_the_users_setting_leaves_out_are_vllms_defaults() -> None:
    defaults = vllm_defaults(tables_of(None)).to_dict()
    assert shadow(flood(20), [], n_gpus=1).fixed_action == defaults
    assert shadow(flood(20), [], fixed={"batch_size": 64}, n_gpus=1).fixed_action == {**defaults, "batch_size": 64}


def test_replicas_of_several_cards_are_counted_by_their_cards() -> None:
    tables = load_tables(table_path("h200-llama-3.1-70b-tp2"))
    objectives = [Objective("ttft", "p99", 2000)]
    outcomes = shadow(flood(20), ["heuristic"], n_gpus=4, objectives=objectives, tables=tables).outcomes
    seconds = int(np.ceil(flood(20).arrival_s[-1] + 1e-9)) + DRAIN_S
    assert {o.n_gpus for o in outcomes} == {4}
    assert (outcomes[0].n_replicas, outcomes[0].gpu_seconds) == (2, 4.0 * seconds)
    for wrong in (0, 3):
        with pytest.raises(InvalidConfigError, match="a multiple of 2"):
            shadow(flood(20), [], n_gpus=wrong, tables=tables)


def test_a_table_of_fewer_precisions_is_never_asked_for_another() -> None:
    tables = load_tables(table_path("h100-llama-3.1-8b"))
    report = shadow(flood(20), ['constant:{"quant_tier": 2}'], n_gpus=1, tables=tables)
    assert set(report.outcomes[-1].timeline["quant_tier"]) == {1.0}
    assert report.outcomes[1].action is not None
    assert report.outcomes[1].action["quant_tier"] < tables.n_tiers
    assert settings_of(report, tables, report.outcomes[-1].policy).tier == "FP8"
