"""Random generators of many seeds at once, equal to ``numpy.random.default_rng([seed, stream])`` and faster.

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

Words = NDArray[np.uint32]

_POOL_WORDS: Final = 4
_STATE_WORDS: Final = 8
_FIRST_IN, _FACTOR_IN = 0x43B0D7E5, 0x931E8875
_FIRST_OUT, _FACTOR_OUT = 0x8B51F9DD, 0x58F38DED
_MIX_INTO, _MIX_FROM = np.uint32(0xCA01F9DD), np.uint32(0x4973F715)
_HALF: Final = np.uint32(16)


def hashed(first: Sequence[int] | NDArray[Any], second: int | NDArray[Any]) -> NDArray[np.uint64]:
    """``SeedSequence([first[i], second[i]]).generate_state(4, uint64)`` for every i, (N, 4).

    ``first`` are integers from 0 to 2**64 - 1, ``second`` from 0 to 2**32 - 1: one for each, or one for all.
    """
    seeds = np.asarray(first, dtype=np.uint64)
    low, high = seeds.astype(np.uint32), (seeds >> np.uint64(32)).astype(np.uint32)
    after = np.asarray(second).astype(np.uint32)
    pool = np.zeros((_POOL_WORDS, len(seeds)), dtype=np.uint32)
    # A small number takes one word, so what follows it moves up.
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
    """``default_rng([seed, stream])`` of every stream, seed by seed."""
    if len(seeds) == 1:  # arrays of so few numbers cost more than they save
        yield tuple(np.random.default_rng([seeds[0], stream]) for stream in streams)
        return
    states = hashed(np.repeat(np.asarray(seeds, dtype=np.uint64), len(streams)), np.tile(streams, len(seeds)))
    for each in states.reshape(len(seeds), len(streams), -1):
        yield tuple(np.random.Generator(np.random.PCG64(_Seeded(state))) for state in each)  # type: ignore[arg-type]


class _Seeded(ISeedSequence):
    """Seed sequence whose state words are computed beforehand."""

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
