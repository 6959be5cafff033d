"""Environment of the traffic controller: a batch that steps B episodes, and the scalar environment over it.

The tasks have no randomness: their traffic is fixed, so every seed gives the same episode. A seed is accepted and
recorded nevertheless, because the record of an episode of any family has task, seed, configuration and actions.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from env.family import Grade, outcome
from env.traffic.grader import grade_totals
from env.traffic.model import (
    SHARES,
    BoolArray,
    FloatArray,
    IntArray,
    TrafficParams,
    TrafficServer,
    allowed_rates,
    incoming_rates,
    initial,
    step,
)
from env.traffic.score import EpisodeTotals, final_score, step_reward
from env.traffic.tasks import DEFAULT_TASK_ID, TrafficConfig, TrafficTask, get_traffic_task, traffic_config
from inferencegym.errors import EpisodeDoneError, InvalidActionError, NotResetError
from inferencegym.seeds import check_seed
from inferencegym.traffic import ACTION_NAMES, STATE_FIELDS, TrafficAction, parse_action

_Rows = TypeVar("_Rows", TrafficServer, EpisodeTotals)


@dataclass(frozen=True, slots=True)
class TrafficStep:
    """Result of one step of B episodes.

    ``observation`` is ``(B, 7)`` in the order of :data:`inferencegym.traffic.STATE_FIELDS`, ``reward`` and ``done`` are
    ``(B,)``, ``metrics`` holds ``(B,)`` arrays under the names of a log entry.
    """

    observation: FloatArray
    reward: FloatArray
    done: BoolArray
    metrics: dict[str, Any]


class TrafficBatch:
    """B episodes of one task and one configuration, stepped together.

    A row equals the same episode alone, to the last bit. A row whose episode is over does not change and gets reward 0
    until it is reset; the metrics of such a step are meaningless.
    """

    def __init__(self, task: TrafficTask, n_rows: int, config: TrafficConfig | None = None) -> None:
        self.task = task
        self.config = config or task.config
        self.n_rows = n_rows
        self.params = TrafficParams.from_config(self.config)
        self.incoming = incoming_rates(task.pattern, task.episode_length, self.config.traffic_scale)
        self.reset()

    def reset(self, rows: BoolArray | None = None) -> FloatArray:
        """Start all episodes, or those of the mask ``rows`` ``(B,)``, and return the observation ``(B, 7)``."""
        fresh_server = initial(self.params, np.full(self.n_rows, self.incoming[0]))
        fresh_totals = EpisodeTotals.zeros(self.n_rows)
        if rows is None:
            self.server, self.totals = fresh_server, fresh_totals
            self.done = np.zeros(self.n_rows, dtype=np.bool_)
        else:
            self.server = _merge(rows, fresh_server, self.server)
            self.totals = _merge(rows, fresh_totals, self.totals)
            self.done = self.done & ~rows
        return self.observation()

    def step(self, actions: ArrayLike) -> TrafficStep:
        """Take one step with action indices ``(B,)`` of :data:`inferencegym.traffic.ACTION_NAMES`."""
        share = SHARES[_action_indices(actions, self.n_rows)]
        incoming = self.incoming[self.totals.steps]
        allowed = allowed_rates(incoming, share)
        server = step(self.params, self.server.queue_requests, allowed)
        reward = step_reward(self.params, share, server)
        totals = self.totals.add(self.task.grade, server, allowed, incoming)
        if self.done.any():
            server, totals = _merge(self.done, self.server, server), _merge(self.done, self.totals, totals)
            reward = np.where(self.done, 0.0, reward)
        self.server, self.totals = server, totals
        self.done = server.crashed | (totals.steps >= self.task.episode_length)
        metrics = {
            "incoming_requests": incoming,
            "allowed_requests": allowed,
            "accept_rate": share,
            "cpu_usage": server.cpu_share,
            "memory_usage": server.memory_share,
            "queue_length": server.queue_requests,
            "avg_latency": server.latency_ms,
            "crashed": server.crashed,
        }
        return TrafficStep(self.observation(), reward, self.done, metrics)

    def observation(self) -> FloatArray:
        """The state of every row, ``(B, 7)``."""
        seen = np.empty((self.n_rows, len(STATE_FIELDS)))
        seen[:, 0] = self.server.cpu_share
        seen[:, 1] = self.server.memory_share
        seen[:, 2] = self.incoming[self.totals.steps]
        seen[:, 3] = self.server.queue_requests
        seen[:, 4] = self.server.latency_ms
        seen[:, 5] = self.totals.steps
        seen[:, 6] = self.server.crashed
        return seen

    def final_score(self) -> FloatArray:
        """Score of every row as if its episode ended now, ``(B,)`` in [0, 1]."""
        return final_score(self.task.grade, self.totals, self.task.episode_length)

    def grade(self, row: int) -> Grade:
        """Grade of one row as if its episode ended now."""
        return grade_totals(self.task, self.totals.rows(np.array([row])))


@dataclass(frozen=True, slots=True)
class TrafficState:
    """Observation of the traffic controller; bounds and units in :data:`STATE_FIELDS`.

    Everything but ``request_rate`` describes the step just taken. ``request_rate`` is the rate of the next step, so
    that a controller can act before a spike.
    """

    cpu_usage: float
    memory_usage: float
    request_rate: float
    queue_length: int
    avg_latency: float
    step: int
    crashed: bool

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return asdict(self)


class TrafficEnv:
    """Scalar traffic environment: one episode, with the field names of the published HTTP document.

    ``actions`` holds the actions accepted so far in their JSON form; with task, seed and configuration they determine
    the episode. ``episode_log`` has the steps as graders accept them.
    """

    family: Final = "traffic"

    def __init__(self, task_id: str = DEFAULT_TASK_ID, seed: int = 42, config: Mapping[str, Any] | None = None) -> None:
        self._task = get_traffic_task(task_id)
        self._config = traffic_config(config, self._task.config)
        self.seed = check_seed(seed)
        self.session_id = str(uuid.uuid4())
        self.actions: list[dict[str, Any]] = []
        self.episode_log: list[dict[str, Any]] = []
        self.cumulative_reward = 0.0
        self._batch: TrafficBatch | None = None

    @property
    def task_id(self) -> str:
        """The id of the current task."""
        return self._task.task_id

    @property
    def task(self) -> TrafficTask:
        """The current task."""
        return self._task

    @property
    def config(self) -> TrafficConfig:
        """Settings of the current episode."""
        return self._config

    @property
    def last_reward(self) -> float:
        """Reward of the last step."""
        return float(self.episode_log[-1]["reward"])

    @property
    def episode_length(self) -> int:
        """Steps of a whole episode."""
        return self._task.episode_length

    @property
    def done(self) -> bool:
        """Whether the episode is over, by a crash or because its steps are taken; False before the first reset."""
        return self._batch is not None and bool(self._batch.done[0])

    def reset(
        self,
        seed: int | None = None,
        task_id: str | None = None,
        config: Mapping[str, Any] | None = None,
        session_id: str | None = None,
    ) -> TrafficState:
        """Start an episode and return its first state.

        Arguments that are None keep their value, but another task starts with its own settings; ``config`` overrides
        them. The episode gets a new ``session_id`` unless one is given. Raises :class:`UnknownTrafficTaskError` or
        :class:`InvalidConfigError`, and then the running episode continues.
        """
        task = self._task if task_id is None else get_traffic_task(task_id)
        kept = config is None and task.task_id == self.task_id
        checked = self._config if kept else traffic_config(config, task.config)
        self.seed = self.seed if seed is None else check_seed(seed)
        self._task, self._config = task, checked
        self.session_id = session_id or str(uuid.uuid4())
        self.actions, self.episode_log = [], []
        self.cumulative_reward = 0.0
        self._batch = TrafficBatch(task, 1, checked)
        return self.observation()

    def step(self, action: TrafficAction | str | Mapping[str, Any]) -> tuple[TrafficState, float, bool, dict[str, Any]]:
        """Let a share of the next second's requests through.

        Returns state, reward, done and info: :meth:`play` and :meth:`info`.
        """
        return *self.play(action), self.info()

    def check(self, action: TrafficAction) -> TrafficAction:
        """The action, unchanged: every action can be played in every episode."""
        return action

    @property
    def n_entries(self) -> int:
        """Steps taken so far."""
        return len(self.episode_log)

    def play(self, action: TrafficAction | str | Mapping[str, Any]) -> tuple[TrafficState, float, bool]:
        """Let a share of the next second's requests through; return state, reward and done.

        Raises :class:`InvalidActionError`, :class:`NotResetError` before the first reset and :class:`EpisodeDoneError`
        after the end.
        """
        batch = self._running()
        chosen = parse_action(action)
        result = batch.step(np.array([chosen.index]))
        reward = float(result.reward[0])
        metrics = {name: values[0].item() for name, values in result.metrics.items()}
        taken = {"action": chosen.value}
        self.actions.append(taken)
        self.episode_log.append(
            {"timestep": len(self.actions), "action": taken, "reward": reward, "metrics": metrics},
        )
        self.cumulative_reward += reward
        return self.observation(), reward, self.done

    def info(self) -> dict[str, Any]:
        """Details of the last step; at the end also ``final_score``, ``episode_done`` and the grade's outcome.

        Raises :class:`NotResetError` before the first step.
        """
        if not self.episode_log:
            raise NotResetError("no info before the first step: call step() first")
        metrics = self.episode_log[-1]["metrics"]
        info = {
            "incoming_requests": metrics["incoming_requests"],
            "allowed_requests": metrics["allowed_requests"],
            "accept_rate": metrics["accept_rate"],
            "crashed": metrics["crashed"],
            "episode_step": len(self.actions),
            "max_steps": self._task.episode_length,
            "server_capacity": self._config.server_capacity,
        }
        if self.done:
            info |= {"final_score": self.final_score(), "episode_done": True, **outcome(self.grade())}
        return info

    def grade(self) -> Grade:
        """Grade of the steps played so far: that of :attr:`episode_log`."""
        return self._started().grade(0)

    def observation(self) -> TrafficState:
        """The current state. Raises :class:`NotResetError` before the first reset."""
        batch = self._started()
        server, taken = batch.server, int(batch.totals.steps[0])
        return TrafficState(
            cpu_usage=float(server.cpu_share[0]),
            memory_usage=float(server.memory_share[0]),
            request_rate=float(batch.incoming[taken]),
            queue_length=int(server.queue_requests[0]),
            avg_latency=float(server.latency_ms[0]),
            step=taken,
            crashed=bool(server.crashed[0]),
        )

    def observation_dict(self) -> dict[str, Any]:
        """The current state in JSON form."""
        return self.observation().to_dict()

    def state(self) -> dict[str, Any]:
        """The current state and metadata of the episode, flat, in JSON form."""
        seen = self.observation()
        return {
            **seen.to_dict(),
            "session_id": self.session_id,
            "family": self.family,
            "task_id": self.task_id,
            "seed": self.seed,
            "step_count": seen.step,
            "max_steps": self._task.episode_length,
            "cumulative_reward": self.cumulative_reward,
            "done": self.done,
            "workload_phase": self._task.pattern.phase(seen.step),
        }

    def config_dict(self) -> dict[str, Any]:
        """Settings of the current episode in JSON form; a reset with them starts the same episode."""
        return self._config.to_dict()

    def final_score(self) -> float:
        """Score of the episode as if it ended now, in [0, 1]; final once :attr:`done`."""
        return float(self._started().final_score()[0])

    def _started(self) -> TrafficBatch:
        if self._batch is None:
            raise NotResetError("no episode has been started: call reset() first")
        return self._batch

    def _running(self) -> TrafficBatch:
        batch = self._started()
        if batch.done[0]:
            raise EpisodeDoneError(
                f"the episode ended after {len(self.actions)} of {self._task.episode_length} steps: reset to start anew"
            )
        return batch


def _merge(rows: BoolArray, chosen: _Rows, other: _Rows) -> _Rows:
    """``chosen`` in the rows of the mask, ``other`` elsewhere."""
    return replace(other, **{n: np.where(rows, getattr(chosen, n), getattr(other, n)) for n in chosen.__slots__})


def _action_indices(actions: ArrayLike, n_rows: int) -> IntArray:
    indices = np.asarray(actions)
    allowed = f"{n_rows} integers from 0 to {len(ACTION_NAMES) - 1}, one for each episode"
    if indices.shape != (n_rows,) or indices.dtype.kind not in "iu":
        raise InvalidActionError("actions", actions, allowed)
    if indices.min() < 0 or indices.max() >= len(ACTION_NAMES):
        raise InvalidActionError("actions", actions, allowed)
    return indices.astype(np.int64, copy=False)
