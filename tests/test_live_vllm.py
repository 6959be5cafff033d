"""The live environment on a real vLLM. Counts and limits are asserted, never milliseconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from live.driver import EngineApi, EngineRequest, play_open
from live.engines.vllm_server import VllmServer
from live.metrics import read_page
from tests.live_engine import vllm_server

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    with vllm_server(tmp_path_factory.mktemp("vllm"), max_num_seqs=32) as running:
        yield running


@pytest.fixture
def api(server: VllmServer) -> EngineApi:
    return EngineApi(server.url).check()


def iterations(api: EngineApi) -> float:
    return read_page(api.get_text("/metrics")).total("vllm:iteration_tokens_total_count")


def test_a_burst_takes_as_many_iterations_as_its_batches_have_tokens(api: EngineApi) -> None:
    """Three batches of 32 requests that write 40 tokens each: 120 iterations, and the first prompts by themselves."""
    before = iterations(api)
    timings = play_open(api, [EngineRequest(0.0, 32, 40)] * 96)
    assert [timing.error for timing in timings] == [""] * 96
    assert {timing.tokens for timing in timings} == {40}
    assert iterations(api) - before == pytest.approx(120, rel=0.05)
