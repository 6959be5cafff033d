"""The serving environment over an engine, which the discrete-event reference stands in for."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agents.episodes import run_episodes
from agents.policies.heuristic import HeuristicAgent
from env.batch import ServingBatch
from env.episode_files import read_episodes, verify_episode
from env.inference_env import InferenceEnv
from env.reference import ReferenceFleet
from grader.episode import read_log
from grader.grader import GraderModule, grade_episode
from inferencegym.errors import InvalidActionError, InvalidConfigError, MalformedLogError
from inferencegym.files import write_text
from inferencegym.models import MetricsSnapshot, ServeAction
from inferencegym.spaces.actions import action_mask, from_row, snap, to_row
from inferencegym.tasks import TASKS_ENV, AcceptanceStage, TaskSpec, get_calibration, get_task, list_tasks, parse_task
from live.driver import EngineApi, EngineRequest, RequestTiming
from live.engines.engine import Orders, Reading
from live.engines.simulated import SimulatedEngine, SimulatedLoad
from live.env import EngineEnv
from live.scaling import (
    Capacity,
    drafts_as_measured,
    engine_calibration,
    live_task,
    mean_lengths,
    measure_capacity,
    measure_draft_tokens,
    offered_tps,
    scaled_lengths,
    scaled_rates,
    task_entry,
    write_task,
)
from live.second import Judge, MemoryFacts, written
from simulator.hardware.tables import tables_of
from simulator.kernel import serving
from simulator.kernel.arrays import METRICS
from simulator.workload import load_source

TABLES = tables_of(None)
CAPACITY = Capacity(floor_tps=70.0, peak_tps=4000.0)


def engine(max_batch_size: int = 64) -> SimulatedEngine:
    return SimulatedEngine(TABLES, max_batch_size)


def task_for(one: SimulatedEngine, task_id: int = 3) -> TaskSpec:
    return scaled_rates(live_task(scaled_lengths(get_task(task_id), 1024), one), CAPACITY.peak_tps)


def env_on(one: SimulatedEngine, task_id: int = 3, **arguments: Any) -> EngineEnv:
    task = task_for(one, task_id)
    return EngineEnv(one, task, engine_calibration(task, CAPACITY), **arguments)


def test_an_episode_has_the_environments_observation_log_and_grade_and_is_marked_measured() -> None:
    with env_on(engine(), seed=5, config={"episode_length": 20}) as env:
        first = env.reset()
        assert first.timestep == 0
        done, rewards = False, []
        while not done:
            observation, reward, done, info = env.step({"batch_size": 64})
            rewards.append(reward)
            assert vars(observation).keys() == vars(InferenceEnv(task_id=3).reset()).keys()
        assert [entry["timestep"] for entry in env.episode_log] == list(range(1, 21))
        assert {entry["measured"] for entry in env.episode_log} == {"simulator"}
        assert [entry["reward"] for entry in env.episode_log] == rewards
        graded = grade_episode(env.task, engine_calibration(env.task, CAPACITY), read_log(env.episode_log))
        assert info["score"] == graded["score"]
        assert 0.0 <= GraderModule().score(3, env.episode_log)["score"] <= 1.0
        # Tokens, and requests that were answered, are those that the clients received.
        tokens = sum(entry["metrics"]["tokens_per_sec"] for entry in env.episode_log)
        assert tokens == sum(so_far for timing in env.timings for _, so_far in timing.tokens_at[-1:])


def test_the_traffic_is_that_of_the_task_and_the_same_for_every_policy() -> None:
    sent = []
    for batch_size in (1, 64):
        with env_on(engine(), seed=7, config={"episode_length": 5}) as env:
            env.reset()
            env.step({"batch_size": batch_size})
            sent.append([timing.request for timing in env.timings])
    assert sent[0] == sent[1]
    assert {request.class_index for request in sent[0]} == {0, 1, 2}


def test_a_smaller_batch_makes_the_queue_longer() -> None:
    queues = []
    for batch_size in (1, 64):
        with env_on(engine(), config={"episode_length": 10}) as env:
            env.reset()
            for _ in range(10):
                observation, *_ = env.step({"batch_size": batch_size})
            queues.append(observation.queue_depth)
    assert queues[0] > queues[1] + 10


def test_what_lies_beyond_the_engine_is_set_to_its_limit_and_said() -> None:
    with env_on(engine(max_batch_size=64)) as env:
        env.reset()
        *_, info = env.step({"batch_size": 300, "kv_budget": 0.5})
        assert info["action_applied"]["batch_size"] == 64
        assert info["saturated"] == {"batch_size": {"asked": 300.0, "applied": 64.0}}
        assert info["measured"] == "simulator"
        *_, info = env.step({"batch_size": 10})
        assert info["saturated"] == {}


def test_the_task_offers_the_knobs_alone_that_the_engine_changes_while_it_runs() -> None:
    one = engine()
    assert set(task_for(one).active_actions) == {"kv_budget", "batch_size"}
    with env_on(one) as env:
        env.reset()
        *_, info = env.step({"quant_tier": 2, "spec_length": 4})
        assert (info["action_applied"]["quant_tier"], info["action_applied"]["spec_length"]) == (0, 0)


def test_an_episode_on_an_engine_is_not_copied() -> None:
    with env_on(engine()) as env, pytest.raises(TypeError, match="real engine"):
        copy.deepcopy(env)


def test_precision_is_refused_unless_a_restart_is_asked_for() -> None:
    one = engine()
    task = replace(task_for(one), active_actions=("batch_size", "quant_tier"))
    with EngineEnv(one, task, engine_calibration(task, CAPACITY)) as env:
        env.reset()
        with pytest.raises(InvalidActionError, match="only a restart changes it"):
            env.step({"quant_tier": 1})
        assert env.episode_log == []
    restarted: list[ServeAction] = []
    with EngineEnv(one, task, engine_calibration(task, CAPACITY), restart=restarted.append) as env:
        env.reset()
        for tier in (1, 1, 0):
            *_, info = env.step({"quant_tier": tier})
            assert info["action_applied"]["quant_tier"] == tier
    assert [action.quant_tier.value for action in restarted] == [1, 0]


def test_a_step_may_hold_its_action() -> None:
    with env_on(engine(), config={"episode_length": 12, "hold": 5}) as env:
        env.reset()
        lengths = [env.step({"batch_size": 64})[3]["seconds"] for _ in range(3)]
        assert lengths == [5, 5, 2]
        assert len(env.episode_log) == 12
        assert all("measured" in entry for entry in env.episode_log)


def test_a_policy_of_the_simulator_plays_on_the_engine() -> None:
    with env_on(engine(), config={"episode_length": 5}) as env:
        env.reset()
        agent = HeuristicAgent(env.task)
        agent.reset(1)
        for _ in range(5):
            row = env.observation_row(fleet=True)[None]
            action = from_row(snap(agent.act(row), action_mask(env.task.active_actions))[0])
            env.step(action)
        assert env.done


def test_a_measured_log_is_graded_and_not_verified(tmp_path: Path) -> None:
    with env_on(engine(), config={"episode_length": 5}) as env:
        env.reset()
        while not env.done:
            env.step({})
        whole = {"task_id": 3, "seed": 42, "config": {"episode_length": 5}, "episode_log": env.episode_log}
    path = write_text(tmp_path / "log.json", json.dumps(whole))
    with pytest.raises(MalformedLogError, match="measured on a real engine"):
        verify_episode(read_episodes(path)[0])


def test_another_task_is_refused() -> None:
    with env_on(engine()) as env, pytest.raises(InvalidConfigError, match="scaled to an engine"):
        env.reset(task_id=1)


def test_capacity_is_one_request_at_a_time_and_full_batches() -> None:
    """Alone a token takes as long as an iteration; 64 at once share it."""
    measured = measure_capacity(engine(), 64, 50)
    alone_ms = 1e3 / measured.floor_tps
    assert alone_ms == pytest.approx(float(TABLES.decode_ms[0, 0, 0, 0]), rel=0.2)
    assert 20 * measured.floor_tps < measured.peak_tps < 64 * measured.floor_tps


def test_scaled_traffic_offers_the_share_of_the_capacity_that_was_asked_for() -> None:
    task = scaled_rates(get_task(3), 4000.0, load=0.5)
    assert offered_tps(task) == pytest.approx(2000.0, rel=0.02)
    assert task.fleet.n_replicas == 1
    own, scaled = get_task(3).burst, task.burst
    assert own is not None
    assert scaled is not None
    assert scaled.rate_rps / task.arrival_rate_rps == pytest.approx(own.rate_rps / get_task(3).arrival_rate_rps)


def test_scaled_lengths_fit_the_context_and_keep_their_proportions() -> None:
    own, scaled = get_task(3), scaled_lengths(get_task(3), 512)
    assert max(each.prompt.high + each.output.high for each in scaled.classes) <= 512
    (prompt, output), (own_prompt, own_output) = mean_lengths(scaled), mean_lengths(own)
    assert prompt / output == pytest.approx(own_prompt / own_output, rel=0.05)


def test_every_task_of_drawn_traffic_can_be_written_as_an_entry_that_says_the_same() -> None:
    drawn = [task for task in list_tasks(include_recorded=True) if task.trace is None]
    drawn.append(replace(get_task(1), draft_acceptance=(AcceptanceStage(0, (0.8, 0.7, 0.6)),)))
    assert len(drawn) > 3
    apart = {"gym_id", "calibration_file"}
    for task in drawn:
        again = parse_task(str(task.task_id), task_entry(task))
        for each in fields(TaskSpec):
            if each.name not in apart:
                assert getattr(again, each.name) == getattr(task, each.name), f"{task.task_id}: {each.name}"
    recorded = next(task for task in list_tasks(include_recorded=True) if task.trace is not None)
    with pytest.raises(InvalidConfigError, match="recorded trace"):
        task_entry(recorded)


def test_a_scaled_task_that_was_written_is_a_task_like_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is found by its id, calibrated, and its requests are those that the engine is sent."""
    one = engine()
    task = task_for(one)
    path = write_task(tmp_path / "live.json", "live", task, engine_calibration(task, CAPACITY))
    monkeypatch.setenv(TASKS_ENV, str(path))
    known = get_task("live")
    assert get_calibration("live") == engine_calibration(task, CAPACITY)
    assert known.active_actions == ("kv_budget", "batch_size")
    drawn, again = (load_source(each, TABLES).requests(7, 60) for each in (task, known))
    np.testing.assert_allclose(again.arrival_s, drawn.arrival_s, rtol=1e-12)
    np.testing.assert_array_equal(again.prompt_tokens, drawn.prompt_tokens)
    np.testing.assert_array_equal(again.output_tokens, drawn.output_tokens)
    assert run_episodes(known, HeuristicAgent(known), [1]).scores().shape == (1,)


