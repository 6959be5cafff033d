"""All arrays and numbers that the kernel computes on, by name: shape, unit and meaning.

These tables are the single source: the arrays are allocated from them, ``scripts/kernel_types.py`` writes the C types
from them, and :class:`simulator.kernel.records.Views` refuses a fleet that lacks one.

In ``axes`` a letter stands for an axis and a digit for an axis of that length: ``B`` rows, ``L`` loads, ``C`` classes
(0 is served first), ``T`` steps, ``E`` edges between steps (T + 1), ``K`` pieces of a step's waits, ``R`` recorded
admissions; of the measured tables ``N`` decode batches, ``P`` prefill batches, ``X`` contexts, ``D`` draft lengths,
``G`` four numbers for each edge of the grid of output lengths, ``H`` cache sizes; ``A`` stages of a task's acceptance
of drafts. Without axes it is a number. *Listed* prefill work is the time of prompts in iterations full of prompts, in a
batch of ``REFERENCE_BATCH`` requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """One array: axes, unit, meaning, and the type of its elements."""

    axes: str
    unit: str
    meaning: str
    dtype: type[np.generic] = np.float64


def allocate(table: Mapping[str, ArraySpec], sizes: Mapping[str, int]) -> dict[str, Any]:
    """Zeroed arrays of a table, C-contiguous; ``sizes`` gives the length of each axis letter. Without axes: 0."""
    return {
        name: np.zeros([int(a) if a.isdigit() else sizes[a] for a in spec.axes], spec.dtype) if spec.axes else 0
        for name, spec in table.items()
    }


@dataclass(frozen=True, slots=True)
class MetricSpec(ArraySpec):
    """A metric; ``over_seconds`` says how it is combined over the seconds for which an action is held."""

    over_seconds: str = field(kw_only=True, default="")

    def __post_init__(self) -> None:
        if self.over_seconds not in ("mean", "sum", "max", "last"):
            raise ValueError(
                f"the metric {self.meaning!r} has over_seconds={self.over_seconds!r}: allowed are 'mean', 'sum', 'max' "
                "and 'last'"
            )


_INT: Final = np.int64

PARAMS: Final[Mapping[str, ArraySpec]] = {
    # sizes
    "n_classes": ArraySpec("", "classes", "request classes of the task", np.intc),
    "grid_cells": ArraySpec("", "cells", "cells of length_integrals", np.intc),
    "n_iteration_points": ArraySpec("", "points", "batches of decode_ms", np.intc),
    "n_batch_points": ArraySpec("", "points", "batches of prefill times", np.intc),
    "n_context_points": ArraySpec("", "points", "contexts of decode_ms", np.intc),
    "reuse_points": ArraySpec("", "points", "cache sizes of reuse_hit; 0 where no prefixes repeat", np.intc),
    "acceptance_stages": ArraySpec("", "stages", "stages of the task's own acceptance; 0 = as measured", np.intc),
    "max_pieces": ArraySpec("", "pieces", "pieces of waits that a step keeps apart", np.intc),
    "record_rows": ArraySpec("", "entries", "admissions that are recorded; 0 = none", np.intc),
    "class_window_steps": ArraySpec("", "steps", "window of class_window", np.intc),
    "prompt_window_steps": ArraySpec("", "steps", "window of prompt_window_tokens", np.intc),
    # fleet
    "scales": ArraySpec("", "0 or 1", "whether the action sets the number of replicas", np.intc),
    "dt_s": ArraySpec("", "s", "length of a step"),
    "dt_ms": ArraySpec("", "ms", "length of a step"),
    "queue_limit": ArraySpec("", "requests", "limit on waiting requests"),
    "closed_clients": ArraySpec("", "clients", "clients of a closed loop; 0 = an open load"),
    "price": ArraySpec("", "cost/s", "price of a replica without a prefill GPU"),
    "ema_weight": ArraySpec("", "share", "weight of the newest step in rate_ema"),
    "slo_ms": ArraySpec("C", "ms", "TTFT objective"),
    "reload_s": ArraySpec("3", "s", "restart of a replica, by precision tier"),
    "start_s": ArraySpec("3", "s", "start of a new replica, by precision tier"),
    # memory of a replica
    "memory_gb": ArraySpec("", "GB", "GPU memory that the engine may allocate"),
    "memory_limit_gb": ArraySpec("", "GB", "GPU memory beyond which the replica is out of memory"),
    "activation_gb": ArraySpec("", "GB", "activations and CUDA context"),
    "workspace_gb": ArraySpec("", "GB", "workspace kept free"),
    "sequence_gb": ArraySpec("", "GB", "buffers per slot"),
    "draft_gb": ArraySpec("", "GB", "speculative decoding"),
    "weights_gb": ArraySpec("3", "GB", "weights, by precision tier"),
    "kv_bytes_per_token": ArraySpec("", "bytes", "KV cache of a token"),
    "block_slack_tokens": ArraySpec("C", "tokens", "KV tokens that a request holds beyond its context"),
    "block_growth": ArraySpec("C", "ratio", "KV block tokens that outputs add to those of prompts, per output token"),
    "occupancy_in_blocks": ArraySpec("", "0 or 1", "whether kv_occupancy counts the unused part of blocks", np.bool_),
    # engine
    "prefill_first": ArraySpec("", "0 or 1", "whether prefill has separate iterations", np.bool_),
    "token_budget": ArraySpec("", "tokens", "token budget of an iteration"),
    "disagg_limit": ArraySpec("", "share", "largest share of a prefill GPU's time for prefill"),
    "churn_factor": ArraySpec("", "ratio", "tokens recomputed per output token admitted into a full KV pool"),
    "load_weight": ArraySpec("", "share", "weight of the newest step in prefill_load"),
    "handoff_ms_per_token": ArraySpec(
        "", "ms", "transfer of a prompt token's KV cache from a prefill GPU to its replica"
    ),
    "jitter": ArraySpec(
        "", "ratio", "standard deviation of TTFT apart from queueing and prompts, relative to the mean"
    ),
    "ttft_offset_ms": ArraySpec("", "ms", "TTFT apart from waiting and prefill: HTTP, tokenizer, scheduler"),
    "output_delay": ArraySpec("", "iterations", "delay with which the engine sends outputs"),
    # conventions of the metrics
    "oom_slowdown": ArraySpec("", "factor", "factor on TPOT out of memory"),
    "oom_penalty": ArraySpec("", "factor", "factor on SLO violations out of memory"),
    "max_tpot_steps": ArraySpec("", "steps", "largest TPOT reported"),
    "min_billed_ktokens_per_s": ArraySpec("", "ktokens/s", "smallest throughput in the cost per token"),
    # decode iterations and speculation
    "decode_ms": ArraySpec("3DNX", "ms", "decode iteration by precision tier, drafts, batch and context"),
    "iteration_points": ArraySpec("N", "requests", "batches of decode_ms"),
    "context_points": ArraySpec("X", "tokens", "contexts of decode_ms"),
    "spec_tokens": ArraySpec("D", "tokens", "tokens per verification step, at the measured acceptance rate"),
    "spec_length": ArraySpec("D", "tokens", "drafts per verification step"),
    "accept_scale": ArraySpec("C", "ratio", "acceptance rate relative to the measured one"),
    "acceptance_from": ArraySpec("A", "step", "first step of each stage of the task's own acceptance", _INT),
    "acceptance": ArraySpec("AC", "probability", "P(a draft is accepted | all before it are), by stage"),
    # prompts and their prefill: listed work, and times relative to it (class_tables.PrefillRatios)
    "mean_prompt_tokens": ArraySpec("C", "tokens", "mean prompt"),
    "mean_work_ms": ArraySpec("C3", "ms", "listed prefill work of a mean prompt, by precision tier"),
    "work_cv2": ArraySpec("C", "ratio", "squared coefficient of variation of prefill work"),
    "batch_points": ArraySpec("P", "requests", "batches of fused_ratio and saturated_ratio"),
    "alone_ratio": ArraySpec("C3", "ratio", "prefill on an idle replica"),
    "dedicated_ratio": ArraySpec("C3", "ratio", "prefill on a busy prefill GPU"),
    "fused_ratio": ArraySpec("C3P", "ratio", "prefill of one prompt in a running batch"),
    "saturated_ratio": ArraySpec("C3P", "ratio", "prefill in iterations full of prompts"),
    # output lengths and prefix reuse
    "cells_per_token": ArraySpec("", "cells/token", "resolution of length_integrals"),
    "length_integrals": ArraySpec("CG", "tokens", "integrals of the survival function of output lengths"),
    "longest_output": ArraySpec("C", "tokens", "longest output, rounded up to a cell"),
    "output_gini": ArraySpec("C", "ratio", "Gini coefficient of output lengths"),
    "reuse_log2_first": ArraySpec("", "log2", "logarithm of the smallest cache of reuse_hit"),
    "reuse_hit": ArraySpec("H", "share", "hit rate of repeated prefix tokens, by cache size (doubling)"),
}
"""Constants of a fleet: :attr:`simulator.kernel.serving.ServingParams.constants`."""

LOAD: Final[Mapping[str, ArraySpec]] = {
    "index": ArraySpec("B", "index", "load of each row", _INT),
    "arrivals": ArraySpec("LTC", "requests", "arrivals of each step"),
    "prompt_tokens": ArraySpec("LTC", "tokens", "their prompts, summed"),
    "prefill_work_ms": ArraySpec("LTC3", "ms", "their listed prefill work by precision tier, summed"),
    "saved_work_ms": ArraySpec("LTC3", "ms", "the part of that work that repeats prefixes"),
    "noise": ArraySpec("LT2", "factor", "jitter on TTFT and TPOT"),
}
"""Offered load."""

KNOBS: Final[Mapping[str, ArraySpec]] = {
    "kv_budget": ArraySpec("B", "share", "free GPU memory given to the KV pool"),
    "batch_size": ArraySpec("B", "requests", "slots of a replica"),
    "spec": ArraySpec("B", "index", "drafts per verification step, into SPEC_LENGTHS", _INT),
    "disagg": ArraySpec("B", "0 or 1", "prefill on a separate GPU", _INT),
    "tier": ArraySpec("B", "index", "precision, an index into those of the table", _INT),
    "replicas": ArraySpec("B", "replicas", "requested replicas; fixed if the task does not offer the knob"),
}
"""The action."""

STATE: Final[Mapping[str, ArraySpec]] = {
    "time": ArraySpec("B", "steps", "steps taken", _INT),
    # replicas that come and go
    "replicas_ready": ArraySpec("B", "replicas", "replicas that have loaded their weights and take requests"),
    "loading": ArraySpec("BT", "replicas", "replicas that load their weights, by the step of the request"),
    "first_loading": ArraySpec("B", "step", "first step that may have such replicas", _INT),
    "replicas_draining": ArraySpec("B", "replicas", "removed replicas that share the draining requests"),
    "draining_requests": ArraySpec("B", "requests", "requests in flight on removed replicas"),
    # rollout of a change of precision or prefill placement
    "tier_new": ArraySpec("B", "index", "precision after the rollout", _INT),
    "tier_old": ArraySpec("B", "index", "precision before the rollout", _INT),
    "disagg_new": ArraySpec("B", "0 or 1", "prefill placement after the rollout", _INT),
    "disagg_old": ArraySpec("B", "0 or 1", "prefill placement before the rollout", _INT),
    "rollout_share": ArraySpec("B", "share", "replicas that have restarted; 1 without a rollout"),
    # queue
    "queue": ArraySpec("BC", "requests", "waiting requests"),
    "waiting": ArraySpec("BCT", "requests", "waiting requests by step of arrival"),
    "first_waiting": ArraySpec("BC", "step", "step of arrival of the oldest waiting request", _INT),
    # in flight
    "in_flight": ArraySpec("BC", "requests", "requests admitted and not completed"),
    "prompts_in_flight": ArraySpec("BC", "tokens", "their prompts, summed"),
    "positions_in_flight": ArraySpec("BC", "tokens", "their outputs so far, summed"),
    "preempted": ArraySpec("BC", "requests", "preempted requests that wait to resume"),
    "preempted_prompts": ArraySpec("BC", "tokens", "their prompts, summed"),
    "preempted_positions": ArraySpec("BC", "tokens", "their outputs so far, summed"),
    "gain_tokens": ArraySpec("B", "tokens", "tokens that a running request gained in the last step"),
    "progress": ArraySpec("BE", "tokens", "tokens that a request would have gained from the first step to each edge"),
    "density": ArraySpec("BCT", "requests/token", "admissions per token of progress, by step of admission"),
    "first_running": ArraySpec("BC", "step", "step of admission of the oldest running cohort", _INT),
    "written_tokens": ArraySpec(
        "BC", "tokens", "tokens written by the cohorts from first_running on, finished requests included"
    ),
    # start of the next fixed point
    "prefill_share": ArraySpec("B", "share", "time that prefill took in the last step"),
    "prefill_load": ArraySpec("BC", "share", "time spent on prefill, smoothed"),
    "prefilling": ArraySpec("B", "requests", "requests that hold a slot and await their first token, smoothed"),
    "cached_tokens": ArraySpec(
        "B", "tokens", "tokens in the KV pools, those of finished requests included; only if prefixes repeat"
    ),
    # cells where look-ups begin; they save time and do not affect results
    "iteration_cell": ArraySpec("B", "index", "cell of iteration_points", _INT),
    "context_cell": ArraySpec("B", "index", "cell of context_points", _INT),
    # statistics
    "prompt_window_requests": ArraySpec("B", "requests", "arrivals of the last PROMPT_WINDOW_STEPS"),
    "prompt_window_tokens": ArraySpec("B", "tokens", "their prompts, summed"),
    "class_window": ArraySpec("BC", "requests", "arrivals of the last CLASS_WINDOW_STEPS"),
    "rate_ema": ArraySpec("B", "requests/s", "arrival rate, exponential moving average"),
    "cost_so_far": ArraySpec("B", "cost", "sum of cost_per_1k over the steps"),
    "missed_so_far": ArraySpec("BC", "requests", "requests beyond their objective or rejected, summed over the steps"),
    # of the last step, for reports
    "replicas_up": ArraySpec("B", "replicas", "replicas in service, mean over the step"),
    "resident": ArraySpec("B", "requests", "requests in flight on a replica that the KV pool holds"),
    "context_tokens": ArraySpec("B", "tokens", "mean context: prompt and output so far"),
    "n_recorded": ArraySpec("B", "entries", "used entries of the record", _INT),
    # class, requests, shortest and longest wait (below 0 = none), fixed part, median and sigma of the log-normal part
    "record": ArraySpec(
        "BR7", "requests, ms", "admissions of the episode: waits, and time from admission to first token"
    ),
}
"""State arrays of a fleet, carried from one step to the next."""

FLEET: Final[Mapping[str, ArraySpec]] = {
    "up": ArraySpec("", "replicas", "replicas in service, mean over the step, at least EPS"),
    "new_share": ArraySpec("", "share", "replicas in the new configuration, mean over the step"),
    "restarted_share": ArraySpec("", "share", "replicas that restart in this step"),
    "disagg_share": ArraySpec("", "share", "replicas with a separate prefill GPU"),
    "staying_share": ArraySpec("", "share", "requests in flight that are not on a removed replica"),
    "paid_replicas": ArraySpec("", "replicas", "replicas in service, loading and draining"),
}
"""Scratch of ``fleet.py``."""

MEMORY: Final[Mapping[str, ArraySpec]] = {
    "kv_pool_tokens": ArraySpec("", "tokens", "KV pool of a replica"),
}
"""Scratch of ``memory.py``."""

HEADS: Final[Mapping[str, ArraySpec]] = {
    "prompt_tokens": ArraySpec("C", "tokens", "mean prompt of the requests that could be admitted"),
    "work_ms": ArraySpec("C", "ms", "their mean listed prefill work"),
}
"""Scratch of ``queues.py``: the heads of the queues."""

PREFILL: Final[Mapping[str, ArraySpec]] = {
    "full_ms": ArraySpec("", "ms", "prefill in an iteration full of prompts"),
    "cap": ArraySpec("", "share", "largest part of the time for prefill beside decodes"),
    "limit": ArraySpec("", "share", "largest part of the time for prefill, averaged over both placements"),
    "prompts_ms": ArraySpec("", "ms", "mean prefill-only iteration, if prefill has separate iterations"),
    "prompts_work_share": ArraySpec("", "share", "part of it that grows with each prompt"),
    "ratio": ArraySpec("C", "ratio", "prefill time of a prompt, relative to its listed work"),
    "prompt_ms": ArraySpec("C", "ms", "prefill time of a prompt in the running batch"),
    "churn_prompts": ArraySpec("C", "prompts", "prompts recomputed for one admission into a full KV pool"),
}
"""Scratch of ``prefill.py``: prefill together with the batch that runs when the step begins."""

COHORTS: Final[Mapping[str, ArraySpec]] = {
    "edge_at": ArraySpec("E", "index", "cell of each edge between cohorts in length_integrals", np.intc),
    "edge_part": ArraySpec("E", "share", "part of that cell below the edge"),
    "survivors": ArraySpec("C2", "requests, tokens", "requests that outlive the step, and their outputs so far"),
}
"""Scratch of ``cohorts.py``: requests that ran before the step."""

ROOM: Final[Mapping[str, ArraySpec]] = {
    "running": ArraySpec("", "requests", "requests that run at the end of the step, so far"),
    "kv_tokens": ArraySpec("", "tokens", "KV tokens that they hold"),
    "budget_ms": ArraySpec("", "ms", "prefill time that is left"),
    "prefill_ms": ArraySpec("", "ms", "prefill time of the admissions, recomputation included"),
    "blocked": ArraySpec(
        "", "0 or 1", "whether preempted requests still wait, so that no new request starts", np.bool_
    ),
}
"""Scratch of ``admission.py``: sums over the classes handled so far."""

BATCH: Final[Mapping[str, ArraySpec]] = {
    "admitted": ArraySpec("C", "requests", "admitted requests"),
    "admissible": ArraySpec("C", "requests", "requests that would have been admitted if enough had been waiting"),
    "resumed": ArraySpec("C", "requests", "preempted requests that resume"),
    "kv_bound": ArraySpec("C", "share", "how much the KV pool bounds admission"),
    "end_requests": ArraySpec("C", "requests", "requests in flight at the end of the step"),
    "end_prompts": ArraySpec("C", "tokens", "their prompts, summed"),
    "end_positions": ArraySpec("C", "tokens", "their outputs so far, summed"),
}
"""Scratch of ``admission.py``: admissions, and requests that run at the end of the step."""

PACE: Final[Mapping[str, ArraySpec]] = {
    "resident": ArraySpec("", "requests", "requests in flight on a replica that the KV pool holds"),
    "context_tokens": ArraySpec("", "tokens", "mean context: prompt and output so far"),
    "iteration_ms": ArraySpec("", "ms", "decode iteration"),
    "prefill_share": ArraySpec("", "share", "time that prefill takes"),
}
"""Scratch of ``pace.py``: the mean batch of a replica."""

PROMPTS: Final[Mapping[str, ArraySpec]] = {
    "p_busy": ArraySpec("", "probability", "P(a replica is busy when a request joins it)"),
    "decode_share_ms": ArraySpec("", "ms", "decode time in each iteration of a prompt, mean"),
    "cycle_ms": ArraySpec("", "ms", "mean iteration, prefill included"),
    "packed_ms": ArraySpec("", "ms", "prefill of other prompts in a short prompt's iteration during a backlog"),
    "load": ArraySpec("", "share", "time spent on prefill, all classes"),
    "utilisation": ArraySpec("", "share", "time spent on prompts and on the decodes in their iterations"),
    "residual_ms": ArraySpec("", "ms", "W0: mean residual work that an arriving prompt finds in service"),
    "residual_chunk_ms": ArraySpec("", "ms", "W0 with one chunk of each long prompt"),
    "pooling": ArraySpec("", "factor", "factor on W0 where prompts wait for the first free replica"),
    "growth_ms": ArraySpec("", "ms", "backlog that can build up within a step"),
    "p_no_slot": ArraySpec("", "probability", "P(no free slot or cache) due to random fluctuation"),
    "slot_wait_ms": ArraySpec("", "ms", "mean wait for a slot or cache that is randomly taken"),
}
"""Scratch of ``first_token.py``: the queue of prompts at a replica."""

FIRST_TOKEN: Final[Mapping[str, ArraySpec]] = {
    "fixed_ms": ArraySpec("C", "ms", "fixed part of the time from admission to first token"),
    "median_ms": ArraySpec("C", "ms", "median of its log-normal part"),
    "sigma": ArraySpec("C", "log", "standard deviation of that part's logarithm"),
    "p50_ms": ArraySpec("C", "ms", "median of both parts"),
    "p99_ms": ArraySpec("C", "ms", "p99 of both parts"),
}
"""Scratch of ``first_token.py``: its results."""

PIECES: Final[Mapping[str, ArraySpec]] = {
    "n": ArraySpec("", "pieces", "pieces in use", np.intc),
    "requests": ArraySpec("K", "requests", "requests of a piece"),
    "wait_ms": ArraySpec("K2", "ms", "shortest and longest wait; below 0 = none"),
    "after_ms": ArraySpec("K2", "ms", "p50 and p99 of the time from admission to first token"),
}
"""Scratch of ``ttft.py``: a step's admissions as pieces with uniform waits."""

