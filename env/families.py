"""Registry of environment families.

A new family is a folder in ``env/`` with its :class:`env.family.Family` record and a line here, or a plugin
(:mod:`inferencegym.plugins`).
HTTP routes, OpenEnv's protocol, Gymnasium ids, grading, verification, the leaderboard and the command line follow.
Its policies, if it has any, are a line in :data:`agents.families.PLAYERS`.
"""

from __future__ import annotations

from typing import Final

from env.family import Family
from env.rollouts import family as rollouts
from env.serving import family as serving
from env.traffic import family as traffic
from inferencegym.errors import DataFormatError, InvalidConfigError, UnknownTaskError, did_you_mean, short_repr
from inferencegym.plugins import plugins
from inferencegym.tasks import OWN_TASKS, TaskId, TaskSpec, get_task

SERVING: Final = serving.NAME
TRAFFIC: Final = traffic.NAME
ROLLOUTS: Final = rollouts.NAME

_ALL: Final = (
    serving.FAMILY,
    traffic.FAMILY,
    rollouts.FAMILY,
)
FAMILIES: Final[dict[str, Family]] = {family.name: family for family in _ALL}
"""Every family by name."""
for _plugin in plugins("families"):
    _family = _plugin.load(Family)
    if _family.name in FAMILIES:
        raise _plugin.error(f"has a family whose name is taken: {_family.name}")
    _ids = {str(task.task_id) for family in FAMILIES.values() for task in family.tasks()}
    if _taken := sorted(_ids & {str(task.task_id) for task in _family.tasks()}):
        raise _plugin.error(f"has tasks whose ids are taken: {', '.join(_taken)}")
    FAMILIES[_family.name] = _family


def family_of(task_id: TaskId, named: str | None = None) -> Family:
    """The family called ``named``, or without a name the family of the task.

    Raises :class:`UnknownTaskError` if no family has the task, and :class:`DataFormatError` for an unknown family.
    """
    if named is not None:
        if named not in FAMILIES:
            raise DataFormatError(f"family={short_repr(named)} is not allowed: it must be one of {', '.join(FAMILIES)}")
        return FAMILIES[named]
    known: list[str] = []
    for family in FAMILIES.values():
        ids = [str(task.task_id) for task in family.tasks()]
        if str(family.listed_id(task_id)) in ids:
            return family
        known += ids
    advice = did_you_mean(task_id, known, f"valid ids are {', '.join(known)}")
    raise UnknownTaskError(f"task_id={short_repr(task_id)} is not a task: {advice}. {OWN_TASKS}")


def serving_task(task_id: TaskId) -> TaskSpec:
    """The serving task of this id. Raises InvalidConfigError for another family's task, with what plays it."""
    for family in FAMILIES.values():
        gym_ids = {str(task.task_id): task.gym_id for task in family.tasks()}
        if family.name != SERVING and (gym_id := gym_ids.get(str(task_id))):
            from inferencegym.vector_env import registered_id  # imports Gymnasium, which a server does without

            raise InvalidConfigError(
                f"{task_id} is a task of the environment {family.name}, which is not played here: score its policies "
                f"with `inferencegym evaluate --task {task_id}`, and train on {registered_id(gym_id)} in Gymnasium",
                "task_id",
            )
    return get_task(task_id)
