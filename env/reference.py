"""The discrete-event engine as dynamics of a batch: same tasks, actions, observations and grades as the fluid model.

It simulates every request and iteration, and so shows whether a policy with a high score in the fluid model exploits an
error of that model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from env.dynamics import RequestFleet, idle_metrics, memory_gb
from inferencegym.models import SPEC_LENGTHS, Router
from simulator.events.episode import Knobs, ReferenceEpisode, Second
from simulator.events.fleet import RollingRestart
from simulator.kernel.serving import ServingParams
from simulator.load.source import LoadSource


class ReferenceFleet(RequestFleet):
    """B fleets in the discrete-event engine.

    Without ``by_class`` the queue is first come, first served. ``rolling_restart`` sets what a replica does with its
    requests before it restarts. Requests of more than ``context_tokens`` are refused. With another ``router`` than
    ``"shared"``, each replica has a queue of its own. ``prefill_replicas`` and ``server`` as in
    :class:`simulator.events.fleet.Fleet`.
    """

    given = (*Second.__annotations__, "oom", "gpu_memory_gb")

    def __init__(
        self,
        source: LoadSource,
        params: ServingParams,
        n_rows: int,
        n_steps: int,
        n_loads: int,
        record: int = 0,
        *,
        rolling_restart: RollingRestart = "recompute",
        by_class: bool = True,
        context_tokens: int | None = None,
        router: Router = "shared",
        prefill_replicas: int | None = None,
        server: bool = False,
    ) -> None:
        super().__init__(source, params, n_rows, n_steps, n_loads, record)
        self._rolling_restart: RollingRestart = rolling_restart
        self._by_class = by_class
        self._context_tokens = context_tokens
        self._router: Router = router
        self._prefill_replicas = prefill_replicas
        self._server = server
        self._episodes: dict[int, ReferenceEpisode] = {}

    def reset_rows(self, rows: Iterable[int]) -> None:
        """Start these rows anew."""
        chosen = list(rows)
        super().reset_rows(chosen)
        for row in chosen:
            seed = int(self.seeds[row % self.n_loads])
            requests = self.source.requests(seed, self.n_steps)
            self._episodes[row] = ReferenceEpisode(
                *(self.params, requests, seed, self._rolling_restart, self._by_class),
                *(self._context_tokens, self._router, self._prefill_replicas, self._server),
            )

    def episode(self, row: int) -> ReferenceEpisode:
        """The episode of a row since its reset."""
        return self._episodes[row]

    def idle(self) -> Mapping[str, float]:
        """Latencies of a request alone, and the memory of the default knobs."""
        return idle_metrics(self.params)

    def serve(self, rows: range) -> Sequence[Mapping[str, float]]:
        """Metrics of the next second of these rows, with the noise that the seed drew."""
        return [self._play(row) for row in rows]

    def used_gb(self, row: int) -> float:
        """Memory (GB) that a row's knobs need on a replica."""
        knobs = self.knobs(row)
        # A replica that has not restarted yet has its old weights.
        tiers = {knobs.quant_tier, *self._episodes[row].tiers()}
        return max(
            memory_gb(self.params, knobs.kv_budget, knobs.spec_length > 0, knobs.batch_size, tier) for tier in tiers
        )

    def _play(self, row: int) -> Mapping[str, float]:
        episode, knobs, used_gb = self._episodes[row], self.knobs(row), self.used_gb(row)
        limit_gb = self.params.constants["memory_limit_gb"]
        metrics = episode.play_second(knobs, used_gb > limit_gb)
        rows = self.state.rows
        rows["replicas_ready"][row], rows["replicas_draining"][row], rows["rollout_share"][row] = episode.replicas()
        ttft_noise, tpot_noise = self.noise[row % self.n_loads, rows["time"][row]]
        metrics["ttft_p50_ms"] *= ttft_noise
        metrics["ttft_p99_ms"] *= ttft_noise
        metrics["tpot_ms"] *= tpot_noise
        return {**metrics, "oom": float(used_gb > limit_gb), "gpu_memory_gb": min(used_gb, limit_gb)}

    def knobs(self, row: int) -> Knobs:
        """The knobs that a row serves with."""
        return Knobs(
            kv_budget=float(self.kv_budget[row]),
            spec_length=SPEC_LENGTHS[self.spec_index[row]],
            batch_size=round(float(self.batch_size[row])),
            prefill_disagg=bool(self.disagg[row]),
            quant_tier=int(self.tier[row]),
            replicas=round(float(self.replicas[row])),
        )
