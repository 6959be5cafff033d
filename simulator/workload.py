"""Offered load of a task: its source, its rolling statistics, and ``WorkloadGenerator``."""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache

from inferencegym.models import PHASES, PRIORITY_CLASSES, PROMPT_BUCKET_EDGES, ServeAction, WorkloadState
from inferencegym.seeds import check_seed
from inferencegym.tasks import RequestClass, TaskId, TaskSpec, get_task
from simulator.hardware.tables import FloatArray, ServingTables, tables_of
from simulator.load.recorded import RecordedLoad, load_trace
from simulator.load.requests import RequestLog
from simulator.load.source import (
    CLASS_WINDOW_STEPS,
    EMA_WEIGHT,
    PROMPT_WINDOW_STEPS,
    ClassStats,
    LoadSource,
    Workload,
)
from simulator.load.synthetic import SyntheticLoad


def load_source(task: TaskSpec, tables: ServingTables) -> LoadSource:
    """Load source of a task on a table, built once: a log in memory, a recorded trace, or a synthetic load."""
    if isinstance(task.log, RequestLog):
        return _recorded(task.log, tables, task.classes, once=True)
    if task.trace is not None:
        return _recorded(_trace_log(task.trace, task.trace_speed), tables, task.classes, once=False)
    return _synthetic(task, tables)


@lru_cache(maxsize=64)
def _synthetic(task: TaskSpec, tables: ServingTables) -> LoadSource:
    return SyntheticLoad(task, tables)


@lru_cache(maxsize=64)
def _recorded(log: RequestLog, tables: ServingTables, classes: tuple[RequestClass, ...], once: bool) -> LoadSource:
    return RecordedLoad(log, tables, classes, once=once)


@lru_cache(maxsize=16)
def _trace_log(path: str, speed: float) -> RequestLog:
    """Log of a packed trace, at ``speed`` times its rate."""
    return load_trace(path)[0].faster(speed)


def load_statistics(source: LoadSource, load: Workload, step: int) -> tuple[float, float, list[float]]:
    """Rolling statistics of an episode's load, as an agent observes them after a step.

    Returns the arrival rate (requests/s, 10-step exponential mean), the mean prompt (tokens, 10 steps) and the shares
    of the three priority classes (50 steps). The serving dynamics keep the same statistics per row; a test compares the
    two.
    """
    stats, rate = source.stats, source.nominal_rate_rps
    for total in load.arrivals[: step + 1].sum(axis=1):
        rate += EMA_WEIGHT * (float(total) - rate)
    recent = slice(max(0, step + 1 - PROMPT_WINDOW_STEPS), step + 1)
    count = float(load.arrivals[recent].sum())
    nominal = float(stats.prompt_mean @ (stats.shares / stats.shares.sum()))
    prompt = float(load.prompt_tokens[recent].sum()) / count if count > 0 else nominal
    window = load.arrivals[max(0, step + 1 - CLASS_WINDOW_STEPS) : step + 1].sum(axis=0)
    return rate, prompt, class_shares(stats, window)


def class_shares(stats: ClassStats, counts: FloatArray) -> list[float]:
    """Shares of the three priority classes, from requests of the classes that occur; nominal without requests."""
    weights = counts if counts.sum() > 0 else stats.shares
    total = float(weights.sum())
    by_name = {name: float(w) / total for name, w in zip(stats.names, weights, strict=True)}
    return [by_name.get(name, 0.0) for name in PRIORITY_CLASSES]


def prompt_bucket(prompt_tokens: float) -> int:
    """Bucket 0-7 of a prompt length, the lookup table's key."""
    return bisect_right(PROMPT_BUCKET_EDGES, prompt_tokens)


class WorkloadGenerator:
    """Offered load of a task, second by second, outside the environment.

    It keeps a simple queue of its own (each step serves at most ``batch_size`` requests), to look at a load by itself;
    in an episode the serving dynamics own the queue.
    """

    def __init__(self, task_id: TaskId, seed: int = 42) -> None:
        self._task = get_task(task_id)
        self._source = load_source(self._task, tables_of(self._task.hardware))
        self._seed = check_seed(seed)
        self._horizon = self._task.episode_length
        self._load = self._source.draw([self._seed], self._horizon).episode(0)
        self._step = 0
        self._queue = 0

    def reset(self) -> WorkloadState:
        """Go back to the first second of the same load."""
        self._step = 0
        self._queue = int(self._load.arrivals[0].sum())
        return self._state()

    def step(self, action: ServeAction) -> WorkloadState:
        """Serve up to ``batch_size`` waiting requests, then take the next second's arrivals."""
        self._queue -= min(action.batch_size, self._queue)
        self._step += 1
        if self._step >= self._horizon:  # a longer episode starts with the shorter one
            self._horizon *= 2
            self._load = self._source.draw([self._seed], self._horizon).episode(0)
        self._queue += int(self._load.arrivals[self._step].sum())
        return self._state()

    def is_burst_active(self) -> bool:
        """Whether a flood is on in the current second."""
        return bool(self._load.phase[self._step] == PHASES.index("burst"))

    def _state(self) -> WorkloadState:
        rate, prompt, shares = load_statistics(self._source, self._load, self._step)
        return WorkloadState(
            arrival_rate=rate,
            mean_prompt_len=prompt,
            prompt_len_bucket=prompt_bucket(prompt),
            queue_depth=self._queue,
            priority_distribution=shares,
            is_burst=self.is_burst_active(),
            phase=PHASES[self._load.phase[self._step]],
        )
