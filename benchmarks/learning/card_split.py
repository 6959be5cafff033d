"""Card split of ``fleet-mix``: policies trained on draws of some cards, scored on held-out draws of these and others.

    python -m benchmarks.learning.card_split             trains, and writes results/card_split.json and .md
    python -m benchmarks.learning.card_split --add       trains only the runs that the stored results lack
    python -m benchmarks.learning.card_split --tasks     writes the tasks on the other cards, fleet_mix_cards.json

On another card the task has the rate and the queue of ``fleet-mix`` times the planned capacity of a replica relative to
the A100's, so that a draw needs about as many replicas on every card; its constants are those of constant actions. PPO
trains from scratch and chooses replicas; the other knobs are those of each card's capacity plan. Training plays draws
of the A100 alone, or of three cards at once, in rows that keep their card for the whole run. Validation seeds of the
cards trained on choose the policy that is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from agents.episodes import run_episodes
from agents.evaluate import evaluate, interval, paired
from agents.policies.autoscalers import PlannerAgent, ReplicaPlan
from agents.policies.ppo import PpoAgent
from agents.policies.stored import policy_path, read_autoscaler
from agents.policies.switching_policy import ActionsAgent
from agents.ppo_demo import settings_for, train
from agents.protocol import Agent, FloatArray
from agents.registry import make_agent
from agents.search.calibration import constants_alone
from agents.seeds import HELD_OUT_SEEDS, TRAINING_SEEDS
from benchmarks.learning.transfer import mixed_envs
from benchmarks.report import spread, store, stored, table
from inferencegym.tasks import DATA_DIR, SCALING_TASKS, TASKS_ENV, TaskSpec, fingerprint, get_task, parse_task

TASKS_FILE: Final = Path(__file__).with_name("fleet_mix_cards.json")
BASE: Final = "fleet-mix"
TABLES: Final = {
    "H100": "h100-llama-3.1-8b",
    "RTX PRO 6000": "rtx-pro-6000-llama-3.1-8b",
    "L40S": "l40s-llama-3.1-8b",
    "H200": "h200-llama-3.1-8b",
}
"""Tables of the cards other than the A100, on whose table ``fleet-mix`` itself is."""
SEEN: Final = ("A100", "H100", "RTX PRO 6000")
HELD_OUT: Final = ("L40S", "H200")
SOURCES: Final = {"A100 alone": SEEN[:1], "three cards": SEEN}


def task_id_on(card: str) -> str:
    """Id of the task on a card."""
    return BASE if card == SEEN[0] else f"{BASE}-{card.split()[0].lower()}"


def task_on(card: str) -> TaskSpec:
    """The task on a card; those in :data:`TASKS_FILE` must be registered."""
    return get_task(task_id_on(card))


def tasks_on_cards() -> dict[str, Any]:
    """Entries of :data:`TASKS_FILE`, without constants."""
    raw = json.loads((DATA_DIR / SCALING_TASKS).read_text(encoding="utf-8"))["tasks"][BASE]
    measured = ("expected_baseline", "adaptive_gap", "difficulty", "measured_difficulty")  # on the A100
    kept = {key: value for key, value in raw.items() if key not in measured}
    base = get_task(BASE)
    entries = {}
    for card, hardware in TABLES.items():
        ratio = ReplicaPlan.of(replace(base, hardware=hardware)).capacity_rps / ReplicaPlan.of(base).capacity_rps
        entries[task_id_on(card)] = {
            **kept,
            "name": f"{raw['name']}, {card}",
            "gym_id": f"{raw['gym_id']}{card.split()[0]}",
            "description": f"{BASE} on 1 to {raw['max_replicas']} {card}, with {ratio:.2f} times its requests.",
            "hardware": hardware,
            "arrival_rate_rps": round(raw["arrival_rate_rps"] * ratio, 1),
            "queue_limit": round(raw["queue_limit"] * ratio),
        }
    return entries


def write_tasks() -> None:
    """Write :data:`TASKS_FILE`, with constants."""
    entries = tasks_on_cards()
    for task_id, entry in entries.items():
        task = parse_task(task_id, entry)
        planned = ReplicaPlan.of(task).plan.row().tolist()
        entry["calibration"] = {**asdict(constants_alone(task).calibration), "replica_knobs": planned}
        entry["calibration"]["fingerprint"] = fingerprint(task)
    TASKS_FILE.write_text(json.dumps({"tasks": entries}, indent=1) + "\n", encoding="utf-8")


def rivals_on(card: str) -> dict[str, Agent]:
    """Agents that PPO is compared with. All but one know the card: its capacity plan, or its own training seeds."""
    task = task_on(card)
    searched = read_autoscaler(policy_path("best_adaptive", BASE))
    return {
        "best constant": ActionsAgent(best_constant(task)[None], len(HELD_OUT_SEEDS)),
        **{name: make_agent(name, task) for name in ("hpa", "kpa", "planner")},
        "searched policy (parameters of the A100)": PlannerAgent(task, [searched.params]),
    }


def best_constant(task: TaskSpec) -> FloatArray:
    """The capacity plan's knobs with the number of replicas (6,) that scores most on the training seeds."""
    assert task.fleet.max_replicas is not None
    replicas = np.arange(1.0, task.fleet.max_replicas + 1.0)
    actions = np.column_stack([np.tile(ReplicaPlan.of(task).plan.row(), (len(replicas), 1)), replicas])
    agent, n = ActionsAgent(actions, len(TRAINING_SEEDS)), len(TRAINING_SEEDS)
    scores = run_episodes(task, agent, TRAINING_SEEDS, n_rows=len(actions) * n).scores().reshape(len(actions), n)
    best: FloatArray = actions[scores.mean(axis=1).argmax()]
    return best


