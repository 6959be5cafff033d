"""The compiled loop of the discrete-event engine: times of its models, interpreted runs, requests added in a run."""

from __future__ import annotations

import dataclasses
import gc
import importlib.util
import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from simulator.events import loop, simulation
from simulator.events.fleet import Fleet
from simulator.events.requests import IntArray, Outcome, Requests
from simulator.events.simulation import SessionRun, Simulation, serve
from simulator.hardware.catalogue import table_path
from simulator.hardware.measured import spec_acceptance
from simulator.hardware.measured_model import MeasuredModel
from simulator.hardware.operators import Chunk, OperatorModel
from simulator.hardware.sources import operators_of
from simulator.hardware.tables import load_tables
from tests.simulator.test_discrete_event import CHUNKED, ROOMY
from tests.simulator.test_engine_fit import known
from tests.simulator.test_sessions import sessions


class Asked(OperatorModel):
    """A model without a closed form for prefill attention: equal chunks share a launch."""

    def __init__(self) -> None:
        super().__init__("FP16", CHUNKED.profile, 32, 131072.0)

    def linear_ms(self, rows: int) -> float:
        return CHUNKED.linear_ms(rows)

    def attention_row(self, n_decode: int) -> list[float]:
        return CHUNKED.attention_row(n_decode)

    def prefill_attention_ms(self, chunks: Sequence[Chunk]) -> float:
        return sum(0.3 + 1e-4 * chunk.tokens for chunk in set(chunks))

    def head_ms(self, rows: int) -> float:
        return CHUNKED.head_ms(rows)


SHIPPED = operators_of(load_tables(table_path("h100-llama-3.1-8b")))[0]
MODELS = {"curves": CHUNKED, "pairs": known(), "listed": SHIPPED, "asked": Asked()}


@pytest.mark.parametrize("draft_tokens", [0, 4])
@pytest.mark.parametrize("form", MODELS)
def test_an_iteration_takes_the_time_that_the_model_gives(form: str, draft_tokens: int) -> None:
    model = MODELS[form]
    assert model.loop_terms().prefill == form
    acceptance = spec_acceptance()[4]
    load = Requests(np.zeros(3), np.array([30_000, 100, 100]), np.array([40, 60, 80]))
    simulation = Simulation(Fleet(model, 8, ROOMY, draft_tokens=draft_tokens, acceptance=acceptance), load)
    times = []
    while simulation.state.n_events:
        simulation.run_until(np.nextafter(simulation.state.event_ms[0], np.inf))
        replica = simulation.replicas[0]
        n = replica.n
        chunks = [
            Chunk(int(tokens), int(simulation.arrays["done"][request]))
            for request, tokens in zip(
                simulation.arrays["chunk_request"][0, : simulation.arrays["n_chunks"][0]],
                simulation.arrays["chunk_tokens"][0],
                strict=False,
            )
        ]
        if n or chunks:
            need = simulation.arrays["need"][simulation.arrays["chunk_request"][0, : len(chunks)]]
            n_first = sum(int(sum(chunk) == all_of_it) for chunk, all_of_it in zip(chunks, need, strict=True))
            context = int(replica.tokens.sum()) / n if n else 0.0
            expected = model.step_ms(n, context, chunks, draft_tokens, n_first)
            times.append((simulation.arrays["iteration_ms"][0], expected))
    assert len(times) > 15
    assert [measured for measured, _ in times] == [expected for _, expected in times]


def test_a_prompt_in_one_piece_beyond_the_rows_that_are_kept_takes_the_models_time() -> None:
    profile = dataclasses.replace(CHUNKED.profile, scheduler="prefill_first")
    whole = MeasuredModel(CHUNKED.card, "FP16", profile)
    n = np.array([simulation.LOOKED_UP_ROWS - 1, simulation.LOOKED_UP_ROWS, 12_000, 20_000])
    out = serve(Fleet(whole, 1, ROOMY), Requests(100.0 * np.arange(4), n, np.ones(4, int)))
    assert out.ttft_ms() == pytest.approx([whole.step_ms(0, 0.0, [Chunk(int(each))]) for each in n], rel=1e-9)


def play() -> tuple[Outcome, IntArray]:
    """The outcome and gaps of two replicas, drafts, a pool that preempts, a restart and a replica that is added."""
    rng = np.random.default_rng(3)
    n = 80
    load = Requests(
        np.sort(rng.uniform(0, 3.0, n)), rng.integers(1, 900, n), rng.integers(1, 200, n), rng.integers(0, 3, n)
    )
    profile = dataclasses.replace(CHUNKED.profile, async_scheduling=True, request_ms=2.0, token_ms=0.05)
    model = MeasuredModel(CHUNKED.card, "FP16", profile)
    limits = {"restart_ms": 500.0, "start_ms": 300.0, "queue_limit": 40}
    fleet = Fleet(model, 16, 4_000, 2, 2, spec_acceptance()[2], **limits, server=True)
    playing = Simulation(fleet, load, 5)
    playing.run_until(1_000.0)
    playing.reconfigure(dataclasses.replace(fleet, disaggregated=True, replicas=3), {"FP16": 4_000})
    return playing.run(), playing.arrays["gaps"]


