"""Log of one episode, and what users see of its last step.

Numbers stay in arrays while the episode is played; entries are made when graders or users ask for them.
Plain Python that the build compiles to C (types in ``log.pxd``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import ceil
from operator import itemgetter
from statistics import fmean
from typing import Any, Final, get_type_hints

import numpy as np

from grader.episode import GRADED_METRICS, Episode
from inferencegym import plain_cython as cython
from inferencegym.models import PHASES, MetricsSnapshot
from simulator.kernel.arrays import METRICS, OVER_SECONDS
from simulator.workload import prompt_bucket

if not cython.compiled:  # compiled, the same name is the C library's (see log.pxd)
    rint = round

_KIND: Final = get_type_hints(MetricsSnapshot)
_COLUMN: Final = {name: i for i, name in enumerate(METRICS)}
_TOGETHER: Final[Mapping[str, Callable[[list[Any]], Any]]] = {"sum": sum, "max": max, "last": itemgetter(-1)}


class EpisodeLog:
    """What was played of an episode of a batch with one row: ``actions`` by step, everything else by second.

    Metrics that the batch's dynamics does not give are absent. ``stamp`` is added to every entry.
    """

    def __init__(self, batch: Any, stamp: Mapping[str, Any]) -> None:
        self.batch, self.stamp = batch, stamp
        self.names = [name for name in _KIND if name in batch.metric]
        self.columns = np.array([_COLUMN[name] for name in self.names], dtype=np.int64)
        self.kinds = np.array([(float, int, bool).index(_KIND[name]) for name in self.names], dtype=np.int64)
        self.hold, self.length = batch.hold, batch.config.episode_length
        self.n_replicas, self.scales = batch.task.fleet.n_replicas, batch.task.fleet.max_replicas is not None
        self.observation, self.fleet = batch.observation, batch.fleet_numbers
        self.terms, self.term_names = batch.reward_terms, list(batch.term_names)
        self.step_seconds, self.step_metrics, self.step_rewards = (
            batch.seconds,
            batch.second_metrics,
            batch.second_rewards,
        )
        self.phases = batch.fleet.phase
        self.grade, self.part_names = batch.follow_grade()
        # Only the fluid model has them by class.
        state, none = batch.fleet.state.rows, np.zeros((1, 0))
        self.class_names = list(batch.fleet.params.stats.names) if "missed_so_far" in state else []
        self.queue, self.missed = state.get("queue", none), state.get("missed_so_far", none)
        self.missed_before = np.zeros(len(self.class_names))
        self.missed_in_step = np.zeros(len(self.class_names))
        self.start()

    def start(self) -> None:
        """Start the log of the next episode."""
        # Only rows that are written take memory.
        self.metrics = np.zeros((self.length, len(METRICS)))
        self.rewards = np.zeros(self.length)
        self.written: list[dict[str, Any]] = []
        self.actions: list[dict[str, Any]] = []
        self.missed_before[:] = 0.0
        self.seconds = 0

    def add(self) -> None:
        """Add the step that the batch has just taken."""
        for second in range(self.step_seconds[0]):
            for i in range(self.metrics.shape[1]):
                self.metrics[self.seconds, i] = self.step_metrics[second, i, 0]
            self.rewards[self.seconds] = self.step_rewards[second, 0]
            self.seconds += 1
        for c in range(self.missed_before.shape[0]):
            self.missed_in_step[c] = self.missed[0, c] - self.missed_before[c]
            self.missed_before[c] = self.missed[0, c]
        self.actions.append(self._action())

    def entries(self) -> list[dict[str, Any]]:
        """The seconds so far, ``{"timestep", "action", "reward", "metrics"}`` each; a list that grows."""
        for second in range(len(self.written), self.seconds):
            entry = {
                "timestep": second + 1,
                "action": self.actions[second // self.hold],
                "reward": float(self.rewards[second]),
                "metrics": self._metrics(second),
            }
            self.written.append({**entry, **self.stamp})
        return self.written

    def info(self) -> dict[str, Any]:
        """Details of the last step; metrics of several seconds are put together by :data:`OVER_SECONDS`."""
        seconds = int(self.step_seconds[0])
        terms: dict[str, float] = {}
        for i, name in enumerate(self.term_names):
            terms[name] = float(self.terms[i, 0])
        if seconds == 1:
            metrics = self._metrics(self.seconds - 1)
        else:
            metrics = over_seconds([self._metrics(second) for second in range(self.seconds - seconds, self.seconds)])
        found = {
            "timestep": self.seconds,
            "seconds": seconds,
            "metrics": metrics,
            "workload": self.workload(),
            "action_applied": self.actions[len(self.actions) - 1],  # compiled code takes no negative index
            "reward_terms": terms,
            "fleet": self._fleet(),
            "grade_so_far": self._grade_so_far(),
        }
        if self.class_names:
            found["by_class"] = self._by_class()
        return found

    def workload(self) -> dict[str, Any]:
        """Fields of :class:`inferencegym.models.WorkloadState` after the last step."""
        seen = self.observation
        phase = PHASES[self.phases[0, max(0, self.seconds - 1)]]
        return {
            "arrival_rate": float(seen[0, 2]),
            "mean_prompt_len": float(seen[0, 1]),
            "prompt_len_bucket": prompt_bucket(seen[0, 1]),
            # A full queue sums to its limit less a last bit on some processors.
            "queue_depth": int(seen[0, 0] + 1e-9),
            "priority_distribution": [float(seen[0, 9]), float(seen[0, 10]), float(seen[0, 11])],
            "is_burst": phase == "burst",
            "phase": phase,
        }

    def episode(self) -> Episode | None:
        """What grading reads; None before the first second. A metric that is not given is NaN."""
        if not self.seconds:
            return None
        played = np.asarray(self.metrics)[: self.seconds]
        absent = np.full(self.seconds, np.nan)
        columns = {name: played[:, _COLUMN[name]].copy() if name in self.names else absent for name in GRADED_METRICS}
        columns["slo_violations"] = np.rint(columns["slo_violations"])  # whole, as in the entries
        for name in ("batch_size", "kv_budget", "replicas"):
            of_steps = np.array([action.get(name, 0) for action in self.actions], dtype=np.float64)
            columns[name] = of_steps.repeat(self.hold)[: self.seconds]
        return Episode(**columns)

    def _metrics(self, second: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for i, name in enumerate(self.names):
            value = self.metrics[second, self.columns[i]]
            if self.kinds[i] == 0:
                found[name] = float(value)
            elif self.kinds[i] == 1:
                found[name] = int(rint(value))
            else:
                found[name] = bool(value != 0.0)
        return found

    def _grade_so_far(self) -> dict[str, Any]:
        score = self.grade.grade_so_far(0)
        parts = {}
        for i, name in enumerate(self.part_names):
            parts[name] = float(self.grade.parts[i])
        return {"score": score, "breakdown": parts}

    def _by_class(self) -> dict[str, Any]:
        """Queue after the step, and misses in it; to a millionth, because misses are differences of sums."""
        found = {}
        for c, name in enumerate(self.class_names):
            found[name] = {
                "queue_requests": rint(1e6 * self.queue[0, c]) / 1e6,
                "slo_violations": rint(1e6 * self.missed_in_step[c]) / 1e6,
            }
        return found

    def _action(self) -> dict[str, Any]:
        """The action of the last step in JSON form, as applied."""
        f = self.fleet
        action = {
            "kv_budget": float(f[0, 0]),
            "spec_length": int(f[0, 1]),
            "batch_size": int(f[0, 2]),
            "prefill_disagg": bool(f[0, 3] > 0.5),
            "quant_tier": int(f[0, 4]),
        }
        if self.scales:
            action["replicas"] = int(f[0, 7])
        return action

    def _fleet(self) -> dict[str, Any]:
        """What the fleet is set to: the action in force, its age, and replicas that restart, come and go."""
        f = self.fleet
        found = self._action()
        replicas = found.pop("replicas", None)
        found["restarting_share"] = float(f[0, 5])
        found["seconds_since_change"] = int(f[0, 6])
        if replicas is not None:
            found["replicas"] = replicas
            found["replicas_ready"] = int(f[0, 8])
            found["replicas_draining"] = float(f[0, 9])
        # One that is half back still has to restart; the share is a sum that may lack its last bit.
        found["restarting_replicas"] = ceil(round(float(f[0, 5]) * self.n_replicas, 9))
        return found


def over_seconds(metrics: Sequence[Mapping[str, Any]], seconds: Sequence[int] | None = None) -> dict[str, Any]:
    """Metrics of several seconds in one: means, sums, maxima or last values, see :data:`OVER_SECONDS`.

    ``seconds`` are those of each entry of ``metrics``; None: one each.
    """
    together: dict[str, Callable[[list[Any]], Any]] = {**_TOGETHER, "mean": partial(fmean, weights=seconds)}
    return {name: together[OVER_SECONDS[name]]([each[name] for each in metrics]) for name in metrics[0]}


def over_steps(infos: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Infos of steps in a row as one: ``seconds``, ``metrics``, ``by_class`` where they have it, ``grade_so_far``."""
    seconds = [info["seconds"] for info in infos]
    last = infos[len(infos) - 1]  # compiled code takes no negative index
    found = {"seconds": sum(seconds), "metrics": over_seconds([info["metrics"] for info in infos], seconds)}
    if "by_class" in last:
        found["by_class"] = {
            name: {**now, "slo_violations": sum(info["by_class"][name]["slo_violations"] for info in infos)}
            for name, now in last["by_class"].items()
        }
    return {**found, "grade_so_far": last["grade_so_far"]}
