"""The live environment on a real vLLM. Counts and limits are asserted, never milliseconds."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import math
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import numpy as np
import pytest

from agents.registry import make_agent
from inferencegym.errors import InvalidActionError, InvalidConfigError
from inferencegym.tasks import get_task
from live.driver import EngineApi, EngineRequest, OpenLoop, RequestTiming, play_open
from live.engines.engine import Orders
from live.engines.histogram import buckets
from live.engines.vllm import VllmEngine
from live.engines.vllm_server import VllmServer
from live.env import EngineEnv
from live.observer import Adviser, Bounds, Controller
from live.scaling import Capacity, engine_calibration, live_task, scaled_lengths, scaled_rates
from live.session_gate import SessionGate
from tests.damaged_control_files import NAMES, damage, remove
from tests.live_engine import vllm_server
from tests.live_stand_ins import VLLM_SERIES, StandIn
from tests.servers import until

pytestmark = pytest.mark.engine

BURST_S = 600.0
"""Longest time for a burst; on a busy machine an iteration of 32 requests takes a third of a second."""
KV_BLOCKS = 64
"""Few enough to run out; vLLM for CPU has 128 tokens in each, and one of them it keeps for itself."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    with vllm_server(tmp_path_factory.mktemp("vllm"), max_num_seqs=32, kv_blocks=KV_BLOCKS) as running:
        yield running


@pytest.fixture(scope="module")
def api(server: VllmServer) -> EngineApi:
    """One for all tests: with one each, all would draw the same prompts, and the engine still has some in its cache."""
    return EngineApi(server.url, priorities=True)


@pytest.fixture
def engine(server: VllmServer, api: EngineApi) -> VllmEngine:
    """The engine, idle and wide open."""
    found = VllmEngine(api, server.control_file)
    wide_open = {name: high for name, (_, high) in found.limits().items()}
    found.set(Orders(wide_open))
    play_open(found.api, [EngineRequest(0.0, 8, 1)])  # with which an idle engine reads its orders
    until(lambda: found.in_force().items() >= wide_open.items())
    return found


class Peaks:
    """Largest numbers that the engine reports while a load is played."""

    def __init__(self, engine: VllmEngine) -> None:
        self.running = 0.0
        self._engine = engine
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._stop.wait(0.05):
            reading = self._engine.read()
            self.running = max(self.running, reading.running_requests)

    def play(self, requests: list[EngineRequest], at_least: int = 0) -> int:
        """Play the requests, again and again until so many were seen to run at once; returns how often."""
        self._thread.start()
        timings, deadline = list[RequestTiming](), time.monotonic() + BURST_S
        try:
            while not timings or (self.running < at_least and time.monotonic() < deadline):
                timings += play_open(self._engine.api, requests)
        finally:
            self._stop.set()
            self._thread.join()
        assert {timing.error for timing in timings} == {""}
        assert all(timing.tokens == timing.request.output_tokens for timing in timings)
        return len(timings) // len(requests)


def iterations(engine: VllmEngine) -> float:
    found = engine.read().iterations
    assert found is not None
    return found


def full_iterations(engine: VllmEngine) -> float:
    """Iterations so far that had more than 8 tokens."""
    found = buckets(engine.api.metrics(), "vllm:iteration_tokens_total")
    assert found is not None
    return found[math.inf] - found[8.0]


