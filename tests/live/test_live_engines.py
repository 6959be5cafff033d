"""Engines behind one interface: over real HTTP against stand-ins, vLLM's scheduler class on stand-in base classes."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from inferencegym import plugins
from inferencegym.errors import DataFormatError, InvalidActionError, InvalidConfigError, RemoteError
from live.driver import EngineApi
from live.engines.choose import engine_at
from live.engines.engine import Orders
from live.engines.order_file import OrderFile
from live.engines.sglang import SglangEngine
from live.engines.vllm import VllmEngine
from tests.damaged_control_files import NAMES, damage, remove
from tests.live_stand_ins import VLLM_SERIES, StandIn, scheduler_module
from tests.servers import ROOT


@pytest.fixture
def control(tmp_path: Path) -> Path:
    return tmp_path / "control.json"


@pytest.fixture
def scheduler(control: Path) -> Iterator[Any]:
    with scheduler_module(control) as module:
        yield module.LiveScheduler()


def test_the_scheduler_class_says_what_it_can_set_and_follows_the_file(scheduler: Any, control: Path) -> None:
    with StandIn(dict(VLLM_SERIES)) as server:
        engine = VllmEngine(EngineApi(server.url), control)
        assert engine.limits() == {
            "batch_size": (1.0, 64.0),
            "kv_budget": (0.1, 1.0),
            "spec_length": (0.0, 4.0),
            "prefill_tokens": (64.0, 2048.0),
        }
        assert engine.kv_blocks() == (100, 16)
        engine.set(Orders({"batch_size": 8, "spec_length": 2, "prefill_tokens": 256}))
        scheduler.schedule()
        assert scheduler.max_num_active_reqs == 8
        assert scheduler.max_num_scheduled_tokens == 256
        assert set(scheduler.dynamic_sd_lookup) == {2}
        assert engine.in_force()["batch_size"] == 8
        engine.set(Orders({"spec_length": 4}))
        scheduler.schedule()
        assert scheduler.dynamic_sd_lookup is None  # as the engine was started
        assert engine.in_force()["batch_size"] == 8  # what is not named stays


def test_blocks_are_held_back_as_they_become_free(scheduler: Any, control: Path) -> None:
    pool = scheduler.kv_cache_manager.block_pool
    running = pool.get_new_blocks(70)
    control.write_text(json.dumps({"set": {"kv_budget": 0.5}}))
    scheduler.schedule()
    assert pool.free == 0  # the 30 that were free are held, and 20 more are wanted
    assert scheduler.make_stats().kv_cache_usage == pytest.approx(1.0)
    pool.free_blocks(running)
    scheduler.schedule()
    assert pool.free == 50
    assert scheduler.make_stats().kv_cache_usage == 0.0
    control.write_text(json.dumps({"set": {"kv_budget": 1.0}}))
    scheduler.schedule()
    assert pool.free == 100


def test_orders_end_and_the_engine_goes_back_by_itself(
    scheduler: Any, control: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = time.time() + 600
    control.write_text(json.dumps({"set": {"batch_size": 4}, "until": end, "then": {"batch_size": 32}}))
    scheduler.schedule()
    assert scheduler.max_num_active_reqs == 4
    monkeypatch.setattr(time, "time", lambda: end + 1)
    scheduler.schedule()
    assert scheduler.max_num_active_reqs == 32


@pytest.mark.parametrize("name", NAMES)
def test_a_damaged_control_file_returns_the_engine_to_its_users_setting(
    scheduler: Any, control: Path, name: str
) -> None:
    orders = OrderFile(control)
    orders.write(Orders({"batch_size": 20}))
    scheduler.schedule()
    orders.write(Orders({"batch_size": 4}, time.time() + 600, {"batch_size": 20}))
    scheduler.schedule()
    assert scheduler.max_num_active_reqs == 4
    damage(control, name)
    for _ in range(3):
        scheduler.schedule()
    assert scheduler.max_num_active_reqs == 20
    state = json.loads(Path(f"{control}.state").read_text())
    assert (state["errors"], state["in_force"]["batch_size"], state["user"]["batch_size"]) == (1, 20, 20)
    assert state["problem"]
    orders.user_setting()  # raises nothing, whatever it reads
    remove(control)
    orders.write(Orders({"batch_size": 8}))
    scheduler.schedule()
    assert scheduler.max_num_active_reqs == 8
    assert json.loads(Path(f"{control}.state").read_text())["problem"] == ""


def test_an_error_of_the_scheduler_class_itself_leaves_the_users_setting(scheduler: Any, control: Path) -> None:
    """vLLM's pool refuses blocks, and its statistics have no room for ours: the engine serves on."""
    pool = scheduler.kv_cache_manager.block_pool
    pool.get_new_blocks = pool.get_num_free_blocks = None
    control.write_text(json.dumps({"set": {"kv_budget": 0.5, "batch_size": 4}, "until": time.time() + 600}))
    for _ in range(5):
        scheduler.schedule()
        assert scheduler.make_stats().kv_cache_usage == 0.0
    assert (scheduler.max_num_active_reqs, scheduler.held_blocks) == (64, [])
    state = json.loads(Path(f"{control}.state").read_text())
    assert state["errors"] >= 1
    assert "NoneType" in state["problem"]


