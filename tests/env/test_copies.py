"""Copies and pickles of running environments, a limit on steps, and what other libraries ask of an environment."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st

import inferencegym.gym as ig
from inferencegym.errors import InvalidConfigError

TASKS: dict[str, dict[str, Any]] = {
    "AdversarialMultiTenant": {"config": {"episode_length": 20}, "hold": 3, "reward": "scaled", "observation": "full"},
    "AutoscaledChat": {"config": {"episode_length": 7}, "action": "discrete"},
    "TrafficHard": {},
    "RolloutMix": {"config": {"episode_length": 12}},
}
"""A task of each family, and one that scales; with few steps, held or not."""
COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda env: pickle.loads(pickle.dumps(env)),
}
N_ENVS = 3

chosen_task = st.sampled_from(list(TASKS))
copied = st.sampled_from(list(COPIES)).map(COPIES.__getitem__)


def same(one: Any, other: Any) -> None:
    """Equal to the last bit, dtypes and keys included."""
    assert pickle.dumps(_plain(one)) == pickle.dumps(_plain(other))


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype != object:
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, dict):
        return sorted((name, _plain(each)) for name, each in value.items())
    return [_plain(each) for each in value] if isinstance(value, (tuple, list, np.ndarray)) else repr(value)


@settings(max_examples=25, deadline=None)
@given(name=chosen_task, copied=copied, n_played=st.integers(0, 15), seed=st.integers(0, 2**32))
def test_a_copy_goes_on_as_the_environment_does(
    name: str, copied: Callable[[Any], Any], n_played: int, seed: int
) -> None:
    env = gymnasium.make(ig.registered_id(name), **TASKS[name])
    env.reset(seed=seed)
    env.action_space.seed(seed)
    done = False
    for _ in range(n_played):
        if not done:
            _, _, terminated, truncated, _ = env.step(env.action_space.sample())
            done = terminated or truncated
    twin = copied(env)
    while not done:
        action = env.action_space.sample()
        stepped = env.step(action)
        same(stepped, twin.step(action))
        done = stepped[2] or stepped[3]
    same(env.unwrapped.grade(), twin.unwrapped.grade())
    same(env.reset(), twin.reset())


@settings(max_examples=10, deadline=None)
@given(name=st.sampled_from(["AdversarialMultiTenant", "AutoscaledChat", "RolloutMix"]), seed=st.integers(0, 2**32))
def test_an_episode_goes_on_from_a_state_as_often_as_one_likes(name: str, seed: int) -> None:
    env, other = (gymnasium.make(ig.registered_id(name), **TASKS[name]).unwrapped for _ in "ab")
    env.reset(seed=seed)
    env.action_space.seed(seed)
    before, *following = [env.action_space.sample() for _ in range(4)]
    seen = env.step(before)[0]
    state = env.get_state()
    env.step(before)  # a state does not follow the episode that it was taken from
    state = json.loads(json.dumps(state))
    futures = []
    for player in (env, other, env):
        same(player.set_state(state), seen)
        futures.append([player.step(action) for action in following])
    same(futures[0], futures[1])
    same(futures[0], futures[2])
    if name != "RolloutMix":
        assert futures[0][-1][4]["cost"] == futures[0][-1][4]["metrics"]["slo_violations"] >= 0
    for another in ("StaticUniform", "RolloutBatch"):
        with pytest.raises(InvalidConfigError, match="the state is of task"):
            gymnasium.make(ig.registered_id(another)).unwrapped.set_state(state)


@pytest.mark.parametrize("name", ["AdversarialMultiTenant", "RolloutMix"])
@pytest.mark.parametrize("state", [{"a": 1}, "a text", None])
def test_what_is_no_state_is_refused(name: str, state: object) -> None:
    with pytest.raises(InvalidConfigError, match=r"state=.*what get_state\(\) returned: task_id, seed"):
        gymnasium.make(ig.registered_id(name)).unwrapped.set_state(state)


@settings(max_examples=25, deadline=None)
@given(
    name=chosen_task,
    copied=copied,
    mode=st.sampled_from(["NextStep", "SameStep", "Disabled"]),
    n_played=st.integers(0, 25),
    seed=st.integers(0, 2**32),
    data=st.data(),
)
def test_a_copy_of_a_vector_goes_on_as_the_vector_does(
    name: str, copied: Callable[[Any], Any], mode: str, n_played: int, seed: int, data: st.DataObject
) -> None:
    envs = gymnasium.make_vec(ig.registered_id(name), N_ENVS, autoreset_mode=mode, max_episode_steps=18, **TASKS[name])
    envs.reset(seed=seed)
    envs.action_space.seed(seed)
    ended = np.zeros(N_ENVS, dtype=np.bool_)

    def play(*vectors: Any) -> None:
        nonlocal ended
        actions = envs.action_space.sample()
        if mode == "Disabled" and ended.any():
            for each in vectors:
                each.reset(options={"reset_mask": ended})
        stepped = [each.step(actions) for each in vectors]
        same(stepped[0], stepped[-1])
        ended = stepped[0][2] | stepped[0][3]

    for _ in range(n_played):
        play(envs)
        if data.draw(st.integers(0, 5)) == 0:  # rows that start at different times
            mask = np.array([True, False, data.draw(st.booleans())])
            envs.reset(options={"reset_mask": mask})
            ended = ended & ~mask
    twin = copied(envs)
    for _ in range(20):
        play(envs, twin)


def test_environments_that_have_not_started_are_copied_too() -> None:
    for name, arguments in TASKS.items():
        same(
            copy.deepcopy(gymnasium.make(ig.registered_id(name), **arguments)).reset(seed=3),
            gymnasium.make(ig.registered_id(name), **arguments).reset(seed=3),
        )
        envs = gymnasium.make_vec(ig.registered_id(name), num_envs=2, **arguments)
        same(copy.deepcopy(envs).reset(seed=3), envs.reset(seed=3))


def test_a_copied_picture_is_that_of_the_same_episode() -> None:
    env = gymnasium.make("InferenceGym/AdversarialMultiTenant-v1", render_mode="rgb_array")
    env.reset(seed=1)
    env.step(np.zeros(5, dtype=np.float32))
    np.testing.assert_array_equal(copy.deepcopy(env).render(), env.render())


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_a_limit_on_steps_truncates_as_gymnasiums_own_vector_does(name: str, mode: str) -> None:
    # Rows of the same length: they end together.
    arguments = {"num_envs": 2, "max_episode_steps": 4, **TASKS[name]}
    native = gymnasium.make_vec(ig.registered_id(name), autoreset_mode=mode, **arguments)
    vector = {"autoreset_mode": gymnasium.vector.AutoresetMode(mode)}
    plain = gymnasium.make_vec(ig.registered_id(name), vectorization_mode="sync", vector_kwargs=vector, **arguments)
    native.reset(seed=5)
    plain.reset(seed=5)
    native.action_space.seed(5)
    for _ in range(9):
        actions = native.action_space.sample()
        ours, theirs = native.step(actions), plain.step(actions)
        for one, other in zip(ours[:4], theirs[:4], strict=True):
            np.testing.assert_array_equal(one, other)
        if mode == "Disabled" and ours[3].all():
            for envs in (native, plain):
                envs.reset(options={"reset_mask": ours[3]})


def test_a_limit_below_one_step_is_refused() -> None:
    with pytest.raises(ValueError, match="max_episode_steps"):
        gymnasium.make_vec("InferenceGym/BurstyShareGPT-v1", max_episode_steps=0)


@pytest.mark.filterwarnings("ignore:.*maximum value is infinity")
@pytest.mark.parametrize("name", TASKS)
def test_gymnasiums_checker_needs_no_display(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(variable, raising=False)
    check_env(gymnasium.make(ig.registered_id(name), **TASKS[name]).unwrapped)


@pytest.mark.parametrize("name", TASKS)
def test_the_direct_bases_of_an_environment_are_gymnasiums(name: str) -> None:
    """What skrl's ``wrap_env`` goes through to recognise an environment."""
    scalar = gymnasium.make(ig.registered_id(name)).unwrapped
    assert gymnasium.Env in type(scalar).__bases__
    assert gymnasium.vector.VectorEnv in type(gymnasium.make_vec(ig.registered_id(name))).__bases__
    assert gymnasium.vector.VectorEnv in ig.HTTPVectorEnv.__bases__
