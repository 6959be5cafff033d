"""uvicorn's worker processes with what their supervisor does not see: a death in the middle of a health check."""

from __future__ import annotations

from uvicorn.supervisors import multiprocess


class Worker(multiprocess.Process):
    """Worker process whose death ends a health check at once.

    uvicorn keeps the worker's end of their pipe open, so that for a worker that was killed during a check it would wait
    until the check times out, a minute. Meanwhile it replaces no other worker and obeys no signal: if the last one is
    killed too, all clients hang.
    """

    def start(self) -> None:
        """Start the process, and leave its end of the pipe to it."""
        super().start()
        self.child_conn.close()


class Workers(multiprocess.Multiprocess):
    """uvicorn's supervisor of :class:`Worker` processes."""

    def run(self) -> None:
        """Run the workers until a signal ends them."""
        multiprocess.Process = Worker  # type: ignore[misc]  # it has no other way to be told
        super().run()
