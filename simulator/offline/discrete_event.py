"""Iteration-level discrete-event simulation of continuous batching: the reference for the fluid dynamics.

A fleet of identical replicas serves one queue. Every replica runs iterations of the operator model back to back: it
decodes its resident sequences and prefills prompts, fused (``chunked``) or in iterations of their own
(``prefill_first``), as its engine profile says. The KV cache is handed out in blocks; when it runs out, the sequence
of the lowest class that was admitted last is preempted and later recomputed. Nothing is averaged: every request has
its own arrival, first token and finish.

Rules of the queue: highest class first, first come first served within a class. A request goes to the replica with
the fewest requests among those that have a slot, cache for its prompt and prompt tokens to spare in their next
iteration, and starts there with it; it waits in the shared queue while there is none. Replicas start what they were
given in the same order. A replica with preempted requests starts nothing new of their class or a lower one before
they run again; a higher class may start. That is vLLM with ``--scheduling-policy priority``. A bounded queue counts
every request that has not started, and refuses the youngest of the lowest class.

With ``disaggregated`` every replica has a GPU of its own for prefill, which hands the cache over a link; its slots
and cache blocks are taken from the start of the prefill. The first token is delivered once the cache has arrived.

The configuration may change while requests are served (:meth:`Simulation.reconfigure`). Batch size, KV pool and drafts
are in force from each replica's next iteration on; a pool that shrinks below what it holds preempts. Precision and
prefill placement take a restart, one replica after the other. With ``rolling_restart="recompute"`` a replica restarts
at once, and other replicas recompute the requests that it had in flight before they start new ones; with ``"drain"``
it takes no more requests and restarts when it is empty.

The number of replicas may change as well. A new one loads for ``start_ms`` before it takes requests; one that is
removed takes no more and leaves when it is empty. First those go that still load, the youngest first, then those that
run an outdated configuration, then those with the least to do.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from inferencegym.errors import InvalidConfigError
from simulator.hardware.operators import Chunk, OperatorModel

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

RollingRestart = Literal["recompute", "drain"]
"""What a replica does before it restarts: hand its requests to others, which recompute them, or finish them."""

BLOCK_TOKENS = 16
LINK_GB_S = 25.0  # one 200 Gbit/s port between prefill and decode GPU
_ROOM = 64  # sequences that a replica's arrays hold at first
# Kinds of events, in the order in which simultaneous ones happen.
_ARRIVAL, _HANDED_OVER, _ITERATION_END, _PREFILL_END, _WAKE, _RESTARTED, _LOADED = range(7)


@dataclass(frozen=True, slots=True)
class Fleet:
    """Identical replicas behind one queue, and how each is configured.

    ``batch_size`` bounds the sequences of one replica, ``kv_pool_tokens`` its KV cache. ``acceptance[j]`` is the
    probability that draft position j + 1 is accepted (a marginal, as measured), for ``draft_tokens`` positions.
    ``acceptance_scale`` multiplies the first position's for each class; without it, all classes are as measured.
    ``queue_limit`` bounds the requests that have not started; ``None`` means no bound. ``restart_ms`` is the time that
    a replica is down when it restarts, ``start_ms`` the time that a new one loads, and ``slowdown`` multiplies every
    iteration. A block of the cache holds ``block_tokens``. ``spare_tokens`` of cache beyond what its next iteration
    writes are kept for each sequence: vLLM keeps none, which shows where blocks are large or the pool is small. With
    ``vllm_refill`` requests start in an iteration as in vLLM: none where one was preempted, else new ones too as soon
    as all preempted ones run again; without, whatever fits starts, and new ones wait for the iteration after. With
    ``occupancy_in_blocks`` the part of the cache in use counts whole blocks, as engines report it, instead of tokens.
    """

    model: OperatorModel
    batch_size: int
    kv_pool_tokens: int
    replicas: int = 1
    draft_tokens: int = 0
    acceptance: Sequence[float] = ()
    disaggregated: bool = False
    link_gb_s: float = LINK_GB_S
    queue_limit: int | None = None
    acceptance_scale: Sequence[float] = ()
    restart_ms: float = 0.0
    start_ms: float = 0.0
    slowdown: float = 1.0
    rolling_restart: RollingRestart = "recompute"
    block_tokens: int = BLOCK_TOKENS
    spare_tokens: int = 1
    vllm_refill: bool = False
    occupancy_in_blocks: bool = False

    def __post_init__(self) -> None:
        if min(self.batch_size, self.replicas) < 1:
            raise InvalidConfigError(f"batch_size={self.batch_size}, replicas={self.replicas}: both must be at least 1")
        if self.block_tokens < 1 or self.spare_tokens < 0:
            raise InvalidConfigError(
                f"block_tokens={self.block_tokens}, spare_tokens={self.spare_tokens}: at least 1 and 0", "block_tokens"
            )
        if self.kv_pool_tokens < self.block_tokens:
            raise InvalidConfigError(
                f"kv_pool_tokens={self.kv_pool_tokens} holds no block: give at least {self.block_tokens}",
                "kv_pool_tokens",
            )
        if len(self.acceptance) < self.draft_tokens:
            raise InvalidConfigError(
                f"draft_tokens={self.draft_tokens} needs as many acceptance probabilities, got {len(self.acceptance)}",
                "draft_tokens",
            )

    def blocks(self, tokens: int) -> int:
        """Blocks that hold so many tokens of one sequence."""
        return -(-tokens // self.block_tokens)

    def pool_blocks(self, kv_pool_tokens: int) -> int:
        """Whole blocks of a pool."""
        return kv_pool_tokens // self.block_tokens

    def handover_ms(self, tokens: int) -> float:
        """Time to hand the cache of ``tokens`` over the link, ms."""
        return tokens * self.model.kv_bytes_per_token / (self.link_gb_s * 1e6)


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests to serve, all ``(n,)``: arrival (s), prompt and output length (tokens), class (0 is served first).

    ``reused_tokens`` are the leading prompt tokens that an earlier request had in common.
    """

    arrival_s: FloatArray
    prompt_tokens: IntArray
    output_tokens: IntArray
    priority: IntArray | None = None
    reused_tokens: IntArray | None = None

    def __post_init__(self) -> None:
        n = len(self.arrival_s)
        if (
            not n
            == len(self.prompt_tokens)
            == len(self.output_tokens)
            == (n if self.priority is None else len(self.priority))
        ):
            raise InvalidConfigError(
                "arrival_s, prompt_tokens, output_tokens and priority must have one entry per request"
            )
        if n and (np.min(self.prompt_tokens) < 1 or np.min(self.output_tokens) < 1):
            raise InvalidConfigError("prompt_tokens and output_tokens must be at least 1")


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a run: every request in ``(n,)`` arrays in the order given, and totals of the fleet.

    Times are seconds from the start; NaN where a request was refused. ``rejected`` marks requests refused by a full
    queue or too long for the whole cache. ``busy_ms`` sums over GPUs; ``peak_kv_tokens`` is the fullest cache of any
    replica.
    """

    arrival_s: FloatArray
    first_token_s: FloatArray
    finish_s: FloatArray
    output_tokens: IntArray
    rejected: NDArray[np.bool_]
    preemptions: IntArray
    iterations: int
    busy_ms: float
    peak_kv_tokens: int
    ttft_offset_ms: float
    output_delay_ms: FloatArray | float = 0.0

    def ttft_ms(self) -> FloatArray:
        """Time to first token as a client sees it, the engine profile's offset and delay included, ms."""
        return (self.first_token_s - self.arrival_s) * 1e3 + self.ttft_offset_ms + self.output_delay_ms

    def tpot_ms(self) -> FloatArray:
        """Mean time per output token after the first, ms; NaN for a single token."""
        gaps = np.where(self.output_tokens > 1, self.output_tokens - 1, np.nan)
        return (self.finish_s - self.first_token_s) * 1e3 / gaps

    def makespan_s(self) -> float:
        """When the last request finished, s."""
        return float(np.nanmax(self.finish_s)) if np.isfinite(self.finish_s).any() else 0.0

    def tokens_per_s(self, start_s: float = 0.0, end_s: float | None = None) -> float:
        """Output tokens per second within a window; each request's tokens fall evenly from first to last."""
        end = self.makespan_s() if end_s is None else end_s
        served = np.isfinite(self.finish_s)
        first, last, tokens = self.first_token_s[served], self.finish_s[served], self.output_tokens[served]
        length = np.maximum(last - first, 1e-12)
        inside = np.clip(np.minimum(last, end) - np.maximum(first, start_s), 0.0, None) / length
        at_once = (last <= first) & (first >= start_s) & (first <= end)
        share = np.where(last > first, inside, at_once.astype(float))
        return float((share * tokens).sum() / (end - start_s))


