"""Histograms of an engine's metrics page."""

from __future__ import annotations

from live.metrics import MetricsPage


def buckets(page: MetricsPage, histogram: str) -> dict[float, float] | None:
    """Cumulative counts of a histogram by upper edge, summed over processes; None if there is no such histogram."""
    found: dict[float, float] = {}
    for labels, count in page.samples.get(f"{histogram}_bucket", ()):
        edge = float(labels["le"])
        found[edge] = found.get(edge, 0.0) + count
    return found or None
