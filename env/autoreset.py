"""Automatic reset of the rows of a serving batch; seeds of the episodes as in :mod:`inferencegym.seeds`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from env.batch import ServingBatch
from inferencegym.errors import EpisodeDoneError, NotResetError
from inferencegym.seeds import SeedSeries


class AutoresetBatch:
    """Steps a :class:`ServingBatch` and restarts rows whose episode has ended; results are the arrays of ``batch``."""

    def __init__(self, batch: ServingBatch) -> None:
        self.batch = batch
        self.series = SeedSeries(batch.n_rows)

    @property
    def seeds(self) -> NDArray[np.int64]:
        """Seed of each row's current episode, (B,)."""
        return self.batch.seeds

    def reset(self, seeds: Sequence[int | None] | None = None, rows: NDArray[np.bool_] | None = None) -> None:
        """Start episodes in all rows, or in those of the mask ``rows``; seeds as in :meth:`SeedSeries.next`."""
        chosen, started = self.series.next(seeds, rows)
        self.batch.reset(started, rows=None if rows is None else chosen)

    def step(self, knobs: NDArray[np.float64], rows: NDArray[np.bool_] | None = None) -> None:
        """Take one step with these knobs (B, 5) in all rows, or in those of the mask ``rows``.

        Knobs are clamped and snapped. Raises :class:`EpisodeDoneError` if one of the rows has ended.
        """
        batch = self.batch
        if not self.series.started:
            raise NotResetError("step before reset: call reset first")
        ended = batch.done if rows is None else batch.done & rows
        if ended.any():
            raise EpisodeDoneError(
                f"row {int(np.argmax(ended))}: the episode has ended; reset it to start the next one"
            )
        batch.write_knobs(knobs)
        batch.advance_rows(rows)
