"""Protocol of agents: a function from observations to knobs, for many episodes at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from inferencegym.errors import InvalidActionError
from inferencegym.spaces.actions import ACTION_SIZE, refuse_nan
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


def knobs_of(agent: Agent, observation: FloatArray) -> FloatArray:
    """What an agent answers to observations (B, 21), checked: anybody may write an agent.

    Raises :class:`InvalidActionError` unless it is an array of B rows of five or six numbers, none of them NaN, which
    the environment would take for a knob left as it is.
    """
    said: object = agent.act(observation)
    field, rows = f"{type(agent).__name__}.act(observation)", len(observation)
    allowed = f"a NumPy array of shape ({rows}, {ACTION_SIZE}), a row of numbers for each of {rows} episodes"
    if not isinstance(said, np.ndarray) or said.dtype.kind not in "biuf":
        raise InvalidActionError(field, getattr(said, "dtype", type(said).__name__), allowed)
    if said.ndim != 2 or len(said) != rows or said.shape[1] not in (ACTION_SIZE, ACTION_SIZE + 1):
        raise InvalidActionError(field, said.shape, allowed)
    refuse_nan(said, field)
    return said


AgentFactory = Callable[[TaskSpec, str], Agent]
"""Factory of an agent for a task; the text is the part of its name after the colon (``random:7``), or empty."""
