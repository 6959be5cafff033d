"""Actions as rows of five numbers in the order of ``ACTION_FIELDS``: bounds, clamping and conversions.

Rows of tasks that scale may have ``replicas`` as a sixth number.

HTTP and the dataclass refuse what is out of range (``ServeAction.validate``). :func:`snap` clamps to the bounds and
takes the nearest allowed value instead: a policy that explores must not crash an episode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from inferencegym.errors import InvalidActionError
from inferencegym.models import ACTION_FIELDS, NAIVE_ACTION, QuantTier, ServeAction
from inferencegym.spaces.knobs import KNOB_DEFAULTS, KNOB_HIGH, KNOB_LOW, KnobKernel, action_values
from inferencegym.tasks import Fleet

ACTION_SIZE: Final = len(ACTION_FIELDS)
ACTION_LOW: Final = KNOB_LOW
ACTION_HIGH: Final = KNOB_HIGH
FORCED: Final = KNOB_DEFAULTS
"""Values of knobs that a task does not offer: those of the naive baseline."""


def action_mask(active_actions: Sequence[str]) -> NDArray[np.bool_]:
    """True (5,) for every knob that a task offers."""
    return np.array([name in active_actions for name in ACTION_FIELDS])


def action_size(fleet: Fleet) -> int:
    """Numbers of an action of this fleet: five, or six where it scales."""
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
    bounds = None if fleet is None or fleet.max_replicas is None else (fleet.n_replicas, fleet.max_replicas)
    _kernel(tuple(mask.tolist()), bounds).snap(np.asarray(actions, dtype=np.float64), snapped)
    return snapped


@lru_cache(maxsize=32)
def _kernel(offered: tuple[bool, ...], replicas: tuple[int, int] | None) -> KnobKernel:
    return KnobKernel(offered, replicas=replicas)


def scaled_action(action: ServeAction, fleet: Fleet) -> ServeAction:
    """The action with the ``replicas`` that this fleet gets: None where it does not scale.

    Raises :class:`InvalidActionError` for more than the fleet may have.
    """
    most = fleet.max_replicas
    if most is None:
        return action if action.replicas is None else replace(action, replicas=None)
    if action.replicas is None:
        return replace(action, replicas=fleet.n_replicas)
    if action.replicas > most:
        raise InvalidActionError("replicas", action.replicas, f"an integer from 1 to {most}, the task's max_replicas")
    return action


def mask_action(action: ServeAction, active_actions: Sequence[str]) -> ServeAction:
    """The action with the knobs that a task does not offer set to their forced values."""
    if len(active_actions) == ACTION_SIZE:
        return action
    return ServeAction(
        kv_budget=action.kv_budget if "kv_budget" in active_actions else NAIVE_ACTION.kv_budget,
        spec_length=action.spec_length if "spec_length" in active_actions else NAIVE_ACTION.spec_length,
        batch_size=action.batch_size if "batch_size" in active_actions else NAIVE_ACTION.batch_size,
        prefill_disagg=action.prefill_disagg if "prefill_disagg" in active_actions else NAIVE_ACTION.prefill_disagg,
        quant_tier=action.quant_tier if "quant_tier" in active_actions else NAIVE_ACTION.quant_tier,
        replicas=action.replicas,
    )


def to_row(action: ServeAction) -> NDArray[np.float64]:
    """The five numbers of an action, (5,); (6,) with ``replicas``."""
    sixth = () if action.replicas is None else (action.replicas,)
    return np.array([*action_values(action), *sixth], dtype=np.float64)


def from_row(row: NDArray[np.float64]) -> ServeAction:
    """The action of five allowed numbers, or of six with ``replicas``."""
    kv, spec, batch, disagg, tier, *sixth = row.tolist()
    replicas = int(sixth[0]) if sixth else None
    return ServeAction(kv, int(spec), int(batch), disagg >= 0.5, QuantTier(int(tier)), replicas)