def play_sessions() -> list[int]:
    """Agent sessions that evict each other and are preempted, under a cap that changes."""
    run = SessionRun(Fleet(CHUNKED, 16, 6_000, spare_tokens=0, vllm_refill=True), sessions(*[[(700, 60, 0.2)] * 4] * 6))
    seconds = 0
    while not run.over:
        seconds += 1
        run.play(6 - seconds % 4, seconds)
    state = run.state
    return [seconds, state.prefilled_tokens, state.hit_tokens, state.iterations, state.n_preempted]


def test_compiled_and_interpreted_runs_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Path(str(loop.__file__)).with_name("loop.py")
    spec = importlib.util.spec_from_file_location("interpreted_loop", source)
    assert spec is not None
    assert spec.loader is not None
    plain = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plain)
    (compiled, gaps), compiled_sessions = play(), play_sessions()
    assert compiled.preemptions.sum() > 0
    assert compiled_sessions[-1] > 0
    monkeypatch.setattr(simulation, "Loop", plain.Loop)
    monkeypatch.setattr(simulation, "Run", plain.Run)
    interpreted, plain_gaps = play()
    assert np.array_equal(gaps, plain_gaps)
    for field in dataclasses.fields(compiled):
        one, other = (getattr(outcome, field.name) for outcome in (compiled, interpreted))
        assert np.array_equal(one, other, equal_nan=True), field.name
    assert play_sessions() == compiled_sessions


def test_requests_submitted_in_a_run_are_served_as_if_they_had_been_known() -> None:
    rng = np.random.default_rng(8)
    arrival_s, prompt, output = np.sort(rng.uniform(0, 4.0, 60)), rng.integers(1, 900, 60), rng.integers(1, 200, 60)
    fleet = Fleet(CHUNKED, 8, 6_000, 2)
    known_before = serve(fleet, Requests(arrival_s, prompt, output))
    early = arrival_s < 2.0
    parts = [Requests(arrival_s[some], prompt[some], output[some]) for some in (early, ~early)]
    playing = Simulation(fleet, parts[0])
    playing.run_until(1_900.0)
    playing.submit(parts[1])
    assert np.array_equal(playing.run().finish_s, known_before.finish_s)


def test_requests_are_served_in_order_of_arrival_in_whichever_order_they_are_given() -> None:
    rng = np.random.default_rng(4)
    n = 60
    arrival_s = np.repeat(np.sort(rng.uniform(0, 3.0, n // 3)), 3)
    load = Requests(arrival_s, rng.integers(1, 900, n), rng.integers(1, 200, n))
    order = (3 * rng.permutation(n // 3)[:, None] + np.arange(3)).ravel()  # simultaneous requests keep their order
    mixed = Requests(load.arrival_s[order], load.prompt_tokens[order], load.output_tokens[order])
    fleet = Fleet(CHUNKED, 4, 6_000, 2)
    assert np.any(np.diff(mixed.arrival_s) < 0)
    assert np.array_equal(serve(fleet, mixed).finish_s, serve(fleet, load).finish_s[order])


@pytest.mark.parametrize("block_tokens", [16, 24])
def test_the_pool_holds_whole_blocks_of_every_sequence(block_tokens: int) -> None:
    load = Requests(np.zeros(5), np.array([15, 16, 17, 100, 333]), np.full(5, 50))
    playing = Simulation(Fleet(CHUNKED, 8, ROOMY, block_tokens=block_tokens), load)
    while playing.replicas[0].n < 5:
        playing.run_until(playing.state.now_ms + 1.0)
    tokens = playing.replicas[0].tokens.tolist()
    assert playing.loop.held_blocks(0) == sum(-(-each // block_tokens) for each in tokens)


def test_counts_of_replicas_follow_restarts_additions_and_removals() -> None:
    rng = np.random.default_rng(9)
    load = Requests(np.sort(rng.uniform(0, 8.0, 200)), rng.integers(1, 900, 200), rng.integers(1, 200, 200))
    fleet = Fleet(CHUNKED, 8, 6_000, 3, restart_ms=400.0, start_ms=300.0)
    playing = Simulation(fleet, load)
    seen = set()
    for second, (replicas, apart) in enumerate([(3, False), (5, True), (2, True), (2, False), (4, False), (1, True)]):
        playing.reconfigure(dataclasses.replace(fleet, replicas=replicas, disaggregated=apart), {"FP16": 6_000})
        for tenth in range(1, 11):
            playing.run_until(1_000.0 * second + 100.0 * tenth)
            there = [each for each in playing.replicas if not each.gone]
            counts = len([each for each in there if not each.down]), len(there), sum(r.disaggregated for r in there)
            state = playing.state
            assert (state.n_up, state.n_there, state.n_prefill_gpus) == counts
            assert playing.running() == sum(each.in_flight() for each in playing.replicas)
            seen.add(counts)
    assert len(seen) > 5


def test_a_run_is_freed_without_waiting_for_the_garbage_collector() -> None:
    gc.disable()
    try:
        playing = Simulation(Fleet(CHUNKED, 8, ROOMY), Requests(np.zeros(2), np.array([10, 10]), np.array([5, 5])))
        playing.run()
        left = weakref.ref(playing)
        del playing
        assert left() is None
    finally:
        gc.enable()
