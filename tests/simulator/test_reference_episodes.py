"""Episodes in the discrete-event reference: changes of the knobs by hand, and the same interface as the fluid model."""

from __future__ import annotations

import dataclasses
import json
from functools import partial

import numpy as np
import pytest

from agents.episodes import run_episodes
from agents.registry import make_agent
from cli.main import main
from env.batch import ServingBatch
from env.dynamics import DynamicsFactory, FluidFleet
from env.reference import ReferenceFleet
from inferencegym.models import PRIORITY_CLASSES, ServeAction
from inferencegym.spaces.actions import to_row
from inferencegym.spaces.observations import OBSERVATION_HIGH, OBSERVATION_LOW
from inferencegym.tasks import AcceptanceStage, TaskSpec, get_task, list_tasks
from simulator.events.episode import quantile
from simulator.events.fleet import Fleet
from simulator.events.requests import Requests
from simulator.events.simulation import Simulation, serve
from simulator.hardware.measured_model import MeasuredModel
from simulator.hardware.operators import Chunk
from simulator.hardware.profiles import engine, hardware
from simulator.hardware.tables import load_tables
from simulator.workload import load_source
from tests.simulator.test_discrete_event import ROOMY, requests

PROFILE = dataclasses.replace(engine("a100_40"), ttft_offset_ms=0.0)
FP16, INT8 = (MeasuredModel(hardware("a100-40gb"), tier, PROFILE) for tier in ("FP16", "INT8"))
POOLS = {"FP16": ROOMY, "INT8": ROOMY, "INT4": ROOMY}


def test_setting_the_same_knobs_every_second_changes_nothing() -> None:
    rng = np.random.default_rng(4)
    load = Requests(np.sort(rng.uniform(0, 20, 200)), rng.integers(50, 900, 200), rng.integers(1, 400, 200))
    fleet = Fleet(FP16, 16, 8_000, replicas=2)
    once = serve(fleet, load)
    simulation = Simulation(fleet, load)
    for second in range(40):
        simulation.reconfigure(fleet, {**POOLS, "FP16": 8_000})
        simulation.run_until(1e3 * (second + 1))
    simulation.run()
    assert simulation.first_ms / 1e3 == pytest.approx(once.first_token_s, rel=0, abs=0)
    assert simulation.finish_ms / 1e3 == pytest.approx(once.finish_s, rel=0, abs=0)
    assert once.preemptions.sum() > 0


@pytest.mark.parametrize("dynamics", [FluidFleet, ReferenceFleet])
def test_a_tasks_own_acceptance_is_observed_by_class_and_stage(dynamics: DynamicsFactory) -> None:
    """Four drafts at acceptance a are accepted at the rate (a + a^2 + a^3 + a^4) / 4; only one class occurs."""
    (only,) = {each.name for each in get_task(1).classes if each.share}
    of_class = PRIORITY_CLASSES.index(only)
    stages = tuple(
        AcceptanceStage(step, tuple(rate if c == of_class else 0.99 for c in range(3)))
        for step, rate in ((0, 0.9), (30, 0.2))
    )
    knobs = ("batch_size", "spec_length")
    task = dataclasses.replace(get_task(1), draft_acceptance=stages, active_actions=knobs)
    batch = ServingBatch(task, 1, task.config(), dynamics=dynamics)
    batch.reset([1])
    rates = []
    for _ in range(60):
        batch.step(to_row(ServeAction.from_dict({"batch_size": 64, "spec_length": 4}))[None])
        rates.append(float(batch.metric["spec_accept_rate"][0]))
    exact = [sum(a**j for j in range(1, 5)) / 4 for a in (0.9, 0.2)]
    if dynamics is FluidFleet:
        assert rates == pytest.approx(np.repeat(exact, 30))
    else:  # drafts are drawn, and requests keep the acceptance with which they arrived
        assert [np.mean(rates[:30]), np.mean(rates[45:])] == pytest.approx(exact, rel=0.1)


