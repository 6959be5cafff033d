"""Plugins: tasks, agents, families and engines of other installed packages, found by their entry points.

A package names what it adds in its ``pyproject.toml``; nothing is imported before it is needed::

    [project.entry-points."inferencegym.tasks"]     # path of a task file, such as my_tasks.json
    mine = "my_package:TASKS"
    [project.entry-points."inferencegym.agents"]    # a class as for --agent, under this name
    careful = "my_package.agents:Careful"
    [project.entry-points."inferencegym.families"]  # a Family of inferencegym.families
    thermostat = "my_package.thermostat:FAMILY"
    [project.entry-points."inferencegym.players"]   # the Players (inferencegym.players) of the family of this name
    thermostat = "my_package.thermostat:PLAYERS"
    [project.entry-points."inferencegym.engines"]   # an Engine, made of an EngineApi (inferencegym.engines)
    triton = "my_package.engines:Triton"
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

from inferencegym.errors import InvalidConfigError, did_you_mean

GROUP: Final = "inferencegym."
"""Start of the names of the groups of entry points."""
KINDS: Final = ("tasks", "agents", "families", "players", "engines")
"""What the names of the groups end in."""


@dataclass(frozen=True, slots=True)
class Plugin:
    """One entry point of an installed package."""

    point: EntryPoint

    @property
    def name(self) -> str:
        """Name of the entry point."""
        return self.point.name

    def load(self, *kinds: type) -> Any:
        """The object that it names. Raises :class:`InvalidConfigError` if it cannot be imported or is no ``kinds``."""
        try:
            found = self.point.load()
        except Exception as error:  # whatever another package does when it is imported
            raise self.error(f"cannot be loaded: {error!r}") from error
        if not isinstance(found, kinds):
            allowed = " or ".join(kind.__name__ for kind in kinds)
            whole = "" if self.point.attr else ": write package.module:Name"
            raise self.error(f"is of the type {type(found).__name__}, not {allowed}{whole}")
        return found

    def error(self, reason: str) -> InvalidConfigError:
        """An error that names the package and the entry point."""
        package = "unknown" if self.point.dist is None else self.point.dist.name
        return InvalidConfigError(
            f"{self.point.group}: the entry point {self.name!r} ({self.point.value}) of the package {package!r} "
            f"{reason}; correct the package, or uninstall it: pip uninstall {package}"
        )


def plugins(kind: str) -> list[Plugin]:
    """The entry points of all installed packages in the group ``inferencegym.<kind>``, by name.

    Raises :class:`InvalidConfigError` if an entry point is in a group ``inferencegym.*`` that does not exist.
    """
    return sorted((plugin for plugin in _installed() if plugin.point.group == GROUP + kind), key=lambda each: each.name)


@cache
def _installed() -> list[Plugin]:
    found = entry_points()  # the only look at the installed packages, because it takes some 15 ms
    added = [Plugin(p) for group in found.groups if group.startswith(GROUP) for p in found.select(group=group)]
    for plugin in added:
        kind = plugin.point.group.removeprefix(GROUP)
        if kind not in KINDS:
            advice = did_you_mean(kind, KINDS, f"the groups are {', '.join(KINDS)}")
            raise plugin.error(f"is in an unknown group: {advice}")
    return added
