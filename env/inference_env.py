"""Scalar serving environment: one episode, a batch with one row."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from env.batch import ServingBatch
from env.dynamics import FluidFleet
from env.family import Grade, check_state, outcome, state_of
from env.log import EpisodeLog
from grader.grader import grade_episode
from inferencegym.errors import EpisodeDoneError, InvalidActionError, NotResetError
from inferencegym.messages import read
from inferencegym.models import PHASES, ServeAction, ServeActionMessage, ServeObservation, WorkloadState
from inferencegym.seeds import check_seed
from inferencegym.spaces.actions import checked_row
from inferencegym.spaces.observations import to_observation
from inferencegym.tasks import Calibration, EpisodeConfig, TaskId, TaskSpec, get_task, task_of, with_settings
from simulator.coverage import LEVELS, fleet_support
from simulator.hardware.tables import FloatArray, ServingTables, tables_of
from simulator.trace_sim import TraceSimulator


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
        self._cumulative_reward = 0.0
        self.last_reward = 0.0
        self._batch: ServingBatch | None = None
        self._log: EpisodeLog | None = None
        self._stamp: Mapping[str, Any] = {}
        """Fields added to every entry of the log."""

    def __getstate__(self) -> tuple[dict[str, Any], list[dict[str, Any]] | None]:
        """Settings, and the actions so far: a copy plays them again, and goes on as this episode does."""
        settings = {**vars(self), "_batch": None, "_log": None}
        return settings, None if self._log is None else self.actions

    def __setstate__(self, state: tuple[dict[str, Any], list[dict[str, Any]] | None]) -> None:
        settings, actions = state
        vars(self).update(settings)
        if actions is not None:
            self.reset(session_id=self.session_id)
            self._play_again(actions)

    def get_state(self) -> dict[str, Any]:
        """The episode so far as JSON (task, seed, configuration, actions), for :meth:`set_state`.

        Raises :class:`NotResetError` before the first reset.
        """
        if self._log is None:
            raise NotResetError("no state before reset: call reset() first")
        return state_of(self)

    def set_state(self, state: Mapping[str, Any]) -> ServeObservation:
        """Continue the episode of :meth:`get_state`: play its actions again and return the observation."""
        check_state(state)
        self.reset(state["seed"], state["task_id"], state["config"])
        self._play_again(state["actions"])
        return self.observation()

    def _play_again(self, actions: Sequence[Mapping[str, Any]]) -> None:
        for action in actions:
            self.advance(self.check(action))

    @property
    def task_id(self) -> TaskId:
        """Id of the task."""
        return self.task.task_id

    @property
    def episode_log(self) -> list[dict[str, Any]]:
        """Seconds played so far, ``{"timestep", "action", "reward", "metrics"}`` each, as graders accept them."""
        return [] if self._log is None else self._log.entries()

    @property
    def n_entries(self) -> int:
        """Seconds played so far."""
        return 0 if self._log is None else self._log.seconds

    @property
    def actions(self) -> list[dict[str, Any]]:
        """Actions of the steps so far, as applied."""
        return [] if self._log is None else self._log.actions

    @property
    def episode_length(self) -> int:
        """Seconds of a whole episode."""
        return self.config.episode_length

    @property
    def done(self) -> bool:
        """Whether the episode has ended."""
        return self._log is not None and self._log.seconds >= self.config.episode_length

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
        batch, log = self._batch, self._log
        if batch is None or log is None or task is not self.task or new_config != self.config:
            batch = self.make_batch(task, new_config)
            log = EpisodeLog(batch, self._stamp)
        batch.reset([new_seed])
        log.start()
        self.task, self.config, self.seed = task, new_config, new_seed
        self._batch, self._log = batch, log
        self.session_id = session_id or str(uuid.uuid4())
        self._cumulative_reward = 0.0
        return self.observation()

    def make_batch(self, task: TaskSpec, config: EpisodeConfig) -> ServingBatch:
        """The batch with one row that plays the episodes."""
        return ServingBatch(task, 1, config, tables_of(task.hardware, self._tables), self._calibration)

    def step(self, action: ServeAction | Mapping[str, Any]) -> tuple[ServeObservation, float, bool, dict[str, Any]]:
        """Take one step; return observation, reward (the sum over its seconds), done and :meth:`info`.

        In its JSON form an action may leave out knobs, which keep their values; the first step starts from the
        defaults. The action is checked (:class:`InvalidActionError`), then the knobs that the task does not offer are
        forced; ``info["action_applied"]`` shows the result. Raises :class:`NotResetError` before the first reset and
        :class:`EpisodeDoneError` after the end; nothing changes when a step is refused.
        """
        self._running()
        return *self.play(self.check(action)), self.info()

    def check(self, action: object) -> FloatArray:
        """The action, in any of the forms of :meth:`step`, as a row of knobs (1, 5), or (1, 6) where the task scales.

        Raises :class:`InvalidActionError` for a value out of range, for a precision that the table lacks where the task
        offers the knob, and for more replicas than the task may have.
        """
        if isinstance(action, ServeAction):
            action.validate()
        elif not isinstance(action, ServeActionMessage):  # whose knobs have been checked
            if isinstance(action, Mapping) and self.actions:
                action = {**self.actions[-1], **action}
            action = read(ServeActionMessage, action, InvalidActionError, whole="action")
        knobs = checked_row(action, self.task.fleet)
        if self._batch is not None and "quant_tier" in self.task.active_actions:
            self._batch.tables.refuse_tier(int(knobs[0, 4]))
        return knobs

    def play(self, knobs: FloatArray) -> tuple[ServeObservation, float, bool]:
        """Take one step with a row of knobs; return observation, reward and done, without the cost of :meth:`info`."""
        self.advance(knobs)
        return self.observation(), self.last_reward, self.done

    def advance(self, knobs: FloatArray) -> None:
        """Take one step with a row of knobs (1, 5), or (1, 6) where the task scales, and return nothing.

        Knobs are moved to the nearest allowed ones, as :meth:`ServingBatch.step` does.
        """
        batch, log = self._running()
        batch.write_knobs(knobs)
        batch.advance()
        log.add()
        self.last_reward = batch.reward.item(0)
        self._cumulative_reward += self.last_reward

    def _running(self) -> tuple[ServingBatch, EpisodeLog]:
        if self._batch is None or self._log is None:
            raise NotResetError("step before reset: call reset() first")
        if self.done:
            raise EpisodeDoneError(
                f"the episode ended after {len(self.actions)} steps; call reset() to start the next one"
            )
        return self._batch, self._log

    def info(self) -> dict[str, Any]:
        """Details of the last step: metrics, workload, the action as applied, support, terms of the reward, fleet.

        If the step had several ``seconds``, :data:`OVER_SECONDS` says how ``metrics`` add up; ``timestep`` counts
        seconds of the episode. The last step adds the episode's score, breakdown and feedback. Raises
        :class:`NotResetError` before the first step.
        """
        batch, log = self._batch, self._log
        if batch is None or log is None or not log.seconds:
            raise NotResetError("no info before the first step: call step() first")
        info = log.info()
        if isinstance(batch.fleet, FluidFleet):
            info["support"] = LEVELS[fleet_support(batch.fleet)]
        if log.seconds >= self.config.episode_length:
            info |= outcome(self.grade())
        return info

    def grade(self) -> Grade:
        """Grade of the steps played so far, as ``GraderModule`` gives it for :attr:`episode_log`."""
        if self._batch is None or self._log is None:
            raise NotResetError("no grade before reset: call reset() first")
        return grade_episode(self.task, self._batch.calibration, self._log.episode())

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
        if self._log is None:
            raise NotResetError("no workload before reset: call reset() first")
        return WorkloadState(**self._log.workload())

    @property
    def workload_phase(self) -> str:
        """Phase of the last second: warmup, steady, burst or cooldown."""
        if self._batch is None:
            return PHASES[0]
        return PHASES[self._batch.fleet.phase.item(0, max(0, self.n_entries - 1))]

    def arrivals(self) -> list[float]:
        """Requests that arrived in each second played so far, of all classes; observations have a moving average."""
        if self._batch is None:
            raise NotResetError("no arrivals before reset: call reset() first")
        arrived: list[float] = self._batch.fleet.arrivals[0, : self.n_entries].sum(axis=-1).tolist()
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