class Drafting(SimulatedEngine):
    """An engine that says that it drafts up to four tokens, of which one in an iteration of two or more is accepted."""

    drafts = 0.0
    accepted = 0.0

    def limits(self) -> Mapping[str, tuple[float, float]]:
        return {**super().limits(), "spec_length": (0.0, 4.0)}

    def set(self, orders: Orders) -> None:
        knobs = dict(orders.knobs)
        self.drafts = knobs.pop("spec_length", self.drafts)
        super().set(Orders(knobs))

    def load(self, requests: Sequence[EngineRequest]) -> SimulatedLoad:
        written = sum(each.output_tokens for each in requests)
        self.accepted += 0.5 * written if self.drafts > 1 else 0.0
        return super().load(requests)

    def read(self) -> Reading:
        return replace(super().read(), accepted_tokens=self.accepted)


def test_tokens_per_iteration_are_measured_by_draft_length_and_capacity_without_drafts() -> None:
    """Half of the tokens come by acceptance, so a sequence writes two in an iteration."""
    one = Drafting(TABLES, 64)
    one.set(Orders({"spec_length": 4.0}))
    measure_capacity(one, 16, 8)
    assert (one.drafts, one.accepted) == (0.0, 0.0)
    assert measure_draft_tokens(one, 16, 8, 4) == {0: 1.0, 1: 1.0, 2: 2.0, 4: 2.0, 8: 2.0}
    assert one.drafts == 0.0


