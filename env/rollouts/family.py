"""Family record of the rollouts environment, in which an action caps the agent sessions in flight on one engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import pydantic

from env.family import Family, GymCodec, HttpShape, TaskEntry
from env.rollouts.env import RolloutEnv
from env.rollouts.grader import SCORED, grade_rollout
from env.rollouts.tasks import (
    DEFAULT_TASK_ID,
    RolloutConfig,
    get_rollout_task,
    rollout_config,
    rollout_tasks,
    task_constants,
)
from grader.episode import MAX_METRIC
from inferencegym.messages import plain_schema
from inferencegym.models import bounds
from inferencegym.rollouts import MAX_SESSIONS, OBSERVATION_FIELDS, RolloutAction
from inferencegym.tasks import TaskId

NAME: Final = "rollouts"

_FIELDS: Final[dict[str, Any]] = {name: (Annotated[float, bounds(f)], ...) for name, f in OBSERVATION_FIELDS.items()}
ObservationMessage = pydantic.create_model("ObservationMessage", **_FIELDS)
"""What an engine's /metrics and a gateway know."""


def _numbers(names: Sequence[str]) -> dict[str, Any]:
    return {name: {"type": "number", "minimum": 0, "maximum": MAX_METRIC} for name in names}


def _log_entry_schema() -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            "timestep": {"type": "integer", "minimum": 1},
            "action": plain_schema(RolloutAction),
            "reward": {"description": "compared with the replay when the log is verified"},
            "metrics": {"type": "object", "properties": _numbers(SCORED), "required": list(SCORED)},
        },
        "required": ["timestep", "action", "metrics"],
    }


def _step_info_schema() -> dict[str, Any]:
    properties = _numbers(("episode_step", *SCORED, "score"))
    words = {"breakdown": {"type": "object"}, "feedback": {"type": "string"}}
    return {"type": "object", "properties": properties | words, "required": ["episode_step", *SCORED]}


def _tasks() -> Sequence[TaskEntry]:
    return [TaskEntry(task.task_id, task.entry.gym_id, task.summary()) for task in rollout_tasks().values()]


def _constants(task_id: TaskId) -> Mapping[str, Any]:
    return task_constants(get_rollout_task(task_id))


def _check_config(task_id: TaskId, config: Mapping[str, Any] | None) -> object:
    task, checked = get_rollout_task(task_id), rollout_config(config)
    return task.task_id, checked.episode_length or task.entry.episode_length, checked.kv_pool_tokens


def _action_space() -> Any:
    from gymnasium import spaces  # a server that makes no arrays goes without

    return spaces.Discrete(MAX_SESSIONS)


def _decode(action: Any) -> int:
    """The cap is the action plus one: Stable-Baselines3 takes only spaces that start at 0."""
    return int(action) + 1


def _observation_space() -> Any:
    from gymnasium import spaces

    fields = OBSERVATION_FIELDS.values()
    low, high = ([getattr(field, name) for field in fields] for name in ("low", "high"))
    return spaces.Box(np.array(low, np.float32), np.array(high, np.float32), dtype=np.float32)


def _encode(seen: Mapping[str, float]) -> Any:
    return np.fromiter(seen.values(), np.float32, len(seen))


FAMILY: Final = Family(
    name=NAME,
    title="Rollouts",
    description="Decide each second how many agent sessions may be in flight on one engine with a prefix cache.",
    env_name="agent_sessions",
    make=RolloutEnv,
    action_model=RolloutAction,
    observation_model=ObservationMessage,
    config_model=RolloutConfig,
    log_entry_schema=_log_entry_schema(),
    tasks=_tasks,
    default_task=DEFAULT_TASK_ID,
    grade=grade_rollout,
    constants=_constants,
    check_config=_check_config,
    short_action="max_sessions",
    gym=GymCodec(
        action_space=_action_space,
        observation_space=_observation_space,
        encode=_encode,
        decode=_decode,
    ),
    http=HttpShape(step_info=_step_info_schema()),
    reward_range=(-1.0, 1.0),
    manifest=Path(__file__).with_name("openenv.yaml"),
    about=Path(__file__).with_name("about.md"),
)
