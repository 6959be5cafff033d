"""Commands of the ``inferencegym`` command line, one module each."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from inferencegym.tasks import TaskId, TaskSpec

MAX_SEEDS: Final = 100_000


def seed_count(low: int) -> Callable[[str], int]:
    """Argparse type for a number of held-out seeds, from ``low`` to :data:`MAX_SEEDS`."""

    def parse(text: str) -> int:
        if not text.isdecimal() or len(text) > len(str(MAX_SEEDS)) or not low <= int(text) <= MAX_SEEDS:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not allowed: it must be a whole number from {low} to {MAX_SEEDS}"
            )
        return int(text)

    return parse


def serving_task(task_id: TaskId) -> TaskSpec:
    """The serving task with this id. Raises InvalidConfigError for another family's task, with what can play it."""
    from env.families import FAMILIES, SERVING
    from inferencegym.errors import InvalidConfigError
    from inferencegym.tasks import get_task
    from inferencegym.vector_env import registered_id

    for family in FAMILIES.values():
        gym_ids = {str(task.task_id): task.gym_id for task in family.tasks()}
        if family.name != SERVING and (gym_id := gym_ids.get(str(task_id))):
            raise InvalidConfigError(
                f"{task_id} is a task of the environment {family.name}, which this command does not play: score its "
                f"policies with `inferencegym evaluate --task {task_id}`, and train on {registered_id(gym_id)} in "
                "Gymnasium",
                "task_id",
            )
    return get_task(task_id)
