"""Report on the tasks: scores of all agents, constant against adaptive policies, ablation of the knobs, and agreement
of rewards and grades.

    python -m benchmarks.policies.tasks                       everything: results/tasks.json, tasks.md, figures/
    python -m benchmarks.policies.tasks --skip-ablation       without the slow ablation (a search for each knob)

Agents play 30 held-out seeds; intervals are 95% Student t intervals over seeds, differences are paired by seed. A
task's free parameters were chosen after its held-out scores had been seen, so the claims are confirmed on 30 further
seeds. Figures need the extra `report` (matplotlib).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from agents.episodes import EpisodeResults, run_episodes
from agents.evaluate import bracketed, bracketed_score, compare, evaluate, interval, paired
from agents.policies.constant import ConstantAgent
from agents.policies.stored import policy_path, read_constant_policy, read_switching_policy
from agents.registry import make_agent
from agents.search.ablation import ablate
from agents.search.random_search import random_search
from agents.search.reward_grade_agreement import correlation_over_constants, reward_grade_correlation
from agents.search.solver import QUICK
from agents.seeds import CONFIRMATION_SEEDS, HELD_OUT_SEEDS, TRAINING_SEEDS, VALIDATION_SEEDS
from benchmarks.report import FIGURES, store, stored, table
from inferencegym.spaces.actions import from_row
from inferencegym.tasks import TaskSpec, get_calibration, get_task, list_tasks
from simulator.hardware.tables import load_tables
from simulator.workload import load_source

ABLATED_TASK = 3
CONFIRMED = ("random", "naive", "vllm_defaults", "random_search", "heuristic", "best_static", "best_adaptive")
DRAWN_SEED = HELD_OUT_SEEDS[0]
ABLATION = replace(QUICK, seeds=TRAINING_SEEDS[:8], validation=VALIDATION_SEEDS, generations=10, finalists=1)
"""Budget of an ablation's search, which is smaller because it starts from the policy found without the ablation."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Scores, ablation and reward correlation of the tasks.")
    parser.add_argument("--skip-ablation", action="store_true", help="keep the ablation of the last full run")
    options = parser.parse_args(arguments)
    began = time.perf_counter()
    result: dict[str, Any] = {"tasks": [measure(task) for task in list_tasks()]}
    if options.skip_ablation:
        result["ablation"] = stored("tasks")["ablation"]
    else:
        result["ablation"] = ablation(get_task(ABLATED_TASK))
    result["seconds"] = round(time.perf_counter() - began, 1)
    print(text := markdown(result))
    store("tasks", result, text)
    draw(result)


def measure(task: TaskSpec) -> dict[str, Any]:
    compared = compare(task, ["all"])
    adaptive = evaluate("best_adaptive", task)
    static = evaluate("best_static", task)
    heuristic = evaluate("heuristic", task)
    return {
        **compared,
        "longer_random_search": longer_random_search(task),
        "adaptive_over_static": paired(adaptive.scores, static.scores).to_dict(),
        "heuristic_over_random": paired(heuristic.scores, evaluate("random", task).scores).to_dict(),
        "heuristic_over_naive": paired(heuristic.scores, evaluate("naive", task).scores).to_dict(),
        "confirmed": confirm(task),
        "reward_grade_spearman": reward_grade_correlation(task),
        "reward_grade_spearman_random_constants": correlation_over_constants(task),
    }


