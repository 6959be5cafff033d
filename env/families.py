"""The environment families that this house serves."""

from __future__ import annotations

from typing import Any, Final

from env.episode import EpisodeEnv, EpisodeRecord, Family
from env.inference_env import InferenceEnv
from env.traffic.env import TrafficEnv
from inferencegym.errors import InvalidConfigError


def _serving(**options: Any) -> EpisodeEnv:
    return InferenceEnv(**options)


def _traffic(**options: Any) -> EpisodeEnv:
    return TrafficEnv()


FAMILIES: Final[dict[str, Family]] = {
    "serving": Family("serving", _serving),
    "traffic": Family("traffic", _traffic),
}


def make(family: str, **options: Any) -> EpisodeEnv:
    """An episode of a family, not yet reset; ``options`` go to its constructor."""
    if family not in FAMILIES:
        raise InvalidConfigError(f"family {family!r} is unknown: one of {', '.join(FAMILIES)}")
    return FAMILIES[family].make(**options)


def replay(record: EpisodeRecord, **options: Any) -> EpisodeEnv:
    """Play a record again; the result is the episode that it records, to the last bit."""
    env = make(record.family, **options)
    env.reset(seed=record.seed, task_id=record.task_id, config=record.config)
    for action in record.actions:
        env.step(action)
    return env
