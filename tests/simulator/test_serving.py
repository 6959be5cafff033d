"""Laws of the serving dynamics, over every registered task."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.interpolate import RegularGridInterpolator

import simulator.kernel.serving as serving
import simulator.kernel.step as compiled
from agents.episodes import run_episodes
from agents.registry import make_agent
from env.batch import ServingBatch
from inferencegym.errors import EpisodeDoneError, NotResetError
from inferencegym.tasks import get_task, list_tasks, parse_task
from scripts import kernel_types
from setup import parts, whole_source
from simulator.hardware.tables import load_tables
from simulator.kernel import operators, pace, records, ttft
from simulator.kernel.arrays import KNOBS, LOAD, METRICS, PARAMS, STATE
from simulator.kernel.class_tables import length_integrals
from simulator.kernel.serving import params_of
from simulator.load.synthetic import length_quantiles
from simulator.workload import load_source, load_statistics

TASKS = [t.task_id for t in list_tasks(include_recorded=True)]
ACTION = st.tuples(
    st.floats(0.1, 1.0), st.sampled_from([0, 1, 2, 4, 8]), st.integers(1, 512), st.integers(0, 1), st.integers(0, 2)
)


def batch_of(task_id: Any, n_rows: int, **options: Any) -> ServingBatch:
    return ServingBatch(get_task(task_id), n_rows, **options)


def random_actions(rng: np.random.Generator, n: int) -> np.ndarray:
    return np.column_stack(
        [
            rng.uniform(0.1, 1.0, n),
            rng.choice([0, 1, 2, 4, 8], n),
            rng.integers(1, 513, n),
            rng.integers(0, 2, n),
            rng.integers(0, 3, n),
        ]
    ).astype(float)


@pytest.mark.parametrize("task_id", TASKS)
def test_requests_are_conserved(task_id: Any) -> None:
    batch = batch_of(task_id, 32)
    batch.reset(range(32))
    rng = np.random.default_rng(0)
    total = dict.fromkeys(("admitted", "completed", "rejected"), np.zeros(32))
    for t in range(150):
        batch.step(random_actions(rng, 32))
        total = {name: value + batch.metric[name] for name, value in total.items()}
        state = batch.fleet.state.rows
        arrived = batch.fleet.arrivals[:, : t + 1].sum(axis=(1, 2))
        queue, running = state["queue"].sum(axis=1), state["in_flight"].sum(axis=1)
        preempted = state["preempted"].sum(axis=1)
        assert np.allclose(arrived, total["admitted"] + total["rejected"] + queue, rtol=1e-9, atol=1e-6)
        assert np.allclose(total["admitted"], total["completed"] + running + preempted, rtol=1e-9, atol=1e-6)
        assert (queue <= batch.task.fleet.queue_limit + 1e-9).all()
        assert (batch.metric["completed"] > -1e-6).all()


@pytest.mark.parametrize("task_id", TASKS)
def test_tokens_are_those_of_the_requests_that_were_admitted(task_id: Any) -> None:
    """No request writes more than its output, even if it could gain many more tokens in a second.

    Pools are large and replicas do not restart, so that no request is preempted and resumed in another cohort.
    """
    batch = batch_of(task_id, 8)
    batch.reset(range(8))
    fleet, rng = batch.fleet, np.random.default_rng(4)
    lengths = fleet.params.stats.output_cdf_tokens

    def written(row: int, cls: int) -> float:
        """Mean of min(position, output) over the positions of each second's admissions and over all outputs."""
        total = 0.0
        for step, admitted in enumerate(admissions[:, row, cls]):
            low, high = progress[-1][row] - progress[step + 1][row], progress[-1][row] - progress[step][row]
            if admitted > 0.0:
                until = [
                    np.where(y < lengths[cls], 0.5 * y * y, lengths[cls] * (y - 0.5 * lengths[cls]))
                    for y in (low, high)
                ]
                total += admitted * float((until[1] - until[0]).mean()) / (high - low)
        return total

    seen, progress, tokens = [], [np.zeros(8)], np.zeros(8)
    for t in range(160):
        if t % 4 == 0:
            actions = random_actions(rng, 8)
            actions[:, [0, 2, 3, 4]] = 1.0, 16.0, 0.0, 0.0
        batch.step(actions)
        assert not fleet.state.rows["preempted"].any()
        gain = fleet.state.rows["gain_tokens"].copy()
        seen.append(fleet.state.rows["density"][:, :, t] * gain[:, None])
        progress.append(progress[-1] + gain)
        assert (batch.metric["tokens_per_sec"] >= 0.0).all()
        tokens += batch.metric["tokens_per_sec"]
    admissions = np.array(seen)
    expected = [sum(written(row, cls) for cls in range(fleet.params.n_classes)) for row in range(8)]
    assert tokens == pytest.approx(expected, rel=2e-3)


