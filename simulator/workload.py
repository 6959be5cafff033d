"""Offered load of a task: which source it comes from, its rolling statistics, and the plan's ``WorkloadGenerator``."""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache

from inferencegym.models import PHASES, PRIORITY_CLASSES, PROMPT_BUCKET_EDGES, ServeAction, WorkloadState
from inferencegym.seeds import check_seed
from inferencegym.tasks import TaskId, TaskSpec, get_task
from simulator.load import (
    CLASS_WINDOW_STEPS,
    EMA_WEIGHT,
    PROMPT_WINDOW_STEPS,
    ClassStats,
    LoadSource,
    Workload,
)
from simulator.recorded import RecordedLoad
from simulator.synthetic import SyntheticLoad
from simulator.tables import FloatArray, ServingTables, tables_of


@lru_cache(maxsize=64)
def load_source(task: TaskSpec, tables: ServingTables) -> LoadSource:
    """The load source of a task on a table, built once: its recorded trace if it has one, else a synthetic load."""
    return SyntheticLoad(task, tables) if task.trace is None else RecordedLoad(task, tables)


def load_statistics(source: LoadSource, load: Workload, step: int) -> tuple[float, float, list[float]]:
    """Rolling statistics of an episode's load, as an agent is shown them after a step.

    Returns the arrival rate (requests/s, 10-step exponential mean), the mean prompt (tokens, 10 steps) and the shares
    of the three priority classes (50 steps). The serving dynamics keep the same statistics per row; a test holds the
    two together.
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
    """Shares of the three priority classes given the occurring classes' request counts; nominal shares if none came."""
    weights = counts if counts.sum() > 0 else stats.shares
    total = float(weights.sum())
    by_name = {name: float(w) / total for name, w in zip(stats.names, weights, strict=True)}
    return [by_name.get(name, 0.0) for name in PRIORITY_CLASSES]


def prompt_bucket(prompt_tokens: float) -> int:
    """Bucket 0-7 of a prompt length, the lookup table's key."""
    return bisect_right(PROMPT_BUCKET_EDGES, prompt_tokens)


class WorkloadGenerator:
    """Offered load of a task, second by second, outside the environment.

    It keeps a simple queue of its own (each step serves at most ``batch_size`` requests), for looking at a load alone;
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
