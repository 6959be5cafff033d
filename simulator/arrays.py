"""Arrays of a fleet batch by name: shape, unit and meaning. These tables allocate what the kernel computes on.

A letter stands for an axis, a digit for an axis of that length: ``B`` rows, ``L`` loads, ``C`` classes (0 is served
first), ``T`` steps, ``E`` edges between steps (T + 1), ``K`` pieces of a step's waits, ``R`` recorded admissions.
*Listed* prefill work is that of iterations full of prompts in a batch of ``REFERENCE_BATCH`` requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """One array: axes, unit, meaning, and the type of its elements."""

    axes: str
    unit: str
    meaning: str
    dtype: type[np.generic] = np.float64


def allocate(table: Mapping[str, ArraySpec], sizes: Mapping[str, int]) -> dict[str, Any]:
    """Zeroed arrays of a table, C-contiguous; ``sizes`` gives the length of each axis letter. No axis: a number."""
    return {
        name: np.zeros([int(a) if a.isdigit() else sizes[a] for a in spec.axes], spec.dtype) if spec.axes else 0
        for name, spec in table.items()
    }


_INT: Final = np.int64

LOAD: Final[Mapping[str, ArraySpec]] = {
    "index": ArraySpec("B", "index", "load of each row", _INT),
    "arrivals": ArraySpec("LTC", "requests", "arrivals of each step"),
    "prompt_tokens": ArraySpec("LTC", "tokens", "their prompts, summed"),
    "prefill_work_ms": ArraySpec("LTC3", "ms", "their listed prefill work by precision tier, summed"),
    "noise": ArraySpec("LT2", "factor", "jitter on TTFT and TPOT"),
}
"""Offered load; ``saved_work_ms`` (LTC3, ms: the part of the work that repeats prefixes) only where prefixes repeat."""

KNOBS: Final[Mapping[str, ArraySpec]] = {
    "kv_budget": ArraySpec("B", "share", "free GPU memory given to the KV pool"),
    "batch_size": ArraySpec("B", "requests", "slots of a replica"),
    "spec": ArraySpec("B", "index", "drafts per verification step, into SPEC_LENGTHS", _INT),
    "disagg": ArraySpec("B", "0 or 1", "prefill on a GPU of its own", _INT),
    "tier": ArraySpec("B", "index", "precision, among those of the table", _INT),
    "replicas": ArraySpec("B", "replicas", "replicas asked for; fixed where the task does not offer it"),
}
"""The action."""

STATE: Final[Mapping[str, ArraySpec]] = {
    "time": ArraySpec("B", "steps", "steps taken", _INT),
    # replicas that come and go
    "replicas_ready": ArraySpec("B", "replicas", "replicas that have loaded their weights and take requests"),
    "loading": ArraySpec("BT", "replicas", "replicas that load their weights, by the step that asked for them"),
    "first_loading": ArraySpec("B", "step", "step from which on there may be such replicas", _INT),
    "replicas_draining": ArraySpec("B", "replicas", "removed replicas that share the draining requests"),
    "draining_requests": ArraySpec("B", "requests", "requests in flight on removed replicas"),
    # rollout of a change of precision or prefill placement
    "tier_new": ArraySpec("B", "index", "precision that the fleet goes to", _INT),
    "tier_old": ArraySpec("B", "index", "precision that it comes from", _INT),
    "disagg_new": ArraySpec("B", "0 or 1", "prefill placement that the fleet goes to", _INT),
    "disagg_old": ArraySpec("B", "0 or 1", "prefill placement that it comes from", _INT),
    "rollout_share": ArraySpec("B", "share", "replicas that have restarted; 1 when there is no rollout"),
    # queue
    "queue": ArraySpec("BC", "requests", "waiting requests"),
    "waiting": ArraySpec("BCT", "requests", "waiting requests by step of arrival"),
    "first_waiting": ArraySpec("BC", "step", "step of arrival of the oldest waiting request", _INT),
    # in flight
    "in_flight": ArraySpec("BC", "requests", "requests admitted and not completed"),
    "prompts_in_flight": ArraySpec("BC", "tokens", "their prompts, summed"),
    "positions_in_flight": ArraySpec("BC", "tokens", "their outputs so far, summed"),
    "preempted": ArraySpec("BC", "requests", "requests without KV cache that wait to run on"),
    "preempted_prompts": ArraySpec("BC", "tokens", "their prompts, summed"),
    "preempted_positions": ArraySpec("BC", "tokens", "their outputs so far, summed"),
    "gain_tokens": ArraySpec("B", "tokens", "tokens that a running request gained in the last step"),
    "progress": ArraySpec("BE", "tokens", "tokens that a request would have gained from the first step to each edge"),
    "density": ArraySpec("BCT", "requests/token", "admissions per token of progress, by step of admission"),
    "first_running": ArraySpec("BC", "step", "step of admission of the oldest running cohort", _INT),
    "written_tokens": ArraySpec(
        "BC", "tokens", "tokens written by the cohorts from first_running on, their ended requests included"
    ),
    # what the next fixed point starts from
    "prefill_share": ArraySpec("B", "share", "time that prefill took in the last step"),
    "prefill_load": ArraySpec("BC", "share", "time spent on prefill, smoothed"),
    "prefilling": ArraySpec("B", "requests", "requests that hold a slot and await their first token, smoothed"),
    "cached_tokens": ArraySpec(
        "B", "tokens", "tokens in the KV pools, finished requests' included; only where prefixes repeat"
    ),
    # where the last look-ups ended: the next ones begin there, which saves time and changes nothing
    "iteration_cell": ArraySpec("B", "index", "cell of iteration_points", _INT),
    "context_cell": ArraySpec("B", "index", "cell of context_points", _INT),
    "batch_cell": ArraySpec("B", "index", "cell of batch_points", _INT),
    # statistics
    "prompt_window_requests": ArraySpec("B", "requests", "arrivals of the last PROMPT_WINDOW_STEPS"),
    "prompt_window_tokens": ArraySpec("B", "tokens", "their prompts, summed"),
    "class_window": ArraySpec("BC", "requests", "arrivals of the last CLASS_WINDOW_STEPS"),
    "rate_ema": ArraySpec("B", "requests/s", "arrival rate, exponential moving average"),
    "cost_so_far": ArraySpec("B", "cost", "sum of cost_per_1k over the steps"),
    # of the last step, for reports
    "replicas_up": ArraySpec("B", "replicas", "replicas in service, mean over the step"),
    "resident": ArraySpec("B", "requests", "requests in flight on a replica that the KV pool holds"),
    "context_tokens": ArraySpec("B", "tokens", "mean context: prompt and output so far"),
    "n_recorded": ArraySpec("B", "entries", "entries of the record in use", _INT),
    # class, requests, shortest and longest wait (below 0 = none), fixed part, median and sigma of the log-normal part
    "record": ArraySpec(
        "BR7", "requests, ms", "admissions of the episode: waits, and time to the first token after them"
    ),
}
"""State arrays of a fleet, which one step leaves to the next."""

SCRATCH: Final[Mapping[str, ArraySpec]] = {
    # the fleet in this step
    "joining": ArraySpec("", "replicas", "replicas that come up within the step, mean over it"),
    "staying_share": ArraySpec("", "share", "requests in flight that are not on a replica that drains"),
    "paid_replicas": ArraySpec("", "replicas", "replicas in service, loading and draining"),
    "new_share": ArraySpec("", "share", "replicas in the new configuration, mean over the step"),
    "restarted_share": ArraySpec("", "share", "replicas that restart in this step"),
    "up": ArraySpec("", "replicas", "replicas in service, at least EPS"),
    "disagg_share": ArraySpec("", "share", "replicas with a prefill GPU of their own"),
    "kv_pool_tokens": ArraySpec("", "tokens", "KV pool of a replica"),
    "prefix_hit": ArraySpec("", "share", "repeated prefix tokens that the pools still hold"),
    # preemption
    "preempted": ArraySpec("", "requests", "requests preempted in this step"),
    "cohort_requests": ArraySpec("", "requests", "what still runs of a cohort, per unit of its density"),
    "cohort_positions": ArraySpec("", "tokens", "their outputs so far"),
    "cohort_written": ArraySpec("", "tokens", "tokens that the cohort wrote"),
    # heads of the queues: requests that could be admitted
    "head_prompt_tokens": ArraySpec("C", "tokens", "mean prompt"),
    "head_work_ms": ArraySpec("C", "ms", "mean listed prefill work"),
    "churn_prompts": ArraySpec("C", "prompts", "prompts recomputed for one admission into a full KV pool"),
    # prefill beside the batch with which the step begins
    "full_ms": ArraySpec("", "ms", "prefill in an iteration full of prompts"),
    "prefill_cap": ArraySpec("", "share", "largest part of the time for prefill beside decodes"),
    "prefill_limit": ArraySpec("", "share", "that part, on the replica itself or on a GPU of its own"),
    "prompts_ms": ArraySpec("", "ms", "mean iteration of prompts alone, where they have iterations of their own"),
    "prompts_work_share": ArraySpec("", "share", "part of it that grows with each prompt"),
    "prefill_ratio": ArraySpec("C", "ratio", "prefill time of a prompt, relative to its listed work"),
    # fixed point: survivors of what ran before the step
    "edge_at": ArraySpec("E", "index", "cell of each edge between cohorts in length_integrals", np.intc),
    "edge_part": ArraySpec("E", "share", "part of that cell below the edge"),
    "survivors": ArraySpec("C2", "requests, tokens", "requests that outlive the step, and their outputs so far"),
    # fixed point: admissions and the mean batch
    "prompt_ms": ArraySpec("C", "ms", "prefill time of a prompt in the running batch"),
    "admitted": ArraySpec("C", "requests", "admitted requests"),
    "admissible": ArraySpec("C", "requests", "requests that could have been admitted, had enough been waiting"),
    "resumed": ArraySpec("C", "requests", "preempted requests that run on"),
    "kv_bound": ArraySpec("C", "share", "how much the KV pool bounds admission"),
    "end_requests": ArraySpec("C", "requests", "requests in flight at the end of the step"),
    "end_prompts": ArraySpec("C", "tokens", "their prompts, summed"),
    "end_positions": ArraySpec("C", "tokens", "their outputs so far, summed"),
    "prefill_ms": ArraySpec("", "ms", "prefill time of all admissions, recomputation included"),
    "iteration_ms": ArraySpec("", "ms", "decode iteration"),
    # prefill queue of a replica
    "p_busy": ArraySpec("", "probability", "P(a replica runs something when a request joins it)"),
    "decode_share_ms": ArraySpec("", "ms", "decode time in each iteration of a prompt, mean"),
    "cycle_ms": ArraySpec("", "ms", "mean iteration, prefill included"),
    "packed_ms": ArraySpec("", "ms", "others' prefill in a short prompt's iteration while prompts are queued"),
    "load": ArraySpec("", "share", "time spent on prefill, all classes"),
    "utilisation": ArraySpec("", "share", "time spent on prompts and on the decodes of their iterations"),
    "residual_ms": ArraySpec("", "ms", "W0: mean residual work that an arriving prompt finds in service"),
    "residual_chunk_ms": ArraySpec("", "ms", "W0 with one chunk of each long prompt"),
    "pooling": ArraySpec("", "factor", "factor on W0 where prompts wait for the first free replica"),
    "growth_ms": ArraySpec("", "ms", "wait that can build up within a step"),
    "p_no_slot": ArraySpec("", "probability", "P(all slots or the cache are taken by chance)"),
    "slot_wait_ms": ArraySpec("", "ms", "mean wait for a slot or cache taken by chance"),
    # time from admission to first token: fixed part + log-normal part
    "fixed_ms": ArraySpec("C", "ms", "fixed part"),
    "median_ms": ArraySpec("C", "ms", "median of the log-normal part"),
    "sigma": ArraySpec("C", "log", "standard deviation of its logarithm"),
    "first_token_p50_ms": ArraySpec("C", "ms", "median of both parts"),
    "first_token_p99_ms": ArraySpec("C", "ms", "p99 of both parts"),
    # TTFT of the step's admissions, as pieces with uniform waits
    "n_pieces": ArraySpec("", "pieces", "pieces in use", _INT),
    "piece_requests": ArraySpec("K", "requests", "requests of a piece"),
    "piece_wait_ms": ArraySpec("K2", "ms", "shortest and longest wait; below 0 = none"),
    "piece_after_ms": ArraySpec("K2", "ms", "p50 and p99 of the time from admission to first token"),
    "missed_requests": ArraySpec("", "requests", "requests beyond their objective in this step"),
    "judged_requests": ArraySpec("", "requests", "requests admitted, or waiting beyond their objective"),
}
"""Scratch arrays of the step of one row, written before they are read."""

METRICS: Final[Mapping[str, ArraySpec]] = {
    "ttft_p50_ms": ArraySpec("B", "ms", "time to first token, median"),
    "ttft_p99_ms": ArraySpec("B", "ms", "time to first token, p99"),
    "tpot_ms": ArraySpec("B", "ms", "time per output token"),
    "tokens_per_sec": ArraySpec("B", "tokens/s", "tokens written"),
    "gpu_memory_gb": ArraySpec("B", "GB", "GPU memory used, at most the limit"),
    "cost_per_1k": ArraySpec("B", "cost", "cost of 1,000 tokens"),
    "spec_accept_rate": ArraySpec("B", "tokens/draft", "accepted drafts"),
    "eviction_events": ArraySpec("B", "requests", "preempted requests"),
    "slo_violations": ArraySpec("B", "requests", "requests beyond their objective or rejected; more out of memory"),
    "oom": ArraySpec("B", "0 or 1", "whether the configuration exceeds the memory"),
    "violation_share": ArraySpec("B", "share", "violations among judged and rejected requests"),
    "queue_requests": ArraySpec("B", "requests", "waiting requests at the end of the step"),
    "running_requests": ArraySpec("B", "requests", "requests in flight, mean of the step's ends"),
    "kv_occupancy": ArraySpec("B", "share", "part of the KV pools in use at the end of the step"),
    "admitted": ArraySpec("B", "requests", "admitted requests"),
    "completed": ArraySpec("B", "requests", "completed requests"),
    "rejected": ArraySpec("B", "requests", "requests refused by a full queue"),
}
"""Rows of ``ServingFleet.metrics``, in order. Users see those that ``MetricsSnapshot`` has a field for."""

OVER_SECONDS: Final[Mapping[str, Literal["mean", "sum", "max", "last"]]] = {
    "ttft_p50_ms": "mean",
    "ttft_p99_ms": "max",
    "tpot_ms": "mean",
    "tokens_per_sec": "mean",
    "gpu_memory_gb": "max",
    "cost_per_1k": "sum",
    "spec_accept_rate": "mean",
    "eviction_events": "sum",
    "slo_violations": "sum",
    "oom": "max",
    "violation_share": "mean",
    "queue_requests": "last",
    "running_requests": "last",
    "kv_occupancy": "last",
    "admitted": "sum",
    "completed": "sum",
    "rejected": "sum",
}
"""How the seconds that one action is held for make one number of each metric: costs and counts add up."""
