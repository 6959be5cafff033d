"""Switching policy: a few knob settings, and a gate with hysteresis that chooses among them by the observation.

Each mode is one setting of the five knobs. The gate scores every mode by a weighted sum of the normalised observation
(and of the phase of the task's announced flood period), adds a bonus to the mode that is on, and takes the highest: a
switch with hysteresis. One mode for calm, one for floods and one for draining the backlog is what operators script.
Knobs that need no restart and are graded for steadiness, ``batch_size`` and ``kv_budget``, may ramp to a new mode's
values instead of jumping.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from agents.protocol import FloatArray
from inferencegym.errors import MISSING
from inferencegym.messages import FieldError, Message, unknown_field
from inferencegym.models import ACTION_FIELDS, OBSERVATION_FIELDS
from inferencegym.spaces.actions import ACTION_HIGH, ACTION_LOW
from inferencegym.spaces.observations import OBSERVATION_SIZE, normalise
from inferencegym.task_registry import read_entry
from inferencegym.tasks import TaskSpec

TIMESTEP: Final = list(OBSERVATION_FIELDS).index("timestep")

FEATURES: Final = (*OBSERVATION_FIELDS, "phase_sin", "phase_cos", "one")
"""Inputs of the gate: the normalised observation, the phase of the flood period, and a constant."""

Q: Final = len(FEATURES)

RAMPED: Final = [list(ACTION_FIELDS).index(name) for name in ("kv_budget", "batch_size")]
"""Columns of the knobs that ramp."""


def features(observation: FloatArray, task: TaskSpec) -> FloatArray:
    """Features (B, Q) of observations (B, 14 or more).

    The phase is that of the next step within the task's announced flood period, zero for tasks without floods.
    """
    phi = np.empty((len(observation), Q))
    phi[:, :OBSERVATION_SIZE] = normalise(observation[:, :OBSERVATION_SIZE], task.episode_length, task.cost_budget)
    phi[:, -3:-1] = 0.0
    if task.burst is not None:
        angle = 2.0 * np.pi * (observation[:, TIMESTEP] - task.burst.offset_steps) / task.burst.interval_steps
        phi[:, -3], phi[:, -2] = np.sin(angle), np.cos(angle)
    phi[:, -1] = 1.0
    return phi


class StoredMode(Message):
    """JSON form of a mode: its five knobs, before they are snapped to allowed values, and its gate's weights."""

    knobs: dict[str, float]
    gate: dict[str, float]

    @model_validator(mode="after")
    def _has_known_names(self) -> Self:
        for name in self.knobs:
            if name not in ACTION_FIELDS:
                raise FieldError(f"knobs.{name}", self.knobs[name], unknown_field(name, list(ACTION_FIELDS)))
        for name in self.gate:
            if name not in FEATURES:
                raise FieldError(f"gate.{name}", self.gate[name], unknown_field(name, FEATURES))
        for name, knob in ACTION_FIELDS.items():
            value = self.knobs.get(name)
            if value is None or not knob.low <= value <= knob.high:
                found = MISSING if value is None else value
                raise FieldError(f"knobs.{name}", found, f"a number from {knob.low:g} to {knob.high:g}")
        return self