# Pools of larger cards hold most requests of a minute, so that too few are preempted for a test.
@pytest.mark.parametrize("task_id", [task_id for task_id in TASKS if get_task(task_id).hardware is None])
def test_preempted_requests_run_on_and_write_the_rest_of_their_outputs(task_id: Any) -> None:
    """For a minute pools shrink and replicas restart: a request is preempted once on average. Then arrivals stop.

    Requests preempted together resume from their mean position, so some outputs end a little early.
    """
    batch = batch_of(task_id, 8)
    batch.reset(range(8))
    fleet, rng = batch.fleet, np.random.default_rng(6)
    fleet.arrivals[:, 60:] = 0.0
    tokens, preempted, admitted = np.zeros(8), np.zeros(8), np.zeros((8, fleet.params.n_classes))
    for t in range(fleet.n_steps):
        actions = np.tile([1.0, 0.0, 256.0, 0.0, 0.0], (8, 1))
        if t < 60 and t % 5 == 4:
            actions[:, 0] = rng.uniform(0.1, 1.0, 8)
            actions[:, 4] = 2.0 if t % 15 == 14 else 0.0
        batch.step(actions)
        state = fleet.state.rows
        admitted += state["density"][:, :, t] * state["gain_tokens"][:, None]
        tokens += batch.metric["tokens_per_sec"]
        preempted += batch.metric["eviction_events"]
    busy = admitted.sum(axis=1) > 100.0
    assert busy.any()
    assert (preempted[busy] > 30.0).all()
    assert (state["preempted"].sum(axis=1) < 1.0).all()
    assert tokens[busy] == pytest.approx((admitted @ fleet.params.stats.output_cdf_tokens.mean(axis=1))[busy], rel=0.15)


@pytest.mark.parametrize("task_id", TASKS)
def test_where_nobody_is_admitted_ttft_is_the_wait_of_the_oldest_request(task_id: Any) -> None:
    """If all arrivals of a second have left the queue, rounding may leave 1e-13 of a request, which does not count."""
    batch = batch_of(task_id, 64)
    batch.reset(range(64))
    fleet, state = batch.fleet, batch.fleet.state.rows
    rng = np.random.default_rng(0)
    held_up = 0
    for t in range(180):
        before = state["waiting"][:, :, : t + 1].copy()
        batch.write_knobs(random_actions(rng, 64))
        first_token_ms = np.zeros(64)
        for row in range(64):
            batch.advance(row, row + 1)
            # an intermediate value, which no metric shows if no request is admitted
            first_token_ms[row] = fleet._kernel.idle[-1].first_token.p50_ms[0]  # noqa: SLF001
        before[:, :, t] = fleet.arrivals[:, t]
        waits = before > 1e-6
        for row in np.flatnonzero((batch.metric["admitted"] == 0.0) & waits.any(axis=(1, 2))):
            age_ms = 1000.0 * (t + 1 - waits[row].any(axis=0).argmax())
            # once admitted, it takes as long as a request of the first class
            expected_ms = age_ms + first_token_ms[row]
            assert batch.metric["ttft_p50_ms"][row] == pytest.approx(fleet.noise[row, t, 0] * expected_ms, rel=1e-9)
            held_up += 1
    assert held_up > 20


@pytest.mark.parametrize("task_id", TASKS)
def test_waiting_cohorts_add_up_to_the_queue(task_id: Any) -> None:
    """Even tiny amounts, as admitted by a fleet whose replicas all restart at once: otherwise they would add up."""
    batch = batch_of(task_id, 128)
    batch.reset(range(128))
    rng = np.random.default_rng(0)
    for t in range(180):
        if t % 6 == 0:
            actions = random_actions(rng, 128)
        batch.step(actions)
        state = batch.fleet.state.rows
        assert np.allclose(state["waiting"].sum(axis=2), state["queue"], rtol=0.0, atol=1e-10)