def test_a_state_file_replaces_a_link_and_is_readable_by_all(control: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    for name in (f"{control}.state", f"{control}.state.new"):
        Path(name).symlink_to(precious)
    with scheduler_module(control) as module:
        module.LiveScheduler()
    assert precious.read_text() == "mine"
    state = Path(f"{control}.state")
    assert not state.is_symlink()
    assert state.stat().st_mode & 0o777 == 0o644
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([precious.name, state.name, f"{state.name}.new"])


def test_a_state_that_cannot_be_written_is_counted(scheduler: Any, control: Path) -> None:
    Path(f"{control}.state").unlink()
    Path(f"{control}.state").mkdir()
    control.write_text('{"set": {"batch_size": 8}}')
    scheduler.schedule()
    assert (scheduler.max_num_active_reqs, scheduler.errors) == (8, 1)
    assert sorted(path.name for path in control.parent.iterdir()) == ["control.json", "control.json.state"]


def test_a_link_in_place_of_the_lock_is_refused(scheduler: Any, control: Path, tmp_path: Path) -> None:
    Path(f"{control}.lock").symlink_to(tmp_path / "precious")
    with pytest.raises(DataFormatError, match="lock"):
        OrderFile(control).write(Orders({"batch_size": 8}))
    assert not (tmp_path / "precious").exists()


def test_a_lock_that_a_paused_process_holds_is_named(control: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("live.engines.order_file.LOCK_S", 0.0)
    with Path(f"{control}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(InvalidConfigError, match=r"has held .*control.json.lock"):
            OrderFile(control).write(Orders({"batch_size": 8}))


# ---------------------------------------------------------------- owners


def test_a_lease_refuses_others_until_it_ends_or_its_owner_gives_it_up(scheduler: Any, control: Path) -> None:
    first, second = OrderFile(control), OrderFile(control)
    first.write(Orders({"batch_size": 4}, time.time() + 600, {"batch_size": 20}))
    said = rf"process {os.getpid()} on {socket.gethostname()}, whose lease ends at \d\d:\d\d:\d\d"
    for orders in (Orders({"batch_size": 11}, time.time() + 600, {}), Orders({"batch_size": 11})):
        with pytest.raises(InvalidConfigError, match=said):
            second.write(orders)
    first.write(Orders({"batch_size": 18}, time.time() + 600, {"batch_size": 20}))
    first.write(Orders({"batch_size": 20}))
    second.write(Orders({"batch_size": 11}, time.time() - 1, {"batch_size": 20}))  # over already
    first.write(Orders({"batch_size": 12}))
    scheduler.schedule()
    assert scheduler.max_num_active_reqs == 12


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"host": "another"}, True),  # whose processes cannot be seen from here
        ({"pid": 1}, True),
        ({"pid": 2**22 + 1}, False),  # no such process: Linux numbers them up to 2**22
        ({"pid": -1}, False),
        ({"pid": 10**30}, False),
        ({"pid": "1"}, False),
    ],
)
def test_the_lease_of_a_process_that_is_gone_is_void(control: Path, changes: dict[str, Any], refused: bool) -> None:
    OrderFile(control).write(Orders({"batch_size": 4}, time.time() + 600, {"batch_size": 20}))
    content = json.loads(control.read_text())
    control.write_text(json.dumps({**content, "owner": {**content["owner"], **changes}}))
    if refused:
        with pytest.raises(InvalidConfigError, match="another controller"):
            OrderFile(control).write(Orders({"batch_size": 8}))
    else:
        OrderFile(control).write(Orders({"batch_size": 8}))