def behind_one(
    engine: VllmEngine, requests: list[EngineRequest], orders: Orders | None = None
) -> tuple[list[RequestTiming], float]:
    """Let the requests wait behind one that runs, then give the orders; returns timings and full iterations since.

    All of it is played again if the one ended too early: before the last request waited, or before the orders let one
    of them run beside it.
    """

    def begun(timings: list[RequestTiming]) -> bool:
        return any(one.first_token_s is not None or one.ended_s is not None for one in timings)

    def all_wait(one: RequestTiming) -> bool:
        return one.ended_s is not None or engine.read().queue_requests == len(requests)

    while True:
        engine.set(Orders({"batch_size": 1}))
        with OpenLoop(engine.api, [EngineRequest(0.0, 16, 900)]) as first:
            (alone,) = first.timings
            until(partial(begun, first.timings), BURST_S)
            with OpenLoop(engine.api, requests) as load:
                until(partial(all_wait, alone), BURST_S)
                before, in_time = full_iterations(engine), alone.ended_s is None
                if in_time and orders is not None:
                    engine.set(orders)
                    until(partial(begun, load.timings), BURST_S)
                    in_time = alone.ended_s is None
                timings = load.wait() if in_time else []
        until(lambda: engine.read().running_requests == 0, BURST_S)
        if in_time:
            return timings, full_iterations(engine) - before


def test_every_number_that_is_read_is_there(engine: VllmEngine) -> None:
    Peaks(engine).play([EngineRequest(0.0, 16, 4)])
    reading = engine.read()
    assert reading.finished_requests is not None
    assert reading.finished_requests >= 1
    assert None not in (reading.prompt_tokens, reading.output_tokens, reading.preemptions, reading.iterations)
    assert reading.ttft_buckets is not None
    assert reading.tpot_buckets is not None
    assert max(reading.ttft_buckets.values()) >= 1
    assert engine.kv_blocks() == (KV_BLOCKS - 1, 128)


def test_a_burst_takes_as_many_iterations_as_its_batches_have_tokens(engine: VllmEngine) -> None:
    """124 requests of 64 tokens wait while one runs alone; then four fill each of 31 slots: 256 full iterations."""
    timings, full = behind_one(engine, [EngineRequest(0.0, 16, 64)] * 124, Orders({"batch_size": 32}))
    assert all(timing.completed for timing in timings)
    assert full == pytest.approx(4 * 64, rel=0.02)


def test_the_batch_size_changes_under_load_without_a_restart(server: VllmServer, engine: VllmEngine) -> None:
    engine.set(Orders({"batch_size": 4}))
    pid, start, peaks = server.pid, iterations(engine), Peaks(engine)
    bursts = peaks.play([EngineRequest(0.0, 16, 32)] * 16, at_least=4)
    assert peaks.running == 4
    until(lambda: engine.read().running_requests == 0)
    assert iterations(engine) - start >= bursts * 4 * 32
    _, full = behind_one(engine, [EngineRequest(0.0, 16, 32)] * 16, Orders({"batch_size": 17}))
    assert full == pytest.approx(32, abs=2)
    assert server.pid == pid
    assert engine.in_force()["batch_size"] == 17


def test_of_those_that_wait_the_highest_class_is_served_first(engine: VllmEngine) -> None:
    """One runs while six wait, the lowest class sent first; each of them runs alone then, for 64 iterations.

    A client that was held up sees first tokens together that came one after another: then all is played again.
    """
    while True:
        others, _ = behind_one(engine, [EngineRequest(0.0, 16, 64, c) for c in (2, 1, 0, 2, 1, 0)])
        assert all(timing.completed for timing in others)
        in_order = sorted(others, key=lambda timing: timing.first_token_s or 0.0)
        gaps_s = np.diff([timing.first_token_s or 0.0 for timing in in_order])
        if gaps_s.min() > gaps_s.mean() / 2:
            break
    assert [timing.request.class_index for timing in in_order] == [0, 0, 1, 1, 2, 2]


def test_a_smaller_share_of_the_cache_bounds_what_runs(engine: VllmEngine) -> None:
    """A request takes two blocks of 128 tokens; a quarter of the 63 blocks holds eight requests, all of them 24."""
    engine.set(Orders({"kv_budget": 0.25}))
    peaks = Peaks(engine)
    peaks.play([EngineRequest(0.0, 192, 32)] * 24, at_least=8)
    assert peaks.running == 8
    engine.set(Orders({"kv_budget": 1.0}))
    peaks = Peaks(engine)
    peaks.play([EngineRequest(0.0, 192, 32)] * 24, at_least=9)
    assert 8 < peaks.running <= 24


