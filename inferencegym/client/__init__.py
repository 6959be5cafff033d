"""Clients of a server, none of which needs the simulator.

``InferenceGymHTTP`` and ``AsyncInferenceGymHTTP`` play over HTTP with the methods, results and errors of local use.
``InferenceGymBatch`` plays many episodes at once over one connection, as arrays (numpy).
``InferenceGymEnv`` is OpenEnv's client over a WebSocket, with ``InferenceGymAction``, ``InferenceGymObservation`` and
``InferenceGymState``; OpenEnv's ``AutoEnv.from_env("inference_gym", base_url=...)`` finds it here once this package is
installed. ``TrafficControllerEnv`` and its types are the same for the other environment.

OpenEnv remembers in its cache file which environments are installed. If ``AutoEnv`` does not know this one after an
installation, ``openenv.auto._discovery.get_discovery().clear_cache()`` makes it look again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from inferencegym.client.http import AsyncInferenceGymHTTP, InferenceGymHTTP, ServerError
from inferencegym.errors import ServerUnavailableError

if TYPE_CHECKING:
    from inferencegym.client.batch import InferenceGymBatch
    from inferencegym.client.openenv import InferenceGymEnv, TrafficControllerEnv
    from inferencegym.client.openenv_types import (
        InferenceGymAction,
        InferenceGymObservation,
        InferenceGymState,
        TrafficControllerAction,
        TrafficControllerObservation,
        TrafficControllerState,
    )

__all__ = [
    "AsyncInferenceGymHTTP",
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

_CLIENTS = ("InferenceGymEnv", "TrafficControllerEnv")


def __getattr__(name: str) -> Any:
    """Import what needs OpenEnv or numpy on first use: half a second, which a plain HTTP client need not wait."""
    if name not in __all__:
        raise AttributeError(f"module 'inferencegym.client' has no attribute {name!r}; it offers {', '.join(__all__)}")
    import importlib

    if name == "InferenceGymBatch":
        room = "inferencegym.client.batch"
    else:
        room = "inferencegym.client.openenv" if name in _CLIENTS else "inferencegym.client.openenv_types"
    try:
        return getattr(importlib.import_module(room), name)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"{name} is OpenEnv's and {error.name} is not installed; get both with: pip install "
            "'openenv-inferencegym[openenv]'"
        ) from error
