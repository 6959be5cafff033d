"""Actions of the serving environment as rows of five numbers: bounds, clamping and conversions.

Re-exports :mod:`inferencegym.spaces.actions`, which remote environments use as well, under the name of the published
plan. :class:`inferencegym.spaces.knobs.KnobKernel` writes rows into a fleet.
"""

from __future__ import annotations

from inferencegym.spaces.actions import (
    ACTION_HIGH,
    ACTION_LOW,
    ACTION_SIZE,
    FORCED,
    action_mask,
    from_row,
    snap,
    to_row,
)

__all__ = [
    "ACTION_HIGH",
    "ACTION_LOW",
    "ACTION_SIZE",
    "FORCED",
    "action_mask",
    "from_row",
    "snap",
    "to_row",
]
