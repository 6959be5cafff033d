"""Savings of autoscaling on a request log: GPU-hours and late requests of autoscalers against a fixed fleet."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from inferencegym.models import QuantTier, ServeAction
from ops.capacity import DRAIN_S
from ops.objectives import parse_objective
from ops.plan import make_plan, registered_tables
from ops.report import notes, shadow_report
from ops.scaling import MAY_MISS, TARGETS, scaling_note
from ops.shadow import ShadowReport, shadow
from simulator.hardware.profiles import fleet_changes
from simulator.hardware.tables import tables_of
from simulator.load.requests import RequestLog

SETTING = ServeAction(0.9, 0, 64, False, QuantTier.FP16)


def half_day(seconds: int = 2400, night_rps: float = 3.0, noon_rps: float = 24.0) -> RequestLog:
    """A log whose load follows a sine from night to noon and back."""
    rng = np.random.default_rng(5)
    hour = np.arange(seconds) / seconds
    rates = night_rps + (noon_rps - night_rps) * np.sin(np.pi * hour) ** 2
    counts = rng.poisson(rates)
    arrival = np.sort(np.repeat(np.arange(seconds), counts) + rng.random(counts.sum()))
    n = len(arrival)
    lengths = [np.rint(rng.lognormal(mu, 0.6, n)) + 1 for mu in (6.0, 4.8)]
    return RequestLog(arrival - arrival[0], *lengths, np.zeros(n, dtype=np.int64))


@pytest.fixture(scope="module")
def report() -> ShadowReport:
    return shadow(half_day(), [], fixed=SETTING, n_gpus=4)


def test_a_fleet_that_follows_a_slow_day_saves_gpus_and_keeps_its_objective(report: ShadowReport) -> None:
    kept = [each for each in report.autoscaling if each.meets]
    assert max(each.saved_share for each in kept) > 0.2
    assert {(each.policy, each.target) for each in report.autoscaling} == {
        (name, target) for name in ("hpa", "planner") for target in TARGETS
    }


def test_only_autoscalers_that_save_and_keep_the_objective_are_listed(report: ShadowReport) -> None:
    first, second, third = report.autoscaling[:3]
    found = [replace(first, saved_share=0.0), replace(second, meets=False), third]
    (_, rows) = shadow_report(replace(report, autoscaling=found), tables_of(None)).tables.values()
    assert [row["target"] for row in rows] == [f"{third.target:.0%}"]
    shown = shadow_report(replace(report, autoscaling=found[:2]), tables_of(None))
    assert [*shown.tables.values()][1] == []
    assert any("saves nothing with at most 1% more of the requests late" in line for line in shown.lines)


def test_savings_and_late_requests_are_counted_from_the_best_constant_on_all_replicas(report: ShadowReport) -> None:
    constant = report.outcomes[1]
    seconds = int(np.ceil(half_day().arrival_s[-1])) + DRAIN_S
    assert constant.gpu_seconds == pytest.approx(4.0 * seconds)
    for each in report.autoscaling:
        assert each.saved_share == pytest.approx(1.0 - each.gpu_seconds / (4.0 * seconds))
        assert each.late_more == pytest.approx((1.0 - each.share_in_time) - constant.slo_miss_share, abs=1e-12)
        assert each.meets == (each.late_more <= MAY_MISS)


def test_replicas_stay_between_one_and_all_and_more_are_there_at_noon_than_at_night(report: ShadowReport) -> None:
    for each in report.autoscaling:
        asked = np.array(each.replicas)
        assert asked.min() >= 1.0
        assert asked.max() <= 4.0
        noon = np.abs(np.array(each.t_s) - 1200.0) < 200.0
        night = (np.array(each.t_s) > 2200.0) & (np.array(each.t_s) < 2400.0)
        assert asked[noon].mean() > asked[night].mean()


def test_replicas_that_load_and_drain_are_paid(report: ShadowReport) -> None:
    """At least the requested replicas are paid for, and more than those in service."""
    for each in report.autoscaling:
        every_s = each.t_s[1] - each.t_s[0]
        assert each.gpu_seconds >= 0.97 * every_s * sum(each.replicas)


def test_a_new_replica_takes_as_long_as_an_engines(report: ShadowReport) -> None:
    """64 s and 16.06 GB at 0.9 GB/s; a test by hand of the file's numbers."""
    changes = fleet_changes()
    assert (changes.start_s, changes.load_gb_per_s) == (64.0, 0.9)
    action = report.outcomes[1].action
    assert action is not None
    weights_gb = {0: 16.06, 1: 9.08, 2: 5.74}[int(action["quant_tier"])]
    assert report.autoscaling[0].start_s == pytest.approx(64.0 + weights_gb / 0.9)


def test_a_single_replica_has_nothing_to_scale() -> None:
    log = half_day(60, 1.0, 2.0)
    found = shadow(log, [], fixed=SETTING, n_gpus=1).autoscaling
    assert found == []
    assert "single replica" in scaling_note(found, 60.0, "")


def test_a_plan_says_what_autoscaling_saves_within_its_objectives() -> None:
    plan = make_plan(
        half_day(1200),
        [parse_objective("ttft_p99=1000"), parse_objective("tpot_p50=60")],
        registered_tables(["a100-40gb"]),
        precisions=["FP16"],
        drafts=False,
    )
    assert plan.plans[0].n_replicas > 1
    assert {each.max_replicas for each in plan.autoscaling} == {plan.plans[0].n_replicas}
    told = next(note for note in notes(plan) if note.startswith("Autoscaling"))
    best = max((e.saved_share for e in plan.autoscaling if e.meets), default=0.0)
    assert (f"saves {best:.0%}" in told) or (best < 0.01 and "saves nothing" in told)
    for each in plan.autoscaling:
        if each.figures["ttft_p99_ms"] > 1000.0 or each.figures["tpot_p50_ms"] > 60.0:
            assert not each.meets
