"""Metrics of the server in Prometheus' text format: GET /metrics.

Several workers write their numbers to files in one directory, and the worker that answers sums them. It writes its own
before it answers, so that a reported count remains if it is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import orjson

from env.families import FAMILIES, SERVING
from inferencegym import __version__
from inferencegym.files import is_running
from server.net.jobs import Jobs
from server.sessions.manager import COUNTERS, SessionManager

MEDIA_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
BUCKETS_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of the latency histogram, in seconds; a step takes a few tenths of a millisecond."""
OTHER: Final = "other"
"""Label of paths that are not routes, so that clients cannot create labels."""
SHARE_EVERY_S: Final = 1.0

GAUGES: Final[Mapping[str, str]] = {
    "active_sessions": "Environments in memory",
    "held_steps": "Log entries (seconds) of the environments in memory",
    "websockets": "Open WebSocket connections",
    "resident_memory_bytes": "Memory of a worker, by pid",
    "stored_sessions": "Sessions in the store, at most ten seconds ago",
    "max_sessions": "Sessions that the store may hold (INFERENCEGYM_MAX_SESSIONS)",
    "store_bytes": "Size of the SQLite file with its log and damaged files beside it; 0 with other stores",
    "jobs": "Jobs of /plan and /shadow by state, running or waiting; at most 16 per worker",
    "build_info": "1, with the release and the lookup table as labels",
}
"""Numbers of running workers only."""
METRICS: Final[Mapping[str, tuple[str, str]]] = {
    **{f"{name}_total": ("counter", text) for name, text in COUNTERS.items()},
    "http_requests_total": ("counter", "Requests answered, by path (other: no route) and status"),
    "http_request_duration_seconds": ("histogram", "Time from the request's head to the answer, by path"),
    "cpu_seconds_total": ("counter", "Processor time of all workers"),
    "worker_exits_total": ("counter", "Workers that ended and were replaced"),
    **{name: ("gauge", text) for name, text in GAUGES.items()},
}
"""Type and description of all metrics."""

Snapshot = dict[str, Any]
"""``pid``, and ``samples`` of each metric: values by what follows the metric's name, which are suffix and labels."""


class Metrics:
    """Metrics of one process."""

    def __init__(
        self, sessions: SessionManager, jobs: Jobs, max_sessions: int, directory: str | Path | None = None
    ) -> None:
        self.websockets = 0
        self._sessions = sessions
        self._jobs = jobs
        self._max_sessions = max_sessions
        self._directory = None if directory is None else Path(directory)
        self.paths = set[str]()
        """Paths that are counted separately; all others are counted together."""
        self._statuses: Counter[tuple[str, int]] = Counter()
        self._seconds: Counter[str] = Counter()
        self._buckets: defaultdict[str, list[int]] = defaultdict(lambda: [0] * (len(BUCKETS_S) + 1))

    def count(self, path: str, status: int, took_s: float) -> None:
        """Add one request."""
        label = path if path in self.paths else OTHER
        self._statuses[label, status] += 1
        self._seconds[label] += took_s  # type: ignore[assignment]  # counters of floats are not typed
        self._buckets[label][bisect_left(BUCKETS_S, took_s)] += 1

    def snapshot(self) -> Snapshot:
        """All numbers of this process."""
        counters, pid = vars(self._sessions.counters), os.getpid()
        samples: dict[str, dict[str, float]] = {f"{name}_total": {"": n} for name, n in counters.items()}
        samples["http_requests_total"] = {_labels(path=path, status=n): m for (path, n), m in self._statuses.items()}
        samples["http_request_duration_seconds"] = durations = dict[str, float]()
        for path, buckets in self._buckets.items():
            for bound, below in zip((*BUCKETS_S, "+Inf"), accumulate(buckets), strict=True):
                durations["_bucket" + _labels(le=bound, path=path)] = below
            durations["_sum" + _labels(path=path)] = self._seconds[path]
            durations["_count" + _labels(path=path)] = sum(buckets)
        samples["cpu_seconds_total"] = {"": time.process_time()}
        samples["active_sessions"] = {"": len(self._sessions)}
        samples["held_steps"] = {"": self._sessions.steps_held}
        samples["websockets"] = {"": self.websockets}
        samples["jobs"] = {_labels(state=state): n_jobs for state, n_jobs in self._jobs.by_state().items()}
        samples["resident_memory_bytes"] = {_labels(pid=pid): resident_bytes()}
        return {"pid": pid, "samples": samples}

    def exposition(self) -> str:
        """Metrics of all workers, in Prometheus' text format."""
        summed = {name: Counter[str]() for name in METRICS}
        for one in self.snapshots():
            running = is_running(one["pid"])
            summed["worker_exits_total"][""] += not running
            for name, samples in one["samples"].items():
                if running or name not in GAUGES:
                    summed[name].update(samples)
        summed["stored_sessions"][""], summed["max_sessions"][""] = self._sessions.store.stored, self._max_sessions
        summed["store_bytes"][""] = self._sessions.store.size_bytes()
        table_sha256 = str(FAMILIES[SERVING].table_sha256())
        summed["build_info"][_labels(version=__version__, table_sha256=table_sha256)] = 1
        lines = list[str]()
        for name, (kind, text) in METRICS.items():
            lines += [f"# HELP inferencegym_{name} {text}", f"# TYPE inferencegym_{name} {kind}"]
            lines += [f"inferencegym_{name}{labels} {float(value)}" for labels, value in summed[name].items()]
        return "\n".join(lines) + "\n"

    # ------------------------------------------------------------ several workers

    async def keep_sharing(self) -> None:
        """Write this process's numbers for the other workers, once a second and when it is cancelled."""
        if self._directory is None:
            return
        try:
            while True:
                self._share(self._directory)
                await asyncio.sleep(SHARE_EVERY_S)
        finally:
            self._share(self._directory)

    def _share(self, directory: Path) -> Snapshot:
        snapshot = self.snapshot()
        place = directory / f"{os.getpid()}.json"
        # Written aside and renamed: a reader sees the old numbers or the new ones, never half of them.
        aside = place.with_suffix(".new")
        # A full disk must not stop the server; the other workers then see older numbers.
        with contextlib.suppress(OSError):
            aside.write_bytes(orjson.dumps(snapshot))
            aside.replace(place)
        return snapshot

    def snapshots(self) -> list[Snapshot]:
        """Current numbers of this process, and the last numbers of other workers, including ended ones."""
        if self._directory is None:
            return [self.snapshot()]
        others = [place for place in sorted(self._directory.glob("*.json")) if place.stem != str(os.getpid())]
        return [self._share(self._directory), *(orjson.loads(place.read_bytes()) for place in others)]


@asynccontextmanager
async def background(work: Coroutine[object, object, None]) -> AsyncIterator[None]:
    """Run ``work`` as a task for the length of the block, then cancel it and wait for its end."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _labels(**labels: object) -> str:
    return "{" + ",".join(f'{name}="{value}"' for name, value in labels.items()) + "}"


def resident_bytes() -> int:
    """Resident memory of this process; without /proc, its maximum so far."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return pages * resource.getpagesize()
