"""Engine at an address, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from inferencegym.errors import InvalidConfigError
from live.driver import EngineApi
from live.engines.sglang import SglangEngine
from live.engines.vllm import VllmEngine


def engine_at(
    backend: Literal["vllm", "sglang"], url: str, control_file: Path | None, *, priorities: bool = False
) -> VllmEngine | SglangEngine:
    """The engine that runs at this address; ``control_file`` is vLLM's alone.

    ``priorities``: it was started to serve by priority, and loads tell it the class of each request.
    """
    api = EngineApi(url, priorities=priorities)
    if backend == "vllm":
        return VllmEngine(api, control_file)
    if control_file is not None:
        raise InvalidConfigError("SGLang is set over HTTP and follows no control file: leave --control-file out")
    return SglangEngine(api)
