"""Iteration-level discrete-event simulation of continuous batching: the reference for the fluid dynamics.

A fleet of identical replicas serves one queue. Every replica runs iterations of the operator model back to back: it
decodes its resident sequences and prefills prompts, fused (``chunked``) or in iterations of their own
(``prefill_first``), as its engine profile says. The KV cache is handed out in blocks; when it runs out, the sequence
admitted last is preempted and later recomputed. Nothing is averaged: every request has its own arrival, first token
and finish.

Rules of the queue: highest class first, first come first served within a class. A request goes to the replica with
the fewest requests among those that have a slot, cache for its prompt and prompt tokens to spare in their next
iteration, and starts there with it; it waits in the shared queue while there is none. Replicas start what they were
given in the same order. A bounded queue counts every request that has not started, and refuses the youngest of the
lowest class.

With ``disaggregated`` every replica has a GPU of its own for prefill, which hands the cache over a link; its slots
and cache blocks are taken from the start of the prefill. The first token is delivered once the cache has arrived.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from inferencegym.errors import InvalidConfigError
from simulator.hardware.operators import Chunk, OperatorModel

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

BLOCK_TOKENS = 16
LINK_GB_S = 25.0  # one 200 Gbit/s port between prefill and decode GPU
# Kinds of events, in the order in which simultaneous ones happen.
_ARRIVAL, _HANDED_OVER, _ITERATION_END, _PREFILL_END, _WAKE = range(5)


@dataclass(frozen=True, slots=True)
class Fleet:
    """Identical replicas behind one queue, and how each is configured.

    ``batch_size`` bounds the sequences of one replica, ``kv_pool_tokens`` its KV cache. ``acceptance[j]`` is the
    probability that draft position j + 1 is accepted (a marginal, as measured), for ``draft_tokens`` positions.
    ``queue_limit`` bounds the requests that have not started; ``None`` means no bound.
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

    def __post_init__(self) -> None:
        if min(self.batch_size, self.replicas) < 1:
            raise InvalidConfigError(f"batch_size={self.batch_size}, replicas={self.replicas}: both must be at least 1")
        if self.kv_pool_tokens < BLOCK_TOKENS:
            raise InvalidConfigError(
                f"kv_pool_tokens={self.kv_pool_tokens} holds no block: give at least {BLOCK_TOKENS}", "kv_pool_tokens"
            )
        if len(self.acceptance) < self.draft_tokens:
            raise InvalidConfigError(
                f"draft_tokens={self.draft_tokens} needs as many acceptance probabilities, got {len(self.acceptance)}",
                "draft_tokens",
            )

    def handover_ms(self, tokens: int) -> float:
        """Time to hand the cache of ``tokens`` over the link, ms."""
        return tokens * self.model.kv_bytes_per_token / (self.link_gb_s * 1e6)


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests to serve, all ``(n,)``: arrival (s), prompt and output length (tokens), class (0 is served first)."""

    arrival_s: FloatArray
    prompt_tokens: IntArray
    output_tokens: IntArray
    priority: IntArray | None = None

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

    def ttft_ms(self) -> FloatArray:
        """Time to first token as a client sees it, the engine profile's offset included, ms."""
        return (self.first_token_s - self.arrival_s) * 1e3 + self.ttft_offset_ms

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
    simulation = _Simulation(fleet, requests, seed, clients=None)
    return simulation.run()


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
    return _Simulation(fleet, unscheduled, seed, clients).run()


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


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

    def __init__(self, index: int, batch_size: int) -> None:
        self.index = index
        self.n = 0
        self.request: IntArray = np.zeros(batch_size, np.int64)
        self.tokens: IntArray = np.zeros(batch_size, np.int64)  # prompt plus generated
        self.goal: IntArray = np.zeros(batch_size, np.int64)  # prompt plus output
        self.token_sum = 0
        self.steps_to_finish = 0  # iterations until some sequence may finish; exact without drafting
        self.reserved_blocks = 0  # blocks of its requests at their full length
        self.prefilling: list[_Prefill] = []
        self.in_transit = 0
        self.transit_blocks = 0
        self.transit_tokens = 0
        self.assigned: deque[int] = deque()  # will start with the next iteration
        self.assigned_blocks = 0
        self.preempted: deque[int] = deque()
        self.chunks: list[
            tuple[_Prefill, int]
        ] = []  # what the iteration under way prefills (disaggregated: on its own GPU)
        self.decoding = False
        self.idle = True
        self.prefill_idle = True

    def in_flight(self) -> int:
        """Requests that hold a slot."""
        return self.n + len(self.prefilling) + self.in_transit

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
        return int(((self.tokens[: self.n] + (growth + BLOCK_TOKENS - 1)) // BLOCK_TOKENS).sum())

    def append(self, request: int, tokens: int, goal: int) -> None:
        """Let a sequence join the decode batch."""
        i = self.n
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


class _Simulation:
    """One run: the clock, the queue, the replicas and the record of every request."""

    def __init__(self, fleet: Fleet, requests: Requests, seed: int, clients: int | None) -> None:
        self.fleet = fleet
        self.model = fleet.model
        self.chunked = fleet.model.profile.scheduler == "chunked"
        self.reserve = fleet.model.profile.reserve_output
        self.growth = fleet.draft_tokens + 1
        self.pool_blocks = fleet.kv_pool_tokens // BLOCK_TOKENS
        self.rng = np.random.default_rng(seed)
        self.conditional = _conditional(fleet.acceptance[: fleet.draft_tokens])

        n = len(requests.prompt_tokens)
        self.prompt = [int(x) for x in requests.prompt_tokens]
        self.goal = [int(p) + int(o) for p, o in zip(requests.prompt_tokens, requests.output_tokens, strict=True)]
        self.length = list(self.prompt)  # prompt plus tokens generated before a preemption
        self.priority = [0] * n if requests.priority is None else [int(x) for x in requests.priority]
        self.output_tokens = np.asarray(requests.output_tokens, np.int64)
        self.arrival_ms = np.full(n, np.nan)
        self.first_ms = np.full(n, np.nan)
        self.finish_ms = np.full(n, np.nan)
        self.rejected = np.zeros(n, bool)
        self.preemptions = np.zeros(n, np.int64)
        self.iterations, self.busy_ms, self.peak_tokens = 0, 0.0, 0

        self.queue: list[deque[int]] = [deque() for _ in range(max(self.priority, default=0) + 1)]
        self.waiting = 0
        self.replicas = [_Replica(i, fleet.batch_size) for i in range(fleet.replicas)]
        self.now = 0.0
        first = n if clients is None else min(clients, n)
        self.next_client_request = first
        self.events = [(float(requests.arrival_s[i]) * 1e3, _ARRIVAL, i, i, 0) for i in range(first)]
        heapq.heapify(self.events)
        self.sequence = n

    def run(self) -> Outcome:
        """Process events until none is left."""
        while self.events:
            self.now, kind, _, subject, replica = heapq.heappop(self.events)
            if kind == _ARRIVAL:
                self._arrive(subject)
            elif kind == _ITERATION_END:
                self._end_iteration(self.replicas[replica])
            elif kind == _PREFILL_END:
                self._end_prefill(self.replicas[replica])
            elif kind == _HANDED_OVER:
                self._hand_over(self.replicas[replica], subject)
            else:
                self._wake(self.replicas[replica])
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
            ttft_offset_ms=self.model.profile.ttft_offset_ms,
        )

    def _schedule(self, delay_ms: float, kind: int, subject: int, replica: int) -> None:
        self.sequence += 1
        heapq.heappush(self.events, (self.now + delay_ms, kind, self.sequence, subject, replica))

    # The shared queue ------------------------------------------------------------------------------------------------

    def _arrive(self, request: int) -> None:
        self.arrival_ms[request] = self.now
        if _blocks(self.goal[request] + self.growth) > self.pool_blocks:
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
            able = [replica for replica in self.replicas if self._has_room(replica, request)]
            if not able:
                return
            replica = min(able, key=_Replica.load)
            line.popleft()
            self.waiting -= 1
            self._assign(replica, request)
            replica.assigned_blocks += _blocks(self.length[request] + 1)
            replica.reserved_blocks += _blocks(self.goal[request] + self.growth)
            if replica.idle or (self.fleet.disaggregated and replica.prefill_idle):
                self._schedule(0.0, _WAKE, 0, replica.index)

    def _has_room(self, replica: _Replica, request: int) -> bool:
        if replica.preempted or replica.load() >= self.fleet.batch_size:
            return False
        # What the next iteration cannot take stays in the shared queue: any replica may get to it first.
        promised = replica.prefill_tokens() + sum(self.length[r] for r in replica.assigned)
        if promised >= self.model.profile.max_batched_tokens:
            return False
        if self.reserve:
            return replica.reserved_blocks + _blocks(self.goal[request] + self.growth) <= self.pool_blocks
        return self._fits(replica, request, replica.assigned_blocks)

    def _assign(self, replica: _Replica, request: int) -> None:
        """Put a request in a replica's line, behind those of its own and of higher classes."""
        place = len(replica.assigned)
        while place > 0 and self.priority[replica.assigned[place - 1]] > self.priority[request]:
            place -= 1
        replica.assigned.insert(place, request)

    def _refuse_youngest(self) -> None:
        """Refuse the youngest request of the lowest class among all that have not started."""
        lines = [line for line in self.queue if line] + [r.assigned for r in self.replicas if r.assigned]
        line = max(lines, key=lambda line: (self.priority[line[-1]], self.arrival_ms[line[-1]]))
        request = line.pop()
        holder = next((r for r in self.replicas if r.assigned is line), None)
        if holder is None:
            self.waiting -= 1
        else:
            holder.assigned_blocks -= _blocks(self.length[request] + 1)
            holder.reserved_blocks -= _blocks(self.goal[request] + self.growth)
        self._refuse(request)

    def _refuse(self, request: int) -> None:
        self.rejected[request] = True
        self._send_next()

    def _send_next(self) -> None:
        """Closed loop: the client that was just answered sends its next request."""
        if self.next_client_request < len(self.prompt):
            request = self.next_client_request
            self.next_client_request += 1
            self._schedule(self.model.profile.ttft_offset_ms, _ARRIVAL, request, 0)

    def _head(self, replica: _Replica) -> int | None:
        """The request that this replica should start next, if it may: its own preempted ones first."""
        line = replica.preempted or replica.assigned
        if not line or replica.in_flight() >= self.fleet.batch_size:
            return None
        return line[0] if self.reserve or self._fits(replica, line[0]) else None

    def _fits(self, replica: _Replica, request: int, promised_blocks: int = 0) -> bool:
        """Whether the cache has blocks for this prompt beside what is resident and promised."""
        need = _blocks(self.length[request] + 1) + replica.prefill_blocks() + promised_blocks
        # Blocks are rounded up per sequence: this bound spares the exact count while the cache is far from full.
        bound = (replica.token_sum + replica.n * (self.growth + BLOCK_TOKENS)) // BLOCK_TOKENS + 1
        return need + bound <= self.pool_blocks or need + replica.decode_blocks(self.growth) <= self.pool_blocks

    def _start_prefill(self, replica: _Replica) -> _Prefill:
        blocks = _blocks(self.length[(replica.preempted or replica.assigned)[0]] + 1)
        if replica.preempted:
            request = replica.preempted.popleft()
        else:
            request = replica.assigned.popleft()
            replica.assigned_blocks -= blocks
        prefill = _Prefill(request, self.length[request], blocks)
        replica.prefilling.append(prefill)
        return prefill

    # Iterations ------------------------------------------------------------------------------------------------------

    def _wake(self, replica: _Replica) -> None:
        self._dispatch()  # an answer of one token frees a slot without an iteration
        if self.fleet.disaggregated and replica.prefill_idle:
            self._begin_prefill(replica)
        if replica.idle:
            self._begin_iteration(replica)

    def _begin_iteration(self, replica: _Replica) -> None:
        self._make_room(replica)
        chunks: list[tuple[_Prefill, int]] = []
        if not self.fleet.disaggregated:
            chunks = replica.chunks = self._take_chunks(replica)
        replica.decoding = replica.n > 0 and (self.chunked or not chunks)
        replica.idle = not (chunks or replica.decoding)
        if replica.idle:
            return
        n = replica.n if replica.decoding else 0
        duration = self._step_ms(n, replica.token_sum / n if n else 0.0, chunks)
        self._schedule(duration, _ITERATION_END, 0, replica.index)

    def _step_ms(self, n_decode: int, context: float, taken: list[tuple[_Prefill, int]]) -> float:
        chunks = [Chunk(tokens, prefill.done) for prefill, tokens in taken]
        n_first = sum(prefill.done + tokens == prefill.need for prefill, tokens in taken)
        duration = self.model.step_ms(n_decode, context, chunks, self.fleet.draft_tokens, n_first)
        self.iterations += 1
        self.busy_ms += duration
        return duration

    def _make_room(self, replica: _Replica) -> None:
        """Preempt the latest sequences until the rest can take their next tokens; they will be recomputed."""
        if self.reserve:
            return
        bound = (replica.token_sum + replica.n * (self.growth + BLOCK_TOKENS)) // BLOCK_TOKENS + 1
        if bound + replica.prefill_blocks() <= self.pool_blocks:
            return
        while replica.n + len(replica.prefilling) > 1 and (
            replica.decode_blocks(self.growth) + replica.prefill_blocks() > self.pool_blocks
        ):
            # A disaggregated prefill under way belongs to another GPU and cannot be taken back.
            if replica.prefilling and not self.fleet.disaggregated:
                victim = replica.prefilling.pop().request
            elif replica.n:
                victim = self._drop_last(replica)
            else:
                return
            self.preemptions[victim] += 1
            replica.preempted.appendleft(victim)

    def _drop_last(self, replica: _Replica) -> int:
        last = replica.n - 1
        victim = int(replica.request[last])
        self.length[victim] = int(replica.tokens[last])
        mask = np.ones(replica.n, bool)
        mask[last] = False
        replica.keep(mask)
        return victim

    def _take_chunks(self, replica: _Replica) -> list[tuple[_Prefill, int]]:
        """Prompt tokens for the next iteration: prompts under way first, then new requests, up to the token budget."""
        budget = self.model.chunk_budget(
            replica.n * self.growth if self.chunked and not self.fleet.disaggregated else 0
        )
        whole = not self.chunked
        taken: list[tuple[_Prefill, int]] = []
        for prefill in replica.prefilling:
            tokens = min(budget, prefill.need - prefill.done)
            if tokens <= 0:
                return taken
            taken.append((prefill, tokens))
            budget -= tokens
        while budget > 0:
            request = self._head(replica)
            # Whole prompts only: one longer than the budget goes alone.
            if request is None or (whole and taken and self.length[request] > budget):
                break
            prefill = self._start_prefill(replica)
            tokens = prefill.need if whole else min(budget, prefill.need)
            taken.append((prefill, tokens))
            budget -= tokens
        return taken

    def _end_iteration(self, replica: _Replica) -> None:
        if replica.decoding:
            self._advance(replica)
        self._note_peak(replica)
        if not self.fleet.disaggregated:
            for prefill in self._complete(replica, replica.chunks):
                self._first_token(replica, prefill.request, prefill.need)
            replica.chunks = []
        self._dispatch()
        if self.fleet.disaggregated and replica.prefill_idle:
            self._begin_prefill(replica)  # slots or cache may have become free
        self._begin_iteration(replica)

    def _advance(self, replica: _Replica) -> None:
        """Give every decoding sequence its tokens and let the finished ones go."""
        n = replica.n
        tokens = replica.tokens[:n]
        if self.growth == 1:
            tokens += 1
            replica.token_sum += n
            replica.steps_to_finish -= 1
            if replica.steps_to_finish > 0:
                return
        else:
            accepted = np.cumprod(self.rng.random((n, self.fleet.draft_tokens)) < self.conditional, axis=1).sum(axis=1)
            np.minimum(tokens + 1 + accepted, replica.goal[:n], out=tokens)
            replica.token_sum = int(tokens.sum())
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
        complete = [prefill for prefill, _ in taken if prefill.done == prefill.need]
        if complete:
            replica.prefilling = [prefill for prefill in replica.prefilling if prefill.done < prefill.need]
        return complete

    def _first_token(self, replica: _Replica, request: int, tokens: int) -> None:
        """A prompt (or a recomputation) is in the cache: it yields one token and joins the decode batch."""
        if np.isnan(self.first_ms[request]):
            self.first_ms[request] = self.now
        if tokens + 1 >= self.goal[request]:
            self._finish(replica, request)
        else:
            replica.append(request, tokens + 1, self.goal[request])

    def _finish(self, replica: _Replica, request: int) -> None:
        self.finish_ms[request] = self.now
        replica.reserved_blocks -= _blocks(self.goal[request] + self.growth)
        self._send_next()

    def _note_peak(self, replica: _Replica) -> None:
        cached = replica.token_sum + sum(prefill.done for prefill in replica.prefilling) + replica.transit_tokens
        self.peak_tokens = max(self.peak_tokens, cached)

    # Disaggregated prefill -----------------------------------------------------------------------------------

    def _begin_prefill(self, replica: _Replica) -> None:
        replica.chunks = self._take_chunks(replica)
        replica.prefill_idle = not replica.chunks
        if replica.chunks:
            self._schedule(self._step_ms(0, 0.0, replica.chunks), _PREFILL_END, 0, replica.index)

    def _end_prefill(self, replica: _Replica) -> None:
        for prefill in self._complete(replica, replica.chunks):
            replica.in_transit += 1
            replica.transit_blocks += prefill.blocks
            replica.transit_tokens += prefill.need
            self._schedule(self.fleet.handover_ms(prefill.need), _HANDED_OVER, prefill.request, replica.index)
        replica.chunks = []
        self._dispatch()
        self._begin_prefill(replica)

    def _hand_over(self, replica: _Replica, request: int) -> None:
        tokens = self.length[request]
        replica.in_transit -= 1
        replica.transit_blocks -= _blocks(tokens + 1)
        replica.transit_tokens -= tokens
        self._first_token(replica, request, tokens)
        self._note_peak(replica)
        if replica.idle or replica.prefill_idle:
            self._schedule(0.0, _WAKE, 0, replica.index)


def _conditional(marginal: Sequence[float]) -> FloatArray:
    """P(position j is accepted, given that all before it were), from the marginals, which never rise."""
    p = np.asarray(marginal, float)
    return p / np.concatenate(([1.0], p[:-1]))[: len(p)] if len(p) else p
