"""How far measured latencies lie above those of the discrete-event reference, by band of load.

``ops/data/margins.json`` holds measured / simulated latency over public runs
(``python -m benchmarks.fidelity.hardware --margins`` writes it): medians by card, and 90% bounds by machine, the
smallest ratio that a further run on it stays below with a probability of at least 90%, as in split conformal
prediction. Machines with the same card differ more than cards do, so the largest bound of any machine counts for every
card.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

MARGINS_PATH: Final = Path(__file__).with_name("data") / "margins.json"
BANDS: Final = {"light": 8.0, "knee": 64.0}
"""Most requests that a replica decodes at a time, averaged over its requests, in each band; more are saturated."""
SATURATED: Final = "saturated"
LOADS: Final = {
    "light": f"up to {BANDS['light']:g}",
    "knee": f"{BANDS['light']:g} to {BANDS['knee']:g}",
    SATURATED: f"over {BANDS['knee']:g}",
}
"""The same numbers of requests in words."""
CARDS: Final = {
    "a100-40gb": "a100",
    "a100-80gb": "a100",
    "a100_sxm": "a100",
    "h100_sxm": "h100",
    "h200_sxm": "h200",
    "b200_sxm": "b200",
}
"""Measured card of each card of a table."""
WITH_90: Final = "meets with 90%"
LIKELY: Final = "likely"
NOT: Final = "not"


@dataclass(frozen=True, slots=True)
class Ratio:
    """Measured over simulated latency: median, and 90% bound ``p90`` from ``points`` figures of runs on ``machine``.

    Both are at least 1, so that an error in the user's favour excuses no missed limit. ``own`` is False if the card was
    not measured: then the median is the largest of the others. ``of_model`` counts the figures of runs of the plan's
    model on that card, if their median was larger and is ``p50``.
    """

    p50: float
    p90: float
    points: int
    machine: str
    own: bool
    of_model: int = 0

    def at_least(self, of_model: tuple[float, int] | None) -> Ratio:
        """This ratio, or with the median of the model's own runs (and their number) if that is larger."""
        if of_model is None or of_model[0] <= 1.005 * self.p50:
            return self
        return replace(self, p50=of_model[0], p90=max(self.p90, of_model[0]), of_model=of_model[1])


def band_of(requests_per_replica: float) -> str:
    """Band of load, from the requests that a replica decodes at a time."""
    return next((band for band, most in BANDS.items() if requests_per_replica <= most), SATURATED)


def ratio(quantity: str, card: str, band: str) -> Ratio:
    """Ratio for a quantity of objectives (``ttft``, ``tpot``, ``e2e``, ``itl``) on a table's card."""
    medians, bounds = _margins()[quantity]["medians"], _margins()[quantity]["bounds"]
    name = CARDS.get(card, "")
    p50 = max(bands[band]["p50"] for of, bands in medians.items() if of == name or name not in medians)
    machine, found = max(((each, bands[band]) for each, bands in bounds.items()), key=lambda pair: pair[1]["p90"])
    return Ratio(max(1.0, p50), max(1.0, found["p90"]), int(found["points"]), machine, name in medians)


@cache
def _margins() -> dict[str, dict[str, dict[str, dict[str, dict[str, Any]]]]]:
    loaded: dict[str, Any] = json.loads(MARGINS_PATH.read_text(encoding="utf-8"))
    quantities: dict[str, dict[str, dict[str, dict[str, dict[str, Any]]]]] = loaded["quantities"]
    return quantities