def test_a_new_replica_serves_once_it_has_started() -> None:
    fleet = Fleet(FP16, 1, ROOMY, start_ms=5_000.0)
    simulation = Simulation(fleet, requests((0.0, 100, 10_000), (1.0, 100, 200)))
    simulation.run_until(2_000.0)
    simulation.reconfigure(dataclasses.replace(fleet, replicas=2), POOLS)
    simulation.run_until(7_000.0 - 1e-6)
    first, new = simulation.replicas
    assert (first.in_flight(), new.in_flight(), new.down) == (1, 0, True)
    assert np.isnan(simulation.start_ms[1])
    simulation.run_until(7_000.0 + 1e-3)
    assert (new.in_flight(), new.down, simulation.start_ms[1]) == (1, False, 7_000.0)


def test_a_restart_hands_requests_to_the_other_replica_which_recomputes_prompt_and_output() -> None:
    fleet = Fleet(FP16, 8, ROOMY, replicas=2, restart_ms=10_000.0)
    simulation = Simulation(fleet, requests((0.0, 1000, 600)))
    simulation.run_until(2_000.0)
    (replica,) = (each for each in simulation.replicas if each.n)
    tokens = int(replica.tokens[0])
    simulation.reconfigure(dataclasses.replace(fleet, model=INT8), POOLS)
    # The first replica restarts at once; the request was there.
    assert simulation.replicas[0].down
    assert replica is simulation.replicas[0]
    simulation.run_until(2_000.0 + FP16.step_ms(0, 0.0, [Chunk(tokens)], n_first=1) + 1e-6)
    other = simulation.replicas[1]
    assert (other.n, int(other.tokens[0])) == (1, tokens + 1)
    assert simulation.state.prefilled_tokens == 1000 + tokens
    simulation.run_until(12_000.0 - 1e-6)
    assert simulation.replicas[0].down
    assert not other.down
    simulation.run_until(12_000.0 + 1e-6)
    assert simulation.replicas[0].model is INT8
    assert not simulation.replicas[0].down
    # One after the other: now the second one restarts, and hands the request back if it still runs.
    assert other.down
    simulation.run()
    assert simulation.state.written_tokens == 600
    assert np.isfinite(simulation.finish_ms).all()


def test_a_draining_replica_finishes_its_requests_and_takes_no_others() -> None:
    fleet = Fleet(FP16, 8, ROOMY, replicas=2, restart_ms=10_000.0, rolling_restart="drain")
    load = requests((0.0, 1000, 600), *[(1.0 + 0.01 * i, 100, 50) for i in range(20)])
    simulation = Simulation(fleet, load)
    simulation.run_until(500.0)
    simulation.reconfigure(dataclasses.replace(fleet, model=INT8), POOLS)
    first, other = simulation.replicas
    assert first.draining
    assert not first.down
    assert first.n == 1
    simulation.run_until(2_000.0)
    assert first.load() == 1
    assert other.load() > 0
    simulation.run()
    assert simulation.state.prefilled_tokens == 1000 + 20 * 100
    assert {first.model, other.model} == {INT8}


def test_a_removed_replica_finishes_its_requests_takes_no_others_and_is_gone() -> None:
    fleet = Fleet(FP16, 8, ROOMY, replicas=2)
    load = requests((0.0, 1000, 600), (0.0, 1000, 600), *[(1.0 + 0.01 * i, 100, 50) for i in range(20)])
    simulation = Simulation(fleet, load)
    simulation.run_until(500.0)
    assert [replica.load() for replica in simulation.replicas] == [1, 1]
    simulation.reconfigure(dataclasses.replace(fleet, replicas=1), POOLS)
    (removed,) = (replica for replica in simulation.replicas if replica.leaving)
    (staying,) = (replica for replica in simulation.replicas if not replica.leaving)
    assert not removed.gone
    simulation.run_until(2_000.0)
    assert removed.load() == 1
    assert staying.load() > 1
    simulation.run()
    assert removed.gone
    assert removed.down
    assert not staying.gone
    assert simulation.state.written_tokens == 2 * 600 + 20 * 50
    # requested again: a new replica joins, not the one that left
    simulation.reconfigure(fleet, POOLS)
    assert len(simulation.replicas) == 3


