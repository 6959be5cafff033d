"""Engine at an address, by name."""

from __future__ import annotations

from pathlib import Path

from inferencegym.errors import InvalidConfigError, refusal
from inferencegym.plugins import plugins
from live.driver import EngineApi
from live.engines.engine import Engine
from live.engines.sglang import SglangEngine
from live.engines.vllm import VllmEngine


def engine_at(backend: str, url: str, control_file: Path | None, *, priorities: bool = False) -> Engine:
    """The engine that runs at this address: ``vllm``, ``sglang``, or an entry point of ``inferencegym.engines``.

    ``control_file`` is vLLM's alone. ``priorities``: it was started to serve by priority, and loads tell it the class
    of each request.
    """
    api = EngineApi(url, priorities=priorities)
    if backend == "vllm":
        return VllmEngine(api, control_file)
    added = {plugin.name: plugin for plugin in plugins("engines")}
    if backend not in added and backend != "sglang":
        raise refusal("backend", backend, f"one of {', '.join(['vllm', 'sglang', *added])}")
    if control_file is not None:
        raise InvalidConfigError(f"the engine {backend} is controlled over HTTP: leave --control-file out")
    if backend == "sglang":
        return SglangEngine(api)
    engine: Engine = added[backend].load(type)(api)
    return engine
