"""Time of one engine iteration, composed from operator times, for the table builder and the reference.

An iteration that decodes for B sequences (k draft tokens verified for each) and prefills some chunks takes::

    T = linear(m) + decode_attention(B, context) + prefill_attention(chunks) + head(rows) + o0 + o1 * sequences

with m = B * (k + 1) + prefill tokens. An :class:`OperatorModel` gives the terms, in milliseconds for the whole model on
all cards of a replica; o0, o1 and the GEMM scale come from the engine profile. A :class:`Source` makes the operator
models of one deployment: :mod:`simulator.hardware.measured_model` from measured CSV files,
:mod:`simulator.hardware.aiconfigurator` from NVIDIA's database of operator times.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from inferencegym.errors import InvalidConfigError
from simulator.hardware.measured import FloatArray
from simulator.hardware.profiles import EngineProfile, Hardware, profiles

MEASURED, INTERPOLATED, MODELLED, EXTRAPOLATED = range(4)
"""How well measurements support an operator time, best first."""


class Chunk(NamedTuple):
    """Prompt tokens that one iteration prefills for one sequence, after ``prefix`` tokens already in its cache."""

    tokens: int
    prefix: int = 0


@dataclass(frozen=True, eq=False)
class Source(ABC):
    """One model in its precision tiers on the cards of one replica, and where its operator times come from.

    ``tiers`` are in the order of ``quant_tier``. Memory figures are per card: ``weights_gb`` by tier,
    ``kv_bytes_per_token``, and in ``memory_gb`` the memory of activations, workspace, each sequence and a draft model.
    """

    model: str
    card: Hardware
    tiers: tuple[str, ...]
    weights_gb: Mapping[str, float]
    kv_bytes_per_token: float
    memory_gb: Mapping[str, float]
    cards_per_replica: int = 1

    @property
    def fleet_rules(self) -> Mapping[str, Any]:
        """Arguments of the discrete-event reference's ``Fleet`` that say how this engine allocates its KV cache."""
        return {}

    @abstractmethod
    def operators(self, tier: str, profile: EngineProfile) -> OperatorModel:
        """The operator model of a tier under an engine profile."""

    def with_bandwidth(self, scale: float) -> Source | None:
        """The same on a card with ``scale`` times the memory bandwidth; None if its times cannot be scaled."""
        return None

    @abstractmethod
    def support(self, tier: str, n_decode: int, prompt_tokens: int, draft_tokens: int) -> int:
        """How well measurements support one decode batch and one prompt, at a context of ``prompt_tokens``."""

    @abstractmethod
    def provenance(self, profile: EngineProfile) -> dict[str, Any]:
        """Where the operator times come from, for the metadata of a table that is built with this profile."""

    def listed_operators(self) -> dict[str, Any]:
        """Metadata from which a table is played without this source; empty if the source needs no extra library."""
        return {}

    def check_tier(self, tier: str) -> str:
        """Return the tier if it exists; raises :class:`InvalidConfigError` listing the tiers."""
        if tier not in self.tiers:
            raise InvalidConfigError(f"tier={tier!r} is unknown: choose one of {', '.join(self.tiers)}", "tier")
        return tier


@dataclass(frozen=True, eq=False)
class LoopTerms:
    """Terms that depend on more than the number of rows, in the form that the discrete-event engine evaluates.

    ``prefill`` is the form of prefill attention. ``"asked"``: the model is called. ``"curves"``: ``scale`` times the
    largest of ``floor_ms``, the longest chunk on ``alone_ms``, and the sum of all chunks on ``batched_ms`` (both curves
    in ms by tokens, quadratic beyond their end). ``"pairs"``: ``scale`` ms per attended pair.
    ``"listed"``: ``listed_ms``, by the tokens of a chunk, the tokens before it and the equal chunks at a time, linear
    between the three axes ``listed``. With ``draft_head``
    drafts come from a layer and a head of the model; otherwise each costs only host time.
    """

    prefill: Literal["asked", "curves", "pairs", "listed"] = "asked"
    scale: float = 0.0
    floor_ms: float = 0.0
    alone_ms: Sequence[float] | FloatArray = ()
    batched_ms: Sequence[float] | FloatArray = ()
    listed_ms: FloatArray | None = None
    listed: Sequence[Sequence[int]] = ((), (), ())
    draft_head: bool = True


