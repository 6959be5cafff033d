"""Protocol of agents: a function from observations to knobs, for many episodes at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from inferencegym.tasks import TaskSpec

FloatArray = NDArray[np.float64]


class Agent(Protocol):
    """Agent for B episodes side by side, which sees nothing but their observations.

    Rows are independent: what an agent does in one never depends on another, so scores do not depend on B.
    """

    def reset(self, n_rows: int) -> None:
        """Start ``n_rows`` new episodes; forget the old ones."""
        ...

    def act(self, observation: FloatArray) -> FloatArray:
        """Knobs (B, 5), in the order of ``ACTION_FIELDS``, for observations (B, 21).

        Those are the 14 numbers of ``OBSERVATION_FIELDS`` and the seven of ``FLEET_FIELDS``: what the fleet is set to.

        The environment clamps and snaps what it is given and ignores knobs that the task does not offer.
        """
        ...


AgentFactory = Callable[[TaskSpec, str], Agent]
"""Factory of an agent for a task; the text is the part of its name after the colon (``random:7``), or empty."""