def longer_random_search(task: TaskSpec) -> dict[str, Any]:
    """Held-out score of a random search that plays as many seconds as PPO is trained for."""
    from agents.ppo_demo import PpoSettings  # needs torch

    settings = PpoSettings()
    seconds = round(settings.schedule_steps * sum(stage.hold * stage.share for stage in settings.stages))
    action, _ = random_search(task, get_calibration(task.task_id), seconds)
    score = interval(evaluate(ConstantAgent(from_row(action)), task).scores)
    return {"episodes": seconds // task.episode_length, "score": score.to_dict()}


def confirm(task: TaskSpec) -> dict[str, Any]:
    """Paired differences on the confirmation seeds."""
    scores = {name: evaluate(name, task, CONFIRMATION_SEEDS).scores for name in CONFIRMED}
    return {
        "seeds": list(CONFIRMATION_SEEDS),
        "scores": {name: interval(values).to_dict() for name, values in scores.items()},
        "adaptive_over_static": paired(scores["best_adaptive"], scores["best_static"]).to_dict(),
        "heuristic_over_random": paired(scores["heuristic"], scores["random"]).to_dict(),
        "heuristic_over_naive": paired(scores["heuristic"], scores["naive"]).to_dict(),
    }


def ablation(task: TaskSpec) -> list[dict[str, Any]]:
    adaptive = read_switching_policy(policy_path("best_adaptive", task.task_id))
    static = read_constant_policy(policy_path("best_static", task.task_id))
    return ablate(task, adaptive, static, ABLATION)


# ---------------------------------------------------------------- tables


def markdown(result: dict[str, Any]) -> str:
    shown = (scores_table(result), ablation_table(result["ablation"]))
    return "\n\n".join([*shown, "<!-- details -->", differences_table(result), confirmation_table(result)]) + "\n"


def scores_table(result: dict[str, Any]) -> str:
    names = list(dict.fromkeys(e["agent"] for t in result["tasks"] for e in t["agents"]))
    rows = []
    for name in names:
        cells = []
        for t in result["tasks"]:
            entry = next((e for e in t["agents"] if e["agent"] == name), None)
            cells.append("" if entry is None else bracketed_score(entry["score"]))
        rows.append((name, *cells))
    longer = [t["longer_random_search"] for t in result["tasks"]]
    name = f"random search, {longer[0]['episodes']:,} episodes like PPO"
    rows.append((name, *(bracketed_score(each["score"]) for each in longer)))
    blind = timetables()
    cells = [bracketed_score(blind[str(t["task"])]) for t in result["tasks"]]
    rows.append(("best timetable (by the clock)", *cells))
    return by_task("Mean score over 30 held-out seeds [95% CI].", "policy", result["tasks"], rows)


def by_task(title: str, first: str, tasks: Sequence[dict[str, Any]], rows: Sequence[Sequence[str]]) -> str:
    """A table with a column for each task."""
    return "\n".join([title, "", *table((first, *(get_task(t["task"]).heading for t in tasks)), rows)])


def timetables() -> dict[str, dict[str, float]]:
    """Held-out score of each task's best timetable, which observes nothing: of the longest search that was run."""
    quality, ceilings = stored("quality"), stored("ceilings")
    found = {str(report["task"]): report["gameability"]["best_timetable"]["score"] for report in quality}
    return found | {str(each["task"]): each["scores"]["best timetable"]["score"] for each in ceilings}


def searched_long() -> set[str]:
    """Tasks whose :func:`timetables` come from the longer search of `benchmarks.policies.ceilings`."""
    return {str(each["task"]) for each in stored("ceilings")}


DIFFERENCES = {
    "searched policy over best constant": "adaptive_over_static",
    "heuristic over random": "heuristic_over_random",
    "heuristic over naive": "heuristic_over_naive",
}


def differences_table(result: dict[str, Any]) -> str:
    title = "Paired differences [95% CI], and rank correlation of episode return and score over a spread of policies."
    rows = [(label, *(bracketed(t[key]) for t in result["tasks"])) for label, key in DIFFERENCES.items()]
    for label, key in (
        ("Spearman, ladder of competence", "reward_grade_spearman"),
        ("Spearman, random constant actions", "reward_grade_spearman_random_constants"),
    ):
        rows.append((label, *(f"{t[key]:.3f}" for t in result["tasks"])))
    return by_task(title, "", result["tasks"], rows)


def confirmation_table(result: dict[str, Any]) -> str:
    tasks = result["tasks"]
    seeds = tasks[0]["confirmed"]["seeds"]
    rows = [(name, *(bracketed_score(t["confirmed"]["scores"][name]) for t in tasks)) for name in CONFIRMED]
    rows += [(label, *(bracketed(t["confirmed"][key]) for t in tasks)) for label, key in DIFFERENCES.items()]
    title = f"The same on seeds {seeds[0]} to {seeds[-1]}, played only to confirm."
    return by_task(title, "", tasks, rows)


def ablation_table(rows: list[dict[str, Any]]) -> str:
    lines = [
        f"Task {ABLATED_TASK} without one knob: frozen at its best constant value, or left at its default value.",
        "A new policy is searched each time; costs are relative to the best policy of all these searches.",
        "",
    ]
    heads = ("knob", "best constant value", "cost of freezing it there [95% CI]", "default", "cost of leaving it there")
    cells = [
        (r["knob"], f"{r['frozen_at']:g}", bracketed(r["cost"]), f"{r['default']:g}", bracketed(r["cost_of_default"]))
        for r in rows
    ]
    return "\n".join([*lines, *table(heads, cells)])


# ---------------------------------------------------------------- figures


def draw(result: dict[str, Any]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    FIGURES.mkdir(exist_ok=True)
    draw_scores(result, FIGURES / "tasks_scores.png")
    draw_episode(get_task(ABLATED_TASK), FIGURES / "task3_episode.png")


def draw_scores(result: dict[str, Any], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(result["tasks"]), figsize=(10, 3.2), sharey=True, layout="constrained")
    for axis, task in zip(axes, result["tasks"], strict=True):
        entries = sorted(task["agents"], key=lambda e: e["score"]["mean"])
        means = [e["score"]["mean"] for e in entries]
        half = [e["score"]["ci95_high"] - e["score"]["mean"] for e in entries]
        axis.errorbar(range(len(means)), means, yerr=half, fmt="o", markersize=4, capsize=3, color="#1f4e79")
        axis.set_xticks(range(len(means)), [e["agent"] for e in entries], rotation=60, ha="right", fontsize=8)
        axis.set_title(f"Task {task['task']}", fontsize=10)
        axis.set_ylim(0, 1)
        axis.grid(axis="y", alpha=0.3)
    axes[0].set_ylabel("score, 30 held-out seeds, 95% CI", fontsize=8)
    save(figure, path)


def draw_episode(task: TaskSpec, path: Path) -> None:
    """Draw one episode under the searched policy: load, queue, latency against its objective, knobs."""
    import matplotlib.pyplot as plt

    load = load_source(task, load_tables()).draw([DRAWN_SEED], task.episode_length)
    adaptive = run_episodes(
        task,
        make_agent("best_adaptive", task),
        [DRAWN_SEED],
        keep=("queue_requests", "ttft_p99_ms"),
    )
    naive = run_episodes(task, make_agent("naive", task), [DRAWN_SEED], keep=("queue_requests",))
    figure, axes = plt.subplots(4, 1, figsize=(9, 7.5), sharex=True, layout="constrained")
    axes[0].plot(load.arrivals[0].sum(axis=1), color="#444444", linewidth=1)
    axes[0].set_ylabel("arrivals/s")
    axes[1].plot(adaptive.metrics["queue_requests"][:, 0], label="searched policy", color="#1f4e79")
    axes[1].plot(naive.metrics["queue_requests"][:, 0], label="naive", color="#b0b0b0")
    axes[1].set_ylabel("queue")
    axes[1].legend(fontsize=7)
    axes[2].plot(adaptive.metrics["ttft_p50_ms"][:, 0], label="searched policy", color="#1f4e79")
    axes[2].plot(naive.metrics["ttft_p50_ms"][:, 0], label="naive", color="#b0b0b0")
    axes[2].axhline(task.slo_target_ms, color="#b22222", linestyle="--", linewidth=1, label="objective")
    axes[2].set_yscale("log")
    axes[2].set_ylabel("TTFT p50, ms")
    axes[2].legend(fontsize=7)
    draw_knobs(axes[3], adaptive)
    axes[3].set_xlabel("second of the episode")
    figure.suptitle(f"Task {task.task_id}, seed {DRAWN_SEED}: one episode of the searched policy", fontsize=10)
    save(figure, path)


def draw_knobs(axis: Any, results: EpisodeResults) -> None:
    knobs = results.actions[:, 0]
    scales = {
        "kv_budget": 1.0,
        "spec_length / 8": 8.0,
        "batch_size / 512": 512.0,
        "prefill_disagg": 1.0,
        "quant_tier / 2": 2.0,
    }
    for i, (label, scale) in enumerate(scales.items()):
        axis.step(range(len(knobs)), knobs[:, i] / scale, where="post", label=label, linewidth=1.2)
    axis.set_ylim(-0.05, 1.05)
    axis.set_ylabel("knobs")
    axis.legend(fontsize=7, ncols=5, loc="upper center", bbox_to_anchor=(0.5, 1.18))


def save(figure: Any, path: Path) -> None:
    import matplotlib.pyplot as plt

    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()
