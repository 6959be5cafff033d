"""Tables, reports and progress as commands print and write them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from inferencegym.errors import InvalidConfigError
from inferencegym.files import atomic_write, write_text
from ops.report import Report, plain

if TYPE_CHECKING:
    import pandas as pd

    from agents.search.solver import Progress

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


def export_path(args: argparse.Namespace, command: str) -> Path | None:
    """File that ``--export`` writes; None without it and for ``-``, which prints."""
    if args.export is None or str(args.export_file) == "-":
        return None
    return args.export_file or Path(f"{command}-{args.export}.yaml")


def write_export(path: Path | None, text: str) -> None:
    """Write an engine's configuration under its name and say so on stderr, or print it."""
    from ops.export import FILE

    if path is None:
        print(text, end="")
    else:
        print(f"wrote {write_text(path, text.replace(FILE, path.name))}", file=sys.stderr)


@contextmanager
def progress_line(what: str) -> Iterator[Progress]:
    """A line on stderr, if it is a terminal, with the current task in words and the share of all work that is done."""
    from rich import progress
    from rich.console import Console

    columns = (progress.TextColumn("{task.description}"), progress.BarColumn(), progress.TimeElapsedColumn())
    console = Console(stderr=True)
    with progress.Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        line = bar.add_task(what, total=1.0)

        def report(what: str, share: float | None) -> None:
            bar.update(line, completed=share, description=what)

        yield report


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
    if report.lines:
        print("", *report.lines, sep="\n")
    if report.details:
        print()
        print_report(report.details)
