"""Registry of environment families.

A new family is a folder in ``env/`` with its :class:`env.family.Family` record and one line in :data:`FAMILIES`.
HTTP routes, OpenEnv's protocol, Gymnasium ids, grading, verification, the leaderboard and the command line follow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from agents.families import (
    SERVING_POLICIES,
    TRAFFIC_POLICIES,
    compare_serving,
    compare_traffic_agents,
    make_serving_policy,
    make_traffic_policy,
)
from env.family import Family
from env.serving import family as serving
from env.traffic import family as traffic
from inferencegym.errors import DataFormatError, UnknownTaskError, short_repr
from inferencegym.tasks import TaskId

SERVING: Final = serving.NAME
TRAFFIC: Final = traffic.NAME


def _baseline() -> Mapping[str, Any]:
    from agents.baseline import run_all_baselines

    return run_all_baselines()


FAMILIES: Final[dict[str, Family]] = {
    family.name: family
    for family in (
        replace(
            serving.FAMILY,
            policies=SERVING_POLICIES,
            make_policy=make_serving_policy,
            compare=compare_serving,
            baseline=_baseline,
        ),
        replace(
            traffic.FAMILY,
            policies=TRAFFIC_POLICIES,
            make_policy=make_traffic_policy,
            compare=compare_traffic_agents,
        ),
    )
}
"""Every family by name. The two built-in ones get their agents here, since agents know environments and not the other
way round."""


def family_of(task_id: TaskId, named: str | None = None) -> Family:
    """The family called ``named``, or without a name the family of the task.

    Raises :class:`UnknownTaskError` if no family has the task, and :class:`DataFormatError` for an unknown family.
    """
    if named is not None:
        if named not in FAMILIES:
            raise DataFormatError(f"family={short_repr(named)} is not allowed: it must be one of {', '.join(FAMILIES)}")
        return FAMILIES[named]
    known = {str(task.task_id): family for family in reversed(FAMILIES.values()) for task in family.tasks()}
    if str(task_id) not in known:
        raise UnknownTaskError(f"task_id={short_repr(task_id)} is not a task: valid ids are {', '.join(known)}")
    return known[str(task_id)]
