"""Parts of `benchmarks.live.drafts`: traffic, policies, and the table that it writes; the simulator is the engine."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from agents.policies.heuristic import HeuristicAgent
from benchmarks.live.drafts import (
    CLIENTS,
    CPU,
    GPU,
    RETRY_DECISIONS,
    Burst,
    Contestant,
    Episode,
    Features,
    Goodput,
    LearningEnv,
    Seen,
    StepTimes,
    chance_of,
    constant,
    drawn_requests,
    heuristic_length,
    markdown,
    play,
    played,
    playing_on,
    tokens_of,
    training_episode,
    with_drafts,
)
from inferencegym.models import FLEET_FIELDS, OBSERVATION_FIELDS, SPEC_LENGTHS
from inferencegym.tasks import get_task
from live.engines.simulated import SimulatedEngine
from live.scaling import drafts_as_measured, scaled_lengths
from simulator.hardware.engine_times import EngineTimes
from simulator.hardware.tables import tables_of
from tests.known_engine import engine_tables

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
    blind = [rule(seen(0.0, 0)) for _ in range(RETRY_DECISIONS + 1)]
    assert blind == [0] * (len(blind) - 2) + [1, 1]


def test_rules_compute_with_the_iterations_of_the_measured_engine(tmp_path: Path) -> None:
    """4 sequences with 2 drafts each are 12 rows, which all end in the LM head; a draft takes the host .15 ms."""
    assert StepTimes(engine_tables(tmp_path))(4, 2) == pytest.approx(12.0 + 12 * 0.85 + 4 * 64 * 0.002 + 2 * 0.15)


@pytest.mark.parametrize("slower", [0.7, 1.5])
def test_the_network_sees_how_much_slower_than_its_table_the_engine_drafts(slower: float) -> None:
    """Each iteration writes one token of a sequence that is no draft."""
    times, sequences, drafts = StepTimes(TABLES), 8, 2
    iterations = 1e3 * CPU.hold_s / (slower * times(sequences, drafts))
    drafted = iterations * sequences * drafts
    seen = Seen(sequences, 0.0, drafted, 0.5 * drafted, iterations * sequences + 0.5 * drafted, drafts)
    features = Features(times)
    last = [features(seen)[-2:] for _ in range(40)][-1]
    assert last == pytest.approx([0.0, 2.0 * math.log(slower)], abs=1e-3)


def test_who_plays_as_the_rule_does_earns_nothing_in_training(tmp_path: Path) -> None:
    tables = engine_tables(tmp_path)
    env, twin, rule = LearningEnv(1, tables), training_episode(tables, 5), Goodput(StepTimes(tables))
    env.reset(seed=5)
    earned = []
    while not twin.done:
        drafts = rule(twin.seen)
        twin.play(drafts)
        earned.append(env.step(np.array([SPEC_LENGTHS.index(drafts)]))[1][0])
    assert len(earned) > 10
    assert earned == pytest.approx([0.0] * len(earned), abs=1e-9)


def test_in_a_closed_loop_training_pays_the_faster_policy_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.live.drafts.HERE", CLIENTS)
    tables = engine_tables(tmp_path)
    env, found = LearningEnv(1, tables), []
    for drafts in SPEC_LENGTHS:
        twin, earned = training_episode(tables, 5), 0.0
        env.reset(seed=5)
        while not twin.done:
            twin.play(drafts)
            earned += env.step(np.array([SPEC_LENGTHS.index(drafts)]))[1][0]
        found.append((earned, -played(training_episode(tables, 5), constant(drafts))["ms_per_token"]))
    assert sorted(found) == sorted(found, key=lambda each: each[1])


def test_the_heuristic_drafts_equally_in_calm_and_flood() -> None:
    task = replace(
        scaled_lengths(drafts_as_measured(get_task(3)), CPU.prompt[1] + CPU.output[1]), active_actions=("spec_length",)
    )
    agent, at = HeuristicAgent(task), {name: i for i, name in enumerate(OBSERVATION_FIELDS)}
    observation = np.zeros((2, len(OBSERVATION_FIELDS) + len(FLEET_FIELDS)))
    observation[:, at["arrival_rate"]] = (task.arrival_rate_rps, 10.0 * task.arrival_rate_rps)
    agent.reset(2)
    assert agent.act(observation)[:, 1].tolist() == [heuristic_length(TABLES)] * 2


def test_requests_have_the_acceptance_of_the_stage_in_which_they_arrive() -> None:
    drawn = drawn_requests(CPU.workloads["flood"], random.Random(3))
    for request, stage in drawn:
        in_flood = 9.0 <= request.arrival_s < 13.0
        assert (request.acceptance, stage.rate_rps) == ((0.3, 9.0) if in_flood else (0.95, 2.0))
    assert drawn == drawn_requests(CPU.workloads["flood"], random.Random(3))


def test_clients_keep_the_batch_as_large_while_the_content_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three clients send their requests stage after stage; one of them may be between two requests."""
    monkeypatch.setattr("benchmarks.live.drafts.HERE", CLIENTS)
    stages = CLIENTS.workloads["clients"]
    episode, running = Episode(TABLES, stages, 7), []
    while not episode.done:
        episode.play(1)
        running.append(episode.seen.running)
    assert [stage.acceptance for stage in episode.stages] == [a for a in (0.95, 0.3, 0.95, 0.3) for _ in range(32)]
    timings = episode.load.timings
    assert all(timing.completed for timing in timings)
    assert sorted(timings, key=lambda timing: timing.request.arrival_s) == timings
    assert set(running[:-3]) <= {2.0, 3.0}


