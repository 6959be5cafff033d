"""Family record of the traffic controller, in which an action sets the share of requests let through each second."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import inferencegym
from env.family import Entry, Family, Grade, GymFaces, HttpShape, TaskEntry
from env.traffic.env import TrafficEnv
from env.traffic.messages import StateMessage, log_entry_schema, step_info_schema
from grader.traffic_grader import grade_traffic, traffic_log
from inferencegym.tasks import TaskId
from inferencegym.traffic import (
    DEFAULT_TASK_ID,
    TrafficAction,
    TrafficActionMessage,
    TrafficConfigOverrides,
    get_traffic_task,
    list_traffic_tasks,
    traffic_config,
)

NAME: Final = "traffic"

_WORDS: Final = frozenset({"name", "gym_id", "difficulty", "description"})


def _action_of(message: TrafficActionMessage) -> TrafficAction:
    return TrafficAction(message.action)


def _tasks() -> Sequence[TaskEntry]:
    return [TaskEntry(task.task_id, task.gym_id, task.summary()) for task in list_traffic_tasks()]


def _grade(task_id: TaskId, entries: Sequence[Entry]) -> Grade:
    return grade_traffic(str(task_id), entries)


def _constants(task_id: TaskId) -> Mapping[str, Any]:
    rules = asdict(get_traffic_task(task_id))
    return {name: value for name, value in rules.items() if name not in _WORDS}


def _check_config(task_id: TaskId, config: Mapping[str, Any] | None) -> object:
    return traffic_config(config, get_traffic_task(task_id).config)


FAMILY: Final = Family(
    name=NAME,
    title="Traffic controller",
    description="Decide each second which share of the incoming requests to let through to one server.",
    env_name="traffic_controller",
    make=TrafficEnv,
    action_model=TrafficActionMessage,
    observation_model=StateMessage,
    config_model=TrafficConfigOverrides,
    log_entry_schema=log_entry_schema(),
    tasks=_tasks,
    default_task=DEFAULT_TASK_ID,
    grade=_grade,
    constants=_constants,
    check_config=_check_config,
    log_entries=traffic_log,
    action_of=_action_of,
    short_action="action",
    gym=GymFaces("inferencegym.gym:TrafficGymEnv", "inferencegym.gym:VectorTrafficGymEnv"),
    http=HttpShape(
        observation_key="state",
        reset_fields=("max_steps", "config"),
        state_has_observation=False,
        session_is_optional=True,
        health={"status": "ok"},
        manifest_type="text/plain",
        step_info=step_info_schema(),
    ),
    reward_range=(None, 1.0),
    manifest=Path(inferencegym.__file__).parent / "data" / "traffic_openenv.yaml",
    about=Path(__file__).with_name("about.md"),
)
