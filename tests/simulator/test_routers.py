"""Routers in front of replicas with a queue each: who serves what, laws against the shared queue, prefixes."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferencegym.models import ROUTERS, Router
from simulator.events import loop, simulation
from simulator.events.fleet import Fleet
from simulator.events.requests import Outcome, Requests
from simulator.events.simulation import Simulation, serve
from tests.simulator.test_discrete_event import CHUNKED, ROOMY, requests

SHARED, ROUND_ROBIN, RANDOM, LEAST_LOADED, PREFIX_AFFINITY = ROUTERS


def bursty(n: int, rate_rps: float, seed: int, follows: np.ndarray | None = None) -> Requests:
    """Arrivals with gamma gaps of coefficient of variation 3, and lengths that vary."""
    rng = np.random.default_rng(seed)
    arrival_s = np.cumsum(rng.gamma(1 / 9, 9 / rate_rps, n))
    prompt, output = rng.integers(1, 1500, n), rng.integers(1, 300, n)
    reused = prompt // 2 if follows is not None else None
    return Requests(arrival_s, prompt, output, rng.integers(0, 3, n), reused, follows=follows)


def replica_of(fleet: Fleet, load: Requests) -> list[int]:
    """Replica that served each request."""
    run = Simulation(fleet, load)
    run.run()
    return [int(r) for r in run.arrays["replica"]]


def assert_equal(one: Outcome, other: Outcome) -> None:
    for field in dataclasses.fields(one):
        assert np.array_equal(getattr(one, field.name), getattr(other, field.name), equal_nan=True), field.name


def test_round_robin_goes_round_and_least_loaded_goes_to_the_replica_that_is_free() -> None:
    load = requests((0.0, 100, 400), (0.1, 100, 2), (1.0, 100, 2), (1.1, 100, 2))
    fleet = Fleet(CHUNKED, 8, ROOMY, 2)
    assert replica_of(dataclasses.replace(fleet, router=ROUND_ROBIN), load) == [0, 1, 0, 1]
    # The first request lasts longer than all others, which find the second replica empty each time.
    assert replica_of(dataclasses.replace(fleet, router=LEAST_LOADED), load) == [0, 1, 1, 1]


def test_random_sends_each_request_to_any_replica_with_equal_chances_as_the_seed_says() -> None:
    load = requests(*((0.1 * i, 10, 2) for i in range(4000)))
    fleet = Fleet(CHUNKED, 8, ROOMY, 4, router=RANDOM)
    chosen = np.array(replica_of(fleet, load))
    # 1,000 are expected on each replica, and after 1,000 the same replica again: 140 are five standard deviations.
    assert np.bincount(chosen) == pytest.approx([1000] * 4, abs=140)
    assert (chosen[1:] == chosen[:-1]).sum() == pytest.approx(1000, abs=140)
    assert replica_of(fleet, load) == chosen.tolist()
    other = Simulation(fleet, load, seed=1)
    other.run()
    assert (other.arrays["replica"] == chosen).mean() == pytest.approx(0.25, abs=0.04)
    # A request's replica depends on the seed alone, not on the requests before it.
    assert replica_of(fleet, requests(*((100.0 * i, 900, 50) for i in range(40)))) == chosen[:40].tolist()


def test_a_request_waits_for_the_replica_that_it_was_sent_to_while_another_is_free() -> None:
    load = requests((0.0, 100, 400), (0.1, 100, 2), (0.2, 100, 2))
    fleet = Fleet(CHUNKED, 1, ROOMY, 2)
    shared, routed = (serve(dataclasses.replace(fleet, router=r), load) for r in (SHARED, ROUND_ROBIN))
    assert routed.first_token_s[2] > routed.finish_s[0]
    assert shared.finish_s[2] < shared.finish_s[0]


def test_turns_of_a_session_stay_on_its_replica_unless_it_is_overloaded() -> None:
    follows = np.array([-1, -1, 0, 1, 2, 3])
    load = requests(*((float(i), 100, 2) for i in range(6)))
    fleet = Fleet(CHUNKED, 8, ROOMY, 3, router=PREFIX_AFFINITY)
    # Idle replicas are equally loaded: the first request of a session goes to the first of them.
    assert replica_of(fleet, dataclasses.replace(load, follows=follows)) == [0] * 6
    at_once = requests(*((0.001 * i, 100, 300) for i in range(80)))
    chosen = replica_of(fleet, dataclasses.replace(at_once, follows=np.arange(80) - 1))
    assert chosen[:65] == [0] * 65
    # With 65 requests more than the others, which have none, the session moves.
    assert chosen[65:] == [1] * 15


def test_a_prefix_is_found_only_on_replicas_that_computed_it() -> None:
    load = requests((0.0, 1000, 2), (1.0, 1000, 2), (2.0, 1000, 2))
    load = dataclasses.replace(load, reused_tokens=np.array([0, 600, 800]), follows=np.array([-1, 0, 1]))
    prefilled = {}
    for router in (SHARED, ROUND_ROBIN, LEAST_LOADED, PREFIX_AFFINITY):
        run = Simulation(Fleet(CHUNKED, 8, ROOMY, 2, router=router), load)
        run.state.prefix_hit = 1.0
        run.run()
        prefilled[router] = int(run.state.prefilled_tokens)
    # Round robin: the second starts anew; the third finds on replica 0 what it shares with the first, 600 tokens.
    assert prefilled == {SHARED: 1600, ROUND_ROBIN: 2400, LEAST_LOADED: 1600, PREFIX_AFFINITY: 1600}


def test_cached_prompt_tokens_do_not_count_against_the_token_budget() -> None:
    # vLLM's scheduler budgets the tokens that it computes: 8 prompts with 10 new tokens each fit one iteration of 2048.
    load = dataclasses.replace(requests(*((0.0, 1000, 2),) * 8), reused_tokens=np.full(8, 990))
    run = Simulation(Fleet(CHUNKED, 8, ROOMY), load)
    run.state.prefix_hit = 1.0
    out = run.run()
    assert run.state.prefilled_tokens == 80
    assert np.ptp(out.first_token_s) == 0.0
    # Without the cache 8,000 tokens need four iterations.
    assert len(np.unique(serve(Fleet(CHUNKED, 8, ROOMY), load).first_token_s)) == 4


@settings(max_examples=25)
@given(
    router=st.sampled_from(ROUTERS[1:]),
    seed=st.integers(0, 2**20),
    batch_size=st.integers(1, 12),
    queue_limit=st.none() | st.integers(0, 20),
    disaggregated=st.booleans(),
)
def test_with_one_replica_every_router_is_the_shared_queue(
    router: Router, seed: int, batch_size: int, queue_limit: int | None, disaggregated: bool
) -> None:
    fleet = Fleet(CHUNKED, batch_size, 4_000, 1, queue_limit=queue_limit, disaggregated=disaggregated)
    load = bursty(60, 8.0, seed)
    assert_equal(serve(dataclasses.replace(fleet, router=router), load), serve(fleet, load))


@settings(max_examples=25)
@given(
    router=st.sampled_from(ROUTERS),
    seed=st.integers(0, 2**20),
    replicas=st.integers(1, 5),
    queue_limit=st.none() | st.integers(0, 20),
    later=st.integers(1, 5),
    drain=st.booleans(),
)
def test_every_request_is_served_once_or_refused_whatever_the_router_does(
    router: Router, seed: int, replicas: int, queue_limit: int | None, later: int, drain: bool
) -> None:
    follows = np.where(np.arange(80) % 4 == 0, -1, np.arange(80) - 1)
    fleet = Fleet(
        *(CHUNKED, 6, 4_000, replicas),
        queue_limit=queue_limit,
        restart_ms=700.0,
        start_ms=300.0,
        rolling_restart="drain" if drain else "recompute",
        router=router,
    )
    run = Simulation(fleet, bursty(80, 20.0, seed, follows))
    run.run_until(1_500.0)
    run.reconfigure(dataclasses.replace(fleet, replicas=later, disaggregated=True), {"FP16": 4_000})
    out = run.run()
    assert (np.isfinite(out.finish_s) ^ out.rejected).all()
    assert run.state.n_finished + run.state.n_rejected == 80
    assert (run.state.waiting, run.arrays["line_count"].sum()) == (0, 0)
    if queue_limit is None:
        assert not out.rejected.any()


@pytest.mark.parametrize("replicas", [2, 4, 8])
def test_bursts_wait_longer_for_slots_under_round_robin_than_in_a_shared_queue(replicas: int) -> None:
    # Slots are what bursts wait for; otherwise a wait is the rest of an iteration, and routers differ by milliseconds.
    load = dataclasses.replace(bursty(1500, 2.0 * replicas, 1), priority=None)
    wait_s = {}
    for router in (SHARED, ROUND_ROBIN):
        run = Simulation(Fleet(CHUNKED, 8, ROOMY, replicas, router=router), load)
        run.run()
        wait_s[router] = float((run.start_ms - run.arrival_ms).mean()) / 1e3
    assert wait_s[SHARED] < wait_s[ROUND_ROBIN]


@pytest.mark.parametrize("prefill_replicas", [None, 2])
@pytest.mark.parametrize("router", ROUTERS)
def test_compiled_and_interpreted_routers_are_equal(
    router: Router, prefill_replicas: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.spec_from_file_location("interpreted_loop", Path(str(loop.__file__)).with_name("loop.py"))
    assert spec is not None
    assert spec.loader is not None
    plain = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plain)
    fleet = Fleet(CHUNKED, 12, 4_000, 3, router=router, queue_limit=40, restart_ms=500.0)
    if prefill_replicas is not None:
        fleet = dataclasses.replace(fleet, disaggregated=True, prefill_replicas=prefill_replicas)
    load = bursty(120, 30.0, 4, np.where(np.arange(120) % 5 == 0, -1, np.arange(120) - 1))

    def play() -> tuple[Outcome, list[int]]:
        run = Simulation(fleet, load)
        run.state.prefix_hit = 0.8
        if not fleet.prefill_replicas:
            run.run_until(1_000.0)
            run.reconfigure(dataclasses.replace(fleet, disaggregated=True), {"FP16": 4_000})
        return run.run(), [int(r) for r in run.arrays["replica"]]

    compiled, chosen = play()
    assert set(chosen) - {-1} == {0, 1, 2}
    monkeypatch.setattr(simulation, "Loop", plain.Loop)
    monkeypatch.setattr(simulation, "Run", plain.Run)
    interpreted, chosen_interpreted = play()
    assert_equal(compiled, interpreted)
    assert chosen == chosen_interpreted
