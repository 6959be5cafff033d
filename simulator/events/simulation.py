"""Iteration-level discrete-event simulation of continuous batching: the reference for the fluid dynamics.

A fleet of identical replicas serves one queue, or a router gives each replica a queue of its own
(:mod:`simulator.events.routing`). Every replica runs iterations of the operator model back to back: it
decodes its resident sequences and prefills prompts, fused (``chunked``) or in iterations of their own
(``prefill_first``), as its engine profile says. The KV cache is allocated in blocks; when it runs out, the sequence of
the lowest class that was admitted last is preempted and later recomputed. Nothing is averaged: every request has its
own arrival, first token and finish.

Rules of the queue: highest class first, first come first served within a class. A request goes to the replica with the
fewest requests among those that have a free slot, cache for its prompt and prompt tokens left in their next iteration,
and starts with that iteration; until there is one, it waits in the shared queue. Replicas start their assigned requests
in the same order. A replica with preempted requests starts no new request of their class or a lower one until they have
resumed; a higher class may start. That is vLLM with ``--scheduling-policy priority``. A bounded queue counts every
request that has not started, and refuses the youngest of the lowest class.

With ``disaggregated`` every replica has a separate prefill GPU, or all of them share ``prefill_replicas``. It sends the
cache over a link; slots and cache blocks of the replica are taken from the start of the prefill. The first token is
delivered once the cache has arrived. A shared prefill GPU takes the first prompt of any replica's line.

The configuration may change while requests are served (:meth:`Simulation.reconfigure`). Batch size, KV pool and drafts
apply from each replica's next iteration on; a pool that shrinks below its contents preempts requests. Precision and
prefill placement need a restart, one replica after another. With ``rolling_restart="recompute"`` a replica restarts at
once, and other replicas recompute the requests that it had in flight before they start new ones; with ``"drain"`` it
takes no more requests and restarts when it is empty.

The number of replicas may change as well. A new one loads for ``start_ms`` before it takes requests; a removed one
takes no more and leaves when it is empty. Replicas that still load are removed first, the youngest first, then those
with an outdated configuration, then the least loaded.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from inferencegym.errors import InvalidConfigError
from inferencegym.models import ROUTERS
from simulator.events.arrays import allocated
from simulator.events.fleet import Fleet
from simulator.events.iteration import GAPS_PER_E, LEAST_GAP_MS, RANDOM_A, RANDOM_B
from simulator.events.lines import ASSIGNED, LINES_OF_REPLICA, PREEMPTED, PREFILLING, TRANSIT
from simulator.events.loop import Loop, Run
from simulator.events.requests import FloatArray, IntArray, Outcome, Requests, Sessions
from simulator.hardware.operators import Chunk, OperatorModel

LOOKED_UP_ROWS: Final = 8192
"""Largest number of rows with cached times; beyond it the model computes each time."""
_CONTEXTS: Final = 32  # contexts up to 2 ** 32 tokens
GAP_MS: Final = LEAST_GAP_MS * np.exp((np.arange(2048) + 0.5) / GAPS_PER_E)
"""Gaps between outputs in the middle of each bin that counts them; the bins are 1% wide."""


def serve(fleet: Fleet, requests: Requests, seed: int = 0) -> Outcome:
    """Serve requests that arrive on their own schedule (open loop); ``seed`` determines which drafts are accepted."""
    return Simulation(fleet, requests, seed).run()


def serve_closed(
    fleet: Fleet, prompt_tokens: IntArray, output_tokens: IntArray, clients: int, seed: int = 0
) -> Outcome:
    """Serve ``clients`` clients that each send their next request when their last is answered (closed loop).

    Requests are sent in order; the run ends when all are answered. The engine profile's TTFT offset is the round trip
    to the client, so a slot stays free that long between two requests of one client.
    """
    if clients < 1:
        raise InvalidConfigError(f"clients={clients}: a closed loop needs at least one")
    unscheduled = Requests(np.zeros(len(prompt_tokens)), np.asarray(prompt_tokens), np.asarray(output_tokens))
    return Simulation(fleet, unscheduled, seed, clients).run()


LOOKED_UP: Final = ("linear_ms", "head_ms", "attention_ms", "n_contexts")
"""Operator times that a run computes as it needs them; runs of the same model can share them."""


@lru_cache(maxsize=64)
def _looked_up(model: OperatorModel, batches: int) -> dict[str, Any]:
    """Arrays of :data:`LOOKED_UP` that runs of a model share; the first run provides them."""
    return {}


class SessionRun:
    """Agent sessions on one replica: :meth:`play` runs them under a cap on the sessions in flight.

    ``state`` has the counts of :data:`simulator.events.arrays.RUN`. The first turn computes the system prompt, which
    then stays in the cache and occupies its part of the pool.
    """

    def __init__(self, fleet: Fleet, sessions: Sessions) -> None:
        if fleet.replicas != 1 or fleet.disaggregated:
            raise InvalidConfigError("sessions are served by one replica that prefills and decodes")
        # Sessions share whole blocks; the rest of the system prompt is part of each conversation.
        rest = sessions.shared_tokens % fleet.block_tokens
        turns = replace(sessions.turns, prompt_tokens=sessions.turns.prompt_tokens + rest)
        sessions = replace(sessions, turns=turns, shared_tokens=sessions.shared_tokens - rest)
        # A pool that cannot hold the system prompt serves no session: each one is refused at its first turn.
        pool_tokens = max(fleet.block_tokens, fleet.kv_pool_tokens - sessions.shared_tokens)
        self.sessions, self._pool_blocks = sessions, fleet.pool_blocks(fleet.kv_pool_tokens)
        self.simulation = simulation = Simulation(replace(fleet, kv_pool_tokens=pool_tokens), sessions.turns, clients=0)
        simulation.share_times()
        self.state, self._loop = simulation.state, simulation.loop
        simulation.add_sessions(sessions)

    def play(self, max_sessions: int, end_s: float) -> None:
        """Run until ``end_s``, or until all sessions are over, with at most this many sessions in flight."""
        self._loop.play(max_sessions, 1e3 * end_s)
        self.simulation.check()

    def running(self) -> int:
        """Number of decoding requests."""
        return int(self.simulation.arrays["n"][0])

    def kv_usage(self) -> float:
        """Share of the KV pool that running requests and the shared prompt hold."""
        free_blocks = int(self.simulation.arrays["pool_blocks"][0]) - self._loop.held_blocks(0)
        return 1.0 - free_blocks / self._pool_blocks

    @property
    def over(self) -> bool:
        """Whether all sessions are finished or refused."""
        return bool(self.state.n_over + self.state.n_refused_sessions == len(self.sessions))


def _column(name: str) -> Any:
    """Property: an array of the simulation, one entry per request."""
    return property(lambda simulation: simulation.arrays[name])


def _of_replica(name: str) -> Any:
    """Property: a number of a replica."""
    return property(lambda replica: int(replica.simulation.arrays[name][replica.index]))


class Replica:
    """Current state of one replica."""

    def __init__(self, simulation: Simulation, index: int) -> None:
        self.simulation, self.index = simulation, index

    pool_blocks = _of_replica("pool_blocks")
    n = _of_replica("n")  # decoding sequences
    down, draining, leaving, gone = map(_of_replica, ("down", "draining", "leaving", "gone"))

    @property
    def model(self) -> OperatorModel:
        """The operator model of its precision."""
        return self.simulation.models[self.simulation.arrays["model"][self.index]]

    @property
    def disaggregated(self) -> bool:
        """Whether it has a separate prefill GPU."""
        return bool(self.simulation.arrays["disaggregated"][self.index])

    @property
    def loading(self) -> bool:
        """Whether it is new and not yet in service."""
        return bool(self.simulation.arrays["loading_since_ms"][self.index] >= 0.0)

    @property
    def request(self) -> IntArray:
        """Request of each decoding sequence, oldest first, (n,)."""
        return self.simulation.arrays["seq_request"][self.index, : self.n]

    @property
    def tokens(self) -> IntArray:
        """Prompt and output tokens so far of each decoding sequence, (n,)."""
        return self.simulation.arrays["seq_tokens"][self.index, : self.n]

    @property
    def preempted(self) -> list[int]:
        """Requests that lost their KV cache and will be recomputed, in order."""
        return self.simulation.line(self.index, PREEMPTED)

    def in_flight(self) -> int:
        """Requests that hold a slot."""
        return self.n + self._waiting_in(PREFILLING, TRANSIT)

    def load(self) -> int:
        """Requests that the replica is responsible for: in flight, preempted, or assigned to start next."""
        return self.in_flight() + self._waiting_in(PREEMPTED, ASSIGNED)

    def _waiting_in(self, *kinds: int) -> int:
        counts, first = self.simulation.arrays["line_count"], self.simulation.first_line(self.index)
        return sum(int(counts[first + kind]) for kind in kinds)


class Simulation:
    """One run: the clock, the queue, the replicas and the record of every request.

    ``first_ms``, ``finish_ms`` and the like are (n,) by request, in ms from the start; NaN for events that have not
    happened. ``seed`` determines which drafts are accepted and which replicas the router *random* picks. With
    ``clients`` the requests form a closed loop.
    """

    arrival_ms, start_ms, first_ms, finish_ms = map(_column, ("arrival_ms", "start_ms", "first_ms", "finish_ms"))
    output_delay_ms, preemptions = map(_column, ("output_delay_ms", "preemptions"))

    def __init__(self, fleet: Fleet, requests: Requests, seed: int = 0, clients: int | None = None) -> None:
        classes = 1 if requests.priority is None else int(max(requests.priority, default=0)) + 1
        self.models: list[OperatorModel] = []
        self._sizes = {"C": classes, "L": classes, "T": LOOKED_UP_ROWS + 1, "X": _CONTEXTS, "B": 1, "P": 1}
        self._sizes |= dict.fromkeys("NRSEDMGAUVW", 0) | {"H": len(GAP_MS)}
        self.arrays = allocated(self._sizes)
        # Without cycles, the arrays of a run are freed with it and need not wait for the garbage collector.
        self._weak: Any = weakref.proxy(self)
        self.state: Any = Run(self._weak, self.arrays)  # its attributes are those of arrays.RUN
        self.replicas: list[Replica] = []
        self.kv_pool_tokens = {fleet.model.tier: fleet.kv_pool_tokens}
        state = self.state
        state.n_classes = classes
        state.chunked = int(fleet.model.profile.scheduler == "chunked")
        state.router = ROUTERS.index(fleet.router)
        state.reserve = int(fleet.model.profile.reserve_output)
        first, second = np.random.SeedSequence(seed).generate_state(2, np.uint64)
        state.random_a, state.random_b = 1 + int(first) % (RANDOM_A - 1), 1 + int(second) % (RANDOM_B - 1)
        self._lots = np.random.default_rng(np.random.SeedSequence(seed).spawn(1)[0])
        self.loop = Loop(state)
        self._use(fleet)
        self.loop.begin(fleet.replicas)
        self._list_replicas()
        self._submit(requests, len(requests.arrival_s) if clients is None else min(clients, len(requests.arrival_s)))

    def submit(self, requests: Requests) -> None:
        """Add requests at any time of the run; their classes must be those of the first ones. They arrive when due."""
        self._submit(requests, len(requests.arrival_s))

    def add_sessions(self, sessions: Sessions) -> None:
        """Declare the requests to be turns of these sessions."""
        state, n = self.state, len(sessions)
        self._resize(G=n, A=self._sizes["N"], E=max(self._sizes["E"], 4 * n + 64))
        arrays = self.arrays
        arrays["session"][:] = sessions.session()
        arrays["tool_ms"][:] = 1e3 * sessions.tool_s
        arrays["turn"][:], arrays["turns_end"][:] = sessions.first_turn[:-1], sessions.first_turn[1:]
        arrays["wanted_ms"][sessions.first_turn[:-1]] = arrays["due_ms"][sessions.first_turn[:-1]]
        arrays["gated"][:] = sessions.gated
        state.n_sessions, state.shared_tokens = n, sessions.shared_tokens
        state.next_request = state.last_request  # sessions send their turns
        self.loop.begin_sessions()

    def share_times(self) -> None:
        """Share cached operator times among all runs of this model and batch size."""
        shared = _looked_up(self.fleet.model, self._sizes["B"])
        for name in LOOKED_UP:
            self.arrays[name] = shared.setdefault(name, self.arrays[name])
            setattr(self.state, name, self.arrays[name])

    @property
    def rejected(self) -> NDArray[np.bool_]:
        """Whether each request was refused, (n,)."""
        return self.arrays["rejected"] > 0

    def run(self) -> Outcome:
        """Process events until none is left."""
        self._advance(math.inf)
        return self.outcome()

    def outcome(self) -> Outcome:
        """Outcome of the run so far; times of events that have not happened are NaN."""
        return Outcome(
            arrival_s=self.arrival_ms / 1e3,
            first_token_s=self.first_ms / 1e3,
            finish_s=self.finish_ms / 1e3,
            output_tokens=self.arrays["goal"] - self.arrays["prompt"],
            rejected=self.rejected,
            preemptions=self.preemptions,
            iterations=self.state.iterations,
            busy_ms=self.state.busy_ms,
            peak_kv_tokens=self.state.peak_tokens,
            ttft_offset_ms=self.state.client_ms,
            output_delay_ms=self.output_delay_ms,
        )

    def run_until(self, end_ms: float) -> None:
        """Process the events before ``end_ms``, which becomes the current time."""
        self._advance(end_ms)
        self.loop.pass_time(end_ms)

    def reconfigure(self, fleet: Fleet, kv_pool_tokens: Mapping[str, int]) -> None:
        """From now on serve with another configuration; ``kv_pool_tokens`` by precision, for replicas not yet switched.

        The engine profile's scheduler and the queue's rules stay the same.
        """
        if (fleet, kv_pool_tokens) == (self.fleet, self.kv_pool_tokens):
            return
        size = [(each.replicas, each.model, each.disaggregated, each.prefill_replicas) for each in (fleet, self.fleet)]
        if size[0] != size[1] and (fleet.prefill_replicas or self.fleet.prefill_replicas):
            raise InvalidConfigError("a fleet whose replicas share prefill GPUs keeps its size and precision")
        self.kv_pool_tokens = dict(kv_pool_tokens)
        self._use(fleet)
        for replica in self.replicas:
            self.arrays["pool_blocks"][replica.index] = fleet.pool_blocks(kv_pool_tokens[replica.model.tier])
        self.loop.reconfigure(fleet.replicas)
        self._list_replicas()

    def kv_occupancy(self) -> float:
        """Used share of the KV pools of all replicas in service."""
        block_tokens = self.fleet.block_tokens
        held = sum(
            block_tokens * self.loop.held_blocks(each.index)
            if self.fleet.occupancy_in_blocks
            else self.loop.cached_tokens(each.index)
            for each in self.replicas
        )
        return min(1.0, held / max(block_tokens * sum(each.pool_blocks for each in self.replicas if not each.down), 1))

    def running(self) -> int:
        """Number of requests that hold a slot of any replica."""
        return int(self.loop.running())

    def first_line(self, replica: int) -> int:
        """Number of the first line of a replica."""
        return int(self.state.n_classes) + LINES_OF_REPLICA * replica

    def line(self, replica: int, kind: int) -> list[int]:
        """Requests in a line of a replica, in order."""
        found, after = [], self.arrays["after"]
        request = self.arrays["line_first"][self.first_line(replica) + kind]
        while request >= 0:
            found.append(int(request))
            request = after[request]
        return found

    # Called by the loop -------------------------------------------------------------------------------------------

    def add_events(self) -> None:
        """Make room for more events."""
        self._resize(E=2 * self._sizes["E"])

    def add_attention(self, m: int, n_decode: int) -> None:
        """Compute and cache a model's decode attention for a number of sequences."""
        row = self.models[m].known_attention_row(n_decode)
        self.arrays["n_contexts"][m] = len(row)
        # The first cell last: it says that the row is complete, to runs on other threads too.
        self.arrays["attention_ms"][m, n_decode, 1 : len(row)] = row[1:]
        self.arrays["attention_ms"][m, n_decode, 0] = row[0]

    def prefill_attention_ms(self, m: int, r: int, n_chunks: int) -> float:
        """Prefill attention of the chunks that a replica is about to run."""
        requests = self.arrays["chunk_request"][r, :n_chunks].tolist()
        tokens = self.arrays["chunk_tokens"][r, :n_chunks].tolist()
        done = (self.arrays["done"][requests] + self.state.shared_tokens).tolist()
        return self.models[m].prefill_attention_ms([Chunk(*each) for each in zip(tokens, done, strict=True)])

    # -----------------------------------------------------------------------------------------------------------------

    def _advance(self, end_ms: float) -> None:
        self.loop.advance(end_ms)
        self.check()

    def check(self) -> None:
        """Raise ArithmeticError if a model gave no time (NaN) for the current iteration."""
        if self.state.n_events and math.isnan(self.state.event_ms[0]):
            raise ArithmeticError(f"{self.models} gave no time for an iteration at {self.state.now_ms} ms")

    def _submit(self, requests: Requests, n_scheduled: int) -> None:
        first, n = self._sizes["N"], self._sizes["N"] + len(requests.arrival_s)
        self._resize(N=n, E=max(self._sizes["E"], 64), S=self._slots(n))
        arrays, new = self.arrays, slice(first, n)
        arrays["due_ms"][new] = np.asarray(requests.arrival_s, float) * 1e3
        arrays["prompt"][new] = arrays["length"][new] = requests.prompt_tokens
        arrays["goal"][new] = arrays["prompt"][new] + np.asarray(requests.output_tokens)
        if requests.priority is not None:
            arrays["priority"][new] = requests.priority
        if requests.reused_tokens is not None:
            arrays["reused"][new] = requests.reused_tokens
        if requests.follows is not None:
            arrays["follows"][new] = np.where(requests.follows >= 0, first + requests.follows, -1)
        if self.fleet.router == "random":
            arrays["lot"][new] = self._lots.random(n - first)
        if requests.acceptance is not None:
            arrays["acceptance"][new] = requests.acceptance
        self.state.next_request, self.state.last_request = first + n_scheduled, n
        if n_scheduled:
            due_order = first + np.argsort(arrays["due_ms"][first : first + n_scheduled], kind="stable")
            arrays["after"][due_order[:-1]] = due_order[1:]
            self.loop.submit(int(due_order[0]), n_scheduled)

    def _use(self, fleet: Fleet) -> None:
        self.fleet, state = fleet, self.state
        state.fleet_model = self._model(fleet.model)
        replicas = len(self.replicas) + fleet.replicas
        self._resize(
            R=max(self._sizes["R"], replicas, fleet.prefill_replicas or 0),
            L=max(self._sizes["L"], state.n_classes + LINES_OF_REPLICA * replicas),
            S=self._slots(self._sizes["N"]),
            D=max(self._sizes["D"], fleet.draft_tokens),
        )
        state.fleet_disaggregated = int(fleet.disaggregated)
        state.prefill_replicas = fleet.prefill_replicas or 0
        state.fleet_pool_blocks = fleet.pool_blocks(fleet.kv_pool_tokens)
        state.batch_size, state.draft_tokens = fleet.batch_size, fleet.draft_tokens
        state.block_tokens, state.spare_tokens = fleet.block_tokens, fleet.spare_tokens
        bits = fleet.block_tokens.bit_length() - 1
        state.block_shift = bits if fleet.block_tokens == 1 << bits else -1
        state.context_tokens = -1 if fleet.context_tokens is None else fleet.context_tokens
        state.queue_limit = -1 if fleet.queue_limit is None else fleet.queue_limit
        state.vllm_refill, state.drain = int(fleet.vllm_refill), int(fleet.rolling_restart == "drain")
        state.restart_ms, state.load_ms, state.slowdown = fleet.restart_ms, fleet.start_ms, fleet.slowdown
        state.kv_bytes_per_token, state.link_bytes_per_ms = fleet.model.kv_bytes_per_token, fleet.link_gb_s * 1e6
        profile = fleet.model.profile
        state.async_scheduling = int(fleet.server and profile.async_scheduling)
        state.request_ms, state.token_ms = (profile.request_ms, profile.token_ms) if fleet.server else (0.0, 0.0)
        state.client_ms = max(0.0, profile.ttft_offset_ms - state.request_ms)
        if fleet.draft_tokens:
            chance = self.arrays["fleet_chance"]
            chance[:, : fleet.draft_tokens] = _conditional(fleet.acceptance[: fleet.draft_tokens])
            if len(fleet.acceptance_scale):
                scale = np.asarray(fleet.acceptance_scale, float)[: len(chance)]
                chance[:, 0] = np.minimum(chance[:, 0] * scale, 1.0)

    def _slots(self, n_requests: int) -> int:
        """Most slots that requests can ever take on a replica; more than the batch size if that has shrunk."""
        return max(self._sizes["S"], min(self.fleet.batch_size, n_requests))

    def _model(self, model: OperatorModel) -> int:
        """Index of an operator model; from now on its times are cached."""
        if model in self.models:
            return self.models.index(model)
        m = len(self.models)
        self.models.append(model)
        terms = model.loop_terms()
        self._resize(M=m + 1, P=max(self._sizes["P"], len(terms.alone_ms)))
        if terms.listed_ms is not None:
            self._resize(**dict(zip("UVW", terms.listed_ms.shape, strict=True)))
            self.arrays["listed_ms"][m] = terms.listed_ms
            for name, nodes in zip(("listed_tokens", "listed_prefixes", "listed_batches"), terms.listed, strict=True):
                self.arrays[name][:] = nodes
        for name, value in {
            "draft_layers": model.layers if terms.draft_head else 0,
            "draft_overhead_ms": model.draft_overhead_ms,
            "prefill_kind": ("asked", "curves", "pairs", "listed").index(terms.prefill),
            "prefill_scale": terms.scale,
            "prefill_floor_ms": terms.floor_ms,
            "step_overhead_ms": model.profile.step_overhead_ms,
            "sequence_overhead_ms": model.profile.sequence_overhead_ms,
            "token_budget": model.profile.max_batched_tokens,
            "output_delay": model.profile.output_delay,
        }.items():
            self.arrays[name][m] = value
        self.arrays["prefill_alone_ms"][m, : len(terms.alone_ms)] = terms.alone_ms
        self.arrays["prefill_batched_ms"][m, : len(terms.batched_ms)] = terms.batched_ms
        return m

    def _resize(self, **sizes: int) -> None:
        if sizes.items() <= self._sizes.items():
            return  # as in most changes of the configuration
        self._sizes |= sizes
        self._sizes["B"] = self._sizes["S"] + 1
        arrays = allocated(self._sizes, self.arrays)
        for name, array in arrays.items():
            if array is not self.arrays[name]:
                setattr(self.state, name, array)
        self.arrays = arrays

    def _list_replicas(self) -> None:
        self.replicas += [Replica(self._weak, i) for i in range(len(self.replicas), self.state.n_replicas)]


def _conditional(marginal: Sequence[float]) -> FloatArray:
    """P(position j is accepted | all before it are), from the non-increasing marginals."""
    p = np.asarray(marginal, float)
    return p / np.concatenate(([1.0], p[:-1]))[: len(p)] if len(p) else p
