"""Parts of `benchmarks.live.drafts`: traffic, policies, and the table that it writes; the simulator is the engine."""

from __future__ import annotations

import random
from functools import partial

import pytest

from benchmarks.live.drafts import (
    HOLD_S,
    WORKLOADS,
    Contestant,
    Goodput,
    Seen,
    StepTimes,
    chance_of,
    constant,
    drawn_requests,
    markdown,
    play,
    played_names,
    tokens_of,
)
from live.engines.simulated import SimulatedEngine
from simulator.hardware.tables import tables_of

TABLES = tables_of(None)


def seen(acceptance: float, drafts: int, running: float = 64.0) -> Seen:
    """As if 100 sequences had been verified."""
    return Seen(running, 0.0, 100.0 * drafts, 100.0 * (tokens_of(acceptance, drafts) - 1.0), 500.0, drafts)


@pytest.mark.parametrize("drafts", [1, 2, 4, 8])
def test_the_accepted_share_of_drafts_gives_the_probability_of_each_back(drafts: int) -> None:
    for acceptance in (0.0, 0.3, 0.8, 0.95):
        share = sum(acceptance**j for j in range(1, drafts + 1)) / drafts
        assert chance_of(share, drafts) == pytest.approx(acceptance, abs=1e-5)


def test_the_goodput_rule_drafts_less_where_less_is_accepted_and_looks_again_without_drafts() -> None:
    lengths = []
    for acceptance in (0.95, 0.6, 0.05):
        rule = Goodput(StepTimes(TABLES))
        lengths.append([rule(seen(acceptance, 4)) for _ in range(10)][-1])
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > lengths[-1] == 0
    blind = [rule(seen(0.0, 0)) for _ in range(round(4.0 / HOLD_S) + 1)]
    assert blind == [0] * (len(blind) - 2) + [1, 1]


def test_requests_have_the_acceptance_of_the_stage_in_which_they_arrive() -> None:
    drawn = drawn_requests(WORKLOADS["flood"], random.Random(3))
    for request, stage in drawn:
        in_flood = 6.0 <= request.arrival_s < 10.0
        assert (request.acceptance, stage.rate_rps) == ((0.3, 9.0) if in_flood else (0.8, 1.2))
    assert drawn == drawn_requests(WORKLOADS["flood"], random.Random(3))


def test_an_episode_plays_the_lengths_that_its_policy_chose() -> None:
    """One more draft accepted for sure in every step halves the time of a token, nearly."""
    stages = (WORKLOADS["flood"][0]._replace(acceptance=1.0),)
    ms = {}
    for drafts in (0, 1):
        engine = SimulatedEngine(TABLES, 64, 8)
        player = Contestant(partial(constant, drafts), partial(constant, drafts))
        run = play(engine, stages, 5, player, stand_in=True)
        assert set(run["drafts"]) == {drafts}
        assert run["in_time"] == 1.0
        ms[drafts] = run["ms_per_token"]
    assert 0.5 < ms[1] / ms[0] < 0.6


def test_the_table_compares_with_the_best_constant_draw_by_draw() -> None:
    """Half of the best constant's time in both draws is -50 % with an interval of no width."""
    ms = {"constant 1": (20.0, 40.0), "constant 2": (22.0, 44.0), "vLLM's own table": (20.0, 40.0), "PPO": (10.0, 20.0)}
    runs = [
        {"seed": seed, "workload": "flood", "policy": name, "yard_ms": 20.0, "ms_per_token": each[seed], "in_time": 0.9}
        for name, each in ms.items()
        for seed in (1, 0)
    ]
    text = markdown({"engine": "0.32.0", "runs": runs, "validation": {name: {"flood": 9.0} for name in ms}})
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert [row[0] for row in rows] == ["| policy", "| PPO", "| constant 1", "| vLLM's own table", "| constant 2"]
    assert rows[0][2] == "beside constant 1"
    assert rows[1][1:4] == ["14.1", "-50% [-50%, -50%]", "90.0%"]
    assert rows[2][2] == ""
    assert rows[4][2] == "+10% [+10%, +10%]"
    assert "PPO's latency per token: -50% [-50%, -50%] beside vLLM's own table." in text
    assert "Both divided by the yardstick before the episode: -50% [-50%, -50%] beside constant 1." in text
    assert "The content changes" not in text


def test_only_the_best_constants_of_the_simulator_are_played() -> None:
    validation = {f"constant {k}": {"flood": float(k)} for k in (8, 4, 2, 1, 0)} | {"PPO": {"flood": 9.0}}
    assert played_names(validation, "flood", everything=False) == ["constant 0", "constant 1", "constant 2", "PPO"]
    assert len(played_names(validation, "flood", everything=True)) == 6