def test_fewer_prompt_tokens_per_iteration_make_more_iterations(engine: VllmEngine) -> None:
    """Eight prompts of 200 tokens: all in an iteration or few, or in iterations of 128 that each end one at most.

    vLLM counts a prompt in the iteration that ends it.
    """
    wide, narrow = (
        behind_one(engine, [EngineRequest(0.0, 200, 1)] * 8, Orders({"batch_size": 32, "prefill_tokens": budget}))[1]
        for budget in (engine.limits()["prefill_tokens"][1], 128)
    )
    assert narrow == 8 > wide


# ---------------------------------------------------------------- faults of what controls the engine
# The user's setting is 20 in each of these tests, and a controller's order 4.


@pytest.fixture
def faulty(engine: VllmEngine) -> Iterator[VllmEngine]:
    """The engine on its user's setting; one request after another runs, so that it looks at its control file."""
    stop = threading.Event()

    def keep_running() -> None:
        while not stop.wait(0.1):
            play_open(engine.api, [EngineRequest(0.0, 8, 64)])

    engine.set(Orders({"batch_size": 20}))
    runner = threading.Thread(target=keep_running)
    runner.start()
    try:
        has(engine, 20)
        yield engine
    finally:
        stop.set()
        runner.join()


def has(engine: VllmEngine, batch_size: int) -> None:
    until(lambda: engine.in_force()["batch_size"] == batch_size, BURST_S)


@contextlib.contextmanager
def commanded(engine: VllmEngine, control_file: Path, dead_man_s: float) -> Iterator[subprocess.Popen[bytes]]:
    """``inferencegym live control`` in a process of its own, which has set 4."""
    # A job in the background of a shell, as this may be, ignores SIGINT and hands that on.
    command = ["env", "--default-signal=INT,HUP", sys.executable, "-m", "inferencegym"]
    command += ["live", "control", "--engine", engine.api.url, "--step", "1"]
    command += ["--control-file", str(control_file), "--bound", "batch_size=4:8", "--dead-man", str(dead_man_s)]
    command += ["--agent", 'constant:{"batch_size": 4}', "--audit", str(control_file.with_name("audit.jsonl"))]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        has(engine, 4)
        yield process
    finally:
        process.kill()
        process.communicate()


def controller(engine: VllmEngine, audit: Path, dead_man_s: float = 600.0) -> Controller:
    task = get_task(3)
    adviser = Adviser(engine, task, make_agent('constant:{"batch_size": 4}', task))
    return Controller(engine, adviser, Bounds({"batch_size": (4.0, 8.0)}, 1.0), audit, dead_man_s)


def test_a_real_engine_whose_controller_is_killed_goes_back(server: VllmServer, faulty: VllmEngine) -> None:
    with commanded(faulty, server.control_file, 5):
        pass
    has(faulty, 20)


def test_a_controller_after_a_killed_one_gives_a_real_engine_back(
    server: VllmServer, faulty: VllmEngine, tmp_path: Path
) -> None:
    with commanded(faulty, server.control_file, 600):
        pass
    has(faulty, 4)
    second = controller(faulty, tmp_path / "audit.jsonl")
    assert second.own == {"batch_size": 20}
    second.second()
    second.give_back("done")
    has(faulty, 20)


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_withdraws_the_order_from_a_real_engine(
    server: VllmServer, faulty: VllmEngine, sign: signal.Signals
) -> None:
    with commanded(faulty, server.control_file, 600) as process:
        process.send_signal(sign)
        assert process.wait() == 0
        has(faulty, 20)


