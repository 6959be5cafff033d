"""The lookup simulator and the traffic generator. ``python tests/simulator/test_simulator.py`` runs it alone."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

if __name__ == "__main__":  # as a script the repository's root is not on the path yet
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import itertools

from inferencegym.errors import InvalidActionError, InvalidConfigError, TableError
from inferencegym.models import MetricsSnapshot, QuantTier, ServeAction, WorkloadState
from simulator.events import loop
from simulator.events.arrays import RUN
from simulator.hardware.tables import load_tables
from simulator.kernel import step
from simulator.kernel.arrays import PARAMS, MetricSpec
from simulator.trace_sim import TraceSimulator
from simulator.workload import WorkloadGenerator

WORKLOAD = WorkloadState(10.0, 256.0, 3, 0, [1.0, 0.0, 0.0], False, "steady")


def action(batch: int = 32, kv: float = 0.8, spec: int = 0, disagg: bool = False, tier: int = 0) -> ServeAction:
    return ServeAction(kv, spec, batch, disagg, QuantTier(tier))


def workload(prompt: float) -> WorkloadState:
    return WorkloadState(
        10.0, prompt, int(np.digitize(prompt, [64, 128, 256, 512, 1024, 2048, 4096])), 0, [1.0, 0, 0], False, "steady"
    )


@pytest.fixture
def simulator() -> TraceSimulator:
    return TraceSimulator(seed=42)


def random_actions(n: int) -> list[ServeAction]:
    rng = np.random.default_rng(7)
    return [
        ServeAction(
            float(rng.uniform(0.1, 1.0)),
            int(rng.choice([0, 1, 2, 4, 8])),
            int(rng.integers(1, 513)),
            bool(rng.integers(2)),
            QuantTier(int(rng.integers(3))),
        )
        for _ in range(n)
    ]


@pytest.mark.parametrize("tried", random_actions(20), ids=str)
def test_random_valid_actions_give_metrics_in_their_ranges(simulator: TraceSimulator, tried: ServeAction) -> None:
    for prompt in (32.0, 96.0, 700.0, 8192.0):
        m = simulator.simulate(tried, workload(prompt))
        assert isinstance(m, MetricsSnapshot)
        assert 1.0 < m.ttft_p50_ms <= m.ttft_p99_ms
        assert 1.0 < m.tpot_ms < 1e5
        assert 0.0 < m.tokens_per_sec < 1e5
        assert 0.0 < m.gpu_memory_gb <= 40.0
        assert m.cost_per_1k > 0.0
        assert 0.0 <= m.spec_accept_rate <= 1.0
        assert m.eviction_events >= 0
        assert m.slo_violations >= 0


@pytest.mark.parametrize("prompt", [64.0, 256.0, 1024.0])
def test_tokens_per_second_rise_strictly_with_batch_size_up_to_saturation(
    simulator: TraceSimulator, prompt: float
) -> None:
    batches = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128]
    tps = [simulator.simulate(action(batch=b, kv=0.9), workload(prompt)).tokens_per_sec for b in batches]
    assert all(b > a for a, b in itertools.pairwise(tps))


def test_the_same_seed_gives_the_same_noise() -> None:
    a, b = TraceSimulator(seed=5), TraceSimulator(seed=5)
    assert [a.simulate(action(), WORKLOAD) for _ in range(5)] == [b.simulate(action(), WORKLOAD) for _ in range(5)]


def test_another_seed_gives_other_noise() -> None:
    assert TraceSimulator(seed=1).simulate(action(), WORKLOAD) != TraceSimulator(seed=2).simulate(action(), WORKLOAD)


def test_reset_seed_restarts_the_noise(simulator: TraceSimulator) -> None:
    first = simulator.simulate(action(), WORKLOAD)
    simulator.simulate(action(), WORKLOAD)
    simulator.reset_seed(42)
    assert simulator.simulate(action(), WORKLOAD) == first


def test_noise_is_five_percent_on_latency_and_absent_from_throughput(simulator: TraceSimulator) -> None:
    seen = [simulator.simulate(action(), WORKLOAD) for _ in range(4000)]
    tpot = np.array([m.tpot_ms for m in seen])
    assert np.std(tpot) / np.mean(tpot) == pytest.approx(0.05, rel=0.06)
    assert len({m.tokens_per_sec for m in seen}) == 1


def test_the_largest_batch_with_the_whole_cache_runs_out_of_memory(simulator: TraceSimulator) -> None:
    m = simulator.simulate(action(batch=512, kv=1.0), WORKLOAD)
    assert m.oom
    assert m.gpu_memory_gb == 40.0
    assert m.slo_violations >= 512


def test_out_of_memory_halves_the_throughput(simulator: TraceSimulator) -> None:
    at = simulator.lookup(np.array([[1.0, 0, 512, 0, 0]]), np.array([256.0]))
    assert simulator.simulate(action(batch=512, kv=1.0), WORKLOAD).tokens_per_sec == pytest.approx(at["tps"][0] / 2)


def test_requests_beyond_the_pool_are_counted_whole(simulator: TraceSimulator) -> None:
    for kv in (0.2, 0.3, 0.4):
        m = simulator.simulate(action(batch=256, kv=kv), WORKLOAD)
        assert m.eviction_events == m.slo_violations > 0
        assert {type(m.eviction_events), type(m.slo_violations)} == {int}


def test_the_naive_default_just_fits_into_memory(simulator: TraceSimulator) -> None:
    m = simulator.simulate(action(batch=32, kv=1.0), WORKLOAD)
    assert not m.oom
    # weights 16.06 + activations 2.15 + 32 sequences 0.048 + the pool of 40 - 16.06 - 2.15 - 0.25
    assert m.gpu_memory_gb == pytest.approx(39.798, abs=1e-9)


def test_lower_precision_frees_memory_for_the_cache(simulator: TraceSimulator) -> None:
    at = simulator.lookup(np.array([[1.0, 0, 32, 0, tier] for tier in (0, 1, 2)]), np.full(3, 256.0))
    assert at["kv_capacity_tokens"][0] < at["kv_capacity_tokens"][1] < at["kv_capacity_tokens"][2]


def test_lookup_at_a_grid_point_is_the_table(simulator: TraceSimulator) -> None:
    t = simulator.tables
    at = simulator.lookup(np.array([[0.5, 4, 64, 0, 1]]), np.array([512.0]))
    for name in ("ttft_p50_ms", "ttft_p99_ms", "tpot_ms", "tps"):
        assert at[name][0] == pytest.approx(t.columns[name][1, 3, 2, 5, 3], rel=1e-12)


def test_between_grid_points_the_logarithm_is_linear(simulator: TraceSimulator) -> None:
    t = simulator.tables
    at = simulator.lookup(np.array([[0.5, 0, np.sqrt(32 * 64), 0, 0]]), np.array([512.0]))
    expected = np.sqrt(t.columns["tps"][0, 0, 2, 4, 3] * t.columns["tps"][0, 0, 2, 5, 3])
    assert at["tps"][0] == pytest.approx(expected, rel=1e-12)


def test_a_batched_lookup_equals_single_lookups(simulator: TraceSimulator) -> None:
    rng = np.random.default_rng(0)
    rows = np.column_stack(
        [
            rng.uniform(0.1, 1, 50),
            rng.choice([0, 1, 2, 4, 8], 50),
            rng.integers(1, 513, 50),
            np.zeros(50),
            rng.integers(0, 3, 50),
        ]
    )
    prompts = rng.uniform(32, 8192, 50)
    together = simulator.lookup(rows, prompts)
    for i in range(50):
        alone = simulator.lookup(rows[i : i + 1], prompts[i : i + 1])
        assert all(alone[name][0] == together[name][i] for name in together)


def test_a_wrong_action_names_field_value_and_range(simulator: TraceSimulator) -> None:
    with pytest.raises(InvalidActionError) as refused:
        simulator.simulate(action(batch=1000), WORKLOAD)
    assert (refused.value.field, refused.value.value) == ("batch_size", 1000)
    assert "1 to 512" in refused.value.allowed


def test_a_missing_table_says_how_to_build_one(tmp_path: Path) -> None:
    with pytest.raises(TableError, match="inferencegym build-table"):
        TraceSimulator(tmp_path / "absent.parquet")


def test_a_file_that_is_not_a_table_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.parquet"
    path.write_bytes(b"PAR1 but not really")
    with pytest.raises(TableError, match=path.name):
        TraceSimulator(path)


def test_the_table_takes_less_than_twenty_megabytes() -> None:
    assert load_tables().nbytes < 20e6


# ---------------------------------------------------------------- traffic


def test_the_generator_gives_another_state_every_second() -> None:
    generator = WorkloadGenerator(1, seed=3)
    states = [generator.reset()] + [generator.step(action()) for _ in range(50)]
    rates = [s.arrival_rate for s in states]
    assert len(set(rates)) == len(rates)


def test_the_same_seed_gives_the_same_traffic() -> None:
    a, b = WorkloadGenerator(2, seed=9), WorkloadGenerator(2, seed=9)
    assert a.reset() == b.reset()
    assert [a.step(action()) for _ in range(30)] == [b.step(action()) for _ in range(30)]


def test_the_queue_takes_arrivals_and_serves_at_most_the_batch() -> None:
    generator = WorkloadGenerator(2, seed=1)
    queue = generator.reset().queue_depth
    for _ in range(100):
        state = generator.step(action(batch=20))
        assert state.queue_depth >= max(0, queue - 20)
        queue = state.queue_depth
    assert queue > 500  # 25 and 80 requests a second against 20


def test_floods_of_the_hard_task_last_fifteen_seconds_in_every_hundred_and_twenty() -> None:
    generator = WorkloadGenerator(3, seed=0)
    generator.reset()
    on = [generator.is_burst_active()]
    for _ in range(479):
        generator.step(action())
        on.append(generator.is_burst_active())
    starts = [t for t in range(1, 480) if on[t] and not on[t - 1]]
    assert np.diff(starts).tolist() == [120] * (len(starts) - 1)
    assert sum(on[starts[0] : starts[0] + 120]) == 15


def test_prompt_lengths_stay_within_each_tasks_bounds() -> None:
    for task, (low, high) in {1: (64, 128), 2: (32, 8192), 3: (32, 8192)}.items():
        generator = WorkloadGenerator(task, seed=4)
        states = [generator.reset()] + [generator.step(action()) for _ in range(60)]
        assert all(low <= s.mean_prompt_len <= high for s in states)


def test_a_negative_seed_is_refused_with_the_range() -> None:
    with pytest.raises(InvalidConfigError) as refused:
        WorkloadGenerator(1, seed=-1)
    assert refused.value.field == "seed"


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q", "-p", "no:cacheprovider"]))


def test_a_kernel_that_was_not_built_again_says_so() -> None:
    """Attributes of a compiled class are fixed when it is built, and the table of arrays is read when it is used."""
    with pytest.raises(TypeError, match="does not know 'busy_slots': run `make build`"):
        vars(step)["Params"]({"busy_slots": 0, **dict.fromkeys(PARAMS, 0)})
    with pytest.raises(TypeError, match="does not know 'busy_slots': run `make build`"):
        vars(loop)["Run"](None, {"busy_slots": 0, **dict.fromkeys(RUN, 0)})


def test_a_metric_must_say_how_seconds_add_up() -> None:
    with pytest.raises(ValueError, match="allowed are 'mean', 'sum', 'max' and 'last'"):
        MetricSpec("B", "slots", "slots in use")
