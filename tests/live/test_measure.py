"""``inferencegym measure`` against an HTTP engine without a model but with known iteration times."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Self

import pytest

from cli.main import main
from inferencegym.errors import DataFormatError, InvalidConfigError, RemoteError
from live.driver import EngineApi, EngineRequest, RequestTiming
from live.measure import MeasureSettings, engine_facts, measure_engine
from live.metrics import MetricsPage, read_page
from simulator.hardware.engine_times import EngineSource
from simulator.hardware.sources import source_of
from simulator.hardware.tables import load_tables
from simulator.offline.engine_fit import MeasuredEngine
from tests.engine_standin import (
    Law,
    Served,
    StandIn,
    running_engine,
    serve_arrivals_virtually,
    serve_virtually,
)

STEP_MS, SEQUENCE_MS, PROMPT_MS = 15.0, 1.5, 0.3
BRIEF = MeasureSettings(seconds=5, most_clients=8, kv_bytes_per_token=8192, max_batched_tokens=2048)


def linear() -> Law:
    return lambda decoding, context, prompts: (STEP_MS + SEQUENCE_MS * decoding + PROMPT_MS * sum(prompts)) / 1e3


def quick() -> Law:
    return lambda decoding, context, prompts: 0.0005


@pytest.mark.slow
def test_the_command_measures_an_engine_and_writes_a_table_that_plays_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "engine.parquet"
    # Six sequences at once: a loop of eight clients shows it.
    with running_engine(StandIn(linear(), max_num_seqs=6)) as url:
        options = ["--engine", url, "--out", str(out), "--seconds", "12", "--clients", "8", "--json"]
        assert main(["measure", *options, "--kv-bytes-per-token", "8192", "--max-batched-tokens", "2048"]) == 0
        said = json.loads(capsys.readouterr().out)
        assert main(["measure", *options]) == 2
        assert "exists already" in capsys.readouterr().err
    source = source_of(load_tables(out).meta)
    assert isinstance(source, EngineSource)
    # How late the engine itself is depends on the machine, so its times are compared with those that were fitted.
    assert json.loads(json.dumps(asdict(source.times))) == said["fit"]["times"]
    assert source.facts.max_num_seqs == 6
    assert (source.facts.block_tokens, source.facts.pool_blocks, source.facts.memory_share) == (16, 4096, 0.9)
    assert [r["phase"] for r in said["replays"]][-2:] == ["1 client, short", "Poisson"]
    assert any("6 sequences" in note for note in said["notes"])
    assert main(["simulate", "--table", str(out), "--qps", "1", "--prompt-tokens", "200", "--json"]) == 0
    played = json.loads(capsys.readouterr().out)
    assert played["tpot_p50_ms"] > source.times.step_ms


class VirtualEngine(EngineApi):
    """An engine with known times that states nothing but its model; its loads are served without waiting."""

    def check(self) -> Self:
        self.max_model_len = 1024
        return self

    def metrics(self) -> MetricsPage:
        raise RemoteError("no metrics")

    def play_closed(self, requests: Sequence[EngineRequest], n_clients: int) -> list[RequestTiming]:
        return timings(serve_virtually(linear(), [(r.prompt_tokens, r.output_tokens) for r in requests], n_clients))

    def play_open(self, requests: Sequence[EngineRequest]) -> list[RequestTiming]:
        due = [(r.arrival_s, r.prompt_tokens, r.output_tokens) for r in requests]
        return timings(serve_arrivals_virtually(linear(), due))


def timings(served: list[Served]) -> list[RequestTiming]:
    found = []
    for each in served:
        timing = RequestTiming(EngineRequest(each.sent_s, each.prompt, each.goal), sent_s=each.sent_s)
        for i, at_s in enumerate(each.token_s):
            timing.receive(at_s, i + 1)
        timing.ended_s = timing.last_token_s
        found.append(timing)
    return found


def test_the_load_reveals_the_times_of_a_known_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("live.measure.play_closed", VirtualEngine.play_closed)
    monkeypatch.setattr("live.measure.play_open", VirtualEngine.play_open)
    told = replace(BRIEF, seconds=60.0, most_clients=16, max_num_seqs=16, block_tokens=16, kv_pool_tokens=65_536)
    found = measure_engine(VirtualEngine("http://none"), told)
    times = found.fit.times
    assert times.step_ms == pytest.approx(STEP_MS, rel=0.01)
    four_ms = times.rows_ms(4) + 4 * (times.sequence_ms + 100 * times.context_ms)
    assert four_ms == pytest.approx(4 * SEQUENCE_MS, rel=0.01)
    prompt_ms = times.rows_ms(300) + times.sequence_ms + times.attention_ms * 300**2 / 2
    assert prompt_ms == pytest.approx(300 * PROMPT_MS, rel=0.02)
    assert [replay.phase for replay in found.replays][-3:] == ["16 clients, long", "1 client, short", "Poisson"]
    errors = found.replays[-1].errors
    assert abs(errors["tpot_p50_ms"]) < 0.01
    assert abs(errors["output_tokens_per_s"]) < 0.01


@pytest.mark.slow
def test_all_loops_up_to_a_bound_that_was_told_are_played() -> None:
    with running_engine(StandIn(linear(), max_num_seqs=4)) as url:
        found = measure_engine(EngineApi(url), replace(BRIEF, max_num_seqs=4))
    loops = [f"{n} client{'s' * (n > 1)}, {shape}" for n in (1, 2, 4) for shape in ("short", "long")]
    assert [phase.name for phase in found.phases] == [*loops, "1 client, short", "Poisson"]
    assert found.facts.max_num_seqs == 4


@pytest.mark.parametrize(
    ("rising", "reason"),
    [
        ("vllm:num_preemptions_total", "KV pool is too small"),
        ("vllm:spec_decode_num_drafts_total", "drafts tokens"),
        ("vllm:prefix_cache_hits_total", "reused prompts"),
    ],
)
def test_what_iteration_times_do_not_explain_is_refused_by_the_engines_own_counters(rising: str, reason: str) -> None:
    with pytest.raises(DataFormatError, match=reason):
        measured(StandIn(quick(), rising=rising, counters={rising: 5.0}))


def test_an_engine_that_does_not_stream_is_refused() -> None:
    with pytest.raises(DataFormatError, match="does not stream"):
        measured(StandIn(quick(), streams=False))


def test_a_pool_for_few_sequences_is_refused_before_the_load() -> None:
    with pytest.raises(DataFormatError, match="only 2 sequences of 432 tokens fit"):
        measured(StandIn(linear(), blocks=66))


def test_an_engine_that_is_not_there_is_said() -> None:
    with pytest.raises(RemoteError, match="is the engine running"):
        measure_engine(EngineApi("http://127.0.0.1:9"), BRIEF)


def test_what_the_engine_does_not_state_must_be_told() -> None:
    with running_engine(StandIn(linear())) as url:
        api = EngineApi(url).check()
        page = api.metrics()
    with pytest.raises(InvalidConfigError, match="--kv-bytes-per-token"):
        engine_facts(api, page, MeasureSettings(), [])
    with pytest.raises(InvalidConfigError, match="--block-tokens"):
        engine_facts(api, None, BRIEF, [])
    stated = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="101",kv_cache_memory_bytes="1616000"OTHER} 1\n'
    own = engine_facts(api, read_page(stated.replace("OTHER", "")), MeasureSettings(), [])
    assert (own.kv_bytes_per_token, own.pool_blocks) == (1000.0, 100)
    # If the number of blocks is given, the bytes that vLLM would have used do not describe the pool.
    overridden = stated.replace("OTHER", ',num_gpu_blocks_override="101"')
    with pytest.raises(InvalidConfigError, match="--kv-bytes-per-token"):
        engine_facts(api, read_page(overridden), MeasureSettings(), [])
    told = MeasureSettings(kv_bytes_per_token=100.0, block_tokens=32, kv_pool_tokens=6500, max_num_seqs=7)
    notes: list[str] = []
    facts = engine_facts(api, None, told, notes)
    assert (facts.pool_blocks, facts.max_num_seqs, facts.max_model_len, facts.memory_share) == (203, 7, 1024, 1.0)
    assert len(notes) == 2
    assert "2048 prompt tokens per iteration are assumed" in notes[0]


@pytest.mark.parametrize(
    "wrong",
    [{"seconds": 1.0}, {"most_clients": 1}, {"max_num_seqs": 0}, {"kv_bytes_per_token": 0.0}, {"weights_gb": -1.0}],
)
def test_settings_out_of_range_are_refused_by_name(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidConfigError, match=next(iter(wrong))):
        MeasureSettings(**wrong)  # type: ignore[arg-type]


def measured(engine: StandIn) -> MeasuredEngine:
    with running_engine(engine) as url:
        return measure_engine(EngineApi(url), BRIEF)
