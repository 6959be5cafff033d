"""Lookup table of operator times as plain arrays.

Reading parquet takes a library of 70 MB; a server that only steps episodes should not hold it. ``load_tables`` with
``isolated=True`` therefore reads the file in a short-lived child process and keeps nothing but the numbers.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from inferencegym.errors import TableError
from inferencegym.installation import install_hint
from inferencegym.tasks import DATA_DIR

FloatArray = NDArray[np.float64]

DEFAULT_TABLE: Final = DATA_DIR / "traces_llama3_8b.parquet"
DEFAULT_CARD: Final = "a100-40gb"
"""Card of the default table."""
TABLE_ENV: Final = "INFERENCEGYM_TABLE"
METADATA_KEY: Final = b"inferencegym"

AXES: Final = ("quant_tier", "spec_length", "kv_budget", "batch_size", "prompt_len_bucket")
"""Order of the axes of every column array."""

VALUE_COLUMNS: Final = (
    "ttft_p50_ms",
    "ttft_p99_ms",
    "tpot_ms",
    "tps",
    "gpu_mem_gb",
    "cost_per_1k",
    "decode_ms",
    "prefill_ms",
    "prefill_marginal_ms",
    "prefill_saturated_ms",
    "kv_capacity_tokens",
    "support",
)


@dataclass(frozen=True, eq=False)
class ServingTables:
    """Measured and derived times of one model on one card.

    ``columns[name]`` has shape (tiers, spec lengths, KV budgets, batch sizes, prompt lengths); ``axes[name]`` holds the
    grid points in the column's units (``prompt_len_bucket`` in tokens). ``meta`` is the file's own description.
    """

    path: str
    sha256: str
    axes: Mapping[str, FloatArray]
    columns: Mapping[str, FloatArray]
    meta: Mapping[str, Any]

    @property
    def decode_ms(self) -> FloatArray:
        """One decode iteration, (tier, spec, batch, context); the KV budget does not matter to it."""
        return np.ascontiguousarray(self.columns["decode_ms"][:, :, -1])

    @property
    def iteration_batches(self) -> FloatArray:
        """Batch sizes of :attr:`iteration_ms`."""
        listed = self.meta.get("iteration_batches")
        return self.axes["batch_size"].copy() if listed is None else np.array(listed, dtype=np.float64)

    @property
    def iteration_ms(self) -> FloatArray:
        """Decode iterations, (tier, spec, batch, context), at more batch sizes than the columns hold.

        The steps of GEMM times lie between the columns' batch sizes. A table that lists no more has the columns'.
        """
        listed = self.meta.get("iteration_ms")
        return self.decode_ms if listed is None else np.array(listed, dtype=np.float64)

    @property
    def prefill_ms(self) -> FloatArray:
        """A prompt alone on an idle engine, (tier, prompt)."""
        return np.ascontiguousarray(self.columns["prefill_ms"][:, 0, -1, 0])

    @property
    def prefill_marginal_ms(self) -> FloatArray:
        """What one prompt adds to the iterations of a batch that decodes anyway, (tier, batch, prompt)."""
        return np.ascontiguousarray(self.columns["prefill_marginal_ms"][:, 0, -1])

    @property
    def prefill_saturated_ms(self) -> FloatArray:
        """The same per prompt when prompts fill the engine's token budget, (tier, batch, prompt)."""
        return np.ascontiguousarray(self.columns["prefill_saturated_ms"][:, 0, -1])

    @property
    def weights_gb(self) -> FloatArray:
        """Weight bytes per tier in decimal GB."""
        return np.array([float(self.meta["weights_gb"][t]) for t in ("FP16", "INT8", "INT4")])

    @property
    def spec_tokens(self) -> FloatArray:
        """Measured tokens per verification step at each spec length (1 without drafting)."""
        tokens = {0: 1.0, **{int(k): float(v) for k, v in self.meta["spec_tokens_per_step"].items()}}
        return np.array([tokens[int(k)] for k in self.axes["spec_length"]])

    @property
    def nbytes(self) -> int:
        """Memory of all column arrays in bytes."""
        return sum(a.nbytes for a in self.columns.values())


