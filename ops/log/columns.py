"""Cells of a request log's columns as numbers, with pandas.

Times are ISO 8601, seconds, or an epoch time in s, ms, us or ns, told apart by magnitude. Any other cell is refused
with its line and column.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from inferencegym.errors import DataFormatError, short_text
from inferencegym.models import PRIORITY_CLASSES
from ops.log.names import UNITS, plain
from ops.log.source import MAX_NUMBER, MAX_TOKENS, Source, Value
from simulator.hardware.tables import FloatArray

FAILURES: Final = frozenset({"failure", "failed", "fail", "error", "errored", "timeout", "cancelled", "canceled"})
_NOTHING: Final = frozenset({"", "0", "none", "null", "nan", "false", "{}", "[]"})
_HTTP_ERROR: Final = re.compile(r"[4-9][0-9][0-9](?:\.0*)?")
_THOUSANDS: Final = re.compile(r"[0-9]{1,3}(,[0-9]{3})+([.][0-9]*)?")
_WEB_SERVER_TIME: Final = "%d/%b/%Y:%H:%M:%S %z"
_DATE: Final = re.compile(r"\[?([0-9]{4}-[0-9]{2}-[0-9]{2}|[0-9]{2}/[A-Za-z]{3}/[0-9]{4})")
_UNIT_SUFFIX: Final = re.compile(r"(?:_|\()(s|sec|seconds|ms|us|ns)\)?$")
FIRST_DATE_S: Final = 1e8
"""Smallest time that counts from 1970 (s; it is in 1973). Smaller ones count from the log's start, or are durations."""
_EPOCHS: Final = ((FIRST_DATE_S, "s"), (1e11, "ms"), (1e14, "us"), (1e17, "ns"))
"""Smallest number that is taken for a time since 1970 in each unit; smaller numbers are seconds."""


def is_date(column: pd.Series, name: str) -> bool:
    """Whether the first cell is a date or a time since 1970, not a small number."""
    return bool((Clock(name=name).seconds(column.dropna().iloc[:1], Source(Path()), name) >= FIRST_DATE_S).any())


class Clock:
    """Reader of a log's times; the first cell that is a time decides the format of all.

    ``assumed`` says that nothing in the log tells the unit, and times were taken for seconds.
    """

    def __init__(self, unit: str | None = None, name: str = "") -> None:
        self._unit, self.form, self.assumed = unit, "", False
        if unit is None and (found := _UNIT_SUFFIX.search(name.lower())) is not None:
            self._unit = found[1] if found[1] in UNITS else "s"

    @property
    def unit(self) -> str | None:
        """The unit that the user or the column's name states, or the cells settled; None if unknown yet."""
        return self._unit

    def seconds(self, column: pd.Series, source: Source, name: str) -> FloatArray:
        """Times (s)."""
        if isinstance(column.dtype, pd.DatetimeTZDtype) or column.dtype.kind == "M":
            self.form = "timestamp"
            return self._of_dates(column, pd.to_datetime(column, utc=True), source, name)
        if not self.form:
            self._settle(column)
        if self._unit is None:
            # One format for all lines, so that a day is never taken for a month on only some of them.
            form = "ISO8601" if self.form == "ISO 8601" else _WEB_SERVER_TIME
            texts = column.astype("object").where(column.map(lambda v: isinstance(v, str)))
            return self._of_dates(column, pd.to_datetime(texts, utc=True, format=form, errors="coerce"), source, name)
        per_second = UNITS[self._unit]
        return numbers(column, source, name, 0.0, MAX_NUMBER * per_second) / per_second

    def _settle(self, column: pd.Series) -> None:
        known = column.dropna()
        values = numbers_or_nan(known)
        at = next((i for i, cell in enumerate(known) if values[i] == values[i] or _DATE.match(str(cell).strip())), 0)
        first, number = (known.iloc[at], values[at]) if len(known) else (0, 0.0)
        if isinstance(first, str) and np.isnan(number) and (self._unit is None or _DATE.match(first.strip())):
            self._unit = None  # a date needs no unit
            self.form = "ISO 8601" if "/" not in first.partition(":")[0] else "time of a web server's log"
            return
        if self._unit is not None:
            self.form = f"in {self._unit}"
            return
        self._unit, self.form, self.assumed = "s", "in s", True
        for least, unit in _EPOCHS:
            if abs(number) >= least:
                self._unit, self.form, self.assumed = unit, f"epoch {unit}", False

    def _of_dates(self, column: pd.Series, dates: pd.Series, source: Source, name: str) -> FloatArray:
        for at in np.flatnonzero(dates.isna()).tolist():
            error = _cell(column, at, source, name).wrong(
                "is not a time: neither ISO 8601, as 2023-11-16T18:15:46.680Z, nor a number of s, ms, us or ns"
            )
            source.leave_out(int(column.index[at]), error)
        since: FloatArray = dates.dt.as_unit("us").astype("int64").to_numpy() / 1e6
        return since