METRICS: Final[Mapping[str, MetricSpec]] = {
    "ttft_p50_ms": MetricSpec("B", "ms", "time to first token, median", over_seconds="mean"),
    "ttft_p99_ms": MetricSpec("B", "ms", "time to first token, p99", over_seconds="max"),
    "tpot_ms": MetricSpec("B", "ms", "time per output token", over_seconds="mean"),
    "tokens_per_sec": MetricSpec("B", "tokens/s", "tokens written", over_seconds="mean"),
    "gpu_memory_gb": MetricSpec("B", "GB", "GPU memory used, at most the limit", over_seconds="max"),
    "cost_per_1k": MetricSpec("B", "cost", "cost of 1,000 tokens", over_seconds="sum"),
    "spec_accept_rate": MetricSpec("B", "tokens/draft", "accepted drafts", over_seconds="mean"),
    "eviction_events": MetricSpec("B", "requests", "preempted requests", over_seconds="sum"),
    "slo_violations": MetricSpec(
        "B", "requests", "requests beyond their objective or rejected; more out of memory", over_seconds="sum"
    ),
    "oom": MetricSpec("B", "0 or 1", "whether the configuration exceeds the memory", over_seconds="max"),
    "violation_share": MetricSpec("B", "share", "violations among judged and rejected requests", over_seconds="mean"),
    "queue_requests": MetricSpec("B", "requests", "waiting requests at the end of the step", over_seconds="last"),
    "running_requests": MetricSpec("B", "requests", "requests in flight, mean of the step's ends", over_seconds="last"),
    "kv_occupancy": MetricSpec("B", "share", "part of the KV pools in use at the end of the step", over_seconds="last"),
    "admitted": MetricSpec("B", "requests", "admitted requests", over_seconds="sum"),
    "completed": MetricSpec("B", "requests", "completed requests", over_seconds="sum"),
    "rejected": MetricSpec("B", "requests", "requests refused by a full queue", over_seconds="sum"),
}
"""Rows of ``ServingFleet.metrics``, in order. Users see those for which ``MetricsSnapshot`` has a field."""

OVER_SECONDS: Final = {name: spec.over_seconds for name, spec in METRICS.items()}
"""How each metric is combined over the seconds for which one action is held: costs and counts add up."""
