"""Read files of other programs value by value, with errors that name file, line and field.

Readers never handle bare JSON: they ask a :class:`Value` for what the format promises and get it, or an error that
names file, line and field. Anything else (another type, nothing, a number that no float can hold, a thousand brackets)
is refused here, once for all formats.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TextIO

import numpy as np

from inferencegym import errors
from inferencegym.errors import DataFormatError
from simulator.hardware.tables import FloatArray
from simulator.load.prefix import BLOCK_TOKENS

MAX_DOCUMENT_CHARS: Final = 1_000_000_000
"""Largest file (characters) that is parsed whole."""
MAX_LINE: Final = 16_000_000
"""Largest line of JSON (characters), far beyond any request's block ids."""
MAX_TOKENS: Final = 10_000_000
MAX_NUMBER: Final = 1e12
"""Largest number: no count, rate, latency in ms or time in s since 1970 comes near it."""

_DECODER: Final = json.JSONDecoder()
_SPACE: Final = re.compile(r"\s*")


MAX_SKIP_BAD: Final = 10_000
"""Most rows that cannot be read and may be left out: with more, the format is the wrong one."""
_BAD_SHOWN: Final = 5


@dataclass(slots=True)
class Source:
    """A file being read, or the ``content`` of a file that was uploaded under the name ``path``.

    ``run`` chooses one of several runs, ``skip_failed`` leaves out failed requests, ``only`` are columns, each with
    the values of which every request must have one in it, ``skip_bad`` is how many rows that cannot be read may be left
    out, and ``drop_duplicates`` whether only the first request of each id counts.
    Reading sets the other fields: the current line (0: none), the list that records lie ``within``, rows left out by
    reason, the errors of each row that cannot be read by field (:meth:`leave_out`), the size of blocks of repeated
    prefixes, and ``notes``, sentences about the log.
    """

    path: Path
    run: int | None = None
    content: str | None = field(default=None, repr=False)
    skip_failed: bool = False
    only: Sequence[tuple[str, frozenset[str]]] = ()
    skip_bad: int = 0
    drop_duplicates: bool = False
    line: int = 0
    within: str = ""
    block_tokens: int = BLOCK_TOKENS
    skipped: Counter[str] = field(default_factory=Counter)
    bad: dict[int, dict[str, DataFormatError]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    model: str | None = None

    def wrong(self, what: str, field: str | None = None) -> DataFormatError:
        """Error with this text about the file and, if it is read by lines, its current line."""
        place = f"{self.path}, line {self.line}" if self.line else str(self.path)
        return DataFormatError(f"{place}: {what}", self.line or None, field)

    def leave_out(self, row: int, error: DataFormatError) -> None:
        """Leave out a row that cannot be read, known by its line or position; :meth:`check_bad` may refuse it later."""
        self.bad.setdefault(row, {})[error.field or ""] = error
        if len(self.bad) > MAX_SKIP_BAD:
            self._refuse_bad(f"more than {MAX_SKIP_BAD:,} rows cannot be read: this is not the format")

    def check_bad(self, readable: int) -> None:
        """Count the rows left out and list the first; ``readable`` is the number of the others.

        Raises an error about the first row, with all of its wrong fields and the number of such rows, if there are more
        than :attr:`skip_bad` or no others.
        """
        if not (n := len(self.bad)):
            return
        if not readable:
            self._refuse_bad("no row can be read")
        if n > self.skip_bad:
            said = f"{n:,} row{'s' if n > 1 else ''} cannot be read"
            self._refuse_bad(f"{said}, and --skip-bad allows {self.skip_bad:,}" if self.skip_bad else said)
        self.skipped["cannot be read"] = n
        shown = [self._told(row).removeprefix(f"{self.path}, ") for row in sorted(self.bad, key=abs)[:_BAD_SHOWN]]
        more = f"; and {n - len(shown):,} more" if n > len(shown) else ""
        self.notes.append(f"rows that cannot be read are left out: {'; '.join(shown)}{more}")

    def _refuse_bad(self, count: str) -> None:
        first = min(self.bad, key=abs)
        error = next(iter(self.bad[first].values()))
        refused = DataFormatError(f"{self._told(first)}; {count}", error.line, error.field)
        if count.endswith("cannot be read"):
            refused.add_note("--skip-bad N leaves out up to N such rows")
        raise refused

    def _told(self, row: int) -> str:
        """Everything that is wrong with a row."""
        self.line = max(0, row)
        first, *others = map(str, self.bad[row].values())
        return "; ".join([first, *(text.removeprefix(str(self.wrong(""))) for text in others)])

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Turn errors in reading the file into :class:`DataFormatError`."""
        try:
            yield
        except OSError as error:
            raise DataFormatError(f"{self.path}: cannot be read ({error.strerror or error})") from error
        except UnicodeDecodeError as error:
            raise DataFormatError(
                f"{self.path}: is not UTF-8 text (byte 0x{error.object[error.start]:02x} near line {self.line + 1}); "
                "convert it, for example with `iconv -t UTF-8`"
            ) from error
        except csv.Error as error:
            raise self.wrong(f"is not CSV ({error})") from error
        except (EOFError, zlib.error) as error:
            raise self.wrong("is compressed, and damaged or cut short") from error

    def is_folder(self) -> bool:
        """Whether the path is a folder of files."""
        return self.content is None and self.path.is_dir()

    def begins_with(self, mark: bytes) -> bool:
        """Whether the file begins with these bytes."""
        if self.content is not None:
            return False
        with self.path.open("rb") as file:
            return file.read(len(mark)) == mark

    def open(self) -> TextIO:
        """Open the text; a compressed file is decompressed."""
        if self.content is not None:
            return io.StringIO(self.content.removeprefix("\ufeff"), newline="")
        if self.begins_with(b"\x1f\x8b"):
            return gzip.open(self.path, "rt", encoding="utf-8-sig", newline="")
        return self.path.open(encoding="utf-8-sig", newline="")

    def lines(self) -> Iterator[str]:
        """Lines one by one, counted in ``line``."""
        self.line = 0
        with self.open() as file:
            while line := file.readline(MAX_LINE):
                self.line += 1
                if len(line) >= MAX_LINE:
                    raise self.wrong(f"is longer than {MAX_LINE:,} characters: this is not a request log")
                if "\0" in line:
                    raise self.wrong(
                        "holds a zero byte: this is not UTF-8 text; convert it, for example with `iconv -t UTF-8`"
                    )
                yield line
        self.line = 0

    def text(self) -> str:
        """The whole text."""
        with self.open() as file:
            found = file.read(MAX_DOCUMENT_CHARS + 1)
        if not found:
            raise self.wrong("is empty")
        if len(found) > MAX_DOCUMENT_CHARS:
            raise self.wrong(f"has more than {MAX_DOCUMENT_CHARS:,} characters, the most of a document")
        return found

    def document(self) -> Value:
        """The only JSON object of the file."""
        return self.object(self.text())

    def json_lines(self) -> Iterator[Value]:
        """JSON objects, one a line, without lines that hold none (:meth:`leave_out`)."""
        for line in self.lines():
            if line.strip():
                try:
                    found = self.object(line)
                except DataFormatError as error:
                    self.leave_out(self.line, error)
                else:
                    yield found

    def documents(self) -> Iterator[Value]:
        """The JSON objects of the file, one a line or one over several lines."""
        first = next((line for line in self.lines() if line.strip()), "")
        try:
            self.object(first)
        except DataFormatError:
            self.line = 0
            yield from self.objects(self.text())
        else:
            yield from self.json_lines()

    def object(self, text: str) -> Value:
        """The only JSON object of a text."""
        found = list(self.objects(text))
        if len(found) != 1:
            raise self.wrong(f"is not JSON (there must be one object, not {len(found)})")
        return found[0]

    def objects(self, text: str) -> Iterator[Value]:
        """JSON objects that follow one another in a text."""
        at = _end_of_space(text, 0)
        while at < len(text):
            value, end = self._decoded(text, at)
            if not isinstance(value, dict):
                raise self.wrong("is not a JSON object")
            yield Value(self, "", value)
            at = _end_of_space(text, end)

    def json(self, text: str) -> Any:
        """The JSON value that a text begins with."""
        return self._decoded(text, 0)[0]

    def _decoded(self, text: str, at: int) -> tuple[Any, int]:
        try:
            return _DECODER.raw_decode(text, at)
        except json.JSONDecodeError as error:
            raise self.wrong(f"is not JSON ({error})") from None
        except RecursionError:
            raise self.wrong("is nested too deeply: this is neither a log nor a report") from None
        except ValueError:  # Python reads no integer of more than 4,300 digits
            raise self.wrong("holds a number of thousands of digits: this is neither a log nor a report") from None


# Not frozen: a frozen one takes three times as long to make, and every request of a log makes several.
@dataclass(slots=True)
class Value:
    """A value of a file; ``name`` is its path in the file, and ``cell`` marks a table cell, where numbers are text.

    Every method raises :class:`DataFormatError` if the value is not of the requested kind.
    """

    source: Source
    name: str
    value: Any
    cell: bool = False

    def wrong(self, what: str) -> DataFormatError:
        """Error with this text about the value."""
        return self.source.wrong(f"{self.name}={value_text(self.value)} {what}", self.name or None)

    def number(self, low: float = 0.0, high: float = MAX_NUMBER) -> float:
        """A number within bounds."""
        value = self.value
        if self.cell and isinstance(value, str):
            try:
                value = float(value)
            except ValueError:
                raise self.wrong("is not a number") from None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.wrong("is not a number")
        # Compare before converting: JSON integers can be larger than any float. NaN is within no bounds.
        if not low <= value <= high:
            raise self.wrong(f"is not allowed: it must be from {low:g} to {high:,.0f}")
        return float(value)

    def tokens(self) -> float:
        """A number of tokens."""
        return self.number(0, MAX_TOKENS)

    def text(self) -> str:
        """Text without surrounding space."""
        if not isinstance(self.value, str):
            raise self.wrong("is not text")
        return self.value.strip()

    def at(self, key: str) -> Value:
        """A field of an object."""
        fields = self._fields()
        if key not in fields:
            raise self.source.wrong(f"no field {self._name_of(key)!r}")
        return Value(self.source, self._name_of(key), fields[key])

    def find(self, *paths: str) -> Value | None:
        """The first of these fields that is present and not null; dots lead into nested objects."""
        for path in paths:
            found: Value | None = self
            for key in path.split("."):
                found = None if found is None else found.field(key)
            if found is not None:
                return found
        return None

    def field(self, key: str) -> Value | None:
        """A field of an object; None where it is missing or null."""
        value = self._fields().get(key)
        return None if value is None else Value(self.source, self._name_of(key), value, self.cell)

    def items(self) -> Iterator[Value]:
        """Elements of a list, each with its name."""
        return (Value(self.source, f"{self.name}[{i}]", item) for i, item in enumerate(self.elements()))

    def elements(self) -> list[Any]:
        """Elements of a list, unchecked."""
        if not isinstance(self.value, list):
            raise self.wrong("is not a list")
        return self.value

    def integers(self) -> tuple[int, ...]:
        """A list of integers of any size."""
        if not all(type(item) is int for item in self.elements()):
            raise next(item for item in self.items() if type(item.value) is not int).wrong("is not an integer")
        return tuple(self.value)

    def numbers(self) -> FloatArray:
        """A list of at least one number, each from 0 to ``MAX_NUMBER``."""
        if not self.elements():
            raise self.source.wrong(f"{self.name} is empty")
        return np.array([item.number() for item in self.items()])

    def _fields(self) -> dict[str, Any]:
        if not isinstance(self.value, dict):
            raise self.wrong("is not an object")
        return self.value

    def _name_of(self, key: str) -> str:
        return f"{self.name}.{key}" if self.name else key


def value_text(value: object) -> str:
    """Text of a value for error messages; lists and objects are abbreviated, because they may be of any length."""
    if isinstance(value, (dict, list)):
        return "{...}" if isinstance(value, dict) else "[...]"
    return errors.short_repr(value, 60)


def _end_of_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at
