"""Memory of a card: weights, draft model and KV pool."""

from __future__ import annotations

import math

from simulator.hardware.operators import Source


def kv_capacity_tokens(source: Source, tier: str, kv_budget: float, spec_length: int) -> int:
    """Tokens that the KV pool holds."""
    return math.floor(_kv_pool_gb(source, tier, kv_budget, spec_length) * 1e9 / source.kv_bytes_per_token)


def gpu_memory_gb(source: Source, tier: str, kv_budget: float, spec_length: int, batch_size: int) -> float:
    """Memory in use on a card, decimal GB. Engines allocate the KV pool at startup, so load does not matter."""
    fixed_gb = _fixed_gb(source, tier, spec_length) + source.memory_gb["per_sequence_gb"] * batch_size
    return fixed_gb + _kv_pool_gb(source, tier, kv_budget, spec_length)


def _kv_pool_gb(source: Source, tier: str, kv_budget: float, spec_length: int) -> float:
    """KV pool, decimal GB: the share ``kv_budget`` of the card's free memory, less a workspace."""
    room_gb = source.card.memory_budget_gb - _fixed_gb(source, tier, spec_length) - source.memory_gb["workspace_gb"]
    return kv_budget * room_gb


def _fixed_gb(source: Source, tier: str, spec_length: int) -> float:
    """Memory allocated before the KV pool, decimal GB: weights, activations, and the draft model if there is one."""
    memory = source.memory_gb
    fixed_gb = source.weights_gb[source.check_tier(tier)] + memory["activations_gb"]
    return fixed_gb + (memory["speculation_gb"] if spec_length else 0.0)
