"""A policy's recommendation in the terms of a serving engine.

``batch_size`` -> ``max-num-seqs``
    The largest value in use for at least 1 % of the time: the engine's bound, which a controller may lower.
``kv_budget`` -> ``gpu-memory-utilization``
    Memory that the replica takes (weights, activations, sequences, KV pool) over what the card reports.
``spec_length`` -> ``speculative-config``
    ``num_speculative_tokens`` is the largest in use; ``num_speculative_tokens_per_batch_size`` what the policy drafted
    at each number of running requests, and where it never ran, what the lookup table finds fastest.
``quant_tier`` -> ``quantization``, ``dtype``
    The precision in use for most of the time: FP16 none, INT8 a W8A8 checkpoint (``compressed-tensors``), INT4 a W4A16
    one (``awq_marlin``).
``prefill_disagg`` -> ``kv-transfer-config``
    Prefill instances of their own if that was on for most of the time.

``max-num-batched-tokens`` and prefix caching are those of the modelled engine. An engine reads its flags at the start:
where a policy changes precision or placement, the most used one is exported and the rest is told in a comment.
"""

from __future__ import annotations

import json
from typing import Any, Final

import numpy as np

from agents.protocol import FloatArray
from agents.shadow.compare import PolicyOutcome, ShadowReport
from inferencegym.errors import InvalidConfigError
from inferencegym.models import SPEC_LENGTHS, QuantTier
from simulator.hardware.operators import Hardware, hardware
from simulator.tables import ServingTables

BATCH_RANGES: Final = ((1, 4), (5, 8), (9, 16), (17, 32), (33, 64), (65, 128), (129, 256), (257, 512))
MINIMUM_SHARE: Final = 0.01
"""Share of the time below which a setting is passing through, not in use."""
_QUANTIZATION: Final = {QuantTier.INT8: "compressed-tensors", QuantTier.INT4: "awq_marlin"}
DRAFT_MODEL: Final = "YOUR-EAGLE-HEAD"


def recommendation(report: ShadowReport, tables: ServingTables, policy: str | None = None) -> dict[str, Any]:
    """Engine-neutral summary of the settings of a policy (default: the best); keys as in the module's table."""
    outcome = next((o for o in report.outcomes if o.policy == policy), None) if policy else report.best()
    if outcome is None:
        raise InvalidConfigError(
            f"policy {policy!r} is not in the report: one of {[o.policy for o in report.outcomes]}", "policy"
        )
    line = {name: np.array(values) for name, values in outcome.timeline.items()}
    tier = QuantTier(int(_most_used(line["quant_tier"])))
    per_replica = line["running_requests"] / report.n_replicas
    mean_prompt = float(report.log["prompt_tokens_p50"])
    most = int(max(_in_use(line["batch_size"])))
    schedule, sources = draft_schedule(line["spec_length"], per_replica, tables, tier, mean_prompt, most)
    return {
        "policy": outcome.policy,
        "replicas": report.n_replicas,
        "max_num_seqs": most,
        "gpu_memory_utilization": _utilisation(outcome, hardware(report.hardware)),
        "quant_tier": tier.name,
        "num_speculative_tokens": max(schedule.values(), default=0),
        "num_speculative_tokens_per_batch_size": schedule,
        "schedule_sources": sources,
        "disaggregated_prefill": bool(_most_used(line["prefill_disagg"])),
        "max_num_batched_tokens": int(tables.meta["max_batched_tokens"]),
        "prefix_caching": report.log["reused_share"] > 0,
        "changes_precision": len(_in_use(line["quant_tier"])) > 1,
        "changes_placement": len(_in_use(line["prefill_disagg"])) > 1,
        "batch_sizes_in_use": [int(b) for b in _in_use(line["batch_size"])],
    }


def draft_schedule(
    spec_length: FloatArray,
    running: FloatArray,
    tables: ServingTables,
    tier: QuantTier,
    context_tokens: float,
    max_num_seqs: int = BATCH_RANGES[-1][1],
) -> tuple[dict[str, int], dict[str, str]]:
    """Draft tokens by running requests per replica, as vLLM's ranges, and where each came from.

    Empty if the policy never drafts. Ranges end at ``max_num_seqs``; neighbours with the same length are merged.
    """
    if not (np.array(_in_use(spec_length)) > 0).any():
        return {}, {}
    found: list[tuple[int, int, int, str]] = []
    for low, last in BATCH_RANGES:
        if low > max_num_seqs:
            break
        high = min(last, max_num_seqs)
        here = (running >= low - 0.5) & (running < high + 0.5)
        if here.mean() >= MINIMUM_SHARE:
            k, source = int(_most_used(spec_length[here])), "policy"
        else:
            k, source = fastest_draft(tables, tier, (low * high) ** 0.5, context_tokens), "table"
        if found and found[-1][2] == k and found[-1][3] == source:
            found[-1] = (found[-1][0], high, k, source)
        else:
            found.append((low, high, k, source))
    names = [f"{low}-{high}" for low, high, _, _ in found]
    return (
        {name: k for name, (_, _, k, _) in zip(names, found, strict=True)},
        {name: source for name, (_, _, _, source) in zip(names, found, strict=True)},
    )


