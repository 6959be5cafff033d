"""Pictures of an episode so far, changes of knobs as actions, and stacked observations."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gymnasium
import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.wrappers import FrameStackObservation, RenderCollection

import inferencegym.gym as ig
from env.inference_env import InferenceEnv
from inferencegym.errors import InvalidConfigError
from inferencegym.models import NAIVE_ACTION, QuantTier, ServeAction
from inferencegym.render import EpisodePicture
from inferencegym.spaces.actions import to_row
from inferencegym.spaces.formats import LEVELS
from inferencegym.tasks import get_task
from inferencegym.wrappers import KnobDeltas
from tests.servers import RunningServer
from tests.window import FigureCanvas, FigureManager

SHORT = {"episode_length": 7}
HARD = "InferenceGym/AdversarialMultiTenant-v1"

# ---------------------------------------------------------------- pictures


@pytest.mark.usefixtures("windows")
def test_gymnasiums_checkers_accept_the_picture() -> None:
    """Gymnasium's checker of environments, and the passive one that ``make`` puts around them; warnings are errors."""
    check_env(gymnasium.make(HARD, config=SHORT, render_mode="rgb_array").unwrapped)
    env = gymnasium.make(HARD, config=SHORT, render_mode="rgb_array")
    env.reset(seed=0)
    env.step(env.action_space.sample())
    assert env.render().shape == (560, 640, 3)


def test_the_picture_is_that_of_the_episode_so_far() -> None:
    env = gymnasium.make(HARD, render_mode="rgb_array")

    def picture(seed: int, steps: int) -> np.ndarray:
        env.reset(seed=seed)
        for _ in range(steps):
            env.step(np.zeros(5, dtype=np.float32))
        return np.asarray(env.render())

    np.testing.assert_array_equal(picture(1, 8), picture(1, 8))
    assert (picture(1, 8) != picture(1, 9)).any()
    assert (picture(1, 8) != picture(2, 8)).any()


def test_what_is_drawn_are_the_observations_the_objective_and_the_knobs() -> None:
    task = get_task(3)
    picture = EpisodePicture(task, 7, window=False)
    env = InferenceEnv(task_id=3)
    env.reset(seed=4)
    seen = [env.observation_row().copy()]
    picture.start(seen[0])
    for batch_size in (64, 128):
        action = ServeAction(0.5, 2, batch_size, False, QuantTier.INT8)
        env.step(action)
        seen.append(env.observation_row().copy())
        picture.add(seen[-1], to_row(action))
    picture.render()
    arrivals, queue, ttft, knobs = picture.figure.axes
    for axis, column in ((arrivals, 2), (queue, 0), (ttft, 4)):
        assert axis.lines[0].get_xydata().tolist() == [[t, row[column]] for t, row in enumerate(seen)]
    assert set(ttft.lines[1].get_ydata()) == {task.slo_target_ms}
    shares = [patch.get_data().values.tolist() for patch in knobs.patches]
    assert shares == [[0.5, 0.5], [0.25, 0.25], [64 / 512, 128 / 512], [0.0, 0.0], [0.5, 0.5]]


def test_gymnasiums_own_wrappers_collect_pictures() -> None:
    env = RenderCollection(gymnasium.make(HARD, config=SHORT, render_mode="rgb_array"))
    env.reset(seed=0)
    for _ in range(3):
        env.step(env.action_space.sample())
    assert len(env.render()) == 4


def test_without_a_render_mode_nothing_is_drawn_and_matplotlib_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    env = ig.InferenceGymEnv(3, config=SHORT)
    env.reset(seed=0)
    assert env.render() is None
    for mode in ("rgb_array", "human"):
        with pytest.raises(InvalidConfigError) as refused:
            ig.InferenceGymEnv(3, render_mode=mode)
        assert refused.value.field == "render_mode"
        assert "pip install -e '.[report]'" in str(refused.value)


def test_an_unknown_render_mode_is_refused() -> None:
    with pytest.raises(InvalidConfigError) as refused:
        ig.InferenceGymEnv(3, render_mode="ansi")
    assert refused.value.field == "render_mode"


def test_a_window_without_a_display_is_refused() -> None:
    mpl.use("agg")
    with pytest.raises(InvalidConfigError) as refused:
        gymnasium.make(HARD, render_mode="human")
    assert refused.value.field == "render_mode"
    assert "rgb_array" in str(refused.value)
    assert plt.get_fignums() == []


