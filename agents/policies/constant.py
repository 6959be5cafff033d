"""Agents that ignore observations: a constant action, or random actions."""

from __future__ import annotations

from typing import Final

import numpy as np

from agents.protocol import FloatArray
from inferencegym.models import NAIVE_ACTION, SPEC_LENGTHS, ServeAction
from inferencegym.spaces.actions import ACTION_HIGH, ACTION_LOW, to_row

NAIVE_ROW: Final = to_row(NAIVE_ACTION)
"""The default knobs (5,)."""


class ConstantAgent:
    """Agent that takes the same action at every step."""

    def __init__(self, action: ServeAction) -> None:
        action.validate()
        self.action = action
        self._row = to_row(action)

    def reset(self, n_rows: int) -> None:
        """Do nothing: the agent has no state."""

    def act(self, observation: FloatArray) -> FloatArray:
        return np.broadcast_to(self._row, (len(observation), len(self._row)))


class NaiveAgent(ConstantAgent):
    """Agent fixed-32: takes :data:`NAIVE_ACTION` at every step."""

    def __init__(self) -> None:
        super().__init__(NAIVE_ACTION)


class RandomAgent:
    """Agent that draws every knob anew each step, all values equally likely (``batch_size`` on a logarithmic scale).

    Row b draws from its own stream ``[seed, b]``, so a row acts the same whatever B is.
    """

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._streams: list[np.random.Generator] = []

    def reset(self, n_rows: int) -> None:
        self._streams = [np.random.default_rng([self._seed, row]) for row in range(n_rows)]

    def act(self, observation: FloatArray) -> FloatArray:
        u = np.array([stream.random(len(ACTION_LOW)) for stream in self._streams])
        actions = np.empty_like(u)
        actions[:, 0] = ACTION_LOW[0] + u[:, 0] * (ACTION_HIGH[0] - ACTION_LOW[0])
        actions[:, 1] = np.array(SPEC_LENGTHS)[(u[:, 1] * len(SPEC_LENGTHS)).astype(np.int64)]
        actions[:, 2] = np.exp(u[:, 2] * np.log(ACTION_HIGH[2]))
        actions[:, 3] = u[:, 3] < 0.5
        actions[:, 4] = np.floor(u[:, 4] * 3.0)
        return actions