@pytest.mark.parametrize("task_id", TASKS)
def test_a_row_of_a_batch_equals_the_same_episode_alone(task_id: Any) -> None:
    rng = np.random.default_rng(2)
    actions = [random_actions(rng, 5) for _ in range(60)]
    together = batch_of(task_id, 5)
    together.reset([11, 12, 13, 14, 15])
    alone = batch_of(task_id, 1)
    alone.reset([13])
    for a in actions:
        together.step(a)
        alone.step(a[2:3])
        assert together.reward[2] == alone.reward[0]
        assert np.array_equal(together.observation[2], alone.observation[0])
        assert all(together.metric[name][2] == alone.metric[name][0] for name in METRICS)


@pytest.mark.parametrize("every", [True, False])
def test_several_steps_at_once_are_the_same_steps_one_by_one(every: bool) -> None:
    n_rows, n_steps = 70, 3  # more rows than one block takes
    together, apart = (batch_of(3, n_rows) for _ in range(2))
    actions = np.random.default_rng(4).uniform([0.1, 0, 1, 0, 0], [1, 8, 512, 1, 2], (n_steps, n_rows, 5))
    together.reset(range(n_rows))
    apart.reset(range(n_rows))
    observations, rewards = np.zeros((n_steps if every else 1, n_rows, 14)), np.zeros((n_steps, n_rows))
    together.step_many(actions, observations, rewards)
    for k in range(n_steps):
        seen = apart.step(actions[k])
        np.testing.assert_array_equal(rewards[k], apart.reward)
        if every:
            np.testing.assert_array_equal(observations[k], seen)
    np.testing.assert_array_equal(observations[-1], apart.observation)
    assert (together.time == n_steps).all()


def test_rows_that_share_a_workload_equal_rows_with_their_own_copy() -> None:
    shared, own = batch_of(3, 4, n_loads=2), batch_of(3, 4)
    shared.reset([5, 6])
    own.reset([5, 6, 5, 6])
    rng = np.random.default_rng(3)
    for _ in range(40):
        a = random_actions(rng, 4)
        assert np.array_equal(shared.step(a), own.step(a))


def test_resetting_some_rows_leaves_the_others_alone() -> None:
    batch, reference = batch_of(2, 3), batch_of(2, 3)
    for b in (batch, reference):
        b.reset([1, 2, 3])
    rng = np.random.default_rng(4)
    for _ in range(20):
        a = random_actions(rng, 3)
        batch.step(a)
        reference.step(a)
    batch.reset([9], rows=[1])
    fresh = batch_of(2, 1)
    fresh.reset([9])
    for _ in range(20):
        a = random_actions(rng, 3)
        batch.step(a)
        reference.step(a)
        fresh.step(a[1:2])
        assert np.array_equal(batch.observation[[0, 2]], reference.observation[[0, 2]])
        assert np.array_equal(batch.observation[1], fresh.observation[0])


def test_a_batch_refuses_steps_before_reset_and_after_the_end() -> None:
    batch = batch_of(1, 2, config=get_task(1).config({"episode_length": 3}))
    naive = np.tile([1.0, 0, 32, 0, 0], (2, 1))
    with pytest.raises(NotResetError):
        batch.step(naive)
    batch.reset([0, 1])
    for _ in range(3):
        batch.step(naive)
    with pytest.raises(EpisodeDoneError):
        batch.step(naive)


@settings(max_examples=25)
@given(
    task_id=st.sampled_from(TASKS), seed=st.integers(0, 2**63 - 1), actions=st.lists(ACTION, min_size=1, max_size=25)
)
def test_any_seed_and_actions_replay_to_the_last_bit(task_id: Any, seed: int, actions: list[tuple[float, ...]]) -> None:
    seen = []
    for _ in range(2):
        batch = batch_of(task_id, 1)
        batch.reset([seed])
        run = []
        for a in actions:
            batch.step(np.array([a], dtype=float))
            run.append((batch.reward.copy(), batch.fleet.metrics.copy()))
        seen.append(run)
    for (r1, m1), (r2, m2) in zip(*seen, strict=True):
        assert np.array_equal(r1, r2)
        assert np.array_equal(m1, m2)
        assert np.isfinite(m1).all()


