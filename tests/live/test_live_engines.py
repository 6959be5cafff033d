"""Engines behind one interface: over real HTTP against stand-ins, vLLM's scheduler class on stand-in base classes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inferencegym.errors import InvalidActionError, InvalidConfigError, RemoteError
from live.driver import EngineApi
from live.engines.choose import engine_at
from live.engines.engine import Orders
from live.engines.sglang import SglangEngine
from live.engines.vllm import VllmEngine
from tests.live_stand_ins import VLLM_SERIES, StandIn, scheduler_module


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
        assert engine.wait_until_applied()["in_force"]["batch_size"] == 8
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


def test_orders_end_and_the_engine_goes_back_by_itself(scheduler: Any, control: Path) -> None:
    control.write_text(json.dumps({"set": {"batch_size": 4}, "until": time.time() + 0.2, "then": {"batch_size": 32}}))
    scheduler.schedule()
    assert scheduler.max_num_active_reqs == 4
    time.sleep(0.25)
    scheduler.schedule()
    assert scheduler.max_num_active_reqs == 32


@pytest.mark.parametrize("content", ["{", "[]", '{"set": {"batch": 3}}', '{"set": {"batch_size": "8"}}', "{}"])
def test_a_bad_control_file_changes_nothing_and_is_reported(scheduler: Any, control: Path, content: str) -> None:
    control.write_text(content)
    scheduler.schedule()
    assert scheduler.max_num_active_reqs == 64
    with StandIn(dict(VLLM_SERIES)) as server:
        engine = VllmEngine(EngineApi(server.url), control)
        with pytest.raises(RemoteError, match="refused"):
            engine.wait_until_applied()
        engine.set(Orders({"batch_size": 8}))  # good orders mend it
        scheduler.schedule()
        assert engine.wait_until_applied()["in_force"]["batch_size"] == 8


def test_the_scheduler_class_refuses_a_version_that_it_was_not_tested_with(control: Path) -> None:
    with scheduler_module(control, "0.33.0") as module, pytest.raises(RuntimeError, match=r"knows vLLM 0\.32"):
        module.LiveAsyncScheduler()


def test_a_vllm_without_the_scheduler_class_is_observed_only(control: Path) -> None:
    with StandIn(dict(VLLM_SERIES)) as server:
        engine = engine_at("vllm", server.url, None)
        assert engine.limits() == {}
        assert engine.read().queue_requests == 0
        with pytest.raises(InvalidConfigError, match="observed only"):
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
    """Endpoints as SGLang 0.5 checks them: SetInternalStateReq and PdRoleSwitchReqInput of its io_struct.py."""
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
    if path == "/pd_role_switch":
        if not set(body) <= {"new_role", "decode_cuda_graph_bs"} or body["new_role"] not in ("prefill", "decode"):
            return 400, {"success": False, "message": "new_role must be prefill or decode"}
        return 200, {"success": True, "message": "ok", "old_role": "prefill", "new_role": body["new_role"]}
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


def test_sglang_switches_between_prefill_and_decode(sglang: StandIn) -> None:
    engine = SglangEngine(EngineApi(sglang.url))
    assert engine.switch_role("decode") == "prefill"
    assert sglang.posted == [("/pd_role_switch", {"new_role": "decode"})]
    with pytest.raises(InvalidConfigError, match="one of prefill, decode"):
        engine.switch_role("both")


def test_sglang_follows_no_control_file(sglang: StandIn, control: Path) -> None:
    with pytest.raises(InvalidConfigError, match="over HTTP"):
        engine_at("sglang", sglang.url, control)
