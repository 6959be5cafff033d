"""Reader of files of other programs, value by value, with errors that name file, line and field.

No reader looks into bare JSON: it asks a :class:`Value` for what the format promises and gets that, or an error that
names file, line and field. What may be there instead (another type, nothing, a number that no float can hold, a
thousand brackets) is refused here, once for all formats.
"""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TextIO

import numpy as np

from inferencegym import errors
from inferencegym.errors import DataFormatError
from simulator.tables import FloatArray

MAX_DOCUMENT_CHARS: Final = 1_000_000_000
"""Size of a file that must be parsed whole."""
MAX_TOKENS: Final = 10_000_000
MAX_NUMBER: Final = 1e12
"""No count, rate, latency in ms or time in s since 1970 comes near."""

_DECODER: Final = json.JSONDecoder()
_SPACE: Final = re.compile(r"\s*")


@dataclass(slots=True)
class Source:
    """A file being read: the current line, what was left out, and which ``run`` of several is wanted."""

    path: Path
    run: int | None = None
    line: int = 0
    skipped: Counter[str] = field(default_factory=Counter)

    def wrong(self, what: str, field: str | None = None) -> DataFormatError:
        """The error with this text about the file, and about its current line where lines are read."""
        place = f"{self.path}, line {self.line}" if self.line else str(self.path)
        return DataFormatError(f"{place}: {what}", self.line or None, field)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Turn errors of the file itself into :class:`DataFormatError`."""
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

    def text(self) -> str:
        """The whole file."""
        with self.path.open(encoding="utf-8-sig") as file:
            return self.text_of(file)

    def text_of(self, file: TextIO) -> str:
        """All text of an open file."""
        found = file.read(MAX_DOCUMENT_CHARS + 1)
        if not found:
            raise self.wrong("is empty")
        if len(found) > MAX_DOCUMENT_CHARS:
            raise self.wrong(f"has more than {MAX_DOCUMENT_CHARS:,} characters, the most of a document")
        return found

    def object(self, text: str) -> Value:
        """The one JSON object that a text holds."""
        found = list(self.objects(text))
        if len(found) != 1:
            raise self.wrong(f"is not JSON (there must be one object, not {len(found)})")
        return found[0]

    def objects(self, text: str) -> Iterator[Value]:
        """The JSON objects that follow one another in a text."""
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


# Not frozen, which would take three times as long to make: there are several for each request of a log.
@dataclass(slots=True)
class Value:
    """A value of a file; ``name`` is the way to it, ``cell`` says that it is text of a table, where numbers are text.

    Every method raises :class:`DataFormatError` where the value is not what it is asked for.
    """

    source: Source
    name: str
    value: Any
    cell: bool = False

    def wrong(self, what: str) -> DataFormatError:
        """The error with this text about the value."""
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
        # Compared before it is converted: JSON's integers know no largest one. NaN is within no bounds.
        if not low <= value <= high:
            raise self.wrong(f"is not allowed: it must be from {low:g} to {high:g}")
        return float(value)

    def tokens(self) -> float:
        """A number of tokens."""
        return self.number(0, MAX_TOKENS)

    def text(self) -> str:
        """Text without the space around it."""
        if not isinstance(self.value, str):
            raise self.wrong("is not text")
        return self.value.strip()

    def at(self, key: str) -> Value:
        """A field of an object."""
        fields = self._fields()
        if key not in fields:
            raise self.source.wrong(f"no field {self._name_of(key)!r}")
        return Value(self.source, self._name_of(key), fields[key])

    def find(self, *keys: str) -> Value | None:
        """A field of an object, in another where several keys are given; None where one of them is missing or null."""
        found = self
        for key in keys:
            value = found._fields().get(key)
            if value is None:
                return None
            found = Value(found.source, found._name_of(key), value)
        return found

    def items(self) -> Iterator[Value]:
        """Elements of a list, each with its name."""
        return (Value(self.source, f"{self.name}[{i}]", item) for i, item in enumerate(self.elements()))

    def elements(self) -> list[Any]:
        """Elements of a list, unchecked."""
        if not isinstance(self.value, list):
            raise self.wrong("is not a list")
        return self.value

    def integers(self) -> tuple[int, ...]:
        """A list of integers, however large."""
        if not all(type(item) is int for item in self.elements()):
            raise next(item for item in self.items() if type(item.value) is not int).wrong("is not an integer")
        return tuple(self.value)

    def numbers(self) -> FloatArray:
        """A list of numbers from 0 to ``MAX_NUMBER``, at least one."""
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
    """Text of a value for error messages; lists and objects are abbreviated, since their text has no limit."""
    if isinstance(value, (dict, list)):
        return "{...}" if isinstance(value, dict) else "[...]"
    return errors.short_repr(value, 60)


def _end_of_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at
