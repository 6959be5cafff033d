"""Recorded load: a packed request log as the load of a task.

A trace file is a small ``.npz`` (numpy only, so that a server can read it) with the arrays ``arrival_s``,
``prompt_tokens``, ``output_tokens``, ``class_index`` and ``reused_tokens`` (leading prompt tokens that an earlier
request of the log had in common), ``reuse_hit`` (see :class:`simulator.requests.RequestLog`; optional) and a JSON
description under ``meta``.
"""

from __future__ import annotations

import json
import math
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from inferencegym.errors import DataFormatError, InvalidConfigError
from inferencegym.files import atomic_write
from inferencegym.models import PRIORITY_CLASSES
from inferencegym.seeds import check_seed, generators
from inferencegym.tasks import TaskSpec
from simulator.load import (
    NOISE_STREAM,
    ClassStats,
    EpisodeRequests,
    Workload,
    bin_requests,
    class_stats,
    listed_work_ms,
    noise_factors,
    phases,
)
from simulator.prefix import reuse_curve
from simulator.requests import RequestLog
from simulator.tables import FloatArray, ServingTables

TRACE_VERSION: Final = 1
BURST_FACTOR: Final = 2.0
"""A second belongs to a burst when the mean of the five seconds up to it exceeds this many times the trace's mean."""
_BURST_WINDOW_S: Final = 5
_OUTPUT_POINTS: Final = 2048
_START_STREAM: Final = 0
_UNREADABLE: Final = (OSError, ValueError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error)
"""Errors of numpy, zip and JSON over unreadable files; RuntimeError for encrypted or too deeply nested ones."""


def save_trace(path: str | Path, log: RequestLog, meta: Mapping[str, Any]) -> Path:
    """Write a packed trace; nothing is left behind if that fails."""
    path = Path(path)
    description = json.dumps({"version": TRACE_VERSION, **meta}).encode()
    with atomic_write(path) as temporary:
        np.savez_compressed(
            temporary,
            arrival_s=log.arrival_s.astype(np.float64).round(4),
            prompt_tokens=log.prompt_tokens.astype(np.int32),
            output_tokens=log.output_tokens.astype(np.int32),
            class_index=log.class_index.astype(np.int8),
            reused_tokens=log.reused_tokens.astype(np.int32),
            reuse_hit=log.reuse_hit.astype(np.float64).round(6),
            meta=np.frombuffer(description, dtype=np.uint8),
        )
    return path


@lru_cache(maxsize=16)
def load_trace(path: str) -> tuple[RequestLog, dict[str, Any]]:
    """A packed trace and its description. Raises :class:`DataFormatError` saying what is wrong with the file."""
    try:
        # A file of numpy's other form is one array, which knows nothing of what is in it.
        with zipfile.ZipFile(path), np.load(path, allow_pickle=False) as archive:
            columns = {name: archive[name] for name in archive.files}
        meta = json.loads(columns["meta"].tobytes().decode())
        if not isinstance(meta, dict):
            raise ValueError("its description is not a JSON object")
        log = RequestLog(
            arrival_s=columns["arrival_s"].astype(np.float64),
            prompt_tokens=columns["prompt_tokens"].astype(np.float64),
            output_tokens=columns["output_tokens"].astype(np.float64),
            class_index=columns["class_index"].astype(np.int64),
            reused_tokens=columns["reused_tokens"].astype(np.float64),
            reuse_hit=columns.get("reuse_hit", np.zeros(0)).astype(np.float64),
        )
    except _UNREADABLE as error:
        raise DataFormatError(
            f"{path} is not a packed trace ({error}); make one with `inferencegym import-trace`"
        ) from error
    if meta.get("version") != TRACE_VERSION:
        raise DataFormatError(f"{path}: trace version {meta.get('version')!r} is not {TRACE_VERSION}; import it again")
    return log, meta


