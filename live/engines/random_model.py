"""Folder of a Llama with random weights, which an engine can serve without any download.

The engine makes up the weights (vLLM: ``--load-format dummy``), so the folder holds only a configuration and a
tokenizer. The model writes noise; its times, memory and scheduling depend only on its shape.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from live.engines.vllm_server import VllmServer, free_port

SPECIAL: Final = ("<s>", "</s>", "<unk>")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Shape of a Llama; the default has 107 million parameters, slow enough for requests to queue on two cores."""

    n_layers: int = 8
    hidden: int = 1024
    intermediate: int = 2816
    n_heads: int = 16
    n_kv_heads: int = 4
    vocabulary: int = 8192
    max_positions: int = 2048

    def kv_bytes_per_token(self, element_bytes: int = 2) -> int:
        """Bytes of one token's keys and values in all layers."""
        return 2 * self.n_layers * self.n_kv_heads * (self.hidden // self.n_heads) * element_bytes


def serve_random_model(
    venv: Path, folder: Path, *, shape: ModelShape | None = None, port: int | None = None, **arguments: Any
) -> VllmServer:
    """Start vLLM on such a model, on a free port unless one is named; its files go to ``folder``."""
    model = write_model(folder / "model", shape)
    log_file = folder / "vllm.log"
    return VllmServer(venv, model, folder / "control.json", port=port or free_port(), log_file=log_file, **arguments)


def write_model(folder: Path, shape: ModelShape | None = None) -> Path:
    """Write the folder, creating it if necessary; returns it."""
    shape = shape or ModelShape()
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        "config.json": _config(shape),
        "tokenizer.json": _tokenizer(shape.vocabulary),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": SPECIAL[0],
            "eos_token": SPECIAL[1],
            "unk_token": SPECIAL[2],
            "model_max_length": shape.max_positions,
            "clean_up_tokenization_spaces": False,
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return folder


def _config(shape: ModelShape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.n_layers,
        "num_attention_heads": shape.n_heads,
        "num_key_value_heads": shape.n_kv_heads,
        "head_dim": shape.hidden // shape.n_heads,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "bfloat16",
        "attention_bias": False,
        "mlp_bias": False,
    }


def _tokenizer(vocabulary: int) -> dict[str, Any]:
    """Byte-level tokenizer without merges; the other words of the vocabulary appear only in the model's output."""
    words = [*SPECIAL, *byte_letters()]
    words += [f"w{i}" for i in range(len(words), vocabulary)]
    special = [
        {"id": i, "content": name, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
        for i, name in enumerate(SPECIAL)
    ]  # fmt: skip
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "added_tokens": special,
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {word: i for i, word in enumerate(words)}, "merges": []},
    }


def byte_letters() -> list[str]:
    """The printable letter that byte-level tokenizers use for each byte, as introduced by GPT-2."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
