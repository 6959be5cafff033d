"""Engines, episodes on them, and what a package's engine is made of, for its entry point ``inferencegym.engines``."""

from live.driver import EngineApi
from live.engines.engine import Engine, Load, Orders, Reading
from live.engines.sglang import SglangEngine
from live.engines.simulated import SimulatedEngine
from live.engines.vllm import VllmEngine
from live.engines.vllm_server import PLUGIN
from live.env import EngineEnv
from live.scaling import engine_calibration, live_task, mean_lengths, measure_capacity, scaled_lengths, scaled_rates
from simulator.hardware.tables import tables_of

__all__ = [
    "PLUGIN",
    "Engine",
    "EngineApi",
    "EngineEnv",
    "Load",
    "Orders",
    "Reading",
    "SglangEngine",
    "SimulatedEngine",
    "VllmEngine",
    "engine_calibration",
    "live_task",
    "mean_lengths",
    "measure_capacity",
    "scaled_lengths",
    "scaled_rates",
    "tables_of",
]
