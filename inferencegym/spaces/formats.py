"""Formats of actions and observations for learners: Gymnasium spaces with declared bounds, for one row or many.

Three action formats, each with all five knobs in the order of ``ACTION_FIELDS``, so that one policy fits every task;
knobs that a task does not offer are ignored there. Two more are a single choice, for learners that take ``Discrete``
actions only. What a format decodes to is clamped and snapped by :func:`inferencegym.spaces.actions.snap`.

- ``"box"``: five numbers in [-1, 1]. ``batch_size`` is on a logarithmic scale (0 is 23), the other knobs are spread
  evenly over the interval (``spec_length`` over its five choices, ``quant_tier`` over its three).
- ``"natural"``: the knobs in their own units, from ``ACTION_LOW`` to ``ACTION_HIGH``.
- ``"discrete"``: indices into :data:`LEVELS`.
- ``"settings"``: one of all combinations of :data:`COARSE_LEVELS` of the knobs that the task offers.
- ``"replicas"``, in its place on tasks that scale: the number of replicas less one; the five knobs stay as the task's
  capacity plan sets them, as they do for autoscalers.

Four observation formats: ``"raw"`` (14 numbers in their own units), ``"normalised"``
(:func:`inferencegym.spaces.observations.normalise`), ``"scheduled"``, which adds the position of the next step in the
task's announced flood schedule (:func:`schedule_features`), and ``"full"``, which adds to that the knobs in force,
running restarts and the seconds since a change (:func:`inferencegym.spaces.observations.normalise_fleet`), and on tasks
that scale the load in units of the task's rate (:func:`load_features`). Gymnasium is imported when a space is asked
for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from inferencegym.errors import InvalidActionError, refusal
from inferencegym.models import ACTION_FIELDS, OBSERVATION_FIELDS, SPEC_LENGTHS
from inferencegym.spaces.actions import ACTION_HIGH, ACTION_LOW, FORCED, refuse_nan
from inferencegym.spaces.forecast import forecast_rps
from inferencegym.spaces.knobs import ActionDecoder
from inferencegym.spaces.observations import (
    FLEET_SIZE,
    OBSERVATION_HIGH,
    OBSERVATION_LOW,
    OBSERVATION_SIZE,
    fleet_size,
    normalise,
    normalise_fleet,
)
from inferencegym.tasks import Calibration, EpisodeConfig, TaskSpec, card_memory_gb

if TYPE_CHECKING:
    from gymnasium import spaces

FloatArray = NDArray[np.float64]
Float32Array = NDArray[np.float32]

_BOX_STEP: Final = 2.0**-24

_BATCH_LEVELS = (
    *(1, 2, 3, 4, 6, 8, 12, 16, 24, 32),
    *(40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512),
)

LEVELS: Final[dict[str, FloatArray]] = {
    "kv_budget": np.linspace(0.1, 1.0, 19),
    "spec_length": np.array(SPEC_LENGTHS, dtype=np.float64),
    "batch_size": np.array(_BATCH_LEVELS, dtype=np.float64),
    "prefill_disagg": np.array([0.0, 1.0]),
    "quant_tier": np.array([0.0, 1.0, 2.0]),
}
"""Values of each knob in the ``"discrete"`` format; batch sizes are half octaves up to 32, then
quarters of one: among large batches a step of a half can miss the best one by a tenth of the grade."""

COARSE_LEVELS: Final[dict[str, tuple[float, ...]]] = {
    "kv_budget": (0.5, 0.7, 0.8, 0.9),
    "spec_length": (0.0, 1.0, 2.0, 4.0),
    "batch_size": (32.0, 128.0, 224.0, 256.0, 512.0),
    "prefill_disagg": (0.0, 1.0),
    "quant_tier": (0.0, 1.0, 2.0),
}
"""Values of each knob in the ``"settings"`` format, so few that a learner can try all their combinations."""


def knob_levels(max_replicas: int | None = None) -> list[FloatArray]:
    """Values of each knob in the ``"discrete"`` format, in order; the sixth of tasks that scale is ``replicas``."""
    sixth = [] if max_replicas is None else [np.arange(1.0, max_replicas + 1.0)]
    return [*(LEVELS[name] for name in ACTION_FIELDS), *sixth]


class ActionCodec(Protocol):
    """Turns a learner's actions into rows of five knobs."""

    @property
    def space(self) -> spaces.Space[Any]:
        """The Gymnasium space of one action."""
        ...

    def decode(self, actions: NDArray[Any]) -> FloatArray:
        """Knobs (B, 5) in natural units for actions (B, 5); clamping and snapping follow in the batch."""
        ...

    def encode(self, knobs: FloatArray) -> NDArray[Any]:
        """Actions (B, 5) for allowed knobs (B, 5): the nearest that the format can express."""
        ...


