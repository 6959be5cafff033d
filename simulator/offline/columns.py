"""Columns of a request log: which column holds what, and its cells as numbers, with pandas.

A log's columns are found by their usual names (:data:`USUAL_NAMES`) or named by the user (:func:`parse_columns`). Times
are ISO 8601, seconds, or an epoch time in s, ms, us or ns, told apart by their size. Whatever a cell holds instead is
refused with its line and column.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import pandas as pd

from inferencegym.errors import InvalidConfigError, short_text
from inferencegym.models import PRIORITY_CLASSES
from simulator.offline.source import MAX_NUMBER, MAX_TOKENS, Source, Value
from simulator.tables import FloatArray

QUANTITIES: Final = ("arrival", "prompt", "output", "class", "reused", "status", "blocks")
"""What a column may hold: a time, three counts of tokens, a priority class, how the request ended, ids of blocks."""
REQUIRED: Final = ("arrival", "prompt", "output")
UNITS: Final = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}
"""Units of a time, per second."""

USUAL_NAMES: Final[dict[str, tuple[str, ...]]] = {
    "arrival": (
        *("arrival_s", "arrival_time", "arrived_at", "arrival", "request_start_time", "request_start_ns"),
        *("start_time", "started_at", "start", "request_time", "request_timestamp", "timestamp_s", "timestamp_ms"),
        *("timestamp_us", "timestamp_ns", "timestamp", "time", "ts", "datetime", "date", "created_at", "created", "t"),
    ),
    "prompt": (
        *("prompt_tokens", "input_tokens", "context_tokens", "request_tokens", "num_prompt_tokens", "tokens_prompt"),
        *("num_input_tokens", "num_prefill_tokens", "prompt_token_count", "input_token_count", "tokens_in"),
        *("prompt_length", "prompt_len", "input_length", "input_len", "isl", "n_prompt_tokens", "prompt", "input"),
    ),
    "output": (
        *("completion_tokens", "output_tokens", "generated_tokens", "response_tokens", "num_output_tokens"),
        *("num_generated_tokens", "num_completion_tokens", "num_decode_tokens", "tokens_completion", "tokens_out"),
        *("completion_token_count", "output_token_count", "candidates_token_count", "output_length", "output_len"),
        *("generation_tokens", "completion_length", "osl", "n_generated_tokens", "output", "completion"),
    ),
    "class": ("class", "class_index"),
    "reused": ("reused_tokens", "reusable_prefix_tokens"),
    "status": ("status_code", "http_status", "response_status", "status", "success", "error_code", "error"),
    "blocks": ("hash_ids",),
}
"""Usual names of each quantity, the surest first; case, spaces and punctuation do not count."""

FAILURES: Final = frozenset({"failure", "failed", "fail", "error", "errored", "timeout", "cancelled", "canceled"})
_NOTHING: Final = frozenset({"", "0", "none", "null", "nan", "false", "{}", "[]"})
_WEB_SERVER_TIME: Final = "%d/%b/%Y:%H:%M:%S %z"
_UNIT_SUFFIX: Final = re.compile(r"(?:_|\()(s|sec|seconds|ms|us|ns)\)?$")
_EPOCHS: Final = ((1e8, "s"), (1e11, "ms"), (1e14, "us"), (1e17, "ns"))
"""Smallest numbers that are taken for times since 1970 (from 1973 on) in each unit; below all, seconds."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Name of the column of each quantity in a file, and the unit of its times (None: told by their size)."""

    names: Mapping[str, str]
    unit: str | None = None

    def describe(self, clock: Clock) -> dict[str, str]:
        """Names, with how the times were read."""
        return {q: f"{n} ({clock.form})" if q == "arrival" else n for q, n in self.names.items()}


