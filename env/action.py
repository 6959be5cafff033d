"""Actions of the serving environment as rows of five numbers: bounds, clamping and conversions.

These are those of :mod:`inferencegym.spaces.actions`, which remote environments use as well. The module stands where
the plan has it; rows are written into a fleet by :class:`inferencegym.spaces.knobs.KnobKernel`.
"""

from __future__ import annotations

from inferencegym.spaces.actions import (
    ACTION_HIGH,
    ACTION_LOW,
    ACTION_SIZE,
    FORCED,
    action_mask,
    from_row,
    mask_action,
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
    "mask_action",
    "snap",
    "to_row",
]
