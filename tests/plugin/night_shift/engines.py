"""An engine that can be observed and controlled."""

from __future__ import annotations

from collections.abc import Mapping

from inferencegym.engines import SglangEngine


class HalfEngine(SglangEngine):
    """An SGLang server that others share: a controller may use half of its requests."""

    name = "half"

    def limits(self) -> Mapping[str, tuple[float, float]]:
        """Half of what the server runs at most."""
        low, high = super().limits()["batch_size"]
        return {"batch_size": (low, high // 2)}
