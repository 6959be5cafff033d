"""Does the reward climb? GRPO on the one question of :mod:`agents.integrations.trl_grpo`, step by step.

    python -m benchmarks.learning.grpo --url http://localhost:7860     writes results/grpo.json and grpo.md

TRL trains SmolLM2-135M-Instruct and a tiny model of random weights for 50 steps each, on a CPU (extras `trl` and
`smollm2`, and a server). A step answers the question eight times; each answer is paid the score of an episode of the
easy task that is played with the chosen batch size. An answer that names no choice is played with the knobs that the
episode starts with.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any, Final

from agents.integrations.trl_grpo import CHOICES, SMOLLM2, choice_scores, train
from benchmarks.report import store, table
from inferencegym.client.http import DEFAULT_URL

EPISODE_S: Final = 60
LEARNING_RATES: Final = {"tiny random model": 3e-2, SMOLLM2: 1e-5}
BLOCK: Final = 10
"""Steps of a row of the table."""
KEPT: Final = ("step", "reward", "reward_std", "entropy", *(f"chosen/{letter}" for letter in (*CHOICES, None)))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--url", default=DEFAULT_URL, help="the server (default %(default)s)")
    parser.add_argument("--steps", type=int, default=50, help="steps of the optimiser (default %(default)s)")
    parser.add_argument("--out", default="runs/grpo", help="where the trainer writes (default %(default)s)")
    options = parser.parse_args(arguments)
    curves: dict[str, list[dict[str, float]]] = {}
    result = {"scores": scores(options.url), "curves": curves}
    for name, rate in LEARNING_RATES.items():
        model = SMOLLM2 if name == SMOLLM2 else None
        log = train(options.url, model, options.steps, options.out, choices=True, learning_rate=rate)
        curves[name] = curve(log)
        store("grpo", result, markdown(result))
    print(markdown(result))


def curve(log: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    """Steps of a trainer's log, with the columns that are kept."""
    return [{name: round(entry[name], 4) for name in KEPT} for entry in log if "reward" in entry]


def scores(url: str) -> dict[str, float]:
    """Mean score of each choice over ten seeds that the model trains on."""
    seeds, reward = range(1, 11), choice_scores(url, EPISODE_S)
    return {
        letter: round(mean(reward([[{"content": letter}]] * len(seeds), [1] * len(seeds), list(seeds))), 3)
        for letter in CHOICES
    }


def markdown(result: Mapping[str, Any]) -> str:
    """The document's part: means of ten steps."""
    worth = ", ".join(f"{letter} ({size}) {result['scores'][letter]:.3f}" for letter, size in CHOICES.items())
    lines = [
        "<!-- written by benchmarks/learning/grpo.py; do not edit -->",
        "",
        f"Scores of the choices of `batch_size`: {worth}. Means over {BLOCK} steps of eight answers.",
        "",
    ]
    rows = []
    for name, steps in result["curves"].items():
        for first in range(0, len(steps), BLOCK):
            some = steps[first : first + BLOCK]
            shares = [f"{mean(step[f'chosen/{letter}'] for step in some):.0%}" for letter in (*CHOICES, None)]
            reward = mean(step["reward"] for step in some)
            rows.append((name, f"{some[0]['step']}-{some[-1]['step']}", f"{reward:.3f}", *shares))
    heads = ("model", "steps", "reward", *(f"chose {letter}" for letter in CHOICES), "no choice")
    return "\n".join([*lines, *table(heads, rows)]) + "\n"


if __name__ == "__main__":
    main()
