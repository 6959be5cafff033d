"""Iteration times composed of single operators, which are given one shape at a time or listed for a shipped table.

:mod:`simulator.hardware.aiconfigurator` evaluates operators with its library. The catalogue's archive of operators
lists the same times at the shapes that :class:`KernelModel` needs, and so does the metadata of other tables that were
built with it, so that tables are played without the library.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from inferencegym.files import atomic_write
from inferencegym.tasks import DATA_DIR
from simulator.hardware.measured import FloatArray
from simulator.hardware.operators import Chunk, LoopTerms, OperatorModel
from simulator.hardware.profiles import EngineProfile

ATTENTION_BATCHES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1024)
"""Batch sizes at which decode attention is evaluated: the measured ones, and some between the large ones."""
DENSE_ROWS: Final = 1024
"""Every row count up to this one is evaluated, because GEMM times jump from tile to tile."""
ROWS: Final[tuple[int, ...]] = (*range(1, DENSE_ROWS), *range(DENSE_ROWS, 8192, 64), *range(8192, 32769, 512))
"""Row counts at which all but attention and LM head is evaluated."""
LAST_CONTEXT: Final = 17
"""Nodes of decode attention are 2, 4, ... 2 ** LAST_CONTEXT tokens."""
CHUNK_TOKENS: Final = (1, 16, 64, 128, 256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 16384)
CHUNK_PREFIXES: Final = (0, 1024, 4096, 8192, 16384, 65536, 131072)
CHUNK_BATCHES: Final = (1, 2, 4, 8, 16, 64)
"""Chunks for which prefill attention is listed: their tokens, the tokens before them, and equal chunks at a time."""
SHAPES: Final = ("linear", "head", "attention", "prefill")
"""Arrays of the archive for each table, with its precisions as the first axis."""
FP8_KV: Final = {"attention": "attention_fp8_kv", "prefill": "prefill_fp8_kv"}
"""Arrays of the archive in place of these with an FP8 KV cache; tables of cards without such measurements lack them."""
ARCHIVE: Final = DATA_DIR / "tables" / "operators.npz"


class KernelTimes(Protocol):
    """Operators of one deployment in one precision; milliseconds, all layers and cards."""

    layers: int
    kv_bytes_per_token: float

    def linear(self, rows: int) -> float:
        """Everything but attention and LM head for ``rows`` tokens."""
        ...

    def head(self, rows: int) -> float:
        """LM head for ``rows`` sampled tokens."""
        ...

    def decode_attention(self, n: int, context: int) -> float:
        """Attention of ``n`` decoding sequences at this context."""
        ...

    def prefill_attention(self, tokens: int, prefix: int, batch: int) -> float:
        """Attention of ``batch`` chunks of ``tokens`` tokens, each after a prefix of ``prefix`` tokens."""
        ...


class KernelModel(OperatorModel):
    """Iteration times from single operators under one engine profile."""

    def __init__(self, tier: str, profile: EngineProfile, kernels: KernelTimes) -> None:
        super().__init__(tier, profile, kernels.layers, kernels.kv_bytes_per_token)
        self._kernels = kernels
        self._prefill: dict[tuple[int, int, int], float] = {}

    def linear_ms(self, rows: int) -> float:
        """All but attention and LM head for ``rows`` tokens; the GEMM scale multiplies the whole sum."""
        times = self._linear
        if rows >= ROWS[-1]:
            return times[-1] * rows / ROWS[-1]
        i = bisect_left(ROWS, rows)
        if ROWS[i] == rows:
            return times[i]
        return times[i - 1] + (times[i] - times[i - 1]) * (rows - ROWS[i - 1]) / (ROWS[i] - ROWS[i - 1])

    def prefill_attention_ms(self, chunks: Sequence[Chunk]) -> float:
        """Attention of chunks; equal chunks share one launch, as in the batched measurements."""
        alike: dict[Chunk, int] = {}
        for chunk in chunks:
            alike[chunk] = alike.get(chunk, 0) + 1
        time = 0.0  # not sum(), which compensates rounding errors from Python 3.12 on
        for chunk, n in alike.items():
            time += self._prefill_ms(chunk.tokens, chunk.prefix, n)
        return time

    def loop_terms(self) -> LoopTerms:
        """Prefill attention as listed, for a shipped table."""
        if not isinstance(self._kernels, ListedKernels):
            return LoopTerms()
        axes = (CHUNK_TOKENS, CHUNK_PREFIXES, CHUNK_BATCHES)
        return LoopTerms("listed", listed_ms=self._kernels.prefill_ms, listed=axes)

    def head_ms(self, rows: int) -> float:
        """LM head for ``rows`` tokens."""
        return self._head(rows) if rows > 0 else 0.0

    def _prefill_ms(self, tokens: int, prefix: int, batch: int) -> float:
        key = (tokens, prefix, batch)
        if key not in self._prefill:
            self._prefill[key] = self._kernels.prefill_attention(tokens, prefix, batch)
        return self._prefill[key]

    def attention_row(self, n_decode: int) -> list[float]:
        """Decode attention over the context nodes for one batch size, linear between the batch nodes."""
        grid = self._attention
        if n_decode >= ATTENTION_BATCHES[-1]:
            return [float(t) for t in grid[-1] * (n_decode / ATTENTION_BATCHES[-1])]
        return [float(np.interp(n_decode, ATTENTION_BATCHES, column)) for column in grid.T]

    @cached_property
    def _attention(self) -> FloatArray:
        """Decode attention, (batch nodes, context nodes), made non-decreasing along both axes."""
        grid = _decode_attention(self._kernels)
        # Sorting one axis keeps the other sorted.
        return np.apply_along_axis(in_order, 1, np.apply_along_axis(in_order, 0, grid))

    @cached_property
    def _linear(self) -> list[float]:
        times = in_order([self._kernels.linear(rows) for rows in ROWS]) * self.profile.gemm_scale
        return [float(t) for t in times]

    @cached_property
    def _head_nodes(self) -> list[float]:
        times = in_order([0.0, *(self._kernels.head(n) for n in range(1, DENSE_ROWS + 1))])
        return [float(t) for t in times * self.profile.gemm_scale]

    def _head(self, rows: int) -> float:
        nodes = self._head_nodes
        return nodes[rows] if rows <= DENSE_ROWS else nodes[-1] * rows / DENSE_ROWS


class ListedKernels:
    """Operators of one precision of a shipped table, as the archive lists them.

    Prefill attention is interpolated linearly between the listed chunks; all else is asked at listed shapes only.
    """

    def __init__(self, layers: int, kv_bytes_per_token: float, listed: dict[str, FloatArray]) -> None:
        self.layers, self.kv_bytes_per_token = layers, kv_bytes_per_token
        self._linear: dict[int, float] = dict(zip(ROWS, listed["linear"].tolist(), strict=True))
        self._head = listed["head"].tolist()
        self._attention = listed["attention"]
        self.prefill_ms = listed["prefill"]

    def linear(self, rows: int) -> float:
        """Everything but attention and LM head for a number of :data:`ROWS`."""
        return self._linear[rows]

    def head(self, rows: int) -> float:
        """LM head for up to :data:`DENSE_ROWS` sampled tokens."""
        return float(self._head[rows - 1])

    def decode_attention(self, n: int, context: int) -> float:
        """Attention of one of :data:`ATTENTION_BATCHES` sequences at a context that is a power of two."""
        return float(self._attention[ATTENTION_BATCHES.index(n), context.bit_length() - 2])

    def prefill_attention(self, tokens: int, prefix: int, batch: int) -> float:
        """Attention of equal chunks; beyond the listed ones it continues the slopes of the last two."""
        value = self.prefill_ms
        for nodes, at in ((CHUNK_TOKENS, tokens), (CHUNK_PREFIXES, prefix), (CHUNK_BATCHES, batch)):
            i = min(bisect_left(nodes, at, 1), len(nodes) - 1)
            share = (at - nodes[i - 1]) / (nodes[i] - nodes[i - 1])
            value = value[i - 1] + share * (value[i] - value[i - 1])
        return float(value)


def listed(kernels: KernelTimes) -> dict[str, FloatArray]:
    """Operator times at all shapes that the archive has."""
    chunks = [
        [[kernels.prefill_attention(t, p, n) for n in CHUNK_BATCHES] for p in CHUNK_PREFIXES] for t in CHUNK_TOKENS
    ]
    return {
        "linear": np.array([kernels.linear(rows) for rows in ROWS]),
        "head": np.array([kernels.head(rows) for rows in range(1, DENSE_ROWS + 1)]),
        "attention": _decode_attention(kernels),
        "prefill": np.array(chunks),
    }


def _decode_attention(kernels: KernelTimes) -> FloatArray:
    """Decode attention, (batch nodes, context nodes)."""
    return np.array([[kernels.decode_attention(n, 2 << j) for j in range(LAST_CONTEXT)] for n in ATTENTION_BATCHES])


def write_operators(tables: Iterable[tuple[str, Sequence[KernelTimes], Sequence[KernelTimes]]]) -> None:
    """Pack the operators of tables into one archive.

    A table is given by its checksum, its precisions, and these with an FP8 KV cache (none if that is not measured).
    """
    packed: dict[str, NDArray[np.float32]] = {}
    for digest, tiers, fp8_kv in tables:
        for kernels_of, names in ((tiers, dict(zip(SHAPES, SHAPES, strict=True))), (fp8_kv, FP8_KV)):
            every = [listed(kernels) for kernels in kernels_of]
            for name, held in names.items() if every else ():
                packed[f"{digest}/{held}"] = np.array([one[name] for one in every], dtype=np.float32)
        packed[f"{digest}/layers"] = np.array([kernels.layers for kernels in tiers], dtype=np.float32)
    with atomic_write(ARCHIVE) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, **packed)  # type: ignore[arg-type]  # for all that mypy knows, one is allow_pickle


def lists_fp8_kv(digest: str) -> bool:
    """Whether the archive has operators with an FP8 KV cache for the table with this checksum."""
    with np.load(ARCHIVE) as archive:
        return all(f"{digest}/{name}" in archive.files for name in FP8_KV.values())


@lru_cache(maxsize=64)
def listed_models(
    digest: str, tiers: tuple[str, ...], profile: EngineProfile, kv_bytes_per_token: float, fp8_kv: bool = False
) -> tuple[OperatorModel, ...] | None:
    """Operator models of the shipped table with this checksum, None for other tables.

    With ``fp8_kv`` attention is that of an FP8 KV cache, which :func:`lists_fp8_kv` must list.
    """
    names = FP8_KV if fp8_kv else {}
    with np.load(ARCHIVE) as archive:
        if f"{digest}/layers" not in archive.files:
            return None
        layers = archive[f"{digest}/layers"]
        found = {name: archive[f"{digest}/{names.get(name, name)}"].astype(np.float64) for name in SHAPES}
    return _models(tiers, layers, found, profile, kv_bytes_per_token)


def operator_lists(tiers: Sequence[KernelTimes]) -> dict[str, Any]:
    """Operator times of a table's precisions at all listed shapes, as its metadata states them (five digits)."""
    every = [listed(kernels) for kernels in tiers]
    stated = {name: [_rounded(one[name].tolist()) for one in every] for name in SHAPES}
    return {"layers": [kernels.layers for kernels in tiers], **stated}


