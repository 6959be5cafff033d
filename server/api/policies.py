"""Built-in policies over HTTP: GET /policies lists them, POST /play returns a whole episode of one of them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, Final

from fastapi import Query
from starlette.requests import Request
from starlette.responses import Response

from agents.families import players_of, run_policy
from env.family import Family
from inferencegym.errors import InferenceGymError, InvalidConfigError
from inferencegym.task_registry import MAX_EPISODE_LENGTH
from inferencegym.tasks import TaskId
from server.api.route import Route, Routes
from server.context import Context, Mount
from server.net.cpu import charged
from server.net.errors import InvalidRequestError, UnknownPolicyError
from server.net.json_io import JsonBounds, gzipped, to_gzip
from server.schemas import DEFAULT_SEED, PlayAnswer, PlayRequest, PoliciesAnswer, Policy, play_request

CACHED_STEPS: Final = 200
CACHED_EPISODES: Final = 128
"""Episodes that are kept, 50 KB each with 200 steps: those of a page's visitors. Longer ones and those with their log,
up to 1.5 MB each, are played anew.
"""

PLAY_BOUNDS: Final = JsonBounds(values=8 * MAX_EPISODE_LENGTH, parts=8 * MAX_EPISODE_LENGTH)
"""Bounds of a body of POST /play: an action of each second is an object of at most six keys."""
LEFT_OUT: Final = frozenset({"observation", "metrics", "reward", "arrivals"})
"""What a brief episode has not."""


class PolicyRoutes(Routes):
    """/policies and /play of one family at one prefix; none if the family has no built-in policies."""

    def __init__(self, context: Context, mount: Mount) -> None:
        super().__init__(context, mount)
        self._players = players_of(mount.family)
        # One episode is played at a time, so that visitors' own steps stay fast.
        self._turn = asyncio.Lock()

    def routes(self) -> list[Route]:
        if self._players.make is None:
            return []
        ids = [str(task.task_id) for task in self._family.tasks()]
        task_id = Annotated[str, Query(json_schema_extra={"enum": ids})]
        named = {"task_id": (task_id, str(self._family.default_task))}
        return [
            self._post(
                "/play",
                self.play,
                "A whole episode of a built-in policy",
                types={"body": play_request(self._family)},
                response_model=PlayAnswer,
                statuses=(400, 404),
                bounds=PLAY_BOUNDS,
            ),
            self._route("/policies", self.policies, "Policies that /play knows", types=named, statuses=(400,)),
        ]

    async def play(self, request: Request, body: PlayRequest) -> Response:
        if body.agent not in (policies := self._players.policies()):
            raise InvalidRequestError("agent", body.agent, "one of " + ", ".join(policies))
        family, config = self._family, body.config or {}
        task_id = family.default_task if body.task_id is None else body.task_id
        family.check_config(task_id, config)
        if family.hold(task_id, config) != 1:
            raise InvalidRequestError("config.hold", config["hold"], "1: built-in policies act every second")
        seed = DEFAULT_SEED if body.seed is None else body.seed
        is_kept = (config.get("episode_length") or 0) <= CACHED_STEPS and not body.log and not body.actions
        chosen = (family, body.agent, task_id, seed, tuple(sorted(config.items())))

        def play() -> bytes:
            if is_kept:
                return played(*chosen)[body.brief]
            episode = play_episode(*chosen, body.actions, body.log)
            return to_gzip(shortened(episode) if body.brief else episode)

        async with charged() as work, self._turn:
            episode = await asyncio.to_thread(work.timed, play)
        return await gzipped(request, episode)

    async def policies(self, task_id: str) -> PoliciesAnswer:
        played_id, names = await asyncio.to_thread(available, self._family, task_id)
        descriptions, stored = self._players.policies(), self._players.stored()
        policies = [Policy(name=name, description=descriptions[name], stored=name in stored) for name in names]
        return PoliciesAnswer(task_id=played_id, policies=policies)


# ---------------------------------------------------------------- playing


@lru_cache(CACHED_EPISODES)
def played(
    family: Family, agent: str, task_id: TaskId, seed: int, config: tuple[tuple[str, Any], ...]
) -> tuple[bytes, bytes]:
    """A policy's episode (:func:`play_episode`) as gzipped JSON, whole and brief."""
    episode = play_episode(family, agent, task_id, seed, config)
    return to_gzip(episode), to_gzip(shortened(episode))


def shortened(episode: Mapping[str, Any]) -> dict[str, Any]:
    """An episode without the columns that a brief one has not."""
    return {name: column for name, column in episode.items() if name not in LEFT_OUT}


def play_episode(
    family: Family,
    agent: str,
    task_id: TaskId,
    seed: int,
    config: tuple[tuple[str, Any], ...],
    actions: Sequence[Any] = (),
    log: bool = False,
) -> dict[str, Any]:
    """A policy's episode, after these actions: its columns, one value per step, and its grade; ``log`` adds the log.

    Raises UnknownPolicyError for a policy that is not stored for the task.
    """
    try:
        env, seen, phases, scores = run_policy(family, agent, task_id, seed, dict(config), actions)
    except InvalidConfigError as error:
        raise UnknownPolicyError(f"there is no policy {agent!r} for task {task_id!r}: {error}") from error
    entries = env.episode_log
    return {
        "task_id": env.task_id,
        "seed": seed,
        "agent": agent,
        "steps": len(entries),
        "observation": _columns(seen),
        "action": _columns([entry["action"] for entry in entries]),
        "reward": [entry["reward"] for entry in entries],
        "metrics": _columns([entry["metrics"] for entry in entries]),
        "config": env.config_dict(),
        "phase": phases,
        **({} if family.arrivals is None else {"arrivals": family.arrivals(env)}),
        **({} if family.score_so_far is None else {"score_so_far": scores}),
        **family.grade(env.task_id, entries),
        **({"episode_log": entries} if log else {}),
    }


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in rows[0]}


def available(family: Family, task_id: TaskId) -> tuple[TaskId, list[str]]:
    """A task's id and the policies that can play it; a user's task has no stored policies until it is calibrated.

    Raises :class:`UnknownTaskError`.
    """
    players = players_of(family)
    assert players.make is not None
    env = family.make()
    env.reset(task_id=task_id)
    found = []
    for name in players.policies():
        try:
            players.make(name, env)
        except InferenceGymError:
            continue
        found.append(name)
    return env.task_id, found
