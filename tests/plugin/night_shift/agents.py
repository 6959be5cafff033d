"""An agent for the serving fleet."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class Sleeper:
    """Sets large batches once and never looks again."""

    def reset(self, n_rows: int) -> None:
        """Start ``n_rows`` new episodes."""

    def act(self, observation: NDArray[np.float64]) -> NDArray[np.float64]:
        """The same knobs for every row: 90% of the KV pool, no drafts, batches of 256, shared GPUs, FP16."""
        return np.tile([0.9, 0.0, 256.0, 0.0, 0.0], (len(observation), 1))
