"""Reader of an engine's metrics page (Prometheus text)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from inferencegym.errors import RemoteError

_SAMPLE: Final = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?")
_LABEL: Final = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class MetricsPage:
    """Samples of a metrics page: every label set of each name with its value."""

    samples: Mapping[str, list[tuple[dict[str, str], float]]]

    def total(self, name: str) -> float:
        """Sum over all label sets (engine processes report separately); RemoteError if there is no such series."""
        return sum(value for _, value in self._of(name))

    def highest(self, name: str) -> float:
        """Largest value over all label sets, for shares."""
        return max(value for _, value in self._of(name))

    def labels(self, name: str) -> dict[str, str]:
        """Labels of the first sample, for series whose labels carry the information."""
        return self._of(name)[0][0]

    def _of(self, name: str) -> list[tuple[dict[str, str], float]]:
        found = self.samples.get(name)
        if not found:
            raise RemoteError(f"the engine's metrics have no series {name}: is it the engine and the version expected?")
        return found


def read_page(text: str) -> MetricsPage:
    """Parse a metrics page. Raises RemoteError if the text is not one."""
    samples: dict[str, list[tuple[dict[str, str], float]]] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        if line.startswith("#"):
            continue
        found = _SAMPLE.fullmatch(line)
        try:
            name, labels, value = found.groups("") if found else ("", "", "")
            samples.setdefault(name, []).append((dict(_LABEL.findall(labels)), float(value)))
        except ValueError as error:
            raise RemoteError(f"the engine's metrics are not in Prometheus' text format: {line[:80]!r}") from error
    return MetricsPage(samples)
