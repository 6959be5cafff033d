"""Request logs on disk: one row per request."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np

from inferencegym.errors import DataFormatError
from simulator.whatif import RequestLog

_NAMES: Final = {
    "arrival_s": ("arrival_s", "timestamp_s"),
    "prompt_tokens": ("prompt_tokens", "prompt", "input_tokens"),
    "output_tokens": ("output_tokens", "output", "completion_tokens"),
}


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
