"""Limits and errors of processes that a server starts for long work: jobs on request logs, and grading."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from typing import Any, Final

from inferencegym.errors import InferenceGymError

LIMIT_BYTES: Final = 1 << 30
"""Memory of such a process (bytes); the largest log that a request may send takes two fifths of it."""
NICENESS: Final = 10
"""Niceness of such a process: steps take precedence over it."""
_PR_SET_PDEATHSIG: Final = 1
_PARTS: Final = ("code", "http_status", "field", "step", "line", "allowed")


def confine(parent: int) -> None:
    """Limit this process's memory, and end it with the process that started it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent has already ended
        sys.exit("the server has ended")
    # Not RLIMIT_AS: libraries reserve address space in proportion to the number of processors.
    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT_BYTES, LIMIT_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(NICENESS)


def error_parts(error: InferenceGymError | MemoryError) -> dict[str, Any]:
    """Message, code, HTTP status and, where it has them, field, step, line and allowed values of an error."""
    if isinstance(error, MemoryError):
        said = f"the work took more than {LIMIT_BYTES:,} bytes of memory; send a shorter part of the log"
        return {"message": said, "code": "job_lost", "http_status": 503}
    parts = {part: found for part in _PARTS if (found := getattr(error, part, None)) is not None}
    return {"message": str(error), **parts}
