"""Batch of serving episodes: the only code that steps them, under the scalar and the vector environment.

A step plays ``config.hold`` seconds with one action, fewer at the end of an episode whose length is no multiple: here
and nowhere else, so that scalar and vector environments, sessions, replays and arrays over HTTP hold actions alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from env.observation import ObservationKernel
from env.reward import PLAN_TERMS, GradeRewardKernel, RewardKernel
from env.threads import CORES, RowRange, split_rows
from grader.grader import SHARES
from grader.shares import StepShares
from inferencegym.errors import EpisodeDoneError, InvalidActionError, NotResetError, refusal
from inferencegym.models import PRIORITY_CLASSES, SPEC_LENGTHS
from inferencegym.spaces.actions import ACTION_SIZE, action_mask, action_size
from inferencegym.spaces.knobs import KnobKernel
from inferencegym.spaces.observations import OBSERVATION_SIZE, first_fleet, fleet_size
from inferencegym.tasks import Calibration, EpisodeConfig, TaskSpec, get_calibration
from simulator.arrays import METRICS, OVER_SECONDS
from simulator.serving import CONVENTIONS, ServingFleet, params_of
from simulator.tables import FloatArray, ServingTables, tables_of
from simulator.workload import load_source

ROWS_PER_THREAD: Final = 128
"""Rows per thread at least: one step of so many rows takes several times longer than starting it on a thread."""
DRAWN_TOGETHER: Final = 64
"""Episodes whose workloads are drawn together: enough to share the work, few enough to stay in cache."""
ROWS_PER_BLOCK: Final = 64
"""Rows that take several steps together: few enough for their state to stay in the processor's cache."""

_METRIC_ROW: Final = {name: i for i, name in enumerate(METRICS)}


