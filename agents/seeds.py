"""Which seeds are for what; they never overlap, so nothing is reported on traffic that it was fitted to."""

from __future__ import annotations

from typing import Final

CALIBRATION_SEEDS: Final = range(1_000, 1_016)
"""Floors, prices and peaks are measured on these."""

TRAINING_SEEDS: Final = range(2_000, 2_016)
"""The solver and learners fit policies to these."""

VALIDATION_SEEDS: Final = range(3_000, 3_016)
"""Chooses among what was fitted."""

HELD_OUT_SEEDS: Final = range(10_000, 10_030)
"""Every score that is reported."""

CONFIRMATION_SEEDS: Final = range(40_000, 40_030)
"""Confirm what the held-out seeds say: tasks were still tuned when those had been seen, these were not."""


def held_out_seeds(n: int) -> range:
    """The first ``n`` held-out seeds; more than 30 continue the range."""
    return range(HELD_OUT_SEEDS.start, HELD_OUT_SEEDS.start + n)
