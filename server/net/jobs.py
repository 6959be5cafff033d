"""Work on clients' logs in separate processes, so that reading, grading and simulating them never delays steps."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import logging
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar
from weakref import WeakValueDictionary

from starlette.requests import ClientDisconnect, Request

from inferencegym.errors import InferenceGymError
from server.net.cpu import charged
from server.net.errors import RateLimitedError

MAX_JOBS: Final = 16
"""Jobs of one server process that run (one at a time) or wait."""
MAX_JOBS_PER_CLIENT: Final = 4
FIRST_GUESS_S: Final = 10.0
"""Assumed time (s) of a job until one was measured."""
_PACKAGE: Final = __name__.removesuffix("server.net.jobs")
MODULE: Final = _PACKAGE + "ops.jobs"
"""Module with the jobs; the server's process imports neither it nor its imports."""
ELSEWHERE: Final = _PACKAGE + "server.api.grading"
"""Module of :class:`Elsewhere`."""
T = TypeVar("T")
_LOG: Final = logging.getLogger(__name__)


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
            began = time.monotonic()
            status, out = await _run(name, json.dumps(request).encode())
            self._usual_s += 0.5 * (time.monotonic() - began - self._usual_s)
        if status == 0:
            return out
        raise JobRefusedError(json.loads(gzip.decompress(out)))

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
    """The process that grades long logs and plays episodes again, one at a time. It starts with the first of them."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def run(self, what: str, family: str, body: bytes) -> bytes:
        """The JSON answer to one of the requests of server/api/grading.py; its client pays for the processor time.

        Raises :class:`JobRefusedError`, :class:`JobLostError`, and RateLimitedError if the client's time is used up.
        """
        # A client is charged for one piece of work at a time, so clients take turns.
        async with charged() as work, self._turn:
            status, work.cpu_s, answer = await self.answer(f"{what} {family} {len(body)}\n".encode(), body)
        if status == 0:
            return answer
        raise JobRefusedError(json.loads(answer))

    async def answer(self, head: bytes, body: bytes) -> tuple[int, float, bytes]:
        """What the process answers: a status, its processor time (s) and JSON. Raises :class:`JobLostError`."""
        process, self._process = self._process, None
        try:
            if process is None or process.returncode is not None:
                process = await _start(ELSEWHERE, str(os.getpid()), stderr=None)
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.writelines((head, body))
            await process.stdin.drain()
            status, cpu_s, size = (await process.stdout.readline()).split()
            answer = await process.stdout.readexactly(int(size))
            # Kept only now: one that was interrupted would answer an earlier request.
            self._process, process = process, None
        except (ValueError, OSError, asyncio.IncompleteReadError) as error:
            raise JobLostError("the work took too much time or memory, or failed") from error
        finally:
            if process is not None:
                await _end(process)
        return int(status), float(cpu_s), answer

    async def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            await _end(process)


async def _start(*module_and_args: str, stderr: int | None) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    # A thread for each processor would use part of the process's memory limit.
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OPENBLAS_NUM_THREADS": "1",
    }
    command = (sys.executable, "-m", *module_and_args)
    return await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=stderr, env=environment)


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _run(name: str, request: bytes) -> tuple[int, bytes]:
    process = await _start(MODULE, name, str(os.getpid()), stderr=asyncio.subprocess.PIPE)
    try:
        out, said = await process.communicate(request)
    finally:
        await _end(process)
    status = process.returncode
    assert status is not None
    if status in (-signal.SIGALRM, -signal.SIGXCPU, -signal.SIGKILL):
        raise JobLostError("the work took too much time or memory; send a shorter part of the log")
    if status not in (0, 2) or not out:
        text = said.decode(errors="replace").strip()
        _LOG.error("job %s ended with status %s: %s", name, status, text[-2000:])
        missing = "pandas" if "No module named 'pandas'" in text else None
        hint = f": {missing} is not installed on the server" if missing else "; the server's log has the cause"
        raise JobLostError(f"the work ended without an answer{hint}")
    return status, out
