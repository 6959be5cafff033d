"""Seeds of episodes: allowed seeds, the sequence of seeds of a row's episodes, and random generators for many seeds.

The first episode of a row plays the seed it was reset with, and its k-th restart plays ``episode_seed(first, k)``. So
any episode of a run can be replayed alone.

NumPy's :class:`numpy.random.SeedSequence` mixes a seed's words with 32-bit integer arithmetic (M. E. O'Neill's
``seed_seq_fe``; its output is fixed by NumPy's compatibility policy). The same arithmetic on arrays does it for all
seeds in the time that a few of them take one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
from numpy.random.bit_generator import ISeedSequence
from numpy.typing import NDArray

from inferencegym.errors import InvalidConfigError, NotResetError, refusal

Words = NDArray[np.uint32]

MAX_SEED: Final = 2**63 - 1

_POOL_WORDS: Final = 4
_STATE_WORDS: Final = 8
_FIRST_IN, _FACTOR_IN = 0x43B0D7E5, 0x931E8875
_FIRST_OUT, _FACTOR_OUT = 0x8B51F9DD, 0x58F38DED
_MIX_INTO, _MIX_FROM = np.uint32(0xCA01F9DD), np.uint32(0x4973F715)
_HALF: Final = np.uint32(16)


def check_seed(seed: object) -> int:
    """Return ``seed`` if it is an integer from 0 to 2**63 - 1; raise :class:`InvalidConfigError` otherwise."""
    if isinstance(seed, (bool, float)) or not isinstance(seed, (int, np.integer)) or not 0 <= int(seed) <= MAX_SEED:
        raise refusal("seed", seed, f"an integer from 0 to {MAX_SEED}")
    return int(seed)


# ---------------------------------------------------------------- episodes that follow one another


def episode_seed(first: int, episode: int) -> int:
    """Seed of the ``episode``-th restart of a row that was first reset with ``first``; the 0-th is ``first`` itself.

    A 63-bit hash of the pair: it practically never gives a small number. People choose small numbers as seeds, so a
    learner never trains on held-out seeds.
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
    """Sequence of episode seeds for each row of a batch."""

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
        """Rows that start an episode now (all, or those of the mask ``rows``) and their seeds.

        A row with a seed starts a new series. A row without one (None) takes the next seed of its series; if it has no
        series yet, it starts one with a seed from the operating system.
        """
        n_rows = len(self._first)
        chosen = np.arange(n_rows) if rows is None else np.flatnonzero(rows)
        if seeds is not None and len(seeds) != n_rows:
            raise InvalidConfigError(f"seed: {len(seeds)} seeds for {n_rows} episodes; give one for each", "seed")
        given = {row: check_seed(s) for row in chosen.tolist() if seeds is not None and (s := seeds[row]) is not None}
        if len(chosen) < n_rows and not self.started:
            raise NotResetError("the first reset must start all episodes: reset once without a mask")
        self._episode[chosen] += 1
        for row in {*given, *chosen[self._first[chosen] < 0].tolist()}:
            self._first[row] = given[row] if row in given else _fresh_seed()
            self._episode[row] = 0
        return chosen.tolist(), episode_seeds(self._first[chosen], self._episode[chosen])


def _fresh_seed() -> int:
    return int(np.random.SeedSequence().generate_state(1, np.uint64)[0] >> np.uint64(1))


# ---------------------------------------------------------------- generators of many seeds at once


def hashed(first: Sequence[int] | NDArray[Any], second: int | NDArray[Any]) -> NDArray[np.uint64]:
    """``SeedSequence([first[i], second[i]]).generate_state(4, uint64)`` for every i, (N, 4).

    ``first`` are integers from 0 to 2**64 - 1, ``second`` from 0 to 2**32 - 1: one for each, or one for all.
    """
    seeds = np.asarray(first, dtype=np.uint64)
    low, high = seeds.astype(np.uint32), (seeds >> np.uint64(32)).astype(np.uint32)
    after = np.asarray(second).astype(np.uint32)
    pool = np.zeros((_POOL_WORDS, len(seeds)), dtype=np.uint32)
    # SeedSequence takes one word for a seed below 2**32 and two for a larger one, then the words of ``after``.
    pool[0] = low
    pool[1] = np.where(high == 0, after, high)
    pool[2] = np.where(high == 0, np.uint32(0), after)
    pool = _hash(pool, _CONSTANTS_IN[: _POOL_WORDS + 1])
    for source in range(_POOL_WORDS):
        others = [word for word in range(_POOL_WORDS) if word != source]
        at = _POOL_WORDS + source * len(others)
        mixed = _MIX_INTO * pool[others] - _MIX_FROM * _hash(pool[source], _CONSTANTS_IN[at : at + len(others) + 1])
        pool[others] = mixed ^ (mixed >> _HALF)
    words = _hash(np.concatenate([pool, pool]), _CONSTANTS_OUT)
    return np.ascontiguousarray(words.T).astype("<u4").view("<u8").astype(np.uint64)


def generators(seeds: Sequence[int], streams: Sequence[int]) -> Iterator[tuple[np.random.Generator, ...]]:
    """Generators equal to ``default_rng([seed, stream])``: for each seed, a tuple with one per stream."""
    if len(seeds) == 1:  # for one seed the array arithmetic costs more than it saves
        yield tuple(np.random.default_rng([seeds[0], stream]) for stream in streams)
        return
    states = hashed(np.repeat(np.asarray(seeds, dtype=np.uint64), len(streams)), np.tile(streams, len(seeds)))
    for each in states.reshape(len(seeds), len(streams), -1):
        yield tuple(np.random.Generator(np.random.PCG64(_Seeded(state))) for state in each)  # type: ignore[arg-type]


class _Seeded(ISeedSequence):
    """Seed sequence with a precomputed state, as NumPy's bit generators ask for it."""

    def __init__(self, state: NDArray[np.uint64]) -> None:
        self._state = state

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> NDArray[Any]:
        if (n_words, np.dtype(dtype)) != (len(self._state), np.dtype(np.uint64)):
            raise ValueError(f"{n_words} words of {np.dtype(dtype)}: this seed holds {len(self._state)} of uint64")
        return self._state


def _constants(first: int, factor: int, count: int) -> Words:
    """Powers of the hash's multiplier, (count, 1)."""
    found = [first]
    for _ in range(count - 1):
        found.append(found[-1] * factor % 2**32)
    return np.array(found, dtype=np.uint32)[:, None]


def _hash(words: Words, constants: Words) -> Words:
    """One hash of ``words`` (k, N) or (N,) per pair of neighbouring constants (k + 1, 1)."""
    hashes = (words ^ constants[:-1]) * constants[1:]
    return hashes ^ (hashes >> _HALF)


_CONSTANTS_IN: Final = _constants(_FIRST_IN, _FACTOR_IN, _POOL_WORDS * _POOL_WORDS + 1)
_CONSTANTS_OUT: Final = _constants(_FIRST_OUT, _FACTOR_OUT, _STATE_WORDS + 1)
