"""The discrete-event engine: cases small enough to follow by hand, and laws that hold for any load."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferencegym.errors import InvalidConfigError
from inferencegym.models import ROUTERS, Router
from simulator.events.fleet import Fleet
from simulator.events.requests import Outcome, Requests
from simulator.events.simulation import GAP_MS, Simulation, serve, serve_closed
from simulator.hardware.measured import spec_acceptance
from simulator.hardware.measured_model import MeasuredModel, operator_model
from simulator.hardware.operators import Chunk
from simulator.hardware.profiles import engine, hardware

KERNELS = operator_model("a100-40gb", "FP16", "nofit")
CHUNKED = MeasuredModel(
    hardware("a100-40gb"),
    "FP16",
    dataclasses.replace(engine("a100_40"), step_overhead_ms=0.0, sequence_overhead_ms=0.0, ttft_offset_ms=0.0),
)
PREFILL_FIRST = MeasuredModel(hardware("a100-40gb"), "FP16", dataclasses.replace(engine("nofit"), reserve_output=False))
ROOMY = 160_000


def served(**changes: float) -> MeasuredModel:
    """The chunked engine behind an API server with these changes of its profile."""
    return MeasuredModel(CHUNKED.card, "FP16", dataclasses.replace(CHUNKED.profile, **changes))


SERVED = served(async_scheduling=True, request_ms=2.0, token_ms=0.05)


def requests(*each: tuple[float, int, int], priority: list[int] | None = None) -> Requests:
    """Requests from (arrival s, prompt, output) triples."""
    arrival, prompt, output = zip(*each, strict=True)
    classes = None if priority is None else np.array(priority)
    return Requests(np.array(arrival, float), np.array(prompt), np.array(output), classes)


def test_a_lone_request_takes_its_prefill_and_one_iteration_per_further_token() -> None:
    out = serve(Fleet(CHUNKED, 8, ROOMY), requests((1.0, 100, 3)))
    prefill = CHUNKED.step_ms(0, 0, [Chunk(100)])
    decode = CHUNKED.decode_ms(1, 101) + CHUNKED.decode_ms(1, 102)
    assert out.ttft_ms()[0] == pytest.approx(prefill)
    assert out.tpot_ms()[0] == pytest.approx(decode / 2)
    assert out.finish_s[0] == pytest.approx(1.0 + (prefill + decode) / 1e3)
    assert out.iterations == 3


def test_a_long_prompt_is_prefilled_in_chunks_of_the_token_budget() -> None:
    out = serve(Fleet(CHUNKED, 8, ROOMY), requests((0.0, 5000, 1)))
    chunks = [Chunk(2048), Chunk(2048, 2048), Chunk(904, 4096)]
    expected = sum(CHUNKED.step_ms(0, 0, [chunk], n_first=int(i == 2)) for i, chunk in enumerate(chunks))
    assert out.ttft_ms()[0] == pytest.approx(expected)


def test_chunked_scheduling_decodes_while_it_prefills_and_prefill_first_does_not() -> None:
    load = requests((0.0, 64, 200), (0.5, 6000, 2))
    gap = {}
    for name, model in (("chunked", CHUNKED), ("prefill first", PREFILL_FIRST)):
        gap[name] = serve(Fleet(model, 8, ROOMY), load)
    assert gap["chunked"].tpot_ms()[0] == pytest.approx(gap["prefill first"].tpot_ms()[0], rel=0.05)
    # the long prompt gets its token earlier if nothing else is running
    assert gap["prefill first"].ttft_ms()[1] < gap["chunked"].ttft_ms()[1]


def test_an_output_delay_is_a_part_of_the_next_iteration() -> None:
    late = MeasuredModel(hardware("a100-40gb"), "FP16", dataclasses.replace(PREFILL_FIRST.profile, output_delay=0.5))
    at_once, delayed = (serve(Fleet(m, 8, ROOMY), requests((1.0, 100, 3))) for m in (PREFILL_FIRST, late))
    next_ms = PREFILL_FIRST.decode_ms(1, 101)
    assert delayed.ttft_ms()[0] - at_once.ttft_ms()[0] == pytest.approx(0.5 * next_ms)
    assert delayed.finish_s[0] == at_once.finish_s[0]


def test_with_asynchronous_scheduling_a_request_waits_for_one_iteration_more() -> None:
    prefill = CHUNKED.step_ms(0, 0, [Chunk(100)], n_first=1)
    load = requests((0.0, 100, 20), (prefill / 2e3, 100, 2))  # the second comes while the first is prefilled
    at_once, later = (
        serve(Fleet(served(async_scheduling=is_async), 8, ROOMY, server=True), load) for is_async in (False, True)
    )
    assert at_once.first_token_s[1] * 1e3 == pytest.approx(prefill + CHUNKED.step_ms(1, 101, [Chunk(100)], n_first=1))
    assert later.first_token_s[1] * 1e3 == pytest.approx(
        prefill + CHUNKED.decode_ms(1, 101) + CHUNKED.step_ms(1, 102, [Chunk(100)], n_first=1)
    )
    assert later.first_token_s[0] == at_once.first_token_s[0], "an idle engine starts at once"


@pytest.mark.parametrize(("replicas", "read_ms"), [(1, 6.0), (2, 3.0), (4, 2.0)])
def test_requests_that_arrive_together_share_the_processes_that_read_them(replicas: int, read_ms: float) -> None:
    load = requests((0.0, 100, 1), (0.0, 100, 1), (0.0, 100, 1), (1.0, 100, 1))
    playing = Simulation(Fleet(served(request_ms=2.0), 8, ROOMY, replicas, server=True), load)
    playing.run()
    assert playing.arrays["start_ms"] == pytest.approx([read_ms, read_ms, read_ms, 1002.0])


def test_a_request_that_arrives_during_another_slows_its_reading() -> None:
    # Alone for 1 ms, the first has 1 ms left; sharing until 3 ms it is done; the second then has 1 ms left.
    playing = Simulation(Fleet(served(request_ms=2.0), 8, ROOMY, server=True), requests((0.0, 100, 1), (0.001, 100, 1)))
    playing.run()
    assert playing.arrays["queued_ms"] == pytest.approx([3.0, 4.0])


def test_outputs_are_sent_before_a_request_is_read() -> None:
    end_s = (CHUNKED.step_ms(0, 0, [Chunk(100)], n_first=1) + CHUNKED.decode_ms(1, 101)) / 1e3
    fleet = Fleet(served(request_ms=2.0, token_ms=1.0), 8, ROOMY, server=True)
    playing = Simulation(fleet, requests((0.0, 100, 50), (0.002 + end_s, 100, 1)))
    playing.run()
    assert playing.arrays["queued_ms"][1] - 1e3 * (0.002 + end_s) == pytest.approx(3.0)


def test_the_time_of_a_lone_request_in_the_server_is_part_of_the_offset() -> None:
    known = served(ttft_offset_ms=9.0, request_ms=2.0)
    bare, behind = (
        serve_closed(Fleet(known, 8, ROOMY, server=server), np.full(3, 64), np.full(3, 10), 1)
        for server in (False, True)
    )
    assert behind.ttft_ms() == pytest.approx(bare.ttft_ms())
    assert behind.makespan_s() == pytest.approx(bare.makespan_s() + 0.002)  # the first request is read as well


def test_the_second_request_waits_when_there_is_one_slot() -> None:
    out = serve(Fleet(CHUNKED, 1, ROOMY), requests((0.0, 100, 10), (0.0, 100, 10)))
    assert out.first_token_s[1] > out.finish_s[0]


def test_the_higher_class_is_admitted_first() -> None:
    load = requests((0.0, 100, 50), (0.01, 100, 50), (0.02, 100, 50), priority=[1, 1, 0])
    out = serve(Fleet(CHUNKED, 1, ROOMY), load)
    assert out.first_token_s[2] < out.first_token_s[1]


def test_a_lower_class_that_is_to_start_next_takes_no_prompt_tokens_from_a_higher_one() -> None:
    # The first fills an iteration of 2,048 tokens; the second is to fill the next one when the third comes.
    load = requests((0.0, 2048, 1), (0.001, 2048, 1), (0.002, 100, 1), priority=[1, 1, 0])
    out = serve(Fleet(CHUNKED, 8, ROOMY), load)
    first = CHUNKED.step_ms(0, 0, [Chunk(2048)], n_first=1)
    second = CHUNKED.step_ms(0, 0, [Chunk(100), Chunk(1948)], n_first=1)
    third = CHUNKED.step_ms(0, 0, [Chunk(100, 1948)], n_first=1)
    assert out.first_token_s * 1e3 == pytest.approx([first, first + second + third, first + second])


@pytest.mark.parametrize(
    "fleet", [Fleet(CHUNKED, 2, ROOMY), Fleet(CHUNKED, 8, 1200)], ids=["slots for two", "cache for two"]
)
def test_a_lower_class_that_is_to_start_next_takes_no_room_from_a_higher_one(fleet: Fleet) -> None:
    load = requests((0.0, 500, 20), (0.001, 500, 20), (0.002, 500, 20), priority=[1, 1, 0])
    out = serve(fleet, load)
    assert out.first_token_s[2] < out.finish_s[0] < out.first_token_s[1]


def test_a_full_queue_refuses_the_youngest_of_the_lowest_class() -> None:
    load = requests(*[(0.001 * i, 100, 50) for i in range(6)], priority=[0, 1, 2, 0, 2, 1])
    out = serve(Fleet(CHUNKED, 1, ROOMY, queue_limit=3), load)
    # Request 0 runs; of the five that wait, three may stay: the two of class 2 go, the youngest first.
    assert out.rejected.tolist() == [False, False, True, False, True, False]
    assert np.isfinite(out.finish_s[~out.rejected]).all()


def test_two_replicas_share_a_burst_evenly() -> None:
    load = requests(*[(0.0, 100, 50)] * 16)
    one, two = (serve(Fleet(CHUNKED, 8, ROOMY, replicas=n), load) for n in (1, 2))
    assert two.makespan_s() == pytest.approx(one.makespan_s() / 2, rel=0.05)
    assert np.ptp(two.finish_s) == pytest.approx(0.0, abs=1e-9)


def test_a_cache_that_is_too_small_preempts_and_still_finishes_everything() -> None:
    load = requests(*[(0.0, 100, 200)] * 8)
    tight, roomy = (serve(Fleet(CHUNKED, 8, pool), load) for pool in (1200, ROOMY))
    assert tight.preemptions.sum() > 0
    assert roomy.preemptions.sum() == 0
    assert np.isfinite(tight.finish_s).all()
    assert tight.makespan_s() > roomy.makespan_s()
    assert tight.peak_kv_tokens <= 1200


def test_reserving_outputs_never_preempts() -> None:
    out = serve(Fleet(KERNELS, 8, 1200), requests(*[(0.0, 100, 200)] * 8))
    assert out.preemptions.sum() == 0
    assert np.isfinite(out.finish_s).all()


def test_a_request_larger_than_the_whole_cache_is_refused() -> None:
    out = serve(Fleet(CHUNKED, 8, 1600), requests((0.0, 1500, 200), (0.0, 100, 10)))
    assert out.rejected.tolist() == [True, False]


def test_a_closed_loop_keeps_its_clients_busy() -> None:
    n, clients = 64, 8
    out = serve_closed(Fleet(CHUNKED, clients, ROOMY), np.full(n, 64), np.full(n, 100), clients)
    # Eight sequences decode together; prompts are short, so the rate is close to 8 tokens per iteration.
    assert out.tokens_per_s() == pytest.approx(8e3 / CHUNKED.decode_ms(8, 114), rel=0.05)


def test_the_way_to_the_client_leaves_a_slot_free_between_two_requests() -> None:
    slow = MeasuredModel(CHUNKED.card, "FP16", dataclasses.replace(CHUNKED.profile, ttft_offset_ms=500.0))
    near, far = (serve_closed(Fleet(m, 1, ROOMY), np.full(4, 64), np.full(4, 10), 1) for m in (CHUNKED, slow))
    assert far.makespan_s() == pytest.approx(near.makespan_s() + 3 * 0.5)
    assert far.ttft_ms() == pytest.approx(near.ttft_ms() + 500.0)


def test_accepted_drafts_shorten_a_request_by_the_measured_factor() -> None:
    n = 40
    acceptance = spec_acceptance()[4]
    fleet = Fleet(CHUNKED, 4, ROOMY, draft_tokens=4, acceptance=acceptance)
    out = serve_closed(fleet, np.full(n, 64), np.full(n, 200), 4, seed=1)
    iterations_per_request = out.iterations / n * 4
    assert iterations_per_request == pytest.approx(200 / (1 + sum(acceptance)), rel=0.08)


def test_a_request_with_its_own_acceptance_ignores_that_of_the_fleet() -> None:
    """Of four drafts, each accepted with probability a, a + a^2 + a^3 + a^4 are accepted."""
    n, tokens = 40, 400
    own = np.repeat([1.0, 0.5, 0.0], n)
    load = Requests(3.0 * np.arange(3 * n), np.full(3 * n, 64), np.full(3 * n, tokens), acceptance=own)
    fleet = Fleet(CHUNKED, 1, ROOMY, draft_tokens=4, acceptance=spec_acceptance()[4])
    decode_s = (serve(fleet, load).tpot_ms() * (tokens - 1)).reshape(3, n).mean(axis=1)
    in_a_row, halves, never = decode_s / decode_s[2]
    assert never == 1.0
    assert in_a_row == pytest.approx(1 / 5, rel=0.01)
    assert halves == pytest.approx(1 / (1 + 0.5 + 0.25 + 0.125 + 0.0625), rel=0.02)
    for wrong in (np.full(3 * n, 1.1), np.full(3, 0.5)):
        with pytest.raises(InvalidConfigError, match="acceptance"):
            Requests(load.arrival_s, load.prompt_tokens, load.output_tokens, acceptance=wrong)


def test_a_prefill_gpu_of_its_own_leaves_decoding_undisturbed() -> None:
    load = requests((0.0, 64, 400), *[(0.5 + 0.2 * i, 6000, 2) for i in range(10)])
    together, apart = (serve(Fleet(CHUNKED, 16, ROOMY, disaggregated=d), load) for d in (False, True))
    assert apart.tpot_ms()[0] < 0.75 * together.tpot_ms()[0]


def test_no_pool_however_tight_holds_more_tokens_than_it_has_room_for() -> None:
    # three answers grow in parallel in pools of various sizes (blocks of 16 tokens), until one must be preempted
    load = requests(*[(0.01 * i, 64 + i, 100) for i in range(3)])
    pools = range(192, 560, 16)
    runs = [serve(Fleet(CHUNKED, 4, pool), load) for pool in pools]
    assert all(run.peak_kv_tokens <= pool for pool, run in zip(pools, runs, strict=True))
    assert all(np.isfinite(run.finish_s).all() for run in runs)
    # All three at their longest take 11 blocks each.
    preempted = [int(run.preemptions.sum()) > 0 for run in runs]
    assert preempted == [pool < 33 * 16 for pool in pools]


def test_where_prefill_is_apart_a_long_prompt_holds_up_no_answer_under_way() -> None:
    fleet = Fleet(CHUNKED, 8, ROOMY, disaggregated=True)
    alone = serve(fleet, requests((0.0, 100, 20)))
    beside = serve(fleet, requests((0.0, 100, 20), (0.001, 40_000, 1)))
    assert beside.first_token_s[1] > 2 * alone.finish_s[0], "the long prompt is computed until well after"
    assert beside.finish_s[0] == pytest.approx(alone.finish_s[0])


def test_the_first_token_after_a_disaggregated_prefill_waits_for_the_cache() -> None:
    fleet = Fleet(CHUNKED, 8, ROOMY, disaggregated=True, link_gb_s=10.0)
    out = serve(fleet, requests((0.0, 1000, 5)))
    handover = 1000 * 131072 / 10e9 * 1e3
    assert handover == pytest.approx(13.1, abs=0.01)
    assert out.ttft_ms()[0] == pytest.approx(CHUNKED.step_ms(0, 0, [Chunk(1000)]) + handover)


def test_tokens_per_second_counts_the_share_of_a_request_inside_the_window() -> None:
    out = Outcome(
        arrival_s=np.zeros(2),
        first_token_s=np.array([1.0, np.nan]),
        finish_s=np.array([3.0, np.nan]),
        output_tokens=np.array([100, 50]),
        rejected=np.array([False, True]),
        preemptions=np.zeros(2, int),
        iterations=1,
        busy_ms=1.0,
        peak_kv_tokens=1,
        ttft_offset_ms=0.0,
    )
    assert out.tokens_per_s(2.0, 4.0) == pytest.approx(25.0)
    assert out.makespan_s() == 3.0


def test_a_slot_freed_by_an_answer_of_one_token_goes_to_the_next_request() -> None:
    # Disaggregated, such an answer ends on the link: no iteration of the decode GPU follows that would look for work.
    load = Requests(np.array([0.0, 0.0]), np.array([100, 100]), np.array([1, 1]))
    out = serve(Fleet(CHUNKED, 1, ROOMY, disaggregated=True), load)
    first, second = out.finish_s
    assert second == pytest.approx(2 * first)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32 - 1),
    n=st.integers(1, 60),
    batch_size=st.integers(1, 32),
    replicas=st.integers(1, 3),
    pool=st.integers(900, 6000),
    draft=st.sampled_from([0, 2]),
    disaggregated=st.booleans(),
    chunked=st.booleans(),
    queue_limit=st.sampled_from([None, 0, 5]),
    server=st.booleans(),
)
def test_every_request_is_answered_or_refused_whatever_the_configuration(
    seed: int,
    n: int,
    batch_size: int,
    replicas: int,
    pool: int,
    draft: int,
    disaggregated: bool,
    chunked: bool,
    queue_limit: int | None,
    server: bool,
) -> None:
    rng = np.random.default_rng(seed)
    load = Requests(
        np.sort(rng.uniform(0, 2.0, n)), rng.integers(1, 500, n), rng.integers(1, 200, n), rng.integers(0, 3, n)
    )
    fleet = Fleet(
        SERVED if chunked else PREFILL_FIRST,
        batch_size,
        pool,
        replicas,
        draft,
        spec_acceptance()[2],
        disaggregated,
        queue_limit=queue_limit,
        server=server,
    )
    out = serve(fleet, load, seed)
    playing = Simulation(fleet, load, seed)
    again = playing.run()
    served = ~out.rejected
    assert np.isfinite(out.finish_s[served]).all()
    assert np.isnan(out.finish_s[out.rejected]).all()
    assert (out.arrival_s[served] < out.first_token_s[served]).all()
    assert (out.first_token_s[served] <= out.finish_s[served]).all()
    # Disaggregated: a sequence about to be preempted may exceed the pool by what arrives over the link meanwhile.
    assert disaggregated or out.peak_kv_tokens <= pool
    assert np.array_equal(out.finish_s, again.finish_s, equal_nan=True)
    # Gaps between outputs add up to the time from each request's first token to its last, preemptions included.
    gaps, decoding_s = playing.arrays["gaps"], (out.finish_s - out.first_token_s)[served]
    assert gaps @ GAP_MS == pytest.approx(1e3 * decoding_s.sum(), rel=0.006, abs=0.02 * gaps.sum())
    assert draft or gaps.sum() == (out.output_tokens[served] - 1).sum()


def test_a_long_prompt_beside_a_decoding_request_makes_one_long_gap() -> None:
    playing = Simulation(Fleet(PREFILL_FIRST, 8, ROOMY), requests((0.0, 64, 200), (0.5, 6000, 2)))
    playing.run()
    gaps = playing.arrays["gaps"]
    longest = GAP_MS[np.flatnonzero(gaps)[-1]]
    prefill_ms = PREFILL_FIRST.step_ms(0, 0, [Chunk(6000)])
    assert gaps.sum() == 199 + 1
    assert longest == pytest.approx(prefill_ms + PREFILL_FIRST.decode_ms(2, 3_100), rel=0.02)


def test_impossible_configurations_are_refused() -> None:
    with pytest.raises(InvalidConfigError):
        Fleet(CHUNKED, 0, ROOMY)
    with pytest.raises(InvalidConfigError):
        Fleet(CHUNKED, 1, ROOMY, replicas=0)
    with pytest.raises(InvalidConfigError) as refused:
        Fleet(CHUNKED, 1, 15)
    assert refused.value.field == "kv_pool_tokens"
    for acceptance in ((), (0.5,)):
        with pytest.raises(InvalidConfigError) as refused:
            Fleet(CHUNKED, 1, ROOMY, draft_tokens=2, acceptance=acceptance)
        assert refused.value.field == "draft_tokens"
    for lengths in ((0.0, 0, 5), (0.0, 5, 0)):
        with pytest.raises(InvalidConfigError):
            requests(lengths)
    with pytest.raises(InvalidConfigError):
        Requests(np.zeros(2), np.ones(2, int), np.ones(1, int))
    with pytest.raises(InvalidConfigError):
        serve_closed(Fleet(CHUNKED, 1, ROOMY), np.ones(1, int), np.ones(1, int), 0)


def prompts(n: int, seed: int) -> Requests:
    """Long prompts and short answers at random times."""
    rng = np.random.default_rng(seed)
    return Requests(
        np.cumsum(rng.exponential(0.1, n)), rng.integers(1, 4000, n), rng.integers(1, 60, n), rng.integers(0, 2, n)
    )


def prefilling(replicas: int, prefill_replicas: int | None, **options: int) -> Fleet:
    return Fleet(CHUNKED, 8, 30_000, replicas, disaggregated=True, prefill_replicas=prefill_replicas, **options)


def test_one_prefill_gpu_that_is_shared_by_one_replica_is_its_own() -> None:
    for seed in range(3):
        shared, own = (serve(prefilling(1, x), prompts(60, seed)) for x in (1, None))
        for field in dataclasses.fields(own):
            assert np.array_equal(getattr(shared, field.name), getattr(own, field.name), equal_nan=True), field.name


def test_two_prefill_gpus_of_one_replica_take_two_prompts_at_once() -> None:
    load = requests((0.0, 2048, 2), (0.0, 2048, 2))
    alone = serve(prefilling(1, None), requests((0.0, 2048, 2))).ttft_ms()[0]
    assert serve(prefilling(1, 2), load).ttft_ms() == pytest.approx([alone, alone])
    # One prefill GPU computes both prompts one after the other, whatever the number of replicas that decode.
    for replicas in (1, 2):
        first, second = serve(prefilling(replicas, 1), load).ttft_ms()
        assert first == pytest.approx(alone)
        assert second > 1.8 * alone


def test_the_more_prefill_gpus_the_sooner_the_first_token() -> None:
    load = prompts(200, 1)
    mean_ms = [float(np.mean(serve(prefilling(2, x), load).ttft_ms())) for x in (1, 2, 3, 4)]
    assert mean_ms == sorted(mean_ms, reverse=True)
    # Shared GPUs never leave a prompt waiting while one is idle; a replica's own do.
    assert mean_ms[1] <= float(np.mean(serve(prefilling(2, None), load).ttft_ms()))


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**20),
    replicas=st.integers(1, 4),
    prefill_replicas=st.integers(1, 6),
    pool_tokens=st.integers(300, 9_000),
    router=st.sampled_from(ROUTERS[:4]),
)
def test_every_request_is_answered_once_whatever_the_numbers_of_prefill_gpus_and_replicas(
    seed: int, replicas: int, prefill_replicas: int, pool_tokens: int, router: Router
) -> None:
    fleet = dataclasses.replace(prefilling(replicas, prefill_replicas), kv_pool_tokens=pool_tokens, router=router)
    run = Simulation(fleet, prompts(50, seed))
    out = run.run()
    assert (np.isfinite(out.finish_s) ^ out.rejected).all()
    assert run.state.n_finished + run.state.n_rejected == 50
    assert (run.arrays["line_count"].sum(), run.arrays["transit_blocks"].sum(), run.state.waiting) == (0, 0, 0)
    hours = run.state.prefill_gpu_ms / run.state.replica_ms
    assert hours == pytest.approx(prefill_replicas / replicas)


def test_a_fleet_with_shared_prefill_gpus_keeps_its_size() -> None:
    with pytest.raises(InvalidConfigError, match="only with disaggregated"):
        Fleet(CHUNKED, 8, ROOMY, 2, prefill_replicas=1)
    run = Simulation(prefilling(2, 3), prompts(10, 0))
    with pytest.raises(InvalidConfigError, match="keeps its size"):
        run.reconfigure(prefilling(3, 3), {"FP16": 30_000})
