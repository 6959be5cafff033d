"""Clients of an InferenceGym server. They need no simulator, and each is imported on first use.

- :class:`InferenceGymHTTP`, :class:`AsyncInferenceGymHTTP`: one episode over HTTP, with the methods, results and errors
  of local use.
- :class:`InferenceGymBatch`: many episodes at once over one connection, as arrays.
- :class:`HTTPGymEnv`, :class:`HTTPVectorEnv`: Gymnasium environments whose episodes run on a server.
- :class:`InferenceGymEnv`, :class:`TrafficControllerEnv`: OpenEnv's clients over a WebSocket, with their action,
  observation and state types. They need the extra ``openenv``. OpenEnv's
  ``AutoEnv.from_env("inference_gym", base_url=...)`` finds them here once this package is installed.

OpenEnv keeps a list of installed environments in ``~/.cache/openenv/discovery_cache.json``. If ``AutoEnv`` does not
know this one after an installation, delete that file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from inferencegym.client.answers import ServerError
    from inferencegym.client.batch import InferenceGymBatch
    from inferencegym.client.gym import HTTPGymEnv, HTTPVectorEnv
    from inferencegym.client.http import AsyncInferenceGymHTTP, InferenceGymHTTP
    from inferencegym.client.openenv import InferenceGymEnv, TrafficControllerEnv
    from inferencegym.client.openenv_types import (
        InferenceGymAction,
        InferenceGymObservation,
        InferenceGymState,
        TrafficControllerAction,
        TrafficControllerObservation,
        TrafficControllerState,
    )
    from inferencegym.errors import ServerUnavailableError

__all__ = [
    "AsyncInferenceGymHTTP",
    "HTTPGymEnv",
    "HTTPVectorEnv",
    "InferenceGymAction",
    "InferenceGymBatch",
    "InferenceGymEnv",
    "InferenceGymHTTP",
    "InferenceGymObservation",
    "InferenceGymState",
    "ServerError",
    "ServerUnavailableError",
    "TrafficControllerAction",
    "TrafficControllerEnv",
    "TrafficControllerObservation",
    "TrafficControllerState",
]

_HOMES: Final = {
    "AsyncInferenceGymHTTP": "inferencegym.client.http",
    "HTTPGymEnv": "inferencegym.client.gym",
    "HTTPVectorEnv": "inferencegym.client.gym",
    "InferenceGymAction": "inferencegym.client.openenv_types",
    "InferenceGymBatch": "inferencegym.client.batch",
    "InferenceGymEnv": "inferencegym.client.openenv",
    "InferenceGymHTTP": "inferencegym.client.http",
    "InferenceGymObservation": "inferencegym.client.openenv_types",
    "InferenceGymState": "inferencegym.client.openenv_types",
    "ServerError": "inferencegym.client.answers",
    "ServerUnavailableError": "inferencegym.errors",
    "TrafficControllerAction": "inferencegym.client.openenv_types",
    "TrafficControllerEnv": "inferencegym.client.openenv",
    "TrafficControllerObservation": "inferencegym.client.openenv_types",
    "TrafficControllerState": "inferencegym.client.openenv_types",
}


def __getattr__(name: str) -> Any:
    """Import a public name from its module, on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'inferencegym.client' has no attribute {name!r}; it offers {', '.join(__all__)}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
