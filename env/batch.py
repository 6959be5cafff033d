"""Batch of serving episodes: the only code that steps them, under the scalar and the vector environment.

A step plays ``config.hold`` seconds with one action, and fewer at the end of an episode if its length is not a
multiple. Only this module does so, for scalar and vector environments, sessions, replays and arrays over HTTP.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from env.dynamics import DynamicsFactory, FluidFleet
from env.observation import ObservationKernel
from env.reward import PLAN_TERMS, GradeRewardKernel, RewardKernel
from env.threads import CORES, RowRange, split_rows
from grader.kinds import RULES
from grader.rule import OF_EPISODE, QUANTITIES, StepShares
from inferencegym.errors import EpisodeDoneError, InvalidActionError, InvalidConfigError, NotResetError, refusal
from inferencegym.models import PRIORITY_CLASSES, SPEC_LENGTHS
from inferencegym.spaces.actions import ACTION_SIZE, action_mask, action_size
from inferencegym.spaces.knobs import KnobKernel
from inferencegym.spaces.observations import OBSERVATION_SIZE, first_fleet, fleet_size
from inferencegym.tasks import Calibration, EpisodeConfig, TaskSpec, get_calibration
from simulator.hardware.tables import FloatArray, ServingTables, tables_of
from simulator.kernel.arrays import METRICS, OVER_SECONDS
from simulator.kernel.serving import CONVENTIONS, params_of
from simulator.workload import load_source

ROWS_PER_THREAD: Final = 128
"""Fewest rows per thread: one step of so many rows takes several times longer than starting a thread."""
ROWS_PER_BLOCK: Final = 64
"""Rows that take several steps as a block, whose state fits the processor's cache."""

OBSERVED_METRICS: Final = {
    "queue_requests": "queue_depth",
    "kv_occupancy": "kv_cache_occupancy",
    "ttft_p50_ms": "ttft_p50",
    "tpot_ms": "tpot_p50",
    "violation_share": "slo_violation_rate",
    "gpu_memory_gb": "gpu_memory_used_gb",
    "spec_accept_rate": "spec_accept_rate",
}
"""Metric -> observation field that shows it."""

_METRIC_ROW: Final = {name: i for i, name in enumerate(METRICS)}


