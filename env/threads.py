"""Thread splitter: the rows of a batch divided over the processor's cores.

The compiled kernels release the global interpreter lock and rows are independent, so results do not depend on the
split.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Final

CORES: Final = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

RowRange = tuple[int, int]
"""Rows from the first (included) to the second (excluded)."""


@lru_cache(maxsize=1)
def _threads() -> ThreadPoolExecutor:
    """Thread pool of all large batches of this process, started when the first one steps."""
    return ThreadPoolExecutor(max_workers=max(1, CORES - 1), thread_name_prefix="serving-batch")


# A forked process has none of its parent's threads.
os.register_at_fork(after_in_child=_threads.cache_clear)


def split_rows(
    work: Callable[[int, int], None], ranges: Sequence[RowRange], rows_per_thread: int, n_threads: int
) -> None:
    """Call ``work(lo, hi)`` for all rows of ascending ``ranges``, on at most ``n_threads`` threads.

    No thread is given less than ``rows_per_thread`` rows, and no more of them run than there are cores.
    """
    span = ranges[-1][1] - ranges[0][0]
    n_parts = 1 if span < 2 * rows_per_thread else min(n_threads, CORES, span // rows_per_thread)
    if n_parts < 2:
        for lo, hi in ranges:
            work(lo, hi)
        return
    size = -(-span // n_parts)
    own, *others = [(at, min(at + size, hi)) for lo, hi in ranges for at in range(lo, hi, size)]
    waiting = [_threads().submit(work, lo, hi) for lo, hi in others]
    work(*own)
    for part in waiting:
        part.result()