class ServingBatch:
    """B episodes of one task that step together; a row equals the same episode alone, to the last bit.

    ``observation`` (B, 14), ``fleet_numbers`` (B, 7; the knobs in force and more, in the order of ``FLEET_FIELDS``; 10
    with those of ``SCALING_FIELDS`` where the task scales),
    ``reward`` (B,), ``reward_terms`` (P, B), ``done`` (B,) and ``metric[name]`` (B,) are overwritten by every step;
    copy what you keep. ``reward`` and its terms are sums over the step's seconds. ``term_names`` (P,) are T, L, V, C of
    the plan's reward, or the parts of the grade. With ``n_loads`` < B, rows share workloads: row b has the seed
    ``seeds[b % n_loads]``, so that many actions can be compared on the same requests. Each row records the latencies of
    its first ``record`` admissions (:func:`simulator.whatif.ttft_samples` reads them). A large batch is split over at
    most ``n_threads`` threads (None: as many as there are cores); the result is the same.

    What the seconds of the last step gave: ``seconds`` (B,) of them, ``second_metrics`` (H, len(METRICS), B) and
    ``second_rewards`` (H, B), H being ``hold``; ``metric`` is of the last of them.
    """

    def __init__(
        self,
        task: TaskSpec,
        n_rows: int,
        config: EpisodeConfig | None = None,
        tables: ServingTables | None = None,
        calibration: Calibration | None = None,
        n_loads: int | None = None,
        record: int = 0,
        n_threads: int | None = None,
    ) -> None:
        if n_threads is not None and n_threads < 1:
            raise refusal("n_threads", n_threads, "at least 1")
        self.task = task
        self.n_rows = n_rows
        self.config = config or task.config()
        self.tables = tables if tables is not None and task.hardware is None else tables_of(task.hardware)
        self.calibration = calibration or get_calibration(task.task_id)
        self.n_loads = n_rows if n_loads is None else n_loads
        self.load_source = load_source(task, self.tables)
        params = params_of(task, self.tables, self.calibration.price)
        self.fleet = ServingFleet(params, n_rows, self.config.episode_length, self.n_loads, record)
        self.metric: Mapping[str, FloatArray] = self.fleet.metric
        self.mask = action_mask(task.active_actions)
        self.knobs = KnobKernel(self.mask.tolist(), self.fleet)
        self.seeds = np.full(self.n_loads, -1, dtype=np.int64)
        self.observation = np.zeros((n_rows, OBSERVATION_SIZE))
        self.fleet_numbers = np.zeros((n_rows, fleet_size(task.fleet)))
        self.reward = np.zeros(n_rows)
        self._n_threads = CORES if n_threads is None else n_threads
        self._all_rows: list[RowRange] = [(0, n_rows)]
        self._observe = self._observation_kernel()
        shares = None
        if self.config.reward == "grade":
            shares = SHARES[str(task.grade["kind"])](task, self.calibration, self.config.episode_length)
        self.term_names = PLAN_TERMS if shares is None else shares.parts
        self.reward_terms = np.zeros((len(self.term_names), n_rows))
        self.hold = hold = min(self.config.hold, self.config.episode_length)
        self.seconds = np.ones(n_rows, dtype=np.int64)
        if hold == 1:
            self._second_reward, self._second_terms = self.reward, self.reward_terms
            self.second_metrics, self.second_rewards = self.fleet.metrics[None], self.reward[None]
        else:
            self._second_reward, self._second_terms = np.zeros_like(self.reward), np.zeros_like(self.reward_terms)
            self.second_metrics = np.zeros((hold, *self.fleet.metrics.shape))
            self.second_rewards = np.zeros((hold, n_rows))
        self._reward = self._plan_reward() if shares is None else self._grade_reward(shares)

    @property
    def time(self) -> NDArray[np.int64]:
        """Seconds played by each row, (B,)."""
        rows: NDArray[np.int64] = self.fleet.state.rows["time"]
        return rows

    @property
    def steps_left(self) -> NDArray[np.int64]:
        """Steps until each row's episode ends, (B,)."""
        left: NDArray[np.int64] = -((self.time - self.config.episode_length) // self.hold)
        return left

    @property
    def done(self) -> NDArray[np.bool_]:
        """Rows whose episode has ended, (B,)."""
        ended: NDArray[np.bool_] = self.time >= self.config.episode_length
        return ended

    def reset(self, seeds: Sequence[int] | NDArray[np.int64], rows: Iterable[int] | None = None) -> FloatArray:
        """Start episodes and return the observations (B, 14).

        ``seeds`` has one entry per workload (``n_loads``) for all rows, or one per row in ``rows`` when only these
        restart (which needs one workload per row).
        """
        chosen = range(self.n_loads) if rows is None else list(rows)
        started = [int(seed) for _, seed in zip(chosen, seeds, strict=True)]
        length = self.config.episode_length
        for at in range(0, len(started), DRAWN_TOGETHER):
            some = chosen[at : at + DRAWN_TOGETHER]
            self.fleet.set_load(some, self.load_source.draw(started[at : at + DRAWN_TOGETHER], length))
            self.seeds[some] = started[at : at + DRAWN_TOGETHER]
        self.fleet.reset_rows(range(self.n_rows) if rows is None else chosen)
        self._write_first(range(self.n_rows) if rows is None else chosen)
        return self.observation

    def step(self, actions: NDArray[np.float64]) -> FloatArray:
        """Take one step with these actions (B, 5) and return the observations (B, 14).

        Those of a task that scales may have ``replicas`` as a sixth number. Actions are clamped and snapped
        (:func:`inferencegym.spaces.actions.snap`). Raises :class:`EpisodeDoneError` if a row has ended.
        """
        self._check_steps_left()
        self.write_knobs(actions)
        self.advance_rows()
        return self.observation

    def write_knobs(self, actions: NDArray[np.float64]) -> None:
        """Set the knobs of all rows to the allowed actions nearest to these (B, 5)."""
        if actions.ndim != 2 or len(actions) != self.n_rows or not self._fits(actions):
            raise InvalidActionError(
                "actions", actions.shape, f"an array of shape ({self.n_rows}, {action_size(self.task.fleet)})"
            )
        self.knobs.write(np.asarray(actions, dtype=np.float64), 0, self.n_rows)

    def step_many(self, actions: NDArray[np.float64], observations: NDArray[Any], rewards: NDArray[Any]) -> None:
        """Take K steps with these actions (K, B, 5), as K calls of :meth:`step` would, in less time.

        ``rewards`` (K, B) is written. ``observations`` is (K, B, 14) for those of every second, or (1, B, 14) for the
        last ones alone; with 21 columns it takes the numbers of the fleets too. Raises :class:`EpisodeDoneError` if a
        row would end before its last action, and then takes no step.
        """
        actions = np.asarray(actions, dtype=np.float64)
        if actions.ndim != 3 or actions.shape[1] != self.n_rows or not self._fits(actions):
            raise InvalidActionError(
                "actions", actions.shape, f"an array of shape (K, {self.n_rows}, {action_size(self.task.fleet)})"
            )
        self._check_steps_left(len(actions))
        work = partial(self._step_block, actions, observations, rewards)
        split_rows(work, self._all_rows, ROWS_PER_BLOCK, self._n_threads)

    def _fits(self, actions: NDArray[np.float64]) -> bool:
        # Five numbers leave the replicas of a fleet that scales as they are at the start.
        return bool(ACTION_SIZE <= actions.shape[-1] <= action_size(self.task.fleet))

    def _step_block(
        self, actions: NDArray[np.float64], observations: NDArray[Any], rewards: NDArray[Any], first: int, end: int
    ) -> None:
        n_steps, every = len(rewards), len(observations) == len(rewards)
        for lo in range(first, end, ROWS_PER_BLOCK):
            hi = min(lo + ROWS_PER_BLOCK, end)
            for k in range(n_steps):
                self.knobs.write(actions[k], lo, hi)
                self.advance(lo, hi)
                rewards[k, lo:hi] = self.reward[lo:hi]
                if every:
                    self._copy_seen(observations[k], lo, hi)
            if not every:
                self._copy_seen(observations[0], lo, hi)

    def _copy_seen(self, out: NDArray[Any], lo: int, hi: int) -> None:
        out[lo:hi, :OBSERVATION_SIZE] = self.observation[lo:hi]
        if out.shape[1] > OBSERVATION_SIZE:
            out[lo:hi, OBSERVATION_SIZE:] = self.fleet_numbers[lo:hi]

    def full_observation(self) -> FloatArray:
        """Observations with the numbers of the fleets beside them, (B, 21); a new array."""
        return np.concatenate([self.observation, self.fleet_numbers], axis=1)

    def advance_rows(self, rows: NDArray[np.bool_] | None = None) -> None:
        """Take one step in all rows, or in those of the mask ``rows`` (B,), with the current knobs."""
        split_rows(self.advance, self._all_rows if rows is None else _runs(rows), ROWS_PER_THREAD, self._n_threads)

    def advance(self, lo: int = 0, hi: int | None = None) -> None:
        """Take one step in rows ``lo`` to ``hi``, in this thread, with the current knobs."""
        hi = self.n_rows if hi is None else hi
        if self.hold == 1:
            self._play_second(lo, hi)
        else:
            self._hold(lo, hi)

    def _hold(self, lo: int, hi: int) -> None:
        """Play the seconds of a step, for each row as many as its episode still has."""
        rows = slice(lo, hi)
        self.reward[rows] = 0.0
        self.reward_terms[:, rows] = 0.0
        self.seconds[rows] = np.minimum(self.config.episode_length - self.time[rows], self.hold)
        for second in range(int(self.seconds[rows].max())):
            for first, end in _runs(self.seconds[rows] > second):
                some = slice(lo + first, lo + end)
                self._play_second(lo + first, lo + end)
                self.reward[some] += self._second_reward[some]
                self.reward_terms[:, some] += self._second_terms[:, some]
                self.second_rewards[second, some] = self._second_reward[some]
                self.second_metrics[second, :, some] = self.fleet.metrics[:, some]

    def _play_second(self, lo: int, hi: int) -> None:
        self.serve(lo, hi)
        self._reward.compute(lo, hi)
        self._observe.write(lo, hi)

    def step_metrics(self) -> dict[str, FloatArray]:
        """Metrics of the last step (B,), those of its seconds put together by :data:`OVER_SECONDS`; new arrays."""
        if self.hold == 1:
            return dict(zip(METRICS, self.fleet.metrics.copy(), strict=True))
        played = np.arange(self.hold)[:, None] < self.seconds
        last = np.take_along_axis(self.second_metrics, self.seconds[None, None] - 1, axis=0)[0]
        total = np.where(played[:, None], self.second_metrics, 0.0).sum(axis=0)
        most = np.where(played[:, None], self.second_metrics, -np.inf).max(axis=0)
        found = {"sum": total, "mean": total / self.seconds, "max": most, "last": last}
        return {name: found[how][i] for i, (name, how) in enumerate(OVER_SECONDS.items())}

    def serve(self, lo: int, hi: int) -> None:
        """Serve one second in rows ``lo`` to ``hi`` and write their metrics."""
        self.fleet.step(lo, hi)

    def _check_steps_left(self, n_steps: int = 1) -> None:
        if self.seeds[0] < 0:
            raise NotResetError("step before reset: call reset first")
        steps_left = self.steps_left
        if steps_left.min() < n_steps:
            row = int(steps_left.argmin())
            left = int(steps_left[row])
            said = "the episode has ended" if left == 0 else f"{n_steps} steps are more than the {left} that are left"
            raise EpisodeDoneError(f"row {row}: {said}; reset it to start the next one")

    def _write_first(self, rows: Iterable[int]) -> None:
        """Write the first observations: an idle fleet with the naive knobs."""
        index = np.fromiter(rows, dtype=np.int64)
        self.fleet.metrics[:, index] = 0.0
        first = idle_metrics(self.fleet)
        for name, value in first.items():
            self.metric[name][index] = value
        if self.hold > 1:
            self.seconds[index] = 1
            self.second_metrics[0][:, index] = self.fleet.metrics[:, index]
        for row in index:
            self._observe.write(int(row), int(row) + 1)

    def _observation_kernel(self) -> ObservationKernel:
        stats = self.fleet.params.stats
        share = stats.shares / stats.shares.sum() if stats.shares.sum() > 0 else np.full(len(stats.names), 1.0)
        constants = {
            "n_classes": len(stats.names),
            "nominal_prompt": float(stats.prompt_mean @ share),
            "nominal_share": share,
            "class_slot": np.array([PRIORITY_CLASSES.index(n) for n in stats.names], dtype=np.int64),
            "first_fleet": first_fleet(self.task.fleet),
            "spec_values": np.array(SPEC_LENGTHS, dtype=np.float64),
        }
        state = self.fleet.state.rows
        names = ("time", "prompt_window_requests", "prompt_window_tokens", "rate_ema", "cost_so_far", "class_window")
        arrays: dict[str, Any] = {name: state[name] for name in names}
        metrics = ("queue_requests", "kv_occupancy", "ttft_p50_ms", "tpot_ms", "violation_share", "gpu_memory_gb")
        arrays |= {name: self.metric[name] for name in (*metrics, "spec_accept_rate")}
        fleet = self.fleet
        arrays |= {"kv_budget": fleet.kv_budget, "batch_size": fleet.batch_size, "spec_index": fleet.spec_index}
        arrays |= {"disagg": fleet.disagg, "tier": fleet.tier, "rollout_share": state["rollout_share"]}
        arrays |= {"replicas": fleet.replicas}
        arrays |= {name: state[name] for name in ("replicas_ready", "replicas_draining")}
        written = {"observation": self.observation, "fleet": self.fleet_numbers}
        return ObservationKernel(constants, {**arrays, **written})

    def second(self, name: str) -> FloatArray:
        """A metric in the seconds of the last step, (H, B); a view."""
        found: FloatArray = self.second_metrics[:, _METRIC_ROW[name]]
        return found

    def terms(self, row: int = 0) -> dict[str, float]:
        """Terms of the last step's reward of one row by name, sums over its seconds."""
        return dict(zip(self.term_names, self.reward_terms[:, row].tolist(), strict=True))

    def _grade_reward(self, shares: StepShares) -> GradeRewardKernel:
        constants = {
            "n_steps": float(self.config.episode_length),
            "weights": shares.weights,
            "shares": shares.constants,
            "factors": shares.factors,
            "start_replicas": float(self.task.fleet.n_replicas),
            "min_billed_ktokens_per_s": CONVENTIONS.min_billed_ktokens_per_s,
            **self._memory_limit(),
        }
        names = ("tokens_per_sec", "ttft_p50_ms", "slo_violations", "cost_per_1k", "gpu_memory_gb")
        arrays: dict[str, Any] = {name: self.metric[name] for name in names}
        arrays |= {"batch_size": self.fleet.batch_size, "kv_budget": self.fleet.kv_budget}
        arrays |= {"replicas": self.fleet.replicas}
        arrays |= {"time": self.fleet.state.rows["time"]}
        return GradeRewardKernel(constants, {**arrays, "reward": self._second_reward, "terms": self._second_terms})

    def _memory_limit(self) -> dict[str, float]:
        return {
            "memory_limit_gb": float(self.task.grade.get("memory_limit_gb", np.inf)),
            "memory_slope_gb": float(self.task.grade.get("memory_slope_gb", 1.0)),
        }

    def _plan_reward(self) -> RewardKernel:
        weights = self.config.weights
        constants = {
            "alpha": weights.alpha,
            "beta": weights.beta,
            "gamma": weights.gamma,
            "delta": weights.delta,
            "max_throughput_tps": self.calibration.max_throughput_tps,
            "slo_ms": self.task.slo_target_ms,
            "budget_per_step": self.task.cost_budget / self.task.episode_length,
            **self._memory_limit(),
        }
        names = ("tokens_per_sec", "ttft_p50_ms", "violation_share", "cost_per_1k", "gpu_memory_gb")
        arrays: dict[str, Any] = {name: self.metric[name] for name in names}
        return RewardKernel(constants, {**arrays, "reward": self._second_reward, "terms": self._second_terms})


def _runs(rows: NDArray[np.bool_]) -> list[RowRange]:
    """Ranges of consecutive rows that are set in a mask (B,)."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], rows, [False]))))
    return [(int(lo), int(hi)) for lo, hi in edges.reshape(-1, 2)]


def idle_metrics(fleet: ServingFleet) -> dict[str, float]:
    """Metrics of an idle fleet with the naive knobs: one request at a time, an empty queue."""
    params = fleet.params
    tables, stats = params.tables, params.stats
    scalars = params.constants
    kv_pool_gb = scalars["memory_gb"] - scalars["weights_gb"][0] - scalars["activation_gb"] - scalars["workspace_gb"]
    share = stats.shares / stats.shares.sum()
    alone = float((stats.work_mean_ms[:, 0] * scalars["alone_ratio"][:, 0]) @ share)
    used = scalars["weights_gb"][0] + scalars["activation_gb"] + 32 * scalars["sequence_gb"] + kv_pool_gb
    return {
        "ttft_p50_ms": scalars["ttft_offset_ms"] + alone,
        "ttft_p99_ms": scalars["ttft_offset_ms"] + alone,
        "tpot_ms": float(tables.decode_ms[0, 0, 0, 0]),
        "gpu_memory_gb": float(used),
    }
