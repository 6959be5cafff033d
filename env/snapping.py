"""The allowed action nearest to five numbers, in compiled code: for arrays, and straight into a fleet's knobs.

Plain Python that the build compiles to C (types in ``snapping.pxd``). :func:`env.action.snap` says what is nearest.
"""

from __future__ import annotations

from typing import Any

import cython

if not cython.compiled:  # compiled, the same name is the C library's (see snapping.pxd)
    rint = round


class SnapKernel:
    """Snaps rows of actions, as arrays or into the knobs of a fleet batch.

    ``low``, ``high``, ``forced`` (5,) bound and replace the knobs; those that are not ``offered`` (5,) are forced.
    ``spec_values`` (K,) are the speculative lengths and ``spec_edges`` (K - 1,) where the next one begins to be nearer.
    ``kv_budget``, ``spec``, ``batch_size``, ``disagg``, ``tier`` (B,) are those of the fleet.
    """

    def __init__(self, constants: Any, knobs: Any) -> None:
        for name, value in constants.items():
            setattr(self, name, value)
        for name, value in knobs.items():
            setattr(self, name, value)

    def snap(self, actions: Any, snapped: Any) -> None:
        """Write the allowed actions ``snapped`` (B, 5) nearest to ``actions`` (B, 5)."""
        self._snap(actions, snapped)

    def write(self, actions: Any, lo: int, hi: int) -> None:
        """Set the knobs of rows ``lo`` (included) to ``hi`` (excluded) to what is nearest to ``actions`` (B, 5)."""
        self._write(actions, lo, hi)

    def _snap(self, actions: Any, snapped: Any) -> None:
        for b in range(actions.shape[0]):
            snapped[b, 0] = self._clamped(0, actions[b, 0])
            snapped[b, 1] = self.spec_values[self._spec_index(actions[b, 1])]
            snapped[b, 2] = rint(self._clamped(2, actions[b, 2]))
            snapped[b, 3] = rint(self._clamped(3, actions[b, 3]))
            snapped[b, 4] = rint(self._clamped(4, actions[b, 4]))

    def _write(self, actions: Any, lo: int, hi: int) -> None:
        for b in range(lo, hi):
            self.kv_budget[b] = self._clamped(0, actions[b, 0])
            self.spec[b] = self._spec_index(actions[b, 1])
            self.batch_size[b] = rint(self._clamped(2, actions[b, 2]))
            self.disagg[b] = cython.cast(cython.longlong, rint(self._clamped(3, actions[b, 3])))
            self.tier[b] = cython.cast(cython.longlong, rint(self._clamped(4, actions[b, 4])))

    def _clamped(self, knob: int, value: float) -> float:
        if not self.offered[knob] or value != value:
            value = self.forced[knob]
        return min(max(self.low[knob], value), self.high[knob])  # in this order -0.0 becomes 0.0

    def _spec_index(self, value: float) -> int:
        length = self._clamped(1, value)
        i = 0
        while i < self.spec_edges.shape[0] and self.spec_edges[i] < length:
            i += 1
        return i
