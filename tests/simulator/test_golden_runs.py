"""Golden runs of the discrete-event reference and of what-ifs (``scripts/golden_runs.py``): they stay as they are."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest

from scripts import golden_runs as golden

RECORDED = golden.recorded()
NAMES = [golden.name_of(*episode) for episode in golden.EPISODES]
SHOWN = 12


def check(name: str, got: list[dict[str, Any]]) -> None:
    found = list(islice(golden.differences(RECORDED[name], got), SHOWN))
    assert not found, "\n".join(
        ["golden numbers changed:", *found, "if that is meant: python -m scripts.golden_runs --write"]
    )


@pytest.mark.parametrize("name", golden.LOADS)
def test_a_load_gives_its_golden_numbers(name: str) -> None:
    check(name, golden.play_load(name))


@pytest.mark.parametrize("name", golden.WHATIFS)
def test_a_what_if_gives_its_golden_numbers(name: str) -> None:
    check(name, golden.play_whatif(name))


@pytest.mark.parametrize("episode", golden.EPISODES, ids=NAMES)
def test_an_episode_gives_its_golden_numbers(episode: Any) -> None:
    check(golden.name_of(*episode), golden.play_episode(*episode))


def test_golden_loads_preempt_refuse_and_draft_and_golden_fleets_restart_and_scale() -> None:
    assert list(RECORDED) == [*golden.LOADS, *golden.WHATIFS, *NAMES]
    preempted = {name for name in golden.LOADS if sum(row.get("preemptions", 0) for row in RECORDED[name])}
    assert {name for name in golden.LOADS if "preempts" in name} <= preempted
    assert RECORDED["what-if: a pool that preempts"][0]["preemptions"] > 0
    assert sum(row.get("rejected", False) for row in RECORDED["a full queue"]) >= 5
    seconds = [row for name in NAMES for row in RECORDED[name]]
    for field in ("eviction_events", "rejected", "spec_accept_rate", "slo_violations", "completed"):
        assert sum(row[field] > 0 for row in seconds) >= 10, field
