"""``TraceSimulator``: the metrics of a saturated engine, looked up by action and workload."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from inferencegym.errors import TableError
from inferencegym.models import MetricsSnapshot, ServeAction, WorkloadState
from inferencegym.spaces.actions import to_row
from simulator.coverage import support_map
from simulator.hardware.tables import FloatArray, ServingTables, default_table_path, load_tables
from simulator.kernel.serving import CONVENTIONS
from simulator.load.source import NOISE_STD

if TYPE_CHECKING:
    from scipy.interpolate import RegularGridInterpolator

OUTPUTS: Final = ("ttft_p50_ms", "ttft_p99_ms", "tpot_ms", "tps", "decode_ms", "prefill_ms", "prefill_marginal_ms")
"""Columns that are interpolated in the logarithm; memory and KV capacity follow from formulas."""


class TraceSimulator:
    """Simulator of a saturated replica: ``batch_size`` requests always in flight at the workload's prompt length.

    ``simulate`` adds 5% seeded jitter to TTFT and TPOT; ``lookup`` is the bare table. Between grid points the
    logarithm of the value is linear in (log2 batch, KV budget, log2 prompt); spec length and precision take the nearest
    grid point. Valid input never raises; running out of memory is reported as data (``oom``).
    """

    def __init__(self, trace_path: str | Path | None = None, seed: int = 42) -> None:
        self.tables: ServingTables = load_tables(trace_path if trace_path is not None else default_table_path())
        if "tps" not in self.tables.columns:
            raise TableError(
                f"{self.tables.path} holds operator times alone, not those of a saturated engine: build it with "
                "`inferencegym build-table --saturated`, or ask `inferencegym simulate`"
            )
        self._rng = np.random.default_rng(seed)

    def reset_seed(self, seed: int) -> None:
        """Restart the jitter from this seed."""
        self._rng = np.random.default_rng(seed)

    def simulate(self, action: ServeAction, workload: WorkloadState) -> MetricsSnapshot:
        """Metrics of one second of a saturated replica under ``action`` and ``workload``."""
        action.validate()
        self.tables.refuse_tier(action.quant_tier.value)
        row = to_row(action)[None]
        at = {name: float(v[0]) for name, v in self.lookup(row, np.array([workload.mean_prompt_len])).items()}
        jitter = 1.0 + NOISE_STD * self._rng.standard_normal(3).clip(-4.0, 4.0)
        limit_gb = float(self.tables.meta["memory_limit_gb"])
        oom = at["gpu_mem_gb"] > limit_gb
        tps = at["tps"] * (0.5 if oom else 1.0)
        ttft = at["ttft_p50_ms"] * jitter[0]
        beyond_kv_pool = max(0.0, action.batch_size - at["resident"])
        violations = round(beyond_kv_pool)
        return MetricsSnapshot(
            ttft_p50_ms=float(ttft),
            ttft_p99_ms=float(max(ttft, at["ttft_p99_ms"] * jitter[1])),
            tpot_ms=float(at["tpot_ms"] * jitter[2]),
            tokens_per_sec=tps,
            gpu_memory_gb=min(at["gpu_mem_gb"], limit_gb),
            cost_per_1k=(2.0 if action.prefill_disagg else 1.0) * self.tables.cards_per_replica * 1000.0 / tps,
            spec_accept_rate=at["spec_accept_rate"],
            eviction_events=round(beyond_kv_pool),
            slo_violations=max(round(CONVENTIONS.oom_penalty * violations), action.batch_size) if oom else violations,
            oom=oom,
        )

    def lookup(self, actions: NDArray[np.float64], prompt_tokens: FloatArray) -> dict[str, FloatArray]:
        """Table values for actions (N, 5: kv_budget, spec_length, batch_size, disagg, tier) and prompts (N,) tokens.

        Returns arrays (N,): the columns in ``OUTPUTS``, ``gpu_mem_gb``, ``kv_capacity_tokens``, ``resident`` (requests
        whose KV cache fits), ``spec_accept_rate`` and ``support`` (how well measurements support the nearest cell).
        """
        axes = self.tables.axes
        kv = np.clip(actions[:, 0], axes["kv_budget"][0], axes["kv_budget"][-1])
        spec = np.abs(axes["spec_length"][None, :] - actions[:, 1:2]).argmin(axis=1)
        batch = np.clip(actions[:, 2], 1, axes["batch_size"][-1])
        tier = np.clip(np.rint(actions[:, 4]), 0, self.tables.n_tiers - 1).astype(np.int64)
        prompt = np.clip(prompt_tokens, axes["prompt_len_bucket"][0], axes["prompt_len_bucket"][-1])
        points = np.column_stack([kv, np.log2(batch), np.log2(prompt)])
        values = np.empty((len(actions), len(OUTPUTS)))
        for t in range(self.tables.n_tiers):
            for s in range(len(axes["spec_length"])):
                chosen = (tier == t) & (spec == s)
                if chosen.any():
                    values[chosen] = np.exp(self._interpolators[t][s](points[chosen]))
        out: dict[str, FloatArray] = {name: values[:, i] for i, name in enumerate(OUTPUTS)}
        out |= self._memory(kv, axes["spec_length"][spec] > 0, batch, tier)
        out["resident"] = np.minimum(batch, out["kv_capacity_tokens"] / (prompt + 64.0))
        length = np.maximum(axes["spec_length"][spec], 1.0)
        out["spec_accept_rate"] = (self.tables.spec_tokens[spec] - 1.0) / length
        level = support_map(self.tables).level
        out["support"] = np.array([level(*at) for at in zip(tier, spec, batch, prompt, strict=True)], dtype=np.float64)
        return out

    def _memory(
        self, kv: FloatArray, drafting: NDArray[np.bool_], batch: FloatArray, tier: NDArray[np.int64]
    ) -> dict[str, FloatArray]:
        meta = self.tables.meta
        memory = meta["memory_gb"]
        fixed = self.tables.weights_gb[tier] + memory["activations_gb"] + memory["speculation_gb"] * drafting
        pool = kv * (meta["memory_budget_gb"] - fixed - memory["workspace_gb"])
        return {
            "gpu_mem_gb": fixed + memory["per_sequence_gb"] * batch + pool,
            "kv_capacity_tokens": np.floor(pool * 1e9 / meta["kv_bytes_per_token"]),
        }

    @cached_property
    def _interpolators(self) -> list[list[RegularGridInterpolator]]:
        """One vector-valued interpolator per precision tier and spec length."""
        from scipy.interpolate import RegularGridInterpolator

        axes = self.tables.axes
        grid = (axes["kv_budget"], np.log2(axes["batch_size"]), np.log2(axes["prompt_len_bucket"]))
        stacked = np.log(np.stack([self.tables.columns[name] for name in OUTPUTS], axis=-1))
        return [
            [RegularGridInterpolator(grid, stacked[t, s], method="linear") for s in range(stacked.shape[1])]
            for t in range(stacked.shape[0])
        ]