def serve(fleet: Fleet, requests: Requests, seed: int = 0) -> Outcome:
    """Serve requests that arrive on their own schedule (open loop); ``seed`` draws which drafts are accepted."""
    return Simulation(fleet, requests, seed).run()


def serve_closed(
    fleet: Fleet, prompt_tokens: IntArray, output_tokens: IntArray, clients: int, seed: int = 0
) -> Outcome:
    """Serve ``clients`` that each send their next request when the last is answered (closed loop).

    Requests are handed out in order; the run ends when all are answered. The engine profile's TTFT offset is the way
    to the client and back, so a slot stays free that long between two requests of one client.
    """
    if clients < 1:
        raise InvalidConfigError(f"clients={clients}: a closed loop needs at least one")
    unscheduled = Requests(np.zeros(len(prompt_tokens)), np.asarray(prompt_tokens), np.asarray(output_tokens))
    return Simulation(fleet, unscheduled, seed, clients).run()


class _Prefill:
    """A request whose prompt (or whose recomputation) is under way on a replica."""

    __slots__ = ("blocks", "done", "need", "request")

    def __init__(self, request: int, need: int, blocks: int) -> None:
        self.request = request
        self.need = need
        self.done = 0
        self.blocks = blocks


class _Replica:
    """State of one replica. The first ``n`` entries of the arrays are its decoding sequences, oldest first."""

    def __init__(self, index: int, fleet: Fleet) -> None:
        self.index = index
        self.model = fleet.model
        self.disaggregated = fleet.disaggregated
        self.block_tokens = fleet.block_tokens
        self.pool_blocks = fleet.pool_blocks(fleet.kv_pool_tokens)
        self.down = False
        self.draining = False
        self.loading_since: float | None = None  # a new replica that still loads, and when it was asked for
        self.leaving = False  # removed: it serves what it has and goes
        self.gone = False
        self.starts = 0  # restarts so far: events of an earlier life are void
        self.clear()

    def clear(self) -> None:
        """Hold nothing, as after a start."""
        self.n = 0
        self.request: IntArray = np.zeros(_ROOM, np.int64)
        self.tokens: IntArray = np.zeros(_ROOM, np.int64)  # prompt plus generated
        self.goal: IntArray = np.zeros(_ROOM, np.int64)  # prompt plus output
        self.token_sum = 0
        self.steps_to_finish = 0  # iterations until some sequence may finish; exact without drafting
        self.reserved_blocks = 0  # blocks of its requests at their full length
        self.prefilling: list[_Prefill] = []
        self.in_transit: list[int] = []  # requests whose cache is on the link
        self.transit_blocks = 0
        self.transit_tokens = 0
        self.assigned: deque[int] = deque()  # will start with the next iteration
        self.preempted: deque[int] = deque()
        self.chunks: list[
            tuple[_Prefill, int]
        ] = []  # what the iteration under way prefills (disaggregated: on its own GPU)
        self.decoding = False
        self.draft_tokens = 0  # of the iteration under way, like the next two
        self.conditional: FloatArray = np.zeros((0, 0))
        self.iteration_ms = 0.0
        self.unsent: list[int] = []  # requests whose first token is sent during the next iteration
        self.idle = True
        self.prefill_idle = True

    def in_flight(self) -> int:
        """Requests that hold a slot."""
        return self.n + len(self.prefilling) + len(self.in_transit)

    def flight(self) -> list[int]:
        """Requests that it has started and not finished, the preempted ones included."""
        started = [*self.request[: self.n].tolist(), *self.in_transit, *(p.request for p in self.prefilling)]
        return [*started, *self.preempted]

    def cached_tokens(self) -> int:
        """Tokens in its KV cache."""
        return self.token_sum + sum(prefill.done for prefill in self.prefilling) + self.transit_tokens

    def held_tokens(self) -> int:
        """Tokens that the blocks in use would hold."""
        return self.block_tokens * (self.decode_blocks(0) + self.prefill_blocks())

    def load(self) -> int:
        """Requests the replica is responsible for: in flight, preempted, or assigned to start next."""
        return self.in_flight() + len(self.preempted) + len(self.assigned)

    def prefill_tokens(self) -> int:
        """Prompt tokens under way that remain for iterations after the present one."""
        return sum(p.need - p.done for p in self.prefilling) - sum(tokens for _, tokens in self.chunks)

    def prefill_blocks(self) -> int:
        """Blocks held for prompts under way or on the link."""
        return sum(p.blocks for p in self.prefilling) + self.transit_blocks

    def decode_blocks(self, growth: int) -> int:
        """Blocks that the decoding sequences need to each take ``growth`` more tokens."""
        return int(((self.tokens[: self.n] + (growth + self.block_tokens - 1)) // self.block_tokens).sum())

    def most_decode_blocks(self, growth: int) -> int:
        """Bound of :meth:`decode_blocks`, which spares the exact count while the cache is far from full."""
        return (self.token_sum + self.n * (growth + self.block_tokens)) // self.block_tokens + 1

    def append(self, request: int, tokens: int, goal: int) -> None:
        """Let a sequence join the decode batch."""
        i = self.n
        if i == len(self.request):
            self.request, self.tokens, self.goal = (
                np.concatenate([array, np.zeros_like(array)]) for array in (self.request, self.tokens, self.goal)
            )
        self.request[i], self.tokens[i], self.goal[i] = request, tokens, goal
        self.n += 1
        self.token_sum += tokens
        self.steps_to_finish = goal - tokens if i == 0 else min(self.steps_to_finish, goal - tokens)

    def keep(self, mask: NDArray[np.bool_]) -> None:
        """Drop the sequences outside ``mask`` from the decode batch, in order."""
        n, kept = self.n, int(mask.sum())
        for array in (self.request, self.tokens, self.goal):
            array[:kept] = array[:n][mask]
        self.n = kept
        self.token_sum = int(self.tokens[:kept].sum())
        self.steps_to_finish = int((self.goal[:kept] - self.tokens[:kept]).min()) if kept else 0


class Simulation:
    """One run: the clock, the queue, the replicas and the record of every request.

    ``first_ms``, ``finish_ms`` and the like are (n,) by request, in ms from the start; NaN where it has not happened.
    """

    def __init__(self, fleet: Fleet, requests: Requests, seed: int = 0, clients: int | None = None) -> None:
        self.chunked = fleet.model.profile.scheduler == "chunked"
        self.reserve = fleet.model.profile.reserve_output
        self.rng = np.random.default_rng(seed)

        n = len(requests.prompt_tokens)
        self.prompt = [int(x) for x in requests.prompt_tokens]
        self.goal = [int(p) + int(o) for p, o in zip(requests.prompt_tokens, requests.output_tokens, strict=True)]
        self.length = list(self.prompt)  # prompt plus tokens generated before a preemption
        self.priority = [0] * n if requests.priority is None else [int(x) for x in requests.priority]
        self.output_tokens = np.asarray(requests.output_tokens, np.int64)
        self.classes: IntArray = np.asarray(self.priority, np.int64)
        self.arrival_ms = np.full(n, np.nan)
        self.start_ms = np.full(n, np.nan)
        self.first_ms = np.full(n, np.nan)
        self.output_delay_ms = np.zeros(n)
        self.finish_ms = np.full(n, np.nan)
        self.rejected = np.zeros(n, bool)
        self.preemptions = np.zeros(n, np.int64)
        self.iterations, self.busy_ms, self.peak_tokens = 0, 0.0, 0
        self.written_tokens = self.drafted_tokens = self.accepted_tokens = 0
        self.decode_ms = 0.0  # time of iterations, summed over the sequences that they decoded
        self.decoded_tokens = self.prefilled_tokens = 0
        self.reused = [0] * n if requests.reused_tokens is None else [int(x) for x in requests.reused_tokens]
        self.prefix_hit = 0.0  # share of the reused tokens that the caches hold
        self.prefill_gpu_ms = 0.0  # time that replicas had a prefill GPU of their own
        self.replica_ms = 0.0  # time that replicas were there: loading, serving or leaving

        self.queue: list[deque[int]] = [deque() for _ in range(max(self.priority, default=0) + 1)]
        self.waiting = 0
        self.replicas = [_Replica(i, fleet) for i in range(fleet.replicas)]
        self.now = 0.0
        self.kv_pool_tokens = {fleet.model.tier: fleet.kv_pool_tokens}
        self._use(fleet)
        first = n if clients is None else min(clients, n)
        self.next_client_request = first
        self.events = [(float(requests.arrival_s[i]) * 1e3, _ARRIVAL, i, i, 0, 0) for i in range(first)]
        heapq.heapify(self.events)
        self.sequence = n

    def run(self) -> Outcome:
        """Process events until none is left."""
        while self.events:
            self._process()
        return Outcome(
            arrival_s=self.arrival_ms / 1e3,
            first_token_s=self.first_ms / 1e3,
            finish_s=self.finish_ms / 1e3,
            output_tokens=self.output_tokens,
            rejected=self.rejected,
            preemptions=self.preemptions,
            iterations=self.iterations,
            busy_ms=self.busy_ms,
            peak_kv_tokens=self.peak_tokens,
            ttft_offset_ms=self.fleet.model.profile.ttft_offset_ms,
            output_delay_ms=self.output_delay_ms,
        )

    def run_until(self, end_ms: float) -> None:
        """Process the events before ``end_ms``, which becomes the present time."""
        while self.events and self.events[0][0] < end_ms:
            self._process()
        self._count_gpus(end_ms)
        self.now = end_ms

    def kv_occupancy(self) -> float:
        """Share of the KV pools of all replicas in service that is in use."""
        held = _Replica.held_tokens if self.fleet.occupancy_in_blocks else _Replica.cached_tokens
        pool_tokens = self.fleet.block_tokens * sum(each.pool_blocks for each in self.replicas if not each.down)
        return min(1.0, sum(map(held, self.replicas)) / max(pool_tokens, 1))

    def _process(self) -> None:
        now, kind, _, subject, index, starts = heapq.heappop(self.events)
        self._count_gpus(now)
        self.now = now
        replica = self.replicas[index]
        if kind == _ARRIVAL:
            self._arrive(subject)
        elif starts != replica.starts:
            return
        elif kind == _ITERATION_END:
            self._end_iteration(replica)
        elif kind == _PREFILL_END:
            self._end_prefill(replica)
        elif kind == _HANDED_OVER:
            self._hand_over(replica, subject)
        elif kind == _RESTARTED:
            self._come_up(replica)
        elif kind == _LOADED:
            self._join_if_loaded(replica)
        else:
            self._wake(replica)

    def _schedule(self, delay_ms: float, kind: int, subject: int, replica: _Replica) -> None:
        self.sequence += 1
        event = (self.now + delay_ms, kind, self.sequence, subject, replica.index, replica.starts)
        heapq.heappush(self.events, event)

    # Configuration ---------------------------------------------------------------------------------------------------

    def reconfigure(self, fleet: Fleet, kv_pool_tokens: Mapping[str, int]) -> None:
        """Serve with another configuration from now on; ``kv_pool_tokens`` by precision, for replicas not yet there.

        The engine profile's scheduler and the policies stay.
        """
        if (fleet, kv_pool_tokens) == (self.fleet, self.kv_pool_tokens):
            return
        self.kv_pool_tokens = dict(kv_pool_tokens)
        self._use(fleet)
        for replica in self.replicas:
            replica.pool_blocks = fleet.pool_blocks(kv_pool_tokens[replica.model.tier])
        self._scale(fleet.replicas)
        self._roll_out()
        self._dispatch()
        for replica in self.replicas:
            self._rouse(replica)

    def _use(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.growth = fleet.draft_tokens + 1
        self.ahead = fleet.draft_tokens + fleet.spare_tokens  # slots that a sequence needs beyond the tokens it has
        conditional = _conditional(fleet.acceptance[: fleet.draft_tokens])
        self.conditional = np.tile(conditional, (len(self.queue), 1))
        if fleet.draft_tokens and len(fleet.acceptance_scale):
            scaled = self.conditional[:, 0] * np.asarray(fleet.acceptance_scale, float)[: len(self.queue)]
            self.conditional[:, 0] = np.minimum(scaled, 1.0)

    def _scale(self, replicas: int) -> None:
        """Ask for new replicas, or remove some."""
        for replica in self.replicas:
            if replica.loading_since is not None:  # another precision loads for another time
                self._schedule_join(replica)
        there = [replica for replica in self.replicas if not (replica.leaving or replica.gone)]
        for _ in range(replicas - len(there)):
            new = _Replica(len(self.replicas), self.fleet)
            new.down, new.loading_since = True, self.now
            self.replicas.append(new)
            self._schedule_join(new)
        wanted = (self.fleet.model, self.fleet.disaggregated)
        removed_first = sorted(
            there,
            key=lambda each: (
                each.loading_since is None,
                -(each.loading_since or 0.0),
                (each.model, each.disaggregated) == wanted,
                each.down,
                each.load(),
            ),
        )
        for replica in removed_first[: max(0, len(there) - replicas)]:
            self._remove(replica)

    def _remove(self, replica: _Replica) -> None:
        self._give_back(replica)
        replica.leaving = True
        if not replica.load():
            self._leave(replica)

    def _leave(self, replica: _Replica) -> None:
        replica.gone, replica.down, replica.loading_since = True, True, None
        replica.starts += 1
        replica.clear()

    def _schedule_join(self, replica: _Replica) -> None:
        assert replica.loading_since is not None
        due = replica.loading_since + self.fleet.start_ms
        self._schedule(max(0.0, due - self.now), _LOADED, 0, replica)

    def _join_if_loaded(self, replica: _Replica) -> None:
        """Put a new replica into service, with the configuration in force, if its weights are there."""
        since = replica.loading_since
        if since is None or self.now < since + self.fleet.start_ms - 1e-6:
            return
        replica.loading_since = None
        replica.model, replica.disaggregated = self.fleet.model, self.fleet.disaggregated
        replica.pool_blocks = self.fleet.pool_blocks(self.fleet.kv_pool_tokens)
        replica.down = False
        self._dispatch()
        self._rouse(replica)

    def _roll_out(self) -> None:
        """Let the next replica that runs another precision or prefill placement restart, if none is doing so."""
        serving = [each for each in self.replicas if each.loading_since is None and not (each.leaving or each.gone)]
        if any(replica.down for replica in serving):
            return
        wanted = (self.fleet.model, self.fleet.disaggregated)
        for replica in serving:
            replica.draining = False
        outdated = next((each for each in serving if (each.model, each.disaggregated) != wanted), None)
        if outdated is None:
            return
        self._give_back(outdated)
        outdated.draining = self.fleet.rolling_restart == "drain" and outdated.load() > 0
        if not outdated.draining:
            self._restart(outdated)

    def _give_back(self, replica: _Replica) -> None:
        """Put what a replica has been assigned and not started back into the shared queue."""
        self._requeue(replica.assigned)
        for request in replica.assigned:
            replica.reserved_blocks -= self.fleet.blocks(self.goal[request] + self.growth)
        replica.assigned.clear()

    def _requeue(self, requests: Sequence[int]) -> None:
        """Put requests, first come first, before all others of their class in the shared queue."""
        for request in reversed(requests):
            self.queue[self.priority[request]].appendleft(request)
        self.waiting += len(requests)

    def _restart(self, replica: _Replica) -> None:
        """Stop a replica that has no request assigned; what it has in flight goes to the others."""
        for request, tokens in zip(replica.request[: replica.n], replica.tokens[: replica.n], strict=True):
            self.length[int(request)] = int(tokens)
        flight = sorted(replica.flight(), key=self._order)
        replica.clear()
        replica.starts += 1
        replica.model, replica.disaggregated = self.fleet.model, self.fleet.disaggregated
        replica.pool_blocks = self.fleet.pool_blocks(self.fleet.kv_pool_tokens)
        replica.down = True
        others = [other for other in self.replicas if not (other.down or other.leaving)]
        if others:
            for request in flight:
                self._put_back(min(others, key=_Replica.load), request)
        else:
            self._requeue(flight)
        for other in others:
            self._rouse(other)
        self._schedule(self.fleet.restart_ms, _RESTARTED, 0, replica)

    def _put_back(self, replica: _Replica, request: int) -> None:
        """Let a replica recompute a request that another one had in flight."""
        replica.preempted = self._by_class([*replica.preempted, request])
        replica.reserved_blocks += self.fleet.blocks(self.goal[request] + self.growth)

    def _by_class(self, requests: Sequence[int]) -> deque[int]:
        """A line of these requests, highest class first; within a class their order stays."""
        return deque(sorted(requests, key=self.priority.__getitem__))

    def _order(self, request: int) -> tuple[int, float]:
        """Highest class first, then first come first served."""
        return self.priority[request], float(self.arrival_ms[request])

    def _come_up(self, replica: _Replica) -> None:
        replica.down = False
        self._roll_out()
        self._dispatch()
        self._rouse(replica)

    def _rouse(self, replica: _Replica) -> None:
        """Let a replica that does nothing look for work."""
        if not replica.down and (replica.idle or (replica.disaggregated and replica.prefill_idle)):
            self._schedule(0.0, _WAKE, 0, replica)

    def _count_gpus(self, until_ms: float) -> None:
        there = [replica for replica in self.replicas if not replica.gone]
        self.prefill_gpu_ms += (until_ms - self.now) * sum(replica.disaggregated for replica in there)
        self.replica_ms += (until_ms - self.now) * len(there)

    # The shared queue ------------------------------------------------------------------------------------------------

    def _arrive(self, request: int) -> None:
        self.arrival_ms[request] = self.now
        if self.fleet.blocks(self.goal[request] + self.growth) > max(replica.pool_blocks for replica in self.replicas):
            self._refuse(request)
            return
        self.queue[self.priority[request]].append(request)
        self.waiting += 1
        self._dispatch()
        if self.fleet.queue_limit is not None:
            not_started = self.waiting + sum(len(replica.assigned) for replica in self.replicas)
            if not_started > self.fleet.queue_limit:
                self._refuse_youngest()

    def _dispatch(self) -> None:
        """Assign waiting requests to replicas that have room for them, least loaded first."""
        while self.waiting:
            line = next(line for line in self.queue if line)
            request = line[0]
            by_load = sorted(self.replicas, key=_Replica.load)
            replica = next((replica for replica in by_load if self._has_room(replica, request)), None)
            if replica is None:
                return
            line.popleft()
            self.waiting -= 1
            self._assign(replica, request)
            replica.reserved_blocks += self.fleet.blocks(self.goal[request] + self.growth)
            self._rouse(replica)

    def _has_room(self, replica: _Replica, request: int) -> bool:
        if replica.down or replica.draining or replica.leaving:
            return False
        if replica.preempted and not self._precedes(request, replica.preempted[0]):
            return False
        # What is assigned or preempted of lower classes starts after this request and takes no room from it.
        own = self.priority[request]
        ahead = [other for other in replica.assigned if self.priority[other] <= own]
        if replica.in_flight() + len(ahead) >= self.fleet.batch_size:
            return False
        # What the next iteration cannot take stays in the shared queue: any replica may get to it first.
        promised_tokens = replica.prefill_tokens() + sum(self.length[other] for other in ahead)
        if promised_tokens >= replica.model.profile.max_batched_tokens:
            return False
        if self.reserve:
            return replica.reserved_blocks + self.fleet.blocks(self.goal[request] + self.growth) <= replica.pool_blocks
        return self._fits(replica, request, sum(map(self._prompt_blocks, ahead)))

    def _precedes(self, request: int, preempted: int) -> bool:
        """Whether a request that has not run may start before a preempted one runs again."""
        return self.priority[request] < self.priority[preempted]

    def _assign(self, replica: _Replica, request: int) -> None:
        """Put a request in a replica's line, behind those of its own and of higher classes."""
        place = len(replica.assigned)
        while place > 0 and self.priority[replica.assigned[place - 1]] > self.priority[request]:
            place -= 1
        replica.assigned.insert(place, request)

    def _refuse_youngest(self) -> None:
        """Refuse the youngest request of the lowest class among all that have not started."""
        lines = [line for line in self.queue if line] + [r.assigned for r in self.replicas if r.assigned]
        # What a restart put back into the queue has started and is never refused; it is at the front.
        lines = [line for line in lines if np.isnan(self.start_ms[line[-1]])]
        if not lines:
            return
        line = max(lines, key=lambda line: (self.priority[line[-1]], self.arrival_ms[line[-1]]))
        request = line.pop()
        holder = next((r for r in self.replicas if r.assigned is line), None)
        if holder is None:
            self.waiting -= 1
        else:
            holder.reserved_blocks -= self.fleet.blocks(self.goal[request] + self.growth)
        self._refuse(request)

    def _refuse(self, request: int) -> None:
        self.rejected[request] = True
        self._send_next()

    def _send_next(self) -> None:
        """Closed loop: the client that was just answered sends its next request."""
        if self.next_client_request < len(self.prompt):
            request = self.next_client_request
            self.next_client_request += 1
            self._schedule(self.fleet.model.profile.ttft_offset_ms, _ARRIVAL, request, self.replicas[0])

    def _head(self, replica: _Replica) -> int | None:
        """The request that this replica should start next, if it may."""
        line = self._line(replica)
        if not line or replica.in_flight() >= self.fleet.batch_size:
            return None
        # What the pool cannot hold beside others it holds alone: a pool may have shrunk since the request started.
        return line[0] if self.reserve or not replica.in_flight() or self._fits(replica, line[0]) else None

    def _line(self, replica: _Replica) -> deque[int]:
        """The line that holds the replica's next request: its preempted ones come first, but for higher classes."""
        if replica.preempted and replica.assigned and self._precedes(replica.assigned[0], replica.preempted[0]):
            return replica.assigned
        return replica.preempted or replica.assigned

    def _prompt_blocks(self, request: int) -> int:
        """Blocks that a request needs to start, or to be recomputed."""
        return self.fleet.blocks(self.length[request] + self.fleet.spare_tokens)

    def _fits(self, replica: _Replica, request: int, promised_blocks: int = 0) -> bool:
        """Whether the cache has blocks for this prompt beside what is resident and promised."""
        need = self._prompt_blocks(request) + replica.prefill_blocks() + promised_blocks
        pool_blocks, bound = replica.pool_blocks, replica.most_decode_blocks(self.ahead)
        return need + bound <= pool_blocks or need + replica.decode_blocks(self.ahead) <= pool_blocks

    def _start_prefill(self, replica: _Replica) -> _Prefill:
        request = self._line(replica).popleft()
        prefill = _Prefill(request, self.length[request], self._prompt_blocks(request))
        if np.isnan(self.start_ms[request]):
            self.start_ms[request] = self.now
            prefill.done = min(int(self.prefix_hit * self.reused[request]), prefill.need - 1)
        replica.prefilling.append(prefill)
        return prefill

    # Iterations ------------------------------------------------------------------------------------------------------

    def _wake(self, replica: _Replica) -> None:
        self._dispatch()  # an answer of one token frees a slot without an iteration
        if replica.disaggregated and replica.prefill_idle:
            self._begin_prefill(replica)
        if replica.idle:
            self._begin_iteration(replica)

    def _begin_iteration(self, replica: _Replica) -> None:
        preempted = self._make_room(replica)
        chunks: list[tuple[_Prefill, int]] = []
        if not replica.disaggregated:
            chunks = replica.chunks = self._take_chunks(replica, starting=not (preempted and self.fleet.vllm_refill))
        replica.decoding = replica.n > 0 and (self.chunked or not chunks)
        replica.idle = not (chunks or replica.decoding)
        if replica.idle:
            if replica.leaving and not replica.load():
                self._leave(replica)
            elif replica.draining and not replica.load():
                self._roll_out()
            return
        n = replica.n if replica.decoding else 0
        replica.draft_tokens, replica.conditional = self.fleet.draft_tokens, self.conditional
        replica.iteration_ms = self._step_ms(replica, n, replica.token_sum / n if n else 0.0, chunks)
        self.output_delay_ms[replica.unsent] = replica.model.profile.output_delay * replica.iteration_ms
        replica.unsent.clear()
        self._schedule(replica.iteration_ms, _ITERATION_END, 0, replica)

    def _step_ms(self, replica: _Replica, n_decode: int, context: float, taken: list[tuple[_Prefill, int]]) -> float:
        chunks = [Chunk(tokens, prefill.done) for prefill, tokens in taken]
        n_first = sum(prefill.done + tokens == prefill.need for prefill, tokens in taken)
        duration = replica.model.step_ms(n_decode, context, chunks, self.fleet.draft_tokens, n_first)
        duration *= self.fleet.slowdown
        self.iterations += 1
        self.busy_ms += duration
        return duration

    def _make_room(self, replica: _Replica) -> bool:
        """Preempt sequences until the rest can take their next tokens; they will be recomputed. Says if any was."""
        some = False
        if self.reserve:
            return some
        if replica.most_decode_blocks(self.ahead) + replica.prefill_blocks() <= replica.pool_blocks:
            return some
        while replica.n + len(replica.prefilling) > 1 and (
            replica.decode_blocks(self.ahead) + replica.prefill_blocks() > replica.pool_blocks
        ):
            victim = self._preempt(replica)
            if victim is None:
                return some
            some = True
            self.preemptions[victim] += 1
            replica.preempted = self._by_class([victim, *replica.preempted])
        return some

    def _preempt(self, replica: _Replica) -> int | None:
        """Take the cache of one request away and return it: of the lowest class the one admitted last."""
        # A disaggregated prefill under way belongs to another GPU and cannot be taken back.
        prefills = [] if replica.disaggregated else replica.prefilling
        running = replica.request[: replica.n]
        lowest = max((self.priority[p.request] for p in prefills), default=-1)
        if replica.n:
            lowest = max(lowest, int(self.classes[running].max()))
        for i in range(len(prefills) - 1, -1, -1):
            if self.priority[prefills[i].request] == lowest:
                return prefills.pop(i).request
        if not replica.n:
            return None
        last = int(np.flatnonzero(self.classes[running] == lowest)[-1])
        victim = int(running[last])
        self.length[victim] = int(replica.tokens[last])
        mask = np.ones(replica.n, bool)
        mask[last] = False
        replica.keep(mask)
        return victim

    def _take_chunks(self, replica: _Replica, starting: bool = True) -> list[tuple[_Prefill, int]]:
        """Prompt tokens for the next iteration: prompts under way first, then new requests, up to the token budget."""
        budget = replica.model.chunk_budget(
            replica.n * self.growth if self.chunked and not replica.disaggregated else 0
        )
        whole = not self.chunked
        taken: list[tuple[_Prefill, int]] = []
        for prefill in replica.prefilling:
            tokens = min(budget, prefill.need - prefill.done)
            if tokens <= 0:
                return taken
            taken.append((prefill, tokens))
            budget -= tokens
        while budget > 0 and starting:
            if self.fleet.vllm_refill:
                self._dispatch()
            request = self._head(replica)
            # Whole prompts only: one longer than the budget goes alone.
            if request is None or (whole and taken and self.length[request] > budget):
                break
            prefill = self._start_prefill(replica)
            left = prefill.need - prefill.done
            tokens = left if whole else min(budget, left)
            taken.append((prefill, tokens))
            budget -= tokens
        return taken

    def _end_iteration(self, replica: _Replica) -> None:
        if replica.decoding:
            self._advance(replica)
        self._note_peak(replica)
        if not replica.disaggregated:
            for prefill in self._complete(replica, replica.chunks):
                self._first_token(replica, prefill.request, prefill.need)
            replica.chunks = []
        self._dispatch()
        if replica.disaggregated and replica.prefill_idle:
            self._begin_prefill(replica)  # slots or cache may have become free
        self._begin_iteration(replica)

    def _advance(self, replica: _Replica) -> None:
        """Give every decoding sequence its tokens and let the finished ones go."""
        n, drafts = replica.n, replica.draft_tokens
        tokens, before = replica.tokens[:n], replica.token_sum
        self.decode_ms += replica.iteration_ms * n
        if drafts == 0:
            tokens += 1
            replica.token_sum += n
            self.written_tokens += n
            self.decoded_tokens += n
            replica.steps_to_finish -= 1
            if replica.steps_to_finish > 0:
                return
        else:
            chance = replica.conditional[self.classes[replica.request[:n]]]
            accepted = np.cumprod(self.rng.random((n, drafts)) < chance, axis=1).sum(axis=1)
            self.drafted_tokens += n * drafts
            self.accepted_tokens += int(accepted.sum())
            self.decoded_tokens += n + int(accepted.sum())
            np.minimum(tokens + 1 + accepted, replica.goal[:n], out=tokens)
            replica.token_sum = int(tokens.sum())
            self.written_tokens += replica.token_sum - before
            replica.steps_to_finish = int((replica.goal[:n] - tokens).min())
        done = tokens >= replica.goal[:n]
        if not done.any():
            return
        finished = replica.request[:n][done]
        replica.keep(~done)
        for request in finished:
            self._finish(replica, int(request))

    def _complete(self, replica: _Replica, taken: list[tuple[_Prefill, int]]) -> list[_Prefill]:
        """Book prefilled tokens; return the prompts that are complete, in order."""
        for prefill, tokens in taken:
            prefill.done += tokens
            self.prefilled_tokens += tokens
        complete = [prefill for prefill, _ in taken if prefill.done == prefill.need]
        if complete:
            replica.prefilling = [prefill for prefill in replica.prefilling if prefill.done < prefill.need]
        return complete

    def _first_token(self, replica: _Replica, request: int, tokens: int) -> None:
        """A prompt (or a recomputation) is in the cache: it yields one token and joins the decode batch."""
        self.written_tokens += 1
        if np.isnan(self.first_ms[request]):
            self.first_ms[request] = self.now
            replica.unsent.append(request)
        if tokens + 1 >= self.goal[request]:
            self._finish(replica, request)
        else:
            replica.append(request, tokens + 1, self.goal[request])

    def _finish(self, replica: _Replica, request: int) -> None:
        self.finish_ms[request] = self.now
        replica.reserved_blocks -= self.fleet.blocks(self.goal[request] + self.growth)
        self._send_next()

    def _note_peak(self, replica: _Replica) -> None:
        self.peak_tokens = max(self.peak_tokens, replica.cached_tokens())

    # Disaggregated prefill -----------------------------------------------------------------------------------

    def _begin_prefill(self, replica: _Replica) -> None:
        replica.chunks = self._take_chunks(replica)
        replica.prefill_idle = not replica.chunks
        if replica.chunks:
            self._schedule(self._step_ms(replica, 0, 0.0, replica.chunks), _PREFILL_END, 0, replica)

    def _end_prefill(self, replica: _Replica) -> None:
        for prefill in self._complete(replica, replica.chunks):
            replica.in_transit.append(prefill.request)
            replica.transit_blocks += prefill.blocks
            replica.transit_tokens += prefill.need
            self._schedule(self.fleet.handover_ms(prefill.need), _HANDED_OVER, prefill.request, replica)
        replica.chunks = []
        self._dispatch()
        self._begin_prefill(replica)

    def _hand_over(self, replica: _Replica, request: int) -> None:
        tokens = self.length[request]
        replica.in_transit.remove(request)
        replica.transit_blocks -= self._prompt_blocks(request)
        replica.transit_tokens -= tokens
        self._first_token(replica, request, tokens)
        self._note_peak(replica)
        if replica.idle or replica.prefill_idle:
            self._schedule(0.0, _WAKE, 0, replica)


def _conditional(marginal: Sequence[float]) -> FloatArray:
    """P(position j is accepted, given that all before it were), from the marginals, which never rise."""
    p = np.asarray(marginal, float)
    return p / np.concatenate(([1.0], p[:-1]))[: len(p)] if len(p) else p