def parse_columns(text: str) -> Columns:
    """Columns as the user names them: ``arrival=ts:ms,prompt=in_tok,output=out_tok``, a time's unit after a colon."""
    names: dict[str, str] = {}
    unit = None
    for part in filter(None, (p.strip() for p in text.split(","))):
        quantity, equals, name = (piece.strip() for piece in part.partition("="))
        if not equals or not name or quantity not in QUANTITIES:
            raise InvalidConfigError(
                f"columns: {short_text(part)!r} is not allowed: it must be QUANTITY=COLUMN, where QUANTITY is one of "
                f"{', '.join(QUANTITIES)}, as in arrival=timestamp,prompt=prompt_tokens,output=completion_tokens",
                "columns",
            )
        column, colon, end = name.rpartition(":")
        if quantity == "arrival" and colon and end in UNITS:
            name, unit = column, end
        names[quantity] = name
    return Columns(names, unit)


def find_columns(source: Source, available: Iterable[str], given: Columns | None = None) -> Columns:
    """The column of each quantity: as given, else by usual names. Raises :class:`DataFormatError` for a missing one.

    ``available`` are the columns of a table, or the paths (``usage.prompt_tokens``) of the fields of JSON records.
    """
    there = list(dict.fromkeys(available))
    names = dict(given.names) if given is not None else {}
    for quantity, name in names.items():
        if name not in there:
            raise source.wrong(f"no column {name!r} for {quantity}; there are {_listed(there)}", name)
    for quantity in QUANTITIES:
        if quantity not in names and (found := _usual(quantity, there)) is not None:
            names[quantity] = found
    missing = [q for q in REQUIRED if q not in names]
    if missing:
        raise source.wrong(
            f"no column of a usual name for {' and '.join(missing)}; there are {_listed(there)}; name them with "
            "--columns arrival=COLUMN,prompt=COLUMN,output=COLUMN"
        )
    return Columns(names, given.unit if given is not None else None)


def plain(name: str) -> str:
    """A name without what does not count: case, spaces and punctuation."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _usual(quantity: str, there: list[str]) -> str | None:
    """The column of the surest usual name, of those the one least deep in its record."""
    usual = {plain(name): rank for rank, name in enumerate(USUAL_NAMES[quantity])}
    found = []
    for place, name in enumerate(there):
        # Text that a record keeps of its request or answer has names of its own.
        whole, last = plain(name), plain(name.rpartition(".")[2])
        if (rank := usual.get(whole, usual.get(last))) is not None:
            found.append((name.count("."), rank, place, name))
    if quantity == "status":  # a field of that name deeper down is about something else
        found = [f for f in found if f[0] == 0]
    # The rank first: `usage.prompt_tokens` is surer than a top-level `prompt`, which may be the text.
    return min(found, key=lambda f: (f[1], f[0], f[2]))[3] if found else None


def _listed(names: list[str]) -> str:
    return short_text(", ".join(names), 300) if names else "none"


class Clock:
    """Reader of a log's times; the first cell settles the form of all."""

    def __init__(self, unit: str | None = None, name: str = "") -> None:
        self._unit = unit
        if unit is None and (found := _UNIT_SUFFIX.search(name.lower())) is not None:
            self._unit = found[1] if found[1] in UNITS else "s"
        self.form = "" if self._unit is None else f"in {self._unit}"

    def seconds(self, column: pd.Series, source: Source, name: str) -> FloatArray:
        """Times (s)."""
        if isinstance(column.dtype, pd.DatetimeTZDtype) or column.dtype.kind == "M":
            self.form = "timestamp"
            return self._of_dates(column, pd.to_datetime(column, utc=True), source, name)
        if not self.form:
            self._settle(column)
        if self._unit is None:
            # One form for all, so that a day is never taken for a month on some lines only.
            form = "ISO8601" if self.form == "ISO 8601" else _WEB_SERVER_TIME
            texts = column.astype("object").where(column.map(lambda v: isinstance(v, str)))
            return self._of_dates(column, pd.to_datetime(texts, utc=True, format=form, errors="coerce"), source, name)
        per_second = UNITS[self._unit]
        return numbers(column, source, name, 0.0, MAX_NUMBER * per_second) / per_second

    def _settle(self, column: pd.Series) -> None:
        known = column.dropna()
        first = known.iloc[0] if len(known) else 0
        number = pd.to_numeric(pd.Series([first], dtype="object"), errors="coerce").iloc[0]
        if isinstance(first, str) and np.isnan(number):
            self.form = "ISO 8601" if "/" not in first.partition(":")[0] else "time of a web server's log"
            return
        self._unit, self.form = "s", "in s"
        for least, unit in _EPOCHS:
            if abs(number) >= least:
                self._unit, self.form = unit, f"epoch {unit}"

    def _of_dates(self, column: pd.Series, dates: pd.Series, source: Source, name: str) -> FloatArray:
        if dates.isna().any():
            at = int(np.flatnonzero(dates.isna())[0])
            raise _cell(column, at, source, name).wrong(
                "is not a time: neither ISO 8601, as 2023-11-16T18:15:46.680Z, nor a number of s, ms, us or ns"
            )
        since: FloatArray = dates.dt.as_unit("us").astype("int64").to_numpy() / 1e6
        return since


