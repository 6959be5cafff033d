"""A policy beside an engine: what it sees, says and sets, and how the engine gets its user's setting back."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from agents.protocol import FloatArray
from agents.registry import make_agent
from cli.main import main
from inferencegym.errors import InvalidConfigError, RemoteError
from inferencegym.models import NAIVE_ACTION
from inferencegym.tasks import get_task
from live.driver import EngineApi
from live.engines.engine import Reading
from live.engines.vllm import VllmEngine
from live.metrics import read_page
from live.observer import Adviser, Bounds, Controller, EngineObserver, late_share, quantile_s
from live.publish import AdvicePage
from simulator.hardware.tables import tables_of
from tests.live_stand_ins import VLLM_SERIES, StandIn, scheduler_module
from tests.servers import free_port, until

TASK = get_task(3)


class Wants:
    """A policy that wants one setting and keeps what it saw."""

    def __init__(self, batch_size: float, kv_budget: float = 1.0) -> None:
        self.wanted = [kv_budget, 0.0, batch_size, 0.0, 0.0]
        self.seen: list[FloatArray] = []

    def reset(self, n_rows: int) -> None:
        self.seen = []

    def act(self, observation: FloatArray) -> FloatArray:
        self.seen.append(observation.copy())
        return np.array([self.wanted])


class Running:
    """A stand-in for vLLM whose scheduler follows its control file every 20 ms."""

    def __init__(self, server: StandIn, control: Path, scheduler: Any) -> None:
        self.server, self.control, self.scheduler = server, control, scheduler
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._iterate)

    def _iterate(self) -> None:
        while not self._stop.wait(0.02):
            self.scheduler.schedule()

    def __enter__(self) -> Running:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def batch_size(self) -> int:
        return int(self.scheduler.max_num_active_reqs)

    def controller(self, agent: Wants, audit: Path, **arguments: Any) -> Controller:
        engine = VllmEngine(EngineApi(self.server.url), self.control)
        bounds = arguments.pop("bounds", Bounds({"batch_size": (4.0, 44.0)}, step=0.25))
        return Controller(engine, Adviser(engine, TASK, agent), bounds, audit, **arguments)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    control = tmp_path / "control.json"
    control.write_text('{"set": {"batch_size": 20}}')
    with (
        scheduler_module(control) as module,
        StandIn(dict(VLLM_SERIES)) as server,
        Running(server, control, module.LiveScheduler()) as found,
    ):
        until(lambda: found.batch_size == 20)
        yield found


def entries(audit: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in audit.read_text().splitlines()]


# ---------------------------------------------------------------- what is seen


def test_a_second_of_counters_and_histograms_is_an_observation() -> None:
    """In two seconds 6 requests finished, 2 more wait and 2 more run: 10 arrived, 5 per second."""
    observer = EngineObserver(TASK)
    none, some = {0.1: 0.0, 0.5: 0.0, np.inf: 0.0}, {0.1: 4.0, 0.5: 6.0, np.inf: 8.0}
    start = Reading(0, 0, 0.0, 100, 1000, 0, ttft_buckets=none, tpot_buckets={0.05: 0, np.inf: 0})
    later = Reading(2, 2, 0.3, 106, 1600, 0, ttft_buckets=some, tpot_buckets={0.05: 4, np.inf: 4})
    observer.observe(start, 10.0, NAIVE_ACTION)
    observer.observe(later, 12.0, NAIVE_ACTION)
    seen = observer.seen()
    assert seen["queue_depth"] == 2
    assert seen["kv_cache_occupancy"] == 0.3
    assert seen["arrival_rate"] == pytest.approx(TASK.arrival_rate_rps + 2 / 11 * (5.0 - TASK.arrival_rate_rps))
    assert seen["mean_prompt_len"] == 100
    assert seen["ttft_p50"] == pytest.approx(100.0)
    assert seen["tpot_p50"] == pytest.approx(25.0)
    assert seen["slo_violation_rate"] == pytest.approx(late_share(none, some, TASK.slo_target_ms))
    assert (seen["batch_size"], seen["seconds_since_change"], seen["timestep"]) == (32, 2, 1)


def test_quantiles_of_a_histogram_are_linear_within_a_bucket() -> None:
    before, after = {0.1: 5.0, 0.5: 5.0, np.inf: 5.0}, {0.1: 5.0, 0.5: 9.0, np.inf: 13.0}
    assert quantile_s(before, after, 0.25) == pytest.approx(0.3)
    assert quantile_s(before, after, 0.99) == 0.5  # the last bucket has no upper edge
    assert quantile_s(after, after, 0.5) is None
    assert late_share(before, after, 500.0) == 0.5


def test_an_engine_that_was_restarted_is_noticed() -> None:
    observer = EngineObserver(TASK)
    observer.observe(Reading(0, 0, 0, 100, 1000), 0.0, NAIVE_ACTION)
    with pytest.raises(RemoteError, match="restarted"):
        observer.observe(Reading(0, 0, 0, 3, 30), 1.0, NAIVE_ACTION)


def test_advice_has_the_setting_in_force_the_wanted_one_and_what_the_simulator_expects(running: Running) -> None:
    engine = VllmEngine(EngineApi(running.server.url), running.control)
    adviser = Adviser(engine, TASK, Wants(48), tables_of(None))
    series = running.server.series
    adviser.advise(0.0)
    for now_s in (1.0, 2.0):
        more = {"request_success_total": 5, "request_prompt_tokens_sum": 500, "generation_tokens_total": 400}
        for name, added in more.items():
            series[f"vllm:{name}"] += added
        advice = adviser.advise(now_s)
    assert advice.in_force["batch_size"] == 20
    assert advice.wanted["batch_size"] == 48
    assert "requests/s" in advice.why()
    assert advice.expected["output_tokens_per_s"] > 0
    assert running.batch_size == 20  # nothing was set


def test_a_policy_of_a_task_that_scales_advises_replicas_and_nobody_sets_them(running: Running, tmp_path: Path) -> None:
    """One engine of two is sent half of what three replicas take, so Kubernetes' rule asks for more than two."""
    task = get_task("autoscale")
    engine = VllmEngine(EngineApi(running.server.url), running.control)
    agent = make_agent("hpa", task)
    adviser = Adviser(engine, task, agent, tables_of(None), replicas=2)
    advice = adviser.advise(0.0)
    assert advice.in_force["replicas"] == 2
    busy = 3.0 * agent.replica.capacity_rps  # type: ignore[attr-defined]
    for now_s in range(1, 40):
        running.server.series["vllm:request_success_total"] += busy / 2
        running.server.series["vllm:request_prompt_tokens_sum"] += busy / 2 * 100
        advice = adviser.advise(float(now_s))
    assert advice.observation["arrival_rate"] == pytest.approx(busy, rel=0.02)
    assert advice.wanted["replicas"] > 2
    with AdvicePage(0) as page:
        page.show(advice)
        shown = read_page(httpx.get(f"http://127.0.0.1:{page.port}/metrics").text).samples
    wanted = {labels["name"]: value for labels, value in shown["inferencegym_live_wanted"]}
    assert wanted["replicas"] == advice.wanted["replicas"]
    with pytest.raises(InvalidConfigError, match="one of kv_budget"):
        Controller(engine, adviser, Bounds({"replicas": (1.0, 4.0)}), tmp_path / "audit.jsonl")
    with pytest.raises(InvalidConfigError, match="replicas"):
        Adviser(engine, task, agent, replicas=0)


