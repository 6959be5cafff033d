"""Reader of an engine's metrics page (Prometheus text)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from inferencegym.errors import RemoteError


@dataclass(frozen=True, slots=True)
class MetricsPage:
    """Samples of a metrics page: every label set of each name with its value."""

    samples: Mapping[str, list[tuple[dict[str, str], float]]]

    def total(self, name: str) -> float:
        """Sum over all label sets (several engine processes report apart); RemoteError if there is no such series."""
        return sum(value for _, value in self._of(name))

    def highest(self, name: str) -> float:
        """Largest value over all label sets, for shares."""
        return max(value for _, value in self._of(name))

    def labels(self, name: str) -> dict[str, str]:
        """Labels of the first sample, for series that say something by their labels."""
        return self._of(name)[0][0]

    def _of(self, name: str) -> list[tuple[dict[str, str], float]]:
        found = self.samples.get(name)
        if not found:
            raise RemoteError(f"the engine's metrics have no series {name}: is it the engine and the version expected?")
        return found


def read_page(text: str) -> MetricsPage:
    """Parse a metrics page; RemoteError if it is none."""
    samples: dict[str, list[tuple[dict[str, str], float]]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append((dict(sample.labels), float(sample.value)))
    except ValueError as error:
        raise RemoteError(f"the engine's metrics are not in Prometheus' text format: {error}") from error
    return MetricsPage(samples)