def test_an_engine_is_sent_the_acceptance_of_each_request() -> None:
    """The simulated engine accepts them so: at acceptance 1 all four drafts, at 0 none."""
    stages = (AcceptanceStage(0, (1.0,) * 3), AcceptanceStage(6, (0.0,) * 3))
    one = SimulatedEngine(TABLES, 64, drafts=8)
    assert one.limits()["spec_length"] == (0.0, 8.0)
    task = replace(task_for(one), draft_acceptance=stages, active_actions=("spec_length",))
    with EngineEnv(one, task, engine_calibration(task, CAPACITY), config={"episode_length": 40}) as env:
        env.reset(seed=1)
        seen = [env.step({"spec_length": 4})[0].spec_accept_rate for _ in range(40)]
        sent = {timing.request.acceptance for timing in env.timings if timing.request.arrival_s < 6.0}
    assert sent == {1.0}
    assert seen[4] == 1.0
    assert seen[-1] == 0.0
    body = EngineApi("http://localhost:1").body(EngineRequest(0.0, 4, 4, acceptance=0.5))
    assert body["vllm_xargs"] == {"acceptance": 0.5}
    assert "vllm_xargs" not in EngineApi("http://localhost:1").body(EngineRequest(0.0, 4, 4))


def test_drafts_of_a_task_are_accepted_as_its_table_says() -> None:
    task = drafts_as_measured(get_task(3))
    batch = ServingBatch(task, 1, task.config(), TABLES)
    batch.reset([1])
    for _ in range(5):
        batch.step(to_row(ServeAction.from_dict({"batch_size": 64, "spec_length": 4}))[None])
    assert batch.metric["spec_accept_rate"][0] == pytest.approx((TABLES.spec_tokens[3] - 1.0) / 4.0, rel=1e-6)


