"""An episode of a task in the discrete-event reference: it takes the knobs each second and returns the metrics.

Requests, operator times, memory and objectives are those of the fluid model, but nothing is averaged. Metrics are those
that a server knows at the end of a second: TTFT of the requests whose first token came in that second, tokens written
in it, and requests that wait beyond their objective at its end.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Final, NamedTuple, TypedDict

import numpy as np

from inferencegym.models import Router
from simulator.events.fleet import BLOCK_TOKENS, Fleet, RollingRestart
from simulator.events.requests import FloatArray, IntArray, Outcome, Requests
from simulator.events.simulation import Simulation
from simulator.hardware import measured
from simulator.hardware.profiles import profiles
from simulator.hardware.sources import fleet_rules_of, operators_of
from simulator.kernel.serving import CONVENTIONS, ServingParams
from simulator.load.source import REUSE_LOG2_FIRST, EpisodeRequests

RECENT_STARTS: Final = 50
"""Number of latest requests whose median time from start to first token is the estimate for a waiting request."""


class Knobs(NamedTuple):
    """The action of one second."""

    kv_budget: float
    spec_length: int
    batch_size: int
    prefill_disagg: bool
    quant_tier: int
    replicas: int


class Second(TypedDict):
    """Metrics of one second, with the names and units of :data:`simulator.kernel.arrays.METRICS`."""

    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_ms: float
    tokens_per_sec: float
    cost_per_1k: float
    spec_accept_rate: float
    eviction_events: float
    slo_violations: float
    violation_share: float
    queue_requests: float
    running_requests: float
    kv_occupancy: float
    admitted: float
    completed: float
    rejected: float


class ReferenceEpisode:
    """One episode, second by second: :meth:`play_second` takes the knobs and returns the second's metrics.

    ``class_index`` (N,) is the class of each request.

    Without ``by_class`` requests are served first come first served, as in engines without priorities. Requests of more
    than ``context_tokens`` are refused, as those are that no KV pool holds. With ``clients`` the requests form a closed
    loop.
    """

    def __init__(
        self,
        params: ServingParams,
        requests: EpisodeRequests,
        seed: int,
        rolling_restart: RollingRestart = "recompute",
        by_class: bool = True,
        context_tokens: int | None = None,
        router: Router = "shared",
        prefill_replicas: int | None = None,
        server: bool = False,
        clients: int | None = None,
    ) -> None:
        self._server, self._clients = server, clients
        self._prefill_replicas = prefill_replicas
        self._router: Router = router
        self._params = params
        self._context_tokens = context_tokens
        self._by_class = by_class
        self._arrival_s, self.class_index = requests.arrival_s, requests.class_index
        self._requests: EpisodeRequests | None = requests
        self._seed = seed
        self._rolling_restart: RollingRestart = rolling_restart
        self._slo_ms = params.stats.slo_ms[requests.class_index]
        self._models, self._rules = operators_of(params.tables), fleet_rules_of(params.tables)
        speculation = profiles()["speculation"]
        self._acceptance = measured.spec_acceptance(speculation["dataset"], speculation["method"])
        self._simulation: Simulation | None = None
        self._configured: tuple[Knobs, bool] | None = None
        self._second = 0
        self._first_open = 0
        self._start_to_first_ms: deque[float] = deque(maxlen=RECENT_STARTS)

    def play_second(self, knobs: Knobs, oom: bool) -> Second:
        """Serve one second with these knobs; ``oom`` says that they exceed the memory, which slows every iteration."""
        simulation = self._configure(knobs, oom)
        before, start_ms = _Totals.of(simulation), 1e3 * self._second
        self._advance(simulation)
        done = _Totals.of(simulation).since(before)
        judged = self._judge(simulation, start_ms)
        params = self._params
        ktokens_per_s = done.written / 1e3
        gpus = params.tables.cards_per_replica * (done.replica_ms / 1e3 + done.prefill_gpu_ms / 1e3)
        missed, share = float(judged.missed + done.refused), 0.0
        if judged.requests + done.refused:
            share = min(1.0, missed / (judged.requests + done.refused))
        if oom:
            missed = max(CONVENTIONS.oom_penalty * missed, knobs.batch_size)
            share = min(
                1.0, max(CONVENTIONS.oom_penalty * share, knobs.batch_size / max(judged.requests, knobs.batch_size))
            )
        return {
            "ttft_p50_ms": judged.ttft_p50_ms,
            "ttft_p99_ms": judged.ttft_p99_ms,
            "tpot_ms": self._tpot_ms(simulation, done),
            "tokens_per_sec": float(done.written),
            "cost_per_1k": params.price * gpus / max(ktokens_per_s, CONVENTIONS.min_billed_ktokens_per_s),
            "spec_accept_rate": done.accepted / done.drafted if done.drafted else 0.0,
            "eviction_events": float(done.preempted),
            "slo_violations": missed,
            "violation_share": share,
            "queue_requests": float(judged.waiting),
            "running_requests": 0.5 * (before.running + simulation.running()),
            "kv_occupancy": simulation.kv_occupancy(),
            "admitted": float(done.started),
            "completed": float(done.finished),
            "rejected": float(done.refused),
        }

    def pass_second(self, knobs: Knobs, oom: bool) -> None:
        """Serve one second as :meth:`play_second` does, without its metrics; all seconds of an episode or none."""
        self._advance(self._configure(knobs, oom))

    def _advance(self, simulation: Simulation) -> None:
        self._second += 1
        simulation.run_until(1e3 * self._second)

    def totals(self) -> dict[str, int]:
        """Sums since the start of the metrics that count requests or tokens."""
        assert self._simulation is not None
        done = _Totals.of(self._simulation)
        return {
            "tokens_per_sec": done.written,
            "eviction_events": done.preempted,
            "admitted": done.started,
            "completed": done.finished,
            "rejected": done.refused,
        }

    def outcome(self) -> Outcome:
        """Every request so far."""
        assert self._simulation is not None
        return self._simulation.outcome()

    def gaps(self) -> IntArray:
        """Number of gaps between outputs of a request so far, by length (:data:`GAP_MS`)."""
        assert self._simulation is not None
        counts: IntArray = self._simulation.arrays["gaps"]
        return counts

    def decoding(self) -> tuple[float, float]:
        """Decoding requests of a replica and their context (tokens), means over the replicas that have any."""
        assert self._simulation is not None
        found: tuple[float, float] = self._simulation.loop.decoding()
        return found

    def tiers(self) -> set[int]:
        """Precisions that replicas currently run."""
        if self._simulation is None:
            return set()
        arrays, n = self._simulation.arrays, len(self._simulation.replicas)
        loaded = set(arrays["model"][:n][arrays["gone"][:n] == 0].tolist())
        return {self._models.index(self._simulation.models[i]) for i in loaded}

    def replicas(self) -> tuple[float, float, float]:
        """Replicas in service, removed replicas that still serve, and the share of the former that needs no restart."""
        assert self._simulation is not None
        fleet = self._simulation.fleet
        there = [each for each in self._simulation.replicas if not each.gone and not each.loading]
        ready = [each for each in there if not each.leaving]
        current = sum((each.model, each.disaggregated) == (fleet.model, fleet.disaggregated) for each in ready)
        return float(len(ready)), float(len(there) - len(ready)), current / len(ready) if ready else 1.0

    def _configure(self, knobs: Knobs, oom: bool) -> Simulation:
        if self._simulation is None or self._configured != (knobs, oom):
            self._simulation = self._reconfigured(knobs, oom)
            self._configured = knobs, oom
        self._simulation.state.prefix_hit = self._prefix_hit(self._simulation)
        return self._simulation

    def _reconfigured(self, knobs: Knobs, oom: bool) -> Simulation:
        tables, one_block = self._params.tables, self._rules.get("block_tokens", BLOCK_TOKENS)
        pools = {
            tier: max(one_block, tables.kv_pool_tokens(i, knobs.kv_budget, knobs.spec_length > 0))
            for i, tier in enumerate(tables.tiers)
        }
        constants = self._params.constants
        fleet = Fleet(
            self._models[knobs.quant_tier],
            knobs.batch_size,
            pools[tables.tiers[knobs.quant_tier]],
            # An episode begins with the task's number of replicas; the first action may request another number.
            replicas=knobs.replicas if self._simulation is not None else self._params.n_replicas,
            draft_tokens=knobs.spec_length,
            acceptance=self._acceptance.get(knobs.spec_length, ()),
            acceptance_scale=tuple(constants["accept_scale"].tolist()),
            disaggregated=knobs.prefill_disagg,
            link_gb_s=self._params.engine.link_bytes_per_s / 1e9,
            queue_limit=int(self._params.queue_limit),
            context_tokens=self._context_tokens,
            restart_ms=1e3 * float(constants["reload_s"][knobs.quant_tier]),
            start_ms=1e3 * float(constants["start_s"][knobs.quant_tier]),
            slowdown=CONVENTIONS.oom_slowdown if oom else 1.0,
            rolling_restart=self._rolling_restart,
            router=self._router,
            prefill_replicas=self._prefill_replicas,
            server=self._server,
            **self._rules,
        )
        if self._simulation is None:
            assert self._requests is not None
            each, self._requests = self._requests, None  # the simulation has its own copy
            priority = each.class_index if self._by_class else None
            acceptance = self._params.acceptance_of(each.arrival_s, each.class_index)
            requests = Requests(
                *(each.arrival_s, each.prompt_tokens, each.output_tokens, priority),
                *(each.reused_tokens, acceptance, each.follows),
            )
            self._simulation = Simulation(fleet, requests, self._seed, self._clients)
            self._simulation.share_times()
            fleet = replace(fleet, replicas=knobs.replicas)
        self._simulation.reconfigure(fleet, pools)
        return self._simulation

    def _prefix_hit(self, simulation: Simulation) -> float:
        """Hit rate of repeated prefix tokens in the LRU caches."""
        curve = self._params.stats.reuse_hit
        if curve is None:
            return 0.0
        pool_blocks = sum(each.pool_blocks for each in simulation.replicas if not each.gone)
        capacity = pool_blocks * simulation.fleet.block_tokens
        held = min(capacity, simulation.state.prefilled_tokens + simulation.state.written_tokens)
        position = np.log2(max(held, 1.0)) - REUSE_LOG2_FIRST
        if position < 0.0:
            return float(curve[0] * 2.0**position)
        return float(np.interp(position, np.arange(len(curve)), curve))

    def _judge(self, simulation: Simulation, start_ms: float) -> _Judged:
        """TTFT in the second that ends now, and requests beyond their objective."""
        now = simulation.state.now_ms
        # Only requests that have arrived and had no answer before: a long log has many others.
        lo, hi = self._first_open, int(np.searchsorted(self._arrival_s, self._second))
        first, refused = simulation.first_ms[lo:hi], simulation.arrays["rejected"][lo:hi] > 0
        answered = lo + np.flatnonzero((first >= start_ms) & (first < now))
        waiting = lo + np.flatnonzero(np.isnan(simulation.start_ms[lo:hi]) & ~refused)
        still_open = np.flatnonzero(~(first < now) & ~refused)
        self._first_open = lo + int(still_open[0]) if len(still_open) else hi
        first = simulation.first_ms
        offset_ms = simulation.state.client_ms
        ttft_ms = first[answered] - simulation.arrival_ms[answered] + offset_ms + simulation.output_delay_ms[answered]
        self._start_to_first_ms.extend((first[answered] - simulation.start_ms[answered]).tolist())
        age_ms = now - simulation.arrival_ms[waiting]
        overdue = int((age_ms > self._slo_ms[waiting]).sum())
        missed = int((ttft_ms > self._slo_ms[answered]).sum()) + overdue
        if len(answered):
            ttft_ms.sort()
            p50, p99 = quantile(ttft_ms, 0.5), quantile(ttft_ms, 0.99)
        else:
            p50 = p99 = float(age_ms.max(initial=0.0)) + self._first_token_ms() + offset_ms
        return _Judged(p50, p99, missed, len(answered) + overdue, len(waiting))

    def _first_token_ms(self) -> float:
        """Median time from start to first token of the latest requests; until there are any, that of a mean prompt."""
        if self._start_to_first_ms:
            return float(np.median(self._start_to_first_ms))
        return float(self._params.stats.work_mean_ms[0, 0])

    def _tpot_ms(self, simulation: Simulation, done: _Totals) -> float:
        if done.decoded:
            return min(done.decode_ms / done.decoded, CONVENTIONS.max_tpot_steps * 1e3)
        if any(replica.load() for replica in simulation.replicas):
            return CONVENTIONS.max_tpot_steps * 1e3
        return simulation.fleet.model.step_ms(1, float(self._params.stats.prompt_mean[0]), (), 0, 0)


def quantile(ascending: FloatArray, q: float) -> float:
    """``np.quantile`` of sorted values, bit for bit, in a fraction of its time on a second's few requests."""
    position = q * (len(ascending) - 1)
    i = int(position)
    share = position - i
    low, high = float(ascending[i]), float(ascending[min(i + 1, len(ascending) - 1)])
    return low + (high - low) * share if share < 0.5 else high - (high - low) * (1.0 - share)


class _Judged(NamedTuple):
    ttft_p50_ms: float
    ttft_p99_ms: float
    missed: int
    requests: int
    waiting: int


class _Totals(NamedTuple):
    """Counts since the start of the episode; ``running`` is the current number."""

    written: int
    drafted: int
    accepted: int
    decoded: int
    decode_ms: float
    prefill_gpu_ms: float
    replica_ms: float
    preempted: int
    started: int
    finished: int
    refused: int
    running: int

    @classmethod
    def of(cls, simulation: Simulation) -> _Totals:
        state = simulation.state
        return cls(
            state.written_tokens,
            state.drafted_tokens,
            state.accepted_tokens,
            state.decoded_tokens,
            state.decode_ms,
            state.prefill_gpu_ms,
            state.replica_ms,
            state.n_preempted,
            state.n_started,
            state.n_finished,
            state.n_rejected,
            simulation.running(),
        )

    def since(self, before: _Totals) -> _Totals:
        return _Totals._make(now - then for now, then in zip(self, before, strict=True))
