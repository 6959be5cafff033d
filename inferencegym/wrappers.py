"""Gymnasium wrapper of the serving environments whose actions are changes of the knobs instead of values.

To give a policy a memory, use ``gymnasium.wrappers.FrameStackObservation``, which works with all these environments.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.utils import RecordConstructorArgs
from numpy.typing import NDArray

from inferencegym.errors import InvalidConfigError, refusal
from inferencegym.models import ACTION_FIELDS, NAIVE_ACTION
from inferencegym.spaces.actions import to_row
from inferencegym.spaces.formats import action_codec


class KnobDeltas(gymnasium.ActionWrapper[Any, NDArray[Any], NDArray[Any]], RecordConstructorArgs):
    """Wrapper whose actions are changes of the five knobs; an episode starts from the default values.

    With ``action="discrete"`` an action has one of three choices for each knob: 0 a level down, 1 unchanged, 2 a level
    up. With ``action="box"`` it has five numbers in [-1, 1], and each knob changes by ``step`` times its number on the
    scale of that format (2 wide). Knobs stop at their bounds. Use ``observation="full"``, which includes the knobs in
    force.
    """

    def __init__(self, env: gymnasium.Env[Any, NDArray[Any]], step: float = 0.1) -> None:
        RecordConstructorArgs.__init__(self, step=step)
        super().__init__(env)
        if not 0.0 < step <= 2.0:
            raise refusal("step", step, "a number above 0, at most 2")
        n_knobs = len(ACTION_FIELDS)
        self._step = step
        self._levels = env.action_space == action_codec("discrete").space
        if self._levels:
            self.action_space = spaces.MultiDiscrete([3] * n_knobs)
        elif env.action_space == action_codec("box").space:
            self.action_space = spaces.Box(-1.0, 1.0, (n_knobs,), np.float32)
        else:
            raise InvalidConfigError(
                f"KnobDeltas needs an environment made with action='discrete' or action='box', not {env.action_space}",
                "action",
            )
        codec = action_codec("discrete" if self._levels else "box")
        self._start: NDArray[Any] = codec.encode(to_row(NAIVE_ACTION)[None])[0]
        self._now: NDArray[Any] = self._start

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode; resets the knobs to their defaults."""
        self._now = self._start
        return super().reset(seed=seed, options=options)

    def action(self, action: NDArray[Any]) -> NDArray[Any]:
        """The knobs after these changes, in the format of the wrapped environment."""
        space = self.env.action_space
        if isinstance(space, spaces.MultiDiscrete):
            self._now = np.clip(self._now + (np.asarray(action) - 1), 0, space.nvec - 1)
        else:
            moved = self._now + self._step * np.clip(action, -1.0, 1.0)
            self._now = np.clip(moved, -1.0, 1.0).astype(np.float32)
        return self._now