def test_an_episode_on_an_engine_or_in_the_reference_holds_no_number_of_the_fluid_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_fluid_model(*_: Any) -> None:
        raise AssertionError("the fluid model was asked")

    monkeypatch.setattr(serving, "ServingKernel", no_fluid_model)
    with env_on(engine(), seed=5, config={"episode_length": 12}) as env:
        assert env.reset().gpu_memory_used_gb == 0.0
        *_, info = [env.step({"batch_size": 64}) for _ in range(12)][-1]
    unknown = {"gpu_memory_gb", "spec_accept_rate", "oom"}  # this engine drafts nothing and tells no memory
    everything = {field.name for field in fields(MetricsSnapshot)}
    for entry in env.episode_log:
        assert entry["metrics"].keys() == everything - unknown
    assert info["missing"] == ("gpu_memory_used_gb", "spec_accept_rate")
    assert "support" not in info
    batch = ServingBatch(get_task(1), 1, get_task(1).config({"episode_length": 3}), dynamics=ReferenceFleet)
    batch.reset([5])
    for _ in range(3):
        batch.step(np.array([[0.9, 0, 128, 0, 0]]))
    assert batch.metric.keys() == METRICS.keys()
    with pytest.raises(AssertionError, match="fluid model"):
        ServingBatch(get_task(1), 1)


def test_a_task_that_grades_memory_needs_to_be_told_it() -> None:
    one = engine()
    task = task_for(one, 2)
    with pytest.raises(InvalidConfigError, match="gpu_memory_gb, which EngineFleet does not report"):
        EngineEnv(one, task, engine_calibration(task, CAPACITY)).reset()
    memory = MemoryFacts(weights_gb=10.0, kv_pool_gb=20.0)
    with EngineEnv(one, task, engine_calibration(task, CAPACITY), memory=memory) as env:
        env.reset()
        env.step({"kv_budget": 0.5})
        assert env.episode_log[0]["metrics"]["gpu_memory_gb"] == 20.0


def test_a_log_without_memory_is_refused_by_a_grade_that_reads_it() -> None:
    env = InferenceEnv(task_id=2, config={"episode_length": 3})
    env.reset()
    for _ in range(3):
        env.step({})
    for entry in env.episode_log:
        del entry["metrics"]["gpu_memory_gb"]
    with pytest.raises(MalformedLogError, match="grades gpu_memory_gb, which is missing"):
        GraderModule().score(2, env.episode_log)


def test_a_seconds_metrics_are_what_its_clients_saw() -> None:
    """Of three requests one is answered late, one waits beyond its objective and one fails."""
    late = RequestTiming(EngineRequest(0.1, 8, 4, 0))
    for at, tokens in ((1.3, 1), (1.5, 3), (2.5, 4)):
        late.receive(at, tokens)
    waits = RequestTiming(EngineRequest(0.5, 8, 4, 1))
    failed = RequestTiming(EngineRequest(1.2, 8, 4, 1), ended_s=1.4, error="status 500")
    judge = Judge([1000.0, 1400.0], price=2.0, memory=MemoryFacts(weights_gb=10.0, kv_pool_gb=20.0))
    before, after = Reading(0, 0, 0.0, preemptions=3.0), Reading(1, 1, 0.4, preemptions=5.0)
    second = judge.second([late, waits, failed], before, after, 2.0, kv_budget=0.5)
    assert second["ttft_p50_ms"] == pytest.approx(1200.0)
    assert second["tokens_per_sec"] == 3.0
    assert second["tpot_ms"] == pytest.approx(100.0)  # two tokens came 0.2 s after the first
    assert second["slo_violations"] == 3.0
    assert second["violation_share"] == 1.0
    assert second["rejected"] == 1.0
    assert second["eviction_events"] == 2.0
    assert second["gpu_memory_gb"] == 20.0
    assert second["cost_per_1k"] == 2.0 / 0.05  # an idle engine is billed for 50 tokens per second
    assert written([late], 2.0, 3.0) == (1, 1.0, 1)


def test_a_knob_outside_the_limits_is_refused_by_the_engine() -> None:
    with pytest.raises(InvalidActionError, match="from 1 to 64"):
        engine().set(Orders({"batch_size": 65}))
    with pytest.raises(InvalidActionError, match="left out"):
        engine().set(Orders({"spec_length": 2}))
