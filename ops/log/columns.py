"""Columns of a request log: which column holds which quantity, and its cells as numbers, with pandas.

A log's columns are found by their usual names (:data:`USUAL_NAMES`) or named by the user (:func:`parse_columns`). Times
are ISO 8601, seconds, or an epoch time in s, ms, us or ns, told apart by magnitude. Any other cell is refused with its
line and column.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from inferencegym.errors import InvalidConfigError, short_text
from inferencegym.models import PRIORITY_CLASSES
from ops.log.source import MAX_NUMBER, MAX_TOKENS, Source, Value
from simulator.hardware.tables import FloatArray

QUANTITIES: Final = ("arrival", "prompt", "output", "class", "priority", "reused", "status", "blocks", "id", "model")
"""What a column may hold: a time, token counts, a priority class, a priority that need not be a class, how the request
ended, block ids, the request's id, the model."""
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
    "priority": ("priority",),
    "reused": ("reused_tokens", "reusable_prefix_tokens"),
    "status": ("status_code", "http_status", "response_status", "status", "success", "error_code", "error"),
    "blocks": ("hash_ids",),
    "id": ("request_id", "req_id", "id"),
    "model": ("model", "model_name"),
}
"""Usual names of each quantity, the most reliable first; case, spaces and punctuation do not count."""

FAILURES: Final = frozenset({"failure", "failed", "fail", "error", "errored", "timeout", "cancelled", "canceled"})
_NOTHING: Final = frozenset({"", "0", "none", "null", "nan", "false", "{}", "[]"})
_HTTP_ERROR: Final = re.compile(r"[4-9][0-9][0-9](?:\.0*)?")
_WEB_SERVER_TIME: Final = "%d/%b/%Y:%H:%M:%S %z"
_UNIT_SUFFIX: Final = re.compile(r"(?:_|\()(s|sec|seconds|ms|us|ns)\)?$")
_EPOCHS: Final = ((1e8, "s"), (1e11, "ms"), (1e14, "us"), (1e17, "ns"))
"""Smallest number that is taken for a time since 1970 in each unit (that of 1973); smaller numbers are seconds."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Column name of each quantity in a file, and the unit of its times (None: told by their magnitude)."""

    names: Mapping[str, str]
    unit: str | None = None

    def present(self, there: Sequence[str]) -> Columns:
        """Columns that are present; of names separated by ``|``, the first that is present."""
        found = {q: next((name for name in names.split("|") if name in there), "") for q, names in self.names.items()}
        return Columns({quantity: name for quantity, name in found.items() if name}, self.unit)

    def describe(self, clock: Clock) -> dict[str, str]:
        """Names of the columns, and how times were read."""
        named = {quantity: short_text(name) for quantity, name in self.names.items()}
        return {q: f"{n} ({clock.form})" if q == "arrival" else n for q, n in named.items()}


def parse_columns(text: str) -> Columns:
    """Columns in the user's words: ``arrival=ts:ms,prompt=in_tok,output=out_tok``, with a time's unit after a colon."""
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


def parse_filter(text: str) -> tuple[str, frozenset[str]]:
    """Column and allowed values of ``COLUMN=VALUE`` or ``COLUMN=VALUE,VALUE``."""
    column, equals, value = (part.strip() for part in text.partition("="))
    if not column or not equals:
        raise InvalidConfigError(
            f"filter: {short_text(text)!r} is not allowed: it must be COLUMN=VALUE, as in model=llama", "filter"
        )
    # A value may itself contain a comma.
    return column, frozenset({value, *(part.strip() for part in value.split(","))})


def find_columns(source: Source, available: Iterable[str], given: Columns | None = None) -> Columns:
    """Column of each quantity: as given, else by its usual names. Raises :class:`DataFormatError` if one is missing.

    ``available`` are the columns of a table, or the paths (``usage.prompt_tokens``) of the fields of JSON records.
    """
    there = list(dict.fromkeys(available))
    names = dict(given.names) if given is not None else {}
    asked = {"filter": source.only[0]} if source.only is not None else {}
    for quantity, name in {**names, **asked}.items():
        if name not in there:
            raise source.wrong(f"no column {name!r} for {quantity}; there are {_listed(there)}", name)
    for quantity in QUANTITIES:
        if quantity not in names and (found := _usual(quantity, there)) is not None:
            names[quantity] = found
    missing = [q for q in REQUIRED if q not in names]
    if missing:
        raise source.wrong(
            f"no column with a usual name for {' and '.join(missing)}; there are {_listed(there)}; name them with "
            "--columns arrival=COLUMN,prompt=COLUMN,output=COLUMN"
        )
    return Columns(names, given.unit if given is not None else None)