def numbers(column: pd.Series, source: Source, name: str, low: float, high: float) -> FloatArray:
    """Cells as numbers within bounds; rows with any other cell are left out (:meth:`Source.leave_out`)."""
    values = numbers_or_nan(column)
    for at in np.flatnonzero(~((values >= low) & (values <= high))).tolist():
        cell = _cell(column, at, source, name)
        try:
            if cell.value is None:
                raise cell.source.wrong(f"{cell.name} is missing", cell.name)
            cell.number(low, high)
            raise cell.wrong("is not a number")
        except DataFormatError as found:
            error = found
        source.leave_out(int(column.index[at]), error)
    return values


def numbers_or_nan(column: pd.Series) -> FloatArray:
    """Cells as numbers, NaN where a cell is not a number."""
    cells = column
    if column.dtype == bool or column.dtype == object:  # JSON: true is no number, integers have any size
        kept = [v if isinstance(v, (float, str)) or (type(v) is int and abs(v) < 1e30) else None for v in column]
        cells = pd.Series(kept, index=column.index, dtype="object")
    values: FloatArray = pd.to_numeric(cells, errors="coerce").to_numpy(dtype=np.float64, na_value=np.nan, copy=True)
    unread = np.flatnonzero(np.isnan(values))
    for at, cell in zip(unread, cells.astype("object").to_numpy()[unread], strict=True):
        if isinstance(cell, str) and _THOUSANDS.fullmatch(cell.strip()):
            values[at] = float(cell.replace(",", ""))
    return values


def tokens(column: pd.Series, source: Source, name: str) -> FloatArray:
    """Cells as numbers of tokens."""
    return numbers(column, source, name, 0.0, MAX_TOKENS)


CLASSES: Final = {
    **{name: i for i, name in enumerate(PRIORITY_CLASSES)},
    **{str(i): i for i in range(len(PRIORITY_CLASSES))},
}
"""Index of a priority class by its name or number."""


def classes(column: pd.Series, source: Source, name: str) -> FloatArray:
    """Cells as priority classes: their names or their numbers."""
    index = classes_or_nan(column)
    for at in np.flatnonzero(np.isnan(index)).tolist():
        error = _cell(column, at, source, name).wrong(f"is not allowed: it must be one of {', '.join(CLASSES)}")
        source.leave_out(int(column.index[at]), error)
    return index


def classes_or_nan(column: pd.Series) -> FloatArray:
    """Index of the priority class that each cell names; NaN for a cell that names none."""
    return np.array([CLASSES.get(str(cell).strip().removesuffix(".0"), np.nan) for cell in column], dtype=np.float64)


def failed(column: pd.Series, name: str) -> NDArray[np.bool_]:
    """Whether each request failed, (N,), according to its status, success or error column."""
    # Python strings, not pandas' string type: a message may hold characters that UTF-8 cannot encode.
    texts = [str(cell).strip().lower() for cell in column.astype("object").where(column.notna(), "")]
    kind = plain(name.rpartition(".")[2])
    verdicts = {text: _says_failed(kind, text) for text in set(texts)}
    return np.array([verdicts[text] for text in texts], dtype=bool)


def _says_failed(kind: str, text: str) -> bool:
    if kind == "success":
        return text in _NOTHING
    if kind.startswith("error"):
        return text not in _NOTHING
    return text in FAILURES or _HTTP_ERROR.fullmatch(text) is not None


def _cell(column: pd.Series, at: int, source: Source, name: str) -> Value:
    raw, place = column.iloc[at], int(column.index[at])
    here, name = replace(source, line=max(0, place)), short_text(name)
    if place < 0:  # a list element
        name = f"{source.within}[{-1 - place}].{name}"
    if column.dtype != object and pd.isna(raw):
        raw = None
    return Value(here, name, raw.tolist() if isinstance(raw, (np.generic, np.ndarray)) else raw, True)
