"""Knobs in compiled code: clamps and rounds actions to the nearest allowed ones, and decodes learners' actions.

Plain Python that the build compiles to C (types in ``knobs.pxd``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from inferencegym import plain_cython as cython
from inferencegym.models import ACTION_FIELDS, REPLICAS, SPEC_LENGTHS

if not cython.compiled:  # compiled, the same names are the C library's (see knobs.pxd)
    from math import exp, log

    rint = round

KNOB_LOW = np.array([f.low for f in ACTION_FIELDS.values()])
KNOB_HIGH = np.array([f.high for f in ACTION_FIELDS.values()])
KNOB_DEFAULTS = np.array([f.default for f in ACTION_FIELDS.values()])

_SPEC_VALUES = np.array(SPEC_LENGTHS, dtype=np.float64)
# Snapping by midpoints in the logarithm of k + 1: 3 goes to 4, 5 to 4, 6 to 8.
_SPEC_EDGES = np.exp(0.5 * (np.log1p(_SPEC_VALUES[1:]) + np.log1p(_SPEC_VALUES[: len(_SPEC_VALUES) - 1]))) - 1.0


class KnobKernel:
    """Bounds and defaults of one task's knobs: rounds rows of numbers to the nearest allowed actions.

    ``offered`` (5,) tells which knobs a task offers; the others take their defaults, and so does NaN. ``kv_budget`` is
    clamped, ``batch_size`` clamped and rounded, ``spec_length`` and ``quant_tier`` moved to the nearest choice,
    ``prefill_disagg`` is on above 0.5. Rows of six numbers have ``replicas`` last, clamped and rounded where the task
    scales; elsewhere, and in rows of five, there are as many as at the start. ``replicas`` gives the number at the
    start and the most that may be asked for, None where the task does not scale. A ``fleet`` is one whose knob arrays
    are written; its parameters give ``replicas`` and the precisions of its table.
    """

    def __init__(
        self, offered: Sequence[bool], fleet: Any = None, replicas: tuple[int, int | None] = (1, None)
    ) -> None:
        if fleet is not None:
            replicas = fleet.params.n_replicas, fleet.params.max_replicas
        start, most = replicas
        self.offered = np.array([*offered, most is not None], dtype=np.int64)
        self.low, self.high = np.append(KNOB_LOW, REPLICAS.low), np.append(KNOB_HIGH, start if most is None else most)
        self.default = np.append(KNOB_DEFAULTS, start)
        self.spec_values, self.spec_edges = _SPEC_VALUES, _SPEC_EDGES
        if fleet is not None:
            self.kv_budget, self.batch_size = fleet.kv_budget, fleet.batch_size
            self.spec_index, self.disagg, self.tier = fleet.spec_index, fleet.disagg, fleet.tier
            self.replicas = fleet.replicas
            self.high[4] = fleet.params.tables.n_tiers - 1  # a table may have fewer precisions than the knob

    def snap(self, actions: Any, snapped: Any) -> None:
        """Write the allowed actions ``snapped`` (B, 5 or 6) nearest to ``actions`` of the same shape."""
        self._snap(actions, snapped)

    def write(self, actions: Any, lo: int, hi: int) -> None:
        """Set the fleet's rows ``lo`` (included) to ``hi`` (excluded) to the allowed actions nearest to ``actions``."""
        self._write(actions, lo, hi)

    def _snap(self, actions: Any, snapped: Any) -> None:
        for b in range(actions.shape[0]):
            snapped[b, 0] = self._clamped(0, actions[b, 0])
            snapped[b, 1] = self.spec_values[self._nearest_spec(actions[b, 1])]
            snapped[b, 2] = rint(self._clamped(2, actions[b, 2]))
            snapped[b, 3] = rint(self._clamped(3, actions[b, 3]))
            snapped[b, 4] = rint(self._clamped(4, actions[b, 4]))
            if actions.shape[1] > 5:
                snapped[b, 5] = rint(self._clamped(5, actions[b, 5]))

    def _write(self, actions: Any, lo: int, hi: int) -> None:
        for b in range(lo, hi):
            replicas = actions[b, 5] if actions.shape[1] > 5 else self.default[5]
            self._write_row(b, actions[b, 0], actions[b, 1], actions[b, 2], actions[b, 3], actions[b, 4], replicas)

    def _write_row(
        self, b: int, kv: float, spec: float, batch: float, disagg: float, tier: float, replicas: float
    ) -> None:
        self.kv_budget[b] = self._clamped(0, kv)
        self.spec_index[b] = self._nearest_spec(spec)
        self.batch_size[b] = rint(self._clamped(2, batch))
        self.disagg[b] = cython.cast(cython.longlong, rint(self._clamped(3, disagg)))
        self.tier[b] = cython.cast(cython.longlong, rint(self._clamped(4, tier)))
        self.replicas[b] = rint(self._clamped(5, replicas))

    def _clamped(self, knob: int, value: float) -> float:
        if not self.offered[knob] or value != value:
            value = self.default[knob]
        return min(max(self.low[knob], value), self.high[knob])  # in this order -0.0 becomes 0.0

    def _nearest_spec(self, value: float) -> int:
        length = self._clamped(1, value)
        i = 0
        while i < self.spec_edges.shape[0] and self.spec_edges[i] < length:
            i += 1
        return i


