"""A real vLLM for the tests marked `engine`: a small model with random weights, served on this machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import pytest

from live.engines.random_model import ModelShape, serve_random_model
from live.engines.vllm_server import VllmServer
from tests.servers import ROOT, free_port

VENV: Final = Path(os.environ.get("ENGINE_VENV") or ROOT / ".venv-engine")
SHAPE: Final = ModelShape()


def engine_python() -> str:
    """Python of the environment in which vLLM is installed; skips the test without such an environment."""
    if not (VENV / "bin" / "vllm").exists():
        pytest.skip(f"no vLLM in {VENV}: `make engine` installs it")
    return str(VENV / "bin" / "python")


def vllm_server(folder: Path, **arguments: Any) -> VllmServer:
    """Server of a random model with its files in a folder; skips the test if vLLM is not installed."""
    engine_python()
    return serve_random_model(VENV, folder, shape=SHAPE, port=free_port(), **arguments)
