"""The comparison that says what misled the simulator about an engine, on what is committed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.live_causes import AGENTS, played
from benchmarks.live_policies import BLOCK_TOKENS, FIRST_COME, RESULTS
from inferencegym.tasks import TASKS_ENV
from simulator.tables import TABLE_ENV


@pytest.mark.slow
def test_served_as_the_engine_serves_the_reference_grades_policies_as_the_engine_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within 0.04 first come, first served; served by class it promises at least 0.1 more."""
    for name in (TABLE_ENV, TASKS_ENV):
        monkeypatch.setenv(name, "")  # put back after the test
    seen = json.loads((RESULTS / f"{FIRST_COME}.json").read_text())
    as_engine = played(tmp_path, False, BLOCK_TOKENS, seen)
    by_class = played(tmp_path, True, BLOCK_TOKENS, seen)
    both = [name for name in AGENTS if name in seen["agents"]]
    assert len(both) >= 3
    for name in both:
        real = np.mean(seen["agents"][name]["engine"]["scores"])
        assert np.mean(as_engine[name]) == pytest.approx(real, abs=0.04)
        assert np.mean(by_class[name]) > real + 0.1
