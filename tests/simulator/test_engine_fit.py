"""Iteration times fitted to what clients see of a known engine in virtual time, and loads that do not show them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from inferencegym.errors import DataFormatError, InvalidConfigError
from inferencegym.models import ServeAction
from live.driver import EngineRequest
from live.engines.engine import Orders
from live.engines.simulated import SimulatedEngine
from simulator.events.fleet import Fleet
from simulator.events.requests import Requests
from simulator.events.simulation import serve
from simulator.hardware.engine_times import EngineSource, EngineTimes, engine_profile
from simulator.hardware.operators import EXTRAPOLATED, INTERPOLATED, MODELLED, Chunk
from simulator.hardware.sources import engine_of, reported_gb, source_of
from simulator.hardware.tables import load_tables
from simulator.offline.engine_fit import EngineFit, TimedRequests, fit_engine_times, replay_error
from simulator.offline.table import build_table
from simulator.whatif import serve_requests, steady_requests
from tests.engine_standin import Law, serve_virtually
from tests.known_engine import FACTS, TIMES, WAY_MS, engine_tables, known


def law(times: EngineTimes) -> Law:
    """Seconds of an iteration of an engine with these times, written out."""

    def seconds(decoding: int, context: int, prompts: list[int]) -> float:
        rows, sampled = decoding + sum(prompts), decoding + len(prompts)
        pieces = zip(times.ramp_ms, times.knots, (*times.knots[1:], np.inf), strict=True)
        ramps = sum(ms * max(0, min(rows, high) - low) for ms, low, high in pieces)
        pairs = sum(p * p / 2 for p in prompts)
        total_ms = times.step_ms + ramps + times.sequence_ms * sampled + times.context_ms * context
        return (total_ms + times.attention_ms * pairs) / 1e3

    return seconds


def loop(
    clients: int, prompt: int, output: int, times: EngineTimes = TIMES, slower: float = 1.0, per_client: int = 3
) -> TimedRequests:
    """A closed loop on the known engine as its clients see it, half a millisecond of jitter included."""
    rng = np.random.default_rng([clients, prompt])
    n = max(6, per_client * clients)
    lengths = [tuple(int(rng.integers(mean // 2, 3 * mean // 2)) for mean in (prompt, output)) for _ in range(n)]
    seconds = law(times)
    served = serve_virtually(lambda *work: slower * seconds(*work), lengths, clients, WAY_MS / 1e3)
    token_s = [np.array(r.token_s) + WAY_MS / 2e3 + np.sort(rng.exponential(5e-4, len(r.token_s))) for r in served]
    token_s = [np.maximum.accumulate(each) for each in token_s]
    return TimedRequests(
        f"{clients} x {prompt}/{output}",
        np.array([r.sent_s for r in served]),
        np.array([each[0] for each in token_s]),
        np.array([each[-1] for each in token_s]),
        np.array([float(r.prompt) for r in served]),
        np.array([float(r.goal) for r in served]),
        clients,
        token_s,
    )


def load(times: EngineTimes = TIMES) -> list[TimedRequests]:
    return [loop(n, *shape, times) for n in (1, 2, 4, 8, 16) for shape in ((32, 64), (400, 32))]


@pytest.fixture(scope="module")
def fit() -> EngineFit:
    return fit_engine_times(load(), FACTS.max_batched_tokens)


def test_the_coefficients_of_a_known_engine_are_recovered(fit: EngineFit) -> None:
    found = fit.times
    assert found.step_ms == pytest.approx(TIMES.step_ms, rel=0.02)
    # A decoding sequence pays for its row and for its sampled token, a prompt token for its row.
    assert found.rows_ms(1) + found.sequence_ms == pytest.approx(0.85, rel=0.03)
    assert found.rows_ms(300) == pytest.approx(300 * 0.6, rel=0.03)
    assert found.context_ms == pytest.approx(TIMES.context_ms, rel=0.1)
    assert found.attention_ms == pytest.approx(TIMES.attention_ms, rel=0.3)
    assert fit.ttft_offset_ms == pytest.approx(WAY_MS, abs=1.0)
    assert found.most_sequences == 16
    assert fit.median_error < 0.01
    assert fit.p90_error < 0.02


def test_a_row_that_costs_more_beyond_a_batch_is_seen() -> None:
    # Up to 64 rows hide behind the weights' streaming; beyond, each costs a whole millisecond.
    bent = replace(TIMES, knots=(0.0, 64.0), ramp_ms=(0.05, 1.0), attention_ms=0.0, context_ms=0.0)
    found = fit_engine_times(load(bent), FACTS.max_batched_tokens).times
    assert found.knots == (0.0, 64.0)
    assert found.step_ms + found.rows_ms(16) + 16 * found.sequence_ms == pytest.approx(12.0 + 16 * 0.3, rel=0.05)
    assert found.rows_ms(400) == pytest.approx(64 * 0.05 + 336, rel=0.1)


def test_a_long_phase_weighs_no_more_than_a_short_one() -> None:
    # Two phases alike but for their pace, the slower one with forty times the requests: the fit is between them.
    first, *others = load()
    assert len(first.sent_s) == 6
    longer = loop(1, 32, 64, slower=1.2, per_client=240)
    short, both = (
        fit_engine_times(each, FACTS.max_batched_tokens).times for each in (load(), [first, longer, *others])
    )
    alone, between = (found.step_ms + found.rows_ms(1) + found.sequence_ms for found in (short, both))
    assert 1.02 < between / alone < 1.12


def test_the_head_and_its_sampled_tokens_cost_in_proportion_to_their_number() -> None:
    model = known()
    assert model.head_ms(7) == pytest.approx(7 * TIMES.sequence_ms)
    assert model.head_ms(0) == 0.0


def test_the_fitted_engine_plays_a_load_that_it_has_not_seen(fit: EngineFit) -> None:
    rng = np.random.default_rng(5)
    requests = Requests(np.cumsum(rng.exponential(0.4, 60)), rng.integers(20, 500, 60), rng.integers(8, 90, 60))
    seen = serve(Fleet(known(), 64, FACTS.pool_tokens()), requests)
    phase = TimedRequests(
        "Poisson",
        seen.arrival_s,
        seen.first_token_s + WAY_MS / 1e3,
        seen.finish_s + WAY_MS / 1e3,
        requests.prompt_tokens.astype(float),
        requests.output_tokens.astype(float),
    )
    model = EngineSource("fitted", fit.times, FACTS).operators(
        "served", engine_profile("fitted", FACTS, fit.ttft_offset_ms, "")
    )
    errors = replay_error(phase, model, FACTS).errors
    assert abs(errors["ttft_p50_ms"]) < 0.08
    assert abs(errors["tpot_p50_ms"]) < 0.03
    assert abs(errors["output_tokens_per_s"]) < 0.02


def test_more_work_never_takes_less_time(fit: EngineFit) -> None:
    model = EngineSource("fitted", fit.times, FACTS).operators("served", engine_profile("fitted", FACTS, 0.0, ""))
    for n in (0, 1, 7, 64, 500):
        for tokens in (1, 100, 2000):
            least = model.step_ms(n, 100.0, [Chunk(tokens)])
            assert least <= model.step_ms(n + 1, 100.0, [Chunk(tokens)])
            assert least <= model.step_ms(n, 200.0, [Chunk(tokens)])
            assert least <= model.step_ms(n, 100.0, [Chunk(tokens + 1)])
            assert least <= model.step_ms(n, 100.0, [Chunk(tokens, 50)])


def test_the_table_plays_the_engine_and_makes_its_source_again(fit: EngineFit, tmp_path: Path) -> None:
    source, profile = EngineSource("mine", fit.times, FACTS), engine_profile("mine", FACTS, fit.ttft_offset_ms, "here")
    path = build_table(tmp_path / "mine.parquet", source, profile, saturated=False)
    tables = load_tables(path)
    again = source_of(tables.meta)
    assert isinstance(again, EngineSource)
    assert (again.times, again.facts, engine_of(tables.meta)) == (fit.times, FACTS, profile)
    # The whole budget is the engine's own pool, to the token, beside its weights.
    whole = tables.columns["kv_capacity_tokens"][0, :, -1]
    assert set(whole.ravel()) == {FACTS.pool_tokens()}
    pool_gb = FACTS.pool_tokens() * 8192 / 1e9
    assert tables.columns["gpu_mem_gb"][0, 0, -1, 0, 0] == pytest.approx(0.5 + pool_gb, rel=1e-5)
    assert reported_gb(tables.meta) == pytest.approx((0.5 + pool_gb) / 0.9, rel=1e-5)
    assert tables.tiers == ("served",)
    # What was measured says so; what was not says that.
    assert source.support("served", 8, 400, 0) == INTERPOLATED
    assert source.support("served", 8, 400, 2) == MODELLED
    assert source.support("served", 17, 400, 0) == source.support("served", 8, 601, 0) == EXTRAPOLATED
    # The dynamics that policies are trained on, against the engine itself: 3 requests per second of 200 + 60 tokens.
    requests = steady_requests(1.5, 150, 200, 60, seed=1)
    said = serve_requests(ServeAction.from_dict({"kv_budget": 1.0, "batch_size": 64}), requests, tables).report()
    truth = serve(
        Fleet(known(), 64, FACTS.pool_tokens()),
        Requests(requests.arrival_s, requests.prompt_tokens.astype(np.int64), requests.output_tokens.astype(np.int64)),
    )
    assert said.tpot_p50_ms == pytest.approx(float(np.median(truth.tpot_ms())), rel=0.1)
    assert said.ttft_p50_ms == pytest.approx(float(np.median(truth.ttft_ms())), rel=0.15)
    assert said.output_tokens_per_s == pytest.approx(truth.tokens_per_s(), rel=0.05)


def test_a_load_that_does_not_tell_the_terms_apart_is_refused_with_every_reason() -> None:
    with pytest.raises(DataFormatError, match="sequences at once") as refused:
        fit_engine_times([loop(4, 32, 64), loop(4, 32, 40), loop(4, 33, 50)], 2048)
    assert "no request that was alone" in str(refused.value)
    with pytest.raises(DataFormatError, match="2 phases of load, where 3"):
        fit_engine_times([loop(1, 32, 64), loop(8, 400, 40)], 2048)
    with pytest.raises(DataFormatError, match="where 12 are the least"):
        fit_engine_times([replace_outputs(phase, 2) for phase in load()[:3]], 2048)


def test_answers_that_came_at_once_are_refused() -> None:
    together = [replace(phase, first_token_s=phase.finish_s, token_s=()) for phase in load()]
    with pytest.raises(DataFormatError, match="does not stream"):
        fit_engine_times(together, 2048)


def test_an_engine_whose_time_does_not_follow_from_its_load_is_refused() -> None:
    slower = {1: (1.0, 6.0), 2: (0.3, 9.0), 4: (0.2, 5.0), 8: (0.1, 0.8)}
    shapes = ((32, 64), (400, 32))
    changing = [loop(n, *shape, slower=x) for n, each in slower.items() for shape, x in zip(shapes, each, strict=True)]
    with pytest.raises(DataFormatError, match="off at the median, where 35%"):
        fit_engine_times(changing, 2048)


def test_repeats_that_differ_are_said() -> None:
    warned = fit_engine_times([*load(), loop(1, 32, 64, slower=1.4)], 2048).warnings
    assert len(warned) == 1
    assert "1 x 32/64" in warned[0]


def test_times_out_of_order_are_refused() -> None:
    phase = load()[0]
    with pytest.raises(DataFormatError, match="in this order"):
        replace(phase, first_token_s=phase.finish_s + 1.0)
    with pytest.raises(DataFormatError, match="as many times"):
        replace(phase, token_s=phase.token_s[:-1])


def replace_outputs(phase: TimedRequests, tokens: int) -> TimedRequests:
    return replace(phase, output_tokens=np.full(len(phase.sent_s), float(tokens)), token_s=())


@pytest.mark.parametrize(("prompt_tokens", "counted"), [(120, (184, 18)), (128, (193, 8))])
def test_requests_that_start_as_in_vllm_are_preempted_as_often(prompt_tokens: int, counted: tuple[int, int]) -> None:
    """What vLLM 0.32 counted: 32 requests at once, of which the first is alone in its first iteration, and 26 blocks.

    As the first sequences end, vLLM starts those that it had preempted and new ones in one iteration, which then lack
    the next block. Where new ones wait for the iteration after, fewer are preempted.
    """
    arrival_s = np.where(np.arange(32) == 0, 0.0, 1e-3)
    burst = Requests(arrival_s, np.full(32, prompt_tokens), np.full(32, 64))
    fleet = Fleet(known(), 32, 26 * 128, block_tokens=128, spare_tokens=0)
    later, as_vllm = (serve(replace(fleet, vllm_refill=each), burst) for each in (False, True))
    assert (as_vllm.iterations, as_vllm.preemptions.sum()) == counted
    assert later.preemptions.sum() != as_vllm.preemptions.sum()


def test_a_measured_engine_holds_whole_blocks(tmp_path: Path) -> None:
    """Prompts of 100, 127 and 128 tokens, each with its first token, take 1, 1 and 2 of ten blocks of 128."""
    engine = SimulatedEngine(engine_tables(tmp_path, replace(FACTS, block_tokens=128, pool_blocks=10)))
    load = engine.load([EngineRequest(0.0, prompt, 100) for prompt in (100, 127, 128)])
    first_s = 0.0
    while not all(timing.tokens for timing in load.timings):
        load.advance(first_s := first_s + 1e-3)
    assert [timing.tokens for timing in load.timings] == [1, 1, 1]
    assert engine.read().kv_occupancy == pytest.approx(4 / 10)
    # Half of the pool is five blocks: with their 30th token the three hold 2 each, and the last one has to go.
    engine.set(Orders({"kv_budget": 0.5}))
    load.advance(first_s + 30 * law(TIMES)(3, 400, []))
    reading = engine.read()
    assert (reading.preemptions, reading.running_requests) == (1.0, 2.0)
    assert reading.kv_occupancy == pytest.approx(4 / 5)


def test_the_cache_is_handed_out_in_blocks_of_the_engines_size() -> None:
    requests = Requests(np.zeros(2), np.array([100, 100]), np.array([60, 60]))
    # Two prompts of 100 fit 384 tokens either way; at 128 tokens each takes its second block, and there is one.
    small, large = (serve(Fleet(known(), 8, 384, block_tokens=size), requests).preemptions.sum() for size in (16, 128))
    assert (small, large) == (0, 1)
    # A prompt that fills its block starts beside another where no token is kept free, and then one has to go.
    full = Requests(np.zeros(2), np.array([128, 128]), np.array([8, 8]))
    kept, none = (
        serve(Fleet(known(), 8, 384, block_tokens=128, spare_tokens=n), full).preemptions.sum() for n in (1, 0)
    )
    assert (kept, none) == (0, 1)
    with pytest.raises(InvalidConfigError, match="at least 128"):
        Fleet(known(), 8, 100, block_tokens=128)
