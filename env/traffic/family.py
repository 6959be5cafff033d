"""Family record of the traffic controller, in which an action sets the share of requests admitted each second."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from env.family import Entry, Family, Grade, GymFaces, HttpShape, TaskEntry
from env.traffic.env import TrafficEnv
from env.traffic.grader import grade_traffic, traffic_log
from env.traffic.messages import StateMessage, log_entry_schema, step_info_schema
from env.traffic.tasks import (
    DEFAULT_TASK_ID,
    TrafficConfigOverrides,
    get_traffic_task,
    list_traffic_tasks,
    traffic_config,
)
from inferencegym.tasks import TaskId
from inferencegym.traffic import TrafficAction, TrafficActionMessage

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
    description="Choose each second the share of incoming requests that one server admits.",
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
    gym=GymFaces("env.traffic.gym:TrafficGymEnv", "env.traffic.gym:VectorTrafficGymEnv"),
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
    manifest=Path(__file__).with_name("openenv.yaml"),
    about=Path(__file__).with_name("about.md"),
)
