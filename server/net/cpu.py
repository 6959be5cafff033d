"""Budget of processor time per client, for work that takes longer than a step.

Steps are too small to be counted. Longer work runs within :func:`charged`: one piece of each client at a time, and none
once the client has used up its time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from contextvars import ContextVar
from typing import Final, TypeVar
from weakref import WeakValueDictionary

from starlette.types import Scope

from server.net.limits import RateLimit, sender_of

T = TypeVar("T")


class CpuBudget:
    """Processor time of each client: seconds per minute, or unlimited for 0."""

    def __init__(self, seconds_per_minute: int) -> None:
        said = "long work of one client takes at most {most:g} s of processor time a minute"
        self._limit = RateLimit(seconds_per_minute, said) if seconds_per_minute else None
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def work_for(self, scope: Scope) -> AsyncIterator[Work]:
        """Context of a piece of work for the client that sent this. Raises RateLimitedError if its time is used up."""
        client, work = sender_of(scope), Work()
        async with self._turns.setdefault(client, asyncio.Lock()):
            if self._limit is not None:
                self._limit.take(client, 0)
            try:
                yield work
            finally:
                if self._limit is not None:
                    self._limit.charge(client, work.cpu_s)


class Work:
    """A piece of work and the processor time that it took."""

    cpu_s = 0.0

    def timed(self, do: Callable[[], T]) -> T:
        """Result of ``do()``; counts the time of the thread that calls this."""
        began = time.thread_time()
        try:
            return do()
        finally:
            self.cpu_s += time.thread_time() - began


PAYER: Final[ContextVar[Callable[[], AbstractAsyncContextManager[Work]]]] = ContextVar("payer")
""":meth:`CpuBudget.work_for` the request or WebSocket that is being answered; unset in the server's own tasks."""


def charged() -> AbstractAsyncContextManager[Work]:
    """Context of long work for the request that is being answered. Raises RateLimitedError."""
    return PAYER.get(lambda: nullcontext(Work()))()


async def on_thread(do: Callable[[], T]) -> T:
    """Result of long work for the request that is being answered, done on a thread. Raises RateLimitedError."""
    async with charged() as work:
        return await asyncio.to_thread(work.timed, do)
