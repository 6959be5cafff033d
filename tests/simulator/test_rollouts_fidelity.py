"""Agent sessions in the simulator against the recorded counts of vLLM's own scheduler and block pool."""

from __future__ import annotations

from benchmarks.fidelity.rollouts import against_scheduler


def test_sessions_compute_and_find_in_the_cache_what_they_do_in_vllms_scheduler() -> None:
    pairs = against_scheduler()
    assert len(pairs) == 16
    for vllm, simulated in pairs:
        where = vllm["workload"], vllm["cap"]
        assert simulated["prompt_tokens"] == vllm["prompt_tokens"], where
        assert abs(simulated["computed_tokens"] / vllm["computed_tokens"] - 1.0) <= 0.005, where
        assert abs(simulated["hit_tokens"] - vllm["hit_tokens"]) / vllm["prompt_tokens"] <= 0.005, where
