"""Lookup table of operator times as plain arrays.

Reading parquet takes a library of 70 MB and, the first time, seconds. So one NumPy archive beside the shipped tables
holds the columns of all of them, keyed by the checksum of the parquet file, and is read in milliseconds. Only users'
own tables need the library.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.lib.npyio import NpzFile
from numpy.typing import NDArray

from inferencegym.errors import InvalidActionError, InvalidConfigError, TableError, short_repr, short_text
from inferencegym.files import atomic_write
from inferencegym.installation import install_hint
from inferencegym.models import QuantTier
from inferencegym.table_metadata import check_metadata
from inferencegym.tasks import DATA_DIR, table_index
from simulator.hardware.catalogue import table_path
from simulator.hardware.memory import kv_pool_gb

FloatArray = NDArray[np.float64]

TABLE_ENV: Final = "INFERENCEGYM_TABLE"
METADATA_KEY: Final = b"inferencegym"
MAX_TABLE_BYTES: Final = 1 << 26
MAX_TABLE_ROWS: Final = 1_000_000
"""Bounds of a table file; the largest that ships has 233 KB and 5,400 rows."""
ARCHIVE: Final = DATA_DIR / "tables" / "columns.npz"
"""Columns and metadata of every shipped table; ``python -m scripts.build_catalogue`` writes it."""

AXES: Final = ("quant_tier", "spec_length", "kv_budget", "batch_size", "prompt_len_bucket")
"""Order of the axes of every column array."""

MAX_TIERS: Final = len(QuantTier)
"""Number of values of the knob ``quant_tier``; a table has at most this many precisions."""

SATURATED_COLUMNS: Final = ("ttft_p50_ms", "ttft_p99_ms", "tpot_ms", "tps", "cost_per_1k")
"""Columns of an engine that always has ``batch_size`` requests; tables may omit them."""

VALUE_COLUMNS: Final = (
    "gpu_mem_gb",
    "decode_ms",
    "prefill_ms",
    "prefill_marginal_ms",
    "prefill_saturated_ms",
    "kv_capacity_tokens",
    "support",
)

_TIMES_MS: Final = (1e-6, 1e9)
_RANGES: Final[Mapping[str, tuple[float, float]]] = {
    "quant_tier": (0, MAX_TIERS - 1),
    "spec_length": (0, 64),
    "kv_budget": (1e-3, 1),
    "batch_size": (1, 1e5),
    "prompt_len_bucket": (0, 999),
    "gpu_mem_gb": (0, 1e5),
    "decode_ms": _TIMES_MS,
    "prefill_ms": _TIMES_MS,
    "prefill_marginal_ms": _TIMES_MS,
    "prefill_saturated_ms": _TIMES_MS,
    "kv_capacity_tokens": (0, 1e12),
    "support": (0, 3),
}


@dataclass(frozen=True, eq=False)
class ServingTables:
    """Measured and derived times of one model on the cards of one replica.

    ``columns[name]`` has shape (MAX_TIERS, spec lengths, KV budgets, batch sizes, prompt lengths); ``axes[name]`` holds
    the grid points in the column's units (``prompt_len_bucket`` in tokens). ``meta`` is the file's own description. A
    table with fewer precisions than ``MAX_TIERS`` repeats its last one in the arrays; only the first ``n_tiers`` may be
    chosen.
    """

    path: str
    sha256: str
    axes: Mapping[str, FloatArray]
    columns: Mapping[str, FloatArray]
    meta: Mapping[str, Any]

    @property
    def decode_ms(self) -> FloatArray:
        """One decode iteration, (tier, spec, batch, context); it does not depend on the KV budget."""
        return np.ascontiguousarray(self.columns["decode_ms"][:, :, -1])

    @property
    def iteration_batches(self) -> FloatArray:
        """Batch sizes of :attr:`iteration_ms`."""
        listed = self.meta.get("iteration_batches")
        return self.axes["batch_size"].copy() if listed is None else np.array(listed, dtype=np.float64)

    @property
    def iteration_ms(self) -> FloatArray:
        """Decode iterations, (tier, spec, batch, context), at more batch sizes than the columns have.

        GEMM times jump between the columns' batch sizes, so a table may list more of them; a table that lists none has
        those of the columns.
        """
        listed = self.meta.get("iteration_ms")
        return self.decode_ms if listed is None else _padded(np.array(listed, dtype=np.float64))

    @property
    def prefill_ms(self) -> FloatArray:
        """A prompt alone on an idle engine, (tier, prompt)."""
        return np.ascontiguousarray(self.columns["prefill_ms"][:, 0, -1, 0])

    @property
    def prefill_marginal_ms(self) -> FloatArray:
        """Time that one prompt adds to the iterations of a decoding batch, (tier, batch, prompt)."""
        return np.ascontiguousarray(self.columns["prefill_marginal_ms"][:, 0, -1])

    @property
    def prefill_saturated_ms(self) -> FloatArray:
        """Time that each prompt adds when prompts fill the engine's token budget, (tier, batch, prompt)."""
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
        """Cards over which a replica's weights are split; memory figures are per card."""
        return int(self.meta.get("cards_per_replica", 1))

    @property
    def weights_gb(self) -> FloatArray:
        """Weights on one card by tier in decimal GB, (MAX_TIERS,)."""
        sizes = [float(size) for size in self.meta["weights_gb"].values()]
        return _padded(np.array(sizes))

    @property
    def block_tokens(self) -> int | None:
        """KV block size (tokens) if the table describes a measured engine; None otherwise."""
        engine = self.meta.get("measured_engine")
        return None if engine is None else int(engine["facts"]["block_tokens"])

    @property
    def kv_cache_fp8(self) -> bool:
        """Whether the KV cache has 8 bits a value: built so, or by :func:`simulator.hardware.sources.with_fp8_kv`."""
        deployment = self.meta.get("aiconfigurator", {}).get("deployment", {})
        return "fp8" in (self.meta.get("kv_cache_dtype"), deployment.get("kv_cache_dtype"))

    def kv_pool_tokens(self, tier: int, kv_budget: float, drafts: bool) -> int:
        """Tokens that a replica's KV pool holds (:func:`simulator.hardware.memory.kv_pool_gb`)."""
        budget_gb, weights_gb = float(self.meta["memory_budget_gb"]), float(self.weights_gb[tier])
        pool_gb = kv_pool_gb(self.meta["memory_gb"], budget_gb, weights_gb, kv_budget, drafts)
        return math.floor(pool_gb * 1e9 / float(self.meta["kv_bytes_per_token"]))

    def tier_index(self, name: str) -> int:
        """The ``quant_tier`` of a precision in any case; raises :class:`InvalidConfigError` listing the precisions."""
        names = [tier.lower() for tier in self.tiers]
        if name.lower() not in names:
            raise InvalidConfigError(
                f"precision {short_repr(name)} is not one of {self.meta['hardware']}: {', '.join(self.tiers)}", "quant"
            )
        return names.index(name.lower())

    def refuse_tier(self, tier: int) -> None:
        """Raise :class:`InvalidActionError` listing the table's precisions if there is no precision of this number."""
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
    """Path of the table in use: ``INFERENCEGYM_TABLE`` if set, else the first of the catalogue."""
    return Path(os.environ.get(TABLE_ENV) or table_path(next(iter(table_index()))))


