"""A serving batch whose rows start their next episode by themselves; seeds as in :mod:`inferencegym.seeds`."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np
from numpy.typing import NDArray

from env.batch import ServingBatch
from inferencegym.errors import EpisodeDoneError, InvalidConfigError, NotResetError
from inferencegym.seeds import SeedSeries

MIN_ROWS_PER_THREAD: Final = 64
"""Fewer rows than this are not worth handing to a thread."""


class AutoresetBatch:
    """Steps a :class:`ServingBatch` and restarts rows whose episode has ended.

    Results are the arrays of ``batch``. ``n_threads`` > 1 spreads the rows over threads (the kernel releases the
    interpreter lock); the result is the same.
    """

    def __init__(self, batch: ServingBatch, n_threads: int = 1) -> None:
        if n_threads < 1:
            raise InvalidConfigError(f"n_threads={n_threads!r} is not allowed: it must be at least 1")
        self.batch = batch
        self._series = SeedSeries(batch.n_rows)
        self._n_threads = min(n_threads, max(1, batch.n_rows // MIN_ROWS_PER_THREAD))
        self._pool = ThreadPoolExecutor(self._n_threads - 1) if self._n_threads > 1 else None

    @property
    def seeds(self) -> NDArray[np.int64]:
        """Seed of each row's current episode, (B,)."""
        return self.batch.seeds

    def reset(self, seeds: Sequence[int | None] | None = None, rows: NDArray[np.bool_] | None = None) -> None:
        """Start episodes in all rows, or in those of the mask ``rows``; seeds as in :meth:`SeedSeries.next`."""
        chosen, playing = self._series.next(seeds, rows)
        self.batch.reset(playing, rows=None if rows is None else chosen)

    def step(self, knobs: NDArray[np.float64], rows: NDArray[np.bool_] | None = None) -> None:
        """Play one second with these knobs (B, 5) in all rows, or in those of the mask ``rows``.

        Knobs are clamped and snapped. Raises :class:`EpisodeDoneError` if one of the rows has ended.
        """
        batch = self.batch
        if not self._series.started:
            raise NotResetError("step before reset: call reset first")
        ended = batch.done if rows is None else batch.done & rows
        if ended.any():
            raise EpisodeDoneError(
                f"row {int(np.argmax(ended))}: the episode has ended; reset it to start the next one"
            )
        batch.write_knobs(knobs)
        parts = [(0, batch.n_rows)] if rows is None else _runs(rows)
        if self._pool is None:
            for lo, hi in parts:
                batch.advance(lo, hi)
        else:
            own, *others = self._shares(parts)
            waiting = [self._pool.submit(batch.advance, lo, hi) for lo, hi in others]
            batch.advance(*own)
            for one in waiting:
                one.result()

    def close(self) -> None:
        """Release the threads."""
        if self._pool is not None:
            self._pool.shutdown()

    def _shares(self, parts: list[tuple[int, int]]) -> list[tuple[int, int]]:
        size = -(-self.batch.n_rows // self._n_threads)
        return [(at, min(at + size, hi)) for lo, hi in parts for at in range(lo, hi, size)]


def _runs(rows: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Stretches of set rows as (first, last + 1)."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], rows, [False]))))
    return [(int(lo), int(hi)) for lo, hi in edges.reshape(-1, 2)]