def _rounded(times: Any) -> Any:
    return [_rounded(each) for each in times] if isinstance(times, list) else float(f"{times:.5g}")


def stated_models(
    stated: Mapping[str, Any], tiers: tuple[str, ...], profile: EngineProfile, kv_bytes_per_token: float
) -> tuple[OperatorModel, ...]:
    """Operator models from :func:`operator_lists`; raises ValueError if these are not operator times."""
    found = {name: np.array(stated.get(name), dtype=np.float64) for name in ("layers", *SHAPES)}
    for name, shape in {"layers": (), **_LISTED}.items():
        if found[name].shape != (len(tiers), *shape) or not ((found[name] >= 0.0) & (found[name] < 1e9)).all():
            raise ValueError(f"operators.{name} must hold {(len(tiers), *shape)} times of at least 0 ms")
    return _models(tiers, found.pop("layers"), found, profile, kv_bytes_per_token)


_LISTED: Final = {
    "linear": (len(ROWS),),
    "head": (DENSE_ROWS,),
    "attention": (len(ATTENTION_BATCHES), LAST_CONTEXT),
    "prefill": (len(CHUNK_TOKENS), len(CHUNK_PREFIXES), len(CHUNK_BATCHES)),
}
"""Shape of each of :data:`SHAPES` for one precision."""


def _models(
    tiers: tuple[str, ...],
    layers: FloatArray,
    found: Mapping[str, FloatArray],
    profile: EngineProfile,
    kv_bytes_per_token: float,
) -> tuple[OperatorModel, ...]:
    each = ({name: values[i] for name, values in found.items()} for i in range(len(tiers)))
    return tuple(
        KernelModel(tier, profile, ListedKernels(int(n), kv_bytes_per_token, times))
        for tier, n, times in zip(tiers, layers, each, strict=True)
    )


def in_order(times: Sequence[float] | FloatArray) -> FloatArray:
    """Nearest non-decreasing times, (N,): a measurement that falls is averaged with those before it.

    Measured times sometimes fall by a few per cent from one tile of rows to the next, although more work takes longer.
    """
    means: list[float] = []
    counts: list[int] = []
    for time in times:
        means.append(float(time))
        counts.append(1)
        while len(means) > 1 and means[-2] > means[-1]:
            last, n = means.pop(), counts.pop()
            means[-1] = (means[-1] * counts[-1] + last * n) / (counts[-1] + n)
            counts[-1] += n
    return np.repeat(means, counts)
