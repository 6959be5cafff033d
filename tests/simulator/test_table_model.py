"""Iteration times composed from a table agree with the operator model that it was built from."""

from __future__ import annotations

import pytest

from inferencegym.errors import InvalidConfigError
from simulator.hardware.operators import Chunk
from simulator.hardware.sources import engine_of, source_of
from simulator.hardware.table_model import table_model
from simulator.hardware.tables import tables_of

CARDS = ("a100-40gb", "a100-80gb", "h100-llama-3.1-8b")
DECODES = [(1, 500), (8, 1_000), (16, 4_000), (32, 8_000), (64, 2_000), (32, 16_000)]
MIXED = [
    (16, 2_000, (Chunk(512, 2_000),)),
    (16, 2_000, (Chunk(2_000, 8_000),)),
    (16, 2_000, (Chunk(1_000), Chunk(1_000, 500))),
    (0, 0, (Chunk(2_048),)),
    (0, 0, (Chunk(100, 12_000),)),
]


@pytest.mark.parametrize("card", CARDS)
def test_decode_iterations_are_equal_and_prefill_is_near(card: str) -> None:
    tables = tables_of(card)
    tier = tables.tiers[0]
    built_from, composed = source_of(tables.meta).operators(tier, engine_of(tables.meta)), table_model(tables, tier)
    for n, context in DECODES:
        assert composed.step_ms(n, context) == pytest.approx(built_from.step_ms(n, context), rel=0.005)
    for n, context, chunks in MIXED:
        assert composed.step_ms(n, context, chunks) == pytest.approx(built_from.step_ms(n, context, chunks), rel=0.21)


def test_a_table_says_nothing_of_drafts() -> None:
    with pytest.raises(InvalidConfigError, match="draft_tokens must be 0"):
        table_model(tables_of("a100-40gb"), "FP16").step_ms(4, 100.0, draft_tokens=2)
