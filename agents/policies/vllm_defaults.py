"""An engine's own defaults: what vLLM does when it is started with nothing but a model's name."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from agents.policies.constant import ConstantAgent
from inferencegym.models import ACTION_FIELDS, NAIVE_ACTION, ServeAction
from simulator.hardware.sources import reported_gb
from simulator.hardware.tables import ServingTables

MAX_NUM_SEQS: Final = 256
"""Sequences at once: ``EngineArgs.get_batch_defaults`` in ``vllm/engine/arg_utils.py`` (vLLM 0.9 and later) has 256 for
an A100, and 1,024 for other cards of 70 GiB and more. This agent keeps those of an A100 on every card, because the knob
ends at 512."""
GPU_MEMORY_UTILIZATION: Final = 0.9
"""Share of the card's memory: ``gpu_memory_utilization`` of ``vllm/config/cache.py``."""


class VllmDefaultsAgent(ConstantAgent):
    """Agent that keeps vLLM's defaults; :func:`vllm_defaults` gives them in this environment's terms."""

    def __init__(self, tables: ServingTables) -> None:
        super().__init__(vllm_defaults(tables))


def vllm_defaults(tables: ServingTables) -> ServeAction:
    """Knobs of vLLM's defaults on an A100: 256 slots, 90% of the memory, FP16, no drafts, no separate prefill GPUs."""
    kv_budget = kv_budget_of(GPU_MEMORY_UTILIZATION, MAX_NUM_SEQS, 0, tables)
    return replace(NAIVE_ACTION, batch_size=MAX_NUM_SEQS, kv_budget=kv_budget)


def kv_budget_of(gpu_memory_utilization: float, max_num_seqs: int, tier: int, tables: ServingTables) -> float:
    """Share of the KV pool that vLLM's two options leave, within the knob's bounds; without a draft model.

    Weights (of the precision ``tier``), activations, slots and pool then take the share ``gpu_memory_utilization`` of
    what the card reports, which is what the engine measures at its start; :mod:`ops.export` converts the other way.
    """
    memory = tables.meta["memory_gb"]
    fixed_gb = float(tables.weights_gb[tier]) + float(memory["activations_gb"])
    pool_gb = float(tables.meta["memory_budget_gb"]) - fixed_gb - float(memory["workspace_gb"])
    slots_gb = max_num_seqs * float(memory["per_sequence_gb"])
    free_gb = gpu_memory_utilization * reported_gb(tables.meta) - fixed_gb - slots_gb
    bounds = ACTION_FIELDS["kv_budget"]
    return min(bounds.high, max(bounds.low, free_gb / pool_gb))