def load_tables(path: str | Path | None = None) -> ServingTables:
    """Read a table file; cached per path and content.

    Raises :class:`TableError` if the file is missing, damaged or lacks a column.
    """
    resolved = Path(path) if path is not None else default_table_path()
    try:
        with resolved.open("rb") as file:
            content = file.read(MAX_TABLE_BYTES + 1)
    except OSError as error:
        raise TableError(
            f"the lookup table {resolved} cannot be read ({error.strerror}); build it with `inferencegym build-table`"
        ) from error
    if len(content) > MAX_TABLE_BYTES:
        raise TableError(f"{resolved} is not a lookup table: it has more than {MAX_TABLE_BYTES:,} bytes")
    digest = hashlib.sha256(content).hexdigest()
    key = (str(resolved), digest)
    if key not in _loaded:
        ships = any(entry["sha256"] == digest for entry in table_index().values())
        columns, meta = _read_archived(digest) if ships else read_columns(key[0])
        _loaded[key] = _arrange(*key, columns, meta)
    return _loaded[key]


def tables_of(hardware: str | None = None, chosen: ServingTables | None = None) -> ServingTables:
    """Table of this name in the catalogue; None gives the ``chosen`` one, by default the default table.

    A task on hardware of its own so keeps it, whatever table the caller chose.
    """
    if hardware is not None:
        return load_tables(table_path(hardware))
    return load_tables() if chosen is None else chosen


_loaded: Final[dict[tuple[str, str], ServingTables]] = {}