class OperatorModel(ABC):
    """Iteration times of one model on the cards of one replica, in one precision tier, under one engine profile."""

    def __init__(self, tier: str, profile: EngineProfile, layers: int, kv_bytes_per_token: float) -> None:
        self.tier = tier
        self.profile = profile
        self.layers = layers
        self.kv_bytes_per_token = kv_bytes_per_token
        self._attention_rows: dict[int, list[float]] = {}
        self.draft_overhead_ms = float(profiles()["speculation"]["draft_step_overhead_ms"])

    def decode_attention_ms(self, n_decode: int, context_tokens: float) -> float:
        """Attention of all layers for ``n_decode`` sequences at a mean context of ``context_tokens``.

        Linear between the contexts of :meth:`attention_row`.
        """
        row = self.known_attention_row(n_decode)
        context = max(context_tokens, 2.0)
        # Nodes lie at 2, 4, 8, ...: the bit length finds the segment.
        j = min(int(context).bit_length() - 2, len(row) - 2)
        start = 2 << j
        return row[j] + (row[j + 1] - row[j]) * (context - start) / start

    def known_attention_row(self, n_decode: int) -> list[float]:
        """:meth:`attention_row`, computed once."""
        row = self._attention_rows.get(n_decode)
        if row is None:
            row = self._attention_rows[n_decode] = self.attention_row(n_decode)
        return row

    # One iteration -------------------------------------------------------------------------------------------------

    def step_ms(
        self,
        n_decode: int,
        context_tokens: float,
        chunks: Sequence[Chunk] = (),
        draft_tokens: int = 0,
        n_first: int | None = None,
    ) -> float:
        """One iteration: ``n_decode`` sequences at a mean context of ``context_tokens``, fused with prefill ``chunks``.

        ``n_first`` chunks (default: all) end their prompt and need the LM head. Drafting is included.
        """
        rows = n_decode * (draft_tokens + 1)
        head_rows = rows + (len(chunks) if n_first is None else n_first)
        time = self.linear_ms(rows + sum(chunk.tokens for chunk in chunks)) + self.head_ms(head_rows)
        if n_decode:
            time += self.decode_attention_ms(n_decode, context_tokens) + self.draft_ms(
                n_decode, context_tokens, draft_tokens
            )
        if chunks:
            time += self.prefill_attention_ms(chunks)
        return time + self.profile.step_overhead_ms + self.profile.sequence_overhead_ms * (n_decode + len(chunks))

    def decode_ms(self, n_decode: int, context_tokens: float, draft_tokens: int = 0) -> float:
        """One decode iteration of ``n_decode`` resident sequences: drafting, verification, one token each or more."""
        return self.step_ms(n_decode, context_tokens, (), draft_tokens)

    def prefill_ms(self, prompt_tokens: int) -> float:
        """A prompt alone on an idle engine, from the first chunk to its first token."""
        return sum(
            self.step_ms(0, 0.0, (chunk,), n_first=last)
            for chunk, last in self._split(prompt_tokens, self.chunk_budget(0))
        )

    def prefill_marginal_ms(
        self, prompt_tokens: int, n_decode: int, context_tokens: float, draft_tokens: int = 0
    ) -> float:
        """Time that one prompt, coming alone, adds to the iterations of a decoding batch.

        Short prompts hide behind the weight streaming of the decode batch; see ``prefill_saturated_ms`` for a crowd.
        """
        if self.profile.scheduler == "prefill_first":
            return self.prefill_ms(prompt_tokens)
        alone = self.step_ms(n_decode, context_tokens, (), draft_tokens)
        pieces = self._split(prompt_tokens, self.chunk_budget(n_decode * (draft_tokens + 1)))
        return sum(
            self.step_ms(n_decode, context_tokens, (chunk,), draft_tokens, last) - alone for chunk, last in pieces
        )

    def prefill_saturated_ms(
        self, prompt_tokens: int, n_decode: int, context_tokens: float, draft_tokens: int = 0
    ) -> float:
        """Time that one prompt adds per iteration when prompts like it fill the engine's whole token budget."""
        budget = self.chunk_budget(n_decode * (draft_tokens + 1) if self.profile.scheduler == "chunked" else 0)
        if prompt_tokens >= budget:
            return self.prefill_marginal_ms(prompt_tokens, n_decode, context_tokens, draft_tokens)
        crowd = budget // prompt_tokens
        together = [Chunk(prompt_tokens)] * crowd
        if self.profile.scheduler == "prefill_first":
            return self.step_ms(0, 0.0, together) / crowd
        extra = self.step_ms(n_decode, context_tokens, together, draft_tokens) - self.step_ms(
            n_decode, context_tokens, (), draft_tokens
        )
        return extra / crowd

    def chunk_budget(self, decode_rows: int) -> int:
        """Prompt tokens that fit into an iteration together with ``decode_rows`` rows of decoding.

        Never below a quarter of the engine's budget: an engine that decodes more rows than its budget is deployed
        with a larger one, else it would never prefill again.
        """
        budget = self.profile.max_batched_tokens
        return max(budget - decode_rows, budget // 4)

    def _split(self, prompt_tokens: int, budget: int) -> list[tuple[Chunk, int]]:
        """Chunks of a prompt, each with the number of first tokens (0 or 1) that it yields."""
        if self.profile.scheduler == "prefill_first":
            return [(Chunk(prompt_tokens), 1)]
        starts = range(0, prompt_tokens, budget)
        return [(Chunk(min(budget, prompt_tokens - s), s), int(s + budget >= prompt_tokens)) for s in starts]

    # Its terms -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def linear_ms(self, rows: int) -> float:
        """All but attention and LM head for ``rows`` tokens: GEMMs or experts, elementwise operators, all-reduces."""

    @abstractmethod
    def attention_row(self, n_decode: int) -> list[float]:
        """Attention of all layers for ``n_decode`` sequences, at contexts of 2, 4, 8, ... tokens, in ms."""

    @abstractmethod
    def prefill_attention_ms(self, chunks: Sequence[Chunk]) -> float:
        """Causal attention of all layers for chunks that are prefilled together."""

    @abstractmethod
    def head_ms(self, rows: int) -> float:
        """LM head for ``rows`` tokens whose next token is sampled."""

    def loop_terms(self) -> LoopTerms:
        """The terms in the form of the discrete-event engine; a model that overrides ``draft_ms`` states its own."""
        return LoopTerms()

    def draft_ms(self, n_decode: int, context_tokens: float, draft_tokens: int) -> float:
        """An EAGLE head drafting ``draft_tokens`` one after the other: one decoder layer and one LM head each."""
        if draft_tokens == 0:
            return 0.0
        layer = (self.linear_ms(n_decode) + self.decode_attention_ms(n_decode, context_tokens)) / self.layers
        return draft_tokens * (layer + self.head_ms(n_decode) + self.draft_overhead_ms)
