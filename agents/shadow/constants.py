"""Constant settings on one load, hundreds at once in one batch: which serve it best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final

import numpy as np

from agents.protocol import FloatArray
from env.batch import ServingBatch
from inferencegym.models import QuantTier, ServeAction
from inferencegym.spaces.actions import to_row
from inferencegym.tasks import Calibration, TaskSpec
from simulator.objectives import QUANTILES
from simulator.tables import ServingTables
from simulator.whatif import weighted_quantile

GRID: Final[dict[str, tuple[float, ...]]] = {
    "kv_budget": (0.9, 1.0),
    "spec_length": (0, 2, 4),
    "batch_size": (16, 32, 64, 128, 256, 512),
}
"""Settings that are tried, each with each and in each precision; prefill is together or apart on all replicas."""
NEUTRAL: Final = Calibration(0.0, 1.0, 1.0, 1.0)
"""Prices and throughputs that change nothing: constants look at no observation."""


def grid(prefill_apart: bool, tiers: Sequence[int], drafts: bool = True) -> list[ServeAction]:
    """All settings of :data:`GRID` in these precisions, of a table's; those that draft tokens may be left out."""
    return [
        ServeAction(kv, int(spec), int(batch), prefill_apart, QuantTier(tier))
        for kv, spec, batch, tier in product(*GRID.values(), tiers)
        if drafts or not spec
    ]


@dataclass(frozen=True, slots=True)
class Screened:
    """Settings on one load: the share of requests missed by each, (S,); TPOT (ms) and tokens of each second, (T, S).

    Missed are requests beyond the task's objectives, refused or left over; out of memory counts as all missed.
    """

    missed: FloatArray
    tpot_ms: FloatArray
    tokens: FloatArray

    def tpot(self, statistic: str) -> FloatArray:
        """A statistic of TPOT over tokens, by setting, (S,) in ms."""
        if statistic == "mean":
            mean: FloatArray = (self.tpot_ms * self.tokens).sum(axis=0) / self.tokens.sum(axis=0)
            return mean
        q = QUANTILES[statistic]
        columns = zip(self.tpot_ms.T, self.tokens.T, strict=True)
        return np.array([weighted_quantile(tpot, tokens, q) for tpot, tokens in columns])


def screen(task: TaskSpec, tables: ServingTables, settings: Sequence[ServeAction]) -> Screened:
    """Play all settings as rows of one batch with the same requests."""
    batch = ServingBatch(task, len(settings), None, tables, NEUTRAL, n_loads=1)
    batch.reset([0])
    actions = np.array([to_row(setting) for setting in settings])
    missed, failed = np.zeros(len(settings)), np.zeros(len(settings), dtype=bool)
    tpot, tokens = np.zeros((2, task.episode_length, len(settings)))
    for t in range(task.episode_length):
        batch.step(actions)
        missed += batch.metric["slo_violations"]
        failed |= batch.metric["oom"] > 0
        tpot[t], tokens[t] = batch.metric["tpot_ms"], np.maximum(batch.metric["tokens_per_sec"], 1e-12)
    left = batch.fleet.state.rows["queue"].reshape(len(settings), -1).sum(axis=1)
    shares = np.minimum(1.0, (missed + left) / batch.fleet.arrivals[0].sum())
    return Screened(np.where(failed, 1.0, shares), tpot, tokens)
