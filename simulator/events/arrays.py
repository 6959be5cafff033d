"""All arrays and numbers of a run of the discrete-event engine, by name: axes, unit and meaning.

The table is the single source: the arrays are allocated from it, ``scripts/kernel_types.py`` writes the C types from
it, and :class:`simulator.events.records.Run` refuses a run that lacks one.

A letter is an axis: ``N`` requests, ``C`` classes (0 is served first), ``R`` replicas, ``S`` slots of a replica, ``L``
lines (see :mod:`simulator.events.lines`), ``G`` sessions, ``A`` their turns, ``E`` events, ``D`` draft positions,
``M`` operator models, ``H`` bins of gaps; of the looked-up times ``T`` rows of tokens, ``B`` batches (S + 1), ``X``
contexts of 2, 4, 8, ..., ``P`` prompt tokens, and ``U``, ``V``, ``W`` tokens, prefixes and batches of listed chunks.
Without axes it is a number. Flags are 0 or 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from simulator.kernel.arrays import ArraySpec


@dataclass(frozen=True, slots=True)
class RunSpec(ArraySpec):
    """An array of a run; new entries are ``empty``."""

    empty: float = field(kw_only=True, default=0.0)


def _whole(axes: str, unit: str, meaning: str, empty: int = 0) -> RunSpec:
    return RunSpec(axes, unit, meaning, np.int64, empty=empty)


def _unknown(axes: str, unit: str, meaning: str) -> RunSpec:
    """Times that are NaN until they are known."""
    return RunSpec(axes, unit, meaning, empty=math.nan)


_NONE: Final = -1

RUN: Final[Mapping[str, RunSpec]] = {
    # requests, in the order in which they were submitted
    "due_ms": RunSpec("N", "ms", "submitted arrival time; unused in a closed loop"),
    "prompt": _whole("N", "tokens", "prompt"),
    "goal": _whole("N", "tokens", "prompt and output"),
    "priority": _whole("N", "class", "class"),
    "reused": _whole("N", "tokens", "leading prompt tokens shared with an earlier request"),
    "follows": _whole("N", "request", "earlier request that has most of its prefix in common; -1 = none", _NONE),
    "acceptance": RunSpec(
        "N", "probability", "P(a draft is accepted | all before it are); -1 = as in chance", empty=_NONE
    ),
    "length": _whole("N", "tokens", "prompt, plus tokens written before a preemption"),
    "arrival_ms": _unknown("N", "ms", "arrival"),
    "read_at_ms": RunSpec("N", "ms", "``read_work_ms`` at which the API server has read it"),
    "queued_ms": _unknown("N", "ms", "time at which the engine received it"),
    "start_ms": _unknown("N", "ms", "start of the first prefill iteration"),
    "first_ms": _unknown("N", "ms", "first token"),
    "finish_ms": _unknown("N", "ms", "last token"),
    "output_ms": _unknown("N", "ms", "last output, when it joined its batch or was preempted"),
    "output_delay_ms": RunSpec("N", "ms", "delay with which the first token is sent"),
    "lot": RunSpec("N", "share", "drawn from 0 to 1: position of its replica among those in service (router random)"),
    "rejected": _whole("N", "flag", "refused"),
    "preemptions": _whole("N", "preemptions", "number of times it was preempted"),
    "need": _whole("N", "tokens", "tokens to prefill"),
    "done": _whole("N", "tokens", "tokens of these that are already in the cache"),
    "held_blocks": _whole("N", "blocks", "blocks held for the prefill"),
    "replica": _whole("N", "replica", "replica to which it was sent; -1 = none", _NONE),
    "prefiller": _whole("N", "GPU", "prefill GPU, or replica, on which its prompt is"),
    "before": _whole("N", "request", "request before it in its line", _NONE),
    "after": _whole("N", "request", "request after it in its line, or arriving after it", _NONE),
    "unsent_after": _whole("N", "request", "next request of the replica whose first token is not yet sent", _NONE),
    # sessions and their turns
    "session": _whole("N", "session", "session of a turn; -1 = a request outside any session", _NONE),
    "tool_ms": RunSpec("A", "ms", "time from a turn's answer to the next turn"),
    "wanted_ms": _unknown("A", "ms", "time at which a turn was ready to be sent"),
    "turn": _whole("G", "request", "current or next turn"),
    "turns_end": _whole("G", "request", "index after its last turn"),
    "gated": _whole("G", "flag", "counts towards the cap and waits for it"),
    "arrived": _whole("G", "flag", "has arrived"),
    "started": _whole("G", "order", "rank in order of starting, from 1; 0 = not started"),
    "flying": _whole("G", "flag", "in flight: may send its next turn"),
    "phase": _whole("G", "phase", "of simulator.events.sessions"),
    "context": _whole("G", "tokens", "conversation so far, without the shared prompt"),
    # prefix cache
    "free_blocks": _whole("G", "blocks", "free blocks that hold its context"),
    "is_freed": _whole("G", "flag", "is on the list of cached contexts"),
    "freed_before": _whole("G", "session", "session freed before it", _NONE),
    "freed_after": _whole("G", "session", "session freed after it", _NONE),
    # lines of requests
    "line_first": _whole("L", "request", "first", _NONE),
    "line_last": _whole("L", "request", "last", _NONE),
    "line_count": _whole("L", "requests", "length"),
    # replicas
    "model": _whole("R", "model", "operator model that it runs"),
    "disaggregated": _whole("R", "flag", "has a separate prefill GPU"),
    "pool_blocks": _whole("R", "blocks", "KV pool"),
    "down": _whole("R", "flag", "not in service: loading, restarting or gone"),
    "draining": _whole("R", "flag", "will restart when it is empty"),
    "leaving": _whole("R", "flag", "removed: finishes its requests, then leaves"),
    "gone": _whole("R", "flag", "has left"),
    "loading_since_ms": RunSpec("R", "ms", "time of the request for it while it loads; otherwise -1", empty=_NONE),
    "starts": _whole("R", "restarts", "restarts so far; events scheduled before the last one are void"),
    "decoded_ms": RunSpec("R", "ms", "end of the last iteration that decoded"),
    "n_decoded": _whole("R", "requests", "sequences that it decoded and that are still there: the first ones"),
    "n": _whole("R", "requests", "decoding sequences: the first entries of the next three, oldest first"),
    "seq_request": _whole("RS", "request", "request of a sequence"),
    "seq_tokens": _whole("RS", "tokens", "prompt and output so far"),
    "seq_goal": _whole("RS", "tokens", "prompt and whole output"),
    "token_sum": _whole("R", "tokens", "tokens of all sequences"),
    "steps_to_finish": _whole("R", "iterations", "iterations until the first sequence finishes"),
    "reserved_blocks": _whole("R", "blocks", "blocks of its requests at their full length"),
    "transit_blocks": _whole("R", "blocks", "blocks of requests whose cache is on the link"),
    "transit_tokens": _whole("R", "tokens", "their tokens"),
    "unsent_first": _whole("R", "request", "first request whose first token is not yet sent", _NONE),
    "idle": _whole("R", "flag", "runs no iteration", 1),
    "prefill_idle": _whole("R", "flag", "its prefill GPU runs no iteration", 1),
    # iteration under way
    "decoding": _whole("R", "flag", "the iteration decodes"),
    "begun_ms": RunSpec("R", "ms", "time at which its prompts were chosen"),
    "iteration_ms": RunSpec("R", "ms", "time of the iteration"),
    "drafts": _whole("R", "tokens", "drafts of each sequence"),
    "chance": RunSpec("RCD", "probability", "P(a draft position is accepted | all before it are)"),
    "n_chunks": _whole("R", "chunks", "chunks that the iteration prefills"),
    "chunk_request": _whole("RS", "request", "request of a chunk"),
    "chunk_tokens": _whole("RS", "tokens", "tokens of a chunk"),
    "chunk_sum": _whole("R", "tokens", "tokens of all chunks"),
    # events, a binary heap
    "event_ms": RunSpec("E", "ms", "time"),
    "event_order": _whole("E", "order", "order of simultaneous ones: kind, then sequence"),
    "event_request": _whole("E", "request", "request"),
    "event_replica": _whole("E", "replica", "replica"),
    "event_starts": _whole("E", "restarts", "restarts of the replica when it was scheduled"),
    "n_events": _whole("", "events", "future events"),
    "sequence": _whole("", "events", "events scheduled so far"),
    # configuration of the fleet
    "n_classes": _whole("", "classes", "request classes"),
    "router": _whole("", "router", "index in inferencegym.models.ROUTERS"),
    "chunked": _whole("", "flag", "prompts share iterations with decodes"),
    "reserve": _whole("", "flag", "cache for whole outputs is reserved"),
    "async_scheduling": _whole("", "flag", "an iteration is scheduled when the one before it begins"),
    "request_ms": RunSpec("", "ms", "processor time of an API server per request"),
    "token_ms": RunSpec("", "ms", "its processor time per output sent"),
    "fleet_model": _whole("", "model", "operator model that replicas should run"),
    "fleet_disaggregated": _whole("", "flag", "replicas should have a prefill GPU"),
    "prefill_replicas": _whole("", "GPUs", "prefill GPUs that all replicas share; 0 = each replica has its own"),
    "fleet_pool_blocks": _whole("", "blocks", "KV pool of a replica that starts"),
    "batch_size": _whole("", "requests", "most requests in flight on a replica"),
    "draft_tokens": _whole("", "tokens", "drafts of each sequence"),
    "fleet_chance": RunSpec("CD", "probability", "``chance`` of future iterations"),
    "block_tokens": _whole("", "tokens", "tokens of a block"),
    "block_shift": _whole("", "bits", "their logarithm to base 2; -1 = they are no power of 2"),
    "spare_tokens": _whole("", "tokens", "cache kept free for each sequence"),
    "context_tokens": _whole("", "tokens", "limit on prompt and answer of a request; -1 = none"),
    "queue_limit": _whole("", "requests", "limit on requests that have not started; -1 = none"),
    "vllm_refill": _whole("", "flag", "no request starts where one was preempted"),
    "drain": _whole("", "flag", "replicas finish their requests before they restart"),
    "restart_ms": RunSpec("", "ms", "restart of a replica"),
    "load_ms": RunSpec("", "ms", "start of a new replica"),
    "slowdown": RunSpec("", "factor", "factor on every iteration"),
    "kv_bytes_per_token": RunSpec("", "bytes", "KV cache of a token"),
    "link_bytes_per_ms": RunSpec("", "bytes/ms", "link from a prefill GPU to its replica"),
    "client_ms": RunSpec("", "ms", "round trip to the client"),
    "prefix_hit": RunSpec("", "share", "reused tokens that the caches hold"),
    "n_sessions": _whole("", "sessions", "sessions"),
    "max_sessions": _whole("", "sessions", "cap on those in flight"),
    "objective_ms": RunSpec("", "ms", "TTFT objective of turns of sessions outside the cap"),
    "shared_tokens": _whole("", "tokens", "system prompt of all sessions, always in the cache"),
    # state of the run
    "now_ms": RunSpec("", "ms", "current time"),
    "n_replicas": _whole("", "replicas", "replicas so far, those that left included"),
    "n_up": _whole("", "replicas", "replicas in service: not ``down``"),
    "n_there": _whole("", "replicas", "replicas that have not left"),
    "n_prefill_gpus": _whole("", "GPUs", "prefill GPUs that these have of their own"),
    "waiting": _whole("", "requests", "requests in the shared queue and in those of replicas"),
    "n_reading": _whole("", "requests", "requests that API servers are reading, linked by ``after``"),
    "read_first": _whole("", "request", "the one that arrived first", _NONE),
    "read_last": _whole("", "request", "the one that arrived last", _NONE),
    "read_work_ms": RunSpec("", "ms", "processor time that a request would have had if it had been read all along"),
    "read_until_ms": RunSpec("", "ms", "time up to which it is counted; in the future while outputs are sent"),
    "next_replica": _whole("", "replica", "replica whose turn is next under the router round-robin"),
    "next_request": _whole("", "request", "request that the next free client of a closed loop sends"),
    "last_request": _whole("", "request", "index after the last request of a closed loop"),
    "random_a": _whole("", "state", "first half of the generator's state"),
    "random_b": _whole("", "state", "second half"),
    "in_flight": _whole("", "sessions", "sessions in flight that count towards the cap"),
    "n_paused": _whole("", "sessions", "paused sessions"),
    "n_arrived": _whole("", "sessions", "sessions that have arrived"),
    "n_begun": _whole("", "sessions", "sessions that have started"),
    "next_session": _whole("", "session", "next one to start"),
    "first_freed": _whole("", "session", "cached context that is evicted first; -1 = none"),
    "last_freed": _whole("", "session", "cached context that is evicted last"),
    "listed_blocks": _whole("", "blocks", "blocks of all cached contexts"),
    "context_sum": _whole("", "tokens", "contexts of the sessions in flight"),
    "context_max": _whole("", "tokens", "longest of them"),
    # totals
    "iterations": _whole("", "iterations", "iterations, those of prefill GPUs included"),
    "busy_ms": RunSpec("", "ms", "their time"),
    "peak_tokens": _whole("", "tokens", "fullest cache of any replica"),
    "n_started": _whole("", "requests", "requests that started"),
    "n_finished": _whole("", "requests", "requests that were answered"),
    "n_turns": _whole("", "turns", "turns that were answered"),
    "batch_tokens": _whole("", "tokens", "output tokens of the sessions that count towards the cap"),
    "n_judged": _whole("", "turns", "answered turns of the others"),
    "n_within": _whole("", "turns", "of these, within their objective"),
    "n_overdue": _whole("", "turns", "turns of the others that now wait beyond their objective"),
    "free_flying": _whole("", "sessions", "sessions in flight that do not count towards the cap"),
    "n_over": _whole("", "sessions", "sessions that were finished"),
    "n_refused_sessions": _whole("", "sessions", "sessions of which a turn was refused"),
    "queried_tokens": _whole("", "tokens", "prompt tokens looked up in the prefix cache"),
    "hit_tokens": _whole("", "tokens", "of these, found there"),
    "n_rejected": _whole("", "requests", "requests that were refused"),
    "n_preempted": _whole("", "preemptions", "preemptions of all requests"),
    "written_tokens": _whole("", "tokens", "output tokens"),
    "drafted_tokens": _whole("", "tokens", "drafts"),
    "accepted_tokens": _whole("", "tokens", "accepted drafts"),
    "decoded_tokens": _whole("", "tokens", "tokens of decode iterations"),
    "prefilled_tokens": _whole("", "tokens", "prompt tokens prefilled, recomputation included"),
    "gaps": _whole("H", "gaps", "gaps between outputs of a request, by length"),
    "decode_ms": RunSpec("", "ms", "time of iterations, summed over the sequences that they decoded"),
    "prefill_gpu_ms": RunSpec("", "ms", "time that replicas had a prefill GPU"),
    "replica_ms": RunSpec("", "ms", "time that replicas were there: loading, serving or leaving"),
    # operator models: cached times; NaN = not yet computed by the model
    "linear_ms": _unknown("MT", "ms", "all but attention and head, by rows"),
    "head_ms": _unknown("MT", "ms", "LM head, by rows"),
    "attention_ms": _unknown("MBX", "ms", "decode attention, by batch and context"),
    "asked_ms": RunSpec("", "ms", "prefill attention that a model has just computed"),
    "n_contexts": _whole("M", "contexts", "contexts of attention_ms that the model has"),
    "draft_layers": _whole("M", "layers", "layers of the model, of which a draft takes one; 0 = drafts need no model"),
    "draft_overhead_ms": RunSpec("M", "ms", "host time of a draft"),
    "prefill_kind": _whole("M", "kind", "form of prefill attention: computed by the model, curves, pairs, or listed"),
    "prefill_scale": RunSpec("M", "ms", "factor on the maximum of the curves, or time per pair"),
    "prefill_floor_ms": RunSpec("M", "ms", "lower bound of the maximum of the curves"),
    "prefill_alone_ms": RunSpec("MP", "ms", "curve of one prompt alone, by tokens"),
    "prefill_batched_ms": RunSpec("MP", "ms", "curve of one prompt among many, by tokens"),
    "listed_ms": RunSpec("MUVW", "ms", "prefill attention of equal chunks"),
    "listed_tokens": _whole("U", "tokens", "of each of these chunks"),
    "listed_prefixes": _whole("V", "tokens", "before each of them"),
    "listed_batches": _whole("W", "chunks", "equal chunks at a time"),
    "step_overhead_ms": RunSpec("M", "ms", "host time of an iteration"),
    "sequence_overhead_ms": RunSpec("M", "ms", "host time per sequence"),
    "token_budget": _whole("M", "tokens", "token budget of an iteration"),
    "output_delay": RunSpec("M", "iterations", "delay with which outputs are sent"),
}
"""Arrays and numbers of a run."""


def allocated(sizes: Mapping[str, int], earlier: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Arrays (no numbers) of these sizes by axis letter; entries of ``earlier`` are copied, all others are empty."""
    arrays = {}
    for name, spec in RUN.items():
        if not spec.axes:
            continue
        shape = tuple(sizes[axis] for axis in spec.axes)
        before = None if earlier is None else earlier[name]
        if before is not None and before.shape == shape:
            arrays[name] = before
            continue
        arrays[name] = np.full(shape, spec.empty, spec.dtype)
        if before is not None:
            arrays[name][tuple(slice(n) for n in before.shape)] = before
    return arrays