def test_offered_load_statistics_agree_with_the_generator() -> None:
    task = get_task(3)
    tables = load_tables()
    source = load_source(task, tables)
    load = source.draw([17], 200).episode(0)
    batch = batch_of(3, 1)
    batch.reset([17])
    for t in range(150):
        batch.step(np.array([[0.8, 0, 64, 0, 0]]))
        rate, prompt, shares = load_statistics(source, load, t)
        o = batch.observation[0]
        assert o[2] == pytest.approx(min(rate, 1000.0), rel=1e-9)
        assert o[1] == pytest.approx(np.clip(prompt, 32, 8192), rel=1e-9)
        assert o[9:12] == pytest.approx(shares, abs=1e-9)


def test_lower_precision_decodes_faster_and_disaggregation_keeps_tpot_low() -> None:
    batch = batch_of(3, 4)
    batch.reset([3] * 4)
    knobs = np.array([[0.8, 0, 96, 0, 0], [0.8, 0, 96, 0, 1], [0.8, 0, 96, 0, 2], [0.8, 0, 96, 1, 0]])
    tpot = np.zeros(4)
    for _ in range(50):
        batch.step(knobs)
        tpot += batch.metric["tpot_ms"]
    assert tpot[1] < tpot[0]
    assert tpot[3] < tpot[0]


def test_changing_the_precision_takes_replicas_out_of_service_for_a_while() -> None:
    batch = batch_of(3, 2)
    batch.reset([3, 3])
    steady = np.array([[0.8, 0, 64, 0, 0], [0.8, 0, 64, 0, 0]])
    changed = np.array([[0.8, 0, 64, 0, 0], [0.8, 0, 64, 0, 1]])
    for _ in range(20):
        batch.step(steady)
    up = []
    for _ in range(60):
        batch.step(changed)
        up.append(batch.fleet.state.rows["replicas_up"].copy())
    fleet = get_task(3).fleet
    weights = load_tables().weights_gb
    reload_s = fleet.restart_s + weights[1] / fleet.load_gb_per_s
    lost = sum(fleet.n_replicas - u[1] for u in up)
    assert lost == pytest.approx(fleet.n_replicas * reload_s, rel=1e-6)  # one replica at a time, each for reload_s
    assert all(u[0] == fleet.n_replicas for u in up)


def test_taking_a_change_back_needs_no_more_time_than_it_took() -> None:
    batch = batch_of(3, 1)
    batch.reset([3])
    a, b = np.array([[0.8, 0, 64, 0, 0]]), np.array([[0.8, 0, 64, 0, 1]])
    for _ in range(5):
        batch.step(a)
    for _ in range(3):
        batch.step(b)
    restarted = float(batch.fleet.state.rows["rollout_share"][0])
    batch.step(a)
    assert float(batch.fleet.state.rows["rollout_share"][0]) > 1.0 - restarted


def test_length_integrals_give_the_mean_length_at_the_end() -> None:
    lengths = np.array([[10.0, 20.0, 30.0]])
    table = length_integrals(lengths, 62)
    assert table[0, -1, 0] == pytest.approx(20.0)
    assert table[0, -1, 1] == pytest.approx((100 + 400 + 900) / 6)
    assert table[0, 20, 0] == pytest.approx((10 + 10 + 10) / 3)  # x = 10: every request has gained ten tokens


def test_a_lognormal_length_has_the_mean_that_its_task_states() -> None:
    entry = {
        "name": "x",
        "arrival_rate_rps": 1,
        "prompt_len_dist": "uniform",
        "slo_target_ms": 100,
        "output_mean_tokens": [250],
        "output_cv": 0.6,
    }
    quantiles = length_quantiles(parse_task("x", entry).classes[0].output)
    assert quantiles.mean() == pytest.approx(250, rel=0.005)
    assert quantiles.std() == pytest.approx(150, rel=0.03)


