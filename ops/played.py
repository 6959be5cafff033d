"""A load under one fixed action, played request by request in the discrete-event engine."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import numpy as np

from env.dynamics import memory_gb
from inferencegym.errors import InvalidActionError, InvalidConfigError
from inferencegym.models import NAIVE_ACTION, ROUTERS, Router, ServeAction
from inferencegym.spaces.actions import to_row
from ops.capacity import gap_statistics, levels_of, most_running, refused
from simulator.events.episode import Knobs, ReferenceEpisode
from simulator.hardware import catalogue
from simulator.hardware.tables import FloatArray, ServingTables
from simulator.load.recorded import RecordedLoad
from simulator.load.requests import RequestLog
from simulator.whatif import WhatIf, request_statistics, unchanging_fleet

Progress = Callable[[float], None]
"""Callback for the share of the requests that have been served."""

MAX_DRAIN_S: Final = 100_000
"""Seconds after the last arrival in which requests are still served."""


def check_router(router: Router, requests: RequestLog) -> None:
    """Raise InvalidConfigError if the router needs prefixes that the log does not show."""
    if router == "prefix-affinity" and not len(requests.follows):
        others = ", ".join(each for each in ROUTERS if each != router)
        raise InvalidConfigError(
            "router=prefix-affinity needs a log that shows which requests belong together: block ids (hash_ids) or a "
            f"column of sessions (session_id, or --columns session=NAME). Name it, or choose another router: {others}",
            "router",
        )


class PlayedLoad:
    """A load that has been served under one fixed action; drafts are accepted at random, always alike.

    Where the action prefills on separate GPUs, all replicas share ``prefill_replicas``; without it, each has one. With
    ``clients`` N > 0, arrivals are ignored: N clients start at once, and each sends the next request when its last one
    is answered. Requests that no engine takes, because of its context or KV pool, are refused; ``refused`` says how
    many, and is empty if none is. The batch size may be as large as a plan's (:func:`ops.capacity.most_running`).
    Raises :class:`InvalidConfigError` if the load is not served within :data:`MAX_DRAIN_S` after its last arrival.
    """

    def __init__(
        self,
        action: ServeAction,
        requests: RequestLog,
        tables: ServingTables,
        router: Router,
        n_replicas: int = 1,
        prefill_replicas: int | None = None,
        clients: int = 0,
        progress: Progress | None = None,
    ) -> None:
        if not 1 <= action.batch_size <= most_running(tables):
            raise InvalidActionError("batch_size", action.batch_size, f"an integer from 1 to {most_running(tables)}")
        replace(action, batch_size=NAIVE_ACTION.batch_size).validate()
        tables.refuse_tier(action.quant_tier.value)
        check_router(router, requests)
        if clients:
            requests = replace(requests, arrival_s=np.zeros_like(requests.arrival_s))
        source = RecordedLoad(requests, tables, once=True)
        self._action, self._requests, self._class_index = action, requests, source.class_index
        self._params = params = unchanging_fleet(source, tables, n_replicas)
        tier, drafts = action.quant_tier.value, action.spec_length > 0
        self._memory_gb = memory_gb(params, action.kv_budget, drafts, action.batch_size, tier)
        self._pool_tokens = tables.kv_pool_tokens(tier, action.kv_budget, drafts)
        self.refused = refused(requests.prompt_tokens + requests.output_tokens, tables, self._pool_tokens)
        knobs = Knobs(action.kv_budget, action.spec_length, action.batch_size, action.prefill_disagg, tier, n_replicas)
        apart = (prefill_replicas or n_replicas) if action.prefill_disagg else 0
        self._cards = tables.cards_per_replica * (n_replicas + apart)
        last_s = math.floor(float(requests.arrival_s[-1])) + 1
        episode = ReferenceEpisode(
            params,
            source.requests(0, last_s),
            0,
            context_tokens=catalogue.context_tokens(str(tables.meta["model"])),
            router=router,
            prefill_replicas=prefill_replicas,
            server=True,
            clients=clients or None,
        )
        n_requests = open_requests = len(self._class_index)
        decoding: list[tuple[float, float]] = []
        while open_requests > 0:
            if len(decoding) > last_s + MAX_DRAIN_S:
                raise InvalidConfigError(
                    f"the load is not served within {MAX_DRAIN_S:,} s: give it more GPUs or fewer requests"
                )
            episode.pass_second(knobs, self._oom)
            decoding.append(episode.decoding())
            totals = episode.totals()
            open_requests = n_requests - totals["completed"] - totals["rejected"]
            if progress is not None:
                progress(1.0 - open_requests / n_requests)
        self._totals, self._gaps = totals, episode.gaps()
        self._decoding: FloatArray = np.array(decoding)
        self.outcome = episode.outcome()
        if clients:
            self._requests = replace(requests, arrival_s=self.outcome.arrival_s)

    @property
    def _oom(self) -> bool:
        return bool(self._memory_gb > self._params.constants["memory_limit_gb"])

    def report(self) -> WhatIf:
        """Statistics of the load."""
        params, outcome, action = self._params, self.outcome, self._action
        totals, makespan_s = self._totals, outcome.makespan_s()
        busy = self._decoding[self._decoding[:, 0] > 0.0]
        busy = busy if len(busy) else self._decoding
        actions = np.tile(to_row(action), (len(busy), 1))
        return WhatIf(
            n_requests=len(self._class_index),
            completed=float(totals["completed"]),
            rejected=float(totals["rejected"]),
            **request_statistics("ttft", outcome.ttft_ms()),
            **request_statistics("tpot", outcome.tpot_ms()),
            output_tokens_per_s=totals["tokens_per_sec"] / max(makespan_s, 1e-9),
            makespan_s=makespan_s,
            peak_kv_occupancy=outcome.peak_kv_tokens / max(1, self._pool_tokens),
            preemptions=float(totals["eviction_events"]),
            gpu_memory_gb=min(self._memory_gb, params.constants["memory_limit_gb"]),
            oom=self._oom,
            gpu_seconds=makespan_s * self._cards,
            support=levels_of(params.tables, actions, busy),
            classes=self._classes(),
        )

    def figures(self) -> dict[str, Any]:
        """The report in JSON form, with end-to-end and inter-token latency."""
        e2e = request_statistics("e2e", self.outcome.e2e_ms())
        return {**self.report().to_dict(), **e2e, **gap_statistics(self._gaps)}

    def _classes(self) -> dict[str, dict[str, float]]:
        ttft_ms, found = self.outcome.ttft_ms(), {}
        for c, name in enumerate(self._params.stats.names):
            of_class = ttft_ms[(self._class_index == c) & np.isfinite(ttft_ms)]
            if len(of_class):
                p50, p99 = np.quantile(of_class, (0.5, 0.99)).tolist()
                found[name] = {"served": float(len(of_class)), "ttft_p50_ms": p50, "ttft_p99_ms": p99}
        return found

    def per_request(self) -> dict[str, Any]:
        """Columns (N,) with the requests in order of arrival; NaN for requests that were refused."""
        requests, outcome = self._requests, self.outcome
        return {
            "arrival_s": requests.arrival_s,
            "prompt_tokens": requests.prompt_tokens,
            "output_tokens": requests.output_tokens,
            "class": np.array(self._params.stats.names)[self._class_index],
            "ttft_ms": outcome.ttft_ms(),
            "tpot_ms": outcome.tpot_ms(),
            "latency_s": outcome.e2e_ms() / 1e3,
        }