def fastest_draft(tables: ServingTables, tier: QuantTier, running: float, context_tokens: float) -> int:
    """The draft length with the least time per token at the nearest cells of the lookup table."""
    batch = int(np.argmin(np.abs(np.log(tables.axes["batch_size"] / running))))
    context = int(np.argmin(np.abs(np.log(tables.axes["prompt_len_bucket"] / max(context_tokens, 1.0)))))
    per_token = tables.decode_ms[tier.value, :, batch, context] / tables.spec_tokens
    return int(SPEC_LENGTHS[int(np.argmin(per_token))])


def vllm_config(
    report: ShadowReport, tables: ServingTables, policy: str | None = None, draft_model: str = DRAFT_MODEL
) -> str:
    """The recommendation as a file for ``vllm serve MODEL --config FILE`` (YAML)."""
    r = recommendation(report, tables, policy)
    lines = _header(report, r)
    lines += [
        f"max-num-seqs: {r['max_num_seqs']}",
        f"gpu-memory-utilization: {r['gpu_memory_utilization']:.2f}",
        f"max-num-batched-tokens: {r['max_num_batched_tokens']}",
    ]
    if r["prefix_caching"]:
        lines.append("enable-prefix-caching: true")
    tier = QuantTier[r["quant_tier"]]
    if tier in _QUANTIZATION:
        lines += [
            f"# {tier.name}: serve a {'W8A8' if tier is QuantTier.INT8 else 'W4A16'} checkpoint of the model.",
            f"quantization: {_QUANTIZATION[tier]}",
        ]
    else:
        lines.append("dtype: bfloat16")
    schedule = r["num_speculative_tokens_per_batch_size"]
    if schedule:
        told = ", ".join(f"{name} by the {source}" for name, source in r["schedule_sources"].items())
        config = {
            "method": "eagle",
            "model": draft_model,
            "num_speculative_tokens": r["num_speculative_tokens"],
            "num_speculative_tokens_per_batch_size": schedule,
        }
        lines += [f"# Draft tokens by running requests: {told}.", f"speculative-config: '{json.dumps(config)}'"]
    if r["disaggregated_prefill"]:
        lines += [
            "# Prefill on instances of its own: one more per replica, behind a router that sends prompts there first.",
            "kv-transfer-config: '" + json.dumps({"kv_connector": "NixlConnector", "kv_role": "kv_both"}) + "'",
        ]
    return "\n".join(lines) + "\n"


def _header(report: ShadowReport, r: dict[str, Any]) -> list[str]:
    log = report.log
    lines = [
        f"# What the policy {r['policy']!r} set on {log['requests']} recorded requests ({log['rate_rps']:.2f}/s).",
        f"# Replicas: {r['replicas']}.",
        "# Simulated; measure before you rely on it. vllm serve MODEL --config THIS-FILE",
    ]
    if len(r["batch_sizes_in_use"]) > 1:
        bounds = _listed(r["batch_sizes_in_use"])
        lines.append(f"# The policy moves the batch bound ({bounds}); the largest is the engine's.")
    if r["changes_precision"]:
        lines.append("# The policy changes precision on the way; the most used one is below.")
    if r["changes_placement"]:
        lines.append("# The policy turns disaggregated prefill on and off; the more used is below.")
    return lines


def _listed(values: list[int]) -> str:
    return ", ".join(map(str, values)) if len(values) <= 6 else f"{values[0]} to {values[-1]} in {len(values)} values"


def _most_used(values: FloatArray) -> float:
    kinds, counts = np.unique(values, return_counts=True)
    return float(kinds[int(np.argmax(counts))])


def _in_use(values: FloatArray) -> list[float]:
    """Values in use for more than a passing moment, ascending; at least the most used one."""
    kinds, counts = np.unique(values, return_counts=True)
    kept = kinds[counts >= MINIMUM_SHARE * len(values)]
    return [float(v) for v in kept] if len(kept) else [_most_used(values)]


def _utilisation(outcome: PolicyOutcome, card: Hardware) -> float:
    """Share of the card's memory that the replica takes, at most 0.98."""
    return min(0.98, outcome.peak_memory_gb / card.memory_reported_gb)
