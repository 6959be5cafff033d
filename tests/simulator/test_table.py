"""The committed lookup tables: shape, physics, provenance, and that the builder reproduces them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.fidelity.static_batches import argonne_errors, fit_overheads, table_vs_argonne
from cli.main import main
from inferencegym.errors import TableError
from inferencegym.tasks import table_index
from simulator.hardware import measured
from simulator.hardware.catalogue import table_path
from simulator.hardware.measured_model import MeasuredSource, support
from simulator.hardware.profiles import PROFILES_PATH, engine, profiles
from simulator.hardware.tables import load_tables
from simulator.offline.table import (
    BATCH_SIZES,
    COLUMNS,
    ITERATION_BATCHES,
    KV_BUDGETS,
    LONGEST_OUTPUT,
    METADATA_KEY,
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    SPEC_LENGTHS,
    Slice,
    build_table,
    output_lengths,
    table_metadata,
    table_row,
)

TIERS = tuple(profiles()["model"]["weights_gb"])
DATA = Path(__file__).parents[2] / "simulator" / "data"
TABLES = {
    table_path(card).name: (card, profiles()["hardware"][card]["engine"])
    for card in profiles()["hardware"]
    if card in table_index()
}
SPEC_COLUMNS = [
    "batch_size",
    "kv_budget",
    "spec_length",
    "quant_tier",
    "prompt_len_bucket",
    "ttft_p50_ms",
    "ttft_p99_ms",
    "tpot_ms",
    "tps",
    "gpu_mem_gb",
    "cost_per_1k",
]


def read(name: str) -> dict[str, np.ndarray[Any, Any]]:
    table = pq.read_table(DATA / name)
    return {column: table[column].to_numpy() for column in table.column_names}


def metadata(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(pq.read_schema(DATA / name).metadata[METADATA_KEY])
    return loaded


def test_every_shipped_table_belongs_to_a_card() -> None:
    assert sorted(TABLES) == sorted(path.name for path in DATA.glob("*.parquet"))
    assert {"traces_llama3_8b.parquet", "traces_llama3_8b_a100_80gb.parquet"} <= set(TABLES)


@pytest.fixture(params=list(TABLES))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_every_configuration_has_one_row_with_the_published_columns_first(name: str) -> None:
    table = read(name)
    assert list(table)[: len(SPEC_COLUMNS)] == SPEC_COLUMNS
    keys = set(zip(*(table[column].tolist() for column in SPEC_COLUMNS[:5]), strict=True))
    grid = len(BATCH_SIZES) * len(KV_BUDGETS) * len(SPEC_LENGTHS) * len(TIERS) * len(PROMPT_TOKENS)
    assert len(keys) == len(table["tps"]) == grid == 5400


def test_every_value_is_finite_and_positive(name: str) -> None:
    table = read(name)
    for column in list(COLUMNS)[5:-1]:
        assert np.isfinite(table[column]).all(), column
        assert (table[column] > 0).all(), column
    assert set(np.unique(table["support"])) <= {0, 1, 2, 3}


def test_the_file_is_small_and_plain(name: str) -> None:
    file = pq.ParquetFile(DATA / name)
    assert (DATA / name).stat().st_size < 1_000_000
    assert file.metadata.num_row_groups == 1
    assert {str(field.type) for field in file.schema_arrow} == {"int64", "double"}


def test_the_file_says_what_it_was_built_from(name: str) -> None:
    hardware, profile = TABLES[name]
    stated = metadata(name)
    # Tables once held the checksum of all profiles, which another card changes without touching them.
    stated.pop("profiles_sha256", None)
    assert stated == table_metadata(MeasuredSource(hardware), engine(profile))
    recorded = measured.recorded_checksums()
    assert stated["measured_sha256"] == {name: recorded[name] for name in stated["measured_sha256"]}
    assert set(recorded) - set(stated["measured_sha256"]) == {"accelmark_a100_40gb.csv"}
    assert stated["spec_tokens_per_step"]["4"] == pytest.approx(2.391, abs=1e-3)


@pytest.mark.parametrize("index", range(30))
def test_a_sample_of_rows_rebuilds_to_the_committed_values(index: int) -> None:
    name = list(TABLES)[index % len(TABLES)]
    hardware, profile = TABLES[name]
    table = read(name)
    i = int(np.random.default_rng(index).integers(5400))
    part = Slice(
        MeasuredSource(hardware),
        engine(profile),
        TIERS[table["quant_tier"][i]],
        int(table["prompt_len_bucket"][i]),
        int(table["spec_length"][i]),
    )
    rebuilt = table_row(part, int(table["batch_size"][i]), float(table["kv_budget"][i]))
    committed = {column: values[i] for column, values in table.items()}
    assert list(rebuilt) == list(committed)
    assert rebuilt == pytest.approx(committed, rel=1e-9)


def test_throughput_strictly_increases_with_batch_size_up_to_saturation(name: str) -> None:
    """Whole cache, FP16, no drafting, at every prompt length; saturation: the cache or the compute is full."""
    table = read(name)
    plain = (table["kv_budget"] == 1.0) & (table["spec_length"] == 0) & (table["quant_tier"] == 0)
    for bucket in range(len(PROMPT_TOKENS)):
        tps = table["tps"][plain & (table["prompt_len_bucket"] == bucket)]
        best = int(np.argmax(tps))
        assert (np.diff(tps[: best + 1]) > 0).all(), bucket
        # Past the peak, preemption costs something but throughput never collapses.
        assert (tps[best:] > 0.8 * tps[best]).all(), bucket
        assert best >= 3, bucket


def test_saturated_throughput_agrees_with_the_step_times_while_the_cache_is_roomy() -> None:
    """Per request: its prefill share plus its tokens' share of the decode iterations, by hand."""
    table = read("traces_llama3_8b.parquet")
    plain = (table["kv_budget"] == 1.0) & (table["spec_length"] == 0) & (table["quant_tier"] == 0)
    for batch_size, bucket in ((16, 3), (32, 2), (64, 1)):
        row = plain & (table["batch_size"] == batch_size) & (table["prompt_len_bucket"] == bucket)
        decode = table["decode_ms"][row][0] * OUTPUT_TOKENS / batch_size
        by_hand = OUTPUT_TOKENS / (decode + table["prefill_marginal_ms"][row][0]) * 1e3
        assert table["tps"][row][0] == pytest.approx(by_hand, rel=0.12)