class BoxCodec:
    """Five numbers in [-1, 1], six where the task scales."""

    def __init__(self, max_replicas: int | None = None) -> None:
        self._levels = knob_levels(max_replicas)
        self._decoder = ActionDecoder([level.tolist() for level in self._levels])

    @property
    def space(self) -> spaces.Space[Any]:
        from gymnasium import spaces

        return spaces.Box(-1.0, 1.0, (len(self._levels),), np.float32)

    def decode(self, actions: NDArray[Any]) -> FloatArray:
        knobs = _rows(actions, len(self._levels)).astype(np.float64)
        self._decoder.decode_box(knobs, knobs)
        return knobs

    def encode(self, knobs: FloatArray) -> Float32Array:
        unit = np.empty_like(knobs)
        unit[:, 0] = (knobs[:, 0] - ACTION_LOW[0]) / (ACTION_HIGH[0] - ACTION_LOW[0])
        unit[:, 1] = _middle(LEVELS["spec_length"], knobs[:, 1])
        unit[:, 2] = np.log(knobs[:, 2]) / math.log(ACTION_HIGH[2])
        unit[:, 3] = _middle(LEVELS["prefill_disagg"], knobs[:, 3])
        for knob in range(4, len(self._levels)):
            unit[:, knob] = _middle(self._levels[knob], knobs[:, knob])
        # Rounded to float32's precision near 1 everywhere: near 0, where float32 is finer, the rounding error of a knob
        # would otherwise decode to another knob.
        return (np.rint((2.0 * unit - 1.0) / _BOX_STEP) * _BOX_STEP).astype(np.float32)


class NaturalCodec:
    """The knobs in their own units."""

    def __init__(self, max_replicas: int | None = None) -> None:
        sixth = [] if max_replicas is None else [float(max_replicas)]
        self._low, self._high = np.append(ACTION_LOW, [1.0] * len(sixth)), np.append(ACTION_HIGH, sixth)

    @property
    def space(self) -> spaces.Space[Any]:
        from gymnasium import spaces

        return spaces.Box(self._low.astype(np.float32), self._high.astype(np.float32), dtype=np.float32)

    def decode(self, actions: NDArray[Any]) -> FloatArray:
        return _rows(actions, len(self._low)).astype(np.float64, copy=False)

    def encode(self, knobs: FloatArray) -> Float32Array:
        return knobs.astype(np.float32)


class DiscreteCodec:
    """Indices into :func:`knob_levels`."""

    def __init__(self, max_replicas: int | None = None) -> None:
        self._levels = knob_levels(max_replicas)
        self.sizes = np.array([len(level) for level in self._levels])
        self._decoder = ActionDecoder([level.tolist() for level in self._levels])

    @property
    def space(self) -> spaces.Space[Any]:
        from gymnasium import spaces

        return spaces.MultiDiscrete(self.sizes)

    def decode(self, actions: NDArray[Any]) -> FloatArray:
        index = _rows(actions, len(self._levels))
        knobs = np.empty(index.shape)
        if index.dtype.kind not in "iu" or not self._decoder.decode_levels(index.astype(np.int64, copy=False), knobs):
            raise InvalidActionError("action", actions, f"integers from 0 to below {self.sizes.tolist()}")
        return knobs

    def encode(self, knobs: FloatArray) -> NDArray[np.int64]:
        nearest = [np.abs(level - knobs[:, i, None]).argmin(axis=1) for i, level in enumerate(self._levels)]
        return np.stack(nearest, axis=1)


