"""OpenEnv's own server with a game whose answers are known: ``python -m tests.openenv_guessing PORT``.

An action guesses a number, and a right guess earns 1. The right number of a step depends on the reset's ``level``.
"""

from __future__ import annotations

import os
import random
import sys
from typing import Any

from pydantic import Field

from inferencegym.client.openenv_types import without_gradio

with without_gradio():
    from openenv.core import create_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

STEPS = 6
MOST = 10**20


def answers(level: str, seed: int) -> list[int]:
    """Right numbers of an episode, step by step."""
    drawn = random.SystemRandom() if level == "noise" else random.Random(seed)
    return {
        "fixed": [2] * STEPS,
        "clock": [0] * (STEPS // 2) + [1] * (STEPS // 2),
        "observed": [drawn.randrange(4) for _ in range(STEPS)],
        "noise": [drawn.randrange(4) for _ in range(STEPS)],
    }[level]


class Guess(Action):  # type: ignore[misc]
    choice: int = Field(2, ge=0, le=3)
    mood: int = 0
    loudness: int = 0


class Seen(Observation):  # type: ignore[misc]
    right: int | None = None


class Game(Environment):  # type: ignore[misc]
    """The observation shows the next right number: whoever looks always wins."""

    def __init__(self) -> None:
        super().__init__()
        self._left: list[int] = []
        self._offended = False

    def reset(self, seed: int = 0, level: str = "observed", **_: Any) -> Seen:
        if self._offended:
            raise RuntimeError("this game is over for good")
        self._left = answers(level, seed)
        return Seen(right=self._left[0])

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Seen:
        self._offended = action.mood > MOST
        if action.loudness > MOST:
            os._exit(1)
        reward = float(action.choice == self._left.pop(0))
        return Seen(right=self._left[0] if self._left else None, reward=reward, done=not self._left)

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    import uvicorn

    uvicorn.run(create_app(Game, Guess, Seen, env_name="guessing"), port=int(sys.argv[1]), log_level="warning")
