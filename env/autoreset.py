"""Automatic reset of the rows of a batch, and the seeds of the episodes that follow one another.

The first episode of a row has the seed that it was reset with, and its k-th restart ``episode_seed(first, k)``. So any
episode of a run can be repeated alone, and ``seeds`` names it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from env.batch import ServingBatch
from inferencegym.errors import EpisodeDoneError, InvalidConfigError, NotResetError
from simulator.load import check_seed
from simulator.seeding import hashed


def episode_seed(first: int, episode: int) -> int:
    """Seed of the ``episode``-th restart of a row that was first reset with ``first``; the 0-th is ``first`` itself.

    A 63-bit hash of the pair: seeds that people choose (small numbers) are never met by accident, so a learner trained
    here has not seen held-out seeds.
    """
    if episode == 0:
        return first
    return int(np.random.SeedSequence([first, episode]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def episode_seeds(first: Sequence[int] | NDArray[np.int64], episode: int | NDArray[np.int64]) -> list[int]:
    """:func:`episode_seed` of many rows at once; ``episode`` is one for each, or one for all."""
    later = (hashed(first, episode)[:, 0] >> np.uint64(1)).astype(np.int64)
    seeds: list[int] = np.where(np.equal(episode, 0), first, later).tolist()
    return seeds


class SeedSeries:
    """Series of episode seeds, one per row."""

    def __init__(self, n_rows: int) -> None:
        self._first: NDArray[np.int64] = np.full(n_rows, -1, dtype=np.int64)
        self._episode: NDArray[np.int64] = np.zeros(n_rows, dtype=np.int64)

    @property
    def started(self) -> bool:
        """Whether every row has an episode."""
        return bool(self._first.min() >= 0)

    def next(
        self, seeds: Sequence[int | None] | None = None, rows: NDArray[np.bool_] | None = None
    ) -> tuple[list[int], list[int]]:
        """The rows that start an episode now (all, or those of the mask) and the seeds of these episodes.

        A row with a seed starts a new series with it. A row without one (None) goes on to the next episode of its
        series; if it has none yet, it starts one with a seed drawn from the operating system.
        """
        n_rows = len(self._first)
        chosen = np.arange(n_rows) if rows is None else np.flatnonzero(rows)
        if seeds is not None and len(seeds) != n_rows:
            raise InvalidConfigError(f"seed: {len(seeds)} seeds for {n_rows} episodes; give one for each")
        given = {row: check_seed(s) for row in chosen.tolist() if seeds is not None and (s := seeds[row]) is not None}
        if len(chosen) < n_rows and not self.started:
            raise NotResetError("the first reset must start all episodes")
        self._episode[chosen] += 1
        for row in {*given, *chosen[self._first[chosen] < 0].tolist()}:
            self._first[row] = given[row] if row in given else _fresh_seed()
            self._episode[row] = 0
        return chosen.tolist(), episode_seeds(self._first[chosen], self._episode[chosen])


class AutoresetBatch:
    """Steps a :class:`ServingBatch` and restarts rows whose episode has ended; results are the arrays of ``batch``."""

    def __init__(self, batch: ServingBatch) -> None:
        self.batch = batch
        self._series = SeedSeries(batch.n_rows)

    @property
    def seeds(self) -> NDArray[np.int64]:
        """Seed of each row's current episode, (B,)."""
        return self.batch.seeds

    def reset(self, seeds: Sequence[int | None] | None = None, rows: NDArray[np.bool_] | None = None) -> None:
        """Start episodes in all rows, or in those of the mask ``rows``; seeds as in :meth:`SeedSeries.next`."""
        chosen, started = self._series.next(seeds, rows)
        self.batch.reset(started, rows=None if rows is None else chosen)

    def step(self, knobs: NDArray[np.float64], rows: NDArray[np.bool_] | None = None) -> None:
        """Take one step of one second with these knobs (B, 5) in all rows, or in those of the mask ``rows``.

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
        batch.advance_rows(rows)


def _fresh_seed() -> int:
    return int(np.random.SeedSequence().generate_state(1, np.uint64)[0] >> np.uint64(1))
