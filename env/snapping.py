"""The allowed action nearest to five numbers, row by row: what :func:`env.action.snap` says, in compiled code.

Plain Python that the build compiles to C (types in ``snapping.pxd``).
"""

from __future__ import annotations

from typing import Any

import cython

if not cython.compiled:  # compiled, the same name is the C library's (see snapping.pxd)
    rint = round


class SnapKernel:
    """Snaps rows of actions.

    ``low``, ``high``, ``forced`` (5,) bound and replace the knobs; ``spec_values`` (K,) are the speculative lengths and
    ``spec_edges`` (K - 1,) where the next one begins to be nearer.
    """

    def __init__(self, constants: Any) -> None:
        for name, value in constants.items():
            setattr(self, name, value)

    def snap(self, actions: Any, mask: Any, snapped: Any) -> None:
        """Write the allowed actions ``snapped`` (B, 5) nearest to ``actions`` (B, 5), knobs off the ``mask`` forced."""
        self._snap(actions, mask, snapped)

    def _snap(self, actions: Any, mask: Any, snapped: Any) -> None:
        for b in range(actions.shape[0]):
            for k in range(5):
                a = actions[b, k]
                if not mask[k] or a != a:
                    a = self.forced[k]
                snapped[b, k] = min(max(self.low[k], a), self.high[k])  # 0.0 for -0.0
            i = 0
            while i < self.spec_edges.shape[0] and self.spec_edges[i] < snapped[b, 1]:
                i += 1
            snapped[b, 1] = self.spec_values[i]
            snapped[b, 2] = rint(snapped[b, 2])
            snapped[b, 3] = 1.0 if rint(snapped[b, 3]) >= 0.5 else 0.0
            snapped[b, 4] = rint(snapped[b, 4])
