"""Measured shapes in aiconfigurator-core's raw data, to tell measured times from interpolated and extrapolated ones."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import aiconfigurator_core as library
import numpy as np
import pyarrow.parquet as pq

from simulator.hardware.measured import FloatArray
from simulator.hardware.operators import EXTRAPOLATED, INTERPOLATED, MEASURED, MODELLED

_FOLDER = Path(library.__file__).parent / "systems" / "data"


class RawKeys:
    """Shapes measured on one system under one engine, in all versions up to the one in use."""

    def __init__(self, system: str, engine: str, version: str) -> None:
        self._folder, self._engine, self._version = _FOLDER / system, engine, _numbers(version)

    def level(self, op: str, fields: dict[str, Any], rows: int, batch: int, tokens: int) -> int:
        """Support of one operator at ``rows`` tokens, or of attention at ``batch`` sequences of ``tokens`` tokens."""
        if op == "Gemm":
            return self._gemm(rows, fields["n"], fields["k"], fields["quant_mode"])
        if op == "GenerationAttention":
            return self._attention("generation", fields, batch, tokens)
        if op == "ContextAttention":
            return self._attention("context", fields, batch, tokens)
        if op == "Moe":
            return self._moe(fields, rows)
        if op in ("CustomAllReduce", "MoeDispatch"):
            return self._all_reduce(fields, rows)
        return MODELLED

    def _gemm(self, m: int, n: int, k: int, dtype: str) -> int:
        shapes = self._gemms.get(dtype)
        if shapes is None:
            return MODELLED
        if (m, n, k) in shapes.held:
            return MEASURED
        inside = (shapes.low <= (m, n, k)).all() and (shapes.high >= (m, n, k)).all()
        return INTERPOLATED if inside else EXTRAPOLATED

    def _attention(self, phase: str, fields: dict[str, Any], batch: int, tokens: int) -> int:
        kv_heads = fields["n_kv"]
        key = (fields["n"], kv_heads, fields["head_size"], fields["window_size"], fields["kv_cache_dtype"])
        shapes = self._attentions[phase].get(key)
        if shapes is None:
            return MODELLED
        if (batch, tokens) in shapes.held:
            return MEASURED
        # Large batches of long contexts do not fit into the card, so the range is no rectangle: a shape lies within it
        # if some measured shape is at least as large in both.
        return INTERPOLATED if ((shapes.all >= (batch, tokens)).all(axis=1)).any() else EXTRAPOLATED

    def _moe(self, fields: dict[str, Any], rows: int) -> int:
        names = ("hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size")
        held = self._experts.get((*(fields[name] for name in names), fields["quant_mode"]))
        if held is None:
            return MODELLED
        return MEASURED if rows in held else INTERPOLATED if rows <= max(held) else EXTRAPOLATED

    def _all_reduce(self, fields: dict[str, Any], rows: int) -> int:
        held = self._reductions.get(fields.get("tp_size", fields.get("moe_tp_size", 1)))
        size = rows * fields["hidden_size"]
        if held is None:
            return MODELLED
        return MEASURED if size in held else INTERPOLATED if size <= max(held) else EXTRAPOLATED

    @cached_property
    def _gemms(self) -> dict[str, _Shapes]:
        table = self._table("gemm", "gemm_perf.parquet", ("gemm_dtype", "m", "n", "k"))
        return {dtype: _Shapes(table[1:, table[0] == dtype].astype(np.int64).T) for dtype in np.unique(table[0])}

    @cached_property
    def _attentions(self) -> dict[str, dict[tuple[Any, ...], _Shapes]]:
        found: dict[str, dict[tuple[Any, ...], _Shapes]] = {}
        for phase, length in (("generation", "step"), ("context", "isl")):
            names = ("num_heads", "num_key_value_heads", "head_dim", "window_size", "kv_cache_dtype", "batch_size")
            table = self._table("attention", f"{phase}_attention_perf.parquet", (*names, length))
            groups: dict[tuple[Any, ...], list[tuple[int, int]]] = {}
            for heads, kv, dim, window, dtype, batch, tokens in table.T:
                key = (int(heads), int(kv), int(dim), int(window), str(dtype))
                groups.setdefault(key, []).append((int(batch), int(tokens) + (phase == "generation")))
            found[phase] = {key: _Shapes(np.array(held)) for key, held in groups.items()}
        return found

    @cached_property
    def _experts(self) -> dict[tuple[Any, ...], set[int]]:
        names = ("hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size", "moe_dtype")
        table = self._table("moe", "moe_perf.parquet", (*names, "num_tokens"))
        found: dict[tuple[Any, ...], set[int]] = {}
        for *key, dtype, rows in table.T:
            found.setdefault((*map(int, key), str(dtype)), set()).add(int(rows))
        return found

    @cached_property
    def _reductions(self) -> dict[int, set[int]]:
        table = self._table("comm", "custom_allreduce_perf.parquet", ("num_gpus", "message_size"))
        found: dict[int, set[int]] = {}
        for cards, size in table.T:
            found.setdefault(int(cards), set()).add(int(size))
        return found

    def _table(self, family: str, file: str, names: tuple[str, ...]) -> Any:
        """Columns of all files of a family, (len(names), rows), as objects."""
        parts = [np.empty((len(names), 0), dtype=object)]
        for path in sorted((self._folder / family / self._engine).glob(f"*/{file}")):
            if _numbers(path.parent.name) <= self._version:
                there = set(pq.read_schema(path).names)
                table = pq.read_table(path, columns=[name for name in names if name in there])
                # Older files have no column for sliding windows, and none of their rows uses one.
                columns = [table[n].to_numpy() if n in there else np.zeros(len(table)) for n in names]
                parts.append(np.array(columns, dtype=object))
        return np.concatenate(parts, axis=1)


class _Shapes:
    """Measured shapes of one kernel, one per row."""

    def __init__(self, shapes: Any) -> None:
        self.all: FloatArray = shapes
        self.held = set(map(tuple, shapes.tolist()))
        self.low, self.high = shapes.min(axis=0), shapes.max(axis=0)


def _numbers(version: str) -> tuple[int, ...]:
    """Numbers of a version, for comparison; suffixes (``rc1``, ``dev2``) are left out."""
    found = []
    for part in version.split("."):
        digits = "".join(c for c in part if c.isdigit())
        if digits != part:
            found.append(int(digits[:1] or 0))
            break
        found.append(int(part))
    return tuple(found)