class RecordedLoad:
    """Load source that repeats a recorded log.

    The seed chooses the second of the log at which an episode starts; the log is repeated without end. Lengths and
    classes are those of the log; the output lengths of a class enter by their distribution. A log whose description
    says ``"once": true`` starts with its first second, without jitter, and nothing comes after its end.
    """

    def __init__(self, task: TaskSpec, tables: ServingTables) -> None:
        if task.trace is None:
            raise InvalidConfigError(f"task {task.task_id!r} has no trace")
        log, meta = load_trace(task.trace)
        if task.trace_speed != 1.0:
            log = replace(log, arrival_s=log.arrival_s / task.trace_speed)
        self._once = bool(meta.get("once", False))
        span = max(1, math.ceil(float(log.arrival_s[-1]) + 1e-9))
        present = np.unique(log.class_index)
        self.stats = trace_stats(task, log, present, tables)
        self.nominal_rate_rps = len(log.arrival_s) / span
        self._log = log
        self._class = np.searchsorted(present, log.class_index)
        self._load = bin_requests(
            log.arrival_s,
            log.prompt_tokens,
            self._class,
            len(present),
            tables,
            span,
            reused_tokens=log.reused_tokens,
        )
        self._burst = burst_seconds(self._load.arrivals.sum(axis=1))

    def draw(self, seeds: Sequence[int], n_steps: int) -> Workload:
        """The workloads of L episodes, one per seed."""
        checked = [check_seed(seed) for seed in seeds]
        if self._once:
            return self._from_the_beginning(len(checked), n_steps)
        span = len(self._load.arrivals)
        start = np.empty(len(checked), dtype=np.int64)
        z = np.empty((len(checked), n_steps, 2))
        for i, (starts, noise) in enumerate(generators(checked, (_START_STREAM, NOISE_STREAM))):
            start[i] = starts.integers(span)
            noise.standard_normal(out=z[i])
        second = (start[:, None] + np.arange(n_steps)) % span
        saved = self._load.saved_work_ms
        return Workload(
            arrivals=self._load.arrivals[second],
            prompt_tokens=self._load.prompt_tokens[second],
            prefill_work_ms=self._load.prefill_work_ms[second],
            noise=noise_factors(z),
            phase=phases(self._burst[second]),
            saved_work_ms=None if saved is None else saved[second],
        )

    def requests(self, seed: int, n_steps: int) -> EpisodeRequests:
        """The requests of the log from the seed's second on, one by one."""
        log, span = self._log, len(self._load.arrivals)
        start, laps = 0, 1
        if not self._once:
            (starts,) = next(iter(generators([check_seed(seed)], (_START_STREAM,))))
            start = int(starts.integers(span))
            laps = 2 + n_steps // span
        n = len(log.arrival_s)
        arrival_s = (np.arange(laps)[:, None] * span + log.arrival_s).ravel() - start
        inside = np.flatnonzero((arrival_s >= 0) & (arrival_s < n_steps))
        at = inside % n
        return EpisodeRequests.sorted_by_arrival(
            arrival_s[inside], log.prompt_tokens[at], log.output_tokens[at], self._class[at], log.reused_tokens[at]
        )

    def _from_the_beginning(self, n_episodes: int, n_steps: int) -> Workload:
        """The log once, then no more requests; the same in every episode."""
        load, kept = self._load, min(n_steps, len(self._load.arrivals))

        def padded(values: NDArray[Any]) -> NDArray[Any]:
            nothing = np.zeros((n_steps - kept, *values.shape[1:]), dtype=values.dtype)
            once = np.concatenate([values[:kept], nothing])
            return np.broadcast_to(once, (n_episodes, *once.shape))

        return Workload(
            arrivals=padded(load.arrivals),
            prompt_tokens=padded(load.prompt_tokens),
            prefill_work_ms=padded(load.prefill_work_ms),
            noise=np.ones((n_episodes, n_steps, 2)),
            phase=phases(padded(self._burst)),
            saved_work_ms=None if load.saved_work_ms is None else padded(load.saved_work_ms),
        )


def trace_stats(task: TaskSpec, log: RequestLog, present: NDArray[np.int64], tables: ServingTables) -> ClassStats:
    """Statistics of the classes that occur in a log; objectives come from the task."""
    q = (np.arange(_OUTPUT_POINTS) + 0.5) / _OUTPUT_POINTS
    members = [log.class_index == c for c in present]
    stats = class_stats(
        names=[PRIORITY_CLASSES[c] for c in present],
        shares=[float(m.mean()) for m in members],
        slo_ms=[task.classes[c].slo_ms for c in present],
        complexity_penalty=[task.classes[c].complexity_penalty for c in present],
        prompts=[log.prompt_tokens[m] for m in members],
        works=[listed_work_ms(log.prompt_tokens[m], tables) for m in members],
        outputs=[np.quantile(log.output_tokens[m], q, method="inverted_cdf") for m in members],
    )
    return replace(stats, reuse_hit=reuse_curve(log))


def burst_seconds(arrivals: FloatArray) -> NDArray[np.bool_]:
    """Seconds (T,) that belong to a burst, from the requests of each second."""
    window = np.convolve(arrivals, np.ones(_BURST_WINDOW_S))[: len(arrivals)]
    recent = window / np.minimum(np.arange(len(arrivals)) + 1, _BURST_WINDOW_S)
    burst: NDArray[np.bool_] = recent > BURST_FACTOR * arrivals.mean()
    return burst
