"""Controllers of the cap on agent sessions: published rules in our words, simple ones, and an oracle.

A policy is a function from an observation by name (:data:`inferencegym.rollouts.OBSERVATION_FIELDS`) to a cap; a new
one is made for each episode. :data:`POLICIES` describes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

import numpy as np

from env.family import EpisodeEnv, Policy
from env.rollouts.env import RolloutEnv, RolloutRow, draw_row
from env.rollouts.tasks import RolloutConfig, RolloutTask, get_rollout_task, rollout_config
from inferencegym.errors import InvalidConfigError
from inferencegym.rollouts import FIRST_CAP, MAX_SESSIONS, Fit, Seen, bounded
from simulator.events.requests import FloatArray

CAPS: Final = (1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 19, 22, 26, 32, 40, 50, 64, 96)
"""Constant caps that the oracle tries."""


class Aimd:
    """Hit rate with additive increase and multiplicative decrease, after CONCUR (arXiv 2601.22705).

    Where the hit rate of a second falls below ``low`` the cap is cut to ``cut`` of the sessions in flight, at most once
    in ``wait_s``; above ``high`` it grows by one, if it is in use.
    """

    def __init__(self, low: float = 0.7, high: float = 0.85, cut: float = 0.8, wait_s: float = 3.0) -> None:
        self.low, self.high, self.cut, self.wait_s = low, high, cut, wait_s
        self.cap, self.last_cut_s = float(FIRST_CAP), -math.inf

    def __call__(self, seen: Seen) -> int:
        if seen["prefix_queried_tokens"] > 0:
            hit = seen["prefix_hit_tokens"] / seen["prefix_queried_tokens"]
            if hit < self.low and seen["time_s"] - self.last_cut_s > self.wait_s and seen["sessions_paused"] == 0:
                self.cap = max(1.0, self.cut * min(self.cap, seen["sessions_in_flight"]))
                self.last_cut_s = seen["time_s"]
            elif hit > self.high and seen["sessions_in_flight"] >= self.cap:
                self.cap += 1.0
        return bounded(self.cap)


class KvTarget:
    """KV usage with additive increase and multiplicative decrease, after prime-rl's first controller (PR #2908).

    The cap grows while the usage that the engine reports is below ``target`` and has settled, by less the nearer it is.
    It is cut where usage passes ``high`` or requests are preempted. The engine counts blocks of idle sessions as free,
    so the usage does not show what their contexts need.
    """

    def __init__(self, target: float = 0.8, high: float = 0.95, cut: float = 0.8) -> None:
        self.target, self.high, self.cut = target, high, cut
        self.cap, self.usage = float(FIRST_CAP), 0.0

    def __call__(self, seen: Seen) -> int:
        usage, settled = seen["kv_usage"], abs(seen["kv_usage"] - self.usage) < 0.05
        self.usage = usage
        if usage > self.high or seen["preemptions"] > 0:
            self.cap = max(1.0, self.cut * self.cap)
        elif usage < self.target and settled and seen["sessions_in_flight"] >= bounded(self.cap):
            self.cap += max(1.0, 0.1 * self.cap * (self.target - usage) / self.target)
        return bounded(self.cap)


class Budget:
    """Admission against a budget of contexts, after prime-rl's later controllers (PR #3285, #3556).

    A session is taken to grow to ``peak`` times the mean conversation in flight; as many are let in as fit below
    ``soft`` of the pool at that length. Growth tapers with usage, and preemptions cut the cap.
    """

    def __init__(self, soft: float = 0.8, peak: float = 2.0, growth: float = 0.2) -> None:
        self.soft, self.peak, self.growth = soft, peak, growth
        self.cap = float(FIRST_CAP)

    def __call__(self, seen: Seen) -> int:
        if seen["preemptions"] > 0:
            self.cap = max(1.0, 0.8 * self.cap)
        elif seen["sessions_in_flight"] >= bounded(self.cap):
            self.cap += self.cap * self.growth * max(0.0, 1.0 - seen["kv_usage"] / self.soft) / 10.0
        if seen["context_mean_tokens"] > 0:
            most = self.soft * seen["kv_pool_tokens"] / (self.peak * seen["context_mean_tokens"])
            return bounded(min(self.cap, max(1.0, most)))
        return bounded(self.cap)


def oracle_constant(task: RolloutTask, seed: int, config: RolloutConfig) -> int:
    """The constant cap that is best for one workload; it plays the episode with each of :data:`CAPS`."""
    return max(CAPS, key=lambda cap: play_row(draw_row(task, seed, config), lambda _: cap))


def play_row(row: RolloutRow, policy: Callable[[dict[str, float]], int]) -> float:
    """Play an episode to its end; returns its score."""
    score = 0.0
    while not row.done:
        score += row.play(policy(row.observation()))
    return score


def scores(make: Callable[[], Callable[[Seen], int]], seeds: Sequence[int], task: RolloutTask) -> FloatArray:
    """Scores of a controller, one for each seed; ``make`` makes a new one for each episode."""
    return np.array([play_row(draw_row(task, seed, RolloutConfig()), make()) for seed in seeds])


POLICIES: Final[Mapping[str, str]] = {
    "no_cap": "Lets every session run.",
    "constant": "At most 16 sessions.",
    "oracle_constant": "The constant cap that is best for this very workload, found by playing it.",
    "aimd": "One more session while the cache hits, a cut when it misses (CONCUR).",
    "kv_target": "Grows until running requests hold 80% of the KV cache (prime-rl, first controller).",
    "budget": "Lets in what fits if conversations double in length (prime-rl, later controllers).",
    "fit": "Keeps the conversations in flight below 90% of the KV cache.",
}
"""Policies that a server offers, by name, each with a description."""

_MAKERS: Final[Mapping[str, Callable[[], Callable[[Seen], int]]]] = {
    "no_cap": lambda: partial(_always, MAX_SESSIONS),
    "constant": lambda: partial(_always, 16),
    "aimd": Aimd,
    "kv_target": KvTarget,
    "budget": Budget,
    "fit": Fit,
}


def make_controller(name: str) -> Callable[[Seen], int]:
    """A new controller by name; ``constant:N`` is a cap of N. Raises InvalidConfigError listing the names."""
    kind, _, number = name.partition(":")
    if kind == "constant" and number.isdigit() and 1 <= int(number) <= MAX_SESSIONS:
        return partial(_always, int(number))
    if name not in _MAKERS:
        raise InvalidConfigError(
            f"policy {name!r} does not control rollouts: one of {', '.join(_MAKERS)}, or constant:N with N from 1 to "
            f"{MAX_SESSIONS}; gym_scores of inferencegym.learning scores a policy of your own"
        )
    return _MAKERS[name]()


def _always(cap: int, _: Seen) -> int:
    return cap


def make_policy(name: str, env: EpisodeEnv) -> Policy:
    """A policy for one episode. Raises InvalidConfigError for an unknown name."""
    assert isinstance(env, RolloutEnv)
    if name == "oracle_constant":
        config = rollout_config(env.config_dict())
        return partial(_always, oracle_constant(get_rollout_task(env.task_id), env.seed, config))
    return make_controller(name)
