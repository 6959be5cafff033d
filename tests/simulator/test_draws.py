"""Workloads drawn together equal those drawn one by one."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferencegym.errors import InvalidConfigError
from inferencegym.seeds import generators, hashed
from inferencegym.tasks import TaskId, get_task, list_tasks
from simulator.hardware.tables import load_tables
from simulator.workload import load_source

SEEDS = [0, 1, 7, 2**40, 2**63 - 1]


@pytest.mark.parametrize("task_id", [task.task_id for task in list_tasks(include_recorded=True)])
def test_episodes_drawn_together_are_those_drawn_alone(task_id: TaskId) -> None:
    source = load_source(get_task(task_id), load_tables())
    together = source.draw(SEEDS, 90)
    for i, seed in enumerate(SEEDS):
        alone, among_others = source.draw([seed], 90).episode(0), together.episode(i)
        for field in fields(alone):
            assert np.array_equal(getattr(alone, field.name), getattr(among_others, field.name)), field.name


@pytest.mark.parametrize("wrong", [-1, 2**63, 10**5000], ids=["negative", "too large", "of 5,001 digits"])
def test_a_wrong_seed_among_many_is_refused(wrong: int) -> None:
    with pytest.raises(InvalidConfigError) as refused:
        load_source(get_task(1), load_tables()).draw([1, wrong], 10)
    assert refused.value.field == "seed"


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=5), st.integers(0, 2**32 - 1))
def test_seeds_are_hashed_together_as_numpy_hashes_each(first: list[int], second: int) -> None:
    alone = [np.random.SeedSequence([seed, second]).generate_state(4, np.uint64) for seed in first]
    assert np.array_equal(hashed(first, second), alone)


def test_generators_made_together_are_those_that_numpy_makes() -> None:
    for seed, streams in zip(SEEDS, generators(SEEDS, (2, 0)), strict=True):
        for stream, rng in zip((2, 0), streams, strict=True):
            assert rng.bit_generator.state == np.random.default_rng([seed, stream]).bit_generator.state


def test_a_precomputed_seed_gives_no_other_words() -> None:
    (rng,) = next(generators([5, 6], [0]))
    seed = rng.bit_generator.seed_seq
    with pytest.raises(ValueError, match="4 of uint64"):
        seed.generate_state(2, np.uint64)