def test_a_fleet_has_one_replica_unless_told() -> None:
    fleet = Fleet(FP16, 8, ROOMY)
    assert len(Simulation(fleet, requests((0.0, 10, 10))).replicas) == 1
    assert (fleet.restart_ms, fleet.start_ms, fleet.slowdown) == (0.0, 0.0, 1.0)


def test_a_pool_that_shrinks_preempts_what_it_no_longer_holds() -> None:
    fleet = Fleet(FP16, 8, ROOMY)
    simulation = Simulation(fleet, requests(*[(0.0, 1000, 500)] * 8))
    simulation.run_until(3_000.0)
    assert (simulation.replicas[0].n, simulation.preemptions.sum()) == (8, 0)
    simulation.reconfigure(dataclasses.replace(fleet, kv_pool_tokens=4_800), {**POOLS, "FP16": 4_800})
    simulation.run_until(3_200.0)
    # 4,800 tokens hold four requests of about 1,100.
    assert simulation.replicas[0].n == 4
    assert simulation.preemptions.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    simulation.run()
    assert np.isfinite(simulation.finish_ms).all()


def test_the_lowest_class_is_preempted_first_and_within_it_the_request_admitted_last() -> None:
    fleet = Fleet(FP16, 8, 1_600)
    # The second one is of a lower class than the third, which came later. Together they outgrow the pool once.
    simulation = Simulation(fleet, requests((0.0, 400, 200), (0.0, 400, 200), (0.3, 400, 150), priority=[0, 2, 1]))
    simulation.run_until(4_000.0)
    assert simulation.preemptions.tolist() == [0, 1, 0]
    simulation = Simulation(fleet, requests((0.0, 400, 200), (0.0, 400, 200), (0.3, 400, 150), priority=[1, 1, 1]))
    simulation.run_until(4_000.0)
    assert simulation.preemptions.tolist() == [0, 0, 1]


def test_before_a_preempted_request_runs_again_only_a_higher_class_starts() -> None:
    first = {}
    for priority in (1, 2):
        load = requests((0.0, 600, 300), (0.0, 600, 300), (3.0, 100, 5), priority=[2, 2, priority])
        simulation = Simulation(Fleet(FP16, 8, 1_600), load)
        simulation.run_until(3_000.0)
        assert simulation.replicas[0].preempted
        simulation.run()
        first[priority] = simulation.first_ms[2]
    assert first[1] < 3_200.0 < first[2]


def test_preempted_requests_wait_in_the_order_of_their_classes() -> None:
    simulation = Simulation(Fleet(FP16, 8, ROOMY), requests(*[(0.0, 1000, 500)] * 6, priority=[2, 1, 2, 1, 0, 0]))
    simulation.run_until(3_000.0)
    simulation.reconfigure(dataclasses.replace(simulation.fleet, kv_pool_tokens=2_400), {**POOLS, "FP16": 2_400})
    simulation.run_until(3_200.0)
    # 2,400 tokens hold the two of class 0, numbers 4 and 5.
    assert list(simulation.replicas[0].preempted) == [1, 3, 0, 2]


@pytest.mark.parametrize("task", list_tasks(include_recorded=True), ids=lambda task: str(task.task_id))
def test_the_requests_of_an_episode_add_up_to_its_offered_load(task: TaskSpec) -> None:
    source, steps = load_source(task, load_tables()), min(task.episode_length, 120)
    load, each = source.draw([11], steps).episode(0), source.requests(11, steps)
    arrivals, prompts = np.zeros_like(load.arrivals), np.zeros_like(load.prompt_tokens)
    where = (each.arrival_s.astype(int), each.class_index)
    np.add.at(arrivals, where, 1.0)
    np.add.at(prompts, where, each.prompt_tokens.astype(float))
    assert np.array_equal(arrivals, load.arrivals)
    assert np.array_equal(prompts, load.prompt_tokens)
    assert (np.diff(each.arrival_s) >= 0).all()
    assert each.output_tokens.min() >= 1


