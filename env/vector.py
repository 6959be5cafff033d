"""Native batch of serving episodes with Gymnasium's vector interface."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from env.autoreset import AutoresetBatch
from env.batch import ServingBatch
from env.family import Grade
from grader.episode import GRADED_METRICS, Episode
from grader.grader import grade_episodes
from inferencegym.errors import refusal
from inferencegym.spaces.actions import action_size
from inferencegym.spaces.formats import ObservationCodec, action_codec_of, reward_format
from inferencegym.tasks import Calibration, TaskId, get_task, task_of, with_settings
from inferencegym.vector_env import (
    ArrayVectorEnv,
    AutoresetVectorEnv,
    BoolArray,
    Float32Array,
    FloatArray,
    Info,
    refuses_unknown,
)
from simulator.hardware.tables import ServingTables, tables_of


class VectorInferenceEnv(AutoresetVectorEnv, ArrayVectorEnv):
    """``num_envs`` episodes of one serving task, stepping together in compiled code.

    Every row equals the scalar environment with the same seed and actions. Observation and action formats are those of
    :mod:`inferencegym.spaces.formats`, autoreset modes those of :class:`AutoresetVectorEnv`, seeds of restarts
    :func:`inferencegym.seeds.episode_seed`. An episode lasts a fixed number of steps, which is part of the task (its
    budget is an episode's, and the step is observed), so its end is ``terminated``; ``max_episode_steps`` truncates.

    ``reward`` ("plan", "grade" or "score") and ``hold`` (seconds of a step) may be given here or in ``config``,
    "scaled" and "bounded" only here (:func:`inferencegym.spaces.formats.reward_format`).

    ``info`` holds ``metrics`` (name -> (B,), see :data:`simulator.kernel.arrays.METRICS`; put together by
    :data:`simulator.kernel.arrays.OVER_SECONDS` where a step has several seconds), ``cost`` (B,), the requests that
    missed their objective in the step, and ``seed`` (B,), the seed of each row's current episode. Where an episode has
    ended there are also ``score`` (B,), ``breakdown`` (name -> (B,)) and ``feedback`` (B,) of its grade, valid where
    ``info["_score"]`` is set.
    """

    @refuses_unknown
    def __init__(
        self,
        num_envs: int = 1,
        task_id: TaskId = 1,
        *,
        config: Mapping[str, Any] | None = None,
        reward: str | None = None,
        hold: int | None = None,
        observation: str = "raw",
        action: str = "box",
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        max_episode_steps: int | None = None,
        n_threads: int = 1,
        tables: ServingTables | None = None,
        calibration: Calibration | None = None,
    ) -> None:
        if num_envs < 1:
            raise refusal("num_envs", num_envs, "at least 1")
        self.task = task_of(get_task(task_id), config)
        self._reward, kind = reward_format(reward)
        self.config = self.task.config(with_settings(config, reward=kind, hold=hold))
        self._made_of = (self.task, num_envs, self.config, tables, calibration)
        self._n_threads = n_threads
        self._make_batch()
        self._actions = action_codec_of(action, self.task, self.batch.calibration)
        self._observations = ObservationCodec(self.task, self.config, self.batch.calibration, observation)
        super().__init__(num_envs, self._observations.space, self._actions.space, autoreset_mode, max_episode_steps)

    def _make_batch(self) -> None:
        task, n_rows, config, tables, calibration = self._made_of
        tables = tables_of(task.hardware, tables)
        self.batch = ServingBatch(task, n_rows, config, tables, calibration, n_threads=self._n_threads)
        self._episodes = AutoresetBatch(self.batch)
        self._played = EpisodeRing(self.batch)

    def __getstate__(self) -> dict[str, Any]:
        """Settings, and what each row has played of its episode: a copy plays it again, and goes on as this one."""
        steps = -(-self.batch.time // self.batch.hold)
        kept = {name: value for name, value in vars(self).items() if name not in ("batch", "_episodes", "_played")}
        return {
            **kept,
            "series": self._episodes.series,
            "episodes": (self.seeds, steps, self._played.knobs(steps.max())),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        series, (seeds, steps, knobs) = state.pop("series"), state.pop("episodes")
        vars(self).update(state)
        self._make_batch()
        self._episodes.series = series
        if series.started:
            self.batch.reset(seeds)
        for at, row_knobs in enumerate(knobs):  # all rows end at the last one
            self.batch.write_knobs(row_knobs)
            self.batch.advance_rows(steps >= len(knobs) - at)
            self._played.record(row_knobs)

    @property
    def seeds(self) -> NDArray[np.int64]:
        """Seed of each row's current episode, (B,)."""
        return self._episodes.seeds.copy()

    def _start(self, seeds: Sequence[int | None] | None, rows: BoolArray | None) -> None:
        self._episodes.reset(seeds, rows)

    def _step_rows(self, actions: NDArray[Any], rows: BoolArray | None) -> FloatArray:
        knobs = self._actions.decode(actions)
        self._episodes.step(knobs, rows)
        self._played.record(knobs)
        return self._reward(self.batch.reward, self.config)

    def _ended(self) -> tuple[BoolArray, BoolArray]:
        return self.batch.done, np.zeros(self.num_envs, dtype=np.bool_)

    def _observe(self) -> Float32Array:
        needs_fleet = self._observations.needs_fleet
        return self._observations.encode(self.batch.full_observation() if needs_fleet else self.batch.observation)

    def _info(self) -> Info:
        metrics = self.batch.step_metrics()
        found = {"metrics": metrics, "cost": metrics["slo_violations"], "seed": self.seeds}
        info = {**found, **{f"_{name}": self._everywhere for name in found}}
        ended = self.batch.done
        if ended.any():
            grades = grade_episodes(self.task, self.batch.calibration, self._played.episodes(np.flatnonzero(ended)))
            info |= vector_outcome(ended, grades)
        return info


class EpisodeRing:
    """Knobs, and values for grading, of the last D steps of B rows, D being an episode's steps, each with H seconds.

    All rows step together, so when a row's episode ends, the ring holds exactly that episode. The last step may have
    fewer seconds.
    """

    def __init__(self, batch: ServingBatch) -> None:
        self._batch = batch
        self._steps = 0
        # Of the step's seconds, (H, B); the knobs are the same in all of them.
        self._source = {
            "batch_size": batch.fleet.batch_size,
            "kv_budget": batch.fleet.kv_budget,
            "replicas": batch.fleet.replicas,
            **{name: batch.second(name) for name in GRADED_METRICS},
        }
        shape = (batch.config.n_steps, batch.hold, batch.n_rows)
        self._columns = {name: np.zeros(shape) for name in self._source}
        self._knobs = np.zeros((batch.config.n_steps, batch.n_rows, action_size(batch.task.fleet)))

    def record(self, knobs: FloatArray) -> None:
        """Keep the step that the rows have just taken with these knobs (B, 5 or 6)."""
        at = self._steps % self._batch.config.n_steps
        self._knobs[at] = knobs
        for name, column in self._columns.items():
            column[at] = self._source[name]
        self._steps += 1

    def knobs(self, n: int) -> FloatArray:
        """Knobs of the last ``n`` steps, (n, B, 5 or 6)."""
        return self._knobs[np.arange(self._steps - n, self._steps) % len(self._knobs)]

    def episodes(self, rows: NDArray[np.int64]) -> Episode:
        """The episodes (N, T) of rows whose last step was an episode's last."""
        config = self._batch.config
        order = (self._steps + np.arange(config.n_steps)) % config.n_steps
        # Each row is contiguous, so that it is summed as if it were alone.
        length, width = config.episode_length, len(rows)
        columns = {
            name: np.ascontiguousarray(column[order][..., rows].reshape(-1, width)[:length].T)
            for name, column in self._columns.items()
        }
        # Logs carry whole violations, see ServingFleet.snapshot.
        columns["slo_violations"] = np.rint(columns["slo_violations"])
        return Episode(**columns)


def vector_outcome(ended: BoolArray, grades: Sequence[Grade]) -> Info:
    """:func:`env.family.outcome` of the rows that have ended (B,), in Gymnasium's vector form; one grade for each."""
    rows = np.flatnonzero(ended)
    score, feedback = np.zeros(len(ended)), np.full(len(ended), None, dtype=object)
    breakdown = {name: np.zeros(len(ended)) for name in grades[0]["breakdown"]}
    for row, grade in zip(rows, grades, strict=True):
        score[row], feedback[row] = grade["score"], grade["feedback"]
        for name, part in grade["breakdown"].items():
            breakdown[name][row] = part
    info: Info = {"score": score, "breakdown": breakdown, "feedback": feedback}
    return {**info, **{f"_{name}": ended for name in info}}
