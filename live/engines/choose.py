"""Engine at an address, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from inferencegym.errors import InvalidConfigError
from live.driver import EngineApi
from live.engines.sglang import SglangEngine
from live.engines.vllm import VllmEngine


def engine_at(backend: Literal["vllm", "sglang"], url: str, control_file: Path | None) -> VllmEngine | SglangEngine:
    """The engine that runs at this address; ``control_file`` is vLLM's alone."""
    api = EngineApi(url)
    if backend == "vllm":
        return VllmEngine(api, control_file)
    if control_file is not None:
        raise InvalidConfigError("SGLang is set over HTTP and follows no control file: leave --control-file out")
    return SglangEngine(api)
