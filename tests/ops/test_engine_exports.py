"""Exported configurations are what the engines' own argument parsers accept."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from inferencegym.errors import InvalidConfigError
from inferencegym.tasks import table_index
from ops.export import EXPORTS, EngineSettings, engine_files, engine_settings, knobs_of_vllm, written
from ops.objectives import parse_objective
from ops.plan import make_plan
from simulator.hardware.catalogue import precision_named, table_path, usual_name
from simulator.hardware.sources import reported_gb
from simulator.hardware.tables import ServingTables, load_tables
from tests.engine_arguments import RECORDS, parser_of, recorded
from tests.live_engine import engine_python
from tests.ops.test_shadow import flood
from tests.servers import ROOT

PLAIN = EngineSettings(("One.",), 128, 0.94, 0.9, "BF16", [], False, 2048)
FULL = EngineSettings(
    ("What a policy set.", "Replicas: 2."),
    max_num_seqs=200,
    memory_share=0.93,
    static_share=0.88,
    tier="INT8",
    drafts=[(1, 4, 4, "policy"), (5, 64, 2, "table"), (65, 200, 0, "policy")],
    prefill_replicas=1,
    max_batched_tokens=4096,
    tensor_parallel=2,
)
INT4 = EngineSettings((), 64, 0.9, 0.85, "INT4", [(1, 64, 8, "policy")], False, 2048)
QWEN3_32B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "max_position_embeddings": 40960,
    "num_attention_heads": 64,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
}
"""Shape of Qwen3-32B."""
AUTO_FIT = -1
"""How vLLM reads ``max-model-len: auto``."""
TIERS = sorted({tier for entry in table_index().values() for tier in entry["tiers"]})
CASES = {"full": FULL, "int4": INT4, "fp8 cache": replace(PLAIN, kv_cache_fp8=True)} | {
    tier: replace(PLAIN, tier=tier) for tier in TIERS
}
ALL = pytest.mark.parametrize("settings", CASES.values(), ids=CASES)


def config_of(engine: str, settings: EngineSettings) -> dict[str, Any]:
    if engine == "helm":
        settings = replace(settings, prefill_replicas=0)  # refused, see below
    found: dict[str, Any] = yaml.safe_load(EXPORTS[engine](settings, "my/eagle"))
    return found


def as_flags(config: dict[str, Any]) -> list[str]:
    """The file as an engine turns it into options: true is a bare flag."""
    return [
        part
        for name, value in config.items()
        for part in ([f"--{name}"] if value is True else [f"--{name}", str(value)])
    ]


@ALL
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_every_option_is_one_that_the_engine_had_when_it_was_recorded(engine: str, settings: EngineSettings) -> None:
    options = recorded(engine)["options"]
    for name, value in config_of(engine, settings).items():
        assert name in options
        kind, choices = options[name]["type"], options[name]["choices"]
        assert choices is None or value in choices
        wanted = {"int": int, "human_readable_int": int, "float": float, "flag": bool}.get(kind, str)
        assert type(value) is wanted, name


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_precision_is_a_dtype_or_a_quantization_of_its_own(engine: str) -> None:
    said = {tier: config_of(engine, replace(PLAIN, tier=tier)) for tier in TIERS}
    assert {said[tier].get("dtype") for tier in ("FP16", "BF16")} == {"float16", "bfloat16"}
    others = [said[tier]["quantization"] for tier in TIERS if tier not in ("FP16", "BF16")]
    assert len(set(others)) == len(others) == len(TIERS) - 2


@ALL
def test_helm_values_are_of_the_types_that_the_charts_schema_stated(settings: EngineSettings) -> None:
    (model,) = config_of("helm", settings)["servingEngineSpec"]["modelSpec"]
    known = json.loads((RECORDS / "production-stack.json").read_text())
    found = {**model, **{f"vllmConfig.{name}": value for name, value in model["vllmConfig"].items()}}
    kinds = {int: "integer", float: "number", str: "string", bool: "boolean", list: "array", dict: "object"}
    assert {name: kinds[type(value)] in known["types"].get(name, ()) for name, value in found.items()} == dict.fromkeys(
        found, True
    )
    assert set(known["required"]) <= set(model)
    assert all(isinstance(part, str) for part in model["vllmConfig"]["extraArgs"])


@ALL
def test_helm_values_start_vllm_as_its_own_file_does(settings: EngineSettings) -> None:
    (model,) = config_of("helm", settings)["servingEngineSpec"]["modelSpec"]
    wanted = config_of("vllm", settings)
    engine = model["vllmConfig"]
    options = dict(zip(engine["extraArgs"][::2], engine["extraArgs"][1::2], strict=True))
    told = {
        "max-num-seqs": engine["maxNumSeqs"],
        "gpu-memory-utilization": engine["gpuMemoryUtilization"],
        **({"dtype": engine["dtype"]} if "dtype" in engine else {}),
        **({"tensor-parallel-size": engine["tensorParallelSize"]} if "tensorParallelSize" in engine else {}),
        **{name.removeprefix("--"): int(value) if value.isdecimal() else value for name, value in options.items()},
    }
    assert told == {name: value for name, value in wanted.items() if name != "kv-transfer-config"}
    assert (model["replicaCount"], model["requestGPU"]) == (settings.n_replicas, settings.tensor_parallel)


def test_drafts_are_ranges_of_running_requests_that_leave_no_gap() -> None:
    speculative = json.loads(config_of("vllm", FULL)["speculative-config"])
    assert speculative["num_speculative_tokens_per_batch_size"] == [[1, 4, 4], [5, 64, 2], [65, 200, 0]]
    assert (speculative["method"], speculative["model"], speculative["num_speculative_tokens"]) == (
        "eagle",
        "my/eagle",
        4,
    )


def test_sglang_verifies_one_token_more_than_it_drafts() -> None:
    config = config_of("sglang", FULL)
    assert (config["speculative-num-steps"], config["speculative-num-draft-tokens"]) == (4, 5)
    assert config["disaggregation-mode"] == "decode"


def test_prefill_on_gpus_of_its_own_has_no_helm_values_and_both_parts_in_vllms_file() -> None:
    with pytest.raises(InvalidConfigError, match="export helm cannot write prefill on GPUs of its own: export vllm or"):
        EXPORTS["helm"](FULL)
    assert list(written(FULL)) == ["vllm", "sglang"]
    text = EXPORTS["vllm"](replace(FULL, n_replicas=3, prefill_replicas=2))
    assert "# Start 3 instances for decode and 2 for prefill with this same file" in text


@pytest.mark.parametrize(("router", "logic"), [("round-robin", "roundrobin"), ("prefix-affinity", "prefixaware")])
def test_a_planned_router_is_the_charts(router: str, logic: str) -> None:
    assert config_of("helm", replace(PLAIN, router=router))["routerSpec"] == {"routingLogic": logic}
    assert "routerSpec" not in config_of("helm", replace(PLAIN, router="least-loaded"))


def test_cpu_and_memory_of_a_pod_are_marked_as_unplanned() -> None:
    marked = [line.split(":")[0].strip() for line in EXPORTS["helm"](PLAIN, "").splitlines() if "# not planned" in line]
    assert marked == ["requestCPU", "requestMemory"]


def test_one_number_of_draft_tokens_needs_no_schedule() -> None:
    speculative = json.loads(config_of("vllm", INT4)["speculative-config"])
    assert speculative == {"method": "eagle", "model": "my/eagle", "num_speculative_tokens": 8}


@pytest.mark.parametrize(
    ("named", "tier", "served"),
    [
        ("Qwen/Qwen3-32B", "BF16", "Qwen/Qwen3-32B"),
        ("Qwen/Qwen3-32B", "FP8", "Qwen/Qwen3-32B"),
        ("Qwen/Qwen3-32B", "NVFP4", "YOUR-NVFP4-CHECKPOINT-OF-Qwen3-32B"),
        ("nvidia/Qwen3-32B-FP4", "NVFP4", "nvidia/Qwen3-32B-FP4"),
        ("Qwen/Qwen3-32B-FP8", "FP8", "Qwen/Qwen3-32B-FP8"),
        ("Qwen/Qwen3-32B-FP8", "BF16", "YOUR-BF16-CHECKPOINT-OF-Qwen3-32B"),
    ],
)
def test_the_model_in_an_export_is_a_checkpoint_of_its_precision(named: str, tier: str, served: str) -> None:
    tables = load_tables(table_path("h100-qwen3-32b"))
    settings = engine_settings(
        tables, 60.0, named, tier, comments=(), max_num_seqs=64, drafts=[], prefill_replicas=0, n_replicas=1
    )
    assert settings.model == served
    quantized = tier not in ("BF16", precision_named(named))
    assert ("quantization" in config_of("vllm", settings)) is quantized


def test_names_of_quantized_checkpoints_are_the_model_with_that_precision() -> None:
    names = {"Qwen/Qwen3-32B-FP8": "FP8", "nvidia/Llama-3.3-70B-Instruct-FP4": "NVFP4", "Qwen/Qwen3-32B-AWQ": "INT4"}
    assert {name: precision_named(name) for name in names} == names
    assert usual_name("nvidia/Llama-3.3-70B-Instruct-NVFP4") == usual_name("llama-3.1-70b")
    assert precision_named("openai/gpt-oss-120b") is None


def asked_of_vllm(*arguments: str) -> dict[str, Any]:
    """What ``tests.engine_arguments`` prints in the environment in which vLLM is installed."""
    answer = subprocess.run(
        [engine_python(), "-m", "tests.engine_arguments", "vllm", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
        capture_output=True,
        text=True,
    )
    found: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    return found


@ALL
def test_the_context_is_what_fits_and_prefix_caching_is_the_engines_default(settings: EngineSettings) -> None:
    vllm, sglang = config_of("vllm", settings), config_of("sglang", settings)
    assert vllm["max-model-len"] == "auto"
    assert not [name for name in (*vllm, *sglang) if "prefix-caching" in name or "radix" in name]


def test_the_memory_share_leaves_the_planned_kv_pool() -> None:
    plan, tables, files = planned("h100-qwen3-32b")
    share = yaml.safe_load(files["vllm"])["gpu-memory-utilization"]
    memory = tables.meta["memory_gb"]
    beside = tables.weights_gb[0] + memory["activations_gb"] + memory["workspace_gb"]
    pool_gb = share * reported_gb(tables.meta) - float(beside)
    planned_gb = tables.kv_pool_tokens(0, plan.action["kv_budget"], False) * tables.meta["kv_bytes_per_token"] / 1e9
    assert pool_gb == pytest.approx(planned_gb, abs=0.01 * reported_gb(tables.meta))


@pytest.mark.parametrize("table", ["h100-llama-3.1-8b", "h100-qwen3-32b"])
def test_the_file_for_vllm_read_back_is_the_planned_setting(table: str) -> None:
    plan, tables, files = planned(table)
    knobs, ignored = knobs_of_vllm({**yaml.safe_load(files["vllm"]), "host": "::"}, tables)
    assert ignored == ["host"]
    # The file states the memory in whole percent: 0.4 GB of a pool of 9 GB in the larger model.
    assert knobs.pop("kv_budget") == pytest.approx(plan.action["kv_budget"], abs=0.05)
    assert knobs == {name: plan.action[name] for name in ("batch_size", "quant_tier")}


@pytest.mark.parametrize(
    ("config", "knobs"),
    [
        ({"quantization": "fp8", "dtype": "bfloat16"}, {"quant_tier": 1}),
        ({"model": "Qwen/Qwen3-32B-FP8"}, {"quant_tier": 1}),
        ({"dtype": "auto"}, {}),
        ({"speculative-config": '{"num_speculative_tokens": 2}'}, {"spec_length": 2}),
        ({"kv-transfer-config": {"kv_connector": "NixlConnector"}}, {"prefill_disagg": True}),
        ({"kv-transfer-config": {"kv_connector": "LMCacheConnectorV1"}}, {}),
    ],
)
def test_options_of_vllm_are_knobs(config: dict[str, Any], knobs: dict[str, Any]) -> None:
    found, ignored = knobs_of_vllm(config, load_tables(table_path("h100-llama-3.1-8b")))
    assert found == knobs
    assert ignored == ([] if knobs else list(config))


def test_options_of_vllm_that_the_table_has_not_are_refused() -> None:
    tables = load_tables(table_path("h100-llama-3.1-8b"))
    for config, message in (
        ({"tensor-parallel-size": 2}, "the table has 1 GPUs per replica"),
        ({"quantization": "modelopt_fp4"}, r"precision 'NVFP4' is not one of .*: BF16, FP8"),
        ({"gpu-memory-utilization": 90}, "must be above 0 and at most 1"),
    ):
        with pytest.raises(InvalidConfigError, match=message):
            knobs_of_vllm(config, tables)


def planned(table: str) -> tuple[Any, ServingTables, dict[str, str]]:
    """A plan in the table's first precision, without drafts, and its configuration files."""
    tables = load_tables(table_path(table))
    report = make_plan(
        flood(40, 1, 1),
        [parse_objective("ttft_p50=2000")],
        {table: tables},
        precisions=[tables.tiers[0]],
        drafts=False,
        policies=(),
    )
    (plan,) = report.plans
    return plan, tables, engine_files(plan, tables, report)


