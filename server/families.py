"""The environment families that this server plays: serving fleets, and the traffic controller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

from env.inference_env import InferenceEnv
from env.traffic_env import TrafficEnv
from grader.verify import Replayed
from inferencegym.models import ServeAction
from inferencegym.tasks import TaskId
from inferencegym.traffic import parse_action
from server.session_manager import Family
from simulator.tables import ServingTables, load_tables

SERVING: Final = "serving"
TRAFFIC: Final = "traffic"


class ServedInferenceEnv(InferenceEnv):
    """:class:`InferenceEnv` over the table that the server has loaded without the parquet library."""

    def __init__(self) -> None:
        super().__init__(tables=served_tables())

    @property
    def episode_log(self) -> list[dict[str, Any]]:
        """The episode so far, one entry per step."""
        return self._episode_log


@lru_cache(maxsize=1)
def served_tables() -> ServingTables:
    """The lookup table, read once in a child process, so that the parquet library never enters this one."""
    return load_tables(isolated=True)


def _parse_serving(action: Any) -> dict[str, Any]:
    return ServeAction.from_dict(action).to_dict()


def _parse_traffic(action: Any) -> dict[str, Any]:
    return {"action": parse_action(action).value}


FAMILIES: Final[dict[str, Family]] = {
    SERVING: Family(SERVING, ServedInferenceEnv, _parse_serving),
    TRAFFIC: Family(TRAFFIC, TrafficEnv, _parse_traffic),
}


def replay_serving(
    task_id: TaskId, seed: int, config: Mapping[str, Any] | None, actions: Sequence[Mapping[str, Any]]
) -> Replayed:
    """Play a serving episode again: the ``replay`` of :func:`grader.verify.verify_log`."""
    env = ServedInferenceEnv()
    env.reset(seed=seed, task_id=task_id, config=config)
    for action in actions:
        env.step(action)
    return Replayed(env.episode_log, env.done, env.config.episode_length)