def plain(name: str) -> str:
    """A name without case, spaces and punctuation."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _usual(quantity: str, there: list[str]) -> str | None:
    """The column with the most reliable usual name; of several, the least nested one."""
    usual = {plain(name): rank for rank, name in enumerate(USUAL_NAMES[quantity])}
    found = []
    for place, name in enumerate(there):
        # Compare the whole path, then its last part: fields may lie inside nested objects.
        whole, last = plain(name), plain(name.rpartition(".")[2])
        if (rank := usual.get(whole, usual.get(last))) is not None:
            found.append((name.count("."), rank, place, name))
    if quantity in ("status", "id", "model", "priority"):  # nested fields of these names describe something else
        found = [f for f in found if f[0] == 0]
    # Rank comes first: `usage.prompt_tokens` is more reliable than a top-level `prompt`, which may be text.
    return min(found, key=lambda f: (f[1], f[0], f[2]))[3] if found else None


def _listed(names: list[str]) -> str:
    return short_text(", ".join(names), 300) if names else "none"


class Clock:
    """Reader of a log's times; the first cell decides the format of all.

    ``assumed`` says that nothing in the log tells the unit, and times were taken for seconds.
    """

    def __init__(self, unit: str | None = None, name: str = "") -> None:
        self._unit = unit
        self.assumed = False
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
            # One format for all lines, so that a day is never taken for a month on only some of them.
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
        self._unit, self.form, self.assumed = "s", "in s", True
        for least, unit in _EPOCHS:
            if abs(number) >= least:
                self._unit, self.form, self.assumed = unit, f"epoch {unit}", False

    def _of_dates(self, column: pd.Series, dates: pd.Series, source: Source, name: str) -> FloatArray:
        if dates.isna().any():
            at = int(np.flatnonzero(dates.isna())[0])
            raise _cell(column, at, source, name).wrong(
                "is not a time: neither ISO 8601, as 2023-11-16T18:15:46.680Z, nor a number of s, ms, us or ns"
            )
        since: FloatArray = dates.dt.as_unit("us").astype("int64").to_numpy() / 1e6
        return since


def numbers(column: pd.Series, source: Source, name: str, low: float, high: float) -> FloatArray:
    """Cells as numbers within bounds. Raises :class:`DataFormatError` about the first cell that is not one."""
    values = numbers_or_nan(column)
    wrong = ~((values >= low) & (values <= high))
    if wrong.any():
        _refuse(column, int(np.flatnonzero(wrong)[0]), source, name, low, high)
    return values


def numbers_or_nan(column: pd.Series) -> FloatArray:
    """Cells as numbers, NaN where a cell is not a number."""
    cells = column
    if column.dtype == bool or column.dtype == object:  # JSON: true is no number, integers have any size
        kept = [v if isinstance(v, (float, str)) or (type(v) is int and abs(v) < 1e30) else None for v in column]
        cells = pd.Series(kept, index=column.index, dtype="object")
    values: FloatArray = pd.to_numeric(cells, errors="coerce").to_numpy(dtype=np.float64, na_value=np.nan)
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
    if np.isnan(index).any():
        cell = _cell(column, int(np.flatnonzero(np.isnan(index))[0]), source, name)
        raise cell.wrong(f"is not allowed: it must be one of {', '.join(CLASSES)}")
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


def _refuse(column: pd.Series, at: int, source: Source, name: str, low: float, high: float) -> None:
    cell = _cell(column, at, source, name)
    if cell.value is None:
        raise cell.source.wrong(f"{cell.name} is missing", cell.name)
    cell.number(low, high)
    raise cell.wrong("is not a number")
