"""Request logs on disk: one row per request."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from inferencegym.errors import DataFormatError
from simulator.tables import FloatArray

MAX_REQUESTS: Final = 2_000_000

_NAMES: Final = {
    "arrival_s": ("arrival_s", "timestamp_s"),
    "prompt_tokens": ("prompt_tokens", "prompt", "input_tokens"),
    "output_tokens": ("output_tokens", "output", "completion_tokens"),
}


@dataclass(frozen=True, slots=True, eq=False)
class RequestLog:
    """Individual requests, arrays (N,): arrival (s, ascending), prompt and output tokens, class (0 first served).

    ``reused_tokens`` are the leading prompt tokens that an earlier request of the log had in common (0 where unknown).
    ``reuse_hit`` is the share of them that a cache of each of ``simulator.prefix.CAPACITY_TOKENS`` still holds; empty
    where the log does not tell which tokens repeat.
    """

    arrival_s: FloatArray
    prompt_tokens: FloatArray
    output_tokens: FloatArray
    class_index: NDArray[np.int64]
    reused_tokens: FloatArray = field(default_factory=lambda: np.zeros(0))
    reuse_hit: FloatArray = field(default_factory=lambda: np.zeros(0))

    def __post_init__(self) -> None:
        n = len(self.arrival_s)
        if not 1 <= n <= MAX_REQUESTS:
            raise DataFormatError(f"{n} requests: there must be 1 to {MAX_REQUESTS}")
        if len(self.reused_tokens) == 0:
            object.__setattr__(self, "reused_tokens", np.zeros(n))
        for name in ("arrival_s", "prompt_tokens", "output_tokens", "reused_tokens"):
            values = getattr(self, name)
            if len(values) != n or not np.isfinite(values).all():
                raise DataFormatError(f"{name} must be {n} finite numbers")
        if self.arrival_s.min() < 0 or self.prompt_tokens.min() < 1 or self.output_tokens.min() < 1:
            raise DataFormatError("arrival_s must be at least 0, prompt and output tokens at least 1")
        if (self.reused_tokens < 0).any() or (self.reused_tokens > self.prompt_tokens).any():
            raise DataFormatError("reused_tokens must lie between 0 and the prompt's tokens")
        if not ((self.reuse_hit >= 0) & (self.reuse_hit <= 1)).all():
            raise DataFormatError("reuse_hit must hold shares between 0 and 1")
        if (np.diff(self.arrival_s) < 0).any():
            raise DataFormatError("arrival_s must not decrease")


def read_requests(path: str | Path) -> RequestLog:
    """Read a CSV or parquet log with arrival (s), prompt and output tokens; sorted by arrival, starting at 0.

    Raises :class:`DataFormatError` naming what is missing or wrong.
    """
    path = Path(path)
    table = _read_table(path)
    columns: dict[str, Any] = {}
    for name, spellings in _NAMES.items():
        found = next((s for s in spellings if s in table.column_names), None)
        if found is None:
            raise DataFormatError(f"{path}: no column {name!r} (also read: {', '.join(spellings)})")
        try:
            columns[name] = table.column(found).to_numpy(zero_copy_only=False).astype(np.float64)
        except (TypeError, ValueError) as error:
            raise DataFormatError(f"{path}: column {found!r} must hold numbers ({error})") from error
    order = np.argsort(columns["arrival_s"], kind="stable")
    arrival = columns["arrival_s"][order]
    if len(arrival) and (not np.isfinite(arrival).all() or arrival[0] < 0):
        raise DataFormatError(f"{path}: arrival_s must hold finite times >= 0")
    return RequestLog(
        arrival_s=arrival - arrival[0] if len(arrival) else arrival,
        prompt_tokens=columns["prompt_tokens"][order],
        output_tokens=np.maximum(1.0, columns["output_tokens"][order]),
        class_index=np.zeros(len(order), dtype=np.int64),
    )


def _read_table(path: Path) -> Any:
    import pyarrow as pa
    import pyarrow.csv as pacsv
    import pyarrow.parquet as pq

    try:
        return pq.read_table(path) if path.suffix == ".parquet" else pacsv.read_csv(path)
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise DataFormatError(f"{path}: cannot be read ({error})") from error