@pytest.mark.engine
def test_vllms_own_memory_arithmetic_starts_the_export_in_a_pool_smaller_than_the_models_context(
    tmp_path: Path,
) -> None:
    plan, tables, files = planned("h100-qwen3-32b")
    pool_tokens = tables.kv_pool_tokens(0, plan.action["kv_budget"], False)
    assert pool_tokens < QWEN3_32B["max_position_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_32B))
    pool = [str(tmp_path), str(int(pool_tokens * tables.meta["kv_bytes_per_token"]))]
    with_context, without = tmp_path / "vllm.yaml", tmp_path / "without.yaml"
    with_context.write_text(files["vllm"])
    without.write_text("".join(f"{t}\n" for t in files["vllm"].splitlines() if not t.startswith("max-model-len")))
    fitted = asked_of_vllm("--fit", str(with_context), *pool)
    assert fitted["prefix_caching"]
    assert pool_tokens - 16 * 2 < fitted["max_model_len"] <= pool_tokens
    assert "larger than the available KV cache memory" in asked_of_vllm("--fit", str(without), *pool)["error"]


@ALL
@pytest.mark.engine
def test_vllms_own_parser_and_schedule_accept_the_export(tmp_path: Path, settings: EngineSettings) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text(EXPORTS["vllm"](settings, "my/eagle"))
    read = asked_of_vllm("--read", str(file), str(settings.max_num_seqs), str(settings.draft_tokens))
    assert (read["max_num_seqs"], read["max_num_batched_tokens"]) == (
        settings.max_num_seqs,
        settings.max_batched_tokens,
    )
    assert read["tensor_parallel_size"] == settings.tensor_parallel
    assert read["gpu_memory_utilization"] == settings.memory_share
    assert read["max_model_len"] == AUTO_FIT
    assert read["quantization_is_known"]
    if len(settings.drafts) < 2:
        assert read["drafts"] is None, "a constant number needs no schedule"
    else:
        wanted = itertools.chain.from_iterable([k] * (high - low + 1) for low, high, k, _ in settings.drafts)
        assert read["drafts"][1:] == list(wanted)


@ALL
@pytest.mark.engine
def test_sglangs_own_parser_accepts_the_export(settings: EngineSettings) -> None:
    pytest.importorskip("sglang")
    read = parser_of("sglang").parse_args(["--model-path", "m", *as_flags(config_of("sglang", settings))])
    assert read.max_running_requests == settings.max_num_seqs
    assert read.mem_fraction_static == settings.static_share
    assert (read.speculative_num_steps or 0) == settings.draft_tokens
    assert read.tp_size == settings.tensor_parallel