@pytest.mark.usefixtures("windows")
def test_a_window_follows_the_episode() -> None:
    shown, drawn = FigureManager.shown, FigureCanvas.drawn
    env = gymnasium.make(HARD, config=SHORT, render_mode="human")
    env.reset(seed=0)
    for _ in range(3):
        env.step(env.action_space.sample())
    assert (FigureManager.shown - shown, FigureCanvas.drawn - drawn) == (1, 4)
    assert env.render() is None
    env.close()
    assert plt.get_fignums() == []


def test_a_remote_episode_looks_like_a_local_one(server: RunningServer) -> None:
    local = gymnasium.make(HARD, config=SHORT, render_mode="rgb_array")
    remote = gymnasium.make(ig.REMOTE_ID, url=server.url, task_id=3, config=SHORT, render_mode="rgb_array")
    pictures = []
    for env in (local, remote):
        env.reset(seed=5)
        for _ in range(4):
            env.step(np.full(5, 0.3, dtype=np.float32))
        pictures.append(env.render())
        env.close()
    np.testing.assert_array_equal(*pictures)


# ---------------------------------------------------------------- wrappers


@pytest.mark.filterwarnings("ignore:.*different from the unwrapped version")  # which is what is checked here
@pytest.mark.parametrize("action", ["box", "discrete"])
def test_gymnasiums_checker_has_nothing_to_say_about_wrapped_environments(action: str) -> None:
    env = FrameStackObservation(KnobDeltas(gymnasium.make(HARD, action=action, config=SHORT)), 4)
    check_env(env, skip_render_check=True)
    assert env.observation_space.shape == (4, 14)


def applied(env: Any, action: Any) -> list[float]:
    return list(env.step(np.array(action))[4]["action_applied"].values())


def test_level_by_level_the_knobs_move_from_their_defaults_and_stop_at_their_ends() -> None:
    env = KnobDeltas(ig.InferenceGymEnv(3, action="discrete"))
    env.reset(seed=0)
    assert applied(env, [1, 1, 1, 1, 1]) == to_row(NAIVE_ACTION).tolist()
    assert applied(env, [0, 2, 2, 2, 2]) == [LEVELS["kv_budget"][-2], 1, 40, 1, 1]
    assert applied(env, [2, 2, 2, 2, 2]) == [1.0, 2, 48, 1, 2]
    assert applied(env, [2, 2, 0, 2, 2]) == [1.0, 4, 40, 1, 2]
    env.reset(seed=0)
    assert applied(env, [1, 1, 1, 1, 1]) == to_row(NAIVE_ACTION).tolist()


def test_in_the_box_the_knobs_move_by_the_step() -> None:
    env = KnobDeltas(ig.InferenceGymEnv(3, action="box"), step=0.2)
    env.reset(seed=0)
    still = np.zeros(5, dtype=np.float32)
    assert applied(env, still) == to_row(NAIVE_ACTION).tolist()
    # kv_budget spans 0.9 over 2: half a step of 0.2 down is 0.045 less. Sizes double in 2 / 9 of the scale.
    kv_budget, _, batch_size, *_ = applied(env, [-0.5, 0, 1, 0, 0])
    assert kv_budget == pytest.approx(1.0 - 0.045, abs=1e-6)
    assert batch_size == round(32 * 2.0 ** (0.2 * 9 / 2))


def test_what_cannot_be_wrapped_is_refused() -> None:
    with pytest.raises(InvalidConfigError) as refused:
        KnobDeltas(ig.InferenceGymEnv(3, action="natural"))
    assert refused.value.field == "action"
    with pytest.raises(InvalidConfigError) as refused:
        KnobDeltas(ig.InferenceGymEnv(3), step=0.0)
    assert refused.value.field == "step"


def test_a_wrapped_environment_is_made_again_from_its_specification(tmp_path: Path) -> None:
    env = KnobDeltas(gymnasium.make(HARD, config=SHORT), step=0.3)
    text = env.spec.to_json()  # type: ignore[union-attr]
    (tmp_path / "spec.json").write_text(text)
    again = gymnasium.make(gymnasium.envs.registration.EnvSpec.from_json(text))
    env.reset(seed=1)
    again.reset(seed=1)
    action = np.array([-1, 0, 1, 0, 0], dtype=np.float32)
    assert env.step(action)[1] == again.step(action)[1]


def test_stacked_observations_are_the_last_ones_in_order() -> None:
    env = FrameStackObservation(gymnasium.make(HARD, config=SHORT), 3)
    alone = gymnasium.make(HARD, config=SHORT)
    seen = [alone.reset(seed=2)[0]]
    env.reset(seed=2)
    for _ in range(4):
        action = np.zeros(5, dtype=np.float32)
        seen.append(alone.step(action)[0])
        stacked = env.step(action)[0]
    np.testing.assert_array_equal(stacked, seen[-3:])