def test_memory_is_weights_activations_sequences_and_pool() -> None:
    table = read("traces_llama3_8b.parquet")

    def memory(batch_size: int, kv: float, spec: int, tier: int) -> float:
        row = (table["batch_size"] == batch_size) & (table["kv_budget"] == kv)
        return float(table["gpu_mem_gb"][row & (table["spec_length"] == spec) & (table["quant_tier"] == tier)][0])

    assert memory(32, 1.0, 0, 0) == pytest.approx(16.06 + 2.15 + 0.048 + (40 - 16.06 - 2.15 - 0.25))
    assert memory(32, 1.0, 0, 0) == pytest.approx(39.798)
    assert memory(512, 1.0, 0, 0) > 40.0
    assert memory(8, 0.5, 2, 2) == pytest.approx(5.74 + 2.15 + 0.8 + 0.012 + 0.5 * (40 - 5.74 - 2.15 - 0.25 - 0.8))


def test_the_cache_capacity_is_the_pool_in_tokens() -> None:
    table = read("traces_llama3_8b.parquet")
    row = (table["kv_budget"] == 1.0) & (table["spec_length"] == 0) & (table["quant_tier"] == 0)
    assert set(table["kv_capacity_tokens"][row]) == {int((40 - 16.06 - 2.15 - 0.25) * 1e9 / 131072)}


def test_cost_is_one_gpu_over_thousands_of_tokens(name: str) -> None:
    table = read(name)
    assert table["cost_per_1k"] == pytest.approx(1000.0 / table["tps"])


def test_step_times_do_not_depend_on_the_cache_budget(name: str) -> None:
    table = read(name)
    for column in ("decode_ms", "prefill_ms", "prefill_marginal_ms", "prefill_saturated_ms"):
        at = [table[column][table["kv_budget"] == kv] for kv in KV_BUDGETS]
        assert all(np.array_equal(at[0], values) for values in at[1:])


def test_a_smaller_cache_hardly_ever_serves_more(name: str) -> None:
    """It may by some per cent: past 128 rows a GEMM takes another tile, so a few more residents can cost throughput."""
    table = read(name)
    tps = np.stack([table["tps"][table["kv_budget"] == kv] for kv in KV_BUDGETS])
    assert (tps[1:] >= 0.9 * tps[:-1]).all()
    assert np.mean(tps[1:] >= 0.98 * tps[:-1]) > 0.97


def test_support_is_the_coverage_of_the_row(name: str) -> None:
    table = read(name)
    for i in range(0, 5400, 97):
        prompt = PROMPT_TOKENS[table["prompt_len_bucket"][i]]
        tier = TIERS[table["quant_tier"][i]]
        expected = support(tier, int(table["batch_size"][i]), prompt, prompt, int(table["spec_length"][i]))
        assert table["support"][i] == expected