def test_observe_prints_how_many_replicas_the_policy_would_have(
    running: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    before = running.control.read_text()
    command = ["live", "observe", "--engine", running.server.url, "--control-file", str(running.control)]
    agent = ["--task", "autoscale", "--agent", 'constant:{"replicas": 3}', "--replicas", "2", "--seconds", "1.5"]
    assert main([*command, *agent]) == 0
    assert "would have replicas 3 (of 2 now)" in capsys.readouterr().out
    assert running.control.read_text() == before


# ---------------------------------------------------------------- what is set


def test_a_controller_goes_a_step_at_a_time_and_stays_within_its_bounds(running: Running, tmp_path: Path) -> None:
    audit = tmp_path / "audit.jsonl"
    controller = running.controller(Wants(500), audit)
    sizes = []
    for size in (30, 40, 44, 44):
        controller.second()
        until(lambda size=size: running.batch_size == size)  # type: ignore[misc]
        sizes.append(running.batch_size)
    assert sizes == [30, 40, 44, 44]
    assert [entry["set"] for entry in entries(audit)] == [{"batch_size": float(size)} for size in sizes]
    assert entries(audit)[0]["wanted"]["batch_size"] == 500
    controller.give_back("done")
    until(lambda: running.batch_size == 20)


def test_a_dry_run_logs_and_sets_nothing(running: Running, tmp_path: Path) -> None:
    before = running.control.read_text()
    controller = running.controller(Wants(500), tmp_path / "audit.jsonl", dry_run=True)
    controller.second()
    controller.give_back("done")
    assert running.control.read_text() == before
    assert [entry["set"] for entry in entries(tmp_path / "audit.jsonl")] == [{"batch_size": 30.0}, {"batch_size": 20.0}]


def test_a_second_controller_is_refused_and_the_first_one_goes_on(running: Running, tmp_path: Path) -> None:
    first = running.controller(Wants(500), tmp_path / "first.jsonl", dead_man_s=600.0)
    said = rf"process {os.getpid()} on \S+, whose lease ends at"
    with pytest.raises(InvalidConfigError, match=said):
        running.controller(Wants(4), tmp_path / "second.jsonl", dead_man_s=600.0)
    running.controller(Wants(4), tmp_path / "dry.jsonl", dry_run=True).second()
    first.second()
    until(lambda: running.batch_size == 30)
    first.give_back("done")
    until(lambda: running.batch_size == 20)
    second = running.controller(Wants(4), tmp_path / "second.jsonl", dead_man_s=600.0)
    second.second()
    until(lambda: running.batch_size == 10)
    second.give_back("done")


def test_an_engine_that_was_restarted_follows_its_controller_and_goes_back(running: Running, tmp_path: Path) -> None:
    controller = running.controller(Wants(500), tmp_path / "audit.jsonl", dead_man_s=600.0)
    controller.second()
    until(lambda: running.batch_size == 30)
    running.scheduler = type(running.scheduler)()
    assert running.scheduler.limits["batch_size"] == [1, 64]
    until(lambda: running.batch_size == 30)
    controller.give_back("done")
    until(lambda: running.batch_size == 20)


def test_control_ends_when_the_engine_gives_no_metrics(running: Running, tmp_path: Path) -> None:
    now = [1000.0]
    controller = running.controller(Wants(500), tmp_path / "audit.jsonl", dead_man_s=5.0, clock=lambda: now[0])
    running.server.down = True
    for _ in range(7):
        assert controller.second() is None
        now[0] += 1.0
    assert "no metrics" in controller.stopped
    assert entries(tmp_path / "audit.jsonl")[-1]["set"] == {"batch_size": 20.0}


def test_control_ends_when_the_objective_is_missed_for_too_long(running: Running, tmp_path: Path) -> None:
    now = [time.time()]
    controller = running.controller(Wants(500), tmp_path / "audit.jsonl", missed_s=3.0, clock=lambda: now[0])
    for _ in range(6):
        running.server.series['vllm:time_to_first_token_seconds_bucket{le="+Inf"}'] += 10
        controller.second()
        now[0] += 1.0
        if controller.stopped:
            break
    assert "objective was missed" in controller.stopped
    until(lambda: running.batch_size == 20)


@pytest.mark.parametrize(
    ("ranges", "said"),
    [
        ({"batch_size": (1.0, 65.0)}, "within 1 to 64"),
        ({"batch_size": (9.0, 8.0)}, "a lower and a higher"),
        ({"prefill_disagg": (0.0, 1.0)}, "kv_budget, spec_length, batch_size"),
        ({}, "at least one knob"),
    ],
)
def test_bounds_that_the_engine_or_the_policy_does_not_have_are_refused(
    running: Running, tmp_path: Path, ranges: dict[str, tuple[float, float]], said: str
) -> None:
    with pytest.raises(InvalidConfigError, match=said):
        running.controller(Wants(8), tmp_path / "audit.jsonl", bounds=Bounds(ranges))


# ---------------------------------------------------------------- the command


def test_observe_prints_and_serves_advice_and_sets_nothing(
    running: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    before, port, pages = running.control.read_text(), free_port(), list[str]()
    ended = threading.Event()

    def look() -> None:
        with httpx.Client() as client:
            while not ended.wait(0.1):
                with contextlib.suppress(httpx.TransportError):
                    pages.append(client.get(f"http://127.0.0.1:{port}/metrics").text)

    looker = threading.Thread(target=look)
    looker.start()
    options = ["--control-file", str(running.control), "--port", str(port), "--seconds", "4"]
    agent = ["--agent", 'constant:{"batch_size": 40}']
    assert main(["live", "observe", "--engine", running.server.url, *agent, *options]) == 0
    ended.set()
    looker.join()
    wanted = {labels["name"]: value for labels, value in read_page(pages[-1]).samples["inferencegym_live_wanted"]}
    assert wanted["batch_size"] == 40
    assert "would set kv_budget 1, spec_length 0, batch_size 40" in capsys.readouterr().out
    assert running.control.read_text() == before


def test_control_needs_bounds(running: Running, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["live", "control", "--engine", running.server.url, "--control-file", str(running.control)]
    assert main(command) == 2
    assert "--bound batch_size=8:64" in capsys.readouterr().err
    assert main([*command, "--bound", "batch_size=many"]) == 2
    assert "is not a range" in capsys.readouterr().err


@contextlib.contextmanager
def commanded(running: Running, audit: Path, dead_man_s: float) -> Iterator[subprocess.Popen[bytes]]:
    """The command in a process of its own, which has set 40."""
    # A job in the background of a shell, as this may be, ignores SIGINT and hands that on.
    command = ["env", "--default-signal=INT,HUP", sys.executable, "-m", "inferencegym"]
    command += ["live", "control", "--engine", running.server.url]
    command += ["--control-file", str(running.control), "--bound", "batch_size=4:44", "--dead-man", str(dead_man_s)]
    command += ["--agent", 'constant:{"batch_size": 40}', "--audit", str(audit)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        until(lambda: running.batch_size == 40)
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_killed_controller_leaves_the_engine_to_its_users_setting(running: Running, tmp_path: Path) -> None:
    with commanded(running, tmp_path / "audit.jsonl", 5):
        pass
    until(lambda: running.batch_size == 20)


def test_a_controller_after_a_killed_one_gives_back_the_users_setting(running: Running, tmp_path: Path) -> None:
    """The dead owner's lease has ten minutes left, and its order is in force."""
    with commanded(running, tmp_path / "audit.jsonl", 600):
        pass
    assert running.batch_size == 40
    bounds = Bounds({"kv_budget": (0.5, 1.0)})
    controller = running.controller(Wants(40, 0.5), tmp_path / "audit.jsonl", bounds=bounds)
    until(lambda: running.batch_size == 20)  # though it sets another knob
    controller.second()
    controller.give_back("done")
    until(lambda: json.loads(Path(f"{running.control}.state").read_text())["in_force"]["kv_budget"] == 1.0)
    assert running.batch_size == 20


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_that_ends_the_command_withdraws_its_order_at_once(
    running: Running, tmp_path: Path, sign: signal.Signals
) -> None:
    with commanded(running, tmp_path / "audit.jsonl", 600) as process:
        process.send_signal(sign)
        assert process.wait() == 0
    until(lambda: running.batch_size == 20)
    assert entries(tmp_path / "audit.jsonl")[-1]["given_back"] == "the controller was stopped"
    assert "owner" not in json.loads(running.control.read_text())


def test_a_paused_controller_that_lost_its_lease_ends_and_sets_nothing(running: Running, tmp_path: Path) -> None:
    with commanded(running, tmp_path / "audit.jsonl", 5) as process:
        with Path(f"{running.control}.lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # it is not paused while it holds the lock
            process.send_signal(signal.SIGSTOP)
        until(lambda: running.batch_size == 20)
        second = running.controller(Wants(4), tmp_path / "second.jsonl", dead_man_s=600.0)
        second.second()
        until(lambda: running.batch_size == 10)
        process.send_signal(signal.SIGCONT)
        assert process.wait() == 2
        assert process.stderr is not None
        assert b"another controller sets this engine" in process.stderr.read()
    assert running.batch_size == 10
    second.give_back("done")
    until(lambda: running.batch_size == 20)


def test_a_controller_that_is_stopped_gives_the_engine_back(running: Running, tmp_path: Path) -> None:
    command = ["live", "control", "--engine", running.server.url, "--control-file", str(running.control)]
    command += ["--bound", "batch_size=4:44", "--audit", str(tmp_path / "audit.jsonl"), "--seconds", "2.5"]
    assert main([*command, "--agent", 'constant:{"batch_size": 40}']) == 0
    until(lambda: running.batch_size == 20)
    assert entries(tmp_path / "audit.jsonl")[-1]["given_back"] == "the controller was stopped"


def test_a_learned_policy_advises(running: Running) -> None:
    engine = VllmEngine(EngineApi(running.server.url), running.control)
    advice = Adviser(engine, TASK, make_agent("ppo", TASK)).advise(0.0)
    assert 1 <= advice.wanted["batch_size"] <= 512
