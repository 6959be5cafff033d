"""Rollouts and evaluations distributed over processes and machines with Ray Core.

Each worker is an actor that owns one native vector environment and gives back whole fragments of at least
:data:`MIN_FRAGMENT_STEPS` steps: a message then carries milliseconds of simulation, and sending it takes little of the
time. Only :class:`Workers` needs Ray; :class:`RolloutWorker` is a plain class.
Seeds do not depend on how the work is distributed, so neither do results.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from agents.evaluate import Evaluation, evaluate
from agents.registry import load_own_agents, make_agent
from env.autoreset import AutoresetBatch
from env.batch import ServingBatch
from inferencegym.errors import InvalidConfigError, refusal
from inferencegym.installation import install_extra
from inferencegym.seeds import episode_seed
from inferencegym.tasks import TaskId, get_task

if TYPE_CHECKING:
    from agents.protocol import Agent

MIN_FRAGMENT_STEPS: Final = 1_000


@dataclass(frozen=True, slots=True, eq=False)
class Fragment:
    """Rollout fragment: T steps of B episodes, as learners need them.

    ``observation`` (T, B, 14) before the step, ``knobs`` (T, B, 5) as applied, ``reward`` and ``ended`` (T, B),
    ``last_observation`` (B, 14) after the last step, and ``seeds`` (B,) of the episodes running at its start.
    """

    observation: NDArray[np.float32]
    knobs: NDArray[np.float32]
    reward: NDArray[np.float32]
    ended: NDArray[np.bool_]
    last_observation: NDArray[np.float32]
    seeds: NDArray[np.int64]

    @property
    def steps(self) -> int:
        """Environment steps in it."""
        return int(self.reward.size)


class RolloutWorker:
    """Rollout worker: ``n_rows`` episodes and the agent that controls them; worker ``index`` of several.

    Row seeds come from ``seed``, the worker's index and the row, so workers meet different traffic.
    """

    def __init__(
        self,
        task_id: TaskId,
        agent: str,
        n_rows: int = 64,
        seed: int = 0,
        index: int = 0,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self._task = get_task(task_id)
        self._rows = AutoresetBatch(ServingBatch(self._task, n_rows, self._task.config(config), n_threads=1))
        self._agent: Agent = make_agent(agent, self._task)
        self._seeds: list[int | None] = [episode_seed(episode_seed(seed, index + 1), row + 1) for row in range(n_rows)]
        self._rows.reset(self._seeds)
        self._agent.reset(n_rows)

    def rollout(self, min_steps: int = MIN_FRAGMENT_STEPS) -> Fragment:
        """Collect at least ``min_steps`` further steps; all rows step together."""
        batch = self._rows.batch
        n_steps = -(-max(min_steps, 1) // batch.n_rows)
        observation = np.empty((n_steps, *batch.observation.shape), dtype=np.float32)
        knobs = np.empty((n_steps, batch.n_rows, len(batch.mask)), dtype=np.float32)
        reward = np.empty((n_steps, batch.n_rows), dtype=np.float32)
        ended = np.empty((n_steps, batch.n_rows), dtype=np.bool_)
        seeds = batch.seeds.copy()
        for t in range(n_steps):
            observation[t] = batch.observation
            chosen = batch.snap(self._agent.act(batch.full_observation()))
            self._rows.step(chosen)
            knobs[t], reward[t], ended[t] = chosen, batch.reward, batch.done
            if ended[t].any():  # rows of one batch end together
                self._rows.reset()
                self._agent.reset(batch.n_rows)
        return Fragment(observation, knobs, reward, ended, batch.observation.astype(np.float32), seeds)


@dataclass(frozen=True, slots=True)
class Job:
    """Evaluation job: one agent on one task and some seeds."""

    task_id: TaskId
    agent: str
    seeds: tuple[int, ...]


def run_job(job: Job) -> Evaluation:
    """Evaluate in this process."""
    load_own_agents([job.agent])  # a worker's process has registered none yet
    return evaluate(job.agent, get_task(job.task_id), job.seeds)


class Workers:
    """Ray workers as a context: ``with Workers(4) as workers: ...``.

    ``address`` is that of a cluster (``"ray://host:10001"``, ``"auto"``); None starts one on this machine for the time
    of the context. Raises :class:`InvalidConfigError` where Ray is not installed.
    """

    def __init__(self, n_workers: int, address: str | None = None) -> None:
        if n_workers < 1:
            raise refusal("n_workers", n_workers, "at least 1")
        try:
            import ray
        except ModuleNotFoundError as error:
            raise InvalidConfigError(f"Ray is not installed: {install_extra('ray')}") from error
        self._ray: Any = ray
        self._n_workers = n_workers
        self._address = address

    def __enter__(self) -> Self:
        options: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
        if self._address is None:
            options["num_cpus"] = self._n_workers
        self._ray.init(address=self._address, ignore_reinit_error=True, **(options if self._address is None else {}))
        return self

    def __exit__(self, *error: object) -> None:
        self._ray.shutdown()

    def fragments(
        self,
        task_id: TaskId,
        agent: str,
        n_fragments: int,
        *,
        n_rows: int = 64,
        min_steps: int = 12_800,
        seed: int = 0,
        config: Mapping[str, Any] | None = None,
    ) -> Iterator[tuple[int, Fragment]]:
        """``n_fragments`` fragments as they become ready, each with the index of its worker.

        ``config`` are settings of the episodes, such as ``{"reward": "grade"}``.
        Every worker is asked for its next fragment before its last one is handed out, so none waits for the reader.
        """
        actor = self._ray.remote(num_cpus=1)(RolloutWorker)
        actors = [actor.remote(task_id, agent, n_rows, seed, index, config) for index in range(self._n_workers)]
        running = {worker.rollout.remote(min_steps): i for i, worker in enumerate(actors[:n_fragments])}
        asked = len(running)
        while running:
            ready, _ = self._ray.wait(list(running), num_returns=1)
            index = running.pop(ready[0])
            if asked < n_fragments:
                running[actors[index].rollout.remote(min_steps)] = index
                asked += 1
            yield index, self._ray.get(ready[0])

    def evaluate(self, jobs: Sequence[Job]) -> list[Evaluation]:
        """Evaluations in the order of their jobs."""
        task = self._ray.remote(num_cpus=1)(run_job)
        return list(self._ray.get([task.remote(job) for job in jobs]))


def evaluate_jobs(jobs: Sequence[Job], n_workers: int = 1, address: str | None = None) -> list[Evaluation]:
    """Run jobs here (one worker and no address) or with Ray."""
    if n_workers == 1 and address is None:
        return [run_job(job) for job in jobs]
    with Workers(n_workers, address) as workers:
        return workers.evaluate(jobs)


def sweep_table(evaluations: Sequence[Evaluation]) -> list[Mapping[str, Any]]:
    """One entry per job with its score's mean and interval."""
    return [{"task": e.task.task_id, **e.to_dict()} for e in evaluations]
