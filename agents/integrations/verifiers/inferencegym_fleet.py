"""The name under which verifiers loads the environment: it takes modules that stand in no package."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

__all__ = ["FleetEnv", "FleetTaskset"]

# A wheel holds the rooms inside `inferencegym`, a clone beside it.
_rooms = "inferencegym." if find_spec("inferencegym.agents") else ""
_fleet = import_module(f"{_rooms}agents.integrations.verifiers")
FleetEnv, FleetTaskset = _fleet.FleetEnv, _fleet.FleetTaskset
