"""KV blocks of measured engines: the fluid model beside the discrete-event reference, and counts made by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from inferencegym.models import ServeAction
from inferencegym.tasks import get_task
from simulator.events.fleet import Fleet
from simulator.events.requests import Outcome
from simulator.events.simulation import serve_closed
from simulator.hardware.tables import tables_of
from simulator.kernel.class_tables import block_tables
from simulator.kernel.serving import params_of
from simulator.whatif import Served, serve_requests, steady_requests
from simulator.workload import load_source
from tests.known_engine import FACTS, engine_tables, known

CLIENTS, PROMPT, OUTPUT = 48, 6, 30


def closed_loop(folder: Path, block_tokens: int, pool_blocks: int) -> tuple[Served, Outcome]:
    """Short requests from 48 clients on an engine of these blocks, in the fluid model and in the reference."""
    folder.mkdir()
    facts = replace(FACTS, block_tokens=block_tokens, pool_blocks=pool_blocks)
    tables = engine_tables(folder, facts)
    requests = steady_requests(1.0, 2000, PROMPT, OUTPUT, output_cv=0.0)
    action = ServeAction.from_dict({"batch_size": 64, "kv_budget": 1.0})
    fluid = serve_requests(action, requests, tables, closed_clients=CLIENTS)
    fleet = Fleet(known(), 64, facts.pool_tokens(), **facts.fleet_rules())
    return fluid, serve_closed(fleet, np.full(2000, PROMPT), np.full(2000, OUTPUT), CLIENTS)


def test_the_fluid_model_holds_whole_blocks_as_the_reference_does(tmp_path: Path) -> None:
    """A pool of 20 blocks of 128 tokens holds 20 short requests; counted in tokens it would hold all 48."""
    tokens_per_s = []
    for name, block_tokens, pool_blocks in (("blocks", 128, 20), ("tokens", 1, 20 * 128)):
        fluid, reference = closed_loop(tmp_path / name, block_tokens, pool_blocks)
        tokens_per_s.append(fluid.report().output_tokens_per_s)
        assert tokens_per_s[-1] == pytest.approx(reference.tokens_per_s(), rel=0.08)
    assert tokens_per_s[0] < 0.8 * tokens_per_s[1]


def test_a_full_pool_is_full_of_blocks(tmp_path: Path) -> None:
    """Twenty requests of 36 tokens at most use a quarter of their blocks' tokens, and all blocks."""
    fluid, _ = closed_loop(tmp_path / "pool", 128, 20)
    assert fluid.report().peak_kv_occupancy == pytest.approx(1.0, abs=0.02)


def test_what_a_block_has_left_is_what_its_tokens_leave() -> None:
    """Contexts of 6 to 36 tokens leave 107 of 128 on average; where blocks are small, half of one."""
    stats = load_source(get_task(3), tables_of(None)).stats
    short = replace(
        stats,
        prompt_quantile_tokens=np.full_like(stats.prompt_quantile_tokens, 6.0),
        output_cdf_tokens=np.full_like(stats.output_cdf_tokens, 30.0),
    )
    within = block_tables(short, 128)
    np.testing.assert_allclose(within.slack_tokens, 128 - 21.0)
    np.testing.assert_allclose(within.growth, 0.0)
    # Blocks of 16: a prompt of 6 takes one, with 30 more it takes three.
    np.testing.assert_allclose(block_tables(short, 16).growth, 32 / 30)
    small = block_tables(stats, 16)
    np.testing.assert_allclose(small.slack_tokens, 8.0, atol=0.2)
    np.testing.assert_allclose(small.growth, 1.0, atol=0.02)


def test_tables_that_ship_keep_half_a_block_of_16(tmp_path: Path) -> None:
    task = get_task(3)
    assert set(params_of(task, tables_of(None), 1.0).constants["block_slack_tokens"]) == {8.0}
    measured = engine_tables(tmp_path, replace(FACTS, block_tokens=128))
    assert (params_of(task, measured, 1.0).constants["block_slack_tokens"] > 50.0).all()
