"""Metrics of the server for Prometheus: GET /metrics.

A request adds to a few plain integers (under a microsecond). prometheus_client, which formats the answer, is imported
at the first GET. Several workers write their numbers to files in one directory, and the worker that answers sums them,
so the result does not depend on the worker. It writes its own numbers before it answers, so that a reported count
remains if it is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import time
from bisect import bisect_left
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import orjson

from env.families import FAMILIES, SERVING
from inferencegym import __version__
from inferencegym.files import is_running
from server.net.background import background

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from server.sessions.manager import SessionManager

BUCKETS_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of the latency histogram, in seconds; a step takes a few tenths of a millisecond."""
OTHER: Final = "other"
"""Label of all paths that are not routes, so that clients cannot create labels."""
SHARE_EVERY_S: Final = 1.0

COUNTERS: Final[Mapping[str, str]] = {
    "resets": "Episodes started",
    "steps": "Steps played",
    "repeated_answers": "Steps sent again and answered as before",
    "conflicts": "Steps refused because another action was accepted for them",
    "replays": "Environments rebuilt from their records",
    "replayed_steps": "Steps played again to rebuild environments",
    "evictions": "Environments dropped from memory to make room; their records stay",
    "store_errors": "Requests and upkeep that the session store could not serve",
}
GAUGES: Final[Mapping[str, str]] = {
    "active_sessions": "Environments in memory",
    "held_steps": "Log entries (seconds) of the environments in memory",
    "websockets": "Open WebSocket connections",
}

Snapshot = dict[str, Any]


class PathCounts:
    """Requests to one path."""

    __slots__ = ("buckets", "seconds", "statuses")

    def __init__(self) -> None:
        self.statuses: dict[int, int] = {}
        self.buckets = [0] * (len(BUCKETS_S) + 1)
        self.seconds = 0.0


class Metrics:
    """Metrics of one process."""

    def __init__(self, sessions: SessionManager, directory: Path | None = None) -> None:
        self.websockets = 0
        self._sessions = sessions
        self._directory = directory
        self._paths: dict[str, PathCounts] = {}
        self._other = PathCounts()

    def know(self, paths: Iterable[str]) -> None:
        """Count requests to these paths separately, and those to all other paths together."""
        for path in paths:
            self._paths.setdefault(path, PathCounts())

    def count(self, path: str, status: int, took_s: float) -> None:
        """Add one request."""
        counts = self._paths.get(path, self._other)
        counts.statuses[status] = counts.statuses.get(status, 0) + 1
        counts.buckets[bisect_left(BUCKETS_S, took_s)] += 1
        counts.seconds += took_s

    def snapshot(self) -> Snapshot:
        """All numbers of this process, JSON-able."""
        counted = {**self._paths, OTHER: self._other}
        counters = asdict(self._sessions.counters)
        return {
            "pid": os.getpid(),
            "paths": {
                path: {
                    "statuses": {str(status): n for status, n in counts.statuses.items()},
                    "buckets": counts.buckets,
                    "seconds": counts.seconds,
                }
                for path, counts in counted.items()
                if counts.statuses
            },
            "counters": {name: counters[name] for name in COUNTERS},
            "gauges": {
                "active_sessions": len(self._sessions),
                "held_steps": self._sessions.steps_held,
                "websockets": self.websockets,
            },
            "process": {"resident_bytes": resident_bytes(), "cpu_s": time.process_time()},
        }

    # ------------------------------------------------------------ several workers

    @asynccontextmanager
    async def shared(self) -> AsyncIterator[None]:
        """Write this process's numbers for the other workers, once a second and at the end."""
        if self._directory is None:
            yield
            return
        try:
            async with background(self._keep_sharing(self._directory)):
                yield
        finally:
            self._share(self._directory)

    async def _keep_sharing(self, directory: Path) -> None:
        while True:
            self._share(directory)
            await asyncio.sleep(SHARE_EVERY_S)

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

    # ------------------------------------------------------------ Prometheus format

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """Body and content type of the answer, in the format that the ``Accept`` header asks for."""
        from prometheus_client import CollectorRegistry
        from prometheus_client.exposition import choose_encoder

        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        encode, content_type = choose_encoder(accept)
        return encode(registry), content_type

    def collect(self) -> Iterator[Metric]:
        """All metric families; called by prometheus_client."""
        found = self.snapshots()
        running = [snapshot for snapshot in found if is_running(snapshot["pid"])]
        yield from _totals(found, running)
        yield from _requests(found)
        yield from _processes(running)


def _totals(found: list[Snapshot], running: list[Snapshot]) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    for name, text in COUNTERS.items():
        yield CounterMetricFamily(f"inferencegym_{name}", text, value=sum(one["counters"][name] for one in found))
    for name, text in GAUGES.items():
        yield GaugeMetricFamily(f"inferencegym_{name}", text, value=sum(one["gauges"][name] for one in running))


def _requests(found: list[Snapshot]) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

    requests = CounterMetricFamily("inferencegym_http_requests", "Requests answered", labels=["path", "status"])
    durations = HistogramMetricFamily(
        "inferencegym_http_request_duration_seconds", "Time from the request's head to the answer", labels=["path"]
    )
    for path in sorted({path for one in found for path in one["paths"]}):
        counts = [one["paths"][path] for one in found if path in one["paths"]]
        for status in sorted({status for one in counts for status in one["statuses"]}):
            requests.add_metric([path, status], sum(one["statuses"].get(status, 0) for one in counts))
        buckets, below = [], 0
        for i, bound in enumerate((*map(str, BUCKETS_S), "+Inf")):
            below += sum(one["buckets"][i] for one in counts)
            buckets.append((bound, below))
        durations.add_metric([path], buckets, sum_value=sum(one["seconds"] for one in counts))
    yield requests
    yield durations


def _processes(running: list[Snapshot]) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

    memory = GaugeMetricFamily("inferencegym_resident_memory_bytes", "Memory of a worker", labels=["pid"])
    cpu = CounterMetricFamily("inferencegym_cpu_seconds", "Processor time of a worker", labels=["pid"])
    for one in running:
        memory.add_metric([str(one["pid"])], one["process"]["resident_bytes"])
        cpu.add_metric([str(one["pid"])], one["process"]["cpu_s"])
    yield memory
    yield cpu
    yield InfoMetricFamily(
        "inferencegym_build",
        "Release and lookup table that are served",
        value={"version": __version__, "table_sha256": str(FAMILIES[SERVING].table_sha256())},
    )


def resident_bytes() -> int:
    """Resident memory of this process; without /proc, its maximum so far."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return pages * resource.getpagesize()
