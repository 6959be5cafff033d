"""Recorded load: a packed request log as the load of a task.

A trace file is a small ``.npz`` (numpy only, so that a server can read it) with the arrays ``arrival_s``,
``prompt_tokens``, ``output_tokens``, ``class_index`` and ``reused_tokens`` (leading prompt tokens shared with an
earlier request of the log), ``reuse_hit`` and ``follows`` (see :class:`simulator.load.requests.RequestLog`; optional)
and a JSON description under ``meta``.
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

from inferencegym.errors import DataFormatError
from inferencegym.files import atomic_write
from inferencegym.models import PRIORITY_CLASSES
from inferencegym.seeds import check_seed, generators
from inferencegym.tasks import RequestClass
from simulator.hardware.tables import FloatArray, ServingTables
from simulator.load.prefix import reuse_curve
from simulator.load.requests import RequestLog
from simulator.load.source import (
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

TRACE_VERSION: Final = 1
MAX_TRACE_BYTES: Final = 1 << 28
"""Largest size of a trace's arrays; those of the longest allowed log take 60 MB."""
BURST_FACTOR: Final = 2.0
"""A second belongs to a burst if the mean of the five seconds up to it exceeds this multiple of the trace's mean."""
_BURST_WINDOW_S: Final = 5
_OUTPUT_POINTS: Final = 2048
_START_STREAM: Final = 0
_UNREADABLE: Final = (OSError, ValueError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error)
"""Errors that numpy, zip and JSON raise for unreadable files; RuntimeError for encrypted or too deeply nested ones."""


def save_trace(path: str | Path, log: RequestLog, meta: Mapping[str, Any]) -> Path:
    """Write a packed trace; if that fails, no partial file remains."""
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
            follows=log.follows.astype(np.int32),
            meta=np.frombuffer(description, dtype=np.uint8),
        )
    return path


@lru_cache(maxsize=16)
def load_trace(path: str) -> tuple[RequestLog, dict[str, Any]]:
    """Read a packed trace and its description. Raises :class:`DataFormatError` saying what is wrong with the file."""
    if not Path(path).is_file():
        raise DataFormatError(f"{path} is not a file")
    try:
        # np.load would also open an .npy file, which is one array without names.
        with zipfile.ZipFile(path) as packed, np.load(path, allow_pickle=False) as archive:
            _check_sizes(packed)
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
            follows=columns.get("follows", np.zeros(0)).astype(np.int64),
        )
    except _UNREADABLE as error:
        raise DataFormatError(
            f"{path} is not a packed trace ({error}); make one with `inferencegym import-trace`"
        ) from error
    if meta.get("version") != TRACE_VERSION:
        raise DataFormatError(f"{path}: trace version {meta.get('version')!r} is not {TRACE_VERSION}; import it again")
    return log, meta


def _check_sizes(packed: zipfile.ZipFile) -> None:
    """Refuse arrays whose headers announce too many bytes, because numpy allocates memory before it reads."""
    if sum(member.file_size for member in packed.infolist()) > MAX_TRACE_BYTES:
        raise ValueError(f"its arrays have more than {MAX_TRACE_BYTES:,} bytes")
    for member in packed.infolist():
        with packed.open(member) as file:
            np.lib.format.read_magic(file)
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        if math.prod(shape) * dtype.itemsize > member.file_size:
            raise ValueError(f"{member.filename} is cut short")


class RecordedLoad:
    """Load source that repeats a recorded log.

    The seed chooses the second of the log at which an episode starts; the log repeats endlessly. With ``once`` the log
    is played from its first second, without jitter, and nothing arrives after its end. Prompt lengths and classes are
    those of the log; output lengths enter as the distribution of each class.

    ``classes`` are the three classes of a task, whose objectives apply (None: no class has one). ``class_index`` (N,)
    gives the class of each request among those that occur, in the order of :class:`~simulator.load.source.ClassStats`.
    ``step_s`` is the length of a step in seconds.
    """

    def __init__(
        self,
        log: RequestLog,
        tables: ServingTables,
        classes: Sequence[RequestClass] | None = None,
        *,
        once: bool = False,
        step_s: float = 1.0,
    ) -> None:
        self._log, self._once, self._step_s = log, once, step_s
        span = max(1, math.ceil(float(log.arrival_s[-1]) / step_s + 1e-9))
        present = np.unique(log.class_index)
        self.stats = trace_stats(log, present, tables, classes)
        self.nominal_rate_rps = len(log.arrival_s) / (span * step_s)
        self.class_index: NDArray[np.int64] = np.searchsorted(present, log.class_index)
        self._load = bin_requests(
            log.arrival_s,
            log.prompt_tokens,
            self.class_index,
            len(present),
            tables,
            span,
            step_s,
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
        """Individual requests of the log, from the second that the seed chooses."""
        log, span = self._log, len(self._load.arrivals)
        start, laps = 0, 1
        if not self._once:
            (starts,) = next(iter(generators([check_seed(seed)], (_START_STREAM,))))
            start = int(starts.integers(span))
            laps = 2 + n_steps // span
        n = len(log.arrival_s)
        arrival_s = (np.arange(laps)[:, None] * (span * self._step_s) + log.arrival_s).ravel() - start * self._step_s
        inside = np.flatnonzero((arrival_s >= 0) & (arrival_s < n_steps * self._step_s))
        at = inside % n
        found = EpisodeRequests.sorted_by_arrival(
            arrival_s[inside], log.prompt_tokens[at], log.output_tokens[at], self.class_index[at], log.reused_tokens[at]
        )
        if not len(log.follows):
            return found
        lap_start = inside - at - (inside[0] if len(inside) else 0)
        return replace(found, follows=np.maximum(-1, np.where(log.follows[at] < 0, -1, lap_start + log.follows[at])))

    def _from_the_beginning(self, n_episodes: int, n_steps: int) -> Workload:
        """Workload that plays the log once and then has no more requests; the same in every episode."""
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


def trace_stats(
    log: RequestLog, present: NDArray[np.int64], tables: ServingTables, classes: Sequence[RequestClass] | None
) -> ClassStats:
    """Statistics of the classes that occur in a log, with the objectives of ``classes`` if given."""
    q = (np.arange(_OUTPUT_POINTS) + 0.5) / _OUTPUT_POINTS
    members = [log.class_index == c for c in present]
    stats = class_stats(
        names=[PRIORITY_CLASSES[c] for c in present],
        shares=[float(m.mean()) for m in members],
        slo_ms=[math.inf if classes is None else classes[c].slo_ms for c in present],
        complexity_penalty=[0.0 if classes is None else classes[c].complexity_penalty for c in present],
        prompts=[log.prompt_tokens[m] for m in members],
        works=[listed_work_ms(log.prompt_tokens[m], tables) for m in members],
        outputs=[np.quantile(log.output_tokens[m], q, method="inverted_cdf") for m in members],
    )
    return replace(stats, reuse_hit=reuse_curve(log))


def burst_seconds(arrivals: FloatArray) -> NDArray[np.bool_]:
    """Whether each second belongs to a burst, (T,), from the requests of each second."""
    window = np.convolve(arrivals, np.ones(_BURST_WINDOW_S))[: len(arrivals)]
    recent = window / np.minimum(np.arange(len(arrivals)) + 1, _BURST_WINDOW_S)
    burst: NDArray[np.bool_] = recent > BURST_FACTOR * arrivals.mean()
    return burst
