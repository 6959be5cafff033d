"""Work on clients' logs in separate processes, so that reading, grading and simulating them never delays steps."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar
from weakref import WeakValueDictionary

from starlette.requests import ClientDisconnect, Request

from inferencegym.errors import InferenceGymError
from server.net.cpu import Work, charged
from server.net.errors import RateLimitedError

MAX_JOBS: Final = 16
"""Jobs of one server process that run (one at a time) or wait."""
MAX_JOBS_PER_CLIENT: Final = 4
FIRST_GUESS_S: Final = 10.0
"""Assumed time (s) of a job until one was measured."""
_PACKAGE: Final = __name__.removesuffix("server.net.jobs")
MODULE: Final = _PACKAGE + "ops.jobs"
"""Module with the jobs; the server's process imports neither it nor its imports."""
GRADING: Final = _PACKAGE + "server.api.grading"
T = TypeVar("T")


class JobRefusedError(InferenceGymError, ValueError):
    """Work in another process failed with an error; this one has its code, HTTP status, field, step and line."""

    def __init__(self, parts: Mapping[str, Any]) -> None:
        super().__init__(parts["message"])
        vars(self).update({name: value for name, value in parts.items() if name != "message"})


class JobLostError(InferenceGymError, RuntimeError):
    """A job took too long, or its process ended without an answer. (HTTP 503)"""

    code = "job_lost"
    http_status = 503


class Jobs:
    """Runner of jobs, one at a time; clients take turns."""

    def __init__(self) -> None:
        self._process = asyncio.Semaphore(1)
        # Each client queues with one job at a time, so that clients take turns.
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._jobs: Counter[str] = Counter()
        self._usual_s = FIRST_GUESS_S

    async def run(self, client: str, name: str, request: Mapping[str, Any]) -> bytes:
        """Gzipped JSON of a job's answer; cancelling it ends the job.

        Raises :class:`JobRefusedError`, :class:`JobLostError`, and RateLimitedError where too many wait.
        """
        async with self._place(client), self._turns.setdefault(client, asyncio.Lock()), self._process:
            began, process = time.monotonic(), Elsewhere(MODULE)
            try:
                answer = await process.answer(name, json.dumps(request).encode())
            finally:
                await process.close()
            self._usual_s += 0.5 * (time.monotonic() - began - self._usual_s)
            return answer

    def by_state(self) -> dict[str, int]:
        """Number of jobs that are ``running`` and ``waiting``."""
        running = int(self._process.locked())
        return {"running": running, "waiting": self._jobs.total() - running}

    @asynccontextmanager
    async def _place(self, client: str) -> AsyncIterator[None]:
        """A place among the jobs that run or wait. Raises RateLimitedError with the time until one is expected."""
        if self._jobs[client] >= MAX_JOBS_PER_CLIENT or self._jobs.total() >= MAX_JOBS:
            said = f"{self._jobs[client]} jobs of this client run or wait, and {self._jobs.total()} of all clients; "
            most = f"at most {MAX_JOBS_PER_CLIENT} and {MAX_JOBS} may"
            raise RateLimitedError(said + most, self._usual_s * max(1, len(self._jobs)))
        self._jobs[client] += 1
        try:
            yield
        finally:
            self._jobs[client] -= 1
            self._jobs += Counter()  # forgets clients without jobs


async def unless_client_leaves(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Result of ``work``; if the client closes its connection, cancels it and raises ClientDisconnect."""
    working, leaving = asyncio.create_task(work), asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class Elsewhere:
    """A process that grades long logs and plays episodes again, one at a time; or does the work of another module.

    It starts with the first request, and ends with this process.
    """

    def __init__(self, module: str = GRADING) -> None:
        self._module = module
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def run(self, what: str, family: str, body: bytes) -> bytes:
        """The JSON answer to one of the requests of server/api/grading.py; its client pays for the processor time.

        Raises :class:`JobRefusedError`, :class:`JobLostError`, and RateLimitedError if the client's time is used up.
        """
        # A client is charged for one piece of work at a time, so clients take turns.
        async with charged() as work, self._turn:
            return await self.answer(f"{what} {family}", body, work)

    async def answer(self, what: str, body: bytes, work: Work | None = None) -> bytes:
        """What :func:`ops.worker.serve` answers, as a part of ``work``; raises as :meth:`run`."""
        process, self._process = self._process, None
        try:
            if process is None or process.returncode is not None:
                process = await self._start()
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.writelines((f"{what} {len(body)}\n".encode(), body))
            await process.stdin.drain()
            status, cpu_s, size = (await process.stdout.readline()).split()
            answer = await process.stdout.readexactly(int(size))
            # Kept only now: one that was interrupted would answer an earlier request.
            self._process, process = process, None
        except (ValueError, OSError, asyncio.IncompleteReadError) as error:
            said = "the work took too much time or memory (send less), or failed (the server's log has the cause)"
            raise JobLostError(said) from error
        finally:
            await _end(process)
        if work is not None:
            work.cpu_s = float(cpu_s)
        if status != b"0":
            raise JobRefusedError(json.loads(answer))
        return answer

    async def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        await _end(process)

    async def _start(self) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        # A thread for each processor would use part of the process's memory limit.
        path = os.pathsep.join(filter(None, sys.path))
        environment = {**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"}
        command = (sys.executable, "-m", self._module, str(os.getpid()))
        return await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, env=environment)


async def _end(process: asyncio.subprocess.Process | None) -> None:
    if process is not None and process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
