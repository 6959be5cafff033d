"""Scores of the controllers on the rollout tasks, the cliff over the constant cap, and the environment's speed.

    python -m benchmarks.policies.rollouts     writes results/rollouts.json, rollouts.md and figures/rollouts.png

Controllers play 60 held-out seeds; intervals are 95% Student t intervals over seeds, differences are paired by seed.
The best constant of a task is the one with the highest mean on these same seeds, which favours it. The figure needs the
extra `report` (matplotlib).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from agents.evaluate import bracketed, interval
from agents.policies.rollouts import RolloutPolicy
from agents.seeds import TRAINING_SEEDS, held_out_seeds
from benchmarks.report import FIGURES, store, table
from env.rollouts.agents import CAPS, make_controller, oracle_constant, scores
from env.rollouts.env import draw_row
from env.rollouts.tasks import RolloutConfig, get_rollout_task, rollout_tasks
from simulator.events.requests import FloatArray

CONTROLLERS: Final = ("no_cap", "aimd", "kv_target", "budget", "fit")
N_SEEDS: Final = 60


def constant(cap: int) -> Callable[[], Callable[[Mapping[str, float]], int]]:
    return partial(make_controller, f"constant:{cap}")


def measure(task_id: str) -> dict[str, Any]:
    """Scores of all controllers on a task."""
    seeds, task = held_out_seeds(N_SEEDS), get_rollout_task(task_id)
    constants = {cap: scores(constant(cap), seeds, task) for cap in CAPS}
    best_cap = max(CAPS, key=lambda cap: constants[cap].mean())
    found: dict[str, FloatArray] = {f"best constant ({best_cap})": constants[best_cap]}
    found |= {name: scores(partial(make_controller, name), seeds, task) for name in CONTROLLERS}
    found["ppo"] = scores(RolloutPolicy, seeds, task)
    own = [oracle_constant(task, seed, RolloutConfig()) for seed in seeds]
    played = [scores(constant(cap), [seed], task)[0] for cap, seed in zip(own, seeds, strict=True)]
    found["each workload's own best constant (oracle)"] = np.array(played)
    return {
        "task": task_id,
        "seeds": N_SEEDS,
        "constants": {str(cap): float(values.mean()) for cap, values in constants.items()},
        "agents": {
            name: {
                "score": interval(values).to_dict(),
                "minus_best_constant": interval(values - constants[best_cap]).to_dict(),
            }
            for name, values in found.items()
        },
        "ppo_minus_fit": interval(found["ppo"] - found["fit"]).to_dict(),
        "held_out_minus_training": {
            name: float(found[name].mean() - scores(make, TRAINING_SEEDS, task).mean())
            for name, make in (("fit", partial(make_controller, "fit")), ("ppo", RolloutPolicy))
        },
    }


def speed() -> dict[str, float]:
    """Environment steps per second on rollout-batch: the loop alone, rows with observations, and their ratio."""
    row = draw_row(get_rollout_task("rollout-batch"), 1, RolloutConfig())
    began = time.perf_counter()
    while not row.done:
        row.advance(12)
    whole_s = time.perf_counter() - began
    steps = row.time_s
    again = draw_row(get_rollout_task("rollout-batch"), 1, RolloutConfig())
    began = time.perf_counter()
    for second in range(1, steps + 1):
        again.run.play(12, second)
    loop_s = time.perf_counter() - began
    iterations = again.run.state.iterations
    return {
        "steps_per_s": steps / whole_s,
        "loop_steps_per_s": steps / loop_s,
        "loop_us_per_iteration": 1e6 * loop_s / iterations,
        "iterations_per_step": iterations / steps,
    }


def markdown(result: Mapping[str, Any]) -> str:
    lines = ["<!-- written by benchmarks/policies/rollouts.py; do not edit -->"]
    for task in result["tasks"]:
        lines += [
            "",
            f"**{task['task']}**, {task['seeds']} held-out seeds:",
            "",
        ]
        rows = []
        ranked = sorted(task["agents"].items(), key=lambda item: -item[1]["score"]["mean"])
        for name, agent in ranked:
            favoured = ", chosen on these seeds, which favours it" if name.startswith("best constant") else ""
            rows.append((name + favoured, bracketed(agent["score"]), bracketed(agent["minus_best_constant"], "+")))
        lines += table(("policy", "score", "minus the best constant"), rows)
        gaps = ", ".join(f"{name} {gap:+.3f}" for name, gap in task["held_out_minus_training"].items())
        lines += ["", f"PPO minus fit {bracketed(task['ppo_minus_fit'], '+')}; held-out minus training seeds: {gaps}."]
    lines += [
        "",
        "On one core, rollout-batch plays {steps_per_s:,.0f} steps a second, or {loop_steps_per_s:,.0f} without "
        "building observations; "
        "a step simulates {iterations_per_step:.0f} engine iterations.".format(**result["speed"]),
    ]
    return "\n".join(lines) + "\n"


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Score over the constant cap, with controllers as lines."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(result["tasks"]), figsize=(13, 3.4), sharey=True)
    for axis, task in zip(axes, result["tasks"], strict=True):
        caps = [int(cap) for cap in task["constants"]]
        axis.plot(caps, list(task["constants"].values()), marker="o", label="constant cap")
        for name, colour in (("fit", "C1"), ("ppo", "C2"), ("kv_target", "C4"), ("no_cap", "C3")):
            axis.axhline(task["agents"][name]["score"]["mean"], color=colour, linestyle="--", label=name)
        axis.set(xscale="log", title=task["task"], xlabel="sessions in flight at most")
    axes[0].set(ylabel="score", ylim=(0, 1))
    axes[-1].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    result = {"speed": speed(), "tasks": [measure(task_id) for task_id in rollout_tasks()]}
    print(text := markdown(result))
    store("rollouts", result, text)
    draw(result, FIGURES / "rollouts.png")


if __name__ == "__main__":
    main()