def test_the_reference_plays_a_task_as_the_fluid_model_does() -> None:
    task = get_task(1)
    fluid, reference = (
        run_episodes(task, make_agent("heuristic", task), [10_000, 10_001], dynamics=kind)
        for kind in (FluidFleet, ReferenceFleet)
    )
    assert reference.scores() == pytest.approx(fluid.scores(), abs=0.03)
    assert reference.metrics["gpu_memory_gb"] == pytest.approx(fluid.metrics["gpu_memory_gb"])
    assert (reference.metrics["tokens_per_sec"] != fluid.metrics["tokens_per_sec"]).any()


@pytest.mark.parametrize("task", list_tasks(include_recorded=True), ids=lambda task: str(task.task_id))
def test_every_task_plays_in_the_reference_and_a_row_is_its_episode_alone(task: TaskSpec) -> None:
    config = task.config({"episode_length": 12})
    factory = partial(ReferenceFleet, rolling_restart="drain")
    batch = ServingBatch(task, 2, config, dynamics=factory)
    batch.reset([3, 4])
    agent = make_agent("random", task)
    agent.reset(2)
    actions = [agent.act(batch.observation).copy() for _ in range(12)]
    both = np.array([batch.step(action).copy() for action in actions])
    assert batch.done.all()
    for row, seed in enumerate((3, 4)):
        alone = ServingBatch(task, 1, config, dynamics=factory)
        alone.reset([seed])
        seen = [alone.step(action[row : row + 1]).copy() for action in actions]
        assert np.array_equal(both[:, row : row + 1], np.array(seen))
    assert (both >= OBSERVATION_LOW).all()
    assert (both <= OBSERVATION_HIGH).all()


def test_latencies_carry_the_noise_that_the_seed_drew() -> None:
    task = get_task(1)
    batches = [ServingBatch(task, 1, task.config({"episode_length": 3}), dynamics=ReferenceFleet) for _ in range(2)]
    for batch in batches:
        batch.reset([11])
    drawn = batches[0].fleet.noise[0].copy()
    batches[1].fleet.noise[:] = 1.0
    assert (drawn != 1.0).all()
    for second in range(3):
        for batch in batches:
            batch.step(np.array([[0.9, 0, 128, 0, 0]]))
        noisy, plain = (batch.metric for batch in batches)
        for name, which in (("ttft_p50_ms", 0), ("ttft_p99_ms", 0), ("tpot_ms", 1)):
            assert noisy[name][0] == pytest.approx(plain[name][0] * drawn[second, which])


def test_a_row_that_restarts_plays_its_new_seed() -> None:
    task = get_task(2)
    batch = ServingBatch(task, 2, task.config({"episode_length": 4}), dynamics=ReferenceFleet)
    naive = np.tile(np.array([1.0, 0.0, 32.0, 0.0, 0.0]), (2, 1))
    batch.reset([5, 6])
    first = np.array([batch.step(naive).copy() for _ in range(4)])
    batch.reset([6, 5])
    assert np.array_equal(np.array([batch.step(naive).copy() for _ in range(4)]), first[:, ::-1])


def test_the_command_evaluates_in_the_reference(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "--task", "1", "--agent", "naive", "--seeds", "2", "--reference", "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    # The range that the specification gives for the naive agent on task 1.
    assert 0.30 <= result["agents"][0]["score"]["mean"] <= 0.40


def test_the_reference_names_the_metrics_that_it_gives_and_no_others_are_logged() -> None:
    batch = ServingBatch(get_task(1), 1, dynamics=ReferenceFleet)
    batch.reset([1])
    fleet = batch.fleet
    assert isinstance(fleet, ReferenceFleet)
    assert set(fleet.serve(range(1))[0]) == set(fleet.given) == set(batch.metric)


def test_a_quantile_of_a_second_is_numpys_to_the_last_bit() -> None:
    rng = np.random.default_rng(1)
    for n in range(1, 200):
        values = np.sort(rng.lognormal(4.0, 1.0, n))
        assert [quantile(values, q) for q in (0.5, 0.99)] == np.quantile(values, (0.5, 0.99)).tolist()
