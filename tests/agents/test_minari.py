"""An agent's episodes as a data set that Minari itself loads and plays again, and a policy cloned from it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import minari
import numpy as np
import pytest

from agents.evaluate import evaluate, gym_scores
from agents.integrations.minari import clone, main, record
from inferencegym.errors import InvalidConfigError
from inferencegym.tasks import get_task

NAME = "inferencegym/tests-v0"


@pytest.mark.parametrize(("task_id", "agent", "hold"), [(3, "heuristic", 20), ("autoscale", "hpa", 50)])
def test_minari_loads_the_recorded_episodes_and_plays_them_again_to_the_last_bit(
    task_id: Any, agent: str, hold: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    record(NAME, task_id, agent, [7, 8], hold=hold)
    dataset = minari.load_dataset(NAME)
    env = dataset.recover_environment()
    assert (dataset.total_episodes, env.unwrapped.task.task_id) == (2, task_id)
    for episode, stored in zip(dataset.iterate_episodes(), dataset.storage.get_episode_metadata([0, 1]), strict=True):
        seen = [env.reset(seed=stored["seed"])[0]]
        played = [env.step(action)[:4] for action in episode.actions]
        seen += [step[0] for step in played]
        np.testing.assert_array_equal(episode.observations, seen)
        for recorded, again in zip(
            (episode.rewards, episode.terminations, episode.truncations),
            zip(*[step[1:] for step in played], strict=True),
            strict=True,
        ):
            np.testing.assert_array_equal(recorded, again)
        assert episode.terminations.tolist() == [False] * (len(played) - 1) + [True]


def test_a_data_set_is_never_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    record(NAME, 3, "naive", [7], hold=50)
    with pytest.raises(InvalidConfigError, match=f"minari delete {NAME}"):
        record(NAME, 3, "naive", [7, 8], hold=50)
    monkeypatch.setattr(sys, "argv", ["minari", "--task", "3", "--agent", "naive", "--id", NAME])
    with pytest.raises(SystemExit):
        main()
    assert minari.load_dataset(NAME).total_episodes == 1


def test_other_folders_among_the_data_sets_do_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    (tmp_path / "no-version" / "data").mkdir(parents=True)
    record(NAME, 3, "naive", [7], hold=50)
    assert minari.load_dataset(NAME).total_episodes == 1


def test_a_policy_cloned_from_an_agent_that_holds_one_setting_scores_what_the_agent_scores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    setting = 'constant:{"kv_budget": 0.9, "batch_size": 256, "quant_tier": 1}'
    dataset = record(NAME, 1, setting, range(4))
    seeds = [10_000, 10_001]
    scores = gym_scores(dataset.env_spec.id, clone(dataset, passes=50), seeds)
    np.testing.assert_allclose(scores, evaluate(setting, get_task(1), seeds).scores, atol=1e-12)