def shipped_table(card: str) -> Path:
    """Where the table of a card lies among the shipped data."""
    return DEFAULT_TABLE if card == DEFAULT_CARD else DATA_DIR / f"traces_llama3_8b_{card.replace('-', '_')}.parquet"


def default_table_path() -> Path:
    """The table in use: ``INFERENCEGYM_TABLE`` if set, else the one that ships."""
    return Path(os.environ.get(TABLE_ENV) or DEFAULT_TABLE)


def load_tables(path: str | Path | None = None, isolated: bool = False) -> ServingTables:
    """Read a table file; cached per path and content.

    ``isolated`` reads it in a child process, so that this process never loads the parquet library. Raises
    :class:`TableError` if the file is missing, damaged or lacks a column.
    """
    resolved = Path(path) if path is not None else default_table_path()
    try:
        digest = hashlib.sha256(resolved.read_bytes()).hexdigest()
    except OSError as error:
        raise TableError(
            f"the lookup table {resolved} cannot be read ({error.strerror}); build it with `inferencegym build-table`"
        ) from error
    return _load(str(resolved), digest, isolated)


_loaded: Final[dict[tuple[str, str], ServingTables]] = {}


def _load(path: str, digest: str, isolated: bool) -> ServingTables:
    # However it was read, it is the same table, so it is read once.
    if (path, digest) not in _loaded:
        raw, meta = _read_in_child(path) if isolated and "pyarrow" not in sys.modules else read_columns(path)
        _loaded[path, digest] = _arrange(path, digest, raw, meta)
    return _loaded[path, digest]


def read_columns(path: str) -> tuple[dict[str, FloatArray], dict[str, Any]]:
    """All columns of a table file as float64 vectors, and its metadata."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ModuleNotFoundError as error:
        raise TableError(f"{path} cannot be read: {install_hint(error) or error}") from error

    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise TableError(
            f"{path} is not a lookup table: {error}; rebuild it with `inferencegym build-table`"
        ) from error
    metadata = (table.schema.metadata or {}).get(METADATA_KEY)
    if metadata is None:
        raise TableError(f"{path} carries no InferenceGym metadata; rebuild it with `inferencegym build-table`")
    columns = {name: table.column(name).to_numpy().astype(np.float64) for name in table.column_names}
    return columns, json.loads(metadata)


_CHILD = """
import io, json, sys
import numpy as np
from simulator.tables import read_columns
columns, meta = read_columns(sys.argv[1])
buffer = io.BytesIO()
np.savez(buffer, meta=np.frombuffer(json.dumps(meta).encode(), dtype=np.uint8), **columns)
sys.stdout.buffer.write(buffer.getvalue())
"""


def _read_in_child(path: str) -> tuple[dict[str, FloatArray], dict[str, Any]]:
    # The child finds the modules that this process finds.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, path], capture_output=True, env=environment, timeout=60, check=False
    )
    if done.returncode != 0:
        raise TableError(f"{path} cannot be read: {done.stderr.decode(errors='replace').strip().splitlines()[-1:]}")
    with np.load(io.BytesIO(done.stdout)) as archive:
        columns = {name: archive[name] for name in archive.files if name != "meta"}
        return columns, json.loads(archive["meta"].tobytes().decode())


def _arrange(path: str, digest: str, raw: Mapping[str, FloatArray], meta: Mapping[str, Any]) -> ServingTables:
    missing = [c for c in (*AXES, *VALUE_COLUMNS) if c not in raw]
    if missing:
        raise TableError(f"{path} lacks the column {missing[0]!r}; rebuild it with `inferencegym build-table`")
    axes = {name: np.unique(raw[name]) for name in AXES}
    shape = tuple(len(axes[name]) for name in AXES)
    if int(np.prod(shape)) != len(raw[AXES[0]]):
        raise TableError(f"{path} is not a full grid: {len(raw[AXES[0]])} rows for {shape}")
    order = np.lexsort(tuple(raw[name] for name in reversed(AXES)))
    columns = {name: np.ascontiguousarray(raw[name][order].reshape(shape)) for name in VALUE_COLUMNS}
    axes["prompt_len_bucket"] = np.array(meta["prompt_tokens"], dtype=np.float64)
    return ServingTables(path, digest, axes, columns, meta)
