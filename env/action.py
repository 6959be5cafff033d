"""Actions of the serving environment: written into the knobs of a fleet, and clamped for learners that explore.

Rows of five numbers, their bounds and :func:`snap` are those of :mod:`inferencegym.spaces.actions`, which remote
environments use as well; here they meet the simulator.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from inferencegym.models import ServeAction
from inferencegym.spaces.actions import (
    ACTION_HIGH,
    ACTION_LOW,
    ACTION_SIZE,
    FORCED,
    SPEC_VALUES,
    action_mask,
    from_row,
    mask_action,
    snap,
    snap_constants,
    to_row,
)
from inferencegym.spaces.snapping import SnapKernel
from simulator.serving import SPEC_INDEX, ServingFleet

__all__ = [
    "ACTION_HIGH",
    "ACTION_LOW",
    "ACTION_SIZE",
    "FORCED",
    "action_mask",
    "from_row",
    "knob_writer",
    "mask_action",
    "snap",
    "to_row",
    "write_action",
    "write_actions",
]


def knob_writer(fleet: ServingFleet, mask: NDArray[np.bool_]) -> SnapKernel:
    """Writes rows of five numbers into a fleet's knobs as :func:`snap` and :func:`write_actions` would."""
    knobs = {
        "kv_budget": fleet.kv_budget,
        "spec": fleet.spec_index,
        "batch_size": fleet.batch_size,
        "disagg": fleet.disagg,
        "tier": fleet.tier,
    }
    return SnapKernel(snap_constants(mask.tolist()), knobs)


def write_actions(fleet: ServingFleet, actions: NDArray[np.float64]) -> None:
    """Set the knobs of all rows from allowed actions (B, 5)."""
    fleet.kv_budget[:] = actions[:, 0]
    fleet.spec_index[:] = np.searchsorted(SPEC_VALUES, actions[:, 1])
    fleet.batch_size[:] = actions[:, 2]
    fleet.disagg[:] = actions[:, 3]
    fleet.tier[:] = actions[:, 4]


def write_action(fleet: ServingFleet, row: int, action: ServeAction) -> None:
    """Set the knobs of one row from a valid action."""
    fleet.kv_budget[row] = action.kv_budget
    fleet.spec_index[row] = SPEC_INDEX[action.spec_length]
    fleet.batch_size[row] = action.batch_size
    fleet.disagg[row] = action.prefill_disagg
    fleet.tier[row] = action.quant_tier.value