def test_a_second_controller_of_a_real_engine_is_refused(
    server: VllmServer, faulty: VllmEngine, tmp_path: Path
) -> None:
    with commanded(faulty, server.control_file, 600) as process:
        with pytest.raises(InvalidConfigError, match=rf"process {process.pid} on .* whose lease ends at"):
            controller(faulty, tmp_path / "audit.jsonl")
        written = faulty.read().iterations
        until(lambda: (faulty.read().iterations or 0.0) > (written or 0.0))
        assert faulty.in_force()["batch_size"] == 4
        process.terminate()
        has(faulty, 20)


def test_a_paused_controller_loses_a_real_engine_to_the_next_one(
    server: VllmServer, faulty: VllmEngine, tmp_path: Path
) -> None:
    with commanded(faulty, server.control_file, 5) as process:
        with Path(f"{server.control_file}.lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # it is not paused while it holds the lock
            process.send_signal(signal.SIGSTOP)
        has(faulty, 20)
        second = controller(faulty, tmp_path / "audit.jsonl")
        until(lambda: second.second() is not None)
        process.send_signal(signal.SIGCONT)
        assert process.wait() == 2
        has(faulty, 4)
        second.give_back("done")
        has(faulty, 20)


def test_no_damaged_control_file_ends_or_holds_up_a_real_engine(server: VllmServer, faulty: VllmEngine) -> None:
    file, pid = server.control_file, server.pid
    for name in NAMES:
        faulty.set(Orders({"batch_size": 4}, time.time() + 600, {"batch_size": 20}))
        has(faulty, 4)
        errors = faulty.errors()
        damage(file, name)
        until(lambda errors=errors: faulty.errors() > errors)  # type: ignore[misc]
        has(faulty, 20)
        remove(file)
    assert server.pid == pid
    Peaks(faulty).play([EngineRequest(0.0, 8, 2)])


def test_a_real_engine_goes_back_when_its_metrics_stop(server: VllmServer, faulty: VllmEngine, tmp_path: Path) -> None:
    with StandIn(dict(VLLM_SERIES)) as metrics:
        now = [time.time()]
        one = controller(VllmEngine(EngineApi(metrics.url), server.control_file), tmp_path / "audit.jsonl")
        one.clock = lambda: now[0]
        one.second()
        has(faulty, 4)
        metrics.down = True
        now[0] += 601.0
        one.second()
        assert "no metrics" in one.stopped
        has(faulty, 20)


def test_a_real_engine_that_is_restarted_follows_its_controller_and_goes_back(
    server: VllmServer, faulty: VllmEngine
) -> None:
    with commanded(faulty, server.control_file, 600) as process:
        before = server.pid
        server.stop()
        assert process.poll() is None
        server.__enter__()
        assert server.pid != before
        state = Path(f"{server.control_file}.state")
        until(lambda: json.loads(state.read_text())["file_version"] is not None, BURST_S)
        has(faulty, 4)
        process.terminate()
        assert process.wait() == 0
        has(faulty, 20)


# ---------------------------------------------------------------- episodes


def test_orders_outside_the_limits_change_nothing(server: VllmServer, engine: VllmEngine) -> None:
    with pytest.raises(InvalidActionError, match="from 1 to 32"):
        engine.set(Orders({"batch_size": 33}))
    with pytest.raises(InvalidActionError, match="left out"):
        engine.set(Orders({"spec_length": 2}))  # started without drafting
    server.control_file.write_text(json.dumps({"set": {"batch_sice": 4}}))
    timings = play_open(engine.api, [EngineRequest(0.0, 8, 2)])
    assert timings[0].completed
    state = json.loads((server.control_file.parent / f"{server.control_file.name}.state").read_text())
    assert "batch_sice" in state["problem"]
    assert state["in_force"]["batch_size"] == 32


def test_an_episode_is_played_and_graded(engine: VllmEngine) -> None:
    capacity = Capacity(20.0, 300.0)
    task = scaled_rates(live_task(scaled_lengths(get_task(3), 256), engine), capacity.peak_tps)
    config = {"episode_length": 8}
    with EngineEnv(engine, task, engine_calibration(task, capacity), seed=1, config=config) as env:
        env.reset()
        batches = iter([4, 32] * 4)
        while not env.done:
            *_, info = env.step({"batch_size": next(batches), "kv_budget": 0.9})
        assert 0.0 <= info["score"] <= 1.0
        assert {entry["measured"] for entry in env.episode_log} == {"vllm"}
        received = sum(max((n for at, n in list(t.tokens_at) if at <= 8.0), default=0) for t in env.timings)
        assert sum(entry["metrics"]["tokens_per_sec"] for entry in env.episode_log) <= received
        assert env.timings
    until(lambda: engine.read().running_requests == 0)


def test_the_gate_bounds_sessions_by_what_the_engine_reports(engine: VllmEngine, tmp_path: Path) -> None:
    """Six sessions of three turns, each with the last prompt before its own: prefixes are found in the cache."""
    audit = tmp_path / "audit.jsonl"

    async def agent(gate: SessionGate, client: httpx.AsyncClient, number: int) -> None:
        prompt: list[int] = []
        async with gate.session(str(number)):
            for turn in range(3):
                prompt += [200 + number] * 200
                async with gate.turn() as session:
                    body = {"model": engine.api.model, "prompt": prompt, "max_tokens": 4, "ignore_eos": True}
                    answer = await client.post(f"{engine.api.url}/v1/completions", json=body)
                    usage = answer.raise_for_status().json()["usage"]
                    session.report(usage["prompt_tokens"], usage["completion_tokens"])
                    assert usage["prompt_tokens"] == 200 * (turn + 1)

    async def play() -> SessionGate:
        async with (
            SessionGate(engine.api.url, lambda _: 2, bounds=(1, 4), audit=audit) as gate,
            engine.api.client() as client,
        ):
            await answered(gate)
            await asyncio.gather(*(agent(gate, client, number) for number in range(6)))
            await answered(gate)
            return gate

    async def answered(gate: SessionGate) -> None:
        await gate.second()
        while not observations()[-1]:
            await gate.second()

    def observations() -> list[dict[str, float]]:
        return [json.loads(line)["observation"] for line in audit.read_text().splitlines()]

    def queried() -> float:
        return engine.api.metrics().total("vllm:prefix_cache_queries_total")

    before = queried()
    gate = asyncio.run(play())
    assert gate.finished == 6
    assert queried() - before == 6 * (200 + 400 + 600)
    seen = [each for each in observations() if each]
    assert {each["kv_pool_tokens"] for each in seen} == {(KV_BLOCKS - 1) * 128}
    assert max(each["sessions_in_flight"] for each in seen) <= 4
    if len(seen) == len(observations()):  # a busy engine may answer a reading too late
        assert sum(each["prefix_queried_tokens"] for each in seen) == 6 * (200 + 400 + 600)
        assert sum(each["prefix_hit_tokens"] for each in seen) > 0


def test_a_real_engine_accepts_the_drafts_of_a_request_as_the_request_says(tmp_path: Path) -> None:
    """After the first of 21 tokens, an iteration writes five with all four drafts, or one without any."""
    extension = ("--worker-extension-cls", "synthetic_acceptance.SyntheticAcceptance")
    with vllm_server(tmp_path, drafts=8, options=extension) as running:
        engine = VllmEngine(EngineApi(running.url), running.control_file)
        engine.set(Orders({"spec_length": 4.0}))
        for acceptance, taken in ((1.0, 5), (0.0, 21)):
            before = engine.read()
            (timing,) = play_open(engine.api, [EngineRequest(0.0, 8, 21, acceptance=acceptance)])
            assert (timing.error, timing.tokens) == ("", 21)
            until(lambda before=before: (engine.read().finished_requests or 0) > (before.finished_requests or 0))
            now = engine.read()
            assert now.iterations is not None
            assert now.accepted_tokens is not None
            assert now.iterations - (before.iterations or 0.0) == taken
            assert now.accepted_tokens - (before.accepted_tokens or 0.0) == 16 * acceptance
