"""Built-in policies over HTTP: GET /policies lists them, POST /play returns a whole episode of one of them.

An episode of 200 steps takes a few milliseconds. It is played on a thread at the first request and cached: the same
task, seed, settings and policy always give the same episode.
"""

from __future__ import annotations

import asyncio
import gzip
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Annotated, Any, Final

from fastapi import Query
from starlette.requests import Request
from starlette.responses import Response

from agents.families import players_of, run_policy
from env.family import Family
from inferencegym.errors import InferenceGymError, InvalidConfigError
from inferencegym.tasks import TaskId
from server.api.route import BodyLimits, Route
from server.context import Context, Mount
from server.net.errors import InvalidRequestError, UnknownPolicyError
from server.net.json_io import JsonReply, to_json
from server.schemas import DEFAULT_SEED, PlayAnswer, PlayRequest, PoliciesAnswer, Policy, play_request

AT_ONCE: Final = 1
"""Episodes played at the same time; others wait, so that visitors' own steps stay fast."""
STEPS_PER_PLAY: Final = 200
"""A longer episode counts as several against the limit of plays per minute."""
PATH: Final = "/play"
CACHED_BYTES: Final = 8_000_000

Answer = dict[str, Any]


class EpisodeCache:
    """LRU cache of compressed answers, bounded in bytes."""

    def __init__(self, limit_bytes: int = CACHED_BYTES) -> None:
        self._limit = limit_bytes
        self._size = 0
        self._answers: OrderedDict[str, bytes] = OrderedDict()
        self._slots = asyncio.Semaphore(AT_ONCE)

    async def get(self, key: str, play: Callable[[], Answer]) -> bytes:
        """Gzipped JSON of ``play()``, from the cache or played on a thread."""
        if key in self._answers:
            self._answers.move_to_end(key)
            return self._answers[key]
        async with self._slots:
            answer = await asyncio.to_thread(compressed, play)
        if key not in self._answers:
            self._answers[key] = answer
            self._size += len(answer)
        while self._size > self._limit:
            self._size -= len(self._answers.popitem(last=False)[1])
        return answer


def compressed(play: Callable[[], Answer]) -> bytes:
    """The gzipped JSON of what ``play`` returns."""
    return gzip.compress(to_json(play()), 5, mtime=0)


class PolicyRoutes:
    """/policies and /play of one family at one prefix."""

    def __init__(self, context: Context, mount: Mount) -> None:
        self._context = context
        self._settings = context.settings
        self._family = mount.family
        self._players = players_of(mount.family)
        self._prefix = mount.prefix
        self._cache = EpisodeCache()

    def routes(self) -> list[Route]:
        """Routes of these endpoints; empty if the family has no built-in policies."""
        if self._players.make is None:
            return []
        ids = [str(task.task_id) for task in self._family.tasks()]
        task_id = Annotated[str, Query(json_schema_extra={"enum": ids})]
        tags = [self._family.name]
        return [
            Route(
                self._prefix + PATH,
                self.play,
                "A whole episode of a built-in policy",
                method="POST",
                limits=BodyLimits(self._settings.max_body_bytes, self._settings.body_timeout_s),
                types={"body": play_request(self._family)},
                response_model=PlayAnswer,
                statuses=(400, 404),
                tags=tags,
            ),
            Route(
                self._prefix + "/policies",
                self.policies,
                "Policies that /play knows",
                types={"task_id": (task_id, str(self._family.default_task))},
                statuses=(400,),
                tags=tags,
            ),
        ]

    async def play(self, request: Request, body: PlayRequest) -> Response:
        if body.agent not in (policies := self._players.policies()):
            raise InvalidRequestError("agent", body.agent, "one of " + ", ".join(policies))
        episode = PlayedEpisode(
            self._family,
            body.agent,
            self._family.default_task if body.task_id is None else body.task_id,
            DEFAULT_SEED if body.seed is None else body.seed,
            body.config or {},
            body.log,
        )
        self._family.check_config(episode.task_id, episode.config)
        if self._family.hold(episode.task_id, episode.config) != 1:
            raise InvalidRequestError("config.hold", episode.config["hold"], "1: built-in policies act every second")
        # The middleware has counted one play before its length was known.
        n_plays = ceil((episode.config.get("episode_length") or 1) / STEPS_PER_PLAY)
        if n_plays > 1:
            self._context.limits.take(PATH, request.scope, n_plays - 1)
        return gzipped(request, await self._cache.get(episode.key(), episode.play))

    async def policies(self, task_id: str) -> PoliciesAnswer:
        played_id, names = await asyncio.to_thread(available, self._family, task_id)
        descriptions, stored = self._players.policies(), self._players.stored()
        policies = [Policy(name=name, description=descriptions[name], stored=name in stored) for name in names]
        return PoliciesAnswer(task_id=played_id, policies=policies)


def gzipped(request: Request, body: bytes) -> JsonReply:
    """A gzipped JSON answer, decompressed for clients that do not accept gzip."""
    vary = (b"vary", b"accept-encoding")
    accepted = request.headers.get("accept-encoding", "")
    if "gzip" in accepted and "gzip;q=0" not in accepted.replace(" ", ""):
        return JsonReply(body, headers=[(b"content-encoding", b"gzip"), vary])
    return JsonReply(gzip.decompress(body), headers=[vary])


# ---------------------------------------------------------------- playing


@dataclass(frozen=True, slots=True)
class PlayedEpisode:
    """Request for a whole episode of a built-in policy."""

    family: Family
    agent: str
    task_id: TaskId
    seed: int
    config: Mapping[str, Any]
    log: bool

    def key(self) -> str:
        """Cache key: equal for requests of the same episode."""
        parts = (self.family.name, str(self.task_id), self.seed, self.agent, sorted(self.config.items()), self.log)
        return json.dumps(parts, default=str)

    def play(self) -> Answer:
        """Play the episode; returns its columns, one value per step, and its grade. Runs on a thread."""
        family = self.family
        try:
            env, seen, phases, scores = run_policy(family, self.agent, self.task_id, self.seed, self.config)
        except InvalidConfigError as error:
            raise UnknownPolicyError(f"there is no policy {self.agent!r} for task {self.task_id!r}: {error}") from error
        log = env.episode_log
        episode: Answer = {
            "task_id": env.task_id,
            "seed": self.seed,
            "agent": self.agent,
            "steps": len(log),
            "observation": _columns(seen),
            "action": _columns([entry["action"] for entry in log]),
            "reward": [entry["reward"] for entry in log],
            "metrics": _columns([entry["metrics"] for entry in log]),
            "config": env.config_dict(),
            "phase": phases,
            **({} if family.arrivals is None else {"arrivals": family.arrivals(env)}),
            **({} if family.score_so_far is None else {"score_so_far": scores}),
            **family.grade(env.task_id, log),
        }
        return {**episode, "episode_log": log} if self.log else episode


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
