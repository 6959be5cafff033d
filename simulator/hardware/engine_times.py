"""Iteration times of one engine with its model, measured from outside by when its answers arrive.

An iteration with B decoding sequences and some prompt chunks takes::

    T = step_ms + ramps(rows) + sequence_ms * sampled + context_ms * context tokens + attention_ms * attended pairs

``rows`` are the tokens that go through the model (B, their drafts, the chunks), ``sampled`` those whose next token is
drawn, ``context tokens`` the sum over the decoding sequences, ``attended pairs`` the causal pairs of the chunks.
``ramps`` rises linearly from knot to knot. No coefficient is negative, so more work never takes less time.
:mod:`simulator.offline.engine_fit` finds the coefficients; nothing is assumed about card, model or kernels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Final

from inferencegym.errors import refusal
from simulator.hardware.operators import (
    EXTRAPOLATED,
    INTERPOLATED,
    MODELLED,
    Chunk,
    LoopTerms,
    OperatorModel,
    Source,
)
from simulator.hardware.profiles import EngineProfile, Hardware

TIER: Final = "served"
"""The only precision of a measured engine: the one in which it served."""
LAST_CONTEXT: Final = 20
"""Contexts of the attention rows are 2, 4, ... 2 ** LAST_CONTEXT tokens."""
_DECIMAL_GB: Final = 1e9


@dataclass(frozen=True, slots=True)
class EngineTimes:
    """Coefficients of an engine's iteration time, in ms, and the range of work that they were fitted to.

    ``ramp_ms[j]`` is the time per row between ``knots[j]`` and the next knot; the last one has no upper end.
    """

    step_ms: float
    knots: tuple[float, ...]
    ramp_ms: tuple[float, ...]
    sequence_ms: float
    context_ms: float
    attention_ms: float
    most_sequences: int
    most_context: int
    most_prompt: int

    def rows_ms(self, rows: float) -> float:
        """Time of the rows, ms."""
        ends = (*self.knots[1:], math.inf)
        pieces = zip(self.ramp_ms, self.knots, ends, strict=True)
        return sum(ms * min(max(rows - low, 0.0), high - low) for ms, low, high in pieces)

    @classmethod
    def of_dict(cls, stated: Mapping[str, Any]) -> EngineTimes:
        """From the JSON form."""
        return cls(**{**stated, "knots": tuple(stated["knots"]), "ramp_ms": tuple(stated["ramp_ms"])})


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Facts about an engine other than its times, reported by it or given by the user: model, KV pool, limits.

    ``max_num_seqs`` is None if no load reached it. ``memory_share`` is the share of the card's memory that weights and
    KV pool fill; ``weights_gb`` is 0 if unknown.
    """

    model: str
    block_tokens: int
    pool_blocks: int
    kv_bytes_per_token: float
    max_num_seqs: int | None
    max_batched_tokens: int
    max_model_len: int
    weights_gb: float = 0.0
    memory_share: float = 1.0

    def __post_init__(self) -> None:
        for name in ("block_tokens", "pool_blocks", "kv_bytes_per_token", "max_batched_tokens", "max_model_len"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise refusal(name, value, "above 0")
        if self.max_num_seqs is not None and self.max_num_seqs < 1:
            raise refusal("max_num_seqs", self.max_num_seqs, "1 or more")
        if not 0.0 <= self.weights_gb < math.inf or not 0.0 < self.memory_share <= 1.0:
            raise refusal("weights_gb", self.weights_gb, "0 or more, and memory_share above 0, at most 1")

    def pool_tokens(self) -> int:
        """Tokens that the KV pool holds."""
        return self.block_tokens * self.pool_blocks

    def fleet_rules(self) -> dict[str, Any]:
        """Arguments of the discrete-event reference's ``Fleet``: this engine's blocks, allocated as vLLM does."""
        return {
            "block_tokens": self.block_tokens,
            "spare_tokens": 0,
            "vllm_refill": True,
            "occupancy_in_blocks": True,
        }


class EngineSource(Source):
    """A measured engine as a source of operator times: one precision, and one replica with any number of cards."""

    def __init__(self, name: str, times: EngineTimes, facts: EngineFacts) -> None:
        # Half a token more than the pool, so that rounding to GB loses no token.
        pool_gb = (facts.pool_tokens() + 0.5) * facts.kv_bytes_per_token / _DECIMAL_GB
        budget_gb = facts.weights_gb + pool_gb
        card = Hardware(
            name=name,
            bandwidth_gb_s=0.0,
            memory_budget_gb=budget_gb,
            memory_limit_gb=budget_gb / facts.memory_share,
            memory_reported_gb=budget_gb / facts.memory_share,
            engine=name,
            source="measured from outside; memory as reported by the engine",
        )
        none_gb = {f"{what}_gb": 0.0 for what in ("activations", "workspace", "per_sequence", "speculation")}
        super().__init__(facts.model, card, (TIER,), {TIER: facts.weights_gb}, facts.kv_bytes_per_token, none_gb)
        self.times, self.facts = times, facts

    @property
    def fleet_rules(self) -> Mapping[str, Any]:
        """How the engine allocates its KV cache."""
        return self.facts.fleet_rules()

    def operators(self, tier: str, profile: EngineProfile) -> OperatorModel:
        """The operator model of the engine."""
        return _model(self.times, self.kv_bytes_per_token, self.check_tier(tier), profile)

    def support(self, tier: str, n_decode: int, prompt_tokens: int, draft_tokens: int) -> int:
        """Interpolated within the loads that were measured, extrapolated beyond; drafting was not measured."""
        times = self.times
        if n_decode > times.most_sequences or prompt_tokens > min(times.most_context, times.most_prompt):
            return EXTRAPOLATED
        return MODELLED if draft_tokens else INTERPOLATED

    def provenance(self, profile: EngineProfile) -> dict[str, Any]:
        """Coefficients and facts: from these a table's metadata can rebuild this source."""
        stated = {"name": self.card.name, "times": asdict(self.times), "facts": asdict(self.facts)}
        return {"measured_engine": stated, "profile": asdict(profile)}


def engine_source(stated: Mapping[str, Any]) -> EngineSource:
    """Source rebuilt from a table's ``measured_engine``."""
    return EngineSource(str(stated["name"]), EngineTimes.of_dict(stated["times"]), EngineFacts(**stated["facts"]))


def engine_profile(name: str, facts: EngineFacts, ttft_offset_ms: float, source: str) -> EngineProfile:
    """Engine profile without overhead: the measured times already contain the host's share."""
    return EngineProfile(
        name=name,
        step_overhead_ms=0.0,
        sequence_overhead_ms=0.0,
        gemm_scale=1.0,
        ttft_offset_ms=ttft_offset_ms,
        scheduler="chunked",
        max_batched_tokens=facts.max_batched_tokens,
        reserve_output=False,
        source=source,
    )


class EngineModel(OperatorModel):
    """Iteration times of a measured engine."""

    def __init__(self, times: EngineTimes, kv_bytes_per_token: float, tier: str, profile: EngineProfile) -> None:
        super().__init__(tier, profile, 1, kv_bytes_per_token)
        self.times = times

    def linear_ms(self, rows: int) -> float:
        """The fixed time of an iteration and that of its rows."""
        return self.times.step_ms + self.times.rows_ms(rows)

    def attention_row(self, n_decode: int) -> list[float]:
        """Decode attention, proportional to the context tokens."""
        return [self.times.context_ms * n_decode * 2.0**j for j in range(1, LAST_CONTEXT + 1)]

    def prefill_attention_ms(self, chunks: Sequence[Chunk]) -> float:
        """Prefill attention, proportional to the causal token pairs of all chunks."""
        return self.times.attention_ms * sum(attended_pairs(chunk.tokens, chunk.prefix) for chunk in chunks)

    def loop_terms(self) -> LoopTerms:
        """Prefill attention by token pairs; drafts without a draft model."""
        return LoopTerms("pairs", self.times.attention_ms, draft_head=False)

    def head_ms(self, rows: int) -> float:
        """LM head, proportional to the sampled tokens."""
        return self.times.sequence_ms * rows

    def draft_ms(self, n_decode: int, context_tokens: float, draft_tokens: int) -> float:
        """Host time only: drafts are assumed to come from prompt lookup, not from a draft model."""
        return draft_tokens * self.draft_overhead_ms


def attended_pairs(tokens: float, prefix: float = 0.0) -> float:
    """Causal token pairs (a token and one that it attends to) of a chunk after a prefix."""
    return tokens * (prefix + tokens / 2.0)


@lru_cache(maxsize=64)
def _model(times: EngineTimes, kv_bytes_per_token: float, tier: str, profile: EngineProfile) -> OperatorModel:
    return EngineModel(times, kv_bytes_per_token, tier, profile)
