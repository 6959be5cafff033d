"""uvicorn's worker processes, which end with their supervisor, and whose death ends a health check."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
from socket import socket

from uvicorn.config import Config
from uvicorn.supervisors import multiprocess

log = logging.getLogger(__name__)


class Worker(multiprocess.Process):
    """Worker process that ends with its supervisor, and whose own death ends a health check at once.

    Workers of a supervisor that was killed would go on serving, keep the port, and stop a new server from starting.
    uvicorn keeps the worker's end of their pipe open, so that for a worker that was killed during a check it would wait
    until the check times out, a minute. Meanwhile it replaces no other worker and obeys no signal: if the last one is
    killed too, all clients hang.
    """

    def start(self) -> None:
        """Start the process, and leave its end of the pipe to it."""
        super().start()
        self.child_conn.close()

    def join(self) -> None:
        """Wait for its end, which is an error in the log unless it was asked to end."""
        super().join()
        if self.exitcode not in (0, -signal.SIGTERM):
            log.error("worker %s died or hung: exit code %s", self.pid, self.exitcode)

    def target(self, sockets: list[socket] | None = None) -> None:
        """Serve, in the worker's process."""
        threading.Thread(target=_end_with_supervisor, daemon=True).start()
        super().target(sockets)


def _end_with_supervisor() -> None:
    supervisor = multiprocessing.parent_process()
    assert supervisor is not None
    supervisor.join()
    os.kill(os.getpid(), signal.SIGTERM)


def run_workers(config: Config, sockets: list[socket]) -> None:
    """Run uvicorn's supervisor of :class:`Worker` processes until a signal ends them."""
    multiprocess.Process = Worker  # type: ignore[misc]  # it has no other way to be told
    multiprocess.Multiprocess(config, sockets=sockets).run()
