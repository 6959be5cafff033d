"""Timetables: actions by the clock, which observe nothing, and the search for the best of them.

Searched on training seeds, the best timetable says what a task pays for knowing its schedule alone: feedback is worth
what a policy scores above it. Searched on one episode's own seed it is clairvoyant: a lower bound of what that episode
allows, and a ceiling that no policy without foresight is expected to reach.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from agents.episodes import run_episodes
from agents.protocol import FloatArray
from agents.search.solver import RESTARTING
from inferencegym.models import ACTION_FIELDS, OBSERVATION_FIELDS
from inferencegym.spaces.formats import knob_levels
from inferencegym.tasks import TaskSpec

PARENTS: Final = 8
SHORTEST_S: Final = 5
"""Seconds of the shortest stretch that a change covers; the longest is the whole episode."""
_TIMESTEP: Final = list(OBSERVATION_FIELDS).index("timestep")


class Timetables:
    """Agent of N timetables side by side: row b plays ``actions[b // rows_per_timetable]`` of ``actions`` (N, T, k)."""

    def __init__(self, actions: FloatArray, rows_per_timetable: int = 1) -> None:
        self._actions, self._rows = actions, rows_per_timetable

    def reset(self, n_rows: int) -> None:
        """Do nothing: the clock is observed."""

    def act(self, observation: FloatArray) -> FloatArray:
        """The knobs (B, k) of this second."""
        now = self._actions[:, int(observation[0, _TIMESTEP])]
        return np.repeat(now, self._rows, axis=0)


class TimetableSearch:
    """Evolution of timetables from some first ones, by their mean score on some seeds.

    A generation keeps the best :data:`PARENTS` and makes ``children`` of them: each takes a stretch of another parent,
    or has one knob set to another level for a stretch.
    """

    def __init__(self, task: TaskSpec, seeds: Sequence[int], children: int, seed: int = 0) -> None:
        self.task, self.seeds, self._children = task, list(seeds), children
        self._rng = np.random.default_rng(seed)
        levels = knob_levels(task.fleet.max_replicas)
        live = [i for i, name in enumerate(ACTION_FIELDS) if name in task.active_actions]
        self._knobs = [*live, *range(len(ACTION_FIELDS), len(levels))]
        self._levels = levels

    def best(self, starts: FloatArray, generations: int) -> tuple[FloatArray, float]:
        """The best timetable (T, k) found from timetables (N, T, k) or constant actions (N, 1, k), and its score."""
        parents = np.broadcast_to(starts, (len(starts), self.task.episode_length, starts.shape[-1])).copy()
        scores = self._scores(parents)
        for _ in range(generations):
            children = np.stack([self._child(parents) for _ in range(self._children)])
            everyone = np.concatenate([parents, children])
            values = np.concatenate([scores, self._scores(children)])
            kept = np.argsort(-values, kind="stable")[:PARENTS]
            parents, scores = everyone[kept], values[kept]
        return parents[0], float(scores[0])

    def _child(self, parents: FloatArray) -> FloatArray:
        rng, length = self._rng, self.task.episode_length
        child: FloatArray = parents[rng.integers(len(parents))].copy()
        stretch = round(float(np.exp(rng.uniform(np.log(min(SHORTEST_S, length)), np.log(length)))))
        begin = int(rng.integers(1 - stretch, length))
        where = slice(max(0, begin), begin + stretch)
        if rng.random() < 0.3:
            child[where] = parents[rng.integers(len(parents)), where]
        for _ in range(1 + int(rng.random() < 0.3)):
            knob = self._knobs[rng.integers(len(self._knobs))]
            if knob in RESTARTING:  # else replicas would restart in the middle
                where = slice(0, length)
            child[where, knob] = self._other_level(knob, child[where, knob][0])
        return child

    def _other_level(self, knob: int, value: float) -> float:
        """A neighbouring level, or now and then any."""
        levels, rng = self._levels[knob], self._rng
        near = int(np.abs(levels - value).argmin())
        step = int(rng.integers(1, 3)) * (1 if rng.random() < 0.5 else -1)
        index = int(rng.integers(len(levels))) if rng.random() < 0.3 else near + step
        return float(levels[np.clip(index, 0, len(levels) - 1)])

    def _scores(self, timetables: FloatArray) -> FloatArray:
        n, agent = len(self.seeds), Timetables(timetables, len(self.seeds))
        played = run_episodes(self.task, agent, self.seeds, n_rows=len(timetables) * n)
        means: FloatArray = played.scores().reshape(len(timetables), n).mean(axis=1)
        return means
