"""Scalar serving environment: one episode, a batch with one row."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from env.batch import ServingBatch
from env.family import Grade, outcome
from grader.episode import recorded_log
from grader.grader import grade_episode
from inferencegym.errors import EpisodeDoneError, NotResetError
from inferencegym.models import PHASES, MetricsSnapshot, ServeAction, ServeObservation, WorkloadState
from inferencegym.seeds import check_seed
from inferencegym.spaces.actions import mask_action, scaled_action
from inferencegym.spaces.observations import fleet_dict, to_observation
from inferencegym.tasks import Calibration, EpisodeConfig, TaskId, TaskSpec, get_task, task_of, with_settings
from simulator.arrays import OVER_SECONDS
from simulator.coverage import fleet_support
from simulator.serving import snapshot
from simulator.tables import MAX_TIERS, ServingTables, tables_of
from simulator.trace_sim import TraceSimulator
from simulator.workload import prompt_bucket


class InferenceEnv:
    """Environment of a serving task: an action sets five knobs, an observation has twelve fields.

    A step lasts a second, or ``config.hold`` of them. The log has an entry for every second, ``actions`` one for every
    step.

    ``InferenceEnv(task_id=1)`` and ``InferenceEnv(simulator, task_id, seed)`` both work; ``reset(task_id=...,
    seed=...)`` may change either. The same task, seed, configuration and actions give the same episode everywhere.
    """

    family = "serving"

    def __init__(
        self,
        simulator: TraceSimulator | None = None,
        task_id: TaskId = 1,
        seed: int = 42,
        config: Mapping[str, Any] | None = None,
        *,
        reward: str | None = None,
        hold: int | None = None,
        tables: ServingTables | None = None,
        calibration: Calibration | None = None,
    ) -> None:
        self._tables = tables or (None if simulator is None else simulator.tables)
        self._calibration = calibration
        self.task: TaskSpec = task_of(get_task(task_id), config)
        self.seed = check_seed(seed)
        self.config: EpisodeConfig = self.task.config(with_settings(config, reward=reward, hold=hold))
        self.session_id = str(uuid.uuid4())
        self.actions: list[dict[str, Any]] = []
        self._episode_log: list[dict[str, Any]] = []
        self._cumulative_reward = 0.0
        self.last_reward = 0.0
        self._started = False
        self._seen: ServeObservation | None = None
        self._batch: ServingBatch | None = None

    @property
    def task_id(self) -> TaskId:
        """Id of the task."""
        return self.task.task_id

    @property
    def episode_log(self) -> list[dict[str, Any]]:
        """Seconds played so far, ``{"timestep", "action", "reward", "metrics"}`` each, as graders accept them."""
        return self._episode_log

    @property
    def episode_length(self) -> int:
        """Seconds of a whole episode."""
        return self.config.episode_length

    @property
    def done(self) -> bool:
        """Whether the episode has ended."""
        return len(self._episode_log) >= self.config.episode_length

    def reset(
        self,
        seed: int | None = None,
        task_id: TaskId | None = None,
        config: Mapping[str, Any] | None = None,
        session_id: str | None = None,
    ) -> ServeObservation:
        """Start an episode and return its first observation.

        Arguments that are not given keep their value (a new ``task_id`` starts from that task's own configuration). The
        episode gets a new ``session_id`` unless one is given.
        """
        task = task_of(self.task if task_id is None else get_task(task_id), config)
        new_config = task.config(config) if config is not None or task is not self.task else self.config
        new_seed = self.seed if seed is None else check_seed(seed)
        if self._batch is None or task is not self.task or new_config != self.config:
            self._batch = self.make_batch(task, new_config)
        self.task, self.config, self.seed = task, new_config, new_seed
        self._batch.reset([new_seed])
        self.session_id = session_id or str(uuid.uuid4())
        self.actions = []
        self._episode_log = []
        self._cumulative_reward = 0.0
        self._started = True
        self._seen = None
        return self.observation()

    def make_batch(self, task: TaskSpec, config: EpisodeConfig) -> ServingBatch:
        """The batch with one row that plays the episodes."""
        return ServingBatch(task, 1, config, self._tables_of(task), self._calibration)

    @property
    def n_tiers(self) -> int:
        """Precisions of the table that the episode plays on."""
        return MAX_TIERS if self._batch is None else self._batch.tables.n_tiers

    def _tables_of(self, task: TaskSpec) -> ServingTables:
        """The table of the task's own hardware, else the one that this environment was given."""
        return tables_of(task.hardware) if task.hardware or self._tables is None else self._tables

    def step(self, action: ServeAction | Mapping[str, Any]) -> tuple[ServeObservation, float, bool, dict[str, Any]]:
        """Take one step; return observation, reward (the sum over its seconds), done and :meth:`info`."""
        return *self.play(action), self.info()

    def check(self, action: ServeAction) -> None:
        """Raise :class:`InvalidActionError` for what this task lacks of what other tasks offer.

        A precision that the table lacks, where the task offers the knob, and more replicas than the task may have.
        """
        scaled_action(action, self.task.fleet)
        if self._batch is not None and "quant_tier" in self.task.active_actions:
            self._batch.tables.refuse_tier(action.quant_tier.value)

    def play(self, action: ServeAction | Mapping[str, Any]) -> tuple[ServeObservation, float, bool]:
        """Take one step; return observation, reward and done, without the cost of :meth:`info`.

        In its JSON form an action may leave out knobs, which stay as they are; the first step starts from the defaults.
        The action is checked (:class:`InvalidActionError`), then the knobs that the task does not offer are forced;
        ``info["action_applied"]`` shows the result. Raises :class:`NotResetError` before the first reset and
        :class:`EpisodeDoneError` after the end; nothing changes when a step is refused.
        """
        batch = self._batch
        if batch is None or not self._started:
            raise NotResetError("step before reset: call reset() first")
        if self.done:
            raise EpisodeDoneError(
                f"the episode ended after {len(self.actions)} steps; call reset() to start the next one"
            )
        if isinstance(action, ServeAction):
            action.validate()
        else:
            action = ServeAction.from_dict({**(self.actions[-1] if self.actions else {}), **action})
        self.check(action)
        applied = scaled_action(mask_action(action, self.task.active_actions), self.task.fleet)
        batch.knobs.write_action(0, applied)
        batch.advance()
        applied_json = applied.to_dict()
        self.actions.append(applied_json)
        for second in range(batch.seconds.item(0)):
            self._episode_log.append(
                {
                    "timestep": len(self._episode_log) + 1,
                    "action": applied_json,
                    "reward": batch.second_rewards.item(second, 0),
                    "metrics": metrics_dict(snapshot(batch.second_metrics[second, :, 0])),
                }
            )
        self.last_reward = batch.reward.item(0)
        self._cumulative_reward += self.last_reward
        self._seen = self.observation()
        return self._seen, self.last_reward, self.done

    def info(self) -> dict[str, Any]:
        """Details of the last step: metrics, workload, the action as applied, support, terms of the reward, fleet.

        ``metrics`` of several ``seconds`` are put together by :func:`over_seconds`; ``timestep`` counts the episode's.

        After the last step of the episode also its score, breakdown and feedback. Raises :class:`NotResetError` before
        the first step.
        """
        if self._batch is None or self._seen is None:
            raise NotResetError("no info before the first step: call step() first")
        last, seconds = self._episode_log[-1], self._batch.seconds.item(0)
        played = [entry["metrics"] for entry in self._episode_log[-seconds:]]
        info = {
            "timestep": last["timestep"],
            "seconds": seconds,
            "metrics": last["metrics"] if seconds == 1 else over_seconds(played),
            "workload": vars(self._workload(self._seen)),
            "action_applied": last["action"],
            "support": fleet_support(self._batch.fleet),
            "reward_terms": self._batch.terms(),
            "fleet": self._fleet(self._batch.fleet_numbers[0]),
        }
        return {**info, **outcome(self.grade())} if self.done else info

    def _fleet(self, numbers: NDArray[np.float64]) -> dict[str, Any]:
        """What the fleet is set to, with its restarts as a number of replicas too."""
        fleet = fleet_dict(numbers)
        # One that is half back still has to restart; the share is a sum that may lack its last bit.
        left = round(fleet["restarting_share"] * self.task.fleet.n_replicas, 9)
        return {**fleet, "restarting_replicas": math.ceil(left)}

    def grade(self) -> Grade:
        """Grade of the steps played so far, as ``GraderModule`` gives it for :attr:`episode_log`."""
        if self._batch is None:
            raise NotResetError("no grade before reset: call reset() first")
        return grade_episode(self.task, self._batch.calibration, recorded_log(self._episode_log))

    def observation(self) -> ServeObservation:
        """The current observation."""
        return to_observation(self.observation_row())

    def observation_row(self, fleet: bool = False) -> NDArray[np.float64]:
        """The current observation as 14 numbers in the order of ``OBSERVATION_FIELDS``; the next step overwrites it.

        With ``fleet`` it has 21, the last seven in the order of ``FLEET_FIELDS``, and 24 with those of
        ``SCALING_FIELDS`` where the task scales.
        """
        if self._batch is None:
            raise NotResetError("no observation before reset: call reset() first")
        row: NDArray[np.float64] = (self._batch.full_observation() if fleet else self._batch.observation)[0]
        return row

    def observation_dict(self) -> dict[str, Any]:
        """The current observation as JSON."""
        return observation_dict(self.observation())

    def config_dict(self) -> dict[str, Any]:
        """The configuration of the episode as JSON."""
        return self.config.to_dict()

    def workload(self) -> WorkloadState:
        """Statistics of the current load."""
        if self._batch is None:
            raise NotResetError("no workload before reset: call reset() first")
        return self._workload(self.observation())

    def _workload(self, o: ServeObservation) -> WorkloadState:
        phase = self.workload_phase
        return WorkloadState(
            arrival_rate=o.arrival_rate,
            mean_prompt_len=o.mean_prompt_len,
            prompt_len_bucket=prompt_bucket(o.mean_prompt_len),
            queue_depth=int(o.queue_depth),
            priority_distribution=o.priority_distribution,
            is_burst=phase == "burst",
            phase=phase,
        )

    @property
    def workload_phase(self) -> str:
        """Phase of the last second: warmup, steady, burst or cooldown."""
        if self._batch is None:
            return PHASES[0]
        return PHASES[self._batch.fleet.phase.item(0, max(0, len(self._episode_log) - 1))]

    def arrivals(self) -> list[float]:
        """Requests that arrived in each second played so far, of all classes; observations have a moving average."""
        if self._batch is None:
            raise NotResetError("no arrivals before reset: call reset() first")
        arrived: list[float] = self._batch.fleet.arrivals[0, : len(self._episode_log)].sum(axis=-1).tolist()
        return arrived

    def state(self) -> dict[str, Any]:
        """Metadata of the episode as JSON."""
        return {
            "session_id": self.session_id,
            "family": self.family,
            "task_id": self.task_id,
            "seed": self.seed,
            "step_count": len(self.actions),
            "episode_length": self.config.episode_length,
            "cumulative_reward": self._cumulative_reward,
            "cost_so_far": float(self._batch.fleet.state.rows["cost_so_far"][0]) if self._batch else 0.0,
            "done": self.done,
            "workload_phase": self.workload_phase,
            "config": self.config_dict(),
        }


def over_seconds(metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Metrics of several seconds in one: means, sums, maxima or last values, see :data:`OVER_SECONDS`."""
    together: dict[str, Callable[[list[Any]], Any]] = {"mean": fmean, "sum": sum, "max": max, "last": itemgetter(-1)}
    return {name: together[OVER_SECONDS[name]]([each[name] for each in metrics]) for name in metrics[0]}


def metrics_dict(m: MetricsSnapshot) -> dict[str, Any]:
    """JSON form of a snapshot; the dictionary is the snapshot's own ``__dict__``, not a copy."""
    return vars(m)


def observation_dict(o: ServeObservation) -> dict[str, Any]:
    """JSON form of an observation: its twelve fields."""
    return {
        "queue_depth": o.queue_depth,
        "mean_prompt_len": o.mean_prompt_len,
        "arrival_rate": o.arrival_rate,
        "kv_cache_occupancy": o.kv_cache_occupancy,
        "ttft_p50": o.ttft_p50,
        "tpot_p50": o.tpot_p50,
        "slo_violation_rate": o.slo_violation_rate,
        "gpu_memory_used_gb": o.gpu_memory_used_gb,
        "spec_accept_rate": o.spec_accept_rate,
        "priority_distribution": o.priority_distribution,
        "timestep": o.timestep,
        "cost_so_far": o.cost_so_far,
    }
