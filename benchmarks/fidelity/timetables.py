"""Open-loop policies that exploit a simulator's errors, and a search for them.

A timetable sets the knobs only by the clock: one setting in calm seconds, one around a flood, one after it, with ramps
between them, and on top an alternation that shrinks the KV pool or the batch, or changes speculation, every few
seconds. No operator would run most of them, but the best ones of a search show where a model can be exploited.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from agents.protocol import FloatArray
from inferencegym.models import SPEC_LENGTHS
from inferencegym.spaces.actions import ACTION_HIGH, ACTION_LOW, action_mask, snap
from inferencegym.tasks import TaskSpec

KNOBS: Final = 5
SETTINGS: Final = 3
"""Number of settings: calm, flood, and after the flood."""
N_GENES: Final = SETTINGS * KNOBS + 11
KEPT: Final = 40
"""Parents in a generation."""
GENERATION: Final = 400
GENERATIONS: Final = 14
BREEDS: Final = 3
"""Number of cross-entropy searches, which start from the best random timetables."""

N_BRED: Final = BREEDS * GENERATIONS * GENERATION
"""Timetables that the cross-entropy searches try."""

Values = Callable[[FloatArray], FloatArray]
"""Function that evaluates timetables, given as actions (T, N, 5): values (N,)."""


def actions_of(task: TaskSpec, genes: FloatArray) -> FloatArray:
    """Actions (T, N, 5) of timetables given as genes (N, :data:`N_GENES`) in [0, 1]."""
    knobs, rest = genes[:, : SETTINGS * KNOBS], genes[:, SETTINGS * KNOBS :].T
    settings = np.stack([_setting(knobs[:, i * KNOBS : (i + 1) * KNOBS]) for i in range(SETTINGS)])
    lead_s, lag_s, after_s = np.round(6.0 * rest[0]), np.round(-5.0 + 15.0 * rest[1]), np.round(40.0 * rest[2])
    ramp = 0.03 ** (1.0 - rest[3])
    period_s = 2.0 + np.floor(9.0 * rest[4])
    phase_s, on_s = np.floor(period_s * rest[5]), np.ceil(period_s * rest[6])
    kv_factor = np.where(rest[7] > 0.3, rest[7], 1.0)
    batch_factor = np.where(rest[8] > 0.4, np.exp(6.0 * (rest[8] - 1.0)), 1.0)
    other_spec, alternates = np.asarray(SPEC_LENGTHS)[_choice(rest[9], len(SPEC_LENGTHS))], rest[10] > 0.5
    steps = np.arange(task.episode_length)
    phase = _phases(task, steps[:, None], lead_s, lag_s, after_s)
    actions = settings[phase, np.arange(len(genes))]
    for t in steps[1:]:
        # the pool and the batch move to the next setting in small steps
        for knob in (0, 2):
            actions[t, :, knob] = actions[t - 1, :, knob] + ramp * (actions[t, :, knob] - actions[t - 1, :, knob])
    off = (steps[:, None] + phase_s) % period_s >= on_s
    actions[..., 0] = np.where(off, actions[..., 0] * kv_factor, actions[..., 0])
    actions[..., 2] = np.where(off, actions[..., 2] * batch_factor, actions[..., 2])
    actions[..., 1] = np.where(off & alternates, other_spec, actions[..., 1])
    clipped = np.clip(actions, ACTION_LOW, ACTION_HIGH).reshape(-1, KNOBS)
    return snap(clipped, action_mask(task.active_actions)).reshape(actions.shape)


def best_timetables(task: TaskSpec, values: Values, tried: int, kept: int) -> FloatArray:
    """Actions (T, kept, 5) of the best timetables of a search: four fifths random, one fifth bred.

    ``tried`` timetables are random. The best of them start separate cross-entropy searches, whose winners are too
    similar to be ranked, so both kinds are kept.
    """
    rng = np.random.default_rng(0)
    first = rng.random((tried, N_GENES))
    order = np.argsort(-values(actions_of(task, first)))
    n_bred = kept // 5
    bred = [_breed(task, values, first[order[i::BREEDS][:KEPT]], rng) for i in range(BREEDS)]
    winners = np.concatenate([genes[: -(-n_bred // BREEDS)] for genes in bred])[:n_bred]
    return actions_of(task, np.concatenate([winners, first[order[: kept - n_bred]]]))


class Timetables:
    """Agent that plays actions (T, N, 5) by the clock, each for ``rows_each`` rows."""

    def __init__(self, actions: FloatArray, rows_each: int) -> None:
        self._actions = np.repeat(actions, rows_each, axis=1)
        self._step = 0

    def reset(self, n_rows: int) -> None:
        """Start new episodes."""
        self._step = 0

    def act(self, observation: FloatArray) -> FloatArray:
        """The knobs (B, 5) of this second."""
        self._step += 1
        return self._actions[self._step - 1]


def _breed(task: TaskSpec, values: Values, parents: FloatArray, rng: np.random.Generator) -> FloatArray:
    """Winner of every generation of a cross-entropy search, best first."""
    mean, spread = parents.mean(axis=0), parents.std(axis=0) + 0.05
    winners, grades = [], []
    for _ in range(GENERATIONS):
        genes = np.clip(mean + spread * rng.standard_normal((GENERATION, N_GENES)), 0.0, 1.0)
        grade = values(actions_of(task, genes))
        best = np.argsort(-grade)[:KEPT]
        mean = 0.3 * mean + 0.7 * genes[best].mean(axis=0)
        spread = 0.3 * spread + 0.7 * genes[best].std(axis=0) + 0.01
        winners.append(genes[best[0]])
        grades.append(grade[best[0]])
    return np.array(winners)[np.argsort(grades)[::-1]]


def _setting(genes: FloatArray) -> FloatArray:
    """Knobs (N, 5) from genes (N, 5); the batch is on a logarithmic scale."""
    return np.column_stack(
        [
            ACTION_LOW[0] + (ACTION_HIGH[0] - ACTION_LOW[0]) * genes[:, 0],
            np.asarray(SPEC_LENGTHS)[_choice(genes[:, 1], len(SPEC_LENGTHS))],
            ACTION_HIGH[2] ** genes[:, 2],
            _choice(genes[:, 3], 2),
            _choice(genes[:, 4], 3),
        ]
    )


def _choice(gene: FloatArray, n: int) -> FloatArray:
    """Index of one of n choices, from a gene in [0, 1]."""
    chosen: FloatArray = np.minimum(n - 1, (gene * n).astype(np.int64))
    return chosen


def _phases(task: TaskSpec, step: FloatArray, lead_s: FloatArray, lag_s: FloatArray, after_s: FloatArray) -> FloatArray:
    """Setting of every second, (T, N): 0 in calm, 1 around a flood, 2 after it."""
    phase = np.zeros(np.broadcast(step, lead_s).shape, dtype=np.int64)
    if task.burst is None:
        return phase
    burst = task.burst
    first = (step - burst.offset_steps) // burst.interval_steps
    # the flood that began last, and the next one, whose lead time may have begun
    for k in (first, first + 1):
        since = np.where(k >= 0, step - burst.offset_steps - k * burst.interval_steps, -np.inf)
        phase = np.where((since >= -lead_s) & (since < burst.duration_steps + lag_s), 1, phase)
        tail = (since >= burst.duration_steps + lag_s) & (since < burst.duration_steps + lag_s + after_s)
        phase = np.where(tail & (phase == 0), 2, phase)
    return phase
