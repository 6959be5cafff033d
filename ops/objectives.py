"""Latency objectives such as ``ttft_p99=500``: parse them, and check whether figures meet them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from inferencegym.errors import InvalidConfigError, short_repr
from inferencegym.models import QUANTILES

QUANTITIES: Final = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency, from one output of a request to its next",
    "e2e": "end-to-end latency, from arrival to the last token",
}
ALWAYS: Final = ("ttft", "tpot")
"""Quantities of which every plan states the errors (:mod:`ops.margins`), whatever its objectives."""
STATISTICS: Final = (*QUANTILES, "mean")
FIGURES: Final = tuple(f"{quantity}_{statistic}_ms" for quantity in QUANTITIES for statistic in STATISTICS)
"""Names of the figures that objectives bound."""
WINDOW_S: Final = 300
"""Length (s) of the windows in which objectives may be judged one by one."""
MAX_LIMIT_MS: Final = 3_600_000.0
_FORM: Final = re.compile(r"\s*([a-z0-9]+)_([a-z0-9]+)(?:_ms)?\s*=\s*([0-9.eE+-]+)\s*")


@dataclass(frozen=True, slots=True)
class Objective:
    """An upper bound (ms) of a statistic of one of the :data:`QUANTITIES`."""

    quantity: str
    statistic: str
    limit_ms: float

    @property
    def figure(self) -> str:
        """Name of the figure that this objective bounds."""
        return f"{self.quantity}_{self.statistic}_ms"

    @property
    def share(self) -> float:
        """Share of requests (or tokens) that must be within the limit; 0 for a mean."""
        return QUANTILES.get(self.statistic, 0.0)

    @property
    def label(self) -> str:
        """The statistic as people write it: ``TTFT p99``."""
        return f"{self.quantity.upper()} {self.statistic}"

    def __str__(self) -> str:
        return f"{self.quantity}_{self.statistic}={self.limit_ms:g}"


def parse_objective(text: str) -> Objective:
    """Objective from text such as ``ttft_p99=500`` (ms). Raises InvalidConfigError."""
    found = _FORM.fullmatch(text)
    try:
        if found is None or found[1] not in QUANTITIES or found[2] not in STATISTICS:
            raise ValueError
        limit = float(found[3])
        if not 0 < limit <= MAX_LIMIT_MS:
            raise ValueError
    except ValueError:
        raise InvalidConfigError(
            f"objective={short_repr(text)} is not allowed: it must be QUANTITY_STATISTIC=MILLISECONDS, without a unit; "
            f"quantity one of {', '.join(QUANTITIES)}, statistic one of {', '.join(STATISTICS)}, as in ttft_p99=500",
            "objective",
        ) from None
    return Objective(found[1], found[2], limit)


def margin(
    objectives: Sequence[Objective], figures: Mapping[str, float], factors: Mapping[str, float] | None = None
) -> float:
    """Smallest distance of a figure from its limit, as a share of the limit: negative if an objective is missed.

    ``factors`` multiply the figures, by quantity.
    """
    times = factors or {}
    return min((1.0 - figures[o.figure] * times.get(o.quantity, 1.0) / o.limit_ms for o in objectives), default=1.0)
