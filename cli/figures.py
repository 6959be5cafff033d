"""Tables and reports as commands print and write them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from inferencegym.errors import InvalidConfigError
from inferencegym.files import atomic_write
from ops.report import Report, plain

if TYPE_CHECKING:
    import pandas as pd

TABLE_SUFFIXES = (".csv", ".parquet", ".json")


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
    """Print rows under their columns, the first column left-aligned, numbers right-aligned, nothing shortened."""
    cells = [[c if isinstance(c, str) else plain(c) for c in row] for row in rows]
    widths = [max(len(c[i]) for c in (list(columns), *cells)) for i in range(len(columns))]
    for row in (list(columns), *cells):
        print("  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))))


def print_report(report: Report) -> None:
    """Print the result of a plan or a comparison."""
    print("\n".join((report.lead, *report.refused)))
    for title, rows in report.tables.items():
        if rows:
            print(f"\n{title}")
            print_table(list(rows[0]), [list(row.values()) for row in rows])
    print()
    for line in report.lines:
        print(line)
