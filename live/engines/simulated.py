"""The discrete-event reference as an engine, to try tools for running engines without one and without waiting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Self

import numpy as np

from live.driver import EngineRequest, RequestTiming
from live.engines.engine import Knobs, Orders, Reading, within
from simulator.events.fleet import Fleet
from simulator.events.requests import Requests
from simulator.events.simulation import Simulation
from simulator.hardware.sources import fleet_rules_of, operators_of
from simulator.hardware.tables import ServingTables


class SimulatedEngine:
    """One replica of a table's engine and model, in virtual time, which :meth:`SimulatedLoad.advance` advances.

    It drafts up to ``drafts`` tokens; only those of requests that name their acceptance are ever accepted. ``seed``
    determines which.
    """

    name = "simulator"
    seconds_pass = False

    def __init__(self, tables: ServingTables, max_batch_size: int = 256, drafts: int = 0, seed: int = 0) -> None:
        self._pool_tokens = tables.kv_pool_tokens(0, 1.0, False)
        self._fleet = Fleet(
            operators_of(tables)[0],
            max_batch_size,
            self._pool_tokens,
            draft_tokens=drafts,
            acceptance=(1.0,) * drafts,  # every request has its own
            **fleet_rules_of(tables),
        )
        self._seed = seed
        self._limits = {"batch_size": (1.0, float(max_batch_size)), "kv_budget": (0.1, 1.0)}
        if drafts:
            self._limits["spec_length"] = (0.0, float(drafts))
        self._in_force = {name: high for name, (_, high) in self._limits.items()}
        self._load: SimulatedLoad | None = None

    def limits(self) -> Mapping[str, tuple[float, float]]:
        return self._limits

    def in_force(self) -> Knobs:
        return dict(self._in_force)

    def user_setting(self) -> Knobs:
        return self.in_force()

    def read(self) -> Reading:
        load = SimulatedLoad(self._fleet, (), self._seed) if self._load is None else self._load
        return load.reading()

    def set(self, orders: Orders) -> None:
        self._in_force |= within(orders.knobs, self._limits)
        pool = max(self._fleet.block_tokens, int(self._in_force["kv_budget"] * self._pool_tokens))
        self._fleet = replace(
            self._fleet,
            batch_size=int(self._in_force["batch_size"]),
            kv_pool_tokens=pool,
            draft_tokens=int(self._in_force.get("spec_length", 0)),
        )
        if self._load is not None:
            self._load.simulation.reconfigure(self._fleet, {self._fleet.model.tier: pool})

    def load(self, requests: Sequence[EngineRequest], clients: int | None = None) -> SimulatedLoad:
        self._load = SimulatedLoad(self._fleet, requests, self._seed, clients)
        return self._load


class SimulatedLoad:
    """Requests served by a :class:`Simulation`."""

    def __init__(self, fleet: Fleet, requests: Sequence[EngineRequest], seed: int, clients: int | None = None) -> None:
        self.timings = [RequestTiming(request) for request in requests]
        self._drafts, self._closed = len(fleet.acceptance) > 0, clients is not None
        columns = np.array(
            [[r.prompt_tokens, r.output_tokens, r.class_index] for r in requests], dtype=np.int64
        ).reshape(len(requests), 3)
        arrival_s = np.array([r.arrival_s for r in requests], dtype=np.float64)
        acceptance = np.array([r.acceptance or 0.0 for r in requests], dtype=np.float64)
        drawn = Requests(arrival_s, columns[:, 0], columns[:, 1], columns[:, 2], acceptance=acceptance)
        self.simulation = Simulation(fleet, drawn, seed, clients)
        self.simulation.share_times()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for timing in self.timings:
            if timing.ended_s is None:
                timing.ended_s, timing.error = self.simulation.state.now_ms / 1e3, "cancelled"

    def advance(self, to_s: float) -> None:
        simulation = self.simulation
        simulation.run_until(1e3 * to_s)
        replica = simulation.replicas[0]
        written = dict(zip(replica.request[: replica.n].tolist(), replica.tokens[: replica.n].tolist(), strict=True))
        for i, timing in enumerate(self.timings):
            if timing.ended_s is None and simulation.arrival_ms[i] < 1e3 * to_s:  # NaN before it is sent
                if self._closed and timing.sent_s is None:  # its client has just sent it
                    timing.request = replace(timing.request, arrival_s=float(simulation.arrival_ms[i]) / 1e3)
                timing.sent_s = timing.request.arrival_s
                self._update(i, timing, written.get(i, 0) - timing.request.prompt_tokens, to_s)

    def _update(self, i: int, timing: RequestTiming, written: int, now_s: float) -> None:
        first, finish = self.simulation.first_ms[i] / 1e3, self.simulation.finish_ms[i] / 1e3
        if self.simulation.rejected[i]:
            timing.ended_s, timing.error = now_s, "refused"
        if np.isfinite(first) and timing.first_token_s is None:
            timing.receive(float(first), 1)
        if np.isfinite(finish):
            timing.receive(float(finish), timing.request.output_tokens)
            timing.ended_s = float(finish)
        elif written > timing.tokens:
            timing.receive(now_s, written)

    def reading(self) -> Reading:
        """State at the current virtual time."""
        simulation = self.simulation
        replica = simulation.replicas[0]
        started = np.isfinite(simulation.start_ms)
        waiting = np.isfinite(simulation.arrival_ms) & ~started & ~simulation.rejected
        done = np.isfinite(simulation.finish_ms)
        return Reading(
            queue_requests=float(waiting.sum() + len(replica.preempted)),
            running_requests=float(replica.in_flight()),
            kv_occupancy=simulation.kv_occupancy(),
            finished_requests=float(done.sum()),
            prompt_tokens=float(sum(t.request.prompt_tokens for t, d in zip(self.timings, done, strict=True) if d)),
            output_tokens=float(simulation.state.written_tokens),
            preemptions=float(simulation.preemptions.sum()),
            drafted_tokens=float(simulation.state.drafted_tokens) if self._drafts else None,
            accepted_tokens=float(simulation.state.accepted_tokens) if self._drafts else None,
            iterations=float(simulation.state.iterations),
        )
