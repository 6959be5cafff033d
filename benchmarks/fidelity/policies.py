"""Do policies that the fluid model scores high score high in the discrete-event reference, which follows every request?

    python -m benchmarks.fidelity.policies               every task: results/policy_fidelity.json, .md and the figure
    python -m benchmarks.fidelity.policies --task 1      one task; the others keep their results
    python -m benchmarks.fidelity.policies --set agents  one of the sets below; the others keep their results

Every policy plays whole episodes second by second in both, with the same seeds: the same arrivals, prompts and operator
times. In the reference its observations come from the reference. There are four sets of policies:

- every agent, and canaries: agents whose knobs change in ways that once exploited errors of a fluid model,
- a ladder: random constant actions, random pairs of settings behind simple gates, and the agents,
- the best of a search for exploits among timetables (`benchmarks/fidelity/timetables.py`),
- neighbours of the solver's policies: of many random changes, those that the fluid model scores highest.

The figure needs the extra `report` (matplotlib).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import Progress

from agents.episodes import EpisodeResults, run_episodes
from agents.evaluate import agents_for, spearman
from agents.policies.constant import RandomAgent
from agents.policies.stored import policy_path, read_constant_policy, read_switching_policy
from agents.policies.switching_policy import ModeAgent, ModeParams
from agents.protocol import Agent, FloatArray
from agents.registry import make_agent
from agents.search.solver import RESTARTING, SLOWEST_RAMP, Solver, gate_library, pair_policies
from agents.seeds import HELD_OUT_SEEDS, TRAINING_SEEDS
from benchmarks.fidelity.timetables import N_BRED, Timetables, best_timetables
from benchmarks.report import FIGURES, store, stored, table
from env.dynamics import DynamicsFactory, FluidFleet
from env.reference import ReferenceFleet
from inferencegym.models import ACTION_FIELDS
from inferencegym.spaces.actions import ACTION_LOW, action_mask, snap, to_row
from inferencegym.spaces.observations import OBSERVATION_SIZE
from inferencegym.tasks import TaskSpec, get_calibration, list_tasks

KV_BUDGET, SPEC_LENGTH, BATCH_SIZE, PREFILL, TIER = range(len(ACTION_FIELDS))
LADDER_TASKS: Final = ("1", "2", "3")
SEARCH_TASKS: Final = ("2", "3")
COMPONENT_TASKS: Final = ("3",)
"""Tasks whose components the document shows."""
BREEDING_SEEDS: Final = 2
"""Seeds for the search of timetables; the best are compared on more seeds."""
TIMETABLES_AT_ONCE: Final = 500

DYNAMICS: Final[Mapping[str, DynamicsFactory]] = {
    "fluid": FluidFleet,
    "reference": ReferenceFleet,
    "drain": partial(ReferenceFleet, rolling_restart="drain"),
}
"""Dynamics that play the policies, by column; the last one is for tasks with knobs that restart replicas."""

KINDS: Final = ("ladder", "search", "near")
SETS: Final = ("agents", *KINDS)

SEARCHED: Final = {"search": "timetables", "near": "changes of the solver's policies"}
"""Space of a search."""

HEADS: Final = {"fluid": "fluid model", "reference": "reference", "drain": "reference, drain"}


LADDER: Final = 50
"""Policies of a ladder."""
TRIED: Final = 1500
"""Random timetables of a search."""
CHANGED: Final = 600
"""Changes of the solver's policies that are tried."""
KEPT: Final = 30
"""Best timetables and changes, which play in the reference too."""
SEARCH_SEEDS: Final = TRAINING_SEEDS[:4]
"""Seeds for the search, and for the policies that it returns."""


class Change(NamedTuple):
    """A change of one knob of an agent: ``change``, in the last ``for_s`` of every ``every_s`` seconds."""

    knob: int
    change: Callable[[FloatArray], FloatArray]
    every_s: int
    for_s: int


CANARIES: Final[Mapping[str, Change]] = {
    "KV dips": Change(KV_BUDGET, lambda own: np.full_like(own, ACTION_LOW[KV_BUDGET]), 10, 1),
    "speculation toggles": Change(SPEC_LENGTH, lambda own: np.where(own > 0.0, 0.0, 4.0), 2, 1),
    "batch toggles": Change(BATCH_SIZE, lambda own: np.minimum(own, 64.0), 2, 1),
    "prefill toggles": Change(PREFILL, lambda own: 1.0 - own, 40, 20),
}