class ActionDecoder:
    """Decoder of learners' actions (B, 5) into knobs (B, 5) in natural units.

    ``levels`` are the values of each knob, in order, from which a choice is made. The knobs are then clamped and
    rounded by :class:`KnobKernel`.
    """

    def __init__(self, levels: Sequence[Sequence[float]]) -> None:
        sizes = [len(values) for values in levels]
        padded = [[*values, *[0.0] * (max(sizes) - len(values))] for values in levels]
        self.n_levels, self.level = np.array(sizes, dtype=np.int64), np.array(padded)
        self.low, self.high = KNOB_LOW, KNOB_HIGH

    def __reduce__(self) -> tuple[Any, ...]:
        levels = np.asarray(self.level).tolist()
        return ActionDecoder, ([row[:n] for row, n in zip(levels, np.asarray(self.n_levels), strict=True)],)

    def decode_levels(self, actions: Any, knobs: Any) -> bool:
        """Write the knobs of whole numbers (B, 5), indices of levels; False if one of them is out of range."""
        return bool(self._levels(actions, knobs))

    def decode_box(self, actions: Any, knobs: Any) -> None:
        """Write the knobs of numbers (B, 5) in [-1, 1]; those beyond are clamped, and NaN gives NaN.

        ``kv_budget`` is spread evenly, ``batch_size`` on a logarithmic scale; each level of the others has an equal
        part of the interval.
        """
        self._box(actions, knobs)

    def _levels(self, actions: Any, knobs: Any) -> bool:
        for b in range(actions.shape[0]):
            for knob in range(actions.shape[1]):
                chosen = actions[b, knob]
                if chosen < 0 or chosen >= self.n_levels[knob]:
                    return False
                knobs[b, knob] = self.level[knob, chosen]
        return True

    def _box(self, actions: Any, knobs: Any) -> None:
        for b in range(actions.shape[0]):
            for knob in range(actions.shape[1]):
                unit = 0.5 * (actions[b, knob] + 1.0)
                if unit == unit:  # else NaN, which stays
                    unit = self._knob(knob, min(max(unit, 0.0), 1.0))
                knobs[b, knob] = unit

    def _knob(self, knob: int, unit: float) -> float:
        if knob == 0:
            return self.low[0] + unit * (self.high[0] - self.low[0])
        if knob == 2:
            return exp(unit * log(self.high[2]))
        last = self.n_levels[knob] - 1
        return self.level[knob, min(cython.cast(cython.longlong, unit * self.n_levels[knob]), last)]
