"""Seed ranges by purpose; they never overlap, so nothing is reported on a load that it was fitted to."""

from __future__ import annotations

from typing import Final

CALIBRATION_SEEDS: Final = range(1_000, 1_016)
"""For measuring floors, prices and peaks."""

TRAINING_SEEDS: Final = range(2_000, 2_016)
"""For fitting policies, by the solver and by learners."""

VALIDATION_SEEDS: Final = range(3_000, 3_016)
"""For choosing among fitted policies."""

HELD_OUT_SEEDS: Final = range(10_000, 10_030)
"""For reported scores; :func:`held_out_seeds` continues the range where more seeds are played."""

CONFIRMATION_SEEDS: Final = range(40_000, 40_030)
"""For confirming the held-out scores: tasks were still tuned after those had been seen, but not after these."""


def held_out_seeds(n: int) -> range:
    """The first ``n`` held-out seeds; more than 30 continue the range."""
    return range(HELD_OUT_SEEDS.start, HELD_OUT_SEEDS.start + n)
