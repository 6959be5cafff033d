"""Memory of a card: weights, draft model and KV pool."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simulator.hardware.operators import Source


def kv_capacity_tokens(source: Source, tier: str, kv_budget: float, spec_length: int) -> int:
    """Tokens that the KV pool holds."""
    return math.floor(_kv_pool_gb(source, tier, kv_budget, spec_length) * 1e9 / source.kv_bytes_per_token)


def gpu_memory_gb(source: Source, tier: str, kv_budget: float, spec_length: int, batch_size: int) -> float:
    """Memory in use on a card, decimal GB. Engines allocate the KV pool at startup, so load does not matter."""
    fixed_gb = _fixed_gb(source, tier, spec_length) + source.memory_gb["per_sequence_gb"] * batch_size
    return fixed_gb + _kv_pool_gb(source, tier, kv_budget, spec_length)


def kv_pool_gb(
    memory: Mapping[str, float], budget_gb: float, weights_gb: float, kv_budget: float, drafts: bool
) -> float:
    """KV pool, decimal GB: the share ``kv_budget`` of a card's free memory, less a workspace.

    ``memory`` are the parts that an engine allocates in addition to the weights, ``budget_gb`` what it may use of the
    card.
    """
    return kv_budget * (budget_gb - _allocated_gb(memory, weights_gb, drafts) - memory["workspace_gb"])


def _kv_pool_gb(source: Source, tier: str, kv_budget: float, spec_length: int) -> float:
    weights_gb = source.weights_gb[source.check_tier(tier)]
    return kv_pool_gb(source.memory_gb, source.card.memory_budget_gb, weights_gb, kv_budget, spec_length > 0)


def _fixed_gb(source: Source, tier: str, spec_length: int) -> float:
    return _allocated_gb(source.memory_gb, source.weights_gb[source.check_tier(tier)], spec_length > 0)


def _allocated_gb(memory: Mapping[str, float], weights_gb: float, drafts: bool) -> float:
    """Memory allocated before the KV pool, decimal GB: weights, activations, and the draft model if there is one."""
    return weights_gb + memory["activations_gb"] + (memory["speculation_gb"] if drafts else 0.0)
