"""Numbers, tables and curves as commands print and write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inferencegym.errors import InvalidConfigError
from inferencegym.files import atomic_write, require_matplotlib

if TYPE_CHECKING:
    import pandas as pd

TABLE_SUFFIXES = (".csv", ".parquet", ".json")


def plain(value: object) -> str:
    """A value as people write it: no exponents, thousands parted, about three digits that count."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {plain(inner)}" for name, inner in value.items()) or "none"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if value != value:
        return "-"
    size = abs(value)
    digits = 0 if float(value).is_integer() or size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 4
    return f"{value:,.{digits}f}"


def check_table(path: Path) -> None:
    """Raise :class:`InvalidConfigError` unless a table can be written in the form of the file's ending."""
    if path.suffix not in TABLE_SUFFIXES:
        raise InvalidConfigError(f"{path}: a table is written as one of {', '.join(TABLE_SUFFIXES)}")


def write_table(frame: pd.DataFrame, path: Path) -> Path:
    """Write a result table as CSV, parquet or JSON records, by the file's ending."""
    check_table(path)
    with atomic_write(path) as temporary:
        if path.suffix == ".csv":
            frame.to_csv(temporary, index=False)
        elif path.suffix == ".parquet":
            frame.to_parquet(temporary, index=False)
        else:
            frame.to_json(temporary, orient="records", indent=1)
    return path


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print rows under their columns, the first to the left, numbers to the right; nothing is cut."""
    cells = [[c if isinstance(c, str) else plain(c) for c in row] for row in rows]
    widths = [max(len(c[i]) for c in (list(columns), *cells)) for i in range(len(columns))]
    for row in (list(columns), *cells):
        print("  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))))


def write_curve(rows: Sequence[Mapping[str, Any]], path: Path, title: str) -> Path:
    """Write latency against throughput as a picture (PNG or SVG, by the file's ending)."""
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    x = [row["output_tokens_per_s"] for row in rows]
    for name, label, colour in (
        ("ttft_p50_ms", "TTFT p50", "#56b4e9"),
        ("ttft_p99_ms", "TTFT p99", "#0072b2"),
        ("tpot_p50_ms", "TPOT p50", "#d55e00"),
    ):
        axes.plot(x, [row[name] for row in rows], marker="o", markersize=3, color=colour, label=label)
    for row in rows:
        axes.annotate(f"{row['qps']:g}/s", (row["output_tokens_per_s"], row["ttft_p99_ms"]), fontsize=7)
    axes.set(xlabel="output tokens per second", ylabel="ms", yscale="log", title=title)
    axes.grid(True, color="#e4e8ef", linewidth=0.6)
    axes.legend(frameon=False)
    with atomic_write(path) as temporary:
        figure.savefig(temporary, dpi=150)
    return path
