"""The environment families that this server plays: serving fleets, and the traffic controller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

from env.episode import EpisodeEnv
from env.families import make
from grader.verify import Replayed
from inferencegym.models import ACTION_FIELDS, ServeAction
from inferencegym.tasks import TaskId
from inferencegym.traffic import TrafficAction, parse_action
from server.sessions.manager import ServedFamily
from simulator.tables import ServingTables, load_tables

SERVING: Final = "serving"
TRAFFIC: Final = "traffic"
PREFIXES: Final = ("", "/traffic", "/serving")
"""Where environments may be served."""


@lru_cache(maxsize=1)
def served_tables() -> ServingTables:
    """The lookup table, read once in a child process, so that the parquet library never enters this one."""
    return load_tables(isolated=True)


def _parse_serving(action: Any) -> tuple[ServeAction, Sequence[Any]]:
    knobs = ServeAction.from_dict(action)
    tier = knobs.quant_tier.value
    return knobs, (knobs.kv_budget, knobs.spec_length, knobs.batch_size, knobs.prefill_disagg, tier)


def _parse_traffic(action: Any) -> tuple[TrafficAction, Sequence[Any]]:
    parsed = parse_action(action)
    return parsed, (parsed.value,)


def _make_serving() -> EpisodeEnv:
    return make(SERVING, tables=served_tables())


def _make_traffic() -> EpisodeEnv:
    return make(TRAFFIC)


FAMILIES: Final[dict[str, ServedFamily]] = {
    SERVING: ServedFamily(SERVING, _make_serving, _parse_serving, tuple(ACTION_FIELDS)),
    TRAFFIC: ServedFamily(TRAFFIC, _make_traffic, _parse_traffic, ("action",)),
}


def replay_serving(
    task_id: TaskId, seed: int, config: Mapping[str, Any] | None, actions: Sequence[Mapping[str, Any]]
) -> Replayed:
    """Play a serving episode again: the ``replay`` of :func:`grader.verify.verify_log`."""
    env = _make_serving()
    env.reset(seed=seed, task_id=task_id, config=config)
    for action in actions:
        env.step(action)
    return Replayed(env.episode_log, env.done, env.config_dict()["episode_length"])
