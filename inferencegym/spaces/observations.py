"""Observations as 14 numbers in the order of ``OBSERVATION_FIELDS``: bounds, conversions and scaling for learners.

Seven more, in the order of ``FLEET_FIELDS``, describe the knobs in force; arrays of both have 21 columns. Autoscaling
tasks have three more, in the order of ``SCALING_FIELDS``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from inferencegym.models import FLEET_FIELDS, OBSERVATION_FIELDS, SCALING_FIELDS, ServeObservation
from inferencegym.tasks import Fleet

OBSERVATION_SIZE: Final = len(OBSERVATION_FIELDS)
OBSERVATION_LOW: Final = np.array([f.low for f in OBSERVATION_FIELDS.values()])
OBSERVATION_HIGH: Final = np.array([f.high for f in OBSERVATION_FIELDS.values()])
FLEET_SIZE: Final = len(FLEET_FIELDS)
FIRST_FLEET: Final = np.array([f.default for f in FLEET_FIELDS.values()])
"""Numbers of the fleet before the first step: the default knobs, no restart, no second since."""

# Large values of each field, which become about 1. Fields that span decades are scaled by their logarithm.
_LOG_SCALE: Final = {
    "queue_depth": 512.0,
    "mean_prompt_len": 8192.0,
    "arrival_rate": 1000.0,
    "ttft_p50": 5000.0,
    "tpot_p50": 500.0,
}
DEFAULT_CARD_GB: Final = 40.0
"""Memory limit of the default table's card in decimal GB."""
_MOST_BUDGETS: Final = 4.0
"""Costs above this number of budgets are clipped."""

_NAMES: Final = list(OBSERVATION_FIELDS)
_LOGARITHMIC: Final = np.array([name in _LOG_SCALE for name in _NAMES])
_COST: Final = _NAMES.index("cost_so_far")


def to_observation(row: NDArray[np.float64]) -> ServeObservation:
    """The dataclass form of one flat observation (14,)."""
    queue, prompt, rate, kv, ttft, tpot, late, memory, accept, p0, p1, p2, step, cost = row.tolist()
    return ServeObservation(queue, prompt, rate, kv, ttft, tpot, late, memory, accept, [p0, p1, p2], int(step), cost)


def to_array(observation: ServeObservation) -> NDArray[np.float64]:
    """The flat form (14,) of an observation."""
    o = observation
    return np.array(
        [
            o.queue_depth,
            o.mean_prompt_len,
            o.arrival_rate,
            o.kv_cache_occupancy,
            o.ttft_p50,
            o.tpot_p50,
            o.slo_violation_rate,
            o.gpu_memory_used_gb,
            o.spec_accept_rate,
            *o.priority_distribution,
            o.timestep,
            o.cost_so_far,
        ],
        dtype=np.float64,
    )


def normalise(
    observation: NDArray[np.float64], episode_length: int, cost_budget: float, card_gb: float = DEFAULT_CARD_GB
) -> NDArray[np.float32]:
    """Scale observations (..., 14) to about 0 to 1: logarithms of fields that span decades, shares as they are.

    Memory in use becomes a share of ``card_gb``, the memory of a card.
    """
    scaled = np.array(observation, dtype=np.float64)
    np.log1p(scaled, out=scaled, where=_LOGARITHMIC)
    scaled /= _units(episode_length, cost_budget, card_gb)
    cost = scaled[..., _COST]
    np.minimum(cost, _MOST_BUDGETS, out=cost)
    result: NDArray[np.float32] = scaled.astype(np.float32)
    return result


@lru_cache(maxsize=32)
def _units(episode_length: int, cost_budget: float, card_gb: float) -> NDArray[np.float64]:
    """Divisor of each of the 14 numbers, applied after the logarithm."""
    linear = {"timestep": float(episode_length), "cost_so_far": cost_budget, "gpu_memory_used_gb": card_gb}
    logarithms = {name: float(np.log1p(large)) for name, large in _LOG_SCALE.items()}
    units = {**linear, **logarithms}
    return np.array([units.get(name, 1.0) for name in _NAMES])


def fleet_size(fleet: Fleet) -> int:
    """Length of the fleet's numbers: seven, or ten in autoscaling tasks."""
    return FLEET_SIZE + (len(SCALING_FIELDS) if fleet.max_replicas is not None else 0)


def first_fleet(fleet: Fleet) -> NDArray[np.float64]:
    """Numbers of a fleet (7 or 10,) before its first step."""
    return np.append(FIRST_FLEET, [fleet.n_replicas, fleet.n_replicas, 0.0])[: fleet_size(fleet)]


def fleet_array(fleet: Mapping[str, Any]) -> NDArray[np.float64]:
    """The numbers of a fleet, (7,) or in autoscaling tasks (10,), from their JSON form, ``info.fleet``."""
    names = [*FLEET_FIELDS, *(name for name in SCALING_FIELDS if name in fleet)]
    return np.array([float(fleet[name]) for name in names])


def normalise_fleet(fleet: NDArray[np.float64], episode_length: int) -> NDArray[np.float32]:
    """Scale the numbers of fleets (..., 7) to 0 to 1: logarithms of lengths, batch sizes and seconds."""
    scaled = fleet.astype(np.float64, copy=True)
    names = list(FLEET_FIELDS)
    for name, most in (("spec_length", FLEET_FIELDS["spec_length"].high), ("seconds_since_change", episode_length)):
        i = names.index(name)
        scaled[..., i] = np.log1p(scaled[..., i]) / np.log1p(most)
    batch = names.index("batch_size")
    scaled[..., batch] = np.log(scaled[..., batch]) / np.log(FLEET_FIELDS["batch_size"].high)
    scaled[..., names.index("quant_tier")] /= FLEET_FIELDS["quant_tier"].high
    return scaled.astype(np.float32)
