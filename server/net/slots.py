"""Slots of WebSocket connections: limits in all and per client, and the choice of idle connections to close."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Final

from inferencegym.errors import CapacityError

NEW_S: Final = 10.0
"""Seconds for which a connection without an episode keeps its slot when others need it: longer than a reset takes."""
IDLE_S: Final = 60.0
"""Seconds for which a connection keeps its slot after its last step: longer than a language model's answer takes."""


class NoSlotError(CapacityError):
    """No slot is free for a connection, and none can be freed."""

    def __init__(self, message: str, next_step: str, taken: int, most: int) -> None:
        super().__init__(message)
        self.next_step = next_step
        self.taken = taken
        self.most = most


@dataclass(eq=False, slots=True)
class Slot:
    """Slot of one WebSocket connection; must be created in the asyncio task that serves it."""

    client: str
    played: float = field(default_factory=time.monotonic)
    """Time of its last reset or step; before the first, time of opening."""
    has_episode: bool = False
    gave_way: bool = False
    """Whether the slot went to another connection; the task that serves this one is then cancelled."""
    _task: asyncio.Task[None] | None = field(default_factory=asyncio.current_task)

    def may_give_way(self, now: float) -> bool:
        """Whether the connection has been idle long enough for another one to take its slot."""
        return now - self.played >= (IDLE_S if self.has_episode else NEW_S)

    def give_way(self) -> None:
        """Close the slot's connection."""
        assert self._task is not None
        self.gave_way = True
        self._task.cancel()


class Slots:
    """Slots of one process and environment; ``most_per_client`` of them may be one client's."""

    def __init__(self, most: int, most_per_client: int) -> None:
        self._most = most
        self._most_per_client = most_per_client
        self._taken: set[Slot] = set()

    def take(self, client: str) -> Slot:
        """A slot for the connection that the current task serves, or of an idle one. Raises NoSlotError."""
        own = [slot for slot in self._taken if slot.client == client]
        if self._most > self._most_per_client <= len(own):
            said = f"{len(own)} connections of this client play, and no more than {self._most_per_client} may"
            self._free_one_of(own, said, "INFERENCEGYM_CONCURRENT_ENVS_PER_CLIENT", self._most_per_client)
        elif len(self._taken) >= self._most:
            said = f"{len(self._taken)} connections play, and no more than {self._most} may"
            self._free_one_of(list(self._taken), said, "INFERENCEGYM_MAX_CONCURRENT_ENVS", self._most)
        slot = Slot(client)
        self._taken.add(slot)
        return slot

    def give_back(self, slot: Slot) -> None:
        """Free the slot of a connection that has ended."""
        self._taken.discard(slot)

    def _free_one_of(self, slots: list[Slot], said: str, setting: str, most: int) -> None:
        now = time.monotonic()
        idle = [slot for slot in slots if slot.may_give_way(now)]
        if not idle:
            raise NoSlotError(said, f"close one, or raise {setting} on the server", len(slots), most)
        # One without an episode, else the one idle longest.
        first = min(idle, key=lambda slot: (slot.has_episode, slot.played))
        self._taken.discard(first)
        first.give_way()