@pytest.mark.parametrize("read", [False, True])
def test_the_users_setting_outlives_a_controller_that_was_killed(scheduler: Any, control: Path, read: bool) -> None:
    """An idle engine has not read the user's own setting yet, nor the killed controller's orders."""
    with StandIn(dict(VLLM_SERIES)) as server:
        engine = VllmEngine(EngineApi(server.url), control)
        control.write_text('{"set": {"batch_size": 20}}')
        if read:
            scheduler.schedule()
        assert engine.user_setting()["batch_size"] == 20
        OrderFile(control).write(Orders({"batch_size": 4}, time.time() + 600, engine.user_setting()))
        if read:
            scheduler.schedule()
            assert engine.in_force()["batch_size"] == 4
        assert engine.user_setting() == {"batch_size": 20, "kv_budget": 1, "spec_length": 4, "prefill_tokens": 2048}


# ---------------------------------------------------------------- versions


def test_the_scheduler_class_refuses_a_version_that_it_was_not_tested_with(control: Path) -> None:
    said = r"tested with vLLM 0\.32\.x, and this is 0\.33\.0: .* set INFERENCEGYM_ALLOW_UNTESTED=1"
    with scheduler_module(control, "0.33.0") as module, pytest.raises(RuntimeError, match=said):
        module.LiveAsyncScheduler()


