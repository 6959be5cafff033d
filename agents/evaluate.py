"""Scores of agents on held-out traffic: means, confidence intervals, paired differences, regret.

Every agent runs on the same seeds, so differences between agents are paired: the luck of the load cancels. Intervals
are 95% Student t intervals of the mean over seeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from agents.episodes import EpisodeResults, run_episodes
from agents.protocol import Agent, FloatArray
from agents.registry import AGENTS, load_own_agents, make_agent
from agents.seeds import HELD_OUT_SEEDS
from env.families import serving_task
from inferencegym.errors import InferenceGymError, InvalidConfigError
from inferencegym.models import ACTION_FIELDS
from inferencegym.tasks import TaskId, TaskSpec

REFERENCES: Final = ("best_static", "best_adaptive")
"""Solved policies that regret is measured against, in addition to the agents asked for."""


Decide = Callable[[NDArray[np.float32]], NDArray[Any]]
"""Function from a Gymnasium environment's observations (B, n) to actions, one a row."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and its 95% confidence interval (Student t over seeds)."""

    mean: float
    low: float
    high: float

    def within(self, lowest: float, highest: float) -> Interval:
        """The same mean, its interval cut at bounds that no value exceeds."""
        return Interval(self.mean, max(self.low, lowest), min(self.high, highest))

    def to_dict(self) -> dict[str, float]:
        """JSON form."""
        return {"mean": self.mean, "ci95_low": self.low, "ci95_high": self.high}


def interval(values: FloatArray | Sequence[float]) -> Interval:
    """Mean and 95% t interval of independent values (n,); :class:`InvalidConfigError` for fewer than two."""
    from scipy.stats import t

    values = np.asarray(values, dtype=np.float64)
    if len(values) < 2:
        raise InvalidConfigError(f"{len(values)} value: an interval needs the scores of two seeds or more", "values")
    mean = float(values.mean())
    half = float(t.ppf(0.975, len(values) - 1)) * float(values.std(ddof=1)) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def paired(a: FloatArray | Sequence[float], b: FloatArray | Sequence[float]) -> Interval:
    """Mean of ``a - b`` and its 95% interval; both are of the same seeds."""
    return interval(np.subtract(a, b))


@dataclass(frozen=True, slots=True, eq=False)
class Evaluation:
    """Results of an agent on a task: ``scores``, ``returns`` (n,) by seed, ``breakdown`` (n,) by part of the grade."""

    agent: str
    task: TaskSpec
    seeds: tuple[int, ...]
    scores: FloatArray
    returns: FloatArray
    breakdown: Mapping[str, FloatArray]
    clamped: tuple[str, ...] = ()
    """What was clamped of the agent's actions, in words."""

    def to_dict(self) -> dict[str, Any]:
        """JSON form with intervals."""
        return {
            "agent": self.agent,
            "score": interval(self.scores).to_dict(),
            "return": interval(self.returns).to_dict(),
            "breakdown": {name: float(part.mean()) for name, part in self.breakdown.items()},
            "scores": self.scores.tolist(),
            "clamped": list(self.clamped),
        }


def evaluate(
    agent: str | Agent, task: TaskSpec | TaskId, seeds: Sequence[int] = HELD_OUT_SEEDS, name: str = "", **play: Any
) -> Evaluation:
    """Evaluate an agent on a task or its id, one episode per seed.

    The agent is an object, a registered name, or the name of a class of your own, ``package.module:Class``.

    ``play`` are further arguments of :func:`agents.episodes.run_episodes`.
    """
    task = task if isinstance(task, TaskSpec) else serving_task(task)
    label = name or (agent if isinstance(agent, str) else type(agent).__name__)
    if isinstance(agent, str):
        load_own_agents([agent])
        agent = make_agent(agent, task)
    return evaluation_of(label, run_episodes(task, agent, seeds, **play))