class Canary:
    """An agent that changes one knob of another agent at times."""

    def __init__(self, agent: Agent, change: Change) -> None:
        self._agent = agent
        self._change = change
        self._step = 0

    def reset(self, n_rows: int) -> None:
        """Start new episodes."""
        self._agent.reset(n_rows)
        self._step = 0

    def act(self, observation: FloatArray) -> FloatArray:
        """The agent's knobs (B, 5); one of them is changed while the change is on."""
        knobs = np.array(self._agent.act(observation))
        knob, change, every_s, for_s = self._change
        if self._step % every_s >= every_s - for_s:
            knobs[:, knob] = change(knobs[:, knob])
        self._step += 1
        return knobs


def canaries(task: TaskSpec) -> dict[str, Callable[[], Agent]]:
    """Canaries for the task's live knobs, on top of the heuristic."""
    live = action_mask(task.active_actions)

    def make(change: Change) -> Agent:
        return Canary(make_agent("heuristic", task), change)

    return {f"heuristic, {name}": partial(make, each) for name, each in CANARIES.items() if live[each.knob]}


def random_settings(task: TaskSpec, n: int, seed: int) -> FloatArray:
    """Random knobs (n, 5) of a task."""
    agent = RandomAgent(seed)
    agent.reset(n)
    return snap(agent.act(np.zeros((n, OBSERVATION_SIZE))), action_mask(task.active_actions))


