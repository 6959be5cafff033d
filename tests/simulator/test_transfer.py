"""The transfer experiments: environments of several cards as one, tasks on other cards, and the published tables."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from agents.policies.ppo import make_ppo
from agents.ppo_demo import PpoSettings, local_envs, settings_for, train
from benchmarks.learning import card_split as split
from benchmarks.learning.transfer import CARDS, mixed_envs, task_on
from inferencegym.tasks import TASKS_ENV

ROOT = Path(__file__).resolve().parents[2]


def test_rows_of_all_cards_together_are_those_of_each_card_alone() -> None:
    settings = PpoSettings(from_scratch=True, n_envs=8)
    alone = PpoSettings(from_scratch=True, n_envs=2)
    together, parts = (
        mixed_envs([task_on(card) for card in CARDS], settings, 20),
        [local_envs(task_on(card).task_id, alone, 20) for card in CARDS],
    )
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


def test_the_tasks_of_the_card_split_have_the_load_that_their_replicas_can_take() -> None:
    stored = json.loads(split.TASKS_FILE.read_text(encoding="utf-8"))["tasks"]
    planned = split.tasks_on_cards()
    assert {task_id: {**entry, "calibration": None} for task_id, entry in stored.items()} == {
        task_id: {**entry, "calibration": None} for task_id, entry in planned.items()
    }
    # The capacity plans say 28.19, 20.77, 8.23 and 32.94 requests/s of a replica, and 11.52 of an A100's.
    rates = [entry["arrival_rate_rps"] for entry in stored.values()]
    assert rates == pytest.approx([30 * each / 11.52 for each in (28.19, 20.77, 8.23, 32.94)], abs=0.06)


def test_a_policy_of_replicas_keeps_the_knobs_of_the_plan_of_each_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TASKS_ENV, str(split.TASKS_FILE))
    tasks = [split.task_on(card) for card in split.SEEN]
    settings = settings_for(tasks[0], n_envs=6, rollout_steps=240, from_scratch=True, action="replicas")
    train(partial(mixed_envs, tasks, settings), tmp_path, steps=240, settings=settings, progress=False, score_on=tasks)
    for card, setting in {
        "A100": (2.0, 350.0, 1.0),
        "RTX PRO 6000": (2.0, 512.0, 2.0),
        "H200": (1.0, 512.0, 1.0),
    }.items():
        task = split.task_on(card)
        agent = make_ppo(task, str(tmp_path / "policy.npz"))
        agent.reset(2)
        knobs = agent.act(np.ones((2, 24)))
        assert [tuple(row) for row in knobs[:, [1, 2, 4]]] == [setting, setting]
        assert ((knobs[:, 5] >= 1) & (knobs[:, 5] <= 8)).all()
