"""What a package's engine is made of (:mod:`live.engines`), for its entry point ``inferencegym.engines``."""

from live.driver import EngineApi
from live.engines.engine import Engine, Load, Orders, Reading
from live.engines.sglang import SglangEngine
from live.engines.vllm import VllmEngine

__all__ = ["Engine", "EngineApi", "Load", "Orders", "Reading", "SglangEngine", "VllmEngine"]
