"""Metadata of lookup tables: the fields that every table has."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from inferencegym.models import QuantTier

_Positive = Annotated[float, Field(gt=0, lt=1e12, allow_inf_nan=False)]
_Amount = Annotated[float, Field(ge=0, lt=1e12, allow_inf_nan=False)]
_Memory = Literal["activations_gb", "workspace_gb", "per_sequence_gb", "speculation_gb"]


class _Metadata(BaseModel):
    model: str
    hardware: str
    engine: str
    scheduler: str
    memory_budget_gb: _Positive
    memory_limit_gb: _Positive
    max_batched_tokens: _Positive
    tau_ms: _Amount
    output_delay: _Amount = 0.0
    weights_gb: Annotated[dict[str, _Amount], Field(min_length=1, max_length=len(QuantTier))]
    memory_gb: Annotated[dict[_Memory, _Amount], Field(min_length=4)]
    kv_bytes_per_token: _Positive
    prompt_tokens: Annotated[list[_Positive], Field(min_length=1)]
    spec_tokens_per_step: dict[int, _Positive]
    cards_per_replica: Annotated[int, Field(ge=1)] = 1
    iteration_batches: list[_Positive] | None = None
    iteration_ms: list[list[list[list[_Positive]]]] | None = None


def check_metadata(meta: object) -> None:
    """Raise ValueError naming the first fields that are missing or wrong; others may be there too."""
    _Metadata.model_validate(meta)
