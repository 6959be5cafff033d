"""What the agent sees: 14 numbers per row in the order of ``OBSERVATION_FIELDS``, cut to their bounds.

Plain Python that the build compiles to C (types in ``observation.pxd``); :func:`to_observation` gives the dataclass
form and :func:`normalise` the scaled form for learners.
"""

from __future__ import annotations

from typing import Any

import cython
import numpy as np
from numpy.typing import NDArray

from inferencegym.models import OBSERVATION_FIELDS, ServeObservation

OBSERVATION_SIZE = len(OBSERVATION_FIELDS)
OBSERVATION_LOW = np.array([f.low for f in OBSERVATION_FIELDS.values()])
OBSERVATION_HIGH = np.array([f.high for f in OBSERVATION_FIELDS.values()])

# Scales for learners: what counts as large. Numbers spread over decades enter by their logarithm.
_LOG_FIELDS = ("queue_depth", "mean_prompt_len", "arrival_rate", "ttft_p50", "tpot_p50")
_LOG_SCALE = {
    "queue_depth": 512.0,
    "mean_prompt_len": 8192.0,
    "arrival_rate": 1000.0,
    "ttft_p50": 5000.0,
    "tpot_p50": 500.0,
}
_LINEAR_SCALE = {"gpu_memory_used_gb": 40.0}


class ObservationKernel:
    """Writes observations of rows of a fleet batch.

    ``observation`` (B, 14) is written; state and metric arrays are only read.
    """

    def __init__(self, constants: Any, arrays: Any) -> None:
        for name, value in constants.items():
            setattr(self, name, value)
        for name, value in arrays.items():
            setattr(self, name, value)

    def write(self, lo: int, hi: int) -> None:
        """Write the observations of rows ``lo`` (included) to ``hi`` (excluded)."""
        with cython.nogil:
            for b in range(lo, hi):
                self._write_row(b)

    def _write_row(self, b: int) -> None:
        prompt = self.nominal_prompt
        if self.prompt_window_requests[b] > 0.5:
            prompt = self.prompt_window_tokens[b] / self.prompt_window_requests[b]
        total = 0.0
        for c in range(self.n_classes):
            total += self.class_window[b, c]
        for k in range(3):
            self.observation[b, 9 + k] = 0.0
        for c in range(self.n_classes):
            share = self.class_window[b, c] / total if total > 0.5 else self.nominal_share[c]
            self.observation[b, 9 + self.class_slot[c]] = share
        self.observation[b, 0] = min(self.queue_requests[b], 512.0)
        self.observation[b, 1] = min(max(prompt, 32.0), 8192.0)
        self.observation[b, 2] = min(self.rate_ema[b], 1000.0)
        self.observation[b, 3] = self.kv_occupancy[b]
        self.observation[b, 4] = min(self.ttft_p50_ms[b], 5000.0)
        self.observation[b, 5] = min(self.tpot_ms[b], 500.0)
        self.observation[b, 6] = self.violation_share[b]
        self.observation[b, 7] = self.gpu_memory_gb[b]
        self.observation[b, 8] = self.spec_accept_rate[b]
        self.observation[b, 12] = self.time[b]
        self.observation[b, 13] = self.cost_so_far[b]


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
    """Scaled observations (..., 14), about 0 to 1: logarithms for what spans decades, shares as they are."""
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
