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

from inferencegym.tasks import table_index
from ops.export import EXPORTS, EngineSettings
from tests.engine_arguments import RECORDS, parser_of, recorded
from tests.live_engine import engine_python
from tests.servers import ROOT

PLAIN = EngineSettings(("One.",), 128, 0.94, 0.9, "BF16", [], False, 2048)
FULL = EngineSettings(
    ("What a policy set.", "Replicas: 2."),
    max_num_seqs=200,
    memory_share=0.93,
    static_share=0.88,
    tier="INT8",
    drafts=[(1, 4, 4, "policy"), (5, 64, 2, "table"), (65, 200, 0, "policy")],
    prefill_apart=True,
    max_batched_tokens=4096,
    tensor_parallel=2,
)
INT4 = EngineSettings((), 64, 0.9, 0.85, "INT4", [(1, 64, 8, "policy")], False, 2048)
AUTO_FIT = -1
"""How vLLM reads ``max-model-len: auto``."""
TIERS = sorted({tier for entry in table_index().values() for tier in entry["tiers"]})
CASES = {"full": FULL, "int4": INT4} | {tier: replace(PLAIN, tier=tier) for tier in TIERS}
ALL = pytest.mark.parametrize("settings", CASES.values(), ids=CASES)


def config_of(engine: str, settings: EngineSettings) -> dict[str, Any]:
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


@ALL
@pytest.mark.engine
def test_vllms_own_parser_and_schedule_accept_the_export(tmp_path: Path, settings: EngineSettings) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text(EXPORTS["vllm"](settings, "my/eagle"))
    arguments = ["vllm", "--read", str(file), str(settings.max_num_seqs), str(settings.draft_tokens)]
    answer = subprocess.run(
        [engine_python(), "-m", "tests.engine_arguments", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
        capture_output=True,
        text=True,
    )
    read = json.loads(answer.stdout.splitlines()[-1])
    assert (read["max_num_seqs"], read["max_num_batched_tokens"]) == (
        settings.max_num_seqs,
        settings.max_batched_tokens,
    )
    assert read["tensor_parallel_size"] == settings.tensor_parallel
    assert read["gpu_memory_utilization"] == settings.memory_share
    assert read["max_model_len"] == AUTO_FIT
    assert read["quantization_is_known"]
    if settings.drafts:
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
