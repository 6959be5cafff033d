"""Arguments that kernel functions share: the arrays and numbers of :mod:`simulator.kernel.arrays` as attributes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulator.kernel.arrays import (
    BATCH,
    COHORTS,
    FIRST_TOKEN,
    FLEET,
    HEADS,
    KNOBS,
    LOAD,
    MEMORY,
    METRICS,
    PACE,
    PARAMS,
    PIECES,
    PREFILL,
    PROMPTS,
    ROOM,
    STATE,
    allocate,
)

Points = NDArray[np.float64]


class Views:
    """Arrays and numbers as attributes; every entry of the class's ``table`` must be given."""

    def __init__(self, values: Any) -> None:
        # Compiled code does not check: a missing array would be read at address 0.
        missing = set(self.table) - set(values)
        if missing:
            raise TypeError(f"{type(self).__name__} lacks {sorted(missing)}: see simulator/kernel/arrays.py")
        for name, value in values.items():
            try:
                setattr(self, name, value)
            except AttributeError as error:
                raise TypeError(f"the compiled kernel does not know {name!r}: run `make build`") from error


class Params(Views):
    """Constants of a fleet."""

    table = PARAMS


class Load(Views):
    """The offered load."""

    table = LOAD


class Knobs(Views):
    """The action."""

    table = KNOBS


class State(Views):
    """State carried from one step to the next."""

    table = STATE


class Metrics(Views):
    """Metrics of a step."""

    table = METRICS


class Fleet(Views):
    """Replicas in this step."""

    table = FLEET


class Memory(Views):
    """Memory of a replica in this step."""

    table = MEMORY


class Heads(Views):
    """Heads of the queues."""

    table = HEADS


class Prefill(Views):
    """Prefill together with the batch that runs when the step begins."""

    table = PREFILL


class Cohorts(Views):
    """Survivors of the requests that ran before the step."""

    table = COHORTS


class Room(Views):
    """Room that is left for classes admitted later."""

    table = ROOM


class Batch(Views):
    """Admissions, and requests in flight at the end of the step."""

    table = BATCH


class Pace(Views):
    """Iterations of the mean batch."""

    table = PACE


class Prompts(Views):
    """Queue of prompts at a replica."""

    table = PROMPTS


class FirstToken(Views):
    """Time from admission to first token."""

    table = FIRST_TOKEN


class Pieces(Views):
    """Waits of the step's admissions."""

    table = PIECES


class Scratch:
    """Scratch of one row's step, one record per topic; only the topic's module writes it."""

    fleet: Fleet
    memory: Memory
    heads: Heads
    prefill: Prefill
    cohorts: Cohorts
    room: Room
    batch: Batch
    pace: Pace
    prompts: Prompts
    first_token: FirstToken
    pieces: Pieces

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.fleet = Fleet(allocate(FLEET, sizes))
        self.memory = Memory(allocate(MEMORY, sizes))
        self.heads = Heads(allocate(HEADS, sizes))
        self.prefill = Prefill(allocate(PREFILL, sizes))
        self.cohorts = Cohorts(allocate(COHORTS, sizes))
        self.room = Room(allocate(ROOM, sizes))
        self.batch = Batch(allocate(BATCH, sizes))
        self.pace = Pace(allocate(PACE, sizes))
        self.prompts = Prompts(allocate(PROMPTS, sizes))
        self.first_token = FirstToken(allocate(FIRST_TOKEN, sizes))
        self.pieces = Pieces(allocate(PIECES, sizes))