def gym_scores(env_id: str, decide: Decide, seeds: Sequence[int] = HELD_OUT_SEEDS, **settings: Any) -> FloatArray:
    """Scores of whole episodes (n,), one per seed, of a policy in the formats of a Gymnasium id with ``settings``."""
    import gymnasium
    from gymnasium.vector import AutoresetMode

    envs: Any = gymnasium.make_vec(env_id, num_envs=len(seeds), autoreset_mode=AutoresetMode.NEXT_STEP, **settings)
    seen, _ = envs.reset(seed=list(seeds))
    scores, left = np.zeros(len(seeds)), np.ones(len(seeds), dtype=np.bool_)
    while left.any():  # rollouts end at different times; what a row plays after its end does not count
        seen, _, terminated, truncated, info = envs.step(decide(seen))
        ended = left & (terminated | truncated)
        if ended.any():
            scores[ended] = info["score"][ended]
            left &= ~ended
    return scores


def evaluation_of(label: str, results: EpisodeResults) -> Evaluation:
    """Evaluation of finished episodes, one row per seed."""
    clamped = tuple(
        f"{name} clamped to {ACTION_FIELDS[name].low:g} to {ACTION_FIELDS[name].high:g} in {count:,} of "
        f"{results.decisions:,} rows"
        for name, count in results.outside.items()
    )
    parts = results.breakdown()
    return Evaluation(label, results.task, results.seeds, results.scores(), results.returns, parts, clamped)


def agents_for(task: TaskSpec, names: Sequence[str]) -> list[str]:
    """Agent names with ``all`` expanded to every registered agent that runs on the task without an argument."""
    chosen: list[str] = []
    for name in names:
        for each in AGENTS if name == "all" else [name]:
            if each in chosen or (name == "all" and not _runs_on(each, task)):
                continue
            chosen.append(each)
    return chosen


def _runs_on(name: str, task: TaskSpec) -> bool:
    try:
        make_agent(name, task)
    except InferenceGymError:  # needs an argument, or no policy of this task is stored
        return False
    return True


def compare(
    task: TaskSpec,
    names: Sequence[str],
    seeds: Sequence[int] = HELD_OUT_SEEDS,
    evaluate_all: Callable[[Sequence[str]], Sequence[Evaluation]] | None = None,
) -> dict[str, Any]:
    """Evaluate agents side by side on the same seeds; ``evaluate_all`` may distribute them over workers.

    Each agent's entry holds its score with interval, the paired difference to the naive agent, and its regret: the
    paired difference of the best known agent to it. Best known is the best mean among the agents asked for and the
    solver's stored policies.
    """
    asked = agents_for(task, names)
    extra = [n for n in ("naive", *REFERENCES) if n not in asked and _runs_on(n, task)]
    wanted = [*asked, *extra]
    results = [evaluate(name, task, seeds) for name in wanted] if evaluate_all is None else evaluate_all(wanted)
    by_name = dict(zip(wanted, results, strict=True))
    best = max(by_name.values(), key=lambda e: float(e.scores.mean()))
    entries = []
    for name in asked:
        entry = by_name[name].to_dict()
        entry["over_naive"] = paired(by_name[name].scores, by_name["naive"].scores).to_dict()
        entry["regret"] = paired(best.scores, by_name[name].scores).to_dict()
        entries.append(entry)
    return {
        "task": task.task_id,
        "seeds": [int(s) for s in seeds],
        "interval": "95% Student t over seeds; differences are paired by seed",
        "best_known": {"agent": best.agent, **interval(best.scores).to_dict()},
        "agents": entries,
    }


def ranks(values: FloatArray) -> FloatArray:
    """Ranks from 1, ties sharing their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    mean_rank = last - 0.5 * (counts - 1)
    result: FloatArray = mean_rank[inverse]
    return result


def bracketed(value: Mapping[str, float], sign: str = "") -> str:
    """A mean and its 95% interval in brackets."""
    return f"{value['mean']:{sign}.3f} [{value['ci95_low']:{sign}.3f}, {value['ci95_high']:{sign}.3f}]"


def of_scores(value: Mapping[str, float]) -> dict[str, float]:
    """A stored mean of scores with its interval cut at 0 and 1: no score is below or above."""
    return Interval(value["mean"], value["ci95_low"], value["ci95_high"]).within(0.0, 1.0).to_dict()


def bracketed_score(value: Mapping[str, float]) -> str:
    """:func:`bracketed` of a mean of scores."""
    return bracketed(of_scores(value))


def spearman(a: FloatArray, b: FloatArray) -> float:
    """Spearman's rank correlation of two samples (n,)."""
    return float(np.corrcoef(ranks(a), ranks(b))[0, 1])
