"""Limits and errors of processes that a server starts for long work: jobs on request logs, and grading."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, Final

from inferencegym.errors import InferenceGymError

LIMIT_BYTES: Final = 1 << 30
"""Memory of such a process (bytes); the largest log that a request may send takes two fifths of it."""
NICENESS: Final = 10
"""Niceness of such a process: steps take precedence over it."""
_PR_SET_PDEATHSIG: Final = 1
_OPTION: Final = re.compile(r"--([a-z]+(?:-[a-z]+)*)")
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


def serve(respond: Callable[[str, bytes], tuple[int, bytes]]) -> None:
    """Answer requests from standard input until it ends.

    A request is a line with its name and the number of bytes of its body, and then its body. An answer is a line with a
    status, the processor time taken (s) and a number of bytes, and then as many: what was asked for (status 0), or the
    parts of an error as JSON.
    """
    while line := sys.stdin.buffer.readline():
        what, size = line.decode().rsplit(maxsplit=1)
        body = sys.stdin.buffer.read(int(size))
        began = time.process_time()
        status, answer = respond(what, body)
        sys.stdout.buffer.write(b"%d %f %d\n%b" % (status, time.process_time() - began, len(answer), answer))
        sys.stdout.buffer.flush()


def error_parts(error: InferenceGymError | MemoryError) -> dict[str, Any]:
    """Message, code, HTTP status and, where it has them, field, step, line and allowed values of an error."""
    if isinstance(error, MemoryError):
        said = f"the work took more than {LIMIT_BYTES:,} bytes of memory; send a shorter part of the log"
        return {"message": said, "code": "job_lost", "http_status": 503}
    parts = {part: found for part in _PARTS if (found := getattr(error, part, None)) is not None}
    return {"message": str(error), **parts}


def request_parts(error: InferenceGymError | MemoryError) -> dict[str, Any]:
    """:func:`error_parts` for the sender of a request: the message names fields of the request, not options."""
    parts = error_parts(error)
    return {**parts, "message": in_fields(parts["message"])}


def in_fields(text: str) -> str:
    """A text with fields of a request in the place of options."""
    return _OPTION.sub(lambda found: found[1].replace("-", "_"), text)
