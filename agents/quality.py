"""Quality of a task in numbers: what better control gains, what is left to gain, and what pays without serving.

Five figures, each from episodes that anybody can play again: difficulty separation (naive, rules, best), headroom (from
the best known policy to a clairvoyant ceiling), adversarial floor (random actions, a constant that serves few),
gameability (what a constant or a timetable earns that observes nothing, and whether refusing requests beats an engine's
defaults) and the adaptive gap (score of the best policy that observes, minus that of the best constant).

Agents that observe are chosen on validation seeds, timetables are searched on training seeds, and all are scored on
held-out seeds. The best constant is chosen with hindsight: adapting gains at least the gap. The searches are short, so
the ceiling and the timetable are lower bounds.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from agents.episodes import EpisodeResults, run_episodes
from agents.evaluate import agents_for, bracketed, interval, paired
from agents.policies.constant import ConstantAgent, RandomAgent
from agents.policies.switching_policy import ActionsAgent
from agents.protocol import Agent, FloatArray
from agents.registry import AGENTS, make_agent
from agents.search.timetable import Timetables, TimetableSearch
from agents.seeds import TRAINING_SEEDS, VALIDATION_SEEDS, held_out_seeds
from inferencegym.spaces.actions import action_mask, from_row, snap
from inferencegym.tasks import STATIC_BELOW, TaskSpec

FEW: Final = 0.5
"""A policy serves few if it leaves more than this share of the requests refused, or waiting at the end."""
GRID: Final = {
    "kv_budget": (0.1, 0.4, 0.7, 0.95),
    "spec_length": (0, 2),
    "batch_size": (1, 8, 32, 128, 512),
    "prefill_disagg": (0, 1),
    "quant_tier": (0, 1, 2),
}
"""Constants that are tried, from serving nobody to serving as many as fit."""
GRID_SEEDS: Final = TRAINING_SEEDS[:2]
TIMETABLE_SEEDS: Final = TRAINING_SEEDS[:8]
TIMETABLES: Final = 24
"""Timetables of a generation, each played on all of :data:`TIMETABLE_SEEDS`."""
CEILING_SEEDS: Final = 2
CLAIRVOYANT: Final = 96
"""Timetables of a generation that are played on one seed of the ceiling."""
COUNTED: Final = ("admitted", "rejected", "queue_requests")


@dataclass(frozen=True, slots=True, eq=False)
class Played:
    """Held-out episodes of a policy: ``scores`` (n,), and the share of all requests that was left unserved."""

    name: str
    scores: FloatArray
    unserved: float
    results: EpisodeResults

    @property
    def mean(self) -> float:
        """Mean score."""
        return float(self.scores.mean())

    def to_dict(self) -> dict[str, Any]:
        """JSON form; ``knobs`` are those of a constant policy."""
        actions = self.results.actions
        constant = bool((actions == actions[0, 0]).all())
        return {
            "policy": self.name,
            "score": interval(self.scores).to_dict(),
            "unserved_share": self.unserved,
            "knobs": from_row(actions[0, 0]).to_dict() if constant else None,
        }


def quality(task: TaskSpec, episodes: int = 10, generations: int = 20) -> dict[str, Any]:
    """The report of a task as JSON data, from this many held-out episodes; ``generations`` of each timetable search."""
    seeds = held_out_seeds(episodes)

    def play(name: str, agent: Agent) -> Played:
        results = run_episodes(task, agent, seeds, keep=COUNTED)
        return Played(name, results.scores(), float(_unserved(results).mean()), results)

    agents = {name: make_agent(name, task) for name in agents_for(task, ["all"])}
    played = {name: play(name, agent) for name, agent in agents.items()}
    grid, refusing_row = _constants(task)
    constants = [played[name] for name, agent in agents.items() if isinstance(agent, ConstantAgent)]
    observing = [name for name, a in agents.items() if not isinstance(a, ConstantAgent | RandomAgent)]

    constants.append(play("constant of the grid", ActionsAgent(grid[None], episodes)))
    # With hindsight, so that the adaptive gap is not a constant's bad luck.
    best_constant = max(constants, key=lambda each: each.mean)
    chosen_by = {name: float(run_episodes(task, agents[name], VALIDATION_SEEDS).scores().mean()) for name in observing}
    best_observing = played[max(observing, key=lambda name: chosen_by[name])]
    best_rules = played[max((n for n in observing if not AGENTS[n].stored), key=lambda name: chosen_by[name])]

    start = best_constant.results.actions[0, 0]
    timetable, _ = TimetableSearch(task, TIMETABLE_SEEDS, TIMETABLES).best(start[None, None], generations)
    blind = play("timetable", Timetables(np.tile(timetable, (episodes, 1, 1))))
    best = max(best_constant, best_observing, blind, key=lambda each: each.mean)
    ceiling = [
        TimetableSearch(task, [seed], CLAIRVOYANT).best(best.results.actions[None, :, row], generations)[1]
        for row, seed in enumerate(seeds[:CEILING_SEEDS])
    ]
    known = float(best.scores[:CEILING_SEEDS].mean())

    few = [each for each in played.values() if each.unserved > FEW]
    if refusing_row is not None:
        few.append(play("constant that serves few", ActionsAgent(refusing_row[None], episodes)))
    refusing = max(few, key=lambda each: each.mean, default=None)
    gap = paired(best_observing.scores, best_constant.scores)
    defaults = played["vllm_defaults"]
    pays = refusing is not None and refusing.mean > defaults.mean and defaults.unserved <= FEW < refusing.unserved
    return {
        "task": task.task_id,
        "seeds": [int(seed) for seed in seeds],
        "generations": generations,
        "interval": "95% Student t over seeds; differences are paired by seed",
        "difficulty_separation": {
            "naive": played["naive"].to_dict(),
            "rules": best_rules.to_dict(),
            "best": best.to_dict(),
            "spread": paired(best.scores, played["naive"].scores).to_dict(),
        },
        "headroom": {
            "seeds": CEILING_SEEDS,
            "best_known": known,
            "ceiling": float(np.mean(ceiling)),
            "gap": float(np.mean(ceiling)) - known,
        },
        "adversarial_floor": {
            "random": played["random"].to_dict(),
            "serves_few": None if refusing is None else refusing.to_dict(),
        },
        "gameability": {
            "best_constant": best_constant.to_dict(),
            "best_timetable": blind.to_dict(),
            "observing_over_timetable": paired(best_observing.scores, blind.scores).to_dict(),
            "vllm_defaults": defaults.to_dict(),
            "refusing_pays": pays,
        },
        "adaptive_gap": {
            "policy": best_observing.to_dict(),
            "over_constant": gap.to_dict(),
            "static": gap.mean < STATIC_BELOW,
        },
    }


def text(report: dict[str, Any]) -> str:
    """A report as lines for a terminal."""
    separation, floor, game = report["difficulty_separation"], report["adversarial_floor"], report["gameability"]
    room, gap, few = report["headroom"], report["adaptive_gap"], report["adversarial_floor"]["serves_few"]
    n = len(report["seeds"])
    refusing = "no policy that serves few was found"
    if few is not None:
        share = f"{few['unserved_share']:.0%} of the requests unserved"
        refusing = f"serving few {_named(few)}, {share}"
    significant = gap["over_constant"]["ci95_low"] > 0.0
    pays = "changing settings pays" if significant else "changing settings pays, but not significantly"
    verdict = "static (tuning, not control)" if gap["static"] else pays
    lines = [
        f"task {report['task']}: {n} held-out episodes, searches of {report['generations']} generations",
        f"  from naive to best     naive {_mean(separation['naive'])}, rules {_named(separation['rules'])}, "
        f"best {_named(separation['best'])}: spread {separation['spread']['mean']:.3f}",
        f"  foresight              at least {room['gap']:+.3f}: a timetable that knows the future "
        f"{room['ceiling']:.3f}, best policy {room['best_known']:.3f}, on {room['seeds']} of the seeds",
        f"  little effort          random {_mean(floor['random'])}; {refusing}",
        f"  without observing      best constant {_mean(game['best_constant'])}, timetable at least "
        f"{_mean(game['best_timetable'])} (searched briefly: a lower bound, no verdict on observing)",
        f"  refusing requests      {'PAYS' if game['refusing_pays'] else 'does not pay'}: vLLM's defaults "
        f"{_mean(game['vllm_defaults'])}",
        f"  adaptive gap           {bracketed(gap['over_constant'], '+')} of {_named(gap['policy'])} over the best "
        f"constant: {verdict}",
    ]
    return "\n".join(lines)


def _constants(task: TaskSpec) -> tuple[FloatArray, FloatArray | None]:
    """The best constant (k,) of the grid on training seeds, and the best of those that serve few, if there are any."""
    axes: list[tuple[float, ...]] = [*GRID.values()]
    if task.fleet.max_replicas is not None:
        axes.append(tuple(sorted({1, task.fleet.n_replicas, task.fleet.max_replicas})))
    grid = np.array([*itertools.product(*axes)], dtype=np.float64)
    actions = np.unique(snap(grid, action_mask(task.active_actions), task.fleet), axis=0)
    n = len(GRID_SEEDS)
    agent = ActionsAgent(actions, n)
    results = run_episodes(task, agent, GRID_SEEDS, n_rows=len(actions) * n, keep=COUNTED)
    scores = results.scores().reshape(-1, n).mean(axis=1)
    few = np.flatnonzero(_unserved(results).reshape(-1, n).mean(axis=1) > FEW)
    return actions[scores.argmax()], actions[few[scores[few].argmax()]] if len(few) else None


def _unserved(results: EpisodeResults) -> FloatArray:
    """Share of each row's requests that was refused, or still waits at the end, (B,)."""
    admitted, rejected = (results.metrics[name].sum(axis=0) for name in ("admitted", "rejected"))
    left = rejected + results.metrics["queue_requests"][-1]
    share: FloatArray = left / np.maximum(admitted + left, 1.0)
    return share


def _mean(entry: dict[str, Any]) -> str:
    return f"{entry['score']['mean']:.3f}"


def _named(entry: dict[str, Any]) -> str:
    return f"{_mean(entry)} ({entry['policy']})"