def test_output_lengths_have_the_stated_mean_in_every_stretch() -> None:
    lengths = output_lengths(2000)
    assert lengths.mean() == pytest.approx(OUTPUT_TOKENS, rel=0.02)
    assert lengths[700:800].mean() == pytest.approx(OUTPUT_TOKENS, rel=0.08)
    assert lengths.min() >= 1
    assert lengths.max() <= LONGEST_OUTPUT


@pytest.mark.parametrize("hardware", ["a100-40gb", "h100-llama-3.1-8b"])
def test_tables_that_ship_have_the_axes_that_are_built(hardware: str) -> None:
    tables = load_tables(table_path(hardware))
    axes = tables.axes
    assert tables.iteration_batches.tolist() == list(ITERATION_BATCHES)
    assert axes["prompt_len_bucket"].tolist() == list(PROMPT_TOKENS)
    assert axes["batch_size"].tolist() == list(BATCH_SIZES)
    assert axes["spec_length"].tolist() == list(SPEC_LENGTHS)


def test_a_table_that_is_built_again_is_the_same_to_the_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simulator.offline.table.BATCH_SIZES", (1,))
    monkeypatch.setattr("simulator.offline.table.SPEC_LENGTHS", (0,))
    monkeypatch.setattr("simulator.offline.table.PROMPT_TOKENS", (64, 128))
    source, profile = MeasuredSource("a100-40gb"), engine("a100_40")
    one = build_table(tmp_path / "one.parquet", source, profile)
    again = build_table(tmp_path / "again.parquet", source, profile, progress=True)
    assert one.read_bytes() == again.read_bytes()
    assert pq.read_table(one).num_rows == 1 * 5 * 1 * 2 * 3


def test_a_table_holds_an_engines_own_tokens_per_draft_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simulator.offline.table.BATCH_SIZES", (1,))
    monkeypatch.setattr("simulator.offline.table.PROMPT_TOKENS", (64,))
    own = {0: 1.0, 1: 1.8, 2: 2.5, 4: 3.9, 8: 5.0}
    source, profile = MeasuredSource("a100-40gb"), engine("a100_40")
    path = build_table(tmp_path / "own.parquet", source, profile, saturated=False, spec_tokens=own)
    # Without a saturated engine nothing depends on the KV budget: one row for each of the others.
    assert pq.read_table(path).num_rows == 1 * 1 * 5 * 1 * 3
    stated = json.loads(pq.read_schema(path).metadata[METADATA_KEY])
    assert stated["spec_tokens_per_step"] == {"0": 1.0, "1": 1.8, "2": 2.5, "4": 3.9, "8": 5.0}


def test_another_card_needs_an_entry_of_its_own_and_one_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    card = {**profiles()["hardware"]["a100-80gb"], "bandwidth_gb_s": 1935.0}
    monkeypatch.setitem(profiles()["hardware"], "a100-pcie", card)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("simulator.offline.table.BATCH_SIZES", (1,))
    monkeypatch.setattr("simulator.offline.table.SPEC_LENGTHS", (0,))
    monkeypatch.setattr("simulator.offline.table.PROMPT_TOKENS", (64, 128))
    assert main(["build-table", "--hardware", "a100-pcie", "--jobs", "1"]) == 0
    built = tmp_path / "a100-pcie.parquet"
    assert built.name in capsys.readouterr().out
    described = json.loads(pq.read_schema(built).metadata[METADATA_KEY])
    assert (described["hardware"], described["engine"], described["memory_budget_gb"]) == ("a100-pcie", "vllm_v1", 76.6)


def test_a_card_without_an_entry_is_refused_with_those_that_have_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build-table", "--hardware", "a100-pcie"]) == 2
    told = capsys.readouterr().err
    assert all(name in told for name in ("a100-pcie", "a100-40gb", "a100-80gb", "profiles.json"))


def test_the_step_model_is_within_its_stated_error_of_real_batches() -> None:
    errors = {summary.group: summary for summary in argonne_errors()}
    assert errors["vLLM, calibration"].rows == 6
    assert errors["vLLM, held out"].rows == 14
    assert errors["vLLM, held out"].median < 0.015
    assert errors["vLLM, held out"].p90 < 0.04
    assert errors["TensorRT-LLM, nothing fitted"].rows == 20
    assert errors["TensorRT-LLM, nothing fitted"].median < 0.04


