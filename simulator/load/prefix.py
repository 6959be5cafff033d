"""Prefix reuse: leading prompt tokens that repeat an earlier prompt, and the cache size that still holds them.

An engine keeps the KV blocks of finished requests until others need the room, and evicts the least recently used first.
A block is a hit in a pool of N tokens if fewer than N tokens were used since its last use. The number of tokens used
since, the stack distance, depends only on the traffic, so one curve (hit rate of repeated tokens by cache size) gives
the savings of any pool. See docs/dynamics.md, "Prefix reuse".
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Final

import numpy as np

from simulator.hardware.tables import FloatArray
from simulator.load.requests import RequestLog
from simulator.load.source import REUSE_LOG2_FIRST

CAPACITY_TOKENS: Final = 2.0 ** (REUSE_LOG2_FIRST + np.arange(21))
"""Cache sizes of a reuse curve: 1,024 tokens to 2**30, doubling."""

BLOCK_TOKENS: Final = 512
"""Block size (tokens) of Mooncake's traces."""

_PUBLISHED_BLOCKS: Final = (1_000, 50_000)
_PUBLISHED_SHARE: Final = (0.30 / 0.50, 1.0)

PUBLISHED_REUSE_HIT: Final = np.clip(
    np.interp(
        np.log2(CAPACITY_TOKENS),
        np.log2(BLOCK_TOKENS * np.array([1.0, *_PUBLISHED_BLOCKS])),
        [0.0, *_PUBLISHED_SHARE],
    ),
    0.0,
    1.0,
)
"""Reuse curve for a log that says how many tokens repeat, but not which.

From Mooncake's own analysis of its production trace (arXiv 2407.00079, section 4.2): an LRU cache of 1,000 blocks of
512 tokens hits 30% of the prompt blocks, one of 50,000 blocks hits 50%, and larger caches hit hardly any more. In
between it is linear in the logarithm of the size.
"""


def reuse_curve(log: RequestLog) -> FloatArray | None:
    """Hit rate of caches of :data:`CAPACITY_TOKENS` on a log's repeated tokens; None without repeats."""
    if not (log.reused_tokens > 0).any():
        return None
    return log.reuse_hit if len(log.reuse_hit) else PUBLISHED_REUSE_HIT


class PrefixReuse:
    """Counter of repeated prefixes and their stack distances, fed with prompts as block ids in order of arrival.

    Block ids stand for a block of ``block_tokens`` tokens and everything before it, as in Mooncake's traces.
    """

    def __init__(self, block_tokens: int = BLOCK_TOKENS) -> None:
        self._block_tokens = block_tokens
        self._last_use: dict[Hashable, int] = {}
        self._touched = _RunningSums()
        self.matched: list[int] = []
        """For each prompt, the latest earlier request with its longest repeated prefix; -1 without one."""
        self._found: FloatArray = np.zeros(len(CAPACITY_TOKENS) + 1)

    def add(self, blocks: Sequence[Hashable], prompt_tokens: int, output_tokens: int) -> int:
        """Add the next prompt; returns how many of its leading tokens it shares with an earlier prompt."""
        repeated = 0
        while repeated < len(blocks) and blocks[repeated] in self._last_use:
            repeated += 1
        tokens = min(repeated * self._block_tokens, prompt_tokens)
        self.matched.append(self._last_use[blocks[repeated - 1]] if repeated else -1)
        self._note_distances([self._last_use[b] for b in blocks[:repeated]])
        for block in blocks[:repeated]:
            self._touched.add(self._last_use[block], -self._block_tokens)
        request = self._touched.append(max(prompt_tokens, len(blocks) * self._block_tokens) + output_tokens)
        self._last_use.update(dict.fromkeys(blocks, request))
        return tokens

    def hit_curve(self) -> FloatArray:
        """Hit rate of the repeated tokens in caches of :data:`CAPACITY_TOKENS`; empty if nothing repeats."""
        total = float(self._found.sum())
        if total == 0.0:
            return np.zeros(0)
        curve: FloatArray = np.cumsum(self._found[:-1]) / total
        return curve

    def _note_distances(self, last_uses: Iterable[int]) -> None:
        """Count repeated blocks by the smallest cache that still holds them."""
        since: dict[int, float] = {}
        for use in last_uses:
            # all tokens used since that request, and those that this prompt has already used
            distance = since.get(use)
            distance = (self._touched.after(use) if distance is None else distance) + self._block_tokens
            since[use] = distance
            self._found[int(np.searchsorted(CAPACITY_TOKENS, distance))] += self._block_tokens


class _RunningSums:
    """A growing list of numbers that sums any tail in logarithmic time (a Fenwick tree)."""

    def __init__(self) -> None:
        self._tree = [0.0]
        self._total = 0.0

    def append(self, value: float) -> int:
        """Add an element at the end; returns its index."""
        i = len(self._tree)
        node = value
        step = 1
        while i % (2 * step) == 0:
            node += self._tree[i - step]
            step *= 2
        self._tree.append(node)
        self._total += value
        return i - 1

    def add(self, index: int, value: float) -> None:
        """Change an element."""
        i = index + 1
        while i < len(self._tree):
            self._tree[i] += value
            i += i & -i
        self._total += value

    def after(self, index: int) -> float:
        """Sum of all elements after this one."""
        i, head = index + 1, 0.0
        while i > 0:
            head += self._tree[i]
            i -= i & -i
        return self._total - head
