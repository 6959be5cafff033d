"""The compiled loop of the discrete-event engine: times of its models, interpreted runs, requests added in a run."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from simulator.events import loop, simulation
from simulator.events.fleet import Fleet
from simulator.events.requests import Outcome, Requests
from simulator.events.simulation import SessionRun, Simulation, serve
from simulator.hardware.measured import spec_acceptance
from simulator.hardware.measured_model import MeasuredModel
from simulator.hardware.operators import Chunk, OperatorModel
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


MODELS = {"curves": CHUNKED, "pairs": known(), "asked": Asked()}


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


def play() -> Outcome:
    """Two replicas, drafts, a pool that preempts, a restart and a replica that is added."""
    rng = np.random.default_rng(3)
    n = 80
    load = Requests(
        np.sort(rng.uniform(0, 3.0, n)), rng.integers(1, 900, n), rng.integers(1, 200, n), rng.integers(0, 3, n)
    )
    fleet = Fleet(CHUNKED, 16, 4_000, 2, 2, spec_acceptance()[2], restart_ms=500.0, start_ms=300.0, queue_limit=40)
    playing = Simulation(fleet, load, 5)
    playing.run_until(1_000.0)
    playing.reconfigure(dataclasses.replace(fleet, disaggregated=True, replicas=3), {"FP16": 4_000})
    return playing.run()


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
    compiled, compiled_sessions = play(), play_sessions()
    assert compiled.preemptions.sum() > 0
    assert compiled_sessions[-1] > 0
    monkeypatch.setattr(simulation, "Loop", plain.Loop)
    monkeypatch.setattr(simulation, "Run", plain.Run)
    interpreted = play()
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
