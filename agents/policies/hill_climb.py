"""Model-free tuner: coordinate ascent that changes one knob, measures for some seconds, and keeps what helped."""

from __future__ import annotations

from typing import Final

import numpy as np

from agents.policies.constant import NAIVE_ROW
from agents.protocol import FloatArray
from inferencegym.models import ACTION_FIELDS, OBSERVATION_FIELDS, SPEC_LENGTHS
from inferencegym.spaces.actions import ACTION_HIGH, ACTION_LOW, action_mask
from inferencegym.tasks import TaskSpec

COLUMN: Final = {name: i for i, name in enumerate(OBSERVATION_FIELDS)}

WATCH_STEPS: Final = 6
"""Seconds that a setting is watched before it is judged; the first half settles and does not count."""

_ORDER: Final = [
    list(ACTION_FIELDS).index(name)
    for name in ("batch_size", "quant_tier", "spec_length", "kv_budget", "prefill_disagg")
]
"""Knobs in the order in which they are tried: what usually matters most comes first."""


class HillClimbAgent:
    """Coordinate ascent on a weighted sum of SLO violations, queue, time to first token and cost.

    The share of requests that miss their objective is the tail of the latency distribution (what p99 objectives are
    about), so the tuner is driven by the tail, not by the median. Every row climbs on its own.
    """

    def __init__(self, task: TaskSpec) -> None:
        self._slo_ms = task.slo_target_ms
        self._budget_per_step = task.cost_budget / task.episode_length
        live = action_mask(task.active_actions)
        self._knobs = [knob for knob in _ORDER if live[knob]]

    def reset(self, n_rows: int) -> None:
        self._kept = np.tile(NAIVE_ROW, (n_rows, 1))
        self._tried = self._kept.copy()
        self._standing = np.full(n_rows, np.nan)
        self._sum = np.zeros(n_rows)
        self._move = np.zeros(n_rows, dtype=np.int64)
        self._last_cost = np.zeros(n_rows)
        self._step = 0

    def act(self, observation: FloatArray) -> FloatArray:
        value = self._value(observation)
        within = self._step % WATCH_STEPS
        if self._step > 0 and (within == 0 or within > WATCH_STEPS // 2):
            self._sum += value
        if self._step > 0 and within == 0:
            self._judge()
        self._step += 1
        return self._tried

    def _value(self, o: FloatArray) -> FloatArray:
        spent = o[:, COLUMN["cost_so_far"]] - self._last_cost
        self._last_cost = o[:, COLUMN["cost_so_far"]].copy()
        slo_missed = o[:, COLUMN["slo_violation_rate"]]
        queue = np.log1p(o[:, COLUMN["queue_depth"]]) / np.log1p(512.0)
        latency = np.log1p(o[:, COLUMN["ttft_p50"]] / self._slo_ms) / np.log1p(5000.0 / self._slo_ms)
        cost = spent / (spent + self._budget_per_step)
        total: FloatArray = -(0.4 * slo_missed + 0.2 * queue + 0.2 * latency + 0.2 * cost)
        return total

    def _judge(self) -> None:
        """Keep what did better than the setting kept so far in the watch before; else go back and watch that again.

        Only neighbouring watches are compared: the load drifts, and a quiet minute would never be beaten in a flood.
        """
        first = np.isnan(self._standing)  # watched while the fleet filled up: nothing to compare with
        trial = (self._tried != self._kept).any(axis=1)
        better = trial & (self._sum > self._standing)
        worse = trial & ~better
        self._kept[better] = self._tried[better]
        self._move[worse] += 1
        self._standing = np.where(worse, self._standing, self._sum)
        self._sum = np.zeros_like(self._sum)
        self._tried = self._kept.copy()
        for row in np.flatnonzero(~worse & ~first):
            while (self._tried[row] == self._kept[row]).all():
                self._try_move(int(row))

    def _try_move(self, row: int) -> None:
        move = int(self._move[row])
        knob = int(self._knobs[(move // 2) % len(self._knobs)])
        up = move % 2 == 0
        value = self._tried[row, knob]
        if knob == 0:
            value += 0.15 if up else -0.15
        elif knob == 1:
            index = SPEC_LENGTHS.index(int(value)) + (1 if up else -1)
            value = SPEC_LENGTHS[min(max(index, 0), len(SPEC_LENGTHS) - 1)]
        elif knob == 2:
            value = round(value * (2.0 if up else 0.5))
        elif knob == 3:
            value = 1.0 - value
        else:
            value += 1.0 if up else -1.0
        self._tried[row, knob] = min(max(value, ACTION_LOW[knob]), ACTION_HIGH[knob])
        if self._tried[row, knob] == self._kept[row, knob]:  # at its end already
            self._move[row] += 1