class StoredModes(Message):
    """JSON form of a policy; the last three fields say how it was found."""

    kind: Literal["modes"]
    stay: float
    ramp: Annotated[float, Field(ge=0, le=1)] = 1.0
    modes: Annotated[list[StoredMode], Field(min_length=1)]
    validation_score: float | None = None
    task: str | None = None
    table_sha256: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ModeParams:
    """P policies of K modes: ``settings`` (P, K, 5) knobs, ``gate`` (P, K, Q) weights, ``stay`` (P,) bonuses.

    ``ramp`` (P,) is the share of the way to the mode's ``batch_size`` and ``kv_budget`` that each step goes; 1 jumps.
    """

    settings: FloatArray
    gate: FloatArray
    stay: FloatArray
    ramp: FloatArray = field(default_factory=lambda: np.ones(1))

    def __post_init__(self) -> None:
        object.__setattr__(self, "ramp", np.broadcast_to(self.ramp, (len(self.settings),)))

    @property
    def n_modes(self) -> int:
        """Modes of each policy."""
        return int(self.settings.shape[1])

    def __len__(self) -> int:
        return len(self.settings)

    def pick(self, index: int) -> ModeParams:
        """One of the policies alone."""
        return self.select(slice(index, index + 1))

    def select(self, which: slice | NDArray[np.int64]) -> ModeParams:
        """Some of the policies, copied."""
        parts = (self.settings, self.gate, self.stay, self.ramp)
        return ModeParams(*(part[which].copy() for part in parts))

    def with_settings(self, settings: FloatArray) -> ModeParams:
        """The one policy's gates with each of these settings (N, K, 5)."""
        n = len(settings)
        return ModeParams(settings, *(np.repeat(part, n, axis=0) for part in (self.gate, self.stay, self.ramp)))

    def to_dict(self) -> dict[str, Any]:
        """JSON form of a single policy, weights by feature name."""
        modes = [
            {
                "knobs": dict(zip(ACTION_FIELDS, setting, strict=True)),
                "gate": {name: weight for name, weight in zip(FEATURES, weights, strict=True) if weight != 0.0},
            }
            for setting, weights in zip(self.settings[0].tolist(), self.gate[0].tolist(), strict=True)
        ]
        return {"kind": "modes", "stay": float(self.stay[0]), "ramp": float(self.ramp[0]), "modes": modes}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModeParams:
        """Read the JSON form; raises :class:`InvalidConfigError` naming the field at fault."""
        stored = read_entry(StoredModes, data)
        settings = [[mode.knobs[name] for name in ACTION_FIELDS] for mode in stored.modes]
        gate = [[mode.gate.get(name, 0.0) for name in FEATURES] for mode in stored.modes]
        return cls(np.array([settings]), np.array([gate]), np.array([stored.stay]), np.array([stored.ramp]))


class ModeAgent:
    """Agent of one policy in every row, or of P policies side by side: row b has policy ``b // rows_per_policy``."""

    def __init__(self, params: ModeParams, task: TaskSpec, rows_per_policy: int | None = None) -> None:
        self.params = params
        self._task = task
        self._rows_per_policy = rows_per_policy
        self._mode = np.zeros(0, dtype=np.int64)

    @property
    def mode(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The mode each row is in, (B,)."""
        return self._mode

    def reset(self, n_rows: int) -> None:
        self._mode = np.full(n_rows, -1)
        self._rows = np.arange(n_rows)
        each = self._rows_per_policy
        self._policy = np.zeros(n_rows, dtype=np.int64) if each is None else np.arange(n_rows) // each
        self._gate = self.params.gate[self._policy]
        self._settings = self.params.settings[self._policy]
        self._stay = self.params.stay[self._policy]
        self._ramp = self.params.ramp[self._policy][:, None]
        self._last_action: FloatArray | None = None

    def act(self, observation: FloatArray) -> FloatArray:
        phi = features(observation, self._task)
        scores = np.einsum("bkq,bq->bk", self._gate, phi)
        if self._last_action is not None:
            scores[self._rows, self._mode] += self._stay
        self._mode = scores.argmax(axis=1)
        chosen: FloatArray = self._settings[self._rows, self._mode]
        if self._last_action is not None:
            before = self._last_action[:, RAMPED]
            chosen[:, RAMPED] = before + self._ramp * (chosen[:, RAMPED] - before)
        self._last_action = chosen
        return chosen.copy()


class ActionsAgent:
    """Agent of N constant actions side by side: row b takes ``actions[b // rows_per_action]``."""

    def __init__(self, actions: FloatArray, rows_per_action: int) -> None:
        clipped = actions.copy()
        clipped[:, : len(ACTION_LOW)] = np.clip(actions[:, : len(ACTION_LOW)], ACTION_LOW, ACTION_HIGH)
        self._rows = np.repeat(clipped, rows_per_action, axis=0)

    def reset(self, n_rows: int) -> None:
        """Do nothing: the agent has no state."""

    def act(self, observation: FloatArray) -> FloatArray:
        return self._rows
