"""Observation kernel: 14 numbers per row, clipped to their bounds, and seven of the fleet.

Their order is that of ``OBSERVATION_FIELDS`` and ``FLEET_FIELDS``.
Plain Python that the build compiles to C (types in ``observation.pxd``). Bounds and conversions are those of
:mod:`inferencegym.spaces.observations`, which remote environments use as well.
"""

from __future__ import annotations

from typing import Any

from inferencegym import plain_cython as cython


class ObservationKernel:
    """Writes observations of rows of a fleet batch.

    ``observation`` (B, 14) and ``fleet`` (B, 7; 10 where it scales) are written; knob, state and metric
    arrays are only read. Rows are written once after every step, since ``fleet`` counts the seconds since a knob was
    changed.
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
                self._write_fleet(b)

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

    def _write_fleet(self, b: int) -> None:
        if self.time[b] == 0:
            for k in range(self.first_fleet.shape[0]):
                self.fleet[b, k] = self.first_fleet[k]
            return
        spec = self.spec_values[self.spec_index[b]]
        same = (
            self.fleet[b, 0] == self.kv_budget[b]
            and self.fleet[b, 1] == spec
            and self.fleet[b, 2] == self.batch_size[b]
            and self.fleet[b, 3] == self.disagg[b]
            and self.fleet[b, 4] == self.tier[b]
        )
        if self.first_fleet.shape[0] > 7:
            same = same and self.fleet[b, 7] == self.replicas[b]
            self.fleet[b, 7] = self.replicas[b]
            self.fleet[b, 8] = self.replicas_ready[b]
            self.fleet[b, 9] = self.replicas_draining[b]
        self.fleet[b, 0] = self.kv_budget[b]
        self.fleet[b, 1] = spec
        self.fleet[b, 2] = self.batch_size[b]
        self.fleet[b, 3] = self.disagg[b]
        self.fleet[b, 4] = self.tier[b]
        self.fleet[b, 5] = 1.0 - self.rollout_share[b]
        self.fleet[b, 6] = self.fleet[b, 6] + 1.0 if same else 1.0
