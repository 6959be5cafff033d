"""Request logs: one entry per request. ``ops.log.reader`` reads them from files."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from inferencegym.errors import DataFormatError
from inferencegym.models import PRIORITY_CLASSES
from simulator.hardware.tables import FloatArray

MAX_REQUESTS: Final = 2_000_000
_COLUMNS: Final = ("arrival_s", "prompt_tokens", "output_tokens", "class_index", "reused_tokens")


@dataclass(frozen=True, slots=True, eq=False)
class RequestLog:
    """Individual requests, arrays (N,): arrival (s, ascending), prompt and output tokens, class (0 first served).

    ``reused_tokens`` are the leading prompt tokens shared with an earlier request of the log (0 if unknown).
    ``reuse_hit`` is their hit rate in a cache of each size of ``simulator.load.prefix.CAPACITY_TOKENS``; empty if the
    log does not show which tokens repeat. ``follows`` is the index of the earlier request that has a long prefix or the
    session in common, -1 without one; empty if the log has neither blocks nor sessions.
    """

    arrival_s: FloatArray
    prompt_tokens: FloatArray
    output_tokens: FloatArray
    class_index: NDArray[np.int64]
    reused_tokens: FloatArray = field(default_factory=lambda: np.zeros(0))
    reuse_hit: FloatArray = field(default_factory=lambda: np.zeros(0))
    follows: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def __post_init__(self) -> None:
        n = np.size(self.arrival_s)
        if not 1 <= n <= MAX_REQUESTS:
            raise DataFormatError(f"{n} requests: there must be 1 to {MAX_REQUESTS}")
        if np.size(self.reused_tokens) == 0:
            object.__setattr__(self, "reused_tokens", np.zeros(n))
        for name in _COLUMNS:
            values = getattr(self, name)
            if values.shape != (n,) or not np.isfinite(values).all():
                raise DataFormatError(f"{name} must be {n} finite numbers")
        if self.arrival_s.min() < 0 or self.prompt_tokens.min() < 1 or self.output_tokens.min() < 1:
            raise DataFormatError("arrival_s must be at least 0, prompt and output tokens at least 1")
        if self.class_index.min() < 0 or self.class_index.max() >= len(PRIORITY_CLASSES):
            raise DataFormatError(f"class_index must be from 0 to {len(PRIORITY_CLASSES) - 1}")
        if (self.reused_tokens < 0).any() or (self.reused_tokens > self.prompt_tokens).any():
            raise DataFormatError("reused_tokens must lie between 0 and the prompt's tokens")
        if not ((self.reuse_hit >= 0) & (self.reuse_hit <= 1)).all():
            raise DataFormatError("reuse_hit must hold shares between 0 and 1")
        if np.size(self.follows) and (
            self.follows.shape != (n,) or (self.follows < -1).any() or (self.follows >= np.arange(n)).any()
        ):
            raise DataFormatError("follows must hold the index of an earlier request or -1 for each request")
        if (np.diff(self.arrival_s) < 0).any():
            raise DataFormatError("arrival_s must not decrease")

    def part(self, chosen: NDArray[np.bool_] | slice, start_s: float) -> RequestLog:
        """A selection of the requests, with times counted from ``start_s``."""
        columns = {name: getattr(self, name)[chosen] for name in _COLUMNS}
        follows = self.follows
        if len(follows):
            kept = np.arange(len(follows))[chosen]
            place = np.full(len(follows) + 1, -1)  # the last place is that of -1
            place[kept] = np.arange(len(kept))
            follows = place[follows[chosen]]
        return replace(self, **{**columns, "arrival_s": columns["arrival_s"] - start_s}, follows=follows)

    def faster(self, factor: float) -> RequestLog:
        """The same requests at ``factor`` times the rate."""
        return self if factor == 1.0 else replace(self, arrival_s=self.arrival_s / factor)