def test_an_untested_version_runs_with_a_warning_where_the_user_allows_it(
    control: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("INFERENCEGYM_ALLOW_UNTESTED", "1")
    with scheduler_module(control, "0.33.0") as module:
        assert module.LiveAsyncScheduler().limits["batch_size"] == [1, 64]
        assert "was tested with vLLM 0.32.x and runs untested on 0.33.0" in caplog.text
        monkeypatch.setattr(module, "NEEDED", (*module.NEEDED, "renamed"))
        with pytest.raises(RuntimeError, match=r"without renamed: install vLLM 0\.32"):
            module.LiveAsyncScheduler()


def test_a_vllm_without_the_scheduler_class_is_observed_only(control: Path) -> None:
    with StandIn(dict(VLLM_SERIES)) as server:
        engine = engine_at("vllm", server.url, None)
        assert engine.limits() == {}
        assert engine.read().queue_requests == 0
        with pytest.raises(InvalidConfigError, match="can only be observed"):
            engine.set(Orders({"batch_size": 4}))
        with pytest.raises(InvalidConfigError, match="--scheduler-cls"):
            VllmEngine(EngineApi(server.url), control)


def test_an_engine_of_another_kind_is_named_by_its_missing_series() -> None:
    with StandIn({"other:queue": 1.0}) as server, pytest.raises(RemoteError, match="no series vllm:"):
        engine_at("vllm", server.url, None)


# ---------------------------------------------------------------- SGLang

SGLANG_SERIES = {
    "sglang:num_queue_reqs": 3.0,
    "sglang:num_running_reqs": 7.0,
    "sglang:token_usage": 0.25,
    "sglang:num_requests_total": 11.0,
    "sglang:prompt_tokens_total": 400.0,
    "sglang:generation_tokens_total": 500.0,
    'sglang:time_to_first_token_seconds_bucket{le="+Inf"}': 11.0,
    'sglang:inter_token_latency_seconds_bucket{le="+Inf"}': 489.0,
}


def sglang_post(path: str, body: Any) -> tuple[int, Any]:
    """The endpoint as SGLang 0.5 checks it: SetInternalStateReq of its io_struct.py."""
    if path == "/set_internal_state":
        if set(body) != {"server_args"} or not isinstance(body["server_args"], dict):
            return 422, {"detail": "server_args is the only field, an object"}
        known = body["server_args"].keys() <= {
            "pp_max_micro_batch_size",
            "speculative_accept_threshold_single",
            "speculative_accept_threshold_acc",
        }
        size = body["server_args"].get("pp_max_micro_batch_size", 1)
        return 200, [{"updated": known and 1 <= size <= 40, "server_args": body["server_args"]}]
    return 404, {}


@pytest.fixture
def sglang() -> Iterator[StandIn]:
    with StandIn(dict(SGLANG_SERIES), sglang_post) as server:
        server.documents["/server_info"] = {
            "max_running_requests": 48,
            "internal_states": [{"pp_max_micro_batch_size": 32}],
        }
        yield server


def test_sglang_is_read_and_its_batch_bound_set_over_http(sglang: StandIn) -> None:
    engine = engine_at("sglang", sglang.url, None)
    assert isinstance(engine, SglangEngine)
    reading = engine.read()
    assert (reading.queue_requests, reading.running_requests, reading.kv_occupancy) == (3.0, 7.0, 0.25)
    assert engine.limits() == {"batch_size": (1.0, 48.0)}
    assert engine.in_force() == {"batch_size": 32.0}
    engine.set(Orders({"batch_size": 16}))
    assert sglang.posted == [("/set_internal_state", {"server_args": {"pp_max_micro_batch_size": 16}})]
    assert engine.in_force() == {"batch_size": 16.0}


def test_a_value_that_sglang_does_not_take_is_an_error_and_not_in_force(sglang: StandIn) -> None:
    engine = SglangEngine(EngineApi(sglang.url))
    with pytest.raises(RemoteError, match="did not take"):
        engine.set(Orders({"batch_size": 48}))
    assert engine.in_force() == {"batch_size": 32.0}
    with pytest.raises(InvalidActionError, match="left out"):
        engine.set(Orders({"kv_budget": 0.5}))


def test_an_engine_of_a_plugin_is_chosen_by_its_name(
    sglang: StandIn, control: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "tests" / "plugin")
    half = EntryPoint("half", "night_shift.engines:HalfEngine", "inferencegym.engines")
    broken = EntryPoint("broken", "night_shift.engines:Nothing", "inferencegym.engines")
    monkeypatch.setattr(plugins, "_installed", lambda: [plugins.Plugin(half), plugins.Plugin(broken)])
    engine = engine_at("half", sglang.url, None)
    assert (engine.name, engine.limits()) == ("half", {"batch_size": (1.0, 24.0)})
    with pytest.raises(InvalidConfigError, match="one of vllm, sglang, broken, half"):
        engine_at("quarter", sglang.url, None)
    with pytest.raises(InvalidConfigError, match=r"the entry point 'broken' .* cannot be loaded"):
        engine_at("broken", sglang.url, None)
    with pytest.raises(InvalidConfigError, match="the engine half is controlled over HTTP: leave --control-file out"):
        engine_at("half", sglang.url, control)


def test_sglang_follows_no_control_file(sglang: StandIn, control: Path) -> None:
    with pytest.raises(InvalidConfigError, match="over HTTP"):
        engine_at("sglang", sglang.url, control)
