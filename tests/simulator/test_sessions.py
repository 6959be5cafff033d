"""Agent sessions in the discrete-event engine: the cap, vLLM's prefix cache, counts checked by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from env.rollouts.tasks import ENGINE_RULES
from inferencegym.errors import InvalidConfigError
from simulator.events.fleet import Fleet
from simulator.events.requests import Requests, Sessions
from simulator.events.simulation import SessionRun
from simulator.hardware.table_model import table_model
from simulator.hardware.tables import tables_of

TABLES = tables_of("a100-40gb")
FLEET = Fleet(table_model(TABLES, "FP16"), 256, 10_000, **ENGINE_RULES)  # blocks of 16 tokens


def sessions(*turns: list[tuple[int, int, float]], shared_tokens: int = 0, **columns: Any) -> Sessions:
    """Sessions of turns (new tokens, answer, seconds of the tool)."""
    prompts, answers, tools = [], [], []
    for session in turns:
        context = 0
        for new, answer, tool_s in session:
            prompts.append(context + new)
            answers.append(answer)
            tools.append(tool_s)
            context += new + answer
    n = len(prompts)
    arrival_s = np.repeat(columns.pop("arrival_s", np.zeros(len(turns))), [len(session) for session in turns])
    requests = Requests(arrival_s, np.array(prompts), np.array(answers), columns.pop("priority", None))
    first = np.concatenate(([0], np.cumsum([len(session) for session in turns])))
    gated = columns.pop("gated", np.ones(len(turns), dtype=bool))
    assert n == first[-1]
    return Sessions(requests, first, np.array(tools), gated, shared_tokens)


def played(run: SessionRun, cap: int, seconds: int = 10_000) -> SessionRun:
    second = 0
    while not run.over and second < seconds:
        second += 1
        run.play(cap, second)
    return run


def test_a_session_alone_computes_only_what_is_new_and_its_last_block() -> None:
    run = played(SessionRun(FLEET, sessions([(100, 20, 1.0), (50, 10, 1.0)])), 1)
    state = run.state
    # After the first turn 119 tokens are computed: 7 whole blocks of 16. The second prompt has 170 tokens.
    assert (state.queried_tokens, state.hit_tokens) == (100 + 170, 112)
    assert state.prefilled_tokens == 100 + (170 - 112)
    assert (state.n_turns, state.n_over, state.batch_tokens) == (2, 1, 30)


def test_a_prompt_that_is_cached_whole_computes_its_last_block() -> None:
    # 49 tokens are computed after the first turn, and the second prompt adds none that fills a block: 48 + 2.
    run = played(SessionRun(FLEET, sessions([(48, 2, 0.5), (0 + 14, 1, 0.5)])), 1)
    assert run.state.hit_tokens == 48


def test_contexts_that_do_not_fit_together_are_evicted_in_a_circle() -> None:
    long = [(3_000, 8, 0.1), (500, 8, 0.1), (500, 8, 0.1)]
    pool = replace(FLEET, kv_pool_tokens=9_000)
    together = played(SessionRun(pool, sessions(*[long] * 4)), 4).state
    two = played(SessionRun(pool, sessions(*[long] * 4)), 2).state
    assert two.prefilled_tokens == pytest.approx(4 * 4_000, rel=0.03)
    assert together.prefilled_tokens > 1.5 * two.prefilled_tokens
    assert two.now_ms < together.now_ms


def test_the_context_that_was_freed_first_goes_first_and_its_last_blocks_before_the_others() -> None:
    # Two contexts of 1,000 tokens (62 whole blocks each); a third needs 57 blocks more than are empty.
    tools = 5.0
    run = SessionRun(
        replace(FLEET, kv_pool_tokens=16 * 150),
        sessions(
            [(1_000, 1, tools), (1_000, 1, tools)],
            [(1_000, 1, tools), (1_000, 1, tools)],
            [(16 * 83 - 1, 1, tools)],
            arrival_s=np.array([0.0, 1.0, 2.0]),
        ),
    )
    run.play(3, 4.0)
    free = run.simulation.arrays["free_blocks"]
    assert free[:2].tolist() == [150 - 83 - 62, 62]
    assert run.state.listed_blocks == 5 + 62 + 82  # of the third, 1,327 tokens are computed


def test_the_cap_pauses_the_session_that_started_last_and_brings_the_oldest_back_first() -> None:
    session = [(64, 4, 2.0)] * 5
    run = SessionRun(FLEET, sessions(*[session] * 4))
    run.play(3, 1.0)
    arrays = run.simulation.arrays
    assert arrays["flying"].tolist() == [1, 1, 1, 0]
    run.play(1, 2.0)
    assert arrays["flying"].tolist() == [1, 0, 0, 0]
    assert (run.state.in_flight, run.state.n_paused) == (1, 2)
    run.play(2, 3.0)
    assert arrays["flying"].tolist() == [1, 1, 0, 0]
    played(run, 4)
    assert (run.state.n_over, run.state.n_paused, run.state.in_flight) == (4, 0, 0)


def test_a_turn_longer_than_the_pool_ends_its_session_and_is_counted() -> None:
    run = played(SessionRun(FLEET, sessions([(64, 4, 0.1), (20_000, 4, 0.1)], [(64, 4, 0.1)])), 1)
    assert (run.state.n_refused_sessions, run.state.n_over) == (1, 1)


def test_sessions_without_a_cap_start_when_they_arrive() -> None:
    gated = np.array([True, True, False])
    run = SessionRun(FLEET, sessions(*[[(64, 40, 1.0)]] * 3, gated=gated))
    run.play(1, 0.01)
    assert run.simulation.arrays["flying"].tolist() == [1, 0, 1]
    assert run.state.in_flight == 1


def test_a_shared_prompt_is_computed_once_in_whole_blocks_and_takes_its_part_of_the_pool() -> None:
    # Ten blocks of 16 are shared; the last four tokens of the system prompt are a part of each conversation.
    run = played(SessionRun(FLEET, sessions(*[[(100, 20, 0.1)]] * 3, shared_tokens=164)), 1)
    assert (run.state.queried_tokens, run.state.hit_tokens) == (3 * 264, 2 * 160)
    assert run.state.prefilled_tokens == 264 + 2 * 104
    assert run.simulation.arrays["pool_blocks"][0] == 10_000 // 16 - 10


@pytest.mark.parametrize(
    "change", [{"replicas": 2}, {"disaggregated": True}], ids=["two replicas", "a GPU for prefill"]
)
def test_sessions_need_one_replica(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfigError, match="one replica"):
        SessionRun(replace(FLEET, **change), sessions([(10, 1, 0.0)]))


def test_sessions_must_have_turns_and_be_in_order() -> None:
    good = sessions([(10, 1, 0.0)], [(10, 1, 0.0)])
    with pytest.raises(InvalidConfigError, match="turn"):
        replace(good, first_turn=np.array([0, 0, 2]))
    with pytest.raises(InvalidConfigError, match="order of arrival"):
        sessions([(10, 1, 0.0)], [(10, 1, 0.0)], arrival_s=np.array([1.0, 0.0]))


TURN = st.tuples(st.integers(1, 700), st.integers(1, 40), st.floats(0.0, 3.0))


@settings(deadline=None, max_examples=60)
@given(
    turns=st.lists(st.lists(TURN, min_size=1, max_size=5), min_size=1, max_size=8),
    caps=st.lists(st.integers(1, 10), min_size=1, max_size=10),
    pool_blocks=st.integers(100, 400),
)
def test_whatever_the_caps_every_session_is_served_whole_and_no_block_is_held_twice(
    turns: list[list[tuple[int, int, float]]], caps: list[int], pool_blocks: int
) -> None:
    load = sessions(*turns)
    run = SessionRun(replace(FLEET, kv_pool_tokens=16 * pool_blocks), load)
    second = 0
    while not run.over:
        run.play(caps[second % len(caps)], second + 1)
        second += 1
        arrays, state = run.simulation.arrays, run.state
        assert state.listed_blocks == arrays["free_blocks"].sum() <= pool_blocks
        assert state.in_flight == arrays["flying"].sum()
        assert 0 <= state.n_paused <= len(load)
        assert second < 2_000
    state = run.state
    refused = state.n_refused_sessions
    assert state.n_over + refused == len(load)
    answers = load.turns.output_tokens.sum()
    assert state.batch_tokens == answers if not refused else state.batch_tokens < answers
    assert 0 <= state.hit_tokens <= state.queried_tokens
