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

from inferencegym.errors import InvalidActionError, InvalidConfigError, TableError, short_repr
from inferencegym.installation import install_hint
from inferencegym.models import QuantTier
from inferencegym.tasks import table_index
from simulator.catalogue import table_path

FloatArray = NDArray[np.float64]

TABLE_ENV: Final = "INFERENCEGYM_TABLE"
METADATA_KEY: Final = b"inferencegym"

AXES: Final = ("quant_tier", "spec_length", "kv_budget", "batch_size", "prompt_len_bucket")
"""Order of the axes of every column array."""

MAX_TIERS: Final = len(QuantTier)
"""Values of the knob ``quant_tier``: a table has as many precisions or fewer."""

SATURATED_COLUMNS: Final = ("ttft_p50_ms", "ttft_p99_ms", "tpot_ms", "tps", "cost_per_1k")
"""Columns of an engine that always has ``batch_size`` requests in hand; tables may do without them."""

VALUE_COLUMNS: Final = (
    "gpu_mem_gb",
    "decode_ms",
    "prefill_ms",
    "prefill_marginal_ms",
    "prefill_saturated_ms",
    "kv_capacity_tokens",
    "support",
)


@dataclass(frozen=True, eq=False)
class ServingTables:
    """Measured and derived times of one model on the cards of one replica.

    ``columns[name]`` has shape (MAX_TIERS, spec lengths, KV budgets, batch sizes, prompt lengths); ``axes[name]`` holds
    the grid points in the column's units (``prompt_len_bucket`` in tokens). ``meta`` is the file's own description. A
    table of fewer precisions than ``MAX_TIERS`` repeats its last one in the arrays; ``n_tiers`` may be chosen.
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
        return self.decode_ms if listed is None else _padded(np.array(listed, dtype=np.float64))

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
    def tiers(self) -> tuple[str, ...]:
        """Names of the precisions, in the order of ``quant_tier``."""
        return tuple(self.meta["weights_gb"])

    @property
    def n_tiers(self) -> int:
        """Precisions that the table has."""
        return len(self.meta["weights_gb"])

    @property
    def cards_per_replica(self) -> int:
        """Cards over which a replica's weights are split; memory figures are those of one card."""
        return int(self.meta.get("cards_per_replica", 1))

    @property
    def weights_gb(self) -> FloatArray:
        """Weights on one card by tier in decimal GB, (MAX_TIERS,)."""
        sizes = [float(size) for size in self.meta["weights_gb"].values()]
        return _padded(np.array(sizes))

    @property
    def block_tokens(self) -> int | None:
        """Tokens of a KV block of the measured engine that the table is of; None where it is not of one."""
        engine = self.meta.get("measured_engine")
        return None if engine is None else int(engine["facts"]["block_tokens"])

    def tier_index(self, name: str) -> int:
        """The ``quant_tier`` of a precision's name; raises :class:`InvalidConfigError` with those that there are."""
        if name not in self.tiers:
            raise InvalidConfigError(
                f"precision {short_repr(name)} is not one of {self.meta['hardware']}: {', '.join(self.tiers)}", "quant"
            )
        return self.tiers.index(name)

    def refuse_tier(self, tier: int) -> None:
        """Raise :class:`InvalidActionError` with the table's precisions if it has none of this number."""
        if tier >= self.n_tiers:
            names = ", ".join(f"{i} ({name})" for i, name in enumerate(self.tiers))
            raise InvalidActionError("quant_tier", tier, f"a precision of {self.meta['hardware']}: {names}")

    @property
    def spec_tokens(self) -> FloatArray:
        """Measured tokens per verification step at each spec length (1 without drafting)."""
        tokens = {0: 1.0, **{int(k): float(v) for k, v in self.meta["spec_tokens_per_step"].items()}}
        return np.array([tokens[int(k)] for k in self.axes["spec_length"]])

    @property
    def nbytes(self) -> int:
        """Memory of all column arrays in bytes."""
        return sum(a.nbytes for a in self.columns.values())


def default_table_path() -> Path:
    """The table in use: ``INFERENCEGYM_TABLE`` if set, else the first of the catalogue."""
    return Path(os.environ.get(TABLE_ENV) or table_path(next(iter(table_index()))))


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


def tables_of(hardware: str | None = None) -> ServingTables:
    """The table of this name in the catalogue; None: the default table.

    Another table is read in a child process, so that a server that plays on it holds no parquet library either.
    """
    return load_tables() if hardware is None else load_tables(table_path(hardware), isolated=True)


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
    if shape[0] != len(meta["weights_gb"]) or shape[0] > MAX_TIERS:
        raise TableError(f"{path} has {shape[0]} precisions, of which it names {len(meta['weights_gb'])}")
    held = [name for name in (*SATURATED_COLUMNS, *VALUE_COLUMNS) if name in raw]
    columns = {name: np.ascontiguousarray(_padded(raw[name][order].reshape(shape))) for name in held}
    axes["prompt_len_bucket"] = np.array(meta["prompt_tokens"], dtype=np.float64)
    return ServingTables(path, digest, axes, columns, meta)


def _padded(by_tier: FloatArray) -> FloatArray:
    """The array with its last tier (first axis) repeated up to ``MAX_TIERS``."""
    missing = MAX_TIERS - len(by_tier)
    return np.concatenate([by_tier, np.repeat(by_tier[-1:], missing, axis=0)]) if missing else by_tier