def test_an_episode_plays_the_lengths_that_its_policy_chose() -> None:
    """One more draft accepted for sure in every step halves the time of a token, nearly."""
    stages = (CPU.workloads["flood"][0]._replace(acceptance=1.0),)
    ms = {}
    for drafts in (0, 1):
        engine = SimulatedEngine(TABLES, 64, 8)
        player = Contestant(partial(constant, drafts), partial(constant, drafts))
        run = play(engine, stages, 5, player, stand_in=True)
        assert set(run["drafts"]) == {drafts}
        assert run["in_time"] == 1.0
        ms[drafts] = run["ms_per_token"]
    assert 0.5 < ms[1] / ms[0] < 0.6


def test_the_table_compares_with_the_fastest_constant_draw_by_draw() -> None:
    """Half of the fastest constant's time in both draws is -50% with an interval of no width; one rule played once."""
    ms = {"constant 1": (20.0, 40.0), "constant 2": (22.0, 44.0), "vLLM's own table": (20.0, 40.0), "PPO": (10.0, 20.0)}
    ms |= {"TurboSpec's rule": (40.0, 40.0)}
    runs = [
        {
            "seed": seed,
            "workload": "flood",
            "policy": name,
            "yard_ms": 20.0,
            "ms_per_token": each[seed],
            "in_time": in_time,
        }
        for name, each in ms.items()
        for in_time in (0.95 if name == "constant 2" else 0.9,)
        for seed in (1, 0)
        if (name, seed) != ("TurboSpec's rule", 1)
    ]
    validation = {name: {"flood": 9.0} for name in ms}
    text = markdown({"place": "cpu", "engine": "0.32.0", "runs": runs, "validation": validation, "heuristic_drafts": 0})
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    names = ("policy", "PPO", "constant 1", "vLLM's own table", "constant 2", "TurboSpec's rule (1 draw)")
    assert [row[0] for row in rows] == [f"| {name}" for name in names]
    assert rows[0][2] == "vs constant 1"
    assert rows[1][1:4] == ["14.1", "-50% [-50%, -50%]", "90.0%"]
    assert rows[2][2] == ""
    assert rows[4][2] == "+10% [+10%, +10%]"
    compared = "-50% [-50%, -50%] vs vLLM's own table (in time +0.0 [+0.0, +0.0]), -75% vs TurboSpec's rule"
    assert f"PPO's latency per token: {compared} (in time +0.0)." in text
    assert "Both divided by the yardstick before the episode: -50% [-50%, -50%] vs constant 1." in text
    assert "Most in time of the constants: constant 2, 95.0% in 2 of 2 draws." in text
    assert "The content changes" not in text


def test_bursts_with_drafts_give_the_times_that_made_them(tmp_path: Path) -> None:
    """5 ms fixed; 20 us a row up to 64 rows, 10 up to 256, 30 beyond."""
    bursts = []
    for sequences in (1, 8, 32, 64):
        for drafts in SPEC_LENGTHS:
            rows = sequences * (drafts + 1)
            ms = 5.0 + 0.02 * min(rows, 64) + 0.01 * min(max(rows - 64, 0), 192) + 0.03 * max(rows - 256, 0)
            bursts.append(Burst(sequences, drafts, ms))
    before = EngineTimes.of_dict(engine_tables(tmp_path).meta["measured_engine"]["times"])
    found = with_drafts(before, bursts)
    assert (found.step_ms, *found.ramp_ms) == pytest.approx((5.0, 0.02, 0.01, 0.03))
    small = with_drafts(before, [burst for burst in bursts if burst.sequences <= 8])
    assert (small.step_ms, *small.ramp_ms) == pytest.approx(
        (5.0, 0.02, 0.01, before.rows_ms(257) - before.rows_ms(256))
    )
    assert (found.sequence_ms, found.context_ms) == (0.0, 0.0)


def test_only_the_best_constants_play_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.live.drafts.HERE", GPU)
    ms = {"constant 1": 3.0, "constant 4": 1.0, "constant 8": 2.0, "PPO": 9.0}
    runs = [
        {"seed": 0, "workload": "content", "policy": name, "yard_ms": 7.0, "ms_per_token": each, "in_time": 0.5}
        for name, each in ms.items()
    ]
    assert playing_on(runs) == {("content", "constant 4"), ("content", "constant 8"), ("content", "PPO")}