def one_run(source: str, seed: int, steps: int, out: Path) -> dict[str, Any]:
    """Train on the cards of a source; returns the scores on the held-out seeds of every card."""
    tasks = [task_on(card) for card in SOURCES[source]]
    settings = settings_for(tasks[0], from_scratch=True, action="replicas")
    began = time.perf_counter()
    make_envs = partial(mixed_envs, tasks, settings)
    trained = train(
        make_envs, out, steps=steps, seed=seed, settings=settings, progress=False, score_every=50_000, score_on=tasks
    )
    seconds = time.perf_counter() - began
    scores = {
        card: evaluate(PpoAgent(trained.policy, task_on(card)), task_on(card)).scores.tolist()
        for card in (*SEEN, *HELD_OUT)
    }
    return {
        "trained_on": source,
        "seed": seed,
        "steps": int(trained.model.num_timesteps),
        "seconds": round(seconds, 1),
        "validation_score": float(trained.policy.trained["validation_score"]),
        "scores": scores,
    }


def rival_scores() -> dict[str, dict[str, list[float]]]:
    """Scores of the agents that PPO is compared with, by agent and card."""
    cards = {card: rivals_on(card) for card in (*SEEN, *HELD_OUT)}
    return {
        name: {card: evaluate(agents[name], task_on(card)).scores.tolist() for card, agents in cards.items()}
        for name in cards[SEEN[0]]
    }


COLUMNS: Final = {card: (card,) for card in (*SEEN, *HELD_OUT)} | {"seen cards": SEEN, "held-out cards": HELD_OUT}
"""Columns of the tables: each card, and the means over those trained on and those held out."""


def column(scores: dict[str, list[float]], cards: Sequence[str]) -> FloatArray:
    """Mean score over cards, by held-out seed (30,)."""
    mean: FloatArray = np.mean([scores[card] for card in cards], axis=0)
    return mean


def markdown(found: dict[str, Any]) -> str:
    """The tables."""
    runs = {source: [run for run in found["runs"] if run["trained_on"] == source] for source in SOURCES}
    agents = {
        name: {head: column(of, cards) for head, cards in COLUMNS.items()} for name, of in found["rivals"].items()
    }
    for source, own in runs.items():
        agents[f"PPO, {source}"] = {
            head: np.mean([column(run["scores"], cards) for run in own], axis=0) for head, cards in COLUMNS.items()
        }
    heads = [card if card not in HELD_OUT else f"{card}, held out" for card in COLUMNS]
    lines = [
        "<!-- written by benchmarks/learning/card_split.py; do not edit -->",
        f"Scores on the same {len(HELD_OUT_SEEDS)} held-out draws of every card, with 95% intervals. PPO: mean of the "
        f"training seeds, {', '.join(f'{len(own)} on {source}' for source, own in runs.items())}; about "
        f"{found['steps']:,} steps each.",
        "",
    ]
    scores = [(name, *(spread(interval(of[head]).to_dict()) for head in COLUMNS)) for name, of in agents.items()]
    ppo = agents[f"PPO, {list(SOURCES)[-1]}"]
    over = [
        (name, *(spread(paired(ppo[head], of[head]).to_dict(), "+") for head in COLUMNS))
        for name, of in agents.items()
        if of is not ppo
    ]
    each = [
        (source, run["seed"], f"{run['steps']:,}", f"{run['seconds']:.0f}",
         *(f"{column(run['scores'], cards).mean():.3f}" for cards in COLUMNS.values()))
        for source, own in runs.items()
        for run in own
    ]  # fmt: skip
    lines += table(("policy", *heads), scores)
    lines += ["", "<!-- details -->", "", "What PPO trained on three cards scores more than each, paired by draw:", ""]
    lines += table(("over", *heads), over)
    lines += ["", "Every run:", ""]
    lines += table(("trained on", "training seed", "steps", "seconds", *COLUMNS), each)
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=600_000, help="steps of a run (default 600000)")
    parser.add_argument("--seeds", type=int, default=3, help="training seeds (default 3)")
    parser.add_argument("--out", type=Path, default=Path("runs/card_split"), help="folder of the runs")
    parser.add_argument("--add", action="store_true", help="keep the stored runs and add those that are missing")
    parser.add_argument("--tasks", action="store_true", help="write the tasks on the other cards, and train nothing")
    options = parser.parse_args(arguments)
    if options.tasks:
        write_tasks()
        return
    os.environ[TASKS_ENV] = str(TASKS_FILE)
    found: dict[str, Any] = {"steps": options.steps, "rivals": rival_scores(), "runs": []}
    if options.add:
        found["runs"] = stored("card_split")["runs"]
    done = {(run["trained_on"], run["seed"]) for run in found["runs"]}
    for seed in range(options.seeds):
        for source in SOURCES:
            if (source, seed) not in done:
                out = options.out / f"{source.replace(' ', '-')}-{seed}"
                found["runs"].append(one_run(source, seed, options.steps, out))
        store("card_split", found, markdown(found))
    print(markdown(found))


if __name__ == "__main__":
    main()
