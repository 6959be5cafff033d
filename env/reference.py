"""Episodes that the discrete-event reference plays instead of the fluid model: same actions, observations and grades.

The reference follows every request and iteration, which takes seconds for an episode. It tells whether a policy that
the fluid model scores high exploits an error of that model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Final

import numpy as np
from numpy.typing import NDArray

from env.batch import ServingBatch
from env.threads import CORES
from inferencegym.models import SPEC_LENGTHS
from inferencegym.tasks import Calibration, EpisodeConfig, TaskSpec
from simulator.load import EpisodeRequests
from simulator.offline.discrete_event import RollingRestart
from simulator.offline.reference_episode import Knobs, ReferenceEpisode
from simulator.serving import ServingParams
from simulator.tables import FloatArray

_EPISODES: Final[dict[int, ReferenceEpisode]] = {}
"""Episodes of this worker process by row."""


class ReferenceBatch(ServingBatch):
    """B episodes of one task in the discrete-event reference, spread over worker processes (None: one per core).

    Without ``by_class`` requests are served first come first served.
    Requests are those of the fluid model, one by one. The fluid model steps along: the statistics of the offered load
    that observations hold, and the GPU memory that the knobs take, are its own.
    """

    def __init__(
        self,
        task: TaskSpec,
        n_rows: int,
        config: EpisodeConfig | None = None,
        calibration: Calibration | None = None,
        n_loads: int | None = None,
        rolling_restart: RollingRestart = "recompute",
        n_workers: int | None = None,
        by_class: bool = True,
    ) -> None:
        super().__init__(task, n_rows, config, calibration=calibration, n_loads=n_loads, n_threads=1)
        self._rolling_restart: RollingRestart = rolling_restart
        self._by_class = by_class
        # One process each: a row's episode stays in the worker that began it.
        self._workers = [ProcessPoolExecutor(1) for _ in range(min(n_rows, n_workers or CORES))]
        self._cost_so_far = np.zeros(n_rows)

    def reset(self, seeds: Sequence[int] | NDArray[np.int64], rows: Iterable[int] | None = None) -> FloatArray:
        """Start episodes, as :meth:`ServingBatch.reset` does."""
        chosen = list(range(self.n_rows) if rows is None else rows)
        observation = super().reset(seeds, None if rows is None else chosen)
        begun = [self._worker(row).submit(_start, row, *self._episode(row)) for row in chosen]
        for each in begun:
            each.result()
        self._cost_so_far[chosen] = 0.0
        return observation

    def serve(self, lo: int, hi: int) -> None:
        """Serve one second in rows ``lo`` to ``hi`` and write the reference's metrics over those of the fluid model."""
        super().serve(lo, hi)
        oom, noise = self.metric["oom"], self.fleet.noise
        served = [self._worker(row).submit(_play, row, self._knobs(row), bool(oom[row])) for row in range(lo, hi)]
        for row, each in zip(range(lo, hi), served, strict=True):
            metrics = each.result()
            ttft_noise, tpot_noise = noise[row % self.n_loads, self.time[row] - 1]
            metrics["ttft_p50_ms"] *= ttft_noise
            metrics["ttft_p99_ms"] *= ttft_noise
            metrics["tpot_ms"] *= tpot_noise
            for name, value in metrics.items():
                self.metric[name][row] = value
            self._cost_so_far[row] += metrics["cost_per_1k"]
            self.fleet.state.rows["cost_so_far"][row] = self._cost_so_far[row]

    def _worker(self, row: int) -> ProcessPoolExecutor:
        return self._workers[row % len(self._workers)]

    def _episode(self, row: int) -> tuple[ServingParams, EpisodeRequests, int, RollingRestart, bool]:
        seed = int(self.seeds[row % self.n_loads])
        requests = self.load_source.requests(seed, self.config.episode_length)
        return self.fleet.params, requests, seed, self._rolling_restart, self._by_class

    def _knobs(self, row: int) -> Knobs:
        fleet = self.fleet
        return Knobs(
            kv_budget=float(fleet.kv_budget[row]),
            spec_length=SPEC_LENGTHS[fleet.spec_index[row]],
            batch_size=round(float(fleet.batch_size[row])),
            prefill_disagg=bool(fleet.disagg[row]),
            quant_tier=int(fleet.tier[row]),
            replicas=round(float(fleet.replicas[row])),
        )


def _start(
    row: int,
    params: ServingParams,
    requests: EpisodeRequests,
    seed: int,
    rolling_restart: RollingRestart,
    by_class: bool,
) -> None:
    _EPISODES[row] = ReferenceEpisode(params, requests, seed, rolling_restart, by_class)


def _play(row: int, knobs: Knobs, oom: bool) -> dict[str, float]:
    return _EPISODES[row].play_second(knobs, oom)
