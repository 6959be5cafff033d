"""InferenceGym: a reinforcement-learning environment for LLM-inference control."""

from __future__ import annotations

from typing import Any

__version__ = "1.1.0.dev0"
__author__ = "InferenceGym contributors"
__url__ = "https://github.com/inferencegym/inferencegym"

# The facade is lazy: an eager one would be an import cycle, and clients must not pay for the simulator.
_FACADE = {
    "InferenceEnv": "env.inference_env",
    "VectorInferenceEnv": "env.vector",
    "TraceSimulator": "simulator.trace_sim",
    "WorkloadGenerator": "simulator.workload",
    "GraderModule": "grader.grader",
    "ServeAction": "inferencegym.models",
    "ServeObservation": "inferencegym.models",
    "MetricsSnapshot": "inferencegym.models",
    "WorkloadState": "inferencegym.models",
    "QuantTier": "inferencegym.models",
}

__all__ = ["__version__", *_FACADE]


def __getattr__(name: str) -> Any:
    """Import a public name from the room it lives in, on first use."""
    if name not in _FACADE:
        raise AttributeError(f"module 'inferencegym' has no attribute {name!r}; it offers {', '.join(__all__)}")
    import importlib

    return getattr(importlib.import_module(_FACADE[name]), name)