def numbers(column: pd.Series, source: Source, name: str, low: float, high: float) -> FloatArray:
    """Cells as numbers within bounds. Raises :class:`DataFormatError` about the first that is none."""
    cells = column
    if column.dtype == bool or column.dtype == object:  # values of JSON: true is no number, integers have any size
        cells = column.map(lambda v: v if isinstance(v, (float, str)) or (type(v) is int and abs(v) < 1e30) else None)
    values: FloatArray = pd.to_numeric(cells, errors="coerce").to_numpy(dtype=np.float64, na_value=np.nan)
    wrong = ~((values >= low) & (values <= high))
    if wrong.any():
        _refuse(column, int(np.flatnonzero(wrong)[0]), source, name, low, high)
    return values


def tokens(column: pd.Series, source: Source, name: str) -> FloatArray:
    """Cells as numbers of tokens."""
    return numbers(column, source, name, 0.0, MAX_TOKENS)


def classes(column: pd.Series, source: Source, name: str) -> FloatArray:
    """Cells as priority classes: their names or their numbers."""
    known = {**{c: i for i, c in enumerate(PRIORITY_CLASSES)}, **{str(i): i for i in range(len(PRIORITY_CLASSES))}}
    values = column.astype(str).str.strip().map(known)
    if values.isna().any():
        cell = _cell(column, int(np.flatnonzero(values.isna())[0]), source, name)
        raise cell.wrong(f"is not allowed: it must be one of {', '.join(known)}")
    index: FloatArray = values.to_numpy(dtype=np.float64)
    return index


def failed(column: pd.Series, name: str) -> Any:
    """Whether each request failed, (N,) bool, by the column of its status, success or error."""
    text = column.fillna("").astype(str).str.strip().str.lower()
    kind = plain(name.rpartition(".")[2])
    if kind == "success":
        return text.isin(_NOTHING).to_numpy()
    if kind.startswith("error"):
        return (~text.isin(_NOTHING)).to_numpy()
    return (text.isin(FAILURES) | (pd.to_numeric(text, errors="coerce") >= 400)).to_numpy()


def _cell(column: pd.Series, at: int, source: Source, name: str) -> Value:
    raw, place = column.iloc[at], int(column.index[at])
    here, name = replace(source, line=max(0, place)), short_text(name)
    if place < 0:  # an element of a list
        name = f"[{-1 - place}].{name}"
    if column.dtype != object and pd.isna(raw):
        raw = None
    return Value(here, name, raw.tolist() if isinstance(raw, (np.generic, np.ndarray)) else raw, True)


def _refuse(column: pd.Series, at: int, source: Source, name: str, low: float, high: float) -> None:
    cell = _cell(column, at, source, name)
    if cell.value is None:
        raise cell.source.wrong(f"{cell.name} is missing", cell.name)
    cell.number(low, high)
    raise cell.wrong("is not a number")