def test_the_overheads_of_the_vllm_profile_are_the_ones_that_fit() -> None:
    fitted = fit_overheads()
    stated = json.loads(PROFILES_PATH.read_text(encoding="utf-8"))["engines"]["vllm_v0"]
    assert fitted[0] == pytest.approx(stated["step_overhead_ms"], abs=0.005)
    assert fitted[1] == pytest.approx(stated["sequence_overhead_ms"], abs=0.0005)


def test_the_committed_table_composes_into_real_batches() -> None:
    errors = {summary.group: summary for summary in table_vs_argonne()}
    assert errors["TensorRT-LLM, fits the cache"].median < 0.03
    assert errors["vLLM, held out, fits the cache"].median < 0.06


def without_a_column(table: pa.Table) -> pa.Table:
    return table.drop_columns(["decode_ms"])


def without_a_row(table: pa.Table) -> pa.Table:
    return table.slice(1)


def without_metadata(table: pa.Table) -> pa.Table:
    return table.replace_schema_metadata(None)


def without_the_name_of_a_precision(table: pa.Table) -> pa.Table:
    stated = json.loads(table.schema.metadata[METADATA_KEY])
    del stated["weights_gb"]["INT4"]
    return table.replace_schema_metadata({METADATA_KEY: json.dumps(stated)})


def with_metadata(**changes: Any) -> Callable[[pa.Table], pa.Table]:
    def damaged(table: pa.Table) -> pa.Table:
        stated = {**json.loads(table.schema.metadata[METADATA_KEY]), **changes}
        return table.replace_schema_metadata({METADATA_KEY: json.dumps(stated)})

    return damaged


def with_a_column(name: str, values: Callable[[int], list[Any]]) -> Callable[[pa.Table], pa.Table]:
    def damaged(table: pa.Table) -> pa.Table:
        return table.set_column(table.column_names.index(name), name, pa.array(values(len(table))))

    return damaged


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (without_a_column, "lacks the column 'decode_ms'; rebuild it with"),
        (without_a_row, "is not a full grid: 5399 rows for"),
        (without_metadata, "carries no InferenceGym metadata; rebuild it with"),
        (without_the_name_of_a_precision, "has 3 precisions, but its metadata names 2"),
        (with_metadata(weights_gb={"FP16": -1.0}), "its metadata says"),
        (with_metadata(memory_limit_gb="much"), "memory_limit_gb"),
        (with_metadata(kv_bytes_per_token=None), "kv_bytes_per_token"),
        (with_metadata(tau_ms=float("nan")), "tau_ms"),
        (with_metadata(prompt_tokens=[64, 128]), "lists prompt lengths that differ from those of its rows"),
        (with_metadata(spec_tokens_per_step={"1": 1.5}), "lists draft lengths that differ from those of its rows"),
        (with_a_column("decode_ms", lambda n: ["1.5"] * n), "'decode_ms' holds no numbers"),
        (with_a_column("decode_ms", lambda n: [float("nan")] * n), "'decode_ms' must hold numbers from 1e-06 to 1e+09"),
        (with_a_column("decode_ms", lambda n: [None] + [1.0] * (n - 1)), "'decode_ms' must hold numbers"),
        (with_a_column("prefill_ms", lambda n: [0.0] * n), "'prefill_ms' must hold numbers"),
        (with_a_column("gpu_mem_gb", lambda n: [float("inf")] * n), "'gpu_mem_gb' must hold numbers"),
        (with_a_column("support", lambda n: [4] * n), "'support' must hold numbers from 0 to 3"),
        (with_metadata(memory_gb={}), "memory_gb"),
        (with_metadata(iteration_ms=[]), "iteration_ms must have the shape (3, 5, 30, 8)"),
        (with_metadata(iteration_ms=None), "iteration_ms must have the shape (3, 5, 30, 8)"),
        (lambda table: pa.concat_tables([table.slice(1), table.slice(1, 1)]), "is not a full grid"),
        (lambda table: pa.concat_tables([table] * 200), "it has 1,080,000 rows"),
    ],
)
def test_a_damaged_table_is_refused_with_what_it_lacks(
    tmp_path: Path, damage: Callable[[pa.Table], pa.Table], said: str
) -> None:
    whole = pq.read_table(DATA / "traces_llama3_8b.parquet")
    pq.write_table(damage(whole), tmp_path / "damaged.parquet")
    with pytest.raises(TableError, match=r"damaged\.parquet") as refused:
        load_tables(tmp_path / "damaged.parquet")
    assert said in str(refused.value)


def test_a_file_without_end_is_no_table() -> None:
    with pytest.raises(TableError, match="more than"):
        load_tables("/dev/zero")