def ladder_policies(task: TaskSpec, n: int) -> ModeParams:
    """Random policies of a task, the same in every run: half keep one setting, half switch between two."""
    calm, flood = random_settings(task, n, 1), random_settings(task, n, 2)
    flood[: n // 2] = calm[: n // 2]
    return pair_policies(calm, flood, np.random.default_rng(3).choice(gate_library(task), n))


def near_solved(task: TaskSpec, n: int) -> ModeParams:
    """Random changes of the solver's policies, small and large, the same in every run.

    Half of them are around the best adaptive policy, half around the best constant action, behind the same gates.
    """
    rng = np.random.default_rng(4)
    solved = read_switching_policy(policy_path("best_adaptive", task.task_id))
    static = to_row(read_constant_policy(policy_path("best_static", task.task_id)))
    starts = solved.with_settings(np.stack([solved.settings[0], np.tile(static, (solved.n_modes, 1))]))
    tried = starts.select(np.arange(n) % 2)
    settings, shape, reach = tried.settings, (n, solved.n_modes), rng.random((n, 1))
    settings[..., KV_BUDGET] *= np.exp(0.25 * reach * rng.standard_normal(shape))
    settings[..., BATCH_SIZE] *= np.exp(0.35 * reach * rng.standard_normal(shape))
    other = random_settings(task, n * solved.n_modes, 5).reshape(settings.shape)
    for knob in (SPEC_LENGTH, PREFILL, TIER):
        redrawn = rng.random(shape) < 0.15 * reach
        settings[..., knob] = np.where(redrawn, other[..., knob], settings[..., knob])
    gate = tried.gate * (1.0 + 0.1 * reach[..., None] * rng.standard_normal(tried.gate.shape))
    ramp = np.clip(tried.ramp * np.exp(0.5 * reach[:, 0] * rng.standard_normal(n)), SLOWEST_RAMP, 1.0)
    return ModeParams(settings, gate, tried.stay, ramp)


def best_near_solved(task: TaskSpec) -> ModeParams:
    """The policies near the solver's that the fluid model scores highest."""
    tried = near_solved(task, CHANGED)
    values = Solver(task, get_calibration(task.task_id)).values_of_policies(tried, SEARCH_SEEDS)
    return tried.select(np.argsort(-values)[:KEPT])


def exploits(task: TaskSpec) -> FloatArray:
    """Actions (T, N, 5) of the best timetables of a search in the fluid model."""
    seeds = SEARCH_SEEDS[:BREEDING_SEEDS]

    def values(actions: FloatArray) -> FloatArray:
        parts = np.array_split(np.arange(actions.shape[1]), -(-actions.shape[1] // TIMETABLES_AT_ONCE))
        scores = [
            run_episodes(task, Timetables(actions[:, part], len(seeds)), seeds, n_rows=len(part) * len(seeds)).scores()
            for part in parts
        ]
        mean: FloatArray = np.concatenate(scores).reshape(-1, len(seeds)).mean(axis=1)
        return mean

    return best_timetables(task, values, TRIED, KEPT)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--task", action="append", help="task id, repeatable (default: all)")
    parser.add_argument("--set", action="append", choices=SETS, help="set of policies, repeatable (default: all)")
    options = parser.parse_args(arguments)
    sets = options.set or SETS
    known = stored("policy_fidelity")["tasks"] if options.task or options.set else {}
    for task in list_tasks(include_recorded=True):
        if not options.task or str(task.task_id) in options.task:
            before = known.get(str(task.task_id), {})
            known[str(task.task_id)] = {**before, **measure(task, sets)}
            store("policy_fidelity", {"tasks": known}, markdown(known))
    print(markdown(known))
    draw(known, FIGURES / "policy_fidelity.png")


def measure(task: TaskSpec, sets: Sequence[str]) -> dict[str, Any]:
    """Grades, and parts of grades, of every policy of the sets on a task, in the fluid model and in the reference."""
    began, task_id = time.perf_counter(), str(task.task_id)
    result: dict[str, Any] = {}
    agents = {name: partial(make_agent, name, task) for name in agents_for(task, ["all"])}
    if "agents" in sets:
        seeds = HELD_OUT_SEEDS[:5]
        played = {label: play_all(task, label, make, seeds) for label, make in {**agents, **canaries(task)}.items()}
        result["seeds"] = list(seeds)
        result["agents"] = {
            label: {column: told(each) for column, each in row.items()} for label, row in played.items()
        }
    if "ladder" in sets and task_id in LADDER_TASKS:
        seeds = HELD_OUT_SEEDS[:2]
        ladder = ladder_policies(task, LADDER - len(agents))
        found = side_by_side(task, "ladder", partial(ModeAgent, ladder, task, len(seeds)), len(ladder), seeds)
        for name, make in agents.items():
            for column, grades in side_by_side(task, name, make, 1, seeds).items():
                found[column] += grades
        result["ladder"] = ranking(found, seeds)
    seeds = SEARCH_SEEDS
    if "search" in sets and task_id in SEARCH_TASKS:
        actions = exploits(task)
        found = side_by_side(task, "exploits", partial(Timetables, actions, len(seeds)), actions.shape[1], seeds)
        result["search"] = {"tried": TRIED + N_BRED, **ranking(found, seeds)}
    if "near" in sets and task_id in SEARCH_TASKS:
        near = best_near_solved(task)
        found = side_by_side(task, "near the solver's", partial(ModeAgent, near, task, len(seeds)), len(near), seeds)
        result["near"] = {"tried": CHANGED, **ranking(found, seeds)}
    result["seconds"] = round(time.perf_counter() - began)
    return result


def play_all(task: TaskSpec, label: str, make: Callable[[], Agent], seeds: Sequence[int]) -> dict[str, EpisodeResults]:
    """Episodes of an agent by column."""
    results = {column: play(task, label, column, make(), seeds) for column in ("fluid", "reference")}
    if action_mask(task.active_actions)[RESTARTING].any():
        settings = results["reference"].actions[..., RESTARTING]
        # An agent that never causes a restart plays the same episode.
        restarts = (settings != settings[0]).any()
        results["drain"] = play(task, label, "drain", make(), seeds) if restarts else results["reference"]
    return results


def play(
    task: TaskSpec, label: str, column: str, agent: Agent, seeds: Sequence[int], n_rows: int | None = None
) -> EpisodeResults:
    """Episodes of an agent in the fluid model or the reference, with a progress bar."""
    with Progress(console=Console(stderr=True)) as bar:
        shown = bar.add_task(f"task {task.task_id}, {label}, {HEADS[column]}", total=task.episode_length)
        return run_episodes(
            task, agent, seeds, n_rows=n_rows, dynamics=DYNAMICS[column], after_step=partial(bar.advance, shown)
        )


def side_by_side(
    task: TaskSpec, label: str, make: Callable[[], Agent], n_policies: int, seeds: Sequence[int]
) -> dict[str, list[float]]:
    """Mean score of each of several policies in the fluid model and in the reference."""
    found = {}
    for column in ("fluid", "reference"):
        scores = play(task, label, column, make(), seeds, n_policies * len(seeds)).scores()
        found[column] = scores.reshape(-1, len(seeds)).mean(axis=1).tolist()
    return found


def told(results: EpisodeResults) -> dict[str, Any]:
    """Mean score, and means of its parts."""
    parts = {name: round(float(part.mean()), 4) for name, part in results.breakdown().items()}
    return {"score": round(float(results.scores().mean()), 4), "parts": parts}


def ranking(found: Mapping[str, Sequence[float]], seeds: Sequence[int]) -> dict[str, Any]:
    """Agreement of the reference's ranking with the fluid model's."""
    fluid, reference = (np.array(found[column]) for column in ("fluid", "reference"))
    gap = fluid - reference
    return {
        "seeds": list(seeds),
        "spearman": round(spearman(fluid, reference), 4),
        "mean_gap": round(float(gap.mean()), 4),
        "largest_gap": round(float(gap.max()), 4),
        **{column: [round(grade, 4) for grade in grades] for column, grades in found.items()},
    }


def markdown(tasks: Mapping[str, Any]) -> str:
    """The tables of the document."""
    lines = ["<!-- written by benchmarks/fidelity/policies.py; do not edit -->"]
    details = ["", "<!-- details -->"]
    for task_id, result in tasks.items():
        rows = result["agents"]
        columns = list(next(iter(rows.values())))
        grades = ["", f"**Task {task_id}**: mean score over {len(result['seeds'])} held-out seeds.", ""]
        grades += table(
            ["policy", *(HEADS[column] for column in columns)],
            [[name, *(f"{row[column]['score']:.3f}" for column in columns)] for name, row in rows.items()],
        )
        if any(kind in result for kind in KINDS):
            lines += grades
        else:
            details += grades
        if task_id in COMPONENT_TASKS:
            parts = list(next(iter(rows.values()))["fluid"]["parts"])
            details += ["", f"Components on task {task_id}, fluid model / reference:", ""]
            details += table(
                ["policy", *(part.replace("_", " ") for part in parts)],
                [
                    [name, *(f"{row['fluid']['parts'][p]:.2f} / {row['reference']['parts'][p]:.2f}" for p in parts)]
                    for name, row in rows.items()
                ],
            )
    ranked = [
        [
            task_id,
            f"ladder of {len(result[kind]['fluid'])}"
            if kind == "ladder"
            else f"best {len(result[kind]['fluid'])} of {result[kind]['tried']:,} {SEARCHED[kind]}",
            len(result[kind]["seeds"]),
            f"{min(result[kind]['fluid']):.3f} to {max(result[kind]['fluid']):.3f}",
            f"{result[kind]['spearman']:.3f}",
            *(f"{result[kind][name]:+.3f}" for name in ("mean_gap", "largest_gap")),
        ]
        for task_id, result in tasks.items()
        for kind in KINDS
        if kind in result
    ]
    if ranked:
        heads = ["task", "policies", "seeds", "scores in the fluid model", "Spearman", "mean gap", "largest gap"]
        lines += ["", "Ranking; a gap is the score in the fluid model less that in the reference:", ""]
        lines += table(heads, ranked)
    return "\n".join(lines + details) + "\n"


def draw(tasks: Mapping[str, Any], path: Path) -> None:
    """Scores in the reference over scores in the fluid model, a panel for each set of policies."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    titles = {"ladder": "ladder", "search": "best timetables of a search", "near": "near the solver's policies"}
    kinds = [kind for kind in KINDS if any(kind in result for result in tasks.values())]
    n_panels = 1 + len(kinds)
    figure, panels = pyplot.subplots(1, n_panels, figsize=(4.0 * n_panels, 4.4), constrained_layout=True, squeeze=False)
    panels = panels[0]
    for i, (task_id, result) in enumerate(tasks.items()):
        grades = [(row["fluid"]["score"], row["reference"]["score"]) for row in result["agents"].values()]
        shown = [tuple(zip(*grades, strict=True))]
        shown += [(result[kind]["fluid"], result[kind]["reference"]) if kind in result else ((), ()) for kind in kinds]
        for axes, (fluid, reference) in zip(panels, shown, strict=True):
            axes.scatter(fluid, reference, color=f"C{i}", label=f"task {task_id}", s=24, linewidths=0)
    for axes, title in zip(panels, ("agents and canaries", *(titles[kind] for kind in kinds)), strict=True):
        low, high = axes.get_xlim()
        axes.plot((low, high), (low, high), color="black", linewidth=0.8)
        axes.set(title=title, xlabel="score in the fluid model")
    panels[0].set_ylabel("score in the reference")
    panels[0].legend(fontsize=8)
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main()