class ChoicesCodec:
    """One choice among ``rows`` of knobs (N, 5), or (N, 6) on tasks that scale."""

    def __init__(self, rows: FloatArray) -> None:
        self._rows = rows
        most = None if rows.shape[1] == len(ACTION_FIELDS) else int(rows[:, -1].max())
        self._scale = BoxCodec(most).encode
        self._scaled = self._scale(rows)

    @classmethod
    def of_settings(cls, active_actions: Sequence[str]) -> ChoicesCodec:
        """All combinations of :data:`COARSE_LEVELS` of these knobs; the last knob changes first."""
        levels = [
            COARSE_LEVELS[name] if name in active_actions else (forced,)
            for name, forced in zip(ACTION_FIELDS, FORCED.tolist(), strict=True)
        ]
        return cls(np.array(list(product(*levels))))

    @classmethod
    def of_replicas(cls, max_replicas: int, knobs: Sequence[float]) -> ChoicesCodec:
        """1 to ``max_replicas`` replicas, each of which has the same five ``knobs``."""
        return cls(np.array([[*knobs, n + 1.0] for n in range(max_replicas)]))

    @property
    def space(self) -> spaces.Space[Any]:
        from gymnasium import spaces

        return spaces.Discrete(len(self._rows))

    def decode(self, actions: NDArray[Any]) -> FloatArray:
        """Knobs (B, 5) or (B, 6) for actions (B,)."""
        chosen = np.asarray(actions)
        if chosen.ndim != 1 or chosen.dtype.kind not in "iu" or ((chosen < 0) | (chosen >= len(self._rows))).any():
            raise InvalidActionError("action", actions, f"for each row an integer from 0 to below {len(self._rows)}")
        knobs: FloatArray = self._rows[chosen]
        return knobs

    def encode(self, knobs: FloatArray) -> NDArray[np.int64]:
        """Actions (B,) for knobs (B, 5) or (B, 6): the nearest row on the scale of the ``"box"`` format."""
        apart = self._scale(knobs)[:, None] - self._scaled
        return np.asarray((apart**2).sum(axis=2).argmin(axis=1), dtype=np.int64)


ACTION_CODECS: Final[dict[str, type[BoxCodec | NaturalCodec | DiscreteCodec]]] = {
    "box": BoxCodec,
    "natural": NaturalCodec,
    "discrete": DiscreteCodec,
}


def action_codec(
    action: str,
    max_replicas: int | None = None,
    replica_knobs: Sequence[float] | None = None,
    active_actions: Sequence[str] = tuple(ACTION_FIELDS),
) -> ActionCodec:
    """Codec of an action format, with a sixth knob from 1 to ``max_replicas`` where the task scales.

    ``replica_knobs`` are the five of :class:`inferencegym.tasks.Calibration`, for ``"replicas"``; ``active_actions``
    are the knobs that the task offers, for ``"settings"``. Raises :class:`InvalidConfigError` listing the formats that
    the task has.
    """
    if action == "replicas" and max_replicas is not None and replica_knobs is not None:
        return ChoicesCodec.of_replicas(max_replicas, replica_knobs)
    if action == "settings" and max_replicas is None:
        return ChoicesCodec.of_settings(active_actions)
    if action not in ACTION_CODECS:
        single = "settings" if max_replicas is None else "replicas (once `inferencegym calibrate` has planned them)"
        raise refusal("action", action, f"one of {', '.join([*ACTION_CODECS, single])}")
    return ACTION_CODECS[action](max_replicas)


def action_codec_of(action: str, task: TaskSpec, calibration: Calibration) -> ActionCodec:
    """Codec of an action format on a task."""
    return action_codec(action, task.fleet.max_replicas, calibration.replica_knobs, task.active_actions)


OBSERVATION_FORMATS: Final = ("raw", "normalised", "scheduled", "full")
_TIMESTEP: Final = list(OBSERVATION_FIELDS).index("timestep")
_QUEUE: Final = list(OBSERVATION_FIELDS).index("queue_depth")
_RATE: Final = list(OBSERVATION_FIELDS).index("arrival_rate")
FORECAST_AHEAD_S: Final = (0, 15, 30, 60)
"""Seconds from now for which the schedule of a task with a ``day`` has the forecast."""


def schedule_features(task: TaskSpec, n_steps: int) -> Float32Array:
    """Position of each step in the task's schedule, (T + 1, 3), every number in [0, 1].

    Whether the next step is in a flood, how near the next flood is and how recent the last one was (1: now, falling
    linearly to 0 at one interval or more). All zero for tasks without floods.

    A task with a ``day`` has four other numbers, (T + 1, 4): the forecast for the seconds of :data:`FORECAST_AHEAD_S`
    from now, relative to the forecast's peak. The actual load deviates from it.
    """
    if task.day is not None:
        seconds = np.arange(n_steps + 1)[:, None] + np.array(FORECAST_AHEAD_S)
        peak = forecast_rps(task, np.arange(task.episode_length, dtype=np.float64)).max()
        relative: Float32Array = np.minimum(forecast_rps(task, seconds.astype(np.float64)) / peak, 1.0).astype(
            np.float32
        )
        return relative
    features = np.zeros((n_steps + 1, 3), dtype=np.float32)
    if task.burst is None:
        return features
    steps = np.arange(n_steps + 1)
    interval = task.burst.interval_steps
    on = np.array([task.burst.active(int(t)) for t in range(n_steps + 1 + interval)])
    for t in steps:
        ahead = np.flatnonzero(on[t : t + interval])
        behind = np.flatnonzero(on[max(0, t - interval) : t + 1][::-1])
        features[t, 0] = on[t]
        features[t, 1] = 1.0 - ahead[0] / interval if len(ahead) else 0.0
        features[t, 2] = 1.0 - behind[0] / interval if len(behind) else 0.0
    return features


