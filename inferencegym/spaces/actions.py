"""Actions as rows of five numbers in the order of ``ACTION_FIELDS``: bounds, clamping and conversions.

Rows of tasks that scale may have ``replicas`` as a sixth number.

HTTP and the dataclass refuse what is out of range (``ServeAction.validate``). :func:`snap` clamps to the bounds and
takes the nearest allowed value instead: a policy that explores must not crash an episode.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from inferencegym.errors import InvalidActionError
from inferencegym.models import ACTION_FIELDS, QuantTier, ServeAction, ServeActionMessage
from inferencegym.spaces.knobs import KNOB_DEFAULTS, KNOB_HIGH, KNOB_LOW, KnobKernel
from inferencegym.tasks import Fleet

ACTION_SIZE: Final = len(ACTION_FIELDS)
ACTION_LOW: Final = KNOB_LOW
ACTION_HIGH: Final = KNOB_HIGH
FORCED: Final = KNOB_DEFAULTS
"""Values of knobs that a task does not offer: the defaults."""


def action_mask(active_actions: Sequence[str]) -> NDArray[np.bool_]:
    """True (5,) for every knob that a task offers."""
    return np.array([name in active_actions for name in ACTION_FIELDS])


def action_size(fleet: Fleet) -> int:
    """Length of an action of this fleet: five, or six with ``replicas``."""
    return ACTION_SIZE + (fleet.max_replicas is not None)


def snap(actions: NDArray[np.float64], mask: NDArray[np.bool_], fleet: Fleet | None = None) -> NDArray[np.float64]:
    """Allowed actions nearest to rows of five numbers (B, 5); masked knobs take their forced values.

    Rows of six (B, 6) have ``replicas`` last: clamped to the bounds of ``fleet`` and rounded.

    NaN counts as the forced value. ``kv_budget`` is clamped, ``batch_size`` rounded and clamped, ``spec_length`` and
    ``quant_tier`` snapped to the nearest choice, ``prefill_disagg`` is on above 0.5.
    """
    size = ACTION_SIZE if fleet is None else action_size(fleet)
    if actions.ndim != 2 or not ACTION_SIZE <= actions.shape[1] <= size:
        raise InvalidActionError("actions", actions.shape, f"an array of shape (B, {size})")
    snapped = np.empty(actions.shape)
    replicas = (1, None) if fleet is None else (fleet.n_replicas, fleet.max_replicas)
    _kernel(tuple(mask.tolist()), replicas).snap(np.asarray(actions, dtype=np.float64), snapped)
    return snapped


@lru_cache(maxsize=32)
def _kernel(offered: tuple[bool, ...], replicas: tuple[int, int | None]) -> KnobKernel:
    return KnobKernel(offered, replicas=replicas)


def refuse_nan(actions: NDArray[Any], field: str = "actions") -> None:
    """Raise :class:`InvalidActionError` for the first NaN among actions (B, k) that were given as ``field``."""
    if actions.dtype.kind == "f" and np.isnan(actions).any():
        row, knob = np.argwhere(np.isnan(actions))[0].tolist()
        raise InvalidActionError(f"{field}[{row}, {knob}]", "NaN", "a number")


def checked_row(action: ServeAction | ServeActionMessage, fleet: Fleet) -> NDArray[np.float64]:
    """The numbers (1, 5) of an action whose knobs are within their ranges, (1, 6) in autoscaling tasks.

    ``replicas`` is NaN if left out. Raises :class:`InvalidActionError` for more than ``max_replicas``.
    """
    knobs = _numbers(action)
    most, asked = fleet.max_replicas, knobs[ACTION_SIZE]
    if most is not None and asked is not None and asked > most:
        raise InvalidActionError("replicas", asked, f"an integer from 1 to {most}, the task's max_replicas")
    return np.array([knobs[: action_size(fleet)]], dtype=np.float64)


def to_row(action: ServeAction) -> NDArray[np.float64]:
    """The five numbers of an action, (5,); (6,) with ``replicas``."""
    knobs = _numbers(action)
    return np.array(knobs[:ACTION_SIZE] if action.replicas is None else knobs, dtype=np.float64)


def from_row(row: NDArray[np.float64]) -> ServeAction:
    """The action of five allowed numbers, or of six with ``replicas``."""
    kv, spec, batch, disagg, tier, *sixth = row.tolist()
    replicas = int(sixth[0]) if sixth else None
    return ServeAction(kv, int(spec), int(batch), disagg >= 0.5, QuantTier(int(tier)), replicas)


def _numbers(action: ServeAction | ServeActionMessage) -> tuple[float | None, ...]:
    tier = action.quant_tier if isinstance(action, ServeActionMessage) else action.quant_tier.value
    return action.kv_budget, action.spec_length, action.batch_size, action.prefill_disagg, tier, action.replicas
