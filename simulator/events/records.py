"""Argument that engine functions share: the arrays and numbers of :mod:`simulator.events.arrays` as attributes."""

from __future__ import annotations

from typing import Any

from simulator.events.arrays import RUN


class Run:
    """State of a run. ``owner`` (a :class:`simulator.events.simulation.Simulation`) adds events and missing times."""

    table = RUN
    owner: Any

    def __init__(self, owner: Any, values: Any) -> None:
        # Compiled code does not check: a missing array would be read at address 0.
        missing = {name for name, spec in RUN.items() if spec.axes} - set(values)
        if missing:
            raise TypeError(f"a run lacks {sorted(missing)}: see simulator/events/arrays.py")
        self.owner = owner
        for name, value in {**values, **dict.fromkeys(set(RUN) - set(values), 0)}.items():
            try:
                setattr(self, name, value)
            except AttributeError as error:
                raise TypeError(f"the compiled engine does not know {name!r}: run `make build`") from error