def read_columns(path: str) -> tuple[dict[str, FloatArray], dict[str, Any]]:
    """All columns of a table file as float64 vectors, and its metadata."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ModuleNotFoundError as error:
        raise TableError(f"{path} cannot be read: {install_hint(error) or error}") from error

    try:
        with pq.ParquetFile(path) as file:
            n_rows = file.metadata.num_rows
            table = file.read() if n_rows <= MAX_TABLE_ROWS else None
    except (OSError, ValueError, pa.ArrowException) as error:
        raise _not_a_table(path, str(error)) from error
    if table is None:
        raise _not_a_table(path, f"it has {n_rows:,} rows")
    stated = (table.schema.metadata or {}).get(METADATA_KEY)
    if stated is None:
        raise TableError(f"{path} carries no InferenceGym metadata; rebuild it with `inferencegym build-table`")
    for field in table.schema:
        if not (pa.types.is_integer(field.type) or pa.types.is_floating(field.type)):
            raise _not_a_table(path, f"its column {field.name!r} holds no numbers")
    columns = {
        name: column.to_numpy().astype(np.float64)
        for name, column in zip(table.column_names, table.columns, strict=True)
    }
    try:
        meta = json.loads(stated)
        check_metadata(meta)
    except (ValueError, RecursionError) as error:
        raise _not_a_table(path, f"its metadata says {short_text(str(error), 300)}") from error
    return columns, meta


def _not_a_table(path: str, why: str) -> TableError:
    return TableError(f"{path} is not a lookup table: {why}; rebuild it with `inferencegym build-table`")


def write_archive(tables: Iterable[Path]) -> None:
    """Pack the columns and metadata of parquet tables into one archive."""
    packed: dict[str, NDArray[Any]] = {}
    for table in tables:
        digest = hashlib.sha256(table.read_bytes()).hexdigest()
        columns, meta = read_columns(str(table))
        packed |= {f"{digest}/{name}": column for name, column in columns.items()}
        packed[f"{digest}/{_META}"] = np.frombuffer(json.dumps(meta).encode(), dtype=np.uint8)
    with atomic_write(ARCHIVE) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, **packed)  # type: ignore[arg-type]  # for all that mypy knows, one is allow_pickle


_META: Final = "meta"


def _read_archived(digest: str) -> tuple[dict[str, FloatArray], dict[str, Any]]:
    """Like :func:`read_columns`, for a shipped table, found by its checksum."""
    archive = _open_archive(ARCHIVE)
    held = {name.partition("/")[2]: archive[name] for name in archive.files if name.startswith(digest)}
    return held, json.loads(held.pop(_META).tobytes())


@lru_cache(maxsize=1)
def _open_archive(path: Path) -> NpzFile:
    """The open archive: reading its directory takes twice as long as reading a table."""
    opened: NpzFile = np.load(path)
    return opened


def _arrange(path: str, digest: str, raw: Mapping[str, FloatArray], meta: Mapping[str, Any]) -> ServingTables:
    missing = [c for c in _RANGES if c not in raw]
    if missing:
        raise TableError(f"{path} lacks the column {missing[0]!r}; rebuild it with `inferencegym build-table`")
    for name, (least, most) in _RANGES.items():
        if not ((raw[name] >= least) & (raw[name] <= most)).all():
            raise _not_a_table(path, f"its column {name!r} must hold numbers from {least:g} to {most:g}")
    # As np.unique does, which imports numpy.ma first.
    axes = {name: np.array(sorted({*raw[name].tolist()})) for name in AXES}
    if len(axes["prompt_len_bucket"]) != len(meta["prompt_tokens"]):
        raise _not_a_table(path, "its metadata lists prompt lengths that differ from those of its rows")
    if not {int(k) for k in axes["spec_length"]} <= {0, *map(int, meta["spec_tokens_per_step"])}:
        raise _not_a_table(path, "its metadata lists draft lengths that differ from those of its rows")
    shape = tuple(len(axes[name]) for name in AXES)
    order = np.lexsort(tuple(raw[name] for name in reversed(AXES)))
    grid = np.meshgrid(*axes.values(), indexing="ij") if math.prod(shape) == len(order) else []
    if not grid or any((raw[name][order] != points.ravel()).any() for name, points in zip(AXES, grid, strict=True)):
        raise TableError(f"{path} is not a full grid: {len(order)} rows for {shape}")
    if shape[0] != len(meta["weights_gb"]) or shape[0] > MAX_TIERS:
        raise TableError(f"{path} has {shape[0]} precisions, but its metadata names {len(meta['weights_gb'])}")
    held = [name for name in (*SATURATED_COLUMNS, *VALUE_COLUMNS) if name in raw]
    columns = {name: np.ascontiguousarray(_padded(raw[name][order].reshape(shape))) for name in held}
    axes["prompt_len_bucket"] = np.array(meta["prompt_tokens"], dtype=np.float64)
    tables = ServingTables(path, digest, axes, columns, meta)
    wanted = (MAX_TIERS, shape[1], len(tables.iteration_batches), shape[4])
    try:
        listed = tables.iteration_ms.shape
    except ValueError:  # lists of different lengths
        listed = ()
    if listed != wanted:
        raise _not_a_table(path, f"its metadata's iteration_ms must have the shape {wanted}")
    return tables


def _padded(by_tier: FloatArray) -> FloatArray:
    """The array with its last tier (first axis) repeated up to ``MAX_TIERS``."""
    missing = MAX_TIERS - len(by_tier)
    return np.concatenate([by_tier, np.repeat(by_tier[-1:], missing, axis=0)]) if missing else by_tier