LOAD_AHEAD_S: Final = (8, 15, 30)
"""Seconds from now to which :func:`load_features` carry the arrival rate."""
QUEUE_DRAIN_S: Final = 10.0
"""Seconds in which the queue would have to be served, as :func:`load_features` count it."""
MOST_LOAD: Final = 16.0
"""Load, in units of the task's mean rate, above which :func:`load_features` are clipped."""


def load_features(task: TaskSpec, observation: FloatArray, changes: FloatArray | None) -> FloatArray:
    """The load of observations (..., 14) in units of the task's mean rate, (..., 5), from 0 to :data:`MOST_LOAD`.

    The arrival rate, the arrival rates that follow in the seconds of :data:`LOAD_AHEAD_S` if it changes as the forecast
    does, and what would serve the queue in :data:`QUEUE_DRAIN_S` seconds. ``changes`` (T + 1, 3) is the forecast's
    change from each second on, as a factor; without a forecast the rate stays as it is. The replicas that a load needs
    are proportional to these numbers, which a network learns sooner than from the rate's logarithm.
    """
    rate, queue = observation[..., _RATE, None], observation[..., _QUEUE, None]
    if changes is None:
        ahead = np.repeat(rate, len(LOAD_AHEAD_S), axis=-1)
    else:
        second = np.minimum(observation[..., _TIMESTEP].astype(np.int64), len(changes) - 1)
        ahead = rate * changes[second]
    load = np.concatenate([rate, ahead, queue / QUEUE_DRAIN_S], axis=-1) / task.arrival_rate_rps
    return np.minimum(load, MOST_LOAD, out=load)


def forecast_changes(task: TaskSpec, n_steps: int) -> FloatArray | None:
    """Factor by which the forecast changes from each second to those of :data:`LOAD_AHEAD_S` later, (T + 1, 3).

    None for a task without a forecast.
    """
    if task.day is None:
        return None
    now = np.arange(n_steps + 1, dtype=np.float64)[:, None]
    changes: FloatArray = forecast_rps(task, now + np.array(LOAD_AHEAD_S)) / forecast_rps(task, now)
    return changes


