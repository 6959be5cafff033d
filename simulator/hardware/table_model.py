"""Iteration times reconstructed from a lookup table, without the database that it was built from.

A table holds decode iterations by batch and context, and prompts that run alone. The time of rows is the decode
iteration at the shortest context; beyond the largest batch it is a prompt without its attention. Decode attention is
the time that a longer context adds. Prefill attention grows with the number of token pairs; its rate is how much longer
the table's longest prompt takes than two prompts of half its length. A test states how far these iterations are from
the operator model that the table was built from.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import numpy as np

from inferencegym.errors import InvalidConfigError
from simulator.hardware.engine_times import attended_pairs
from simulator.hardware.operators import Chunk, LoopTerms, OperatorModel
from simulator.hardware.sources import engine_of
from simulator.hardware.tables import ServingTables

LAST_CONTEXT: Final = 18
"""Contexts of the attention rows are 2, 4, ... 2 ** LAST_CONTEXT tokens."""


class TableModel(OperatorModel):
    """Iteration times of one precision of a table; speculative decoding is not modelled."""

    def __init__(self, tables: ServingTables, tier: str) -> None:
        profile, t = engine_of(tables.meta), tables.tier_index(tier)
        if profile.scheduler != "chunked":
            raise InvalidConfigError(
                f"engine={profile.name!r} cannot be used here: choose a table of an engine with chunked prefill"
            )
        super().__init__(tier, profile, 1, float(tables.meta["kv_bytes_per_token"]))
        self._batches, self._contexts = tables.iteration_batches, tables.axes["prompt_len_bucket"]
        self._iteration_ms = tables.iteration_ms[t, 0] - profile.sequence_overhead_ms * self._batches[:, None]
        prompts, whole_ms = self._contexts, tables.prefill_ms[t] - profile.sequence_overhead_ms
        iterations = np.ceil(prompts / profile.max_batched_tokens)
        longest_ms = whole_ms - profile.step_overhead_ms * iterations
        # The whole prompt and its two halves take the same rows, but its second half also attends to the first.
        self._pair_ms = max(0.0, float(longest_ms[-1] - 2.0 * longest_ms[-2])) / (prompts[-1] ** 2 / 4.0)
        alone = iterations == 1
        most, most_ms = prompts[alone], whole_ms[alone]
        rows_ms = most_ms - self._pair_ms * most**2 / 2.0
        large = most > self._batches[-1]
        self._rows = np.concatenate((self._batches, most[large]))
        # More rows take no less time: the two halves of the curve come from different columns of the table.
        times = np.concatenate((self._iteration_ms[:, 0], rows_ms[large]))
        self._rows_ms = np.maximum.accumulate(times) - profile.step_overhead_ms
        self._ms_per_row = (self._rows_ms[-1] - self._rows_ms[-2]) / (self._rows[-1] - self._rows[-2])

    def linear_ms(self, rows: int) -> float:
        """Time of the rows, LM head included; beyond the table it continues the slope of the last two points."""
        beyond = max(0.0, rows - self._rows[-1])
        return float(np.interp(rows, self._rows, self._rows_ms) + self._ms_per_row * beyond)

    def head_ms(self, rows: int) -> float:
        """Zero: the table's iterations contain the LM head."""
        return 0.0

    def attention_row(self, n_decode: int) -> list[float]:
        """Time that longer contexts add; beyond the table it continues the slope of the last two points."""
        contexts = 2.0 ** np.arange(1, LAST_CONTEXT + 1)
        of_context = [np.interp(n_decode, self._batches, column) for column in self._iteration_ms.T]
        more_ms = np.maximum.accumulate(np.array(of_context) - of_context[0])
        slope = (more_ms[-1] - more_ms[-2]) / (self._contexts[-1] - self._contexts[-2])
        inside = np.interp(contexts, self._contexts, more_ms)
        return [float(ms) for ms in inside + slope * np.maximum(0.0, contexts - self._contexts[-1])]

    def prefill_attention_ms(self, chunks: Sequence[Chunk]) -> float:
        """Prefill attention, proportional to the causal token pairs of all chunks."""
        return float(self._pair_ms) * sum(attended_pairs(chunk.tokens, chunk.prefix) for chunk in chunks)

    def loop_terms(self) -> LoopTerms:
        """Prefill attention by token pairs."""
        return LoopTerms("pairs", self._pair_ms, draft_head=False)

    def draft_ms(self, n_decode: int, context_tokens: float, draft_tokens: int) -> float:
        """Refuse drafts: the table does not say how long they take."""
        if draft_tokens:
            raise InvalidConfigError(
                "draft_tokens must be 0: the table does not say how long drafts take", "draft_tokens"
            )
        return 0.0


@lru_cache(maxsize=64)
def table_model(tables: ServingTables, tier: str) -> TableModel:
    """Operator model of one precision of a table. Raises InvalidConfigError if the table has no such precision."""
    return TableModel(tables, tier)