def test_decode_time_in_the_dynamics_equals_scipys_interpolator() -> None:
    tables = load_tables()
    params = params_of(get_task(3), tables, 1.0)
    constants = records.Params({**params.constants, "record_rows": 0})
    grid = (tables.iteration_batches, tables.axes["prompt_len_bucket"])
    rng = np.random.default_rng(0)
    for tier in range(3):
        for spec in range(5):
            reference = RegularGridInterpolator(grid, tables.iteration_ms[tier, spec])
            points = np.column_stack([rng.uniform(1, 512, 40), rng.uniform(64, 8192, 40)])
            ours = []
            for n, context in points.tolist():
                i = operators.cell(grid[0], len(grid[0]), n, 0)
                j = operators.cell(grid[1], len(grid[1]), context, 0)
                ours.append(operators.decode_ms(constants, tier, spec, i, j, n, context))
            assert np.allclose(ours, reference(points), rtol=1e-9)


def interpreted_kernel() -> ModuleType:
    """The kernel's source, not compiled. The modules beside it are plain Python however they are imported."""
    source = Path(serving.__file__).with_name("step.py")
    spec = importlib.util.spec_from_file_location("interpreted_kernel", source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("task_id", TASKS)
def test_every_step_has_one_pace_and_it_is_found(task_id: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another sweep changes the gain by less than 1e-3, whatever the agent does, and there is no other solution."""
    kernel = interpreted_kernel()
    solve, next_gain, at = pace.solve, pace.next_gain, np.linspace(-4.0, 4.0, 16)
    changes, solutions, sweeps = [], [], []

    def counted(*arguments: Any) -> float:
        sweeps[-1] += 1
        return float(next_gain(*arguments))

    def watched(p: Any, knobs: Any, s: Any, x: Any, m: Any, b: int, t: int) -> float:
        sweeps.append(0)
        gain: float = solve(p, knobs, s, x, m, b, t)
        if t % 20 == 5 and gain > 1e-6:  # a fleet that is down makes no progress, whatever its requests could gain
            next_gains = [next_gain(p, knobs, s, x, m, b, t, gain * np.exp(y)) for y in at]
            excess = np.log(np.array(next_gains) / gain) - at
            solutions.append(int((np.diff(np.sign(excess)) != 0.0).sum()))
        changes.append(abs(next_gain(p, knobs, s, x, m, b, t, gain) / gain - 1.0))
        return gain

    monkeypatch.setattr(kernel, "solve", watched)
    monkeypatch.setattr(pace, "next_gain", counted)
    monkeypatch.setattr(serving, "ServingKernel", kernel.ServingKernel)
    task = get_task(task_id)
    # Load that is never refused, knobs that follow the load, and knobs that jump each second.
    for name in ("naive", "heuristic", "random"):
        run_episodes(task, make_agent(name, task), [10_000])
    assert max(changes) < 1e-3
    assert set(solutions) == {1}
    assert np.mean(sweeps) < 4.0
    assert max(sweeps) <= 20


@given(st.integers(0, 2**32 - 1))
def test_a_quantile_of_ttft_is_where_the_weight_below_reaches_its_share(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 9))
    lo = rng.uniform(-500.0, 2000.0, n)
    width = np.where(rng.random(n) < 0.3, 0.0, rng.exponential(400.0, n))
    weight, base = rng.exponential(1.0, n), rng.choice([30.0, 200.0, 900.0], n)
    scratch = records.Scratch({"C": 1, "E": 2, "K": n})
    scratch.pieces = records.Pieces(
        {
            "n": n,
            "requests": weight,
            "wait_ms": np.column_stack([lo, lo + width]),
            "after_ms": np.column_stack([base, base + 50.0]),
        }
    )

    def weight_below(x: float) -> float:
        wait = x - base
        inside = np.where(width > 0.0, (wait - lo) / np.where(width > 0.0, width, 1.0), wait >= lo)
        return float((weight * np.where(wait >= 0.0, np.clip(inside, 0.0, 1.0), 0.0)).sum())

    for q in (0.01, 0.5, 0.99):
        found = ttft.ttft_quantile(scratch, q, 0)
        assert weight_below(found * (1.0 + 1e-9)) >= q * weight.sum() * (1.0 - 1e-9)
        assert weight_below(found * (1.0 - 1e-9)) <= q * weight.sum() * (1.0 + 1e-6)


def test_the_kernel_is_compiled_and_the_interpreted_source_gives_the_same_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not str(compiled.__file__).endswith(".py"), "run `make install`: the serving kernel is not compiled"
    batch = batch_of(3, 2)
    monkeypatch.setattr(serving, "ServingKernel", interpreted_kernel().ServingKernel)
    other = batch_of(3, 2)
    batch.reset([1, 2])
    other.reset([1, 2])
    rng = np.random.default_rng(6)
    for _ in range(75):
        a = random_actions(rng, 2)
        batch.step(a)
        other.step(a)
        assert np.allclose(batch.fleet.metrics, other.fleet.metrics, rtol=1e-12, atol=1e-12)


def test_rows_stepped_by_several_threads_equal_rows_stepped_by_one() -> None:
    alone, shared = batch_of(3, 40), batch_of(3, 40)
    alone.reset(range(40))
    shared.reset(range(40))
    rng = np.random.default_rng(7)
    with ThreadPoolExecutor(max_workers=4) as threads:
        for _ in range(40):
            a = random_actions(rng, 40)
            alone.step(a)
            shared.write_knobs(a)
            list(threads.map(shared.advance, range(0, 40, 10), range(10, 50, 10)))
            assert np.array_equal(alone.fleet.metrics, shared.fleet.metrics)


SCRATCH = {name: getattr(records, kind).table for name, kind in records.Scratch.__annotations__.items()}
GROUPS = {"p": PARAMS, "load": LOAD, "knobs": KNOBS, "s": STATE, "m": METRICS}
GROUPS |= {f"x.{name}": table for name, table in SCRATCH.items()}


def test_the_kernel_uses_every_array_and_constant_that_it_is_given() -> None:
    """Except arrays that it only writes for others to read."""
    used = set(re.findall(r"\b(?:x\.)?\w+\.\w+\b", whole_source(kernel_types.SOURCE)))
    assert {f"{group}.{name}" for group, names in GROUPS.items() for name in names} - used == set()


def written(source: str) -> set[str]:
    """Assignment targets in a source text: ``s.queue``, ``x.batch.admitted``, without indices."""
    targets: list[ast.expr] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign):
            targets += [part for target in node.targets for part in getattr(target, "elts", [target])]
        elif isinstance(node, ast.AugAssign):
            targets.append(node.target)
    return {ast.unparse(target.value if isinstance(target, ast.Subscript) else target) for target in targets}


def test_scratch_is_written_by_the_module_of_its_topic_alone() -> None:
    writers: dict[str, set[str]] = {}
    for path in parts(kernel_types.SOURCE):
        for name in written(path.read_text()):
            if name.startswith("x."):
                writers.setdefault(name.split(".")[1], set()).add(path.stem)
    assert set(writers) == set(SCRATCH)
    assert {name: modules for name, modules in writers.items() if len(modules) > 1} == {}


def test_the_fixed_point_of_a_step_writes_no_state_and_no_metric() -> None:
    functions = {
        node.name: ast.unparse(node)
        for node in ast.parse(whole_source(kernel_types.SOURCE)).body
        if isinstance(node, ast.FunctionDef)
    }
    reached, found = set(), {"solve"}
    while found:
        reached |= found
        called = {name for caller in found for name in re.findall(r"\b(\w+)\(", functions[caller])}
        found = (called & set(functions)) - reached
    assert {"next_gain", "admit_class", "find_class_survivors", "decode_ms"} <= reached
    assert {name for caller in reached for name in written(functions[caller]) if name.startswith(("s.", "m."))} == set()


def test_the_c_types_of_the_kernel_are_those_of_its_sources() -> None:
    assert kernel_types.main(["--check"]) == 0, "run `python -m scripts.kernel_types`"


def test_a_compiled_kernel_holds_all_modules_that_it_imports_from_its_folder() -> None:
    listed = [path.stem for path in parts(kernel_types.SOURCE)]
    assert listed[-1] == "step"
    assert {"accounting", "cohorts", "fleet", "memory", "operators", "pace", "queues", "records", "ttft"} <= set(listed)


def test_a_kernel_without_one_of_its_arrays_is_refused_by_name() -> None:
    state = dict(batch_of(1, 1).fleet.state.rows)
    del state["queue"]
    with pytest.raises(TypeError, match=r"State lacks \['queue'\]"):
        compiled.State(state)
