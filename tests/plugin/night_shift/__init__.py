"""Example of a plugin: a task of the serving fleet, an agent, and a family with its policies."""

from __future__ import annotations

from pathlib import Path
from typing import Final

TASKS: Final = Path(__file__).with_name("tasks.json")


def __getattr__(name: str) -> object:
    """``PLAYERS``: imported when they are asked for, because a client needs neither agents nor numpy."""
    if name != "PLAYERS":
        raise AttributeError(name)
    from inferencegym.players import Players
    from night_shift.thermostat import POLICIES, make_policy

    return Players(lambda: POLICIES, make_policy)