class ObservationCodec:
    """Observations of one task as float32, with bounds that hold for every step of its episodes."""

    def __init__(self, task: TaskSpec, config: EpisodeConfig, calibration: Calibration, observation: str) -> None:
        if observation not in OBSERVATION_FORMATS:
            raise refusal("observation", observation, f"one of {', '.join(OBSERVATION_FORMATS)}")
        self._normalised = observation != "raw"
        self.needs_fleet = observation == "full"
        """Whether :meth:`encode` needs the seven numbers of the fleet in addition to the 14 of the observation."""
        scheduled = observation in ("scheduled", "full")
        self._schedule = schedule_features(task, config.episode_length) if scheduled else None
        self._length = config.episode_length
        self._budget = task.cost_budget
        self._card_gb = card_memory_gb(task)
        high = OBSERVATION_HIGH.copy()
        names = list(OBSERVATION_FIELDS)
        high[names.index("timestep")] = config.episode_length
        # Highest cost of a step: all decode and prefill GPUs, at 50 tokens/s (the lowest throughput that is priced). In
        # autoscaling tasks, also replicas that load and those that still drain.
        replicas = task.fleet.n_replicas if task.fleet.max_replicas is None else 4 * task.fleet.max_replicas
        highest_cost = calibration.price * 2 * replicas / 0.05
        high[names.index("cost_so_far")] = highest_cost * config.episode_length
        self.low: Float32Array = self._scale(OBSERVATION_LOW).astype(np.float32)
        self.high: Float32Array = self._scale(high).astype(np.float32)
        self._most = task.fleet.max_replicas
        self._task, self._changes = task, forecast_changes(task, config.episode_length)
        shares = 0 if self._schedule is None else self._schedule.shape[1]
        shares += fleet_size(task.fleet) * self.needs_fleet
        loads = len(LOAD_AHEAD_S) + 2 if self.needs_fleet and self._most is not None else 0
        highest = np.repeat(np.array([1.0, MOST_LOAD], dtype=np.float32), [shares, loads])
        self.low = np.concatenate([self.low, np.zeros_like(highest)])
        self.high = np.concatenate([self.high, highest])

    @property
    def space(self) -> spaces.Space[Any]:
        """The Gymnasium space of one observation, float32: Box(14), or more as the format and the task have it."""
        from gymnasium import spaces

        return spaces.Box(self.low, self.high, dtype=np.float32)

    def encode(self, observation: FloatArray) -> Float32Array:
        """A new float32 array in this format, clipped to the bounds (which changes it by a rounding error at most).

        ``observation`` is (..., 14), or (..., 21) with the fleet's numbers where the format :attr:`needs_fleet`.
        """
        seen = observation[..., :OBSERVATION_SIZE]
        parts: list[NDArray[Any]] = [self._scale(seen)]
        if self._schedule is not None:
            step = seen[..., _TIMESTEP].astype(np.int64)
            parts.append(self._schedule[np.minimum(step, len(self._schedule) - 1)])
        if self.needs_fleet:
            fleet = observation[..., OBSERVATION_SIZE:]
            parts.append(normalise_fleet(fleet[..., :FLEET_SIZE], self._length))
            if self._most is not None:
                parts.append(fleet[..., FLEET_SIZE:] / self._most)
                parts.append(load_features(self._task, seen, self._changes))
        scaled = parts[0].astype(np.float32) if len(parts) == 1 else np.concatenate(parts, axis=-1, dtype=np.float32)
        np.maximum(scaled, self.low, out=scaled)  # np.clip takes three times as long on a row
        return np.minimum(scaled, self.high, out=scaled)

    def _scale(self, observation: FloatArray) -> NDArray[Any]:
        if not self._normalised:
            return observation
        return normalise(observation, self._length, self._budget, self._card_gb)


RewardFormat = Callable[[FloatArray, EpisodeConfig], FloatArray]
"""Function from rewards of steps, (B,) or of any shape, to those that a learner gets: a new array."""


def reward_format(reward: str | None) -> tuple[RewardFormat, str | None]:
    """How a learner's rewards are made, and the kind of reward that the episode plays (None: that of ``config``).

    ``"scaled"`` and ``"bounded"`` put x / sqrt(1 + x^2), in [-1, 1], in place of the reward ``"grade"``. For
    ``"scaled"``, x is the step's share of the score (the grade divided by the episode's seconds), so that an episode
    without overload returns its score. For ``"bounded"``, x is the grade of the step alone (divided by its seconds), so
    that a step of overload costs no more than two or three good ones. Other kinds stay as they are. Raises
    :class:`InvalidConfigError` for an unknown one.
    """
    squashed = {"scaled": _scaled, "bounded": _bounded}
    kinds = ("plan", "grade", "score", *squashed)
    if reward is not None and reward not in kinds:
        raise refusal("reward", reward, f"one of {', '.join(kinds)}")
    return (squashed[reward], "grade") if reward in squashed else (_unchanged, reward)


def _scaled(reward: FloatArray, config: EpisodeConfig) -> FloatArray:
    return _squashed(reward / config.episode_length)


def _bounded(reward: FloatArray, config: EpisodeConfig) -> FloatArray:
    return _squashed(reward / config.hold)


def _squashed(x: FloatArray) -> FloatArray:
    # Smooth: clipped, all steps of an overloaded fleet would look the same.
    squashed: FloatArray = x / np.sqrt(1.0 + x * x)
    return squashed


def _unchanged(reward: FloatArray, _config: EpisodeConfig) -> FloatArray:
    return reward.copy()


def _rows(actions: NDArray[Any], size: int) -> NDArray[Any]:
    """Actions as an array (B, ``size``); raises InvalidActionError for another shape and for NaN."""
    rows = np.asarray(actions)
    if rows.ndim != 2 or rows.shape[1] != size:
        raise InvalidActionError("actions", rows.shape, f"an array of shape (B, {size})")
    refuse_nan(rows)
    return rows


def _middle(levels: FloatArray, value: FloatArray) -> FloatArray:
    """The middle of each level's part of [0, 1]."""
    middle: FloatArray = (np.abs(levels - value[:, None]).argmin(axis=1) + 0.5) / len(levels)
    return middle
