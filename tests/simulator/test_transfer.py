"""The transfer experiment: environments of several cards as one, and the table that is published."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from agents.ppo_demo import PpoSettings, local_envs
from benchmarks.learning.transfer import CARDS, markdown, mixed_envs, task_on

ROOT = Path(__file__).resolve().parents[2]


def test_rows_of_all_cards_together_are_those_of_each_card_alone() -> None:
    settings = PpoSettings(from_scratch=True, n_envs=8)
    alone = PpoSettings(from_scratch=True, n_envs=2)
    together, parts = mixed_envs(settings, 20), [local_envs(task_on(card).task_id, alone, 20) for card in CARDS]
    seen, _ = together.reset(seed=list(range(8)))
    own = [part.reset(seed=[2 * i, 2 * i + 1])[0] for i, part in enumerate(parts)]
    assert np.array_equal(seen, np.concatenate(own))
    rng, ended = np.random.default_rng(0), 0
    for _ in range(12):  # an episode has ten steps of twenty seconds: the first restarts are among them
        moves = rng.integers(together.single_action_space.nvec, size=(8, 5))  # type: ignore[attr-defined]
        seen, reward, terminated, _, info = together.step(moves)
        steps = [part.step(move) for part, move in zip(parts, np.split(moves, 4), strict=True)]
        assert np.array_equal(seen, np.concatenate([step[0] for step in steps]))
        assert np.array_equal(reward, np.concatenate([step[1] for step in steps]))
        assert np.array_equal(terminated, np.concatenate([step[2] for step in steps]))
        if terminated.any():
            ended += 1
            assert np.array_equal(info["final_obs"], np.concatenate([step[4]["final_obs"] for step in steps]))
    assert ended == 1


def test_the_published_table_is_what_the_published_runs_say() -> None:
    results = ROOT / "benchmarks" / "results"
    runs = json.loads((results / "transfer.json").read_text(encoding="utf-8"))
    assert markdown(runs) == (results / "transfer.md").read_text(encoding="utf-8")
