"""How well measurements support an answer: measured, interpolated, modelled or extrapolated.

The table states the support of every cell (see :mod:`simulator.offline.table`). A configuration has the support of its
nearest cell, except that nothing between cells counts as measured and everything beyond the table is extrapolated.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from simulator.hardware.tables import FloatArray, ServingTables
from simulator.kernel.serving import ServingFleet

LEVELS: Final = ("measured", "interpolated", "modelled", "extrapolated")
"""Names of the support levels 0 to 3, best first."""


class SupportMap:
    """Support by precision tier, index of the spec length, running requests and context (tokens); plain look-ups."""

    def __init__(self, tables: ServingTables) -> None:
        batch, context = tables.axes["batch_size"], tables.axes["prompt_len_bucket"]
        cells = tables.columns["support"][:, :, -1].astype(np.int64)
        self._cells: list[list[list[list[int]]]] = cells.tolist()
        self._batch_edges, self._context_edges = _nearest_edges(batch), _nearest_edges(context)
        self._on_batch = frozenset(batch.tolist())
        self._on_context = frozenset(context.tolist())
        # Values up to half a grid step beyond the last point still belong to its cell.
        self._most_requests, self._longest = float(batch[-1]), float(context[-1]) * 2.0**0.5

    def level(self, tier: int, spec_index: int, requests: float, context_tokens: float) -> int:
        """Support of one configuration, an index into ``LEVELS``."""
        if requests > self._most_requests or context_tokens > self._longest:
            return 3
        i = bisect_right(self._batch_edges, requests)
        j = bisect_right(self._context_edges, context_tokens)
        cell = self._cells[tier][spec_index][i][j]
        if cell == 0 and not (requests in self._on_batch and context_tokens in self._on_context):
            return 1
        return cell


def _nearest_edges(points: FloatArray) -> list[float]:
    """Edges between neighbouring grid points, half-way on a logarithmic scale."""
    edges: list[float] = np.sqrt(points[1:] * points[:-1]).tolist()
    return edges


@lru_cache(maxsize=16)
def support_map(tables: ServingTables) -> SupportMap:
    """Support map of a table, built once."""
    return SupportMap(tables)


def level_name(tables: ServingTables, tier: int, spec_index: int, requests: float, context_tokens: float) -> str:
    """Support of one configuration: a name of ``LEVELS``."""
    return LEVELS[support_map(tables).level(tier, spec_index, requests, context_tokens)]


def fleet_support(fleet: ServingFleet) -> int:
    """Support of the operator times that the last step of the first row used: an index into ``LEVELS``."""
    state = fleet.state.rows
    return support_map(fleet.params.tables).level(
        fleet.tier.item(0),
        fleet.spec_index.item(0),
        state["resident"].item(0),
        state["context_tokens"].item(0),
    )


def coverage(tables: ServingTables) -> dict[str, dict[str, float]]:
    """Share of the table's cells at each support level, by precision tier and over all."""
    cells = tables.columns["support"][: tables.n_tiers]
    shares = {"all": _shares(cells)}
    return shares | {tier: _shares(cells[i]) for i, tier in enumerate(tables.tiers)}


def _shares(cells: NDArray[np.float64]) -> dict[str, float]:
    return {name: float((cells == level).mean()) for level, name in enumerate(LEVELS)}
