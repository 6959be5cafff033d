"""Operator times of any card: the adapter's times agree with the library and its raw rows."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

pytest.importorskip("aiconfigurator_core", reason="the extra `hardware` is not installed")

import aiconfigurator_core

from cli.main import main
from inferencegym.errors import InvalidConfigError, TableError
from simulator.hardware.aiconfigurator import AiconfiguratorSource, Deployment, kernels
from simulator.hardware.catalogue import hardware_data, table_path
from simulator.hardware.kernel_times import in_order
from simulator.hardware.memory import kv_capacity_tokens
from simulator.hardware.operators import EXTRAPOLATED, INTERPOLATED, MEASURED, MODELLED, Chunk
from simulator.hardware.profiles import engine
from simulator.hardware.raw_keys import RawKeys
from simulator.hardware.sources import engine_of, operators_of, source_of, with_fp8_kv
from simulator.hardware.tables import load_tables
from simulator.offline.table import PROMPT_TOKENS, Slice, table_row

RAW = Path(aiconfigurator_core.__file__).parent / "systems" / "data"
H100_8B = Deployment("h100_sxm", "llama-3.1-8b")
KERNELS_ONLY = engine("nofit")


def test_the_library_is_the_pinned_one() -> None:
    from importlib.metadata import version

    assert version("aiconfigurator-core") == hardware_data()["library"]["version"]


@pytest.mark.parametrize(
    ("deployment", "tier"),
    [(H100_8B, "BF16"), (H100_8B, "FP8"), (Deployment("h200_sxm", "gpt-oss-120b", tp=2), "MXFP4")],
)
def test_a_decode_iteration_is_that_of_the_library(deployment: Deployment, tier: str) -> None:
    found = kernels(deployment, tier)
    model = AiconfiguratorSource(deployment).operators(tier, KERNELS_ONLY)
    for sequences, context in ((16, 1024), (64, 512)):
        theirs = found.handle.decode_step_latency(sequences, context, 2)
        assert model.decode_ms(sequences, context) == pytest.approx(theirs, rel=3e-2)
        # single shapes, before times are made non-decreasing
        exact = found.linear(sequences) + found.head(sequences) + found.decode_attention(sequences, context)
        assert exact == pytest.approx(theirs, rel=2e-3)


def test_decode_attention_is_the_raw_measurement_in_every_layer() -> None:
    rows = pq.read_table(RAW / "h100_sxm/attention/vllm/0.24.0/generation_attention_perf.parquet").to_pandas()
    llama = rows[(rows.num_heads == 32) & (rows.num_key_value_heads == 8) & (rows.head_dim == 128)]
    llama = llama[(llama.window_size == 0) & (llama.kv_cache_dtype == "bfloat16") & (llama.batch_size == 16)]
    measured_ms = float(llama[llama.step == 1023].latency.iloc[0])
    model = AiconfiguratorSource(H100_8B).operators("BF16", KERNELS_ONLY)
    assert model.layers == 32
    assert model.decode_attention_ms(16, 1024) == pytest.approx(32 * measured_ms, rel=0.02)  # the library smooths


def test_gemms_of_a_layer_are_raw_measurements_where_their_shape_was_timed() -> None:
    rows = pq.read_table(RAW / "h100_sxm/gemm/vllm/0.24.0/gemm_perf.parquet").to_pandas()
    exact = rows[(rows.gemm_dtype == "bfloat16") & (rows.m == 16) & (rows.n == 4096) & (rows.k == 4096)].latency.iloc[0]
    found = kernels(H100_8B, "BF16")
    names = [name for name, _, _ in found.operators["generation"]]
    output = names.index("generation_proj_gemm")
    evaluated = found.handle.evaluate_generation_ops([output], batch_size=16, s=2, x=16)
    assert evaluated[0][1] == pytest.approx(32 * float(exact), rel=1e-6)


def test_more_rows_longer_contexts_and_longer_prompts_never_take_less_time() -> None:
    model = AiconfiguratorSource(Deployment("l40s", "gpt-oss-20b")).operators("MXFP4", engine("vllm_v1_8k"))
    assert (np.diff([model.linear_ms(n) for n in range(1, 9000, 7)]) >= 0).all()
    for n in (1, 48, 512):
        assert (np.diff([model.decode_ms(n, c) for c in range(64, 9000, 61)]) >= 0).all()
    assert (np.diff([model.prefill_ms(p) for p in range(64, 8192, 64)]) > 0).all()


def test_times_that_fall_share_their_mean_with_those_before() -> None:
    assert in_order([1.0, 3.0, 2.0, 4.0, 3.5, 3.0, 9.0]).tolist() == [1.0, 2.5, 2.5, 3.5, 3.5, 3.5, 9.0]


def test_prompts_of_one_length_share_a_launch() -> None:
    model = AiconfiguratorSource(H100_8B).operators("BF16", KERNELS_ONLY)
    assert model.prefill_attention_ms([Chunk(128)] * 16) < 16 * model.prefill_attention_ms([Chunk(128)])


def test_support_is_looked_up_in_the_raw_rows() -> None:
    keys = RawKeys("h100_sxm", "vllm", "0.24.0")
    gemm = {"n": 4096, "k": 4096, "quant_mode": "fp8"}
    assert keys.level("Gemm", gemm, 16, 0, 0) == MEASURED
    assert keys.level("Gemm", gemm, 300, 0, 0) == INTERPOLATED
    assert keys.level("Gemm", {**gemm, "n": 28672}, 16, 0, 0) == INTERPOLATED
    assert keys.level("Gemm", {**gemm, "n": 128256}, 16, 0, 0) == EXTRAPOLATED
    assert keys.level("Gemm", {**gemm, "quant_mode": "int4_wo"}, 16, 0, 0) == MODELLED
    attention = {"n": 32, "n_kv": 8, "head_size": 128, "window_size": 0, "kv_cache_dtype": "bfloat16"}
    assert keys.level("GenerationAttention", attention, 0, 16, 1024) == MEASURED
    assert keys.level("GenerationAttention", attention, 0, 16, 1000) == INTERPOLATED
    assert keys.level("GenerationAttention", attention, 0, 16, 10_000_000) == EXTRAPOLATED
    assert keys.level("GenerationAttention", {**attention, "n": 31}, 0, 16, 1024) == MODELLED
    assert keys.level("Elementwise", {}, 1, 1, 1) == MODELLED


def test_shares_of_time_add_up_and_drafting_counts_as_modelled() -> None:
    source = AiconfiguratorSource(H100_8B)
    for shares in source.time_shares().values():
        assert sum(shares.values()) == pytest.approx(1.0, abs=1e-3)
    assert source.support("BF16", 16, 1024, 2) >= MODELLED


def test_memory_is_that_of_one_card_of_the_replica() -> None:
    whole, half = (
        AiconfiguratorSource(Deployment("h200_sxm", "llama-3.1-70b", tp=tp, tiers=("FP8",))) for tp in (1, 2)
    )
    # Keys and values of 80 layers: 8 heads of 128 numbers of 2 bytes.
    assert whole.kv_bytes_per_token == 80 * 2 * 8 * 128 * 2
    assert half.kv_bytes_per_token == whole.kv_bytes_per_token / 2
    assert half.weights_gb["FP8"] == pytest.approx(whole.weights_gb["FP8"] / 2, rel=0.01)
    assert (whole.cards_per_replica, half.cards_per_replica) == (1, 2)


def test_a_kv_cache_in_8_bits_holds_twice_the_tokens_and_reads_long_contexts_faster() -> None:
    wide, narrow = (
        AiconfiguratorSource(Deployment("b200_sxm", "llama-3.1-70b", tiers=("FP8",), kv_cache_dtype=dtype))
        for dtype in ("bf16", "fp8")
    )
    assert narrow.kv_bytes_per_token == wide.kv_bytes_per_token / 2
    assert kv_capacity_tokens(narrow, "FP8", 1.0, 0) == pytest.approx(
        2 * kv_capacity_tokens(wide, "FP8", 1.0, 0), abs=2
    )
    long = [source.operators("FP8", engine("vllm_v1_8k")).decode_ms(64, 8192) for source in (wide, narrow)]
    assert 0.5 * long[0] < long[1] < 0.8 * long[0]
    # At a short context the weights are nearly all.
    short = [source.operators("FP8", engine("vllm_v1_8k")).decode_ms(1, 128) for source in (wide, narrow)]
    assert short[1] == pytest.approx(short[0], rel=0.02)


def test_a_table_with_a_kv_cache_in_8_bits_is_built_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    wanted = ["build-table", "--system", "l40s", "--model", "gpt-oss-20b", "--kv-cache-dtype"]
    assert main([*wanted, "fp8"]) == 0
    built, shipped = (
        load_tables(tmp_path / "l40s-gpt-oss-20b-fp8-kv.parquet"),
        load_tables(table_path("l40s-gpt-oss-20b")),
    )
    assert built.meta["kv_bytes_per_token"] == shipped.meta["kv_bytes_per_token"] / 2
    assert built.meta["aiconfigurator"]["deployment"]["kv_cache_dtype"] == "fp8"
    assert "kv_cache_dtype" not in shipped.meta["aiconfigurator"]["deployment"]
    assert source_of(built.meta).kv_bytes_per_token == built.meta["kv_bytes_per_token"]
    assert main([*wanted, "fp4"]) == 2
    assert "'fp4' is unknown: one of bf16, fp8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("deployment", "field"),
    [
        (Deployment("h100_sxm", "qwen3-30b-a3b", tiers=("FP8",)), "tiers"),
        (Deployment("h200_sxm", "deepseek-v3", tp=8), "tiers"),
        (Deployment("l40s", "llama-3.1-8b", tp=4), "tiers"),
        (Deployment("b200_sxm", "gpt-oss-120b", engine="trtllm", tp=4), "tiers"),
        (Deployment("h100_sxm", "llama-3.1-8b", tiers=("INT4",)), "tiers"),
        (Deployment("l40s", "llama-3.1-8b", tiers=("NVFP4",)), "tiers"),
        (Deployment("h100_sxm", "llama-3.1-405b"), "tiers"),
        (Deployment("h100", "llama-3.1-8b"), "system"),
        (Deployment("h100_sxm", "llama"), "model"),
        (Deployment("h100_sxm", "llama-3.1-8b", tp=3), "tp"),
        (Deployment("h100_sxm", "llama-3.1-8b", engine="tgi"), "engine"),
    ],
)
def test_what_is_held_back_or_not_there_is_refused_with_the_reason(deployment: Deployment, field: str) -> None:
    with pytest.raises(InvalidConfigError) as refused:
        AiconfiguratorSource(deployment)
    assert refused.value.field == field


@pytest.mark.parametrize("name", ["h100-llama-3.1-70b-tp4", "l40s-gpt-oss-20b", "b200-llama-3.1-8b"])
def test_a_sample_of_a_catalogue_tables_rows_rebuilds_to_the_committed_values(name: str) -> None:
    table = pq.read_table(table_path(name)).to_pydict()
    meta = load_tables(table_path(name)).meta
    source, profile = source_of(meta), engine_of(meta)
    for i in np.random.default_rng(0).integers(len(table["decode_ms"]), size=8):
        tier, prompt = source.tiers[table["quant_tier"][i]], table["prompt_len_bucket"][i]
        part = Slice(source, profile, tier, prompt, table["spec_length"][i], saturated=False)
        rebuilt = table_row(part, table["batch_size"][i], 1.0)
        assert rebuilt == pytest.approx({column: table[column][i] for column in rebuilt}, rel=1e-9)
    assert len(PROMPT_TOKENS) == max(table["prompt_len_bucket"]) + 1


@pytest.mark.parametrize("name", ["h200-llama-3.1-70b-tp2", "l40s-gpt-oss-20b", "b200-llama-3.1-8b"])
def test_listed_operators_give_the_librarys_iterations(name: str) -> None:
    """Else: python -m scripts.build_catalogue --operators."""
    tables = load_tables(table_path(name))
    source, profile = source_of(tables.meta), engine_of(tables.meta)
    for tier, listed in zip(tables.tiers, operators_of(tables), strict=True):
        library = source.operators(tier, profile)
        for n, context, chunks, drafts in (
            (1, 500, (), 0),
            (37, 1_300, (), 2),
            (300, 900, (), 4),
            (20, 700, (Chunk(700),), 0),
            (20, 700, (Chunk(90), Chunk(2_500), Chunk(90)), 2),
            (64, 4_000, (Chunk(8_128, 8_128),), 0),
        ):
            expected = library.step_ms(n, context, chunks, drafts)
            assert listed.step_ms(n, context, chunks, drafts) == pytest.approx(expected, rel=0.01)
        for at, tier_name in enumerate(tables.tiers):
            for share, drafts in ((0.25, 0), (1.0, 2)):
                stated = tables.kv_pool_tokens(at, share, drafts > 0)
                assert stated == kv_capacity_tokens(source, tier_name, share, drafts)


@pytest.mark.parametrize("name", ["h200-llama-3.1-70b-tp2", "l40s-gpt-oss-20b", "b200-llama-3.1-8b"])
def test_a_shipped_table_with_an_fp8_kv_cache_has_the_times_that_the_library_measured_with_one(name: str) -> None:
    """Else: python -m scripts.build_catalogue --operators."""
    shipped = load_tables(table_path(name))
    tables, profile = with_fp8_kv(shipped), engine_of(shipped.meta)
    source = AiconfiguratorSource(
        Deployment(**{**shipped.meta["aiconfigurator"]["deployment"], "kv_cache_dtype": "fp8"})
    )
    drafts, batches, prompts = (list(tables.axes[axis]) for axis in ("spec_length", "batch_size", "prompt_len_bucket"))
    for t, tier in enumerate(tables.tiers):
        library, listed = source.operators(tier, profile), operators_of(tables)[t]
        for n, context, chunks in ((300, 900, ()), (20, 700, (Chunk(90), Chunk(2_500))), (64, 4_000, (Chunk(8_128),))):
            expected = library.step_ms(n, context, chunks)
            assert listed.step_ms(n, context, chunks) == pytest.approx(expected, rel=0.01)
        for n, context, k in ((1, 128, 0), (64, 4_096, 0), (128, 1_024, 2)):
            i, j, s = batches.index(n), prompts.index(context), drafts.index(k)
            expected = library.decode_ms(n, context, k)
            assert tables.decode_ms[t, s, i, j] == pytest.approx(expected, rel=1e-6)
            at = tables.iteration_batches.tolist().index(n)
            assert tables.iteration_ms[t, s, at, j] == pytest.approx(expected, rel=1e-6)
            assert tables.prefill_ms[t, j] == pytest.approx(library.prefill_ms(context), rel=0.01)
            for column, expected in (
                (tables.prefill_marginal_ms, library.prefill_marginal_ms(context, n, context)),
                (tables.prefill_saturated_ms, library.prefill_saturated_ms(context, n, context)),
            ):
                assert column[t, i, j] == pytest.approx(expected, rel=0.015)
        # Long contexts are read faster.
        assert tables.decode_ms[t, 0, 5, 7] < 0.98 * shipped.decode_ms[t, 0, 5, 7]
        for share, k in ((0.25, 0), (1.0, 2)):
            assert tables.kv_pool_tokens(t, share, k > 0) == kv_capacity_tokens(source, tier, share, k)


def test_a_built_table_is_played_without_the_library_and_gives_its_iterations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "mine.parquet"
    assert main(["build-table", "--system", "l40s", "--model", "qwen3-8b", "--out", str(out)]) == 0
    tables = load_tables(out)
    library = source_of(tables.meta).operators(tables.tiers[0], engine_of(tables.meta))
    monkeypatch.setitem(sys.modules, "simulator.hardware.aiconfigurator", None)
    assert main(["simulate", "--table", str(out), "--qps", "1"]) == 0
    assert "requests answered, 0 refused" in capsys.readouterr().out
    listed = operators_of(tables)[0]
    for n, context, chunks in ((1, 500, ()), (200, 900, ()), (20, 700, (Chunk(90), Chunk(2_500)))):
        assert listed.step_ms(n, context, chunks) == pytest.approx(library.step_ms(n, context, chunks), rel=0.01)
    halved = operators_of(with_fp8_kv(tables))[0]
    assert halved.kv_bytes_per_token == listed.kv_bytes_per_token / 2


def test_a_table_whose_operators_are_missing_or_damaged_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = load_tables(table_path("l40s-gpt-oss-20b"))
    unknown = replace(tables, path="old.parquet", sha256="0" * 64)
    damaged = replace(unknown, meta={**tables.meta, "operators": {"layers": [24]}})
    monkeypatch.setitem(sys.modules, "simulator.hardware.aiconfigurator", None)
    with pytest.raises(TableError, match=r"old\.parquet was built by an earlier release .* build it again"):
        operators_of(unknown)
    with pytest.raises(TableError, match=r"operators\.linear must hold .* rebuild it"):
        operators_of(damaged)


def test_a_table_of_any_deployment_is_built_with_ones_own_host_overheads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile, out = tmp_path / "slow.json", tmp_path / "mine.parquet"
    profile.write_text(json.dumps({"step_overhead_ms": 5.0, "max_batched_tokens": 4096}))
    wanted = ["--system", "l40s", "--model", "gpt-oss-20b", "--profile", str(profile), "--out", str(out)]
    assert main(["build-table", *wanted]) == 0
    assert str(out) in capsys.readouterr().out
    mine, shipped = load_tables(out), load_tables(table_path("l40s-gpt-oss-20b"))
    assert (mine.meta["profile"]["step_overhead_ms"], mine.meta["max_batched_tokens"]) == (5.0, 4096)
    # The shipped one has 0.5 ms.
    assert mine.decode_ms[0, 0] == pytest.approx(shipped.decode_ms[0, 0] + 4.5)


@pytest.mark.parametrize("wrong", ['{"step_overhead_ms": -1}', '{"speed": 1}', "[]", "{", '{"scheduler": "other"}'])
def test_a_profile_that_is_none_is_refused(wrong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = tmp_path / "profile.json"
    profile.write_text(wrong)
    wanted = ["--system", "l40s", "--model", "gpt-oss-20b", "--out", str(tmp_path / "t.parquet")]
    assert main(["build-table", *wanted, "--profile", str(profile)]) == 2
    assert str(profile) in capsys.readouterr().err
    assert not (tmp_path / "t.parquet").exists()


def test_what_can_be_built_is_listed_with_its_coverage_or_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = ["--system", "l40s", "--model", "llama-3.1-8b", "--tp", "1", "--tp", "4", "--json"]
    assert main(["hardware", "--buildable", *wanted]) == 0
    one, four = json.loads(capsys.readouterr().out)
    assert one["tiers"] == ["BF16", "FP8"]
    assert 0.2 < one["time_shares"]["BF16 decode"]["measured"] < 0.5
    assert (four["tiers"], four["cards_per_replica"]) == ([], 4)
    assert four["refused"]


def test_a_shipped_table_that_is_older_than_a_field_of_its_profile_has_the_shipped_value() -> None:
    meta = load_tables(table_path("h100-llama-3.1-8b")).meta
    assert "async_scheduling" not in meta["profile"]
    assert engine_of(meta).async_scheduling
    assert engine_of(meta).request_ms == engine("vllm_v1_8k").request_ms > 0.0
    own = {**meta["profile"], "name": "mine"}
    assert engine_of({**meta, "engine": "mine", "profile": own}).request_ms == 0.0
