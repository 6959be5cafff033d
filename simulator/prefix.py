"""Prefix reuse: which leading tokens of a prompt were seen before, and how large a cache still holds them.

An engine keeps the KV blocks of finished requests until others need the room, so a pool of N tokens holds what the last
N tokens written (or read again) left: least recently used goes first. A block is found again if fewer than N tokens
were touched since its last use. That number, the stack distance, depends on the traffic alone, so one curve (the share
of repeated tokens found in a cache of N tokens) tells what any pool saves. See docs/dynamics.md, "Prefix reuse".
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Final

import numpy as np

from simulator.load import REUSE_LOG2_FIRST
from simulator.requests import RequestLog
from simulator.tables import FloatArray

CAPACITY_TOKENS: Final = 2.0 ** (REUSE_LOG2_FIRST + np.arange(21))
"""Cache sizes of a reuse curve: 1,024 tokens to 2**30, doubling."""

BLOCK_TOKENS: Final = 512
"""Tokens of a block of Mooncake's traces."""

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
"""Curve of a log that tells how many tokens repeat but not which.

Mooncake's own analysis of its production trace (arXiv 2407.00079, section 4.2): an LRU cache of 1,000 blocks of 512
tokens finds 30 % of the prompt blocks, one of 50,000 finds 50 %, and more finds hardly any more. Log-linear between.
"""


def reuse_curve(log: RequestLog) -> FloatArray | None:
    """Hit rate of caches of :data:`CAPACITY_TOKENS` on a log's repeated tokens; None where nothing repeats."""
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
        self._found: FloatArray = np.zeros(len(CAPACITY_TOKENS) + 1)

    def add(self, blocks: Sequence[Hashable], prompt_tokens: int, output_tokens: int) -> int:
        """Take the next prompt; returns how many of its leading tokens an earlier prompt had in common."""
        repeated = 0
        while repeated < len(blocks) and blocks[repeated] in self._last_use:
            repeated += 1
        tokens = min(repeated * self._block_tokens, prompt_tokens)
        self._note_distances([self._last_use[b] for b in blocks[:repeated]])
        for block in blocks[:repeated]:
            self._touched.add(self._last_use[block], -self._block_tokens)
        request = self._touched.append(max(prompt_tokens, len(blocks) * self._block_tokens) + output_tokens)
        self._last_use.update(dict.fromkeys(blocks, request))
        return tokens

    def hit_curve(self) -> FloatArray:
        """Share of the repeated tokens found in caches of :data:`CAPACITY_TOKENS`; empty if nothing repeats."""
        total = float(self._found.sum())
        if total == 0.0:
            return np.zeros(0)
        curve: FloatArray = np.cumsum(self._found[:-1]) / total
        return curve

    def _note_distances(self, last_uses: Iterable[int]) -> None:
        """Count repeated blocks by the smallest cache that still holds them."""
        since: dict[int, float] = {}
        for use in last_uses:
            # Everything touched since that request, and what this prompt has read of it already.
            distance = since.get(use)
            distance = (self._touched.after(use) if distance is None else distance) + self._block_tokens
            since[use] = distance
            self._found[int(np.searchsorted(CAPACITY_TOKENS, distance))] += self._block_tokens


class _RunningSums:
    """A growing list of numbers with sums of its tails in logarithmic time (a Fenwick tree)."""

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
        """Sum of all elements behind this one."""
        i, head = index + 1, 0.0
        while i > 0:
            head += self._tree[i]
            i -= i & -i
        return self._total - head
