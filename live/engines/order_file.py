"""Control file of vLLM's scheduler class: one controller at a time; it also keeps the user's setting."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from inferencegym.errors import DataFormatError, InvalidConfigError, short_text
from inferencegym.files import is_running, write_text
from live.engines.engine import Knobs, Orders

MAX_BYTES: Final = 65_536
"""Largest control file that is read, as in the scheduler class."""
LOCK_S: Final = 5.0
"""Longest wait for another controller to write; it takes milliseconds unless its process is paused."""


class OrderFile:
    """Reads and writes a control file for one controller.

    Orders with an end (``until``) are also a lease: they name their owner by process id, host and a random id. Until
    the end nobody else can write, unless the owner's process is gone, which only its own host can tell. ``then`` of
    such orders is the user's setting, so it outlives a controller that was killed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._owner = {"pid": os.getpid(), "host": socket.gethostname(), "id": secrets.token_hex(8)}

    def write(self, orders: Orders) -> None:
        """Replace the orders; those without an end give up the lease.

        Raises :class:`InvalidConfigError` if another controller has the lease, and :class:`DataFormatError` if the file
        cannot be written.
        """
        with self._locked():
            self._require_lease()
            content: dict[str, Any] = {
                "set": dict(orders.knobs),
                "then": dict(orders.then or {}),
                "until": orders.until,
            }
            if orders.until is not None:
                content["owner"] = self._owner
            write_text(self.path, json.dumps(content))

    def user_setting(self) -> Knobs:
        """The user's setting by these orders: ``then`` if they have an end, otherwise all; empty without a valid file.

        Raises nothing: an invalid file is the same as none to the engine too.
        """
        found = self._read()
        knobs = found.get("then" if found.get("until") is not None else "set")
        if not isinstance(knobs, dict):
            return {}
        return {
            name: float(value) for name, value in knobs.items() if type(value) in (int, float) and abs(value) < 1e12
        }

    def version(self) -> list[int] | None:
        """Changes whenever the file is replaced, as the engine's state has it; None without a file."""
        try:
            found = os.lstat(self.path)
        except OSError:
            return None
        return [found.st_mtime_ns, found.st_ino]

    def _require_lease(self) -> None:
        found = self._read()
        owner, until = found.get("owner"), found.get("until")
        if not isinstance(owner, dict) or not isinstance(until, float | int) or not until > time.time():
            return
        if owner.get("id") == self._owner["id"] or not _may_run(owner):
            return
        end = time.strftime("%H:%M:%S", time.localtime(min(until, time.time() + 1e6)))
        raise InvalidConfigError(
            f"another controller sets this engine through {self.path}: process {short_text(str(owner.get('pid')))} on "
            f"{short_text(str(owner.get('host')))}, whose lease ends at {end} unless it renews it. Stop that "
            "controller, or wait for the end"
        )

    def _read(self) -> Mapping[str, Any]:
        """The file's content; empty without a file, or if it holds no JSON object. Never waits, and follows no link."""
        try:
            handle = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                regular = stat.S_ISREG(os.fstat(handle).st_mode)
                found = json.loads(os.read(handle, MAX_BYTES)) if regular else None
            finally:
                os.close(handle)
        except (OSError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    @contextmanager
    def _locked(self) -> Iterator[None]:
        # Of two controllers that start at once, the second must see the orders of the first.
        path = Path(f"{self.path}.lock")
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise DataFormatError(f"{path}: cannot be opened to lock it ({error.strerror})") from error
        try:
            deadline = time.monotonic() + LOCK_S
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError as error:
                    if time.monotonic() > deadline:
                        raise InvalidConfigError(
                            f"another controller has held {path} for {LOCK_S:g} s: continue that process or end it"
                        ) from error
                    time.sleep(0.01)
            yield
        finally:
            os.close(handle)


def _may_run(owner: Mapping[str, Any]) -> bool:
    pid = owner.get("pid")
    if owner.get("host") != socket.gethostname():
        return True
    if type(pid) is not int or not 0 < pid < 2**31:
        return False
    return is_running(pid)
