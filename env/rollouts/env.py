"""Environment of agent sessions: one row is one engine, and the scalar and the vector environment step rows.

A step is one second: the cap is set, and the engine runs its iterations. The episode ends when all sessions are over,
or after its ``episode_length``. A step's reward is what it adds to the grade, so an episode pays its score.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from env.family import Grade, outcome
from env.rollouts.grader import grade_metrics, mean_score, score_parts
from env.rollouts.tasks import (
    DEFAULT_TASK_ID,
    RolloutConfig,
    RolloutTask,
    Workload,
    config_json,
    draw_workload,
    get_rollout_task,
    rollout_config,
)
from grader.episode import empty_grade
from inferencegym.errors import EpisodeDoneError, NotResetError
from inferencegym.rollouts import MAX_SESSIONS, OBSERVATION_FIELDS, parse_action
from inferencegym.seeds import check_seed
from inferencegym.tasks import TaskId
from simulator.events.lines import ASSIGNED, PREEMPTED, PREFILLING
from simulator.events.requests import FloatArray
from simulator.events.simulation import SessionRun

COUNTS: Final = ("queried_tokens", "hit_tokens", "prefilled_tokens", "written_tokens", "n_preempted")
"""Totals of a run of which an observation shows what the step added."""


class RolloutRow:
    """One episode: an engine with its sessions, stepped by :meth:`play`.

    ``seen`` (20,) is the observation in the order of :data:`inferencegym.rollouts.OBSERVATION_FIELDS`.
    """

    def __init__(self, workload: Workload, horizon_s: int) -> None:
        self.workload, self.horizon_s = workload, horizon_s
        self.run = SessionRun(self.workload.fleet, self.workload.sessions)
        self.run.state.objective_ms = self.workload.objective_ms
        self.ideal_tokens_per_s = self._ideal_pace()
        self.time_s = 0
        self._lines = [self.run.simulation.first_line(0) + kind for kind in (PREFILLING, ASSIGNED, PREEMPTED)]
        self._counts = [0] * len(COUNTS)
        self.max_sessions = MAX_SESSIONS
        self._score = 0.0
        self.seen = self._observe()

    @property
    def over(self) -> bool:
        """Whether all sessions are over."""
        return self.run.over

    @property
    def done(self) -> bool:
        """Whether the episode is over."""
        return self.over or self.time_s >= self.horizon_s

    def advance(self, max_sessions: int) -> None:
        """Let a second pass under a cap."""
        self.max_sessions = max_sessions
        self.time_s += 1
        self.run.play(max_sessions, self.time_s)
        self.seen = self._observe()

    def play(self, max_sessions: int) -> float:
        """Let a second pass under a cap; returns the reward."""
        self.advance(max_sessions)
        before, self._score = self._score, mean_score(score_parts(self.workload.interactive, self.totals()))
        return self._score - before

    def totals(self) -> dict[str, float]:
        """What the grade reads: totals since the start."""
        state = self.run.state
        return {
            "elapsed_s": state.now_ms / 1e3 if self.over else float(self.time_s),
            "horizon_s": float(self.horizon_s),
            "sessions_left": float(len(self.workload.sessions) - state.n_over - state.n_refused_sessions),
            "batch_tokens": float(state.batch_tokens),
            "ideal_tokens_per_s": self.ideal_tokens_per_s,
            "turns_judged": float(state.n_judged),
            "turns_within": float(state.n_within),
            "turns_overdue": float(state.n_overdue),
        }

    def observation(self) -> dict[str, float]:
        """The observation by name."""
        return dict(zip(OBSERVATION_FIELDS, self.seen.tolist(), strict=True))

    def _ideal_pace(self) -> float:
        """Answers of the sessions that wait for the cap, by the engine with an unlimited pool and no cap, tokens/s."""
        ideal = SessionRun(self.workload.unlimited(), self.workload.sessions)
        ideal.play(MAX_SESSIONS, self.horizon_s)
        return float(ideal.state.batch_tokens / (ideal.state.now_ms / 1e3))

    def _observe(self) -> FloatArray:
        state, lines = self.run.state, self.run.simulation.arrays["line_count"]
        prefilling, assigned, preempted = (int(lines[line]) for line in self._lines)
        counts = [getattr(state, name) for name in COUNTS]
        queried, hit, computed, written, lost = (now - then for now, then in zip(counts, self._counts, strict=True))
        self._counts = counts
        flying = state.in_flight + state.free_flying
        shared, pool = state.shared_tokens, self.workload.kv_pool_tokens
        contexts = state.context_sum + flying * shared
        return np.array(
            [
                self.time_s,
                self.max_sessions,
                state.in_flight,
                state.n_paused,
                state.n_arrived - state.n_begun,
                state.n_over,
                state.n_refused_sessions,
                state.free_flying,
                self.run.running() + prefilling,
                state.waiting + assigned + preempted,
                self.run.kv_usage(),
                pool,
                queried,
                hit,
                computed,
                written,
                lost,
                contexts / flying if flying else 0.0,
                state.context_max + shared if flying else 0.0,
                (state.context_sum + shared) / pool if flying else 0.0,
            ],
            dtype=np.float64,
        )


def draw_row(task: RolloutTask, seed: int, config: RolloutConfig) -> RolloutRow:
    """The episode that a seed draws."""
    return RolloutRow(draw_workload(task, seed, config), config.episode_length or task.entry.episode_length)


class RolloutEnv:
    """Scalar environment: one episode. ``actions`` and ``episode_log`` are those of the steps taken so far."""

    family: Final = "rollouts"

    def __init__(
        self, task_id: TaskId = DEFAULT_TASK_ID, seed: int = 42, config: Mapping[str, Any] | None = None
    ) -> None:
        self._task = get_rollout_task(task_id)
        self._config = rollout_config(config)
        self.seed = check_seed(seed)
        self.session_id = str(uuid.uuid4())
        self.actions: list[dict[str, Any]] = []
        self.episode_log: list[dict[str, Any]] = []
        self._row: RolloutRow | None = None

    def __getstate__(self) -> dict[str, Any]:
        """All but the engine: a copy plays the actions again, and goes on as this episode does."""
        return {**vars(self), "_row": self._row is not None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._row = draw_row(self._task, self.seed, self._config) if state["_row"] else None
        for action in self.actions:
            self.row.play(action["max_sessions"])

    @property
    def task_id(self) -> str:
        """Id of the task."""
        return self._task.task_id

    @property
    def last_reward(self) -> float:
        """Reward of the last step."""
        return float(self.episode_log[-1]["reward"])

    @property
    def n_entries(self) -> int:
        """Steps taken so far."""
        return len(self.episode_log)

    @property
    def episode_length(self) -> int:
        """Steps of an episode at most."""
        return self._config.episode_length or self._task.entry.episode_length

    @property
    def done(self) -> bool:
        """Whether the episode has ended."""
        return self._row is not None and self._row.done

    @property
    def row(self) -> RolloutRow:
        """The running episode. Raises :class:`NotResetError` before the first reset."""
        if self._row is None:
            raise NotResetError("no episode has been started: call reset() first")
        return self._row

    def reset(
        self,
        seed: int | None = None,
        task_id: TaskId | None = None,
        config: Mapping[str, Any] | None = None,
        session_id: str | None = None,
    ) -> dict[str, float]:
        """Start an episode and return its first observation.

        Arguments that are None keep their value, but another task starts with its own settings. Raises
        UnknownTaskError or InvalidConfigError, and then the running episode continues.
        """
        task = self._task if task_id is None else get_rollout_task(task_id)
        kept = config is None and task.task_id == self.task_id
        checked = self._config if kept else rollout_config(config)
        chosen = self.seed if seed is None else check_seed(seed)
        row = draw_row(task, chosen, checked)
        self._task, self._config, self.seed, self._row = task, checked, chosen, row
        self.session_id = session_id or str(uuid.uuid4())
        self.actions, self.episode_log = [], []
        return row.observation()

    def check(self, action: Any) -> int:
        """The cap. Raises :class:`InvalidActionError`."""
        return parse_action(action)

    def play(self, action: Any) -> tuple[dict[str, float], float, bool]:
        """Take one step; return observation, reward and done.

        Raises :class:`InvalidActionError`, :class:`NotResetError` and :class:`EpisodeDoneError`.
        """
        row = self.row
        if row.done:
            raise EpisodeDoneError(f"the episode ended after {self.n_entries} steps: reset to start anew")
        cap = parse_action(action)
        reward = row.play(cap)
        taken = {"max_sessions": cap}
        self.actions.append(taken)
        seen = row.observation()
        metrics = {**seen, **row.totals()}
        self.episode_log.append({"timestep": row.time_s, "action": taken, "reward": reward, "metrics": metrics})
        return seen, reward, row.done

    def step(self, action: Any) -> tuple[dict[str, float], float, bool, dict[str, Any]]:
        """Take one step and return observation, reward, done and info: :meth:`play` and :meth:`info`."""
        return *self.play(action), self.info()

    def info(self) -> dict[str, Any]:
        """Totals since the start; at the end also the grade's outcome. Raises :class:`NotResetError`."""
        if not self.episode_log:
            raise NotResetError("no info before the first step: call step() first")
        info: dict[str, Any] = {"episode_step": self.n_entries, **self.row.totals()}
        return info | outcome(self.grade()) if self.done else info

    def grade(self) -> Grade:
        """Grade of the steps played so far: that of :attr:`episode_log`."""
        if not self.episode_log:
            return empty_grade()
        return grade_metrics(self.row.workload.interactive, self.row.totals())

    def observation(self) -> dict[str, float]:
        """The current observation."""
        return self.row.observation()

    def observation_dict(self) -> dict[str, Any]:
        """The current observation as JSON."""
        return self.row.observation()

    def config_dict(self) -> dict[str, Any]:
        """Settings of the episode that differ from the task's; a reset with them starts the same episode."""
        return config_json(self._config)

    def state(self) -> dict[str, Any]:
        """Metadata as JSON."""
        row = self.row
        return {
            "session_id": self.session_id,
            "family": self.family,
            "task_id": self.task_id,
            "seed": self.seed,
            "step_count": self.n_entries,
            "episode_length": self.episode_length,
            "done": row.done,
            "hardware": row.workload.hardware,
        }
