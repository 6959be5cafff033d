"""Capacity planning from the lookup table: the load that a fleet can take at each setting of its knobs.

The same back-of-an-envelope that an operator does: prefill takes its share of the GPU, decoding gets the rest, Little's
law says how many requests run at once, and those must fit into the batch and the KV pool.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from agents.protocol import FloatArray
from inferencegym.models import SPEC_LENGTHS
from inferencegym.tasks import Burst, TaskSpec
from simulator.hardware.tables import ServingTables
from simulator.load.source import interp_log
from simulator.workload import load_source

MEMORY_MARGIN_GB = 0.05


@dataclass(frozen=True, slots=True)
class Setting:
    """Discrete knobs, chosen together: precision, speculation and where prefill runs."""

    tier: int
    spec_length: int
    disagg: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """A setting with the KV share and batch size that fit, and the load (requests/s) that the fleet can take."""

    setting: Setting
    kv_budget: float
    batch_size: float
    capacity_rps: float

    def row(self) -> FloatArray:
        """The five knobs."""
        s = self.setting
        return np.array([self.kv_budget, s.spec_length, self.batch_size, float(s.disagg), s.tier])


class CapacityPlanner:
    """Plans one task on one table for a mix of request classes."""

    def __init__(self, task: TaskSpec, tables: ServingTables, mix: FloatArray) -> None:
        stats = load_source(task, tables).stats
        self._tables = tables
        self._fleet = task.fleet
        self._limit_gb = min(task.memory_hard_limit_gb or np.inf, float(tables.meta["memory_budget_gb"]))
        share = mix / mix.sum()
        self._prompt = float(stats.prompt_mean @ share)
        self._output = float(stats.output_cdf_tokens.mean(axis=1) @ share)
        self._work_ms = share @ stats.work_mean_ms
        self._accept = float((1.0 - stats.complexity_penalty) @ share) * task.fleet.base_accept_rate / 0.65

    def plan(self, setting: Setting) -> Plan:
        """The largest batch and KV pool that fit a setting, and its capacity."""
        kv, batch = self._fit(setting)
        return Plan(setting, kv, batch, self._capacity_rps(setting, batch))

    def pool_share(self, plan: Plan, burst: Burst) -> float:
        """Share of the KV pool that a burst of these requests takes by its end, at the plan's setting.

        As many as come or find a slot, each with its prompt and what it has written by then, at most half its output.
        """
        memory = self._tables.meta["memory_gb"]
        s = plan.setting
        draft = float(memory["speculation_gb"]) if s.spec_length else 0.0
        taken = float(self._tables.weights_gb[s.tier]) + float(memory["activations_gb"]) + float(memory["workspace_gb"])
        free_gb = float(self._tables.meta["memory_budget_gb"]) - taken - draft
        running = min(plan.batch_size, burst.rate_rps * burst.duration_steps / self._fleet.n_replicas)
        written = min(self._output, 1000.0 * burst.duration_steps / self._tpot_ms(s, running))
        tokens = running * (self._prompt + 0.5 * written)
        return tokens * float(self._tables.meta["kv_bytes_per_token"]) / 1e9 / free_gb

    def _fit(self, setting: Setting) -> tuple[float, float]:
        memory = self._tables.meta["memory_gb"]
        draft = float(memory["speculation_gb"]) if setting.spec_length else 0.0
        fixed = float(self._tables.weights_gb[setting.tier]) + float(memory["activations_gb"]) + draft
        free = float(self._tables.meta["memory_budget_gb"]) - fixed - float(memory["workspace_gb"])
        per_sequence = float(memory["per_sequence_gb"])
        per_request = (self._prompt + 0.5 * self._output) * float(self._tables.meta["kv_bytes_per_token"]) / 1e9
        room = self._limit_gb - MEMORY_MARGIN_GB - fixed
        # Every running request takes a slot's workspace and its share of the pool.
        batch = min(512.0, max(1.0, np.floor(room / (per_sequence + per_request))))
        # Requests come and go: leave slots to spare, the pool decides.
        batch = min(512.0, 2.0 * batch)
        kv = min(1.0, max(0.1, (room - per_sequence * batch) / free))
        return float(kv), float(batch)

    def _capacity_rps(self, setting: Setting, batch: float) -> float:
        """Highest rate at which prefill leaves decoding enough time to keep up with ``batch`` running requests."""
        prefill_s = float(self._work_ms[setting.tier]) / 1000.0
        decode_s = self._output * self._tpot_ms(setting, batch) / 1000.0 / batch
        busy_s = max(prefill_s, decode_s) if setting.disagg else prefill_s + decode_s
        return self._fleet.n_replicas / busy_s

    def _tpot_ms(self, setting: Setting, running: float) -> float:
        k = SPEC_LENGTHS.index(setting.spec_length)
        axes = self._tables.axes
        context = np.array([self._prompt + 0.5 * self._output])
        by_batch = np.array(
            [interp_log(context, axes["prompt_len_bucket"], row)[0] for row in self._tables.decode_ms[setting.tier, k]]
        )
        iteration = float(interp_log(np.array([running]), axes["batch_size"], by_batch)[0])
        return iteration / (1.0 + (float(self._tables.spec_tokens[k]) - 1.0) * self._accept)
