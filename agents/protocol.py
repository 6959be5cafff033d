"""Protocol of agents: a function from observations to knobs, for many episodes at once."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from inferencegym.errors import AgentError, InferenceGymError, InvalidActionError
from inferencegym.spaces.actions import ACTION_SIZE, refuse_nan
from inferencegym.spaces.observations import FLEET_SIZE, OBSERVATION_SIZE
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
        On tasks that scale they are (B, 24), with the three of ``SCALING_FIELDS``, and knobs may be (B, 6), with the
        replicas.

        The environment clamps and snaps what it is given and ignores knobs that the task does not offer.
        """
        ...


@contextmanager
def blamed(name: str, method: str) -> Iterator[None]:
    """Turns an exception of an agent's own code into :class:`AgentError`, with the line that raised it."""
    try:
        yield
    except InferenceGymError:
        raise
    except Exception as error:  # whatever somebody's agent does
        at = traceback.extract_tb(error.__traceback__)[-1]
        raise AgentError(f"agent {name} failed in {method}, {Path(at.filename).name}:{at.lineno}: {error!r}") from error


def knobs_of(agent: Agent, observation: FloatArray) -> FloatArray:
    """What an agent answers to observations (B, 21) or (B, 24), checked: anybody may write an agent.

    Raises :class:`AgentError` if it raises, and :class:`InvalidActionError` unless it answers an array of B rows of
    five numbers, or six where the task scales (24 columns), none of them NaN, which the environment would take for a
    knob left as it is.
    """
    name, rows = type(agent).__name__, len(observation)
    with blamed(name, "act()"):
        said: object = agent.act(observation)
    scales = observation.shape[1] > OBSERVATION_SIZE + FLEET_SIZE
    field, sizes = f"{name}.act(observation)", range(ACTION_SIZE, ACTION_SIZE + 1 + scales)
    shapes = " or ".join(f"({rows}, {size})" for size in sizes)
    allowed = f"a NumPy array of shape {shapes}, a row of numbers for each of {rows} episodes"
    if not isinstance(said, np.ndarray) or said.dtype.kind not in "biuf":
        raise InvalidActionError(field, getattr(said, "dtype", type(said).__name__), allowed)
    if said.ndim != 2 or len(said) != rows or said.shape[1] not in sizes:
        raise InvalidActionError(field, said.shape, allowed)
    refuse_nan(said, field)
    return said


AgentFactory = Callable[[TaskSpec, str], Agent]
"""Factory of an agent for a task; the text is the part of its name after the colon (``random:7``), or empty."""
