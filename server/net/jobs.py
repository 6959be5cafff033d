"""Offline work in a process of its own: what reads and simulates a visitor's log never holds up anybody's step."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import os
import sys
from collections.abc import Mapping
from typing import Any, Final

from inferencegym.errors import InferenceGymError

LIMIT_S: Final = 300.0
"""Time of a job; a plan over many cards takes a minute on two cores."""
AT_ONCE: Final = 1
"""Jobs of one server process that run at the same time; more wait."""
MODULE: Final = __name__.removesuffix("server.net.jobs") + "agents.jobs"
"""Where the jobs are; the server's process does not import it, nor what it imports."""
_LOG: Final = logging.getLogger(__name__)


class JobRefusedError(InferenceGymError, ValueError):
    """A job ended with an error of its own; it has that error's code, HTTP status and place."""

    def __init__(self, parts: Mapping[str, Any]) -> None:
        super().__init__(parts["message"])
        vars(self).update({name: value for name, value in parts.items() if name != "message"})


class JobLostError(InferenceGymError, RuntimeError):
    """A job took too long, or its process ended without an answer. (HTTP 503)"""

    code = "job_lost"
    http_status = 503


class Jobs:
    """Runner of jobs, :data:`AT_ONCE` at a time."""

    def __init__(self) -> None:
        self._slots = asyncio.Semaphore(AT_ONCE)

    async def run(self, name: str, request: Mapping[str, Any]) -> bytes:
        """Gzipped JSON of a job's answer. Raises :class:`JobRefusedError` and :class:`JobLostError`."""
        async with self._slots:
            status, out = await _run(name, json.dumps(request).encode())
        if status == 0:
            return out
        raise JobRefusedError(json.loads(gzip.decompress(out)))


async def _run(name: str, request: bytes) -> tuple[int, bytes]:
    pipe = asyncio.subprocess.PIPE
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", MODULE, name, stdin=pipe, stdout=pipe, stderr=pipe, env=environment
    )
    try:
        out, said = await asyncio.wait_for(process.communicate(request), LIMIT_S)
    except TimeoutError:
        raise JobLostError(f"the work took more than {LIMIT_S:g} s; send a shorter part of the log") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    status = process.returncode
    if status not in (0, 2) or not out:
        text = said.decode(errors="replace").strip()
        _LOG.error("job %s ended with status %s: %s", name, status, text[-2000:])
        missing = "pandas" if "No module named 'pandas'" in text else None
        hint = f": {missing} is not installed on the server" if missing else "; the server's log has the cause"
        raise JobLostError(f"the work ended without an answer{hint}")
    assert status is not None
    return status, out
