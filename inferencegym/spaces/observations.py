"""Observations as 14 numbers in the order of ``OBSERVATION_FIELDS``: bounds, conversions and scaling for learners."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from inferencegym.models import OBSERVATION_FIELDS, ServeObservation

OBSERVATION_SIZE: Final = len(OBSERVATION_FIELDS)
OBSERVATION_LOW: Final = np.array([f.low for f in OBSERVATION_FIELDS.values()])
OBSERVATION_HIGH: Final = np.array([f.high for f in OBSERVATION_FIELDS.values()])

# Large values of each field, which become about 1. Fields that span decades are scaled by their logarithm.
_LOG_FIELDS: Final = ("queue_depth", "mean_prompt_len", "arrival_rate", "ttft_p50", "tpot_p50")
_LOG_SCALE: Final = {
    "queue_depth": 512.0,
    "mean_prompt_len": 8192.0,
    "arrival_rate": 1000.0,
    "ttft_p50": 5000.0,
    "tpot_p50": 500.0,
}
_LINEAR_SCALE: Final = {"gpu_memory_used_gb": 40.0}


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


def normalise(observation: NDArray[np.float64], episode_length: int, cost_budget: float) -> NDArray[np.float32]:
    """Scale observations (..., 14) to about 0 to 1: logarithms of fields that span decades, shares as they are."""
    scaled = observation.astype(np.float64, copy=True)
    for i, name in enumerate(OBSERVATION_FIELDS):
        if name in _LOG_FIELDS:
            scaled[..., i] = np.log1p(scaled[..., i]) / np.log1p(_LOG_SCALE[name])
        elif name in _LINEAR_SCALE:
            scaled[..., i] /= _LINEAR_SCALE[name]
        elif name == "timestep":
            scaled[..., i] /= episode_length
        elif name == "cost_so_far":
            scaled[..., i] = np.minimum(scaled[..., i] / cost_budget, 4.0)
    return scaled.astype(np.float32)