class ServingBatch:
    """B episodes of one task that step together; a row equals the same episode alone, to the last bit.

    ``observation`` (B, 14), ``fleet_numbers`` (B, 7; the knobs in force and more, in the order of ``FLEET_FIELDS``; 10
    with those of ``SCALING_FIELDS`` where the task scales),
    ``reward`` (B,), ``reward_terms`` (P, B), ``done`` (B,) and ``metric[name]`` (B,) are overwritten by every step;
    copy what you keep. ``reward`` and its terms are sums over the step's seconds. ``term_names`` (P,) are T, L, V, C of
    the reward "plan", or the parts of the grade. With ``n_loads`` < B, rows share workloads: row b has the seed
    ``seeds[b % n_loads]``, so that many actions can be compared on the same requests. Each row records the latencies of
    its first ``record`` admissions (:func:`simulator.whatif.ttft_samples` reads them). A large batch is split over at
    most ``n_threads`` threads (None: as many as there are cores); the result is the same.

    Seconds of the last step: ``seconds`` (B,) is their number, ``second_metrics`` (H, len(METRICS), B) and
    ``second_rewards`` (H, B), H being ``hold``; ``metric`` is of the last of them.

    ``dynamics`` makes the :class:`env.dynamics.Dynamics` that serve the requests. ``metric`` has the metrics that they
    provide. Raises :class:`InvalidConfigError` if the task's reward or grade needs a metric that they do not provide.
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
        dynamics: DynamicsFactory = FluidFleet,
    ) -> None:
        if n_threads is not None and n_threads < 1:
            raise refusal("n_threads", n_threads, "at least 1")
        self.task = task
        self.n_rows = n_rows
        self.config = config or task.config()
        self.tables = tables_of(task.hardware) if tables is None else tables
        self.calibration = calibration or get_calibration(task.task_id)
        self.n_loads = n_rows if n_loads is None else n_loads
        self.load_source = load_source(task, self.tables)
        params = params_of(task, self.tables, self.calibration.price)
        length = self.config.episode_length
        self.fleet = dynamics(self.load_source, params, n_rows, length, self.n_loads, record)
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
        if self.config.reward != "plan":
            shares = self._shares()
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
        self._reward: RewardKernel | GradeRewardKernel = (
            self._plan_reward()
            if shares is None
            else self._grade_reward(shares, self._second_reward, self._second_terms)
        )
        self._grade: GradeRewardKernel | None = None

    def follow_grade(self) -> tuple[GradeRewardKernel, tuple[str, ...]]:
        """Track the grade of the seconds so far, from the next reset on; returns its kernel and the parts' names.

        The rewards "grade" and "score" keep it anyway.
        """
        shares = self._shares()
        if isinstance(self._reward, GradeRewardKernel):
            return self._reward, shares.parts
        parts = np.zeros((len(shares.parts), self.n_rows))
        self._grade = self._grade_reward(shares, np.zeros(self.n_rows), parts)
        return self._grade, shares.parts

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
        self.fleet.draw(chosen, started)
        self.seeds[chosen] = started
        self.fleet.reset_rows(range(self.n_rows) if rows is None else chosen)
        self._write_first(range(self.n_rows) if rows is None else chosen)
        return self.observation

    def step(self, actions: NDArray[np.float64]) -> FloatArray:
        """Take one step with these actions (B, 5) and return the observations (B, 14).

        Actions of an autoscaling task may have ``replicas`` as a sixth number. Actions are clamped and snapped
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

    def snap(self, actions: NDArray[np.float64]) -> FloatArray:
        """The allowed actions nearest to these (B, 5 or 6): those that :meth:`step` plays."""
        snapped = np.empty(actions.shape)
        self.knobs.snap(np.asarray(actions, dtype=np.float64), snapped)
        return snapped

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
        # Five numbers keep the initial replicas of an autoscaling task.
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
        """Observations, followed by the numbers of the fleets, (B, 21); a new array."""
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
        self.fleet.step(lo, hi)
        self._reward.compute(lo, hi)
        if self._grade is not None:
            self._grade.compute(lo, hi)
        self._observe.write(lo, hi)

    def step_metrics(self) -> dict[str, FloatArray]:
        """Metrics of the last step (B,), aggregated over its seconds by :data:`OVER_SECONDS`; new arrays."""
        if self.hold == 1:
            return {name: values.copy() for name, values in self.metric.items()}
        played = np.arange(self.hold)[:, None] < self.seconds
        last = np.take_along_axis(self.second_metrics, self.seconds[None, None] - 1, axis=0)[0]
        total = np.where(played[:, None], self.second_metrics, 0.0).sum(axis=0)
        most = np.where(played[:, None], self.second_metrics, -np.inf).max(axis=0)
        found = {"sum": total, "mean": total / self.seconds, "max": most, "last": last}
        return {name: found[OVER_SECONDS[name]][_METRIC_ROW[name]] for name in self.metric}

    @property
    def missing(self) -> tuple[str, ...]:
        """Observation fields of metrics that the dynamics do not provide; they are 0."""
        return tuple(field for name, field in OBSERVED_METRICS.items() if name not in self.metric)

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
        """Write the first observations: before any request, with the default knobs."""
        index = np.fromiter(rows, dtype=np.int64)
        self.fleet.metrics[:, index] = 0.0
        for name, value in self.fleet.idle().items():
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
        arrays |= {name: self.fleet.metrics[_METRIC_ROW[name]] for name in OBSERVED_METRICS}
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

    def _shares(self) -> StepShares:
        rule = RULES[str(self.task.grade["kind"])]
        return rule.shares(self.task, self.calibration, self.config.episode_length)

    def _grade_reward(self, shares: StepShares, reward: FloatArray, terms: FloatArray) -> GradeRewardKernel:
        constants = {
            "n_steps": float(self.config.episode_length),
            "weights": shares.weights,
            "shares": shares.constants,
            "factors": shares.factors,
            "lowest": shares.lowest,
            "pays_score": self.config.reward == "score",
            "of_episode": np.array([float(name in OF_EPISODE) for name in QUANTITIES]),
            "start_replicas": float(self.task.fleet.n_replicas),
            "min_billed_ktokens_per_s": CONVENTIONS.min_billed_ktokens_per_s,
            **self._memory_limit(),
        }
        arrays = self._needed("tokens_per_sec", "ttft_p50_ms", "slo_violations", "cost_per_1k", "gpu_memory_gb")
        arrays |= {"batch_size": self.fleet.batch_size, "kv_budget": self.fleet.kv_budget}
        arrays |= {"replicas": self.fleet.replicas}
        arrays |= {"time": self.fleet.state.rows["time"]}
        return GradeRewardKernel(constants, {**arrays, "reward": reward, "terms": terms})

    def _needed(self, *names: str) -> dict[str, Any]:
        """Metrics that a reward reads; memory counts only where the task grades it."""
        for name in names:
            graded = name != "gpu_memory_gb" or "memory_limit_gb" in self.task.grade
            if graded and name not in self.metric:
                raise InvalidConfigError(
                    f"the reward of task {self.task.task_id!r} needs {name}, which {type(self.fleet).__name__} does "
                    "not report: play another task, or give it the number (EngineEnv: memory=MemoryFacts(...))"
                )
        return {name: self.fleet.metrics[_METRIC_ROW[name]] for name in names}

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
        arrays = self._needed("tokens_per_sec", "ttft_p50_ms", "violation_share", "cost_per_1k", "gpu_memory_gb")
        return RewardKernel(constants, {**arrays, "reward": self._second_reward, "terms": self._second_terms})


def _runs(rows: NDArray[np.bool_]) -> list[RowRange]:
    """Ranges of consecutive rows that are set in a mask (B,)."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], rows, [False]))))
    return [(int(lo), int(hi)) for lo, hi in edges.reshape(-1, 2)]
